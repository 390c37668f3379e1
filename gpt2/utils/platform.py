"""The kind of device that a program is compiled for."""

import jax


def jit_is_off() -> bool:
    """Return whether JAX_DISABLE_JIT=1 is set, to debug operation by operation."""
    return jax.config.jax_disable_jit  # type: ignore[attr-defined]


def platform_of(device: jax.Device) -> str:
    """Return `cpu`, `gpu` or `tpu`; a device that exists only for its compiler reports `cuda`."""
    return "gpu" if device.platform in ("cuda", "rocm") else device.platform


def is_older(device: jax.Device) -> bool:
    """Return whether a device is older than TPU v4 or Ampere, too old for fused attention."""
    if device.device_kind in (
        "TPU v2",
        "TPU v3",
    ):  # Mosaic has no 16-bit products for them
        return True
    capability = getattr(device, "compute_capability", "9")
    # AMD's capabilities are names.
    return not capability[0].isdigit() or float(capability) < 8
