"""What the person at the terminal sees: a screen before the loop, a bar or lines within it.

On a terminal rich draws them. Elsewhere (a file, a pipe, a CI log) they are plain lines.
"""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping

from gpt2.errors import tell, unheard
from gpt2.telemetry.event_file import Histogram
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
_SHORTEST_BAR, _LONGEST_BAR = 4, 16  # characters
_ON_BAR = ("train/loss", "eval/loss", "perf/tokens_per_second", "perf/mfu")


def format_metrics(metrics: Mapping[str, float], names: tuple[str, ...] = tuple(_SHOWN)) -> str:
    """Writes the metrics that a line has room for, such as `loss 3.2145 | lr 6.00e-04`."""
    return " | ".join(_SHOWN[name](metrics[name]) for name in names if name in metrics)


@contextlib.contextmanager
def told_if_slow(text: str, seconds: float = 1.0, *, silent: bool = False) -> Iterator[None]:
    """Prints a line if the body takes longer, such as a compilation that no cache saves.

    Args:
        text: the line.
        seconds: how long it may take in silence.
        silent: whether to print nothing, as in all processes but the first.
    """
    timer = threading.Timer(seconds, tell, (text, sys.stdout))
    timer.daemon = True
    if not silent:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Progress:
    """Shows how far a run is; a context manager.

    On a terminal a bar stays at the bottom, with the newest loss, validation loss, tokens/s, MFU
    and time left. Each validation prints a line above it, which leaves the time left to the bar.
    Elsewhere each write that carries metrics prints one line. A screen that is gone ends no run:
    what it cannot show is lost.

    Args:
        total: the step at which the run ends.
        start: the step from which it continues.
    """

    def __init__(self, total: int, start: int = 0):
        self._total, self._start = total, start
        self._newest: dict[str, float] = {}
        self._ends = -math.inf  # as the newest line of steps estimates, by `time.perf_counter`
        self._bar = _Bar(total, start) if on_terminal() else None
        self._live = _make_live(self._bar) if self._bar else None

    def __enter__(self) -> "Progress":
        self._began = time.perf_counter()
        if self._live:
            with unheard(sys.stdout):
                self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            with unheard(sys.stdout):
                self._live.stop()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Moves to `step` and shows its metrics, which are named as in metrics.jsonl."""
        self._newest.update(metrics)
        seconds = self._seconds_left(step, "eval/loss" in metrics)
        left = f"{format_duration(seconds)} left" if math.isfinite(seconds) else ""
        if self._bar:
            self._bar.show(step, dict(self._newest), left)
            left = ""  # which the bar shows
        line = format_metrics(metrics)
        if line and (not self._bar or "eval/loss" in metrics):
            count = f"step {step:>{len(str(self._total))}}/{self._total}"
            self._print(" | ".join(filter(None, (count, line, left))))

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Does nothing: a line has no room for them."""

    def say(self, text: str) -> None:
        """Prints a line of its own, above the bar if there is one."""
        self._print(text)

    def flush(self, step: int) -> None:
        """Does nothing: what is written is on the screen."""

    def _print(self, text: str) -> None:
        if self._live:
            with unheard(sys.stdout):
                self._live.console.print(text, markup=False, highlight=False)
        else:
            tell(text, sys.stdout)

    def _seconds_left(self, step: int, is_validation: bool) -> float:
        """Estimates by the steps so far. A validation would count as if each step brought one."""
        if step >= self._total:
            return 0.0
        if step <= self._start:
            return math.inf
        now = time.perf_counter()
        if not is_validation or self._ends < now:
            self._ends = now + (now - self._began) / (step - self._start) * (self._total - step)
        return self._ends - now


class _Bar:
    """The line at the bottom: a bar, the steps, the newest metrics and the time left.

    Where the terminal is narrow the bar shrinks first and then goes. Next go metrics, the last one
    first. The steps and the time left always stay.
    """

    def __init__(self, total: int, start: int):
        self._total = total
        self.show(start, {}, "")

    def show(self, step: int, metrics: Mapping[str, float], left: str) -> None:
        """Takes what the next refresh shows, which comes in another thread."""
        self._shown = step, metrics, left

    def __rich_console__(self, console, options):
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        step, metrics, left = self._shown
        count = f"{step:>{len(str(self._total))}}/{self._total}"
        names = [name for name in _ON_BAR if name in metrics]
        while True:
            parts = [count, format_metrics(metrics, tuple(names)), left]
            room = options.max_width - len(" ".join(filter(None, parts)))
            if room >= 0 or not names:
                break
            names.pop()
        if (width := min(_LONGEST_BAR, room - 1)) >= _SHORTEST_BAR:
            yield ProgressBar(total=self._total, completed=step, width=width)
            yield Text(" ", end="")
        styled = zip(parts, ("green", "", "cyan"), strict=True)
        yield Text(" ").join(Text(part, style) for part, style in styled if part)


def _make_live(bar: _Bar):
    from rich.live import Live

    return Live(bar, refresh_per_second=4)
