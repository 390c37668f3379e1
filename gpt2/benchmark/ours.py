"""Our side of `gpt2.benchmark`: a training step, served in turns."""

import dataclasses
import json
import resource
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np

from gpt2.benchmark import first_steps
from gpt2.benchmark.measure import serve
from gpt2.benchmark.tables import Row
from gpt2.config import Config, GPTConfig
from gpt2.errors import exit_on_user_error
from gpt2.model import GPT
from gpt2.optim.parameters import map_parameters
from gpt2.parallel import find_devices
from gpt2.telemetry.chips import total_peak_flops
from gpt2.training.program import Program
from gpt2.utils.scan import in_layout


class Training:
    """A compiled training step and its state, over all devices."""

    def __init__(self, config: Config):
        self._config = config
        devices = find_devices(config)
        kind = devices[0].device_kind
        # Devices of a CPU are parts of it.
        number = 1 if kind == "cpu" else len(devices)
        self.device = f"{number} x {kind}"
        self._shape = config.shapes.largest
        self._program = Program.from_config(config, devices).at(self._shape)
        self._batch = self._program.backend.put_batch(make_batch(config))
        self._state = self._program.init_state()
        self._compiled = self._program.compile_train(self._state, self._batch)

    def info(self) -> Row:
        """Returns what there is to report beside times."""
        on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        statistics = jax.devices()[0].memory_stats() or {}  # None on a CPU
        return {
            "flops_per_token": self._program.flops_per_token(self._shape),
            "peak_flops": total_peak_flops(self._config.precision.compute),
            "attention": self._program.attention,
            "peak_memory_bytes": statistics.get("peak_bytes_in_use", on_host),
            "version": f"jax {jax.__version__}",
        }

    def step(self) -> None:
        """Takes a training step on the same batch, and waits for it."""
        self._run(self._batch)

    def first_losses(self) -> list[float]:
        """Returns the losses of steps from drawn weights, by the very program that is timed."""
        del self._state  # its memory goes to the drawn weights
        cfg = self._program.model.config
        self._state = self._program.init_state(draw_params(cfg))
        losses = []
        for step in range(first_steps.STEPS):
            drawn = make_batch(self._config, step)
            batch = self._program.backend.put_batch(drawn)
            loss = self._run(batch)
            losses.append(float(loss))
        return losses

    def _run(self, batch: chex.ArrayTree) -> jax.Array:
        self._state, metrics = self._compiled(self._state, batch)
        return jax.block_until_ready(metrics)["train/loss"]


def draw_params(cfg: GPTConfig) -> dict:
    """Returns the parameters that `draw_weight` draws, float32 in host memory."""
    model = GPT(dataclasses.replace(cfg, scan_layers=False))
    tokens = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    params = map_parameters(
        lambda path, leaf: first_steps.draw_weight("/".join(path), leaf.shape),
        shapes["params"],
    )
    return in_layout(params, scanned=cfg.scan_layers, stack=lambda *x: np.stack(x))


def make_batch(config: Config, step: int = 0) -> dict[str, np.ndarray]:
    """Returns the batch of a step, int32 in host memory."""
    tokens, targets = first_steps.draw_batch(config, step)
    batch = {"tokens": tokens, "targets": targets}
    if config.data.document_mask:  # documents of 256 tokens in the mean, at random
        begins = tokens % 256 == 0
        batch["segments"] = np.cumsum(begins, axis=1, dtype=np.int32)
    return batch


@exit_on_user_error()
def main() -> None:
    """Serves steps of the config that the command line gives."""
    config = Config.from_dict(json.loads(sys.argv[1]))
    serve(Training(config))


if __name__ == "__main__":
    main()
