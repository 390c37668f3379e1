"""Check that two implementations compute the same losses in their first steps.

Each implementation derives the initial weights of a parameter from the parameter's name, so both
have the same weights. The names are this project's names, such as `h_0/attn/c_attn/kernel`. Both
implementations take `STEPS` steps on the same batches. All losses except the first also depend on
gradients, clipping and the optimizer, so equal losses show that gradients, clipping and the
optimizer are equal, too. This module needs neither JAX nor PyTorch.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from gpt2.config import Config

STEPS = 5
# Largest allowed relative difference of a loss, by `precision.compute`. At the quickstart's
# learning rate, PyTorch's losses in bfloat16 differ by 7e-3 from its losses in float32. NVIDIA GPUs
# multiply float32 as TF32, which is as precise as float16, so the tolerance of float16 applies to
# float32 there.
TOLERANCES = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}


def draw_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw the initial float32 weights of a parameter. They depend only on its name and shape.

    The magnitudes make differences between implementations visible. Weight matrices keep the
    magnitude of activations at about 1, where variants of GELU differ most. Embeddings are small,
    so that the epsilon of a norm matters. The scale of the last norm makes gradients large enough
    to be clipped.
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
    """Draw random int32 tokens and targets `[2, B, T]`. Each step has its own batch.

    The batch of a step is the same for every implementation.
    """
    size, length, _ = config.shapes.largest
    rng = np.random.default_rng(step)
    return rng.integers(0, config.model.vocab_size, (2, size, length), np.int32)


def compare(
    ours: Sequence[float], theirs: Sequence[float], tolerance: float
) -> str | None:
    """Describe the first loss that differs between two implementations.

    `ours` and `theirs` are the losses of the first steps, in nats per token. Return None if no
    relative difference exceeds the tolerance.
    """
    differences = np.abs(np.divide(theirs, ours) - 1)
    for i in np.flatnonzero(~(differences <= tolerance)):  # finds NaN as well
        difference = f"{differences[i]:.1e}"
        return (
            f"the loss of step {i + 1} differs by {difference}, more than {tolerance:g}"
        )
    return None
