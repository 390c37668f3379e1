"""Checkpoints of a run: asynchronous, sharded, complete or absent.

This file and `checkpoint_handlers.py` are the only users of Orbax.

A checkpoint holds `params`, `rest` (the other members of the TrainState) and the layout of the
layers. Weights can therefore be read without the optimizer. A run may continue in another layout:
restoring gives arrays the wanted shardings, and stacks or unstacks layers.

It also holds digests of all its files, since Orbax's format does not tell altered values from
others (`checkpoint_files.py` compares them).
"""

import contextlib
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep

from gpt2.errors import UserError, warn
from gpt2.parallel import distributed
from gpt2.training.checkpoint_disk import UnfitDiskError, check_disk, describe_failure
from gpt2.training.checkpoint_files import (
    METRIC,
    describe_damage,
    find_damage,
    mark_unsaved,
    move_aside,
    name_others,
    saved_steps,
)
from gpt2.training.checkpoint_handlers import make_handlers, without_closed_loops
from gpt2.training.checkpoint_layout import (
    as_saved,
    describe_differences,
    guard_like,
    members,
    place,
    zeros,
)
from gpt2.training.state import TrainState
from gpt2.utils.scan import is_scanned


class Checkpointer:
    """Saves and restores the states of one run, under `workdir/checkpoints/STEP`.

    A save that fails, on a full disk for example, leaves the checkpoints before it as they are.

    Attributes:
        failure: why the newest state that was to be saved is not; empty if it is.
        longest_seconds: from the call of `save` until `is_saving` or `wait` saw its end, in the
            slowest save so far; 0 before the first.

    Args:
        workdir: the run's directory.
        num_latest: how many of the newest checkpoints to keep, beside the best by validation loss.
        keep_every: checkpoints of a multiple of so many steps are kept too; 0: none.
        read_only: neither create nor delete anything.
        goes_on: a save that fails is told, and the next is tried. With several processes it ends
            them all in any case, within a minute, since each holds a part of the state.
        parameters_in_flight: bytes of parameters that may exist twice while saving or restoring,
            at least those of the largest array. With a limit, `save` returns only when all is
            saved. None: no limit.
    """

    def __init__(
        self,
        workdir: Path | str,
        num_latest: int = 1,
        keep_every: int = 0,
        read_only: bool = False,
        goes_on: bool = False,
        parameters_in_flight: int | None = None,
    ):
        self._directory = Path(workdir).resolve() / "checkpoints"
        self._num_latest, self._keep_every = num_latest, keep_every
        self._read_only, self._goes_on = read_only, goes_on
        self._parameters_in_flight = parameters_in_flight
        self._manager = self._open()
        if not read_only and jax.process_index() == 0:
            mark_unsaved(self._directory.parent)
        self._lowest_loss = (self.best() or (0, math.inf))[1]
        self._saving: int | None = None
        self._began: float | None = None  # in seconds; None once the newest save is timed
        self.failure, self.longest_seconds = "", 0.0

    def _open(self) -> ocp.CheckpointManager:
        self._check_scores()
        best = keep.BestN(
            get_metric_fn=lambda metrics: metrics[METRIC],
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        # Functions of steps and scores alone, which all processes have in common. Clocks differ.
        kept = [keep.LatestN(self._num_latest), best]
        kept += [keep.EveryNSteps(self._keep_every)] if self._keep_every else []
        in_background = self._parameters_in_flight is None
        return ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=keep.AnyPreservationPolicy(kept),
                best_fn=lambda metrics: metrics[METRIC],
                best_mode="min",
                read_only=self._read_only,
                create=not self._read_only,
                cleanup_tmp_directories=not self._read_only,
                enable_async_checkpointing=in_background,
                async_options=self._background() if in_background else None,
            ),
            handler_registry=make_handlers(self._parameters_in_flight),
        )

    def _background(self) -> ocp.options.AsyncOptions:
        """Returns how the threads of a save wait for those of other processes, and end."""
        wait = ocp.multihost.get_barrier_sync_fn()

        def wait_for_others(*, key: str, timeout_ms: int) -> None:
            # The thread of a save that failed comes to another barrier than the others. All would
            # wait there for as long as the slowest save may take.
            with distributed.ends_together():
                if isinstance(error := sys.exception(), Exception):
                    raise self._for_all(error)
                wait(key=key, timeout_ms=timeout_ms)

        return ocp.options.AsyncOptions(
            barrier_sync_fn=wait_for_others if jax.process_count() > 1 else None
        )

    def _check_scores(self) -> None:
        """Sees to it that the scores of all checkpoints, which Orbax reads at once, are whole."""
        workdir = self._directory.parent
        for step in saved_steps(workdir) if jax.process_index() == 0 else ():
            if damage := find_damage(workdir, step, ("metrics",)):
                about = describe_damage(workdir, step, damage)
                if self._read_only:
                    raise UserError(about, "Restore it from a copy, or move it out of checkpoints")
                warn(f"{about}; it is now {move_aside(workdir, step)}")

    def best(self) -> tuple[int, float] | None:
        """Returns the step with the lowest validation loss, and that loss, or None."""
        step = self._manager.best_step()
        if step is None:
            return None
        metrics = self._manager.metrics(step)
        return (step, metrics[METRIC]) if metrics else None

    def improves(self, eval_loss: float) -> bool:
        """Says whether a validation loss is below that of every checkpoint so far."""
        if jax.process_count() == 1 and not self._manager.is_saving_in_progress():
            self.wait()  # which tells of a save that has failed meanwhile
        return eval_loss < self._lowest_loss

    def all_steps(self) -> list[int]:
        """Returns the steps saved, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, step: int, scores: Mapping[str, float] | None = None) -> None:
        """Starts to save `state`, and returns as soon as the caller may change it.

        Args:
            state: to save.
            step: optimizer steps done.
            scores: of its validation, with `eval/loss`; None if it was not validated.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        self._saving, self._began = step, time.monotonic()
        try:
            num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            check_disk(self._directory, num_bytes)
            saved = self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    rest=ocp.args.StandardSave(members(state)),
                    layout=ocp.args.JsonSave(
                        {
                            "scan_layers": is_scanned(state.params),
                            "guard": state.guard is not None,
                        }
                    ),
                    digests=ocp.args.JsonSave({}),
                ),
                metrics=None if scores is None else {METRIC: scores[METRIC]},
            )
            if not saved:
                raise OSError("Orbax has declined to save it")
        except Exception as error:  # of many kinds
            self._recover(error)
            return
        if scores is not None:
            self._lowest_loss = min(self._lowest_loss, scores[METRIC])

    def restore(self, step: int, state: TrainState) -> TrainState:
        """Restores a state.

        Args:
            step: one of `all_steps`.
            state: shapes, dtypes and shardings to restore to (`jax.ShapeDtypeStruct` leaves).

        Raises:
            UserError: the checkpoint cannot be read.
        """
        layout = self._layout(step)
        saved = as_saved(state, layout["scan_layers"])
        # Its options may change when a run continues. Checkpoints of before know of no guard.
        saved = saved.replace(guard=guard_like(state) if layout.get("guard") else None)
        items = self._restore(
            step,
            params=ocp.args.StandardRestore(saved.params),
            rest=ocp.args.StandardRestore(members(saved)),
        )
        restored = TrainState(**items["rest"] | {"params": items["params"]})
        guard = state.guard and (restored.guard or zeros(state.guard)).capped()
        return place(restored.replace(guard=guard), state)

    def restore_params(self, step: int, params: Any) -> Any:
        """Restores the parameters alone; arguments and errors are those of `restore`."""
        saved = as_saved(params, self._layout(step)["scan_layers"])
        items = self._restore(step, params=ocp.args.StandardRestore(saved))
        return place(items["params"], params)

    def is_saving(self) -> bool:
        """Returns whether a save is under way.

        Asked after every step, it sees the end of each save, the removal of older ones included.
        """
        if self._began is None:
            return False
        if self._manager.is_saving_in_progress():
            return True
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - self._began)
        self._began = None
        return False

    def wait(self) -> None:
        """Returns once everything saved is on disk, or has failed."""
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # of many kinds
            self.is_saving()
            self._recover(error)
        else:
            self.is_saving()
            self._saving, self.failure = None, ""
            distributed.only_first(mark_unsaved)(self._directory.parent)

    def close(self) -> None:
        """Waits until everything saved is on disk, and ends the saving threads."""
        self.wait()
        self._manager.close()

    def __enter__(self) -> "Checkpointer":
        self._hook = sys.unraisablehook
        sys.unraisablehook = without_closed_loops(self._hook)
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.close()
        finally:
            sys.unraisablehook = self._hook

    def _recover(self, error: Exception) -> None:
        """Tells of a save that failed, and goes on with the checkpoints before it."""
        unfit = isinstance(error, UnfitDiskError)
        if isinstance(error, TypeError | AttributeError | NameError):  # of the program
            raise error
        if jax.process_count() > 1 and not unfit:
            raise self._for_all(error)
        step, self._saving = self._saving, None
        assert step is not None  # one was under way
        if unfit:
            reason = str(error)
        else:
            reason = describe_failure(error, self._directory)
            with contextlib.suppress(Exception):
                self._manager.close()
            self._manager = self._open()  # which removes what the save left
            if step in self.all_steps() and not find_damage(self._directory.parent, step):
                warn(f"checkpoint {step} is saved, but an older one is not removed ({reason})")
                self.failure = ""
                return
            self._lowest_loss = (self.best() or (0, math.inf))[1]
        self.failure = self._describe_failure(step, reason)
        if not self._goes_on:
            raise UserError(self.failure, "Make room, and repeat the command") from error
        steps = self.all_steps()
        last = f"the last one saved is that of step {steps[-1]}" if steps else "none is saved yet"
        distributed.only_first(warn)(f"{self.failure}; {last}, and the run goes on")

    def _for_all(self, error: Exception) -> Exception:
        """Returns what ends all processes after a save that failed in this one."""
        if isinstance(error, jax.errors.JaxRuntimeError):  # another one has ended
            return error
        what = self._describe_failure(self._saving, describe_failure(error, self._directory))
        return UserError(what, "Mend that, and start all processes again", exit_code=5)

    def _describe_failure(self, step: int | None, reason: str) -> str:
        return f"the state of step {step} is not saved in {self._directory} ({reason})"

    def _layout(self, step: int) -> dict[str, bool]:
        return self._restore(step, layout=ocp.args.JsonRestore())["layout"]

    def _restore(self, step: int, **items: Any) -> Any:
        if differences := self._differences(step, items):
            raise UserError(
                f"checkpoint {self._directory / str(step)} is of another program: {differences}",
                f"Use the code that saved it, with {self._directory.parent / 'config.json'}",
            )
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax and TensorStore raise many kinds
            reason = str(error).strip().partition("\n")[0]
            raise UserError(
                f"checkpoint {self._directory / str(step)} cannot be read ({reason})",
                name_others(self._directory.parent, step),
            ) from error

    def _differences(self, step: int, items: dict[str, Any]) -> str:
        """Returns in which arrays a checkpoint is not what was to be restored, if it tells."""
        wanted = {name: items[name].item for name in ("params", "rest") if name in items}
        if not wanted:
            return ""
        try:
            found = self._manager.item_metadata(step)
            saved = {name: found[name].tree for name in wanted}
        except Exception:  # of many kinds: it is damaged, and restoring tells how
            return ""
        saved, wanted = (tree.pop("rest", {}) | tree for tree in (saved, wanted))
        return describe_differences(saved, wanted)
