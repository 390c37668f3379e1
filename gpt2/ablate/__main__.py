r"""Changes things one at a time, trains each with several seeds, and says which of them helped.

    python -m gpt2.ablate --config=configs/quickstart.py --vary=optim.name=adamw,muon --seeds=3 \
        --workdir=ablations/muon

The same command continues a sweep that was stopped, tries again what failed, and adds what is new:
more seeds, more values. Several processes may run it at once, as in an array job: they share the
runs. `--report` writes the report of what there is so far.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.ablate.arms import Arm, make_arms, read_tuned
from gpt2.ablate.jobs import Slot, make_slots, train_all
from gpt2.ablate.report import write_report
from gpt2.ablate.runs import Run, describe
from gpt2.ablate.screen import describe_runs, measure, shown
from gpt2.ablate.sweep import CHOOSING_SEEDS, Sweep, continued, load_sweep, register
from gpt2.ablate.tables import judge
from gpt2.ablate.terms import TERMS, VocabSize, at_sizes, choose_score, equalize
from gpt2.ablate.verdicts import widest
from gpt2.config import Config, DataConfig
from gpt2.data.dataset import prepare
from gpt2.errors import refuse
from gpt2.utils import files
from gpt2.utils.text import align

FLAGS = flags.FLAGS
_COMMAND = shlex.join(["python", "-m", "gpt2.ablate", *sys.argv[1:]])
_LEAST_SEEDS = 3  # where --until may begin: with two, widths are often small by chance
_SHOWN = ["arm", "runs", "mean ± sd", "difference", "95 % interval", "verdict"]


def define_flags() -> None:
    """Defines the flags."""
    cli.define_config()
    number, yes = flags.DEFINE_integer, flags.DEFINE_bool
    flags.DEFINE_string("workdir", None, "Where the sweep lives.")
    flags.DEFINE_multi_string("vary", [], "OPTION=VALUE,... or recipe=FILE,...; several: a grid.")
    yes("one_at_a_time", False, "Each value by itself, not a grid.")
    number("seeds", 3, "Runs of each arm.", 1, CHOOSING_SEEDS)
    number("jobs", 1, "Runs at once: a GPU each, or a share of the cores.", 1)
    flags.DEFINE_list("scaling", [], "LAYERSxWIDTH,...: all arms at three sizes or more.")
    flags.DEFINE_enum("equal", "tokens", TERMS, "What all arms get alike.")
    flags.DEFINE_multi_string("tune", [], "OPTION=VALUE,...: each arm first chooses among these.")
    number("tune_seeds", 1, "Runs of each choice.", 1)
    yes("leave_failed", False, "Chooses without values whose runs fail, instead of waiting.")
    yes("paired", False, "Compares seed by seed. To be decided before the runs.")
    flags.DEFINE_float("until", 0.0, "Adds seeds until no interval reaches further.", 0.0)
    number("max_seeds", 20, "Where --until gives up.", _LEAST_SEEDS, CHOOSING_SEEDS)
    yes("dry_run", False, "Prints the runs and what they take, by short runs that it keeps.")
    yes("report", False, "Only writes the report of what there is so far.")


def main() -> int:
    """Trains a sweep phase by phase, writes its report, and returns the exit code."""
    refuse(not FLAGS.workdir, "there is no --workdir", "Name a directory for the sweep")
    root = Path(FLAGS.workdir)
    if FLAGS.report:
        sweep = load_sweep(root).with_choices()
        sweep.check_texts()
        _report(sweep)
        return 0

    # What cannot work is told before anything is trained.
    config, slots = cli.parse_config(), make_slots(FLAGS.jobs)
    arms = make_arms(config, FLAGS.vary, one_at_a_time=FLAGS.one_at_a_time)
    alone = len(arms) == 1 and not FLAGS.scaling
    refuse(alone, "there is only the baseline", "For example, add --vary=optim.name=lion")
    refuse(FLAGS.until and FLAGS.seeds < _LEAST_SEEDS, "--until needs three seeds or more")
    score, tune = choose_score(arms), read_tuned(FLAGS.tune, FLAGS.vary)
    vocab_size = _vocabularies(arms)
    sweep = Sweep(
        root=root,
        commands=[_COMMAND],
        arms=tuple(_on_equal_terms(root, arms, vocab_size, slots[0])),
        score=score,
        equal=FLAGS.equal,
        paired=FLAGS.paired,
        num_seeds=FLAGS.seeds,
        tune=tune,
        num_tune_seeds=FLAGS.tune_seeds,
        until=FLAGS.until,
        max_seeds=FLAGS.max_seeds,
    )
    if FLAGS.dry_run:
        sweep = continued(sweep).with_choices(leave_failed=FLAGS.leave_failed)
        print(describe_runs(sweep, slots))
        return 0
    sweep = register(sweep)

    def train(runs: Sequence[Run], title: str) -> None:
        with shown(sweep, runs, title) as show:
            train_all(runs, slots, show)

    # First the runs that choose values, then those that are compared.
    if undecided := sweep.undecided_runs():
        train(undecided, "tuning")
        sweep = register(sweep, leave_failed=FLAGS.leave_failed)
        for name, choice in sweep.chosen.items():
            print(f"{name} takes {describe(choice) if choice else 'part no more: all diverged'}")
        for arm in sweep.undecided:
            print(f"{arm.name} waits: a run that chooses its values failed; see --leave_failed")
    train(sweep.runs(), "comparing")
    while sweep.until and sweep.num_seeds < sweep.max_seeds and not sweep.undecided:
        if widest(judge(sweep, sweep.results())) <= sweep.until:
            break
        more = dataclasses.replace(sweep, num_seeds=sweep.num_seeds + 1)
        sweep = register(more, by_until=True)
        train(sweep.runs(), "comparing")
    return _report(sweep)


def _vocabularies(arms: Sequence[Arm]) -> VocabSize:
    """Prepares all arms' corpora, and returns how many tokens a config's tokenizer has."""
    sizes: dict[DataConfig, int] = {}
    for data in {arm.config.data for arm in arms}:
        sizes[data] = prepare(data).tokenizer.vocab_size
    return lambda config: sizes[config.data]


def _on_equal_terms(
    root: Path, arms: Sequence[Arm], vocab_size: VocabSize, slot: Slot
) -> list[Arm]:
    """Returns the arms, at all sizes of `--scaling`, on the terms of `--equal`, size by size."""
    scaled = at_sizes(arms, FLAGS.scaling, vocab_size) if FLAGS.scaling else arms
    equal: list[Arm] = []
    for start in range(0, len(scaled), len(arms)):
        equal += equalize(
            scaled[start : start + len(arms)],
            FLAGS.equal,
            vocab_size=vocab_size,
            step_seconds=lambda arm: measure(root, arm, slot)[0],
        )
    names: dict[Config, str] = {}
    for arm in equal:
        other = names.setdefault(arm.config, arm.name)
        refuse(other != arm.name, f"on equal terms {arm.name} is the same as {other}")
    return equal


def _report(sweep: Sweep) -> int:
    """Writes the report, prints its verdicts, and returns 1 if a run failed or is to come."""
    with files.locked(sweep.root / ".sweep.lock"):
        table = write_report(sweep)
    table = table[[name for name in _SHOWN if name in table]]
    print(align([list(table.columns), *table.values.tolist()]))
    print(f"\nsee report.html, report.md and results.csv in {sweep.root}")
    states = [run.outcome().state for run in (*sweep.undecided_runs(), *sweep.runs())]
    broken, waiting = states.count("failed"), states.count("waiting")
    if broken or waiting:
        print(f"{broken} runs failed, see the report; {waiting} are still to come")
    return int(broken + waiting > 0)


if __name__ == "__main__":
    cli.run(main, define_flags, default_config="quickstart")
