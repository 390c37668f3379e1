"""What `python train.py --plan` and its kin do."""

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

import jax
from absl import flags

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
from gpt2.utils.text import format_bytes, format_count, format_duration


def define_flags() -> None:
    """Defines the flags that ask for a plan."""
    flags.DEFINE_bool("plan", False, "Say what a step takes, without data or training.")
    flags.DEFINE_integer(
        "plan_devices",
        None,
        "As --plan, for simulated devices.",
        lower_bound=1,
    )
    flags.DEFINE_string(
        "plan_chips", None, "As --plan, for v5e-8, h100-8, target.txtpb-8, ..."
    )
    flags.DEFINE_string(
        "plan_text", None, "As --plan, and writes the compiled step there."
    )
    about = "As --plan, for a handful of layouts, the fastest first. What --config. gives stays."
    flags.DEFINE_bool("plan_search", False, about)


def is_asked() -> bool:
    """Returns whether the flags ask for a plan in place of a run."""
    names = ("plan", "plan_devices", "plan_chips", "plan_text", "plan_search")
    return any(flags.FLAGS[name].value for name in names)


def run(config: Config, given: Collection[str]) -> int:
    """Does what the flags ask for, and returns the exit code: 1 if nothing fits.

    A search keeps the options whose dotted names are `given`.
    """
    exit_at_interrupt()  # there is nothing to save
    args = flags.FLAGS
    devices = _find_devices(config)
    kind = "simulated" if args.plan_devices else devices[0].device_kind
    if args.plan_search:
        return _search(
            config,
            devices,
            kind,
            given,
        )
    program = make_program(config, devices)
    log(
        f"compiling a step for {len(devices)} devices ({kind}); a TPU's compiler takes minutes"
    )
    try:
        plan = compile_plan(program)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        told = str(error).strip().partition("\n")[0]
        print(f"a step of {len(devices)} devices ({kind}) does not fit: {told}")
        return 1
    if args.plan_text:
        with writing(args.plan_text) as path:
            write_text(path, plan.text)
    _print(plan, kind)
    return 0


def _find_devices(config: Config) -> list[jax.Device]:
    args = flags.FLAGS
    # Before anything asks JAX for a device.
    if args.plan_devices or args.plan_chips:
        jax.config.update("jax_platforms", "cpu")
    if args.plan_chips:  # programs of absent devices cannot be read back
        jax.config.update("jax_enable_compilation_cache", False)
        return find_devices(args.plan_chips)
    if args.plan_devices:
        jax.config.update("jax_num_cpu_devices", args.plan_devices)
    else:
        split_cpu(config.parallel.cpu_devices)
    return jax.devices()


def _print(plan: Plan, kind: str) -> None:
    program = plan.program
    config = program.config
    per_token = model_flops_per_token(config.gpt(), config.shapes.largest)
    memory = plan.memory | {"in all": plan.bytes_needed}
    own = board_name(kind)
    boards = [own] if own else BOARDS
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
            for name, size in memory.items()
        },
        "network, per step and device": describe_collectives(plan.collectives),
        f"at {ATTAINABLE:.0%} of peak": {
            board: _forecast(plan, board) for board in boards
        },
    }
    for title, rows in sections.items():
        print(title)
        for name, value in rows.items():
            print(f"  {name:<18} {value}")


def _forecast(plan: Plan, board: str) -> str:
    """Returns the time of a step on an accelerator of `BOARDS`, and whether it fits."""
    seconds = plan.step_seconds(board)
    share = f"{plan.bytes_needed / 1e9 / BOARDS[board].memory:.0%} of memory"
    if plan.bytes_needed > usable_memory(board):
        share += ": too much"
    if math.isinf(seconds):
        return f"{_time(seconds)}, {share}"
    sending = 1e3 * plan.network_seconds(board)
    config = plan.program.config
    rate = config.tokens_per_step / seconds
    whole = format_duration(config.shapes.tokens(config.train.num_steps) / rate)
    step = f"{_time(seconds)}, {sending:,.4g} sending, {format_count(rate)} tokens/s"
    return f"{step}, {whole} for all steps, {share}"


def _time(seconds: float) -> str:
    """Writes the time of a step, or that the links between so many devices are not known."""
    if math.isinf(seconds):
        return "unknown time: the speed of links between so many is not known"
    return f"{1e3 * seconds:,.4g} ms"


Options = dict[str, int | str]  # by dotted name


def _layouts(num_devices: int) -> Iterator[Options]:
    """Yields the options that a search tries."""
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
    """Yields options of a layout, from the fastest to what holds least: a row of a batch each."""
    for remat in ("none", "dots", "full"):
        yield layout | {"memory.remat": remat}
    yield layout | {"memory.remat": "full", "train.accumulate_steps": rows}


class _Tried(NamedTuple):
    """What a search found of a step; the best comes first."""

    fails: bool
    seconds: float
    told: str


def _search(
    config: Config,
    devices: list[jax.Device],
    kind: str,
    given: Collection[str],
) -> int:
    """Compiles each layout until a variant of it fits, and prints the fastest first."""
    board = board_name(kind) or "H100"  # for simulated devices
    log(
        f"compiling steps for {len(devices)} devices ({kind}), with memory and speed of {board}"
    )
    found: dict[str, _Tried] = {}
    for layout in _layouts(len(devices)):
        tensor = int(layout["parallel.tensor"])
        rows = config.data.batch_size * tensor // len(devices)
        for options in _variants(layout, rows):
            changed = {
                name: value
                for name, value in options.items()
                if name not in given and option(config, name) != value
            }
            to_add = " ".join(f"--config.{k}={v}" for k, v in changed.items())
            try:
                if to_add not in found:
                    log(f"compiling {to_add or 'as it is'}")
                    each = with_options(config, changed)
                    found[to_add] = _try(each, devices, board)
            except UserError as error:
                told = f"does not work: {error.what}"
                found[to_add] = _Tried(True, math.inf, told)
                break
            if not found[to_add].fails:
                break
    ranked = sorted((tried, to_add) for to_add, tried in found.items())
    for tried, to_add in ranked:
        print(f"{tried.told:<40} {to_add or '(no flags to add)'}")
    return int(ranked[0][0].fails)


def _try(config: Config, devices: list[jax.Device], board: str) -> _Tried:
    """Compiles a step."""
    try:
        plan = compile_plan(make_program(config, devices))
    except jax.errors.JaxRuntimeError as error:
        told = str(error).strip().partition("\n")[0]
        return _Tried(True, math.inf, f"does not fit: {told}")
    seconds = plan.step_seconds(board)
    needed = format_bytes(plan.bytes_needed)
    if plan.bytes_needed > usable_memory(board):
        return _Tried(True, seconds, f"does not fit: needs {needed}")
    return _Tried(False, seconds, f"{_time(seconds)} a step, {needed}")
