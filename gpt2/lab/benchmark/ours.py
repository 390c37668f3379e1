"""Run this project's training step on request, so that `gpt2.lab.benchmark` can time it."""

import dataclasses
import json
import resource
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np

from gpt2.config import Config, GPTConfig
from gpt2.errors import exit_on_user_error
from gpt2.lab.benchmark import first_steps
from gpt2.lab.benchmark.measure import Side
from gpt2.lab.benchmark.tables import Row
from gpt2.model import GPT
from gpt2.parallel import find_devices
from gpt2.telemetry.chips import total_peak_flops
from gpt2.training.program import Program
from gpt2.utils.scan import in_layout


class Training(Side):
    """This project's training step, compiled for all devices, with its state."""

    def __init__(self, config: Config):
        self._config = config
        self._devices = find_devices(config)
        self._shape = config.shapes.largest
        self._program = Program.from_config(config, self._devices).at(self._shape)
        self._state = self._program.init_state()
        batch = self.draw_batch(0)
        self._compiled = self._program.compile_train(self._state, batch)

    def info(self) -> Row:
        """Return the device, the peak memory and other values for the row of results."""
        kind = self._devices[0].device_kind
        # JAX's CPU devices are parts of one CPU, so they count as one device.
        number = 1 if kind == "cpu" else len(self._devices)
        flops = self._program.flops_per_token(self._shape)
        peak = total_peak_flops(self._config.precision.compute)
        on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        # memory_stats() is None on CPUs.
        statistics = jax.devices()[0].memory_stats() or {}
        return {
            "device": f"{number} x {kind}",
            "peak_tokens_per_second": peak / flops if peak else None,
            "attention": self._program.attention,
            "peak_memory_bytes": statistics.get("peak_bytes_in_use", on_host),
            "version": f"jax {jax.__version__}",
        }

    def draw_batch(self, number: int) -> chex.ArrayTree:
        """Draw batch `number`, the same tokens as in PyTorch, and place it on the devices."""
        return self._program.backend.put_batch(make_batch(self._config, number))

    def draw_weights(self) -> None:
        """Reset the state: the weights of `draw_params`, and the optimizer's initial state."""
        del self._state  # frees the memory for the new weights
        cfg = self._program.model.config
        self._state = self._program.init_state(draw_params(cfg))

    def step(self, batch: chex.ArrayTree) -> float:
        """Take a training step, wait for it, and return the loss in nats per token."""
        self._state, metrics = self._compiled(self._state, batch)
        return float(jax.block_until_ready(metrics)["train/loss"])


def draw_params(cfg: GPTConfig) -> dict:
    """Return the model's parameters with the values of `first_steps.draw_weight`.

    The arrays are float32 and in host memory.
    """
    model = GPT(dataclasses.replace(cfg, scan_layers=False))
    tokens = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return first_steps.draw_weight(name, leaf.shape)

    params = jax.tree.map_with_path(draw, shapes["params"])
    return in_layout(params, scanned=cfg.scan_layers, stack=lambda *x: np.stack(x))


def make_batch(config: Config, step: int = 0) -> dict[str, np.ndarray]:
    """Return the batch of a step: int32 arrays `[B, T]` in host memory.

    The names are `tokens` and `targets` and, with `data.document_mask`, `segments`.
    """
    tokens, targets = first_steps.draw_batch(config, step)
    batch = {"tokens": tokens, "targets": targets}
    # Documents have random lengths, 256 tokens on average.
    if config.data.document_mask:
        begins = tokens % 256 == 0
        batch["segments"] = np.cumsum(begins, axis=1, dtype=np.int32)
    return batch


@exit_on_user_error()
def main() -> None:
    """Call the methods of `Training` that standard input requests.

    The argument on the command line is the config as JSON.
    """
    config = Config.from_dict(json.loads(sys.argv[1]))
    Training(config).serve()


if __name__ == "__main__":
    main()
