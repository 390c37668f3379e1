"""What a run keeps about itself beside its checkpoints, and what it takes to continue it.

config.json      the resolved options
data.json        what the prepared corpus holds, to tell it from another of the same name
tokenizer.json   the tokenizer, so that the run can be sampled without its corpus
.lock            held by the process that trains here, so that no second one does
"""

import dataclasses
import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.checkpoint import latest_step
from gpt2.config import Config, differences, load_config
from gpt2.data.prepare import Dataset
from gpt2.data.records import TokenStream
from gpt2.data.tokenizer import fingerprint, is_path
from gpt2.errors import UserError, counted, require_writable
from gpt2.telemetry.metrics import read_metrics

# What may change when a run continues: none of it decides what is learnt, but `train.num_steps`,
# which moves the end of the learning-rate schedule.
_MAY_CHANGE = (
    "parallel.",
    "memory.",
    "logging.",
    "model.attention",
    "data.data_dir",
    "train.num_steps",
    "train.accumulate_steps",
    "train.log_every",
    "train.eval_",
    "train.checkpoint_every",
    "train.keep_checkpoints",
)

_LOCK = ".lock"
# Corpora that lie in files, which can be moved.
_MOVABLE = ("text", "jsonl", "parquet", "tokens")


def check_options(workdir: Path, config: Config) -> None:
    """Refuses a directory that is no run's or not to be written in, and to continue a run under
    other options.

    Raises:
        UserError: names the option, or what is in the way.
    """
    require_writable("workdir", workdir)
    if not (workdir / "config.json").exists():
        if workdir.exists() and not all(map(_precedes_config, workdir.iterdir())):
            raise UserError(f"{workdir} holds files that are no run's", "Give another --workdir")
        return
    latest, saved = latest_step(workdir), load_config(workdir)
    if latest == 0:
        raise UserError(
            f"{workdir} holds imported weights, and no run to continue",
            f"Start a run with --config.train.init_from=run:{workdir} and another --workdir",
        )
    if latest is None and _had_checkpoint(workdir, saved):
        raise UserError(
            f"{workdir} holds a run whose checkpoints are gone, and would lose metrics.jsonl too",
            "Restore a checkpoint; to start anew, remove the workdir or give another --workdir",
        )
    if latest is not None and latest > config.train.num_steps:
        raise UserError(
            f"{workdir} holds a run of {counted(latest, 'step')}, more than "
            f"train.num_steps={config.train.num_steps}",
            f"Give another --workdir, or --config.train.num_steps={latest} or more",
        )
    for name, (old, new) in differences(saved, config).items():
        if name.startswith(_MAY_CHANGE) or (name == "model.vocab_size" and new == 0):
            continue
        if _is_move(name, old, new) and (workdir / "data.json").exists():  # check_data decides
            continue
        raise UserError(
            f"{workdir} holds a run with {name}={old}, not {new}",
            "Give another --workdir, or the option as it was",
        )


def _precedes_config(path: Path) -> bool:
    """Says whether a run that ended before it wrote config.json may have left a file."""
    return path.name == _LOCK or path.suffix == ".tmp"


def check_data(workdir: Path, dataset: Dataset) -> None:
    """Refuses to continue a run on another text or with other tokens.

    Raises:
        UserError: the corpus or the tokenizer is not what the run began with.
    """
    path = workdir / "data.json"
    saved, found = json.loads(path.read_text()) if path.exists() else {}, _describe(dataset)
    differing = {name for name in saved if saved[name] != found.get(name)}
    if differing:
        other = "tokenizer_sha256" in differing
        name = "the tokenizer that data.tokenizer" if other else "the text that data.corpus"
        raise UserError(
            f"{name} names is no longer what {workdir} was trained on",
            "Restore it, or give another --workdir",
        )


def lock(workdir: Path, start: int) -> None:
    """Keeps other processes from training in `workdir` until this one ends, however it ends.

    To be called before anything is changed there. Nothing is kept where the file system has no
    locks.

    Args:
        workdir: created if missing.
        start: the newest step that the run has saved, 0 for none, as this process has read it.

    Raises:
        UserError: another process trains there, or has done so since `start` was read.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    # Never closed: the lock is the process's until its end.
    file = os.open(workdir / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = True
    except BlockingIOError:
        alone = False
    except OSError:  # a file system without locks
        alone = True
    if not alone or (latest_step(workdir) or 0) != start:
        raise UserError(
            f"another process is training in {workdir}",
            "Wait for it or stop it, or give another --workdir",
        )


def is_finished(workdir: Path, config: Config) -> bool:
    """Says whether a run has reached its last step and left its samples, the last of its files."""
    return latest_step(workdir) == config.train.num_steps and (workdir / "samples.txt").exists()


def write(workdir: Path, config: Config, dataset: Dataset) -> None:
    """Writes the files of a run that is about to start or continue, config.json first.

    What would be taken for this run's goes before: metrics that were logged under another
    config.json, see `_had_checkpoint`, and samples of an earlier end, see `is_finished`.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "samples.txt").unlink(missing_ok=True)
    if latest_step(workdir) is None:
        (workdir / "metrics.jsonl").unlink(missing_ok=True)
    _write_json(workdir / "config.json", config.to_dict())
    if not (workdir / "data.json").exists():
        _write_json(workdir / "data.json", _describe(dataset))
    if not (workdir / "tokenizer.json").exists():
        dataset.tokenizer.save(workdir / "tokenizer.json")


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _had_checkpoint(workdir: Path, saved: Config) -> bool:
    """Says whether a run must have had a checkpoint, though there is none.

    One that was killed before its first was whole has logged steps as well, but none past its
    second, which is not begun before the first is whole. Samples come after the last.
    """
    logged = read_metrics(workdir / "metrics.jsonl")
    every = saved.train.checkpoint_every
    outran = 0 < 2 * every < max((line["step"] for line in logged), default=0)
    return outran or (workdir / "samples.txt").exists()


def _describe(dataset: Dataset) -> dict:
    """Tells a corpus by what it holds, not by where it lies, so that a run can move."""
    return {
        "splits": {name: dataclasses.asdict(split) for name, split in dataset.splits.items()},
        "zlib_bits_per_byte": dataset.zlib_bits_per_byte,
        "training_sample_sha256": _hash_sample(dataset.open("train")),
        "tokenizer": dataset.tokenizer.name,
        "tokenizer_sha256": fingerprint(dataset.tokenizer),
    }


def _hash_sample(stream: TokenStream) -> str:
    """Returns a hash of pieces from all over a token stream, whose order no count tells."""
    digest = hashlib.sha256()
    for start in np.linspace(0, len(stream), 64, endpoint=False, dtype=np.int64):
        digest.update(stream.read(int(start), 256).tobytes())
    return digest.hexdigest()


def _is_move(name: str, old: Any, new: Any) -> bool:
    """Says whether an option names, before and after, what can lie in one place or another."""
    if name == "data.corpus":
        kind = new.partition(":")[0]
        return kind in _MOVABLE and old.partition(":")[0] == kind
    return name == "data.tokenizer" and is_path(old) and is_path(new)


def _write_json(path: Path, tree: dict) -> None:
    write_text(path, json.dumps(tree, indent=2) + "\n")
