"""The description of a Hugging Face model family: its options, its tensors, and their axes."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gpt2.config import GPTConfig, ModelConfig
from gpt2.config.options import OPTIONS

Json = dict[str, Any]  # the content of config.json

# Fields that affect how a model is initialised, trained or computed, but not its architecture.
FREE = {"attention", "init", "init_std", "zero_init_projections"}
FREE |= {
    name.removeprefix("model.") for name, option in OPTIONS.items() if option.is_random
}
# The options of `model.rope_scaling`, and their names in config.json in every family with rotary
# embeddings (rope).
SCALED_ROPE = {
    "rope_scaling": "rope_type",
    "rope_factor": "factor",
    "rope_context": "original_max_position_embeddings",
}

AnyConfig = TypeVar("AnyConfig", bound=ModelConfig)

# Suffixes of stored tensors that are not parameters: a mask, its fill value, and rope frequencies.
BUFFERS = (".attn.bias", ".attention.bias", ".masked_bias", ".rotary_emb.inv_freq")


def canonical(cfg: AnyConfig) -> AnyConfig:
    """Return `cfg` with all derived sizes set explicitly, such as `mlp_dim` in place of 0."""
    return dataclasses.replace(
        cfg,
        num_kv_heads=cfg.kv_heads,
        head_dim=cfg.head_size,
        mlp_dim=cfg.hidden_dim,
    )


class Tensor(NamedTuple):
    """A tensor in a file, and the parameter that it stores.

    Attributes:
        name: the name in the file. In `Family.rows`, the part after the name of the layer.
        path: the path of the parameter from the root. In `Family.rows`, the path from the layer.
        axes: one letter for each axis of the parameter, as in gpt2/model/gpt.py, and C for the axis
            of queries, keys and values. If the tensor is a part, these are the axes of the part.
        stored: the letters in Hugging Face's order. Letters without a space between them are one
            axis in the file. Empty: the same as `axes`.
        part: the index of the tensor along the second axis of the parameter; None: the tensor is
            the whole parameter.
        sizes: the size of each axis by its letter; empty in the tables of families.
    """

    name: str
    path: str
    axes: str
    stored: str = ""
    part: int | None = None
    sizes: Mapping[str, int] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        return tuple(
            math.prod(self.sizes[letter] for letter in axis)
            for axis in self.stored.split()
        )

    def to_stored(self, parameter: np.ndarray) -> np.ndarray:
        """Return what a file stores of a parameter, in float32.

        This is the whole parameter or, if `part` is not None, only this part of it.
        """
        array = np.asarray(parameter, np.float32)
        if self.part is not None:
            array = array[:, self.part]
        array = np.einsum(f"{self.axes}->{self.stored}", array)
        return np.ascontiguousarray(array).reshape(self.shape)

    def from_stored(self, tensor: np.ndarray) -> np.ndarray:
        """Return the float32 parameter, or its `part`, given the tensor in a file."""
        array = tensor.astype(np.float32, copy=False)
        whole = [self.sizes[axis] for axis in self.stored.replace(" ", "")]
        array = array.reshape(whole)
        array = np.einsum(f"{self.stored}->{self.axes}", array)
        return np.ascontiguousarray(array)


class Family(NamedTuple):
    """A family of models in Hugging Face's library.

    Attributes:
        title: the human-readable name of the family.
        model_type, architecture: the values in config.json that select the code in transformers.
        switches: options of `model.` and the values that they have in every model of the family.
            Options that are in neither `switches`, `options` nor FREE have their default values.
        options: fields of `GPTConfig` and their names in config.json.
        activations: names in config.json and the corresponding values of `model.activation`. If
            several names mean the same function, up to rounding, export writes the first.
        defaults: the default values of options that config.json may leave out.
        fixed: options in config.json that change the architecture, each with the only value that
            the options of `model.` can express.
        prefix: the prefix of all tensor names except the head's.
        layer: the name of a layer, after the prefix.
        first, rows, last: the tensors before the layers, in each layer, and after the layers; the
            head is not among them.
        dropout: the options in config.json that export sets to `model.dropout`.
        head: the name of the output embedding, if it is not tied to the input embedding.
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
        """Yield the tensors of a model with the architecture `cfg`, with full names and with sizes.

        Tensors that are parts of one parameter come one after another, in the order of `part`.
        """
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
        """Return a tensor's name with the family's prefix, given the tensor's name in a file.

        OpenAI's files leave out the prefix. The head's name has no prefix.
        """
        if name in (self.head, "lm_head.weight"):
            return self.head
        return self.prefix + name.removeprefix(self.prefix)

    def lacks(self, cfg: GPTConfig) -> list[str]:
        """Return the names of the fields of `cfg` whose values no model of the family has."""
        cfg = canonical(cfg)
        held = {*self.options, *FREE, "activation"}
        if "rope_base" in self.options:
            held.update(SCALED_ROPE)
        if self.switches.get("bias", True):
            held.add("bias")  # export writes zeros for a missing bias
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
