"""The defaults of all options, and the names to choose from, as configs/default.py gives them."""

from collections.abc import Mapping
from typing import Any

from ml_collections import FrozenConfigDict

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


def require_choices(group: str, options: Any) -> None:
    """Checks the options of a group that have a fixed set of choices.

    Args:
        group: such as `optim`.
        options: has the group's options as attributes.

    Raises:
        UserError: an option holds none of its choices; the message names both.
    """
    for name, choices in CHOICES.items():
        if name.startswith(f"{group}."):
            require_choice(name, getattr(options, name.removeprefix(f"{group}.")), choices)


def refuse_ignored(option: str, value: Any, needed: str, by: str, chosen: str) -> None:
    """Refuses an option that was set although what is chosen does not read it.

    Args:
        option: such as `model.rope_base`.
        value: its value.
        needed: the choice that reads it.
        by: the option that chooses, such as `model.position`.
        chosen: its value.

    Raises:
        UserError: `value` is not the default, and `chosen` is not `needed`.
    """
    group, _, name = option.partition(".")
    default_value = DEFAULTS[group][name]
    if chosen != needed and value != default_value:
        raise UserError(
            f"{by}={chosen} would ignore {option}={value}",
            f"Use --config.{option}={default_value}, or --config.{by}={needed}",
        )
