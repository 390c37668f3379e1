"""Times steps of the quickstart with everything that guards a run, and without, in turn.

    python -m tests.overhead [--rounds=100] [--seconds=2]

Both are runs of train.py, loop and files included. One is stopped while the other works. Turns are
short and change their order, since a machine's speed drifts. It prints the ratio of their steps, by
the clock and by the CPU time of their processes: medians over rounds, with 95 % intervals. Let the
machine do nothing else. `tests.overhead_telemetry` is about profiler, metrics and screen.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from gpt2.telemetry.metrics import read_metrics
from tests.faults.laboratory import Watched
from tests.helpers import LEAST_ROUNDS, median_and_interval

OPTIONS = [f"--config.train.{option}" for option in ("num_steps=1000000", "log_every=1")]
OPTIONS += [f"--config.train.{option}=0" for option in ("eval_every", "checkpoint_every")]
FORMS = {
    "bare": ["--config.train.hang_seconds=0"],
    "guarded": ["--config.train.skip_bad_steps=2", "--config.train.skip_outliers=6"],
}
WARM = 20  # steps before the first turn


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time that a process has taken."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def play(run: Watched, seconds: float) -> tuple[float, float]:
    """Lets a stopped run work, and returns the seconds of its median step, and CPU time a step."""
    metrics = run.workdir / "metrics.jsonl"
    first, cpu = len(read_metrics(metrics)), cpu_seconds(run.process.pid)
    run.go_on()
    time.sleep(seconds)
    run.stop()
    steps = read_metrics(metrics)[first:]
    if len(steps) < 5:
        raise SystemExit(f"{len(steps)} steps in {seconds:.0f} s are too few; raise --seconds")
    cpu = (cpu_seconds(run.process.pid) - cpu) / len(steps)
    # The first was cut in two by the stop before it.
    return statistics.median(step["perf/step_seconds"] for step in steps[2:]), cpu


def main() -> None:
    """Lets both forms take turns."""
    parser = argparse.ArgumentParser(prog="python -m tests.overhead", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=100, help="turns of each form")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    chosen = parser.parse_args()
    if chosen.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds={chosen.rounds} gives no interval; use {LEAST_ROUNDS} or more")
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in FORMS}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        directory, runs = Path(scratch), {}
        data_dir = Path(os.environ.get("GPT2_DATA_DIR", directory / "data"))
        for name, options in FORMS.items():
            runs[name] = stack.enter_context(
                Watched(
                    directory / name, data_dir, *OPTIONS, *options, screen=directory / f"{name}-"
                )
            )
            runs[name].until_step(WARM)
            runs[name].stop()
        for turn in range(chosen.rounds):
            for name, run in list(runs.items())[:: 1 if turn % 2 else -1]:
                turns[name].append(play(run, chosen.seconds))
    for index, kind in enumerate(("by the clock", "CPU time")):
        bare, guarded = ([turn[index] for turn in turns[name]] for name in FORMS)
        ratios = [g / b for g, b in zip(guarded, bare, strict=True)]
        print(
            f"{kind}: {1e3 * statistics.median(bare):.1f} ms bare, "
            f"{1e3 * statistics.median(guarded):.1f} ms guarded, ratio "
            f"{median_and_interval(ratios, '.4f')} in {len(ratios)} rounds"
        )


if __name__ == "__main__":
    sys.exit(main())
