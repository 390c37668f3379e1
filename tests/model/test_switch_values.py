"""What every switch computes, held to a plain reference in numpy (tests/plain.py)."""

import collections
import dataclasses
import itertools
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
from tests.helpers import assert_rounded, first_params, in_float64, thorough
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

# As many as go together, of which each seed joins others: most pairs are among them.
JOINED = [*groups(), *(name for seed in range(2) for name in groups(seed))]


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

    assert_rounded(model.apply({"params": params}, tokens), compute, params)
    loss = float(mean_loss(name, model, params, tokens))
    assert loss == pytest.approx(losses[0], rel=2e-6)


@pytest.mark.parametrize("name", ["default", "sandwich", "post"])
def test_dropout_is_that_of_plain_numpy_with_the_same_masks(monkeypatch, name):
    rate = 0.25
    masks = []
    keys = set()

    def draw(key, p, shape):
        assert p == 1 - rate
        keys.add(tuple(jax.random.key_data(key).tolist()))
        masks.append(np.random.default_rng(len(masks)).random(shape) < p)
        return jnp.asarray(masks[-1])

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
    layer = [(1, N, T, T), (1, T, D), (1, T, D)]
    assert [mask.shape for mask in masks] == [(1, T, D), *cfg.num_layers * layer]
    assert len(keys) == len(masks)
    factors = [mask[0] / (1 - rate) for mask in masks]

    def compute(params):
        return plain.logits(cfg, params, np.asarray(tokens[0]), factors)

    assert_rounded(dropped[0], compute, params)


# Top-1, and top-2 with a capacity that drops.
MIXTURES = [name for name in ("experts", "two experts", "mixtral") if name in ALL]
needs_experts = pytest.mark.skipif(not MIXTURES, reason="there are no experts")


def routed_in_numpy(name, params, tokens):
    """The mean loss of training, and the router's losses by name `h_0/mlp/...`."""
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    loss = 0.0
    found = {}
    for row, targets in zip(tokens, np.roll(tokens, -1, axis=1), strict=True):
        routed = []
        cfg = model_of(name).config
        logits = plain.logits(cfg, exact, np.array(row), drops=True, routed=routed)
        for token, each in zip(targets, logits, strict=True):
            loss += plain.loss(each, token) / tokens.size
        for layer, each in enumerate(routed):
            found.setdefault(layer, []).append((*plain.router_losses(each), each[1]))
    return loss, found


@pytest.mark.parametrize("name", MIXTURES)
def test_training_with_experts_is_that_of_plain_numpy(name):
    model = model_of(name)
    params = params_of(name)
    tokens = tokens_of(5)
    cfg = model.config
    K = model.config.experts_per_token
    batch = rolled(tokens)

    @jax.jit
    def objective_of(params):
        objective, sums = next_token_loss(model)(params, batch, jax.random.key(0))
        return objective / tokens.size, sums

    gradient, found = jax.grad(objective_of, has_aux=True)(params)
    loss, layers = routed_in_numpy(name, params, tokens)
    each = {key: total / count for key, (total, count) in found.items()}
    assert float(each["loss"]) == pytest.approx(loss, rel=2e-6)
    for layer, rows in layers.items():
        balance, z, asked = zip(*rows, strict=True)
        path = f"h_{layer}/mlp"
        assert each[f"{path}/balance_loss"] == pytest.approx(np.mean(balance), rel=1e-5)
        assert each[f"{path}/z_loss"] == pytest.approx(np.mean(z), rel=1e-5)
        if cfg.expert_capacity:
            weights = [w for row in asked for token in row for w in token.values()]
            dropped = np.mean(np.array(weights) == 0)
            assert 0.05 < dropped < 0.6 and len(weights) == K * tokens.size
            assert each[f"{path}/dropped"] == pytest.approx(dropped)
    # What a person who scores or samples sees drops nothing.
    _, sums = next_token_loss(model)(params, batch)
    whole = sums["loss"][0]
    assert (abs(whole - found["loss"][0]) > 1e-2) == bool(cfg.expert_capacity)

    # Its slope along some direction, with the router's losses, as a difference of two.
    def objective(params):
        loss, layers = routed_in_numpy(name, params, tokens)
        for rows in layers.values():
            balance, z, _ = zip(*rows, strict=True)
            loss += cfg.expert_balance_loss * np.mean(balance)
            loss += cfg.expert_z_loss * np.mean(z)
        return loss

    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
    step = 1e-6  # no token goes elsewhere by it
    ahead, back = (
        jax.tree.map(lambda x, d, s=s: np.float64(x) + s * d, params, direction)
        for s in (step, -step)
    )
    slope = (objective(ahead) - objective(back)) / (2 * step)
    along = jax.tree.map(lambda g, d: np.sum(g * d), gradient, direction)
    assert sum(jax.tree.leaves(along)) == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("name", MIXTURES)
def test_padding_counts_in_no_figure_of_a_router(name):
    model = model_of(name)
    params = params_of(name)
    tokens = tokens_of(5)
    T = tokens.shape[1]
    sizes = [T, T // 2 + 1]
    is_text = jnp.arange(T) < jnp.array(sizes * 9)[: len(tokens), None]
    loss = jax.jit(next_token_loss(model))
    batch = rolled(tokens)
    batch["targets"] = jnp.where(is_text, batch["targets"], -1)
    _, padded = loss(params, batch)
    changed = jnp.where(is_text, tokens, 63 - tokens)
    _, others = loss(params, batch | {"tokens": changed})
    wanted = collections.defaultdict(float)
    for row in range(len(tokens)):
        each = {key: batch[key][row : row + 1, : sizes[row % 2]] for key in batch}
        _, sums = loss(params, each)
        for key, (total, count) in sums.items():
            wanted[key] += np.array([total, count])
    assert {"h_0/mlp/balance_loss", "h_1/mlp/z_loss", "loss"} <= wanted.keys()
    for key, sums in wanted.items():
        np.testing.assert_allclose(padded[key], sums, rtol=1e-5)
        np.testing.assert_array_equal(others[key], padded[key])
    # A row without any is one that fills a validation's last batch.
    empty = {
        key: jnp.concatenate([batch[key], 0 * tokens[:1] - (key == "targets")])
        for key in batch
    }
    chex.assert_trees_all_close(loss(params, empty)[1], padded, rtol=1e-6)


@needs_experts
def test_flops_are_those_of_the_experts_that_a_token_asks():
    # By hand: the head; two layers with attention, norms, two MLPs, router; a norm.
    layer = 64 * 192 + 192 + 64 * 64 + 64 + 4 * 64
    layer += 2 * (64 * 256 + 256 + 256 * 64 + 64) + 64 * 4
    active = 64 * 64 + 2 * layer + 2 * 64
    assert active == 170_880
    config = model_of("two experts").config
    assert model_flops_per_token(config) == 6 * active + 12 * 64 * 2 * 16 == 1_049_856


@needs_experts
def test_what_experts_report_adds_up_over_them_and_reaches_the_gradient():
    def report_each(mlp, y):
        report(mlp, "each", jnp.sum(y**2), weight=1e3)

    model = model_of("experts")
    params = params_of("experts")
    batch = rolled(tokens_of(5))

    def lose(params):
        return next_token_loss(model)(params, batch)

    dense, _ = jax.jit(jax.grad(lose, has_aux=True))(params)
    with at_each_mlp(report_each):
        more, sums = jax.jit(jax.grad(lambda p: lose(p), has_aux=True))(params)
    total, count = sums["h_1/mlp/experts/each"]
    assert total > 0 and count == model.config.num_experts
    assert jnp.abs(more["wte"]["embedding"] - dense["wte"]["embedding"]).max() > 1


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

    seen = []
    for each in (params, moved):
        wanted, atol = in_float64(compute, each)
        seen.append(wanted)
        for scanned in (False, True):
            model = GPT(dataclasses.replace(config, scan_layers=scanned))
            variables = {"params": in_layout(each, scanned=scanned)}
            logits = jax.jit(model.apply)(variables, tokens[:1])[0]
            np.testing.assert_allclose(logits, wanted, rtol=0, atol=atol)
    assert np.abs(seen[1] - seen[0]).max() > 1e-2 * np.abs(seen[0]).max()


@pytest.mark.parametrize("scanned", [False, True])
def test_each_branch_of_hyper_connections_begins_on_the_next_stream(scanned):
    """Zhu et al. 2024, equation 14: branch k reads stream k mod n."""
    config = dataclasses.replace(model_of("hyper_connections").config, num_layers=4)
    params = first_params(dataclasses.replace(config, scan_layers=scanned))
    params = in_layout(params, scanned=False)
    for branch in range(2 * 4):
        weights = params[f"h_{branch // 2}"][f"connect_{1 + branch % 2}"]["weights"]
        reads = [float(stream == branch % 3) for stream in range(3)]
        np.testing.assert_array_equal(weights, [reads, *np.eye(3), np.ones(3)])


@pytest.mark.parametrize("num_heads", plain.ALIBI)
def test_slopes_of_alibi_are_the_papers(num_heads):
    np.testing.assert_allclose(
        alibi_slopes(num_heads), plain.ALIBI[num_heads], rtol=1e-6
    )


def test_validation_is_plain_cross_entropy_whatever_the_training_loss():
    tokens = tokens_of(6)
    batch = rolled(tokens)
    for name in ("z_loss", "ahead"):
        sums = make_eval_step(evaluation_loss(model_of(name)))(params_of(name), batch)
        expected = mean_loss("default", model_of(name), params_of(name), tokens)
        assert list(sums) == ["loss"]
        np.testing.assert_allclose(
            sums["loss"][0] / sums["loss"][1], expected, rtol=1e-6
        )


def test_losses_ahead_refuse_rows_that_end_before_them_and_a_fade_of_nothing():
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
    targets = jnp.roll(tokens, -1, axis=1).at[:, 13:].set(-1).at[1, 4:6].set(-1)

    def loss(params, targets=targets, options=options, step=None):
        batch = {"tokens": tokens, "targets": targets, "segments": segments}
        return next_token_loss(model, options)(params, batch, step=step)

    logits = np.float64(model.apply({"params": params}, tokens, segments=segments))
    rows = zip(logits, np.array(targets), [options] * 2, segments, strict=True)
    wanted = np.sum([plain.losses_ahead(*row) for row in rows], axis=0)
    _, found = loss(params, step=jnp.int32(6))
    z_loss, z_count = found.pop("z_loss")
    assert z_count == found["loss"][1]
    assert list(found) == ["loss", "loss_ahead_2", "loss_ahead_3"]
    totals = [total for total, _ in found.values()]
    np.testing.assert_allclose(np.add(totals, [0.1 * z_loss, 0, 0]), wanted, rtol=1e-6)
    assert [int(count) for _, count in found.values()] == [24, 18, 14]
    # The gradient is that of three losses of one target each, by weights that have faded to 1 / 4.
    further = [np.array(targets), *(np.full_like(targets, -1) for _ in range(2))]
    for b, t, k in itertools.product(range(2), range(16), (1, 2)):
        if t + k < 16 and targets[b, t] >= 0 and segments[b, t] == segments[b, t + k]:
            further[k][b, t] = targets[b, t + k]

    @partial(jax.jit, static_argnums=2)
    def one_target(params, targets, options):
        return jax.grad(lambda p: loss(p, targets, options)[0])(params)

    how = [options, plain_ahead, plain_ahead]
    each = [one_target(params, *given) for given in zip(further, how, strict=True)]
    weighted = jax.tree.map(lambda a, b, c: a + b / 8 + c / 16, *each)
    in_step = jax.jit(jax.grad(lambda p: loss(p, step=jnp.int32(6))[0]))
    gradient = in_step(params)
    chex.assert_trees_all_close(gradient, weighted, rtol=1e-5, atol=1e-5)
    _, in_validation = loss(params)
    assert in_validation["loss"] == found["loss"]
    assert set(in_validation) == {"loss", "z_loss"}


SIZE = dict(vocab_size=64, context_length=16, num_layers=2, num_heads=2, embed_dim=128)


@pytest.mark.parametrize(
    ("options", "attn", "gate_in", "mlp_out"),
    [
        ({}, 0.02, 0.02, 0.02 / 2),
        ({"init_std": 0.1}, 0.1, 0.1, 0.1 / 2),
        ({"init": "fan_in"}, 128**-0.5, 128**-0.5, 512**-0.5 / 2),
        ({"mup_base_width": 32}, 0.02 / 2, 0.02 / 2, 0.02 / 4),
        ({"zero_init_projections": True}, 0.02, 0.02, 0.0),
    ],
)
def test_kernels_are_drawn_as_init_says(options, attn, gate_in, mlp_out):
    params = first_params(GPTConfig(**SIZE, **options))
    layer = params["h_1"]
    kernels = layer["attn"]["c_attn"], layer["mlp"]["c_fc"], layer["mlp"]["c_proj"]
    stddevs = [np.std(each["kernel"]) for each in kernels]
    np.testing.assert_allclose(stddevs, (attn, gate_in, mlp_out), rtol=0.03)
    std = options.get("init_std", 0.02)
    assert np.std(params["wte"]["embedding"]) == pytest.approx(std, rel=0.05)
    assert np.std(params["wpe"]["embedding"]) == pytest.approx(std / 2, rel=0.05)


def test_mup_at_its_base_width_with_heads_of_64_is_the_plain_model():
    plain_model, mup = (
        GPT(GPTConfig(**SIZE, mup_base_width=base)) for base in (0, 128)
    )
    params = first_params(plain_model.config)
    chex.assert_trees_all_equal(first_params(mup.config), params)
    logits = [
        jax.jit(model.apply)({"params": params}, tokens_of(1))
        for model in (plain_model, mup)
    ]
    np.testing.assert_allclose(*logits, atol=1e-6)
