"""The eight seams of the model, and the values that pass through them.

A seam is a hook: a point in the model at which an ingredient may change a value.
gpt2/model/gpt.py explains the dimension letters.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import flax.linen as nn
from flax import struct
from jax import Array

from gpt2.config import DEFAULTS, GPTConfig
from gpt2.ops.plain import AxisNames, ScoreTerm

Sublayer = Callable[[Array], Array]  # from [B, T, D] to [B, T, D]


class Context(struct.PyTreeNode):
    """The values that every module and every seam can read in addition to its own input.

    Attributes:
        tokens: `[B, T]` int32.
        positions: `[B or 1, T]` int32.
        segments: `[B, T]` int32, or None. A position attends only to positions of its own segment.
        has_target: `[B, T]` bool, the positions that have a target in the loss, or None for all.
        rotation: cosines and sines for `model.position=rope`, see `plain.rotation`, or None.
        last_token: `[B]` int32 in cached decoding, the token before the first input; else None.
        layer: the index of the layer, from 0; an int32 array if layers are scanned.
        branch: `attention` or `mlp`, in the seam `branch`.
        block_input: `[B, T, D]` in a block, the residual stream that entered the block.
        attention_input: `[B, T, D]` in attention, the input of attention.
        heads: the queries, keys and values of attention, in the seam `attention_output`.
        shared: arrays that the seam `layers` stores for all layers; the keys name ingredients.
        carried: arrays that are passed from layer to layer; the keys name ingredients. The seam
            `layers` stores the first arrays, and every layer may replace them with arrays of the
            same shapes and dtypes. All copies of the context in a block share the dictionaries
            `shared` and `carried`, so change the dictionaries in place.
        deterministic: False in training, where dropout and the capacity of experts apply.
    """

    tokens: Array
    positions: Array
    segments: Array | None = None
    has_target: Array | None = None
    rotation: tuple[Array, Array] | None = None
    last_token: Array | None = None
    layer: int | Array = 0
    branch: str = struct.field(pytree_node=False, default="")
    block_input: Array = None  # type: ignore[assignment]
    attention_input: Array = None  # type: ignore[assignment]
    heads: "Heads" = None  # type: ignore[assignment]
    shared: dict[str, Array] = struct.field(default_factory=dict)
    carried: dict[str, Array] = struct.field(default_factory=dict)
    deterministic: bool = struct.field(pytree_node=False, default=True)


class Branch(NamedTuple):
    """A residual branch. In GPT-2, the stream becomes `stream + dropout(sublayer(norm(read)))`."""

    read: Array  # [B, T, D]
    stream: Array  # [B, T, D]
    sublayer: Sublayer  # attention or MLP
    dropout: Sublayer


class Heads(NamedTuple):
    """Queries `[B, T, N, H]`, keys and values `[B, T, K, H]` of a layer."""

    q: Array
    k: Array
    v: Array


class Ingredient:
    """A part that GPT-2 does not have. An option of `model.` turns it on.

    Most methods are seams: hooks at which the model lets an ingredient change a value. A seam takes
    the module that calls it, the value, and the context, and returns the value, changed or not. The
    module has the attributes `config` and `ops`. If a seam needs parameters, it creates them in
    this module with `named_param`, or in submodules with a `name`. A seam may `report` scalars, and
    may store arrays in `context.shared` and `context.carried`.
    """

    option: ClassVar[str]

    def __init__(self, config: GPTConfig):
        self.config = config

    @classmethod
    def is_wanted(cls, config: GPTConfig) -> bool:
        """Return whether `config` turns the ingredient on, by a value other than the default."""
        return getattr(config, cls.option) != getattr(DEFAULTS.model, cls.option)

    @classmethod
    def acts_at(cls, seam: str) -> bool:
        """Return whether the ingredient overrides the method named `seam`, such as `logits`."""
        return getattr(cls, seam) is not getattr(Ingredient, seam)

    def embedded(self, gpt: nn.Module, x: Array, context: Context) -> Array:
        """Return the embedded tokens `x` `[B, T, D]`, changed or not. Positions are added later."""
        return x

    def layers(self, gpt: nn.Module, layers: Sublayer, context: Context) -> Sublayer:
        """Return `layers`, the function that applies all layers, or a function that wraps it."""
        return layers

    def block_input(self, block: nn.Module, x: Array, context: Context) -> Array:
        """Return the input `x` `[B, T, D]` of a block, which an ingredient may change."""
        return x

    def branch(self, block: nn.Module, branch: Branch, context: Context) -> Branch:
        """Return a residual branch, whose input, sublayer, stream or dropout may be changed."""
        return branch

    def heads(self, attention: nn.Module, heads: Heads, context: Context) -> Heads:
        """Return queries, keys and values, changed or not, after queries and keys are rotated."""
        return heads

    def score_terms(
        self, attention: nn.Module, terms: tuple[ScoreTerm, ...], context: Context
    ) -> tuple[ScoreTerm, ...]:
        """Return `terms`, to which an ingredient may append a `plain.ScoreTerm`.

        A `ScoreTerm` is a function that changes attention's scores. Unless `has_kernel` returns
        True, the reference implementation then computes attention.
        """
        return terms

    def has_kernel(self) -> bool:
        """Return whether attention's kernels can compute the terms that `score_terms` appends."""
        return False

    def attention_output(
        self, attention: nn.Module, y: Array, context: Context
    ) -> Array:
        """Return the heads' outputs `y` `[B, T, N, H]`, changed or not, before the projection."""
        return y

    def logits(self, seam: nn.Module, logits: Array, context: Context) -> Array:
        """Return the float32 logits `[B, T, V]`, changed or not.

        `context.tokens` and `context.has_target` have the same positions as the logits. If an
        ingredient changes the logits, training computes all positions together, not in chunks.
        """
        return logits

    def active_fraction(self, axes: AxisNames) -> float:
        """Return the fraction of a parameter that the computation of one token uses.

        The model's FLOPs are counted with this fraction. `axes` are the names of the parameter's
        axes.
        """
        return 1.0
