"""The first run of each program: nothing else uses the devices, and a failure ends in one line."""

import re
from collections import Counter

import pytest

from gpt2.training.checkpoint_files import latest_step
from tests.helpers import TINY, metrics_of, patched, run, succeed

OPTIONS = """
    --config.train.eval_every=3 --config.train.eval_batches=2 --config.train.eval_tasks_every=4
    --config.logging.watch_every=5"""
OPTIONS = [*TINY, *OPTIONS.split()]

# The second of two devices stands for the accelerator, and the first one is the host's.
RECORDED_RUN = """
import sys
import threading
import jax
from gpt2.evals import scoring
from gpt2.model import sampling
from gpt2.parallel import compiled, pjit

host, accelerator = jax.local_devices()
jax.config.update("jax_default_device", accelerator)
train.find_devices = lambda config: [accelerator]


def record(owner, name):
    function = getattr(owner, name)

    def recorded(*args, **kwargs):
        thread = threading.current_thread().name
        # One call for a line, because the other thread writes too.
        sys.stdout.write(f"RECORDED {owner.__name__}.{name} in {thread}\\n")
        return function(*args, **kwargs)

    setattr(owner, name, recorded)


record(jax, "device_put")
record(jax, "make_array_from_process_local_data")
record(pjit.PjitBackend, "put_batch")
record(pjit.PjitBackend, "init_state")
record(compiled.CompiledStep, "__call__")
record(compiled, "run_alone")
record(scoring, "run_alone")
record(sampling, "run_alone")
"""
OWN_BATCHES = """
import sys
import threading
import jax


def batches(split, seed):
    key = jax.random.key(seed)
    for step in range(2 if split == "validation" else 4):
        rows = jax.random.randint(jax.random.fold_in(key, step), (4, 17), 0, 256)
        (device,) = rows.devices()
        thread = threading.current_thread().name
        sys.stdout.write(f"BATCH {split} of {device.id} in {thread}\\n")
        yield {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
"""


def test_only_the_loops_thread_uses_the_devices_and_users_batches_use_the_cpu(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_BATCHES)
    (tmp_path / "text8").write_text("the cat sat on the mat")
    options = [*OPTIONS, "--config.data.corpus=python:mine:batches"]
    options += [f"--config.train.eval_tasks=text8:{tmp_path}"]
    script = patched(tmp_path, RECORDED_RUN)
    stdout = succeed(tmp_path / "run", *options, script=script, cwd=tmp_path, devices=2)
    uses = re.findall("^RECORDED (.*) in (.*)$", stdout, re.M)
    assert {thread for _, thread in uses} == {"MainThread"}
    names = Counter(name for name, _ in uses)
    assert names["CompiledStep.__call__"] > 12
    assert names["PjitBackend.put_batch"] > 12
    assert names["jax.device_put"] > 1
    # The first runs of the train step, the norm-logging step and the validation step.
    assert names["gpt2.parallel.compiled.run_alone"] == 3
    assert names["gpt2.evals.scoring.run_alone"] > 1
    assert names["gpt2.model.sampling.run_alone"] == 1
    batches = re.findall("^BATCH (.*) of (.*) in (.*)$", stdout, re.M)
    assert {*batches} == {("train", "0", "prefetch"), ("validation", "0", "prefetch")}


# A program whose first run fails as a GPU's does. The device fails from then on.
FAILING_RUN = """
import jax
import jax.numpy as jnp
from gpt2.evals import scoring
from gpt2.model import sampling
from gpt2.parallel import pjit


class Failing:
    def __init__(self, function=None):
        self.function = function

    def lower(self, *args):
        self.function.lower(*args)
        return self

    def compile(self, options):
        return self

    def memory_analysis(self):
        return None

    def __call__(self, *args, **kwargs):
        jnp.isfinite = fail
        fail()


def fail(*_):
    message = "cuda_graph_end_capture(...) failed with capturing stream has unjoined work"
    raise jax.errors.JaxRuntimeError("INTERNAL: " + message + "\\n" + "a stack")


def fail_in(name, only=None):
    compile_step = getattr(pjit.PjitBackend, name)

    def compile_failing(backend, step):
        compiled = compile_step(backend, step)
        is_meant = only is None or step.__name__ == only
        return Failing(compiled) if is_meant else compiled

    setattr(pjit.PjitBackend, name, compile_failing)


def fail_in_scoring():
    scoring._program = lambda model, mesh: Failing()


def fail_in_sampling():
    sampling._generate = Failing()


jax.default_backend = lambda: "gpu"
"""
MESSAGE = (
    "A compiled function failed when it first ran (INTERNAL: cuda_graph_end_capture(...) failed "
    "with capturing stream has unjoined work)"
)


def run_failing(tmp_path, failure, *options):
    """Return the exit code and the error of a run, which has to be one line."""
    script = patched(tmp_path, f"{FAILING_RUN}\n{failure}")
    options = [*OPTIONS, "--config.data.corpus=synthetic", *options]
    code, _, stderr = run(tmp_path / "run", *options, script=script)
    assert stderr.count("\n") == 1, stderr
    assert MESSAGE in stderr
    return code


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("failure", "saved"),
    [
        ("fail_in('compile_train')", None),
        ("fail_in('compile_eval')", None),  # before the first checkpoint
        ("fail_in('compile_watch')", 4),
        ("fail_in_scoring()", 3),
        ("fail_in_sampling()", 8),
    ],
)
def test_a_first_run_that_fails_ends_in_one_line_and_the_run_can_continue(
    tmp_path, failure, saved
):
    (tmp_path / "text8").write_text("the cat sat on the mat")
    task = f"--config.train.eval_tasks=text8:{tmp_path}"
    assert run_failing(tmp_path, failure, task) == 1
    assert latest_step(tmp_path / "run") == saved
    options = [*OPTIONS, "--config.data.corpus=synthetic", task]
    succeed(tmp_path / "run", *options, "--config.model.attention=plain")
    assert metrics_of(tmp_path / "run")[-1]["step"] == 8


@pytest.mark.thorough
def test_a_failing_diagnosis_leaves_the_message_of_the_divergence(tmp_path):
    options = ["--config.optim.learning_rate=1e30", "--config.optim.warmup_steps=0"]
    assert run_failing(tmp_path, "fail_in('compile_eval', 'probe')", *options) == 3
