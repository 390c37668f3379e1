"""What a checkpoint gives to those who come later."""

import contextlib
import dataclasses
import json
import re
import sys
import threading
import time
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import quickstart
from gpt2.config import Config, MemoryConfig, ModelConfig, OptimConfig, ParallelConfig
from gpt2.data.tokenizer import ByteTokenizer
from gpt2.errors import UserError
from gpt2.model import GPT
from gpt2.training import checkpoint_handlers
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.checkpoint_disk import check_disk
from gpt2.training.checkpoint_weights import load_params
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.weights import load_initial_params, load_model


def test_weights_trained_with_another_devices_attention_and_mesh_load_anywhere(tmp_path):
    model = ModelConfig(vocab_size=50, context_length=128, num_layers=1, num_heads=2, embed_dim=16)
    config = dataclasses.replace(
        Config.from_dict(quickstart.get_config()),
        model=dataclasses.replace(model, attention="splash"),
        parallel=ParallelConfig(data=16, fsdp=4),
        memory=MemoryConfig(remat="full", scan_layers=True),
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    init = jax.jit(GPT(config.gpt()).init)
    params = init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(TrainState.create(params, optax.sgd(1.0), "float32"), step=1)

    loaded, loaded_params = load_params(tmp_path)
    chex.assert_trees_all_equal(loaded_params, params)
    assert loaded.model == model
    assert loaded.parallel == ParallelConfig()
    assert loaded.memory == MemoryConfig(scan_layers=True)
    apply, tokens = jax.jit(GPT(loaded.gpt()).apply), jnp.zeros((1, 8), jnp.int32)
    chex.assert_tree_all_finite(apply({"params": loaded_params}, tokens))


# What a run saved, by step: its validation loss there, None where it was not validated.
LOSSES = {10: 4.0, 20: 2.0, 30: 3.0, 40: None, 50: 2.5, 60: None}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run that kept its two newest checkpoints; every parameter is the step it was saved at."""
    workdir = tmp_path_factory.mktemp("run")
    model = ModelConfig(vocab_size=257, context_length=8, num_layers=1, num_heads=2, embed_dim=16)
    config = dataclasses.replace(Config.from_dict(quickstart.get_config()), model=model)
    (workdir / "config.json").write_text(json.dumps(config.to_dict()))
    ByteTokenizer().save(workdir / "tokenizer.json")
    tokens = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(GPT(config.gpt()).init, jax.random.key(0), tokens)["params"]
    with Checkpointer(workdir, num_latest=2) as checkpointer:
        for step, loss in LOSSES.items():
            ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)
            params = jax.tree.map(partial(jnp.multiply, step), ones)
            checkpointer.save(
                TrainState.create(params, optax.sgd(1.0), "float32"),
                step,
                loss and {"eval/loss": loss},
            )
        checkpointer.wait()
        return workdir, config.gpt(), checkpointer.all_steps(), checkpointer.best()


@pytest.mark.thorough
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_save_a_minute_costs_the_loop_less_than_a_twentieth_of_its_time(
    tmp_path, monkeypatch, synchronous
):
    """With 100 MB for a store that takes 4 s, which a synchronous save waits for."""
    digest = checkpoint_handlers.digest_folder
    slow = lambda folder: time.sleep(4) or digest(folder)  # noqa: E731
    monkeypatch.setattr(checkpoint_handlers, "digest_folder", slow)
    params = {str(i): jnp.full((512, 1024), i, jnp.float32) for i in range(16)}
    state = TrainState.create(params, optax.adamw(1.0), "float32")
    with Checkpointer(tmp_path, parameters_in_flight=2**40 if synchronous else None) as saver:
        began = time.perf_counter()
        saver.save(state, 1)
        blocked = time.perf_counter() - began
        assert (blocked < 0.05 * 60) != synchronous
        saver.wait()
        assert time.perf_counter() - began > 4
        assert saver.longest_seconds > 4


def test_what_orbax_removes_as_it_opens_is_never_the_look_at_the_disk(tmp_path):
    """Its thread removes the remains of killed saves while the first save may have begun."""
    done = threading.Event()

    def remove_remains():
        while not done.is_set():
            for remains in tmp_path.glob("*.orbax-checkpoint-tmp*"):
                with contextlib.suppress(FileNotFoundError):  # the other thread was first
                    remains.rmdir()

    remover = threading.Thread(target=remove_remains)
    remover.start()
    try:
        for _ in range(2000):
            check_disk(tmp_path, 1)
    finally:
        done.set()
        remover.join()
    assert list(tmp_path.iterdir()) == []


def steps_in(params):
    return {float(value) for leaf in jax.tree.leaves(params) for value in leaf.ravel()}


def test_the_newest_checkpoints_and_the_best_survive(saved):
    workdir, _, steps, best = saved
    assert steps == [20, 50, 60]
    assert best == (20, 2.0)
    on_disk = {int(path.name) for path in (workdir / "checkpoints").iterdir()}
    assert on_disk == {20, 50, 60}
    with Checkpointer(workdir, read_only=True) as reopened:
        assert (reopened.all_steps(), reopened.best()) == (steps, best)


@pytest.mark.parametrize(
    ("num_latest", "keep_every", "kept"),
    [(1, 0, [20, 60]), (1, 20, [20, 40, 60]), (2, 30, [20, 30, 50, 60])],
)
def test_every_so_many_steps_a_checkpoint_is_kept_for_good(tmp_path, num_latest, keep_every, kept):
    state = TrainState.create({"x": jnp.ones(4)}, optax.sgd(1.0), "float32")
    for half in (list(LOSSES.items())[:3], list(LOSSES.items())[3:]):  # over a restart
        with Checkpointer(tmp_path, num_latest, keep_every) as checkpointer:
            for step, loss in half:
                checkpointer.save(state, step, loss and {"eval/loss": loss})
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        assert checkpointer.all_steps() == kept


@pytest.mark.parametrize(
    ("params", "optimizer", "message"),
    [
        ({"a": (2, 3)}, optax.adam, "a is float32[2, 2], not float32[2, 3]"),
        ({}, optax.adam, "it has opt_state/0/mu/a, opt_state/0/nu/a, params/a beside"),
        ({"a": (2, 2), "c": (1,)}, optax.adam, "it lacks opt_state/0/mu/c, opt_state/0/nu/c, pa"),
        ({"a": (2, 2)}, optax.lion, "it has opt_state/0/nu/a beside"),
        ({"a": (2, 2)}, optax.adagrad, "it lacks opt_state/0/sum_of_squares/a"),
    ],
)
def test_restoring_another_shape_or_optimizer_names_the_arrays_that_differ(
    tmp_path, params, optimizer, message
):
    def state(shapes, optimizer):
        arrays = {name: jnp.ones(shape) for name, shape in shapes.items()}
        return TrainState.create(arrays, optimizer(1.0), "float32")

    with Checkpointer(tmp_path) as checkpointer:
        saved = state({"a": (2, 2)}, optax.adam)
        checkpointer.save(saved, 1)
        checkpointer.wait()
        chex.assert_trees_all_equal(checkpointer.restore(1, saved), saved)
        with pytest.raises(UserError, match=re.escape(message)) as error:
            checkpointer.restore(1, state(params, optimizer))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("which", "step"), [("best", 20), ("latest", 60), ("50", 50), (50, 50)])
def test_best_latest_and_a_step_load_what_was_saved_there(saved, which, step):
    workdir = saved[0]
    assert steps_in(load_model(workdir, None, which)[1]) == {step}


@pytest.mark.parametrize(("suffix", "step"), [("", 20), ("@50", 50)])
def test_a_run_starts_from_the_best_of_another_or_from_a_step_of_it(saved, suffix, step):
    workdir, cfg, *_ = saved
    params = load_initial_params(f"run:{workdir}{suffix}", cfg, ByteTokenizer())
    assert steps_in(params) == {step}


def test_a_step_that_was_not_kept_is_told_with_those_that_were(saved):
    with pytest.raises(UserError, match=r"has no checkpoint 30. Use best, latest or 20, 50, 60"):
        load_params(saved[0], "30")


def test_the_latest_stands_for_the_best_where_none_was_validated(saved, tmp_path):
    workdir = saved[0]
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((workdir / name).read_bytes())
    _, params = load_params(workdir, 50)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(TrainState.create(params, optax.sgd(1.0), "float32"), step=5)
        assert checkpointer.best() is None
    assert steps_in(load_model(tmp_path, None, "best")[1]) == {50}


def averaging(workdir, **optim):
    """The program of a small run whose optimizer keeps an average."""
    model = ModelConfig(vocab_size=257, context_length=8, num_layers=2, num_heads=2, embed_dim=16)
    config = dataclasses.replace(
        Config.from_dict(quickstart.get_config()), model=model, optim=OptimConfig(**optim)
    )
    (workdir / "config.json").write_text(json.dumps(config.to_dict()))
    return Program.from_config(config, jax.devices()[:1])


CONSTANT = dict(schedule="constant", learning_rate=1e-2, end_learning_rate=1e-2, warmup_steps=0)


@pytest.mark.parametrize(
    "optim",
    [
        pytest.param(dict(ema=0.9), id="ema"),
        pytest.param(
            dict(name="schedule_free", **CONSTANT), id="schedule_free", marks=pytest.mark.thorough
        ),
    ],
)
def test_a_run_that_averages_gives_its_average_and_continues_with_its_weights(tmp_path, optim):
    program = averaging(tmp_path, **optim)
    state = program.init_state()
    batch = {name: np.ones((8, 8), np.int32) for name in ("tokens", "targets")}
    step = jax.jit(program.train_step)
    for _ in range(3):
        state, _ = step(state, batch)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, step=3)
        checkpointer.wait()
        again = checkpointer.restore(3, program.state_shapes)
    chex.assert_trees_all_equal(again, state)
    _, loaded = load_params(tmp_path)
    chex.assert_trees_all_close(loaded, state.eval_params, rtol=1e-6)
    table, trained = loaded["wte"]["embedding"], state.params["wte"]["embedding"]
    assert jnp.abs(table - trained).max() > 1e-6


def test_an_average_begins_with_the_weights_that_a_run_starts_from(tmp_path):
    program = averaging(tmp_path, ema=0.9)
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 7.0, np.float32), program.init_params())
    state = program.init_state(params)
    assert steps_in(state.params) == steps_in(state.eval_params) == {7.0}


def test_a_checkpointer_leaves_python_as_it_was(tmp_path, monkeypatch):
    hook = sys.unraisablehook
    writer = Checkpointer(tmp_path)
    assert sys.unraisablehook is hook
    writer.close()
    with Checkpointer(tmp_path, read_only=True):  # what it reads may be damaged
        assert sys.unraisablehook is not hook
    assert sys.unraisablehook is hook
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpointer:
        assert sys.unraisablehook is not hook
        monkeypatch.setattr(checkpointer, "close", lambda: 1 / 0)
    assert sys.unraisablehook is hook
