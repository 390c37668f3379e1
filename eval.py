"""Scores a run of train.py, or a Hugging Face model.

    python eval.py --workdir=runs/quickstart
    python eval.py --hf=DIR --tasks=lambada,hellaswag --task_dir=data/tasks

Each figure comes with its convention, its number of examples and its standard error;
docs/evaluation.md says what the tasks' files hold.
"""

from gpt2 import launch

if __name__ == "__main__":
    launch.prepare_process()

from absl import flags

from gpt2 import cli
from gpt2.evals import options
from gpt2.evals.options import CORPUS, HF, STRIDE, TASK_DIR, TASKS, VAL_FRACTION, WORKDIR

if __name__ == "__main__":  # what is wrong is told now: the imports below take seconds
    flags.adopt_module_key_flags(options)  # for --help
    cli.parse(options.check)

import dataclasses
from pathlib import Path

from gpt2.config import DataConfig, load_config
from gpt2.data.dataset import Dataset, prepare
from gpt2.data.shards import open_shards
from gpt2.data.tokenizer import Tokenizer, fingerprint
from gpt2.errors import UserError, require_writable_file
from gpt2.evals.perplexity import validation
from gpt2.evals.report import print_table, write_json
from gpt2.evals.scoring import Scorer
from gpt2.evals.tasks import TASKS as EVAL_TASKS
from gpt2.evals.tasks import run_task, task_file
from gpt2.model import GPT
from gpt2.weights import load_model


def main() -> None:
    """Scores the tasks that the flags name, writes the figures to `--output` and prints them."""
    check_flags()
    files = {name: task_file(name, TASK_DIR.value) for name in TASKS.value if name != "validation"}
    data = validation_data() if "validation" in TASKS.value else None
    cfg, params, tokenizer = load_model(WORKDIR.value, HF.value, options.CHECKPOINT.value)
    stride = STRIDE.value or max(1, cfg.context_length // 2)
    if stride > cfg.context_length:
        raise UserError(
            f"--stride={stride} would skip tokens: the context is {cfg.context_length}",
            f"Use at most --stride={cfg.context_length}",
        )
    scorer = Scorer(GPT(cfg), params)
    figures = []
    for name in TASKS.value:
        if data is not None and name == "validation":
            dataset = prepare(data)
            check_tokenizer(data, dataset, tokenizer)
            figures += validation(scorer, dataset, data.corpus, data.document_mask)
        else:
            figures += run_task(name, scorer, tokenizer, files[name], stride)
    if options.OUTPUT.value:
        write_json(figures, Path(options.OUTPUT.value))
    print_table(figures)


def check_flags() -> None:
    """Refuses flags that change nothing, empty tasks, and an output that cannot be written."""
    options.check()
    if not TASKS.value or len(set(TASKS.value)) < len(TASKS.value):
        raise UserError(
            f"--tasks={','.join(TASKS.value)} names {'a task twice' if TASKS.value else 'no task'}",
            f"Choose from validation, {', '.join(EVAL_TASKS)}",
        )
    if "validation" not in TASKS.value:
        cli.refuse_ignored("corpus", "it is for --tasks=validation")
    if TASKS.value == ["validation"]:
        cli.refuse_ignored("task_dir", "--tasks=validation reads no file of it")
    if not any(task.slides for name, task in EVAL_TASKS.items() if name in TASKS.value):
        cli.refuse_ignored("stride", "none of --tasks slides a window")
    if options.OUTPUT.value:
        require_writable_file("output", Path(options.OUTPUT.value))


def validation_data() -> DataConfig:
    """Returns the options of the corpus whose validation split this program scores.

    A corpus other than the run's is divided and prepared with the run's options.

    Raises:
        UserError: no corpus is named, or `--val_fraction` would be ignored or may score text that
            the run learnt from.
    """
    data = load_config(Path(WORKDIR.value)).data if WORKDIR.value else DataConfig()
    learnt_here = WORKDIR.value and (Path(WORKDIR.value) / "data.json").exists()
    if not (CORPUS.value or learnt_here):
        raise UserError(
            "these weights came without a corpus",
            "For example, use --corpus=pystdlib, with the --val_fraction that training held out, "
            "or give other --tasks",
        )
    if not CORPUS.value:
        return data
    # Ready tokens are GPT-2's, which any tokenizer of the same fingerprint reads.
    directory = WORKDIR.value or HF.value
    assert directory is not None  # by `check_flags`
    tokenizer = Path(directory) / "tokenizer.json"
    ready = CORPUS.value.startswith("tokens:")
    named = str(tokenizer) if tokenizer.is_file() and not ready else "gpt2"
    chosen = dataclasses.replace(data, corpus=CORPUS.value, tokenizer=named)
    if VAL_FRACTION.value is None:
        return chosen
    if ready and not open_shards(chosen).by_share:
        cli.refuse_ignored("val_fraction", f"{CORPUS.value} has files for validation")
    # A smaller share is refused too, since the share decides which documents are chosen.
    if learnt_here and chosen.corpus == data.corpus and VAL_FRACTION.value != data.val_fraction:
        raise UserError(
            f"--val_fraction={VAL_FRACTION.value} may hold text that the run learnt from",
            f"Leave it out: the run held out data.val_fraction={data.val_fraction}",
        )
    return dataclasses.replace(chosen, val_fraction=VAL_FRACTION.value)


def check_tokenizer(data: DataConfig, dataset: Dataset, tokenizer: Tokenizer) -> None:
    """Refuses tokens that the model did not learn."""
    if fingerprint(dataset.tokenizer) != fingerprint(tokenizer):
        raise UserError(
            f"{data.corpus} holds tokens of {dataset.tokenizer.name}, and the model's tokenizer is "
            f"{tokenizer.name}",
            "Give a corpus of text. For example, use --corpus=text:FILE",
        )


if __name__ == "__main__":
    cli.run(main)
