"""How documents become rows: every packing, and mixtures."""

import dataclasses
from fractions import Fraction
from functools import partial

import chex
import jax
import numpy as np
import pytest

from gpt2.config import DataConfig
from gpt2.data import prepare_dataset
from gpt2.errors import UserError
from gpt2.model import GPT, GPTConfig
from gpt2.training import next_token_loss
from tests.data.batches import EOT, join_processes, open_batches, single, stored
from tests.helpers import TINY, first_params, metrics_of, succeed, write_words

T = 512
B = 8
# Of documents.
SIZES = np.append(np.random.default_rng(0).geometric(1 / 200, 300) + 1, 1300)
STARTS = np.cumsum(SIZES) - SIZES


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Each token is its place in the stream, but for the first of each document."""
    tokens = np.arange(SIZES.sum())
    tokens[STARTS] = EOT
    return stored(tmp_path_factory.mktemp("corpus") / "one", tokens)


@pytest.fixture(scope="module")
def mixture(corpus, tmp_path_factory):
    tokens = np.arange(70_000, 90_000)
    tokens[::90] = EOT
    other = stored(tmp_path_factory.mktemp("corpus") / "other", tokens)
    return {"long": (Fraction(7, 10), corpus), "short": (Fraction(3, 10), other)}


@pytest.mark.parametrize(
    ("packing", "shuffles"),
    [
        ("concat", False),
        ("concat", True),
        ("bos", False),
        ("bos", True),
        ("pad", False),
    ],
)
@pytest.mark.parametrize("kind", ["corpus", "mixture"])
def test_batches_follow_from_seed_and_step_on_any_number_of_processes(
    request, kind, packing, shuffles
):
    parts = request.getfixturevalue(kind)
    if kind == "corpus":
        parts = single(parts)
    options = dict(batch_size=B, context_length=T, packing=packing, document_mask=True)
    options["shuffle_documents"] = shuffles
    loader = open_batches(parts, seed=1, **options)
    late = open_batches(parts, seed=1, **options)
    other = open_batches(parts, seed=2, **options)
    whole = {step: loader.batch(step) for step in range(1, 41)}
    assert not np.array_equal(whole[1]["tokens"], other.batch(1)["tokens"])
    chex.assert_trees_all_equal(late.batch(10**8), loader.batch(10**8))
    for step in (40, 8, 1):
        for size in (8, 4, 2):
            joined = join_processes(partial(late.batch, step), B, size)
            chex.assert_trees_all_equal(joined, whole[step])


def test_concat_says_how_much_of_a_small_text_an_epoch_leaves_out(corpus):
    size = SIZES.sum()
    for length, is_much in ((size // 4, True), (size // 1000, False)):
        windows = dict(batch_size=1, context_length=int(length), packing="concat")
        rows = open_batches(single(corpus), **windows).rows[""]
        left_out = 1 - rows.num_rows * length / size
        assert (left_out > 0.01) == is_much
        assert rows.note == (
            f"each epoch has only whole windows, and leaves out {left_out:.1%} of the text, a"
            " different part each time"
            if is_much
            else ""
        )


def test_bos_begins_rows_with_documents_and_keeps_each_in_one(corpus):
    loader = open_batches(single(corpus), batch_size=B, context_length=T, packing="bos")
    source = loader.rows[""]
    orders = []
    for epoch in range(2):
        numbers = range(epoch * source.num_rows, (epoch + 1) * source.num_rows)
        rows = list(map(source.read, numbers))
        orders.append([int(row[1]) for row in rows])
        num_full = sum(len(row) == T + 1 for row in rows)
        assert num_full >= source.num_rows - 1
        for row in rows:
            starts = np.flatnonzero(row == EOT)
            assert starts[0] == 0
            documents = np.split(row, starts)[1:]
            for document in documents:
                np.testing.assert_array_equal(np.diff(document[1:]), 1)
            for document in documents[:-1]:  # the last one may be cropped
                assert len(document) == SIZES[document[1] - 1 == STARTS]
        tokens = np.concatenate(rows)
        assert np.sum(tokens == EOT) == len(SIZES)
        assert len(np.unique(tokens)) == len(tokens) - len(SIZES) + 1
        cropped = 1 - len(tokens) / SIZES.sum()
        assert 0.05 < cropped < 0.2
        assert source.note == f"{cropped:.1%} of the tokens cropped"
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_pad_gives_each_token_once_in_rows_of_one_document(corpus):
    loader = open_batches(single(corpus), batch_size=1, context_length=T, packing="pad")
    num_steps = loader.rows[""].num_rows
    orders = []
    tokens = np.arange(SIZES.sum())
    tokens[STARTS] = EOT
    for epoch in range(2):
        targets = []
        order = []
        for step in range(1, num_steps + 1):
            batch = loader.batch(epoch * num_steps + step)
            targets.append(batch["targets"][0])
            order.append(batch["tokens"][0, 1])
            assert not np.any(batch["tokens"][:, 1:] == EOT)
        orders.append(order)
        targets = np.sort(np.concatenate(targets))
        padded = np.mean(targets < 0)
        assert loader.rows[""].note == f"{padded:.1%} of the positions padded"
        np.testing.assert_array_equal(targets[targets >= 0], np.sort(tokens[1:]))
    assert orders[0] != orders[1]


def test_a_mixture_keeps_to_its_weights_and_each_part_visits_its_rows_once(mixture):
    loader = open_batches(mixture, batch_size=10, context_length=64)
    starts = []
    for step in range(1, 101):
        starts.extend(loader.batch(step)["tokens"][:, 5])
    starts = np.array(starts)
    is_short = (starts >= 70_000) & (starts < 90_000)
    for count in (10, 30, 500, 1000):
        num_short = is_short[:count].sum()
        # About 1 % of these tokens are end-of-text, which tells no part.
        assert abs(num_short - 0.29 * count) <= 0.02 * count + 1
    for chosen in (starts[is_short], starts[starts < 70_000]):
        assert len(np.unique(chosen)) == len(chosen)
    epochs = loader.epochs(100)
    assert epochs["long"] == 700 / loader.rows["long"].num_rows
    assert epochs["short"] == 300 / loader.rows["short"].num_rows


@pytest.fixture
def two_texts(tmp_path):
    """The options of a padded mixture of two texts, and their names in it."""
    names = []
    for words in (20, 80):
        names.append(f"text:{write_words(tmp_path / str(words), 40, words)}")
    return names, DataConfig(
        corpus=f"0.5*{names[0]}+1.5*{names[1]}",
        tokenizer="byte",
        val_fraction=0.1,
        packing="pad",
        data_dir=str(tmp_path / "data"),
    )


@pytest.mark.thorough
def test_a_padded_mixture_trains_and_is_validated_by_part(tmp_path, two_texts):
    names, data = two_texts
    options = [*TINY, "--config.model.context_length=64"]
    options.append("--config.train.eval_batches=0")
    for name in ("corpus", "tokenizer", "val_fraction", "packing", "data_dir"):
        options.append(f"--config.data.{name}={getattr(data, name)}")
    assert "% of the positions padded" in succeed(tmp_path / "run", *options)
    last = metrics_of(tmp_path / "run")[-1]
    loss = 0.25 * last[f"eval/loss_{names[0]}"] + 0.75 * last[f"eval/loss_{names[1]}"]
    assert last["eval/loss"] == pytest.approx(loss)
    bytes_per_target = 0
    for weight, part in prepare_dataset(data).parts.values():
        bytes_per_target += weight * part.bytes_per_target
    bits = last["eval/loss"] / np.log(2) / bytes_per_target
    assert last["eval/bits_per_byte"] == pytest.approx(bits)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("corpus", "1*synthetic+1*text:/no", "no file matches '/no'"),
        ("corpus", "1*synthetic+0*pystdlib", "pystdlib twice, or with a weight of 0"),
        ("corpus", "1*synthetic+2*synthetic", "synthetic twice"),
        ("tokenizer", "bpe:300", "must be trained on one corpus of text"),
        ("tokenizer", "char", "must be trained on one corpus of text"),
        ("end_of_text", "[END]", "has no effect with data.tokenizer="),
    ],
)
def test_mixtures_that_cannot_be_are_refused(two_texts, option, value, message):
    _, data = two_texts
    with pytest.raises(UserError, match=message):
        prepare_dataset(dataclasses.replace(data, **{option: value}))


def test_a_single_text_is_cut_into_rows_but_no_row_begins_with_it(tmp_path):
    text = stored(tmp_path / "text", np.arange(1, 9000))
    options = dict(batch_size=B, context_length=T)
    open_batches(single(text), packing="pad", **options)
    with pytest.raises(UserError, match="packing=bos needs several documents"):
        open_batches(single(text), packing="bos", **options)


@pytest.fixture(scope="module")
def model():
    """Short documents, a model and its parameters."""
    cfg = GPTConfig(
        vocab_size=64, context_length=32, num_layers=2, num_heads=2, embed_dim=16
    )
    draw = np.random.default_rng(1)
    documents = []
    for _ in range(24):
        text = draw.integers(0, 63, draw.integers(3, 30))
        documents.append(np.append(63, text))
    params = jax.tree.map(lambda x: 5 * x, first_params(cfg))
    return documents, GPT(cfg), params


def test_the_loss_of_padded_rows_is_the_mean_over_documents(model, tmp_path):
    documents, gpt, params = model
    dataset = stored(tmp_path / "documents", np.concatenate(documents), eot=63)
    loader = open_batches(
        single(dataset), batch_size=1, context_length=32, packing="pad"
    )
    num_steps = loader.rows[""].num_rows
    loss = jax.jit(next_token_loss(gpt))
    total = 0.0
    count = 0
    for step in range(1, num_steps + 1):
        _, sums = loss(params, loader.batch(step))
        total += sums["loss"][0]
        count += sums["loss"][1]

    @jax.jit
    def log_probs(text):
        return jax.nn.log_softmax(gpt.apply({"params": params}, text))

    alone = []
    for document, after in zip(documents, [*documents[1:], []], strict=True):
        text = np.append(document, after[:1]).astype(np.int32)
        length = len(text) - 1
        row = np.pad(text[:-1], (0, 32 - length))[None]
        alone.extend(-np.asarray(log_probs(row))[0, np.arange(length), text[1:]])
    assert count == len(alone)
    assert count < 32 * num_steps
    np.testing.assert_allclose(total / count, np.mean(alone), rtol=1e-5)


@pytest.mark.parametrize("mask", [True, False])
def test_a_document_changes_no_other_under_bos_and_document_mask(model, tmp_path, mask):
    documents, gpt, params = model
    changed = [*documents]
    # Two others follow it in its row.
    changed[18] = np.append(63, 62 - documents[18][1:])
    options = dict(batch_size=12, context_length=32, packing="bos", document_mask=mask)
    batches = []
    logits = []
    for name, texts in (("one", documents), ("other", changed)):
        dataset = stored(tmp_path / name, np.concatenate(texts), eot=63)
        batch = open_batches(single(dataset), **options).batch(1)
        batches.append(batch)
        segments = batch.get("segments")
        logits.append(gpt.apply({"params": params}, batch["tokens"], segments=segments))
    moved = np.abs(logits[0] - logits[1]).max(axis=-1)
    number = np.cumsum(batches[0]["tokens"] == 63, axis=1)
    is_changed = batches[0]["tokens"] != batches[1]["tokens"]
    changed_number = np.where(is_changed, number, 0).max(axis=1)
    is_other = number != changed_number[:, None]
    assert moved[~is_other].max() > 1e-2
    is_isolated = moved[is_other].max() == 0
    assert is_isolated == mask
