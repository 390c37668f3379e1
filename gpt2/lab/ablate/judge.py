"""Judge the arms of a sweep, and add seeds for arms that an interim analysis leaves open."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import scipy  # its submodules are imported when they are used

from gpt2.lab.ablate.power import LEVEL, POWER, Numbers
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.ablate.verdicts import CLEAR, ArmScores, Verdict, compare
from gpt2.lab.experiments.arms import Arm
from gpt2.lab.experiments.decisions import Decision
from gpt2.utils.text import counted

_FUTILE = 0.2  # an arm stops if its conditional power is below this


def compared(results: pd.DataFrame, arm: Arm, state: str = "") -> pd.DataFrame:
    """Return the rows of `results` for the runs of an arm, except tuning runs.

    `results` is the table of all runs that `read_results` returns. With `state`, such as
    `finished`, return only the runs in this state.
    """
    rows = results[results.purpose == "compare"]
    rows = rows[rows.arm == arm.name]
    if state:
        rows = rows[rows.state == state]
    return rows


def arm_scores(results: pd.DataFrame, arm: Arm, seeds: int | None = None) -> ArmScores:
    """Return the final scores, and the numbers of diverged and failed runs, of an arm.

    `results` is the table of all runs that `read_results` returns. With `seeds`, only the first
    `seeds` runs of the arm count.
    """
    runs = compared(results, arm)[:seeds]
    states = list(runs.state)
    return ArmScores(
        scores=runs.set_index("seed").score.dropna(),
        diverged=states.count("diverged"),
        failed=states.count("failed"),
    )


def judge_sweep(sweep: Sweep, results: pd.DataFrame) -> dict[str, Verdict]:
    """Return the verdict on each arm except the baseline, by name.

    `results` is the table of all runs that `read_results` returns. An interim analysis after n
    seeds is made once the first n runs of the baseline and of all arms without a verdict have
    ended. An arm gets its verdict if the tests find a difference, if the arm is futile (see
    `is_arm_futile`), or if no test applies, for example because a run diverged. In the last
    analysis, all remaining arms get their verdicts.
    """
    verdicts: dict[str, Verdict] = {}
    ends: dict[str, int] = {}  # the number of seeds at which an arm got its verdict
    several = len(sweep.analyses) > 1
    for analysis in sweep.analyses:
        waits = False
        samples = {}
        for arm in sweep.arms:
            scores = arm_scores(results, arm, ends.get(arm.name, analysis))
            samples[arm.name] = scores
            if several and arm.name not in ends and scores.num_runs < analysis:
                waits = True
        baseline = samples.pop(sweep.arms[0].name)
        level = analysis_level(sweep.analyses, analysis)
        judged = compare(baseline, samples, level=level, paired=sweep.paired)
        for name, verdict in judged.items():
            if name in ends:
                continue
            has_test = math.isfinite(verdict.error)
            errors = abs(verdict.difference) / verdict.error
            futile = is_arm_futile(errors, len(judged), sweep.analyses, analysis)
            is_last = analysis == sweep.analyses[-1]
            decides = is_last or futile or not has_test or verdict.words in CLEAR
            if waits or not decides:
                verdicts[name] = Verdict(
                    verdict.difference, Decision.OPEN, verdict.baseline
                )
                continue
            ends[name] = analysis
            # p is scaled so that it is below 5 % if and only if the arm differs at the level of
            # this analysis.
            p_value = verdict.p_value * LEVEL / level
            verdicts[name] = replace(verdict, p_value=min(p_value, 1.0))
        if waits:
            break
    return verdicts


def add_seeds(sweeps: Sequence[Sweep], words: Mapping[str, str]) -> list[Sweep]:
    """Return all sweeps, with the next analysis's number of seeds for the baseline and open arms.

    `words` maps the name of each arm to its verdict. An arm is open if its verdict is
    `Decision.OPEN`. All sweeps have the same arms, for example at the sizes of a ladder. Return the
    sweeps unchanged if a run has not ended, if tuned values have not been chosen, or if no arm is
    open.
    """
    baseline, *arms = sweeps[0].arms
    open_arms = [arm for arm in arms if words[arm.name] == Decision.OPEN]
    waits = any(len(sweep.chosen) <= len(arms) for sweep in sweeps)
    for sweep in sweeps:
        waits |= any(run.outcome().state == "waiting" for run in sweep.all_runs())
    if waits or not open_arms:
        return list(sweeps)
    # Open arms may have different numbers of seeds, because a command may add an arm later.
    fewest = min(sweep.num_seeds(arm) for sweep in sweeps for arm in open_arms)
    number = min(analysis for analysis in sweeps[0].analyses if analysis > fewest)
    print(f"{len(open_arms)} of {counted(len(arms), 'arm')} continue to {number} seeds")
    grown = []
    for sweep in sweeps:
        seeds = dict(sweep.seeds)
        for arm in (baseline, *open_arms):
            seeds[arm.name] = max(number, sweep.num_seeds(arm))
        grown.append(replace(sweep, seeds=seeds))
    return grown


def analysis_level(analyses: Sequence[int], analysis: int) -> float:
    """Return the level (error rate) of the analysis after `analysis` seeds.

    `analyses` are the numbers of seeds of all analyses. The sum of the levels up to an
    analysis is proportional to the third power of its number of seeds (Kim and DeMets 1987,
    Biometrika 74). All levels add up to `LEVEL`. By Bonferroni's inequality, the error rate of all
    analyses together is therefore at most `LEVEL`.
    """
    earlier = [other for other in analyses if other < analysis]
    before = max(earlier, default=0)
    spent = (analysis**3 - before**3) / analyses[-1] ** 3
    return LEVEL * spent


def is_arm_futile(
    errors: Numbers, num_arms: int, analyses: Sequence[int], analysis: int
) -> bool | np.ndarray:
    """Return whether an arm is futile: whether further seeds are unlikely to show a difference.

    `errors` is the arm's difference from the baseline so far, in standard errors. `num_arms` arms
    are tested together. `analysis` is the number of seeds so far, and `analyses` are the numbers of
    seeds of all analyses. An arm is futile if its conditional power is below 20 %. The conditional
    power is the probability that the last analysis finds a difference, given the scores so far
    (Lan, Simon and Halperin 1982). The true difference is assumed to be the smallest difference
    that the last analysis would find with probability `POWER` if there were no scores yet.
    """
    fraction = analysis / analyses[-1]
    isf = scipy.stats.norm.isf
    last_level = analysis_level(analyses, analyses[-1])
    border = isf(last_level / num_arms / 2)
    detectable = border + isf(1 - POWER)
    expected = math.sqrt(fraction) * errors + (1 - fraction) * detectable
    spread = math.sqrt(1 - fraction)
    return border - expected > isf(_FUTILE) * spread
