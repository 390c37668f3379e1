"""An implementation of attention against the reference, on the device that is here.

Each check compares two 16-bit results, and their gradients, with the reference in float32: those
of the implementation, and those of the reference in the same 16 bits. It passes if its error is at
most `TIMES` the reference's, with a quarter of the type's precision to spare.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpt2.config import Config
from gpt2.model.ingredients import score_terms
from gpt2.ops import Scoring
from gpt2.parallel.kernels import attention_by, choose_attention

TIMES = 3.0
BLOCKS = 8  # of a row


def check_attention(config: Config) -> Iterator[dict[str, Any]]:
    """Yields a row for each check of the implementation that a config takes here.

    Shapes and compute type are the config's, or bfloat16; with and without documents, a window,
    and grouped heads. At most eight sequences.
    """
    model = config.model
    compute = config.precision.compute
    device = jax.devices()[0]
    cfg = config.with_vocabulary(1).gpt()
    name, _ = choose_attention(cfg, device, score_terms(cfg))
    dtype = compute.replace("float32", "bfloat16")
    N = model.num_heads
    window = model.window or model.context_length // 4
    shape = (min(config.micro_batch_size, 8), model.context_length, N, model.head_size)
    grouped = max((k for k in range(1, N) if N % k == 0), default=1)
    checks = [(N, 0, False), (N, 0, True), (N, window, False), (N, window, True)]
    for K, seen, documents in [*checks, (grouped, window, True)]:
        check = f"{dtype}, {K} of {N} heads" + f", window {seen}" * bool(seen)
        row = {"name": name, "check": check + ", documents" * documents}
        scoring = Scoring(model.head_size**-0.5, seen)
        try:
            yield row | compare(name, shape, dtype, K, scoring, documents)
        except (
            Exception
        ) as error:  # of a kernel that this device, or library, does not take
            yield row | {
                "passed": False,
                "error": str(error).strip()[:400].replace("\n", " "),
            }


def compare(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    kv_heads: int,
    scoring: Scoring,
    documents: bool,
) -> dict[str, Any]:
    """Returns errors of an implementation and of the reference in the same 16 bits.

    `shape` is B, T, N, H; with `documents`, rows hold four each.
    """
    B, T, N, H = shape
    keys = jax.random.split(jax.random.key(0), 4)
    *qkv, weight = (
        jax.random.normal(key, (B, T, heads, H)).astype(dtype)
        for key, heads in zip(keys, (N, kv_heads, kv_heads, N), strict=True)
    )
    ends = np.sort(np.random.default_rng(1).integers(1, T, (B, 3)), axis=1)
    segments = jnp.asarray((np.arange(T) >= ends[:, :, None]).sum(1, dtype=np.int32))

    @partial(jax.jit, static_argnums=0)
    def run(implementation: str, *qkv: jax.Array) -> dict[str, jax.Array]:
        attention = attention_by(implementation, jax.default_backend())
        masks = segments if documents else None
        out, pull = jax.vjp(
            lambda q, k, v: attention(q, k, v, scoring._replace(segments=masks)), *qkv
        )
        dq, dk, dv = pull(weight.astype(out.dtype))
        return {"out": out, "dq": dq, "dk": dk, "dv": dv}

    found = run(name, *qkv)
    rounded = run("plain", *qkv)
    with jax.default_matmul_precision("highest"):
        exact = run("plain", *(x.astype(jnp.float32) for x in qkv))
    errors = {
        key: worst(found[key], rounded[key], exact[key], B * BLOCKS) for key in exact
    }
    spare = float(jnp.finfo(dtype).eps) / 4
    return {
        "passed": all(
            error <= TIMES * rounding + spare for error, rounding in errors.values()
        ),
        "worst": max(
            error / rounding for error, rounding in errors.values() if rounding
        ),
        "errors": errors,
    }


def worst(found: Any, rounded: Any, exact: Any, parts: int) -> tuple[float, float]:
    """Returns relative errors of `found` and of `rounded` in the part where `found` is worst.

    Each of `parts` equal parts of the first axes is judged alone: late positions average over many
    keys, so that their values are small beside those of the first.
    """
    found, rounded, exact = (
        np.float64(x).reshape(parts, -1) for x in (found, rounded, exact)
    )
    norms = np.linalg.norm(exact, axis=1)
    errors, references = (
        np.linalg.norm(x - exact, axis=1) / norms for x in (found, rounded)
    )
    part = np.argmax(
        errors - TIMES * references
    )  # of a part that is NaN, if there is one
    return float(errors[part]), float(references[part])
