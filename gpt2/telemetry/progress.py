"""What the person at the terminal sees within the loop: a bar, or lines.

On a terminal rich draws them. Elsewhere (a file, a pipe, a CI log) they are plain lines.
"""

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from gpt2.errors import tell, unheard
from gpt2.telemetry.event_file import Writer
from gpt2.utils.terminal import on_terminal
from gpt2.utils.text import format_bytes, format_duration, format_rate

# How each metric reads in a line, in this order; others appear only in metrics.jsonl.
_SHOWN = {
    "train/loss": lambda value: f"loss {value:.4f}",
    "train/learning_rate": lambda value: f"lr {value:.2e}",
    "train/grad_norm": lambda value: f"grad {value:.2f}",
    "eval/loss": lambda value: f"val loss {value:.4f}",
    "eval/perplexity": lambda value: f"perplexity {value:,.2f}",
    "eval/bits_per_byte": lambda value: f"bits/byte {value:.4f}",
    "perf/tokens_per_second": lambda value: f"{format_rate(value)} tokens/s",
    "perf/mfu": lambda value: f"MFU {value:.1%}",
    "perf/peak_memory_bytes": lambda value: f"peak {format_bytes(value)}",
}
# What stands beside the bar, as far as there is space.
_ON_BAR = ("train/loss", "eval/loss", "perf/tokens_per_second", "perf/mfu")
_BAR = 12  # characters that stay for it


def format_metrics(metrics: Mapping[str, float], names: tuple[str, ...] = tuple(_SHOWN)) -> str:
    """Writes the metrics that a line shows, such as `loss 3.2145 | lr 6.00e-04`."""
    return " | ".join(_SHOWN[name](metrics[name]) for name in names if name in metrics)


@contextlib.contextmanager
def told_if_slow(text: str, *, silent: bool = False) -> Iterator[None]:
    """Shows on a terminal what goes on and for how long; elsewhere it is a line."""
    if on_terminal() and not silent:
        from rich.progress import Progress as Shown
        from rich.progress import TextColumn, TimeElapsedColumn

        with Shown(TextColumn(text), TimeElapsedColumn(), transient=True) as shown:
            shown.add_task(text, total=None)
            yield
        return
    if not silent:
        tell(text, sys.stdout)
    yield


class Progress(Writer):
    """Shows how far a run is; a context manager.

    On a terminal a bar stays at the bottom, with the newest figures and the time left, and each
    validation prints a line above it. Elsewhere each write that carries metrics prints one line. A
    screen that is gone ends no run: what it cannot show is lost.
    """

    def __init__(self, total: int, start: int = 0):
        self._total, self._start = total, start
        self._newest: dict[str, float] = {}
        self._ends = -math.inf  # as the newest line of steps estimates, by `time.perf_counter`
        self._live = self._make_bar() if on_terminal() else None

    def _make_bar(self) -> Any:
        from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn
        from rich.progress import Progress as Shown
        from rich.table import Column
        from rich.text import Text

        class Figures(ProgressColumn):
            def render(_, task: Any) -> Text:
                return Text(self._figures(bar.console.width - 2 * len(str(self._total)) - 3))

        count, figures = (Column(no_wrap=True) for _ in range(2))  # the bar gives way
        columns = MofNCompleteColumn(table_column=count), BarColumn(None), Figures(figures)
        bar = Shown(*columns, expand=True, refresh_per_second=2)
        bar.add_task("", total=self._total, completed=self._start)
        return bar

    def _figures(self, width: int) -> str:
        """Returns the newest metrics and the time left, beside which a bar has space."""
        names = [name for name in _ON_BAR if name in self._newest]
        seconds = self._ends - time.perf_counter()
        left = f"{format_duration(max(0.0, seconds))} left" if math.isfinite(seconds) else ""
        while True:
            figures = filter(None, [format_metrics(self._newest, tuple(names)), left])
            text = " | ".join(figures)
            if len(text) + _BAR <= width or not names:
                return text
            names.pop()

    def __enter__(self) -> "Progress":
        self._began = time.perf_counter()
        if self._live:
            with unheard(sys.stdout):
                self._live.start()
        return self

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._live:
            with unheard(sys.stdout):
                self._live.stop()

    def step(self, step: int) -> None:
        """Moves the bar, which another thread draws twice a second."""
        if self._live:
            self._live.update(self._live.task_ids[0], completed=step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Moves to `step` and shows its metrics, which are named as in metrics.jsonl."""
        self._newest.update(metrics)
        now = time.perf_counter()
        # A validation would count as if each step brought one.
        if step > self._start and ("eval/loss" not in metrics or self._ends < now):
            each = (now - self._began) / (step - self._start)
            self._ends = now + each * (self._total - step)
        line = format_metrics(metrics)
        if line and (not self._live or "eval/loss" in metrics):
            count = f"step {step:>{len(str(self._total))}}/{self._total}"
            seconds = max(0.0, self._ends - now) if step < self._total else 0.0
            has_left = math.isfinite(self._ends) and not self._live
            left = [f"{format_duration(seconds)} left"] if has_left else []
            self.say(" | ".join([count, line, *left]))

    def say(self, text: str) -> None:
        """Prints a line of its own, above the bar if there is one."""
        if self._live:
            with unheard(sys.stdout):
                self._live.console.print(text, markup=False, highlight=False)
        else:
            tell(text, sys.stdout)
