"""Runs that train together: each is as it would be alone, whatever its neighbours do."""

import itertools
import shutil
import subprocess
import sys
import time
import zlib
from datetime import datetime
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import train
from gpt2.config import with_options
from gpt2.config.options import OPTIONS
from gpt2.data import prepare
from gpt2.lab.ablate import __main__ as command
from gpt2.lab.ablate.groups import group_runs
from gpt2.lab.ablate.runs import Run
from gpt2.lab.ablate.together import Places
from gpt2.training import Batches
from gpt2.utils.code import read_starts
from tests.forks import environment, run_command
from tests.helpers import (
    ROOT,
    TINY,
    configured,
    metrics_of,
    options_of,
    params_of,
    starts_of,
    succeed,
    thorough,
    write_run,
)
from tests.lab.test_ablate import ablate, rows_of, start_ablate

# Higher rates amplify rounding.
BASE = configured("""
    model.num_layers=1 model.num_heads=2 model.embed_dim=32 model.context_length=16
    model.vocab_size=257 data.corpus=synthetic data.tokenizer=byte data.batch_size=4
    optim.learning_rate=1e-3 optim.warmup_steps=10 train.num_steps=100""")
ADAM = [
    {"seed": 1, "model.init_std": 0.04},
    {"seed": 4294967295, "optim.learning_rate": 5e-4},
    {"optim.learning_rate": 2e-3, "optim.weight_decay": 0.0, "optim.beta2": 0.99},
    {"optim.beta1": 0.8, "optim.eps": 1e-6, "optim.end_fraction": 0.0},
]


def configs_of(changes, options=""):
    """Returns a config for each change of `BASE` with some options."""
    base = with_options(BASE, options_of(options))
    return [with_options(base, change) for change in changes]


@pytest.fixture
def on_one_device(monkeypatch):
    """Maps runs over one device, as on an accelerator."""
    monkeypatch.setattr("gpt2.lab.ablate.together.platform_of", lambda device: "gpu")


def batches_of(config, dataset, program):
    return Batches(config, dataset, program.backend).train(0, config.train.num_steps)


def train_together(configs, devices, steps=20):
    """Returns each metric [places, steps], and the places."""
    dataset = prepare(configs[0].data)
    places = Places(configs, jax.devices()[:devices], dataset)
    batches = [batches_of(config, dataset, places.program) for config in configs]
    programs = map(places.program.with_config, configs)
    places.begin(configs, [train.first_state(each, dataset) for each in programs])
    found = []
    for _ in range(steps):
        given = dict(enumerate(map(next, batches)))
        found.append(jax.device_get(places.step(given)))
    metrics = {name: np.stack([each[name] for each in found], 1) for name in found[0]}
    return metrics, places


def train_alone(config, steps=20, scale=1.0):
    """Returns each metric [steps] of a run of train.py on one device.

    The first parameters are multiplied by `scale`.
    """
    dataset = prepare(config.data)
    program = train.make_program(config, jax.devices()[:1])
    state = train.first_state(program, dataset)
    scaled = jax.tree.map(lambda x: x * scale, state.params)
    state = state.replace(params=scaled)
    found = []
    for batch in itertools.islice(batches_of(config, dataset, program), steps):
        if not found:
            step = program.compile_train(state, batch)
        state, metrics = step(state, batch)
        found.append(jax.device_get(metrics))
    return {name: np.stack([each[name] for each in found]) for name in found[0]}


@pytest.mark.parametrize("devices", [len(ADAM), thorough(1)])
def test_runs_together_have_the_losses_of_runs_alone(devices, request):
    if devices == 1:
        request.getfixturevalue("on_one_device")
    configs = configs_of(ADAM, "model.dropout=0.1")
    found, _ = train_together(configs, devices)
    losses = found["train/loss"]
    last = losses[: len(configs), -1]
    assert len(np.unique(np.round(last, 4))) == len(configs)  # the numbers do something
    for place, config in enumerate(configs):
        alone = train_alone(config)
        np.testing.assert_allclose(losses[place], alone["train/loss"], rtol=1e-5)
        rates = found["train/learning_rate"][place]
        np.testing.assert_allclose(rates, alone["train/learning_rate"], rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", sorted({*OPTIONS["optim.name"].choices} - {"schedule_free"})
)
def test_every_optimizer_takes_its_numbers_from_outside(name):
    changes = [{}, {"seed": 1, "optim.weight_decay": 0.2}]
    for setting in ("beta1=0.8", "beta2=0.9", "eps=1e-5", "alpha=3.0"):
        option = OPTIONS["optim." + setting.partition("=")[0]]
        if name in option.needs.partition("=")[2].split("|"):
            changes.append(options_of(f"optim.{setting}"))
    configs = configs_of(changes, f"optim.name={name}")
    found, _ = train_together(configs, len(configs), steps=12)
    assert len(np.unique(found["train/loss"][:, -1])) == len(configs)
    for place, config in enumerate(configs):
        alone = train_alone(config, steps=12)["train/loss"]
        rtol = 1e-5
        if name == "soap":
            # Bases of matrices that lack rank amplify rounding, by so much.
            rounded = train_alone(config, steps=12, scale=1 + 2**-22)["train/loss"]
            rtol += 10 * np.abs(rounded / alone - 1).max()
        np.testing.assert_allclose(found["train/loss"][place], alone, rtol=rtol)


@pytest.mark.parametrize("devices", [3, 1])
def test_no_bit_of_a_run_changes_when_its_neighbours_do(devices, request):
    if devices == 1:
        request.getfixturevalue("on_one_device")
    others = (
        [{"seed": 5}, {"seed": 6}],
        [{"optim.learning_rate": 1e30}, {"optim.beta2": 0.5}],
    )
    losses = []
    states = []
    for first, last in others:
        configs = configs_of([first, {"seed": 1}, last], "model.dropout=0.1")
        found, places = train_together(configs, devices)
        assert places.number == 3
        losses.append(found["train/loss"])
        states.append([places.state(place).params for place in range(3)])
    assert (losses[0][0] != losses[1][0]).any() and not np.isfinite(losses[1][0]).all()
    np.testing.assert_array_equal(losses[0][1], losses[1][1])
    before, after = states
    jax.tree.map(np.testing.assert_array_equal, before[1], after[1])
    tables = [np.asarray(each["wte"]["embedding"]) for each in before]
    assert (tables[0] != tables[1]).any() and (tables[1] != tables[2]).any()


def test_memory_decides_how_many_runs_an_accelerator_holds(on_one_device, monkeypatch):
    configs = configs_of([{"seed": seed} for seed in range(8)])
    dataset = prepare(BASE.data)
    device = jax.devices()[0]
    whole = Places(configs, [device], dataset)
    assert whole.number == 8
    limit = whole.train_step.peak_bytes
    monkeypatch.setattr(type(device), "memory_stats", lambda _: {"bytes_limit": limit})
    assert Places(configs, [device], dataset).number == 4


def runs_of(*configs, **options):
    return [Run("arm", config, None, **options) for config in configs]


def test_runs_that_differ_in_numbers_alone_train_together(tmp_path):
    changes = [{}, {"seed": 1}, {"optim.beta2": 0.5, "model.init_std": 0.1}]
    alike = runs_of(*configs_of(changes))
    others = runs_of(*configs_of([{"optim.name": "lion"}, {"model.dropout": 0.1}]))
    assert group_runs([*alike, *others], 1) == [alike, *([each] for each in others)]
    assert group_runs(alike, 2) == [[alike[0], alike[2]], [alike[1]]]
    for option in (
        "optim.name=schedule_free",
        "train.batch_schedule=50=8",
        "parallel.data=2",
        "logging.watch_every=5",
        "data.corpus=python:a:b",
    ):
        seeds = [{"seed": 0}, {"seed": 1}]
        apart = runs_of(*configs_of(seeds, f"optim.schedule=constant {option}"))
        assert group_runs(apart, 1) == [[each] for each in apart]
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    code = runs_of(*configs_of(changes), source=tmp_path)
    (tmp_path / "other").symlink_to(tmp_path)
    code += runs_of(BASE, source=tmp_path / "other")  # with the options of the first
    assert group_runs(code, 1) == [[each] for each in code]


def test_a_look_ends_an_arm_of_runs_together_and_the_report_is_that_of_runs_apart(
    tmp_path, monkeypatch
):
    """Both have the same scores, by arm and seed."""
    waiting = []

    def train_all(groups, slots, score):
        waiting.append([])
        for group in groups:
            begin = [each for each in group if each.outcome().state == "waiting"]
            for each in begin:
                loss = 3.7 if "0.0001" in each.arm else 3.8
                noise = np.random.default_rng(zlib.crc32(each.label.encode()))
                write_run(each, loss, noise=noise)
            waiting[-1].append([each.label for each in begin])

    vocabulary = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=257))
    monkeypatch.setattr(command, "prepare", lambda _: vocabulary)
    monkeypatch.setattr(command, "train_all", train_all)
    on_eight = with_options(BASE, {"data.batch_size": 8})
    monkeypatch.setattr(command.cli, "parse_config", lambda: on_eight)
    monkeypatch.setattr(sys, "argv", ["ablate"])
    texts = []
    for together in (True, False):
        root = tmp_path / str(together) / "sweep"
        given = dict(
            workdir=str(root),
            vary=["optim.learning_rate=1e-4,2e-3"],
            one_at_a_time=False,
            seeds=["3", "5"],
            tune=[],
            equal="tokens",
            jobs=1,
            together=together,
            dry_run=False,
            report=False,
        )
        monkeypatch.setattr(command, "FLAGS", SimpleNamespace(**given))
        assert command.main() == 0
        names = ("report.md", "results.csv", "verdicts.json")
        texts.append([(root / name).read_text() for name in names])
    assert texts[0] == texts[1] and "| better |" in texts[0][0]
    first, second, *apart = waiting
    (three_seeds,) = first
    (two_more,) = second
    assert len(three_seeds) == 3 * 3
    left = ["baseline", "optim.learning_rate=0.002"]
    assert two_more == [f"{arm} seed {seed}" for seed in (3, 4) for arm in left]
    alone = [label for groups in apart for group in groups for label in group]
    assert alone == [*three_seeds, *two_more]


def written(folder, *changes, more=""):
    """Writes the folders of runs of a tiny model, and returns them."""
    options = f"""
        train.num_steps=8 train.eval_every=4 train.checkpoint_every=2 train.log_every=1
        train.eval_batches=2 optim.warmup_steps=2 logging.tensorboard=False {more}"""
    runs = []
    for i, config in enumerate(configs_of(changes, options)):
        each = Run("arm", config, folder / str(i))
        each.prepare()
        runs.append(each)
    return runs


def together(runs, devices=2):
    return run_command(
        "gpt2.lab.ablate.together",
        *[str(each.folder) for each in runs],
        cwd=ROOT,
        seconds=240,
        devices=devices,
    )


def test_a_run_that_diverges_leaves_and_the_others_end_as_runs_of_train_py(tmp_path):
    changes = [{"seed": seed} for seed in range(3)]
    changes[1] |= {"optim.learning_rate": 1e30}
    runs = written(tmp_path, *changes)
    done = together(runs)  # two waves
    assert done.code == 0, done.stderr + done.stdout
    states = [each.outcome().state for each in runs]
    assert states == ["finished", "diverged", "finished"]
    assert "the loss is not finite at step" in runs[1].outcome().error
    (start,) = read_starts(runs[2].workdir)
    ended = (runs[2].workdir / "metrics.jsonl").stat().st_mtime
    seconds = ended - datetime.fromisoformat(start["time"]).timestamp()
    # Two share the time, but not that of the wave before.
    assert 2 * metrics_of(runs[2].workdir)[-1]["perf/total_seconds"] < seconds + 0.5
    for each in (runs[0], runs[2]):
        alone = tmp_path / f"alone-{each.folder.name}"
        options = f"--config={each.folder / 'config.json'}"
        succeed(alone, options)
        each.read("eval/loss")
        known = metrics_of(alone, speed=False)
        found = metrics_of(each.workdir, speed=False)
        assert [list(line) for line in known] == [list(line) for line in found]
        for old, new in zip(known, found, strict=True):
            assert new == pytest.approx(old, rel=1e-5)
        names = {path.name for path in alone.iterdir()}
        assert names == {path.name for path in each.workdir.iterdir()}
        # and the same command of train.py sees nothing to do
        assert "is finished at step 8" in succeed(each.workdir, options)
        assert each.parameters()


@pytest.mark.thorough
def test_runs_that_are_killed_together_go_on_to_the_same_bits(tmp_path):
    changes = [{"seed": 1, "model.dropout": 0.1}, {"seed": 2, "model.dropout": 0.1}]
    often = "train.num_steps=200 train.eval_every=100 train.checkpoint_every=20"
    whole = written(tmp_path / "whole", *changes, more=often)
    assert together(whole).code == 0
    killed = written(tmp_path / "killed", *changes, more=often)
    command = [sys.executable, "-m", "gpt2.lab.ablate.together"]
    folders = [str(each.folder) for each in killed]
    process = subprocess.Popen([*command, *folders], env=environment(2), cwd=ROOT)
    while not (killed[1].workdir / "checkpoints" / "40").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert {each.outcome().state for each in killed} == {"waiting"}
    assert together(killed).code == 0
    for one, other in zip(whole, killed, strict=True):
        assert starts_of(other.workdir)[1] >= 40
        assert metrics_of(one.workdir, speed=False) == metrics_of(
            other.workdir, speed=False
        )
        known = params_of(one.workdir)
        found = params_of(other.workdir)
        for name in known:
            np.testing.assert_array_equal(known[name], found[name])


@pytest.mark.thorough
def test_a_sweep_together_that_is_killed_goes_on_and_has_the_results_of_runs_alone(
    tmp_path,
):
    options = [*TINY, "--config.train.num_steps=40", "--config.train.eval_batches=2"]
    options += ["--config.train.checkpoint_every=10", "--config.parallel.cpu_devices=2"]
    options += ["--tune=optim.learning_rate=1e-3,3e-3", "--vary=optim.weight_decay=0.3"]
    options += ["--seeds=2"]
    killed, apart = (tmp_path / name / "sweep" for name in ("a", "b"))
    process = start_ablate(*options, "--together", f"--workdir={killed}")
    while not list(killed.glob("tune/baseline/*/*/run/checkpoints/10")):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()  # its runs hear of that, and save
    process.communicate()
    ablate(*options, "--together", f"--workdir={killed}")
    ablate(*options, "--jobs=2", f"--workdir={apart}")
    rows = zip(rows_of(killed), rows_of(apart), strict=True)
    for found, known in rows:
        assert found.keys() == known.keys()
        for name in [
            "arm",
            "purpose",
            "values",
            "seed",
            "state",
            "parameters",
            "steps",
        ]:
            assert found[name] == known[name]
        assert float(found["eval/loss"]) == pytest.approx(
            float(known["eval/loss"]), rel=1e-5
        )
