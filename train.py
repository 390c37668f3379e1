"""Trains GPT-2. This file tells the whole run in order, from its options to its loss curve.

    python train.py --config=configs/gpt2_124m.py --workdir=runs/first --config.train.num_steps=1000

A run whose workdir holds a checkpoint continues from it.
"""

from gpt2 import launch

if __name__ == "__main__":
    launch.prepare_process()

from gpt2 import cli, interrupts
from gpt2.plan import command as planning
from gpt2.training import options

if __name__ == "__main__":  # what is wrong is told now: the imports below take seconds
    cli.parse(
        lambda: (options.define_flags(), planning.define_flags()),
        options.check,
        default_config="quickstart",
    )

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
from absl import flags

from gpt2.config import Config
from gpt2.data.dataset import Dataset, prepare
from gpt2.errors import UserError, tell
from gpt2.evals.validation import Validator
from gpt2.generate import sample_texts
from gpt2.parallel import distributed, gather_whole
from gpt2.parallel.stop import StopSignal
from gpt2.plan.drawing import visualize
from gpt2.profile.profiler import Profiler
from gpt2.telemetry.flops import model_flops_per_token
from gpt2.telemetry.metrics import MetricsWriter, check_wandb, seconds_taken
from gpt2.telemetry.plots import plot_losses
from gpt2.telemetry.progress import Progress, print_summary, told_if_slow
from gpt2.telemetry.reporter import Reporter, Writer
from gpt2.telemetry.throughput import StepClock, total_peak_flops
from gpt2.telemetry.watchdog import Watchdog
from gpt2.training import workdir as run_files
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.checkpoint_files import latest_step
from gpt2.training.deadline import Deadline
from gpt2.training.diagnosis import Diagnosis
from gpt2.training.due import due_after
from gpt2.training.feed import Feed
from gpt2.training.program import Program, check_program
from gpt2.training.room import check_room
from gpt2.training.state import TrainState
from gpt2.training.summary import describe_results, describe_run
from gpt2.utils.files import write_text
from gpt2.utils.terminal import wrap
from gpt2.weights import check_source, load_initial_params


@distributed.ends_together()
def main() -> int:
    """Runs one training run, phase by phase, and returns the exit code of the program."""
    # Options: checked before any work begins.
    config, args = cli.parse_config(), flags.FLAGS
    if planning.is_asked():
        return planning.run(config)
    distributed.initialize(args.coordinator, args.num_processes, args.process_index)
    workdir = Path(args.workdir or Path("runs") / cli.config_name())
    run_files.check_options(workdir, config)
    check_program(config, jax.devices())
    check_room(config, jax.devices())
    if config.logging.wandb:
        check_wandb()

    if config.train.init_from and latest_step(workdir) is None:
        check_source(config.train.init_from)

    # Data: prepared once and kept. A batch is a function of the seed and the step.
    dataset = prepare(config.data)
    interrupts.say_when_left(partial(run_files.describe_saved, workdir))
    interrupts.end_at_once()
    run_files.check_data(workdir, dataset)
    config = config.with_vocabulary(dataset.tokenizer.vocab_size)
    run_files.refuse_changes(workdir, config)  # again, since the vocabulary is known

    # Program: model, optimizer and steps, and how they are spread over the devices.
    program = Program.from_config(config, jax.devices())
    feed = Feed(config, dataset, program.backend)
    if args.visualize:
        distributed.only_first(visualize)(program, args.visualize)

    # State: where the run stands.
    start = distributed.from_first(distributed.only_first(run_files.find_start)(workdir) or 0)
    if distributed.from_first(run_files.is_finished(workdir, config, start)):
        distributed.only_first(print)(run_files.describe_finished(workdir, config))
        return 0
    checkpointer, state = open_state(program, dataset, workdir, start)

    # Loop, then the files that a person looks at.
    return train(program, feed, workdir, checkpointer, state, start)


def open_state(
    program: Program, dataset: Dataset, workdir: Path, start: int
) -> tuple[Checkpointer, TrainState]:
    """Returns what saves the run's states, and the state from which the run continues.

    The state comes from the first of these that exists:

    1. the run's newest checkpoint that is whole, that of step `start`;
    2. the weights that `train.init_from` names;
    3. weights drawn from the seed.
    """
    config = program.config
    state = None if start else first_state(program, dataset)
    # The weights are checked. From here on, the run writes to its workdir.
    run_files.begin(workdir, config, dataset, start)
    kept = config.train.keep_checkpoints, config.train.keep_every
    checkpointer = Checkpointer(workdir, *kept, goes_on=True)
    if state is None:
        state = checkpointer.restore(start, program.state_shapes)
    return checkpointer, state


def first_state(program: Program, dataset: Dataset) -> TrainState:
    """Returns the state before the first step: 2. or 3. of `open_state`."""
    params, source = None, program.config.train.init_from
    if source:
        params = load_initial_params(source, program.model.config, dataset.tokenizer)
        params = jax.device_get(params)
    return program.init_state(params)


def train(
    program: Program,
    feed: Feed,
    workdir: Path,
    checkpointer: Checkpointer,
    state: TrainState,
    start: int,
) -> int:
    """Runs the steps after `start`, writes the run's files and returns the exit code."""
    config, num_steps = program.config, program.config.train.num_steps
    clock = StepClock(
        config.tokens_per_step,
        model_flops_per_token(program.model.config),
        seconds_before=seconds_taken(workdir / "metrics.jsonl", start),
        start_seconds=launch.seconds_since_start(),
    )
    # Compile once, before the loop, while the devices still draw the weights. A batch of another
    # shape is an error later.
    with (
        clock.phase("compile"),
        told_if_slow(
            "compiling the steps of training and validation", silent=jax.process_index() > 0
        ),
    ):
        batch, eval_batch = feed.examples()
        train_step = program.compile_train(state, batch)
        watch = program.compile_watch(state, batch)
        eval_step = program.compile_eval(state.params, eval_batch)
        jax.block_until_ready(state)
    clock.peak_flops = total_peak_flops(config.precision.compute)  # on a CPU, measured when idle
    summary = describe_run(program, feed, train_step, clock, workdir, start)
    distributed.only_first(print_summary)(summary)
    validate = Validator(eval_step, feed)
    writers = make_writers(config, workdir, start) or []  # in the first process alone
    reporter = Reporter(
        writers,
        clock,
        log_every=config.train.log_every,
        num_steps=num_steps,
        skip_bad_steps=config.train.skip_bad_steps,
    )
    traced = config.logging.profile_start, config.logging.profile_steps
    profiler = Profiler(workdir / "profile", *traced, train_step.text)
    watchdog = Watchdog(clock, config.train.hang_seconds)
    batches = feed.train_batches(start, num_steps)

    start_over = partial(first_state, program, feed.dataset)
    diagnosis = Diagnosis(program, feed, workdir, checkpointer, train_step, start_over)
    limit = flags.FLAGS.max_seconds
    deadline = Deadline(limit, config.train, clock, checkpointer, lambda: validate.seconds)
    deadline.check(start)

    # Metrics are read a step late, so that the devices never wait for the host.
    step, scores = start, {}
    stop = StopSignal(deadline.is_over)
    with stop, checkpointer, reporter, profiler, batches, watchdog:
        with diagnosis.ends_if_diverged(lambda: state), clock.phase("step"):
            for step in range(start + 1, num_steps + 1):
                with clock.phase("data wait"):
                    batch = next(batches)
                if profiler.waits_at(step - 1):  # for a step whose time is no profiling
                    reporter.catch_up()
                with clock.phase("profile"):
                    profiler.step(step - 1, state)
                statistics = watch(step, state, batch)
                state, metrics = train_step(state, batch)
                reporter.step(step, metrics, feed.epoch_end(step), statistics)

                measuring = deadline.exists and step == start + 1
                stopping = stop.reached(step)
                due = due_after(step, config.train, stopping=stopping, measuring=measuring)
                if due.validation or due.checkpoint:
                    reporter.catch_up()
                if due.validation:
                    with clock.phase("validation"):
                        scores = validate(step, state.eval_params)
                    reporter.write(step, scores)
                improves = due.validation and checkpointer.improves(scores["eval/loss"])
                if due.checkpoint or improves:
                    with clock.phase("checkpoint"):
                        if not due.validation:  # a diverged state is never saved
                            validate(step, state.eval_params, num_batches=1)
                        reporter.flush(step)
                        if stopping:
                            reporter.say(stop.describe_save())
                        checkpointer.save(state, step, scores if due.validation else None)
                        if measuring and not due.end:  # how long it takes to stop
                            checkpointer.wait()
                            validate.measure(step, state.eval_params)
                            deadline.check(step)
                if due.end:
                    break
        with clock.phase("checkpoint"):
            checkpointer.wait()

    if checkpointer.failure:
        how = f"Mend that, and repeat the command to train from step {latest_step(workdir) or 0} on"
        raise UserError(checkpointer.failure, how, exit_code=5)
    if stop.requested and stop.is_agreed:
        by = deadline.reason if stop.is_late else stop.requested.name
        tell(f"stopped by {by} at step {step}; the same command continues", sys.stdout)
        return 128 + stop.requested
    if not scores:  # the run was killed after its last checkpoint
        with diagnosis.ends_if_diverged(lambda: state), clock.phase("validation"):
            scores = validate(step, state.eval_params)
    show_results(workdir, scores, feed, clock, start)
    params = gather_whole(state.eval_params, program.backend.mesh)
    write_samples(workdir, config, feed.dataset, params)
    return 0


@distributed.only_first
def make_writers(config: Config, workdir: Path, start: int) -> list[Writer]:
    """Returns what takes the metrics of steps: files, and the screen."""
    files = MetricsWriter(
        workdir,
        config.to_dict(),
        tensorboard=config.logging.tensorboard,
        wandb=config.logging.wandb,
        resume_step=start,
    )
    return [files, Progress(config.train.num_steps, start)]


@distributed.only_first
def show_results(
    workdir: Path, scores: dict[str, float], feed: Feed, clock: StepClock, start: int
) -> None:
    """Draws the loss curve, and prints where the time went and how good the model is."""
    plot_losses(workdir / "metrics.jsonl", workdir / "loss.png", title=str(workdir))
    tell(wrap(describe_results(scores, feed, clock, start)), sys.stdout)


@distributed.only_first
def write_samples(workdir: Path, config: Config, dataset: Dataset, params: Any) -> None:
    """Writes a few texts of the model into samples.txt."""
    texts = sample_texts(params, config.gpt(), dataset.tokenizer, number=3, seed=config.seed)
    rule = "\n" + "-" * 80 + "\n"
    write_text(workdir / "samples.txt", rule.join(texts) + "\n")
    drawn = "loss.png and " if (workdir / "loss.png").is_file() else ""  # it needs matplotlib
    tell(wrap(f"see {drawn}samples.txt in {workdir}"), sys.stdout)


if __name__ == "__main__":
    cli.run(main)
