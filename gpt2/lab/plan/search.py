"""Compare a dozen layouts by their plans, and list the flags of each layout."""

import math
import textwrap
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax

from gpt2.config import Config, get_option, read_option, with_options
from gpt2.config.options import Options
from gpt2.errors import UserError, log
from gpt2.lab.plan.plan import DoesNotFit, compile_plan, make_program
from gpt2.utils.text import format_bytes, format_seconds

_USUAL = (
    "parallel.backend=pjit parallel.strategy=auto parallel.data=-1 parallel.fsdp=1"
    " parallel.tensor=1 parallel.fsdp_gather=auto"
)
# The options that each layout changes. If a machine has 8 devices, `parallel.fsdp=8` splits the
# state within a machine, and every machine holds a replica.
_LAYOUTS = (
    "",
    "parallel.strategy=zero1",
    "parallel.strategy=zero3 parallel.fsdp_gather=step",
    "parallel.strategy=zero3 parallel.fsdp_gather=layer",
    "parallel.fsdp=8 parallel.fsdp_gather=step",
    "parallel.fsdp=8 parallel.fsdp_gather=layer",
    "parallel.strategy=megatron parallel.tensor=2",
    "parallel.strategy=megatron parallel.tensor=4",
    "parallel.strategy=megatron parallel.tensor=8",
    "parallel.data=1 parallel.fsdp=-1 parallel.tensor=2",
    "parallel.data=1 parallel.fsdp=-1 parallel.tensor=4",
    "parallel.data=1 parallel.fsdp=-1 parallel.tensor=8",
)
# Variants of a layout, from the fastest to the variant that needs the least memory. Each is a value
# of `memory.remat`, except `split`: it is `full`, with micro-batches of one sequence per device.
_VARIANTS = ("none", "dots", "full", "split")


class Result(NamedTuple):
    """A summary of a layout's plan. Sorted results begin with the fastest layout that fits."""

    fails: bool
    seconds: float  # time of a step
    summary: str


def search(
    config: Config, devices: Sequence[jax.Device], board: str, given: Collection[str]
) -> int:
    """For each layout, compile variants until one fits. Then print all compiled variants.

    The fastest variant is printed first, and variants that do not fit are printed last. Each
    variant of a layout needs less memory than the variant before it (see `_VARIANTS`). Options with
    names in `given`, such as `memory.remat`, stay as they are. `board`, a key of `BOARDS`, is the
    accelerator for which time and memory are computed. Return 1 if no layout fits, and otherwise 0.
    """
    results: dict[str, Result] = {}  # flags to add -> result
    for layout in _LAYOUTS:
        for variant in _VARIANTS:
            options = _options(config, f"{_USUAL} {layout}", variant, len(devices))
            changed = {
                name: value
                for name, value in options.items()
                if name not in given and get_option(config, name) != value
            }
            flags = " ".join(f"--config.{name}={changed[name]}" for name in changed)
            try:
                if flags not in results:
                    log(f"compiling {flags or 'the given options'}")
                    results[flags] = _try(with_options(config, changed), devices, board)
            except UserError as error:  # all variants of the layout fail
                reason = textwrap.fill(f"skipped: {error.what}", 76)
                log(textwrap.indent(reason, "    "))
                break
            if not results[flags].fails:
                break
    print(f"{len(devices)} {board}: time of a step, and memory per device")
    ranked = sorted((result, flags) for flags, result in results.items())
    for result, flags in ranked:
        print(result.summary)
        lines = textwrap.wrap(flags or "(no flags to add)", 76)
        print(textwrap.indent("\n".join(lines), "    "))
    return int(all(result.fails for result in results.values()))


def _options(config: Config, layout: str, variant: str, num_devices: int) -> Options:
    """Return the options of a variant of a layout, by dotted name.

    `layout` is a list of `OPTION=VALUE`, separated by spaces. `variant` is one of `_VARIANTS`.
    """
    options: Options = {}
    for setting in layout.split():
        name, _, value = setting.partition("=")
        options[name] = read_option(name, value)
    options["memory.remat"] = variant
    if variant == "split":
        options["memory.remat"] = "full"
        # Each tensor-parallel group computes one sequence of a micro-batch.
        sequences = config.data.batch_size * options["parallel.tensor"]
        options["train.accumulate_steps"] = sequences // num_devices
    return options


def _try(config: Config, devices: Sequence[jax.Device], board: str) -> Result:
    """Compile a step, and return a summary of its time and memory on `board`, a key of `BOARDS`."""
    try:
        plan = compile_plan(make_program(config, devices))
    except DoesNotFit as error:
        return Result(True, math.inf, textwrap.shorten(error.what, 80))
    seconds = plan.step_seconds(board)
    needed = format_bytes(plan.bytes_needed)
    if plan.fits(board):
        return Result(False, seconds, f"{format_seconds(seconds)} per step, {needed}")
    return Result(True, seconds, f"The step does not fit: it needs {needed}")
