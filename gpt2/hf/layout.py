"""Where each tensor of a Hugging Face file lies among the parameters, and the order of its axes."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpt2.config import GPTConfig
from gpt2.hf.families import family_for
from gpt2.hf.family import Row


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a model of known size: its row of the family's table, and the letters' sizes."""

    name: str
    path: tuple[str, ...]
    row: Row
    sizes: Mapping[str, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the file."""
        words = self.row.stored.split()
        return tuple(math.prod(self.sizes[letter] for letter in word) for word in words)

    @property
    def part(self) -> tuple[int, int] | None:
        """Which axis of the parameter the tensor is a part of, and which part."""
        return next(((i, int(x)) for i, x in enumerate(self.row.axes) if x.isdigit()), None)

    def to_stored(self, parameter: Any) -> np.ndarray:
        """Returns the tensor as the file holds it, float32, from the parameter."""
        part = tuple(int(x) if x.isdigit() else slice(None) for x in self.row.axes)
        ours, theirs = self._letters()
        array = np.asarray(parameter[part], np.float32).transpose([ours.index(x) for x in theirs])
        return np.ascontiguousarray(array).reshape(self.shape)

    def from_stored(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the parameter, or its `part`, float32, from the tensor of the file."""
        ours, theirs = self._letters()
        array = tensor.astype(np.float32, copy=False).reshape([self.sizes[x] for x in theirs])
        return np.ascontiguousarray(array.transpose([theirs.index(x) for x in ours]))

    def _letters(self) -> tuple[str, str]:
        """Returns the axes of the parameter, or its part, and those of the file."""
        return "".join(x for x in self.row.axes if x.isalpha()), self.row.stored.replace(" ", "")


def tensors(cfg: GPTConfig) -> Iterator[Tensor]:
    """Yields every tensor of a model. Parts of a parameter are in order."""
    family = family_for(cfg)
    sizes = dict(V=cfg.vocab_size, T=cfg.context_length, D=cfg.embed_dim, F=cfg.hidden_dim)
    sizes |= dict(N=cfg.num_heads, K=cfg.kv_heads, H=cfg.head_size, C=3)
    layers = [(family.prefix + family.layer.format(i), f"h_{i}/") for i in range(cfg.num_layers)]
    places = [("", "", row) for row in family.first]
    places += [(*layer, row) for layer in layers for row in family.rows]
    places += [("", "", row) for row in family.last]
    for name, path, row in places:
        if row.when(cfg):
            yield Tensor(name + row.name, tuple((path + row.path).split("/")), row, sizes)
