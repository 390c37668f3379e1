"""The shape of a model: its options, validated, and the sizes that OpenAI released."""

import dataclasses
from typing import Any

from gpt2.errors import UserError, require_at_least, require_choice, require_fraction

ACTIVATIONS = ("gelu_tanh", "gelu", "relu", "relu_squared", "silu", "swiglu")
NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rope", "none")
ATTENTIONS = ("auto", "reference", "xla", "blocked", "cudnn", "splash")
DTYPES = ("float32", "bfloat16", "float16")
REMATS = ("none", "full", "dots", "dots_no_batch")

# name: (num_layers, num_heads, embed_dim). Radford et al. 2019, table 2.
SIZES = {
    "gpt2-124m": (12, 12, 768),
    "gpt2-355m": (24, 16, 1024),
    "gpt2-774m": (36, 20, 1280),
    "gpt2-1558m": (48, 25, 1600),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The `model.` options; configs/default.py says what each means."""

    vocab_size: int = 50257
    context_length: int = 1024
    num_layers: int = 12
    num_heads: int = 12
    embed_dim: int = 768
    mlp_ratio: int = 4
    dropout: float = 0.0
    bias: bool = True
    tie_embeddings: bool = True
    activation: str = "gelu_tanh"
    norm: str = "layernorm"
    position: str = "learned"
    qk_norm: bool = False
    logit_softcap: float = 0.0
    attention: str = "auto"

    def __post_init__(self):
        for name in ("context_length", "num_layers", "num_heads", "embed_dim", "mlp_ratio"):
            require_at_least(f"model.{name}", getattr(self, name), 1)
        require_at_least("model.vocab_size", self.vocab_size, 0)
        require_at_least("model.logit_softcap", self.logit_softcap, 0.0)
        require_fraction("model.dropout", self.dropout)
        require_choice("model.activation", self.activation, ACTIVATIONS)
        require_choice("model.norm", self.norm, NORMS)
        require_choice("model.position", self.position, POSITIONS)
        require_choice("model.attention", self.attention, ATTENTIONS)
        if self.dropout and self.attention not in ("auto", "reference"):
            raise UserError(
                f"model.attention={self.attention} keeps no attention weights for "
                f"model.dropout={self.dropout} to drop",
                "Use --config.model.attention=auto, or --config.model.dropout=0.0",
            )
        if self.embed_dim % self.num_heads:
            heads = [n for n in range(1, self.embed_dim + 1) if self.embed_dim % n == 0]
            nearest = min(heads, key=lambda n: abs(n - self.num_heads))
            raise UserError(
                f"model.embed_dim={self.embed_dim} is not a multiple of "
                f"model.num_heads={self.num_heads}",
                f"Use --config.model.num_heads={nearest}, for one",
            )
        if self.position == "rope" and self.head_size % 2:
            raise UserError(
                f"model.position=rope needs an even head size, not {self.head_size}",
                "Change --config.model.num_heads or --config.model.embed_dim",
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head (H)."""
        return self.embed_dim // self.num_heads

    @property
    def mlp_dim(self) -> int:
        """Width of the MLP's hidden layer (F)."""
        return self.mlp_ratio * self.embed_dim


@dataclasses.dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """All that `gpt2.model.GPT` needs: the architecture, and how it is computed."""

    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: str = "none"
    scan_layers: bool = False

    def __post_init__(self):
        super().__post_init__()
        require_at_least("model.vocab_size", self.vocab_size, 1)
        require_choice("precision.params", self.param_dtype, DTYPES)
        require_choice("precision.compute", self.compute_dtype, DTYPES)
        require_choice("memory.remat", self.remat, REMATS)

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> "GPTConfig":
        """Returns the architecture of an OpenAI release, `gpt2-124m` to `gpt2-1558m`."""
        require_choice("model name", name, tuple(SIZES), flag=False)
        num_layers, num_heads, embed_dim = SIZES[name]
        size = dict(num_layers=num_layers, num_heads=num_heads, embed_dim=embed_dim)
        return cls(**(size | overrides))
