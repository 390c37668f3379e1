r"""Train variants of a run with several seeds, and report which variants differ.

    python -m gpt2.lab.ablate --config=configs/quickstart.py --seeds=3 \
        --vary=optim.name=adamw,muon --workdir=ablations/muon

The same command continues a sweep that was stopped, and trains failed runs again. With more seeds
or values it adds runs to the sweep. Several processes, for example of an array job, may run the
command at the same time, and share the work. `--report` trains nothing, and writes a report on the
runs that have ended so far.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import os
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.errors import UserError
from gpt2.lab.ablate.command import define_flags, describe_runs, exit_code, make_sweep
from gpt2.lab.ablate.judge import add_seeds, judge
from gpt2.lab.ablate.sweep import Sweep, continued, load_sweep, register
from gpt2.lab.ablate.sweep_report import (
    print_tuning_notes,
    print_verdicts,
    write_report,
)
from gpt2.lab.experiments.arms import make_arms
from gpt2.lab.experiments.jobs import Slot, make_slots, train_all
from gpt2.lab.experiments.run_folder import find_root
from gpt2.utils import files
from gpt2.utils.text import counted

FLAGS = flags.FLAGS


def main() -> int:
    """Train a sweep, write its report, and return the exit code."""
    root = find_root("workdir", FLAGS.workdir)
    if FLAGS.report:
        return _report(load_sweep(root).with_choices())
    os.environ.setdefault("WANDB_RUN_GROUP", root.resolve().name)
    slots = make_slots(FLAGS.jobs)
    sweep = _read_sweep(root, slots)
    if FLAGS.dry_run:
        sweep = with_next_seeds(continued(sweep))
        print(describe_runs([sweep], slots))
        return 0

    sweep = register(sweep)
    while True:
        runs = [*sweep.pending_tuning_runs(), *sweep.runs()]
        arms = counted(len(sweep.arms) - 1, "arm")
        print(
            f"baseline and {arms}: {counted(len(runs), 'run')}, in {root}", flush=True
        )
        train_all(runs, slots, sweep.score)
        grown = with_next_seeds(sweep)
        if grown == sweep:
            return _report(sweep)
        sweep = register(grown)


def _read_sweep(root: Path, slots: Sequence[Slot]) -> Sweep:
    """Return the sweep that the flags describe."""
    if not FLAGS.vary and not FLAGS["seeds"].present:
        raise UserError(
            "--vary is missing, so there is nothing to compare",
            "Add --vary=OPTION=VALUE,..., or --seeds=N to train only the config, with N seeds",
        )
    arms = make_arms(cli.parse_config(), FLAGS.vary, one_at_a_time=FLAGS.one_at_a_time)
    if FLAGS.vary and len(arms) == 1:
        raise UserError(
            f"--vary={FLAGS.vary[0]} names only the baseline", "Add another value"
        )
    return make_sweep(root, arms, slots, module="gpt2.lab.ablate")


def with_next_seeds(sweep: Sweep) -> Sweep:
    """Return the sweep with its choices so far, and with the seeds of the next analysis."""
    sweep = sweep.with_choices()
    return add_seeds([sweep], judge(sweep, sweep.results()))[0]


def _report(sweep: Sweep) -> int:
    """Write the report, print the verdicts, and return the exit code."""
    sweep.check_runs()
    with files.locked(sweep.root / ".sweep.lock"):
        table = write_report(sweep)
    print_verdicts(table)
    print_tuning_notes([sweep])
    print(f"\nsee report.html, report.md and results.csv in {sweep.root}")
    return exit_code(sweep.all_runs())


if __name__ == "__main__":
    cli.run(main, define_flags)
