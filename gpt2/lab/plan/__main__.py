"""Print the memory, collectives and time of a compiled training step, without training.

    python -m gpt2.lab.plan --config=configs/gpt2_1558m.py --chips=v5e-16

The step is compiled for this machine's devices, for simulated devices (--devices), or for chips
that this machine does not have (--chips). --search compiles a dozen layouts, and lists the flags of
each layout, the fastest first. The exit code is 1 if no layout fits.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()  # before JAX is imported

import math
import textwrap

import jax
from absl import flags

from gpt2 import cli
from gpt2.config import Config
from gpt2.errors import log
from gpt2.lab.plan.collectives import describe_collectives
from gpt2.lab.plan.plan import ATTAINABLE, Plan, compile_plan, make_program
from gpt2.lab.plan.search import search
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
    about = (
        "Plan for chips that this machine does not have: CHIP-N, such as v5e-8 or h100-8. CHIP may"
        " also be a file with XLA's description of a GPU."
    )
    flags.DEFINE_string("chips", None, about)
    about = "Write the compiled step to this file, as HLO text."
    flags.DEFINE_string("text", None, about)
    about = (
        "Compare a dozen layouts. Options that you set with --config.NAME=VALUE are the same in"
        " all layouts."
    )
    flags.DEFINE_bool("search", None, about)
    flags.mark_flags_as_mutual_exclusive(["devices", "chips"])
    flags.mark_flags_as_mutual_exclusive(["search", "text"])


def main() -> int:
    """Print a plan or the result of a search, and return the exit code.

    The exit code is 1 if --search finds no layout that fits, and otherwise 0.
    """
    exit_at_interrupt()  # there is nothing to save
    config = cli.parse_config()
    args = flags.FLAGS
    devices = _find_devices(config)
    kind = "simulated" if args.devices else devices[0].device_kind
    log(f"compiling for {len(devices)} devices ({kind})")
    if args.search:
        board = board_name(kind) or "H100"  # simulated devices stand for H100s
        return search(config, devices, board, cli.overrides())
    plan = compile_plan(make_program(config, devices))
    if args.text:
        with writing(args.text) as path:
            write_text(path, plan.text)
    _print(plan, kind)
    return 0


def _find_devices(config: Config) -> list[jax.Device]:
    args = flags.FLAGS
    # These settings take effect only before JAX looks for devices.
    if args.devices or args.chips:
        jax.config.update("jax_platforms", "cpu")
    if args.chips:  # JAX cannot read cached programs of absent devices
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
            "steps": f"{config.train.num_steps:,}",
            "tokens per step": f"{config.tokens_per_step:,}",
            "FLOPs per step": f"{config.tokens_per_step * per_token:.3g}",
            "checkpoint": format_bytes(plan.bytes_saved),
        },
        "memory per device": {
            name: f"{format_bytes(size)} ({size:,} bytes)"
            for name, size in (plan.memory | {"total": plan.bytes_needed}).items()
        },
        "network traffic per step and device": describe_collectives(plan.collectives),
    }
    for title, rows in sections.items():
        print(title)
        for name, value in rows.items():
            row = f"  {name:<18} {value}"
            print(textwrap.fill(row, 80, subsequent_indent=21 * " "))
    print(
        f"time, if devices compute at {ATTAINABLE:.0%} of their peak FLOP/s and send data"
        " afterwards"
    )
    print(_ROW.format("", "step", "sending", "tokens/s", "all steps", "memory used"))
    here = board_name(kind)
    for board in [here] if here else BOARDS:
        print(_ROW.format(board, *_forecast(plan, board)))
    print("!: more memory than JAX may use: by default 75 % of a GPU's, all of a TPU's")


_ROW = "  {:<16} {:>8} {:>8} {:>9} {:>19} {:>12}"


def _forecast(plan: Plan, board: str) -> list[str]:
    """Return the cells of one row of the table of times: the row for the accelerator `board`.

    `board` is a key of `BOARDS`. The cells are the time of a step, the time in which its
    collectives send data, the tokens per second, the time of all steps, and the percentage of the
    memory that the step needs. A `!` after the percentage means that the step does not fit.
    """
    memory = f"{plan.bytes_needed / 1e9 / BOARDS[board].memory:.0%}"
    if not plan.fits(board):
        memory += "!"
    seconds = plan.step_seconds(board)
    if math.isinf(seconds):  # the speed of links between devices is unknown
        return ["unknown", "unknown", "", "link speed unknown", memory]
    config = plan.program.config
    rate = config.tokens_per_step / seconds
    return [
        format_seconds(seconds),
        format_seconds(plan.network_seconds(board)),
        format_count(rate),
        format_duration(config.shapes.tokens(config.train.num_steps) / rate),
        memory,
    ]


if __name__ == "__main__":
    cli.run(main, define_flags)
