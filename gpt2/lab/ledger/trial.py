"""The trial of an idea: pairs of runs at small sizes, and then at the ledger's size."""

import contextlib
import math
import secrets
import time
from dataclasses import replace
from pathlib import Path

from gpt2.config import with_options
from gpt2.data import Dataset
from gpt2.errors import UserError, warn
from gpt2.lab.experiments.decisions import Answer
from gpt2.lab.experiments.jobs import make_slots, train_all
from gpt2.lab.experiments.results import check_comparable
from gpt2.lab.experiments.run_folder import Outcome, Run
from gpt2.lab.experiments.terms import LOSS
from gpt2.lab.ledger.evidence import (
    SCREEN_PAIRS,
    evidence,
    is_futile,
    most_evidence,
)
from gpt2.lab.ledger.ideas import arms_at, make_idea
from gpt2.lab.ledger.journal import Idea, Ledger, append, read_ledger
from gpt2.lab.ledger.referee import TOLERANCES, NoAnswerError, score
from gpt2.lab.ledger.training_text import with_training_text
from gpt2.utils import files

LOCK = ".ledger.lock"
_IS_BEST = "the idea is the same as the best version, so nothing was trained"


def _enter_idea(root: Path, text: str, equal: str, pairs: int) -> Idea:
    """Add an idea to the ledger, and return the entry.

    `text`, `equal` and `pairs` are the flags --idea, --equal and --pairs. If the ledger already has
    an entry for the same idea and the same best version, and the idea has not failed, return this
    entry. If the idea is the best version itself, add no entry, and return it with the answer
    `discard`. Raise a UserError if `pairs` pairs are too few to accept any idea.
    """
    with files.locked(root / LOCK):
        ledger = read_ledger(root)
        idea = make_idea(root, ledger, text, equal)
        level = ledger.level(idea.number)
        if idea.same(ledger.best):
            number = ledger.best.number
            return replace(
                idea, number=number, answer=Answer.DISCARD, why=_IS_BEST, level=level
            )
        for other in ledger.ideas:
            # An idea that failed may be tried again, as a new idea with new seeds.
            is_open = other.answer != Answer.FAILED
            if is_open and other.best == idea.best and other.same(idea):
                return other
        enough = pairs
        while most_evidence(enough) < 1 / level:
            enough += 1
        if enough > pairs:
            raise UserError(
                f"--pairs={pairs} is too small to keep any idea at the level {level:.2%}",
                f"Use --pairs={enough} or more; small gains need more pairs",
            )
        append(root, idea)
        return idea


def try_idea(
    root: Path,
    dataset: Dataset,
    text: str,
    equal: str,
    pairs: int,
    minutes: float,
    least: float,
    slowdown: float,
) -> Idea:
    """Train pairs of runs until there is an answer, and return the idea with its answer.

    A pair is a run of the idea and a run of the best version with the same seed. `root` is the
    ledger's folder, and `dataset` contains its validation split. `text` is the flag --idea. The
    arguments after `text` are the flags of the same names.
    """
    start = time.monotonic()
    pair_seconds = 0.0
    answer = Answer.OPEN
    idea = _enter_idea(root, text, equal, pairs)
    if idea.why == _IS_BEST:
        return idea
    while True:
        now = time.monotonic()
        with files.locked(root / LOCK):
            ledger = read_ledger(root)
            idea = ledger.newest(idea)
            if idea.answer == Answer.KEEP:  # another process has accepted the idea
                return idea
            depth, reason = _screen(idea)
            if reason:
                answer = Answer.DISCARD
                why = reason
            elif not answer:
                answer, why = _decide(ledger, idea, pairs, least)
                if answer == Answer.KEEP and idea.slowdown > slowdown:
                    answer = Answer.DISCARD
                    why = (
                        f"the idea's runs take {idea.slowdown:.2f} times as long as the best "
                        "version's"
                    )
            if ledger.best.number != idea.best:
                answer = Answer.UNDECIDED
                why = "another idea was kept meanwhile; repeat the command to compare with it"
            elif not answer and now + pair_seconds > start + 60 * minutes:
                answer = Answer.UNDECIDED
                why = f"another pair would not end within {minutes:g} minutes"
            if answer:
                idea.level = ledger.level(idea.number)
                idea.answer = answer
                idea.why = why
                idea.seconds += now - start
                append(root, idea)
                return idea
            sample = idea.sample(depth)
            if len(sample.seeds) <= len(sample.pairs):
                # If the seed were known in advance, a user could choose an idea that it favours.
                sample.seeds.append(secrets.randbelow(2**32))
                append(root, idea)
        most = SCREEN_PAIRS if depth else pairs
        size = f" at depth {depth}" if depth else ""
        print(f"pair {len(sample.pairs) + 1} of at most {most}{size}", flush=True)
        answer, why = _train_pair(root, dataset, ledger, idea, depth, equal)
        pair_seconds = time.monotonic() - now


def _screen(idea: Idea) -> tuple[int, str]:
    """Return the depth at which the next pair trains, and the reason to discard the idea.

    Small sizes come first. At the ledger's size, the depth is 0. If the pairs so far are no reason
    to discard the idea, the reason is "".
    """
    for depth, sample in idea.screens.items():
        if len(sample.pairs) < SCREEN_PAIRS:
            return depth, ""
        difference = sample.differences.mean()
        if difference >= 0:
            return (
                depth,
                f"not better at depth {depth}: {difference:+.4f} nats per token",
            )
    return 0, ""


def _decide(ledger: Ledger, idea: Idea, pairs: int, least: float) -> tuple[Answer, str]:
    """Return the answer after the pairs so far, and the reason. Without an answer, both are "".

    `pairs` and `least` are the flags --pairs and --least.
    """
    differences = idea.differences + least
    if len(differences) < 2:
        return Answer.OPEN, ""
    if not idea.differences.any():
        return Answer.DISCARD, "the same score as the best version for every seed"
    level = ledger.level(idea.number)
    if evidence(differences)[-1] >= 1 / level:
        return Answer.KEEP, "the evidence for a gain is strong enough"
    more = 2 * pairs
    if len(differences) >= pairs:
        why = f"{pairs} pairs are used up; to continue, use --pairs={more}"
        return Answer.UNDECIDED, why
    if is_futile(differences, more, level):
        why = f"a gain is unlikely to show, even within {more} pairs (twice --pairs)"
        return Answer.DISCARD, why
    if is_futile(differences, pairs, level):
        why = (
            f"a gain is unlikely to show within {pairs} pairs, but may show within {more}; to"
            f" continue, use --pairs={more}"
        )
        return Answer.DISCARD, why
    return Answer.OPEN, ""


def _train_pair(
    root: Path, dataset: Dataset, ledger: Ledger, idea: Idea, depth: int, equal: str
) -> tuple[Answer, str]:
    """Train a pair (best version and idea) with the idea's newest seed, and add it to the ledger.

    `depth` is the number of layers of a screen's model, or 0 for the ledger's own size. If the best
    version diverged, or the idea has no score, return the answer on the idea and the reason for it.
    Otherwise, return two empty strings. Raise a UserError if the best version's run failed.
    """
    runs = list[Run]()
    arms = arms_at(root, ledger, idea, depth, equal)
    for seed in idea.sample(depth).seeds:
        for arm in arms:
            blind = with_training_text(root, arm)
            config = with_options(blind.config, {"seed": seed})
            runs.append(replace(blind, config=config).make_run(root, 0))
    pair = runs[-2:]
    earlier = pair[1].outcome()
    if earlier.state == "failed":  # a run that failed is not repeated
        return Answer.FAILED, earlier.error
    losses = list[float]()
    for run in pair:
        # The best version's run is scored before the idea's code starts, because this code could
        # alter the files of that run.
        train_all([run], make_slots(1))
        end = run.outcome()
        if end.state == "finished":
            try:
                check_comparable([*runs[:-2], *pair[: len(losses) + 1]], LOSS)
                losses.append(_score(run, dataset))
            except NoAnswerError as error:
                end = Outcome("failed", str(error))
        if end.state == "diverged" and run == pair[0]:
            # A repeated command would find the same diverged run, so this answer is final.
            return Answer.FAILED, f"the best version's run {run.label} diverged"
        if end.state != "finished" and run == pair[0]:
            raise UserError(
                f"The best version's run {run.label} {end.state}: {end.error}",
                f"See {run.folder}",
            )
        if end.state == "diverged":
            return Answer.DISCARD, f"diverged: {end.error}"
        if end.state != "finished":
            return Answer.FAILED, end.error
    with files.locked(root / LOCK):
        idea = read_ledger(root).newest(idea)
        sample = idea.sample(depth)
        # If there are as many pairs as seeds, another process has already added this pair.
        if len(sample.pairs) * 2 < len(runs):
            sample.pairs.append((losses[0], losses[1]))
            best_seconds, seconds = [run.outcome().seconds for run in pair]
            sample.times.append((best_seconds, seconds))
            append(root, idea)
    return Answer.OPEN, ""


def _score(run: Run, dataset: Dataset) -> float:
    """Return the validation loss of a run, measured by the referee.

    Warn if the run's own validation loss differs from the referee's loss on the same text.
    """
    print(f"scoring {run.label}", flush=True)
    measured = score(run, dataset)
    reported = math.nan
    # The idea's code wrote the metrics, so reading them may raise any error.
    with contextlib.suppress(Exception):
        reported = run.read(LOSS)[-1][LOSS]
    difference = abs(reported - measured.own_loss)
    if not difference <= TOLERANCES.get(run.config.precision.compute, 0.01):
        warn(
            f"{run.label} reports a validation loss of {reported:.4f} on the start of its training"
            f" split, but the referee measured {measured.own_loss:.4f} on the same text. The answer"
            " uses only the referee's measurements. Possible causes: the model reads later tokens,"
            " or its logits with a cache of keys and values, which the referee uses, differ from"
            " its logits without the cache"
        )
    return measured.loss
