"""Any layout gives the same training, sends what theory says, and continues any other's.

A part of what `python -m tests.programs.layouts` compares in full.
"""

import collections
import dataclasses
import re

import jax
import pytest

from gpt2.lab.plan.collectives import collectives
from gpt2.lab.plan.plan import bytes_per_device
from gpt2.model import num_params
from tests.helpers import thorough
from tests.programs.layouts import (
    MODEL,
    REFERENCE,
    TOLERANCE,
    Case,
    Setup,
    continued,
    difference,
    setup,
)

# Every layout, and between them every switch in both positions.
CASES = [
    Case("pmap x 8", accumulate=4),
    Case("data 8", accumulate=4),
    Case("data 8", remat="attention"),
    Case("fsdp 8", remat="full"),
    Case("data 2 x tensor 4", remat="dots", scanned=True),
    Case("data 2 x fsdp 2 x tensor 2", accumulate=4, remat="full", scanned=True),
    Case("fsdp 8 by layer", accumulate=4, remat="full", scanned=True),
    Case("data 2 x fsdp 2 x tensor 2", remat="mlp"),
    Case("zero1 x 8", accumulate=4),
    Case("data 2 x megatron x 4", remat="full", scanned=True),
    Case("fsdp 2 x megatron x 4", accumulate=4),
    Case("fsdp 4 x tensor 2 by other rules", scanned=True),
    Case("fsdp 8 by layer", remat="full", scanned=True, unroll=MODEL.num_layers),
    Case("data 2 x fsdp 2 x tensor 2", scanned=True, unroll=MODEL.num_layers),
]
# Those that the default run leaves to CI: what they have, others have too.
LONG = {1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13}
marked = [thorough(c) if i in LONG else c for i, c in enumerate(CASES)]
each_case = pytest.mark.parametrize("case", marked, ids=str)
SCALARS = 512  # bytes: losses, counts, and the norm of each gradient


@pytest.fixture(scope="module")
def reference():
    return setup(REFERENCE).train()


def sent(case):
    """Returns the collectives of a case's compiled step."""
    return collectives(setup(case).compiled.text())


def moved(case):
    """Returns the bytes of a step's collectives by kind."""
    each = (collections.Counter({c.kind: c.bytes * c.times}) for c in sent(case))
    return sum(each, collections.Counter())


def unsharded_share(params):
    leaves = jax.tree.leaves(params)
    whole = sum(leaf.size for leaf in leaves if leaf.sharding.is_fully_replicated)
    return whole / sum(leaf.size for leaf in leaves)


def param_bytes(case):
    """Returns the bytes of all parameters, and of those that are split."""
    params = setup(case).shapes.params
    return 4 * num_params(params), 4 * num_params(params) * (
        1 - unsharded_share(params)
    )


@each_case
def test_any_layout_gives_the_losses_and_parameters_of_one_device(case, reference):
    assert difference(setup(case).train(), reference) < TOLERANCE


@each_case
def test_every_switch_changes_the_program(case):
    assert len(jax.tree.leaves(setup(case).shapes)[0].sharding.device_set) == 8
    assert sent(case) and not sent(REFERENCE)

    def program(each):
        step = each.backend.compile_train(each.program.train_step)
        return str(jax.make_jaxpr(step)(each.shapes, each.batch(0)))

    before = program(setup(REFERENCE))
    after = program(setup(case))

    def changed(pattern):
        return len(re.findall(pattern, before)) != len(re.findall(pattern, after))

    assert changed("remat|checkpoint") == (case.remat != "none")
    assert changed(rf"length={MODEL.num_layers}\b") == case.scanned
    assert changed(rf"unroll={MODEL.num_layers}\b") == (case.unroll > 1)
    assert changed(r"length=4\b") == (case.accumulate == 4)


@pytest.mark.parametrize("case", [marked[0], *marked[1:3]], ids=str)
def test_data_parallel_sends_the_gradients_once_a_step(case):
    large = [c for c in sent(case) if c.bytes > SCALARS]
    assert [(c.kind, c.times, c.group) for c in large] == [
        ("all-reduce", 1, tuple(range(8)))
    ]
    assert 0 <= large[0].bytes - param_bytes(case)[0] <= SCALARS
    assert {c.kind for c in sent(case)} == {"all-reduce"}


@pytest.mark.thorough
def test_fsdp_gathers_parameters_and_scatters_gradients_once_a_step():
    case = Case("fsdp 8", remat="full")
    (whole, split), found = param_bytes(case), moved(case)
    assert found.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    assert found["all-gather"] == found["reduce-scatter"] == pytest.approx(split)
    assert found["all-reduce"] <= whole - split + SCALARS


@pytest.mark.parametrize("remat", ["full", thorough("dots")])
def test_fsdp_by_layer_gathers_kernels_twice_a_micro_batch_and_scatters_them_once(
    remat,
):
    # A policy that kept gathered kernels would gather them once.
    case = Case("fsdp 8 by layer", accumulate=4, remat=remat, scanned=True)
    params = setup(case).shapes.params
    kernels = 4 * num_params(
        [leaf for leaf in jax.tree.leaves(params["h"]) if leaf.ndim > 2]
    )
    kernels -= 4 * params["h"]["attn"]["c_attn"]["bias"].size
    tables = 4 * num_params([params["wte"], params["wpe"]])
    (whole, split), found = param_bytes(case), moved(case)
    vectors = split - kernels - tables
    tokens = (
        4 * 32 // 4 * MODEL.context_length
    )  # of a micro-batch, whose vectors are looked up
    assert found["all-gather"] == pytest.approx(
        4 * (2 * kernels + tables + tokens) + vectors
    )
    assert found["reduce-scatter"] == pytest.approx(4 * (kernels + tables) + vectors)
    assert (
        found["all-to-all"] == 4 * 2 * tokens * MODEL.embed_dim // 8
    )  # forward and backward
    assert found["all-reduce"] <= whole - split + SCALARS
    by_step = setup(dataclasses.replace(case, layout="fsdp 8")).compiled.peak_bytes
    assert setup(case).compiled.peak_bytes < by_step


@pytest.mark.thorough
def test_zero1_sends_what_fsdp_sends_and_splits_the_optimizer_alone():
    case = Case("zero1 x 8", accumulate=4)
    fsdp = Case("fsdp 8", remat="full")
    shapes = setup(case).shapes
    spread = setup(fsdp).shapes
    assert unsharded_share(shapes.params) == 1.0
    assert bytes_per_device(shapes.opt_state) == bytes_per_device(spread.opt_state)
    for kind in ("all-gather", "reduce-scatter"):
        assert moved(case)[kind] == pytest.approx(param_bytes(fsdp)[1])


@pytest.mark.thorough
def test_megatron_holds_parts_of_the_sequence_between_layers():
    case = Case("data 2 x megatron x 4", remat="full", scanned=True)
    whole = dataclasses.replace(case, layout="data 2 x tensor 4")
    saved = setup(whole).compiled.peak_bytes - setup(case).compiled.peak_bytes
    stream = (
        4 * 16 * MODEL.context_length * MODEL.embed_dim
    )  # of a layer, on half of the rows
    assert saved > 0.5 * MODEL.num_layers * stream * (1 - 1 / 4)


# Top-2 of four experts, with a capacity that drops.
EXPERTS = dict(num_experts=4, experts_per_token=2, expert_capacity=1.0)
EXPERTS |= dict(activation="swiglu", mlp_dim=64)
EXPERT_CASES = [
    Case("fsdp 8 by layer", accumulate=4, remat="dots", scanned=True),
    thorough(Case("pmap x 8", accumulate=4)),
    thorough(Case("fsdp 8 by layer")),
    thorough(Case("zero1 x 8", remat="mlp")),
    thorough(Case("fsdp 2 x megatron x 4", scanned=True)),
    thorough(Case("data 2 x fsdp 2 x tensor 2", accumulate=4, remat="full")),
    thorough(Case("data 2 x fsdp 2 x experts 2", remat="dots")),
    thorough(Case("data 2 x fsdp 2 x experts 2", scanned=True)),
]


@pytest.mark.skipif("num_experts" not in vars(MODEL), reason="there are no experts")
@pytest.mark.parametrize("case", EXPERT_CASES, ids=str)
def test_experts_train_in_any_layout_as_on_one_device(case, reference):
    model = dataclasses.replace(MODEL, **EXPERTS)
    wanted = setup(Case(model=model)).train()
    assert abs(wanted.losses / reference.losses - 1).max() > 10 * TOLERANCE
    case = dataclasses.replace(case, model=model)
    assert difference(setup(case).train(), wanted) < TOLERANCE
    layers = setup(case).shapes.params
    experts = layers["h" if case.scanned else "h_0"]["mlp"]["experts"]
    over_experts = "tensor" in experts["c_fc"]["kernel"].sharding.spec[:-2]
    assert over_experts == ("experts" in case.layout)


@pytest.mark.thorough
def test_dropout_draws_alike_whenever_parameters_are_gathered(reference):
    model = dataclasses.replace(MODEL, dropout=0.1)
    layouts = ("fsdp 8", "fsdp 8 by layer", "zero1 x 8")
    step, *others = (
        setup(Case(layout, accumulate=4, model=model)).train() for layout in layouts
    )
    assert difference(step, reference) > 50 * TOLERANCE
    for result in others:
        assert difference(result, step) < TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_variants_of_other_platforms_train_alike_in_shards(
    monkeypatch, reference, platform
):
    monkeypatch.setattr("gpt2.parallel.kernels.platform_of", lambda _: platform)
    for layout in ("data 2 x fsdp 2 x tensor 2", "fsdp 8 by layer"):
        result = Setup(Case(layout, remat="full", scanned=True)).train()
        assert difference(result, reference) < TOLERANCE


def test_accumulation_changes_nothing_that_crosses_the_data_axis():
    """Only what `tensor` sends, activations, may be sent once per micro-batch."""
    case = Case("data 2 x fsdp 2 x tensor 2", accumulate=4, remat="full", scanned=True)
    assert {c.times for c in sent(case) if set(c.group) - {0, 1}} == {1}


@pytest.mark.thorough
def test_a_checkpoint_of_any_layout_continues_in_any_other(reference, tmp_path):
    for saved, others in (
        (CASES[0], CASES[3:6]),
        (CASES[5], [REFERENCE, *CASES[:2], CASES[12]]),
    ):
        results = continued(saved, others, tmp_path / saved.layout)
        for result in results.values():
            assert len(result.losses) == 3
            assert difference(result, reference) < TOLERANCE
