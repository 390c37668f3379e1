"""What a search tries: options that change a step's memory and time, and not what it learns.

Arithmetic comes before any compiler. It gives the bytes that a step holds at least, the bytes that
it may be expected to hold, and the time of a step that hides nothing of what it sends. The first
rules candidates out, the others say which to compile first.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpt2.config import CHOICES, Config, GPTConfig, ParallelConfig, option, with_options
from gpt2.errors import UserError
from gpt2.model import num_params
from gpt2.parallel.mesh import all_sizes
from gpt2.parallel.rules import MESH_AXES
from gpt2.planning.plan import compute_seconds, make_program, state_bytes
from gpt2.telemetry.chips import BOARDS
from gpt2.training.program import Program, choose_gather

# What a compiler was seen to hold of activations beside that, for GPT-2 124M: 1.5 to 1.9 times as
# much (v5e, H100).
_EXPECTED = 1.7


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Options to try.

    Attributes:
        options: by dotted name; all candidates of a search have the same names.
        config: with these options.
        layout: the options that say how devices share the work.
        least_bytes: per device, that a step holds at least.
        expected_bytes: per device, by a rough count of activations.
        seconds: of a step that hides nothing of what it sends; infinite where a link's speed is not
            known.
        activation_bytes: those that the backward pass keeps.
        compute_seconds: the part of `seconds` that is not sending.
    """

    options: Mapping[str, Any]
    config: Config
    layout: Mapping[str, Any]
    least_bytes: float
    expected_bytes: float
    seconds: float
    activation_bytes: float
    compute_seconds: float

    def holds_no_less_than(self, other: "Candidate") -> bool:
        """Whether a device holds at least what it holds for `other`, on the same mesh.

        By each of the counts, since a compiler's lies somewhere between them.
        """
        spread = ["parallel.strategy", *(f"parallel.{axis}" for axis in MESH_AXES)]
        same = all(self.options[name] == other.options[name] for name in spread)
        step, layer = (c.options["parallel.fsdp_gather"] for c in (self, other))
        gathers = step == layer or (step, layer) == ("step", "layer")
        counts = ("least_bytes", "expected_bytes", "activation_bytes")
        no_less = all(getattr(self, name) >= getattr(other, name) for name in counts)
        return same and gathers and no_less

    def is_no_faster_than(self, other: "Candidate") -> bool:
        """Whether a step computes and sends at least what it does for `other`, in its layout."""
        micro_batches = "train.accumulate_steps"
        return (
            self.layout == other.layout
            and self.compute_seconds >= other.compute_seconds
            and self.options[micro_batches] >= other.options[micro_batches]
        )


def find_candidates(
    config: Config, devices: Sequence[jax.Device], board: str, fixed: Sequence[str]
) -> tuple[list[Candidate], list[str]]:
    """Returns all candidates that divide, and a line for each layout that cannot work.

    A new option that changes memory or time belongs into `_layouts`, or beside `memory.remat` here.

    Args:
        config: whose other options stay, the batch among them.
        devices: to share the work.
        board: their name in `BOARDS`.
        fixed: options by dotted name that stay as `config` has them.
    """
    candidates, refused = [], []
    micro_batches = "train.accumulate_steps"
    # Allowed on any device, whatever the config has; candidates replace them.
    usual: dict[str, Any] = {micro_batches: 1, "memory.remat": "none"}
    usual = {name: value for name, value in usual.items() if name not in fixed}
    # A forecast does not count the copies of `offload`, which would always seem best.
    policies = [policy for policy in CHOICES["memory.remat"] if policy != "offload"]
    remats = _choices("memory.remat", policies, config, fixed)
    for layout in _layouts(config, len(devices), fixed):
        try:
            program = make_program(with_options(config, layout | usual), devices)
        except UserError as error:
            refused.append(str(error))
            continue
        rows = config.data.batch_size // program.backend.num_shards
        state = state_bytes(program)
        counts = [count for count in range(1, rows + 1) if rows % count == 0]
        for count in _choices(micro_batches, counts, config, fixed):
            for remat in remats:
                options = {"memory.remat": remat, micro_batches: count}
                candidates.append(_estimate(program, state, layout, options, board))
    return candidates, refused


def options_of(
    config: Config, devices: Sequence[jax.Device], fixed: Sequence[str]
) -> dict[str, Any]:
    """Returns what `config` itself chooses, by the names of a candidate's options.

    Arguments are as for `find_candidates`. What no candidate has is left out: `offload`, and all
    options if the config's own layout cannot work.
    """
    try:
        # A CPU refuses `offload`, and simulated devices are CPUs.
        program = make_program(with_options(config, {"memory.remat": "none"}), devices)
    except UserError:
        return {}
    sizes = dict.fromkeys(MESH_AXES, 1) | dict(program.backend.mesh.shape)
    strategy, gather = config.parallel.strategy, "auto"
    if strategy not in ("zero1", "megatron") and "parallel.strategy" not in fixed:
        strategy = "auto"  # which means the same on this mesh
    if sizes["fsdp"] > 1 and strategy != "zero1":
        gather = choose_gather(program.config, devices)
    options = {
        **{f"parallel.{axis}": size for axis, size in sizes.items()},
        **{"parallel.strategy": strategy, "parallel.fsdp_gather": gather},
        "train.accumulate_steps": config.train.accumulate_steps,
    }
    remat = config.memory.remat
    return options if remat == "offload" else options | {"memory.remat": remat}


def _kept(policy: str, model: GPTConfig) -> tuple[int, int]:
    """Returns the numbers per token that a policy of `memory.remat` keeps of a block.

    First those of every device, then those that `tensor` splits. `none` keeps the inputs of norms
    and of linear maps, queries, keys, values, attention's result, and both sides of the activation
    (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1, without dropout and without attention's
    scores). The others keep the block's input and what docs/parallelism.md says.
    """
    width = model.embed_dim
    attention = 2 * width + 2 * model.kv_heads * model.head_size
    mlp = model.hidden_dim * (2 if model.is_gated else 1)
    return {
        "none": (4 * width, attention + mlp + model.hidden_dim),
        "dots": (2 * width, attention + mlp),
        "attention": (2 * width, attention),
        "mlp": (width, mlp),
        "full": (width, 0),
        "offload": (width, 0),
    }[policy]


def _choices(name: str, choices: Sequence[Any], config: Config, fixed: Sequence[str]) -> list[Any]:
    return [option(config, name)] if name in fixed else list(choices)


def _layouts(config: Config, num_devices: int, fixed: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the options of every way to share the work among so many devices."""
    chosen = config.parallel.strategy if "parallel.strategy" in fixed else "auto"
    asked = ParallelConfig(backend=config.parallel.backend, strategy=chosen)
    for sizes in all_sizes(asked, num_devices):
        mesh = {f"parallel.{axis}": size for axis, size in sizes.items()}
        # -1 takes the rest, whatever that is.
        if any(n in fixed and option(config, n) not in (-1, size) for n, size in mesh.items()):
            continue
        strategies = ["auto"]
        strategies += ["zero1"] * (sizes["fsdp"] > 1) + ["megatron"] * (sizes["tensor"] > 1)
        for strategy in _choices("parallel.strategy", strategies, config, fixed):
            gathers = ["layer", "step"] if sizes["fsdp"] > 1 and strategy != "zero1" else ["auto"]
            wanted = config.parallel.fsdp_gather
            for gather in gathers:
                if "parallel.fsdp_gather" not in fixed or wanted in ("auto", gather):
                    how = {"parallel.strategy": strategy, "parallel.fsdp_gather": gather}
                    yield mesh | how


def _estimate(
    program: Program,
    state: dict[str, int],
    layout: dict[str, Any],
    options: dict[str, Any],
    board: str,
) -> Candidate:
    """Returns a candidate of a layout, with what arithmetic says of it.

    Args:
        program: in the layout.
        state: bytes per device by kind, gradients included.
        layout: its options.
        options: the others.
        board: in `BOARDS`.
    """
    config = with_options(program.config, options)
    mesh = dict.fromkeys(MESH_AXES, 1) | dict(program.backend.mesh.shape)
    model, itemsize = config.gpt(), jnp.dtype(config.precision.compute).itemsize
    tokens = config.tokens_per_step / program.backend.num_shards  # of a device
    micro_tokens = tokens / config.train.accumulate_steps

    def kept(policy: str) -> float:
        whole, split = _kept(policy, model)
        if layout["parallel.strategy"] == "megatron":
            whole, split = 0, whole + split
        return (whole + split / mesh["tensor"]) * itemsize * micro_tokens

    remat = config.memory.remat
    activations = model.num_layers * kept(remat)
    # TPUs compute norms and activations again within products that read them.
    at_least = model.num_layers * kept("dots" if remat == "none" else remat)
    if config.train.accumulate_steps == 1:  # gradients come as activations go
        at_least = max(0.0, at_least - state["gradients"])
    held = float(sum(state.values()))
    if mesh["fsdp"] > 1 and layout["parallel.fsdp_gather"] == "step":
        held += 4.0 * num_params(program.state_shapes.params) / mesh["tensor"]
    compute = compute_seconds(config, math.prod(mesh.values()), board)
    return Candidate(
        options=layout | options,
        config=config,
        layout=layout,
        least_bytes=held + at_least,
        expected_bytes=held + _EXPECTED * (activations + kept("none")),
        seconds=compute + _seconds_sending(program, config, mesh, tokens, board),
        activation_bytes=activations,
        compute_seconds=compute,
    )


def _seconds_sending(
    program: Program, config: Config, mesh: dict[str, int], tokens: float, board: str
) -> float:
    """Returns the seconds of a step's collectives, one after another, by the ring algorithms.

    docs/parallelism.md says what crosses the network along each axis of the mesh.
    """
    model, itemsize = config.gpt(), jnp.dtype(config.precision.compute).itemsize
    bytes_whole = 4.0 * num_params(program.state_shapes.params) / mesh["tensor"]
    gathered_and_scattered = 2 * bytes_whole
    if config.parallel.fsdp_gather == "layer":
        gathered_and_scattered *= config.train.accumulate_steps * (2 * itemsize + 4) / 8
    activations = tokens * model.embed_dim * itemsize
    sent = {
        "data": 2 * bytes_whole / mesh["fsdp"],
        "fsdp": gathered_and_scattered,
        "tensor": 4 * model.num_layers * 2 * activations,
    }
    numbers = np.arange(math.prod(mesh.values())).reshape(*mesh.values())
    seconds = 0.0
    for i, (axis, size) in enumerate(mesh.items()):
        if size > 1:
            group = tuple(np.moveaxis(numbers, i, 0).reshape(size, -1)[:, 0].tolist())
            bandwidth = BOARDS[board].bandwidth(group)
            if bandwidth is None:
                return math.inf
            seconds += sent[axis] * (size - 1) / size / bandwidth
    return seconds
