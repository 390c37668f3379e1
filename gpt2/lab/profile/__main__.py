"""Reads a trace: where the time of a step goes, and which cause costs most.

    python -m gpt2.lab.profile runs/quickstart

The argument is a workdir, its profile folder, or a trace file, `*.xplane.pb`. The page lies in the
folder as profile.md already; this makes it again, and prints it.
"""

from gpt2 import cli
from gpt2.errors import UserError
from gpt2.lab.profile.page import explain
from gpt2.utils.stores import fetch


def main(*paths: str) -> None:
    """Prints the page of a trace."""
    if len(paths) != 1:
        raise UserError(
            f"{len(paths)} traces are named, not one", "Give a run's workdir"
        )
    print(explain(fetch(paths[0])), end="")


if __name__ == "__main__":
    cli.run(main, takes_files=True)
