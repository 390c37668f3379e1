"""What `python train.py --plan` and its kin do."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from absl import flags

from gpt2 import cli, interrupts
from gpt2.config import Config, option, read_config_file
from gpt2.errors import UserError, require_writable_file, tell
from gpt2.parallel.topologies import find_devices
from gpt2.planning.plan import ATTAINABLE, OutOfMemory, compile_plan, make_program
from gpt2.planning.screen import (
    TrialTable,
    describe_forecast,
    describe_plan,
    describe_search,
    describe_trial,
)
from gpt2.planning.search import Search
from gpt2.telemetry.chips import BOARD_NAMES, board_name
from gpt2.telemetry.progress import print_summary
from gpt2.utils.files import write_text
from gpt2.utils.terminal import columns, wrap, wrap_command
from gpt2.utils.text import counted


def plan(config: Config, pattern: str | None, picture: Path | None) -> int:
    """Does what the flags ask for, and returns the exit code: 1 if nothing fits.

    Ctrl-C ends it at once: there is nothing to save.

    Args:
        config: the options.
        pattern: of arrays to draw.
        picture: a file to draw them in.

    Raises:
        UserError: there are no such devices, no layout works, or a search
            had too few trials to tell whether one fits.
    """
    interrupts.end_at_once()
    args = flags.FLAGS
    if args.plan_text is not None:
        require_writable_file("plan_text", Path(args.plan_text))
    devices = _find_devices()
    kind = "simulated" if args.plan_devices else devices[0].device_kind
    board = board_name(kind)
    if args.plan_search:
        return _search(config, devices, kind, board)
    program = make_program(config, devices)
    if pattern:
        program.draw(pattern, picture)
    _tell_of_waiting("a step", "this", len(devices), kind)
    try:
        planned = compile_plan(program)
    except OutOfMemory as error:
        print_summary({"plan": {"devices": f"{len(devices)} ({kind})", "does not fit": str(error)}})
        return 1
    if args.plan_text is not None:
        Path(args.plan_text).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(args.plan_text), planned.text)
    print_summary(describe_plan(planned, kind, board, by_its_compiler=args.plan_chips is not None))
    return 0


def _tell_of_waiting(what: str, which: str, num_devices: int, kind: str) -> None:
    devices = f"{counted(num_devices, 'device')} ({kind})"
    takes = "takes minutes" if kind.startswith("TPU") else "may take a minute"
    tell(f"compiling {what} of {Path(cli.config_file()).name} for {devices}: {which} {takes}")


def _find_devices() -> list[jax.Device]:
    args = flags.FLAGS
    # Before anything asks JAX for a device.
    if args.plan_devices or args.plan_chips is not None:
        jax.config.update("jax_platforms", "cpu")
    if args.plan_chips is not None:  # programs of absent devices cannot be read back
        jax.config.update("jax_enable_compilation_cache", False)
        return find_devices(args.plan_chips)
    if args.plan_devices:
        jax.config.update("jax_num_cpu_devices", args.plan_devices)
    return jax.devices()


def _search(config: Config, devices: list[jax.Device], kind: str, board: str | None) -> int:
    board, given = _choose_board(board), cli.overrides()
    search = Search(config, devices, board, fixed=list(given))
    table = TrialTable(search.waiting)
    compiled = min(flags.FLAGS.plan_trials, len(search.waiting))
    print(
        wrap(
            f"{len(devices)} devices ({kind}), memory and speed of {board}: {search.number:,} "
            f"candidates, {len(search.waiting):,} of them may fit, at most {compiled} are "
            "compiled\n"
        )
    )
    if search.waiting:
        _tell_of_waiting(f"up to {counted(compiled, 'step')}", "each", len(devices), kind)
        print(f"    {table.header}", flush=True)
    while search.waiting and len(search.trials) < flags.FLAGS.plan_trials:
        row = f"{len(search.trials) + 1:>3} {table.row(search.waiting[0])}"
        print(row, end="", flush=True)
        found = describe_trial(search.compile_next(), board)
        fits = len(row) + len(found) <= columns()
        print(found if fits else wrap(f"\n    {found}", indent=" " * 4), flush=True)
    print()
    print_summary({"search": describe_search(search, board)})
    if search.fitting:
        print(f"fits, the fastest first, at {ATTAINABLE:.0%} of peak")
    for number, trial in enumerate(search.fitting, 1):
        if trial.plan:
            print(wrap(f"{number:>3}  {describe_forecast(trial.plan, board)}", indent=" " * 5))
        print(wrap_command(_command(trial.candidate.options, given), indent=" " * 5))
    if search.waiting and not search.fitting:
        tried, left = len(search.trials), len(search.waiting)
        raise UserError(
            f"none of the {tried} candidates tried fits; {left} are left",
            f"Use --plan_trials={min(4 * tried, tried + left)}",
        )
    return 0 if search.fitting else 1


def _choose_board(board: str | None) -> str:
    """Returns the name in `BOARDS` that a search goes by: the devices' own, else what is asked."""
    if board:
        cli.refuse_ignored("plan_board", f"the devices are known, as {board}")
        return board
    return BOARD_NAMES[flags.FLAGS.plan_board or "h100"]


def _command(options: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Returns the command that trains with some options, and with the others that were given."""
    file = read_config_file(name := cli.config_file())
    kept = {other: value for other, value in given.items() if other not in options}
    changed = {other: value for other, value in options.items() if option(file, other) != value}
    near = Path(name).is_relative_to(Path.cwd())
    words = [f"--config={os.path.relpath(name) if near else name}"]
    words += [f"--config.{other}={value}" for other, value in (kept | changed).items()]
    return ["python", "train.py", *words]
