"""What `python -m gpt2.compare` does: draws the validation curves of runs over each other."""

import contextlib
import json
import math
import operator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from gpt2 import cli
from gpt2.ablate.pictures import plot_curves
from gpt2.ablate.results import Curve, read_curve
from gpt2.config import GPTConfig, flatten
from gpt2.errors import UserError
from gpt2.model.flops import model_flops_per_token
from gpt2.telemetry.reference import read_reference
from gpt2.training.code import read_starts
from gpt2.utils import launch
from gpt2.utils.stores import fetch
from gpt2.utils.text import format_count, format_duration


def define_flags() -> None:
    """Defines the flags of this command."""
    about = (
        "Published losses: a name in configs/reference, or a CSV file of tokens,loss."
    )
    flags.DEFINE_string("reference", "", about)
    flags.DEFINE_bool("log_x", False, "Draw over logarithms of tokens, FLOPs and time.")
    flags.DEFINE_string("output", "compare.png", "Where the picture goes.")


def main(*directories: str) -> None:
    """Draws the curves, and prints where each ends and what it has unlike the first."""
    if not directories:
        raise UserError("no run is named", "For example, give runs/first runs/second")
    workdirs: dict[str, list[Path]] = {}
    for each in directories:
        folder = fetch(each)
        found = _workdirs(folder)
        workdirs |= {
            name.replace(str(folder), each.rstrip("/"), 1): found[name]
            for name in found
        }
    unit = "nats per token"
    reference = flags.FLAGS.reference
    curves = _read_curves(workdirs, "eval/loss", unit)
    if (
        len({_read_config(workdirs[name][0])["data"]["tokenizer"] for name in curves})
        > 1
    ):
        what = "runs with different tokenizers compare in bits per byte, a reference in nats"
        if reference:
            raise UserError(what, "Compare them without --reference")
        unit = "bits per byte"
        curves = _read_curves(
            {name: workdirs[name] for name in curves}, "eval/bits_per_byte", unit
        )
    options = {name: flatten(_read_config(workdirs[name][0])) for name in curves}
    for name, own in options.items():
        own["code"] = (read_starts(workdirs[name][0]) or [{}])[-1].get("code")
    for name, points in read_reference(reference).items():
        unknown = np.full(len(points), np.nan)
        curves[name] = [Curve(points[:, 0], unknown, unknown, points[:, 1])]
    output = Path(flags.FLAGS.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    plot_curves(output, curves, unit, log_x=flags.FLAGS.log_x)
    table = Table("run", "tokens", "time in steps", f"validation ({unit})")
    table.columns[0].overflow = "fold"
    for name, members in curves.items():
        table.add_row(
            name, *_describe([curve for curve in members if len(curve.scores)])
        )
    console = Console(markup=False, highlight=False)
    console.print(table)
    (_, first), *others = options.items()
    for name, own in others:
        unlike = [
            f"{k}={own.get(k)}" for k in first | own if first.get(k) != own.get(k)
        ]
        console.print(f"{name}, unlike the first: {', '.join(unlike) or 'nothing'}")
    print(f"see {output}")


def _workdirs(directory: Path) -> dict[str, list[Path]]:
    """Returns the workdirs to draw, by the name of their curve: several for the arm of a sweep."""
    if (directory / "run" / "config.json").exists():  # the folder of a sweep's run
        directory = directory / "run"
    workdirs: dict[str, list[Path]] = {}
    for path in sorted(directory.glob("runs/*/seed-*/run/config.json")):
        workdirs.setdefault(f"{directory}: {path.parents[2].name}", []).append(
            path.parent
        )
    return workdirs or {str(directory): [directory]}


def _read_config(workdir: Path) -> dict[str, Any]:
    """Reads a config.json as it stands: a run of other code may have other options."""
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(f"{workdir} holds no run", "Name a workdir of train.py")
    return json.loads(path.read_text("utf-8"))


def _read_curves(
    workdirs: dict[str, list[Path]], score: str, unit: str
) -> dict[str, list[Curve]]:
    """Returns the curves of the runs that have validations, and tells of the others."""
    curves = {}
    for name, members in workdirs.items():
        model, data = (_read_config(members[0])[group] for group in ("model", "data"))
        tokens = data["batch_size"] * model["context_length"]
        flops = math.nan
        with contextlib.suppress(
            TypeError, UserError
        ):  # other code's model, of unknown FLOPs
            flops = tokens * model_flops_per_token(GPTConfig(**model))
        amounts = partial(operator.mul, tokens), partial(operator.mul, flops)
        curves[name] = [read_curve(workdir, score, *amounts) for workdir in members]
        if not any(len(curve.scores) for curve in curves[name]):
            print(f"{name} has no validation in {unit}, and is skipped")
            del curves[name]
    if not curves:
        raise UserError(f"no run has a validation in {unit} yet")
    return curves


def _describe(ends: list[Curve]) -> list[str]:
    """Returns the tokens, the time and the scores at the end of an arm's curves, as cells."""
    scores = [curve.scores[-1] for curve in ends]
    last = ends[0]
    mean = np.mean([curve.seconds[-1] for curve in ends])
    seconds = format_duration(mean) if np.isfinite(mean) else ""
    tokens = format_count(last.tokens[-1]) if np.isfinite(last.tokens[-1]) else ""
    deviation = f" ± {np.std(scores, ddof=1):.4f}" if len(scores) > 1 else ""
    return [tokens, seconds, f"{np.mean(scores):.4f}{deviation}"]


def run() -> None:
    """Runs the command."""
    launch.prepare_process()
    cli.run(main, define_flags, takes_files=True)
