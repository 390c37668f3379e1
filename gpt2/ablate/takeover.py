"""Runs that a sweep need not train: a sweep beside it has finished the same."""

import dataclasses
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2.ablate.jobs import Slot, take
from gpt2.ablate.runs import Outcome, Run
from gpt2.data import prepare
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
    missing = [
        (json.dumps(run.config.to_dict()), run)
        for run in runs
        if not run.workdir.exists()
    ]
    folder = root.absolute().parent
    taken = Counter[tuple[str, str]]()
    found = [
        *folder.glob("*/runs/*/*/config.json"),
        *folder.glob("*/tune/*/*/*/config.json"),
    ]
    beside = [
        (json.dumps(json.loads(p.read_text())), p) for p in sorted(found) if missing
    ]
    for (config, path), (wanted, run) in itertools.product(beside, missing):
        if config != wanted:
            continue
        other = dataclasses.replace(run, folder=path.parent)
        outcome = other.outcome()
        starts = read_starts(other.workdir)
        facts = here(run.source, run.config.parallel.cpu_devices)
        if outcome.state != "finished" or _facts(starts) != facts:
            continue
        same_text = files.read_sealed(other.workdir / "data.json") == text(
            run.config.data
        )
        if same_text and (lock := take(run)):
            origin = outcome.taken_from or str(path.parent.relative_to(folder))
            with lock:
                run.prepare()
                with files.new_directory(run.workdir) as partial:
                    shutil.copytree(
                        other.workdir, partial, ignore=_LEFT, dirs_exist_ok=True
                    )
                outcome = Outcome("finished", taken_from=origin)
                files.write_json(run.folder / "outcome.json", outcome._asdict())
            sweep = root.parent / Path(origin).parts[0]
            taken[
                run.arm, f"{sweep}, commit {starts[-1].get('commit') or 'unknown'}"
            ] += 1
    for (arm, whose), number in taken.items():
        print(f"{arm}: {counted(number, 'run')} taken from {whose}", flush=True)


def _facts(starts: Sequence[dict[str, Any]]) -> set[str]:
    """Returns what decides the figures of a run's starts, one text if it has not changed."""
    return {json.dumps([start.get(name) for name in _ALIKE]) for start in starts}


def _describe(slot: Slot, source: Path, cpu_devices: int) -> set[str]:
    """Returns the `_facts` of a run that began now, by a process that has its devices."""
    asked = subprocess.run(
        [sys.executable, "-c", _DESCRIBE, str(cpu_devices)],
        cwd=source,
        env=os.environ | slot.environment | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
    )
    return _facts([json.loads(asked.stdout)]) if asked.returncode == 0 else {""}
