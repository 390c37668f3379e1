"""The shape of a model: its options, validated, and the sizes that OpenAI released."""

import dataclasses
import math
from typing import Any, Self

from gpt2.config.choices import CHOICES, DEFAULTS, refuse_ignored, require_choices
from gpt2.errors import (
    UserError,
    require_at_least,
    require_choice,
    require_finite,
    require_fraction,
    require_positive,
)

# name: (num_layers, num_heads, embed_dim). Radford et al. 2019, table 2.
SIZES = {
    "gpt2-124m": (12, 12, 768),
    "gpt2-355m": (24, 16, 1024),
    "gpt2-774m": (36, 20, 1280),
    "gpt2-1558m": (48, 25, 1600),
}


# Even scanned layers are traced one by one: more than these take minutes before anything is known.
_MOST_LAYERS = 1000

# Of logits and scores; a softmax of smaller ones is nearly uniform.
_LEAST_SOFTCAP = 0.1


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The `model.` options; configs/default.py says what each means."""

    vocab_size: int = DEFAULTS.model.vocab_size
    context_length: int = DEFAULTS.model.context_length
    num_layers: int = DEFAULTS.model.num_layers
    num_heads: int = DEFAULTS.model.num_heads
    num_kv_heads: int = DEFAULTS.model.num_kv_heads
    embed_dim: int = DEFAULTS.model.embed_dim
    mlp_ratio: int = DEFAULTS.model.mlp_ratio
    mlp_dim: int = DEFAULTS.model.mlp_dim
    dropout: float = DEFAULTS.model.dropout
    bias: bool = DEFAULTS.model.bias
    tie_embeddings: bool = DEFAULTS.model.tie_embeddings
    activation: str = DEFAULTS.model.activation
    norm: str = DEFAULTS.model.norm
    norm_eps: float = DEFAULTS.model.norm_eps
    norm_position: str = DEFAULTS.model.norm_position
    position: str = DEFAULTS.model.position
    rope_base: float = DEFAULTS.model.rope_base
    qk_norm: bool = DEFAULTS.model.qk_norm
    window: int = DEFAULTS.model.window
    window_pattern: str = DEFAULTS.model.window_pattern
    attention_softcap: float = DEFAULTS.model.attention_softcap
    logit_softcap: float = DEFAULTS.model.logit_softcap
    value_embeddings: bool = DEFAULTS.model.value_embeddings
    value_residual: bool = DEFAULTS.model.value_residual
    embedding_skip: bool = DEFAULTS.model.embedding_skip
    parallel_block: bool = DEFAULTS.model.parallel_block
    init: str = DEFAULTS.model.init
    init_std: float = DEFAULTS.model.init_std
    zero_init_projections: bool = DEFAULTS.model.zero_init_projections
    mup_base_width: int = DEFAULTS.model.mup_base_width
    attention: str = DEFAULTS.model.attention

    def __post_init__(self):
        for name in ("context_length", "num_layers", "num_heads", "embed_dim", "mlp_ratio"):
            require_at_least(f"model.{name}", getattr(self, name), 1, DEFAULTS.model[name])
        if self.num_layers > _MOST_LAYERS:
            raise UserError(
                f"model.num_layers={self.num_layers} is above {_MOST_LAYERS}",
                f"For example, use --config.model.num_layers={DEFAULTS.model.num_layers}",
            )
        for name in ("vocab_size", "num_kv_heads", "mlp_dim", "window", "mup_base_width"):
            require_at_least(f"model.{name}", getattr(self, name), 0)
        for name in ("logit_softcap", "attention_softcap", "init_std"):
            require_finite(f"model.{name}", getattr(self, name), minimum=0.0)
        for name in ("logit_softcap", "attention_softcap"):
            if 0 < getattr(self, name) < _LEAST_SOFTCAP:
                raise UserError(
                    f"model.{name}={getattr(self, name)} leaves all tokens alike",
                    f"For example, use --config.model.{name}=30.0, or 0 for none",
                )
        for name in ("norm_eps", "rope_base"):
            require_positive(f"model.{name}", getattr(self, name), DEFAULTS.model[name])
        require_fraction("model.dropout", self.dropout)
        require_choices("model", self)
        self._check_heads()
        self._check_window()
        self._check_ignored()

    def _check_heads(self):
        if self.embed_dim % self.num_heads:
            nearest = nearest_divisor(self.embed_dim, self.num_heads)
            raise UserError(
                f"model.embed_dim={self.embed_dim} is not a multiple of "
                f"model.num_heads={self.num_heads}",
                f"For example, use --config.model.num_heads={nearest}",
            )
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            nearest = nearest_divisor(self.num_heads, self.num_kv_heads)
            raise UserError(
                f"model.num_heads={self.num_heads} is not a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}",
                f"For example, use --config.model.num_kv_heads={nearest}",
            )
        if self.position == "rope" and self.head_size % 2:
            raise UserError(
                f"model.position=rope needs an even head size, not {self.head_size}",
                f"For example, use --config.model.embed_dim={2 * self.num_heads * self.head_size}",
            )
        if self.position == "sinusoidal" and self.embed_dim % 2:
            raise UserError(
                f"model.position=sinusoidal needs an even model.embed_dim, not {self.embed_dim}",
                f"For example, use --config.model.embed_dim={self.embed_dim + self.num_heads}",
            )

    def _check_window(self):
        pattern, usual = self.window_pattern, DEFAULTS.model.window_pattern
        if not pattern or set(pattern) - {"S", "L"}:
            raise UserError(
                f"model.window_pattern={pattern!r} is not made of S (window) and L (all)",
                f"Use --config.model.window_pattern={usual}, or SSSL for a window in three of four "
                "layers",
            )
        if not self.window:
            if pattern != usual:
                ways = [f"--config.model.window_pattern={usual}"]
                if self.context_length > 1:
                    ways.insert(0, f"--config.model.window={max(self.context_length // 4, 1)}")
                raise UserError(
                    f"model.window_pattern={pattern} is ignored while model.window=0",
                    f"Use {', or '.join(ways)}",
                )
            return
        if self.window >= self.context_length:
            raise UserError(
                f"model.window={self.window} hides nothing of "
                f"model.context_length={self.context_length}",
                f"For example, use --config.model.window={self.context_length // 4}",
            )
        if len(pattern) > self.num_layers:
            raise UserError(
                f"model.window_pattern={pattern} has more letters than model.num_layers="
                f"{self.num_layers}",
                f"Use --config.model.window_pattern={pattern[: self.num_layers]}",
            )
        if "S" not in pattern:
            raise UserError(
                f"model.window_pattern={pattern} gives no layer the window",
                "Use --config.model.window=0 --config.model.window_pattern=S",
            )

    def _check_ignored(self):
        """Refuses options that others make meaningless."""
        refuse_ignored("model.rope_base", self.rope_base, "rope", "model.position", self.position)
        if self.mlp_dim and self.mlp_ratio != DEFAULTS.model.mlp_ratio:
            raise UserError(
                f"model.mlp_dim={self.mlp_dim} would ignore model.mlp_ratio={self.mlp_ratio}",
                f"Use --config.model.mlp_ratio={DEFAULTS.model.mlp_ratio}, or "
                "--config.model.mlp_dim=0",
            )
        if self.dropout and self.attention not in ("auto", "reference"):
            raise UserError(
                f"model.attention={self.attention} keeps no attention weights for "
                f"model.dropout={self.dropout} to drop",
                "Use --config.model.attention=auto, or --config.model.dropout=0.0",
            )
        if self.parallel_block and self.norm_position == "post":
            raise UserError(
                "model.parallel_block has a single sum, and model.norm_position=post wants two",
                "Use --config.model.norm_position=pre or sandwich",
            )
        if self.value_residual and self.num_layers == 1:
            raise UserError(
                "model.value_residual is ignored in a model of one layer",
                "Use --config.model.value_residual=False",
            )
        if self.mup_base_width and self.init != "normal":
            raise UserError(
                f"model.mup_base_width draws kernels its own way and would ignore "
                f"model.init={self.init}",
                "Use --config.model.init=normal",
            )

    def canonical(self) -> Self:
        """Returns the same architecture with its sizes written in one way.

        `num_kv_heads` is 0 where it equals `num_heads`. `mlp_ratio` gives the width of the MLP
        where it can, and `mlp_dim` elsewhere.
        """
        ratio, rest = divmod(self.hidden_dim, self.embed_dim)
        return dataclasses.replace(
            self,
            num_kv_heads=0 if self.kv_heads == self.num_heads else self.kv_heads,
            mlp_ratio=DEFAULTS.model.mlp_ratio if rest else ratio,
            mlp_dim=self.hidden_dim if rest else 0,
        )

    @property
    def head_size(self) -> int:
        """Width of one attention head (H)."""
        return self.embed_dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values (K)."""
        return self.num_kv_heads or self.num_heads

    @property
    def is_gated(self) -> bool:
        """Whether a third linear map gates the MLP, as in activations whose name ends in `glu`."""
        return self.activation.endswith("glu")

    @property
    def hidden_dim(self) -> int:
        """Width of the MLP's hidden layer (F)."""
        return self.mlp_dim or self.mlp_ratio * self.embed_dim

    @property
    def windows(self) -> tuple[int, ...]:
        """For each layer, how many tokens a position sees, itself included; 0: all."""
        pattern = self.window_pattern
        letters = (pattern[i % len(pattern)] for i in range(self.num_layers))
        return tuple(self.window if letter == "S" else 0 for letter in letters)

    @property
    def width_ratio(self) -> float:
        """Width over the width that rates were tuned at; 1 without muP."""
        return self.embed_dim / self.mup_base_width if self.mup_base_width else 1.0


def nearest_divisor(number: int, wanted: int) -> int:
    """Returns the divisor of `number` that is nearest to `wanted`."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return min((*small, *(number // n for n in small)), key=lambda n: (abs(n - wanted), n))


@dataclasses.dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """All that `gpt2.model.GPT` needs: the architecture, and how to compute it."""

    vocab_size: int = 50257  # GPT-2's own; a run's comes from its tokenizer
    param_dtype: str = DEFAULTS.precision.params
    compute_dtype: str = DEFAULTS.precision.compute
    logits_dtype: str = DEFAULTS.precision.logits
    remat: str = DEFAULTS.memory.remat
    scan_layers: bool = DEFAULTS.memory.scan_layers
    scan_unroll: int = DEFAULTS.memory.scan_unroll

    def __post_init__(self):
        super().__post_init__()
        require_at_least("model.vocab_size", self.vocab_size, 1)
        require_choice("precision.params", self.param_dtype, CHOICES["precision.compute"])
        require_choice("precision.compute", self.compute_dtype, CHOICES["precision.compute"])
        require_choice("precision.logits", self.logits_dtype, CHOICES["precision.logits"])
        require_choice("memory.remat", self.remat, CHOICES["memory.remat"])
        require_at_least("memory.scan_unroll", self.scan_unroll, 1)

    @property
    def loops_over_layers(self) -> bool:
        """Whether the compiled program has a loop over layers, and not one block after another."""
        return self.scan_layers and self.scan_unroll < self.num_layers

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
