r"""Compare one idea with the best version so far, and answer keep, discard or undecided.

    python -m gpt2.lab.ledger --ledger=ideas --idea=optim.name=lion

An idea is OPTION=VALUE, several options as in OPTION=VALUE+OPTION=VALUE, recipe=FILE, or
code=BRANCH. The current working tree is code=. (a dot). A new ledger starts with the config of
--config and its overrides. --screen lists smaller depths at which an idea must first be better. An
idea that is kept becomes the best version, and later ideas change this version. Several processes
may use the same ledger. Exit codes: 0 keep, 10 discard, 11 undecided, 12 the idea failed to train;
2 a user's mistake, or an idea that cannot be compared.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import contextlib
import math
import os
import re
import sys
import textwrap
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
from absl import flags

from gpt2 import cli
from gpt2.config import Config
from gpt2.data import prepare_dataset
from gpt2.errors import UserError, printable
from gpt2.lab.experiments import cells
from gpt2.lab.experiments.arms import Arm, differences, refuse_differences
from gpt2.lab.experiments.checkouts import (
    CHECKOUT,
    check_out,
    diff,
    find_commit,
    snapshot,
)
from gpt2.lab.experiments.decisions import Answer
from gpt2.lab.experiments.jobs import make_slots
from gpt2.lab.experiments.pages import render, write_page
from gpt2.lab.experiments.run_folder import find_root
from gpt2.lab.experiments.step_time import measure
from gpt2.lab.experiments.terms import TERMS
from gpt2.lab.ladder.dial import at_depth
from gpt2.lab.ledger.evidence import MOST_PAIRS, SCREEN_PAIRS, evidence, findable
from gpt2.lab.ledger.ideas import arms_at, is_working_tree, make_idea
from gpt2.lab.ledger.journal import Idea, Ledger, Sample, append, read_ledger
from gpt2.lab.ledger.ledger_plot import plot_ledger
from gpt2.lab.ledger.training_text import open_text, with_training_text
from gpt2.lab.ledger.trial import LOCK, try_idea
from gpt2.utils import files
from gpt2.utils.code import SOURCE, hash_code
from gpt2.utils.ray_cluster import connect
from gpt2.utils.text import counted, format_duration

FLAGS = flags.FLAGS
EXIT_CODES = {
    Answer.KEEP: 0,
    Answer.DISCARD: 10,
    Answer.UNDECIDED: 11,
    Answer.FAILED: 12,
}


def define_flags() -> None:
    """Define the flags of this command."""
    cli.define_config()
    cli.define_cluster()
    flags.DEFINE_string("ledger", None, "Folder of the ledger.")
    flags.DEFINE_string(
        "idea",
        "",
        "The idea: OPTION=VALUE, recipe=FILE or code=BRANCH. Without --idea, print the "
        "best version.",
    )
    flags.DEFINE_list(
        "screen",
        [],
        "Depths of smaller models, at which an idea must first lower the loss. The first command "
        "of a ledger sets them.",
    )
    flags.DEFINE_integer(
        "pairs",
        MOST_PAIRS,
        "Largest number of pairs for an idea. A pair is a run of the idea and a run of the best"
        " version with the same seed.",
        2,
    )
    flags.DEFINE_float(
        "minutes",
        math.inf,
        "Time limit in minutes. No pair starts that would end after the limit if it took as long"
        " as the pair before it. The first pair that a command trains at a size may therefore"
        " exceed the limit.",
        0.0,
    )
    flags.DEFINE_float(
        "least", 0.0, "Smallest gain that is worth keeping, in nats per token.", 0.0
    )
    flags.DEFINE_float(
        "slowdown",
        math.inf,
        "Discard an idea whose runs take more than this multiple of the best version's time.",
        0.0,
    )
    flags.DEFINE_enum(
        "equal",
        "tokens",
        TERMS,
        "The training cost that is the same for the idea and the best version.",
    )
    flags.DEFINE_bool(
        "dry_run",
        False,
        "Only print which gains the pairs of runs could detect, and how long they would train.",
    )
    flags.DEFINE_bool(
        "json",
        False,
        "Print the answer as a line of JSON on stdout, and everything else on stderr.",
    )


def main() -> int:
    """Compare an idea with the best version, print the answer, and return the answer's exit code.

    Without --idea, print the best version, and return 0.
    """
    root = find_root("ledger", FLAGS.ledger)
    with contextlib.redirect_stdout(sys.stderr if FLAGS.json else sys.stdout):
        ledger = _open_ledger(root)
        _become_judge(root, ledger.ideas[0].arm.commit)
        connect(FLAGS.cluster)
        idea = ledger.best
        if FLAGS.idea:
            # The folder must exist before the first run, because a sandbox cannot hide a folder
            # that does not exist.
            (root / "runs").mkdir(exist_ok=True)
            dataset = open_text(root, ledger.ideas[0].arm.config.data)
            if FLAGS.dry_run:
                print(_describe_pairs(root, ledger))
                return 0
            idea = try_idea(
                root,
                dataset,
                FLAGS.idea,
                FLAGS.equal,
                FLAGS.pairs,
                FLAGS.minutes,
                FLAGS.least,
                FLAGS.slowdown,
            )
        with files.locked(root / LOCK):
            ledger = read_ledger(root)
            _write_page(root, ledger)
    _print_answer(ledger, idea)
    return EXIT_CODES[idea.answer] if FLAGS.idea else 0


def _open_ledger(root: Path) -> Ledger:
    """Return the ledger in `root`, or start a new one with the options of the command line.

    A ledger stores its options. If a later command also sets options, they must be the same.
    """
    ledger = read_ledger(root)
    gives_config = any(re.match("--?config", each) for each in sys.orig_argv)
    if ledger.ideas and not gives_config:
        _refuse_changes(root, ledger, ledger.ideas[0].arm.config)
        return ledger
    config = cli.parse_config()
    dataset = prepare_dataset(config.data)
    if not dataset.parts:
        raise UserError(
            f"data.corpus={config.data.corpus} returns batches, but a ledger needs text or tokens",
            "Choose another corpus",
        )
    config = config.with_vocabulary(dataset.tokenizer.vocab_size)
    depths = _read_depths(config)
    if not ledger.ideas:
        # The working tree may have options that the ledger's first version does not have.
        _become_judge(root, _find_first_commit())
    with files.locked(root / LOCK):
        ledger = read_ledger(root)
        if not ledger.ideas:
            commit = _find_first_commit()
            arm = Arm("000-start", config, commit=commit)
            screens = {depth: Sample() for depth in depths}
            code = hash_code(check_out(root, commit))
            # The path in the checkout, since this process may run a copy of the code.
            path = Path(cli.config_file()).resolve()
            if path.is_relative_to(SOURCE.resolve()):
                path = path.relative_to(SOURCE.resolve())
            text = f"start ({path})"
            append(root, Idea(0, text, 0, arm, code, screens))
            return read_ledger(root)
    _refuse_changes(root, ledger, config)
    return ledger


def _find_first_commit() -> str:
    """Return the commit with which a new ledger starts, or "" without a git checkout."""
    # `_become_judge` may have restarted the command with the code of this commit.
    if CHECKOUT in os.environ:
        return SOURCE.name
    # If the idea is the working tree, it is compared with the last commit.
    return find_commit("HEAD") if is_working_tree(FLAGS.idea) else snapshot()


def _refuse_changes(root: Path, ledger: Ledger, config: Config) -> None:
    """Raise a UserError if the ledger started with another config, or with another --screen."""
    first = ledger.ideas[0]
    changed = differences(first.arm, replace(first.arm, config=config))
    if FLAGS.screen:
        before = ",".join(map(str, first.screens))
        now = ",".join(map(str, _read_depths(config)))
        changed["--screen"] = (before or "nothing", now)
    refuse_differences(
        f"{root} started",
        changed,
        "Use the options with which the ledger started, or another --ledger",
    )


def _read_depths(config: Config) -> list[int]:
    """Return the depths in `--screen`, the smallest first. Check that the config allows them."""
    layers = config.model.num_layers
    depths = {int(depth) for depth in FLAGS.screen if depth.isdecimal()}
    if len(depths) != len(FLAGS.screen) or not depths <= {*range(1, layers)}:
        raise UserError(
            f"--screen={','.join(FLAGS.screen)} must list different depths, from 1 on, that are"
            f" less than model.num_layers={layers}",
            "Correct the list, or leave out --screen",
        )
    for depth in depths:
        # This raises an error if the size is impossible.
        at_depth(Arm("--screen", config), Fraction(depth, layers))
    return sorted(depths)


def _become_judge(root: Path, commit: str) -> None:
    """Restart the command with the code of `commit`, unless this code is running.

    The ledger began with this commit. Accepted ideas and edits of the working tree therefore do not
    change how ideas are judged.
    """
    source = check_out(root, commit).resolve()
    if source != SOURCE.resolve():
        variables = {"PYTHONPATH": str(source), CHECKOUT: str(SOURCE)}
        # sys.orig_argv is the user's command line. In sys.argv, --config may have been changed.
        module = sys.orig_argv.index("-m")
        command = [sys.executable, "-P", *sys.orig_argv[module:]]
        os.execve(sys.executable, command, os.environ | variables)


def _write_page(root: Path, ledger: Ledger) -> None:
    """Write report.html and ledger.png to the ledger's folder."""
    # The number of each kept idea -> its loss minus the loss at the start.
    gains = {0: 0.0}
    for idea in ledger.kept:
        gains[idea.number] = gains[idea.best] + idea.interval[0]
    plot_ledger(root / "ledger.png", ledger.ideas[1:], gains)
    body = render(
        "ledger/ledger.html.j2",
        ledger=ledger,
        gains=gains,
        differences=differences,
        diff=diff,
        cells=cells,
    )
    write_page(root, root.resolve().name, body, ["ledger.png"])


def _print_answer(ledger: Ledger, idea: Idea) -> None:
    """Print the answer on an idea, such as `keep`, with its reason, and the state of the ledger.

    Without --idea, print the best version instead. With --json, print a line of JSON.
    """
    difference, low, high = idea.interval
    best = ledger.ideas[idea.best]
    steps = [each.arm.config.train.num_steps for each in (idea, best)]
    best_seconds, seconds = np.array(idea.times or [(math.nan, math.nan)]).mean(0)
    commit = ledger.best.arm.commit
    changed = differences(ledger.ideas[0].arm, ledger.best.arm)
    changed.pop("code", None)
    options = {name: value for name, (_, value) in changed.items()}
    facts = {
        "answer": idea.answer,
        "why": idea.why,
        "idea": idea.text,
        "number": idea.number,
        "difference": difference,
        "low": low,
        "high": high,
        "screens": idea.screen_means,
        "pairs": len(idea.pairs),
        "seconds": idea.seconds,
        "steps": steps[0],
        "best_steps": steps[1],
        "run_seconds": seconds,
        "best_run_seconds": best_seconds,
        "level": idea.level,
        "ideas": len(ledger.ideas) - 1,
        "kept": len(ledger.kept),
        "next_level": ledger.level(len(ledger.ideas)),
        "best": ledger.best.text,
        "commit": commit,
        "options": options,
    }
    if FLAGS.json:
        print(pd.Series(facts).to_json())  # pandas writes NaN as null
        return
    rows = dict[str, str]()
    settings = "".join(f" --config.{name}={value}" for name, value in options.items())
    title = f"best version: {idea.text}, commit {commit or 'none'}{settings}"
    if FLAGS.idea:
        title = f"{idea.answer}: {idea.why}"
    if FLAGS.idea and idea.screen_means:
        means = [
            f"{mean:+.4f} at depth {key}" for key, mean in idea.screen_means.items()
        ]
        rows["screens"] = f"{', '.join(means)}; mean differences in nats per token"
    if FLAGS.idea and idea.pairs:
        interval = cells.interval(low, high, "+.4f")
        listed = " and ".join(f"{each:+.4f}" for each in idea.differences)
        rows |= {
            "difference": f"{difference:+.4f} nats per token, idea - best; below 0 is better",
            "interval": f"{interval}, contains the true difference with 95 % probability"
            if interval
            else f"none, because it needs 3 pairs. So far, the differences are {listed}",
            "pairs": f"{len(idea.pairs)}",
            "time": f"a run of {steps[0]} steps takes {format_duration(seconds)}, and {steps[1]}"
            f" steps of the best take {format_duration(best_seconds)}",
        }
    if FLAGS.idea and len(idea.pairs) > 1 and idea.differences.any():
        reached = evidence(idea.differences + FLAGS.least)[-1]
        rows["evidence"] = (
            f"{reached:.3g}; the idea is kept once it is {1 / idea.level:.3g}"
        )
    if FLAGS.idea and idea.seconds:
        duration = format_duration(idea.seconds)
        rows["total"] = f"{duration}, including start-up and scoring"
    rows["ledger"] = (
        f"{counted(len(ledger.ideas) - 1, 'idea')}, {len(ledger.kept)} kept; the next idea has the"
        f" level {facts['next_level']:.2%}, and needs an evidence of"
        f" {1 / facts['next_level']:.3g}"
    )
    rows["next"] = _NEXT[idea.answer]
    if idea.answer == Answer.DISCARD and "--pairs=" in idea.why:
        rows["next"] += ", or repeat the command with more --pairs"
    for line in (title, *(f"  {name:<11} {text}" for name, text in rows.items())):
        print(textwrap.fill(printable(line), 80, subsequent_indent=14 * " "))


_NEXT = {
    Answer.OPEN: "try an idea with --idea",
    Answer.KEEP: "try another idea, which is compared with this one",
    Answer.DISCARD: "try another idea",
    Answer.UNDECIDED: "repeat the command with more --pairs or --minutes, or try another idea",
    Answer.FAILED: "correct the idea, and repeat the command",
}


def _describe_pairs(root: Path, ledger: Ledger) -> str:
    """Describe the smallest gains that pairs of runs could detect, and the time of the pairs."""
    idea = make_idea(root, ledger, FLAGS.idea, FLAGS.equal)

    screening = ""
    for depth in (*idea.screens, 0):
        _, arm = arms_at(root, ledger, idea, depth, FLAGS.equal)
        step, start = measure(root, with_training_text(root, arm), make_slots(1))
        seconds = 2 * (start + arm.config.train.num_steps * step)
        if depth:
            duration = format_duration(SCREEN_PAIRS * seconds)
            screening += (
                f"{SCREEN_PAIRS} pairs at depth {depth} would train for {duration}.\n"
            )
    level = ledger.level(idea.number)
    noise = ledger.noise()
    unit = (
        f"nats per token. The assumed standard deviation of a pair's difference, {noise:.4f}, is"
        " that of all pairs in this ledger; with another idea, it may be much larger or smaller"
    )
    if not noise > 0:  # NaN before an idea has two pairs
        noise = 1.0
        unit = "standard deviations of a difference, known once an idea has two pairs"
    table = pd.DataFrame({"pairs": range(1, FLAGS.pairs + 1)})
    table["time, at most"] = [format_duration(pairs * seconds) for pairs in table.pairs]
    for title, power in (
        ("gain kept half the time", 0.5),
        ("gain kept 4 of 5 times", 0.8),
    ):
        table[title] = -noise * findable(FLAGS.pairs, level, power)
    text = table.to_string(index=False, float_format="{:.4f}".format, na_rep="none")
    meaning = (
        f"The table shows up to {FLAGS.pairs} pairs of {ledger.best.text} and {idea.text}. Its last"
        " two columns are the true differences, beyond --least, with which an idea is"
        f" kept at the level {level:.2%}, in {unit}. With `none`, there are too few pairs to keep"
        " any idea. The time does not include the scoring of the runs."
    )
    return f"{screening}{textwrap.fill(meaning, 80)}\n\n{text}"


if __name__ == "__main__":
    cli.run(main, define_flags)
