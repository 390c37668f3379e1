"""RMSNorm of queries and keys, per head (Dehghani et al. 2023; Qwen 3, arXiv 2505.09388).

Two scales `[H]` in each layer; norms of short rows.
"""

import flax.linen as nn

from gpt2.model.ingredients.base import Flow, Heads, Ingredient
from gpt2.model.layers import Norm


class QKNorm(Ingredient):
    """`model.qk_norm`."""

    option = "qk_norm"

    def heads(self, attention: nn.Module, heads: Heads, flow: Flow) -> Heads:
        """Normalises both."""
        cfg = self.config
        ops = attention.ops
        q = Norm(cfg, ops, "rmsnorm", "head_size", name="q_norm")(heads.q)
        k = Norm(cfg, ops, "rmsnorm", "head_size", name="k_norm")(heads.k)
        return heads._replace(q=q, k=k)
