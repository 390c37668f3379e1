"""The page profile.md: the cause that costs most, then tables of where a step's time goes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpt2.errors import UserError
from gpt2.profile.breakdown import LAUNCH, LOADER, PYTHON, SHORT, SYNC, Breakdown, break_down
from gpt2.profile.program import ProgramText
from gpt2.profile.trace import find_trace, read_trace

PAGE, PROGRAM = "profile.md", "step.hlo.txt"
WORTH_NAMING = 0.02  # share of a step
_TOP = 15
# What devices wait for between steps -> what helps.
_HELP = {
    SYNC: "Read results a step later, as `gpt2/telemetry/reporter.py` does, or less often.",
    LOADER: "Keep the prepared corpus on a faster disk, or do less in what reads it.",
    PYTHON: "Do it less often, or in another thread.",
    LAUNCH: "Make steps longer, with more sequences in a batch.",
}


class Cause(NamedTuple):
    """What takes `seconds` of a step, `where` it is (FILE:LINE with source), and what helps."""

    name: str
    seconds: float
    where: str
    help: str


def explain(path: Path) -> str:
    """Returns the page of a workdir, of its profile folder, or of a trace file."""
    file = find_trace(path)
    # The text of the step lies above the trace, which the profiler puts under plugins/profile/TIME.
    texts = [folder / PROGRAM for folder in file.parents[:4] if (folder / PROGRAM).exists()]
    try:
        program = ProgramText(texts[0].read_text() if texts else "")
        return render(break_down(read_trace(file), program), program)
    except ValueError as error:
        raise UserError(f"{file}: {error}", "Trace more steps of a run of train.py") from None


def find_causes(found: Breakdown, program: ProgramText) -> list[Cause]:
    """Returns the causes worth naming, the most expensive one first."""
    causes = []
    for (kind, where, text), seconds in found.gaps.items():
        place = f"`{where}`" + (f": `{text}`" if text else "") if where else ""
        help = _HELP.get(kind, "The devices wait for the host: do it less often.")
        causes.append(Cause(kind, seconds, place, help))
    loops: defaultdict[str, list[str]] = defaultdict(list)
    outside = 0.0
    for name, cost in found.operations.items():
        operation = program.find(name)
        if operation.loop or operation.kind == "loop":
            loops[operation.loop or name].append(name)
        elif cost.is_short:
            outside += cost.seconds
    for loop, names in loops.items():
        # XLA adds operations of its own, such as the counter's, that belong to no part.
        names.sort(key=lambda name: (program.find(name).part == "other", -_seconds(found, [name])))
        short = [name for name in names if found.operations[name].is_short]
        if _seconds(found, short) > 0.5 * _seconds(found, names) or loop in found.operations:
            first = program.find(names[0])
            where = f"`{program.find(loop).source or first.source or loop}`, {first.part}"
            count = sum(found.operations[name].count for name in names)
            help = f"It runs {count:,.0f} operations a step: do many turns as one larger one."
            causes.append(Cause("loop of tiny operations", _seconds(found, names), where, help))
    help = f"Each takes less than {1e6 * SHORT:.0f} µs: use a larger batch."
    causes.append(Cause("small operations", outside, "", help))
    ranked = sorted(causes, key=lambda cause: -cause.seconds)
    return [cause for cause in ranked if cause.seconds >= WORTH_NAMING * found.seconds]


def render(found: Breakdown, program: ProgramText) -> str:
    """Returns the page as markdown."""

    def share(seconds: float) -> tuple[str, str]:
        return _ms(seconds), f"{seconds / found.seconds:.1%}"

    cells: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    kinds: defaultdict[str, float] = defaultdict(float)
    for name, cost in found.operations.items():
        operation = program.find(name)
        cells[operation.part][operation.kind] += cost.seconds
        kinds[operation.kind] += cost.seconds
    parts = sorted(cells, key=lambda part: -sum(cells[part].values()))
    columns = sorted(kinds, key=lambda kind: -kinds[kind])
    causes = find_causes(found, program)
    step = f"of each step's {_ms(found.seconds)}"
    if causes:
        name, seconds, where, help = causes[0]
        where = f" ({where})" if where else ""
        what = f"{name[0].upper()}{name[1:]}: {_ms(seconds)} {step}, {seconds / found.seconds:.0%}"
        headline = f"**{what}**{where}. {help}"
    else:
        percent = f"{sum(kinds.values()) / found.seconds:.0%}"
        headline = f"**The devices compute {percent} {step}.** The largest part is {parts[0]}."
    numbers = f", {found.numbers[0]} to {found.numbers[-1]} counted from 0" if found.numbers else ""
    page = f"# Where the time of a step goes\n\n{headline}\n\nMean of {found.steps} steps{numbers}."
    page += " Operations that run at once share their time.\n"

    def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        lines = [head, ["---"] * len(head), *rows]
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"\n## {title}\n\n{text}\n" if rows else ""

    rows: list[Any] = [(c.name, *share(c.seconds), c.where, c.help) for c in causes]
    page += table("Causes", ("cause", "per step", "share", "where", "what helps"), rows)
    rows = [
        (part, *share(sum(cells[part].values())), *(_ms(cells[part][kind]) for kind in columns))
        for part in parts
    ]
    rows.append(("idle inside of a step", *share(found.idle), *("" for _ in columns)))
    page += table("By part and kind", ("part", "per step", "share", *columns), rows)
    rows = [(kind, *share(gap), *at) for (kind, *at), gap in found.gaps.items()]
    rows += [(f"program {name}", *share(s), "", "") for name, s in found.others.items()]
    waits = ("the devices wait for", "per step", "share", "the host at", "source")
    page += table("Between steps", waits, rows)
    longest = sorted(found.operations.items(), key=lambda x: -x[1].seconds)[:_TOP]
    rows = [
        (f"`{name}`", kind, part, source, f"{cost.count:,.0f}", *share(cost.seconds))
        for name, cost in longest
        for kind, part, source, _ in [program.find(name)]
    ]
    head = ("operation", "kind", "part", "source", "runs", "per step", "share")
    return page + table("The longest operations", head, rows)


def _seconds(found: Breakdown, names: Iterable[str]) -> float:
    return sum(found.operations[name].seconds for name in names)


def _ms(seconds: float) -> str:
    digits = 0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2 if seconds >= 1e-4 else 3
    return f"{1e3 * seconds:,.{digits}f} ms" if seconds else ""
