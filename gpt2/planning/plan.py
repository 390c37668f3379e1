"""Planning a run without running it: what a training step takes.

The train step is compiled from shapes alone: for simulated CPU devices, or by the compiler of a GPU
or a TPU that is not here. Memory and collectives are read from the compiled program, so they are
those of a run in the same layout. A simulated plan has the state and gradients of a run on other
chips, and other work space.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence

import jax

from gpt2.config import Config
from gpt2.data.tokenizer_names import tokens_by_name
from gpt2.parallel.collectives import Collective, collectives
from gpt2.parallel.inspect import bytes_per_device
from gpt2.telemetry.chips import BOARDS, Board, find_chip
from gpt2.telemetry.flops import model_flops_per_token
from gpt2.telemetry.throughput import recomputed_flops_per_token
from gpt2.training.program import Program
from gpt2.training.state import TrainState

# The share of peak that a good GPT-2 run reaches: 41 % on an H100 (llm.c, modded-nanogpt).
ATTAINABLE = 0.4


class OutOfMemory(Exception):
    """The compiler's word that a step does not fit a device."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one training step takes.

    Attributes:
        program: what was compiled.
        memory: bytes per device by kind: parameters, optimizer, gradients and activations.
            Activations include all else that the step holds, such as parameters gathered over
            `fsdp`.
        text: the compiled step, as HLO.
        compile_seconds: what its compilation took.
    """

    program: Program
    memory: dict[str, int]
    text: str
    compile_seconds: float

    @property
    def config(self) -> Config:
        """The options, with the vocabulary resolved."""
        return self.program.config

    @property
    def state(self) -> TrainState:
        """Shapes and shardings of the state."""
        return self.program.state_shapes

    @property
    def num_devices(self) -> int:
        """The number of devices of the layout."""
        return self.program.backend.mesh.size

    @property
    def flops(self) -> float:
        """FLOPs of the model per step, over all devices; recomputation is not counted."""
        return self.config.tokens_per_step * model_flops_per_token(self.config.gpt())

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """What a step sends."""
        return collectives(self.text)

    @property
    def bytes_needed(self) -> int:
        """Bytes per device, all kinds together."""
        return sum(self.memory.values())

    def compute_seconds(self, board: str) -> float:
        """Returns the seconds that a step computes on an accelerator of `BOARDS`."""
        return compute_seconds(self.config, self.num_devices, board)

    def network_seconds(self, board: str) -> float | None:
        """Returns the seconds of collectives during which nothing is multiplied.

        It is None if the table does not know the speed between the devices of a collective.
        """
        return _seconds_sending([c for c in self.collectives if not c.overlapped], BOARDS[board])

    def step_seconds(self, board: str) -> float | None:
        """Returns the seconds of a step, or None where `network_seconds` is."""
        network = self.network_seconds(board)
        hidden = _seconds_sending([c for c in self.collectives if c.overlapped], BOARDS[board])
        if network is None:
            return None
        return max(self.compute_seconds(board), hidden or 0.0) + network

    def tokens_per_second(self, board: str) -> float | None:
        """Returns the tokens per second of all devices, or None where `network_seconds` is."""
        seconds = self.step_seconds(board)
        return self.config.tokens_per_step / seconds if seconds else None


def make_program(config: Config, devices: Sequence[jax.Device] | None = None) -> Program:
    """Returns the program of a config whose tokenizer need not be read, over `devices` (all).

    Raises:
        UserError: the layout cannot work, or the size of the vocabulary is not known or too small.
    """
    config = config.with_vocabulary(tokens_by_name(config.data.tokenizer))
    return Program.from_config(config, jax.devices() if devices is None else devices)


def make_plan(config: Config, devices: Sequence[jax.Device] | None = None) -> Plan:
    """Compiles the train step for `devices` (all, if not given) without running anything.

    Raises:
        UserError: as for `make_program`.
        OutOfMemory: as for `compile_plan`.
    """
    return compile_plan(make_program(config, devices))


def compile_plan(program: Program) -> Plan:
    """Compiles a program's train step without running anything.

    Raises:
        OutOfMemory: the compiler says that the step does not fit.
    """
    state = program.state_shapes
    try:
        compiled = program.compile_train(state, program.batch_shapes)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(_say_shortage(str(error))) from None
    memory = state_bytes(program)
    memory["activations"] = compiled.memory.peak - sum(memory.values())
    return Plan(program, memory, compiled.text(), compiled.compile_seconds)


def state_bytes(program: Program) -> dict[str, int]:
    """Returns bytes per device of parameters, optimizer and the sum of gradients."""
    state = program.state_shapes
    gradients = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state.params,
        program.backend.gradient_shardings(state.params),
    )
    return {
        "parameters": bytes_per_device(state.params),
        "optimizer": bytes_per_device(state.opt_state),
        "gradients": bytes_per_device(gradients),
    }


def compute_seconds(config: Config, num_devices: int, board: str) -> float:
    """Returns the seconds that a step computes on each of so many devices.

    Products computed again count, at `ATTAINABLE` of the data sheet's FLOP/s.

    Args:
        config: with its vocabulary resolved.
        num_devices: that share the work.
        board: an accelerator of `BOARDS`.
    """
    chip = find_chip(board)
    assert chip is not None, board  # every board's chip is known
    model = config.gpt()
    per_token = model_flops_per_token(model) + recomputed_flops_per_token(model)
    flops = config.tokens_per_step * per_token / num_devices
    return flops / (ATTAINABLE * chip.peak_flops(config.precision.compute))


def usable_memory(board: str) -> float:
    """Returns the bytes of an accelerator of `BOARDS` that a step may take.

    JAX takes three quarters of a GPU's memory, or the share that XLA_CLIENT_MEM_FRACTION names.
    """
    share = 1.0
    if not board.startswith("TPU"):
        names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
        given = next((os.environ[name] for name in names if os.environ.get(name)), "0.75")
        share = float(given)
    return share * 1e9 * BOARDS[board].memory


def _say_shortage(message: str) -> str:
    """Returns what a compiler says of the memory that it lacks, in one line."""
    used = re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm", message)
    if used:
        return f"the compiler needs {used[1]}iB of the {used[2]}iB of a device"
    return message.strip().split("\n")[0]


def _seconds_sending(found: list[Collective], board: Board) -> float | None:
    seconds = 0.0
    for collective in found:
        bandwidth = board.bandwidth(collective.group)
        if bandwidth is None:
            return None
        seconds += collective.bytes_sent / bandwidth
    return seconds
