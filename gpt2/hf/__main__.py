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

from gpt2.config import DataConfig, load_config
from gpt2.data.shards import open_shards
from gpt2.errors import UserError, require_writable
from gpt2.hf.runs import export_run, import_run
from gpt2.utils.terminal import wrap_command
from gpt2.utils.text import counted


def main(command: str) -> None:
    """Runs `import` or `export`, as the flags say."""
    reads, writes = options.DIRECTORIES[command]
    source, target = (Path(getattr(flags.FLAGS, name)) for name in (reads, writes))
    require_writable(writes, target.parent)
    {"import": _import, "export": _export}[command](source, target)


def _import(source: Path, workdir: Path) -> None:
    cfg = import_run(source, workdir)
    print(f"{workdir}: {counted(cfg.num_layers, 'layer')}, {cfg.embed_dim} wide")
    given = f"--workdir={workdir}"
    weights = f"--config={workdir / 'config.json'}", f"--config.train.init_from=run:{workdir}"
    for what, *command in (
        ("score", "eval.py", given, "--corpus=text:FILE"),
        ("sample", "-m", "gpt2.generate", given, "--prompt=TEXT"),
        ("train on", "train.py", *weights, "--config.data.corpus=text:FILE", "--workdir=DIR"),
    ):
        print(f"to {what}:")
        print(wrap_command(["python", *command], indent="  "))


def _export(workdir: Path, directory: Path) -> None:
    export_run(workdir, directory, flags.FLAGS.checkpoint)
    print(f"{directory}: ready for transformers' from_pretrained")
    if (workdir / "data.json").exists():  # weights that came from elsewhere have no text
        data = load_config(workdir).data
        command = ["python", "eval.py", f"--hf={directory}", f"--corpus={data.corpus}"]
        if not _has_validation_files(data):
            command.append(f"--val_fraction={data.val_fraction}")
        without = ", without its document mask" if data.document_mask else ""
        print(f"to score it on the text that the run held out{without}:")
        print(wrap_command(command, indent="  "))


def _has_validation_files(data: DataConfig) -> bool:
    """Whether names of shards, and no share, say what is held out."""
    try:
        return data.corpus.startswith("tokens:") and not open_shards(data).by_share
    except UserError:  # they are not here
        return False


if __name__ == "__main__":
    cli.run(main)
