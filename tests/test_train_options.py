"""What train.py makes of its options: what they leave out, and what is refused at once."""

import importlib.util
import json
import re
import types

import pytest

from gpt2.config import TrainConfig
from gpt2.optim import make_schedule
from gpt2.training import summary
from gpt2.training.due import due_after
from tests.helpers import TINY, metrics_of, run
from tests.test_workdir import make_config

STEPS = range(1, 9)
SHORT = [*TINY, "--config.data.corpus=synthetic", "--config.train.num_steps=2"]


def test_a_run_draws_its_arrays_and_a_share_of_validation_gives_no_bits_per_byte(tmp_path):
    drawn = "--visualize=wte|batch"
    code, stdout, stderr = run(tmp_path / "run", *SHORT, "--config.train.eval_batches=1", drawn)
    assert code == 0, stderr
    assert "params/wte/embedding" in stdout and "batch/targets" in stdout
    (scored,) = [line for line in metrics_of(tmp_path / "run") if "eval/loss" in line]
    assert "eval/perplexity" in scored and "eval/bits_per_byte" not in scored
    assert "validation loss" in stdout and "per byte" not in stdout
    assert len(re.findall(r"\bon the first of the split's batches$", stdout, re.MULTILINE)) == 2


@pytest.mark.parametrize(
    ("every", "told"),
    [
        (0, "at the end"),
        (1, "at every step"),
        (2, "every 2 steps"),
        (3, "every 3 steps and at the end"),
        (8, "at the end"),
        (1000, "at the end (1,000 steps are more than the run has)"),
    ],
)
def test_the_first_screen_says_what_an_interval_beyond_the_run_comes_to(every, told):
    assert summary._describe_times(every, num_steps=8) == told
    dues = [due_after(s, TrainConfig(num_steps=8, eval_every=every), stopping=False) for s in STEPS]
    at = [step for step, due in zip(STEPS, dues, strict=True) if due.validation]
    assert at == {1: [*STEPS], 2: [2, 4, 6, 8], 3: [3, 6, 8]}.get(every, [8])


@pytest.mark.parametrize(
    ("start", "told"),
    [
        (0, "steps 3 to 6, counted from 0"),
        (4, "steps 4 to 6, counted from 0, 3 of the 4 asked for"),
        (7, "none: the run continues from step 7, after those of logging.profile_start"),
    ],
)
def test_the_first_screen_says_what_a_trace_before_the_start_comes_to(start, told):
    asked = dict(profile_start=3, profile_steps=4)
    config = make_config(logging=asked, train=dict(num_steps=8))
    assert summary._describe_trace(config, start) == told
    shorter = make_config(logging=asked, train=dict(num_steps=5))
    told = summary._describe_trace(shorter, 0)
    assert told == "steps 3 to 4, counted from 0, 2 of the 4 asked for"


@pytest.mark.parametrize(
    ("platform", "kind", "peak", "told"),
    [
        (
            *("cpu", "cpu", 138.4e9),
            "138 GFLOP/s in float32, of 8 devices, measured at this start: MFU does not compare "
            "with other starts",
        ),
        (
            *("gpu", "NVIDIA H100 80GB HBM3", 8 * 494.7e12),
            "3,958 TFLOP/s in float32, of 8 devices (NVIDIA H100 data sheet, SXM)",
        ),
    ],
)
def test_the_first_screen_says_of_which_peak_mfu_is_a_share(platform, kind, peak, told):
    device = types.SimpleNamespace(platform=platform, device_kind=kind)
    assert summary._describe_peak(peak, "float32", device) == told
    assert summary._describe_peak(None, "float32", device) == "unknown, so that there is no MFU"


def test_the_first_screen_says_that_a_warm_up_takes_the_whole_run():
    rates = {}
    for warmup in (4, 8, 9):
        config = make_config(train=dict(num_steps=8), optim=dict(warmup_steps=warmup))
        schedule = make_schedule(config.optim, 8)
        rates[warmup] = max(float(schedule(step)) for step in range(8)) == pytest.approx(4e-3)
        reached = "are never reached" not in summary._describe_warmup(config)
        assert reached == rates[warmup]
    assert rates == {4: True, 8: False, 9: False}


@pytest.mark.parametrize(("num_steps", "percent"), [(8, 0), (20, 10)])
def test_a_run_in_its_warm_up_is_told_flags_with_which_it_leaves_it(num_steps, percent):
    config = make_config(train=dict(num_steps=num_steps), optim=dict(warmup_steps=100))
    flags = f"--config.optim.warmup_percent={percent} --config.optim.warmup_steps=0"
    assert summary._describe_warmup(config).endswith(f" are never reached; give {flags}")
    given = dict(warmup_percent=float(percent), warmup_steps=0)
    shorter = make_config(train=dict(num_steps=num_steps), optim=given)
    assert summary._describe_warmup(shorter) == f"{num_steps * percent // 100} steps"
    make_schedule(shorter.optim, num_steps)


@pytest.mark.parametrize(
    ("num_bytes", "yardstick"),
    [(2**15, " (zlib -9 needs 2.037 for the same text)"), (2**15 - 1, "")],
)
def test_zlib_is_no_yardstick_for_a_text_shorter_than_its_window(num_bytes, yardstick):
    split = types.SimpleNamespace(num_bytes=num_bytes)
    dataset = types.SimpleNamespace(splits={"validation": split}, zlib_bits_per_byte=2.0374)
    feed = types.SimpleNamespace(dataset=dataset, eval_is_whole=True)
    clock = types.SimpleNamespace(shares=lambda: {"step": 1.0}, total_seconds=83.0)
    scores = {"eval/loss": 8.13748, "eval/perplexity": 3420.512, "eval/bits_per_byte": 1.6102}
    assert summary.describe_results(scores, feed, clock) == (
        "time: 1m 23s; step 100%\n"
        f"validation loss 8.1375, perplexity 3,420.51, 1.610 bits per byte{yardstick}"
    )


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs jax_cuda12_plugin"
)
@pytest.mark.parametrize(
    ("compute", "remat", "joins"),
    [
        ("bfloat16", "none", True),
        ("bfloat16", "full", True),
        ("bfloat16", "dots", False),  # which saves its input
        ("float32", "none", False),
    ],
)
def test_gelu_on_chips_that_are_not_here_joins_a_product(tmp_path, compute, remat, joins):
    text = tmp_path / "step.hlo"
    options = [*SHORT, f"--config.precision.compute={compute}", f"--config.memory.remat={remat}"]
    options += ["--config.model.embed_dim=256", "--config.data.batch_size=8"]
    code, _, stderr = run(
        None, "--plan_chips=h100-1", f"--plan_text={text}", *options, imports=True
    )
    assert code == 0, stderr
    assert ("BIAS_GELU_AUX" in text.read_text()) == joins
    assert " tanh(" not in text.read_text()  # by itself the formula would round at each step


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs jax_cuda12_plugin"
)
@pytest.mark.parametrize("tensor", [2, 4])
def test_a_plan_for_gpu_chips_that_are_not_here_splits_attention(tensor):
    options = [*SHORT, "--config.precision.compute=bfloat16", "--config.model.num_heads=4"]
    options += [f"--config.parallel.tensor={tensor}", "--config.data.batch_size=16"]
    code, stdout, stderr = run(None, "--plan_chips=h100-8", *options, imports=True)
    assert code == 0, stderr
    assert f"x tensor {tensor}" in stdout


@pytest.mark.thorough
def test_a_finished_run_says_so_and_can_only_go_on(tmp_path):
    workdir = tmp_path / "run"
    options = [*SHORT, "--config.train.eval_batches=1"]

    def again(*more):
        code, stdout, stderr = run(workdir, *options, *more)
        return code, stdout + stderr

    code, output = again()
    assert code == 0, output
    before = {path.name: path.stat().st_mtime_ns for path in workdir.iterdir()}
    code, output = again()
    assert code == 0 and output.endswith(
        f"{workdir} is finished at step 2; raise --config.train.num_steps to continue\n"
    )
    assert "compiled" not in output
    assert {path.name: path.stat().st_mtime_ns for path in workdir.iterdir()} == before

    code, output = again("--config.logging.profile_start=1", "--config.logging.profile_steps=1")
    assert code == 0 and "step 2, and logging.profile_start=1; logging.profile_steps=1 " in output
    assert output.endswith(
        "does nothing; give another --workdir, or raise --config.train.num_steps to continue\n"
    )

    code, output = again("--config.train.num_steps=1")
    assert code == 2 and "holds a run of 2 steps, more than train.num_steps=1. Give" in output
    code, output = again("--config.train.num_steps=1", "--config.seed=9")
    assert code == 2 and "more than train.num_steps=1, and with seed=0, not 9" in output
    assert "--config.seed=0 --config.train.num_steps=2 or more" in output
    assert json.loads((workdir / "config.json").read_text())["train"]["num_steps"] == 2

    # Killed between its last checkpoint and its samples, a run makes up for them.
    (workdir / "samples.txt").unlink()
    code, output = again()
    assert code == 0 and (workdir / "samples.txt").exists(), output
    assert [line["step"] for line in metrics_of(workdir)] == [1, 2]

    # Samples of an earlier end are not taken for those of the later.
    (workdir / "samples.txt").write_text("of step 2")
    code, output = again("--config.train.num_steps=3")
    assert code == 0 and (workdir / "samples.txt").read_text() != "of step 2", output
    assert [line["step"] for line in metrics_of(workdir)] == [1, 2, 3]
    starts = (workdir / "environment.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in starts] == [0, 2, 2]
