"""The options of the model, and the sizes of the models that OpenAI released."""

import inspect
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from configs import default
from gpt2.config.options import Options, check_effects, read_group
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
                f"model.num_heads={self.num_heads} does not divide "
                f"model.embed_dim={self.embed_dim}",
                "Choose a number of heads that divides the width, or set model.head_dim",
            )
        if self.num_heads % self.kv_heads:
            raise UserError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide "
                f"model.num_heads={self.num_heads}",
                "Choose a model.num_kv_heads that divides model.num_heads",
            )
        if self.position == "rope" and (self.rope_size < 2 or self.rope_size % 2):
            raise UserError(
                f"model.position=rope rotates {self.rope_size} dimensions of each head, but the "
                "number must be even and at least 2",
                "Change model.rope_share, model.head_dim, model.num_heads or model.embed_dim",
            )
        is_scaled = self.rope_factor > 1 and self.rope_context
        if self.rope_scaling != "none" and not is_scaled:
            raise UserError(
                f"model.rope_scaling={self.rope_scaling} needs a model.rope_factor above 1 and a "
                "model.rope_context",
                "Set both options, or model.rope_scaling=none",
            )
        for name in ("hyper_connections", "num_experts"):
            # muP has no rule for the weights of hyper-connections, and Muon's updates of a router
            # would change its logits more in a wider model. The options are looked up by name, so
            # that this check still works after an ingredient is deleted together with its option.
            is_mup = self.mup_base_width or self.mup_base_depth
            if is_mup and vars(self).get(name):
                raise UserError(
                    f"model.{name} is not supported with model.mup_base_width or "
                    "model.mup_base_depth",
                    f"Leave model.{name} at 0, or leave both mup options at 0",
                )
        if not self.window_pattern or set(self.window_pattern) - {"S", "L"}:
            raise UserError(
                f"model.window_pattern={self.window_pattern} is not a pattern of the letters S "
                "(a layer with model.window) and L (a layer without a window)",
                "Use for example SL",
            )
        if self.window >= self.context_length:
            raise UserError(
                f"model.window={self.window} has no effect with"
                f" model.context_length={self.context_length}",
                "Choose a window that is smaller than the context, or set model.window=0",
            )
        if self.window and "S" not in self.window_pattern:
            raise UserError(
                f"model.window={self.window} has no effect with"
                f" model.window_pattern={self.window_pattern}",
                "Add an S (a layer with the window) to the pattern, or set model.window=0",
            )
        has_two_sums = self.norm_position == "post" or vars(self).get(
            "hyper_connections"
        )
        if self.parallel_block and has_two_sums:
            raise UserError(
                "model.parallel_block=True adds attention and MLP to the residual stream in one "
                "sum, but model.norm_position=post and model.hyper_connections need two sums",
                "Set model.parallel_block=False",
            )

    @cached_property
    def head_size(self) -> int:
        """Width of one attention head (H)."""
        return self.head_dim or self.embed_dim // self.num_heads

    @cached_property
    def rope_size(self) -> int:
        """Number of dimensions of each head that `model.position=rope` rotates."""
        # With a margin for rounding errors: 0.29 * 200 is 57.999..., and becomes 58.
        return math.floor(self.head_size * self.rope_share + 1e-9)

    @cached_property
    def width_ratio(self) -> float:
        """Ratio of `embed_dim` to `mup_base_width`, or 1 if `mup_base_width` is 0 (no muP)."""
        return self.embed_dim / (self.mup_base_width or self.embed_dim)

    @cached_property
    def depth_ratio(self) -> float:
        """Ratio of `num_layers` to `mup_base_depth`, or 1 if `mup_base_depth` is 0."""
        return self.num_layers / (self.mup_base_depth or self.num_layers)

    @cached_property
    def kv_heads(self) -> int:
        """Number of key and value heads (K)."""
        return self.num_kv_heads or self.num_heads

    @cached_property
    def is_gated(self) -> bool:
        """Whether the MLP has a third linear map, whose result multiplies the hidden layer.

        This is so for the activations `swiglu` and `geglu`.
        """
        return self.activation.endswith("glu")

    @cached_property
    def hidden_dim(self) -> int:
        """Width of the MLP's hidden layer (F)."""
        return self.mlp_dim or 4 * self.embed_dim

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """For each layer, the number of tokens to which a position attends, including itself.

        0 means all earlier tokens.
        """
        widths = {"S": self.window, "L": 0}
        letters = self.window_pattern * self.num_layers
        return tuple(widths[letter] for letter in letters[: self.num_layers])


@dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """The config of `gpt2.model.GPT`: the `model.` options, dtypes, remat and scanned layers."""

    # The size of GPT-2's vocabulary. A run passes `model.vocab_size`, or the size of its tokenizer
    # if this option is 0.
    vocab_size: default.Positive = 50257
    compute_dtype: default.Compute = "float32"
    logits_dtype: default.Logits = "float32"
    remat: default.Remat = "none"
    scan_layers: bool = False
    scan_unroll: default.Positive = 1

    def __post_init__(self) -> None:
        values = Options()
        for name, option in _OPTIONS.items():
            value = getattr(self, name.removeprefix("model."))
            values[name] = option.check(name, value)
        check_effects(values, _OPTIONS)
        super().__post_init__()
        # This evaluates the cached properties now, outside of any function that JAX traces.
        inspect.getmembers(self)

    @cached_property
    def loops_over_layers(self) -> bool:
        """Whether the compiled program loops over layers. If not, it has code for every layer."""
        return self.scan_layers and self.scan_unroll < self.num_layers

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> Self:
        """Return the config of a model that OpenAI released, such as `gpt2-124m`.

        `name` is one of `SIZES`. `overrides` replace other fields of the config.
        """
        require_choice("model name", name, tuple(SIZES))
        num_layers, num_heads, embed_dim = SIZES[name]
        size = dict(num_layers=num_layers, num_heads=num_heads, embed_dim=embed_dim)
        return cls(**(size | overrides))


_OPTIONS = read_group(GPTConfig, "model.")
