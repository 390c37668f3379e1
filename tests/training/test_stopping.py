"""A run stops on signals, and a command runs at every end."""

import signal
import subprocess
import sys

import pytest

from gpt2.signals import StopSignal
from gpt2.training.checkpoint_files import latest_step
from tests.helpers import (
    ROOT,
    SECONDS,
    TINY,
    metrics_of,
    patched,
    run,
    struck,
    succeed,
    thorough,
)

# A busy process may handle a signal late, and takes two that are close for one press.
PRESSES = (0.5, *[0.6] * 9)
RUNS = "signals.exit_at_interrupt('it continues')"
IN_A_STEP = RUNS + "; signal.signal(NUMBER, lambda *_: 0)"
BLOCKED = """
import os, signal, threading, hashlib, time
NUMBER = signal.{number}
signal.signal(signal.SIGINT, signal.{before})
from gpt2 import signals
signals.begin_process()
signals.raise_at_interrupt()
{mode}

def press():
    for pause in {pauses}:
        time.sleep(pause)
        os.kill(os.getpid(), NUMBER)

threading.Thread(target=press, daemon=True).start()
try:
    hashlib.pbkdf2_hmac("sha512", b"", b"", 10**8)  # a minute without a line of Python
finally:
    print("ended")
"""


def start_blocked(mode, pauses=PRESSES, number="SIGINT", before="default_int_handler"):
    """Start a process that sends itself signals while its main thread runs no Python."""
    code = BLOCKED.format(mode=mode, pauses=pauses, number=number, before=before)
    command = [sys.executable, "-c", code]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, **pipes)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"mode": ""}, 130, "stopped immediately by a second SIGINT\n"),
        ({"mode": RUNS, "pauses": (0.5,)}, 130, "stopped by SIGINT; it continues\n"),
        (
            {"mode": IN_A_STEP},
            130,
            "SIGINT: finishing the step, then saving; a second signal exits immediately\n"
            "stopped immediately by a second SIGINT; it continues\n",
        ),
        # Jobs of a script's `&` ignore SIGINT.
        (
            {"mode": IN_A_STEP, "number": "SIGTERM", "before": "SIG_IGN"},
            143,
            "SIGTERM: finishing the step, then saving; a second signal exits immediately\n"
            "stopped immediately by a second SIGTERM; it continues\n",
        ),
    ],
)
def test_signals_end_a_process_whose_main_thread_runs_no_python(options, code, message):
    process = start_blocked(**options)
    stdout, stderr = process.communicate(timeout=SECONDS)
    assert stdout == ""
    assert stderr == message
    assert process.returncode == code


def test_signals_of_one_moment_are_one_press():
    # A launcher sends the signal of one press several times.
    process = start_blocked("signals._SAME_PRESS = 1000", (0.5, 0.0, 0.0))
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=2)
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_loop_after_its_step_and_its_handlers_go_with_it(number):
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.reached(1)
        signal.raise_signal(number)
        assert stop.reached(2)
        assert stop.requested == number
    assert signal.getsignal(number) == before


def test_a_signal_that_is_ignored_where_a_run_begins_stays_ignored(capfd):
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


WAITING = """
import itertools, pathlib, time
import numpy as np
from gpt2 import signals

signals._GRACE = 1.0  # seconds in which a validation may end
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
        thorough("endless", signal.SIGTERM, 4),
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
    if function == "endless":  # a validation that is repeated by the next start
        assert "eval/loss" not in metrics_of(workdir)[-1]
        options.append("--config.train.eval_batches=1")
        succeed(workdir, *options, script=ROOT / "train.py", cwd=tmp_path)
        lines = {line["step"]: line for line in metrics_of(workdir)}
        assert {"train/loss", "eval/loss"} <= lines[saved].keys()


STOPPED = """
import os, signal
validate = train.validate
report = train.Reporter.step

def count(*args):
    print("validates")
    return validate(*args)

def report_and_stop(reporter, step, *args):
    report(reporter, step, *args)
    os.kill(os.getpid(), signal.SIGTERM)

train.validate = count
train.Reporter.step = report_and_stop
"""


def test_a_run_that_is_stopped_validates_one_batch_and_not_again(tmp_path):
    script = patched(tmp_path, STOPPED)
    code, stdout, stderr = run(tmp_path / "run", *TINY, script=script)
    assert code == 143, stderr
    assert stdout.count("validates\n") == 1
