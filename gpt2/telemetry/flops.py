"""The FLOPs that a model must spend, from its architecture alone, and those a chip can spend."""

import dataclasses
from typing import Any

import jax

from gpt2.config import GPTConfig
from gpt2.config.shapes import Shape
from gpt2.telemetry.chips import find_chip


def count_compute_parameters(cfg: GPTConfig) -> int:
    """Counts the parameters that take part in a matrix product, or sit beside one.

    All but tables whose rows are looked up: of positions, values, pairs of tokens, and of tokens if
    the head is untied. The vocabulary counts unpadded.
    """
    width = cfg.embed_dim
    hidden = cfg.hidden_dim
    H = cfg.head_size
    heads = cfg.num_heads * H
    centered = cfg.bias and cfg.norm == "layernorm"
    norm = width * (2 if centered else 1)
    num_norms = {"pre": 2, "post": 2, "sandwich": 4}[cfg.norm_position]
    into_mlp = 2 if cfg.is_gated else 1  # a gated MLP has a second way in
    into_attention = heads + 2 * cfg.kv_heads * H
    kernels = width * (into_attention + heads) + (into_mlp + 1) * width * hidden
    biases = into_attention + 2 * width + into_mlp * hidden if cfg.bias else 0
    mixes = 2 * (cfg.value_embeddings + cfg.value_residual + cfg.embedding_skip)
    by_head = cfg.num_heads * (
        cfg.attention_gate * (width + cfg.bias) + cfg.attention_sink
    )
    n = cfg.hyper_connections
    streams = 2 * ((n + 2) * (n + width) + 2 + norm) if n else 0
    layer = (
        kernels
        + biases
        + num_norms * norm
        + 2 * H * cfg.qk_norm
        + mixes
        + by_head
        + streams
    )
    once = (
        cfg.smear * (cfg.smear_width + 1)
        + cfg.backout
        + norm * (cfg.norm_position != "post")
    )
    return cfg.num_layers * layer + once + cfg.vocab_size * width


def model_flops_per_token(cfg: GPTConfig, shape: Shape | None = None) -> float:
    """Returns the FLOPs that training must spend on one token: `6 N + 12 L D T`.

    As in PaLM (Chowdhery et al. 2022, appendix B) and nanoGPT's `estimate_mfu`, scores above the
    diagonal count and recomputation does not. T: a layer's window if it has one; D: all its heads.
    A `shape` has its own context and window.
    """
    own: dict[str, Any] = dict(window=shape.window) if shape else {}
    T = shape.context_length if shape else cfg.context_length
    cfg = dataclasses.replace(cfg, **own)
    seen = sum(min(window or T, T) for window in cfg.windows)
    return float(
        6 * count_compute_parameters(cfg) + 12 * cfg.num_heads * cfg.head_size * seen
    )


def total_peak_flops(dtype: str) -> float | None:
    """Returns the FLOP/s that all devices reach in products of `dtype`, by data sheets, or None."""
    chips = [find_chip(device.device_kind) for device in jax.devices()]
    return sum(c.peak_flops(dtype) for c in chips if c) if all(chips) else None
