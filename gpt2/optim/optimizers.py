"""Optimizers: `optim.name` chooses a direction, and one chain of transformations surrounds it.

A direction is an optax transformation from gradients to updates that are neither negated nor
multiplied by the learning rate, such as `optax.scale_by_adam`.
"""

import dataclasses
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
from gpt2.optim.hyperball import keep_norms, scale_to_matrices
from gpt2.optim.muon import scale_by_muon
from gpt2.optim.soap import scale_by_soap
from gpt2.optim.stacks import matrices_of
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
    parameters: Tree,
    *,
    num_steps: int,
    width_ratio: float = 1.0,
    matrices: Matrices = Matrices(),
) -> optax.GradientTransformation:
    """Return the optimizer, a chain of optax transformations.

    The chain clips the gradients, computes the direction of `optim.name` (such as Adam's), adds
    weight decay, multiplies by factors and by the learning rate, and averages the parameters.

    Args:
        optim: the options.
        schedule: the learning rate as a function of the step.
        parameters: the `ParamInfo` of each parameter (`GPT.parameters`), in the layout (scanned or
            unrolled layers) in which the parameters are trained.
        num_steps: the number of steps of the run.
        width_ratio: the model's width divided by the width for which the rates were tuned. In a
            wider model, matrices have lower rates. As in microsoft/mup, the product of a matrix's
            rate and its `weight_decay` stays the same.
        matrices: the assignment of whole matrices to devices.
    """
    optim = dataclasses.replace(optim, weight_decay=optim.decay(num_steps))
    direction = OPTIMIZERS[optim.name].direction(optim, num_steps, parameters, matrices)
    if optim.cautious in ("updates", "both"):
        direction = cautious(direction, parameters)
    is_matrix = jax.tree.map(lambda info: bool(info.inputs), parameters)
    decay = _decay(optim, schedule, parameters)
    parts = [direction]
    if optim.hyperball:
        parts.append(scale_to_matrices(parameters))
    if width_ratio != 1:
        factor = _width_factor(optim, width_ratio)
        parts.append(optax.masked(factor, is_matrix))
    if optim.decay_in_gradient:
        if width_ratio != 1:
            wider = optim.weight_decay * (width_ratio - 1)
            parts.insert(0, optax.add_decayed_weights(wider, is_matrix))
        parts.insert(0, decay)
    else:
        parts.append(decay)
    if optim.adam_learning_rate:
        ratio = optim.adam_learning_rate / optim.learning_rate
        is_other = jax.tree.map(lambda matrix: not matrix, is_matrix)
        parts.append(optax.masked(optax.scale(ratio), is_other))
    if optim.rates:
        parts.append(_layer_rates(optim))
    parts.append(optax.scale_by_learning_rate(schedule))
    if optim.hyperball:
        parts.append(keep_norms(parameters))
    optimizer = optax.chain(*parts)
    if optim.name == "schedule_free":
        # An average replaces the momentum and the schedule (Defazio et al. 2024, algorithm 1). This
        # average weights each step by the square of the step's rate. optax's transformation counts
        # steps from 1, but `schedule` counts from 0.
        rate = lambda count: schedule(count - 1)  # noqa: E731
        optimizer = optax.contrib.schedule_free(optimizer, rate, b1=optim.beta1)
    if optim.ema or optim.tail_average:
        average = average_parameters(optim.ema, optim.tail_start(num_steps))
        optimizer = optax.chain(optimizer, average)
    if not optim.clip_norm:
        return optimizer
    return optax.chain(clip_by_global_norm(optim.clip_norm), optimizer)


def _decay(
    optim: OptimConfig, schedule: optax.Schedule, parameters: Tree
) -> optax.GradientTransformation:
    amount: float | optax.Schedule = optim.weight_decay
    # With `scheduled_weight_decay`, the decay follows the schedule here, and the chain multiplies
    # it by the scheduled rate once more.
    if optim.scheduled_weight_decay:
        # The maximum avoids 0 / 0. With a learning rate of 0, the decay is 0.
        peak = jnp.maximum(optim.learning_rate, 1e-30)
        amount = lambda count: optim.weight_decay * schedule(count) / peak  # noqa: E731
    decays = jax.tree.map(
        lambda info: info.decays and not (optim.hyperball and info.inputs), parameters
    )
    decay = optax.add_decayed_weights(amount, decays)
    if optim.cautious in ("decay", "both"):
        return cautious_decay(decay)
    return decay


def _width_factor(
    optim: OptimConfig, width_ratio: float
) -> optax.GradientTransformation:
    power = OPTIMIZERS[optim.name].width_power
    if power is None:
        raise UserError(
            f"optim.name={optim.name} is not supported with muP (model.mup_base_width)",
            "Choose another optimizer, or leave out --config.model.mup_base_width",
        )
    if optim.hyperball:
        # `scale_to_matrices` divides a direction by the direction's norm, which grows with the
        # width, and multiplies it by the matrix's norm, which grows with the width's square root.
        power -= 0.5
    return optax.scale(width_ratio**-power)


def _layer_rates(optim: OptimConfig) -> optax.GradientTransformation:
    """Return a transformation that multiplies updates by the factors in `optim.layer_rates`.

    The first pattern that matches a parameter's name determines the factor of the parameter's
    update. The factor is 1 if no pattern matches. `init` raises a UserError if a pattern has no
    effect.
    """
    rates = (*optim.rates, ("", 1.0))  # the empty pattern matches every name

    def first_match(name: str) -> int:
        matches = [bool(re.search(pattern, name)) for pattern, _ in rates]
        return matches.index(True)

    def first_matches(path: tuple, leaf: Array) -> list[int]:
        return [first_match(name) for name in _unrolled_names(path, leaf)]

    def scale(path: tuple, update: Array) -> Array:
        factors = [rates[index][1] for index in first_matches(path, update)]
        by_layer = np.array(factors, update.dtype)
        # One factor for each layer of a stacked parameter, or a single factor.
        shape = by_layer.shape[: update.ndim] + (1,) * (update.ndim - 1)
        return update * by_layer.reshape(shape)

    def init(params: Tree) -> optax.OptState:
        matches = jax.tree.map_with_path(first_matches, params)
        matched = {*jax.tree.leaves(matches)}
        for index, (pattern, _) in enumerate(optim.rates):
            if index not in matched:  # the run would ignore the pattern
                names = jax.tree.map_with_path(_unrolled_names, params)
                example = jax.tree.leaves(names)[0]
                raise UserError(
                    f"The pattern {pattern!r} of optim.layer_rates has no effect: it matches no "
                    f"parameter, or only parameters that an earlier pattern matches",
                    f"Correct the pattern, or put it before the earlier pattern. The name of a "
                    f"parameter looks like {example}",
                )
        return optax.EmptyState()

    def update(
        updates: Tree, state: optax.OptState, params: Tree = None
    ) -> tuple[Tree, optax.OptState]:
        return jax.tree.map_with_path(scale, updates), state

    return optax.GradientTransformation(init, update)


def _unrolled_names(path: tuple, leaf: Array) -> list[str]:
    """Return the names of a parameter, such as `h_3/attn/c_attn/kernel`.

    A parameter that stacks the tensors of all layers has one name for each layer. Any other
    parameter has one name.
    """
    names = [entry.key for entry in path]
    if "h" not in names:  # the parameter is not stacked
        return ["/".join(names)]
    layer = names.index("h")
    return [
        "/".join([*names[:layer], f"h_{index}", *names[layer + 1 :]])
        for index in range(leaf.shape[0])
    ]


def _adam(
    optim: OptimConfig, num_steps: int, parameters: Tree, matrices: Matrices
) -> optax.GradientTransformation:
    """Return Adam's transformation of gradients (Kingma and Ba 2015), without a learning rate."""
    return optax.scale_by_adam(
        b1=optim.beta1,
        b2=optim.beta2,
        eps=optim.eps,
    )


def _sgd(
    optim: OptimConfig, num_steps: int, parameters: Tree, matrices: Matrices
) -> optax.GradientTransformation:
    """Return the direction of SGD (Sutskever et al. 2013): updates without a learning rate.

    As in torch.optim.SGD, the momentum is a decaying sum of gradients, not a mean.
    """
    if not optim.momentum:
        return optax.identity()
    return optax.trace(optim.momentum, nesterov=optim.nesterov)


def _lion(
    optim: OptimConfig, num_steps: int, parameters: Tree, matrices: Matrices
) -> optax.GradientTransformation:
    """Return the direction of Lion (Chen et al. 2023): updates without a learning rate."""
    return optax.scale_by_lion(b1=optim.beta1, b2=optim.beta2)


def _ademamix(
    optim: OptimConfig, num_steps: int, parameters: Tree, matrices: Matrices
) -> optax.GradientTransformation:
    """Return the direction of AdEMAMix (Pagliardini et al. 2024): updates without a learning rate.

    As in section 3.1 of the paper, two hyperparameters of the slow average rise, here over the
    whole run. The weight `alpha` of the average rises linearly. The decay `beta3` rises so that the
    half-life of the average grows linearly, starting at the half-life of `beta1`.
    """

    def progress(count: Array) -> Array:
        # The paper counts steps from 1, but optax counts from 0.
        return jnp.minimum((count + 1) / num_steps, 1.0)

    def alpha(count: Array) -> Array:
        return optim.alpha * progress(count)

    def beta3(count: Array) -> Array:
        start = 1 / jnp.log(optim.beta1)  # this is -0 if beta1 is 0
        end = 1 / jnp.log(optim.beta3)
        fraction = progress(count)
        inverse = (1 - fraction) * start + fraction * end
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
    optim: OptimConfig, num_steps: int, parameters: Tree, matrices: Matrices
) -> optax.GradientTransformation:
    """Return Adam's direction without the first moment: updates without a learning rate.

    In `make_optimizer`, the average of schedule-free training replaces the first moment.
    """
    return optax.scale_by_rms(
        decay=optim.beta2,
        eps=optim.eps,
        eps_in_sqrt=False,
        bias_correction=True,
    )


def _with_adam(
    optim: OptimConfig, num_steps: int, parameters: Tree, matrices: Matrices
) -> optax.GradientTransformation:
    """Return a direction for matrices, and Adam's direction for all other parameters.

    `optim.name` chooses the direction for matrices: Muon, NorMuon, SOAP or SOAP-Muon.
    """
    uses_bases = optim.name in ("soap", "soap_muon")
    scale_by_matrices = scale_by_soap if uses_bases else scale_by_muon
    kinds = jax.tree.map(lambda info: "hidden" if info.inputs else "adam", parameters)
    directions = {
        "adam": _adam(optim, num_steps, parameters, matrices),
        "hidden": scale_by_matrices(optim, matrices_of(parameters), matrices),
    }
    return optax.partition(directions, kinds)


class Optimizer(NamedTuple):
    """An optimizer that `optim.name` can choose.

    Attributes:
        direction: a function that returns an optax transformation from gradients to updates, which
            are neither negated nor multiplied by the learning rate. The arguments of the function
            are the options, the number of steps of the run, a tree with the `ParamInfo` of each
            parameter, and the assignment of matrices to devices.
        width_power: the exponent p with which updates grow with the model's width: the largest
            singular value of a hidden matrix's update is proportional to width^p (Yang et al. 2022,
            appendix B.3; for orthogonal updates, Yang et al. 2023, condition 1). None if the
            exponent is not known.
    """

    direction: Callable[
        [OptimConfig, int, Tree, Matrices], optax.GradientTransformation
    ]
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
    "soap_muon": Optimizer(_with_adam, 0.5),
}
