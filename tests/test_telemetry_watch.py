"""What a run says while it trains: means, steps left out, peaks of memory, hangs, histograms."""

import math
import time
import types

import numpy as np
import pytest

from gpt2.errors import DivergedError
from gpt2.telemetry import memory, metrics, throughput, watchdog
from gpt2.telemetry.event_file import NUM_BUCKETS, Histogram
from gpt2.telemetry.reporter import Reporter


class StubClock:
    """What a watchdog reads of a clock."""

    def __init__(self, newest_seconds=()):
        self.num_steps, self.current, self.newest_seconds = 0, "step", newest_seconds


def barks_within(seconds, clock, least=0.2, meanwhile=lambda: None):
    """Returns the exit codes of a watchdog over some time."""
    codes = []
    with watchdog.Watchdog(clock, least, end=codes.append):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            meanwhile()
            time.sleep(0.01)
    return codes


def test_a_watchdog_ends_a_run_without_steps(capfd):
    assert barks_within(1.0, StubClock([0.01] * 9)) == [4]
    told = capfd.readouterr().err
    assert "in barks_within" in told  # the stack of another thread
    assert told.splitlines()[-1].startswith("error: the run hangs: no step has ended for 0s, and a")


def test_a_watchdog_lets_steps_and_other_phases_take_their_time():
    def step():
        moving.num_steps += 1

    moving, validating, off = StubClock([0.01]), StubClock([0.01]), StubClock([0.01])
    validating.current = "validation"
    assert barks_within(0.8, moving, meanwhile=step) == []
    assert barks_within(0.8, validating) == []
    assert barks_within(0.8, StubClock([0.3])) == []  # ten steps are 3 seconds
    assert barks_within(0.8, StubClock()) == []  # the first step
    assert barks_within(0.8, off, least=0.0) == []


def test_peak_memory_is_that_of_the_fullest_device_or_left_out():
    def device(stats):
        return types.SimpleNamespace(memory_stats=lambda: stats)

    devices = [
        device({"peak_bytes_in_use": 5, "bytes_in_use": 9}),
        device({"peak_bytes_in_use": 7}),
    ]
    assert memory.peak_memory(devices) == {"perf/peak_memory_bytes": 7.0}
    assert memory.peak_memory([device(None), device({})]) == {}
    assert memory.peak_memory() == {}  # of CPUs


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self):
        self.lines, self.said, self.histograms = {}, [], {}

    def write(self, step, metrics):
        self.lines.setdefault(step, {}).update(metrics)

    def write_histograms(self, step, histograms):
        self.histograms[step] = histograms

    def say(self, text):
        self.said.append(text)


def report(steps, **options):
    """Reports steps, each its metrics, and returns the writer and the error if there was one."""
    kept = Kept()
    clock = throughput.StepClock(10, flops_per_token=1.0)
    options = {"log_every": 3, "num_steps": len(steps)} | options
    reporter = Reporter([kept], clock, **options)
    try:
        for step, metrics in enumerate(steps, start=1):
            reporter.step(step, metrics, note=metrics.pop("note", ""))
        reporter.catch_up()
    except DivergedError as error:
        return kept, error
    return kept, None


def losses(*values, **more):
    return [{"train/loss": value, "train/grad_norm": 1.0} | more for value in values]


def test_a_line_has_the_mean_loss_since_the_last_line():
    kept, _ = report(losses(1.0, 2.0, 6.0, 5.0, 7.0, 12.0, 4.0))
    told = {step: line["train/loss"] for step, line in kept.lines.items()}
    assert told == {3: 3.0, 6: 8.0, 7: 4.0}


def test_steps_that_are_left_out_are_told_and_no_part_of_the_mean():
    on = {"skipped": 0.0, "bad_in_a_row": 0.0, "train/skipped_steps": 1.0}
    steps = losses(1.0, math.nan, 3.0, 500.0, **on)
    steps[1] |= {"skipped": 1.0, "bad_in_a_row": 1.0}
    steps[3] |= {"skipped": 1.0}
    kept, error = report(steps, skip_bad_steps=1)
    assert error is None
    assert kept.lines[3]["train/loss"] == 2.0 and kept.lines[3]["train/skipped_steps"] == 1.0
    assert not {"skipped", "bad_in_a_row"} & kept.lines[3].keys()
    assert kept.said == [
        "step 2 is left out: its loss nan and gradient norm 1 are not finite",
        "step 4 is left out: its loss 500 and gradient norm 1 stand out",
    ]
    steps = losses(1.0, math.nan, **on | {"bad_in_a_row": 2.0})
    assert str(report(steps, skip_bad_steps=1)[1]) == "the gradients are not finite at step 1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train/loss": math.inf}, "the loss is not finite at step 2"),
        ({"train/grad_norm": math.nan}, "the gradients are not finite at step 2"),
    ],
)
def test_the_first_step_that_is_not_finite_ends_a_run(change, message):
    steps = losses(1.0, 2.0, 3.0)
    steps[1] |= change
    kept, error = report(steps, log_every=1)
    assert str(error) == message and error.before
    assert list(kept.lines) == [1]
    steps[1] |= {"bad_in_a_row": 0.0}  # float16's scale is to blame
    assert report(steps)[1] is None


def test_a_note_is_told_when_its_step_is_done():
    steps = losses(1.0, math.nan)
    steps[0]["note"] = "one"
    steps[1]["note"] = "two"
    assert report(steps)[0].said == ["one"]


def test_histograms_go_to_tensorboard(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    counts = np.arange(NUM_BUCKETS, dtype=np.int32)
    found = Histogram(np.float32(-1.0), np.float32(3.0), counts)
    with metrics.MetricsWriter(tmp_path, {}) as writer:
        writer.write(4, {"param_norm/ln_f/scale": 2.0})
        writer.write_histograms(4, {"param/ln_f/scale": found})
    (path,) = (tmp_path / "tensorboard").iterdir()
    data, values = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        values += Event.FromString(data[12 : 12 + size]).summary.value
        data = data[16 + size :]
    (histo,) = [value.histo for value in values if value.tag == "param/ln_f/scale"]
    assert (histo.min, histo.max, histo.num) == (-1.0, 3.0, counts.sum())
    assert list(histo.bucket) == list(counts)
    np.testing.assert_allclose(histo.bucket_limit, np.linspace(-1, 3, counts.size + 1)[1:])
    lines = metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert lines == [{"step": 4, "param_norm/ln_f/scale": 2.0}]
