"""Score tasks while a run trains."""

import dataclasses
import re
from collections.abc import Mapping
from functools import cached_property

from jax.sharding import Mesh

from gpt2.config import TrainConfig
from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import located
from gpt2.evals.scoring import Scorer
from gpt2.evals.tasks import find_tasks
from gpt2.model import GPT
from gpt2.telemetry import Reporter, StepClock
from gpt2.training import TrainState


@dataclasses.dataclass(frozen=True)
class RunTasks:
    """The tasks in `train.eval_tasks`, scored on all devices of a run."""

    model: GPT
    options: TrainConfig
    tokenizer: Tokenizer
    mesh: Mesh

    def __post_init__(self) -> None:
        """Read all files, so that a damaged file is reported before the run begins."""
        _ = self.scores

    @cached_property
    def scores(self) -> list[str]:
        """The names of the scores that `score` returns."""
        return [*self.score(None)]

    def score(self, params: Mapping | None) -> dict[str, float]:
        """Return the scores by name, `eval/TASK/METRIC`.

        Every process of the run must call this method, because all devices compute together.
        `params` may be divided between the devices in any way. If `params` is None, only read the
        files; the scores are then meaningless.
        """
        devices = list(self.mesh.devices.flat)
        scorer = Scorer(self.model, params, devices)
        scores = dict[str, float]()
        specs = filter(None, self.options.eval_tasks.split(","))
        for score, path in find_tasks(specs):
            with located(path):
                for figure in score(scorer, self.tokenizer, path):
                    metric = re.sub("[^a-zA-Z0-9]+", "_", figure.metric)
                    scores[f"eval/{figure.task}/{metric}"] = figure.value
        return scores

    def log(
        self, reporter: Reporter, clock: StepClock, step: int, state: TrainState
    ) -> None:
        """Score the training state after `step`, and log the scores."""
        reporter.catch_up()
        with clock.phase("tasks"):
            reporter.write(step, self.score(state.eval_params))
