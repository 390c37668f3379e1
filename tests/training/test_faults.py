"""Harmed runs (a part of `python -m tests.programs.faults`), a long one, and planted faults."""

import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import TINY, metrics_of
from tests.programs.faults.__main__ import main
from tests.programs.faults.laboratory import Broken, Watched, check_start, compare
from tests.programs.mutations import faults, misplaced

STEPS = 20_000
WARM = 2_000
END = 19_990
WINDOW = 1_000  # steps whose samples count


def test_planted_faults_still_stand_in_the_code():
    assert not misplaced(faults())


@pytest.mark.thorough
def test_runs_that_are_harmed_continue_to_the_same_bits(tmp_path, capsys):
    assert main(["--kinds=int", "--most=2", f"--workdir={tmp_path}"]) == 0
    table = capsys.readouterr().out
    assert table.count("| yes |") == 1 and "0 rows failed" in table
    # It can fail: other metrics, other parameters, a start behind what was saved.
    harmed = tmp_path / "SIGINT"
    unharmed = tmp_path / "unharmed-440"
    compare(harmed, unharmed)
    with pytest.raises(Broken, match="was saved, and the run went on from"):
        check_start(harmed, 10**6)
    metrics = harmed / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole.replace('"step": 7,', '"step": 6,'))
    with pytest.raises(Broken, match="other metrics"):
        compare(harmed, unharmed)
    metrics.write_text(whole)
    shutil.rmtree(unharmed / "checkpoints" / "440")
    with pytest.raises(Broken, match="other values in"):
        compare(harmed, unharmed)


@pytest.mark.slow
def test_memory_files_and_threads_stay_as_they_are_over_20_000_steps(tmp_path):
    """A long run takes no more of its machine at its end than near its beginning."""
    options = [*TINY]
    options += f"""
        --config.data.corpus=synthetic --config.train.num_steps={STEPS}
        --config.train.log_every=10 --config.train.eval_every=500
        --config.train.eval_batches=10 --config.train.checkpoint_every=500""".split()
    data_dir = Path(os.environ.get("GPT2_DATA_DIR", tmp_path / "data"))
    samples = []
    with Watched(
        tmp_path / "run", data_dir, *options, screen=tmp_path / "screen"
    ) as run:
        path = tmp_path / "run" / "metrics.jsonl"
        run.until(lambda: path.exists() and f'"step": {WARM},' in path.read_text())
        while (
            run.process.poll() is None
            and (step := metrics_of(path.parent)[-1]["step"]) < END
        ):
            run.look()
            process = Path(f"/proc/{run.process.pid}")
            text = (process / "status").read_text()
            memory = 1024 * int(re.search(r"^VmRSS:\s+(\d+)", text, re.M)[1])
            threads = int(re.search(r"^Threads:\s+(\d+)", text, re.M)[1])
            files = len(os.listdir(process / "fd"))
            samples.append((step, memory, files, threads))
            time.sleep(0.2)
        run.wait(0)
    steps, *figures = np.transpose(samples)
    early = steps < WARM + WINDOW
    late = steps >= STEPS - WINDOW
    assert early.sum() > 3 and late.sum() > 3
    memory, *others = [[f[early], f[late]] for f in figures]
    before, after = map(np.median, memory)
    print(
        f"{before / 2**20:.1f} and {after / 2**20:.1f} MiB, {after / before - 1:+.1%}"
    )
    assert after <= 1.03 * before
    # A save opens files for a moment. Threads of pools come and go; one a save would be 36 more.
    files, threads = ([int(part.min()) for part in parts] for parts in others)
    print(f"files {files}, threads {threads}")
    assert files[0] == files[1] and abs(threads[0] - threads[1]) < 10
