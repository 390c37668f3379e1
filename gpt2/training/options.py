"""The flags of train.py but those of its plans, and what of them is refused at once."""

from absl import flags

from gpt2 import cli
from gpt2.config import Config
from gpt2.errors import require_positive

CONFIG = cli.define_config()
flags.declare_key_flag("config")  # for --help
WORKDIR = flags.DEFINE_string("workdir", None, "Where the run lives; runs/<config name> if empty.")
VISUALIZE = flags.DEFINE_string(
    "visualize", None, "Draw how parameters, moments and batches of this name are spread."
)
VISUALIZE_TO = flags.DEFINE_string(
    "visualize_to", None, "A picture of the same; sharding.png in the workdir if empty."
)
MAX_SECONDS = flags.DEFINE_float(
    "max_seconds", None, "Stop, with all saved, before this process is so old; see docs/safety.md."
)
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, for several.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes there are.")
PROCESS_INDEX = flags.DEFINE_integer("process_index", None, "Number of this process, from 0.")


def check() -> Config:
    """Returns the options of the run.

    Raises:
        UserError: options or flags cannot work on any machine.
    """
    config = cli.parse_config(CONFIG)
    if VISUALIZE.value is None:
        cli.refuse_ignored("visualize_to", "there is no --visualize")
    if MAX_SECONDS.value is not None:
        require_positive("max_seconds", MAX_SECONDS.value, 3600, flag=True)
    return config
