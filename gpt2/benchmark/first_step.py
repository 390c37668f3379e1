"""Whether two sides compute the same: loss, gradients and weights of first steps, compared.

Both sides draw the same weights by name, so that none have to be sent, and take `STEPS` steps on
the same batches. Each then writes what came out. Names are this project's, such as
`h_0/attn/c_attn/kernel`, and numbers stand in this project's order. Nothing here needs JAX or
PyTorch.
"""

import zlib
from typing import Any, NamedTuple

import numpy as np

from gpt2.config import Config

SAMPLE = 2**16  # entries of a larger tensor that are compared

# Training steps before weights are compared. AdamW's first step cancels a gradient's scale and both
# betas; later ones do not.
STEPS = 3

# The most that may differ, by the type in which numbers are multiplied: the loss relative to
# itself, a gradient by its norm, the weights by the mean size of their change.
TOLERANCES = {
    "float32": {"loss": 1e-5, "gradient": 1e-4, "weights": 1e-3},
    "tf32": {"loss": 1e-3, "gradient": 0.02, "weights": 0.05},
    "bfloat16": {"loss": 2e-3, "gradient": 0.05, "weights": 0.15},
    "float16": {"loss": 1e-3, "gradient": 0.02, "weights": 0.05},
}


class FirstStep(NamedTuple):
    """What one side computed in its first steps; arrays are `sample`s, by name."""

    products: str  # the type in which it multiplied: one of `TOLERANCES`
    loss: float  # of the first step, in nats per token
    before: dict[str, np.ndarray]  # weights
    after: dict[str, np.ndarray]  # weights after `STEPS` steps
    gradients: dict[str, np.ndarray]  # of the first step, clipped


def draw_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the float32 weights of a name: a function of the name and the shape.

    Kernels keep a branch's size, where variants of GELU differ most; tables are small enough to
    show a norm's epsilon. The last norm's scale makes gradients long enough to be clipped.
    """
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    std = noise.size**-0.25 if name.endswith("kernel") else 0.02
    drawn = np.float32(name.endswith("scale")) + np.float32(std) * noise
    return drawn * np.float32(100 / noise.size**0.5) if name == "ln_f/scale" else drawn


def draw_batch(config: Config, step: int = 0) -> np.ndarray:
    """Returns tokens and targets `[2, B, T]` int32 of a step, the same on every side."""
    shape = (2, config.data.batch_size, config.model.context_length)
    return np.random.default_rng(step).integers(0, config.model.vocab_size, shape, np.int32)


def sample(name: str, values: np.ndarray) -> np.ndarray:
    """Returns a copy of the entries of a tensor that are compared, float32 and flat."""
    flat = np.asarray(values).reshape(-1)
    if flat.size > SAMPLE:
        flat = flat[np.random.default_rng(zlib.crc32(name.encode())).integers(0, flat.size, SAMPLE)]
    return flat.astype(np.float32)


def products_of(compute: str, matmul_precision: str | None, platform: str) -> str:
    """Returns the type in which a platform multiplies, by JAX's option for float32."""
    if compute != "float32" or platform == "cpu" or matmul_precision == "highest":
        return compute
    return "bfloat16" if platform == "tpu" and matmul_precision != "high" else "tf32"


def compare(ours: FirstStep, theirs: FirstStep) -> str | None:
    """Returns the first difference, in products, loss, a gradient or weights, if there is one."""
    if theirs.products != ours.products:
        return f"products are in {theirs.products}, in place of {ours.products}"
    names = list(ours.before)
    if set(names) != set(theirs.before) or not all(
        np.array_equal(ours.before[name], theirs.before[name]) for name in names
    ):
        return "weights before the step differ"
    found: dict[tuple[str, str], Any] = {
        ("loss", "loss"): abs(theirs.loss - ours.loss) / abs(ours.loss)
    }
    for name in names:
        a, b = ours.gradients[name], theirs.gradients[name]
        found["gradient", f"gradient of {name}"] = np.linalg.norm(a - b) / np.linalg.norm(a)
    for name in names:
        a, b, start = (step[name] for step in (ours.after, theirs.after, ours.before))
        if name.endswith("attn/c_attn/bias"):
            # A bias of keys moves all scores of a query alike, which softmax does not see. Its
            # gradient is 0 but for rounding, which AdamW turns into full steps.
            keys = np.s_[a.size // 3 : 2 * a.size // 3]
            a, b, start = (np.delete(x, keys) for x in (a, b, start))
        found["weights", f"weights of {name}"] = np.abs(a - b).mean() / np.abs(a - start).mean()
    for (kind, what), value in found.items():
        if not value <= (allowed := TOLERANCES[ours.products][kind]):  # NaN is not
            return f"{what} differs by {value:.1e}, and {allowed:g} is allowed"
    return None
