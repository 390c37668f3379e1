"""Profiles: which steps a trace holds, where their time goes, and what the page says."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData, StepTraceAnnotation

from gpt2.config import LoggingConfig
from gpt2.errors import UserError
from gpt2.lab.profile import __main__ as profile_command
from gpt2.lab.profile.breakdown import (
    IDLE,
    LAUNCH,
    LOOP,
    Breakdown,
    break_down,
    describe,
)
from gpt2.lab.profile.trace import Operation, Span, Trace, read_trace
from gpt2.telemetry.recorder import STEP, TraceRecorder
from gpt2.utils import stores
from tests.helpers import TINY, succeed
from tests.programs import planted

pytestmark = pytest.mark.usefixtures("compiles_fully")
PRODUCTS = "matrix products"
OTHER = "other computation"
COLLECTIVES = "collectives"


def ran(start, end, kind=PRODUCTS, run=1, program="jit_train_step"):
    return Operation(kind, start, end, kind, program, run)


def trace_of(*operations, steps=(), phases=()):
    steps = [Span(STEP, start, start) for start in steps]
    return Trace(list(operations), steps, list(phases))


def test_a_moment_is_charged_to_products_then_computation_then_collectives():
    trace = trace_of(
        ran(0.0, 4.0, COLLECTIVES),
        ran(1.0, 3.0, OTHER),
        ran(2.0, 2.5),
        ran(2.2, 2.7),
        ran(6.0, 7.0, OTHER),
    )
    assert break_down(trace).seconds == pytest.approx(
        {COLLECTIVES: 2.0, OTHER: 2.3, PRODUCTS: 0.7, IDLE: 2.0}
    )


def test_steps_are_told_from_other_programs_by_their_name():
    trace = trace_of(
        ran(0.0, 1.0, run=1),
        ran(1.0, 6.0, run=7, program="jit_eval_step"),
        ran(7.0, 8.0, run=2),
        steps=[0.0, 6.9],
    )
    found = break_down(trace)
    assert found.num_steps == 2
    assert found.seconds == pytest.approx(
        {PRODUCTS: 1.0, "program jit_eval_step": 5.0, LOOP: 1.0}
    )


def causes(next_step, *phase):
    """What devices wait for between two steps, if the host starts the second at a time."""
    phases = [Span(*phase)] if phase else []
    operations = ran(0.0, 2.0), ran(5.0, 7.0, run=2)
    trace = trace_of(*operations, steps=[0.0, next_step], phases=phases)
    seconds = break_down(trace).seconds
    assert seconds.pop(PRODUCTS) == 2.0
    return pytest.approx(seconds)


def test_gaps_are_charged_to_what_the_host_did():
    assert causes(1.0) == {LAUNCH: 3.0}  # the next step was dispatched in time
    assert causes(4.9) == {LOOP: 3.0}
    # The time that starting the step takes belongs to the phase that made it late.
    assert causes(4.9, "data wait", 0.2, 4.9) == {"data wait": 3.0}
    assert causes(4.9, "data wait", 3.0, 4.0) == {LOOP: 2.0, "data wait": 1.0}
    assert causes(4.9, "validation", 3.0, 4.5) == {"validation": 1.5, LOOP: 1.5}


def test_the_first_line_names_the_largest_cause_that_is_no_computation():
    slow = {PRODUCTS: 0.010, "data wait": 0.104, IDLE: 0.002}
    text = describe(Breakdown(5, slow))
    assert text.splitlines()[0] == "Data wait: 104 ms of each step's 116 ms, 90%."
    assert max(map(len, text.splitlines())) <= 80
    fast = describe(Breakdown(5, {PRODUCTS: 0.99, IDLE: 0.01}))
    assert fast.startswith("The devices compute 99% of each step's 1.0 s.")


def test_a_trace_without_operations_is_refused():
    with pytest.raises(UserError, match="contains no complete step"):
        break_down(trace_of())


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
    names = [(each.name, each.kind, each.program) for each in trace.operations]
    assert names == [("dot.1", PRODUCTS, "jit_step")] * 2
    assert len(trace.steps) == 1
    found = break_down(trace)
    assert found.num_steps == 2
    assert found.seconds == pytest.approx({PRODUCTS: 2e-6, LOOP: 3e-6})


def test_kernels_in_a_graph_of_cuda_are_known_by_their_own_names(tmp_path):
    file = tmp_path / "gpu.xplane.pb"
    graph = GPU.replace('"dot.1"', '"command_buffer_3"')
    for kernel, kind in {
        "ampere_sgemm_128x64": PRODUCTS,
        "nvjet_sm90_tst": PRODUCTS,
        "loop_add_fusion_3": OTHER,
        "ncclDevKernel_AllReduce_Sum_f32": COLLECTIVES,
    }.items():
        named = graph.replace("ampere_sgemm_128x64", kernel)
        file.write_bytes(ProfileData.text_proto_to_serialized_xspace(named))
        assert {each.kind for each in read_trace(file).operations} == {kind}


def test_a_loop_that_contains_operations_is_not_counted_besides_them(tmp_path):
    event = """
    events {{ metadata_id: 1 offset_ps: {}000 duration_ps: {}000
             stats {{ metadata_id: 1 str_value: "{}" }} }}"""
    line = event.format(0, 9, "while.1")
    line += event.format(1, 2, "dot.1")
    line += event.format(4, 5, "call.2")
    line += event.format(9, 2, "call.3")
    text = f"""planes {{ name: "/host:CPU" id: 1
      lines {{ id: 1 name: "thread" timestamp_ns: 0 {line} }}
      event_metadata {{ key: 1 value {{ id: 1 name: "x" }} }}
      stat_metadata {{ key: 1 value {{ id: 1 name: "hlo_op" }} }} }}"""
    file = tmp_path / "cpu.xplane.pb"
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    names = [each.name for each in read_trace(file).operations]
    assert names == ["dot.1", "call.2", "call.3"]


@pytest.mark.parametrize(("first", "steps", "number"), [(3, 2, 2), (6, 100, 1)])
def test_a_trace_holds_the_steps_after_the_first_and_no_others(
    tmp_path, first, steps, number, capsys
):
    x = jnp.ones((128, 128))
    step = jax.jit(lambda x: x @ x / 128).lower(x).compile()
    options = LoggingConfig(profile_start=first, profile_steps=steps)
    with TraceRecorder(tmp_path, options) as record:  # the last case ends with the run
        for number_of_step in range(1, 8):
            with StepTraceAnnotation(STEP, step_num=number_of_step):
                x = step(x)
            record(number_of_step, x)
        jax.block_until_ready(x)  # as a run waits for the metrics of its last step
    (file,) = tmp_path.rglob("*.xplane.pb")
    trace = read_trace(file)
    assert len(trace.steps) == break_down(trace).num_steps == number
    stores.push(f"memory://run-{first}", tmp_path)
    capsys.readouterr()
    profile_command.main(str(tmp_path))
    printed = capsys.readouterr().out
    assert f"Mean of {number} steps:\n" in printed
    assert f"\n  {PRODUCTS} " in printed
    assert (tmp_path / "profile/profile.txt").read_text() == printed
    profile_command.main(f"memory://run-{first}")
    assert capsys.readouterr().out == printed


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "named"), [("sync", "The host's loop"), ("loader", "Data wait")]
)
def test_the_first_line_names_a_planted_fault_and_its_cost(tmp_path, fault, named):
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
    profile_command.main(str(workdir))
    text = (workdir / "profile/profile.txt").read_text()
    assert text.startswith(f"{named}: ")
    if fault == "sync":  # a loader hides behind the step
        reported = float(text.removeprefix(f"{named}: ").split(" ms")[0])
        assert reported > 700 * planted.SECONDS  # of 1000, but for the last step
