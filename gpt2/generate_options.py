"""The flags of gpt2.generate, and what of them is refused before JAX is imported."""

import math

from absl import flags

from gpt2 import cli
from gpt2.config import MAX_SEED
from gpt2.errors import UserError


def define_flags() -> None:
    """Defines the flags of gpt2.generate."""
    flags.DEFINE_string("prompt", "", "Text to continue.")
    flags.DEFINE_integer(
        "max_new_tokens", 0, "At most this many tokens; 0: 200, or what fits.", lower_bound=0
    )
    flags.DEFINE_float(
        "temperature", 1.0, "Divides the logits; 0: always the likeliest token.", lower_bound=0.0
    )
    flags.DEFINE_integer(
        "top_k", 0, "Draw among the k likeliest tokens; 0: among all.", lower_bound=0
    )
    flags.DEFINE_float("top_p", 1.0, "Draw among the likeliest tokens of this joint probability.")
    flags.DEFINE_integer("num_samples", 1, "How many continuations.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of random numbers.", lower_bound=0, upper_bound=MAX_SEED)
    cli.define_source()


def check() -> None:
    """Refuses flags that name no model, cannot work or would be ignored."""
    args = flags.FLAGS
    cli.check_source()
    check_sampling(args.temperature, args.top_k, args.top_p)
    if args.temperature == 0.0:
        for name in ("top_k", "top_p", "seed"):
            cli.refuse_ignored(name, "--temperature=0 always takes the likeliest token")


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raises a UserError unless tokens can be drawn in this way."""
    if not 0 <= temperature < math.inf:
        raise UserError(
            f"temperature={temperature} is not a finite number of at least 0",
            "Use 0 for the most likely token",
        )
    if top_k < 0:
        raise UserError(f"top_k={top_k} is negative", "Use 0 for no limit")
    if not 0.0 < top_p <= 1.0:
        raise UserError(f"top_p={top_p} is not in (0, 1]", "Use 1 for no limit")
