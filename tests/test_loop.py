"""The training loop never makes the devices wait for the host."""

import itertools
import re

import pytest

from tests.helpers import TINY, run, thorough, train_with

WATCHED_RUN = """
import jax
import numpy as np
from gpt2.training import program

compile_once, wait = program.compile_once, jax.block_until_ready


class Watched:  # a metric of a step, on the devices until something asks for it
    def __init__(self, value, step):
        self.value, self.step = value, step

    def __array__(self, *args, **kwargs):
        print("WATCHED fetch", self.step)
        return np.asarray(self.value)

    def __float__(self):
        return float(np.asarray(self))

    def __getattr__(self, name):
        print("WATCHED fetch", self.step)
        return getattr(self.value, name)


class WatchedStep:
    def __init__(self, compiled):
        self.compiled, self.step = compiled, 0

    def __getattr__(self, name):
        return getattr(self.compiled, name)

    def __call__(self, state, batch):
        self.step += 1
        print("WATCHED dispatch", self.step)
        state, metrics = self.compiled(state, batch)
        return state, {name: Watched(value, self.step) for name, value in metrics.items()}


def watch(step, *args, **options):
    compiled = compile_once(step, *args, **options)
    return WatchedStep(compiled) if compiled.name == "train_step" else compiled


def watched_wait(tree):
    print("WATCHED wait")
    return wait(tree)


program.compile_once, jax.block_until_ready = watch, watched_wait
"""
WATCHING = [
    "--config.train.skip_bad_steps=2",
    "--config.train.skip_outliers=6.0",
    "--config.logging.watch_every=3",
]


@pytest.mark.parametrize("more", [[], thorough(WATCHING)])
def test_the_loop_fetches_metrics_a_step_late_and_waits_for_nothing_else(tmp_path, more):
    (tmp_path / "watched.py").write_text(train_with(WATCHED_RUN))
    options = [
        *TINY,
        "--config.data.corpus=synthetic",
        "--config.train.eval_every=0",
        "--config.train.eval_batches=8",  # more would be waited for, at the end
        "--config.train.checkpoint_every=0",
        *more,
    ]
    code, stdout, stderr = run(tmp_path / "run", *options, script=tmp_path / "watched.py")
    assert code == 0, stderr
    seen = re.findall(r"^WATCHED (.*)$", stdout, re.MULTILINE)
    loop = [event for event, _ in itertools.groupby(seen[seen.index("dispatch 1") :])]
    late = [event for k in range(2, 9) for event in (f"dispatch {k}", f"fetch {k - 1}")]
    assert loop == ["dispatch 1", *late, "fetch 8"]
