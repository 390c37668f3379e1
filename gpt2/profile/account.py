"""Charges each moment of the traced steps to an operation, a loop, or what devices wait for."""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping

from gpt2.profile.program import CONTAINERS, ProgramText
from gpt2.profile.trace import Ran, Span, Trace

SHORT = 10e-6  # seconds; starting a shorter operation costs about as much as the operation
# What devices wait for between two runs of the step.
SYNC, LOADER, VALIDATION, CHECKPOINT, PYTHON, LAUNCH = (
    *("host synchronisation", "slow loader", "validation", "checkpoint"),
    *("Python in the loop", "start of the next step"),
)
_PHASES = {"data wait": LOADER, "validation": VALIDATION, "checkpoint": CHECKPOINT}
_OFTEN = 100  # runs per step of an operation whose recording is worth taking off
_SAMPLED_LATE = 3e-3  # seconds after which the sampler has seen that a line was left
_HELD_UP = 3e-3  # seconds by which a busy host may come to a wait after the devices have ended
_READ = 2e-4  # seconds that reading a value takes at most, if it is there


@dataclasses.dataclass
class Cost:
    """Time of an operation, or of several.

    Attributes:
        seconds: per step. Operations that run at once share the time.
        count: runs per step.
        short_seconds: of `seconds`, those of operations mostly shorter than `SHORT`.
    """

    seconds: float = 0.0
    count: float = 0.0
    short_seconds: float = 0.0


@dataclasses.dataclass
class Account:
    """Where the time of a step goes, in seconds per step; what is given here adds to `seconds`.

    Attributes:
        steps: how many were traced, and their numbers if the trace tells.
        operations: by name.
        between: inside a step, while no operation runs; by loop, "" outside of loops. What
            interrupts short operations, such as another process, is outside.
        around_short: of `between` outside of loops, short moments beside a short operation.
        gaps: between two steps, by what the devices wait for and the line of Python, with its
            source.
        others: other programs, such as that of validation, by name.
        recording: what the trace itself took in loops. The rest does not hold it.
    """

    steps: int
    numbers: tuple[str, ...]
    operations: dict[str, Cost]
    between: dict[str, float]
    around_short: float
    gaps: dict[tuple[str, str, str], float]
    others: dict[str, float]
    recording: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        operations = (cost.seconds for cost in self.operations.values())
        rest = (self.between.values(), self.gaps.values(), self.others.values())
        return sum(operations) + sum(map(sum, rest))

    @property
    def computing(self) -> float:
        """Seconds per step in which an operation of the step runs."""
        return sum(cost.seconds for cost in self.operations.values())


def account(trace: Trace, program: ProgramText | None) -> Account:
    """Charges the time from the first operation of the first step to the last of the last one.

    Gaps are a mean over the borders between steps, all else is one over the steps.

    Args:
        trace: of whole steps.
        program: of the step; None: the program that took most of the time, and no loops.

    Raises:
        ValueError: no step is in the trace.
    """
    total: defaultdict[str, float] = defaultdict(float)
    for ran in trace.operations:
        total[ran.module] += ran.end - ran.start
    module = program.module if program else max(total, key=total.__getitem__, default="")
    own = [ran for ran in trace.operations if ran.module == module]
    if not own:
        raise ValueError("the trace holds no step")
    runs = _runs(own)
    steps = len(runs)
    borders = max(1, steps - 1)
    began, ended = runs[0][0], max(end for _, end in runs)
    leaves = _leaves([r for r in trace.operations if r.end > began and r.start < ended], program)

    loops = {o.name: o.loop for o in program.operations.values()} if program else {}
    operations: defaultdict[str, Cost] = defaultdict(Cost)
    others: defaultdict[str, float] = defaultdict(float)
    between: defaultdict[str, float] = defaultdict(float)
    gaps: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    around_short, short = 0.0, _short_names([ran for ran in leaves if ran.module == module])
    for ran in leaves:
        if ran.module == module:
            operations[ran.name].count += 1 / steps
    for start, end, active, last, following in _moments(leaves, began, ended):
        seconds = end - start
        mine = [ran for ran in active if ran.module == module]
        for ran in mine:
            cost = operations[ran.name]
            cost.seconds += seconds / len(mine) / steps
            if ran.name in short:
                cost.short_seconds += seconds / len(mine) / steps
        if mine:
            continue
        if active:
            others[active[0].module] += seconds / borders
        elif border := _border(runs, start, end):
            for key, share in _waiting_for(trace, start, end, border).items():
                gaps[key] += share / borders
        else:
            around = [ran for ran in (last, following) if ran]
            inside = {loops.get(ran.name, "") for ran in around}
            loop = inside.pop() if len(inside) == 1 and seconds < SHORT else ""
            between[loop] += seconds / steps
            # A longer moment is no price of an operation: other processes take the cores too.
            if not loop and seconds < SHORT and any(ran.name in short for ran in around):
                around_short += seconds / steps
    for name, seconds in _interruptions(leaves, module, short).items():
        seconds = min(seconds / steps, operations[name].short_seconds)
        operations[name].seconds -= seconds
        operations[name].short_seconds -= seconds
        between[""] += seconds
    recording = _take_off(between, operations, loops) if trace.on_host else 0.0
    return Account(
        steps,
        tuple(step.name for step in trace.steps),
        dict(operations),
        dict(between),
        min(around_short, between[""]),
        dict(gaps),
        dict(others),
        recording,
    )


def _runs(own: list[Ran]) -> list[tuple[float, float]]:
    """Returns start and end of each run of the step, on the first device."""
    device = min(ran.device for ran in own)
    spans: dict[int, tuple[float, float]] = {}
    for ran in own:
        if ran.device == device:
            start, end = spans.get(ran.run, (ran.start, ran.end))
            spans[ran.run] = min(start, ran.start), max(end, ran.end)
    return sorted(spans.values())


def _leaves(operations: list[Ran], program: ProgramText | None) -> list[Ran]:
    """Returns operations without the loops and calls that hold others."""
    if program:
        return [ran for ran in operations if ran.name not in program.containers]
    following: dict[int, float] = {}  # start of the next operation, by lane
    leaves = []
    for ran in reversed(operations):
        holds_others = following.get(ran.lane, ran.end) < ran.end
        if not (ran.name.startswith(CONTAINERS) and holds_others):
            leaves.append(ran)
        following[ran.lane] = ran.start
    return leaves[::-1]


def _short_names(leaves: list[Ran]) -> set[str]:
    """Returns the operations of which most runs are short; another process may prolong some."""
    durations: defaultdict[str, list[float]] = defaultdict(list)
    for ran in leaves:
        durations[ran.name].append(ran.end - ran.start)
    return {name for name, each in durations.items() if statistics.median(each) < SHORT}


def _interruptions(leaves: list[Ran], module: str, short: set[str]) -> dict[str, float]:
    """Returns the seconds by which another process prolonged short operations, by name."""
    found: defaultdict[str, float] = defaultdict(float)
    for ran in leaves:
        if ran.module == module and ran.name in short:
            found[ran.name] += max(0.0, ran.end - ran.start - 2 * SHORT)
    return found


def _moments(
    leaves: list[Ran], began: float, ended: float
) -> Iterator[tuple[float, float, list[Ran], Ran | None, Ran]]:
    """Yields start and end of each moment, what runs in it, what ended before and what follows."""
    borders = [(ran.start, 1, n) for n, ran in enumerate(leaves)]
    borders += [(ran.end, 0, n) for n, ran in enumerate(leaves)]
    active: dict[int, Ran] = {}
    before = began
    last: Ran | None = None
    for time, starts, number in sorted(borders):
        now = min(max(time, began), ended)
        if now > before:
            yield before, now, list(active.values()), last, leaves[number]
            before = now
        if starts:
            active[number] = leaves[number]
        else:
            last = active.pop(number, last)


def _border(runs: list[tuple[float, float]], start: float, end: float) -> tuple[int, float] | None:
    """Returns the number of the run that an idle moment precedes, and the end of the one before.

    None: the moment lies within a run.
    """
    for number in range(1, len(runs)):
        ended = max(end for _, end in runs[:number])
        if ended <= start and end <= runs[number][0]:
            return number, ended
    return None


def _waiting_for(
    trace: Trace, start: float, end: float, border: tuple[int, float]
) -> dict[tuple[str, str, str], float]:
    """Shares an idle moment between what the host did in it.

    The devices wait for the host only if the next step was not begun when the last one ended.
    """
    number, idle_since = border
    begun = trace.steps[number].start if number < len(trace.steps) else None
    if begun is not None and begun <= idle_since:
        return {(LAUNCH, "", ""): end - start}
    found: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for phase in trace.phases:
        if (seconds := min(end, phase.end) - max(start, phase.start)) > 0:
            found[_PHASES[phase.name], "", ""] += seconds
    rest = end - start - sum(found.values())
    waited = _released(trace, idle_since)
    if waited is not None:
        found[SYNC, waited.name, waited.text] += rest
    elif found and rest < sum(found.values()):  # what starts the step is late for the same reason
        found[max(found, key=found.__getitem__)] += rest
    else:
        line = max(trace.lines, key=lambda x: min(end, x.end) - max(start, x.start), default=None)
        seen = line is not None and line.start < end and line.end > start
        key = (PYTHON, line.name, line.text) if line and seen else (PYTHON, "", "")
        found[key] += rest
    return dict(found)


def _released(trace: Trace, idle_since: float) -> Span | None:
    """Returns the line that waited for the devices until they were idle, if the host did.

    On a busy machine a short step may end before the host, held up, comes to wait for it.
    """

    def covers(span: Span) -> bool:
        return span.start < idle_since <= span.end + _SAMPLED_LATE

    def follows(span: Span) -> bool:
        return idle_since <= span.start < idle_since + _HELD_UP

    lines = [x for x in trace.lines if x.waits and covers(x)]
    if lines:
        return lines[-1]
    late = next((x for x in trace.lines if x.waits and follows(x)), None)
    if any(map(covers, trace.waits)):
        line = next((x for x in trace.lines if x.start < idle_since <= x.end), None)
        return late or line or Span("", idle_since, idle_since)
    waited = any(follows(x) and x.end - x.start > _READ for x in trace.waits)
    return late if waited else None


def _take_off(
    between: dict[str, float], operations: Mapping[str, Cost], loops: Mapping[str, str]
) -> float:
    """Takes off what the host's recording of operations took in loops, and returns it per step.

    Each operation takes as long to record as the shortest one of its loop takes in all, which adds
    to a counter or compares it. Measured: a loop whose operations took 0.65 us took 1.05 us in a
    trace; its shortest one took 0.27 us, and 0.09 us passed until the next.
    """
    members: defaultdict[str, list[Cost]] = defaultdict(list)
    for name, cost in operations.items():
        if loops.get(name):
            members[loops[name]].append(cost)
    taken = 0.0
    for loop, costs in members.items():
        often = [cost for cost in costs if cost.count >= _OFTEN]
        shortest = min((cost.seconds / cost.count for cost in often), default=0.0)
        for cost in often:
            taken += cost.count * shortest
            cost.seconds -= cost.count * shortest
            cost.short_seconds = max(0.0, cost.short_seconds - cost.count * shortest)
        if often:
            taken += between.pop(loop, 0.0)
    return taken
