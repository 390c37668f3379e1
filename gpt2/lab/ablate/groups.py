"""Which runs may train together: those whose programs differ in numbers alone."""

import json
from collections.abc import Sequence
from dataclasses import replace

from gpt2.config import Config, ParallelConfig, option
from gpt2.lab.ablate.runs import Run
from gpt2.utils.code import SOURCE

# Options that a step only computes with: their values may be arguments of a program. Others choose
# what is computed, or fast kernels hold them as constants (`loss.`).
NUMBERS = (
    "seed",
    "optim.learning_rate",
    "optim.end_fraction",
    "optim.weight_decay",
    "optim.beta1",
    "optim.beta2",
    "optim.eps",
    "optim.alpha",
)
# Options of the first state, which each run draws for itself.
_DRAWN = ("model.init_std", "train.init_from")
# What only train.py does between steps, where an option differs from its default.
_ALONE = (
    "train.batch_schedule",
    "train.context_schedule",
    "train.window_schedule",
    "train.eval_tasks",
    "logging.wandb",
    "logging.watch_every",
    "logging.profile_steps",
)


def group_runs(runs: Sequence[Run], shares: int) -> list[list[Run]]:
    """Returns runs in groups that train together, each kind of run in up to so many shares."""
    groups = list[list[Run]]()
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        if not _may_share(run):
            groups.append([run])
            continue
        kind = run.options() | dict.fromkeys((*NUMBERS, *_DRAWN))
        kinds.setdefault(json.dumps(kind), []).append(run)
    for alike in kinds.values():
        parts = [alike[start::shares] for start in range(shares)]
        groups.extend(filter(None, parts))
    return groups


def _may_share(run: Run) -> bool:
    config = run.config
    is_spread = replace(config.parallel, cpu_devices=1) != ParallelConfig()
    has_own_batches = config.data.corpus.startswith("python:")
    averages_apart = config.optim.name == "schedule_free"
    if is_spread or has_own_batches or averages_apart or run.source != SOURCE:
        return False
    return all(option(config, name) == option(Config(), name) for name in _ALONE)
