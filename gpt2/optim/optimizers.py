"""Optimizers: a direction that `optim.name` names, in a chain that is the same for all.

A direction is an optax transformation from gradients to updates that are neither negated nor
multiplied by the learning rate, such as `optax.scale_by_adam`.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from gpt2.config import OptimConfig
from gpt2.errors import UserError
from gpt2.optim.muon import scale_by_muon
from gpt2.optim.parameters import (
    Path,
    decay_mask,
    is_hidden_kernel,
    map_parameters,
    unrolled_names,
)
from gpt2.optim.soap import scale_by_soap
from gpt2.optim.transforms import (
    average_parameters,
    cautious,
    cautious_decay,
    clip_by_global_norm,
)
from gpt2.parallel.matrices import Matrices
from gpt2.utils.trees import Tree


def make_optimizer(
    optim: OptimConfig,
    schedule: optax.Schedule,
    *,
    num_steps: int,
    width_ratio: float = 1.0,
    matrices: Matrices = Matrices(),
) -> optax.GradientTransformation:
    """Returns clipping, the direction, weight decay, factors, the rate and averages as one chain.

    `matrices` says where directions for whole matrices compute. `width_ratio` is the model's width
    over that for which its rates were tuned. As in microsoft/mup, rate times `weight_decay` stays
    as it is: adam's decay grows by the ratio first.
    """
    direction = OPTIMIZERS[optim.name].direction(optim, num_steps, matrices)
    if optim.cautious in ("updates", "both"):
        direction = cautious(direction)
    decay = _decay(optim, schedule)
    parts = [direction]
    if width_ratio != 1:
        parts.append(_width_factor(optim, width_ratio))
    if optim.name in ("adam", "sgd"):
        if width_ratio != 1:
            wider = optim.weight_decay * (width_ratio - 1)
            parts.insert(0, optax.add_decayed_weights(wider, _hidden_mask))
        parts.insert(0, decay)
    else:
        parts.append(decay)
    if optim.adam_learning_rate:
        ratio = optim.adam_learning_rate / optim.learning_rate
        parts.append(optax.masked(optax.scale(ratio), _other_mask))
    if optim.rates:
        parts.append(_layer_rates(optim))
    optimizer = optax.chain(*parts, optax.scale_by_learning_rate(schedule))
    if optim.name == "schedule_free":
        # Averages, in place of a momentum and a schedule (Defazio et al. 2024, algorithm 1), weigh
        # steps by the square of the rate. optax counts from 1 here.
        rate = lambda count: schedule(count - 1)  # noqa: E731
        optimizer = optax.contrib.schedule_free(optimizer, rate, b1=optim.beta1)
    if optim.ema or optim.tail_average:
        average = average_parameters(optim.ema, optim.tail_start(num_steps))
        optimizer = optax.chain(optimizer, average)
    if not optim.clip_norm:
        return optimizer
    return optax.chain(clip_by_global_norm(optim.clip_norm), optimizer)


def num_updates(opt_state: optax.OptState) -> Array | None:
    """Returns how often the schedule has been asked for a rate, an int32 scalar.

    That is fewer times than steps if some were skipped; None if the state has no schedule.
    """
    found = optax.tree.get_all_with_path(opt_state, "ScaleByScheduleState")
    if not found:
        return None
    _, last = found[-1]
    return last.count


def _decay(
    optim: OptimConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    amount: float | optax.Schedule = optim.weight_decay
    # The rate, which multiplies it again, over its peak.
    if optim.scheduled_weight_decay:
        peak = jnp.maximum(optim.learning_rate, 1e-30)  # where that is 0, no decay
        amount = lambda count: optim.weight_decay * schedule(count) / peak  # noqa: E731
    decay = optax.add_decayed_weights(amount, decay_mask)
    if optim.cautious in ("decay", "both"):
        return cautious_decay(decay)
    return decay


def _hidden_mask(params: Tree) -> Tree:
    return map_parameters(lambda path, _: is_hidden_kernel(path), params)


def _other_mask(params: Tree) -> Tree:
    return map_parameters(lambda path, _: not is_hidden_kernel(path), params)


def _width_factor(
    optim: OptimConfig, width_ratio: float
) -> optax.GradientTransformation:
    power = OPTIMIZERS[optim.name].width_power
    if power is None:
        raise UserError(f"optim.name={optim.name} has no rule for model.mup_base_width")
    return optax.masked(optax.scale(width_ratio**-power), _hidden_mask)


def _layer_rates(optim: OptimConfig) -> optax.GradientTransformation:
    """Multiplies updates by the factor of the first pattern of `layer_rates` that matches."""
    rates = (*optim.rates, ("", 1.0))  # the last one matches all

    def first_match(name: str) -> int:
        matches = [bool(re.search(pattern, name)) for pattern, _ in rates]
        return matches.index(True)

    def first_matches(path: Path, leaf: Array) -> list[int]:
        return [first_match(name) for name in unrolled_names(path, leaf)]

    def scale(path: Path, update: Array) -> Array:
        factors = [rates[place][1] for place in first_matches(path, update)]
        return update * np.array(factors, update.dtype).reshape(
            -1, *[1] * (update.ndim - 1)
        )

    def init(params: Tree) -> optax.OptState:
        places = map_parameters(first_matches, params)
        matched = {*jax.tree.leaves(places)}
        for index, (pattern, _) in enumerate(optim.rates):
            if index not in matched:  # a run would ignore it
                names = map_parameters(unrolled_names, params)
                example = jax.tree.leaves(names)[0]
                raise UserError(
                    f"optim.layer_rates has {pattern!r}, which matches no parameter, or none that "
                    f"a pattern before it leaves, of names such as {example}"
                )
        return optax.EmptyState()

    return optax.GradientTransformation(
        init, lambda updates, state, _=None: (map_parameters(scale, updates), state)
    )


def _adam(
    optim: OptimConfig, num_steps: int, matrices: Matrices
) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2015)."""
    return optax.scale_by_adam(
        b1=optim.beta1,
        b2=optim.beta2,
        eps=optim.eps,
    )


def _sgd(
    optim: OptimConfig, num_steps: int, matrices: Matrices
) -> optax.GradientTransformation:
    """Momentum as a sum of gradients (Sutskever et al. 2013), in torch.optim.SGD's form."""
    if not optim.momentum:
        return optax.identity()
    return optax.trace(optim.momentum, nesterov=optim.nesterov)


def _lion(
    optim: OptimConfig, num_steps: int, matrices: Matrices
) -> optax.GradientTransformation:
    """Lion (Chen et al. 2023)."""
    return optax.scale_by_lion(b1=optim.beta1, b2=optim.beta2)


def _ademamix(
    optim: OptimConfig, num_steps: int, matrices: Matrices
) -> optax.GradientTransformation:
    """AdEMAMix (Pagliardini et al. 2024), its slow average warming up over the whole run.

    Section 3.1: `alpha` rises linearly, `beta3` so that its half-life does, from that of `beta1`.
    """

    def progress(count: Array) -> Array:
        # The paper's steps count from 1.
        return jnp.minimum((count + 1) / num_steps, 1.0)

    def alpha(count: Array) -> Array:
        return optim.alpha * progress(count)

    def beta3(count: Array) -> Array:
        start = 1 / jnp.log(optim.beta1)  # -0 for a beta of 0
        end = 1 / jnp.log(optim.beta3)
        share = progress(count)
        inverse = (1 - share) * start + share * end
        rising = jnp.exp(1 / inverse)
        return jnp.minimum(rising, optim.beta3)

    return optax.contrib.scale_by_ademamix(
        b1=optim.beta1,
        b2=optim.beta2,
        b3=beta3,
        alpha=alpha,
        eps=optim.eps,
    )


def _schedule_free(
    optim: OptimConfig, num_steps: int, matrices: Matrices
) -> optax.GradientTransformation:
    """Adam without its first moment, in whose place `make_optimizer` averages."""
    return optax.scale_by_rms(
        decay=optim.beta2,
        eps=optim.eps,
        eps_in_sqrt=False,
        bias_correction=True,
    )


def _with_adam(
    optim: OptimConfig, num_steps: int, matrices: Matrices
) -> optax.GradientTransformation:
    """Gives hidden kernels to a direction for matrices, and everything else to Adam."""
    scale_by_matrices = scale_by_soap if optim.name == "soap" else scale_by_muon

    def kinds(params: Tree) -> Tree:
        return jax.tree.map(
            lambda hidden: "hidden" if hidden else "adam", _hidden_mask(params)
        )

    return optax.partition(
        {
            "adam": _adam(optim, num_steps, matrices),
            "hidden": scale_by_matrices(optim, matrices),
        },
        kinds,
    )


class Optimizer(NamedTuple):
    """What `optim.name` names.

    Attributes:
        direction: a function of the options, the steps of the run, and where matrices are computed.
        width_power: of the width with which the largest singular value of a hidden kernel's update
            grows (Yang et al. 2022, appendix B.3; of orthogonal ones Yang et al. 2023, condition
            1); None: not known.
    """

    direction: Callable[[OptimConfig, int, Matrices], optax.GradientTransformation]
    width_power: float | None = None


OPTIMIZERS = {
    "adamw": Optimizer(_adam, 1.0),
    "adam": Optimizer(_adam, 1.0),
    "sgd": Optimizer(_sgd),
    "lion": Optimizer(_lion, 1.0),
    "ademamix": Optimizer(_ademamix, 1.0),
    "schedule_free": Optimizer(_schedule_free, 1.0),
    "muon": Optimizer(_with_adam, 0.5),
    "normuon": Optimizer(_with_adam, 0.5),
    "soap": Optimizer(_with_adam),
}
