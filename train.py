"""Train GPT-2. This file shows a whole run in order, from its options to its loss curve.

    python train.py --config=configs/gpt2_124m.py --config.train.num_steps=1000

If the workdir has a checkpoint, the run continues from it.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()  # before JAX is imported

import math
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
from absl import flags

from gpt2 import cli
from gpt2.data import Dataset, prepare_dataset
from gpt2.errors import DivergedError, log
from gpt2.evals.run_tasks import RunTasks
from gpt2.hf.weights import load_initial_params, with_model_of_weights
from gpt2.model import GPT
from gpt2.optim import make_optimizer, make_schedule
from gpt2.parallel import distributed, find_devices, gather_whole
from gpt2.signals import StopSignal, exit_at_interrupt
from gpt2.telemetry import Reporter, StepClock, TraceRecorder
from gpt2.telemetry.recorder import STEP
from gpt2.training import (
    Batches,
    Checkpointer,
    Diagnosis,
    Program,
    TrainState,
    next_token_loss,
    validate,
)
from gpt2.training import workdir as folder

# `make_program` builds the steps from these parts. Replace a part to train with a different one.
make_program = partial(
    Program.from_config,
    model=GPT,
    loss=next_token_loss,
    schedule=make_schedule,
    optimizer=make_optimizer,
)
CONTINUE = "to continue, repeat the command"


class Hook(NamedTuple):
    """An action between steps: `run(step, state)`, every `every` steps and after the last step."""

    run: Callable[[int, TrainState], None]
    every: int  # in steps; 0: only after the last step


@distributed.ends_together()
def main() -> int:
    """Read options, prepare data, create or restore the state, train, and return the exit code."""
    # Options: all values are checked before data are prepared.
    config = cli.parse_config()
    options = config.train
    args = flags.FLAGS
    exit_at_interrupt(CONTINUE)
    distributed.initialize(args.coordinator, args.num_processes, args.process_index)
    location = args.workdir or f"runs/{cli.config_name()}"
    folder.require_same_start(config, workdir=location)
    devices = find_devices(config)
    workdir, mirror = folder.open_workdir(location)
    if options.init_from:
        config = with_model_of_weights(config, cli.chosen_options(), workdir)
    folder.check_options(workdir, config)

    # Data: tokens are prepared once and stored. The seed and the step determine each batch.
    dataset = prepare_dataset(config.data, folder.read_data(workdir))
    folder.check_data(workdir, dataset)
    config = config.with_vocabulary(dataset.tokenizer.vocab_size)
    folder.refuse_changes(workdir, config)
    program = make_program(config, devices)  # see the definition above
    batches = Batches(config, dataset, program.backend)
    tasks = RunTasks(program.model, options, dataset.tokenizer, program.backend.mesh)

    # State: from the newest undamaged checkpoint, from `train.init_from`, or drawn from the seed.
    start = folder.find_start(workdir)
    if folder.is_finished(workdir, config, start):
        with mirror:
            return 0
    # Initial weights are loaded before the workdir is written, because they may not fit the model.
    state = None if start else first_state(program, dataset)
    folder.begin(workdir, config, dataset, start)
    clock = StepClock.for_run(config, program.flops_per_token)
    checkpointer = Checkpointer(workdir, options.keep_checkpoints, options.keep_every)
    with clock.phase("restore"):
        state = state or checkpointer.restore(start, program)
    parts = program, batches, tasks, workdir, checkpointer, clock
    with mirror:  # uploads the run's files if the workdir is a URL
        return train(state, start, *parts)


def first_state(program: Program, dataset: Dataset) -> TrainState:
    """Return the state before step 1, with weights from `train.init_from` or from the seed."""
    if not (source := program.config.train.init_from):
        return program.init_state()
    params = load_initial_params(source, program.model.config, dataset.tokenizer)
    distributed.only_first(log)(f"starting from the weights of {source}", sys.stdout)
    return program.init_state(jax.device_get(params))


def train(
    state: TrainState,
    start: int,
    program: Program,
    batches: Batches,
    tasks: RunTasks,
    workdir: Path,
    checkpointer: Checkpointer,
    clock: StepClock,
) -> int:
    """Run the steps after `start`, write the run's files, and return the exit code."""
    config = program.config
    options = config.train

    # Compile once for each shape of the run's steps, while the devices initialise the weights.
    distributed.only_first(log)("compiling the steps", sys.stdout)
    with clock.phase("compile"):
        examples, eval_batch = batches.examples(start)
        steps = program.compile_steps(state, examples)
        eval_step = program.compile_eval(state.eval_params, eval_batch)
        jax.block_until_ready((state, steps, eval_step))
    distributed.only_first(log)(program.describe(batches, steps, start), sys.stdout)

    step = start
    stops = False
    scores: dict[int, dict[str, float]] = {}  # of the newest validation, by its step
    reporter = Reporter.for_run(config, clock, workdir, start)
    recorder = TraceRecorder(workdir, config.logging, start)
    diagnosis = Diagnosis(program, batches, workdir, checkpointer, steps, first_state)
    stop = StopSignal()
    upcoming = batches.train(start, options.num_steps, checkpointer.position(start))

    def score(num_batches: int = 0) -> dict[str, float]:
        """Return the newest state's scores. Raise DivergedError if their loss is not finite."""
        reporter.catch_up()
        with clock.phase("validation"):
            split = batches.validation(num_batches)
            newest = validate(eval_step, state.eval_params, *split)
        if not math.isfinite(newest["eval/loss"]):
            raise DivergedError(step, "The validation loss is", before=False)
        return newest

    def save() -> None:
        """Write metrics to disk, then save the newest state, with its scores if it has some."""
        reporter.flush(step)
        with clock.phase("checkpoint"):
            checkpointer.save(state, step, scores.get(step), batches.position(step))

    score_tasks = partial(tasks.log, reporter, clock)
    hooks = [Hook(recorder, every=1)]
    if tasks.scores:
        hooks.append(Hook(score_tasks, every=options.eval_tasks_every))

    # Loop: metrics are fetched one step late, so that devices do not wait for the host to log them.
    with recorder, stop, checkpointer, reporter, clock.phase("step"), closing(upcoming):
        try:
            # A signal or an error may have interrupted the scoring of step `start`.
            lacks = partial(folder.lacks_score, workdir, options, start)
            if lacks("eval/loss"):
                scores = {step: score()}
                reporter.write(step, scores[step])
            if tasks.scores and lacks(tasks.scores[0]):
                score_tasks(step, state)
            while step < options.num_steps and not stops:
                with clock.phase("data wait"):
                    batch = next(upcoming)
                train_step, watch_step = steps[config.shapes.at(step + 1)]
                norms = None
                with jax.profiler.StepTraceAnnotation(STEP, step_num=step + 1):
                    if watch_step and (step + 1) % config.logging.watch_every == 0:
                        norms = watch_step(state, batch)
                    state, metrics = train_step(state, batch)
                step += 1
                reporter.step(step, metrics, norms)

                stops = stop.reached(step)
                saves = stops or options.is_due(step, options.checkpoint_every)
                if options.is_due(step, options.eval_every):
                    scores = {step: score()}
                    reporter.write(step, scores[step])
                    with clock.phase("checkpoint"):  # waits for the last save
                        saves = checkpointer.improves(scores[step]) or saves
                elif saves:
                    score(num_batches=1)  # raises an error if the state has diverged
                for hook in hooks:
                    if options.is_due(step, hook.every):
                        hook.run(step, state)
                if saves:
                    save()
        except DivergedError as error:
            with clock.phase("diagnosis"):
                raise diagnosis.explain(error, state) from None
        except (Exception, SystemExit):  # from validation, tasks, user code, ...
            if checkpointer.can_rescue(state, step):
                reporter.catch_up()
                save()
            raise
        with clock.phase("checkpoint"):
            checkpointer.wait()
    checkpointer.raise_failure()
    if stop.requested and stop.is_agreed:
        log(f"stopped by {stop.requested.name} at step {step}; {CONTINUE}", sys.stdout)
        return 128 + stop.requested

    params = gather_whole(state.eval_params, program.backend.mesh)
    folder.finish(workdir, program, params, batches.dataset, scores[step], clock)
    return 0


if __name__ == "__main__":
    cli.run(main, cli.define_run)
