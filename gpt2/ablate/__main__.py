r"""Changes things one at a time, trains each with several seeds, and says which of them helped.

    python -m gpt2.ablate --config=configs/quickstart.py --vary=optim.name=adamw,muon --seeds=3 \
        --workdir=ablations/muon

The same command continues a sweep that was stopped, tries again what failed, and adds what is new:
more seeds, more values. Several processes may run it at once, as in an array job: they share the
runs. `--report` writes the report of what there is so far.
"""

from gpt2.errors import UserError
from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import functools
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from absl import flags

from gpt2 import cli
from gpt2.ablate.arms import Arm, check_out, make_arms, read_tuned
from gpt2.ablate.jobs import Slot, make_slots, train_all
from gpt2.ablate.judge import grow
from gpt2.ablate.measure import describe_runs, measure
from gpt2.ablate.report import write_report
from gpt2.ablate.sweep import CHOOSING_SEEDS, Sweep, continued, load_sweep, register
from gpt2.ablate.takeover import take_over
from gpt2.ablate.terms import TERMS, at_sizes, choose_score, equalize
from gpt2.data import prepare
from gpt2.training.code import hash_code
from gpt2.utils import files
from gpt2.utils.cluster import connect
from gpt2.utils.stores import is_url

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags."""
    cli.define_config()
    number = flags.DEFINE_integer
    yes = flags.DEFINE_bool
    flags.DEFINE_string("workdir", None, "Where the sweep lives.")
    what = "OPTION=VALUE,..., recipe=FILE,... or code=BRANCH,...; several: a grid."
    flags.DEFINE_multi_string("vary", [], what)
    yes("one_at_a_time", False, "Each value by itself, not a grid.")
    what = "Runs of each arm; 3,5,8: looks after 3 and 5, and ends what is clear or hopeless."
    flags.DEFINE_list("seeds", ["3"], what)
    what = "A difference: trains as many seeds as find it, by the noise of the first --seeds."
    flags.DEFINE_float("find", 0.0, what, 0.0)
    number("jobs", None, "Runs at once: a GPU each, or a share of the cores.", 1)
    flags.DEFINE_string(
        "cluster", "", "ray[:ADDRESS]: runs are tasks of a Ray cluster."
    )
    flags.DEFINE_list("sizes", [], "LAYERSxWIDTH,...: all arms at each.")
    flags.DEFINE_list("budgets", [], "Tokens per parameter: all arms at each.")
    flags.DEFINE_enum("equal", "tokens", TERMS, "What all arms get alike.")
    flags.DEFINE_multi_string(
        "tune", [], "OPTION=VALUE,...: each arm first chooses among these."
    )
    number("tune_seeds", 1, "Runs of each choice.", 1)
    flags.DEFINE_float(
        "max_hours", math.inf, "Ends then, and judges what has finished.", 0.0
    )
    yes(
        "leave_failed",
        False,
        "Chooses without values whose runs fail, instead of waiting.",
    )
    yes("paired", False, "Compares seed by seed. To be decided before the runs.")
    yes(
        "dry_run",
        False,
        "Prints the runs and what they take, by short runs that it keeps.",
    )
    yes("report", False, "Only writes the report of what there is so far.")


def main() -> int:
    """Trains a sweep, writes its report, and returns the exit code."""
    if not FLAGS.workdir:
        raise UserError("there is no --workdir", "Name a directory for the sweep")
    if is_url(FLAGS.workdir):
        raise UserError("a sweep needs a folder, not a URL", "Mount the bucket")
    root = Path(FLAGS.workdir)
    if FLAGS.report:
        return _report(load_sweep(root).with_choices())
    slots = make_slots(FLAGS.jobs, connect(FLAGS.cluster))
    sweep = _read_sweep(root, slots[0])
    if FLAGS.dry_run:
        sweep = continued(sweep).with_choices(leave_failed=FLAGS.leave_failed)
        print(describe_runs(grow(sweep), slots))
        return 0
    sweep = register(sweep)
    if undecided := sweep.undecided_runs():
        if not FLAGS.cluster:  # of whose devices this machine knows nothing
            take_over(undecided, root, slots[0])
        train_all(undecided, slots, sweep.score, FLAGS.max_hours)
        sweep = register(sweep, leave_failed=FLAGS.leave_failed)
        for name in {
            run.arm for run in sweep.undecided_runs() if run.outcome().state == "failed"
        }:
            print(
                f"{name} waits: a run that chooses its values failed; see --leave_failed"
            )
    while True:
        if not FLAGS.cluster:
            take_over(sweep.runs(), root, slots[0])
        train_all(sweep.runs(), slots, sweep.score, FLAGS.max_hours)
        if (grown := grow(sweep)) == sweep:
            return _report(sweep)
        sweep = register(grown)


def _read_sweep(root: Path, slot: Slot) -> Sweep:
    """Returns the sweep of the command line. What cannot work is told before anything trains."""
    arms = make_arms(cli.parse_config(), FLAGS.vary, one_at_a_time=FLAGS.one_at_a_time)
    alone = len(arms) == 1 and not (FLAGS.sizes or FLAGS.budgets)
    if alone:
        raise UserError(
            "there is only the baseline", "For example, add --vary=optim.name=lion"
        )
    looks = sorted({int(each) for each in FLAGS.seeds if each.isdecimal()})
    least, most = (2, 1) if FLAGS.find else (min(len(looks), 2), len(looks))
    fits = (
        list(map(str, looks)) == FLAGS.seeds
        and looks[:1] >= [least]
        and len(looks) <= most
    )
    what = f"--seeds={','.join(FLAGS.seeds)} cannot be{' beside --find' * bool(FLAGS.find)}"
    if not fits or looks[-1] > CHOOSING_SEEDS:
        raise UserError(what, "Give 3, or without --find such as 3,5,8")
    score = choose_score(arms)
    tune = read_tuned(FLAGS.tune, FLAGS.vary)
    size = functools.cache(lambda data: prepare(data).tokenizer.vocab_size)
    arms = [
        replace(arm, config=arm.config.with_vocabulary(size(arm.config.data)))
        for arm in arms
    ]
    for source in {arm.source(root) for arm in arms if arm.commit}:
        check_out(source)
    scaled = at_sizes(arms, FLAGS.sizes, FLAGS.budgets)
    equal: list[Arm] = []
    names: dict[Any, str] = {}
    for start in range(0, len(scaled), len(arms)):
        of_a_size = scaled[start : start + len(arms)]
        equal += equalize(of_a_size, FLAGS.equal, lambda a: measure(root, a, slot)[0])
    for arm in equal:
        other = names.setdefault((arm.config, hash_code(arm.source(root))), arm.name)
        if other != arm.name:
            raise UserError(f"on equal terms {arm.name} is the same as {other}")
    return Sweep(
        root=root,
        commands=[shlex.join(["python", "-m", "gpt2.ablate", *sys.argv[1:]])],
        arms=tuple(equal),
        score=score,
        equal=FLAGS.equal,
        paired=FLAGS.paired,
        looks=looks,
        find=FLAGS.find,
        tune=tune,
        num_tune_seeds=FLAGS.tune_seeds,
    )


def _report(sweep: Sweep) -> int:
    """Writes the report, prints its verdicts, and returns 1 if a run failed or is to come."""
    sweep.check_runs()
    with files.locked(sweep.root / ".sweep.lock"):
        table = write_report(sweep)
    print(table.to_string(index=False))
    print(f"\nsee report.html, report.md and results.csv in {sweep.root}")
    states = [run.outcome().state for run in (*sweep.undecided_runs(), *sweep.runs())]
    broken = states.count("failed")
    waiting = states.count("waiting")
    print(f"{broken} runs failed, {waiting} are still to come")
    return int(broken + waiting > 0)


if __name__ == "__main__":
    cli.run(main, define_flags)
