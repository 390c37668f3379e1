"""GPT-2's training step in PyTorch, as nanoGPT computes it.

In `gpt2.lab.benchmark`, this step has the name `torch` or, with `torch.compile`, `torch_compile`.
"""

import json
import os
import resource
import sys

import torch
from torch import nn
from torch.nn import functional as F

from gpt2.config import Config, ModelConfig
from gpt2.lab.benchmark import first_steps
from gpt2.lab.benchmark.measure import Side
from gpt2.lab.benchmark.tables import Row


class Block(nn.Module):
    """One layer: attention and MLP, each a residual branch with a norm before it."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        width = cfg.embed_dim
        bias = cfg.bias
        self.num_heads = cfg.num_heads
        self.ln_1 = nn.LayerNorm(width, bias=bias)
        self.attn = nn.ModuleDict(
            {
                "c_attn": nn.Linear(width, 3 * width, bias),
                "c_proj": nn.Linear(width, width, bias),
            }
        )
        self.ln_2 = nn.LayerNorm(width, bias=bias)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(width, 4 * width, bias),
                "c_proj": nn.Linear(4 * width, width, bias),
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[B, T, D]` to `[B, T, D]`."""
        B, T, _ = x.shape
        qkv = self.attn["c_attn"](self.ln_1(x))
        qkv = qkv.view(B, T, 3, self.num_heads, -1)
        qkv = qkv.transpose(1, 3)
        q, k, v = qkv.unbind(dim=2)  # [B, N, T, H]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        x = x + self.attn["c_proj"](y)
        hidden = self.mlp["c_fc"](self.ln_2(x))
        hidden = F.gelu(hidden, approximate="tanh")
        return x + self.mlp["c_proj"](hidden)


class GPT(nn.Module):
    """GPT-2 in PyTorch. The initial weights come from the module `first_steps`."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.wte = nn.Embedding(cfg.vocab_size, cfg.embed_dim)
        self.wpe = nn.Embedding(cfg.context_length, cfg.embed_dim)
        layers = [Block(cfg) for _ in range(cfg.num_layers)]
        self.h = nn.Sequential(*layers)
        self.ln_f = nn.LayerNorm(cfg.embed_dim, bias=cfg.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens `[B, T]` int64 to logits `[B, T, V]`."""
        positions = self.wpe.weight[: tokens.shape[1]]
        x = self.wte(tokens) + positions
        x = self.ln_f(self.h(x))
        return F.linear(x, self.wte.weight)


# Class of a PyTorch module -> this project's name for the module's `weight`.
WEIGHTS = {nn.Embedding: "embedding", nn.Linear: "kernel", nn.LayerNorm: "scale"}


class Training(Side):
    """A peer: a model, an optimizer and a training step in PyTorch.

    `peer` is `torch` or, for a step that `torch.compile` compiles, `torch_compile`.
    """

    def __init__(self, peer: str, config: Config):
        self._config = config
        self._kind = "cuda" if torch.cuda.is_available() else "cpu"
        # On NVIDIA GPUs, JAX multiplies float32 in TF32 by default. PyTorch's name for this
        # precision is `high`. CPUs have no TF32.
        wanted = os.environ.get("JAX_DEFAULT_MATMUL_PRECISION")
        if self._kind == "cuda" and wanted != "highest":
            torch.set_float32_matmul_precision("high")
        self._model = GPT(config.model).to(self._kind)
        self._weights = list(self._model.parameters())
        optim = config.optim
        decay = optim.decay(config.train.num_steps)
        matrices = [weight for weight in self._weights if weight.ndim > 1]
        others = [weight for weight in self._weights if weight.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": decay},
                {"params": others, "weight_decay": 0.0},
            ],
            optim.learning_rate,
            (optim.beta1, optim.beta2),
            optim.eps,
            fused=True,
        )
        self._loss = self._compute_loss
        if peer == "torch_compile":
            self._loss = torch.compile(self._loss)

    def info(self) -> Row:
        """Return the device, the peak memory and the version for the row of results."""
        device = "cpu"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self._kind == "cuda":
            device = torch.cuda.get_device_name()
            peak = torch.cuda.max_memory_allocated()
        return {
            "device": f"1 x {device}",
            "peak_memory_bytes": peak,
            "version": f"torch {torch.__version__}",
        }

    def draw_batch(self, number: int) -> torch.Tensor:
        """Draw batch `number`: int64 tokens and targets `[2, B, T]` on the device."""
        drawn = first_steps.draw_batch(self._config, number)
        batch = torch.from_numpy(drawn).long()
        return batch.to(self._kind)

    def draw_weights(self) -> None:
        """Reset the weights to values of `first_steps.draw_weight`, and reset the optimizer."""
        for path, module in self._model.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                if name == "weight":
                    name = WEIGHTS[type(module)]
                matrix = weight.T if name == "kernel" else weight
                ours = f"{path}.{name}".replace("h.", "h_").replace(".", "/")
                drawn = first_steps.draw_weight(ours, tuple(matrix.shape))
                matrix.data.copy_(torch.from_numpy(drawn))
        self._optimizer.state.clear()

    def step(self, batch: torch.Tensor) -> float:
        """Take a training step, wait for it, and return the mean loss of all micro-batches."""
        self._optimizer.zero_grad(set_to_none=True)
        number = self._config.train.accumulate_steps
        total = torch.zeros((), device=self._kind)
        for tokens, targets in batch.chunk(number, dim=1):
            loss = self._loss(tokens, targets) / number
            loss.backward()
            total += loss.detach()
        length = self._config.optim.clip_norm or float("inf")
        nn.utils.clip_grad_norm_(self._weights, length)
        self._optimizer.step()
        return total.item()

    def _compute_loss(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean loss for int64 tokens and targets `[B, T]`."""
        compute = getattr(torch, self._config.precision.compute)
        is_mixed = compute != torch.float32
        with torch.autocast(self._kind, compute, enabled=is_mixed):
            logits = self._model(tokens)
            logits = logits.flatten(0, 1)
            return F.cross_entropy(logits, targets.flatten())


def main() -> None:
    """Call the methods of `Training` that standard input requests.

    The arguments on the command line are the name of the peer, and the config as JSON.
    """
    _, peer, text = sys.argv
    config = Config.from_dict(json.loads(text))
    Training(peer, config).serve()


if __name__ == "__main__":
    main()
