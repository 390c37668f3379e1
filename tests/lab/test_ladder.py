"""Ladders: the options of each size, compute multipliers, and the verdicts on their course."""

import dataclasses
import shutil
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from configs import quickstart
from gpt2.config import Config, with_options
from gpt2.errors import UserError
from gpt2.lab.ablate.judge import add_seeds
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.experiments.arms import make_arms
from gpt2.lab.experiments.cells import print_table
from gpt2.lab.ladder import __main__ as ladder
from gpt2.lab.ladder.courses import judge_ladder
from gpt2.lab.ladder.dial import at_depth
from gpt2.lab.ladder.ladder_report import print_courses, write_report
from gpt2.lab.ladder.multipliers import Losses, judge_course
from gpt2.lab.ladder.noise import (
    gains,
    ledger_pairs,
    measure_noise,
    plan_pairs,
    sweep_pairs,
)
from gpt2.lab.ledger.evidence import evidence, level_at
from tests.helpers import ROOT, parsed, thorough, write_run
from tests.programs.ladder_rates import power_law, simulate, with_irreducible

QUICKSTART = Config.from_dict(quickstart.get_config())
COMPUTE = 10.0 ** np.arange(10, 14)


def loss_of(compute):
    """The loss of a baseline whose every decade of compute is worth 10 %."""
    return 30.0 * compute ** np.log10(0.9)


def ladder_of(multipliers):
    """Losses of three seeds at each size, whose deviations cancel in the mean."""
    scores = loss_of(COMPUTE * np.asarray(multipliers))
    deviations = np.array([-1e-4, 0.0, 1e-4])
    return [
        Losses(c, score + deviations) for c, score in zip(COMPUTE, scores, strict=True)
    ]


# The dial


@pytest.mark.parametrize(
    ("depth", "width", "batch", "steps"),
    [(2, 64, 8, 125), (3, 96, 12, 281), (4, 128, 16, 500), (8, 256, 36, 1778)],
)
def test_a_size_has_its_width_batch_and_tokens(depth, width, batch, steps):
    (arm,) = make_arms(QUICKSTART, [], one_at_a_time=False)
    ratio = Fraction(depth, 4)
    config = at_depth(arm, ratio).config
    assert config.model.num_layers == config.model.num_heads == depth
    assert config.model.embed_dim == width
    assert config.model.mup_base_width == 128
    assert config.model.mup_base_depth == 4
    assert config.data.batch_size == batch
    assert config.train.num_steps == steps
    assert config.optim.warmup_steps == round(steps / 10)
    tokens = batch * steps / (16 * 500)
    assert tokens == pytest.approx(ratio**3, rel=0.001)
    assert config.optim.learning_rate == pytest.approx(6e-3 * (batch / 16) ** 0.5)
    # The fraction of the run over which AdamW averages.
    decay = config.optim.learning_rate * config.optim.weight_decay * steps
    assert decay == pytest.approx(6e-3 * 0.1 * 500)


def test_a_timescale_is_the_same_fraction_of_the_run_at_every_size():
    config = with_options(QUICKSTART, {"optim.decay_timescale": 0.25})
    (arm,) = make_arms(config, [], one_at_a_time=False)
    for depth in (2, 8):
        config = at_depth(arm, Fraction(depth, 4)).config
        num_steps = config.train.num_steps
        per_run = config.optim.learning_rate * config.optim.decay(num_steps) * num_steps
        assert per_run == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("option", "value", "size"), [("num_heads", 2, "3/2"), ("num_layers", 6, "9/2")]
)
def test_a_size_that_is_not_whole_is_refused(option, value, size):
    config = with_options(QUICKSTART, {f"model.{option}": value})
    (arm,) = make_arms(config, [], one_at_a_time=False)
    message = rf"baseline at 3/4 of its depth would have model\.{option}={size}"
    with pytest.raises(UserError, match=message):
        at_depth(arm, Fraction(3, 4))


def test_a_size_has_at_least_one_step():
    config = with_options(QUICKSTART, {"data.batch_size": 8, "train.num_steps": 5})
    (arm,) = make_arms(config, [], one_at_a_time=False)
    assert at_depth(arm, Fraction(1, 4)).config.train.num_steps == 1


def test_batches_of_every_size_divide_into_micro_batches():
    options = {"data.batch_size": 480, "train.accumulate_steps": 5}
    (arm,) = make_arms(with_options(QUICKSTART, options), [], one_at_a_time=False)
    for depth in (2, 3, 6, 8):
        batch_size = at_depth(arm, Fraction(depth, 4)).config.data.batch_size
        assert batch_size % 5 == 0
        assert batch_size % 32 == 0


# Multipliers


def test_multipliers_are_those_of_a_table_computed_elsewhere():
    """By a power law between sizes, from docs/ablations/sizes.csv, with 90 % at the largest."""
    rows = pd.read_csv(ROOT / "docs/ablations/sizes.csv")
    rows = rows[rows.purpose == "compare"]
    expected = {
        "optim.name=muon": (1.2, 4.0, 6.5, 5.0, 8.3),
        "model.bigram_embeddings=4096": (5.0, 3.6, 2.8, 2.2, 3.5),
        "model.activation=relu_squared": (0.53, 1.35, 1.5, 1.2, 1.8),
        "model.qk_norm=True": (0.95, 1.2, 1.2, None, None),
        "model.value_residual=True": (1.0, 1.0, 1.1, None, None),
    }

    def losses_of(name):
        ladder = []
        for size in ("2x64", "3x96", "4x128"):
            runs = rows[rows.arm == f"{size},{name}"].sort_values("seed")
            scores = runs["eval/loss"].to_numpy()
            ladder.append(Losses(runs.flops.mean(), scores))
        return ladder

    for name, (*values, low, high) in expected.items():
        course = judge_course(losses_of("baseline"), losses_of(name), level=0.1)
        found = [multiplier.value for multiplier in course.multipliers]
        np.testing.assert_allclose(found, values, rtol=0.05)
        if low:  # those ends are of unpaired runs
            last = course.multipliers[-1]
            assert low * 0.9 < last.low < last.high < high * 1.1


def test_an_arm_that_costs_more_compute_has_a_smaller_multiplier():
    baseline = ladder_of([1, 1, 1, 1])
    dearer = [Losses(2 * each.compute, each.scores) for each in baseline]
    course = judge_course(baseline, dearer)
    found = [multiplier.value for multiplier in course.multipliers]
    np.testing.assert_allclose(found, 0.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("multipliers", "words"),
    [
        ([1, 1, 1, 1], "constant"),
        ([3, 3, 3, 3], "constant"),
        ([1, 2, 4, 8], "grows"),
        ([8, 4, 2, 1], "fades"),
        ([0.5, 1, 2, 4], "flips"),
        ([4, 2, 1, 0.5], "flips"),
    ],
)
def test_courses(multipliers, words):
    course = judge_course(ladder_of([1, 1, 1, 1]), ladder_of(multipliers))
    assert course.words == words
    found = [multiplier.value for multiplier in course.multipliers]
    np.testing.assert_allclose(found, multipliers, rtol=1e-3)
    assert course.slope.value == pytest.approx(multipliers[1] / multipliers[0], 1e-3)


def test_a_course_is_undecided_if_the_noise_hides_it_and_none_if_the_baseline_gets_worse():
    rng = np.random.default_rng(0)
    noisy = ladder_of([1, 2, 4, 8])
    noisy = [Losses(c, s + rng.normal(0, 1, 3)) for c, s in noisy]
    assert judge_course(ladder_of([1, 1, 1, 1]), noisy).words == "undecided"
    course = judge_course(ladder_of([1, 1, 0.001, 1]), noisy)
    assert course.words == "no verdict: the baseline does not improve with its size"


def test_a_forecast_reaches_ten_times_the_compute_over_three_forms():
    course = judge_course(ladder_of([1, 1, 1, 1]), ladder_of([1, 2, 4, 8]))
    low, high = course.forecast
    # Constant: the mean of the logarithms.
    assert low == pytest.approx(8**0.5, rel=0.01)
    assert high == pytest.approx(16, rel=0.01)  # linear


@pytest.mark.parametrize(
    ("case", "loss", "least", "correlation"),
    [
        # The rate of false verdicts is largest here.
        thorough("at the limit", power_law, 0.0, 0.0),
        ("a gain of 2", with_irreducible, 0.9, 0.9),
        thorough("at the limit", power_law, 0.0, 0.9),
        thorough("a gain of 2", with_irreducible, 0.9, 0.0),
        thorough("a gain of 4", with_irreducible, 0.9, 0.0),
        thorough("a gain of 4", with_irreducible, 0.9, 0.9),
        thorough("grows by 3", with_irreducible, 0.8, 0.0),
        thorough("grows by 3", with_irreducible, 0.8, 0.9),
    ],
)
def test_at_most_one_ladder_in_twenty_has_a_false_verdict(
    case, loss, least, correlation
):
    wrong, found = simulate(
        case, seeds=3, correlation=correlation, loss=loss, ladders=400
    )
    rate = binomtest(round(wrong * 400), 400, 0.05, alternative="greater")
    assert rate.pvalue > 0.01, wrong
    assert found >= least


def test_intervals_include_the_noise_of_seconds():
    rng = np.random.default_rng(0)
    ladders = []
    for multiplier in (1, 2):
        ladder = []
        for compute in COMPUTE:
            seconds = compute * np.exp(0.1 * rng.standard_normal((300, 3)))
            scores = loss_of(compute * multiplier) + 1e-5 * rng.standard_normal(
                (300, 3)
            )
            ladder.append((seconds, scores))
        ladders.append(ladder)
    contained = 0
    for i in range(300):
        baseline, arm = [[Losses(c[i], s[i]) for c, s in ladder] for ladder in ladders]
        course = judge_course(baseline, arm)
        first = course.multipliers[0]
        contained += first.low < 2 < first.high
    assert binomtest(contained, 300, 0.95).pvalue > 0.01


# Noise, and the pairs that a gain needs


def test_pairs_of_a_sweep_are_those_of_power_tables():
    """As G*Power 3.1 prints for a paired t-test, two-sided, level 5 %, power 80 %."""
    pairs = {0.2: 199, 0.5: 34, 0.8: 15, 1.0: 10}
    assert {effect: sweep_pairs(effect) for effect in pairs} == pairs
    assert sweep_pairs(0.01) == np.inf


def test_a_ledger_accepts_four_of_five_ideas_within_its_pairs():
    pairs = ledger_pairs(4.0)
    differences = np.random.default_rng(1).standard_normal((1000, pairs)) - 4.0
    found = (evidence(differences) >= 1 / level_at(1, 0)).any(-1)
    assert 0.77 < found.mean() < 0.97
    assert ledger_pairs(2.0) > pairs
    assert ledger_pairs(0.1) == np.inf


def test_a_gain_is_the_difference_between_two_points_of_the_baseline(tmp_path):
    sweeps = sweeps_in(tmp_path, [3], [1, 1, 1])
    noise = measure_noise(sweeps, [sweep.results() for sweep in sweeps])
    np.testing.assert_allclose(noise.pair, 1e-3, rtol=1e-6)
    np.testing.assert_allclose(noise.seed, 0, atol=1e-12)
    noise = noise.assign(compute=COMPUTE[:3], loss=loss_of(COMPUTE[:3]))
    expected = loss_of(COMPUTE[:3]) - loss_of(1.5 * COMPUTE[:3])
    np.testing.assert_allclose(gains(noise, 1.5), expected, rtol=1e-9)
    sizes = COMPUTE[0] * np.array([1.0, 11.4, 64.0])  # of 2, 3 and 4 layers
    noise = noise.assign(compute=sizes, loss=with_irreducible(sizes))
    expected = with_irreducible(sizes) - with_irreducible(1.2 * sizes)
    np.testing.assert_allclose(gains(noise, 1.2), expected, rtol=0.02)


def test_a_plan_names_the_cheapest_size_in_80_columns(tmp_path, capsys):
    sweeps = sweeps_in(tmp_path, [3], [1, 1, 1], noise=0.1)
    noise = measure_noise(sweeps, [sweep.results() for sweep in sweeps])
    noise["pair"] = [2.0, 0.1, 0.05]
    plan = plan_pairs(noise, 1.2, "nats per token")
    assert plan["size"].to_list() == ["d2", "d4, cheapest", "d8"]
    assert plan["pairs in a sweep"].to_list() == ["over 1000", "12", "6"]
    assert plan["pairs in a ledger"].to_list() == ["over 16", "over 16", "12"]
    print_table(plan)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    noise["pair"] = [9.0, 9.0, np.nan]
    plan = plan_pairs(noise, 1.2, "nats per token")
    assert plan["size"].to_list() == ["d2", "d4", "d8"]
    assert plan["pairs in a sweep"].to_list() == ["over 1000", "over 1000", "-"]


def test_a_large_multiplier_is_no_overflow():
    means = [5.2, 4.6, 4.4, 4.398]
    deviations = np.array([-1e-4, 0.0, 1e-4])
    baseline = [Losses(c, m + deviations) for c, m in zip(COMPUTE, means, strict=True)]
    arm = [
        Losses(c, losses.scores - 0.8)
        for c, losses in zip(COMPUTE, baseline, strict=True)
    ]
    course = judge_course(baseline, arm)
    assert course.multipliers[-1] == course.slope == (1e6, 1e6, 1e6)


def test_a_report_of_a_ladder_needs_no_run_of_every_size(tmp_path):
    sweeps = sweeps_in(tmp_path, [3], [1, 2, 4])
    shutil.rmtree(sweeps[2].root / "runs")
    table = write_report(tmp_path, sweeps)
    assert table.verdict.to_list() == ["to be decided"]
    assert (
        "| d8 | 256 | 8 | 36 | 1778 | 0.009 | 0.0187 |  | ? | - | - |"
        in (tmp_path / "report.md").read_text()
    )


# The command


def sweeps_in(root, analyses, multipliers, noise=1e-3):
    """Sweeps of three sizes, whose runs have ended with known losses."""
    base = with_options(QUICKSTART, {"data.tokenizer": "char"}).with_vocabulary(65)
    arms = make_arms(base, ["optim.name=lion"], one_at_a_time=False)
    sweeps = []
    for depth in (2, 4, 8):
        sweep = Sweep(
            root=root / f"d{depth}",
            commands=["python -m gpt2.lab.ladder"],
            arms=tuple(at_depth(arm, Fraction(depth, 4)) for arm in arms),
            equal="tokens",
            analyses=analyses,
            tune=[],
        )
        sweeps.append(sweep.with_choices())
    train(sweeps, multipliers, noise)
    return sweeps


def train(sweeps, multipliers, noise):
    for sweep, multiplier in zip(sweeps, multipliers, strict=True):
        for run in sweep.runs():
            compute = float(run.config.train.num_steps) ** 2
            deviation = 0.0
            if run.arm != "baseline":
                compute *= multiplier
                deviation = noise * (run.config.seed - 1)
            write_run(run, loss_of(compute) + deviation)


def test_a_ladder_reports_a_row_for_each_arm_in_80_columns(tmp_path, capsys):
    sweeps = sweeps_in(tmp_path, [3], [1, 2, 4])
    table = write_report(tmp_path, sweeps)
    assert list(table) == [
        "arm",
        "d2",
        "d4",
        "d8",
        "per decade",
        "at 10 times",
        "verdict",
    ]
    assert table.verdict.to_list() == ["grows"]
    assert (tmp_path / "multipliers.png").stat().st_size > 10_000
    report = (tmp_path / "report.md").read_text()
    assert "| d8 | 256 | 8 | 36 | 1778 | 0.009 | 0.0187 |" in report
    assert "| optim.name=lion | optim.name | lion | adamw |" in report
    rows = pd.read_csv(tmp_path / "multipliers.csv")
    assert rows["size"].to_list() == ["d2", "d4", "d8"]
    print_courses(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "optim.name=lion: grows" in lines
    assert f"  d8           {table.d8[0]}" in map(str.rstrip, lines)


def test_a_tuned_rate_and_raised_seeds_are_in_the_report(tmp_path):
    sweeps = sweeps_in(tmp_path, [3], [1, 2, 4])
    tuned = []
    for sweep in sweeps:
        tune = [[{"optim.learning_rate": 0.004}, {"optim.learning_rate": 0.002}]]
        chosen = {arm.name: tune[0][0] for arm in sweep.arms}
        tuned.append(
            dataclasses.replace(sweep, tune=tune, raised_from=2, chosen=chosen)
        )
        for run in tuned[-1].all_runs():
            write_run(run, 4.0)
    write_report(tmp_path, tuned)
    report = (tmp_path / "report.md").read_text()
    assert "| d8 | 256 | 8 | 36 | 1778 | 0.004 |" in report
    assert "| optim.learning_rate=0.004 | 4.0000* | 4.0000* |" in report
    assert "The number of seeds was raised from 2 to 3 after runs had ended." in report


LADDER = """--config=configs/quickstart.py --config.data.corpus=synthetic
    --config.data.tokenizer=byte --config.train.eval_batches=0 --vary=optim.name=lion"""


def test_a_command_continues_all_sizes_of_a_ladder(tmp_path):
    def begin(given):
        with parsed(ladder.define_flags, *LADDER.split(), *given.split()):
            sweeps = ladder._make_sweeps(tmp_path, [])
        for sweep in sweeps:
            sweep.root.mkdir(exist_ok=True)
            sweep.save()
        return [sweep.root.name for sweep in sweeps]

    assert begin("--depths=2,4,8") == ["d2", "d4", "d8"]
    with pytest.raises(
        UserError, match=r"d2 already contains a sweep with optim\.learn"
    ):
        begin("--depths=3,5,6 --config.optim.learning_rate=1e-3")
    assert begin("--depths=3 --seeds=5") == ["d2", "d3", "d4", "d8"]
    assert begin("") == ["d2", "d3", "d4", "d8"]  # not the default depths
    assert {*map(str, (s.analyses for s in ladder._load(tmp_path)))} == {"[5]"}
    for depth in (3, 4):
        shutil.rmtree(tmp_path / f"d{depth}")
    # As if a first command had been killed before it had written all sizes.
    assert begin("") == ["d2", "d3", "d4", "d6", "d8"]
    for depth in (3, 4, 6):
        shutil.rmtree(tmp_path / f"d{depth}")
    with pytest.raises(UserError, match="2 sizes of a ladder, but a report needs 3"):
        ladder._load(tmp_path)


def test_runs_of_a_pair_have_the_same_seed(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_GROUP", "")
    recipe = tmp_path / "seeded.py"
    recipe.write_text(
        "from configs import quickstart\n"
        "def get_config():\n    config = quickstart.get_config()\n"
        "    config.seed = 1\n    return config\n"
    )
    message = (
        "A ladder compares runs with the same seed, but the recipes set different seeds"
    )
    options = [*LADDER.split(), f"--vary=recipe={recipe}", f"--workdir={tmp_path}"]
    with parsed(ladder.define_flags, *options), pytest.raises(UserError, match=message):
        ladder.main()


def test_arms_without_a_verdict_continue_to_the_next_analysis(tmp_path):
    sweeps = sweeps_in(tmp_path, [2, 5], [1, 1, 1], noise=1.0)
    words = {"optim.name=lion": "to be decided"}
    grown = add_seeds(sweeps, words)
    assert [sweep.seeds["optim.name=lion"] for sweep in grown] == [5, 5, 5]
    results = [sweep.results() for sweep in grown]
    assert judge_ladder(grown, results)["optim.name=lion"].words == "to be decided"
    train(grown, [1, 1, 1], noise=1.0)
    words = {"optim.name=lion": "undecided"}
    assert add_seeds(grown, words) == grown


def test_a_diverged_run_leaves_its_arm_without_a_verdict(tmp_path):
    sweeps = sweeps_in(tmp_path, [3], [1, 1, 1])
    run = sweeps[1].runs()[-1]
    write_run(run, 3.0, state="diverged", error="error: NaN")
    results = [sweep.results() for sweep in sweeps]
    course = judge_ladder(sweeps, results)["optim.name=lion"]
    assert course.words == "no verdict: optim.name=lion diverged in d4"
