"""Trains one small model in every layout and compares: the table of docs/layouts.md.

    python -m tests.layouts

takes about fifteen minutes on two cores. The test suite runs a part of it (test_layouts.py).
"""

import dataclasses
import functools
import itertools
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before JAX has devices.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np

from gpt2.config import (
    Config,
    DataConfig,
    LoggingConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RulesConfig,
    TrainConfig,
)
from gpt2.parallel import distributed, gather_whole
from gpt2.telemetry.compile_watch import CompiledStep
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.utils.scan import in_layout

MODEL = ModelConfig(vocab_size=300, context_length=32, num_layers=2, num_heads=4, embed_dim=64)
# Some gradients are zero in theory (a bias on all keys alike changes no attention weight) and noise
# in practice. `eps` above that noise keeps Adam from blowing it up to full steps.
OPTIM = OptimConfig(learning_rate=1e-3, end_learning_rate=1e-4, warmup_steps=2, eps=1e-6)
NUM_STEPS, BATCH_SIZE = 5, 32
TOLERANCE = 1e-5

LAYOUTS = {
    "one device": ParallelConfig(),
    "pmap x 8": ParallelConfig(backend="pmap"),
    "data 8": ParallelConfig(data=8),
    "fsdp 8": ParallelConfig(data=1, fsdp=8, fsdp_gather="step"),
    "fsdp 8 by layer": ParallelConfig(data=1, fsdp=8, fsdp_gather="layer"),
    "data 2 x tensor 4": ParallelConfig(data=2, tensor=4),
    "data 2 x fsdp 2 x tensor 2": ParallelConfig(data=2, fsdp=2, tensor=2, fsdp_gather="step"),
    "data 2 x fsdp 2 x tensor 2 by layer": ParallelConfig(
        data=2, fsdp=2, tensor=2, fsdp_gather="layer"
    ),
    "zero1 x 8": ParallelConfig(strategy="zero1"),
    "data 2 x zero1 x 2 x tensor 2": ParallelConfig(data=2, strategy="zero1", fsdp=2, tensor=2),
    "data 2 x megatron x 4": ParallelConfig(data=2, strategy="megatron"),
    "fsdp 2 by layer x megatron x 4": ParallelConfig(
        data=1, fsdp=2, tensor=4, strategy="megatron", fsdp_gather="layer"
    ),
    "fsdp 4 x tensor 2 by other rules": ParallelConfig(
        data=1,
        fsdp=4,
        tensor=2,
        rules=RulesConfig(
            embed="none",
            norm="none",
            heads="fsdp",
            mlp="tensor,fsdp",
            table="tensor",
            position="fsdp",
        ),
    ),
}
# Of tests/test_optim_layouts.py alone.
FOR_OPTIMIZERS = {"fsdp 4 x tensor 2": ParallelConfig(data=1, fsdp=4, tensor=2)}
ON_TWO_PROCESSES = ("pmap x 8", "data 8", "fsdp 8", "fsdp 8 by layer", "data 2 x fsdp 2 x tensor 2")


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


REFERENCE = Case()


def make_config(case: Case) -> Config:
    """Returns the options of a case."""
    return Config(
        seed=0,
        model=case.model,
        precision=PrecisionConfig(),
        data=DataConfig(batch_size=BATCH_SIZE),
        loss=LossConfig(),
        optim=case.optim,
        train=TrainConfig(num_steps=NUM_STEPS, accumulate_steps=case.accumulate),
        parallel=(LAYOUTS | FOR_OPTIMIZERS)[case.layout],
        memory=MemoryConfig(remat=case.remat, scan_layers=case.scanned, scan_unroll=case.unroll),
        logging=LoggingConfig(),
    )


@dataclasses.dataclass(frozen=True)
class Result:
    """Losses of the steps, and the final parameters by name with layers unrolled, as numpy.

    The parameters are those that a run validates.
    """

    losses: np.ndarray
    params: dict[str, np.ndarray]


class Setup:
    """A case, ready to run.

    Attributes:
        program: of `gpt2.training.program`.
        backend: the program's.
        shapes: of the state, with shardings.
    """

    def __init__(self, case: Case):
        devices = jax.devices()[:1] if case.layout == "one device" else jax.devices()
        self.program = Program.from_config(make_config(case), devices)
        self.backend, self.shapes = self.program.backend, self.program.state_shapes

    @functools.cached_property
    def compiled(self) -> CompiledStep:
        # From arrays, not shapes: on several processes pmap lowers nothing else.
        return self.program.compile_train(self.program.init_state(), self.batch(0))

    def batch(self, step: int) -> dict[str, jax.Array]:
        """Returns a batch with rows of unequal length, so that means of means would differ."""
        rng = np.random.default_rng(step)
        tokens = rng.integers(0, MODEL.vocab_size, (BATCH_SIZE, MODEL.context_length + 1))
        lengths = rng.integers(1, MODEL.context_length + 1, (BATCH_SIZE, 1))
        targets = np.where(np.arange(MODEL.context_length) < lengths, tokens[:, 1:], -1)
        rows = self.backend.local_rows(BATCH_SIZE)
        batch = {"tokens": tokens[rows, :-1], "targets": targets[rows]}
        return self.backend.put_batch({k: v.astype(np.int32) for k, v in batch.items()})

    def train(
        self, start: int = 0, state: TrainState | None = None, save: Callable | None = None
    ) -> Result:
        """Runs the steps from `start` on; `save(state, step)` is called after each."""
        state = self.program.init_state() if state is None else state
        losses = []
        for step in range(start, NUM_STEPS):
            state, metrics = self.compiled(state, self.batch(step))
            losses.append(float(metrics["train/loss"]))
            if save:
                save(state, step + 1)
        params = jax.device_get(gather_whole(state.eval_params, self.backend.mesh))
        named = jax.tree_util.tree_leaves_with_path(in_layout(params, scanned=False))
        return Result(
            np.array(losses),
            {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in named},
        )


setup = functools.cache(Setup)


def loss_difference(result: Result, reference: Result) -> float:
    """Returns the largest relative difference of a loss; `result` may have begun later."""
    wanted = reference.losses[-len(result.losses) :]
    return float(np.abs(result.losses / wanted - 1).max())


def param_difference(result: Result, reference: Result) -> float:
    """Returns the largest norm of a parameter's difference, over the parameter's norm."""
    assert result.params.keys() == reference.params.keys()
    return max(
        float(np.linalg.norm(result.params[name] - wanted) / np.linalg.norm(wanted))
        for name, wanted in reference.params.items()
    )


def all_cases() -> Iterator[Case]:
    """Yields every layout with every accumulation, rematerialisation and form of the layers."""
    for options in itertools.product(LAYOUTS, (1, 4), ("none", "full"), (False, True)):
        yield Case(*options)


def continue_elsewhere(case: Case, others: list[Case], directory: Path) -> dict[Case, Result]:
    """Saves `case` after two steps and continues it as each of `others`."""

    def save(state: TrainState, step: int) -> None:
        if step == 2:
            checkpointer.save(state, step)

    with Checkpointer(directory) as checkpointer:
        setup(case).train(save=save)
        checkpointer.wait()
        return {
            other: setup(other).train(2, checkpointer.restore(2, setup(other).shapes))
            for other in others
        }


def run_two_processes(layouts: tuple[str, ...]) -> dict[str, Result]:
    """Trains in each layout, and returns what process 0 of two, of four devices each, found."""
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        address = f"localhost:{sock.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as directory:
        arguments = [address, directory, *layouts]
        environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.layouts", str(index), *arguments],
                env=environ,
                cwd=Path(__file__).parents[1],
            )
            for index in range(2)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"the processes ended with {codes}")
        return {name: _load(Path(directory) / f"{name}.npz") for name in layouts}


def _one_of_two(index: int, address: str, directory: str, *layouts: str) -> None:
    distributed.initialize(address, 2, index)
    for name in layouts:
        result = setup(Case(name)).train()
        if index == 0:
            np.savez(Path(directory) / f"{name}.npz", losses=result.losses, **result.params)


def _load(path: Path) -> Result:
    arrays: dict[str, Any] = dict(np.load(path))
    return Result(arrays.pop("losses"), arrays)


def _table(title: str, rows: Iterator[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * lines[0].count(" | ") + "---|")
    return [f"## {title}", "", *lines, ""]


def _compare_all(reference: Result) -> Iterator[list[str]]:
    yield ["layout", "micro-batches", "remat", "layers", "losses", "parameters"]
    for case in all_cases():
        result = reference if case == REFERENCE else setup(case).train()
        layers = "scanned" if case.scanned else "unrolled"
        yield [
            case.layout,
            str(case.accumulate),
            case.remat,
            layers,
            *_differences(result, reference),
        ]


def _compare_two_processes(reference: Result) -> Iterator[list[str]]:
    yield ["layout", "losses", "parameters"]
    for name, result in run_two_processes(ON_TWO_PROCESSES).items():
        yield [name, *_differences(result, reference)]


def _compare_continued(reference: Result) -> Iterator[list[str]]:
    cases = [Case(name, scanned=index % 2 == 1) for index, name in enumerate(LAYOUTS)]
    yield ["saved as", *(f"continued as {case.layout}" for case in cases)]
    for case in cases:
        with tempfile.TemporaryDirectory() as directory:
            results = continue_elsewhere(case, cases, Path(directory))
        yield [case.layout, *(_differences(r, reference)[0] for r in results.values())]


def _differences(result: Result, reference: Result) -> list[str]:
    differences = loss_difference(result, reference), param_difference(result, reference)
    if max(differences) > TOLERANCE:
        raise SystemExit(f"differences of {differences} are above {TOLERANCE}")
    return [f"{difference:.1e}" for difference in differences]


def main() -> None:
    """Compares everything with the reference and writes docs/layouts.md."""
    reference = setup(REFERENCE).train()
    text = [
        "# The same training in every layout",
        "",
        "Written by `python -m tests.layouts` (JAX " + jax.__version__ + ", CPU, float32).",
        "",
        f"A model of {MODEL.num_layers} layers, {MODEL.embed_dim} wide, trains for {NUM_STEPS} "
        f"steps on batches of {BATCH_SIZE} rows of unequal length, on 8 simulated devices. Each "
        "run is compared with one device, one micro-batch, unrolled layers and no remat: the "
        "largest relative difference of a loss, and the largest norm of a parameter's difference "
        f"over the parameter's norm. The command fails above {TOLERANCE:.0e}. AdamW runs with "
        f"eps={OPTIM.eps:g}: gradients that are zero in theory (a bias on all keys alike) are "
        "noise in practice, which a smaller eps would blow up to full steps.",
        "",
        *_table("Layouts and switches", _compare_all(reference)),
        *_table("Two processes of four devices", _compare_two_processes(reference)),
        *_table("A checkpoint of step 2, continued to step 5", _compare_continued(reference)),
        "The figures of the last table are of the losses. Every second layout scans its layers, so "
        "that checkpoints cross between scanned and unrolled layers too.",
        "",
    ]
    path = Path(__file__).parents[1] / "docs" / "layouts.md"
    path.write_text("\n".join(text))
    print(path)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _one_of_two(int(sys.argv[1]), *sys.argv[2:])
    else:
        main()
