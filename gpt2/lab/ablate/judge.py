"""What the runs of a sweep say, look by look, and how many more seeds they call for."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import scipy  # loads its parts when they are used

from gpt2.lab.ablate.arms import Arm
from gpt2.lab.ablate.power import LEVEL, POWER, Numbers
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.ablate.verdicts import FOUND, Sample, Verdict, compare
from gpt2.utils.text import counted

_HOPELESS = 0.2  # conditional power
_OPEN = "to be decided"


def compared(results: pd.DataFrame, arm: Arm, state: str = "") -> pd.DataFrame:
    """Returns the rows of an arm's runs that are compared, or of those that ended in a state."""
    rows = results[results.purpose == "compare"]
    rows = rows[rows.arm == arm.name]
    if state:
        rows = rows[rows.state == state]
    return rows


def sample(results: pd.DataFrame, arm: Arm, seeds: int | None = None) -> Sample:
    """Returns the final scores of an arm, or of its first seeds."""
    runs = compared(results, arm)[:seeds]
    states = list(runs.state)
    return Sample(
        scores=runs.score.dropna().to_numpy(),
        diverged=states.count("diverged"),
        failed=states.count("failed"),
    )


def judge(sweep: Sweep, results: pd.DataFrame) -> dict[str, Verdict]:
    """Returns the verdict on each arm but the baseline.

    Of several looks, each takes all arms once their runs have ended, and decides on those that are
    clear, hopeless, or without a test; the last decides on all that are left.
    """
    verdicts: dict[str, Verdict] = {}
    ends: dict[str, int] = {}  # the looks that decided on arms
    several = len(sweep.looks) > 1
    for look in sweep.looks:
        waits = False
        samples = {}
        for arm in sweep.arms:
            found = sample(results, arm, ends.get(arm.name, look))
            samples[arm.name] = found
            if several and arm.name not in ends and found.num_runs < look:
                waits = True
        baseline = samples.pop(sweep.arms[0].name)
        level = level_at(sweep.looks, look)
        judged = compare(baseline, samples, level=level)
        for name, verdict in judged.items():
            if name in ends:
                continue
            has_test = math.isfinite(verdict.error)
            errors = abs(verdict.difference) / verdict.error
            hopeless = is_hopeless(errors, len(judged), sweep.looks, look)
            is_last = look == sweep.looks[-1]
            decides = is_last or hopeless or not has_test or verdict.words in FOUND
            if waits or not decides:
                verdicts[name] = Verdict(verdict.difference, _OPEN, verdict.baseline)
                continue
            ends[name] = look
            # Below 5 % where the arm differs, whatever the level of the look.
            p_value = verdict.p_value * LEVEL / level
            verdicts[name] = replace(verdict, p_value=min(p_value, 1.0))
        if waits:
            break
    return verdicts


def grow(sweep: Sweep) -> Sweep:
    """Returns the sweep with the seeds that its next look adds, once all runs have ended."""
    results = sweep.results()
    if "waiting" in set(results.state) or len(sweep.chosen) < len(sweep.arms):
        return sweep
    verdicts = judge(sweep, results)
    baseline, *arms = sweep.arms
    goes_on = [arm for arm in arms if verdicts[arm.name].words == _OPEN]
    if not goes_on:
        return sweep
    # An arm that was added has fewer.
    least = min(map(sweep.num_seeds, goes_on))
    number = min(look for look in sweep.looks if look > least)
    seeds = dict(sweep.seeds)
    for arm in (baseline, *goes_on):
        seeds[arm.name] = max(number, sweep.num_seeds(arm))
    print(f"{len(goes_on)} of {counted(len(arms), 'arm')} go on to {number} seeds")
    return replace(sweep, seeds=seeds)


def level_at(looks: Sequence[int], look: int) -> float:
    """Returns the level that a look spends, so that all spend `LEVEL`, early ones little.

    By the third power of the share of seeds (Kim and DeMets 1987, Biometrika 74), each look what is
    new: the level holds by Bonferroni's inequality.
    """
    earlier = [each for each in looks if each < look]
    before = max(earlier, default=0)
    spent = (look**3 - before**3) / looks[-1] ** 3
    return LEVEL * spent


def is_hopeless(
    errors: Numbers, num_arms: int, looks: Sequence[int], look: int
) -> bool | np.ndarray:
    """Returns whether the last look would hardly find an arm that is now so many errors away.

    It would with a probability below 20 % if the true difference were the smallest that it finds
    with `POWER` (conditional power; Lan, Simon and Halperin 1982).
    """
    share = look / looks[-1]
    isf = scipy.stats.norm.isf
    last_level = level_at(looks, looks[-1])
    border = isf(last_level / num_arms / 2)
    findable = border + isf(1 - POWER)
    expected = math.sqrt(share) * errors + (1 - share) * findable
    spread = math.sqrt(1 - share)
    return border - expected > isf(_HOPELESS) * spread
