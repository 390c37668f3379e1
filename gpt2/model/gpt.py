"""GPT-2 in Flax Linen: `init` and `apply` are pure functions of parameters and tokens.

Dimensions, here and in every comment of the project:
    B batch   T time   S cache length   D embed   N heads   H head size   F hidden   V vocabulary
    L layers   K heads of keys and values

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; details after OpenAI's
code: biases everywhere, tanh GELU, LayerNorm before each branch and after the last, tied head.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from gpt2.config import GPTConfig
from gpt2.model.attention import LayerInputs
from gpt2.model.block import Block, Stream
from gpt2.model.layers import Embedding, Norm, Smear, hashed, named_param
from gpt2.ops import cross_entropy, positions_per_chunk, rotation
from gpt2.ops.scores import soft_cap
from gpt2.parallel.rules import constrain
from gpt2.utils.remat import remat
from gpt2.utils.scan import in_layout, scan_layers

__all__ = ["GPT", "GPTConfig", "KVCache", "num_params"]


class KVCache(struct.PyTreeNode):
    """Keys and values of the tokens so far, and what else the next token reads.

    Attributes:
        layers: a pair of keys and values for each layer, `[B, K, S, H]` in the compute type. Keys
            and values are separate and heads come first, so that a step writes them in place and
            multiplies them as they are stored. If layers are scanned, a single pair with a leading
            axis L.
        length: `[B]` int32, tokens written per sequence.
        last: `[B]` int32, the last of them; means nothing where there is none.
    """

    layers: Any
    length: jax.Array
    last: jax.Array

    @classmethod
    def create(cls, config: GPTConfig, batch_size: int, max_length: int) -> "KVCache":
        """Returns an empty cache for sequences of up to `max_length` tokens."""
        L = config.num_layers
        shape = (batch_size, config.kv_heads, max_length, config.head_size)

        def pair(*shape: int) -> tuple[jax.Array, jax.Array]:
            return jnp.zeros(shape, config.compute_dtype), jnp.zeros(
                shape, config.compute_dtype
            )

        layers = (
            pair(L, *shape) if config.scan_layers else [pair(*shape) for _ in range(L)]
        )
        return cls(
            layers, jnp.zeros(batch_size, jnp.int32), jnp.zeros(batch_size, jnp.int32)
        )


class GPT(nn.Module):
    """The language model.

    `init` gives parameters as plain nested dictionaries. Their numbers do not depend on whether
    layers are scanned or unrolled. `logical_axes` gives the names of their axes.
    """

    config: GPTConfig

    def setup(self):
        """Creates the layers that the methods share."""
        cfg = self.config
        self.wte = Embedding(
            cfg, cfg.vocab_size, ("vocab", "table"), stddev=cfg.init_std
        )
        if cfg.position == "learned":
            axes = ("position", "table")
            self.wpe = Embedding(cfg, cfg.context_length, axes, stddev=cfg.init_std / 2)
        if cfg.smear:
            self.smear = Smear(cfg)
        if cfg.bigram_embeddings:
            axes = ("vocab", "table")
            self.bigram = Embedding(cfg, cfg.bigram_embeddings, axes, stddev=0.0)
        if cfg.backout:
            share = nn.initializers.constant(0.2)  # as in nanochat
            self.backout: jax.Array = named_param(
                self, "backout", share, (1,), ("mix",)
            )
        static = ("deterministic",) if cfg.scan_layers else ("layer", "deterministic")
        block = remat(Block, cfg.remat, static=static, looped=cfg.loops_over_layers)
        if cfg.scan_layers:
            scanned = scan_layers(
                block,
                cfg.num_layers,
                per_layer=("cache", "layer"),
                unroll=cfg.scan_unroll,
            )
            self.h: Any = scanned(cfg)
        else:
            self.h = [block(cfg) for _ in range(cfg.num_layers)]
        if cfg.norm_position != "post":
            self.ln_f = Norm(cfg)
        if not cfg.tie_embeddings:
            axes = ("vocab", "table")
            self.lm_head = Embedding(cfg, cfg.vocab_size, axes, stddev=cfg.init_std)
        self.dropout = nn.Dropout(cfg.dropout)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Returns the logits [B, T, V], float32, of the token after each one.

        Args:
            tokens: [B, T] int32, T up to `context_length`.
            segments: [B, T] int32; tokens see only those of their own segment, which lie together,
                and positions count from its first.
            deterministic: False applies dropout, with the key `rngs={"dropout": key}`.
        """
        return self.logits(
            self._hidden(tokens, segments=segments, deterministic=deterministic)[0]
        )

    def hidden(
        self, tokens: jax.Array, *, segments: jax.Array | None = None
    ) -> jax.Array:
        """Returns the normalised output of the last layer, [B, T, D] in the compute type.

        Arguments are those of `__call__`.
        """
        return self._hidden(tokens, segments=segments)[0]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits [B, T, V], float32, for rows [B, T, D] that `hidden` returned."""
        return self._logits(
            hidden, constrain(self._output().padded(), "vocab", "embed")
        )

    def loss(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        *,
        segments: jax.Array | None = None,
        deterministic: bool = True,
        ahead: Sequence[jax.Array | float] = (),
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Returns sums and counts by name, float32 scalars: `loss` is cross-entropy in nats.

        An auxiliary loss is one more name here, and its weighted sum is added to that of `loss`:
        each name is summed over the global batch, divided by its count and logged. Other arguments
        are those of `__call__` and of `gpt2.ops.cross_entropy`.

        Args:
            tokens: [B, T] int32.
            targets: [B, T] int32; -1 leaves a position out.
            ahead: weights of the losses of the targets 2, 3, ... tokens on, `loss_ahead_2` and so
                on, in the gradient of `loss`, not in its sum.
        """
        chex.assert_equal_shape([tokens, targets])
        cfg = self.config
        with jax.named_scope("head"):
            output = self._output()
            table = output.padded()
            shards = output.shards
        tied = table if cfg.tie_embeddings else None
        hidden, _ = self._hidden(
            tokens, segments=segments, deterministic=deterministic, table=tied
        )
        B, T = tokens.shape
        names = "loss", *(f"loss_ahead_{k}" for k in range(2, 2 + len(ahead)))
        with jax.named_scope("head"):
            head = constrain(table, "vocab", "embed")
            chunk = positions_per_chunk(B, T, head.shape, is_scarce=shards is not None)
            sums = cross_entropy(
                hidden,
                head,
                targets_ahead(targets, segments, len(names)),
                weights=ahead,
                vocab_size=cfg.vocab_size,
                logit_softcap=cfg.logit_softcap,
                z_loss=z_loss,
                label_smoothing=label_smoothing,
                dtype=cfg.compute_dtype,
                logits_dtype=cfg.logits_dtype,
                chunk=chunk,
                shards=shards,
            )
        return {
            name: (total, count)
            for name, total, count in zip(names, *sums, strict=True)
        }

    def extend(
        self, tokens: jax.Array, num_new: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Appends tokens to cached sequences: many at once for a prompt, one at a time after.

        Args:
            tokens: [B, T] int32, padded on the right.
            num_new: [B] int32, how many of the T are real, at least 1.
            cache: what came before.

        Returns:
            The logits [B, V] after each sequence's last real token, and the longer cache.
        """
        B = tokens.shape[0]
        chex.assert_shape([num_new, cache.length], (B,))
        chex.assert_type([num_new, cache.length], int)
        hidden, cache = self._hidden(tokens, cache=cache)
        end = (num_new - 1)[:, None]
        last = jnp.take_along_axis(tokens, end, axis=1)[:, 0]
        cache = cache.replace(length=cache.length + num_new, last=last)
        # The head unpadded: padding would copy it at every token.
        hidden = jnp.take_along_axis(hidden, end[..., None], axis=1)
        return self._logits(hidden, self._output().embedding)[:, 0], cache

    def _hidden(
        self, tokens, *, segments=None, deterministic=True, cache=None, table=None
    ):
        """Returns the normalised output of the last layer [B, T, D], and the cache."""
        cfg = self.config
        chex.assert_rank(tokens, 2)
        chex.assert_type(tokens, int)
        B, T = tokens.shape
        if segments is not None:
            chex.assert_shape(segments, (B, T))
            chex.assert_type(segments, int)
        if cfg.context_length < T and cfg.position == "learned":
            raise ValueError(
                f"{T} tokens are more than context_length={cfg.context_length}"
            )
        positions = (
            jnp.arange(T)[None] if segments is None else positions_within(segments)
        )
        x = self.wte(tokens, table)
        if cache is not None:
            positions = positions + cache.length[:, None]
        x = self._add_before(x, tokens, positions, cache)
        if cfg.position == "learned":
            if cache is None and segments is None:
                # A product, and so is its gradient: for a sum over 32 sequences, XLA:GPU stores the
                # stream with the batch innermost, and transposes it for every linear map (11 %).
                first = self.wpe.first(T)
                x += jnp.einsum(
                    "b,td->btd", jnp.ones(B, x.dtype), first, precision="highest"
                )
            else:
                x = x + self.wpe(positions)
        elif cfg.position == "sinusoidal":
            # The embedding is scaled too (Vaswani et al. 2017, section 3.4), under muP as at its
            # base width.
            waves = sinusoids(positions, cfg.embed_dim)
            scale = (cfg.embed_dim / cfg.width_ratio) ** 0.5
            x = (x * scale + waves).astype(cfg.compute_dtype)
        x = self.dropout(x, deterministic=deterministic)
        x = constrain(x, "batch", "sequence", "embed")
        x, layers = self._layers(x, cache, positions, segments, tokens, deterministic)
        x = x if cfg.norm_position == "post" else self.ln_f(x)
        x = constrain(x, "batch", "length", "embed")
        x = x / cfg.width_ratio if cfg.mup_base_width else x  # the head's multiplier
        return x, None if cache is None else cache.replace(layers=layers)

    def _add_before(self, x, tokens, positions, cache):
        """Adds to embeddings `[B, T, D]` what comes of the token before each, in its segment."""
        cfg = self.config
        exists = positions > 0
        if cfg.smear:
            first = x[:, :1] if cache is None else self.wte(cache.last[:, None])
            before = jnp.concatenate([first, x[:, :-1]], axis=1)
            x = self.smear(x, jnp.where(exists[..., None], before, 0))
        if cfg.bigram_embeddings:
            first = tokens[:, :1] if cache is None else cache.last[:, None]
            before = jnp.concatenate([first, tokens[:, :-1]], axis=1)
            before = jnp.where(exists, before, cfg.vocab_size)
            x = x + self.bigram(hashed(tokens, before, cfg.bigram_embeddings))
        return x

    def _layers(self, x, cache, positions, segments, tokens, deterministic):
        """Returns the stream `[B, T, D]` after all layers, and their caches."""
        cfg = self.config
        turned = None
        if cfg.position == "rope":
            scaling = cfg.rope_scaling, cfg.rope_factor, cfg.rope_context
            turned = rotation(positions, cfg.rope_size, cfg.rope_base, *scaling)
        if cfg.hyper_connections:
            x = jnp.broadcast_to(x, (cfg.hyper_connections, *x.shape))
        embedded = x if cfg.embedding_skip else None
        inputs = LayerInputs(
            positions, segments, tokens, embedded=embedded, rotation=turned
        )
        stream = Stream(x, middle=x if cfg.backout else None)
        if cfg.value_residual:
            values = jnp.zeros((*x.shape[-3:-1], cfg.kv_heads, cfg.head_size), x.dtype)
            values = constrain(values, "batch", "length", "heads", "head_size")
            stream = stream.replace(first_values=values)
        layers = None if cache is None else cache.layers
        if cfg.scan_layers:
            numbers = jnp.arange(cfg.num_layers)
            stream, layers = self.h(stream, layers, numbers, inputs, deterministic)
        else:
            layers = list(layers or [None] * cfg.num_layers)
            for number, block in enumerate(self.h):
                stream, layers[number] = block(
                    stream, layers[number], number, inputs, deterministic
                )
        x = stream.x
        if stream.middle is not None:
            x = (x - self.backout * stream.middle).astype(cfg.compute_dtype)
        return x.mean(0) if cfg.hyper_connections else x, layers

    def _output(self) -> Embedding:
        """Returns the layer that holds the output embedding."""
        return self.wte if self.config.tie_embeddings else self.lm_head

    def _logits(self, hidden: jax.Array, head: jax.Array) -> jax.Array:
        cfg = self.config
        logits = jnp.einsum(
            "btd,vd->btv",
            hidden,
            head.astype(cfg.compute_dtype),
            preferred_element_type=jnp.float32,
        )
        logits = soft_cap(logits, cfg.logit_softcap)
        return logits[..., : cfg.vocab_size]

    @nn.nowrap
    def _plain(self) -> "GPT":
        """Returns the model that draws parameters: unrolled, for tokens of any length."""
        plain: dict[str, Any] = dict(
            scan_layers=False, remat="none", attention="reference"
        )
        return GPT(dataclasses.replace(self.config, **plain))

    @nn.nowrap
    def _draw(self, rngs: Any, tokens: jax.Array) -> Any:
        """Returns unrolled parameters, boxed with the names of their axes."""
        return nn.Module.init_with_output(self._plain(), rngs, tokens)[1]["params"]

    @nn.nowrap
    def init(self, rngs: Any, tokens: jax.Array, *_: Any, **__: Any) -> dict:  # type: ignore[override]
        """Returns `{"params": ...}` drawn with the key `rngs`, for `tokens` of this shape.

        Flax's other arguments, which `nn.tabulate` gives, change nothing.
        """
        params = nn.unbox(self._draw(rngs, tokens))
        return {"params": in_layout(params, scanned=self.config.scan_layers)}

    @nn.nowrap
    def init_with_output(  # type: ignore[override]  # as for `init`
        self, rngs: Any, tokens: jax.Array, **options: Any
    ) -> tuple[Any, dict]:
        """Returns `apply(variables, tokens, **options)` and the variables that `init` draws."""
        variables = self.init(rngs, tokens)
        return self.apply(variables, tokens, **options), variables

    @nn.nowrap
    def logical_axes(self) -> Any:
        """Returns the names of every parameter's axes, a PartitionSpec in place of each leaf."""
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        axes = nn.get_partition_spec(
            jax.eval_shape(self._draw, jax.random.key(0), tokens)
        )
        stack = lambda *layers: PartitionSpec("layers", *layers[0])  # noqa: E731
        return in_layout(axes, scanned=self.config.scan_layers, stack=stack)


def positions_within(segments: jax.Array) -> jax.Array:
    """Returns how many tokens of its segment come before each, for `segments` [B, T] int32."""
    numbers = jnp.arange(segments.shape[1])[None]
    is_first = segments != jnp.roll(segments, 1, axis=1)
    return numbers - jax.lax.cummax(jnp.where(is_first, numbers, 0), axis=1)


def targets_ahead(
    targets: jax.Array, segments: jax.Array | None, number: int
) -> jax.Array:
    """Returns each position's target and those of the next ones in its segment, [B, T, number].

    A position without a target of its own, -1, has no others.
    """
    valid = targets >= 0
    each = [targets]
    for k in range(1, number):
        later = lambda x, k=k: jnp.pad(x[:, k:], ((0, 0), (0, k)), constant_values=-1)  # noqa: E731
        seen = valid if segments is None else valid & (later(segments) == segments)
        each.append(jnp.where(seen, later(targets), -1))
    return jnp.stack(each, axis=2)


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """Returns Vaswani et al. 2017, section 3.5, [B or 1, T, D], of positions [B or 1, T] int32.

    Sines are in even columns, cosines in odd ones; D is even.
    """
    angles = positions[..., None] * 10000.0 ** (-jnp.arange(0, width, 2) / width)
    waves = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return waves.reshape(*positions.shape, width)


def num_params(params: Any) -> int:
    """Returns the number of parameters in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
