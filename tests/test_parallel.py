"""Rules, the mesh, what inspection reads, and plans."""

import contextlib
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs import gpt2_124m, gpt2_1558m, quickstart
from gpt2.config import Config, GPTConfig, ParallelConfig, RulesConfig
from gpt2.errors import UserError
from gpt2.model import GPT, num_params
from gpt2.parallel import abstract_state, gather_whole, make_backend, rules
from gpt2.parallel.inspect import (
    bytes_per_device,
    check_sharded,
    describe_collectives,
    describe_sharding,
    unsharded_share,
)
from gpt2.parallel.mesh import batch_sharding, check_layout, local_rows, make_mesh, mesh_sizes
from gpt2.parallel.pieces import Pieces, torus_sides
from gpt2.parallel.rules import Rules
from gpt2.plan.collectives import Traffic, collectives, summarize
from gpt2.planning.plan import compute_seconds, make_plan
from gpt2.telemetry.chips import BOARDS, find_chip
from gpt2.training.program import Program, choose_gather
from gpt2.training.state import TrainState
from gpt2.training.steps import make_train_step, next_token_loss
from tests.layouts import BATCH_SIZE, LAYOUTS, NUM_STEPS, OPTIM, Case, setup

SMALL = GPTConfig(vocab_size=300, context_length=32, num_layers=2, num_heads=4, embed_dim=64)
MIXED = ParallelConfig(data=2, fsdp=2, tensor=2)


def config(name=quickstart, **options) -> Config:
    """Returns a config file's options with some changed: `group__name=value`."""
    tree = name.get_config()
    for option, value in options.items():
        group, _, member = option.partition("__")
        tree[group][member] = value
    return Config.from_dict(tree)


def state_of(parallel: ParallelConfig, optimizer=None, cfg=SMALL, devices=None):
    """Returns a backend and the shapes and shardings of its state."""
    model, optimizer = GPT(cfg), optimizer or optax.adamw(1e-3)
    backend = make_backend(parallel, model.logical_axes(), devices)

    def init_fn(key):
        params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        return TrainState.create(params, optimizer, "float32")

    return backend, init_fn, abstract_state(backend, init_fn)


# Mesh


@pytest.mark.parametrize(
    ("num_devices", "options", "message"),
    [
        (8, dict(parallel__data=3), "data=3 takes 3 devices; found: 8. Use .*data=8"),
        (8, dict(parallel__fsdp=3), "fsdp=3 does not divide 8 devices. Use .*fsdp=4"),
        (
            8,
            dict(parallel__fsdp=3, parallel__tensor=5, model__num_heads=8),
            "fsdp=3 x parallel.tensor=5 takes 15 devices; found: 8. Use .*fsdp=2 .*tensor=4",
        ),
        (
            8,
            dict(parallel__tensor=8),
            "num_heads=4 does not split over parallel.tensor=8.*tensor=4",
        ),
        (8, dict(parallel__backend="pmap", parallel__data=4), "takes 4 devices.*data=8"),
        (
            512,
            dict(parallel__fsdp=512, model__embed_dim=256),
            "embed_dim=256 does not split over .*fsdp=512.*fsdp=256",
        ),
        (7, dict(parallel__strategy="zero3"), "embed_dim=128 does not .*=7. Use .*ddp .*fsdp=1"),
        (
            6,
            dict(parallel__strategy="megatron"),
            "num_heads=4 does not .*tensor=6. Use .*data=3 --config.parallel.tensor=2",
        ),
        (
            8,
            dict(parallel__strategy="megatron", model__context_length=65, parallel__tensor=4),
            "context_length=65 does not split over parallel.tensor=4. Use .*ddp .*tensor=1",
        ),
        (6, dict(parallel__strategy="ddp", parallel__data=2), "takes 2 devices.*Use .*data=6"),
        (8, dict(parallel__strategy="zero3", parallel__data=8), "nothing to split: .*=4 .*fsdp=2"),
        (8, dict(data__batch_size=20), "batch_size=20 does not split .*data=8.* Use .*=16"),
        (
            8,
            dict(data__batch_size=16, train__accumulate_steps=4, parallel__fsdp=2),
            "data=4 x parallel.fsdp=2 x train.accumulate_steps=4. "
            "Use --config.train.accumulate_steps=2, or --config.data.batch_size=32",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_names_the_numbers_and_the_nearest(num_devices, options, message):
    wrong = config(**options)
    with pytest.raises(UserError, match=message):
        check_layout(wrong, wrong.model, num_devices)


@pytest.mark.parametrize("num_devices", [1, 6, 8, 64])
def test_the_proposed_mesh_works(num_devices):
    for fsdp in range(1, 12):
        for tensor in range(1, 12):
            options = dict(parallel__fsdp=fsdp, parallel__tensor=tensor)
            wanted = config(data__batch_size=num_devices, **options)
            try:
                check_layout(wanted, wanted.model, num_devices)
            except UserError as error:
                flags = str(error).rstrip(".").partition("Use ")[2].split()
                named = (flag.removeprefix("--config.").split("=") for flag in flags)
                proposed = {name.replace(".", "__"): int(size) for name, size in named}
                mended = config(data__batch_size=num_devices, **options | proposed)
                check_layout(mended, mended.model, num_devices)


def test_the_rest_of_the_devices_go_where_minus_one_says():
    assert mesh_sizes(ParallelConfig(data=2, fsdp=-1, tensor=2), 64) == {
        "data": 2,
        "fsdp": 16,
        "tensor": 2,
    }
    assert dict(make_mesh(MIXED).shape) == {"data": 2, "fsdp": 2, "tensor": 2}


def test_rows_of_a_process_follow_one_another_or_are_refused(monkeypatch):
    assert local_rows(batch_sharding(make_mesh(MIXED)), 16) == slice(0, 16)
    whole = NamedSharding.addressable_devices_indices_map
    every_second = lambda self, shape: dict(list(whole(self, shape).items())[::2])  # noqa: E731
    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", every_second)
    assert local_rows(batch_sharding(make_mesh(MIXED)), 16) == slice(0, 16)  # all but `tensor`
    with pytest.raises(UserError, match=r"8 rows of the batch, .* among 14: 0 to 1, 4 to 5"):
        local_rows(batch_sharding(make_mesh(ParallelConfig(data=8))), 16)


# Rules


def test_a_parameter_that_no_rule_names_is_an_error():
    axes = GPT(SMALL).logical_axes()
    axes["h_0"]["attn"]["c_attn"]["kernel"] = PartitionSpec("embed", "qkv", "hats", "head_size")
    with pytest.raises(UserError, match="h_0/attn/c_attn/kernel has an axis 'hats' that no rule"):
        make_backend(MIXED, axes)
    axes["h_0"]["attn"]["c_attn"]["kernel"] = PartitionSpec()
    with pytest.raises(UserError, match="axes of parameter h_0/attn/c_attn/kernel have no names"):
        make_backend(MIXED, axes)


def test_storage_and_compute_differ_by_fsdp_alone():
    table = Rules.from_config(ParallelConfig())
    assert any("fsdp" in axes for axes in table.storage.values())
    for name, axes in table.storage.items():
        assert tuple(axis for axis in axes if axis != "fsdp") == table.compute[name]


def test_a_strategy_says_what_is_split():
    whole = bytes_per_device(state_of(ParallelConfig(data=8))[2].params)
    for options, params, moments in (
        (dict(strategy="ddp"), 1, 1),
        (dict(strategy="zero1"), 1, 8),
        (dict(strategy="zero1", data=2, fsdp=4), 1, 4),
        (dict(strategy="zero3"), 8, 8),
        (dict(strategy="zero3", data=4), 2, 2),
    ):
        _, _, state = state_of(ParallelConfig(**options))
        # Biases are whole everywhere: 0.8 % of this model.
        assert bytes_per_device(state.params) == pytest.approx(whole / params, rel=0.06)
        assert bytes_per_device(state.opt_state) == pytest.approx(2 * whole / moments, rel=0.06)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (dict(strategy="ddp"), (8, 1, 1)),
        (dict(strategy="zero3"), (1, 8, 1)),
        (dict(strategy="zero1", fsdp=4), (2, 4, 1)),
        (dict(strategy="megatron", data=2), (2, 1, 4)),
        (dict(strategy="megatron", tensor=2, fsdp=2), (2, 2, 2)),
    ],
)
def test_a_strategy_takes_all_devices_for_its_axis_unless_told(options, sizes):
    assert tuple(mesh_sizes(ParallelConfig(**options), 8).values()) == sizes


def test_rules_that_split_a_parameter_twice_are_an_error():
    parallel = ParallelConfig(data=1, fsdp=8, rules=RulesConfig(mlp="tensor,fsdp"))
    message = (
        "parallel.rules.embed and parallel.rules.mlp both split parameter h_0/mlp/c_fc/kernel over "
        "fsdp. .* use --config.parallel.rules.embed=none"
    )
    with pytest.raises(UserError, match=message):
        make_backend(parallel, GPT(SMALL).logical_axes())


def test_a_rule_for_what_no_parameter_has_is_an_error():
    parallel = ParallelConfig(fsdp=2, rules=RulesConfig(position="fsdp"))
    axes = GPT(dataclasses.replace(SMALL, position="rope")).logical_axes()
    with pytest.raises(UserError, match=r"rules\.position=fsdp is ignored: no parameter"):
        make_backend(parallel, axes)


def test_layers_cannot_gather_what_rules_split_elsewhere():
    elsewhere = RulesConfig(embed="none", norm="none", table="none", mlp="fsdp", heads="fsdp")
    parallel = ParallelConfig(data=1, fsdp=4, tensor=2, rules=elsewhere, fsdp_gather="layer")
    with pytest.raises(UserError, match=r"gathers nothing: .*Use .*fsdp_gather=step"):
        make_backend(parallel, GPT(SMALL).logical_axes(), gather_by="layer")
    auto = dataclasses.replace(parallel, fsdp_gather="auto")
    assert make_backend(auto, GPT(SMALL).logical_axes(), gather_by="layer").gather_by == "step"


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        optax.chain(optax.adam(1e-3), optax.ema(0.99)),
        optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
        optax.masked(optax.adam(1e-3), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        optax.partition(
            {"adam": optax.adam(1e-3), "sgd": optax.sgd(0.1, momentum=0.9)},
            lambda p: jax.tree.map(lambda x: "adam" if x.ndim > 1 else "sgd", p),
        ),
    ],
    ids=["clip and adamw", "ema", "multi_steps", "masked", "partition"],
)
def test_optimizer_state_is_laid_out_like_its_parameters(optimizer):
    _, _, shapes = state_of(MIXED, optimizer)
    params = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes.params)
    }
    kept = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes.opt_state):
        name = jax.tree_util.keystr(path)
        param = next((p for n, p in params.items() if name.endswith(n)), None)
        if param is None:
            assert leaf.shape == ()
            continue
        kept += 1
        assert leaf.shape == param.shape
        assert leaf.sharding == param.sharding
    assert kept >= len(params) / 2


def test_factored_moments_are_split_where_their_parameters_are():
    _, _, shapes = state_of(MIXED, optax.adafactor(1e-3, min_dim_size_to_factor=8))
    rows, columns = (optax.tree.get(shapes.opt_state, name) for name in ("v_row", "v_col"))
    assert rows["wte"]["embedding"].shape == (64,)
    assert rows["wte"]["embedding"].sharding.spec == PartitionSpec(("tensor", "fsdp"))
    assert columns["wte"]["embedding"].shape == (300,)
    assert columns["wte"]["embedding"].sharding.is_fully_replicated


def test_state_is_born_spread():
    backend, init_fn, shapes = state_of(ParallelConfig(data=1, fsdp=8))
    shardings = backend.state_shardings(shapes)
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    compiled = jax.jit(init_fn, out_shardings=shardings).lower(key).compile()
    assert compiled.memory_analysis().output_size_in_bytes < 1.1 * bytes_per_device(shapes)


# Seeing it


def test_1558m_with_fsdp_8_holds_an_eighth_of_its_state_per_device():
    cfg = GPTConfig.from_name("gpt2-1558m", scan_layers=True)
    _, _, spread = state_of(ParallelConfig(data=1, fsdp=8), cfg=cfg)
    whole = 3 * 4 * 1_557_611_200  # parameters and Adam's two moments
    assert sum(leaf.size * 4 for leaf in jax.tree.leaves(spread)) == pytest.approx(whole)
    assert bytes_per_device(spread) / whole < 1 / 8 + 0.02
    assert unsharded_share(spread.params) < 0.001


def test_parameters_left_whole_are_an_error_where_spreading_was_asked_for():
    _, _, shapes = state_of(ParallelConfig(data=1, fsdp=8))
    params, mesh = shapes.params, {"data": 1, "fsdp": 8, "tensor": 1}
    check_sharded(params, mesh)
    place = NamedSharding(params["wte"]["embedding"].sharding.mesh, PartitionSpec())
    whole = jax.ShapeDtypeStruct((300, 64), jnp.float32, sharding=place)
    broken = params | {"wte": {"embedding": whole}}
    share = 300 * 64 / sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert unsharded_share(broken) == pytest.approx(share + unsharded_share(params))
    with pytest.raises(UserError, match=r"fsdp=8 leaves 16.\d% .*, wte/embedding first"):
        check_sharded(broken, mesh)
    check_sharded(broken, {"data": 8, "fsdp": 1, "tensor": 1})


def test_the_table_of_tensors_says_what_a_device_holds(capsys):
    backend, init_fn, shapes = state_of(MIXED)
    rows = describe_sharding(shapes.params)
    assert rows["h_*/mlp/c_fc/kernel"] == (
        "64x256, fsdp splits axis 0, tensor splits axis 1, 16.0 KiB a device"
    )
    state = backend.init_state(init_fn, jax.random.key(0))
    shard = state.params["h_0"]["mlp"]["c_fc"]["kernel"].addressable_shards[0]
    assert shard.data.nbytes == 16 * 1024


def test_gathered_parameters_are_whole_and_the_same():
    backend, init_fn, _ = state_of(MIXED)
    params = backend.init_state(init_fn, jax.random.key(0)).params
    for leaf, original in zip(
        jax.tree.leaves(gather_whole(params, backend.mesh)), jax.tree.leaves(params), strict=True
    ):
        assert len(leaf.sharding.device_set) == 1
        np.testing.assert_array_equal(leaf, original)


HLO = """HloModule jit_step, is_scheduled=true, num_partitions=8

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %rs = f32[4]{0} reduce-scatter(%x), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
}

%cond (p: (s32[], f32[4])) -> pred[] {
}

%endless (p: f32[4]) -> f32[4] {
  %aa = (f32[8]{0}, f32[8]{0}) all-to-all(%a, %b), replica_groups=[4,2]<=[2,4]T(1,0)
}

ENTRY %main (p: f32[16]) -> f32[16] {
  %ar = (f32[10]{0}, bf16[3,2]{1,0}) all-reduce-start(%a, %b), replica_groups={}, to_apply=%add
  %ard = (f32[10]{0}, bf16[3,2]{1,0}) all-reduce-done(%ar)
  %ag = (f32[2]{0}, f32[8]{0}) all-gather-start(%a), replica_groups=mesh['a'=2,'b'=4] {'b'}
  %one = f32[2]{0} all-gather(%a), replica_groups=mesh['a'=8,'b'=1] {'b'}
  %as = ((f32[8,4]), f32[8,4]) all-to-all-start(%a), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  %cp = (u8[5], u8[5], u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
  %w = f32[4] while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %v = f32[4] while(%t), body=%endless
}
"""


def test_collectives_are_read_from_every_form_of_hlo():
    found = {c.kind: c for c in collectives(HLO)}
    assert found["all-reduce"].bytes == 10 * 4 + 6 * 2
    assert found["all-reduce"].group == tuple(range(8))
    assert found["all-reduce"].bytes_sent == 2 * 7 / 8 * 52
    assert (found["all-gather"].bytes, found["all-gather"].group) == (32, (0, 1, 2, 3))
    assert found["all-gather"].bytes_sent == 3 / 4 * 32
    assert found["reduce-scatter"].group == (0, 2, 4, 6)
    assert (found["reduce-scatter"].bytes, found["reduce-scatter"].times) == (64, 3)
    assert found["collective-permute"].bytes == 5
    assert found["all-to-all"].group == (0, 4)
    assert [c.bytes for c in collectives(HLO) if c.group == (0, 1) and c.kind == "all-to-all"] == [
        8 * 4 * 4  # operands are part of what it returns
    ]
    assert [c.kind for c in found.values() if c.loop_unknown] == ["all-to-all"]
    assert summarize(collectives(HLO))["reduce-scatter"] == Traffic(
        count=3, bytes=192, sent=144.0, asynchronous=False, overlapped=0
    )


# What compilers for TPUs and GPUs write: a reduce-scatter as a fusion, a gather that fusions with a
# product continue, a loop whose condition tells its length; a reduce-scatter that has begun.
CHIPS_HLO = """HloModule jit_step, is_scheduled=true, num_partitions=8

%all-reduce-scatter.1 (p: f32[8,4]) -> f32[1,4] {
  %ar = f32[8,4]{1,0} all-reduce(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %ds = f32[1,4]{1,0} dynamic-slice(%ar, %i)
}

%start (p: bf16[4]) -> (bf16[4], bf16[32]) {
  %ag.1 = bf16[32]{0} all-gather(%p), replica_groups={}, frontend_attributes={chain_id="0"}
  ROOT %c.1 = (bf16[4]{0}, bf16[32]{0}) custom-call(%p, %ag.1)
}

%async_collective_fusion.2 (p: bf16[4]) -> (bf16[8], bf16[32]) {
  %ag.2 = bf16[32]{0} all-gather(%p), replica_groups={}, frontend_attributes={chain_id="0"}
  %conv = bf16[8]{0} convolution(%a, %b)
  ROOT %t = (bf16[8]{0}, bf16[32]{0}) tuple(%conv, %ag.2)
}

%done (p: bf16[4]) -> bf16[32] {
  %ag.3 = bf16[32]{0} all-gather(%p), replica_groups={}, frontend_attributes={chain_id="0"}
  ROOT %c.3 = bf16[32]{0} custom-call(%p, %ag.3)
}

%start.idle (p: bf16[4]) -> (bf16[4], bf16[32]) {
  %ag.4 = bf16[32]{0} all-gather(%p), replica_groups={}, frontend_attributes={chain_id="7"}
  ROOT %c.4 = (bf16[4]{0}, bf16[32]{0}) custom-call(%p, %ag.4)
}

%done.idle (p: bf16[4]) -> bf16[32] {
  %ag.5 = bf16[32]{0} all-gather(%p), replica_groups={}, frontend_attributes={chain_id="7"}
  ROOT %c.5 = bf16[32]{0} custom-call(%p, %ag.5)
}

%cond (p: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(48)
  %turn = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%turn, %limit), direction=LT
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %i1 = (bf16[4], bf16[32]) fusion(%x), kind=kCustom, calls=%start.idle
  %i2 = bf16[32] fusion(%i1), kind=kCustom, calls=%done.idle
  %f1 = (bf16[4], bf16[32]) fusion(%x), kind=kCustom, calls=%start
  %f2 = (bf16[8], bf16[32]) fusion(%f1), kind=kCustom, calls=%async_collective_fusion.2
  %f3 = bf16[32] fusion(%f2), kind=kCustom, calls=%done
  %f4 = f32[1,4] fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
}

%gemm (p: f32[8]) -> f32[8] {
  %d = f32[8] dot(%p, %p)
}

ENTRY %main (p: f32[16]) -> f32[16] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body
  %rs = ((f32[16]), f32[2]) reduce-scatter-start(%p), replica_groups={{0,1,2,3,4,5,6,7}}
  %g = f32[8] fusion(%p), kind=kCustom, calls=%gemm
  %rsd = f32[2] reduce-scatter-done(%rs)
  %ag = (f32[2], f32[16]) all-gather-start(%p), replica_groups={{0,1,2,3,4,5,6,7}}
  %agd = f32[16] all-gather-done(%ag)
  %ar = f32[4] all-reduce-start(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %w2 = f32[8] while(%t), condition=%cond, body=%gemm
  %ard = f32[4] all-reduce-done(%ar)
}
"""


def test_collectives_of_programs_for_chips_are_counted_once_and_known_to_overlap():
    found = [(c.kind, c.bytes, c.times, c.overlapped) for c in collectives(CHIPS_HLO)]
    assert found == [
        ("all-gather", 64, 48, False),
        ("all-gather", 64, 48, True),
        ("reduce-scatter", 128, 48, False),
        ("reduce-scatter", 64, 1, True),
        ("all-gather", 64, 1, False),
        ("all-reduce", 16, 1, True),
    ]
    assert not any(c.loop_unknown for c in collectives(CHIPS_HLO))
    rows = describe_collectives(CHIPS_HLO)
    assert rows["all-gather"].endswith("sent by each device, 49% while products run")  # 48 of 97
    assert rows["overlapped"] == "25% of bytes are sent while products run"  # 3,168 of 12,448
    idle = CHIPS_HLO.replace("dot(", "add(").replace("convolution(", "add(")
    assert describe_collectives(idle)["overlapped"].startswith("0% of bytes")
    assert "overlapped" not in describe_collectives(HLO.replace("-start(", "("))


def test_a_group_that_fills_a_torus_in_order_has_its_sides():
    class Chip:
        def __init__(self, *coords):
            self.coords = coords

    cube = [Chip(x, y, z) for x in range(2) for y in range(4) for z in range(1)]
    assert torus_sides(np.array(cube)) == (2, 4)
    assert torus_sides(np.array(cube[::-1])) == (8,)  # another order
    assert torus_sides(np.array(cube[:7])) == (7,)  # not filled
    assert torus_sides(np.array(jax.devices())) == (8,)


@pytest.mark.parametrize("stages", [(8,), (2, 4), (2, 2, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_pieces_are_gathered_and_summed_in_any_number_of_stages(stages, axis):
    pieces, mesh = Pieces(axis, stages), make_mesh(ParallelConfig(data=1, fsdp=8))
    whole = jax.random.normal(jax.random.key(0), (16, 24))
    split = PartitionSpec(*[None] * axis, "fsdp")

    def on_device(piece):
        mine = jax.lax.axis_index("fsdp") + 1.0
        return pieces.gather(piece), pieces.scatter(mine * pieces.gather(piece))

    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=split, out_specs=(PartitionSpec(), split), check_vma=False
    )
    gathered, summed = jax.jit(mapped)(whole)
    np.testing.assert_array_equal(gathered, whole)
    np.testing.assert_allclose(summed, 36.0 * whole, rtol=1e-5)  # 1 + 2 + ... + 8


def gather_for(config, devices):
    shapes = jax.eval_shape(GPT(config.gpt()).init, jax.random.key(0), jnp.zeros((1, 1), int))
    return choose_gather(config, devices, num_params(shapes))


def test_parameters_are_gathered_by_layer_where_that_fits_or_costs_nothing():
    class V5e:
        device_kind = "TPU v5 lite"

    class H100:
        device_kind = "NVIDIA H100 80GB HBM3"

    large = config(gpt2_1558m).with_vocabulary(50257)
    large = dataclasses.replace(large, parallel=ParallelConfig(data=1, fsdp=-1))
    assert [gather_for(large, 8 * [chip]) for chip in (V5e, H100)] == ["layer", "step"]
    split = dataclasses.replace(large, parallel=ParallelConfig(data=1, fsdp=2, tensor=-1))
    assert gather_for(split, 8 * [V5e]) == "step"  # a quarter each
    one = dataclasses.replace(large, train=dataclasses.replace(large.train, accumulate_steps=1))
    assert gather_for(one, 8 * [H100]) == "layer"
    spread = Program.from_config(
        dataclasses.replace(one, model=config().model).with_vocabulary(300), jax.devices()
    )
    assert spread.backend.layout == (
        "pjit, data 1 x fsdp 8 x tensor 1, parameters gathered by layer"
    )
    exact = dataclasses.replace(
        one, precision=dataclasses.replace(one.precision, compute="float32")
    )
    assert gather_for(exact, 8 * [H100]) == "step"
    with pytest.raises(
        UserError, match=r"fsdp_gather=layer is ignored while no parameters are stored"
    ):
        config(parallel__fsdp_gather="layer")


@pytest.mark.parametrize("parallel", [ParallelConfig(data=8), MIXED], ids=["data 8", "mixed"])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_step_lowers_for_tpus_with_their_own_attention(monkeypatch, parallel, scan_layers):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(rules, "traced_for", lambda *_, **__: contextlib.nullcontext())
    cfg = dataclasses.replace(SMALL, context_length=128, scan_layers=scan_layers, remat="dots")
    backend, _, state = state_of(parallel, cfg=cfg)
    loss = next_token_loss(GPT(cfg))
    step = make_train_step(loss, optax.adamw(1e-3), lambda _: 1e-3, seed=0, accumulate_steps=2)
    batch = {name: np.zeros((16, 128), np.int32) for name in ("tokens", "targets", "segments")}
    traced = backend.compile_train(step).trace(state, backend.put_batch(batch))
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


# Plans


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("pmap x 8", accumulate=4), marks=pytest.mark.thorough),
        Case("data 2 x fsdp 2 x tensor 2", accumulate=4, remat="full", scanned=True),
    ],
    ids=str,
)
def test_a_plan_agrees_with_a_run_in_memory_and_collectives(case):
    small = dict(num_layers=2, embed_dim=64, context_length=32, vocab_size=300)
    options = {f"model__{name}": value for name, value in small.items()}
    options |= dict(memory__remat=case.remat, memory__scan_layers=case.scanned)
    options |= dict(train__num_steps=NUM_STEPS, train__accumulate_steps=case.accumulate)
    planned = dataclasses.replace(
        config(data__tokenizer="byte", data__batch_size=BATCH_SIZE, **options),
        parallel=LAYOUTS[case.layout],
        optim=OPTIM,
    )
    plan = make_plan(planned)
    run = setup(case)
    state = run.program.init_state()
    compiled = run.program.compile_train(state, run.batch(0))
    assert sum(plan.memory.values()) == pytest.approx(compiled.memory.peak, rel=0.01)
    held = [shard.data for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
    on_first = sum(x.nbytes for x in held if x.devices() == {jax.devices()[0]})
    assert plan.memory["parameters"] + plan.memory["optimizer"] == pytest.approx(on_first, abs=64)
    assert summarize(collectives(plan.text)) == summarize(collectives(compiled.text()))


def test_a_forecast_counts_the_products_that_remat_computes_again():
    def seconds(remat):
        planned = config(gpt2_124m, memory__remat=remat).with_vocabulary(50257)
        return compute_seconds(planned, 8, "H100")

    # Of 124M: all but the MLP's second product, over 6 N + 12 L D T.
    again = 12 * (16 * 768**2 + 4 * 768 * 1024) / (6 * 123_653_376 + 12 * 12 * 768 * 1024)
    assert seconds("full") / seconds("none") == pytest.approx(1 + again)
    assert seconds("full") > seconds("mlp") > seconds("attention") > seconds("dots")
    assert seconds("dots") == seconds("none")


def test_a_plan_needs_no_tokenizer_but_its_size():
    with pytest.raises(UserError, match="does not say how many tokens"):
        make_plan(config(data__tokenizer="char"), jax.devices()[:1])
    with pytest.raises(UserError, match=r"model\.vocab_size=256 is less than the 257 tokens"):
        make_plan(config(data__tokenizer="byte", model__vocab_size=256), jax.devices()[:1])


def test_gpt2_1558m_divides_over_powers_of_two_up_to_64_devices():
    """Divisibility alone: what it takes, the commands of docs/parallelism.md say."""
    wanted = config(gpt2_1558m)
    for num_devices in (1, 2, 4, 8, 16, 32, 64):
        check_layout(wanted, wanted.model, num_devices)
    with pytest.raises(UserError, match=r"does not split over .*fsdp=128\. Use .*data=2"):
        check_layout(wanted, wanted.model, 128)


def test_links_slow_down_where_a_ring_leaves_its_domain():
    assert all(find_chip(name) for name in BOARDS)
    h100 = BOARDS["H100"]
    assert h100.bandwidth(tuple(range(8))) == 450e9
    assert h100.bandwidth(tuple(range(16))) == 400e9  # 8 adapters of 50 GB/s
    assert h100.bandwidth((0, 8)) == 50e9
    assert BOARDS["TPU v5e"].bandwidth(tuple(range(512))) is None
