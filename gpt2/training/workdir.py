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
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from gpt2 import __version__
from gpt2.config import Config, flatten, load_config
from gpt2.data.corpus import lies_in_files
from gpt2.data.dataset import Dataset, refuse_other
from gpt2.data.preparation import data_place
from gpt2.data.tokenizer import is_path
from gpt2.errors import UserError, warn
from gpt2.parallel import distributed
from gpt2.telemetry import StepClock, metrics
from gpt2.telemetry.reference import read_reference
from gpt2.training.checkpoint_files import find_damage, newest_whole_step, saved_steps
from gpt2.training.code import SOURCE, hash_code, read_starts
from gpt2.utils import files, launch, stores
from gpt2.utils.text import format_duration

_LOCK = ".lock"
_DATA = "data.json"

# Options that leave what the model learns as it is, but for rounding. A name that ends in "." or
# "_" stands for all that begin with it.
_ASIDE = (
    *(
        "parallel.",
        "memory.",
        "logging.",
        "model.attention",
        "data.data_dir",
        "train.keep_",
    ),
    *(
        "train.accumulate_steps",
        "train.log_every",
        "train.eval_",
        "train.checkpoint_every",
    ),
    "train.hang_seconds",
)
# Options that decide what the model learns, and may change when a run continues all the same: the
# end of the schedule moves, and a run that diverged may skip steps.
_MAY_CHANGE = ("train.num_steps", "train.skip_bad_steps")


def mirror(place: str) -> stores.Mirror:
    """Returns the mirror of a run's folder or URL, which one of its processes sends."""
    return stores.Mirror(place, sends=jax.process_index() == 0)


def check_options(workdir: Path, config: Config) -> None:
    """Refuses, before data are prepared, a directory in which this run cannot start or continue.

    `model.vocab_size` may be 0: `refuse_changes` looks again when it is known.
    """
    nearest = next(
        path for path in (workdir, *workdir.absolute().parents) if path.exists()
    )
    is_open = nearest.is_dir() and os.access(nearest, os.W_OK)
    if not is_open:
        raise UserError(
            f"nothing can be written in {workdir}", "Give another --workdir"
        )
    read_reference(
        config.logging.reference
    )  # which refuses what cannot be drawn at the end
    lacks_wandb = config.logging.wandb and importlib.util.find_spec("wandb") is None
    if lacks_wandb:
        raise UserError(
            "logging.wandb needs the package wandb", "Run `pip install wandb`"
        )
    if (workdir / "config.json").exists():
        if newest_whole_step(workdir, read=False) == 0:
            what = f"{workdir} holds imported weights, not a run to continue"
            how = f"Give another --workdir and --config.train.init_from=run:{workdir}"
            raise UserError(what, how)
        if not saved_steps(workdir) and (workdir / "samples.txt").exists():
            what = (
                f"{workdir} holds a finished run without checkpoints to continue from"
            )
            raise UserError(what, "Give another --workdir")
        refuse_changes(workdir, config)
        return
    data = stores.copy_of(data_place(config.data.data_dir)).resolve()
    for path in workdir.iterdir() if workdir.exists() else ():
        left_by_a_run = path.name in (_LOCK, stores.RECORD) or path.suffix == ".tmp"
        if not left_by_a_run and not data.is_relative_to(path.resolve()):
            raise UserError(
                f"{workdir} holds {path.name}, and no run", "Give another --workdir"
            )


def refuse_changes(workdir: Path, config: Config) -> None:
    """Refuses options that change what the run of a directory, if it holds one, has trained."""
    if not (workdir / "config.json").exists():
        return
    saved = deciding_options(load_config(workdir))
    now = deciding_options(config)
    if not now["model.vocab_size"]:  # not known yet
        now["model.vocab_size"] = saved["model.vocab_size"]
    for name, in_files in (("data.corpus", lies_in_files), ("data.tokenizer", is_path)):
        if in_files(saved[name]) and in_files(
            now[name]
        ):  # they may move: `check_data` decides
            del saved[name]
    differing = [name for name in saved if name in now and saved[name] != now[name]]
    changed = "; ".join(f"{name}={saved[name]}, not {now[name]}" for name in differing)
    how = "Give another --workdir, or the run's value"
    if changed:
        raise UserError(f"{workdir} holds a run with {changed}", how)
    latest = newest_whole_step(workdir, read=False) or 0
    num_steps = config.train.num_steps
    what = f"{workdir} holds a run of {latest} steps, more than train.num_steps={num_steps}"
    if latest > num_steps:
        raise UserError(what, "Give another --workdir, or as many steps")


def deciding_options(config: Config) -> dict[str, Any]:
    """Returns the options that a run keeps when it continues, by dotted name."""

    def decides(name: str) -> bool:
        if name == "train.accumulate_steps":  # dropout draws its masks by micro-batch
            return config.model.dropout > 0
        aside = any(name.startswith(n) if n[-1] in "._" else name == n for n in _ASIDE)
        return not aside and name not in _MAY_CHANGE

    return {
        name: value
        for name, value in flatten(config.to_dict()).items()
        if decides(name)
    }


def check_data(workdir: Path, dataset: Dataset) -> None:
    """Refuses to continue on another text or with another tokenizer than the run began with."""
    if not refuse_other(workdir / _DATA, dataset) and saved_steps(workdir):
        warn(
            f"{workdir / _DATA} is missing or damaged; whether the text is the same is not known"
        )


def find_start(workdir: Path) -> int:
    """Returns the step of the newest whole checkpoint, 0 without any, as process 0 finds it."""
    start = distributed.from_first(distributed.only_first(_find_start)(workdir) or 0)
    if (
        start and jax.process_index() and stores.url_of(workdir)
    ):  # this one reads its own copy
        stores.refresh(workdir)
        if damage := find_damage(workdir, start):
            raise UserError(damage, "Start all processes again")
    return start


def _find_start(workdir: Path) -> int:
    """Returns it, and tells of damaged ones after it."""
    stores.refresh(workdir)  # another run may have saved while this one prepared
    stores.push(stores.url_of(workdir), workdir)  # what a kill left unsent
    start = 0
    damage = list[str]()
    for step in reversed(saved_steps(workdir)):
        if not (found := find_damage(workdir, step)):
            start = step
            break
        damage.append(found)
    else:
        how = "Restore one from a copy, or start anew"
        if damage:
            raise UserError(f"{damage and damage[0]}, and there is no whole one", how)
    for each in damage:
        warn(f"{each}; the run continues from step {start}")
    return start


def is_finished(workdir: Path, config: Config, start: int) -> bool:
    """Returns whether a run stands at its last step and has written its last file, the samples."""
    ends = start == config.train.num_steps and (workdir / "samples.txt").exists()
    return bool(distributed.from_first(ends))


def describe_results(workdir: Path, scores: dict[str, float], clock: StepClock) -> str:
    """Returns a run's last lines: where the time went, how good the model is, what to look at."""
    shares = ", ".join(
        f"{name} {x:.0%}" for name, x in clock.shares().items() if x >= 0.005
    )
    spent = f"{format_duration(clock.total_seconds)}; {shares}"
    line = f"validation loss {scores['eval/loss']:.4f}, perplexity {scores['eval/perplexity']:,.2f}"
    if "eval/bits_per_byte" in scores:
        line += f", {scores['eval/bits_per_byte']:.3f} bits per byte"
    return f"time: {spent}\n{line}\nsee loss.png and samples.txt in {workdir}"


def begin(
    workdir: Path, config: Config, dataset: Dataset, start: int
) -> dict[str, float] | None:
    """Locks the directory, writes a start's files, and returns the seconds so far, by phase."""
    seconds = _begin(workdir, config, dataset, start)
    distributed.from_first(0)  # the directory is locked
    for step in saved_steps(workdir):
        if step > start or find_damage(workdir, step, ("metrics",)):
            (workdir / "damaged").mkdir(exist_ok=True)
            target = workdir / "damaged" / f"{step}-{time.time_ns()}"
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                (workdir / "checkpoints" / str(step)).rename(target)
                warn(f"the checkpoint of step {step} is now {target}")
    return seconds


@distributed.only_first
def _begin(
    workdir: Path, config: Config, dataset: Dataset, start: int
) -> dict[str, float]:
    lock(workdir, start)
    (workdir / "samples.txt").unlink(
        missing_ok=True
    )  # of an earlier end: see `is_finished`
    files.write_json(workdir / "config.json", config.to_dict())
    files.write_json(workdir / _DATA, files.seal(dataset.describe()))
    dataset.tokenizer.save(workdir / "tokenizer.json")
    path = workdir / "environment.jsonl"
    logged = workdir / "metrics.jsonl"
    seconds, lost = metrics.seconds_taken(logged, start)
    line = describe_start(start) | {"lost_seconds": lost}
    before = [each for each in read_starts(workdir) if each["step"] < start]
    if others := {each["code"] for each in before} - {line["code"]}:
        warn(
            f"the run goes on with other code ({line['code']}) than before ({', '.join(others)})"
        )
    text = path.read_text("utf-8") if path.exists() else ""
    starts = [*map(json.loads, text.splitlines()), line]
    files.write_text(path, f"{text}{json.dumps(line)}\n")
    metrics.MetricsFile(
        logged, start
    ).close()  # forgets steps that are lost, which count once
    first, this = (datetime.fromisoformat(starts[i]["time"]) for i in (0, -1))
    seconds["lost"] = sum(each.get("lost_seconds", 0.0) for each in starts)
    seconds["down"] = max(0.0, (this - first).total_seconds() - sum(seconds.values()))
    age = launch.seconds_since_start()
    return seconds | {"start and end": seconds.get("start and end", 0.0) + age}


def lock(workdir: Path, start: int) -> None:
    """Keeps other processes from training in `workdir` until this one ends, however it ends."""
    workdir.mkdir(parents=True, exist_ok=True)
    # Another may have trained and ended since this one has found the newest whole step.
    if not files.lock_for_good(workdir / _LOCK) or newest_whole_step(
        workdir, after=start
    ):
        what = f"another process is training in {workdir}"
        raise UserError(what, "Wait for it or stop it, or give another --workdir")


def describe_start(step: int) -> dict[str, Any]:
    """Returns a line of environment.jsonl: what beside options and data decides a run's figures.

    It holds no name of a machine and no environment variables. `code` is a hash; see `hash_code`.
    `commit` and `clean` (no Python file differs from it) are of gpt2's checkout, None without one.
    """
    # Code that pip has installed below someone's checkout is no part of that checkout.
    tracked = _git("ls-files", "--error-unmatch", "gpt2/__init__.py") is not None
    changed = _git("status", "--porcelain", "--", "*.py") if tracked else None
    return {
        "step": step,
        "time": (
            datetime.now(UTC) - timedelta(seconds=launch.seconds_since_start())
        ).isoformat(),
        "command": sys.argv,
        "gpt2": __version__,
        "code": hash_code(),
        "commit": _git("rev-parse", "HEAD") if tracked else None,
        "clean": None if changed is None else not changed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }


def _git(*arguments: str) -> str | None:
    """Returns what git prints about the code, None if it fails, hangs or is missing."""
    command = ["git", "--no-optional-locks", "-C", str(SOURCE), *arguments]
    try:  # file systems may be slow
        done = subprocess.run(
            command, capture_output=True, check=True, text=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
