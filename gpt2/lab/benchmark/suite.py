"""Measure a GPU with one command, without a network.

The suite consists of parts. Each part is a command with a time limit, so that the failure of one
part does not affect the others. The suite writes the following to the output folder: results.jsonl
with a row for each result, report.md, the error output of each part, and target.txtpb. The file
target.txtpb is XLA's description of the GPU, for `gpt2.lab.plan --chips`. Parts that have succeeded
are not run again.
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

from gpt2.errors import UserError
from gpt2.lab.benchmark.tables import Row, table
from gpt2.telemetry.metrics import read_metrics
from gpt2.utils import launch
from gpt2.utils.files import write_text


class Part(NamedTuple):
    """A part of the suite: the arguments for Python, and a time limit in seconds.

    If the part is a run of train.py, its workdir has the part's name.
    """

    name: str
    seconds: float
    command: tuple[str, ...]


def make_parts(output: Path) -> list[Part]:
    """Return the parts (commands) of the suite in the order in which they run.

    The most important parts come first. `output` is the folder for the results.
    """
    root = Path(__file__).parents[3]

    def options(size: str, layers: int, rows: int) -> tuple[str, ...]:
        return (
            f"--config={root}/configs/gpt2_{size}.py",
            "--config.train.accumulate_steps=1",
            f"--config.data.batch_size={rows}",
            "--config.memory.remat=none",
            # These two options stack the parameters of layers and unroll the loop over layers.
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
    # This config reads input.txt in the current folder.
    characters = f"--config={root}/configs/shakespeare_char.py"
    peers: tuple[str, ...] = ()
    if importlib.util.find_spec("torch"):
        peers = ("--peers=torch_compile",)
    forms = ("--vary=precision.logits=bfloat16", "--vary=data.document_mask=True")
    return [  # all parts together take a quarter of an hour
        Part("machine", 30, ("-m", "gpt2.lab.benchmark.machine", str(output))),
        Part("124m-32", 120, (*step, *small, *peers)),
        Part("1558m", 150, (*step, *options("1558m", 48, 16))),
        Part("forms", 150, (*step, *small, *forms)),
        Part("loop", 120, run("loop", *loop)),
        Part("profile", 30, ("-m", "gpt2.lab.profile", str(output / "loop"))),
        # This repeats the run `loop`. If the losses are equal, the run is deterministic.
        Part("again", 60, run("again", *loop)),
        # nanoGPT's loss of 1.4697 is the only published result that the suite has time to
        # reproduce.
        Part("characters", 130, run("characters", characters)),
    ]


def run_suite(output: Path, overrides: Mapping[str, object]) -> bool:
    """Run all parts that have not succeeded before, and return whether all parts have succeeded.

    `output` is the folder for the results. `overrides` maps dotted names of options to values,
    which are set in every part with a config. Raise a UserError if `output` contains results with
    other options.
    """
    results = output / "results.jsonl"
    logs = output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # SIGTERM must also end the part that is running, because it holds the device.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows: list[Row] = []
    if results.exists():
        rows = list(map(json.loads, results.open()))
    options = dict(overrides)
    for row in rows:
        if row.get("options", options) != options:
            others = " ".join(
                f"{name}={row['options'][name]}" for name in row["options"]
            )
            raise UserError(
                f"{output} contains results with other options: {others or 'none'}",
                "Use another --output, or the same options",
            )
    done = {row["part"] for row in rows if row.get("status") == "done"}
    for name, seconds, command in make_parts(output):
        if name in done:
            continue
        if name not in ("machine", "profile"):  # these two parts have no config
            command += tuple(f"--config.{key}={overrides[key]}" for key in overrides)
        found, status = run_command(command, seconds, logs / f"{name}.err")
        found += describe_run(output / name)
        rows = [row for row in rows if row["part"] != name]
        for row in [*found, {"status": status, "options": options}]:
            rows.append({"part": name, **row})
        write_text(results, "".join(f"{json.dumps(row)}\n" for row in rows))
        write_text(output / "report.md", report(rows))
        print(f"{name}: {status}", flush=True)
    return {row.get("status", "done") for row in rows} == {"done"}


def run_command(
    command: Sequence[str], limit: float, log: Path
) -> tuple[list[Row], str]:
    """Run Python with the arguments in `command`. Return the rows that it printed, and a status.

    A row is a line of JSON. The status is `done`, or the reason why the command failed, for example
    because it did not end within `limit` seconds. The error output is written to `log`. The
    command's child processes are killed at the end, because they would hold the GPU's memory.
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
            status = f"did not end within {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answers.seek(0)
        # Results begin with a brace. Other lines are progress lines of train.py, or come from
        # libraries.
        lines = [line for line in answers if line.startswith("{")]
    return [json.loads(line) for line in lines], status


def describe_run(workdir: Path) -> list[Row]:
    """Return a list with the last log line that contains the time of a step, as a row of results.

    The list is empty if the run has not logged a time.
    """
    rows: list[Row] = []
    for record in read_metrics(workdir / "metrics.jsonl"):
        if "perf/step_seconds" in record:
            rows = [{name.removeprefix("perf/"): record[name] for name in record}]
    return [row | {"name": "train.py"} for row in rows]


def report(rows: list[Row]) -> str:
    """Return the content of report.md: facts about the machine, and a table of `rows`."""
    lines = ["# Benchmark", ""]
    others: list[Row] = []
    for row in rows:
        if "name" in row:
            others.append(row)
        elif "status" not in row:  # this row describes the machine
            lines += [f"- {name}: {row[name]}" for name in row]
        elif row["status"] != "done":
            others.append(row | {"name": row["status"]})
    return "\n".join([*lines, "", "```", table(others), "```", ""])
