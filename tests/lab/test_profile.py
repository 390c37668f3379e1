"""From a profile to a cause: what operations are, where time goes, and what the page says."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from gpt2.config import LoggingConfig
from gpt2.errors import UserError
from gpt2.lab.profile import __main__ as profile_command
from gpt2.lab.profile import page
from gpt2.lab.profile.breakdown import LAUNCH, LOOP, break_down
from gpt2.lab.profile.profiler import Profiler
from gpt2.lab.profile.program import ProgramText, part_of
from gpt2.lab.profile.trace import Ran, Span, Trace, read_trace
from gpt2.utils import stores
from tests.helpers import TINY, succeed
from tests.programs import planted

pytestmark = pytest.mark.usefixtures("compiles_fully")

TEXT = """HloModule jit_step, is_scheduled=true

%fused (p0: f32[28,8], p1: s32[]) -> f32[4,8] {
  %p0 = f32[28,8]{1,0} parameter(0)
  ROOT %rows = f32[4,8]{1,0} slice(%p0)
}

%fused_dot (p0: f32[4,8]) -> f32[4,16] {
  ROOT %dot.2 = f32[4,16]{1,0} dot(%p0, %b), metadata={op_name="jit(step)/transpose(jvp(GPT))/while/body/h/mlp/c_fc/dot_general"}
}

%body (state: (f32[28,8])) -> (f32[28,8]) {
  %a = f32[28,8]{1,0} get-tuple-element(%state), index=1
  %cut = f32[4,8]{1,0} fusion(%a), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/jvp(GPT)/while/body/h/mlp/c_fc/slice"}
  %dot.1 = f32[4,16]{1,0} dot(%cut, %b), metadata={op_name="jit(step)/transpose(jvp(GPT))/while/body/h/mlp/c_fc/dot_general"}
  %gather = f32[8] all-gather-start(%x)
  %mm.7 = f32[4,16] custom-call(%cut), custom_call_target="__cublas$gemm"
  ROOT %keep = f32[7,4,16]{2,1,0} fusion(%dot.1), kind=kLoop, calls=%fused_dot
}

ENTRY %main (x: (f32[28,8])) -> (f32[28,8]) {
  %call = f32[8] call(%x), to_apply=%fused, attributes={xla_cpu_small_call="true"}
  %call.2 = f32[8] fusion(%x), calls=%fused
  ROOT %while.3 = (f32[28,8]) while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"2"}}, metadata={op_name="jit(step)/jvp(GPT)/while"}
}
"""  # noqa: E501


def test_operations_are_known_by_part_kind_and_path():
    program = ProgramText(TEXT)
    assert program.module == "jit_step" and program.is_container("while.3")
    assert not program.is_container("dot.1") and not program.is_container("call")
    assert program.find("cut") == ("fusion", "mlp forward", "mlp/c_fc/slice")
    assert program.find("dot.1") == ("product", "mlp backward", "mlp/c_fc/dot_general")
    assert program.find("keep") == ("product", "mlp backward", "")  # as what is inside
    assert program.find("gather") == ("collective", "other", "")
    # Kernels of a GPU: equal ones share a name, and the loop turns twice.
    turn = {
        "cut_3": "cut",
        "Memset 0": "cut",
        "nvjet_sm90": "mm.7",
        "own": "own",
        "keep": "keep",
    }
    placed = [*program.place(["call_9", "call_9", *turn, *turn, "call_9"])]
    assert placed == ["call", "call.2", *turn.values(), *turn.values(), "call"]


@pytest.mark.parametrize(
    "path, part",
    [
        ("jit(step)/jvp(GPT.loss)/GPT._layers/h_3/attention/attn/x", "attention forward"),
        ("jit(step)/transpose(jvp(GPT.loss))/GPT._hidden/ln_f/reduce_sum", "ln_f backward"),
        ("jit(step)/jvp(GPT)/checkpoint/rematted_computation/h/mlp/dot", "mlp backward"),
        ("jit(step)/optimizer/mul", "optimizer"),
        ("jit(step)/planted/while/body/closed_call/tanh", "planted"),
        ("jit(step)/add", "other"),
        ("jit(step)/(optimizer/reduce_sum:optimizer/mul:shard_map/psum)", "optimizer"),
        ("jit(step)/jvp(GPT)/(mlp/dot:attention/dot)", "mlp forward"),
    ],
)  # fmt: skip
def test_the_path_of_an_operation_names_its_part(path, part):
    assert part_of(f'%x = f32[] add(), metadata={{op_name="{path}"}}') == part


def ran(name, start, end, run=1, **kwargs):
    return Ran(name, start, end, module="jit_step", run=run, **kwargs)


def trace_of(*operations, steps=(), phases=()):
    steps = [Span(str(number), start, start) for number, start in enumerate(steps)]
    return Trace(list(operations), steps, list(phases))


def test_operations_that_run_at_once_share_their_time():
    trace = trace_of(ran("a", 0.0, 3.0), ran("b", 1.0, 3.0), ran("c", 4.0, 5.0))
    found = break_down(trace, ProgramText(TEXT))
    assert found.operations == pytest.approx({"a": 2.0, "b": 4 / 3, "c": 2 / 3})
    assert (found.idle, found.seconds) == (1.0, pytest.approx(5.0))


@pytest.mark.parametrize(
    "expected, given",
    [
        ({LAUNCH: 3.0}, dict(steps=[0.0, 1.0])),  # the next step was there
        ({LOOP: 3.0}, dict(steps=[0.0, 4.9])),
        (
            {"data wait": 3.0},  # with the time that starting the step takes then
            dict(steps=[0.0, 4.9], phases=[Span("data wait", 0.2, 4.9)]),
        ),
        (
            {LOOP: 2.0, "data wait": 1.0},
            dict(steps=[0.0, 4.9], phases=[Span("data wait", 3.0, 4.0)]),
        ),
        (
            {"validation": 1.5, LOOP: 1.5},
            dict(steps=[0.0, 4.9], phases=[Span("validation", 3.0, 4.5)]),
        ),
    ],
)
def test_gaps_are_charged_to_what_the_host_did(expected, given):
    trace = trace_of(ran("a", 0.0, 2.0), ran("a", 5.0, 7.0, run=2), **given)
    found = break_down(trace, ProgramText(TEXT))
    assert found.gaps == pytest.approx(expected)
    assert found.operations["a"] == 2.0 and found.seconds == pytest.approx(5.0)


GPU = """
planes { name: "/host:CPU" id: 1
  lines { id: 1 name: "python" timestamp_ns: 0
    events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000
             stats { metadata_id: 1 int64_value: 5 } } }
  event_metadata { key: 1 value { id: 1 name: "train" } }
  stat_metadata { key: 1 value { id: 1 name: "step_num" } }
}
planes { name: "/device:GPU:0" id: 2
  lines { id: 1 name: "Stream #13(Kernel)" timestamp_ns: 0
    events { metadata_id: 1 offset_ps: 1000000 duration_ps: 2000000
             stats { metadata_id: 1 str_value: "dot.1" } stats { metadata_id: 2 str_value: "jit_step" } }
    events { metadata_id: 1 offset_ps: 6000000 duration_ps: 2000000
             stats { metadata_id: 1 str_value: "dot.1" } stats { metadata_id: 2 str_value: "jit_step" } } }
  lines { id: 2 name: "XLA Modules" timestamp_ns: 0
    events { metadata_id: 2 offset_ps: 1000000 duration_ps: 7000000 } }
  event_metadata { key: 1 value { id: 1 name: "ampere_sgemm_128x64" } }
  event_metadata { key: 2 value { id: 2 name: "jit_step" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
}
"""  # noqa: E501


def test_a_trace_of_a_gpu_is_read_by_its_streams(tmp_path):
    file = tmp_path / "gpu.xplane.pb"
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(GPU))
    trace = read_trace(file)
    assert [(r.name, r.module) for r in trace.operations] == [("dot.1", "jit_step")] * 2
    assert [step.name for step in trace.steps] == ["5"]
    found = break_down(trace, ProgramText(TEXT))
    assert found.steps == 2 and found.seconds == pytest.approx(5e-6)
    assert found.operations["dot.1"] == pytest.approx(2e-6)
    graph = GPU.replace('"dot.1"', '"command_buffer_3"')
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(graph))
    assert {*break_down(read_trace(file), ProgramText(TEXT)).operations} == {"mm.7"}
    file.write_bytes(b"\x0a\xff\xff")
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(file)


@pytest.mark.parametrize(
    "first, steps, held", [(3, 2, ["3", "4"]), (6, 100, ["6", "7"])]
)
def test_trace_holds_the_named_steps_and_no_others_beside_its_page(
    tmp_path, first, steps, held, capsys
):
    x = jnp.ones((128, 128))
    step = jax.jit(lambda x: x @ x / 128).lower(x).compile()
    options = LoggingConfig(profile_start=first, profile_steps=steps)
    profile = Profiler(tmp_path, options)
    for number in range(1, 8):
        profile.step(number, x, step.as_text)
        x = step(x)
        float(x[0, 0])
    profile.close(x)  # the second case ends with the run
    (file,) = tmp_path.rglob("*.xplane.pb")
    assert [step.name for step in read_trace(file).steps] == held
    written = (tmp_path / "profile.md").read_text()
    assert "Mean of 2 steps." in written
    assert "| product |" in written
    assert written == page.explain(tmp_path) == page.explain(file)
    stores.push(f"memory://run-{first}", tmp_path)
    profile_command.main(f"memory://run-{first}")
    assert capsys.readouterr().out.endswith(written)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "fault, named", [("sync", "The host's loop"), ("loader", "Data wait")]
)
def test_the_page_names_a_planted_fault_and_what_it_costs_at_least(
    tmp_path, fault, named
):
    # Other work may hold the host up for 10 ms before it waits for a step, which must last longer.
    # A slow loader hides behind the step.
    width, length = (256, 128) if fault == "sync" else (128, 64)
    options = f"""
        --config.model.num_layers=2 --config.model.embed_dim={width}
        --config.model.context_length={length} --config.train.num_steps=20
        --config.train.eval_every=20 --config.train.checkpoint_every=20
        --config.logging.profile_start=14 --config.logging.profile_steps=5"""
    workdir = tmp_path / "run"
    command = (*TINY, *options.split(), fault)
    succeed(workdir, *command, script="tests/programs/planted.py", imports=True)
    text = (workdir / "profile" / "profile.md").read_text()
    assert text.splitlines()[2].startswith(f"**{named}: ")
    if fault == "sync":  # a loader hides behind the step
        told = float(text.split(f"**{named}: ")[1].split(" ms")[0])
        assert told > 700 * planted.SECONDS  # of 1000, but for the last step
