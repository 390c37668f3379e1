"""The flags of gpt2.hf, and what of them is refused before JAX is imported."""

from absl import flags

from gpt2 import cli
from gpt2.errors import UserError

# The directory that each command reads and the one that it writes, and flags that it would ignore.
DIRECTORIES = {"import": ("from", "workdir"), "export": ("workdir", "to")}
_IGNORED = {"import": ("to", "checkpoint"), "export": ("from",)}


def define_flags() -> None:
    """Defines the flags of both commands."""
    flags.DEFINE_string("from", None, "import: the Hugging Face directory to read.")
    flags.DEFINE_string("to", None, "export: the Hugging Face directory to write.")
    flags.DEFINE_string("workdir", None, "The run to write (import) or read (export).")
    flags.DEFINE_string("checkpoint", "best", "export: best, latest or a step.")


def check(command: str) -> None:
    """Refuses flags that the command would ignore, and missing directories."""
    reads, writes = DIRECTORIES[command]
    for name in _IGNORED[command]:
        cli.refuse_ignored(name, f"{command} reads --{reads} and writes --{writes}")
    for name in (reads, writes):
        if not flags.FLAGS[name].value:
            raise UserError(f"--{name} is missing", f"Give --{name}=DIR")
