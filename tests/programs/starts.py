r"""Measure the time until a run prints its first step, with cached programs.

    python -m tests.programs.starts --config=configs/quickstart.py

The program starts train.py several times with the cache of programs in its default folder, and
several times with a cache in JAX_COMPILATION_CACHE_DIR. The first start with each cache fills the
cache. The seconds include the start of Python.
"""

import os
import subprocess
import sys
import tempfile
import time
from statistics import median

from tests.helpers import ROOT

STARTS = 6  # the first start fills the cache


def measure(arguments, variables):
    """Return the seconds from the command to its first step line."""
    # If this variable were set, each start would compile all Python code.
    variables = {"PYTHONDONTWRITEBYTECODE": ""} | variables
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--workdir={folder}/run", "--config.train.log_every=1"]
        began = time.time()
        process = subprocess.Popen(
            [sys.executable, "train.py", *arguments, *options],
            cwd=ROOT,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in process.stdout:
            if line.startswith("step ") and " loss " in line:
                break
        else:
            raise SystemExit("The run ended before its first step")
        seconds = time.time() - began
        process.kill()
        process.communicate()
    return seconds


def main(arguments):
    for name in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
        with tempfile.TemporaryDirectory() as home:
            seconds = [measure(arguments, {name: home}) for _ in range(STARTS)]
        first, *others = seconds
        print(f"{name}: the first start {first:.2f} s, others {median(others):.2f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
