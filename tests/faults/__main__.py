"""Harms runs of train.py as machines do, and compares them with unharmed ones.

    python -m tests.faults [--kinds=kill,disk] [--seed=0] [--workdir=DIR] [--most=NUMBER]

It prints the table of docs/safety.md. It fails if a run did not continue, by the same command, to
the same parameters, bit for bit; lost what it had saved; or showed nothing for a minute.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Before JAX has devices.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import signal

from absl import logging

from tests.faults import checkpoints, disks, processes, signals, texts
from tests.faults.laboratory import Laboratory

KINDS = {
    "kill": signals.kills,
    "term": signals.terminations,
    "int": signals.interrupts,
    "damage": checkpoints.damages,
    "disk": disks.full_disks,
    "readonly": disks.read_only_disks,
    "text": texts.texts,
    "processes": processes.processes,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes faults, prints a line for each kind, and returns the exit code of the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", allow_abbrev=False)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of faults")
    parser.add_argument("--workdir", type=Path, help="an empty folder for runs, which stay there")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="times to make a fault")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.kinds.split(",")) - KINDS.keys():
        parser.error(f"there is no kind {', '.join(unknown)}; choose of {', '.join(KINDS)}")
    # Jobs in the background ignore Ctrl-C, and so would the runs.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.set_verbosity(logging.FATAL)  # Orbax, where checkpoints are compared
    began, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as scratch:
        directory = chosen.workdir or Path(scratch)
        # Where the environment names no cache of compiled programs, all runs share this one.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(directory / "xla"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
        lab = Laboratory(directory.absolute(), chosen.seed, chosen.most)
        print("| fault | how often | continued to the same bits | longest silence |")
        print("|---|---|---|---|", flush=True)
        for kind in chosen.kinds.split(","):
            for row in KINDS[kind](lab):
                print(row, flush=True)
                if row.problem:
                    print(f"{row.what}: {row.problem}", file=sys.stderr)
                    failed += 1
    minutes = (time.monotonic() - began) / 60
    print(f"\nseed {chosen.seed}, {minutes:.0f} minutes, {failed} rows failed", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
