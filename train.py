"""Trains GPT-2. This file tells the whole run in order, from its options to its loss curve.

    python train.py --config=configs/gpt2_124m.py --workdir=runs/first --config.train.num_steps=1000

A run whose workdir holds a checkpoint continues from it.
"""

from gpt2 import launch

if __name__ == "__main__":
    launch.prepare_process()  # before JAX is imported

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
from absl import flags

from gpt2 import cli, interrupts
from gpt2.config import Config
from gpt2.data.dataset import Dataset, prepare
from gpt2.errors import DivergedError, UserError, tell
from gpt2.evals.validation import validate
from gpt2.generate import sample_texts
from gpt2.model import GPT
from gpt2.optim import make_optimizer, make_schedule
from gpt2.parallel import distributed, gather_whole
from gpt2.parallel.mesh import check_layout
from gpt2.parallel.stop import Deadline, StopSignal
from gpt2.plan import command as planning
from gpt2.plan.drawing import visualize
from gpt2.profile.profiler import Profiler
from gpt2.telemetry.flops import model_flops_per_token, total_peak_flops
from gpt2.telemetry.metrics import MetricsWriter, check_wandb, seconds_taken
from gpt2.telemetry.plots import plot_losses
from gpt2.telemetry.progress import Progress, told_if_slow
from gpt2.telemetry.reporter import Reporter, Writer
from gpt2.telemetry.throughput import StepClock
from gpt2.telemetry.watchdog import Watchdog
from gpt2.training import workdir as run_files
from gpt2.training.batches import Batches
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.checkpoint_files import latest_step
from gpt2.training.diagnosis import Diagnosis
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.training.steps import next_token_loss
from gpt2.utils.files import write_text
from gpt2.weights import check_source, load_initial_params


def define_flags() -> None:
    """Defines the flags of runs and of plans."""
    cli.define_run()
    planning.define_flags()


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
    check_layout(config, jax.device_count())
    if config.logging.wandb:
        check_wandb()
    if config.train.init_from and latest_step(workdir) is None:
        check_source(config.train.init_from)

    # Data: prepared once and kept. A batch is a function of the seed and the step.
    dataset = prepare(config.data)
    interrupts.end_at_once("the same command continues")
    run_files.check_data(workdir, dataset)
    config = config.with_vocabulary(dataset.tokenizer.vocab_size)
    run_files.refuse_changes(workdir, config)

    # Program: model, loss, optimizer and steps, spread over the devices by a backend.
    program = Program.from_config(
        config,
        jax.devices(),
        model=GPT,
        loss=next_token_loss,
        schedule=make_schedule,
        optimizer=make_optimizer,
    )
    batches = Batches(config, dataset, program.backend)
    if args.visualize:
        distributed.only_first(visualize)(program, args.visualize)

    # State: where the run stands.
    start = distributed.from_first(distributed.only_first(run_files.find_start)(workdir) or 0)
    if distributed.from_first(run_files.is_finished(workdir, config, start)):
        distributed.only_first(print)(run_files.describe_finished(workdir, config))
        return 0
    checkpointer, state = open_state(program, dataset, workdir, start)

    # Loop, then the files that a person looks at.
    return train(program, batches, workdir, checkpointer, state, start)


def open_state(
    program: Program, dataset: Dataset, workdir: Path, start: int
) -> tuple[Checkpointer, TrainState]:
    """Returns what saves the run's states, and the state from which the run continues.

    It comes from the run's newest whole checkpoint, that of step `start`, else from the weights
    that `train.init_from` names, else from the seed.
    """
    config = program.config
    state = None if start else first_state(program, dataset)
    # The weights are checked. From here on, the run writes to its workdir.
    run_files.begin(workdir, config, dataset, start)
    kept = config.train.keep_checkpoints, config.train.keep_every
    checkpointer = Checkpointer(workdir, *kept)
    if state is None:
        state = checkpointer.restore(start, program.state_shapes)
    return checkpointer, state


def first_state(program: Program, dataset: Dataset) -> TrainState:
    """Returns the state before the first step."""
    params, source = None, program.config.train.init_from
    if source:
        params = load_initial_params(source, program.model.config, dataset.tokenizer)
        params = jax.device_get(params)
    return program.init_state(params)


def train(
    program: Program,
    batches: Batches,
    workdir: Path,
    checkpointer: Checkpointer,
    state: TrainState,
    start: int,
) -> int:
    """Runs the steps after `start`, writes the run's files and returns the exit code."""
    config, num_steps, every = program.config, program.config.train.num_steps, program.config.train
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
        told_if_slow("compiling the steps", silent=jax.process_index() > 0),
    ):
        batch, eval_batch = batches.examples()
        train_step = program.compile_train(state, batch)
        watch = program.compile_watch(state, batch)
        eval_step = program.compile_eval(state.params, eval_batch)
        jax.block_until_ready(state)
    clock.peak_flops = total_peak_flops(config.precision.compute)
    distributed.only_first(print)(program.describe(batches, train_step, start), flush=True)

    def score(step: int, num_batches: int = 0) -> dict[str, float]:
        """Returns the scores of the newest state; a diverged one is never saved."""
        with clock.phase("validation"), batches.validation(num_batches) as held_out:
            scores = validate(eval_step, state.eval_params, held_out, batches.targets_per_byte)
        if not all(map(jax.numpy.isfinite, scores.values())):
            raise DivergedError(step, "the validation loss is", before=False)
        return scores

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
    start_over = partial(first_state, program, batches.dataset)
    diagnosis = Diagnosis(program, batches, workdir, checkpointer, train_step, start_over)
    deadline = Deadline(flags.FLAGS.max_seconds, lambda: checkpointer.longest_seconds)

    # Metrics are read a step late, so that the devices never wait for the host.
    step, scores = start, {}
    stop = StopSignal(deadline.is_over)
    ahead = batches.train(start, num_steps)
    with ExitStack() as stack:
        for part in (
            stop,
            checkpointer,
            reporter,
            profiler,
            ahead,
            Watchdog(clock, config.train.hang_seconds),
            diagnosis.ends_if_diverged(lambda: state),
            clock.phase("step"),
        ):
            stack.enter_context(part)
        for step in range(start + 1, num_steps + 1):
            with clock.phase("data wait"):
                batch = next(ahead)
            with clock.phase("profile"):
                profiler.step(step - 1, state)
            statistics = watch(step, state, batch)
            state, metrics = train_step(state, batch)
            reporter.step(step, metrics, batches.epoch_end(step), statistics)

            ends = stop.reached(step)
            last = step == num_steps
            validates = last or (every.eval_every and step % every.eval_every == 0)
            saves = last or ends or (every.checkpoint_every and step % every.checkpoint_every == 0)
            if validates or saves:
                reporter.catch_up()
            if validates:
                scores = score(step)
                reporter.write(step, scores)
                saves = checkpointer.improves(scores["eval/loss"]) or saves
            if saves:
                if not validates:
                    score(step, num_batches=1)
                reporter.flush(step)
                if ends:
                    reporter.say(stop.describe_save())
                with clock.phase("checkpoint"):
                    checkpointer.save(state, step, scores if validates else None)
            if ends:
                break
        with clock.phase("checkpoint"):
            checkpointer.wait()

    if checkpointer.failure:
        how = f"Mend that, and repeat the command to train from step {latest_step(workdir) or 0} on"
        raise UserError(checkpointer.failure, how, exit_code=5)
    if stop.requested and stop.is_agreed:
        by = "--max_seconds" if stop.is_late else stop.requested.name
        tell(f"stopped by {by} at step {step}; the same command continues", sys.stdout)
        return 128 + stop.requested
    if not scores:  # the run was killed after its last checkpoint
        with diagnosis.ends_if_diverged(lambda: state):
            scores = score(step)
    show_results(workdir, scores, clock)
    params = gather_whole(state.eval_params, program.backend.mesh)
    write_samples(workdir, config, batches.dataset, params)
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
def show_results(workdir: Path, scores: dict[str, float], clock: StepClock) -> None:
    """Draws the loss curve, and prints where the time went and how good the model is."""
    plot_losses(workdir / "metrics.jsonl", workdir / "loss.png", title=str(workdir))
    shares = ", ".join(f"{name} {share:.0%}" for name, share in clock.shares().items())
    tell(f"time: {clock.total_seconds:.0f} s; {shares}", sys.stdout)
    line = f"validation loss {scores['eval/loss']:.4f}, perplexity {scores['eval/perplexity']:.2f}"
    if "eval/bits_per_byte" in scores:
        line += f", {scores['eval/bits_per_byte']:.3f} bits per byte"
    tell(line, sys.stdout)


@distributed.only_first
def write_samples(workdir: Path, config: Config, dataset: Dataset, params: Any) -> None:
    """Writes a few texts of the model into samples.txt."""
    texts = sample_texts(params, config.gpt(), dataset.tokenizer, number=3, seed=config.seed)
    rule = "\n" + "-" * 80 + "\n"
    write_text(workdir / "samples.txt", rule.join(texts) + "\n")
    tell(f"see loss.png and samples.txt in {workdir}", sys.stdout)


if __name__ == "__main__":
    cli.run(main, define_flags, default_config="quickstart")
