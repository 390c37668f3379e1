"""The shape of a model: its options, validated, and the sizes that OpenAI released."""

import dataclasses
from typing import Any

from gpt2.config.choices import CHOICES, DEFAULTS, require_choices
from gpt2.errors import UserError, require_at_least, require_choice, require_fraction

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

    vocab_size: int = DEFAULTS.model.vocab_size
    context_length: int = DEFAULTS.model.context_length
    num_layers: int = DEFAULTS.model.num_layers
    num_heads: int = DEFAULTS.model.num_heads
    embed_dim: int = DEFAULTS.model.embed_dim
    mlp_ratio: int = DEFAULTS.model.mlp_ratio
    dropout: float = DEFAULTS.model.dropout
    bias: bool = DEFAULTS.model.bias
    tie_embeddings: bool = DEFAULTS.model.tie_embeddings
    activation: str = DEFAULTS.model.activation
    norm: str = DEFAULTS.model.norm
    position: str = DEFAULTS.model.position
    qk_norm: bool = DEFAULTS.model.qk_norm
    logit_softcap: float = DEFAULTS.model.logit_softcap
    attention: str = DEFAULTS.model.attention

    def __post_init__(self):
        for name in ("context_length", "num_layers", "num_heads", "embed_dim", "mlp_ratio"):
            require_at_least(f"model.{name}", getattr(self, name), 1)
        require_at_least("model.vocab_size", self.vocab_size, 0)
        require_at_least("model.logit_softcap", self.logit_softcap, 0.0)
        require_fraction("model.dropout", self.dropout)
        require_choices("model", self)
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
                f"For example, use --config.model.num_heads={nearest}",
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
    def is_gated(self) -> bool:
        """Whether a third linear map gates the MLP, as in activations whose name ends in `glu`."""
        return self.activation.endswith("glu")

    @property
    def mlp_dim(self) -> int:
        """Width of the MLP's hidden layer (F)."""
        return self.mlp_ratio * self.embed_dim


@dataclasses.dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """All that `gpt2.model.GPT` needs: the architecture, and how to compute it."""

    vocab_size: int = 50257  # GPT-2's own; a run's comes from its tokenizer
    param_dtype: str = DEFAULTS.precision.params
    compute_dtype: str = DEFAULTS.precision.compute
    remat: str = DEFAULTS.memory.remat
    scan_layers: bool = DEFAULTS.memory.scan_layers

    def __post_init__(self):
        super().__post_init__()
        require_at_least("model.vocab_size", self.vocab_size, 1)
        require_choice("precision.params", self.param_dtype, CHOICES["precision.compute"])
        require_choice("precision.compute", self.compute_dtype, CHOICES["precision.compute"])
        require_choice("memory.remat", self.remat, CHOICES["memory.remat"])

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> "GPTConfig":
        """Returns the architecture of an OpenAI release.

        Args:
            name: one of `SIZES`, `gpt2-124m` to `gpt2-1558m`.
            **overrides: values for other fields.

        Raises:
            UserError: there is no release of this name, or an option cannot work.
        """
        require_choice("model name", name, tuple(SIZES), flag=False)
        num_layers, num_heads, embed_dim = SIZES[name]
        size = dict(num_layers=num_layers, num_heads=num_heads, embed_dim=embed_dim)
        return cls(**(size | overrides))
