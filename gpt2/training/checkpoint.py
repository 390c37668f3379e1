"""Save and restore the checkpoints of a run, asynchronously and in shards.

A checkpoint is either complete or absent. It has the items `params`, `rest` (the other members of
the TrainState), `guard` (counts of skipped steps) if the run has one, `layout` (how the layers are
stored, and the position of each process in its batches), `metrics` if the state was validated, and
`digests` of all files, because Orbax does not notice altered values. A run may continue with
another sharding or number of devices, and weights can be read without the optimizer's state. This
is the only file that uses Orbax.
"""

import contextlib
import functools
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import process_allgather
from orbax.checkpoint.checkpoint_managers import preservation_policy as policy

from gpt2.config import with_options
from gpt2.errors import UserError, first_line, warn
from gpt2.parallel import distributed
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.utils import files, stores
from gpt2.utils.files import digest_folder
from gpt2.utils.scan import in_layout, is_scanned
from gpt2.utils.trees import Tree

# The best checkpoint has the lowest value of this metric.
METRIC = "eval/loss"


@functools.cache  # once in a process
def _silence_orbax() -> None:
    # Orbax also raises the errors that it logs, so its log lines would repeat them.
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    # A failed write ends the event loop of a save, while the writes of other arrays go on.
    # `_recover` reports the failure once. Without these filters, each of those writes would print a
    # traceback.
    logging.getLogger("asyncio").addFilter(
        lambda record: "never retr" not in record.msg
    )
    warnings.filterwarnings("ignore", "coroutine 'async_serialize")
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = report_others


class Checkpointer(contextlib.AbstractContextManager):
    """The checkpoints of one run, in `workdir/checkpoints/STEP`.

    If a save fails, a warning is printed, and earlier checkpoints remain. In a run of several
    processes, all processes end instead, because each stores a part of the state.
    """

    def __init__(
        self,
        workdir: Path | str,
        keep: int = 1,
        keep_every: int = 0,
        read_only: bool = False,
    ):
        _silence_orbax()
        self._workdir = Path(workdir).resolve()
        self._directory = self._workdir / "checkpoints"
        self._saving: int | None = None
        self.failure = ""  # why the last save failed; empty if it did not
        score = itemgetter(METRIC)
        best = policy.BestN(
            get_metric_fn=score,
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        kept = [policy.LatestN(keep), best]
        if keep_every:
            kept.append(policy.EveryNSteps(keep_every))
        several = jax.process_count() > 1
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=policy.AnyPreservationPolicy(kept),
            best_fn=score,
            best_mode="min",
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            async_options=ocp.options.AsyncOptions(
                barrier_sync_fn=self._wait_for_others if several else None,
                # Otherwise Orbax retries for minutes on a read-only disk.
                create_directories_asynchronously=False,
            ),
        )
        self._open()

    def _open(self) -> None:
        # Orbax finalizes the items in this order, so the digests must be the last item.
        handlers = ocp.handlers.create_default_handler_registry(
            params=ocp.StandardCheckpointHandler(),
            rest=ocp.StandardCheckpointHandler(),
            guard=ocp.StandardCheckpointHandler(),
            layout=ocp.JsonCheckpointHandler(),
            metrics=ocp.JsonCheckpointHandler("metrics"),
        )
        handlers.add("digests", ocp.args.JsonSave, _DigestHandler("digests"))
        # Orbax reads the scores of all checkpoints here, and fails if a file of scores is damaged.
        with files.reading(self._directory, "", failed="cannot be opened"):
            self._manager = ocp.CheckpointManager(
                self._directory, options=self._options, handler_registry=handlers
            )

    def _wait_for_others(self, **options: Any) -> None:
        # If a save fails in this process, Orbax's background thread calls this function while it
        # handles the error, and would wait forever for the other processes. Raise the error
        # instead, so that `ends_together` ends this process, and the runtime ends the others.
        with distributed.ends_together():
            error = sys.exception()
            if isinstance(error, Exception):
                raise self._for_all(error)
            ocp.multihost.get_barrier_sync_fn()(**options)

    def best(self) -> tuple[int, float] | None:
        """Return `(step, loss)` of the checkpoint with the lowest validation loss.

        If no checkpoint was validated, return None.
        """
        step = self._manager.best_step()
        if step is None:
            return None
        metrics = self._manager.metrics(step)
        return (step, metrics[METRIC]) if metrics else None

    def improves(self, scores: Mapping[str, float]) -> bool:
        """Return whether a validation's loss is lower than the losses of all checkpoints."""
        self.wait()  # If the last save fails, its loss does not count.
        # Process 0 decides, because other processes may not have the file with the scores.
        best = self.best()
        is_better = best is None or scores[METRIC] < best[1]
        return bool(distributed.from_first(is_better))

    def all_steps(self) -> list[int]:
        """Return the saved steps in ascending order."""
        return sorted(self._manager.all_steps())

    def can_rescue(self, state: TrainState, step: int) -> bool:
        """Return whether a run that has failed can and should save `state`, its state after `step`.

        The state must be finite and not saved yet, its arrays must not have been donated to a step
        that failed, and `step` must not be 0. With several processes, return False: the processes
        that did not fail would not save their parts.
        """
        several = jax.process_count() > 1
        if several or step == 0 or step in self.all_steps():
            return False
        leaves = jax.tree.leaves(state)
        if any(leaf.is_deleted() for leaf in leaves):
            return False
        try:
            return all(bool(jnp.isfinite(leaf).all()) for leaf in leaves)
        except jax.errors.JaxRuntimeError:  # A device has failed.
            return False

    def save(
        self,
        state: TrainState,
        step: int,
        scores: Mapping[str, float] | None = None,
        position: Sequence[str] = (),
    ) -> None:
        """Begin to save the state after `step`. The caller may donate the state once this returns.

        `scores` are the results of a validation after `step`, or None. `position` is the list that
        `Batches.position` returned after `step`.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        self._saving = step
        layout = {
            "scan_layers": is_scanned(state.params),
            "guard": state.guard is not None,
            "position": list(position),
        }
        try:
            # If the workdir is a URL, each process has a local copy of it, but only process 0
            # uploads its copy. Process 0 therefore writes whole arrays.
            is_url = stores.is_url(stores.url_or_path(self._workdir))
            if jax.process_count() > 1 and is_url:
                state = jax.tree.map(_gathered, state)
            parts = _parts(state)
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{name: ocp.args.StandardSave(parts[name]) for name in parts},
                    layout=ocp.args.JsonSave(layout),
                    digests=ocp.args.JsonSave({}),
                ),
                metrics=None if scores is None else {METRIC: scores[METRIC]},
                force=True,
            )
        except Exception as error:  # Orbax and TensorStore raise many types of errors
            self._recover(error)

    def restore(self, step: int, program: Program) -> TrainState:
        """Return the state that was saved after `step`, in the layout that `program` needs.

        The saved state may have been sharded differently, or its layers may have been stacked.
        """
        parts = _parts(self._as_saved(step, program))
        items = self._read(
            step, **{name: ocp.args.StandardRestore(parts[name]) for name in parts}
        )
        shapes = program.state_shapes
        guard = jax.tree.map(_zeros, shapes.guard)
        if "guard" in parts:
            guard = items["guard"].capped()
        rest = items["rest"] | {"params": items["params"], "guard": guard}
        return _in_layout_of(shapes, TrainState(**rest))

    def position(self, step: int) -> list[str]:
        """Return the position of each process in its batches after a saved step.

        The list is empty if `step` is 0, or if the batches depend only on the step.
        """
        return self._layout(step)["position"] if step else []

    def restore_params(self, step: int, program: Program) -> Tree:
        """Restore only the parameters of the state after a step, in the layout of a program."""
        saved = self._as_saved(step, program)
        items = self._read(step, params=ocp.args.StandardRestore(saved.params))
        return _in_layout_of(program.state_shapes.params, items["params"])

    def _as_saved(self, step: int, program: Program) -> TrainState:
        """Return the shapes and shardings of the state that was saved after `step`.

        They may differ from `program.state_shapes`, because a run may continue with another value
        of `memory.scan_layers`, or add or remove a guard.
        """
        layout = self._layout(step)
        saved = program.state_shapes
        scanned = layout["scan_layers"]
        if is_scanned(saved) != scanned:
            options = {"memory.scan_layers": scanned, "memory.scan_unroll": 1}
            config = with_options(program.config, options)
            saved = program.with_config(config).state_shapes
        return saved if layout["guard"] else saved.replace(guard=None)

    def _layout(self, step: int) -> dict[str, Any]:
        return self._read(step, layout=ocp.args.JsonRestore())["layout"]

    def _read(self, step: int, **items: ocp.args.CheckpointArgs) -> Mapping[str, Any]:
        try:
            args = ocp.args.Composite(**items)
            return self._manager.restore(step, args=args)
        except Exception as error:  # Orbax and TensorStore raise many types of errors
            raise UserError(
                f"Checkpoint {self._directory / str(step)} cannot be read ({_cause(error)})",
                "Use the version of the code that saved it, or another checkpoint",
            ) from error

    def wait(self) -> None:
        """Wait until the last save is on disk or has failed."""
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._recover(error)
        else:
            self._saving = None
            self.failure = ""

    def raise_failure(self) -> None:
        """Raise a UserError if the last save failed."""
        if self.failure:
            remedy = "Correct the cause, and repeat the command"
            raise UserError(self.failure, remedy, exit_code=5)

    def close(self) -> None:
        """Wait for the last save, and end the threads of Orbax."""
        self.wait()
        self._manager.close()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After an error, the wait for other processes would never end.
        if error is None or jax.process_count() == 1:
            self.close()

    def _recover(self, error: Exception) -> None:
        """Remove an incomplete checkpoint, and warn that its save failed.

        With several processes, raise the exception that ends them instead.
        """
        if jax.process_count() > 1:
            raise self._for_all(error)
        step = self._saving
        failure = self._describe(error)
        self._saving = None
        with contextlib.suppress(Exception):
            self._manager.close()
        self._open()  # removes the incomplete checkpoint
        self.failure = ""
        # If the step's checkpoint exists, only the removal of an older checkpoint has failed.
        if step not in self.all_steps():
            self.failure = failure
            warn(f"{failure}; the run continues")

    def _describe(self, error: Exception) -> str:
        return (
            f"The state of step {self._saving} could not be saved in {self._directory} "
            f"({_cause(error)})"
        )

    def _for_all(self, error: Exception) -> Exception:
        """Return the exception that ends all processes after a save failed in this one."""
        if isinstance(error, jax.errors.JaxRuntimeError):
            return error  # Another process ended first.
        remedy = "Correct the cause, and start all processes again"
        return UserError(self._describe(error), remedy, exit_code=5)


class _DigestHandler(ocp.JsonCheckpointHandler):
    """A handler that writes the digests of a checkpoint's files once they are complete."""

    def finalize(self, directory: PathLike) -> None:
        """Write the digests of all other files of a checkpoint to `directory`.

        Orbax calls this in process 0 once these files are complete, and before it renames the
        checkpoint to make it visible.
        """
        folder = Path(directory)
        sealed = files.seal({"files": digest_folder(folder.parent)})
        (folder / "digests").write_text(json.dumps(sealed))
        # Orbax then renames the checkpoint to make it visible. The files must reach the disk first.
        files.sync_tree(folder.parent)


def _gathered(leaf: jax.Array) -> np.ndarray:
    """Return the whole array in process 0, which writes it, and a scalar 0 in other processes."""
    whole = process_allgather(leaf, tiled=True)
    if jax.process_index() == 0:
        return whole
    return np.zeros((), leaf.dtype)


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros_like(leaf, device=leaf.sharding)


def _cause(error: Exception) -> str:
    # TensorStore puts the cause behind hundreds of characters of paths and options.
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    return first_line(error)


def _parts(state: TrainState) -> dict[str, Tree]:
    """Divide a state into the parts that are saved in separate folders; return `{folder: part}`."""
    rest = vars(state) | {"params": None}
    guard = rest.pop("guard")
    parts = {"params": state.params, "rest": rest}
    return parts | {"guard": guard} if guard else parts


def _in_layout_of(target: Tree, restored: Tree) -> Tree:
    """Return `restored` with its layers stacked or separate as in `target`, and sharded like it."""
    scanned = is_scanned(target)
    if is_scanned(restored) == scanned:
        return restored
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    change = partial(in_layout, scanned=scanned)
    return jax.jit(change, out_shardings=shardings)(restored)
