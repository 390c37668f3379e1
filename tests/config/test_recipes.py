"""Recipes by machine, and published losses: what comes with the package, found from any folder."""

import functools

import jax
import matplotlib.figure
import numpy as np
import pytest

from configs import fineweb_124m, gpt2_124m
from gpt2.config import Config, with_options
from gpt2.config.run import read_options
from gpt2.errors import UserError
from gpt2.lab.experiments.curve_plot import plot_curves
from gpt2.lab.experiments.results import read_curve
from gpt2.telemetry import plot_losses
from gpt2.telemetry.reference import REFERENCES, read_reference
from gpt2.training.program import Program
from tests.helpers import batch_of, options_of, thorough, write_rows

MACHINES = gpt2_124m.MACHINES
SMALL = options_of("""
    model.num_layers=2 model.num_heads=2 model.embed_dim=32 model.context_length=16
    model.vocab_size=300 model.attention=auto optim.warmup_steps=1""")
# No CPU has the attention of a T4.


def recipe(word, configs=gpt2_124m):
    return Config.from_dict(configs.get_config(word))


@functools.cache
def two_losses(word, configs=gpt2_124m):
    """Those of the first steps of a small model, otherwise trained as the machine's recipe says."""
    machine = word.partition("+")[0]
    unroll = min(2, recipe(machine).memory.scan_unroll)
    devices = jax.devices()[: MACHINES[machine][0]]
    config = with_options(recipe(word, configs), SMALL | {"memory.scan_unroll": unroll})
    program = Program.from_config(config, devices)
    text = np.random.default_rng(0).integers(0, 300, (512, 17)).astype(np.int32)
    batch = program.backend.put_batch(batch_of(text))
    state = program.init_state()
    step = program.compile_train(state, batch)
    state, first = step(state, batch)
    state, second = step(state, batch)
    return [float(metrics["train/loss"]) for metrics in (first, second)]


@pytest.mark.parametrize(
    "machine", [thorough(name) for name in MACHINES if name != "v5e-8"]
)
def test_the_recipe_of_each_machine_trains_the_same(machine):
    first, second = two_losses("v5e-8")
    assert second < first
    np.testing.assert_allclose(two_losses(machine), [first, second], rtol=1e-3)


def test_each_machine_takes_half_a_million_tokens_a_step_in_what_it_holds(
    tmp_path, monkeypatch
):
    for machine, (devices, sequences, _) in MACHINES.items():
        config = recipe(machine)
        assert config.tokens_per_step == 2**19
        assert config.micro_batch_size == devices * sequences
        assert config.train.eval_batches == 20
    monkeypatch.chdir(tmp_path)  # where there are no configs
    found = read_options("configs/gpt2_124m.py:v5e-8")
    assert Config.from_dict(found) == recipe("v5e-8")
    message = f"no recipe for the machine v9; choose one of {', '.join(MACHINES)}"
    with pytest.raises(UserError, match=message):
        read_options("configs/gpt2_124m.py:v9")


@pytest.mark.parametrize("variant", ["+modern", ""])
def test_track_3_takes_half_a_million_tokens_of_the_hub_a_step(variant):
    config = recipe(f"v5e-8{variant}", fineweb_124m)
    assert config.tokens_per_step == 2**19
    assert config.train.num_steps == (3600 if variant else 5625)
    # The hub's shards have 100M tokens each, and none is read twice.
    assert config.train.num_steps * 2**19 < 39 * 10**8


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["+modern", ""])
def test_track_3_lowers_the_loss(variant):
    first, second = two_losses(f"v5e-8{variant}", fineweb_124m)
    assert second < first


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """A run with a validation at its end, in tmp_path, and a list that the figures come to."""
    lines = [
        {"step": i, "tokens": i * 5e7, "train/loss": 6 - 0.1 * i} for i in range(1, 21)
    ]
    lines[-1]["eval/loss"] = 4.0
    write_rows(tmp_path / "metrics.jsonl", lines)
    figures = []
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *_, **__: figures.append(self)
    )
    return figures


def test_published_losses_lie_at_the_steps_that_have_read_as_much(tmp_path, drawn):
    for path in REFERENCES.glob("*.csv"):
        # Says from where.
        assert path.read_text().startswith("# ") and read_reference(path.stem)
    plot_losses(tmp_path, "llmc-124m")
    axes = drawn[0].axes[0]
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    assert lines["llm.c's 124M on FineWeb"][0] == pytest.approx(
        [262_144_000 / 5e7, 5.3743]
    )
    assert {y for _, y in lines["OpenAI's 124M on FineWeb 3.425"]} == {3.424958}
    assert axes.get_xlim()[1] < 25  # not the 205 steps that are published


def test_published_losses_follow_the_tokens_of_steps_that_grow(tmp_path, drawn):
    tokens = {2: 200, 3: 500, 4: 800}
    write_rows(
        tmp_path / "metrics.jsonl",
        [{"step": i, "tokens": tokens[i], "train/loss": 4.0} for i in tokens],
    )
    (tmp_path / "own.csv").write_text("tokens,loss\n100,3\n650,2.0\n1600,1.0\n")
    plot_losses(tmp_path, str(tmp_path / "own.csv"))
    (curve,) = (x for x in drawn[0].axes[0].lines if x.get_label() == "own")
    assert curve.get_xdata().tolist() == [1, 3.5, 8]  # beyond, as many a step as so far


def test_a_single_validation_is_a_dot(tmp_path, drawn):
    curve = read_curve(
        tmp_path, "eval/loss", lambda step: 64 * step, lambda step: 1e6 * step
    )
    plot_curves(tmp_path / "c.png", {"baseline": [curve]}, "nats per token")
    for axes in drawn[0].axes:
        assert [len(line.get_xdata()) for line in axes.lines] == [1]


def test_a_reference_of_ones_own_is_a_table_of_points(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("name,tokens,loss\na,2000,3.0\na,1000,4.0\na,3,\nb,,5.0\n")
    curves = read_reference(str(path))
    np.testing.assert_array_equal(curves["a"], [[1000, 4.0], [2000, 3.0]])
    np.testing.assert_array_equal(curves["b"], [[np.nan, 5.0]])
    for text in (
        "",
        "step,loss\n1,2\n",
        "tokens,loss\n1,x\n",
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=r"own\.csv"):
            read_reference(str(path))
