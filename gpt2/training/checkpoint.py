"""Checkpoints of a run: asynchronous, sharded, complete or absent. The only user of Orbax.

A checkpoint holds `params`, `rest` (the other members of the TrainState) and the layout of the
layers. Weights can therefore be read without the optimizer. A run may continue in another layout:
restoring gives arrays the wanted shardings, and stacks or unstacks layers.

It also holds digests of all its files, since Orbax's format does not tell altered values from
others. Nothing is read that does not agree with them.
"""

import contextlib
import dataclasses
import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep

from gpt2.config import Config, ParallelConfig, load_config
from gpt2.errors import UserError, warn
from gpt2.model import GPT
from gpt2.parallel import distributed
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.utils import digests
from gpt2.utils.scan import in_layout, is_scanned
from gpt2.utils.text import format_bytes

_METRIC = "eval/loss"
_NOTES_BYTES = 1 << 18  # Orbax's, beside the arrays
_FULL_BYTES = 1 << 20  # with less, a save that failed has failed for want of room
_ITEMS = ("params", "rest", "layout", "metrics")


class _DigestHandler(ocp.JsonCheckpointHandler):
    """Writes the digests of the other items, once they are complete and before the commit."""

    def __init__(self) -> None:
        super().__init__("digests")

    def finalize(self, directory: Any) -> None:
        """Called by the first process, after all items that were registered before this one."""
        folder = Path(directory)
        found = digests.digest_folder(folder.parent)
        (folder / "digests").write_text(digests.to_text(_of_items(found, _ITEMS)))


def _of_items(found: dict[str, list[int]], items: Sequence[str]) -> dict[str, list[int]]:
    return {name: digest for name, digest in found.items() if name.split("/")[0] in items}


class Checkpointer:
    """Saves and restores the states of one run, under `workdir/checkpoints/STEP`.

    A save that fails, on a full disk for example, is told and does not end the run; the checkpoints
    before it stay. With several processes it ends them all, since each holds a part of the state.

    Attributes:
        failure: why the newest state that was to be saved is not; empty if it is.

    Args:
        workdir: the run's directory.
        num_latest: how many of the newest checkpoints to keep, beside the best by validation loss.
        read_only: neither create nor delete anything.
        parameters_in_flight: bytes of parameters that may exist twice while saving or restoring,
            at least those of the largest array. With a limit, `save` returns only when all is
            saved. None: no limit.
    """

    def __init__(
        self,
        workdir: Path | str,
        num_latest: int = 1,
        read_only: bool = False,
        parameters_in_flight: int | None = None,
    ):
        self._directory = Path(workdir).resolve() / "checkpoints"
        self._num_latest, self._read_only = num_latest, read_only
        self._parameters_in_flight = parameters_in_flight
        self._manager = self._open()
        self._lowest_loss = (self.best() or (0, math.inf))[1]
        self._saving: int | None = None
        self.failure = ""

    def _open(self) -> ocp.CheckpointManager:
        best = keep.BestN(
            get_metric_fn=lambda metrics: metrics[_METRIC],
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        latest = keep.LatestN(self._num_latest)
        return ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=keep.AnyPreservationPolicy([latest, best]),
                best_fn=lambda metrics: metrics[_METRIC],
                best_mode="min",
                read_only=self._read_only,
                create=not self._read_only,
                cleanup_tmp_directories=not self._read_only,
                enable_async_checkpointing=self._parameters_in_flight is None,
            ),
            handler_registry=_handlers(self._parameters_in_flight),
        )

    def best(self) -> tuple[int, float] | None:
        """Returns the step with the lowest validation loss, and that loss, or None."""
        step = self._manager.best_step()
        if step is None:
            return None
        metrics = self._manager.metrics(step)
        return (step, metrics[_METRIC]) if metrics else None

    def improves(self, eval_loss: float) -> bool:
        """Says whether a validation loss is below that of every checkpoint so far."""
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
        if lacking := self._lacking_room(state):
            self._tell_failure(step, lacking)
            return
        rest = dataclasses.replace(state, params=None)
        self._saving = step
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    rest=ocp.args.StandardSave(rest),
                    layout=ocp.args.JsonSave({"scan_layers": is_scanned(state.params)}),
                    digests=ocp.args.JsonSave({}),
                ),
                metrics=None if scores is None else {_METRIC: scores[_METRIC]},
            )
        except Exception as error:  # of many kinds
            self._recover(error)
            return
        if scores is not None:
            self._lowest_loss = min(self._lowest_loss, scores[_METRIC])

    def restore(self, step: int, state: TrainState) -> TrainState:
        """Restores a state.

        Args:
            step: one of `all_steps`.
            state: shapes, dtypes and shardings to restore to (`jax.ShapeDtypeStruct` leaves).

        Raises:
            UserError: the checkpoint cannot be read.
        """
        saved = _as_saved(state, self._is_scanned(step))
        items = self._restore(
            step,
            params=ocp.args.StandardRestore(saved.params),
            rest=ocp.args.StandardRestore(dataclasses.replace(saved, params=None)),
        )
        restored = dataclasses.replace(items["rest"], params=items["params"])
        return _place(restored, state)

    def restore_params(self, step: int, params: Any) -> Any:
        """Restores the parameters alone; arguments and errors are those of `restore`."""
        saved = _as_saved(params, self._is_scanned(step))
        items = self._restore(step, params=ocp.args.StandardRestore(saved))
        return _place(items["params"], params)

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

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lacking_room(self, state: TrainState) -> str:
        """Says how much room a state lacks on the disk, if any."""
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + _NOTES_BYTES
        free = shutil.disk_usage(self._directory).free
        if distributed.from_first(free >= needed):
            return ""
        return f"{format_bytes(needed)} are needed, and {format_bytes(free)} are free"

    def _recover(self, error: Exception) -> None:
        """Goes on after a save that failed, with the checkpoints before it."""
        if jax.process_count() > 1:
            raise error
        step, self._saving = self._saving, None
        with contextlib.suppress(Exception):
            self._manager.close()
        self._manager = self._open()  # which removes what the save left
        self._lowest_loss = (self.best() or (0, math.inf))[1]
        full = shutil.disk_usage(self._directory).free < _FULL_BYTES
        about = "no room is left on the disk" if full else str(error).strip().partition("\n")[0]
        assert step is not None  # one was under way
        self._tell_failure(step, about)

    def _tell_failure(self, step: int, why: str) -> None:
        self.failure = f"the state of step {step} is not saved in {self._directory} ({why})"
        steps = self.all_steps()
        last = f"the last one saved is that of step {steps[-1]}" if steps else "none is saved yet"
        warn(f"{self.failure}; {last}, and the run goes on")

    def _is_scanned(self, step: int) -> bool:
        return self._restore(step, layout=ocp.args.JsonRestore())["layout"]["scan_layers"]

    def _restore(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax and TensorStore raise many kinds
            reason = str(error).strip().partition("\n")[0]
            raise UserError(
                f"checkpoint {self._directory / str(step)} cannot be read ({reason})",
                _others(self._directory.parent, step),
            ) from error


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


def latest_step(workdir: Path | str) -> int | None:
    """Returns the newest step that a run has saved, or None."""
    return max(saved_steps(workdir), default=None)


def newest_whole_step(workdir: Path | str, after: int = -1) -> int | None:
    """Returns the newest step beyond `after` whose checkpoint agrees with its digests, or None."""
    steps = sorted((step for step in saved_steps(workdir) if step > after), reverse=True)
    return next((step for step in steps if not find_damage(workdir, step)), None)


def set_aside(workdir: Path, after: int) -> list[Path]:
    """Moves checkpoints beyond step `after` to `workdir/damaged`, and returns where they are."""
    moved = []
    for step in saved_steps(workdir):
        if step > after:
            (workdir / "damaged").mkdir(exist_ok=True)
            names = itertools.chain([str(step)], (f"{step}-{i}" for i in itertools.count(1)))
            target = next(
                path for name in names if not (path := workdir / "damaged" / name).exists()
            )
            moved.append((workdir / "checkpoints" / str(step)).rename(target))
    return moved


def saved_steps(workdir: Path | str) -> list[int]:
    """Returns the steps of which a run has checkpoints, whole or not, ascending."""
    directory = Path(workdir) / "checkpoints"
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit())


def describe_damage(workdir: Path | str, step: int, damage: str) -> str:
    """Returns what `find_damage` has found, for people."""
    return f"checkpoint {Path(workdir) / 'checkpoints' / str(step)} is damaged ({damage})"


def _others(workdir: Path | str, step: int) -> str:
    """Returns what to use in place of a checkpoint that cannot be read."""
    others = [other for other in saved_steps(workdir) if other != step]
    whole = [other for other in others if not find_damage(workdir, other)]
    if not whole:
        return "There is no other: restore it from a copy"
    return f"Restore it from a copy, or use {' or '.join(map(str, whole))}"


def find_damage(workdir: Path | str, step: int, items: Sequence[str] = _ITEMS) -> str:
    """Reads all files of a checkpoint and compares them with the digests that were saved.

    Args:
        workdir: of the run.
        step: of the checkpoint.
        items: which parts of it.

    Returns:
        What is wrong with it, or an empty text. Checkpoints of a version that wrote no digests are
        not looked at.
    """
    folder = Path(workdir) / "checkpoints" / str(step)
    if not (folder / "digests").exists() and (folder / "params").exists():
        return ""
    try:
        saved = digests.from_text((folder / "digests" / "digests").read_text())
    except (OSError, UnicodeDecodeError):
        saved = None
    if saved is None:
        return "digests/digests is missing or was altered"
    return digests.find_damage(folder, _of_items(saved, items))


def load_params(workdir: Path | str, which: str | int = "best") -> tuple[Config, Any]:
    """Loads a run's weights on one device, in the layer layout of its config.

    Args:
        workdir: of the run.
        which: `best` by validation loss (the latest if none was validated), `latest`, or a step.

    Returns:
        The run's config and its parameters, averaged if it averages. The options that suited the
        devices of training (`model.attention`, `parallel.`, `memory.remat`) have their defaults.

    Raises:
        UserError: there is no such run or checkpoint, or it is damaged.
    """
    config = _for_any_device(load_config(Path(workdir)))
    if not (Path(workdir) / "checkpoints").is_dir():
        raise UserError(f"{workdir} holds no checkpoint yet", "Train for longer, or wait")
    device = jax.local_devices()[0]
    sharding = SingleDeviceSharding(device)

    def placed(shapes: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
        )

    with Checkpointer(workdir, read_only=True) as checkpointer:
        step = _find_step(checkpointer, workdir, which)
        items = _ITEMS if config.optim.keeps_average else ("params", "layout")
        if damage := find_damage(workdir, step, items):
            raise UserError(describe_damage(workdir, step, damage), _others(workdir, step))
        if config.optim.keeps_average:  # in the optimizer's state, which is read whole
            state = Program.from_config(config, [device]).state_shapes
            return config, checkpointer.restore(step, placed(state)).eval_params
        token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        shapes = jax.eval_shape(GPT(config.gpt()).init, jax.random.key(0), token)["params"]
        return config, checkpointer.restore_params(step, placed(shapes))


def _for_any_device(config: Config) -> Config:
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, attention="auto"),
        parallel=ParallelConfig(),
        memory=dataclasses.replace(config.memory, remat="none"),
    )


def _find_step(checkpointer: Checkpointer, workdir: Path | str, which: str | int) -> int:
    steps = checkpointer.all_steps()
    if not steps:
        raise UserError(f"{workdir} holds no checkpoint yet", "Train for longer, or wait")
    if which == "latest":
        return steps[-1]
    if which == "best":
        best = checkpointer.best()
        return best[0] if best else steps[-1]
    if not str(which).isdigit() or int(which) not in steps:
        known = ", ".join(map(str, steps))
        raise UserError(f"{workdir} has no checkpoint {which}", f"Use best, latest or {known}")
    return int(which)


def _as_saved(target: Any, scanned: bool) -> Any:
    """Returns the shapes and shardings of `target` with its layers as they were saved."""
    return in_layout(target, scanned=scanned, stack=_stack_shapes, take=_take_shape)


def _place(restored: Any, target: Any) -> Any:
    """Brings restored arrays into the layer layout and shardings of `target`."""
    scanned = is_scanned(target)
    if is_scanned(restored) == scanned:
        return restored
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    return jax.jit(partial(in_layout, scanned=scanned), out_shardings=shardings)(restored)


def _stack_shapes(*layers: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    leaf = layers[0]
    sharding = _map_spec(leaf.sharding, lambda spec: PartitionSpec(None, *spec))
    return jax.ShapeDtypeStruct((len(layers), *leaf.shape), leaf.dtype, sharding=sharding)


def _take_shape(leaf: jax.ShapeDtypeStruct, _: int) -> jax.ShapeDtypeStruct:
    sharding = _map_spec(leaf.sharding, lambda spec: PartitionSpec(*spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)


def _map_spec(sharding: Any, function: Any) -> Any:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, function(sharding.spec))
    return sharding
