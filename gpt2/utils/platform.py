"""The kind of device that a program is compiled for."""

import os

import jax

from gpt2.errors import UserError


def jit_is_off() -> bool:
    """Return whether JAX_DISABLE_JIT=1 is set, which runs operations one by one for debugging."""
    return jax.config.jax_disable_jit  # type: ignore[attr-defined]


def platform_of(device: jax.Device) -> str:
    """Return `cpu`, `gpu`, `tpu`, or JAX's name of another platform.

    The function is needed because `device.platform` is `cuda` or `rocm` instead of `gpu` for the
    devices of a topology description, for which JAX can compile programs but not run them.
    """
    return "gpu" if device.platform in ("cuda", "rocm") else device.platform


def host_device() -> jax.Device:
    """Return the CPU as a JAX device, for work that must not use accelerators.

    Raise a UserError if the user has excluded the CPU with JAX_PLATFORMS.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        raise UserError(
            f"JAX_PLATFORMS={platforms} does not contain cpu",
            f"Set JAX_PLATFORMS={platforms},cpu",
        ) from error
