"""What the devices hold, by their own account."""

from collections.abc import Iterable
from typing import Any

import jax


def peak_memory(devices: Iterable[Any] | None = None) -> dict[str, float]:
    """Returns the most memory that one device has held so far.

    Args:
        devices: with `memory_stats`; all of this process, if not given.

    Returns:
        `perf/peak_memory_bytes`; nothing if the devices do not tell, as CPUs do not.
    """
    stats = [device.memory_stats() or {} for device in devices or jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return {"perf/peak_memory_bytes": float(max(peaks))} if peaks else {}
