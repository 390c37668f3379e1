"""Scores a run of train.py, or a Hugging Face GPT-2.

    python eval.py --workdir=runs/quickstart
    python eval.py --hf=gpt2-directory --tasks=lambada,hellaswag --task_dir=data/tasks

Each figure comes with its convention, its number of examples and its standard error;
docs/evaluation.md says where the tasks' files come from.
"""

from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.config import DataConfig, load_config
from gpt2.data.prepare import prepare
from gpt2.errors import UserError
from gpt2.evals.perplexity import validation
from gpt2.evals.report import print_table, write_json
from gpt2.evals.scoring import Scorer
from gpt2.evals.tasks import run_task, task_file
from gpt2.model import GPT
from gpt2.weights import load_model

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of a run.")
HF = flags.DEFINE_string("hf", None, "Directory of a Hugging Face GPT-2, in place of --workdir.")
CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, latest or a step of the run.")
TASKS = flags.DEFINE_list("tasks", ["validation"], "What to score.")
TASK_DIR = flags.DEFINE_string("task_dir", "", "Directory of the tasks' files.")
CORPUS = flags.DEFINE_string(
    "corpus", "", "Corpus whose validation split to score, as data.corpus; the run's if empty."
)
STRIDE = flags.DEFINE_integer(
    "stride", 0, "Tokens that a sliding window moves; 0: half of the context.", lower_bound=0
)
OUTPUT = flags.DEFINE_string("output", None, "JSON file to write the figures to.")


def main() -> None:
    files = {name: task_file(name, TASK_DIR.value) for name in TASKS.value if name != "validation"}
    data = validation_data() if "validation" in TASKS.value else None
    cfg, params, tokenizer = load_model(WORKDIR.value, HF.value, CHECKPOINT.value)
    stride = STRIDE.value or max(1, cfg.context_length // 2)
    if stride > cfg.context_length:
        raise UserError(
            f"--stride={stride} would skip tokens: the context is {cfg.context_length}",
            f"Use at most --stride={cfg.context_length}",
        )
    scorer = Scorer(GPT(cfg), params)
    figures = []
    for name in TASKS.value:
        if name == "validation":
            figures += validation(scorer, prepare(data), data.document_mask)
        else:
            figures += run_task(name, scorer, tokenizer, files[name], stride)
    print_table(figures)
    if OUTPUT.value:
        write_json(figures, Path(OUTPUT.value))


def validation_data() -> DataConfig:
    """Returns the options of the corpus whose validation split is to be scored."""
    if WORKDIR.value and not CORPUS.value:
        return load_config(Path(WORKDIR.value)).data
    if not CORPUS.value:
        raise UserError(
            "--hf says nothing of a corpus", "Name one, as --corpus=pystdlib, or other --tasks"
        )
    tokenizer = Path(WORKDIR.value or HF.value or "") / "tokenizer.json"
    return DataConfig(
        corpus=CORPUS.value, tokenizer=str(tokenizer) if tokenizer.is_file() else "gpt2"
    )


if __name__ == "__main__":
    cli.run(main)
