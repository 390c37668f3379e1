r"""How much pairs of runs say for an idea, whenever one looks, and what a ledger asks of it.

An idea and the best so far train with the same seeds. x_1, x_2, ... are the differences of their
final losses, idea - best. Null hypothesis: their mean is 0 or above. With n pairs, their mean m,
S = sum (x_i - m)^2, r = 1 + n tau^2, tau = 3, and F_n the distribution function of Student's t with
n degrees of freedom, the evidence is

    E_n = 2 r^(-1/2) ((S + n m^2) / (S + n m^2 / r))^(n/2)
          F_n(-m n tau / sqrt(r (S + n m^2 / r) / n)),

the likelihood ratio of "mean / deviation is -|N(0, tau^2)|" to "it is 0" after the right Haar prior
took the deviation out (Lai 1976, Annals of Statistics 4; Pérez-Ortiz, Lardy, de Heide and Grünwald
2024, Annals of Statistics 52; Wang and Ramdas 2025, Sequential Analysis 44). Under the null its
expectation is at most 1 wherever one stops, if the decision to stop is a function of ratios of
differences, as it is here. So one may look after each pair, and go on later with what there is.

Assumed: the differences of one idea are independent and normal, of one deviation, which may be any,
another one for each idea. Ideas share the runs of the best, so that their evidence is dependent.

Over a ledger, e-LOND (Xu and Ramdas 2024, AISTATS 27) keeps the t-th idea once

    E_n >= 1 / (alpha gamma_t (K + 1)),  alpha = 0.1,  gamma_t = t^(-1.3) / zeta(1.3),

where K ideas have been kept so far. An idea takes its t with its first pair, or where it diverges.
One whose runs break has no E_n: its code says so, and no score, so that others' gamma_t do not
depend on scores, and those of all E_n sum to at most 1. At least K + 1 are when it is kept, so that
its part in the false share is at most alpha gamma_t E_n, and that of all at most alpha in
expectation, whatever the dependence of e-values. That is proved for values that are fixed when they
are judged; here one may also go on after K has grown, by what other ideas with the same runs of the
best gave. `python -m tests.programs.ledger_rates` simulates it: docs/ledger.md has its rates.
"""

import math

import numpy as np
import scipy  # loads its parts when they are used

from gpt2.lab.ablate.power import Array, Numbers

FALSE_SHARE = 0.1  # of what is kept, in expectation; alpha above
_DECAY = 1.3
_TAU = 3.0  # deviations that a gain may have
_HOPELESS = 0.2
_NUM_DRAWN = 1000


def level_at(number: int, kept: int) -> float:
    """Returns the level of the `number`-th idea, from 1, once so many were kept."""
    share = number**-_DECAY / scipy.special.zeta(_DECAY)
    return float(FALSE_SHARE * share * (kept + 1))


def evidence(differences: Array) -> Array:
    """Returns E_1, E_2, ... of differences `[..., pairs]`, not all 0."""
    num = np.arange(1, differences.shape[-1] + 1)
    mean = differences.cumsum(-1) / num
    squares = (differences**2).cumsum(-1) - num * mean**2
    return _ratio(num, mean, np.maximum(squares, 0.0))


def _ratio(num: Numbers, mean: Numbers, squares: Numbers) -> Array:
    """Returns the evidence of `num` differences by their mean, and their squares around it."""
    r = 1 + num * _TAU**2
    around_zero = squares + num * mean**2
    left = squares + num * mean**2 / r
    two_sided = (around_zero / left) ** (num / 2) / np.sqrt(r)
    t = -mean * num * _TAU / np.sqrt(r * left / num)
    return 2 * two_sided * scipy.special.stdtr(num, t)


def most_evidence(pairs: int) -> float:
    """Returns what the evidence of so many pairs is always below: 2 r^((n - 1) / 2)."""
    r = 1 + pairs * _TAU**2
    return 2 * r ** ((pairs - 1) / 2)


def half_width(differences: Array, level: float) -> float:
    """Returns that of an interval which holds the mean after every pair, but for `level`.

    It is inf until there are enough pairs. (Wang and Ramdas 2025, as above, both sides.)
    """
    num = len(differences)
    r = 1 + num * _TAU**2
    border = (math.sqrt(r) / level) ** (2 / num)
    if border >= r:
        return math.inf
    variance = float(differences.var())
    return math.sqrt(variance * (border - 1) / (1 - border / r))


def is_hopeless(differences: Array, pairs: int, level: Numbers) -> np.ndarray:
    """Returns whether the evidence of so many pairs in all would hardly reach 1 / `level`.

    It would not if the pairs to come had for mean the better end of what those seen, `[..., n]`,
    allow (a one-sided interval of 80 %), and their deviation.
    """
    num = differences.shape[-1]
    mean = differences.mean(-1)
    variance = differences.var(-1, ddof=1)
    quantile = scipy.special.stdtrit(num - 1, 1 - _HOPELESS)
    better = mean - quantile * np.sqrt(variance / num)
    in_all = (num * mean + (pairs - num) * better) / pairs
    return _ratio(pairs, in_all, (pairs - 1) * variance) < 1 / level


def findable(pairs: int, level: float, power: float) -> Array:
    """Returns what is found with a probability of `power` by the first 1, 2, ... pairs, `[pairs]`.

    In deviations of a difference; nan where nothing is.
    """
    noise = np.random.default_rng(0).standard_normal((_NUM_DRAWN, pairs))
    sizes = np.geomspace(0.25, 64, 49)
    rates = []
    for size in sizes:
        most = np.maximum.accumulate(evidence(noise - size), axis=1)
        rates.append((most >= 1 / level).mean(0))
    found = np.array(rates) >= power
    first = sizes[found.argmax(0)]
    return np.where(found.any(0), first, math.nan)
