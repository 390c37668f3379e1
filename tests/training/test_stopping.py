"""A run stops on signals, and continues to the same bits."""

import re
import shutil
import signal
import subprocess
import sys
import time

import chex
import pytest

from gpt2.signals import StopSignal
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.checkpoint_files import latest_step
from tests.helpers import (
    ROOT,
    SECONDS,
    TINY,
    finish,
    metrics_of,
    params_of,
    patched,
    run,
    start,
    struck,
    succeed,
    thorough,
    wait_for_step,
)
from tests.telemetry.test_telemetry import events

# Saves are slow, because the thread that saves computes the digests.
SLOW_SAVES = """
import sys, time
from gpt2.training import checkpoint

digest = checkpoint.digest_folder
checkpoint.digest_folder = lambda folder: time.sleep({seconds}) or digest(folder)
"""
ENDLESS = """
    --config.data.corpus=synthetic --config.train.num_steps=1000000 --config.train.eval_every=0
    --config.train.eval_batches=1 --config.train.checkpoint_every=0"""
ENDLESS = [*TINY, *ENDLESS.split()]


# A busy process may handle a signal late, and takes two that are close for one press.
PRESSES = (0.5, *[0.6] * 9)
LOOP = "signals.exit_at_interrupt('it continues'); signal.signal(signal.SIGINT, lambda *_: 0)"
FINISHING = "SIGINT: finishing the step, then saving; a second one exits at once\n"
BLOCKED = """
import os, signal, threading, hashlib, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from gpt2 import signals
signals.begin_process()
signals.raise_at_interrupt()
{mode}

def press():
    for pause in {pauses}:
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=press, daemon=True).start()
try:
    hashlib.pbkdf2_hmac("sha512", b"", b"", 10**8)  # a minute without a line of Python
finally:
    print("ended")
"""


@pytest.mark.parametrize(
    ("mode", "pauses", "told"),
    [
        ("", PRESSES, "stopped at once by a second SIGINT\n"),
        (
            LOOP,
            PRESSES,
            f"{FINISHING}stopped at once by a second SIGINT; it continues\n",
        ),
        # A launcher sends the signal of one press several times.
        ("signals._SAME_PRESS = 1000", (0.5, 0.0, 0.0), ""),
        (
            "signals.exit_at_interrupt('it continues')",
            (0.5,),
            "stopped by SIGINT; it continues\n",
        ),
    ],
    ids=["second", "in a step", "repeated", "at once"],
)
def test_ctrl_c_ends_a_process_whose_main_thread_hears_nothing(mode, pauses, told):
    command = [sys.executable, "-c", BLOCKED.format(mode=mode, pauses=pauses)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=ROOT, **pipes)
    if not told:
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=2)
        process.kill()
    stdout, stderr = process.communicate(timeout=SECONDS)
    assert stdout == ""
    assert stderr == told
    assert process.returncode == (130 if told else -signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_loop_after_its_step_and_its_handlers_go_with_it(number):
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.reached(1)
        assert stop.requested is None
        signal.raise_signal(number)
        assert stop.reached(2)
        assert stop.requested == number
    assert signal.getsignal(number) == before


def test_a_signal_that_is_ignored_where_a_run_begins_stays_so_and_is_told(capfd):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.reached(1)
            signal.raise_signal(signal.SIGTERM)
            assert stop.reached(2)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert "SIGINT is ignored" in capfd.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_leaves_a_save_and_says_what_the_same_command_does(
    tmp_path, number
):
    workdir = tmp_path / "run"
    script = patched(tmp_path, SLOW_SAVES.format(seconds=10 * SECONDS))
    process = start(workdir, *ENDLESS, script=script)
    wait_for_step(process, workdir, 3)
    process.send_signal(number)
    while process.poll() is None:
        if list(workdir.glob("checkpoints/*tmp*")):
            break
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(number)
    code, _, told = finish(process, SECONDS)  # long before the save would end
    assert code == 128 + number
    assert "stopped at once" in told
    assert "the same command" in told


WAITING = """
import itertools, pathlib, time
import numpy as np

ROWS = np.arange(64).reshape(4, 16)

def wait():
    pathlib.Path("waits").touch()
    time.sleep(1000)

def documents():
    wait()

def batches(split, waits="train", after=3):
    for number in range(100):
        if split == waits and number == after:
            wait()
        yield {"tokens": ROWS, "targets": ROWS}

def held_out(split):
    return batches(split, "validation", 1)

def endless(split):
    for number in itertools.count():
        if split == "validation" and number == 100:
            pathlib.Path("waits").touch()
        yield {"tokens": ROWS, "targets": ROWS}
"""


@pytest.mark.parametrize(
    ("function", "number", "saved"),
    [
        ("batches", signal.SIGTERM, 3),
        ("endless", signal.SIGTERM, 4),
        thorough("held_out", signal.SIGINT, 4),
        thorough("documents", signal.SIGINT, None),
    ],
)
def test_a_signal_ends_a_wait_for_text_and_the_state_is_saved(
    function, number, saved, tmp_path
):
    (tmp_path / "waiting.py").write_text(WAITING)
    options = [*TINY, f"--config.data.corpus=python:waiting:{function}"]
    options += ["--config.train.checkpoint_every=0", "--config.train.hang_seconds=0"]
    options += ["--config.train.eval_batches=0"]
    options += [f"--config.data.data_dir={tmp_path}"]
    condition = "Path('waits').exists()"
    if saved:  # metrics.jsonl is two steps behind
        condition += f" and has_step({saved - 2})"
    script = struck(tmp_path, number, condition)
    workdir = tmp_path / "run"
    code, stdout, stderr = run(workdir, *options, script=script, cwd=tmp_path)
    assert code == 128 + number, stderr
    assert latest_step(workdir) == saved
    if saved:
        assert f"stopped by {number.name} at step {saved}" in stdout
        assert metrics_of(workdir)[-1]["step"] == saved


def test_a_second_sigterm_leaves_at_once_behind_an_ampersand():
    mode = f"{LOOP}; signal.signal(signal.SIGTERM, lambda *_: 0)"
    code = BLOCKED.format(mode=mode, pauses=PRESSES)
    code = code.replace("signal.signal(signal.SIGINT, signal.default_int_handler)", "")
    code = code.replace("getpid(), signal.SIGINT", "getpid(), signal.SIGTERM")
    command = ["sh", "-c", '"$@" & wait $!', "sh", sys.executable, "-c", code]
    pipes = dict(capture_output=True, text=True, timeout=SECONDS)
    done = subprocess.run(command, cwd=ROOT, **pipes)
    message = FINISHING.replace("SIGINT", "SIGTERM")
    message += "stopped at once by a second SIGTERM; it continues\n"
    assert done.returncode == 143
    assert done.stderr == message


ENDS = {
    "finished": ("lambda: None", 0),
    "stopped by a signal": ("lambda: 143", 143),
    "error: it is wrong. Mend it.": ("fail(UserError('it is wrong', 'Mend it', 3))", 3),
    "ValueError: of the program": ("fail(ValueError('of the program'))", 1),
    "stopped by SIGINT": ("fail(KeyboardInterrupt())", 130),
    "error: it hangs": ("lambda: errors.exit_process('error: it hangs', 4)", 4),
    "left": ("lambda: signals._exit('left', signal.SIGTERM)", 143),
}
ENDING = """
import signal, sys
from gpt2 import cli, errors, signals
from gpt2.errors import UserError

def fail(error):
    def main():
        raise error
    return main

errors.set_on_exit("echo $GPT2_EXIT_CODE $GPT2_EXIT_REASON; exit 7")
cli.run({main})
"""


@pytest.mark.parametrize("reason", ENDS)
def test_a_command_runs_once_at_every_end_and_changes_no_exit_code(reason):
    main, code = ENDS[reason]
    command = [sys.executable, "-c", ENDING.format(main=main)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stdout == f"{code} {reason}\n"
    assert "returned non-zero exit status 7" in done.stderr


SLOW_STEPS = """
import time
from gpt2.data.loading.token_batches import TokenBatches

batch = TokenBatches.batch
TokenBatches.batch = lambda self, *which: time.sleep(0.5) or batch(self, *which)
"""


def events_by_step(workdir):
    """Return the scalars that TensorBoard shows, by step and name.

    A START record drops scalars of its step and later ones.
    """
    scalars = {}
    for event in events(workdir):
        if event.HasField("session_log"):
            scalars = {key: scalars[key] for key in scalars if key[0] < event.step}
        for value in event.summary.value:
            key = (event.step, value.tag)
            assert key not in scalars
            scalars[key] = value.simple_value
    return {key: scalars[key] for key in scalars if not key[1].startswith("perf/")}


@pytest.mark.thorough
def test_a_folder_that_is_copied_and_renamed_continues_as_if_never_stopped(tmp_path):
    """Its parameters, metrics, events, scores and checkpoints are those of a run left alone."""
    options = [*TINY, "--config.data.corpus=synthetic", "--config.train.eval_every=2"]
    options += ["--config.train.checkpoint_every=3", "--config.train.eval_batches=2"]
    options += ["--config.train.keep_every=3"]
    whole = tmp_path / "whole"
    first = tmp_path / "first"
    succeed(whole, *options)
    process = start(first, *options, script=patched(tmp_path, SLOW_STEPS))
    wait_for_step(process, first, 5)
    process.kill()  # metrics and events reach beyond the newest checkpoint
    process.communicate()
    saved = latest_step(first)
    shutil.copytree(first, tmp_path / "copy")
    moved = (tmp_path / "copy").rename(tmp_path / "moved, elsewhere")
    shutil.rmtree(first)
    assert metrics_of(moved)[-1]["step"] > saved > 0
    stdout = succeed(moved, *options)
    assert re.search(rf"^steps +{saved + 1} to 8 of", stdout, re.MULTILINE)

    chex.assert_trees_all_equal(params_of(moved), params_of(whole))
    assert metrics_of(moved, speed=False) == metrics_of(whole, speed=False)
    assert events_by_step(moved) == events_by_step(whole)
    for workdir in (moved, whole):
        with Checkpointer(workdir, read_only=True) as checkpointer:
            losses = {}
            for line in metrics_of(workdir):
                if "eval/loss" in line:
                    losses[line["step"]] = line["eval/loss"]
            best = min(losses, key=losses.get)
            assert checkpointer.best() == (best, losses[best])
            assert checkpointer.all_steps() == sorted({3, 6, best, 8})
    assert re.search(r"^time: [\d:]+; .*\d%", stdout, re.MULTILINE)
