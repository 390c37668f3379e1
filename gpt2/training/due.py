"""What is due after a training step: a validation, a checkpoint, the end."""

import dataclasses

from gpt2.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Due:
    """What the loop does after a step, beside the next one.

    Attributes:
        validation: score the validation split.
        checkpoint: save the state.
        end: leave the loop.
    """

    validation: bool
    checkpoint: bool
    end: bool


def due_after(
    step: int, train: TrainConfig, *, stopping: bool = False, measuring: bool = False
) -> Due:
    """Returns what is due after `step`, counted from 1.

    Args:
        step: optimizer steps done.
        train: the `train.` options; a run's last step is validated and saved, whatever they say.
        stopping: the run was asked to stop; it saves first.
        measuring: the step is saved to see how long that takes.
    """
    last = step == train.num_steps
    return Due(
        validation=last or recurs(step, train.eval_every),
        checkpoint=last or stopping or measuring or recurs(step, train.checkpoint_every),
        end=last or stopping,
    )


def recurs(step: int, every: int) -> bool:
    """Returns whether `step` is a multiple of `every`; an `every` of 0 means never."""
    return every > 0 and step % every == 0
