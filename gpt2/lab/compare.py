"""Plots the validation curves of several runs together, over tokens, FLOPs and time.

python -m gpt2.lab.compare runs/first runs/second [--reference=published.csv]
    [--output=compare.png]

A directory is the workdir of a run, or a sweep, whose arms become a curve each. A reference is a
table with the columns `tokens` and `loss`, and `name` for several curves.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import contextlib
import json
import operator
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
import pandas as pd
from absl import flags

from gpt2 import cli
from gpt2.config import Config, flatten
from gpt2.errors import UserError, warn
from gpt2.lab.experiments.cells import spread
from gpt2.lab.experiments.curve_plot import plot_curves
from gpt2.lab.experiments.results import Amount, Curve, read_curve, unknown
from gpt2.lab.experiments.terms import BITS_PER_BYTE, LOSS, flops
from gpt2.telemetry.reference import read_reference
from gpt2.utils.code import read_starts
from gpt2.utils.files import read_sealed, reading
from gpt2.utils.stores import fetch, writing
from gpt2.utils.text import format_count, format_duration


class Origin(NamedTuple):
    """What decides whether and how a run can be compared."""

    options: dict[str, object]  # by dotted name, with the hash of its code
    tokens: Amount
    flops: Amount
    tokenizer: str  # its hash, or its name if no hash is stored
    text: str  # of the validation split, without regard to tokens


def define_flags() -> None:
    """Define the flags."""
    flags.DEFINE_string(
        "reference",
        "",
        "Published losses: a name in configs/reference, or a CSV file of tokens,loss.",
    )
    flags.DEFINE_string("output", "compare.png", "Path of the picture.")


def main(*directories: str) -> None:
    """Plot the curves, and print where each ends and how its options differ from the first's."""
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
                "Compare the runs without --reference",
            )
        score = BITS_PER_BYTE
        unit = "bits per byte"
    curves = {}
    for name, members in workdirs.items():
        amounts = origins[name].tokens, origins[name].flops
        all_curves = [read_curve(workdir, score, *amounts) for workdir in members]
        validated = [curve for curve in all_curves if len(curve.scores)]
        if validated:
            curves[name] = validated
        else:
            print(f"{name} has no validation in {unit}, and is skipped")
    if not curves:
        raise UserError(
            f"No run has a validation in {unit} yet", "Name a run that has one"
        )
    first, *others = curves
    usual = origins[first]
    tokenizer = usual.options["data.tokenizer"]
    if reference and tokenizer != "gpt2":
        warn(f"{reference} can be compared only if its tokenizer is {tokenizer}, too")
    for name, points in read_reference(reference).items():
        tokens, losses = points.T
        missing = np.full(len(points), np.nan)
        curves[name] = [Curve(tokens, missing, missing, losses)]
    output = flags.FLAGS.output
    with writing(output) as picture:
        plot_curves(picture, curves, unit)
    print(_make_table(curves, unit).to_string(index=False))
    for name in others:
        origin = origins[name]
        if origin.text != usual.text:
            warn(
                f"{name} is validated on another text than {first}, so that their losses cannot be"
                " compared"
            )
        changed = []
        for option in usual.options | origin.options:
            value = origin.options.get(option)
            if value != usual.options.get(option):
                changed.append(f"{option}={value}")
        print(f"{name} differs from the first by {', '.join(changed) or 'nothing'}")
    print(f"see {output}")


def _find_workdirs(path: str) -> dict[str, list[Path]]:
    """Return the workdirs by the name of their curve. An arm of a sweep has several."""
    folder = fetch(path)
    workdirs: dict[str, list[Path]] = {}
    for config in sorted(folder.glob("runs/*/seed-*/run/config.json")):
        arm = config.parents[2].name
        workdirs.setdefault(f"{path}: {arm}", []).append(config.parent)
    return workdirs or {path: [folder]}


def _read_origin(workdir: Path) -> Origin:
    """Read the origin of a run. Its code may have other options than ours."""
    with reading(workdir, "Name a workdir of train.py"):
        tree = json.loads((workdir / "config.json").read_text("utf-8"))
        facts = read_sealed(workdir / "data.json") or {}
        starts = read_starts(workdir)
        code = starts[-1].get("code") if starts else None
        data = tree["data"]
        batch = data["batch_size"] * tree["model"]["context_length"]
        tokens: Amount = partial(operator.mul, batch)
        flops_of = unknown
        with contextlib.suppress(UserError):  # other code may have other options
            config = Config.from_dict(tree)
            config.gpt()
            tokens = config.shapes.tokens
            flops_of = partial(flops, config)
        # A mixture is described by its fractions, and user-supplied batches have no text.
        text = data["corpus"]
        if split := facts.get("splits", {}).get("validation"):
            text = f"{split['num_bytes']} bytes in {split['num_documents']} documents"
        return Origin(
            options=flatten(tree) | {"code": code},
            tokens=tokens,
            flops=flops_of,
            tokenizer=facts.get("tokenizer_sha256", data["tokenizer"]),
            text=text,
        )


def _make_table(curves: Mapping[str, Sequence[Curve]], unit: str) -> pd.DataFrame:
    """Return a row for each name: where its curves end."""
    rows = []
    for name, members in curves.items():
        tokens = members[0].tokens[-1]
        seconds = mean(curve.seconds[-1] for curve in members)
        row = {
            "run": name,
            "tokens": format_count(tokens) if np.isfinite(tokens) else "",
            "time in steps": format_duration(seconds) if np.isfinite(seconds) else "",
            f"validation ({unit})": spread([curve.scores[-1] for curve in members]),
        }
        rows.append(row)
    return pd.DataFrame(rows)


if __name__ == "__main__":
    cli.run(main, define_flags, takes_files=True)
