"""What a person sees within the loop: a bar on a terminal, elsewhere (a file, a pipe) lines."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import jax
from rich import progress as bars
from rich.console import Console
from rich.table import Column

from gpt2.errors import tell, unheard
from gpt2.telemetry.writers import Writer
from gpt2.utils.text import format_bytes, format_count, format_duration

# How each metric reads in a line, in this order; others appear only in metrics.jsonl.
_SHOWN = {
    "train/loss": lambda value: f"loss {value:.4f}",
    "train/learning_rate": lambda value: f"lr {value:.2e}",
    "train/grad_norm": lambda value: f"grad {value:.2f}",
    "eval/loss": lambda value: f"val loss {value:.4f}",
    "eval/perplexity": lambda value: f"perplexity {value:,.2f}",
    "eval/bits_per_byte": lambda value: f"bits/byte {value:.4f}",
    "perf/tokens_per_second": lambda value: f"{format_count(value)} tokens/s",
    "perf/mfu": lambda value: f"MFU {value:.1%}",
    "perf/peak_memory_bytes": lambda value: f"peak {format_bytes(value)}",
}
_ON_BAR = ("train/loss", "perf/tokens_per_second", "perf/mfu")


def _format(metrics: Mapping[str, float], names: Iterable[str] = _SHOWN) -> str:
    return " | ".join(_SHOWN[name](metrics[name]) for name in names if name in metrics)


def timed(text: str) -> AbstractContextManager:
    """Shows what goes on, and on a terminal for how long; in the first process alone."""
    is_first, draws = jax.process_index() == 0, _on_terminal()
    if is_first and not draws:
        tell(text, sys.stdout)
    columns = bars.TextColumn(text), bars.TimeElapsedColumn()
    shown = bars.Progress(*columns, transient=True, disable=not (is_first and draws))
    shown.add_task("", total=None)
    return shown


def _on_terminal() -> bool:
    return sys.stdout.isatty() and Console().is_interactive  # FORCE_COLOR fakes this


class Progress(Writer):
    """Shows how far a run is: a bar with the newest figures, and a line for each validation above.

    Where there is no terminal, all metrics print lines. Time goes with the `work` of so many steps.
    """

    def __init__(self, total: int, start: int = 0, work: Callable[[int], float] = float):
        self._total, self._start, self._began = total, start, time.perf_counter()
        self._work, self._draws = work, _on_terminal()
        count, figures, left = (Column(no_wrap=True) for _ in range(3))  # the bar gives way
        self._bar = bars.Progress(
            bars.SpinnerColumn("line", speed=0.25),  # moves within a long step, too
            bars.TextColumn("{task.fields[count]}", table_column=count),
            bars.BarColumn(None),
            bars.TextColumn("{task.fields[figures]}", table_column=figures),
            bars.TimeRemainingColumn(table_column=left),
            expand=True,
            refresh_per_second=2,
            speed_estimate_period=3600,
            disable=not self._draws,
        )
        self._task = self._bar.add_task("", total=work(total), figures="")
        self.step(start)
        with unheard(sys.stdout):
            self._bar.start()

    def close(self) -> None:
        """Leaves the bar as it is."""
        with unheard(sys.stdout):
            self._bar.stop()

    def step(self, step: int) -> None:
        """Moves the bar, which another thread draws twice a second."""
        count = f"{step:>{len(str(self._total))}}/{self._total}"
        self._bar.update(self._task, completed=self._work(step), count=count)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a step, which are named as in metrics.jsonl."""
        line, is_validation = _format(metrics), any(name.startswith("eval/") for name in metrics)
        if is_validation and not line:  # of tasks, whose names are their own
            line = " | ".join(f"{name[5:]} {value:.4g}" for name, value in metrics.items())
        if figures := _format(metrics, _ON_BAR[: self._bar.console.width // 26]):  # 3 on 80
            self._bar.update(self._task, figures=figures)
        if line and (is_validation or not self._draws):
            parts = [f"step {step:>{len(str(self._total))}}/{self._total}", line]
            if step > self._start and not is_validation:
                before, now, end = map(self._work, (self._start, step, self._total))
                left = (time.perf_counter() - self._began) / (now - before) * (end - now)
                parts.append(f"{format_duration(left)} left")
            self.say(" | ".join(parts))

    def say(self, text: str) -> None:
        """Prints a line of its own, above the bar if there is one."""
        if self._draws:
            with unheard(sys.stdout):
                self._bar.console.print(text, markup=False, highlight=False)
        else:
            tell(text, sys.stdout)
