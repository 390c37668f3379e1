"""Generated mistakes: in options, in the flags of every command, and in the files they read.

Options and flags come from the program itself, so that a new one is covered without a change here.
"""

import gzip
import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from gpt2.config import CHOICES, DEFAULTS, flatten

OPTIONS = flatten(DEFAULTS.to_dict())

# Values that no option of a type takes: of another type, out of any range, not finite.
WRONG = {
    bool: ("maybe", "2", "", "1.0"),
    int: ("x", "1.5", "", "1e3", "nan", "-2", "9" * 30, "0x", "1,000", "inf"),
    float: ("x", "", "nan", "inf", "-inf", "1e999", "-1", "1e-42", "1e39", "0,1", "1..2"),
    str: ("?!", "hf:", "=", "(=1", "piecewise:", "\u00e9", "\\", "a b", "9" * 5000),
}
# Values that may work, alone or beside others.
WILD = {
    bool: ("True", "False"),
    int: ("0", "1", "2", "3", "4", "5", "7", "8", "16", "33", "64", "100", "1000000", "2147483647"),
    float: ("0", "1e-30", "1e-9", "0.1", "0.5", "0.999999", "1", "2", "10", "1e6", "3e38"),
    str: ("", "none", "tensor", "SL", "wte=2", "piecewise:3=0.5", "bpe:300", "char", "run:x"),
}
# The same, for runs that must end well: nothing large, and no rate at which a run diverges.
MILD = {
    bool: WILD[bool],
    int: ("0", "1", "2", "3", "4", "5", "7", "8", "16"),
    float: ("0", "1e-9", "1e-3", "0.1", "0.5"),
    str: WILD[str],
}
# What would need a network, or write outside of a test's folder.
NOT_SET = ("logging.wandb", "data.data_dir")


def misspell(word: str, at: int) -> str:
    """Returns a word without one of its letters."""
    at %= len(word)
    return word[:at] + word[at + 1 :] or word * 2


@st.composite
def wrong_options(draw: Callable) -> str:
    """Draws a flag of train.py that must be refused."""
    name = draw(st.sampled_from([name for name in OPTIONS if name not in NOT_SET]))
    kind = draw(st.sampled_from(("value", "value", "misspelt", "choice")))
    if kind == "misspelt":
        group, _, last = name.rpartition(".")
        wrong = misspell(last, draw(st.integers(0, 30)))
        if f"{group}.{wrong}".lstrip(".") not in OPTIONS:
            return f"--config.{f'{group}.{wrong}'.lstrip('.')}={OPTIONS[name]}"
    if kind == "choice" and name in CHOICES:
        wrong = misspell(draw(st.sampled_from(CHOICES[name])), draw(st.integers(0, 30)))
        if wrong not in CHOICES[name]:
            return f"--config.{name}={wrong}"
    return f"--config.{name}={draw(st.sampled_from(WRONG[type(OPTIONS[name])]))}"


@st.composite
def wild_options(draw: Callable, values: dict = WILD) -> list[str]:
    """Draws flags of train.py that may contradict each other, or the run."""
    names = st.sampled_from([name for name in OPTIONS if name not in NOT_SET])
    return [
        f"--config.{name}="
        + draw(st.sampled_from((*values[type(OPTIONS[name])], *CHOICES.get(name, ()))))
        for name in draw(st.lists(names, min_size=1, max_size=4, unique=True))
    ]


def follow(arguments: Sequence[str], message: str) -> list[str] | None:
    """Returns the arguments as a message advises to change them, None if it proposes no value."""
    sentences = re.split(r"(?<=[.?]) (?=[A-Z])", message.strip())
    advice = " ".join(sentences[1:])
    if meant := re.search(r"Did you mean (--[\w.]+)\?", advice):
        wrong = re.search(r"no option (--[\w.]*\w)", message)[1]
        return [re.sub(rf"^{re.escape(wrong)}(?==|$)", meant[1], each) for each in arguments]
    if left_out := re.search(r"Leave out (--[\w.]+)", advice):
        return [each for each in arguments if each.partition("=")[0] != left_out[1]]
    if wrong := re.match(r"error: (--[\w.]+)=.* is not of type", message):
        value = re.search(r"such as (\S+?)(?: or .*)?\.$|Give (True)", advice)
        return with_flags(arguments, [f"{wrong[1]}={value[1] or value[2]}"])
    first = re.split(r", (?:or|and) | or (?!more)", advice)[0]
    flags = re.findall(r"--[\w.]+=(?:'[^']*'|\S*[^\s,.?;])", first)
    flags = [flag.replace("'", "") for flag in flags if not re.search("=(DIR|FILE)", flag)]
    return with_flags(arguments, flags) if flags else None


def with_flags(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Returns arguments with some flags in place of those of the same names."""
    names = {flag.partition("=")[0] for flag in flags}
    return [each for each in arguments if each.partition("=")[0] not in names] + list(flags)


def snapshot(directory: Path) -> dict[str, int]:
    """Returns the size and time of change of all that lies in a directory."""
    return {
        str(path.relative_to(directory)): (path.lstat().st_mtime_ns, path.lstat().st_size)
        for path in directory.rglob("*")
        if not path.is_dir() or path.is_symlink()
    }


# What lies where a file of some kind should lie.
OTHER_KINDS = {
    "empty": b"",
    "a number": b"3",
    "null": b"null",
    "list": b"[1, [2, {}]]",
    "object": b"{}",
    "text": "caf\u00e9 au lait\n".encode() * 30,
    "latin-1": b"caf\xe9 au lait\n" * 30,
    "zeros": bytes(4096),
    "nested": b"[" * 10**5,
    "objects": b'{"a":' * 10**5,
    "digits": b"9" * 5000,
    "NaN": b"NaN",
    "PNG": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "zip": b"PK\x05\x06" + bytes(18),
    "gzip": gzip.compress(b"hello"),
    "pickle": b"cposix\nsystem\n(S'touch witness'\ntR.",
    "huge header": b"\xff" * 8 + b"{}",
}
STRANGE = (None, True, -1, 0, 1.5, 10**30, float("nan"), "", "x", [], {}, [[]], {"a": 1}, "../x")


def spoil(path: Path, how: str, seed: int) -> None:
    """Damages a file in one of `DAMAGES`."""
    rng, data = random.Random(seed), path.read_bytes()
    match how:
        case "removed":
            path.unlink()
        case "folder":
            path.unlink()
            path.mkdir()
        case "loop":
            path.unlink()
            path.symlink_to(path.name)
        case "dangling":
            path.unlink()
            path.symlink_to("nowhere")
        case "cut":
            path.write_bytes(data[: rng.randrange(len(data) + 1)])
        case "flipped":
            spoilt = bytearray(data or b"\0")
            for _ in range(rng.choice((1, 1, 5))):
                spoilt[rng.randrange(min(len(spoilt), 4096))] ^= 1 << rng.randrange(8)
            path.write_bytes(spoilt)
        case "longer":
            path.write_bytes(data + rng.randbytes(rng.choice((1, 100))))
        case "noise":
            path.write_bytes(rng.randbytes(rng.choice((1, 7, 300))))
        case "strange" | "lacking":
            path.write_bytes(_with_strange_value(data, rng, how))
        case _:
            path.write_bytes(OTHER_KINDS[how])


DAMAGES = (
    *("removed", "folder", "loop", "dangling", "cut", "flipped", "longer", "noise"),
    *("strange", "strange", "strange", "strange", "lacking", "lacking", *OTHER_KINDS),
)


def _with_strange_value(data: bytes, rng: random.Random, how: str) -> bytes:
    """Replaces or removes one value of a JSON file, or of one line of such a file."""
    lines = data.splitlines(keepends=True)
    for texts in ([data], lines):
        at = rng.randrange(len(texts)) if texts else 0
        try:
            tree = json.loads(texts[at])
        except (ValueError, IndexError, UnicodeDecodeError):
            continue
        holder = {"": tree}
        place, key = rng.choice(_places(holder, ""))
        if how == "lacking":
            del place[key]
        else:
            place[key] = rng.choice(STRANGE)
        spoilt = json.dumps(holder.get("")).encode() + b"\n"
        return b"".join([*texts[:at], spoilt, *texts[at + 1 :]])
    return bytes(rng.choice(data[:1] or b"x") for _ in data[:100])  # no JSON


def _places(holder: Any, key: Any) -> list[tuple[Any, Any]]:
    value, found = holder[key], [(holder, key)]
    if isinstance(value, dict | list):
        for each in list(value if isinstance(value, dict) else range(len(value)))[:50]:
            found += _places(value, each)
    return found


def copy_tree(source: Path, target: Path) -> Path:
    """Copies what commands read, anew for each mistake."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target, symlinks=True))
