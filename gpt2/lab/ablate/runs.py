"""The runs of a sweep, each a folder of its own: runs/ARM/seed-SEED, or tune/ARM/VALUES/seed-SEED.

config.json holds the options that it was asked to train with, log.txt what it printed, outcome.json
how it ended, once it has, and run/ is the workdir of train.py.
"""

import dataclasses
import functools
import json
import math
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gpt2.config import Config, flatten
from gpt2.errors import UserError
from gpt2.telemetry.metrics import read_metrics
from gpt2.training.checkpoint_files import latest_step
from gpt2.utils.code import SOURCE, hash_code, read_starts
from gpt2.utils.files import reading, write_json
from gpt2.utils.stores import is_url

Setting = bool | int | float | str  # the value of an option
Settings = Mapping[str, Setting]  # of options by their dotted names
ENDED = ("finished", "diverged")  # the states of runs that are not trained any more


class Outcome(NamedTuple):
    """How a run ended."""

    state: str  # finished, diverged (its loss was NaN or Inf), failed otherwise, or waiting
    error: str = ""  # the line that says why


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of train.py."""

    arm: str  # its name
    config: Config
    folder: Path
    tuned: Settings = dataclasses.field(default_factory=dict)  # that it tries, or chose
    chooses: bool = False  # whether it only chooses between values
    source: Path = SOURCE  # where the train.py lies that trains it
    # Options that only the code in `source` has.
    extra: Settings = dataclasses.field(default_factory=dict)

    @property
    def workdir(self) -> Path:
        """The workdir of train.py."""
        return self.folder / "run"

    @property
    def label(self) -> str:
        """Its name for people, such as `optim.name=muon seed 2`."""
        values = f" {describe(self.tuned)}" if self.chooses else ""
        return f"{self.arm}{values} seed {self.config.seed}"

    def options(self) -> dict[str, Setting]:
        """Returns the options that it is asked to train with, as config.json has them."""
        options = {**flatten(self.config.to_dict()), **self.extra}
        if self.source != SOURCE:
            usual = flatten(Config().to_dict())
            for name in options.keys() - defaults_of(self.source).keys():
                if options.pop(name) != usual.get(name):
                    raise UserError(f"the code in {self.source} has no option {name}")
        return options

    def outcome(self) -> Outcome:
        """Returns how it ended; `waiting` if it has not."""
        path = self.folder / "outcome.json"
        with reading(path, f"Remove {path}, and repeat the command"):
            try:
                return Outcome(**json.loads(path.read_bytes()))
            except FileNotFoundError:
                return Outcome("waiting")

    def read(self, score: str) -> list[dict]:
        """Returns its metrics; a UserError unless a run that has ended is that run, whole.

        It has the options and the seed that are asked for; a finished one, its last step's score.
        One that has not ended is refused if its code lacks an option.
        """
        options = self.options()
        state = self.outcome().state
        records = read_metrics(self.workdir / "metrics.jsonl")
        if state not in ENDED:
            return records
        how = f"Remove {self.folder}, and repeat the command"
        with reading(self.folder, how):
            text = (self.workdir / "config.json").read_bytes()
            kept = flatten(json.loads(text))
            self.codes()
        for name, wanted in options.items():
            # Other code may lack an option.
            found = kept.get(name, wanted)
            if found != wanted:
                raise UserError(
                    f"{self.folder} holds a run with {name}={found}, not {wanted}", how
                )
        if state == "diverged":
            return records
        last = records[-1] if records else {"step": 0}
        step = last["step"]
        steps = self.config.train.num_steps
        value = last.get(score)
        has_score = isinstance(value, float) and math.isfinite(value)
        if step != steps or not has_score:
            where = f"at step {step} of {steps} with {score}={value}"
            raise UserError(f"the metrics of {self.folder} end {where}", how)
        return records

    def codes(self, *, to_come: bool = False) -> set[str]:
        """Returns the hashes of the code that its steps are of.

        A run that has not ended has none, or those `to_come`, with which it would go on.
        """
        starts = read_starts(self.workdir)
        if self.outcome().state in ENDED:
            return {start["code"] for start in starts}
        if not to_come:
            return set()
        saved = latest_step(self.workdir) or 0
        kept = {start["code"] for start in starts if start["step"] < saved}
        return kept | {hash_code(self.source)}

    def parameters(self) -> str:
        """Returns how many parameters it has, as its first screen says."""
        path = self.folder / "log.txt"
        log = path.read_text(errors="replace") if path.exists() else ""
        found = re.search(r"(\S+) parameters", log)
        return found[1] if found else ""

    def prepare(self) -> None:
        """Writes what train.py reads."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "outcome.json").unlink(missing_ok=True)  # of an earlier try
        write_json(self.folder / "config.json", self.options())


@functools.cache
def defaults_of(source: Path) -> Settings:
    """Returns the options that the code in a folder has, and their defaults."""
    path = source / "configs" / "default.py"
    with reading(path, "", "does not work"):  # it is anyone's code
        code = runpy.run_path(str(path))
        return flatten(code["get_config"]())


def find_root(flag: str, place: str | None) -> Path:
    """Returns the folder of a sweep or of a ledger, as a flag names it."""
    if not place or is_url(place):
        raise UserError(f"--{flag} names no folder", "Give one, or mount the bucket")
    return Path(place).expanduser()


def describe(settings: Settings) -> str:
    """Writes options as `optim.learning_rate=0.001,optim.beta2=0.95`."""
    return ",".join(f"{name}={value}" for name, value in settings.items())
