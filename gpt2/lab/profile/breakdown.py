"""Charges the time of the traced steps to operations, and to what the devices wait for."""

from collections import Counter, defaultdict
from typing import NamedTuple

from gpt2.errors import UserError
from gpt2.lab.profile.program import ProgramText
from gpt2.lab.profile.trace import Ran, Trace

# What devices wait for between two runs of the step, beside phases of the loop.
LOOP = "the host's loop"
LAUNCH = "start of a program"


class Breakdown(NamedTuple):
    """Where the time of a step goes, in seconds per step."""

    seconds: float  # of a step, the sum of all below
    steps: int
    operations: dict[str, float]  # by name; those that run at once share their time
    idle: float  # inside a step, while no operation runs
    gaps: dict[str, float]  # between steps, by what devices wait for


def break_down(trace: Trace, program: ProgramText) -> Breakdown:
    """Charges the time from the first operation of the first step to the last of the last one."""
    module = program.module
    in_graph = [
        ran for ran in trace.operations if ran.in_graph and ran.module == module
    ]
    placed = program.place([ran.name for ran in in_graph])
    names = dict(zip(in_graph, placed, strict=True))
    every = [ran._replace(name=names.get(ran, ran.name)) for ran in trace.operations]
    own = [ran for ran in every if ran.module == module]
    runs = _runs(own, len(trace.steps))
    steps = len(runs)
    borders = max(1, steps - 1)
    began, _ = runs[0]
    ended = max(end for _, end in runs)
    taken: defaultdict[tuple[str, str], float] = defaultdict(float)
    gaps: defaultdict[str, float] = defaultdict(float)
    idle = 0.0
    busy = 0.0
    busy_until = began
    for ran in every:
        if program.is_container(ran.name):
            continue
        if ran.end <= began or ran.start >= ended:
            continue
        taken[ran.module, ran.name] += ran.end - ran.start
        if ran.start > busy_until:
            number = sum(start < ran.start for start, _ in runs)  # of the next run
            idle_since = max(end for _, end in runs[:number])
            if idle_since > busy_until:
                idle += (ran.start - busy_until) / steps
            else:  # between two runs
                waits = _waiting_for(
                    trace,
                    busy_until,
                    ran.start,
                    number,
                    idle_since,
                )
                for cause, seconds in waits.items():
                    gaps[cause] += seconds / borders
        since = max(ran.start, busy_until)
        busy_until = max(ran.end, busy_until)
        busy += busy_until - since

    shared = busy / sum(taken.values())
    operations: dict[str, float] = {}
    for (owner, name), seconds in taken.items():
        if owner == module:
            operations[name] = shared * seconds / steps
        else:
            gaps[f"program {owner}"] += shared * seconds / borders
    total = sum(operations.values()) + idle + sum(gaps.values())
    return Breakdown(
        total,
        steps,
        operations,
        idle,
        gaps,
    )


def _runs(own: list[Ran], steps: int) -> list[tuple[float, float]]:
    """Returns start and end of each run of the step, on any device; the host saw `steps`."""
    if not own:
        raise UserError("the trace holds no step", "Trace more of them")
    # Where a GPU's trace numbers no runs, one begins with the first of what each runs once.
    counts = Counter(ran.name for ran in own)
    once = min(counts, key=lambda name: (counts[name] != steps, counts[name]))
    spans: dict[int, tuple[float, float]] = {}
    again = 0
    for ran in own:
        if ran.name == once:
            again += 1
        run = ran.run or max(again, 1)
        start, end = spans.get(run, (ran.start, ran.end))
        spans[run] = (start, max(end, ran.end))
    return sorted(spans.values())


def _waiting_for(
    trace: Trace,
    start: float,
    end: float,
    number: int,
    idle_since: float,
) -> dict[str, float]:
    """Shares an idle moment before a run between what the host did in it."""
    next_steps = trace.steps[number:]
    if next_steps and next_steps[0].start <= idle_since:
        return {LAUNCH: end - start}  # the devices did not wait for the host
    found: defaultdict[str, float] = defaultdict(float)
    for phase in trace.phases:
        overlap = min(end, phase.end) - max(start, phase.start)
        if overlap > 0:
            found[phase.name] += overlap
    told = sum(found.values())
    rest = end - start - told
    cause = LOOP
    if rest < told:  # what starts the step is late for the same reason
        cause = max(found, key=found.__getitem__)
    found[cause] += rest
    return found
