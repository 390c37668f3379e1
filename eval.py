"""Score a run of train.py, or a Hugging Face model.

    python eval.py --workdir=runs/quickstart
    python eval.py --hf=DIR --tasks=lambada:data/tasks,hellaswag:data/tasks

For each score, this command prints how the score was computed, the number of examples and the
standard error.
docs/evaluation.md describes the files of the tasks.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import sys
import time

from absl import flags

from gpt2 import cli
from gpt2.errors import located, log
from gpt2.evals.figures import print_table, write_json
from gpt2.evals.perplexity import validation
from gpt2.evals.scoring import Scorer
from gpt2.evals.tasks import TASKS, find_tasks, validation_data
from gpt2.hf.weights import define_source, load_model
from gpt2.model import GPT
from gpt2.utils.stores import writing


def define_flags() -> None:
    """Define the flags of this command."""
    define_source()
    names = ", ".join(TASKS)
    flags.DEFINE_list(
        "tasks",
        ["validation"],
        f"Tasks to score: validation, or NAME:DIR, where NAME is one of {names}, and DIR contains "
        "the files of this task.",
    )
    flags.DEFINE_string(
        "corpus",
        "",
        "Corpus whose validation split is scored, in the form of data.corpus; empty: the run's "
        "corpus. With --hf, the task validation needs a corpus.",
    )
    flags.DEFINE_float(
        "val_fraction",
        None,
        "Fraction of --corpus to score; 1: all of it; default: the fraction of the run, or with "
        "--hf the default of data.val_fraction.",
        lower_bound=0.0,
        upper_bound=1.0,
    )
    flags.register_multi_flags_validator(
        ["corpus", "val_fraction"],
        lambda given: given["corpus"] or given["val_fraction"] is None,
        "--val_fraction has no effect without --corpus",
    )
    flags.register_multi_flags_validator(
        ["corpus", "tasks"],
        lambda given: not given["corpus"] or "validation" in given["tasks"],
        "--corpus has no effect unless --tasks contains validation",
    )
    flags.register_validator("tasks", bool, "it must name a task, such as validation")
    flags.DEFINE_integer(
        "stride",
        0,
        "For wikitext, enwik8 and text8: number of tokens by which windows over the text advance; "
        "0: half of the context length. Windows of validation do not overlap.",
        lower_bound=0,
    )
    flags.DEFINE_string("output", None, "JSON file to which the scores are written.")


def main() -> None:
    """Score the tasks in `--tasks`, and print the scores. With `--output`, also write them."""
    args = flags.FLAGS
    tasks = find_tasks(spec for spec in args.tasks if spec != "validation")
    data = None
    if "validation" in args.tasks:
        data = validation_data(args.workdir, args.hf, args.corpus, args.val_fraction)
    cfg, params, tokenizer = load_model(args.workdir, args.hf, args.checkpoint)
    scorer = Scorer(GPT(cfg), params, stride=args.stride)
    began = time.perf_counter()
    figures = validation(scorer, tokenizer, *data) if data else []
    for score, path in tasks:
        with located(path):
            figures += score(scorer, tokenizer, path)
    print_table(figures)
    seconds = time.perf_counter() - began
    amount = f"{scorer.num_tokens:,} positions, including padding,"
    log(f"computed {amount} in {seconds:.1f} s", sys.stdout)
    if args.output:
        with writing(args.output) as path:
            write_json(figures, path)


if __name__ == "__main__":
    cli.run(main, define_flags)
