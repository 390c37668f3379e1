"""Accelerators by name: what they compute, hold and send, from their makers' pages."""

import csv
import re
from pathlib import Path
from typing import NamedTuple

import jax


class Chip(NamedTuple):
    """One JAX device: its name, TFLOP/s of dense products, and what else is known; 0: unknown."""

    name: str
    pattern: str  # of `device.device_kind`, case ignored
    lacks: str  # the type of 16 bits that runs in float32
    half: float  # bfloat16 and float16 with float32 accumulation
    single: float  # float32 at JAX's default precision: TF32 from Ampere on, bfloat16 passes on TPU
    memory: float  # GB, 10^9 bytes
    near: float  # GB/s, one direction, among the `domain` devices that share NVLink or a torus
    domain: float
    far: float  # GB/s beyond them

    def peak_flops(self, dtype: str) -> float:
        """Returns FLOP/s of matrix products of `dtype` operands."""
        if dtype in ("float32", self.lacks):
            return 1e12 * self.single
        return 1e12 * self.half

    def bandwidth(self, group: tuple[int, ...]) -> float | None:
        """Returns bytes/s that each device of a ring, given by numbers, sends; None if unknown."""
        domain = group[0] // self.domain
        together = sum(device // self.domain == domain for device in group)
        if together == len(group):
            return 1e9 * self.near
        if not self.far:
            return None
        # The adapters of all devices of a domain share the traffic.
        return 1e9 * min(self.near, self.far * together)


def _read_chips() -> list[Chip]:
    """Reads configs/chips.csv, which says where the figures of a row are from.

    They are without sparsity: half of NVIDIA's data sheets. `near` is half of NVLink's or Cloud
    TPU's links, or else the PCIe slot; `far` the network adapter of each GPU in the maker's own
    system. TPU v2, v3 and TPU7: half a chip, which is one JAX device.
    """
    path = Path(__file__).parents[2] / "configs/chips.csv"
    chips = list[Chip]()
    lines = path.read_text("utf-8").splitlines()
    for row in csv.reader(lines[1:]):
        name, pattern, lacks, *numbers, _ = row
        figures = [float(number or 0) for number in numbers]
        chips.append(Chip(name, pattern or name, lacks, *figures))
    return chips


CHIPS = _read_chips()
# Those whose memory and links are known.
BOARDS = {chip.name: chip for chip in CHIPS if chip.memory}


def find_chip(kind: str) -> Chip | None:
    """Returns the row for a `device.device_kind`, or None."""
    if re.search(r"\b(Laptop|MIG|Ti|D)\b", kind):  # not the chip of that name
        return None
    for chip in CHIPS:  # the first row that matches counts
        # Whole names only: an RTX A1000 is not an A100.
        if re.search(rf"\b{chip.pattern}(?!\d)", kind, re.I):
            return chip
    return None


def total_peak_flops(dtype: str) -> float | None:
    """Returns the FLOP/s that all devices reach in products of `dtype`, by data sheets, or None."""
    # No sheet has a peak of float32 that is multiplied at another precision.
    if dtype == "float32" and jax.config.jax_default_matmul_precision:  # type: ignore[attr-defined]
        return None
    chip = find_chip(jax.devices()[0].device_kind)
    if chip is None:
        return None
    return jax.device_count() * chip.peak_flops(dtype)


def board_name(kind: str) -> str | None:
    """Returns the name in `BOARDS` of a `device.device_kind`, or None."""
    chip = find_chip(kind)
    return chip.name if chip and chip.memory else None
