"""Norms of every tensor: those that numpy finds, in every layout, and no other training."""

import jax
import numpy as np
import pytest

from tests.helpers import by_name
from tests.training.test_guard import ROWS, T, make_program

BATCH = {
    "tokens": np.random.default_rng(0).integers(0, 64, (ROWS, T)).astype(np.int32),
    "targets": np.random.default_rng(1).integers(0, 64, (ROWS, T)).astype(np.int32),
}


def watch(layout):
    program = make_program(layout)
    state = program.init_state()
    batch = program.backend.put_batch(BATCH)
    return jax.device_get(program.compile_watch(state, batch)(1, state, batch))


@pytest.mark.thorough
def test_norms_are_those_of_the_step_itself():
    program = make_program()
    found = watch("one device")
    state = program.init_state()
    batch = program.backend.put_batch(BATCH)
    before = jax.device_get(state.params)  # the step takes the state's memory
    after, metrics = program.compile_train(state, batch)(state, batch)
    changes = jax.tree.map(lambda new, old: np.asarray(new) - old, after.params, before)
    for kind, tree in (("param", before), ("update", changes)):
        for name, leaf in by_name(tree).items():
            norm = np.sqrt(np.square(leaf.astype(np.float64)).sum())
            np.testing.assert_allclose(found[f"{kind}_norm/{name}"], norm, rtol=1e-4)
    norms = [norm for name, norm in found.items() if name.startswith("grad_norm/")]
    np.testing.assert_allclose(
        np.linalg.norm(norms), metrics["train/grad_norm"], rtol=1e-5
    )
    assert len(found) == 3 * len(jax.tree.leaves(before))


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["pmap", "by layer"])
def test_norms_do_not_depend_on_the_layout(layout):
    expected = watch("one device")
    found = watch(layout)
    assert expected.keys() == found.keys()
    for name, norm in expected.items():
        np.testing.assert_allclose(
            found[name], norm, rtol=2e-3, atol=1e-6, err_msg=name
        )
