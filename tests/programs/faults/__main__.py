"""Disturb runs of train.py with faults of machines, and compare them with undisturbed runs.

    python -m tests.programs.faults [--kinds=kill,disk] [--seed=0] [--workdir=DIR] [--most=NUMBER]

The program prints a table. It fails if a run hangs, loses a checkpoint, or does not end with the
same parameters, bit for bit, after its command is repeated.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX looks for devices

from absl import logging

from tests.programs.faults.kinds import KINDS
from tests.programs.faults.laboratory import Broken, Laboratory


def main(arguments: Sequence[str] | None = None) -> int:
    """Make faults, print a line for each, and return the exit code of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.faults", allow_abbrev=False
    )
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help=f"kinds of faults: {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random moments"
    )
    parser.add_argument(
        "--workdir", type=Path, help="an empty folder for runs, which are not deleted"
    )
    parser.add_argument(
        "--most",
        type=int,
        default=sys.maxsize,
        help="largest number of times that each fault is made",
    )
    chosen = parser.parse_args(arguments)
    # Jobs in the background ignore Ctrl-C, and the runs would also ignore it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.set_verbosity(logging.FATAL)  # Orbax logs when checkpoints are compared
    began = time.monotonic()
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        directory = chosen.workdir or Path(scratch)
        # If the environment does not set a cache of compiled programs, all runs share this one.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(directory / "xla"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        lab = Laboratory(directory.absolute(), chosen.seed, chosen.most)
        print("| fault | how often | continued to the same bits |")
        print("|---|---|---|", flush=True)
        for kind in chosen.kinds.split(","):
            for what, often, make in KINDS[kind](lab):
                verdict = "yes"
                try:
                    make()
                except Broken as error:
                    verdict = f"**no**: {error}"
                except Exception:  # continue with the other faults
                    verdict = f"**no**: {traceback.format_exc()}"
                failed += verdict != "yes"
                print(f"| {what} | {often} | {verdict} |", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(
        f"\nseed {chosen.seed}, {minutes:.0f} minutes, {failed} rows failed", flush=True
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
