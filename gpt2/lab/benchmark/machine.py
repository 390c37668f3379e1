"""Print devices and versions as a line of JSON, and write XLA's GPU description to target.txtpb.

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
    """Print devices and versions as JSON and, on a GPU, write target.txtpb to `folder`."""
    device = jax.devices()[0]
    row = describe_start(0)
    row["flags"] = os.environ.get("XLA_FLAGS")
    if device.platform == "gpu":
        fields = "name,driver_version,memory.total,power.limit,clocks.max.sm"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True)
        row["driver"] = answer.stdout.strip()
        target = xla_client.get_topology_for_devices([device]).target_config
        write_text(folder / "target.txtpb", target)
    print(json.dumps(row))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
