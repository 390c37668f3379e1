"""The step of train.py itself, from the metrics of a short run.

    python -m gpt2.benchmark.suite.loop --config=configs/gpt2_124m.py ...

trains in a temporary directory, and prints JSON.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import configs
from gpt2.telemetry.metrics import read_metrics

_WARM_UP = 10  # logged lines that do not count, at most a third of all


def describe_steps(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a run's figures from its logged lines; the first lines do not count.

    `turns` holds the mean step of each line in seconds.
    """
    logged = [record for record in records if "perf/step_seconds" in record]
    steady = logged[min(_WARM_UP, len(logged) // 3) :]
    turns = [record["perf/step_seconds"] for record in steady]

    def middle(name: str) -> float | None:
        values = [record[name] for record in steady if name in record]
        return statistics.median(values) if values else None

    return {
        "turns": turns,
        "step_seconds": statistics.median(turns),
        "tokens_per_second": middle("perf/tokens_per_second"),
        "mfu": middle("perf/mfu"),
        "peak_bytes": middle("perf/peak_memory_bytes"),
        "data_wait_seconds": middle("perf/data_wait_seconds"),
        "first_loss": logged[0]["train/loss"],
        "last_loss": logged[-1]["train/loss"],
    }


def main() -> int:
    """Trains, prints the figures, and returns the exit code of train.py."""
    train = Path(configs.__file__).parents[1] / "train.py"
    with tempfile.TemporaryDirectory() as directory:
        run, data = Path(directory) / "run", Path(directory) / "data"
        command = [sys.executable, str(train), *sys.argv[1:]]
        command += [f"--workdir={run}", f"--config.data.data_dir={data}"]
        code = subprocess.run(command, stdout=sys.stderr).returncode
        if code == 0:
            results = {"train.py": describe_steps(read_metrics(run / "metrics.jsonl"))}
            print(json.dumps({"results": results}, indent=2))
    return code


if __name__ == "__main__":
    sys.exit(main())
