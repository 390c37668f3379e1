"""Trains runs of a sweep that differ in numbers alone (see groups.py) as one program.

    python -m gpt2.lab.ablate.together FOLDER...

A step is train.py's own, mapped over places: each holds the state, the batch and the numbers of one
run. Between steps, each run does what train.py would do for it alone, in files of its own. Where
there are more runs than places, one wave follows another.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, redirect_stdout
from functools import partial
from operator import itemgetter
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import train
from gpt2 import cli
from gpt2.config import Config, load_config, option
from gpt2.data import Dataset, prepare
from gpt2.errors import DivergedError, log
from gpt2.lab.ablate.groups import NUMBERS
from gpt2.lab.ablate.runs import Outcome
from gpt2.parallel import find_devices
from gpt2.parallel.compiled import compile_once
from gpt2.signals import StopSignal
from gpt2.telemetry import Reporter, StepClock
from gpt2.training import Batches, Checkpointer, TrainState, validate
from gpt2.training import workdir as folder
from gpt2.training.steps import Batch, Metrics
from gpt2.utils.files import write_json
from gpt2.utils.platform import platform_of
from gpt2.utils.trees import Tree

_MEMORY = 0.9  # of a device, that a step may take


def numbers_of(config: Config) -> dict[str, np.ndarray]:
    """Returns the numbers that a program takes from outside."""
    return {name: np.array(option(config, name)) for name in NUMBERS}


def with_numbers(config: Config, numbers: Mapping[str, jax.Array]) -> Config:
    """Returns a config with arrays in place of numbers, which no check can look at."""
    config = copy.deepcopy(config)
    for name, value in numbers.items():
        group, _, field = name.rpartition(".")
        object.__setattr__(option(config, group) if group else config, field, value)
    return config


def map_runs(
    function: Callable,
    each: NamedSharding,
    width: int,
    donated: tuple[int, ...] = (),
) -> Callable:
    """Jits a function over the leading axis of its arguments, so many of which a device has.

    One alone computes as if it were not mapped.
    """

    def on_device(*trees: Tree) -> Tree:
        if width > 1:
            return jax.vmap(function)(*trees)
        own = jax.tree.map(itemgetter(0), trees)
        return jax.tree.map(lambda x: x[None], function(*own))

    mapped = jax.shard_map(
        on_device,
        mesh=each.mesh,
        in_specs=each.spec,
        out_specs=each.spec,
        check_vma=False,
    )
    return jax.jit(mapped, in_shardings=each, donate_argnums=donated)


class Places:
    """The states of runs, `[places, ...]` over all devices, and the programs mapped over them.

    A CPU's device has one place, for batched products are slower there than one after another. On
    an accelerator all runs have one, or as many as its memory holds.
    """

    def __init__(
        self,
        configs: Sequence[Config],
        devices: Sequence[jax.Device],
        dataset: Dataset,
    ):
        self._first = configs[0]
        self.dataset = dataset
        mesh = Mesh(np.array(devices), ("runs",))
        self._each = NamedSharding(mesh, PartitionSpec("runs"))
        self.program = train.make_program(self._first, devices[:1])
        self._batches = Batches(self._first, dataset, self.program.backend)
        memory = devices[0].memory_stats() or {}
        most = _MEMORY * memory.get("bytes_limit", math.inf)
        is_cpu = platform_of(devices[0]) == "cpu"
        width = 1 if is_cpu else math.ceil(len(configs) / len(devices))
        self._compile(width)
        while width > 1 and self.train_step.peak_bytes > most:
            width = math.ceil(width / 2)
            self._compile(width)

    def _compile(self, width: int) -> None:
        """Compiles train and eval step of so many places on each device."""
        self.number = width * self._each.mesh.size

        def step(
            state: TrainState, given: tuple[dict[str, jax.Array], Batch]
        ) -> tuple[TrainState, Metrics]:
            numbers, batch = given
            config = with_numbers(self._first, numbers)
            return self.program.with_config(config).train_step(state, batch)

        examples, eval_batch = self._batches.examples()
        (self._example,) = examples.values()
        states = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.number, *x.shape), x.dtype),
            self.program.state_shapes,
        )
        mapped = map_runs(step, self._each, width, donated=(0,))
        given = self._stack([(numbers_of(self._first), self._example)])
        self.train_step = self.program.compile(mapped, states, given)
        mapped = map_runs(self.program.eval_step, self._each, width)
        batches = self._stack([eval_batch])
        self._eval_step = compile_once(mapped, states.eval_params, batches)

    def _stack(self, trees: Sequence[Tree]) -> Tree:
        """Puts trees in the first places; those that are left repeat the last one."""
        left = self.number - len(trees)
        each = [*trees, *left * [trees[-1]]]
        stacked = jax.tree.map(lambda *x: np.stack(x), *each)
        return jax.device_put(stacked, self._each)

    def begin(self, configs: Sequence[Config], states: Sequence[TrainState]) -> None:
        """Gives the first places to runs."""
        self._numbers = self._stack([numbers_of(config) for config in configs])
        self._states = self._stack(states)

    def state(self, place: int) -> TrainState:
        """Returns the state of a place, on the first device."""
        # Of all places: arrays keep what they gave.
        states = jax.device_get(self._states)
        return jax.device_put(_at(place, states), self._each.mesh.devices[0])

    def step(self, batches: Mapping[int, Batch]) -> Metrics:
        """Takes a step in all places, of which some have a run's batch."""
        each = [batches.get(place, self._example) for place in range(self.number)]
        given = self._numbers, self._stack(each)
        self._states, metrics = self.train_step(self._states, given)
        return metrics

    def score(self, num_batches: int) -> list[dict[str, float]]:
        """Returns the scores of each place on held-out text; 0: all batches of a validation."""
        held_out, targets_per_byte = self._batches.validation(num_batches)
        params = self._states.eval_params
        sums = {}
        for part, (share, batches) in held_out.items():
            found = []
            for batch in batches:
                given = self._eval_step(params, self._stack([batch]))
                found.append(jax.device_get(given))
            sums[part] = share, found
        scores = []
        for place in range(self.number):
            # A place takes its part of what each batch has given.
            scores.append(validate(_at, place, sums, targets_per_byte))  # type: ignore[arg-type]
        return scores


def _at(place: int, tree: Tree) -> Tree:
    return jax.tree.map(itemgetter(place), tree)


class Member:
    """A run in its place, and what train.py holds for one."""

    def __init__(self, path: Path, places: Places):
        self.config = config = load_config(path)
        self._path = path
        dataset = places.dataset
        workdir = path / "run"
        program = places.program.with_config(config)
        options = config.train
        folder.check_options(workdir, config)
        folder.check_data(workdir, dataset)
        start = folder.find_start(workdir)
        folder.begin(workdir, config, dataset, start)
        self.files = ExitStack()
        enter = self.files.enter_context
        self.log = enter((path / "log.txt").open("a"))
        batches = Batches(config, dataset, program.backend)
        self.upcoming = enter(closing(batches.train(start, options.num_steps)))
        self.clock = StepClock.for_run(
            config, program.flops_per_token, places.number, time.perf_counter()
        )
        self._finish = partial(
            folder.finish,
            workdir,
            program,
            tokenizer=dataset.tokenizer,
            clock=self.clock,
        )
        self.checkpointer = enter(
            Checkpointer(workdir, options.keep_checkpoints, options.keep_every)
        )
        self.reporter = enter(Reporter.for_run(config, self.clock, workdir, start))
        steps = {config.shapes.last: (places.train_step, lambda *_: None)}
        log(program.describe(batches, steps, start), self.log)
        if start:
            state = self.checkpointer.restore(start, program)
        else:
            state = train.first_state(program, dataset)
        self.first_state = jax.device_get(state)  # a device has no room for all twice

    def keep(
        self,
        step: int,
        state: Callable[[], TrainState],
        scores: dict[str, float],
        *,
        validates: bool,
        saves: bool,
    ) -> None:
        """Judges the newest state; writes its scores and saves it where that is due."""
        loss = scores["eval/loss"]
        if not math.isfinite(loss):
            raise DivergedError(step, "the validation loss is", before=False)
        if validates:
            self.reporter.write(step, scores)
            saves = self.checkpointer.improves(loss) or saves
        if saves:
            self.reporter.flush(step)
            self.checkpointer.save(state(), step, scores if validates else None)

    def finish(self, state: TrainState, scores: Mapping[str, float]) -> None:
        """Writes the last files, as train.py does."""
        self.checkpointer.wait()
        self.checkpointer.raise_failure()
        with redirect_stdout(self.log):
            self._finish(params=state.eval_params, scores=scores)
        self.leave(Outcome("finished"))

    def leave(self, outcome: Outcome) -> None:
        """Closes its files, and keeps how it ended."""
        if outcome.error:
            log(outcome.error, self.log)
        self.files.close()
        write_json(self._path / "outcome.json", outcome._asdict())


@contextlib.contextmanager
def phase(members: Iterable[Member], name: str) -> Iterator[None]:
    """Charges the time of runs to a phase."""
    with ExitStack() as stack:
        for member in members:
            stack.enter_context(member.clock.phase(name))
        yield


def train_wave(
    places: Places, wave: Sequence[Member], step: int, stop: StopSignal
) -> int:
    """Trains runs that stand at a step, as the loop of train.py does, and returns the exit code.

    One that diverges leaves, and its place is dead weight.
    """
    here = dict(enumerate(wave))
    options = wave[0].config.train
    late = list[Metrics]()  # of the newest step, until it is reported
    scores: list[dict[str, float]] = []
    stops = False

    @contextlib.contextmanager
    def judged(place: int) -> Iterator[Member]:
        try:
            with redirect_stdout(here[place].log):
                yield here[place]
        except DivergedError as error:
            here.pop(place).leave(Outcome("diverged", str(error)))

    def catch_up() -> None:
        while late:
            values = jax.device_get(late.pop())
            for place in list(here):
                with judged(place) as member:
                    member.reporter.step(step, _at(place, values))
                    member.reporter.catch_up()

    configs = [member.config for member in wave]
    places.begin(configs, [member.first_state for member in wave])
    with phase(wave, "step"):
        while here and step < options.num_steps and not stops:
            batches = {place: next(here[place].upcoming) for place in here}
            metrics = places.step(batches)
            catch_up()  # while the devices compute
            step += 1
            late.append(metrics)
            stops = stop.reached(step)
            validates = options.is_due(step, options.eval_every)
            saves = stops or options.is_due(step, options.checkpoint_every)
            if not validates and not saves:
                continue
            catch_up()
            with phase(here.values(), "validation"):
                scores = places.score(0 if validates else 1)
            with phase(here.values(), "checkpoint"):
                for place in list(here):
                    state = partial(places.state, place)
                    with judged(place) as member:
                        member.keep(
                            step, state, scores[place], validates=validates, saves=saves
                        )

    if stop.requested and stops:
        for member in here.values():
            member.files.close()
        return 128 + stop.requested
    scores = scores or places.score(0)  # killed after the last checkpoint
    for place, member in here.items():
        member.finish(places.state(place), scores[place])
    return 0


def main(*paths: str) -> int:
    """Trains the runs of some folders, and returns the exit code."""
    folders = [Path(path) for path in paths]
    configs = list(map(load_config, folders))
    devices = find_devices(configs[0])
    dataset = prepare(configs[0].data)
    places = Places(configs, devices, dataset)
    starts = {path: folder.find_start(path / "run") for path in folders}
    with StopSignal() as stop:
        for start in sorted(set(starts.values())):
            alike = [path for path in folders if starts[path] == start]
            for begin in range(0, len(alike), places.number):
                wave = []
                for path in alike[begin : begin + places.number]:
                    wave.append(Member(path, places))
                code = train_wave(places, wave, start, stop)
                if code:
                    return code
    return 0


if __name__ == "__main__":
    cli.run(main, takes_files=True)
