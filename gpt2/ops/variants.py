"""Platform-specific variants of kernels, which compute the same results in different ways.

XLA's compilers for CPUs, GPUs and TPUs optimise different patterns. The numbers in parentheses say
how much longer a 124M step takes without a variant: measured on an H200 or on a Zen 3 CPU, or
estimated by the compiler for a TPU v5e.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Variants:
    """The variants of kernels for one platform."""

    # Products of 16-bit operands accumulate in float32, but return 16-bit results, which reduces
    # memory traffic. Without this variant, a step takes longer (H200 8 %, v5e 2 %).
    narrow_results: bool = False
    # Linear maps are reshaped to products of two matrices. XLA then fuses the bias into the product
    # (H200 3 %).
    as_matrices: bool = False
    # Queries, keys and values are computed by separate products, so that they do not have to be
    # copied out of a common result (v5e 17 %, H200 2 %).
    separate_qkv: bool = False
    # A bias gradient is a product with two rows of ones. XLA:TPU would fuse a sum, or a product
    # with a single row, with operations that should be fused into an earlier product (v5e 6 %).
    bias_gradient_by_product: bool = False
    # The gradient of the head's table is accumulated as [D, V]. Transposing it once costs less than
    # transposing the logits of every chunk (Zen 3, two layers in float32: 6 %).
    transposed_head_gradient: bool = False
    # GELU is fused into the product that computes its operand, and its value is stored for the
    # backward pass (H200 1 %; for an H100, the compiler estimates that a step moves 32.4 GB with
    # this variant, and 1.2 GB more without it).
    fuse_activation: bool = False
    # The statistics of a row, in softmax and norms, are computed in one pass over it (H200 2 %).
    one_pass_statistics: bool = False
    # Sums over rows are computed in two stages, and the second stage is fused into the operation
    # that reads the sum. The bias gradients of queries, keys and values are computed by a single
    # sum. The squares of all small gradients are also added up by a single sum (H200 3 %).
    two_stage_sums: bool = False
    # The derivative of a norm is fused into the matrix product that computes the gradient of the
    # norm's output (v5e 3 %).
    fuse_norm_derivative: bool = False
    # Products of float32 arrays round their operands (to TF32 on GPUs, to bfloat16 on TPUs), so a
    # sum must not be written as a product with ones.
    rounds_float32: bool = False


VARIANTS = {
    "cpu": Variants(transposed_head_gradient=True),
    "gpu": Variants(
        narrow_results=True,
        as_matrices=True,
        separate_qkv=True,
        fuse_activation=True,
        one_pass_statistics=True,
        two_stage_sums=True,
        rounds_float32=True,
    ),
    "tpu": Variants(
        narrow_results=True,
        separate_qkv=True,
        bias_gradient_by_product=True,
        fuse_norm_derivative=True,
        rounds_float32=True,
    ),
}


def variants_for(platform: str, *, several: bool, splits_axes: bool) -> Variants:
    """Return the variants for a program on `cpu`, `gpu` or `tpu`.

    Args:
        platform: platform of the devices. A platform that is not in `VARIANTS` has no variants.
        several: whether several devices run the program together.
        splits_axes: whether XLA's partitioner splits axes of activations over the devices.
    """
    variants = VARIANTS.get(platform, Variants())
    if several:
        # With this variant, XLA would gather the shards of all small gradients, to compute a single
        # sum of their squares. It would also fuse the second stage of a sum with the operation that
        # reads the sum, and would therefore send the sum to other devices late.
        variants = dataclasses.replace(variants, two_stage_sums=False)
    if splits_axes:
        # The partitioner cannot split an axis that was merged with other axes. With
        # `narrow_results`, it would also sum the devices' results in 16 bits.
        variants = dataclasses.replace(
            variants,
            as_matrices=False,
            fuse_activation=False,
            narrow_results=False,
            bias_gradient_by_product=False,
        )
    return variants
