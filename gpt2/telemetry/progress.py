"""What a person sees within the loop: a line for each line of metrics."""

import sys
import time
from collections.abc import Callable, Mapping

from gpt2.errors import tell
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


class Progress(Writer):
    """Prints metrics as lines. What a screen cannot show is lost.

    `work` of so many steps takes the time.
    """

    def __init__(
        self, total: int, start: int = 0, work: Callable[[int], float] = float
    ):
        self._total = total
        self._start = start
        self._began = time.perf_counter()
        self._work = work

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a step, which are named as in metrics.jsonl."""
        shown = [
            text(metrics[name]) for name, text in _SHOWN.items() if name in metrics
        ]
        is_validation = any(name.startswith("eval/") for name in metrics)
        if is_validation and not shown:  # of tasks, whose names are their own
            shown = [f"{name[5:]} {value:.4g}" for name, value in metrics.items()]
        if step > self._start and not is_validation:
            before, now, end = map(self._work, (self._start, step, self._total))
            left = (time.perf_counter() - self._began) / (now - before) * (end - now)
            shown += [f"{format_duration(left)} left"] * bool(shown)
        if shown:
            self.say(
                " | ".join(
                    [f"step {step:>{len(str(self._total))}}/{self._total}", *shown]
                )
            )

    def say(self, text: str) -> None:
        """Prints a line of its own."""
        tell(text, sys.stdout)
