"""What makes a step slower than its operations need: causes with their cost."""

import dataclasses
import statistics
from collections import defaultdict

from gpt2.profile import account as accounts
from gpt2.profile.account import Account, Cost
from gpt2.profile.machine import Machine
from gpt2.profile.program import Operation, ProgramText

WORTH_NAMING = 0.02  # share of a step
_OWN_WAIT = "telemetry/reporter.py"  # waits by design
_FAR = 0.2  # share of its limit that a slow operation reaches at most


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a step takes longer than it would have to.

    Attributes:
        name: what it is.
        seconds: per step, the whole time that would go with the cause.
        where: FILE:LINE with source, or the operation; may be empty.
        why: what happens, as a clause.
        help: what to do about it, as a sentence.
    """

    name: str
    seconds: float
    where: str
    why: str
    help: str


# By what devices wait for: name, what happens, what helps.
_GAPS = {
    accounts.SYNC: (
        "host synchronisation",
        "the host waits for the step just begun, and the devices then wait for the host",
        "Read results a step later, as `gpt2/telemetry/reporter.py` does, or less often.",
    ),
    accounts.LOADER: (
        "slow loader",
        "the devices wait for the next batch",
        "Keep the prepared corpus on a faster disk, or do less in what reads it. `python -m "
        "gpt2.benchmark data` tells what the loader gives of synthetic text.",
    ),
    accounts.PYTHON: (
        "Python in the loop",
        "the host needs longer between two steps than the devices for one",
        "Do it less often, or in another thread.",
    ),
    accounts.VALIDATION: (
        "validation",
        "the devices wait while the host prepares or reads it",
        "Raise `train.eval_every`, or lower `train.eval_batches`.",
    ),
    accounts.CHECKPOINT: (
        "checkpoint",
        "the devices wait while the host takes a copy of the state",
        "Raise `train.checkpoint_every`.",
    ),
    accounts.LAUNCH: (
        "start of a program",
        "the next step was ready, and the runtime had not begun it",
        "Make steps longer: more sequences in a batch, or more micro-batches.",
    ),
}


def find_causes(account: Account, program: ProgramText | None, machine: Machine) -> list[Cause]:
    """Returns the causes worth naming, the most expensive one first."""
    causes = []
    for (kind, where, text), seconds in account.gaps.items():
        name, why, help = _GAPS[kind]
        if kind == accounts.SYNC and _OWN_WAIT in where:
            help = (
                "The loop waits here for the step before, which hides behind a step of usual "
                "length. Make steps longer: more sequences in a batch."
            )
        place = f"`{where}`" + (f": `{text}`" if text else "") if where else ""
        causes.append(Cause(name, seconds, place, why, help))
    if program:
        causes += _tiny_loops(account, program) + _slow_operations(account, program, machine)
        causes += _communication(account, program)
    outside = account.around_short + sum(
        cost.short_seconds
        for name, cost in account.operations.items()
        if not (program and name in program.operations and program.operations[name].loop)
    )
    causes.append(
        Cause(
            "small operations",
            outside,
            "",
            f"operations below {1e6 * accounts.SHORT:.0f} µs, and the time around them",
            "Give operations more work: a larger batch, `memory.scan_layers` with wider layers.",
        )
    )
    ranked = sorted(causes, key=lambda cause: -cause.seconds)
    return [cause for cause in ranked if cause.seconds >= WORTH_NAMING * account.seconds]


@dataclasses.dataclass(frozen=True)
class Loop:
    """What a loop takes, per step.

    Attributes:
        name: of its instruction.
        source: FILE:LINE, or empty.
        part: of the model, that of most of its time.
        turns: of all times that it runs.
        operations: in all turns.
        seconds: with the time between its operations.
        between: the time between them.
        short_seconds: of `seconds`, those of short operations and between operations.
    """

    name: str
    source: str
    part: str
    turns: float
    operations: float
    seconds: float
    between: float
    short_seconds: float


def find_loops(account: Account, program: ProgramText) -> list[Loop]:
    """Returns the loops that ran, without the loops inside them; the longest first."""
    members: defaultdict[str, list[tuple[Operation, Cost]]] = defaultdict(list)
    for name, cost in account.operations.items():
        operation = program.operations.get(name)
        if operation and operation.loop:
            members[operation.loop].append((operation, cost))
    loops = []
    for name, inside in members.items():
        between = account.between.get(name, 0.0)
        # XLA adds operations of its own, such as the counter's, that belong to no part.
        named = [pair for pair in inside if pair[0].part != "other"] or inside
        counts = [cost.count for _, cost in inside]
        loops.append(
            Loop(
                name,
                program.loops[name][0],
                max(named, key=lambda pair: pair[1].seconds)[0].part,
                statistics.mode(counts),
                sum(counts),
                sum(cost.seconds for _, cost in inside) + between,
                between,
                sum(cost.short_seconds for _, cost in inside) + between,
            )
        )
    return sorted(loops, key=lambda loop: -loop.seconds)


def _tiny_loops(account: Account, program: ProgramText) -> list[Cause]:
    found = [
        (
            loop.seconds,
            f"`{loop.source or loop.name}`, {loop.part}",
            f"it runs {loop.turns:,.0f} turns and {loop.operations:,.0f} operations, which take "
            f"{1e6 * loop.seconds / loop.operations:.1f} µs each with the time between them",
        )
        for loop in find_loops(account, program)
        if loop.short_seconds > 0.5 * loop.seconds
    ]
    for name, cost in account.operations.items():
        operation = program.operations.get(name)
        if operation and operation.kind == "loop":
            place = f"`{operation.source or name}`, {operation.part}"
            found.append((cost.seconds, place, "it runs as one kernel, on few values at a time"))
    help = "Do the work of many turns at once, as one operation on a larger array."
    return [Cause("loop of tiny operations", *each, help) for each in found]


def _communication(account: Account, program: ProgramText) -> list[Cause]:
    found = [
        (cost, operation)
        for name, cost in account.operations.items()
        if (operation := program.operations.get(name)) and operation.kind == "collective"
    ]
    if not found:
        return []
    longest, operation = max(found, key=lambda pair: pair[0].seconds)
    count = sum(cost.count for cost, _ in found)
    size = sum(cost.count * operation.bytes for cost, operation in found)
    share = longest.seconds / (seconds := sum(cost.seconds for cost, _ in found))
    return [
        Cause(
            "communication",
            seconds,
            f"most, {share:.0%}, in `{operation.name}`, {operation.part}"
            + f", {operation.source}" * bool(operation.source),
            f"{count:,.0f} collectives of {size / 1e6:,.1f} MB in all take it, as far as nothing "
            "runs beside them",
            "Use larger batches or fewer micro-batches, or another layout: `train.py --plan` "
            "tells what each sends. Simulated devices wait for each other, and tell nothing of a "
            "network.",
        )
    ]


def _slow_operations(account: Account, program: ProgramText, machine: Machine) -> list[Cause]:
    causes = []
    for name, cost in account.operations.items():
        operation = program.operations.get(name)
        if operation is None or cost.seconds < 0.05 * account.seconds:
            continue
        if operation.kind == "collective":
            continue  # all of them are one cause
        if operation.kind == "loop" or cost.short_seconds > 0.5 * cost.seconds:
            continue  # a loop is named as such, and what is short runs often
        limits = machine.limits(operation.flops, operation.dtype, operation.bytes)
        least = cost.count * max(limits)
        if 0 < least < _FAR * cost.seconds:
            limit = "products" if limits[0] >= limits[1] else "memory"
            causes.append(
                Cause(
                    "operation far from its limit",
                    cost.seconds - least,
                    f"`{name}`, {operation.part}"
                    + f", {operation.source}" * bool(operation.source),
                    f"it runs at {least / cost.seconds:.0%} of what {limit} allows",
                    "Look for transposes and strided reads in it; docs/performance.md has habits "
                    "of XLA.",
                )
            )
    return causes
