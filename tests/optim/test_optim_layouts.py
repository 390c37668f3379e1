"""Every optimizer trains alike in every layout, and continues from a checkpoint of any other.

A few of them run by default, the whole table with `-m slow`.
"""

import dataclasses
import itertools

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from gpt2.config import ParallelConfig
from gpt2.config.options import OPTIONS
from gpt2.parallel.mesh import make_mesh
from gpt2.parallel.state_sharding import optimizer_specs
from tests.optim.updates import optim_of
from tests.programs.layouts import (
    MODEL,
    TOLERANCE,
    Case,
    continued,
    difference,
    loss_difference,
    setup,
)

pytestmark = pytest.mark.thorough

# Without biases: the gradient of one on all keys is zero in theory and noise in practice, which an
# update of fixed size would follow.
WITHOUT_BIASES = dataclasses.replace(MODEL, bias=False)
RATES = "learning_rate=1e-3"
OPTIMS = {name: f"name={name}" for name in OPTIONS["optim.name"].choices}
OPTIMS |= {
    "schedule_free": "name=schedule_free schedule=constant",
    "ema": "ema=0.9 layer_rates=h_1/=0.5",
    "normuon, tail average": """
        name=normuon orthogonalize=polar_express momentum_warmup=4 tail_average=0.8
        scheduled_weight_decay=True""",
    "muon on the hyperball": "name=muon hyperball=True adam_learning_rate=2e-3",
}
MESH = "fsdp 4 x tensor 2"
PMAP = "pmap x 8"


def case(name, layout="one device", scanned=False):
    optim = optim_of(f"{RATES} {OPTIMS[name]}")
    return Case(layout, scanned=scanned, optim=optim, model=WITHOUT_BIASES)


def assert_alike(name, result, reference):
    if name in ("soap", "soap_muon"):
        # In float32 its eigenvectors follow rounding, and the losses do not.
        assert loss_difference(result, reference) < 1e-4
    else:
        assert difference(result, reference) < TOLERANCE


SOME = [
    ("schedule_free", MESH, False),
    ("ema", PMAP, True),
    ("soap", MESH, True),
    ("normuon, tail average", MESH, True),
]
MORE = [("muon", MESH, False), ("soap", PMAP, True)]
MORE += [("muon on the hyperball", MESH, True), ("soap_muon", MESH, True)]
SLOW = []
for combination in itertools.product(OPTIMS, (MESH, PMAP), (False, True)):
    if combination not in SOME + MORE:
        SLOW.append(pytest.param(*combination, marks=pytest.mark.slow))


@pytest.mark.parametrize(("name", "layout", "scanned"), [*SOME, *MORE, *SLOW])
def test_every_optimizer_trains_in_any_layout_as_on_one_device(name, layout, scanned):
    reference = setup(case(name)).train()
    result = setup(case(name, layout, scanned)).train()
    assert_alike(name, result, reference)


@pytest.mark.parametrize(("name", "layout", "scanned"), SOME)
def test_a_checkpoint_continues_exactly_and_in_another_layout(
    name, layout, scanned, tmp_path
):
    here = case(name)
    there = case(name, layout, scanned)
    reference = setup(here).train()
    again = continued(here, [here, there], tmp_path / "here")
    back = continued(there, [here], tmp_path / "there")
    np.testing.assert_array_equal(again[here].losses, reference.losses[2:])
    chex.assert_trees_all_equal(again[here].params, reference.params)
    assert_alike(name, again[there], reference)
    assert_alike(name, back[here], reference)


# How state is split


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, np.float32)


def test_state_in_another_shape_keeps_the_axes_it_shares_with_its_parameter():
    params = {"kernel": shape(2, 64, 3, 4, 16)}
    axes = {"kernel": PartitionSpec(None, "fsdp", None, "tensor", None)}
    mesh = make_mesh(ParallelConfig(data=1, fsdp=4, tensor=2))

    def spec(*sizes):
        state = optax.TraceState(trace={"kernel": shape(*sizes)})
        specs = optimizer_specs(state, params, axes, mesh)
        return tuple(specs.trace["kernel"])

    assert spec(2, 64, 3, 4, 16) == tuple(axes["kernel"])
    assert spec(2, 64, 1, 1, 1) == (None, "fsdp", None, None, None)
    assert spec(2, 3, 4, 16) == (None, None, "tensor", None)
    assert spec(7) == ()
    assert spec(2, 192, 192) == (None, "fsdp", "tensor")
    assert spec(2, 190, 190) == (None, None, "tensor")
