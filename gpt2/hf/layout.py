"""Where each tensor of a Hugging Face file lies among the parameters, and the order of its axes."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpt2.config import GPTConfig
from gpt2.hf.families import family_for
from gpt2.hf.family import Row


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a model of known size.

    Attributes:
        name: Hugging Face's.
        path: of the parameter here, in unrolled layers.
        axes, stored: as `gpt2.hf.family.Row` has them.
        sizes: of the letters.
    """

    name: str
    path: tuple[str, ...]
    axes: str
    stored: str
    sizes: Mapping[str, int]

    @property
    def part(self) -> int | None:
        """Which part of the parameter the tensor is; None: all of it."""
        digits = re.findall(r"\d", self.axes)
        return int(digits[0]) if digits else None

    @property
    def part_axis(self) -> int:
        """The axis of the parameter that `part` indexes."""
        return next(i for i, letter in enumerate(self.axes) if letter.isdigit())

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the file."""
        return tuple(math.prod(map(self.sizes.__getitem__, word)) for word in self.stored.split())

    def to_stored(self, parameter: Any) -> np.ndarray:
        """Returns the tensor as the file holds it, float32, from the parameter."""
        if self.part is not None:
            parameter = parameter[(slice(None),) * self.part_axis + (self.part,)]
        array = np.asarray(parameter, np.float32)
        return array.transpose([self._kept.index(x) for x in self._flat]).reshape(self.shape)

    def from_stored(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the parameter, or its `part`, float32, from the tensor of the file."""
        array = tensor.astype(np.float32, copy=False)
        array = array.reshape([self.sizes[letter] for letter in self._flat])
        return array.transpose([self._flat.index(letter) for letter in self._kept])

    @property
    def _kept(self) -> str:
        return re.sub(r"\d", "", self.axes)

    @property
    def _flat(self) -> str:
        return self.stored.replace(" ", "")


def tensors(cfg: GPTConfig) -> Iterator[Tensor]:
    """Yields every tensor of the family that `cfg` belongs to. Parts of a parameter are in order.

    Raises:
        UserError: `cfg` is of no family.
    """
    family = family_for(cfg)
    sizes = {
        "V": cfg.vocab_size,
        "T": cfg.context_length,
        "D": cfg.embed_dim,
        "F": cfg.hidden_dim,
        "N": cfg.num_heads,
        "K": cfg.kv_heads,
        "H": cfg.head_size,
        "C": 3,
    }

    def place(row: Row, before: str = "", layer: tuple[str, ...] = ()) -> Tensor:
        path = (*layer, *row.path.split("/"))
        return Tensor(before + row.name, path, row.axes, row.stored, sizes)

    yield from (place(row) for row in family.first if row.when(cfg))
    for i in range(cfg.num_layers):
        before = family.prefix + family.layer.format(i)
        yield from (place(row, before, (f"h_{i}",)) for row in family.rows if row.when(cfg))
    yield from (place(row) for row in family.last if row.when(cfg))
