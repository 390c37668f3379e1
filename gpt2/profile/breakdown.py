"""Charges the time of the traced steps to operations, and to what the devices wait for."""

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

Gaps = dict[
    tuple[str, str, str], float
]  # by what is waited for, FILE:LINE of the host, its source


class Cost(NamedTuple):
    """Seconds per step of an operation, and its runs per step."""

    seconds: float
    runs: float


class Breakdown(NamedTuple):
    """Where the time of a step goes, in seconds per step."""

    seconds: float  # of a step, the sum of all below
    steps: int
    numbers: list[str]  # of the traced steps, if the trace tells
    operations: dict[str, Cost]  # by name; those that run at once share their time
    idle: float  # inside a step, while no operation runs
    gaps: Gaps  # between steps, other programs included


def break_down(trace: Trace, program: ProgramText) -> Breakdown:
    """Charges the time from the first operation of the first step to the last of the last one.

    Without the text of the program, the step is what took most of the time.
    """
    by_module = defaultdict[str, float](float)
    for ran in trace.operations:
        by_module[ran.module] += ran.end - ran.start
    module = program.module or max(by_module, key=by_module.__getitem__, default="")
    own = [ran for ran in trace.operations if ran.module == module]
    placed = program.place(ran.name for ran in own if ran.in_graph)
    names = {ran: next(placed) for ran in own if ran.in_graph}
    every = [ran._replace(name=names.get(ran, ran.name)) for ran in trace.operations]
    runs = _runs([ran for ran in every if ran.module == module], len(trace.steps))
    if not runs:
        raise ValueError("the trace holds no step")
    steps = len(runs)
    borders = max(1, len(runs) - 1)
    taken = defaultdict[tuple[str, str], float](float)
    counts = Counter[tuple[str, str]]()
    gaps = defaultdict[tuple[str, str, str], float](float)
    idle = 0.0
    busy = 0.0
    busy_until = runs[0][0]
    ended = max(end for _, end in runs)
    for ran in every:
        if (
            program.is_container(ran.name)
            or ran.end <= runs[0][0]
            or ran.start >= ended
        ):
            continue
        taken[ran.module, ran.name] += ran.end - ran.start
        counts[ran.module, ran.name] += 1
        if (seconds := ran.start - busy_until) > 0:
            number = sum(start < ran.start for start, _ in runs)  # of the next run
            idle_since = max(end for _, end in runs[:number])
            if idle_since > busy_until:
                idle += seconds / steps
            else:  # between two runs
                waits = _waiting_for(trace, busy_until, ran.start, number, idle_since)
                for key, share in waits.items():
                    gaps[key] += share / borders
        busy += max(0.0, ran.end - max(busy_until, ran.start))
        busy_until = max(busy_until, ran.end)

    shared = busy / sum(taken.values())
    operations = dict[str, Cost]()
    for (owner, name), seconds in taken.items():
        if owner == module:
            operations[name] = Cost(
                shared * seconds / steps, counts[owner, name] / steps
            )
        else:
            gaps[f"program {owner}", "", ""] += shared * seconds / borders
    total = (
        sum(cost.seconds for cost in operations.values()) + idle + sum(gaps.values())
    )
    numbers = [step.name for step in trace.steps]
    return Breakdown(total, steps, numbers, operations, idle, dict(gaps))


def _runs(own: list[Ran], steps: int) -> list[tuple[float, float]]:
    """Returns start and end of each run of the step, on the first device; the host saw `steps`."""
    spans: dict[int, tuple[float, float]] = {}
    # Where a GPU's trace numbers no runs, one begins with the first of what each runs once.
    counts = Counter(ran.name for ran in own)
    least = min(counts, key=counts.__getitem__, default="")
    once = next((name for name in counts if counts[name] == steps), least)
    again = 0
    device = min((ran.device for ran in own), default=0)
    for ran in own:
        again += ran.name == once
        if ran.device == device:
            run = ran.run or max(again, 1)
            start, end = spans.get(run, (ran.start, ran.end))
            spans[run] = min(start, ran.start), max(end, ran.end)
    return sorted(spans.values())


def _waiting_for(
    trace: Trace, start: float, end: float, number: int, idle_since: float
) -> Gaps:
    """Shares an idle moment before a run between what the host did in it."""
    if number < len(trace.steps) and trace.steps[number].start <= idle_since:
        return {(LAUNCH, "", ""): end - start}  # the devices did not wait for the host

    def overlap(span: Span) -> float:
        return min(end, span.end) - max(start, span.start)

    found: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for phase in trace.phases:
        if overlap(phase) > 0:
            found[LOADER if phase.name == "data wait" else phase.name, "", ""] += (
                overlap(phase)
            )
    rest = end - start - sum(found.values())
    # The line that waited for the devices until they were idle.
    released = [
        x
        for x in trace.lines
        if x.waits and x.start < idle_since <= x.end + _SAMPLED_LATE
    ]
    if released:
        found[SYNC, released[-1].name, released[-1].text] += rest
    elif found and rest < sum(
        found.values()
    ):  # what starts the step is late for the same reason
        found[max(found, key=found.__getitem__)] += rest
    else:
        lines = (line for line in trace.lines if overlap(line) > 0)
        seen = max(lines, key=overlap, default=Span("", start, start))
        found[PYTHON, seen.name, seen.text] += rest
    return dict(found)
