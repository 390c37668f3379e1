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

import jax
import jax.numpy as jnp

from gpt2.data.loader import TrainLoader
from gpt2.telemetry.reporter import Reporter
from gpt2.training import program

BLOCK = 10  # steps
SECONDS = 0.1  # of a fault that is an amount of time
TURNS = 5_000


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
        if is_faulty(step):
            time.sleep(SECONDS)
        return read(self, step, *rows)

    TrainLoader.batch = batch


def loop_over_tiny_kernels():
    """The train step ends with a loop of kernels on an array of 1 KB."""
    make = program.make_train_step

    def turn(_, x):
        return jnp.tanh(jnp.flip(jnp.cumsum(x, axis=0), axis=1))

    def make_train_step(*args, **kwargs):
        train_step = make(*args, **kwargs)

        def step(state, batch, *rest):
            new_state, metrics = train_step(state, batch, *rest)
            with jax.named_scope("planted"):
                turns = TURNS * is_faulty(state.step)
                x = jnp.full((16, 16), metrics["train/grad_norm"])
                tiny = jax.lax.fori_loop(0, turns, turn, x).sum()
            return new_state, metrics | {"train/tiny": tiny}

        return step

    program.make_train_step = make_train_step


if __name__ == "__main__":
    {"sync": synchronise, "loader": load_slowly, "tiny": loop_over_tiny_kernels}[sys.argv.pop()]()
    sys.argv[0] = str(Path(__file__).parent.parent / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
