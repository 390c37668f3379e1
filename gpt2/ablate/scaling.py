"""Loss against compute: the same arms at several sizes, and the power law through them."""

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy  # loads its parts when they are used

from gpt2.ablate.arms import Arm
from gpt2.ablate.equal import with_length
from gpt2.config import Config, with_options
from gpt2.errors import UserError
from gpt2.telemetry.flops import count_compute_parameters

MIN_SIZES = 3  # for a line and its error
_MIN_RUNS = 3  # of each size, for the bootstrap
_RESAMPLES = 2000
_MAX_LOG = math.log(sys.float_info.max)


def at_sizes(
    arms: Sequence[Arm], sizes: Sequence[str], vocab_size: Callable[[Config], int]
) -> list[Arm]:
    """Returns every arm at every size, size by size.

    The width of a head stays. Tokens grow in proportion to the baseline's parameters, as
    compute-optimal training has them (Hoffmann et al. 2022, arXiv 2203.15556).

    Args:
        arms: the baseline first, at the size of its config.
        sizes: LAYERSxWIDTH each, such as `4x128`.
        vocab_size: the number of tokens of a config's tokenizer.

    Raises:
        UserError: there are too few sizes, or an arm cannot have one of them.
    """
    if len(set(sizes)) < MIN_SIZES or len(set(sizes)) < len(sizes):
        raise UserError(
            f"--scaling={','.join(sizes)} is not {MIN_SIZES} different sizes or more",
            "For example, use --scaling=2x64,4x128,6x192",
        )

    def parameters(config: Config) -> int:
        return count_compute_parameters(config.with_vocabulary(vocab_size(config)).gpt())

    base = arms[0].config
    scaled = []
    for size in sizes:
        share = parameters(_resized(arms[0], size).config) / parameters(base)
        steps = max(1, round(base.train.num_steps * share))
        for arm in arms:
            resized = _resized(arm, size)
            config = with_length(resized.config, steps)
            scaled.append(dataclasses.replace(resized, config=config))
    return scaled


def _resized(arm: Arm, size: str) -> Arm:
    """Returns an arm with the layers and the width of a size."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size)
    if not match:
        raise UserError(f"--scaling has the size {size!r}", "Write LAYERSxWIDTH, such as 4x128")
    layers, width = map(int, match.groups())
    model = arm.config.model
    if model.mlp_dim or model.num_kv_heads or width % model.head_size:
        raise UserError(
            f"the arm {arm.change} cannot have the size {size}: widths are multiples of its head's "
            f"{model.head_size}, and neither model.mlp_dim nor model.num_kv_heads is set",
            "Use other sizes, or model.mlp_ratio",
        )
    shape = {"num_layers": layers, "embed_dim": width, "num_heads": width // model.head_size}
    options = {f"model.{name}": value for name, value in shape.items()}
    try:
        return Arm(arm.change, with_options(arm.config, options), size)
    except UserError as error:
        raise UserError(f"the arm {arm.change} cannot have the size {size}", str(error)) from None


@dataclasses.dataclass(frozen=True)
class Fit:
    """The power law `loss = scale * FLOPs^-exponent` through the runs of one arm at all sizes.

    Attributes:
        scale: the loss at one FLOP.
        exponent: how fast the loss falls.
        error: half the width of the exponent's 95 % interval.
    """

    scale: float
    exponent: float
    error: float

    def loss(self, flops: np.ndarray) -> np.ndarray:
        """Returns the loss at an amount of compute."""
        return self.scale * flops**-self.exponent

    def flops(self, loss: float) -> float:
        """Returns the compute at which the loss is reached; infinite if no float holds it."""
        ratio = math.log(self.scale / loss)
        log_flops = ratio / self.exponent if self.exponent else math.copysign(math.inf, ratio)
        return math.exp(log_flops) if log_flops < _MAX_LOG else math.inf


def fit_power_law(flops: Sequence[float], losses: Sequence[float]) -> Fit:
    """Fits a straight line to logarithms by least squares; its error is that of regression.

    Three or four sizes cannot tell an irreducible loss from a small exponent, so there is none in
    the law: it describes the range of the sizes and should not be carried far beyond.

    Args:
        flops: of each run.
        losses: final, of each run.
    """
    line = scipy.stats.linregress(np.log(flops), np.log(losses))
    quantile = scipy.stats.t.ppf(0.975, len(flops) - 2)
    return Fit(float(np.exp(line.intercept)), float(-line.slope), float(quantile * line.stderr))


def compute_to_match(
    baseline: Mapping[str, Sequence[tuple[float, float]]],
    arm: Mapping[str, Sequence[tuple[float, float]]],
) -> tuple[float, float, float]:
    """Returns the share of the baseline's compute that an arm needs for the same loss.

    That loss is the baseline's at its largest size. Both are read off their power laws. The
    interval holds 95 % of 2000 bootstrap samples of the runs, drawn within each size.

    Args:
        baseline: by size, (FLOPs, final loss) of each run.
        arm: likewise.

    Returns:
        The share, and the interval's ends: nan if a size has fewer than three runs.
    """
    largest = max(flops for runs in baseline.values() for flops, _ in runs)

    def share(first: Sequence, second: Sequence) -> float:
        one, two = (fit_power_law(*zip(*runs, strict=True)) for runs in (first, second))
        return two.flops(float(one.loss(np.array(largest)))) / largest

    rng = np.random.default_rng(0)

    def resampled(by_size: Mapping[str, Sequence]) -> list:
        return [
            runs[i] for runs in by_size.values() for i in rng.integers(len(runs), size=len(runs))
        ]

    whole = [[run for runs in by_size.values() for run in runs] for by_size in (baseline, arm)]
    if min(len(runs) for by_size in (baseline, arm) for runs in by_size.values()) < _MIN_RUNS:
        return share(*whole), np.nan, np.nan
    shares = [share(resampled(baseline), resampled(arm)) for _ in range(_RESAMPLES)]
    # No mean of two shares: one of them may be infinite.
    low, high = np.quantile(shares, [0.025, 0.975], method="inverted_cdf")
    return share(*whole), float(low), float(high)
