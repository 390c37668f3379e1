"""A table of accelerators: FLOP/s, memory and bandwidth, from their makers' pages."""

import csv
import re
from pathlib import Path
from typing import NamedTuple

import jax


class Chip(NamedTuple):
    """The data sheet of an accelerator, as far as JAX sees one device; 0 where a figure is unknown.

    Attributes:
        name: name of the chip.
        pattern: regular expression for `device.device_kind`, case ignored.
        emulated: the 16-bit type that the chip does not have, and computes at the speed of float32.
        half: TFLOP/s of dense products of bfloat16 or float16, accumulated in float32.
        single: TFLOP/s of float32 at JAX's default precision: TF32 on NVIDIA's chips from Ampere
            on, bfloat16 passes on TPUs.
        memory: GB (10^9 bytes).
        near: GB/s in one direction between devices that share NVLink or a torus.
        domain: the number of devices that share NVLink or a torus.
        far: GB/s in one direction to devices outside the domain.
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
        """Return FLOP/s of matrix products of `dtype` operands."""
        if dtype in ("float32", self.emulated):
            return 1e12 * self.single
        return 1e12 * self.half

    def bandwidth(self, group: tuple[int, ...]) -> float | None:
        """Return the bytes/s that each device of a ring sends, or None if that is unknown.

        `group` lists the indices of the ring's devices.
        """
        domain = group[0] // self.domain
        neighbours = sum(device // self.domain == domain for device in group)
        if neighbours == len(group):
            return 1e9 * self.near
        if not self.far:
            return None
        # The network adapters of all devices of a domain share the traffic.
        return 1e9 * min(self.near, self.far * neighbours)


def _read_chips() -> list[Chip]:
    """Read configs/chips.csv, which names the source of each row.

    FLOP/s are without sparsity, which is half of what NVIDIA's data sheets say. `near` is half of
    the bandwidth of NVLink or of Cloud TPU's links, or that of the PCIe slot. `far` is that of the
    network adapter of each GPU in the maker's own system. For TPU v2, v3 and TPU7 the figures are
    those of half a chip, which is one JAX device.
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
# The chips whose memory and links are known.
BOARDS = {chip.name: chip for chip in CHIPS if chip.memory}


def find_chip(kind: str) -> Chip | None:
    """Return the chip of a `device.device_kind`, or None if it is unknown.

    If several rows match, the first one counts.
    """
    # These are slower than the chip whose name they contain.
    if re.search(r"\b(Laptop|MIG|Ti|D)\b", kind):
        return None
    for chip in CHIPS:
        # A digit may not follow: an RTX A1000 is not an A100.
        if re.search(rf"\b{chip.pattern}(?!\d)", kind, re.I):
            return chip
    return None


def total_peak_flops(dtype: str) -> float | None:
    """Return the peak FLOP/s of all devices for products of `dtype`, or None if it is unknown."""
    # Data sheets have no peak for float32 at another precision than JAX's default.
    if dtype == "float32" and jax.config.jax_default_matmul_precision:  # type: ignore[attr-defined]
        return None
    chip = find_chip(jax.devices()[0].device_kind)
    if chip is None:
        return None
    return jax.device_count() * chip.peak_flops(dtype)


def board_name(kind: str) -> str | None:
    """Return the key in `BOARDS` for a `device.device_kind`, or None."""
    chip = find_chip(kind)
    return chip.name if chip and chip.memory else None
