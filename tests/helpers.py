"""What several test files share: a tiny run of train.py in a process of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from gpt2.training.checkpoint_weights import load_params

ROOT = Path(__file__).parent.parent
TINY = [
    "--config.model.num_layers=1",
    "--config.model.num_heads=2",
    "--config.model.embed_dim=32",
    "--config.model.context_length=16",
    "--config.data.tokenizer=byte",
    "--config.data.batch_size=4",
    "--config.optim.warmup_steps=2",
    "--config.train.num_steps=8",
    "--config.train.log_every=1",
    "--config.train.eval_every=4",
    "--config.train.checkpoint_every=2",
]


def start(workdir, *options, script="train.py", cwd=ROOT, devices=1):
    """Starts train.py, or another script, in a process of its own with so many CPU devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, ROOT / script, *([f"--workdir={workdir}"] if workdir else []), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=cwd,
    )


def run(workdir, *options, **kwargs):
    """Runs train.py to its end, and returns exit code, standard output and standard error."""
    return finish(start(workdir, *options, **kwargs), timeout=240)


def finish(process, timeout):
    """Waits for a process, which is killed if it takes longer, and returns what it leaves."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, stdout, stderr


def metrics_of(workdir):
    """Returns the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def wait_for_step(process, workdir, step):
    """Waits until metrics.jsonl tells of a step."""
    while process.poll() is None:
        path = workdir / "metrics.jsonl"
        if path.exists() and any(m["step"] >= step for m in metrics_of(workdir)):
            return
        time.sleep(0.02)
    raise AssertionError(f"ended before step {step}: {process.stderr.read()}")


def params_of(workdir, checkpoint="latest"):
    """Returns the parameters of a run by name, as numpy."""
    leaves = jax.tree_util.tree_leaves_with_path(load_params(workdir, checkpoint)[1])
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
