"""Options by their dotted names, as configs/default.py states them: types, ranges, misspellings."""

import dataclasses
import difflib
import functools
import inspect
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from absl import flags
from ml_collections import ConfigDict, FrozenConfigDict

from configs import default
from gpt2.errors import UserError, require_choice

DEFAULTS = FrozenConfigDict(default.get_config())
CHOICES = default.CHOICES


def flatten(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """Returns the options of nested groups by dotted name, in order."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


_TREE = default.get_config().to_dict()  # in its order, which DEFAULTS has not
_FLAT = flatten(_TREE)


def _group(name: str) -> dict[str, Any]:
    return functools.reduce(operator.getitem, name.split(".") if name else [], _TREE)


def no_option(
    name: str, prefix: str = "", others: Mapping[str, str] | None = None
) -> UserError:
    """Returns the error for a name that is no option: the nearest, or one of `others`, is meant."""
    spellings = {
        option.rpartition(".")[2]: prefix + option for option in reversed(_FLAT)
    }
    spellings |= {
        spelling: prefix + option for spelling, option in default.ALIASES.items()
    }
    spellings |= {option: prefix + option for option in _FLAT} | dict(others or {})
    for spelling in (name, name.rpartition(".")[2]):
        if near := difflib.get_close_matches(spelling, spellings, n=1, cutoff=0.8):
            return UserError(
                f"there is no option {name}", f"Did you mean {spellings[near[0]]}?"
            )
    return UserError(f"there is no option {name}", "See --help and configs/default.py")


def require_option(name: str, prefix: str = "") -> None:
    """Raises a UserError unless there is an option of this name."""
    if name not in _FLAT:
        raise no_option(name, prefix)


def complete(tree: Mapping | ConfigDict, group: str = "") -> dict[str, Any]:
    """Returns all options by group, each of its type: those of `tree`, and other defaults."""
    prefix = f"{group}." if group else ""
    for name in tree:
        if name not in _group(group):
            raise no_option(prefix + name)
    options = {}
    for name, usual in _group(group).items():
        value = tree.get(name, usual)
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(usual, Mapping):
            value = complete(value, prefix + name)
        elif isinstance(usual, float) and type(value) is int:
            value = float(value)
        elif type(value) is not type(usual):
            raise UserError(
                f"{prefix}{name}={value!r} is not of type {type(usual).__name__}"
            )
        options[name] = value
    return options


def read_option(name: str, text: str) -> Any:
    """Returns the value that `text` stands for, in the type of the option `name`."""
    require_option(name)
    kind = type(_FLAT[name])
    try:
        return flags.BooleanParser().parse(text) if kind is bool else kind(text)
    except ValueError:
        raise UserError(f"{name}={text} is not of type {kind.__name__}") from None


def check_value(name: str, value: Any) -> None:
    """Raises a UserError unless an option has one of its choices, or lies in its range."""
    if name in CHOICES:
        choice = value.partition(":")[0] if name == "optim.schedule" else value
        require_choice(name, choice, CHOICES[name])
    elif type(value) in (int, float):
        interval = default.RANGES.get(name, "[0, inf)")
        low, high = map(float, interval[1:-1].split(","))
        inside = low < value < high
        inside |= (interval[0] == "[" and value == low) or (
            interval[-1] == "]" and value == high
        )
        if not inside:
            raise UserError(f"{name}={value} is not in {interval}")


class Options:
    """A frozen dataclass of a group's options, as configs/ has them; subgroups are stated."""

    if (
        TYPE_CHECKING
    ):  # fields come from configs/default.py, which type checkers do not run
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

        def __init__(self, **options: Any): ...

        def __getattr__(self, name: str) -> Any: ...

    _prefix: ClassVar[str]

    def __init_subclass__(cls, group: str | None = None) -> None:
        if group is None:  # a parent's group, with further fields
            return
        cls._prefix = f"{group}." if group else ""
        groups = inspect.get_annotations(cls)
        options = {
            name: value for name, value in _group(group).items() if name not in groups
        }
        for name, value in options.items():
            setattr(cls, name, value)
        cls.__annotations__ = {
            name: type(value) for name, value in options.items()
        } | groups
        dataclasses.dataclass(frozen=True)(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (name := self._prefix + field.name) in _FLAT:
                check_value(name, getattr(self, field.name))
