r"""Changes things one at a time, trains each with several seeds, and says which of them helped.

    python -m gpt2.ablate --config=configs/quickstart.py --vary=optim.name=adamw,muon --seeds=3 \
        --workdir=ablations/muon

The same command continues a sweep that was stopped, tries again what failed, and adds what is new:
more seeds, more values. `--report` writes the report of what there is so far.
"""

from gpt2 import launch

if __name__ == "__main__":
    launch.prepare_process()

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.ablate.arms import Arm, describe_warmup, make_arms, read_tuned, varied_options
from gpt2.ablate.equal import (
    TERMS,
    choose_score,
    describe_undone,
    equalize,
    refuse_undone,
    step_flops,
)
from gpt2.ablate.jobs import Slot, Stopped, make_slots, train_all
from gpt2.ablate.measure import describe_runs, measure
from gpt2.ablate.report import write_report
from gpt2.ablate.runs import Run, describe
from gpt2.ablate.scaling import at_sizes
from gpt2.ablate.screen import Screen
from gpt2.ablate.sweep import LEAST_SEEDS, Sweep, continued, load_sweep, register
from gpt2.ablate.sweep import MAX_SEEDS as MOST_SEEDS
from gpt2.ablate.tables import judge
from gpt2.ablate.verdicts import widest
from gpt2.config import Config, DataConfig, holds_run
from gpt2.data.dataset import prepare
from gpt2.errors import UserError, require_writable, warn
from gpt2.utils import files
from gpt2.utils.terminal import wrap
from gpt2.utils.text import counted

WORKDIR = flags.DEFINE_string("workdir", None, "Where the sweep lives.")
VARY = flags.DEFINE_multi_string(
    "vary", [], "OPTION=VALUE,... or recipe=FILE,...; several make a grid."
)
ONE_AT_A_TIME = flags.DEFINE_bool("one_at_a_time", False, "Each value by itself, not a grid.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each arm.", lower_bound=1)
JOBS = flags.DEFINE_integer(
    "jobs", 1, "Runs at once: an accelerator each, or a share of the cores.", lower_bound=1
)
INDEX = flags.DEFINE_integer(
    "index", None, "Trains one run of the list that --dry_run prints, for array jobs."
)
SCALING = flags.DEFINE_list(
    "scaling", [], "LAYERSxWIDTH,...: all arms at three sizes or more, tokens in proportion."
)
EQUAL = flags.DEFINE_enum("equal", "tokens", TERMS, "What all arms get alike.")
TUNE = flags.DEFINE_multi_string(
    "tune", [], "OPTION=VALUE,...: each arm first chooses among these values."
)
TUNE_SEEDS = flags.DEFINE_integer("tune_seeds", 1, "Runs of each choice.", lower_bound=1)
LEAVE_FAILED = flags.DEFINE_bool(
    "leave_failed", False, "Chooses without values whose runs fail, instead of waiting for them."
)
PAIRED = flags.DEFINE_bool("paired", False, "Compares seed by seed. To be decided before the runs.")
UNTIL = flags.DEFINE_float(
    "until", 0.0, "Adds seeds until no interval reaches further to either side.", lower_bound=0.0
)
MAX_SEEDS = flags.DEFINE_integer(
    "max_seeds", MOST_SEEDS, "Where --until gives up.", lower_bound=LEAST_SEEDS
)
DRY_RUN = flags.DEFINE_bool(
    "dry_run",
    False,
    "Prints the runs and what they would take, by short runs that it leaves in WORKDIR/measure.",
)
REPORT = flags.DEFINE_bool("report", False, "Only writes the report of what there is so far.")

# Flags that each way to call the program would ignore.
_REPORT_IGNORES = (
    *("vary", "one_at_a_time", "seeds", "jobs", "index", "scaling", "equal", "tune"),
    *("tune_seeds", "leave_failed", "paired", "until", "max_seeds", "dry_run"),
)
_IGNORED = {
    "dry_run": ("index",),
    "index": ("jobs", "until", "max_seeds"),
}


def main() -> int:
    """Trains a sweep phase by phase, writes its report, and returns the exit code."""
    root = _check_flags()
    if REPORT.value:
        sweep = load_sweep(root).with_choices()
        sweep.check()
        return _report(sweep)
    try:
        return _sweep(root)
    except Stopped as stopped:
        print(f"stopped by {stopped}; the same command continues")
        return 128 + stopped.signal


def _sweep(root: Path) -> int:
    # Options: checked before anything is trained.
    config, slots = cli.parse_config(), make_slots(JOBS.value)
    refuse_undone(varied_options(VARY.value), EQUAL.value)
    arms = make_arms(config, VARY.value, one_at_a_time=ONE_AT_A_TIME.value)
    if len(arms) == 1 and not SCALING.value:
        raise UserError("--vary gives the baseline alone", "Name another value")
    score, tune = choose_score(arms), read_tuned(TUNE.value, varied_options(VARY.value))

    # Terms: made equal, which may take measured steps.
    vocab_size = _vocabularies(arms)
    scaled = at_sizes(arms, SCALING.value, vocab_size) if SCALING.value else arms
    if INDEX.value is None:
        root.mkdir(parents=True, exist_ok=True)
        if not files.lock_for_good(root / ".lock"):
            raise UserError(f"another sweep trains in {root}", "Wait for it, or stop it")
    sweep = Sweep(
        root=root,
        commands=[shlex.join(["python", "-m", "gpt2.ablate", *_arguments()])],
        arms=tuple(_on_equal_terms(root, arms, scaled, vocab_size, slots[0])),
        score=score,
        equal=EQUAL.value,
        paired=PAIRED.value,
        num_seeds=SEEDS.value,
        tune=tune,
        num_tune_seeds=TUNE_SEEDS.value,
        until=UNTIL.value,
        max_seeds=MAX_SEEDS.value,
        first_num_seeds=SEEDS.value,
    )
    if note := describe_warmup(config):
        warn(note)
    if DRY_RUN.value:
        sweep = continued(sweep).with_choices(leave_failed=LEAVE_FAILED.value)
        print(describe_runs(sweep, slots))
        return 0
    sweep = register(sweep)
    if sweep.num_seeds > SEEDS.value:
        print(f"the sweep has {sweep.num_seeds} seeds already, which all count")
    if sweep.num_seeds == 1:
        warn("with one seed there are no verdicts, since nothing tells the noise; see --seeds")
    if INDEX.value is not None:
        if LEAVE_FAILED.value and INDEX.value >= len(sweep.choosing_runs()):
            sweep = register(sweep, leave_failed=True)
        return _train_one(sweep, INDEX.value)

    # Runs: first those that choose values, then those that are compared.
    def step_cost(config: Config) -> float:
        return step_flops(config.with_vocabulary(vocab_size(config)))

    if undecided := sweep.undecided_runs():
        first, then = len(undecided), len(sweep.arms) * sweep.num_seeds
        print(
            f"{counted(first, 'run')} to tune, then {counted(then, 'run')} to compare; "
            "--dry_run says how long they take"
        )
    _train(sweep, undecided, slots, "tuning", step_cost)
    sweep = register(sweep, leave_failed=LEAVE_FAILED.value)
    for name, choice in sweep.chosen.items() if sweep.tune else ():
        print(f"{name} takes {describe(choice) if choice else 'part no more: no choice works'}")
    for arm in sweep.arms:
        if arm.name not in sweep.chosen:
            _tell_of_waiting(arm.name, sweep)
    _train(sweep, sweep.runs(), slots, "comparing", step_cost)
    while _wants_seeds(sweep):
        sweep = register(sweep.with_seeds(sweep.num_seeds + 1))
        _train(sweep, sweep.runs(), slots, "comparing", step_cost)
    return _report(sweep)


def _arguments() -> list[str]:
    """Returns the arguments of the sweep's command, without the number of an array's job."""
    return [each for each in sys.argv[1:] if not re.match("--?index(=|$)", each)]


def _check_flags() -> Path:
    """Refuses flags that would be ignored, and returns the workdir."""
    if not WORKDIR.value:
        raise UserError("there is no --workdir", "Name a directory for the sweep")
    if REPORT.value:
        given = [f"--{name}" for name in _REPORT_IGNORES if flags.FLAGS[name].present]
        if given := given + [f"--config.{option}" for option in cli.overrides()]:
            raise UserError(
                f"--report trains nothing, and would ignore {', '.join(given)}",
                f"Use python -m gpt2.ablate --report --workdir={WORKDIR.value}",
            )
    for mode, ignored in _IGNORED.items():
        if flags.FLAGS[mode].present:
            for name in ignored:
                cli.refuse_ignored(name, f"--{mode} does not train the sweep")
    if REPORT.value:
        return Path(WORKDIR.value)
    root = Path(WORKDIR.value)
    if not (VARY.value or SCALING.value):
        how = "For example, use --vary=optim.name=adamw,muon"
        if (root / "sweep.json").exists():
            how = f"Repeat the command of the sweep in {root}, or write its report by --report"
        raise UserError("there is no --vary", how)
    if not UNTIL.value:
        cli.refuse_ignored("max_seeds", "it ends --until")
    elif not LEAST_SEEDS <= SEEDS.value <= MAX_SEEDS.value:
        raise UserError(
            f"--until adds to --seeds={SEEDS.value}, up to --max_seeds={MAX_SEEDS.value}",
            f"Begin with {LEAST_SEEDS} seeds or more, and end with more",
        )
    if not TUNE.value:
        cli.refuse_ignored("tune_seeds", "nothing is tuned")
        cli.refuse_ignored("leave_failed", "nothing is tuned")
    require_writable("workdir", root)
    if holds_run(root) and not (root / "sweep.json").exists():
        raise UserError(f"--workdir={root} is the folder of a run", "Name another for the sweep")
    return root


def _vocabularies(arms: Sequence[Arm]) -> Callable[[Config], int]:
    """Prepares all arms' corpora, and returns how many tokens a config's tokenizer has."""
    sizes: dict[DataConfig, int] = {}

    def vocab_size(config: Config) -> int:
        if config.data not in sizes:
            sizes[config.data] = prepare(config.data).tokenizer.vocab_size
        return sizes[config.data]

    for arm in arms:
        vocab_size(arm.config)
    return vocab_size


def _on_equal_terms(
    root: Path,
    arms: list[Arm],
    scaled: list[Arm],
    vocab_size: Callable[[Config], int],
    slot: Slot,
) -> list[Arm]:
    """Returns arms on the terms of `--equal`.

    Args:
        root: workdir of the sweep.
        arms: as they were made.
        scaled: the same at all sizes, whose terms are made equal size by size.
        vocab_size: the number of tokens of a config's tokenizer.
        slot: to measure steps in.
    """
    equal: list[Arm] = []
    for start in range(0, len(scaled), len(arms)):
        equal += equalize(
            scaled[start : start + len(arms)],
            EQUAL.value,
            vocab_size=vocab_size,
            step_seconds=lambda arm: measure(root, arm, slot, EQUAL.value).step,
        )
    for i, arm in enumerate(equal):
        for other in equal[:i]:
            if arm.config == other.config:
                raise UserError(
                    f"on equal terms {arm.name} is the same as {other.name}", "Leave it out"
                )
    for note in describe_undone(arms, equal):
        warn(note)
    return equal


def _train(
    sweep: Sweep,
    runs: list[Run],
    slots: list[Slot],
    title: str,
    step_cost: Callable[[Config], float],
) -> None:
    if not runs:
        return
    with Screen(sweep, runs, title, step_cost) as screen:
        train_all(runs, slots, screen.show)


def _train_one(sweep: Sweep, index: int) -> int:
    """Trains the run of `--index`, as an array job does, and returns its exit code."""
    run = sweep.numbered_run(index)
    train_all([run], make_slots(1), lambda training: None)
    outcome = run.outcome()
    print(f"{run.label}: {outcome.state} {outcome.error}".rstrip())
    return 0 if outcome.state in ("finished", "diverged") else 1


def _wants_seeds(sweep: Sweep) -> bool:
    if not sweep.until or sweep.num_seeds >= sweep.max_seeds:
        return False
    if any(arm.name not in sweep.chosen for arm in sweep.arms):
        return False  # a run that chooses failed, and its arm has no interval yet
    return widest(judge(sweep, sweep.results())) > sweep.until


def _tell_of_waiting(arm: str, sweep: Sweep) -> None:
    """Says why an arm has no choice yet."""
    runs = [run for run in sweep.undecided_runs() if run.arm == arm]
    failed = [run for run in runs if run.outcome().state == "failed"]
    if not failed:  # another job trains them, or has just ended them
        print(f"{arm} waits for runs that choose its values")
        return
    text = (
        f"{failed[0].label} failed ({failed[0].outcome().error}); see {failed[0].folder}/log.txt."
    )
    how = "The same command tries again."
    if len(failed) < len(runs):
        how += " With --leave_failed it chooses without such values"
    print(wrap(f"{arm} waits: {text} {how}"))


def _report(sweep: Sweep) -> int:
    """Writes the report, prints its verdicts, and returns 1 if a run of a whole sweep failed."""
    try:
        verdicts = write_report(sweep)
    except OSError as error:
        raise UserError(
            f"the report cannot be written to {sweep.root} ({error.strerror})",
            "Make room, and repeat with --report",
        ) from error
    print(verdicts)
    print(wrap(f"\nsee report.html, report.md and results.csv in {sweep.root}"))
    states: list[str] = [run.outcome().state for run in (*sweep.undecided_runs(), *sweep.runs())]
    for state, words in (("failed", "failed, see the report"), ("waiting", "still to come")):
        if number := states.count(state):
            print(f"{counted(number, 'run')} {words}")
    return 0 if REPORT.value else int("failed" in states or "waiting" in states)


if __name__ == "__main__":
    cli.parse(cli.define_config, default_config="quickstart")
    cli.run(main)
