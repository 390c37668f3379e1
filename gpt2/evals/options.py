"""The flags of eval.py, and what of them is refused at once."""

from absl import flags

from gpt2 import cli
from gpt2.config import DataConfig
from gpt2.errors import UserError, require_source

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of a run.")
HF = flags.DEFINE_string("hf", None, "Directory of a Hugging Face model, in place of --workdir.")
CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, latest or a step of the run.")
TASKS = flags.DEFINE_list(
    "tasks", ["validation"], "Any of validation, wikitext, lambada, hellaswag, cbt, enwik8, text8."
)
TASK_DIR = flags.DEFINE_string("task_dir", "", "Directory of the tasks' files.")
CORPUS = flags.DEFINE_string(
    "corpus", "", "Corpus whose validation split to score, as data.corpus; the run's if empty."
)
VAL_FRACTION = flags.DEFINE_float(
    "val_fraction",
    None,
    "Share of --corpus to score, as data.val_fraction; if not given, that of the run, or "
    f"{DataConfig.val_fraction} without one.",
)
STRIDE = flags.DEFINE_integer(
    "stride", 0, "Tokens that a sliding window moves; 0: half of the context.", lower_bound=0
)
OUTPUT = flags.DEFINE_string("output", None, "JSON file to write the figures to.")


def check() -> None:
    """Raises a UserError for flags that cannot work, whatever the tasks read."""
    require_source(WORKDIR.value, HF.value)
    if not CORPUS.value:
        cli.refuse_ignored("val_fraction", "it divides --corpus")
    if VAL_FRACTION.value is not None and not 0.0 < VAL_FRACTION.value < 1.0:
        raise UserError(
            f"--val_fraction={VAL_FRACTION.value} is out of range",
            "Use a share above 0, below 1",
        )
    if HF.value:
        cli.refuse_ignored("checkpoint", "--hf holds a single set of weights")
