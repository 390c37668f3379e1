"""The folder of a run of the lab.

It contains config.json (the options), log.txt (the output of train.py), outcome.json (how the run
ended) and run/ (the workdir of train.py).
"""

import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from gpt2.config import Config, flatten
from gpt2.errors import UserError
from gpt2.lab.experiments.processes import confined
from gpt2.telemetry.metrics import read_metrics
from gpt2.training.checkpoint_files import latest_step
from gpt2.utils.code import SOURCE, hash_code, read_starts
from gpt2.utils.files import reading, write_json
from gpt2.utils.stores import is_url

Setting = bool | int | float | str  # the value of an option
Settings = Mapping[str, Setting]  # dotted name of an option -> its value
_SECONDS_TO_READ = 120  # time limit of the process that reads options
ENDED = ("finished", "diverged")  # states of runs that are not trained again


class Outcome(NamedTuple):
    """How a run ended, as outcome.json states it."""

    # "finished", "diverged" (NaN or Inf), "failed", or "waiting" if the run has not ended.
    state: str
    error: str = ""  # the log line that states the cause
    seconds: float = 0.0  # duration of the run's processes, measured outside of them
    attempt: str = ""  # a random id, because two attempts may fail with the same error


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of train.py: its options, its code and its folder."""

    arm: str  # the arm's name
    config: Config
    folder: Path
    # The values of the tuned options. A tuning run tries them; for other runs, tuning chose them.
    tuned: Settings = dataclasses.field(default_factory=dict)
    chooses: bool = False  # whether the run is a tuning run
    source: Path = SOURCE  # the folder that contains the run's train.py
    # Options that only the code in `source` has.
    extra: Settings = dataclasses.field(default_factory=dict)

    @property
    def workdir(self) -> Path:
        """The workdir, to which train.py writes its files."""
        return self.folder / "run"

    @property
    def label(self) -> str:
        """The run's name on the screen, such as `optim.name=muon seed 2`."""
        name = self.arm
        if self.chooses:
            name = f"tuning run of {name} with {describe(self.tuned)},"
        return f"{name} seed {self.config.seed}"

    def options(self) -> dict[str, Setting]:
        """Return the options for config.json, by dotted name.

        Options that the run's code does not have are left out. Raise a UserError if such an option
        differs from its default.
        """
        options = {**flatten(self.config.to_dict()), **self.extra}
        if self.source != SOURCE:
            usual = flatten(Config().to_dict())
            for name in options.keys() - defaults_of(self.source).keys():
                if options.pop(name) != usual.get(name):
                    raise UserError(
                        f"The code in {self.source} has no option {name}",
                        "Leave the option out, or choose another version of the code with code=",
                    )
        return options

    def outcome(self) -> Outcome:
        """Return the outcome of the run, read from outcome.json."""
        path = self.folder / "outcome.json"
        with reading(path, f"Remove {path}, and repeat the command"):
            try:
                outcome = Outcome(**json.loads(path.read_bytes()))
            except FileNotFoundError:
                return Outcome("waiting")
            if outcome.state not in (*ENDED, "failed", "waiting"):
                raise ValueError(f"the state {outcome.state!r} is unknown")
            return outcome

    def read(self, score: str) -> list[dict]:
        """Return the records of metrics.jsonl.

        Raise a UserError if a file is damaged, if the run in the folder finished or diverged with
        other options, or if it finished without the metric `score` at its last step. The options
        of a run that failed, or has not ended, are not checked.
        """
        options = self.options()
        state = self.outcome().state
        records = read_metrics(self.workdir / "metrics.jsonl")
        if state not in ENDED:
            return records
        remedy = f"Remove {self.folder}, and repeat the command"
        with reading(self.folder, remedy):
            text = (self.workdir / "config.json").read_bytes()
            actual = flatten(json.loads(text))
            self.codes()
        for name, expected in options.items():
            # Another version of the code may not have the option.
            value = actual.get(name, expected)
            if value != expected:
                raise UserError(
                    f"{self.folder} contains a run with {name}={value}, not {expected}",
                    remedy,
                )
        if state == "diverged":
            return records
        last = records[-1] if records else {"step": 0}
        step = last["step"]
        steps = self.config.train.num_steps
        value = last.get(score)
        has_score = isinstance(value, float) and math.isfinite(value)
        if step != steps or not has_score:
            raise UserError(
                f"The metrics of {self.folder} end at step {step} of {steps}"
                f" with {score}={value}",
                remedy,
            )
        return records

    def codes(self, *, to_come: bool = False) -> set[str]:
        """Return the hashes of the code that trained the run's steps.

        If the run has not ended, return an empty set. With `to_come`, return instead the hash of
        the code that would continue the run now, and the hashes of the code that trained it up to
        its newest checkpoint.
        """
        with reading(self.workdir, f"Remove {self.folder}, and repeat the command"):
            starts = read_starts(self.workdir)
            if self.outcome().state in ENDED:
                return {start["code"] for start in starts}
            if not to_come:
                return set()
            saved = latest_step(self.workdir) or 0
            trained = {start["code"] for start in starts if start["step"] < saved}
            return trained | {hash_code(self.source)}

    def warnings(self) -> set[str]:
        """Return the warnings that the run has printed, without the path of the run's folder."""
        log = self.folder / "log.txt"
        text = log.read_text(errors="replace") if log.exists() else ""
        text = text.replace(f"{self.folder}/", "")
        return set(re.findall("^warning:? +(.+)", text, re.MULTILINE))

    def prepare(self) -> None:
        """Write config.json for train.py, and remove the outcome of an earlier attempt."""
        # A sandbox may allow train.py to write the workdir, but not to create it.
        self.workdir.mkdir(parents=True, exist_ok=True)
        (self.folder / "outcome.json").unlink(missing_ok=True)
        write_json(self.folder / "config.json", self.options())


def count_warnings(runs: Iterable[Run]) -> Counter[str]:
    """Return how many runs have printed each warning."""
    return Counter(warning for run in runs for warning in run.warnings())


@functools.cache
def defaults_of(source: Path) -> Settings:
    """Return all options of the code in a folder, with their default values."""
    program = "print(runpy.run_path(path)['get_config']().to_json())"
    return options_from(program, source / "configs" / "default.py", source)


def options_from(program: str, path: Path | str, source: Path) -> Settings:
    """Return the options that the Python code `program` prints as JSON for the file `path`.

    `program` runs in another process, with the package `gpt2` in the folder `source`, because the
    code that a ledger judges must not run in the ledger's own process.
    """
    code = f"import json, runpy, sys; path = sys.argv[1]; {program}"
    with reading(path, ""), tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-c", code, str(path)]
        done = subprocess.run(
            confined(command, Path(folder), Path(folder)),
            capture_output=True,
            text=True,
            timeout=_SECONDS_TO_READ,
            env=os.environ | {"PYTHONPATH": str(source.absolute())},
        )
        if done.returncode:  # the last line of a traceback is the error
            reason = done.stderr.strip().rpartition("\n")[2]
            kind, _, message = reason.partition(": ")
            if kind.endswith(".UserError"):
                raise UserError(message)
            raise ValueError(reason)
        return flatten(json.loads(done.stdout.splitlines()[-1]))


def find_root(flag: str, path: str | None) -> Path:
    """Return the folder of a sweep or ledger, given the name and the value of its flag.

    Raise a UserError if the value is empty or a URL.
    """
    if not path or is_url(path):
        raise UserError(
            f"--{flag}={path or ''} must name a local folder",
            f"Use --{flag}=FOLDER; to use a bucket, mount it as a folder first",
        )
    return Path(path).expanduser()


def describe(settings: Settings) -> str:
    """Return options as one string, such as `optim.learning_rate=0.001,optim.beta2=0.95`."""
    return ",".join(f"{name}={value}" for name, value in settings.items())
