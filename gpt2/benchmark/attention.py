"""An implementation of attention against the reference, on the device that is here.

Each check compares two 16-bit results, and their gradients, with the reference in float32: those
of the implementation, and those of the reference in the same 16 bits. It passes if its error is at
most `TIMES` the reference's, with a quarter of the type's precision to spare.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gpt2.benchmark.tables import Row
from gpt2.config import Config
from gpt2.model.ingredients import score_terms
from gpt2.ops import Scoring
from gpt2.parallel.kernels import attention_by, choose_attention

TIMES = 3.0
BLOCKS = 8  # of a row


def check_attention(config: Config) -> Iterator[Row]:
    """Yields a row for each check of the implementation that a config takes here.

    Shapes and compute type are the config's, or bfloat16; with and without documents, a window,
    and grouped heads. At most eight sequences.
    """
    model = config.model
    cfg = config.with_vocabulary(1).gpt()
    name, _ = choose_attention(cfg, jax.devices()[0], score_terms(cfg))
    dtype = config.precision.compute.replace("float32", "bfloat16")
    N = model.num_heads
    T = model.context_length
    batch_size = min(config.micro_batch_size, 8)
    shape = (batch_size, T, N, model.head_size)
    window = model.window or T // 4
    grouped = N // 2 or 1
    while N % grouped:
        grouped -= 1
    checks = (  # heads of keys and values, window, documents
        (N, 0, False),
        (N, 0, True),
        (N, window, False),
        (N, window, True),
        (grouped, window, True),
    )
    for K, seen, documents in checks:
        check = f"{dtype}, {K} of {N} heads"
        if seen:
            check += f", window {seen}"
        if documents:
            check += ", documents"
        scoring = Scoring(model.head_size**-0.5, seen)
        row: Row = {"name": name, "check": check}
        try:
            row |= compare(name, shape, dtype, K, scoring, documents)
        except (
            Exception
        ) as error:  # of a kernel that the device or library does not take
            row["passed"] = False
            told = " ".join(str(error).split())
            row["error"] = told[:400]
        yield row


def compare(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    kv_heads: int,
    scoring: Scoring,
    documents: bool,
) -> Row:
    """Returns errors of an implementation and of the reference in the same 16 bits.

    `shape` is B, T, N, H; with `documents`, rows hold four each.
    """
    B, T, N, H = shape
    rng = np.random.default_rng(1)

    def draw(heads: int) -> jax.Array:
        values = rng.standard_normal((B, T, heads, H))
        return jnp.asarray(values, dtype)

    qkv = (draw(N), draw(kv_heads), draw(kv_heads))
    weight = draw(N)
    segments = None
    if documents:
        ends = rng.integers(1, T, (B, 3, 1))
        ended = np.sum(np.arange(T) >= ends, axis=1)
        segments = jnp.asarray(ended, jnp.int32)

    @partial(jax.jit, static_argnums=0)
    def run(implementation: str, *qkv: jax.Array) -> dict[str, jax.Array]:
        attention = attention_by(implementation, jax.default_backend())
        how = scoring._replace(segments=segments)
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, how), *qkv)
        dq, dk, dv = pull(weight.astype(out.dtype))
        return {"out": out, "dq": dq, "dk": dk, "dv": dv}

    found = run(name, *qkv)
    rounded = run("plain", *qkv)
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in qkv]
        exact = run("plain", *wide)
    errors = {}
    ratios = []
    passed = True
    spare = float(jnp.finfo(dtype).eps) / 4
    parts = B * BLOCKS
    for key, reference in exact.items():
        error, rounding = worst(found[key], rounded[key], reference, parts)
        errors[key] = (error, rounding)
        if not error <= TIMES * rounding + spare:  # NaN is not
            passed = False
        if rounding:
            ratios.append(error / rounding)
    return {"passed": passed, "worst": max(ratios), "errors": errors}


def worst(
    found: ArrayLike, rounded: ArrayLike, exact: ArrayLike, parts: int
) -> tuple[float, float]:
    """Returns relative errors of `found` and of `rounded` in the part where `found` is worst.

    Each of `parts` equal parts of the first axes is judged alone: late positions average over many
    keys, so that their values are small beside those of the first.
    """

    def split(values: ArrayLike) -> np.ndarray:
        return np.asarray(values, np.float64).reshape(parts, -1)

    reference = split(exact)
    norms = np.linalg.norm(reference, axis=1)
    error = np.linalg.norm(split(found) - reference, axis=1) / norms
    rounding = np.linalg.norm(split(rounded) - reference, axis=1) / norms
    # Of a part that is NaN, if there is one.
    part = np.argmax(error - TIMES * rounding)
    return float(error[part]), float(rounding[part])
