"""The one kind of error that is the user's to mend."""

import functools
import sys
from collections.abc import Callable


class UserError(Exception):
    """A mistake in a command, a config or a file, told in one line.

    Args:
        what: what is wrong, naming the option or file.
        how: how to mend it.
    """

    def __init__(self, what: str, how: str):
        super().__init__(f"{what.rstrip('.')}. {how.rstrip('.')}.")


def exit_on_user_error(main: Callable) -> Callable:
    """Wraps a command's main: a `UserError` becomes `error: ...` on stderr and exit code 2."""

    @functools.wraps(main)
    def wrapped(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(2)

    return wrapped
