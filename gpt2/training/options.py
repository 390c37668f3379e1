"""The flags of train.py, and what of them is refused before JAX is imported."""

import re

from absl import flags

from gpt2 import cli
from gpt2.errors import UserError

_PROCESSES = ("coordinator", "num_processes", "process_index")


def define_flags() -> None:
    """Defines `--config` and the other flags of train.py."""
    cli.define_config()
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    text("workdir", None, "Where the run lives; runs/<config name> if not given.")
    flags.DEFINE_float(
        "max_seconds",
        None,
        "Stop, with all saved, before this process is so old; see docs/safety.md.",
    )
    text("coordinator", None, "HOST:PORT of process 0, for several.")
    number("num_processes", None, "How many processes there are.")
    number("process_index", None, "Number of this process, from 0.")


def check() -> None:
    """Refuses options and flags that cannot work on any machine, or would be ignored."""
    args = flags.FLAGS
    cli.parse_config()
    if args.max_seconds is not None and not 0 < args.max_seconds < float("inf"):
        raise UserError(f"--max_seconds={args.max_seconds} is not above 0 and finite")
    _check_run()


def _check_run() -> None:
    args = flags.FLAGS
    if args.workdir == "":
        raise UserError("--workdir= names no folder", "Name one, or leave it out")
    if args.workdir is None:
        cli.config_name()  # refuses the record of a run
    _check_processes()


def _check_processes() -> None:
    args = flags.FLAGS
    given = [f"--{name}" for name in _PROCESSES if flags.FLAGS[name].value is not None]
    missing = [f"--{name}" for name in _PROCESSES if f"--{name}" not in given]
    if not given:
        return
    if missing:
        raise UserError(
            f"{', '.join(missing)} is missing beside {', '.join(given)}",
            "Several processes need --coordinator, --num_processes and --process_index",
        )
    if not re.fullmatch(r".+:\d+", args.coordinator):
        raise UserError(
            f"--coordinator={args.coordinator} is not HOST:PORT",
            "For example, use --coordinator=localhost:1234",
        )
    if not 0 <= args.process_index < args.num_processes:
        raise UserError(
            f"--process_index={args.process_index} is not one of "
            f"--num_processes={args.num_processes}",
            f"Count from 0 to {max(args.num_processes - 1, 0)}",
        )
