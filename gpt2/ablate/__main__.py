r"""Changes things one at a time, trains each with several seeds, and says which of them helped.

    python -m gpt2.ablate --config=configs/quickstart.py --vary=optim.name=adamw,muon --seeds=3 \
        --workdir=ablations/muon

The same command continues a sweep that was stopped, tries again what failed, and adds what is new:
more seeds, more values. `--report` writes the report of what there is so far.
"""

from gpt2 import launch

if __name__ == "__main__":
    launch.prepare_process()

import shlex
import sys
from pathlib import Path
from statistics import median

from absl import flags

from gpt2 import cli
from gpt2.ablate.arms import Arm, make_arms, read_axis
from gpt2.ablate.equal import TERMS, choose_score, equalize
from gpt2.ablate.jobs import Stopped, make_slots, train_all
from gpt2.ablate.report import write_report
from gpt2.ablate.runs import Run, make_measuring_run
from gpt2.ablate.scaling import at_sizes
from gpt2.ablate.screen import Screen
from gpt2.ablate.sweep import Sweep, continued, load_sweep
from gpt2.ablate.tables import judge
from gpt2.ablate.verdicts import widest
from gpt2.config import Config
from gpt2.data.dataset import prepare
from gpt2.errors import UserError, require_writable
from gpt2.telemetry.metrics import read_metrics
from gpt2.utils import files
from gpt2.utils.text import counted, format_duration

CONFIG = cli.define_config()
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
    "scaling", [], "LAYERSxWIDTH,...: all arms at these sizes, with tokens in proportion."
)
EQUAL = flags.DEFINE_enum("equal", "tokens", TERMS, "What all arms get alike.")
TUNE = flags.DEFINE_multi_string(
    "tune", [], "OPTION=VALUE,...: each arm first chooses among these values."
)
TUNE_SEEDS = flags.DEFINE_integer("tune_seeds", 1, "Runs of each choice.", lower_bound=1)
PAIRED = flags.DEFINE_bool("paired", False, "Compares seed by seed. To be decided before the runs.")
UNTIL = flags.DEFINE_float(
    "until", 0.0, "Adds seeds until no interval reaches further to either side.", lower_bound=0.0
)
MAX_SEEDS = flags.DEFINE_integer("max_seeds", 20, "Where --until gives up.", lower_bound=2)
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Prints the runs and what they would take.")
REPORT = flags.DEFINE_bool("report", False, "Only writes the report of what there is so far.")

_MEASURED_STEPS = 40


def main() -> int:
    """Trains a sweep phase by phase, writes its report, and returns the exit code."""
    root = _workdir()
    if REPORT.value:
        return _report(load_sweep(root))

    # Options: checked before anything is trained.
    sweep = continued(_read_sweep(root))
    slots = make_slots(JOBS.value)
    sweep.check()
    if DRY_RUN.value:
        return _dry_run(sweep)
    root.mkdir(parents=True, exist_ok=True)
    if INDEX.value is not None:
        return _train_one(sweep, INDEX.value)
    if not files.lock_for_good(root / ".lock"):
        raise UserError(f"another sweep trains in {root}", "Wait for it, or stop it")
    sweep.save()

    # Runs: first those that choose values, then those that are compared.
    try:
        _train(sweep, sweep.choosing_runs(), slots, "choosing")
        _train(sweep, sweep.runs(), slots, "comparing")
        while _wants_seeds(sweep):
            sweep = sweep.with_seeds(sweep.num_seeds + 1)
            sweep.save()
            _train(sweep, sweep.runs(), slots, "comparing")
    except Stopped as stopped:
        _report(sweep)
        print(f"stopped by {stopped}; the same command continues")
        return 128 + stopped.signal
    return _report(sweep)


def _workdir() -> Path:
    if not WORKDIR.value:
        raise UserError("there is no --workdir", "Name a directory for the sweep")
    if REPORT.value:
        for name in ("vary", "seeds", "jobs", "index", "equal", "tune", "tune_seeds", "paired"):
            cli.refuse_ignored(name, "--report reads what the sweep was")
        return Path(WORKDIR.value)
    if not (VARY.value or SCALING.value):
        raise UserError("there is no --vary", "For example, use --vary=optim.name=adamw,muon")
    if UNTIL.value and SEEDS.value < 2:
        raise UserError("--until needs a deviation, and --seeds=1 has none", "Use --seeds=2")
    if not UNTIL.value:
        cli.refuse_ignored("max_seeds", "it ends --until")
    if not TUNE.value:
        cli.refuse_ignored("tune_seeds", "nothing is tuned")
    require_writable("workdir", Path(WORKDIR.value))
    return Path(WORKDIR.value)


def _read_sweep(root: Path) -> Sweep:
    """Returns what the flags ask for, on equal terms. Prepares corpora that are not yet."""
    arms = make_arms(cli.parse_config(CONFIG), VARY.value, one_at_a_time=ONE_AT_A_TIME.value)
    if len(arms) == 1 and not SCALING.value:
        raise UserError("--vary gives the baseline alone", "Name another value")
    score = choose_score(arms)
    vocab_sizes: dict = {}

    def vocab_size(config: Config) -> int:
        if config.data not in vocab_sizes:
            vocab_sizes[config.data] = prepare(config.data).tokenizer.vocab_size
        return vocab_sizes[config.data]

    for arm in arms:
        vocab_size(arm.config)  # before the first run, for all runs
    groups = [arms]
    if SCALING.value:
        scaled = at_sizes(arms, SCALING.value, vocab_size)
        groups = [scaled[i : i + len(arms)] for i in range(0, len(scaled), len(arms))]
    equal = [
        arm
        for group in groups
        for arm in equalize(
            group,
            EQUAL.value,
            vocab_size=vocab_size,
            step_seconds=lambda arm: _step_seconds(root, arm),
        )
    ]
    tune = {}
    for text in TUNE.value:
        values = [dict(value.options) for value in read_axis(text, flag="tune")]
        if any(len(each) != 1 for each in values):
            raise UserError(f"--tune={text} sets several options", "Use one --tune for each")
        tune[text.partition("=")[0]] = [next(iter(each.values())) for each in values]
    return Sweep(
        root=root,
        command=shlex.join(["python", "-m", "gpt2.ablate", *sys.argv[1:]]),
        arms=tuple(equal),
        score=score,
        equal=EQUAL.value,
        paired=PAIRED.value,
        num_seeds=SEEDS.value,
        tune=tune,
        num_tune_seeds=TUNE_SEEDS.value,
        until=UNTIL.value,
    )


def _train(sweep: Sweep, runs: list[Run], slots: list, title: str) -> None:
    if not runs:
        return
    with Screen(sweep, runs, title) as screen:
        train_all(runs, slots, screen.show)


def _train_one(sweep: Sweep, index: int) -> int:
    """Trains the run of `--index`, as an array job does, and returns its exit code."""
    sweep.save()
    runs = _all_runs(sweep)
    if not 0 <= index < len(runs):
        raise UserError(
            f"--index={index} is not one of the sweep's {counted(len(runs), 'run')}",
            "Those that compare are known once those that choose have ended; see --dry_run",
        )
    run = runs[index]
    train_all([run], make_slots(1), lambda training: None)
    outcome = run.outcome()
    print(f"{run.label}: {outcome.state} {outcome.error}".rstrip())
    return 0 if outcome.state == "finished" else 1


def _all_runs(sweep: Sweep) -> list[Run]:
    """Returns all runs that can be named by now."""
    choosing = sweep.choosing_runs()
    chosen = all(run.outcome().state in ("finished", "diverged") for run in choosing)
    return [*choosing, *(sweep.runs() if chosen else [])]


def _wants_seeds(sweep: Sweep) -> bool:
    if not sweep.until or sweep.num_seeds >= MAX_SEEDS.value:
        return False
    return not widest(judge(sweep, sweep.results())) <= sweep.until


def _dry_run(sweep: Sweep) -> int:
    """Prints the runs, the command of each, and what they would take."""
    seconds = {arm.name: _step_seconds(sweep.root, arm) for arm in sweep.arms}
    runs, total = _all_runs(sweep), 0.0
    for i, run in enumerate(runs):
        took = run.config.train.num_steps * seconds[run.arm]
        total += took if run.outcome().state in ("waiting", "failed") else 0
        state = run.outcome().state
        print(f"{i:>4}  {run.label}  {run.config.train.num_steps} steps  ", end="")
        print(format_duration(took) if state in ("waiting", "failed") else state)
    later = 0
    if len(runs) == len(sweep.choosing_runs()):
        later = len(sweep.arms) * sweep.num_seeds
        steps = {arm.name: arm.config.train.num_steps for arm in sweep.arms}
        total += sweep.num_seeds * sum(steps[name] * seconds[name] for name in steps)
        print(f"then {counted(later, 'run')} with the values that these choose")
    print(
        f"{counted(len(runs) + later, 'run')}, {format_duration(total)} of training steps one "
        f"after the other, by {_MEASURED_STEPS} measured steps of each arm; validation, "
        "checkpoints and starts come on top"
    )
    return 0


def _step_seconds(root: Path, arm: Arm) -> float:
    """Returns how long a training step of an arm takes, measured once and kept."""
    run = make_measuring_run(root, arm.name, arm.config, _MEASURED_STEPS)
    train_all([run], make_slots(1), lambda training: None)
    outcome = run.outcome()
    if outcome.state != "finished":
        raise UserError(
            f"the arm {arm.name} cannot be measured ({outcome.error})",
            f"See {run.folder / 'log.txt'}",
        )
    records = read_metrics(run.workdir / "metrics.jsonl")
    steps = [r["perf/step_seconds"] for r in records if "perf/step_seconds" in r]
    return median(steps[1:] or steps)


def _report(sweep: Sweep) -> int:
    print(_aligned(write_report(sweep)))
    print(f"\nsee report.html, report.md and results.csv in {sweep.root}")
    return 0


def _aligned(table: str) -> str:
    """Returns a Markdown table as columns for a terminal."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    rows = [line for i, line in enumerate(lines) if i != 1]
    number = max(map(len, rows))
    rows = [row + [""] * (number - len(row)) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(number)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


if __name__ == "__main__":
    flags.declare_key_flag("config")  # for --help
    cli.run(main, default_config="quickstart")
