"""Draw the initial parameters of all layers together.

Each parameter has the values that Flax would draw. But XLA compiles the random number generator
once for all kernels of equal shapes, instead of twice for each kernel, which takes most of the time
until the first step of a deep model.
"""

import collections
import hashlib
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.typing import DTypeLike

from gpt2.model.layers import Normal
from gpt2.ops.plain import Init, Shape, param
from gpt2.utils.parameters import DeclaredParam, ParamInfo, is_declared
from gpt2.utils.trees import Tree


class UndrawnParam(DeclaredParam):
    """A parameter to be drawn by `init`. While modules run, its `value` contains zeros.

    Its key is `jax.random.fold_in(base, path)`. In a module for experts, both have an axis of
    experts.
    """

    init: Normal = struct.field(pytree_node=False)
    base: Array
    path: Array  # a hash, as uint32


def defer(
    module: nn.Module, name: str, init: Init, shape: Shape, info: ParamInfo
) -> Array:
    """Replace `plain.param` in a table of operations, so that `draw` draws the parameters.

    A parameter with another initializer than `Normal` is drawn here.
    """
    if not isinstance(init, Normal):
        return param(module, name, init, shape, info)

    def declare(key: Array, shape: Shape, dtype: DTypeLike) -> Tree:
        # Flax has folded a hash of the path, and of the number of keys drawn so far, into the key.
        scope: Any = module.scope
        lazy = scope.rngs["params"]
        digest = hashlib.sha1()
        for part in (*lazy.suffix, scope.rng_counters["params"]):
            if isinstance(part, str):
                digest.update(part.encode())
            else:
                digest.update(part.to_bytes((part.bit_length() + 7) // 8, "big"))
        path = jnp.uint32(int.from_bytes(digest.digest()[:4], "big"))
        return UndrawnParam(jnp.zeros(shape, dtype), info, init, lazy.rng, path)

    return module.param(name, declare, shape, jnp.float32, unbox=True)


def draw(model: nn.Module, rngs: Array, tokens: Array) -> Tree:
    """Return the initial parameters of a model, each in a `DeclaredParam`.

    The model must use `defer` to create them.
    """
    declared = nn.Module.init(model, rngs, tokens)["params"]
    boxes, structure = jax.tree.flatten(declared, is_leaf=is_declared)
    groups = collections.defaultdict(list)
    for index, box in enumerate(boxes):
        if isinstance(box, UndrawnParam):
            shape = box.value.shape[box.path.ndim :]  # without the axis of experts
            groups[box.init, shape].append(index)
    for (init, shape), indices in groups.items():
        members = [boxes[index] for index in indices]
        paths = jnp.concatenate([box.path.ravel() for box in members])
        # A key of JAX's older kind has an axis of its own.
        key_shape = members[0].base.shape[members[0].path.ndim :]
        bases = jnp.concatenate([box.base.reshape(-1, *key_shape) for box in members])
        keys = jax.vmap(jax.random.fold_in)(bases, paths)
        values = jax.lax.map(partial(init, shape=shape, dtype=jnp.float32), keys)
        start = 0
        for index, box in zip(indices, members, strict=True):
            end = start + box.path.size
            value = values[start:end].reshape(box.value.shape)
            boxes[index] = DeclaredParam(value, box.info)
            start = end
    return jax.tree.unflatten(structure, boxes)


# Equal models share one trace. `GPT.init` calls `draw` itself, because `nn.tabulate` could not see
# the calls of modules in a stored trace.
traced_draw = jax.jit(draw, static_argnums=0, inline=True)
