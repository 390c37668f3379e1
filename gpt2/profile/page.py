"""The page profile.md: what costs most, then tables of where a step's time goes."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2.errors import UserError
from gpt2.profile.breakdown import Breakdown, break_down
from gpt2.profile.program import ProgramText
from gpt2.profile.trace import find_trace, read_trace

PAGE = "profile.md"
PROGRAM = "step.hlo.txt"
WORTH_NAMING = 0.02  # share of a step
_TOP = 15


def explain(path: Path) -> str:
    """Returns the page of a workdir, of its profile folder, or of a trace file."""
    file = find_trace(path)
    # The text of the step lies above the trace, which the profiler puts under plugins/profile/TIME.
    texts = [
        folder / PROGRAM for folder in file.parents[:4] if (folder / PROGRAM).exists()
    ]
    try:
        program = ProgramText(texts[0].read_text() if texts else "")
        return render(break_down(read_trace(file), program), program)
    except ValueError as error:
        raise UserError(
            f"{file}: {error}", "Trace more steps of a run of train.py"
        ) from None


def render(found: Breakdown, program: ProgramText) -> str:
    """Returns the page as markdown."""

    def share(seconds: float) -> tuple[str, str]:
        return _ms(seconds), f"{seconds / found.seconds:.1%}"

    cells: defaultdict[str, defaultdict[str, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    kinds: defaultdict[str, float] = defaultdict(float)
    for name, cost in found.operations.items():
        operation = program.find(name)
        cells[operation.part][operation.kind] += cost.seconds
        kinds[operation.kind] += cost.seconds
    parts = sorted(cells, key=lambda part: -sum(cells[part].values()))
    columns = sorted(kinds, key=lambda kind: -kinds[kind])
    waits = [
        (kind, seconds, f"`{where}`" + f": `{text}`" * bool(text) if where else "")
        for (kind, where, text), seconds in sorted(
            found.gaps.items(), key=lambda gap: -gap[1]
        )
    ]
    step = f"of each step's {_ms(found.seconds)}"
    if waits and waits[0][1] >= WORTH_NAMING * found.seconds:
        kind, seconds, where = waits[0]
        what = f"{kind[0].upper()}{kind[1:]}: {_ms(seconds)} {step}, {seconds / found.seconds:.0%}"
        headline = f"**{what}**{where and f' ({where})'}."
    else:
        percent = f"{sum(kinds.values()) / found.seconds:.0%}"
        headline = (
            f"**The devices compute {percent} {step}.** The largest part is {parts[0]}."
        )
    numbers = (
        f", {found.numbers[0]} to {found.numbers[-1]} counted from 0"
        if found.numbers
        else ""
    )
    page = f"# Where the time of a step goes\n\n{headline}\n\nMean of {found.steps} steps{numbers}."
    page += " Operations that run at once share their time.\n"

    def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        lines = [head, ["---"] * len(head), *rows]
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"\n## {title}\n\n{text}\n" if rows else ""

    rows: list[Any] = [(kind, *share(gap), where) for kind, gap, where in waits]
    head: Sequence[str] = ("the devices wait for", "per step", "share", "the host at")
    page += table("Between steps", head, rows)
    rows = [
        (
            part,
            *share(sum(cells[part].values())),
            *(_ms(cells[part][kind]) for kind in columns),
        )
        for part in parts
    ]
    rows.append(("idle inside of a step", *share(found.idle), *("" for _ in columns)))
    page += table("By part and kind", ("part", "per step", "share", *columns), rows)
    longest = sorted(found.operations.items(), key=lambda x: -x[1].seconds)[:_TOP]
    rows = [
        (f"`{name}`", *program.find(name), f"{cost.runs:,.0f}", *share(cost.seconds))
        for name, cost in longest
    ]
    head = ("operation", "kind", "part", "path", "runs", "per step", "share")
    return page + table("The longest operations", head, rows)


def _ms(seconds: float) -> str:
    digits = (
        0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2 if seconds >= 1e-4 else 3
    )
    return f"{1e3 * seconds:,.{digits}f} ms" if seconds else ""
