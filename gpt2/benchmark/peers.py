"""GPT-2's training step in PyTorch, in few lines, as nanoGPT has it.

`gpt2.benchmark` times it in turn with ours: `torch`, or `torch_compile`, whose model and loss go
through `torch.compile`.
"""

import json
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from gpt2.benchmark import first_step
from gpt2.benchmark.first_step import FirstStep
from gpt2.benchmark.measure import serve
from gpt2.config import Config, ModelConfig, OptimConfig


class Block(nn.Module):
    """One layer: attention and MLP, each a residual branch after a norm."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        width, bias = cfg.embed_dim, cfg.bias
        self.num_heads = cfg.num_heads
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=bias) for _ in range(2))
        qkv, out = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.attn = nn.ModuleDict({"c_attn": qkv, "c_proj": out})
        wide, narrow = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)
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
        self._config, self._device = config, device
        self._model = GPT(config.model).to(device).train()
        self._weights = list(self._model.parameters())
        self._optimizer = _make_optimizer(config.optim, self._weights)
        self._dtype = torch.float32  # of logits
        self._loss: Callable = self._compute_loss
        if peer.endswith("_compile"):
            self._loss = torch.compile(self._compute_loss)
        self._batch = self._put(first_step.draw_batch(config))

    def step(self) -> float:
        """Takes a training step on the same batch, and returns its loss."""
        loss = self._clipped_gradients(self._batch)
        self._optimizer.step()
        return loss.item()  # waits for a GPU

    def first_steps(self) -> tuple[float, FirstStep]:
        """Returns the first step's seconds, and what steps from drawn weights compute."""
        weights = self._model.named()
        with torch.no_grad():
            for name, weight in weights.items():
                shape = weight.shape[::-1] if name.endswith("kernel") else weight.shape
                drawn = torch.from_numpy(first_step.draw_weight(name, tuple(shape)))
                weight.copy_(drawn.T if name.endswith("kernel") else drawn)
        before = {name: _sample(name, weight) for name, weight in weights.items()}
        began = time.perf_counter()
        loss = self._clipped_gradients(self._batch).item()
        seconds = time.perf_counter() - began
        gradients = {name: _sample(name, weight.grad) for name, weight in weights.items()}
        began = time.perf_counter()
        self._optimizer.step()
        self._weights[0].sum().item()  # the update is done
        seconds += time.perf_counter() - began
        for step in range(1, first_step.STEPS):
            self._clipped_gradients(self._put(first_step.draw_batch(self._config, step)))
            self._optimizer.step()
        after = {name: _sample(name, weight) for name, weight in weights.items()}
        return seconds, FirstStep(self._products(), loss, before, after, gradients)

    def _put(self, batch: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(batch).long().to(self._device)

    def _products(self) -> str:
        """Returns the type in which the last step multiplied."""
        precision, compute = torch.get_float32_matmul_precision(), str(self._dtype)[6:]
        return first_step.products_of(compute, precision, self._device.replace("cuda", "gpu"))

    def _clipped_gradients(self, batch: torch.Tensor) -> torch.Tensor:
        """Leaves the clipped gradients of all micro-batches, and returns the mean loss."""
        self._optimizer.zero_grad(set_to_none=True)
        number, total = self._config.train.accumulate_steps, torch.zeros((), device=self._device)
        for tokens, targets in zip(*(part.chunk(number) for part in batch), strict=True):
            loss = self._loss(tokens, targets) / number
            loss.backward()
            total += loss.detach()
        clip(self._weights, self._config.optim.clip_norm or float("inf"), self._device)
        return total

    def _compute_loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of tokens and targets `[B, T]` int64."""
        compute = getattr(torch, self._config.precision.compute)
        with torch.autocast(self._device, compute, enabled=compute != torch.float32):
            logits = self._model(tokens)
            self._dtype = logits.dtype
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


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


def _sample(name: str, value: torch.Tensor | None) -> np.ndarray:
    assert value is not None
    array = value.detach().cpu().numpy()
    return first_step.sample(name, array.T if name.endswith("kernel") else array)


def _make_optimizer(optim: OptimConfig, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        dict(params=[w for w in weights if w.ndim >= 2], weight_decay=optim.weight_decay),
        dict(params=[w for w in weights if w.ndim < 2], weight_decay=0.0),
    ]
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, optim.learning_rate, betas, optim.eps, fused=True)


def main() -> None:
    """Serves steps of the peer and the config that the command line gives."""
    peer, _, config = sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    # JAX's default on an NVIDIA GPU is TF32, which is `high`. A CPU has float32 alone.
    asked = os.environ.get("JAX_DEFAULT_MATMUL_PRECISION")
    torch.set_float32_matmul_precision("highest" if asked in ("highest", "float32") else "high")
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
