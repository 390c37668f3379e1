"""A table of accelerators: FLOP/s, memory and bandwidth, from the manufacturers' data sheets."""

import csv
import re
from pathlib import Path
from typing import NamedTuple

import jax


class Chip(NamedTuple):
    """Numbers from the data sheet of an accelerator, for one JAX device. Unknown numbers are 0.

    Attributes:
        name: name of the chip.
        pattern: regular expression for `device.device_kind`; case is ignored.
        emulated: the 16-bit dtype without hardware support, whose products run at the speed of
            float32; empty if the chip supports both 16-bit dtypes.
        half: TFLOP/s of dense products of bfloat16 or float16, accumulated in float32.
        single: TFLOP/s of float32 products at JAX's default precision, which is TF32 on NVIDIA's
            chips since Ampere, and bfloat16 on TPUs.
        memory: memory in GB (10^9 bytes).
        near: bandwidth of one device to others in its domain, in GB/s in one direction.
        domain: the number of devices that share NVLink, a torus, or the PCIe of one machine.
        far: bandwidth of one device to others outside its domain, in GB/s in one direction.
    """

    name: str
    pattern: str
    emulated: str
    half: float
    single: float
    memory: float
    near: float
    domain: float
    far: float

    def peak_flops(self, dtype: str) -> float:
        """Return the peak FLOP/s of matrix products whose operands have this dtype."""
        if dtype in ("float32", self.emulated):
            return 1e12 * self.single
        return 1e12 * self.half

    def bandwidth(self, group: tuple[int, ...]) -> float | None:
        """Return the bytes/s that each device in a ring can send to its neighbour.

        `group` lists the indices of the ring's devices. The result is None if the devices are in
        several domains, and the bandwidth between domains is unknown.
        """
        domain = group[0] // self.domain
        neighbours = sum(device // self.domain == domain for device in group)
        if neighbours == len(group):
            return 1e9 * self.near
        if not self.far:
            return None
        # In traffic between domains, such as NVLink domains, all devices of the ring that are in a
        # domain use their network adapters at the same time, so the bandwidths add up.
        return 1e9 * min(self.near, self.far * neighbours)


def _read_chips() -> list[Chip]:
    """Return the rows of configs/chips.csv, which names the source of each row.

    FLOP/s are without sparsity. If NVIDIA states only FLOP/s with sparsity, the table has half of
    that number. `near` is half the bandwidth of NVLink or of Cloud TPU's links, because their data
    sheets count both directions; for chips without such links, it is the bandwidth of the PCIe
    slot. `far` is the bandwidth of each GPU's network adapter in the manufacturer's own system. For
    TPU v2, v3 and TPU7, the numbers are for half a chip, which is one JAX device.
    """
    path = Path(__file__).parents[2] / "configs/chips.csv"
    chips = list[Chip]()
    lines = path.read_text("utf-8").splitlines()
    for row in csv.reader(lines[1:]):
        name, pattern, emulated, *numbers, _ = row
        figures = [float(number or 0) for number in numbers]
        chips.append(Chip(name, pattern or name, emulated, *figures))
    return chips


CHIPS = _read_chips()
# The chips whose memory and fastest link are known.
BOARDS = {chip.name: chip for chip in CHIPS if chip.memory}


def find_chip(kind: str) -> Chip | None:
    """Return the row of the table for a device, or None if the table does not contain its chip.

    `kind` is JAX's `device.device_kind`. If several rows match, return the first.
    """
    # Chips with these suffixes have another speed than the chip whose name they contain.
    if re.search(r"\b(Laptop|MIG|Ti|D)\b", kind):
        return None
    for chip in CHIPS:
        # No digit may follow the match, because an RTX A1000 is not an A100.
        if re.search(rf"\b{chip.pattern}(?!\d)", kind, re.I):
            return chip
    return None


def total_peak_flops(dtype: str) -> float | None:
    """Return the sum of the peak FLOP/s of all devices, for matrix products of `dtype`.

    The devices of all processes count. Return None if the peak is unknown.
    """
    # Data sheets list no peak for float32 at a precision other than JAX's default.
    if dtype == "float32" and jax.config.jax_default_matmul_precision:  # type: ignore[attr-defined]
        return None
    chip = find_chip(jax.devices()[0].device_kind)
    if chip is None:
        return None
    return jax.device_count() * chip.peak_flops(dtype)


def board_name(kind: str) -> str | None:
    """Return the key in `BOARDS` for a device, or None if `BOARDS` does not contain its chip.

    `kind` is JAX's `device.device_kind`.
    """
    chip = find_chip(kind)
    return chip.name if chip and chip.memory else None
