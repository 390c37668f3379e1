"""The platform that a program is traced for: what decides between forms of one operation."""

import contextlib
import contextvars
import os
from collections.abc import Iterator

import jax

_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)
_splits: contextvars.ContextVar[bool] = contextvars.ContextVar("splits", default=False)
_several: contextvars.ContextVar[bool] = contextvars.ContextVar("several", default=False)


@contextlib.contextmanager
def traced_for(
    device: jax.Device, *, splits: bool = False, several: bool = False
) -> Iterator[None]:
    """Makes `platform` that of `device` for what is traced inside.

    Args:
        device: one of those that will run the program.
        splits: whether XLA's partitioner splits axes of activations over devices.
        several: whether several devices run the program together.
    """
    tokens = _platform.set(platform_of(device)), _splits.set(splits), _several.set(several)
    try:
        yield
    finally:
        _platform.reset(tokens[0])
        _splits.reset(tokens[1])
        _several.reset(tokens[2])


def platform_of(device: jax.Device) -> str:
    """Returns `cpu`, `gpu` or `tpu`: devices that are compiled for from afar say `cuda`."""
    return "gpu" if device.platform in ("cuda", "rocm") else device.platform


def platform() -> str:
    """Returns `cpu`, `gpu` or `tpu`: where the traced program will run.

    A backend sets it. Outside of a backend it is where JAX runs by default.
    """
    return _platform.get() or jax.default_backend()


def splits_axes() -> bool:
    """Returns whether XLA's partitioner splits axes of the traced program's activations."""
    return _splits.get()


def on_several_devices() -> bool:
    """Returns whether several devices run the traced program together."""
    return _several.get()


def leaves_products_to_cublas() -> bool:
    """Returns whether XLA_FLAGS keep XLA:GPU from products of its own, and from older cuBLAS.

    `gpt2/launch.py` sets the variable, which XLA reads once, when JAX starts.
    """
    flags = dict(flag.partition("=")[::2] for flag in os.environ.get("XLA_FLAGS", "").split())

    def is_off(name):
        return flags.get(name, "").lower() in ("false", "0")

    return is_off("--xla_gpu_enable_triton_gemm") and not is_off("--xla_gpu_enable_cublaslt")
