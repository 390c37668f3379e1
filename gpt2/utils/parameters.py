"""The names of a parameter's axes, and what optimizers need to know about the parameter.

They are declared where the parameter is created. Sharding rules, optimizers and the count of FLOPs
read these declarations instead of the parameter's name. Only `optim.layer_rates` depends on names.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
from flax import struct

from gpt2.errors import UserError
from gpt2.utils.trees import Tree

# Names of axes that stack tensors of equal shapes.
STACKING = {"layers", "experts", "qkv"}
# Names of axes that `param_info` ignores. A parameter whose other axes have at least two different
# names may be a matrix, so it must declare `inputs` or `decays`.
SMALL = STACKING | {"mix", "head_size"}


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """The axes of a parameter, and whether optimizers treat it as a matrix and decay it.

    Attributes:
        axes: a name for each axis, such as `embed`, `heads`, `mlp`, `layers`.
        inputs: for a matrix, the input axes, as negative indices; empty for other parameters. The
            axes after the inputs are outputs. Axes before the inputs, and axes named in `STACKING`,
            enumerate matrices. Optimizers such as Muon and SOAP apply only to matrices, and update
            all other parameters with Adam.
        decays: whether weight decay applies.
    """

    axes: tuple[str, ...]
    inputs: tuple[int, ...] = ()
    decays: bool = False

    @property
    def outputs(self) -> tuple[int, ...]:
        """The output axes of a matrix, as negative indices: those after the inputs.

        Axes that are named in `STACKING` are left out.
        """
        after = range(self.inputs[-1] + 1, 0)
        return tuple(axis for axis in after if self.axes[axis] not in STACKING)

    def stack(self) -> "ParamInfo":
        """Return the info of this parameter, stacked over all layers.

        The new first axis is named `layers`.
        """
        return dataclasses.replace(self, axes=("layers", *self.axes))


class DeclaredParam(struct.PyTreeNode, nn.meta.AxisMetadata):
    """A parameter with its info, as a metadata box of Flax."""

    value: Tree
    info: ParamInfo = struct.field(pytree_node=False)

    def unbox(self) -> Tree:
        """Return the parameter."""
        return self.value

    def replace_boxed(self, val: Tree) -> "DeclaredParam":
        """Return a box with another parameter and the same info."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "DeclaredParam":
        """Return this box with the name of a new axis in `info`.

        Flax calls this method after `nn.vmap` has added an axis at `index` to `value`. The name is
        `params[nn.PARTITION_NAME]`.
        """
        axes = list(self.info.axes)
        axes.insert(index, params[nn.PARTITION_NAME])
        return self.replace(info=dataclasses.replace(self.info, axes=tuple(axes)))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "DeclaredParam":
        """Return this box without the name of the axis at `index` in `info`.

        Flax calls this method inside `nn.vmap`, where `value` does not have the added axis.
        """
        axes = list(self.info.axes)
        del axes[index]
        return self.replace(info=dataclasses.replace(self.info, axes=tuple(axes)))


def is_declared(node: Tree) -> bool:
    """Return whether a node of a tree is a `DeclaredParam`, a parameter with its info."""
    return isinstance(node, DeclaredParam)


def param_info(path: tuple, param: Tree) -> ParamInfo:
    """Return the info of `param`, a `DeclaredParam` at the key path `path` of a tree.

    Raise a UserError if `param` has no info, or if a parameter that may be a matrix has neither
    `inputs` nor `decays`. Without these errors, a forgotten declaration would replicate the
    parameter on every device, or exclude it from weight decay.
    """
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if not is_declared(param):
        raise UserError(
            f"The parameter {name} does not name its axes",
            "Create it with named_param of gpt2/model/layers.py",
        )
    info = param.info
    is_large = len(set(info.axes) - SMALL) > 1
    if is_large and not info.inputs and not info.decays:
        raise UserError(
            f"The parameter {name} has the axes {info.axes}, but neither `inputs` nor `decays`",
            "Pass `inputs` to named_param if the parameter is a matrix, and `decays=True` if it has"
            " weight decay. Otherwise, name one of its axes `mix`",
        )
    return info
