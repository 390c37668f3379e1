"""Records what today's code computes, and shows that another version computes the same bits.

    python -m tests.frozen record DIR     # with the code of before
    python -m tests.frozen compare DIR    # with the code of after, on the same machine

Losses, gradient norms and rates of 40 steps in many layouts, a kill and a resume, a checkpoint that
the other version continues, logits of Hugging Face models, and generated text.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 40
RUN = f"""
    --config.train.num_steps={STEPS} --config.train.log_every=1 --config.train.eval_every=0
    --config.train.checkpoint_every=0 --config.optim.warmup_steps=10
    --config.logging.tensorboard=False"""
DEVICES = "--xla_force_host_platform_device_count"
CASES = {  # name: (devices, options)
    "quickstart": (1, []),
    "scan_remat_accumulate": (
        1,
        ["memory.scan_layers=True", "memory.remat=full", "train.accumulate_steps=4"],
    ),
    "bfloat16": (1, ["precision.compute=bfloat16"]),
    "muon": (1, ["optim.name=muon"]),
    "dropout": (1, ["model.dropout=0.1"]),
    "pmap": (8, ["parallel.backend=pmap"]),
    "fsdp_by_layer": (8, ["parallel.strategy=zero3", "parallel.fsdp_gather=layer"]),
    "data2_fsdp2_tensor2": (8, ["parallel.data=2", "parallel.fsdp=2", "parallel.tensor=2"]),
    "zero1": (8, ["parallel.strategy=zero1"]),
}


def train(workdir: Path, devices: int, options: list[str]) -> subprocess.Popen:
    """Starts a run on so many CPU devices."""
    flags = [f"--config.{option}" for option in options]
    xla_flags = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}={devices}".strip()
    env = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS=xla_flags)
    log = open(workdir.with_suffix(".log"), "ab")  # noqa: SIM115
    command = [sys.executable, "train.py", f"--workdir={workdir}", *RUN.split(), *flags]
    return subprocess.Popen(command, stdout=log, stderr=log, env=env)


def finish(workdir: Path, devices: int, options: list[str]) -> None:
    """Trains to the end."""
    if code := train(workdir, devices, options).wait():
        raise SystemExit(f"{workdir} ended with {code}: see {workdir.with_suffix('.log')}")


def metrics(workdir: Path) -> list[dict]:
    """Returns the lines of a run without what depends on the clock."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def killed_and_resumed(workdir: Path) -> list[dict]:
    """Trains with dropout, is killed once a checkpoint of step 10 or later is whole, goes on."""
    options = [*CASES["dropout"][1], "train.checkpoint_every=10"]
    process = train(workdir, 1, options)
    while not (workdir / "checkpoints" / "20").exists():
        if process.poll() is not None:
            raise SystemExit(f"{workdir} ended before its kill")
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finish(workdir, 1, options)
    return metrics(workdir)


def logits(directory: Path) -> str:
    """Returns the digest of a Hugging Face model's logits."""
    import jax.numpy as jnp
    import numpy as np

    from gpt2 import hf
    from gpt2.model import GPT

    cfg, params = hf.load(directory)[:2]
    tokens = jnp.asarray(np.arange(64).reshape(2, 32) % cfg.vocab_size, jnp.int32)
    return hashlib.sha256(np.asarray(GPT(cfg).apply({"params": params}, tokens))).hexdigest()


def generated(workdir: Path) -> str:
    """Returns texts that a run's model writes."""
    flags = ["--prompt=def main(", "--max_new_tokens=60", "--num_samples=2", "--seed=1"]
    command = [sys.executable, "-m", "gpt2.generate", f"--workdir={workdir}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


def main(command: str, place: str, *names: str) -> None:
    """Records, or compares with what was recorded."""
    root, kept = Path(place), Path(place) / "record.json"
    own = root / "record" if command == "record" else Path(tempfile.mkdtemp(dir=root))
    own.mkdir(parents=True, exist_ok=True)
    if command == "record":
        from tests import peer

        for name in peer.SMALL:
            peer.write_model(root / "hf" / name, name)
        # Stopped at the step that the other version continues from.
        half = ["train.checkpoint_every=20", "train.keep_every=20"]
        finish(root / "half", 1, half)
        for path in (root / "half" / "checkpoints").iterdir():
            if path.name != "20":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (root / "half" / "samples.txt").unlink()
    found: dict = {}
    before = json.loads(kept.read_text()) if kept.exists() else {}
    wrong = []

    def note(name: str, value) -> None:
        found[name] = value
        if command == "compare":
            same = value == before[name]
            print(f"{'same' if same else 'DIFFERENT':10} {name}", flush=True)
            if not same:
                wrong.append(name)
                (own / f"{name}.json").write_text(json.dumps([before[name], value]))

    def wanted(name: str) -> bool:
        return not names or name in names

    for name, (devices, options) in CASES.items():
        if wanted(name):
            finish(own / name, devices, options)
            note(name, metrics(own / name))
    if wanted("dropout_killed_and_resumed"):
        note("dropout_killed_and_resumed", killed_and_resumed(own / "killed"))
    if wanted("continued"):
        shutil.copytree(root / "half", own / "continued")
        finish(own / "continued", 1, ["train.checkpoint_every=20", "train.keep_every=20"])
        note("continued", metrics(own / "continued"))
    if wanted("logits"):
        for path in sorted((root / "hf").iterdir()):
            note(f"logits of {path.name}", logits(path))
    if wanted("generated"):
        if names and "quickstart" not in names:
            shutil.copytree(root / "record" / "quickstart", own / "quickstart")
        note("generated", generated(own / "quickstart"))
    if command == "record":
        kept.write_text(json.dumps(found))
    if wrong:
        raise SystemExit(f"different: {', '.join(wrong)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
