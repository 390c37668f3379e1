"""In a few steps, activations move equally far at every width and depth, if their rules are used.

muP: Yang et al. 2022 (arXiv 2203.03466), figure 5 and appendix D.1. CompleteP: Dey et al. 2025
(arXiv 2505.01618).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.model import GPT
from gpt2.training.program import Program
from tests.helpers import batch_of
from tests.model.switches import config_of

BASE = 32
WIDTHS = (32, 64, 128)
STEPS = 4
OPTIMIZERS = ("adamw", "muon")
VOCAB = 64
LENGTH = 32
ROWS = 8
HEAD_SIZE = 16


def activations(model: GPT, params: dict, tokens: jax.Array) -> dict[str, jax.Array]:
    """Return what each branch of each layer adds to the residual stream, and the logits."""
    logits, captured = model.apply(
        {"params": params},
        tokens,
        capture_intermediates=lambda module, _: module.name in ("attn", "mlp"),
    )
    outputs = {"logits": logits}
    for layer, branches in captured["intermediates"].items():
        for branch, calls in branches.items():
            (outputs[f"{layer}/{branch}"],) = calls["__call__"]
    return outputs


def movement(changes: str, outputs: Callable):
    """Return the mean absolute change of every output of a model after `STEPS` steps."""
    config = config_of(
        "default",
        f"""{changes} model.context_length={LENGTH} data.batch_size={ROWS}
            train.num_steps={STEPS} optim.weight_decay=0.0""",
    )
    program = Program.from_config(config, jax.devices()[:1])
    state = program.init_state()
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1), np.int32)
    batch = program.backend.put_batch(batch_of(tokens))
    run = jax.jit(lambda params: outputs(program.model, params, batch["tokens"]))
    before = run(state.params)
    step = program.compile_train(state, batch)
    for _ in range(STEPS):
        state, _ = step(state, batch)
    after = run(state.params)
    return jax.tree.map(lambda x, y: float(jnp.abs(y - x).mean()), before, after)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_activations_of_every_width_move_alike_under_mup_and_grow_without(optimizer):
    def powers(is_mup):
        """Return the powers of the width with which activations' movements grow."""
        movements = []
        for width in WIDTHS:
            changes = f"""model.embed_dim={width} model.num_heads={width // HEAD_SIZE}
                model.mup_base_width={BASE if is_mup else 0} optim.name={optimizer}
                optim.eps=1e-8"""
            movements.append(movement(changes, activations))
        powers = {}
        for name in movements[0]:
            logs = [math.log(by_activation[name]) for by_activation in movements]
            powers[name], _ = np.polyfit(np.log(WIDTHS), logs, 1)
        return powers

    mup = powers(is_mup=True)
    assert len(mup) == 5
    for name, power in mup.items():
        assert abs(power) < 0.4, name
    plain = powers(is_mup=False)
    del plain["logits"]
    # Adam's updates are aligned with their inputs. Muon's updates grow with the root of the width,
    # and the product of two such kernels in a branch grows with the width.
    least = 1.0 if optimizer == "adamw" else 0.7
    for name, power in plain.items():
        assert power > least, name


def stream(model: GPT, params: dict, tokens: jax.Array) -> jax.Array:
    """Return the residual stream after the last layer."""
    last = f"h_{model.config.num_layers - 1}"
    _, captured = model.apply(
        {"params": params},
        tokens,
        capture_intermediates=lambda module, _: module.name == last,
    )
    ((output, _),) = captured["intermediates"][last]["__call__"]
    return output[0]


@pytest.mark.thorough
@pytest.mark.parametrize(("optimizer", "least"), [("adamw", 0.8), ("muon", 0.5)])
def test_the_stream_of_every_depth_moves_alike_under_completep_and_grows_without(
    optimizer, least
):
    depths = (2, 4, 8)

    def power(base):
        movements = []
        for depth in depths:
            changes = f"""model.embed_dim=64 model.num_heads=4 model.num_layers={depth}
                model.mup_base_depth={base} optim.name={optimizer} optim.eps=1e-8"""
            movements.append(movement(changes, stream))
        slope, _ = np.polyfit(np.log(depths), np.log(movements), 1)
        return slope

    assert abs(power(base=2)) < 0.2
    assert power(base=0) > least
