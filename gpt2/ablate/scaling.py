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
    """The power law through the runs of one arm: a straight line through their logarithms.

    Its height in the middle of the runs and its slope are uncertain independently of each other.
    """

    middle: float  # the mean log FLOPs of the runs
    height: float  # log loss of the line there
    height_error: float
    slope: float  # the exponent, which is negative where the loss falls
    slope_error: float
    df: int  # of both errors
    farthest: float  # how far the mean log loss at some FLOPs lies from the line at most
    p_misfit: float  # how likely that is by the noise of runs of the same FLOPs; nan without any

    @property
    def error(self) -> float:
        """Half the width of the slope's 95 % interval."""
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
    groups = [residuals[x == place] for place in np.unique(x)]
    means, sizes = np.array([[each.mean(), len(each)] for each in groups]).T
    # The F-test for lack of fit (Draper and Smith 1998, section 2.1).
    noise, noise_df = sum(((each - each.mean()) ** 2).sum() for each in groups), sum(sizes - 1)
    free, p_misfit = len(groups) - 2, math.nan
    if free and noise_df and noise:
        ratio = (sizes @ means**2) / free / (noise / noise_df)
        p_misfit = float(scipy.stats.f.sf(ratio, free, noise_df))
    return Fit(
        middle=float(x.mean()),
        height=float(y.mean()),
        height_error=float(line.stderr * x.std()),  # stderr is sigma / sqrt(n) / std
        slope=float(line.slope),
        slope_error=float(line.stderr),
        df=len(x) - 2,
        farthest=float(np.abs(means).max()),
        p_misfit=p_misfit,
    )


def compute_to_match(baseline: Fit, arm: Fit, flops: float) -> tuple[float, float, float]:
    """Returns the share of the baseline's compute that an arm needs for the loss at `flops`.

    The ends of its 95 % interval are those of inverse regression (Fieller 1954, JRSS B 16): every
    share at which the two lines do not differ by a t-test. What the arm's slope leaves open is nan.
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
    ends = (math.nan, math.nan)
    if square > 0:
        root = quantile * math.sqrt(square * spread + (arm.slope_error * drop) ** 2)
        ends = (arm.slope * drop - root) / square, (arm.slope * drop + root) / square
    share, low, high = (
        math.inf if each > _MAX_LOG else math.exp(each)
        for each in (arm.middle + each - log_flops for each in (place, *ends))
    )
    return share, low, high
