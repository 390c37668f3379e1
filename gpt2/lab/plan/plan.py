"""The memory, collectives and time of a training step, from its compiled program. Nothing runs.

The step is compiled from shapes alone: for this machine's devices, for simulated CPU devices, or
for GPUs or TPUs that this machine does not have. Simulated devices hold the same state and
gradients as GPUs and TPUs, but different temporary arrays.
"""

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax

from gpt2.config import Config
from gpt2.data.tokenizer import tokens_by_name
from gpt2.errors import UserError
from gpt2.lab.plan.collectives import Collective, collectives
from gpt2.model.flops import model_flops_per_token
from gpt2.parallel import Backend
from gpt2.parallel.state_sharding import with_shardings
from gpt2.telemetry.chips import BOARDS
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.utils.trees import Tree

# The fraction of the peak FLOP/s that a good GPT-2 run reaches. On an H100, it is 41 % (llm.c,
# modded-nanogpt).
ATTAINABLE = 0.4
# The fraction of the layers' FLOPs that `memory.remat` computes again. `full` computes the forward
# pass again, except for the MLP's second product. `attention` computes the MLP's first product
# again, and `mlp` computes attention again. The fractions are for GPT-2 with 12 layers and a
# context of 1,024 tokens. For other shapes they differ by a few hundredths.
_COMPUTED_AGAIN = {"full": 0.24, "attention": 0.09, "mlp": 0.15}


class DoesNotFit(UserError):
    """The error for a step that needs more memory than its devices have."""


class Plan(NamedTuple):
    """The compiled program, memory and collectives of one training step."""

    program: Program
    # Bytes per device. `activations, other` is the step's peak memory without the other entries,
    # and contains, for example, gathered parameters.
    memory: dict[str, int]
    text: str  # the compiled step as HLO
    collectives: list[Collective]

    @property
    def bytes_needed(self) -> int:
        """The total memory of the step, in bytes per device."""
        return sum(self.memory.values())

    @property
    def bytes_saved(self) -> int:
        """Approximate size of a checkpoint in bytes."""
        leaves = jax.tree.leaves(self.program.state_shapes)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def fits(self, board: str) -> bool:
        """Return whether the step fits into the memory of `board` that JAX may allocate.

        `board` is the name of an accelerator, a key of `BOARDS`.
        """
        usable = 1e9 * BOARDS[board].memory
        if not board.startswith("TPU"):
            usable *= float(os.environ.get("XLA_CLIENT_MEM_FRACTION") or 0.75)
        return self.bytes_needed <= usable

    def network_seconds(self, board: str) -> float:
        """Return the seconds that the collectives of a step take on `board`, a key of `BOARDS`.

        The result is infinite if the speed of a link between two devices is unknown.
        """
        seconds = 0.0
        for each in self.collectives:
            bandwidth = BOARDS[board].bandwidth(each.group)
            if bandwidth is None:
                return math.inf
            seconds += each.bytes_sent / bandwidth
        return seconds

    def step_seconds(self, board: str) -> float:
        """Return the seconds of a step on `board`, a key of `BOARDS`.

        Collectives are assumed not to overlap with computation.
        """
        num_devices = self.program.backend.mesh.size
        compute = compute_seconds(self.program.config, num_devices, board)
        return compute + self.network_seconds(board)


def make_program(config: Config, devices: Sequence[jax.Device]) -> Program:
    """Return the training program of a config on `devices`.

    The tokenizer is not loaded, because only its size is needed.
    """
    config = config.with_vocabulary(tokens_by_name(config.data.tokenizer))
    return Program.from_config(config, devices)


def compile_plan(program: Program) -> Plan:
    """Compile the train step of `program`, without running it, and return its plan.

    If schedules change the batch size, the context length or the attention window, the step is
    compiled for the combination with the most tokens. Raise DoesNotFit if the compiler reports that
    memory is insufficient.
    """
    state = program.state_shapes
    largest = program.at(program.config.shapes.largest)
    try:
        # tokamax compiles for the default device, which would be this machine's CPU.
        with jax.default_device(program.backend.mesh.devices.flat[0]):
            compiled = largest.compile_train(state, program.batch_shapes)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise DoesNotFit(
            f"The step does not fit: {reason}",
            "Add --search to look for a layout that fits",
            exit_code=1,
        ) from error
    memory = state_bytes(program.backend, state)
    memory["activations, other"] = compiled.peak_bytes - sum(memory.values())
    text = compiled.text()
    return Plan(program, memory, text, collectives(text))


def bytes_per_device(tree: Tree) -> int:
    """Return the bytes per device of a tree of arrays, or of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def state_bytes(backend: Backend, state: TrainState) -> dict[str, int]:
    """Return the bytes per device of parameters, optimizer state and summed gradients.

    The keys are `parameters`, `optimizer` and `gradients`. `backend` determines how gradients are
    divided between devices.
    """
    gradients = with_shardings(state.params, backend.gradient_shardings(state.params))
    parts = {
        "parameters": state.params,
        "optimizer": state.opt_state,
        "gradients": gradients,
    }
    return {name: bytes_per_device(tree) for name, tree in parts.items()}


def compute_seconds(config: Config, num_devices: int, board: str) -> float:
    """Return the seconds that each of `num_devices` devices computes in a step.

    A device is assumed to reach the fraction `ATTAINABLE` of its peak FLOP/s. `board` is a key of
    `BOARDS`. The time includes what `memory.remat` computes again.
    """
    cfg = config.gpt()
    per_token = model_flops_per_token(cfg, config.shapes.largest)
    in_layers = per_token - 6 * cfg.vocab_size * cfg.embed_dim
    per_token += in_layers * _COMPUTED_AGAIN.get(cfg.remat, 0.0)
    flops = config.tokens_per_step * per_token / num_devices
    return flops / (ATTAINABLE * BOARDS[board].peak_flops(config.precision.compute))
