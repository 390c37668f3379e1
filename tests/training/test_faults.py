"""Harmed runs (a part of `python -m tests.programs.faults`), a long one, and planted faults."""

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import TINY, metrics_of
from tests.programs.faults.__main__ import main
from tests.programs.faults.laboratory import Watched
from tests.programs.mutations import faults, misplaced

STEPS = 20_000
WARM = 2_000
END = 19_990
WINDOW = 1_000  # steps whose samples count


def test_planted_faults_still_stand_in_the_code():
    assert not misplaced(faults())


@pytest.mark.thorough
def test_runs_that_are_harmed_continue_to_the_same_bits(tmp_path, capsys):
    assert main(["--kinds=int", "--most=4", f"--workdir={tmp_path}"]) == 0
    table = capsys.readouterr().out
    assert table.count("| yes |") == 1
    assert "0 rows failed" in table


@pytest.mark.slow
def test_memory_files_and_threads_stay_as_they_are_over_20_000_steps(tmp_path):
    """A long run takes no more of its machine at its end than near its beginning."""
    options = f"""
        --config.data.corpus=synthetic --config.train.num_steps={STEPS}
        --config.train.log_every=10 --config.train.eval_every=500
        --config.train.eval_batches=10 --config.train.checkpoint_every=500""".split()
    data_dir = Path(os.environ.get("GPT2_DATA_DIR", tmp_path / "data"))
    samples = []
    workdir = tmp_path / "run"
    screen = tmp_path / "screen"
    with Watched(workdir, data_dir, *TINY, *options, screen=screen) as run:
        metrics = workdir / "metrics.jsonl"
        run.until(metrics.exists)
        step = 0
        while run.process.poll() is None and step < END:
            process = Path(f"/proc/{run.process.pid}")
            text = (process / "status").read_text()
            memory = int(re.search(r"^VmRSS:\s+(\d+)", text, re.M)[1])
            threads = int(re.search(r"^Threads:\s+(\d+)", text, re.M)[1])
            files = len(os.listdir(process / "fd"))
            step = max((line["step"] for line in metrics_of(workdir)), default=0)
            samples.append((step, memory, files, threads))
            time.sleep(0.2)
        run.wait(0)
    samples = np.array(samples)
    steps = samples[:, 0]
    early = samples[(steps >= WARM) & (steps < WARM + WINDOW)]
    late = samples[steps >= STEPS - WINDOW]
    assert min(len(early), len(late)) > 3
    _, before, *_ = np.median(early, axis=0)
    _, after, *_ = np.median(late, axis=0)
    print(f"{before:.0f} and {after:.0f} KiB, {after / before - 1:+.1%}")
    assert after <= 1.03 * before
    # A save opens files for a moment. Threads of pools come and go; one a save would be 36 more.
    _, _, files, threads = early.min(axis=0)
    _, _, late_files, late_threads = late.min(axis=0)
    print(f"files {files} and {late_files}, threads {threads} and {late_threads}")
    assert files == late_files
    assert abs(threads - late_threads) < 10
