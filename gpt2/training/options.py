"""The flags of train.py, and what of them is refused before JAX is imported."""

import re
from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.errors import UserError, require_positive
from gpt2.telemetry.chips import BOARD_NAMES

_PICTURES = (".png", ".pdf", ".svg")
_PROCESSES = ("coordinator", "num_processes", "process_index")


def define_flags() -> None:
    """Defines `--config` and the other flags of train.py."""
    cli.define_config()
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    text("workdir", None, "Where the run lives; runs/<config name> if not given.")
    text(
        "visualize",
        None,
        "Draw how the parameters, moments and batches are spread whose names match this REGEX.",
    )
    text("visualize_to", None, "A picture of the same; if not given, sharding.png in the workdir.")
    flags.DEFINE_float(
        "max_seconds",
        None,
        "Stop, with all saved, before this process is so old; see docs/safety.md.",
    )
    text("coordinator", None, "HOST:PORT of process 0, for several.")
    number("num_processes", None, "How many processes there are.")
    number("process_index", None, "Number of this process, from 0.")
    flags.DEFINE_bool("plan", False, "Say what a step takes, without data or training.")
    number("plan_devices", None, "As --plan, for this many simulated devices.", lower_bound=1)
    text("plan_chips", None, "As --plan, for chips: v5e-8, h100-8, target.txtpb-8, ...")
    text("plan_text", None, "A file for the compiled step of a plan.")
    flags.DEFINE_bool(
        "plan_search",
        False,
        "Plan many layouts, and list those that fit by expected speed. Options of the config that "
        "are given as flags stay.",
    )
    number("plan_trials", 8, "How many candidates --plan_search compiles at most.", lower_bound=1)
    text(
        "plan_board",
        None,
        "Whose memory and speed --plan_search takes for simulated devices: h100.",
    )


def check() -> None:
    """Refuses options and flags that cannot work on any machine, or would be ignored."""
    args = flags.FLAGS
    cli.parse_config()
    if args.visualize is None:
        cli.refuse_ignored("visualize_to", "there is no --visualize")
    if args.visualize_to is not None and Path(args.visualize_to).suffix not in _PICTURES:
        raise UserError(
            f"--visualize_to={args.visualize_to} names no picture",
            f"End it in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}",
        )
    if args.max_seconds is not None:
        require_positive("max_seconds", args.max_seconds, 3600, flag=True)
    if asks_for_plan():
        _check_plan()
    else:
        _check_run()


def asks_for_plan() -> bool:
    """Returns whether the flags ask for a plan in place of a run."""
    return bool(_planning_flags())


def _planning_flags() -> list[str]:
    """Returns the flags given that ask for a plan, without dashes."""
    names = ("plan", "plan_devices", "plan_search", "plan_chips")
    return [name for name in names if flags.FLAGS[name].value not in (None, False)]


def _check_run() -> None:
    args = flags.FLAGS
    for name in ("plan_text", "plan_trials", "plan_board"):
        cli.refuse_ignored(name, "there is no --plan")
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


def _check_plan() -> None:
    args = flags.FLAGS
    because = f"--{_planning_flags()[0]} only compiles, in one process"
    for name in ("max_seconds", "workdir", *_PROCESSES):
        cli.refuse_ignored(name, because)
    if args.plan_chips is not None:
        cli.refuse_ignored("plan_devices", "--plan_chips says how many devices there are")
    if args.plan_search:
        for name in ("plan_text", "visualize", "visualize_to"):
            cli.refuse_ignored(name, "--plan_search compiles many steps")
        if args.plan_board is not None and args.plan_board not in BOARD_NAMES:
            raise UserError(
                f"--plan_board={args.plan_board} is not one of {', '.join(BOARD_NAMES)}",
                "For example, use --plan_board=h100",
            )
    else:
        for name in ("plan_trials", "plan_board"):
            cli.refuse_ignored(name, "there is no --plan_search")
