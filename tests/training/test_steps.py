"""One update: the optimizer, the state, random keys and losses, in every way to compute it."""

import dataclasses
import functools
import itertools
from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gpt2.config import OptimConfig
from gpt2.errors import UserError
from gpt2.model import GPT, GPTConfig, with_kernels
from gpt2.ops import plain
from gpt2.optim import make_optimizer, make_schedule
from gpt2.training.losses import apply_loss, evaluation_loss, next_token_loss
from gpt2.training.program import Program
from gpt2.training.state import LossScale, TrainState
from gpt2.training.steps import (
    make_eval_step,
    make_train_step,
    make_update,
)
from gpt2.training.validation import validate
from gpt2.utils.prng import dropout_key, init_key, sample_key
from gpt2.utils.scan import report
from tests.helpers import batch_of, configured, first_params, thorough
from tests.model.models import at_each_mlp
from tests.training.programs import draw_batch, make_program

CONFIG = GPTConfig(
    vocab_size=100, context_length=8, num_layers=1, num_heads=2, embed_dim=16
)
DROPOUT = dataclasses.replace(CONFIG, dropout=0.5)
OPTIM = OptimConfig(learning_rate=1e-2, warmup_steps=2)


def make_batch(seed, batch_size=8, ignored=()):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 100, (batch_size, 9), dtype=np.int32)
    batch = jax.tree.map(np.copy, batch_of(tokens))
    for row, column in ignored:
        batch["targets"][row, column:] = -1
    return batch


@functools.cache
def setup(config=CONFIG, optim=OPTIM, **options):
    model = with_kernels(GPT(config))
    schedule = make_schedule(optim, 10)
    optimizer = make_optimizer(optim, schedule, model.parameters(), num_steps=10)
    params = first_params(config)
    state = TrainState.create(params, optimizer, config.compute_dtype)
    loss = options.pop("loss", next_token_loss)(model)
    update = make_update(loss, optimizer, schedule, seed=0, **options)
    return state, jax.jit(make_train_step(update))


@pytest.mark.thorough
def test_padded_rows_change_nothing():
    padded = make_batch(0)
    padded["targets"][4:] = -1
    batch = {name: rows[:4] for name, rows in padded.items()}
    state, step = setup()
    after, metrics = step(state, batch)
    after_padded, metrics_padded = step(state, padded)
    loss = metrics_padded["train/loss"]
    np.testing.assert_allclose(loss, metrics["train/loss"], rtol=1e-6)
    chex.assert_trees_all_close(after.params, after_padded.params, atol=1e-5)


def test_first_step_is_adamw_on_the_clipped_mean_gradient():
    """One update written out after Loshchilov and Hutter 2019, algorithm 2."""
    batch = make_batch(0)
    state, step = setup()

    def mean_loss(params):
        objective, sums = next_token_loss(GPT(CONFIG))(params, batch)
        _, count = sums["loss"]
        return objective / count

    loss, grads = jax.jit(jax.value_and_grad(mean_loss))(state.params)
    before, grads = jax.device_get((state.params, grads))
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(grads)))
    assert norm > OPTIM.clip_norm  # so that clipping shows
    learning_rate = OPTIM.learning_rate / 3  # the first of two warm-up steps

    def update(path, param, grad):
        clipped = grad / norm
        direction = clipped / (np.abs(clipped) + OPTIM.eps)
        if path[-1].key in ("kernel", "embedding"):
            direction += OPTIM.weight_decay * param
        return param - learning_rate * direction

    expected = jax.tree_util.tree_map_with_path(update, before, grads)
    after, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["train/loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["train/grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["train/learning_rate"], learning_rate, rtol=1e-6)

    # Rounding decides the update where a gradient is near eps, so those are not compared.
    def clear(param, grad):
        return np.where(np.abs(grad) > 1e-6, param, 0.0)

    found = jax.tree.map(clear, after.params, grads)
    expected = jax.tree.map(clear, expected, grads)
    chex.assert_trees_all_close(found, expected, atol=1e-5)


def test_dropout_differs_by_step_and_repeats_with_it():
    state, step = setup(DROPOUT, accumulate_steps=4)
    batch = make_batch(0)
    _, first = step(state, batch)
    _, again = step(state, batch)
    _, later = step(state.replace(step=jnp.int32(1)), batch)
    assert again["train/loss"] == first["train/loss"]
    assert later["train/loss"] != first["train/loss"]


def losses_by_part(metrics_of, num_parts):
    """Return the losses of batches that repeat one row and have targets in one part only."""
    row = make_batch(0, batch_size=1)
    losses = []
    for part in np.split(np.arange(8), num_parts):
        batch = {name: np.repeat(values, 8, axis=0) for name, values in row.items()}
        ignored = np.delete(np.arange(8), part)
        batch["targets"][ignored] = -1
        losses.append(float(metrics_of(batch)["train/loss"]))
    return losses


def num_distinct(losses):
    return len(np.unique(np.round(losses, 5)))


def test_dropout_differs_by_micro_batch():
    state, step = setup(DROPOUT, accumulate_steps=4)
    losses = losses_by_part(lambda batch: step(state, batch)[1], 4)
    assert num_distinct(losses) == 4


# CONFIG and OPTIM as options.
OPTIONS = """
    model.vocab_size=100 model.context_length=8 model.num_layers=1 model.num_heads=2
    model.embed_dim=16 optim.learning_rate=1e-2 optim.warmup_steps=2 train.num_steps=10
    data.batch_size=8"""


def on_devices(options, loss=next_token_loss):
    """Return a function from a batch to the metrics of the first step, on eight devices."""
    program = Program.from_config(
        configured(f"{OPTIONS} {options}"), jax.devices(), loss=loss
    )
    step = program.backend.compile_train(program.train_step)

    def metrics_of(batch):
        state = program.init_state(first_params(CONFIG))
        _, metrics = step(state, program.backend.put_batch(batch))
        return metrics

    return metrics_of


@pytest.mark.thorough
def test_dropout_differs_by_device_and_not_by_backend():
    random = "model.dropout=0.5 model.stochastic_depth=0.5"
    by_pmap = losses_by_part(on_devices(f"parallel.backend=pmap {random}"), 8)
    by_pjit = losses_by_part(on_devices(random), 8)
    assert num_distinct(by_pmap) == 8
    np.testing.assert_allclose(by_pmap, by_pjit, rtol=1e-6)


def test_every_key_is_used_once():
    keys = []
    for seed in (0, 1):
        keys.append(init_key(seed))
        for index in itertools.product(range(4), repeat=3):
            keys.append(dropout_key(seed, *index))
        for sequence, token in itertools.product(range(4), repeat=2):
            key = jax.random.fold_in(sample_key(seed), sequence)
            keys.append(jax.random.fold_in(key, token))
    data = {jax.random.key_data(key).tobytes() for key in keys}
    assert len(data) == len(keys)


def biggest_change(new, old):
    changes = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), new, old)
    return max(jax.tree.leaves(changes))


def test_float16_skips_an_overflowing_step_halves_its_scale_and_keeps_the_schedule():
    config = dataclasses.replace(CONFIG, compute_dtype="float16")
    state, step = setup(config, dataclasses.replace(OPTIM, weight_decay=0.0))
    good, metrics = step(state, make_batch(0))
    assert jnp.isfinite(metrics["train/grad_norm"])
    assert biggest_change(good.params, state.params) > 0

    huge = state.replace(loss_scale=LossScale(jnp.float32(2.0**24), jnp.int32(5)))
    skipped, metrics = step(huge, make_batch(0))
    assert not jnp.isfinite(metrics["train/grad_norm"])
    chex.assert_trees_all_equal(skipped.params, huge.params)
    chex.assert_trees_all_equal(skipped.opt_state, huge.opt_state)
    assert skipped.loss_scale.scale == 2.0**23
    assert skipped.loss_scale.good_steps == 0
    assert skipped.step == 1
    # The schedule waits: the next step has the first learning rate, which is the size of Adam's
    # first update of a parameter with a clear gradient.
    first = skipped.replace(loss_scale=LossScale.create())
    rate = OPTIM.learning_rate / 3
    after, next_metrics = step(first, make_batch(0))
    change = biggest_change(after.params, first.params)
    assert change == pytest.approx(rate, rel=1e-3)
    assert metrics["train/learning_rate"] == pytest.approx(rate)
    assert next_metrics["train/learning_rate"] == pytest.approx(rate)
    assert after.step == 2


def test_loss_scale_doubles_after_its_interval():
    scale = LossScale(jnp.float32(4.0), jnp.int32(LossScale.GROWTH_INTERVAL - 1))
    grown = scale.update(jnp.array(True))
    assert grown.scale == 8.0
    assert grown.good_steps == 0


def test_an_array_of_a_batch_that_no_loss_reads_is_refused():
    batch = make_batch(0)
    mask = jnp.ones_like(batch["tokens"])
    with pytest.raises(UserError, match="'mask'"):
        next_token_loss(GPT(CONFIG))(None, batch | {"mask": mask})


def test_a_loss_without_the_sum_that_divides_the_gradient_is_refused():
    def logits_loss(logits, part):
        return logits.sum(), {"sum": (logits.sum(), jnp.float32(1.0))}

    model = GPT(CONFIG)
    with pytest.raises(UserError, match=r"sums \['sum'\], but no entry 'loss'"):
        apply_loss(model, first_params(CONFIG), make_batch(0), logits_loss)


def test_a_quantity_of_ones_own_loss_stays_in_validation():
    sums = {"loss": (2.0, 1.0), "perplexity": (5.0, 1.0)}
    parts = {"": (1.0, [make_batch(0)])}
    scores = validate(lambda params, batch: sums, None, parts, 1.0)
    assert scores["eval/perplexity"] == 5.0
    assert scores["eval/bits_per_byte"] == pytest.approx(2.0 / np.log(2.0))


def report_size(mlp, y, weight=0.0):
    """Report the mean square of the output of an MLP."""
    squares = jnp.sum(jnp.square(y.astype(jnp.float32)))
    report(mlp, "size", squares, y.size, weight=weight)


def size_of_mlp(model):
    """Return a loss that logs `small`, and to which every MLP adds `size`."""

    def loss(params, batch, *key_and_step):
        with at_each_mlp(report_size):
            objective, sums = next_token_loss(model)(params, batch, *key_and_step)
        small = jnp.sum(jnp.square(params["wte"]["embedding"]))
        _, count = sums["loss"]
        objective += 0.1 * count * small
        return objective, sums | {"small": (small, jnp.float32(1.0))}

    return loss


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("scan_layers", "remat"),
    [(True, "full"), (False, "none"), (False, "full")],
)
def test_what_the_loss_and_modules_add_is_a_mean_over_the_batch(scan_layers, remat):
    config = dataclasses.replace(
        CONFIG, num_layers=2, scan_layers=scan_layers, remat=remat
    )
    # Rows with very different numbers of targets: a mean of means would differ.
    batch = make_batch(0, ignored=[(0, 1), (1, 1), (2, 0), (7, 5)])
    state, step = setup(config)
    _, plain = step(state, batch)
    _, step_with_sizes = setup(config, loss=size_of_mlp)
    after, found = step_with_sizes(state, batch)
    added = {"train/small", "train/h_0/mlp/size", "train/h_1/mlp/size"}
    assert found.keys() - plain.keys() == added
    assert found["train/h_0/mlp/size"] != found["train/h_1/mlp/size"]
    small = float(jnp.sum(jnp.square(state.params["wte"]["embedding"])))
    np.testing.assert_allclose(found["train/small"], small, rtol=1e-6)
    np.testing.assert_allclose(found["train/loss"], plain["train/loss"], rtol=1e-6)
    assert abs(found["train/grad_norm"] - plain["train/grad_norm"]) > 1e-3
    _, step_of_4 = setup(config, loss=size_of_mlp, accumulate_steps=4)
    after_4, again = step_of_4(state, batch)
    chex.assert_trees_all_close(after.params, after_4.params, atol=1e-5)
    for name in found.keys() - {"train/learning_rate"}:
        np.testing.assert_allclose(again[name], found[name], rtol=1e-5, err_msg=name)


def with_auxiliary_loss(model):
    """Return cross-entropy, to which every MLP reports an auxiliary loss."""

    def loss(*arguments):
        with at_each_mlp(partial(report_size, weight=30.0)):
            return next_token_loss(model)(*arguments)

    return loss


def with_its_sum(model):
    """Return the loss of `with_auxiliary_loss` as an explicit sum, without a scan over layers."""

    def loss(*arguments):
        squares = []

        def keep(mlp, y):
            squares.append(jnp.sum(jnp.square(y.astype(jnp.float32))))

        with at_each_mlp(keep):
            objective, sums = next_token_loss(model)(*arguments)
        return objective + 30.0 * sum(squares), sums

    return loss


def test_a_module_may_not_report_what_the_loss_does():
    def intercept(next_method, args, kwargs, context):
        if context.method_name == "_final_hidden":
            report(context.module, "loss", 1.0)
        return next_method(*args, **kwargs)

    state, step = setup.__wrapped__()
    refused = pytest.raises(UserError, match="reports 'loss'")
    with nn.intercept_methods(intercept), refused:
        step(state, make_batch(0))


def weighted_loss(model, options=None):
    """Return a loss with weights from the batch, which also logs the mean over marked positions."""

    def logits_loss(logits, batch):
        targets = batch["targets"]
        losses = plain.log_sum_exp(logits) - plain.target_logits(logits, targets)
        total = jnp.sum(batch["weights"] * losses)
        count = jnp.sum(batch["weights"])
        marked = plain.masked_sum(losses, batch["marks"] - 1)
        return total, {"loss": (total, count), "marked": marked}

    def loss(params, batch, key=None, step=None):
        reads = ("weights", "marks")
        return apply_loss(model, params, batch, logits_loss, key, reads)

    return loss


def weighted_batch():
    batch = make_batch(0)
    rng = np.random.default_rng(1)
    batch["weights"] = rng.uniform(0.0, 2.0, (8, 8)).astype(np.float32)
    batch["marks"] = rng.integers(0, 2, (8, 8), dtype=np.int32)
    return batch


def test_a_batch_without_an_array_that_the_loss_reads_is_refused():
    batch = weighted_batch()
    del batch["weights"]
    state, step = setup(loss=weighted_loss)
    with pytest.raises(UserError, match=r"reads the arrays \['weights'\]"):
        step(state, batch)


@pytest.mark.parametrize(
    "layout",
    [
        thorough("parallel.data=2 parallel.fsdp=2 parallel.tensor=2"),
        "parallel.backend=pmap",
        thorough("parallel.fsdp=8 parallel.fsdp_gather=layer"),
        thorough("parallel.data=8"),
    ],
)
def test_arrays_of_ones_own_batches_reach_ones_own_loss(layout):
    batch = weighted_batch()
    state, step = setup(loss=weighted_loss)
    after, found = step(state, batch)
    # By hand: the weighted mean of the losses of all positions.
    logits = jax.jit(GPT(CONFIG).apply)({"params": state.params}, batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    mean = np.average(losses, weights=batch["weights"])
    assert abs(mean - losses.mean()) > 1e-3
    np.testing.assert_allclose(found["train/loss"], mean, rtol=1e-6)
    marked = losses[batch["marks"] == 1].mean()
    np.testing.assert_allclose(found["train/marked"], marked, rtol=1e-6)
    # Micro-batches have different sums of weights.
    _, step_of_4 = setup(loss=weighted_loss, accumulate_steps=4)
    after_4, accumulated = step_of_4(state, batch)
    chex.assert_trees_all_close(after.params, after_4.params, atol=1e-5)
    spread = on_devices(layout, loss=weighted_loss)(batch)
    for name, value in found.items():
        np.testing.assert_allclose(accumulated[name], value, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(spread[name], value, rtol=1e-5, err_msg=name)


def test_weights_that_sum_to_less_than_one_are_divided_out_like_others():
    batch = weighted_batch()
    state, step = setup(loss=weighted_loss)
    after, metrics = step(state, batch)
    small = batch | {"weights": batch["weights"] * 2.0**-10}
    after_small, metrics_small = step(state, small)
    chex.assert_trees_all_close(after_small.params, after.params, rtol=1e-6)
    chex.assert_trees_all_close(metrics_small, metrics, rtol=1e-6)


def test_validation_keeps_the_names_of_ones_own_loss_and_plain_cross_entropy():
    model = GPT(CONFIG)
    params = first_params(CONFIG)
    batch = weighted_batch()
    validate = make_eval_step(evaluation_loss(model, weighted_loss(model)))
    sums = jax.jit(validate)(params, batch)
    assert sums["loss"][1] == 64
    assert sums["marked"][1] == batch["marks"].sum()
    with pytest.raises(UserError, match=r"\['marks', 'weights'\]"):
        make_eval_step(evaluation_loss(model))(params, batch)


def test_validation_has_float32_logits_whatever_training_stores():
    losses = {}
    validations = {}
    for dtype in ("float32", "bfloat16"):
        options = f"precision.compute=bfloat16 precision.logits={dtype}"
        program = make_program(options=options)
        params = program.init_state().params
        batch = draw_batch(0)
        losses[dtype] = program.loss(params, batch)[1]["loss"][0]
        validations[dtype] = program.eval_step(params, batch)["loss"][0]
    assert abs(losses["bfloat16"] - losses["float32"]) > 1e-4
    assert validations["bfloat16"] == validations["float32"]


@pytest.mark.thorough
@pytest.mark.parametrize("scan_layers", [True, False])
def test_what_is_only_logged_gives_no_gradient(scan_layers):
    def root(mlp, y):
        zero = jnp.sum(0.0 * y)
        report(mlp, "root", jnp.sqrt(zero))  # whose gradient is infinite

    config = dataclasses.replace(CONFIG, num_layers=2, scan_layers=scan_layers)
    batch = make_batch(0)
    state, step = setup(config)
    _, expected = step(state, batch)
    _, step = setup.__wrapped__(config)
    with at_each_mlp(root):
        _, metrics = step(state, batch)
    assert metrics["train/h_1/mlp/root"] == 0
    assert metrics["train/grad_norm"] == expected["train/grad_norm"]


def test_what_a_module_reports_twice_adds_up():
    def twice(mlp, y):
        report(mlp, "size", jnp.float32(1.0))
        report(mlp, "size", jnp.float32(5.0))

    state, step = setup.__wrapped__()
    with at_each_mlp(twice):
        _, metrics = step(state, make_batch(0))
    assert metrics["train/h_0/mlp/size"] == 3


@pytest.mark.parametrize(
    ("scan_layers", "accumulate_steps"), [(True, 4), thorough(False, 1)]
)
def test_an_auxiliary_loss_of_a_module_is_in_the_gradient_and_not_in_the_loss(
    scan_layers, accumulate_steps
):
    config = dataclasses.replace(CONFIG, num_layers=2, scan_layers=scan_layers)
    batch = make_batch(0, ignored=[(0, 1), (7, 5)])
    state, step = setup(
        config, loss=with_auxiliary_loss, accumulate_steps=accumulate_steps
    )
    _, found = step(state, batch)
    unrolled = dataclasses.replace(config, scan_layers=False)
    state, step = setup(unrolled, loss=with_its_sum)
    _, explicit = step(state, batch)
    for name, value in explicit.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
