"""report.html of a ledger: each idea with what it changes, and a picture."""

from pathlib import Path

from gpt2.ablate.arms import diff, differences
from gpt2.ablate.journal import Ledger
from gpt2.ablate.pictures import plot_ledger
from gpt2.ablate.report import render, write_page
from gpt2.ablate.tables import interval, number


def write_ledger_report(root: Path, ledger: Ledger) -> None:
    """Writes report.html and ledger.png."""
    gains = {0: 0.0}  # of each best by its number, from the start
    for idea in ledger.kept:
        gains[idea.number] = gains[idea.best] + idea.interval[0]
    plot_ledger(root / "ledger.png", ledger.ideas[1:], gains)
    body = render(
        "ledger.j2",
        ledger=ledger,
        gains=gains,
        diff=diff,
        differences=differences,
        number=number,
        interval=interval,
    )
    write_page(root, root.resolve().name, body, ["ledger.png"])
