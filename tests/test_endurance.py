"""A long run takes no more of its machine at its end than near its beginning."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from tests.faults.laboratory import Watched
from tests.helpers import TINY

STEPS, WARM = 20_000, 2_000
WINDOW = 1_000  # steps whose median counts: saves open files and start threads for a moment


def read_usage(pid):
    """Returns resident bytes, open files and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    resident = 1024 * int(fields["VmRSS"].split()[0])
    return resident, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"])


@pytest.mark.slow
def test_memory_files_and_threads_stay_as_they_are_over_20_000_steps(tmp_path):
    options = [
        *TINY,
        "--config.data.corpus=synthetic",
        f"--config.train.num_steps={STEPS}",
        "--config.train.log_every=10",
        "--config.train.eval_every=100",
        "--config.train.eval_batches=10",
        "--config.train.checkpoint_every=100",
    ]
    data_dir = Path(os.environ.get("GPT2_DATA_DIR", tmp_path / "data"))
    samples = []
    with Watched(tmp_path / "run", data_dir, *options, screen=tmp_path / "screen") as run:
        run.until_step(WARM)
        while run.process.poll() is None and (step := run.newest_step()) < STEPS:
            run.look()
            samples.append((step, *read_usage(run.process.pid)))
            time.sleep(0.2)
        run.wait(0)
    steps, *figures = np.transpose(samples)
    early, late = steps < WARM + WINDOW, steps >= STEPS - WINDOW
    assert early.sum() > 3 and late.sum() > 3
    (memory, last), *others = [(np.median(f[early]), np.median(f[late])) for f in figures]
    print(f"{memory / 2**20:.1f} and {last / 2**20:.1f} MiB; files, threads: {others}")
    assert last <= 1.03 * memory
    assert all(after == before for before, after in others)
