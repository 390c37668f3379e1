"""Sweeps: which runs follow from a command, on which terms, and what the report says of them."""

import csv
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from configs import quickstart
from gpt2.config import Config, with_options
from gpt2.config.options import OPTIONS
from gpt2.errors import UserError
from gpt2.lab.ablate.__main__ import report, words
from gpt2.lab.ablate.command import conclude, describe_runs
from gpt2.lab.ablate.command import with_next_seeds as grow
from gpt2.lab.ablate.judge import judge_sweep
from gpt2.lab.ablate.sweep import Sweep, continued, load_sweep
from gpt2.lab.ablate.sweep_report import print_verdicts, write_report
from gpt2.lab.ablate.sweep_tables import (
    amount_to_reach,
    describe_fractions,
    reach_table,
    tuning_notes,
)
from gpt2.lab.experiments import jobs
from gpt2.lab.experiments.arms import Arm, draw_trials, make_arms, read_tuned
from gpt2.lab.experiments.checkouts import check_out, snapshot
from gpt2.lab.experiments.jobs import make_slots
from gpt2.lab.experiments.results import read_curve
from gpt2.lab.experiments.run_folder import Run
from gpt2.lab.experiments.step_time import equalize, make_measuring_run, measure
from gpt2.lab.experiments.terms import (
    LOSS,
    choose_score,
    flops,
    with_length,
)
from gpt2.optim import make_schedule
from gpt2.utils.text import format_count
from tests.forks import run_command
from tests.helpers import (
    ROOT,
    SECONDS,
    TINY,
    copy_project,
    cut,
    finish,
    make_repository,
    read_rows,
    start,
    succeed,
    write_rows,
    write_run,
)

BASE = Config.from_dict(quickstart.get_config()).with_vocabulary(4096)
BASE = with_options(BASE, {"train.num_steps": 1000, "optim.warmup_steps": 100})


def arms(*vary, one_at_a_time=False):
    return make_arms(BASE, vary, one_at_a_time=one_at_a_time)


def with_next_seeds(sweep):
    return grow([sweep], words)[0]


def names(found):
    return [arm.name for arm in found]


# Arms


def test_several_vary_make_a_grid_and_one_at_a_time_does_not():
    vary = ("optim.name=adamw,lion", "model.activation=gelu_tanh,relu,silu")
    grid = arms(*vary)
    assert names(grid)[:2] == ["baseline", "model.activation=relu"]
    assert len(grid) == 6
    assert grid[-1].config.optim.name == "lion"
    assert grid[-1].config.model.activation == "silu"
    alone = ["optim.name=lion", "model.activation=relu", "model.activation=silu"]
    assert names(arms(*vary, one_at_a_time=True)) == ["baseline", *alone]


def test_the_baseline_is_the_config_whether_it_is_named_or_not():
    for values in ("lion", "adamw,lion", "lion,adamw"):
        found = arms(f"optim.name={values}")
        assert names(found) == ["baseline", "optim.name=lion"]
        assert found[0].config == BASE


def test_a_value_may_set_more_options_and_hold_a_quoted_comma():
    options = "optim.name=lion+optim.learning_rate=1e-3+optim.weight_decay=0.3"
    lion = arms(options)[1].config
    assert lion.optim.learning_rate == 1e-3
    assert lion.optim.weight_decay == 0.3
    end = "+optim.end_fraction=0.5"
    steps = arms(f'optim.schedule="piecewise:500=0.5,800=0.1{end}",constant{end}')
    assert steps[1].config.optim.schedule == "piecewise:500=0.5,800=0.1"
    assert steps[2].config.optim.schedule == "constant"


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        (
            "optim.name",
            r"optim\.name has an option without a value\. Use OPTION=VALUE\.",
        ),
        ("train.num_steps=60,80", "--equal determines it"),
        ("optm.name=lion", r"optm\.name"),
        ("optim.name=muonn", r"The arm optim\.name=muonn cannot train"),
        ("seed=1,2", "--seeds"),
        ("recipe=missing.py", r"missing\.py"),
        ("code=nothing", "nothing is not a branch"),
    ],
)
def test_what_cannot_be_an_arm_is_told(vary, message):
    with pytest.raises(UserError, match=message):
        arms(vary)


def test_two_axes_of_a_grid_do_not_set_the_same_option():
    vary = ("optim.name=lion+optim.learning_rate=1e-3", "optim.learning_rate=2e-3")
    with pytest.raises(
        UserError, match=r"More than one --vary flag sets optim\.learning_rate"
    ):
        arms(*vary)
    assert len(arms(*vary, one_at_a_time=True)) == 3


def test_arms_of_many_options_have_short_names_that_differ():
    value = "lion"
    for name in ("qk_norm", "value_residual", "embedding_skip", "attention_gate"):
        value += f"+model.{name}=True"
    for name in ("attention_sink", "zero_init_projections", "exclusive_attention"):
        value += f"+model.{name}=True"
    value += "+optim.learning_rate=0.001+optim.weight_decay=0.2+optim.warmup_steps=50"
    assert len(value) > 255  # the longest name of a folder
    found = arms(f"optim.name={value}+optim.beta2=0.8,{value}+optim.beta2=0.9")
    _, first, second = names(found)
    assert first != second
    assert max(len(first), len(second)) <= 255


def test_folders_have_names_that_file_systems_allow(tmp_path):
    _, arm = arms(f"optim.layer_rates={130 * 'é'}=2")  # 289 bytes
    tuned = {
        name: option.default
        for name, option in OPTIONS.items()
        if name.startswith("optim.")
    }
    folder = arm.make_run(tmp_path, 0, tuned, chooses=True).folder
    folder.mkdir(parents=True)
    others = {**tuned, "optim.weight_decay": 0.3}
    assert arm.make_run(tmp_path, 0, others, chooses=True).folder != folder


def test_versions_of_the_code_are_arms(tmp_path, checkout):
    found = arms("code=.,my/idea", "optim.name=lion")
    assert names(found) == [
        "baseline",
        "optim.name=lion",
        "code=my_idea,optim.name=lion",
    ]
    source = check_out(tmp_path / "sweep", found[2].commit)
    assert (source / "train.py").read_text() == "2\n3\n"
    assert (checkout / "train.py").read_text() == "1"
    (source / "train.py").write_text("3")
    with pytest.raises(UserError, match="is not a clean git worktree"):
        check_out(tmp_path / "sweep", found[2].commit)


def test_a_file_that_git_does_not_track_is_no_part_of_the_working_tree(checkout):
    assert len(snapshot()) == 40
    (checkout / "configs").mkdir()
    (checkout / "configs" / "new.py").write_text("1")
    with pytest.raises(UserError, match=r"not track configs/new\.py.*git add"):
        snapshot()


@pytest.mark.usefixtures("checkout")
def test_a_branch_may_have_options_of_its_own(tmp_path):
    with pytest.raises(UserError, match=r"There is no option optim\.twist"):
        arms("code=.+optim.twist=0.5")
    found = arms("code=my/idea+optim.twist=0.5+loss.kind=soft+optim.beta1=0.8")
    name = "code=my_idea+optim.twist=0.5+loss.kind=soft+optim.beta1=0.8"
    assert names(found) == ["baseline", name]
    _, idea = found
    assert idea.extra == {"optim.twist": 0.5, "loss.kind": "soft"}
    assert idea.config.optim.beta1 == 0.8
    sweep = dataclasses.replace(sweep_in(tmp_path / "sweep"), arms=tuple(found))
    sweep = sweep.with_choices()
    rng = np.random.default_rng(0)
    for run in sweep.runs():
        if run.extra and not run.source.exists():
            shutil.copytree(ROOT / "configs", run.source / "configs")
            options = run.source / "configs" / "default.py"
            kind = "    kind: str = 'hard'\n"
            replace_text(options, "    z_loss:", f"{kind}    z_loss:")
            twist = "    twist: float = 0.0\n"
            replace_text(options, "    ema:", f"{twist}    ema:")
        write_run(run, 3.8, noise=rng)
    sweep.save()
    assert load_sweep(sweep.root) == sweep
    text = report_of(sweep)
    assert "| optim.twist | 0.5 | none |" in text
    assert f"| code | {idea.commit} | . |" in text
    first, second, *_ = rows_of(sweep.root)
    assert float(first["flops"]) > 0
    assert second["flops"] == ""  # by which formula?
    assert re.search(r"^\| code=my_idea\S+ \| \S+ .*\| - \| \S+ ", text, re.M)
    with pytest.raises(UserError, match="The FLOPs of code=my_idea"):
        equal(found, "flops")
    changed = sweep.runs()[1].workdir / "config.json"
    replace_text(changed, 'twist": 0.5', 'twist": 0.7')
    with pytest.raises(UserError, match=r"optim\.twist=0\.7, not 0\.5"):
        sweep.check_runs()


@pytest.mark.parametrize(
    "tune", ["data.batch_size=8", "optim.name=lion", "optim.beta1=0.8+seed=1"]
)
def test_what_changes_terms_or_is_varied_cannot_be_tuned(tune):
    tuned = read_tuned(["optim.beta2=0.9,0.95+optim.beta1=0.8"], ["optim.name=lion"])
    last = {"optim.beta2": 0.95, "optim.beta1": 0.8}
    assert tuned == [[{"optim.beta2": 0.9}, last]]
    with pytest.raises(UserError):
        read_tuned([tune], ["optim.name=lion"])


def test_trials_are_points_of_a_halton_sequence_in_the_ranges():
    tune = ["optim.learning_rate=1e-3..1e-1", "optim.beta2=0..0.9", "optim.ema=0..0.9"]
    (trials,) = read_tuned([draw_trials(tune, 3)], [])
    # The digits of 1, 2 and 3 in the bases 2, 3 and 5, reversed behind the point.
    fractions = [(1 / 2, 1 / 3, 1 / 5), (1 / 4, 2 / 3, 2 / 5), (3 / 4, 1 / 9, 3 / 5)]
    for trial, (rate, beta2, ema) in zip(trials, fractions, strict=True):
        expected = {
            "optim.learning_rate": float(f"{1e-3 * 100**rate:.3g}"),
            "optim.beta2": float(f"{0.9 * beta2:.3g}"),
            "optim.ema": float(f"{0.9 * ema:.3g}"),
        }
        assert trial == expected
    (whole,) = read_tuned([draw_trials(["optim.warmup_steps=10..1000"], 1)], [])
    assert whole == [{"optim.warmup_steps": 100}]
    (few,) = read_tuned([draw_trials(["optim.warmup_steps=1..4"], 8)], [])
    assert sorted(trial["optim.warmup_steps"] for trial in few) == [1, 2, 3]


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ([], "has no effect without --tune"),
        (["optim.learning_rate=1e-3,1e-2"], "not a range of numbers"),
        (["optim.learning_rat=1e-3..1e-2"], "Did you mean optim.learning_rate"),
    ],
)
def test_trials_without_ranges_are_refused(tune, message):
    with pytest.raises(UserError, match=message):
        draw_trials(tune, 4)


# Equal terms


def equal(found, terms, seconds=None):
    def measured(root, arm, slots):
        return seconds[arm.name], 20.0

    with mock.patch("gpt2.lab.experiments.step_time.measure", measured):
        return equalize(found, terms, Path(), [])


def test_equal_tokens_flops_and_seconds_change_the_length_of_the_schedule():
    for arm in equal(arms("data.batch_size=32"), "tokens")[1:]:
        assert arm.config.train.num_steps == BASE.train.num_steps // 2
    pair = equal(arms("model.activation=swiglu"), "flops")
    first, other = (arm.config for arm in pair)
    assert other.train.num_steps < first.train.num_steps
    wanted = flops(first, first.train.num_steps)
    found = flops(other, other.train.num_steps)
    assert abs(found - wanted) < flops(other, 1)
    assert other.optim.warmup_steps == round(100 * other.train.num_steps / 1000)
    muon = "optim.name=muon+optim.momentum_warmup=100+loss.ahead=0.5+loss.ahead_fade=50"
    half = equal(arms(f"{muon}+data.batch_size=32"), "tokens")[1].config
    assert half.optim.momentum_warmup == 50
    assert half.loss.ahead_fade == 25
    seconds = {"baseline": 0.1, "optim.name=muon": 0.16}
    slower = equal(arms("optim.name=muon"), "seconds", seconds)[1].config
    assert slower.train.num_steps == 625
    steps = "optim.schedule=piecewise:500=0.5+data.batch_size=32"
    with pytest.raises(UserError, match="piecewise"):
        equal(arms(steps), "tokens")


def test_equal_tokens_are_those_of_the_run_where_batches_grow():
    grows = with_options(BASE, {"train.batch_schedule": "0=16,500=32"})
    assert BASE.data.batch_size == 16
    pair = [Arm("baseline", grows), Arm("other", BASE)]
    other = equal(pair, "tokens")[1].config
    assert other.train.num_steps == 1500  # of the mean batch of 24
    assert other.shapes.tokens(1500) == grows.shapes.tokens(1000)


def test_other_tokenizers_compare_in_bits_per_byte_and_other_texts_do_not_compare():
    assert choose_score(arms("optim.name=lion")) == "eval/loss"
    assert choose_score(arms("data.tokenizer=byte")) == "eval/bits_per_byte"
    for other in ("data.val_fraction=0.1", "data.unique=True"):
        with pytest.raises(UserError, match="texts differ"):
            choose_score(arms(other))
    part = with_options(BASE, {"train.eval_batches": 5})
    for vary in ("optim.name=lion", "train.accumulate_steps=4"):  # of the same rows
        alike = make_arms(part, [vary], one_at_a_time=False)
        assert choose_score(alike) == "eval/loss"
    options = ("data.tokenizer=byte", "model.context_length=64", "data.batch_size=8")
    for vary in options:
        with pytest.raises(UserError, match="eval_batches=0"):
            choose_score(make_arms(part, [vary], one_at_a_time=False))


# What runs gave


def test_amounts_to_reach_a_score_are_read_between_validations():
    amounts = np.array([0.0, 10.0, 20.0, 30.0])
    scores = np.array([5.0, 4.0, 2.0, 2.5])
    assert amount_to_reach(amounts, scores, 4.5) == 5.0
    assert amount_to_reach(amounts, scores, 3.0) == 15.0
    assert amount_to_reach(amounts, scores, 6.0) == 0.0  # of the first validation
    assert amount_to_reach(amounts, scores, 1.9) == math.inf
    # The last validation is above.
    assert amount_to_reach(amounts, scores, 2.2) == math.inf


def test_the_share_of_steps_has_an_interval_of_both_arms_noise():
    """Losses fall in lines from 8, so that a share is the ratio of two normal falls."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        targets = 4 + 0.03 * rng.standard_normal(4)
        ends = 3 + 0.03 * rng.standard_normal(3)
        targets = np.array([targets.mean(), *targets])
        percent = 100 * (8 - targets) / (8 - ends)[:, None]
        _, low, high = re.findall(r"[\d.]+", describe_fractions(percent))
        held += float(low) <= 80 <= float(high)
    assert stats.binomtest(held, 300, 0.95).pvalue > 0.01


def sweep_in(root, *vary, num_seeds=3, tune=None, **options):
    options = {"equal": "tokens", "analyses": [num_seeds]} | options
    axes = [[{name: each} for each in tune[name]] for name in tune or {}]
    return Sweep(
        root=root,
        commands=["python -m gpt2.lab.ablate"],
        arms=tuple(arms(*vary)),
        tune=axes,
        **options,
    ).with_choices()


LOSSES = {"baseline": 3.80, "optim.name=lion": 3.70, "optim.name=muon": 3.801}


def filled(root, **options):
    sweep = sweep_in(root, "optim.name=lion,muon", **options)
    rng = np.random.default_rng(0)
    for run in sweep.runs():
        write_run(run, LOSSES[run.arm], noise=rng)
    sweep.save()
    return sweep


def report_of(sweep):
    write_report(sweep)
    return (sweep.root / "report.md").read_text()


def test_a_curve_has_tokens_flops_and_seconds_of_training(tmp_path):
    run = sweep_in(tmp_path).runs()[0]
    write_run(run, 3.8)
    flops_of = partial(flops, run.config)
    curve = read_curve(run.workdir, "eval/loss", run.config.shapes.tokens, flops_of)
    steps = np.arange(100, 1001, 100)
    np.testing.assert_allclose(curve.tokens, 2048 * steps)
    np.testing.assert_allclose(curve.seconds, 0.1 * steps)
    np.testing.assert_allclose(curve.flops, flops(run.config, 1) * steps)


def test_the_time_of_a_validation_is_between_those_of_the_log_lines_around_it(tmp_path):
    lines = ({"step": 20, "eval/loss": 5.0}, {"step": 40, "perf/step_seconds": 0.5})
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(x)}\n" for x in lines)
    )
    curve = read_curve(tmp_path, "eval/loss", float, float)
    assert curve.seconds == [10.0]


def test_the_report_says_what_differs_and_opens_without_a_network(tmp_path):
    sweep = filled(tmp_path / "a<b", num_seeds=5)
    text = report_of(sweep)
    row = re.compile(r"^\| (\S+) \| 5 \|.*\| ([^|]+) \|$", re.MULTILINE)
    found = dict(row.findall(text.split("## Pairs")[0]))
    assert found["optim.name=lion"] == "better"
    assert found["optim.name=muon"] == "undecided"
    assert "| optim.name=lion | optim.name | lion | adamw |" in text
    page = (sweep.root / "report.html").read_text()
    assert "<title>a&lt;b</title>" in page
    assert "<td>better</td>" in page
    assert page.count("data:image/png;base64,") == 2
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    lines = rows_of(sweep.root)
    assert [line["state"] for line in lines] == 15 * ["finished"]
    assert "Learning rates were not tuned" in text
    assert float(lines[0]["tokens"]) == 2_048_000
    assert float(lines[0]["seconds"]) == 100


def test_the_report_tells_what_runs_take_and_metrics_that_a_loss_adds(tmp_path):
    sweep = filled(tmp_path, num_seeds=2)
    for run in sweep.runs():
        path = run.workdir / "metrics.jsonl"
        own = f'"train/balance": {0.5 + run.config.seed}, "eval/loss"'
        path.write_text(path.read_text().replace('"eval/loss"', own))
    text = report_of(sweep)
    assert "| perf/step_seconds |" + 3 * " 0.1000 ± 0.0000 |" in text
    assert "| train/balance |" + 3 * " 1.0000 ± 0.7071 |" in text
    assert rows_of(tmp_path)[0]["train/balance"] == "0.5"


def test_seeds_of_a_config_alone_are_a_sweep_too(tmp_path):
    sweep = sweep_in(tmp_path)
    for run in sweep.runs():
        write_run(run, 3.8 + 0.01 * run.config.seed)
    assert with_next_seeds(sweep) == sweep
    assert "| baseline | 3 | 3.8100 ± 0.0100 |" in report_of(sweep)
    assert len(rows_of(tmp_path)) == 3


def test_a_report_of_single_validations_shows_no_curves(tmp_path):
    sweep = filled(tmp_path, num_seeds=2)
    for run in sweep.runs():
        path = run.workdir / "metrics.jsonl"
        path.write_text(path.read_text().splitlines(keepends=True)[-1])
    text = report_of(sweep)
    assert "curves" not in text.lower()
    assert "| optim.name=lion | 2 |" in text
    assert "differences.png" in text


def test_programs_read_the_verdicts_of_the_report(tmp_path):
    sweep = filled(tmp_path, num_seeds=5)
    write_run(sweep.runs()[2], 3.8, "diverged")  # of optim.name=muon
    verdicts = judge_sweep(sweep, sweep.results())
    report_of(sweep)
    tree = json.loads((tmp_path / "verdicts.json").read_text())
    lion = tree["optim.name=lion"]
    known = verdicts["optim.name=lion"]
    assert lion["words"] == "better"
    for name in ("difference", "baseline", "low", "high", "p_value"):
        assert lion[name] == pytest.approx(getattr(known, name), abs=1e-9)
    muon = tree["optim.name=muon"]
    assert muon["words"] == "diverged in 1 of 5 runs"
    assert muon["low"] is None


def test_time_to_the_baselines_loss_is_a_share_with_an_interval(tmp_path):
    sweep = sweep_in(tmp_path, "optim.name=lion,muon")
    losses = {"baseline": 4.0, "optim.name=lion": 3.0, "optim.name=muon": 4.5}
    for run in sweep.runs():
        write_run(run, losses[run.arm] + 0.001 * run.config.seed)
    table = reach_table(sweep, sweep.results())
    lion, muon = table.tokens
    # A straight line from 8 to 3 passes 4 after 4/5.
    assert lion == "0.80 (0.80 to 0.80)"
    assert list(table.iloc[0])[1:] == [lion] * 3
    assert muon == "reached by 0 of 3"


def test_runs_that_break_are_named_and_an_arm_that_diverged_is_not_better(tmp_path):
    sweep = filled(tmp_path)
    runs = {run.label: run for run in sweep.runs()}
    write_run(runs["optim.name=lion seed 0"], 3.7, "diverged", "NaN at step 7")
    write_run(runs["optim.name=muon seed 1"], 3.7, "failed", "error: no file a|b.")
    # As if the disk had been full.
    (runs["optim.name=muon seed 2"].folder / "outcome.json").unlink()
    words = list(write_report(sweep)[0].verdict)
    text = (tmp_path / "report.md").read_text()
    assert "diverged in 1 of 3 runs" in words
    assert "better" not in words
    assert "| optim.name=lion seed 0 | diverged | 1000 | NaN at step 7 |" in text
    assert r"| optim.name=muon seed 1 | failed | 1000 | error: no file a\|b. |" in text
    assert "Compared runs: 1 diverged, 1 failed, 6 finished, 1 to come." in text


def write_pairs(sweep):
    """End all runs of arms that differ by 0.002, and whose seeds differ by 0.03."""
    losses = {"baseline": 3.8, "optim.name=lion": 3.802, "optim.name=muon": 3.8}
    for run in sweep.runs():
        loss = losses[run.arm] + 0.03 * run.config.seed
        write_run(run, loss + 1e-5 * (len(run.label) * run.config.seed % 3))


def test_a_paired_sweep_is_judged_by_seeds_and_others_say_what_pairs_would_decide(
    tmp_path, capsys
):
    tables = {}
    notes = {}
    for paired in (False, True):
        sweep = sweep_in(tmp_path / f"{paired}", "optim.name=lion,muon")
        sweep = dataclasses.replace(sweep, paired=paired)
        write_pairs(sweep)
        table, notes[paired] = write_report(sweep)
        tables[paired] = table.set_index("arm")
    lion = "optim.name=lion"
    verdicts = {paired: table.verdict[lion] for paired, table in tables.items()}
    assert verdicts[False].startswith("undecided")
    assert verdicts[True] == "worse"
    assert tables[True].pairs[lion] == "3"
    assert tables[True].correlation[lion] == "1.00"
    assert notes[True] == ""
    assert "## Pairs" not in (tmp_path / "True/report.md").read_text()
    text = (tmp_path / "False/report.md").read_text()
    row = tables[True].loc[lion]
    assert (
        f"| {lion} | 3 | 1.00 | {row.difference} | {row.interval} | {row.p} |" in text
    )
    assert notes[False] in text
    decided = (
        f"would have led to a clear verdict on {lion}, but this sweep began without"
    )
    assert decided in notes[False]
    print_verdicts(tables[False].reset_index(), notes[False])
    lines = capsys.readouterr().out.splitlines()
    assert "--paired" in "".join(lines)
    assert max(map(len, lines)) <= 80


def test_the_report_lists_the_warnings_of_runs(tmp_path):
    sweep = sweep_in(tmp_path, "optim.name=lion")
    for run in sweep.runs():
        write_run(run, 3.8)
    for run in sweep.runs()[:2]:
        log = "warning: the disk is full\nstep 1\nwarning: the disk is full\n"
        (run.folder / "log.txt").write_text(log)
    (sweep.runs()[2].folder / "log.txt").write_text("warning  the rate only rises\n")
    text = report_of(sweep)
    assert "\n- 2 runs: `the disk is full`\n- 1 run: `the rate only rises`\n" in text


def test_a_pair_needs_both_runs(tmp_path):
    sweep = dataclasses.replace(sweep_in(tmp_path, "optim.name=lion"), paired=True)
    write_pairs(sweep)
    broken = sweep.runs()[2]
    assert broken.label == "baseline seed 1"
    write_run(broken, 3.8, "failed")
    text = report_of(sweep)
    assert "| optim.name=lion | 3 |" in text
    assert re.search(
        r"^\| optim.name=lion .*\| 2 \| 1.00 \| [\d.]+ \| worse \|$", text, re.M
    )


# What a sweep remembers


def test_the_report_says_that_all_tuned_values_diverged(tmp_path):
    tune = {"optim.learning_rate": [1e-3, 2e-3]}
    sweep = sweep_in(tmp_path, "optim.name=lion", tune=tune)
    for run in sweep.tuning_runs():
        write_run(run, 3.0, "diverged" if run.arm == "baseline" else "finished")
    first, second = tuning_notes(sweep.with_choices())
    assert first.startswith("A run of baseline diverged with every value in --tune")
    assert second.startswith("The best optim.learning_rate of optim.name=lion, 0.001,")


def test_each_arm_is_tuned_on_seeds_that_are_not_used_again(tmp_path):
    tune = {"optim.learning_rate": [1e-3, 2e-3, 4e-3]}
    sweep = sweep_in(tmp_path, "optim.name=lion", tune=tune)
    choosing = sweep.tuning_runs()
    assert len(choosing) == 6

    def loss(run):
        best = 1e-3 if run.arm == "baseline" else 2e-3
        return 3 + abs(math.log(run.config.optim.learning_rate / best))

    for run in choosing:
        diverges = run.arm == "baseline" and run.config.optim.learning_rate == 4e-3
        write_run(run, loss(run), "diverged" if diverges else "finished")
    assert sweep.chosen == {}
    write_run(choosing[-1], 3.0, "failed")
    assert list(sweep.with_choices().chosen) == ["baseline"]  # the other is tried again
    write_run(choosing[-1], loss(choosing[-1]))
    sweep = sweep.with_choices()
    assert sweep.chosen == {
        "baseline": {"optim.learning_rate": 1e-3},
        "optim.name=lion": {"optim.learning_rate": 2e-3},
    }
    used = {run.config.seed for run in choosing}
    for run in sweep.runs():
        assert run.config.seed not in used
        chosen = sweep.chosen[run.arm]["optim.learning_rate"]
        assert run.config.optim.learning_rate == chosen
        write_run(run, 3.0 + 0.01 * run.config.seed)
    text = report_of(sweep)
    assert "| values | baseline | optim.name=lion |" in text
    assert "| optim.learning_rate=0.001 | 3.0000* | 3.6931 |" in text
    assert "| optim.learning_rate=0.002 | 3.6931 | 3.0000* |" in text
    assert "| optim.learning_rate=0.004 | - | 3.6931 |" in text
    at_edge = "The best optim.learning_rate of baseline, 0.001, is the smallest value"
    assert tuning_notes(sweep)[0].startswith(at_edge)
    assert len(tuning_notes(sweep)) == text.count("is the smallest") == 1
    assert "not tuned" not in text
    for run in choosing:  # another try would choose otherwise, and comes too late
        write_run(run, run.config.optim.learning_rate)
    assert sweep.with_choices() == sweep


def test_values_are_chosen_by_the_mean_over_the_tuning_seeds(tmp_path):
    tune = {"optim.learning_rate": [1e-3, 2e-3]}
    sweep = sweep_in(tmp_path, "optim.name=lion", tune=tune, tune_seeds=2)
    # The first value has the best single run.
    scores = {1e-3: (2.0, 4.0), 2e-3: (2.5, 3.0)}
    runs = sweep.tuning_runs()
    assert len(runs) == 8
    for run in runs:
        by_seed = scores[run.config.optim.learning_rate]
        write_run(run, by_seed[run.config.seed % 2])
    sweep = sweep.with_choices()
    chosen = {"optim.learning_rate": 2e-3}
    assert sweep.chosen == {"baseline": chosen, "optim.name=lion": chosen}
    text = report_of(sweep)
    assert "| optim.learning_rate=0.001 | 3.0000 | 3.0000 |" in text
    assert "| optim.learning_rate=0.002 | 2.7500* | 2.7500* |" in text
    assert (
        "chosen on the same validation text with\n2 seeds, so luck can favour" in text
    )


@pytest.mark.parametrize("value", ["1e-3,0.001", "1e-3,2e-3,1e-3"])
def test_a_value_that_is_listed_twice_is_refused(value):
    text = f"optim.learning_rate={value}"
    message = r"contains optim\.learning_rate=0\.001 more than once"
    with pytest.raises(UserError, match=message):
        read_tuned([text], [])
    with pytest.raises(UserError, match=message):
        arms(text)


def test_an_arm_whose_every_choice_diverged_trains_with_the_first(tmp_path):
    tune = {"optim.learning_rate": [1e-3, 2e-3]}
    sweep = sweep_in(tmp_path, "optim.name=lion", tune=tune)
    states = {"baseline": "finished", "optim.name=lion": "diverged"}
    for run in sweep.tuning_runs():
        write_run(run, 3.0, states[run.arm])
    sweep = sweep.with_choices()
    assert sweep.chosen["optim.name=lion"] == {"optim.learning_rate": 1e-3}
    for run in sweep.runs():
        write_run(run, 3.0 + 0.01 * run.config.seed, states[run.arm])
    assert "| optim.learning_rate=0.001 | 3.0000* | -* |" in report_of(sweep)


def test_a_sweep_grows_by_arms_and_seeds_and_keeps_its_terms(tmp_path):
    before = filled(tmp_path)
    assert load_sweep(tmp_path) == before
    grown = continued(sweep_in(tmp_path, "optim.name=lion,adam", num_seeds=2))
    assert names(grown.arms) == [*LOSSES, "optim.name=adam"]
    assert grown.analyses == [3]
    with pytest.raises(UserError, match="--equal=tokens, not flops"):
        continued(sweep_in(tmp_path, "optim.name=lion", equal="flops"))
    other = continued(sweep_in(tmp_path, "data.tokenizer=byte"))
    assert before.score == "eval/loss"
    assert other.score == "eval/bits_per_byte"
    # All that differs is named, before what only follows from it.
    shorter = {"train.num_steps": 900, "train.eval_batches": 2, "data.batch_size": 8}
    shorter = with_options(BASE, shorter)
    other = make_arms(shorter, ["optim.name=lion"], one_at_a_time=False)
    told = r"batch_size=\d+, not 8; .*num_steps=1000, not 900; train\.eval_batches"
    with pytest.raises(UserError, match=told):
        continued(dataclasses.replace(before, arms=tuple(other)))


def test_the_last_report_has_arms_that_another_command_added_meanwhile(tmp_path):
    first = sweep_in(tmp_path, "optim.name=lion")
    filled(tmp_path)
    assert conclude(tmp_path, [first], report) == 0
    assert {row["arm"] for row in rows_of(tmp_path)} == set(LOSSES)


def test_a_command_does_not_take_back_the_seeds_of_another(tmp_path):
    first = sweep_in(tmp_path, LION, analyses=ANALYSES)
    first.save()
    dataclasses.replace(first, seeds={"baseline": 8, LION: 5}).save()
    older = dataclasses.replace(first, seeds={"baseline": 5, LION: 5})
    assert continued(older).seeds == {"baseline": 8, LION: 5}


def test_whether_a_sweep_is_paired_does_not_change_once_it_began(tmp_path):
    sweep = filled(tmp_path)
    paired = dataclasses.replace(sweep, paired=True)
    with pytest.raises(UserError, match=r"began without --paired.* gives new seeds"):
        continued(paired)
    options = ["--report", "--paired", f"--workdir={tmp_path}"]
    done = run_command("gpt2.lab.ablate", *options, cwd=ROOT)
    assert done.code == 2
    assert "began without --paired" in done.stderr
    assert not (tmp_path / "report.md").exists()
    paired.save()
    assert continued(paired).paired
    with pytest.raises(UserError, match="began with --paired"):
        continued(sweep)
    done = run_command("gpt2.lab.ablate", *options[::2], cwd=ROOT)
    assert done.code == 0, done.stderr
    assert "Each arm is compared" in (tmp_path / "report.md").read_text()


def test_seeds_that_are_raised_once_verdicts_can_be_seen_are_told(tmp_path):
    five = sweep_in(tmp_path, "optim.name=lion,muon", num_seeds=5)
    sweep_in(tmp_path, "optim.name=lion,muon").save()
    assert continued(five).raised_from == 0  # no run has ended
    filled(tmp_path)
    raised = continued(five)
    assert raised.raised_from == 3
    assert raised.analyses == [5]
    assert "The number of seeds was raised from 3 to 5" in report_of(raised)


LION = "optim.name=lion"
MUON = "optim.name=muon"
ADAM = "optim.name=adam"
ANALYSES = [3, 5, 8]


def train(sweep, losses, rng):
    """End the runs that have not ended, and return the sweep with the seeds that follow."""
    for run in sweep.runs():
        if run.outcome().state == "waiting":
            write_run(run, losses[run.arm], noise=rng)
    return with_next_seeds(sweep)


def test_analyses_end_what_is_clear_or_futile_and_the_others_continue(tmp_path):
    """The verdict of an analysis uses its own seeds, whatever is trained later."""
    rng = np.random.default_rng(4)
    losses = {"baseline": 3.8, LION: 3.0, MUON: 3.795, ADAM: 3.8}
    sweep = sweep_in(tmp_path, "optim.name=lion,muon,adam", analyses=ANALYSES)
    assert with_next_seeds(sweep) == sweep  # nothing has ended
    second = train(sweep, losses, rng)
    assert second.seeds == {"baseline": 5, MUON: 5, ADAM: 5}
    verdicts = judge_sweep(second, second.results())
    words = [verdict.words for verdict in verdicts.values()]
    assert words == ["better", "to be decided", "to be decided"]
    high = verdicts[LION].high
    third = train(second, losses, rng)
    assert third.seeds == {"baseline": 8, MUON: 8, ADAM: 5}  # which is futile
    assert train(third, losses, rng) == third
    verdicts = judge_sweep(third, third.results())
    assert verdicts[LION].high == high
    assert verdicts[LION].p_value < 0.05
    assert verdicts[ADAM].words.startswith("undecided")
    assert verdicts[MUON].words == "better"
    assert "3 or 5 or 8 seeds each" in report_of(third)


def test_analyses_wait_for_all_runs_and_end_an_arm_that_failed(tmp_path):
    rng = np.random.default_rng(2)
    sweep = sweep_in(tmp_path, "optim.name=lion,muon,adam", analyses=ANALYSES)
    losses = {"baseline": 3.8, LION: 3.0, MUON: 3.8, ADAM: 3.8}
    states = {MUON: "failed"}
    for run in sweep.runs():
        state = states.get(run.arm, "finished")
        write_run(run, losses[run.arm], state, noise=rng)
    assert with_next_seeds(sweep).seeds == {"baseline": 5, ADAM: 5}
    (sweep.runs()[-1].folder / "outcome.json").unlink()
    assert judge_sweep(sweep, sweep.results())[LION].words == "to be decided"


def test_an_arm_that_is_added_to_a_sweep_with_analyses_begins_with_the_first(tmp_path):
    rng = np.random.default_rng(2)
    sweep = sweep_in(tmp_path, LION, analyses=ANALYSES)
    replace = dataclasses.replace
    replace(sweep, seeds={"baseline": 8, LION: 8}).save()
    assert continued(sweep).seeds == {"baseline": 8, LION: 8}
    more = continued(sweep_in(tmp_path, MUON, analyses=ANALYSES)).with_choices()
    losses = {"baseline": 3.8, LION: 3.0, MUON: 3.795}
    assert train(more, losses, rng).seeds[MUON] == 5
    for other in ([8], [3, 8]):
        with pytest.raises(UserError, match="--seeds=3,5,8, not"):
            continued(replace(sweep, analyses=other))


def test_runs_on_another_text_are_not_compared(tmp_path):
    sweep = filled(tmp_path)
    for index, run in enumerate(sweep.runs()):
        digest = "first" if index < 4 else "second"
        (run.workdir / "data.json").write_text(digest)
    with pytest.raises(UserError, match=r"a different text from .*baseline/seed-0"):
        sweep.check_runs()


def replace_text(path, old, new):
    text = path.read_text()
    path.write_text(text.replace(old, new))
    assert path.read_text() != text


def copy_run(arm):
    """Copies what a seed has trained to another."""
    shutil.rmtree(arm / "seed-0/run")
    shutil.copytree(arm / "seed-1/run", arm / "seed-0/run")


def put_nan(metrics):
    replace_text(metrics, '"eval/loss": 3', '"eval/loss": NaN, "x": 3')


def end_early(metrics):
    replace_text(metrics, '{"step": 1000', "")


def put_list(path):
    path.write_text("[]")


def put_state(outcome):
    replace_text(outcome, '"finished"', "7")


def put_text(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"analyses": "two"}))


def swap_arms(runs):
    (runs / "baseline").rename(runs / "aside")
    (runs / "optim.name=lion").rename(runs / "baseline")
    (runs / "aside").rename(runs / "optim.name=lion")


SEED = "runs/baseline/seed-0"
METRICS = f"{SEED}/run/metrics.jsonl"
DAMAGES = [  # a path, what happens to it, and the error
    (
        METRICS,
        end_early,
        r"The metrics of .*seed-0 end at step 900 of 1000 .*\. Remove ",
    ),
    (METRICS, put_nan, "end at step 1000 of 1000 with eval/loss=nan"),
    ("runs", swap_arms, "contains a run with optim.name=lion, not adamw"),
    ("runs/baseline", copy_run, "contains a run with seed=1, not 0"),
    (f"{SEED}/outcome.json", cut, r"seed-0/outcome\.json cannot be read"),
    (
        f"{SEED}/outcome.json",
        put_state,
        "outcome.json cannot be read .*the state 7 is unknown",
    ),
    (f"{SEED}/run/config.json", Path.unlink, "seed-0.*cannot be read"),
    ("sweep.json", cut, r"sweep\.json cannot be read .*or remove the file"),
    ("sweep.json", put_text, r"sweep\.json cannot be read .*or remove the file"),
    (f"{SEED}/run/environment.jsonl", put_list, "seed-0.*cannot be read"),
]


@pytest.mark.parametrize(("path", "change", "message"), DAMAGES)
def test_a_damaged_sweep_has_no_verdict_and_one_line_says_why(
    tmp_path, path, change, message
):
    filled(tmp_path)
    change(tmp_path / path)
    with pytest.raises(UserError, match=message) as error:
        sweep = load_sweep(tmp_path).with_choices()
        sweep.check_runs()
        write_report(sweep)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=message):  # before it judges, too
        load_sweep(tmp_path).results()


def began(run, *starts):
    lines = [{"step": step, "code": code} for step, code in starts]
    write_rows(run.workdir / "environment.jsonl", lines)


@pytest.fixture
def code_is(monkeypatch):
    """Lets the code on disk have a hash."""
    return lambda code: monkeypatch.setattr(
        "gpt2.lab.experiments.run_folder.hash_code", lambda _: code
    )


def test_runs_of_different_code_are_not_pooled(tmp_path, code_is):
    two, three = (
        sweep_in(tmp_path, "optim.name=lion", num_seeds=num) for num in (2, 3)
    )
    for run in two.runs():
        write_run(run, 3.7)
        began(run, (0, "old"))
    code_is("old")
    three.check_runs(to_come=True)
    code_is("new")
    two.check_runs(to_come=True)  # nothing is to come
    told = r"baseline seed 0 has the code old, but baseline seed 2 has the code new"
    with pytest.raises(UserError, match=told):
        three.check_runs(to_come=True)
    first = two.runs()[0]
    began(first, (0, "new"), (0, "old"), (20, "new"), (10, "old"))
    two.check_runs()  # steps of other code are trained no more
    began(first, (0, "old"), (20, "new"))
    with pytest.raises(UserError, match="Restore the code"):
        two.check_runs()


def test_an_interrupted_run_goes_on_with_its_code_and_one_that_saved_nothing_with_any(
    tmp_path, code_is
):
    sweep = sweep_in(tmp_path, "optim.name=lion", num_seeds=1)
    run = sweep.runs()[0]
    write_run(run, 3.7, "failed")
    began(run, (0, "old"))
    code_is("new")
    sweep.check_runs(to_come=True)
    (run.workdir / "checkpoints" / "20").mkdir(parents=True)
    with pytest.raises(
        UserError, match="has the code new, but baseline seed 0 has the code old"
    ):
        sweep.check_runs(to_come=True)
    sweep.check_runs()  # its steps are not compared
    code_is("old")
    sweep.check_runs(to_come=True)


# Times and places


@pytest.mark.parametrize(
    "options",
    [
        {"optim.warmup_steps": 0},
        {"optim.schedule": "piecewise:500=0.5"},
        {"optim.schedule": "wsd", "optim.decay_fraction": 0.8},
        {"train.keep_every": 100, "train.checkpoint_every": 100},
    ],
)
def test_a_step_can_be_measured_whatever_the_schedule_and_the_checkpoints(
    tmp_path, options
):
    config = with_options(BASE, options)
    run = make_measuring_run(tmp_path, Arm("baseline", config))
    rates = make_schedule(run.config.optim, 40)(np.arange(40))
    assert all(np.diff(rates) > 0)
    assert rates[-1] < config.optim.learning_rate


def test_arms_of_the_same_step_are_measured_once(tmp_path):
    arm = Arm("baseline", BASE)
    run = make_measuring_run(tmp_path, arm)
    assert make_measuring_run(tmp_path, with_length(arm, 2000)) == run
    larger = Arm("baseline", with_options(BASE, {"data.batch_size": 32}))
    assert make_measuring_run(tmp_path, larger).folder != run.folder


def write_measure(root, arm, start=20, step_seconds=0.1):
    """Writes what a measuring run leaves: the first line's steps took longer than all others."""
    run = make_measuring_run(root, arm)
    write_run(run, 3.7)
    lines = []
    for step in (10, 20, 30, 40):
        seconds = 4 * step_seconds if step == 10 else step_seconds
        line = {"step": step, "perf/step_seconds": seconds}
        lines.append(line | {"perf/total_seconds": start + step_seconds * step})
    lines[-1]["eval/loss"] = 3.7
    write_rows(run.workdir / "metrics.jsonl", lines)


def test_a_dry_run_counts_starts_and_compilation(tmp_path, capsys):
    sweep = filled(tmp_path, num_seeds=2)
    slots = make_slots(1)
    (sweep.runs()[-1].folder / "outcome.json").unlink()
    for arm in sweep.arms:
        write_measure(tmp_path, arm)
    assert measure(tmp_path, arm, slots) == pytest.approx((0.1, 20))
    metrics = make_measuring_run(tmp_path, arm).workdir / "metrics.jsonl"
    text = metrics.read_text()
    interrupted = text.replace(
        '"perf/total_seconds": 24.0', '"perf/total_seconds": 2.0'
    )
    assert interrupted != text
    metrics.write_text(interrupted)
    assert measure(tmp_path, arm, slots) == pytest.approx((0.1, 20))
    asked, last, amounts, total = describe_runs([sweep], slots).splitlines()
    text = capsys.readouterr().out
    assert "measuring the steps of baseline" in text
    assert "baseline: 0.1 seconds per step, and 20 seconds to start" in text
    assert "seed" not in text
    assert asked == "would train (times include start-up and compilation)"
    assert last == "optim.name=muon seed 1  1000 steps  0:02:00"
    tokens = 1000 * sweep.arms[0].config.tokens_per_step
    assert amounts.startswith(f"1 run, {format_count(tokens)} tokens and ")
    assert total.startswith("about 0:02:00 in all, ")
    sweep = dataclasses.replace(sweep, analyses=[2, 5])
    assert "continue, up to 5 seeds\n" in describe_runs([sweep], slots)
    most = {arm.name: 2 for arm in sweep.arms}
    sweep = dataclasses.replace(sweep, analyses=[1, 2], seeds=most)
    assert "continue, up to" not in describe_runs([sweep], slots)


def test_a_ladder_measures_arms_at_its_smallest_size_and_the_baseline_at_each(
    tmp_path, capsys
):
    sweeps = [sweep_in(tmp_path / name, "optim.name=muon") for name in ("d2", "d4")]
    (small, small_muon), (large, large_muon) = (sweep.arms for sweep in sweeps)
    write_measure(tmp_path / "d2", small)
    write_measure(tmp_path / "d2", small_muon, start=30, step_seconds=0.2)
    write_measure(tmp_path / "d4", large, start=40, step_seconds=0.5)
    _, *lines, note, _, total = describe_runs(sweeps, make_slots(1)).splitlines()
    assert (
        "d4: optim.name=muon: 1 seconds per step, and 60 seconds to start and"
        " compile, estimated" in capsys.readouterr().out
    )
    assert len(lines) == 12
    assert "d4: optim.name=muon seed 1  1000 steps  0:17:40 (estimated)" in lines
    assert sum("estimated" in line for line in lines) == 3
    assert note.startswith("estimated: the baseline's time at that size, multiplied by")
    assert note.endswith("time at d2")
    # The starts take 20 + 30 + 40 + 60 s, and the steps 1000 * (0.1 + 0.2 + 0.5 + 1) s.
    assert total.startswith("about 1:37:30 in all, ")
    # A time that is known already is not estimated.
    write_measure(tmp_path / "d4", large_muon, start=40, step_seconds=0.5)
    assert "estimated" not in describe_runs(sweeps, make_slots(1))


def test_runs_at_once_share_the_cores(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    cores = os.sched_getaffinity(0)
    assert make_slots(1)[0].cores == cores
    if len(cores) > 1:
        one, two = make_slots(2)
        assert one.cores
        assert two.cores
        assert not one.cores & two.cores
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    devices = [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in make_slots(2)]
    assert devices == ["4", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # none, as is known to CUDA
    with pytest.raises(UserError, match="CPU cores"):
        make_slots(1000)


def test_the_table_on_the_screen_has_at_most_80_columns(capsys):
    name = "optim.learning_rate=0.001," * 8
    interval = "(-0.0400 to -0.0200)"
    row = {"arm": name, "difference": "-0.0300", "interval": interval}
    row |= {"verdict": "undecided", "mean ± sd": "4.1"}
    baseline = {"arm": "baseline", "runs": "3", "mean ± sd": "4.1 ± 0.1"}
    print_verdicts(pd.DataFrame([baseline, row]))
    first, _, *lines, _, _ = capsys.readouterr().out.splitlines()
    assert first == "baseline: mean 4.1 ± 0.1 (3 runs, ± standard deviation)"
    assert max(map(len, lines)) <= 80
    assert "".join(line.split()[0] for line in lines) == name
    assert interval in "".join(lines)


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A folder for the code of runs, which has the options of this project."""
    monkeypatch.setattr(jobs.signal, "signal", lambda *_: None)
    shutil.copytree(ROOT / "configs", tmp_path / "project" / "configs")
    return tmp_path / "project"


def test_each_process_tries_a_failed_run_once_whatever_the_clock(
    tmp_path, monkeypatch, source
):
    tries = tmp_path / "tries"
    # It fails with the same error each time. If it were tried forever, the third try would succeed.
    (source / "train.py").write_text(
        f"file = open({str(tries)!r}, 'a+')\n"
        "file.write('x')\n"
        "if file.tell() < 3: raise SystemExit('error: broken')\n"
    )
    failing = Run("failing", BASE, tmp_path / "run", source=source)
    for number in (1, 2):
        monkeypatch.setattr(jobs, "_first_outcomes", {})  # as in a new process
        jobs.train_all([failing], make_slots(1), LOSS)
        assert tries.read_text() == number * "x"
    os.utime(failing.folder / "outcome.json", (0, 0))  # a file server's clock is behind
    jobs.train_all([failing], make_slots(1), LOSS)
    assert tries.read_text() == "xx"


def test_a_run_that_fails_does_not_keep_others_from_training(
    tmp_path, monkeypatch, capsys, source
):
    def clock():  # each run takes two minutes
        return 120.0 * len(list(tmp_path.glob("*/outcome.json")))

    times = SimpleNamespace(monotonic=clock, sleep=lambda _: None)
    monkeypatch.setattr(jobs, "time", times)
    (source / "train.py").write_text("raise SystemExit('error: broken')")
    runs = [Run(name, BASE, tmp_path / name, source=source) for name in ("a", "b")]
    jobs.train_all(runs, make_slots(1), LOSS)
    assert [run.outcome().state for run in runs] == ["failed", "failed"]
    assert capsys.readouterr().out == (
        "1 of 2 runs ended, about 0:02:00 left: a seed 0, failed: error: broken\n"
        "2 of 2 runs ended: b seed 0, failed: error: broken\n"
    )


def test_the_time_of_an_interrupted_run_includes_its_earlier_processes(
    tmp_path, monkeypatch, source
):
    def interrupt(_):
        raise KeyboardInterrupt

    clock = itertools.count()  # a second passes at each reading
    times = SimpleNamespace(monotonic=lambda: 1.0 * next(clock), sleep=interrupt)
    monkeypatch.setattr(jobs, "time", times)
    (source / "train.py").write_text("import time\ntime.sleep(600)\n")
    run = Run("a", BASE, tmp_path / "run", source=source)
    with pytest.raises(KeyboardInterrupt):
        jobs.train_all([run], make_slots(1))
    assert run.outcome().state == "waiting"
    before = run.outcome().seconds
    assert before > 0
    times.sleep = lambda _: None
    (source / "train.py").write_text("")
    jobs.train_all([run], make_slots(1))
    assert run.outcome().state == "finished"
    assert run.outcome().seconds > before


# Real runs


def start_ablate(*options, cwd=ROOT):
    return start(None, *options, script="gpt2.lab.ablate", cwd=cwd)


def finish_ablate(process):
    """Wait for a sweep, which has to succeed, and return its standard output."""
    code, stdout, stderr = finish(process, 10 * SECONDS)
    assert code == 0, stderr
    return stdout


def rows_of(root):
    with open(root / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


# A version of the code whose training raises the loss.
UPHILL = """
_downhill = next_token_loss

def next_token_loss(*options):
    loss = _downhill(*options)

    def negated(*inputs, **named):
        objective, sums = loss(*inputs, **named)
        return -objective, sums

    return negated
"""


@pytest.mark.thorough
def test_processes_share_a_sweep_that_reports_and_is_safe_to_repeat(tmp_path):
    root = tmp_path / "sweep"
    options = [
        *TINY,
        "--config.train.eval_batches=2",
        "--vary=optim.learning_rate=1e30",
    ]
    options += ["--tune=optim.beta2=0.9,0.95", "--seeds=1", f"--workdir={root}"]
    processes = [start_ablate(*options) for _ in range(2)]
    for process in processes:
        stdout = finish_ablate(process)
        assert "diverged in 1 of 1 runs" in stdout
    rows = rows_of(root)
    states = [row["state"] for row in rows]
    assert sorted(states) == 3 * ["diverged"] + 3 * ["finished"]
    for path in root.rglob("environment.jsonl"):
        assert len(read_rows(path)) == 1  # no run was trained twice
    outcomes = [*root.rglob("outcome.json")]
    times = [path.stat().st_mtime_ns for path in outcomes]
    finish_ablate(start_ablate(*options))
    assert [path.stat().st_mtime_ns for path in outcomes] == times
    assert rows_of(root) == rows
    stdout = succeed(None, root, f"--output={root}.png", script="gpt2.lab.compare")
    assert "baseline" in stdout
    assert Path(f"{root}.png").exists()


@pytest.mark.thorough
def test_a_version_of_the_code_trains_its_own_code(tmp_path):
    project = tmp_path / "project"
    changed = "gpt2/training/__init__.py"
    copy_project(project)
    make_repository(project, changed, (ROOT / changed).read_text() + UPHILL)
    options = [*TINY, "--config.train.eval_batches=2", "--seeds=1"]
    options += ["--vary=code=my/idea", "--workdir=../sweep"]
    finish_ablate(start_ablate(*options, cwd=project))
    first, other = rows_of(tmp_path / "sweep")
    assert first["code"] != other["code"]
    assert first["eval/loss"] != other["eval/loss"]


def test_a_failure_is_told_by_its_exception_and_not_by_what_follows():
    log = "step 3\nNameError: name 'x' is not defined\n----\nFor simplicity, ...\n"
    assert jobs.find_error(log) == "NameError: name 'x' is not defined"
    assert (
        jobs.find_error("error: no such file\nwarning: more\n") == "error: no such file"
    )
