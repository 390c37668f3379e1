"""How fast a run is: the chip's peak, tokens per second, MFU, and where time goes."""

import contextlib
import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from gpt2.config import GPTConfig
from gpt2.telemetry.chips import find_chip
from gpt2.utils.remat import CORE_ATTENTION, is_kept


def recomputed_flops_per_token(cfg: GPTConfig) -> float:
    """Returns the FLOPs of the products that `memory.remat` computes twice for one token.

    They come on top of `model_flops_per_token`. The scores of fused attention, which its backward
    rule computes again in any case, are not among them.
    """
    width, hidden = cfg.embed_dim, cfg.hidden_dim
    reads_sum = cfg.norm_position != "pre"  # a norm reads what a branch adds, or the sum
    flops = {
        "attn/c_attn": 2 * width * (width + 2 * cfg.kv_heads * cfg.head_size),
        "attn/c_proj": 2 * width * width if reads_sum or not cfg.parallel_block else 0,
        "mlp/c_fc": 2 * width * hidden * (2 if cfg.is_gated else 1),
        "mlp/c_proj": 2 * width * hidden if reads_sum else 0,
    }
    again = cfg.num_layers * sum(n for name, n in flops.items() if not is_kept(cfg.remat, name))
    if not is_kept(cfg.remat, CORE_ATTENTION):
        again += 4 * width * sum(window or cfg.context_length for window in cfg.windows)
    return float(again)


def peak_flops(device: jax.Device, dtype: jnp.dtype | str) -> float | None:
    """Returns the most FLOP/s that `device` spends on a matrix product of `dtype` operands.

    On a CPU the first call measures it, by up to 30 products in about a second. The simulated
    devices of the process share the result, so that a sum over devices is the machine's.

    Returns:
        FLOP/s, or None for a device that the table does not know.
    """
    if device.platform == "cpu":
        return _measure_cpu_flops(jnp.dtype(dtype).name) / len(jax.local_devices(backend="cpu"))
    chip = find_chip(device.device_kind)
    if chip is None:
        return None
    return chip.peak_flops(jnp.dtype(dtype).name)


def peak_bandwidth(device: jax.Device) -> float | None:
    """Returns the most bytes per second that `device` reads and writes in its memory.

    On a CPU the first call measures it, in about half a second, as for `peak_flops`.

    Returns:
        Bytes per second, or None for a device that the table does not know.
    """
    if device.platform == "cpu":
        return _measure_cpu_bandwidth() / len(jax.local_devices(backend="cpu"))
    chip = find_chip(device.device_kind)
    return 1e9 * chip.bandwidth if chip else None


def total_peak_flops(dtype: jnp.dtype | str) -> float | None:
    """Returns `peak_flops` of all devices together, or None if one of them is not known."""
    peaks = [peak_flops(device, dtype) for device in jax.devices()]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(peaks) else None


def forget_measured_peak() -> None:
    """Lets the next call of `peak_flops` measure a CPU again, whose speed may have changed."""
    _measure_cpu_flops.cache_clear()


def peak_source(device: jax.Device) -> str:
    """Says where the figure of `peak_flops` comes from: `measured`, a data sheet, or `unknown`."""
    if device.platform == "cpu":
        return "measured"
    chip = find_chip(device.device_kind)
    return chip.source if chip else "unknown"


@functools.cache
def _measure_cpu_flops(dtype: str) -> float:
    """Times a product of GPT-2's shapes, [2048, 768] x [768, 3072], and returns FLOP/s."""
    m, k, n = 2048, 768, 3072
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        a = jnp.full((m, k), 0.5, dtype)
        b = jnp.full((k, n), 0.5, dtype)
        # Accumulation in float32, as everywhere in the model.
        product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.float32))
        product(a, b).block_until_ready()
        return 2 * m * k * n / _shortest_seconds(lambda: product(a, b), tries=30, limit=1.0)


@functools.cache
def _measure_cpu_bandwidth() -> float:
    """Times a sum that reads 128 MB and writes as many, and returns bytes per second."""
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        # In place, since memory that is new to the process is cleared first.
        add = jax.jit(lambda x: x + 1.0, donate_argnums=0)
        x = [add(jnp.zeros((2**15, 1024), jnp.float32)).block_until_ready()]

        def run() -> jax.Array:
            x.append(add(x.pop()))
            return x[0]

        return 2 * x[0].nbytes / _shortest_seconds(run, tries=10, limit=0.5)


def _shortest_seconds(run: Callable[[], jax.Array], *, tries: int, limit: float) -> float:
    """Returns the time of the least disturbed of up to `tries` runs, in about `limit` seconds."""
    seconds: list[float] = []
    while len(seconds) < tries and sum(seconds) < limit:
        began = time.perf_counter()
        run().block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


class StepClock:
    """Measures steps, and the share of a run's time that each phase takes.

    Time is always charged to exactly one phase: the innermost open one, or `start and end`
    outside all.
    The training loop runs inside `phase("step")`, with the rest nested in it:

        with clock.phase("compile"): ...
        with clock.phase("step"):
            for step in ...:
                with clock.phase("data wait"): ...
                clock.count_step()
                with clock.phase("validation"): ...

    Devices run behind the host, so work that still runs when a phase opens is charged to that
    phase. Wait for the last step's result before opening `validation` or `checkpoint`.

    Args:
        tokens_per_step: tokens in a global batch.
        flops_per_token: from `model_flops_per_token`.
        seconds_before: what earlier starts of the run have taken.
        start_seconds: what this start has taken before the clock was made, such as imports and
            data: `start and end`.
        now: the clock, in seconds.

    Attributes:
        tokens_per_step: as given.
        peak_flops: FLOP/s of all the devices together; None: unknown, and MFU is left out.
        num_steps: steps counted.
        newest_seconds: what each of the newest steps took, oldest first; the wait for data counts.
    """

    def __init__(
        self,
        tokens_per_step: int,
        flops_per_token: float,
        seconds_before: float = 0.0,
        start_seconds: float = 0.0,
        now: Callable[[], float] = time.perf_counter,
    ):
        self.peak_flops: float | None = None
        self.tokens_per_step, self._flops = tokens_per_step, flops_per_token
        self._now, self._seconds_before = now, seconds_before
        self._phase, self._since = "start and end", now()
        self._seconds = defaultdict(float, {self._phase: start_seconds})
        self._window = (0.0, 0.0)  # seconds of step and of data wait when the window began
        self._steps = 0  # in the window
        self._counted = 0.0  # seconds of step and of data wait before the newest step
        self.num_steps = 0
        self.newest_seconds: deque[float] = deque(maxlen=100)

    @property
    def total_seconds(self) -> float:
        """What the run has taken, `seconds_before` included."""
        self._switch(self._phase)
        return self._seconds_before + sum(self._seconds.values())

    @property
    def current(self) -> str:
        """The phase under way."""
        return self._phase

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charges the time within to `name`, which a profiler's trace shows too."""
        outer = self._phase
        self._switch(name)
        try:
            with jax.profiler.TraceAnnotation(name):
                yield
        finally:
            self._switch(outer)

    def count_step(self) -> None:
        """Counts one optimizer step."""
        self._switch(self._phase)
        seconds = self._seconds["step"] + self._seconds["data wait"]
        self.newest_seconds.append(seconds - self._counted)
        self._counted = seconds
        self._steps += 1
        self.num_steps += 1

    def read(self) -> dict[str, float]:
        """Returns the mean speed since the last call, and begins a new window.

        Validation, checkpoints and compilation are left out.

        Returns:
            `perf/step_seconds`, `perf/tokens_per_second` (all devices together),
            `perf/data_wait_seconds` (per step), `perf/total_seconds` and, if the peak is known,
            `perf/mfu`; nothing if no step was counted.
        """
        self._switch(self._phase)
        began, self._window = self._window, (self._seconds["step"], self._seconds["data wait"])
        steps, self._steps = self._steps, 0
        wait = self._window[1] - began[1]
        total = self._window[0] - began[0] + wait
        if not steps or total <= 0:
            return {}
        tokens_per_second = self.tokens_per_step * steps / total
        metrics = {
            "perf/step_seconds": total / steps,
            "perf/tokens_per_second": tokens_per_second,
            "perf/data_wait_seconds": wait / steps,
            "perf/total_seconds": self.total_seconds,
        }
        if self.peak_flops:
            metrics["perf/mfu"] = tokens_per_second * self._flops / self.peak_flops
        return metrics

    def shares(self) -> dict[str, float]:
        """Returns each phase's share of the wall time of this start; they add to 1."""
        self._switch(self._phase)
        total = sum(self._seconds.values())
        ranked = sorted(self._seconds.items(), key=lambda item: -item[1])
        return {name: seconds / total for name, seconds in ranked if seconds > 0}

    def _switch(self, name: str) -> None:
        now = self._now()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = name, now
