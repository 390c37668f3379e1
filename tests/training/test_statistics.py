"""The norms of every tensor and the noise of gradients equal those of numpy, in every layout."""

import jax
import jax.flatten_util
import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.training.losses import next_token_loss
from tests.helpers import batch_of, by_name, thorough
from tests.training.programs import ROWS, T, make_program


def initial(program):
    """Return the initial state and a batch, both on the devices."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (ROWS, T + 1), dtype=np.int32)
    batch = program.backend.put_batch(batch_of(tokens))
    return program.init_state(), batch


def watch(program, state, batch):
    norms = program.compile_watch(state, batch)(state, batch)
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


def step_metrics(layout, options):
    """Return the metrics of the first step on a batch of `ROWS` rows."""
    program = make_program(layout, f"logging.noise_scale=True {options}")
    state, batch = initial(program)
    step = program.backend.compile_train(program.train_step)
    _, metrics = step(state, batch)
    return jax.device_get(metrics)


@pytest.fixture(scope="module")
def noise_and_signal():
    """The noise and the signal of a token, from the gradient of each single row."""
    program = make_program()
    state, _ = initial(program)
    rng = np.random.default_rng(0)
    batch = batch_of(rng.integers(0, 64, (ROWS, T + 1), dtype=np.int32))

    @jax.jit
    def gradient(row):
        loss = next_token_loss(program.model)
        grads, sums = jax.grad(loss, has_aux=True)(state.params, row)
        return jax.flatten_util.ravel_pytree(grads)[0] / sums["loss"][1]

    grads = []
    for row in range(ROWS):
        single = {name: values[row : row + 1] for name, values in batch.items()}
        grads.append(np.float64(gradient(single)))
    variance = np.var(grads, axis=0, ddof=1).sum()
    square = np.sum(np.mean(grads, axis=0) ** 2)
    return T * variance, square - variance / ROWS


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("one device", f"train.accumulate_steps={ROWS}"),
        thorough("pmap", "train.accumulate_steps=4"),
        thorough("by layer", "parallel.fsdp_gather=step train.accumulate_steps=4"),
        thorough(
            "one device",
            f"train.accumulate_steps={ROWS} precision.compute=float16",
        ),
    ],
)
def test_noise_and_signal_are_those_of_single_rows(noise_and_signal, layout, options):
    metrics = step_metrics(layout, options)
    noise, signal = noise_and_signal
    rtol = 2e-2 if "float16" in options else 1e-4
    np.testing.assert_allclose(metrics["train/gradient_noise"], noise, rtol)
    np.testing.assert_allclose(metrics["train/gradient_signal"], signal, rtol)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("one device", "train.accumulate_steps=1", "a step has only one"),
        ("by layer", "", "gather parameters by layer"),
    ],
)
def test_noise_without_gradients_to_compare_is_refused(layout, options, message):
    with pytest.raises(UserError, match=message):
        make_program(layout, f"logging.noise_scale=True {options}")
