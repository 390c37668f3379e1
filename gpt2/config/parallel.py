"""The `parallel.` options: the sizes of the mesh's axes, and what they split.

Defaults, meanings and units are in configs/default.py.
"""

import dataclasses

from gpt2.config.choices import DEFAULTS, require_choices
from gpt2.errors import UserError, require_choice

# What a rule may say. `tensor` comes first: a step gathers what `fsdp` splits, and works on the
# parts that `tensor` makes.
_SPLITS = ("none", "fsdp", "tensor", "tensor,fsdp")

# The axis of the mesh that a strategy is about.
_STRATEGY_AXIS = {"zero1": "fsdp", "zero3": "fsdp", "megatron": "tensor"}


@dataclasses.dataclass(frozen=True)
class RulesConfig:
    """The `parallel.rules.` options: axis of a parameter -> mesh axes, separated by commas."""

    table: str = DEFAULTS.parallel.rules.table
    embed: str = DEFAULTS.parallel.rules.embed
    norm: str = DEFAULTS.parallel.rules.norm
    heads: str = DEFAULTS.parallel.rules.heads
    mlp: str = DEFAULTS.parallel.rules.mlp
    vocab: str = DEFAULTS.parallel.rules.vocab
    position: str = DEFAULTS.parallel.rules.position
    sequence: str = DEFAULTS.parallel.rules.sequence

    def __post_init__(self):
        for name in self.names():
            choices = ("none", "tensor") if name == "sequence" else _SPLITS
            usual = DEFAULTS.parallel.rules[name]
            require_choice(f"parallel.rules.{name}", getattr(self, name), choices, usual=usual)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the axes that have a rule."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes of a rule, outermost first."""
        value = getattr(self, name)
        return () if value == "none" else tuple(value.split(","))


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """The `parallel.` options."""

    backend: str = DEFAULTS.parallel.backend
    strategy: str = DEFAULTS.parallel.strategy
    data: int = DEFAULTS.parallel.data
    fsdp: int = DEFAULTS.parallel.fsdp
    tensor: int = DEFAULTS.parallel.tensor
    fsdp_gather: str = DEFAULTS.parallel.fsdp_gather
    rules: RulesConfig = RulesConfig()

    @property
    def strategy_axis(self) -> str | None:
        """The mesh axis that the strategy splits something over, or None."""
        return _STRATEGY_AXIS.get(self.strategy)

    @property
    def sizes(self) -> dict[str, int]:
        """The wanted size of every mesh axis; -1: the rest of the devices."""
        sizes = dict(data=self.data, fsdp=self.fsdp, tensor=self.tensor)
        axis = self.strategy_axis
        if axis and sizes[axis] == 1:
            sizes[axis] = -1
            sizes["data"] = 1 if self.data == -1 else self.data
        return sizes

    def __post_init__(self):
        require_choices("parallel", self)
        for name in ("data", "fsdp", "tensor"):
            size = getattr(self, name)
            if size != -1 and size < 1:
                raise UserError(
                    f"parallel.{name}={size} is not a number of devices",
                    f"For example, use --config.parallel.{name}={-1 if name == 'data' else 1}",
                )
        rest = [f"parallel.{name}" for name, size in self.sizes.items() if size == -1]
        if len(rest) > 1:
            raise UserError(
                f"{' and '.join(rest)} are both -1, and only one axis can take the rest",
                f"Give one of them a size. For example, use --config.{rest[-1]}=1"
                if self.strategy_axis is None
                else f"For example, use --config.parallel.{self.strategy_axis}=2",
            )
        self._refuse_ignored()

    def _refuse_ignored(self) -> None:
        """Refuses what data parallelism alone, or one device along an axis, would ignore."""
        split = [name for name in ("fsdp", "tensor") if self.sizes[name] != 1]
        if self.strategy == "ddp" and split:
            size = getattr(self, split[0])
            raise UserError(
                f"parallel.strategy=ddp would ignore parallel.{split[0]}={size}",
                "Use --config.parallel.strategy=auto",
            )
        if self.backend == "pmap" and split:
            ignored = split[0] if getattr(self, split[0]) != 1 else "strategy"
            raise UserError(
                f"parallel.backend=pmap is data parallel only and would ignore "
                f"parallel.{ignored}={getattr(self, ignored)}",
                "Use --config.parallel.backend=pjit",
            )
        if self.fsdp_gather != "auto" and ("fsdp" not in split or self.strategy == "zero1"):
            raise UserError(
                f"parallel.fsdp_gather={self.fsdp_gather} is ignored while no parameters are "
                "stored over parallel.fsdp",
                "Use --config.parallel.fsdp_gather=auto",
            )
        for name in RulesConfig.names():
            changed = sorted(set(self.rules.axes(name)) ^ set(RulesConfig().axes(name)))
            if changed and not set(changed) & set(split):
                needed = changed[0]
                raise UserError(
                    f"parallel.rules.{name}={getattr(self.rules, name)} is ignored while "
                    f"parallel.{needed}=1",
                    f"Use --config.parallel.rules.{name}={getattr(RulesConfig(), name)}, or more "
                    f"devices along parallel.{needed}",
                )
