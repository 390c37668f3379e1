"""Whether two sides compute the same: the losses of their first steps, compared.

Both sides draw the same weights by name, so that none have to be sent, and take `STEPS` steps on
batches that are the same: later losses show gradients, clipping and the optimizer. Names are this
project's, such as `h_0/attn/c_attn/kernel`. Nothing here needs JAX or PyTorch.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from gpt2.config import Config

STEPS = 5
# The most by which a loss may differ, relative to itself, by `precision.compute`. In bfloat16 the
# peers' losses differ by 7e-3 from their own in float32, at the quickstart's rate. A GPU multiplies
# float32 as TF32, which is as precise as float16.
TOLERANCES = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}


def draw_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the float32 weights of a name: a function of the name and the shape.

    Kernels keep a branch's size, where variants of GELU differ most; tables are small enough to
    show a norm's epsilon. The last norm's scale makes gradients long enough to be clipped.
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
    """Returns tokens and targets `[2, B, T]` int32 of a step, the same on every side."""
    size, length, _ = config.shapes.largest
    rng = np.random.default_rng(step)
    return rng.integers(0, config.model.vocab_size, (2, size, length), np.int32)


def compare(
    ours: Sequence[float], theirs: Sequence[float], tolerance: float
) -> str | None:
    """Returns the first difference of losses, in nats per token, if there is one."""
    found = np.abs(np.divide(theirs, ours) - 1)
    for i in np.flatnonzero(~(found <= tolerance)):  # as NaN is
        return f"the loss of step {i + 1} differs by {found[i]:.1e}, and {tolerance:g} is allowed"
    return None
