"""What the machine can reach: the limits that a page measures operations by."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import jax

from gpt2.errors import UserError
from gpt2.telemetry.chips import find_chip
from gpt2.telemetry.throughput import peak_bandwidth, peak_flops, peak_source
from gpt2.utils.files import write_json

_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@dataclasses.dataclass(frozen=True)
class Machine:
    """One device, or all simulated ones of a CPU together.

    Attributes:
        device: its kind.
        source: of the rates: `measured`, a data sheet, or `unknown`.
        flops: FLOP/s of matrix products, by HLO's name for the type of their operands.
        bandwidth: bytes per second of its memory; 0: unknown.
    """

    device: str = "device"
    source: str = "unknown"
    flops: dict[str, float] = dataclasses.field(default_factory=dict)
    bandwidth: float = 0.0

    def limits(self, flops: float, dtype: str, size: float) -> tuple[float, float]:
        """Returns the least seconds that products and memory take; 0 where a rate is unknown."""
        rate = self.flops.get(dtype) or max(self.flops.values(), default=0.0)
        return flops / rate if rate else 0.0, size / self.bandwidth if self.bandwidth else 0.0

    def save(self, path: Path) -> None:
        """Writes all attributes as JSON."""
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: Path) -> "Machine":
        """Reads what `save` wrote.

        Raises:
            UserError: the file is damaged.
        """
        try:
            return cls(**json.loads(path.read_text()))
        except (ValueError, TypeError, OSError):
            raise UserError(
                f"{path} is damaged", "Remove it to read the trace without it"
            ) from None

    @classmethod
    def here(cls, dtypes: Iterable[str]) -> "Machine":
        """Returns what JAX finds here. On a CPU it measures, for up to a second for each type."""
        device = jax.devices()[0]
        # Simulated devices share the CPU, and each may have all of it.
        count = len(jax.local_devices()) if device.platform == "cpu" else 1
        flops = {name: peak_flops(device, _DTYPES[name]) for name in dtypes if name in _DTYPES}
        return cls(
            device.device_kind,
            peak_source(device),
            {name: count * rate for name, rate in flops.items() if rate},
            count * (peak_bandwidth(device) or 0.0),
        )

    @classmethod
    def from_chip(cls, name: str) -> "Machine":
        """Returns what a data sheet says.

        Raises:
            UserError: no row of `gpt2/telemetry/chips.py` has this name.
        """
        chip = find_chip(name)
        if chip is None:
            raise UserError(f"--chip={name} is not known", "For example, give --chip=H100")
        flops = {short: chip.peak_flops(dtype) for short, dtype in _DTYPES.items()}
        return cls(chip.pattern, chip.source, flops, 1e9 * chip.bandwidth)
