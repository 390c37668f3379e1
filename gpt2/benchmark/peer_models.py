"""The peers' models in PyTorch, and their weights by this project's names."""

import re
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SHAPE = ("num_layers", "num_heads", "embed_dim", "context_length", "vocab_size")


class Block(nn.Module):
    """One layer: attention and MLP, each a residual branch after a norm.

    Args:
        num_heads, width: of the model.
        eager: attention by its formula, in place of PyTorch's fused function.
    """

    def __init__(self, num_heads: int, width: int, eager: bool):
        super().__init__()
        self.num_heads, self.eager = num_heads, eager
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        qkv, out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn = nn.ModuleDict({"c_attn": qkv, "c_proj": out})
        wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.ModuleDict({"c_fc": wide, "c_proj": narrow})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[B, T, D]` to `[B, T, D]`."""
        B, T, D = x.shape
        q, k, v = (
            y.view(B, T, self.num_heads, -1).transpose(1, 2)
            for y in self.attn["c_attn"](self.ln_1(x)).split(D, dim=2)
        )
        if self.eager:
            y = eager_attention(q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(B, T, D))
        hidden = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.mlp["c_proj"](hidden)


def eager_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns causal attention `[B, N, T, H]` by its formula, all scores at once."""
    T = q.shape[2]
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(2, 3)) / q.shape[3] ** 0.5
    weights = F.softmax(scores.masked_fill(future, -torch.inf), dim=3, dtype=torch.float32)
    return weights.to(v.dtype) @ v


class GPT(nn.Module):
    """Tokens [B, T] int64 to logits [B, T, V]."""

    def __init__(self, num_layers, num_heads, embed_dim, context_length, vocab_size, eager=False):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, embed_dim)
        self.wpe = nn.Embedding(context_length, embed_dim)
        self.h = nn.Sequential(*(Block(num_heads, embed_dim, eager) for _ in range(num_layers)))
        self.ln_f = nn.LayerNorm(embed_dim)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps tokens `[B, T]` int64 to logits `[B, T, V]`."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return F.linear(self.ln_f(self.h(x)), self.wte.weight)


def make_model(peer: str, case: dict[str, Any]) -> nn.Module:
    """Returns the untrained model of a peer."""
    eager = case["attention"] == "eager"
    if not peer.startswith("hf"):
        return GPT(**{name: case[name] for name in SHAPE}, eager=eager)
    from transformers import GPT2Config, GPT2LMHeadModel

    options: dict[str, Any] = dict(
        n_layer=case["num_layers"],
        n_head=case["num_heads"],
        n_embd=case["embed_dim"],
        n_positions=case["context_length"],
        vocab_size=case["vocab_size"],
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=case["subject"] == "generate",
        attn_implementation="eager" if eager else "sdpa",
    )
    return GPT2LMHeadModel(GPT2Config(**options))


def named_weights(model: nn.Module) -> dict[str, tuple[nn.Parameter, bool]]:
    """Returns a model's parameters by this project's names.

    The flag says that the parameter is this project's transposed: a Linear's kernel is
    `[out, in]`, and Hugging Face's Conv1D has `[in, out]`.
    """
    linear = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    weights = {}
    for name, parameter in model.named_parameters():
        *path, last = re.sub(r"\bh\.(\d+)", r"h_\1", name.removeprefix("transformer.")).split(".")
        if last == "weight":
            kinds = {"wte": "embedding", "wpe": "embedding", "c": "kernel", "ln": "scale"}
            last = kinds[path[-1].partition("_")[0]]
        weights["/".join((*path, last))] = parameter, name in linear
    return weights
