"""FLOPs of matrix products, from their instructions."""

import json
import math
import re
from collections.abc import Mapping

import numpy as np

from gpt2.utils.hlo import Instruction, arrays_in


def product_flops(instruction: Instruction, shapes: Mapping[str, str]) -> float:
    """Returns FLOPs, two for each multiplication with its addition; 0 for what is no product.

    Args:
        instruction: one line of HLO.
        shapes: of every value of the program, by name.
    """
    dims = [dims for each in instruction.operands for _, dims in arrays_in(shapes.get(each, ""))]
    results = [dims for _, dims in arrays_in(instruction.shape)]
    if len(dims) < 2 or not results:
        return 0.0
    line, result = instruction.line, math.prod(results[0])
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)
        return 2.0 * result * _take(dims[0], contracted[1] if contracted else "")
    if instruction.opcode == "convolution":
        return _convolution_flops(line, results[0], dims[0], dims[1])
    if instruction.opcode == "custom-call":
        if "__cublas" in line and (
            found := re.search(r'"lhs_contracting_dimensions":(\[.*?\])', line)
        ):
            return 2.0 * result * _take(dims[0], ",".join(map(str, json.loads(found[1]))))
        if "__cudnn$fmha" in line:
            return _attention_flops(line, dims[0])
    return 0.0


def _take(dims: tuple[int, ...], numbers: str) -> int:
    return math.prod(dims[int(number)] for number in numbers.split(",") if number)


def _attention_flops(line: str, queries: tuple[int, ...]) -> float:
    """Returns the FLOPs of cuDNN's attention: two products forward, five backward."""
    found = re.search(r'"intermediate_tensor_shape": ?\{.*?"dimensions": ?(\[.*?\])', line)
    if found is None:
        return 0.0
    scores = [int(size) for size in json.loads(found[1])]  # [B, N, T, S]
    head_size = math.prod(queries) / math.prod(scores[:-1])
    return (5 if "Backward" in line else 2) * 2.0 * math.prod(scores) * head_size


def _convolution_flops(
    line: str, result: tuple[int, ...], inputs: tuple[int, ...], kernel: tuple[int, ...]
) -> float:
    """Returns the FLOPs of a convolution, as which compilers for TPUs write every product.

    Taps that fall on padding, or between the elements of a dilated input, do not count.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line)
    if labels is None:
        return 0.0
    of_input, of_kernel, of_result = labels.groups()
    window = dict(
        re.findall(r"(\w+)=([\dx_\-]+)", (re.search(r"window=\{(.*?)\}", line) or "  ")[1])
    )
    flops = (
        2.0
        * result[of_result.index("b")]
        * math.prod(kernel[of_kernel.index(label)] for label in "io")
    )
    for axis in sorted(set(of_kernel) - set("io")):
        size, count = kernel[of_kernel.index(axis)], result[of_result.index(axis)]

        def read(name: str, default: str, axis: str = axis) -> str:
            return window[name].split("x")[int(axis)] if name in window else default

        before = int(read("pad", "0_0").split("_")[0])
        place = (
            np.arange(count)[:, None] * int(read("stride", "1"))
            + np.arange(size)[None] * int(read("rhs_dilate", "1"))
            - before
        )
        dilation = int(read("lhs_dilate", "1"))
        extent = (inputs[of_input.index(axis)] - 1) * dilation
        flops *= int(((place >= 0) & (place <= extent) & (place % dilation == 0)).sum())
    return flops
