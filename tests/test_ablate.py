"""Sweeps: which runs follow from a command, on which terms, and what the report says of them."""

import contextlib
import csv
import dataclasses
import json
import math
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
from scipy import stats

from configs import quickstart
from gpt2.ablate import pictures, screen, tables
from gpt2.ablate.arms import Arm, describe_warmup, make_arms
from gpt2.ablate.equal import (
    choose_score,
    describe_undone,
    equalize,
    refuse_undone,
    step_flops,
)
from gpt2.ablate.jobs import last_error, make_slots
from gpt2.ablate.measure import describe_runs, measure
from gpt2.ablate.report import write_report
from gpt2.ablate.results import Curve, amount_to_reach, read_curve, read_reference
from gpt2.ablate.runs import Outcome, is_unchanged, make_measuring_run
from gpt2.ablate.scaling import at_sizes, compute_to_match, fit_power_law
from gpt2.ablate.sweep import Sweep, continued, load_sweep
from gpt2.ablate.tables import LEAVES_ROOM, judge, noise_table, reach_table, samples
from gpt2.ablate.verdicts import widest
from gpt2.config import Config, with_options
from gpt2.errors import UserError
from gpt2.optim import make_schedule
from gpt2.telemetry.flops import count_compute_parameters
from tests.helpers import ROOT, TINY
from tests.test_workdir import make_config

BASE = Config.from_dict(quickstart.get_config())
VOCABULARY = 4096


def arms(*vary, one_at_a_time=False):
    return make_arms(BASE, vary, one_at_a_time=one_at_a_time)


def names(found):
    return [arm.name for arm in found]


# Arms


def test_several_vary_make_a_grid_and_one_at_a_time_does_not():
    vary = ("optim.name=adamw,lion", "model.activation=gelu_tanh,relu,silu")
    grid = arms(*vary)
    assert names(grid)[:2] == ["baseline", "model.activation=relu"]
    assert len(grid) == 6
    assert grid[-1].config.optim.name == "lion" and grid[-1].config.model.activation == "silu"
    assert names(arms(*vary, one_at_a_time=True)) == [
        "baseline",
        "optim.name=lion",
        "model.activation=relu",
        "model.activation=silu",
    ]


def test_the_baseline_is_the_config_whether_it_is_named_or_not():
    for values in ("lion", "adamw,lion", "lion,adamw"):
        found = arms(f"optim.name={values}")
        assert names(found) == ["baseline", "optim.name=lion"]
        assert found[0].config == BASE


def test_a_value_may_set_more_options_and_hold_a_quoted_comma():
    lion = arms("optim.name=lion+optim.learning_rate=1e-3+optim.weight_decay=0.3")[1].config
    assert (lion.optim.learning_rate, lion.optim.weight_decay) == (1e-3, 0.3)
    end = "+optim.end_learning_rate=0.004"
    pieces = arms(f'optim.schedule="piecewise:500=0.5,800=0.1{end}",constant{end}')
    assert pieces[1].config.optim.schedule == "piecewise:500=0.5,800=0.1"
    assert pieces[2].config.optim.schedule == "constant"


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ("optim.name", r"--vary=optim\.name names no values\. For example"),
        ("optim.name=adamw,", r"names no values"),
        ("optm.name=lion", r"no option optm\.name\. Did you mean optim\.name\?"),
        ("model.bias=yes", r"model\.bias=yes is not of type bool"),
        ("optim.name=muonn", r"the arm optim\.name=muonn cannot work\. optim\.name=muonn is not"),
        ("optim.beta3=0.99", r"the arm optim\.beta3=0\.99 cannot work\. .*would ignore"),
        ("seed=1,2", r"Use --seeds=N"),
        ("optim.name=lion,lion", r"makes the arm optim\.name=lion twice"),
        ("recipe=missing.py", r"--config=missing\.py is not a file"),
        ("data.tokenizer=byte", r"the arm data\.tokenizer=byte has another tokenizer"),
    ],
)
def test_what_cannot_be_an_arm_is_one_line(vary, message):
    config = with_options(BASE, {"model.vocab_size": 4096}) if "tokenizer" in vary else BASE
    with pytest.raises(UserError, match=message):
        make_arms(config, [vary], one_at_a_time=False)


@pytest.mark.parametrize(
    ("vary", "advice"),
    [
        (["model.embed_dim=130"], "--vary=model.embed_dim=130+model.num_heads=5"),
        (["model.num_heads=3"], "--vary=model.num_heads=2"),
        (
            ["optim.name=lion", "model.embed_dim=130"],
            "--vary=model.embed_dim=130+model.num_heads=5",
        ),
        (["model.embed_dim=130", "model.num_heads=8"], "--vary=model.num_heads=10"),
        (
            ["optim.name=schedule_free"],
            "--vary=optim.name=schedule_free+optim.schedule=constant+optim.end_learning_rate=0.004",
        ),
        (
            ["optim.layer_rates=wte"],
            r"""'--vary=optim.layer_rates="h_\d+/attn=0.5,wte=2"'""",
        ),
    ],
)
def test_the_advice_for_an_arm_is_a_vary_that_mends_it(vary, advice):
    with pytest.raises(UserError, match=r"^the arm .* cannot work\. ") as raised:
        make_arms(BASE, vary, one_at_a_time=False)
    assert str(raised.value).endswith(f"se {advice}.") and "--config" not in str(raised.value)
    mended = shlex.split(advice)[0].removeprefix("--vary=")
    option = mended.partition("=")[0]
    kept = [each for each in vary if not each.startswith(f"{option}=")]
    assert make_arms(BASE, [*kept, mended], one_at_a_time=False)


def test_two_axes_of_a_grid_do_not_set_the_same_option():
    vary = ("optim.name=lion+optim.learning_rate=1e-3", "optim.learning_rate=2e-3")
    with pytest.raises(UserError, match=r"several --vary set optim\.learning_rate"):
        arms(*vary)
    assert len(arms(*vary, one_at_a_time=True)) == 3


# Equal terms


def equal(found, terms, seconds=None):
    return equalize(
        found,
        terms,
        vocab_size=lambda config: VOCABULARY,
        step_seconds=lambda arm: seconds[arm.name],
    )


def test_equal_tokens_flops_and_seconds_change_the_length_of_the_schedule():
    for arm in equal(arms("data.batch_size=32"), "tokens")[1:]:
        assert arm.config.train.num_steps == BASE.train.num_steps // 2
    first, other = (
        arm.config.with_vocabulary(VOCABULARY)
        for arm in equal(arms("model.activation=swiglu"), "flops")
    )
    assert other.train.num_steps < first.train.num_steps
    wanted = first.train.num_steps * step_flops(first)
    assert abs(other.train.num_steps * step_flops(other) - wanted) < step_flops(other)
    assert other.optim.warmup_steps == round(100 * other.train.num_steps / 1000)
    seconds = {"baseline": 0.1, "optim.name=muon": 0.16}
    assert equal(arms("optim.name=muon"), "seconds", seconds)[1].config.train.num_steps == 625


def test_what_equal_terms_would_undo_is_refused():
    refuse_undone({"model.mlp_dim", "optim.name"}, "tokens")
    for name, terms in [("train.num_steps", "tokens"), ("model.mlp_dim", "params")]:
        with pytest.raises(UserError, match=f"{name} cannot be varied: --equal={terms}"):
            refuse_undone({name}, terms)
    steps = "optim.schedule=piecewise:500=0.5+optim.end_learning_rate=4e-3+data.batch_size=32"
    with pytest.raises(
        UserError, match=r"cannot be made equal\. optim\.schedule=piecewise:500=0\.5"
    ):
        equal(arms(steps), "tokens")


def test_what_equal_terms_set_again_of_a_recipe_is_told():
    recipe = with_options(BASE, {"train.num_steps": 600, "model.mlp_dim": 64, "seed": 1})
    before = [Arm("baseline", BASE), Arm("recipe=short", recipe)]
    steps = BASE.train.num_steps
    told = f"recipe=short has train.num_steps=600; equal terms and sizes give it {steps}"
    assert describe_undone(before, equal(before, "tokens")) == [told]
    width = equal(before, "params")[1].config.model.mlp_dim
    assert describe_undone(before, equal(before, "params")) == [
        told,
        f"recipe=short has model.mlp_dim=64; equal terms and sizes give it {width}",
    ]
    half = with_options(BASE, {"train.num_steps": steps // 2, "data.batch_size": 32})
    before[1] = Arm("recipe=half", half)  # as many tokens
    assert describe_undone(before, equal(before, "tokens")) == []


def test_equal_parameters_change_the_width_of_the_mlp():
    def parameters(arm):
        return count_compute_parameters(arm.config.with_vocabulary(VOCABULARY).gpt())

    before = arms("model.activation=relu,swiglu")
    first, relu, swiglu = equal(before, "params")
    assert relu == before[1]
    assert parameters(before[2]) > 1.1 * parameters(first)
    assert abs(parameters(swiglu) / parameters(first) - 1) < 0.002
    with pytest.raises(UserError, match=r"no model\.mlp_dim gives the arm model\.num_layers=64"):
        equal(arms("model.num_layers=64"), "params")


def test_other_tokenizers_compare_in_bits_per_byte_and_other_texts_do_not_compare():
    assert choose_score(arms("optim.name=lion")) == "eval/loss"
    assert choose_score(arms("data.tokenizer=byte")) == "eval/bits_per_byte"
    with pytest.raises(UserError, match=r"has data\.val_fraction=0\.1, .* --config\.data\.val_f"):
        choose_score(arms("data.val_fraction=0.1"))
    part = with_options(BASE, {"train.eval_batches": 5})
    assert choose_score(make_arms(part, ["optim.name=lion"], one_at_a_time=False)) == "eval/loss"
    options = ("data.tokenizer=byte", "model.context_length=64", "train.accumulate_steps=4")
    for vary in options:
        with pytest.raises(UserError, match=r"Use --config\.train\.eval_batches=0"):
            choose_score(make_arms(part, [vary], one_at_a_time=False))


# What runs gave


def test_amounts_to_reach_a_score_are_read_between_validations():
    amounts, scores = np.array([0.0, 10.0, 20.0, 30.0]), np.array([5.0, 4.0, 2.0, 2.5])
    assert amount_to_reach(amounts, scores, 4.5) == 5.0
    assert amount_to_reach(amounts, scores, 3.0) == 15.0
    assert math.isnan(amount_to_reach(amounts, scores, 5.0))
    assert amount_to_reach(amounts, scores, 1.9) == math.inf


def sweep_in(root, *vary, num_seeds=3, tune=None, **options):
    options = dict(score="eval/loss", equal="tokens", paired=False, num_tune_seeds=1) | options
    return Sweep(
        root=root,
        commands=["python -m gpt2.ablate"],
        arms=tuple(arms(*vary)),
        num_seeds=num_seeds,
        tune=tune or {},
        until=0.0,
        first_num_seeds=num_seeds,
        **options,
    ).with_choices()


def write_run(run, final, state="finished", error="", seconds=0.1, noise=None):
    """Writes what train.py leaves, with a loss that falls to `final` in a straight line."""
    if noise is not None:
        final += 0.003 * noise.standard_normal()
    run.prepare()
    (run.folder / "log.txt").write_text(f"step 1\n{error}\n")
    run.workdir.mkdir(exist_ok=True)
    resolved = run.config.with_vocabulary(VOCABULARY).to_dict()
    (run.workdir / "config.json").write_text(json.dumps(resolved))
    lines = [
        {
            "step": step,
            "train/loss": 4.0,
            "perf/step_seconds": seconds,
            "eval/loss": 8 + (final - 8) * step / 1000,
        }
        for step in range(100, 1001, 100)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.workdir / "metrics.jsonl").write_text(text)
    run.write_outcome(Outcome(state, error))


LOSSES = {"baseline": 3.80, "optim.name=lion": 3.70, "optim.name=muon": 3.801}


def filled(root, **options):
    sweep = sweep_in(root, "optim.name=lion,muon", **options)
    rng = np.random.default_rng(0)
    for run in sweep.runs():
        write_run(run, LOSSES[run.arm] + 0.004 * rng.standard_normal())
    sweep.save()
    return sweep


def test_a_curve_has_tokens_flops_and_seconds_of_training(tmp_path):
    run = filled(tmp_path).runs()[0]
    curve = read_curve(run.workdir, "eval/loss")
    config = run.config.with_vocabulary(VOCABULARY)
    np.testing.assert_allclose(curve.tokens, 2048 * np.arange(100, 1001, 100))
    np.testing.assert_allclose(curve.seconds, 0.1 * np.arange(100, 1001, 100))
    np.testing.assert_allclose(curve.flops, step_flops(config) * np.arange(100, 1001, 100))
    assert len(read_curve(tmp_path / "missing", "eval/loss").scores) == 0


def test_the_report_says_what_differs_and_opens_without_a_network(tmp_path):
    sweep = filled(tmp_path / "optimizers", num_seeds=5)
    write_report(sweep)
    text = (sweep.root / "report.md").read_text()
    row = re.compile(r"^\| (\S+) \| 5 \|.*\| ([^|]+) \|$", re.MULTILINE)
    words = dict(row.findall(text.split("## Curves")[0]))
    assert words["optim.name=lion"].strip() == "better"
    assert words["optim.name=muon"].startswith("no difference larger than 0.0")
    noise = re.search(
        r"^\| optim\.name=lion \| 5 \| (\S+) \((\S+) to (\S+)\) \|", text, re.MULTILINE
    )
    found, low, high = map(float, noise.groups())
    scores = [r.score("eval/loss") for r in sweep.results() if "lion" in r.run.arm]
    assert low < found < high and abs(found - statistics.stdev(scores)) < 1e-4
    assert "- optim.name=lion: `optim.name=lion` (adamw)\n" in text
    page = (sweep.root / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "<table>" in page and "better" in page
    for name in ("differences.png", "curves.png"):
        assert (sweep.root / name).read_bytes().startswith(b"\x89PNG")
    with open(sweep.root / "results.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 15
    assert {line["state"] for line in lines} == {"finished"}
    assert float(lines[0]["tokens"]) == 2_048_000
    assert float(lines[0]["seconds"]) == 100.0


def test_seeds_to_find_a_difference_are_those_of_the_sweeps_own_test(tmp_path):
    """Seeds move both arms alike, by 0.1: pairs find 0.01 with few, groups with thousands."""
    needed = {}
    for paired in (False, True):
        sweep = sweep_in(tmp_path / str(paired), "optim.name=lion", num_seeds=5)
        sweep = dataclasses.replace(sweep, paired=paired)
        rng = np.random.default_rng(0)
        for run in sweep.runs():
            write_run(run, 4.0 + 0.1 * run.seed + 0.003 * rng.standard_normal())
        rows = [
            row.split(" | ")
            for row in noise_table(sweep, samples(sweep, sweep.results())).splitlines()[2:]
        ]
        needed[paired] = [row[-1].rstrip(" |") for row in rows]
    assert int(needed[False][1]) > 1000
    assert needed[True][0] == "" and 2 <= int(needed[True][1]) < 10


def test_the_screen_says_what_no_difference_leaves_open(tmp_path):
    sweep = filled(tmp_path)
    *table, note = write_report(sweep).split("\n")
    assert max(map(len, table)) <= 100
    assert table[3].startswith("optim.name=muon") and "no difference larger than 0.0" in table[3]
    detectable = judge(sweep, sweep.results())["optim.name=muon"].detectable
    assert note == f"{LEAVES_ROOM} These seeds could find {detectable:.3g}; more find smaller ones."
    assert LEAVES_ROOM in (tmp_path / "report.md").read_text()
    for run in sweep.runs():
        write_run(run, LOSSES[run.arm] - (run.arm == "optim.name=muon") + 1e-3 * run.seed)
    assert LEAVES_ROOM not in write_report(sweep)


def test_time_to_the_baselines_loss_is_a_share_with_an_interval(tmp_path):
    sweep = sweep_in(tmp_path, "optim.name=lion,muon")
    for run in sweep.runs():
        final = {"baseline": 4.0, "optim.name=lion": 3.0, "optim.name=muon": 4.5}[run.arm]
        write_run(run, final + 0.001 * run.seed)
    write_report(sweep)
    text = (tmp_path / "report.md").read_text()
    # From 8 to 3 in a straight line, 4 is reached after four fifths.
    assert re.search(r"^\| optim\.name=lion \| 0\.80 \(0\.80 to 0\.80\) \|", text, re.MULTILINE)
    assert re.search(r"^\| optim\.name=muon \| reached by 0 of 3 \|", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ([math.nan, math.inf, math.inf], "reached by 1 of 3"),
        ([0.5, math.nan, math.inf], "reached by 2 of 3"),
        ([0.5, math.nan, math.nan], "before the first validation"),
    ],
)
def test_a_run_that_misses_the_loss_is_told_beside_one_that_has_it_at_once(shares, told):
    assert tables._share(shares, []) == told


def test_the_share_to_reach_a_loss_is_as_uncertain_as_that_loss(tmp_path):
    """Sweeps whose arm reaches the baseline's true loss after 4/5: the interval covers it."""
    rng, covered, widths = np.random.default_rng(0), 0, []
    sweep = sweep_in(tmp_path, "optim.name=lion", num_seeds=4)
    for _ in range(40):
        for run in sweep.runs():
            final, noise = (4.0, 0.2) if run.arm == "baseline" else (3.0, 0.02)
            write_run(run, final + noise * rng.standard_normal())
        row = reach_table(sweep, sweep.results()).splitlines()[-1]
        low, high = map(float, re.search(r"\((.*?) to (.*?)\)", row).groups())
        covered += low <= 0.8 <= high
        widths.append(high - low)
    # 0.2 / sqrt(4) of a loss that falls by 4 in 0.8, and Student's t of three degrees: 0.064.
    assert np.mean(widths) == pytest.approx(2 * 0.02 * 3.18, rel=0.2)
    assert covered >= 34  # of 40; 38 are expected


def test_runs_that_break_are_named_and_an_arm_that_diverged_is_not_better(tmp_path):
    sweep = filled(tmp_path)
    lion = [run for run in sweep.runs() if run.arm == "optim.name=lion"]
    write_run(lion[0], 3.7, "diverged", "the loss is not finite at step 7")
    muon = [run for run in sweep.runs() if run.arm == "optim.name=muon"]
    write_run(muon[1], 3.7, "failed", "error: no text file matches books/*.txt. Check it.")
    (muon[2].folder / "outcome.json").unlink()  # as if the disk had been full
    words = write_report(sweep)
    text = (tmp_path / "report.md").read_text()
    assert "diverged in 1 of 3 runs" in words and "better" not in words
    assert "| optim.name=lion seed 0 | diverged | 1000 | the loss is not finite at step 7 |" in text
    assert "| optim.name=muon seed 1 | failed | 1000 | error: no text file matches" in text
    assert "Compared runs: 1 diverged, 1 failed, 6 finished, 1 to come." in text


def test_each_arm_is_tuned_on_seeds_that_are_not_used_again(tmp_path):
    rates = [1e-3, 2e-3, 4e-3]
    tune = {"optim.learning_rate": rates}
    sweep = sweep_in(tmp_path, "optim.name=lion", tune=tune, num_tune_seeds=2)
    choosing = sweep.choosing_runs()
    assert len(choosing) == 12
    for run in choosing:
        rate = run.config.optim.learning_rate
        best = 1e-3 if run.arm == "baseline" else 2e-3
        diverges = run.arm == "baseline" and rate == 4e-3
        write_run(run, 3 + abs(math.log(rate / best)), "diverged" if diverges else "finished")
    assert sweep.chosen == {}
    write_run(choosing[-1], 3.0, "failed")
    assert list(sweep.with_choices().chosen) == ["baseline"]  # the other's is tried again
    left = sweep.with_choices(leave_failed=True)
    assert left.chosen["optim.name=lion"] == {"optim.learning_rate": 2e-3}
    assert left.undecided_runs() == []  # nothing of it is trained again
    mine = [run for run in choosing if run.arm == "optim.name=lion"]
    for run in mine:
        write_run(run, 3.0, "failed")
    assert "optim.name=lion" not in sweep.with_choices(leave_failed=True).chosen  # not diverged
    for run in mine:
        write_run(run, 3 + abs(math.log(run.config.optim.learning_rate / 2e-3)))
    sweep = sweep.with_choices()
    assert sweep.chosen == {
        "baseline": {"optim.learning_rate": 1e-3},
        "optim.name=lion": {"optim.learning_rate": 2e-3},
    }
    compared = sweep.runs()
    assert not {run.seed for run in compared} & {run.seed for run in choosing}
    assert {run.config.optim.learning_rate for run in compared} == {1e-3, 2e-3}
    for run in compared:
        write_run(run, 3.0 + 0.01 * run.seed)
    for run in choosing:  # another try would choose otherwise, and comes too late
        write_run(run, run.config.optim.learning_rate)
    assert sweep.with_choices() == sweep
    for run in choosing:
        best = 1e-3 if run.arm == "baseline" else 2e-3
        write_run(run, 3 + abs(math.log(run.config.optim.learning_rate / best)))
    write_report(sweep)
    text = (tmp_path / "report.md").read_text()
    assert "Each arm had 6 runs to choose among" in text
    assert re.search(r"baseline \| optim\.learning_rate=0\.001 \| 3\.0000 \| at the edge", text)
    assert re.search(r"lion \| optim\.learning_rate=0\.002 \| 3\.0000 \|  \|", text)
    assert (tmp_path / "tuning-optim.learning_rate.png").exists()


def test_a_sweep_grows_by_arms_and_seeds_and_keeps_its_terms(tmp_path):
    before = filled(tmp_path)
    assert load_sweep(tmp_path) == before
    grown = continued(sweep_in(tmp_path, "optim.name=lion,adam", num_seeds=2))
    assert names(grown.arms) == [*LOSSES, "optim.name=adam"]
    assert grown.num_seeds == 3
    with pytest.raises(UserError, match=r"--paired=False, not True"):
        continued(sweep_in(tmp_path, "optim.name=lion", paired=True))
    with pytest.raises(UserError, match=r"have another tokenizer"):
        continued(sweep_in(tmp_path, "data.tokenizer=byte", score="eval/bits_per_byte"))
    shorter = dataclasses.replace(BASE, train=dataclasses.replace(BASE.train, num_steps=900))
    raised = continued(sweep_in(tmp_path, "optim.name=lion", num_seeds=5))
    assert (raised.first_num_seeds, raised.num_seeds, raised.seeds_were_raised) == (3, 5, True)
    until = dataclasses.replace(before, until=0.1, max_seeds=8)
    assert continued(until).seeds_were_raised  # once verdicts could be seen
    until.save()
    assert not continued(until.with_seeds(4)).seeds_were_raised  # by --until itself
    again = continued(before)
    assert (again.until, again.max_seeds) == (0.1, 8)
    for more in (dict(until=0.05), dict(max_seeds=12)):
        assert continued(dataclasses.replace(until, **more)).seeds_were_raised
    assert not continued(dataclasses.replace(until, until=0.2, max_seeds=6)).seeds_were_raised
    before.save()
    other = make_arms(shorter, ["optim.name=lion"], one_at_a_time=False)
    with pytest.raises(UserError, match=r"arm baseline has train\.num_steps=1000, not 900"):
        continued(dataclasses.replace(before, arms=tuple(other)))
    path = before.runs()[1].folder / "config.json"
    path.write_text(path.read_text().replace('"beta1": 0.9', '"beta1": 0.8'))
    with pytest.raises(UserError, match=r"holds a run with optim\.beta1=0\.8, not 0\.9"):
        before.check()


def test_seeds_are_not_raised_by_a_command_that_came_before_any_run_had_ended(tmp_path):
    sweep_in(tmp_path, "optim.name=lion", num_seeds=5).save()
    again = continued(sweep_in(tmp_path, "optim.name=lion", num_seeds=3))
    assert (again.first_num_seeds, again.num_seeds, again.seeds_were_raised) == (5, 5, False)


def test_a_sweep_begun_while_fewer_checkpoints_were_kept_goes_on(tmp_path):
    before = filled(tmp_path)
    for path in tmp_path.rglob("*.json"):
        path.write_text(path.read_text().replace('"keep_checkpoints": 2', '"keep_checkpoints": 1'))
    assert load_sweep(tmp_path).baseline.config.train.keep_checkpoints == 1
    continued(before).check()
    before.check()  # as arms that are new ask for today's default
    more = [with_options(arm.config, {"train.keep_checkpoints": 5}) for arm in before.arms]
    asked = tuple(Arm(arm.change, config) for arm, config in zip(before.arms, more, strict=True))
    with pytest.raises(UserError, match=r"train\.keep_checkpoints=1, not 5"):
        continued(dataclasses.replace(before, arms=asked))
    measured = make_measuring_run(tmp_path, "baseline", BASE, 40)
    measured.prepare()
    path = measured.folder / "config.json"
    path.write_text(path.read_text().replace('"keep_checkpoints": 2', '"keep_checkpoints": 1'))
    assert is_unchanged(measured)
    path.write_text(path.read_text().replace('"warmup_steps": 0', '"warmup_steps": 9'))
    assert not is_unchanged(measured)


def test_runs_on_another_text_are_not_compared(tmp_path):
    sweep = filled(tmp_path)
    for i, run in enumerate(sweep.runs()):
        (run.workdir / "data.json").write_text(json.dumps({"sha256": "a" if i < 4 else "b"}))
    with pytest.raises(UserError, match=r"was trained on another text than .*baseline/seed-0"):
        sweep.check()


def test_an_arm_whose_every_choice_diverged_is_told_and_adds_no_seeds(tmp_path):
    sweep = sweep_in(tmp_path, "optim.name=lion", tune={"optim.learning_rate": [1e-3, 2e-3]})
    for run in sweep.choosing_runs():
        write_run(run, 3.0, "diverged" if "lion" in run.arm else "finished")
    sweep = sweep.with_choices()
    assert sweep.chosen["optim.name=lion"] is None
    for run in sweep.runs():
        write_run(run, 3.0 + 0.01 * run.seed)
    verdicts = judge(sweep, sweep.results())
    assert verdicts["optim.name=lion"].words == "diverged in 2 of 2 runs"
    assert widest(verdicts) == 0.0
    assert (
        "nothing: no choice has a score"
        in (write_report(sweep), (tmp_path / "report.md").read_text())[1]
    )


def test_a_job_of_an_array_has_its_number_only_once_all_values_are_chosen(tmp_path):
    sweep = sweep_in(tmp_path, "optim.name=lion", tune={"optim.learning_rate": [1e-3, 2e-3]})
    for run in sweep.choosing_runs():
        if run.arm == "baseline":
            write_run(run, 3.0)
    sweep = sweep.with_choices()
    assert list(sweep.chosen) == ["baseline"] and sweep.runs()
    assert sweep.numbered_run(3).arm == "optim.name=lion"
    with pytest.raises(UserError, match=r"--index=4 is not one .* Use 0 to 3; runs that compare"):
        sweep.numbered_run(4)


@pytest.mark.parametrize(
    "options",
    [
        dict(optim=dict(warmup_steps=0, warmup_percent=1.0)),
        dict(optim=dict(schedule="piecewise:500=0.5", end_learning_rate=4e-3)),
        dict(optim=dict(schedule="wsd", decay_percent=20.0)),
        dict(train=dict(keep_every=100, checkpoint_every=100)),
        dict(train=dict(keep_checkpoints=5, checkpoint_every=100)),
    ],
)
def test_a_step_can_be_measured_whatever_the_schedule_and_the_checkpoints(tmp_path, options):
    config = make_config(**options)
    run = make_measuring_run(tmp_path, "baseline", config, 40)
    assert make_schedule(run.config.optim, 40)(39) == config.optim.learning_rate
    assert run.config.train.num_steps == 40


def test_a_dry_run_counts_starts_and_compilation(tmp_path):
    sweep, slots = filled(tmp_path, num_seeds=2), make_slots(1)
    assert describe_runs(sweep, slots).endswith("\nno run is left to train")
    (sweep.runs()[-1].folder / "outcome.json").unlink()
    arm = sweep.arms[-1]
    run = make_measuring_run(tmp_path, arm.name, arm.config, 40)
    write_run(run, 3.7, seconds=0.1)
    line = {"step": 40, "perf/step_seconds": 0.1, "perf/total_seconds": 24.0}
    (run.workdir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert measure(tmp_path, arm, slots[0], "tokens").around == pytest.approx(20, abs=1e-3)
    *_, last, total = describe_runs(sweep, slots).splitlines()
    assert last == "   5  optim.name=muon seed 1  1000 steps  2m 00s"
    assert total.startswith("about 2m 00s with --jobs=1: steps, starts and compilation, by a run")


def test_a_warm_up_as_long_as_the_run_is_told():
    config = make_config(train=dict(num_steps=30), optim=dict(warmup_steps=100))
    assert describe_warmup(config).startswith("Learning rates only rise: the warm-up has 100 steps")
    assert not describe_warmup(make_config(train=dict(num_steps=300), optim=dict(warmup_steps=100)))


def test_the_report_tells_of_seeds_that_were_added_and_of_differing_code(tmp_path):
    sweep = dataclasses.replace(filled(tmp_path, num_seeds=4), first_num_seeds=3)
    for i, run in enumerate(sweep.runs()):
        line = {"commit": "abc" if i else "def", "jax": "0.10.2", "device_kind": "cpu"}
        (run.workdir / "environment.jsonl").write_text(json.dumps(line) + "\n")
    write_report(sweep)
    text = (tmp_path / "report.md").read_text()
    told = "Seeds were raised from 3 to 4 by commands that came after runs had ended."
    assert told in text
    assert "commit abc, def (runs differ)" in text and "jax 0.10.2," in text
    for raised in (False, True):
        write_report(dataclasses.replace(sweep, until=1e-6, seeds_were_raised=raised))
        text = (tmp_path / "report.md").read_text()
        assert "which was not reached" in text and (told in text) == raised


def test_a_run_is_explained_by_its_own_try(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("error: the disk is full. Make room.\n")
    start = log.stat().st_size
    with open(log, "a") as file:
        file.write("step 1\nstep 2\n")
    assert last_error(log) == "error: the disk is full. Make room."
    assert last_error(log, start) == "step 2"


def test_runs_at_once_share_the_cores(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    cores = os.sched_getaffinity(0)
    assert make_slots(1)[0].cores == cores
    if len(cores) > 1:
        one, two = make_slots(2)
        assert one.cores and two.cores and not one.cores & two.cores
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in make_slots(2)] == ["4", "7"]
    with pytest.raises(UserError, match=r"--jobs=3 is more than the 2 GPUs"):
        make_slots(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # none, as is known to CUDA
    with pytest.raises(UserError, match=r"--jobs=1000 is more than the \d+ CPU cores"):
        make_slots(1000)


def test_a_sweep_tells_no_time_left_before_it_is_known_or_while_runs_end(tmp_path, monkeypatch):
    sweep = sweep_in(tmp_path, "optim.name=lion", num_seeds=1)
    monkeypatch.setattr(screen.time, "monotonic", lambda: 0.0)
    shown = screen.Screen(sweep, sweep.runs(), "comparing", lambda config: 1.0)
    monkeypatch.setattr(screen.time, "monotonic", lambda: 100.0)
    assert shown._left() == ""
    first, second = sweep.runs()
    write_run(first, 3.8)
    assert shown._left() == "1m 40s left"  # the second has as many steps
    write_run(second, 3.7)
    (second.folder / "outcome.json").unlink()  # it still saves
    assert shown._left() == ""


def test_the_time_left_counts_what_a_step_costs(tmp_path, monkeypatch):
    sweep = sweep_in(tmp_path, "optim.name=lion", num_seeds=1)
    first, second = sweep.runs()
    costs = {first.config: 1.0, second.config: 3.0}
    monkeypatch.setattr(screen.time, "monotonic", lambda: 0.0)
    shown = screen.Screen(sweep, sweep.runs(), "comparing", costs.__getitem__)
    monkeypatch.setattr(screen.time, "monotonic", lambda: 100.0)
    write_run(first, 3.8)
    assert shown._left() == "5m 00s left"


@pytest.fixture
def drawn(monkeypatch):
    """The figures and panels that are drawn."""
    figures, make = [], pictures._figure
    monkeypatch.setattr(
        pictures, "_figure", lambda **shape: figures.append(make(**shape)) or figures[-1]
    )
    return figures


def curves_of(*finals, steps=1):
    """Curves of as many seeds, which take the same tokens and FLOPs, and other times."""
    x = np.arange(1.0, steps + 1)
    return [Curve(x * 2048, x * 1e9, x * final, 3 + final / x) for final in finals]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_single_validations_are_marks_side_by_side_with_their_range(tmp_path, drawn):
    curves = {"baseline": curves_of(1, 2), "a": curves_of(1, 1.5), "b": []}
    pictures.plot_curves(tmp_path / "c.png", curves, "nats per token")
    figure, (tokens, _, seconds) = drawn[0]
    assert legend(figure) == ["baseline", "a", "range of seeds"]
    first, its_range, second, _ = tokens.lines
    np.testing.assert_array_equal(its_range.get_ydata().ravel(), [4, 5])

    def place(line):
        return line.get_transform().transform((line.get_xdata()[0], 0))[0]

    assert first.get_xdata()[0] == second.get_xdata()[0] and place(first) < place(second)
    left, right = (tokens.transAxes.transform((x, 0))[0] for x in (0, 1))
    assert left < place(first) and place(second) < right
    assert tokens.get_xlabel() == "tokens (the same for all, side by side)"
    assert seconds.get_xlabel() == "time in training steps"
    assert place(seconds.lines[0]) == seconds.transData.transform((1.5, 0))[0]


def test_a_single_validation_beside_lines_is_named_so_and_stands_in_its_place(tmp_path, drawn):
    curves = {"long": curves_of(1, steps=5), "young": curves_of(2)}
    pictures.plot_curves(tmp_path / "c.png", curves, "nats per token")
    figure, (tokens, *_) = drawn[0]
    assert legend(figure) == ["long", "young\n(one validation)"]
    assert tokens.get_xlabel() == "tokens"


def test_dots_of_seeds_lie_below_their_interval(tmp_path, drawn):
    sweep = filled(tmp_path)
    scores = {name: [-0.01, 0.0, 0.01] for name in ("optim.name=lion", "optim.name=muon")}
    pictures.plot_differences(tmp_path / "d.png", judge(sweep, sweep.results()), scores, "nats")
    _, (axes,) = drawn[0]
    _, dots, interval, middle = axes.lines[:4]
    assert set(interval.get_ydata()) == set(middle.get_ydata()) == {0}
    assert set(dots.get_ydata()) == {-0.2}
    scores["baseline"] = [-0.02, 0.02]
    pictures.plot_differences(tmp_path / "d.png", judge(sweep, sweep.results()), scores, "nats")
    _, (axes,) = drawn[1]
    names = [label.get_text() for label in axes.get_yticklabels()]
    dots = next(line for line in axes.lines if list(line.get_xdata()) == [-0.02, 0.02])
    assert set(dots.get_ydata()) == {names.index("baseline") - 0.2}


def test_curves_of_several_sizes_share_a_color_by_arm_and_a_pattern_by_size(tmp_path, drawn):
    curves = {f"{size},{arm}": curves_of(1, steps=5) for size in "SL" for arm in ("base", "lion")}
    looks = {name: (["base", "lion"].index(name[2:]), "SL".index(name[0])) for name in curves}
    pictures.plot_curves(tmp_path / "c.png", curves, "nats", looks=looks)
    lines = {line.get_label(): line for line in drawn[0][1][0].lines}
    small, large, other = (lines[name] for name in ("S,lion", "L,lion", "L,base"))
    assert small.get_color() == large.get_color() != other.get_color()
    assert small.get_linestyle() != large.get_linestyle() == other.get_linestyle()


@pytest.mark.parametrize("log_x", [False, True])
def test_curves_of_very_different_lengths_are_drawn(tmp_path, drawn, log_x):
    amounts = [np.array(steps) * 2048.0 for steps in ([1, 2], np.arange(0, 2001, 100))]
    curves = {str(len(x)): [Curve(x, x, x, 8 - np.log1p(x) / 4)] for x in amounts}
    pictures.plot_curves(tmp_path / "curves.png", curves, "nats per token", log_x=log_x)
    for axes in drawn[0][1]:
        left, right = axes.get_xlim()
        ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        told = [label.get_text() for at, label in ticks if left <= at <= right]
        assert len(set(told)) == len(told) >= 2 and all(told)
        ends = [line.get_xdata()[-1] for line in axes.lines]
        assert len(ends) == 2 and all(left < end <= right for end in ends)


# Scaling


def test_sizes_keep_the_width_of_heads_and_the_tokens_per_parameter():
    found = at_sizes(arms("optim.name=lion"), ["2x64", "4x128", "6x192"], lambda c: VOCABULARY)
    assert names(found)[:3] == ["2x64,baseline", "2x64,optim.name=lion", "4x128,baseline"]
    assert found[2].config == BASE
    ratios = {
        arm.config.train.num_steps
        / count_compute_parameters(arm.config.with_vocabulary(VOCABULARY).gpt())
        for arm in found
    }
    assert max(ratios) / min(ratios) < 1.01
    assert {arm.config.model.head_size for arm in found} == {BASE.model.head_size}
    for sizes, message in [
        (["2x64", "4x128"], "not 3 different sizes"),
        (["2x64", "2x64", "4x128"], "not 3 different sizes"),
        (["2x64", "4x128", "6"], "Write LAYERSxWIDTH"),
        (["2x64", "4x128", "6x100"], "cannot have the size 6x100: widths are multiples"),
    ]:
        with pytest.raises(UserError, match=message):
            at_sizes(arms("optim.name=lion"), sizes, lambda c: VOCABULARY)


def test_a_power_law_and_what_it_saves_are_found():
    flops = np.repeat([1e12, 1e13, 1e14], 3)
    noise = 1 + 1e-4 * np.random.default_rng(0).standard_normal(len(flops))
    fit = fit_power_law(flops, 20 * flops**-0.05 * noise)
    assert abs(fit.exponent - 0.05) < fit.error < 1e-3
    np.testing.assert_allclose(fit.loss(np.array(1e15)), 20 * 1e15**-0.05, rtol=1e-3)

    # An arm that needs 0.7 of the compute for the same loss.
    arm = fit_power_law(flops, 20 * (flops / 0.7) ** -0.05 * noise)
    middle, low, high = compute_to_match(fit, arm, 1e14)
    assert low < 0.7 < high and high - low < 0.05
    np.testing.assert_allclose(middle, 0.7, rtol=1e-3)
    # Where its loss does not fall, no compute reaches the baseline's; where it may not, no end.
    rising = dataclasses.replace(arm, slope=0.01)
    assert np.isnan(compute_to_match(fit, rising, 1e14)).all()
    unsure = dataclasses.replace(arm, slope_error=0.05)
    assert compute_to_match(fit, unsure, 1e14)[0] == middle
    assert np.isnan(compute_to_match(fit, unsure, 1e14)[1:]).all()
    flat = dataclasses.replace(arm, slope=-1e-9, slope_error=1e-12, height=arm.height + 1)
    assert compute_to_match(fit, flat, 1e14) == (math.inf, math.inf, math.inf)


def test_losses_that_follow_another_curve_are_told_from_noise():
    flops, rng = np.repeat([1e12, 8e12, 27e12, 64e12], 3), np.random.default_rng(0)
    law = np.log(5) - 0.08 * np.log(flops / 1e12)

    def fit(bend, runs=slice(None)):
        noise = 0.004 * rng.standard_normal(len(flops))
        losses = np.exp(law + bend * np.log(flops / 1e13) ** 2 + noise)
        return fit_power_law(flops[runs], losses[runs])

    false = sum(fit(0.0).p_misfit < 0.05 for _ in range(400))
    assert stats.binomtest(false, 400, 0.05).pvalue > 0.01
    bent = fit(0.02)
    assert bent.p_misfit < 1e-3 and 0.01 < bent.farthest < 0.1
    assert math.isnan(fit(0.02, slice(None, None, 3)).p_misfit)  # one run at each place


@pytest.mark.parametrize("num", [1, 3, 5])
def test_the_interval_of_compute_holds_the_truth_at_95_percent(num):
    rng, held = np.random.default_rng(0), 0
    flops = np.repeat([1e12, 8e12, 27e12], num)
    for _ in range(400):
        losses = 5 * flops**-0.08 * np.exp(0.004 * rng.standard_normal((2, len(flops))))
        laws = [fit_power_law(flops, each) for each in losses]
        _, low, high = compute_to_match(*laws, flops[-1])
        held += low < 1 < high
    assert stats.binomtest(held, 400, 0.95).pvalue > 0.01


def test_the_report_compares_at_each_size_and_draws_the_law(tmp_path):
    sweep = sweep_in(tmp_path, "optim.name=lion")
    sizes = ["2x64", "4x128", "6x192"]
    scaled = at_sizes(list(sweep.arms), sizes, lambda config: VOCABULARY)
    sweep = dataclasses.replace(sweep, arms=tuple(scaled)).with_choices()
    sweep.save()
    assert load_sweep(tmp_path) == sweep
    rng = np.random.default_rng(0)
    for run in sweep.runs():
        worse = 0.2 * ("lion" in run.arm)
        write_run(run, 4.5 - 0.3 * sizes.index(run.arm[:5].rstrip(",")) + worse, noise=rng)
    write_report(sweep)
    text = (tmp_path / "report.md").read_text()
    assert (
        len(re.findall(r"^\| \dx\d+,optim\.name=lion \| 3 .* worse \|$", text, re.MULTILINE)) == 3
    )
    law = re.search(
        r"^\| optim\.name=lion \| 9 \| .* \| 0\.\d+ ± .* \| (\S+) \(", text, re.MULTILINE
    )
    assert float(law[1]) > 1.2
    assert (tmp_path / "scaling.png").exists()


def test_a_reference_is_a_table_of_points(tmp_path):
    path = tmp_path / "nanogpt.csv"
    path.write_text("name,tokens,loss\na,2000,3.0\na,1000,4.0\nb,1000,5.0\n")
    curves = read_reference(path)
    np.testing.assert_array_equal(curves["a"][0].tokens, [1000, 2000])
    np.testing.assert_array_equal(curves["a"][0].scores, [4.0, 3.0])
    assert list(curves) == ["a", "b"]
    for text in ("", "tokens,loss\n", "step,loss\n1,2\n", "tokens,loss\n1,x\n", "tokens,loss\n1\n"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"nanogpt\.csv (is not a table|holds no point)"):
            read_reference(path)


# Real runs

SMALL = [
    *TINY,
    "--config.train.eval_batches=2",
    "--vary=optim.learning_rate=4e-3,1e30",
    "--seeds=1",
    "--jobs=2",
]


def ablate(*options, timeout=400):
    return subprocess.run(
        [sys.executable, "-m", "gpt2.ablate", *options],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": ""},
    )


def without_times(root):
    with open(root / "results.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


@pytest.mark.thorough
def test_a_sweep_trains_reports_and_is_safe_to_repeat(tmp_path):
    root = tmp_path / "sweep"
    first = ablate(*SMALL, f"--workdir={root}")
    assert first.returncode == 0, first.stderr
    assert "2/2" in first.stdout and "diverged in 1 of 1 runs" in first.stdout
    assert "diverged: the loss is not finite at step" in first.stdout
    rows = without_times(root)
    assert [row["state"] for row in rows] == ["finished", "diverged"]
    times = {path: path.stat().st_mtime_ns for path in root.rglob("outcome.json")}
    again = ablate(*SMALL, f"--workdir={root}")
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in root.rglob("outcome.json")} == times
    assert without_times(root) == rows
    drawn = subprocess.run(
        [sys.executable, "-m", "gpt2.compare", root, f"--output={tmp_path / 'c.png'}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert drawn.returncode == 0, drawn.stderr
    assert "baseline" in drawn.stdout and (tmp_path / "c.png").exists()


def start_ablate(*options):
    return subprocess.Popen(
        [sys.executable, "-m", "gpt2.ablate", *options],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_corpus_that_vanishes_is_named_and_what_is_left_goes_on(tmp_path):
    root, text = tmp_path / "sweep", tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 400)
    options = [*TINY, "--config.train.eval_batches=2", f"--config.data.corpus=text:{text}"]
    options += ["--config.data.val_fraction=0.1", "--vary=optim.name=lion", "--seeds=2"]
    options += [f"--workdir={root}", f"--config.data.data_dir={tmp_path / 'data'}"]
    plan = ablate(*options, "--dry_run")
    assert plan.returncode == 0, plan.stderr
    assert re.search(r"3  optim\.name=lion seed 1  8 steps  [\dm ]+s\n", plan.stdout)
    one = ablate(*options, "--index=1")
    assert "optim.name=lion seed 0: finished" in one.stdout, one.stderr
    sweep = start_ablate(*options)
    first = root / "runs/baseline/seed-0/outcome.json"
    while not first.exists() and sweep.poll() is None:
        time.sleep(0.05)
    moved = text.rename(tmp_path / "moved.txt")
    said, _ = sweep.communicate(timeout=240)
    assert sweep.returncode == 1, said
    assert "seed 1  failed: error: " in said
    assert "optim.name=lion seed 1 | failed | 0 | error: " in (root / "report.md").read_text()
    moved.rename(text)
    again = ablate(*options)
    assert again.returncode == 0, again.stderr
    assert [row["state"] for row in without_times(root)] == ["finished"] * 4


def environments(root):
    """Returns the runs' environment.jsonl, and looks into no checkpoint that may be leaving."""
    return list(root.glob("runs/*/*/run/environment.jsonl"))


def num_starts(root):
    """Returns how often runs of a sweep have begun or gone on."""
    return sum(path.read_text().count("\n") for path in environments(root))


@pytest.mark.slow
def test_a_sweep_killed_at_random_ends_with_the_same_results(tmp_path):
    options = [*TINY, "--config.train.num_steps=200", "--config.train.eval_batches=2"]
    options += ["--config.train.eval_every=50", "--config.train.checkpoint_every=20", "--seeds=2"]
    options += ["--vary=optim.name=lion", "--vary=optim.learning_rate=1e30", "--one_at_a_time"]
    options += ["--jobs=2"]
    wanted = ablate(*options, f"--workdir={tmp_path / 'whole'}")
    assert wanted.returncode == 0, wanted.stderr
    root, rng, kills = tmp_path / "killed", random.Random(0), 0
    for i in range(10):
        before = num_starts(root)
        process = start_ablate(*options, f"--workdir={root}")
        while i % 2 and process.poll() is None and num_starts(root) == before:
            time.sleep(0.05)  # until a run begins, however slow the machine is
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=rng.uniform(0, 3) if i % 2 else rng.uniform(6, 14))
        kills += process.poll() is None
        process.kill()
        if rng.random() < 0.5:  # its runs too, which would otherwise save their state
            subprocess.run(["pkill", "-9", "-f", f"workdir={root}/"])
        process.communicate()
    assert kills >= 4
    last = ablate(*options, f"--workdir={root}")
    assert last.returncode == 0, last.stderr
    assert without_times(root) == without_times(tmp_path / "whole")
    assert num_starts(root) > len(environments(root)), "none was interrupted"


MISTAKES = [
    (["--vary=optim.name=lion"], "there is no --workdir"),
    (["--workdir=DIR", "--vary=train.num_steps=9"], "--equal=tokens sets it"),
    (["--workdir=DIR", "--vary=optim.name=lion", "--tune=data.batch_size=8"], "the terms"),
    (["--workdir=DIR"], "there is no --vary"),
    (["--workdir=DIR", "--vary=optim.name=adamw"], "the baseline alone"),
    (["--workdir=DIR", "--vary=optim.name=lion", "--tune_seeds=2"], "nothing is tuned"),
    (["--workdir=DIR", "--vary=optim.name=lion", "--max_seeds=9"], "it ends --until"),
    (["--workdir=DIR", "--vary=optim.name=lion", "--until=1", "--seeds=2"], "Begin with 3 seeds"),
    (["--workdir=DIR", "--vary=optim.name=lion", "--jobs=999"], "CPU cores"),
    (
        ["--workdir=DIR", "--report", "--seeds=4"],
        "--report trains nothing, and would ignore --seeds",
    ),
]


@pytest.mark.parametrize(
    ("options", "message"),
    MISTAKES[:3] + [pytest.param(*each, marks=pytest.mark.thorough) for each in MISTAKES[3:]],
)
def test_a_mistake_is_one_line_and_writes_nothing(tmp_path, options, message):
    root = tmp_path / "sweep"
    ended = ablate(*TINY, *(each.replace("DIR", str(root)) for each in options))
    assert ended.returncode == 2
    assert message in ended.stderr and ended.stderr.count("\n") == 1
    assert not root.exists()


def test_a_sweep_is_not_begun_in_the_folder_of_a_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    ended = ablate("--vary=seed=0", f"--workdir={tmp_path}")
    assert "changes nothing" in ended.stderr  # such a file may be any program's
    (tmp_path / "data.json").write_text("{}")
    ended = ablate("--vary=optim.name=lion", f"--workdir={tmp_path}")
    assert ended.returncode == 2
    assert f"--workdir={tmp_path} is the folder of a run. Name another" in ended.stderr
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.thorough
def test_a_report_needs_a_sweep_and_no_options(tmp_path):
    nothing = ablate("--report", f"--workdir={tmp_path}")
    assert nothing.returncode == 2 and "holds no sweep" in nothing.stderr
    ignored = ablate("--report", f"--workdir={tmp_path}", "--config.seed=3")
    assert "--report trains nothing, and would ignore --config.seed" in ignored.stderr
