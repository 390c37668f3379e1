"""The small modules of which the model consists: linear maps, norms, embeddings, the MLP.

gpt2/model/gpt.py explains the dimension letters.
"""

import dataclasses
import math

import chex
import flax.linen as nn
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from gpt2.config import GPTConfig
from gpt2.ops import Ops
from gpt2.ops.plain import ACTIVATIONS, Activation, AxisNames, Init, Shape
from gpt2.utils.parameters import ParamInfo
from gpt2.utils.remat import ATTENTION_LINEAR, MLP_LINEAR


def named_param(
    module: nn.Module,
    name: str,
    init: Init,
    shape: Shape,
    axes: AxisNames,
    *,
    inputs: tuple[int, ...] = (),
    decays: bool = False,
) -> Array:
    """Return the float32 parameter `name` of a module, gathered if devices hold shards of it.

    `init(key, shape, dtype)` draws the parameter. The module must have the attribute `ops`. The
    names in `axes` determine how `parallel.rules` shard the parameter between steps. For a matrix
    `[D, F]`, pass `inputs=(-2,)`, so that Muon and SOAP treat the parameter as a matrix, and
    `decays=True`, so that weight decay applies to it. See `ParamInfo`.
    """
    info = ParamInfo(axes, inputs, decays)
    return module.ops.whole(module.ops.param(module, name, init, shape, info))


@dataclasses.dataclass(frozen=True)
class Normal:
    """An initializer that draws from a normal distribution with a mean of 0."""

    stddev: float

    def __call__(self, key: Array, shape: Shape, dtype: DTypeLike) -> Array:
        """Draw an array from a random key."""
        return nn.initializers.normal(self.stddev)(key, shape, dtype)


class Linear(nn.Module):
    """A linear map from the last axes of its input to new axes.

    Attributes:
        config: the model's config, which determines the dtypes and whether there is a bias.
        ops: the table of operations.
        shape: shape of the kernel: contracted axes, then new axes.
        axes: names of the kernel's axes.
        num_contract: number of contracted axes.
        adds_to_residual: whether the result is added to the residual stream. The kernel is then
            drawn with a smaller standard deviation (`kernel_stddev`).
        activation: elementwise function of the input, applied before the kernel.
    """

    config: GPTConfig
    ops: Ops
    shape: Shape
    axes: AxisNames
    num_contract: int = 1
    adds_to_residual: bool = False
    activation: Activation | None = None

    def setup(self):
        """Create the kernel and the bias. `ops.linear` gathers the kernel if it is sharded."""
        cfg = self.config
        rank = len(self.axes)
        inputs = tuple(range(-rank, self.num_contract - rank))
        info = ParamInfo(self.axes, inputs, decays=True)
        fan_in = math.prod(self.shape[: self.num_contract])
        stddev = kernel_stddev(cfg, fan_in, adds_to_residual=self.adds_to_residual)
        init = Normal(stddev)
        self.kernel = self.ops.param(self, "kernel", init, self.shape, info)
        self.bias = None
        if cfg.bias:
            shape = self.shape[self.num_contract :]
            axes = self.axes[self.num_contract :]
            self.bias = named_param(self, "bias", nn.initializers.zeros, shape, axes)

    def __call__(self, x: Array) -> Array:
        """Map `[..., C1, .., Cn]` to `[..., O1, .., Om]` in the compute dtype.

        The kernel is `[C1, .., Cn, O1, .., Om]`. The product contracts its first n axes, where n is
        `num_contract`.
        """
        y = self.ops.linear(
            x,
            self.kernel,
            self.bias,
            num_contract=self.num_contract,
            activation=self.activation,
            dtype=self.config.compute_dtype,
        )
        return checkpoint_name(y, self._result)

    def parts(self, x: Array) -> list[Array]:
        """Map `[..., C]` to P results `[..., O1, .., Om]`, with a kernel `[C, P, O1, .., Om]`.

        For example, map the residual stream to queries, keys and values.
        """
        dtype = self.config.compute_dtype
        y = self.ops.linear_parts(x, self.kernel, self.bias, dtype=dtype)
        return checkpoint_name(y, self._result)

    @property
    def _result(self) -> str:
        """The name under which a remat policy (gpt2/utils/remat.py) stores the map's result."""
        return ATTENTION_LINEAR if "heads" in self.axes else MLP_LINEAR


def kernel_stddev(cfg: GPTConfig, fan_in: int, *, adds_to_residual: bool) -> float:
    """Return the standard deviation of the normal distribution from which a kernel is drawn.

    `fan_in` is the number of inputs of each output. `adds_to_residual` says whether the result of
    the linear map is added to the residual stream. The standard deviation is then smaller, or 0
    with `model.zero_init_projections`.
    """
    if adds_to_residual and cfg.zero_init_projections:  # Zhang et al. 2019, Fixup
        return 0.0
    stddev = cfg.init_std
    if cfg.init == "fan_in":  # LeCun et al. 1998, section 4.6
        stddev = fan_in**-0.5
    stddev /= cfg.width_ratio**0.5  # muP, Yang et al. 2022, table 8
    if adds_to_residual:
        # Two branches in each layer add to the residual stream. Division by the square root of
        # their number makes the variance of the sum independent of the depth (GPT-2, section 2.3).
        # CompleteP divides by the number at the base depth, and adjusts for the depth in `Block`.
        stddev /= math.sqrt(2 * (cfg.mup_base_depth or cfg.num_layers))
    return stddev


class Norm(nn.Module):
    """LayerNorm or RMSNorm, with statistics in float32.

    Attributes:
        config: the model's config, which determines the dtypes and the default `kind`.
        ops: the table of operations.
        kind: `layernorm` or `rmsnorm`; empty: `config.norm`.
        axis: name of the parameters' axis.
    """

    config: GPTConfig
    ops: Ops
    kind: str = ""
    axis: str = "norm"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalize the last axis of `x` `[..., D]`; the result has the compute dtype."""
        cfg = self.config
        shape = x.shape[-1:]
        axes = (self.axis,)
        center = (self.kind or cfg.norm) == "layernorm"
        scale = named_param(self, "scale", nn.initializers.ones, shape, axes)
        bias = None
        if center and cfg.bias:
            bias = named_param(self, "bias", nn.initializers.zeros, shape, axes)
        return self.ops.norm(
            x, scale, bias, center=center, eps=cfg.norm_eps, dtype=cfg.compute_dtype
        )


class Embedding(nn.Module):
    """A table of vectors, looked up by integers.

    Attributes:
        config: the model's config, which determines the dtypes.
        ops: the table of operations.
        num_rows: number of vectors.
        axes: names of the table's axes.
        stddev: standard deviation of the normal distribution from which the table is drawn.
        width: length of a vector; 0: D.
    """

    config: GPTConfig
    ops: Ops
    num_rows: int
    axes: AxisNames
    stddev: float
    width: int = 0

    def setup(self):
        """Create the table."""
        cfg = self.config
        shape = (self.num_rows, self.width or cfg.embed_dim)
        init = Normal(self.stddev)
        info = ParamInfo(self.axes, decays=True)
        self.embedding = self.ops.param(self, "embedding", init, shape, info)

    def __call__(self, indices: Array) -> Array:
        """Return the rows at int32 `indices` `[B, T]`, as `[B, T, width]` in the compute dtype."""
        return self.ops.look_up(self.embedding, indices, self.config.compute_dtype)

    def table(self) -> Array:
        """Return the table `[rows, D]`.

        This is a method because gpt2/training/diagnosis.py intercepts calls of methods, and checks
        their results for NaN and Inf.
        """
        return self.embedding


class MLP(nn.Module):
    """An MLP: two linear maps with an activation between them.

    A gated MLP has a third linear map, the gate (Shazeer 2020).
    """

    config: GPTConfig
    ops: Ops

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Map `x` `[B, T, D]` to `[B, T, D]` in the compute dtype."""
        cfg = self.config
        ops = self.ops
        D = cfg.embed_dim
        F = cfg.hidden_dim
        chex.assert_shape(x, (None, None, D))
        hidden = Linear(cfg, ops, (D, F), ("embed", "mlp"), name="c_fc")(x)
        hidden = ops.constrain(hidden, "batch", "length", "mlp")
        activation = ACTIVATIONS[cfg.activation]
        if cfg.is_gated:
            gate = Linear(cfg, ops, (D, F), ("embed", "mlp"), name="c_gate")(x)
            hidden = activation(gate) * hidden
        # The linear map applies the activation to its input: c_proj(activation(hidden)).
        project = Linear(
            cfg,
            ops,
            (F, D),
            ("mlp", "embed"),
            adds_to_residual=True,
            activation=None if cfg.is_gated else activation,
            name="c_proj",
        )
        return project(hidden)
