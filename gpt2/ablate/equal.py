"""Equal terms: what all arms of a sweep get alike, whatever it is that differs between them."""

import dataclasses
from collections.abc import Callable

from gpt2.ablate.arms import Arm
from gpt2.config import DEFAULTS, Config, option, with_options
from gpt2.errors import UserError
from gpt2.telemetry.flops import count_compute_parameters, model_flops_per_token

TERMS = ("tokens", "flops", "seconds", "params")
LOSS, BITS_PER_BYTE = "eval/loss", "eval/bits_per_byte"
_STEPS, _WIDTHS = "train.num_steps", ("model.mlp_dim", "model.mlp_ratio")  # what terms set
_NEAR = 0.005  # share by which parameters may differ where `mlp_dim` makes them equal


def choose_score(arms: list[Arm]) -> str:
    """Returns the metric in which arms are compared: nats per token, or bits per byte.

    Raises:
        UserError: the arms' validation texts differ, or their tokenizers do and a validation reads
            a part of the text only.
    """
    first, *others = (arm.config for arm in arms)
    for name in ("data.corpus", "data.val_fraction"):
        wanted = option(first, name)
        for arm in arms[1:]:
            if (found := option(arm.config, name)) != wanted:
                raise UserError(
                    f"the arm {arm.name} has {name}={found}, the baseline {wanted}: they would be "
                    "validated on different texts",
                    f"Give all the same by --config.{name}, or compare them by eval.py on one text",
                )
    scored = {
        (c.train.eval_batches, c.micro_batch_size, c.model.context_length) for c in (first, *others)
    }
    same_tokens = all(c.data.tokenizer == first.data.tokenizer for c in others)
    if any(batches for batches, _, _ in scored) and (len(scored) > 1 or not same_tokens):
        raise UserError(
            "the first train.eval_batches of the validation split are not the same for all arms",
            "Use --config.train.eval_batches=0, which reads the whole split",
        )
    return LOSS if same_tokens else BITS_PER_BYTE


def equalize(
    arms: list[Arm],
    terms: str,
    *,
    vocab_size: Callable[[Config], int],
    step_seconds: Callable[[Arm], float],
) -> list[Arm]:
    """Returns the arms with the length of their schedules, or their MLPs, changed to equal terms.

    Args:
        arms: the baseline first; it keeps its options.
        terms: one of `TERMS`. `params` also gives equal tokens; it counts the parameters that
            take part in products or sit beside one, and no tables that are only looked up.
        vocab_size: the number of tokens of a config's tokenizer.
        step_seconds: measures how long an arm's training step takes.

    Raises:
        UserError: an arm cannot be made equal.
    """
    first, *others = arms
    if terms == "params":
        wanted = count_compute_parameters(_with_vocabulary(first.config, vocab_size).gpt())
        others = [_with_parameters(arm, wanted, vocab_size) for arm in others]
    cost: dict[str, Callable[[Arm], float]] = {
        "tokens": lambda arm: arm.config.tokens_per_step,
        "params": lambda arm: arm.config.tokens_per_step,
        "flops": lambda arm: step_flops(_with_vocabulary(arm.config, vocab_size)),
        "seconds": step_seconds,
    }
    budget = first.config.train.num_steps * cost[terms](first)
    return [first] + [_with_length(arm, round(budget / cost[terms](arm))) for arm in others]


def describe_undone(arms: list[Arm], equal: list[Arm]) -> list[str]:
    """Says what equal terms set again of what a recipe sets otherwise than the baseline.

    Args:
        arms: as they were made, the baseline first.
        equal: the same, at one size or several, on equal terms.
    """
    notes = []
    for arm in arms[1:]:
        for name in (_STEPS, *_WIDTHS):
            value = option(arm.config, name)
            given = {option(each.config, name) for each in equal if each.change == arm.change}
            if value != option(arms[0].config, name) and given != {value}:
                values = ", ".join(map(str, sorted(given)))
                notes.append(
                    f"{arm.change} has {name}={value}; equal terms and sizes give it {values}"
                )
    return notes


def refuse_undone(varied: set[str], terms: str) -> None:
    """Refuses to vary what equal terms would set again.

    Args:
        varied: options.
        terms: one of `TERMS`.

    Raises:
        UserError: one of them would be undone.
    """
    undone = {_STEPS}
    if terms == "params":
        undone |= set(_WIDTHS)
    for name in sorted(varied & undone):
        raise UserError(
            f"{name} cannot be varied: --equal={terms} sets it, so that arms are on equal terms",
            "Leave it out" if name == _STEPS else "Leave it out, or use --equal=tokens",
        )


def with_length(config: Config, num_steps: int) -> Config:
    """Returns a config whose run is longer or shorter, its warm-up and its decay in proportion.

    Raises:
        UserError: its schedule names steps.
    """
    optim, before = config.optim, config.train.num_steps
    if num_steps == before:
        return config
    if optim.schedule.startswith("piecewise"):
        raise UserError(
            f"optim.schedule={optim.schedule} names steps of a run of {before}, not of {num_steps}",
            "Use another schedule where the arms' lengths differ",
        )
    options: dict[str, int] = {"train.num_steps": max(1, num_steps)}
    for name in ("warmup_steps", "decay_steps"):
        if steps := getattr(optim, name):
            options[f"optim.{name}"] = max(1, round(steps * num_steps / before))
    return with_options(config, options)


def step_flops(config: Config) -> float:
    """Returns the model's FLOPs of a step; `model.vocab_size` must be resolved (not 0)."""
    return config.tokens_per_step * model_flops_per_token(config.gpt())


def _with_vocabulary(config: Config, vocab_size: Callable[[Config], int]) -> Config:
    return config.with_vocabulary(vocab_size(config))


def _with_parameters(arm: Arm, wanted: int, vocab_size: Callable[[Config], int]) -> Arm:
    """Returns the arm with the MLP's width at which it has the wanted number of parameters."""

    def parameters(mlp_dim: int) -> int:
        model = dataclasses.replace(arm.config.model, mlp_dim=mlp_dim)
        config = dataclasses.replace(arm.config, model=model)
        return count_compute_parameters(_with_vocabulary(config, vocab_size).gpt())

    if parameters(arm.config.model.hidden_dim) == wanted:
        return arm
    one, two = parameters(1), parameters(2)
    mlp_dim = 1 + round((wanted - one) / (two - one))
    if mlp_dim < 1 or abs(parameters(mlp_dim) - wanted) > _NEAR * wanted:
        raise UserError(
            f"no model.mlp_dim gives the arm {arm.name} the baseline's {wanted:,} parameters",
            "Use --equal=flops, or leave the arm out",
        )
    options = {"model.mlp_dim": mlp_dim, "model.mlp_ratio": DEFAULTS.model.mlp_ratio}
    try:
        return dataclasses.replace(arm, config=with_options(arm.config, options))
    except UserError as error:
        raise UserError(f"the arm {arm.name} cannot be made equal", str(error)) from None


def _with_length(arm: Arm, num_steps: int) -> Arm:
    try:
        return dataclasses.replace(arm, config=with_length(arm.config, num_steps))
    except UserError as error:
        raise UserError(f"the arm {arm.name} cannot be made equal", str(error)) from None
