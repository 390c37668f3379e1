"""The suite survives what fails in it, and its tables say what its JSON files hold."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from absl import flags

from gpt2 import ops
from gpt2.benchmark import case as benchmark
from gpt2.benchmark import measure, worker
from gpt2.benchmark.suite import attention as suite_attention
from gpt2.benchmark.suite import command as suite
from gpt2.benchmark.suite import loop as suite_loop
from gpt2.benchmark.suite import report as suite_report
from gpt2.benchmark.suite import versions as suite_versions
from gpt2.benchmark.suite import wheels
from gpt2.benchmark.suite.parts import FIRST, SIZES, Case, Part, make_parts
from gpt2.config import DEFAULTS, Config, read_option, with_options
from gpt2.errors import UserError
from gpt2.model import attention as model_attention
from gpt2.ops import Scoring
from gpt2.telemetry.plots import plot_losses
from tests.test_benchmark import make_case, tiny

DOCS = Path(__file__).parents[1] / "docs"


def say(**result) -> tuple[str, ...]:
    return ("-c", f"print('from a library'); print({json.dumps(result)!r})")


def fail(line: str) -> tuple[str, ...]:
    return ("-c", f"import sys; sys.exit({line!r})")


EIGHT = "--xla_force_host_platform_device_count=8"
SHORT = "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9"


def part(name: str, *cases: Case, seconds: float = 60, **more) -> Part:
    return Part(name, name.title(), seconds, cases, **more)


def run_parts(parts, output, device="1 x cpu"):
    return suite.run_parts(parts, parts, output, "tiny", device)


def statuses(result) -> list[str]:
    return [case["status"] for case in result["cases"]]


def test_a_part_that_fails_leaves_its_error_and_the_rest_runs(tmp_path):
    hangs = ("-c", "import time; time.sleep(60)")
    parts = [
        part("broken", Case("planted", ("-c", "raise ValueError('planted')")), Case("b", say(a=1))),
        part("slow", Case("hangs", hangs), Case("late", say(a=1)), seconds=1),
        part("large", Case("big", fail(SHORT))),
        part("poor", Case("peer", say(a=1), needs="no_such_package"), Case("far", say(absent="x"))),
        part("good", Case("last", say(a=2))),
    ]
    broken, slow, large, poor, good = run_parts(parts, tmp_path)
    assert statuses(broken) == ["failed", "done"] and broken["status"] == "failed"
    assert broken["cases"][0]["reason"] == "ValueError: planted"
    assert "Traceback" in broken["cases"][0]["error"][0]
    assert statuses(slow) == ["out of time", "out of time"] and slow["seconds"] < 30
    assert statuses(large) == ["does not fit"] and large["status"] == "done"
    assert statuses(poor) == ["not installed", "not on this device"]
    assert good["cases"][0]["result"] == {"a": 2}
    for name in ("broken", "slow", "large", "poor", "good"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["part"] == name
    summary = (tmp_path / "summary.md").read_text()
    assert "| Broken: planted | failed: ValueError: planted |" in summary
    assert "| Large: big | does not fit |" in summary


def test_the_line_that_tells_is_that_of_the_contestant(tmp_path):
    lines = "RuntimeError: bad kernel\nerror: jax ended early. Its own message above tells it."
    ran = suite.run_case(Case("a", fail(lines)), 30, tmp_path / "log")
    assert (ran["status"], ran["reason"]) == ("failed", "RuntimeError: bad kernel")


def test_only_the_error_that_ended_a_case_says_that_it_does_not_fit(tmp_path):
    warned = "W0 bfc_allocator.cc:310] Allocator (GPU_0_bfc) ran out of memory trying to allocate 9"
    warned += "GiB. The caller indicates that this is not a failure: RESOURCE_EXHAUSTED\n"
    lost = "\nerror: torch ended early. Its own message above tells the reason."
    torch = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB."
    ended = {warned + "ValueError: planted": "failed", warned + SHORT: "does not fit"}
    ended |= {torch + lost: "does not fit", SHORT + "\n---\n(frames)" + lost: "does not fit"}
    for text, status in ended.items():
        ran = suite.run_case(Case("a", fail(text)), 30, tmp_path / "log")
        assert ran["status"] == status, ran
    ran = suite.run_case(Case("a", fail(warned + "ValueError: planted")), 30, tmp_path / "log")
    assert ran["reason"] == "ValueError: planted"


def test_a_fault_of_the_table_does_not_end_the_measurements(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite_report, "block", lambda *_: 1 / 0)
    parts = [part(name, Case("a", say(a=1))) for name in ("first", "second")]
    assert [statuses(found) for found in run_parts(parts, tmp_path)] == [["done"]] * 2
    told = "the table failed (ZeroDivisionError: division by zero); the JSON files hold the results"
    assert (tmp_path / "summary.md").read_text() == f"{told}\n"
    assert f"warning: {told}" in capsys.readouterr().err


def test_nothing_that_a_case_started_lives_on(tmp_path):
    pid = tmp_path / "pid"
    script = "import subprocess, sys, time\n"
    script += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
    script += f"open({str(pid)!r}, 'w').write(str(child.pid)); time.sleep(99)"
    suite.run_case(Case("a", ("-c", script)), 3, tmp_path / "log")
    stat = Path(f"/proc/{pid.read_text()}/stat")
    for _ in range(100):  # until init has reaped it
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the child still runs")


def test_a_part_whose_json_is_there_is_not_run_again(tmp_path, capsys):
    count = tmp_path / "count"
    script = f"open({str(count)!r}, 'a').write('x'); print('{{}}')"
    parts = [part("once", Case("a", ("-c", script)))]
    run_parts(parts, tmp_path)
    run_parts(parts, tmp_path)
    assert count.read_text() == "x" and "once: not run again" in capsys.readouterr().out
    other = part("other", Case("a", say(a=1)))
    suite.run_parts([other], [*parts, other], tmp_path, "tiny", "1 x cpu")
    summary = (tmp_path / "summary.md").read_text()
    assert summary.count("not measured") == 1  # attention alone
    record = json.loads((tmp_path / "once.json").read_text())
    (tmp_path / "once.json").write_text(json.dumps(record | {"status": "running"}))  # cut off
    run_parts(parts, tmp_path)
    assert count.read_text() == "xx"
    (tmp_path / "once.json").write_text("{")
    with pytest.raises(UserError, match=r"once\.json holds no result of a part"):
        run_parts(parts, tmp_path)


def test_temporary_files_of_a_part_go_with_it(tmp_path):
    script = "import json, os, tempfile, time; name = tempfile.mkstemp()[1]\n"
    script += "cache = os.environ.get('JAX_COMPILATION_CACHE_DIR')\n"
    script += "print(json.dumps({'name': name, 'cache': cache}), flush=True)\n"
    cases = Case("ends", ("-c", script)), Case("hangs", ("-c", script + "time.sleep(60)"))
    parts = [part("a", *cases, seconds=5, shares_cache=True), part("b", Case("a", ("-c", script)))]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
        shared, alone = run_parts(parts, tmp_path / "output")
    ended, cut = (case["result"] for case in shared["cases"])
    other = alone["cases"][0]["result"]
    assert statuses(shared) == ["done", "out of time"] and cut["name"] != ended["name"]
    assert ended["cache"] == cut["cache"] == str(Path(ended["name"]).parent / "compiled")
    assert other["cache"] is None and Path(other["name"]).parent != Path(cut["name"]).parent
    assert not any(Path(found["name"]).parent.exists() for found in (ended, cut, other))
    kept = {path.name for path in (tmp_path / "output").iterdir()}
    assert kept == {"a.json", "b.json", "logs", "summary.md"}


def test_checks_that_were_made_outlive_what_ends_the_rest(tmp_path):
    first = json.dumps({"planned": 2, "checks": [{"passed": True, "errors": {"out": [3.0, 2.0]}}]})
    script = f'import time; print({first!r})\nprint(\'{{"planned": 2, "che\', flush=True)\n'
    parts = [part("attention", Case("cudnn", ("-c", script + "time.sleep(60)")), seconds=4)]
    run_parts(parts, tmp_path)
    row = "| cudnn | 1 of 2, then out of time: no end within 4 s | 1.50 at most |"
    assert row in (tmp_path / "summary.md").read_text()


def test_the_first_case_that_fits_is_the_last(tmp_path):
    cases = Case("none", fail(SHORT)), Case("dots", say(a=1)), Case("full", say(a=1))
    parts = [part("remat", *cases, until_one_fits=True), part("all", *cases)]
    remat, every = run_parts(parts, tmp_path)
    assert statuses(remat) == ["does not fit", "done"]
    assert statuses(every) == ["does not fit", "done", "done"]


def test_results_of_two_sizes_do_not_mix(tmp_path):
    run_parts([part("a", Case("a", say(a=1)))], tmp_path)
    suite_report.check_size(tmp_path, "tiny")
    with pytest.raises(UserError, match=r"a\.json has results of --size=tiny, not full"):
        suite_report.check_size(tmp_path, "full")


def test_a_report_refuses_a_folder_without_a_gpus_results(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{suite_report.BEGIN}\nmeasured\n{suite_report.END}\n")
    parts = make_parts("full", tmp_path)
    with pytest.raises(UserError, match=r"nowhere has no versions\.json\. Name the folder"):
        suite_report.rewrite(page, tmp_path / "nowhere", parts)
    run_parts([part("versions", Case("a", say(a=1)))], tmp_path)
    with pytest.raises(UserError, match="has results of --size=tiny, not full"):
        suite_report.rewrite(page, tmp_path, parts)
    assert "measured" in page.read_text()


def test_a_cpu_does_not_run_the_full_size(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert suite.ask_device(tmp_path, "tiny") == "1 x cpu"
    with pytest.raises(UserError, match="--size=full needs a GPU, and this machine has 1 x cpu"):
        suite.ask_device(tmp_path, "full")
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    with pytest.raises(UserError, match=r"JAX finds no device: .*nonsense"):
        suite.ask_device(tmp_path, "tiny")


def test_results_of_two_devices_do_not_mix(tmp_path):
    parts = [part(name, Case("a", say(a=1))) for name in ("a", "b")]
    run_parts(parts, tmp_path)
    suite_report.check_device(tmp_path, "1 x cpu")
    run = command("--size=tiny", "--parts=mask", f"--output={tmp_path}", XLA_FLAGS=EIGHT)
    assert run.returncode == 2 and "a.json has results of 1 x cpu, not 8 x cpu" in run.stderr
    (tmp_path / "b.json").unlink()
    run_parts(parts, tmp_path, "8 x cpu")
    with pytest.raises(UserError, match=r"b\.json has results of 8 x cpu, not 1 x cpu"):
        suite_report.block(tmp_path, parts)


@pytest.mark.parametrize("size", SIZES)
def test_every_command_of_the_suite_has_options_that_work(size, tmp_path):
    parts = make_parts(size, tmp_path)
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        assert len({case.name for case in part.cases}) == len(part.cases)
        for _, module, *arguments in (case.arguments for case in part.cases):
            if module == "gpt2.benchmark":
                subject, *given = arguments
                made = make_case(subject, *given)
                varied = [text.partition("=")[2] for text in given if "--vary=" in text]
                assert len(benchmark.read_variations(varied, made)) == len(varied)
            elif module == "gpt2.benchmark.suite.loop":
                settings = (text.partition("=") for text in arguments if "--config." in text)
                names = {name.removeprefix("--config."): value for name, _, value in settings}
                options = {name: read_option(name, value) for name, value in names.items()}
                assert with_options(Config.from_dict(DEFAULTS.to_dict()), options)


def test_the_first_parts_take_less_than_nine_minutes_and_all_less_than_an_hour(tmp_path):
    parts = make_parts("full", tmp_path)
    assert tuple(part.name for part in parts[: len(FIRST)]) == FIRST
    first = sum(part.seconds for part in parts[: len(FIRST)])
    assert first < 9 * 60 and first + suite.ASK_SECONDS < 9.5 * 60
    assert sum(part.seconds for part in parts) + suite.ASK_SECONDS < 46 * 60


STEP = {
    **{"turns": [0.09, 0.1, 0.11], "step_seconds": 0.1, "tokens_per_second": 327680.0},
    **{"mfu": 0.45, "peak_bytes": 20_500_000_000, "compile_seconds": 41.0},
    **{"speedup": [1.0, 1.0, 1.0], "attention": "cudnn", "shares": {}},
}
MACHINE = {
    **{"platform": "gpu", "device": "1 x NVIDIA H100 80GB HBM3", "cpu_cores": 16},
    **{"versions": {"jax": "0.10.2", "torch": "2.13.0"}, "nvidia-smi": "H100, 580.1"},
}


def record(name, *cases):
    began = "2026-11-24T10:00:00+00:00"
    about = {"part": name, "size": "full", "device": MACHINE["device"], "status": "done"}
    return about | {"began": began, "cases": list(cases)}


def done(name, **result):
    return {"name": name, "status": "done", "result": result}


EXPECTED = """\
1 x NVIDIA H100 80GB HBM3; 16 CPU cores; jax 0.10.2; torch 2.13.0; nvidia-smi: H100, 580.1. \
Measured 2026-11-24.

| what | step (range) | tokens/s | MFU | memory | compiled in |  |
|---|---|---|---|---|---|---|
| 124M, bfloat16: 32 x 1024 tokens | 100.00 ms (90.00 to 110.00) | 327.7k | 45.0 % | 20.50 GB \
| 41.0 s | attention cudnn |
| 124M, bfloat16: 96 x 1024 tokens | does not fit |  |  |  |  |  |
| train.py, 124M, bfloat16: 32 x 1024 tokens | 102.00 ms (101.00 to 103.00) |  |  |  |  \
| 1.020 of the benchmark's step, 0.10 ms of it waiting for data |
| 124M beside PyTorch, in turn: 16, jax | 100.00 ms (90.00 to 110.00) | 327.7k | 45.0 % \
| 20.50 GB | 41.0 s | attention cudnn |
| 124M beside PyTorch, in turn: 16, torch | 200.00 ms (180.00 to 220.00) |  |  |  |  \
| jax is faster by 2.00 (1.90 to 2.10) |
| Greedy generation, 124M, bfloat16 | not measured |  |  |  |  |  |

| attention against the reference | checks passed | error over the reference's |
|---|---|---|
| cudnn | 1 of 2 | 1.50 at most |
| xla | failed: RuntimeError: a / b |  |
"""


def test_the_tables_of_given_json_are_these(tmp_path):
    loop = {"turns": [0.101, 0.103], "step_seconds": 0.102, "data_wait_seconds": 1e-4}
    torch = {"turns": [0.18, 0.22], "step_seconds": 0.2, "speedup": [2.0, 1.9, 2.1]}
    checks = [{"passed": True, "errors": {"out": [3e-3, 2e-3], "dq": [0.0, 0.0]}}]
    checks += [{"passed": False, "error": "no kernel"}]
    results = [
        record("versions", done("versions", **MACHINE)),
        record("124m", done("32 x 1024 tokens", results={"jax": STEP})),
        record("loop", done("32 x 1024 tokens", results={"train.py": loop})),
        record("torch", done("16", results={"jax": STEP, "torch": torch})),
        record("attention", done("cudnn", planned=2, checks=checks)),
    ]
    results[1]["cases"] += [{"name": "96 x 1024 tokens", "status": "does not fit", "reason": "x"}]
    failed = {"name": "xla", "status": "failed", "reason": "RuntimeError: a | b"}
    results[4]["cases"] += [failed]
    for result in results:
        (tmp_path / f"{result['part']}.json").write_text(json.dumps(result))
    names = ("versions", "attention", "124m", "loop", "torch", "generation")
    parts = [part for part in make_parts("full", tmp_path) if part.name in names]
    assert suite_report.block(tmp_path, parts) == EXPECTED

    page = tmp_path / "page.md"
    page.write_text(f"before\n{suite_report.BEGIN}\nold\n{suite_report.END}\nafter\n")
    suite_report.rewrite(page, tmp_path, parts)
    begin, end = suite_report.BEGIN, suite_report.END
    assert page.read_text() == f"before\n{begin}\n{EXPECTED}{end}\nafter\n"
    page.write_text(f"before\n{begin}\nafter\n")
    with pytest.raises(UserError, match="lacks the markers"):
        suite_report.rewrite(page, tmp_path, parts)


def test_the_ratio_of_a_single_round_has_no_interval(tmp_path):
    once = STEP | {"turns": [0.2], "speedup": measure.ratio([0.2], [0.1])}
    contestants = {"jax": STEP | {"turns": [0.1]}, "torch": once}
    written = record("torch", done("16", results=contestants))
    (tmp_path / "torch.json").write_text(json.dumps(written))
    parts = [part for part in make_parts("tiny", tmp_path) if part.name == "torch"]
    written = suite_report.block(tmp_path, parts)
    assert written.startswith("1 x NVIDIA H100 80GB HBM3; versions: not asked for.\n")
    assert "| jax is faster by 2.00 |" in written


def test_the_table_of_the_docs_is_that_of_its_json():
    page = (DOCS / "performance.md").read_text()
    _, _, rest = page.partition(f"{suite_report.BEGIN}\n")
    written, end, _ = rest.partition(suite_report.END)
    folder = DOCS / "h100"
    assert end and written == suite_report.block(folder, make_parts("full", folder))


def test_the_step_of_a_run_leaves_out_its_first_lines():
    slow = [{"train/loss": 9.0, "perf/step_seconds": 5.0}] * 10
    fast = [{"train/loss": 4.0, "perf/step_seconds": 0.1, "perf/mfu": 0.5}] * 20
    found = suite_loop.describe_steps([*slow, {"eval/loss": 4.0}, *fast])
    assert found["turns"] == [0.1] * 20 and found["step_seconds"] == 0.1 and found["mfu"] == 0.5
    assert (found["first_loss"], found["last_loss"]) == (9.0, 4.0)
    assert found["peak_bytes"] is None  # a CPU does not tell


def test_a_kernel_that_is_wrong_by_a_fiftieth_does_not_pass(monkeypatch):
    form = dict(dtype="bfloat16", kv_heads=2, window=4, documents=True)

    def check():
        compare = lambda: suite_attention.check_kernel("xla", (1, 16, 2, 8), **form)  # noqa: E731
        return suite_attention._checked("xla", form, compare)

    assert check()["passed"]
    right = suite_attention.attention

    def wrong(*arguments, implementation, **options):
        out = right(*arguments, implementation=implementation, **options)
        return out * 1.02 if implementation == "xla" else out

    monkeypatch.setattr(suite_attention, "attention", wrong)
    assert not check()["passed"]
    monkeypatch.setattr(suite_attention, "attention", lambda *_, **__: 1 / 0)
    assert check()["error"] == "division by zero" and not check()["passed"]


def scale_late_rows(right, *qkv, **options):
    out = right(*qkv, **options)
    late = np.arange(out.shape[1]) >= out.shape[1] // 4
    return out * np.where(late, 0.9, 1.0).astype(out.dtype)[:, None, None]


def drop_documents(right, *qkv, segments, **options):
    return right(*qkv, segments=None, **options)


def narrow_window(right, *qkv, scoring, **options):
    return right(*qkv, scoring=Scoring(window=scoring.window - 1), **options)


FAULTS = scale_late_rows, drop_documents, narrow_window
FORM = dict(dtype="bfloat16", kv_heads=2, window=8, documents=True)


def plant(monkeypatch, fault):
    right = ops.attention

    def planted(*qkv, implementation, **options):
        call = right if implementation == "reference" else partial(fault, right)
        return call(*qkv, implementation=implementation, **options)

    for room in (suite_attention, model_attention):
        monkeypatch.setattr(room, "attention", planted)


def test_a_kernel_with_a_fault_of_some_rows_does_not_pass(monkeypatch):
    def check():
        compare = partial(suite_attention.check_kernel, "xla", (1, 32, 2, 8), **FORM)
        return suite_attention._checked("xla", FORM, compare)

    assert check()["passed"]
    for fault in FAULTS:
        with monkeypatch.context() as patch:
            plant(patch, fault)
            wrong = check()
            assert not wrong["passed"] and "error" not in wrong, fault


@pytest.mark.thorough
def test_a_model_whose_attention_has_a_fault_does_not_pass(monkeypatch):
    def check():
        compare = partial(suite_attention.check_model, "blocked", (8, 64, 4, 16), 16, True)
        return suite_attention._checked("blocked", FORM, compare)

    right = check()
    assert right["passed"] and right["errors"].keys() >= {"loss", "h_1/attn/c_attn/kernel"}
    for fault in FAULTS:
        with monkeypatch.context() as patch:
            plant(patch, fault)
            wrong = check()
            assert not wrong["passed"] and "error" not in wrong, fault


def test_a_loss_has_its_own_spare_and_a_value_that_is_no_number_does_not_pass():
    def passes(**errors):
        return suite_attention._checked("xla", FORM, lambda: errors)["passed"]

    assert passes(loss=(1e-4, 0.0), dq=(1e-3, 0.0)) and not passes(loss=(1e-3, 0.0))
    exact = np.ones((2, 4))
    broken = np.array([[1, 1, 1, 1], [1, 1, np.nan, 1]])
    assert not passes(dq=suite_attention._worst(broken, exact, exact, 2))
    wrong = np.array([[1, 1, 1, 1], [1, 1, 1, 3]])
    assert suite_attention._worst(wrong, exact, exact, 2) == (1.0, 0.0)  # of the second row alone


def test_attention_that_is_not_on_this_device_is_said_so():
    (found,) = suite_attention.check_attention("cudnn", "tiny")
    assert found == {"absent": "model.attention='cudnn' needs an NVIDIA GPU, and this is a cpu"}


def test_the_target_of_a_gpu_is_kept_and_its_absence_told(tmp_path, monkeypatch):
    (device, *_) = jax.devices()
    assert suite_versions._keep_target(device, tmp_path) == "not on this device"
    monkeypatch.setattr(suite_versions, "platform_of", lambda device: "gpu")
    told = suite_versions._keep_target(device, tmp_path)  # which this device's topology lacks
    assert told.startswith("failed: ") and "target_config" in told
    topology = SimpleNamespace(target_config="gpu_device_info {}")
    monkeypatch.setattr(
        suite_versions.xla_client, "get_topology_for_devices", lambda devices: topology
    )
    assert suite_versions._keep_target(device, tmp_path) == "target.txtpb"
    assert (tmp_path / "target.txtpb").read_text() == "gpu_device_info {}"


def test_the_benchmark_times_a_document_mask_with_documents():
    assert "segments" not in worker._batch(tiny())
    segments = worker._batch(tiny(vary={"data.document_mask": True}))["segments"]
    assert segments.shape == (4, 16) and segments.max() > 0
    assert (np.diff(segments, axis=1) >= 0).all()


def test_pip_gathers_wheels_of_the_versions_here_and_not_jax(monkeypatch):
    download, wheel = wheels.pip_commands(Path("w"), "3.12", "x86_64")
    assert "--python-version=3.12" in download and "--platform=manylinux_2_28_x86_64" in download
    assert all(any(arg.startswith(f"{name}==") for arg in download) for name in wheels.PACKAGES)
    brought = {arg.partition("==")[0] for arg in (*download, *wheel)}
    assert not brought & {"jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "opt_einsum"}
    monkeypatch.setattr(wheels, "SOURCES", ("no-such-package",))
    with pytest.raises(UserError, match="no-such-package is not installed"):
        wheels.pip_commands(Path("w"), "3.12", "x86_64")


def test_a_run_without_matplotlib_warns_that_it_draws_nothing(tmp_path, monkeypatch, capsys):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "train/loss": 2.0, "tokens": 8}\n')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    plot_losses(metrics, tmp_path / "loss.png")
    assert "loss.png is not drawn: matplotlib is not installed" in capsys.readouterr().err
    assert not (tmp_path / "loss.png").exists()


def test_a_run_points_to_no_picture_that_it_has_not_drawn(tmp_path):
    code = """
import sys, train
from pathlib import Path
from types import SimpleNamespace
train.sample_texts = lambda *_, **__: ["text"]
workdir, config = Path(sys.argv[1]), SimpleNamespace(gpt=dict, seed=0)
for picture in (None, workdir / "loss.png"):
    if picture:
        picture.touch()
    train.write_samples(workdir, config, SimpleNamespace(tokenizer=None), {})
"""
    told = subprocess.check_output([sys.executable, "-c", code, str(tmp_path)], text=True)
    assert told.splitlines() == [
        f"see samples.txt in {tmp_path}",
        f"see loss.png and samples.txt in {tmp_path}",
    ]


def command(*arguments, **variables):
    environment = os.environ | {"XLA_FLAGS": ""} | variables
    line = [sys.executable, "-m", "gpt2.benchmark", "suite", *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=environment)


def test_mistakes_of_its_flags_are_user_errors(monkeypatch):
    values = flags.FlagValues()
    suite.define_flags(values)
    assert {"output", "size", "parts", "report"} <= set(values)
    with pytest.raises(UserError, match=r"--parts=355 is not one of .* For example, use 355m"):
        suite.choose_parts(make_parts("full", Path("x")), ["355"])
    run = command()
    assert (run.returncode, run.stderr) == (
        2,
        "error: there is no --output. Name the folder of the results.\n",
    )


@pytest.mark.thorough
def test_the_whole_suite_runs_on_a_cpu(tmp_path):
    run = command("--size=tiny", f"--output={tmp_path}")
    assert run.returncode == 0, run.stdout + run.stderr
    found = {result["part"]: result for result in suite_report.read_results(tmp_path)}
    parts = make_parts("tiny", tmp_path)
    assert set(found) == {part.name for part in parts}
    assert statuses(found.pop("attention")) == ["not on this device", "done"]
    assert statuses(found.pop("torch"))[0] in ("done", "not installed")
    assert statuses(found.pop("1558m")) == ["done"]  # no remat, so that more is not tried
    for result in found.values():
        assert set(statuses(result)) == {"done"}, result
    assert found["versions"]["cases"][0]["result"]["target"] == "not on this device"
    summary = (tmp_path / "summary.md").read_text()
    assert summary == suite_report.block(tmp_path, parts)
    assert "| cudnn | not on this device: " in summary and "| Training: 8 x 16 tokens | " in summary
