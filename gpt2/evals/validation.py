"""What a run scores while it trains: held-out text, in the three units people compare; tasks."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from gpt2.config import Config
from gpt2.data.tokenizer import Tokenizer
from gpt2.evals.scoring import Scorer
from gpt2.evals.tasks import find_task, run_task

# Batches that the host may be ahead of the devices. Simulated devices that get further wait for
# each other for ever, since XLA has one pool of threads for all of them.
MOST_AHEAD = 32


def validate(
    eval_step: Callable,
    params: Any,
    held_out: Mapping[str, tuple[float, Iterable[Any]]],
    targets_per_byte: float | None = None,
) -> dict[str, float]:
    """Scores every target of batches, which are on the devices already.

    `held_out` has each part of a mixture with its share, or all of it under an empty name. Returns
    `eval/NAME` for all that `eval_step` sums, `eval/loss` (nats per token) among it, over the
    mixture, `eval/loss_PART`, `eval/perplexity`, and `eval/bits_per_byte` if the tokens to predict
    for each byte are known.
    """
    scores: dict[str, float] = defaultdict(float)
    for part, (share, batches) in held_out.items():
        # Nothing is fetched before the last batch is dispatched.
        sums: list[Any] = []
        for batch in batches:
            sums.append(eval_step(params, batch))
            if len(sums) > MOST_AHEAD:
                jax.block_until_ready(sums[-MOST_AHEAD])
        sums = jax.device_get(sums)
        for name in sums[0]:
            mean = math.fsum(s[name][0] for s in sums) / math.fsum(
                s[name][1] for s in sums
            )
            scores[f"eval/{name}"] += share * mean
            if part and name == "loss":
                scores[f"eval/loss_{part}"] = mean
    loss = scores["eval/loss"]
    scores["eval/perplexity"] = math.exp(min(loss, 700.0))
    if targets_per_byte is not None:
        scores["eval/bits_per_byte"] = loss * targets_per_byte / math.log(2.0)
    return dict(scores)


class RunTasks:
    """The tasks of `train.eval_tasks`, which a run scores on all of its devices."""

    def __init__(self, config: Config, tokenizer: Tokenizer, mesh: Mesh):
        self._tasks = [
            find_task(spec) for spec in config.train.eval_tasks.split(",") if spec
        ]
        self._tokenizer = tokenizer
        self._devices = list(mesh.devices.flat)
        self._config = config.gpt()
        self.score(None)  # what cannot be read is told before the run begins

    def score(self, params: Any) -> dict[str, float]:
        """Returns `eval/TASK/METRIC` of parameters in any layout; every process must call it."""
        scorer = Scorer(self._config, params, self._devices)
        scores = dict[str, float]()
        for name, path in self._tasks:
            for figure in run_task(name, scorer, self._tokenizer, path):
                metric = re.sub("[^a-zA-Z0-9]+", "_", figure.metric)
                scores[f"eval/{figure.task}/{metric}"] = figure.value
        return scores
