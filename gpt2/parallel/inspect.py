"""Shows how a state is spread over devices: the largest tensors, and what is left unsharded."""

import math
import re
from collections.abc import Mapping
from typing import Any, cast

import jax
from jax.sharding import NamedSharding

from gpt2.errors import UserError
from gpt2.parallel.collectives import collectives, summarize
from gpt2.parallel.mesh import data_parallel_flags
from gpt2.utils.text import format_bytes

# If every device holds more than this share of parameter bytes whole, some axis lacks a rule.
MAX_UNSHARDED = 0.02


def bytes_per_device(tree: Any) -> int:
    """Returns how much of a tree of placed arrays, or shapes with shardings, one device holds."""
    return sum(map(_local_bytes, jax.tree.leaves(tree)))


def unsharded_share(params: Any) -> float:
    """Returns the share of parameter bytes that every device holds whole."""
    leaves = jax.tree.leaves(params)
    whole = sum(_bytes(leaf) for leaf in leaves if _is_whole(leaf))
    return whole / sum(map(_bytes, leaves))


def check_sharded(params: Any, mesh_shape: Mapping[str, int]) -> None:
    """Checks that parameters are spread, where the mesh has axes to spread them over.

    Args:
        params: placed arrays, or shapes with shardings.
        mesh_shape: sizes of the mesh's axes.

    Raises:
        UserError: more than `MAX_UNSHARDED` of their bytes are whole on every device.
    """
    asked = [f"{axis}={size}" for axis, size in mesh_shape.items() if axis != "data" and size > 1]
    share = unsharded_share(params)
    if not asked or share <= MAX_UNSHARDED:
        return
    whole = {n: leaf for n, leaf in _by_size(params).items() if _is_whole(leaf)}
    leave = "leaves" if len(asked) == 1 else "leave"
    raise UserError(
        f"parallel.{' and parallel.'.join(asked)} {leave} {share:.1%} of the parameters whole on "
        f"every device, {next(iter(whole))} first",
        "Give its axes --config.parallel.rules or, for a small model, use " + data_parallel_flags(),
    )


def describe_sharding(params: Any, num_largest: int = 5) -> dict[str, str]:
    """Returns rows of a table: the largest tensors, then the share left unsharded.

    Layers that are alike, whether scanned or not, give one row: the largest of them.
    """
    rows: dict[str, str] = {}
    seen: set[str] = set()
    for name, leaf in _by_size(params).items():
        kind = re.sub(r"h_\d+/", "h_*/", name)
        if kind in seen or len(rows) == num_largest:
            continue
        seen.add(kind)
        shape = "x".join(map(str, leaf.shape))
        rows[kind] = f"{shape}, {_describe_spec(leaf)}, {format_bytes(_local_bytes(leaf))} a device"
    return rows | {"whole on every device": f"{unsharded_share(params):.2%} of parameter bytes"}


def describe_collectives(text: str) -> dict[str, str]:
    """Returns a row per kind of collective in a compiled step: how many, and how much is sent.

    Where some have a start and an end, the share is told of those during which a product runs.

    Args:
        text: optimised HLO, from `CompiledStep.text()`.
    """
    found = collectives(text)
    by_kind = summarize(found)
    asynchronous = any(traffic.asynchronous for traffic in by_kind.values())
    rows = {
        kind: f"{traffic.count} of {format_bytes(traffic.bytes)} in all, "
        f"{format_bytes(traffic.sent)} sent by each device"
        + (f", {traffic.overlapped / traffic.sent:.0%} while products run" if asynchronous else "")
        for kind, traffic in by_kind.items()
    }
    if asynchronous:
        overlapped = sum(traffic.overlapped for traffic in by_kind.values())
        share = overlapped / sum(traffic.sent for traffic in by_kind.values())
        rows["overlapped"] = f"{share:.0%} of bytes are sent while products run"
    if any(collective.loop_unknown for collective in found):
        rows["loops"] = "some have no known length: what they send is counted once"
    return rows or {"collectives": "none"}


def describe_spread(params: Any, text: str) -> dict[str, dict[str, str]]:
    """Returns the sections of a screen on sharding and network; empty on a single device."""
    if len(jax.tree.leaves(params)[0].sharding.device_set) == 1:
        return {}
    return {
        "largest tensors": describe_sharding(params),
        "network, per step": describe_collectives(text),
    }


def _bytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize


def _local_bytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _is_whole(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return leaf.sharding.is_fully_replicated


def _by_size(params: Any) -> dict[str, Any]:
    """Returns the leaves by name, the largest first."""
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    return dict(sorted(named.items(), key=lambda item: -item[1].size))


def _describe_spec(leaf: jax.Array | jax.ShapeDtypeStruct) -> str:
    """Returns as text which mesh axes split which dimension, without axes of one device."""
    sharding, parts = cast(NamedSharding, leaf.sharding), []
    mesh = sharding.mesh
    for dim, axes in enumerate(sharding.spec):
        axes = (axes,) if isinstance(axes, str) else axes or ()
        parts += [f"{axis} splits axis {dim}" for axis in axes if mesh.shape[axis] > 1]
    return ", ".join(parts) or "whole"
