"""What the person at the terminal sees while a sweep trains."""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence

from gpt2.ablate.results import read_result
from gpt2.ablate.runs import Run
from gpt2.ablate.sweep import Sweep
from gpt2.ablate.tables import judge, samples
from gpt2.config import Config
from gpt2.utils.terminal import on_terminal
from gpt2.utils.text import counted, format_duration

_REFRESH_SECONDS = 2.0
_END_BYTES = 4096  # of metrics.jsonl, which hold its last lines


class Screen:
    """Shows runs as they end, the time left, and the verdicts so far; a context manager.

    On a terminal a table stays at the bottom. Elsewhere each end of a run prints a line.

    Args:
        sweep: what is trained.
        runs: all runs of this phase.
        title: of the phase.
        step_cost: what a step of a config costs beside those of others, such as its FLOPs.
    """

    def __init__(
        self,
        sweep: Sweep,
        runs: Sequence[Run],
        title: str,
        step_cost: Callable[[Config], float],
    ):
        self._sweep, self._runs, self._title = sweep, list(runs), title
        self._costs = {run.folder: step_cost(run.config) for run in self._runs}
        self._states = {run.folder: run.outcome().state for run in self._runs}
        self._began, self._spent_before = time.monotonic(), self._spent()
        self._drawn, self._ended_runs = 0.0, sum(map(self._ended, self._runs))
        self._before = self._ended_runs
        self._live = _make_live() if on_terminal() else None

    def __enter__(self) -> "Screen":
        before = f", {self._before} ended before" if self._before else ""
        print(f"{self._title}: {counted(len(self._runs), 'run')}{before}", flush=True)
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, training: list[Run]) -> None:
        """Shows what has ended since the last call, and every few seconds what is under way."""
        ended = []
        for run in self._runs:
            if (state := run.outcome().state) != self._states[run.folder]:
                self._states[run.folder] = state
                if state == "waiting":  # another try of a run that failed
                    self._ended_runs -= 1
                else:
                    ended.append(run)
        for run in ended:
            self._print(self._line(run))
        if self._live and (ended or time.monotonic() - self._drawn > _REFRESH_SECONDS):
            self._drawn = time.monotonic()
            self._live.update(self._table(training), refresh=True)

    def _line(self, run: Run) -> str:
        self._ended_runs += 1
        number = min(self._ended_runs, len(self._runs))
        outcome = run.outcome()
        if outcome.state == "finished":
            score = read_result(run, self._sweep.score).score(self._sweep.score)
            what = f"{score:.4f} {self._sweep.unit}"
        else:
            what = f"{outcome.state}: {outcome.error}"
        left = self._left()
        return f"{number}/{len(self._runs)}  {run.label}  {what}" + (f"  {left}" if left else "")

    def _spent(self) -> float:
        """Returns what the steps that all runs have trained cost."""
        return sum(self._costs[run.folder] * _steps(run) for run in self._runs)

    def _left(self) -> str:
        """Returns the time left in words: none before a step tells, and none after the last one.

        Runs that have trained their last step still save and draw.
        """
        seconds = self._seconds_left()
        known = math.isfinite(seconds) and round(seconds) > 0
        return f"{format_duration(seconds)} left" if known else ""

    def _seconds_left(self) -> float:
        spent, total = self._spent(), 0.0
        for run in self._runs:
            steps = _steps(run) if self._ended(run) else run.config.train.num_steps
            total += self._costs[run.folder] * steps
        done = spent - self._spent_before
        elapsed = time.monotonic() - self._began
        return elapsed / done * (total - spent) if done else float("inf")

    def _ended(self, run: Run) -> bool:
        return self._states[run.folder] != "waiting"

    def _table(self, training: list[Run]):
        from rich.table import Table
        from rich.text import Text

        results = self._sweep.results() if not self._runs[0].chooses else []
        verdicts = judge(self._sweep, results) if results else {}
        scores = samples(self._sweep, results) if results else {}
        states = Counter(self._states.values())
        broken = states["failed"] + states["diverged"]
        table = Table(
            title=f"{self._title}: {states['finished']} of {counted(len(self._runs), 'run')} done"
            + (f", {broken} broke" if broken else "")
            + (f", {left}" if (left := self._left()) else ""),
            title_justify="left",
            box=None,
            pad_edge=False,
        )
        table.show_header = bool(scores)
        for column in ("arm", "runs", "mean", "difference", "so far"):
            table.add_column(column, justify="left" if column in ("arm", "so far") else "right")
        for name, sample in scores.items():
            values = list(sample.scores.values())
            verdict = verdicts.get(name)
            table.add_row(
                Text(name),
                str(len(values)),
                f"{sum(values) / len(values):.4f}" if values else "-",
                f"{verdict.difference:+.4f}" if verdict and values else "",
                verdict.words if verdict and values else "",
            )
        for run in training:
            done = f"step {_steps(run)}/{run.config.train.num_steps}"
            table.add_row(Text(run.label, "cyan"), "", "", "", Text(done, "cyan"))
        return table

    def _print(self, text: str) -> None:
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)


def _steps(run: Run) -> int:
    """Returns the last step that a run has logged; reads the end of its file only."""
    path = run.workdir / "metrics.jsonl"
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _END_BYTES))
        *_, steps = [b"0", *re.findall(rb'^{"step": (\d+)', file.read(), re.MULTILINE)]
    return int(steps)


def _make_live():
    from rich.live import Live

    return Live(auto_refresh=False)
