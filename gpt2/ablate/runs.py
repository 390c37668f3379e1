"""The runs of a sweep, each a folder of its own.

runs/ARM/seed-SEED/    a run that is compared; tune/ARM/VALUES/seed-SEED/ one that tries VALUES;
                       measure/ARM/ one that only shows how long a step takes
    config.json        the options that it was asked to train with
    log.txt            what it printed
    outcome.json       how it ended, once it has
    run/               the workdir of train.py
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from gpt2.config import DEFAULTS, Config, differences, read_record, with_options
from gpt2.errors import UserError
from gpt2.utils.files import write_json

State = Literal["finished", "diverged", "failed", "waiting"]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of train.py.

    Attributes:
        arm: the name of its arm.
        config: all of its options.
        folder: see the module.
        tuned: for a run that chooses between values, those that it tries; else those chosen.
        chooses: whether it only chooses between values.
    """

    arm: str
    config: Config
    folder: Path
    tuned: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    chooses: bool = False

    @property
    def seed(self) -> int:
        """The seed of everything that is random in it."""
        return self.config.seed

    @property
    def workdir(self) -> Path:
        """The workdir of train.py."""
        return self.folder / "run"

    @property
    def label(self) -> str:
        """Its name for people, such as `optim.name=muon seed 2`."""
        values = f" {describe(self.tuned)}" if self.chooses else ""
        return f"{self.arm}{values} seed {self.seed}"

    def outcome(self) -> "Outcome":
        """Returns how it ended; `waiting` if it has not."""
        try:
            return Outcome(**json.loads((self.folder / "outcome.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError, RecursionError):
            return Outcome("waiting")

    def write_outcome(self, outcome: "Outcome") -> None:
        """Keeps how it ended."""
        write_json(self.folder / "outcome.json", dataclasses.asdict(outcome))

    def prepare(self) -> None:
        """Writes what train.py reads."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "outcome.json").unlink(missing_ok=True)  # of an earlier try
        write_json(self.folder / "config.json", self.config.to_dict())


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        state: `diverged` if its loss was not finite, `failed` if it broke for another reason.
        error: the line that says why.
    """

    state: State
    error: str = ""


def make_run(root: Path, arm: str, config: Config, seed: int, tuned: Mapping[str, Any]) -> Run:
    """Returns a run that is compared."""
    config = with_options(config, {**tuned, "seed": seed})
    return Run(arm, config, root / "runs" / arm / f"seed-{seed}", tuned)


def make_choosing_run(
    root: Path, arm: str, config: Config, seed: int, tuned: Mapping[str, Any]
) -> Run:
    """Returns a run that tries values of the options that are tuned."""
    config = with_options(config, {**tuned, "seed": seed})
    return Run(
        arm, config, root / "tune" / arm / describe(tuned) / f"seed-{seed}", tuned, chooses=True
    )


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
    return Run(arm, config, root / "measure" / arm)


def describe(options: Mapping[str, Any]) -> str:
    """Writes options as `optim.learning_rate=0.001,optim.beta2=0.95`."""
    return ",".join(f"{name}={value}" for name, value in options.items())


def changes(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the options, old and new, that would make another run of a sweep's.

    How many checkpoints stay changes no result, and had another default once.
    """
    found = differences(old, new)
    if new.train.keep_checkpoints == DEFAULTS.train.keep_checkpoints:
        found.pop("train.keep_checkpoints", None)
    return found


def is_unchanged(run: Run) -> bool:
    """Returns whether a run, if it has begun, was asked for with the same options."""
    path = run.folder / "config.json"
    return not path.exists() or not changes(Config.from_dict(read_record(path)), run.config)


def check_unchanged(runs: list[Run]) -> None:
    """Checks that runs which have begun were asked for with the same options.

    Raises:
        UserError: one was not. The message names the option.
    """
    for run in runs:
        path = run.folder / "config.json"
        if not path.exists():
            continue
        before = Config.from_dict(read_record(path))
        for name, (old, new) in changes(before, run.config).items():
            raise UserError(
                f"{run.folder} holds a run with {name}={old}, not {new}",
                "Give another --workdir, or the old value of the option",
            )
