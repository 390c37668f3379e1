"""What a run in its own process does: bad steps, hangs, logging of norms, waits in its loop."""

import itertools
import re
import signal
import time

import chex
import pytest

from tests.helpers import (
    SECONDS,
    TINY,
    finish,
    metrics_of,
    params_of,
    patched,
    run,
    start,
    succeed,
    thorough,
    wait_for_step,
)

# One micro-batch has a byte that no text has, and its embedding overflows where it is used.
# Batches stop while a file named `hang` is next to the script.
PLANTED_RUN = """
import time
from pathlib import Path
import jax
from gpt2.data.loading.token_batches import TokenBatches
from gpt2.training.program import Program

batch, init_state = TokenBatches.batch, Program.init_state


def plant(loader, step, rows):
    while Path(__file__).with_name("hang").exists():
        time.sleep(0.1)
    found = batch(loader, step, rows)
    if step == 5:
        found["tokens"][3, 7] = 255  # of the second micro-batch
    return found


def overflow(program, params=None):
    state = init_state(program, params)
    table = state.params["wte"]["embedding"]
    state.params["wte"]["embedding"] = table.at[255].set(3e38)
    return state


TokenBatches.batch, Program.init_state = plant, overflow
"""
OPTIONS = """
    --config.data.corpus=synthetic --config.model.tie_embeddings=False
    --config.train.accumulate_steps=2 --config.train.eval_batches=1 --config.train.eval_every=0
    --config.train.checkpoint_every=3 --config.logging.tensorboard=False"""
OPTIONS = [*TINY, *OPTIONS.split()]


@pytest.mark.thorough
def test_a_bad_batch_is_named_and_the_run_goes_on_without_it(tmp_path):
    workdir = tmp_path / "run"
    script = patched(tmp_path, PLANTED_RUN)
    code, stdout, stderr = run(workdir, *OPTIONS, script=script)
    assert code == 3
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    assert "step 5" in stderr
    assert "h_0/ln_1" in stderr  # the first such tensor
    skip = "--config.train.skip_bad_steps=1"
    stdout = succeed(workdir, *OPTIONS, skip, script=script)
    assert re.search(r"^step 5 is skipped: loss nan", stdout, re.M)
    lines = metrics_of(workdir)
    assert len(lines) == 8
    for line in lines:
        is_bad = line["step"] == 5
        assert (line["train/loss"] is None) == is_bad
        if line["step"] >= 5:
            assert line["train/skipped_steps"] == 1


@pytest.mark.thorough
def test_a_hang_ends_the_run_with_its_stacks_and_a_pause_does_not(tmp_path):
    workdir = tmp_path / "run"
    options = [*OPTIONS, "--config.train.num_steps=1000000"]
    options += ["--config.train.hang_seconds=1.5", "--config.train.skip_bad_steps=9"]
    process = start(workdir, *options, script=patched(tmp_path, PLANTED_RUN))
    wait_for_step(process, workdir, 5)
    process.send_signal(signal.SIGSTOP)
    time.sleep(4.0)
    process.send_signal(signal.SIGCONT)
    wait_for_step(process, workdir, metrics_of(workdir)[-1]["step"] + 50)
    (tmp_path / "hang").touch()
    code, _, stderr = finish(process, SECONDS)
    assert code == 4
    assert re.search(r"Thread .*\n  File .*patched.py\", line \d+ in plant", stderr)
    assert re.search(r'File ".*train.py", line \d+ in train', stderr)
    assert stderr.splitlines()[-1].startswith("error: The run hangs")


@pytest.mark.thorough
def test_watching_changes_nothing_and_tells_of_every_tensor(tmp_path):
    watch = ["--config.logging.watch_every=3", "--config.logging.tensorboard=True"]
    for name, options in (("plain", []), ("watched", watch)):
        options = [*TINY, "--config.data.corpus=synthetic", *options]
        succeed(tmp_path / name, *options)
    params = params_of(tmp_path / "plain")
    chex.assert_trees_all_equal(params_of(tmp_path / "watched"), params)
    plain = metrics_of(tmp_path / "plain")
    watched = metrics_of(tmp_path / "watched")
    for line, expected in zip(watched, plain, strict=True):
        norms = [name for name in line if name.startswith("param_norm/")]
        assert len(norms) == (len(params) if line["step"] in (3, 6) else 0)
        assert line["train/loss"] == expected["train/loss"]


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
    stdout = succeed(tmp_path / "run", *options, script=script)
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
