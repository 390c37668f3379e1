"""What a run writes and shows: metrics that survive kills, progress, curves, traces."""

import errno
import json
import math
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.telemetry import metrics, plots, progress
from gpt2.utils import text


def lines(workdir) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def open_writer(workdir, resume_step=0, **options) -> metrics.MetricsWriter:
    return metrics.MetricsWriter(
        workdir, {}, **({"tensorboard": False, "resume_step": resume_step} | options)
    )


def events(workdir) -> list[tuple[int, str, float]]:
    """The scalars of all event files, read by the format's definition, in the order of names."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:  # length u64, its crc u32, payload, its crc u32
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            if event.HasField("session_log"):
                found.append((event.step, "START", 0.0))
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            data = data[16 + size :]
    return found


# metrics.jsonl


def test_values_of_one_step_share_a_line(tmp_path):
    with open_writer(tmp_path) as writer:
        writer.write(10, {"tokens": 640, "train/loss": 3.5})
        writer.write(10, {"eval/loss": 3.25})
        writer.write(20, {"tokens": 1280, "train/loss": 3.0})
    assert lines(tmp_path) == [
        {"step": 10, "tokens": 640, "train/loss": 3.5, "eval/loss": 3.25},
        {"step": 20, "tokens": 1280, "train/loss": 3.0},
    ]


def test_flushed_step_is_on_disk_and_still_takes_values(tmp_path):
    writer = open_writer(tmp_path)
    writer.write(1, {"train/loss": 3.0})
    writer.write(2, {"train/loss": 2.0})
    assert [line["step"] for line in lines(tmp_path)] == [1]
    writer.flush(2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    writer.write(2, {"eval/loss": 2.5})
    writer.close()
    assert lines(tmp_path)[1] == {"step": 2, "train/loss": 2.0, "eval/loss": 2.5}
    assert len(lines(tmp_path)) == 2


def test_older_step_is_refused(tmp_path):
    writer = open_writer(tmp_path)
    writer.write(2, {"train/loss": 2.0})
    with pytest.raises(ValueError, match="step 1 after those of step 2"):
        writer.write(1, {"train/loss": 3.0})


def test_not_finite_is_null_in_json(tmp_path):
    with open_writer(tmp_path) as writer:
        writer.write(1, {"train/loss": math.nan, "train/grad_norm": math.inf, "tokens": 8})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1,
        "train/loss": None,
        "train/grad_norm": None,
        "tokens": 8,
    }


def test_resume_drops_later_lines_and_a_torn_one(tmp_path):
    with open_writer(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, {"train/loss": 10.0 - step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "train/lo')
    with open_writer(tmp_path, resume_step=3) as writer:
        assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
        writer.write(3, {"eval/loss": 7.5})
        for step in (4, 5, 6):
            writer.write(step, {"train/loss": 10.0 - step})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert lines(tmp_path)[2] == {"step": 3, "train/loss": 7.0, "eval/loss": 7.5}


def test_damaged_lines_are_left_out_told_and_kept_in_a_copy(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    with metrics.MetricsWriter(tmp_path, {}, tensorboard=False) as writer:
        for step in range(1, 7):
            writer.write(step, {"train/loss": float(step)})
    lines = path.read_bytes().splitlines(keepends=True)
    bad = [b"garbage\n", b"\n", b"{}\n", b"[1]\n", b"\0" * 20 + b"\n", b'{"step": "x"}\n']
    mixed = [line for pair in zip(lines, bad, strict=True) for line in pair]
    path.write_bytes(b"".join([*mixed, lines[0]]))  # a step again is left out too
    metrics.MetricsWriter(tmp_path, {}, tensorboard=False, resume_step=6).close()
    assert [record["step"] for record in metrics.read_metrics(path)] == [1, 2, 3, 4, 5, 6]
    assert capsys.readouterr().err == (
        f"warning: 7 lines of {path} cannot be read and are left out; see {path}.damaged\n"
    )
    assert b"garbage" in (tmp_path / "metrics.jsonl.damaged").read_bytes()


def test_a_full_disk_keeps_lines_until_there_is_room(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with metrics.MetricsWriter(tmp_path, {}, tensorboard=False) as writer:
        writer.write(1, {"train/loss": 1.0})
        writer.flush(1)
        with monkeypatch.context() as patched:
            patched.setattr(metrics.MetricsWriter, "_append", full)
            patched.setattr(metrics.MetricsWriter, "_replace", full)
            writer.write(1, {"eval/loss": 1.5})  # into a line that is on disk
            for step in range(2, 5):
                writer.write(step, {"train/loss": float(step)})
        writer.write(5, {"train/loss": 5.0})
    lines = metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0] == {"step": 1, "train/loss": 1.0, "eval/loss": 1.5}
    assert capsys.readouterr().err.count("cannot be written now (No space left") == 1


def test_a_damaged_step_costs_its_own_line_alone(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    with metrics.MetricsWriter(tmp_path, {}, tensorboard=False) as writer:
        for step in range(1, 31):
            writer.write(step, {"train/loss": 1.0})
    whole = path.read_text()
    for bad in (19, 1, 25, 3000):
        path.write_text(whole.replace('"step": 11,', f'"step": {bad},'))
        metrics.MetricsWriter(tmp_path, {}, tensorboard=False, resume_step=30).close()
        steps = [line["step"] for line in metrics.read_metrics(path)]
        assert steps == [step for step in range(1, 31) if step != 11]
        assert "1 line of" in capsys.readouterr().err
    assert len(list(tmp_path.glob("*.damaged*"))) == 4


def test_waiting_lines_are_written_at_the_end(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with metrics.MetricsWriter(tmp_path, {}, tensorboard=False) as writer:
        monkeypatch.setattr(metrics.MetricsWriter, "_append", full)
        for step in range(1, 5):
            writer.write(step, {"train/loss": 1.0})
        writer.flush(4)
        monkeypatch.undo()
    assert len(metrics.read_metrics(tmp_path / "metrics.jsonl")) == 4


def test_a_gap_before_the_checkpoint_is_told(tmp_path, capsys):
    config = {"train": {"log_every": 10}}
    with metrics.MetricsWriter(tmp_path, config, tensorboard=False) as writer:
        for step in range(10, 50, 10):
            writer.write(step, {"train/loss": 1.0})
    metrics.MetricsWriter(tmp_path, config, tensorboard=False, resume_step=45).close()
    assert capsys.readouterr().err == ""
    metrics.MetricsWriter(tmp_path, config, tensorboard=False, resume_step=50).close()
    assert "lacks what was logged between step 40 and step 50" in capsys.readouterr().err


def test_torn_line_is_dropped_though_its_step_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 8}\n{"step": 2, "tokens": 1')
    with open_writer(tmp_path, resume_step=5) as writer:
        writer.write(2, {"tokens": 16})
    assert lines(tmp_path) == [{"step": 1, "tokens": 8}, {"step": 2, "tokens": 16}]


KILLED_RUN = """
import itertools, sys
from pathlib import Path
from gpt2.telemetry.metrics import MetricsWriter
workdir, start = Path(sys.argv[1]), int(sys.argv[2])
writer = MetricsWriter(workdir, {}, tensorboard=False, resume_step=start)
for step in itertools.count(start + 1):
    writer.write(step, {"train/loss": 1 / step})
    if step % 7 == 0:
        writer.write(step, {"eval/loss": 2 / step})
        writer.flush(step)
        (workdir / "checkpoint").write_text(str(step))
        print(step, flush=True)
"""


def test_sigkill_at_any_moment_leaves_each_step_once(tmp_path):
    checkpoint = 0
    for delay in (0.0, 0.003, 0.011, 0.02):
        command = [sys.executable, "-c", KILLED_RUN, str(tmp_path), str(checkpoint)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
            run.stdout.readline()  # it has saved a checkpoint, and writes on
            time.sleep(delay)
            run.send_signal(signal.SIGKILL)
        saved = (tmp_path / "checkpoint").read_text()
        checkpoint = int(saved or checkpoint)
        open_writer(tmp_path, resume_step=checkpoint).close()
        assert lines(tmp_path) == [
            {"step": s, "train/loss": 1 / s} | ({"eval/loss": 2 / s} if s % 7 == 0 else {})
            for s in range(1, checkpoint + 1)
        ]


# TensorBoard and W&B


def test_event_file_holds_what_was_flushed(tmp_path):
    writer = open_writer(tmp_path, tensorboard=True)
    writer.write(1, {"train/loss": 3.5, "tokens": 64})
    writer.flush(1)
    assert events(tmp_path) == [(1, "START", 0.0), (1, "train/loss", 3.5), (1, "tokens", 64.0)]
    writer.close()


def test_resumed_event_file_purges_from_the_next_step_on(tmp_path):
    for resume_step, step in ((0, 5), (3, 4)):
        with open_writer(tmp_path, resume_step=resume_step, tensorboard=True) as writer:
            writer.write(step, {"train/loss": 1.5})
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    first, second = [(1, "START", 0.0), (5, "train/loss", 1.5)], [(4, "START", 0.0)]
    assert events(tmp_path) == [*first, *second, (4, "train/loss", 1.5)]


def test_missing_wandb_names_the_package_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        open_writer(tmp_path / "run", wandb=True)
    assert not (tmp_path / "run").exists()


def test_wandb_run_continues_under_its_identity(tmp_path, monkeypatch):
    starts, logged = [], []
    run = types.SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), finish=lambda: None
    )
    fake = types.SimpleNamespace(
        init=lambda **options: starts.append(options) or run, Error=OSError
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for resume_step in (0, 1):
        with open_writer(tmp_path, resume_step=resume_step, wandb=True) as writer:
            writer.write(2, {"train/loss": 2.0})
    assert starts[0]["id"] == starts[1]["id"]
    assert starts[0]["name"] == tmp_path.name
    assert logged == [(2, {"train/loss": 2.0})] * 2


def test_telemetry_loads_nothing_heavy():
    code = (
        "import sys, gpt2.telemetry.metrics, gpt2.telemetry.progress, gpt2.telemetry.plots\n"
        "heavy = {'matplotlib', 'tensorboardX', 'wandb', 'rich', 'jax'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Progress


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (text.format_count(950), "950"),
        (text.format_count(9_500), "9,500"),
        (text.format_count(12_345), "12.3k"),
        (text.format_count(124_439_808), "124.4M"),
        (text.format_count(9e9), "9B"),
        (text.format_count(1.07789e16), "10.8P"),
        (text.format_rate(9_500.4), "9,500"),
        (text.format_rate(31_000), "31.0k"),
        (text.format_bytes(512), "512 B"),
        (text.format_bytes(3.4 * 2**30), "3.4 GiB"),
        (text.format_duration(42.4), "42s"),
        (text.format_duration(83), "1m 23s"),
        (text.format_duration(7_530), "2h 05m"),
        (text.format_duration(3 * 86_400 + 4 * 3_600), "3d 04h"),
        (text.format_duration(math.inf), "?"),
    ],
)
def test_figures_read_well(written, expected):
    assert written == expected


def test_plain_progress_prints_a_line_per_update_with_metrics(capsys):
    with progress.Progress(total=100, start=50) as shown:
        shown.write(60, {"train/loss": 3.21456, "perf/tokens_per_second": 12_345.0})
        shown.write(61, {})
        shown.write(100, {"eval/loss": 3.0, "eval/perplexity": 20.0855, "tokens": 640})
    assert capsys.readouterr().out.splitlines() == [
        "step  60/100 | loss 3.2146 | 12.3k tokens/s | 0s left",
        "step 100/100 | val loss 3.0000 | perplexity 20.09 | 0s left",
    ]


def test_terminal_keeps_validations_above_the_bar(capsys, monkeypatch):
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    with progress.Progress(total=100) as shown:
        shown.write(50, {"train/loss": 3.5, "perf/mfu": 0.412})
        shown.write(100, {"eval/loss": 3.0})
    out = capsys.readouterr().out
    assert "step 100/100 | val loss 3.0000\n" in out
    assert "100/100 loss 3.5000 | val loss 3.0000 | MFU 41.2% 0s left" in out


@pytest.mark.parametrize(
    ("width", "total", "bar", "has_mfu"),
    [(100, 200, 16, True), (86, 200, 7, True), (80, 200, 0, True), (80, 10**6, 5, False)],
)
def test_a_narrow_terminal_takes_the_bar_then_metrics_and_never_the_steps(
    width, total, bar, has_mfu
):
    from rich.console import Console

    metrics = {"train/loss": 4.5886, "eval/loss": 4.8165, "perf/tokens_per_second": 2116.0}
    shown = progress._Bar(total, 0)
    shown.show(total, metrics | {"perf/mfu": 0.435}, "1m 48s left")
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    (line,) = capture.get().splitlines()
    assert len(line) <= width and line.count("━") == bar
    assert f"{total}/{total} loss 4.5886 | val loss 4.8165 | 2,116 tokens/s" in line
    assert ("MFU" in line) == has_mfu and line.endswith(" 1m 48s left")


def test_what_takes_long_is_told_once_it_does(capsys):
    with progress.told_if_slow("compiling", seconds=60.0):
        pass
    with progress.told_if_slow("compiling", seconds=0.0):
        time.sleep(0.2)
        assert capsys.readouterr().out == "compiling\n"


def test_a_validation_lengthens_no_estimate(capsys, monkeypatch):
    clock = iter([0.0, 10.0, 15.0, 25.0, 50.0])  # the validation after 10 steps takes 5 s
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    with progress.Progress(total=100) as shown:
        shown.write(10, {"train/loss": 3.0})
        shown.write(10, {"eval/loss": 3.0})
        shown.write(20, {"train/loss": 3.0})
        shown.write(40, {"eval/loss": 3.0})
    left = [line.split(" | ")[-1] for line in capsys.readouterr().out.splitlines()]
    assert left == ["1m 30s left", "1m 25s left", "1m 40s left", "1m 15s left"]


def test_no_time_left_is_told_before_a_step_tells_it(capsys):
    with progress.Progress(total=100) as shown:
        shown.write(0, {"eval/loss": 3.0})
    assert capsys.readouterr().out == "step   0/100 | val loss 3.0000\n"


# Curves and traces


def write_run(workdir, steps: int):
    with open_writer(workdir) as writer:
        for step in range(1, steps + 1):
            writer.write(step, {"tokens": 64 * step, "train/loss": 2 + 8 / step})
            if step % 10 == 0:
                writer.write(step, {"eval/loss": 2.5 + 8 / step})
        writer.write(steps + 1, {"tokens": 64 * (steps + 1), "train/loss": math.nan})
    return workdir / "metrics.jsonl"


@pytest.mark.parametrize("steps", [1, 100])
def test_curves_are_drawn_for_short_and_long_runs(tmp_path, steps):
    png = tmp_path / "loss.png"
    plots.plot_losses(write_run(tmp_path, steps), png, title="a run")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size > 10_000


def test_run_without_losses_draws_nothing(tmp_path):
    with open_writer(tmp_path) as writer:
        writer.write(1, {"tokens": 64})
    plots.plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_the_frame_holds_the_first_losses_unless_they_take_over_half_of_it():
    short = [8.1, 7.0, *np.linspace(6.2, 4.5, 18)]
    low, high = plots._limits(short, [5.2, 4.8])
    assert low < 4.5 and high > 8.1
    long = [*np.geomspace(11, 4, 50), *np.linspace(4, 3, 950)]
    low, high = plots._limits(long, [])
    assert low < 3 and 4 <= high < 4.1


def test_smoothing_keeps_a_straight_line_straight():
    line = [3.0 * i for i in range(50)]
    assert plots._smooth(line, window=9)[:-4] == pytest.approx(line[:-4])
    assert np.std(plots._smooth([0.0, 1.0] * 25, window=9)[5:-5]) < 0.1
