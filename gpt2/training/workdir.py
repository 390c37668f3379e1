"""The files of a run beside its checkpoints, and the checks that let it continue.

config.json         the resolved options; as --config of train.py they repeat the run
data.json           what the prepared corpus holds, to tell it from another of the same name
tokenizer.json      the tokenizer, so that the run can be sampled without its corpus
environment.jsonl   with what the run was made, a line for each start
.lock               held by the process that trains here, so that no second one does
"""

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from gpt2.config import Config, flatten, load_config
from gpt2.config.options import OPTIONS
from gpt2.data.corpus import Dataset, refuse_other
from gpt2.data.preparing.prepared_folder import data_folder
from gpt2.data.readers import reads_files
from gpt2.data.tokenizer import Tokenizer, is_path
from gpt2.errors import UserError, log, warn
from gpt2.model.gpt import Params
from gpt2.model.sampling import Sampling, generate
from gpt2.parallel import distributed
from gpt2.telemetry import StepClock, plot_losses
from gpt2.telemetry.metrics import MetricsFile, read_metrics
from gpt2.telemetry.reference import read_reference
from gpt2.training.checkpoint_files import (
    find_damage,
    latest_step,
    newest_whole_step,
    saved_steps,
)
from gpt2.training.program import Program
from gpt2.utils import files, stores
from gpt2.utils.code import describe_start
from gpt2.utils.mirror import mirrored

_LOCK = ".lock"
_DATA = "data.json"


def open_workdir(place: str) -> tuple[Path, contextlib.AbstractContextManager[None]]:
    """Returns a run's folder, and what sends a URL all that the run writes: by one process."""
    workdir = stores.fetch(place)
    if jax.process_index() or not stores.is_url(place):
        return workdir, contextlib.nullcontext()
    return workdir, mirrored(place, workdir)


def check_options(workdir: Path, config: Config) -> None:
    """Refuses, before data are prepared, a directory in which this run cannot start or continue.

    `model.vocab_size` may be 0: `refuse_changes` looks again when it is known.
    """
    nearest = workdir.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise UserError(
            f"nothing can be written in {workdir}", "Give another --workdir"
        )
    # Which refuses what cannot be drawn at the end.
    read_reference(config.logging.reference)
    if config.logging.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "logging.wandb needs the package wandb", "Run `pip install wandb`"
        )
    if not (workdir / "config.json").exists():
        data = stores.copy_of(data_folder(config.data.data_dir)).resolve()
        for path in workdir.glob("*"):
            # What a start leaves that was cut short.
            if path.name in (_LOCK, stores.RECORD) or path.suffix == ".tmp":
                continue
            if not data.is_relative_to(path.resolve()):
                raise UserError(
                    f"{workdir} holds {path.name}, and no run", "Give another --workdir"
                )
        return
    if saved_steps(workdir) == [0]:
        place = stores.place_of(workdir)
        raise UserError(
            f"{place} holds imported weights, not a run to continue",
            f"Give another --workdir and --config.train.init_from=run:{place}",
        )
    if not saved_steps(workdir) and (workdir / "samples.txt").exists():
        raise UserError(
            f"{workdir} holds a finished run without checkpoints to continue from",
            "Give another --workdir",
        )
    refuse_changes(workdir, config)


def refuse_changes(workdir: Path, config: Config) -> None:
    """Refuses options that change what the run of a directory, if it holds one, has trained."""
    if not (workdir / "config.json").exists():
        return
    saved = deciding_options(load_config(workdir))
    now = deciding_options(config)
    if not now["model.vocab_size"]:  # not known yet
        del saved["model.vocab_size"]
    # What lies in files may move: `check_data` decides.
    if reads_files(saved["data.corpus"]) and reads_files(now["data.corpus"]):
        del saved["data.corpus"]
    if is_path(saved["data.tokenizer"]) and is_path(now["data.tokenizer"]):
        del saved["data.tokenizer"]
    changed = list[str]()
    for name, value in saved.items():
        if name in now and now[name] != value:
            changed.append(f"{name}={value}, not {now[name]}")
    place = stores.place_of(workdir)
    if changed:
        raise UserError(
            f"{place} holds a run with {'; '.join(changed)}",
            "Give another --workdir, or the run's value",
        )
    latest = latest_step(workdir) or 0
    num_steps = config.train.num_steps
    if latest > num_steps:
        raise UserError(
            f"{place} holds a run of {latest} steps, more than train.num_steps={num_steps}",
            "Give another --workdir, or as many steps",
        )


def deciding_options(config: Config) -> dict[str, Any]:
    """Returns the options that a run keeps when it continues, by dotted name."""
    found = dict[str, Any]()
    for name, value in flatten(config.to_dict()).items():
        if not OPTIONS[name].may_change:
            found[name] = value
    if config.model.dropout > 0:  # which draws its masks by micro-batch
        found["train.accumulate_steps"] = config.train.accumulate_steps
    return found


def check_data(workdir: Path, dataset: Dataset) -> None:
    """Refuses to continue on another text or with another tokenizer than the run began with."""
    path = workdir / _DATA
    if not refuse_other(path, dataset) and saved_steps(workdir):
        warn(f"{path} is missing or damaged; whether the text is the same is not known")


def find_start(workdir: Path) -> int:
    """Returns the step of the newest whole checkpoint, 0 without any, as process 0 finds it."""
    start = distributed.from_first(_find_start(workdir) or 0)
    place = stores.place_of(workdir)
    if start and jax.process_index() and stores.is_url(place):
        stores.fetch(place)  # this one reads its own copy
        if damage := find_damage(workdir, start):
            raise UserError(damage, "Start all processes again")
    return start


@distributed.only_first
def _find_start(workdir: Path) -> int:
    """Returns it, and tells of damaged ones after it."""
    place = stores.place_of(workdir)
    stores.fetch(place)  # another run may have saved while this one prepared
    stores.push(place, workdir)  # what a kill left unsent
    step, damage = newest_whole_step(workdir)
    if damage and not step:
        raise UserError(
            f"{damage[0]}, and there is no whole one",
            "Restore one from a copy, or start anew",
        )
    for each in damage:
        warn(f"{each}; the run continues from step {step}")
    return step


def is_finished(workdir: Path, config: Config, start: int) -> bool:
    """Says so if a run stands at its last step and has written its last file, the samples."""
    ends = start == config.train.num_steps and (workdir / "samples.txt").exists()
    ends = bool(distributed.from_first(ends))
    if ends:
        distributed.only_first(log)(
            f"{stores.place_of(workdir)} is finished at step {start}; "
            "raise --config.train.num_steps to continue",
            sys.stdout,
        )
    return ends


@distributed.only_first
def finish(
    workdir: Path,
    program: Program,
    params: Params,
    tokenizer: Tokenizer,
    scores: Mapping[str, float],
    clock: StepClock,
) -> None:
    """Draws loss.png, writes samples.txt, and tells where the time went and how good it is."""
    config = program.config
    plot_losses(workdir, config.logging.reference)
    start = tokenizer.eot or 0
    samples = generate(
        program.model,
        params,
        [[start]] * 3,
        max_new_tokens=min(256, config.model.context_length - 1),
        sampling=Sampling(temperature=0.8, top_k=50),
        seed=config.seed,
        eot=tokenizer.eot,
        vocab_size=tokenizer.vocab_size,
    )
    rule = "\n" + "-" * 80 + "\n"
    texts = rule.join(map(tokenizer.decode, samples))
    files.write_text(workdir / "samples.txt", f"{texts}\n")

    line = f"validation loss {scores['eval/loss']:.4f}, perplexity {scores['eval/perplexity']:,.2f}"
    if "eval/bits_per_byte" in scores:
        line += f", {scores['eval/bits_per_byte']:.3f} bits per byte"
    log(f"time: {clock.describe()}", sys.stdout)
    log(line, sys.stdout)
    log(f"see loss.png and samples.txt in {stores.place_of(workdir)}", sys.stdout)


def begin(workdir: Path, config: Config, dataset: Dataset, start: int) -> None:
    """Locks the directory and writes a start's files."""
    _begin(workdir, config, dataset, start)
    distributed.from_first(0)  # the directory is locked
    for step in saved_steps(workdir):
        if step > start or find_damage(workdir, step, ("metrics",)):
            _set_aside(workdir, f"checkpoints/{step}")


def _set_aside(workdir: Path, name: str) -> None:
    """Moves something that a run does not go on from to `damaged/`."""
    path = workdir / name
    target = workdir / "damaged" / f"{path.name}-{time.time_ns()}"
    target.parent.mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        path.rename(target)
        warn(
            f"{path} was cut short, or the run goes on from before it; it is now {target}"
        )


@distributed.only_first
def _begin(workdir: Path, config: Config, dataset: Dataset, start: int) -> None:
    lock(workdir, start)
    # Of an earlier end: see `is_finished`.
    (workdir / "samples.txt").unlink(missing_ok=True)
    files.write_json(workdir / "config.json", config.to_dict())
    files.write_json(workdir / _DATA, files.seal(dataset.describe()))
    dataset.tokenizer.save(workdir / "tokenizer.json")

    line = json.dumps(describe_start(start))
    path = workdir / "environment.jsonl"
    text = path.read_text("utf-8") if path.exists() else ""
    files.write_text(path, f"{text}{line}\n")

    logged = workdir / "metrics.jsonl"
    if start == 0 and read_metrics(logged):  # whose checkpoints, if any, are gone
        _set_aside(workdir, logged.name)
    MetricsFile(logged, start).close()  # which forgets steps that are lost


def lock(workdir: Path, start: int) -> None:
    """Keeps other processes from training in `workdir` until this one ends, however it ends."""
    workdir.mkdir(parents=True, exist_ok=True)
    is_locked = files.lock_for_good(workdir / _LOCK)
    # Another may have trained and ended since this one has found the newest whole step.
    newest, _ = newest_whole_step(workdir, after=start)
    if newest or not is_locked:
        raise UserError(
            f"another process is training in {stores.place_of(workdir)}",
            "Wait for it or stop it, or give another --workdir",
        )
