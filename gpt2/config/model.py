"""The shape of a model, and the sizes that OpenAI released."""

import dataclasses
from typing import Any, Self

from gpt2.config.options import DEFAULTS, Options, check_value
from gpt2.errors import UserError, require_choice

# name: (num_layers, num_heads, embed_dim). Radford et al. 2019, table 2.
SIZES = {
    "gpt2-124m": (12, 12, 768),
    "gpt2-355m": (24, 16, 1024),
    "gpt2-774m": (36, 20, 1280),
    "gpt2-1558m": (48, 25, 1600),
}


class ModelConfig(Options, group="model"):
    """The `model.` options; configs/default.py says what each means."""

    def __post_init__(self) -> None:
        super().__post_init__()
        uneven = not self.head_dim and self.embed_dim % self.num_heads
        if uneven:
            raise UserError("model.num_heads does not divide model.embed_dim")
        if self.num_heads % self.kv_heads:
            raise UserError("model.num_kv_heads does not divide num_heads")
        is_rope = self.position == "rope"
        pattern = self.window_pattern
        odd = is_rope and (self.rope_size % 2 or not self.rope_size)
        if odd:
            raise UserError(
                "model.position=rope needs an even number of a head's dimensions to turn"
            )
        given = {
            name
            for name, value in DEFAULTS.model.items()
            if getattr(self, name) != value
        }
        ropes = ", ".join(name for name in sorted(given) if name.startswith("rope_"))
        if ropes and not is_rope:
            raise UserError(f"model.{ropes} is for model.position=rope")
        scaled = {"rope_scaling", "rope_factor", "rope_context"} & given
        if len(scaled) in (1, 2):
            raise UserError("model.rope_scaling, rope_factor, rope_context go together")
        if "mlp_ratio" in given and self.mlp_dim:
            raise UserError("model.mlp_dim would ignore model.mlp_ratio")
        if "init" in given and self.mup_base_width:
            raise UserError("muP draws by itself, not by model.init")
        if "window_pattern" in given and not self.window:
            raise UserError("window_pattern needs model.window")
        if not pattern or set(pattern) - {"S", "L"}:
            raise UserError("model.window_pattern has other than S, L")
        hides = "S" in pattern and self.window < self.context_length
        if self.window and not hides:
            raise UserError(f"model.window={self.window} hides nothing")
        drops = self.dropout and self.attention not in ("auto", "plain")
        if drops:
            raise UserError(
                f"model.attention={self.attention} has no weights for model.dropout to drop"
            )
        wants_two = self.norm_position == "post" or self.hyper_connections
        what = "model.parallel_block has one sum, and norm_position=post or hyper_connections two"
        if self.parallel_block and wants_two:
            raise UserError(what)

    def canonical(self) -> Self:
        """Returns the same architecture with its sizes written in one way: 0 where that can be."""
        ratio, rest = divmod(self.hidden_dim, self.embed_dim)
        return dataclasses.replace(
            self,
            num_kv_heads=0 if self.kv_heads == self.num_heads else self.kv_heads,
            head_dim=0
            if self.head_size * self.num_heads == self.embed_dim
            else self.head_dim,
            mlp_ratio=DEFAULTS.model.mlp_ratio if rest else ratio,
            mlp_dim=self.hidden_dim if rest else 0,
        )

    @property
    def head_size(self) -> int:
        """Width of one attention head (H)."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def rope_size(self) -> int:
        """How many of a head's dimensions `model.position=rope` turns."""
        return int(self.head_size * self.rope_share)

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
    def smear_width(self) -> int:
        """Entries of an embedding that open its gate for `model.smear`, as in nanochat."""
        return min(24, self.embed_dim)

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


# Fields of GPTConfig, and the options that they are in a run.
COMPUTED = {
    "param_dtype": "precision.params",
    "compute_dtype": "precision.compute",
    "logits_dtype": "precision.logits",
    "remat": "memory.remat",
    "scan_layers": "memory.scan_layers",
    "scan_unroll": "memory.scan_unroll",
}


@dataclasses.dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """All that `gpt2.model.GPT` needs: the `model.` options, and how to compute them."""

    vocab_size: int = 50257  # GPT-2's own; a run's comes from its tokenizer
    param_dtype: str = DEFAULTS.precision.params
    compute_dtype: str = DEFAULTS.precision.compute
    logits_dtype: str = DEFAULTS.precision.logits
    remat: str = DEFAULTS.memory.remat
    scan_layers: bool = DEFAULTS.memory.scan_layers
    scan_unroll: int = DEFAULTS.memory.scan_unroll

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size == 0:
            raise UserError("model.vocab_size=0 is not known yet")
        for name, option in COMPUTED.items():
            check_value(option, getattr(self, name))

    @property
    def loops_over_layers(self) -> bool:
        """Whether the compiled program has a loop over layers, and not one block after another."""
        return self.scan_layers and self.scan_unroll < self.num_layers

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> "GPTConfig":
        """Returns the architecture of an OpenAI release, one of `SIZES`, with other fields set."""
        require_choice("model name", name, tuple(SIZES))
        num_layers, num_heads, embed_dim = SIZES[name]
        size = dict(num_layers=num_layers, num_heads=num_heads, embed_dim=embed_dim)
        return cls(**(size | overrides))
