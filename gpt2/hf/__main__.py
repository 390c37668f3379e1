"""Turns Hugging Face directories into runs, and runs into Hugging Face directories.

python -m gpt2.hf import --from=DIR --workdir=DIR
python -m gpt2.hf export --workdir=DIR --to=DIR [--checkpoint=best|latest|STEP]
"""

from gpt2 import launch

if __name__ == "__main__":
    launch.prepare_process()

from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.errors import UserError, require_writable


def _import() -> None:
    for name in ("to", "checkpoint"):
        cli.refuse_ignored(name, "import reads --from and writes --workdir")
    workdir = _directory("workdir")
    require_writable("workdir", workdir.parent)
    from gpt2.hf.runs import import_run  # brings JAX, which takes seconds

    cfg = import_run(_directory("from"), workdir)
    print(f"{workdir}: {cfg.num_layers} layers of width {cfg.embed_dim}")


def _export() -> None:
    cli.refuse_ignored("from", "export reads --workdir and writes --to")
    workdir, destination = _directory("workdir"), _directory("to")
    require_writable("to", destination.parent)
    from gpt2.hf.runs import export_run

    export_run(workdir, destination, flags.FLAGS.checkpoint)
    print(f"{destination}: ready for transformers' from_pretrained")


def _directory(flag: str) -> Path:
    directory = flags.FLAGS[flag].value
    if not directory:
        raise UserError(f"--{flag} is missing", f"Give --{flag}=DIR")
    return Path(directory)


def main(command: str) -> None:
    """Runs `import` or `export`, as the flags say."""
    _import() if command == "import" else _export()


if __name__ == "__main__":
    flags.DEFINE_string("from", None, "import: the Hugging Face directory to read.")
    flags.DEFINE_string("to", None, "export: the Hugging Face directory to write.")
    flags.DEFINE_string("workdir", None, "The run to write (import) or read (export).")
    flags.DEFINE_string("checkpoint", "best", "export: best, latest or a step.")
    cli.parse(commands=("import", "export"))
    cli.run(main)
