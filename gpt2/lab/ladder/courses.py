"""How the multiplier of each arm changes with size, and the seeds that the next analysis adds."""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from gpt2.errors import UserError
from gpt2.lab.ablate.judge import compared, level_at
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.experiments.arms import Arm
from gpt2.lab.experiments.run_folder import ENDED
from gpt2.lab.ladder.multipliers import Course, Losses, judge_course
from gpt2.utils.text import counted

_OPEN = "to be decided"


def judge(
    sweeps: Sequence[Sweep], results: Sequence[pd.DataFrame]
) -> dict[str, Course]:
    """Return the course of each arm except the baseline, by name. `results` has a table per sweep.

    An arm is analysed after n seeds once the first n runs of the arm and of the baseline have ended
    at all sizes. An arm that is undecided continues to the next analysis.
    """
    baseline, *arms = sweeps[0].arms
    courses = {}
    for arm in arms:
        for analysis in sweeps[0].analyses:
            course = _analyse(sweeps, results, (baseline, arm), analysis)
            courses[arm.name] = course
            if course.words != "undecided":
                break
    return courses


def _analyse(
    sweeps: Sequence[Sweep],
    results: Sequence[pd.DataFrame],
    pair: tuple[Arm, Arm],
    analysis: int,
) -> Course:
    """Return the course of an arm after `analysis` seeds. `pair` is (baseline, arm)."""
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
                return Course(_OPEN)
            amount = "seconds" if sweep.equal == "seconds" else "flops"
            at_sizes.append(Losses(runs[amount].mean(), runs.score.to_numpy()))
            # The FLOPs of another version of the code are NaN.
            if not at_sizes[-1].compute > 0:
                raise UserError(
                    f"The FLOPs of {arm.name} are unknown, because it runs another version of the"
                    " code",
                    "Use --equal=seconds",
                )
        losses.append(at_sizes)
    baseline, others = losses
    level = level_at(sweeps[0].analyses, analysis)
    return judge_course(baseline, others, level=level, num_arms=len(sweeps[0].arms) - 1)


def grow(sweeps: Sequence[Sweep]) -> list[Sweep]:
    """Return the sweeps with the seeds of the next analysis for arms that have no verdict yet.

    If a run has not ended, return the sweeps unchanged.
    """
    results = [sweep.results() for sweep in sweeps]
    if any("waiting" in set(table.state) for table in results):
        return list(sweeps)
    courses = judge(sweeps, results)
    baseline, *arms = sweeps[0].arms
    open_arms = [arm for arm in arms if courses[arm.name].words == _OPEN]
    if not open_arms:
        return list(sweeps)
    analyses = sweeps[0].analyses
    fewest = min(sweep.num_seeds(arm) for sweep in sweeps for arm in open_arms)
    number = min(analysis for analysis in analyses if analysis > fewest)
    print(f"{len(open_arms)} of {counted(len(arms), 'arm')} continue to {number} seeds")
    grown = []
    for sweep in sweeps:
        seeds = dict(sweep.seeds)
        for arm in (baseline, *open_arms):
            seeds[arm.name] = max(number, sweep.num_seeds(arm))
        grown.append(replace(sweep, seeds=seeds))
    return grown
