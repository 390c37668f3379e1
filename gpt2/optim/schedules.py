"""Learning-rate schedules: a warm-up, followed by the schedule that `optim.schedule` names."""

import optax

from gpt2.config import OptimConfig
from gpt2.errors import UserError


def make_schedule(optim: OptimConfig, num_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step, counted from 0.

    A linear warm-up reaches `optim.learning_rate` after `optim.warmup_steps` steps. The first
    rate of the warm-up is above 0, as in nanoGPT. The schedule after the warm-up ends at step
    `num_steps`.
    """
    peak = optim.learning_rate
    warmup = optim.warmup_steps
    name, colon, _ = optim.schedule.partition(":")
    steps = max(num_steps - warmup, 1)
    after = SCHEDULES[name + colon](optim, steps, num_steps)
    if not warmup:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(peak / (warmup + 1), peak, warmup), after], [warmup]
    )


def _cosine(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    """Return a schedule that falls like half a period of a cosine, over `steps` steps.

    See Loshchilov and Hutter 2017.
    """
    end = optim.end_rate
    fraction = optax.cosine_decay_schedule(1.0, steps)
    return lambda count: end + (optim.learning_rate - end) * fraction(count)


def _linear(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    return optax.linear_schedule(optim.learning_rate, optim.end_rate, steps)


def _constant(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    return optax.constant_schedule(optim.learning_rate)


def _wsd(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    """Return a schedule: a constant rate, then a linear decay over the last steps.

    Together with the warm-up before it, this is WSD (warm-up, stable, decay). `steps` is the number
    of steps after the warm-up. The decay never begins during the warm-up, so it has fewer steps
    than the options specify if the warm-up is long.
    """
    decay = min(optim.decay_steps(num_steps), steps)
    return optax.linear_schedule(
        optim.learning_rate,
        optim.end_rate,
        decay,
        transition_begin=steps - decay,
    )


def _piecewise(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    """Return a schedule of constant rates, each a fraction of the peak rate.

    `optim.pieces` lists the fractions and the steps at which they begin.
    """
    peak = optim.learning_rate
    warmup = optim.warmup_steps
    starts = [step for step, _ in optim.pieces]
    if starts[0] < warmup or starts[-1] >= num_steps:
        raise UserError(
            f"optim.schedule={optim.schedule} changes the rate at a step that is not between "
            f"optim.warmup_steps={warmup} and train.num_steps={num_steps}",
            "Move that step, or shorten the warm-up",
        )
    rates = [
        optax.constant_schedule(peak * fraction)
        for fraction in (1.0, *dict(optim.pieces).values())
    ]
    return optax.join_schedules(rates, [step - warmup for step in starts])


# `optim.schedule` -> the function that returns the schedule after the warm-up. Its arguments are
# the options, the number of steps after the warm-up, and the number of all steps. The schedule
# counts steps from the end of the warm-up. optax also calls the schedule with negative counts, and
# ignores the results.
SCHEDULES = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
    "piecewise:": _piecewise,
}
