"""The `optim.` options, and how their texts are read."""

import itertools
import math
import re

from gpt2.config.options import DEFAULTS, Options
from gpt2.errors import UserError, refuse

# `optim.name` -> the options that it reads, beside those that all of them read.
_MATRIX = ("beta1", "beta2", "eps", "adam_learning_rate")
READS = {
    "adamw": ("beta1", "beta2", "eps"),
    "adam": ("beta1", "beta2", "eps"),
    "sgd": ("momentum", "nesterov"),
    "lion": ("beta1", "beta2"),
    "adafactor": (),
    "ademamix": ("beta1", "beta2", "beta3", "alpha", "eps"),
    "schedule_free": ("beta1", "beta2", "eps"),
    "muon": (*_MATRIX, "momentum", "nesterov"),
    "normuon": (*_MATRIX, "momentum", "nesterov"),
    "soap": (*_MATRIX, "precondition_every"),
}
# The share of a run over which `wsd` decays (Hu et al. 2024).
_DECAY_PERCENT = 20.0


class OptimConfig(Options, group="optim"):
    """The `optim.` options."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.rates, self.pieces  # which refuse what they cannot read
        given = {name for name, value in DEFAULTS.optim.items() if getattr(self, name) != value}
        readable = {option for reads in READS.values() for option in reads}
        for option in readable & given:
            if option not in READS[self.name]:
                raise UserError(f"optim.name={self.name} would ignore optim.{option}")
        for part in ("warmup", "decay"):
            both = getattr(self, f"{part}_steps") and getattr(self, f"{part}_percent")
            refuse(both, f"optim.{part}_steps and {part}_percent are both given", "Set one 0")
        decays = self.decay_steps or self.decay_percent
        refuse(decays and self.schedule != "wsd", "optim.decay_steps and _percent are for wsd")
        warms_up = self.warmup_steps or self.warmup_percent
        refuse(self.schedule == "inverse_sqrt" and not warms_up, "inverse_sqrt needs a warm-up")
        averages, masks = self.name == "schedule_free", f"optim.cautious={self.cautious}"
        falls = averages and self.schedule != "constant"
        refuse(falls, "optim.name=schedule_free averages in place of a schedule", "Use constant")
        refuse(averages and self.ema, "optim.name=schedule_free averages without optim.ema")
        plain = averages or self.name == "adafactor"
        refuse(plain and self.cautious in ("updates", "both"), f"{masks} needs momentum")
        coupled = self.name in ("adam", "sgd") or not self.weight_decay
        refuse(coupled and self.cautious in ("decay", "both"), f"{masks} finds no decay to mask")

    @property
    def schedule_name(self) -> str:
        """The schedule without its values."""
        return self.schedule.partition(":")[0]

    @property
    def keeps_average(self) -> bool:
        """Whether other weights than those in training are validated and exported."""
        return self.ema > 0 or self.name == "schedule_free"

    @property
    def pieces(self) -> tuple[tuple[int, float], ...]:
        """The steps of a `piecewise` schedule, ascending, each with its share of the peak."""
        name, colon, text = self.schedule.partition(":")
        try:
            pairs = [item.split("=") for item in text.split(",")] if colon else []
            pieces = tuple((int(step), float(share)) for step, share in pairs)
        except ValueError:
            pieces = ()
        ascend = all(a < b for (a, _), (b, _) in itertools.pairwise(((0, 1.0), *pieces)))
        wanted = name == "piecewise"
        if not ascend or bool(pieces) != wanted or bool(colon) != wanted:
            how = "For example, use piecewise:1000=0.5,2000=0.1"
            raise UserError(f"optim.schedule={self.schedule} cannot be read", how)
        return pieces

    @property
    def rates(self) -> tuple[tuple[str, float], ...]:
        """The regular expressions of `layer_rates`, each with its factor."""
        pairs = [item.rpartition("=")[::2] for item in self.layer_rates.split(",") if item]
        try:
            return tuple((re.compile(pattern).pattern, float(factor)) for pattern, factor in pairs)
        except (re.error, ValueError) as error:
            how = "Write REGEX=FACTOR,REGEX=FACTOR"
            raise UserError(f"optim.layer_rates={self.layer_rates}: {error}", how) from None

    def warmup(self, num_steps: int) -> int:
        """Returns the steps of the warm-up in a run of `num_steps`."""
        return self.warmup_steps or _share(num_steps, self.warmup_percent)

    def decay(self, num_steps: int) -> int:
        """Returns the steps over which `wsd` decays in a run of `num_steps`, at least 1."""
        percent = self.decay_percent or _DECAY_PERCENT
        return self.decay_steps or max(_share(num_steps, percent), 1)


def _share(num_steps: int, percent: float) -> int:
    return math.floor(num_steps * percent / 100 + 1e-9)  # 2.3 % of 1000 is 23 in spite of rounding
