"""Hugging Face's names for the options and the tensors of a GPT-2."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2.config import GPTConfig
from gpt2.errors import UserError

# Hugging Face's names of the activations that it has.
_ACTIVATIONS = {
    "gelu_tanh": "gelu_new",
    "gelu": "gelu",
    "relu": "relu",
    "relu_squared": "relu2",
    "silu": "silu",
}
_ACTIVATIONS_IN = {name: ours for ours, name in _ACTIVATIONS.items()} | {
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}

# Options of a Hugging Face config that change the computed function. Each has GPT-2's own value,
# which is the default there and the only one accepted here.
_FIXED = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def read_config(directory: Path) -> GPTConfig:
    """Reads the architecture from a Hugging Face config.json.

    Raises:
        UserError: the file is missing or damaged, describes another kind of model, or has options
            with which another function than GPT-2 is computed.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise UserError(
            f"{directory} holds no model (no config.json)",
            "Give a directory that transformers' save_pretrained wrote",
        )
    try:
        config = json.loads(path.read_text())
        if isinstance(config.get("model"), dict):
            raise UserError(f"{directory} is a run, not a Hugging Face model", "Use --workdir")
        if config["model_type"] != "gpt2":
            raise UserError(
                f"{path} describes a {config['model_type']} model", "Give a GPT-2 directory"
            )
        for name, value in _FIXED.items():
            if config.get(name, value) != value:
                raise UserError(
                    f"{path}: {name}={config[name]} is not what GPT-2 computes ({value})",
                    "Give weights that were trained with OpenAI's architecture",
                )
        activation = config.get("activation_function", "gelu_new")
        if activation not in _ACTIVATIONS_IN:
            raise UserError(
                f"{path}: activation_function={activation} is unknown here",
                f"Give a model with one of {', '.join(_ACTIVATIONS_IN)}",
            )
        embed_dim, mlp_dim = config["n_embd"], config.get("n_inner") or 4 * config["n_embd"]
        if mlp_dim % embed_dim:
            raise UserError(
                f"{path}: n_inner={mlp_dim} is not a multiple of n_embd={embed_dim}",
                "Give weights of a model whose MLP is a whole number of times as wide",
            )
        return GPTConfig(
            vocab_size=config["vocab_size"],
            context_length=config["n_positions"],
            num_layers=config["n_layer"],
            num_heads=config["n_head"],
            embed_dim=embed_dim,
            mlp_ratio=mlp_dim // embed_dim,
            tie_embeddings=config.get("tie_word_embeddings", True),
            activation=_ACTIVATIONS_IN[activation],
        )
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a GPT-2 config: {error!r}", "Download it again") from None


def to_hf_config(cfg: GPTConfig) -> dict[str, Any]:
    """Returns config.json for the architecture `cfg`: the reverse of `read_config`.

    Raises:
        UserError: Hugging Face's GPT-2 has no option for one of `cfg`.
    """
    unsupported = {
        "norm": cfg.norm != "layernorm",
        "position": cfg.position != "learned",
        "qk_norm": cfg.qk_norm,
        "logit_softcap": cfg.logit_softcap != 0.0,
        "activation": cfg.activation not in _ACTIVATIONS,
    }
    lacking = [name for name, is_lacking in unsupported.items() if is_lacking]
    if options := [f"model.{name}={getattr(cfg, name)}" for name in lacking]:
        raise UserError(
            f"Hugging Face's GPT-2 has no option for {', '.join(options)}",
            "Export a model trained without it",
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": cfg.vocab_size,
        "n_positions": cfg.context_length,
        "n_layer": cfg.num_layers,
        "n_head": cfg.num_heads,
        "n_embd": cfg.embed_dim,
        "n_inner": cfg.mlp_dim,
        "activation_function": _ACTIVATIONS[cfg.activation],
        "embd_pdrop": cfg.dropout,
        "attn_pdrop": cfg.dropout,
        "resid_pdrop": cfg.dropout,
        "tie_word_embeddings": cfg.tie_embeddings,
        "dtype": "float32",
        **_FIXED,
    }


def tensors(cfg: GPTConfig) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """Yields for each parameter: Hugging Face's name, the path here (unrolled), the shape here."""
    V, T, D, F = cfg.vocab_size, cfg.context_length, cfg.embed_dim, cfg.mlp_dim
    N, H = cfg.num_heads, cfg.head_size
    yield "wte.weight", ("wte", "embedding"), (V, D)
    yield "wpe.weight", ("wpe", "embedding"), (T, D)
    linear = {
        "attn.c_attn": ((D,), (3, N, H)),
        "attn.c_proj": ((N, H), (D,)),
        "mlp.c_fc": ((D,), (F,)),
        "mlp.c_proj": ((F,), (D,)),
    }
    for i in range(cfg.num_layers):
        for name in ("ln_1", "ln_2"):
            yield f"h.{i}.{name}.weight", (f"h_{i}", name, "scale"), (D,)
            yield f"h.{i}.{name}.bias", (f"h_{i}", name, "bias"), (D,)
        for name, (ins, outs) in linear.items():
            yield f"h.{i}.{name}.weight", (f"h_{i}", *name.split("."), "kernel"), ins + outs
            yield f"h.{i}.{name}.bias", (f"h_{i}", *name.split("."), "bias"), outs
    yield "ln_f.weight", ("ln_f", "scale"), (D,)
    yield "ln_f.bias", ("ln_f", "bias"), (D,)
    if not cfg.tie_embeddings:
        yield "lm_head.weight", ("lm_head", "embedding"), (V, D)


def hf_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a tensor's shape at Hugging Face, from Hugging Face's name and the shape here.

    Conv1D joins the axes of heads: [D, 3, N, H] becomes [D, 3 D], and [N, H, D] becomes [D, D].
    """
    if name.endswith("attn.c_proj.weight"):
        return (math.prod(shape[:-1]), shape[-1])
    if name.endswith("weight"):
        return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else shape
    return (math.prod(shape),)
