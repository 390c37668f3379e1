"""The eight seams of the model, at which an ingredient acts, and what passes through them.

gpt2/model/gpt.py explains the letters of dimensions.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import flax.linen as nn
from flax import struct
from jax import Array

from gpt2.config import DEFAULTS, GPTConfig
from gpt2.ops.plain import Names, ScoreTerm

Layer = Callable[[Array], Array]  # from [B, T, D] to [B, T, D]


class Context(struct.PyTreeNode):
    """What every module and every seam can read in addition to its own input.

    Attributes:
        tokens: `[B, T]` int32.
        positions: `[B or 1, T]` int32.
        segments: `[B, T]` int32, or None. A position sees only its own segment.
        has_target: `[B, T]` bool, the positions that a loss counts, or None for all.
        rotation: cosines and sines for `model.position=rope`, see `plain.rotation`, or None.
        last_token: `[B]` int32, the token before the first one in cached decoding, or None.
        layer: the number of the layer, from 0 on; an int32 scalar if layers are scanned.
        branch: `attention` or `mlp`, in seam `branch`.
        block_input: the residual stream `[B, T, D]` that entered the block, in a block.
        attention_input: `[B, T, D]`, what attention was applied to, in attention.
        heads: the queries, keys and values of attention, in seam `attention_output`.
        shared: arrays that seam `layers` stores for all layers, by ingredient.
        carried: arrays that go from layer to layer, by ingredient. Seam `layers` stores the first
            ones, and every layer may replace them by arrays of the same shapes and dtypes.
        deterministic: whether dropout is off.
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
    """A residual branch: the stream becomes `stream + dropout(layer(norm(read)))`."""

    read: Array  # [B, T, D]
    stream: Array  # [B, T, D]
    layer: Layer  # attention or MLP
    dropout: Layer


class Heads(NamedTuple):
    """Queries `[B, T, N, H]`, keys and values `[B, T, K, H]` of a layer."""

    q: Array
    k: Array
    v: Array


class Ingredient:
    """Something that GPT-2 does not have, switched on by an option of `model.`.

    Each method below is a seam. It takes the module that calls it, a value, and the context, and
    returns the value, changed or not. The module has `config` and `ops`. A seam reads parameters of
    its own from it by `named_param`, or creates modules with a `name`, and may `report` scalars. It
    stores arrays in the dictionaries `context.shared` and `context.carried` in place.
    """

    option: ClassVar[str]

    def __init__(self, config: GPTConfig):
        self.config = config

    @classmethod
    def is_wanted(cls, config: GPTConfig) -> bool:
        """Return whether a model has it, which is if its option differs from the default."""
        return getattr(config, cls.option) != getattr(DEFAULTS.model, cls.option)

    @classmethod
    def acts_at(cls, seam: str) -> bool:
        """Return whether the class overrides a seam."""
        return getattr(cls, seam) is not getattr(Ingredient, seam)

    def embedded(self, gpt: nn.Module, x: Array, context: Context) -> Array:
        """Change the embedded tokens `[B, T, D]`, to which positions are added next."""
        return x

    def layers(self, gpt: nn.Module, layers: Layer, context: Context) -> Layer:
        """Change the function that applies all layers, by wrapping it."""
        return layers

    def block_input(self, block: nn.Module, x: Array, context: Context) -> Array:
        """Change the residual stream `[B, T, D]` that enters a block."""
        return x

    def branch(self, block: nn.Module, branch: Branch, context: Context) -> Branch:
        """Change what a residual branch reads and computes, or what it is added to."""
        return branch

    def heads(self, attention: nn.Module, heads: Heads, context: Context) -> Heads:
        """Change queries, keys and values, which are normalized and rotated already."""
        return heads

    def score_terms(
        self, attention: nn.Module, terms: tuple[ScoreTerm, ...], context: Context
    ) -> tuple[ScoreTerm, ...]:
        """Append to the functions that change attention's scores, see `plain.ScoreTerm`.

        No kernel knows these functions: attention is computed by its reference implementation.
        """
        return terms

    def attention_output(
        self, attention: nn.Module, y: Array, context: Context
    ) -> Array:
        """Change the output `[B, T, N, H]` of attention, before its projection."""
        return y

    def logits(self, seam: nn.Module, logits: Array, context: Context) -> Array:
        """Change the float32 logits `[B, T, V or more]`, whose last columns may be padding.

        In `context`, `tokens` and `has_target` belong to the same rows. Training computes the
        logits of all positions at once if an ingredient changes them, not a chunk at a time.
        """
        return logits

    def active_fraction(self, axes: Names) -> float:
        """Return the fraction of a parameter with these axes that computes a token, for FLOPs."""
        return 1.0
