"""config.json of a Hugging Face directory, read and written."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from gpt2.config import GPTConfig
from gpt2.errors import UserError
from gpt2.hf.families import FAMILIES, TITLES, family_for
from gpt2.hf.family import SCALED_ROPE, Family

# By the rope_type of Hugging Face, the numbers that `model.rope_scaling` has fixed.
_ROPE_TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_slow": 1.0, "beta_fast": 32.0, "truncate": True},
}
_FLOATS = {field.name for field in dataclasses.fields(GPTConfig) if field.type is float}


def read_config(directory: Path) -> GPTConfig:
    """Reads the architecture from a Hugging Face config.json.

    Dropout is 0: it is a choice of training, not a part of the weights.
    """
    path = Path(directory) / "config.json"
    families = {family.model_type: family for family in FAMILIES}
    try:
        config = json.loads(path.read_text("utf-8"))
        kind = config.get("model_type")
        if kind not in families:
            raise UserError(f"{path}: its model_type, {kind}, is none of {TITLES}")
        family = families[kind]
        config = dict(family.defaults) | _with_flat_rope(config, family)
        _refuse_others(path, family, config)
        scaled = SCALED_ROPE if config.get("rope_type", "default") != "default" else {}
        values = {
            ours: config[theirs]
            for ours, theirs in {**family.options, **scaled}.items()
        }
        values["activation"] = family.activation_names()[values["activation"]]
        values = {name: value for name, value in values.items() if value is not None}
        values = {
            name: float(v) if name in _FLOATS else v for name, v in values.items()
        }
        return GPTConfig(**values, **family.switches).canonical()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        how = "Give the directory of a Hugging Face model"
        raise UserError(f"{path} cannot be read ({error!r})", how) from None


def _with_flat_rope(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Returns options without nesting: transformers 5 keeps those of rope in a dictionary."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    names = {
        "rope_theta": family.options.get("rope_base", "rope_theta"),
        "partial_rotary_factor": family.options.get(
            "rope_share", "partial_rotary_factor"
        ),
        "type": "rope_type",
    }
    flat = {names.get(name, name): v for name, v in nested.items() if v is not None}
    return {
        SCALED_ROPE["rope_context"]: config.get("max_position_embeddings"),
        **config,
        **flat,
    }


def _refuse_others(path: Path, family: Family, config: dict[str, Any]) -> None:
    """Refuses what the family computes in Hugging Face's code and not here."""
    rope = {
        "partial_rotary_factor": 1.0,
        "attention_factor": None,
        "mscale_all_dim": None,
    }
    fixed = {**family.fixed, **rope, **_ROPE_TYPES.get(config.get("rope_type", ""), {})}
    required: dict[str, tuple] = {name: (value,) for name, value in fixed.items()}
    required[family.options["activation"]] = tuple(family.activation_names())
    required["rope_type"] = tuple(_ROPE_TYPES)
    if layer_types := config.get("layer_types"):
        required["layer_types"] = (["full_attention"] * len(layer_types),)
    for name, values in required.items():
        found = config.get(name, values[0])
        what = f"{path}: {name}={found} is not what {family.title} computes here"
        if found not in values:
            raise UserError(what, f"It can be {' or '.join(map(str, values))}")


def to_hf_config(cfg: GPTConfig) -> dict[str, Any]:
    """Returns config.json for the architecture `cfg`: the reverse of `read_config`.

    The options of rope have the names that every version of transformers reads.
    """
    family = family_for(cfg)
    values = {
        **{ours: getattr(cfg, ours) for ours in family.options},
        "mlp_dim": cfg.hidden_dim,
        "num_kv_heads": cfg.kv_heads,
        "head_dim": cfg.head_size,
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
    if cfg.rope_scaling != "none":
        scaled = {theirs: getattr(cfg, ours) for ours, theirs in SCALED_ROPE.items()}
        config["rope_scaling"] = scaled | _ROPE_TYPES[cfg.rope_scaling]
    return config
