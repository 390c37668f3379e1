"""Runs and encoding on a Ray cluster of two nodes, one of which is killed."""

import signal
import sys
import time
from types import SimpleNamespace

import pytest

from gpt2.config import DataConfig
from gpt2.data import prepare_dataset
from gpt2.data.preparing import documents
from gpt2.errors import UserError
from gpt2.lab.experiments.ray_runs import RaySlot, make_ray_slots
from gpt2.utils import ray_cluster
from gpt2.utils.files import is_locked
from tests.data.test_preparing import content_of
from tests.helpers import (
    SECONDS,
    TINY,
    environment,
    finish,
    metrics_of,
    start,
    starts_of,
)


class Nodes:
    """A Ray cluster of two nodes with one core each."""

    def __init__(self, cluster):
        self._node = dict(num_cpus=1, object_store_memory=10**8)
        head = dict(include_dashboard=False, resources={"turn": 1}, **self._node)
        self._cluster = cluster(initialize_head=True, head_node_args=head)
        self.flag = f"--cluster=ray:{self._cluster.address}"
        self._second = None

    def add(self):
        if self._second is None:
            self._second = self._cluster.add_node(**self._node)

    def kill(self):
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._second = None

    def shutdown(self):
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def cluster():
    make = pytest.importorskip("ray.cluster_utils").Cluster
    with pytest.MonkeyPatch.context() as patch:
        # The nodes, and thus the runs, have these variables.
        variables = environment() | {"RAY_worker_niceness": "0"}
        for name, value in variables.items():
            patch.setenv(name, value)
        nodes = Nodes(make)
        yield nodes
        nodes.shutdown()


@pytest.fixture
def nodes(cluster):
    """The cluster, with both of its nodes."""
    cluster.add()
    return cluster


@pytest.fixture
def connected(nodes, monkeypatch):
    """The cluster, which this process has joined."""
    monkeypatch.setattr(ray_cluster, "_is_connected", False)
    ray_cluster.connect(nodes.flag.partition("=")[2])
    yield nodes
    sys.modules["ray"].shutdown()


BOOK = """
import itertools

kill = print
readings = itertools.count()  # two measure the documents, the third encodes them

def pages():
    is_encoding = next(readings) == 2
    for number in range(200):
        if number == 100 and is_encoding:
            kill()
        yield f"{number}: " + "the quick brown fox " * (number % 90)
"""


@pytest.mark.peers
def test_nodes_encode_the_same_tokens_though_one_is_killed(
    connected, tmp_path, monkeypatch
):
    (tmp_path / "fox_book.py").write_text(BOOK)
    monkeypatch.syspath_prepend(tmp_path)
    import fox_book

    monkeypatch.setattr(documents, "PART_CHARACTERS", 500)
    for tokenizer in ("gpt2", "bpe:300"):
        contents = []
        for is_connected in (True, False):
            monkeypatch.setattr(ray_cluster, "_is_connected", is_connected)
            if is_connected and tokenizer == "gpt2":
                fox_book.kill = connected.kill
            folder = tmp_path / f"{tokenizer}-{is_connected}"
            options = dict(tokenizer=tokenizer, data_dir=str(folder), val_fraction=0.2)
            prepare_dataset(DataConfig(corpus="python:fox_book:pages", **options))
            contents.append(content_of(folder))
            fox_book.kill = print
        assert contents[0] == contents[1]


@pytest.mark.peers
def test_a_folder_that_a_node_lacks_is_one_sentence(connected, tmp_path):
    process = RaySlot({}).start(["train.py"], tmp_path / "missing" / "log.txt", {})
    process.wait()
    with pytest.raises(UserError, match=r"missing/log.txt.*All nodes need the same"):
        process.poll()


@pytest.mark.peers
def test_the_time_of_a_run_does_not_contain_its_time_in_the_queue(connected, tmp_path):
    (tmp_path / "short.py").write_text("import time; time.sleep(3)")
    options = {"resources": {"turn": 1}}  # one process at a time
    command = [str(tmp_path / "short.py")]
    began = time.monotonic()
    processes = []
    for name in ("first.txt", "second.txt"):
        processes.append(RaySlot(options).start(command, tmp_path / name, {}))
    for process in processes:
        process.wait()
        assert process.poll() == 0
    seconds = [process.seconds for process in processes]
    assert min(seconds) >= 3
    assert sum(seconds) < time.monotonic() - began


OPTIONS = [
    *TINY,
    "--config.train.num_steps=2000",
    "--config.train.eval_every=0",
    "--config.train.checkpoint_every=100",
    "--vary=optim.name=lion",
]


def begin(root, *options, module="gpt2.lab.ablate"):
    return start(root, *OPTIONS, *options, script=module)


def end(process):
    code, stdout, stderr = finish(process, 4 * SECONDS)
    assert code == 0, stdout + stderr
    return stdout


def wait_until(process, reached):
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def workdirs(root):
    """Return the workdirs of a sweep or a ladder, without a look into their checkpoints."""
    pattern = "runs/*/seed-*/run"
    return sorted([*root.glob(pattern), *root.glob(f"d*/{pattern}")])


def wait_for_checkpoints(process, root, number, step):
    """Wait until `number` runs have a checkpoint of `step` or of a later step."""

    def reached():
        saved = 0
        for workdir in workdirs(root):
            steps = [int(p.name) for p in workdir.glob("checkpoints/*[0-9]")]
            saved += max(steps, default=0) >= step
        return saved == number

    wait_until(process, reached)


def assert_same_runs(root, other):
    """Compare the loss of every step of all runs of two folders."""
    names = [path.relative_to(root) for path in workdirs(root)]
    assert names == [path.relative_to(other) for path in workdirs(other)]
    for name in names:
        lines = metrics_of(root / name, speed=False)
        assert lines[-1]["step"] > 100
        assert lines == metrics_of(other / name, speed=False)


@pytest.mark.peers
@pytest.mark.slow
def test_a_sweep_that_is_stopped_and_loses_a_node_has_the_same_runs(nodes, tmp_path):
    root = tmp_path / "ray"
    first = begin(root, "--seeds=1", nodes.flag)
    wait_for_checkpoints(first, root, 2, 100)
    first.send_signal(signal.SIGINT)
    code, _, stderr = finish(first, SECONDS)
    assert code == 130, stderr
    for workdir in workdirs(root):
        assert not is_locked(workdir / ".lock")
        assert not (workdir.parent / "outcome.json").exists()
    stopped = [metrics_of(workdir)[-1]["step"] for workdir in workdirs(root)]
    assert len(stopped) == 2
    second = begin(root, "--seeds=1", nodes.flag)
    wait_for_checkpoints(second, root, 2, 100 * (max(stopped) // 100 + 2))
    nodes.kill()
    stdout = end(second)
    assert stdout.count("has lost its node, and will continue") == 1
    starts = sorted(len(starts_of(workdir)) for workdir in workdirs(root))
    assert starts == [2, 3]
    end(begin(tmp_path / "here", "--seeds=1", "--jobs=1"))
    assert_same_runs(root, tmp_path / "here")


@pytest.mark.peers
@pytest.mark.slow
def test_a_ladder_that_loses_a_node_has_the_same_runs(nodes, tmp_path):
    ladder = ["--depths=1,2,3", "--seeds=2", "--config.train.eval_batches=0"]
    ladder += ["--config.train.num_steps=200", "--config.train.checkpoint_every=20"]
    ladder += ["--config.data.val_fraction=0.001"]
    root = tmp_path / "ray"
    process = begin(root, *ladder, nodes.flag, module="gpt2.lab.ladder")
    wait_for_checkpoints(process, root, 2, 40)
    nodes.kill()
    assert "has lost its node" in end(process)
    end(begin(tmp_path / "here", *ladder, module="gpt2.lab.ladder"))
    assert len(workdirs(root)) == 12
    assert_same_runs(root, tmp_path / "here")


@pytest.mark.parametrize(
    ("nodes", "jobs", "options", "number"),
    [
        (["CPU 4", "CPU 16 GPU 8", "CPU 16 GPU 4"], None, {"num_gpus": 1}, 12),
        (["CPU 16 GPU 8", "CPU 16 GPU 4"], 3, {"num_gpus": 1}, 3),
        (["CPU 4", "CPU 90 TPU 4", "TPU 8"], None, {"resources": {"TPU": 4}}, 2),
        (["CPU 4", "CPU 8", "memory 1"], None, {"num_cpus": 4}, 2),
        (["CPU 4", "CPU 8"], 6, {"num_cpus": 2}, 6),
        (["CPU 4"], 9, {"num_cpus": 1}, 9),
    ],
)
def test_a_run_reserves_an_accelerator_a_host_or_a_part_of_its_cores(
    nodes, jobs, options, number, monkeypatch
):
    states = [{"Resources": {"CPU": 99.0, "GPU": 1.0}, "Alive": False}]
    for text in nodes:
        words = text.split()
        resources = dict(zip(words[::2], map(float, words[1::2]), strict=True))
        states.append({"Resources": resources, "Alive": True})
    ray = SimpleNamespace(nodes=lambda: states)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert [slot.options for slot in make_ray_slots(jobs)] == number * [options]
    states[1:] = []
    with pytest.raises(UserError, match="no GPU, TPU or CPU"):
        make_ray_slots(jobs)


@pytest.mark.parametrize(
    ("cluster", "error"),
    [
        ("slurm", "--cluster=slurm is not ray or ray:ADDRESS"),
        ("ray:localhost:1", "Connection refused"),
        ("ray:localhost:port", "invalid literal"),
        ("ray", r"\(no instance\). Start a cluster with `ray start --head`"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_sentence(cluster, error, monkeypatch):
    def init(*_, **__):
        raise ConnectionError("no instance. Use ray.init")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    with pytest.raises(UserError, match=error):
        ray_cluster.connect(cluster)
    assert not ray_cluster.is_connected()
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"slurm|pip install -e '.\[ray\]'"):
        ray_cluster.connect(cluster)
