r"""Train arms at several sizes, and report how each arm's compute multiplier changes with size.

    python -m gpt2.lab.ladder --config=configs/quickstart.py --depths=2,3,4,6 \
        --seeds=3 --vary=optim.name=muon --one_at_a_time --workdir=ladders/muon

An arm's compute multiplier is the compute with which the baseline would reach the arm's loss,
divided by the arm's compute. The config contains the options for one depth, model.num_layers. The
rules of gpt2/lab/ladder/dial.py determine the options for the other depths. Each size is a sweep
(gpt2.lab.ablate) in a folder of its own, such as `d4` for depth 4.
The same command continues a ladder that was stopped. With more depths, arms or seeds, it adds runs
to the ladder. Several processes may run the command at the same time.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.errors import UserError
from gpt2.lab.ablate import command
from gpt2.lab.ablate.sweep import Sweep, load_sweep
from gpt2.lab.experiments.arms import make_arms
from gpt2.lab.experiments.cells import print_table
from gpt2.lab.experiments.jobs import Slot
from gpt2.lab.ladder.courses import judge_ladder
from gpt2.lab.ladder.dial import at_depth
from gpt2.lab.ladder.ladder_report import print_courses, write_report
from gpt2.lab.ladder.noise import measure_noise, plan_pairs
from gpt2.utils.text import counted

FLAGS = flags.FLAGS
_LEAST_SIZES = 3  # a line fits any two sizes exactly


def define_flags() -> None:
    """Define the flags that sweeps and ladders share, plus `--depths` and `--gain`."""
    command.define_flags()
    flags.DEFINE_list(
        "depths",
        ["2", "3", "4", "6"],
        "The number of layers of each size. There must be at least three sizes.",
    )
    flags.DEFINE_float(
        "gain",
        None,
        "A compute multiplier, such as 1.2. With this flag, also print how many pairs of runs (an"
        " arm and the baseline with the same seed) would detect this multiplier at each size.",
    )


def main() -> int:
    """Train a ladder, write its report, and return the exit code."""
    if FLAGS.gain is not None and not 1 < FLAGS.gain < math.inf:
        raise UserError(
            f"--gain={FLAGS.gain} is not a multiplier above 1",
            "Give for example --gain=1.2",
        )
    return command.main(_make_sweeps, _load, words, _report)


def _make_sweeps(root: Path, slots: Sequence[Slot]) -> list[Sweep]:
    """Return a sweep for each depth in `--depths` and in the folder `root`, the smallest first.

    `slots` are the resources of simultaneous runs. With --equal=seconds, short runs in the first
    slot measure the time of each arm's step.
    """
    found = {sweep.arms[0].config.model.num_layers for sweep in _load_all(root)}
    uses_found = not FLAGS["depths"].present and len(found) >= _LEAST_SIZES
    given = [] if uses_found else FLAGS.depths
    depths = {int(depth) for depth in given if depth.isdecimal()} - {0}
    if len(depths) != len(given) or len(depths | found) < _LEAST_SIZES:
        raise UserError(
            f"--depths={','.join(FLAGS.depths)} is not a list of {_LEAST_SIZES} or more"
            " different numbers of layers",
            "Give for example --depths=2,3,4,6",
        )
    arms = make_arms(
        cli.parse_config(),
        FLAGS.vary,
        one_at_a_time=FLAGS.one_at_a_time,
        fixed=cli.overrides(),
    )
    if len(arms) == 1:
        raise UserError(
            "--vary is missing or contains only values of the baseline, so nothing is compared",
            "Give for example --vary=optim.name=muon",
        )
    for arm in arms:
        if arm.commit and FLAGS.equal != "seconds":
            raise UserError(
                f"The FLOPs of {arm.name} are unknown, because this arm runs another version of the"
                " code",
                "Use --equal=seconds",
            )
    eval_batches = arms[0].config.train.eval_batches
    if eval_batches:
        raise UserError(
            f"With train.eval_batches={eval_batches}, sizes would be validated on different texts,"
            " because their batches differ",
            "Use --config.train.eval_batches=0, which reads the whole split",
        )
    command.require_equal_seeds(arms, "A ladder")
    sweeps = []
    # Sizes of earlier commands are continued with the same flags, so that all sizes are comparable.
    for depth in sorted(depths | found):
        ratio = Fraction(depth, arms[0].config.model.num_layers)
        at_size = [at_depth(arm, ratio) for arm in arms]
        folder = root / f"d{depth}"
        sweep = command.make_sweep(folder, at_size, slots, module="gpt2.lab.ladder")
        sweeps.append(sweep)
    sizes = [command.continued(sweep) for sweep in sweeps]
    names = [[arm.name for arm in sweep.arms[1:]] for sweep in sizes]
    if any({*each} != {*names[0]} for each in names):
        known = dict.fromkeys(itertools.chain(*names))
        raise UserError(
            f"The sizes in {root} would have different arms",
            f"Repeat the command with --vary for all of them: {', '.join(known)}",
        )
    if sweeps[0].analyses[0] < 2:
        raise UserError("--seeds=1 allows no confidence interval", "Give --seeds=3")
    analyses = max(sweep.analyses for sweep in sizes)
    return [replace(sweep, analyses=analyses) for sweep in sweeps]


def _load(root: Path) -> list[Sweep]:
    """Return the sweeps in a ladder's folder, the smallest size first."""
    sweeps = [sweep.with_choices() for sweep in _load_all(root)]
    if len(sweeps) < _LEAST_SIZES:
        number = counted(len(sweeps), "size") if sweeps else "no size"
        raise UserError(
            f"--workdir={root} contains {number} of a ladder, but a report needs {_LEAST_SIZES}",
            "Give the --workdir of a ladder, or repeat the command that began it",
        )
    return sorted(sweeps, key=lambda sweep: sweep.arms[0].config.model.num_layers)


def _load_all(root: Path) -> list[Sweep]:
    """Return the sweeps in a ladder's folder, in any order."""
    sweeps = []
    for path in root.glob("d*/sweep.json"):
        if path.parent.name[1:].isdecimal():
            sweeps.append(load_sweep(path.parent))
    return sweeps


def words(sweeps: Sequence[Sweep]) -> dict[str, str]:
    """Return the verdict on each arm."""
    courses = judge_ladder(sweeps, [sweep.results() for sweep in sweeps])
    return {name: course.words for name, course in courses.items()}


def _report(root: Path, sweeps: Sequence[Sweep]) -> None:
    """Write the report, and print the verdicts.

    With --gain, also print how many pairs of runs are needed at each size to detect this
    compute multiplier, and the cost of the pairs.
    """
    print_courses(write_report(root, sweeps))
    if FLAGS.gain is not None:
        noise = measure_noise(sweeps, [sweep.results() for sweep in sweeps])
        print(
            f"\nPairs of runs needed to find a compute multiplier of {FLAGS.gain:g} with a\n"
            "probability of 80 %, with the noise of this ladder:"
        )
        print_table(plan_pairs(noise, FLAGS.gain, sweeps[0].unit))


if __name__ == "__main__":
    cli.run(main, define_flags)
