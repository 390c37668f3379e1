"""A diagnosis names the first tensor that is not finite: a parameter, an activation, a gradient."""

import itertools
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.data.loading.user_batches import BatchFunction, UserDataset
from gpt2.errors import DivergedError
from gpt2.training.batches import Batches
from gpt2.training.diagnosis import Diagnosis
from gpt2.training.losses import next_token_loss
from tests.helpers import thorough
from tests.training.programs import (
    LOUD,
    MICRO_BATCHES,
    POISON,
    ROWS,
    compiled,
    draw_batch,
    make_program,
    new_program,
)

CHECKPOINTER = SimpleNamespace(wait=lambda: None, position=lambda step: [])


def poisoned_batches(program, poison=(None, None)):
    """Return a user's batches; `poison` is the index of a batch and of a micro-batch."""
    poisoned, micro_batch = poison

    def function(split):
        for index in itertools.count():
            row = None
            if index == poisoned:  # on the last device
                rows = ROWS // program.backend.num_shards
                row = ROWS - rows + micro_batch * (rows // MICRO_BATCHES)
            yield draw_batch(index, row)

    dataset = UserDataset(None, BatchFunction("python:a:b", function, "code"))
    return Batches(program.config, dataset, program.backend)


def plant(state, name, value=np.nan, index=-1, layer=None):
    """Return a state with some elements of a parameter replaced, by their flat index."""

    def planted(path, leaf):
        if jax.tree_util.keystr(path, simple=True, separator="/") != name:
            return leaf
        flat = leaf.ravel() if layer is None else leaf.reshape(leaf.shape[0], -1)
        where = index if layer is None else (layer, index)
        changed = flat.at[where].set(value).reshape(leaf.shape)
        return jax.device_put(changed, leaf.sharding)

    params = jax.tree_util.tree_map_with_path(planted, state.params)
    return state.replace(params=params)


def diagnose(tmp_path, program, planted, poison=(None, None)):
    """Train until a step is not finite, and return the error message of a run."""
    batches = poisoned_batches(program, poison)
    step = compiled(program)
    steps = {program.config.shapes.at(1): (step, None)}

    def first_state(*_):
        return planted(program.init_state())

    diagnosis = Diagnosis(program, batches, tmp_path, CHECKPOINTER, steps, first_state)
    state = first_state()
    number = 0
    for batch in batches.train(0, 6):
        number += 1
        state, metrics = step(state, batch)
        has_loss = np.isfinite(metrics["train/loss"])
        is_good = has_loss and np.isfinite(metrics["train/grad_norm"])
        in_a_row = metrics.get("train/bad_in_a_row", not is_good)
        if in_a_row > program.config.train.skip_bad_steps:
            break
    else:
        pytest.fail("every step was finite")
    what = "The gradients are" if has_loss else "The loss is"
    error = diagnosis.explain(DivergedError(number, what, before=True), state)
    assert error.exit_code == 3
    return str(error)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("one device", ""),
        thorough("pmap", "memory.remat=full"),
        thorough("by layer", "memory.remat=full"),
    ],
)
def test_a_weight_and_an_output_are_named(tmp_path, layout, options):
    program = make_program(layout, options)

    def bad_weight(state):
        if program.config.memory.scan_layers:
            return plant(state, "h/mlp/c_fc/kernel", layer=1)
        return plant(state, "h_1/mlp/c_fc/kernel")

    message = diagnose(tmp_path, program, bad_weight)
    assert "at step 1: parameter h_1/mlp/c_fc/kernel was the first" in message

    # The embedding overflows in the block, and only where its token is looked up.
    def overflows(state):
        return plant(state, "wte/embedding", 3e38, slice(POISON * 16, None))

    message = diagnose(tmp_path, program, overflows, (2, 3))
    assert "at step 3: the output of h_0/ln_1 was the first" in message


@pytest.mark.thorough
def test_a_weight_is_named_where_bad_steps_are_skipped_too(tmp_path):
    program = make_program(options="train.skip_bad_steps=2")
    bad_weight = partial(plant, name="h_1/mlp/c_fc/kernel")
    message = diagnose(tmp_path, program, bad_weight)
    assert "at step 3: parameter h_1/mlp/c_fc/kernel was the first" in message


@pytest.mark.thorough
@pytest.mark.parametrize("scanned", [True, False])
def test_a_gradient_is_named(tmp_path, breaking_norms, scanned):
    row = slice(POISON * 16, (POISON + 1) * 16)
    loud = partial(plant, name="wte/embedding", value=LOUD, index=row)
    program = new_program(options=f"memory.scan_layers={scanned}")
    message = diagnose(tmp_path, program, loud, (2, 1))
    assert "The gradients are not finite at step 3" in message
    assert re.search(r"the gradient of h_1/mlp/c_proj/\w+ was the first", message)


@pytest.mark.thorough
def test_a_loss_that_was_swapped_is_the_one_that_is_run_again(tmp_path):
    def loss(model, options):
        def bad_for_poison(params, batch, *key_and_step):
            loss = next_token_loss(model, options)
            objective, sums = loss(params, batch, *key_and_step)
            is_poisoned = (batch["tokens"] == POISON).any()
            total, count = sums["loss"]
            bad_total = total + jnp.where(is_poisoned, jnp.inf, 0.0)
            return objective, sums | {"loss": (bad_total, count)}

        return bad_for_poison

    program = make_program(loss=loss)
    message = diagnose(tmp_path, program, lambda state: state, (0, 3))
    assert "at step 1: the loss was the first" in message


@pytest.mark.thorough
def test_a_validation_names_the_parameter_if_it_is_one(tmp_path):
    program = make_program()
    batches = poisoned_batches(program, (1, 0))
    diagnosis = Diagnosis(program, batches, tmp_path, CHECKPOINTER, None, None)
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    error = DivergedError(3, "the validation loss is", before=False)
    state = program.init_state()
    explained = diagnosis.explain(error, plant(state, "ln_f/scale"))
    assert "parameter ln_f/scale was the first" in str(explained)
    explained = diagnosis.explain(error, state)
    assert "every parameter is finite" in str(explained)
    explained = diagnosis.explain(error, None)  # which breaks the diagnosis
    assert "the first tensor with NaN or Inf was not found" in str(explained)


@pytest.mark.thorough
def test_batches_that_cannot_be_read_again_are_not_blamed_on_the_hardware(tmp_path):
    program = make_program()
    checkpointer = SimpleNamespace(wait=lambda: None, position=lambda step: [""])
    batches = poisoned_batches(program)
    diagnosis = Diagnosis(program, batches, tmp_path, checkpointer, None, None)
    error = DivergedError(3, "The loss is", before=True)
    explained = str(diagnosis.explain(error, program.init_state()))
    assert "a function that saves no state cannot be read again" in explained
    assert "hardware" not in explained
