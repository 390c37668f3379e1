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

from gpt2 import cli
from gpt2.profile import options

if __name__ == "__main__":  # what is wrong is told now: the imports below take seconds
    cli.parse(options.define_flags, options.check, takes_files=True)

from pathlib import Path

from absl import flags

from gpt2.profile.machine import Machine
from gpt2.profile.page import describe_program, explain, read_program


def main(*paths: str) -> None:
    """Prints the page of a trace, or of a program."""
    text, chip = flags.FLAGS.text, flags.FLAGS.chip
    if text is None:
        print(explain(Path(paths[0])), end="")
        return
    program = read_program(Path(text))
    dtypes = {operation.dtype for operation in program.operations.values()}
    machine = Machine.from_chip(chip) if chip else Machine.here(dtypes)
    print(describe_program(program, machine), end="")


if __name__ == "__main__":
    cli.run(main)
