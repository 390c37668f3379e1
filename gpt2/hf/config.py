"""Read and write the config.json of a Hugging Face directory."""

import json
from pathlib import Path

from gpt2.config import GPTConfig
from gpt2.errors import UserError, require_choice
from gpt2.hf.families import FAMILIES, family_for
from gpt2.hf.family import SCALED_ROPE, Family, Json, canonical
from gpt2.utils.files import reading

# rope_type in config.json -> the parameters of rotary embeddings that are not options of `model.`,
# each with the only value that `model.rope_scaling` implements.
_ROPE_TYPES: dict[str, Json] = {
    "default": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_slow": 1.0, "beta_fast": 32.0, "truncate": True},
}


def read_config(directory: Path) -> GPTConfig:
    """Return the architecture that the config.json in a directory describes.

    Dropout is 0 in the result, whatever config.json says, because it is an option of training and
    not a property of the weights.
    """
    path = Path(directory) / "config.json"
    families = {family.model_type: family for family in FAMILIES}
    with reading(path, "Give the directory of a Hugging Face model"):
        config = dict(json.loads(path.read_text("utf-8")))
        kind = str(config.get("model_type"))
        require_choice(f"{path}: model_type", kind, tuple(families))
        family = families[kind]
        config = dict(family.defaults) | _with_flat_rope(config, family)
        _refuse_others(path, family, config)
        options = _options(family, config)
        return canonical(GPTConfig(**options, **family.switches))


def _with_flat_rope(config: Json, family: Family) -> Json:
    """Return the content of config.json with the options of rotary embeddings at the top level.

    Version 5 of the library transformers stores these options in a nested dictionary, with the same
    names for all families. The result has the names that `family` uses.
    """
    names = {
        "rope_theta": family.options.get("rope_base"),
        "partial_rotary_factor": family.options.get("rope_share"),
        "type": "rope_type",
    }
    flat = {SCALED_ROPE["rope_context"]: config.get("max_position_embeddings")}
    flat |= config
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for name, value in dict(nested).items():
        if value is not None:
            flat[names.get(name) or name] = value
    return flat


def _refuse_others(path: Path, family: Family, config: Json) -> None:
    """Raise a UserError if an option in config.json has a value that this code does not support.

    Hugging Face's code may support the value, so ignoring it would lead to other results.
    """
    fixed = {
        "partial_rotary_factor": 1.0,
        "attention_factor": None,
        "mscale_all_dim": None,
        **family.fixed,
        **_ROPE_TYPES.get(config.get("rope_type", "default"), {}),
    }
    allowed: dict[str, list] = {name: [value] for name, value in fixed.items()}
    allowed[family.options["activation"]] = [*family.activations]
    allowed["rope_type"] = [*_ROPE_TYPES]
    layer_types = config.get("layer_types")
    if layer_types:
        allowed["layer_types"] = [["full_attention"] * len(layer_types)]
    for name, values in allowed.items():
        value = config.get(name, values[0])
        if value not in values:
            raise UserError(
                f"{path} has {name}={value}, but for {family.title} only "
                f"{' or '.join(map(str, values))} is supported",
                "Use a model with a supported value",
            )


def _options(family: Family, config: Json) -> Json:
    """Return the options of `model.` and their values, converted from those in config.json."""
    names = dict(family.options)
    if config.get("rope_type", "default") != "default":
        names |= SCALED_ROPE
    options = {}
    for ours, theirs in names.items():
        if config[theirs] is not None:  # None: the size is derived from other sizes
            options[ours] = config[theirs]
    options["activation"] = family.activations[options["activation"]]
    return options


def to_hf_config(cfg: GPTConfig) -> Json:
    """Return the content of config.json for an architecture, the inverse of `read_config`.

    The options of rotary embeddings have names that every version of transformers can read.
    """
    family = family_for(cfg)
    sizes = canonical(cfg)
    values = {ours: getattr(sizes, ours) for ours in family.options}
    names = [
        name for name, ours in family.activations.items() if ours == cfg.activation
    ]
    values["activation"] = names[0]
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
