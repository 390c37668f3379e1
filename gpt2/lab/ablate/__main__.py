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

import os
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.errors import UserError
from gpt2.lab.ablate import command
from gpt2.lab.ablate.judge import add_seeds, judge
from gpt2.lab.ablate.sweep import (
    Sweep,
    check_paired,
    continued,
    load_sweep,
    register,
)
from gpt2.lab.ablate.sweep_report import (
    print_tuning_notes,
    print_verdicts,
    write_report,
)
from gpt2.lab.experiments.arms import differences, make_arms
from gpt2.lab.experiments.jobs import Slot, make_slots, train_all
from gpt2.lab.experiments.run_folder import find_root
from gpt2.utils import files
from gpt2.utils.ray_cluster import connect
from gpt2.utils.text import counted

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
    """Train a sweep, write its report, and return the exit code.

    With --report, train nothing. With --dry_run, only print the runs, and return 0. Otherwise, the
    exit code is 1 if a run failed or has not ended, and 0 if all runs have ended.
    """
    root = find_root("workdir", FLAGS.workdir)
    if FLAGS.report:
        sweep = load_sweep(root).with_choices()
        check_paired(sweep, FLAGS.paired or sweep.paired)
        return _report(sweep)
    os.environ.setdefault("WANDB_RUN_GROUP", root.resolve().name)
    connect(FLAGS.cluster)
    slots = make_slots(FLAGS.jobs)
    sweep = _read_sweep(root, slots)
    if FLAGS.dry_run:
        sweep = with_next_seeds(continued(sweep))
        print(command.describe_runs([sweep], slots))
        return 0

    sweep = register(sweep)
    while True:
        tuning_runs = sweep.pending_tuning_runs()
        runs = [*tuning_runs, *sweep.runs()]
        arms = counted(len(sweep.arms) - 1, "arm")
        print(
            f"{'tuning' if tuning_runs else 'training'} the baseline and {arms}:"
            f" {counted(len(runs), 'run')}, in {root}",
            flush=True,
        )
        if values := _varied_values(sweep):
            print(textwrap.fill(f"the baseline has {values}", 80), flush=True)
        train_all(runs, slots, sweep.score)
        grown = with_next_seeds(sweep)
        if grown == sweep:
            return _report(sweep)
        sweep = register(grown)


def _read_sweep(root: Path, slots: Sequence[Slot]) -> Sweep:
    """Return the sweep that the flags describe. `root` is the folder of the sweep.

    `slots` are the resources of simultaneous runs. With --equal=seconds, short runs in the first
    slot measure the time of each arm's step.
    """
    if not FLAGS.vary and not FLAGS["seeds"].present:
        raise UserError(
            "--vary is missing, so there is nothing to compare",
            "Add --vary=OPTION=VALUE,..., or --seeds=N to train only the config, with N seeds",
        )
    arms = make_arms(cli.parse_config(), FLAGS.vary, one_at_a_time=FLAGS.one_at_a_time)
    if FLAGS.vary and len(arms) == 1:
        raise UserError(
            f"--vary={FLAGS.vary[0]} contains only the baseline's values",
            "Add another value",
        )
    if FLAGS.paired and len({arm.config.seed for arm in arms}) > 1:
        raise UserError(
            "--paired compares runs with the same seed, but the recipes set different seeds",
            "Add --config.seed=0",
        )
    sweep = command.make_sweep(root, arms, slots, module="gpt2.lab.ablate")
    return replace(sweep, paired=FLAGS.paired)


def _varied_values(sweep: Sweep) -> str:
    """List the baseline's values of all options that at least one arm changes."""
    baseline, *others = sweep.arms
    values = {}
    for arm in others:
        for name, (value, _) in differences(baseline, arm).items():
            values[name] = value
    return ", ".join(f"{name}={value}" for name, value in values.items())


def with_next_seeds(sweep: Sweep) -> Sweep:
    """Return the sweep with tuned values chosen, and with seeds added for arms without a verdict.

    Values are chosen for each arm whose tuning runs have all ended. Arms get the seeds of the next
    analysis once all runs so far have ended.
    """
    sweep = sweep.with_choices()
    verdicts = judge(sweep, sweep.results())
    words = {name: verdict.words for name, verdict in verdicts.items()}
    return add_seeds([sweep], words)[0]


def _report(sweep: Sweep) -> int:
    """Write the report, print the verdicts, and return the exit code."""
    with files.locked(sweep.root / ".sweep.lock"):
        # Another command may have added arms or seeds while this command trained.
        newest = continued(sweep).with_choices()
        newest.check_runs()
        print_verdicts(*write_report(newest), paired=newest.paired)
    print_tuning_notes([newest])
    print(f"\nsee report.html, report.md and results.csv in {sweep.root}")
    return command.exit_code(sweep.all_runs())


if __name__ == "__main__":
    cli.run(main, define_flags)
