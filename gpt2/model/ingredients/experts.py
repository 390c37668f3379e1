"""Mixture of experts: several MLPs in each layer, of which a router chooses some for each token.

Shazeer et al. 2017, arXiv 1701.06538. The router computes a probability for each expert. With one
expert per token, the expert's output is multiplied by the expert's probability (Switch Transformer,
Fedus et al. 2021, arXiv 2101.03961). With several experts per token, each output is multiplied by
its expert's probability, divided by the sum of the chosen experts' probabilities (GShard, arXiv
2006.16668; Mixtral, arXiv 2401.04088). Kernels have the shape `[E, D, F]`, where E is the number of
experts. In this file, K is the number of experts per token.

With `model.expert_capacity`, an expert processes only a limited number of tokens of each row of the
batch, its capacity, and drops the rest. As in DeepSeek-V2 (arXiv 2405.04434, section 2.2), tokens
are dropped only in training. An expert takes the earliest tokens of a row first, so later tokens
have no effect on earlier tokens. Capacity and the balance loss are computed for each row
separately, so the layout of devices does not affect them.
"""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from gpt2.config import GPTConfig
from gpt2.errors import UserError
from gpt2.model.layers import MLP, Linear
from gpt2.model.seams import Branch, Context, Ingredient
from gpt2.ops import Ops
from gpt2.ops.plain import AxisNames
from gpt2.utils.scan import METRICS, report


class Experts(Ingredient):
    """The ingredient that replaces each MLP with a mixture of `model.num_experts` MLPs."""

    option = "num_experts"

    def branch(self, block: nn.Module, branch: Branch, context: Context) -> Branch:
        """Replace the MLP with a mixture of experts."""
        if context.branch != "mlp":
            return branch

        def mixture(x: Array) -> Array:
            return Mixture(self.config, block.ops, name="mlp")(x, context)

        return branch._replace(sublayer=mixture)

    def active_fraction(self, axes: AxisNames) -> float:
        """Return the fraction of a parameter that a token uses.

        For a parameter with the axis `experts`, this is the fraction of the experts that process a
        token. For all other parameters, it is 1.
        """
        if "experts" not in axes:
            return 1.0
        return self.config.experts_per_token / self.config.num_experts


class Mixture(nn.Module):
    """The experts of a layer, and the router that selects some of them for each token."""

    config: GPTConfig
    ops: Ops

    @nn.compact
    def __call__(self, x: Array, context: Context) -> Array:
        """Map `x` `[B, T, D]` to `[B, T, D]` in the compute dtype."""
        cfg = self.config
        ops = self.ops
        E = cfg.num_experts
        K = cfg.experts_per_token
        if K > E:
            raise UserError(
                f"model.experts_per_token={K} is more than model.num_experts={E}",
                "Lower model.experts_per_token",
            )
        B, T, D = x.shape
        x = ops.constrain(x, "batch", "length", "embed")
        exact = dataclasses.replace(cfg, bias=False, compute_dtype="float32")
        router = Linear(exact, ops, (D, E), ("embed", "mix"), name="router")
        logits = router(x)
        shares = jax.nn.softmax(logits)
        weights, chosen = jax.lax.top_k(shares, K)  # [B, T, K]
        if K > 1:
            weights /= weights.sum(-1, keepdims=True)
        is_chosen = jax.nn.one_hot(chosen, E).sum(2)  # [B, T, E]
        counts = jnp.ones((B, T, 1))
        if context.has_target is not None:
            counts *= context.has_target[..., None]
        self._report_losses(logits, shares, is_chosen, counts)

        capacity = T
        # An expert's slots are filled in the order of the tokens.
        before = jnp.cumsum(is_chosen, axis=1) - is_chosen
        index = jnp.take_along_axis(before, chosen, axis=2).astype(jnp.int32)
        if not context.deterministic and cfg.expert_capacity:
            capacity = min(T, math.ceil(cfg.expert_capacity * K * T / E))
            dropped = counts * (index >= capacity)
            report(self, "dropped", dropped.sum(), counts.sum() * K)
        # A choice (a token and one of its experts) beyond the capacity gets the index after the
        # last slot. With mode="drop", JAX writes nothing there, and with mode="fill", it reads 0.
        nowhere = E * capacity
        slots = jnp.where(index < capacity, chosen * capacity + index, nowhere)

        @jax.vmap
        def dispatch(x: Array, slots: Array) -> Array:
            empty = jnp.zeros((nowhere, D), x.dtype)
            return empty.at[slots].add(x[:, None], mode="drop")

        @jax.vmap
        def combine(y: Array, slots: Array, weights: Array) -> Array:
            found = y.at[slots].get(mode="fill", fill_value=0)  # [T, K, D]
            return jnp.einsum("tk,tkd->td", weights, found.astype(jnp.float32))

        experts = nn.vmap(
            MLP,
            variable_axes={"params": 0, METRICS: 0},
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: "experts"},
        )
        taken = dispatch(x, slots).reshape(B, E, capacity, D)
        taken = jnp.moveaxis(taken, 1, 0)
        taken = ops.constrain(taken, "experts", "batch", "length", "embed")
        y = experts(cfg, ops, name="experts")(taken)
        y = jnp.moveaxis(y, 0, 1).reshape(B, nowhere, D)
        return combine(y, slots, weights).astype(x.dtype)

    @nn.nowrap
    def _report_losses(
        self, logits: Array, shares: Array, is_chosen: Array, counts: Array
    ) -> None:
        """Report the auxiliary losses of the router, summed over tokens.

        `logits` and `shares` `[B, T, E]` are the router's logits and their softmax, for E experts.
        `is_chosen` `[B, T, E]` is 1 for the experts that the router chose. Tokens whose entry in
        `counts` `[B, T, 1]` is 0 have no target, and are left out of the sums. The balance loss
        (Switch Transformer, equation 4) is 1 if all experts are chosen equally often, or if all
        have the same mean probability. The z-loss (ST-MoE, Zoph et al. 2022, arXiv 2202.08906,
        equation 5) penalises large logits.
        """
        cfg = self.config
        sizes = counts.sum(1)  # [B, 1], the number of tokens in each row
        wholes = jnp.maximum(sizes, 1)
        chosen = (counts * is_chosen).sum(1) / wholes / cfg.experts_per_token  # [B, E]
        probable = (counts * shares).sum(1) / wholes
        balance = cfg.num_experts * (sizes * chosen * probable).sum()
        log_normaliser = jax.nn.logsumexp(logits, axis=-1)  # [B, T]
        z = counts[..., 0] * jnp.square(log_normaliser)
        num_tokens = counts.sum()
        weight = cfg.expert_balance_loss
        report(self, "balance_loss", balance, num_tokens, weight=weight)
        report(self, "z_loss", z.sum(), num_tokens, weight=cfg.expert_z_loss)
