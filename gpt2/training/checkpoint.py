"""Checkpoints of a run: asynchronous, sharded, complete or absent. The only user of Orbax.

A checkpoint holds `params`, `rest` (the other members of the TrainState) and the layout of the
layers. Weights can therefore be read without the optimizer. A run may continue in another layout:
restoring gives arrays the wanted shardings, and stacks or unstacks layers.

It also holds digests of all its files, since Orbax's format does not tell altered values from
others (`checkpoint_files.py` compares them).
"""

import contextlib
import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep

from gpt2.errors import UserError, warn
from gpt2.parallel import distributed
from gpt2.training.checkpoint_files import (
    ITEMS,
    METRIC,
    describe_damage,
    find_damage,
    mark_unsaved,
    move_aside,
    name_others,
    of_items,
    saved_steps,
)
from gpt2.training.checkpoint_layout import as_saved, guard_like, members, place, zeros
from gpt2.training.state import TrainState
from gpt2.utils import files
from gpt2.utils.digests import digest_folder, seal
from gpt2.utils.scan import is_scanned
from gpt2.utils.text import format_bytes

# Orbax asks for these figures at each save, for telemetry that nobody reads here. TensorStore never
# frees its answers: 30 KB a save (0.1.86).
tensorstore.experimental_collect_matching_metrics = lambda *_, **__: []

_NOTES_BYTES = 1 << 18  # Orbax's, beside the arrays
_FULL_BYTES = 1 << 20  # with less, a save that failed has failed for want of room


class _UnfitDiskError(Exception):
    """What a disk lacks for a save, found before Orbax begins it."""


class _DigestHandler(ocp.JsonCheckpointHandler):
    """Writes the digests of the other items, once they are complete and before the commit."""

    def __init__(self) -> None:
        super().__init__("digests")

    def finalize(self, directory: Any) -> None:
        """Called by the first process, after all items that were registered before this one."""
        folder = Path(directory)
        found = digest_folder(folder.parent)
        tree = seal({"files": of_items(found, ITEMS)})
        (folder / "digests").write_text(json.dumps(tree))
        files.sync_tree(folder.parent)  # before a rename makes them visible


class Checkpointer:
    """Saves and restores the states of one run, under `workdir/checkpoints/STEP`.

    A save that fails, on a full disk for example, leaves the checkpoints before it as they are.

    Attributes:
        failure: why the newest state that was to be saved is not; empty if it is.

    Args:
        workdir: the run's directory.
        num_latest: how many of the newest checkpoints to keep, beside the best by validation loss.
        read_only: neither create nor delete anything.
        goes_on: a save that fails is told, and the next is tried. With several processes it ends
            them all in any case, since each holds a part of the state.
        parameters_in_flight: bytes of parameters that may exist twice while saving or restoring,
            at least those of the largest array. With a limit, `save` returns only when all is
            saved. None: no limit.
    """

    def __init__(
        self,
        workdir: Path | str,
        num_latest: int = 1,
        read_only: bool = False,
        goes_on: bool = False,
        parameters_in_flight: int | None = None,
    ):
        self._directory = Path(workdir).resolve() / "checkpoints"
        self._num_latest, self._read_only, self._goes_on = num_latest, read_only, goes_on
        self._parameters_in_flight = parameters_in_flight
        self._manager = self._open()
        if not read_only and jax.process_index() == 0:
            mark_unsaved(self._directory.parent)
        self._lowest_loss = (self.best() or (0, math.inf))[1]
        self._saving: int | None = None
        self.failure = ""
        self._hook = sys.unraisablehook
        sys.unraisablehook = _without_closed_loops(self._hook)

    def _open(self) -> ocp.CheckpointManager:
        self._check_scores()
        best = keep.BestN(
            get_metric_fn=lambda metrics: metrics[METRIC],
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        latest = keep.LatestN(self._num_latest)
        return ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=keep.AnyPreservationPolicy([latest, best]),
                best_fn=lambda metrics: metrics[METRIC],
                best_mode="min",
                read_only=self._read_only,
                create=not self._read_only,
                cleanup_tmp_directories=not self._read_only,
                enable_async_checkpointing=self._parameters_in_flight is None,
            ),
            handler_registry=_handlers(self._parameters_in_flight),
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
        self._saving = step
        try:
            self._check_disk(state, step)
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
        guard = state.guard and (restored.guard or zeros(state.guard))
        return place(restored.replace(guard=guard), state)

    def restore_params(self, step: int, params: Any) -> Any:
        """Restores the parameters alone; arguments and errors are those of `restore`."""
        saved = as_saved(params, self._layout(step)["scan_layers"])
        items = self._restore(step, params=ocp.args.StandardRestore(saved))
        return place(items["params"], params)

    def wait(self) -> None:
        """Returns once everything saved is on disk, or has failed."""
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # of many kinds
            self._recover(error)
        else:
            self._saving, self.failure = None, ""
            distributed.only_first(mark_unsaved)(self._directory.parent)

    def close(self) -> None:
        """Waits until everything saved is on disk, and ends the saving threads."""
        self.wait()
        self._manager.close()
        sys.unraisablehook = self._hook

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_disk(self, state: TrainState, step: int) -> None:
        """Raises an error in all processes if the disk is read-only or has no room for a state."""
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + _NOTES_BYTES
        free = shutil.disk_usage(self._directory.parent).free
        if not distributed.from_first(free >= needed):
            about = f"{format_bytes(needed)} are needed, and {format_bytes(free)} are free"
            raise _UnfitDiskError(about)
        # Where Orbax cannot create this folder, its threads wait for it for twenty minutes, and
        # the process cannot end before.
        folder, number = self._directory / f"{step}.orbax-checkpoint-tmp", 0
        if jax.process_index() == 0:
            try:
                folder.mkdir()
                folder.rmdir()
            except FileExistsError:
                pass
            except OSError as error:
                number = error.errno or errno.EIO
        if number := distributed.from_first(number):
            raise _UnfitDiskError(os.strerror(number))

    def _recover(self, error: Exception) -> None:
        """Tells of a save that failed, and goes on with the checkpoints before it."""
        unfit = isinstance(error, _UnfitDiskError)
        if isinstance(error, TypeError | AttributeError | NameError):  # of the program
            raise error
        if jax.process_count() > 1 and not unfit:
            raise error
        step, self._saving = self._saving, None
        assert step is not None  # one was under way
        if unfit:
            reason = str(error)
        else:
            full = shutil.disk_usage(self._directory.parent).free < _FULL_BYTES
            reason = "no room is left on the disk" if full else str(error).strip().split("\n")[0]
            with contextlib.suppress(Exception):
                self._manager.close()
            self._manager = self._open()  # which removes what the save left
            if step in self.all_steps() and not find_damage(self._directory.parent, step):
                warn(f"checkpoint {step} is saved, but an older one is not removed ({reason})")
                self.failure = ""
                return
            self._lowest_loss = (self.best() or (0, math.inf))[1]
        self.failure = f"the state of step {step} is not saved in {self._directory} ({reason})"
        if not self._goes_on:
            raise UserError(self.failure, "Make room, and repeat the command") from error
        steps = self.all_steps()
        last = f"the last one saved is that of step {steps[-1]}" if steps else "none is saved yet"
        distributed.only_first(warn)(f"{self.failure}; {last}, and the run goes on")

    def _layout(self, step: int) -> dict[str, bool]:
        return self._restore(step, layout=ocp.args.JsonRestore())["layout"]

    def _restore(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax and TensorStore raise many kinds
            reason = str(error).strip().partition("\n")[0]
            raise UserError(
                f"checkpoint {self._directory / str(step)} cannot be read ({reason})",
                name_others(self._directory.parent, step),
            ) from error


def _without_closed_loops(hook: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Wraps `sys.unraisablehook`, by which TensorStore prints that nobody waits for its writes.

    It does so for each write that ends after another one of the same save has failed.
    """

    def filtered(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            hook(unraisable)

    return filtered


def _handlers(parameters_in_flight: int | None) -> Any:
    """Returns what saves and restores each item, in the order in which they are finalized."""
    limit = None if parameters_in_flight is None else parameters_in_flight / 10**9
    limited = ocp.StandardCheckpointHandler(save_concurrent_gb=limit, restore_concurrent_gb=limit)
    arrays = (ocp.args.StandardSave, ocp.args.StandardRestore)
    json_args = (ocp.args.JsonSave, ocp.args.JsonRestore)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for name, handler, kinds in (
        ("params", limited, arrays),
        ("rest", ocp.StandardCheckpointHandler(), arrays),
        ("layout", ocp.JsonCheckpointHandler(), json_args),
        ("metrics", ocp.JsonCheckpointHandler("metrics"), json_args),
        ("digests", _DigestHandler(), json_args),
    ):
        for kind in kinds:
            registry.add(name, kind, handler)
    return registry
