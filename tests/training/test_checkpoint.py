"""Checkpoints restore what was saved, are complete or absent, and damage is noticed."""

import contextlib
import gc
import shutil
import subprocess
from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gpt2.config import ParallelConfig
from gpt2.data.tokenizer import build
from gpt2.errors import UserError
from gpt2.hf import weights
from gpt2.hf.weights import load_initial_params, load_model, load_params
from gpt2.model import GPT
from gpt2.training import checkpoint
from gpt2.training import workdir as run_files
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.checkpoint_files import find_damage, saved_steps
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.utils import files
from tests.helpers import DAMAGES, first_params, flip_a_bit, thorough
from tests.programs.faults.kinds import mounted
from tests.training.workdirs import make_config, write_run

# The validation loss of each saved step; None: it was not validated.
LOSSES = {10: 4.0, 20: 2.0, 30: 3.0, 40: None, 50: 2.5, 60: None}


def state_at(step, params=None, optimizer=optax.sgd(1.0)):  # noqa: B008
    if params is None:
        params = {"x": jnp.ones(4)}
    state = TrainState.create(params, optimizer, "float32")
    return state.replace(step=jnp.int32(step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Write a run with its two newest checkpoints, in which every parameter equals the step."""
    workdir = tmp_path_factory.mktemp("run")
    config = make_config("model.vocab_size=257")
    write_run(workdir, config)
    build("byte").save(workdir / "tokenizer.json")
    tokens = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(GPT(config.gpt()).init, jax.random.key(0), tokens)["params"]
    with Checkpointer(workdir, keep=2) as checkpointer:
        for step, loss in LOSSES.items():
            params = jax.tree.map(partial(jnp.full_like, fill_value=step), shapes)
            state = state_at(step, params)
            checkpointer.save(state, step, loss and {"eval/loss": loss})
        checkpointer.wait()
        return workdir, config.gpt(), checkpointer.all_steps(), checkpointer.best()


def steps_in(params):
    steps = set()
    for leaf in jax.tree.leaves(params):
        steps |= {float(value) for value in leaf.ravel()}
    return steps


def test_every_so_many_steps_a_checkpoint_is_kept_for_good(tmp_path):
    losses = [*LOSSES.items()]
    for part in (losses[:3], losses[3:]):  # with a restart between them
        with Checkpointer(tmp_path, keep=2, keep_every=30) as checkpointer:
            for step, loss in part:
                checkpointer.save(state_at(step), step, loss and {"eval/loss": loss})
    # The best by its loss, two that are multiples of 30, and the newest two.
    assert saved_steps(tmp_path) == [20, 30, 50, 60]


def test_a_run_starts_from_the_best_of_another_or_from_a_step_of_it(saved):
    workdir, cfg, steps, best = saved
    assert steps == saved_steps(workdir) == [20, 50, 60]
    assert best == (20, 2.0)
    for suffix, step in (("", 20), ("@50", 50)):
        params = load_initial_params(f"run:{workdir}{suffix}", cfg, build("byte"))
        assert steps_in(params) == {step}
    with pytest.raises(UserError, match=r"checkpoint=30 is not one of 20, 50, 60"):
        load_params(workdir, "30")


def test_scores_that_are_damaged_matter_to_the_best_alone(saved, tmp_path):
    workdir = shutil.copytree(saved[0], tmp_path / "run")
    (workdir / "checkpoints/50/metrics/metrics").write_text("{}")
    with pytest.raises(UserError, match=r"50 is damaged \(metrics/metrics"):
        load_params(workdir)
    assert steps_in(load_params(workdir, "latest")[1]) == {60}
    (workdir / "checkpoints/50/metrics/metrics").write_text("")
    with pytest.raises(UserError, match=r"50 is damaged \(metrics/metrics"):
        load_params(workdir)
    with pytest.raises(UserError, match="checkpoints cannot be opened"):
        load_params(workdir, "latest")


def test_a_checkpoint_that_a_run_removes_meanwhile_is_not_called_damaged(
    saved, tmp_path, monkeypatch
):
    workdir = shutil.copytree(saved[0], tmp_path / "run")
    find = weights.find_damage

    def remove_first(*given):
        shutil.rmtree(workdir / "checkpoints/50", ignore_errors=True)
        return find(*given)

    monkeypatch.setattr(weights, "find_damage", remove_first)
    assert steps_in(load_params(workdir)[1]) == {20}


def test_a_checkpoint_that_a_run_is_removing_is_not_called_damaged(
    saved, tmp_path, monkeypatch
):
    workdir = shutil.copytree(saved[0], tmp_path / "run")
    assert files.lock_for_good(workdir / ".lock")
    shutil.rmtree(workdir / "checkpoints/20/digests")

    def remove_rest(seconds):
        shutil.rmtree(workdir / "checkpoints/20")

    monkeypatch.setattr(weights.time, "sleep", remove_rest)
    assert steps_in(load_params(workdir)[1]) == {50}


def test_the_latest_stands_for_the_best_where_none_was_validated(saved, tmp_path):
    workdir = saved[0]
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(workdir / name, tmp_path / name)
    _, params = load_params(workdir, 50)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state_at(5, params), step=5)
        assert checkpointer.best() is None
    assert steps_in(load_model(tmp_path, None, "best")[1]) == {50}


@pytest.mark.parametrize(("trained", "used"), [("splash", "auto"), ("plain", "plain")])
def test_weights_trained_with_another_devices_attention_and_mesh_load_anywhere(
    tmp_path, trained, used
):
    config = make_config(f"""
        model.context_length=128 model.attention={trained} parallel.data=16
        memory.remat=full memory.scan_layers=True""")
    write_run(tmp_path, config)
    params = first_params(config.gpt())
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state_at(1, params), step=1)
    loaded, loaded_params = load_params(tmp_path)
    chex.assert_trees_all_equal(loaded_params, params)
    expected = make_config(f"""
        model.context_length=128 model.attention={used} memory.scan_layers=True""")
    assert loaded.model == expected.model
    assert loaded.memory == expected.memory
    assert loaded.parallel == ParallelConfig()


def test_another_shape_or_optimizer_is_not_restored(tmp_path):
    def state(optimizer=optax.adam, **shapes):
        params = {name: jnp.ones(shape) for name, shape in shapes.items()}
        return state_at(1, params, optimizer(1.0))

    others = [
        state(a=(2, 3)),
        state(),
        state(a=(2, 2), c=(1,)),
        state(optax.adagrad, a=(2, 2)),
    ]
    with Checkpointer(tmp_path) as checkpointer:
        saved = state(a=(2, 2))
        checkpointer.save(saved, 1)
        checkpointer.wait()
        program = SimpleNamespace(state_shapes=saved)
        chex.assert_trees_all_equal(checkpointer.restore(1, program), saved)
        for other in others:
            program = SimpleNamespace(state_shapes=other)
            with pytest.raises(UserError, match="cannot be read"):
                checkpointer.restore(1, program)


@pytest.mark.parametrize(
    "optim",
    [
        thorough("optim.ema=0.9"),
        thorough("optim.tail_average=1.0 optim.schedule=constant optim.warmup_steps=0"),
        thorough("optim.name=schedule_free optim.schedule=constant"),
    ],
)
def test_a_run_that_averages_gives_its_average_and_continues_with_its_weights(
    tmp_path, optim
):
    config = make_config(f"model.vocab_size=257 model.num_layers=2 {optim}")
    write_run(tmp_path, config)
    program = Program.from_config(config, jax.devices()[:1])
    state = program.init_state()
    batch = {name: np.ones((8, 8), np.int32) for name in ("tokens", "targets")}
    step = jax.jit(program.train_step)
    for _ in range(3):
        state, _ = step(state, batch)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, step=3)
        checkpointer.wait()
        again = checkpointer.restore(3, program)
    chex.assert_trees_all_equal(again, state)
    _, loaded = load_params(tmp_path)
    chex.assert_trees_all_close(loaded, state.eval_params, rtol=1e-6)
    table = loaded["wte"]["embedding"]
    trained = state.params["wte"]["embedding"]
    assert jnp.abs(table - trained).max() > 1e-6


def save_checkpoints(workdir, *steps):
    """Write a run with checkpoints of a tiny model."""
    config = make_config()
    write_run(workdir, config)
    params = first_params(config.gpt())
    with Checkpointer(workdir, keep=len(steps)) as checkpointer:
        for step in steps:
            state = state_at(step, params, optax.adam(1.0))
            checkpointer.save(state, step, {"eval/loss": 10.0 - step})


def test_only_plain_decimal_names_are_checkpoints(tmp_path):
    save_checkpoints(tmp_path, 2)
    folder = tmp_path / "checkpoints"
    for name in ("012", "²", "-1", "x", "1_000"):
        shutil.copytree(folder / "2", folder / name)
    assert run_files.find_start(tmp_path) == 2
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.all_steps() == [2]
    load_params(tmp_path, "latest")


def test_damage_to_any_file_is_noticed_and_the_checkpoint_before_it_is_taken(
    tmp_path, capsys
):
    save_checkpoints(tmp_path, 2, 4)
    newest = tmp_path / "checkpoints" / "4"
    copy = tmp_path / "copy"
    assert find_damage(tmp_path, 4) == ""
    assert run_files.find_start(tmp_path) == 4
    shutil.copytree(newest, copy)
    # Orbax writes notes on the whole and, since 0.12.3, on its digests, which nothing reads.
    note = newest / "digests" / "commit_success.txt"
    files = []
    for path in newest.rglob("*"):
        if path.is_file() and path.parent != newest and path != note:
            files.append(path)
    folders = {path.relative_to(newest).parts[0] for path in files}
    assert folders == {"params", "rest", "layout", "metrics", "digests"}
    for path in files:
        for damage in DAMAGES:
            damage(path)
            assert run_files.find_start(tmp_path) == 2, (path, damage)
            warning = capsys.readouterr().err
            assert f"{newest} is damaged" in warning
            assert "step 2" in warning
            assert warning.count("\n") == 1
            shutil.copy(copy / path.relative_to(newest), path)
    assert run_files.find_start(tmp_path) == 4
    flip_a_bit(next(path for path in files if "params" in path.parts))
    with pytest.raises(UserError, match=r"4 is damaged \(params/"):
        load_params(tmp_path, "latest")
    shutil.rmtree(tmp_path / "checkpoints" / "2")
    with pytest.raises(
        UserError, match=r"4 is damaged \(params/.*no undamaged checkpoint"
    ):
        run_files.find_start(tmp_path)


def test_damaged_scores_of_an_older_checkpoint_do_not_count(tmp_path):
    run_path = tmp_path / "run"
    data = SimpleNamespace(describe=dict, tokenizer=build("byte"))
    save_checkpoints(run_path, 2, 4)
    scores = run_path / "checkpoints/2/metrics/metrics"
    scores.write_text(scores.read_text().replace("8.0", "0.0"))
    run_files.begin(run_path, make_config(), data, 4)
    assert {path.name[0] for path in (run_path / "damaged").iterdir()} == {"2"}
    with Checkpointer(run_path) as checkpointer:
        assert checkpointer.best() == (4, 6.0)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_save_on_a_full_disk_prints_one_line_with_its_cause(tmp_path, capfd, caplog):
    params = {str(i): np.random.default_rng(i).normal(size=10**6) for i in range(9)}
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(mounted(tmp_path / "disk"))
        except (FileNotFoundError, subprocess.CalledProcessError):
            pytest.skip("mounting a small disk takes root")
        checkpointer = stack.enter_context(Checkpointer(tmp_path / "disk"))
        checkpointer.save(state_at(1, params), 1)
        checkpointer.wait()
        gc.collect()  # Tasks that nobody has awaited report when they are deleted.
        assert "(No space left on device)" in checkpointer.failure
    assert capfd.readouterr().err.count("\n") == 1
    assert caplog.messages == []


def test_a_save_that_fails_prints_a_warning_and_the_next_is_tried(
    tmp_path, monkeypatch, capsys
):
    with Checkpointer(tmp_path) as checkpointer, monkeypatch.context() as patched:
        checkpointer.save(state_at(1), 1)
        checkpointer.wait()
        # In the saving thread.
        patched.setattr(checkpoint, "digest_folder", lambda folder: 1 / 0)
        checkpointer.save(state_at(3), 3, {"eval/loss": 2.0})
        # The state with 2.0 was not saved.
        assert checkpointer.improves({"eval/loss": 2.5})
        assert "step 3 could not be saved" in checkpointer.failure
        assert "the run continues" in capsys.readouterr().err
        patched.undo()
        checkpointer.save(state_at(4), 4)
        checkpointer.wait()
        assert checkpointer.failure == ""
        assert checkpointer.all_steps() == [4]
