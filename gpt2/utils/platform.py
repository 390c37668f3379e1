"""What a program is traced for, which decides between variants of one operation."""

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Target:
    """What runs the traced program. A backend says so; outside of one it is JAX's default device.

    Attributes:
        platform: `cpu`, `gpu` or `tpu`.
        splits_axes: whether XLA's partitioner splits axes of activations over devices.
        several: whether several devices run it together.
        plain: whether operations take their references in place of their own backward rules.
        mesh, rules: what spreads the program, of `gpt2.parallel.rules`, or None.
        has_shards: whether each device may hold shards of parameters, gathered by layer.
    """

    platform: str
    splits_axes: bool = False
    several: bool = False
    plain: bool = False
    mesh: Any = None
    rules: Any = None
    has_shards: bool = False


_target: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


def target() -> Target:
    """Returns what the current trace is for."""
    found = _target.get() or Target(jax.default_backend())
    return dataclasses.replace(found, plain=found.plain or jax.config.jax_disable_jit)


@contextlib.contextmanager
def tracing(**changes: Any) -> Iterator[None]:
    """Changes members of `target` for what is traced inside. What jit has traced stays as it is."""
    token = _target.set(dataclasses.replace(target(), **changes))
    try:
        yield
    finally:
        _target.reset(token)


def traced_for(
    device: jax.Device, *, splits_axes: bool = False, several: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Makes a device that will run the program the target of what is traced inside."""
    return tracing(platform=platform_of(device), splits_axes=splits_axes, several=several)


def plain_ops() -> contextlib.AbstractContextManager[None]:
    """Takes every operation's reference, so that `jax.jvp`, Hessians and prints inside work.

    Under `JAX_DISABLE_JIT=1` this holds everywhere.
    """
    return tracing(plain=True)


def platform_of(device: jax.Device) -> str:
    """Returns `cpu`, `gpu` or `tpu`: devices that are compiled for from afar say `cuda`."""
    return "gpu" if device.platform in ("cuda", "rocm") else device.platform


def platform() -> str:
    """Returns `cpu`, `gpu` or `tpu`: where the traced program will run."""
    return target().platform


def leaves_products_to_cublas() -> bool:
    """Returns whether XLA_FLAGS keep XLA:GPU from products of its own, and from older cuBLAS.

    `gpt2/utils/launch.py` sets the variable, which XLA reads once, when JAX starts.
    """
    flags = dict(flag.partition("=")[::2] for flag in os.environ.get("XLA_FLAGS", "").split())

    def is_off(name):
        return flags.get(name, "").lower() in ("false", "0")

    return is_off("--xla_gpu_enable_triton_gemm") and not is_off("--xla_gpu_enable_cublaslt")
