"""The tasks that a run scores while it trains."""

import dataclasses
import re
from collections.abc import Mapping

from jax.sharding import Mesh

from gpt2.config import TrainConfig
from gpt2.data.tokenizer import Tokenizer
from gpt2.evals.scoring import Scorer
from gpt2.evals.tasks import find_task
from gpt2.model import GPT


@dataclasses.dataclass(frozen=True)
class RunTasks:
    """The tasks of `train.eval_tasks`, which a run scores on all of its devices."""

    model: GPT
    options: TrainConfig
    tokenizer: Tokenizer
    mesh: Mesh

    def __post_init__(self) -> None:
        """Tells what cannot be read before the run begins."""
        self.score(None)

    def are_due(self, step: int) -> bool:
        """Returns whether there are tasks that are scored after `step`."""
        options = self.options
        return bool(options.eval_tasks) and options.is_due(
            step, options.eval_tasks_every
        )

    def score(self, params: Mapping | None) -> dict[str, float]:
        """Returns `eval/TASK/METRIC` of parameters in any layout; every process must call it."""
        devices = list(self.mesh.devices.flat)
        scorer = Scorer(self.model, params, devices)
        scores = dict[str, float]()
        for spec in filter(None, self.options.eval_tasks.split(",")):
            score, path = find_task(spec)
            for figure in score(scorer, self.tokenizer, path):
                metric = re.sub("[^a-zA-Z0-9]+", "_", figure.metric)
                scores[f"eval/{figure.task}/{metric}"] = figure.value
        return scores
