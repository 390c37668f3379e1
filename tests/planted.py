"""Runs train.py with a fault in every second block of ten steps: planted.py [OPTIONS] FAULT.

The other blocks tell what the same run takes without it.
"""

import runpy
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

from gpt2.data.loader import TrainLoader
from gpt2.telemetry.reporter import Reporter

BLOCK = 10  # steps
SECONDS = 0.1  # of a fault that is an amount of time


def is_faulty(step):
    """Whether a step, counted from 0, has the fault."""
    return (step // BLOCK) % 2


def synchronise():
    """The host reads each loss at once, and works on it while the devices wait."""
    report = Reporter.step

    def step(self, number, metrics, *rest):
        if is_faulty(number - 1):
            float(metrics["train/loss"])
            time.sleep(SECONDS)
        report(self, number, metrics, *rest)

    Reporter.step = step


def load_slowly():
    """A batch takes longer than a step."""
    read = TrainLoader.batch

    def batch(self, step, *rows):
        if is_faulty(step - 1):
            time.sleep(SECONDS)
        return read(self, step, *rows)

    TrainLoader.batch = batch


if __name__ == "__main__":
    {"sync": synchronise, "loader": load_slowly}[sys.argv.pop()]()
    sys.argv[0] = str(Path(__file__).parent.parent / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
