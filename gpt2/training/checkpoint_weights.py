"""The weights of a run, read from its checkpoints for another program than its training."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from gpt2.config import Config, ParallelConfig, load_config
from gpt2.errors import UserError
from gpt2.model import GPT
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.checkpoint_files import (
    ITEMS,
    WEIGHTS,
    describe_damage,
    find_damage,
    name_others,
)
from gpt2.training.program import Program


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
        items = ITEMS if config.optim.keeps_average else WEIGHTS
        if damage := find_damage(workdir, step, items):
            raise UserError(describe_damage(workdir, step, damage), name_others(workdir, step))
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
