"""The defaults of all options, and the names to choose from, as configs/default.py gives them."""

from typing import Any

from ml_collections import FrozenConfigDict

from configs import default
from gpt2.errors import require_choice

DEFAULTS = FrozenConfigDict(default.get_config())
CHOICES = default.CHOICES


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
