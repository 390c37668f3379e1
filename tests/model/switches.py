"""The switches of the model and the loss, and models that have them."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np

from gpt2.config import Config, with_options
from gpt2.config.options import OPTIONS, read_option
from gpt2.errors import UserError
from gpt2.model import GPT
from gpt2.training.losses import next_token_loss
from tests import numpy_model
from tests.helpers import options_of, random_params

# One of 8 frequencies does not change, two are a little slower, and five are 8 times slower.
LLAMA3 = "model.rope_scaling=llama3 model.rope_factor=8.0 model.rope_context=64"
# By name, the options that differ from GPT-2.
SWITCHES = {
    "gelu": "model.activation=gelu",
    "relu": "model.activation=relu",
    "relu_squared": "model.activation=relu_squared",
    "silu": "model.activation=silu",
    "swiglu": "model.activation=swiglu",
    "geglu": "model.activation=geglu model.mlp_dim=80",
    "rmsnorm": "model.norm=rmsnorm",
    "norm_eps": "model.norm_eps=0.3",
    "post": "model.norm_position=post",
    "sandwich": "model.norm_position=sandwich",
    "rope": "model.position=rope",
    "rope_base": "model.position=rope model.rope_base=10.0",
    "rope_share": "model.position=rope model.rope_share=0.25",
    "llama3": f"model.position=rope {LLAMA3}",
    "yarn": """
        model.position=rope model.rope_scaling=yarn model.rope_factor=8.0
        model.rope_context=4096 model.rope_share=0.5""",
    "alibi": "model.position=alibi",
    "none": "model.position=none",
    "grouped": "model.num_kv_heads=2",
    "grouped alibi": "model.num_kv_heads=2 model.position=alibi",
    "head_dim": "model.head_dim=24",
    "grouped head_dim": "model.head_dim=8 model.num_kv_heads=2",
    "qk_norm": "model.qk_norm=True",
    "window": "model.window=5",
    "window_pattern": "model.window=5 model.window_pattern=SL",
    "attention_softcap": "model.attention_softcap=0.5",
    "logit_softcap": "model.logit_softcap=0.5",
    "value_embeddings": "model.value_embeddings=True",
    "value_residual": "model.value_residual=True",
    "embedding_skip": "model.embedding_skip=True",
    "smear": "model.smear=True",
    "bigram_embeddings": "model.bigram_embeddings=96",
    "backout": "model.backout=True",
    "hyper_connections": "model.hyper_connections=3",
    "attention_gate": "model.attention_gate=True",
    "exclusive_attention": "model.exclusive_attention=True",
    "grouped exclusive": "model.num_kv_heads=2 model.exclusive_attention=True",
    "attention_sink": "model.attention_sink=True",
    "parallel_block": "model.parallel_block=True",
    "experts": "model.num_experts=4",
    "two experts": """
        model.num_experts=4 model.experts_per_token=2 model.expert_capacity=1.0
        model.expert_balance_loss=0.2 model.expert_z_loss=0.1""",
    "no bias": "model.bias=False",
    "untied": "model.tie_embeddings=False",
    "fan_in": "model.init=fan_in",
    "init_std": "model.init_std=0.1",
    "zero_init_projections": "model.zero_init_projections=True",
    "mup": "model.mup_base_width=16",
    "completep": "model.mup_base_depth=1",
    "z_loss": "loss.z_loss=0.1",
    "ahead": "loss.ahead=0.5,0.25 loss.ahead_fade=8",
}
# Common combinations.
COMBINED = {
    "llama": f"""
        model.position=rope model.norm=rmsnorm model.activation=swiglu
        model.num_kv_heads=2 model.bias=False model.tie_embeddings=False {LLAMA3}
        model.head_dim=24""",
    "mixtral": """
        model.position=rope model.norm=rmsnorm model.activation=swiglu
        model.num_kv_heads=2 model.bias=False model.tie_embeddings=False
        model.num_experts=4 model.experts_per_token=2 model.expert_capacity=1.0""",
    "gemma 2": """
        model.position=rope model.norm=rmsnorm model.activation=geglu
        model.norm_position=sandwich model.attention_softcap=5.0
        model.logit_softcap=3.0 model.window=5 model.window_pattern=SL
        model.num_kv_heads=2 model.bias=False""",
    "modded": """
        model.position=rope model.norm=rmsnorm model.activation=relu_squared
        model.value_embeddings=True model.value_residual=True model.qk_norm=True
        model.embedding_skip=True model.logit_softcap=15.0 model.bias=False
        model.window=6 model.window_pattern=SL model.parallel_block=True
        model.attention_gate=True model.smear=True model.backout=True
        model.exclusive_attention=True model.bigram_embeddings=96""",
}


def existing(text):
    """Return the options that exist, so that these tests pass if an ingredient is deleted."""
    options = {}
    for setting in text.split():
        name, _, value = setting.partition("=")
        if name not in OPTIONS:
            continue
        choices = OPTIONS[name].choices
        if not choices or value in choices:
            options[name] = read_option(name, value)
    return options


SWITCHES = {
    name: existing(text)
    for name, text in SWITCHES.items()
    if len(existing(text)) == len(text.split())
}
COMBINED = {name: existing(text) for name, text in COMBINED.items()}
ALL = SWITCHES | COMBINED
SMALL = existing("""
    model.vocab_size=64 model.context_length=16 model.num_layers=2 model.num_heads=4
    model.embed_dim=64 model.dropout=0.0 data.batch_size=16 optim.schedule=constant
    optim.learning_rate=1e-2 optim.end_fraction=1.0 optim.warmup_steps=0
    optim.eps=1e-4 train.num_steps=2""")


@functools.cache
def config_of(name, changes=""):
    """Return the options of a small model with switches, joined by `+`, and further changes."""
    options = dict(SMALL)
    for part in name.split("+"):
        options |= ALL.get(part, {})
    return with_options(Config(), options | options_of(changes))


@functools.cache
def groups(seed=None):
    """Join switches that can be combined, because to compile each by itself would take minutes."""
    names = [*SWITCHES]
    if seed is not None:
        random.Random(seed).shuffle(names)
    joined = []
    for name in names:
        fitting = [group for group in joined if can_join(group, name)]
        if fitting:
            smallest = min(fitting, key=len)
            smallest.append(name)
        else:
            joined.append([name])
    return ["+".join(group) for group in joined]


def can_join(group, name):
    """Return whether a switch and those of a group set different options that are compatible."""
    for other in group:
        if SWITCHES[other].keys() & SWITCHES[name].keys():
            return False
    try:
        config_of("+".join([*group, name])).gpt()
    except UserError:
        return False
    return True


def tokens_of(seed):
    return jax.random.randint(jax.random.key(seed), (2, 16), 0, 64)


def model_of(name):
    return GPT(config_of(name).gpt())


def params_of(name):
    return random_params(config_of(name).gpt())


def rolled(tokens):
    """Return a batch in which the first token of a row follows the last."""
    return {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}


def mean_loss(name, model, params, tokens, key=None):
    """Return the mean objective in step 2, without the auxiliary losses of routers.

    With a `key` it is the objective of training, in which experts drop tokens.
    """
    loss = next_token_loss(model, config_of(name).loss)
    objective, sums = loss(params, rolled(tokens), key, jnp.int32(2))
    for path, (total, _) in sums.items():
        module, _, quantity = path.rpartition("/")
        if module:
            # 0 for what experts only report. If they are deleted, there is no such option.
            weight = getattr(model.config, f"expert_{quantity}", 0.0)
            objective -= weight * total
    _, count = sums["loss"]
    return objective / count


def in_numpy(name, params, tokens):
    """Return the logits `[B, T, V]` and the mean loss that tests/numpy_model.py computes."""
    exact = jax.tree.map(np.float64, params)
    cfg = model_of(name).config
    options = config_of(name).loss
    weights = [1.0, *numpy_model.ahead_weights(options, step=2)]
    logits = []
    loss = 0.0
    for row in np.asarray(tokens):
        row_logits = numpy_model.logits(cfg, exact, row)
        losses = numpy_model.losses_ahead(row_logits, np.roll(row, -1), options)
        loss += np.dot(losses, weights)
        logits.append(row_logits)
    return np.stack(logits), loss / tokens.size
