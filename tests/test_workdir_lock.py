"""A workdir is one process's at a time."""

import errno
import os
import signal

import pytest

from gpt2.errors import UserError
from gpt2.training import workdir
from gpt2.utils import files
from tests.helpers import TINY, run, start, wait_for_step

OPTIONS = [*TINY, "--config.data.corpus=synthetic", "--config.train.num_steps=100000"]


def test_a_second_process_in_a_workdir_is_refused_and_changes_nothing(tmp_path):
    directory = tmp_path / "run"
    first = start(directory, *OPTIONS)
    try:
        wait_for_step(first, directory, 3)
        first.send_signal(signal.SIGSTOP)
        os.waitpid(first.pid, os.WUNTRACED)
        before = contents(directory)
        code, _, stderr = run(directory, *OPTIONS)
        assert code == 2
        assert stderr.startswith(f"error: another process is training in {directory}.")
        assert stderr.count("\n") == 1
        assert contents(directory) == before
    finally:
        first.kill()
        first.communicate()


def contents(directory):
    return {path: path.is_file() and path.read_bytes() for path in directory.rglob("*")}


def test_a_file_system_without_locks_is_trained_on(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    workdir.lock(tmp_path, start=0)
    (tmp_path / "checkpoints" / "4" / "params").mkdir(parents=True)
    (tmp_path / "checkpoints" / "4" / "_CHECKPOINT_METADATA").touch()
    with pytest.raises(UserError, match="another process"):  # which began and ended meanwhile
        workdir.lock(tmp_path, start=0)
