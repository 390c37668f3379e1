"""A search for the layout, the rematerialisation and the number of micro-batches of a run.

Compilers are slow, so a candidate is compiled only if nothing tells beforehand what would come of
it: it does not divide, it cannot fit by arithmetic, it holds no less than one that does not fit, or
it is no faster than one that fits. They are compiled one after another: two at once, in threads on
two cores, gained nothing (docs/log.md, 2026-11-23).
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gpt2.config import Config
from gpt2.errors import UserError
from gpt2.planning.candidates import Candidate, find_candidates, options_of
from gpt2.planning.plan import OutOfMemory, Plan, make_plan, usable_memory
from gpt2.utils.text import format_bytes


@dataclasses.dataclass(frozen=True)
class Trial:
    """A candidate that was compiled.

    Attributes:
        candidate: which.
        plan: what its step takes, None if it does not work.
        problem: why it does not work, else empty.
        compiles: whether it was memory alone that it lacked, if anything.
    """

    candidate: Candidate
    plan: Plan | None
    problem: str = ""
    compiles: bool = True


class Search:
    """Compiles candidates: the config's own options first, then the most promising.

    Of a config with `memory.remat=offload`, which is no candidate, the layout comes first.

    Args:
        config: whose other options stay, the batch among them.
        devices: to compile for.
        board: their name in `BOARDS`, which gives memory and speed.
        fixed: options by dotted name that stay as well.

    Attributes:
        number: of all candidates that divide.
        least_bytes: what the smallest of them holds at least, by arithmetic.
        waiting: candidates that may be worth compiling, in the order in which they are compiled.
        trials: what was compiled, in that order.
        too_large: how many candidates were ruled out by arithmetic.
        no_smaller: how many, since they hold no less than one that does not fit.
        no_faster: how many, since they do no less than one that fits in the same layout.
        refused: a line for each layout that does not divide.

    Raises:
        UserError: no layout divides.
    """

    def __init__(
        self,
        config: Config,
        devices: Sequence[jax.Device],
        board: str,
        *,
        fixed: Sequence[str] = (),
    ):
        self._devices, self._board = devices, board
        self.trials: list[Trial] = []
        self.no_smaller = self.no_faster = 0
        self.waiting, self.refused = find_candidates(config, devices, board, fixed)
        self.number, memory = len(self.waiting), usable_memory(board)
        self.least_bytes = min((c.least_bytes for c in self.waiting), default=0.0)
        if not self.waiting:
            what = f"no layout of {len(devices)} devices works"
            raise UserError(
                f"{what}: {self.refused[0].partition('. ')[0]}" if self.refused else what,
                "Leave sizes of --config.parallel. to the search, or give another "
                "--config.data.batch_size",
            )
        own = options_of(config, devices, fixed).items()
        self.waiting.sort(key=lambda c: (not own <= c.options.items(), *_promise(c, memory)))
        self.too_large = self._skip(lambda candidate: candidate.least_bytes > memory)

    @property
    def fitting(self) -> list[Trial]:
        """What fits, by expected tokens per second, the fastest first."""

        def speed(trial: Trial) -> float:
            return (trial.plan and trial.plan.tokens_per_second(self._board)) or 0.0

        return sorted((trial for trial in self.trials if trial.plan), key=speed, reverse=True)

    def compile_next(self) -> Trial:
        """Compiles the first of `waiting`, and strikes out what need not be compiled any more."""
        candidate = self.waiting.pop(0)
        shortage = ""
        try:
            plan = make_plan(candidate.config, self._devices)
            if plan.bytes_needed > usable_memory(self._board):
                shortage = f"needs {format_bytes(plan.bytes_needed)}"
        except OutOfMemory as error:
            shortage = str(error)
        except (UserError, jax.errors.JaxRuntimeError) as error:
            problem = f"does not compile: {_reason(error)}"
            self.trials.append(Trial(candidate, None, problem, compiles=False))
            return self.trials[-1]
        if shortage:
            self.trials.append(Trial(candidate, None, f"does not fit: {shortage}"))
            self.no_smaller += self._skip(lambda other: other.holds_no_less_than(candidate))
        else:
            self.trials.append(Trial(candidate, plan))
            self.no_faster += self._skip(lambda other: other.is_no_faster_than(candidate))
        return self.trials[-1]

    def _skip(self, test: Callable[[Candidate], bool]) -> int:
        """Strikes candidates out of `waiting`, and returns how many."""
        before = len(self.waiting)
        self.waiting = [candidate for candidate in self.waiting if not test(candidate)]
        return before - len(self.waiting)


def _reason(error: Exception) -> str:
    """Returns the line of an error that says most: that of an exception within it, or the first."""
    lines = str(error).strip().split("\n")
    return next((line for line in lines if re.match(r"\w+(Error|Exception): ", line)), lines[0])


def _promise(candidate: Candidate, memory: float) -> tuple[Any, ...]:
    """Returns what sorts candidates: those expected to fit first, then the fastest."""
    micro_batches = candidate.options["train.accumulate_steps"]
    too_large = candidate.expected_bytes > memory
    return too_large, candidate.seconds, micro_batches, candidate.least_bytes
