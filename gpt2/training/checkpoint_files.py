"""The folders of a run's checkpoints: which there are, which are whole, and which run made them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2.config import Config, flatten, load_config
from gpt2.utils import files, stores

# The parts of a checkpoint, each a folder. A folder `digests` beside them holds their digests.
ITEMS = ("params", "rest", "guard", "layout", "metrics")
WEIGHTS = ("params", "layout")  # what other programs than training read

# Options that leave what the model learns as it is, but for rounding. A name that ends in "." or
# "_" stands for all that begin with it.
_ASIDE = (
    *("parallel.", "memory.", "logging.", "model.attention", "data.data_dir", "train.keep_"),
    *("train.accumulate_steps", "train.log_every", "train.eval_", "train.checkpoint_every"),
    "train.hang_seconds",
)
# Options that decide what the model learns, and may change when a run continues all the same: the
# end of the schedule moves, and a run that diverged may skip steps.
_MAY_CHANGE = ("train.num_steps", "train.skip_bad_steps", "train.skip_outliers")
_MAY_MOVE = ("data.corpus", "data.tokenizer")  # data.json tells what they held
_STEP = re.compile("0|[1-9][0-9]*")


def saved_steps(workdir: Path | str) -> list[int]:
    """Returns the steps of which a run has checkpoints, whole or not, ascending."""
    names = (path.name for path in (Path(workdir) / "checkpoints").glob("*"))
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def latest_step(workdir: Path | str) -> int | None:
    """Returns the newest step that a run has saved, or None."""
    return max(saved_steps(workdir), default=None)


def newest_whole_step(workdir: Path | str, after: int = -1, *, read: bool = True) -> int | None:
    """Returns the newest step beyond `after` whose checkpoint is whole, or None."""
    steps = sorted((step for step in saved_steps(workdir) if step > after), reverse=True)
    return next((step for step in steps if not find_damage(workdir, step, read=read)), None)


def find_damage(
    workdir: Path | str, step: int, items: Sequence[str] = ITEMS, *, read: bool = True
) -> str:
    """Returns why the `items` of a checkpoint cannot be used, as a clause, or an empty text.

    Files are `read` to compare them with their digests, or their sizes alone are looked at.
    """
    folder = Path(workdir) / "checkpoints" / str(step)
    saved = files.read_sealed(folder / "digests" / "digests")
    if saved is None:
        return f"checkpoint {folder} is damaged (digests/digests is missing or was altered)"
    parts = {*items, "layout"}
    found = {name: saved["files"][name] for name in saved["files"] if name.split("/")[0] in parts}
    stores.complete(Path(workdir), (f"checkpoints/{step}/{name}" for name in found))
    if damage := files.find_damage(folder, found, read=read):
        return f"checkpoint {folder} is damaged ({damage})"
    layout = json.loads((folder / "layout" / "metadata").read_text("utf-8"))
    if layout.get("step", step) != step:
        return f"checkpoint {folder} holds step {layout['step']}"
    theirs, own = layout.get("run", {}), identity(workdir)
    if changed := changes({name: theirs[name] for name in theirs if name in own}, own):
        return f"checkpoint {folder} is another run's, with {changed}"
    return ""


def identity(workdir: Path | str) -> dict[str, Any]:
    """Returns what all checkpoints of a run have in common, in values of JSON; empty for no run."""
    if not (Path(workdir) / "config.json").exists():
        return {}
    data = files.read_sealed(Path(workdir) / "data.json") or {}
    text = {name: data[name] for name in ("token_crc32", "tokenizer_sha256") if name in data}
    options = deciding_options(load_config(Path(workdir)))
    options = {name: options[name] for name in options if name not in _MAY_MOVE}
    return json.loads(json.dumps(options | text))


def deciding_options(config: Config) -> dict[str, Any]:
    """Returns the options that a run keeps when it continues, by dotted name."""

    def decides(name: str) -> bool:
        if name == "train.accumulate_steps":  # dropout draws its masks by micro-batch
            return config.model.dropout > 0
        aside = any(name.startswith(n) if n[-1] in "._" else name == n for n in _ASIDE)
        return not aside and name not in _MAY_CHANGE

    return {name: value for name, value in flatten(config.to_dict()).items() if decides(name)}


def changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Returns in words which values of `old` are others in `new`, empty if none is."""
    return "; ".join(f"{n}={old[n]}, not {new[n]}" for n in old if old[n] != new[n])
