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

from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.errors import UserError


def main(*paths: str) -> None:
    """Prints the page of a trace, or of a program."""
    text, chip = flags.FLAGS.text, flags.FLAGS.chip
    if text is None:
        cli.refuse_ignored("chip", "a trace comes with its machine")
        if len(paths) != 1:
            what = f"{len(paths)} traces are named, not one" if paths else "no trace is named"
            raise UserError(what, "For example, give runs/quickstart")
    elif paths:
        raise UserError(f"{paths[0]} would be ignored: --text has no trace", "Leave one out")

    from gpt2.profile.machine import Machine  # brings JAX, which takes seconds
    from gpt2.profile.page import describe_program, explain, read_program

    if text is None:
        print(explain(Path(paths[0])), end="")
        return
    program = read_program(Path(text))
    dtypes = {operation.dtype for operation in program.operations.values()}
    machine = Machine.from_chip(chip) if chip else Machine.here(dtypes)
    print(describe_program(program, machine), end="")


if __name__ == "__main__":
    flags.DEFINE_string("text", None, "A compiled program as HLO text, in place of a trace.")
    flags.DEFINE_string("chip", None, "With --text: whose limits; this machine's if empty.")
    cli.parse(takes_files=True)
    cli.run(main)
