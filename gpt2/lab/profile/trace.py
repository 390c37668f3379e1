"""Read a trace of JAX's profiler: the operations of devices, and the phases of the host."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData, ProfileEvent, ProfilePlane

from gpt2.errors import UserError
from gpt2.telemetry.recorder import STEP
from gpt2.utils.files import reading

# Phases of `StepClock` during which devices may wait.
PHASES = ("data wait", "validation", "tasks", "checkpoint")
# Kind of operation -> a pattern for the names of its instructions and kernels, which XLA and
# libraries choose. The first pattern that matches determines the kind. `ynn` occurs in the names of
# XLA:CPU's matrix products, and `nvjet` in the names of cuBLAS's.
KINDS = {
    "collectives": "all-reduce|all-gather|reduce-scatter|all-to-all|collective|nccl",
    "matrix products": "dot|gemm|nvjet|cutlass|convolution|ynn|onednn|cudnn|fmha",
    "other computation": "",
}


class Span(NamedTuple):
    """An activity of the host, with its start and end in seconds since the trace began."""

    name: str
    start: float
    end: float


class Operation(NamedTuple):
    """An operation of a device, with its start and end in seconds since the trace began."""

    name: str
    start: float
    end: float
    kind: str  # a key of `KINDS`
    program: str = ""
    run: int = 0  # the profiler's id for this call of `program`; 0 if there is no id


class Trace(NamedTuple):
    """The content of a trace. All lists are ordered by time."""

    # The operations of all programs, on one accelerator or on all devices of a CPU.
    operations: list[Operation]
    steps: list[Span]  # the host's dispatch of each step
    phases: list[Span]  # phases of the host's loop, with the names in `PHASES`


def find_trace(path: Path) -> tuple[Path, Path]:
    """Return the profile folder and its newest trace file.

    `path` is a workdir, a profile folder, or a trace file.
    """
    if path.is_file():
        return path.parent, path
    folder = path / "profile" if (path / "profile").is_dir() else path
    traces = [*folder.glob("plugins/profile/*/*.xplane.pb")]  # traces of process 0
    if not traces:
        raise UserError(
            f"{path} does not contain a trace",
            "Train with --config.logging.profile_start=10 --config.logging.profile_steps=5",
        )
    return folder, max(traces, key=lambda file: file.stat().st_mtime)


def read_trace(path: Path) -> Trace:
    """Read a trace file of JAX's profiler, `*.xplane.pb`."""
    with reading(path, "Trace the run again"):
        data = ProfileData.from_file(str(path))
        planes = {plane.name: plane for plane in data.planes}
        host = planes["/host:CPU"]
    devices = [name for name in planes if re.match(r"/device:(GPU|TPU)", name)]
    steps: list[Span] = []
    phases: list[Span] = []
    for thread in host.lines:
        for event in thread.events:
            if event.name == STEP:
                steps.append(Span(STEP, *_seconds(event)))
            elif event.name in PHASES:
                phases.append(Span(event.name, *_seconds(event)))
    operations = list(_operations(planes[min(devices)] if devices else host))
    operations.sort(key=lambda operation: operation.start)
    steps.sort(key=lambda step: step.start)
    return Trace(operations, steps, phases)


def _operations(plane: ProfilePlane) -> Iterator[Operation]:
    """Yield the operations of a plane (a device, or the host).

    Loops and calls are left out, because they contain other operations.
    """
    lines = list(plane.lines)
    # An accelerator's plane has other lines, which repeat the operations by module and by step.
    streams = [line for line in lines if re.match(r"Stream|XLA Ops", line.name or "")]
    for line in streams or lines:
        operations = list[Operation]()
        for event in line.events:
            stats = dict(event.stats)
            name = str(stats.get("hlo_op", ""))
            if not name and not streams:
                continue  # the host also does other work
            # In a CUDA graph, the trace does not name the instruction to which a kernel belongs.
            if not name or name.startswith("command_buffer"):
                name = event.name
            operation = Operation(
                name,
                *_seconds(event),
                kind=_kind(f"{name} {event.name}"),
                program=str(stats.get("hlo_module", "")),
                run=int(stats.get("run_id", 0)),
            )
            operations.append(operation)
        operations.sort(key=lambda operation: (operation.start, -operation.end))
        for i, operation in enumerate(operations):
            following = operations[i + 1 : i + 2]
            if not following or following[0].end > operation.end:
                yield operation


def _kind(names: str) -> str:
    matches = (kind for kind in KINDS if re.search(KINDS[kind], names, re.IGNORECASE))
    return next(matches)


def _seconds(event: ProfileEvent) -> tuple[float, float]:
    return 1e-9 * event.start_ns, 1e-9 * event.end_ns
