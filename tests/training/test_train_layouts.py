"""train.py on several devices and in 16 bits trains like one device in float32."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.config import load_config
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.program import Program
from tests.helpers import TINY, metrics_of, succeed

NUM_STEPS = 6
# The learning rate does not depend on the number of steps, and `eps` is above the noise of
# gradients that are zero in theory (tests/programs/layouts.py).
OPTIONS = f"""
    --config.model.num_layers=2 --config.model.num_heads=4 --config.model.embed_dim=64
    --config.model.dropout=0.0 --config.data.corpus=synthetic --config.data.batch_size=16
    --config.optim.schedule=constant --config.optim.learning_rate=4e-3
    --config.optim.eps=1e-6
    --config.train.num_steps={NUM_STEPS} --config.train.eval_every=3
    --config.train.eval_batches=2 --config.train.checkpoint_every=0
"""
BEGINS = """
    --config.parallel.backend=pmap --config.memory.remat=full --config.train.accumulate_steps=2
    --config.train.num_steps=3
"""
ENDS = """
    --config.parallel.data=2 --config.parallel.fsdp=2 --config.parallel.tensor=2
    --config.memory.scan_layers --config.memory.remat=full
"""
HAS_WANDB = importlib.util.find_spec("wandb") is not None


def trained(workdir, *options, **kwargs):
    """Run train.py to its end and return its standard output."""
    return succeed(workdir, *TINY, *OPTIONS.split(), *options, **kwargs)


def column(workdir, name):
    """Return a metric of every step that has it."""
    return [line[name] for line in metrics_of(workdir) if name in line]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Train on one device in float32, without a scan over layers or micro-batches."""
    workdir = tmp_path_factory.mktemp("runs") / "reference"
    trained(workdir)
    return workdir


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """Train with pmap at first, and continue on a mesh."""
    directory = tmp_path_factory.mktemp("runs")
    workdir = directory / "spread"
    logging = ["--config.logging.wandb"] if HAS_WANDB else []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(directory / "home"))
        patch.setenv("WANDB_MODE", "offline")
        began = trained(workdir, *logging, *BEGINS.split(), devices=4)
        ended = trained(workdir, *logging, *ENDS.split(), devices=8)
    return workdir, began, ended


@pytest.mark.thorough
def test_a_run_that_changes_its_layout_half_way_equals_one_device(reference, spread):
    workdir, began, ended = spread
    assert "pmap, data 4\n" in began
    assert "pjit, mesh data=2 fsdp=2 tensor=2" in ended
    for name in ("step", "train/loss", "train/grad_norm", "eval/loss"):
        found = column(workdir, name)
        np.testing.assert_allclose(found, column(reference, name), rtol=1e-5)


@pytest.mark.peers
@pytest.mark.skipif(not HAS_WANDB, reason="wandb is not installed")
def test_wandb_offline_keeps_its_id_when_a_run_continues(spread):
    workdir, *_ = spread
    run_id = (workdir / "wandb" / "run_id").read_text()
    files = [path.name for path in workdir.glob("wandb/offline-run-*/run-*.wandb")]
    assert files == 2 * [f"run-{run_id}.wandb"]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_train_float32_weights_nearly_as_well(reference, tmp_path, dtype):
    workdir = tmp_path / "run"
    trained(workdir, f"--config.precision.compute={dtype}")
    # A step of float16 whose gradients overflow lowers the loss scale, and the schedule waits.
    norms = column(workdir, "train/grad_norm")
    skipped = norms.count(None)
    assert skipped <= 2
    assert (skipped > 0) == (dtype == "float16")
    taken = NUM_STEPS - skipped
    losses = column(workdir, "train/loss")
    exact = column(reference, "train/loss")
    assert losses[0] == pytest.approx(exact[0], rel=1e-3)
    tolerance = 2e-2 if skipped else 1e-3
    assert losses[-1] == pytest.approx(exact[taken - 1], rel=tolerance)
    exact_norms = column(reference, "train/grad_norm")
    assert norms[-1] != pytest.approx(exact_norms[-1], rel=1e-5)
    # Weights and moments are restored as float32 whatever was saved, so their digits are tested.
    program = Program.from_config(load_config(workdir), jax.devices()[:1])
    with Checkpointer(workdir, read_only=True) as checkpointer:
        state = checkpointer.restore(NUM_STEPS, program)
    if skipped:
        assert state.loss_scale.scale == 2.0 ** (12 - skipped)
        assert state.loss_scale.good_steps == taken
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        if leaf.ndim:
            rounded = leaf.astype(dtype).astype(jnp.float32)
            assert jnp.any(rounded != leaf)
