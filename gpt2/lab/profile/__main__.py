"""Print where the time of traced steps goes, and write the result next to the trace.

    python -m gpt2.lab.profile runs/quickstart

The argument is a workdir, its profile folder, or a trace file, `*.xplane.pb`. The result is written
to profile.txt or, if the argument is a URL, only printed. For rooflines and single operations, open
the trace with xprof.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

from gpt2 import cli
from gpt2.errors import UserError
from gpt2.lab.profile.breakdown import break_down, describe
from gpt2.lab.profile.trace import find_trace, read_trace
from gpt2.utils.files import write_text
from gpt2.utils.stores import fetch, is_url


def main(*paths: str) -> None:
    """Print the breakdown of a trace, and write it to profile.txt unless the path is a URL."""
    if len(paths) != 1:
        raise UserError(
            f"gpt2.lab.profile reads the trace of one run, but {len(paths)} paths are given",
            "Give the workdir of one run",
        )
    folder, file = find_trace(fetch(paths[0]))
    text = describe(break_down(read_trace(file)))
    print(text, end="")
    if not is_url(paths[0]):
        write_text(folder / "profile.txt", text)


if __name__ == "__main__":
    cli.run(main, takes_files=True)
