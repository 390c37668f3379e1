"""The table of operations that a model calls: reference implementations, or faster kernels.

A backend makes a table for its mesh, platform and precision (gpt2/parallel/kernels.py), and passes
the table to the model. With fewer kernels in the table, a run is slower or needs more memory, and
its results change only by rounding. The functions that FSDP by layer puts in the table
(gpt2/parallel/shards.py) are an exception: all or none of them must be in the table, because
one of them, `param`, returns shards, which only the others accept.
"""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
from jax import Array
from jax.typing import DTypeLike

from gpt2.ops import plain
from gpt2.ops.plain import (
    Init,
    Scoring,
    Shape,
)
from gpt2.utils.parameters import ParamInfo
from gpt2.utils.trees import Tree

AttentionFn = Callable[[Array, Array, Array, Scoring], Array]
# A function that turns `kernel(q, k, v, segments)` into a kernel that runs on each device's own
# heads.
Spread = Callable[[Callable], Callable]
LookUpFn = Callable[[Array, Array, DTypeLike], Array]
ParamFn = Callable[[nn.Module, str, Init, Shape, ParamInfo], Array]


@dataclasses.dataclass(frozen=True)
class Ops:
    """The operations that a model calls. gpt2/ops/plain.py documents each of them.

    Attributes:
        param: returns a parameter, of which a device may hold only a shard. Only `whole`, `linear`,
            `linear_parts`, `look_up`, `look_up_tokens`, `add_rows`, `pad_vocab` and `head_loss` of
            the same table may therefore use the result.
        look_up_tokens: looks up tokens in an embedding table, with or without the rows that
            `pad_vocab` adds.
    """

    param: ParamFn = plain.param
    whole: Callable[[Array], Array] = plain.whole
    linear: Callable[..., Array] = plain.linear
    linear_parts: Callable[..., list[Array]] = plain.linear_parts
    norm: Callable[..., Array] = plain.norm
    attention: AttentionFn = plain.attention
    look_up: LookUpFn = plain.look_up
    look_up_tokens: LookUpFn = plain.look_up
    add_rows: Callable[[Array, Array], Array] = plain.add_rows
    pad_vocab: Callable[[Array], Array] = plain.pad_vocab
    head_loss: Callable[..., tuple[Array, Tree]] = plain.head_loss
    log_sum_exp: Callable[[Array], Array] = plain.log_sum_exp
    constrain: Callable[..., Array] = plain.constrain
