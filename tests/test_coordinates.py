"""muP: in a few steps activations move alike at every width, and only under muP.

Yang et al. 2022 (arXiv 2203.03466), figure 5 and appendix D.1.
"""

import math

import jax
import numpy as np
import pytest

from configs import default
from gpt2.config import Config
from gpt2.model import GPT
from gpt2.training.program import Program

BASE, WIDTHS, STEPS = 32, (32, 64, 128), 4
OPTIMIZERS = ("adamw", "muon")
VOCAB, LENGTH, ROWS, HEAD_SIZE = 64, 32, 8, 16


def config_of(width: int, is_mup: bool, optimizer: str = "adamw") -> Config:
    """Returns the options of a model of one width; heads keep their size."""
    options = default.get_config()
    options.model.update(
        vocab_size=VOCAB,
        context_length=LENGTH,
        num_layers=2,
        num_heads=width // HEAD_SIZE,
        embed_dim=width,
        mup_base_width=BASE if is_mup else 0,
    )
    options.data.batch_size = ROWS
    options.optim.update(name=optimizer, schedule="constant", warmup_steps=0, weight_decay=0.0)
    options.optim.update(learning_rate=1e-2, end_learning_rate=1e-2)
    options.train.num_steps = STEPS
    return Config.from_dict(options)


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


def movement(width: int, is_mup: bool, optimizer: str = "adamw") -> dict[str, float]:
    """Returns the mean absolute change of every activation after `STEPS` steps."""
    program = Program.from_config(config_of(width, is_mup, optimizer), jax.devices()[:1])
    state = program.init_state()
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    batch = program.backend.put_batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    look = jax.jit(lambda params: activations(program.model, params, batch["tokens"]))
    before = jax.device_get(look(state.params))
    step = program.compile_train(state, batch)
    for _ in range(STEPS):
        state, _ = step(state, batch)
    after = jax.device_get(look(state.params))
    return {name: float(np.abs(after[name] - before[name]).mean()) for name in before}


def growth(sizes: dict[int, dict[str, float]]) -> dict[str, float]:
    """Returns, for each activation, the power of the width with which its movement grows."""
    names = next(iter(sizes.values()))
    log_widths = [math.log(width) for width in sizes]
    return {
        name: float(np.polyfit(log_widths, [math.log(s[name]) for s in sizes.values()], 1)[0])
        for name in names
    }


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_activations_of_every_width_move_alike_under_mup_and_grow_without(optimizer):
    powers = {
        is_mup: growth({width: movement(width, is_mup, optimizer) for width in WIDTHS})
        for is_mup in (False, True)
    }
    branches = [name for name in powers[True] if name != "logits"]
    assert len(branches) == 4
    assert all(abs(power) < 0.4 for power in powers[True].values()), powers[True]
    # Adam's updates line up with their inputs; Muon's grow by the root of the width, and the
    # products of two such kernels in a branch by the width.
    least = 1.0 if optimizer == "adamw" else 0.7
    assert all(powers[False][name] > least for name in branches), powers[False]
