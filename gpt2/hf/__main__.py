"""Turns Hugging Face directories into runs, and runs into Hugging Face directories.

python -m gpt2.hf import --from=DIR --workdir=DIR
python -m gpt2.hf export --workdir=DIR --to=DIR [--checkpoint=best|latest|STEP]
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

from absl import flags

from gpt2 import cli
from gpt2.errors import UserError
from gpt2.hf.weights import export_run, import_run

# The directory that each command reads and the one that it writes.
_DIRECTORIES = {"import": ("from", "workdir"), "export": ("workdir", "to")}


def define_flags() -> None:
    """Defines the flags of both commands."""
    flags.DEFINE_string("from", None, "import: the Hugging Face directory to read.")
    flags.DEFINE_string("to", None, "export: the Hugging Face directory to write.")
    flags.DEFINE_string("workdir", None, "The run to write (import) or read (export).")
    flags.DEFINE_string("checkpoint", "best", "export: best, latest or a step.")


def main(command: str) -> None:
    """Runs `import` or `export`, and says what it wrote."""
    names = _DIRECTORIES[command]
    source, target = (flags.FLAGS[name].value for name in names)
    if not (source and target):
        raise UserError(f"{command} needs --{names[0]}=DIR and --{names[1]}=DIR")
    if command == "import":
        import_run(source, target)
    else:
        export_run(source, target, flags.FLAGS.checkpoint)
    print(f"{target} is written")


if __name__ == "__main__":
    cli.run(main, define_flags, commands=tuple(_DIRECTORIES))
