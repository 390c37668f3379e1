"""Options by their dotted names, as configs/default.py states them: types, ranges, misspellings."""

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from absl import flags
from ml_collections import ConfigDict, FrozenConfigDict

from configs import default
from gpt2.errors import UserError, require_choice

Value = bool | int | float | str
Options = dict[str, Any]  # by name; groups are nested, or part of a dotted name

Item = TypeVar("Item")

DEFAULTS = FrozenConfigDict(default.get_config())


@dataclass(frozen=True)
class Option:
    """What configs/default.py says of an option's values.

    Attributes:
        kind: their type.
        choices: the names to choose from; empty: any text.
        interval: of numbers; a round bracket leaves the end itself out.
        factors: an example of a text of numbers, separated by commas; empty: any text.
        meaning: what the comments say.
    """

    kind: type
    choices: tuple[str, ...] = ()
    interval: str = "[0, inf)"
    factors: str = ""
    meaning: str = ""

    def holds(self, number: float) -> bool:
        """Returns whether a number lies in the interval."""
        low, high = map(float, self.interval[1:-1].split(","))
        if number in (low, high):
            return self.interval[0 if number == low else -1] in "[]"
        return low < number < high


def _read_type(hint: type) -> Option:
    """Returns what the type of a field says of an option."""
    stated = get_args(hint)
    if not stated:
        return Option(hint)
    if get_origin(hint) is Literal:
        return Option(str, choices=stated)
    # Of Annotated: a table of names, an example of factors, or an interval.
    kind, meant = stated
    if kind is str and isinstance(meant, str):
        return Option(str, factors=meant)
    if kind is str:
        return Option(str, choices=tuple(meant))
    return Option(kind, interval=meant)


def _read_comments() -> dict[tuple[str, str], str]:
    """Returns the comments of configs/default.py, above a field and behind it, by its class."""
    comments: dict[tuple[str, str], str] = {}
    group = ""
    comment = ""
    for line in inspect.getsource(default).splitlines():
        code, _, text = line.partition("#")
        comment += text
        name = code.partition(":")[0].strip()
        if name.startswith("class "):
            group = name.split()[1]
        if name:
            comments[group, name] = comment.strip()
            comment = ""
    return comments


def _read_group(group: type, prefix: str = "") -> dict[str, Option]:
    """Returns the options of a dataclass and of the groups in it, by dotted name, in order."""
    options: dict[str, Option] = {}
    for name, hint in get_type_hints(group, include_extras=True).items():
        if isinstance(hint, type) and is_dataclass(hint):
            options |= _read_group(hint, f"{prefix}{name}.")
        else:
            meaning = _COMMENTS[group.__name__, name]
            options[prefix + name] = replace(_read_type(hint), meaning=meaning)
    return options


_COMMENTS = _read_comments()
OPTIONS = _read_group(default.Options)


def flatten(tree: Mapping | ConfigDict, prefix: str = "") -> Options:
    """Returns the options of nested groups by dotted name, in order."""
    flat: Options = {}
    for name, value in tree.items():
        if isinstance(value, Mapping | ConfigDict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def no_option(name: str, prefix: str = "") -> UserError:
    """Returns the error for a name that is no option, which proposes the nearest."""
    meant: dict[str, str] = {}
    for option in OPTIONS:
        meant[option] = prefix + option
        meant.setdefault(option.rpartition(".")[2], prefix + option)
    for spelling, option in default.ALIASES.items():
        meant[spelling] = prefix + option
    how = "See --help and configs/default.py"
    for spelling in (name.rpartition(".")[2], name):
        if near := difflib.get_close_matches(spelling, meant, n=1, cutoff=0.8):
            how = f"Did you mean {meant[near[0]]}?"
    return UserError(f"there is no option {name}", how)


def require_option(name: str, prefix: str = "") -> None:
    """Raises a UserError unless there is an option of this name."""
    if name not in OPTIONS:
        raise no_option(name, prefix)


def complete(tree: Mapping | ConfigDict) -> Options:
    """Returns all options by group, checked one by one: those of `tree`, and other defaults."""
    given = flatten(tree)
    for name, value in given.items():
        require_option(name)
        given[name] = check_value(name, value)
    options = default.get_config()
    options.update_from_flattened_dict(given)
    return options.to_dict()


def read_option(name: str, text: str) -> Value:
    """Returns the value that `text` stands for, in the type of the option `name`."""
    require_option(name)
    kind = OPTIONS[name].kind
    try:
        return flags.BooleanParser().parse(text) if kind is bool else kind(text)
    except ValueError:
        raise UserError(f"{name}={text} is not of type {kind.__name__}") from None


def read_factor(text: str) -> float:
    """Returns a number that an option multiplies by; a ValueError if no run can mean it."""
    factor = float(text)
    if factor and not 1e-6 <= factor <= 1e6:
        raise ValueError(f"{text} is neither 0 nor from 1e-6 to 1e6")
    return factor


def read_items(
    option: str, text: str, read: Callable[[str], Item], example: str
) -> list[Item]:
    """Returns what `text` lists, separated by commas, each item by `read`; `option` is told."""
    if not text:
        return []
    try:
        return [read(item) for item in text.split(",")]
    except (ValueError, re.error) as error:
        raise UserError(
            f"{option} cannot be read ({error})", f"For example, use {example}"
        ) from None


def check_value(name: str, value: object) -> Value:
    """Returns a value in the option's type; a UserError unless the option takes it."""
    option = OPTIONS[name]
    if isinstance(value, np.generic):
        value = value.item()
    if option.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not option.kind or not isinstance(value, Value):
        raise UserError(f"{name}={value!r} is not of type {option.kind.__name__}")
    if isinstance(value, str):
        kind, colon, _ = value.partition(":")
        if option.choices:
            require_choice(name, kind + colon, option.choices)
        if option.factors:
            read_items(f"{name}={value}", value, read_factor, option.factors)
    elif not option.holds(value):
        raise UserError(f"{name}={value} is not in {option.interval}")
    return value


def changed(group: default.Model | default.Optim) -> set[str]:
    """Returns the names of the options of a group that have other values than their defaults."""
    return {
        field.name
        for field in fields(group)
        if getattr(group, field.name) != field.default
    }
