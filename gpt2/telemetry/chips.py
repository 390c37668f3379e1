"""Accelerators by name: what they compute, hold and send, from their makers' pages."""

import re
from typing import NamedTuple


class Chip(NamedTuple):
    """Dense matrix-product peaks of one JAX device, in TFLOP/s, and of its memory, in GB/s.

    `half` is bfloat16 and float16 with float32 accumulation; `single` what JAX runs for float32 at
    default precision: TF32 tensor cores on NVIDIA from Ampere on, bfloat16 passes on TPU.
    `bandwidth` is bytes read and written.
    """

    pattern: str  # found, case ignored, in `device.device_kind`; the first row that matches counts
    half: float
    single: float
    bandwidth: float
    source: str
    has_bfloat16: bool = True  # else it runs in float32

    def peak_flops(self, dtype: str) -> float:
        """Returns FLOP/s of matrix products of `dtype` operands."""
        fast = dtype == "float16" or (dtype == "bfloat16" and self.has_bfloat16)
        return 1e12 * (self.half if fast else self.single)


class Board(NamedTuple):
    """Memory of one JAX device in GB (10^9 bytes), and what it sends in GB/s, one direction.

    `near` is the speed among the `domain` devices that share NVLink or a torus. `far` is the speed
    beyond them, or None if the table does not say.
    """

    memory: float
    near: float
    domain: int
    far: float | None = None

    def bandwidth(self, group: tuple[int, ...]) -> float | None:
        """Returns bytes/s that each device of a ring sends, or None if the table does not say.

        Where a ring leaves a domain, the adapters of all its devices there share the traffic, as
        in NCCL. One crossing therefore does not slow the ring to the speed of one adapter.

        Args:
            group: numbers of the devices, those of one domain in sequence.
        """
        together = sum(device // self.domain == group[0] // self.domain for device in group)
        if together == len(group):
            return 1e9 * self.near
        return None if self.far is None else 1e9 * min(self.near, self.far * together)


# Data sheets give NVIDIA's tensor-core figures with sparsity; these are half of those.
_CHIPS = (
    Chip("GB200", 2500.0, 1250.0, 8000.0, "NVIDIA GB200 NVL72 data sheet"),
    Chip("B200", 2250.0, 1125.0, 8000.0, "NVIDIA HGX B200 data sheet"),
    Chip("H200 NVL", 835.5, 417.5, 4800.0, "NVIDIA H200 data sheet"),
    Chip("H200", 989.5, 494.5, 4800.0, "NVIDIA H200 data sheet"),
    Chip("GH200", 989.5, 494.5, 4000.0, "NVIDIA GH200 data sheet"),
    Chip("H100 PCIe", 756.5, 378.0, 2000.0, "NVIDIA H100 data sheet, PCIe"),
    Chip("H100 NVL", 835.5, 417.5, 3900.0, "NVIDIA H100 data sheet, NVL"),
    Chip("H100", 989.5, 494.5, 3350.0, "NVIDIA H100 data sheet, SXM"),
    Chip("A100.*40GB", 312.0, 156.0, 1555.0, "NVIDIA A100 data sheet, 40 GB"),
    Chip("A100", 312.0, 156.0, 2039.0, "NVIDIA A100 data sheet, 80 GB"),
    Chip("A10G", 70.0, 35.0, 600.0, "NVIDIA A10G data sheet"),
    Chip("L40S", 362.0, 183.0, 864.0, "NVIDIA L40S data sheet"),
    Chip("L40", 181.0, 90.5, 864.0, "NVIDIA L40 data sheet"),
    Chip("L4", 121.0, 60.0, 300.0, "NVIDIA L4 data sheet"),
    Chip("T4", 65.0, 8.1, 320.0, "NVIDIA T4 data sheet", has_bfloat16=False),
    Chip("V100-PCIE", 112.0, 14.0, 900.0, "NVIDIA V100 data sheet, PCIe", has_bfloat16=False),
    Chip("V100", 125.0, 15.7, 900.0, "NVIDIA V100 data sheet, SXM2", has_bfloat16=False),
    Chip("RTX 4090", 165.2, 82.6, 1008.0, "NVIDIA Ada architecture white paper"),
    Chip("RTX 3090", 71.0, 35.6, 936.0, "NVIDIA GA102 architecture white paper"),
    Chip("TPU7", 1153.5, 1153.5, 3690.0, "Google Cloud TPU7x page; half a chip, one JAX device"),
    Chip("TPU v6", 918.0, 918.0, 1640.0, "Google Cloud TPU v6e page"),
    Chip("TPU v5 lite", 197.0, 197.0, 819.0, "Google Cloud TPU v5e page"),
    Chip("TPU v5e", 197.0, 197.0, 819.0, "Google Cloud TPU v5e page"),
    Chip("TPU v5", 459.0, 459.0, 2765.0, "Google Cloud TPU v5p page"),
    Chip("TPU v4 lite", 138.0, 138.0, 614.0, "Jouppi et al. 2021, table 1 (TPU v4i)"),
    Chip("TPU v4", 275.0, 275.0, 1228.0, "Google Cloud TPU v4 page"),
    Chip("TPU v3", 61.5, 61.5, 450.0, "Google Cloud TPU v3 page; half a chip, one JAX device"),
    Chip("TPU v2", 23.0, 23.0, 350.0, "Jouppi et al. 2020, table 1; half a chip, one JAX device"),
)

# From the same pages. `near` is half of what they give for NVLink, or for Cloud TPU's links
# between chips, in both directions; `far` the network adapter that each GPU has in the maker's own
# system (DGX A100, H100, H200, B200; GB200 NVL72). TPU v2 and v3: Jouppi et al. 2020, table 1, for
# half a chip. Cards without NVLink: the speed of their PCIe slot.
BOARDS = {
    "GB200": Board(memory=186, near=900, domain=72, far=50),
    "B200": Board(memory=180, near=900, domain=8, far=50),
    "H200": Board(memory=141, near=450, domain=8, far=50),
    "H100": Board(memory=80, near=450, domain=8, far=50),
    "A100": Board(memory=80, near=300, domain=8, far=25),
    "A100 40GB": Board(memory=40, near=300, domain=8, far=25),
    "TPU7": Board(memory=96, near=300, domain=18432),
    "TPU v6e": Board(memory=32, near=400, domain=256),
    "TPU v5e": Board(memory=16, near=200, domain=256),
    "TPU v5p": Board(memory=95, near=600, domain=8960),
    "TPU v4": Board(memory=32, near=300, domain=4096),
    "TPU v3": Board(memory=16, near=164, domain=2048),
    "TPU v2": Board(memory=8, near=124, domain=512),
    "L4": Board(memory=24, near=32, domain=8),
    "A10G": Board(memory=24, near=32, domain=8),
    "RTX 4090": Board(memory=24, near=32, domain=8),
    "T4": Board(memory=16, near=16, domain=8),
}

# The same by what people type: h100, v5e, 4090.
BOARD_NAMES = {re.sub("^(tpu|rtx) ", "", name.lower()).replace(" ", "-"): name for name in BOARDS}


def find_chip(kind: str) -> Chip | None:
    """Returns the row for a `device.device_kind`, or None."""
    if re.search(r"\b(Laptop|MIG)\b", kind):  # slower than the chip of that name
        return None
    # Whole names only: an RTX A1000 is not an A100.
    return next((c for c in _CHIPS if re.search(rf"\b{c.pattern}(?!\d)", kind, re.I)), None)


def board_name(kind: str) -> str | None:
    """Returns the name in `BOARDS` of a `device.device_kind`, or None."""
    chip = find_chip(kind)
    names = (name for name in BOARDS if chip and _same(chip, find_chip(name)))
    return next(names, None)


def _same(chip: Chip, other: Chip | None) -> bool:
    """Whether two rows are of one chip, which may have two names."""
    return other is not None and chip._replace(pattern="") == other._replace(pattern="")
