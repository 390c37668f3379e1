"""The expensive operations: one function each, several implementations, one plain reference.

Every function here has a form written for speed, with its own backward rule, and beside it a
`*_reference` form written for reading. Tests hold the two together, values and gradients.
"""

from gpt2.ops.activation import gelu_tanh, gelu_tanh_reference
from gpt2.ops.attention import attention, resolve
from gpt2.ops.cross_entropy import cross_entropy, cross_entropy_reference
from gpt2.ops.linear import linear, linear_reference
from gpt2.ops.norm import norm, norm_reference

__all__ = [
    "attention",
    "cross_entropy",
    "cross_entropy_reference",
    "gelu_tanh",
    "gelu_tanh_reference",
    "linear",
    "linear_reference",
    "norm",
    "norm_reference",
    "resolve",
]
