"""Learning-rate schedules: a warm-up, then the one that `optim.schedule` names."""

import jax.numpy as jnp
import optax

from gpt2.config import MAX_INT, OptimConfig
from gpt2.errors import UserError


def make_schedule(optim: OptimConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the step, counted from 0.

    A linear warm-up reaches `learning_rate` after `optim.warmup(num_steps)` steps and never gives 0
    (nanoGPT's form). The schedule that `optim.schedule` names follows. `cosine`, `linear` and `wsd`
    end at `end_learning_rate` on step `num_steps`, where the run is longer than its warm-up.

    Raises:
        UserError: the schedule does not fit into the run.
    """
    peak, warmup = optim.learning_rate, optim.warmup(num_steps)
    if optim.warmup_percent and not warmup:
        raise UserError(
            f"optim.warmup_percent={optim.warmup_percent:g} of {num_steps} steps is no warm-up",
            "For example, use --config.optim.warmup_percent=0 --config.optim.warmup_steps=1",
        )
    after = SCHEDULES[optim.schedule_name](optim, max(num_steps - warmup, 1), num_steps)
    if not warmup:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(peak / (warmup + 1), peak, warmup), after], [warmup]
    )


def _cosine(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    """Half a cosine (Loshchilov and Hutter 2017)."""
    peak = optim.learning_rate
    return optax.cosine_decay_schedule(peak, steps, optim.end_learning_rate / peak if peak else 0.0)


def _linear(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    return optax.linear_schedule(optim.learning_rate, optim.end_learning_rate, steps)


def _constant(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    return optax.constant_schedule(optim.learning_rate)


def _wsd(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    """Stable, then a linear decay, by default over the last fifth of all steps (Hu et al. 2024)."""
    decay = optim.decay(num_steps)
    most = {"decay_steps": steps, "decay_percent": 100 * steps // num_steps}
    for name, limit in most.items():
        value = getattr(optim, name)
        if value and decay > steps:
            raise UserError(
                f"optim.{name}={value:g} is longer than the {steps} steps after the warm-up",
                f"Use at most --config.optim.{name}={limit}",
            )
    decay = min(decay, steps)
    return optax.linear_schedule(
        optim.learning_rate, optim.end_learning_rate, decay, transition_begin=steps - decay
    )


def _inverse_sqrt(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    """Falls with the root of the step, from the warm-up on (Vaswani et al. 2017, section 5.3)."""
    warmup = optim.warmup(num_steps)
    return lambda count: optim.learning_rate * jnp.sqrt(warmup / (warmup + jnp.maximum(count, 0)))


def _piecewise(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    """Constant shares of the peak, each from its step on.

    Raises:
        UserError: a share would begin in the warm-up, or after the run.
    """
    peak, warmup = optim.learning_rate, optim.warmup(num_steps)
    first = optim.pieces[0][0]
    if first < warmup:
        raise UserError(
            f"optim.schedule={optim.schedule} begins at step {first}, in a warm-up of {warmup}",
            f"For example, use --config.optim.warmup_steps={first}"
            + (" --config.optim.warmup_percent=0.0" if optim.warmup_percent else ""),
        )
    last = optim.pieces[-1][0]
    if last >= num_steps:
        kept = [f"{step}={share}" for step, share in optim.pieces if step < num_steps]
        ways = [f"--config.optim.schedule=piecewise:{','.join(kept)}"] if kept else []
        if last < MAX_INT:
            ways.append(f"--config.train.num_steps={last + 1}")
        how = ", or ".join(ways or ["--config.optim.schedule=constant"])
        raise UserError(
            f"optim.schedule={optim.schedule} changes at step {last}, and train.num_steps="
            f"{num_steps} ends before",
            f"Use {how}",
        )
    shares = [1.0, *(share for _, share in optim.pieces)]
    rates = [optax.constant_schedule(peak * share) for share in shares]
    return optax.join_schedules(rates, [step - warmup for step, _ in optim.pieces])


# `optim.schedule` -> what follows the warm-up: a function of the options, the steps after the
# warm-up and all steps. The schedule counts from the warm-up's end; it is asked for counts below 0
# too, whose answers are dropped. What it cannot work with, it refuses with a UserError.
SCHEDULES = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "piecewise": _piecewise,
}
