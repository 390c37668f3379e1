"""Arms: the configs that a sweep compares, from what `--vary` says."""

import csv
import dataclasses
import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt2 import cli
from gpt2.config import Config, option, read_config_file, read_option, with_options
from gpt2.errors import UserError

BASELINE = "baseline"
_RECIPE = "recipe"
_TUNABLE = ("optim.", "loss.")  # groups whose options leave the terms of a comparison equal
_ADVICE = re.compile(r"--config\.([\w.]+)=('[^']*'|\S*[^\s.,;)])")  # as errors of options write it


@dataclasses.dataclass(frozen=True)
class Arm:
    """One of the things that are compared.

    Attributes:
        change: what makes it differ, such as `optim.name=muon`, or `baseline`.
        config: all of its options; the seed is the sweep's first.
        size: of the model, such as `4x128`, where several are compared; else empty.
    """

    change: str
    config: Config
    size: str = ""

    @property
    def name(self) -> str:
        """A name that no other arm has; also that of its folder."""
        return f"{self.size},{self.change}" if self.size else self.change


@dataclasses.dataclass(frozen=True)
class _Value:
    """One value of a `--vary`: a label and what it changes."""

    label: str
    options: Mapping[str, Any]
    recipe: Path | None = None

    def is_in(self, config: Config) -> bool:
        """Returns whether a config has this value already."""
        if self.recipe:
            return False
        return all(option(config, name) == value for name, value in self.options.items())


def make_arms(config: Config, vary: Sequence[str], *, one_at_a_time: bool) -> list[Arm]:
    """Returns the arms, the baseline first. The baseline is `config` itself, named or not.

    Args:
        config: the options of `--config` and its overrides.
        vary: `OPTION=VALUE,...` each, or `recipe=FILE,...`. A value may set more options, as in
            `optim.name=muon+optim.weight_decay=0.0`. Quotes protect a comma.
        one_at_a_time: each value by itself, in place of every combination.

    Raises:
        UserError: a `--vary` cannot be read, two arms are the same, or an arm's options cannot
            work; the message names it.
    """
    axes = [_read_axis(text) for text in vary]
    if not one_at_a_time:
        _refuse_shared_options(axes)
    chosen: Iterable[Sequence[_Value]] = itertools.product(*axes)
    if one_at_a_time:
        chosen = [(value,) for axis in axes for value in axis]
    arms = {BASELINE: config}
    for values in chosen:
        replaced = any(value.recipe for value in values)
        name = ",".join(each.label for each in values if replaced or not each.is_in(config))
        if not name:
            continue  # the baseline, by its own name
        changed = _apply(config, values, name)
        if name in arms or changed in arms.values():
            raise UserError(f"--vary makes the arm {name} twice", "Leave one of them out")
        tokenizers = {changed.data.tokenizer, config.data.tokenizer}
        if len(tokenizers) > 1 and changed.model.vocab_size == config.model.vocab_size != 0:
            raise UserError(
                f"the arm {name} has another tokenizer, and the same "
                f"model.vocab_size={config.model.vocab_size}",
                "Add --config.model.vocab_size=0",
            )
        arms[name] = changed
    return [Arm(name, changed) for name, changed in arms.items()]


def describe_warmup(config: Config) -> str:
    """Returns a sentence if the learning rate of a run only rises, else nothing."""
    num_steps = config.train.num_steps
    warmup = config.optim.warmup(num_steps)
    if warmup < num_steps:
        return ""
    return (
        f"Learning rates only rise: the warm-up has {warmup:,} steps, and a run {num_steps:,}. "
        f"Give {config.optim.shorter_warmup(num_steps)}."
    )


def _read_axis(text: str, flag: str = "vary") -> list[_Value]:
    """Reads the values of a `--vary` or a `--tune`.

    Raises:
        UserError: it is not of the form `OPTION=VALUE,...`, or a value is not of its type.
    """
    name, _, rest = text.partition("=")
    values = next(csv.reader([rest]), [])
    if not name or not all(values) or not values:
        raise UserError(
            f"--{flag}={text} names no values", f"For example, use --{flag}=optim.beta2=0.95,0.99"
        )
    if name == _RECIPE:
        return [_Value(f"{_RECIPE}={Path(value).stem}", {}, Path(value)) for value in values]
    return [_read_value(name, value) for value in values]


def _read_value(name: str, text: str) -> _Value:
    """Reads one value of an option, and the options that it sets beside."""
    settings = re.split(r"\+(?=[a-z_]+\.[a-z_0-9]+=)", f"{name}={text}")
    options = {}
    for setting in settings:
        member, _, value = setting.partition("=")
        options[member] = read_option(member, value)
    if "seed" in options:
        raise UserError("--vary=seed changes nothing that is to be compared", "Use --seeds=N")
    label = "+".join(f"{member}={value}" for member, value in options.items())
    return _Value(re.sub(r"[^\w.,=+-]+", "_", label), options)


def varied_options(vary: Sequence[str]) -> set[str]:
    """Returns the options that some value of the `--vary` sets; none for recipes."""
    return {name for text in vary for value in _read_axis(text) for name in value.options}


def read_tuned(texts: Sequence[str], varied: set[str]) -> dict[str, list]:
    """Returns the values of each option that is tuned.

    Args:
        texts: `OPTION=VALUE,...` each.
        varied: the options that arms differ in.

    Raises:
        UserError: one cannot be tuned.
    """
    tune: dict[str, list] = {}
    for text in texts:
        values = [dict(value.options) for value in _read_axis(text, flag="tune")]
        name = text.partition("=")[0]
        if any(list(each) != [name] for each in values) or name in tune:
            raise UserError(f"--tune={text} sets several options", "Use one --tune for each")
        if not name.startswith(_TUNABLE):
            raise UserError(
                f"--tune={text} would change the terms of the comparison",
                "Tune options of optim. or loss., and vary others",
            )
        if name in varied:
            raise UserError(f"{name} is both varied and tuned", "Leave it out of one")
        tune[name] = [each[name] for each in values]
    return tune


def _refuse_shared_options(axes: Sequence[Sequence[_Value]]) -> None:
    """Refuses a grid in which two axes set the same option, so that one value would be lost."""
    seen: set[str] = set()
    for axis in axes:
        names = {name for value in axis for name in value.options}
        for name in sorted(names & seen):
            raise UserError(
                f"several --vary set {name}", "Set it in one of them, or use --one_at_a_time"
            )
        seen |= names


def _apply(config: Config, values: Sequence[_Value], name: str) -> Config:
    try:
        for value in values:
            if value.recipe:
                config = _with_command_line(read_config_file(str(value.recipe)), config)
        # Together, since some work only beside each other.
        options = {name: each for value in values for name, each in value.options.items()}
        config = with_options(config, options)
    except UserError as error:
        how = _advise_sweep(str(error), values)
        raise UserError(f"the arm {name} cannot work", how) from None
    return config


def _advise_sweep(error: str, values: Sequence[_Value]) -> str:
    """Returns an error whose advice is a `--vary` in place of flags of train.py.

    Those would change all arms, the baseline too.

    Args:
        error: of an arm's options.
        values: of the arm. One that sets the advised option takes the advice, else the first that
            the error is about.
    """
    if any(value.recipe for value in values):  # which takes what the command line sets
        return error
    named = [value for value in values if any(f"{name}=" in error for name in value.options)]

    def vary(advice: re.Match) -> str:
        advised = {name: text.strip("'") for name, text in _ADVICE.findall(advice[0])}
        setting = [value for value in values if advised.keys() & value.options.keys()]
        options = (setting or named or values)[0].options
        (name, first), *others = (dict(options) | advised).items()
        text = "+".join([str(first), *(f"{member}={value}" for member, value in others)])
        quoted = f'"{text}"' if "," in text else text
        return shlex.quote(f"--vary={name}={quoted}")

    error = re.sub(rf"{_ADVICE.pattern}( {_ADVICE.pattern})*", vary, error)
    return re.sub(r"--config\.(?=\w+\.\w)", "", error)  # options that are named without a value


def _with_command_line(recipe: Config, config: Config) -> Config:
    """Returns a recipe with the options that the command line sets, which hold for all arms."""
    return with_options(recipe, {name: option(config, name) for name in cli.overrides()})
