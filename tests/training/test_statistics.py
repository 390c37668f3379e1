"""The norms of every tensor equal those of numpy, in every layout."""

import jax
import numpy as np
import pytest

from tests.helpers import batch_of, by_name
from tests.training.programs import ROWS, T, make_program


def initial(program):
    """Return the initial state and a batch, both on the devices."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (ROWS, T + 1), dtype=np.int32)
    batch = program.backend.put_batch(batch_of(tokens))
    return program.init_state(), batch


def watch(program, state, batch):
    norms = program.compile_watch(state, batch)(1, state, batch)
    return jax.device_get(norms)


@pytest.mark.thorough
def test_norms_are_those_of_the_step_itself():
    program = make_program()
    state, batch = initial(program)
    before = by_name(jax.device_get(state.params))
    found = watch(program, state, batch)
    step = program.compile_train(state, batch)
    after, metrics = step(state, batch)
    trained = by_name(after.params)
    grad_norms = []
    for name, old in before.items():
        norm = np.linalg.norm(np.float64(old))
        change = np.linalg.norm(np.float64(trained[name] - old))
        np.testing.assert_allclose(found[f"param_norm/{name}"], norm, rtol=1e-4)
        np.testing.assert_allclose(found[f"update_norm/{name}"], change, rtol=1e-4)
        grad_norms.append(found[f"grad_norm/{name}"])
    total = np.linalg.norm(grad_norms)
    np.testing.assert_allclose(total, metrics["train/grad_norm"], rtol=1e-5)
    assert len(found) == 3 * len(before)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["pmap", "by layer"])
def test_norms_do_not_depend_on_the_layout(layout):
    first = make_program()
    expected = watch(first, *initial(first))
    program = make_program(layout)
    found = watch(program, *initial(program))
    assert expected.keys() == found.keys()
    for name, norm in expected.items():
        np.testing.assert_allclose(found[name], norm, 2e-3, 1e-6, err_msg=name)
