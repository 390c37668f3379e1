"""An implementation of attention against the reference, on the device that is here.

    python -m gpt2.benchmark.suite.attention cudnn full

prints JSON after each check, with all checks so far: what ends the process loses no other check.

Each check compares two 16-bit results with the reference in float32: that of the implementation,
and that of the reference in the same 16 bits. An implementation passes if its error is at most
`TIMES` that of the reference, with a quarter of the type's precision to spare.

The kernel alone is compared by its result and its gradients, with grouped heads, documents and
windows. An error is the norm of the difference over that of the values, for each eighth of each
row alone. Late positions of causal attention average over many keys, so that their values are small
beside those of the first. Then a model of two layers takes a step under pjit. Its gradients are
compared by parameter, and its loss with `LOSS_SPARE` to spare.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from gpt2.config import DEFAULTS, Config, with_options
from gpt2.errors import UserError, exit_on_user_error
from gpt2.ops import Scoring, attention, resolve
from gpt2.training.program import Program
from gpt2.utils.platform import platform_of

TIMES = 3.0
LOSS_SPARE = 1e-4
BLOCKS = 8  # of a row

# B, T, N, H and the window of a check; those of GPT-2 124M, and of a small one.
_LOSS = "loss"
_ABOUT = ("dtype", "kv_heads", "window", "documents")
_SHAPES = {"full": (4, 1024, 12, 64, 256), "tiny": (2, 64, 4, 16, 16)}
Errors = dict[str, tuple[float, float]]  # by array: of the implementation, of the reference
Planned = tuple[dict[str, Any], Callable[[], Errors]]  # what a check is about, and how to make it


def check_attention(name: str, size: str) -> Iterator[dict[str, Any]]:
    """Yields the checks of an implementation so far, or under `absent` why it cannot run here.

    `planned` is their number in the end. Those of whole models come last.

    Args:
        name: of `gpt2.ops.attention.IMPLEMENTATIONS`.
        size: a key of `_SHAPES`.
    """
    device = jax.devices()[0]
    B, T, N, H, window = _SHAPES[size]
    try:
        resolve(name, platform_of(device), "bfloat16", T, H)
    except UserError as error:
        yield {"absent": error.what}
        return
    forms = [(0, False), (window, True)]
    if size == "full":
        forms += [(0, True), (window, False)]
    # float16 has no form of some products on a CPU.
    others = [("bfloat16", N // 4)] + [("float16", N)] * (platform_of(device) == "gpu")
    kernels = [("bfloat16", N, *form) for form in forms]
    kernels += [(*other, window, True) for other in others]
    planned: list[Planned] = []
    for values in kernels:
        about: dict[str, Any] = dict(zip(_ABOUT, values, strict=True))
        planned.append((about, partial(check_kernel, name, (B, T, N, H), **about)))
    rows = B * len(jax.devices())
    for form in forms[:2] if size == "full" else forms[1:]:
        about = dict(zip(_ABOUT, ("bfloat16", N, *form), strict=True))
        compare = partial(check_model, name, (rows, T, N, H), *form)
        planned.append((about | {"where": "model under pjit"}, compare))
    checks: list[dict[str, Any]] = []
    for about, errors_of in planned:
        checks.append(_checked(name, about, errors_of))
        found = {"device": device.device_kind, "times": TIMES, "planned": len(planned)}
        yield found | {"checks": checks}


def check_kernel(
    name: str,
    shape: tuple[int, int, int, int],
    *,
    dtype: str,
    kv_heads: int,
    window: int,
    documents: bool,
) -> Errors:
    """Returns errors of an implementation and of the 16-bit reference, by array.

    They are those of the block of rows, `T / BLOCKS` positions of one row, where the implementation
    is worst.

    Args:
        name: of `gpt2.ops.attention.IMPLEMENTATIONS`.
        shape: B, T, N, H.
        dtype: of queries, keys and values.
        kv_heads: K.
        window: as of `Scoring`.
        documents: whether rows hold four documents each.
    """
    B, T, N, H = shape
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((B, T, N, H), (B, T, kv_heads, H), (B, T, kv_heads, H), (B, T, N, H))
    *qkv, weight = (
        jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)
    )
    segments = jnp.asarray(_segments(B, T)) if documents else None

    @partial(jax.jit, static_argnames="implementation")
    def out_and_gradients(qkv, implementation):
        def apply(qkv):
            return attention(
                *qkv,
                implementation=implementation,
                scoring=Scoring(window=window),
                segments=segments,
            )

        out, pull = jax.vjp(apply, qkv)
        return dict(
            zip(("out", "dq", "dk", "dv"), (out, *pull(weight.astype(out.dtype))[0]), strict=True)
        )

    found = out_and_gradients(tuple(qkv), name)
    rounded = out_and_gradients(tuple(qkv), "reference")
    with jax.default_matmul_precision("highest"):
        exact = out_and_gradients(tuple(x.astype(jnp.float32) for x in qkv), "reference")
    return {key: _worst(found[key], rounded[key], exact[key], B * BLOCKS) for key in exact}


def check_model(
    name: str, shape: tuple[int, int, int, int], window: int, documents: bool
) -> Errors:
    """Returns errors of a model under pjit, of its loss and of the gradient of each parameter.

    Args:
        name, shape, window, documents: as for `check_kernel`.
    """
    B, T, N, H = shape
    tokens, targets = np.random.default_rng(0).integers(0, 512, (2, B, T), np.int32)
    batch = {"tokens": tokens, "targets": targets}
    if documents:
        batch["segments"] = _segments(B, T)
    options = {
        **{"model.vocab_size": 512, "model.context_length": T, "model.num_layers": 2},
        **{"model.num_heads": N, "model.embed_dim": N * H, "model.window": window},
        **{"data.batch_size": B, "data.document_mask": documents},
        # A step of plain SGD takes the gradient off the weights.
        **{"optim.name": "sgd", "optim.momentum": 0.0, "optim.nesterov": False},
        **{"optim.learning_rate": 1.0, "optim.schedule": "constant", "optim.warmup_steps": 0},
        "optim.end_learning_rate": 1.0,
        **{"optim.weight_decay": 0.0, "optim.clip_norm": 0.0},
    }

    def loss_and_gradients(**more):
        config = with_options(Config.from_dict(DEFAULTS.to_dict()), options | more)
        program = Program.from_config(config, jax.devices())
        state = program.init_state()
        before = flatten_dict(jax.device_get(state.params), sep="/")
        placed = program.backend.put_batch(batch)
        state, metrics = program.compile_train(state, placed)(state, placed)
        after = flatten_dict(jax.device_get(state.params), sep="/")
        gradients = {path: before[path] - after[path] for path in before}
        return {_LOSS: np.asarray(metrics["train/loss"])} | gradients

    half, single = {"precision.compute": "bfloat16"}, {"precision.compute": "float32"}
    found = loss_and_gradients(**half, **{"model.attention": name})
    rounded = loss_and_gradients(**half, **{"model.attention": "reference"})
    with jax.default_matmul_precision("highest"):
        exact = loss_and_gradients(**single, **{"model.attention": "reference"})
    return {key: _worst(found[key], rounded[key], exact[key], 1) for key in exact}


def _checked(name: str, about: dict[str, Any], compare: Callable[[], Errors]) -> dict[str, Any]:
    """Runs a comparison, and returns its record; one that fails is a record too."""
    record = {"implementation": name} | about
    try:
        errors = compare()
    except Exception as error:  # of a kernel that this device, or library, does not take
        return record | {"passed": False, "error": str(error).strip()[:400]}
    rounding = float(jnp.finfo(about["dtype"]).eps) / 4
    passed = all(
        error <= TIMES * reference + (LOSS_SPARE if key == _LOSS else rounding)
        for key, (error, reference) in errors.items()
    )
    return record | {"passed": passed, "errors": errors}


def _worst(found: Any, rounded: Any, exact: Any, parts: int) -> tuple[float, float]:
    """Returns the errors of `found` and of `rounded` in the part where `found` compares worst.

    Args:
        found, rounded: as computed in 16 bits, by an implementation and by the reference.
        exact: the same in float32.
        parts: how many equal parts of the first axes are judged alone.
    """
    found, rounded, exact = (
        np.asarray(x, np.float64).reshape(parts, -1) for x in (found, rounded, exact)
    )
    norms = np.linalg.norm(exact, axis=1)
    errors, references = (np.linalg.norm(x - exact, axis=1) / norms for x in (found, rounded))
    worst = np.argmax(
        errors - TIMES * references
    )  # of a part that is not a number, if there is one
    return float(errors[worst]), float(references[worst])


def _segments(B: int, T: int) -> np.ndarray:
    """Returns `[B, T]` int32: four documents in a row, whose ends differ by row."""
    ends = np.sort(np.random.default_rng(1).integers(1, T, (B, 3)), axis=1)
    return (np.arange(T) >= ends[:, :, None]).sum(1).astype(np.int32)


@exit_on_user_error
def main() -> int:
    """Prints the checks, and returns 1 if one failed."""
    name, size = sys.argv[1:]
    found: dict[str, Any] = {}
    for found in check_attention(name, size):
        print(json.dumps(found), flush=True)
    return int(not all(check["passed"] for check in found.get("checks", ())))


if __name__ == "__main__":
    sys.exit(main())
