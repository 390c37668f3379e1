"""What a program is traced for, which decides between variants of one operation."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Target:
    """What runs the traced program: as a backend says, or else JAX's default device."""

    platform: str  # `cpu`, `gpu` or `tpu`
    splits_axes: bool = (
        False  # XLA's partitioner splits axes of activations over devices
    )
    several: bool = False  # several devices run it together
    plain: bool = (
        False  # operations take their references in place of their own backward rules
    )
    mesh: Any = (
        None  # what spreads the program, beside `rules`, of `gpt2.parallel.rules`
    )
    rules: Any = None
    has_shards: bool = (
        False  # each device may hold shards of parameters, gathered by layer
    )
    kernels: str = ""  # `kernels_for` its devices


_target: contextvars.ContextVar[Target | None] = contextvars.ContextVar(
    "target", default=None
)


def jit_is_off() -> bool:
    """Returns whether JAX_DISABLE_JIT=1: people then debug with prints, operation by operation."""
    return jax.config.jax_disable_jit  # type: ignore[attr-defined]


def target() -> Target:
    """Returns what the current trace is for."""
    found = _target.get() or Target(
        jax.default_backend(), kernels=kernels_for(jax.devices()[0])
    )
    return dataclasses.replace(found, plain=found.plain or jit_is_off())


@contextlib.contextmanager
def tracing(**changes: Any) -> Iterator[None]:
    """Changes members of `target` for what is traced inside. What jit has traced stays as it is."""
    token = _target.set(dataclasses.replace(target(), **changes))
    try:
        yield
    finally:
        _target.reset(token)


def plain_ops() -> contextlib.AbstractContextManager[None]:
    """Takes every operation's reference, so that `jax.jvp`, Hessians and prints inside work."""
    return tracing(plain=True)


def platform_of(device: jax.Device) -> str:
    """Returns `cpu`, `gpu` or `tpu`: devices that are compiled for from afar say `cuda`."""
    return "gpu" if device.platform in ("cuda", "rocm") else device.platform


def kernels_for(device: jax.Device) -> str:
    """Returns the platform whose fused attention a device runs: `older` before v4 and Ampere."""
    is_old_tpu = device.device_kind in (
        "TPU v2",
        "TPU v3",
    )  # Mosaic lacks their 16-bit products
    is_older = is_old_tpu or float(getattr(device, "compute_capability", 9)) < 8
    return "older" if is_older else platform_of(device)


def either(
    condition: jax.Array, function: Callable[[], Any], other: Callable[[], Any]
) -> Any:
    """Returns `function()` where a boolean scalar on the devices holds, and else `other()`."""
    if target().platform == "cpu":  # a GPU would wait for the host to choose
        return jax.lax.cond(condition, function, other)
    return jax.tree.map(partial(jnp.where, condition), function(), other())
