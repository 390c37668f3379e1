"""The tasks that a run scores while it trains."""

import re
from collections.abc import Mapping

from jax.sharding import Mesh

from gpt2.config import TrainConfig
from gpt2.data.tokenizer import Tokenizer
from gpt2.evals.scoring import Scorer
from gpt2.evals.tasks import find_task, run_task
from gpt2.model import GPT


class RunTasks:
    """The tasks of `train.eval_tasks`, which a run scores on all of its devices."""

    def __init__(
        self, model: GPT, options: TrainConfig, tokenizer: Tokenizer, mesh: Mesh
    ):
        self._options = options
        specs = options.eval_tasks.split(",")
        self._tasks = [find_task(spec) for spec in specs if spec]
        self._tokenizer = tokenizer
        self._devices = list(mesh.devices.flat)
        self._model = model
        self.score(None)  # what cannot be read is told before the run begins

    def are_due(self, step: int) -> bool:
        """Returns whether there are tasks that are scored after `step`."""
        options = self._options
        return bool(self._tasks) and options.is_due(step, options.eval_tasks_every)

    def score(self, params: Mapping | None) -> dict[str, float]:
        """Returns `eval/TASK/METRIC` of parameters in any layout; every process must call it."""
        scorer = Scorer(self._model, params, self._devices)
        scores = dict[str, float]()
        for name, path in self._tasks:
            for figure in run_task(name, scorer, self._tokenizer, path):
                metric = re.sub("[^a-zA-Z0-9]+", "_", figure.metric)
                scores[f"eval/{figure.task}/{metric}"] = figure.value
        return scores
