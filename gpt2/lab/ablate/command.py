"""Functions that sweeps and ladders share, including the definition of their flags."""

import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.data import prepare_dataset
from gpt2.errors import UserError, warn
from gpt2.lab.ablate.judge import add_seeds
from gpt2.lab.ablate.sweep import CHOOSING_SEED, Sweep, continued, register
from gpt2.lab.ablate.sweep_report import print_tuning_notes
from gpt2.lab.experiments.arms import Arm, differences, draw_trials, read_tuned
from gpt2.lab.experiments.checkouts import check_out
from gpt2.lab.experiments.jobs import Slot, make_slots, train_all
from gpt2.lab.experiments.results import check_comparable
from gpt2.lab.experiments.run_folder import ENDED, count_warnings, find_root
from gpt2.lab.experiments.step_time import Times, equalize, forecast
from gpt2.lab.experiments.terms import BITS_PER_BYTE, TERMS, choose_score, flops
from gpt2.utils.files import locked
from gpt2.utils.ray_cluster import connect
from gpt2.utils.text import counted, format_count, format_duration

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Define the flags that sweeps and ladders share."""
    cli.define_config()
    flags.DEFINE_string("workdir", None, "Folder for the runs and the report.")
    flags.DEFINE_multi_string(
        "vary",
        [],
        "The arms: OPTION=VALUE,... or recipe=FILE,... or code=BRANCH,... Several --vary flags "
        "make a grid, with an arm for each combination of their values.",
    )
    flags.DEFINE_bool(
        "one_at_a_time",
        False,
        "Make an arm for each single value of each --vary, instead of an arm for each combination "
        "of values.",
    )
    flags.DEFINE_list(
        "seeds",
        ["3"],
        "Number of seeds of each arm. With 3,5,8, an arm has at most 8 seeds. The results are also "
        "analysed after 3 and 5 seeds, and arms whose verdict is then clear are stopped. A sweep, "
        "unlike a ladder, also stops arms whose verdict is unlikely to become clear.",
    )
    flags.DEFINE_integer(
        "jobs",
        None,
        "Number of simultaneous runs. If there are several, each has its own GPU, or its own part "
        "of the CPU cores. Default: 1 or, with --cluster, as many as possible.",
        1,
    )
    cli.define_cluster()
    flags.DEFINE_enum(
        "equal", "tokens", TERMS, "The training cost that is the same for all arms."
    )
    flags.DEFINE_multi_string(
        "tune",
        [],
        "OPTION=VALUE,...: each arm is first trained with each value, and then uses the value that "
        "is best for this arm. With --trials: OPTION=LOW..HIGH",
    )
    flags.DEFINE_integer(
        "trials",
        0,
        "Number of settings that each arm tries. They are spread over the ranges in --tune, and "
        "are the same for all arms. 0 means: all combinations of the values in --tune.",
        0,
    )
    flags.DEFINE_integer(
        "tune_seeds",
        1,
        "Number of seeds with which --tune trains each combination of values. The combination with "
        "the lowest mean loss is chosen.",
        1,
    )
    flags.DEFINE_bool(
        "dry_run",
        False,
        "Only print the runs and how long they would take. Short runs measure the times. In a "
        "ladder, they measure the baseline at each size, and other arms only at the smallest.",
    )
    flags.DEFINE_bool(
        "report",
        False,
        "Only write the report on the runs that have ended so far, and train nothing.",
    )


Words = Callable[[Sequence[Sweep]], Mapping[str, str]]
Report = Callable[[Path, Sequence[Sweep]], None]


def main(
    read: Callable[[Path, Sequence[Slot]], list[Sweep]],
    load: Callable[[Path], list[Sweep]],
    words: Words,
    report: Report,
) -> int:
    """Train the sweeps that `read` returns, one for each size, and return the exit code.

    With --report, train nothing, and report on the sweeps that `load` returns. `words` returns the
    verdict on each arm, and `report` writes a report and prints its verdicts. With --dry_run, only
    print the runs, and return 0. Otherwise, the exit code is 1 if a run failed or has not ended,
    and 0 if all runs have ended.
    """
    root = find_root("workdir", FLAGS.workdir)
    if FLAGS.report:
        return conclude(root, load(root), report)
    os.environ.setdefault("WANDB_RUN_GROUP", root.resolve().name)
    connect(FLAGS.cluster)
    slots = make_slots(FLAGS.jobs)
    sweeps = read(root, slots)
    if sweeps[0].analyses[-1] == 2:
        warn("with only two seeds, intervals are very wide; --seeds=3 is much better")
    if FLAGS.dry_run:
        newest = [continued(sweep) for sweep in sweeps]
        print(describe_runs(with_next_seeds(newest, words), slots))
        return 0
    sweeps = [register(sweep) for sweep in sweeps]
    if values := _varied_values(sweeps[0]):
        print(textwrap.fill(f"the baseline has {values}", 80), flush=True)
    while True:
        for number, sweep in enumerate(sweeps, start=1):
            _check_sizes(sweeps, to_come=True)
            tuning = sweep.tuning_runs()
            waiting = [run for run in tuning if run.outcome().state not in ENDED]
            compared = sweep.runs()
            size = f"size {number} of {len(sweeps)}: " if len(sweeps) > 1 else ""
            if waiting:
                count = counted(len(waiting), "tuning run")
                print(f"{size}{count}, in {sweep.root}; the compared runs follow")
            else:
                print(f"{size}{counted(len(compared), 'run')}, in {sweep.root}")
            sys.stdout.flush()
            train_all([*waiting, *compared], slots, sweep.score)
        grown = with_next_seeds(sweeps, words)
        if grown == sweeps:
            return conclude(root, sweeps, report)
        sweeps = [register(sweep) for sweep in grown]


def _varied_values(sweep: Sweep) -> str:
    """List the baseline's values of all options that at least one arm changes."""
    baseline, *others = sweep.arms
    values = {}
    for arm in others:
        for name, (value, _) in differences(baseline, arm).items():
            values[name] = value
    return ", ".join(f"{name}={value}" for name, value in values.items())


def with_next_seeds(sweeps: Sequence[Sweep], words: Words) -> list[Sweep]:
    """Return the sweeps with tuned values chosen, and with seeds added for arms without a verdict.

    Values are chosen for each arm whose tuning runs have all ended. Arms get the seeds of the next
    analysis once all runs so far have ended.
    """
    chosen = [sweep.with_choices() for sweep in sweeps]
    return add_seeds(chosen, words(chosen))


def conclude(root: Path, sweeps: Sequence[Sweep], report: Report) -> int:
    """Write the report, print the verdicts, and return the exit code."""
    with locked(root / ".sweep.lock"):
        # Another command may have added arms or seeds while this command trained.
        newest = [continued(sweep).with_choices() for sweep in sweeps]
        _check_sizes(newest)
        report(root, newest)
    print_tuning_notes(newest)
    print(f"\nsee report.html or report.md, with their tables and pictures, in {root}")
    runs = [run for sweep in newest for run in sweep.all_runs()]
    for warning, number in count_warnings(runs).items():
        warn(f"in {counted(number, 'run')}: {warning}")
    states = [run.outcome().state for run in runs]
    number = states.count("failed") + states.count("waiting")
    if number:
        print(
            f"failed or not ended: {counted(number, 'run')}; to train them, repeat the command"
        )
    return int(number > 0)


def _check_sizes(sweeps: Sequence[Sweep], *, to_come: bool = False) -> None:
    """Raise a UserError if runs of any sizes cannot be compared; see `check_comparable`."""
    runs = [run for sweep in sweeps for run in sweep.all_runs()]
    check_comparable(runs, sweeps[0].score, to_come=to_come)


def require_equal_seeds(arms: Sequence[Arm], what: str) -> None:
    """Raise a UserError if arms begin with different seeds. `what` begins the message."""
    if len({arm.config.seed for arm in arms}) > 1:
        raise UserError(
            f"{what} compares runs with the same seed, but the recipes set different seeds",
            "Add --config.seed=0",
        )


def make_sweep(
    root: Path, arms: Sequence[Arm], slots: Sequence[Slot], *, module: str
) -> Sweep:
    """Return the sweep of `arms` in the folder `root`. The flags determine its other fields.

    The function also prepares the data and checks out the code of all arms, so that errors appear
    before training. `slots` are the resources of simultaneous runs. With --equal=seconds, short
    runs in the first slot measure the time of a step. `module` is the module that the user runs
    with `python -m`. It is a part of the command line that the sweep stores for its report.
    """
    analyses = _read_analyses(FLAGS.seeds)
    tuned = FLAGS.tune
    if FLAGS.trials:
        tuned = [draw_trials(tuned, FLAGS.trials)]
    tune = read_tuned(tuned, FLAGS.vary)
    score = choose_score(arms)
    complete = []
    for arm in arms:
        dataset = prepare_dataset(arm.config.data)
        if score == BITS_PER_BYTE and dataset.targets_per_byte is None:
            raise UserError(
                f"data.tokenizer={arm.config.data.tokenizer} loses bytes of the text, so its bits"
                " per byte cannot be compared with the bits per byte of other tokenizers",
                "Use tokenizers that encode the whole text",
            )
        num_steps = arm.config.train.num_steps
        if arm.config.optim.warmup_steps >= num_steps:
            warn(
                f"{arm.name}: the learning rate only rises, because optim.warmup_steps="
                f"{arm.config.optim.warmup_steps} is not less than train.num_steps={num_steps}"
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
        analyses=analyses,
        tune=tune,
        tune_seeds=FLAGS.tune_seeds,
    )


def _read_analyses(seeds: Sequence[str]) -> list[int]:
    """Return the numbers of seeds after which the results are analysed, in ascending order.

    `seeds` is the value of --seeds, such as `["3", "5", "8"]`. Raise a UserError if it is not a
    list of different numbers in the allowed range.
    """
    analyses = sorted({int(number) for number in seeds if number.isdecimal()})
    least = 2 if len(analyses) > 1 else 1
    all_valid = 0 < len(analyses) == len(seeds)
    if not all_valid or analyses[0] < least or analyses[-1] > CHOOSING_SEED:
        raise UserError(
            f"--seeds={','.join(seeds)} is not a list of different numbers from {least} to"
            f" {CHOOSING_SEED}",
            "Use for example --seeds=3, or --seeds=3,5,8",
        )
    return analyses


def describe_runs(sweeps: Sequence[Sweep], slots: Sequence[Slot]) -> str:
    """Return a text that lists the runs that sweeps would train, and their tokens, FLOPs and time.

    `sweeps` contains one sweep or, for a ladder, one for each size, the smallest first. A run's
    duration is the time of its start-up plus the time of its steps. `forecast` measures or
    estimates both. `slots` are the resources of simultaneous runs. The total time assumes that each
    slot trains one run at a time.
    """
    first = sweeps[0].root.name
    if len(sweeps) > 1:
        print(f"measuring the baseline at each size, and the other arms at {first}")
    lines = ["would train (times include start-up and compilation)"]
    smallest: dict[str, Times] = {}
    any_estimated = False
    seconds = 0.0
    tokens = 0.0
    num_flops = 0.0
    for sweep in sweeps:
        size = f"{sweep.root.name}: " if len(sweeps) > 1 else ""
        times = dict[str, Times]()
        for name, arm_times in forecast(sweep.arms, sweep.root, slots, smallest):
            times[name] = arm_times
            how = "measured" if arm_times.is_measured else "estimated"
            print(
                f"{size}{name}: {arm_times.step:.4g} seconds per step, and"
                f" {arm_times.start:.0f} seconds to start and compile, {how}"
            )
            any_estimated |= not arm_times.is_measured
        smallest = smallest or times
        # The duration of a run does not depend on the values that tuning will choose.
        chosen = {name: sweep.chosen.get(name, {}) for name in times}
        for run in replace(sweep, chosen=chosen).all_runs():
            if run.outcome().state in ENDED:
                continue
            steps = run.config.train.num_steps
            step, start, is_measured = times[run.arm]
            run_seconds = start + steps * step
            seconds += run_seconds
            tokens += run.config.shapes.tokens(steps)
            num_flops += flops(run.config, steps)
            duration = format_duration(run_seconds)
            if not is_measured:
                duration += " (estimated)"
            lines.append(f"{size}{run.label}  {steps} steps  {duration}")
    num_runs = len(lines) - 1
    most = sweeps[0].analyses[-1]
    if any(sweep.num_seeds(arm) < most for sweep in sweeps for arm in sweep.arms):
        lines.append(
            "only the runs before the next analysis are listed; arms that the analysis does not"
            f" stop continue, up to {most} seeds"
        )
    if any_estimated:
        lines.append(
            "estimated: the baseline's time at that size, multiplied by the ratio of the arm's"
            f" time to the baseline's time at {first}"
        )
    lines.append(
        f"{counted(num_runs, 'run')}, {format_count(tokens)} tokens and"
        f" {num_flops:.2g} FLOPs in all\n"
        f"about {format_duration(seconds / len(slots))} in all, without validations and"
        " checkpoints"
    )
    return "\n".join(lines)
