"""The kind of device that a program is compiled for."""

import jax


def jit_is_off() -> bool:
    """Return whether JAX_DISABLE_JIT=1 is set, to debug operation by operation."""
    return jax.config.jax_disable_jit  # type: ignore[attr-defined]


def platform_of(device: jax.Device) -> str:
    """Return `cpu`, `gpu` or `tpu`; a device that exists only for its compiler reports `cuda`."""
    return "gpu" if device.platform in ("cuda", "rocm") else device.platform
