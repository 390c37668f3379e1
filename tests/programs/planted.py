"""Run train.py with a fault in every step: `python planted.py [OPTIONS] FAULT`."""

import runpy
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

from gpt2.data.loading.token_batches import TokenBatches
from gpt2.telemetry.reporter import Reporter

SECONDS = 0.1  # duration of the fault in each step


def synchronise():
    """Let the host read each loss immediately, and work on it while the devices wait."""
    report = Reporter.step

    def step(self, number, metrics, *rest):
        float(metrics["train/loss"])
        time.sleep(SECONDS)
        report(self, number, metrics, *rest)

    Reporter.step = step


def load_slowly():
    """Let reading a batch take longer than a step."""
    read = TokenBatches.batch

    def batch(self, step, *rows):
        time.sleep(SECONDS)
        return read(self, step, *rows)

    TokenBatches.batch = batch


if __name__ == "__main__":
    {"sync": synchronise, "loader": load_slowly}[sys.argv.pop()]()
    sys.argv[0] = str(Path(__file__).parents[2] / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
