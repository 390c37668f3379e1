"""config.json of a Hugging Face directory, read and written."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from gpt2.config import GPTConfig
from gpt2.errors import MALFORMED, UserError
from gpt2.hf.families import FAMILIES, family_for, titles
from gpt2.hf.family import Family

_TYPES: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(GPTConfig)}


def read_config(directory: Path) -> GPTConfig:
    """Reads the architecture from a Hugging Face config.json.

    Dropout is 0: it is a choice of training, not a part of the weights.

    Raises:
        UserError: the file is missing or damaged, describes a model of another family, or has
            options that the switches of `model.` cannot express.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise UserError(
            f"{directory} holds no model (no config.json)",
            "Give a directory that transformers' save_pretrained wrote",
        )
    kind = "Hugging Face"
    try:
        config = json.loads(path.read_text("utf-8"))
        if isinstance(config.get("model"), dict):
            raise UserError(
                f"{directory} is a run, not a Hugging Face model",
                "Give it as --workdir to eval.py or gpt2.generate, or to gpt2.hf export, which "
                "writes it for Hugging Face",
            )
        families = {family.model_type: family for family in FAMILIES}
        if config["model_type"] not in families:
            raise UserError(
                f"{path} describes a {config['model_type']} model",
                f"Give a directory of a {titles()}",
            )
        family = families[config["model_type"]]
        kind = family.title
        return _read(path, family, dict(family.defaults) | _with_flat_rope(config, family))
    except MALFORMED as error:
        raise UserError(f"{path} is not a {kind} config: {error!r}", "Download it again") from None


def _with_flat_rope(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Returns options without nesting: transformers 5 keeps those of rope in a dictionary."""
    if "rope_base" not in family.options:
        return config
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    names = {
        "rope_theta": family.options["rope_base"],
        "partial_rotary_factor": family.rope_fraction,
        "type": "rope_type",
    }
    return config | {names.get(name, name): value for name, value in nested.items()}


def _read(path: Path, family: Family, config: dict[str, Any]) -> GPTConfig:
    for name, value in _required(family, config).items():
        if (found := config.get(name, value)) != value:
            raise UserError(
                f"{path}: {name}={found} is not what {family.title} computes here ({value})",
                f"Give weights that were trained with {name}={value}",
            )
    values = {ours: config[theirs] for ours, theirs in family.options.items()}
    values["mlp_dim"] = values["mlp_dim"] or 4 * values["embed_dim"]
    values["num_kv_heads"] = values.get("num_kv_heads") or 0
    names = family.activation_names()
    if values["activation"] not in names:
        raise UserError(
            f"{path}: {family.options['activation']}={values['activation']} is unknown here",
            f"Give a model with one of {', '.join(names)}",
        )
    values["activation"] = names[values["activation"]]
    values = {ours: _typed(value, ours, family) for ours, value in values.items()}
    try:
        return GPTConfig(**values, **family.switches).canonical()
    except UserError as error:  # whose advice is for the options of a run
        raise UserError(f"{path} describes no model: {error.what}", "Download it again") from None


def _typed(value: Any, ours: str, family: Family) -> Any:
    """Returns the value of an option if it has the option's type. A whole number is a float too."""
    kind = _TYPES[ours]
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        name = family.options.get(ours, ours)
        raise TypeError(f"{name}={value!r} is not of type {kind.__name__}")
    return value


def _required(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """Returns options that must have one value where config.json gives them."""
    required = dict(family.fixed)
    if "rope_base" in family.options:
        required |= {"rope_type": "default", family.rope_fraction: 1.0}
    if config.get("head_dim") is not None:
        heads = config[family.options["num_heads"]]
        required["head_dim"] = config[family.options["embed_dim"]] // heads
    if layer_types := config.get("layer_types"):
        required["layer_types"] = ["full_attention"] * len(layer_types)
    return required


def to_hf_config(cfg: GPTConfig) -> dict[str, Any]:
    """Returns config.json for the architecture `cfg`: the reverse of `read_config`.

    The options of rope have the names that every version of transformers reads.

    Raises:
        UserError: `cfg` is of no family.
    """
    family = family_for(cfg)
    values = {
        **{ours: getattr(cfg, ours) for ours in family.options},
        "mlp_dim": cfg.hidden_dim,
        "num_kv_heads": cfg.kv_heads,
        "activation": family.activations[cfg.activation],
    }
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{theirs: values[ours] for ours, theirs in family.options.items()},
        **dict.fromkeys(family.dropout, cfg.dropout),
        "dtype": "float32",
        **family.fixed,
    }
    if "head_dim" in family.defaults:
        config["head_dim"] = cfg.head_size
    return config
