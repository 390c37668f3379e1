r"""Train a baseline and variants of it with several seeds, and report which variants differ.

    python -m gpt2.lab.ablate --config=configs/quickstart.py --seeds=3 \
        --vary=optim.name=adamw,muon --workdir=ablations/muon

The same command continues a sweep that was stopped, and trains failed runs again. With a larger
number in --seeds, or with more values in --vary, the command adds runs to the sweep. Several
processes, for example of an array job, may run the command at the same time, and share the work.
With --report, the command trains nothing, and writes a report on the runs that have ended so far.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.errors import UserError
from gpt2.lab.ablate import command
from gpt2.lab.ablate.judge import judge_sweep
from gpt2.lab.ablate.sweep import Sweep, check_paired, load_sweep
from gpt2.lab.ablate.sweep_report import print_verdicts, write_report
from gpt2.lab.experiments.arms import make_arms
from gpt2.lab.experiments.jobs import Slot

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Define the flags that sweeps and ladders share, plus `--paired`."""
    command.define_flags()
    flags.DEFINE_bool(
        "paired",
        False,
        "Judge each arm by the differences between its runs and the baseline's runs with the same "
        "seeds. All commands of a sweep must make the same choice.",
    )


def main() -> int:
    """Train a sweep, write its report, and return the exit code."""
    return command.main(_read_sweep, _load, words, report)


def _read_sweep(root: Path, slots: Sequence[Slot]) -> list[Sweep]:
    """Return the sweep that the flags describe. `root` is the folder of the sweep.

    `slots` are the resources of simultaneous runs. With --equal=seconds, short runs in the first
    slot measure the time of each arm's step.
    """
    if not FLAGS.vary and not FLAGS["seeds"].present:
        raise UserError(
            "--vary is missing, so there is nothing to compare",
            "Add --vary=OPTION=VALUE,..., or --seeds=N to train only the config, with N seeds",
        )
    arms = make_arms(
        cli.parse_config(),
        FLAGS.vary,
        one_at_a_time=FLAGS.one_at_a_time,
        fixed=cli.overrides(),
    )
    if FLAGS.vary and len(arms) == 1:
        raise UserError(
            f"--vary={FLAGS.vary[0]} contains only the baseline's values",
            "Add another value",
        )
    if FLAGS.paired:
        command.require_equal_seeds(arms, "--paired")
    sweep = command.make_sweep(root, arms, slots, module="gpt2.lab.ablate")
    return [replace(sweep, paired=FLAGS.paired)]


def _load(root: Path) -> list[Sweep]:
    sweep = load_sweep(root).with_choices()
    check_paired(sweep, FLAGS.paired or sweep.paired)
    return [sweep]


def words(sweeps: Sequence[Sweep]) -> dict[str, str]:
    """Return the text of the verdict on each arm. `sweeps` must contain exactly one sweep."""
    (sweep,) = sweeps
    verdicts = judge_sweep(sweep, sweep.results())
    return {name: verdict.words for name, verdict in verdicts.items()}


def report(root: Path, sweeps: Sequence[Sweep]) -> None:
    """Write the report of the only sweep, and print its verdicts."""
    (sweep,) = sweeps
    print_verdicts(*write_report(sweep), paired=sweep.paired)


if __name__ == "__main__":
    cli.run(main, define_flags)
