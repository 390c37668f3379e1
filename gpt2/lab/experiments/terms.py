"""The terms of a fair comparison: the metric in which arms are compared, and the cost of a run.

`flops` needs a config with the size of the vocabulary (`Config.with_vocabulary`), because the FLOPs
depend on it. The default, a `model.vocab_size` of 0, stands for the size of the tokenizer.
"""

from collections.abc import Sequence
from dataclasses import replace

from gpt2.config import Config, get_option, with_options
from gpt2.config.options import OPTIONS
from gpt2.errors import UserError
from gpt2.lab.experiments.arms import Arm
from gpt2.model.flops import model_flops_per_token

TERMS = ("tokens", "flops", "seconds")
# The options in `_TEXT` determine the validation split. The options in `_PART` determine how much
# text of the split a validation reads if `train.eval_batches` is not 0.
_TEXT = ("data.corpus", "data.val_fraction", "data.unique")
_PART = (
    "train.eval_batches",
    "data.batch_size",
    "model.context_length",
    "data.tokenizer",
)
LOSS = "eval/loss"
BITS_PER_BYTE = "eval/bits_per_byte"


def choose_score(arms: Sequence[Arm]) -> str:
    """Return the metric in which all arms are compared.

    The metric is `LOSS` or, if arms have different tokenizers, `BITS_PER_BYTE`. Raise a UserError
    if the validation texts of arms differ.
    """

    def differs(name: str) -> bool:
        return len({get_option(arm.config, name) for arm in arms}) > 1

    if any(map(differs, _TEXT)):
        raise UserError(
            "The runs to be compared differ in data.corpus, data.val_fraction or data.unique,"
            " so their validation texts differ",
            "Vary other options",
        )
    reads_part = any(arm.config.train.eval_batches for arm in arms)
    if reads_part and any(map(differs, _PART)):
        raise UserError(
            "The runs to be compared differ in train.eval_batches, data.batch_size,"
            " model.context_length or data.tokenizer, so they would be validated on different parts"
            " of the split",
            "Use --config.train.eval_batches=0 to validate on the whole split. For an existing "
            "ledger, start another --ledger with this option",
        )
    return BITS_PER_BYTE if differs("data.tokenizer") else LOSS


def with_length(arm: Arm, num_steps: int) -> Arm:
    """Return an arm with `num_steps` steps. Options that count steps change in proportion.

    Raise a UserError if the number of steps changes and a schedule contains step numbers.
    """
    optim = arm.config.optim
    before = arm.config.train.num_steps
    changes_shape = len(arm.config.shapes.pieces) > 1
    named = changes_shape or ":" in optim.schedule
    if named and num_steps != before:
        raise UserError(
            f"optim.schedule, train.batch_schedule, train.context_schedule or train.window_schedule"
            f" of {arm.name} contains step numbers for a run of {before} steps, but in this"
            f" comparison the run has {num_steps} steps",
            "Use schedules without step numbers",
        )
    options = {"train.num_steps": max(1, num_steps)}
    for name, about in OPTIONS.items():
        if about.is_duration and (steps := get_option(arm.config, name)):
            options[name] = max(1, round(steps * num_steps / before))
    return replace(arm, config=with_options(arm.config, options))


def flops(config: Config, steps: int) -> float:
    """Return the model's FLOPs in the first `steps` steps.

    `model.vocab_size` must not be 0 in `config`, because the FLOPs depend on it.
    """
    cfg = config.gpt()
    return config.shapes.sum(lambda s: s.tokens * model_flops_per_token(cfg, s), steps)
