"""What several test files share: a tiny run of train.py in a process of its own, and a mark."""

import functools
import json
import random
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.config import Config, with_options
from gpt2.config.options import read_option
from gpt2.hf.weights import load_params
from gpt2.model import GPT
from tests.forks import LATE, ROOT, environment, run_command

WORDS = ["the", "of", "and", "to", "in", "that", "was", "his", "he", "it", "with", "is"]
SECONDS = 240  # after which a run counts as hanging
TINY = """
    --config.model.num_layers=1 --config.model.num_heads=2 --config.model.embed_dim=32
    --config.model.context_length=16 --config.data.tokenizer=byte --config.data.batch_size=4
    --config.optim.warmup_steps=2 --config.train.num_steps=8 --config.train.log_every=1
    --config.train.eval_every=4 --config.train.checkpoint_every=2"""
TINY = TINY.split()


def thorough(*values, **options):
    """Returns a case of a parametrized test that the default run leaves to CI."""
    return pytest.param(*values, marks=pytest.mark.thorough, **options)


def options_of(text):
    """Reads options as a command line has them: `model.bias=False optim.eps=1e-4`."""
    pairs = [setting.partition("=") for setting in text.split()]
    return {name: read_option(name, value) for name, _, value in pairs}


def configured(text="", group=""):
    """The default config with options as a command line has them, all of one `group.` or any."""
    options = [f"{group}{option}" for option in text.split()]
    return with_options(Config(), options_of(" ".join(options)))


def tokens_of(dataset, split):
    """All tokens of a split of a prepared corpus."""
    stream = dataset.stream(split)
    return stream.read(0, len(stream))


def documents_of(dataset, *splits):
    """The texts of a prepared corpus of several documents, or of some of its splits."""
    texts = []
    for split in splits or ("train", "validation"):
        tokens = tokens_of(dataset, split)
        (starts,) = np.nonzero(tokens == dataset.tokenizer.eot)
        assert starts[0] == 0
        texts += [dataset.tokenizer.decode(d[1:]) for d in np.split(tokens, starts)[1:]]
    return texts


def patched(folder, lines):
    """Writes a train.py that runs some lines of Python before its run, and returns its path."""
    text = f"""
from gpt2.utils import launch
launch.prepare_process()
import train
from gpt2 import cli
{lines}
cli.run(train.main, cli.define_run)
"""
    (folder / "patched.py").write_text(text)
    return folder / "patched.py"


def struck(folder, number, condition):
    """Writes a train.py that gets a signal once a condition of Python holds, from itself."""
    return patched(
        folder,
        f"""
import os, threading, time
from pathlib import Path

def has_step(number):
    files = Path().glob("*/metrics.jsonl")
    return any(f'"step": {{number}},' in file.read_text() for file in files)

def strike():
    while not ({condition}):
        time.sleep(0.001)
    os.kill(os.getpid(), {int(number)})

threading.Thread(target=strike, daemon=True).start()
""",
    )


def start(workdir, *options, script="train.py", cwd=ROOT, devices=1):
    """Starts train.py, or another script, in a process of its own with so many CPU devices."""
    return subprocess.Popen(
        [
            sys.executable,
            ROOT / script,
            *([f"--workdir={workdir}"] if workdir else []),
            *options,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(devices),
        cwd=cwd,
    )


def run(workdir, *options, script="train.py", cwd=ROOT, devices=1, imports=False):
    """Runs train.py to its end, and returns exit code, standard output and standard error.

    `imports` says that the imports belong to the test. Else they are done already, which takes most
    of a short run.
    """
    if imports:
        return finish(
            start(workdir, *options, script=script, cwd=cwd, devices=devices), SECONDS
        )
    command = [
        str(script),
        *([f"--workdir={workdir}"] if workdir else []),
        *map(str, options),
    ]
    done = run_command(*command, cwd=cwd, seconds=SECONDS, devices=devices)
    if done.code == LATE:
        raise subprocess.TimeoutExpired(command, SECONDS, done.stdout, done.stderr)
    return done.code, done.stdout, done.stderr


def succeed(workdir, *options, **how):
    """Runs train.py, or another script, to an end without an error, and returns its output."""
    code, stdout, stderr = run(workdir, *options, **how)
    assert code == 0, stderr
    return stdout


def finish(process, timeout):
    """Waits for a process, which is killed if it takes longer, and returns what it leaves."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, stdout, stderr


def write_rows(path, rows):
    """Writes JSON, a row on each line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_words(folder, number, words):
    """Writes documents of so many words, the same each time, and returns their pattern."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for index in range(number):
        text = draw.choices(WORDS, k=words)
        (folder / f"{index:02}.txt").write_text(" ".join(text))
    return folder / "*.txt"


def starts_of(workdir):
    """Returns the step from which each start of a run went on."""
    path = workdir / "environment.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def metrics_of(workdir, speed=True):
    """Returns the lines of a run's metrics.jsonl, or what of them does not hang on the clock."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [
        {k: line[k] for k in line if speed or not k.startswith("perf/")}
        for line in lines
    ]


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
    return by_name(load_params(workdir, checkpoint)[1])


def by_name(tree):
    """Returns the leaves of a tree as numpy, by names such as `h_0/mlp/c_fc/kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return {name(path): np.asarray(leaf) for path, leaf in leaves}


@functools.cache
def first_params(cfg):
    """Returns a model's parameters as they are drawn."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return jax.jit(GPT(cfg).init)(jax.random.key(0), tokens)["params"]


@functools.cache
def random_params(cfg):
    """Returns parameters away from 0 and 1, at which some gradients vanish."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(GPT(cfg).init, jax.random.key(0), tokens)["params"]
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        is_weight = path[-1].key in ("kernel", "embedding", "bias")
        mean = 0.0 if is_weight else 0.8
        return np.float32(mean + 0.1 * rng.normal(size=leaf.shape))

    return jax.tree_util.tree_map_with_path(draw, shapes)


def batch_of(tokens):
    """Returns a batch of rows of T + 1 tokens, each of which follows from those before."""
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def in_float64(compute, params):
    """Returns `compute(params)` in float64, and how far float32 may be from it.

    That is ten roundings of its inputs: a small change of these stands for all that a computation
    rounds, and where sums cancel, it tells so, too. By (seeded) chance it is up to three times less
    than what is rounded on the way.
    """
    rng = np.random.default_rng(0)
    eps = np.finfo(np.float32).eps
    exact = jax.tree.map(np.float64, params)
    other = jax.tree.map(lambda x: x * (1 + eps * rng.uniform(-1, 1, x.shape)), exact)
    wanted = compute(exact)
    return wanted, 10 * np.abs(compute(other) - wanted).max()


def assert_rounded(found, compute, params):
    """Holds float32 to `compute(params)` in float64, and returns how far it may be from it."""
    wanted, atol = in_float64(compute, params)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)
    return atol


def write_run(run, final, state="finished", error="", noise=None):
    """Writes what train.py leaves, with a loss that falls to `final` in a straight line."""
    if noise is not None:
        final += 0.003 * noise.standard_normal()
    run.prepare()
    log = f"model  1.2M parameters, attention fused\nstep 1\n{error}\n"
    (run.folder / "log.txt").write_text(log)
    run.workdir.mkdir(exist_ok=True)
    (run.workdir / "config.json").write_text(json.dumps(run.options()))
    shares = np.arange(1, 11) / 10
    steps = np.round(shares * run.config.train.num_steps)
    losses = 8 + (final - 8) * shares
    lines = [
        {"step": int(step), "perf/step_seconds": 0.1, "eval/loss": loss}
        for step, loss in zip(steps, losses, strict=True)
    ]
    write_rows(run.workdir / "metrics.jsonl", lines)
    outcome = {"state": state, "error": error}
    (run.folder / "outcome.json").write_text(json.dumps(outcome))


def copy_project(project):
    """Copies what trains to a directory."""
    for name in ("gpt2", "configs"):
        shutil.copytree(ROOT / name, project / name)
    shutil.copy(ROOT / "train.py", project)


def git(project, *commands):
    """Runs commands of git in a directory."""
    author = "-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"
    for command in commands:
        arguments = ["git", *author, *command.split()]
        subprocess.run(arguments, cwd=project, check=True, capture_output=True)


def make_repository(project, file, text):
    """Makes a git repository of a directory, with a branch `my/idea` that changes a file."""
    git(project, "init", "add .", "commit -m first", "checkout -b my/idea")
    (project / file).write_text(text)
    git(project, "commit -am idea", "checkout -")
