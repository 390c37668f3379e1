r"""Reads a trace: where the time of a step goes, and which cause costs most.

    python -m gpt2.profile runs/quickstart
    python -m gpt2.profile --text=step.hlo.txt [--chip=H100]

The argument is a workdir, its profile folder, or a trace file, `*.xplane.pb`. The page lies in the
folder as profile.md already; this makes it again, and prints it. With `--text`, a compiled program
is read that has not run, as `train.py --plan --plan_text=FILE` writes it.
"""

from gpt2 import launch

if __name__ == "__main__":
    launch.prepare_process()

from absl import flags

from gpt2 import cli
from gpt2.errors import UserError

if __name__ == "__main__":  # what is wrong is told now: the imports below take seconds
    flags.DEFINE_string("text", None, "A compiled program as HLO text, in place of a trace.")
    flags.DEFINE_string("chip", None, "With --text: whose limits; this machine's if empty.")
    cli.parse(takes_files=True)

from pathlib import Path

from gpt2.profile.machine import Machine
from gpt2.profile.page import describe_program, explain, read_program


def main(*paths: str) -> None:
    """Prints the page of a trace, or of a program."""
    if flags.FLAGS.text is not None:
        if paths:
            raise UserError(f"{paths[0]} would be ignored: --text has no trace", "Leave one out")
        program = read_program(Path(flags.FLAGS.text))
        dtypes = {operation.dtype for operation in program.operations.values()}
        machine = Machine.from_chip(flags.FLAGS.chip) if flags.FLAGS.chip else Machine.here(dtypes)
        print(describe_program(program, machine), end="")
        return
    cli.refuse_ignored("chip", "a trace comes with its machine")
    if len(paths) != 1:
        raise UserError(
            f"{len(paths)} traces are named, not one", "For example, give runs/quickstart"
        )
    print(explain(Path(paths[0])), end="")


if __name__ == "__main__":
    cli.run(main)
