"""The flags of `python train.py --plan`, and of its kin."""

from absl import flags

from gpt2 import cli

PLAN = flags.DEFINE_bool("plan", False, "Say what a step takes, without data or training.")
DEVICES = flags.DEFINE_integer(
    "plan_devices", 0, "As --plan, for this many simulated devices.", lower_bound=0
)
CHIPS = flags.DEFINE_string(
    "plan_chips", None, "As --plan, for chips: v5e-8, h100-8, target.txtpb-8, ..."
)
TEXT = flags.DEFINE_string("plan_text", None, "A file for the compiled step of a plan.")
SEARCH = flags.DEFINE_bool(
    "plan_search",
    False,
    "Plan many layouts, and list those that fit by expected speed. Options of the config that are "
    "given as flags stay.",
)
TRIALS = flags.DEFINE_integer(
    "plan_trials", 8, "How many candidates --plan_search compiles at most.", lower_bound=1
)
BOARD = flags.DEFINE_string(
    "plan_board", None, "Whose memory and speed --plan_search takes for simulated devices: h100."
)


def asks_for_plan() -> bool:
    """Returns whether the flags ask for a plan.

    Raises:
        UserError: they do not, and say more of it.
    """
    if PLAN.value or DEVICES.value or CHIPS.value is not None or SEARCH.value:
        return True
    for name in ("plan_text", "plan_trials", "plan_board"):
        cli.refuse_ignored(name, "there is no --plan")
    return False
