"""Steps that are skipped: the others come out as if their batches had never been."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.parallel import kernels
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.guard import Guard
from gpt2.training.losses import next_token_loss
from gpt2.training.program import Program
from tests.helpers import batch_of, configured, thorough

T = 8
ROWS = 32
MICRO_BATCHES = 4
POISON = 50
# A schedule that shows how many updates there were.
SMALL = f"""
    model.vocab_size=160 model.context_length={T} model.num_layers=2 model.num_heads=2
    model.embed_dim=16 model.tie_embeddings=False data.batch_size={ROWS}
    train.num_steps=10 train.accumulate_steps={MICRO_BATCHES} logging.watch_every=1
    optim.warmup_steps=2 optim.learning_rate=1e-2"""
LAYOUTS = {
    "one device": "",
    "pmap": "parallel.backend=pmap memory.scan_layers=True",
    "by layer": """
        parallel.data=2 parallel.fsdp=4 parallel.fsdp_gather=layer
        memory.scan_layers=True""",
    "by step": """
        parallel.data=2 parallel.fsdp=2 parallel.tensor=2 parallel.fsdp_gather=step
        memory.scan_layers=True""",
}
FLOAT16 = "precision.compute=float16 model.num_layers=1"


@functools.cache
def make_program(layout="one device", options="", loss=next_token_loss):
    """A tiny program in a layout, with some options changed."""
    config = configured(f"{SMALL} {LAYOUTS[layout]} {options}")
    devices = jax.devices()[: 1 if layout == "one device" else 8]
    return Program.from_config(config, devices, loss=loss)


@functools.cache
def compiled(program):
    return program.backend.compile_train(program.train_step)


def make_batch(program, index, row=None):
    """A batch on the devices, with the token in a row."""
    tokens = (
        np.random.default_rng(index).integers(0, POISON, (ROWS, T + 1)).astype(np.int32)
    )
    if row is not None:
        tokens[row, 3] = POISON
    return program.backend.put_batch(batch_of(tokens))


def first_state(program):
    """The state of a run in which one token is not finite."""
    state = program.init_state()
    table = state.params["wte"]["embedding"]
    table = jax.device_put(table.at[POISON].set(jnp.nan), table.sharding)
    return state.replace(params=state.params | {"wte": {"embedding": table}})


def train(program, batches, poisoned=(), state=None):
    """Returns the state after the batches of these numbers, and the metrics of each step."""
    step = compiled(program)
    seen = []
    state = first_state(program) if state is None else state
    for index in batches:
        batch = make_batch(program, index, ROWS - 1 if index in poisoned else None)
        state, metrics = step(state, batch)
        seen.append({name: float(value) for name, value in metrics.items()})
    return state, seen


@pytest.mark.parametrize(
    "layout", ["one device", *(thorough(n) for n in ("pmap", "by layer"))]
)
def test_a_skipped_step_is_as_if_its_batch_had_never_been(layout):
    program = make_program(layout, "train.skip_bad_steps=2")
    poisoned = {2, 3, 6}
    state, seen = train(program, range(8), poisoned)
    without, others = train(program, [i for i in range(8) if i not in poisoned])
    chex.assert_trees_all_equal(
        (state.params, state.opt_state), (without.params, without.opt_state)
    )
    assert (state.step, without.step) == (8, 5)
    kept = [metrics for i, metrics in enumerate(seen) if i not in poisoned]
    for name in ("train/loss", "train/grad_norm", "train/learning_rate"):
        assert [metrics[name] for metrics in kept] == [
            metrics[name] for metrics in others
        ]
    assert [metrics["train/bad_in_a_row"] for metrics in seen] == [
        0,
        0,
        1,
        2,
        0,
        0,
        1,
        0,
    ]
    assert [metrics["train/skipped_steps"] for metrics in seen] == [
        0,
        0,
        1,
        2,
        2,
        2,
        3,
        3,
    ]
    assert np.isnan([seen[i]["train/loss"] for i in poisoned]).all()


@jax.custom_vjp
def break_gradient(x):
    return x


break_gradient.defvjp(
    lambda x: (x, x), lambda x, dy: (jnp.where(jnp.abs(x).max() > 50, jnp.nan, dy),)
)


@pytest.fixture
def breaking_norms(monkeypatch):
    """The gradient alone breaks, where the stream is large: for a token with large weights."""
    norm = kernels.norm
    monkeypatch.setattr(
        kernels, "norm", lambda x, *rest, **kw: norm(break_gradient(x), *rest, **kw)
    )


@pytest.mark.thorough
def test_a_step_whose_gradient_alone_is_bad_is_skipped_too(breaking_norms):
    program = make_program.__wrapped__(options="train.skip_bad_steps=1")
    state = program.init_state()
    table = (
        state.params["wte"]["embedding"]
        .at[POISON]
        .set(jnp.tile(jnp.array([100.0, -100.0]), 8))
    )
    loud = state.replace(params=state.params | {"wte": {"embedding": table}})
    whole, seen = train(program, range(5), {2}, jax.tree.map(jnp.copy, loud))
    without, _ = train(program, [0, 1, 3, 4], (), loud)
    assert np.isfinite([metrics["train/loss"] for metrics in seen]).all()
    assert [np.isfinite(metrics["train/grad_norm"]) for metrics in seen] == [
        1,
        1,
        0,
        1,
        1,
    ]
    assert [metrics["train/skipped_steps"] for metrics in seen] == [0, 0, 1, 1, 1]
    chex.assert_trees_all_equal(
        (whole.params, whole.opt_state), (without.params, without.opt_state)
    )


def test_without_the_option_the_same_step_spoils_the_run():
    state, seen = train(make_program(), range(4), {2})
    assert not np.isfinite(seen[3]["train/loss"])
    assert state.guard is None and "train/skipped_steps" not in seen[0]


def test_after_too_many_bad_steps_the_state_stays_to_be_looked_at():
    program = make_program(options="train.skip_bad_steps=2")
    before, _ = train(program, range(2))
    state, seen = train(program, range(7), {2, 3, 4})
    chex.assert_trees_all_equal(state.params, before.params)
    assert [metrics["train/bad_in_a_row"] for metrics in seen] == [0, 0, 1, 2, 3, 4, 5]


@pytest.mark.thorough
def test_float16_that_overflows_is_no_bad_step_and_a_bad_batch_is_one():
    program = make_program(options=f"{FLOAT16} train.skip_bad_steps=1")
    state = first_state(program)
    huge = state.loss_scale.replace(scale=jnp.float32(2.0**24))
    loud = state.replace(loss_scale=huge)
    before, _ = train(program, range(2), (), jax.tree.map(jnp.copy, loud))
    state, seen = train(program, range(3), {2}, loud)
    assert not np.isfinite(seen[0]["train/grad_norm"])
    assert [metrics["train/skipped_steps"] for metrics in seen] == [0, 0, 1]
    assert before.loss_scale.scale < 2.0**24
    chex.assert_trees_all_equal(state.loss_scale, before.loss_scale)
    least = state.loss_scale.replace(scale=jnp.float32(1.0))
    program = make_program(options=FLOAT16)
    state = first_state(program).replace(loss_scale=least)
    _, seen = train(program, range(2), {1}, state)
    assert [metrics["train/bad_in_a_row"] for metrics in seen] == [0, 1]


@pytest.mark.thorough
def test_what_was_skipped_is_counted_on_after_a_restart(tmp_path):
    program = make_program(options="train.skip_bad_steps=3")
    whole, metrics = train(program, range(6), {1, 2, 3})
    with Checkpointer(tmp_path) as checkpointer:
        state, _ = train(program, range(3), {1, 2, 3})
        checkpointer.save(state, 3)
        checkpointer.wait()
        restored = checkpointer.restore(3, program)
        again, rest = train(program, range(3, 6), {1, 2, 3}, restored)
        chex.assert_trees_all_equal(again, whole)
        np.testing.assert_equal(rest, metrics[3:])
        # The options may change: without a guard it is dropped, and with one it starts anew.
        off = make_program()
        plain = checkpointer.restore(3, off)
        assert plain.guard is None
        chex.assert_trees_all_equal(plain.opt_state, state.opt_state)
        checkpointer.save(plain.replace(step=jnp.int32(4)), 4)
        checkpointer.wait()
        fresh = checkpointer.restore(4, program)
        chex.assert_trees_all_equal(fresh.guard, Guard.create(3))
        # A streak that is longer than a lower limit ends no run.
        saved, _ = train(program, range(4), {1, 2, 3})
        assert saved.guard.bad_in_a_row == saved.guard.skipped == 3
        checkpointer.save(saved.replace(step=jnp.int32(5)), 5)
        checkpointer.wait()
        lower = make_program(options="train.skip_bad_steps=1")
        after, seen = train(lower, [4], (), checkpointer.restore(5, lower))
        assert seen[0]["train/skipped_steps"] == 3
        assert after.guard.bad_in_a_row == 0
