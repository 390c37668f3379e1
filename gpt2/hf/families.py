"""Tables of the Hugging Face model families that the options of `model.` can express.

Names come from configuration_*.py and modeling_*.py of transformers. To add a family, add a table;
gpt2/hf/family.py describes its fields.
"""

from gpt2.config import GPTConfig
from gpt2.errors import UserError
from gpt2.hf.family import Family, Tensor

_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
}
_GATES = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
# Fields of `GPTConfig` -> their names in config.json, in all families except GPT-2.
_OPTIONS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "embed_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "tie_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
}


# OpenAI's Conv1D stores a weight as [in, out], which is also the order of the kernels here.
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
    },
    dropout=("embd_pdrop", "attn_pdrop", "resid_pdrop"),
    prefix="transformer.",
    layer="h.{}.",
    first=(
        Tensor("transformer.wte.weight", "wte/embedding", "VD", "V D"),
        Tensor("transformer.wpe.weight", "wpe/embedding", "TD", "T D"),
    ),
    rows=(
        Tensor("ln_1.weight", "ln_1/scale", "D"),
        Tensor("ln_1.bias", "ln_1/bias", "D"),
        Tensor("ln_2.weight", "ln_2/scale", "D"),
        Tensor("ln_2.bias", "ln_2/bias", "D"),
        Tensor("attn.c_attn.weight", "attn/c_attn/kernel", "DCNH", "D CNH"),
        Tensor("attn.c_attn.bias", "attn/c_attn/bias", "CNH"),
        Tensor("attn.c_proj.weight", "attn/c_proj/kernel", "NHD", "NH D"),
        Tensor("attn.c_proj.bias", "attn/c_proj/bias", "D"),
        Tensor("mlp.c_fc.weight", "mlp/c_fc/kernel", "DF", "D F"),
        Tensor("mlp.c_fc.bias", "mlp/c_fc/bias", "F"),
        Tensor("mlp.c_proj.weight", "mlp/c_proj/kernel", "FD", "F D"),
        Tensor("mlp.c_proj.bias", "mlp/c_proj/bias", "D"),
    ),
    last=(
        Tensor("transformer.ln_f.weight", "ln_f/scale", "D"),
        Tensor("transformer.ln_f.bias", "ln_f/bias", "D"),
    ),
)

# In this family and the families below, PyTorch's Linear stores a weight as [out, in].
LLAMA = Family(
    title="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    switches={"norm": "rmsnorm", "position": "rope", "bias": False},
    options=_OPTIONS
    | {
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "norm_eps": "rms_norm_eps",
        "rope_base": "rope_theta",
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
    fixed={},
    prefix="model.",
    layer="layers.{}.",
    first=(Tensor("model.embed_tokens.weight", "wte/embedding", "VD", "V D"),),
    rows=(
        Tensor("input_layernorm.weight", "ln_1/scale", "D"),
        Tensor("post_attention_layernorm.weight", "ln_2/scale", "D"),
        Tensor("self_attn.q_proj.weight", "attn/c_attn/kernel", "DNH", "NH D", 0),
        Tensor("self_attn.k_proj.weight", "attn/c_attn/kernel", "DNH", "NH D", 1),
        Tensor("self_attn.v_proj.weight", "attn/c_attn/kernel", "DNH", "NH D", 2),
        # These tensors replace the three above in a model with grouped queries.
        Tensor("self_attn.q_proj.weight", "attn/c_q/kernel", "DNH", "NH D"),
        Tensor("self_attn.k_proj.weight", "attn/c_kv/kernel", "DKH", "KH D", 0),
        Tensor("self_attn.v_proj.weight", "attn/c_kv/kernel", "DKH", "KH D", 1),
        Tensor("self_attn.o_proj.weight", "attn/c_proj/kernel", "NHD", "D NH"),
        Tensor("mlp.gate_proj.weight", "mlp/c_gate/kernel", "DF", "F D"),
        Tensor("mlp.up_proj.weight", "mlp/c_fc/kernel", "DF", "F D"),
        Tensor("mlp.down_proj.weight", "mlp/c_proj/kernel", "FD", "D F"),
    ),
    last=(Tensor("model.norm.weight", "ln_f/scale", "D"),),
)

QWEN3 = LLAMA._replace(
    title="Qwen 3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    switches={**LLAMA.switches, "qk_norm": True},
    defaults={**LLAMA.defaults, "num_key_value_heads": 32, "head_dim": 128},
    fixed={"use_sliding_window": False},
    rows=(
        *LLAMA.rows,
        Tensor("self_attn.q_norm.weight", "attn/q_norm/scale", "H"),
        Tensor("self_attn.k_norm.weight", "attn/k_norm/scale", "H"),
    ),
)

GPT_NEOX = Family(
    title="GPT-NeoX",
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    switches={"position": "rope", "parallel_block": True},
    options=_OPTIONS
    | {
        "norm_eps": "layer_norm_eps",
        "rope_base": "rotary_emb_base",
        "rope_share": "rotary_pct",
    },
    activations=_ACTIVATIONS,
    defaults={
        "layer_norm_eps": 1e-5,
        "rotary_emb_base": 10000.0,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "hidden_act": "gelu",
    },
    fixed={"use_parallel_residual": True},
    dropout=("hidden_dropout", "attention_dropout"),
    prefix="gpt_neox.",
    head="embed_out.weight",  # transformers 5 also reads lm_head.weight
    layer="layers.{}.",
    first=(Tensor("gpt_neox.embed_in.weight", "wte/embedding", "VD", "V D"),),
    rows=(
        Tensor("input_layernorm.weight", "ln_1/scale", "D"),
        Tensor("input_layernorm.bias", "ln_1/bias", "D"),
        Tensor("post_attention_layernorm.weight", "ln_2/scale", "D"),
        Tensor("post_attention_layernorm.bias", "ln_2/bias", "D"),
        Tensor(
            "attention.query_key_value.weight", "attn/c_attn/kernel", "DCNH", "NCH D"
        ),
        Tensor("attention.query_key_value.bias", "attn/c_attn/bias", "CNH", "NCH"),
        Tensor("attention.dense.weight", "attn/c_proj/kernel", "NHD", "D NH"),
        Tensor("attention.dense.bias", "attn/c_proj/bias", "D"),
        Tensor("mlp.dense_h_to_4h.weight", "mlp/c_fc/kernel", "DF", "F D"),
        Tensor("mlp.dense_h_to_4h.bias", "mlp/c_fc/bias", "F"),
        Tensor("mlp.dense_4h_to_h.weight", "mlp/c_proj/kernel", "FD", "D F"),
        Tensor("mlp.dense_4h_to_h.bias", "mlp/c_proj/bias", "D"),
    ),
    last=(
        Tensor("gpt_neox.final_layer_norm.weight", "ln_f/scale", "D"),
        Tensor("gpt_neox.final_layer_norm.bias", "ln_f/bias", "D"),
    ),
)

FAMILIES = (GPT2, LLAMA, QWEN3, GPT_NEOX)


def family_for(cfg: GPTConfig) -> Family:
    """Return the Hugging Face model family whose models include the architecture `cfg`.

    If there is no such family, raise a UserError with the options of `cfg` that the most similar
    family lacks.
    """
    family = min(FAMILIES, key=lambda family: len(family.lacks(cfg)))
    lacking = ", ".join(
        f"model.{name}={getattr(cfg, name)}" for name in family.lacks(cfg)
    )
    if lacking:
        raise UserError(
            f"{family.title}, the most similar Hugging Face family, has no option for {lacking}",
            "Export a run that uses only the options of one family in docs/weights.md",
        )
    return family
