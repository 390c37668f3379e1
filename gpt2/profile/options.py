"""The flags of gpt2.profile, and what of them is refused before JAX is imported."""

from absl import flags

from gpt2 import cli
from gpt2.errors import UserError


def define_flags() -> None:
    """Defines the flags of gpt2.profile."""
    flags.DEFINE_string("text", None, "A compiled program as HLO text, in place of a trace.")
    flags.DEFINE_string("chip", None, "With --text: whose limits; this machine's if empty.")


def check(*paths: str) -> None:
    """Refuses what would be ignored, and anything but one trace or one program."""
    if flags.FLAGS.text is None:
        cli.refuse_ignored("chip", "a trace comes with its machine")
        if len(paths) != 1:
            what = f"{len(paths)} traces are named, not one" if paths else "no trace is named"
            raise UserError(what, "For example, give runs/quickstart")
    elif paths:
        raise UserError(f"{paths[0]} would be ignored: --text has no trace", "Leave one out")
