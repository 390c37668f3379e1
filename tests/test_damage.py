"""Damaged checkpoints are noticed, named and passed over. A full disk ends no run."""

import errno
import re
import shutil
import subprocess
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gpt2.errors import UserError
from gpt2.model import GPT
from gpt2.training import checkpoint_handlers
from gpt2.training import workdir as run_files
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.checkpoint_files import find_damage, set_aside
from gpt2.training.checkpoint_weights import load_params
from gpt2.training.state import TrainState
from gpt2.utils import digests
from tests.helpers import TINY, metrics_of, params_of, run
from tests.test_workdir import make_config, write_run


def save_checkpoints(workdir, *steps):
    """A run whose checkpoints are of a tiny model."""
    config = make_config()
    if not workdir.exists() or not (workdir / "config.json").exists():
        write_run(workdir, config)
    init = jax.jit(GPT(config.gpt()).init)
    params = init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    state = TrainState.create(params, optax.adam(1.0), "float32")
    with Checkpointer(workdir, num_latest=len(steps)) as checkpointer:
        for step in steps:
            checkpointer.save(state, step, {"eval/loss": 10.0 - step})


def remove(path):
    path.unlink()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def files_of(checkpoint):
    """The files of a checkpoint, without Orbax's notes on the whole and on its digests."""
    return [
        path
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
        and path.parent != checkpoint
        and path.relative_to(checkpoint) != Path("digests/commit_success.txt")
    ]


def test_damage_to_any_file_is_noticed_and_the_checkpoint_before_it_is_taken(tmp_path, capsys):
    save_checkpoints(tmp_path, 2, 4)
    newest, copy = tmp_path / "checkpoints" / "4", tmp_path / "copy"
    assert find_damage(tmp_path, 4) == "" and run_files.find_start(tmp_path) == 4
    shutil.copytree(newest, copy)
    files = files_of(newest)
    assert {path.relative_to(newest).parts[0] for path in files} == {
        *("params", "rest", "layout", "metrics", "digests")
    }
    for path in files:
        for damage in (remove, cut, flip_a_bit):
            damage(path)
            assert run_files.find_start(tmp_path) == 2, (path, damage)
            told = capsys.readouterr().err
            assert told.startswith(f"warning: checkpoint {newest} is damaged (")
            assert told.count("\n") == 2 and "continues from step 2" in told
            if path.relative_to(newest).parts[0] == "params" and damage is cut:
                with pytest.raises(UserError, match=r"4 is damaged .* a copy, or use 2\.$"):
                    load_params(tmp_path, "latest")
            shutil.copy(copy / path.relative_to(newest), path)
    assert run_files.find_start(tmp_path) == 4
    shutil.rmtree(tmp_path / "checkpoints" / "2")
    flip_a_bit(next(path for path in files if "params" in path.parts))
    with pytest.raises(UserError, match=r"4 is damaged \(params/.*\), the only one\. .*workdir\.$"):
        run_files.find_start(tmp_path)
    with pytest.raises(UserError, match=r"There is no other: restore it from a copy\.$"):
        load_params(tmp_path, "latest")
    shutil.rmtree(newest)
    shutil.copytree(copy, newest)
    cut(next(path for path in files if "rest" in path.parts))
    with pytest.raises(UserError, match=rf"weights .* whole: .*init_from=run:{tmp_path}@4\.$"):
        run_files.find_start(tmp_path)
    load_params(tmp_path, 4)
    flip_a_bit(next(path for path in files if "metrics" in path.parts and path.stat().st_size))
    with pytest.raises(
        UserError, match=r"the only one\. .* to start anew, give another --workdir\.$"
    ):
        run_files.find_start(tmp_path)  # nothing reads its weights either


def test_an_empty_checkpoint_is_a_damaged_one(tmp_path):
    save_checkpoints(tmp_path, 2)
    (tmp_path / "checkpoints" / "99").mkdir()
    run_files.check_options(tmp_path, make_config())  # of fewer steps
    assert make_config().train.num_steps > 2
    with pytest.raises(UserError, match=r"holds a run of 2 steps, more than train\.num_steps=1\."):
        run_files.check_options(tmp_path, make_config(train=dict(num_steps=1)))
    assert run_files.find_start(tmp_path) == 2


@pytest.mark.parametrize("text", ['{"a":' * 10**5, "9" * 5000], ids=("nested", "digits"))
def test_notes_that_end_whoever_reads_them_are_damage(tmp_path, text):
    save_checkpoints(tmp_path, 2)
    notes = tmp_path / "checkpoints" / "2" / "_CHECKPOINT_METADATA"
    notes.write_text("lost")
    load_params(tmp_path, "latest")
    notes.write_text(text)
    with pytest.raises(UserError, match=r"2 is damaged \(_CHECKPOINT_METADATA was altered\)"):
        load_params(tmp_path, "latest")


def test_a_damaged_checkpoint_moves_aside_so_that_its_step_is_saved_again(tmp_path):
    for number in (1, 2):
        save_checkpoints(tmp_path, 2, 4)
        flip_a_bit(files_of(tmp_path / "checkpoints" / "4")[0])
        assert len(set_aside(tmp_path, after=2)) == 1
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
        assert len(list((tmp_path / "damaged").iterdir())) == number


def test_a_checkpoint_of_before_there_were_digests_is_read_or_named(tmp_path):
    save_checkpoints(tmp_path, 2, 4)
    for step in ("2", "4"):
        shutil.rmtree(tmp_path / "checkpoints" / step / "digests")
    assert "missing" in find_damage(tmp_path, 4)  # the copy was cut short
    for notes in (tmp_path / "checkpoints").glob("*/_CHECKPOINT_METADATA"):
        notes.write_text(notes.read_text().replace('"digests"', '"other"'))
    load_params(tmp_path, "latest")
    for item in ("layout/metadata", "metrics/metrics"):
        path = tmp_path / "checkpoints" / "4" / item
        whole = path.read_bytes()
        for broken in (b"", b"[1]", b"{}", b"3", b'{"scan_layers": 5, "eval/loss": null}', b"\xff"):
            path.write_bytes(broken)
            with pytest.raises(UserError, match=rf"4 is damaged \({item} holds no "):
                load_params(tmp_path, "latest")
            assert run_files.find_start(tmp_path) == 2
        path.write_bytes(whole)
    for path in (tmp_path / "checkpoints" / "4" / "params").rglob("d/*"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(UserError, match=r"checkpoint .*/4 cannot be read .* or use 2\.$") as error:
        load_params(tmp_path, "latest")
    assert "\n" not in str(error.value)


@pytest.mark.thorough
def test_a_run_continues_from_before_the_damage_to_the_same_weights(tmp_path):
    options = [*TINY, "--config.train.keep_checkpoints=9", "--config.train.eval_batches=1"]
    code, _, told = run(tmp_path / "whole", *options)
    assert code == 0, told
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    flip_a_bit(max((tmp_path / "run/checkpoints/8/rest").rglob("d/*")))
    cut(max((tmp_path / "run/checkpoints/6/params").rglob("d/*")))
    code, _, told = run(tmp_path / "run", *options)
    assert code == 0, told
    assert re.search(r"/8 is damaged .*\n.*/6 is damaged .*\n.*continues from step 4\n", told), told
    assert sorted(path.name for path in (tmp_path / "run/damaged").iterdir()) == ["6", "8"]
    wanted = params_of(tmp_path / "whole")
    for name, value in params_of(tmp_path / "run").items():
        np.testing.assert_array_equal(value, wanted[name])


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1200 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1200k", "tmpfs"]
    try:
        mounted = subprocess.run(["mount", *options, disk], capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small disk takes root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_save_on_a_read_only_disk_leaves_no_thread_that_waits(tmp_path, small_disk, capsys):
    state = TrainState.create({"x": jnp.ones(4)}, optax.sgd(1.0), "float32")
    with Checkpointer(small_disk, goes_on=True) as checkpointer:
        checkpointer.save(state, 1)
        checkpointer.wait()
        before = set(threading.enumerate())
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        checkpointer.save(state, 2)
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
        assert "step 2 is not saved" in checkpointer.failure
        assert "(Read-only file system); the last one saved is that" in capsys.readouterr().err
        assert set(threading.enumerate()) <= before
        checkpointer.save(state, 3)
        checkpointer.wait()
        assert checkpointer.failure == "" and checkpointer.all_steps() == [3]


@pytest.mark.thorough
def test_a_full_disk_is_told_at_each_save_and_the_run_goes_on(tmp_path, small_disk):
    options = [*TINY, "--config.train.keep_checkpoints=9", "--config.train.eval_batches=1"]
    options += ["--config.logging.tensorboard=False"]
    code, _, told = run(small_disk / "run", *options)
    assert code == 5
    *warnings, last = told.splitlines()
    assert len(warnings) >= 2
    for line in warnings:
        assert re.match(r"warning: the state of step \d is not saved in .*/checkpoints \(.*", line)
    assert re.match(r"error: the state of step 8 is not saved .* from step \d on\.$", last)
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    code, _, told = run(small_disk / "run", *options)
    assert (code, told) == (0, "")
    assert run(tmp_path / "whole", *options)[0] == 0
    wanted = params_of(tmp_path / "whole")
    for name, value in params_of(small_disk / "run").items():
        np.testing.assert_array_equal(value, wanted[name])
    assert [line["step"] for line in metrics_of(small_disk / "run")] == list(range(1, 9))


def test_a_save_without_room_or_that_fails_is_told_and_the_next_is_tried(
    tmp_path, monkeypatch, capsys
):
    state = TrainState.create({"x": jnp.ones(4)}, optax.sgd(1.0), "float32")
    scores = {"eval/loss": 2.0}
    with Checkpointer(tmp_path, goes_on=True) as checkpointer, monkeypatch.context() as patched:
        checkpointer.save(state, 1)
        checkpointer.wait()
        patched.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10))
        checkpointer.save(state, 2)
        assert "the state of step 2 is not saved" in checkpointer.failure
        assert "256.0 KiB are needed, and 10 B are free" in capsys.readouterr().err
        patched.undo()
        # In the saving thread.
        patched.setattr(checkpoint_handlers, "digest_folder", lambda folder: 1 / 0)
        checkpointer.save(state, 3, scores)
        while checkpointer._manager.is_saving_in_progress():
            time.sleep(0.01)
        assert checkpointer.improves(2.5)  # the better one was not saved
        assert "step 3 is not saved" in checkpointer.failure
        assert "the last one saved is that of step 1" in capsys.readouterr().err
        patched.undo()
        checkpointer.save(state, 4)
        checkpointer.wait()
        assert checkpointer.failure == "" and checkpointer.all_steps() == [4]
    with Checkpointer(tmp_path) as checkpointer, monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10))
        with pytest.raises(UserError, match=r"step 5 is not saved .* Make room, and repeat"):
            checkpointer.save(state, 5)


def test_damaged_scores_of_an_older_checkpoint_neither_end_the_run_nor_count(tmp_path, capsys):
    save_checkpoints(tmp_path, 2, 4)
    scores = tmp_path / "checkpoints/2/metrics/metrics"
    scores.write_text(scores.read_text().replace("8.0", "0.0"))
    with pytest.raises(UserError, match=r"checkpoints/2 is damaged \(metrics/metrics was altered"):
        Checkpointer(tmp_path, read_only=True)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.best() == (4, 6.0)
    assert f"it is now {tmp_path}/damaged/2" in capsys.readouterr().err


def test_a_file_that_the_disk_cannot_read_is_damage(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, "Input/output error")

    save_checkpoints(tmp_path, 2)
    monkeypatch.setattr(digests, "_crc32", fail)
    assert re.search(r"cannot be read: Input/output error$", find_damage(tmp_path, 2))
