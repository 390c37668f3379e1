"""Variants of kernels by platform: all compute the same, and XLA's compilers differ in them.

In brackets: how much longer 124M's step takes without, on an H200, or by estimate on a v5e.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Variants:
    """How kernels are written for a platform."""

    # Products of 16-bit operands return their type, and add up in float32 (H200 8 %, v5e 2 %).
    narrow_results: bool = False
    # Linear maps are products of two matrices. The bias then joins the product (H200 3 %).
    flat: bool = False
    # Queries, keys and values are a product each: none is copied (v5e 17 %, H200 2 %).
    apart: bool = False
    # A bias gradient is a product with two rows of ones. XLA:TPU would join a sum, or one row, with
    # what else could join the product before (v5e 6 %).
    ones_for_bias: bool = False
    # The gradient of the head's table adds up as [D, V], less to transpose than logits (Zen 3, two
    # layers in float32: 6 %).
    head_by_width: bool = False
    # GELU joins the product before it, and is kept for the backward pass (H200 1 %; 1.2 of 32.4 GB
    # that the step of 124M moves on an H100, by its compiler).
    activation_joins: bool = False
    # Statistics of a row, in softmax and norms, take one pass (H200 2 %).
    one_pass: bool = False
    # Sums over rows take two stages, of which the second joins its reader. Sums for the biases of
    # queries, keys, values are one, so are squares of small gradients (H200 3 %).
    joint_sums: bool = False
    # A norm's derivative joins the product that gives its operand (v5e 3 %).
    norm_joins: bool = False
    # Products of float32 round their operands; what stands beside one has to come from it.
    rounds_float32: bool = False


VARIANTS = {
    "cpu": Variants(head_by_width=True),
    "gpu": Variants(
        narrow_results=True,
        flat=True,
        apart=True,
        activation_joins=True,
        one_pass=True,
        joint_sums=True,
        rounds_float32=True,
    ),
    "tpu": Variants(
        narrow_results=True,
        apart=True,
        ones_for_bias=True,
        norm_joins=True,
        rounds_float32=True,
    ),
}


def variants_for(platform: str, *, several: bool, splits_axes: bool) -> Variants:
    """Returns the variants for a program on `cpu`, `gpu` or `tpu`.

    Args:
        platform: of its devices; one that is not in `VARIANTS` has none.
        several: whether several devices run it together.
        splits_axes: whether XLA's partitioner splits axes of activations over them.
    """
    found = VARIANTS.get(platform, Variants())
    if several:
        # One norm would gather shards of gradients. What joins its reader is sent late.
        found = dataclasses.replace(found, joint_sums=False)
    if splits_axes:
        # The partitioner cannot follow an axis that it splits into a flat one, and it would add up
        # the devices' results in the type of a product.
        found = dataclasses.replace(
            found,
            flat=False,
            activation_joins=False,
            narrow_results=False,
            ones_for_bias=False,
        )
    return found
