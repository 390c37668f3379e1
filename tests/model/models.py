"""Small models: their logits, losses and steps."""

import dataclasses
import functools

import flax.linen as nn
import jax

from gpt2.model import GPT, GPTConfig, with_kernels
from gpt2.model.layers import MLP
from tests.model.switches import rolled

SMALL = GPTConfig(
    vocab_size=300, context_length=16, num_layers=2, num_heads=2, embed_dim=32
)


def replaced(**changes):
    return dataclasses.replace(SMALL, **changes)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config, params, tokens, segments=None):
    return GPT(config).apply({"params": params}, tokens, segments=segments)


def mean_loss(model, params, tokens, key=None):
    """Return the mean loss of the next token, with dropout if there is a key."""
    total, _ = model.apply(
        {"params": params},
        rolled(tokens),
        method="loss",
        deterministic=key is None,
        rngs={} if key is None else {"dropout": key},
    )
    return total / tokens.size


def loss(config, params, tokens, key=None):
    """Return the mean loss, computed by kernels."""
    return mean_loss(with_kernels(GPT(config)), params, tokens, key)


step_of = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)


def at_each_mlp(look):
    """Call `look(module, output)` for the MLP of every layer, in a `with` statement."""

    def intercept(next_method, args, kwargs, context):
        y = next_method(*args, **kwargs)
        if isinstance(context.module, MLP) and context.method_name == "__call__":
            look(context.module, y)
        return y

    return nn.intercept_methods(intercept)
