"""A run stops on signals and in time for a limit, and continues to the same bits."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2 import launch
from gpt2.config import TrainConfig
from gpt2.errors import UserError
from gpt2.parallel import distributed
from gpt2.parallel.stop import StopSignal
from gpt2.training import deadline
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.checkpoint_files import latest_step
from gpt2.training.deadline import Deadline
from gpt2.training.due import due_after
from tests.helpers import (
    ROOT,
    TINY,
    finish,
    metrics_of,
    params_of,
    run,
    start,
    train_with,
    wait_for_step,
)
from tests.test_telemetry import events

# Saves are slow, since digests are taken in the thread that saves.
SLOW_SAVES = """
import sys, time
from gpt2.training import checkpoint_handlers

digest = checkpoint_handlers.digest_folder
checkpoint_handlers.digest_folder = lambda folder: time.sleep({seconds}) or digest(folder)
"""
ENDLESS = [
    *TINY,
    "--config.data.corpus=synthetic",
    "--config.train.num_steps=1000000",
    "--config.train.eval_every=0",
    "--config.train.eval_batches=1",
    "--config.train.checkpoint_every=0",
]


@pytest.fixture
def slow_saves(tmp_path):
    """Writes a train.py whose saves take so many seconds, and returns its path."""

    def write(seconds):
        path = tmp_path / "slow.py"
        path.write_text(train_with(SLOW_SAVES.format(seconds=seconds)))
        return path

    return write


class Simulation:
    """The loop of train.py on a clock of its own, whose steps, saves and validations take a while.

    Each takes up to a fifth more than its seconds. It stands for the StepClock and the Checkpointer
    of a Deadline too.
    """

    def __init__(self, train, step, save, validation, processes=1, seed=0):
        self.train, self.processes, self.random = train, processes, random.Random(seed)
        self.step, self.save, self.validation = step, save, validation
        self.now, self.saved_at = 20.0, 0.0
        self.newest_seconds, self.longest_seconds = [], 0.0

    def about(self, seconds):
        return seconds * self.random.uniform(1.0, 1.2)

    def is_saving(self):
        return self.now < self.saved_at

    def finish_step(self):
        """A step is waited for once the next one is dispatched, or something is due."""
        if self.is_under_way:
            self.newest_seconds.append(self.about(self.step))
            self.now += self.newest_seconds[-1]
        self.is_under_way = False

    def run(self, max_seconds):
        """Trains until the limit or the last step, and returns that step."""
        with (
            mock.patch.object(launch, "seconds_since_start", lambda: self.now),
            mock.patch("jax.process_count", lambda: self.processes),
            mock.patch.object(distributed, "from_first", lambda number: number),
        ):
            return self.train_until(max_seconds)

    def train_until(self, max_seconds):
        limit = Deadline(max_seconds, self.train, self, self, lambda: self.validation)
        limit.check(0)
        self.is_under_way, heard_at, last = False, None, self.train.num_steps
        for step in range(1, self.train.num_steps + 1):
            self.finish_step()
            self.is_under_way = True
            if heard_at is None and limit.is_over(step):
                heard_at = self.now + self.random.uniform(0, 1) * (self.processes > 1)
            if heard_at is not None and self.now >= heard_at:
                last = min(last, step + (self.random.randint(0, 2) if self.processes > 1 else 0))
            due = due_after(step, self.train, stopping=step == last, measuring=step == 1)
            saves = due.checkpoint or (due.validation and self.random.random() < 0.5)
            if due.validation or saves:
                self.finish_step()
            if due.validation:
                self.now += self.about(self.validation)
            if saves:
                self.now = max(self.now + 0.8 * self.step, self.saved_at)
                seconds = self.about(self.save)
                self.longest_seconds = max(self.longest_seconds, seconds)
                self.saved_at = self.now + seconds
            if step == 1 and not due.end:
                self.now = self.saved_at
                limit.check(step)
            if due.end:
                break
        self.now = max(self.now, self.saved_at)
        return step


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    step=st.floats(0.02, 60.0),
    save=st.floats(0.1, 200.0),
    validation=st.floats(0.1, 200.0),
    checkpoint_every=st.sampled_from([0, 1, 2, 3, 10]),
    eval_every=st.sampled_from([0, 1, 2, 7, 50]),
    processes=st.sampled_from([1, 4]),
    limit=st.floats(10.0, 5000.0),
    seed=st.integers(0, 9),
)
def test_a_run_ends_before_its_limit_or_is_told_a_limit_with_which_it_trains(
    step, save, validation, checkpoint_every, eval_every, processes, limit, seed
):
    train = TrainConfig(num_steps=1000, checkpoint_every=checkpoint_every, eval_every=eval_every)
    for _ in range(3):
        loop = Simulation(train, step, save, validation, processes, seed)
        try:
            last = loop.run(limit)
        except UserError as error:
            told = re.search(
                r"--max_seconds=(\S+) leaves no .* With --max_seconds=(\d+), ", str(error)
            )
            assert float(told[1]) == pytest.approx(limit, rel=1e-5) and int(told[2]) > limit
            limit = float(told[2])
        else:
            break
    else:
        pytest.fail("each limit was followed by another")
    left = limit - loop.now
    assert left >= deadline.END_SECONDS - deadline.NOTICE_SECONDS
    assert last > 2
    stopped = last < 1000
    if stopped and processes == 1:  # not too early: the most that can come, and a step
        assert left < deadline.MARGIN * 1.2 * (6 * step + 2 * validation + 4 * save) + 10


def make_deadline(max_seconds, train=None, steps=(), save=0.0, validation=0.0, saving=False):
    clock = SimpleNamespace(newest_seconds=steps)
    checkpointer = SimpleNamespace(longest_seconds=save, is_saving=lambda: saving)
    return Deadline(max_seconds, train or TrainConfig(), clock, checkpointer, lambda: validation)


@pytest.mark.parametrize(
    ("step", "saving", "steps", "saves", "validations"),
    [
        (5, False, 3, 1, 0),
        (5, True, 3, 2, 0),  # the last save waits for the one under way
        (7, False, 4, 2, 0),  # a save is due after this step
        (7, True, 4, 3, 0),
        (9, False, 3, 1, 1),  # a validation is due after the next step
        (10, False, 4, 2, 1),
        (100, False, 3, 1, 1),  # the end: there is no next step
    ],
)
def test_a_run_stops_when_the_rest_of_its_time_is_what_stopping_may_take(
    monkeypatch, step, saving, steps, saves, validations
):
    train = TrainConfig(num_steps=100, checkpoint_every=7, eval_every=10)
    limit = make_deadline(1000.0, train, [2.0, 4.0, 3.0], 10.0, 20.0, saving)
    needed = 1.25 * (steps * 4.0 + 10.0 * saves + 20.0 * validations) + 5.0
    assert limit.seconds_to_stop(step) == needed
    for late in (-0.1, 0.1):
        monkeypatch.setattr(launch, "seconds_since_start", lambda: 1000 - needed + late)  # noqa: B023
        stop = StopSignal(limit.is_over)
        assert stop.reached(step) == stop.is_late == (late > 0)
        assert stop.requested == (signal.SIGTERM if late > 0 else None)
    about = f" ({needed - 0.1:.0f} s are left, and up to {needed:.0f} s are needed)"
    assert limit.reason == f"--max_seconds=1000{about}"
    assert not StopSignal(make_deadline(None).is_over).reached(step)


def test_a_limit_that_start_up_has_used_up_is_a_mistake(monkeypatch):
    monkeypatch.setattr(launch, "seconds_since_start", lambda: 26.0)
    make_deadline(None).check(0)
    make_deadline(31.5).check(0)
    about = r"=30 leaves no time to train: to start took 26 s, and to stop may take 5 s\. With "
    with pytest.raises(UserError, match=f"{about}--max_seconds=70, half of the time is for steps"):
        make_deadline(30.0).check(0)


def test_the_age_of_a_process_counts_from_its_start_not_from_its_imports():
    program = "import time; time.sleep(1); from gpt2 import launch; "
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", f"{program}print(launch.seconds_since_start())"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert 1.0 <= float(done.stdout) <= time.monotonic() - began + 0.02


def test_a_limit_that_is_no_time_is_refused(tmp_path):
    code, _, told = run(tmp_path / "run", *ENDLESS, "--max_seconds=nan")
    assert code == 2 and told.count("\n") == 1
    assert re.match(
        r"error: --max_seconds=.* is not above 0 and finite\. For example, use --max_seconds=3600",
        told,
    )


@pytest.mark.slow
def test_a_run_with_a_limit_ends_before_it_with_all_saved_and_continues(tmp_path, slow_saves):
    workdir, limit, script = tmp_path / "run", 75, slow_saves(5)
    steps = [0]
    for _ in range(2):
        began = time.monotonic()
        code, stdout, told = run(workdir, *ENDLESS, f"--max_seconds={limit}", script=script)
        seconds = time.monotonic() - began
        assert code == 143, told
        found = re.search(
            r"stopped by --max_seconds=75 \((\d+) s are left, and up to (\d+) s are needed\) at "
            r"step (\d+); the same command continues",
            stdout,
        )
        assert found and 12 <= int(found[1]) <= int(found[2]) <= 40  # two saves of 5 s, and more
        assert limit - 40 < seconds < limit
        steps.append(int(found[3]))
        assert (workdir / "checkpoints" / found[3]).is_dir()
    assert 0 < steps[1] < steps[2]
    assert [line["step"] for line in metrics_of(workdir)] == list(range(1, steps[2] + 1))


@pytest.mark.thorough
def test_a_limit_too_short_for_progress_is_a_mistake_so_that_a_queue_stops_repeating(
    tmp_path, slow_saves
):
    workdir = tmp_path / "run"
    code, _, told = run(workdir, *ENDLESS, "--max_seconds=50", script=slow_saves(20))
    assert code == 2 and told.count("\n") == 1
    found = re.fullmatch(
        r"error: --max_seconds=50 leaves no time to train: to start took \d+ s, and to stop may "
        r"take (\d+) s\. With --max_seconds=(\d+), half of the time is for steps\.\n",
        told,
    )
    assert found, told
    assert 30 <= int(found[1]) < 60 and int(found[2]) % 10 == 0
    assert latest_step(workdir) == 1


BLOCKED = """
import os, signal, threading, hashlib, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from gpt2 import interrupts, launch
launch.prepare_process()
interrupts.take()
interrupts.say_when_left(lambda: "; all is saved")
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
    ("mode", "pauses", "code", "told"),
    [
        ("", (0.5, 0.6), 130, "left at once by a second SIGINT; all is saved\n"),
        ("", (0.5, 0.0, 0.0), None, ""),  # a launcher has sent the same one several times
        ("interrupts.end_at_once()", (0.5,), 130, "stopped by SIGINT; all is saved\n"),
        (
            "interrupts.ignore()",
            (0.5, 0.6),
            130,
            "left at once by a second SIGINT; all is saved\n",
        ),
        # The words' disk fails, or hangs.
        (
            "interrupts.say_when_left(lambda: 1 / 0)",
            (0.5, 0.6),
            130,
            "left at once by a second SIGINT\n",
        ),
        (
            "interrupts.say_when_left(lambda: time.sleep(60))",
            (0.5, 0.6),
            130,
            "left at once by a second SIGINT\n",
        ),
    ],
    ids=["second", "repeated", "at once", "done", "failing words", "hanging words"],
)
def test_ctrl_c_ends_a_process_whose_main_thread_hears_nothing(mode, pauses, code, told):
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED.format(mode=mode, pauses=pauses)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    if code is None:
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=3)
        process.kill()
    found = process.communicate(timeout=20)
    if code is not None:
        assert (process.returncode, *found) == (code, "", told)


@pytest.mark.parametrize("mode", ["interrupts.end_at_once()", ""], ids=["at once", "second"])
def test_ctrl_c_ends_a_process_whose_stderr_nobody_reads(mode):
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED.format(mode=mode, pauses=(0.5, 0.6))],
        stderr=writer,
        cwd=ROOT,
    )
    os.close(writer)
    os.close(reader)
    try:
        assert process.wait(timeout=20) == 130
    finally:
        process.kill()


def test_ctrl_c_just_before_a_run_takes_it_over_is_not_lost():
    program = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from gpt2 import interrupts, launch
launch.prepare_process()
interrupts.take()
interrupts.end_at_once()
time.sleep(0.1)  # the thread listens
sys.setswitchinterval(100)  # and will come too late
signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, lambda *_: print("taken over"))
time.sleep(1)
print("lost")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=20
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by SIGINT\n")


CLOSING = """
import os, signal, time
from gpt2.telemetry.metrics import MetricsWriter
from gpt2.telemetry.watchdog import Watchdog

leave, close = Watchdog.__exit__, MetricsWriter.close
def press(self, *exception):
    leave(self, *exception)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)  # in which the thread that listens hears of it
def note(self):
    close(self)
    print("closed", flush=True)
Watchdog.__exit__, MetricsWriter.close = press, note
"""


@pytest.mark.thorough
def test_ctrl_c_while_the_files_of_a_run_are_closed_lets_them_be(tmp_path):
    script = tmp_path / "closing.py"
    script.write_text(train_with(CLOSING))
    options = [*TINY, "--config.data.corpus=synthetic", "--config.train.eval_batches=1"]
    code, stdout, told = run(tmp_path / "run", *options, script=script)
    assert (code, told) == (130, "")
    assert stdout.endswith("closed\nstopped by SIGINT at step 8; the same command continues\n")


@pytest.mark.thorough
def test_ctrl_c_saves_a_run_whose_screen_has_lost_its_reader(tmp_path):
    """As in `python train.py | tee log`, since Ctrl-C ends `tee` too."""
    workdir = tmp_path / "run"
    process = start(workdir, *ENDLESS)
    wait_for_step(process, workdir, 3)
    process.stdout.close()
    wait_for_step(process, workdir, metrics_of(workdir)[-1]["step"] + 5)  # it goes on
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stderr.read() == ""
    assert latest_step(workdir) == metrics_of(workdir)[-1]["step"]


def wait_for_line(process, text):
    """Reads what a process prints until a line holds `text`."""
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it never said {text}: {process.stderr.read()}")


@pytest.mark.parametrize(
    ("number", "is_late", "told"),
    [
        (signal.SIGINT, False, "saving; a second Ctrl-C would end the run without that"),
        (signal.SIGTERM, False, "saving, since SIGTERM came"),
        (None, True, "saving, since --max_seconds has all but passed"),
    ],
)
def test_a_save_is_told_with_what_stops_the_run(number, is_late, told):
    with StopSignal(lambda step: is_late) as stop:
        if number:
            signal.raise_signal(number)
        assert stop.reached(1)
        assert stop.describe_save() == told


@pytest.mark.thorough
def test_a_second_ctrl_c_leaves_a_save_and_says_what_stays(tmp_path, slow_saves):
    workdir, options = tmp_path / "run", [*ENDLESS, "--config.train.checkpoint_every=2"]
    options += ["--config.train.num_steps=4"]
    assert run(workdir, *options)[0] == 0
    process = start(workdir, *ENDLESS, script=slow_saves(100))
    wait_for_step(process, workdir, 6)
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "saving; a second Ctrl-C would end the run without that")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    code, _, told = finish(process, timeout=30)
    assert time.monotonic() - began < 3
    about = "left at once by a second SIGINT; the same command continues from step 4"
    assert (code, told.splitlines()[-1]) == (130, about)


@pytest.mark.thorough
def test_a_second_sigterm_leaves_a_save_alone(tmp_path, slow_saves):
    workdir = tmp_path / "run"
    process = start(workdir, *ENDLESS, script=slow_saves(4))
    wait_for_step(process, workdir, 3)
    process.send_signal(signal.SIGTERM)
    wait_for_line(process, "saving, since SIGTERM came")
    for _ in range(3):
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
    code, stdout, told = finish(process, timeout=60)
    assert code == 143 and not told
    step = re.search(r"stopped by SIGTERM at step (\d+); the same command", stdout)[1]
    assert (workdir / "checkpoints" / step).is_dir()
    assert metrics_of(workdir)[-1]["step"] == int(step)


@pytest.mark.slow
def test_ctrl_c_at_any_moment_is_a_line_and_the_run_continues_to_the_same_bits(tmp_path):
    options = [*TINY, "--config.train.eval_batches=2", f"--config.data.data_dir={tmp_path}/data"]
    began = time.monotonic()
    assert run(tmp_path / "whole", *options)[0] == 0
    seconds = time.monotonic() - began
    wanted = params_of(tmp_path / "whole")
    for index in range(12):
        workdir = tmp_path / str(index)
        process = start(workdir, *options)
        time.sleep(0.3 + seconds * index / 12)
        process.send_signal(signal.SIGINT)
        code, stdout, told = finish(process, timeout=120)
        assert code == (130 if told else code) and code in (0, 130), (code, told)
        assert re.fullmatch(r"(stopped by SIGINT(; [^\n]+)?\n)?", told), told
        assert code != 130 or told or "stopped by SIGINT at step" in stdout
        if index % 3 == 0:
            assert run(workdir, *options)[0] == 0
            for name, value in params_of(workdir).items():
                np.testing.assert_array_equal(value, wanted[name], err_msg=name)
            assert [line["step"] for line in metrics_of(workdir)] == list(range(1, 9))


SLOW_STEPS = """
import time
from gpt2.training.batches import Batches

batch = Batches._train_batch
Batches._train_batch = lambda self, step: time.sleep(0.5) or batch(self, step)
"""


def metrics_by_step(workdir):
    """What a run has logged, without its speed."""
    return [
        {name: line[name] for name in line if not name.startswith("perf/")}
        for line in metrics_of(workdir)
    ]


def events_by_step(workdir):
    """The scalars of TensorBoard's files, each once, as their START records have them read."""
    found = {}
    for step, name, value in events(workdir):
        if name == "START":
            found = {key: each for key, each in found.items() if key[0] < step}
        else:
            assert (step, name) not in found
            found[step, name] = value
    return {key: value for key, value in found.items() if not key[1].startswith("perf/")}


@pytest.mark.thorough
def test_a_folder_that_is_copied_and_renamed_continues_as_if_never_stopped(tmp_path):
    """Its parameters, metrics, events, scores and checkpoints are those of a run left alone."""
    options = [*TINY, "--config.data.corpus=synthetic", "--config.train.eval_every=2"]
    options += ["--config.train.checkpoint_every=3", "--config.train.eval_batches=2"]
    options += ["--config.train.keep_every=3"]
    script, whole, first = tmp_path / "slow.py", tmp_path / "whole", tmp_path / "first"
    script.write_text(train_with(SLOW_STEPS))
    assert run(whole, *options)[0] == 0
    process = start(first, *options, script=script)
    wait_for_step(process, first, 5)
    process.kill()  # after the newest checkpoint, in whose place are metrics and events
    process.communicate()
    saved = latest_step(first)
    shutil.copytree(first, tmp_path / "copy")
    moved = (tmp_path / "copy").rename(tmp_path / "moved, elsewhere")
    shutil.rmtree(first)
    assert metrics_of(moved)[-1]["step"] > saved > 0
    code, stdout, told = run(moved, *options)
    assert code == 0 and f"{saved} (continued) to 8" in stdout, told

    wanted = params_of(whole)
    for name, value in params_of(moved).items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)
    for read in (metrics_by_step, events_by_step):
        assert read(moved) == read(whole)
    for workdir in (moved, whole):
        with Checkpointer(workdir, read_only=True) as checkpointer:
            losses = {m["step"]: m["eval/loss"] for m in metrics_of(workdir) if "eval/loss" in m}
            best = min(losses, key=losses.get)
            assert checkpointer.best() == (best, losses[best])
            assert checkpointer.all_steps() == sorted({3, 6, best, 8})
    # Time goes on from what the checkpoint had taken; what the kill undid does not count.
    seconds = [line["perf/total_seconds"] for line in metrics_of(moved)]
    assert seconds == sorted(seconds)
    start_up = seconds[saved] - seconds[saved - 1]
    assert start_up > 10 * (seconds[-1] - seconds[-2])
    assert re.search(r"^time: \d+\w( \d+s)? over all starts; of this one ", stdout, re.MULTILINE)
    assert f"{moved} is finished at step 8; raise" in run(moved, *options)[1]
