"""Write the files of a run other than checkpoints, and check whether the run can continue.

config.json         all options; `train.py --config=config.json` repeats the run
data.json           a description of the prepared corpus, which shows if the text was changed
tokenizer.json      the tokenizer, so that samples can be drawn without the corpus
environment.jsonl   versions, code and command, with one line for each start
.lock               locked by the process that trains here, so that no second process does
"""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax

from gpt2.config import Config, TrainConfig, flatten, load_config
from gpt2.config.options import OPTIONS
from gpt2.data import Dataset
from gpt2.data.datasets import read_mixture, refuse_other
from gpt2.data.preparing.prepared_folder import data_folder
from gpt2.data.readers import open_corpus, reads_files
from gpt2.data.tokenizer import is_path
from gpt2.errors import UserError, log, warn
from gpt2.model.gpt import Params
from gpt2.model.sampling import Sampling, generate
from gpt2.parallel import distributed
from gpt2.telemetry import StepClock, plot_losses
from gpt2.telemetry.metrics import MetricsFile, read_metrics
from gpt2.telemetry.reference import read_reference
from gpt2.telemetry.writers import check_wandb
from gpt2.training.checkpoint_files import (
    find_damage,
    latest_step,
    newest_whole_step,
    require_safe_path,
    saved_steps,
)
from gpt2.training.program import Program
from gpt2.utils import files, stores
from gpt2.utils.code import describe_code, describe_start
from gpt2.utils.mirror import mirrored

_LOCK = ".lock"
_DATA = "data.json"


def open_workdir(location: str) -> tuple[Path, contextlib.AbstractContextManager[None]]:
    """Return a run's local folder, and a context manager that uploads it.

    If `location` is a URL, the context manager of process 0 uploads the folder to this URL while
    its body runs. If `location` is a folder, and in other processes, the context manager does
    nothing.
    """
    workdir = stores.fetch(location)
    if jax.process_index() or not stores.is_url(location):
        return workdir, contextlib.nullcontext()
    return workdir, mirrored(location, workdir)


def require_same_start(config: Config, **facts: object) -> None:
    """Raise a UserError if the processes of a run differ in their options, code or `facts`.

    Options with `may_differ` are not compared. `facts` are other values to compare, by name. The
    comparison does not use JAX's devices, so they need not exist yet.
    """
    for name, value in flatten(config.to_dict()).items():
        if not OPTIONS[name].may_differ:
            facts[name] = value
    distributed.require_same(facts | describe_code())


def check_options(workdir: Path, config: Config) -> None:
    """Raise a UserError if the run cannot start or continue in a directory.

    This check comes before the data are prepared. If `model.vocab_size` is 0, the tokenizer will
    determine it, so it is not checked here. Call `refuse_changes` again once the data are prepared.
    Also raise a UserError if `logging.reference` or `logging.wandb` cannot be used.
    """
    _require_writable(workdir)
    require_safe_path(workdir)
    # Check the file of published losses now, because the run plots it only at its end.
    read_reference(config.logging.reference)
    if config.logging.wandb:
        check_wandb()
    location = stores.url_or_path(workdir)
    if not (workdir / "config.json").exists():
        data = stores.local_folder(data_folder(config.data.data_dir)).resolve()
        for path in workdir.glob("*"):
            # A run that was killed at its start leaves these files.
            if path.name in (_LOCK, stores.RECORD) or path.suffix == ".tmp":
                continue
            if not data.is_relative_to(path.resolve()):
                raise UserError(
                    f"--workdir={location} contains {path.name}, but no run",
                    "Give another --workdir",
                )
        return
    if saved_steps(workdir) == [0]:
        raise UserError(
            f"--workdir={location} contains imported weights, not a run that can continue",
            f"Give another --workdir and --config.train.init_from=run:{location}",
        )
    if not saved_steps(workdir) and (workdir / "samples.txt").exists():
        raise UserError(
            f"--workdir={location} contains a finished run without checkpoints",
            "Give another --workdir",
        )
    refuse_changes(workdir, config)


def _require_writable(workdir: Path) -> None:
    parent = workdir.absolute()
    while not parent.exists():
        parent = parent.parent
    try:
        # Create a file, because permissions do not show whether a directory can be written. They
        # allow root everything, but even root cannot write in /proc.
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise UserError(
            f"--workdir={workdir} cannot be written ({error.strerror})",
            "Give another --workdir",
        ) from error


def refuse_changes(workdir: Path, config: Config) -> None:
    """Raise a UserError if `workdir` contains a run that cannot continue with `config`.

    It cannot continue if an option would change its training, or if it already has more steps than
    `train.num_steps`.
    """
    if not (workdir / "config.json").exists():
        return
    saved = deciding_options(load_config(workdir))
    now = deciding_options(config)
    if not now["model.vocab_size"]:  # The data are not prepared yet.
        del saved["model.vocab_size"]
    # Files may move: `check_data` compares their content.
    if _without_paths(saved["data.corpus"]) == _without_paths(now["data.corpus"]):
        del saved["data.corpus"]
    if is_path(saved["data.tokenizer"]) and is_path(now["data.tokenizer"]):
        del saved["data.tokenizer"]
    changed = list[str]()
    for name, value in saved.items():
        if name in now and now[name] != value:
            changed.append(f"{name}={value}, not {now[name]}")
    location = stores.url_or_path(workdir)
    if changed:
        # A misspelt corpus is reported first, since another --workdir would not help.
        corpus = config.data.corpus
        for part in read_mixture(corpus) or [corpus]:
            with contextlib.suppress(ModuleNotFoundError):
                open_corpus(part)
        raise UserError(
            f"--workdir={location} holds a run with {'; '.join(changed)}",
            "Give another --workdir, or the options of the run",
        )
    latest = latest_step(workdir) or 0
    num_steps = config.train.num_steps
    if latest > num_steps:
        raise UserError(
            f"--workdir={location} holds a run of {latest} steps, "
            f"more than train.num_steps={num_steps}",
            "Give another --workdir, or a larger train.num_steps",
        )


def _without_paths(corpus: str) -> list[tuple[str, Fraction]]:
    """Return the name (empty if it is a path) and the weight of each corpus in `data.corpus`."""
    parts = read_mixture(corpus) or {corpus: Fraction(1)}
    return [
        ("" if reads_files(name) else name, weight) for name, weight in parts.items()
    ]


def deciding_options(config: Config) -> dict[str, Any]:
    """Return the options that must not change when a run continues, by dotted name."""
    options = dict[str, Any]()
    for name, value in flatten(config.to_dict()).items():
        if not OPTIONS[name].may_change:
            options[name] = value
        # Each micro-batch draws its own random masks, so their number affects the training.
        if OPTIONS[name].is_random and value:
            options["train.accumulate_steps"] = config.train.accumulate_steps
    return options


def read_data(workdir: Path) -> dict[str, Any] | None:
    """Return the description of the data of the run in a directory, or None if there is none."""
    return files.read_sealed(workdir / _DATA)


def check_data(workdir: Path, dataset: Dataset) -> None:
    """Raise a UserError if a run would continue with another text or tokenizer.

    Also raise a UserError if the texts of the run's processes differ. If the description of the
    run's data is missing or damaged, print a warning.
    """
    distributed.require_same(dataset.describe())
    path = workdir / _DATA
    if not refuse_other(path, dataset) and saved_steps(workdir):
        warn(
            f"{path} is missing or damaged, so the run cannot notice whether the text has changed"
        )


def find_start(workdir: Path) -> int:
    """Return the newest step with an undamaged checkpoint, or 0 if there are no checkpoints.

    If all checkpoints are damaged, raise a UserError. Process 0 searches for the checkpoint, and
    all processes return the result of process 0.
    """
    start = distributed.from_first(_find_start(workdir) or 0)
    location = stores.url_or_path(workdir)
    if start and jax.process_index() and stores.is_url(location):
        stores.fetch(location)  # Each process reads its own copy of the files.
        if damage := find_damage(workdir, start):
            raise UserError(damage, "Start all processes again")
    return start


@distributed.only_first
def _find_start(workdir: Path) -> int:
    location = stores.url_or_path(workdir)
    # Another run may have saved a checkpoint while this run prepared its data.
    stores.fetch(location)
    # A run that was killed may not have uploaded all its files.
    stores.push(location, workdir)
    step, damage = newest_whole_step(workdir)
    if damage and not step:
        raise UserError(
            f"{damage[0]}, and there is no undamaged checkpoint",
            "Restore the checkpoint from a copy, or give another --workdir",
        )
    for message in damage:
        warn(f"{message}; the run continues from step {step}")
    return step


def is_finished(workdir: Path, config: Config, start: int) -> bool:
    """Return whether a run has finished, and print a message if it has.

    A finished run has the checkpoint of its last step, and samples.txt.
    """
    is_finished = start == config.train.num_steps and (workdir / "samples.txt").exists()
    is_finished = bool(distributed.from_first(is_finished))
    if is_finished:
        distributed.only_first(log)(
            f"{stores.url_or_path(workdir)} is finished at step {start}; "
            "raise --config.train.num_steps to continue",
            sys.stdout,
        )
    return is_finished


def lacks_score(workdir: Path, options: TrainConfig, start: int, metric: str) -> bool:
    """Return whether a score was due at step `start`, but is not known.

    `metric` is its name: `eval/loss`, or that of a task's score. A signal or an error may have
    interrupted its computation. At the last step, the result is always True, because a finished run
    prints all scores, which metrics.jsonl may have lost.
    """
    is_loss = metric == "eval/loss"
    every = options.eval_every if is_loss else options.eval_tasks_every
    if start == 0 or not options.is_due(start, every):
        return False
    if start == options.num_steps:
        return True
    return not distributed.from_first(_is_logged(workdir, start, metric) or 0)


@distributed.only_first
def _is_logged(workdir: Path, step: int, metric: str) -> bool:
    records = read_metrics(workdir / "metrics.jsonl")
    return any(each["step"] == step and metric in each for each in records)


@distributed.only_first
def finish(
    workdir: Path,
    program: Program,
    params: Params,
    dataset: Dataset,
    scores: Mapping[str, float],
    clock: StepClock,
) -> None:
    """Plot loss.png, write samples.txt, and print the time and the validation loss.

    The samples are drawn with the parameters `params`. `scores` are the results of the last
    validation.
    """
    config = program.config
    plot_losses(workdir, config.logging.reference)
    tokenizer = dataset.tokenizer
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
    log(clock.describe(), sys.stdout)
    log(line, sys.stdout)
    log(f"see loss.png and samples.txt in {stores.url_or_path(workdir)}", sys.stdout)


def begin(workdir: Path, config: Config, dataset: Dataset, start: int) -> None:
    """Lock the directory, and write the files that describe the run.

    The run continues from step `start`. Move later checkpoints, and checkpoints whose scores are
    damaged, to `damaged/`.
    """
    _begin(workdir, config, dataset, start)
    distributed.from_first(0)  # Other processes wait until process 0 has the lock.
    for step in saved_steps(workdir):
        if step > start or find_damage(workdir, step, ("metrics",)):
            _move_to_damaged(workdir, f"checkpoints/{step}")


def _move_to_damaged(workdir: Path, name: str) -> None:
    path = workdir / name
    target = workdir / "damaged" / f"{path.name}-{time.time_ns()}"
    target.parent.mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # Another process has moved it.
        path.rename(target)
        warn(
            f"moved {path} to {target}, because it is damaged or the run continues from an "
            "earlier step"
        )


@distributed.only_first
def _begin(workdir: Path, config: Config, dataset: Dataset, start: int) -> None:
    lock(workdir, start)
    # If this run was shorter before, its samples would make it look finished: see `is_finished`.
    (workdir / "samples.txt").unlink(missing_ok=True)
    if start:
        num_steps = config.train.num_steps
        before = load_config(workdir).train.num_steps
        if before != num_steps:
            log(
                f"the run continues with train.num_steps={num_steps}, not {before}, so the"
                f" learning rate now follows the schedule of {num_steps} steps",
                sys.stdout,
            )
    files.write_json(workdir / "config.json", config.to_dict())
    files.write_json(workdir / _DATA, files.seal(dataset.describe()))
    dataset.tokenizer.save(workdir / "tokenizer.json")

    line = json.dumps(describe_start(start))
    path = workdir / "environment.jsonl"
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    if text and not text.endswith("\n"):  # the last line is incomplete
        text += "\n"
    files.write_text(path, f"{text}{line}\n")

    logged = workdir / "metrics.jsonl"
    # These are the metrics of an earlier run, whose checkpoints no longer exist.
    if start == 0 and read_metrics(logged):
        _move_to_damaged(workdir, logged.name)
    MetricsFile(logged, start).close()  # removes the lines of steps after `start`


def lock(workdir: Path, start: int) -> None:
    """Lock `workdir` until this process ends.

    Raise a UserError if another process trains there, or has saved a checkpoint after step `start`.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    is_locked = files.lock_for_good(workdir / _LOCK)
    # Another process may have trained and ended since this process read the newest step.
    newest, _ = newest_whole_step(workdir, after=start)
    folder = f"--workdir={stores.url_or_path(workdir)}"
    if not is_locked:
        raise UserError(
            f"Another process is training in {folder}",
            "Wait for it, stop it, or give another --workdir",
        )
    if newest:
        raise UserError(
            f"Another process has trained in {folder} since this process began",
            "Repeat the command to continue from there, or give another --workdir",
        )
