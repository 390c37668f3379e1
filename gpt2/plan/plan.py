"""What a training step takes, read from the compiled step. Nothing runs.

It is compiled from shapes alone: for simulated CPU devices, or by the compiler of a GPU or a TPU
that is not here. A simulated plan has the state and gradients of a run on chips, and other work
space.
"""

import dataclasses
import math
import os
import re
from collections.abc import Sequence

import jax

from gpt2.config import Config, tokens_by_name
from gpt2.parallel import state_bytes
from gpt2.plan.collectives import Collective, collectives
from gpt2.telemetry.chips import BOARDS
from gpt2.telemetry.flops import model_flops_per_token
from gpt2.training.program import Program

# The share of peak that a good GPT-2 run reaches: 41 % on an H100 (llm.c, modded-nanogpt).
ATTAINABLE = 0.4
# The share of a step's products that a policy computes again: the forward pass is a third, and MLPs
# are two thirds of it.
RECOMPUTED = {"full": 1 / 3, "attention": 2 / 9, "mlp": 1 / 9}


class OutOfMemory(Exception):
    """The compiler's word that a step does not fit a device."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one training step takes.

    Attributes:
        memory: bytes per device of parameters, optimizer, gradients, and activations with all else
            that the step holds, such as gathered parameters.
        text: the compiled step, as HLO.
    """

    program: Program
    memory: dict[str, int]
    text: str
    collectives: list[Collective]
    compile_seconds: float

    @property
    def bytes_needed(self) -> int:
        """Bytes per device, all kinds together."""
        return sum(self.memory.values())

    def network_seconds(self, board: str, *, overlapped: bool = False) -> float:
        """Returns the seconds of collectives during which nothing is multiplied, or the others'.

        They are infinite where `BOARDS` does not know the speed between two devices.
        """
        seconds = 0.0
        for each in self.collectives:
            if each.overlapped == overlapped:
                bandwidth = BOARDS[board].bandwidth(each.group)
                seconds += each.bytes_sent / bandwidth if bandwidth else math.inf
        return seconds

    def step_seconds(self, board: str) -> float:
        """Returns the seconds of a step on an accelerator of `BOARDS`."""
        compute = compute_seconds(self.program.config, self.program.backend.mesh.size, board)
        hidden = self.network_seconds(board, overlapped=True)
        return max(compute, hidden) + self.network_seconds(board)


def make_program(config: Config, devices: Sequence[jax.Device]) -> Program:
    """Returns the program of a config, from the size of its tokenizer alone."""
    config = config.with_vocabulary(tokens_by_name(config.data.tokenizer))
    return Program.from_config(config, devices)


def compile_plan(program: Program) -> Plan:
    """Compiles a program's train step, or raises OutOfMemory. Nothing runs."""
    state = program.state_shapes
    try:
        compiled = program.compile_train(state, program.batch_shapes)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        used = re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm", str(error))
        short = f"needs {used[1]}iB of {used[2]}iB" if used else str(error).strip().split("\n")[0]
        raise OutOfMemory(short) from None
    memory = state_bytes(program.backend, state)
    memory["activations"] = compiled.peak_bytes - sum(memory.values())
    text = compiled.text()
    return Plan(program, memory, text, collectives(text), compiled.compile_seconds)


def compute_seconds(config: Config, num_devices: int, board: str) -> float:
    """Returns the seconds that a step computes, recomputation included, at `ATTAINABLE`."""
    recomputed = 1 + RECOMPUTED.get(config.memory.remat, 0.0)
    flops = config.tokens_per_step * model_flops_per_token(config.gpt()) * recomputed / num_devices
    return flops / (ATTAINABLE * BOARDS[board].peak_flops(config.precision.compute))


def usable_memory(board: str) -> float:
    """Returns the bytes of an accelerator of `BOARDS` that JAX may take."""
    share = float(os.environ.get("XLA_CLIENT_MEM_FRACTION") or 0.75)  # of a GPU
    return (1.0 if board.startswith("TPU") else share) * 1e9 * BOARDS[board].memory
