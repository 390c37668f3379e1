"""The FLOP/s that the devices of a run can reach."""

import jax

from gpt2.telemetry.chips import find_chip


def total_peak_flops(dtype: str) -> float | None:
    """Returns the FLOP/s that all devices reach in products of `dtype`, by data sheets, or None."""
    chips = [find_chip(device.device_kind) for device in jax.devices()]
    return sum(c.peak_flops(dtype) for c in chips if c) if all(chips) else None
