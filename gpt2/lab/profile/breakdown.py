"""Attribute the time of traced steps to the devices' operations and to the causes of idle time."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpt2.errors import UserError
from gpt2.lab.profile.trace import Operation, Trace
from gpt2.utils.text import format_seconds

IDLE = "idle within a step"
# Causes of idle time between two steps, in addition to the phases of the loop.
LOOP = "the host's loop"
LAUNCH = "start of a program"
# If operations of several kinds run at the same time, the time is attributed to the first kind in
# this order. The time of "collectives" is therefore the part that no computation overlaps.
_ORDER = ("matrix products", "other computation", "collectives")
_COMPUTATION = _ORDER[:2]
# The headline names a cause if it takes at least this fraction of a step.
_WORTH_NAMING = 0.02


class Breakdown(NamedTuple):
    """The time of a step, divided according to what the devices do."""

    num_steps: int
    # Kind of operation, or cause of idle time -> its seconds per step.
    seconds: dict[str, float]


def break_down(trace: Trace) -> Breakdown:
    """Return the mean time of a step, divided among operations and causes of idle time."""
    program = _program_of_steps(trace)
    own = [operation for operation in trace.operations if operation.program == program]
    runs = _runs(own, len(trace.steps))
    num_steps = len(runs)
    num_gaps = max(1, num_steps - 1)
    began = runs[0][0]
    ended = max(end for _, end in runs)
    within: defaultdict[str, float] = defaultdict(float)
    between: defaultdict[str, float] = defaultdict(float)
    for start, end, active in _timeline(trace.operations, program, began, ended):
        kinds = [kind for kind in _ORDER if kind in active]
        if kinds:
            within[kinds[0]] += end - start
            continue
        if active:  # programs other than the step
            between[active[0]] += end - start
            continue
        number = sum(run[0] < end for run in runs)  # the index of the next run
        idle_since = max(run[1] for run in runs[:number])
        if idle_since > start:
            within[IDLE] += end - start
            continue
        causes = _causes(trace, start, end, number, idle_since)
        for cause, seconds in causes.items():
            between[cause] += seconds
    per_step = {name: seconds / num_steps for name, seconds in within.items()}
    per_gap = {name: seconds / num_gaps for name, seconds in between.items()}
    return Breakdown(num_steps, per_step | per_gap)


def _timeline(
    operations: Sequence[Operation], program: str, began: float, ended: float
) -> Iterator[tuple[float, float, list[str]]]:
    """Divide the time from `began` to `ended` into intervals in which the same operations run.

    For each interval, yield its start, its end, and a list of what runs in it: the kinds of the
    train step's operations, and `program NAME` for each other program. `program` is the name of the
    train step's program.
    """
    changes = [(began, "", 0), (ended, "", 0)]
    for operation in operations:
        name = operation.kind
        if operation.program != program:
            name = f"program {operation.program}"
        start = max(operation.start, began)
        end = min(operation.end, ended)
        if start < end:
            changes += [(start, name, 1), (end, name, -1)]
    running: Counter[str] = Counter()
    for (start, name, change), (end, _, _) in itertools.pairwise(sorted(changes)):
        running[name] += change
        if start < end:
            yield start, end, [name for name in running if running[name]]


def describe(found: Breakdown) -> str:
    """Format a breakdown as a headline with the largest cost, followed by a table."""
    step = sum(found.seconds.values())
    of_step = f"of each step's {format_seconds(step)}"
    computing = sum(found.seconds.get(kind, 0.0) for kind in _COMPUTATION)
    headline = f"The devices compute {computing / step:.0%} {of_step}."
    longest_first = sorted(found.seconds.items(), key=lambda item: -item[1])
    for name, seconds in longest_first:
        if name not in _COMPUTATION and seconds >= _WORTH_NAMING * step:
            time = format_seconds(seconds)
            headline = f"{name.capitalize()}: {time} {of_step}, {seconds / step:.0%}."
            break
    lines = [headline, "", f"Mean of {found.num_steps} steps:"]
    for name, seconds in longest_first:
        time = format_seconds(seconds)
        lines.append(f"  {name:<32} {time:>8} {seconds / step:>6.1%}")
    return "\n".join([*lines, ""])


def _program_of_steps(trace: Trace) -> str:
    """Return the name of the program that is the train step."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for operation in trace.operations:
        seconds[operation.program] += operation.end - operation.start
    if not seconds:
        raise UserError(
            "The trace contains no complete step",
            "Train again with a larger --config.logging.profile_steps",
        )
    # With pmap, the programs of training and validation have the same name. The train step is the
    # program with the longest time.
    return max(seconds, key=lambda name: ("train_step" in name, seconds[name]))


def _runs(own: list[Operation], num_steps: int) -> list[tuple[float, float]]:
    """Return the start and the end of each execution of the train step, in order.

    `own` are the operations of the step, ordered by time. `num_steps` is the number of steps that
    the host dispatched.
    """
    # A GPU's trace does not number the executions. There, an execution is taken to start with an
    # operation that runs once in each step.
    counts = Counter(operation.name for operation in own)
    once = min(counts, key=lambda name: (counts[name] != num_steps, counts[name]))
    spans: dict[int, tuple[float, float]] = {}
    seen = 0
    for operation in own:
        if operation.name == once:
            seen += 1
        run = operation.run or max(seen, 1)
        start, end = spans.get(run, (operation.start, operation.end))
        spans[run] = (start, max(end, operation.end))
    return sorted(spans.values())


def _causes(
    trace: Trace, start: float, end: float, number: int, idle_since: float
) -> dict[str, float]:
    """Divide the idle time from `start` to `end` between its causes; return the seconds of each.

    The keys are names of phases of the host, such as `validation`, and `LOOP` or `LAUNCH`. The idle
    time lies between two executions of the train step: the earlier one ended at `idle_since`, which
    may be before `start`, and the later one has the index `number`.
    """
    next_steps = trace.steps[number:]
    if next_steps and next_steps[0].start <= idle_since:
        return {LAUNCH: end - start}  # the devices did not wait for the host
    causes: defaultdict[str, float] = defaultdict(float)
    for phase in trace.phases:
        overlap = min(end, phase.end) - max(start, phase.start)
        if overlap > 0:
            causes[phase.name] += overlap
    known = sum(causes.values())
    rest = end - start - known
    cause = LOOP
    # If the phases cover most of the idle time, the longest phase is assumed to cause the rest.
    if rest < known:
        cause = max(causes, key=causes.__getitem__)
    causes[cause] += rest
    return causes
