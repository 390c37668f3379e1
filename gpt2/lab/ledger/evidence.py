r"""The evidence for an idea (valid after every pair of runs), and the levels of a ledger.

An idea is kept (accepted) if its evidence is at least 1 divided by its level, an allowed error
rate. The idea and the best version so far train with the same seeds, which are new for each idea.
x_1, x_2, ... are the differences of their final losses, idea - best. The null hypothesis is that
the expected difference is 0 or above. Let n be the number of pairs, m the mean of x_1, ..., x_n,
S = sum (x_i - m)^2, tau = 3, r = 1 + n tau^2, and F_n the distribution function of Student's t with
n degrees of freedom. Then the evidence is

    E_n = 2 r^(-1/2) ((S + n m^2) / (S + n m^2 / r))^(n/2)
          F_n(-m n tau / sqrt(r (S + n m^2 / r) / n)).

E_n is a Bayes factor. It compares two hypotheses about d, the expected difference divided by the
true standard deviation of differences: that d = -|z| with z drawn from N(0, tau^2), and that d = 0.
In both, the unknown standard deviation has the right Haar prior, so E_n does not depend on the unit
of the losses (Lai 1976, Annals of Statistics 4; Pérez-Ortiz, Lardy, de Heide and Grünwald 2024,
Annals of Statistics 52; Wang and Ramdas 2025, Sequential Analysis 44). Under the null hypothesis,
the expectation of E_n is at most 1 at any stopping time, if the decision to stop depends only on
ratios of differences, as it does here. A ledger may therefore compute E_n after each pair, and may
later add pairs to the pairs that an idea already has.

The assumptions are: the differences of an idea are independent and normal with the same standard
deviation, which may be different for each idea. Ideas share no runs: seeds are drawn when a pair
begins, so that nobody can choose an idea by the runs that judge it.

In a ledger, e-LOND (Xu and Ramdas 2024, AISTATS 27) keeps the t-th idea as soon as

    E_n >= 1 / (alpha gamma_t (K + 1)),  alpha = 0.1,  gamma_t = t^(-1.3) / zeta(1.3),

where K is the number of ideas that have been kept so far. An idea gets its t when its first pair
begins, even if its runs fail. So no gamma_t depends on scores, and all gamma_t add up to at most 1.
Once a false idea is kept, it is one of at least K + 1 kept ideas, and therefore adds at most
1 / (K + 1) <= alpha gamma_t E_n to the fraction of kept ideas that are false. The expectations of
these terms add up to at most alpha, even if the evidence of one idea depends on that of others.

With --screen, an idea first trains pairs at smaller sizes, and is discarded if it is not better
there. The null hypothesis remains that the idea does not lower the mean loss at the ledger's size.
The seeds of x_1, x_2, ... are drawn after the screening, so the expectation of E_n under the null
hypothesis is at most 1 whatever the screening has shown. Only an idea that passes gets a t, before
x_1 is known. The gamma_t of all tested ideas therefore still add up to at most 1, and the proof
holds for every rule of screening.
"""

import math
from functools import cache

import numpy as np
import scipy  # its submodules are imported when they are used
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = float | Array

# alpha: the largest expected fraction of ideas that are not better among the ideas that are kept.
_FALSE_FRACTION = 0.1
_DECAY = 1.3  # the exponent in gamma_t
_TAU = 3.0  # the scale of expected gains, in standard deviations of a pair's difference
_FUTILE = 0.2  # `is_futile` uses an interval of level 1 - _FUTILE
_NUM_DRAWN = 1000  # number of simulated ideas
MOST_PAIRS = 16  # the default of --pairs
# Number of pairs at each small size. With more pairs, screening would discard fewer true gains.
SCREEN_PAIRS = 4


def level_at(number: int, kept: int) -> float:
    """Return the level (allowed error rate) of the `number`-th idea tested at the ledger's size.

    `number` counts from 1: it is the t of the module's docstring, not `Idea.number`. `kept` is the
    number of ideas that have been accepted so far.
    """
    gamma = number**-_DECAY / scipy.special.zeta(_DECAY)
    return float(_FALSE_FRACTION * gamma * (kept + 1))


def evidence(differences: Array) -> Array:
    """Return the evidence after each pair, `[..., pairs]`: E_1, E_2, ... of the module's docstring.

    `differences` `[..., pairs]` are the final losses of the idea minus the best version's. They
    must not all be 0, because E_n would then be 0 / 0.
    """
    num = np.arange(1, differences.shape[-1] + 1)
    mean = differences.cumsum(-1) / num
    squares = (differences**2).cumsum(-1) - num * mean**2
    return _ratio(num, mean, np.maximum(squares, 0.0))


def _ratio(num: Numbers, mean: Numbers, squares: Numbers) -> Array:
    """Return the evidence E_n of n = `num` differences, given their `mean`.

    `squares` is the sum of the squared deviations of the differences from their mean.
    """
    r = 1 + num * _TAU**2
    around_zero = squares + num * mean**2
    left = squares + num * mean**2 / r
    two_sided = (around_zero / left) ** (num / 2) / np.sqrt(r)
    t = -mean * num * _TAU / np.sqrt(r * left / num)
    return 2 * two_sided * scipy.special.stdtr(num, t)


def most_evidence(pairs: int) -> float:
    """Return the largest evidence that n = `pairs` pairs can reach: 2 r^((n - 1) / 2).

    r is 1 + n tau^2, where tau = 3 is the scale of expected gains in standard deviations.
    """
    r = 1 + pairs * _TAU**2
    return 2 * r ** ((pairs - 1) / 2)


def half_width(differences: Array, level: float) -> float:
    """Return half the width of an interval for the true mean that is valid after every pair.

    `differences` are the differences so far, and the true mean is their expectation. If the
    interval is computed after every pair, the probability that one or more of these intervals miss
    the true mean is at most `level`. The width is inf until there are enough pairs. The interval is
    the two-sided interval of Wang and Ramdas (2025), which the module's docstring cites.
    """
    num = len(differences)
    r = 1 + num * _TAU**2
    border = (math.sqrt(r) / level) ** (2 / num)
    if border >= r:
        return math.inf
    variance = float(differences.var())
    return math.sqrt(variance * (border - 1) / (1 - border / r))


def is_futile(differences: Array, pairs: int, level: Numbers) -> np.ndarray:
    """Return whether the evidence after `pairs` pairs is unlikely to reach 1 / `level`.

    `differences` `[..., n]` are the differences so far. The differences of future pairs are assumed
    to have the same standard deviation. Their mean is assumed to be the better (lower) end of a
    one-sided 80 % interval for the true mean.
    """
    num = differences.shape[-1]
    mean = differences.mean(-1)
    variance = differences.var(-1, ddof=1)
    quantile = scipy.special.stdtrit(num - 1, 1 - _FUTILE)
    better = mean - quantile * np.sqrt(variance / num)
    in_all = (num * mean + (pairs - num) * better) / pairs
    return _ratio(pairs, in_all, (pairs - 1) * variance) < 1 / level


@cache
def findable(pairs: int, level: float, power: float) -> Array:
    """Return the smallest gains that 1, 2, ..., `pairs` pairs detect with probability `power`.

    `level` is the error rate of the test. Gains are in standard deviations of a difference, and NaN
    where no gain is detected. `pairs` is the ledger's --pairs. As in a ledger, the trial of an idea
    ends once the idea is futile.
    """
    noise = np.random.default_rng(0).standard_normal((_NUM_DRAWN, pairs))
    sizes = np.geomspace(0.25, 64, 97)
    rates = []
    for size in sizes:
        differences = noise - size
        clear = evidence(differences) >= 1 / level
        ended = np.zeros(_NUM_DRAWN, bool)
        for num in range(2, pairs):
            clear[:, num - 1] &= ~ended
            ended |= is_futile(differences[:, :num], pairs, level)
        clear[:, -1] &= ~ended
        rates.append(np.logical_or.accumulate(clear, axis=1).mean(0))
    enough = np.array(rates) >= power
    smallest = sizes[enough.argmax(0)]
    return np.where(enough.any(0), smallest, math.nan)
