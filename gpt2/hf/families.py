"""The model families of Hugging Face that the switches of `model.` cover, a table for each.

A family is a set of switches, Hugging Face's names of the options that it leaves free, and a list
of tensors. Names are those in transformers' configuration_*.py and modeling_*.py. A new family is a
new table.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from gpt2.config import DEFAULTS, GPTConfig, ModelConfig
from gpt2.errors import UserError


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
        model_type: in config.json.
        architecture: transformers' class.
        switches: values of `model.` in every model of the family. Those that are named neither here
            nor in `options` have their defaults.
        options: fields of `GPTConfig`, and their names in config.json.
        activations: of `model.activation`, and their names in config.json.
        defaults: what an option is where config.json leaves it out.
        fixed: options of config.json that change the computed function, with the only value that
            the switches can express.
        dropout: options that `model.dropout` becomes.
        rope_fraction: the option for the part of a head that rope turns.
        prefix: of the names of all tensors but the head's.
        head: the name of the output embedding.
        head_aliases: the names of it in other versions of transformers.
        layer: the name of a layer, after the prefix.
        first: tensors before the layers.
        rows: tensors of a layer.
        last: tensors after the layers.
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
        """Returns the name of a stored tensor as this table has it.

        Files of a model without its head leave the prefix out, as OpenAI's do.
        """
        if name == self.head or name in self.head_aliases:
            return self.head
        return name if name.startswith(self.prefix) else self.prefix + name

    def activation_names(self) -> dict[str, str]:
        """Returns the names that config.json may give an activation, and those of `model.`."""
        return {
            name: ours
            for name, function in _FUNCTIONS.items()
            for ours, written in self.activations.items()
            if _FUNCTIONS[written] == function
        }

    def lacks(self, cfg: GPTConfig) -> list[str]:
        """Returns the fields of `cfg` for whose value the family has no option."""
        cfg = canonical(cfg)
        held = {*self.options, *_NOT_EXPORTED, "mlp_ratio", "activation"}
        if self.switches.get("bias", True):
            held.add("bias")  # a missing one is written as zeros
        lacking = [
            field.name
            for field in dataclasses.fields(ModelConfig)
            if field.name not in held
            and getattr(cfg, field.name)
            != self.switches.get(field.name, DEFAULTS.model[field.name])
        ]
        return lacking + ["activation"] * (cfg.activation not in self.activations)


# Fields that say how a model starts or is computed, and not which function it is.
_NOT_EXPORTED = ("dropout", "attention", "init", "init_std", "zero_init_projections")

# The function that an activation of Hugging Face is. Forms that differ by rounding count as one.
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
_ACTIVATIONS = {
    "gelu_tanh": "gelu_new",
    "gelu": "gelu",
    "relu": "relu",
    "relu_squared": "relu2",
    "silu": "silu",
}
_GATES = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}


def _is_untied(cfg: GPTConfig) -> bool:
    return not cfg.tie_embeddings


def _is_multi_head(cfg: GPTConfig) -> bool:
    return cfg.kv_heads == cfg.num_heads


def _is_grouped(cfg: GPTConfig) -> bool:
    return cfg.kv_heads < cfg.num_heads


# OpenAI's Conv1D stores a weight as [in, out], as kernels are here.
GPT2 = Family(
    title="GPT-2",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    switches={},
    options={
        "vocab_size": "vocab_size",
        "context_length": "n_positions",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "embed_dim": "n_embd",
        "mlp_dim": "n_inner",
        "norm_eps": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
        "activation": "activation_function",
    },
    activations=_ACTIVATIONS,
    defaults={
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "activation_function": "gelu_new",
    },
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    dropout=("embd_pdrop", "attn_pdrop", "resid_pdrop"),
    prefix="transformer.",
    layer="h.{}.",
    first=(
        Row("transformer.wte.weight", "wte/embedding", "VD", "V D"),
        Row("transformer.wpe.weight", "wpe/embedding", "TD", "T D"),
    ),
    rows=(
        Row("ln_1.weight", "ln_1/scale", "D", "D"),
        Row("ln_1.bias", "ln_1/bias", "D", "D"),
        Row("ln_2.weight", "ln_2/scale", "D", "D"),
        Row("ln_2.bias", "ln_2/bias", "D", "D"),
        Row("attn.c_attn.weight", "attn/c_attn/kernel", "DCNH", "D CNH"),
        Row("attn.c_attn.bias", "attn/c_attn/bias", "CNH", "CNH"),
        Row("attn.c_proj.weight", "attn/c_proj/kernel", "NHD", "NH D"),
        Row("attn.c_proj.bias", "attn/c_proj/bias", "D", "D"),
        Row("mlp.c_fc.weight", "mlp/c_fc/kernel", "DF", "D F"),
        Row("mlp.c_fc.bias", "mlp/c_fc/bias", "F", "F"),
        Row("mlp.c_proj.weight", "mlp/c_proj/kernel", "FD", "F D"),
        Row("mlp.c_proj.bias", "mlp/c_proj/bias", "D", "D"),
    ),
    last=(
        Row("transformer.ln_f.weight", "ln_f/scale", "D", "D"),
        Row("transformer.ln_f.bias", "ln_f/bias", "D", "D"),
        Row("lm_head.weight", "lm_head/embedding", "VD", "V D", _is_untied),
    ),
    buffers=(".attn.bias", ".attn.masked_bias"),  # the causal mask, and its fill value
)

# PyTorch's Linear stores a weight as [out, in], here and in the families below.
LLAMA = Family(
    title="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    switches={"norm": "rmsnorm", "position": "rope", "bias": False},
    options={
        "vocab_size": "vocab_size",
        "context_length": "max_position_embeddings",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "embed_dim": "hidden_size",
        "mlp_dim": "intermediate_size",
        "norm_eps": "rms_norm_eps",
        "rope_base": "rope_theta",
        "tie_embeddings": "tie_word_embeddings",
        "activation": "hidden_act",
    },
    activations=_GATES,
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    fixed={"attention_bias": False, "mlp_bias": False},
    prefix="model.",
    layer="layers.{}.",
    first=(Row("model.embed_tokens.weight", "wte/embedding", "VD", "V D"),),
    rows=(
        Row("input_layernorm.weight", "ln_1/scale", "D", "D"),
        Row("post_attention_layernorm.weight", "ln_2/scale", "D", "D"),
        Row("self_attn.q_proj.weight", "attn/c_attn/kernel", "D0NH", "NH D", _is_multi_head),
        Row("self_attn.k_proj.weight", "attn/c_attn/kernel", "D1NH", "NH D", _is_multi_head),
        Row("self_attn.v_proj.weight", "attn/c_attn/kernel", "D2NH", "NH D", _is_multi_head),
        Row("self_attn.q_proj.weight", "attn/c_q/kernel", "DNH", "NH D", _is_grouped),
        Row("self_attn.k_proj.weight", "attn/c_kv/kernel", "D0KH", "KH D", _is_grouped),
        Row("self_attn.v_proj.weight", "attn/c_kv/kernel", "D1KH", "KH D", _is_grouped),
        Row("self_attn.o_proj.weight", "attn/c_proj/kernel", "NHD", "D NH"),
        Row("mlp.gate_proj.weight", "mlp/c_gate/kernel", "DF", "F D"),
        Row("mlp.up_proj.weight", "mlp/c_fc/kernel", "DF", "F D"),
        Row("mlp.down_proj.weight", "mlp/c_proj/kernel", "FD", "D F"),
    ),
    last=(
        Row("model.norm.weight", "ln_f/scale", "D", "D"),
        Row("lm_head.weight", "lm_head/embedding", "VD", "V D", _is_untied),
    ),
    buffers=(".rotary_emb.inv_freq",),  # frequencies that older versions stored
)

QWEN3 = dataclasses.replace(
    LLAMA,
    title="Qwen 3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    switches={**LLAMA.switches, "qk_norm": True},
    defaults={**LLAMA.defaults, "num_key_value_heads": 32, "head_dim": 128},
    fixed={"attention_bias": False, "use_sliding_window": False},
    rows=(
        *LLAMA.rows,
        Row("self_attn.q_norm.weight", "attn/q_norm/scale", "H", "H"),
        Row("self_attn.k_norm.weight", "attn/k_norm/scale", "H", "H"),
    ),
)

GPT_NEOX = Family(
    title="GPT-NeoX",
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    switches={"position": "rope", "parallel_block": True},
    options={
        "vocab_size": "vocab_size",
        "context_length": "max_position_embeddings",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "embed_dim": "hidden_size",
        "mlp_dim": "intermediate_size",
        "norm_eps": "layer_norm_eps",
        "rope_base": "rotary_emb_base",
        "tie_embeddings": "tie_word_embeddings",
        "activation": "hidden_act",
    },
    activations=_ACTIVATIONS,
    defaults={
        "rotary_pct": 0.25,
        "layer_norm_eps": 1e-5,
        "rotary_emb_base": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "gelu",
    },
    fixed={"rotary_pct": 1.0, "use_parallel_residual": True, "attention_bias": True},
    dropout=("hidden_dropout", "attention_dropout"),
    rope_fraction="rotary_pct",
    prefix="gpt_neox.",
    head="embed_out.weight",
    head_aliases=("lm_head.weight",),  # transformers 5 reads both, 4 the first
    layer="layers.{}.",
    first=(Row("gpt_neox.embed_in.weight", "wte/embedding", "VD", "V D"),),
    rows=(
        Row("input_layernorm.weight", "ln_1/scale", "D", "D"),
        Row("input_layernorm.bias", "ln_1/bias", "D", "D"),
        Row("post_attention_layernorm.weight", "ln_2/scale", "D", "D"),
        Row("post_attention_layernorm.bias", "ln_2/bias", "D", "D"),
        Row("attention.query_key_value.weight", "attn/c_attn/kernel", "DCNH", "NCH D"),
        Row("attention.query_key_value.bias", "attn/c_attn/bias", "CNH", "NCH"),
        Row("attention.dense.weight", "attn/c_proj/kernel", "NHD", "D NH"),
        Row("attention.dense.bias", "attn/c_proj/bias", "D", "D"),
        Row("mlp.dense_h_to_4h.weight", "mlp/c_fc/kernel", "DF", "F D"),
        Row("mlp.dense_h_to_4h.bias", "mlp/c_fc/bias", "F", "F"),
        Row("mlp.dense_4h_to_h.weight", "mlp/c_proj/kernel", "FD", "D F"),
        Row("mlp.dense_4h_to_h.bias", "mlp/c_proj/bias", "D", "D"),
    ),
    last=(
        Row("gpt_neox.final_layer_norm.weight", "ln_f/scale", "D", "D"),
        Row("gpt_neox.final_layer_norm.bias", "ln_f/bias", "D", "D"),
        Row("embed_out.weight", "lm_head/embedding", "VD", "V D", _is_untied),
    ),
    buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)

FAMILIES = (GPT2, LLAMA, QWEN3, GPT_NEOX)


def titles() -> str:
    """Returns the families' titles as a list in a sentence."""
    *others, last = (family.title for family in FAMILIES)
    return f"{', '.join(others)} or {last}"


def family_for(cfg: GPTConfig) -> Family:
    """Returns the family whose switches are those of `cfg`.

    Raises:
        UserError: no family has them all; the message names those that the nearest lacks.
    """
    family = min(FAMILIES, key=lambda family: len(family.lacks(cfg)))
    if options := [f"model.{name}={getattr(cfg, name)}" for name in family.lacks(cfg)]:
        raise UserError(
            f"no family of Hugging Face's is this model: {family.title}, the nearest, has no "
            f"option for {', '.join(options)}",
            f"Export a model that is a {titles()} (docs/weights.md)",
        )
    return family


def canonical(cfg: GPTConfig) -> GPTConfig:
    """Returns the same architecture with its sizes written in one way.

    `num_kv_heads` is 0 where it equals `num_heads`. `mlp_ratio` gives the width of the MLP where it
    can, and `mlp_dim` elsewhere.
    """
    ratio, rest = divmod(cfg.hidden_dim, cfg.embed_dim)
    return dataclasses.replace(
        cfg,
        num_kv_heads=0 if cfg.kv_heads == cfg.num_heads else cfg.kv_heads,
        mlp_ratio=DEFAULTS.model.mlp_ratio if rest else ratio,
        mlp_dim=cfg.hidden_dim if rest else 0,
    )
