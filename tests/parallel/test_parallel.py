"""The mesh, the rules, what a state takes of each device, and FSDP by layer."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs import gpt2_1558m, quickstart
from gpt2.config import Config, GPTConfig, ParallelConfig, RulesConfig, with_options
from gpt2.errors import UserError
from gpt2.lab.plan.plan import state_bytes
from gpt2.model import GPT
from gpt2.ops.fsdp import Shards, torus_sides
from gpt2.parallel import make_backend
from gpt2.parallel.mesh import (
    check_layout,
    local_rows,
    make_mesh,
    mesh_sizes,
)
from gpt2.parallel.rules import BATCH_AXES
from gpt2.parallel.state_sharding import with_shardings
from gpt2.training.losses import next_token_loss
from gpt2.training.program import choose_gather
from gpt2.training.state import TrainState
from gpt2.training.steps import make_train_step, make_update
from tests.helpers import thorough

SMALL = GPTConfig(
    vocab_size=300, context_length=32, num_layers=2, num_heads=4, embed_dim=64
)
MIXED = ParallelConfig(data=2, fsdp=2, tensor=2)
# Optimizers may hold their state at any depth.
ADAMW = optax.partition(
    {"all": optax.adamw(1e-3)}, lambda params: jax.tree.map(lambda _: "all", params)
)


def state_of(parallel, cfg=SMALL):
    """Return a backend, and the shapes and shardings of a state."""
    model = GPT(cfg)
    backend = make_backend(parallel, model.logical_axes())

    def init_fn(key):
        tokens = jnp.zeros((1, 1), jnp.int32)
        params = model.init(key, tokens)["params"]
        return TrainState.create(params, ADAMW, "float32")

    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    return backend, with_shardings(shapes, backend.state_shardings(shapes))


def sizes_of(**options):
    sizes = mesh_sizes(ParallelConfig(**options), 8)
    return tuple(sizes.values())


def test_a_strategy_uses_all_devices_for_its_axis_unless_options_say_otherwise():
    assert sizes_of(data=2, fsdp=-1) == (2, 4, 1)
    assert sizes_of(strategy="ddp") == (8, 1, 1)
    assert sizes_of(strategy="zero1", fsdp=4) == (2, 4, 1)
    assert sizes_of(strategy="megatron", tensor=2, fsdp=2) == (2, 2, 2)


def test_an_array_that_does_not_split_is_named():
    rules = RulesConfig(experts="tensor")
    parallel = ParallelConfig(data=4, tensor=2, rules=rules)
    with pytest.raises(UserError, match=r"tensor=2 cannot split .*experts/c_fc/bias"):
        state_of(parallel, cfg=dataclasses.replace(SMALL, num_experts=3))


def shard_shape(array):
    return array.sharding.shard_shape(array.shape)


def test_a_mesh_axis_splits_the_first_axis_that_asks_for_it():
    rules = RulesConfig(experts="tensor", vocab="fsdp")
    parallel = dataclasses.replace(MIXED, rules=rules)
    cfg = dataclasses.replace(SMALL, num_experts=2)
    _, state = state_of(parallel, cfg=cfg)
    kernel = state.params["h_0"]["mlp"]["experts"]["c_fc"]["kernel"]
    assert kernel.shape == (2, 64, 256)
    assert shard_shape(kernel) == (1, 32, 256)
    assert shard_shape(state.params["wte"]["embedding"]) == (150, 32)


def test_a_validation_splits_too_whatever_batches_a_schedule_has():
    config = Config.from_dict(quickstart.get_config())
    options = {"data.batch_size": 5, "train.batch_schedule": "0=16"}
    with pytest.raises(UserError, match="A batch of 5 sequences is not divisible"):
        check_layout(with_options(config, options), 2)


def rows_of(parallel):
    sharding = NamedSharding(make_mesh(parallel), PartitionSpec(BATCH_AXES))
    return local_rows(sharding, 16)


def test_rows_of_a_process_follow_one_another_or_are_refused(monkeypatch):
    assert rows_of(MIXED) == slice(0, 16)
    method = "addressable_devices_indices_map"
    indices_of = getattr(NamedSharding, method)

    def every_second(sharding, shape):
        indices = indices_of(sharding, shape)
        return dict(list(indices.items())[::2])

    monkeypatch.setattr(NamedSharding, method, every_second)
    assert rows_of(MIXED) == slice(0, 16)  # all but `tensor`
    with pytest.raises(UserError, match="not contiguous"):
        rows_of(ParallelConfig(data=8))


def test_a_parameter_that_no_rule_names_is_an_error():
    axes = GPT(SMALL).logical_axes()
    attention = axes["h_0"]["attn"]["c_attn"]
    attention["kernel"] = PartitionSpec("embed", "qkv", "hats", "head_size")
    with pytest.raises(UserError, match="hats"):
        make_backend(MIXED, axes)


def check_split(params, moments, **options):
    """Check into how many parts parameters, and moments of Adam, are split."""
    backend, state = state_of(ParallelConfig(**options))
    sizes = [leaf.size for leaf in jax.tree.leaves(state.params)]
    whole = 4 * sum(sizes)
    size = state_bytes(backend, state)
    # Biases are whole everywhere: 0.8 % of this model.
    assert size["parameters"] == pytest.approx(whole / params, rel=0.06)
    assert size["optimizer"] == pytest.approx(2 * whole / moments, rel=0.06)
    assert size["gradients"] == whole  # gathered by step


def test_a_strategy_says_what_is_split():
    check_split(1, 1, strategy="ddp")
    check_split(1, 4, strategy="zero1", data=2, fsdp=4)
    check_split(8, 8, strategy="zero3")
    check_split(2, 2, strategy="zero3", data=4)


def test_layers_do_not_gather_what_rules_split_elsewhere():
    parallel = ParallelConfig(data=2, fsdp=4, fsdp_gather="layer")
    elsewhere = RulesConfig(
        embed="none", norm="none", table="none", mlp="fsdp", heads="fsdp"
    )

    def gather_by(**change):
        backend, _ = state_of(dataclasses.replace(parallel, **change))
        return backend.gather_by

    assert gather_by() == "layer"
    assert gather_by(rules=elsewhere) == "step"
    assert gather_by(data=1, tensor=2) == "step"


def test_a_group_that_fills_a_torus_in_order_has_its_sides():
    chips = []
    for x, y in np.ndindex(2, 4):
        chips.append(SimpleNamespace(coords=(x, y, 0)))
    chips = np.array(chips)
    assert torus_sides(chips) == (2, 4)
    assert torus_sides(chips[::-1]) == (8,)  # another order
    assert torus_sides(chips[:7]) == (7,)  # not filled
    assert torus_sides(np.array(jax.devices())) == (8,)


@pytest.mark.parametrize("stages", [(8,), (2, 4), (2, 2, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_shards_are_gathered_and_summed_in_any_number_of_stages(stages, axis):
    shards = Shards(axis, stages)
    mesh = make_mesh(ParallelConfig(data=1, fsdp=8))
    whole = jax.random.normal(jax.random.key(0), (16, 24))
    names = [None, None]
    names[axis] = "fsdp"
    split = PartitionSpec(*names)

    def on_device(shard):
        number = jax.lax.axis_index("fsdp") + 1.0
        gathered = shards.gather(shard)
        return gathered, shards.scatter(number * gathered)

    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=split,
        out_specs=(PartitionSpec(), split),
        check_vma=False,
    )
    gathered, summed = jax.jit(mapped)(whole)
    np.testing.assert_array_equal(gathered, whole)
    np.testing.assert_allclose(summed, 36.0 * whole, rtol=1e-5)  # 1 + 2 + ... + 8


def test_parameters_are_gathered_by_layer_where_that_fits_or_costs_nothing():
    mesh = {"parallel.data": 1, "parallel.fsdp": -1, "parallel.fsdp_gather": "auto"}
    config = with_options(Config.from_dict(gpt2_1558m.get_config()), mesh)
    one_batch = with_options(config, {"train.accumulate_steps": 1})
    float32 = with_options(one_batch, {"precision.compute": "float32"})

    def choose(kind, config):
        chips = 8 * [SimpleNamespace(device_kind=kind)]
        return choose_gather(config, chips, num_params=1_557_611_200)

    h100 = "NVIDIA H100 80GB HBM3"
    assert choose("TPU v5 lite", config) == "layer"
    assert choose(h100, config) == "step"
    assert choose(h100, one_batch) == "layer"
    assert choose(h100, float32) == "step"


@pytest.mark.parametrize("parallel", [thorough(ParallelConfig(data=8)), MIXED])
def test_a_step_lowers_for_tpus_with_their_own_attention(monkeypatch, parallel):
    monkeypatch.setattr("gpt2.parallel.kernels.platform_of", lambda _: "tpu")
    cfg = dataclasses.replace(SMALL, context_length=128, scan_layers=True, remat="dots")
    backend, state = state_of(parallel, cfg=cfg)
    loss = next_token_loss(GPT(cfg, backend.make_ops(cfg, {})))
    update = make_update(loss, ADAMW, lambda _: 1e-3, seed=0, accumulate_steps=2)
    step = backend.compile_train(make_train_step(update))
    rows = np.zeros((16, 128), np.int32)
    batch = dict.fromkeys(["tokens", "targets", "segments"], rows)
    traced = step.trace(state, backend.put_batch(batch))
    lowered = traced.lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()
