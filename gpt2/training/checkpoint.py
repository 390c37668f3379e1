"""Checkpoints of a run: asynchronous, sharded, complete or absent. The only user of Orbax.

A checkpoint holds `params`, `rest` (the other members of the TrainState) and the layout of the
layers. Weights can therefore be read without the optimizer. A run may continue in another layout:
restoring gives arrays the wanted shardings, and stacks or unstacks layers.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep

from gpt2.config import Config, ParallelConfig, load_config
from gpt2.errors import UserError
from gpt2.model import GPT
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.utils.scan import in_layout, is_scanned

_METRIC = "eval/loss"


class Checkpointer:
    """Saves and restores the states of one run, under `workdir/checkpoints/STEP`.

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
        best = keep.BestN(
            get_metric_fn=lambda metrics: metrics[_METRIC],
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        handlers = None
        if parameters_in_flight is not None:
            limit = parameters_in_flight / 10**9
            handler = ocp.StandardCheckpointHandler(
                save_concurrent_gb=limit, restore_concurrent_gb=limit
            )
            handlers = {"params": handler}
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=keep.AnyPreservationPolicy([keep.LatestN(num_latest), best]),
                best_fn=lambda metrics: metrics[_METRIC],
                best_mode="min",
                read_only=read_only,
                create=not read_only,
                cleanup_tmp_directories=not read_only,
                enable_async_checkpointing=parameters_in_flight is None,
            ),
            item_names=("params", "rest", "layout"),
            item_handlers=handlers,
        )
        self._lowest_loss = (self.best() or (0, math.inf))[1]

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
        if step in self._manager.all_steps():
            return
        if scores is not None:
            self._lowest_loss = min(self._lowest_loss, scores[_METRIC])
        rest = dataclasses.replace(state, params=None)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                rest=ocp.args.StandardSave(rest),
                layout=ocp.args.JsonSave({"scan_layers": is_scanned(state.params)}),
            ),
            metrics=None if scores is None else {_METRIC: scores[_METRIC]},
        )

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
        """Returns once everything saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until everything saved is on disk, and ends the saving threads."""
        self._manager.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _is_scanned(self, step: int) -> bool:
        return self._restore(step, layout=ocp.args.JsonRestore())["layout"]["scan_layers"]

    def _restore(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (ValueError, KeyError, OSError) as error:
            reason = str(error).strip().partition("\n")[0]
            earlier = [saved for saved in self.all_steps() if saved < step]
            raise UserError(
                f"checkpoint {self._directory / str(step)} cannot be read ({reason})",
                f"Remove it to continue from that of step {earlier[-1]}"
                if earlier
                else "There is none before it: restore it from a copy, or give another --workdir",
            ) from error


def latest_step(workdir: Path | str) -> int | None:
    """Returns the newest step that a run has saved, or None."""
    directory = Path(workdir) / "checkpoints"
    steps = [int(path.name) for path in directory.glob("*") if path.name.isdigit()]
    return max(steps, default=None)


def load_params(workdir: Path | str, which: str | int = "best") -> tuple[Config, Any]:
    """Loads a run's weights on one device, in the layer layout of its config.

    Args:
        workdir: of the run.
        which: `best` by validation loss (the latest if none was validated), `latest`, or a step.

    Returns:
        The run's config and its parameters, averaged if it averages. The options that suited the
        devices of training (`model.attention`, `parallel.`, `memory.remat`) have their defaults.

    Raises:
        UserError: there is no such run or checkpoint.
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
