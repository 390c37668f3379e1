"""All that is worth knowing of a GPU, in one command and without a network.

The parts are commands, each with a time limit: what fails costs no more than its own row. DIR gets
results.jsonl, with their rows as they come, report.md, logs of what they said, and target.txtpb,
XLA's description of the GPU for `train.py --plan_chips`. A part that is done is not run again.
"""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpt2.benchmark.tables import table
from gpt2.errors import UserError
from gpt2.telemetry.metrics import read_metrics
from gpt2.utils import launch
from gpt2.utils.files import write_text

_ERROR = re.compile(r"^\w[\w.]*(Error|Exception|Interrupt)\b|^error: ")


class Part(NamedTuple):
    """What Python runs, and the seconds that it has. A run of train.py has the part's name."""

    name: str
    seconds: float
    command: tuple[str, ...]


def make_parts(output: Path) -> list[Part]:
    """Returns the parts in the order in which they run, the most important first."""
    root = Path(__file__).parents[2]

    def options(size: str, rows: int) -> tuple[str, ...]:
        layers = {"124m": 12, "1558m": 48}[size]  # stacked, and no loop
        given = {
            "train.accumulate_steps": 1,
            "data.batch_size": rows,
            "memory.remat": "none",
        }
        given |= {"memory.scan_layers": True, "memory.scan_unroll": layers}
        flags = (f"--config.{name}={value}" for name, value in given.items())
        return (f"--config={root}/configs/gpt2_{size}.py", *flags)

    def measure(command: str, *more: str) -> tuple[str, ...]:
        return ("-m", "gpt2.benchmark", command, *more, "--json")

    def train(size: str, rows: int, *more: str) -> tuple[str, ...]:
        return measure("train", *options(size, rows), *more)

    more = {
        "data.corpus": "pystdlib",
        "logging.profile_steps": 5,
        "train.eval_batches": 4,
    }
    more |= {"train.num_steps": 100, "train.eval_every": 0, "logging.profile_start": 50}
    flags = (f"--config.{name}={value}" for name, value in more.items())
    loop = (
        f"{root}/train.py",
        f"--workdir={output / 'loop'}",
        *options("124m", 32),
        *flags,
    )
    peers = ("--peers=torch_compile",) if importlib.util.find_spec("torch") else ()
    forms = "--vary=precision.logits=bfloat16", "--vary=data.document_mask=True"
    return [  # a quarter of an hour in all
        Part("machine", 30, measure("machine", f"--output={output}")),
        Part("124m-32", 120, train("124m", 32, *peers)),
        Part("1558m", 150, train("1558m", 16)),
        Part("attention", 120, measure("attention", *options("124m", 8))),
        Part("forms", 150, train("124m", 32, *forms)),
        Part("loop", 120, loop),
        Part("124m-8", 80, train("124m", 8, *peers)),
        Part("124m-64", 60, train("124m", 64)),
    ]


def run_suite(
    output: Path, names: list[str], overrides: Mapping[str, Any], *, dry_run: bool
) -> bool:
    """Runs the parts of these names, or all, and returns whether none failed.

    Every part gets `overrides`, options of the config by dotted name.
    """
    parts = [part for part in make_parts(output) if not names or part.name in names]
    if len(parts) < len(names):
        known = ", ".join(part.name for part in make_parts(output))
        raise UserError(
            f"--parts={','.join(names)} names what is no part", f"Choose of {known}"
        )
    more = [f"--config.{name}={value}" for name, value in overrides.items()]
    results = output / "results.jsonl"
    # What ends this process ends the part that runs, which holds the device.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows = [json.loads(line) for line in results.open()] if results.exists() else []
    done = {row["part"] for row in rows if row.get("status") == "done"}
    for part in parts:
        command = [
            *part.command,
            *(more if "--config" in " ".join(part.command) else []),
        ]
        if dry_run or part.name in done:
            state = "is done" if part.name in done else f"{part.seconds:.0f} s"
            print(f"{part.name}, {state}: {shlex.join(['python', *command])}")
            continue
        (output / "logs").mkdir(parents=True, exist_ok=True)
        found = [
            *run_command(command, part.seconds, output / "logs" / f"{part.name}.err")
        ]
        rows = [row for row in rows if row["part"] != part.name]
        rows += [
            {"part": part.name} | row
            for row in describe_run(output / part.name) + found
        ]
        write_text(results, "".join(f"{json.dumps(row)}\n" for row in rows))
        write_text(output / "report.md", report(rows))
        print(
            f"{part.name}: {rows[-1]['status']} in {rows[-1]['took']:.0f} s", flush=True
        )
    return all(row.get("status", "done") == "done" for row in rows)


def run_command(
    command: list[str], limit: float, log: Path
) -> Iterator[dict[str, Any]]:
    """Yields the rows that Python prints by a command, then its `status`, `took`, `error`.

    What the command has started ends with it: a process that is left holds the GPU's memory.
    """
    began = time.monotonic()
    status = "done"
    error = None
    pipes: Any = dict(
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log.open("wb")
    )
    pipes |= dict(env=launch.environment_to_measure(), start_new_session=True)
    process = subprocess.Popen([sys.executable, *command], **pipes)
    try:
        out, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        status = "out of time"
        error = f"no end within {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if error:
        out, _ = process.communicate()
    elif process.returncode:
        lines = list(filter(None, log.read_text(errors="replace").splitlines()))
        told = (
            [line for line in lines if _ERROR.search(line)] or lines or ["no message"]
        )
        status = "failed"
        error = told[-1][:300]
    for line in out.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):  # of libraries, or cut off
            if isinstance(row := json.loads(line), dict):
                yield row
    yield {"status": status, "took": time.monotonic() - began, "error": error}


def describe_run(workdir: Path) -> list[dict[str, Any]]:
    """Returns a row of medians over a run's logged lines, without the first third, or none."""
    import pandas as pd

    records = read_metrics(workdir / "metrics.jsonl")
    logged = [record for record in records if "perf/step_seconds" in record]
    if not (steady := logged[len(logged) // 3 :]):
        return []
    medians = pd.DataFrame(steady).filter(like="perf/").median()
    row = {str(name).removeprefix("perf/"): value for name, value in medians.items()}
    turns = [line["perf/step_seconds"] for line in steady]  # means of lines
    peak = row.get("peak_memory_bytes")  # a CPU does not tell
    return [{"name": "train.py", "turns": turns, "peak_bytes": peak} | row]


def report(rows: list[dict[str, Any]]) -> str:
    """Returns the page about rows: the machine's figures, and a table of the others."""
    machine = next((row for row in rows if row["part"] == "machine"), {})
    lines = [f"- {name}: {value}" for name, value in machine.items() if name != "part"]
    rest = [
        {"name": row.get("status")} | row for row in rows if row["part"] != "machine"
    ]
    rest = [row for row in rest if row["name"] != "done"]
    return "\n".join(["# Benchmark", "", *lines, "", table(rest), ""])


def describe_machine(output: Path | None) -> dict[str, Any]:
    """Returns devices and versions; on a GPU, writes target.txtpb into `output`."""
    import jax
    from jaxlib import xla_client

    from gpt2.training.workdir import describe_start

    device = jax.devices()[0]
    row = describe_start(0) | {
        "cpu_cores": os.cpu_count(),
        "flags": os.environ.get("XLA_FLAGS"),
    }
    row["runtime"] = device.client.platform_version.replace("\n", ", ")
    if device.platform == "gpu":
        asked = "name,driver_version,memory.total,power.limit,clocks.max.sm"
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        row["driver"] = subprocess.run(
            command, capture_output=True, text=True
        ).stdout.strip()
        if output:
            target = xla_client.get_topology_for_devices([device]).target_config
            write_text(output / "target.txtpb", target)
    return row
