"""Turns Hugging Face directories into runs, and runs into Hugging Face directories.

python -m gpt2.hf import --from=DIR --workdir=DIR
python -m gpt2.hf export --workdir=DIR --to=DIR [--checkpoint=best|latest|STEP]
"""

from gpt2 import launch

if __name__ == "__main__":
    launch.prepare_process()

from gpt2 import cli
from gpt2.hf import options

if __name__ == "__main__":  # what is wrong is told now: the imports below take seconds
    cli.parse(options.define_flags, options.check, commands=tuple(options.DIRECTORIES))

from pathlib import Path

from absl import flags

from gpt2.errors import require_writable
from gpt2.hf.runs import export_run, import_run


def main(command: str) -> None:
    """Runs `import` or `export`, as the flags say."""
    reads, writes = options.DIRECTORIES[command]
    source, target = (Path(getattr(flags.FLAGS, name)) for name in (reads, writes))
    require_writable(writes, target.parent)
    {"import": _import, "export": _export}[command](source, target)


def _import(source: Path, workdir: Path) -> None:
    cfg = import_run(source, workdir)
    print(f"{workdir}: {cfg.num_layers} layers of width {cfg.embed_dim}")


def _export(workdir: Path, directory: Path) -> None:
    export_run(workdir, directory, flags.FLAGS.checkpoint)
    print(f"{directory}: ready for transformers' from_pretrained")


if __name__ == "__main__":
    cli.run(main)
