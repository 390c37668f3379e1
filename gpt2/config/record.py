"""Reads the config.json of a run, which records its options."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt2.config.choices import DEFAULTS
from gpt2.errors import UserError, unknown_option


def holds_run(directory: Path) -> bool:
    """Returns whether a directory is that of a run: other programs, too, write a config.json."""
    files = ("data.json", "checkpoints")  # of runs that were trained, and imported
    has_more = any((directory / name).exists() for name in files)
    return has_more and (directory / "config.json").exists()


def read_record(path: Path) -> dict:
    """Reads the options from a run's config.json.

    An option that is newer than the record has its default, which is what the run did.

    Args:
        path: of config.json, or of a copy under another name.

    Returns:
        All options by group, each of its type. Whether they work together, `Config.from_dict`
        tells.

    Raises:
        UserError: the file cannot be read, or does not hold the options of a run.
    """
    try:
        tree = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})", "Check the file") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not valid JSON ({error})", "Restore it, or start a new run"
        ) from None
    if isinstance(tree, Mapping) and "model_type" in tree:
        directory = path.absolute().parent
        raise UserError(
            f"{path} is a Hugging Face model's, not a run's",
            f"Use --hf, or train it further by --config.train.init_from=hf:{directory}",
        )
    if not isinstance(tree, Mapping) or "seed" not in tree:
        raise UserError(
            f"{path} does not hold the options of a run", "Give a config.json that train.py wrote"
        )
    return complete_record(tree, path)


def complete_record(tree: Mapping, path: Path) -> dict:
    """Returns the options of a record that was read already, as `read_record` does.

    Args:
        tree: options by group.
        path: where they stood, for messages.

    Raises:
        UserError: these are not the options of a run.
    """
    _refuse_old_qk_norm(tree, path)
    return _without_ignored(_complete(_with_new_names(tree), DEFAULTS.to_dict(), path))


def _refuse_old_qk_norm(tree: Mapping, path: Path) -> None:
    """Refuses a run of the one form that a new default would read as another."""
    model = tree.get("model")
    if isinstance(model, Mapping) and model.get("qk_norm") and "norm_eps" not in model:
        raise UserError(
            f"the run of {path} was trained when model.qk_norm had no learnt scale",
            "Use the version that trained it, or train again",
        )


def _with_new_names(tree: Mapping) -> Mapping:
    """Returns the options of a record of before, in today's names."""
    memory = tree.get("memory")
    if isinstance(memory, Mapping) and memory.get("remat") == "dots_no_batch":
        return {**tree, "memory": {**memory, "remat": "dots"}}
    return tree


def _without_ignored(tree: dict) -> dict:
    """Returns the options with today's default of one that the run ignored: it was another."""
    if not (tree["train"]["checkpoint_every"] or tree["train"]["eval_every"]):
        tree["train"]["keep_checkpoints"] = DEFAULTS.train.keep_checkpoints
    return tree


def _complete(tree: Mapping, defaults: Mapping, path: Path, prefix: str = "") -> dict:
    """Returns the options of `tree` in their types, and the defaults of those that it lacks."""
    for name in tree:
        if name not in defaults:
            spellings = {prefix + known: prefix + known for known in defaults}
            how = f"{path} may be of a newer version"
            raise unknown_option(prefix + name, spellings, how)
    return {
        name: _read_value(tree.get(name, default), default, path, prefix + name)
        for name, default in defaults.items()
    }


def _read_value(value: Any, default: Any, path: Path, name: str) -> Any:
    """Returns a value, or a group of them, of the default's type."""
    if isinstance(default, Mapping):
        if not isinstance(value, Mapping):
            raise UserError(f"{path}: {name}={value!r} is no group of options", "Mend the file")
        return _complete(value, default, path, f"{name}.")
    if type(default) is float and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise UserError(
            f"{path}: {name}={value!r} is not of type {type(default).__name__}", "Mend the file"
        )
    return value
