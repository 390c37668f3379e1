"""What a parameter declares where it is created: its axes and its roles.

Rules, optimizers, rematerialisation and FLOPs read this. None of them knows a parameter's name.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
from flax import struct

from gpt2.errors import UserError
from gpt2.utils.trees import Tree

# AxisNames of axes that stack tensors of equal shapes.
STACKING = {"layers", "experts", "qkv"}
# AxisNames of axes that do not make a parameter a matrix.
SMALL = STACKING | {"mix", "head_size"}


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """The axes and the roles of a parameter.

    Attributes:
        axes: a name for each axis, such as `embed`, `heads`, `mlp`, `layers`.
        inputs: of a matrix: the axes that are inputs, counted from the last axis, which is -1. The
            axes after them are outputs, and the axes before them, and those whose names are in
            `STACKING`, count matrices. Muon and SOAP take matrices; Adam takes the rest.
        decays: whether weight decay applies.
    """

    axes: tuple[str, ...]
    inputs: tuple[int, ...] = ()
    decays: bool = False

    @property
    def outputs(self) -> tuple[int, ...]:
        """The axes of a matrix that are outputs, counted from the last axis, which is -1."""
        after = range(self.inputs[-1] + 1, 0)
        return tuple(axis for axis in after if self.axes[axis] not in STACKING)

    def stack(self) -> "ParamInfo":
        """Return the info of this parameter of all layers, stacked along a first axis."""
        return dataclasses.replace(self, axes=("layers", *self.axes))


class DeclaredParam(struct.PyTreeNode, nn.meta.AxisMetadata):
    """A parameter with its info, in Flax's interface for such boxes."""

    value: Tree
    info: ParamInfo = struct.field(pytree_node=False)

    def unbox(self) -> Tree:
        """Return the parameter."""
        return self.value

    def replace_boxed(self, val: Tree) -> "DeclaredParam":
        """Return another parameter with the same info."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "DeclaredParam":
        """Return the parameter after `nn.vmap` has added an axis."""
        axes = list(self.info.axes)
        axes.insert(index, params[nn.PARTITION_NAME])
        return self.replace(info=dataclasses.replace(self.info, axes=tuple(axes)))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "DeclaredParam":
        """Return the parameter within `nn.vmap`, which adds an axis."""
        axes = list(self.info.axes)
        del axes[index]
        return self.replace(info=dataclasses.replace(self.info, axes=tuple(axes)))


def is_declared(node: Tree) -> bool:
    """Return whether a node of a tree is a parameter with its info."""
    return isinstance(node, DeclaredParam)


def param_info(path: tuple, param: Tree) -> ParamInfo:
    """Return what the parameter at a path declares.

    A parameter that declares too little would be whole on every device, or would never decay.
    """
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if not is_declared(param):
        raise UserError(
            f"The parameter {name} does not name its axes",
            "Create it by named_param of gpt2/model/layers.py",
        )
    info = param.info
    is_large = len(set(info.axes) - SMALL) > 1
    if is_large and not info.inputs and not info.decays:
        raise UserError(
            f"The parameter {name} has the axes {info.axes} and no role",
            "Pass inputs and decays to named_param, or name an axis `mix`",
        )
    return info
