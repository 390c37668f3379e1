"""Times steps of the quickstart with profiler, metrics and screen, and without, in turn.

    python -m tests.overhead_telemetry [--rounds=100] [--steps=40] [--tiny]

One run of train.py takes both kinds of turns, so that they share program, memory and batches.
Without telemetry the loop only waits for the step before. The run asks for no trace and no
statistics, and writes a line every ten steps, as by default. The command prints the ratio of a
turn's time with telemetry to that without, and what telemetry adds to a step: medians over rounds,
with 95 % intervals that assume no distribution. A model of milliseconds (`--tiny`) tells the latter
to microseconds. Let the machine do nothing else. `tests.overhead` is about guards.
"""

from gpt2 import launch

if __name__ == "__main__":
    launch.prepare_process()

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import train
from gpt2 import cli
from gpt2.profile.profiler import Profiler
from gpt2.telemetry.metrics import read_metrics
from gpt2.telemetry.reporter import Reporter
from gpt2.telemetry.throughput import StepClock
from gpt2.training import options
from tests.helpers import LEAST_ROUNDS, TINY, median_and_interval

SHAPE = [option for option in TINY if not option.startswith("--config.train.")]
WARM = 2  # turns that do not count
CLOCKS = {"by the clock": time.perf_counter, "CPU time": time.process_time}


@dataclasses.dataclass
class Turns:
    """Counts passes of the loop, and times turns.

    Attributes:
        steps: of a turn.
        done: passes so far. The first one waits for no step, and belongs to no turn.
        ends: readings of `CLOCKS` when a turn ended, the first before the first turn.
    """

    steps: int
    done: int = 0
    ends: list[tuple[float, ...]] = dataclasses.field(default_factory=list)

    @property
    def has_telemetry(self) -> bool:
        """Whether the turn under way has telemetry."""
        return has_telemetry(max(0, self.done - 1) // self.steps)

    def end_pass(self) -> None:
        """Counts a pass of the loop, and reads the clocks at the end of a turn."""
        if self.done % self.steps == 0:
            self.ends.append(tuple(clock() for clock in CLOCKS.values()))
        self.done += 1

    def seconds(self, clock: int) -> tuple[list[float], list[float]]:
        """Returns the seconds of turns with telemetry and without, by round."""
        ends = [readings[clock] for readings in self.ends]
        found: tuple[list[float], list[float]] = [], []
        for turn in range(WARM, len(ends) - 1):
            found[not has_telemetry(turn)].append(ends[turn + 1] - ends[turn])
        return found


def has_telemetry(turn: int) -> bool:
    """Returns whether a turn has telemetry: each round has one with and one without.

    Every second round has them the other way round.
    """
    return turn % 4 in (0, 3)


def switched(turns: Turns) -> dict[str, type]:
    """Returns classes for train.py by name, which do nothing in turns without telemetry."""

    class SwitchedClock(StepClock):
        def phase(self, name: str) -> Any:
            return super().phase(name) if turns.has_telemetry else contextlib.nullcontext()

    class SwitchedProfiler(Profiler):
        def step(self, step: int, in_flight: Any) -> None:
            if turns.has_telemetry:
                super().step(step, in_flight)

    class SwitchedReporter(Reporter):
        def step(self, step: int, metrics: Any, note: str = "", statistics: Any = None) -> None:
            if not turns.has_telemetry and self._late:
                jax.block_until_ready(self._late.metrics)
                self._late = None
            super().step(step, metrics, note, statistics)
            turns.end_pass()

    return dict(StepClock=SwitchedClock, Profiler=SwitchedProfiler, Reporter=SwitchedReporter)


def run(turns: Turns, rounds: int, workdir: Path, more: Sequence[str]) -> None:
    """Lets train.py take all turns, with `more` options.

    Raises:
        SystemExit: it failed, or has written lines in other turns than those with telemetry.
    """
    num_steps = turns.steps * (WARM + 2 * rounds) + 1
    given = [f"--config.train.num_steps={num_steps}", "--config.train.eval_batches=1"]
    given += [f"--config.train.{name}=0" for name in ("eval_every", "checkpoint_every")]
    sys.argv = [
        "train.py",
        f"--workdir={workdir}",
        "--config.train.hang_seconds=0",
        *given,
        *more,
    ]
    for name, switch in switched(turns).items():
        setattr(train, name, switch)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            cli.parse(options.define_flags, options.check, default_config="quickstart")
            cli.run(train.main)
    except SystemExit as end:
        if end.code:
            raise
    written = [record["step"] for record in read_metrics(workdir / "metrics.jsonl")]
    quiet = [s for s in written if s < num_steps and not has_telemetry((s - 1) // turns.steps)]
    if quiet or len(written) < rounds * turns.steps // 10:
        raise SystemExit(f"lines were written at steps {written}: the turns are not what they say")


def describe(name: str, given: Sequence[float], bare: Sequence[float], steps: int) -> str:
    """Returns the line of a clock."""
    pairs = list(zip(given, bare, strict=True))
    with_ms, without_ms = (1e3 * statistics.median(turns) / steps for turns in (given, bare))
    ratio = median_and_interval([g / b for g, b in pairs], ".4f")
    added = median_and_interval([1e6 * (g - b) / steps for g, b in pairs], ".1f")
    return (
        f"{name}: {without_ms:.2f} ms a step without telemetry, {with_ms:.2f} ms with it, ratio "
        f"{ratio}, {added} µs more, in {len(pairs)} rounds"
    )


def main() -> None:
    """Lets both forms take turns, and prints how they compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.overhead_telemetry", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=100, help="turns of each form")
    parser.add_argument("--steps", type=int, default=40, help="of a turn, a multiple of 10")
    parser.add_argument("--tiny", action="store_true", help="a model of milliseconds")
    chosen = parser.parse_args()
    if chosen.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds={chosen.rounds} gives no interval; use {LEAST_ROUNDS} or more")
    if chosen.steps < 10 or chosen.steps % 10:
        parser.error(f"--steps={chosen.steps} is not a multiple of 10")
    turns = Turns(chosen.steps)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("GPT2_DATA_DIR", f"{scratch}/data")
        run(turns, chosen.rounds, Path(scratch) / "run", SHAPE if chosen.tiny else [])
    for index, name in enumerate(CLOCKS):
        print(describe(name, *turns.seconds(index), chosen.steps))


if __name__ == "__main__":
    main()
