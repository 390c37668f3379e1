"""Check a library's attention kernel on this machine before a run relies on it.

If a driver or a library does not suit a device, a kernel can fail, hang or return wrong values. The
check runs the kernel forward and backward on every local device, and compares the results with the
reference implementation on the CPU. If the kernel does not pass the check and `model.attention` is
`auto`, the model uses the reference implementation. If `model.attention` names the kernel, the run
ends with an error.
"""

import dataclasses
import functools
import queue
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from gpt2.config import GPTConfig
from gpt2.errors import UserError, first_line
from gpt2.ops import Scoring, plain
from gpt2.ops.plain import LinearBias, ScoreTerm, SoftCap
from gpt2.parallel import distributed
from gpt2.parallel.kernels import Terms, choose_attention, get_attention
from gpt2.utils.platform import host_device

# Other kernels are not checked: they are JAX code of this project, which XLA compiles like the
# reference implementation.
LIBRARY_KERNELS = ("cudnn", "splash", "tokamax")
# The largest number of positions to check: two of splash's largest blocks. More would need much
# memory, because the reference implementation stores a score for each pair of positions.
MAX_LENGTH = 1024
SECONDS = 120.0  # a check that takes longer counts as a hang
# The largest allowed relative error of a row: 16 times the spacing of bfloat16 at 1. On CPUs,
# rounding to bfloat16 causes errors of up to 0.03, and a window that is one position too long
# causes errors of 0.37 or more.
LIMIT = 16 * 2**-7


def check_attention(
    cfg: GPTConfig, device: jax.Device, terms: Terms, *, is_masked: bool
) -> tuple[GPTConfig, str]:
    """Check the attention kernel of `cfg`; return the config to use, and how the kernel failed.

    If the kernel passes, or is not a library's, return `cfg` and an empty string. If it fails and
    `model.attention` is `auto`, return a config with the reference implementation. If it fails and
    `model.attention` names it, raise a UserError. `terms` names the options that change the scores
    in a way that no kernel supports. `is_masked` says whether batches have segments. All processes
    of a run must call this function, and all get the same result.
    """
    name, _ = choose_attention(cfg, device, terms)
    # A device that JAX does not list can be compiled for, but cannot run anything.
    if name not in LIBRARY_KERNELS or device not in jax.devices():
        return cfg, ""
    faults = distributed.from_all(_find_fault(name, cfg, is_masked))
    fault = next(filter(None, faults), "")
    if not fault:
        return cfg, ""
    fault = f"{name} failed on this machine ({fault})"
    if cfg.attention != "auto":
        raise UserError(f"model.attention={fault}", "Use --config.model.attention=auto")
    return dataclasses.replace(cfg, attention="plain"), fault


@functools.cache
def _find_fault(name: str, cfg: GPTConfig, is_masked: bool) -> str:
    """Return how a kernel fails on the devices of this process, or an empty string."""
    fault = queue.Queue[str]()
    is_late = threading.Event()
    host = host_device()

    def check() -> None:
        try:
            for window in {*cfg.windows}:
                error = _largest_error(name, cfg, window, is_masked, is_late, host)
                if not error <= LIMIT:  # this form also rejects NaN
                    fault.put(f"its results are wrong by {error:.0%}")
                    return
            fault.put("")
        except Exception as error:  # libraries raise many types of exceptions
            fault.put(first_line(error))

    threading.Thread(target=check, name="kernel check", daemon=True).start()
    try:
        return fault.get(timeout=SECONDS)
    except queue.Empty:
        is_late.set()
        return f"no result after {SECONDS:g} s"


def _largest_error(name, cfg, window, is_masked, is_late, host):
    """Return the largest relative error of a row `[H]` in the output and gradients of a kernel.

    A row is the vector of a head at a position. The norm of a row's difference from the reference
    implementation is divided by the norm of the reference row, or by the root mean square of all
    reference rows' norms if that is larger. Return 0 if the event `is_late` is set, because the
    check has then timed out. `host` is the CPU device that computes the reference.
    """
    T = min(cfg.context_length, MAX_LENGTH)
    rng = np.random.default_rng(0)
    inputs = []
    # Queries, keys, values, and the gradient of the output.
    for heads in (cfg.num_heads, cfg.kv_heads, cfg.kv_heads, cfg.num_heads):
        x = rng.standard_normal((1, T, heads, cfg.head_size), np.float32)
        inputs.append(x.astype(cfg.compute_dtype))
    terms: tuple[ScoreTerm, ...] = ()
    if cfg.attention_softcap:
        terms = (SoftCap(cfg.attention_softcap),)
    elif cfg.position == "alibi":
        slopes = 2.0 ** (-8 * jnp.arange(1.0, cfg.num_heads + 1) / cfg.num_heads)
        terms = (LinearBias(slopes),)
    segments = jnp.arange(T)[None] * 3 // T if is_masked else None
    scoring = Scoring(cfg.head_size**-0.5, min(window, T // 2), terms, segments)

    def differentiate(attention, q, k, v, gradient):
        attend = partial(attention, scoring=scoring)
        output, backward = jax.vjp(attend, q, k, v)
        return output, *backward(gradient)

    with jax.default_device(host):
        formula = jax.jit(partial(differentiate, plain.attention))
        expected = formula(*[np.float32(x) for x in inputs])

    kernel = get_attention(name, jax.default_backend())
    on_each_device = jax.pmap(
        partial(differentiate, kernel), devices=jax.local_devices()
    )
    copies = [np.stack([x] * jax.local_device_count()) for x in inputs]
    program = on_each_device.lower(*copies).compile()
    if is_late.is_set():
        return 0.0  # timed out; only the run may use the devices now
    errors = []
    for values, wanted in zip(program(*copies), expected, strict=True):
        sizes = np.linalg.norm(wanted, axis=-1)
        sizes = np.maximum(sizes, np.sqrt(np.mean(sizes**2)))
        difference = np.float32(values) - np.asarray(wanted)
        errors.append(np.max(np.linalg.norm(difference, axis=-1) / sizes))
    return np.max(errors)
