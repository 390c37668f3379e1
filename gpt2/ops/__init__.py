"""The expensive operations: one function each, several implementations, one plain reference.

What has a variant for speed, with its own backward rule, has a `*_reference` for reading beside it
(activation, attention, cross_entropy, linear, norm). Tests compare values and gradients of the two.
"""

from gpt2.ops.activation import ACTIVATIONS, GATES, gelu_tanh, gelu_tanh_reference
from gpt2.ops.arrays import pad_rows
from gpt2.ops.attention import attention, attention_cached, resolve
from gpt2.ops.cross_entropy import (
    cross_entropy,
    cross_entropy_reference,
    positions_per_chunk,
)
from gpt2.ops.linear import linear, linear_parts, linear_reference
from gpt2.ops.norm import norm, norm_reference
from gpt2.ops.scores import Scoring, alibi_slopes, rotate, rotation
