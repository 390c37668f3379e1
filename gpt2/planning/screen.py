"""The text of a plan and of a search."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gpt2.model import num_params
from gpt2.parallel.inspect import describe_spread
from gpt2.planning.candidates import Candidate
from gpt2.planning.plan import ATTAINABLE, Plan, usable_memory
from gpt2.planning.search import Search, Trial
from gpt2.telemetry.chips import BOARDS
from gpt2.utils.text import counted, format_bytes, format_count


def describe_plan(
    plan: Plan, kind: str, board: str | None, *, by_its_compiler: bool
) -> dict[str, dict[str, str]]:
    """Returns the sections of a plan's screen.

    Args:
        plan: of a step.
        kind: of its devices, as text.
        board: the devices' name in `BOARDS`; None: a forecast for each.
        by_its_compiler: whether the devices' own compiler has planned.
    """
    memory = plan.memory | {"in all": plan.bytes_needed}
    return (
        {
            "plan": {
                "devices": f"{plan.num_devices} ({kind})",
                "layout": plan.program.backend.layout,
                "parameters": f"{num_params(plan.state.params):,}",
                "tokens per step": f"{plan.config.tokens_per_step:,}",
                "FLOPs per step": format_count(plan.flops),
                "compiled in": f"{plan.compile_seconds:.1f} s",
            },
            # In bytes too: docs/parallelism.md compares policies by less than a tenth of a GiB.
            "memory of a device": {
                name: f"{format_bytes(size)} ({size:,} bytes)" for name, size in memory.items()
            },
        }
        | describe_spread(plan.state.params, plan.text)
        | {
            f"at {ATTAINABLE:.0%} of peak": {
                name: describe_forecast(plan, name, by_its_compiler=by_its_compiler)
                for name in ([board] if board else BOARDS)
            }
        }
    )


def describe_forecast(plan: Plan, board: str, *, by_its_compiler: bool = False) -> str:
    """Returns the time of a step on an accelerator of `BOARDS`, and whether it fits."""
    compute, network = plan.compute_seconds(board), plan.network_seconds(board)
    fits = _describe_fit(plan, board)
    if by_its_compiler and board.startswith("TPU"):  # whose compiler refuses what does not fit
        fits = f"memory {plan.bytes_needed / usable_memory(board):.0%}, fits by its compiler"
    seconds, tokens = plan.step_seconds(board), plan.tokens_per_second(board)
    if seconds is None or network is None or tokens is None:
        return f"computes {_milliseconds(compute)}, network unknown beyond one pod, {fits}"
    return (
        f"{_milliseconds(seconds)} a step, {_milliseconds(network)} of it sending, "
        f"{tokens / 1e3:,.0f}k tokens/s, {fits}"
    )


class TrialTable:
    """A line for each candidate: the values of its options, in columns.

    Args:
        candidates: all that may get a line.

    Attributes:
        header: the names of the options.
    """

    def __init__(self, candidates: Sequence[Candidate]):
        names = list(candidates[0].options) if candidates else []
        self._widths = {
            name: max(len(str(candidate.options[name])) for candidate in candidates)
            for name in names
        }
        self._widths |= {n: max(width, len(_title(n))) for n, width in self._widths.items()}
        self.header = self._line({name: _title(name) for name in names})

    def row(self, candidate: Candidate) -> str:
        """Returns the line of a candidate."""
        return self._line(candidate.options)

    def _line(self, values: Mapping[str, Any]) -> str:
        return "".join(f"{values[name]!s:<{width}}  " for name, width in self._widths.items())


def _title(name: str) -> str:
    return name.rpartition(".")[2].removesuffix("_steps")


def describe_trial(trial: Trial, board: str) -> str:
    """Returns what came of a candidate, in a few words."""
    if trial.plan is None:
        return trial.problem
    speed = trial.plan.tokens_per_second(board)
    expected = f"{speed / 1e3:,.0f}k tokens/s" if speed else "network unknown"
    return f"{expected}, {format_bytes(trial.plan.bytes_needed)}"


def describe_search(search: Search, board: str) -> dict[str, str]:
    """Returns rows of a search's last screen: what became of its candidates."""
    memory, fitting = usable_memory(board), len(search.fitting)
    usable, failed = format_bytes(memory), sum(not trial.compiles for trial in search.trials)
    rows = {
        "candidates": f"{search.number:,}",
        "compiled": f"{len(search.trials)}: {fitting} fit, "
        f"{len(search.trials) - fitting - failed} do not"
        + (f", {failed} do not compile" if failed else ""),
        "too large": f"{search.too_large:,}: by arithmetic they hold more than {usable}",
        "no smaller": f"{search.no_smaller:,}: they hold no less than one that does not fit",
        "no faster": f"{search.no_faster:,}: one of the same layout fits and does no more",
        "left": f"{len(search.waiting):,}: a larger --plan_trials may reach them",
    }
    reasons = Counter(line.partition(". ")[0] for line in search.refused)
    cannot = [f"{counted(count, 'layout')}: {reason}" for reason, count in reasons.items()]
    rows |= {"cannot work" + " " * i: text for i, text in enumerate(cannot)}
    if not fitting and not search.waiting:
        least = format_bytes(search.least_bytes)
        rows["nothing fits"] = (
            f"a step needs {least} or more, by arithmetic, of {usable}"
            if search.least_bytes > memory
            else "by arithmetic some would; the lines above have what the compiler says"
        )
    return {name: text for name, text in rows.items() if not text.startswith("0:")}


def _describe_fit(plan: Plan, board: str) -> str:
    whole, usable = 1e9 * BOARDS[board].memory, usable_memory(board)
    share = f"memory {plan.bytes_needed / whole:.0%}"
    if plan.bytes_needed <= usable:
        return share
    limit = f"; JAX takes {usable / whole:.0%}" if plan.bytes_needed <= whole else ""
    return f"does not fit ({share}{limit})"


def _milliseconds(seconds: float) -> str:
    if 0 < seconds < 1e-4:  # 0.10 ms would be a guess, and 0.00 ms nothing
        return f"{1e6 * seconds:.3g} µs"
    return f"{1e3 * seconds:,.{2 if 0 < seconds < 0.1 else 0}f} ms"
