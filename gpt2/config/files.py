"""Config files: Python with options, or the record of a run, as `--config` names them."""

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from gpt2.config.choices import DEFAULTS
from gpt2.config.record import read_record
from gpt2.config.run import Config
from gpt2.errors import UserError


def read_config_file(name: str) -> Config:
    """Returns the options of a config file, or of the record of a run, without overrides.

    Raises:
        UserError: there is no such file, or it fails.
    """
    check_config_file(name)
    if is_record(name):
        return Config.from_dict(read_record(Path(name)))
    return Config.from_dict(runpy.run_path(name)["get_config"]())


def is_record(name: str) -> bool:
    """Returns whether a file given as `--config` is the record of a run."""
    return Path(name).suffix == ".json"


def check_config_file(name: str) -> None:
    """Runs a config file, to report its own errors apart from those of overrides."""
    path = Path(name)
    if not path.is_file():
        near = path / "config.json", Path("configs") / f"{path.stem}.py"
        raise UserError(f"--config={name} is not a file", _propose(*near))
    if path.suffix not in (".py", ".json"):  # which would run as Python
        how = _propose(path.with_name("config.json"))
        raise UserError(f"--config={name} is neither Python nor the config.json of a run", how)
    if is_record(name):
        read_record(Path(name))
        return
    try:
        module = runpy.run_path(name)
        if "get_config" not in module:
            raise UserError(
                f"--config={name} defines no get_config()", "Start from configs/default.py"
            )
        options = module["get_config"]()
        if not isinstance(options, Mapping | ConfigDict):
            raise TypeError(f"get_config() returned {options!r}, not a ConfigDict")
        _check_tree(options, DEFAULTS.to_dict(), name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # it is code of any kind
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            raise  # with words of its own
        about = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise UserError(
            f"--config={name} fails ({about})", "Mend the file; compare it with those in configs/"
        ) from error


def _propose(*files: Path) -> str:
    """Returns advice on what to give as `--config`: the first of these files that exists."""
    found = next((path for path in files if path.is_file()), None)
    return f"Did you mean {found}?" if found else "See configs/ for the files that exist"


def _check_tree(options: Any, defaults: Mapping, file: str, prefix: str = "") -> None:
    """Raises a UserError unless a config file has all groups and options, for overrides to set."""
    for name, default in defaults.items():
        if name not in options:
            raise UserError(
                f"--config={file} lacks {prefix}{name}", "Start from configs/default.py"
            )
        if isinstance(default, Mapping):
            group = options[name]
            if not isinstance(group, Mapping | ConfigDict):
                raise UserError(
                    f"--config={file} has {prefix}{name}={group!r} in place of a group of options",
                    "Start from configs/default.py, and set members of the group",
                )
            _check_tree(group, default, file, f"{prefix}{name}.")
