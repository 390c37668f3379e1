"""Statistics of every tensor: those that numpy finds, in every layout, and no other training."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.telemetry.writers import NUM_BUCKETS
from gpt2.training.statistics import count_values
from tests.helpers import by_name
from tests.test_guard import ROWS, T, make_program

BATCH = {
    "tokens": np.random.default_rng(0).integers(0, 64, (ROWS, T)).astype(np.int32),
    "targets": np.random.default_rng(1).integers(0, 64, (ROWS, T)).astype(np.int32),
}


def watch(layout):
    program = make_program(layout)
    state, batch = program.init_state(), program.backend.put_batch(BATCH)
    return jax.device_get(program.compile_watch(state, batch)(1, state, batch))


@pytest.mark.thorough
def test_statistics_are_those_of_the_step_itself():
    program, found = make_program(), watch("one device")
    state, batch = program.init_state(), program.backend.put_batch(BATCH)
    before = jax.device_get(state.params)  # the step takes the state's memory
    after, metrics = program.compile_train(state, batch)(state, batch)
    changes = jax.tree.map(lambda new, old: np.asarray(new) - old, after.params, before)
    for kind, tree in (("param", before), ("update", changes)):
        for name, leaf in by_name(tree).items():
            norm = np.sqrt(np.square(leaf.astype(np.float64)).sum())
            np.testing.assert_allclose(found["norms"][f"{kind}_norm/{name}"], norm, rtol=1e-4)
    norms = [norm for name, norm in found["norms"].items() if name.startswith("grad_norm/")]
    np.testing.assert_allclose(np.linalg.norm(norms), metrics["train/grad_norm"], rtol=1e-5)
    sizes = {name: sum(each.counts) for name, each in found["histograms"].items()}
    leaves = jax.tree.leaves(before)
    assert sum(sizes.values()) == 3 * sum(leaf.size for leaf in leaves)
    assert len(found["norms"]) == len(sizes) == 3 * len(leaves)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["pmap", "by layer"])
def test_statistics_do_not_depend_on_the_layout(layout):
    expected, found = watch("one device"), watch(layout)
    assert expected["norms"].keys() == found["norms"].keys()
    for name, norm in expected["norms"].items():
        np.testing.assert_allclose(found["norms"][name], norm, rtol=2e-3, atol=1e-6, err_msg=name)
    weights = [name for name in expected["histograms"] if name.startswith("param/")]
    for name in weights:
        chex.assert_trees_all_equal(found["histograms"][name], expected["histograms"][name])


def test_a_histogram_counts_as_numpy_does():
    values = np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)
    found = jax.device_get(jax.jit(count_values)(values))
    counts, edges = np.histogram(values, NUM_BUCKETS)
    assert np.abs(found.counts - counts).sum() <= 2  # values within rounding of an edge
    np.testing.assert_allclose(found.edges, edges, rtol=1e-5)
    constant = jax.device_get(count_values(jnp.ones(7)))
    assert constant.counts.sum() == 7
