"""Signals at random moments of a run."""

import dataclasses
import re
import signal
from collections import Counter
from collections.abc import Iterator

from tests.faults.laboratory import (
    PHASES,
    Broken,
    Laboratory,
    Row,
    Watched,
    attempt,
    check_start,
    newest_saved,
)

STEPS = 440  # so many that signals run out first
IN_LOOP = ("step", "validation", "save")
# Seconds of a phase that may pass before a signal: about as many as it lasts.
DELAYS = {
    **{"start": (0.3, 1.5), "preparation": (0.0, 0.5), "compile": (0.0, 3.0), "step": (0.0, 0.3)},
    **{"validation": (0.0, 0.3), "save": (0.0, 0.1), "report": (0.0, 0.6)},
}


def kills(lab: Laboratory) -> Iterator[Row]:
    """Kills one run 40 times."""
    yield send(lab, signal.SIGKILL, 40)


def terminations(lab: Laboratory) -> Iterator[Row]:
    """Asks one run 10 times to end."""
    yield send(lab, signal.SIGTERM, 10)


def interrupts(lab: Laboratory) -> Iterator[Row]:
    """Interrupts one run 10 times, as Ctrl-C does."""
    yield send(lab, signal.SIGINT, 10)


def send(lab: Laboratory, number: signal.Signals, times: int) -> Row:
    """Sends a signal to one run, so many times, and says in which phases it came."""
    workdir, hits, times = lab.directory / number.name, Counter[str](), min(times, lab.most)
    data_dir = lab.directory / f"{number.name}-data"
    # Programs are compiled, and kept, while signals come.
    cold = {"JAX_COMPILATION_CACHE_DIR": str(lab.directory / f"{number.name}-cache")}

    def make() -> float:
        longest, saved, moments = 0.0, 0, list(plan(lab, times))
        for phase, delay in moments:
            cache = cold if phase == "compile" else {}
            with lab.run(workdir, STEPS, data_dir=data_dir, **cache) as run:
                hits[strike(run, number, phase, delay, saved)] += 1
            longest, saved = max(longest, run.quiet), newest_saved(workdir)
        if missed := {phase for phase, _ in moments} - hits.keys():
            raise Broken(f"no signal came in {', '.join(missed)}")
        return max(longest, lab.finish(workdir, STEPS, saved, data_dir=data_dir))

    row = attempt(f"{number.name} at random moments", times, make)
    often = ", ".join(f"{phase} {hits[phase]}" for phase in PHASES if hits[phase])
    return dataclasses.replace(row, often=f"{times}: {often}")


def plan(lab: Laboratory, times: int) -> Iterator[tuple[str, float]]:
    """Yields the phase of each signal, and how many seconds of it pass before.

    A text is prepared first and reported last. The first signal of a phase comes as it begins.
    """
    ends = max(1, times // 8)
    others = [phase for phase in PHASES if phase not in ("preparation", "report")]
    between = [others[i % len(others)] for i in range(max(times - 2 * ends, 0))]
    lab.random.shuffle(between)
    seen = {"start"}  # as it begins, there is no Python yet
    for phase in ["preparation"] * ends + between + ["report"] * ends:
        yield phase, lab.random.uniform(*DELAYS[phase]) if phase in seen else 0.0
        seen.add(phase)


def strike(run: Watched, number: signal.Signals, phase: str, delay: float, saved: int) -> str:
    """Sends a signal after a phase has lasted `delay` seconds, and returns the phase it came in.

    Raises:
        Broken: the run does not end as it should, or did not begin from step `saved`.
    """
    if phase != "start":
        run.until_phase(phase)
    run.pause(delay)
    run.stop()  # or the phase could change while it is looked at
    hit, shown = run.phase(), newest_saved(run.workdir)
    run.process.send_signal(number)
    run.go_on()
    code = 128 + number
    codes = {signal.SIGKILL: [-number], signal.SIGINT: [code]}.get(number, [code, -number])
    # Where no step is left, the run ends as it would have.
    ends_anyway = hit == "report" and number != signal.SIGKILL
    run.wait(*codes, *([0] if ends_anyway else []))
    if hit not in ("start", "preparation"):
        check_start(run.workdir, saved)
    told = re.search(r"stopped by \w+ at step (\d+)", run.stdout())
    if number != signal.SIGKILL and run.shows_steps() and hit in IN_LOOP and not told:
        raise Broken(f"{number.name} in {hit} did not stop it after its step: {run.stderr()!r}")
    if newest_saved(run.workdir) < max(shown, int(told[1]) if told else 0):
        raise Broken(f"what was saved in {hit} is gone")
    return hit
