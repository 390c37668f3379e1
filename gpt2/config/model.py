"""The shape of a model, and the sizes that OpenAI released."""

import inspect
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

from configs import default
from gpt2.config.options import changed, check_value
from gpt2.errors import UserError, require_choice

# name: (num_layers, num_heads, embed_dim). Radford et al. 2019, table 2.
SIZES = {
    "gpt2-124m": (12, 12, 768),
    "gpt2-355m": (24, 16, 1024),
    "gpt2-774m": (36, 20, 1280),
    "gpt2-1558m": (48, 25, 1600),
}


@dataclass(frozen=True)
class ModelConfig(default.Model):
    """The `model.` options, checked together, and the sizes that follow from them."""

    def __post_init__(self) -> None:
        if not self.head_dim and self.embed_dim % self.num_heads:
            raise UserError(
                f"model.num_heads={self.num_heads} does not divide embed_dim={self.embed_dim}"
            )
        if self.num_heads % self.kv_heads:
            raise UserError("model.num_kv_heads does not divide num_heads")
        given = changed(self)
        for name in sorted(given & default.READ_WITH.keys()):
            needed = default.READ_WITH[name]
            other, _, value = needed.partition("=")
            if other not in given or (value and getattr(self, other) != value):
                raise UserError(f"model.{name} is for model.{needed}")
        if self.position == "rope" and (self.rope_size < 2 or self.rope_size % 2):
            raise UserError(
                "model.position=rope needs an even number of a head's dimensions to turn"
            )
        scaled = {"rope_scaling", "rope_factor", "rope_context"}
        if scaled & given and scaled - given:
            raise UserError("model.rope_scaling, rope_factor, rope_context go together")
        if {"init", "mup_base_width"} <= given:
            raise UserError("muP draws by itself, not by model.init")
        # What weighs streams is no kernel; Muon's router would move more in a wider model.
        without_rule = given & {"hyper_connections", "num_experts"}
        if without_rule and "mup_base_width" in given:
            raise UserError(f"muP has no rule for model.{without_rule.pop()}")
        if not self.window_pattern or set(self.window_pattern) - {"S", "L"}:
            raise UserError("model.window_pattern has other than S, L")
        sees_all = self.window >= self.context_length or "S" not in self.window_pattern
        if self.window and sees_all:
            raise UserError(f"model.window={self.window} hides nothing")
        if "num_experts" in given and self.experts_per_token > self.num_experts:
            raise UserError("model.experts_per_token is more than num_experts")
        # By name, so that the option may go with its ingredient.
        has_two_sums = "hyper_connections" in given or (
            vars(self).get("norm_position") == "post"
        )
        if "parallel_block" in given and has_two_sums:
            raise UserError(
                "model.parallel_block has one sum, and norm_position=post or "
                "hyper_connections two"
            )

    @cached_property
    def head_size(self) -> int:
        """Width of one attention head (H)."""
        return self.head_dim or self.embed_dim // self.num_heads

    @cached_property
    def rope_size(self) -> int:
        """How many of a head's dimensions `model.position=rope` turns."""
        return int(self.head_size * self.rope_share)

    @cached_property
    def kv_heads(self) -> int:
        """Heads of keys and values (K)."""
        return self.num_kv_heads or self.num_heads

    @cached_property
    def is_gated(self) -> bool:
        """Whether a third linear map gates the MLP, as in activations whose name ends in `glu`."""
        return self.activation.endswith("glu")

    @cached_property
    def hidden_dim(self) -> int:
        """Width of the MLP's hidden layer (F)."""
        return self.mlp_dim or self.mlp_ratio * self.embed_dim

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """For each layer, how many tokens a position sees, itself included; 0: all."""
        widths = {"S": self.window, "L": 0}
        letters = self.window_pattern * self.num_layers
        return tuple(widths[letter] for letter in letters[: self.num_layers])


# Fields of GPTConfig, and the options that they are in a run.
COMPUTED = {
    "compute_dtype": "precision.compute",
    "logits_dtype": "precision.logits",
    "remat": "memory.remat",
    "scan_layers": "memory.scan_layers",
    "scan_unroll": "memory.scan_unroll",
}


@dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """All that `gpt2.model.GPT` needs: the `model.` options, and how to compute them."""

    vocab_size: int = 50257  # GPT-2's own; a run's comes from its tokenizer
    compute_dtype: str = default.Precision.compute
    logits_dtype: str = default.Precision.logits
    remat: str = default.Memory.remat
    scan_layers: bool = default.Memory.scan_layers
    scan_unroll: int = default.Memory.scan_unroll

    def __post_init__(self) -> None:
        for field in fields(self):
            option = COMPUTED.get(field.name, f"model.{field.name}")
            check_value(option, getattr(self, field.name))
        super().__post_init__()
        if self.vocab_size == 0:
            raise UserError("model.vocab_size=0 is not known yet")
        inspect.getmembers(self)  # computes the sizes below now, and in no trace

    @cached_property
    def loops_over_layers(self) -> bool:
        """Whether the compiled program has a loop over layers, and not one block after another."""
        return self.scan_layers and self.scan_unroll < self.num_layers

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> Self:
        """Returns the architecture of an OpenAI release, one of `SIZES`, with other fields set."""
        require_choice("model name", name, tuple(SIZES))
        num_layers, num_heads, embed_dim = SIZES[name]
        size = dict(num_layers=num_layers, num_heads=num_heads, embed_dim=embed_dim)
        return cls(**(size | overrides))
