"""Train one small model in every layout, and print how far each differs from one device.

    python -m tests.programs.layouts

This takes about fifteen minutes on two cores. The test suite runs a part of it (test_layouts.py).
"""

import dataclasses
import functools
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

# These variables must be set before JAX looks for devices.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np

from gpt2.config import Config, ModelConfig, OptimConfig
from gpt2.parallel import gather_whole
from gpt2.parallel.compiled import CompiledStep
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.utils.scan import in_layout
from tests.helpers import by_name, configured

MODEL = ModelConfig(
    vocab_size=300, context_length=32, num_layers=2, num_heads=4, embed_dim=64
)
# Some gradients are zero in theory, but noise in practice. For example, a bias that is the same for
# all keys does not change attention weights. With `eps` above this noise, Adam does not scale the
# noise up to full steps.
OPTIM = OptimConfig(learning_rate=1e-3, warmup_steps=2, eps=1e-6)
NUM_STEPS = 5
BATCH_SIZE = 32
TOLERANCE = 1e-5

# Name of a layout -> its options of `parallel.`, without this prefix.
LAYOUTS = {
    "one device": "",
    "pmap x 8": "backend=pmap",
    "data 8": "data=8",
    "fsdp 8": "data=1 fsdp=8 fsdp_gather=step",
    "fsdp 8 by layer": "data=1 fsdp=8 fsdp_gather=layer",
    "data 2 x tensor 4": "data=2 tensor=4",
    "data 2 x fsdp 2 x tensor 2": "data=2 fsdp=2 tensor=2 fsdp_gather=step",
    "zero1 x 8": "strategy=zero1",
    "data 2 x zero1 x 2 x tensor 2": "strategy=zero1 data=2 fsdp=2 tensor=2",
    "data 2 x megatron x 4": "strategy=megatron data=2",
    "fsdp 2 x megatron x 4": "strategy=megatron data=1 fsdp=2 tensor=4",
    "fsdp 4 x tensor 2": "data=1 fsdp=4 tensor=2",
    "data 2 x fsdp 2 x experts 2": """
        data=2 fsdp=2 tensor=2 rules.experts=tensor rules.mlp=none""",
    "fsdp 4 x tensor 2 by other rules": """
        data=1 fsdp=4 tensor=2 rules.embed=none rules.norm=none rules.heads=fsdp
        rules.mlp=tensor,fsdp rules.table=tensor rules.position=fsdp""",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to run the same training."""

    layout: str = "one device"
    accumulate: int = 1
    remat: str = "none"
    scanned: bool = False
    unroll: int = 1
    optim: OptimConfig = dataclasses.field(default=OPTIM, repr=False)
    model: ModelConfig = dataclasses.field(default=MODEL, repr=False)

    def config(self) -> Config:
        parallel = configured(LAYOUTS[self.layout], "parallel.").parallel
        config = configured(f"""
            data.batch_size={BATCH_SIZE} train.num_steps={NUM_STEPS}
            train.accumulate_steps={self.accumulate} memory.remat={self.remat}
            memory.scan_layers={self.scanned} memory.scan_unroll={self.unroll}""")
        return dataclasses.replace(
            config, model=self.model, optim=self.optim, parallel=parallel
        )


REFERENCE = Case()


@dataclasses.dataclass(frozen=True)
class Result:
    """The losses of the steps, and the final parameters by name, with unrolled layers."""

    losses: np.ndarray
    params: dict[str, np.ndarray]


class Setup:
    """A case with its program, ready to train."""

    def __init__(self, case: Case):
        devices = jax.devices()
        if case.layout == "one device":
            devices = devices[:1]
        self.program = Program.from_config(case.config(), devices)
        self.backend = self.program.backend
        self.shapes = self.program.state_shapes

    @functools.cached_property
    def compiled(self) -> CompiledStep:
        # On several processes, pmap can be lowered only with arrays, not with shapes.
        return self.program.compile_train(self.program.init_state(), self.batch(0))

    def batch(self, step: int) -> dict[str, jax.Array]:
        """Return a batch with rows of unequal length, so that means of means would differ."""
        rng = np.random.default_rng(step)
        length = MODEL.context_length
        tokens = rng.integers(0, MODEL.vocab_size, (BATCH_SIZE, length + 1))
        tokens = tokens.astype(np.int32)
        lengths = rng.integers(1, length + 1, (BATCH_SIZE, 1))
        is_real = np.arange(length) < lengths
        targets = np.where(is_real, tokens[:, 1:], np.int32(-1))
        rows = self.backend.local_rows(BATCH_SIZE)
        batch = {"tokens": tokens[rows, :-1], "targets": targets[rows]}
        return self.backend.put_batch(batch)

    def train(
        self, start=0, state: TrainState | None = None, save: Callable | None = None
    ) -> Result:
        state = state or self.program.init_state()
        losses = []
        for step in range(start, NUM_STEPS):
            state, metrics = self.compiled(state, self.batch(step))
            losses.append(float(metrics["train/loss"]))
            if save:
                save(state, step + 1)
        params = jax.device_get(gather_whole(state.eval_params, self.backend.mesh))
        unrolled = in_layout(params, scanned=False)
        return Result(np.array(losses), by_name(unrolled))


setup = functools.cache(Setup)


def loss_difference(result: Result, reference: Result) -> float:
    """Return the largest relative difference of a loss. `result` may begin at a later step."""
    expected = reference.losses[-len(result.losses) :]
    return float(np.abs(result.losses / expected - 1).max())


def difference(result: Result, reference: Result) -> float:
    """Return the largest relative difference of a loss or, measured in norm, of a parameter."""
    assert result.params.keys() == reference.params.keys()
    norm = np.linalg.norm
    largest = loss_difference(result, reference)
    for name, expected in reference.params.items():
        distance = norm(result.params[name] - expected)
        largest = max(largest, float(distance / norm(expected)))
    return largest


def continued(case: Case, others: list[Case], directory: Path) -> dict[Case, Result]:
    """Save `case` after two steps, and return the result of continuing it as each of `others`."""

    def save(state: TrainState, step: int) -> None:
        if step == 2:
            checkpointer.save(state, step)

    with Checkpointer(directory) as checkpointer:
        setup(case).train(save=save)
        checkpointer.wait()
        results = {}
        for other in others:
            state = checkpointer.restore(2, setup(other).program)
            results[other] = setup(other).train(2, state)
        return results


def main() -> None:
    reference = setup(REFERENCE).train()
    differences = []

    def show(name: str, result: Result) -> None:
        differences.append(difference(result, reference))
        print(f"{name:<78} {differences[-1]:.1e}", flush=True)

    for options in itertools.product(LAYOUTS, (1, 4), ("none", "full"), (False, True)):
        case = Case(*options)
        show(str(case), setup(case).train())
    # Every second layout scans its layers, so that scanned layers continue as unrolled layers and
    # the other way round.
    cases = [Case(name, scanned=index % 2 == 1) for index, name in enumerate(LAYOUTS)]
    for case in cases:
        with tempfile.TemporaryDirectory() as directory:
            for other, result in continued(case, cases, Path(directory)).items():
                show(f"{case.layout}, continued at step 2 as {other.layout}", result)
    worst = max(differences)
    if worst > TOLERANCE:
        raise SystemExit(f"A difference of {worst:.1e} is above {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
