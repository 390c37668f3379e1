"""Skipped steps leave the same training as if their batches had never existed."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.training.checkpoint import Checkpointer
from gpt2.training.guard import Guard
from tests.helpers import thorough
from tests.training.programs import (
    LOUD,
    POISON,
    ROWS,
    compiled,
    make_batch,
    make_program,
    new_program,
)

FLOAT16 = "precision.compute=float16 model.num_layers=1"


def first_state(program, embedding=jnp.nan):
    """Return an initial state in which the embedding of one token is replaced."""
    state = program.init_state()
    old = state.params["wte"]["embedding"]
    new = old.at[POISON].set(embedding)
    table = jax.device_put(new, old.sharding)
    return state.replace(params=state.params | {"wte": {"embedding": table}})


def train(program, batches, poisoned=(), state=None):
    """Train on batches by their indices, and return the state and the metrics of each step."""
    step = compiled(program)
    history = []
    if state is None:
        state = first_state(program)
    for index in batches:
        row = ROWS - 1 if index in poisoned else None
        batch = make_batch(program, index, row)
        state, metrics = step(state, batch)
        history.append({name: float(value) for name, value in metrics.items()})
    return state, history


def values(history, name):
    """Return one metric of every step."""
    return [metrics[f"train/{name}"] for metrics in history]


def assert_trained_alike(state, expected):
    chex.assert_trees_all_equal(state.params, expected.params)
    chex.assert_trees_all_equal(state.opt_state, expected.opt_state)


@pytest.mark.parametrize(
    "layout", ["one device", thorough("pmap"), thorough("by layer")]
)
def test_a_skipped_step_is_as_if_its_batch_had_never_been(layout):
    program = make_program(layout, "train.skip_bad_steps=2")
    good = [0, 1, 4, 5, 7]
    poisoned = [2, 3, 6]
    state, history = train(program, range(8), poisoned)
    without, expected = train(program, good)
    assert_trained_alike(state, without)
    assert state.step == 8
    assert without.step == 5
    for name in ("loss", "grad_norm", "learning_rate"):
        found = values(history, name)
        assert [found[i] for i in good] == values(expected, name)
    assert values(history, "bad_in_a_row") == [0, 0, 1, 2, 0, 0, 1, 0]
    assert values(history, "skipped_steps") == [0, 0, 1, 2, 2, 2, 3, 3]
    losses = np.array(values(history, "loss"))
    assert np.isnan(losses[poisoned]).all()


@pytest.mark.thorough
def test_a_step_whose_gradient_alone_is_bad_is_skipped_too(breaking_norms):
    program = new_program(options="train.skip_bad_steps=1")
    whole, history = train(program, range(5), [2], first_state(program, LOUD))
    without, _ = train(program, [0, 1, 3, 4], [], first_state(program, LOUD))
    assert np.isfinite(values(history, "loss")).all()
    finite = np.isfinite(values(history, "grad_norm"))
    assert finite.tolist() == [True, True, False, True, True]
    assert values(history, "skipped_steps") == [0, 0, 1, 1, 1]
    assert_trained_alike(whole, without)


def test_without_the_option_the_same_step_spoils_the_run():
    state, history = train(make_program(), range(4), [2])
    assert not np.isfinite(history[3]["train/loss"])
    assert state.guard is None
    assert "train/skipped_steps" not in history[0]


def test_after_too_many_bad_steps_the_state_stays_as_it_is():
    program = make_program(options="train.skip_bad_steps=2")
    before, _ = train(program, range(1))
    state, history = train(program, range(6), [1, 2, 3])
    chex.assert_trees_all_equal(state.params, before.params)
    assert values(history, "bad_in_a_row") == [0, 1, 2, 3, 4, 5]


def with_loss_scale(state, scale):
    new = state.loss_scale.replace(scale=jnp.float32(scale))
    return state.replace(loss_scale=new)


@pytest.mark.thorough
def test_float16_that_overflows_is_no_bad_step_and_a_bad_batch_is_one():
    program = make_program(options=f"{FLOAT16} train.skip_bad_steps=1")
    huge = 2.0**24
    first = with_loss_scale(first_state(program), huge)
    before, _ = train(program, range(2), [], first)
    first = with_loss_scale(first_state(program), huge)
    state, history = train(program, range(3), [2], first)
    assert not np.isfinite(history[0]["train/grad_norm"])
    assert values(history, "skipped_steps") == [0, 0, 1]
    assert before.loss_scale.scale < huge
    chex.assert_trees_all_equal(state.loss_scale, before.loss_scale)
    program = make_program(options=FLOAT16)
    least = with_loss_scale(first_state(program), 1.0)
    _, history = train(program, range(2), [1], least)
    assert values(history, "bad_in_a_row") == [0, 1]


@pytest.mark.thorough
def test_what_was_skipped_is_counted_on_after_a_restart(tmp_path):
    program = make_program(options="train.skip_bad_steps=3")
    poisoned = [1, 2, 3]
    whole, history = train(program, range(6), poisoned)
    with Checkpointer(tmp_path) as checkpointer:

        def restart(state, step, program):
            checkpointer.save(state, step)
            checkpointer.wait()
            return checkpointer.restore(step, program)

        state, _ = train(program, range(3), poisoned)
        restored = restart(state, 3, program)
        again, rest = train(program, range(3, 6), poisoned, restored)
        chex.assert_trees_all_equal(again, whole)
        np.testing.assert_equal(rest, history[3:])
        # The options may change: without the guard its counts are dropped, and they begin again
        # with it.
        unguarded = checkpointer.restore(3, make_program())
        assert unguarded.guard is None
        chex.assert_trees_all_equal(unguarded.opt_state, state.opt_state)
        fresh = restart(unguarded.replace(step=jnp.int32(4)), 4, program)
        chex.assert_trees_all_equal(fresh.guard, Guard.create(3))
        # A streak that is longer than a lower limit does not end the run.
        saved, _ = train(program, range(4), poisoned)
        assert saved.guard.bad_in_a_row == 3
        lower = make_program(options="train.skip_bad_steps=1")
        restored = restart(saved.replace(step=jnp.int32(5)), 5, lower)
        assert restored.guard.skipped == 3
        assert restored.guard.bad_in_a_row == 1
