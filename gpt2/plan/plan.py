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

from gpt2.config import Config, GPTConfig
from gpt2.config.run import tokens_by_name
from gpt2.model.flops import model_flops_per_token
from gpt2.parallel import state_bytes
from gpt2.plan.collectives import Collective, collectives
from gpt2.telemetry.chips import BOARDS
from gpt2.training.program import Program
from gpt2.utils.remat import CORE_ATTENTION, KEPT

# The share of peak that a good GPT-2 run reaches: 41 % on an H100 (llm.c, modded-nanogpt).
ATTAINABLE = 0.4


class OutOfMemory(Exception):
    """The compiler's word that a step does not fit a device."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one training step takes."""

    program: Program
    memory: dict[
        str, int
    ]  # bytes per device; activations stand for all else that it holds
    text: str  # of the compiled step, as HLO
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
        compute = compute_seconds(
            self.program.config, self.program.backend.mesh.size, board
        )
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
        largest = program.at(program.config.shapes.largest)
        compiled = largest.compile_train(
            state, program.batch_shapes
        ).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        used = re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm", str(error))
        short = (
            f"needs {used[1]}iB of {used[2]}iB"
            if used
            else str(error).strip().split("\n")[0]
        )
        raise OutOfMemory(short) from None
    memory = state_bytes(program.backend, state)
    memory["activations"] = compiled.peak_bytes - sum(memory.values())
    text = compiled.text()
    return Plan(program, memory, text, collectives(text), compiled.compile_seconds)


def compute_seconds(config: Config, num_devices: int, board: str) -> float:
    """Returns the seconds that a step computes, recomputation included, at `ATTAINABLE`."""
    cfg = config.gpt()
    per_token = model_flops_per_token(
        cfg, config.shapes.largest
    ) + recomputed_flops_per_token(cfg)
    flops = config.tokens_per_step * per_token / num_devices
    return flops / (ATTAINABLE * BOARDS[board].peak_flops(config.precision.compute))


def recomputed_flops_per_token(cfg: GPTConfig) -> float:
    """Returns the FLOPs of the products that `memory.remat` computes twice for one token."""
    if cfg.remat == "none":
        return 0.0
    width = cfg.embed_dim
    heads = cfg.num_heads * cfg.head_size
    reads_sum = cfg.norm_position != "pre"  # a norm reads what a branch adds
    seen = [window or cfg.context_length for window in cfg.windows]
    flops = {
        "attn/c_attn": 2 * width * (heads + 2 * cfg.kv_heads * cfg.head_size),
        "attn/c_gate": 2 * width * cfg.num_heads * cfg.attention_gate,
        "attn/c_proj": 2 * width * heads if reads_sum or not cfg.parallel_block else 0,
        "mlp/c_fc": 2 * width * cfg.hidden_dim * (2 if cfg.is_gated else 1),
        "mlp/c_proj": 2 * width * cfg.hidden_dim if reads_sum else 0,
        CORE_ATTENTION: 4 * heads * sum(seen) / cfg.num_layers,
    }
    again = (n for name, n in flops.items() if name not in KEPT[cfg.remat])
    return cfg.num_layers * float(sum(again))


def usable_memory(board: str) -> float:
    """Returns the bytes of an accelerator of `BOARDS` that JAX may take."""
    share = float(os.environ.get("XLA_CLIENT_MEM_FRACTION") or 0.75)  # of a GPU
    return (1.0 if board.startswith("TPU") else share) * 1e9 * BOARDS[board].memory
