"""GPT-2's training step in PyTorch, in few lines, as nanoGPT has it.

`gpt2.benchmark` times it as `torch`, or as `torch_compile`, through `torch.compile`.
"""

import json
import os
import re
import resource
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from gpt2.benchmark import first_steps
from gpt2.benchmark.measure import serve
from gpt2.config import Config, ModelConfig


class Block(nn.Module):
    """One layer: attention and MLP, each a residual branch after a norm."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        width = cfg.embed_dim
        bias = cfg.bias
        self.num_heads = cfg.num_heads
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=bias) for _ in range(2))
        qkv = nn.Linear(width, 3 * width, bias)
        out = nn.Linear(width, width, bias)
        self.attn = nn.ModuleDict({"c_attn": qkv, "c_proj": out})
        wide = nn.Linear(width, 4 * width, bias)
        narrow = nn.Linear(4 * width, width, bias)
        self.mlp = nn.ModuleDict({"c_fc": wide, "c_proj": narrow})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[B, T, D]` to `[B, T, D]`."""
        B, T, D = x.shape
        q, k, v = (
            y.view(B, T, self.num_heads, -1).transpose(1, 2)
            for y in self.attn["c_attn"](self.ln_1(x)).split(D, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(B, T, D))
        hidden = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.mlp["c_proj"](hidden)


class GPT(nn.Module):
    """GPT-2, whose weights `first_steps` draws."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.wte = nn.Embedding(cfg.vocab_size, cfg.embed_dim)
        self.wpe = nn.Embedding(cfg.context_length, cfg.embed_dim)
        self.h = nn.Sequential(*(Block(cfg) for _ in range(cfg.num_layers)))
        self.ln_f = nn.LayerNorm(cfg.embed_dim, bias=cfg.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps tokens `[B, T]` int64 to logits `[B, T, V]`."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return F.linear(self.ln_f(self.h(x)), self.wte.weight)

    def named(self) -> dict[str, nn.Parameter]:
        """Returns parameters by this project's names; a kernel is this project's transposed."""
        kinds = {"wte": "embedding", "wpe": "embedding", "c": "kernel", "ln": "scale"}
        found = {}
        for name, weight in self.named_parameters():
            *path, last = re.sub(r"\bh\.(\d+)", r"h_\1", name).split(".")
            last = kinds[path[-1].partition("_")[0]] if last == "weight" else last
            found["/".join((*path, last))] = weight
        return found


class Training:
    """A peer's model and optimizer, and its training step."""

    def __init__(self, peer: str, config: Config, device: str):
        self._config = config
        self._device = device
        self._model = GPT(config.model).to(device).train()
        self._weights = list(self._model.parameters())
        optim = config.optim
        matrices = {"params": [w for w in self._weights if w.ndim > 1]}
        others = {
            "params": [w for w in self._weights if w.ndim < 2],
            "weight_decay": 0.0,
        }
        groups: Any = [matrices | {"weight_decay": optim.weight_decay}, others]
        rate = optim.learning_rate
        betas = (optim.beta1, optim.beta2)
        self._optimizer = torch.optim.AdamW(groups, rate, betas, optim.eps, fused=True)
        self._dtype = torch.float32  # of logits
        loss = self._compute_loss
        self._loss: Any = torch.compile(loss) if peer == "torch_compile" else loss
        self._batch = self._put(first_steps.draw_batch(config))

    def step(self) -> None:
        """Takes a training step on the same batch, and waits for it."""
        self._run(self._batch)

    def first_steps(self) -> first_steps.FirstSteps:
        """Returns what steps from drawn weights compute, by the very function that is timed."""
        with torch.no_grad():
            for name, weight in self._model.named().items():
                shape = weight.shape[::-1] if name.endswith("kernel") else weight.shape
                drawn = torch.from_numpy(first_steps.draw_weight(name, tuple(shape)))
                weight.copy_(drawn.T if name.endswith("kernel") else drawn)
        self._optimizer.state.clear()
        batches = (
            first_steps.draw_batch(self._config, step)
            for step in range(first_steps.STEPS)
        )
        losses = [self._run(self._put(batch)) for batch in batches]
        types = (
            str(self._dtype).removeprefix("torch."),
            torch.get_float32_matmul_precision(),
        )
        products = first_steps.products_of(*types, self._device.replace("cuda", "gpu"))
        return first_steps.FirstSteps(products, losses)

    def _put(self, batch: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(batch).long().to(self._device)

    def _run(self, batch: torch.Tensor) -> float:
        """Takes a step, and returns the mean loss of all micro-batches."""
        self._optimizer.zero_grad(set_to_none=True)
        number = self._config.train.accumulate_steps
        total = torch.zeros((), device=self._device)
        for tokens, targets in zip(
            *(part.chunk(number) for part in batch), strict=True
        ):
            loss = self._loss(tokens, targets) / number
            loss.backward()
            total += loss.detach()
        clip(self._weights, self._config.optim.clip_norm or float("inf"), self._device)
        self._optimizer.step()
        return total.item()

    def _compute_loss(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Returns the mean loss of tokens and targets `[B, T]` int64."""
        compute = getattr(torch, self._config.precision.compute)
        with torch.autocast(self._device, compute, enabled=compute != torch.float32):
            logits = self._model(tokens)
            self._dtype = logits.dtype
            return F.cross_entropy(
                logits.view(-1, logits.shape[-1]), targets.reshape(-1)
            )


def clip(weights: list[nn.Parameter], length: float, device: str) -> None:
    """Clips gradients by their norm.

    On a CPU, PyTorch adds up the squares of a tensor one by one in float32, and the norm of 38
    million numbers is 0.3 % too small. Row by row it is exact, and takes no longer.
    """
    if device != "cpu":
        nn.utils.clip_grad_norm_(weights, length)
        return
    norm = torch.linalg.vector_norm
    norms = torch.stack([norm(norm(weight.grad, dim=-1)) for weight in weights])
    nn.utils.clip_grads_with_norm_(weights, length, norm(norms))


def main() -> None:
    """Serves steps of the peer and the config that the command line gives."""
    peer, config = sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # JAX's default on an NVIDIA GPU is TF32, which is `high`. A CPU has float32 alone.
    if device == "cuda" and os.environ.get("JAX_DEFAULT_MATMUL_PRECISION") != "highest":
        torch.set_float32_matmul_precision("high")
    # Compilation is timed, and must not find what an earlier process compiled.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        work = Training(peer, Config.from_dict(json.loads(config)), device)

        def info() -> dict[str, Any]:
            on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            peak = torch.cuda.max_memory_allocated() if device == "cuda" else on_host
            return {"peak_bytes": peak, "version": f"torch {torch.__version__}"}

        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        serve(f"1 x {name}", work, info)


if __name__ == "__main__":
    main()
