"""Checkpoints of a run: asynchronous, sharded, whole or not there.

A checkpoint holds `params`, `rest` (the other members of the TrainState), `layout` (how the layers
are stored, and whose state it is) and digests of all files, since Orbax's format does not tell
altered values from others. A run may continue in another layout, and weights are read without the
optimizer. This file is the only user of Orbax.
"""

import contextlib
import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint.checkpoint_managers import preservation_policy as policy

from gpt2.config import Config, ParallelConfig, TrainConfig, load_config
from gpt2.errors import UserError, warn
from gpt2.model import GPT
from gpt2.parallel import distributed
from gpt2.training.checkpoint_files import (
    ITEMS,
    WEIGHTS,
    find_damage,
    identity,
    move_aside,
    saved_steps,
)
from gpt2.training.guard import Guard
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.utils import files
from gpt2.utils.files import digest_folder
from gpt2.utils.scan import in_layout, is_scanned

METRIC = "eval/loss"  # by which the best checkpoint is known


class _NoRoomError(Exception):
    """The disk has no room for a save: all processes raise it together, before it begins."""


class Checkpointer(contextlib.AbstractContextManager):
    """Saves and restores the states of one run, under `workdir/checkpoints/STEP`.

    A save that fails, on a full disk for example, is told, and the checkpoints before it stay. With
    several processes it ends them all, since each holds a part of the state.

    Attributes:
        failure: why the newest state that was to be saved is not; empty if it is.
        longest_seconds: of the slowest save so far; 0 before the first.

    Args:
        workdir: the run's directory.
        keep: how many of the newest checkpoints to keep, beside the best by validation loss.
        keep_every: checkpoints of a multiple of so many steps are kept too; 0: none.
        read_only: neither create nor delete anything.
        parameters_in_flight: bytes of parameters that may exist twice while saving or restoring,
            at least those of the largest array; `save` then returns only when all is saved.
    """

    def __init__(
        self,
        workdir: Path | str,
        keep: int = 1,
        keep_every: int = 0,
        read_only: bool = False,
        parameters_in_flight: int | None = None,
    ):
        self._workdir = Path(workdir).resolve()
        self._directory = self._workdir / "checkpoints"
        self._keep, self._keep_every, self._read_only = keep, keep_every, read_only
        self._in_flight = parameters_in_flight
        self._saving: int | None = None
        self.failure, self.longest_seconds = "", 0.0
        self._open()

    def _open(self) -> None:
        for step in saved_steps(self._workdir) if jax.process_index() == 0 else ():
            if damage := find_damage(self._workdir, step, ("metrics",)):  # Orbax reads all scores
                if self._read_only:
                    raise UserError(damage, "Restore it from a copy, or move it elsewhere")
                warn(f"{damage}; it is now {move_aside(self._workdir, step)}")
        best = policy.BestN(
            get_metric_fn=lambda metrics: metrics[METRIC],
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        kept = [policy.LatestN(self._keep), best]
        kept += [policy.EveryNSteps(self._keep_every)] if self._keep_every else []
        in_background = self._in_flight is None
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy.AnyPreservationPolicy(kept),
                best_fn=lambda metrics: metrics[METRIC],
                best_mode="min",
                read_only=self._read_only,
                create=not self._read_only,
                cleanup_tmp_directories=not self._read_only,
                enable_async_checkpointing=in_background,
                async_options=self._asynchronous() if in_background else None,
            ),
            handler_registry=_make_handlers(self._in_flight),
        )
        self._lowest_loss = (self.best() or (0, math.inf))[1]

    def _asynchronous(self) -> ocp.options.AsyncOptions:
        wait = ocp.multihost.get_barrier_sync_fn()

        def wait_for_others(**options: Any) -> None:
            # The thread of a save that failed comes to another barrier, and would wait there.
            with distributed.ends_together():
                if isinstance(error := sys.exception(), Exception):
                    raise self._for_all(error)
                wait(**options)

        return ocp.options.AsyncOptions(
            barrier_sync_fn=wait_for_others if jax.process_count() > 1 else None,
            post_finalization_callback=self._note_seconds,
            create_directories_asynchronously=False,  # a read-only disk would be tried for minutes
        )

    def _note_seconds(self) -> None:
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - self._began)

    def best(self) -> tuple[int, float] | None:
        """Returns the step with the lowest validation loss, and that loss, or None."""
        step = self._manager.best_step()
        metrics = None if step is None else self._manager.metrics(step)
        return (step, metrics[METRIC]) if metrics else None

    def improves(self, eval_loss: float) -> bool:
        """Says whether a validation loss is below that of every checkpoint so far."""
        self.wait()  # which tells of a save that has failed meanwhile
        return eval_loss < self._lowest_loss

    def all_steps(self) -> list[int]:
        """Returns the steps saved, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, step: int, scores: Mapping[str, float] | None = None) -> None:
        """Starts to save the state after `step`, and returns as soon as the caller may change it.

        `scores` are of its validation, None if it was not validated.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        self._saving, self._began = step, time.monotonic()
        scanned, guarded = is_scanned(state.params), state.guard is not None
        layout = {"scan_layers": scanned, "guard": guarded, "step": step}
        try:
            free = shutil.disk_usage(self._workdir).free
            needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            if distributed.from_first(free < needed):  # else it would fill the disk, and fail
                raise _NoRoomError("no room is left on the disk")
            saved = self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    rest=ocp.args.StandardSave(_rest(state)),
                    layout=ocp.args.JsonSave(layout | {"run": identity(self._workdir)}),
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

    def restore(self, step: int, shapes: TrainState) -> TrainState:
        """Restores a state, in whatever layout it was saved, to these shapes and shardings."""
        layout = self._read(step, layout=ocp.args.JsonRestore())["layout"]
        saved = _as_saved(shapes, layout["scan_layers"])
        # Its options may change when a run continues.
        saved = saved.replace(guard=_guard_shapes(shapes) if layout["guard"] else None)
        items = self._read(
            step,
            params=ocp.args.StandardRestore(saved.params),
            rest=ocp.args.StandardRestore(_rest(saved)),
        )
        state = TrainState(**items["rest"] | {"params": items["params"]})
        if int(state.step) != step:
            what = f"checkpoint {self._directory / str(step)} holds step {state.step}"
            raise UserError(what, "Give its folder that name")
        guard = shapes.guard and (state.guard or jax.tree.map(_zeros, shapes.guard)).capped()
        return _place(state.replace(guard=guard), shapes)

    def restore_params(self, step: int, shapes: Any) -> Any:
        """Restores the parameters alone, otherwise as `restore`."""
        layout = self._read(step, layout=ocp.args.JsonRestore())["layout"]
        saved = ocp.args.StandardRestore(_as_saved(shapes, layout["scan_layers"]))
        return _place(self._read(step, params=saved)["params"], shapes)

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax and TensorStore raise many kinds
            reason = str(error).strip().partition("\n")[0]
            what = f"checkpoint {self._directory / str(step)} cannot be read ({reason})"
            raise UserError(what, "Use the code that saved it, or another checkpoint") from error

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

    def close(self) -> None:
        """Waits until everything saved is on disk, and ends the saving threads."""
        self.wait()
        self._manager.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and jax.process_count() > 1:
            with distributed.ends_together():  # a save would wait for processes that wait for this
                raise error
        self.close()

    def _recover(self, error: Exception) -> None:
        """Tells of a save that failed, and goes on with the checkpoints before it."""
        if jax.process_count() > 1 and not isinstance(error, _NoRoomError):
            raise self._for_all(error)
        step, self._saving = self._saving, None
        with contextlib.suppress(Exception):
            self._manager.close()
        self._open()  # which removes what the save left
        if step in self.all_steps() and not find_damage(self._workdir, step):
            self.failure = ""  # what failed was to remove an older one
            return
        self.failure = self._describe(step, error)
        distributed.only_first(warn)(f"{self.failure}; the run goes on")

    def _for_all(self, error: Exception) -> Exception:
        """Returns what ends all processes after a save that failed in this one."""
        if isinstance(error, jax.errors.JaxRuntimeError):  # another one has ended
            return error
        what = self._describe(self._saving, error)
        return UserError(what, "Mend that, and start all processes again", exit_code=5)

    def _describe(self, step: int | None, error: Exception) -> str:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"the state of step {step} is not saved in {self._directory} ({reason})"


def load_params(workdir: Path | str, which: str | int = "best") -> tuple[Config, Any]:
    """Loads a run's config and its weights, averaged if it averages, on one device.

    Args:
        workdir: of the run. The options that suited its devices are set to their defaults.
        which: `best` by validation loss (the latest if none was validated), `latest`, or a step.
    """
    config = load_config(Path(workdir))
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, attention="auto"),
        parallel=ParallelConfig(),
        memory=dataclasses.replace(config.memory, remat="none"),
    )
    if not saved_steps(workdir):
        raise UserError(f"{workdir} holds no checkpoint yet", "Train for longer, or wait")
    device = jax.local_devices()[0]
    sharding = SingleDeviceSharding(device)
    with Checkpointer(workdir, read_only=True) as checkpointer:
        steps = {str(step): step for step in checkpointer.all_steps()}
        latest = max(steps.values(), default=None)
        steps |= {"latest": latest, "best": (checkpointer.best() or [latest])[0]}
        if (step := steps.get(str(which))) is None:
            raise UserError(f"{workdir} has no checkpoint {which}", f"Use {', '.join(steps)}")
        averages = config.optim.keeps_average  # in the optimizer's state, which is read whole
        if damage := find_damage(workdir, step, ITEMS if averages else WEIGHTS):
            raise UserError(damage, "Restore it from a copy, or use another")
        if averages:
            state = Program.from_config(config, [device]).state_shapes
            return config, checkpointer.restore(step, _placed(state, sharding)).eval_params
        token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        shapes = jax.eval_shape(GPT(config.gpt()).init, jax.random.key(0), token)["params"]
        return config, checkpointer.restore_params(step, _placed(shapes, sharding))


def _make_handlers(parameters_in_flight: int | None) -> Any:
    """Returns what saves and restores each part, in the order in which they are finalized."""
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
        ("digests", _DigestHandler("digests"), json_args),
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


def _rest(state: TrainState) -> dict[str, Any]:
    """Returns what is saved beside the parameters, by name."""
    members = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    if state.guard is None:
        del members["guard"]
    return members | {"params": None}


def _guard_shapes(shapes: TrainState) -> Guard:
    """Returns the shapes and shardings of a guard, which `shapes` may lack."""
    guard = jax.eval_shape(partial(Guard.create, TrainConfig(skip_bad_steps=1)))
    return shapes.guard or _placed(guard, shapes.step.sharding)


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)


def _as_saved(target: Any, scanned: bool) -> Any:
    """Returns the shapes and shardings of `target` with its layers as they were saved."""

    def reshaped(leaf: jax.ShapeDtypeStruct, shape: tuple, spec: Any) -> jax.ShapeDtypeStruct:
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec(sharding.spec)))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    def stack(leaf: jax.ShapeDtypeStruct, *others: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return reshaped(leaf, (1 + len(others), *leaf.shape), lambda spec: (None, *spec))

    def take(leaf: jax.ShapeDtypeStruct, _: int) -> jax.ShapeDtypeStruct:
        return reshaped(leaf, leaf.shape[1:], lambda spec: spec[1:])

    return in_layout(target, scanned=scanned, stack=stack, take=take)


def _placed(shapes: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )


def _place(restored: Any, target: Any) -> Any:
    """Brings restored arrays into the layer layout and shardings of `target`."""
    scanned = is_scanned(target)
    if is_scanned(restored) == scanned:
        return restored
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    return jax.jit(partial(in_layout, scanned=scanned), out_shardings=shardings)(restored)
