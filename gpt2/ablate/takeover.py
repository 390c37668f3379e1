"""Runs that a sweep need not train: a sweep beside it has finished the same."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpt2.ablate.jobs import Slot, take
from gpt2.ablate.runs import Outcome, Run
from gpt2.ablate.terms import LOSS
from gpt2.data import prepare
from gpt2.errors import UserError
from gpt2.training.code import read_starts
from gpt2.utils import files
from gpt2.utils.text import counted

# What is the same, beside options, seed and text, where two runs give the same figures.
_ALIKE = (
    "code",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "numpy",
    "device_kind",
    "devices",
    "processes",
)
_DESCRIBE = """import json, sys
from gpt2.parallel import split_cpu
from gpt2.training.workdir import describe_start
split_cpu(int(sys.argv.pop()))
print(json.dumps(describe_start(0)))"""
_LEFT = shutil.ignore_patterns("checkpoints", "tensorboard", "profile", ".lock")


def take_over(runs: Sequence[Run], root: Path, slot: Slot) -> None:
    """Copies those of a sweep's runs that a sweep beside it has finished, and tells of them.

    They have the same options, seed, text, code, versions and devices.
    """
    here = functools.cache(functools.partial(_describe, slot))
    text = functools.cache(lambda data: prepare(data).describe())
    missing = defaultdict[str, list[Run]](list)  # by their options
    for run in runs:
        if not run.workdir.exists():
            missing[json.dumps(run.options())].append(run)
    if not missing:
        return
    folder = root.absolute().parent
    in_runs = folder.glob("*/runs/*/*/config.json")
    in_tune = folder.glob("*/tune/*/*/*/config.json")
    taken = Counter[tuple[str, Path]]()
    for path in sorted([*in_runs, *in_tune]):
        try:
            options = json.dumps(json.loads(path.read_bytes()))
        except ValueError:
            continue
        for run in missing[options]:
            other = dataclasses.replace(run, folder=path.parent)
            try:
                outcome = other.outcome()
                other.check(LOSS)
            except UserError:  # what that sweep would tell
                continue
            if outcome.state != "finished":
                continue
            starts = read_starts(other.workdir)
            if _facts(starts) != here(run.source, run.config.parallel.cpu_devices):
                continue
            own_text = files.read_sealed(other.workdir / "data.json")
            if own_text != text(run.config.data):
                continue
            lock = take(run)
            if not lock:
                continue
            origin = outcome.taken_from or str(path.parent.relative_to(folder))
            with lock:
                _copy(other, run, origin)
            sweep = root.parent / Path(origin).parts[0]
            taken[run.arm, sweep] += 1
    for (arm, sweep), number in taken.items():
        print(f"{arm}: {counted(number, 'run')} taken from {sweep}", flush=True)


def _copy(other: Run, run: Run, origin: str) -> None:
    """Makes a run of what another has left."""
    run.prepare()
    shutil.copy(other.folder / "log.txt", run.folder)
    with files.new_directory(run.workdir) as partial:
        shutil.copytree(other.workdir, partial, ignore=_LEFT, dirs_exist_ok=True)
    outcome = Outcome("finished", taken_from=origin)
    files.write_json(run.folder / "outcome.json", outcome._asdict())


def _facts(starts: Sequence[Mapping[str, object]]) -> set[str]:
    """Returns what decides the figures of a run's starts, one text if it has not changed."""
    facts = set()
    for start in starts:
        alike = [start.get(name) for name in _ALIKE]
        facts.add(json.dumps(alike))
    return facts


def _describe(slot: Slot, source: Path, cpu_devices: int) -> set[str]:
    """Returns the `_facts` of a run that began now, by a process that has its devices."""
    own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    asked = subprocess.run(
        [sys.executable, "-c", _DESCRIBE, str(cpu_devices)],
        cwd=source,
        env=os.environ | slot.environment | own,
        capture_output=True,
    )
    if asked.returncode:
        return {""}
    return _facts([json.loads(asked.stdout)])
