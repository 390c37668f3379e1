"""The model: sizes, causality, caches, layouts of its layers, and its numbers in narrow types."""

import dataclasses
import functools
import inspect
from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.model import GPT, GPTConfig, ingredients, with_kernels
from gpt2.model.flops import count_compute_parameters
from gpt2.model.layers import named_param
from gpt2.model.one_device import ops_for
from gpt2.model.seams import Ingredient
from gpt2.ops import Ops, plain
from gpt2.ops import head_loss as head_loss_module
from gpt2.ops.head_loss import look_up_padded, pad_vocab
from gpt2.training.losses import next_token_loss
from gpt2.training.program import Program
from gpt2.utils.scan import METRICS, report
from tests import plain as in_numpy
from tests.helpers import (
    assert_rounded,
    batch_of,
    configured,
    first_params,
    random_params,
    thorough,
)

SMALL = GPTConfig(
    vocab_size=300, context_length=16, num_layers=2, num_heads=2, embed_dim=32
)


def replaced(**changes):
    return dataclasses.replace(SMALL, **changes)


def tokens_of(seed):
    return jax.random.randint(jax.random.key(seed), (2, 16), 0, SMALL.vocab_size)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config, params, tokens, segments=None):
    return GPT(config).apply({"params": params}, tokens, segments=segments)


def mean_loss(model, params, tokens, key=None, of_logits=plain.cross_entropy):
    """The mean loss of predicting each token from those before; with dropout if there is a key."""
    lost, _ = model.apply(
        {"params": params},
        {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)},
        of_logits,
        method="loss",
        deterministic=key is None,
        rngs={} if key is None else {"dropout": key},
    )
    return lost / tokens.size


def loss(config, params, tokens, key=None):
    """The mean loss by kernels."""
    return mean_loss(with_kernels(GPT(config)), params, tokens, key)


step_of = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)


@pytest.mark.parametrize("tied", [True, thorough(False)])
def test_a_padded_table_gives_the_gradients_of_one_that_is_not(tied):
    config = replaced(tie_embeddings=tied)
    params = first_params(config)
    tokens = tokens_of(0)
    kernels = with_kernels(GPT(config))
    padded = dataclasses.replace(
        kernels.ops,
        pad_vocab=partial(pad_vocab, multiple=128, constrain=plain.constrain),
        look_up_tokens=partial(
            look_up_padded, look_up=plain.look_up, vocab_size=config.vocab_size
        ),
    )

    step = jax.jit(jax.value_and_grad(mean_loss, argnums=1), static_argnums=0)

    def barriers(model):
        text = str(jax.make_jaxpr(step, static_argnums=0)(model, params, tokens))
        return text.count("optimization_barrier")

    model = kernels.clone(ops=padded)
    expected = step(kernels, params, tokens)
    assert config.vocab_size % 128 and barriers(model) == barriers(kernels) + 1
    found = step(model, params, tokens)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
    for beyond in (config.vocab_size, -config.vocab_size - 1):
        wrong = tokens.at[0, 0].set(beyond)
        assert jnp.isnan(step(model, params, wrong)[0])
        assert jnp.isnan(step(GPT(config), params, wrong)[0])


def test_logits_of_a_large_batch_are_computed_a_chunk_at_a_time_and_change_nothing(
    monkeypatch,
):
    params = first_params(SMALL)
    tokens = tokens_of(1)

    def traced():
        ops = ops_for.__wrapped__(SMALL, jax.devices()[0])  # which is kept else
        model = GPT(SMALL, ops)
        run = jax.jit(jax.value_and_grad(lambda p: mean_loss(model, p, tokens)))
        return str(jax.make_jaxpr(run)(params)), run(params)

    whole_jaxpr, whole = traced()
    monkeypatch.setattr(head_loss_module, "CPU_ROWS", 10)
    monkeypatch.setattr(head_loss_module, "CPU_LOGITS_BYTES", 0)
    chunked_jaxpr, chunked = traced()
    assert "f32[2,16,300]" in whole_jaxpr and "f32[2,4,300]" not in whole_jaxpr
    assert "f32[2,4,300]" in chunked_jaxpr and "f32[2,16,300]" not in chunked_jaxpr
    chex.assert_trees_all_close(chunked, whole, atol=1e-6)


KERNELS = [
    each.name
    for each in dataclasses.fields(Ops)
    if getattr(with_kernels(GPT(SMALL)).ops, each.name) != getattr(Ops(), each.name)
]


@pytest.mark.parametrize("name", [KERNELS[0], *map(thorough, KERNELS[1:])])
def test_a_kernel_that_is_taken_out_changes_nothing(name):
    config = replaced(attention="blocked", position="none", activation="relu_squared")
    model = with_kernels(GPT(config))
    params = first_params(config)
    tokens = tokens_of(1)
    without = dataclasses.replace(model.ops, **{name: getattr(Ops(), name)})
    found, expected = (
        jax.jit(jax.value_and_grad(partial(mean_loss, each)))(params, tokens)
        for each in (model.clone(ops=without), model)
    )
    chex.assert_trees_all_close(found, expected, atol=1e-6)


def test_without_jit_a_model_computes_by_the_formulas():
    with jax.disable_jit():
        assert with_kernels(GPT(SMALL)).ops == Ops()
    assert with_kernels(GPT(SMALL)).ops != Ops()


class Parity(Ingredient):
    """A person's own: each head learns how much less keys an odd distance away weigh."""

    option = "attention_sink"  # one that is there, to ask for it

    def score_terms(self, attention, terms, context):
        shape = (self.config.num_heads,)
        ones = nn.initializers.ones
        weights = named_param(attention, "parity", ones, shape, ("heads",))

        def term(scores, query, key):
            return scores - weights[:, None, None] * ((query - key) % 2)

        return (*terms, term)


@pytest.fixture
def use_ingredient(monkeypatch):
    """Puts an ingredient in the place of all others."""

    def use(kind):
        monkeypatch.setattr(ingredients, "INGREDIENTS", (kind,))
        ingredients.ingredients_of.cache_clear()

    yield use
    ingredients.ingredients_of.cache_clear()


@pytest.mark.parametrize("attention", ["blocked", "cudnn"])
def test_a_kernel_asked_for_by_name_refuses_a_term_it_does_not_know(
    use_ingredient, attention
):
    use_ingredient(Parity)
    config = replaced(attention=attention, attention_sink=True, context_length=128)
    with pytest.raises(UserError, match=r"cannot compute model\.attention_sink"):
        with_kernels(GPT(config))


class Pair(nn.Module):
    """A person's own MLP: two side by side, as batches of matrices."""

    config: GPTConfig
    ops: Ops
    declares: bool = True

    @nn.compact
    def __call__(self, x):
        D = self.config.embed_dim
        F = self.config.hidden_dim
        draw = nn.initializers.normal(0.1)
        axes = ("mix", "embed", "mlp")
        role = dict(inputs=(-2,), decays=True) if self.declares else {}
        up = named_param(self, "up", draw, (2, D, F), axes, **role)
        axes = ("mix", "mlp", "embed")
        down = named_param(self, "down", draw, (2, F, D), axes, **role)
        hidden = jnp.einsum("btd,edf->ebtf", x, up.astype(x.dtype))
        return jnp.einsum("ebtf,efd->btd", nn.silu(hidden), down.astype(x.dtype))


class OwnMLP(Ingredient):
    option = "attention_sink"  # one that is there, to ask for it

    def mlp(self, block):
        return Pair(block.config, block.ops, name="mlp")

    def branch(self, block, branch, context):
        if context.branch == "attention":
            return branch
        return branch._replace(layer=lambda x: self.mlp(block)(x))


def train_a_step(devices, options):
    """Return the parameters before and after a step, by default of Muon, and its metrics."""
    # RMSNorm, because centered rows would have a lower rank.
    config = configured(f"""
        model.vocab_size=64 model.context_length=16 model.num_layers=2 model.num_heads=2
        model.embed_dim=32 model.attention_sink=True model.norm=rmsnorm
        data.batch_size=8 optim.name=muon optim.warmup_steps=0 {options}""")
    program = Program.from_config(config, devices)
    state = program.init_state()
    first = jax.device_get(state.params)
    tokens = np.random.default_rng(0).integers(64, size=(8, 17), dtype=np.int32)
    batch = program.backend.put_batch(batch_of(tokens))
    step = program.compile_train(state, batch)
    state, metrics = step(state, batch)
    return first, jax.device_get(state.params), jax.device_get(metrics)


@pytest.mark.parametrize("compute", ["bfloat16", thorough("float32")])
def test_kernels_of_ones_own_are_gathered_by_layer_decayed_and_muons(
    use_ingredient, compute
):
    use_ingredient(OwnMLP)
    options = f"precision.compute={compute}"
    sharded = f"{options} parallel.strategy=zero3 parallel.fsdp_gather=layer"
    first, last, _ = train_a_step(jax.devices(), sharded)
    mlp = last["h_0"]["mlp"]
    for name in ("up", "down"):
        # Newton-Schulz leaves singular values between 0.68 and 1.21. Adam's would differ by far.
        update = mlp[name] - first["h_0"]["mlp"][name]
        values = np.linalg.svd(update, compute_uv=False)
        assert values.shape == (2, 32)
        assert values.max() < 2 * values.min()
    if compute == "float32":
        _, expected, _ = train_a_step(jax.devices()[:1], options)
        # Rounding, times the largest singular value over the least.
        chex.assert_trees_all_close(mlp, expected["h_0"]["mlp"], atol=1e-5)


def test_a_matrix_without_a_role_is_an_error(use_ingredient):
    class Undeclared(OwnMLP):
        def mlp(self, block):
            return Pair(block.config, block.ops, declares=False, name="mlp")

    use_ingredient(Undeclared)
    with pytest.raises(
        UserError, match=r"parameter h_0/mlp/down has the axes .* no role"
    ):
        GPT(replaced(attention_sink=True)).logical_axes()


def test_a_parameter_that_does_not_name_its_axes_is_an_error(use_ingredient):
    class Flax(OwnMLP):
        def mlp(self, block):
            return nn.Dense(block.config.embed_dim, name="mlp")

    use_ingredient(Flax)
    with pytest.raises(UserError, match="h_0/mlp/bias does not name its axes"):
        GPT(replaced(attention_sink=True)).logical_axes()


def test_a_term_of_the_scores_of_ones_own_is_the_formulas_in_kernels(use_ingredient):
    use_ingredient(Parity)
    config = replaced(attention_sink=True, context_length=128)
    model = GPT(config)
    tokens = jnp.tile(tokens_of(1), 8)
    params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
    params = jax.tree.map(lambda x: 3.0 * x, params)
    found, expected = (
        jax.jit(jax.value_and_grad(partial(mean_loss, each)))(params, tokens)
        for each in (with_kernels(model), model)
    )
    assert jnp.abs(expected[1]["h_1"]["attn"]["parity"]).min() > 1e-6
    chex.assert_trees_all_close(found, expected, atol=1e-5)


class Factor(Ingredient):
    """A learned factor of each token's logits, and an auxiliary loss of their squares."""

    option = "attention_sink"

    def logits(self, head, logits, context):
        vocab_size = self.config.vocab_size
        init = nn.initializers.constant(2.0)
        # An axis that devices split, and that is gathered by layer.
        factor = named_param(head, "factor", init, (vocab_size,), ("table",))
        report(head, "factor", factor[0])
        padding = logits.shape[-1] - vocab_size
        logits = jnp.pad(factor, (0, padding)) * logits
        squares = first_squares(logits)
        report(head, "square", squares.sum(), squares.size, weight=SQUARE_WEIGHT)
        return logits


SQUARE_WEIGHT = 0.25


def first_squares(logits):
    """Return the squares of the first token's logits. The last logits may be padding."""
    return jnp.square(logits[..., 0])


@pytest.mark.parametrize("by_kernels", [True, False])
def test_a_change_of_the_logits_may_have_a_parameter_and_report(
    use_ingredient, by_kernels
):
    use_ingredient(Factor)
    model = GPT(replaced(attention_sink=True))
    tokens = tokens_of(1)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}
    params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
    if by_kernels:
        model = with_kernels(model)
    loss = jax.jit(jax.value_and_grad(next_token_loss(model), has_aux=True))
    (objective, sums), grads = loss(params, batch)
    without = GPT(replaced())

    def by_hand(params):
        logits = without.apply({"params": params}, tokens)
        logits = params["head"]["factor"] * logits
        squares = first_squares(logits).sum()
        objective = plain.cross_entropy(logits, batch)[0] + SQUARE_WEIGHT * squares
        return objective, squares

    step = jax.jit(jax.value_and_grad(by_hand, has_aux=True))
    (expected, squares), expected_grads = step(params)
    np.testing.assert_allclose(objective, expected, rtol=1e-6)
    chex.assert_trees_all_close(grads, expected_grads, atol=1e-5)
    assert jnp.abs(grads["head"]["factor"]).max() > 0.1
    assert sums["head/factor"] == (2.0, 1.0)
    # The sum is logged without its weight, and is no part of the logged loss.
    total, count = sums["head/square"]
    assert count == tokens.size
    np.testing.assert_allclose(total, squares, rtol=1e-5)
    np.testing.assert_allclose(
        objective, sums["loss"][0] + SQUARE_WEIGHT * total, rtol=1e-6
    )


def test_a_change_of_the_logits_trains_in_shards_gathered_by_layer(use_ingredient):
    use_ingredient(Factor)
    sharded = "parallel.strategy=zero3 parallel.fsdp_gather=layer"
    optimizer = "optim.name=sgd optim.learning_rate=1.0 optim.schedule=constant"
    first, last, metrics = train_a_step(jax.devices(), f"{optimizer} {sharded}")
    _, expected, expected_metrics = train_a_step(jax.devices()[:1], optimizer)
    assert metrics["train/head/factor"] == 2.0
    for name in ("train/loss", "train/head/square"):
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5)
    movement = expected["head"]["factor"] - first["head"]["factor"]
    assert np.abs(movement).max() > 0.01
    chex.assert_trees_all_close(last, expected, atol=1e-6)


class OnlySelf(Ingredient):
    """In one layer, each position attends to nothing but itself."""

    option = "attention_sink"
    biased_layer = 1

    def score_terms(self, attention, terms, context):
        penalty = jnp.where(context.layer == self.biased_layer, 1e4, 0.0)

        def term(scores, query, key):
            return scores - penalty * (query - key)

        return (*terms, term)

    def attention_output(self, attention, y, context):
        difference = y - context.heads.v  # 0 if a position attends only to itself
        report(attention, "difference", jnp.abs(difference).sum())
        return y


class Unbiased(OnlySelf):
    biased_layer = None


@pytest.mark.parametrize("scan_layers", [True, False])
def test_a_bias_on_the_scores_of_one_layer_changes_no_other(
    use_ingredient, scan_layers
):
    config = replaced(attention_sink=True, scan_layers=scan_layers)
    params = first_params(replaced(scan_layers=scan_layers))
    tokens = tokens_of(1)
    batch = {"tokens": tokens, "targets": tokens}

    def differences(kind):
        use_ingredient(kind)
        loss = next_token_loss(with_kernels(GPT(config)))
        _, sums = jax.jit(loss)(params, batch)
        return [float(sums[f"h_{layer}/attn/difference"][0]) for layer in (0, 1)]

    before = differences(Unbiased)
    after = differences(OnlySelf)
    assert min(before) > 1
    assert after == [before[0], 0.0]


SEAMS = [name for name, value in vars(Ingredient).items() if inspect.isfunction(value)]


@pytest.mark.parametrize("scan_layers", [True, False])
def test_every_seam_is_asked_in_every_layer_and_changes_nothing_by_itself(
    use_ingredient, scan_layers
):
    config = replaced(position="rope", scan_layers=scan_layers)
    tokens = tokens_of(1)
    params = first_params(config)
    expected = mean_loss(GPT(config), params, tokens)
    asked = set()

    def spy(name):
        def seam(self, *arguments):
            asked.add(name)
            return getattr(Ingredient, name)(self, *arguments)

        return seam

    seams = {name: spy(name) for name in SEAMS if name != "__init__"}
    use_ingredient(type("Spy", (Ingredient,), seams | {"option": "attention_sink"}))
    config = dataclasses.replace(config, attention_sink=True)
    drawn = jax.jit(GPT(config).init)(jax.random.key(0), tokens)["params"]
    chex.assert_trees_all_equal(drawn, params)
    assert mean_loss(GPT(config), params, tokens) == expected
    count_compute_parameters(config)
    assert asked == seams.keys()


@pytest.mark.parametrize("scan_layers", [True, False])
def test_every_layer_and_branch_drops_by_a_mask_of_its_own(scan_layers):
    config = replaced(num_layers=4, scan_layers=scan_layers, dropout=0.5)
    params = first_params(config)
    tokens = tokens_of(1)

    def note(next_method, args, kwargs, context):
        y = next_method(*args, **kwargs)
        if isinstance(context.module, nn.Dropout):
            context.module.sow(METRICS, "mask", y != 0)
        return y

    with nn.intercept_methods(note):
        _, noted = GPT(config).apply(
            {"params": params},
            tokens,
            deterministic=False,
            rngs={"dropout": jax.random.key(0)},
            mutable=[METRICS],
        )
    each = [np.asarray(mask) for mask in jax.tree.leaves(noted)]
    masks = [row for mask in each for row in (mask if mask.ndim == 4 else [mask])]
    assert len(masks) == 1 + 2 * 4
    for index, one in enumerate(masks):
        assert 0.4 < one.mean() < 0.6
        for other in masks[:index]:
            assert 0.4 < (one == other).mean() < 0.6


@pytest.mark.thorough
@pytest.mark.parametrize("unroll", [2, 4])
def test_turns_of_several_layers_equal_turns_of_one(unroll):
    one, several = (
        replaced(num_layers=4, scan_layers=True, scan_unroll=n) for n in (1, unroll)
    )
    params = first_params(one)
    tokens = tokens_of(1)
    text = step_of.lower(several, params, tokens).as_text()
    assert ("stablehlo.while" in text) == several.loops_over_layers == (unroll < 4)
    steps = (step_of(config, params, tokens) for config in (several, one))
    chex.assert_trees_all_close(*steps, atol=2e-6)


@pytest.mark.parametrize(
    "switch",
    [
        {"smear": True},
        {"position": "rope", "bigram_embeddings": 96},
    ],
)
def test_segments_see_only_themselves(switch):
    config = replaced(**switch)
    params = random_params(config)
    tokens = tokens_of(1)
    segments = (jnp.arange(16) >= 6).astype(jnp.int32)[None].repeat(2, axis=0)
    together = logits_of(config, params, tokens, segments)
    rows = np.asarray(tokens)[:, 6:]

    def compute(params):
        return np.stack([in_numpy.logits(config, params, row) for row in rows])

    atol = assert_rounded(together[:, 6:], compute, params)
    assert np.abs(together - logits_of(config, params, tokens)).max() > 100 * atol


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_compute_is_close_to_float32_and_leaves_float32_gradients(dtype):
    narrow = replaced(compute_dtype=dtype)
    params = first_params(SMALL)
    tokens = tokens_of(1)
    text = str(jax.make_jaxpr(loss, static_argnums=0)(narrow, params, tokens))
    assert {"bfloat16": "bf16[", "float16": "f16["}[dtype] in text
    found, grads = step_of(narrow, params, tokens)
    wanted, exact = step_of(SMALL, params, tokens)
    np.testing.assert_allclose(found, wanted, rtol=2e-3)
    chex.assert_trees_all_equal_dtypes(grads, params)
    error = jax.tree.map(
        lambda a, b: jnp.abs(a - b).max() / jnp.abs(b).max(), grads, exact
    )
    assert max(jax.tree.leaves(error)) < 0.05


@pytest.mark.parametrize("activation", ["gelu_tanh", thorough("relu_squared")])
def test_the_formulas_have_forward_derivatives_and_the_gradients_of_kernels(activation):
    config = replaced(attention="blocked", activation=activation, num_layers=1)
    params = first_params(config)
    tokens = tokens_of(1)
    direction = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params
    )

    def product(a, b):
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)))

    def slopes(model):
        def along(function):
            return jax.jvp(function, (params,), (direction,))[1]

        find = partial(mean_loss, model, tokens=tokens)
        return along(find), along(jax.grad(find))

    def curvature(params):  # by two backward passes
        gradient = jax.grad(partial(mean_loss, GPT(config)))
        return jax.grad(lambda p: product(gradient(p, tokens), direction))(params)

    with pytest.raises(TypeError, match="custom_vjp"):
        slopes(with_kernels(GPT(config)))
    slope, along = jax.jit(lambda: slopes(GPT(config)))()
    _, gradient = step_of(config, params, tokens)
    np.testing.assert_allclose(slope, product(gradient, direction), rtol=1e-4)
    expected = jax.jit(curvature)(params)
    for found, wanted in zip(*map(jax.tree.leaves, (along, expected)), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-3 * np.abs(wanted).max())
