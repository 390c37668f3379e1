"""What a family of Hugging Face's models is: switches, names of options, tensors and their axes."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from gpt2.config import GPTConfig, ModelConfig

Json = dict[str, Any]  # of config.json

# Fields that say how a model starts or is computed, and not which function it is.
FREE = ("dropout", "attention", "init", "init_std", "zero_init_projections")
# Options of scaled rope, which every family with rope has, and their names in config.json.
SCALED_ROPE = {
    "rope_scaling": "rope_type",
    "rope_factor": "factor",
    "rope_context": "original_max_position_embeddings",
}

# Endings of stored names that hold no parameter: a mask, its fill value, and frequencies of rope.
BUFFERS = (".attn.bias", ".attention.bias", ".masked_bias", ".rotary_emb.inv_freq")


def canonical(cfg: GPTConfig) -> GPTConfig:
    """Returns the same architecture with all of its sizes written out."""
    return dataclasses.replace(
        cfg,
        num_kv_heads=cfg.kv_heads,
        head_dim=cfg.head_size,
        mlp_dim=cfg.hidden_dim,
    )


class Tensor(NamedTuple):
    """A tensor of a file, and the parameter that it holds. Families name those of a layer.

    Attributes:
        name: Hugging Face's; in a family, what follows the layer's own name.
        path: of the parameter here, from the root or from its layer.
        axes: of the parameter, a letter each, as gpt2/model/gpt.py names them; K: heads of keys and
            values, C: queries, keys and values. Of its `part`, if the tensor is one.
        stored: the letters as Hugging Face orders them. Letters without a space between them are
            one axis there. Empty in a family: `axes`.
        part: the tensor's index in the parameter's second axis; None: it is the whole parameter.
        sizes: of the letters, for a model of known size.
    """

    name: str
    path: str
    axes: str
    stored: str = ""
    part: int | None = None
    sizes: Mapping[str, int] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the file."""
        return tuple(
            math.prod(self.sizes[letter] for letter in axis)
            for axis in self.stored.split()
        )

    def to_stored(self, parameter: np.ndarray) -> np.ndarray:
        """Returns the tensor as the file holds it, float32, from the parameter."""
        array = np.asarray(parameter, np.float32)
        if self.part is not None:
            array = array[:, self.part]
        array = np.einsum(f"{self.axes}->{self.stored}", array)
        return np.ascontiguousarray(array).reshape(self.shape)

    def from_stored(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the parameter, or its `part`, float32, from the tensor of the file."""
        array = tensor.astype(np.float32, copy=False)
        whole = [self.sizes[axis] for axis in self.stored.replace(" ", "")]
        array = array.reshape(whole)
        array = np.einsum(f"{self.stored}->{self.axes}", array)
        return np.ascontiguousarray(array)


class Family(NamedTuple):
    """What Hugging Face calls a kind of model, and all that it contains: a table to fill in.

    Attributes:
        switches: values of `model.` in every model of the family. Those that are named neither here
            nor in `options` have their defaults.
        options: fields of `GPTConfig`, and their names in config.json.
        activations: names in config.json, and those of `model.activation`. Of several names for one
            function, or for some that differ by rounding, export writes the first.
        defaults: what an option is where config.json lacks it.
        fixed: options of config.json that change the computed function, with the only value that
            the switches can express.
        prefix: of the names of all tensors but the head's.
        layer: the name of a layer, after the prefix.
        first, rows, last: tensors before the layers, of a layer, and after the layers but the head.
        dropout: options that `model.dropout` becomes.
        head: the name of the output embedding, which a model has that ties it to no other.
    """

    title: str
    model_type: str
    architecture: str
    switches: Json
    options: Mapping[str, str]
    activations: Mapping[str, str]
    defaults: Json
    fixed: Json
    prefix: str
    layer: str
    first: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]
    last: tuple[Tensor, ...]
    dropout: tuple[str, ...] = ()
    head: str = "lm_head.weight"

    def tensors(self, cfg: GPTConfig) -> Iterator[Tensor]:
        """Yields every tensor of a model. Parts of a parameter are in order."""
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
        absent: tuple[str, ...] = ("attn/c_q/", "attn/c_kv/")
        if cfg.kv_heads < cfg.num_heads:
            absent = ("attn/c_attn/",)
        rows = [*self.first]
        for i in range(cfg.num_layers):
            start = self.prefix + self.layer.format(i)
            for row in self.rows:
                if not row.path.startswith(absent):
                    path = f"h_{i}/{row.path}"
                    rows.append(row._replace(name=start + row.name, path=path))
        rows += self.last
        if not cfg.tie_embeddings:
            rows.append(Tensor(self.head, "lm_head/embedding", "VD", "V D"))
        for row in rows:
            yield row._replace(stored=row.stored or row.axes, sizes=sizes)

    def full_name(self, name: str) -> str:
        """Returns the name of a stored tensor as this table has it: OpenAI's lack the prefix."""
        if name in (self.head, "lm_head.weight"):
            return self.head
        return self.prefix + name.removeprefix(self.prefix)

    def lacks(self, cfg: GPTConfig) -> list[str]:
        """Returns the fields of `cfg` for whose value the family has no option."""
        cfg = canonical(cfg)
        held = {*self.options, *FREE, "activation"}
        if "rope_base" in self.options:
            held.update(SCALED_ROPE)
        if self.switches.get("bias", True):
            held.add("bias")  # a missing one is written as zeros
        expected = dataclasses.asdict(ModelConfig()) | self.switches
        expected["num_kv_heads"] = cfg.num_heads
        expected["head_dim"] = cfg.embed_dim / cfg.num_heads
        lacking = sorted(
            name
            for name, value in expected.items()
            if name not in held and getattr(cfg, name) != value
        )
        if cfg.activation not in self.activations.values():
            lacking.append("activation")
        return lacking
