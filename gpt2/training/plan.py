"""Planning a run without running it: `python train.py --plan [--plan_devices=N]`.

The train step is compiled for N simulated CPU devices from shapes alone. Memory and collectives are
read from the compiled program, so they are those of a run in the same layout. The compiler of a GPU
or a TPU needs other work space, but the same state and gradients.
"""

import dataclasses

import jax
import numpy as np

from gpt2.config import Config
from gpt2.data.tokenizer_names import tokens_by_name
from gpt2.model import num_params
from gpt2.parallel import rules
from gpt2.parallel.collectives import Collective, collectives
from gpt2.parallel.inspect import bytes_per_device, describe_spread
from gpt2.telemetry.chips import BOARDS, Board, find_chip
from gpt2.telemetry.progress import print_summary
from gpt2.telemetry.throughput import model_flops_per_token
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.utils.text import format_bytes, format_count

# The share of peak that a good GPT-2 run reaches: 41 % on an H100 (llm.c, modded-nanogpt).
ATTAINABLE = 0.4


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
    """

    config: Config
    num_devices: int
    state: TrainState
    memory: dict[str, int]
    text: str

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

    def network_seconds(self, name: str) -> float | None:
        """Returns the seconds that a step's collectives take, one after another."""
        return _seconds_sending(collectives(self.text), BOARDS[name])


def make_plan(config: Config, devices: list[jax.Device] | None = None) -> Plan:
    """Compiles the train step for `devices` (all, if not given) without running anything.

    Raises:
        UserError: the layout cannot work, or the size of the vocabulary is not known or too small.
    """
    devices = jax.devices() if devices is None else devices
    config = config.with_vocabulary(tokens_by_name(config.data.tokenizer))
    program = Program.from_config(config, devices)
    state, mesh = program.state_shapes, program.backend.mesh
    shape = (config.data.batch_size, config.model.context_length)
    names = ("tokens", "targets") + ("segments",) * config.data.document_mask
    batch = program.backend.put_batch({name: np.zeros(shape, np.int32) for name in names})
    compiled = program.compile_train(state, batch)
    memory = {
        "parameters": bytes_per_device(state.params),
        "optimizer": bytes_per_device(state.opt_state),
        "gradients": _gradient_bytes(state.params, program.model.logical_axes(), mesh.shape),
    }
    memory["activations"] = compiled.memory.peak - sum(memory.values())
    return Plan(config, len(devices), state, memory, compiled.text())


def print_plan(config: Config, num_devices: int = 0) -> None:
    """Plans a run and prints what it takes: all that `train.py --plan` does.

    Args:
        config: the options.
        num_devices: CPU devices to simulate; 0: plan for the devices that JAX finds.

    Raises:
        UserError: as for `make_plan`.
    """
    if num_devices:
        # Before anything asks JAX for a device.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_devices)
    plan = make_plan(config)
    memory = plan.memory | {"in all": sum(plan.memory.values())}
    kind = "simulated" if num_devices else jax.devices()[0].device_kind
    print_summary(
        {
            "plan": {
                "devices": f"{plan.num_devices} ({kind})",
                "parameters": f"{num_params(plan.state.params):,}",
                "tokens per step": f"{plan.tokens:,}",
                "FLOPs per step": format_count(plan.flops),
            },
            "memory of a device": {
                name: f"{format_bytes(size)} ({size:,} bytes)" for name, size in memory.items()
            },
        }
        | describe_spread(plan.state.params, plan.text)
        | {f"at {ATTAINABLE:.0%} of peak": {name: _describe_time(plan, name) for name in BOARDS}}
    )


def _describe_time(plan: Plan, name: str) -> str:
    share = sum(plan.memory.values()) / (1e9 * BOARDS[name].memory)
    compute, network = plan.compute_seconds(name), plan.network_seconds(name)
    fits = f"memory {share:.0%}" if share <= 1 else f"does not fit (memory {share:.0%})"
    if network is None:
        return f"computes {_milliseconds(compute)}, network unknown beyond one pod, {fits}"
    seconds = compute + network  # nothing overlaps: gradients are sent after the last micro-batch
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


def _gradient_bytes(params, logical_axes, mesh_shape) -> int:
    """Returns the bytes of a device's sum of gradients: all of them, split by `tensor` only."""

    def local(leaf, spec):
        split = "tensor" in jax.tree.leaves(tuple(spec))
        return leaf.size * leaf.dtype.itemsize // (mesh_shape.get("tensor", 1) if split else 1)

    sizes = jax.tree.map(local, params, rules.specs(logical_axes, rules.COMPUTE))
    return sum(jax.tree.leaves(sizes))
