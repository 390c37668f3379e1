"""The `optim.` options: their types, how their texts are read, and what is refused.

Defaults, meanings and units are in configs/default.py.
"""

import dataclasses
import itertools
import math
import re
from types import SimpleNamespace

from gpt2.config.choices import DEFAULTS, refuse_ignored, require_choices
from gpt2.errors import (
    UserError,
    require_at_least,
    require_finite,
    require_fraction,
)

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
# Below it, float32's smallest numbers come into reach of the squares that Adam keeps.
_LEAST_CLIP_NORM = 1e-6


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The `optim.` options."""

    name: str = DEFAULTS.optim.name
    learning_rate: float = DEFAULTS.optim.learning_rate
    adam_learning_rate: float = DEFAULTS.optim.adam_learning_rate
    layer_rates: str = DEFAULTS.optim.layer_rates
    schedule: str = DEFAULTS.optim.schedule
    warmup_steps: int = DEFAULTS.optim.warmup_steps
    warmup_percent: float = DEFAULTS.optim.warmup_percent
    decay_steps: int = DEFAULTS.optim.decay_steps
    decay_percent: float = DEFAULTS.optim.decay_percent
    end_learning_rate: float = DEFAULTS.optim.end_learning_rate
    beta1: float = DEFAULTS.optim.beta1
    beta2: float = DEFAULTS.optim.beta2
    beta3: float = DEFAULTS.optim.beta3
    alpha: float = DEFAULTS.optim.alpha
    momentum: float = DEFAULTS.optim.momentum
    nesterov: bool = DEFAULTS.optim.nesterov
    precondition_every: int = DEFAULTS.optim.precondition_every
    eps: float = DEFAULTS.optim.eps
    weight_decay: float = DEFAULTS.optim.weight_decay
    cautious: str = DEFAULTS.optim.cautious
    ema: float = DEFAULTS.optim.ema
    clip_norm: float = DEFAULTS.optim.clip_norm

    def __post_init__(self):
        require_choices("optim", SimpleNamespace(**vars(self) | {"schedule": self.schedule_name}))
        for name in ("beta1", "beta2", "beta3", "momentum", "ema"):
            require_fraction(f"optim.{name}", getattr(self, name), DEFAULTS.optim[name])
        for name in (
            *("learning_rate", "adam_learning_rate", "end_learning_rate", "alpha", "eps"),
            *("weight_decay", "clip_norm", "warmup_percent", "decay_percent"),
        ):
            require_finite(f"optim.{name}", getattr(self, name), 0, DEFAULTS.optim[name])
        if self.eps == 0 and "eps" in READS[self.name]:
            raise UserError(
                "optim.eps=0 divides 0 by 0 where a gradient is 0",
                f"For example, use --config.optim.eps={DEFAULTS.optim.eps}",
            )
        if 0 < self.clip_norm < _LEAST_CLIP_NORM:
            raise UserError(
                f"optim.clip_norm={self.clip_norm} leaves nothing of a gradient",
                f"For example, use --config.optim.clip_norm={DEFAULTS.optim.clip_norm}, or 0 for "
                "no clipping",
            )
        for name, minimum in (("warmup_steps", 0), ("decay_steps", 0), ("precondition_every", 1)):
            require_at_least(f"optim.{name}", getattr(self, name), minimum)
        _ = self.rates, self.pieces  # which refuse what they cannot read
        self._check_lengths()
        self._check_rates()
        self._check_optimizer()
        self._check_cautious()

    def _check_lengths(self):
        """Refuses lengths given twice, too long, or for a schedule without them."""
        if self.schedule_name != "wsd":
            for name in ("decay_steps", "decay_percent"):
                refuse_ignored(
                    f"optim.{name}",
                    getattr(self, name),
                    "wsd",
                    "optim.schedule",
                    self.schedule_name,
                )
        for part in ("warmup", "decay"):
            steps, percent = getattr(self, f"{part}_steps"), getattr(self, f"{part}_percent")
            if steps and percent:
                raise UserError(
                    f"optim.{part}_steps={steps} and optim.{part}_percent={percent:g} both say how "
                    f"long the {part} is",
                    f"To use the percentage, set --config.optim.{part}_steps=0",
                )
            if percent > 100:
                raise UserError(
                    f"optim.{part}_percent={percent:g} is more than the run",
                    f"Use at most --config.optim.{part}_percent=100",
                )
        if self.schedule == "inverse_sqrt" and not (self.warmup_steps or self.warmup_percent):
            raise UserError(
                "optim.schedule=inverse_sqrt falls from the end of a warm-up, and there is none",
                "For example, use --config.optim.warmup_steps=100",
            )

    def _check_rates(self):
        """Refuses rates that contradict each other."""
        if self.end_learning_rate > self.learning_rate:
            raise UserError(
                f"optim.end_learning_rate={self.end_learning_rate} is above "
                f"optim.learning_rate={self.learning_rate}",
                f"Use at most --config.optim.end_learning_rate={self.learning_rate}",
            )
        name = self.schedule_name
        ends = name not in ("constant", "inverse_sqrt", "piecewise")
        if not ends and self.end_learning_rate != self.learning_rate:
            raise UserError(
                f"optim.schedule={name} would ignore "
                f"optim.end_learning_rate={self.end_learning_rate}",
                f"Set --config.optim.end_learning_rate={self.learning_rate}",
            )
        if self.adam_learning_rate and not self.learning_rate:
            raise UserError(
                f"optim.adam_learning_rate={self.adam_learning_rate} follows the schedule of "
                "optim.learning_rate, which is 0",
                f"For example, use --config.optim.learning_rate={DEFAULTS.optim.learning_rate}",
            )

    def _check_optimizer(self):
        """Refuses options that `name` does not read, and those that it cannot work with."""
        for option in {option for reads in READS.values() for option in reads}:
            if option not in READS[self.name]:
                needed = next(name for name, reads in READS.items() if option in reads)
                value = getattr(self, option)
                refuse_ignored(f"optim.{option}", value, needed, "optim.name", self.name)
        positive = {"ademamix": ("alpha", "beta1", "beta3"), "schedule_free": ("beta1",)}
        for option in positive.get(self.name, ()):
            if not getattr(self, option):
                raise UserError(
                    f"optim.name={self.name} needs a positive optim.{option}",
                    f"Use --config.optim.{option}={DEFAULTS.optim[option]}",
                )
        if self.name == "schedule_free" and self.schedule != "constant":
            raise UserError(
                f"optim.name=schedule_free averages in place of optim.schedule={self.schedule}",
                "Use --config.optim.schedule=constant "
                f"--config.optim.end_learning_rate={self.learning_rate}",
            )
        if self.name == "schedule_free" and self.ema:
            raise UserError(
                f"optim.name=schedule_free keeps an average already, and optim.ema={self.ema} "
                "would be a second",
                "Use --config.optim.ema=0.0",
            )

    def _check_cautious(self):
        """Refuses masks that would change nothing."""
        without = {"sgd": not self.momentum, "adafactor": True, "schedule_free": True}
        without |= dict.fromkeys(("adamw", "adam"), not self.beta1)
        if self.masks_updates and without.get(self.name, False):
            raise UserError(
                f"optim.cautious={self.cautious} compares updates with gradients, and "
                f"optim.name={self.name} has no momentum here that could make them differ",
                "Use --config.optim.cautious=none or decay",
            )
        if self.masks_decay and self.couples_decay:
            raise UserError(
                f"optim.name={self.name} adds its decay to the gradient, where "
                f"optim.cautious={self.cautious} cannot mask it",
                "Use --config.optim.cautious=updates or none",
            )
        if self.masks_decay and not self.weight_decay:
            raise UserError(
                f"optim.cautious={self.cautious} masks a decay, and optim.weight_decay=0",
                f"For example, use --config.optim.weight_decay={DEFAULTS.optim.weight_decay}",
            )

    @property
    def schedule_name(self) -> str:
        """The schedule without its values."""
        return self.schedule.partition(":")[0]

    @property
    def couples_decay(self) -> bool:
        """Whether weight decay is part of the gradient, as in torch.optim.Adam and SGD."""
        return self.name in ("adam", "sgd")

    @property
    def masks_updates(self) -> bool:
        """Whether updates against their gradient are dropped."""
        return self.cautious in ("updates", "both")

    @property
    def masks_decay(self) -> bool:
        """Whether decay against its update is dropped."""
        return self.cautious in ("decay", "both")

    @property
    def keeps_average(self) -> bool:
        """Whether other weights than those in training are validated and exported."""
        return self.ema > 0 or self.name == "schedule_free"

    @property
    def pieces(self) -> tuple[tuple[int, float], ...]:
        """The steps of a `piecewise` schedule, ascending, each with its share of the peak.

        Raises:
            UserError: `schedule` has values that cannot be read, or that it does not take.
        """
        name, colon, text = self.schedule.partition(":")
        if name != "piecewise":
            if colon:
                raise UserError(
                    f"optim.schedule={self.schedule} gives values to a schedule without any",
                    f"Use --config.optim.schedule={name}",
                )
            return ()
        how = "For example, use --config.optim.schedule=piecewise:1000=0.5,2000=0.1"
        try:
            pairs = [item.split("=") for item in text.split(",")]
            pieces = tuple((int(step), float(share)) for step, share in pairs)
        except ValueError:
            raise UserError(
                f"optim.schedule={self.schedule} is not piecewise:STEP=SHARE,STEP=SHARE", how
            ) from None
        if not all(step >= 1 and 0 <= share < math.inf for step, share in pieces):
            raise UserError(
                f"optim.schedule={self.schedule} has a step below 1 or a share below 0", how
            )
        if any(first >= second for (first, _), (second, _) in itertools.pairwise(pieces)):
            raise UserError(f"optim.schedule={self.schedule} has steps that do not ascend", how)
        return pieces

    @property
    def rates(self) -> tuple[tuple[str, float], ...]:
        """The regular expressions of `layer_rates`, each with its factor.

        Raises:
            UserError: `layer_rates` cannot be read.
        """
        how = r"For example, use --config.optim.layer_rates='h_\d+/attn=0.5,wte=2'"
        rates = []
        for item in self.layer_rates.split(",") if self.layer_rates else ():
            pattern, _, factor = item.rpartition("=")
            try:
                re.compile(pattern)
                rates.append((pattern, float(factor)))
            except re.error as error:
                raise UserError(
                    f"optim.layer_rates has {pattern!r}, which is not a regular expression "
                    f"({error})",
                    how,
                ) from None
            except ValueError:
                raise UserError(f"optim.layer_rates has {item!r}, not REGEX=FACTOR", how) from None
            if not (pattern and 0 <= rates[-1][1] < math.inf):
                what = "a factor below 0" if pattern else "no pattern"
                raise UserError(f"optim.layer_rates has {item!r}, with {what}", how)
        return tuple(rates)

    def warmup(self, num_steps: int) -> int:
        """Returns the steps of the warm-up in a run of `num_steps`."""
        return self.warmup_steps or _share(num_steps, self.warmup_percent)

    def shorter_warmup(self, num_steps: int) -> str:
        """Returns the flags with which a run of `num_steps` leaves its warm-up in time."""
        percent = 10 if num_steps >= 10 else 0
        return f"--config.optim.warmup_percent={percent} --config.optim.warmup_steps=0"

    def decay(self, num_steps: int) -> int:
        """Returns the steps over which `wsd` decays in a run of `num_steps`, at least 1."""
        percent = self.decay_percent or _DECAY_PERCENT
        return self.decay_steps or max(_share(num_steps, percent), 1)


def _share(num_steps: int, percent: float) -> int:
    return math.floor(num_steps * percent / 100 + 1e-9)  # 2.3 % of 1000 is 23 in spite of rounding
