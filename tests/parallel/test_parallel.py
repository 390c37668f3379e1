"""The mesh, the rules, what a state takes of each device, and FSDP by layer."""

import dataclasses
import itertools
from functools import partial
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
from gpt2.parallel import gather_whole, make_backend
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


def config(options, name=quickstart) -> Config:
    return with_options(Config.from_dict(name.get_config()), options)


def state_of(parallel: ParallelConfig, optimizer=None, cfg=SMALL):
    """Returns a backend, and the shapes and shardings of a state."""
    model, optimizer = GPT(cfg), optimizer or optax.adamw(1e-3)
    backend = make_backend(parallel, model.logical_axes())

    def init_fn(key):
        params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        return TrainState.create(params, optimizer, "float32")

    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    return backend, with_shardings(shapes, backend.state_shardings(shapes))


def test_a_strategy_takes_all_devices_for_its_axis_unless_told():
    def sizes(**options):
        return tuple(mesh_sizes(ParallelConfig(**options), 8).values())

    assert sizes(data=2, fsdp=-1) == (2, 4, 1)
    assert sizes(strategy="ddp") == (8, 1, 1)
    assert sizes(strategy="zero3") == (1, 8, 1)
    assert sizes(strategy="zero1", fsdp=4) == (2, 4, 1)
    assert sizes(strategy="megatron", tensor=2, fsdp=2) == (2, 2, 2)


@pytest.mark.parametrize(
    ("rules", "cfg", "named"),
    [
        (
            dict(vocab="tensor"),
            dict(vocab_size=301),
            "wte/embedding of shape (301, 64)",
        ),
        (
            dict(experts="tensor"),
            dict(num_experts=3),
            "experts/c_fc/bias of shape (3, 256)",
        ),
        ({}, dict(num_heads=3, embed_dim=66), "c_attn/bias of shape (3, 3, 22)"),
    ],
)
def test_an_array_that_does_not_split_is_named(rules, cfg, named):
    parallel = ParallelConfig(data=4, tensor=2, rules=RulesConfig(**rules))
    with pytest.raises(UserError) as error:
        state_of(parallel, cfg=dataclasses.replace(SMALL, **cfg))
    assert named in str(error.value)
    assert "'tensor': 2" in str(error.value)


def test_a_mesh_axis_splits_the_first_axis_that_asks_for_it():
    rules = RulesConfig(experts="tensor", vocab="fsdp")
    cfg = dataclasses.replace(SMALL, num_experts=2)
    _, state = state_of(dataclasses.replace(MIXED, rules=rules), cfg=cfg)
    kernel = state.params["h_0"]["mlp"]["experts"]["c_fc"]["kernel"]
    shard = kernel.sharding.shard_shape(kernel.shape)
    assert (kernel.shape, shard) == ((2, 64, 256), (1, 32, 256))
    table = state.params["wte"]["embedding"]
    assert table.sharding.shard_shape(table.shape) == (150, 32)


def test_a_validation_splits_too_whatever_batches_a_schedule_has():
    options = {"data.batch_size": 5, "train.batch_schedule": "0=16"}
    with pytest.raises(UserError, match="A batch of 5 does not divide"):
        check_layout(config(options), 2)


def test_rows_of_a_process_follow_one_another_or_are_refused(monkeypatch):
    def rows(parallel):
        sharding = NamedSharding(make_mesh(parallel), PartitionSpec(BATCH_AXES))
        return local_rows(sharding, 16)

    assert rows(MIXED) == slice(0, 16)
    whole = NamedSharding.addressable_devices_indices_map
    every_second = lambda self, shape: dict(list(whole(self, shape).items())[::2])  # noqa: E731
    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", every_second)
    assert rows(MIXED) == slice(0, 16)  # all but `tensor`
    with pytest.raises(UserError, match="not contiguous"):
        rows(ParallelConfig(data=8))


def test_a_parameter_that_no_rule_names_is_an_error():
    axes = GPT(SMALL).logical_axes()
    axes["h_0"]["attn"]["c_attn"]["kernel"] = PartitionSpec(
        "embed", "qkv", "hats", "head_size"
    )
    with pytest.raises(KeyError, match="hats"):
        make_backend(MIXED, axes)


@pytest.mark.parametrize(
    ("options", "params", "moments"),
    [
        (dict(strategy="ddp"), 1, 1),
        (dict(strategy="zero1", data=2, fsdp=4), 1, 4),
        (dict(strategy="zero3"), 8, 8),
        (dict(strategy="zero3", data=4), 2, 2),
    ],
)
def test_a_strategy_says_what_is_split(options, params, moments):
    backend, state = state_of(ParallelConfig(**options))
    whole = 4 * sum(leaf.size for leaf in jax.tree.leaves(state.params))
    found = state_bytes(backend, state)
    # Biases are whole everywhere: 0.8 % of this model.
    assert found["parameters"] == pytest.approx(whole / params, rel=0.06)
    assert found["optimizer"] == pytest.approx(2 * whole / moments, rel=0.06)
    assert found["gradients"] == whole  # gathered by step


def test_layers_do_not_gather_what_rules_split_elsewhere():
    elsewhere = RulesConfig(
        embed="none", norm="none", table="none", mlp="fsdp", heads="fsdp"
    )
    parallel = ParallelConfig(data=2, fsdp=4, fsdp_gather="layer")
    assert state_of(parallel)[0].gather_by == "layer"
    for change in (dict(rules=elsewhere), dict(data=1, tensor=2)):
        assert state_of(dataclasses.replace(parallel, **change))[0].gather_by == "step"


def test_optimizer_state_is_laid_out_like_its_parameters():
    parts = {"adam": optax.adam(1e-3), "sgd": optax.sgd(0.1, momentum=0.9)}
    apart = optax.partition(
        parts, partial(jax.tree.map, lambda x: ["sgd", "adam"][x.ndim > 1])
    )
    optimizer = optax.MultiSteps(apart, 4).gradient_transformation()

    def named(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): (x.shape, x.sharding) for path, x in leaves}

    _, shapes = state_of(MIXED, optimizer)
    params = named(shapes.params)
    kept = named(shapes.opt_state)
    kept = {name: held for name, held in kept.items() if held[0]}
    assert len(kept) >= len(params) / 2
    for name, held in kept.items():
        assert [held] == [
            param for tail, param in params.items() if name.endswith(tail)
        ]


def test_a_group_that_fills_a_torus_in_order_has_its_sides():
    places = itertools.product(range(2), range(4), range(1))
    cube = [SimpleNamespace(coords=place) for place in places]
    assert torus_sides(np.array(cube)) == (2, 4)
    assert torus_sides(np.array(cube[::-1])) == (8,)  # another order
    assert torus_sides(np.array(cube[:7])) == (7,)  # not filled
    assert torus_sides(np.array(jax.devices())) == (8,)


@pytest.mark.parametrize("stages", [(8,), (2, 4), (2, 2, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_shards_are_gathered_and_summed_in_any_number_of_stages(stages, axis):
    shards = Shards(axis, stages)
    mesh = make_mesh(ParallelConfig(data=1, fsdp=8))
    whole = jax.random.normal(jax.random.key(0), (16, 24))
    split = PartitionSpec(*[None] * axis, "fsdp")

    def on_device(shard):
        mine = jax.lax.axis_index("fsdp") + 1.0
        return shards.gather(shard), shards.scatter(mine * shards.gather(shard))

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
    def chosen(kind, options):
        mesh = {"parallel.data": 1, "parallel.fsdp": -1, "parallel.fsdp_gather": "auto"}
        chips = 8 * [SimpleNamespace(device_kind=kind)]
        return choose_gather(
            config(mesh | options, gpt2_1558m), chips, num_params=1_557_611_200
        )

    v5e = "TPU v5 lite"
    h100 = "NVIDIA H100 80GB HBM3"
    at_once = {"train.accumulate_steps": 1}
    assert (chosen(v5e, {}), chosen(h100, {})) == ("layer", "step")
    assert chosen(h100, at_once) == "layer"
    assert chosen(h100, at_once | {"precision.compute": "float32"}) == "step"


@pytest.mark.parametrize(
    "parallel", [ParallelConfig(data=8), MIXED], ids=["data 8", "mixed"]
)
@pytest.mark.parametrize("scan_layers", [True, thorough(False)])
def test_a_step_lowers_for_tpus_with_their_own_attention(
    monkeypatch, parallel, scan_layers
):
    monkeypatch.setattr("gpt2.parallel.kernels.platform_of", lambda _: "tpu")
    cfg = dataclasses.replace(
        SMALL, context_length=128, scan_layers=scan_layers, remat="dots"
    )
    backend, state = state_of(parallel, cfg=cfg)
    loss = next_token_loss(GPT(cfg, backend.make_ops(cfg, {})))
    chain = optax.adamw(1e-3)
    update = make_update(loss, chain, lambda _: 1e-3, seed=0, accumulate_steps=2)
    step = make_train_step(update)
    batch = {
        name: np.zeros((16, 128), np.int32)
        for name in ("tokens", "targets", "segments")
    }
    traced = backend.compile_train(step).trace(state, backend.put_batch(batch))
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_a_tree_is_gathered_whole_without_jit_too():
    mesh = make_mesh(ParallelConfig(fsdp=2))
    whole = np.arange(8.0).reshape(2, 4)
    split = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    with jax.disable_jit():
        gathered = gather_whole({"w": split}, mesh)
    np.testing.assert_array_equal(gathered["w"], whole)
