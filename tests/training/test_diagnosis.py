"""What went bad first is named: a weight, an activation, a gradient."""

import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.errors import DivergedError
from gpt2.training.diagnosis import Diagnosis
from gpt2.training.losses import next_token_loss
from tests.helpers import thorough
from tests.training.test_guard import (
    MICRO_BATCHES,
    POISON,
    ROWS,
    breaking_norms,  # noqa: F401
    compiled,
    make_batch,
    make_program,
)


class StubBatches:
    """Batches as a run's batches gives them; `poison` is of one, and its micro-batch."""

    def __init__(self, program, poison=(None, None)):
        self.program = program
        self.poison = poison

    def batch(self, index):
        at, micro_batch = self.poison
        if index != at:
            return make_batch(self.program, index)
        rows = ROWS // self.program.backend.num_shards  # of a device; the last one's
        row = ROWS - rows + micro_batch * (rows // MICRO_BATCHES)
        return make_batch(self.program, index, row)

    def train(self, start, stop):
        return map(self.batch, range(start, stop))


def plant(state, path, value=np.nan, index=-1, layer=None):
    """Returns a state with one number of a parameter replaced."""

    def planted(at, leaf):
        if jax.tree_util.keystr(at, simple=True, separator="/") != path:
            return leaf
        row = leaf if layer is None else leaf[layer]
        flat = row.reshape(-1).at[index].set(value).reshape(row.shape)
        return jax.device_put(
            flat if layer is None else leaf.at[layer].set(flat), leaf.sharding
        )

    return state.replace(params=jax.tree_util.tree_map_with_path(planted, state.params))


def diagnose(tmp_path, program, planted, poison=(None, None)):
    """Trains until a step is not finite, and returns what a run would say."""
    batches = StubBatches(program, poison)
    step = compiled(program)
    steps = {program.config.shapes.at(1): (step, None)}
    first_state = lambda: planted(program.init_state())  # noqa: E731
    diagnosis = Diagnosis(
        program, batches, tmp_path, stub_checkpointer(), steps, first_state
    )
    state = first_state()
    with pytest.raises(DivergedError) as told:
        for number in itertools.count(1):
            state, metrics = step(state, batches.batch(number - 1))
            values = [
                float(metrics[name]) for name in ("train/loss", "train/grad_norm")
            ]
            in_a_row = metrics.get("train/bad_in_a_row", not np.isfinite(values).all())
            if in_a_row > program.config.train.skip_bad_steps:
                what = "the gradients are" if np.isfinite(values[0]) else "the loss is"
                raise DivergedError(number, what, before=True)
            assert number < 6
    ended = diagnosis.explain(told.value, state)
    assert ended.exit_code == 3
    return str(ended)


def stub_checkpointer():
    return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("one device", ""),
        thorough("pmap", "memory.remat=full"),
        thorough("by layer", "memory.remat=full"),
        pytest.param(
            *("by step", "memory.scan_layers=False memory.remat=full"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_weight_and_an_output_are_named(tmp_path, layout, options):
    program = make_program(layout, options)
    name, layer = "h_1/mlp/c_fc/kernel", None
    if program.config.memory.scan_layers:
        name, layer = "h/mlp/c_fc/kernel", 1
    told = diagnose(tmp_path, program, lambda state: plant(state, name, layer=layer))
    assert "at step 1: parameter h_1/mlp/c_fc/kernel was the first" in told
    # The row overflows in the block, and only where its token is looked up.
    huge = lambda state: plant(state, "wte/embedding", 3e38, slice(POISON * 16, None))  # noqa: E731
    for at, micro_batch in ((0, 0), (3, 2)):
        told = diagnose(tmp_path, program, huge, (at, micro_batch))
        assert f"at step {at + 1}: " in told
        assert "the output of h_0/ln_1 was the first" in told


@pytest.mark.thorough
def test_a_weight_is_named_where_bad_steps_are_skipped_too(tmp_path):
    program = make_program(options="train.skip_bad_steps=2")
    told = diagnose(
        tmp_path, program, lambda state: plant(state, "h_1/mlp/c_fc/kernel")
    )
    assert "at step 3: parameter h_1/mlp/c_fc/kernel was the first" in told


@pytest.mark.thorough
@pytest.mark.parametrize("scanned", [True, False])
def test_a_gradient_is_named(tmp_path, breaking_norms, scanned):  # noqa: F811
    loud = lambda state: plant(  # noqa: E731
        state,
        "wte/embedding",
        np.tile([100.0, -100.0], 8),
        slice(POISON * 16, (POISON + 1) * 16),
    )
    program = make_program.__wrapped__(options=f"memory.scan_layers={scanned}")
    told = diagnose(tmp_path, program, loud, (2, 1))
    assert "the gradients are not finite at step 3" in told
    assert re.search(r"the gradient of h_1/mlp/c_proj/\w+ was the first", told)


@pytest.mark.thorough
def test_a_loss_that_was_swapped_is_the_one_that_is_run_again(tmp_path):
    def loss(model, options):
        def bad_for_poison(params, batch, *key_and_step):
            loss = next_token_loss(model, options)
            objective, sums = loss(params, batch, *key_and_step)
            bad = jnp.where((batch["tokens"] == POISON).any(), jnp.inf, 0.0)
            return objective + bad, sums

        return bad_for_poison

    told = diagnose(tmp_path, make_program(loss=loss), lambda state: state, (0, 3))
    assert "at step 1: the loss was the first" in told


@pytest.mark.thorough
def test_a_validation_names_the_parameter_if_it_is_one(tmp_path):
    program = make_program()
    diagnosis = Diagnosis(
        program,
        StubBatches(program, (1, 0)),
        tmp_path,
        stub_checkpointer(),
        None,
        None,
    )
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    error = DivergedError(3, "the validation loss is", before=False)
    state = program.init_state()
    told = str(diagnosis.explain(error, plant(state, "ln_f/scale")))
    assert "parameter ln_f/scale was the first" in told
    assert "every parameter is finite" in str(diagnosis.explain(error, state))
    lost = Diagnosis(None, None, tmp_path, stub_checkpointer(), None, None)
    assert "the first such tensor was not found" in str(lost.explain(error, None))
