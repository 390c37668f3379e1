"""A library's kernel for attention is checked on each device before a run relies on it."""

import threading
from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import pytest

from gpt2.config import GPTConfig, load_config
from gpt2.errors import UserError
from gpt2.parallel import kernel_check
from gpt2.parallel.kernel_check import check_attention
from gpt2.parallel.kernels import get_attention
from tests.helpers import TINY, params_of, patched, succeed, thorough
from tests.parallel.pair import Pair

BLOCKED = get_attention("blocked", "cpu")
SMALL = {"num_layers": 2, "num_heads": 4, "embed_dim": 32, "context_length": 256}
WINDOWS = {"window": 64, "window_pattern": "SL"}


@pytest.fixture
def check(monkeypatch):
    """Return a function that checks a kernel on this machine's CPUs, and returns what it finds."""

    def check(kernel=None, is_masked=False, **options):
        cfg = GPTConfig(**SMALL | options)
        monkeypatch.setattr(kernel_check, "LIBRARY_KERNELS", ["blocked"])
        monkeypatch.setattr(jax, "pmap", partial(jax.pmap, axis_name="devices"))
        if kernel:
            monkeypatch.setattr(kernel_check, "get_attention", lambda *_: kernel)
        kernel_check._find_fault.cache_clear()
        checked, fault = check_attention(cfg, jax.devices()[0], {}, is_masked=is_masked)
        assert checked.attention == ("plain" if fault else "auto")
        return fault

    yield check
    kernel_check._find_fault.cache_clear()


@pytest.mark.parametrize(
    ("is_masked", "options"),
    [
        (False, {}),
        (True, {"compute_dtype": "bfloat16", "num_kv_heads": 2, **WINDOWS}),
        (True, {"compute_dtype": "bfloat16", "position": "alibi"}),
        thorough(False, {"compute_dtype": "float16", "attention_softcap": 5.0}),
    ],
)
def test_a_right_kernel_is_used(check, is_masked, options):
    assert check(is_masked=is_masked, **options) == ""


def fails_when_called(q, k, v, scoring):
    raise RuntimeError("cuDNN is too old\nand more lines")


def with_backward(forward, backward):
    """Return a function of an array with a backward pass of its own."""
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (forward(x), None), lambda _, dx: (backward(dx),))
    return function


def run_on_host(function, x):
    """Call a function of the host when the program runs."""
    call = partial(jax.pure_callback, function, x)
    return with_backward(call, call)(x)


def fails_when_run(q, k, v, scoring):
    def fail(q):
        raise OSError("no such device")

    return run_on_host(fail, q)


def wrong_backward(q, k, v, scoring):
    doubled = with_backward(lambda x: x, lambda dx: 2 * dx)
    return BLOCKED(q, doubled(k), v, scoring)


def window_too_long(q, k, v, scoring):
    window = scoring.window + 1 if scoring.window else 0
    return BLOCKED(q, k, v, scoring._replace(window=window))


def without_segments(q, k, v, scoring):
    return BLOCKED(q, k, v, scoring._replace(segments=None))


def not_a_number(q, k, v, scoring):
    return BLOCKED(q, k, v, scoring).at[0, 9, 1, 3].set(jnp.nan)


def wrong_on_one_device(q, k, v, scoring):
    is_last = jax.lax.axis_index("devices") == jax.device_count() - 1
    return BLOCKED(q, k, v, scoring) * jnp.where(is_last, 1.5, 1.0)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (fails_when_called, "(cuDNN is too old)"),
        (fails_when_run, "(INTERNAL: CpuCallback error"),
        (wrong_backward, "(its results are wrong by 100%)"),
        (window_too_long, "(its results are wrong by "),
        (without_segments, "(its results are wrong by "),
        (not_a_number, "(its results are wrong by nan%)"),
        (wrong_on_one_device, "(its results are wrong by 50%)"),
    ],
)
def test_a_kernel_that_fails_or_is_wrong_is_left_out(check, kernel, message):
    fault = check(kernel, is_masked=True, **WINDOWS)
    assert fault.startswith("blocked failed on this machine (")
    assert message in fault


@pytest.mark.parametrize("when", ["compiled", "run"])
def test_a_kernel_that_hangs_is_left_out_and_does_not_run_later(
    check, monkeypatch, when
):
    ends = threading.Event()
    runs = []

    def wait(x):
        runs.append(x.shape)
        ends.wait()
        return x

    def hangs(q, k, v, scoring):
        if when == "compiled":
            ends.wait()
        return run_on_host(wait, q)

    monkeypatch.setattr(kernel_check, "SECONDS", 2.0)
    assert check(hangs) == "blocked failed on this machine (no result after 2 s)"
    (thread,) = [t for t in threading.enumerate() if t.name == "kernel check"]
    ends.set()
    thread.join()
    assert bool(runs) == (when == "run")


def test_a_bias_that_is_wrong_is_found(check, monkeypatch):
    monkeypatch.setattr("gpt2.ops.linear_bias._LOW", 2048)  # positions are rounded
    options = {"compute_dtype": "bfloat16", "position": "alibi", "context_length": 512}
    assert "its results are wrong by " in check(**options)


def test_a_kernel_that_was_asked_for_is_not_replaced(check):
    with pytest.raises(UserError, match=r"model\.attention=blocked failed .*too old"):
        check(fails_when_called, attention="blocked")


def test_nothing_is_checked_without_a_kernel_of_a_library(monkeypatch):
    monkeypatch.setattr(kernel_check, "_find_fault", lambda *_: "checked")
    on_cpu = GPTConfig(**SMALL)
    assert check_attention(on_cpu, jax.devices()[0], {}, is_masked=False)[1] == ""
    # A TPU that a plan compiles for, and that no process has.
    tpu = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    assert check_attention(on_cpu, tpu, {}, is_masked=False) == (on_cpu, "")
    monkeypatch.setattr(jax, "devices", lambda: [tpu])
    assert "(checked)" in check_attention(on_cpu, tpu, {}, is_masked=False)[1]


FAILING_RUN = """
import os
from gpt2.parallel import kernel_check

def attention(q, k, v, scoring):
    if os.environ.get("FAILS", "1") == "1":
        raise RuntimeError("cuDNN is too old")
    return kernel_check.plain.attention(q, k, v, scoring)

kernel_check.LIBRARY_KERNELS = ["blocked"]
kernel_check.get_attention = lambda *_: attention
"""
LONG = [*TINY, "--config.model.context_length=144", "--config.data.corpus=synthetic"]


@pytest.mark.thorough
def test_a_run_goes_on_by_the_formula_and_says_why(tmp_path):
    script = patched(tmp_path, FAILING_RUN)
    stdout = succeed(tmp_path / "run", *LONG, script=script)
    why = "blocked failed on this machine (cuDNN is too old)"
    assert f"attention by the reference implementation: {why}\n" in stdout
    succeed(tmp_path / "plain", *LONG, "--config.model.attention=plain")
    params = params_of(tmp_path / "run")
    chex.assert_trees_all_equal(params, params_of(tmp_path / "plain"))
    # On another machine the run continues with the kernel.
    assert load_config(tmp_path / "run").model.attention == "auto"


@pytest.mark.thorough
def test_processes_leave_out_a_kernel_that_fails_in_one_of_them(tmp_path):
    script = patched(tmp_path, FAILING_RUN)
    flags = [*LONG, "--config.train.num_steps=3", "--config.data.batch_size=8"]
    with Pair(tmp_path / "run", *flags, variables="FAILS={0}", script=script) as pair:
        assert pair.ends() == [0, 0], pair.output()
        assert "(cuDNN is too old)" in pair.output()
