"""What `gpt2.benchmark` measures of this project, in a process of its own: one case, in turns."""

import dataclasses
import itertools
import json
import re
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData

from gpt2.config import GPTConfig, OptimConfig, ParallelConfig
from gpt2.errors import exit_on_user_error
from gpt2.model import GPT
from gpt2.ops import resolve
from gpt2.optim import make_optimizer, make_schedule
from gpt2.parallel import make_backend
from gpt2.sampling import Sampling, generate
from gpt2.state import TrainState
from gpt2.steps import make_eval_step, make_train_step
from gpt2.telemetry.throughput import (
    forget_measured_peak,
    model_flops_per_token,
    peak_flops,
    peak_source,
    total_peak_flops,
)
from gpt2.utils.allocation import release_free_memory
from gpt2.utils.turns import serve

# Named scopes of the model and the step.
SCOPES = ("attention", "mlp", "head", "optimizer")


class Work:
    """A compiled program and the state that it works on, for `train` or `eval`.

    Attributes:
        compile_seconds: what tracing and compiling took.
    """

    def __init__(self, case: dict[str, Any], model: GPT):
        subjects = {"train": _training, "eval": _evaluation}
        program, self._state, self._batch = subjects[case["subject"]](case, model)
        began = time.perf_counter()
        self._program = program.lower(self._state, self._batch).compile()
        self.compile_seconds = time.perf_counter() - began
        release_free_memory()

    def step(self) -> None:
        """Runs the program once and waits for it."""
        self._state, output = self._program(self._state, self._batch)
        jax.block_until_ready(output)

    def shares(self) -> dict[str, float]:
        """Returns the share of the time that each of `SCOPES`, and `other`, takes in one step.

        A trace of the step times operations; the compiled program knows each one's scope.
        """
        with tempfile.TemporaryDirectory() as directory:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(directory, profiler_options=options)
            self.step()
            jax.profiler.stop_trace()
            trace = ProfileData.from_file(str(next(Path(directory).rglob("*.xplane.pb"))))
        scopes = _scopes(self._program.as_text())
        seconds: defaultdict[str, float] = defaultdict(float)
        for event in (e for plane in trace.planes for line in plane.lines for e in line.events):
            operation = dict(event.stats).get("hlo_op")
            if operation in scopes:
                seconds[scopes[operation]] += event.duration_ns
        ranked = sorted(seconds.items(), key=lambda item: -item[1])
        return {scope: time / sum(seconds.values()) for scope, time in ranked}


class Generation:
    """Greedy continuations of prompts that fill half of the context, to its end.

    `compile_seconds` is what the first took beyond the second.
    """

    def __init__(self, case: dict[str, Any], model: GPT):
        params = jax.jit(lambda key: _init(model, key))(jax.random.key(0))
        prompts = _batch(case)["tokens"][:, : case["context_length"] // 2].tolist()
        self.step = partial(
            generate,
            params,
            model.config,
            prompts,
            max_new_tokens=case["context_length"] // 2,
            sampling=Sampling(temperature=0.0),
        )
        seconds = [_seconds(self.step) for _ in range(2)]
        self.compile_seconds = max(0.0, seconds[0] - seconds[1])


class Reading:
    """Training batches of a prepared synthetic corpus, shuffled, as the loop reads them."""

    compile_seconds = 0.0

    def __init__(self, case: dict[str, Any], model: GPT):
        # What only this needs, and a machine that measures the model may lack.
        from gpt2.config import DataConfig
        from gpt2.data.loader import TrainLoader
        from gpt2.data.prepare import prepare

        dataset = prepare(DataConfig(corpus="synthetic", tokenizer="byte"), show_progress=False)
        shape = dict(batch_size=case["batch_size"], context_length=case["context_length"])
        self._loader, self._count = TrainLoader(dataset, seed=0, **shape), itertools.count()

    def step(self) -> None:
        """Reads the next batch."""
        self._loader.batch(next(self._count))


def model_config(case: dict[str, Any]) -> GPTConfig:
    """Returns the model that a case describes."""
    names = {field.name for field in dataclasses.fields(GPTConfig)}
    shape = {name: value for name, value in case.items() if name in names}
    return GPTConfig(**shape, compute_dtype=case["compute"])


def hardware(case: dict[str, Any]) -> dict[str, Any]:
    """Returns what a case runs on, for its label, and the FLOP/s that this can reach."""
    devices, subject = jax.devices(), case["subject"]
    used = devices if subject == "train" else devices[:1]
    if subject == "data":
        peak = None
    elif subject == "train" or used[0].platform == "cpu":  # simulated devices share the whole CPU
        peak = total_peak_flops(case["compute"])
    else:
        peak = peak_flops(used[0], case["compute"])
    return {
        "device": f"{len(used)} x {used[0].device_kind}",
        "peak_flops": peak,
        "peak_source": peak_source(used[0]),
    }


@exit_on_user_error
def main() -> None:
    case = json.loads(sys.argv[1])
    config, length = model_config(case), case["context_length"]
    device, runs_on = jax.devices()[0], hardware(case)
    work = {"generate": Generation, "data": Reading}.get(case["subject"], Work)(case, GPT(config))
    flops = model_flops_per_token(config, length)

    def info() -> dict[str, Any]:
        statistics = device.memory_stats() or {}  # None on a CPU
        on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        # A CPU's peak is the better of what it reached before and after the turns.
        forget_measured_peak()
        before, after = runs_on["peak_flops"], hardware(case)["peak_flops"]
        return {
            **runs_on,
            "peak_flops": before and max(before, after),
            "compile_seconds": work.compile_seconds,
            "flops_per_token": flops if case["subject"] == "train" else flops / 3,
            "peak_bytes": statistics.get("peak_bytes_in_use", on_host),
            "attention": resolve(
                config.attention, device.platform, config.compute_dtype, length, config.head_size
            ),
            "versions": {"jax": jax.__version__},
            "shares": work.shares() if case["shares"] else {},
        }

    serve(work.step, info)


def _training(case: dict[str, Any], model: GPT) -> tuple:
    """Returns the program, the state and the batch of a training step."""
    layout = {name: case[name] for name in ("backend", "data", "fsdp", "tensor")}
    optim = OptimConfig()
    schedule = make_schedule(optim, num_steps=1000)
    optimizer = make_optimizer(optim, schedule)
    backend = make_backend(ParallelConfig(**layout), model.logical_axes(), optimizer)

    def init(key: jax.Array) -> TrainState:
        return TrainState.create(_init(model, key), optimizer, case["compute"])

    state = backend.init_state(init, jax.random.key(0))
    step = make_train_step(model, optimizer, schedule, seed=0)
    return backend.compile_train(step), state, backend.put_batch(_batch(case))


def _evaluation(case: dict[str, Any], model: GPT) -> tuple:
    """Returns the program, the parameters and the batch of an evaluation step, on one device."""
    evaluate = make_eval_step(model)
    program = jax.jit(lambda params, batch: (params, evaluate(params, batch)), donate_argnums=0)
    return program, jax.jit(lambda key: _init(model, key))(jax.random.key(0)), _batch(case)


def _seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _init(model: GPT, key: jax.Array) -> Any:
    return model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]


def _batch(case: dict[str, Any]) -> dict[str, np.ndarray]:
    shape = (2, case["batch_size"], case["context_length"])
    tokens, targets = np.random.default_rng(0).integers(0, case["vocab_size"], shape, np.int32)
    return {"tokens": tokens, "targets": targets}


def _scopes(program: str) -> dict[str, str]:
    """Returns the scope of each operation of a compiled program; of loops, those inside."""
    scopes = {}
    for line in program.splitlines():
        name = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
        if name and not re.search(r" (while|call|conditional)\(", line):
            path = re.search(r'op_name="([^"]*)"', line)
            parts = re.split(r"[/()]", path[1]) if path else ()
            scopes[name[1]] = next((scope for scope in SCOPES if scope in parts), "other")
    return scopes


if __name__ == "__main__":
    main()
