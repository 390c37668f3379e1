"""train.py as two processes of four devices: their agreement, and how they end."""

import importlib.util
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys

import pytest
from jax._src.clusters import ClusterEnv

from gpt2.config import Config, with_options
from gpt2.errors import UserError
from gpt2.parallel import distributed
from tests.helpers import ROOT, SECONDS, TINY, metrics_of, succeed, thorough
from tests.parallel.pair import FLAGS, Pair, losses


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "launcher"),
    [
        ("backend=pmap", None),
        ("strategy=zero1", "slurm"),
        ("data=1 fsdp=8 fsdp_gather=layer", "ompi"),
        ("data=2 fsdp=2 tensor=2", None),
    ],
)
def test_two_processes_train_in_any_layout_as_one_device(tmp_path, layout, launcher):
    (tmp_path / "text8").write_text("the cat sat on the mat")
    flags = [
        "--config.train.num_steps=5",
        f"--config.train.eval_tasks=text8:{tmp_path}",
    ]
    split = [f"--config.parallel.{option}" for option in layout.split()]
    one = tmp_path / "one"
    two = tmp_path / "two"
    with Pair(two, *flags, *split, launcher=launcher) as pair:
        assert pair.ends() == [0, 0], pair.output()
    succeed(one, *TINY, *FLAGS.split(), *flags)
    assert len(losses(two)) == 5
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    name = "eval/text8/bits_per_byte"
    expected = metrics_of(one)[-1][name]
    assert metrics_of(two)[-1][name] == pytest.approx(expected, rel=1e-5)


def refusal(pair):
    """Return the error with which both processes end."""
    assert pair.ends() == [2, 2], pair.output()
    assert "compiling" not in pair.output()
    first, second = (log.read_text().splitlines()[-1] for log in pair.logs)
    assert first == second
    return first


@pytest.mark.parametrize(
    ("flag", "change"),
    [
        ("--config.optim.learning_rate=0.1", "optim.learning_rate=0.1, not 0.006"),
        thorough("--config.seed=3", "seed=3, not 0"),
        # The devices of process 1 would form another mesh.
        thorough("--config.parallel.tensor=2", "parallel.tensor=2, not 1"),
        thorough("--num_processes=3", "--num_processes=3, not 2"),
        thorough("--workdir=elsewhere", "workdir=elsewhere, not {workdir}"),
    ],
)
def test_processes_with_different_flags_do_not_train(tmp_path, flag, change):
    workdir = tmp_path / "run"
    with Pair(workdir, second=[flag]) as pair:
        error = refusal(pair)
    change = change.format(workdir=workdir)
    assert error.startswith(f"error: Unlike process 0, process 1 has {change}. Start")
    assert not workdir.exists()


@pytest.mark.thorough
def test_processes_whose_config_files_have_different_contents_do_not_train(tmp_path):
    for index, value in enumerate([0.9, 0.5]):
        options = with_options(Config(), {"optim.beta2": value})
        (tmp_path / f"{index}.json").write_text(json.dumps(options.to_dict()))
    with Pair(tmp_path / "run", config=f"{tmp_path}/{{0}}.json") as pair:
        error = refusal(pair)
    assert "process 1 has optim.beta2=0.5, not 0.9. Start" in error


@pytest.mark.thorough
def test_options_of_one_process_only_may_differ(tmp_path):
    second = [f"--config.data.data_dir={tmp_path}/data", "--config.logging.screen=lr"]
    with Pair(tmp_path / "run", "--config.train.num_steps=2", second=second) as pair:
        assert pair.ends() == [0, 0], pair.output()
    assert (tmp_path / "data").exists()


@pytest.mark.thorough
def test_processes_with_different_texts_do_not_train(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\ndef texts():\n    yield 'a' * 999 + os.environ['ENDING']\n"
    )
    flags = ["--config.data.corpus=python:mine:texts"]
    data = [f"--config.data.data_dir={tmp_path}/second"]
    variables = f"PYTHONPATH={tmp_path} ENDING=end{{0}}"
    with Pair(tmp_path / "run", *flags, second=data, variables=variables) as pair:
        error = refusal(pair)
    assert "process 1 has token_crc32={'train'" in error


@pytest.fixture
def find_launcher(monkeypatch):
    """A function that returns the launcher of a TPU host with some environment variables."""
    launchers = {cluster.name for cluster in ClusterEnv._cluster_types}

    def exists(path):
        return str(path) == "/dev/vfio/0"

    def find(**variables):
        monkeypatch.setattr(os, "environ", variables)
        launcher = distributed._find_launcher()
        assert launcher is None or launcher in launchers
        return launcher

    monkeypatch.setattr(distributed.Path, "exists", exists)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "libtpu")
    return find


def test_hosts_of_a_tpu_pod_are_several_processes(find_launcher):
    pod = {"TPU_SKIP_MDS_QUERY": "true", "TPU_WORKER_HOSTNAMES": "a,b"}
    assert find_launcher() == "gcetpu"
    assert find_launcher(**pod) == "gketpu"
    assert find_launcher(**pod, SLURM_NTASKS="8") == "gketpu"  # of sbatch, without srun
    one_host = pod | {"TPU_WORKER_HOSTNAMES": "localhost"}
    assert find_launcher(**one_host) is None
    assert find_launcher(**one_host, MEGASCALE_NUM_SLICES="2") == "gketpu"
    assert find_launcher(TPU_PROCESS_ADDRESSES="local") is None  # Kaggle
    assert find_launcher(TPU_SKIP_MDS_QUERY="1") is None


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as server:
        _, port = server.getsockname()
        coordinator = f"localhost:{port}"
        with pytest.raises(UserError, match=rf"--coordinator={coordinator} cannot"):
            distributed.initialize(coordinator, num_processes=2, process_index=0)


def test_slurm_and_open_mpi_start_several_processes(find_launcher):
    slurm = {"SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "a[1-8]"}
    assert find_launcher(**slurm) == "slurm"
    mpi = {"OMPI_COMM_WORLD_SIZE": "2"}
    uri = "1.0;tcp://a:1"
    assert find_launcher(**mpi, OMPI_MCA_orte_hnp_uri=uri) == "ompi"
    assert find_launcher(**mpi, SLURM_NTASKS="1") == "mpi4py"


@pytest.mark.thorough
def test_a_signal_to_one_process_stops_both_after_the_same_step(tmp_path):
    """`tests.programs.faults --kinds=processes` kills one, and shows that the pair continues."""
    workdir = tmp_path / "run"
    with Pair(workdir) as pair:
        pair.run_until(step=8, checkpoint=5)
        pair.processes[1].send_signal(signal.SIGTERM)
        assert pair.ends() == [143, 143]
    first, second = re.findall(r"stopped by SIGTERM at step (\d+)", pair.output())
    assert first == second
    assert (workdir / "checkpoints" / first).is_dir()


@pytest.mark.thorough
@pytest.mark.parametrize("index", [0, 1])
def test_a_save_that_fails_in_one_process_ends_both(tmp_path, index):
    with Pair(tmp_path / "run") as pair:
        pair.run_until(step=8, checkpoint=5)
        # No file of this process may grow beyond 64 KiB, as on a full disk of its own.
        limits = (2**16, 2**16)
        pid = pair.processes[index].pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        codes = pair.ends()
    assert codes[index] == 5, pair.output()
    assert codes[1 - index] != 0, pair.output()
    # Not at the start of a line, where gloo may have begun one of its own.
    message = r"error: The state of step \d+ could not be saved in .*File too large"
    assert re.search(message, pair.logs[index].read_text())


def end(error, stderr):
    """Return how a process of several ends after an error."""
    program = f"""
import jax
from gpt2.errors import UserError
from gpt2.config import Config, with_options
from gpt2.parallel import distributed
jax.distributed.is_initialized = lambda: True
with distributed.ends_together():
    raise {error}
"""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, stderr=stderr, text=True, timeout=SECONDS)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("UserError('a', 'b', exit_code=5)", 5, "error: a. b.\n"),
        thorough("KeyboardInterrupt()", 130, "stopped by SIGINT\n"),
        thorough(
            "RuntimeError('INTERNAL: Gloo')", 1, "error: Another process of this run"
        ),
    ],
)
def test_a_process_of_several_ends_with_the_code_of_its_error(error, code, message):
    done = end(error, subprocess.PIPE)
    assert done.returncode == code
    assert done.stderr.startswith(message)


@pytest.mark.thorough
def test_a_process_of_several_ends_although_it_cannot_print_its_error():
    with open("/dev/full", "w") as full:
        assert end("UserError('a', 'b', exit_code=5)", full).returncode == 5
