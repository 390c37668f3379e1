"""Trains GPT-2: one run, from its options to its loss curve, to be read from top to bottom.

    python train.py --config=configs/gpt2_124m.py --workdir=runs/first --config.train.num_steps=1000

A run continues by itself where its workdir holds a checkpoint.
"""

from gpt2.utils.allocation import order_for_cpu, release_free_memory, restart_for_cpu

if __name__ == "__main__":
    restart_for_cpu()  # before the imports below, which take seconds

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from gpt2 import cli
from gpt2 import workdir as run_files
from gpt2.checkpoint import Checkpointer, latest_step
from gpt2.config import Config
from gpt2.data.loader import Prefetcher, TrainLoader, ValidationLoader
from gpt2.data.prepare import Dataset, prepare
from gpt2.errors import UserError
from gpt2.evals.validation import validate
from gpt2.model import GPT, num_params
from gpt2.ops import resolve
from gpt2.optim import make_optimizer, make_schedule
from gpt2.parallel import Backend, abstract_state, distributed, gather, make_backend
from gpt2.parallel.inspect import check_sharded, describe_spread, visualize
from gpt2.parallel.mesh import check_layout
from gpt2.parallel.stop import StopSignal
from gpt2.plan import print_plan
from gpt2.sampling import Sampling, generate
from gpt2.state import TrainState
from gpt2.steps import make_eval_step, make_train_step
from gpt2.telemetry.compile_watch import compile_once
from gpt2.telemetry.metrics import MetricsWriter, check_wandb
from gpt2.telemetry.plots import plot_losses
from gpt2.telemetry.profiler import Profiler
from gpt2.telemetry.progress import Progress, print_summary
from gpt2.telemetry.summary import describe_run
from gpt2.telemetry.throughput import StepClock, model_flops_per_token, total_peak_flops
from gpt2.utils.prng import init_key
from gpt2.weights import load_initial_params

CONFIG = cli.define_config()
flags.declare_key_flag("config")  # for --help
WORKDIR = flags.DEFINE_string("workdir", None, "Where the run lives; runs/<config name> if empty.")
VISUALIZE = flags.DEFINE_string("visualize", None, "Draw how parameters of this name are spread.")
PLAN = flags.DEFINE_bool("plan", False, "Say what a step takes, without data or training.")
PLAN_DEVICES = flags.DEFINE_integer(
    "plan_devices", 0, "As --plan, for so many simulated devices.", lower_bound=0
)
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, if of several.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes there are.")
PROCESS_INDEX = flags.DEFINE_integer("process_index", None, "Which of them this is, from 0.")


@distributed.ends_together()
def main() -> int:
    # Options. Whatever is wrong with them is said before anything is spent.
    config = cli.load_config(CONFIG)
    order_for_cpu()
    if PLAN.value or PLAN_DEVICES.value:
        for name in ("workdir", "visualize", "coordinator", "num_processes", "process_index"):
            cli.refuse_ignored(name, "--plan only compiles, in one process")
        print_plan(config, PLAN_DEVICES.value)
        return 0
    distributed.initialize(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_INDEX.value)
    workdir = Path(WORKDIR.value or Path("runs") / cli.config_name())
    run_files.check_options(workdir, config)
    check_layout(config, config.model, jax.device_count())
    attention = resolve_attention(config)
    if config.logging.wandb:
        check_wandb()
    is_main = jax.process_index() == 0

    # Data: prepared once and kept. After that, a batch is a function of the step.
    dataset = prepare(config.data, show_progress=is_main)
    config = config.with_vocabulary(dataset.tokenizer.vocab_size)
    run_files.check_data(workdir, dataset)
    batch_size, length = config.data.batch_size, config.model.context_length
    eval_batch_size = batch_size // config.train.accumulate_steps
    shape = dict(context_length=length, document_mask=config.data.document_mask)
    train_data = TrainLoader(dataset, batch_size=batch_size, seed=config.seed, **shape)
    eval_data = ValidationLoader(
        dataset, batch_size=eval_batch_size, num_batches=config.train.eval_batches, **shape
    )

    # Model, optimizer, and how they are spread over the devices.
    model = GPT(config.gpt())
    schedule = make_schedule(config.optim, config.train.num_steps)
    optimizer = make_optimizer(config.optim, schedule)
    backend = make_backend(config.parallel, model.logical_axes(), optimizer)
    train_rows, eval_rows = backend.local_rows(batch_size), backend.local_rows(eval_batch_size)

    # State: continued from the newest checkpoint, else from other weights, else drawn.
    def init_fn(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, length), jnp.int32))["params"]
        return TrainState.create(params, optimizer, config.precision.compute)

    shapes = abstract_state(backend, init_fn)
    check_sharded(shapes.params, backend.mesh.shape)
    if VISUALIZE.value and is_main:
        visualize(shapes.params, VISUALIZE.value)
    start = distributed.from_main(latest_step(workdir) or 0)
    if distributed.from_main(run_files.is_finished(workdir, config)):
        if is_main:
            print(f"{workdir} is finished at step {start}; more --config.train.num_steps continue")
        return 0
    state = None if start else initial_state(config, model, dataset, backend, init_fn)
    if is_main:
        run_files.lock(workdir, start)
        run_files.write(workdir, config, dataset)
    checkpointer = Checkpointer(workdir, num_latest=config.train.keep_checkpoints)
    if start:
        state = checkpointer.restore(start, shapes)

    # Compile, once and ahead of the loop, while the devices still draw the weights: from here on,
    # other shapes are an error.
    clock = StepClock(
        tokens_per_step=batch_size * length,
        flops_per_token=model_flops_per_token(model.config, length),
    )
    with clock.phase("compile"):
        train_step = compile_once(
            backend.compile_train(
                make_train_step(
                    model,
                    optimizer,
                    schedule,
                    seed=config.seed,
                    accumulate_steps=config.train.accumulate_steps,
                )
            ),
            state,
            backend.put_batch(train_data.batch(0, train_rows)),
        )
        eval_step = compile_once(
            backend.compile_eval(make_eval_step(model)),
            state.params,
            backend.put_batch(eval_data.batch(0, eval_rows)),
        )
        release_free_memory()
        jax.block_until_ready(state)
    clock.peak_flops = total_peak_flops(config.precision.compute)  # on a CPU, measured when idle
    if is_main:
        size = num_params(state.params)
        print_summary(
            describe_run(config, dataset, size, attention, backend.mesh, train_step, workdir, start)
            | describe_spread(state.params, train_step.text())
        )

    # Where figures go: to files and the progress bar, from the first process.
    num_steps = config.train.num_steps
    writer = progress = contextlib.nullcontext()
    if is_main:
        writer = MetricsWriter(
            workdir,
            config.to_dict(),
            tensorboard=config.logging.tensorboard,
            wandb=config.logging.wandb,
            resume_step=start,
        )
        progress = Progress(num_steps, start)

    def log(step: int, values: dict[str, float]) -> None:
        if is_main:
            writer.write(step, values)
            progress.update(step, values)

    def report(step: int, metrics: dict[str, jax.Array]) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not math.isfinite(values["train/loss"]):
            raise DivergedError(step, workdir, checkpointer)
        clock.count_step()
        if step % config.train.log_every == 0 or step == num_steps:
            log(step, {"tokens": step * batch_size * length} | values | clock.read())

    def evaluate(params: Any, num_batches: int) -> dict[str, float]:
        split = dataset.splits["validation"]
        targets_per_byte = split.targets_per_byte if eval_data.is_whole else None
        with Prefetcher(
            lambda index: eval_data.batch(index, eval_rows), range(num_batches), backend.put_batch
        ) as eval_batches:
            scores = validate(eval_step, params, eval_batches, targets_per_byte)
        if not math.isfinite(scores["eval/loss"]):
            raise DivergedError(step, workdir, checkpointer)
        return scores

    # The loop. Metrics are read a step late, so that the devices never wait for the host.
    step = start
    scores = {}
    late = None  # the newest step and its metrics, which are still on the devices
    best_loss = (checkpointer.best() or (0, math.inf))[1]
    profiler = Profiler(
        workdir / "profile", config.logging.profile_start, config.logging.profile_steps
    )
    batches = Prefetcher(
        lambda step: train_data.batch(step, train_rows), range(start, num_steps), backend.put_batch
    )
    with checkpointer, writer, progress, profiler, batches, StopSignal() as stop:
        with distributed.ends_together(), clock.phase("step"):
            for step in range(start + 1, num_steps + 1):
                with clock.phase("data wait"):
                    batch = next(batches)
                profiler.step(step - 1, state)
                state, metrics = train_step(state, batch)
                if late:
                    report(*late)
                late = (step, metrics)

                is_last = stop.reached(step) or step == num_steps
                is_eval = step == num_steps or is_due(step, config.train.eval_every)
                is_save = is_last or is_due(step, config.train.checkpoint_every)
                if is_eval or is_save:
                    report(*late)
                    late = None
                if is_eval:
                    with clock.phase("validation"):
                        scores = evaluate(state.params, len(eval_data))
                    log(step, scores)
                    is_save |= scores["eval/loss"] < best_loss
                    best_loss = min(best_loss, scores["eval/loss"])
                if is_save:
                    with clock.phase("checkpoint"):
                        if not is_eval:
                            evaluate(state.params, 1)  # nothing that diverged is saved
                        if is_main:
                            writer.flush(step)
                        checkpointer.save(state, step, scores["eval/loss"] if is_eval else None)
                if is_last:
                    break
        with clock.phase("checkpoint"):
            checkpointer.wait()

    # What a person looks at afterwards.
    if stop.requested and step < num_steps:
        print(f"stopped by {stop.requested.name} at step {step}; the same command continues")
        return 128 + stop.requested
    scores = scores or evaluate(state.params, len(eval_data))
    if is_main:
        plot_losses(workdir / "metrics.jsonl", workdir / "loss.png", title=str(workdir))
        print_results(scores, dataset, clock, eval_data)
    params = gather(state.params, backend.mesh)
    if is_main:
        write_samples(workdir, config, dataset, params)
        print(f"see loss.png and samples.txt in {workdir}")
    return 0


def resolve_attention(config: Config) -> str:
    """Names the implementation of attention in use, and refuses one that cannot run here."""
    model, compute = config.model, config.precision.compute
    platform = jax.default_backend()
    name = resolve(model.attention, platform, compute, model.context_length, model.head_size)
    return f"{name} (reference in training, for its dropout)" if model.dropout else name


def initial_state(
    config: Config,
    model: GPT,
    dataset: Dataset,
    backend: Backend,
    init_fn: Callable[[jax.Array], TrainState],
) -> TrainState:
    """Returns the state before the first step, with the weights of `train.init_from` if given."""
    if not config.train.init_from:
        return backend.init_state(init_fn, init_key(config.seed))
    params = load_initial_params(config.train.init_from, model.config, dataset.tokenizer)
    params = jax.device_get(params)
    state = backend.init_state(init_fn, init_key(config.seed))
    return state.replace(params=jax.device_put(params, backend.state_shardings(state).params))


def is_due(step: int, every: int) -> bool:
    """Says whether something that happens every so many steps (0: never) happens at this one."""
    return every > 0 and step % every == 0


def write_samples(workdir: Path, config: Config, dataset: Dataset, params: Any) -> None:
    """Lets the model write a few texts from nothing, into samples.txt."""
    tokenizer = dataset.tokenizer
    first = 0 if tokenizer.eot is None else tokenizer.eot
    texts = generate(
        params,
        config.gpt(),
        [[first]] * 3,
        max_new_tokens=min(256, config.model.context_length - 1),
        sampling=Sampling(temperature=0.8, top_k=50),
        seed=config.seed,
        eot=tokenizer.eot,
        vocab_size=tokenizer.vocab_size,
    )
    rule = "\n" + "-" * 80 + "\n"
    text = rule.join(map(tokenizer.decode, texts)) + "\n"
    run_files.write_text(workdir / "samples.txt", text)


def print_results(
    scores: dict[str, float], dataset: Dataset, clock: StepClock, eval_data: ValidationLoader
) -> None:
    """Prints the end of a run: where the time went, and how good the model is."""
    print(f"time: {clock.describe_shares()}")
    line = f"validation loss {scores['eval/loss']:.4f}, perplexity {scores['eval/perplexity']:.2f}"
    if "eval/bits_per_byte" in scores:
        zlib = f"zlib -9 needs {dataset.zlib_bits_per_byte:.3f} for the same text"
        line += f", {scores['eval/bits_per_byte']:.3f} bits per byte ({zlib})"
    if not eval_data.is_whole:
        line += f", on the first {len(eval_data)} of the split's batches"
    print(line)


class DivergedError(UserError):
    """The loss of a step is not finite."""

    exit_code = 3

    def __init__(self, step: int, workdir: Path, checkpointer: Checkpointer):
        checkpointer.wait()
        last = latest_step(workdir)
        super().__init__(
            f"the loss is not finite at step {step}",
            f"Start a new run with a lower --config.optim.learning_rate and "
            f"--config.train.init_from=run:{workdir}@{last}, the last good checkpoint"
            if last
            else "Lower --config.optim.learning_rate; there is no checkpoint yet",
        )


if __name__ == "__main__":
    cli.run(main, default_config="quickstart")
