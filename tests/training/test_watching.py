"""What a run in its own process does: hangs, and waits in its loop."""

import itertools
import re

import pytest

from tests.helpers import (
    SECONDS,
    TINY,
    finish,
    metrics_of,
    patched,
    start,
    succeed,
    thorough,
    wait_for_step,
)

# Batches stop while a file named `hang` is next to the script.
HANGING_RUN = """
import time
from pathlib import Path
from gpt2.data.loading.token_batches import TokenBatches

batch = TokenBatches.batch


def wait(loader, step, rows):
    while Path(__file__).with_name("hang").exists():
        time.sleep(0.1)
    return batch(loader, step, rows)


TokenBatches.batch = wait
"""
ENDLESS = """
    --config.data.corpus=synthetic --config.train.eval_every=0
    --config.train.checkpoint_every=0 --config.train.num_steps=1000000
    --config.train.hang_seconds=1.5"""


@pytest.mark.thorough
def test_a_hang_ends_the_run_with_its_stacks(tmp_path):
    workdir = tmp_path / "run"
    options = [*TINY, *ENDLESS.split()]
    process = start(workdir, *options, script=patched(tmp_path, HANGING_RUN))
    wait_for_step(process, workdir, 5)
    (tmp_path / "hang").touch()
    code, _, stderr = finish(process, SECONDS)
    assert code == 4
    assert re.search(r"Thread .*\n  File .*patched.py\", line \d+ in wait", stderr)
    assert re.search(r'File ".*train.py", line \d+ in train', stderr)
    assert stderr.splitlines()[-1].startswith("error: The run hangs")


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
    return WatchedStep(compiled) if step.__name__ == "train_step" else compiled


def watched_wait(tree):
    print("WATCHED wait")
    return wait(tree)


program.compile_once, jax.block_until_ready = watch, watched_wait
"""
WATCHED = """
    --config.data.corpus=synthetic --config.train.eval_every=0
    --config.train.eval_batches=8 --config.train.checkpoint_every=0
"""  # more batches would be waited for, at the end
GUARDED = """
    --config.train.skip_bad_steps=2 --config.logging.watch_every=3
"""


@pytest.mark.parametrize("more", ["", thorough(GUARDED)])
def test_the_loop_fetches_metrics_a_step_late_and_waits_for_nothing_else(
    tmp_path, more
):
    options = [*TINY, *WATCHED.split(), *more.split()]
    script = patched(tmp_path, WATCHED_RUN)
    workdir = tmp_path / "run"
    stdout = succeed(workdir, *options, script=script)
    seen = re.findall(r"^WATCHED (.*)$", stdout, re.MULTILINE)
    first = seen.index("dispatch 1")
    loop = [event for event, _ in itertools.groupby(seen[first:])]
    # The first run of each program is waited for: the step, the norms, validation.
    assert loop.count("wait") == 2 + ("watch_every" in more)
    assert loop[1] == "wait"
    assert loop[-1] == "wait"
    expected = ["dispatch 1"]
    for step in range(2, 9):
        expected += [f"dispatch {step}", f"fetch {step - 1}"]
    expected.append("fetch 8")
    assert [event for event in loop if event != "wait"] == expected
    for line in metrics_of(workdir):
        is_watched = "param_norm/ln_f/scale" in line
        assert is_watched == ("watch_every" in more and line["step"] in (3, 6))
