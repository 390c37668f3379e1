"""Value embeddings: embeddings of the tokens, mixed into the values of attention in each layer.

The sources are modded-nanogpt, and arXiv 2410.17897. Each layer gets a table `[V, K * H]`. A layer
looks up the tokens in its table, and adds the rows to the values of attention, with two learned
weights, initialised to one half.
"""

import flax.linen as nn

from gpt2.model.ingredients.mix import Mix
from gpt2.model.layers import Embedding
from gpt2.model.seams import Context, Heads, Ingredient


class ValueEmbeddings(Ingredient):
    """The ingredient `model.value_embeddings`: embeddings of tokens, mixed into the values."""

    option = "value_embeddings"

    def heads(self, attention: nn.Module, heads: Heads, context: Context) -> Heads:
        """Look up the tokens in the table, and mix the rows into the values."""
        cfg = self.config
        ops = attention.ops
        table = Embedding(
            cfg,
            ops,
            cfg.vocab_size,
            ("vocab", "table"),
            stddev=cfg.init_std,
            width=cfg.kv_heads * cfg.head_size,
            name="value_embedding",
        )
        rows = table(context.tokens).reshape(heads.v.shape)
        rows = ops.constrain(rows, "batch", "length", "heads", "head_size")
        mix = Mix(cfg, ops, (0.5, 0.5), name="value_mix")
        return heads._replace(v=mix(heads.v, rows))
