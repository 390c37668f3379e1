"""Convert a directory with a Hugging Face model to a run, or a run to such a directory.

    python -m gpt2.hf import --from=DIR --workdir=DIR
    python -m gpt2.hf export --workdir=DIR --to=DIR [--checkpoint=best|latest|STEP]

eval.py and gpt2.generate read an imported run like any other run. However, an imported run does not
record on which text the model was trained: give eval.py the flags --corpus and --val_fraction.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

from absl import flags

from gpt2 import cli
from gpt2.errors import UserError
from gpt2.hf.weights import export_run, import_run

# Command -> two flags: for the directory that the command reads, and for the one that it writes.
_DIRECTORIES = {"import": ("from", "workdir"), "export": ("workdir", "to")}


def define_flags() -> None:
    """Define the flags of the commands `import` and `export`."""
    flags.DEFINE_string("from", None, "import: the Hugging Face directory to read.")
    flags.DEFINE_string("to", None, "export: the Hugging Face directory to write.")
    flags.DEFINE_string(
        "workdir",
        None,
        "import: the directory of the run to write. export: the directory of the run to read.",
    )
    flags.DEFINE_string(
        "checkpoint", "best", "export: the checkpoint to read: best, latest or a step."
    )


def main(command: str) -> None:
    """Run `import` or `export`, and print the directory that was written."""
    names = _DIRECTORIES[command]
    source, target = (flags.FLAGS[name].value for name in names)
    if not (source and target):
        raise UserError(
            f"{command} needs both --{names[0]} and --{names[1]}",
            f"Add --{names[0]}=DIR and --{names[1]}=DIR",
        )
    if command == "import":
        import_run(source, target)
    else:
        export_run(source, target, flags.FLAGS.checkpoint)
    print(f"wrote {target}")


if __name__ == "__main__":
    cli.run(main, define_flags, commands=tuple(_DIRECTORIES))
