"""Draws the validation curves of runs over each other, over tokens, FLOPs and time.

python -m gpt2.lab.compare runs/first runs/second [--reference=published.csv]
    [--output=compare.png]

A directory is that of a run, or of a sweep, whose arms are drawn. A reference has a line for each
point under the header `tokens,loss`; a column `name` tells several curves apart.
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
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from absl import flags

from gpt2 import cli
from gpt2.config import Config, flatten
from gpt2.errors import UserError, warn
from gpt2.lab.ablate.pictures import plot_curves
from gpt2.lab.ablate.results import Amount, Curve, read_curve, unknown
from gpt2.lab.ablate.tables import spread
from gpt2.lab.ablate.terms import BITS_PER_BYTE, LOSS, flops
from gpt2.telemetry.reference import read_reference
from gpt2.utils.code import read_starts
from gpt2.utils.files import read_sealed, reading
from gpt2.utils.stores import fetch, writing
from gpt2.utils.text import format_count, format_duration


class Origin(NamedTuple):
    """What a run was made of."""

    options: dict[str, Any]  # by dotted name, with the hash of its code
    tokens: Amount
    flops: Amount
    tokenizer: str  # its hash, or its name where that is all that is known
    text: str  # of its validation, whatever its tokens are


def define_flags() -> None:
    """Defines the flags of this command."""
    about = (
        "Published losses: a name in configs/reference, or a CSV file of tokens,loss."
    )
    flags.DEFINE_string("reference", "", about)
    flags.DEFINE_string("output", "compare.png", "Where the picture goes.")


def main(*directories: str) -> None:
    """Draws the curves, and prints where each ends and what it has unlike the first."""
    workdirs: dict[str, list[Path]] = {}
    for place in directories:
        workdirs |= _find_workdirs(place)
    origins = {name: _read_origin(members[0]) for name, members in workdirs.items()}
    reference = flags.FLAGS.reference
    score = LOSS
    unit = "nats per token"
    if len({origin.tokenizer for origin in origins.values()}) > 1:
        if reference:
            raise UserError(
                "runs with different tokenizers compare in bits per byte, a reference in nats",
                "Compare them without --reference",
            )
        score = BITS_PER_BYTE
        unit = "bits per byte"
    curves = {}
    for name, members in workdirs.items():
        own = origins[name]
        found = [read_curve(each, score, own.tokens, own.flops) for each in members]
        found = [curve for curve in found if len(curve.scores)]
        if found:
            curves[name] = found
        else:
            print(f"{name} has no validation in {unit}, and is skipped")
    if not curves:
        raise UserError(f"no run has a validation in {unit} yet", "Name one that has")
    first, *others = curves
    usual = origins[first]
    tokenizer = usual.options["data.tokenizer"]
    if reference and tokenizer != "gpt2":
        warn(
            f"{reference} compares only if its losses, too, are of the tokenizer {tokenizer}"
        )
    for name, points in read_reference(reference).items():
        tokens, losses = points.T
        nothing = np.full(len(points), np.nan)
        curves[name] = [Curve(tokens, nothing, nothing, losses)]
    output = flags.FLAGS.output
    with writing(output) as picture:
        plot_curves(picture, curves, unit)
    print(_make_table(curves, unit).to_string(index=False))
    for name in others:
        own = origins[name]
        if own.text != usual.text:
            warn(
                f"{name} is validated on another text than {first}: they do not compare"
            )
        unlike = []
        for option in usual.options | own.options:
            value = own.options.get(option)
            if value != usual.options.get(option):
                unlike.append(f"{option}={value}")
        print(f"{name}, unlike the first: {', '.join(unlike) or 'nothing'}")
    print(f"see {output}")


def _find_workdirs(place: str) -> dict[str, list[Path]]:
    """Returns the workdirs to draw, by the name of their curve: several for the arm of a sweep."""
    folder = fetch(place)
    workdirs: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("runs/*/seed-*/run/config.json")):
        arm = path.parents[2].name
        workdirs.setdefault(f"{place}: {arm}", []).append(path.parent)
    return workdirs or {place: [folder]}


def _read_origin(workdir: Path) -> Origin:
    """Reads what a run was made of, as it stands: other code may have other options."""
    with reading(workdir, "Name a workdir of train.py"):
        tree = json.loads((workdir / "config.json").read_text("utf-8"))
        found = read_sealed(workdir / "data.json") or {}
        starts = read_starts(workdir)
        code = starts[-1].get("code") if starts else None
        data = tree["data"]
        batch = data["batch_size"] * tree["model"]["context_length"]
        tokens: Amount = partial(operator.mul, batch)
        flops_of = unknown
        with contextlib.suppress(UserError):  # as options of other code are
            config = Config.from_dict(tree)
            config.gpt()
            tokens = config.shapes.tokens
            flops_of = partial(flops, config)
        # A mixture is told by its shares, too, and batches of one's own have no text.
        text = data["corpus"]
        if split := found.get("splits", {}).get("validation"):
            text = f"{split['num_bytes']} bytes in {split['num_documents']} documents"
        return Origin(
            options=flatten(tree) | {"code": code},
            tokens=tokens,
            flops=flops_of,
            tokenizer=found.get("tokenizer_sha256", data["tokenizer"]),
            text=text,
        )


def _make_table(curves: Mapping[str, Sequence[Curve]], unit: str) -> pd.DataFrame:
    """Returns where the curves of each name end."""
    rows = []
    for name, members in curves.items():
        tokens = members[0].tokens[-1]
        seconds = mean(curve.seconds[-1] for curve in members)
        scores = [curve.scores[-1] for curve in members]
        rows.append(
            {
                "run": name,
                "tokens": format_count(tokens) if np.isfinite(tokens) else "",
                "time in steps": format_duration(seconds)
                if np.isfinite(seconds)
                else "",
                f"validation ({unit})": spread(scores),
            }
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    cli.run(main, define_flags, takes_files=True)
