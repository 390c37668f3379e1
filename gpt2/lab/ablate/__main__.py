r"""Changes things one at a time, trains each with several seeds, and says which of them helped.

    python -m gpt2.lab.ablate --config=configs/quickstart.py --seeds=3 \
        --vary=optim.name=adamw,muon --workdir=ablations/muon

The same command continues a sweep that was stopped, tries again what failed, and adds what is new:
more seeds, more values. Several processes may run it at once, as in an array job: they share the
runs. `--report` writes the report of what there is so far.
"""

from gpt2.errors import UserError
from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.data import prepare
from gpt2.lab.ablate.arms import check_out, make_arms, read_tuned
from gpt2.lab.ablate.groups import group_runs
from gpt2.lab.ablate.jobs import Slot, make_slots, train_all
from gpt2.lab.ablate.judge import grow
from gpt2.lab.ablate.measure import describe_runs, equalize
from gpt2.lab.ablate.report import write_report
from gpt2.lab.ablate.runs import find_root
from gpt2.lab.ablate.sweep import CHOOSING_SEED, Sweep, continued, load_sweep, register
from gpt2.lab.ablate.terms import BITS_PER_BYTE, TERMS, choose_score
from gpt2.utils import files

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags."""
    cli.define_config()
    flags.DEFINE_string("workdir", None, "Where the sweep lives.")
    flags.DEFINE_multi_string(
        "vary",
        [],
        "OPTION=VALUE,..., recipe=FILE,... or code=BRANCH,...; several: a grid.",
    )
    flags.DEFINE_bool("one_at_a_time", False, "Each value by itself, not a grid.")
    flags.DEFINE_list(
        "seeds",
        ["3"],
        "Runs of each arm; 3,5,8: looks after 3 and 5, and ends what is clear or hopeless.",
    )
    flags.DEFINE_integer(
        "jobs", 1, "Runs at once: a GPU each, or a share of the cores.", 1
    )
    flags.DEFINE_bool(
        "together", False, "Runs that differ in numbers alone train as one program."
    )
    flags.DEFINE_enum("equal", "tokens", TERMS, "What all arms get alike.")
    flags.DEFINE_multi_string(
        "tune", [], "OPTION=VALUE,...: each arm first chooses among these."
    )
    flags.DEFINE_bool(
        "dry_run",
        False,
        "Prints the runs and what they take, by short runs that it keeps.",
    )
    flags.DEFINE_bool(
        "report", False, "Only writes the report of what there is so far."
    )


def main() -> int:
    """Trains a sweep, writes its report, and returns the exit code."""
    root = find_root("workdir", FLAGS.workdir)
    if FLAGS.report:
        return _report(load_sweep(root).with_choices())
    os.environ.setdefault("WANDB_RUN_GROUP", root.resolve().name)
    slots = make_slots(FLAGS.jobs)
    sweep = _read_sweep(root, slots)
    if FLAGS.dry_run:
        sweep = grow(continued(sweep).with_choices())
        print(describe_runs(sweep, slots))
        return 0

    sweep = register(sweep)
    while True:
        runs = [*sweep.undecided_runs(), *sweep.runs()]
        print(f"{len(sweep.arms)} arms, {len(runs)} runs, in {root}/runs", flush=True)
        groups = [[run] for run in runs]
        if FLAGS.together:
            groups = group_runs(runs, len(slots))
        train_all(groups, slots, sweep.score)
        grown = grow(sweep.with_choices())
        if grown == sweep:
            return _report(sweep)
        sweep = register(grown)


def _read_sweep(root: Path, slots: Sequence[Slot]) -> Sweep:
    """Returns the sweep of the command line. What cannot work is told before anything trains."""
    arms = make_arms(cli.parse_config(), FLAGS.vary, one_at_a_time=FLAGS.one_at_a_time)
    if FLAGS.vary and len(arms) == 1:
        raise UserError("--vary names the baseline alone", "Give it another value")
    looks = _read_looks(FLAGS.seeds)
    score = choose_score(arms)  # which refuses other texts
    tune = read_tuned(FLAGS.tune, FLAGS.vary)
    for i, arm in enumerate(arms):
        dataset = prepare(arm.config.data)
        if score == BITS_PER_BYTE and dataset.targets_per_byte is None:
            raise UserError(
                f"Arms with different tokenizers are compared in bits per byte, and the tokenizer "
                f"of {arm.name} loses bytes of the text",
                "Leave this arm out",
            )
        vocabulary = dataset.tokenizer.vocab_size
        arms[i] = replace(arm, config=arm.config.with_vocabulary(vocabulary))
        check_out(arm, root)
    command = ["python", "-m", "gpt2.lab.ablate", *sys.argv[1:]]
    return Sweep(
        root=root,
        commands=[shlex.join(command)],
        arms=tuple(equalize(arms, FLAGS.equal, root, slots)),
        equal=FLAGS.equal,
        looks=looks,
        tune=tune,
    )


def _read_looks(seeds: Sequence[str]) -> list[int]:
    """Returns the numbers that `--seeds` gives, which ascend."""
    looks = sorted({int(each) for each in seeds if each.isdecimal()})
    least = 2 if len(looks) > 1 else 1
    are_read = 0 < len(looks) == len(seeds)
    if not are_read or looks[0] < least or looks[-1] > CHOOSING_SEED:
        raise UserError(f"--seeds={','.join(seeds)} cannot be", "Give 3, or 3,5,8")
    return looks


def _report(sweep: Sweep) -> int:
    """Writes the report, prints its verdicts, and returns 1 if a run failed or is to come."""
    sweep.check_runs()
    with files.locked(sweep.root / ".sweep.lock"):
        table = write_report(sweep)
    print(table.to_string(index=False))
    print(f"\nsee report.html, report.md and results.csv in {sweep.root}")
    states = [run.outcome().state for run in sweep.all_runs()]
    broken = states.count("failed")
    waiting = states.count("waiting")
    print(f"{broken} runs failed, {waiting} are still to come")
    return 1 if broken or waiting else 0


if __name__ == "__main__":
    cli.run(main, define_flags)
