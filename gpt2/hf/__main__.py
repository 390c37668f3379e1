"""Convert Hugging Face directories to runs, and runs to Hugging Face directories.

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

# The flags of the directories that each command reads and writes.
_DIRECTORIES = {"import": ("from", "workdir"), "export": ("workdir", "to")}


def define_flags() -> None:
    """Define the flags of both commands."""
    flags.DEFINE_string("from", None, "import: the Hugging Face directory to read.")
    flags.DEFINE_string("to", None, "export: the Hugging Face directory to write.")
    flags.DEFINE_string(
        "workdir", None, "import: the run to write. export: the run to read."
    )
    flags.DEFINE_string(
        "checkpoint", "best", "export: the checkpoint to read: best, latest or a step."
    )


def main(command: str) -> None:
    """Run `import` or `export`, and print what was written."""
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
