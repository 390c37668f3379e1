"""The benchmark says what it measured, and PyTorch's twin computes what this project computes."""

import contextlib
import csv
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from absl import flags

from gpt2 import cli, launch
from gpt2.benchmark import case as benchmark
from gpt2.benchmark import first_step, measure, picture, tables, worker
from gpt2.benchmark.turns import Player
from gpt2.errors import UserError

TINY = dict(num_layers=2, num_heads=2, embed_dim=32, context_length=16, batch_size=4, vocab_size=50)


def tiny(subject="train", **changes):
    return make_case(subject) | TINY | changes


def make_case(subject, *arguments):
    """Returns the first case of a command line."""
    return make_cases(subject, *arguments)[0]


def make_cases(subject, *arguments):
    """Returns the cases of a command line."""
    values = flags.FlagValues()
    benchmark.define_flags(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "FLAGS", values)
        cli._parse_flags(["benchmark", *arguments])
    return benchmark.make_cases(subject, values)


def test_speed_and_ratios_follow_from_the_turns():
    info = {"peak_flops": 1e9, "flops_per_token": 1e6}
    found = measure.summarise(tiny(), [0.4, 0.2, 0.9], [0.1, 0.2, 0.3], info)
    assert found["step_seconds"] == 0.4
    assert found["tokens_per_second"] == pytest.approx(4 * 16 / 0.4)
    assert found["mfu"] == pytest.approx(160 * 1e6 / 1e9)


def test_a_ratios_interval_is_students_of_the_logarithms():
    turns, ours = [0.4, 0.2, 0.9], [0.1, 0.2, 0.3]  # ratios 4, 1, 3
    logs = np.log([4.0, 1.0, 3.0])
    half = 4.3027 * logs.std(ddof=1) / np.sqrt(3)  # t of two degrees of freedom, 97.5 %
    expected = np.exp([logs.mean(), logs.mean() - half, logs.mean() + half])
    assert measure.ratio(turns, ours) == pytest.approx(list(expected), rel=1e-4)
    assert measure.ratio([0.6], [0.2]) == [pytest.approx(3.0), None, None]


def test_the_first_step_of_a_turn_does_not_count(monkeypatch):
    class Waking:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def runs_on(self):
            return {"platform": "cpu", "device": "1 x cpu"}

        def play(self, steps):
            return [100.0] + [0.5] * (steps - 1) if steps > 1 else [0.5]  # a turn; the last warm-up

        def info(self):
            return {"peak_flops": None, "flops_per_token": 1.0, "compile_seconds": 3.0}

    monkeypatch.setattr(measure, "Player", Waking)
    results = measure.measure(tiny(), [], rounds=3, seconds=1.0)
    assert results[measure.OURS]["turns"] == [0.5] * 3
    assert results[measure.OURS]["compile_seconds"] == 3.0 + 100.0 - 0.5  # beyond a usual step
    assert results[measure.OURS]["device"] == "1 x cpu"


def test_options_to_vary_are_read_with_their_types():
    text = "model.position=rope,model.num_kv_heads=4,model.bias=False,optim.eps=1"
    assert benchmark.read_options(text) == {
        **{"model.position": "rope", "model.num_kv_heads": 4},
        **{"model.bias": False, "optim.eps": 1.0},
    }
    for wrong in ("position=rope", "model.positron=rope"):
        with pytest.raises(
            UserError, match=r"there is no option .* Did you mean model\.position\?"
        ):
            benchmark.read_options(wrong)
    for wrong in ("model.position", "model", ""):
        with pytest.raises(UserError, match="does not set"):
            benchmark.read_options(wrong)
    for wrong in ("model.num_heads=four", "model.bias=yes"):
        with pytest.raises(UserError, match=r"is not of type .* Give a value such as model\."):
            benchmark.read_options(wrong)
    for shared, how in (
        ("data.batch_size=32", "the same batch. Use --batch_size"),
        ("model.context_length=64", "the same batch. Use --context_length"),
        ("model.vocab_size=512", "the same batch. Choose another --model"),
        ("train.num_steps=9", "it changes no step. Leave it out"),
        ("data.corpus=x", "it changes no step. Leave it out"),
    ):
        with pytest.raises(UserError, match=f"cannot vary {shared.partition('=')[0]}: .*{how}"):
            benchmark.read_options(shared)
    with pytest.raises(UserError, match=r"would ignore model\.rope_base"):
        benchmark.make_config(tiny(vary=benchmark.read_options("model.rope_base=9.0")))


@pytest.mark.parametrize(
    "texts",
    [["model.num_heads=2"], ["model.num_kv_heads=1"] * 2, ["optim.eps=1e-8"]],
)
def test_no_contestant_is_another_by_a_second_name(texts):
    assert list(benchmark.read_variations(["model.num_kv_heads=1"], tiny()))
    with pytest.raises(UserError, match="gives a contestant that there is already"):
        benchmark.read_variations(texts, tiny())


@pytest.mark.parametrize(
    ("subject", "text", "message"),
    [
        ("eval", "optim.name=lion", "cannot vary optim.name: eval takes no training step"),
        ("eval", "memory.remat=full", "cannot vary memory.remat: eval takes"),
        ("generate", "train.accumulate_steps=2", "cannot vary train.accumulate_steps: generate"),
        ("train", "precision.compute=bfloat16", "--matmul_precision=highest is about products"),
    ],
)
def test_what_the_subject_would_ignore_is_not_varied(subject, text, message):
    case = tiny(subject=subject, matmul_precision="highest")
    with pytest.raises(UserError, match=message):
        benchmark.read_variations([text], case)


@pytest.mark.thorough
def test_a_variation_runs_in_turn_with_flops_of_its_own():
    name = "model.activation=swiglu"
    variations = {name: benchmark.read_options(name)}
    case = tiny(batch_size=8)  # one for each device
    results = measure.measure(case, [], rounds=1, seconds=0.0, variations=variations)
    assert list(results) == [measure.OURS, name]
    flops = [result["flops_per_token"] for result in results.values()]
    assert flops[1] - flops[0] == 6 * 2 * (32 * 128 + 128)  # a third map in two layers
    assert f"\n{name} " in tables.table(case, results)


def test_flags_override_what_the_model_brings():
    found = make_case("train", "--model=shakespeare-char", "--batch_size=3")
    assert (found["num_layers"], found["context_length"], found["batch_size"]) == (6, 256, 3)


@pytest.mark.parametrize("argument", ["--batch=2", "--optimizer=lion"])
def test_unknown_options_are_user_errors(argument):
    with pytest.raises(UserError, match=r"See --help|Did you mean --batch_size"):
        make_case("train", argument)


def test_an_unknown_subject_is_a_user_error():
    command = [sys.executable, "-m", "gpt2.benchmark", "trian"]
    run = subprocess.run(command, capture_output=True, text=True)
    told = "error: trian is not a command. "
    told += "Choose one of train, eval, generate, data, verify, suite, wheels.\n"
    assert (run.returncode, run.stderr) == (2, told)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--batch_size=0"], "--batch_size=0 is not a whole number of 1 or more"),
        (["train", "--batch_size=4,x"], "--batch_size=x is not a whole number of 1 or more"),
        (["train", "--batch_size=4,8,4"], "--batch_size=4,8,4 repeats one"),
        (["train", "--compute=float32,float32"], "--compute=float32,float32 repeats one"),
        (["train", "--compute=float31"], "--compute=float31 is not one of float32"),
        (["train", "--plot=a.pdf"], "--plot=a.pdf does not end in .png"),
        (["train", "--csv=/proc/none/a.csv"], "nothing can be written in /proc/none"),
        (
            ["train", "--compute=float32,bfloat16", "--matmul_precision=highest"],
            "--matmul_precision=highest is about products of float32",
        ),
        (["eval", "--optimizer=sgd"], "--optimizer would be ignored by eval"),
        (["eval", "--with_data"], "--with_data would be ignored by eval"),
        (["data", "--matmul_precision=high"], "--matmul_precision would be ignored by data"),
        (["verify", "--rounds=2"], "--rounds would be ignored by verify"),
        (["train", "--rounds=0"], "--rounds=0 is out of range"),
        (["train", "--seconds=nan"], "--seconds=nan is out of range"),
        (["generate", "--context_length=1"], "Use 2 or more"),
        (["eval", "--fsdp=8"], "--fsdp would be ignored by eval"),
        (["generate", "--attention=eager"], "--attention would be ignored by generate"),
        (["data", "--backend=pmap"], "--backend would be ignored by data"),
    ],
)
def test_numbers_out_of_range_and_options_without_effect_are_user_errors(arguments, message):
    with pytest.raises(UserError, match=message):
        make_case(*arguments)


def test_advice_about_options_of_the_config_names_flags_of_this_command():
    with pytest.raises(UserError, match=r"parallel\.fsdp=0 .* --fsdp=1"):
        benchmark.make_config(tiny(fsdp=0))


def test_each_ignored_option_is_one_that_training_takes():
    values = flags.FlagValues()
    benchmark.define_flags(values)
    assert set().union(*benchmark.IGNORED.values()) <= set(values)
    assert make_case("train", "--fsdp=8", "--remat=full")["fsdp"] == 8
    assert make_case("eval", "--data=-1", "--seconds=0")["subject"] == "eval"


def test_a_mistake_that_only_the_worker_sees_is_one_line():
    command = [sys.executable, "-m", "gpt2.benchmark", "train", "--attention=flash"]
    command += ["--model=shakespeare-char-cpu"]
    environment = os.environ | {"XLA_FLAGS": ""}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 2 and run.stderr.count("\n") == 1
    assert run.stderr.startswith("error: --attention=flash would be reference on a cpu")
    assert run.stderr.endswith("Use --attention=sdpa.\n")


def test_lists_give_a_case_for_each_size_and_type():
    arguments = ("--model=quickstart", "--batch_size=4,8", "--compute=float32,bfloat16")
    cases = make_cases("train", *arguments)
    found = [(case["compute"], case["batch_size"]) for case in cases]
    types = ("float32", "bfloat16")
    assert found == [(compute, size) for compute in types for size in (4, 8)]
    assert [case | dict(compute="", batch_size=0) for case in cases] == 4 * [
        cases[0] | dict(compute="", batch_size=0)
    ]


def test_one_devices_work_is_measured_by_one_devices_peak(monkeypatch):
    assert (len(worker.devices_of(tiny())), len(worker.devices_of(tiny("eval")))) == (8, 1)
    alone = worker.peak(tiny("eval"))
    assert alone["peak_flops"] == worker.peak(tiny())["peak_flops"]  # all share one CPU
    gpu = SimpleNamespace(device_kind="NVIDIA H200", platform="gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu] * 4)
    of_all = worker.peak(tiny(compute="bfloat16"))
    of_one = worker.peak(tiny("generate", compute="bfloat16"))
    assert of_all["peak_flops"] == 4 * of_one["peak_flops"] > 0
    assert worker.peak(tiny("data"))["peak_flops"] is None


@pytest.mark.parametrize(
    ("platform", "kind", "known"),
    [("gpu", "NVIDIA H100", ("default", "high")), ("tpu", "TPU v4", ("default",))],
)
def test_products_without_a_known_peak_have_none(platform, kind, known, monkeypatch):
    chip = SimpleNamespace(device_kind=kind, platform=platform)
    monkeypatch.setattr(jax, "devices", lambda: [chip])
    for precision in ("default", "high", "highest"):
        found = worker.peak(tiny(matmul_precision=precision))
        assert bool(found["peak_flops"]) == (precision in known)
        assert (found["peak_source"] == "unknown") == (precision not in known)


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (("gpu", "1 x H100"), ("gpu", "1 x H100"), None),
        (("gpu", "1 x H100"), ("cpu", "1 x cpu"), "torch runs on 1 x cpu, and jax on 1 x H100"),
        (("cpu", "1 x cpu"), ("gpu", "1 x H100"), "torch runs on 1 x H100, and jax on 1 x cpu"),
        (("gpu", "1 x H100"), ("gpu", "1 x L4"), "torch runs on 1 x L4, and jax on 1 x H100"),
        (("gpu", "2 x H100"), ("gpu", "1 x H100"), r"2 x H100, and a peer on one.*DEVICES=0"),
    ],
)
@pytest.mark.parametrize("compares", [measure.measure, measure.verify])
def test_a_peer_on_other_hardware_is_refused(ours, theirs, told, compares, monkeypatch):
    class Announcing:
        def __init__(self, name, command, environment):
            self._tells = ours if name == measure.OURS else theirs

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def runs_on(self):
            return dict(zip(("platform", "device"), self._tells, strict=True))

        def show(self, path):
            first_step.FirstStep("float32", 4.0).save(path)
            return 0.1

        def play(self, steps):
            return [0.1] * steps

        def info(self):
            return {"peak_flops": None, "flops_per_token": 1.0}

    monkeypatch.setattr(measure, "Player", Announcing)
    turns = {"rounds": 1, "seconds": 0.0} if compares is measure.measure else {}
    with pytest.raises(UserError, match=told) if told else contextlib.nullcontext():
        assert len(dict(compares(tiny(), ["torch"], **turns)))


def test_a_process_announces_what_it_runs_on_before_it_serves():
    code = "from gpt2.benchmark.turns import announce, serve; announce('tpu', 'TPU v4', 2); "
    code += "serve(lambda: None, lambda: 7)"
    with Player("announcer", [sys.executable, "-c", code], dict(os.environ)) as player:
        assert player.runs_on() == {"platform": "tpu", "device": "2 x TPU v4"}
        assert player.info() == 7


def test_impossible_peers_are_user_errors(monkeypatch):
    with pytest.raises(UserError, match="not one of torch"):
        benchmark.check_peers(["tensorflow"], tiny())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs transformers"):
        benchmark.check_peers(["hf_compile"], tiny())
    with pytest.raises(UserError, match="torch is not one of hf"):
        benchmark.check_peers(["torch"], tiny(subject="generate"))
    with pytest.raises(UserError, match="data does not report --shares"):
        benchmark.check_peers([], tiny(subject="data", shares=True))
    with pytest.raises(UserError, match=r"needs torch_xla. Install it: .*peers-xla"):
        benchmark.check_peers(["torch_xla_compile"], tiny())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(UserError, match="torch_xla cannot be asked for flash attention"):
        benchmark.check_peers(["torch_xla"], tiny(attention="flash"))
    with pytest.raises(UserError, match="scales losses here and does not in --peers=torch"):
        benchmark.check_peers(["torch"], tiny(compute="float16"))
    for changes in (dict(remat="full"), dict(backend="pmap"), dict(data=1), dict(fsdp=2)):
        ((name, value),) = changes.items()
        with pytest.raises(UserError, match=f"--{name}={value} would be ignored by --peers=torch"):
            benchmark.check_peers(["torch"], tiny(**changes))
        benchmark.check_peers([], tiny(**changes))


def test_beside_peers_both_sides_multiply_by_a_padded_vocabulary():
    assert make_case("train", "--model=gpt2-124m")["vocab_size"] == 50257
    assert make_case("train", "--model=gpt2-124m", "--peers=torch")["vocab_size"] == 50304
    assert make_case("train", "--model=quickstart", "--peers=torch")["vocab_size"] == 4096


def test_a_player_does_the_steps_it_is_asked_for_and_tells():
    code = (
        "from gpt2.benchmark.turns import serve; n = []; serve(lambda: n.append(1), lambda: len(n))"
    )
    with Player("counter", [sys.executable, "-c", code], dict(os.environ)) as player:
        assert len(player.play(3)) == 3 and len(player.play(1)) == 1
        assert player.info() == 4


def test_players_on_a_gpu_share_its_memory_unless_the_user_has_said_how(monkeypatch):
    given: dict[str, dict[str, str]] = {}

    class Noting:
        def __init__(self, name, command, environment):
            given[name] = environment
            if len(given) == 3:
                raise UserError("all have started", "Go on")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def runs_on(self):
            return {"platform": "gpu", "device": "H100"}

        def play(self, steps):
            return [1.0] * steps

    def shares():
        given.clear()
        with pytest.raises(UserError, match="all have started"):
            varied = {name: {} for name in ("second", "third")}
            measure.measure(tiny(), [], rounds=1, seconds=0.0, variations=varied)
        names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
        return [[variables.get(name) for name in names] for variables in given.values()]

    monkeypatch.setattr(measure, "Player", Noting)
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert shares() == [["0.30", None]] * 3
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")  # JAX refuses both names at once
    assert shares() == [[None, "0.2"]] * 3


def test_a_player_that_ends_between_two_turns_is_a_user_error():
    command = [sys.executable, "-c", "import sys; print('[1.0]', flush=True); sys.exit(1)"]
    with Player("quitter", command, dict(os.environ)) as player:
        assert player.play(1) == [1.0]
        player._process.wait()
        with pytest.raises(UserError, match="quitter ended early"):
            player.play(1)


def test_a_player_that_ends_early_is_a_user_error():
    command = [sys.executable, "-c", "input()"]
    with Player("quitter", command, dict(os.environ)) as player, pytest.raises(UserError):
        player.play(1)


def test_cpu_settings_are_asked_for_once_beside_others(monkeypatch):
    monkeypatch.setattr(launch, "_has_glibc", lambda: True)
    monkeypatch.setattr(launch, "has_old_xla", lambda: True)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=4096")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    asked = launch.cpu_environment()
    assert asked["GLIBC_TUNABLES"] == (
        "glibc.malloc.mmap_threshold=4096"
        ":glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=268435456"
    )
    assert asked["XLA_FLAGS"].startswith("--xla_cpu_max_isa=AVX2 --xla_cpu_scheduler_type=")
    monkeypatch.setattr(launch, "_may_have_accelerators", lambda: False)
    launch.prepare_process()
    assert launch.cpu_environment() == {"GLIBC_TUNABLES": asked["GLIBC_TUNABLES"]}
    monkeypatch.setenv("GLIBC_TUNABLES", asked["GLIBC_TUNABLES"])
    assert launch.cpu_environment() == {}
    # Contestants compile anew, and ask libtpu for TPUs no more than this process does.
    monkeypatch.setattr(launch, "_chosen", {launch._CACHE: "/x", "JAX_PLATFORMS": "cpu"})
    monkeypatch.setenv(launch._CACHE, "/x")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    measured = launch.environment_to_measure()
    assert measured["JAX_PLATFORMS"] == "cpu" and launch._CACHE not in measured


def results(case, by_name):
    """Returns results as `measure` gives them, for the turns of each contestant."""
    info = dict(
        peak_flops=1e12, peak_source="measured", flops_per_token=1e6, peak_bytes=2e9,
        attention="blocked", device="1 x cpu", compile_seconds=1.0, warm_up_seconds=3.5,
        shares={"mlp": 1.0}, compared=True, compute=case["compute"], vary={},
    )  # fmt: skip
    return {
        name: info
        | {"versions": {name: "1.0"}}
        | measure.summarise(case, turns, by_name["jax"], info)
        for name, turns in by_name.items()
    }


def test_table_shows_every_contestant_its_ratio_and_every_setting():
    case = tiny(optimizer="sgd", attention="eager", matmul_precision="highest", with_data=True)
    shown = tables.table(case, results(case, {"jax": [0.2, 0.2], "torch": [0.5, 0.5]}))
    assert "2.50 (2.50 to 2.50)" in shown and "torch 1.0" in shown and "mlp 100%" in shown
    for setting in (
        *("sgd", "attention eager (blocked in jax)", "precision of products highest"),
        *("data inside of the time", "remat none", "layers unrolled in jax", "pjit data=-1 fsdp=1"),
        *("4 x 16 tokens", "width 32", "50 tokens in the vocabulary", "1,000 GFLOP/s, measured"),
        *("2 turns each", "the first steps of torch equal jax's", "3.5"),
    ):
        assert setting in shown, setting
    assert "differ more than 1.5 times" not in shown
    shown = tables.table(case, results(case, {"jax": [0.2, 0.2], "torch": [0.5, 0.8]}))
    assert "turns of torch differ more than 1.5 times" in shown
    read = tiny(subject="data")
    assert "adamw" not in tables.table(read, results(read, {"jax": [0.2, 0.2]}))


def test_a_narrow_terminal_takes_two_tables(monkeypatch):
    case = tiny()
    found = results(case, {"jax": [0.2, 0.2], "torch": [0.5, 0.5]})
    wide = tables.table(case, found)
    monkeypatch.setattr(tables, "terminal_columns", lambda: 80)
    narrow = tables.table(case, found)
    assert wide.count("torch  ") == 1 and narrow.count("torch  ") == 2
    _, *lines = narrow.split("step ms")
    assert max(map(len, lines[0].splitlines())) <= 80
    assert set(wide.split()) == set(narrow.split())


def test_a_file_and_a_picture_hold_every_cell(tmp_path):
    lines = []
    for case in (tiny(), tiny(compute="bfloat16"), tiny(batch_size=8)):
        lines += tables.rows(case, results(case, {"jax": [0.2, 0.3], "torch": [0.5, 0.6]}))
    varied = results(tiny(), {"jax": [0.2, 0.3], "model.attention=xla": [0.4, 0.5]})
    varied["jax"]["attention"], varied["model.attention=xla"]["attention"] = "blocked", "xla"
    found = tables.rows(tiny(), varied)
    assert [row["our_attention"] for row in found] == ["blocked", "xla"]  # each has its own
    assert "95 % intervals" in picture._foot(found)
    varied["model.attention=xla"]["vary"] = {"optim.name": "muon", "memory.remat": "full"}
    *_, row = tables.rows(tiny(), varied)
    assert (row["optimizer"], row["remat"], row["scan_layers"]) == ("muon", "full", False)
    narrow = results(tiny(), {"jax": [0.2], "precision.compute=bfloat16": [0.1], "torch": [0.5]})
    products = dict(compute="bfloat16", peak_flops=3e12, peak_source="measured")
    narrow["precision.compute=bfloat16"] |= products
    narrow["precision.compute=bfloat16"]["vary"] = {"precision.compute": "bfloat16"}
    del narrow["torch"]["compute"], narrow["torch"]["peak_flops"]  # peers do not tell
    rows = tables.rows(tiny(), narrow)
    assert [row["compute"] for row in rows] == 3 * ["float32"]  # what they are compared in
    assert [row["our_compute"] for row in rows] == ["float32", "bfloat16", None]
    picture.plot(tmp_path / "narrow.png", rows)
    assert [row["product_flops"] for row in rows] == [1e12, 3e12, 1e12]
    assert "float32 1,000 GFLOP/s, measured; bfloat16 3,000" in tables.table(tiny(), narrow)
    assert "95 % intervals" not in picture._foot(found[:1])
    tables.write_csv(tmp_path / "cells.csv", lines)
    with (tmp_path / "cells.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [row["contestant"] for row in read] == 3 * ["jax", "torch"]
    assert [row["batch_size"] for row in read[::2]] == ["4", "4", "8"]
    assert float(read[1]["speedup"]) == pytest.approx((2.5 * 2.0) ** 0.5)
    assert set(tiny()) - set(read[0]) == {"vary", "shares"}  # every other setting is there
    picture.plot(tmp_path / "cells.png", lines)
    assert (tmp_path / "cells.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("subject", ["train", pytest.param("eval", marks=pytest.mark.thorough)])
def test_shares_of_time_by_part_add_up_to_one(subject):
    work = worker.OurModel(tiny(subject=subject, batch_size=8))
    work.step()
    shares = work.shares()
    assert sum(shares.values()) == pytest.approx(1.0)
    assert {"attention", "mlp"} <= set(shares)
    assert ("optimizer" in shares) == (subject == "train")


def test_a_trace_without_the_programs_operations_is_told(monkeypatch):
    work = worker.OurModel(tiny("eval"))
    monkeypatch.setattr(worker, "ProgramText", lambda text: SimpleNamespace(operations={}))
    assert work.shares() == {"unmatched operations": 1.0}


def test_generation_fills_the_other_half_of_the_context():
    case = tiny(subject="generate")
    new = worker.OurGenerator(case).step()
    assert [len(tokens) for tokens in new] == 4 * [8]
    found = measure.summarise(case, [2.0], [1.0], {"peak_flops": None, "flops_per_token": 1})
    assert found["tokens_per_second"] == 4 * 8 / 2.0


def test_reading_goes_on_to_the_next_batch(monkeypatch):
    case = tiny(subject="data")
    reading = worker.OurReader(case)
    read = []
    monkeypatch.setattr(reading, "_loader", SimpleNamespace(batch=read.append))
    reading.step()
    reading.step()
    assert read == [0, 1]


@pytest.mark.parametrize(
    ("subject", "peer"),
    [
        (subject, peer)
        for subject, peers in benchmark.PEERS.items()
        for peer in peers
        if subject != "verify" and not peer.startswith("torch_xla")
    ],
)
def test_peers_do_a_step_of_each_subject(subject, peer):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if peer.endswith("compile"):
        pytest.skip("compiles for minutes, and differs in nothing else")
    from gpt2.benchmark.peers import SUBJECTS

    loss = SUBJECTS[subject](peer, tiny(subject=subject), "cpu").step()
    assert loss is None or 3.5 < loss < 4.5  # log 50 is 3.9


def test_a_peers_file_is_gone_when_it_ends(tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "gpt2.benchmark.peers", "torch"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with Player("torch", [*command, json.dumps(tiny(subject="data"))], environment) as player:
        player.runs_on()
        player.play(1)
        assert list(tmp_path.rglob("train.bin"))
    assert not list(tmp_path.rglob("train.bin"))


def test_worker_needs_no_more_than_jax_flax_and_optax():
    code = "import gpt2.benchmark.worker, json, sys; print(json.dumps(list(sys.modules)))"
    modules = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    heavy = (
        "gpt2.data",
        "gpt2.training.checkpoint",
        "orbax",
        "grain",
        "tiktoken",
        "pyarrow",
        "torch",
    )
    assert not [name for name in modules if name.startswith(heavy)]
