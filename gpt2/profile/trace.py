"""Reads a trace: what the devices ran, and what the host did meanwhile."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from jax.profiler import ProfileData

from gpt2.errors import UserError
from gpt2.profile.sampler import LINE

STEP = "train"  # the annotation of a step
PHASES = ("data wait", "validation", "checkpoint")  # of `StepClock`, where devices may wait
# What JAX's runtime and a line of Python are called that wait for a device.
_WAIT = re.compile(
    r"block_until_ready|BlockHostUntil|asarray|np\.array|_value\b|__array__|__float__|__int__"
    r"|device_get|\.item\(|\bfloat\(|\bint\("
)


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that took time, in seconds since the trace began.

    Attributes:
        name: what ran; of a sampled line, FILE:LINE.
        text: the source of a sampled line.
        waits: whether it waits for a device.
    """

    name: str
    start: float
    end: float
    text: str = ""
    waits: bool = False


@dataclasses.dataclass(frozen=True)
class Ran(Span):
    """An operation that ran on a device.

    Attributes:
        module: the program that it belongs to.
        run: of the program; each call of it has another number.
        device: number of the device.
        lane: the thread or stream.
    """

    module: str = ""
    run: int = 0
    device: int = 0
    lane: int = 0


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a trace holds, each list in the order of time.

    Attributes:
        operations: of all programs; of a machine with accelerators, those of one device.
        steps: when the host began and ended each step, named by its number.
        phases: of the host's loop, named as in `PHASES`.
        waits: calls of the host's loop that wait for a device.
        lines: of Python in which the host's loop was seen.
        on_host: whether the host records operations, and so takes the time that it records.
    """

    operations: list[Ran]
    steps: list[Span]
    phases: list[Span]
    waits: list[Span]
    lines: list[Span]
    on_host: bool = True


def find_trace(path: Path) -> Path:
    """Returns the newest trace file of a workdir, of its profile folder, or the file itself.

    Raises:
        UserError: there is none.
    """
    if path.is_file():
        return path
    folder = path / "profile" if (path / "profile").is_dir() else path
    found = [
        file
        for file in folder.rglob("*.xplane.pb")
        if not file.relative_to(folder).parts[0].startswith("process_")  # another process's
    ]
    if not found:
        what = f"{path} holds no trace" if path.is_dir() else f"{path} does not exist"
        raise UserError(
            what,
            "Train in a new workdir with --config.logging.profile_start=10 "
            "--config.logging.profile_steps=5 for one",
        )
    return max(found, key=lambda file: file.stat().st_mtime)


def read_trace(path: Path) -> Trace:
    """Reads a file `*.xplane.pb`, as JAX's profiler writes it for CPUs and GPUs.

    Raises:
        UserError: the file is no trace, or damaged.
    """
    try:
        planes = list(ProfileData.from_file(str(path)).planes)
    except Exception as error:  # which type, the versions of JAX differ in
        raise UserError(f"{path} is no trace, or damaged", "Trace the run again") from error
    host = next((plane for plane in planes if plane.name == "/host:CPU"), None)
    chips = sorted(p.name for p in planes if re.match(r"/device:(GPU|TPU)", p.name))
    device = next((p for p in planes if chips and p.name == chips[0]), host)
    steps: list[Span] = []
    main: list[Span] = []
    lines: list[Span] = []
    for line in host.lines if host else ():
        events = list(line.events)
        if any(event.name == STEP and "step_num" in dict(event.stats) for event in events):
            for event in events:
                span = _span(event)
                if event.name == STEP:
                    steps.append(dataclasses.replace(span, name=str(dict(event.stats)["step_num"])))
                else:
                    main.append(span)
        elif any(event.name == LINE for event in events):
            lines += [_line(event) for event in events if event.name == LINE]
    operations = sorted(_operations(device), key=lambda o: o.start) if device else []
    return Trace(
        _numbered(operations),
        _sorted(steps),
        _sorted([span for span in main if span.name in PHASES]),
        _sorted([span for span in main if _WAIT.search(span.name)]),
        _sorted(lines),
        on_host=not chips,
    )


def _operations(plane: Any) -> Iterator[Ran]:
    lines = [(number, line) for number, line in enumerate(plane.lines)]
    # On accelerators, other lines repeat the operations by module and by step.
    chosen = [pair for pair in lines if re.match(r"Stream|XLA Ops", pair[1].name or "")]
    for lane, line in chosen or lines:
        for event in line.events:
            stats = dict(event.stats)
            name = stats.get("hlo_op") or (event.name if chosen else "")
            if name:
                span = _span(event)
                yield Ran(
                    str(name).partition(" = ")[0].lstrip("%"),
                    span.start,
                    span.end,
                    module=str(stats.get("hlo_module", "")),
                    run=int(stats.get("run_id", 0)),
                    device=int(stats.get("device_ordinal", 0)),
                    lane=lane,
                )


def _numbered(operations: list[Ran]) -> list[Ran]:
    """Returns operations with a number of their run, where a trace of a GPU gives none.

    A run begins where the first operation of its program comes again.
    """
    if any(operation.run for operation in operations):
        return operations
    first: dict[str, str] = {}
    runs: dict[str, int] = {}
    numbered = []
    for operation in operations:
        if first.setdefault(operation.module, operation.name) == operation.name:
            runs[operation.module] = runs.get(operation.module, 0) + 1
        numbered.append(dataclasses.replace(operation, run=runs[operation.module]))
    return numbered


def _span(event: Any) -> Span:
    return Span(event.name, 1e-9 * event.start_ns, 1e-9 * event.end_ns)


def _line(event: Any) -> Span:
    stats = {name: str(value) for name, value in event.stats}
    span, text = _span(event), unquote(stats.get("text", ""))
    waits = bool(_WAIT.search(f"{stats.get('inside', '')} {text}"))
    return Span(stats.get("where", ""), span.start, span.end, text, waits)


def _sorted(spans: list[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: span.start)
