"""Optimizers and schedules: each equals its paper's formulas, whatever the layout of the layers."""

import dataclasses
import re
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gpt2.config import OptimConfig
from gpt2.errors import UserError
from gpt2.model import GPT, GPTConfig
from gpt2.optim import averaged_params, joint_norm, make_optimizer, make_schedule
from gpt2.optim.transforms import average_parameters, clip_by_global_norm
from gpt2.utils.parameters import ParamInfo
from gpt2.utils.scan import in_layout
from tests.helpers import by_name, configured, first_params, thorough

SMALL = GPTConfig(
    vocab_size=61, context_length=8, num_layers=2, num_heads=2, embed_dim=16
)
NUM_STEPS = 10
WIDER_TOO = ("lion", "schedule_free", "normuon")
TOLERANCE = 1e-5  # of the largest entry
RATES = "learning_rate=1e-2 warmup_steps=2"
CONSTANT = "schedule=constant"
OPTIMS = {
    "adamw": "",
    "adam": "name=adam",
    "sgd": "name=sgd momentum=0.9",
    "sgd, plain momentum": "name=sgd momentum=0.9 nesterov=False",
    "sgd, no momentum": "name=sgd momentum=0.0 nesterov=False",
    "lion": "name=lion",
    "ademamix": "name=ademamix",
    "schedule_free": f"name=schedule_free {CONSTANT}",
    "cautious updates": "cautious=updates",
    "cautious decay": "cautious=decay",
    "cautious lion": "name=lion cautious=both",
    "scheduled decay": "scheduled_weight_decay=True",
    "scheduled cautious decay": """
        name=lion scheduled_weight_decay=True cautious=decay""",
    "ema": "ema=0.9",
    "tail average": "tail_average=0.4",
    "before the tail": "tail_average=0.09",
}


def optim_of(text=""):
    """Returns the options of `optim` with those of a text."""
    return configured(f"{RATES} {text}", "optim.").optim


each_optimizer = pytest.mark.parametrize("name", OPTIMS)
each_layout = pytest.mark.parametrize(
    "scanned", [False, True], ids=["unrolled", "scanned"]
)


@cache
def initial_params(scanned=False):
    """A model's parameters with noise on all of them, so that no bias is zero."""
    params = first_params(SMALL)
    rng = np.random.default_rng(0)
    noise = lambda x: np.float32(x + 0.02 * rng.standard_normal(x.shape))  # noqa: E731
    return in_layout(jax.tree.map(noise, params), scanned=scanned)


@cache
def gradients(scanned=False):
    """A gradient for each step, of norms around 1: some are clipped, and others are not."""
    rng = np.random.default_rng(1)
    params = initial_params()
    draw = lambda x: np.float32(rng.standard_normal(x.shape) * rng.uniform(0.001, 0.02))  # noqa: E731
    return [
        in_layout(jax.tree.map(draw, params), scanned=scanned) for _ in range(NUM_STEPS)
    ]


@cache
def parameters_of(scanned=False):
    """What the model's parameters declare."""
    return GPT(dataclasses.replace(SMALL, scan_layers=scanned)).parameters()


def unrolled(tree):
    """Leaves by name, with layers unrolled, as float64."""
    return {
        n: np.float64(leaf)
        for n, leaf in by_name(in_layout(tree, scanned=False)).items()
    }


def train(optim, scanned=False, **options):
    """Returns parameters, and those that are validated, after ten steps."""
    schedule = make_schedule(optim, NUM_STEPS)
    optimizer = make_optimizer(
        optim, schedule, parameters_of(scanned), num_steps=NUM_STEPS, **options
    )
    params = jax.tree.map(jnp.asarray, initial_params(scanned))
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for grads in gradients(scanned):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return unrolled(params), unrolled(averaged_params(state, params))


def assert_close(actual, expected, tolerance=TOLERANCE):
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        difference = np.abs(actual[name] - wanted).max() / np.abs(wanted).max()
        assert difference < tolerance, f"{name}: {difference:.1e}"


# The papers' formulas in numpy. A direction is called once a step for each parameter, with its
# gradient, its value and the step, which counts from 1.


def moving(state, key, new, decay):
    state[key] = decay * state.get(key, 0.0) + (1 - decay) * new
    return state[key]


def adam(optim, state, name, grad, param, step):
    mean = moving(state, (name, "m"), grad, optim.beta1) / (1 - optim.beta1**step)
    square = moving(state, (name, "v"), grad**2, optim.beta2) / (1 - optim.beta2**step)
    return mean / (np.sqrt(square) + optim.eps)


def sgd(optim, state, name, grad, param, step):
    state[name] = buffer = optim.momentum * state.get(name, 0.0) + grad
    return grad + optim.momentum * buffer if optim.nesterov else buffer


def lion(optim, state, name, grad, param, step):
    sign = np.sign(optim.beta1 * state.get(name, 0.0) + (1 - optim.beta1) * grad)
    moving(state, name, grad, optim.beta2)
    return sign


def ademamix(optim, state, name, grad, param, step):
    share = step / NUM_STEPS
    start = np.log(optim.beta1)
    end = np.log(optim.beta3)
    beta3 = min(np.exp(start * end / ((1 - share) * end + share * start)), optim.beta3)
    mean = moving(state, (name, "m1"), grad, optim.beta1) / (1 - optim.beta1**step)
    slow = moving(state, (name, "m2"), grad, beta3)
    square = moving(state, (name, "v"), grad**2, optim.beta2) / (1 - optim.beta2**step)
    return (mean + optim.alpha * share * slow) / (np.sqrt(square) + optim.eps)


def schedule_free(optim, state, name, grad, param, step):
    square = moving(state, (name, "v"), grad**2, optim.beta2) / (1 - optim.beta2**step)
    return grad / (np.sqrt(square) + optim.eps)


DIRECTIONS = dict(adamw=adam, adam=adam, sgd=sgd, lion=lion)
DIRECTIONS |= dict(ademamix=ademamix, schedule_free=schedule_free)


def by_formula(optim):
    """Returns what `train` should return."""
    direction = partial(DIRECTIONS[optim.name], optim, {})
    params = unrolled(initial_params())
    average = dict(params)
    z = dict(params)
    weights = 0.0
    means, tail = {}, int(NUM_STEPS * optim.tail_average)  # in steps
    for step, tree in enumerate(gradients(), 1):
        grads = unrolled(tree)
        rate = float(make_schedule(optim, NUM_STEPS)(step - 1))
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        weights += rate**2
        for name, param in params.items():
            grad = grads[name] * min(1.0, optim.clip_norm / norm)
            decay = optim.weight_decay * param * name.endswith(("kernel", "embedding"))
            decay *= rate / optim.learning_rate if optim.scheduled_weight_decay else 1.0
            if optim.name in ("adam", "sgd"):
                grad, decay = grad + decay, 0.0
            update = direction(name, grad, param, step)
            if optim.cautious in ("updates", "both"):
                mask = update * grad > 0
                update = update * mask / max(mask.mean(), 1e-3)
            if optim.cautious in ("decay", "both"):
                decay = decay * (update * param >= 0)
            moved = -rate * (update + decay)
            if optim.name == "schedule_free":
                z[name] = z[name] + moved
                average[name] = average[name] + rate**2 / weights * (
                    z[name] - average[name]
                )
                params[name] = (1 - optim.beta1) * z[name] + optim.beta1 * average[name]
            else:
                params[name] = param + moved
                average[name] = (
                    optim.ema * average[name] + (1 - optim.ema) * params[name]
                )
            if step > NUM_STEPS - tail:
                means[name] = means.get(name, 0) + params[name] / tail
    return params, means or average


@pytest.mark.parametrize(
    ("first", "then", "resumed", "averaged"),
    [(8, 2, 4, (5, 6)), (2, 4, 4, (5, 6))],
    ids=["shortened", "prolonged"],
)
def test_a_tail_that_begins_at_another_step_after_a_resume_averages_what_follows(
    first, then, resumed, averaged
):
    params = {"w": jnp.float32(0.0)}
    tail = average_parameters(start=first)
    state = tail.init(params)
    for step in range(1, 7):
        if step > resumed:
            tail = average_parameters(start=then)
        _, state = tail.update({"w": jnp.float32(step)}, state, params)
    assert state.average["w"] == np.mean(averaged)


@pytest.mark.parametrize("beta", ["beta1", "beta3"])
def test_ademamix_without_one_of_its_averages_is_finite(beta):
    optim = optim_of(f"name=ademamix {beta}=0.0")
    for params in train(optim, False):
        assert all(np.isfinite(param).all() for param in params.values())


@pytest.mark.parametrize(
    "scanned", [False, thorough(True)], ids=["unrolled", "scanned"]
)
@each_optimizer
def test_ten_steps_are_those_of_the_papers_formulas(name, scanned):
    optim = optim_of(OPTIMS[name])
    results = zip(train(optim, scanned), by_formula(optim), strict=True)
    for actual, expected in results:
        assert_close(actual, expected)


# The chain around a direction


def test_the_joint_norm_of_small_gradients_is_one_sum():
    grads = initial_params() | {"table": jnp.ones((512, 256))}

    def sums(norm):
        return str(jax.make_jaxpr(norm)(grads)).count("reduce_sum")

    assert sums(optax.tree.norm) == len(jax.tree.leaves(grads))
    assert sums(joint_norm) == 2
    np.testing.assert_allclose(joint_norm(grads), optax.tree.norm(grads), rtol=1e-6)
    large = {"table": grads["table"]}
    np.testing.assert_allclose(joint_norm(large), 2**8.5, rtol=1e-6)


@pytest.mark.parametrize("size", [0.0, 0.1, 10.0, np.inf, np.nan])
def test_clipping_is_that_of_optax(size):
    grads = {"a": size * jnp.arange(-2.0, 3.0), "b": size * jnp.ones((2, 3))}
    expected, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    for known in ({}, dict(grad_norm=optax.tree.norm(grads))):
        clip = clip_by_global_norm(1.0)
        clipped, _ = clip.update(grads, optax.EmptyState(), **known)
        chex.assert_trees_all_close(clipped, expected, rtol=1e-6)


def moves(optim, scanned=False, **options):
    """How far ten steps move each parameter."""
    start = unrolled(initial_params())
    return {
        n: value - start[n] for n, value in train(optim, scanned, **options)[0].items()
    }


@each_layout
def test_layer_rates_multiply_what_the_first_pattern_matches(scanned):
    plain = optim_of("name=sgd momentum=0.0 weight_decay=0.0")
    rates = r"h_1/attn/c_attn=0.0,h_\d+/attn=0.5,wte=3"
    scaled = moves(dataclasses.replace(plain, layer_rates=rates), scanned)
    for name, move in moves(plain).items():
        factor = 3.0 if name.startswith("wte") else 0.5 if "attn" in name else 1.0
        factor *= not name.startswith("h_1/attn/c_attn")
        np.testing.assert_allclose(scaled[name], factor * move, atol=1e-7)


@each_layout
@pytest.mark.parametrize("name", ["adamw", "muon", *(thorough(n) for n in WIDER_TOO)])
def test_a_wider_model_moves_its_hidden_kernels_less_and_decays_them_alike(
    name, scanned
):
    schedule = CONSTANT if name == "schedule_free" else ""
    optim = optim_of(f"name={name} weight_decay=0.0 {schedule}")
    plain = moves(optim)
    wide = moves(optim, scanned, width_ratio=4.0)
    for parameter, move in plain.items():
        hidden = 2 if "muon" in name else 4
        factor = hidden if re.match(r"h_\d/.*kernel", parameter) else 1
        np.testing.assert_allclose(wide[parameter], move / factor, atol=1e-6)
    if name == "adamw":
        without, _ = train(optim, width_ratio=1e9)
        decayed, _ = train(optim_of(), width_ratio=1e9)
        schedule = make_schedule(optim, NUM_STEPS)
        share = np.prod(
            [1 - float(schedule(i)) * optim_of().weight_decay for i in range(10)]
        )
        kernel = "h_0/mlp/c_fc/kernel"
        np.testing.assert_allclose(decayed[kernel], share * without[kernel], rtol=1e-5)


def test_the_declared_role_of_a_parameter_decides_and_not_its_name():
    optim = optim_of(f"name=muon weight_decay=0.5 clip_norm=0.0 {CONSTANT}")
    parameters = {
        "own": ParamInfo(("embed", "mlp"), inputs=(-2,), decays=True),
        "kernel": ParamInfo(("mix", "mix")),
    }
    schedule = optax.constant_schedule(0.1)
    optimizer = make_optimizer(optim, schedule, parameters, num_steps=1)
    matrix = jnp.diag(jnp.array([1.0, 2.0, 3.0, 4.0]))
    params = {"own": matrix, "kernel": matrix}
    state = optimizer.init(params)
    still, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
    np.testing.assert_allclose(still["own"], -0.1 * 0.5 * matrix, rtol=1e-6)
    np.testing.assert_array_equal(still["kernel"], jnp.zeros((4, 4)))
    moved, _ = optimizer.update(params, state, params)
    # Adam's first update is the sign of the gradient; Muon's is orthogonal.
    np.testing.assert_allclose(moved["kernel"], -0.1 * np.sign(matrix), rtol=1e-5)
    # Newton-Schulz leaves singular values between 0.68 and 1.21, at a root mean square of 0.2.
    by_muon = -jnp.diag(moved["own"] - still["own"])
    singular = by_muon / (0.1 * 0.2 * 4**0.5)
    assert singular.min() > 0.68 and singular.max() < 1.21


@pytest.mark.parametrize("scanned", [True, thorough(False)])
@pytest.mark.parametrize("name", ["muon", "normuon", "soap"])
def test_hidden_kernels_alone_get_the_direction_for_matrices(
    monkeypatch, name, scanned
):
    for module in ("scale_by_muon", "scale_by_soap"):
        monkeypatch.setattr(
            f"gpt2.optim.optimizers.{module}", lambda *_: optax.identity()
        )
    optim = optim_of(f"name={name} adam_learning_rate=5e-3")
    rest, _ = train(optim_of("learning_rate=5e-3"))
    plain, _ = train(optim_of("name=sgd momentum=0.0 weight_decay=0.0"))
    trained, _ = train(dataclasses.replace(optim, weight_decay=0.0), scanned)
    decayed, _ = train(optim, scanned)
    for parameter, value in decayed.items():
        if re.match(r"h_\d/.*kernel", parameter):
            np.testing.assert_allclose(trained[parameter], plain[parameter], atol=1e-6)
            assert np.abs(value - trained[parameter]).max() > 1e-5
        else:
            np.testing.assert_allclose(value, rest[parameter], atol=1e-6)


# Schedules


def rates(schedule, num_steps=100, **options):
    options = dict(learning_rate=1.0, warmup_steps=10) | options
    return make_schedule(OptimConfig(schedule=schedule, **options), num_steps)


@pytest.mark.parametrize(
    ("schedule", "options", "expected"),
    [
        ("cosine", dict(end_fraction=0.1), {55: 0.55, 100: 0.1}),
        ("cosine", dict(end_fraction=0.0), {40: 0.75, 70: 0.25}),
        ("linear", dict(end_fraction=0.1), {40: 0.7, 100: 0.1}),
        ("constant", {}, {10: 1.0, 99: 1.0}),
        ("wsd", dict(end_fraction=0.0), {80: 1.0, 85: 0.75, 99: 0.05}),
        ("wsd", dict(decay_fraction=1.0), {10: 1.0, 55: 0.55, 100: 0.1}),
        ("wsd", dict(end_fraction=0.0, decay_fraction=0.4), {60: 1.0, 80: 0.5}),
        (
            "piecewise:20=0.5,60=0.1",
            {},
            {19: 1.0, 20: 0.5, 59: 0.5, 60: 0.1, 99: 0.1},
        ),
    ],
)
def test_schedules_pass_through_known_points(schedule, options, expected):
    rate = rates(schedule, **options)
    expected = {i: (i + 1) / 11 for i in range(10)} | expected
    np.testing.assert_allclose(
        [rate(i) for i in expected], list(expected.values()), atol=1e-6
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(schedule="piecewise:5=0.5"), "in the warm-up"),
        (dict(schedule="piecewise:20=0.5,100=0.1"), "after the run"),
    ],
)
def test_schedules_that_do_not_fit_the_run_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        rates(**options)


@each_layout
def test_a_pattern_that_no_parameter_needs_is_refused(scanned):
    params = initial_params(scanned)

    def init(layer_rates):
        optim = OptimConfig(layer_rates=layer_rates)
        schedule = optax.constant_schedule(1.0)
        parameters = parameters_of(scanned)
        make_optimizer(optim, schedule, parameters, num_steps=1).init(params)

    init(r"h_1/=0.5,h_\d=2,ln_f/bias$=0")
    for patterns, unused in (("h_2/=1", "h_2/"), ("attn=1,c_attn=2", "c_attn")):
        with pytest.raises(UserError, match=f"layer_rates has the pattern '{unused}'"):
            init(patterns)
