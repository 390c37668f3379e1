"""The table of operations (gpt2/ops/table.py) for the devices that a model runs on.

What a kernel cannot do, the formula does: a term of the scores that it does not know, dropout of
weights, a length, JAX_DISABLE_JIT.
"""

from collections.abc import Callable, Collection
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from gpt2.config import GPTConfig
from gpt2.errors import UserError
from gpt2.ops import Ops, plain
from gpt2.ops.blocked_attention import blocked_attention
from gpt2.ops.fsdp import look_up
from gpt2.ops.fused_attention import cudnn_attention, splash_attention
from gpt2.ops.head_loss import (
    head_loss,
    look_up_padded,
    one_pass_log_sum_exp,
    pad_vocab,
    rows_at_once,
)
from gpt2.ops.linear import add_rows, linear, linear_apart
from gpt2.ops.norm import norm
from gpt2.ops.table import Attention, LookUp, Spread
from gpt2.ops.variants import variants_for
from gpt2.parallel.rules import Rules, constrain, find_shards, map_devices
from gpt2.parallel.shards import by_layer
from gpt2.utils.platform import is_older, jit_is_off, platform_of

# The head computes with a vocabulary padded to a multiple of this, which fills matrix units and
# divides over devices. Parameters, logits and losses always have the true size.
VOCAB_MULTIPLE = 128
# Up to so many positions, the formula is as fast as blocks where a CPU is two devices, as small
# models want it (parallel.cpu_devices): in float32, and in 16 bits. On one device, blocks take
# 0.96 of the quickstart's step.
SHORT = 128
SHORT_NARROW = 64

PREFERRED = {"cpu": "blocked", "gpu": "cudnn", "tpu": "splash"}

# The options that bring a term of the scores, which no kernel knows.
Terms = Collection[str]


def choose_attention(
    cfg: GPTConfig, device: jax.Device, terms: Terms
) -> tuple[str, str]:
    """Returns the implementation of attention for a model on a device, and why it is no other.

    The reason is empty where there is nothing to tell. One that is asked for by `model.attention`
    and cannot run is a UserError.
    """
    is_free = cfg.attention == "auto"
    preferred = PREFERRED.get(platform_of(device), "plain")
    name = preferred if is_free else cfg.attention
    length = SHORT if cfg.compute_dtype == "float32" else SHORT_NARROW
    is_short = name == "blocked" and cfg.context_length <= length
    if name == "plain" or (is_free and is_short) or jit_is_off():
        return "plain", ""
    obstacle = _find_obstacle(name, cfg, device, terms)
    if not obstacle:
        return name, ""
    if not is_free:
        raise UserError(
            f"model.attention={name!r} {obstacle}",
            "Use --config.model.attention=auto",
        )
    return "plain", f"{name} {obstacle}"


def _find_obstacle(
    name: str,
    cfg: GPTConfig,
    device: jax.Device,
    terms: Terms,
) -> str:
    """Returns why an implementation cannot compute a model's attention, or an empty text."""
    unknown = [*terms]
    if cfg.attention_softcap and name == "cudnn":
        unknown.append("model.attention_softcap")
    if unknown:
        return f"cannot compute {unknown[0]}"
    is_at_home = PREFERRED.get(platform_of(device)) == name
    if name != "blocked" and (not is_at_home or is_older(device)):
        return f"does not run on this device ({device.device_kind})"
    if name == "cudnn" and jnp.dtype(cfg.compute_dtype).itemsize != 2:
        return (
            f"needs bfloat16 or float16, and precision.compute is {cfg.compute_dtype}"
        )
    if name == "cudnn" and (cfg.head_size % 8 or cfg.head_size > 128):
        return (
            f"needs heads of at most 128 in steps of 8, and these have {cfg.head_size}"
        )
    if name == "cudnn" and cfg.context_length % 2:
        return "needs an even context"
    if name == "splash" and cfg.context_length % 128:
        return f"needs a context in steps of 128, and this one is {cfg.context_length}"
    return ""


def make_ops(
    cfg: GPTConfig,
    mesh: Mesh,
    terms: Terms,
    rules: Rules | None = None,
    *,
    gathers_by_layer: bool = False,
) -> Ops:
    """Returns the table for a model on the devices of a mesh.

    Args:
        cfg: the model.
        mesh: with an axis `tensor` of more than one device, XLA's partitioner splits activations as
            `rules` say.
        terms: options that add a term to the scores.
        rules: of the layout; None: each device computes by itself.
        gathers_by_layer: whether devices hold shards of kernels and tables, of which each is
            gathered where it is used, within a `shard_map` over `fsdp`.
    """
    if jit_is_off():
        return Ops()
    device = mesh.devices.flat[0]
    platform = platform_of(device)
    splits_axes = mesh.shape.get("tensor", 1) > 1
    variants = variants_for(platform, several=mesh.size > 1, splits_axes=splits_axes)
    by_axes: Callable[..., Array] = plain.constrain
    on_devices: Spread | None = None
    if splits_axes and rules:
        by_axes = partial(constrain, mesh=mesh, rules=rules)
        on_devices = partial(map_devices, mesh=mesh, rules=rules)
    multiple = VOCAB_MULTIPLE if splits_axes or platform != "cpu" else 1
    rows_of_head = -(-cfg.vocab_size // multiple) * multiple
    num_rows = rows_at_once(
        platform, (rows_of_head, cfg.embed_dim), is_scarce=gathers_by_layer
    )
    tokens: LookUp = look_up if gathers_by_layer else plain.look_up
    if rows_of_head > cfg.vocab_size:
        tokens = partial(look_up_padded, look_up=tokens, vocab_size=cfg.vocab_size)
    attention, _ = choose_attention(cfg, device, terms)
    one_map = partial(linear, variants=variants)
    parts = partial(plain.linear_parts, linear=one_map)
    if variants.apart:
        parts = partial(linear_apart, variants=variants)
    ops = Ops(
        linear=one_map,
        linear_parts=parts,
        norm=partial(norm, variants=variants),
        attention=attention_by(attention, platform, on_devices),
        look_up_tokens=tokens,
        add_rows=add_rows,
        pad_vocab=partial(pad_vocab, multiple=multiple, constrain=by_axes),
        head_loss=partial(head_loss, variants=variants, num_rows=num_rows),
        log_sum_exp=one_pass_log_sum_exp if variants.one_pass else plain.log_sum_exp,
        constrain=by_axes,
    )
    if not gathers_by_layer or not rules:
        return ops
    # XLA would keep the whole from forward to backward pass, with nothing between them.
    forget = cfg.remat == "none" and not cfg.loops_over_layers
    shards_for = partial(find_shards, mesh=mesh, rules=rules, forget=forget)
    return by_layer(ops, shards_for)


def attention_by(name: str, platform: str, spread: Spread | None = None) -> Attention:
    """Returns the function of an implementation, one of `PREFERRED` or `plain`."""
    if name == "blocked":
        return partial(blocked_attention, spread=spread)
    if name == "cudnn":
        return partial(cudnn_attention, spread=spread)
    if name == "splash":
        return partial(splash_attention, interpret=platform != "tpu", spread=spread)
    return plain.attention
