"""GPT-2 training in PyTorch, for `gpt2.benchmark` to measure beside: same model, same step.

Two peers: `torch`, the model in few lines as nanoGPT has it, with fused scaled-dot-product
attention, and `hf`, Hugging Face's GPT-2 with the same. `_compile` behind a name compiles it.
"""

import json
import resource
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gpt2.utils.turns import serve

SHAPE = ("num_layers", "num_heads", "embed_dim", "context_length", "vocab_size")


class Block(nn.Module):
    def __init__(self, num_heads: int, width: int):
        super().__init__()
        self.num_heads = num_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, D = x.shape
        q, k, v = (
            y.view(B, T, self.num_heads, -1).transpose(1, 2)
            for y in self.c_attn(self.ln_1(x)).split(D, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens [B, T] int64 to logits [B, T, V]."""

    def __init__(self, num_layers, num_heads, embed_dim, context_length, vocab_size):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, embed_dim)
        self.wpe = nn.Embedding(context_length, embed_dim)
        self.h = nn.Sequential(*(Block(num_heads, embed_dim) for _ in range(num_layers)))
        self.ln_f = nn.LayerNorm(embed_dim)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return F.linear(self.ln_f(self.h(x)), self.wte.weight)


def make_model(peer: str, case: dict[str, Any]) -> nn.Module:
    """Returns the untrained model of `torch`, `torch_compile`, `hf` or `hf_compile`."""
    shape = {name: case[name] for name in SHAPE}
    if not peer.startswith("hf"):
        return GPT(**shape)
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=case["num_layers"],
            n_head=case["num_heads"],
            n_embd=case["embed_dim"],
            n_positions=case["context_length"],
            vocab_size=case["vocab_size"],
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def make_step(peer: str, case: dict[str, Any], device: str):
    """Returns a function of tokens and targets [B, T] int64 that trains one step, to the loss."""
    model = make_model(peer, case).to(device)
    weights = list(model.parameters())
    groups = [
        dict(params=[w for w in weights if w.ndim >= 2], weight_decay=0.1),
        dict(params=[w for w in weights if w.ndim < 2], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    cast = torch.autocast(
        device, getattr(torch, case["compute"]), enabled=case["compute"] != "float32"
    )

    def loss_of(tokens, targets):
        with cast:
            output = model(tokens)
            logits = output if isinstance(output, torch.Tensor) else output.logits
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    if peer.endswith("_compile"):
        loss_of = torch.compile(loss_of)

    def step(tokens, targets):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        return loss.item()  # waits for the device

    return step


def main() -> None:
    peer, case = sys.argv[1], json.loads(sys.argv[2])
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as JAX computes float32 there
    step = make_step(peer, case, device)
    shape = (case["batch_size"], case["context_length"])
    tokens, targets = torch.randint(0, case["vocab_size"], (2, *shape), device=device)

    def info() -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated()
        return {"peak_bytes": peak, "versions": {"torch": torch.__version__}}

    serve(lambda: step(tokens, targets), info)


if __name__ == "__main__":
    main()
