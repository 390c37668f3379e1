"""GPT-2 in PyTorch, which `gpt2.benchmark` compares with: same model, same step.

`torch` is the model in few lines, as nanoGPT has it. `hf` is Hugging Face's GPT-2. Both use fused
scaled-dot-product attention. `_compile` behind a name compiles the model.
"""

import atexit
import json
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from gpt2.benchmark.turns import serve

SHAPE = ("num_layers", "num_heads", "embed_dim", "context_length", "vocab_size")


class Block(nn.Module):
    """One layer: attention and MLP, each a residual branch after a norm."""

    def __init__(self, num_heads: int, width: int):
        super().__init__()
        self.num_heads = num_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[B, T, D]` to `[B, T, D]`."""
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
        """Maps tokens `[B, T]` int64 to logits `[B, T, V]`."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return F.linear(self.ln_f(self.h(x)), self.wte.weight)


def make_model(peer: str, case: dict[str, Any]) -> nn.Module:
    """Returns the untrained model of `torch`, `torch_compile`, `hf` or `hf_compile`."""
    shape = {name: case[name] for name in SHAPE}
    if not peer.startswith("hf"):
        return GPT(**shape)
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
        use_cache=case["subject"] == "generate",
        attn_implementation="sdpa",
    )
    return GPT2LMHeadModel(GPT2Config(**options))


def make_step(peer: str, case: dict[str, Any], device: str):
    """Returns a function of tokens and targets [B, T] int64 that does one step of the subject."""
    return _SUBJECTS[case["subject"]](peer, case, device)


def _training(peer: str, case: dict[str, Any], device: str):
    model = make_model(peer, case).to(device)
    weights = list(model.parameters())
    groups = [
        dict(params=[w for w in weights if w.ndim >= 2], weight_decay=0.1),
        dict(params=[w for w in weights if w.ndim < 2], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    loss_of = _loss(model, peer, case, device)

    def step(tokens, targets):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        return loss.item()  # waits for the device

    return step


def _evaluation(peer: str, case: dict[str, Any], device: str):
    loss_of = _loss(make_model(peer, case).to(device).eval(), peer, case, device)

    def step(tokens, targets):
        with torch.no_grad():
            return loss_of(tokens, targets).item()

    return step


def _loss(model: nn.Module, peer: str, case: dict[str, Any], device: str):
    """Returns the function of tokens and targets [B, T] int64 to their mean loss."""
    cast = torch.autocast(
        device, getattr(torch, case["compute"]), enabled=case["compute"] != "float32"
    )

    def loss_of(tokens, targets):
        with cast:
            output = model(tokens)
            logits = output if isinstance(output, torch.Tensor) else output.logits
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    return torch.compile(loss_of) if peer.endswith("_compile") else loss_of


def _generation(peer: str, case: dict[str, Any], device: str):
    """Transformers' own loop with its cache: greedy, and not ended by end-of-text."""
    model: Any = make_model(peer, case).to(device, getattr(torch, case["compute"])).eval()
    half = case["context_length"] // 2

    def step(tokens, targets):
        prompts = tokens[:, :half]
        with torch.no_grad():
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=half,
                min_new_tokens=half,
                do_sample=False,
                pad_token_id=0,
            )

    return step


def _reading(peer: str, case: dict[str, Any], device: str):
    """Random windows of a memory-mapped file of uint16, as nanoGPT's get_batch reads them."""
    B, T = case["batch_size"], case["context_length"]
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory)
    path = Path(directory) / "train.bin"
    np.zeros(2**24, np.uint16).tofile(path)

    def step(tokens, targets):
        data = np.memmap(path, np.uint16, "r")  # anew each time, as nanoGPT avoids a leak
        starts = torch.randint(len(data) - T, (B,)).tolist()
        for shift in (0, 1):
            rows = [data[i + shift : i + shift + T].astype(np.int64) for i in starts]
            torch.stack([torch.from_numpy(row) for row in rows])

    return step


_SUBJECTS = {
    "train": _training,
    "eval": _evaluation,
    "generate": _generation,
    "data": _reading,
}


def main() -> None:
    """Serves steps of the peer and the case that the command line gives."""
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
