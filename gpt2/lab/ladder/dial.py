"""Scale a config to another depth. Published rules determine how other options change.

Rates are learning rates. With weight decay, AdamW's weights are a moving average of its updates
over a part of the run.

| option | rule, for a depth of r times the config's depth | source |
| --- | --- | --- |
| width, heads | r times; the head size stays the same | Kaplan et al. 2020, arXiv 2001.08361 |
| tokens | r^3 times, like the blocks' parameters | Hoffmann et al. 2022, arXiv 2203.15556 |
| batch size | grows with tokens^0.383 | Bergsma et al. 2025, arXiv 2505.13738 |
| rates of matrices | muP; default base: the config's width | Yang et al. 2022, arXiv 2203.03466 |
| residual branches | divided by r, as in CompleteP | Dey et al. 2025, arXiv 2505.01618 |
| all rates | grow with the square root of the batch size | Malladi et al. 2022, arXiv 2205.10287 |
| weight decay | the average covers the same fraction of the run | Bergsma et al. 2025, section 3 |
"""

import math
from dataclasses import replace
from fractions import Fraction

from gpt2.config import with_options
from gpt2.errors import UserError
from gpt2.lab.experiments.arms import Arm
from gpt2.lab.experiments.run_folder import Setting
from gpt2.lab.experiments.terms import with_length
from gpt2.optim import OPTIMIZERS

_BATCH_POWER = 0.383  # batch size ~ tokens**0.383; Bergsma et al. 2025, section 4
_SIZES = ("num_layers", "num_heads", "embed_dim", "num_kv_heads", "mlp_dim")
_RATES = ("optim.learning_rate", "optim.adam_learning_rate")


def at_depth(arm: Arm, ratio: Fraction) -> Arm:
    """Return an arm at `ratio` times its depth.

    The rules in the module's docstring determine the width, the number of steps, the batch size,
    the learning rates and the weight decay. Raise a UserError if no rule scales the
    optimizer's learning rate, if a size would not be a whole number, or if a schedule contains step
    numbers and the number of steps changes.
    """
    config = arm.config
    model = config.model
    optim = config.optim
    if OPTIMIZERS[optim.name].width_power is None:
        raise UserError(
            f"optim.name={optim.name} has no rule that adapts its learning rate to other widths",
            "Choose another optimizer, such as adamw or muon",
        )
    sizes: dict[str, Setting] = {}
    for name in _SIZES:
        size = getattr(model, name) * ratio
        if size.denominator > 1:
            raise UserError(
                f"{arm.name} at {ratio} of its depth would have model.{name}={size}",
                "Choose depths for which all sizes are whole numbers",
            )
        sizes[f"model.{name}"] = int(size)
    tokens = float(ratio**3)
    before = config.data.batch_size
    # The batch size stays a multiple of the number of micro-batches. It also stays a multiple of a
    # power of two, so that devices can split the batch.
    power_of_two = 2 ** int(math.log2(max(before // 4, 1)))
    unit = math.lcm(math.gcd(before, power_of_two), config.train.accumulate_steps)
    batch_size = unit * max(1, round(before * tokens**_BATCH_POWER / unit))
    batch = batch_size / before
    num_steps = max(1, round(config.train.num_steps * tokens / batch))
    rate = math.sqrt(batch)
    # Each step shrinks weights by the fraction rate * weight_decay, also with muP. The weight decay
    # is scaled so that the sum of these fractions over the run stays the same.
    decay = config.train.num_steps / (num_steps * rate)
    options: dict[str, Setting] = {
        **sizes,
        "model.mup_base_width": model.mup_base_width or model.embed_dim,
        "model.mup_base_depth": model.mup_base_depth or model.num_layers,
        "data.batch_size": batch_size,
        "optim.weight_decay": optim.weight_decay * decay,
    }
    for name in _RATES:
        options[name] = getattr(optim, name.removeprefix("optim.")) * rate
    arm = with_length(arm, num_steps)
    return replace(arm, config=with_options(arm.config, options))
