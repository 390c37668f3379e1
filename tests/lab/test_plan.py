"""Plans: memory and collectives of a step, what compilers write, and searches."""

import importlib.util
import re
from types import SimpleNamespace

import jax
import pytest

from configs import gpt2_124m
from gpt2.config import Config, with_options
from gpt2.errors import UserError
from gpt2.lab.plan import __main__ as command
from gpt2.lab.plan import search
from gpt2.lab.plan.collectives import Collective, collectives, describe_collectives
from gpt2.lab.plan.plan import (
    DoesNotFit,
    Plan,
    compile_plan,
    compute_seconds,
    make_program,
)
from gpt2.lab.plan.topologies import find_devices
from gpt2.telemetry.chips import BOARDS
from gpt2.utils.text import format_duration
from tests.helpers import TINY, run, succeed, thorough
from tests.programs.layouts import Case, setup

PLAN = "gpt2/lab/plan/__main__.py"
BYTES = {"data.tokenizer": "byte"}
PMAP = thorough(Case("pmap x 8", accumulate=4))
MIXED = Case("data 2 x fsdp 2 x tensor 2", accumulate=4, remat="full", scanned=True)


HLO = """HloModule jit_step, is_scheduled=true, num_partitions=8

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %rs = f32[4]{0} reduce-scatter(%x), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
}

%cond (p: (s32[], f32[4])) -> pred[] {
}

%endless (p: f32[4]) -> f32[4] {
  %aa = (f32[8]{0}, f32[8]{0}) all-to-all(%a, %b), replica_groups=[4,2]<=[2,4]T(1,0)
}

ENTRY %main (p: f32[16]) -> f32[16] {
  %ar = (f32[10]{0}, bf16[3,2]{1,0}) all-reduce-start(%a, %b), replica_groups=[1,8]<=[8]
  %ard = (f32[10]{0}, bf16[3,2]{1,0}) all-reduce-done(%ar)
  %ag = (f32[2]{0}, f32[8]{0}) all-gather-start(%a), replica_groups=mesh['a'=2,'b'=4] {'b'}
  %at = f32[8] all-gather(%a), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}
  %one = f32[2]{0} all-gather(%a), replica_groups=mesh['a'=8,'b'=1] {'b'}
  %as = ((f32[8,4]), f32[8,4]) all-to-all-start(%a), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  %cp = (u8[5], u8[5], u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
  %w = f32[4] while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %v = f32[4] while(%t), body=%endless
}
"""


def summary(collective):
    group = ",".join(map(str, collective.group))
    return f"{collective.kind} {group}: {collective.bytes} x {collective.times}"


def test_collectives_are_read_from_every_form_of_hlo(capsys):
    found = collectives(HLO)
    assert [summary(collective) for collective in found] == [
        "all-reduce 0,1,2,3,4,5,6,7: 52 x 1",
        "all-gather 0,1,2,3: 32 x 1",
        "all-gather 0,4: 32 x 1",
        "all-to-all 0,1: 128 x 1",  # without the operands, which it returns as well
        "collective-permute 0,1: 5 x 1",
        "reduce-scatter 0,2,4,6: 64 x 3",
        "all-to-all 0,4: 64 x 1",
    ]
    sent = [collective.bytes_sent for collective in found]
    assert sent == [2 * 7 / 8 * 52, 3 / 4 * 32, 16, 64, 5, 3 / 4 * 64 * 3, 32]
    assert capsys.readouterr().err.count("length of a loop is unknown") == 1


# What compilers for TPUs and GPUs write: a reduce-scatter as a fusion, a gather that fusions with a
# product continue, a loop whose condition tells its length; a reduce-scatter that has begun.
CHIPS_HLO = """HloModule jit_step, is_scheduled=true, num_partitions=8

%all-reduce-scatter.1 (p: f32[8,4]) -> f32[1,4] {
  %ar = f32[8,4]{1,0} all-reduce(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %ds = f32[1,4]{1,0} dynamic-slice(%ar, %i)
}

%start (p: bf16[4]) -> (bf16[4], bf16[32]) {
  %ag.1 = bf16[32]{0} all-gather(%p), replica_groups=[1,8]<=[8], frontend_attributes={chain_id="0"}
  ROOT %c.1 = (bf16[4]{0}, bf16[32]{0}) custom-call(%p, %ag.1)
}

%async_collective_fusion.2 (p: bf16[4]) -> (bf16[8], bf16[32]) {
  %ag.2 = bf16[32]{0} all-gather(%p), replica_groups=[1,8]<=[8], frontend_attributes={chain_id="0"}
  %conv = bf16[8]{0} convolution(%a, %b)
  ROOT %t = (bf16[8]{0}, bf16[32]{0}) tuple(%conv, %ag.2)
}

%done (p: bf16[4]) -> bf16[32] {
  %ag.3 = bf16[32]{0} all-gather(%p), replica_groups=[1,8]<=[8], frontend_attributes={chain_id="0"}
  ROOT %c.3 = bf16[32]{0} custom-call(%p, %ag.3)
}

%cond (p: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(48)
  %turn = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%turn, %limit), direction=LT
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %kernel = f32[8] custom-call(%p), backend_config={"rows": {
}}, metadata={}
  %f1 = (bf16[4], bf16[32]) fusion(%x), kind=kCustom, calls=%start
  %f2 = (bf16[8], bf16[32]) fusion(%f1), kind=kCustom, calls=%async_collective_fusion.2
  %f3 = bf16[32] fusion(%f2), kind=kCustom, calls=%done
  %f4 = f32[1,4] fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
}

%gemm (p: f32[8]) -> f32[8] {
  %d = f32[8] dot(%p, %p)
}

ENTRY %main (p: f32[16]) -> f32[16] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body
  %rs = ((f32[16]), f32[2]) reduce-scatter-start(%p), replica_groups={{0,1,2,3,4,5,6,7}}
  %g = f32[8] fusion(%p), kind=kCustom, calls=%gemm
  %rsd = f32[2] reduce-scatter-done(%rs)
  %ag = (f32[2], f32[16]) all-gather-start(%p), replica_groups={{0,1,2,3,4,5,6,7}}
  %agd = f32[16] all-gather-done(%ag)
  %ar = f32[4] all-reduce-start(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %w2 = f32[8] while(%t), condition=%cond, body=%gemm
  %ard = f32[4] all-reduce-done(%ar)
}
"""


def test_collectives_of_programs_for_chips_are_counted_once():
    found = collectives(CHIPS_HLO)
    every = "0,1,2,3,4,5,6,7"
    assert [summary(collective) for collective in found] == [
        f"all-gather {every}: 64 x 48",
        f"reduce-scatter {every}: 128 x 48",
        f"reduce-scatter {every}: 64 x 1",
        f"all-gather {every}: 64 x 1",
        f"all-reduce {every}: 16 x 1",
    ]
    rows = describe_collectives(found)
    assert rows["all-gather"] == (
        "calls: 49; arrays: 3.1 KiB in total; a device sends 2.7 KiB"
    )


@pytest.mark.parametrize("case", [PMAP, MIXED], ids=str)
def test_a_plan_agrees_with_a_run_in_memory_and_collectives(case):
    config = with_options(case.config(), BYTES)
    plan = compile_plan(make_program(config, jax.devices()))
    trained = setup(case)
    state = trained.program.init_state()
    compiled = trained.program.compile_train(state, trained.batch(0))
    assert plan.bytes_needed == pytest.approx(compiled.peak_bytes, rel=0.01)
    assert plan.collectives == collectives(compiled.text())
    on_first = 0
    saved = 0
    for leaf in jax.tree.leaves(state):
        saved += leaf.size * leaf.dtype.itemsize
        for shard in leaf.addressable_shards:
            if shard.device == jax.devices()[0]:
                on_first += shard.data.nbytes
    held = plan.memory["parameters"] + plan.memory["optimizer"]
    assert held == pytest.approx(on_first, abs=64)
    assert plan.bytes_saved == saved


def test_a_forecast_counts_the_products_that_remat_computes_again():
    planned = Config.from_dict(gpt2_124m.get_config()).with_vocabulary(50257)

    def seconds(remat):
        config = with_options(planned, {"memory.remat": remat})
        return compute_seconds(config, 8, "H100")

    # Of 124M's layers, over 6 N + 12 L D T: products of D x D, and attention.
    product = 2 * 768**2
    attention = 4 * 768 * 1024
    whole = 6 * 123_653_376 + 12 * 12 * 768 * 1024
    computed_again = {
        "full": 8 * product + attention,
        "mlp": 4 * product + attention,
        "attention": 4 * product,
        "dots": 0,
    }
    for remat, again in computed_again.items():
        ratio = seconds(remat) / seconds("none")
        assert ratio == pytest.approx(1 + 12 * again / whole, abs=4e-3)


@pytest.fixture
def program():
    options = BYTES | {"train.num_steps": 10**9}
    return make_program(with_options(Case().config(), options), jax.devices())


def test_a_forecast_adds_the_collectives_to_the_computation(program):
    eight = tuple(range(8))
    plan = Plan(
        program, {"parameters": 1}, "", [Collective("all-gather", eight, 10**9)]
    )
    compute = compute_seconds(program.config, program.backend.mesh.size, "H100")
    assert plan.network_seconds("H100") == 7 / 8 * 1e9 / 450e9
    assert plan.step_seconds("H100") == compute + plan.network_seconds("H100")
    row = command._forecast(plan, "H100")
    assert row[1] == "1.9 ms"
    assert row[3] == format_duration(10**9 * plan.step_seconds("H100"))


def test_a_time_that_depends_on_unknown_links_is_called_unknown(program):
    sixteen = tuple(range(16))
    plan = Plan(
        program, {"parameters": 1}, "", [Collective("all-gather", sixteen, 1000)]
    )
    for name, board in BOARDS.items():
        step, *_ = command._forecast(plan, name)
        is_known = board.bandwidth(sixteen) is not None
        assert is_known == (step != "unknown")
    assert command._forecast(plan, "L4")[0] == "unknown"


def test_links_slow_down_where_a_ring_leaves_its_domain():
    h100 = BOARDS["H100"]
    assert h100.bandwidth(tuple(range(8))) == 450e9
    assert h100.bandwidth(tuple(range(16))) == 400e9  # 8 adapters of 50 GB/s
    assert h100.bandwidth((0, 8)) == 50e9
    assert BOARDS["TPU v5e"].bandwidth(tuple(range(512))) is None


@pytest.mark.thorough
def test_a_search_prints_the_fastest_that_fits_first_and_keeps_what_is_given(
    monkeypatch, capsys
):
    tried = []

    def plan(program):  # with made-up memory and time
        config = program.config
        tried.append(config)
        parallel = config.parallel
        if parallel.strategy == "megatron":
            raise DoesNotFit("The step does not fit: needs more")
        activations = {"none": 8e9, "dots": 4e9, "full": 2e9}[config.memory.remat]
        needed = 1e9 + activations / config.train.accumulate_steps
        if parallel.strategy == "auto" and parallel.fsdp == 1:
            needed += 2e9
        seconds = 1.0
        if config.memory.remat == "full" or parallel.tensor > 1:
            seconds = 2.0
        return SimpleNamespace(
            bytes_needed=needed,
            fits=lambda board: needed <= 6e9,
            step_seconds=lambda board: seconds,
        )

    monkeypatch.setattr(search, "compile_plan", plan)
    given = ["train.accumulate_steps"]
    config = with_options(Case().config(), BYTES)
    devices = jax.devices()[:4]
    assert search.search(config, devices, "H100", given) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80
    header, *rows = [" ".join(row.split()) for row in re.split(r"\n(?=\w)", out)]
    assert header.startswith("4 H100: ")
    assert len({*rows}) == len(rows) == len(tried)
    # Tensors cannot be split over eight of four devices.
    skipped = err.count("skipped: ")
    assert err.count("compiling ") == len(tried) + skipped
    assert skipped > 0
    fits = [not row.startswith("The step does not fit") for row in rows]
    assert fits == sorted(fits, reverse=True)  # layouts that fit come first
    times = [row.split()[0] for row, fit in zip(rows, fits, strict=True) if fit]
    assert times == sorted(times)
    assert set(times) == {"1.0", "2.0"}
    assert "strategy=zero1 --config.memory.remat=dots" in rows[0]
    assert any("megatron" in row and "needs more" in row for row in rows)
    assert {each.train.accumulate_steps for each in tried} == {1}  # as given
    zero1 = [each.memory.remat for each in tried if each.parallel.strategy == "zero1"]
    assert zero1 == ["none", "dots"]  # and nothing that computes more than what fits


def test_a_plan_prints_what_a_step_takes_and_leaves_nothing(tmp_path):
    options = [*TINY, "--config.data.corpus=none:", "--config.parallel.data=2"]
    options.append(f"--text={tmp_path}/texts/step.hlo")
    stdout = succeed(None, "--devices=2", *options, cwd=tmp_path, script=PLAN)
    assert max(map(len, stdout.splitlines())) <= 80
    assert re.search(r"devices +2 \(simulated\)", stdout)
    assert re.search(r"all-reduce .* a device sends .*H100 .* us ", stdout, re.DOTALL)
    assert [path.name for path in tmp_path.rglob("*.*")] == ["step.hlo"]


def test_a_plan_is_for_as_many_devices_of_a_cpu_as_the_run_would_have(monkeypatch):
    updated = {}
    monkeypatch.setattr(jax.config, "update", updated.__setitem__)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    args = SimpleNamespace(devices=None, chips=None)
    monkeypatch.setattr(command.flags, "FLAGS", args)
    command._find_devices(with_options(Config(), {"parallel.cpu_devices": 2}))
    assert updated == {"jax_num_cpu_devices": 2}


@pytest.mark.parametrize("name", ["h100-12", "h100-17", "none.txtpb-8", "v5e-3"])
def test_devices_that_no_machine_or_slice_has_are_refused(name):
    with pytest.raises(UserError, match="does not name devices that exist"):
        find_devices(name)


HAS_PLUGIN = any(
    map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))
)


@pytest.mark.parametrize(
    ("chips", "has_compiler"),
    [("v5e-8", importlib.util.find_spec("libtpu")), ("h100-8", HAS_PLUGIN)],
    ids=["v5e", "h100"],
)
def test_a_plan_for_chips_that_are_not_here(tmp_path, chips, has_compiler):
    options = """
        --config.parallel.data=1 --config.parallel.fsdp=8 --config.data.batch_size=8
        --config.precision.compute=bfloat16 --config.memory.scan_layers=True
        --config.model.embed_dim=1024 --config.model.num_heads=16 --config.model.num_layers=2"""
    text = tmp_path / "step.hlo"
    flags = [f"--chips={chips}", f"--text={text}", *TINY, *options.split()]
    code, stdout, stderr = run(None, *flags, imports=bool(has_compiler), script=PLAN)
    if not has_compiler:
        assert code == 2 and "Run `pip install" in stderr
        pytest.skip("needs the compiler")
    assert code == 0, stderr
    assert re.search(r"devices +8 \((TPU v5 lite|NVIDIA H100 80GB HBM3)\)", stdout)
    assert "length of a loop" not in stderr
    found = collectives(text.read_text())
    # No sum of gradients is an all-reduce, but for what every device stores whole.
    large = {c.kind for c in found if c.bytes > 1_000_000}
    assert large <= {"all-gather", "reduce-scatter", "all-to-all"}
    assert "reduce-scatter" in large


def compiled_text(folder, options):
    """Return the HLO text of a step that is compiled for chips that are not here."""
    flags = [*TINY, *options.split(), f"--text={folder}/step.hlo"]
    succeed(None, *flags, imports=True, script=PLAN)
    return (folder / "step.hlo").read_text()


@pytest.mark.skipif(not HAS_PLUGIN, reason="needs JAX's plugin for CUDA")
def test_the_stream_is_rows_on_chips_that_are_not_here(tmp_path):
    options = """
        --chips=h100-1 --config.model.context_length=128 --config.model.embed_dim=512
        --config.data.batch_size=32 --config.precision.compute=bfloat16"""
    text = compiled_text(tmp_path, options)
    assert "BIAS_GELU_AUX" in text  # which cuBLAS computes
    # By the gradient of positions as a sum over 32 sequences, XLA would store them innermost.
    assert "bf16[32,128,512]" in text
    assert "[128,512,32]" not in text


HAS_TOKAMAX = importlib.util.find_spec("tokamax")


@pytest.mark.skipif(not (HAS_PLUGIN and HAS_TOKAMAX), reason="needs CUDA and tokamax")
def test_scores_with_a_soft_cap_are_not_stored_on_chips_that_are_not_here(tmp_path):
    options = """
        --chips=h100-1 --config.model.context_length=512 --config.data.batch_size=2
        --config.model.embed_dim=128 --config.model.num_heads=2 --config.model.num_layers=1
        --config.precision.compute=bfloat16 --config.model.attention_softcap=50.0"""
    assert "[2,2,512,512]" in compiled_text(tmp_path, options)
    text = compiled_text(tmp_path, f"{options} --config.model.attention=tokamax")
    assert text.count('custom_call_target="mosaic_gpu') >= 3
    assert "512,512]" not in text
