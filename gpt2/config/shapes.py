"""The batch size, context length and window of a run's steps.

The schedules in `train.` can change these sizes during a run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from gpt2.config.options import read_items
from gpt2.errors import UserError

Number = TypeVar("Number", int, float)


def read_steps(
    option: str, text: str, read: Callable[[str], Number], example: str
) -> dict[int, Number]:
    """Parse `STEP=VALUE,STEP=VALUE` into a dict, where the function `read` parses each VALUE.

    Raise a UserError that names `option` unless steps are at least 0 and ascending. If `text`
    cannot be parsed, the error quotes `example`.
    """

    def read_pair(item: str) -> tuple[int, Number]:
        step, _, value = item.partition("=")
        return int(step), read(value)

    values = read_items(option, text, read_pair, example)
    previous = -1
    for step, _ in values:
        if step <= previous:
            raise UserError(
                f"{option}: each step must be at least 0 and above the step before it"
            )
        previous = step
    return dict(values)


class StepShape(NamedTuple):
    """The sizes that are constant in a compiled step. If one of them changes, JAX compiles again.

    Each field has the name of its option.
    """

    batch_size: int
    context_length: int
    window: int

    @property
    def tokens(self) -> int:
        """Number of tokens in a batch, over all devices and micro-batches."""
        return self.batch_size * self.context_length


@dataclass(frozen=True)
class ShapeSchedule:
    """The shape of every step of a run.

    `pieces` is a dict of shapes, in the order of the steps. The key of a shape is the number of
    steps before it: the keys 0 and 1000 mean that the second shape begins with step 1001.
    """

    pieces: dict[int, StepShape]

    def at(self, step: int) -> StepShape:
        """Return the shape of a step. The first step is step 1."""
        return self.pieces[max(start for start in self.pieces if start < step)]

    def tokens(self, steps: int) -> int:
        """Return the number of tokens in the first `steps` steps."""
        return int(self.sum(lambda shape: shape.tokens, steps))

    def sum(self, amount: Callable[[StepShape], float], steps: int) -> float:
        """Return the sum of `amount(shape)` over the first `steps` steps."""
        total = 0.0
        ends = [*self.pieces, steps][1:]
        for (start, shape), end in zip(self.pieces.items(), ends, strict=True):
            if start < steps:
                total += amount(shape) * (min(end, steps) - start)
        return total

    @property
    def last(self) -> StepShape:
        """The shape of the run's last steps."""
        return self.pieces[max(self.pieces)]

    @property
    def largest(self) -> StepShape:
        """The shape with the most tokens, or the last of several such shapes."""
        return max(reversed(self.pieces.values()), key=lambda shape: shape.tokens)
