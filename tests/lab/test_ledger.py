"""Ledgers: what evidence is worth, and what one command makes of an idea."""

import ctypes
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import integrate, stats

from configs import quickstart
from gpt2.config import Config, load_config, with_options
from gpt2.data import prepare_dataset
from gpt2.errors import UserError
from gpt2.lab.experiments.arms import Arm
from gpt2.lab.experiments.checkouts import check_out, find_commit, snapshot
from gpt2.lab.experiments.jobs import make_slots
from gpt2.lab.experiments.processes import SANDBOX
from gpt2.lab.experiments.run_folder import Run, options_from
from gpt2.lab.experiments.terms import LOSS, flops
from gpt2.lab.ledger import __main__ as command
from gpt2.lab.ledger import referee, trial
from gpt2.lab.ledger.evidence import (
    SCREEN_PAIRS,
    evidence,
    findable,
    half_width,
    is_futile,
    level_at,
    most_evidence,
)
from gpt2.lab.ledger.ideas import arms_at
from gpt2.lab.ledger.journal import append, read_ledger
from gpt2.lab.ledger.training_text import open_text, with_training_text
from tests.helpers import (
    ROOT,
    SECONDS,
    TINY,
    copy_project,
    environment,
    finish,
    git,
    make_repository,
    metrics_of,
    read_rows,
    start,
    succeed,
    thorough,
    write_run,
)
from tests.programs.ledger_rates import EFFECTS, by_evidence, simulate

BASE = Config.from_dict(quickstart.get_config()).with_vocabulary(4096)
BASE = with_options(BASE, {"train.num_steps": 100, "optim.warmup_steps": 10})


# Evidence


@pytest.mark.parametrize("num", [1, 2, 6])
def test_the_evidence_to_come_is_what_there_is_on_average(num):
    """The next difference is drawn as the null hypothesis predicts it by the ones seen."""
    seen = np.random.default_rng(num).standard_normal(num)
    scale = math.sqrt((seen**2).mean())
    null = stats.t(num, scale=scale)

    def evidence_after(difference):
        return evidence(np.append(seen, difference))[-1]

    def to_come(quantile):
        return evidence_after(null.ppf(quantile))

    mean, error = integrate.quad(to_come, 0, 1, limit=400)
    now = evidence(seen)[-1]
    assert evidence_after(-3 * scale) > 1.2 * now  # it depends on the difference
    assert mean == pytest.approx(now, abs=10 * error + 1e-4)


@pytest.mark.parametrize("mean", [0.0, 0.3])
def test_evidence_against_what_is_true_is_one_at_most_wherever_one_stops(mean):
    num = 20_000
    noise = np.random.default_rng(0).standard_normal((num, 12))
    found = evidence(noise + mean)
    assert (evidence(noise - 2)[:, -1] >= 20).mean() > 0.95
    ends = found >= 20
    ends[:, -1] = True
    stopped = found[np.arange(num), ends.argmax(1)]
    error = stopped.std() / math.sqrt(num)
    assert stopped.mean() < 1 + 4 * error
    share = (found >= 20).any(1).mean()
    assert share < 1 / 20 + 4 * math.sqrt(0.05 * 0.95 / num)


def test_evidence_does_not_hang_on_the_unit():
    differences = np.random.default_rng(0).standard_normal((5, 6))
    np.testing.assert_allclose(evidence(1e3 * differences), evidence(differences))


def test_an_interval_holds_the_mean_after_every_pair():
    noise = np.random.default_rng(0).standard_normal((1000, 12))
    held = np.ones(1000, bool)
    for num in range(2, 13):
        seen = noise[:, :num]
        widths = np.array([half_width(row, 0.05) for row in seen])
        held &= np.abs(seen.mean(1)) <= widths
    assert held.mean() > 0.95 - 4 * math.sqrt(0.05 * 0.95 / 1000)
    first = noise[0]
    assert half_width(first[:2], 0.05) == math.inf
    # Where the interval ends, the evidence for both sides is 20: the sum of both is 40.
    at_end = first - first.mean() + widths[0]
    both = evidence(at_end)[-1] + evidence(-at_end)[-1]
    assert both == pytest.approx(40)


def test_levels_are_those_of_e_lond():
    zeta = 3.931949211809  # of 1.3
    assert level_at(1, 0) == pytest.approx(0.1 / zeta)
    assert level_at(7, 3) == pytest.approx(0.1 * 7**-1.3 / zeta * 4)
    shares = [level_at(number, 0) for number in range(1, 10_000)]
    assert 0.07 < sum(shares) < 0.1


def test_hopeless_is_what_would_hardly_be_kept():
    noise = np.random.default_rng(0).standard_normal((500, 16))

    def kept_and_ended(gain):
        differences = noise - gain
        kept = (evidence(differences) >= 1e3).any(1)
        return kept, is_futile(differences[:, :4], 16, 1e-3)

    kept, ended = kept_and_ended(0.0)
    assert kept.mean() <= 0.02
    assert ended.mean() > 0.5
    kept, ended = kept_and_ended(1.0)
    assert ended.any()
    assert kept[ended].mean() < 0.2
    kept, _ = kept_and_ended(3.0)
    assert kept.mean() >= 0.7


def test_a_dry_run_tells_what_is_found():
    sizes = findable(12, 1e-3, 0.8)
    assert math.isnan(sizes[0])  # one pair says nothing
    assert all(np.diff(sizes[4:]) <= 0)
    differences = np.random.default_rng(1).standard_normal((4000, 12)) - sizes[-1]
    clear = evidence(differences) >= 1e3
    kept = np.zeros(4000, bool)
    futile = np.zeros(4000, bool)
    for num in range(2, 13):
        kept |= clear[:, num - 1] & ~futile
        futile |= is_futile(differences[:, :num], 12, 1e-3)
    assert 0.78 < kept.mean() < 0.87  # sizes are 6 % apart
    assert clear.any(1).mean() > kept.mean() + 0.03


def test_streams_of_ideas_keep_few_that_are_none():
    false, found, *_ = simulate(by_evidence, 0.1, noisy=0.1, num=100)
    error = false.std() / math.sqrt(len(false))
    assert false.mean() < 0.1 + 4 * error
    assert found[2] > 0.7 and found[3] > 0.95


def test_screened_streams_keep_as_much_for_fewer_large_runs():
    _, unscreened, _, runs = simulate(by_evidence, 0.1, num=100)
    effect = EFFECTS["the same at all sizes"]
    false, found, _, screened = simulate(by_evidence, 0.1, num=100, effect=effect)
    error = false.std() / math.sqrt(len(false))
    assert false.mean() < 0.1 + 4 * error
    # A gain of 2 standard deviations is found more often, because the level falls less.
    assert found[1] > unscreened[1] > 0.2
    assert found[1] > 0.5
    assert found[3] > 0.95
    assert screened.mean() < runs.mean() / 2


@pytest.mark.parametrize("pairs", [2, 3, 7])
def test_no_gain_has_more_evidence_than_the_most_however_large(pairs):
    alike = np.linspace(0.0, 1e-7, pairs) - 1
    found = evidence(alike)[-1]
    assert 0.98 < found / most_evidence(pairs) < 1


# Code with other options


def test_code_that_lacks_an_option_is_not_given_it(tmp_path):
    text = (ROOT / "configs/default.py").read_text()
    without, times = re.subn(r"    unique: bool = option\([^()]*\)\n", "", text)
    assert times == 1
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/default.py").write_text(without)
    older = Run("older", BASE, tmp_path, source=tmp_path).options()
    assert "data.unique" not in older
    assert "data.unique" in Run("newer", BASE, tmp_path).options()
    unique = with_options(BASE, {"data.unique": True})
    with pytest.raises(UserError, match=r"no option data\.unique"):
        Run("older", unique, tmp_path, source=tmp_path).options()


# One command, with runs that cost nothing


class Ideas:
    """A ledger whose runs end at once, with the losses that a function gives."""

    def __init__(self, root, monkeypatch, loss):
        self.root = root
        self.trained = []
        self.loss = loss
        self.noise = 0.003
        self.meanwhile = lambda run: None
        self.scored = lambda run: None
        self.own_loss = lambda run, loss: loss
        self._set = monkeypatch.setattr
        tokenizer = SimpleNamespace(vocab_size=4096)
        dataset = SimpleNamespace(tokenizer=tokenizer, parts={"": None})
        self._set(command, "prepare_dataset", lambda _: dataset)
        self._set(command, "open_text", lambda *_: dataset)
        self._set(command, "snapshot", lambda: "")
        self._set(command, "_become_judge", lambda root, ledger: None)
        self._set(trial, "train_all", self._train)
        self._set(trial, "score", self._score)
        self._set(command.cli, "parse_config", lambda: self.config)
        self._set(command.cli, "overrides", dict)
        self._set(command.cli, "config_file", lambda: "configs/quickstart.py")
        self.config = BASE

    def _score(self, run, dataset):
        self.scored(run)
        loss = run.read(LOSS)[-1][LOSS]
        return referee.Score(loss, self.own_loss(run, loss))

    def _train(self, runs, slots):
        for run in runs:
            if run.outcome().state in ("finished", "diverged"):
                continue
            self.trained.append(run.label)
            final = self.loss(run.config)
            state = "finished"
            if isinstance(final, str):
                state = final
                final = 3.0
            final -= 0.1 * (run.source / "train.py").read_text().count("BETTER")
            noise = np.random.default_rng(len(self.trained)).standard_normal()
            write_run(run, final + self.noise * noise, state, "it broke")
            self.meanwhile(run)

    def __call__(self, idea, **flags):
        """Tries an idea, and returns its answer and how many runs that took."""
        options = dict(pairs=8, minutes=math.inf, least=0.0, equal="tokens", json=True)
        options["slowdown"] = math.inf
        options |= dict(ledger=str(self.root), idea=idea, dry_run=False, screen=[])
        options["cluster"] = ""
        self._set(command, "FLAGS", SimpleNamespace(**options | flags))
        before = len(self.trained)
        code = command.main()
        answer = {code: name for name, code in command.EXIT_CODES.items()}[code]
        return answer, len(self.trained) - before


def loss_of(config):
    losses = {"lion": 3.9, "muon": 4.0, "adam": "failed", "sgd": "diverged"}
    loss = losses.get(config.optim.name, 4.0)
    if isinstance(loss, float) and config.model.activation == "relu_squared":
        loss -= 0.05
    return loss


@pytest.fixture
def ideas(tmp_path, monkeypatch):
    return Ideas(tmp_path / "ideas", monkeypatch, loss_of)


def test_a_gain_is_kept_and_the_next_idea_is_tried_on_top_of_it(ideas, capsys):
    assert ideas("optim.name=lion") == ("keep", 6)
    answer = json.loads(capsys.readouterr().out)
    assert answer["answer"] == "keep"
    assert answer["pairs"] == 3
    assert answer["level"] == pytest.approx(level_at(1, 0))
    assert answer["next_level"] == pytest.approx(level_at(2, 1))
    assert answer["low"] < -0.1 < answer["high"] < 0
    answer, runs = ideas("model.activation=relu_squared")
    assert answer == "keep"
    assert runs < 12
    last = read_ledger(ideas.root).best
    assert last.arm.config.optim.name == "lion"
    assert last.best == 1
    gain, *_ = last.interval
    assert gain == pytest.approx(-0.05, abs=0.01)
    assert "relu_squared" in (ideas.root / "report.html").read_text()
    kept = {"optim.name": "lion", "model.activation": "relu_squared"}
    assert json.loads(capsys.readouterr().out)["options"] == kept
    ideas("", json=False)
    command = capsys.readouterr().out
    for name, value in kept.items():
        assert f" --config.{name}={value}" in command


def test_a_gain_below_what_is_worth_keeping_is_not_kept(ideas):
    assert ideas("optim.name=lion", least=0.2)[0] == "discard"
    assert ideas("optim.name=lion", least=0.05)[0] == "keep"


@pytest.mark.parametrize(("limit", "answer"), [(2.9, "discard"), (3.1, "keep")])
def test_a_gain_of_slower_runs_is_not_kept_beyond_a_limit(ideas, capsys, limit, answer):
    def timed(run):
        path = run.folder / "outcome.json"
        seconds = 3.0 if run.arm.startswith("001") else 1.0
        path.write_text(json.dumps({"state": "finished", "seconds": seconds}))

    ideas.meanwhile = timed
    assert ideas("optim.name=lion", slowdown=limit)[0] == answer
    if answer == "discard":
        why = json.loads(capsys.readouterr().out)["why"]
        assert why == "the idea's runs take 3.00 times as long as the best version's"


def test_every_idea_and_the_best_train_with_seeds_that_stood_nowhere_before(ideas):
    def is_recorded(run):
        drawn = [idea.seeds for idea in read_ledger(ideas.root).ideas]
        assert drawn[-1][-1] == run.config.seed

    ideas.meanwhile = is_recorded
    for idea in ("optim.beta2=0.97", "optim.beta2=0.96"):
        answer, runs = ideas(idea)
        assert answer == "discard" and runs
    first, second = [idea.seeds for idea in read_ledger(ideas.root).ideas[1:]]
    seeds = [*first, *second]
    assert len({*seeds}) == len(seeds) == len(ideas.trained) / 2
    assert min(seeds) > 2**16  # 0, 1, 2, ... would be known
    for arm in (1, 2):
        folders = (ideas.root / "runs").glob(f"{arm:03}-*/seed-*")
        assert {folder.name for folder in folders} == {
            f"seed-{seed}" for seed in (first, second)[arm - 1]
        }


def test_a_pair_goes_on_with_its_seed_after_a_kill(ideas):
    def killed(run):
        raise KeyboardInterrupt

    ideas.meanwhile = killed
    with pytest.raises(KeyboardInterrupt):
        ideas("optim.name=lion")
    (seed,) = read_ledger(ideas.root).ideas[1].seeds
    ideas.meanwhile = lambda run: None
    assert ideas("optim.name=lion") == ("keep", 5)
    assert read_ledger(ideas.root).ideas[1].seeds[0] == seed


def test_an_idea_that_is_tried_again_costs_nothing_and_brings_its_evidence(ideas):
    ideas.loss = lambda config: 4.0 - 0.006 * (config.optim.beta2 == 0.97)
    first, runs = ideas("optim.beta2=0.97", pairs=5)
    assert first != "keep" and runs
    assert ideas("optim.beta2=0.97", pairs=5) == (first, 0)
    assert len(read_ledger(ideas.root).ideas) == 2
    answer, more = ideas("optim.beta2=0.97", pairs=60)
    idea = read_ledger(ideas.root).ideas[1]
    assert answer == "keep"
    assert len(idea.pairs) == (runs + more) / 2 > 5


def test_the_best_itself_and_scores_that_do_not_differ_are_not_kept(ideas, capsys):
    assert ideas("optim.name=adamw") == ("discard", 0)
    assert json.loads(capsys.readouterr().out)["idea"] == "optim.name=adamw"
    assert len(read_ledger(ideas.root).ideas) == 1
    ideas.noise = 0.0
    assert ideas("memory.remat=full") == ("discard", 4)
    assert (
        read_ledger(ideas.root).ideas[1].why
        == "the same score as the best version for every seed"
    )


def test_ideas_that_do_not_train_are_in_the_ledger(ideas):
    assert ideas("optim.name=adam") == ("failed", 2)
    assert ideas("optim.name=adam") == ("failed", 2)  # another idea, by its seeds
    first, second = read_ledger(ideas.root).ideas[1:]
    assert first.number != second.number and first.seeds != second.seeds
    assert ideas("optim.name=adamw+optim.learning_rate=1e-3+optim.beta1=0.8")[1]
    idea = read_ledger(ideas.root).ideas[1]
    assert idea.answer == "failed"
    assert idea.why == "it broke"
    assert ideas("optim.name=sgd")[0] == "discard"  # diverged


def test_an_idea_whose_runs_break_has_spent_its_place(ideas, capsys):
    def level_after(idea, name="next_level"):
        ideas(idea)
        return json.loads(capsys.readouterr().out)[name]

    assert level_after("optim.name=adam") == pytest.approx(level_at(2, 0))
    assert level_after("optim.name=sgd") == pytest.approx(level_at(3, 0))  # diverged
    ideas.loss = lambda config: 3.9 if config.optim.name == "adam" else 4.0
    assert level_after("optim.name=adam", "level") == pytest.approx(level_at(3, 0))
    assert read_ledger(ideas.root).best.number == 3


def test_a_run_that_failed_is_not_repeated_after_a_kill(ideas):
    def killed(run):
        if run.outcome().state == "failed":
            raise KeyboardInterrupt

    ideas.meanwhile = killed
    with pytest.raises(KeyboardInterrupt):
        ideas("optim.name=adam")
    ideas.loss = lambda config: 3.0
    assert ideas("optim.name=adam") == ("failed", 0)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (4.05, "a gain is unlikely to show, even within 16 pairs (twice --pairs)"),
        (
            3.9935,
            "a gain is unlikely to show within 8 pairs, but may show within 16; to"
            " continue, use --pairs=16",
        ),
    ],
)
def test_a_discard_says_whether_more_pairs_would_help(ideas, capsys, loss, reason):
    ideas.noise = 0.0
    scores = iter([0.0, 0.01, 0.0, -0.011, 0.0, 0.01] * 9)
    ideas.loss = lambda config: (
        next(scores) + (loss if config.optim.name == "lion" else 4.0)
    )
    assert ideas("optim.name=lion")[0] == "discard"
    answer = json.loads(capsys.readouterr().out)
    assert answer["why"] == reason
    assert answer["steps"] == answer["best_steps"] == 100


def test_a_discard_after_two_pairs_shows_both_differences(ideas, capsys):
    ideas.noise = 0.0
    scores = iter([4.0, 4.05, 4.0, 3.99])
    ideas.loss = lambda config: next(scores)
    assert ideas("optim.name=lion", json=False) == ("discard", 4)
    text = " ".join(capsys.readouterr().out.split())
    assert "So far, the differences are +0.0500 and -0.0100" in text
    assert "next try another idea" in text


def test_too_few_pairs_name_a_number_that_is_enough(ideas):
    with pytest.raises(UserError, match=r"--pairs=2 is .*Use --pairs=3 or more"):
        ideas("optim.name=lion", pairs=2)
    assert ideas("optim.name=lion", pairs=3)[1]


@pytest.mark.parametrize(
    ("idea", "told"),
    [
        ("data.corpus=text:other.txt", r"sets data\.corpus, which is not a part"),
        ("data.val_fraction=0.2", r"val_fraction"),
        ("data.tokenizer=byte", "tokenizer"),
        ("seed=1", "seed cannot be varied"),
        ("data.data_dir=/forged", r"data\.data_dir"),
        ("data.end_of_text=e", r"data\.end_of_text"),
        ("train.init_from=run:ideas/runs/000-start/seed-0/run", r"train\.init_from"),
        ("optim.name=lion+logging.screen=x", r"sets logging\.screen"),
        ("optim.name=lion+train.eval_every=1", r"sets train\.eval_every"),
        ("model.qk_norm", r"has an option without a value\. Use OPTION=VALUE\."),
        ("optim.name=lion,muon", "several"),
        ("optim.name=linon", "cannot train"),
    ],
)
def test_what_does_not_compare_is_refused_and_leaves_no_line(ideas, idea, told):
    with pytest.raises(UserError, match=told):
        ideas(idea)
    assert len(read_ledger(ideas.root).ideas) == 1
    assert ideas.trained == []


def test_a_ledger_goes_on_with_the_options_that_it_began_with(ideas, monkeypatch):
    ideas("optim.name=muon")
    ideas.config = with_options(BASE, {"train.num_steps": 200})
    ideas("optim.beta2=0.97")  # nothing is repeated
    assert read_ledger(ideas.root).ideas[2].arm.config.train.num_steps == 100
    flag = "--config.train.num_steps=200"
    monkeypatch.setattr("sys.orig_argv", [*sys.orig_argv, flag])
    with pytest.raises(UserError, match=r"train\.num_steps=100, not 200"):
        ideas("optim.name=lion")


def test_pairs_on_another_text_are_not_compared(ideas):
    def prepared(run):
        text = "first" if len(ideas.trained) <= 2 else "second"
        (run.workdir / "data.json").write_text(text)

    ideas.meanwhile = prepared
    with pytest.raises(UserError, match="a different text from"):
        ideas("optim.name=lion")


def test_minutes_end_an_idea_that_is_not_decided(ideas):
    assert ideas("optim.name=lion", minutes=0.0) == ("undecided", 0)
    assert ideas("optim.name=lion") == ("keep", 6)


def test_an_idea_is_tried_on_top_of_what_another_process_keeps_meanwhile(ideas):
    ideas("optim.beta2=0.97")

    def keep_another(run):
        if run.arm.startswith("002") and not read_ledger(ideas.root).kept:
            kept = read_ledger(ideas.root).ideas[1]
            append(ideas.root, replace(kept, answer="keep", why="clear"))

    ideas.meanwhile = keep_another
    assert ideas("optim.name=lion")[0] == "undecided"
    assert ideas("optim.name=lion")[0] == "keep"
    ledger = read_ledger(ideas.root)
    assert [idea.answer for idea in ledger.ideas] == ["", "keep", "undecided", "keep"]
    assert ledger.best.best == 1
    assert ledger.best.arm.config.optim.beta2 == 0.97


def test_a_ledger_is_whole_after_a_kill_at_any_byte(ideas):
    ideas("optim.name=lion")
    path = ideas.root / "ledger.jsonl"
    text = path.read_bytes()
    lines = text.splitlines(keepends=True)
    pairs = read_ledger(ideas.root).ideas[1].pairs
    for cut in range(len(lines[0]), len(text), 731):
        path.write_bytes(text[:cut])
        whole = text[: text.rfind(b"\n", 0, cut) + 1]
        before = read_ledger(ideas.root)
        append(ideas.root, before.ideas[0])
        assert path.read_bytes().startswith(whole)
        assert read_ledger(ideas.root) == before
    path.write_bytes(text[:-1])  # an editor has removed the last line break
    append(ideas.root, read_ledger(ideas.root).ideas[0])
    assert path.read_bytes().startswith(text)
    path.write_bytes(b"".join(lines[:7]) + lines[7][:9])
    assert ideas("optim.name=lion") == ("keep", 0)  # runs that have ended are not lost
    assert read_ledger(ideas.root).ideas[1].pairs == pairs
    assert len(pairs) == 3


@pytest.mark.parametrize("num_lines", [0, 2])
def test_a_ledger_that_is_replaced_while_an_idea_trains_gets_no_pair(ideas, num_lines):
    path = ideas.root / "ledger.jsonl"

    def replace(run):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:num_lines]))
        ideas.meanwhile = lambda run: None

    ideas.meanwhile = replace
    with pytest.raises(UserError, match="no longer contains the idea 001-"):
        ideas("optim.name=lion")
    assert len(path.read_text().splitlines()) == num_lines


def edited(line):
    return line.replace(b'"keep"', b'"discard"')


DAMAGES = {  # the lines of a ledger of an idea -> damaged ones, and the first that is
    "the start is lost": (lambda lines: lines[1:], 1),
    "after a power loss": (lambda lines: [bytes(99)], 1),
    "a line is lost": (lambda lines: [*lines[:2], *lines[3:]], 3),
    "an answer is edited": (lambda lines: [*lines[:-1], edited(lines[-1])], 9),
}


@pytest.mark.parametrize(("change", "place"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_ledger_is_told_with_its_line(ideas, change, place):
    ideas("optim.name=lion")
    path = ideas.root / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = b"".join(change(lines))
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=rf"ledger\.jsonl:{place} cannot be read"):
        ideas("optim.name=lion")
    assert path.read_bytes() == damaged


def test_a_dry_run_tells_pairs_and_minutes(ideas, monkeypatch, capsys):
    monkeypatch.setattr(command, "measure", lambda *_: (0.1, 20.0))
    ideas("optim.name=lion", dry_run=True, json=False)
    text = capsys.readouterr().out
    told = " ".join(text.split())
    assert "in standard deviations of a difference" in told
    pairs = "up to 8 pairs of start (configs/quickstart.py) and optim.name=lion. "
    assert told.startswith(f"The table shows {pairs}")
    for word in ("nan", "inf", "?"):
        assert word not in text
    ideas("optim.beta2=0.97")
    capsys.readouterr()
    ideas("optim.name=lion", dry_run=True, json=False)
    # Eight pairs of runs of 30 s, and what would be found in half and in most cases.
    pattern = r"^ *8 +0:08:00 +(\S+) +(\S+)$"
    half, most = re.findall(pattern, capsys.readouterr().out, re.M)[0]
    noise = read_ledger(ideas.root).noise()
    smallest = noise * findable(8, level_at(2, 0), 0.8)[-1]
    assert float(most) == pytest.approx(-smallest, abs=1e-4)
    assert float(most) < float(half) < 0


# Screens: runs of fewer layers


@pytest.fixture
def lion(ideas):
    """Starts a ledger with screens, where lion has a loss for each depth, and the best 4."""

    def start(losses, **flags):
        def loss(config):
            is_lion = config.optim.name == "lion"
            return losses[config.model.num_layers] if is_lion else 4.0

        ideas.loss = loss
        return ideas("optim.name=lion", screen=["3", "2"], **flags)

    return start


@pytest.mark.parametrize(
    ("loss", "answer", "why"),
    [
        (4.15, ("discard", 4 * SCREEN_PAIRS), r"not better at depth 3: \+0\.1"),
        thorough("diverged", ("discard", 2 * SCREEN_PAIRS + 2), "diverged"),
        ("failed", ("failed", 2 * SCREEN_PAIRS + 2), "it broke"),
    ],
)
def test_an_idea_that_is_screened_out_takes_no_place(ideas, lion, loss, answer, why):
    assert lion({2: 3.9, 3: loss, 4: 3.9}) == answer
    idea = read_ledger(ideas.root).ideas[1]
    assert re.match(why, idea.why)
    assert not idea.seeds
    if answer[0] == "discard":
        assert ideas("optim.name=lion") == ("discard", 0)  # it has no second chance
    ideas("optim.beta2=0.97")
    assert read_ledger(ideas.root).level(2) == level_at(1, 0)


@pytest.mark.parametrize(("loss", "answer"), [(4.0, "discard"), (3.9, "keep")])
def test_only_pairs_of_the_ledgers_size_are_evidence(ideas, lion, loss, answer):
    depths = []
    ideas.meanwhile = lambda run: depths.append(run.config.model.num_layers)
    assert lion({2: 3.5, 3: 3.5, 4: loss})[0] == answer
    ledger = read_ledger(ideas.root)
    idea = ledger.ideas[1]
    num = 2 * SCREEN_PAIRS
    assert depths == num * [2] + num * [3] + 2 * len(idea.pairs) * [4]
    assert idea.interval[0] == pytest.approx(loss - 4, abs=0.01)
    assert idea.screen_means[3] == pytest.approx(-0.5, abs=0.01)
    seeds = [*idea.screens[2].seeds, *idea.screens[3].seeds, *idea.seeds]
    assert len({*seeds}) == len(depths) / 2
    assert ledger.level(2) == level_at(2, len(ledger.kept))


def test_screening_continues_after_a_kill(ideas, lion):
    def killed(run):
        if run.config.model.num_layers == 3:
            raise KeyboardInterrupt

    ideas.meanwhile = killed
    with pytest.raises(KeyboardInterrupt):
        lion({2: 3.9, 3: 3.9, 4: 3.9})
    (seed,) = read_ledger(ideas.root).ideas[1].screens[3].seeds
    ideas.meanwhile = lambda run: None
    answer, runs = ideas("optim.name=lion")
    idea = read_ledger(ideas.root).ideas[1]
    assert answer == "keep"
    assert runs == 2 * SCREEN_PAIRS - 1 + 2 * len(idea.pairs)
    assert idea.screens[3].seeds[0] == seed


def test_sizes_have_equal_terms_of_their_own(ideas):
    ideas("model.mlp_dim=2048", screen=["2"], equal="flops", minutes=0.0)
    ledger = read_ledger(ideas.root)
    best, idea = arms_at(ideas.root, ledger, ledger.ideas[1], 2, "flops")
    costs = [flops(arm.config, arm.config.train.num_steps) for arm in (best, idea)]
    # The number of steps, 17, is rounded.
    assert costs[1] == pytest.approx(costs[0], rel=0.5 / 17)


@pytest.mark.parametrize("depths", ["0", "4", "2,2", "two"])
def test_screens_are_smaller_than_the_ledgers_size(ideas, depths):
    with pytest.raises(UserError, match=rf"--screen={depths} must list"):
        ideas("optim.name=lion", screen=depths.split(","))
    assert read_ledger(ideas.root).ideas == []


def test_an_idea_that_rounding_removes_at_a_depth_is_not_screened_there(ideas, lion):
    lion({2: 3.9, 3: 3.9, 4: 3.9}, minutes=0.0)
    ideas("optim.warmup_steps=9", minutes=0.0)
    ledger = read_ledger(ideas.root)
    best, idea = arms_at(ideas.root, ledger, ledger.ideas[2], 2, "tokens")
    assert best.options == idea.options
    assert 2 not in ledger.ideas[2].screens
    assert ledger.ideas[1].screens.keys() == {2, 3}


def test_an_idea_that_has_no_small_size_is_refused(ideas, lion):
    lion({2: 3.9, 3: 3.9, 4: 3.9}, minutes=0.0)
    for idea in ("optim.name=sgd", "model.num_kv_heads=1"):
        with pytest.raises(
            UserError, match=f"--idea={idea} cannot be screened at depth"
        ):
            ideas(idea)
    assert len(read_ledger(ideas.root).ideas) == 2


def test_a_ledger_keeps_its_screens(ideas, lion, monkeypatch):
    lion({2: 3.9, 3: 3.9, 4: 3.9}, minutes=0.0)
    monkeypatch.setattr("sys.orig_argv", [*sys.orig_argv, "--screen=2"])
    with pytest.raises(UserError, match="--screen=2,3, not 2"):
        ideas("optim.name=lion", screen=["2"])


@pytest.mark.usefixtures("checkout")
def test_git_that_refuses_the_checkout_of_another_user_is_an_error(monkeypatch):
    for variable in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(variable, os.devnull)
    assert find_commit("HEAD") == snapshot() != ""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(UserError, match=r"another user.*--add safe\.directory /"):
        find_commit("HEAD")
    with pytest.raises(UserError, match="another user"):
        snapshot()


# Code as an idea


@pytest.fixture
def project(ideas, monkeypatch):
    """Lets ideas be code of a small repository. A run whose train.py says BETTER is better."""
    folder = ideas.root.parent / "project"
    folder.mkdir()
    shutil.copytree(ROOT / "configs", folder / "configs")
    for path in ("gpt2", "gpt2/lab", "docs"):
        (folder / path).mkdir()
        (folder / path / "file.py").write_text("1\n")
    (folder / "train.py").write_text("start = 1\n")
    make_repository(folder, "train.py", "BETTER = 1\n")
    monkeypatch.setattr("gpt2.lab.experiments.checkouts.SOURCE", folder)
    monkeypatch.setattr(command, "snapshot", snapshot)
    return folder


def test_the_working_tree_is_told_by_what_was_changed(ideas, project, capsys):
    (project / "train.py").write_text("BETTER = 1\n")
    assert ideas("code=.", json=False)[0] == "keep"
    best = read_ledger(ideas.root).best
    assert best.text == "code=. (train.py)"
    assert best.arm.name == f"001-code=working-tree-0-g{best.arm.commit[:9]}"
    answer = capsys.readouterr().out
    pair = r"scoring 000-start seed \d+\nscoring 001-.* seed \d+\n"
    assert re.match(f"pair 1 of at most 8\n{pair}pair 2 of at most 8\n{pair}", answer)
    assert "\nkeep: the evidence for a gain is strong enough\n" in answer
    assert "a run of 100 steps takes 0:00:00, and" in answer
    assert "  ledger      1 idea, 1 kept; " in answer
    assert max(map(len, answer.splitlines())) <= 80
    idea = read_ledger(ideas.root).ideas[1]
    shown, needed = re.findall(
        r"evidence +(\S+); the idea is kept once it is (\S+)", answer
    )[0]
    assert float(shown) == pytest.approx(evidence(idea.differences)[-1], rel=0.01)
    assert float(shown) >= float(needed) == pytest.approx(1 / idea.level, rel=0.01)
    # Who goes on in it loses nothing of what was kept, committed or not.
    more = project / "configs" / "modern.py"
    more.write_text("more = 1\n")
    assert ideas("code=.+optim.beta2=0.97")[0] != "keep"
    git(project, "commit -am more")
    more.write_text("more = 2\n")
    assert ideas("code=.")[0] != "keep"
    (project / "train.py").write_text("start = 1\n")  # which undoes it
    with pytest.raises(UserError, match="the code of the accepted ideas, commit"):
        ideas("code=.")


def test_files_that_git_ignores_leave_the_copies_of_code(ideas, project):
    (project / ".gitignore").write_text("__pycache__/\n")
    git(project, "add .", "commit -q -m ignored", "branch next")
    ideas("code=next", minutes=0.0)
    (copy,) = (ideas.root / "code").glob("*/gpt2")
    planted = copy / "__pycache__" / "file.cpython-313.pyc"
    planted.parent.mkdir()
    planted.write_bytes(b"better")
    check_out(ideas.root, copy.parent.name)
    assert not planted.exists()
    assert (copy / "file.py").exists()


def test_code_has_to_begin_at_what_was_kept(ideas, project):
    git(project, "branch old", "branch merged my/idea", "checkout -b side my/idea")
    (project / "gpt2/side.py").write_text("")
    git(project, "add .", "commit -m side", "checkout old")
    (project / "gpt2/old.py").write_text("")
    git(project, "add .", "commit -m old")
    git(project, "checkout merged", "merge --no-ff -m merged old", "checkout old")
    assert ideas("code=merged")[0] == "keep"
    for idea in ("code=old", "code=side", "code=.", "code=my/idea"):
        with pytest.raises(UserError, match="the code of the accepted ideas, commit"):
            ideas(idea)
    git(project, "checkout -b next merged")
    (project / "train.py").write_text("BETTER = 2\n")
    git(project, "commit -am next", "checkout old")
    assert ideas("code=next")[0] != "keep"


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("gpt2/lab/file.py", "def level_at(*_): return 1.0\n"),
        ("docs/file.py", "2\n"),
        ("pyproject.toml", "[tool.pytest]\n"),
        ("gpt2/.gitattributes", "*.py -diff\n"),
        ("gpt2/data.bin", "2\n"),
        ("gpt2/file.py", "a = '\0'\n"),
        ("gpt2/link.py", Path("/etc/passwd")),
        ("gpt2/sub.py", None),
    ],
)
def test_code_may_change_only_python_text_that_trains(ideas, project, path, content):
    git(project, "checkout -q -b cheat")
    (project / "train.py").write_text("BETTER = 1\n")  # a true gain
    if content is None:  # a submodule
        (project / path).mkdir()
        git(project / path, "init -q", "commit -q --allow-empty -m sub")
    elif isinstance(content, Path):
        (project / path).symlink_to(content)
    else:
        (project / path).write_text(content)
    git(project, "add -A", "commit -q -m cheat", "checkout -q -")
    with pytest.raises(
        UserError, match=rf"The idea's code changes the file {re.escape(path)}\."
    ):
        ideas("code=cheat")
    assert ideas.trained == []


@pytest.mark.thorough
def test_options_of_judged_code_are_read_by_another_process(
    ideas, project, monkeypatch, tmp_path
):
    marks = tmp_path / "marks"
    runs_here = f"import os\nopen({str(marks)!r}, 'a').write(f'{{os.getpid()}} ')\n"
    path = project / "configs" / "default.py"
    path.write_text(path.read_text() + runs_here)
    (project / "train.py").write_text("BETTER = 1\n")
    recipe = tmp_path / "recipe.py"
    same = "from configs.quickstart import get_config as same\n"
    recipe.write_text(
        f"{runs_here}{same}def get_config():\n    config = same()\n"
        "    config.optim.warmup_steps = 11\n    return config\n"
    )
    assert ideas("code=.")[0] == "keep"
    assert ideas(f"recipe={recipe}")[1]
    pids = marks.read_text().split()
    assert len(pids) >= 2
    assert str(os.getpid()) not in pids
    recipe.write_text("raise ValueError('broken')\n")
    with pytest.raises(UserError, match=r"recipe\.py cannot be read .*broken"):
        ideas(f"recipe={recipe}")


def test_a_recipe_keeps_the_text_of_the_ledger(ideas, tmp_path):
    recipe = tmp_path / "recipe.py"
    options = {"data.corpus": "text:other", "optim.beta2": 0.7, "model.num_layers": 2}
    recipe.write_text(f"def get_config():\n    return {options}\n")
    ideas(f"recipe={recipe}")
    config = read_ledger(ideas.root).ideas[1].arm.config
    assert config.data.corpus == BASE.data.corpus
    assert (config.optim.beta2, config.model.num_layers) == (0.7, 2)


def test_the_durations_of_a_recipe_belong_to_its_number_of_steps(ideas, tmp_path):
    recipe = tmp_path / "recipe.py"
    options = BASE.to_dict()
    options["train"] |= {"num_steps": 200 * BASE.train.num_steps}
    options["optim"] |= {"warmup_steps": 3000}
    recipe.write_text(f"def get_config():\n    return {options}\n")
    ideas(f"recipe={recipe}")
    config = read_ledger(ideas.root).ideas[1].arm.config
    assert config.train.num_steps == BASE.train.num_steps
    assert config.optim.warmup_steps == 15


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../../elsewhere"},
        {"commit": "--output=/tmp/x"},
        {"number": 7},
        {"number": -1},
        {"best": 1},
        {"best": 99},
        {"pairs": [["a", "b"]]},
        {"pairs": None},
        {"pairs": [[1.0]]},
        {"pairs": [[1.0, 2.0, 3.0, 4.0]]},
        {"times": [[1.0]]},
        {"screens": {"2": {"pairs": [[1.0]]}}},
    ],
)
def test_a_ledger_of_someone_else_names_no_path_and_no_flag(ideas, change):
    ideas("optim.beta2=0.97")
    path = ideas.root / "ledger.jsonl"
    lines = path.read_text().splitlines()
    idea = json.loads(lines[1])
    del idea["crc32"]
    for name, value in change.items():
        (idea if name in idea else idea["arm"])[name] = value
    before = json.loads(lines[0])["crc32"]
    idea["crc32"] = zlib.crc32(json.dumps(idea).encode(), before)
    path.write_text(f"{lines[0]}\n{json.dumps(idea)}\n")
    with pytest.raises(UserError, match=r"ledger\.jsonl:2 cannot be read"):
        ideas("")


def test_text_of_someone_else_is_shown_harmlessly(ideas, capsys):
    ideas("optim.beta2=0.97")
    capsys.readouterr()
    ledger = read_ledger(ideas.root)
    evil = ledger.ideas[1].arm
    evil = replace(evil, extra={"<script>alert(1)</script>": 1})
    text = "\x1b[2J<script>"
    append(
        ideas.root,
        replace(ledger.ideas[1], arm=evil, text=text, answer="keep", why=text),
    )
    ideas("", json=False)
    assert "\x1b" not in capsys.readouterr().out
    assert "<script>" not in (ideas.root / "report.html").read_text()


def test_code_whose_defaults_no_run_would_read_is_refused(ideas, project):
    path = project / "configs" / "default.py"
    text = path.read_text()
    changed = re.sub(r"(clip_norm: float = option\(\s*)1\.0", r"\g<1>0.5", text)
    assert changed != text
    path.write_text(changed)
    with pytest.raises(UserError, match=r"the default of optim\.clip_norm"):
        ideas("code=.")
    assert ideas("code=.+optim.clip_norm=0.5")[1]
    path.write_text("def get_config(: broken")
    with pytest.raises(UserError, match=r"default\.py cannot be read \(SyntaxError"):
        ideas("code=.")
    path.write_text(text)
    with open(project / "configs" / "quickstart.py", "a") as file:
        file.write("better = 1\n")
    with pytest.raises(UserError, match=r"changes configs/quickstart\.py"):
        ideas("code=.")


# The referee


PACKED = "data.document_mask=True memory.scan_layers=True optim.ema=0.5"


def train_tiny(folder, options, script="train.py"):
    flags = [f"--config.{option}" for option in options.split()]
    succeed(folder / "run", *TINY, *flags, script=script)
    return Run("arm", load_config(folder / "run"), folder)


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    """A run with packed documents, stacked layers and averaged weights. No test may change it."""
    return train_tiny(tmp_path_factory.mktemp("tiny"), PACKED)


def score(run):
    """Return the referee's loss on the validation split that the run has read, too."""
    return referee.score(run, prepare_dataset(run.config.data)).loss


@pytest.fixture(scope="module")
def tiny_score(tiny_run):
    return score(tiny_run)


@pytest.mark.parametrize(
    "options",
    [
        thorough(""),
        thorough("model.position=rope model.qk_norm=True"),
        thorough(
            "model.smear=True model.bigram_embeddings=64 train.accumulate_steps=2"
        ),
    ],
)
def test_the_referee_finds_the_loss_of_other_runs(tmp_path, options):
    run = train_tiny(tmp_path, options)
    reported = metrics_of(run.workdir)[-1]["eval/loss"]
    assert score(run) == pytest.approx(reported, abs=1e-5)


@pytest.mark.thorough
def test_what_a_run_writes_about_itself_does_not_move_its_score(
    tiny_run, tiny_score, tmp_path
):
    reported = metrics_of(tiny_run.workdir)[-1]["eval/loss"]
    assert tiny_score == pytest.approx(reported, abs=1e-5)
    run = replace(tiny_run, folder=tmp_path / "copy")
    shutil.copytree(tiny_run.folder, run.folder)
    path = run.workdir / "metrics.jsonl"
    path.write_text(
        re.sub(r'"eval/loss": [0-9.]+', '"eval/loss": 1.0', path.read_text())
    )
    assert metrics_of(run.workdir)[-1]["eval/loss"] == 1.0
    assert score(run) == tiny_score


@pytest.mark.thorough
def test_a_model_that_peeks_at_later_tokens_gains_nothing(tiny_score, tmp_path):
    """In training, its logits are nearly those of the next token, which it copies."""
    project = tmp_path / "project"
    copy_project(project)
    path = project / "gpt2/model/gpt.py"
    text = path.read_text()
    old = "        hidden = self._final_hidden(table, context)\n\n"
    new = (
        "        following = jnp.roll(batch['tokens'], -1, axis=1)\n"
        "        hidden = 9 * table[following].astype(cfg.compute_dtype)\n\n"
    )
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    run = train_tiny(tmp_path / "peek", PACKED, script=project / "train.py")
    run = replace(run, source=project)
    assert metrics_of(run.workdir)[-1]["eval/loss"] < 5
    assert score(run) > tiny_score - 0.01


# A model that answers the referee without JAX. It prefers the tokens near 100.
STUB = """
import os, sys, time
import numpy as np

answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
earlier = []
while header := sys.stdin.buffer.read(8):
    rows, length = map(int, np.frombuffer(header, np.int32))
    for position in range(length):
        tokens = np.frombuffer(sys.stdin.buffer.read(4 * rows), np.int32)
        first = tokens if position == 0 else first
        logits = np.tile(-((np.arange(257) - 100.0) ** 2) / 1000, (rows, 1))
        CHANGE
        answers.write(logits.astype(np.float32).tobytes())
        answers.flush()
        earlier += tokens.tolist()
"""
NEXT_ROW = "if position == 7: logits[range(rows - 1), first[1:]] += 9"
EARLIER = "np.add.at(logits, (slice(None), earlier), 0.01)"


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Returns a function that scores a run whose answering process does a statement more."""
    corpus = tmp_path / "text.txt"
    letters = np.random.default_rng(0).integers(60, 123, 2000)
    corpus.write_text("".join(map(chr, letters)))
    options = dict(corpus=f"text:{corpus}", tokenizer="byte", val_fraction=0.1)
    options |= dict(data_dir=str(tmp_path / "prepared"), batch_size=4)
    options = {f"data.{name}": value for name, value in options.items()}
    config = with_options(BASE, options | {"model.context_length": 8})
    config = with_options(config, {"model.vocab_size": 257})
    run = Run("arm", config, tmp_path / "arm", source=tmp_path / "source")
    run.workdir.mkdir(parents=True)
    (run.folder / "outcome.json").write_text('{"state": "finished"}')
    answer = run.source / "gpt2/lab/ledger/answer.py"
    answer.parent.mkdir(parents=True)

    def score(change="pass"):
        answer.write_text(STUB.replace("CHANGE", change))
        return referee.score(run, prepare_dataset(config.data))

    score.run = run
    return score


def test_the_referee_normalises_every_answer(stub):
    data = prepare_dataset(stub.run.config.data)
    stream = data.parts[""][1].stream("validation")
    targets = stream.read(1, len(stream))
    logits = -((np.arange(257) - 100.0) ** 2) / 1000
    nats = np.log(np.exp(logits).sum()) - logits[targets]
    score = stub()
    assert score.loss == pytest.approx(nats.mean(), abs=1e-6)
    # Neither a constant nor a huge value for every token is a better distribution.
    assert stub("logits += 50").loss == pytest.approx(score.loss, abs=1e-4)
    assert stub("logits[:] = 1e30").loss == pytest.approx(math.log(257))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("logits *= np.nan", "not finite"),
        ("logits[:, 0] = -np.inf", "not finite"),
        ("logits = np.tile(logits, (2, 1))", "do not have the shape"),
        thorough("logits = logits[:, :128]", "took too long"),
        (
            "raise ValueError('tired')",
            "the run's process did not send logits to the referee: ValueError: tired",
        ),
        ("sys.exit()", "the run's process did not send logits"),
        thorough("time.sleep(99)", "took too long"),
        # The first token of a row is the last target of the row before it.
        (NEXT_ROW, "the logits of a row depend on the other rows"),
        (EARLIER, "the logits of a row depend on the other rows"),
    ],
)
def test_answers_that_are_none_or_know_other_rows_are_refused(
    stub, change, message, monkeypatch
):
    if message == "took too long":
        monkeypatch.setattr(referee, "_SECONDS", 5.0)
    with pytest.raises(referee.NoAnswerError, match=message):
        stub(change)


def test_every_process_of_judged_code_starts_in_the_sandbox(
    stub, tmp_path, monkeypatch
):
    script = tmp_path / "sandbox.sh"
    marks = tmp_path / "marks"
    script.write_text(f'echo "$1" >> {marks}; shift; exec "$@"\n')
    monkeypatch.setenv(SANDBOX, f"sh {script} {{run}}:{{output}}")
    stub()
    options_from("print(json.dumps({}))", "path", tmp_path)
    log = stub.run.folder / "log.txt"
    (slot,) = make_slots(1)
    assert slot.start([script, "-", "true"], log, {}).wait() == 1  # it is not Python
    starts = [line.split(":") for line in marks.read_text().split()]
    first, second, reading, training = starts
    run = str(stub.run.folder)
    assert training == [run, str(stub.run.workdir)]
    assert first[0] == second[0] == run
    outputs = {first[1], second[1], reading[1]}
    assert len(outputs) == 3
    for output in outputs:  # folders that only one process has written
        assert not Path(output).exists()


needs_bwrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap")


def sandbox_on_page(folder):
    """Return the shell commands of docs/ledger.md that set the sandbox, for a test's folder."""
    page = (ROOT / "docs/ledger.md").read_text()
    pattern = r"^    mkdir -p texts.*?--die-with-parent\"$"
    (commands,) = re.findall(pattern, page, re.MULTILINE | re.DOTALL)
    # On the page, /tmp contains neither the checkout nor Python.
    visible = "--tmpfs /tmp"
    for path in (folder, ROOT, sys.prefix):
        visible += f" --ro-bind {path} {path}"
    assert commands.count("--tmpfs /tmp ") == 1
    return commands.replace("--tmpfs /tmp", visible)


@pytest.fixture
def set_sandbox(tmp_path, monkeypatch):
    """Returns a function that sets the sandbox of the page, with `tmp_path` as the checkout."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def set_sandbox():
        (tmp_path / "ideas/runs").mkdir(parents=True, exist_ok=True)
        script = f'{sandbox_on_page(tmp_path)}; printf %s "$GPT2_SANDBOX"'
        shell = ["bash", "-c", script]
        command = subprocess.check_output(shell, cwd=tmp_path, text=True)
        monkeypatch.setenv(SANDBOX, command)

    return set_sandbox


# Tries what a sandbox should prevent. The last attempts read notes of an earlier process, and leave
# notes for a later one.
ATTEMPTS = """
import ctypes, json, os, pathlib, sys
here = pathlib.Path(sys.argv[1])
run = here / "ideas/runs/arm"
ipc = ctypes.CDLL(None)
key = int(sys.argv[2])

def works(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return False
    return True

results = dict(
    edits=works((here / "ideas/ledger.jsonl").write_text, "keep"),
    reads=works((here / "texts/text.txt").read_text),
    prepared=works((here / ".cache/corpus").read_text),
    copies=works((here / "ideas/runs/other/weights").read_text),
    kills=works(os.kill, key, 0),
    writes_config=works((run / "config.json").write_text, "{}"),
    writes_log=works((run / "answers.txt").write_text, ""),
    links=works(os.replace, run / "run/link", run / "log.txt"),
    replaces=works(os.rename, run / "run", run / "moved"),
)
if results["replaces"]:
    os.rename(run / "moved", run / "run")
notes = [pathlib.Path(f"/dev/shm/{key}"), here / "notes", here / ".cache/notes"]
notes += [here / "texts/notes", here / "ideas/runs/notes"]
for number, path in enumerate(notes):
    results[f"reads_note_{number}"] = path.exists()
    works(path.write_text, "note")
results["shared_memory"] = ipc.shmget(key, 1, 0) >= 0
ipc.shmget(key, 1, 0o1600)  # IPC_CREAT, and readable by this user
(run / "run/results.json").write_text(json.dumps(results))
"""


@needs_bwrap
def test_the_sandbox_of_the_page_hides_texts_runs_and_the_judge(tmp_path, set_sandbox):
    run = tmp_path / "ideas/runs/arm"
    for name in (".cache/corpus", "texts/text.txt", "ideas/runs/other/weights"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("secret")
    (run / "run").mkdir(parents=True)
    (tmp_path / "ideas/ledger.jsonl").write_text("ledger")
    script = tmp_path / "tries.py"
    script.write_text(ATTEMPTS)

    def results():
        (run / "run/link").unlink(missing_ok=True)
        (run / "run/link").symlink_to(tmp_path / "ideas/ledger.jsonl")
        (run / "log.txt").unlink(missing_ok=True)
        (slot,) = make_slots(1)
        command = [str(script), str(tmp_path), str(os.getpid())]
        assert slot.start(command, run / "log.txt", {}).wait() == 0
        return json.loads((run / "run/results.json").read_text())

    memory = ctypes.CDLL(None)
    try:
        results()
        assert all(results().values())
    finally:
        Path(f"/dev/shm/{os.getpid()}").unlink()
        memory.shmctl(memory.shmget(os.getpid(), 1, 0), 0, None)  # IPC_RMID
    for path in tmp_path.rglob("notes"):
        path.unlink()
    set_sandbox()
    for _ in range(2):
        assert not any(results().values())


@needs_bwrap
def test_a_process_that_answers_in_the_sandbox_cannot_leave_notes(stub, set_sandbox):
    set_sandbox()
    usual = stub()
    before = sorted(stub.run.folder.rglob("*"))
    for folder in (stub.run.folder, stub.run.workdir, stub.run.source):
        with pytest.raises(referee.NoAnswerError, match="Read-only file system"):
            stub(f"open('{folder}/notes', 'a')")
    assert stub("open('/dev/shm/notes', 'x') if not earlier else 0") == usual
    assert sorted(stub.run.folder.rglob("*")) == before


# The text


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Returns the options of two corpora, and sets the folder in which they are prepared."""
    monkeypatch.setenv("GPT2_DATA_DIR", str(tmp_path / "prepared"))
    draw = np.random.default_rng(0)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for number in range(20):
            letters = draw.integers(97, 123, 200)
            path = tmp_path / name / f"{number}.txt"
            path.write_text("".join(map(chr, letters)))
    one, two = f"text:{tmp_path}/one/*.txt", f"text:{tmp_path}/two/*.txt"
    return one, f"1*{one}+2*{two}"


@pytest.mark.parametrize("is_mixture", [False, True])
def test_runs_of_a_ledger_read_the_same_training_text_and_no_validation(
    tmp_path, texts, is_mixture
):
    options = {"data.corpus": texts[is_mixture], "data.tokenizer": "byte"}
    options |= {"data.val_fraction": 0.1, "data.batch_size": 6}
    options |= {"model.context_length": 32, "model.vocab_size": 257}
    arm = Arm("000-start", with_options(BASE, options))
    root = tmp_path / "ideas"
    root.mkdir()
    dataset = open_text(root, arm.config.data)
    config = with_training_text(root, arm).config
    assert os.environ["GPT2_DATA_DIR"].startswith(str(root))
    assert str(tmp_path) not in re.sub(str(root), "", json.dumps(config.to_dict()))
    own = prepare_dataset(config.data)
    for step in (1, 9):
        batch = dataset.open(arm.config).batch(step)
        np.testing.assert_equal(own.open(config).batch(step), batch)
    every = b"".join(
        path.read_bytes() for path in root.rglob("*") if path.suffix == ".npy"
    )
    for (_, part), (_, theirs) in zip(
        dataset.parts.values(), own.parts.values(), strict=True
    ):
        piece = part.stream("validation").read(100, 16).astype(part.dtype).tobytes()
        assert piece not in every
        assert part.stream("train").read(100, 16).astype(part.dtype).tobytes() in every
        first = part.stream("train").read(0, 1024)
        np.testing.assert_array_equal(theirs.stream("validation").read(0, 2048), first)


def test_a_ledger_whose_text_changes_is_refused(tmp_path, texts):
    data = with_options(BASE, {"data.corpus": texts[0], "data.tokenizer": "byte"}).data
    root = tmp_path / "ideas"
    root.mkdir()
    folder = os.environ["GPT2_DATA_DIR"]
    open_text(root, data)
    os.environ["GPT2_DATA_DIR"] = folder
    (tmp_path / "one/new.txt").write_text("another document")
    with pytest.raises(UserError, match=r"has changed since .*ideas started"):
        open_text(root, data)


def test_a_loss_that_the_referee_does_not_find_is_only_reported(ideas, capsys):
    ideas.own_loss = lambda run, loss: loss - run.arm.startswith("001")
    assert ideas("optim.beta2=0.97")[0] == "discard"
    warning = r"warning: 001-\S+ seed \d+ reports a validation loss of 4\.\d+ on the start of its"
    assert re.search(warning, capsys.readouterr().err)


def test_the_best_is_scored_before_code_of_the_idea_runs(ideas):
    events = []
    ideas.meanwhile = lambda run: events.append(("trained", run))
    ideas.scored = lambda run: events.append(("scored", run))
    ideas("optim.name=lion")
    order = [f"{what} {run.arm[:3]}" for what, run in events[:4]]
    assert order == ["trained 000", "scored 000", "trained 001", "scored 001"]
    corpus = f"tokens:{ideas.root}/data/0/*.npy"
    assert {run.config.data.corpus for _, run in events} == {corpus}


# Real runs


def start_ledger(project, idea):
    options = ["--config.train.eval_batches=2", "--config.train.checkpoint_every=0"]
    options += ["--ledger=../ideas", f"--idea={idea}", "--pairs=4", "--json"]
    return start(None, *TINY, *options, script="gpt2.lab.ledger", cwd=project)


@pytest.mark.thorough
def test_a_ledger_is_shared_and_continues_after_a_kill(tmp_path):
    project = tmp_path / "project"
    root = tmp_path / "ideas"
    copy_project(project)
    train = (ROOT / "train.py").read_text()
    make_repository(project, "train.py", f"{train}# only a comment\n")
    lion = start_ledger(project, "optim.name=lion")
    for line in lion.stderr:
        if line.startswith("run ended: 001-"):
            lion.kill()
            break
    lion.communicate()
    assert lion.returncode == -signal.SIGKILL
    with open(project / "gpt2" / "training" / "steps.py", "a") as steps:
        steps.write("EDITED = True\n")  # meanwhile
    ideas = ("optim.name=lion", "optim.learning_rate=1e30", "code=my/idea")
    processes = [start_ledger(project, idea) for idea in ideas]
    ends = [finish(process, 10 * SECONDS) for process in processes]
    (lion_code, *_), (diverged_code, diverged, _), (same_code, same, _) = ends
    assert lion_code in (0, 10, 11), ends
    assert diverged_code == same_code == 10, ends
    assert "The loss is not finite" in json.loads(diverged)["why"]
    assert (
        json.loads(same)["why"]
        == "the idea is the same as the best version, so nothing was trained"
    )
    tried = {idea.text: len(idea.pairs) for idea in read_ledger(root).ideas}
    pairs = tried["optim.name=lion"]
    assert 2 <= pairs <= 4
    assert tried.keys() == {
        "start (configs/quickstart.py)",
        "optim.name=lion",
        "optim.learning_rate=1e30",
    }
    assert sum(tried.values()) == pairs
    starts = [read_rows(path) for path in root.rglob("environment.jsonl")]
    # The pairs of one idea, and one pair of the other; no run begins twice.
    assert [len(rows) for rows in starts] == [1] * (2 * pairs + 2)


@needs_bwrap
@pytest.mark.thorough
def test_a_new_ledger_trains_and_scores_in_the_sandbox_of_the_page(
    tmp_path, monkeypatch
):
    project = tmp_path / "project"
    copy_project(project)
    make_repository(project, "train.py", "# an idea")
    monkeypatch.setenv("HOME", str(tmp_path))
    options = ["--config.train.eval_batches=2", "--ledger=ideas", "--json", "--pairs=4"]
    options += ["--idea=optim.learning_rate=1e30"]
    command = shlex.join([sys.executable, "-m", "gpt2.lab.ledger", *TINY, *options])
    script = f"{sandbox_on_page(tmp_path)}; exec {command}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=project,
        env=environment() | {"PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        timeout=10 * SECONDS,
    )
    # The run of the best version was scored, because the run of the idea began after it.
    assert done.returncode == 10, done.stderr
    assert "The loss is not finite" in json.loads(done.stdout)["why"]


TRACE = """
import os, sys

def hook(event, arguments):
    file = getattr(arguments[0], "co_filename", "") if event == "exec" else ""
    if file.endswith(".py"):
        with open(os.environ["TRACE"], "a") as trace:
            print(os.getpid(), file, file=trace)

sys.addaudithook(hook)
"""


@pytest.mark.thorough
def test_no_code_of_a_judged_commit_runs_in_the_judge(tmp_path, monkeypatch):
    project = tmp_path / "project"
    copy_project(project)
    (project / "sitecustomize.py").write_text(TRACE)  # of every process
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    train = (ROOT / "train.py").read_text()
    make_repository(project, "train.py", f"{train}EDITED = True\n")
    judge = start_ledger(project, "code=my/idea")
    code, stdout, _ = finish(judge, 10 * SECONDS)
    assert code == 10
    assert (
        json.loads(stdout)["why"] == "the same score as the best version for every seed"
    )
    start, idea = read_ledger(tmp_path / "ideas").ideas
    ran = {start.arm.commit: set(), idea.arm.commit: set()}
    for line in (tmp_path / "trace").read_text().splitlines():
        pid, file = line.split(" ", 1)
        for commit, pids in ran.items():
            if f"/code/{commit}/" in file:
                pids.add(int(pid))
    assert judge.pid in ran[start.arm.commit]
    assert ran[idea.arm.commit]  # the runs and the processes that answer the referee
    assert judge.pid not in ran[idea.arm.commit]
