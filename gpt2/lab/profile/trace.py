"""Reads a trace: what the devices ran, and what the host did meanwhile."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData, ProfilePlane

from gpt2.errors import UserError
from gpt2.utils.files import reading

STEP = "train"  # the annotation of a step
# Of `StepClock`, where devices may wait.
PHASES = ("data wait", "validation", "checkpoint")


class Span(NamedTuple):
    """What took time on the host, in seconds since the trace began."""

    name: str
    start: float
    end: float


class Ran(NamedTuple):
    """An operation that ran on a device; each call of its program `module` has its `run`."""

    name: str
    start: float
    end: float
    module: str = ""
    run: int = 0
    in_graph: bool = False  # of CUDA, and `name` is a kernel's


class Trace(NamedTuple):
    """What a trace holds, in the order of time."""

    operations: list[Ran]  # of all programs; of several accelerators, those of one
    steps: list[Span]  # of the host's loop, named by their numbers
    phases: list[Span]  # of the host's loop, named as in `PHASES`, in any order


def find_trace(path: Path) -> Path:
    """Returns the newest trace file of a workdir, of its profile folder, or the file itself."""
    if path.is_file():
        return path
    folder = path / "profile" if (path / "profile").is_dir() else path
    files = [*folder.glob("plugins/profile/*/*.xplane.pb")]  # of the first process
    if not files:
        how = "Train with --config.logging.profile_start=10 --config.logging.profile_steps=5"
        raise UserError(f"{path} holds no trace", how)
    return max(files, key=lambda file: file.stat().st_mtime)


def read_trace(path: Path) -> Trace:
    """Reads a file `*.xplane.pb`, as JAX's profiler writes it for CPUs and GPUs."""
    with reading(path, "Trace the run again"):
        data = ProfileData.from_file(str(path))
        planes = {plane.name: plane for plane in data.planes}
        host = planes["/host:CPU"]
    chips = [name for name in planes if re.match(r"/device:(GPU|TPU)", name)]
    device = planes[min(chips)] if chips else host
    steps: list[Span] = []
    phases: list[Span] = []
    for thread in host.lines:
        for event in thread.events:
            span = Span(
                event.name,
                1e-9 * event.start_ns,
                1e-9 * event.end_ns,
            )
            if event.name == STEP:
                number = dict(event.stats)["step_num"]
                steps.append(span._replace(name=str(number)))
            elif event.name in PHASES:
                phases.append(span)
    operations = list(_operations(device))
    operations.sort(key=lambda ran: ran.start)
    steps.sort(key=lambda span: span.start)
    return Trace(operations, steps, phases)


def _operations(plane: ProfilePlane) -> Iterator[Ran]:
    lines = list(plane.lines)
    # On accelerators, other lines repeat the operations by module and by step.
    chosen = [line for line in lines if re.match(r"Stream|XLA Ops", line.name or "")]
    for line in chosen or lines:
        for event in line.events:
            stats = dict(event.stats)
            name = str(stats.get("hlo_op", ""))
            in_graph = name.startswith("command_buffer")
            if in_graph or (chosen and not name):
                name = event.name
            if not name:
                continue
            yield Ran(
                name.partition(" = ")[0].lstrip("%"),
                1e-9 * event.start_ns,
                1e-9 * event.end_ns,
                module=str(stats.get("hlo_module", "")),
                run=int(stats.get("run_id", 0)),
                in_graph=in_graph,
            )
