"""What kind of device a program is compiled for."""

import jax


def jit_is_off() -> bool:
    """Returns whether JAX_DISABLE_JIT=1: people then debug with prints, operation by operation."""
    return jax.config.jax_disable_jit  # type: ignore[attr-defined]


def platform_of(device: jax.Device) -> str:
    """Returns `cpu`, `gpu` or `tpu`: devices that are compiled for from afar say `cuda`."""
    return "gpu" if device.platform in ("cuda", "rocm") else device.platform


def is_older(device: jax.Device) -> bool:
    """Returns whether a device, before v4 and Ampere, lacks what fused attention needs."""
    if device.device_kind in ("TPU v2", "TPU v3"):  # Mosaic lacks their 16-bit products
        return True
    capability = getattr(device, "compute_capability", "9")
    # AMD's are names.
    return not capability[0].isdigit() or float(capability) < 8
