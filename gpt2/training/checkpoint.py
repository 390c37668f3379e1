"""Checkpoints of a run: asynchronous, sharded, whole or not there.

A checkpoint holds `params`, `guard` if there is one, `rest` (the other members of the TrainState),
`layout` (how the layers are stored) and digests of all files, since Orbax's
format does not tell altered values from others. A run may continue in another layout, and weights
are read without the optimizer. This file is the only user of Orbax.
"""

import contextlib
import json
import logging
import sys
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
from gpt2.errors import UserError, warn
from gpt2.parallel import distributed
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.utils import files, stores
from gpt2.utils.files import digest_folder
from gpt2.utils.scan import in_layout, is_scanned
from gpt2.utils.trees import Tree

# What Orbax logs, it raises too, or it is no help.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)

METRIC = "eval/loss"  # by which the best checkpoint is known


class Checkpointer(contextlib.AbstractContextManager):
    """Saves and restores the states of one run, under `workdir/checkpoints/STEP`.

    A save that fails is told, and the checkpoints before it stay. With several processes it ends
    them all, since each holds a part of the state.
    """

    def __init__(
        self,
        workdir: Path | str,
        keep: int = 1,
        keep_every: int = 0,
        read_only: bool = False,
    ):
        self._workdir = Path(workdir).resolve()
        self._directory = self._workdir / "checkpoints"
        self._saving: int | None = None
        self.failure = ""  # why the newest state that was to be saved is not
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
                # Or a read-only disk is tried for minutes.
                create_directories_asynchronously=False,
            ),
        )
        self._open()

    def _open(self) -> None:
        # In the order in which they are finalized.
        handlers = ocp.handlers.create_default_handler_registry(
            params=ocp.StandardCheckpointHandler(),
            rest=ocp.StandardCheckpointHandler(),
            guard=ocp.StandardCheckpointHandler(),
            layout=ocp.JsonCheckpointHandler(),
            metrics=ocp.JsonCheckpointHandler("metrics"),
        )
        handlers.add("digests", ocp.args.JsonSave, _DigestHandler("digests"))
        self._manager = ocp.CheckpointManager(
            self._directory, options=self._options, handler_registry=handlers
        )

    def _wait_for_others(self, **options: Any) -> None:
        # The thread of a save that failed comes to another barrier, and would wait there.
        with distributed.ends_together():
            error = sys.exception()
            if isinstance(error, Exception):
                raise self._for_all(error)
            ocp.multihost.get_barrier_sync_fn()(**options)

    def best(self) -> tuple[int, float] | None:
        """Returns the step with the lowest validation loss, and that loss, or None."""
        step = self._manager.best_step()
        if step is None:
            return None
        metrics = self._manager.metrics(step)
        return (step, metrics[METRIC]) if metrics else None

    def improves(self, eval_loss: float) -> bool:
        """Says whether a validation loss is below that of every checkpoint so far."""
        self.wait()  # which tells of a save that has failed meanwhile
        best = self.best()  # of which other processes may lack the file
        is_better = best is None or eval_loss < best[1]
        return bool(distributed.from_first(is_better))

    def all_steps(self) -> list[int]:
        """Returns the steps saved, ascending."""
        return sorted(self._manager.all_steps())

    def can_rescue(self, state: TrainState, step: int) -> bool:
        """Says whether the state after `step` is sound, not saved yet and can be, after a failure.

        Of several processes the others know of no failure, and would not save their parts.
        """
        several = jax.process_count() > 1
        if several or step == 0 or step in self.all_steps():
            return False
        leaves = jax.tree.leaves(state)
        if any(leaf.is_deleted() for leaf in leaves):
            return False
        return all(bool(jnp.isfinite(leaf).all()) for leaf in leaves)

    def save(
        self,
        state: TrainState,
        step: int,
        scores: Mapping[str, float] | None = None,
        position: Sequence[str] = (),
    ) -> None:
        """Starts to save the state after `step`, and returns as soon as the caller may change it.

        `scores` are of its validation, None if it was not validated; `position` of its batches.
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
            # Each process has a copy of a URL of its own, of which one is sent.
            is_url = stores.is_url(stores.place_of(self._workdir))
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
        except Exception as error:  # of many kinds
            self._recover(error)

    def restore(self, step: int, program: Program) -> TrainState:
        """Restores a state, in whatever layout it was saved, to that of a program."""
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
        """Returns the position of its batches that a state was saved with."""
        return self._layout(step)["position"] if step else []

    def restore_params(self, step: int, program: Program) -> Tree:
        """Restores the parameters alone, otherwise as `restore`."""
        saved = self._as_saved(step, program)
        items = self._read(step, params=ocp.args.StandardRestore(saved.params))
        return _in_layout_of(program.state_shapes.params, items["params"])

    def _as_saved(self, step: int, program: Program) -> TrainState:
        """Returns the shapes and shardings of a program's state as it was saved.

        Layers may be stacked when a run continues, or not. It may gain a guard, or lose it.
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
        except Exception as error:  # Orbax and TensorStore raise many kinds
            raise UserError(
                f"checkpoint {self._directory / str(step)} cannot be read ({_first_line(error)})",
                "Use the code that saved it, or another checkpoint",
            ) from error

    def wait(self) -> None:
        """Returns once everything saved is on disk, or has failed."""
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # of many kinds
            self._recover(error)
        else:
            self._saving = None
            self.failure = ""

    def raise_failure(self) -> None:
        """Ends a run whose last state is not saved."""
        if self.failure:
            raise UserError(
                self.failure, "Mend that, and repeat the command", exit_code=5
            )

    def close(self) -> None:
        """Waits until everything saved is on disk, and ends the saving threads."""
        self.wait()
        self._manager.close()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # A save would wait for the other processes.
        if error is None or jax.process_count() == 1:
            self.close()

    def _recover(self, error: Exception) -> None:
        """Tells of a save that failed, and goes on with the checkpoints before it."""
        if jax.process_count() > 1:
            raise self._for_all(error)
        step = self._saving
        told = self._describe(error)
        self._saving = None
        with contextlib.suppress(Exception):
            self._manager.close()
        self._open()  # which removes what the save left
        self.failure = ""
        if step not in self.all_steps():  # else an older one could not be removed
            self.failure = told
            warn(f"{told}; the run goes on")

    def _describe(self, error: Exception) -> str:
        return (
            f"the state of step {self._saving} is not saved in {self._directory} "
            f"({_first_line(error)})"
        )

    def _for_all(self, error: Exception) -> Exception:
        """Returns what ends all processes after a save that failed in this one."""
        if isinstance(error, jax.errors.JaxRuntimeError):  # another one has ended
            return error
        return UserError(
            self._describe(error),
            "Mend that, and start all processes again",
            exit_code=5,
        )


class _DigestHandler(ocp.JsonCheckpointHandler):
    """Writes the digests of the other items, once they are complete and before the commit."""

    def finalize(self, directory: PathLike) -> None:
        """Called by the first process, after all items that were registered before this one."""
        folder = Path(directory)
        sealed = files.seal({"files": digest_folder(folder.parent)})
        (folder / "digests").write_text(json.dumps(sealed))
        files.sync_tree(folder.parent)  # before a rename makes them visible


def _gathered(leaf: jax.Array) -> np.ndarray:
    """Returns the whole of an array in the first process, which alone writes; a zero elsewhere."""
    whole = process_allgather(leaf, tiled=True)
    if jax.process_index() == 0:
        return whole
    return np.zeros((), leaf.dtype)


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros_like(leaf, device=leaf.sharding)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _parts(state: TrainState) -> dict[str, Tree]:
    """Returns what is saved of a state, by the folder that holds it."""
    rest = vars(state) | {"params": None}
    guard = rest.pop("guard")
    parts = {"params": state.params, "rest": rest}
    return parts | {"guard": guard} if guard else parts


def _in_layout_of(target: Tree, restored: Tree) -> Tree:
    """Brings restored arrays into the layer layout and shardings of `target`."""
    scanned = is_scanned(target)
    if is_scanned(restored) == scanned:
        return restored
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    change = partial(in_layout, scanned=scanned)
    return jax.jit(change, out_shardings=shardings)(restored)
