"""From a profile to a cause: what operations need, where time goes, and what the page says."""

import dataclasses
import os
import re
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from helpers import ROOT, TINY, finish, metrics_of, start
from jax.profiler import ProfileData

from configs import default
from gpt2.config import Config
from gpt2.errors import UserError
from gpt2.profile import page
from gpt2.profile.account import LAUNCH, LOADER, PYTHON, SYNC, account
from gpt2.profile.causes import find_causes
from gpt2.profile.machine import Machine
from gpt2.profile.products import product_flops
from gpt2.profile.profiler import Profiler
from gpt2.profile.program import ProgramText, part_of
from gpt2.profile.trace import Ran, Span, Trace, find_trace, read_trace
from gpt2.training.program import Program
from gpt2.utils.hlo import parse_instruction

pytestmark = pytest.mark.usefixtures("compiles_fully")

# A loop of seven turns: a slice of four rows of A, times B, written into a row of the sum.
TEXT = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/a/gpt2/model/block.py"
2 "/usr/lib/python3/site-packages/flax/linen.py"

FunctionNames
1 "__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=42 end_line=42 column=1 end_column=9}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%fused (p0: f32[28,8], p1: s32[]) -> f32[4,8] {
  %p0 = f32[28,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %rows = f32[4,8]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={4,8}
}

%written (p2: f32[7,4,16], p3: f32[4,16], p4: s32[]) -> f32[7,4,16] {
  %p2 = f32[7,4,16]{2,1,0} parameter(0)
  %p3 = f32[4,16]{1,0} parameter(1)
  %p4 = s32[] parameter(2)
  %nil = s32[] constant(0)
  %row = f32[1,4,16]{2,1,0} bitcast(%p3)
  ROOT %put = f32[7,4,16]{2,1,0} dynamic-update-slice(%p2, %row, %p4, %nil, %nil)
}

%body (state: (s32[], f32[28,8], f32[8,16], f32[7,4,16])) -> (s32[], f32[28,8], f32[8,16], f32[7,4,16]) {
  %state = (s32[], f32[28,8]{1,0}, f32[8,16]{1,0}, f32[7,4,16]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %a = f32[28,8]{1,0} get-tuple-element(%state), index=1
  %b = f32[8,16]{1,0} get-tuple-element(%state), index=2
  %sum = f32[7,4,16]{2,1,0} get-tuple-element(%state), index=3
  %cut = f32[4,8]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/jvp(GPT)/while/body/h/mlp/c_fc/slice" stack_frame_id=2}
  %dot.1 = f32[4,16]{1,0} dot(%cut, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/transpose(jvp(GPT))/while/body/h/mlp/c_fc/dot_general" stack_frame_id=1}
  %keep = f32[7,4,16]{2,1,0} fusion(%sum, %dot.1, %i), kind=kLoop, calls=%written
  ROOT %next = (s32[], f32[28,8]{1,0}, f32[8,16]{1,0}, f32[7,4,16]{2,1,0}) tuple(%i, %a, %b, %keep)
}

%condition (state.1: (s32[], f32[28,8], f32[8,16], f32[7,4,16])) -> pred[] {
  %state.1 = (s32[], f32[28,8]{1,0}, f32[8,16]{1,0}, f32[7,4,16]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %seven = s32[] constant(7)
  ROOT %less = pred[] compare(%i.1, %seven), direction=LT
}

ENTRY %main (x: (s32[], f32[28,8], f32[8,16], f32[7,4,16])) -> (s32[], f32[28,8], f32[8,16], f32[7,4,16]) {
  %x = (s32[], f32[28,8]{1,0}, f32[8,16]{1,0}, f32[7,4,16]{2,1,0}) parameter(0)
  ROOT %while.3 = (s32[], f32[28,8]{1,0}, f32[8,16]{1,0}, f32[7,4,16]{2,1,0}) while(%x), condition=%condition, body=%body, metadata={op_name="jit(step)/jvp(GPT)/while"}, backend_config={"known_trip_count":{"n":"7"}}
}
"""  # noqa: E501


def flops_of_products(text: ProgramText) -> float:
    return sum(each.times * each.flops for each in text.operations.values())


def test_operations_of_a_loop_are_those_of_all_its_turns():
    text = ProgramText(TEXT)
    assert text.module == "jit_step" and text.loops == {"while.3": ("", 7)}
    assert {name: (o.kind, o.times, o.loop) for name, o in text.operations.items()} == {
        "cut": ("copy", 7, "while.3"),
        "dot.1": ("product", 7, "while.3"),
        "keep": ("copy", 7, "while.3"),
        "less": ("other", 7, "while.3"),
    }
    dot = text.operations["dot.1"]
    assert (dot.part, dot.phase, dot.source) == ("mlp", "backward", "model/block.py:42")
    assert dot.flops == 2 * 4 * 16 * 8 and dot.dtype == "f32"
    assert dot.bytes == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    assert flops_of_products(text) == 7 * dot.flops


def test_slices_count_what_they_read_and_write_of_an_array():
    text = ProgramText(TEXT)
    assert text.operations["cut"].bytes == 4 * (4 * 8 + 4 * 8 + 1)  # rows, again, and their place
    assert text.operations["keep"].bytes == 4 * (4 * 16 + 4 * 16 + 1)
    assert text.operations["cut"].source == "model/block.py:42"  # not the library's line


SMALL_CALL = """HloModule jit_step

%looped (p: f32[32]) -> f32[32] {
  %p = f32[32]{0} parameter(0)
  ROOT %while.1 = f32[32]{0} while(%p), condition=%c, body=%b
}

ENTRY %main (x: f32[32]) -> f32[32] {
  %x = f32[32]{0} parameter(0)
  ROOT %call = f32[32]{0} call(%x), to_apply=%looped, frontend_attributes={xla_cpu_small_call="true"}, metadata={op_name="jit(step)/planted/while"}
}
"""  # noqa: E501


def test_a_loop_that_is_one_kernel_is_named_as_a_loop():
    text = ProgramText(SMALL_CALL)
    assert text.operations["call"].kind == "loop" and not text.containers
    charged = account(trace_of(ran("call", 0.0, 2.0)), text)
    (cause,) = find_causes(charged, text, Machine())
    assert (cause.name, cause.seconds) == ("loop of tiny operations", 2.0)
    assert cause.where == "`call`, planted"


SENDS = """HloModule jit_step, num_partitions=8

ENTRY %main (x: f32[32]) -> f32[32] {
  %x = f32[32]{0} parameter(0)
  %ag = f32[256]{0} all-gather(%x), replica_groups={}, metadata={op_name="jit(step)/mlp/gather"}
  ROOT %ar = f32[256]{0} all-reduce(%ag), replica_groups={}
}
"""


def test_collectives_are_one_cause():
    charged = account(trace_of(ran("ag", 0.0, 3.0), ran("ar", 3.0, 4.0)), ProgramText(SENDS))
    (cause,) = find_causes(charged, ProgramText(SENDS), Machine("cpu", {"f32": 1e12}, 1e11))
    assert (cause.name, cause.seconds) == ("communication", 4.0)
    assert cause.where == "most, 75%, in `ag`, mlp"


def test_an_all_reduce_reads_and_writes_whether_it_is_asynchronous_or_not():
    text = SENDS.replace(
        "ROOT %ar = f32[256]{0} all-reduce(", "%ar = f32[256]{0} all-reduce-start("
    )
    text = text.replace("\n}", "\n  ROOT %done = f32[256]{0} all-reduce-done(%ar)\n}")
    assert ProgramText(text).operations["ar"].bytes == ProgramText(SENDS).operations["ar"].bytes
    assert ProgramText(SENDS).operations["ar"].bytes == 2 * 256 * 4


@pytest.mark.parametrize(
    "path, part",
    [
        ("jit(step)/jvp(GPT.loss)/GPT._layers/h_3/attention/attn/x", ("attention", "forward")),
        ("jit(step)/transpose(jvp(GPT.loss))/GPT._hidden/ln_f/reduce_sum", ("ln_f", "backward")),
        ("jit(step)/jvp(GPT)/checkpoint/rematted_computation/h/mlp/dot", ("mlp", "backward")),
        ("jit(step)/optimizer/mul", ("optimizer", "")),
        ("jit(step)/planted/while/body/closed_call/tanh", ("planted", "")),
        ("jit(step)/add", ("other", "")),
        ("jit(step)/(optimizer/reduce_sum:optimizer/mul:shard_map/psum)", ("optimizer", "")),
        ("jit(step)/jvp(GPT)/(mlp/dot:attention/dot)", ("mlp", "forward")),
    ],
)  # fmt: skip
def test_the_path_of_an_operation_names_its_part(path, part):
    assert part_of(f'%x = f32[] add(), metadata={{op_name="{path}"}}') == part


def flops_of(line, **shapes):
    instruction = parse_instruction(line)
    return product_flops(instruction, shapes)


def test_flops_of_products_in_each_form():
    batch = (
        "%d = f32[3,4,6]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, rhs_contracting_dims={1}"
    )
    assert flops_of(batch, a="f32[3,4,5]{2,1,0}", b="f32[3,5,6]{2,1,0}") == 2 * 3 * 4 * 6 * 5
    cublas = (
        '%g = (bf16[4,6]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["0"]}}}'
    )
    assert flops_of(cublas, a="bf16[5,4]{1,0}", b="bf16[5,6]{1,0}") == 2 * 4 * 6 * 5
    # As compilers for TPUs write a batch of three products: all but one tap falls between inputs.
    tpu = (
        "%c = f32[3,4,6]{2,1,0} convolution(%a, %b), "
        "window={size=3 stride=2 pad=0_0 lhs_dilate=3}, dim_labels=0bf_0io->0bf"
    )
    assert flops_of(tpu, a="f32[3,4,5]{2,1,0}", b="f32[3,5,6]{2,1,0}") == 2 * 3 * 4 * 6 * 5
    cudnn = (
        "%f = (bf16[2,3,16,8]{3,2,1,0}, u8[0]{0}) custom-call(%q, %k, %v), "
        'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":'
        '{"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": '
        '["2", "3", "16", "16"], "tuple_shapes": []}}}'
    )
    shape = "bf16[2,16,3,8]{3,2,1,0}"
    assert flops_of(cudnn, q=shape, k=shape, v=shape) == 2 * (2 * 2 * 3 * 16 * 16 * 8)
    assert flops_of("%x = f32[4]{0} add(%a, %b)", a="f32[4]{0}", b="f32[4]{0}") == 0


def test_products_of_a_compiled_step_are_those_of_the_formula():
    config = default.get_config()
    config.model.update(num_layers=2, num_heads=2, embed_dim=64, context_length=32, vocab_size=256)
    config.data.batch_size = 4
    program = Program.from_config(Config.from_dict(config), jax.devices()[:1])
    batch = program.backend.batch_shapes((4, 32), ("tokens", "targets"))
    text = ProgramText(program.compile_train(program.state_shapes, batch).text())
    width, tokens = 64, 4 * 32
    kernels = 2 * 12 * width**2 + 256 * width
    assert flops_of_products(text) == pytest.approx(
        tokens * (6 * kernels + 2 * 12 * width * 32), rel=0.01
    )
    parts = {operation.part for operation in text.operations.values()}
    assert {"attention", "mlp", "head", "optimizer"} <= parts


def ran(name, start, end, run=1, **kwargs):
    return Ran(name, start, end, module="jit_step", run=run, **kwargs)


def steps_at(*starts):
    return [Span(str(number), start, start) for number, start in enumerate(starts)]


def trace_of(*operations, steps=(), phases=(), waits=(), lines=()):
    return Trace(list(operations), list(steps), list(phases), list(waits), list(lines))


def test_operations_that_run_at_once_share_their_time():
    trace = trace_of(ran("a", 0.0, 3.0, lane=0), ran("b", 1.0, 3.0, lane=1), ran("c", 4.0, 5.0))
    charged = account(trace, None)
    assert {name: cost.seconds for name, cost in charged.operations.items()} == {
        "a": 2.0,
        "b": 1.0,
        "c": 1.0,
    }
    assert charged.between == {"": 1.0} and charged.seconds == 5.0


WAITING = Span("loop.py:7", 0.1, 2.001, text="float(loss)", waits=True)
BUSY = Span("loop.py:6", 0.1, 2.002, text="heavy()")
READ = Span("np.asarray(jax.Array)", 2.002, 2.0021)  # the value was there
LATE = Span("loop.py:7", 2.002, 2.003, text="float(loss)", waits=True)  # of a host that was held up


@pytest.mark.parametrize(
    "expected, given",
    [
        ({LAUNCH: 3.0}, dict(steps=steps_at(0.0, 1.0))),  # the next step was there
        ({SYNC: 3.0}, dict(steps=steps_at(0.0, 4.9), lines=[WAITING])),
        ({PYTHON: 3.0}, dict(steps=steps_at(0.0, 4.9), lines=[Span("loop.py:8", 0.5, 4.9)])),
        ({SYNC: 3.0}, dict(steps=steps_at(0.0, 4.9), lines=[LATE], waits=[LATE])),
        ({PYTHON: 3.0}, dict(steps=steps_at(0.0, 4.9), lines=[LATE])),  # perhaps of a host's number
        ({PYTHON: 3.0}, dict(steps=steps_at(0.0, 4.9), lines=[BUSY, LATE], waits=[READ])),
        ({PYTHON: 3.0}, dict(steps=steps_at(0.0, 4.9), lines=[BUSY], waits=[LATE])),
        (
            {LOADER: 3.0},  # with the time that starting the step takes then
            dict(steps=steps_at(0.0, 4.9), phases=[Span("data wait", 0.2, 4.9)]),
        ),
        (
            {SYNC: 2.0, LOADER: 1.0},
            dict(
                steps=steps_at(0.0, 4.9), lines=[WAITING], phases=[Span("data wait", 3.0, 4.0)]
            ),
        ),
    ],
)  # fmt: skip
def test_gaps_are_charged_to_what_the_host_did(expected, given):
    trace = trace_of(ran("a", 0.0, 2.0), ran("a", 5.0, 7.0, run=2), **given)
    charged = account(trace, None)
    assert {kind: seconds for (kind, _, _), seconds in charged.gaps.items()} == pytest.approx(
        expected
    )
    assert charged.computing == 2.0 and charged.seconds == pytest.approx(5.0)


def test_the_line_that_waited_is_named_and_not_one_that_follows():
    lines = [BUSY, dataclasses.replace(WAITING, start=1.0), LATE]
    trace = trace_of(
        ran("a", 0.0, 2.0), ran("a", 5.0, 7.0, run=2), steps=steps_at(0.0, 4.9),
        waits=[Span("np.asarray(jax.Array)", 1.0, 2.001), LATE],
        lines=[dataclasses.replace(x, name=f"loop.py:{n}") for n, x in enumerate(lines)],
    )  # fmt: skip
    assert list(account(trace, None).gaps) == [(SYNC, "loop.py:1", "float(loss)")]


def test_a_loop_of_tiny_operations_costs_its_time_without_its_recording():
    # Each of 1,000 turns: 1 us to record the comparison, which takes nothing; 3 us for the product.
    operations, now = [], 0.0
    for _ in range(1000):
        operations += [ran("less", now, now + 1e-6), ran("dot.1", now + 2e-6, now + 5e-6)]
        now += 6e-6
    text = ProgramText(TEXT)
    charged = account(trace_of(*operations, ran("rest", now, 2 * now)), text)
    assert charged.recording == pytest.approx(1000 * 4e-6, rel=1e-3)
    causes = find_causes(charged, text, Machine())
    assert causes[0].name == "loop of tiny operations"
    assert causes[0].seconds == pytest.approx(1000 * 2e-6, rel=1e-3)
    assert "1,000 turns and 2,000 operations" in causes[0].why


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
    assert [(r.name, r.module, r.run) for r in trace.operations] == [
        ("dot.1", "jit_step", 1),
        ("dot.1", "jit_step", 2),
    ]
    assert [step.name for step in trace.steps] == ["5"]
    charged = account(trace, ProgramText(TEXT))
    assert charged.steps == 2 and charged.recording == 0.0
    assert charged.computing == pytest.approx(2e-6) and charged.seconds == pytest.approx(5e-6)


def traced(directory, first=3, steps=2):
    """Traces steps of a product; the loop reads each result at once."""
    x = jnp.ones((128, 128))
    step = jax.jit(lambda x: x @ x / 128).lower(x).compile()
    with Profiler(directory, start=first, steps=steps, text=step.as_text) as profile:
        for number in range(1, 8):
            profile.step(number, x)
            x = step(x)
            float(x[0, 0])


def test_trace_holds_the_named_steps_and_no_others_beside_its_page(tmp_path, capsys):
    traced(tmp_path)
    (file,) = tmp_path.rglob("*.xplane.pb")
    assert [step.name for step in read_trace(file).steps] == ["3", "4"]
    written = (tmp_path / "profile.md").read_text()
    assert "Mean of 2 steps, 3 to 4 counted from 0, on cpu" in written and "| product |" in written
    assert written == page.explain(tmp_path) == page.explain(file)
    assert f"See {tmp_path / 'profile.md'}" in capsys.readouterr().out


def test_run_that_ends_within_the_trace_still_writes_it(tmp_path):
    traced(tmp_path, first=6, steps=100)
    assert "Mean of 2 steps, 6 to 7" in (tmp_path / "profile.md").read_text()


def test_a_share_beyond_a_limit_is_explained_before_the_tables(tmp_path):
    traced(tmp_path)
    text = page.read_program(tmp_path / page.PROGRAM)
    charged = account(read_trace(find_trace(tmp_path)), text)
    machine = Machine("a machine", "invented", {"f32": 1e3}, 1e3)  # any operation is faster
    before, *tables = page.render(charged, text, machine).split("\n| ")
    assert before.count(" Shares of a limit pass 100% where a cache holds operands, or where ") == 1
    assert any(int(share) > 100 for row in tables for share in re.findall(r" (\d+)% \|", row))


def test_a_trace_without_a_step_warns_and_goes_on(tmp_path, capsys):
    with Profiler(tmp_path, start=1, steps=1, text=lambda: TEXT) as profile:
        profile.step(1, jnp.ones(()))
    assert list(tmp_path.rglob("*.xplane.pb"))
    assert "warning: there is no profile.md" in capsys.readouterr().err


def test_no_trace_unless_asked_for(tmp_path):
    traced(tmp_path / "profile", steps=0)
    assert not (tmp_path / "profile").exists()


def test_a_program_that_has_not_run_shows_its_limits():
    machine = Machine.from_chip("H100")
    text = page.describe_program(ProgramText(TEXT), machine)
    assert "989,500 GFLOP/s in bf16" in text and "3,350 GB/s; NVIDIA H100 data sheet" in text
    assert "| mlp backward | 0.00 |" in text
    assert machine.limits(989.5e12, "bf16", 3.35e12) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("arguments, message", [
    (["none"], "none does not exist. Train in a new workdir with"),
    (["."], ". holds no trace. Train in a new workdir with"),
    (["bad.xplane.pb"], "bad.xplane.pb is no trace, or damaged. Trace the run again."),
    (["--text=bad.xplane.pb"], "bad.xplane.pb is no HLO text. Write one with train.py --plan"),
    ([], "no trace is named. For example, give runs/quickstart."),
    ([".", "--chip=H100"], "--chip would be ignored: a trace comes with its machine."),
    (["--text=step.txt", "--chip=H1"], "--chip=H1 is not known. For example, give --chip=H100."),
])  # fmt: skip
def test_mistakes_give_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.xplane.pb").write_bytes(b"\x0a\xff\xff")
    (tmp_path / "step.txt").write_text(TEXT)
    (tmp_path / "empty").mkdir()
    if arguments == ["."]:
        monkeypatch.chdir(tmp_path / "empty")
    command = [sys.executable, "-m", "gpt2.profile", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {message}") and result.stderr.count("\n") == 1


def test_a_damaged_record_of_the_machine_is_named(tmp_path):
    (tmp_path / "machine.json").write_text('{"speed": 3}')
    with pytest.raises(UserError, match=r"machine\.json is damaged\. Remove it"):
        Machine.load(tmp_path / "machine.json")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "fault, named",
    [
        ("sync", "Host synchronisation"),
        ("loader", "Slow loader"),
        # Beside other work, its steps take longer than the page says, since they wait for a core.
        pytest.param("tiny", "Loop of tiny operations", marks=pytest.mark.slow),
    ],
)
def test_the_page_names_a_planted_fault_and_what_it_costs(tmp_path, fault, named):
    told, cost = cost_of_planted(tmp_path / "run", fault, named)
    assert told == pytest.approx(cost, rel=0.2)


def test_a_trace_says_before_which_steps_it_waits_for_others(tmp_path, monkeypatch):
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, lambda *args, **kwargs: None)
    profiler, waited = Profiler(tmp_path, 2, 3, str), []
    for step in range(8):
        if profiler.waits_at(step):
            waited.append(step)
        profiler.step(step, jnp.ones(1))
    assert waited == [2, 5]


def cost_of_planted(workdir, fault, named):
    """Returns what a planted fault costs a step by the page, and by the log, in milliseconds."""
    # Other work may hold the host up for 10 ms before it waits for a step, which must last longer.
    # A slow loader hides behind the step.
    width, length = (256, 128) if fault == "sync" else (128, 64)
    process = start(
        workdir,
        *TINY,
        "--config.model.num_layers=2",
        f"--config.model.embed_dim={width}",
        f"--config.model.context_length={length}",
        "--config.train.num_steps=100",
        "--config.train.eval_every=100",
        "--config.train.checkpoint_every=100",
        "--config.logging.profile_start=74",
        "--config.logging.profile_steps=5",
        fault,
        script="tests/planted.py",
    )
    code, _, errors = finish(process, timeout=240)
    assert code == 0, errors
    text = (workdir / "profile" / "profile.md").read_text()
    assert text.splitlines()[2].startswith(f"**{named}: ")
    milliseconds = float(text.split(f"**{named}: ")[1].split(" ms")[0])
    # Steps 10 to 19, 30 to 39 and so on have the fault, the others do not.
    seconds = {True: [], False: []}
    for line in metrics_of(workdir):
        step = line["step"] - 1
        if step % 10 >= 4 and step >= 20 and not 70 <= step < 85:
            seconds[bool(step // 10 % 2)].append(line["perf/step_seconds"])
    cost = statistics.median(seconds[True]) - statistics.median(seconds[False])
    return milliseconds, 1e3 * cost
