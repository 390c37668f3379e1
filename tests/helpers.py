"""Functions that several test files use: tiny runs of train.py, their files, parameters, git."""

import contextlib
import functools
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from gpt2.config import Config, with_options
from gpt2.config.options import read_option
from gpt2.hf.weights import load_params
from gpt2.model import GPT
from tests.forks import LATE, ROOT, environment, run_command

WORDS = ["the", "of", "and", "to", "in", "that", "was", "his", "he", "it", "with", "is"]
SECONDS = 240  # the time limit of a run
TINY = """
    --config.model.num_layers=1 --config.model.num_heads=2 --config.model.embed_dim=32
    --config.model.context_length=16 --config.data.tokenizer=byte --config.data.batch_size=4
    --config.optim.warmup_steps=2 --config.train.num_steps=8 --config.train.log_every=1
    --config.train.eval_every=4 --config.train.checkpoint_every=2 --config.train.eval_batches=4"""
TINY = TINY.split()


def thorough(*values, **options):
    """Return a case of a parametrized test that only CI runs by default."""
    return pytest.param(*values, marks=pytest.mark.thorough, **options)


def options_of(text):
    """Parse options as on a command line: `model.bias=False optim.eps=1e-4`."""
    options = {}
    for setting in text.split():
        name, _, value = setting.partition("=")
        options[name] = read_option(name, value)
    return options


def configured(text="", group=""):
    """Return the default config with the options in `text`, whose names lack the prefix `group`."""
    options = [f"{group}{option}" for option in text.split()]
    return with_options(Config(), options_of(" ".join(options)))


def tokens_of(dataset, split):
    """Return all tokens of a split of a prepared corpus."""
    stream = dataset.stream(split)
    return stream.read(0, len(stream))


def documents_of(dataset, *splits):
    """Return the documents of a prepared corpus as text, from the named splits or from both."""
    texts = []
    for split in splits or ("train", "validation"):
        tokens = tokens_of(dataset, split)
        (starts,) = np.nonzero(tokens == dataset.tokenizer.eot)
        assert starts[0] == 0
        for document in np.split(tokens, starts)[1:]:
            texts.append(dataset.tokenizer.decode(document[1:]))
    return texts


def patched(folder, lines):
    """Write a train.py that first executes some lines of Python, and return its path."""
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
    """Write a train.py that sends itself a signal once a Python expression is true."""
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
    """Start train.py, or another script or module, in a new process with some CPU devices."""
    program = [ROOT / script] if str(script).endswith(".py") else ["-m", script]
    return subprocess.Popen(
        [sys.executable, *program, *arguments(workdir, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(devices),
        cwd=cwd,
    )


def arguments(workdir, options):
    """Return the arguments of a script as strings."""
    flags = [f"--workdir={workdir}"] if workdir else []
    return [*flags, *map(str, options)]


def run(workdir, *options, script="train.py", cwd=ROOT, devices=1, imports=False):
    """Run train.py to its end, and return its exit code, standard output and standard error.

    With `imports` the process imports everything itself. Otherwise it is a fork of a process that
    has done the imports, which take most of the time of a short run.
    """
    if imports:
        process = start(workdir, *options, script=script, cwd=cwd, devices=devices)
        return finish(process, SECONDS)
    command = [str(script), *arguments(workdir, options)]
    done = run_command(*command, cwd=cwd, seconds=SECONDS, devices=devices)
    if done.code == LATE:
        raise subprocess.TimeoutExpired(command, SECONDS, done.stdout, done.stderr)
    return done.code, done.stdout, done.stderr


def succeed(workdir, *options, **kwargs):
    """Run train.py, or another script, which has to succeed, and return its standard output."""
    code, stdout, stderr = run(workdir, *options, **kwargs)
    assert code == 0, stderr
    return stdout


def finish(process, timeout):
    """Wait for a process, and return the same as `run`. Kill it after `timeout` seconds."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, stdout, stderr


def write_rows(path, rows):
    """Write JSON, one row per line."""
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))


def write_words(folder, number, words):
    """Write `number` documents of `words` random words, and return a glob pattern of the paths."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for index in range(number):
        text = draw.choices(WORDS, k=words)
        (folder / f"{index:02}.txt").write_text(" ".join(text))
    return folder / "*.txt"


def starts_of(workdir):
    """Return the step from which each start of a run continued."""
    path = workdir / "environment.jsonl"
    if not path.exists():
        return []
    return [line["step"] for line in read_rows(path)]


def read_rows(path):
    """Read JSON, one row per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(workdir, speed=True):
    """Return the records of metrics.jsonl. Without `speed`, leave out the measured times."""
    lines = read_rows(workdir / "metrics.jsonl")
    if speed:
        return lines
    return [without_speed(line) for line in lines]


def without_speed(line):
    return {name: line[name] for name in line if not name.startswith("perf/")}


def wait_for_step(process, workdir, step):
    """Wait until metrics.jsonl contains a step or a later step."""
    while process.poll() is None:
        if (workdir / "metrics.jsonl").exists():
            steps = [line["step"] for line in metrics_of(workdir)]
            if max(steps, default=0) >= step:
                return
        time.sleep(0.02)
    raise AssertionError(f"ended before step {step}: {process.stderr.read()}")


def params_of(workdir):
    """Return the parameters of a run by name, as numpy arrays."""
    _, params = load_params(workdir, "latest")
    return by_name(params)


def by_name(tree):
    """Return the leaves of a tree as numpy arrays, by names such as `h_0/mlp/c_fc/kernel`."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        leaves[name] = np.asarray(leaf)
    return leaves


@functools.cache
def first_params(cfg):
    """Return the initial parameters of a model."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return jax.jit(GPT(cfg).init)(jax.random.key(0), tokens)["params"]


@functools.cache
def random_params(cfg):
    """Return random parameters. With values of 0 and 1, some gradients would vanish."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(GPT(cfg).init, jax.random.key(0), tokens)["params"]
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        is_weight = path[-1].key in ("kernel", "embedding", "bias")
        mean = 0.0 if is_weight else 0.8
        return np.float32(mean + 0.1 * rng.normal(size=leaf.shape))

    return jax.tree_util.tree_map_with_path(draw, shapes)


def batch_of(tokens):
    """Split tokens [B, T + 1] into the tokens and the targets [B, T] of a batch."""
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def in_float64(compute, params):
    """Return `compute(params)` in float64, and the tolerance for float32.

    The tolerance is ten times the effect of rounding the inputs once. That effect represents all
    rounding in a computation, and it grows where sums cancel. By chance, it may be up to three
    times smaller than the effect of rounding the intermediate values.
    """
    rng = np.random.default_rng(0)
    eps = np.finfo(np.float32).eps
    exact = jax.tree.map(np.float64, params)

    def perturb(x):
        return x * (1 + eps * rng.uniform(-1, 1, x.shape))

    expected = compute(exact)
    perturbed = compute(jax.tree.map(perturb, exact))
    return expected, 10 * np.abs(perturbed - expected).max()


def assert_rounded(found, compute, params):
    """Compare `found` (float32) with `compute(params)` in float64, and return the tolerance."""
    expected, atol = in_float64(compute, params)
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    return atol


@contextlib.contextmanager
def parsed(define_flags, *arguments):
    """Define flags, parse arguments as a command would, and yield the flags' values."""
    known = set(flags.FLAGS)
    define_flags()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["command", *arguments])
            flags.FLAGS(sys.argv)
            yield flags.FLAGS
    finally:
        for name in set(flags.FLAGS) - known:
            delattr(flags.FLAGS, name)


def write_run(run, final, state="finished", error="", noise=None):
    """Write the files of a run that has ended, with a loss that falls linearly to `final`."""
    if noise is not None:
        final += 0.003 * noise.standard_normal()
    run.prepare()
    log = f"model  1.2M parameters, attention fused\nstep 1\n{error}\n"
    (run.folder / "log.txt").write_text(log)
    run.workdir.mkdir(exist_ok=True)
    (run.workdir / "config.json").write_text(json.dumps(run.options()))
    lines = []
    for fraction in np.arange(1, 11) / 10:
        step = round(fraction * run.config.train.num_steps)
        loss = 8 + (final - 8) * fraction
        lines.append({"step": step, "perf/step_seconds": 0.1, "eval/loss": loss})
    write_rows(run.workdir / "metrics.jsonl", lines)
    outcome = {"state": state, "error": error, "seconds": 0.1}
    (run.folder / "outcome.json").write_text(json.dumps(outcome))


def cut(path):
    """Leave the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    """Change a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = (Path.unlink, cut, flip_a_bit)


def copy_project(project):
    """Copy the code and its tests to a new directory."""
    for name in ("gpt2", "configs", "tests"):
        compiled = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, project / name, ignore=compiled)
    for name in ("train.py", "eval.py", "pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, project)


def git(project, *commands):
    """Run git commands in a directory."""
    author = "-c user.name=A -c user.email=a@b -c commit.gpgsign=false"
    for command in commands:
        words = f"git {author} {command}".split()
        subprocess.run(words, cwd=project, check=True, capture_output=True)


def make_repository(project, file, text):
    """Create a git repository in a directory, with a branch `my/idea` that changes a file."""
    git(project, "init", "add .", "commit -m first", "checkout -b my/idea")
    (project / file).write_text(text)
    git(project, "commit -am idea", "checkout -")
