"""Preparation on a Ray cluster of two nodes, one of which is killed halfway."""

import os
import subprocess
import sys
import time

import pytest

from gpt2.parallel import distributed
from gpt2.utils import cluster
from tests.helpers import environment
from tests.test_preparing import content_of

VARIABLES = environment() | {"XLA_FLAGS": ""}
BOOK = """
import time
from pathlib import Path
from gpt2.data import splits

splits.PART_CHARACTERS = 500

def pages():
    for number in range(400):
        if number == 200:
            Path("half").touch()
            while not Path("on").exists():
                time.sleep(0.05)
        yield f"{number}: " + "the quick brown fox " * (number % 90)
"""


class Nodes:
    """A Ray cluster of two nodes with one core each."""

    def __init__(self, cluster):
        head = dict(num_cpus=1, include_dashboard=False)
        self._cluster = cluster(initialize_head=True, head_node_args=head)
        self.flag = f"--cluster=ray:{self._cluster.address}"
        self.add()

    def add(self):
        self._second = self._cluster.add_node(num_cpus=1)

    def kill(self):
        self._cluster.remove_node(self._second, allow_graceful=False)


@pytest.fixture(scope="module")
def nodes():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():  # which its runs get
            patch.setenv(name, value)
        nodes = Nodes(pytest.importorskip("ray.cluster_utils").Cluster)
        yield nodes
        nodes._cluster.shutdown()


def begin(*command, cwd):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    command = [sys.executable, "-m", *map(str, command)]
    return subprocess.Popen(command, cwd=cwd, env=VARIABLES, **pipes)


def wait_for(process, reached):
    deadline = time.monotonic() + 240
    while not reached():
        assert process.poll() is None and time.monotonic() < deadline, (
            process.communicate()[0]
        )
        time.sleep(0.05)


def end(process):
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    return said


@pytest.mark.peers
def test_a_cluster_prepares_what_one_machine_does_though_a_node_is_killed(
    nodes, tmp_path
):
    (tmp_path / "book.py").write_text(BOOK)
    command = "gpt2.data.prepare", "--config.data.corpus=python:book:pages"
    command += "--config.data.val_fraction=0.2", "--config.data.tokenizer=gpt2"
    place = "--config.data.data_dir={}".format
    spread = begin(*command, place("spread"), nodes.flag, cwd=tmp_path)
    wait_for(spread, (tmp_path / "half").exists)
    nodes.kill()
    (tmp_path / "on").touch()
    end(spread)
    nodes.add()
    end(begin(*command, place("alone"), cwd=tmp_path))
    assert content_of(tmp_path / "spread") == content_of(tmp_path / "alone")


def test_a_run_of_a_sweep_is_no_part_of_what_a_launcher_began(tmp_path, monkeypatch):
    show = "from gpt2.parallel import distributed; print(distributed._find_launcher())"
    (tmp_path / "show.py").write_text(show)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    assert distributed._find_launcher() == "mpi4py"
    slot, log = cluster.Slot(os.sched_getaffinity(0), {}), tmp_path / "log.txt"
    assert cluster.start([str(tmp_path / "show.py")], log, slot).wait() == 0
    assert log.read_text() == "None\n"
