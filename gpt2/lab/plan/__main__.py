"""Print what a training step takes, from the compiled step. Nothing trains.

    python -m gpt2.lab.plan --config=configs/gpt2_1558m.py --chips=v5e-16

The step is compiled for this machine's devices, for simulated ones (--devices) or by the compiler
of chips that are not here (--chips). --search compiles a handful of layouts and lists the flags of
those that fit, the fastest first. The exit code is 1 if nothing fits.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()  # before JAX is imported

import math
import textwrap
from collections.abc import Collection, Iterator
from typing import NamedTuple

import jax
from absl import flags

from gpt2 import cli
from gpt2.config import Config, option, with_options
from gpt2.errors import UserError, log
from gpt2.lab.plan.collectives import describe_collectives
from gpt2.lab.plan.plan import (
    ATTAINABLE,
    Plan,
    compile_plan,
    make_program,
    usable_memory,
)
from gpt2.lab.plan.topologies import find_devices
from gpt2.model.flops import model_flops_per_token
from gpt2.parallel.mesh import split_cpu
from gpt2.signals import exit_at_interrupt
from gpt2.telemetry.chips import BOARDS, board_name
from gpt2.utils.files import write_text
from gpt2.utils.stores import writing
from gpt2.utils.text import (
    format_bytes,
    format_count,
    format_duration,
    format_seconds,
)


def define_flags() -> None:
    """Define the flags of a plan."""
    cli.define_config()
    about = "Plan for this number of simulated devices."
    flags.DEFINE_integer("devices", None, about, lower_bound=1)
    about = "Plan for chips that are not here: v5e-8, h100-8, target.txtpb-8, ..."
    flags.DEFINE_string("chips", None, about)
    about = "Write the text of the compiled step, HLO, to this file."
    flags.DEFINE_string("text", None, about)
    about = (
        "Compare a handful of layouts. Options that --config. sets stay as they are."
    )
    flags.DEFINE_bool("search", False, about)


def main() -> int:
    """Print a plan or the result of a search, and return the exit code."""
    exit_at_interrupt()  # there is nothing to save
    config = cli.parse_config()
    args = flags.FLAGS
    devices = _find_devices(config)
    kind = "simulated" if args.devices else devices[0].device_kind
    if args.search:
        return _search(config, devices, kind, cli.overrides())
    program = make_program(config, devices)
    log(f"compiling a step for {len(devices)} devices ({kind}), for a TPU in minutes")
    try:
        plan = compile_plan(program)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        print(f"A step on {len(devices)} devices ({kind}) does not fit: {reason}")
        return 1
    if args.text:
        with writing(args.text) as path:
            write_text(path, plan.text)
    _print(plan, kind)
    return 0


def _find_devices(config: Config) -> list[jax.Device]:
    args = flags.FLAGS
    # Before anything asks JAX for a device.
    if args.devices or args.chips:
        jax.config.update("jax_platforms", "cpu")
    if args.chips:  # programs of absent devices cannot be read back
        jax.config.update("jax_enable_compilation_cache", False)
        return find_devices(args.chips)
    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)
    else:
        split_cpu(config.parallel.cpu_devices)
    return jax.devices()


def _print(plan: Plan, kind: str) -> None:
    program = plan.program
    config = program.config
    per_token = model_flops_per_token(config.gpt(), config.shapes.largest)
    sections = {
        "plan": {
            "devices": f"{program.backend.mesh.size} ({kind})",
            "layout": program.backend.layout,
            "parameters": f"{program.num_params:,}",
            "tokens per step": f"{config.tokens_per_step:,}",
            "FLOPs per step": format_count(config.tokens_per_step * per_token),
            "a checkpoint": format_bytes(plan.bytes_saved),
        },
        "memory of a device": {
            name: f"{format_bytes(size)} ({size:,} bytes)"
            for name, size in (plan.memory | {"in all": plan.bytes_needed}).items()
        },
        "network, per step and device": describe_collectives(plan.collectives),
    }
    for title, rows in sections.items():
        print(title)
        for name, value in rows.items():
            print(f"  {name:<18} {value}")
    print(f"a step at {ATTAINABLE:.0%} of the peak FLOP/s, if no collective overlaps")
    print(_ROW.format("", "step", "sending", "tokens/s", "all steps", "memory"))
    here = board_name(kind)
    for board in [here] if here else BOARDS:
        print(_ROW.format(board, *_forecast(plan, board)))


_ROW = "  {:<16} {:>8} {:>8} {:>9} {:>20} {:>7}"


def _forecast(plan: Plan, board: str) -> list[str]:
    """Return what a row says about a step on an accelerator of `BOARDS`."""
    memory = f"{plan.bytes_needed / 1e9 / BOARDS[board].memory:.0%}"
    if plan.bytes_needed > usable_memory(board):
        memory += "!"
    seconds = plan.step_seconds(board)
    if math.isinf(seconds):  # the speed of its links is unknown
        return ["unknown", "unknown", "", "", memory]
    config = plan.program.config
    rate = config.tokens_per_step / seconds
    return [
        format_seconds(seconds),
        format_seconds(plan.network_seconds(board)),
        format_count(rate),
        format_duration(config.shapes.tokens(config.train.num_steps) / rate),
        memory,
    ]


Options = dict[str, int | str]  # by dotted name


def _layouts(num_devices: int) -> Iterator[Options]:
    """Yield the layouts that a search compiles."""
    usual: Options = {
        "parallel.backend": "pjit",
        "parallel.strategy": "auto",
        "parallel.data": -1,
        "parallel.fsdp": 1,
        "parallel.tensor": 1,
        "parallel.fsdp_gather": "auto",
    }
    yield usual
    if num_devices == 1:
        return
    yield usual | {"parallel.strategy": "zero1"}
    for gather in ("step", "layer"):
        zero3 = usual | {"parallel.fsdp_gather": gather}
        yield zero3 | {"parallel.strategy": "zero3"}
        if num_devices > 8:  # within a machine, and replicas between machines
            yield zero3 | {"parallel.fsdp": 8}
    for tensor in (2, 4, 8):
        if num_devices % tensor == 0:
            split = usual | {"parallel.tensor": tensor}
            yield split | {"parallel.strategy": "megatron"}
            if num_devices > tensor:
                yield split | {"parallel.data": 1, "parallel.fsdp": -1}


def _variants(layout: Options, rows: int) -> Iterator[Options]:
    """Yield a layout with options from the fastest to the one that needs the least memory.

    `rows` is the number of micro-batches of one sequence per device.
    """
    for remat in ("none", "dots", "full"):
        yield layout | {"memory.remat": remat}
    yield layout | {"memory.remat": "full", "train.accumulate_steps": rows}


class _Result(NamedTuple):
    """What a search found out about a layout; results sort from the best to the worst."""

    fails: bool
    seconds: float  # of a step
    summary: str


def _search(
    config: Config, devices: list[jax.Device], kind: str, given: Collection[str]
) -> int:
    """Compile variants of each layout until one fits, and print the fastest layout first."""
    board = board_name(kind) or "H100"  # simulated devices stand for H100s
    log(f"compiling for {len(devices)} devices ({kind}), with the figures of {board}")
    results: dict[str, _Result] = {}  # by the flags to add
    for layout in _layouts(len(devices)):
        rows = config.data.batch_size * int(layout["parallel.tensor"]) // len(devices)
        for options in _variants(layout, rows):
            changed = {
                name: value
                for name, value in options.items()
                if name not in given and option(config, name) != value
            }
            to_add = " ".join(f"--config.{k}={v}" for k, v in changed.items())
            to_add = to_add or "(no flags to add)"
            if to_add not in results:
                log(f"compiling {to_add}")
                results[to_add] = _try(config, changed, devices, board)
            # A layout that is not possible stays so in all variants, its time unknown.
            is_impossible = results[to_add].summary.startswith(_IMPOSSIBLE)
            if is_impossible or not results[to_add].fails:
                break
    ranked = sorted((result, to_add) for to_add, result in results.items())
    for result, to_add in ranked:
        print(textwrap.fill(result.summary, 80, subsequent_indent="    "))
        print(textwrap.indent(textwrap.fill(to_add, 76), "    "))
    return int(ranked[0][0].fails)


_IMPOSSIBLE = "is not possible"


def _try(
    config: Config, changed: Options, devices: list[jax.Device], board: str
) -> _Result:
    """Compile a step of a config with some options changed."""
    try:
        plan = compile_plan(make_program(with_options(config, changed), devices))
    except UserError as error:
        return _Result(True, math.inf, f"{_IMPOSSIBLE}: {error.what}")
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        return _Result(True, math.inf, f"does not fit: {reason}")
    seconds = plan.step_seconds(board)
    needed = format_bytes(plan.bytes_needed)
    if plan.bytes_needed > usable_memory(board):
        return _Result(True, seconds, f"does not fit: needs {needed}")
    return _Result(False, seconds, f"{format_seconds(seconds)} a step, {needed}")


if __name__ == "__main__":
    cli.run(main, define_flags)
