"""The files of a run beside its checkpoints, and the checks that let it continue.

config.json         the resolved options; as --config of train.py they repeat the run
data.json           what the prepared corpus holds, to tell it from another of the same name
tokenizer.json      the tokenizer, so that the run can be sampled without its corpus
environment.jsonl   with what the run was made, a line for each start
.lock               held by the process that trains here, so that no second one does
"""

from pathlib import Path
from typing import Any

import jax

from gpt2.config import Config, differences, leaves_training, load_config
from gpt2.data.corpus import lies_in_files
from gpt2.data.dataset import Dataset, data_root, differing_data, read_data
from gpt2.data.tokenizer import fingerprint, is_path
from gpt2.data.tokenizer import load as load_tokenizer
from gpt2.errors import UserError, require_writable, warn
from gpt2.parallel import distributed
from gpt2.parallel.mesh import batch_shards
from gpt2.telemetry.metrics import read_metrics
from gpt2.training.changes import tell_of_changes, tell_of_masks
from gpt2.training.checkpoint_files import (
    WEIGHTS,
    describe_damage,
    find_damage,
    is_marked_unsaved,
    latest_step,
    newest_whole_step,
    saved_steps,
    set_aside,
)
from gpt2.training.environment import last_start, record_start
from gpt2.utils import files
from gpt2.utils.digests import seal
from gpt2.utils.text import counted

# Options that decide what the model learns, and may change when a run continues all the same: the
# end of the schedule moves, and a run that diverged may leave out steps.
_MAY_CHANGE = ("train.num_steps", "train.skip_bad_steps", "train.skip_outliers")

_LOCK = ".lock"
_DATA, _TOKENIZER = "data.json", "tokenizer.json"
_FILES = (
    *("config.json", _DATA, _TOKENIZER, "environment.jsonl", "metrics.jsonl", _LOCK),
    *("loss.png", "samples.txt"),
)
_FOLDERS = ("checkpoints", "damaged", "tensorboard", "profile")


def check_options(workdir: Path, config: Config) -> None:
    """Checks, before the data are prepared, that a run can start or continue in a directory.

    `model.vocab_size` may be 0: `refuse_changes` looks again when it is known.

    Raises:
        UserError: the directory is not writable, holds other files than a run's, or holds a run
            with other options. The message names the option or the obstacle.
    """
    require_writable("workdir", workdir)
    for name in (*_FILES, *_FOLDERS):
        path, is_folder = workdir / name, name in _FOLDERS
        if path.exists() and path.is_dir() != is_folder:
            raise UserError(
                f"{path} is {'no folder' if is_folder else 'a folder'}, where a run writes a "
                f"{'folder' if is_folder else 'file'}",
                "Rename it, or give another --workdir",
            )
    if not (workdir / "config.json").exists():
        data = data_root(config.data.data_dir).resolve()
        found = workdir.iterdir() if workdir.exists() else ()
        own = [path for path in found if not data.is_relative_to(path.resolve())]
        if not all(map(_precedes_config, own)):
            raise UserError(
                f"{workdir} holds files that do not belong to a run", "Give another --workdir"
            )
        return
    latest = newest_whole_step(workdir, read=False)
    if latest == 0:
        raise UserError(
            f"{workdir} holds imported weights, not a run to continue",
            f"Start a run with --config.train.init_from=run:{workdir} and another --workdir",
        )
    if not saved_steps(workdir) and _had_checkpoint(workdir, load_config(workdir)):
        raise UserError(
            f"{workdir} holds a run whose checkpoints are gone; a new run would erase its metrics",
            "Restore a checkpoint; to start anew, remove the workdir or give another --workdir",
        )
    refuse_changes(workdir, config)


def refuse_changes(workdir: Path, config: Config) -> None:
    """Checks that the run of a directory, if it holds one, may continue with these options.

    Raises:
        UserError: it may not. The message names all options that differ, and too few steps.
    """
    if not (workdir / "config.json").exists():
        return
    latest, num_steps = newest_whole_step(workdir, read=False), config.train.num_steps
    has_more = latest is not None and latest > num_steps
    steps = f"a run of {counted(latest or 0, 'step')}, more than train.num_steps={num_steps}"
    enough = f"--config.train.num_steps={latest} or more"
    changed = {
        name: values
        for name, values in differences(load_config(workdir), config).items()
        if not _may_change(name, *values, workdir, config)
    }
    if changed:
        what = [f"{name}={old}, not {new}" for name, (old, new) in changed.items()]
        how = [f"--config.{name}={old}" for name, (old, _) in changed.items()]
        raise UserError(
            f"{workdir} holds {f'{steps}, and' if has_more else 'a run'} with {'; '.join(what)}",
            f"Give another --workdir, or {' '.join([*how, enough] if has_more else how)}",
        )
    if has_more:
        raise UserError(f"{workdir} holds {steps}", f"Give another --workdir, or {enough}")


def _may_change(name: str, old: Any, new: Any, workdir: Path, config: Config) -> bool:
    """Returns whether a run may continue with another value of an option."""
    if name == "train.accumulate_steps" and config.model.dropout:
        return False  # masks are drawn by micro-batch
    if _is_move(name, old, new) and read_data(workdir / _DATA) is not None:
        return True  # check_data decides
    if name == "model.vocab_size" and new == 0:
        return True  # the tokenizer's, which is not known yet
    return leaves_training(name) or name in _MAY_CHANGE


def _precedes_config(path: Path) -> bool:
    """Returns whether a run that ended before it wrote config.json may have left this file."""
    return path.name == _LOCK or path.suffix == ".tmp"


def check_data(workdir: Path, dataset: Dataset) -> None:
    """Checks that a run would continue on the same text with the same tokens.

    Raises:
        UserError: the corpus or the tokenizer is not what the run began with.
    """
    saved, found = read_data(workdir / _DATA), dataset.describe()
    if saved is None:
        if (workdir / _DATA).exists():
            warn(f"{workdir / _DATA} is damaged; whether the text is the same is not known")
        saved = _tokenizer_of(workdir / _TOKENIZER)
    differing = differing_data(saved, found)
    if differing:
        other = differing & {"tokenizer", "tokenizer_sha256"}
        name = "the tokenizer that data.tokenizer" if other else "the text that data.corpus"
        raise UserError(
            f"{name} names is no longer what {workdir} was trained on",
            "Restore it, or give another --workdir",
        )


def _tokenizer_of(path: Path) -> dict:
    """Returns what tokenizer.json tells of the data, nothing if it is missing or damaged."""
    try:
        return {"tokenizer_sha256": fingerprint(load_tokenizer(path))}
    except UserError:
        return {}


def lock(workdir: Path, start: int) -> None:
    """Keeps other processes from training in `workdir` until this one ends, however it ends.

    Call it before anything changes in the directory. It has no effect on a file system without
    locks.

    Args:
        workdir: created if missing.
        start: the newest step that the run has saved whole, 0 for none, as this process has read
            it.

    Raises:
        UserError: another process trains there, or has done so since `start` was read.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    alone = files.lock_for_good(workdir / _LOCK)
    if not alone or newest_whole_step(workdir, after=start):
        raise UserError(
            f"another process is training in {workdir}",
            "Wait for it or stop it, or give another --workdir",
        )


@distributed.only_first
def begin(workdir: Path, config: Config, dataset: Dataset, start: int) -> None:
    """Locks the directory and writes the files of a run that is about to start or continue.

    Checkpoints beyond `start` are damaged. They move to `workdir/damaged`, so that the run can save
    those steps again.

    Args:
        workdir: created if missing.
        config: the resolved options.
        dataset: the prepared corpus.
        start: the step to continue from (`find_start`).

    Raises:
        UserError: another process trains there.
    """
    lock(workdir, start)
    shards = batch_shards(config.parallel, jax.device_count())
    if start:
        tell_of_changes(load_config(workdir), config, start)
        if config.model.dropout:
            tell_of_masks(last_start(workdir).get("batch_shards"), shards, start)
    for path in set_aside(workdir, after=start):
        warn(f"the damaged checkpoint is now {path}")
    write(workdir, config, dataset)
    record_start(workdir, start, shards)


def find_start(workdir: Path) -> int:
    """Returns the step to continue from: that of the newest checkpoint that is whole, 0 for none.

    Checkpoints that are passed over are named on stderr.

    Raises:
        UserError: there are checkpoints, and all of them are damaged.
    """
    newest, start = latest_step(workdir), newest_whole_step(workdir)
    if newest is not None and start is None:
        damage = describe_damage(workdir, newest, find_damage(workdir, newest))
        others = ", and so are all others" if len(saved_steps(workdir)) > 1 else ", the only one"
        how = "Restore one from a copy; to start anew, give another --workdir"
        if (whole := _newest_whole_weights(workdir)) is not None:
            how += f", with weights that are whole: --config.train.init_from=run:{workdir}@{whole}"
        raise UserError(damage + others, how)
    passed_over = [step for step in saved_steps(workdir) if step > (start or 0)]
    for step in reversed(passed_over):
        warn(describe_damage(workdir, step, find_damage(workdir, step)))
    if passed_over:
        warn(f"the run continues from step {start}")
    return start or 0


def _newest_whole_weights(workdir: Path) -> int | None:
    """Returns the newest step whose weights can be read, though it may be damaged elsewhere."""
    if load_config(workdir).optim.keeps_average:
        return None  # its weights are in the optimizer's state
    steps = saved_steps(workdir)
    if any(find_damage(workdir, step, ("metrics",)) for step in steps):
        return None  # Orbax reads the scores of all steps before the weights of one
    return next((step for step in reversed(steps) if not find_damage(workdir, step, WEIGHTS)), None)


def describe_saved(workdir: Path) -> str:
    """Returns what a run that ends now leaves, as the end of a sentence."""
    step = latest_step(workdir)
    if step:
        return f"; the same command continues from step {step}"
    return "; nothing is saved yet, and the same command starts again"


def is_finished(workdir: Path, config: Config, start: int) -> bool:
    """Returns whether a run stands at its last step and has written its last file, the samples."""
    return start == config.train.num_steps and (workdir / "samples.txt").exists()


def describe_finished(workdir: Path, config: Config) -> str:
    """Returns a line for a run that is finished. It names options that do nothing any more."""
    idle = [
        f"{name}={new}"
        for name, (old, new) in differences(load_config(workdir), config).items()
        if not _is_move(name, old, new)
    ]
    ignored = f", and {'; '.join(idle)} does nothing" if idle else ""
    another = "give another --workdir, or " if idle else ""
    return (
        f"{workdir} is finished at step {config.train.num_steps}{ignored}; "
        f"{another}raise --config.train.num_steps to continue"
    )


def write(workdir: Path, config: Config, dataset: Dataset) -> None:
    """Writes the files of a run that is about to start or continue, config.json first.

    It first removes files that would be mistaken for this run's: metrics that were logged under
    another config.json (see `_had_checkpoint`), and samples of an earlier end (see `is_finished`).
    """
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "samples.txt").unlink(missing_ok=True)
    if latest_step(workdir) is None:
        (workdir / "metrics.jsonl").unlink(missing_ok=True)
    files.write_json(workdir / "config.json", config.to_dict())
    about, saved = dataset.describe(), read_data(workdir / _DATA)
    if saved is None:
        _keep_damaged(workdir / _DATA)
    if saved != about:
        files.write_json(workdir / _DATA, seal(about))
    if _tokenizer_of(workdir / _TOKENIZER) != {"tokenizer_sha256": about["tokenizer_sha256"]}:
        _keep_damaged(workdir / _TOKENIZER)
        dataset.tokenizer.save(workdir / _TOKENIZER)


def _keep_damaged(path: Path) -> None:
    """Renames a file that is about to be written anew, and says so."""
    if path.exists():
        damaged = path.rename(files.unused(path.with_name(f"{path.name}.damaged")))
        warn(f"{path} was damaged and is written anew; what it held is in {damaged}")


def _had_checkpoint(workdir: Path, saved: Config) -> bool:
    """Returns whether a run without checkpoints must have had one.

    A run that was killed before its first checkpoint was complete has logged steps too. It has
    logged none past its second checkpoint, which begins only when the first is complete or has
    failed. A mark tells of the latter. Samples are written after the last checkpoint.
    """
    logged = read_metrics(workdir / "metrics.jsonl")
    every = saved.train.checkpoint_every
    outran = 0 < 2 * every < max((line["step"] for line in logged), default=0)
    return (outran and not is_marked_unsaved(workdir)) or (workdir / "samples.txt").exists()


def _is_move(name: str, old: Any, new: Any) -> bool:
    """Returns whether both values of an option name files, which may have moved."""
    if name == "data.corpus":
        same_kind = old.partition(":")[0] == new.partition(":")[0]
        return same_kind and lies_in_files(new)
    return name == "data.tokenizer" and is_path(old) and is_path(new)
