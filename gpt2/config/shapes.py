"""The shapes of a run's steps, which `train.batch_schedule` and its kin change as it goes on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from gpt2.config.options import read_items
from gpt2.errors import UserError

Number = TypeVar("Number", int, float)


def read_steps(
    option: str, text: str, read: Callable[[str], Number], example: str
) -> dict[int, Number]:
    """Returns what `STEP=VALUE,STEP=VALUE` in an option says; steps must ascend from 0 on."""

    def read_pair(item: str) -> tuple[int, Number]:
        step, _, value = item.partition("=")
        return int(step), read(value)

    before = -1
    values = read_items(option, text, read_pair, example)
    for step, _ in values:
        if step <= before:
            raise UserError(f"{option} has steps that do not ascend")
        before = step
    return dict(values)


class Shape(NamedTuple):
    """What is static in a compiled step, as the options of these names."""

    batch_size: int
    context_length: int
    window: int

    @property
    def tokens(self) -> int:
        """Tokens in a global batch."""
        return self.batch_size * self.context_length


@dataclass(frozen=True)
class Shapes:
    """The shape of every step. Each of `pieces` begins after so many steps, the first after 0."""

    pieces: dict[int, Shape]

    def at(self, step: int) -> Shape:
        """Returns the shape of a step, counted from 1."""
        return self.pieces[max(start for start in self.pieces if start < step)]

    def tokens(self, steps: int) -> int:
        """Returns the tokens of so many steps."""
        return int(self.sum(lambda shape: shape.tokens, steps))

    def sum(self, amount: Callable[[Shape], float], steps: int) -> float:
        """Returns the sum of what each of so many steps takes, by its shape."""
        total = 0.0
        ends = [*self.pieces, steps][1:]
        for (start, shape), end in zip(self.pieces.items(), ends, strict=True):
            if start < steps:
                total += amount(shape) * (min(end, steps) - start)
        return total

    @property
    def last(self) -> Shape:
        """The shape of the last steps."""
        return self.pieces[max(self.pieces)]

    @property
    def largest(self) -> Shape:
        """The shape with the most tokens, the last of them if several have as many."""
        return max(reversed(self.pieces.values()), key=lambda shape: shape.tokens)
