"""Planning a run without running it: `python train.py --plan`.

The train step is compiled from shapes alone: for N simulated CPU devices (`--plan_devices=N`), or
by the compiler of a GPU or a TPU that is not here (`--plan_chips=v5e-8`). Memory and collectives
are read from the compiled program, so they are those of a run in the same layout. A simulated plan
has the state and gradients of a run on other chips, and other work space.
"""

import dataclasses
import functools
import math
import re
from pathlib import Path

import jax

from gpt2.config import Config
from gpt2.data.tokenizer_names import tokens_by_name
from gpt2.errors import UserError, require_writable_file
from gpt2.model import num_params
from gpt2.parallel.collectives import Collective, collectives
from gpt2.parallel.inspect import bytes_per_device, describe_spread
from gpt2.parallel.topologies import find_devices
from gpt2.telemetry.chips import BOARDS, Board, board_name, find_chip
from gpt2.telemetry.progress import print_summary
from gpt2.telemetry.throughput import model_flops_per_token
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.utils.files import write_text
from gpt2.utils.text import counted, format_bytes, format_count

# The share of peak that a good GPT-2 run reaches: 41 % on an H100 (llm.c, modded-nanogpt).
ATTAINABLE = 0.4


class OutOfMemory(Exception):
    """The compiler's word that a step does not fit a device."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one training step takes.

    Attributes:
        config: with its vocabulary resolved.
        num_devices: of the layout.
        state: shapes and shardings.
        memory: bytes per device by kind: parameters, optimizer, gradients and activations.
            Activations include all else that the step holds, such as parameters gathered over
            `fsdp`.
        text: the compiled step, as HLO.
        compile_seconds: what its compilation took.
    """

    config: Config
    num_devices: int
    state: TrainState
    memory: dict[str, int]
    text: str
    compile_seconds: float

    @property
    def tokens(self) -> int:
        """Tokens per step, over all devices."""
        return self.config.data.batch_size * self.config.model.context_length

    @property
    def flops(self) -> float:
        """FLOPs of the model per step, over all devices; recomputation is not counted."""
        model = self.config.gpt()
        return self.tokens * model_flops_per_token(model)

    def compute_seconds(self, name: str) -> float:
        """Returns the seconds that a step computes on the accelerator `name` of `BOARDS`."""
        chip = find_chip(name)
        assert chip is not None, name  # every board's chip is known
        peak = chip.peak_flops(self.config.precision.compute)
        again = 4 / 3 if self.config.memory.remat == "full" else 1.0  # forward runs twice
        return again * self.flops / self.num_devices / (peak * ATTAINABLE)

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """What a step sends."""
        return collectives(self.text)

    def network_seconds(self, name: str) -> float | None:
        """Returns the seconds of collectives during which nothing is multiplied."""
        waiting = [c for c in self.collectives if not c.overlapped]
        return _seconds_sending(waiting, BOARDS[name])


def make_plan(config: Config, devices: list[jax.Device] | None = None) -> Plan:
    """Compiles the train step for `devices` (all, if not given) without running anything.

    Raises:
        UserError: the layout cannot work, or the size of the vocabulary is not known or too small.
    """
    devices = jax.devices() if devices is None else devices
    config = config.with_vocabulary(tokens_by_name(config.data.tokenizer))
    program = Program.from_config(config, devices)
    state = program.state_shapes
    shape = (config.data.batch_size, config.model.context_length)
    names = ("tokens", "targets") + ("segments",) * config.data.document_mask
    batch = program.backend.batch_shapes(shape, names)
    try:
        compiled = program.compile_train(state, batch)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(_say_shortage(str(error))) from None
    memory = {
        "parameters": bytes_per_device(state.params),
        "optimizer": bytes_per_device(state.opt_state),
        "gradients": _gradient_bytes(program),
    }
    memory["activations"] = compiled.memory.peak - sum(memory.values())
    return Plan(config, len(devices), state, memory, compiled.text(), compiled.compile_seconds)


def print_plan(
    config: Config, num_devices: int = 0, chips: str | None = None, text: str | None = None
) -> bool:
    """Plans a run and prints what it takes: all that `train.py --plan` does.

    Args:
        config: the options.
        num_devices: CPU devices to simulate; 0: plan for the devices that JAX finds.
        chips: kind and number of devices that need not be here, as `find_devices` takes them.
        text: a file for the compiled program, as HLO.

    Returns:
        False if the compiler says that the step does not fit.

    Raises:
        UserError: as for `make_plan` and `find_devices`, or `text` cannot be written.
    """
    if text is not None:
        require_writable_file("plan_text", Path(text))
    # Before anything asks JAX for a device.
    if num_devices or chips is not None:
        jax.config.update("jax_platforms", "cpu")
    if chips is not None:  # programs of absent devices cannot be read back
        jax.config.update("jax_enable_compilation_cache", False)
    if num_devices:
        jax.config.update("jax_num_cpu_devices", num_devices)
    devices = jax.devices() if chips is None else find_devices(chips)
    if not num_devices and chips is None:
        _check_found(config, len(devices))
    kind = "simulated" if num_devices else devices[0].device_kind
    try:
        plan = make_plan(config, devices)
    except OutOfMemory as error:
        print_summary({"plan": {"devices": f"{len(devices)} ({kind})", "does not fit": str(error)}})
        return False
    if text is not None:
        Path(text).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(text), plan.text)
    memory = plan.memory | {"in all": sum(plan.memory.values())}
    board = board_name(kind)
    print_summary(
        {
            "plan": {
                "devices": f"{plan.num_devices} ({kind})",
                "parameters": f"{num_params(plan.state.params):,}",
                "tokens per step": f"{plan.tokens:,}",
                "FLOPs per step": format_count(plan.flops),
                "compiled in": f"{plan.compile_seconds:.1f} s",
            },
            "memory of a device": {
                name: f"{format_bytes(size)} ({size:,} bytes)" for name, size in memory.items()
            },
        }
        | describe_spread(plan.state.params, plan.text)
        | {
            f"at {ATTAINABLE:.0%} of peak": {
                name: _describe_time(plan, name, by_its_compiler=chips is not None)
                for name in ([board] if board else BOARDS)
            }
        }
    )
    return True


def _check_found(config: Config, found: int) -> None:
    """Raises a UserError if the mesh needs more devices than are here."""
    sizes = {axis: size for axis, size in config.parallel.sizes.items() if size > 1}
    if (needed := math.prod(sizes.values())) > found:
        given = " x ".join(f"parallel.{axis}={size}" for axis, size in sizes.items())
        raise UserError(
            f"{given} takes {counted(needed, 'device')}; found: {found}",
            f"Plan for devices that are not here: add --plan_devices={needed}",
        )


def _say_shortage(message: str) -> str:
    """Returns what a compiler says of the memory that it lacks, in one line."""
    used = re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm", message)
    if used:
        return f"the compiler needs {used[1]}iB of the {used[2]}iB of a device"
    return message.strip().split("\n")[0]


def _describe_time(plan: Plan, name: str, *, by_its_compiler: bool) -> str:
    share = sum(plan.memory.values()) / (1e9 * BOARDS[name].memory)
    compute, network = plan.compute_seconds(name), plan.network_seconds(name)
    fits = f"memory {share:.0%}" if share <= 1 else f"does not fit (memory {share:.0%})"
    if by_its_compiler and name.startswith("TPU"):
        fits = "fits, by its compiler"  # which refuses what does not
    if network is None:
        return f"computes {_milliseconds(compute)}, network unknown beyond one pod, {fits}"
    hidden = _seconds_sending([c for c in plan.collectives if c.overlapped], BOARDS[name]) or 0.0
    seconds = max(compute, hidden) + network
    return (
        f"{_milliseconds(seconds)} a step, {_milliseconds(network)} of it sending, "
        f"{format_count(plan.tokens / seconds)} tokens/s, {fits}"
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.{0 if seconds >= 0.1 else 2}f} ms"


def _seconds_sending(found: list[Collective], board: Board) -> float | None:
    seconds = 0.0
    for collective in found:
        bandwidth = board.bandwidth(collective.group)
        if bandwidth is None:
            return None
        seconds += collective.bytes_sent / bandwidth
    return seconds


def _gradient_bytes(program: Program) -> int:
    """Returns the bytes of a device's sum of gradients."""
    shapes = program.state_shapes.params
    shardings = program.backend.gradient_shardings(shapes)
    return bytes_per_device(
        jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings,
        )
    )
