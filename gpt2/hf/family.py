"""What a family of Hugging Face's models is: switches, names of options, tensors."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from gpt2.config import DEFAULTS, GPTConfig, ModelConfig

# Fields that say how a model starts or is computed, and not which function it is.
_NOT_EXPORTED = ("dropout", "attention", "init", "init_std", "zero_init_projections")

# The function that an activation of Hugging Face is. Those that differ by rounding count as one.
_FUNCTIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
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
        when: whether a model has the tensor.
    """

    name: str
    path: str
    axes: str
    stored: str
    when: Callable[[GPTConfig], bool] = lambda cfg: True


@dataclasses.dataclass(frozen=True)
class Family:
    """What Hugging Face calls a kind of model, and all that it contains.

    Attributes:
        title: for people.
        model_type, architecture: in config.json.
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
        rope_fraction: the option for the part of a head that rope turns.
        head, head_aliases: the name of the output embedding, and those in other versions.
        buffers: endings of names that hold no parameter.
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
    rope_fraction: str = "partial_rotary_factor"
    head: str = "lm_head.weight"
    head_aliases: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()

    def full_name(self, name: str) -> str:
        """Returns the name of a stored tensor as this table has it: OpenAI's lack the prefix."""
        if name in (self.head, *self.head_aliases):
            return self.head
        return name if name.startswith(self.prefix) else self.prefix + name

    def activation_names(self) -> dict[str, str]:
        """Returns the names that config.json may give an activation, and those of `model.`."""
        ours = {_FUNCTIONS[theirs]: ours for ours, theirs in self.activations.items()}
        return {name: ours[kind] for name, kind in _FUNCTIONS.items() if kind in ours}

    def lacks(self, cfg: GPTConfig) -> list[str]:
        """Returns the fields of `cfg` for whose value the family has no option."""
        cfg = cfg.canonical()
        held = {*self.options, *_NOT_EXPORTED, "mlp_ratio", "activation"}
        if self.switches.get("bias", True):
            held.add("bias")  # a missing one is written as zeros
        expected = DEFAULTS.model.to_dict() | dict(self.switches)
        names = {field.name for field in dataclasses.fields(ModelConfig)} - held
        lacking = sorted(name for name in names if getattr(cfg, name) != expected[name])
        return lacking + ["activation"] * (cfg.activation not in self.activations)
