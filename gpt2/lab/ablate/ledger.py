r"""Tries one idea against the best so far, and answers: keep, discard, or undecided.

    python -m gpt2.lab.ablate.ledger --ledger=ideas --idea=optim.name=lion

An idea is OPTION=VALUE (and +OPTION=VALUE behind it), recipe=FILE, or code=BRANCH, where code=. is
the working tree as it is. The ledger begins with --config and its overrides. What is kept is the
best from then on, and later ideas are tried on top of it. Any number of processes may share a
ledger. Exit codes: 0 keep, 10 discard, 11 undecided, 12 the idea failed to train; 2 a mistake, or
an idea that does not compare.
"""

from gpt2.errors import UserError
from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import contextlib
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
from absl import flags

from gpt2 import cli
from gpt2.data import prepare
from gpt2.lab.ablate import arms, tables
from gpt2.lab.ablate.arms import (
    Arm,
    check_out,
    find_commit,
    is_on_top,
    make_arms,
    snapshot,
)
from gpt2.lab.ablate.evidence import evidence, findable, is_hopeless, most_evidence
from gpt2.lab.ablate.jobs import make_slots, train_all
from gpt2.lab.ablate.journal import Idea, Ledger, append, read_ledger
from gpt2.lab.ablate.measure import equalize, measure
from gpt2.lab.ablate.pictures import plot_ledger
from gpt2.lab.ablate.report import render, write_page
from gpt2.lab.ablate.results import read_results
from gpt2.lab.ablate.runs import defaults_of, find_root
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.ablate.terms import LOSS, TERMS, choose_score
from gpt2.utils import files
from gpt2.utils.code import hash_code
from gpt2.utils.text import counted, format_duration

FLAGS = flags.FLAGS
EXIT_CODES = {"keep": 0, "discard": 10, "undecided": 11, "failed": 12}
_LOCK = ".ledger.lock"
_ITSELF = "it is the best itself"
_WORKING_TREE = re.compile(r"^code=\.(?=\+|$)")


def define_flags() -> None:
    """Defines the flags."""
    cli.define_config()
    flags.DEFINE_string("ledger", None, "Where the ledger lives.")
    flags.DEFINE_string(
        "idea",
        "",
        "OPTION=VALUE, recipe=FILE or code=BRANCH; none: tells the best so far.",
    )
    flags.DEFINE_integer("pairs", 16, "Pairs of runs of an idea, at most.", 2)
    flags.DEFINE_float("minutes", math.inf, "Begins no pair that would end later.", 0.0)
    flags.DEFINE_float(
        "least",
        0.0,
        "The gain, in nats per token, above which an idea is worth keeping.",
        0.0,
    )
    flags.DEFINE_enum("equal", "tokens", TERMS, "What idea and best get alike.")
    flags.DEFINE_bool("dry_run", False, "Tells what pairs would find, and their time.")
    flags.DEFINE_bool("json", False, "Prints a line of JSON, the rest on stderr.")


def main() -> int:
    """Tries an idea, prints the answer, and returns the exit code."""
    root = find_root("ledger", FLAGS.ledger)
    with contextlib.redirect_stdout(sys.stderr if FLAGS.json else sys.stdout):
        ledger = _begin(root)
        if FLAGS.dry_run and FLAGS.idea:
            print(_describe_pairs(root, ledger))
            return 0
        idea = _try_idea(root) if FLAGS.idea else ledger.best
        with files.locked(root / _LOCK):
            ledger = read_ledger(root)
            gains = {0: 0.0}  # of each best by its number, from the start
            for each in ledger.kept:
                gains[each.number] = gains[each.best] + each.interval[0]
            plot_ledger(root / "ledger.png", ledger.ideas[1:], gains)
            body = render(
                "ledger.j2", ledger=ledger, gains=gains, arms=arms, tables=tables
            )
            write_page(root, root.resolve().name, body, ["ledger.png"])
    _tell(ledger, idea)
    return EXIT_CODES[idea.answer] if FLAGS.idea else 0


def _begin(root: Path) -> Ledger:
    """Returns the ledger, which begins with the options of the first command."""
    config = cli.parse_config()
    config = config.with_vocabulary(prepare(config.data).tokenizer.vocab_size)
    with files.locked(root / _LOCK):
        ledger = read_ledger(root)
        if not ledger.ideas:
            # An idea that is the working tree is tried against the last commit.
            is_tree = _WORKING_TREE.match(FLAGS.idea)
            commit = find_commit("HEAD") if is_tree else snapshot()
            arm = Arm("000-start", config, commit=commit)
            code = hash_code(check_out(arm, root))
            append(root, Idea(0, "start", 0, arm, code))
            return read_ledger(root)
    first = ledger.ideas[0].arm
    arms.refuse_differences(
        f"{root} began",
        arms.differences(first, replace(first, config=config)),
        "Give the options that it began with, or another --ledger",
    )
    return ledger


def _make_idea(root: Path, ledger: Ledger) -> Idea:
    """Returns the idea of the command line, on top of the best so far."""
    best = ledger.best.arm
    text = FLAGS.idea
    value = text
    if _WORKING_TREE.match(text):
        # As `git describe` writes a commit.
        value = _WORKING_TREE.sub(f"code=working-tree-0-g{snapshot()[:9]}", text)
    found = make_arms(best.config, [value], one_at_a_time=True)
    if len(found) > 2:
        raise UserError(f"--idea={text} names several", "Try one after another")
    arm = found[-1]  # the best itself if there is no other
    number = len(ledger.ideas)
    if choose_score([best, arm]) != LOSS:
        raise UserError(f"--idea={text} has another tokenizer", "Give another --ledger")
    arm = replace(
        arm,
        name=f"{number:03}-{arm.name}",
        config=arm.config.with_vocabulary(best.config.model.vocab_size),
        commit=arm.commit or best.commit,
        extra={**best.extra, **arm.extra},
    )
    code = hash_code(check_out(arm, root))
    if ledger.best.number and not is_on_top(arm, best):
        raise UserError(
            f"--idea={text} lacks what was kept, commit {best.commit}",
            "Begin the branch there, or merge it",
        )
    changed = arms.diff(best, arm, "--name-only").split()
    _refuse_unread(root, best, arm, changed)
    if value != text and changed:
        text += f" ({', '.join(changed)})"
    _, arm = equalize([best, arm], FLAGS.equal, root, make_slots(1))
    return Idea(number, text, ledger.best.number, arm, code)


def _refuse_unread(root: Path, best: Arm, arm: Arm, changed: Sequence[str]) -> None:
    """Refuses code that says in configs/ what no run would read, since options are given to it."""
    how = "Give options beside the code: --idea=code=BRANCH+OPTION=VALUE"
    for path in changed:
        if path.startswith("configs/") and path in cli.config_file():
            raise UserError(f"the code changes {path}, which no run reads", how)
    before = defaults_of(best.source(root))
    given = arm.options
    for name, value in defaults_of(arm.source(root)).items():
        if value not in (before.get(name, value), given.get(name)):
            raise UserError(
                f"the code changes the default of {name}, which no run reads", how
            )


def _enter(root: Path) -> Idea:
    """Returns the idea, the old one if it was tried against this best.

    The best itself comes with its answer, and does not enter the ledger.
    """
    with files.locked(root / _LOCK):
        ledger = read_ledger(root)
        idea = _make_idea(root, ledger)
        level = ledger.level(idea.number)
        if idea.same(ledger.best):
            number = ledger.best.number
            return replace(
                idea, number=number, answer="discard", why=_ITSELF, level=level
            )
        for other in ledger.ideas:
            if other.best == idea.best and other.same(idea):
                return other
        if most_evidence(FLAGS.pairs) < 1 / level:
            raise UserError(
                f"no idea can be kept in {FLAGS.pairs} pairs by now",
                "Give more --pairs",
            )
        append(root, idea)
        return idea


def _try_idea(root: Path) -> Idea:
    """Trains pairs of the idea until there is an answer, and returns it with that."""
    began = time.monotonic()
    pair_seconds = 0.0
    answer = ""
    entered = _enter(root)
    if entered.why == _ITSELF:
        return entered
    while True:
        now = time.monotonic()
        with files.locked(root / _LOCK):
            ledger = read_ledger(root)
            idea = ledger.ideas[entered.number]
            if idea.answer == "keep":  # by another process
                return idea
            if not answer:
                answer, why = _decide(ledger, idea)
            if ledger.best.number != idea.best:
                answer = "undecided"
                why = "another idea was kept meanwhile, try it on top of that"
            elif not answer and now + pair_seconds > began + 60 * FLAGS.minutes:
                answer = "undecided"
                why = f"{FLAGS.minutes:g} minutes are used up"
            if answer:
                idea.level = ledger.level(idea.number)
                idea.answer = answer
                idea.why = why
                idea.seconds += now - began
                append(root, idea)
                return idea
        answer, why = _train_pair(root, ledger, idea)
        pair_seconds = time.monotonic() - now


def _decide(ledger: Ledger, idea: Idea) -> tuple[str, str]:
    """Returns the answer that the pairs so far give, and why; "" while it is open."""
    differences = idea.differences + FLAGS.least
    if len(differences) < 2:
        return "", ""
    if not idea.differences.any():
        return "discard", "the same score for every seed"
    level = ledger.level(idea.number)
    if evidence(differences)[-1] >= 1 / level:
        return "keep", "clear"
    if len(differences) >= FLAGS.pairs:
        return "undecided", f"{FLAGS.pairs} pairs are used up"
    if is_hopeless(differences, FLAGS.pairs, level):
        return "discard", f"{FLAGS.pairs} pairs would hardly show that it is better"
    return "", ""


def _train_pair(root: Path, ledger: Ledger, idea: Idea) -> tuple[str, str]:
    """Trains best and idea with the next seed; returns an answer if the idea has no score."""
    seed = len(idea.pairs)
    sweep = Sweep(
        root=root,
        commands=[],
        arms=(ledger.ideas[idea.best].arm, idea.arm),
        equal=FLAGS.equal,
        looks=[seed + 1],
        tune=[],
    ).with_choices()
    pair = sweep.runs()[-2:]
    train_all([[run] for run in pair], make_slots(1), LOSS)
    sweep.check_runs()
    results = read_results(pair, LOSS)
    of_best, own = results.state
    error_of_best, error = results.error
    if of_best != "finished":
        raise UserError(
            f"the best, {pair[0].label}, {of_best}: {error_of_best}",
            f"See {pair[0].folder}",
        )
    if own != "finished":
        if own == "diverged":
            return "discard", f"diverged: {error}"
        return "failed", error
    with files.locked(root / _LOCK):
        idea = read_ledger(root).ideas[idea.number]
        if len(idea.pairs) == seed:  # else another process had the same pair
            best_score, score = results.score
            idea.pairs.append((best_score, score))
            append(root, idea)
    return "", ""


def _tell(ledger: Ledger, idea: Idea) -> None:
    """Prints an answer, and where the ledger is."""
    difference, low, high = idea.interval
    pairs = len(idea.pairs)
    ideas = len(ledger.ideas) - 1
    kept = len(ledger.kept)
    next_level = ledger.level(len(ledger.ideas))
    commit = ledger.best.arm.commit
    kept_options = arms.differences(ledger.ideas[0].arm, ledger.best.arm)
    kept_options.pop("code", None)
    options = {name: value for name, (_, value) in kept_options.items()}
    if FLAGS.json:
        facts = pd.Series(
            {
                "answer": idea.answer,
                "why": idea.why,
                "idea": idea.text,
                "number": idea.number,
                "difference": difference,
                "low": low,
                "high": high,
                "pairs": pairs,
                "seconds": idea.seconds,
                "level": idea.level,
                "ideas": ideas,
                "kept": kept,
                "next_level": next_level,
                "best": ledger.best.text,
                "commit": commit,
                "options": options,
            }
        )
        print(facts.to_json())  # null where there is no number
        return
    named = [f" --config.{name}={value}" for name, value in options.items()]
    told = f"{idea.text} is the best, commit {commit or 'none'}{''.join(named)}"
    if FLAGS.idea:
        told = f"{idea.answer}:"
        if pairs:
            told += f" {difference:+.4f}"
        if interval := tables.interval(low, high, "+.4f"):
            told += f" {interval}"
        told += (
            f" after {counted(pairs, 'pair')}, {format_duration(idea.seconds)}, {idea.why};"
            f" level {idea.level:.2%}"
        )
    print(
        f"{told}; ledger {counted(ideas, 'idea')}, {kept} kept,"
        f" the next at {next_level:.2%}"
    )


def _describe_pairs(root: Path, ledger: Ledger) -> str:
    """Returns which differences pairs of the idea would find, and what they take."""
    idea = _make_idea(root, ledger)
    step, start = measure(root, idea.arm, make_slots(1))
    seconds = 2 * (start + idea.arm.config.train.num_steps * step)
    level = ledger.level(idea.number)
    noise = ledger.noise()
    unit = f"nats per token; by seed a difference varies by {noise:.4f}"
    if not noise > 0:  # nan before an idea has two pairs
        noise = 1.0
        unit = "deviations of a difference by seed, known once an idea has two pairs"
    table = pd.DataFrame({"pairs": range(1, FLAGS.pairs + 1)})
    table["at most"] = [format_duration(pairs * seconds) for pairs in table.pairs]
    for title, power in ("kept in 1 of 2", 0.5), ("kept in 4 of 5", 0.8):
        table[title] = -noise * findable(FLAGS.pairs, level, power)
    text = table.to_string(index=False, float_format="{:.4f}".format, na_rep="none")
    return (
        f"pairs of {ledger.best.text} and {idea.text} would train"
        f"\n\n{text}\n\nTrue differences, beyond --least, that are kept at level {level:.2%},"
        f" in {unit}"
    )


if __name__ == "__main__":
    cli.run(main, define_flags)
