"""Any layout gives the same training, sends what theory says, and continues any other's.

A part of what `python -m tests.programs.layouts` compares in full.
"""

import collections
import dataclasses
import re

import jax
import pytest

from gpt2.lab.plan.collectives import collectives
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
PMAP = Case("pmap x 8", accumulate=4)
DATA = Case("data 8", accumulate=4)
DATA_REMAT = Case("data 8", remat="attention")
FSDP = Case("fsdp 8", remat="full")
TENSOR = Case("data 2 x tensor 4", remat="dots", scanned=True)
MIXED = Case("data 2 x fsdp 2 x tensor 2", accumulate=4, remat="full", scanned=True)
BY_LAYER = Case("fsdp 8 by layer", accumulate=4, remat="full", scanned=True)
ZERO1 = Case("zero1 x 8", accumulate=4)
MEGATRON = Case("data 2 x megatron x 4", remat="full", scanned=True)
UNROLLED = dataclasses.replace(BY_LAYER, accumulate=1, unroll=MODEL.num_layers)
LONG_CASES = [
    DATA,
    DATA_REMAT,
    FSDP,
    TENSOR,
    Case("data 2 x fsdp 2 x tensor 2", remat="mlp"),
    ZERO1,
    MEGATRON,
    Case("fsdp 2 x megatron x 4", accumulate=4),
    Case("fsdp 4 x tensor 2 by other rules", scanned=True),
    BY_LAYER,
    UNROLLED,
    dataclasses.replace(UNROLLED, layout=MIXED.layout, remat="none"),
]
# What the cases have that the default run leaves to CI, others have too.
CASES = [PMAP, MIXED, *map(thorough, LONG_CASES)]
each_case = pytest.mark.parametrize("case", CASES, ids=str)
SCALARS = 512  # bytes: losses, counts, and the norm of each gradient


@pytest.fixture(scope="module")
def reference():
    return setup(REFERENCE).train()


def sent(case):
    """Return the collectives of a case's compiled step."""
    return collectives(setup(case).compiled.text())


def moved(case):
    """Return the bytes of a step's collectives by kind."""
    traffic = collections.Counter()
    for collective in sent(case):
        traffic[collective.kind] += collective.bytes * collective.times
    return traffic


def unsharded_fraction(params):
    """Return the fraction of the parameters that every device holds."""
    total = 0
    unsharded = 0
    for leaf in jax.tree.leaves(params):
        total += leaf.size
        unsharded += leaf.size * leaf.sharding.is_fully_replicated
    return unsharded / total


def param_bytes(case):
    """Return the bytes of all parameters, and of those that are split."""
    params = setup(case).shapes.params
    whole = 4 * num_params(params)
    return whole, whole * (1 - unsharded_fraction(params))


@each_case
def test_any_layout_gives_the_losses_and_parameters_of_one_device(case, reference):
    result = setup(case).train()
    assert difference(result, reference) < TOLERANCE


def program(case):
    """Return the text of a step as it is before compilation."""
    this = setup(case)
    step = this.backend.compile_train(this.program.train_step)
    return str(jax.make_jaxpr(step)(this.shapes, this.batch(0)))


@each_case
def test_every_switch_changes_the_program(case):
    leaf, *_ = jax.tree.leaves(setup(case).shapes)
    assert len(leaf.sharding.device_set) == 8
    assert sent(case)
    assert not sent(REFERENCE)
    before = program(REFERENCE)
    after = program(case)

    def changed(pattern):
        return len(re.findall(pattern, before)) != len(re.findall(pattern, after))

    assert changed("remat|checkpoint") == (case.remat != "none")
    assert changed(rf"length={MODEL.num_layers}\b") == case.scanned
    assert changed(rf"unroll={MODEL.num_layers}\b") == (case.unroll > 1)
    assert changed(r"length=4\b") == (case.accumulate == 4)


@pytest.mark.parametrize("case", [PMAP, thorough(DATA), thorough(DATA_REMAT)], ids=str)
def test_data_parallel_sends_the_gradients_once_a_step(case):
    assert moved(case).keys() == {"all-reduce"}
    (gradients,) = [large for large in sent(case) if large.bytes > SCALARS]
    assert gradients.times == 1
    assert gradients.group == tuple(range(8))
    whole, _ = param_bytes(case)
    assert 0 <= gradients.bytes - whole <= SCALARS


@pytest.mark.thorough
def test_fsdp_gathers_parameters_and_scatters_gradients_once_a_step():
    whole, split = param_bytes(FSDP)
    traffic = moved(FSDP)
    assert traffic.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    assert traffic["all-gather"] == pytest.approx(split)
    assert traffic["reduce-scatter"] == traffic["all-gather"]
    assert traffic["all-reduce"] <= whole - split + SCALARS


@pytest.mark.parametrize("remat", ["full", thorough("dots")])
def test_fsdp_by_layer_gathers_kernels_twice_a_micro_batch_and_scatters_them_once(
    remat,
):
    # A policy that kept gathered kernels would gather them once.
    case = dataclasses.replace(BY_LAYER, remat=remat)
    params = setup(case).shapes.params
    layers = jax.tree.leaves(params["h"])
    matrices = [leaf for leaf in layers if leaf.ndim > 2]
    bias = params["h"]["attn"]["c_attn"]["bias"]  # which has three axes too
    kernels = 4 * (num_params(matrices) - bias.size)
    tables = 4 * num_params([params["wte"], params["wpe"]])
    whole, split = param_bytes(case)
    vectors = split - kernels - tables
    # Tokens of a micro-batch, whose vectors are looked up.
    tokens = 4 * 32 // 4 * MODEL.context_length
    activations = tokens * MODEL.embed_dim // 8
    traffic = moved(case)
    gathered = 4 * (2 * kernels + tables + tokens) + vectors
    assert traffic["all-gather"] == pytest.approx(gathered)
    scattered = 4 * (kernels + tables) + vectors
    assert traffic["reduce-scatter"] == pytest.approx(scattered)
    assert traffic["all-to-all"] == 4 * 2 * activations  # forward and backward
    assert traffic["all-reduce"] <= whole - split + SCALARS


@pytest.mark.thorough
def test_fsdp_by_layer_needs_less_memory_than_by_step():
    by_step = dataclasses.replace(BY_LAYER, layout="fsdp 8")
    peak_bytes = setup(BY_LAYER).compiled.peak_bytes
    assert peak_bytes < setup(by_step).compiled.peak_bytes


@pytest.mark.thorough
def test_zero1_sends_what_fsdp_sends():
    _, split = param_bytes(FSDP)
    traffic = moved(ZERO1)
    assert traffic["all-gather"] == pytest.approx(split)
    assert traffic["reduce-scatter"] == pytest.approx(split)


@pytest.mark.thorough
def test_megatron_holds_parts_of_the_sequence_between_layers():
    whole = dataclasses.replace(MEGATRON, layout="data 2 x tensor 4")
    peak_bytes = setup(MEGATRON).compiled.peak_bytes
    saved = setup(whole).compiled.peak_bytes - peak_bytes
    # Bytes of the residual stream of a layer, on half of the rows.
    stream = 4 * 16 * MODEL.context_length * MODEL.embed_dim
    assert saved > 0.5 * MODEL.num_layers * stream * (1 - 1 / 4)


# Top-2 of four experts, with a capacity that drops.
EXPERTS = {
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_capacity": 1.0,
    "activation": "swiglu",
    "mlp_dim": 64,
}
EXPERT_CASES = [
    dataclasses.replace(BY_LAYER, remat="dots"),
    PMAP,
    Case("fsdp 8 by layer"),
    Case("zero1 x 8", remat="mlp"),
    Case("fsdp 2 x megatron x 4", scanned=True),
    dataclasses.replace(MIXED, scanned=False),
    Case("data 2 x fsdp 2 x experts 2", remat="dots"),
    Case("data 2 x fsdp 2 x experts 2", scanned=True),
]


@pytest.mark.thorough
@pytest.mark.skipif("num_experts" not in vars(MODEL), reason="there are no experts")
@pytest.mark.parametrize("case", EXPERT_CASES, ids=str)
def test_experts_train_in_any_layout_as_on_one_device(case, reference):
    model = dataclasses.replace(MODEL, **EXPERTS)
    expected = setup(Case(model=model)).train()
    changes = abs(expected.losses / reference.losses - 1)
    assert changes.max() > 10 * TOLERANCE
    case = dataclasses.replace(case, model=model)
    assert difference(setup(case).train(), expected) < TOLERANCE
    layers = setup(case).shapes.params
    layer = layers["h" if case.scanned else "h_0"]
    kernel = layer["mlp"]["experts"]["c_fc"]["kernel"]
    splits_experts = "tensor" in kernel.sharding.spec[:-2]
    assert splits_experts == ("experts" in case.layout)


@pytest.mark.thorough
def test_dropout_draws_alike_whenever_parameters_are_gathered(reference):
    model = dataclasses.replace(MODEL, dropout=0.1, stochastic_depth=0.5)

    def train(layout):
        return setup(Case(layout, accumulate=4, model=model)).train()

    by_step = train("fsdp 8")
    assert difference(by_step, reference) > 50 * TOLERANCE
    assert difference(train("fsdp 8 by layer"), by_step) < TOLERANCE
    assert difference(train("zero1 x 8"), by_step) < TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_variants_of_other_platforms_train_alike_in_shards(
    monkeypatch, reference, platform
):
    monkeypatch.setattr("gpt2.parallel.kernels.platform_of", lambda _: platform)
    for case in (MIXED, BY_LAYER):
        case = dataclasses.replace(case, accumulate=1)
        result = Setup(case).train()
        assert difference(result, reference) < TOLERANCE


def test_accumulation_changes_nothing_that_crosses_the_data_axis():
    """Only what `tensor` sends, activations, may be sent once per micro-batch."""
    tensor_group = {0, 1}
    crossing = [c for c in sent(MIXED) if set(c.group) - tensor_group]
    assert {collective.times for collective in crossing} == {1}


@pytest.mark.thorough
def test_a_checkpoint_of_any_layout_continues_in_any_other(reference, tmp_path):
    others = [REFERENCE, PMAP, DATA, UNROLLED]
    from_pmap = continued(PMAP, [FSDP, TENSOR, MIXED], tmp_path / "pmap")
    from_mixed = continued(MIXED, others, tmp_path / "mixed")
    for result in (*from_pmap.values(), *from_mixed.values()):
        assert len(result.losses) == 3
        assert difference(result, reference) < TOLERANCE
