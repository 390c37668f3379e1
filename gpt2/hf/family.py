"""What a family of Hugging Face's models is: switches, names of options, tensors and their axes."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpt2.config import DEFAULTS, GPTConfig, ModelConfig

# Fields that say how a model starts or is computed, and not which function it is.
FREE = ("dropout", "attention", "init", "init_std", "zero_init_projections")
# Options of scaled rope, which every family with rope has, and their names in config.json.
SCALED_ROPE = dict(
    rope_scaling="rope_type",
    rope_factor="factor",
    rope_context="original_max_position_embeddings",
)

# Endings of stored names that hold no parameter: a mask, its fill value, and frequencies of rope.
BUFFERS = (".attn.bias", ".attention.bias", ".masked_bias", ".rotary_emb.inv_freq")

# The function that an activation of Hugging Face is. Those that differ by rounding count as one.
_FUNCTIONS = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
    **dict(gelu="gelu", relu="relu", relu2="relu_squared", silu="silu", swish="silu"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A tensor, and the parameter that it holds.

    Attributes:
        name: Hugging Face's; in a layer, what follows the layer's own name.
        path: of the parameter here, from the root or from its layer.
        axes: of the parameter, a letter each, as gpt2/model/gpt.py names them; K: heads of keys and
            values, C: queries, keys and values. A digit is an index: the tensor is that part.
        stored: the letters as Hugging Face orders them. Letters without a space between them are
            one axis there.
        when: the models that have the tensor, as `Family.tensors` names them.
    """

    name: str
    path: str
    axes: str
    stored: str
    when: str = "any"


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
        return next(
            ((i, int(x)) for i, x in enumerate(self.row.axes) if x.isdigit()), None
        )

    def to_stored(self, parameter: Any) -> np.ndarray:
        """Returns the tensor as the file holds it, float32, from the parameter."""
        part = tuple(int(x) if x.isdigit() else slice(None) for x in self.row.axes)
        ours, theirs = self._letters()
        array = np.asarray(parameter[part], np.float32).transpose(
            [ours.index(x) for x in theirs]
        )
        return np.ascontiguousarray(array).reshape(self.shape)

    def from_stored(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the parameter, or its `part`, float32, from the tensor of the file."""
        ours, theirs = self._letters()
        array = tensor.astype(np.float32, copy=False).reshape(
            [self.sizes[x] for x in theirs]
        )
        return np.ascontiguousarray(array.transpose([theirs.index(x) for x in ours]))

    def _letters(self) -> tuple[str, str]:
        """Returns the axes of the parameter, or its part, and those of the file."""
        return "".join(
            x for x in self.row.axes if x.isalpha()
        ), self.row.stored.replace(" ", "")


@dataclasses.dataclass(frozen=True)
class Family:
    """What Hugging Face calls a kind of model, and all that it contains: a table to fill in.

    Attributes:
        switches: values of `model.` in every model of the family. Those that are named neither here
            nor in `options` have their defaults.
        options: fields of `GPTConfig`, and their names in config.json.
        activations: of `model.activation`, and their names in config.json.
        defaults: what an option is where config.json lacks it.
        fixed: options of config.json that change the computed function, with the only value that
            the switches can express.
        prefix: of the names of all tensors but the head's.
        layer: the name of a layer, after the prefix.
        first, rows, last: tensors before the layers, of a layer, and after the layers.
        dropout: options that `model.dropout` becomes.
        head: the name of the output embedding.
    """

    title: str
    model_type: str
    architecture: str
    switches: Mapping[str, Any]
    options: Mapping[str, str]
    activations: Mapping[str, str]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    prefix: str
    layer: str
    first: tuple[Row, ...]
    rows: tuple[Row, ...]
    last: tuple[Row, ...]
    dropout: tuple[str, ...] = ()
    head: str = "lm_head.weight"

    def tensors(self, cfg: GPTConfig) -> Iterator[Tensor]:
        """Yields every tensor of a model. Parts of a parameter are in order."""
        sizes = dict(
            V=cfg.vocab_size, T=cfg.context_length, D=cfg.embed_dim, F=cfg.hidden_dim
        )
        sizes |= dict(N=cfg.num_heads, K=cfg.kv_heads, H=cfg.head_size, C=3)
        is_grouped = cfg.kv_heads < cfg.num_heads
        kinds = {"any": True, "untied": not cfg.tie_embeddings}
        kinds |= {"grouped": is_grouped, "multi-head": not is_grouped}
        layers = (
            (self.prefix + self.layer.format(i), f"h_{i}/")
            for i in range(cfg.num_layers)
        )
        places = itertools.chain(
            (("", "", row) for row in self.first),
            ((*layer, row) for layer in layers for row in self.rows),
            (("", "", row) for row in self.last),
        )
        for name, path, row in places:
            if kinds[row.when]:
                yield Tensor(
                    name + row.name, tuple((path + row.path).split("/")), row, sizes
                )

    def full_name(self, name: str) -> str:
        """Returns the name of a stored tensor as this table has it: OpenAI's lack the prefix."""
        if name in (self.head, "lm_head.weight"):
            return self.head
        return name if name.startswith(self.prefix) else self.prefix + name

    def activation_names(self) -> dict[str, str]:
        """Returns the names that config.json may give an activation, and those of `model.`."""
        ours = {_FUNCTIONS[theirs]: ours for ours, theirs in self.activations.items()}
        return {name: ours[kind] for name, kind in _FUNCTIONS.items() if kind in ours}

    def lacks(self, cfg: GPTConfig) -> list[str]:
        """Returns the fields of `cfg` for whose value the family has no option."""
        cfg = cfg.canonical()
        held = {*self.options, *FREE, "mlp_ratio", "activation"}
        held |= {*SCALED_ROPE} if "rope_base" in self.options else set()
        if self.switches.get("bias", True):
            held.add("bias")  # a missing one is written as zeros
        expected = DEFAULTS.model.to_dict() | dict(self.switches)
        names = {field.name for field in dataclasses.fields(ModelConfig)} - held
        lacking = sorted(name for name in names if getattr(cfg, name) != expected[name])
        return lacking + ["activation"] * (cfg.activation not in self.activations)
