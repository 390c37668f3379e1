"""The runs of a sweep, each a folder of its own.

runs/ARM/seed-SEED/    a run that is compared; tune/ARM/VALUES/seed-SEED/ one that tries VALUES;
                       measure/ARM-MARK/ one that only shows how long a step takes
    config.json        the options that it was asked to train with
    log.txt            what it printed
    outcome.json       how it ended, once it has
    run/               the workdir of train.py
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt2.config import DEFAULTS, Config, with_options
from gpt2.utils.files import write_json


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: str  # finished, diverged (its loss was NaN or Inf), failed otherwise, or waiting
    error: str = ""  # the line that says why


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of train.py."""

    arm: str  # its name
    config: Config
    folder: Path
    tuned: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # values tried, or chosen
    chooses: bool = False  # whether it only chooses between values

    @property
    def workdir(self) -> Path:
        """The workdir of train.py."""
        return self.folder / "run"

    @property
    def label(self) -> str:
        """Its name for people, such as `optim.name=muon seed 2`."""
        values = f" {describe(self.tuned)}" if self.chooses else ""
        return f"{self.arm}{values} seed {self.config.seed}"

    def outcome(self) -> Outcome:
        """Returns how it ended; `waiting` if it has not."""
        try:
            return Outcome(**json.loads((self.folder / "outcome.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return Outcome("waiting")

    def write_outcome(self, outcome: Outcome) -> None:
        """Keeps how it ended."""
        write_json(self.folder / "outcome.json", dataclasses.asdict(outcome))

    def prepare(self) -> None:
        """Writes what train.py reads."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "outcome.json").unlink(missing_ok=True)  # of an earlier try
        write_json(self.folder / "config.json", self.config.to_dict())


def make_measuring_run(root: Path, arm: str, config: Config, num_steps: int) -> Run:
    """Returns a short run that only shows how long a step takes."""
    options: dict[str, Any] = {
        "train.num_steps": num_steps,
        "train.eval_batches": 1,
        "train.eval_every": 0,
        "train.checkpoint_every": 0,
        "train.keep_checkpoints": DEFAULTS.train.keep_checkpoints,
        "train.keep_every": 0,
        "logging.profile_start": 0,
        "logging.profile_steps": 0,
        # Another schedule takes as long, and may not fit into so few steps.
        "optim.schedule": "constant",
        "optim.end_learning_rate": config.optim.learning_rate,
        "optim.warmup_steps": 0,
        "optim.warmup_percent": 0.0,
        "optim.decay_steps": 0,
        "optim.decay_percent": 0.0,
    }
    config = with_options(config, options)
    mark = zlib.crc32(json.dumps(config.to_dict()).encode())  # other options take another time
    return Run(arm, config, root / "measure" / f"{arm}-{mark:08x}")


def describe(options: Mapping[str, Any]) -> str:
    """Writes options as `optim.learning_rate=0.001,optim.beta2=0.95`."""
    return ",".join(f"{name}={value}" for name, value in options.items())
