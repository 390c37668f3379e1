"""Look up, parse and check options by dotted name, as configs/default.py declares them."""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from absl import flags
from ml_collections import ConfigDict, FrozenConfigDict

from configs import default
from gpt2.errors import UserError, require_choice

Value = bool | int | float | str
# Dotted name -> value, or nested: name of a group -> the Options of the group.
Options = dict[str, Any]

Item = TypeVar("Item")

DEFAULTS = FrozenConfigDict(default.get_config())

_NOUNS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
}


@dataclass(frozen=True, kw_only=True)
class Option(default.Properties):
    """The declaration of an option: its type, its range, its default and its properties."""

    kind: type
    interval: str = "[0, inf)"  # a round bracket excludes the bound
    default: object = None

    def holds(self, number: float) -> bool:
        """Return whether a number lies in the option's `interval`."""
        low, high = map(float, self.interval[1:-1].split(","))
        if number in (low, high):
            return self.interval[0 if number == low else -1] in "[]"
        return low < number < high

    def check(self, name: str, value: object) -> Value:
        """Return `value` as a value of the option's type: 1 becomes 1.0 for a float.

        Raise a UserError if the option does not allow the value. `name` is the option's name.
        """
        if isinstance(value, np.generic):
            value = value.item()
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind or not isinstance(value, Value):
            raise UserError(f"{name}={value!r} is not {_NOUNS[self.kind]}")
        if not isinstance(value, str):
            if not self.holds(value):
                raise UserError(f"{name}={value} is not in {self.interval}")
            return value
        word, colon, _ = value.partition(":")
        if self.choices:
            require_choice(name, word + colon, self.choices)
        if self.factors:
            read_items(f"{name}={value}", value, read_factor, self.factors)
        return value


# The attributes that a group may set for all of its options, and their values outside of groups.
_OF_GROUPS = {"may_change": False, "is_recipe": False}


def read_group(
    group: type, prefix: str = "", inherited: Mapping[str, bool] = _OF_GROUPS
) -> dict[str, Option]:
    """Return a dict from dotted names to the options of a dataclass and of its nested groups.

    Each name begins with `prefix`. `inherited` contains the attributes, such as `may_change`, that
    the enclosing group sets for all of its options. The options have the order in which the
    dataclass declares them.
    """
    options = dict[str, Option]()
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        hint = hints[field.name]
        stated = dict(field.metadata)
        for name, is_inherited in inherited.items():
            stated[name] = is_inherited or stated.get(name, False)
        if isinstance(hint, type) and is_dataclass(hint):
            of_group = {name: stated[name] for name in inherited}
            options |= read_group(hint, f"{prefix}{field.name}.", of_group)
            continue
        if get_origin(hint) is Literal:
            stated["choices"] = get_args(hint)
            hint = str
        elif get_args(hint):  # Annotated[type, interval]
            hint, stated["interval"] = get_args(hint)
        options[prefix + field.name] = Option(
            kind=hint, default=field.default, **stated
        )
    return options


OPTIONS = read_group(default.Options)


def flatten(tree: Mapping | ConfigDict, prefix: str = "") -> Options:
    """Return the options in nested groups as one dict, whose keys are dotted names.

    Each name begins with `prefix`. The order does not change.
    """
    flat = Options()
    for name, value in tree.items():
        if isinstance(value, Mapping | ConfigDict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def no_option(name: str, prefix: str = "") -> UserError:
    """Return the error for an unknown option `name`, with a suggestion.

    The suggestion is the option that another codebase calls `name`, or the option with the most
    similar name. `prefix`, such as `--config.`, is written before the suggestion.
    """
    spellings = dict[str, str]()
    for known, option in OPTIONS.items():
        spellings[known] = known
        spellings.setdefault(known.rpartition(".")[2], known)
        spellings |= dict.fromkeys(option.aliases.split(), known)
    last = name.rpartition(".")[2]
    near = [last] if last in spellings else []
    for spelling in (name, last):
        near += difflib.get_close_matches(spelling, spellings, n=1, cutoff=0.8)
    if near:
        remedy = f"Did you mean {prefix}{spellings[near[0]]}?"
    else:
        remedy = "See --help and configs/default.py"
    return UserError(f"There is no option {name}", remedy)


def require_option(name: str, prefix: str = "") -> None:
    """Raise a UserError unless there is an option with the dotted name `name`.

    The message suggests the option that the user may have meant, with `prefix` before its name.
    """
    if name not in OPTIONS:
        raise no_option(name, prefix)


def complete(tree: Mapping | ConfigDict) -> Options:
    """Return all options, nested by group: the values in `tree`, and defaults for all others.

    Each value is checked by itself; `Config` checks combinations.
    """
    given = Options()
    for name, value in flatten(tree).items():
        require_option(name)
        given[name] = OPTIONS[name].check(name, value)
    options = asdict(default.Options())
    for name, value in given.items():
        *groups, last = name.split(".")
        group = options
        for each in groups:
            group = group[each]
        group[last] = value
    return options


def check_effects(values: Options, options: Mapping[str, Option] = OPTIONS) -> None:
    """Raise a UserError if an option is set that has no effect because of another option.

    `values` contains the values of some or all options, by dotted name, and `options` contains the
    declarations of these options. An option is not checked if `values` does not contain the option
    on which it depends.
    """
    for name, value in values.items():
        option = options[name]
        needed, _, wanted = option.needs.partition("=")
        if needed not in values or value == option.default:
            continue
        actual = values[needed]
        if wanted:
            # An argument may follow a colon, as in `piecewise:1000=0.5`.
            choice = str(actual).partition(":")[0]
            has_effect = choice in wanted.split("|")
        else:
            has_effect = actual != options[needed].default
        if not has_effect:
            raise UserError(
                f"{name}={value} has no effect with {needed}={actual}",
                f"{name} needs {option.needs.replace('|', ' or ')}",
            )


def read_option(name: str, text: str) -> Value:
    """Parse `text` as a value of the option `name`. Raise a UserError if its type is wrong."""
    require_option(name)
    kind = OPTIONS[name].kind
    try:
        return flags.BooleanParser().parse(text) if kind is bool else kind(text)
    except ValueError:
        raise UserError(f"{name}={text} is not {_NOUNS[kind]}") from None


def read_factor(text: str) -> float:
    """Parse a factor of a learning rate, or the weight of a loss.

    Raise a ValueError unless it is 0 or from 1e-6 to 1e6.
    """
    factor = float(text)
    if factor and not 1e-6 <= factor <= 1e6:
        raise ValueError(f"{text} is neither 0 nor between 1e-6 and 1e6")
    return factor


def read_items(
    option: str, text: str, read: Callable[[str], Item], example: str
) -> list[Item]:
    """Parse the comma-separated items of `text`, each with the function `read`.

    If `read` fails, raise a UserError that names `option` and quotes `example`.
    """
    if not text:
        return []
    try:
        return [read(item) for item in text.split(",")]
    except (ValueError, re.error) as error:
        raise UserError(
            f"{option} cannot be read ({error})", f"For example, use {example}"
        ) from None
