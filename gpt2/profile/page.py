"""The page profile.md: what costs most, then tables of where a step's time goes."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

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
    text = ""
    # The text of the step lies above the trace, which the profiler puts under plugins/profile/TIME.
    for folder in reversed(file.parents[:4]):
        if (folder / PROGRAM).exists():
            text = (folder / PROGRAM).read_text("utf-8")
    try:
        program = ProgramText(text)
        return render(break_down(read_trace(file), program), program)
    except ValueError as error:
        raise UserError(
            f"{file}: {error}", "Trace more steps of a run of train.py"
        ) from None


def render(found: Breakdown, program: ProgramText) -> str:
    """Returns the page as markdown."""
    parts: dict[str, float] = defaultdict(float)
    kinds: dict[str, float] = defaultdict(float)
    cells: dict[tuple[str, str], float] = defaultdict(float)
    for name, cost in found.operations.items():
        operation = program.find(name)
        parts[operation.part] += cost.seconds
        kinds[operation.kind] += cost.seconds
        cells[operation.part, operation.kind] += cost.seconds

    def share(seconds: float) -> list[str]:
        return [_ms(seconds), f"{seconds / found.seconds:.1%}"]

    waits = []
    for wait, seconds in _largest_first(found.gaps):
        at = f"`{wait.line}`" if wait.line else ""
        if wait.text:
            at += f": `{wait.text}`"
        waits.append([wait.cause, *share(seconds), at])
    columns = [kind for kind, _ in _largest_first(kinds)]
    rows = []
    for part, seconds in _largest_first(parts):
        by_kind = [_ms(cells[part, kind]) for kind in columns]
        rows.append([part, *share(seconds), *by_kind])
    largest = rows[0][0]
    rows.append(["idle inside of a step", *share(found.idle), *[""] * len(columns)])
    longest = []
    seconds_of = {name: cost.seconds for name, cost in found.operations.items()}
    for name, seconds in _largest_first(seconds_of)[:_TOP]:
        times = f"{found.operations[name].runs:,.0f}"
        longest.append([f"`{name}`", *program.find(name), times, *share(seconds)])

    step = f"of each step's {_ms(found.seconds)}"
    busy = f"{sum(kinds.values()) / found.seconds:.0%}"
    headline = f"**The devices compute {busy} {step}.** The largest part is {largest}."
    most = max(found.gaps.values(), default=0.0)
    if most >= WORTH_NAMING * found.seconds:
        cause, *_, at = waits[0]
        what = f"{cause[0].upper()}{cause[1:]}: {_ms(most)} {step}, {most / found.seconds:.0%}"
        headline = f"**{what}** ({at})." if at else f"**{what}**."
    return "\n".join(
        [
            "# Where the time of a step goes",
            "",
            headline,
            "",
            f"Mean of {found.steps} steps. Operations that run at once share their time.",
            *_table(
                "Between steps",
                ["the devices wait for", "per step", "share", "the host at"],
                waits,
            ),
            *_table("By part and kind", ["part", "per step", "share", *columns], rows),
            *_table(
                "The longest operations",
                ["operation", "kind", "part", "path", "runs", "per step", "share"],
                longest,
            ),
            "",
        ]
    )


Key = TypeVar("Key")


def _largest_first(seconds: Mapping[Key, float]) -> list[tuple[Key, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def _table(title: str, head: list[str], rows: list[list[str]]) -> list[str]:
    """Returns the lines of a table, of none if it has no rows."""
    if not rows:
        return []
    rule = ["---"] * len(head)
    lines = [f"| {' | '.join(line)} |" for line in (head, rule, *rows)]
    return ["", f"## {title}", "", *lines]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f} ms" if seconds else ""
