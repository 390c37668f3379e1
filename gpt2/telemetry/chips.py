"""Accelerators by name: what they compute, hold and send, from their makers' pages."""

import re
from typing import NamedTuple

import jax


class Chip(NamedTuple):
    """One JAX device: its name, TFLOP/s of dense products, and what else is known."""

    name: str
    half: float  # bfloat16 and float16 with float32 accumulation
    single: float  # float32 at JAX's default precision: TF32 from Ampere on, bfloat16 passes on TPU
    memory: float = 0  # GB, 10^9 bytes
    near: float = 0  # GB/s, one direction, among the `domain` devices that share NVLink or a torus
    domain: int = 0
    far: float | None = None  # GB/s beyond them
    pattern: str = ""  # of `device.device_kind`, case ignored; empty: the name
    has_bfloat16: bool = True  # else it runs in float32

    def peak_flops(self, dtype: str) -> float:
        """Returns FLOP/s of matrix products of `dtype` operands."""
        fast = dtype == "float16" or (dtype == "bfloat16" and self.has_bfloat16)
        if fast:
            return 1e12 * self.half
        return 1e12 * self.single

    def bandwidth(self, group: tuple[int, ...]) -> float | None:
        """Returns bytes/s that each device of a ring, given by numbers, sends; None if unknown."""
        domain = group[0] // self.domain
        together = sum(device // self.domain == domain for device in group)
        if together == len(group):
            return 1e9 * self.near
        if self.far is None:
            return None
        # The adapters of all devices of a domain share the traffic.
        return 1e9 * min(self.near, self.far * together)


# The first row that matches counts; behind it stands where its figures are from. Without sparsity:
# half of NVIDIA's data sheets. `near` is half of NVLink's or Cloud TPU's links, or else the PCIe
# slot; `far` the network adapter of each GPU in the maker's own system. TPU v2, v3 and TPU7: half a
# chip, which is one JAX device.
CHIPS = (
    Chip("GB200", 2500.0, 1250.0, 186, 900, 72, 50),  # NVIDIA GB200 NVL72 data sheet
    Chip("B200", 2250.0, 1125.0, 180, 900, 8, 50),  # NVIDIA HGX B200 data sheet
    Chip("H200 NVL", 835.5, 417.5),  # NVIDIA H200 data sheet
    Chip("H200", 989.5, 494.5, 141, 450, 8, 50),  # NVIDIA H200 data sheet
    Chip("GH200", 989.5, 494.5),  # NVIDIA GH200 data sheet
    Chip("H100 PCIe", 756.5, 378.0),  # NVIDIA H100 data sheet, PCIe
    Chip("H100 NVL", 835.5, 417.5),  # NVIDIA H100 data sheet, NVL
    Chip("H100", 989.5, 494.5, 80, 450, 8, 50),  # NVIDIA H100 data sheet, SXM
    # NVIDIA A100 data sheet
    Chip("A100 40GB", 312.0, 156.0, 40, 300, 8, 25, "A100.*40GB"),
    Chip("A100", 312.0, 156.0, 80, 300, 8, 25),  # NVIDIA A100 data sheet
    Chip("A10G", 70.0, 35.0, 24, 32, 8),  # NVIDIA A10G data sheet
    Chip("L40S", 362.0, 183.0),  # NVIDIA L40S data sheet
    Chip("L40", 181.0, 90.5),  # NVIDIA L40 data sheet
    Chip("L4", 121.0, 60.0, 24, 32, 8),  # NVIDIA L4 data sheet
    Chip("T4", 65.0, 8.1, 16, 16, 8, has_bfloat16=False),  # NVIDIA T4 data sheet
    Chip("V100-PCIE", 112.0, 14.0, has_bfloat16=False),  # NVIDIA V100 data sheet, PCIe
    Chip("V100", 125.0, 15.7, has_bfloat16=False),  # NVIDIA V100 data sheet, SXM2
    Chip("RTX 4090", 165.2, 82.6, 24, 32, 8),  # NVIDIA Ada architecture white paper
    Chip("RTX 3090", 71.0, 35.6),  # NVIDIA GA102 architecture white paper
    Chip("TPU7", 1153.5, 1153.5, 96, 300, 18432),  # Google Cloud TPU7x page
    # Google Cloud TPU v6e page
    Chip("TPU v6e", 918.0, 918.0, 32, 400, 256, None, "TPU v6"),
    # Google Cloud TPU v5e page
    Chip("TPU v5e", 197.0, 197.0, 16, 200, 256, None, "TPU v5(e| l)"),
    # Google Cloud TPU v5p page
    Chip("TPU v5p", 459.0, 459.0, 95, 600, 8960, None, "TPU v5"),
    Chip("TPU v4", 275.0, 275.0, 32, 300, 4096),  # Google Cloud TPU v4 page
    Chip("TPU v3", 61.5, 61.5, 16, 164, 2048),  # Google Cloud TPU v3 page
    Chip("TPU v2", 23.0, 23.0, 8, 124, 512),  # Jouppi et al. 2020, table 1
)
# Those whose memory and links are known.
BOARDS = {chip.name: chip for chip in CHIPS if chip.memory}


def find_chip(kind: str) -> Chip | None:
    """Returns the row for a `device.device_kind`, or None."""
    if re.search(r"\b(Laptop|MIG|Ti|D)\b", kind):  # not the chip of that name
        return None
    for chip in CHIPS:
        name = chip.pattern or chip.name
        # Whole names only: an RTX A1000 is not an A100.
        if re.search(rf"\b{name}(?!\d)", kind, re.I):
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
