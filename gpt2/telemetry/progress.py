"""The progress lines that a run prints: for logged steps, validations and scores of tasks."""

import sys
import time
from collections.abc import Callable, Sequence

from gpt2.errors import log, warn
from gpt2.telemetry.writers import Metrics, Writer
from gpt2.utils.text import format_count, format_duration

# The metrics of a progress line, in their order, and their formats. A line without MFU fits into 80
# columns.
_SHOWN = {
    "train/loss": lambda value: f"loss {value:.4f}",
    "train/learning_rate": lambda value: f"lr {value:.1e}",
    "train/grad_norm": lambda value: f"grad {value:.2f}",
    "eval/loss": lambda value: f"val loss {value:.4f}",
    "eval/perplexity": lambda value: f"perplexity {value:,.2f}",
    "eval/bits_per_byte": lambda value: f"bits/byte {value:.4f}",
    "perf/tokens_per_second": lambda value: f"{format_count(value)} tok/s",
    "perf/mfu": lambda value: f"MFU {value:.1%}",
}


class Progress(Writer):
    """A writer that prints the metrics of a step as one line.

    Args:
        total: the number of steps of the run.
        start: the step at which this process starts, more than 0 if the run is continued.
        work: a function that returns the work of the first n steps, in any unit. The remaining time
            is estimated in proportion to the work.
        names: additional metrics to print. NAME without a prefix means `train/NAME` and
            `eval/NAME`.
    """

    name = "standard output"

    def __init__(
        self,
        total: int,
        start: int,
        work: Callable[[int], float],
        names: Sequence[str],
    ):
        self._total = total
        self._start = start
        self._began = time.perf_counter()
        self._work = work
        self._names = set(names) - {""}
        self._missing = set(self._names)

    def write(self, step: int, metrics: Metrics) -> None:
        """Print the metrics of a step. Their names are the same as in metrics.jsonl."""
        shown = list[str]()
        for name, text in _SHOWN.items():
            if name in metrics:
                shown.append(text(metrics[name]))
        is_validation = any(name.startswith("eval/") for name in metrics)
        # Metrics of evaluation tasks are all printed.
        is_tasks = is_validation and not shown
        for name, value in metrics.items():
            short = name.partition("/")[2] or name
            self._missing -= {name, short}
            if is_tasks or self._names & {name, short}:
                shown.append(f"{short} {value:.4g}")
        if not shown:
            return
        if step > self._start and not is_validation:
            now = self._work(step)
            done = now - self._work(self._start)
            remaining = self._work(self._total) - now
            seconds = time.perf_counter() - self._began
            shown.append(f"{format_duration(seconds / done * remaining)} left")
        number = f"{step:>{len(str(self._total))}}"
        log("  ".join([f"step {number}/{self._total}", *shown]), sys.stdout)

    def close(self) -> None:
        """Warn about each name in `names` that the run never logged."""
        for name in sorted(self._missing):
            warn(
                f"logging.screen={name}: the run has written no metric of this name; the names are "
                "in metrics.jsonl"
            )
