"""train.py as two processes of four devices: their agreement, and how they end."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forks import COMPILES_FAST

ROOT = Path(__file__).parents[1]
FLAGS = """
    --config.model.num_layers=2 --config.model.num_heads=4 --config.model.embed_dim=64
    --config.model.context_length=32 --config.data.tokenizer=byte --config.data.batch_size=16
    --config.optim.schedule=constant --config.optim.learning_rate=1e-3
    --config.optim.end_learning_rate=1e-3 --config.optim.warmup_steps=2
    --config.train.num_steps=100000 --config.train.log_every=1 --config.train.eval_every=0
    --config.train.eval_batches=1 --config.train.checkpoint_every=5
    --config.logging.tensorboard=False
"""


class Pair:
    """Two processes of train.py, each with four simulated devices."""

    def __init__(self, workdir: Path, *flags: str):
        self.workdir = workdir
        with socket.socket() as sock:
            sock.bind(("localhost", 0))
            port = sock.getsockname()[1]
        environ = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {COMPILES_FAST}",
            "JAX_PLATFORMS": "cpu",
        }
        self.logs = [workdir.with_name(f"{workdir.name}.{i}.log") for i in range(2)]
        self.processes = []
        for index, log in enumerate(self.logs):
            command = [sys.executable, "train.py", f"--workdir={workdir}", *FLAGS.split(), *flags]
            command += [f"--coordinator=localhost:{port}", "--num_processes=2"]
            with log.open("w") as output:
                process = subprocess.Popen(
                    [*command, f"--process_index={index}"],
                    cwd=ROOT,
                    env=environ,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def losses(self) -> dict[int, float]:
        """Returns the training loss of every step logged so far."""
        path = self.workdir / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        rows = map(json.loads, lines)
        return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}

    def run_until(self, step: int, checkpoint: int) -> None:
        """Waits for a step to be logged and a checkpoint to be whole."""
        deadline = time.monotonic() + 300
        saved = self.workdir / "checkpoints" / str(checkpoint)
        while not (saved.exists() and max(self.losses(), default=0) >= step):
            assert all(process.poll() is None for process in self.processes), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def output(self) -> str:
        """Returns what both processes printed."""
        return "\n".join(log.read_text() for log in self.logs)


@pytest.mark.thorough
def test_a_killed_process_ends_the_other_and_the_pair_continues_exactly(tmp_path):
    workdir = tmp_path / "run"
    with Pair(workdir) as pair:
        pair.run_until(step=8, checkpoint=5)
        pair.processes[1].kill()
        killed = time.monotonic()
        assert pair.processes[0].wait(timeout=60) != 0
        assert time.monotonic() - killed < 60
        before = pair.losses()
    newest = max(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.is_dir())

    with Pair(workdir) as pair:
        pair.run_until(step=max(before) + 1, checkpoint=newest)
        pair.processes[1].send_signal(signal.SIGTERM)  # to one, and all stop after the same step
        assert [process.wait(timeout=60) for process in pair.processes] == [143, 143]
        after = pair.losses()
    replayed = [step for step in before if step > newest]
    assert replayed
    assert [after[step] for step in replayed] == [before[step] for step in replayed]
    stopped = {
        re.search(r"stopped by SIGTERM at step (\d+)", log.read_text())[1] for log in pair.logs
    }
    assert len(stopped) == 1
    assert (workdir / "checkpoints" / stopped.pop()).is_dir()


@pytest.mark.slow
def test_a_limit_of_time_stops_both_after_the_same_step(tmp_path):
    workdir, limit, began = tmp_path / "run", 150, time.monotonic()
    with Pair(workdir, f"--max_seconds={limit}", "--config.train.checkpoint_every=0") as pair:
        codes = [process.wait(timeout=limit + 20) for process in pair.processes]
        assert codes == [143, 143], pair.output()
        assert time.monotonic() - began < limit
        found = [
            re.search(r"stopped by (\S+).* at step (\d+);", log.read_text()) for log in pair.logs
        ]
    (by, first), second = (each.groups() for each in found)
    assert by == "--max_seconds" and second == (by, first)
    assert (workdir / "checkpoints" / first).is_dir()
    assert max(pair.losses()) == int(first)


@pytest.mark.thorough
@pytest.mark.parametrize("index", [0, 1])
def test_a_save_that_fails_in_one_process_ends_both_within_a_minute(tmp_path, index):
    workdir = tmp_path / "run"
    with Pair(workdir) as pair:
        pair.run_until(step=8, checkpoint=5)
        # No file of this process may grow beyond 64 KiB, as on a full disk of its own.
        resource.prlimit(pair.processes[index].pid, resource.RLIMIT_FSIZE, (2**16, 2**16))
        began = time.monotonic()
        codes = [process.wait(timeout=60) for process in pair.processes]
        assert time.monotonic() - began < 60
        assert codes[index] == 5 and codes[1 - index] != 0, pair.output()
        told = pair.logs[index].read_text().splitlines()[-1]
        assert re.match(r"error: the state of step \d+ is not saved in .*File too large", told)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        ("KeyboardInterrupt()", 130, "stopped by SIGINT\n"),
        ("UserError('a', 'b', exit_code=5)", 5, "error: a. b.\n"),
        ("OSError(errno.ENOSPC, 'No space left on device')", 2, "error: "),
        ("RuntimeError('INTERNAL: Gloo')", 1, "Traceback"),
    ],
)
def test_a_process_of_several_ends_with_the_code_of_its_error(error, code, told):
    program = f"""
import errno
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
