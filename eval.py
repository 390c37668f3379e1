"""Scores a run of train.py, or a Hugging Face model.

    python eval.py --workdir=runs/quickstart
    python eval.py --hf=DIR --tasks=lambada,hellaswag --task_dir=data/tasks

Each figure comes with its convention, its number of examples and its standard error;
docs/evaluation.md says what the tasks' files hold.
"""

from gpt2 import launch

if __name__ == "__main__":
    launch.prepare_process()

from gpt2 import cli
from gpt2.evals import options

if __name__ == "__main__":  # what is wrong is told now: the imports below take seconds
    cli.parse(options.define_flags, options.check)

import dataclasses
from pathlib import Path

from absl import flags

from gpt2.config import DataConfig, load_config
from gpt2.data.dataset import Dataset, prepare
from gpt2.data.shards import open_shards
from gpt2.data.tokenizer import Tokenizer, fingerprint
from gpt2.errors import UserError, require_writable_file
from gpt2.evals.options import VALIDATION, task_file
from gpt2.evals.perplexity import validation
from gpt2.evals.report import print_table, write_json
from gpt2.evals.scoring import Scorer
from gpt2.evals.tasks import run_task
from gpt2.model import GPT
from gpt2.weights import load_model


def main() -> None:
    """Scores the tasks that the flags name, writes the figures to `--output` and prints them."""
    args = flags.FLAGS
    if args.output:
        require_writable_file("output", Path(args.output))
    files = {name: task_file(name, args.task_dir) for name in args.tasks if name != VALIDATION}
    data = validation_data() if VALIDATION in args.tasks else None
    cfg, params, tokenizer = load_model(args.workdir, args.hf, args.checkpoint)
    stride = args.stride or max(1, cfg.context_length // 2)
    if stride > cfg.context_length:
        raise UserError(
            f"--stride={stride} would skip tokens: the context is {cfg.context_length}",
            f"Use at most --stride={cfg.context_length}",
        )
    scorer = Scorer(GPT(cfg), params)
    figures = []
    for name in args.tasks:
        if data is not None and name == VALIDATION:
            dataset = prepare(data)
            check_tokenizer(data, dataset, tokenizer)
            figures += validation(scorer, dataset, data.corpus, data.document_mask)
        else:
            figures += run_task(name, scorer, tokenizer, files[name], stride)
    if args.output:
        write_json(figures, Path(args.output))
    print_table(figures)


def validation_data() -> DataConfig:
    """Returns the options of the corpus whose validation split this program scores.

    A corpus other than the run's is divided and prepared with the run's options.

    Raises:
        UserError: no corpus is named, or `--val_fraction` would be ignored or may score text that
            the run learnt from.
    """
    args = flags.FLAGS
    data = load_config(Path(args.workdir)).data if args.workdir else DataConfig()
    learnt_here = args.workdir and (Path(args.workdir) / "data.json").exists()
    if not (args.corpus or learnt_here):
        raise UserError(
            "these weights came without a corpus",
            "Add --corpus=text:FILE, or another corpus, and the --val_fraction that training held "
            "out; or give other --tasks",
        )
    if not args.corpus:
        return data
    # Ready tokens are GPT-2's, which any tokenizer of the same fingerprint reads.
    directory = args.workdir or args.hf
    assert directory is not None  # by `options.check`
    tokenizer = Path(directory) / "tokenizer.json"
    ready = args.corpus.startswith("tokens:")
    named = str(tokenizer) if tokenizer.is_file() and not ready else "gpt2"
    chosen = dataclasses.replace(data, corpus=args.corpus, tokenizer=named)
    if args.val_fraction is None:
        return chosen
    if ready and not open_shards(chosen).by_share:
        cli.refuse_ignored("val_fraction", f"{args.corpus} has files for validation")
    # A smaller share is refused too, since the share decides which documents are chosen.
    if learnt_here and chosen.corpus == data.corpus and args.val_fraction != data.val_fraction:
        raise UserError(
            f"--val_fraction={args.val_fraction} may hold text that the run learnt from",
            f"Leave it out: the run held out data.val_fraction={data.val_fraction}",
        )
    return dataclasses.replace(chosen, val_fraction=args.val_fraction)


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
