"""The flags of train.py, and what of them is refused before JAX is imported."""

from absl import flags

from gpt2 import cli
from gpt2.config import Config
from gpt2.errors import UserError, require_positive


def define_flags() -> None:
    """Defines `--config` and the other flags of train.py."""
    cli.define_config()
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    text("workdir", None, "Where the run lives; runs/<config name> if not given.")
    text("visualize", None, "Draw how parameters, moments and batches of this name are spread.")
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
    number("plan_devices", 0, "As --plan, for this many simulated devices.", lower_bound=0)
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


def read() -> Config:
    """Returns the options of the run.

    Raises:
        UserError: options or flags cannot work on any machine, or would be ignored.
    """
    args, config = flags.FLAGS, cli.parse_config()
    if args.workdir == "":
        raise UserError("--workdir= names no folder", "Name one, or leave it out")
    if args.visualize is None:
        cli.refuse_ignored("visualize_to", "there is no --visualize")
    if args.max_seconds is not None:
        require_positive("max_seconds", args.max_seconds, 3600, flag=True)
    if asks_for_plan():
        _check_plan()
    else:
        for name in ("plan_text", "plan_trials", "plan_board"):
            cli.refuse_ignored(name, "there is no --plan")
        if not args.workdir:
            cli.config_name()  # refuses the record of a run
    return config


def asks_for_plan() -> bool:
    """Returns whether the flags ask for a plan in place of a run."""
    args = flags.FLAGS
    return bool(args.plan or args.plan_devices or args.plan_search) or args.plan_chips is not None


def _check_plan() -> None:
    args = flags.FLAGS
    cli.refuse_ignored("max_seconds", "a plan trains nothing")
    for name in ("workdir", "coordinator", "num_processes", "process_index"):
        cli.refuse_ignored(name, "--plan only compiles, in one process")
    if args.plan_chips is not None:
        cli.refuse_ignored("plan_devices", "--plan_chips says how many devices there are")
    if args.plan_search:
        for name in ("plan_text", "visualize", "visualize_to"):
            cli.refuse_ignored(name, "--plan_search compiles many steps")
    else:
        for name in ("plan_trials", "plan_board"):
            cli.refuse_ignored(name, "there is no --plan_search")
