"""The page profile.md: what costs most, then tables of where a step's time goes."""

from pathlib import Path
from typing import TYPE_CHECKING

from gpt2.lab.profile.breakdown import Breakdown, break_down
from gpt2.lab.profile.program import ProgramText
from gpt2.lab.profile.trace import find_trace, read_trace
from gpt2.utils.files import reading

if TYPE_CHECKING:
    import pandas as pd

PAGE = "profile.md"
PROGRAM = "step.hlo.txt"
WORTH_NAMING = 0.02  # share of a step
_TOP = 15
_ALL = "all"  # parts, and kinds
_TIME = "per step"  # the column of seconds


def explain(path: Path) -> str:
    """Returns the page of a workdir, of its profile folder, or of a trace file."""
    file = find_trace(path)
    trace = read_trace(file)
    # It lies above the trace, which the profiler puts under plugins/profile/TIME.
    with reading(f"{PROGRAM} of {file}", "Trace the run again"):
        folder = file.absolute().parents[3]
        program = ProgramText((folder / PROGRAM).read_text("utf-8"))
    return render(break_down(trace, program), program)


def render(found: Breakdown, program: ProgramText) -> str:
    """Returns the page as markdown."""
    import pandas as pd

    rows = []
    for name, seconds in found.operations.items():
        rows.append([f"`{name}`", *program.find(name), seconds])
    columns = ["operation", "kind", "part", "path", _TIME]
    operations = pd.DataFrame(rows, columns=columns)
    operations = operations.sort_values(_TIME, ascending=False)
    parts = operations.pivot_table(
        values=_TIME,
        index="part",
        columns="kind",
        aggfunc="sum",
        fill_value=0.0,
        margins=True,
        margins_name=_ALL,
    )
    parts = parts.sort_values(_ALL, ascending=False)
    parts = parts.sort_values(_ALL, axis=1, ascending=False)
    busy = parts.loc[_ALL, _ALL] / found.seconds
    largest = parts.index[1]
    parts = parts.reset_index().rename(columns={_ALL: _TIME})
    gaps = pd.DataFrame(found.gaps.items(), columns=["the devices wait for", _TIME])
    gaps = gaps.sort_values(_TIME, ascending=False)

    step = f"of each step's {_ms(found.seconds)}"
    headline = (
        f"**The devices compute {busy:.0%} {step}.** The largest part is {largest}."
    )
    most = gaps[_TIME].max()
    if most >= WORTH_NAMING * found.seconds:
        cause = gaps.iloc[0, 0]
        share = f"{most / found.seconds:.0%}"
        headline = f"**{cause[0].upper()}{cause[1:]}: {_ms(most)} {step}, {share}**."
    return "\n".join(
        [
            "# Where the time of a step goes",
            "",
            headline,
            "",
            f"Mean of {found.steps} steps. Operations that run at once share their time.",
            f"For {_ms(found.idle)} inside of a step, none runs.",
            *_table("Between steps", gaps, found.seconds),
            *_table("By part and kind", parts, found.seconds),
            *_table("The longest operations", operations.head(_TOP), found.seconds),
            "",
        ]
    )


def _table(title: str, rows: "pd.DataFrame", step: float) -> list[str]:
    """Returns the lines of a table, whose numbers are seconds of a step."""
    shares = rows[_TIME] / step
    rows = rows.assign(share=shares.map("{:.1%}".format))
    times = rows.select_dtypes("number").columns
    rows[times] = rows[times].map(_ms)
    rule = ["---"] * len(rows.columns)
    lines = [rows.columns, rule, *rows.itertuples(index=False)]
    return ["", f"## {title}", "", *(f"| {' | '.join(line)} |" for line in lines)]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f} ms" if seconds else ""
