"""All options of a run: a typed, validated view of a ConfigDict, and config.json."""

import dataclasses
import functools
import itertools
import json
import math
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from configs.default import OPTIMIZERS
from gpt2.config.model import COMPUTED, GPTConfig, ModelConfig
from gpt2.config.options import DEFAULTS, Options, complete
from gpt2.config.shapes import Shape, Shapes, read_steps
from gpt2.errors import UserError

SCHEDULES = ("batch_schedule", "context_schedule", "window_schedule")


class PrecisionConfig(Options, group="precision"):
    """The `precision.` options."""


class DataConfig(Options, group="data"):
    """The `data.` options."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that hold text: a model that is only scored may be given all of it."""
        return ("train", "validation") if self.val_fraction < 1.0 else ("validation",)


class LossConfig(Options, group="loss"):
    """The `loss.` options."""

    def __post_init__(self) -> None:
        super().__post_init__()
        read = re.fullmatch(r"(\d+(\.\d+)?(,(?!$)|$))*", self.ahead)
        if not read:
            raise UserError(
                f"loss.ahead={self.ahead} cannot be read", "For example, use 0.5,0.25"
            )

    @property
    def ahead_weights(self) -> list[float]:
        """The weights of `ahead`."""
        return [float(weight) for weight in self.ahead.split(",") if weight]


class OptimConfig(Options, group="optim"):
    """The `optim.` options."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.rates, self.pieces  # which refuse what they cannot read
        given = {
            name
            for name, value in DEFAULTS.optim.items()
            if getattr(self, name) != value
        }
        readable = {option for reads in OPTIMIZERS.values() for option in reads}
        ignored = ", ".join(sorted((readable & given) - {*OPTIMIZERS[self.name]}))
        if ignored:
            raise UserError(f"optim.name={self.name} would ignore optim.{ignored}")
        for part in ("warmup", "decay"):
            both = getattr(self, f"{part}_steps") and getattr(self, f"{part}_percent")
            if both:
                raise UserError(
                    f"optim.{part}_steps and {part}_percent are both given", "Set one 0"
                )
        decays = self.decay_steps or self.decay_percent
        if decays and self.schedule != "wsd":
            raise UserError("optim.decay_steps and _percent are for wsd")
        warms_up = self.warmup_steps or self.warmup_percent
        if self.schedule == "inverse_sqrt" and not warms_up:
            raise UserError("inverse_sqrt needs a warm-up")
        free = self.name == "schedule_free"
        masks = f"optim.cautious={self.cautious}"
        if free and self.schedule != "constant":
            raise UserError("schedule_free wants optim.schedule=constant")
        several = [free, self.ema > 0, self.tail_average > 0].count(True) > 1
        if several:
            raise UserError(
                "optim.ema, tail_average and name=schedule_free all average", "Use one"
            )
        if free and self.cautious in ("updates", "both"):
            raise UserError(f"{masks} needs momentum")
        coupled = self.name in ("adam", "sgd") or not self.weight_decay
        if coupled and self.cautious in ("decay", "both"):
            raise UserError(f"{masks} finds no decay to mask")
        if coupled and self.scheduled_weight_decay:
            raise UserError("scheduled_weight_decay finds no decay")

    @property
    def pieces(self) -> tuple[tuple[int, float], ...]:
        """The steps of a `piecewise` schedule, ascending, each with its share of the peak."""
        (name, _, text), what = (
            self.schedule.partition(":"),
            f"optim.schedule={self.schedule}",
        )
        pieces = read_steps(what, text, float, "piecewise:1000=0.5,2000=0.1")
        if bool(pieces) != (name == "piecewise"):
            raise UserError(f"{what} cannot be read")
        return tuple(pieces.items())

    @property
    def rates(self) -> tuple[tuple[str, float], ...]:
        """The regular expressions of `layer_rates`, each with its factor."""
        pairs = [
            item.rpartition("=")[::2] for item in self.layer_rates.split(",") if item
        ]
        try:
            return tuple(
                (re.compile(pattern).pattern, float(factor))
                for pattern, factor in pairs
            )
        except (re.error, ValueError) as error:
            how = "Write REGEX=FACTOR,REGEX=FACTOR"
            raise UserError(
                f"optim.layer_rates={self.layer_rates}: {error}", how
            ) from None

    @property
    def averages(self) -> bool:
        """Whether what is validated lies in the optimizer's state: an average of the weights."""
        return self.name == "schedule_free" or self.ema > 0 or self.tail_average > 0

    def tail_start(self, num_steps: int) -> int:
        """Returns the step after which `tail_average` begins in a run of `num_steps`."""
        return num_steps - math.floor(num_steps * self.tail_average + 1e-9)

    def warmup(self, num_steps: int) -> int:
        """Returns the steps of the warm-up in a run of `num_steps`."""
        return self.warmup_steps or math.floor(
            num_steps * self.warmup_percent / 100 + 1e-9
        )

    def decay(self, num_steps: int) -> int:
        """Returns the steps over which `wsd` decays in a run of `num_steps`, at least 1."""
        percent = self.decay_percent or 20  # Hu et al. 2024
        return self.decay_steps or max(math.floor(num_steps * percent / 100 + 1e-9), 1)


class TrainConfig(Options, group="train"):
    """The `train.` options."""

    def is_due(self, step: int, every: int) -> bool:
        """Returns whether what comes `every` so many steps, and last, comes after a step."""
        return step == self.num_steps or (every > 0 and step % every == 0)


class MemoryConfig(Options, group="memory"):
    """The `memory.` options."""


class LoggingConfig(Options, group="logging"):
    """The `logging.` options."""


class RulesConfig(Options, group="parallel.rules"):
    """The `parallel.rules.` options: axis of a parameter -> mesh axes, separated by commas."""

    def axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes of a rule, outermost first."""
        value = getattr(self, name)
        return () if value == "none" else tuple(value.split(","))


class ParallelConfig(Options, group="parallel"):
    """The `parallel.` options: the sizes of the mesh's axes, and what they split."""

    rules: RulesConfig = RulesConfig()

    @property
    def sizes(self) -> dict[str, int]:
        """The wanted size of every mesh axis; -1: the rest of the devices."""
        sizes = dict(data=self.data, fsdp=self.fsdp, tensor=self.tensor)
        axis = {"zero1": "fsdp", "zero3": "fsdp", "megatron": "tensor"}.get(
            self.strategy
        )
        if axis and sizes[axis] == 1:
            sizes[axis] = -1
            sizes["data"] = 1 if self.data == -1 else self.data
        return sizes

    def __post_init__(self) -> None:
        super().__post_init__()
        _, fsdp, tensor = self.sizes.values()
        is_split = (fsdp, tensor) != (1, 1)
        whose = "is data parallel only, without fsdp or tensor"
        if self.strategy == "ddp" and is_split:
            raise UserError(f"parallel.strategy=ddp {whose}")
        if self.backend == "pmap" and is_split:
            raise UserError(f"parallel.backend=pmap {whose}")


def tokens_by_name(spec: str) -> int:
    """Returns how many tokens a name of a tokenizer promises (`bpe:SIZE`: at most); 0: unknown."""
    name, _, size = spec.partition(":")
    return {
        "gpt2": 50257,
        "byte": 257,
        "bpe": int(size) if size.isdecimal() else 0,
    }.get(name, 0)


class Config(Options, group=""):
    """Every option of a run, validated."""

    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    logging: LoggingConfig = LoggingConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        model = self.model
        data = self.data
        train = self.train
        memory = self.memory
        if data.val_fraction == 1:
            raise UserError("data.val_fraction=1 leaves no training text")
        rest = data.batch_size % train.accumulate_steps
        parts = train.accumulate_steps
        if rest:
            raise UserError(
                f"train.accumulate_steps={parts} does not divide data.batch_size"
            )
        finer = self.precision.logits not in ("float32", self.precision.compute)
        if finer:
            raise UserError(
                f"precision.logits={self.precision.logits} is for that compute type alone"
            )
        unsaved = train.keep_every and train.keep_every % (
            train.checkpoint_every or math.inf
        )
        if unsaved:
            raise UserError("train.keep_every is no multiple of train.checkpoint_every")
        unread = not re.fullmatch("((hf|run):.+)?", train.init_from)
        if unread:
            raise UserError(
                f"train.init_from={train.init_from} is not hf:DIR, run:DIR or run:DIR@STEP"
            )
        once = not memory.scan_layers
        unroll = memory.scan_unroll
        if once and unroll > 1:
            raise UserError("memory.scan_unroll is ignored without memory.scan_layers")
        if model.num_layers % unroll:
            raise UserError("memory.scan_unroll does not divide model.num_layers")
        # Compilers keep half of what unrolled layers should move, or more: docs/parallelism.md.
        holds = memory.remat == "offload" and (once or unroll > 1)
        if holds:
            raise UserError(
                "memory.remat=offload needs memory.scan_layers=True and scan_unroll=1"
            )
        moved = train.context_schedule or train.batch_schedule * (data.packing == "pad")
        if moved and data.packing != "concat":
            raise UserError(f"data.packing={data.packing} keeps its shapes")
        in_blocks = data.shuffle_block and data.packing != "concat"
        if in_blocks:
            raise UserError(
                f"data.shuffle_block is for data.packing=concat, not {data.packing}"
            )
        pieces = self.shapes.pieces
        if max(pieces) >= train.num_steps:
            raise UserError(f"a schedule names step {max(pieces)}, past the end")
        for start, shape in (
            pieces.items() if any(getattr(train, n) for n in SCHEDULES) else ()
        ):
            self.at(shape)  # which refuses what no run may have
            length = shape.context_length
            done = self.shapes.tokens(start)
            odd = length < 1 or model.context_length % length or done % length
            what = f"train.context_schedule has {length}, which does not divide"
            if odd:
                raise UserError(
                    f"{what} model.context_length and the {done:,} tokens of steps before"
                )

    @functools.cached_property
    def shapes(self) -> Shapes:
        """The shapes of the run's steps."""
        texts = {n: getattr(self.train, n) for n in SCHEDULES}
        example = "0=64,2000=128"
        schedules = [
            read_steps(f"train.{n}={texts[n]}", texts[n], int, example) for n in texts
        ]
        first = self.data.batch_size, self.model.context_length, self.model.window
        pieces = {0: Shape(*first)}
        for start in sorted({0, *itertools.chain(*schedules)}):
            sizes = (
                each.get(start, now) for each, now in zip(schedules, first, strict=True)
            )
            first = pieces[start] = Shape(*sizes)
        return Shapes(pieces)

    def at(self, shape: Shape) -> "Config":
        """Returns the options of a run whose steps all have a shape, but for their context."""
        off = {f"train.{name}": "" for name in SCHEDULES}
        given = {"data.batch_size": shape.batch_size, "model.window": shape.window}
        return with_options(self, off | given)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in the largest global batch."""
        return self.shapes.largest.tokens

    @property
    def micro_batch_size(self) -> int:
        """Sequences that a forward pass reads, over all devices."""
        return self.data.batch_size // self.train.accumulate_steps

    @classmethod
    def from_dict(cls, tree: Mapping | ConfigDict) -> "Config":
        """Builds the typed view of a ConfigDict or of a config.json; what lacks has its default."""
        options = complete(tree)
        options["parallel"] |= {"rules": RulesConfig(**options["parallel"]["rules"])}
        groups = {name: type(getattr(cls, name)) for name in options if name != "seed"}
        return cls(
            seed=options["seed"],
            **{name: groups[name](**options[name]) for name in groups},
        )

    def to_dict(self) -> dict:
        """Returns nested plain dicts, as config.json holds them."""
        return dataclasses.asdict(self)

    def with_vocabulary(self, tokens: int) -> "Config":
        """Returns the config with a `model.vocab_size` of 0 set to the tokenizer's; 0: unknown."""
        size = self.model.vocab_size or tokens
        tokenizer = f"data.tokenizer={self.data.tokenizer}"
        if not size:
            raise UserError(
                f"{tokenizer} tells no size", "Set --config.model.vocab_size"
            )
        if size < tokens:
            raise UserError(
                f"model.vocab_size={size} is less than the {tokens} of {tokenizer}"
            )
        model = dataclasses.replace(self.model, vocab_size=size)
        return dataclasses.replace(self, model=model)

    def gpt(self) -> GPTConfig:
        """Returns the model as it ends; `model.vocab_size` must be resolved (not 0)."""
        computed = {name: option(self, path) for name, path in COMPUTED.items()}
        options = dataclasses.asdict(self.model) | {"window": self.shapes.last.window}
        return GPTConfig(**options, **computed)


def option(config: Config, name: str) -> Any:
    """Returns the value of an option by its dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def with_options(config: Config, options: Mapping[str, Any]) -> Config:
    """Returns the config with some options set, by dotted name."""
    tree = ConfigDict(config.to_dict())
    tree.update_from_flattened_dict(options)
    return Config.from_dict(tree)


def read_options(name: str) -> dict[str, Any]:
    """Returns all options of a config file or of a run's config.json, not yet checked together.

    `FILE:ARGUMENT` hands the argument to the file's `get_config`. A file that is not in this folder
    may be one that came with the package: `configs/quickstart.py`.
    """
    file, _, argument = (name, "", "") if Path(name).is_file() else name.partition(":")
    places = Path(file), Path(__file__).parents[2] / file
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise UserError(
            f"--config={name} is no file", "See configs/ for those there are"
        )
    try:
        if path.suffix == ".json":
            tree = json.loads(path.read_text("utf-8"))
            if "seed" not in tree:
                raise UserError("it does not hold the options of a run")
        else:
            tree = runpy.run_path(str(path))["get_config"](*filter(None, [argument]))
        return complete(tree)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except Exception as error:  # a config file is code of any kind
        raise UserError(
            f"{name} cannot be read ({type(error).__name__}: {error})"
        ) from error


def load_config(workdir: Path) -> Config:
    """Reads the options of a run from its config.json."""
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise UserError(f"{workdir} holds no run", "Name a workdir of train.py")
    return Config.from_dict(read_options(str(path)))
