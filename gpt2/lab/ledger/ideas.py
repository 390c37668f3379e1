"""Make an entry of a ledger from the value of `--idea`: a change of the best version so far."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from gpt2.config import get_option
from gpt2.config.options import OPTIONS
from gpt2.errors import UserError
from gpt2.lab.experiments.arms import Arm, make_arms
from gpt2.lab.experiments.checkouts import (
    changed_files,
    check_out,
    contains,
    snapshot,
)
from gpt2.lab.experiments.jobs import make_slots
from gpt2.lab.experiments.run_folder import defaults_of
from gpt2.lab.experiments.step_time import equalize
from gpt2.lab.experiments.terms import choose_score
from gpt2.lab.ladder.dial import at_depth
from gpt2.lab.ledger.journal import Idea, Ledger, Sample
from gpt2.lab.ledger.training_text import with_training_text
from gpt2.utils.code import hash_code

# Files that an idea may change. The code that judges ideas is not among them.
_PATCHABLE = re.compile(r"train\.py|(?!gpt2/lab/)(gpt2|configs)/.+\.py")
_WORKING_TREE = re.compile(r"^code=\.(?=\+|$)")


def is_working_tree(text: str) -> bool:
    """Return whether `text`, a value of `--idea`, names the code in the working tree."""
    return bool(_WORKING_TREE.match(text))


def make_idea(root: Path, ledger: Ledger, text: str, equal: str) -> Idea:
    """Return the idea that `--idea` describes, as a change of the best version so far.

    `text` and `equal` are the flags --idea and --equal. Raise a UserError if the idea cannot be
    compared with the best version, or changes an option or a file that no idea may change.
    """
    best = ledger.best.arm
    value = text
    if is_working_tree(text):
        # The name has the form of `git describe`, which git accepts as the name of a commit.
        value = _WORKING_TREE.sub(f"code=working-tree-0-g{snapshot()[:9]}", text)
    # A recipe may have another number of steps, to which its durations belong. `_equalize` later
    # replaces the number, and scales the durations.
    fixed = {name for name, about in OPTIONS.items() if not about.is_recipe}
    fixed.remove("train.num_steps")
    arms = make_arms(best.config, [value], one_at_a_time=True, fixed=fixed)
    if len(arms) > 2:
        raise UserError(
            f"--idea={text} names several ideas", "Use a separate command for each"
        )
    arm = arms[-1]  # this is the best version itself if the idea changes nothing
    number = len(ledger.ideas)
    _refuse_options(text, best, arm)
    choose_score([best, arm])  # raises if the two would be validated differently
    arm = replace(
        arm,
        name=f"{number:03}-{arm.name}",
        config=arm.config.with_vocabulary(best.config.model.vocab_size),
        commit=arm.commit or best.commit,
        extra={**best.extra, **arm.extra},
    )
    if ledger.best.number and not contains(arm.commit, best.commit):
        raise UserError(
            f"--idea={text} does not contain the code of the accepted ideas, commit {best.commit}",
            "Merge this commit into the branch",
        )
    changed = _changed_code(best.commit, arm.commit)
    code = hash_code(check_out(root, arm.commit))
    _refuse_unread(root, ledger.ideas[0], best, arm, changed)
    if value != text and changed:
        text += f" ({', '.join(changed)})"
    _, arm = _equalize(root, [best, arm], equal)
    idea = Idea(number, text, ledger.best.number, arm, code)
    for depth in ledger.ideas[0].screens:
        try:
            small_best, small = arms_at(root, ledger, idea, depth, equal)
        except UserError as error:
            raise UserError(
                f"--idea={text} cannot be screened at depth {depth}: {error.what}",
                "Try the idea in a ledger without --screen",
            ) from error
        # Rounding can undo a small change of an option. The idea then skips this depth.
        if code != ledger.best.code or small.options != small_best.options:
            idea.screens[depth] = Sample()
    return idea


def arms_at(
    root: Path, ledger: Ledger, idea: Idea, depth: int, equal: str
) -> list[Arm]:
    """Return the arms of the best version and the idea, at the size that `depth` selects.

    A `depth` of 0 means the ledger's size. Otherwise, both arms are scaled by the ratio of `depth`
    to the number of layers with which the ledger started. An arm therefore has `depth` layers,
    unless an idea has changed its number of layers. `equal` is the flag --equal.
    """
    arms = [ledger.ideas[idea.best].arm, idea.arm]
    if not depth:
        return arms
    ratio = Fraction(depth, ledger.ideas[0].arm.config.model.num_layers)
    small = [replace(at_depth(arm, ratio), name=f"{arm.name}-d{depth}") for arm in arms]
    return _equalize(root, small, equal)


def _equalize(root: Path, arms: list[Arm], equal: str) -> list[Arm]:
    """Return the arms, each with the number of steps that costs as much as the first arm's run.

    `equal` (--equal) states how the cost is counted. With `seconds`, short runs, which read only
    the training split, measure the time of a step.
    """
    blind = [with_training_text(root, arm) for arm in arms]
    sized = equalize(blind, equal, root, make_slots(1))
    equal_arms = []
    for arm, measured in zip(arms, sized, strict=True):
        config = replace(measured.config, data=arm.config.data)
        equal_arms.append(replace(arm, config=config))
    return equal_arms


def _refuse_options(text: str, best: Arm, arm: Arm) -> None:
    """Raise a UserError if an idea sets options that are not a part of the recipe.

    Such options determine, for example, the text, the seed, the validation, or what a run logs.
    `text` is the value of --idea.
    """
    for name, about in OPTIONS.items():
        if about.is_recipe or name == "train.num_steps":
            continue
        if get_option(arm.config, name) != get_option(best.config, name):
            raise UserError(
                f"--idea={text} sets {name}, which is not a part of the model or its training",
                "Leave this option out, or start another --ledger with it",
            )


def _changed_code(old: str, new: str) -> list[str]:
    """Return the paths of the files that differ between the commits `old` and `new`.

    Raise a UserError if these include a file that no idea may change.
    """
    changed = changed_files(old, new) if old else {}
    for path, is_text in changed.items():
        if not is_text or not _PATCHABLE.fullmatch(path):
            raise UserError(
                f"The idea's code changes the file {path}",
                "An idea may change only text files: train.py, and .py files in configs/ and in "
                "gpt2/, except gpt2/lab/",
            )
    return list(changed)


def _refuse_unread(
    root: Path, start: Idea, best: Arm, arm: Arm, changed: Sequence[str]
) -> None:
    """Raise a UserError if an idea's code changes the config file or the default of an option.

    Runs take their options from the ledger, and would ignore such a change. `start` is the entry
    with which the ledger started. `changed` are the paths of the files that the idea's code
    changes.
    """
    remedy = "Add the options to the idea: --idea=code=BRANCH+OPTION=VALUE"
    for path in changed:
        if path.startswith("configs/") and path in start.text:
            raise UserError(
                f"The idea's code changes {path}, but runs take their options from the ledger",
                remedy,
            )
    before = defaults_of(best.source(root))
    options = arm.options
    for name, value in defaults_of(arm.source(root)).items():
        if value not in (before.get(name, value), options.get(name)):
            raise UserError(
                f"The idea's code changes the default of {name}, but runs take their options from "
                "the ledger",
                remedy,
            )
