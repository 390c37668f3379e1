"""Loss against compute: the power law through the runs of an arm at several sizes."""

import dataclasses
import math
import sys
from collections.abc import Sequence

import numpy as np
import scipy  # loads its parts when they are used

from gpt2.ablate.power import satterthwaite

_MAX_LOG = math.log(sys.float_info.max)


@dataclasses.dataclass(frozen=True)
class Fit:
    """The power law `loss = scale * FLOPs^-exponent` through the runs of one arm at all sizes.

    It is a straight line through logarithms: its height in the middle of the runs and its slope
    are uncertain independently of each other.

    Attributes:
        middle: the mean log FLOPs of the runs.
        height: the mean log loss, that of the line in the middle.
        height_error: its standard error.
        slope: of the line.
        slope_error: its standard error.
        df: degrees of freedom of both errors.
        farthest: the largest distance of the mean log loss at some FLOPs from the line.
        p_misfit: how likely means lie so far from a true line by the noise of runs of the same
            FLOPs; nan if no two runs have the same.
    """

    middle: float
    height: float
    height_error: float
    slope: float
    slope_error: float
    df: int
    farthest: float
    p_misfit: float

    @property
    def exponent(self) -> float:
        """How fast the loss falls."""
        return -self.slope

    @property
    def error(self) -> float:
        """Half the width of the exponent's 95 % interval."""
        return float(scipy.stats.t.ppf(0.975, self.df)) * self.slope_error

    def loss(self, flops: np.ndarray) -> np.ndarray:
        """Returns the loss at an amount of compute."""
        return np.exp(self.height + self.slope * (np.log(flops) - self.middle))

    def variance(self, log_flops: float) -> float:
        """Returns the squared standard error of the line's height at a place."""
        return self.height_error**2 + (self.slope_error * (log_flops - self.middle)) ** 2


def fit_power_law(flops: Sequence[float], losses: Sequence[float]) -> Fit:
    """Fits a straight line to logarithms by least squares; its errors are those of regression.

    Three or four sizes cannot tell an irreducible loss from a small exponent, so there is none in
    the law: it describes the range of the sizes and should not be carried far beyond.
    """
    x, y = np.log(flops), np.log(losses)
    line = scipy.stats.linregress(x, y)
    residuals = y - line.intercept - line.slope * x
    farthest, p_misfit = _misfit([residuals[x == place] for place in np.unique(x)])
    height_error = line.stderr * x.std()  # sigma / sqrt(n), where stderr is sigma / sqrt(n) / std
    return Fit(
        middle=float(x.mean()),
        height=float(y.mean()),
        height_error=float(height_error),
        slope=float(line.slope),
        slope_error=float(line.stderr),
        df=len(x) - 2,
        farthest=farthest,
        p_misfit=p_misfit,
    )


def _misfit(residuals: Sequence[np.ndarray]) -> tuple[float, float]:
    """Returns how far the residuals of a line lie from 0 in the mean of a place, and its p-value.

    That is the F-test for lack of fit (Draper and Smith 1998, section 2.1).
    """
    means = [float(each.mean()) for each in residuals]
    farthest, free = max(map(abs, means)), len(residuals) - 2
    noise = sum(float(((each - each.mean()) ** 2).sum()) for each in residuals)
    noise_df = sum(len(each) - 1 for each in residuals)
    if not (free and noise_df and noise):
        return farthest, math.nan
    misfit = sum(len(each) * mean**2 for each, mean in zip(residuals, means, strict=True))
    return farthest, float(scipy.stats.f.sf(misfit / free / (noise / noise_df), free, noise_df))


def compute_to_match(baseline: Fit, arm: Fit, flops: float) -> tuple[float, float, float]:
    """Returns the share of the baseline's compute that an arm needs for the same loss.

    Both losses are those of the power laws. The 95 % interval is that of inverse regression
    (Fieller 1954, JRSS B 16): it holds every share at which the two lines do not differ by a
    t-test. It counts the noise of seeds and not a curve that the laws lack. Runs of the same
    seed are taken as independent, which makes it wide rather than narrow where they agree.

    Args:
        baseline: the law of the baseline.
        arm: the law of the arm.
        flops: what the baseline took for the loss in question.

    Returns:
        The share, and the interval's ends. They are nan where the arm's loss may not fall with
        compute at all; so is the share if it does not.
    """
    log_flops = math.log(flops)
    drop = math.log(float(baseline.loss(np.array(flops)))) - arm.height  # from the arm's middle
    if not arm.slope < 0:
        return math.nan, math.nan, math.nan
    place = drop / arm.slope  # where the arm has that loss, from its middle
    parts = (baseline.variance(log_flops), baseline.df), (arm.variance(arm.middle + place), arm.df)
    quantile = scipy.stats.t.ppf(0.975, satterthwaite(parts))
    # (drop - slope * place)^2 <= quantile^2 * (the baseline's variance + the arm's at the place)
    spread = baseline.variance(log_flops) + arm.height_error**2
    square = arm.slope**2 - (quantile * arm.slope_error) ** 2
    if square <= 0:
        return _share(arm.middle + place - log_flops), math.nan, math.nan
    root = quantile * math.sqrt(square * spread + (arm.slope_error * drop) ** 2)
    ends = ((arm.slope * drop + sign * root) / square for sign in (-1, 1))
    low, high = (_share(arm.middle + end - log_flops) for end in ends)
    return _share(arm.middle + place - log_flops), low, high


def _share(log_share: float) -> float:
    return math.inf if log_share > _MAX_LOG else math.exp(log_share)
