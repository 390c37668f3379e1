"""Sweeps and preparation on a Ray cluster of two nodes, one of which is killed halfway."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from gpt2.ablate.jobs import make_slots
from gpt2.parallel import distributed
from gpt2.utils import cluster
from tests.helpers import ROOT, TINY, environment
from tests.test_ablate import rows_of
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


@pytest.mark.slow  # and by the clock: a node dies while both runs train
def test_a_cluster_sweeps_as_one_machine_does_though_a_node_is_killed(nodes, tmp_path):
    command = [
        "gpt2.ablate",
        *TINY,
        "--config.train.num_steps=900",
        "--config.train.eval_every=0",
    ]
    command += ["--config.train.checkpoint_every=150", "--config.train.log_every=300"]
    command += ["--vary=optim.name=lion", "--seeds=1", "--workdir"]
    spread = begin(*command, tmp_path / "spread", nodes.flag, cwd=ROOT)
    wait_for(
        spread,
        lambda: len([*tmp_path.glob("spread/runs/*/*/run/checkpoints/150")]) == 2,
    )
    nodes.kill()
    end(spread)
    nodes.add()
    end(begin(*command, tmp_path / "beside" / "alone", "--jobs=2", cwd=ROOT))
    alone = rows_of(tmp_path / "beside" / "alone", ["seconds"])
    assert rows_of(tmp_path / "spread", ["seconds"]) == alone
    starts = [
        path.read_text()
        for path in tmp_path.glob("spread/runs/*/*/run/environment.jsonl")
    ]
    steps = sorted(
        json.loads(line)["step"] for text in starts for line in text.splitlines()
    )
    assert (
        steps[:2] == [0, 0] and len(steps) == 3 and steps[2] >= 150
    )  # one was continued


@pytest.mark.parametrize(
    ("nodes", "jobs", "task", "number"),
    [
        (
            [{"CPU": 4.0}, {"CPU": 16.0, "GPU": 8.0}, {"CPU": 16.0, "GPU": 4.0}],
            None,
            "GPU 1",
            12,
        ),
        (
            [{"CPU": 4.0}, {"CPU": 90.0, "TPU": 4.0}, {"CPU": 90.0, "TPU": 4.0}],
            None,
            "TPU 4",
            2,
        ),
        ([{"CPU": 4.0}, {"CPU": 8.0}, {"memory": 1.0}], None, "CPU 4", 2),
        ([{"CPU": 4.0}, {"CPU": 8.0}], 6, "CPU 2", 6),
        ([{"CPU": 4.0}], 9, "CPU 1", 9),
    ],
)
def test_a_run_takes_an_accelerator_a_host_or_its_share_of_cores(
    nodes, jobs, task, number
):
    told = [{"Resources": each, "Alive": True} for each in nodes]
    told.append({"Resources": {"CPU": 1.0, "GPU": 1.0}, "Alive": False})
    kind, size = task.split()
    names = {
        "GPU": {"num_gpus": 1},
        "TPU": {"resources": {"TPU": 4}},
        "CPU": {"num_cpus": int(size)},
    }
    slots = make_slots(jobs, SimpleNamespace(nodes=lambda: told))
    assert [slot.task for slot in slots] == [names[kind]] * number


def test_a_run_of_a_sweep_is_no_part_of_what_a_launcher_began(tmp_path, monkeypatch):
    show = "from gpt2.parallel import distributed; print(distributed._find_launcher())"
    (tmp_path / "show.py").write_text(show)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    assert distributed._find_launcher() == "mpi4py"
    slot, log = cluster.Slot(os.sched_getaffinity(0), {}), tmp_path / "log.txt"
    assert (
        cluster.start([str(tmp_path / "show.py")], log, tmp_path / "lock", slot).wait()
        == 0
    )
    assert log.read_text() == "None\n"
