"""train.py as two processes of four devices: their agreement, and how they end."""

import re
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.helpers import ROOT, TINY, environment, metrics_of, run, thorough

FLAGS = """
    --config.model.num_layers=2 --config.model.embed_dim=64 --config.data.batch_size=16
    --config.train.num_steps=100000 --config.train.eval_every=0 --config.train.eval_batches=1
    --config.train.checkpoint_every=5 --config.logging.tensorboard=False
"""


def losses(workdir):
    rows = metrics_of(workdir) if (workdir / "metrics.jsonl").exists() else []
    return {row["step"]: row["train/loss"] for row in rows}


class Pair:
    """Two processes of train.py, each with four simulated devices."""

    def __init__(self, workdir, *flags):
        self.workdir = workdir
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        command = [sys.executable, "train.py", f"--workdir={workdir}", *TINY, *FLAGS.split()]
        command += [f"--coordinator=localhost:{port}", "--num_processes=2", *flags]
        self.logs = [workdir.with_name(f"{workdir.name}.{i}.log") for i in range(2)]
        self.processes = []
        for index, log in enumerate(self.logs):
            own = [*command, f"--process_index={index}"]
            with log.open("w") as out:
                place = dict(cwd=ROOT, env=environment(4), stdout=out, stderr=subprocess.STDOUT)
                self.processes.append(subprocess.Popen(own, **place))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self.processes:
            process.kill()
            process.wait()

    def run_until(self, step, checkpoint):
        """Waits for a step to be logged and a checkpoint to be whole."""
        deadline = time.monotonic() + 300
        saved = self.workdir / "checkpoints" / str(checkpoint)
        while not (saved.exists() and max(losses(self.workdir), default=0) >= step):
            assert all(process.poll() is None for process in self.processes), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def ends(self, seconds=60):
        """Returns the exit codes of both, which end within so many seconds."""
        deadline = time.monotonic() + seconds
        return [process.wait(max(deadline - time.monotonic(), 0)) for process in self.processes]

    def output(self):
        """Returns what both processes printed."""
        return "\n".join(log.read_text() for log in self.logs)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout",
    ["backend=pmap", "strategy=zero1", "data=1 fsdp=8 fsdp_gather=layer", "data=2 fsdp=2 tensor=2"],
)
def test_two_processes_train_in_any_layout_as_one_device(tmp_path, layout):
    (tmp_path / "text8").write_text("the cat sat on the mat")
    same = ["--config.train.num_steps=5", f"--config.train.eval_tasks=text8:{tmp_path}"]
    spread = (f"--config.parallel.{each}" for each in layout.split())
    with Pair(tmp_path / "two", *same, *spread) as pair:
        assert pair.ends(300) == [0, 0], pair.output()
    code, _, stderr = run(tmp_path / "one", *TINY, *FLAGS.split(), *same)
    assert code == 0, stderr
    assert len(losses(tmp_path / "two")) == 5
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, two = (metrics_of(tmp_path / name)[-1] for name in ("one", "two"))
    name = "eval/text8/bits_per_byte"
    assert two[name] == pytest.approx(one[name], rel=1e-5)


@pytest.mark.thorough
def test_a_signal_to_one_process_stops_both_after_the_same_step(tmp_path):
    """`python -m tests.faults --kinds=processes` kills one, and shows that the pair continues."""
    workdir = tmp_path / "run"
    with Pair(workdir) as pair:
        pair.run_until(step=8, checkpoint=5)
        pair.processes[1].send_signal(signal.SIGTERM)
        assert pair.ends() == [143, 143]
    first, second = re.findall(r"stopped by SIGTERM at step (\d+)", pair.output())
    assert first == second and (workdir / "checkpoints" / first).is_dir()


@pytest.mark.thorough
@pytest.mark.parametrize("index", [0, 1])
def test_a_save_that_fails_in_one_process_ends_both_within_a_minute(tmp_path, index):
    with Pair(tmp_path / "run") as pair:
        pair.run_until(step=8, checkpoint=5)
        # No file of this process may grow beyond 64 KiB, as on a full disk of its own.
        resource.prlimit(pair.processes[index].pid, resource.RLIMIT_FSIZE, (2**16, 2**16))
        codes = pair.ends()
    assert codes[index] == 5 and codes[1 - index] != 0, pair.output()
    told = pair.logs[index].read_text().splitlines()[-1]
    assert re.match(r"error: the state of step \d+ is not saved in .*File too large", told)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        ("UserError('a', 'b', exit_code=5)", 5, "error: a. b.\n"),
        thorough("KeyboardInterrupt()", 130, "stopped by SIGINT\n"),
        thorough("RuntimeError('INTERNAL: Gloo')", 1, "error: another process of this run"),
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
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr[: len(told)]) == (code, told)
    with open("/dev/full", "w") as full:  # it ends also if it can say nothing
        assert subprocess.run(command, cwd=ROOT, stderr=full, timeout=60).returncode == code
