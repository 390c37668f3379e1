"""One case of this project, measured in a process of its own, in turns."""

import atexit
import itertools
import json
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpt2.benchmark import our_step
from gpt2.benchmark.case import make_config
from gpt2.benchmark.first_step import STEPS, FirstStep, draw_batch, products_of, single_targets
from gpt2.benchmark.turns import announce, serve
from gpt2.config import DataConfig
from gpt2.errors import UserError, exit_on_user_error
from gpt2.model import GPT
from gpt2.parallel import Backend
from gpt2.profile.program import SCOPES, ProgramText
from gpt2.profile.trace import find_trace, read_trace
from gpt2.telemetry.chips import find_chip
from gpt2.telemetry.flops import model_flops_per_token
from gpt2.training.program import Program, resolve_attention
from gpt2.utils.platform import platform_of

FLASH = ("cudnn", "splash")  # implementations of attention that are flash kernels


def prepare_jax(case: dict[str, Any]) -> None:
    """Sets the precision of products, and refuses what the device cannot do.

    Raises:
        UserError: the device has no such products, or no flash attention.
    """
    device, precision = jax.devices()[0], case["matmul_precision"]
    if precision == "high" and platform_of(device) == "cpu":
        raise UserError(
            "--matmul_precision=high needs a GPU or TPU: a CPU multiplies float32 in full",
            "Use --matmul_precision=highest",
        )
    jax.config.update("jax_default_matmul_precision", None if precision == "default" else precision)
    attention = resolve_attention(make_config(case), device)
    if case["attention"] == "flash" and attention not in FLASH:
        raise UserError(
            f"--attention=flash would be {attention} on a {platform_of(device)} in "
            f"{case['compute']}: flash kernels are for 16 bits on NVIDIA GPUs, and for TPUs",
            "Use --attention=sdpa",
        )


class OurModel:
    """A compiled program and the state that it works on, for `train` or `eval`.

    Attributes:
        compile_seconds: what tracing and compiling took before the first step.
    """

    def __init__(self, case: dict[str, Any]):
        self._is_training = case["subject"] == "train"
        devices = devices_of(case)
        program = Program.from_config(make_config(case), devices)
        self._case, self._program = case, program
        self._batch = program.backend.put_batch(_batch(case))
        self._state = program.init_state() if self._is_training else program.init_params()
        compile_step = program.compile_train if self._is_training else program.compile_eval
        self._compiled = compile_step(self._state, self._batch)
        self.compile_seconds = self._compiled.compile_seconds
        platform = platform_of(devices[0])
        compute = program.config.precision.compute
        self._products = products_of(compute, case["matmul_precision"], platform)
        self._batches: Iterator[Any] = itertools.repeat(self._batch)
        if case["with_data"]:
            self._batches = _prefetch(case, program.backend)

    def step(self) -> None:
        """Runs the program once, on the next batch, and waits for it."""
        self._run(next(self._batches))

    def show(self, path: Path) -> float:
        """Does first steps from drawn weights, and writes what they computed to a file.

        Returns:
            Seconds of the first step.
        """
        program = self._program
        self._state = None  # its memory goes to the drawn weights
        params = our_step.draw_params(program.model.config)
        if self._is_training:
            self._state = program.init_state(params)
            before = our_step.samples(self._state.params)
        else:
            placed = jax.tree.map(lambda shape: shape.sharding, program.state_shapes.params)
            self._state = jax.device_put(params, placed)
        began = time.perf_counter()
        reported = self._run(self._batch)
        seconds = time.perf_counter() - began
        if self._is_training:
            shown = FirstStep(self._products, float(reported["train/loss"]), before=before)
            shown.gradients = our_step.clipped_gradients(program.config, before, self._state)
            for step in range(1, STEPS):
                self._run(program.backend.put_batch(_batch(self._case, step)))
            shown.after = our_step.samples(self._state.params)
        else:
            shown = FirstStep(self._products, _mean_loss(reported), self._losses_of_tokens())
        shown.save(path)
        return seconds

    def _losses_of_tokens(self) -> np.ndarray:
        """Returns the loss of single tokens, by the program that is timed."""
        batch = _batch(self._case)
        return np.array(
            [
                _mean_loss(self._run(self._program.backend.put_batch(batch | {"targets": single})))
                for single in single_targets(batch["targets"], none=-1)
            ]
        )

    def _run(self, batch: Any) -> Any:
        """Runs the program once, waits for it and returns what it reports."""
        output = self._compiled(self._state, batch)
        if self._is_training:
            self._state, output = output
        return jax.block_until_ready(output)

    def shares(self) -> dict[str, float]:
        """Returns the share of the time that each of `SCOPES`, and `other`, takes in one step.

        If no operation of the trace is one of the program's, `unmatched operations` take all.

        A trace of the step times operations; the compiled program knows each one's scope.
        """
        with tempfile.TemporaryDirectory() as directory:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(directory, profiler_options=options)
            self.step()
            jax.profiler.stop_trace()
            trace = read_trace(find_trace(Path(directory)))
        program = ProgramText(self._compiled.text())
        seconds: defaultdict[str, float] = defaultdict(float)
        for ran in trace.operations:
            part = program.find(ran.name).part.partition(" ")[0]
            if part != "unknown" and not program.is_container(ran.name):
                seconds[part if part in SCOPES else "other"] += ran.end - ran.start
        if not seconds:  # the trace names operations in another way
            return {"unmatched operations": 1.0}
        ranked = sorted(seconds.items(), key=lambda item: -item[1])
        return {scope: time / sum(seconds.values()) for scope, time in ranked}


class OurGenerator:
    """Greedy continuations of prompts that fill half of the context, to its end."""

    compile_seconds = 0.0  # its first step compiles

    def __init__(self, case: dict[str, Any]):
        # Imported here, since it brings the code that reads weights, which only this needs.
        from gpt2.generate import Sampling, generate

        model = GPT(make_config(case).gpt())
        params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
        prompts = _batch(case)["tokens"][:, : case["context_length"] // 2].tolist()
        self.step = partial(
            generate,
            params,
            model.config,
            prompts,
            max_new_tokens=case["context_length"] // 2,
            sampling=Sampling(temperature=0.0),
        )


class OurReader:
    """Training batches of a prepared synthetic corpus, shuffled, as the loop reads them."""

    compile_seconds = 0.0

    def __init__(self, case: dict[str, Any]):
        self._loader, self._count = _make_loader(case), itertools.count()

    def step(self) -> None:
        """Reads the next batch."""
        self._loader.batch(next(self._count))


def devices_of(case: dict[str, Any]) -> list[jax.Device]:
    """Returns the devices that a case runs on."""
    return jax.devices()[: None if case["subject"] == "train" else 1]


def peak(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the type of products, the FLOP/s that devices reach in it, and by what source.

    Of a GPU's or TPU's products of float32, the table of chips knows those of JAX's default
    precision alone.
    """
    used, subject = devices_of(case), case["subject"]
    compute, platform = make_config(case).precision.compute, platform_of(used[0])
    default = products_of(compute, "default", platform)
    chip = find_chip(used[0].device_kind)
    flops, source = None, chip.source if chip else "unknown"
    if products_of(compute, case["matmul_precision"], platform) != default:
        source = "unknown"
    elif chip and subject != "data":
        flops = len(used) * chip.peak_flops(compute)
    return {"compute": compute, "peak_flops": flops, "peak_source": source}


def _make_loader(case: dict[str, Any]) -> Any:
    # Only some cases need these. A machine that measures the model may lack their packages.
    from gpt2.data.dataset import prepare
    from gpt2.data.loader import TrainLoader

    # Its characters are few, so that every model's vocabulary has room for them.
    dataset = prepare(DataConfig(corpus="synthetic", tokenizer="char"), show_progress=False)
    shape = dict(batch_size=case["batch_size"], context_length=case["context_length"])
    masked = make_config(case).data.document_mask
    return TrainLoader(dataset, seed=0, document_mask=masked, **shape)


def _prefetch(case: dict[str, Any], backend: Backend) -> Iterator[Any]:
    """Returns an endless iterator over batches on the devices, read ahead as training does."""
    from gpt2.data.loader import Prefetcher

    read = partial(_make_loader(case).batch, rows=backend.local_rows(case["batch_size"]))
    prefetcher = Prefetcher(read, itertools.count(), backend.put_batch)
    atexit.register(prefetcher.close)
    return prefetcher


@exit_on_user_error
def main() -> None:
    """Serves steps of the case that the command line gives."""
    case = json.loads(sys.argv[1])
    config = make_config(case)
    used = devices_of(case)
    announce(platform_of(used[0]), used[0].device_kind, len(used))
    prepare_jax(case)
    found = peak(case)
    subjects: dict[str, type[Any]] = {"generate": OurGenerator, "data": OurReader}
    work = subjects.get(case["subject"], OurModel)(case)
    flops = model_flops_per_token(config.gpt())

    def info() -> dict[str, Any]:
        statistics = used[0].memory_stats() or {}  # None on a CPU
        on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            **found,
            "compile_seconds": work.compile_seconds,
            "flops_per_token": flops if case["subject"] == "train" else flops / 3,
            "peak_bytes": statistics.get("peak_bytes_in_use", on_host),
            "attention": resolve_attention(config, used[0]),
            "versions": {"jax": jax.__version__},
            "shares": work.shares() if case["shares"] else {},
        }

    serve(work.step, info, getattr(work, "show", None))


def _mean_loss(sums: dict[str, jax.Array]) -> float:
    return float(sums["loss"][0] / sums["loss"][1])


def _batch(case: dict[str, Any], step: int = 0) -> dict[str, np.ndarray]:
    tokens, targets = draw_batch(case, step)
    batch = {"tokens": tokens, "targets": targets}
    if make_config(case).data.document_mask:  # documents of 256 tokens in the mean, at random
        batch["segments"] = np.cumsum(tokens % 256 == 0, axis=1, dtype=np.int32)
    return batch


if __name__ == "__main__":
    main()
