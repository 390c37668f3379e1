"""Check that two sides compute the same, by the losses of their first steps.

Both sides draw equal weights by name, so that no weights have to be sent, and take `STEPS` steps on
equal batches; later losses depend on gradients, clipping and the optimizer. Names are this
project's, such as `h_0/attn/c_attn/kernel`. This module needs neither JAX nor PyTorch.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from gpt2.config import Config

STEPS = 5
# Largest relative difference of a loss by `precision.compute`. In bfloat16 the peers' losses differ
# by 7e-3 from the same peers' in float32, at the quickstart's learning rate. A GPU multiplies
# float32 as TF32, which is as precise as float16.
TOLERANCES = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}


def draw_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return float32 weights, a function of the name and the shape.

    Their sizes make differences visible: kernels preserve the size of a branch, where variants of
    GELU differ most; tables are small, so that a norm's epsilon matters; the scale of the last norm
    makes gradients large enough to be clipped.
    """
    seed = zlib.crc32(name.encode())
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal(shape, np.float32)
    if name.endswith("kernel"):
        return noise * np.float32(noise.size**-0.25)
    noise *= np.float32(0.02)
    if name.endswith("scale"):
        noise += 1
    if name == "ln_f/scale":
        noise *= np.float32(100 / noise.size**0.5)
    return noise


def draw_batch(config: Config, step: int = 0) -> np.ndarray:
    """Return tokens and targets `[2, B, T]` int32 of a step, the same on every side."""
    size, length, _ = config.shapes.largest
    rng = np.random.default_rng(step)
    return rng.integers(0, config.model.vocab_size, (2, size, length), np.int32)


def compare(
    ours: Sequence[float], theirs: Sequence[float], tolerance: float
) -> str | None:
    """Describe the first difference between losses in nats per token; None if there is none."""
    differences = np.abs(np.divide(theirs, ours) - 1)
    for i in np.flatnonzero(~(differences <= tolerance)):  # true for NaN as well
        difference = f"{differences[i]:.1e}"
        return f"the loss of step {i + 1} differs by {difference}, and {tolerance:g} is allowed"
    return None
