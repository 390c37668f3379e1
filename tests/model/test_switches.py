"""Every switch of the model and the loss has an effect, the same one in every way to run a model.

A row of `SWITCHES` in switches.py covers a switch. tests/model/test_against_numpy.py compares what
each switch computes with an independent reference.
"""

import collections
import dataclasses
import inspect
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.config import GPTConfig
from gpt2.config.options import OPTIONS
from gpt2.errors import UserError
from gpt2.model import GPT, KVCache, extend, ingredients, with_kernels
from gpt2.model.flops import count_compute_parameters, model_flops_per_token
from gpt2.model.ingredients import INGREDIENTS, score_term_options
from gpt2.training.losses import LOSS_TERMS
from gpt2.training.program import Program
from gpt2.utils.scan import in_layout
from tests.helpers import ROOT, batch_of, by_name, first_params, in_float64, thorough
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
    tokens_of,
)

# Options that need no switch: sizes, and those that test_model.py and test_ops.py cover.
COVERED = {"vocab_size", "context_length", "num_layers", "num_heads", "embed_dim"}
COVERED |= {"dropout", "stochastic_depth", "attention"}

each_switch = pytest.mark.parametrize("name", ALL)
# Switches whose test takes seconds run only in combination by default.
each_switch_by_itself = pytest.mark.parametrize(
    "name", [*COMBINED, *(thorough(name) for name in SWITCHES)]
)


def each_group(*usual):
    """Parametrize a test by groups of switches. All but the `usual` ones are thorough."""
    names = ["default", "llama", "gemma 2", "mixtral", "modded", *groups()]
    cases = [name if name in usual else thorough(name) for name in names]
    return pytest.mark.parametrize("name", cases)


def test_every_option_of_the_model_and_the_loss_has_a_switch():
    values = collections.defaultdict(set)
    for options in SWITCHES.values():
        for name, value in options.items():
            values[name].add(value)
    for name, option in OPTIONS.items():
        group, _, member = name.partition(".")
        if group not in ("model", "loss") or member in COVERED:
            continue
        assert values[name], name
        others = {*option.choices} - {option.default}
        assert values[name] >= others, name


@pytest.mark.parametrize("kind", [*INGREDIENTS, *LOSS_TERMS], ids=lambda k: k.__name__)
def test_an_ingredient_is_a_file_with_a_source_and_an_option(kind):
    path = Path(inspect.getfile(kind))
    if kind in LOSS_TERMS:
        folder = ROOT / "gpt2/training/losses"
        option = f"loss.{kind.option}"
    else:
        folder = ROOT / "gpt2/model/ingredients"
        option = f"model.{kind.option}"
    assert path.parent == folder
    # No other one has this name, and therefore this file.
    assert kind.__name__.lower() == path.stem.replace("_", "")
    if kind in INGREDIENTS:
        # ALiBi is one of several values of an option that GPT-2 also has.
        assert OPTIONS[option].is_ingredient != bool(OPTIONS[option].choices)
    source = r"\b(19|20)\d\d\b|arXiv|\d{4}\.\d{5}|modded-nanogpt|nanochat|GPT-J"
    assert re.search(source, inspect.getmodule(kind).__doc__)


@pytest.mark.parametrize(
    "name", [name for name, option in OPTIONS.items() if option.is_ingredient]
)
def test_the_option_of_a_deleted_ingredient_is_refused(monkeypatch, name):
    _, _, member = name.partition(".")
    others = tuple(kind for kind in INGREDIENTS if kind.option != member)
    monkeypatch.setattr(ingredients, "INGREDIENTS", others)
    collect = ingredients.ingredients_of.__wrapped__  # without its cache
    assert collect(GPTConfig()) == ()
    kind = OPTIONS[name].kind
    value = 0.5 if kind is float else kind(4)
    with pytest.raises(UserError, match=f"{name}={value} has no effect, because"):
        collect(GPTConfig(**{member: value}))


def steps_of(name, model, tokens):
    """Return the loss and the gradients of a model with the parameters of a switch."""
    step = jax.value_and_grad(lambda params: mean_loss(name, model, params, tokens))
    return jax.jit(step)(params_of(name))


@each_group("gemma 2")
def test_kernels_give_the_loss_and_the_gradients_of_the_formulas(name):
    model = model_of(name)
    tokens = tokens_of(2)
    attention = "auto" if score_term_options(model.config) else "blocked"
    fast = GPT(dataclasses.replace(model.config, attention=attention))
    expected, gradients = steps_of(name, model, tokens)
    loss, fast_gradients = steps_of(name, with_kernels(fast), tokens)
    # About 20 sums in a row, each of 64 to 256 products, round like a random walk.
    rounding = 100 * np.finfo(np.float32).eps
    np.testing.assert_allclose(loss, expected, rtol=rounding)
    # The gradient of the same bias on all keys is 0 in theory, and the gradient of a weight of a
    # whole stream is a sum of thousands of numbers that cancel. Both round like larger numbers.
    gradients = by_name(gradients)
    sizes = {path: np.abs(gradient).max() for path, gradient in gradients.items()}
    largest = max(sizes.values())
    for path, gradient in by_name(fast_gradients).items():
        assert sizes[path] > 1e-7, path  # every parameter learns
        atol = rounding * (sizes[path] + 4e-2 * largest)
        difference = np.abs(gradient - gradients[path]).max()
        assert difference < atol, path


@each_switch
def test_a_switch_is_off_by_default_and_changes_the_loss_or_the_weights(name):
    for option, value in ALL[name].items():
        assert OPTIONS[option].default != value
    params = params_of(name)
    shapes = jax.tree.map(jnp.shape, params)
    if shapes != jax.tree.map(jnp.shape, params_of("default")):
        return
    _, loss = in_numpy(name, params, tokens_of(1))
    _, default_loss = in_numpy("default", params, tokens_of(1))
    if abs(loss - default_loss) > 5e-6:
        return
    drawn = by_name(first_params(model_of(name).config))
    default_drawn = by_name(first_params(model_of("default").config))
    changes = [drawn[path].std() - default_drawn[path].std() for path in drawn]
    assert np.abs(changes).max() > 1e-3


@each_group("gemma 2")
def test_cached_logits_equal_uncached_ones(name):
    model = model_of(name)
    params = params_of(name)
    tokens = tokens_of(1)
    expected, atol = in_float64(lambda p: in_numpy(name, p, tokens)[0], params)
    scanned = GPT(dataclasses.replace(model.config, scan_layers=True))
    stacked = in_layout(params, scanned=True)

    append = jax.jit(extend, static_argnums=0)
    one_each = jnp.ones(2, jnp.int32)
    for form, weights in ((model, params), (scanned, stacked)):
        cache = KVCache.create(form.config, 2, 16)
        lengths = jnp.array([9, 7])  # longer than the windows
        logits, cache = append(form, weights, tokens[:, :9], lengths, cache)
        for _ in range(4):
            last = expected[np.arange(2), lengths - 1]
            np.testing.assert_allclose(logits, last, rtol=0, atol=atol)
            new = jnp.take_along_axis(tokens, lengths[:, None], axis=1)
            logits, cache = append(form, weights, new, one_each, cache)
            lengths += 1


def train(name, devices, changes=""):
    """Train two steps, and return the losses and the parameters, with layers unrolled."""
    program = Program.from_config(config_of(name, changes), devices)
    T = program.config.model.context_length
    state = program.init_state()
    rng = np.random.default_rng(0)
    step = None
    losses = []
    for _ in range(2):
        tokens = rng.integers(0, 64, (16, T + 1), np.int32)
        batch = batch_of(tokens)
        is_text = np.arange(T) < rng.integers(1, T + 1, (16, 1))
        batch["targets"] = np.where(is_text, batch["targets"], -1)
        batch = program.backend.put_batch(batch)
        step = step or program.compile_train(state, batch)
        state, metrics = step(state, batch)
        losses.append(float(metrics["train/loss"]))
    return losses, in_layout(jax.device_get(state.params), scanned=False)


LAYOUT = """
    parallel.data=2 parallel.fsdp=2 parallel.tensor=2 memory.remat=full
    memory.scan_layers=True train.accumulate_steps=2"""


@each_group()
def test_eight_devices_scan_remat_and_accumulation_train_as_one_device_does(name):
    losses, params = train(name, jax.devices()[:1])
    layouts = [LAYOUT]
    if name == "modded":
        layouts.append("parallel.backend=pmap memory.remat=dots")
    for layout in layouts:
        other_losses, other_params = train(name, jax.devices(), layout)
        np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
        # Each of the two updates is at most 100 times a small gradient: the learning rate over eps.
        rounding = 2 * 100 * np.finfo(np.float32).eps
        chex.assert_trees_all_close(other_params, params, atol=rounding)


@each_switch_by_itself
def test_flops_and_compute_parameters_are_those_of_the_program(name):
    sizes = "model.embed_dim=256 model.context_length=32 model.num_layers=3"
    if "model.mlp_dim" in ALL[name]:
        sizes += " model.mlp_dim=320"
    if "model.num_experts" in ALL[name]:
        sizes += " model.expert_capacity=1.0"
    cfg = config_of(name, f"{sizes} model.attention=plain").gpt()
    model = GPT(cfg)
    tokens = jax.ShapeDtypeStruct((8, 32), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    looked_up = {"wpe", "value_embedding", "bigram"}
    if not cfg.tie_embeddings:
        looked_up.add("wte")
    computing = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        modules = {key.key for key in path}
        if modules & looked_up:
            continue
        size = leaf.size
        if "experts" in modules:
            size *= cfg.experts_per_token / cfg.num_experts
        computing += size
    assert count_compute_parameters(cfg) == computing
    heads, size, _ = params["h_0"]["attn"]["c_proj"]["kernel"].shape
    seen = sum(window or cfg.context_length for window in cfg.windows)
    scores = 12 * heads * size * seen
    flops = 6 * computing + scores
    assert model_flops_per_token(cfg) == flops

    def loss(params, tokens):
        return mean_loss(name, model, params, tokens, jax.random.key(0))

    lowered = jax.jit(jax.value_and_grad(loss)).lower(params, tokens)
    expected = lowered.cost_analysis()["flops"]
    assert flops * tokens.size == pytest.approx(expected, rel=0.05)
