"""The cases to measure, from the command line, and the peers that measure them too."""

import importlib.util
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from gpt2.config import CHOICES, DEFAULTS, SIZES, Config, read_option, with_options
from gpt2.errors import UserError, require_choice, require_writable_file

# What the command can do, and the peers that can do it too. `verify` does not measure.
_ALL_PEERS = tuple(
    f"{peer}{suffix}" for peer in ("torch", "torch_xla", "hf") for suffix in ("", "_compile")
)
PEERS = {
    "train": _ALL_PEERS,
    "eval": _ALL_PEERS,
    "generate": ("hf",),
    "data": ("torch",),
    "verify": _ALL_PEERS,
}

# Options that would change nothing. `eval` and `generate` use one device, and `data` none.
LAYOUT = ("backend", "data", "fsdp", "tensor")
_DEFAULTS: dict[str, Any] = {"backend": "pjit", "data": -1, "fsdp": 1, "tensor": 1, "remat": "none"}
_OF_TRAINING = (*LAYOUT, "remat", "optimizer", "with_data")
IGNORED: dict[str, tuple[str, ...]] = {
    "train": (),
    "eval": _OF_TRAINING,
    "generate": (*_OF_TRAINING, "attention"),
    "data": (*_OF_TRAINING, "attention", "matmul_precision", "scan_layers", "compute", "vary"),
    "verify": ("vary", "with_data", "rounds", "seconds", "shares", "json", "csv", "plot"),
}

# Beside OpenAI's sizes: (num_layers, num_heads, embed_dim), context, batch, vocabulary.
SMALL = {
    "quickstart": ((4, 4, 128), 128, 16, 4096),
    "shakespeare-char-cpu": ((4, 4, 128), 64, 12, 65),
    "shakespeare-char": ((6, 6, 384), 256, 64, 65),
}

# Beside peers, OpenAI's sizes have a vocabulary of a multiple of 128, as nanoGPT trains. Tables are
# padded to one here, where a device multiplies such shapes faster, and not in peers.
_PADDED_VOCAB = 50304

# What a variation may set, but for what is shared.
_VARIABLE = (
    *("model.", "loss.", "optim.", "precision.", "parallel.", "memory."),
    *("data.document_mask", "train.accumulate_steps", "train.skip_"),
)
_OF_TRAINING_ALONE = ("optim.", "parallel.", "memory.remat", "train.", "loss.")
_SHARED = {
    "model.context_length": "Use --context_length",
    "model.vocab_size": "Choose another --model",
    "data.batch_size": "Use --batch_size",
}

# Forms of attention that every side has, in this project's names. `flash` is what `auto` takes
# where there is a flash kernel; the worker refuses it elsewhere.
ATTENTION = {"eager": "reference", "sdpa": "auto", "flash": "auto"}


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the benchmark."""

    def choice(name: str, default: str, choices: Sequence[str], about: str) -> None:
        flags.DEFINE_enum(name, default, choices, about, flag_values=values)

    def number(name: str, default: int | None, about: str) -> None:
        flags.DEFINE_integer(name, default, about, flag_values=values)

    def texts(name: str, default: str, about: str) -> None:
        flags.DEFINE_list(name, default, about, flag_values=values)

    def text(name: str, about: str) -> None:
        flags.DEFINE_string(name, "", about, flag_values=values)

    def switch(name: str, about: str) -> None:
        flags.DEFINE_bool(name, False, about, flag_values=values)

    choice("model", "gpt2-124m", (*SIZES, *SMALL), "What is trained, scored or sampled.")
    texts(
        "batch_size",
        "",
        "Sequences per step, over all devices; the model's own if empty. Of a list, such as "
        "4,8,16, each is measured.",
    )
    number("context_length", None, "Tokens in a sequence; the model's own if empty.")
    texts("compute", "float32", f"Type of products, or a list: {_list('precision.compute')}.")
    choice(
        "matmul_precision",
        "default",
        ("highest", "high", "default"),
        "How float32 is multiplied, on all sides: highest: as float32; high: as TF32 or three "
        "times bfloat16; default: as JAX does on the device if not told.",
    )
    choice(
        "attention",
        "sdpa",
        tuple(ATTENTION),
        "Attention on all sides: eager: all scores at once; sdpa: the fused function that each "
        "side prefers; flash: a flash kernel, on GPUs.",
    )
    choice("optimizer", "adamw", ("adamw", "sgd"), "On all sides; sgd has Nesterov's momentum.")
    switch("with_data", "Read each batch by the loader of each side, inside of the time.")
    choice(
        "remat", _DEFAULTS["remat"], CHOICES["memory.remat"], "What the backward pass recomputes."
    )
    switch("scan_layers", "One compiled block here; peers' layers stay unrolled.")
    choice("backend", _DEFAULTS["backend"], CHOICES["parallel.backend"], "How devices are used.")
    for axis in ("data", "fsdp", "tensor"):
        number(axis, _DEFAULTS[axis], "Devices along this axis; -1: the rest.")
    texts("peers", "", f"Any of {', '.join(PEERS['train'])}.")
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
    switch("shares", "Show the time of each part.")
    switch("json", "Print JSON in place of a table.")
    text("csv", "File for a table of all settings and figures.")
    text("plot", "File for a picture of speeds and ratios, ending in .png.")


def make_cases(subject: str, values: flags.FlagValues = flags.FLAGS) -> list[dict[str, Any]]:
    """Returns all that decides what a step computes, for each compute type and batch size.

    A case names the config's options as configs/default.py does.

    Args:
        subject: one of `PEERS`.
        values: parsed flags.

    Raises:
        UserError: a flag is out of range, or would be ignored.
    """
    _check_flags(subject, values)
    sizes, context_length, batch_size, vocab_size = SMALL.get(values.model) or (
        *(SIZES[values.model], 1024, 2, _PADDED_VOCAB if values.peers else 50257),
    )
    batch_sizes = [_read_batch_size(text) for text in values.batch_size] or [batch_size]
    for name, given in (("batch_size", batch_sizes), ("compute", values.compute)):
        if len(set(given)) < len(given):
            raise UserError(f"--{name}={','.join(map(str, given))} repeats one", "Name each once")
    names = (
        *("model", "matmul_precision", "attention", "optimizer", "with_data", "remat"),
        *("scan_layers", *LAYOUT, "shares"),
    )
    case: dict[str, Any] = {"subject": "train" if subject == "verify" else subject}
    case |= {name: values[name].value for name in names}
    case |= zip(("num_layers", "num_heads", "embed_dim"), sizes, strict=True)
    case["context_length"] = values.context_length or context_length
    case["vocab_size"] = vocab_size
    case["vary"] = {}
    return [
        case | {"compute": compute, "batch_size": batch_size}
        for compute, batch_size in itertools.product(values.compute, batch_sizes)
    ]


def _read_batch_size(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise UserError(
            f"--batch_size={text} is not a whole number of 1 or more", "For example, use 4 or 4,8"
        )
    return int(text)


def _check_flags(subject: str, values: flags.FlagValues) -> None:
    """Raises a UserError for flags out of range, ignored, or in contradiction."""
    for name in IGNORED[subject]:
        if values[name].value != values[name].default:
            raise UserError(f"--{name} would be ignored by {subject}", f"Leave out --{name}")
    prompt_and_text = 2 if subject == "generate" else 1
    least = dict(context_length=prompt_and_text, rounds=1, seconds=0)
    for name, smallest in least.items():
        value = values[name].value
        if value is not None and not smallest <= value < math.inf:
            raise UserError(f"--{name}={value} is out of range", f"Use {smallest} or more")
    if not values.compute:
        raise UserError("--compute names no type", "For example, use --compute=float32")
    for compute in values.compute:
        require_choice("--compute", compute, CHOICES["precision.compute"], flag=False)
        _check_precision(values.matmul_precision, compute, f"--compute={compute}")
    for name, file in (("csv", values.csv), ("plot", values.plot)):
        if file:
            require_writable_file(name, Path(file))
    if values.plot and not values.plot.endswith(".png"):
        raise UserError(f"--plot={values.plot} does not end in .png", "Name a PNG file")


def _check_precision(matmul_precision: str, compute: str, asked: str) -> None:
    if matmul_precision != "default" and compute != "float32":
        raise UserError(
            f"--matmul_precision={matmul_precision} is about products of float32, and {asked} has "
            "none that matter",
            "Leave it out, or compute in float32",
        )


def make_config(case: dict[str, Any]) -> Config:
    """Returns the run that a case describes; other options have their defaults.

    The learning rate is constant, as the peers' is.

    Raises:
        UserError: the options cannot work.
    """
    try:
        return _make_config(case)
    except UserError as error:  # names the config's options, of which this command has flags

        def flag(match: re.Match) -> str:
            return f"--{match[1]}" if match[1] in case else match[0]

        how = re.sub(r"--config\.\w+\.(\w+)", flag, error.how)
        raise UserError(error.what, how) from None


def _make_config(case: dict[str, Any]) -> Config:
    tree = DEFAULTS.to_dict()
    shape = {name: case[name] for name in tree["model"] if name in case}
    tree["model"] |= shape | {"attention": ATTENTION[case["attention"]]}
    tree["data"]["batch_size"] = case["batch_size"]
    tree["precision"]["compute"] = case["compute"]
    tree["optim"] |= {
        "name": case["optimizer"],
        "schedule": "constant",
        "warmup_steps": 0,
        "end_learning_rate": tree["optim"]["learning_rate"],
    }
    tree["parallel"].update({name: case[name] for name in tree["parallel"] if name in case})
    tree["memory"].update({name: case[name] for name in tree["memory"] if name in case})
    return with_options(Config.from_dict(tree), case["vary"])


def read_options(text: str) -> dict[str, Any]:
    """Returns the options of `OPTION=VALUE,...` by their dotted names, with their types.

    Raises:
        UserError: there is no such option, its value is not of its type, or it changes no step.
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
        if name in _SHARED or not name.startswith(_VARIABLE):
            why = "all contestants have the same batch" if name in _SHARED else "it changes no step"
            raise UserError(
                f"--vary={text} cannot vary {name}: {why}", _SHARED.get(name, "Leave it out")
            )
    return options


def read_variations(texts: Sequence[str], case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the options of each `--vary` by its text.

    Raises:
        UserError: as for `read_options`, the options cannot work, or two contestants are one.
    """
    variations, known = {}, [make_config(case)]
    for text in texts:
        variations[text] = read_options(text)
        for name in variations[text]:
            if case["subject"] != "train" and name.startswith(_OF_TRAINING_ALONE):
                raise UserError(
                    f"--vary={text} cannot vary {name}: {case['subject']} takes no training step",
                    "Leave it out, or choose train",
                )
        varied = make_config(case | {"vary": variations[text]})
        _check_precision(case["matmul_precision"], varied.precision.compute, f"--vary={text}")
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
        package, extra = _NEEDS.get(peer.removesuffix("_compile"), ("torch", "peers"))
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"--peers={peer} needs {package}", f"Install it: pip install -e '.[{extra}]'"
            )
        _check_peer(peer, case)
    if case["shares"] and subject in ("generate", "data"):
        raise UserError(f"{subject} does not report --shares", "Leave it out, or choose train")


# What a peer needs beside torch, and the extra that installs it.
_NEEDS = {"hf": ("transformers", "peers"), "torch_xla": ("torch_xla", "peers-xla")}


def _check_peer(peer: str, case: dict[str, Any]) -> None:
    for name in (*LAYOUT, "remat"):
        if case[name] != _DEFAULTS[name]:
            raise UserError(
                f"--{name}={case[name]} would be ignored by --peers={peer}",
                f"Leave out --{name}, or leave out --peers",
            )
    if case["compute"] == "float16" and case["subject"] == "train":
        raise UserError(
            f"--compute=float16 scales losses here and does not in --peers={peer}",
            "Use --compute=bfloat16, or leave out --peers",
        )
    if case["attention"] == "flash" and peer.startswith("torch_xla"):
        raise UserError(
            f"--peers={peer} cannot be asked for flash attention", "Use --attention=sdpa"
        )


def _list(option: str) -> str:
    return ", ".join(CHOICES[option])
