"""Speed figures are the published ones, each second is charged once, a recompilation is named."""

import itertools
import time
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.config import GPTConfig
from gpt2.model import GPT, num_params
from gpt2.telemetry import compile_watch, flops, throughput
from gpt2.telemetry.chips import BOARDS, board_name

# Throughput


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-355m", 354_823_168),
        ("gpt2-774m", 774_030_080),
        ("gpt2-1558m", 1_557_611_200),
    ],
)
def test_compute_parameters_are_all_but_positions(name, parameters):
    cfg = GPTConfig.from_name(name)
    positions = cfg.context_length * cfg.embed_dim
    assert flops.count_compute_parameters(cfg) == parameters - positions


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_embeddings": False},
        {"activation": "swiglu", "qk_norm": True},
        {"norm": "rmsnorm", "position": "rope"},
    ],
)
def test_compute_parameters_are_those_of_the_model(options, bias):
    size = dict(vocab_size=97, context_length=16, num_layers=3, num_heads=4, embed_dim=32)
    cfg = GPTConfig(**size, bias=bias, **options)
    tokens = jnp.zeros((1, 16), jnp.int32)
    params = jax.eval_shape(GPT(cfg).init, jax.random.key(0), tokens)["params"]
    looked_up = {"wpe"} if cfg.tie_embeddings else {"wpe", "wte"}
    computing = {name: tree for name, tree in params.items() if name not in looked_up}
    assert flops.count_compute_parameters(cfg) == num_params(computing)


def test_untied_head_costs_no_more_flops_than_a_tied_one():
    tied = GPTConfig.from_name("gpt2-124m")
    untied = GPTConfig.from_name("gpt2-124m", tie_embeddings=False)
    assert flops.model_flops_per_token(tied) == flops.model_flops_per_token(untied)


def test_flops_per_token_follow_the_published_formula():
    cfg = GPTConfig.from_name("gpt2-124m")
    expected = 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert flops.model_flops_per_token(cfg) == expected
    # 45 % of an H100 is 521,000 tokens/s.
    peak = throughput.peak_flops(device("NVIDIA H100 80GB HBM3"), jnp.bfloat16)
    assert 0.45 * peak / expected == pytest.approx(521_000, rel=2e-3)


def device(kind: str, platform: str = "gpu"):
    return types.SimpleNamespace(device_kind=kind, platform=platform)


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5, 494.5),
        ("NVIDIA H100 PCIe", 756.5, 378.0),
        ("NVIDIA H200", 989.5, 494.5),
        ("NVIDIA GH200 480GB", 989.5, 494.5),
        ("NVIDIA B200", 2250.0, 1125.0),
        ("NVIDIA A100-SXM4-40GB", 312.0, 156.0),
        ("NVIDIA A10G", 70.0, 35.0),
        ("NVIDIA L4", 121.0, 60.0),
        ("NVIDIA L40S", 362.0, 183.0),
        ("Tesla T4", 8.1, 8.1),
        ("Tesla V100-SXM2-16GB", 15.7, 15.7),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("TPU v2", 23.0, 23.0),
        ("TPU v4", 275.0, 275.0),
        ("TPU v5 lite", 197.0, 197.0),
        ("TPU v5", 459.0, 459.0),
        ("TPU v5p", 459.0, 459.0),
        ("TPU v6 lite", 918.0, 918.0),
        ("TPU7x", 1153.5, 1153.5),
    ],
)
def test_peak_follows_the_device_kind(kind, bfloat16, float32):
    assert throughput.peak_flops(device(kind), "bfloat16") == 1e12 * bfloat16
    assert throughput.peak_flops(device(kind), "float32") == 1e12 * float32
    assert throughput.peak_source(device(kind)) not in ("unknown", "measured")


@pytest.mark.parametrize(
    "kind", ["NVIDIA RTX A1000", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 MIG 1g.10gb"]
)
def test_peak_of_a_lesser_namesake_is_unknown(kind):
    assert throughput.peak_flops(device(kind), "bfloat16") is None
    assert throughput.peak_source(device(kind)) == "unknown"


def test_a_board_is_found_by_what_the_driver_calls_it():
    assert board_name("NVIDIA A100-SXM4-40GB") == board_name("NVIDIA A100-PCIE-40GB") == "A100 40GB"
    assert board_name("NVIDIA A100-SXM4-80GB") == board_name("NVIDIA A100 80GB PCIe") == "A100"
    assert (BOARDS["A100 40GB"].memory, BOARDS["A100"].memory) == (40, 80)
    for name in BOARDS:
        assert board_name(name) == name


def test_cpu_peak_is_measured_once_and_shared_among_devices():
    cpus = jax.devices("cpu")
    began = time.perf_counter()
    first = throughput.peak_flops(cpus[0], "float32")
    assert time.perf_counter() - began < 10
    assert first == throughput.peak_flops(cpus[-1], "float32")
    assert 1e9 < first * len(cpus) < 1e14
    assert throughput.peak_source(cpus[0]) == "measured"


def test_cpu_peak_of_a_slow_machine_is_measured_within_a_second(monkeypatch):
    times = itertools.count(step=0.4)  # a product takes as long
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(times))
    flops = throughput._measure_cpu_flops.__wrapped__("float32")
    assert flops == pytest.approx(2 * 2048 * 768 * 3072 / 0.4)
    assert next(times) == pytest.approx(6 * 0.4)  # three products, two looks each


class Seconds:
    """A clock that moves when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_step_clock_leaves_validation_out_and_charges_each_second_once():
    seconds = Seconds()
    clock = throughput.StepClock(
        1000, flops_per_token=6.0, seconds_before=70.0, start_seconds=30.0, now=seconds
    )
    clock.peak_flops = 24_000.0
    seconds.now += 1
    with clock.phase("compile"):
        seconds.now += 3
    with clock.phase("step"):
        for _ in range(2):
            with clock.phase("data wait"):
                seconds.now += 0.5
            seconds.now += 1.5
            clock.count_step()
        with clock.phase("validation"):
            seconds.now += 10
            with clock.phase("checkpoint"):
                seconds.now += 2
        assert clock.read() == pytest.approx(
            {
                "perf/step_seconds": 2.0,
                "perf/tokens_per_second": 500.0,
                "perf/data_wait_seconds": 0.5,
                "perf/total_seconds": 120.0,
                "perf/mfu": 500.0 * 6 / 24_000,
            }
        )
        assert clock.read() == {}
        seconds.now += 4
        clock.count_step()
        assert clock.read()["perf/step_seconds"] == pytest.approx(4.0)
    total = 54.0  # of this start
    assert clock.total_seconds == pytest.approx(70.0 + total)
    assert clock.shares() == pytest.approx(
        {
            "validation": 10 / total,
            "step": 7 / total,
            "compile": 3 / total,
            "checkpoint": 2 / total,
            "data wait": 1 / total,
            "start and end": 31 / total,
        }
    )


def test_unknown_peak_leaves_mfu_out():
    seconds = Seconds()
    clock = throughput.StepClock(1000, flops_per_token=6.0, now=seconds)
    with clock.phase("step"):
        seconds.now += 1
        clock.count_step()
    assert "perf/mfu" not in clock.read()


# Compilation


def state_and_batch(batch_size: int = 8):
    state = {"params": {"kernel": jnp.ones((4, 16))}}
    return state, {"tokens": jnp.ones((batch_size, 4), jnp.int32)}


def train_step(state, batch):
    kernel = state["params"]["kernel"]
    return {"params": {"kernel": kernel + 1}}, (batch["tokens"].astype(jnp.float32) @ kernel).sum()


def test_compiled_step_gives_what_jit_gives_and_accounts_for_itself():
    step = compile_watch.compile_once(jax.jit(train_step), *state_and_batch())
    chex.assert_trees_all_close(
        step(*state_and_batch()), jax.jit(train_step)(*state_and_batch()), rtol=1e-6
    )
    assert step.name == "train_step"
    assert step.compile_seconds > 0
    assert step.flops >= 2 * 8 * 4 * 16
    assert step.memory.arguments == 4 * (4 * 16 + 8 * 4)
    assert step.memory.peak >= step.memory.arguments + step.memory.outputs
    assert "HloModule" in step.text()


def test_donation_lowers_the_peak():
    x = jnp.ones(1024)
    kept = compile_watch.compile_once(jax.jit(jnp.sin), x)
    donated = compile_watch.compile_once(jax.jit(jnp.sin, donate_argnums=0), x)
    assert kept.memory.peak - donated.memory.peak == donated.memory.aliased == 4096


def test_steps_compile_for_shapes_alone():
    shapes = jax.eval_shape(state_and_batch)
    step = compile_watch.compile_once(jax.jit(train_step), *shapes)
    _, total = step(*state_and_batch())
    assert total == 8 * 4 * 16


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda state, batch: (state, {"tokens": batch["tokens"][:4]}),
            r"argument 1\['tokens'\]: compiled for int32\[8,4\], called with int32\[4,4\]",
        ),
        (
            lambda state, batch: (jax.tree.map(lambda x: x.astype(jnp.bfloat16), state), batch),
            r"argument 0\['params'\]\['kernel'\]: compiled for float32\[4,16\], "
            r"called with bfloat16\[4,16\]",
        ),
        (
            lambda state, batch: (state, batch | {"segments": batch["tokens"]}),
            r"argument 1\['segments'\]: new, int32\[8,4\]",
        ),
        (lambda state, batch: (state, {}), r"argument 1\['tokens'\]: missing"),
        (
            lambda state, batch: (state, jax.tree.map(split_over_two_devices, batch)),
            r"argument 1\['tokens'\]: compiled for .*, called with NamedSharding",
        ),
    ],
)
def test_recompilation_names_the_leaf_that_changed(change, named):
    state, batch = jax.device_put(state_and_batch(), jax.devices()[0])
    step = compile_watch.compile_once(jax.jit(train_step, donate_argnums=0), state, batch)
    with pytest.raises(compile_watch.RecompileError, match=named) as caught:
        step(*change(state, batch))
    assert str(caught.value).startswith("train_step would be compiled again:")
    assert len(str(caught.value).splitlines()) == 2
    step(state, batch)  # the refused call took no donation


def test_recompilation_names_a_few_leaves_of_many():
    leaves = [jnp.ones(2)] * 20
    step = compile_watch.compile_once(jax.jit(sum), leaves)
    with pytest.raises(compile_watch.RecompileError, match=r"and 12 more$") as caught:
        step([jnp.ones(3)] * 20)
    assert len(str(caught.value).splitlines()) == 10


def split_over_two_devices(x: jax.Array) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))


def test_pmap_steps_are_guarded_too():
    def pmapped_step(state, tokens):
        return state + jax.lax.psum(tokens.sum(), "data")

    mapped = jax.pmap(pmapped_step, "data", in_axes=(None, 0), out_axes=None)
    tokens = jnp.ones((jax.device_count(), 4))
    step = compile_watch.compile_once(mapped, jnp.zeros(()), tokens)
    assert step(jnp.zeros(()), tokens) == 4 * jax.device_count()
    with pytest.raises(compile_watch.RecompileError, match=r"argument 1: compiled for float32"):
        step(jnp.zeros(()), tokens[:, :2])
