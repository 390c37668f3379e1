"""Measure a GPU with one command, without a network.

The suite consists of commands, each with a time limit, so that a failure costs no more than its own
part. The output folder receives results.jsonl with a row for each result, report.md, the error
output of each part, and target.txtpb, XLA's description of the GPU for `gpt2.lab.plan --chips`.
Finished parts do not run again.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gpt2.lab.benchmark.tables import Row, table
from gpt2.telemetry.metrics import read_metrics
from gpt2.utils import launch
from gpt2.utils.files import write_text


class Part(NamedTuple):
    """Arguments for Python, and a time limit. A run of train.py has the part's name."""

    name: str
    seconds: float
    command: tuple[str, ...]


def make_parts(output: Path) -> list[Part]:
    """Return the parts in the order in which they run, the most important first."""
    root = Path(__file__).parents[3]

    def options(size: str, layers: int, rows: int) -> tuple[str, ...]:
        return (
            f"--config={root}/configs/gpt2_{size}.py",
            "--config.train.accumulate_steps=1",
            f"--config.data.batch_size={rows}",
            "--config.memory.remat=none",
            # Parameters of layers are stacked, and the loop over layers is unrolled.
            "--config.memory.scan_layers=True",
            f"--config.memory.scan_unroll={layers}",
        )

    def run(name: str, *more: str) -> tuple[str, ...]:
        return (f"{root}/train.py", f"--workdir={output / name}", *more)

    step = ("-m", "gpt2.lab.benchmark", "train", "--json")
    small = options("124m", 12, 32)
    loop = (
        *small,
        "--config.data.corpus=pystdlib",
        "--config.train.num_steps=100",
        "--config.train.eval_batches=4",
        "--config.train.eval_every=0",
        "--config.logging.profile_start=50",
        "--config.logging.profile_steps=5",
    )
    characters = f"--config={root}/configs/shakespeare_char.py"  # reads input.txt
    peers: tuple[str, ...] = ()
    if importlib.util.find_spec("torch"):
        peers = ("--peers=torch_compile",)
    forms = ("--vary=precision.logits=bfloat16", "--vary=data.document_mask=True")
    return [  # a quarter of an hour in all
        Part("machine", 30, ("-m", "gpt2.lab.benchmark.machine", str(output))),
        Part("124m-32", 120, (*step, *small, *peers)),
        Part("1558m", 150, (*step, *options("1558m", 48, 16))),
        Part("forms", 150, (*step, *small, *forms)),
        Part("loop", 120, run("loop", *loop)),
        Part("profile", 30, ("-m", "gpt2.lab.profile", str(output / "loop"))),
        # The same run again: equal losses mean that it is deterministic.
        Part("again", 60, run("again", *loop)),
        # The only published result that fits into the time: a loss of 1.4697 (nanoGPT).
        Part("characters", 130, run("characters", characters)),
    ]


def run_suite(output: Path, overrides: Mapping[str, object]) -> bool:
    """Run the parts with `overrides`, options by dotted name; return whether all succeeded."""
    results = output / "results.jsonl"
    logs = output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # SIGTERM also has to end the part that runs, which holds the device.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows: list[Row] = []
    if results.exists():
        rows = list(map(json.loads, results.open()))
    done = {row["part"] for row in rows if row.get("status") == "done"}
    for name, seconds, command in make_parts(output):
        if name in done:
            continue
        if name not in ("machine", "profile"):  # which have no config
            command += tuple(f"--config.{key}={overrides[key]}" for key in overrides)
        found, status = run_command(command, seconds, logs / f"{name}.err")
        found += describe_run(output / name)
        rows = [row for row in rows if row["part"] != name]
        for row in [*found, {"status": status}]:
            rows.append({"part": name, **row})
        write_text(results, "".join(f"{json.dumps(row)}\n" for row in rows))
        write_text(output / "report.md", report(rows))
        print(f"{name}: {status}", flush=True)
    return {row.get("status", "done") for row in rows} == {"done"}


def run_command(
    command: Sequence[str], limit: float, log: Path
) -> tuple[list[Row], str]:
    """Run Python, and return the rows that it prints and its status: `done`, or why it failed.

    Its child processes end with it, because a process that lives on holds the GPU's memory.
    """
    status = "done"
    with log.open("wb") as errors, tempfile.TemporaryFile("w+") as answers:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=launch.environment_to_measure(),
            stdin=subprocess.DEVNULL,
            stdout=answers,
            stderr=errors,
            start_new_session=True,
        )
        try:
            if process.wait(limit):
                status = f"failed: see {log.parent.name}/{log.name}"
        except subprocess.TimeoutExpired:
            status = f"no end within {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answers.seek(0)
        # Other lines come from libraries.
        lines = [line for line in answers if line.startswith("{")]
    return [json.loads(line) for line in lines], status


def describe_run(workdir: Path) -> list[Row]:
    """Return a row with the last speed that a run logged, or nothing."""
    rows: list[Row] = []
    for record in read_metrics(workdir / "metrics.jsonl"):
        if "perf/step_seconds" in record:
            rows = [{name.removeprefix("perf/"): record[name] for name in record}]
    return [row | {"name": "train.py"} for row in rows]


def report(rows: list[Row]) -> str:
    """Return report.md: the figures of the machine, and a table of the results."""
    lines = ["# Benchmark", ""]
    others: list[Row] = []
    for row in rows:
        if "name" in row:
            others.append(row)
        elif "status" not in row:  # the machine's
            lines += [f"- {name}: {row[name]}" for name in row]
        elif row["status"] != "done":
            others.append(row | {"name": row["status"]})
    return "\n".join([*lines, "", "```", table(others), "```", ""])
