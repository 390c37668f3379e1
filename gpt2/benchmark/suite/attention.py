"""An implementation of attention against the reference, on the device that is here.

    python -m gpt2.benchmark.suite.attention cudnn full

prints JSON. Each check compares two 16-bit results with the reference in float32: that of the
implementation, and that of the reference in the same 16 bits. An implementation passes if its error
is at most `TIMES` that of the reference, with one unit of the type's precision to spare. Errors are
the largest difference over the largest value.

The kernel alone is compared by its result and its gradients, with grouped heads, documents and
windows. Then a model of two layers takes a step under pjit, whose loss and gradients are compared.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpt2.config import DEFAULTS, Config, with_options
from gpt2.errors import UserError, exit_on_user_error
from gpt2.ops import Scoring, attention, resolve
from gpt2.training.program import Program
from gpt2.utils.platform import platform_of

TIMES = 3.0

# B, T, N, H and the window of a check; those of GPT-2 124M, and of a small one.
_SHAPES = {"full": (4, 1024, 12, 64, 256), "tiny": (2, 64, 4, 16, 16)}
Errors = dict[str, tuple[float, float]]  # by array: of the implementation, of the reference


def check_attention(name: str, size: str) -> dict[str, Any]:
    """Returns the checks of an implementation, or under `absent` why it cannot run here.

    Args:
        name: of `gpt2.ops.attention.IMPLEMENTATIONS`.
        size: a key of `_SHAPES`.
    """
    device = jax.devices()[0]
    B, T, N, H, window = _SHAPES[size]
    try:
        resolve(name, platform_of(device), "bfloat16", T, H)
    except UserError as error:
        return {"absent": error.what}
    forms = [(0, False), (window, True)]
    if size == "full":
        forms += [(0, True), (window, False)]
    # float16 has no form of some products on a CPU.
    others = [("bfloat16", N // 4)] + [("float16", N)] * (platform_of(device) == "gpu")
    kernels = [("bfloat16", N, *form) for form in forms]
    kernels += [(*other, window, True) for other in others]
    names, checks = ("dtype", "kv_heads", "window", "documents"), []
    for values in kernels:
        about: dict[str, Any] = dict(zip(names, values, strict=True))
        compare = partial(check_kernel, name, (B, T, N, H), **about)
        checks.append(_checked(name, about, compare))
    rows = B * len(jax.devices())
    for form in forms[:2] if size == "full" else forms[1:]:
        about = dict(dtype="bfloat16", kv_heads=N, window=form[0], documents=form[1])
        compare = partial(check_model, name, (rows, T, N, H), *form)
        checks.append(_checked(name, about | {"where": "model under pjit"}, compare))
    return {"device": device.device_kind, "times": TIMES, "checks": checks}


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
    return {
        key: (_error(found[key], exact[key]), _error(rounded[key], exact[key])) for key in exact
    }


def check_model(
    name: str, shape: tuple[int, int, int, int], window: int, documents: bool
) -> Errors:
    """Returns errors of the loss and of all gradients of a model under pjit; as `check_kernel`."""
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
        before = jax.device_get(state.params)
        placed = program.backend.put_batch(batch)
        state, metrics = program.compile_train(state, placed)(state, placed)
        after = jax.device_get(state.params)
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        gradients = np.concatenate([(old - new).ravel() for old, new in pairs])
        return {"loss": np.asarray(metrics["train/loss"]), "gradients": gradients}

    half, single = {"precision.compute": "bfloat16"}, {"precision.compute": "float32"}
    found = loss_and_gradients(**half, **{"model.attention": name})
    rounded = loss_and_gradients(**half, **{"model.attention": "reference"})
    with jax.default_matmul_precision("highest"):
        exact = loss_and_gradients(**single, **{"model.attention": "reference"})
    return {
        key: (_error(found[key], exact[key]), _error(rounded[key], exact[key])) for key in exact
    }


def _checked(name: str, about: dict[str, Any], compare: Callable[[], Errors]) -> dict[str, Any]:
    """Runs a comparison, and returns its record; one that fails is a record too."""
    record = {"implementation": name} | about
    try:
        errors = compare()
    except Exception as error:  # of a kernel that this device, or library, does not take
        return record | {"passed": False, "error": str(error).strip()[:400]}
    spare = float(jnp.finfo(about["dtype"]).eps)
    passed = all(error <= TIMES * reference + spare for error, reference in errors.values())
    return record | {"passed": passed, "errors": errors}


def _error(found: Any, exact: Any) -> float:
    found, exact = (np.asarray(x, np.float64) for x in (found, exact))
    return float(np.max(np.abs(found - exact)) / np.max(np.abs(exact)))


def _segments(B: int, T: int) -> np.ndarray:
    """Returns `[B, T]` int32: four documents in a row, whose ends differ by row."""
    ends = np.sort(np.random.default_rng(1).integers(1, T, (B, 3)), axis=1)
    return (np.arange(T) >= ends[:, :, None]).sum(1).astype(np.int32)


@exit_on_user_error
def main() -> int:
    """Prints the checks, and returns 1 if one failed."""
    name, size = sys.argv[1:]
    found = check_attention(name, size)
    print(json.dumps(found, indent=2))
    return int(not all(check["passed"] for check in found.get("checks", ())))


if __name__ == "__main__":
    sys.exit(main())
