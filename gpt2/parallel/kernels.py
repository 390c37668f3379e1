"""Choose kernels: make the table of operations (gpt2/ops/table.py) for a model and its devices.

For attention, the table contains a kernel only if the kernel supports the device, the dtype, the
head size, the context length and the terms of the scores. With `model.attention=auto`, a short
context on a CPU also uses the reference implementation, which is as fast there. If a call has
dropout, or something else that the kernel does not support, the function that `get_attention`
returns calls the reference implementation instead. With JAX_DISABLE_JIT, the table contains only
reference implementations.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from gpt2.config import GPTConfig
from gpt2.errors import UserError
from gpt2.ops import Ops, Scoring, plain
from gpt2.ops.blocked_attention import blocked_attention
from gpt2.ops.fsdp import look_up
from gpt2.ops.fused_attention import cudnn_attention, splash_attention
from gpt2.ops.head_loss import (
    chunk_tokens,
    head_loss,
    look_up_padded,
    one_pass_log_sum_exp,
    pad_vocab,
)
from gpt2.ops.linear import add_rows, linear, linear_separately
from gpt2.ops.linear_bias import MAX_HEAD_SIZE, with_linear_bias
from gpt2.ops.norm import norm
from gpt2.ops.table import AttentionFn, LookUpFn, Spread
from gpt2.ops.tokamax_attention import is_installed, tokamax_attention
from gpt2.ops.variants import variants_for
from gpt2.parallel.rules import Rules, constrain, find_shards, map_devices
from gpt2.parallel.shards import gather_by_layer
from gpt2.utils.platform import jit_is_off, platform_of

# The head computes with a vocabulary padded to a multiple of this, which fills matrix units and can
# be split evenly over devices. On CPUs, only a vocabulary that `tensor` splits is padded.
# Parameters, and the logits that a model returns, have the true size. Losses are not affected.
VOCAB_MULTIPLE = 128
# On CPUs, `auto` uses the reference implementation for up to SHORT positions in float32, or
# SHORT_NARROW in 16 bits. For these lengths, it is as fast as the blocked kernel if the CPU is
# split into two devices, as is best for small models (parallel.cpu_devices). On one device, the
# blocked kernel shortens a step of the quickstart to 0.96 of its time.
SHORT = 128
SHORT_NARROW = 64

# The value of `model.attention` for the preferred kernel of each platform. `auto` never chooses
# tokamax, because no GPU has run it in this project yet.
PREFERRED = {"cpu": "blocked", "gpu": "cudnn", "tpu": "splash"}

# The names of options that change the scores in a way that no kernel supports.
Terms = Collection[str]


def choose_attention(
    cfg: GPTConfig, device: jax.Device, terms: Terms
) -> tuple[str, str]:
    """Return the implementation of attention for a model on a device, and why no kernel is used.

    The reason is empty if a kernel is used, or if none is expected: with `model.attention=plain`,
    with JAX_DISABLE_JIT, and with `auto` for a short context on a CPU. `terms` names the options
    that change the scores in a way that no kernel supports. Raise UserError if `model.attention`
    names a kernel that cannot run.
    """
    is_auto = cfg.attention == "auto"
    preferred = PREFERRED.get(platform_of(device), "plain")
    name = preferred if is_auto else cfg.attention
    length = SHORT if cfg.compute_dtype == "float32" else SHORT_NARROW
    is_short = name == "blocked" and cfg.context_length <= length
    if name == "plain" or (is_auto and is_short) or jit_is_off():
        return "plain", ""
    obstacle = _find_obstacle(name, cfg, device, terms)
    if not obstacle:
        return name, ""
    if not is_auto:
        raise UserError(
            f"model.attention={name} {obstacle}",
            "Use --config.model.attention=auto",
        )
    return "plain", f"{name} {obstacle}"


def _find_obstacle(
    name: str,
    cfg: GPTConfig,
    device: jax.Device,
    terms: Terms,
) -> str:
    """Return why a kernel cannot compute a model's attention, or an empty string."""
    unsupported = [*terms]
    if cfg.attention_softcap and name == "cudnn":
        unsupported.append("model.attention_softcap")
    if cfg.dropout and name == "tokamax":
        unsupported.append("model.dropout")
    if unsupported:
        return f"does not support {unsupported[0]}"
    is_native = PREFERRED.get(platform_of(device)) == name
    if name == "tokamax":
        is_native = _is_hopper_or_newer(device)
    if name != "blocked" and (not is_native or _is_older(device)):
        return f"does not run on this device ({device.device_kind})"
    if name == "tokamax" and not is_installed():
        return "needs Python 3.12 and the package tokamax: pip install -e '.[tokamax]'"
    if name == "tokamax" and cfg.compute_dtype != "bfloat16":
        return f"needs bfloat16, but precision.compute is {cfg.compute_dtype}"
    if name == "cudnn" and jnp.dtype(cfg.compute_dtype).itemsize != 2:
        return (
            f"needs bfloat16 or float16, but precision.compute is {cfg.compute_dtype}"
        )
    is_on_gpu = name in ("cudnn", "tokamax")
    if is_on_gpu and (cfg.head_size % 8 or cfg.head_size > MAX_HEAD_SIZE):
        return (
            f"needs a head size that is a multiple of 8 and at most {MAX_HEAD_SIZE}, "
            f"but the head size is {cfg.head_size}"
        )
    if name == "cudnn" and cfg.context_length % 2:
        return (
            f"needs an even context, but model.context_length is {cfg.context_length}"
        )
    if name == "splash" and cfg.context_length % 128:
        return (
            f"needs a context that is a multiple of 128, "
            f"but model.context_length is {cfg.context_length}"
        )
    return ""


def _is_older(device: jax.Device) -> bool:
    """Return whether a device is older than TPU v4 or Ampere, or is an AMD GPU.

    Library kernels for attention do not run on such a device.
    """
    # Mosaic, which compiles splash, has no 16-bit products for TPU v2 and v3.
    if device.device_kind in ("TPU v2", "TPU v3"):
        return True
    capability = getattr(device, "compute_capability", "9")
    # The compute capability of an AMD GPU is a name, not a number.
    return not capability[0].isdigit() or float(capability) < 8


def _is_hopper_or_newer(device: jax.Device) -> bool:
    """Return whether tokamax has forward and backward kernels for a GPU, such as an H100 or B200.

    These GPUs have the compute capability 9 or 10.
    """
    if platform_of(device) != "gpu" or _is_older(device):
        return False
    return 9 <= float(device.compute_capability) < 11


def make_ops(
    cfg: GPTConfig,
    mesh: Mesh,
    terms: Terms,
    rules: Rules | None = None,
    *,
    gathers_by_layer: bool = False,
) -> Ops:
    """Return the table of operations (reference implementations and kernels) of a model on a mesh.

    Args:
        cfg: the model's config.
        mesh: the devices. If its axis `tensor` has more than one device, XLA's partitioner splits
            activations according to `rules`.
        terms: the options that change the scores in a way that no kernel supports.
        rules: the rules that map logical axes to the mesh, or None if each device computes
            independently of the other devices.
        gathers_by_layer: whether devices hold shards of weight matrices and embedding tables, which
            are gathered where they are used, within a `shard_map` over `fsdp`.
    """
    if jit_is_off():
        return Ops()
    device = mesh.devices.flat[0]
    platform = platform_of(device)
    splits_axes = mesh.shape.get("tensor", 1) > 1
    variants = variants_for(platform, several=mesh.size > 1, splits_axes=splits_axes)
    shard: Callable[..., Array] = plain.constrain
    spread: Spread | None = None
    if splits_axes and rules:
        shard = partial(constrain, mesh=mesh, rules=rules)
        spread = partial(map_devices, mesh=mesh, rules=rules)
    multiple = VOCAB_MULTIPLE if splits_axes or platform != "cpu" else 1
    padded_size = -(-cfg.vocab_size // multiple) * multiple
    table = (padded_size, cfg.embed_dim)
    num_tokens = chunk_tokens(platform, table, is_scarce=gathers_by_layer)
    look_up_tokens: LookUpFn = look_up if gathers_by_layer else plain.look_up
    if padded_size > cfg.vocab_size:
        look_up_tokens = partial(
            look_up_padded, look_up=look_up_tokens, vocab_size=cfg.vocab_size
        )
    attention, _ = choose_attention(cfg, device, terms)
    linear_map = partial(linear, variants=variants)
    linear_parts = partial(plain.linear_parts, linear=linear_map)
    if variants.separate_qkv:
        linear_parts = partial(linear_separately, variants=variants)
    ops = Ops(
        linear=linear_map,
        linear_parts=linear_parts,
        norm=partial(norm, variants=variants),
        attention=get_attention(attention, platform, spread),
        look_up_tokens=look_up_tokens,
        add_rows=add_rows,
        pad_vocab=partial(pad_vocab, multiple=multiple, constrain=shard),
        head_loss=partial(head_loss, variants=variants, num_tokens=num_tokens),
        log_sum_exp=one_pass_log_sum_exp
        if variants.one_pass_statistics
        else plain.log_sum_exp,
        constrain=shard,
    )
    if not gathers_by_layer or not rules:
        return ops
    # Without remat or a loop over layers, XLA would store gathered parameters until the backward
    # pass.
    forget = cfg.remat == "none" and not cfg.loops_over_layers
    shards_for = partial(find_shards, mesh=mesh, rules=rules, forget=forget)
    return gather_by_layer(ops, shards_for)


class Kernel(NamedTuple):
    """A function that computes attention, and another that returns whether it supports a call.

    Neither dropout nor a change of the scores other than one constant soft cap is supported by any
    kernel, so `supports` need not check this.
    """

    run: Callable[..., Array]  # of q, k, v, segments, scoring
    supports: Callable[[Array, Scoring], bool]  # of q, scoring


_KERNELS = {
    "blocked": Kernel(blocked_attention, lambda q, scoring: True),
    # cuDNN supports no soft cap, and has no derivative for odd lengths.
    "cudnn": Kernel(
        cudnn_attention,
        lambda q, scoring: not scoring.terms and q.shape[1] % 2 == 0,
    ),
    # With a soft cap of at most 60, tokamax does not subtract the largest score from the scores.
    # Their exponentials would then overflow in float16.
    "tokamax": Kernel(tokamax_attention, lambda q, scoring: q.dtype == jnp.bfloat16),
    "splash": Kernel(splash_attention, lambda q, scoring: q.shape[1] % 128 == 0),
}


def get_attention(
    name: str, platform: str, spread: Spread | None = None
) -> AttentionFn:
    """Return the attention function for `name`, a kernel or `plain`.

    The function calls the reference implementation instead if the kernel does not support a call.
    Unless `platform` is `tpu`, splash runs in Pallas' interpreter. `spread` is given if devices
    split the heads: it wraps a kernel so that each device runs the kernel on the device's own
    heads.
    """
    if name == "plain":
        return plain.attention
    kernel = _KERNELS[name]
    if name == "splash":
        run = partial(kernel.run, interpret=platform != "tpu")
        kernel = kernel._replace(run=run)

    def attention(q: Array, k: Array, v: Array, scoring: Scoring) -> Array:
        changes_scores = scoring.softcap is None  # by more than one constant soft cap
        if scoring.dropout or changes_scores or not kernel.supports(q, scoring):
            return plain.attention(q, k, v, scoring)
        run: Callable = partial(kernel.run, scoring=scoring)
        if spread:
            run = spread(run)
        return run(q, k, v, scoring.segments)

    return with_linear_bias(attention, scales_queries=name == "splash")
