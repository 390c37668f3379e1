"""Two processes of train.py on this machine."""

import socket
import subprocess
import sys
import time

from tests.helpers import ROOT, SECONDS, TINY, environment, metrics_of

FLAGS = """
    --config.model.num_layers=2 --config.model.embed_dim=64 --config.data.batch_size=16
    --config.train.num_steps=100000 --config.train.eval_every=0 --config.train.eval_batches=1
    --config.train.checkpoint_every=5 --config.logging.tensorboard=False
"""


def losses(workdir):
    if not (workdir / "metrics.jsonl").exists():
        return {}
    return {line["step"]: line["train/loss"] for line in metrics_of(workdir)}


# Variables that a launcher sets for process {0} of two on this machine, instead of flags.
LAUNCHERS = {
    "slurm": "SLURM_JOB_ID=7 SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_PROCID={0} "
    "SLURM_LOCALID={0}",
    "ompi": "OMPI_MCA_orte_hnp_uri=4096.0;tcp://127.0.0.1:1 OMPI_COMM_WORLD_SIZE=2 "
    "OMPI_COMM_WORLD_RANK={0} OMPI_COMM_WORLD_LOCAL_RANK={0}",
}
COORDINATOR = "--coordinator=localhost:{0} --num_processes=2 --process_index={1}"


class Pair:
    """Two processes of train.py, each with four simulated devices.

    `variables` are environment variables, in which {0} is the index of a process and {1} the index
    of the other. In the path of the config file, {0} is the same index. `second` are further flags
    of process 1.
    """

    def __init__(
        self,
        workdir,
        *flags,
        launcher=None,
        variables="",
        script="train.py",
        config="configs/quickstart.py",
        second=(),
    ):
        self.workdir = workdir
        self.script = script
        self.flags = [f"--workdir={workdir}", *TINY, *FLAGS.split(), *flags]
        self.config = config
        self.second = second
        self.launcher = launcher
        self.variables = variables
        with socket.create_server(("localhost", 0)) as server:
            _, self.port = server.getsockname()
        self.logs = [workdir.with_name(f"{workdir.name}.{i}.log") for i in range(2)]
        self.processes = [self.start(index) for index in range(2)]

    def start(self, index):
        flags = [f"--config={self.config.format(index)}", *self.flags]
        variables = environment(4)
        variables["JAX_COORDINATOR_PORT"] = str(self.port)
        settings = self.variables
        if self.launcher:
            settings += " " + LAUNCHERS[self.launcher]
        else:
            flags += COORDINATOR.format(self.port, index).split()
        if index == 1:
            flags += self.second
        for setting in settings.format(index, 1 - index).split():
            name, _, value = setting.partition("=")
            variables[name] = value
        command = [sys.executable, self.script, *flags]
        with self.logs[index].open("w") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT
            )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self.processes:
            process.kill()
            process.wait()

    def run_until(self, step, checkpoint):
        """Wait for a step to be logged and a checkpoint to be whole."""
        deadline = time.monotonic() + SECONDS
        saved = self.workdir / "checkpoints" / str(checkpoint)
        while not saved.exists() or max(losses(self.workdir), default=0) < step:
            for process in self.processes:
                assert process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def ends(self):
        """Return the exit codes of both."""
        deadline = time.monotonic() + SECONDS
        codes = []
        for process in self.processes:
            seconds = max(deadline - time.monotonic(), 0)
            codes.append(process.wait(seconds))
        return codes

    def output(self):
        """Return what both processes printed."""
        return "\n".join(log.read_text() for log in self.logs)
