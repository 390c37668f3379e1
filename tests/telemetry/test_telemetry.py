"""What a run writes and shows: metrics that survive kills, progress, hangs, speed, compilation."""

import contextlib
import errno
import itertools
import math
import os
import re
import sys
import threading
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.config import Config, GPTConfig, LoggingConfig, TrainConfig
from gpt2.config.shapes import StepShape
from gpt2.errors import DivergedError, UserError
from gpt2.model.flops import model_flops_per_token
from gpt2.parallel import compiled
from gpt2.telemetry import chips, metrics, writers
from gpt2.telemetry.metrics import MetricsFile
from gpt2.telemetry.progress import Progress
from gpt2.telemetry.reporter import Reporter, Watchdog
from gpt2.telemetry.throughput import StepClock
from gpt2.telemetry.writers import Writer
from gpt2.training.workdir import check_options
from gpt2.utils.text import format_duration
from tests.helpers import SECONDS, configured, metrics_of
from tests.telemetry.event_files import events


def metrics_file(workdir, resume_step=0):
    return contextlib.closing(MetricsFile(workdir / "metrics.jsonl", resume_step))


def report_to(*writers, log_every=3, num_steps=100, **options):
    clock = StepClock(lambda step: 10 * step, float)
    config = TrainConfig(log_every=log_every, num_steps=num_steps, **options)
    return Reporter(writers, clock, config)


# metrics.jsonl


def test_values_of_one_step_share_a_line(tmp_path):
    writer = MetricsFile(tmp_path / "metrics.jsonl")
    writer.write(1, {"train/loss": 3.5, "tokens": 64})
    writer.write(2, {"train/loss": 2.0, "train/grad_norm": math.inf})
    assert metrics_of(tmp_path) == [{"step": 1, "train/loss": 3.5, "tokens": 64}]
    writer.write(2, {"eval/loss": 2.5})
    with pytest.raises(ValueError, match="step 1 cannot"):
        writer.write(1, {"train/loss": 3.0})
    writer.flush(2)
    assert len(metrics_of(tmp_path)) == 2
    with pytest.raises(ValueError, match="step 2 cannot"):
        writer.write(2, {"eval/loss": 2.0})
    writer.close()
    last = {"step": 2, "train/loss": 2.0, "train/grad_norm": None, "eval/loss": 2.5}
    assert metrics_of(tmp_path)[1:] == [last]
    assert metrics.read_metrics(tmp_path / "metrics.jsonl")[1:] == [last]


def steps_of(workdir):
    return [line["step"] for line in metrics_of(workdir)]


def test_resume_drops_later_lines_and_a_torn_one(tmp_path):
    with metrics_file(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, {"train/loss": 10.0 - step})
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('garbage\n\n{"step": 3, "train/lo')
    assert len(metrics.read_metrics(path)) == 5
    with metrics_file(tmp_path, resume_step=3) as writer:
        assert steps_of(tmp_path) == [1, 2, 3]
        writer.write(4, {"train/loss": 6.0})
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    with metrics_file(tmp_path):
        assert metrics_of(tmp_path) == []


def test_a_run_that_continues_at_its_last_step_adds_values_to_its_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 3}}\n{"garbage" * 9}\n{{"step": 4, "train/x": null}}\n')
    with metrics_file(tmp_path, resume_step=4) as writer:
        writer.write(4, {"eval/loss": 3.0})
    last = {"step": 4, "train/x": None, "eval/loss": 3.0}
    assert metrics_of(tmp_path) == [{"step": 3}, last]


NO_RECORDS = [
    b"[1]",
    b"{}",
    b'{"step": "5"}',
    b'{"step": 5, "train/loss": "low"}',
    b"\xff",
    b"[" * 200_000,
]


@pytest.mark.parametrize("line", NO_RECORDS, ids=range(len(NO_RECORDS)))
def test_a_line_that_is_no_record_is_skipped_with_a_warning(tmp_path, capsys, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "eval/loss": 3.0}\n' + line + b"\n")
    assert metrics.read_metrics(path) == [{"step": 1, "eval/loss": 3.0}]
    assert "line 2" in capsys.readouterr().err
    with metrics_file(tmp_path, resume_step=8) as writer:
        writer.write(9, {"eval/loss": 2.0})
    assert steps_of(tmp_path) == [1, 9]


def test_a_full_disk_keeps_lines_until_there_is_space(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with report_to(MetricsFile(tmp_path / "metrics.jsonl")) as writer:
        writer.write(1, {"train/loss": 1.0})
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            for step in range(2, 5):
                writer.write(step, {"train/loss": float(step)})
        writer.write(5, {"train/loss": 5.0})
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]
    assert capsys.readouterr().err.count("No space left") == 1


# TensorBoard and W&B


def test_event_files_hold_scalars_and_purge_what_a_resume_repeats(tmp_path):
    for resume_step in (0, 3):
        file = writers.EventFile(tmp_path / "tensorboard", resume_step)
        with report_to(file) as writer:
            writer.write(resume_step + 1, {"train/loss": 3.5})
            writer.flush(resume_step + 1)
    purges = []
    losses = []
    for event in events(tmp_path):
        if event.HasField("session_log"):
            purges.append(event.step)
        for value in event.summary.value:
            if value.tag == "train/loss":
                losses.append((event.step, value.simple_value))
    assert purges == [1, 4]
    assert losses == [(1, 3.5), (4, 3.5)]


def test_a_wandb_run_continues_under_its_identity(tmp_path, monkeypatch):
    starts = []
    logged = []

    def log(values, step):
        logged.append((step, values))

    def init(**options):
        starts.append(options)
        return types.SimpleNamespace(log=log, finish=lambda: None)

    fake = types.SimpleNamespace(init=init)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writers.Wandb(tmp_path, Config()).write(2, {"train/loss": 2.0})
    mine = Config(logging=LoggingConfig(wandb_project="mine"))
    monkeypatch.setenv("WANDB_NAME", "lion seed 2")  # as a sweep names its runs
    writers.Wandb(tmp_path, mine)
    assert logged == [(2, {"train/loss": 2.0})]
    first, second = starts
    assert first["id"] == second["id"]
    assert first["name"] == tmp_path.name
    assert first["project"] == "gpt2"
    assert second["name"] == "lion seed 2"
    assert second["project"] == "mine"
    assert second["config"]["logging"]["wandb_project"] == "mine"


def test_wandb_has_to_be_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = Config(logging=LoggingConfig(wandb=True))
    with pytest.raises(UserError, match="pip install wandb"):
        check_options(tmp_path, config)


def test_wandb_has_to_be_logged_in_or_offline(tmp_path, monkeypatch):
    def login():
        raise LookupError("No API key configured")

    settings = types.SimpleNamespace(mode="online")
    fake = types.SimpleNamespace(
        __spec__="a module",
        Error=LookupError,
        login=login,
        setup=lambda: types.SimpleNamespace(settings=settings),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = Config(logging=LoggingConfig(wandb=True))
    with pytest.raises(UserError, match=r"No API key configured.*`wandb login`"):
        check_options(tmp_path, config)
    settings.mode = "offline"
    check_options(tmp_path, config)


# Reporter and watchdog


class Memory(Writer):
    """A writer that stores steps and log lines in memory."""

    def __init__(self):
        self.lines = {}
        self.steps = []

    def step(self, step):
        self.steps.append(step)

    def write(self, step, metrics):
        self.lines.setdefault(step, {}).update(metrics)


def report(steps, **options):
    """Report the metrics of steps, and return the log lines and the error if there was one."""
    memory = Memory()
    reporter = report_to(memory, num_steps=len(steps), **options)
    try:
        for step, line in enumerate(steps, start=1):
            reporter.step(step, line)
            assert memory.steps == list(range(1, step))  # a step late
        reporter.catch_up()
    except DivergedError as error:
        return memory.lines, error
    return memory.lines, None


def losses(*values):
    return [{"train/loss": value, "train/grad_norm": 1.0} for value in values]


def test_a_line_has_the_mean_loss_since_the_last_line_and_all_that_a_step_gives():
    steps = losses(1.0, 2.0, 6.0, 5.0, 7.0, 12.0, 4.0)
    for step in steps:
        step["train/entropy"] = step["train/loss"] / 2
    steps[2]["train/grad_norm"] = 5.0
    lines, _ = report(steps)
    means = {step: line["train/loss"] for step, line in lines.items()}
    assert means == {1: 1.0, 3: 4.0, 6: 8.0, 7: 4.0}
    assert lines[3]["train/entropy"] == 2.0
    assert lines[3]["tokens"] == 30
    assert lines[3]["train/grad_norm"] == 5.0  # of its step


def test_the_noise_scale_is_the_ratio_of_two_means():
    steps = losses(1.0, 1.0, 1.0, 1.0)
    for step, signal in zip(steps, (-1.0, 1.0, 6.0, 0.0), strict=True):
        step["train/gradient_signal"] = signal
        step["train/gradient_noise"] = 10.0
    lines, _ = report(steps)
    scales = {step: line.get("train/noise_scale") for step, line in lines.items()}
    assert scales == {1: None, 3: 10.0 / 3.5, 4: None}


def test_what_overflowed_in_float16_is_no_part_of_a_mean():
    steps = losses(1.0, 9.0, 2.0)
    for step in steps:
        step |= {"train/gradient_signal": 5.0, "train/gradient_noise": 10.0}
        step["train/bad_in_a_row"] = 0.0
    steps[1]["train/grad_norm"] = math.inf
    steps[1]["train/gradient_noise"] = math.nan
    lines, error = report(steps)
    assert error is None
    assert lines[3]["train/noise_scale"] == 2.0
    assert lines[3]["train/loss"] == 5.5  # the loss itself has not overflowed


def skipping(*values):
    """Return the metrics of steps that are skipped if their loss is NaN or above 100."""
    steps = losses(*values)
    for step in steps:
        is_good = step["train/loss"] < 100
        step["train/bad_in_a_row"] = 0.0 if is_good else 1.0
        step["train/skipped_steps"] = 1.0
    return steps


def test_skipped_steps_are_printed_and_no_part_of_the_mean(capsys):
    steps = skipping(1.0, math.nan, 3.0, 500.0)
    lines, error = report(steps, skip_bad_steps=1)
    assert error is None
    assert lines[3]["train/loss"] == 3.0
    assert lines[3]["train/skipped_steps"] == 1.0
    skipped = re.findall(r"step (\d) is skipped", capsys.readouterr().out)
    assert skipped == ["2", "4"]


def test_more_bad_steps_in_a_row_than_may_be_skipped_end_a_run():
    steps = skipping(1.0, math.nan)
    for step in steps:
        step["train/bad_in_a_row"] = 2.0
    _, error = report(steps, skip_bad_steps=1)
    assert error.step == 1


@pytest.mark.parametrize(
    "change", [{"train/loss": math.inf}, {"train/grad_norm": math.nan}]
)
def test_the_first_step_with_nan_or_inf_ends_a_run(change):
    steps = losses(1.0, 2.0, 3.0)
    steps[1] |= change
    lines, error = report(steps, log_every=1)
    assert error.step == 2
    assert error.before
    assert list(lines) == [1]
    steps[1]["train/bad_in_a_row"] = 0.0  # float16's scale is to blame
    _, error = report(steps)
    assert error is None


def ends_of(steps, num_checks=40, current="step"):
    """Return the checks, every 0.02 seconds, in which a watchdog ends a run.

    `steps` are the checks before which the run has done a step.
    """
    checks = itertools.count()
    ended = []

    def end(*_):
        ended.append(next(checks) - 1)

    clock = types.SimpleNamespace(current=current)
    watchdog = Watchdog(clock, 0.0, end)
    watchdog._least = 0.2

    def wait(pause):  # for `close`
        check = next(checks)
        if check in steps:
            watchdog.step(0)
        return check == num_checks

    watchdog._closed = types.SimpleNamespace(wait=wait)
    watchdog._watch()
    return ended


def test_a_watchdog_ends_a_run_without_steps_and_no_other():
    assert ends_of([0]) == [10]
    assert ends_of(range(40)) == []
    assert ends_of([0], current="validation") == []
    # A step may take ten times as long as the last.
    (check,) = ends_of([15], num_checks=200)
    assert check == pytest.approx(15 + 150, abs=1)
    assert ends_of([]) == []  # the first step


def test_a_watchdog_prints_the_stacks_of_all_threads(capfd):
    codes = []
    ended = threading.Event()

    def end(message, code):
        codes.append(code)
        ended.set()

    clock = types.SimpleNamespace(current="step")
    with contextlib.closing(Watchdog(clock, 0.05, end)) as watchdog:
        watchdog.step(0)
        assert ended.wait(SECONDS)
        assert codes == [4]
    assert "in test_a_watchdog_prints" in capfd.readouterr().err


# The screen


@pytest.mark.parametrize(
    ("seconds", "text"), [(83.4, "0:01:23"), (1e14, "?"), (math.nan, "?")]
)
def test_a_duration_that_is_unknown_or_endless_is_a_question_mark(seconds, text):
    assert format_duration(seconds) == text


def test_a_line_fits_80_columns_and_shows_the_metrics_that_are_asked_for(capsys):
    line = {
        "train/loss": 10.8295,
        "train/learning_rate": 1.184e-4,
        "tokens": 64.0,
        "train/grad_norm": 0.812,
        "perf/tokens_per_second": 9_999.0,
    }
    Progress(20_000, 0, float, ()).write(1_200, line)
    balanced = {"train/loss": 2.0, "train/moe/balance": 1.25}
    Progress(500, 0, float, ["moe/balance"]).write(4, balanced)
    scores = {"eval/loss": 2.0, "eval/a": 1, "eval/b": 2}
    Progress(500, 0, float, ["eval/b"]).write(4, scores)
    usual, selected, validation = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step  1200/20000  loss 10\.8295  lr .* left", usual)
    assert "9,999 tok/s" in usual
    assert len(usual) <= 80
    assert selected.startswith("step   4/500  loss 2.0000  moe/balance 1.25  ")
    assert validation == "step   4/500  val loss 2.0000  b 2"


def test_a_name_without_a_metric_is_reported_at_the_end(capsys):
    progress = Progress(500, 0, float, ["balance", "losss", ""])
    progress.write(1, {"train/loss": 2.0, "train/balance": 1.0})
    progress.close()
    (warning,) = capsys.readouterr().err.splitlines()
    assert "logging.screen=losss: the run has written no metric" in warning


# Speed


def test_flops_per_token_follow_the_published_formula():
    cfg = GPTConfig.from_name("gpt2-124m")
    expected = 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert model_flops_per_token(cfg) == expected
    short = expected - 12 * 12 * 768 * 512
    assert model_flops_per_token(cfg, StepShape(8, 512, 600)) == short
    assert model_flops_per_token(cfg, StepShape(9, 1024, 512)) == short


def test_flops_of_a_run_are_those_of_each_steps_shape():
    config = configured(
        "model.vocab_size=64 model.context_length=32 data.batch_size=4 "
        "train.batch_schedule=2=8 train.window_schedule=0=8,3=16 train.num_steps=5"
    )
    clock = StepClock.for_run(config, lambda shape: 1e3 * shape.window)
    steps = [4 * 8, 4 * 8, 8 * 8, 8 * 16, 8 * 16]
    assert clock.flops(5) == 1e3 * 32 * sum(steps)
    assert clock.flops(3) == 1e3 * 32 * sum(steps[:3])


def check_chip(kind, bfloat16, float32, board):
    chip = chips.find_chip(kind)
    assert chip.peak_flops("bfloat16") == 1e12 * bfloat16
    assert chip.peak_flops("float32") == 1e12 * float32
    assert chips.board_name(kind) == board


def test_peak_follows_the_device_kind():
    check_chip("NVIDIA H100 80GB HBM3", 989.5, 494.5, "H100")
    check_chip("NVIDIA H100 PCIe", 756.5, 378.0, None)
    check_chip("NVIDIA A100-SXM4-40GB", 312.0, 156.0, "A100 40GB")
    check_chip("Tesla T4", 8.1, 8.1, "T4")
    check_chip("TPU v5 lite", 197.0, 197.0, "TPU v5e")
    check_chip("TPU v6 lite", 918.0, 918.0, "TPU v6e")


def test_what_no_data_sheet_knows_has_no_peak(monkeypatch):
    assert chips.find_chip("cpu") is None
    assert chips.find_chip("NVIDIA RTX A1000") is None
    assert chips.find_chip("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert chips.find_chip("NVIDIA GeForce RTX 4090 D") is None
    assert chips.find_chip("NVIDIA H100 MIG 1g") is None
    assert chips.total_peak_flops("float32") is None
    monkeypatch.setattr(chips, "find_chip", lambda kind: chips.BOARDS["H100"])
    with jax.default_matmul_precision("highest"):
        assert chips.total_peak_flops("float32") is None
        assert chips.total_peak_flops("bfloat16") == 989.5e12 * jax.device_count()
    assert chips.total_peak_flops("float32") == 494.5e12 * jax.device_count()


def test_boards_are_known_by_their_own_names():
    for name in chips.BOARDS:
        assert chips.board_name(name) == name


def test_step_clock_charges_each_second_once_and_validation_to_no_step():
    now = [100.0]

    def tokens(step):
        return 1000 * step

    def flops(step):
        return 6000 * step

    clock = StepClock(tokens, flops, 24_000.0, since=80.0, now=lambda: now[0])
    assert clock.read() == {}
    with clock.phase("compile"):
        now[0] += 3
    with clock.phase("step"):
        for step in (8, 9):
            with clock.phase("data wait"):
                now[0] += 0.5
            now[0] += 1.5
            clock.count_step(step)
        with clock.phase("validation"):
            now[0] += 10
            with clock.phase("checkpoint"):
                now[0] += 2
        expected = {
            "perf/step_seconds": 2.0,
            "perf/tokens_per_second": 500.0,
            "perf/data_wait_seconds": 0.5,
            "perf/total_seconds": 39.0,
            "perf/goodput": 3.0 / 39.0,
            "perf/mfu": 500.0 * 6 / 24_000,
        }
        assert clock.read() == pytest.approx(expected)
        assert clock.read() == {}
    # 20, 10, 3, 3, 2 and 1 seconds.
    assert clock.describe() == (
        "time since step 7: 0:00:39; setup and finish 51%, validation 26%, compile 8%,\n"
        "      steps 8%, checkpoint 5%, data wait 3%"
    )


# Compilation


def train_step(state, batch):
    kernel = state["params"]["kernel"]
    loss = batch["tokens"].astype(jnp.float32) @ kernel
    return {"params": {"kernel": kernel + 1}}, loss.sum()


def state_and_batch():
    state = {"params": {"kernel": jnp.ones((4, 16))}}
    batch = {"tokens": jnp.ones((8, 4), jnp.int32)}
    return state, batch


def test_compiled_step_gives_what_jit_gives_and_has_its_memory():
    shapes = jax.eval_shape(state_and_batch)
    step = compiled.compile_once(jax.jit(train_step), *shapes)
    state, batch = state_and_batch()
    expected = train_step(state, batch)
    chex.assert_trees_all_close(step(state, batch), expected, rtol=1e-6)
    assert "HloModule jit_train_step" in step.text()
    assert step.peak_bytes >= 4 * (2 * 4 * 16 + 8 * 4 + 1)  # arguments and results
    x = jnp.ones(1024)
    copying = compiled.compile_once(jax.jit(jnp.sin), x)
    donating = compiled.compile_once(jax.jit(jnp.sin, donate_argnums=0), x)
    assert copying.peak_bytes - donating.peak_bytes == 4096


def test_recompilation_names_the_leaf_that_changed():
    device = jax.devices()[0]
    state, batch = jax.device_put(state_and_batch(), device)
    tokens = batch["tokens"]
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    split = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
    step = compiled.compile_once(jax.jit(train_step, donate_argnums=0), state, batch)

    def check_refused(named, **arrays):
        with pytest.raises((TypeError, ValueError), match=named):
            step(state, batch | arrays)

    check_refused(r"tokens.*int32\[4,4\]", tokens=tokens[:4])
    check_refused("segments", segments=tokens)
    check_refused(r"(?s)tokens.*sharding", tokens=split)
    step(state, batch)  # the refused calls took no donation


def test_pmap_steps_are_guarded_too():
    def pmapped_step(state, tokens):
        return state + jax.lax.psum(tokens.sum(), "data")

    mapped = jax.pmap(pmapped_step, "data", in_axes=(None, 0), out_axes=None)
    tokens = jnp.ones((8, 4))
    state = jnp.zeros(())
    step = compiled.compile_once(mapped, state, tokens)
    assert step(state, tokens) == 32
    with pytest.raises((TypeError, ValueError), match="float32"):
        step(state, tokens[:, :2])
