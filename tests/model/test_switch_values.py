"""Every switch computes what a plain reference in numpy computes (tests/plain.py)."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.config import LossConfig
from gpt2.errors import UserError
from gpt2.model import GPT, GPTConfig
from gpt2.model.flops import model_flops_per_token
from gpt2.model.ingredients.alibi import alibi_slopes
from gpt2.training.losses import evaluation_loss, next_token_loss
from gpt2.training.losses.ahead import Ahead
from gpt2.training.steps import make_eval_step
from gpt2.utils.scan import in_layout, report
from tests import plain
from tests.helpers import assert_rounded, by_name, first_params, in_float64, thorough
from tests.model.test_switches import (
    ALL,
    config_of,
    groups,
    in_numpy,
    mean_loss,
    model_of,
    params_of,
    rolled,
    tokens_of,
)
from tests.training.test_steps import at_each_mlp

# Combinations of switches. Each seed combines others, so that most pairs occur.
JOINED = groups() + groups(seed=0) + groups(seed=1)


@pytest.mark.parametrize("name", [*ALL, *map(thorough, JOINED)])
def test_logits_and_loss_are_those_of_plain_numpy(name):
    model = model_of(name)
    params = params_of(name)
    tokens = tokens_of(5)
    losses = []

    def compute(params):
        logits, loss = in_numpy(name, params, tokens)
        losses.append(loss)
        return logits

    logits = model.apply({"params": params}, tokens)
    assert_rounded(logits, compute, params)
    loss = mean_loss(name, model, params, tokens)
    np.testing.assert_allclose(loss, losses[0], rtol=2e-6)


@pytest.mark.parametrize("name", ["default", "sandwich", "post"])
def test_dropout_is_that_of_plain_numpy_with_the_same_masks(monkeypatch, name):
    rate = 0.25
    masks = []
    keys = set()

    def draw(key, p, shape):
        assert p == 1 - rate
        keys.add(tuple(jax.random.key_data(key).tolist()))
        rng = np.random.default_rng(len(masks))
        mask = rng.random(shape) < p
        masks.append(mask)
        return jnp.asarray(mask)

    monkeypatch.setattr(jax.random, "bernoulli", draw)
    cfg = dataclasses.replace(model_of(name).config, dropout=rate)
    params = params_of(name)
    tokens = tokens_of(5)[:1]
    dropped = GPT(cfg).apply(
        {"params": params},
        tokens,
        deterministic=False,
        rngs={"dropout": jax.random.key(3)},
    )
    T = cfg.context_length
    D = cfg.embed_dim
    N = cfg.num_heads
    shapes = [(1, T, D)]
    for _ in range(cfg.num_layers):
        shapes += [(1, N, T, T), (1, T, D), (1, T, D)]
    assert [mask.shape for mask in masks] == shapes
    assert len(keys) == len(masks)
    factors = [mask[0] / (1 - rate) for mask in masks]

    def compute(params):
        return plain.logits(cfg, params, np.asarray(tokens[0]), factors)

    assert_rounded(dropped[0], compute, params)


# One expert per token, and two with a capacity that drops tokens.
MIXTURES = [name for name in ("experts", "two experts", "mixtral") if name in ALL]
needs_experts = pytest.mark.skipif(not MIXTURES, reason="there are no experts")


def routed_in_numpy(name, params, tokens):
    """Return the mean loss of training, and the `Routing` of each layer."""
    cfg = model_of(name).config
    exact = jax.tree.map(np.float64, params)
    loss = 0.0
    layers = [Routing() for _ in range(cfg.num_layers)]
    for row in np.asarray(tokens):
        routed = []
        logits = plain.logits(cfg, exact, row, drops=True, routed=routed)
        loss += sum(map(plain.loss, logits, np.roll(row, -1))) / tokens.size
        for routing, layer in zip(routed, layers, strict=True):
            balance, z = plain.router_losses(routing)
            layer.balance += balance / len(tokens)
            layer.z += z / len(tokens)
            _, weights_by_token = routing
            for weights in weights_by_token:
                layer.weights += weights.values()
    return loss, layers


@dataclasses.dataclass
class Routing:
    """A router's losses, means over the rows, and the weight of every token in its experts."""

    balance: float = 0.0
    z: float = 0.0
    weights: list[float] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize("name", MIXTURES)
def test_training_with_experts_is_that_of_plain_numpy(name):
    model = model_of(name)
    params = params_of(name)
    tokens = tokens_of(5)
    cfg = model.config
    batch = rolled(tokens)
    loss_of = next_token_loss(model)

    @jax.jit
    def objective_of(params):
        objective, sums = loss_of(params, batch, jax.random.key(0))
        return objective / tokens.size, sums

    gradient, sums = jax.grad(objective_of, has_aux=True)(params)
    logged = {name: total / count for name, (total, count) in sums.items()}
    expected, layers = routed_in_numpy(name, params, tokens)
    np.testing.assert_allclose(logged["loss"], expected, rtol=2e-6)
    for index, layer in enumerate(layers):
        path = f"h_{index}/mlp"
        np.testing.assert_allclose(
            logged[f"{path}/balance_loss"], layer.balance, rtol=1e-5
        )
        np.testing.assert_allclose(logged[f"{path}/z_loss"], layer.z, rtol=1e-5)
        if cfg.expert_capacity:
            dropped = layer.weights.count(0) / len(layer.weights)
            assert 0.05 < dropped < 0.6
            assert len(layer.weights) == cfg.experts_per_token * tokens.size
            np.testing.assert_allclose(logged[f"{path}/dropped"], dropped, rtol=1e-6)
    # Without a key, as in evaluation and in samples, no token is dropped.
    _, whole = loss_of(params, batch)
    difference = abs(whole["loss"][0] - sums["loss"][0])
    assert (difference > 1e-2) == bool(cfg.expert_capacity)

    # The slope of the objective along a direction, with the router's losses, by two values of it.
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), params)

    def objective_at(step):
        moved = jax.tree.map(lambda x, d: np.float64(x) + step * d, params, direction)
        objective, layers = routed_in_numpy(name, moved, tokens)
        for layer in layers:
            objective += cfg.expert_balance_loss * layer.balance
            objective += cfg.expert_z_loss * layer.z
        return objective

    step = 1e-6  # so small that every token keeps its experts
    slope = (objective_at(step) - objective_at(-step)) / (2 * step)
    along = jax.tree.map(lambda g, d: np.sum(g * d), gradient, direction)
    np.testing.assert_allclose(sum(jax.tree.leaves(along)), slope, rtol=1e-4)


@pytest.mark.parametrize("name", MIXTURES)
def test_padding_counts_in_no_figure_of_a_router(name):
    model = model_of(name)
    params = params_of(name)
    tokens = tokens_of(5)
    lengths = [16, 9]
    is_text = jnp.arange(16) < jnp.array(lengths)[:, None]
    loss = jax.jit(next_token_loss(model))
    batch = rolled(tokens)
    batch["targets"] = jnp.where(is_text, batch["targets"], -1)
    _, sums = loss(params, batch)
    assert {"h_0/mlp/balance_loss", "h_1/mlp/z_loss", "loss"} <= sums.keys()
    changed = jnp.where(is_text, tokens, 63 - tokens)
    _, sums_of_changed = loss(params, batch | {"tokens": changed})
    chex.assert_trees_all_equal(sums_of_changed, sums)

    def without_padding(row):
        length = lengths[row]
        alone = {name: x[row : row + 1, :length] for name, x in batch.items()}
        return loss(params, alone)[1]

    expected = jax.tree.map(jnp.add, without_padding(0), without_padding(1))
    chex.assert_trees_all_close(sums, expected, rtol=1e-5)
    # A row of padding fills the last batch of a validation.
    padding = {"tokens": jnp.zeros_like(tokens), "targets": jnp.full_like(tokens, -1)}
    filled = jax.tree.map(lambda *rows: jnp.concatenate(rows), batch, padding)
    _, sums_of_filled = loss(params, filled)
    chex.assert_trees_all_close(sums_of_filled, sums, rtol=1e-6)


@needs_experts
def test_flops_are_those_of_the_experts_that_a_token_uses():
    # The head, two layers with attention, norms, two MLPs and a router, and the last norm.
    layer = 64 * 192 + 192 + 64 * 64 + 64 + 4 * 64
    layer += 2 * (64 * 256 + 256 + 256 * 64 + 64) + 64 * 4
    active = 64 * 64 + 2 * layer + 2 * 64
    assert active == 170_880
    config = model_of("two experts").config
    scores = 12 * 64 * 2 * 16
    assert model_flops_per_token(config) == 6 * active + scores


@needs_experts
def test_what_experts_report_adds_up_over_them_and_reaches_the_gradient():
    def report_each(mlp, y):
        report(mlp, "each", jnp.sum(y**2), weight=1e3)

    model = model_of("experts")
    params = params_of("experts")
    batch = rolled(tokens_of(5))

    def lose(params):
        return next_token_loss(model)(params, batch)

    def gradient():
        # A new function each time, because JAX does not trace the same one twice.
        step = jax.grad(lambda params: lose(params), has_aux=True)
        gradients, sums = jax.jit(step)(params)
        return gradients["wte"]["embedding"], sums

    before, _ = gradient()
    with at_each_mlp(report_each):
        after, sums = gradient()
    total, count = sums["h_1/mlp/experts/each"]
    assert total > 0
    assert count == model.config.num_experts
    assert jnp.abs(after - before).max() > 1


FOUR_LAYERS = ["value_residual", "backout", "hyper_connections", "window_pattern"]
FOUR_LAYERS += MIXTURES[1:2]


@pytest.mark.parametrize("name", [*FOUR_LAYERS, thorough("modded")])
def test_four_layers_are_those_of_plain_numpy_before_and_after_a_step(name):
    config = dataclasses.replace(model_of(name).config, num_layers=4)
    params = jax.tree.map(lambda x: 2.0 * x, first_params(config))
    tokens = tokens_of(5)
    gradient = jax.jit(jax.grad(lambda p: mean_loss(name, GPT(config), p, tokens)))
    moved = jax.tree.map(lambda x, dx: x - dx, params, gradient(params))

    def compute(params):
        return plain.logits(config, params, np.asarray(tokens[0]))

    def check(params):
        expected, atol = in_float64(compute, params)
        for scanned in (False, True):
            model = GPT(dataclasses.replace(config, scan_layers=scanned))
            variables = {"params": in_layout(params, scanned=scanned)}
            logits = jax.jit(model.apply)(variables, tokens[:1])
            np.testing.assert_allclose(logits[0], expected, rtol=0, atol=atol)
        return expected

    before = check(params)
    after = check(moved)
    assert np.abs(after - before).max() > 1e-2 * np.abs(before).max()


@pytest.mark.parametrize("scanned", [False, True])
def test_each_branch_of_hyper_connections_begins_on_the_next_stream(scanned):
    """Zhu et al. 2024, equation 14: branch k reads stream k mod n."""
    config = dataclasses.replace(model_of("hyper_connections").config, num_layers=4)
    params = first_params(dataclasses.replace(config, scan_layers=scanned))
    params = in_layout(params, scanned=False)
    streams = np.eye(3)
    for branch in range(2 * 4):
        layer = params[f"h_{branch // 2}"]
        connection = layer[f"connect_{1 + branch % 2}"]
        expected = [streams[branch % 3], *streams, np.ones(3)]
        np.testing.assert_array_equal(connection["weights"], expected)


@pytest.mark.parametrize("num_heads", plain.ALIBI)
def test_slopes_of_alibi_are_the_papers(num_heads):
    slopes = alibi_slopes(num_heads)
    np.testing.assert_allclose(slopes, plain.ALIBI[num_heads], rtol=1e-6)


def test_validation_is_plain_cross_entropy_whatever_the_training_loss():
    tokens = tokens_of(6)
    batch = rolled(tokens)
    for name in ("z_loss", "ahead"):
        model = model_of(name)
        params = params_of(name)
        step = make_eval_step(evaluation_loss(model))
        sums = step(params, batch)
        assert list(sums) == ["loss"]
        total, count = sums["loss"]
        expected = mean_loss("default", model, params, tokens)
        np.testing.assert_allclose(total / count, expected, rtol=1e-6)


def test_losses_ahead_refuse_rows_that_are_too_short_and_a_fade_without_weights():
    with pytest.raises(UserError, match="ahead_fade"):
        next_token_loss(model_of("default"), LossConfig(ahead_fade=9))
    ahead = Ahead(LossConfig(ahead="0.5,0.5"))
    with pytest.raises(UserError, match="sequences of 2 tokens"):
        ahead.arrays({"targets": jnp.zeros((1, 2), jnp.int32)})


def test_losses_ahead_are_those_of_numpy_and_move_the_weights_alone():
    model = model_of("ahead")
    params = params_of("ahead")
    tokens = tokens_of(6)
    plain_ahead = config_of("ahead").loss
    options = dataclasses.replace(plain_ahead, z_loss=0.1)  # counts once a position
    segments = np.repeat([[0, 1, 2], [0, 0, 1]], 6, axis=1)[:, :16]
    targets = np.roll(tokens, -1, axis=1)
    targets[:, 13:] = -1
    targets[1, 4:6] = -1

    def loss(params, targets=targets, options=options, step=None):
        batch = {"tokens": tokens, "targets": targets, "segments": segments}
        return next_token_loss(model, options)(params, batch, step=step)

    logits = np.float64(model.apply({"params": params}, tokens, segments=segments))
    expected = 0.0
    for row in range(2):
        expected += plain.losses_ahead(
            logits[row], targets[row], options, segments[row]
        )
    step = jnp.int32(6)
    _, sums = loss(params, step=step)
    names = ["loss", "loss_ahead_2", "loss_ahead_3"]
    assert {*sums} == {*names, "z_loss"}
    totals, counts = np.transpose([sums[name] for name in names])
    assert counts.tolist() == [24, 18, 14]
    z_loss, z_count = sums["z_loss"]
    assert z_count == 24
    totals[0] += 0.1 * z_loss
    np.testing.assert_allclose(totals, expected, rtol=1e-6)

    # The gradient is a sum of the gradients of three losses of one target each. In this step the
    # weights of the last two, 0.5 and 0.25, have faded to a quarter.
    @partial(jax.jit, static_argnums=1)
    def gradient_of(targets, options):
        return jax.grad(lambda p: loss(p, targets, options)[0])(params)

    def targets_ahead(distance):
        ahead = np.full_like(targets, -1)
        for row in range(2):
            for t in range(16 - distance):
                is_same = segments[row, t] == segments[row, t + distance]
                if targets[row, t] >= 0 and is_same:
                    ahead[row, t] = targets[row, t + distance]
        return ahead

    first = gradient_of(targets, options)
    second = gradient_of(targets_ahead(1), plain_ahead)
    third = gradient_of(targets_ahead(2), plain_ahead)
    weighted = jax.tree.map(lambda a, b, c: a + b / 8 + c / 16, first, second, third)
    gradient = jax.jit(jax.grad(lambda p: loss(p, step=step)[0]))(params)
    chex.assert_trees_all_close(gradient, weighted, rtol=1e-5, atol=1e-5)
    _, in_validation = loss(params)
    assert in_validation["loss"] == sums["loss"]
    assert in_validation.keys() == {"loss", "z_loss"}


SIZE = dict(vocab_size=64, context_length=16, num_layers=2, num_heads=2, embed_dim=128)


@pytest.mark.parametrize(
    ("options", "attn", "mlp_in", "mlp_out"),
    [
        ({}, 0.02, 0.02, 0.02 / 2),
        ({"init_std": 0.1}, 0.1, 0.1, 0.1 / 2),
        ({"init": "fan_in"}, 128**-0.5, 128**-0.5, 512**-0.5 / 2),
        ({"mup_base_width": 32}, 0.02 / 2, 0.02 / 2, 0.02 / 4),
        ({"zero_init_projections": True}, 0.02, 0.02, 0.0),
    ],
)
def test_kernels_are_drawn_as_init_says(options, attn, mlp_in, mlp_out):
    params = by_name(first_params(GPTConfig(**SIZE, **options)))

    def check(name, stddev, rtol):
        np.testing.assert_allclose(np.std(params[name]), stddev, rtol)

    check("h_1/attn/c_attn/kernel", attn, 0.03)
    check("h_1/mlp/c_fc/kernel", mlp_in, 0.03)
    check("h_1/mlp/c_proj/kernel", mlp_out, 0.03)
    init_std = options.get("init_std", 0.02)
    check("wte/embedding", init_std, 0.05)
    check("wpe/embedding", init_std / 2, 0.05)


def test_mup_at_its_base_width_with_heads_of_64_is_the_plain_model():
    config = GPTConfig(**SIZE)
    mup_config = dataclasses.replace(config, mup_base_width=128)
    params = first_params(config)
    chex.assert_trees_all_equal(first_params(mup_config), params)
    logits = GPT(config).apply({"params": params}, tokens_of(1))
    mup_logits = GPT(mup_config).apply({"params": params}, tokens_of(1))
    np.testing.assert_allclose(mup_logits, logits, atol=1e-6)
