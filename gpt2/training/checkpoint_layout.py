"""What a checkpoint holds of a state: its layers stacked or not, its guard or none.

A state may be restored into another form than it was saved in. These functions turn shapes with
shardings into those that were saved, and arrays back. They name what no such change explains.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gpt2.config import TrainConfig
from gpt2.training.guard import Guard
from gpt2.training.state import TrainState
from gpt2.utils.scan import in_layout, is_scanned

_MOST_NAMED = 3  # arrays that a message lists


def as_saved(target: Any, scanned: bool) -> Any:
    """Returns the shapes and shardings of `target` with its layers as they were saved."""
    return in_layout(target, scanned=scanned, stack=_stack_shapes, take=_take_shape)


def members(state: TrainState) -> dict[str, Any]:
    """Returns what is saved beside the parameters, by name."""
    members = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    if state.guard is None:
        del members["guard"]
    return members | {"params": None}


def guard_like(state: TrainState) -> Guard:
    """Returns the shapes and shardings of the guard of a state, which may have none."""
    if state.guard is not None:
        return state.guard
    shapes = jax.eval_shape(partial(Guard.create, TrainConfig(skip_bad_steps=1)))
    sharding = state.step.sharding
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )


def zeros(shapes: Any) -> Any:
    """Returns zeros in these shapes and shardings."""

    def make() -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))()


def place(restored: Any, target: Any) -> Any:
    """Brings restored arrays into the layer layout and shardings of `target`."""
    scanned = is_scanned(target)
    if is_scanned(restored) == scanned:
        return restored
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    return jax.jit(partial(in_layout, scanned=scanned), out_shardings=shardings)(restored)


def describe_differences(saved: Any, wanted: Any) -> str:
    """Returns in which arrays a checkpoint differs from what is restored; empty if in none.

    Args:
        saved, wanted: trees whose leaves have `shape` and `dtype`.
    """
    here, there = _forms(saved), _forms(wanted)
    lacking = [name for name in there if name not in here]
    unknown = [name for name in here if name not in there]
    other = [
        f"{name} is {here[name]}, not {there[name]}"
        for name in here
        if name in there and here[name] != there[name]
    ]
    parts = [f"it lacks {_list_few(lacking)}"] * bool(lacking)
    parts += [f"it has {_list_few(unknown)} beside what is asked for"] * bool(unknown)
    return "; ".join([*parts, *[_list_few(other)] * bool(other)])


def _forms(tree: Any) -> dict[str, str]:
    """Returns the type and the shape of each leaf, by name."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _list_few(names: list[str]) -> str:
    more = [f"{len(names) - _MOST_NAMED} more"] * (len(names) > _MOST_NAMED)
    return ", ".join(names[:_MOST_NAMED] + more)


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
