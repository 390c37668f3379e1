"""Charges the time of the traced steps to operations, and to what the devices wait for."""

import statistics
from collections import Counter, defaultdict
from typing import NamedTuple

from gpt2.profile.program import ProgramText
from gpt2.profile.trace import Ran, Span, Trace

# What devices wait for between two runs of the step, beside phases of the loop.
SYNC = "host synchronisation"
PYTHON = "Python in the loop"
LAUNCH = "start of a program"
LOADER = "slow loader"
_SAMPLED_LATE = 3e-3  # seconds after which the sampler has seen that a line was left


class Wait(NamedTuple):
    """What devices wait for, and the line of the host meanwhile."""

    cause: str
    line: str = ""  # FILE:LINE
    text: str = ""  # its source


Gaps = dict[Wait, float]


class Cost(NamedTuple):
    """Seconds per step of an operation, and its runs per step."""

    seconds: float
    runs: float


class Breakdown(NamedTuple):
    """Where the time of a step goes, in seconds per step."""

    seconds: float  # of a step, the sum of all below
    steps: int
    operations: dict[str, Cost]  # by name; those that run at once share their time
    idle: float  # inside a step, while no operation runs
    gaps: Gaps  # between steps, other programs included


def break_down(trace: Trace, program: ProgramText) -> Breakdown:
    """Charges the time from the first operation of the first step to the last of the last one.

    Without the text of the program, the step is what has most of the operations.
    """
    modules = [ran.module for ran in trace.operations]
    module = program.module or statistics.mode(modules or [""])
    in_graph = [
        ran for ran in trace.operations if ran.in_graph and ran.module == module
    ]
    placed = program.place([ran.name for ran in in_graph])
    names = dict(zip(in_graph, placed, strict=True))
    every = [ran._replace(name=names.get(ran, ran.name)) for ran in trace.operations]
    runs = _runs([ran for ran in every if ran.module == module], len(trace.steps))
    if not runs:
        raise ValueError("the trace holds no step")
    steps = len(runs)
    borders = max(1, steps - 1)
    began, _ = runs[0]
    ended = max(end for _, end in runs)
    taken: defaultdict[tuple[str, str], float] = defaultdict(float)
    counts: Counter[tuple[str, str]] = Counter()
    gaps: defaultdict[Wait, float] = defaultdict(float)
    idle = 0.0
    busy = 0.0
    busy_until = began
    for ran in every:
        if program.is_container(ran.name):
            continue
        if ran.end <= began or ran.start >= ended:
            continue
        key = (ran.module, ran.name)
        taken[key] += ran.end - ran.start
        counts[key] += 1
        if ran.start > busy_until:
            number = sum(start < ran.start for start, _ in runs)  # of the next run
            idle_since = max(end for _, end in runs[:number])
            if idle_since > busy_until:
                idle += (ran.start - busy_until) / steps
            else:  # between two runs
                waits = _waiting_for(trace, busy_until, ran.start, number, idle_since)
                for wait, seconds in waits.items():
                    gaps[wait] += seconds / borders
        since = max(ran.start, busy_until)
        busy_until = max(ran.end, busy_until)
        busy += busy_until - since

    shared = busy / sum(taken.values())
    operations: dict[str, Cost] = {}
    for (owner, name), seconds in taken.items():
        if owner == module:
            runs_per_step = counts[owner, name] / steps
            operations[name] = Cost(shared * seconds / steps, runs_per_step)
        else:
            gaps[Wait(f"program {owner}")] += shared * seconds / borders
    computing = sum(cost.seconds for cost in operations.values())
    total = computing + idle + sum(gaps.values())
    return Breakdown(total, steps, operations, idle, gaps)


def _runs(own: list[Ran], steps: int) -> list[tuple[float, float]]:
    """Returns start and end of each run of the step, on the first device; the host saw `steps`."""
    if not own:
        return []
    # Where a GPU's trace numbers no runs, one begins with the first of what each runs once.
    counts = Counter(ran.name for ran in own)
    once = min(counts, key=lambda name: (counts[name] != steps, counts[name]))
    device = min(ran.device for ran in own)
    spans: dict[int, tuple[float, float]] = {}
    again = 0
    for ran in own:
        if ran.name == once:
            again += 1
        if ran.device == device:
            run = ran.run or max(again, 1)
            start, end = spans.get(run, (ran.start, ran.end))
            spans[run] = (min(start, ran.start), max(end, ran.end))
    return sorted(spans.values())


def _waiting_for(
    trace: Trace, start: float, end: float, number: int, idle_since: float
) -> Gaps:
    """Shares an idle moment before a run between what the host did in it."""
    next_steps = trace.steps[number:]
    if next_steps and next_steps[0].start <= idle_since:
        return {Wait(LAUNCH): end - start}  # the devices did not wait for the host

    def overlap(span: Span) -> float:
        return max(0.0, min(end, span.end) - max(start, span.start))

    found: defaultdict[Wait, float] = defaultdict(float)
    for phase in trace.phases:
        if overlap(phase):
            cause = LOADER if phase.name == "data wait" else phase.name
            found[Wait(cause)] += overlap(phase)
    told = sum(found.values())
    rest = end - start - told
    # The line that waited for the devices until they were idle.
    released = None
    for line in trace.lines:
        if line.waits and line.start < idle_since <= line.end + _SAMPLED_LATE:
            released = line
    if released:
        found[Wait(SYNC, released.name, released.text)] += rest
    elif rest < told:  # what starts the step is late for the same reason
        found[max(found, key=found.__getitem__)] += rest
    else:
        nothing = Span("", start, start)
        seen = max([nothing, *trace.lines], key=overlap)
        found[Wait(PYTHON, seen.name, seen.text)] += rest
    return found
