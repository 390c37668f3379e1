"""The case to measure, from the command line, and the peers that measure it too."""

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

from absl import flags

from gpt2.config import CHOICES, DEFAULTS, SIZES, Config, read_option, with_options
from gpt2.errors import UserError, require_choice

# What can be measured, and the peers that can do it too.
PEERS = {
    "train": ("torch", "torch_compile", "hf", "hf_compile"),
    "eval": ("torch", "torch_compile", "hf", "hf_compile"),
    "generate": ("hf",),
    "data": ("torch",),
}

# Options that would change nothing. `eval` and `generate` use one device, and `data` none.
LAYOUT = ("backend", "data", "fsdp", "tensor")
IGNORED = {
    "train": (),
    "eval": (*LAYOUT, "remat"),
    "generate": (*LAYOUT, "remat", "attention"),
    "data": (*LAYOUT, "remat", "attention", "scan_layers", "compute", "vary"),
}

# Beside OpenAI's sizes: (num_layers, num_heads, embed_dim), context, batch, vocabulary.
SMALL = {
    "quickstart": ((4, 4, 128), 128, 16, 4096),
    "shakespeare-char-cpu": ((4, 4, 128), 64, 12, 65),
    "shakespeare-char": ((6, 6, 384), 256, 64, 65),
}


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the benchmark."""

    def choice(name: str, default: str, choices: tuple[str, ...], about: str) -> None:
        flags.DEFINE_enum(name, default, choices, about, flag_values=values)

    def number(name: str, default: int | None, about: str) -> None:
        flags.DEFINE_integer(name, default, about, flag_values=values)

    choice("model", "gpt2-124m", (*SIZES, *SMALL), "What is trained, scored or sampled.")
    number("batch_size", None, "Sequences per step, over all devices; the model's own if empty.")
    number("context_length", None, "Tokens in a sequence; the model's own if empty.")
    choice("compute", "float32", CHOICES["precision.compute"], "Type of products.")
    choice("attention", "auto", CHOICES["model.attention"], "Implementation of attention.")
    choice("remat", "none", CHOICES["memory.remat"], "What the backward pass recomputes.")
    flags.DEFINE_bool("scan_layers", False, "One compiled block.", flag_values=values)
    choice("backend", "pjit", CHOICES["parallel.backend"], "How devices are used.")
    for axis, size in (("data", -1), ("fsdp", 1), ("tensor", 1)):
        number(axis, size, "Devices along this axis; -1: the rest.")
    flags.DEFINE_list("peers", [], f"Any of {', '.join(PEERS['train'])}.", flag_values=values)
    flags.DEFINE_multi_string(
        "vary",
        [],
        "OPTION=VALUE,...: this project with other options, such as model.position=rope. A flag "
        "for each contestant.",
        flag_values=values,
    )
    number("rounds", 5, "Turns of each contestant.")
    flags.DEFINE_float(
        "seconds", 2.0, "Least length of a turn after its first step.", flag_values=values
    )
    flags.DEFINE_bool("shares", False, "Show the time of each part.", flag_values=values)
    flags.DEFINE_bool("json", False, "Print JSON in place of a table.", flag_values=values)


def make_case(subject: str, values: flags.FlagValues = flags.FLAGS) -> dict[str, Any]:
    """Returns all that decides what a step computes, by the names of the config's options.

    Args:
        subject: one of `PEERS`.
        values: parsed flags.

    Raises:
        UserError: a flag is out of range, or would be ignored.
    """
    for name in IGNORED[subject]:
        if values[name].value != values[name].default:
            raise UserError(f"--{name} would be ignored by {subject}", f"Leave out --{name}")
    prompt_and_text = 2 if subject == "generate" else 1
    least = dict(batch_size=1, context_length=prompt_and_text, rounds=1, seconds=0)
    for name, smallest in least.items():
        value = values[name].value
        if value is not None and not smallest <= value < math.inf:
            raise UserError(f"--{name}={value} is out of range", f"Use {smallest} or more")
    sizes, *defaults = SMALL.get(values.model) or (SIZES[values.model], 1024, 2, 50257)
    context_length, batch_size, vocab_size = defaults
    names = ("model", "compute", "attention", "remat", "scan_layers", *LAYOUT, "shares")
    case = {"subject": subject} | {name: values[name].value for name in names}
    case |= zip(("num_layers", "num_heads", "embed_dim"), sizes, strict=True)
    case["context_length"] = values.context_length or context_length
    case["batch_size"] = values.batch_size or batch_size
    case["vocab_size"] = vocab_size
    case["vary"] = {}
    return case


def make_config(case: dict[str, Any]) -> Config:
    """Returns the run that a case describes; other options have their defaults.

    Raises:
        UserError: the options cannot work.
    """
    tree = DEFAULTS.to_dict()
    shape = {name: case[name] for name in tree["model"] if name in case}
    tree["model"] |= shape
    tree["data"]["batch_size"] = case["batch_size"]
    tree["precision"]["compute"] = case["compute"]
    tree["parallel"].update({name: case[name] for name in tree["parallel"] if name in case})
    tree["memory"] = {name: case[name] for name in tree["memory"]}
    return with_options(Config.from_dict(tree), case["vary"])


def read_options(text: str) -> dict[str, Any]:
    """Returns the options of `OPTION=VALUE,...` by their dotted names, with their types.

    Raises:
        UserError: there is no such option, or its value is not of its type.
    """
    options: dict[str, Any] = {}
    for setting in text.split(","):
        name, _, value = setting.partition("=")
        if not value:
            raise UserError(
                f"--vary={text} does not set an option by {setting!r}",
                "For example, use --vary=model.position=rope,model.num_kv_heads=4",
            )
        options[name] = read_option(name, value)
    return options


def read_variations(texts: Sequence[str], case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the options of each `--vary` by its text.

    Raises:
        UserError: as for `read_options`, the options cannot work, or two contestants are one.
    """
    variations, known = {}, [make_config(case)]
    for text in texts:
        variations[text] = read_options(text)
        varied = make_config(case | {"vary": variations[text]})
        if varied in known:
            raise UserError(
                f"--vary={text} gives a contestant that there is already",
                "Leave it out, or give other values",
            )
        known.append(varied)
    return variations


def check_peers(peers: list[str], case: dict[str, Any]) -> None:
    """Raises a UserError unless the peers exist, are installed and can do what the case asks."""
    subject = case["subject"]
    for peer in peers:
        require_choice("--peers", peer, PEERS[subject], flag=False)
        package = "transformers" if peer.startswith("hf") else "torch"
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"--peers={peer} needs {package}", "Install it: pip install 'gpt2-jax[peers]'"
            )
    if case["shares"] and subject in ("generate", "data"):
        raise UserError(f"{subject} does not report --shares", "Leave it out, or choose train")
