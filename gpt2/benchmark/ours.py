"""Our side of `gpt2.benchmark`: a training step, served in turns."""

import dataclasses
import json
import resource
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from gpt2.benchmark import first_steps
from gpt2.benchmark.measure import serve
from gpt2.config import Config, GPTConfig
from gpt2.errors import exit_on_user_error
from gpt2.model import GPT
from gpt2.model.flops import model_flops_per_token
from gpt2.parallel import find_devices
from gpt2.telemetry.chips import find_chip
from gpt2.training.program import Program
from gpt2.utils.platform import platform_of
from gpt2.utils.scan import in_layout


class Training:
    """A compiled training step and its state, over all devices."""

    def __init__(self, config: Config):
        self._config = config
        self.devices = find_devices(config)
        self._program = program = Program.from_config(config, self.devices)
        self._batch = program.backend.put_batch(_batch(config))
        self._state: Any = program.init_state()
        self._compiled = program.compile_train(self._state, self._batch)
        compute = config.precision.compute
        device = self.devices[0]
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        chip = find_chip(device.device_kind)
        self._products = first_steps.products_of(
            compute, precision, platform_of(device)
        )
        self.info = {
            "compile_seconds": self._compiled.compile_seconds,
            "flops_per_token": model_flops_per_token(config.gpt()),
            # The sheet has no peak of float32 that is multiplied at another precision.
            "peak_flops": chip
            and not precision
            and chip.peak_flops(compute) * len(self.devices),
            "attention": program.attention,
        }

    def step(self) -> None:
        """Takes a training step on the same batch, and waits for it."""
        self._run(self._batch)

    def first_steps(self) -> first_steps.FirstSteps:
        """Returns what steps from drawn weights compute, by the very program that is timed."""
        # its memory goes to the drawn weights
        program = self._program
        self._state = None
        self._state = program.init_state(draw_params(program.model.config))
        batches = (_batch(self._config, step) for step in range(first_steps.STEPS))
        losses = [
            float(self._run(program.backend.put_batch(batch))) for batch in batches
        ]
        return first_steps.FirstSteps(self._products, losses)

    def _run(self, batch: Any) -> jax.Array:
        self._state, metrics = self._compiled(self._state, batch)
        return jax.block_until_ready(metrics)["train/loss"]


def draw_params(cfg: GPTConfig) -> Any:
    """Returns the parameters that `draw_weight` draws, float32 in host memory."""
    model = GPT(dataclasses.replace(cfg, scan_layers=False))
    draw = first_steps.draw_weight
    shapes = jax.eval_shape(
        model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
    )["params"]
    named = flatten_dict(shapes, sep="/")
    drawn = unflatten_dict(
        {name: draw(name, leaf.shape) for name, leaf in named.items()}, sep="/"
    )
    return in_layout(
        drawn, scanned=cfg.scan_layers, stack=lambda *leaves: np.stack(leaves)
    )


def _batch(config: Config, step: int = 0) -> dict[str, np.ndarray]:
    tokens, targets = first_steps.draw_batch(config, step)
    batch = {"tokens": tokens, "targets": targets}
    if config.data.document_mask:  # documents of 256 tokens in the mean, at random
        batch["segments"] = np.cumsum(tokens % 256 == 0, axis=1, dtype=np.int32)
    return batch


@exit_on_user_error()
def main() -> None:
    """Serves steps of the config that the command line gives."""
    work = Training(Config.from_dict(json.loads(sys.argv[1])))

    def info() -> dict[str, Any]:
        on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        statistics = work.devices[0].memory_stats() or {}  # None on a CPU
        memory = {"peak_bytes": statistics.get("peak_bytes_in_use", on_host)}
        return work.info | memory | {"version": f"jax {jax.__version__}"}

    kind = work.devices[0].device_kind
    serve(
        f"{1 if kind == 'cpu' else len(work.devices)} x {kind}", work, info
    )  # parts of one CPU


if __name__ == "__main__":
    main()
