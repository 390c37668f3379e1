"""train.py as two processes of four devices: their agreement, and how they end."""

import importlib.util
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest
from jax._src.clusters import ClusterEnv

from gpt2.parallel import distributed
from tests.helpers import (
    ROOT,
    SECONDS,
    TINY,
    environment,
    metrics_of,
    succeed,
    thorough,
)

FLAGS = """
    --config.model.num_layers=2 --config.model.embed_dim=64 --config.data.batch_size=16
    --config.train.num_steps=100000 --config.train.eval_every=0 --config.train.eval_batches=1
    --config.train.checkpoint_every=5 --config.logging.tensorboard=False
"""


def losses(workdir):
    rows = metrics_of(workdir) if (workdir / "metrics.jsonl").exists() else []
    return {row["step"]: row["train/loss"] for row in rows}


# What a place tells process {0} of two on this machine, in place of flags.
LAUNCHERS = {
    "slurm": "SLURM_JOB_ID=7 SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_PROCID={0} "
    "SLURM_LOCALID={0}",
    "ompi": "OMPI_MCA_orte_hnp_uri=4096.0;tcp://127.0.0.1:1 OMPI_COMM_WORLD_SIZE=2 "
    "OMPI_COMM_WORLD_RANK={0} OMPI_COMM_WORLD_LOCAL_RANK={0}",
}


class Pair:
    """Two processes of train.py, each with four simulated devices."""

    def __init__(self, workdir, *flags, launcher=None, variables=""):
        self.workdir = workdir
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        command = [
            sys.executable,
            "train.py",
            f"--workdir={workdir}",
            *TINY,
            *FLAGS.split(),
        ]
        told = f"--coordinator=localhost:{port} --num_processes=2 --process_index={{0}}"
        self.logs = [workdir.with_name(f"{workdir.name}.{i}.log") for i in range(2)]
        self.processes = []
        for index, log in enumerate(self.logs):
            own = [*command, *flags, *([] if launcher else told.format(index).split())]
            given = f"{LAUNCHERS.get(launcher, '')} {variables}".format(
                index, 1 - index
            ).split()
            own_variables = environment(4) | dict(each.split("=", 1) for each in given)
            own_variables["JAX_COORDINATOR_PORT"] = str(port)
            with log.open("w") as out:
                place = dict(
                    cwd=ROOT, env=own_variables, stdout=out, stderr=subprocess.STDOUT
                )
                self.processes.append(subprocess.Popen(own, **place))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self.processes:
            process.kill()
            process.wait()

    def run_until(self, step, checkpoint):
        """Waits for a step to be logged and a checkpoint to be whole."""
        deadline = time.monotonic() + SECONDS
        saved = self.workdir / "checkpoints" / str(checkpoint)
        while not (saved.exists() and max(losses(self.workdir), default=0) >= step):
            assert all(process.poll() is None for process in self.processes), (
                self.output()
            )
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def ends(self):
        """Returns the exit codes of both."""
        deadline = time.monotonic() + SECONDS
        return [
            process.wait(max(deadline - time.monotonic(), 0))
            for process in self.processes
        ]

    def output(self):
        """Returns what both processes printed."""
        return "\n".join(log.read_text() for log in self.logs)


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
    same = ["--config.train.num_steps=5", f"--config.train.eval_tasks=text8:{tmp_path}"]
    spread = (f"--config.parallel.{each}" for each in layout.split())
    with Pair(tmp_path / "two", *same, *spread, launcher=launcher) as pair:
        assert pair.ends() == [0, 0], pair.output()
    succeed(tmp_path / "one", *TINY, *FLAGS.split(), *same)
    assert len(losses(tmp_path / "two")) == 5
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, two = (metrics_of(tmp_path / name)[-1] for name in ("one", "two"))
    name = "eval/text8/bits_per_byte"
    assert two[name] == pytest.approx(one[name], rel=1e-5)


GKE = {"TPU_SKIP_MDS_QUERY": "true", "TPU_WORKER_HOSTNAMES": "a,b"}
ONE_HOST = GKE | {"TPU_WORKER_HOSTNAMES": "localhost"}


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, "gcetpu"),
        (GKE, "gketpu"),
        (ONE_HOST, None),
        (ONE_HOST | {"MEGASCALE_NUM_SLICES": "2"}, "gketpu"),
        ({"TPU_PROCESS_ADDRESSES": "local"}, None),  # Kaggle
        ({"TPU_SKIP_MDS_QUERY": "1"}, None),
        (GKE | {"SLURM_NTASKS": "8"}, "gketpu"),  # of sbatch, without srun
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "a[1-8]"}, "slurm"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://a:1"},
            "ompi",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2", "SLURM_NTASKS": "1"}, "mpi4py"),
    ],
)
def test_a_place_that_tells_of_neighbours_is_known(monkeypatch, variables, launcher):
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(
        distributed.Path, "exists", lambda path: str(path) == "/dev/vfio/0"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "libtpu")
    assert distributed._find_launcher() == launcher
    assert launcher in {each.name for each in ClusterEnv._cluster_types} | {None}


@pytest.mark.thorough
def test_a_signal_to_one_process_stops_both_after_the_same_step(tmp_path):
    """`tests.programs.faults --kinds=processes` kills one, and shows that the pair continues."""
    workdir = tmp_path / "run"
    with Pair(workdir) as pair:
        pair.run_until(step=8, checkpoint=5)
        pair.processes[1].send_signal(signal.SIGTERM)
        assert pair.ends() == [143, 143]
    first, second = re.findall(r"stopped by SIGTERM at step (\d+)", pair.output())
    assert first == second and (workdir / "checkpoints" / first).is_dir()


@pytest.mark.thorough
@pytest.mark.parametrize("index", [0, 1])
def test_a_save_that_fails_in_one_process_ends_both(tmp_path, index):
    with Pair(tmp_path / "run") as pair:
        pair.run_until(step=8, checkpoint=5)
        # No file of this process may grow beyond 64 KiB, as on a full disk of its own.
        resource.prlimit(
            pair.processes[index].pid, resource.RLIMIT_FSIZE, (2**16, 2**16)
        )
        codes = pair.ends()
    assert codes[index] == 5 and codes[1 - index] != 0, pair.output()
    told = pair.logs[index].read_text()
    # Not at the start of a line, where gloo may have begun one of its own.
    assert re.search(
        r"error: The state of step \d+ is not saved in .*File too large", told
    )


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        ("UserError('a', 'b', exit_code=5)", 5, "error: a. b.\n"),
        thorough("KeyboardInterrupt()", 130, "stopped by SIGINT\n"),
        thorough(
            "RuntimeError('INTERNAL: Gloo')", 1, "error: Another process of this run"
        ),
    ],
)
def test_a_process_of_several_ends_with_the_code_of_its_error(error, code, told):
    program = f"""
import jax
from gpt2.errors import UserError
from gpt2.parallel import distributed
jax.distributed.is_initialized = lambda: True
with distributed.ends_together():
    raise {error}
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert (done.returncode, done.stderr[: len(told)]) == (code, told)
    with open("/dev/full", "w") as full:  # it ends also if it can say nothing
        assert (
            subprocess.run(command, cwd=ROOT, stderr=full, timeout=SECONDS).returncode
            == code
        )
