"""muP: in a few steps activations move alike at every width, and only under muP.

Yang et al. 2022 (arXiv 2203.03466), figure 5 and appendix D.1.
"""

import math

import jax
import numpy as np
import pytest

from gpt2.model import GPT
from gpt2.training.program import Program
from tests.helpers import batch_of
from tests.model.test_switches import config_of

BASE = 32
WIDTHS = (32, 64, 128)
STEPS = 4
OPTIMIZERS = ("adamw", "muon")
VOCAB = 64
LENGTH = 32
ROWS = 8
HEAD_SIZE = 16


def activations(model: GPT, params: dict, tokens: jax.Array) -> dict[str, jax.Array]:
    """Returns what each branch of each layer adds, and the logits."""
    logits, captured = model.apply(
        {"params": params},
        tokens,
        capture_intermediates=lambda module, _: module.name in ("attn", "mlp"),
    )
    found = {"logits": logits}
    for layer, modules in captured["intermediates"].items():
        for branch, outputs in modules.items():
            out = outputs["__call__"][0]
            found[f"{layer}/{branch}"] = out[0] if isinstance(out, tuple) else out
    return found


def movement(width: int, is_mup: bool, optimizer: str) -> dict[str, float]:
    """Returns the mean absolute change of every activation after `STEPS` steps."""
    changes = f"""
        model.embed_dim={width} model.num_heads={width // HEAD_SIZE}
        model.context_length={LENGTH} model.mup_base_width={BASE if is_mup else 0}
        data.batch_size={ROWS} train.num_steps={STEPS} optim.name={optimizer}
        optim.weight_decay=0.0 optim.eps=1e-8"""
    config = config_of("default", changes)
    program = Program.from_config(config, jax.devices()[:1])
    state = program.init_state()
    tokens = (
        np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    )
    batch = program.backend.put_batch(batch_of(tokens))
    look = jax.jit(lambda params: activations(program.model, params, batch["tokens"]))
    before = jax.device_get(look(state.params))
    step = program.compile_train(state, batch)
    for _ in range(STEPS):
        state, _ = step(state, batch)
    after = jax.device_get(look(state.params))
    return {name: float(np.abs(after[name] - before[name]).mean()) for name in before}


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_activations_of_every_width_move_alike_under_mup_and_grow_without(optimizer):
    def powers(is_mup):  # of the width, with which each activation's movement grows
        moved = [movement(width, is_mup, optimizer) for width in WIDTHS]
        logs = {name: [math.log(each[name]) for each in moved] for name in moved[0]}
        return {
            name: np.polyfit(np.log(WIDTHS), log, 1)[0] for name, log in logs.items()
        }

    wide = powers(True)
    plain = powers(False)
    branches = [name for name in wide if name != "logits"]
    assert len(branches) == 4
    assert all(abs(power) < 0.4 for power in wide.values()), wide
    # Adam's updates line up with their inputs; Muon's grow by the root of the width, and the
    # products of two such kernels in a branch by the width.
    least = 1.0 if optimizer == "adamw" else 0.7
    assert all(plain[name] > least for name in branches), plain
