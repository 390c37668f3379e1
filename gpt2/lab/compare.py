"""Plot the validation curves of several runs together, against tokens, FLOPs and time.

python -m gpt2.lab.compare runs/first runs/second [--reference=published.csv]
    [--output=compare.png]

Each argument is the workdir of a run, or the folder of a sweep. A sweep has one curve for each arm:
the mean over the arm's seeds. --reference adds published losses from a CSV file. The file has the
columns `tokens` and `loss` and, if it contains several curves, the column `name`.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import contextlib
import json
import math
import operator
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from absl import flags

from gpt2 import cli
from gpt2.config import Config, flatten
from gpt2.config.options import OPTIONS
from gpt2.data.datasets import read_mixture
from gpt2.errors import UserError, warn
from gpt2.lab.experiments.cells import print_table, spread
from gpt2.lab.experiments.curve_plot import plot_curves
from gpt2.lab.experiments.results import Amount, Curve, read_curve, unknown
from gpt2.lab.experiments.terms import BITS_PER_BYTE, LOSS, flops
from gpt2.telemetry.reference import read_reference
from gpt2.utils.code import read_starts
from gpt2.utils.files import read_sealed, reading
from gpt2.utils.stores import fetch, writing
from gpt2.utils.text import counted, format_count, format_duration


class Origin(NamedTuple):
    """The facts that determine whether and how a run can be compared with other runs."""

    options: dict[str, object]  # all options by dotted name, and the hash of the code
    tokens: Amount
    flops: Amount
    tokenizer: str  # the tokenizer's hash, or its name if no hash is stored
    # A description of the validation text: its numbers of bytes and documents, which do not depend
    # on the tokenizer, and how much of the text a validation reads. If the numbers are unknown, the
    # name of the corpus replaces them.
    text: str
    # For each part of a mixture, the CRC-32 of the validation tokens, or 0 if it is unknown. These
    # numbers can be compared only between runs with the same tokenizer.
    crc32: list[int]


def define_flags() -> None:
    """Define the flags of this command."""
    flags.DEFINE_string(
        "reference",
        "",
        "Published losses to plot: the name of a file in configs/reference (without its suffix "
        ".csv), or the path of a CSV file with the columns tokens,loss.",
    )
    flags.DEFINE_string("output", "compare.png", "Path of the plot.")


def main(*directories: str) -> None:
    """Plot the validation curves of runs and sweeps, and print the last loss of each curve.

    `directories` are workdirs of runs and folders of sweeps. Also print how the options of the
    other runs differ from the options of the first run.
    """
    if not directories:
        raise UserError(
            "No run is given",
            "Name the workdirs of runs, for example runs/first runs/second",
        )
    workdirs: dict[str, list[Path]] = {}
    for path in directories:
        workdirs |= _find_workdirs(path)
    origins = {name: _read_origin(members[0]) for name, members in workdirs.items()}
    reference = flags.FLAGS.reference
    score = LOSS
    unit = "nats per token"
    if len({origin.tokenizer for origin in origins.values()}) > 1:
        if reference:
            raise UserError(
                "Runs with different tokenizers are compared in bits per byte, but"
                f" --reference={reference} is in nats per token",
                "Leave out --reference",
            )
        score = BITS_PER_BYTE
        unit = "bits per byte"
    curves = {}
    for name, members in workdirs.items():
        amounts = origins[name].tokens, origins[name].flops
        all_curves = [read_curve(workdir, score, *amounts) for workdir in members]
        validated = [curve for curve in all_curves if len(curve.scores)]
        if validated:
            tokens = max(curve.tokens[-1] for curve in validated)
            whole = [curve for curve in validated if curve.tokens[-1] == tokens]
            if len(whole) < len(members):
                warn(
                    f"{name} shows only {len(whole)} of {counted(len(members), 'run')}, those that"
                    " trained furthest: the others are not finished, or diverged"
                )
            curves[name] = whole
        else:
            print(f"{name} has no validation loss in {unit}, and is skipped")
    if not curves:
        raise UserError(
            f"No run has a validation loss in {unit} yet",
            "Add a run that has been validated. Runs with the same tokenizer are compared in nats "
            "per token, and runs with different tokenizers in bits per byte",
        )
    first, *others = curves
    usual = origins[first]
    tokenizer = usual.options["data.tokenizer"]
    if reference and tokenizer != "gpt2":
        warn(
            f"--reference={reference} can be compared with these runs only if the reference's"
            f" losses were measured with the runs' tokenizer, {tokenizer}"
        )
    for name, points in read_reference(reference).items():
        tokens, losses = points.T
        missing = np.full(len(points), np.nan)
        curves[name] = [Curve(tokens, missing, missing, losses)]
    output = flags.FLAGS.output
    with writing(output) as picture:
        plot_curves(picture, curves, unit)
    print_table(_make_table(curves, unit))
    for name, origin in origins.items():
        if name in curves and origin.flops is unknown:
            warn(
                f"this version of the code refuses the options of {name}, so the plot cannot show "
                "its FLOPs"
            )
    for name in others:
        _print_differences(first, usual, name, origins[name])
    print(f"see {output}")


def _print_differences(first: str, usual: Origin, name: str, origin: Origin) -> None:
    """Print the options in which the run `name` differs from the run `first`.

    Warn if the losses of the two runs cannot be compared, because they are of different texts.
    """
    if origin.text != usual.text:
        warn(
            f"{name} is validated on {origin.text}, but {first} is validated on {usual.text},"
            " so their losses cannot be compared"
        )
    elif origin.tokenizer == usual.tokenizer and origin.crc32 != usual.crc32:
        warn(
            f"{name} and {first} are validated on different texts of equal length, so their"
            " losses cannot be compared"
        )
    changed = []
    for option in usual.options | origin.options:
        # A run whose code does not have an option trains as with the option's default.
        default: object = "no such option"
        if option in OPTIONS:
            default = OPTIONS[option].default
        value = origin.options.get(option, default)
        before = usual.options.get(option, default)
        if value != before:
            changed.append(f"{option}={value} instead of {before}")
    print(f"{name} differs from {first} in {', '.join(changed) or 'no option'}")


def _find_workdirs(path: str) -> dict[str, list[Path]]:
    """Return the curves to plot for `path`: map each curve's name to the workdirs of its runs.

    `path` is the workdir of a run, or the folder of a sweep. A single run has one curve. A sweep
    has one curve for each arm, which is the mean over the arm's runs, one run for each seed.
    """
    folder = fetch(path)
    workdirs: dict[str, list[Path]] = {}
    for config in sorted(folder.glob("runs/*/seed-*/run/config.json")):
        arm = config.parents[2].name
        workdirs.setdefault(f"{path}: {arm}", []).append(config.parent)
    return workdirs or {path: [folder]}


def _read_origin(workdir: Path) -> Origin:
    """Read from a run's workdir the facts that a comparison needs.

    Another version of the code may have trained the run. If this version refuses the run's options,
    the run's FLOPs are unknown (NaN).
    """
    with reading(workdir, "Use the workdir of a run of train.py"):
        tree = json.loads((workdir / "config.json").read_text("utf-8"))
        facts = read_sealed(workdir / "data.json") or {}
        starts = read_starts(workdir)
        code = starts[-1].get("code") if starts else None
        data = tree["data"]
        batch = data["batch_size"] * tree["model"]["context_length"]
        tokens: Amount = partial(operator.mul, batch)
        flops_of = unknown
        # `from_dict` refuses options that only the code of the run has. FLOPs are then unknown.
        with contextlib.suppress(UserError):
            config = Config.from_dict(tree)
            config.gpt()
            tokens = config.shapes.tokens
            flops_of = partial(flops, config)
        parts = facts.get("parts") or [facts]
        # A validation reads the first `eval_batches` batches of each part, or all batches if
        # `eval_batches` is 0.
        limit = tree["train"]["eval_batches"] * batch
        return Origin(
            options=flatten(tree) | {"code": code},
            tokens=tokens,
            flops=flops_of,
            tokenizer=parts[0].get("tokenizer_sha256", data["tokenizer"]),
            text=_describe_validation(data["corpus"], parts, limit),
            crc32=[part.get("token_crc32", {}).get("validation", 0) for part in parts],
        )


def _describe_validation(
    corpus: str, parts: Sequence[Mapping[str, Any]], limit: int
) -> str:
    """Return a description of the text on which a run is validated.

    `corpus` is the option `data.corpus`. `parts` contains the facts of data.json for each corpus of
    a mixture, or for the only corpus. `limit` is the number of tokens that a validation reads from
    each part, or 0 for all tokens.
    """
    texts = list[str]()
    for part in parts:
        # data.json does not describe the text of batches that a user's function returns, and the
        # file may be missing.
        split = part.get("splits", {}).get("validation", {})
        text = corpus
        if split:
            text = f"{split['num_bytes']:,} bytes in {counted(split['num_documents'], 'document')}"
        elif "code" in part:
            text = f"{corpus} with the code {part['code']}"
        if 0 < limit < split.get("num_tokens", math.inf) - 1:
            text = f"the first {limit:,} tokens of {text}"
        texts.append(text)
    if len(texts) == 1:
        return texts[0]
    weights = read_mixture(corpus).values()
    terms = zip(weights, texts, strict=True)
    return " + ".join(f"{weight} * ({text})" for weight, text in terms)


def _make_table(curves: Mapping[str, Sequence[Curve]], unit: str) -> pd.DataFrame:
    """Return a table of strings with the final tokens, time and loss of each run, arm or reference.

    `curves` maps the name of a run, an arm or a reference to its curves, one for each seed. Time
    and loss are means over these curves. `unit` is the unit of the losses.
    """
    rows = []
    for name, members in curves.items():
        tokens = members[0].tokens[-1]
        seconds = mean(curve.seconds[-1] for curve in members)
        row = {
            "run": name,
            "tokens": format_count(tokens) if np.isfinite(tokens) else "",
            "time of steps": format_duration(seconds) if np.isfinite(seconds) else "",
            f"last validation ({unit})": spread(
                [curve.scores[-1] for curve in members]
            ),
        }
        rows.append(row)
    return pd.DataFrame(rows)


if __name__ == "__main__":
    cli.run(main, define_flags, takes_files=True)
