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

from gpt2.errors import UserError
from gpt2.model import GPT, GPTConfig
from gpt2.optim import averaged_params, joint_norm, make_optimizer, make_schedule
from gpt2.optim.transforms import average_parameters, clip_by_global_norm
from gpt2.utils.parameters import ParamInfo
from gpt2.utils.scan import in_layout
from tests.helpers import configured, first_params, thorough
from tests.optim.updates import difference, optim_of, unrolled

SMALL = GPTConfig(
    vocab_size=61, context_length=8, num_layers=2, num_heads=2, embed_dim=16
)
NUM_STEPS = 10
TOLERANCE = 1e-5  # of the largest entry
CONSTANT = "schedule=constant"
FREE = f"name=schedule_free {CONSTANT}"
OPTIMS = {
    "adamw": "",
    "adam": "name=adam",
    "sgd": "name=sgd momentum=0.9",
    "sgd, plain momentum": "name=sgd momentum=0.9 nesterov=False",
    "sgd, no momentum": "name=sgd momentum=0.0 nesterov=False",
    "lion": "name=lion",
    "ademamix": "name=ademamix",
    "ademamix, no fast average": "name=ademamix beta1=0.0",
    "ademamix, no slow average": "name=ademamix beta3=0.0",
    "schedule_free": FREE,
    "cautious updates": "cautious=updates",
    "cautious lion": "name=lion cautious=both",
    "scheduled decay": "scheduled_weight_decay=True",
    "scheduled cautious decay": """
        name=lion scheduled_weight_decay=True cautious=decay""",
    "ema": "ema=0.9",
    "tail average": "tail_average=0.4",
    "before the tail": "tail_average=0.09",
    "hyperball": "hyperball=True adam_learning_rate=5e-3 weight_decay=0.5",
}


each_optimizer = pytest.mark.parametrize("name", OPTIMS)
each_layout = pytest.mark.parametrize(
    "scanned", [False, True], ids=["unrolled", "scanned"]
)


@cache
def initial_params(scanned=False):
    """Return a model's parameters with noise on all of them, so that no bias is zero."""
    rng = np.random.default_rng(0)

    def add_noise(x):
        return np.float32(x + 0.02 * rng.standard_normal(x.shape))

    params = jax.tree.map(add_noise, first_params(SMALL))
    return in_layout(params, scanned=scanned)


@cache
def gradients(scanned=False):
    """Return a gradient for each step, of norms around 1: only some of them are clipped."""
    rng = np.random.default_rng(1)

    def draw(x):
        scale = rng.uniform(0.001, 0.02)
        return np.float32(scale * rng.standard_normal(x.shape))

    steps = [jax.tree.map(draw, initial_params()) for _ in range(NUM_STEPS)]
    return [in_layout(grads, scanned=scanned) for grads in steps]


@cache
def parameters_of(scanned=False):
    """Return what the model's parameters declare."""
    return GPT(dataclasses.replace(SMALL, scan_layers=scanned)).parameters()


def train(optim, scanned=False, **options):
    """Return the parameters after ten steps, and the parameters that are validated."""
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


# The papers' formulas in numpy. A direction is called once a step for each parameter, with its
# gradient and the step, which counts from 1.


def moving(state, key, new, decay):
    state[key] = decay * state.get(key, 0.0) + (1 - decay) * new
    return state[key]


def mean_of(optim, state, name, grad, step):
    mean = moving(state, f"{name} mean", grad, optim.beta1)
    return mean / (1 - optim.beta1**step)


def root_of(optim, state, name, grad, step):
    square = moving(state, f"{name} square", grad**2, optim.beta2)
    return np.sqrt(square / (1 - optim.beta2**step)) + optim.eps


def adam(optim, state, name, grad, step):
    mean = mean_of(optim, state, name, grad, step)
    return mean / root_of(optim, state, name, grad, step)


def sgd(optim, state, name, grad, step):
    buffer = optim.momentum * state.get(name, 0.0) + grad
    state[name] = buffer
    return grad + optim.momentum * buffer if optim.nesterov else buffer


def lion(optim, state, name, grad, step):
    before = state.get(name, 0.0)
    moving(state, name, grad, optim.beta2)
    return np.sign(optim.beta1 * before + (1 - optim.beta1) * grad)


def ademamix(optim, state, name, grad, step):
    fraction = step / NUM_STEPS
    with np.errstate(divide="ignore"):
        start = 1 / np.log(optim.beta1)
        end = 1 / np.log(optim.beta3)
        rising = np.exp(1 / ((1 - fraction) * start + fraction * end))
    slow = moving(state, f"{name} slow", grad, min(rising, optim.beta3))
    mean = mean_of(optim, state, name, grad, step)
    both = mean + optim.alpha * fraction * slow
    return both / root_of(optim, state, name, grad, step)


def schedule_free(optim, state, name, grad, step):
    return grad / root_of(optim, state, name, grad, step)


DIRECTIONS = dict(adamw=adam, adam=adam, sgd=sgd, lion=lion)
DIRECTIONS |= dict(ademamix=ademamix, schedule_free=schedule_free)


def is_decayed(name):
    return name.endswith(("kernel", "embedding"))


def on_hyperball(name, param, update, rate):
    """Return a kernel after a step of Hyperball, whose queries, keys and values are matrices."""
    axes = (0, 2, 3) if "c_attn" in name else None
    norm = partial(np.sum, axis=axes, keepdims=True)
    radius = np.sqrt(norm(param**2))
    moved = param - rate * radius * update / np.sqrt(norm(update**2))
    return radius * moved / np.sqrt(norm(moved**2))


def by_formula(optim):
    """Return what `train` should return."""
    direction = partial(DIRECTIONS[optim.name], optim, {})
    schedule = make_schedule(optim, NUM_STEPS)
    params = unrolled(initial_params())
    average = dict(params)
    z = dict(params)
    weights = 0.0
    tail_steps = int(NUM_STEPS * optim.tail_average)
    tail = {}
    for step, tree in enumerate(gradients(), 1):
        grads = unrolled(tree)
        rate = float(schedule(step - 1))
        norm = np.sqrt(sum(np.sum(grad**2) for grad in grads.values()))
        weights += rate**2
        for name, param in params.items():
            grad = grads[name] * min(1.0, optim.clip_norm / norm)
            decay = optim.weight_decay * param * is_decayed(name)
            if optim.scheduled_weight_decay:
                decay *= rate / optim.learning_rate
            if optim.name in ("adam", "sgd"):
                grad = grad + decay
                decay = 0.0
            update = direction(name, grad, step)
            if optim.cautious in ("updates", "both"):
                mask = update * grad > 0
                update = update * mask / max(mask.mean(), 1e-3)
            if optim.cautious in ("decay", "both"):
                decay = decay * (update * param >= 0)
            if optim.adam_learning_rate and not is_hidden(name):
                update = update * optim.adam_learning_rate / optim.learning_rate
                decay = decay * optim.adam_learning_rate / optim.learning_rate
            moved = -rate * (update + decay)
            if optim.name == "schedule_free":
                z[name] = z[name] + moved
                weight = rate**2 / weights
                average[name] = (1 - weight) * average[name] + weight * z[name]
                share = optim.beta1
                params[name] = (1 - share) * z[name] + share * average[name]
            else:
                params[name] = param + moved
                if optim.hyperball and is_hidden(name):
                    params[name] = on_hyperball(name, param, update, rate)
                newest = (1 - optim.ema) * params[name]
                average[name] = optim.ema * average[name] + newest
            if step > NUM_STEPS - tail_steps:
                tail[name] = tail.get(name, 0) + params[name] / tail_steps
    return params, tail or average


@pytest.mark.parametrize(
    "scanned", [False, thorough(True)], ids=["unrolled", "scanned"]
)
@each_optimizer
def test_ten_steps_are_those_of_the_papers_formulas(name, scanned):
    optim = optim_of(OPTIMS[name])
    params, average = train(optim, scanned)
    expected, expected_average = by_formula(optim)
    assert difference(params, expected) < TOLERANCE
    assert difference(average, expected_average) < TOLERANCE


@pytest.mark.parametrize(("start", "new_start"), [(8, 2), (2, 4)])
def test_a_tail_that_begins_at_another_step_after_a_resume_averages_what_follows(
    start, new_start
):
    params = {"w": jnp.float32(0.0)}
    tail = average_parameters(start=start)
    state = tail.init(params)
    for step in range(1, 7):
        if step == 5:
            tail = average_parameters(start=new_start)
        _, state = tail.update({"w": jnp.float32(step)}, state, params)
    assert state.average["w"] == np.mean([5, 6])


# The chain around a direction


def test_the_joint_norm_of_small_gradients_is_one_sum():
    grads = initial_params() | {"table": jnp.ones((512, 256))}
    program = str(jax.make_jaxpr(joint_norm)(grads))
    assert program.count("reduce_sum") == 2
    np.testing.assert_allclose(joint_norm(grads), optax.tree.norm(grads), rtol=1e-6)


@pytest.mark.parametrize("size", [0.0, 10.0, np.inf, np.nan])
def test_clipping_is_that_of_optax(size):
    grads = {"a": size * jnp.arange(-2.0, 3.0), "b": size * jnp.ones((2, 3))}
    norm = optax.tree.norm(grads)
    clip = clip_by_global_norm(1.0)
    expected, _ = optax.clip_by_global_norm(1.0).update(grads, None)
    clipped, _ = clip.update(grads, None)
    chex.assert_trees_all_close(clipped, expected, rtol=1e-6)
    clipped, _ = clip.update(grads, None, grad_norm=norm)
    chex.assert_trees_all_close(clipped, expected, rtol=1e-6)


def moves(optim, scanned=False, **options):
    """Return how far ten steps move each parameter."""
    start = unrolled(initial_params())
    end, _ = train(optim, scanned, **options)
    return {name: end[name] - start[name] for name in start}


@each_layout
def test_layer_rates_multiply_what_the_first_pattern_matches(scanned):
    plain = optim_of("name=sgd momentum=0.0 weight_decay=0.0")
    rates = r"h_1/attn/c_attn=0.0,h_\d+/attn=0.5,wte=3"
    scaled = moves(dataclasses.replace(plain, layer_rates=rates), scanned)
    for name, move in moves(plain).items():
        factor = 1.0
        if name.startswith("wte"):
            factor = 3.0
        elif name.startswith("h_1/attn/c_attn"):
            factor = 0.0
        elif "attn" in name:
            factor = 0.5
        np.testing.assert_allclose(scaled[name], factor * move, atol=1e-7)


def test_layer_rates_multiply_a_scalar():
    optim = optim_of("name=sgd momentum=0.0 weight_decay=0.0 layer_rates=gain=0.5")
    params = {"gain": jnp.ones(()), "bias": jnp.ones(3)}
    parameters = jax.tree.map(lambda leaf: ParamInfo(("mix",) * leaf.ndim), params)
    schedule = optax.constant_schedule(1.0)
    optimizer = make_optimizer(optim, schedule, parameters, num_steps=1)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    expected = {"gain": jnp.full((), -0.5), "bias": jnp.full(3, -1.0)}
    chex.assert_trees_all_equal_shapes(updates, expected)
    assert updates["gain"] == updates["bias"][0] / 2


def test_a_pattern_that_no_parameter_needs_is_refused():
    def init(layer_rates):
        optim = dataclasses.replace(optim_of(), layer_rates=layer_rates)
        schedule = optax.constant_schedule(1.0)
        parameters = parameters_of(scanned=True)
        optimizer = make_optimizer(optim, schedule, parameters, num_steps=1)
        optimizer.init(initial_params(scanned=True))

    init(r"h_1/=0.5,h_\d=2,ln_f/bias$=0")
    for patterns, unused in (("h_2/=1", "h_2/"), ("attn=1,c_attn=2", "c_attn")):
        message = rf"pattern '{unused}' of optim\.layer_rates"
        with pytest.raises(UserError, match=message):
            init(patterns)


def is_hidden(name):
    return re.match(r"h_\d/.*kernel", name)


@pytest.mark.parametrize(
    "options",
    [
        "",
        thorough("name=muon"),
        thorough("name=lion"),
        thorough(FREE),
        thorough("name=normuon"),
        thorough("name=muon hyperball=True"),
    ],
)
def test_a_wider_model_moves_its_hidden_kernels_less(options):
    optim = optim_of(f"{options} weight_decay=0.0")
    wide = moves(optim, scanned=True, width_ratio=4.0)
    hidden_factor = 2 if "muon" in options else 4
    if optim.hyperball:
        hidden_factor = 1
    for name, move in moves(optim).items():
        factor = hidden_factor if is_hidden(name) else 1
        np.testing.assert_allclose(wide[name], move / factor, atol=1e-6)


def test_a_wider_model_decays_its_hidden_kernels_alike():
    optim = optim_of()
    decayed, _ = train(optim, width_ratio=1e9)
    schedule = make_schedule(optim, NUM_STEPS)
    kept = 1.0
    for step in range(NUM_STEPS):
        kept *= 1 - float(schedule(step)) * optim.weight_decay
    for name, param in unrolled(initial_params()).items():
        if is_hidden(name):
            np.testing.assert_allclose(decayed[name], kept * param, atol=1e-7)


@pytest.mark.parametrize("options", ["", thorough("name=muon cautious=decay")])
def test_a_timescale_sets_the_weight_decay(options):
    plain = optim_of(options)
    share = 0.25
    product = plain.learning_rate * share * NUM_STEPS
    same = optim_of(f"{options} weight_decay={1 / product}")
    by_share = optim_of(f"{options} decay_timescale={share}")
    expected, _ = train(same)
    trained, _ = train(by_share)
    without, _ = train(plain)
    assert by_share.decay(NUM_STEPS) == same.weight_decay
    chex.assert_trees_all_equal(trained, expected)
    for name in unrolled(initial_params()):
        assert (trained[name] != without[name]).any() == is_decayed(name)


def test_the_declared_role_of_a_parameter_decides_and_not_its_name():
    optim = optim_of(f"name=muon weight_decay=0.5 clip_norm=0.0 {CONSTANT}")
    own = ParamInfo(("embed", "mlp"), inputs=(-2,), decays=True)
    parameters = {"own": own, "kernel": ParamInfo(("mix", "mix"))}
    schedule = optax.constant_schedule(0.1)
    optimizer = make_optimizer(optim, schedule, parameters, num_steps=1)
    diagonal = jnp.array([1.0, 2.0, 3.0, 4.0])
    params = dict.fromkeys(parameters, jnp.diag(diagonal))
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    # Adam's first update is the sign of the gradient.
    np.testing.assert_allclose(updates["kernel"], -0.1 * np.eye(4), rtol=1e-5)
    # Newton-Schulz leaves singular values between 0.68 and 1.21, at a root mean square of 0.2.
    direction = jnp.diag(updates["own"]) / -0.1 - 0.5 * diagonal
    singular = direction / (0.2 * 4**0.5)
    assert singular.min() > 0.68
    assert singular.max() < 1.21


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_hidden_kernels_alone_get_the_direction_for_matrices(monkeypatch, name):
    direction = f"gpt2.optim.optimizers.scale_by_{name}"
    monkeypatch.setattr(direction, lambda *_: optax.identity())
    trained, _ = train(optim_of(f"name={name} adam_learning_rate=5e-3"), scanned=True)
    by_sgd, _ = train(optim_of("name=sgd momentum=0.0"))
    by_adam, _ = train(optim_of("learning_rate=5e-3"))
    for parameter, value in trained.items():
        expected = by_sgd if is_hidden(parameter) else by_adam
        np.testing.assert_allclose(value, expected[parameter], atol=1e-6)


# Schedules


def rates(text):
    """Return the schedule of 100 steps, of which 10 are the warm-up, with a peak of 1."""
    optim = configured(f"learning_rate=1.0 warmup_steps=10 {text}", "optim.").optim
    return make_schedule(optim, 100)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("schedule=cosine", {40: 0.775, 55: 0.55, 100: 0.1}),
        ("schedule=cosine end_fraction=0.0", {70: 0.25}),
        ("schedule=linear", {40: 0.7, 100: 0.1}),
        ("schedule=constant", {10: 1.0, 99: 1.0}),
        ("schedule=wsd end_fraction=0.0", {80: 1.0, 85: 0.75, 99: 0.05}),
        ("schedule=wsd decay_fraction=1.0", {10: 1.0, 55: 0.55, 100: 0.1}),
        ("schedule=piecewise:20=0.5,60=0.1", {19: 1.0, 20: 0.5, 59: 0.5, 60: 0.1}),
    ],
)
def test_schedules_pass_through_known_points(options, expected):
    rate = rates(options)
    for step in range(10):
        expected[step] = (step + 1) / 11
    found = [rate(step) for step in expected]
    np.testing.assert_allclose(found, list(expected.values()), atol=1e-6)


@pytest.mark.parametrize("steps", ["5=0.5", "20=0.5,100=0.1"])
def test_schedules_that_do_not_fit_the_run_are_refused(steps):
    with pytest.raises(UserError, match=r"between optim\.warmup_steps"):
        rates(f"schedule=piecewise:{steps}")
