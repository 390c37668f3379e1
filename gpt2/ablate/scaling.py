"""Loss against compute: the power law through the runs of an arm at several sizes."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy  # loads its parts when they are used

from gpt2.ablate.power import welch


@dataclasses.dataclass(frozen=True)
class Fit:
    """The power law through the runs of one arm: a straight line through their logarithms."""

    middle: float  # the mean log FLOPs of the runs
    height: float  # log loss of the line there
    height_error: float  # independent of the slope's
    slope: float  # the exponent, which is negative where the loss falls
    slope_error: float
    df: int  # of both errors
    farthest: float  # how far the mean log loss at some FLOPs lies from the line at most

    @property
    def error(self) -> float:
        """Half the width of the slope's 95 % interval."""
        return float(scipy.stats.t.ppf(0.975, self.df)) * self.slope_error

    def variance(self, log_flops: float) -> float:
        """Returns the squared standard error of the line's height at a place."""
        return self.height_error**2 + (self.slope_error * (log_flops - self.middle)) ** 2


def fit_power_law(flops: Sequence[float], losses: Sequence[float]) -> Fit:
    """Fits a straight line to logarithms by least squares; its errors are those of regression.

    It has no irreducible loss, which few sizes cannot tell from a small exponent.
    """
    x, y = np.log(flops), np.log(losses)
    line = scipy.stats.linregress(x, y)
    residuals = y - line.intercept - line.slope * x
    return Fit(
        middle=float(x.mean()),
        height=float(y.mean()),
        height_error=float(line.stderr * x.std()),  # stderr is sigma / sqrt(n) / std
        slope=float(line.slope),
        slope_error=float(line.stderr),
        df=len(x) - 2,
        farthest=max(abs(float(residuals[x == place].mean())) for place in np.unique(x)),
    )


def compute_to_match(baseline: Fit, arm: Fit, flops: float) -> tuple[float, float, float]:
    """Returns the share of the baseline's compute that an arm needs for the loss at `flops`.

    Its 95 % interval is by the lines' heights over the slope; all is nan where that may not fall.
    """
    if arm.slope + arm.error >= 0:
        return math.nan, math.nan, math.nan
    log_flops = math.log(flops)
    drop = baseline.height + baseline.slope * (log_flops - baseline.middle) - arm.height
    place = arm.middle + drop / arm.slope  # where the arm has that loss
    nums = baseline.df + 1, arm.df + 1
    own, other = baseline.variance(log_flops) * nums[0], arm.variance(place) * nums[1]
    error, df = welch(np.asarray(own), np.asarray(other), *nums)
    half_width = scipy.stats.t.ppf(0.975, df) * error / -arm.slope
    middle = place - log_flops
    share, low, high = np.exp([middle, middle - half_width, middle + half_width])
    return float(share), float(low), float(high)
