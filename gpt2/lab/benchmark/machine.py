"""Tells devices and versions in a line of JSON; of a GPU, writes target.txtpb into a folder.

python -m gpt2.lab.benchmark.machine DIR
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
from jaxlib import xla_client

from gpt2.utils.code import describe_start
from gpt2.utils.files import write_text


def main(folder: Path) -> None:
    """Prints the line, and writes the file."""
    device = jax.devices()[0]
    row = describe_start(0)
    row["flags"] = os.environ.get("XLA_FLAGS")
    if device.platform == "gpu":
        asked = "name,driver_version,memory.total,power.limit,clocks.max.sm"
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True)
        row["driver"] = told.stdout.strip()
        target = xla_client.get_topology_for_devices([device]).target_config
        write_text(folder / "target.txtpb", target)
    print(json.dumps(row))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
