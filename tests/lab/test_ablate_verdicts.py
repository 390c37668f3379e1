"""Verdicts on the arms of an ablation: their rates are as stated, and their numbers are known."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from gpt2.lab.ablate.judge import analysis_level, is_arm_futile, judge_sweep
from gpt2.lab.ablate.power import dunnett_quantile
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.ablate.verdicts import CLEAR, ArmScores, compare
from tests.programs import verdict_rates

NUM_ARMS = 5
NAMES = [f"arm {i}" for i in range(NUM_ARMS)]
# Runs of the baseline and of each arm, and the standard deviations of both.
SETTINGS = {
    "3 seeds": (3, 3, 1.0, (1.0,) * 5),
    "a noisy baseline, 5 seeds": (5, 5, 3.0, (1.0,) * 5),
    "a noisy baseline of 3 seeds, arms of 5": (3, 5, 3.0, (1.0,) * 5),
    "a calm baseline of 5 seeds, arms of 3": (5, 3, 1.0, (3.0,) * 5),
    "a noisy arm, 5 seeds": (5, 5, 1.0, (3.0, 1.0, 1.0, 1.0, 1.0)),
}

# Dunnett 1955, table 1: blood counts of six animals without a drug, four and five with one.
BLOOD = (
    [7.40, 8.50, 7.20, 8.24, 9.84, 8.32],
    [9.76, 8.80, 7.68, 9.36],
    [12.80, 9.68, 12.16, 9.20, 10.55],
)


def sample(values, **counts):
    return ArmScores(pd.Series(values, dtype=float), **counts)


def judge(values, arms, paired=False):
    samples = {name: sample(scores) for name, scores in arms.items()}
    return compare(sample(values), samples, paired=paired)


def is_found(verdict):
    return verdict.words in CLEAR


def assert_rate_at_most(count, num, rate):
    p_value = stats.binomtest(count, num, rate, alternative="greater").pvalue
    assert p_value > 0.01, f"{count} of {num} is more than {rate:.1%}"


# Rates in simulation.


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_false_verdicts_are_as_rare_as_stated(setting):
    num_baseline, num, deviation, deviations = setting
    sizes = (num_baseline, *[num] * NUM_ARMS)
    num_sweeps = verdict_rates.CHUNK
    rates = verdict_rates.rates(sizes, (deviation, *deviations), num=num_sweeps)
    found = round(rates["both"] * num_sweeps / 100)
    # Welch's approximation at these sizes is off by up to a point: the module's docstring.
    allowed = 0.06 if num_baseline != num else 0.05
    assert_rate_at_most(found, num_sweeps, allowed)


def test_the_simulated_rule_is_the_one_of_compare(monkeypatch):
    """That of the docstring's table; deviations that differ by 8 leave arms out of the pool."""
    monkeypatch.setattr(verdict_rates, "CHUNK", 200)
    sizes = (5, 3, 3, 3, 3)
    deviations = (1.0, 8.0, 1.0, 1.0, 0.3)
    scores = verdict_rates.draw(np.random.default_rng(9), sizes, deviations, shift=3.0)
    expected = verdict_rates.both(*verdict_rates.moments(scores), sizes)
    assert 10 < expected.sum() < 700
    for i, row in enumerate(expected):
        baseline, *arms = [values[i] for values in scores]
        verdicts = judge(baseline, dict(zip(NAMES, arms, strict=False)))
        assert list(map(is_found, verdicts.values())) == list(row)


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("arms", [1, 5])
def test_paired_sweeps_keep_the_level_and_find_more_where_runs_are_correlated(
    arms, seeds
):
    num = verdict_rates.CHUNK
    powers = []
    for correlation in (0.0, 0.5, 0.9):
        for deviation in (1.0, 3.0):
            scores = verdict_rates.draw_pairs(
                seeds, arms, correlation, deviation, num=num
            )
            false = verdict_rates.paired(scores).any(1)
            assert_rate_at_most(false.sum(), num, 0.05)
        scores = verdict_rates.draw_pairs(seeds, arms, correlation, shift=3.0, num=num)
        found = verdict_rates.paired(scores)[:, 0].mean()
        powers.append(found - verdict_rates.unpaired(scores)[:, 0].mean())
    assert powers == sorted(powers)
    assert powers[0] < -0.05
    assert powers[-1] > 0.1


def test_the_simulated_paired_rule_is_the_one_of_compare():
    scores = verdict_rates.draw_pairs(3, NUM_ARMS, 0.9, shift=3.0, num=60)
    expected = verdict_rates.paired(scores)
    assert 20 < expected.sum() < 60
    for found, drawn in zip(expected, scores, strict=True):
        baseline, *arms = drawn.T
        samples = dict(zip(NAMES, arms, strict=True))
        verdicts = judge(baseline, samples, paired=True)
        assert list(map(is_found, verdicts.values())) == list(found)


@pytest.mark.parametrize("seeds", [3, 5])
def test_outliers_are_no_warning_of_a_false_verdict(seeds):
    """Scores that are not normal make false verdicts more likely, as docs/ablations.md states."""
    drawn = verdict_rates.draw_skewed(seeds, num=verdict_rates.CHUNK)
    border = np.quantile(verdict_rates.largest_outliers(drawn.pop("normal")), 0.95)
    for scores in drawn.values():
        warned = verdict_rates.largest_outliers(scores) > border
        for rule in (verdict_rates.unpaired, verdict_rates.paired):
            false = rule(scores).any(1)
            assert 0.07 < false.mean() < 0.18
            assert warned[false].mean() < 0.08


# Looks.


def test_analyses_keep_the_level_and_most_power_and_save_runs():
    num_sweeps = 1000
    for deviations in verdict_rates.NOISY.values():
        scores = verdict_rates.draw_looks(deviations, num=num_sweeps)
        found, runs = verdict_rates.analyse(scores)
        assert_rate_at_most(found.any(1).sum(), num_sweeps, 0.05)
        assert runs.mean() < 38  # of 48
    equal = verdict_rates.NOISY["equal"]
    scores = verdict_rates.draw_looks(equal, (4.0, 12.0), num=num_sweeps)
    found, _ = verdict_rates.analyse(scores)
    found_at_last, _ = verdict_rates.analyse(scores, (8,))
    assert 0.8 < found[:, 0].mean() < found_at_last[:, 0].mean() < 0.9
    assert found[:, 1].all()


def test_the_simulated_analyses_are_those_of_sweeps(tmp_path):
    arms = [SimpleNamespace(name=name) for name in ("baseline", *NAMES)]
    analyses = list(verdict_rates.ANALYSES)
    sweep = Sweep(tmp_path, [], tuple(arms), "tokens", analyses, [])
    noisy = verdict_rates.NOISY["one arm"]
    scores = verdict_rates.draw_looks(noisy, (0.0, 4.0, 6.0), num=40)
    expected, _ = verdict_rates.analyse(scores)
    assert 40 < expected.sum() < 90
    for found, drawn in zip(expected, scores, strict=True):
        results = pd.DataFrame(drawn, columns=["baseline", *NAMES])
        results = results.melt(ignore_index=False, var_name="arm", value_name="score")
        results = results.rename_axis("seed").reset_index()
        results = results.assign(purpose="compare", state="finished")
        verdicts = judge_sweep(sweep, results)
        assert list(map(is_found, verdicts.values())) == list(found)


def test_analyses_share_the_level():
    assert analysis_level([8], 8) == 0.05
    levels = [analysis_level([3, 5, 8], analysis) for analysis in (3, 5, 8)]
    assert sum(levels) == pytest.approx(0.05)
    assert levels[0] == pytest.approx(0.05 * (3 / 8) ** 3)


def test_futile_is_what_the_last_analysis_would_find_in_a_fifth_of_sweeps():
    """Half of the seeds are `now` away; the others are drawn about what 80 % would find."""
    analyses = [4, 8]
    border = stats.norm.isf(analysis_level(analyses, 8) / 5 / 2)
    rng = np.random.default_rng(0)
    now = np.linspace(0, 4, 401)
    futile = is_arm_futile(now / math.sqrt(2), 5, analyses, 4)
    edge = now[~futile][0]
    other = border + stats.norm.isf(0.2) + math.sqrt(2) * rng.standard_normal(100_000)
    assert np.mean((edge + other) / 2 > border) == pytest.approx(0.2, abs=0.01)


# Known numbers.


@pytest.mark.parametrize(
    ("sizes", "published"),
    [((3,) * 3, 2.86), ((3,) * 6, 2.90), ((11,) * 3, 2.32)],
)
def test_quantiles_are_those_of_dunnetts_table(sizes, published):
    """Two-sided, 5 % (Dunnett 1964, Biometrics 20, table II), by arms and degrees of freedom."""
    df = sum(sizes) - len(sizes)
    assert dunnett_quantile(sizes, 0.05, df) == pytest.approx(published, abs=0.006)


def test_several_arms_have_the_wider_of_dunnetts_and_welchs_intervals():
    control, *drugs = BLOOD
    verdicts = judge(control, dict(enumerate(drugs)))
    dunnett = stats.dunnett(*drugs, control=control)
    ends = dunnett.confidence_interval(0.95)
    for i, drug in enumerate(drugs):
        verdict = verdicts[i]
        welch = stats.ttest_ind(drug, control, equal_var=False)
        alone = welch.confidence_interval(1 - 0.05 / math.sqrt(2))
        p_value = max(dunnett.pvalue[i], math.sqrt(2) * welch.pvalue)
        low = min(ends.low[i], alone.low)
        high = max(ends.high[i], alone.high)
        # scipy draws at random, with errors a tenth as large as these tolerances.
        assert verdict.p_value == pytest.approx(p_value, abs=5e-4)
        assert verdict.low == pytest.approx(low, abs=0.01)
        assert verdict.high == pytest.approx(high, abs=0.01)
        assert verdict.difference == pytest.approx(np.mean(drug) - np.mean(control))
    assert verdicts[0].p_value == pytest.approx(0.6200, abs=5e-4)  # Dunnett's
    assert verdicts[0].words == "undecided"


def test_one_arm_has_the_wider_of_students_and_welchs_intervals():
    control, _, drug = BLOOD
    for arm in (drug, [8.0, 8.1, 8.2, 8.05, 30.0]):
        verdict = judge(control, {"arm": arm})["arm"]
        student = stats.ttest_ind(arm, control)
        welch = stats.ttest_ind(arm, control, equal_var=False)
        low, high = student.confidence_interval(0.95)
        other_low, other_high = welch.confidence_interval(0.95)
        assert verdict.p_value == pytest.approx(max(student.pvalue, welch.pvalue))
        assert verdict.low == pytest.approx(min(low, other_low))
        assert verdict.high == pytest.approx(max(high, other_high))


def test_differences_by_seed_may_vary_less_than_scores():
    """Three seeds of a weight decay; the difference of means has an interval of 0.1."""
    baseline = np.array([3.85, 3.78, 3.81])
    arm = baseline - np.array([0.00219, 0.00211, 0.00217])
    assert judge(baseline, {"arm": arm})["arm"].words.startswith("undecided")
    verdict = judge(baseline, {"arm": arm}, paired=True)["arm"]
    assert verdict.words == "better"
    assert verdict.difference == pytest.approx(-0.00216, abs=5e-6)
    assert verdict.high - verdict.difference == pytest.approx(0.0001, abs=5e-6)


def test_paired_verdicts_are_those_of_t_tests_of_the_seeds_of_both_arms():
    baseline = sample([3.8, 3.7, 3.9, 3.6])
    first = sample([3.7, 3.65, 3.75, 3.6])
    second = ArmScores(pd.Series([3.5, 3.65, 3.9], index=[9, 1, 2]), failed=1)
    verdicts = compare(baseline, {"first": first, "second": second}, paired=True)
    pairs = {
        "first": ([3.7, 3.65, 3.75, 3.6], [3.8, 3.7, 3.9, 3.6]),
        "second": ([3.65, 3.9], [3.7, 3.9]),
    }
    for name, (scores, baselines) in pairs.items():
        verdict = verdicts[name]
        test = stats.ttest_rel(scores, baselines)
        ends = test.confidence_interval(0.975)  # of two arms
        assert verdict.pairs == len(scores)
        assert verdict.baseline == pytest.approx(np.mean(baselines))
        assert verdict.p_value == pytest.approx(min(2 * test.pvalue, 1))
        assert verdict.low == pytest.approx(ends.low)
        assert verdict.high == pytest.approx(ends.high)
        assert verdict.difference == pytest.approx(test.statistic * verdict.error)


# Sweeps that allow no verdict, or hardly one.

FINE = sample([3.0, 3.1, 3.2])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("baseline", "arm", "words"),
    [
        (FINE, sample([2.0]), "fewer than two runs finished: no verdict"),
        (sample([]), FINE, "fewer than two runs of the baseline finished: no verdict"),
        (FINE, sample([2.0, 2.1, 2.2], diverged=2), "diverged in 2 of 5 runs"),
        (
            sample([3.0], diverged=1),
            FINE,
            "the baseline diverged in 1 of 2 runs: no verdict",
        ),
        (
            sample([0.1] * 3),  # whose deviation rounds to 1e-17
            sample([0.3] * 3),
            "the same score for every seed: no verdict",
        ),
    ],
)
def test_words_say_why_there_is_no_verdict(baseline, arm, words):
    verdict = compare(baseline, {"arm": arm})["arm"]
    assert verdict.words == words
    for value in (verdict.low, verdict.high, verdict.p_value, verdict.detectable()):
        assert math.isnan(value)
    assert verdict.difference == pytest.approx(arm.mean - baseline.mean, nan_ok=True)


def test_pairs_need_two_seeds_and_differences_that_vary():
    arms = {
        "one pair": ArmScores(pd.Series([2.0, 2.1, 2.2], index=[2, 3, 4])),
        "the same": sample([3.0, 3.1, 3.2]),
        "diverged": sample([2.0, 2.1], diverged=1),
    }
    verdicts = compare(FINE, arms, paired=True)
    words = [verdict.words for verdict in verdicts.values()]
    assert words == [
        "fewer than two pairs finished: no verdict",
        "the same difference for every seed: no verdict",
        "diverged in 1 of 3 runs",
    ]


def test_a_noisy_arm_does_not_blind_the_others():
    baseline = [3.796, 3.8, 3.804]
    lower = [3.697, 3.7, 3.703]
    alone = judge(baseline, {"lower": lower})["lower"]
    verdicts = judge(baseline, {"lower": lower, "noisy": [4.5, 5.3, 4.9]})
    other = verdicts["lower"]
    assert alone.words == "better"
    assert other.words == "better"
    assert other.high - other.low < 2 * (alone.high - alone.low)
    assert verdicts["noisy"].high - verdicts["noisy"].low > 1


def test_arms_without_a_test_do_not_widen_the_intervals_of_others():
    fine = sample([2.0, 2.1, 2.3])
    without = {"one run": sample([1.0]), "diverged": sample([1.0, 9.0], diverged=1)}
    verdicts = compare(FINE, {"fine": fine} | without)
    assert verdicts["fine"] == compare(FINE, {"fine": fine})["fine"]
    assert compare(FINE, {}) == {}


def test_detectable_is_found_in_four_of_five_sweeps_of_unequal_deviations():
    """What is measured is taken for the truth, and swept again and again."""
    deviations = (0.5, 0.1, 0.3)
    rng = np.random.default_rng(12)
    unit = np.linspace(-1.0, 1.0, 3)  # whose deviation is 1
    baseline, *arms = [deviation * unit for deviation in deviations]
    verdicts = judge(baseline, dict(enumerate(arms)))
    for i, verdict in verdicts.items():
        drawn = rng.normal(0.0, deviations, (10_000, 3, 3))
        drawn[..., i + 1] += verdict.detectable()
        by_arm = np.moveaxis(drawn, -1, 0)
        found = verdict_rates.both(*verdict_rates.moments(by_arm), (3, 3, 3))
        assert found[:, i].mean() == pytest.approx(0.8, abs=0.02)


def test_detectable_is_found_in_four_of_five_paired_sweeps():
    baseline = np.zeros(4)
    differences = {"arm": [-0.1, 0.0, 0.1, 0.2], "other": [0.1, 0.3, 0.2, 0.1]}
    verdict = judge(baseline, differences, paired=True)["arm"]
    scores = np.zeros((10_000, 4, 3))
    drawn = np.random.default_rng(0).standard_normal((10_000, 4))
    deviation = np.std(differences["arm"], ddof=1)
    scores[..., 1] = deviation * drawn + verdict.detectable()
    scores[..., 2] = drawn
    found = verdict_rates.paired(scores)[:, 0].mean()
    assert found == pytest.approx(0.8, abs=0.02)
