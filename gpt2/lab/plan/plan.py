"""What a training step takes, read from the compiled step. Nothing runs.

The step is compiled from shapes alone, for simulated CPU devices or by the compiler of a GPU or a
TPU that is not here. Simulated devices hold the same state and gradients, but other temporaries.
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

# The fraction of the peak that a good GPT-2 run reaches: 41 % on an H100 (llm.c, modded-nanogpt).
ATTAINABLE = 0.4
# What `memory.remat` computes again, as a fraction of the layers' FLOPs: all of the forward pass
# but the MLP's second product, the MLP's first, or attention. Computed for GPT-2 with 12 layers
# and 1,024 tokens; other shapes differ by a few hundredths.
_COMPUTED_AGAIN = {"full": 0.24, "attention": 0.09, "mlp": 0.15}


class DoesNotFit(UserError):
    """A step needs more memory than its devices have."""


class Plan(NamedTuple):
    """What one training step takes."""

    program: Program
    memory: dict[str, int]  # bytes per device; activations are all that is nothing else
    text: str  # of the compiled step, as HLO
    collectives: list[Collective]

    @property
    def bytes_needed(self) -> int:
        """Bytes per device, all kinds together."""
        return sum(self.memory.values())

    @property
    def bytes_saved(self) -> int:
        """Approximate bytes of a checkpoint."""
        leaves = jax.tree.leaves(self.program.state_shapes)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def fits(self, board: str) -> bool:
        """Return whether an accelerator of `BOARDS` has the memory, as much as JAX may allocate."""
        usable = 1e9 * BOARDS[board].memory
        if not board.startswith("TPU"):
            usable *= float(os.environ.get("XLA_CLIENT_MEM_FRACTION") or 0.75)
        return self.bytes_needed <= usable

    def network_seconds(self, board: str) -> float:
        """Return the seconds that collectives take on an accelerator of `BOARDS`.

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
        """Return the seconds of a step on an accelerator of `BOARDS`, if no collective overlaps."""
        num_devices = self.program.backend.mesh.size
        compute = compute_seconds(self.program.config, num_devices, board)
        return compute + self.network_seconds(board)


def make_program(config: Config, devices: Sequence[jax.Device]) -> Program:
    """Return the program of a config, for which the size of its tokenizer is enough."""
    config = config.with_vocabulary(tokens_by_name(config.data.tokenizer))
    return Program.from_config(config, devices)


def compile_plan(program: Program) -> Plan:
    """Compile a program's train step. Nothing runs."""
    state = program.state_shapes
    largest = program.at(program.config.shapes.largest)
    try:
        compiled = largest.compile_train(state, program.batch_shapes)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise DoesNotFit(f"The step does not fit: {reason}", exit_code=1) from error
    memory = state_bytes(program.backend, state)
    memory["activations"] = compiled.peak_bytes - sum(memory.values())
    text = compiled.text()
    return Plan(program, memory, text, collectives(text))


def bytes_per_device(tree: Tree) -> int:
    """Return the bytes that one device holds of arrays, or of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def state_bytes(backend: Backend, state: TrainState) -> dict[str, int]:
    """Return bytes per device of parameters, optimizer state and summed gradients."""
    gradients = with_shardings(state.params, backend.gradient_shardings(state.params))
    parts = {
        "parameters": state.params,
        "optimizer": state.opt_state,
        "gradients": gradients,
    }
    return {name: bytes_per_device(tree) for name, tree in parts.items()}


def compute_seconds(config: Config, num_devices: int, board: str) -> float:
    """Return the seconds that a step computes, recomputation included, at `ATTAINABLE`."""
    cfg = config.gpt()
    per_token = model_flops_per_token(cfg, config.shapes.largest)
    in_layers = per_token - 6 * cfg.vocab_size * cfg.embed_dim
    per_token += in_layers * _COMPUTED_AGAIN.get(cfg.remat, 0.0)
    flops = config.tokens_per_step * per_token / num_devices
    return flops / (ATTAINABLE * BOARDS[board].peak_flops(config.precision.compute))
