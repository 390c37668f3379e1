"""What train.py makes of its options: what they leave out, and what is refused at once."""

import importlib.util
import json
import re
import shlex

import pytest

from gpt2.parallel.collectives import collectives
from tests.helpers import TINY, metrics_of, run

SHORT = [*TINY, "--config.data.corpus=synthetic", "--config.train.num_steps=2"]


def test_a_run_draws_its_arrays_and_a_share_of_validation_gives_no_bits_per_byte(tmp_path):
    drawn = "--visualize=wte|batch"
    code, stdout, stderr = run(tmp_path / "run", *SHORT, "--config.train.eval_batches=1", drawn)
    assert code == 0, stderr
    assert "opt_state/mu/wte/embedding" in stdout and "batch/targets" in stdout
    assert (tmp_path / "run" / "sharding.png").read_bytes().startswith(b"\x89PNG")
    (scored,) = [line for line in metrics_of(tmp_path / "run") if "eval/loss" in line]
    assert "eval/perplexity" in scored and "eval/bits_per_byte" not in scored
    assert "validation loss" in stdout and "per byte" not in stdout


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--workdir=run", "--workdir would be ignored"),
        ("--visualize=none_such", "--visualize=none_such matches no parameter, moment or batch"),
        ("--visualize_to=a.png", "--visualize_to would be ignored: there is no --visualize"),
        ("--plan_trials=2", "--plan_trials would be ignored: there is no --plan_search"),
        ("--plan_board=h100", "--plan_board would be ignored: there is no --plan_search"),
        ("--coordinator=localhost:1234", "--coordinator would be ignored"),
        ("--num_processes=2", "--num_processes would be ignored"),
        ("--process_index=0", "--process_index would be ignored"),
        ("--plan_devices=-1", "--plan_devices=-1"),
        ("--plan_chips=v5e-9", "--plan_chips=v5e-9 names no devices. Use v5e-N with N of 1, 4, 8"),
        ("--plan_chips=tpu", "Use CHIP-N, such as v5e-8 or h100-8"),
        ("--plan_chips=", "Use CHIP-N, such as v5e-8 or h100-8"),
        ("--plan_chips=h100-0", "--plan_chips=h100-0 names no devices"),
        ("--config.precision.logits=bfloat16", "Use --config.precision.logits=float32"),
    ],
)
def test_a_plan_refuses_what_it_would_ignore(tmp_path, flag, message):
    code, _, stderr = run(None, "--plan", flag, *SHORT, cwd=tmp_path)
    assert code == 2
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert message in stderr


def test_a_plan_says_what_a_step_takes_and_leaves_nothing(tmp_path):
    options = ["--config.parallel.data=2", *SHORT]
    code, stdout, stderr = run(None, "--plan_devices=2", *options, cwd=tmp_path)
    assert code == 0, stderr
    assert re.search(r"devices +2 \(simulated\)\n.*tokens per step +64\n", stdout, re.DOTALL)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plan_text=step.hlo"], "--plan_text would be ignored: --plan_search"),
        (["--visualize=wte"], "--visualize would be ignored: --plan_search"),
        (["--workdir=run"], "--workdir would be ignored"),
        (["--plan_board=h1000"], "--plan_board=h1000 is not one of gb200, b200"),
        (["--plan_trials=0"], "--plan_trials=0"),
    ],
)
def test_a_search_refuses_what_it_would_ignore(tmp_path, flags, message):
    code, _, stderr = run(None, "--plan_search", *flags, *SHORT, cwd=tmp_path)
    assert code == 2
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert message in stderr


def test_a_search_prints_commands_that_plan_as_it_says():
    options = [*SHORT, "--config.parallel.tensor=2", "--config.model.embed_dim=64"]
    options += ["--config.data.batch_size=16"]
    code, stdout, stderr = run(
        None, "--plan_search", "--plan_devices=4", "--plan_trials=2", *options
    )
    assert code == 0, stderr
    assert re.search(r"compiled +2: 2 fit", stdout)
    forecasts = re.findall(r"^  1  (.*)\n +python train\.py (.*)$", stdout, re.MULTILINE)
    ((forecast, command),) = forecasts
    assert "--config.parallel.tensor=2" in command  # what was given stays
    code, again, stderr = run(None, "--plan_devices=4", *shlex.split(command))
    assert code == 0, stderr
    assert re.search(rf"\n  H100 +{re.escape(forecast)}\n", again)


def test_a_model_that_is_too_large_for_any_layout_is_said_to_be(tmp_path):
    options = [*SHORT, "--config.model.embed_dim=8192", "--config.model.num_layers=64"]
    options += ["--config.memory.scan_layers", "--config.data.batch_size=4"]
    code, stdout, stderr = run(
        None, "--plan_search", "--plan_devices=2", "--plan_board=v5e", *options, cwd=tmp_path
    )
    assert code == 1, stderr
    # 16 bytes of 12 D^2 + 13 D parameters in each layer, and tables, over two devices.
    gib = 16 * (64 * (12 * 8192**2 + 13 * 8192) + 273 * 8192) / 2 / 2**30
    least = re.search(r"nothing fits +a step needs ([\d.]+) GiB or more, by arithmetic", stdout)
    assert float(least[1]) == pytest.approx(gib, rel=1e-3)


@pytest.mark.parametrize(
    ("chips", "package"), [("v5e-8", "libtpu"), ("h100-8", "jax_cuda12_plugin")]
)
def test_a_plan_for_chips_that_are_not_here(tmp_path, chips, package):
    options = ["--config.parallel.data=1", "--config.parallel.fsdp=8", *SHORT]
    options += ["--config.data.batch_size=8", "--config.precision.compute=bfloat16"]
    options += ["--config.memory.scan_layers=True", "--config.model.embed_dim=1024"]
    options += ["--config.model.num_heads=16", "--config.model.num_layers=2"]
    text = tmp_path / "step.hlo"
    code, stdout, stderr = run(None, f"--plan_chips={chips}", f"--plan_text={text}", *options)
    if importlib.util.find_spec(package) is None:
        extra = "plan-tpu" if chips == "v5e-8" else "plan-gpu"
        assert code == 2 and f"Install it: pip install -e '.[{extra}]'" in stderr
        pytest.skip(f"needs {package}")
    assert code == 0, stderr
    assert re.search(r"devices +8 \((TPU v5 lite|NVIDIA H100 80GB HBM3)\)\n", stdout)
    assert "some have no known length" not in stdout
    found = collectives(text.read_text())
    # No sum of gradients is an all-reduce, but for what every device stores whole.
    large = {c.kind for c in found if c.bytes > 1_000_000}
    assert large <= {"all-gather", "reduce-scatter", "all-to-all"} and "reduce-scatter" in large


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs jax_cuda12_plugin"
)
@pytest.mark.parametrize("tensor", [2, 4])
def test_a_plan_for_gpu_chips_that_are_not_here_splits_attention(tensor):
    options = [*SHORT, "--config.precision.compute=bfloat16", "--config.model.num_heads=4"]
    options += [f"--config.parallel.tensor={tensor}", "--config.data.batch_size=16"]
    code, stdout, stderr = run(None, "--plan_chips=h100-8", *options)
    assert code == 0, stderr
    assert f"x tensor {tensor}" in stdout


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

    code, output = again("--config.train.num_steps=1")
    assert code == 2 and "holds a run of 2 steps, more than train.num_steps=1" in output
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
