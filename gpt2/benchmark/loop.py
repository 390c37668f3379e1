"""The step of train.py itself, from the metrics of a short run."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.telemetry.metrics import read_metrics


def measure_loop(config: Config, steps: int, output: Path | None) -> dict[str, Any]:
    """Trains some steps by train.py, and returns a row; validation and checkpoint at the end alone.

    Whatever else the config says holds, a trace included. `output` keeps the run, if given.
    """
    train = Path(__file__).parents[2] / "train.py"
    limits = dict(num_steps=steps, eval_every=0, checkpoint_every=0, eval_batches=4)
    with tempfile.TemporaryDirectory() as temporary:
        folder, record = output or Path(temporary) / "run", Path(temporary) / "config.json"
        record.write_text(json.dumps(config.to_dict()))
        command = [sys.executable, str(train), f"--config={record}", f"--workdir={folder}"]
        command += [f"--config.train.{name}={value}" for name, value in limits.items()]
        if code := subprocess.run(command, stdout=sys.stderr).returncode:
            sys.exit(code)  # it has told why
        return describe_steps(read_metrics(folder / "metrics.jsonl"))


def describe_steps(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns figures of a run: medians over its logged lines, without the first third."""
    logged = [record for record in records if "perf/step_seconds" in record]
    steady = logged[len(logged) // 3 :]
    medians = {
        name.removeprefix("perf/"): statistics.median(line[name] for line in steady if name in line)
        for name in {name for line in steady for name in line if name.startswith("perf/")}
    }
    turns = [record["perf/step_seconds"] for record in steady]  # means of lines
    peak = medians.pop("peak_memory_bytes", None)  # a CPU does not tell
    return {"name": "train.py", "turns": turns, "peak_bytes": peak} | medians
