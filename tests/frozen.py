"""Records what today's code computes, and shows that another version computes the same bits.

    python -m tests.frozen record DIR     # with the code of before
    python -m tests.frozen compare DIR    # with the code of after, on the same machine

Losses, gradient norms and rates of 40 steps in many layouts, a checkpoint that the other version
continues, logits of Hugging Face models, and generated text.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from gpt2 import hf
from gpt2.model import GPT
from tests import peer
from tests.helpers import metrics_of

RUN = """
    --config.train.num_steps=40 --config.train.log_every=1 --config.train.eval_every=0
    --config.train.checkpoint_every=0 --config.optim.warmup_steps=10
    --config.logging.tensorboard=False"""
SCAN = "memory.scan_layers=True"
CASES = {  # name: (devices, options)
    "quickstart": (1, ""),
    "scan_remat_accumulate": (1, f"{SCAN} memory.remat=full train.accumulate_steps=4"),
    "bfloat16": (1, "precision.compute=bfloat16"),
    "muon": (1, "optim.name=muon"),
    "dropout": (1, "model.dropout=0.1"),
    "pmap": (8, "parallel.backend=pmap"),
    "fsdp_by_layer": (8, "parallel.strategy=zero3 parallel.fsdp_gather=layer"),
    "data2_fsdp2_tensor2": (8, "parallel.data=2 parallel.fsdp=2 parallel.tensor=2"),
    "zero1": (8, "parallel.strategy=zero1"),
}
HALF = "train.checkpoint_every=20 train.keep_every=20"


def train(workdir: Path, devices: int, options: str) -> list[dict]:
    """Trains to the end, and returns the lines of the run without what depends on the clock."""
    xla_flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    )
    command = [sys.executable, "train.py", f"--workdir={workdir}", *RUN.split()]
    command += [f"--config.{option}" for option in options.split()]
    env = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS=xla_flags.strip())
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{workdir} ended with {done.returncode}: {done.stderr}")
    return metrics_of(workdir, speed=False)


def logits(directory: Path) -> str:
    """Returns the digest of a Hugging Face model's logits."""
    cfg, params = hf.load(directory)[:2]
    tokens = jnp.asarray(np.arange(64).reshape(2, 32) % cfg.vocab_size, jnp.int32)
    return hashlib.sha256(np.asarray(GPT(cfg).apply({"params": params}, tokens))).hexdigest()


def generated(workdir: Path) -> str:
    """Returns texts that a run's model writes."""
    flags = ["--prompt=def main(", "--max_new_tokens=60", "--num_samples=2", "--seed=1"]
    command = [sys.executable, "-m", "gpt2.generate", f"--workdir={workdir}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


def prepare(root: Path) -> None:
    """Writes the models, and a run that stopped at the step from which others continue it."""
    for name in peer.SMALL:
        peer.write_model(root / "hf" / name, name)
    train(root / "half", 1, HALF)
    shutil.rmtree(root / "half" / "checkpoints" / "40")
    (root / "half" / "samples.txt").unlink()


def results(root: Path, own: Path) -> Iterator[tuple[str, object]]:
    """Yields everything that is compared, by name."""
    for name, (devices, options) in CASES.items():
        yield name, train(own / name, devices, options)
    shutil.copytree(root / "half", own / "continued")
    yield "continued", train(own / "continued", 1, HALF)
    for path in sorted((root / "hf").iterdir()):
        yield f"logits of {path.name}", logits(path)
    yield "generated", generated(own / "quickstart")


def main(command: str, place: str) -> None:
    """Records, or compares with what was recorded."""
    root, kept = Path(place), Path(place) / "record.json"
    if command == "record":
        prepare(root)
        kept.write_text(json.dumps(dict(results(root, root / "record"))))
        return
    before, own, wrong = json.loads(kept.read_text()), Path(tempfile.mkdtemp(dir=root)), []
    for name, value in results(root, own):
        print("same" if value == before[name] else "DIFFERENT", name, flush=True)
        if value != before[name]:
            wrong.append(name)
            (own / f"{name}.json").write_text(json.dumps([before[name], value]))
    if wrong:
        raise SystemExit(f"different: {', '.join(wrong)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
