"""GPT-2 in Flax Linen: `init` and `apply` are pure functions of parameters and tokens.

Dimensions, here and in every comment of the project:
    B batch   T time   S cache length   D embed   N heads   H head size   F hidden   V vocabulary
    L layers   K heads of keys and values

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; details after OpenAI's
code: biases everywhere, tanh GELU, LayerNorm before each branch and after the last, tied head.

What GPT-2 does not have lies in gpt2/model/ingredients. It computes by the formulas of
gpt2/ops/plain.py; those in `ops` give way to faster functions where a backend has some.
"""

import dataclasses

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from gpt2.config import GPTConfig
from gpt2.errors import UserError
from gpt2.model.block import Block, Stream
from gpt2.model.ingredients import Flow, ingredients_of
from gpt2.model.layers import Embedding, Norm
from gpt2.ops import Ops, plain
from gpt2.ops.plain import LogitsLoss, logits_of, rope_frequencies, rotation
from gpt2.utils.remat import remat
from gpt2.utils.scan import in_layout, scan_layers
from gpt2.utils.trees import Batch, Tree

Params = dict[str, Tree]  # nested, by the names of modules


class GPT(nn.Module):
    """The language model.

    `init` gives parameters as plain nested dictionaries. Their numbers do not depend on whether
    layers are scanned or unrolled. `logical_axes` gives the names of their axes.

    Methods take tokens `[B, T]` int32, T up to `context_length` if positions are learned;
    `segments` `[B, T]` int32, if tokens see only those of their own segment, which lie together,
    and positions count from its first; and `deterministic`: False applies dropout, with the key
    `rngs={"dropout": key}`.
    """

    config: GPTConfig
    ops: Ops = Ops()

    def setup(self):
        """Creates the tables, which several methods share."""
        cfg = self.config
        axes = ("vocab", "table")
        self.wte = Embedding(cfg, self.ops, cfg.vocab_size, axes, stddev=cfg.init_std)
        if not cfg.tie_embeddings:
            self.lm_head = Embedding(
                cfg, self.ops, cfg.vocab_size, axes, stddev=cfg.init_std
            )

    def __call__(
        self,
        tokens: Array,
        *,
        segments: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """Returns the logits [B, T, V], float32, of the token after each one."""
        return self.logits(
            self.hidden(tokens, segments=segments, deterministic=deterministic)
        )

    def hidden(
        self,
        tokens: Array,
        *,
        segments: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """Returns the normalised output of the last layer, [B, T, D] in the compute type."""
        flow = _flow(tokens, segments, deterministic)
        return self._hidden(self.wte.table(), flow)

    def logits(self, hidden: Array) -> Array:
        """Returns the logits [B, T, V], float32, for rows [B, T, D] that `hidden` returned."""
        head = self.ops.whole(self.ops.pad_vocab(self._head()))
        return self._logits(hidden, self.ops.constrain(head, "vocab", "embed"))

    def loss(
        self,
        batch: Batch,
        logits_loss: LogitsLoss = plain.cross_entropy,
        *,
        deterministic: bool = True,
    ) -> tuple[Array, Tree]:
        """Returns `logits_loss(logits, batch)`, by default the sum of cross-entropies in nats.

        `batch` holds arrays `[B, T]`: `tokens` and `targets` int32 (-1: none), maybe `segments`,
        and others that `logits_loss` reads. It may be called with a part of the positions at a
        time; logits after the vocabulary's are padding, about -1e9.
        """
        cfg = self.config
        ops = self.ops
        chex.assert_equal_shape(list(batch.values()))  # others would broadcast
        chex.assert_type(batch["targets"], int)
        # Tokens are looked up in what the head takes: the gradients of both add up in one array.
        head = ops.pad_vocab(self._head())
        table = head if cfg.tie_embeddings else self.wte.table()
        flow = _flow(batch["tokens"], batch.get("segments"), deterministic)
        flow = flow.replace(has_target=batch["targets"] >= 0)
        hidden = self._hidden(table, flow)

        def from_logits(logits: Array, batch: Batch) -> tuple[Array, Tree]:
            logits = _change_logits(cfg, logits)
            return logits_loss(plain.hide_padding(logits, cfg.vocab_size), batch)

        with jax.named_scope("head"):
            head = ops.constrain(head, "vocab", "embed")
            return ops.head_loss(
                from_logits,
                hidden,
                head,
                batch,
                dtype=cfg.compute_dtype,
                logits_dtype=cfg.logits_dtype,
            )

    def newest_logits(
        self, tokens: Array, num_new: Array, length: Array, last: Array
    ) -> Array:
        """Returns the logits `[B, V]` after the last of `num_new` `[B]` new tokens `[B, T]`.

        Of those before, `length` `[B]` which end in `last` `[B]`, keys and values are in the
        collection `cache`, which these join: see gpt2/model/cache.py.
        """
        flow = _flow(tokens, None, True)
        positions = flow.positions + length[:, None]
        flow = flow.replace(positions=positions, last_token=last)
        hidden = self._hidden(self.wte.table(), flow)
        newest = (num_new - 1)[:, None, None]
        hidden = jnp.take_along_axis(hidden, newest, axis=1)
        # The head unpadded: padding would copy it at every token.
        return self._logits(hidden, self._head())[:, 0]

    @nn.compact
    def _hidden(self, table: Array, flow: Flow) -> Array:
        """Returns the normalised output of the last layer [B, T, D].

        `table` holds the rows that tokens look up.
        """
        cfg = self.config
        ops = self.ops
        extras = ingredients_of(cfg)
        x = ops.look_up_tokens(table, flow.tokens, cfg.compute_dtype)
        for extra in extras:
            x = extra.embedded(self, x, flow)
        if cfg.position == "learned":
            x = self._add_positions(x, flow)
        if cfg.position == "rope":
            flow = flow.replace(rotation=self._rotation(flow.positions))
        x = nn.Dropout(cfg.dropout, name="dropout")(x, deterministic=flow.deterministic)
        x = ops.constrain(x, "batch", "sequence", "embed")

        for extra in extras:
            x = extra.enter(self, x, flow)
        x, carried = self._layers((x, flow.carried), flow)
        flow = flow.replace(carried=carried)
        for extra in reversed(extras):
            x = extra.leave(self, x, flow)

        if all(extra.keeps_final_norm for extra in extras):
            x = Norm(cfg, ops, name="ln_f")(x)
        x = ops.constrain(x, "batch", "length", "embed")
        for extra in extras:
            x = extra.normed(self, x, flow)
        return x

    def _layers(self, stream: Stream, flow: Flow) -> Stream:
        """Returns the stream after all layers."""
        cfg = self.config
        block: type[nn.Module] = Block
        if cfg.remat != "none":
            static = () if cfg.scan_layers else ("layer",)
            block = remat(Block, cfg.remat, static=static, looped=cfg.loops_over_layers)
        if cfg.scan_layers:
            scanned = scan_layers(
                block,
                cfg.num_layers,
                per_layer=("layer",),
                unroll=cfg.scan_unroll,
            )
            numbers = jnp.arange(cfg.num_layers)
            return scanned(cfg, self.ops, name="h")(stream, numbers, flow)[0]
        for layer in range(cfg.num_layers):
            apply = block(cfg, self.ops, name=f"h_{layer}")
            stream, _ = apply(stream, layer, flow)
        return stream

    def _add_positions(self, x: Array, flow: Flow) -> Array:
        """Adds learned positions to `[B, T, D]`."""
        cfg = self.config
        chex.assert_axis_dimension_lteq(x, 1, cfg.context_length)
        axes = ("position", "table")  # drawn with 0.01, as OpenAI's
        wpe = Embedding(
            cfg, self.ops, cfg.context_length, axes, cfg.init_std / 2, name="wpe"
        )
        if flow.last_token is None and flow.segments is None:
            return self.ops.add_rows(x, wpe.table())
        return x + wpe(flow.positions)

    def _rotation(self, positions: Array) -> tuple[Array, Array]:
        """Returns what turns queries and keys at positions `[B or 1, T]`."""
        frequencies = rope_frequencies(self.config.rope_size, self.config.rope_base)
        length = 1.0
        for extra in ingredients_of(self.config):
            frequencies, factor = extra.frequencies(frequencies)
            length *= factor
        return rotation(positions, frequencies, length)

    def _head(self) -> Array:
        """Returns the output embedding, `[V, D]`."""
        return self.wte.table() if self.config.tie_embeddings else self.lm_head.table()

    def _logits(self, hidden: Array, head: Array) -> Array:
        logits = logits_of(hidden, head, self.config.compute_dtype)
        return _change_logits(self.config, logits)[..., : self.config.vocab_size]

    @nn.nowrap
    def draw(self, rngs: Array, tokens: Array) -> Params:
        """Returns unrolled parameters, boxed with the names of their axes."""
        config = dataclasses.replace(
            self.config, scan_layers=False, scan_unroll=1, remat="none"
        )
        by_formulas = self.clone(config=config, ops=Ops())
        return nn.Module.init(by_formulas, rngs, tokens)["params"]

    @nn.nowrap
    def init(self, rngs: Array, tokens: Array, *_: Tree, **__: Tree) -> Params:  # type: ignore[override]
        """Returns `{"params": ...}` drawn with the key `rngs`, for `tokens` of this shape.

        Flax's other arguments, which `nn.tabulate` gives, change nothing.
        """
        params = nn.unbox(self.draw(rngs, tokens))
        return {"params": in_layout(params, scanned=self.config.scan_layers)}

    @nn.nowrap
    def logical_axes(self) -> Tree:
        """Returns the names of every parameter's axes, a PartitionSpec in place of each leaf."""
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        axes = nn.get_partition_spec(
            jax.eval_shape(self.draw, jax.random.key(0), tokens)
        )
        jax.tree.map_with_path(_check_names, axes)

        def stack(*layers: PartitionSpec) -> PartitionSpec:
            return PartitionSpec("layers", *layers[0])

        return in_layout(axes, scanned=self.config.scan_layers, stack=stack)


def _check_names(path: tuple, axes: PartitionSpec) -> None:
    """Refuses a parameter that every device would hold whole, and one that nothing would decay."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if not axes:
        raise UserError(
            f"parameter {name} does not name its axes",
            "Read it by named_param of gpt2/model/layers.py",
        )
    sides = set(axes) - {"mix", "qkv", "head_size"}
    if len(sides) > 1 and not name.endswith(("kernel", "embedding", "bias")):
        raise UserError(
            f"parameter {name} is a matrix that no weight decay and no Muon would find",
            "End its name in kernel or embedding, or call its axes mix",
        )


def _flow(tokens: Array, segments: Array | None, deterministic: bool) -> Flow:
    """Returns what layers see of tokens [B, T]."""
    chex.assert_rank(tokens, 2)
    chex.assert_type(tokens, int)
    positions = jnp.arange(tokens.shape[1])[None]
    if segments is not None:
        chex.assert_equal_shape([tokens, segments])
        chex.assert_type(segments, int)
        positions = positions_within(segments)
    return Flow(tokens, positions, segments, deterministic=deterministic)


def _change_logits(config: GPTConfig, logits: Array) -> Array:
    """Returns what a model's ingredients make of logits."""
    for extra in ingredients_of(config):
        logits = extra.logits(logits)
    return logits


def positions_within(segments: Array) -> Array:
    """Returns how many tokens of its segment come before each, for `segments` [B, T] int32."""
    numbers = jnp.arange(segments.shape[1])[None]
    is_first = segments != jnp.roll(segments, 1, axis=1)
    firsts = jnp.where(is_first, numbers, 0)
    return numbers - jax.lax.cummax(firsts, axis=1)


def num_params(params: Tree) -> int:
    """Returns the number of parameters in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
