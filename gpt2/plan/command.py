"""What `python train.py --plan` and its kin do."""

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
from absl import flags

from gpt2.config import Config, option, with_options
from gpt2.errors import UserError, tell
from gpt2.model.flops import model_flops_per_token
from gpt2.parallel.mesh import mesh_sizes
from gpt2.plan.collectives import describe_collectives
from gpt2.plan.plan import (
    ATTAINABLE,
    OutOfMemory,
    Plan,
    compile_plan,
    make_program,
    usable_memory,
)
from gpt2.plan.topologies import find_devices
from gpt2.signals import leave_at_interrupt
from gpt2.telemetry.chips import BOARDS, board_name
from gpt2.training.program import Program
from gpt2.utils.text import format_bytes, format_count


def define_flags() -> None:
    """Defines the flags that ask for a plan."""
    flags.DEFINE_bool("plan", False, "Say what a step takes, without data or training.")
    flags.DEFINE_integer(
        "plan_devices", None, "As --plan, for simulated devices.", lower_bound=1
    )
    flags.DEFINE_string(
        "plan_chips", None, "As --plan, for v5e-8, h100-8, target.txtpb-8, ..."
    )
    flags.DEFINE_string(
        "plan_text", None, "As --plan, with a file for the compiled step."
    )
    about = "As --plan, for a handful of layouts, the fastest first. What --config. gives stays."
    flags.DEFINE_bool("plan_search", False, about)


def is_asked() -> bool:
    """Returns whether the flags ask for a plan in place of a run."""
    args = flags.FLAGS
    return any(
        [
            args.plan,
            args.plan_devices,
            args.plan_chips,
            args.plan_text,
            args.plan_search,
        ]
    )


def run(config: Config, given: Collection[str]) -> int:
    """Does what the flags ask for, and returns the exit code: 1 if nothing fits.

    A search keeps the options whose dotted names are `given`.
    """
    leave_at_interrupt()  # there is nothing to save
    args = flags.FLAGS
    devices = _find_devices()
    kind = "simulated" if args.plan_devices else devices[0].device_kind
    if args.plan_search:
        return _search(config, devices, kind, given)
    program = make_program(config, devices)
    tell(
        f"compiling a step for {len(devices)} devices ({kind}); a TPU's compiler takes minutes"
    )
    try:
        plan = compile_plan(program)
    except OutOfMemory as error:
        print(f"a step of {len(devices)} devices ({kind}) does not fit: {error}")
        return 1
    if args.plan_text:
        Path(args.plan_text).write_text(plan.text)
    _print(plan, kind)
    return 0


def _find_devices() -> list[jax.Device]:
    args = flags.FLAGS
    # Before anything asks JAX for a device.
    if args.plan_devices or args.plan_chips:
        jax.config.update("jax_platforms", "cpu")
    if args.plan_chips:  # programs of absent devices cannot be read back
        jax.config.update("jax_enable_compilation_cache", False)
        return find_devices(args.plan_chips)
    if args.plan_devices:
        jax.config.update("jax_num_cpu_devices", args.plan_devices)
    return jax.devices()


def _print(plan: Plan, kind: str) -> None:
    program = plan.program
    config = plan.program.config
    board = board_name(kind)
    per_token = model_flops_per_token(config.gpt(), config.shapes.largest)
    sections = {
        "plan": {
            "devices": f"{program.backend.mesh.size} ({kind})",
            "layout": program.backend.layout,
            "parameters": f"{program.num_params:,}",
            "tokens per step": f"{config.tokens_per_step:,}",
            "FLOPs per step": format_count(config.tokens_per_step * per_token),
            "compiled in": f"{plan.compile_seconds:.1f} s",
        },
        "memory of a device": {
            name: f"{format_bytes(size)} ({size:,} bytes)"
            for name, size in (plan.memory | {"in all": plan.bytes_needed}).items()
        },
        "network, per step and device": describe_collectives(plan.collectives),
        f"at {ATTAINABLE:.0%} of peak": {
            name: _forecast(plan, name) for name in ([board] if board else BOARDS)
        },
    }
    for title, rows in sections.items():
        print(title)
        for name, value in rows.items():
            print(f"  {name:<18} {value}")


def _forecast(plan: Plan, board: str) -> str:
    """Returns the time of a step on an accelerator of `BOARDS`, and whether it fits."""
    seconds = plan.step_seconds(board)
    network = plan.network_seconds(board)
    share = f"{plan.bytes_needed / 1e9 / BOARDS[board].memory:.0%} of memory"
    fits = "" if plan.bytes_needed <= usable_memory(board) else ": too much"
    tokens = plan.program.config.tokens_per_step / seconds
    time = f"{1e3 * seconds:,.4g} ms, {1e3 * network:,.4g} sending, {format_count(tokens)} tokens/s"
    return f"{time}, {share}{fits}"


def _layouts(num_devices: int) -> Iterator[dict[str, Any]]:
    """Yields the options of `parallel.` that a search tries."""
    usual = dict(
        backend="pjit", strategy="auto", data=-1, fsdp=1, tensor=1, fsdp_gather="auto"
    )
    yield usual
    if num_devices == 1:
        return
    yield usual | dict(strategy="zero1")
    for gather in ("step", "layer"):
        yield usual | dict(strategy="zero3", fsdp_gather=gather)
        if num_devices > 8:  # within a machine, and replicas between machines
            yield usual | dict(fsdp=8, fsdp_gather=gather)
    for tensor in (2, 4, 8):
        if num_devices % tensor == 0:
            yield usual | dict(strategy="megatron", tensor=tensor)
            if num_devices > tensor:
                yield usual | dict(data=1, fsdp=-1, tensor=tensor)


def _search(
    config: Config, devices: list[jax.Device], kind: str, given: Collection[str]
) -> int:
    """Compiles each layout until a variant of it fits, and prints the fastest first."""
    board = board_name(kind) or "H100"  # for simulated devices
    tell(
        f"compiling steps for {len(devices)} devices ({kind}), with memory and speed of {board}"
    )
    found: dict[str, tuple[bool, float, str]] = {}
    for layout in _layouts(len(devices)):
        own = {f"parallel.{name}": value for name, value in layout.items()}
        own = {name: value for name, value in own.items() if name not in given}
        try:
            sizes = mesh_sizes(with_options(config, own).parallel, len(devices))
            rows = config.data.batch_size // (sizes["data"] * sizes["fsdp"])
            # From the fastest to what holds least.
            variants: list[dict[str, Any]] = [
                {"memory.remat": remat} for remat in ("none", "dots", "full")
            ]
            for variant in [*variants, variants[-1] | {"train.accumulate_steps": rows}]:
                chosen = own | {
                    name: v for name, v in variant.items() if name not in given
                }
                changed = {
                    name: v for name, v in chosen.items() if option(config, name) != v
                }
                flags_to_add = " ".join(
                    f"--config.{name}={v}" for name, v in changed.items()
                )
                if flags_to_add not in found:
                    program = make_program(with_options(config, chosen), devices)
                    found[flags_to_add] = _try(program, board)
                    tell(_row(found[flags_to_add], flags_to_add))
                if not found[flags_to_add][0]:
                    break
        except UserError as error:
            tell(f"{'does not work':<40} {error.what}")
    ranked = sorted((result, added) for added, result in found.items())
    print("\n".join(_row(*each) for each in ranked))
    return 0 if ranked and not ranked[0][0][0] else 1


def _try(program: Program, board: str) -> tuple[bool, float, str]:
    """Returns whether a step is too large, its seconds, and a text of both."""
    try:
        plan = compile_plan(program)
    except OutOfMemory as error:
        return True, math.inf, f"does not fit: {error}"
    except jax.errors.JaxRuntimeError as error:  # which loses no other layout
        return True, math.inf, f"does not compile: {str(error).splitlines()[0]}"
    seconds = plan.step_seconds(board)
    needed = format_bytes(plan.bytes_needed)
    if plan.bytes_needed > usable_memory(board):
        return True, seconds, f"does not fit: needs {needed}"
    return False, seconds, f"{1e3 * seconds:,.4g} ms a step, {needed}"


def _row(result: tuple[bool, float, str], flags_to_add: str) -> str:
    return f"{result[2]:<40} {flags_to_add or '(no flags to add)'}"
