"""train.py as a process: its files, its restarts, its errors."""

import dataclasses
import json
import re
import signal
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest

from gpt2.config import load_config
from gpt2.data import prepare_dataset
from gpt2.evals.tasks import validation_data
from gpt2.model import GPT
from gpt2.optim import make_optimizer, make_schedule
from gpt2.training import TrainState, next_token_loss
from gpt2.training.checkpoint_files import latest_step
from gpt2.training.steps import make_train_step, make_update
from gpt2.utils.prng import init_key
from tests.data.batches import open_batches
from tests.data.hub import FIRST, SECOND, Hub, write_hub
from tests.forks import ROOT, environment
from tests.helpers import (
    TINY,
    by_name,
    metrics_of,
    params_of,
    patched,
    run,
    start,
    starts_of,
    struck,
    succeed,
    thorough,
    write_words,
)
from tests.telemetry.event_files import events


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Write a few documents, and return the options of train.py that read them."""
    pattern = write_words(tmp_path_factory.mktemp("corpus") / "texts", 20, 400)
    return [f"--config.data.corpus=text:{pattern}", "--config.data.val_fraction=0.1"]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Write the text of a task, and return the task's name."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "text8").write_text("the cat sat on the mat")
    return f"text8:{folder}"


@pytest.fixture(scope="module")
def options(corpus, task):
    """Return the options of a run that averages its weights and scores the task."""
    tasks = [f"--config.train.eval_tasks={task}", "--config.train.eval_tasks_every=3"]
    whole = "--config.train.eval_batches=0"
    return [*TINY, *corpus, *tasks, whole, "--config.optim.ema=0.5"]


@pytest.fixture(scope="module")
def finished(options, tmp_path_factory):
    """Train without interruption."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    return workdir, succeed(workdir, *options)


def test_a_run_leaves_every_file_of_its_workdir(finished):
    workdir, stdout = finished
    names = """
        .lock checkpoints config.json data.json environment.jsonl loss.png metrics.jsonl
        samples.txt tensorboard tokenizer.json"""
    assert sorted(path.name for path in workdir.iterdir()) == names.split()
    assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
    summary = r"validation loss \d\.\d{4}, perplexity [\d.]+, \d\.\d{3} bits per b"
    assert re.search(summary, stdout)
    assert re.search(r"^time: [\d:]+; .*\d%", stdout, re.MULTILINE)


def steps_of(lines, name="step"):
    """Return the steps of the lines that have a metric."""
    return [line["step"] for line in lines if name in line]


def losses_by_tokens(workdir):
    """Return the training loss after each number of tokens."""
    return {line["tokens"]: line["train/loss"] for line in metrics_of(workdir)}


def test_metrics_have_their_names_and_each_step_once(finished):
    lines = metrics_of(finished[0])
    assert steps_of(lines) == [*range(1, 9)]
    for name in ("eval/loss", "eval/perplexity", "eval/bits_per_byte"):
        assert steps_of(lines, name) == [4, 8]
    assert steps_of(lines, "eval/text8/bits_per_byte") == [3, 6, 8]
    every_step = """
        tokens train/loss train/grad_norm train/learning_rate perf/step_seconds
        perf/tokens_per_second perf/data_wait_seconds"""
    for name in every_step.split():
        assert steps_of(lines, name) == steps_of(lines)
    for line in lines:
        assert line["tokens"] == line["step"] * 4 * 16
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]


def test_a_run_is_repeated_from_its_record(finished, tmp_path):
    record = finished[0] / "config.json"
    again = tmp_path / "again"
    succeed(again, f"--config={record}")
    assert (again / "config.json").read_bytes() == record.read_bytes()

    assert metrics_of(again, speed=False) == metrics_of(finished[0], speed=False)


def test_eval_scores_the_checkpoint_as_training_did(finished, task, tmp_path):
    workdir, _ = finished
    output = tmp_path / "scores.json"
    arguments = [f"--tasks=validation,{task}", f"--output={output}", "--checkpoint=8"]
    process = start(workdir, *arguments, script="eval.py")
    process.stdout.close()  # as `| head` does
    process.communicate()
    assert process.returncode == 0
    found = [figure["value"] for figure in json.loads(output.read_text())]
    last = metrics_of(workdir)[-1]
    assert found[0] == pytest.approx(last["eval/loss"], rel=1e-5)
    assert found[-1] == pytest.approx(last["eval/text8/bits_per_byte"], rel=1e-5)


@pytest.mark.thorough
def test_a_run_that_measures_noise_on_two_devices_can_be_evaluated(tmp_path):
    options = [*TINY, "--config.data.corpus=synthetic"]
    options.append("--config.logging.noise_scale=True")
    succeed(tmp_path / "run", *options, devices=2)
    assert "loss" in succeed(tmp_path / "run", script="eval.py")


def test_samples_are_those_of_the_command_with_the_averaged_weights(finished):
    workdir, _ = finished
    flags = ["--num_samples=3", "--max_new_tokens=15", "--temperature=0.8"]
    flags.append("--top_k=50")
    output = succeed(workdir, *flags, script="gpt2/generate.py")
    samples = re.split(r"\n?--- sample \d\n", output)[1:]
    rule = "\n" + "-" * 80 + "\n"
    assert (workdir / "samples.txt").read_text() == rule.join(samples)


@pytest.mark.parametrize(
    "kill_at",
    [
        "checkpoints/4",
        thorough(".lock"),
        thorough("config.json"),
        thorough("checkpoints/2"),
    ],
)
def test_killed_moved_and_restarted_equals_never_killed(
    finished, options, tmp_path, kill_at
):
    killed = tmp_path / "killed"
    script = struck(tmp_path, signal.SIGKILL, f"Path('killed/{kill_at}').exists()")
    code, *_ = run(killed, *options, script=script, cwd=tmp_path)
    assert code == -signal.SIGKILL
    assert not (killed / "samples.txt").exists()
    workdir = killed.rename(tmp_path / "moved, elsewhere")
    saved = latest_step(workdir) or 0
    succeed(workdir, *options)
    assert starts_of(workdir)[-1] == saved
    resumes = kill_at.startswith("checkpoints")
    assert (saved > 0) == resumes
    chex.assert_trees_all_equal(params_of(workdir), params_of(finished[0]))
    assert metrics_of(workdir, speed=False) == metrics_of(finished[0], speed=False)
    purges = [event.step for event in events(workdir) if event.HasField("session_log")]
    assert purges[-1] == saved + 1


# The number of steps, and their batch size, context length and window.
PIECES = ((2, 2, 8, 4), (4, 4, 16, 4), (2, 2, 16, 0))
SCHEDULES = """
    --config.train.batch_schedule=0=2,2=4,6=2 --config.train.context_schedule=0=8,2=16
    --config.train.window_schedule=0=4,6=0"""
ON_HUB = """
import huggingface_hub
from pathlib import Path
from tests.data.hub import Hub

hub = Hub(Path("{hub}"))
hub.newest = "{newest}"
huggingface_hub.HfApi = lambda: hub
huggingface_hub.HfFileSystem = hub.open
"""


@pytest.mark.thorough
def test_a_run_continues_on_the_revision_of_the_hub_with_which_it_began(
    tmp_path, monkeypatch
):
    hub = Hub(tmp_path / "hub")
    for revision in (FIRST, SECOND):
        texts = [f"{revision[0]} {i} " + "words " * 40 for i in range(50)]
        write_hub(hub.root("o/n", revision), ["default/train"], texts)
    options = [*TINY, "--config.data.corpus=hf:o/n", "--config.data.val_fraction=0.1"]
    options.append(f"--config.data.data_dir={tmp_path / 'data'}")

    def train(name, newest, num_steps):
        script = patched(tmp_path, ON_HUB.format(hub=hub.path, newest=newest))
        steps = f"--config.train.num_steps={num_steps}"
        succeed(tmp_path / name, *options, steps, script=script)
        return json.loads((tmp_path / name / "data.json").read_text())["revision"]

    assert train("run", FIRST, 4) == FIRST
    assert train("run", SECOND, 6) == FIRST
    assert train("new", SECOND, 4) == SECOND
    # eval.py reads the text of the run.
    hub.newest = SECOND
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    for name, revision in (("run", FIRST), ("new", SECOND)):
        _, recorded = validation_data(str(tmp_path / name), None, "", None)
        assert recorded["revision"] == revision
    assert hub.num_asked == 0


COUNTED = """
from gpt2.training import program
compile_once = program.compile_once
program.compile_once = lambda *args, **how: print("compiles") or compile_once(*args, **how)
"""


@pytest.mark.thorough
def test_a_run_of_several_shapes_is_that_of_its_pieces_by_hand(corpus, tmp_path):
    options = [*TINY, *SCHEDULES.split(), *corpus]
    workdir = tmp_path / "run"
    stdout = succeed(workdir, *options, script=patched(tmp_path, COUNTED))
    assert stdout.count("compiles\n") == len(PIECES) + 1  # and the validation
    config = load_config(workdir).with_vocabulary(257)
    parts = prepare_dataset(config.data).parts
    rows = open_batches(parts, batch_size=1, context_length=16)
    first = [rows.batch(index) for index in range(1, 23)]
    tokens = np.concatenate([row["tokens"][0] for row in first])
    targets = np.concatenate([row["targets"][0] for row in first])
    schedule = make_schedule(config.optim, 8)
    parameters = GPT(config.gpt()).parameters()
    optimizer = make_optimizer(config.optim, schedule, parameters, num_steps=8)
    params = GPT(config.gpt()).init(init_key(0), np.zeros((1, 1), int))["params"]
    state = TrainState.create(params, optimizer, "float32")
    start = 0
    losses = {}
    for steps, size, length, window in PIECES:
        model = GPT(dataclasses.replace(config.gpt(), window=window))
        loss = next_token_loss(model)
        update = make_update(loss, optimizer, schedule, seed=0)
        step = jax.jit(make_train_step(update))
        for _ in range(steps):
            stop = start + size * length
            batch = {
                "tokens": tokens[start:stop].reshape(size, length),
                "targets": targets[start:stop].reshape(size, length),
            }
            state, metrics = step(state, batch)
            losses[stop] = float(metrics["train/loss"])
            start = stop
    assert losses_by_tokens(workdir) == pytest.approx(losses, rel=1e-5)
    params = params_of(workdir)
    for name, values in by_name(state.params).items():
        np.testing.assert_allclose(params[name], values, atol=1e-5, err_msg=name)


@pytest.mark.thorough
def test_a_run_of_several_shapes_by_pmap_is_that_of_one_device(corpus, tmp_path):
    options = [*TINY, *SCHEDULES.split(), *corpus]
    succeed(tmp_path / "one", *options)
    succeed(tmp_path / "pmap", *options, "--config.parallel.backend=pmap", devices=2)
    expected = losses_by_tokens(tmp_path / "one")
    assert losses_by_tokens(tmp_path / "pmap") == pytest.approx(expected, rel=1e-5)


COUNTS_MISSES = """
import jax, os, sys
RARE = '''
    matplotlib pandas pyarrow scipy tensorflow_datasets tensorboardX huggingface_hub torch
    jax.experimental.pallas'''
print("imported", sorted({*RARE.split()} & {*sys.modules}))
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))

def stop(*_):  # once the first step has been dispatched
    print("compiled", sum(name.endswith("/cache_misses") for name in events), flush=True)
    os._exit(0)

train.Reporter.step = stop
"""


@pytest.mark.thorough
def test_a_second_start_compiles_nothing_and_no_start_imports_what_few_runs_need(
    tmp_path,
):
    # The cache as users have it.
    variables = {k: v for k, v in environment().items() if "CACHE" not in k}
    variables["XDG_CACHE_HOME"] = str(tmp_path)
    script = patched(tmp_path, COUNTS_MISSES)
    misses = []
    for name in ("first", "second"):
        command = [sys.executable, script, f"--workdir={tmp_path / name}", *TINY]
        output = subprocess.check_output(command, text=True, cwd=ROOT, env=variables)
        assert "imported []" in output
        found = re.search(r"compiled (\d+)\n", output)
        misses.append(int(found[1]))
    assert misses[0] > 3
    assert misses[1] == 0


@pytest.mark.parametrize(
    ("every", "message"),
    [
        thorough(1, "step 1: every parameter is finite"),
        (2, r"step 2: .* was the first"),
    ],
)
def test_a_diverged_state_is_explained_and_never_saved(
    corpus, tmp_path, every, message
):
    options = [f"--config.train.checkpoint_every={every}"]
    options += ["--config.train.eval_every=0", "--config.optim.warmup_steps=0"]
    options += ["--config.optim.learning_rate=1e30"]
    code, _, stderr = run(tmp_path / "run", *TINY, *corpus, *options)
    assert code == 3
    assert stderr.count("\n") == 1
    assert re.search(message, stderr)
    assert latest_step(tmp_path / "run") is None


FAILS = """
import numpy as np

def batches(split):
    rows = np.random.default_rng(0).integers(0, 256, (4, 17))
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
    yield batch
    if split == "train":
        yield batch
    {error}
"""


@pytest.mark.parametrize(
    ("split", "error", "message"),
    [
        ("validation", "raise OSError(5, split)", "OSError: [Errno 5] validation"),
        # Only a run that has reached its last step ends with 0.
        thorough("train", "raise SystemExit(0)", "sys.exit was called before"),
    ],
)
def test_a_failure_between_steps_saves_the_newest_state(
    tmp_path, split, error, message
):
    (tmp_path / "mine.py").write_text(FAILS.replace("{error}", error))
    every = 2 if split == "validation" else 0
    options = [*TINY, f"--config.train.eval_every={every}"]
    corpus = "--config.data.corpus=python:mine:batches"
    code, _, stderr = run(tmp_path / "run", *options, corpus, cwd=tmp_path)
    assert code == 1
    assert message in stderr
    assert latest_step(tmp_path / "run") == 2
    assert metrics_of(tmp_path / "run")[-1]["step"] == 2


REMOVES = """
import pathlib
import numpy as np

def batches(split):
    if pathlib.Path("fails").exists():
        pathlib.Path("text8").unlink(missing_ok=True)
    while True:
        rows = np.zeros((4, 16), int)
        yield {"tokens": rows, "targets": rows}
"""


@pytest.mark.thorough
@pytest.mark.parametrize("num_steps", [2, 4])
def test_tasks_that_failed_are_scored_by_the_next_start(tmp_path, num_steps):
    options = [*TINY, f"--config.train.num_steps={num_steps}"]
    options += ["--config.train.eval_tasks_every=2", "--config.train.eval_batches=1"]
    options += [f"--config.train.eval_tasks=text8:{tmp_path}"]
    options += ["--config.data.corpus=python:mine:batches"]
    (tmp_path / "mine.py").write_text(REMOVES)
    (tmp_path / "fails").touch()
    for code, step in ((2, 2), (0, num_steps)):
        (tmp_path / "text8").write_text("the cat sat on the mat")
        found, _, stderr = run(tmp_path / "run", *options, cwd=tmp_path)
        assert found == code, stderr
        assert latest_step(tmp_path / "run") == step
        (tmp_path / "fails").unlink(missing_ok=True)
    scored = [
        e["step"]
        for e in metrics_of(tmp_path / "run")
        if "eval/text8/bits_per_byte" in e
    ]
    assert scored == list(range(2, num_steps + 1, 2))


@pytest.mark.thorough
def test_an_average_that_zero1_spreads_is_validated(tmp_path):
    options = [*TINY, "--config.data.corpus=synthetic", "--config.train.num_steps=1"]
    options += ["--config.optim.ema=0.5", "--config.parallel.strategy=zero1"]
    succeed(tmp_path / "run", *options, devices=2)


@pytest.mark.thorough
def test_a_finished_run_says_so_and_can_only_go_on(tmp_path):
    workdir = tmp_path / "run"
    samples = workdir / "samples.txt"
    options = [*TINY, "--config.data.corpus=synthetic", "--config.train.num_steps=2"]
    # One batch of validation is too few for bits per byte.
    options += ["--config.train.eval_batches=1"]

    output = succeed(workdir, *options)
    assert "validation loss" in output
    assert "per byte" not in output
    before = [path.stat().st_mtime_ns for path in sorted(workdir.iterdir())]
    output = succeed(workdir, *options)
    assert f"{workdir} is finished at step 2" in output
    after = [path.stat().st_mtime_ns for path in sorted(workdir.iterdir())]
    assert after == before

    code, _, stderr = run(workdir, *options, "--config.train.num_steps=1")
    assert code == 2
    assert "holds a run of 2 steps, more than train.num_steps=1" in stderr

    # A run that was killed between its last checkpoint and its samples writes them later.
    samples.unlink()
    succeed(workdir, *options)
    assert samples.exists()
    assert steps_of(metrics_of(workdir)) == [1, 2]

    # The samples of an earlier end are replaced.
    samples.write_text("of step 2")
    succeed(workdir, *options, "--config.train.num_steps=3")
    assert samples.read_text() != "of step 2"
    assert steps_of(metrics_of(workdir)) == [1, 2, 3]
    assert starts_of(workdir) == [0, 2, 2]
