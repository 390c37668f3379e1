"""Equal terms: what all arms of a sweep get alike, whatever it is that differs between them."""

import dataclasses
import re
from collections.abc import Callable, Sequence

from gpt2.ablate.arms import Arm
from gpt2.config import DEFAULTS, Config, option, with_options
from gpt2.errors import refuse
from gpt2.telemetry.flops import count_compute_parameters, model_flops_per_token

TERMS = ("tokens", "flops", "seconds", "params")
LOSS, BITS_PER_BYTE = "eval/loss", "eval/bits_per_byte"
MIN_SIZES = 3  # for a power law and its error
_NEAR = 0.005  # share by which parameters may differ where `mlp_dim` makes them equal

VocabSize = Callable[[Config], int]  # the number of tokens of a config's tokenizer


def choose_score(arms: Sequence[Arm]) -> str:
    """Returns the metric in which arms are compared: nats per token, or bits per byte.

    Arms that would be validated on different texts are a UserError.
    """
    configs = [arm.config for arm in arms]
    for name in ("data.corpus", "data.val_fraction"):
        differ = len({option(config, name) for config in configs}) > 1
        refuse(differ, f"arms with another {name} would be validated on different texts")
    same_tokens = len({config.data.tokenizer for config in configs}) == 1
    parts = {
        (c.train.eval_batches, c.micro_batch_size, c.model.context_length, c.data.tokenizer)
        for c in configs
    }
    refuse(
        len(parts) > 1 and any(batches for batches, *_ in parts),
        "the first train.eval_batches of the validation split are not the same for all arms",
        "Use --config.train.eval_batches=0, which reads the whole split",
    )
    return LOSS if same_tokens else BITS_PER_BYTE


def equalize(
    arms: Sequence[Arm],
    terms: str,
    *,
    vocab_size: VocabSize,
    step_seconds: Callable[[Arm], float],
) -> list[Arm]:
    """Returns the arms with the length of their schedules, or their MLPs, changed to equal terms.

    The baseline, which is the first, keeps its options. `params` also gives equal tokens.
    """
    first, *others = arms
    if terms == "params":
        wanted = parameters(first.config, vocab_size)
        others = [_with_parameters(arm, wanted, vocab_size) for arm in others]

    def cost(arm: Arm) -> float:
        if terms == "seconds":
            return step_seconds(arm)
        if terms == "flops":
            return step_flops(arm.config.with_vocabulary(vocab_size(arm.config)))
        return arm.config.tokens_per_step

    budget = first.config.train.num_steps * cost(first)
    return [first] + [
        dataclasses.replace(arm, config=with_length(arm.config, round(budget / cost(arm))))
        for arm in others
    ]


def at_sizes(arms: Sequence[Arm], sizes: Sequence[str], vocab_size: VocabSize) -> list[Arm]:
    """Returns every arm at every size, `LAYERSxWIDTH` each, size by size.

    The width of a head stays. Tokens grow in proportion to the baseline's parameters, as
    compute-optimal training has them (Hoffmann et al. 2022, arXiv 2203.15556).
    """
    few = len(set(sizes)) < max(MIN_SIZES, len(sizes))
    refuse(few, f"--scaling needs {MIN_SIZES} different sizes", "Use such as 2x64,4x128,6x192")
    base, scaled = arms[0].config, []
    for size in sizes:
        resized = [Arm(arm.change, _with_size(arm, size), size) for arm in arms]
        share = parameters(resized[0].config, vocab_size) / parameters(base, vocab_size)
        steps = max(1, round(base.train.num_steps * share))
        scaled += [
            dataclasses.replace(arm, config=with_length(arm.config, steps)) for arm in resized
        ]
    return scaled


def with_length(config: Config, num_steps: int) -> Config:
    """Returns a config whose run is longer or shorter, its warm-up and its decay in proportion."""
    optim, before = config.optim, config.train.num_steps
    if num_steps == before:
        return config
    refuse(
        optim.schedule.startswith("piecewise"),
        f"optim.schedule={optim.schedule} names steps of a run of {before}, not of {num_steps}",
    )
    options = {"train.num_steps": max(1, num_steps)}
    for name in ("warmup_steps", "decay_steps"):
        if steps := getattr(optim, name):
            options[f"optim.{name}"] = max(1, round(steps * num_steps / before))
    return with_options(config, options)


def step_flops(config: Config) -> float:
    """Returns the model's FLOPs of a step; `model.vocab_size` must be resolved (not 0)."""
    return config.tokens_per_step * model_flops_per_token(config.gpt())


def parameters(config: Config, vocab_size: VocabSize) -> int:
    """Returns how many parameters of a model take part in products, or sit beside one."""
    return count_compute_parameters(config.with_vocabulary(vocab_size(config)).gpt())


def _with_parameters(arm: Arm, wanted: int, vocab_size: VocabSize) -> Arm:
    """Returns the arm with the MLP's width at which it has the wanted number of parameters."""

    def with_width(mlp_dim: int) -> Config:
        options = {"model.mlp_dim": mlp_dim, "model.mlp_ratio": DEFAULTS.model.mlp_ratio}
        return with_options(arm.config, options)

    if parameters(arm.config, vocab_size) == wanted:
        return arm
    one, two = (parameters(with_width(mlp_dim), vocab_size) for mlp_dim in (1, 2))
    config = with_width(max(1, 1 + round((wanted - one) / (two - one))))
    refuse(
        abs(parameters(config, vocab_size) - wanted) > _NEAR * wanted,
        f"no model.mlp_dim gives the arm {arm.name} the baseline's {wanted:,} parameters",
        "Use --equal=flops",
    )
    return dataclasses.replace(arm, config=config)


def _with_size(arm: Arm, size: str) -> Config:
    """Returns an arm's config with the layers and the width of a size."""
    refuse(not re.fullmatch(r"\d+x\d+", size), f"{size} is no size", "Write LAYERSxWIDTH")
    layers, width = map(int, size.split("x"))
    model = arm.config.model
    refuse(
        model.mlp_dim or model.num_kv_heads or width % model.head_size,
        f"the arm {arm.change} cannot have the size {size}: widths are multiples of its head's "
        f"{model.head_size}, and neither model.mlp_dim nor model.num_kv_heads is set",
    )
    shape = {"num_layers": layers, "embed_dim": width, "num_heads": width // model.head_size}
    return with_options(arm.config, {f"model.{name}": value for name, value in shape.items()})
