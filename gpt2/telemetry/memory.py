"""What the devices hold, by their own account."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
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


def device_memory(device: Any) -> int | None:
    """Returns the bytes that programs on a device may take, None if it does not tell.

    The devices of a CPU share the memory of their host, or what its container allows.
    """
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory // jax.local_device_count()
