"""Compute the `Course` of each arm of a ladder: how its compute multiplier changes with size.

The course is the result of the first analysis that does not leave the arm undecided. If all
analyses leave the arm undecided, the course is the result of the last analysis.
"""

from collections.abc import Sequence

import pandas as pd

from gpt2.lab.ablate.judge import analysis_level, compared
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.experiments.arms import Arm
from gpt2.lab.experiments.decisions import Decision
from gpt2.lab.experiments.run_folder import ENDED
from gpt2.lab.ladder.multipliers import Course, Losses, judge_course


def judge_ladder(
    sweeps: Sequence[Sweep], results: Sequence[pd.DataFrame]
) -> dict[str, Course]:
    """Return the course of each arm except the baseline, by name.

    A course describes how the arm's compute multiplier changes with size. `sweeps` contains the
    sweep of each size, and `results` contains, for each size, the table that `read_results`
    returns. An arm is analysed after n seeds once the first n runs of the arm and of the baseline
    have ended at all sizes. An arm that is undecided continues to the next analysis.
    """
    baseline, *arms = sweeps[0].arms
    courses = {}
    for arm in arms:
        for analysis in sweeps[0].analyses:
            course = _analyse(sweeps, results, (baseline, arm), analysis)
            courses[arm.name] = course
            if course.words != Decision.UNDECIDED:
                break
    return courses


def _analyse(
    sweeps: Sequence[Sweep],
    results: Sequence[pd.DataFrame],
    pair: tuple[Arm, Arm],
    analysis: int,
) -> Course:
    """Return the course of an arm, computed from its first `analysis` seeds.

    A course describes how the arm's compute multiplier changes with size. `sweeps` contains the
    sweep of each size, and `results` contains, for each size, the table that `read_results`
    returns. `pair` is (baseline, arm). If one of their runs has not ended or has no score, the
    course contains no numbers.
    """
    losses: list[list[Losses]] = []
    for arm in pair:
        at_sizes = []
        for sweep, table in zip(sweeps, results, strict=True):
            runs = compared(table, arm)[:analysis]
            states = set(runs.state)
            broken = states - {"finished", "waiting"}
            if broken:
                words = f"{arm.name} {broken.pop()} in {sweep.root.name}"
                return Course(f"no verdict: {words}")
            if len(runs) < analysis or not states <= {*ENDED}:
                return Course(Decision.OPEN)
            compute = runs[sweep.amount].to_numpy()
            at_sizes.append(Losses(compute, runs.score.to_numpy()))
        losses.append(at_sizes)
    baseline, others = losses
    num_arms = len(sweeps[0].arms) - 1
    level = analysis_level(sweeps[0].analyses, analysis) / num_arms
    return judge_course(baseline, others, level=level)
