"""What the commands of sweeps and ladders share: flags, how a sweep is made, what is printed."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.data import prepare
from gpt2.errors import UserError
from gpt2.lab.ablate.sweep import CHOOSING_SEED, Sweep
from gpt2.lab.experiments.arms import Arm, read_tuned
from gpt2.lab.experiments.checkouts import check_out
from gpt2.lab.experiments.jobs import Slot
from gpt2.lab.experiments.run_folder import ENDED, Run
from gpt2.lab.experiments.step_time import equalize, measure
from gpt2.lab.experiments.terms import BITS_PER_BYTE, TERMS, choose_score
from gpt2.utils.text import format_duration

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Define the flags of a comparison of arms."""
    cli.define_config()
    flags.DEFINE_string("workdir", None, "Folder of the results.")
    flags.DEFINE_multi_string(
        "vary",
        [],
        "OPTION=VALUE,... or recipe=FILE,... or code=BRANCH,...; several make a grid.",
    )
    flags.DEFINE_bool(
        "one_at_a_time", False, "Change one thing at a time, in place of a grid."
    )
    flags.DEFINE_list(
        "seeds",
        ["3"],
        "Number of runs of each arm. 3,5,8 analyses after 3 and 5 seeds, and stops arms that then"
        " have a verdict or are futile.",
    )
    flags.DEFINE_integer(
        "jobs", 1, "Runs at once, on a GPU each or a part of the CPU cores each.", 1
    )
    flags.DEFINE_enum("equal", "tokens", TERMS, "What is the same for all arms.")
    flags.DEFINE_multi_string(
        "tune", [], "OPTION=VALUE,...: each arm first chooses its best value."
    )
    flags.DEFINE_bool(
        "dry_run",
        False,
        "Print the runs and their time, which short runs measure, and train nothing else.",
    )
    flags.DEFINE_bool(
        "report", False, "Only write the report of the runs that have ended so far."
    )


def make_sweep(
    root: Path, arms: Sequence[Arm], slots: Sequence[Slot], *, module: str
) -> Sweep:
    """Return the sweep of arms on the terms of the flags, after checks that need no training.

    `module` is the command that was run, for the report.
    """
    looks = _read_looks(FLAGS.seeds)
    tune = read_tuned(FLAGS.tune, FLAGS.vary)
    score = choose_score(arms)
    complete = []
    for arm in arms:
        dataset = prepare(arm.config.data)
        if score == BITS_PER_BYTE and dataset.targets_per_byte is None:
            raise UserError(
                f"data.tokenizer={arm.config.data.tokenizer} loses bytes of the text, so that"
                " its bits per byte cannot be compared",
                "Vary tokenizers that keep the whole text",
            )
        config = arm.config.with_vocabulary(dataset.tokenizer.vocab_size)
        complete.append(replace(arm, config=config))
        check_out(root, arm.commit)
    command = ["python", "-m", module, *sys.argv[1:]]
    return Sweep(
        root=root,
        commands=[shlex.join(command)],
        arms=tuple(equalize(complete, FLAGS.equal, root, slots)),
        equal=FLAGS.equal,
        looks=looks,
        tune=tune,
    )


def _read_looks(seeds: Sequence[str]) -> list[int]:
    """Return the numbers of `--seeds`, sorted."""
    looks = sorted({int(number) for number in seeds if number.isdecimal()})
    least = 2 if len(looks) > 1 else 1
    all_valid = 0 < len(looks) == len(seeds)
    if not all_valid or looks[0] < least or looks[-1] > CHOOSING_SEED:
        raise UserError(
            f"--seeds={','.join(seeds)} is not a list of numbers from {least} to {CHOOSING_SEED}",
            "Write --seeds=3, or --seeds=3,5,8",
        )
    return looks


def describe_runs(sweep: Sweep, slots: Sequence[Slot]) -> str:
    """Return the list of a sweep's runs and their durations, from measured step times."""
    seconds = {}
    for arm in sweep.arms:
        step, start = measure(sweep.root, arm, slots)
        print(f"{arm.name}: {step:.4g} seconds a step", flush=True)
        seconds[arm.name] = start + arm.config.train.num_steps * step
    lines = ["would train"]
    total = 0.0
    # The values that tuning will choose do not change how long a run takes.
    chosen = {name: sweep.chosen.get(name, {}) for name in seconds}
    for run in replace(sweep, chosen=chosen).all_runs():
        if run.outcome().state not in ENDED:
            total += seconds[run.arm]
            duration = format_duration(seconds[run.arm])
            lines.append(f"{run.label}  {run.config.train.num_steps} steps  {duration}")
    whole = format_duration(total / len(slots))
    lines.append(f"about {whole} in all, without validations and checkpoints")
    return "\n".join(lines)


def exit_code(runs: Sequence[Run]) -> int:
    """Return 1 if a run failed or has not ended, after a line that says so; otherwise 0."""
    states = [run.outcome().state for run in runs]
    failed = states.count("failed")
    waiting = states.count("waiting")
    if failed or waiting:
        print(f"{failed} runs failed, {waiting} have not ended; repeat the command")
        return 1
    return 0
