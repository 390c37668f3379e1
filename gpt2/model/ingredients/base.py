"""The seams at which an ingredient acts, and what they see."""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import flax.linen as nn
from flax import struct
from jax import Array

from gpt2.config import DEFAULTS, GPTConfig
from gpt2.ops.plain import Names, ScoreTerm

if TYPE_CHECKING:
    from gpt2.model.layers import Linear

MakeModule = Callable[..., nn.Module]


class Flow(struct.PyTreeNode):
    """What every layer and every seam sees beside its own input.

    Attributes:
        tokens: `[B, T]` int32.
        positions: `[B or 1, T]` int32.
        segments: `[B, T]` int32 or None; positions see only those of their own segment.
        has_target: `[B, T]` bool, the positions that losses count; None: all.
        rotation: cosines and sines for `model.position=rope`, see `plain.rotation`; else None.
        last_token: `[B]` int32, the token before the first in a cache; None without a cache.
        layer: the number of the layer, from 0 on; in a scan an int32 scalar.
        entered: the stream that entered the layer, within one.
        shared: by ingredient, what its `enter` hands to all layers.
        carried: by ingredient, what goes from layer to layer. `enter` puts it there, and every
            layer may put another in its place.
        deterministic: whether there is no dropout.
    """

    tokens: Array
    positions: Array
    segments: Array | None = None
    has_target: Array | None = None
    rotation: tuple[Array, Array] | None = None
    last_token: Array | None = None
    layer: int | Array = 0
    entered: Array = None  # type: ignore[assignment]
    shared: dict[str, Array] = struct.field(default_factory=dict)
    carried: dict[str, Array] = struct.field(default_factory=dict)
    deterministic: bool = struct.field(pytree_node=False, default=True)


class Branch(NamedTuple):
    """A residual branch f of a block: the stream after it is `add(drop(f(norm(read))))`."""

    read: Array  # [B, T, D]
    norm: Callable[[Array], Array]  # of what is read
    drop: Callable[[Array], Array]  # dropout of the output [B, T, D]
    add: Callable[[Array], Array]  # to the stream


class Heads(NamedTuple):
    """Queries `[B, T, N, H]`, keys and values `[B, T, K, H]` of a layer."""

    q: Array
    k: Array
    v: Array


class Ingredient:
    """One thing that GPT-2 does not have, asked for by an option of `model.`.

    Each seam gives back what it was given, unless a file overrides it. Seams are called within the
    module that they are given first, which has `config` and `ops`. There they may read parameters
    of their own, by `named_param` or by modules with a `name`. They write to the dictionaries
    `flow.shared` and `flow.carried` in place.
    """

    option: ClassVar[str]
    # Of `score_terms`, if kernels know its kind
    score_term: ClassVar[type | None] = None
    keeps_final_norm: bool = True

    @property
    def width_ratio(self) -> float:
        """The model's width over that for which its rates were tuned."""
        return 1.0

    def __init__(self, config: GPTConfig):
        self.config = config

    @classmethod
    def is_wanted(cls, config: GPTConfig) -> bool:
        """Returns whether a model has it: whether its option differs from GPT-2's."""
        return getattr(config, cls.option) != getattr(DEFAULTS.model, cls.option)

    def stddev(self, stddev: float, linear: "Linear") -> float:
        """Returns the standard deviation with which a kernel is drawn."""
        return stddev

    def embedded(self, gpt: nn.Module, x: Array, flow: Flow) -> Array:
        """Changes the embedded tokens `[B, T, D]`, before positions are added."""
        return x

    def frequencies(self, frequencies: Array) -> tuple[Array, float]:
        """Changes rope's frequencies, `[R / 2]`; also returns the factor of vectors' lengths."""
        return frequencies, 1.0

    def enter(self, gpt: nn.Module, x: Array, flow: Flow) -> Array:
        """Changes what enters the first layer, `[B, T, D]`."""
        return x

    def before_layer(self, block: nn.Module, x: Array, flow: Flow) -> Array:
        """Changes what enters a layer."""
        return x

    def branch(
        self, block: nn.Module, number: int, branch: Branch, flow: Flow
    ) -> Branch:
        """Changes branch 1 (attention) or 2 (MLP) of a layer."""
        return branch

    def heads(self, attention: nn.Module, heads: Heads, flow: Flow) -> Heads:
        """Changes queries, keys and values, before rope."""
        return heads

    def scale(self, scale: float) -> float:
        """Changes the factor of scores."""
        return scale

    def score_terms(self, attention: nn.Module) -> tuple[ScoreTerm, ...]:
        """Returns what happens to the scores."""
        return ()

    def attended(self, attention: nn.Module, y: Array, x: Array, heads: Heads) -> Array:
        """Changes attention's output `[B, T, N, H]`; `x` `[B, T, D]` was its input."""
        return y

    def mlp(self, block: nn.Module, mlp: MakeModule, flow: Flow) -> MakeModule:
        """Changes the class of what maps `[B, T, D]` to `[B, T, D]` in the second branch.

        It is made of `config` and `ops`, with a `name`, and may make the given one within, which is
        that of an ingredient in an earlier row.
        """
        return mlp

    def leave(self, gpt: nn.Module, x: Array, flow: Flow) -> Array:
        """Changes what leaves the last layer; the last ingredient comes first."""
        return x

    def normed(self, gpt: nn.Module, x: Array, flow: Flow) -> Array:
        """Changes the normalised output of the last layer, `[B, T, D]`, so a factor of logits."""
        return x

    def logits(self, logits: Array) -> Array:
        """Changes logits `[B, T, V]`, each by itself, for the last may be padding.

        Parameters have no place here: they act in `normed`.
        """
        return logits

    def active_share(self, names: Names) -> float:
        """Returns the share of a parameter, whose axes have `names`, that computes a token."""
        return 1.0
