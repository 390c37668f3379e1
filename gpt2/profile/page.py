"""The page profile.md: the cause that costs most, then tables of where a step's time goes."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from gpt2.errors import UserError
from gpt2.profile.account import SHORT, Account, Cost, account
from gpt2.profile.causes import Cause, find_causes, find_loops
from gpt2.profile.machine import Machine
from gpt2.profile.program import Operation, ProgramText
from gpt2.profile.trace import find_trace, read_trace
from gpt2.utils.files import write_text
from gpt2.utils.text import counted

PAGE, PROGRAM, MACHINE = "profile.md", "step.hlo.txt", "machine.json"
_TOP = 20


def write_page(directory: Path) -> str:
    """Writes profile.md into a profile folder, from the trace in it, and returns its first line.

    Raises:
        UserError: as for `explain`.
    """
    text = explain(directory)
    write_text(directory / PAGE, text)
    first = next(line for line in text.splitlines()[1:] if line)
    return f"{first.replace('**', '')} See {directory / PAGE}"


def explain(path: Path) -> str:
    """Returns the page of a trace.

    The compiled step and the machine's rates are read from files beside it, if they are there.

    Args:
        path: a workdir, its profile folder, or a trace file.

    Raises:
        UserError: there is no trace, or a file is damaged.
    """
    file = find_trace(path)
    program = machine = None
    for folder in file.parents[:4]:  # the profiler puts a trace under plugins/profile/TIME
        if program is None and (folder / PROGRAM).exists():
            program = read_program(folder / PROGRAM)
        if machine is None and (folder / MACHINE).exists():
            machine = Machine.load(folder / MACHINE)
    machine = machine or Machine()
    try:
        charged = account(read_trace(file), program)
    except ValueError as error:
        raise UserError(f"{file}: {error}", "Trace more steps of a run of train.py") from None
    return render(charged, program, machine)


def read_program(file: Path) -> ProgramText:
    """Reads a compiled program as text.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    try:
        return ProgramText(file.read_text())
    except (OSError, ValueError):
        what = f"{file} is no HLO text" if file.exists() else f"{file} does not exist"
        raise UserError(what, "Write one with train.py --plan --plan_text=FILE") from None


def render(charged: Account, program: ProgramText | None, machine: Machine) -> str:
    """Returns the page as markdown."""
    known = dict(program.operations) if program else {}
    for name in charged.operations:
        known.setdefault(name, _unknown(name))
    causes = find_causes(charged, program, machine)
    rows = [(known[name], cost) for name, cost in charged.operations.items()]
    sections = [
        "# Where the time of a step goes",
        _headline(charged, causes, rows, machine),
        _about(charged, program, machine),
        _causes(charged, causes),
        _step(charged),
        _groups("part", rows, charged, machine, lambda o: " ".join([o.part, o.phase]).strip()),
        _groups("kind", rows, charged, machine, lambda o: o.kind),
        _loops(charged, program),
        _top(rows, charged, machine),
        _notes(rows, charged),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def describe_program(program: ProgramText, machine: Machine) -> str:
    """Returns a page about a program that has not run: FLOPs, bytes and limits by part."""
    found: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in program.operations.values():
        found[" ".join([operation.part, operation.phase]).strip()].append(operation)
    lines, whole = [], [0.0, 0.0, 0.0, 0.0]
    for part, members in found.items():
        flops = sum(o.times * o.flops for o in members)
        size = sum(o.times * o.bytes for o in members)
        least = [machine.limits(o.times * o.flops, o.dtype, o.times * o.bytes) for o in members]
        products, memory = (sum(each) for each in zip(*least, strict=True))
        whole = [a + b for a, b in zip(whole, (flops, size, products, memory), strict=True)]
        lines.append((max(products, memory), part, flops, size, products, memory))
    table = _table(
        ("part", "GFLOP of products", "GB", "products alone", "memory alone", "limit"),
        [
            (
                part,
                _giga(flops),
                f"{size / 1e9:,.3f}",
                _ms(products),
                _ms(memory),
                "products" if products >= memory else "memory",
            )
            for _, part, flops, size, products, memory in sorted(lines, reverse=True)
        ],
    )
    unknown = sum(turns is None for _, turns in program.loops.values())
    count = sum(operation.times for operation in program.operations.values())
    return (
        "\n\n".join(
            [
                f"# What {program.module} needs",
                f"**{counted(count, 'operation')}, {_giga(whole[0])} GFLOP of products, "
                f"{_giga(whole[1])} GB: at least {_ms(max(whole[2:]))} on {_rates(machine)}.**",
                table,
                "Per call and device. Bytes are those of operands and results, as if no cache held "
                "them."
                + (
                    f" {counted(unknown, 'loop')} of unknown length counted once."
                    if unknown
                    else ""
                ),
            ]
        )
        + "\n"
    )


def _headline(
    charged: Account,
    causes: Sequence[Cause],
    rows: Sequence[tuple[Operation, Cost]],
    machine: Machine,
) -> str:
    if causes:
        cause = causes[0]
        share = cause.seconds / charged.seconds
        where = f" ({cause.where})" if cause.where else ""
        return (
            f"**{_capital(cause.name)}: {_ms(cause.seconds)} of each step's "
            f"{_ms(charged.seconds)}, {share:.0%}**{where}. {_capital(cause.why)}."
        )
    parts: defaultdict[str, float] = defaultdict(float)
    for operation, cost in rows:
        parts[" ".join([operation.part, operation.phase]).strip()] += cost.seconds
    part, seconds = max(parts.items(), key=lambda item: item[1])
    return (
        f"**The devices compute {charged.computing / charged.seconds:.0%} of each step's "
        f"{_ms(charged.seconds)}.** The largest part is {part}, with {_ms(seconds)}."
    )


def _about(charged: Account, program: ProgramText | None, machine: Machine) -> str:
    steps = counted(charged.steps, "step")
    if charged.numbers:
        steps += f", {charged.numbers[0]} to {charged.numbers[-1]} counted from 0"
    text = (
        f"Mean of {steps}, on {_rates(machine)}. Shares of a limit pass 100% where a cache holds "
        "operands, or where operations that run at once share their time."
    )
    if charged.recording > 0.01 * charged.seconds:
        text += (
            f" The trace made a step {_ms(charged.recording)} longer, by recording its operations; "
            "that is taken off."
        )
    if charged.steps == 1:
        text += " One step shows nothing between steps: trace several."
    if program is None:
        text += f" Parts, FLOPs and bytes are unknown, since there is no {PROGRAM}."
    return text


def _causes(charged: Account, causes: Sequence[Cause]) -> str:
    if not causes:
        return ""
    rows = [
        (c.name, _ms(c.seconds), f"{c.seconds / charged.seconds:.0%}", c.where, c.help)
        for c in causes
    ]
    return "## Causes\n\n" + _table(("cause", "per step", "share", "where", "what helps"), rows)


def _step(charged: Account) -> str:
    gaps: defaultdict[str, float] = defaultdict(float)
    for (kind, _, _), seconds in charged.gaps.items():
        gaps[kind] += seconds
    lines = [
        ("operations", charged.computing),
        ("between operations of a step", sum(charged.between.values())),
        *((f"between steps: {kind}", seconds) for kind, seconds in gaps.items()),
        *((f"other program: {name}", seconds) for name, seconds in charged.others.items()),
    ]
    return "## A step\n\n" + _table(
        ("what", "per step", "share"),
        [(name, _ms(s), f"{s / charged.seconds:.1%}") for name, s in lines if s],
    )


def _groups(
    title: str,
    rows: Iterable[tuple[Operation, Cost]],
    charged: Account,
    machine: Machine,
    key: Callable[[Operation], str],
) -> str:
    groups: defaultdict[str, list[tuple[Operation, Cost]]] = defaultdict(list)
    for operation, cost in rows:
        groups[key(operation)].append((operation, cost))
    lines = []
    for name, members in groups.items():
        seconds = sum(cost.seconds for _, cost in members)
        flops = sum(o.flops * cost.count for o, cost in members)
        size = sum(o.bytes * cost.count for o, cost in members)
        count = sum(cost.count for _, cost in members)
        least = sum(_least(o, cost, machine) for o, cost in members)
        lines.append(
            (
                seconds,
                name,
                _ms(seconds),
                f"{seconds / charged.seconds:.1%}",
                f"{count:,.0f}",
                _giga(flops),
                f"{size / 1e9:,.3f}",
                f"{least / seconds:.0%}" if least and seconds else "",
            )
        )
    return f"## By {title}\n\n" + _table(
        (title, "per step", "share", "operations", "GFLOP of products", "GB", "of its limit"),
        [line[1:] for line in sorted(lines, reverse=True)],
    )


def _loops(charged: Account, program: ProgramText | None) -> str:
    loops = find_loops(charged, program) if program else []
    rows = [
        (
            f"`{loop.name}` {loop.source}",
            loop.part,
            f"{loop.turns:,.0f}",
            f"{loop.operations:,.0f}",
            _ms(loop.seconds),
            _ms(loop.between),
        )
        for loop in loops
    ]
    head = ("loop", "part", "turns", "operations", "per step", "of it between operations")
    return "## Loops\n\n" + _table(head, rows) if rows else ""


def _top(rows: Iterable[tuple[Operation, Cost]], charged: Account, machine: Machine) -> str:
    ranked = sorted(rows, key=lambda row: -row[1].seconds)[:_TOP]
    lines = []
    for operation, cost in ranked:
        products, memory = machine.limits(operation.flops, operation.dtype, operation.bytes)
        least = _least(operation, cost, machine)
        limit = ("products" if products >= memory else "memory") if least else ""
        lines.append(
            (
                f"`{operation.name}`",
                operation.kind,
                " ".join([operation.path or operation.part, operation.phase]).strip(),
                operation.source,
                f"{cost.count:,.0f}",
                _ms(cost.seconds),
                f"{cost.seconds / charged.seconds:.1%}",
                limit,
                f"{least / cost.seconds:.0%}" if least and cost.seconds else "",
            )
        )
    head = (
        "operation",
        "kind",
        "where",
        "source",
        "runs",
        "per step",
        "share",
        "limit",
        "of limit",
    )
    return f"## The {len(lines)} longest operations\n\n" + _table(head, lines)


def _notes(rows: Sequence[tuple[Operation, Cost]], charged: Account) -> str:
    short = sum(cost.short_seconds for _, cost in rows)
    return (
        "## How to read this\n\n"
        f"- Operations shorter than {1e6 * SHORT:.0f} µs take {short / charged.seconds:.1%} of a "
        "step.\n"
        "- Operations that run at once share their time, so that shares add up to the step.\n"
        "- The limit of an operation is the larger of FLOPs of its products over the rate of "
        "products, and bytes of its operands and results over that of memory.\n"
        "- The loss computes its gradient beside itself: both count as `head forward`."
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _least(operation: Operation, cost: Cost, machine: Machine) -> float:
    """Returns the least seconds per step that an operation may take on a machine."""
    return cost.count * max(machine.limits(operation.flops, operation.dtype, operation.bytes))


def _unknown(name: str) -> Operation:
    kind = name.partition(".")[0].replace("_", " ")
    kinds: Mapping[str, str] = {"dot": "product", "copy": "copy", "fusion": "fusion"}
    found = next((kinds[word] for word in reversed(kind.split()) if word in kinds), "other")
    return Operation(name, found, "unknown", "", "", "", 0.0, "", 0, 1, "")


def _rates(machine: Machine) -> str:
    if not machine.flops:
        return f"a {machine.device} whose rates are not known"
    products = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {t}" for t, rate in machine.flops.items())
    return f"{machine.device} ({products}, {machine.bandwidth / 1e9:,.0f} GB/s; {machine.source})"


def _giga(number: float) -> str:
    return f"{number / 1e9:,.{0 if number >= 1e12 else 2}f}"


def _ms(seconds: float) -> str:
    digits = 0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2 if seconds >= 1e-4 else 3
    return f"{1e3 * seconds:,.{digits}f} ms"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
