"""Every switch computes what a plain reference in numpy computes (tests/numpy_model.py)."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.model import GPT, GPTConfig
from gpt2.model.ingredients.alibi import alibi_slopes
from gpt2.training.losses import evaluation_loss, next_token_loss
from gpt2.training.steps import make_eval_step
from gpt2.utils.scan import in_layout, report
from tests import numpy_model
from tests.helpers import (
    assert_rounded,
    by_name,
    first_params,
    in_float64,
    random_params,
    thorough,
)
from tests.model.models import at_each_mlp
from tests.model.switches import (
    ALL,
    COMBINED,
    SWITCHES,
    config_of,
    groups,
    in_numpy,
    mean_loss,
    model_of,
    params_of,
    rolled,
    tokens_of,
)

# By default every switch is tested in a combination. Each seed combines others, so that most pairs
# occur, and a thorough test of the switch by itself names what is wrong.
MORE = [*COMBINED, *SWITCHES, *groups(seed=0), *groups(seed=1)]


@pytest.mark.parametrize("name", [*groups(), *map(thorough, MORE)])
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


@pytest.mark.parametrize("name", ["default", "sandwich", thorough("post")])
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
        return numpy_model.logits(cfg, params, np.asarray(tokens[0]), factors)

    assert_rounded(dropped[0], compute, params)


@pytest.mark.parametrize(
    ("name", "scanned"),
    [("default", False), thorough("hyper_connections", True), thorough("post", True)],
)
def test_stochastic_depth_is_that_of_plain_numpy_with_the_linear_rule(
    monkeypatch, name, scanned
):
    drawn = jnp.array([0.6, 0.4]).reshape(2, 1, 1)  # for two sequences
    keys = []

    def draw(key, p, shape):
        assert shape == drawn.shape
        keys.append(key)
        return drawn < p

    monkeypatch.setattr(jax.random, "bernoulli", draw)
    config = model_of(name).config
    cfg = dataclasses.replace(config, stochastic_depth=0.5, scan_layers=scanned)
    params = params_of(name)
    tokens = tokens_of(5)
    dropped = GPT(cfg).apply(
        {"params": in_layout(params, scanned=scanned)},
        tokens,
        deterministic=False,
        rngs={"dropout": jax.random.key(3)},
    )
    if not scanned:
        assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == 4
    # Of two layers, the first keeps a branch with a probability of 0.75, and the second of 0.5.
    weights = np.ones((cfg.num_heads, cfg.context_length, cfg.context_length))
    for row, layers in enumerate([(1 / 0.75, 0.0), (1 / 0.75, 1 / 0.5)]):
        factors = [1.0]  # of the embedding, and then of weights, attention and MLP
        for factor in layers:
            factors += [weights, factor, factor]

        compute = partial(
            numpy_model.logits, config, tokens=np.asarray(tokens[row]), factors=factors
        )
        assert_rounded(dropped[row], compute, params)


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
        logits = numpy_model.logits(cfg, exact, row, drops=True, routed=routed)
        loss += sum(map(numpy_model.loss, logits, np.roll(row, -1))) / tokens.size
        for routing, layer in zip(routed, layers, strict=True):
            balance, z = numpy_model.router_losses(routing)
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


each_mixture = pytest.mark.parametrize(
    "name", [name if name == "two experts" else thorough(name) for name in MIXTURES]
)


@each_mixture
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
        balance = logged[f"{path}/balance_loss"]
        np.testing.assert_allclose(balance, layer.balance, rtol=1e-5)
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


@pytest.mark.thorough
@each_mixture
def test_padding_counts_in_no_figure_of_a_router(name):
    params = params_of(name)
    tokens = tokens_of(5)
    lengths = [16, 9]
    is_text = jnp.arange(16) < jnp.array(lengths)[:, None]
    batch = rolled(tokens)
    batch["targets"] = jnp.where(is_text, batch["targets"], -1)
    # A row of padding fills the last batch of a validation.
    row = {
        "tokens": jnp.zeros_like(tokens[:1]),
        "targets": jnp.full_like(tokens[:1], -1),
    }
    padded = jax.tree.map(lambda *rows: jnp.concatenate(rows), batch, row)
    loss = jax.jit(next_token_loss(model_of(name)))
    _, sums = loss(params, padded)
    assert {"h_0/mlp/balance_loss", "h_1/mlp/z_loss", "loss"} <= sums.keys()

    def without_padding(row):
        alone = {key: x[row : row + 1, : lengths[row]] for key, x in batch.items()}
        _, sums = loss(params, alone)
        return sums

    expected = jax.tree.map(jnp.add, without_padding(0), without_padding(1))
    chex.assert_trees_all_close(sums, expected, rtol=1e-5)


@needs_experts
def test_what_experts_report_adds_up_over_them_and_reaches_the_objective():
    def report_each(mlp, y):
        report(mlp, "each", jnp.sum(y**2), weight=10.0)

    model = model_of("experts")
    params = params_of("experts")
    batch = rolled(tokens_of(5))
    before, _ = next_token_loss(model)(params, batch)
    with at_each_mlp(report_each):
        after, sums = next_token_loss(model)(params, batch)
    first, _ = sums["h_0/mlp/experts/each"]
    second, count = sums["h_1/mlp/experts/each"]
    assert count == model.config.num_experts
    assert min(first, second) > 1
    np.testing.assert_allclose(after - before, 10 * (first + second), rtol=1e-5)


FOUR_LAYERS = ["value_residual", "backout", "hyper_connections", "window_pattern"]
FOUR_LAYERS += MIXTURES[1:2]


@pytest.mark.parametrize("name", [*FOUR_LAYERS, thorough("modded")])
def test_four_layers_are_those_of_plain_numpy(name):
    config = dataclasses.replace(model_of(name).config, num_layers=4)
    params = random_params(config)
    tokens = tokens_of(5)[:1]

    def compute(params):
        return numpy_model.logits(config, params, np.asarray(tokens[0]))

    expected, atol = in_float64(compute, params)
    for scanned in (False, True):
        model = GPT(dataclasses.replace(config, scan_layers=scanned))
        variables = {"params": in_layout(params, scanned=scanned)}
        (logits,) = jax.jit(model.apply)(variables, tokens)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("scanned", [thorough(False), True])
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


@pytest.mark.parametrize("num_heads", numpy_model.ALIBI)
def test_slopes_of_alibi_are_the_papers(num_heads):
    slopes = alibi_slopes(num_heads)
    np.testing.assert_allclose(slopes, numpy_model.ALIBI[num_heads], rtol=1e-6)


def test_validation_is_plain_cross_entropy_whatever_the_training_loss():
    tokens = tokens_of(6)
    batch = rolled(tokens)
    for name in ("z_loss", "ahead"):
        model = model_of(name)
        params = params_of(name)
        rounded = dataclasses.replace(model.config, logits_dtype="bfloat16")
        step = make_eval_step(evaluation_loss(model.clone(config=rounded)))
        sums = step(params, batch)
        assert list(sums) == ["loss"]
        total, count = sums["loss"]
        expected = mean_loss("default", model, params, tokens)
        np.testing.assert_allclose(total / count, expected, rtol=1e-6)


def test_losses_ahead_are_those_of_numpy_and_fade():
    model = model_of("ahead")
    params = params_of("ahead")
    tokens = tokens_of(6)
    options = dataclasses.replace(config_of("ahead").loss, z_loss=0.1)
    segments = np.repeat([[0, 1, 2], [0, 0, 1]], 6, axis=1)[:, :16]
    targets = np.roll(tokens, -1, axis=1)
    targets[:, 13:] = -1
    targets[1, 4:6] = -1
    batch = {"tokens": tokens, "targets": targets, "segments": segments}
    loss = next_token_loss(model, options)
    objective, sums = loss(params, batch, step=jnp.int32(6))
    logits = np.float64(model.apply({"params": params}, tokens, segments=segments))
    expected = 0.0
    for row in range(2):
        rows = (logits[row], targets[row], options, segments[row])
        expected += numpy_model.losses_ahead(*rows)
    z_loss, z_count = sums.pop("z_loss")
    assert [*sums] == ["loss", "loss_ahead_2", "loss_ahead_3"]
    totals, counts = np.transpose([*sums.values()])
    assert [*counts, z_count] == [24, 18, 14, 24]
    totals[0] += 0.1 * z_loss  # which counts once a position
    np.testing.assert_allclose(totals, expected, rtol=1e-6)
    # In this step the weights of the last two, 0.5 and 0.25, have faded to a quarter.
    np.testing.assert_allclose(objective, totals @ [1, 1 / 8, 1 / 16], rtol=1e-6)
    validated, in_validation = loss(params, batch)
    assert in_validation == {"loss": sums["loss"], "z_loss": (z_loss, z_count)}
    np.testing.assert_allclose(validated, totals[0], rtol=1e-6)


SIZE = dict(vocab_size=64, context_length=16, num_layers=2, num_heads=2, embed_dim=128)


@pytest.mark.parametrize(
    ("options", "attn", "mlp_in", "mlp_out"),
    [
        ({}, 0.02, 0.02, 0.02 / 2),
        ({"init_std": 0.1}, 0.1, 0.1, 0.1 / 2),
        ({"init": "fan_in"}, 128**-0.5, 128**-0.5, 512**-0.5 / 2),
        ({"mup_base_width": 32}, 0.02 / 2, 0.02 / 2, 0.02 / 4),
        ({"mup_base_depth": 8}, 0.02, 0.02, 0.02 / 4),
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
