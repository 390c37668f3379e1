"""GPT-2 in Flax Linen: `init` and `apply` are pure functions of parameters and tokens.

Dimension letters, here and in all docstrings and comments of the project:
    B batch   T time   S cache length   D embed   N heads   H head size   F hidden   V vocabulary
    L layers   K heads of keys and values

The model was published by Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners". Details follow OpenAI's code: biases in all linear maps and norms, GELU in its tanh form,
LayerNorm before each branch and after the last one, and an output head that is the token embedding.

A model computes with the functions in `ops`: the reference implementations of gpt2/ops/plain.py, or
kernels with which a backend replaces them. Each ingredient (a part that GPT-2 does not have, such
as value residuals) has a file of its own in gpt2/model/ingredients. An ingredient changes values at
the seams of the model, which are hooks (gpt2/model/seams.py).
"""

import dataclasses
from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from gpt2.config import GPTConfig
from gpt2.model.attention import rope_rotation
from gpt2.model.block import Block
from gpt2.model.ingredients import ingredients_of
from gpt2.model.initial import defer, draw, traced_draw
from gpt2.model.layers import Embedding, Norm
from gpt2.model.seams import Context, Sublayer
from gpt2.ops import Ops, plain
from gpt2.ops.plain import LogitsLoss, SoftCap, compute_logits
from gpt2.utils.parameters import ParamInfo, is_declared, param_info
from gpt2.utils.remat import remat
from gpt2.utils.scan import in_layout, scan_layers
from gpt2.utils.trees import Batch, Tree

Params = dict[str, Tree]  # nested dictionaries whose keys are the names of modules


class GPT(nn.Module):
    """The GPT-2 language model.

    `init` returns parameters as nested dictionaries. The values of the parameters do not depend on
    whether layers are scanned or unrolled. `parameters` returns the `ParamInfo` of each parameter:
    its axis names, and what optimizers need to know about it.

    Methods take `tokens` `[B, T]` int32, where T is at most `context_length` if positions are
    learned. With `segments` `[B, T]` int32, a token attends only to tokens of its own segment, and
    positions count from the start of the segment. The tokens of a segment must be adjacent. With
    `deterministic=False` there is dropout, for which `apply` needs `rngs={"dropout": key}`.
    """

    config: GPTConfig
    ops: Ops = Ops()

    def setup(self):
        """Create the token embedding and the output head, which several methods read."""
        cfg = self.config
        table = partial(
            Embedding, cfg, self.ops, cfg.vocab_size, ("vocab", "table"), cfg.init_std
        )
        self.wte = table()
        self.lm_head = self.wte if cfg.tie_embeddings else table()
        self.logits_seam = LogitsSeam(cfg, self.ops)

    def __call__(
        self,
        tokens: Array,
        *,
        segments: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """Return the float32 logits `[B, T, V]` of the token after each position.

        A token attends only to tokens with the same number in `segments` `[B, T]`, if given. With
        `deterministic=False` there is dropout.
        """
        hidden = self.hidden(tokens, segments=segments, deterministic=deterministic)
        return self.logits(hidden, tokens)

    def hidden(
        self,
        tokens: Array,
        *,
        segments: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """Return the final hidden states, `[B, T, D]` in the compute dtype.

        The arguments are the same as for `GPT.__call__`.
        """
        context = make_context(tokens, segments, deterministic)
        return self._final_hidden(self.wte.table(), context)

    def logits(self, hidden: Array, tokens: Array) -> Array:
        """Return the float32 logits `[B, T, V]` for final hidden states `[B, T, D]`.

        `tokens` `[B, T]` are the input tokens at the same positions.
        """
        head = self.ops.whole(self.ops.pad_vocab(self.lm_head.table()))
        head = self.ops.constrain(head, "vocab", "embed")
        return self._logits(hidden, head, make_context(tokens))

    def loss(
        self,
        batch: Batch,
        logits_loss: LogitsLoss = plain.cross_entropy,
        *,
        deterministic: bool = True,
    ) -> tuple[Array, Tree]:
        """Return `logits_loss(logits, batch)`: the objective, and a tree of sums to log.

        By default, the objective is the sum of cross-entropies in nats, and the tree is empty.
        `batch` holds arrays `[B, T]`: `tokens` and `targets` int32 (-1: no target), optionally
        `segments`, and other arrays that `logits_loss` reads. `logits_loss` may be called with a
        part of the positions at a time. Its argument `logits` may have more than V columns; the
        columns after the vocabulary are padding, with logits of about -1e9.
        """
        cfg = self.config
        ops = self.ops
        chex.assert_equal_shape(list(batch.values()))  # unequal shapes would broadcast
        chex.assert_type(batch["targets"], int)
        # If the head is the token embedding, tokens are looked up in the padded head. The gradients
        # of the embedding and of the head are then accumulated in one array.
        head = ops.pad_vocab(self.lm_head.table())
        table = head if cfg.tie_embeddings else self.wte.table()
        context = make_context(batch["tokens"], batch.get("segments"), deterministic)
        context = context.replace(has_target=batch["targets"] >= 0)
        hidden = self._final_hidden(table, context)

        def loss_of_logits(logits: Array, part: Batch) -> tuple[Array, Tree]:
            logits = self._change_logits(logits, context)
            return logits_loss(plain.mask_padding(logits, cfg.vocab_size), part)

        with jax.named_scope("head"):
            head_loss = ops.head_loss
            if self._changes_logits:
                # A kernel scans over chunks of positions. Within a scan, an ingredient could
                # neither read its parameters nor report scalars.
                head_loss = plain.head_loss
                head = ops.whole(head)
            head = ops.constrain(head, "vocab", "embed")
            return head_loss(
                loss_of_logits,
                hidden,
                head,
                batch,
                dtype=cfg.compute_dtype,
                logits_dtype=cfg.logits_dtype,
            )

    def newest_logits(
        self, tokens: Array, num_new: Array, length: Array, last: Array
    ) -> Array:
        """Return the float32 logits `[B, V]` of the token that follows the new tokens of each row.

        The first `num_new` `[B]` tokens of each row of `tokens` `[B, T]` are new, and the rest are
        padding. `length` `[B]` is the number of previous tokens, and `last` `[B]` the last previous
        token. The collection `cache` (gpt2/model/cache.py) holds the keys and values of the
        previous tokens, and the keys and values of the new tokens are appended to it.
        """
        context = make_context(tokens)
        positions = context.positions + length[:, None]
        context = context.replace(positions=positions, last_token=last)
        hidden = self._final_hidden(self.wte.table(), context)
        newest = (num_new - 1)[:, None]
        hidden = jnp.take_along_axis(hidden, newest[..., None], axis=1)
        context = make_context(jnp.take_along_axis(tokens, newest, axis=1))
        # The head is not padded here, because padding would copy it for every token.
        return self._logits(hidden, self.lm_head.table(), context)[:, 0]

    @nn.compact
    def _final_hidden(self, table: Array, context: Context) -> Array:
        """Return the final hidden states `[B, T, D]`; tokens are looked up in `table`."""
        cfg, ops = self.config, self.ops
        x = ops.look_up_tokens(table, context.tokens, cfg.compute_dtype)
        for ingredient in ingredients_of(cfg):
            x = ingredient.embedded(self, x, context)
        if cfg.position == "learned":
            x = self._add_positions(x, context)
        if cfg.position == "rope":
            rotation = rope_rotation(cfg, context.positions)
            context = context.replace(rotation=rotation)
        dropout = nn.Dropout(cfg.dropout, name="dropout")
        x = dropout(x, deterministic=context.deterministic)
        x = ops.constrain(x, "batch", "sequence", "embed")

        layers: Sublayer = partial(self._layers, context=context)
        for ingredient in ingredients_of(cfg):
            layers = ingredient.layers(self, layers, context)
        x = layers(x)
        if cfg.norm_position != "post":
            x = Norm(cfg, ops, name="ln_f")(x)
        x = ops.constrain(x, "batch", "length", "embed")
        if cfg.mup_base_width:  # the head's multiplier, Yang et al. 2022, table 8
            x = x / cfg.width_ratio
        return x

    def _add_positions(self, x: Array, context: Context) -> Array:
        """Add learned position embeddings to `x` `[B, T, D]`."""
        cfg = self.config
        chex.assert_axis_dimension_lteq(x, 1, cfg.context_length)
        # 0.01 by default: half the standard deviation of token embeddings, as in OpenAI's code.
        stddev = cfg.init_std / 2
        axes = ("position", "table")
        wpe = Embedding(cfg, self.ops, cfg.context_length, axes, stddev, name="wpe")
        if context.last_token is None and context.segments is None:
            return self.ops.add_rows(x, wpe.table())
        return x + wpe(context.positions)

    def _layers(self, x: Array, context: Context) -> Array:
        """Apply all layers to the residual stream; update `context.carried`."""
        cfg = self.config
        stream = x, context.carried
        block: type[nn.Module] = Block
        if cfg.remat != "none":
            static = () if cfg.scan_layers else (2,)  # `layer`
            block = remat(Block, cfg.remat, static=static, looped=cfg.loops_over_layers)
        if cfg.scan_layers:
            L = cfg.num_layers
            block = scan_layers(block, L, unroll=cfg.scan_unroll)
            scanned = block(cfg, self.ops, name="h")
            stream, _ = scanned(stream, jnp.arange(L), context)
        else:
            for layer in range(cfg.num_layers):
                apply = block(cfg, self.ops, name=f"h_{layer}")
                stream, _ = apply(stream, layer, context)
        x, carried = stream
        context.carried.update(carried)
        return x

    def _logits(self, hidden: Array, head: Array, context: Context) -> Array:
        logits = compute_logits(hidden, head, self.config.compute_dtype)
        return self._change_logits(logits, context)[..., : self.config.vocab_size]

    def _change_logits(self, logits: Array, context: Context) -> Array:
        if self.config.logit_softcap:
            logits = SoftCap(self.config.logit_softcap)(logits)
        if self._changes_logits:
            logits = logits[..., : self.config.vocab_size]  # without padding
            logits = self.logits_seam(logits, context)
        return logits

    @property
    def _changes_logits(self) -> bool:
        """Whether an ingredient changes the logits, at the seam (hook) `logits`."""
        return any(each.acts_at("logits") for each in ingredients_of(self.config))

    @nn.nowrap
    def draw(self, rngs: Array, tokens: Array) -> Params:
        """Draw parameters with the random key `rngs`, in the layout of unrolled layers.

        Each layer has its own parameters, even if the model scans its layers. Each parameter is
        boxed in a `DeclaredParam`, together with its `ParamInfo`. The values of `tokens` do not
        matter.
        """
        return traced_draw(self._unrolled(), rngs, tokens)

    @nn.nowrap
    def _unrolled(self) -> "GPT":
        """Return the model whose parameters are drawn: each layer has its own parameters."""
        config = dataclasses.replace(
            self.config, scan_layers=False, scan_unroll=1, remat="none"
        )
        return self.clone(config=config, ops=Ops(param=defer))

    @nn.nowrap
    def init(self, rngs: Array, tokens: Array, *_: Tree, **__: Tree) -> Params:  # type: ignore[override]
        """Return `{"params": ...}`, drawn with the key `rngs`.

        The values of `tokens` do not matter. The other arguments of Flax's `init`, which
        `nn.tabulate` passes, have no effect, because all methods use the same parameters.
        """
        params = nn.unbox(draw(self._unrolled(), rngs, tokens))
        return {"params": in_layout(params, scanned=self.config.scan_layers)}

    @nn.nowrap
    def parameters(self) -> Tree:
        """Return a tree like the parameters, with the `ParamInfo` of each parameter."""
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        declared = jax.eval_shape(self.draw, jax.random.key(0), tokens)
        infos = jax.tree.map_with_path(param_info, declared, is_leaf=is_declared)

        def stack(*layers: ParamInfo) -> ParamInfo:
            return layers[0].stack()

        return in_layout(infos, scanned=self.config.scan_layers, stack=stack)

    @nn.nowrap
    def logical_axes(self) -> Tree:
        """Return a tree like the parameters, with each parameter's axis names as PartitionSpec."""
        return jax.tree.map(lambda info: PartitionSpec(*info.axes), self.parameters())


class LogitsSeam(nn.Module):
    """The module that calls the seam (hook) `logits` of every ingredient.

    An ingredient that needs parameters to change the logits creates the parameters in this module.
    """

    config: GPTConfig
    ops: Ops

    @nn.compact
    def __call__(self, logits: Array, context: Context) -> Array:
        """Apply the seam `logits` of every ingredient to float32 logits `[B, T, V]`."""
        for ingredient in ingredients_of(self.config):
            logits = ingredient.logits(self, logits, context)
        return logits


def make_context(
    tokens: Array, segments: Array | None = None, deterministic: bool = True
) -> Context:
    """Return the `Context` (what every module can read) for tokens `[B, T]` int32.

    Positions start at 0 in each segment or, without `segments`, in each row.
    """
    chex.assert_rank(tokens, 2)
    chex.assert_type(tokens, int)
    positions = jnp.arange(tokens.shape[1])[None]
    if segments is not None:
        chex.assert_equal_shape([tokens, segments])
        chex.assert_type(segments, int)
        positions = positions_within(segments)
    return Context(tokens, positions, segments, deterministic=deterministic)


def positions_within(segments: Array) -> Array:
    """Return each token's position in its segment, int32, for `segments` `[B, T]` int32."""
    numbers = jnp.arange(segments.shape[1])[None]
    is_first = segments != jnp.roll(segments, 1, axis=1)
    firsts = jnp.where(is_first, numbers, 0)
    return numbers - jax.lax.cummax(firsts, axis=1)


def num_params(params: Tree) -> int:
    """Return the number of parameters in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
