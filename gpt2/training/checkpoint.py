"""Checkpoints of a run: asynchronous, sharded, whole or not there.

A checkpoint holds `params`, `guard` if there is one, `rest` (the other members of the TrainState),
`layout` (how the layers are stored) and digests of all files, since Orbax's
format does not tell altered values from others. A run may continue in another layout, and weights
are read without the optimizer. This file is the only user of Orbax.
"""

import contextlib
import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint.checkpoint_managers import preservation_policy as policy

from gpt2.config import Config, ParallelConfig, load_config, with_options
from gpt2.errors import UserError, warn
from gpt2.parallel import distributed
from gpt2.training.checkpoint_files import ITEMS, WEIGHTS, find_damage, saved_steps
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.utils import files, stores
from gpt2.utils.files import digest_folder
from gpt2.utils.scan import in_layout, is_scanned

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
        score = lambda metrics: metrics[METRIC]  # noqa: E731
        best = policy.BestN(
            get_metric_fn=score,
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        kept = [policy.LatestN(keep), best]
        kept += [policy.EveryNSteps(keep_every)] if keep_every else []
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=policy.AnyPreservationPolicy(kept),
            best_fn=score,
            best_mode="min",
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            async_options=ocp.options.AsyncOptions(
                barrier_sync_fn=self._wait_for_others
                if jax.process_count() > 1
                else None,
                create_directories_asynchronously=False,  # or a read-only disk is tried for minutes
            ),
        )
        self._open()

    def _open(self) -> None:
        self._manager = ocp.CheckpointManager(
            self._directory, options=self._options, handler_registry=_make_handlers()
        )

    def _wait_for_others(self, **options: Any) -> None:
        # The thread of a save that failed comes to another barrier, and would wait there.
        with distributed.ends_together():
            if isinstance(error := sys.exception(), Exception):
                raise self._for_all(error)
            ocp.multihost.get_barrier_sync_fn()(**options)

    def best(self) -> tuple[int, float] | None:
        """Returns the step with the lowest validation loss, and that loss, or None."""
        step = self._manager.best_step()
        metrics = None if step is None else self._manager.metrics(step)
        return (step, metrics[METRIC]) if metrics else None

    def improves(self, eval_loss: float) -> bool:
        """Says whether a validation loss is below that of every checkpoint so far."""
        self.wait()  # which tells of a save that has failed meanwhile
        best = self.best()  # of which other processes may lack the file
        return bool(distributed.from_first(best is None or eval_loss < best[1]))

    def all_steps(self) -> list[int]:
        """Returns the steps saved, ascending."""
        return sorted(self._manager.all_steps())

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
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        if distributed.from_first(shutil.disk_usage(self._workdir).free < needed):
            self._warn(
                step, "no room is left on the disk"
            )  # a save would fill it, and fail
            return
        self._saving = step
        layout: dict[str, Any] = dict(scan_layers=is_scanned(state.params))
        layout |= dict(guard=state.guard is not None, position=list(position))
        try:
            if jax.process_count() > 1 and stores.url_of(
                self._workdir
            ):  # disks of their own
                state = jax.tree.map(_gathered, state)
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{
                        name: ocp.args.StandardSave(part)
                        for name, part in _parts(state).items()
                    },
                    layout=ocp.args.JsonSave(layout),
                    digests=ocp.args.JsonSave({}),
                ),
                metrics=None if scores is None else {METRIC: scores[METRIC]},
                force=True,
            )
        except Exception as error:  # of many kinds
            self._recover(error)

    def restore(self, step: int, shapes: TrainState) -> TrainState:
        """Restores a state, in whatever layout it was saved, to these shapes and shardings."""
        layout = self._read(step, layout=ocp.args.JsonRestore())["layout"]
        saved = _as_saved(shapes, layout["scan_layers"])
        # A run may gain a guard, lose it, or lower its limit when it continues.
        parts = _parts(saved if layout["guard"] else saved.replace(guard=None))
        items = self._read(
            step, **{n: ocp.args.StandardRestore(p) for n, p in parts.items()}
        )
        zeros = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)  # noqa: E731
        guard = (
            items["guard"].capped()
            if "guard" in parts
            else jax.tree.map(zeros, shapes.guard)
        )
        state = TrainState(
            **items["rest"] | {"params": items["params"], "guard": guard}
        )
        return _in_layout_of(shapes, state)

    def position(self, step: int) -> list[str]:
        """Returns the position of its batches that a state was saved with."""
        if step not in self._manager.all_steps():
            return []
        return self._read(step, layout=ocp.args.JsonRestore())["layout"]["position"]

    def restore_params(self, step: int, shapes: Any) -> Any:
        """Restores the parameters alone, otherwise as `restore`."""
        layout = self._read(step, layout=ocp.args.JsonRestore())["layout"]
        saved = ocp.args.StandardRestore(_as_saved(shapes, layout["scan_layers"]))
        return _in_layout_of(shapes, self._read(step, params=saved)["params"])

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax and TensorStore raise many kinds
            what = f"checkpoint {self._directory / str(step)} cannot be read ({_first_line(error)})"
            raise UserError(
                what, "Use the code that saved it, or another checkpoint"
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

    def close(self) -> None:
        """Waits until everything saved is on disk, and ends the saving threads."""
        self.wait()
        self._manager.close()

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if (
            error is None or jax.process_count() == 1
        ):  # else a save would wait for the others
            self.close()

    def _recover(self, error: Exception) -> None:
        """Tells of a save that failed, and goes on with the checkpoints before it."""
        if jax.process_count() > 1:
            raise self._for_all(error)
        step = self._saving
        self._saving = None
        with contextlib.suppress(Exception):
            self._manager.close()
        self._open()  # which removes what the save left
        if step in self.all_steps():  # what failed was to remove an older one
            self.failure = ""
        else:
            self._warn(step, _first_line(error))

    def _warn(self, step: int | None, reason: str) -> None:
        self.failure = (
            f"the state of step {step} is not saved in {self._directory} ({reason})"
        )
        distributed.only_first(warn)(f"{self.failure}; the run goes on")

    def _for_all(self, error: Exception) -> Exception:
        """Returns what ends all processes after a save that failed in this one."""
        if isinstance(error, jax.errors.JaxRuntimeError):  # another one has ended
            return error
        what = f"the state of step {self._saving} is not saved in {self._directory}"
        how = "Mend that, and start all processes again"
        return UserError(f"{what} ({_first_line(error)})", how, exit_code=5)


def load_params(workdir: Path | str, which: str | int = "best") -> tuple[Config, Any]:
    """Loads a run's config and its weights, averaged if it averages, on one device.

    `which` is `best` by validation loss (the latest if none was validated), `latest`, or a step.
    The options that suited the run's devices are set to their defaults.
    """
    defaults = {"model.attention": "auto", "memory.remat": "none"}
    config = with_options(load_config(Path(workdir)), defaults)
    config = dataclasses.replace(config, parallel=ParallelConfig())
    if not (saved := saved_steps(workdir)):
        raise UserError(
            f"{workdir} holds no checkpoint yet", "Train for longer, or wait"
        )
    if damage := "; ".join(
        filter(None, (find_damage(workdir, s, ("metrics",)) for s in saved))
    ):
        raise UserError(damage, "Restore it from a copy, or move it elsewhere")
    device = jax.local_devices()[0]
    shapes = Program.from_config(config, [device]).state_shapes
    with Checkpointer(workdir, read_only=True) as checkpointer:
        steps = {str(step): step for step in checkpointer.all_steps()}
        latest = max(steps.values(), default=None)
        steps |= {"latest": latest, "best": (checkpointer.best() or [latest])[0]}
        if (step := steps.get(str(which))) is None:
            raise UserError(
                f"{workdir} has no checkpoint {which}", f"Use {', '.join(steps)}"
            )
        averages = (
            config.optim.averages
        )  # for which the optimizer's state is read whole
        if damage := find_damage(workdir, step, ITEMS if averages else WEIGHTS):
            raise UserError(damage, "Restore it from a copy, or use another")
        if averages:
            return config, checkpointer.restore(step, shapes).eval_params
        return config, checkpointer.restore_params(step, shapes.params)


def _make_handlers() -> Any:
    """Returns what saves and restores each part, in the order in which they are finalized."""
    arrays = ocp.args.StandardSave, ocp.args.StandardRestore
    texts = ocp.args.JsonSave, ocp.args.JsonRestore
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for name, handler, kinds in (
        ("params", ocp.StandardCheckpointHandler(), arrays),
        ("rest", ocp.StandardCheckpointHandler(), arrays),
        ("guard", ocp.StandardCheckpointHandler(), arrays),
        ("layout", ocp.JsonCheckpointHandler(), texts),
        ("metrics", ocp.JsonCheckpointHandler("metrics"), texts),
        ("digests", _DigestHandler("digests"), texts),
    ):
        for kind in kinds:
            registry.add(name, kind, handler)
    return registry


class _DigestHandler(ocp.JsonCheckpointHandler):
    """Writes the digests of the other items, once they are complete and before the commit."""

    def finalize(self, directory: Any) -> None:
        """Called by the first process, after all items that were registered before this one."""
        folder = Path(directory)
        found = digest_folder(folder.parent)
        found = {name: found[name] for name in found if name.split("/")[0] in ITEMS}
        (folder / "digests").write_text(json.dumps(files.seal({"files": found})))
        files.sync_tree(folder.parent)  # before a rename makes them visible


def _gathered(leaf: jax.Array) -> np.ndarray:
    """Returns the whole of an array in the first process, which alone writes; a zero elsewhere."""
    whole = process_allgather(leaf, tiled=True)
    return whole if jax.process_index() == 0 else np.zeros((), leaf.dtype)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _parts(state: TrainState) -> dict[str, Any]:
    """Returns what is saved of a state, by the folder that holds it."""
    rest = vars(state) | {"params": None}
    guard = rest.pop("guard")
    return {"params": state.params, "rest": rest} | ({"guard": guard} if guard else {})


def _as_saved(target: Any, scanned: bool) -> Any:
    """Returns the shapes and shardings of `target` with its layers as they were saved."""

    def reshaped(
        leaf: jax.ShapeDtypeStruct, shape: tuple, spec: Any
    ) -> jax.ShapeDtypeStruct:
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec(sharding.spec)))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    def stack(
        leaf: jax.ShapeDtypeStruct, *others: jax.ShapeDtypeStruct
    ) -> jax.ShapeDtypeStruct:
        return reshaped(
            leaf, (1 + len(others), *leaf.shape), lambda spec: (None, *spec)
        )

    def take(leaf: jax.ShapeDtypeStruct, _: int) -> jax.ShapeDtypeStruct:
        return reshaped(leaf, leaf.shape[1:], lambda spec: spec[1:])

    return in_layout(target, scanned=scanned, stack=stack, take=take)


def _in_layout_of(target: Any, restored: Any) -> Any:
    """Brings restored arrays into the layer layout and shardings of `target`."""
    scanned = is_scanned(target)
    if is_scanned(restored) == scanned:
        return restored
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    return jax.jit(partial(in_layout, scanned=scanned), out_shardings=shardings)(
        restored
    )
