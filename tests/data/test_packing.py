"""How documents become rows: every packing, mixtures, and batches of a user's own."""

import shutil
from fractions import Fraction
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest

from gpt2.config import Config, DataConfig
from gpt2.data import prepare
from gpt2.data.loading.user_batches import BatchFunction, UserBatches, UserDataset
from gpt2.errors import UserError
from gpt2.model import GPT, GPTConfig
from gpt2.training import next_token_loss
from tests.data.test_loader import EOT, open_batches, read_by_processes, single, stored
from tests.helpers import (
    TINY,
    first_params,
    metrics_of,
    params_of,
    succeed,
    write_words,
)

T = 512
B = 8
SIZES = np.append(
    np.random.default_rng(0).geometric(1 / 200, 300) + 1, 1300
)  # of documents
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


@pytest.mark.parametrize("packing", ["concat", "bos", "pad"])
@pytest.mark.parametrize("kind", ["corpus", "mixture"])
def test_batches_follow_from_seed_and_step_on_any_number_of_processes(
    request, kind, packing
):
    parts = request.getfixturevalue(kind)
    if kind == "corpus":
        parts = single(parts)
    options = dict(batch_size=B, context_length=T, packing=packing, document_mask=True)
    loader = open_batches(parts, seed=1, **options)
    late = open_batches(parts, seed=1, **options)
    other = open_batches(parts, seed=2, **options)
    whole = {step: loader.batch(step) for step in range(1, 41)}
    assert not np.array_equal(whole[1]["tokens"], other.batch(1)["tokens"])
    chex.assert_trees_all_equal(late.batch(10**8), loader.batch(10**8))
    for step in (40, 8, 1):
        for size in (8, 4, 2):
            joined = read_by_processes(late, step, B, size)
            chex.assert_trees_all_equal(joined, whole[step])


def test_bos_begins_rows_with_documents_and_keeps_each_in_one(corpus):
    loader = open_batches(
        single(corpus), seed=0, batch_size=B, context_length=T, packing="bos"
    )
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
        assert source.note == f"{cropped:.1%} cropped"
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_pad_gives_each_token_once_in_rows_of_one_document(corpus):
    loader = open_batches(
        single(corpus), seed=0, batch_size=1, context_length=T, packing="pad"
    )
    steps = loader.rows[""].num_rows
    orders = []
    tokens = np.arange(SIZES.sum())
    tokens[STARTS] = EOT
    for epoch in range(2):
        batches = [loader.batch(epoch * steps + step) for step in range(1, steps + 1)]
        targets = np.concatenate([batch["targets"].ravel() for batch in batches])
        np.testing.assert_array_equal(
            np.sort(targets[targets >= 0]), np.sort(tokens[1:])
        )
        assert not any(np.any(batch["tokens"][:, 1:] == EOT) for batch in batches)
        assert loader.rows[""].note == f"{np.mean(targets < 0):.1%} padded"
        orders.append([batch["tokens"][0, 1] for batch in batches])
    assert orders[0] != orders[1]


def test_a_mixture_keeps_to_its_weights_and_each_part_visits_its_rows_once(mixture):
    loader = open_batches(mixture, seed=0, batch_size=10, context_length=64)
    batches = [loader.batch(step) for step in range(1, 101)]
    starts = np.concatenate([batch["tokens"][:, 5] for batch in batches])
    is_short = (starts >= 70_000) & (starts < 90_000)
    is_long = starts < 70_000
    for count in (10, 30, 500, 1000):
        num_short = is_short[:count].sum()
        # About 1 % of these tokens are end-of-text, which tells no part.
        assert abs(num_short - 0.29 * count) <= 0.02 * count + 1
    assert len(np.unique(starts[is_long])) == is_long.sum()
    assert len(np.unique(starts[is_short])) == is_short.sum()
    rows = {name: source.num_rows for name, source in loader.rows.items()}
    assert loader.epochs(100) == {
        "long": 700 / rows["long"],
        "short": 300 / rows["short"],
    }


def test_a_padded_mixture_trains_with_one_tokenizer_and_is_validated_by_part(tmp_path):
    one, two = (write_words(tmp_path / str(words), 40, words) for words in (20, 80))
    data = dict(tokenizer="byte", val_fraction=0.1, data_dir=str(tmp_path / "data"))
    data |= dict(corpus=f"0.5*text:{one}+1.5*text:{two}", packing="pad")
    options = [f"--config.data.{name}={value}" for name, value in data.items()]
    options = [*TINY, *options, "--config.model.context_length=64"]
    assert "% padded" in succeed(tmp_path / "run", *options)
    last = metrics_of(tmp_path / "run")[-1]
    losses = np.array([last[f"eval/loss_text:{part}"] for part in (one, two)])
    assert last["eval/loss"] == pytest.approx(losses @ [0.25, 0.75])
    dataset = prepare(DataConfig(**data))
    (_, first), (_, second) = dataset.parts.values()
    assert first.describe()["tokenizer_sha256"] == second.describe()["tokenizer_sha256"]
    bytes_per_target = (
        [part.bytes_per_target for part in (first, second)] @ np.array([1, 3]) / 4
    )
    bits = last["eval/loss"] / np.log(2) / bytes_per_target
    assert last["eval/bits_per_byte"] == pytest.approx(bits)
    lacks, unweighed = (
        dict(corpus=f"1*text:{one}+{n}") for n in ("1*text:/no", "0*synthetic")
    )
    made = dict(tokenizer="bpe:300"), "is trained on one corpus of text"
    for change, message in (
        (lacks, "no file"),
        (unweighed, "with a weight of 0"),
        made,
    ):
        with pytest.raises(UserError, match=message):
            prepare(DataConfig(**data | change))


@pytest.fixture(scope="module")
def model():
    """Short documents, a model and its parameters."""
    cfg = GPTConfig(
        vocab_size=64, context_length=32, num_layers=2, num_heads=2, embed_dim=16
    )
    draw = np.random.default_rng(1)
    documents = [
        np.append(63, draw.integers(0, 63, draw.integers(3, 30))) for _ in range(24)
    ]
    return documents, GPT(cfg), jax.tree.map(lambda x: 5 * x, first_params(cfg))


def test_the_loss_of_padded_rows_is_the_mean_over_documents(model, tmp_path):
    documents, gpt, params = model
    dataset = stored(tmp_path / "documents", np.concatenate(documents), eot=63)
    loader = open_batches(
        single(dataset), seed=0, batch_size=1, context_length=32, packing="pad"
    )
    steps = loader.rows[""].num_rows
    loss = jax.jit(next_token_loss(gpt))
    sums = [loss(params, loader.batch(step))[1]["loss"] for step in range(1, steps + 1)]
    apply = jax.jit(
        lambda text: jax.nn.log_softmax(gpt.apply({"params": params}, text))
    )
    alone = []
    for document, after in zip(documents, [*documents[1:], []], strict=True):
        text = np.append(document, after[:1]).astype(np.int32)
        length = len(text) - 1
        row = np.pad(text[:-1], (0, 32 - length))[None]
        alone += list(-apply(row)[0, np.arange(length), text[1:]])
    assert sum(count for _, count in sums) == len(alone) < 32 * steps
    found = sum(total for total, _ in sums) / len(alone)
    np.testing.assert_allclose(found, np.mean(alone), rtol=1e-5)


@pytest.mark.parametrize("mask", [True, False])
def test_a_document_changes_no_other_under_bos_and_document_mask(model, tmp_path, mask):
    documents, gpt, params = model
    changed = [*documents]
    changed[18] = np.append(
        63, 62 - documents[18][1:]
    )  # two others follow it in its row
    options = dict(batch_size=12, context_length=32, packing="bos", document_mask=mask)
    batches = []
    logits = []
    for name, texts in (("one", documents), ("other", changed)):
        dataset = stored(tmp_path / name, np.concatenate(texts), eot=63)
        loader = open_batches(single(dataset), seed=0, **options)
        batch = loader.batch(1)
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


class Stateful:
    """Ten batches, with the state of torchdata's StatefulDataLoader."""

    def __init__(self):
        self._count = 0

    def __iter__(self):
        while self._count < 10:
            self._count += 1
            tokens = np.full((4, 16), self._count)
            yield {
                "tokens": tokens,
                "targets": tokens,
                "mask": np.arange(16) > 8 - tokens,
            }

    def state_dict(self):
        return {"count": self._count}

    def load_state_dict(self, state):
        self._count = state["count"]


ALL = slice(0, 4)
HALF = slice(0, 2)


def own_batches(given, seed=0, accumulate_steps=1):
    """Batches of a user's, of 4 rows of 16 tokens below 64, or the batches of a function."""
    function = given if callable(given) else lambda split: given
    config = SimpleNamespace(
        seed=seed,
        model=SimpleNamespace(context_length=16, vocab_size=64),
        train=SimpleNamespace(eval_batches=0, accumulate_steps=accumulate_steps),
    )
    return UserBatches("python:a:b", function, config)


def validation_of(own, rows=ALL):
    """The micro-batches of a validation."""
    validation, targets_per_byte = own.validation(rows)
    assert targets_per_byte is None
    _, batches = validation[""]
    return batches


def test_own_batches_go_on_from_their_state_and_begin_anew_at_their_end():
    own = own_batches(lambda split: Stateful())
    again = own_batches(lambda split: Stateful())
    batches = [own.batch(step, ALL) for step in range(1, 13)]
    assert [batch["tokens"][0, 0] for batch in batches] == [*range(1, 11), 1, 2]
    assert [batch["targets"][0, 5] for batch in batches[:5]] == [-1, -1, -1, 4, 5]
    again.restore(own.position(6))
    chex.assert_trees_all_equal(again.batch(7, ALL), batches[6])
    with pytest.raises(UserError, match="a second time"):
        own.batch(3, ALL)


ROWS = np.arange(64).reshape(4, 16)
WRONG = {
    "no dict": ([ROWS, ROWS], "returns a list as a batch. Return dicts"),
    "rows are missing": ({"tokens": ROWS[:2], "targets": ROWS[:2]}, r"shape \(2, 16\)"),
    "targets lack rows": ({"targets": ROWS[:2]}, r"targets of shape \(2, 16\)"),
    "beyond the model": ({"tokens": ROWS + 1}, "tokens .* numbers from 0 to 63"),
    "floats": ({"tokens": ROWS + 0.3}, "tokens .* whole numbers"),
    "strings": ({"tokens": ROWS.astype(str)}, "tokens .* whole numbers"),
    "a masked array": (
        {"targets": np.ma.array(ROWS, mask=ROWS < 20)},
        "targets .* other values than whole numbers",
    ),
    "another target": ({"targets": ROWS - 2}, "targets .* numbers from -1 to 63"),
    "a mask of NaN": (
        {"mask": np.full((4, 16), np.nan)},
        "mask .* numbers from 0 to 1",
    ),
    "all are masked": ({"mask": np.zeros((4, 16), bool)}, "nothing to predict"),
    "PyTorch's ignored": ({"targets": np.full((4, 16), -100)}, "nothing to predict"),
    "another length": ({"weights": ROWS[:, 1:]}, r"weights of shape \(4, 15\), not"),
    "another's strings": ({"weights": ROWS.astype(str)}, "weights of <U.* floats or"),
    "too large for int32": ({"ids": ROWS + 2**31}, "ids of int64 with other values"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_own_batches_that_cannot_be_meant_are_refused(change, message):
    batch = change
    if isinstance(change, dict):
        batch = {"tokens": ROWS, "targets": ROWS} | change
    for split in ("train", "validation"):
        own = own_batches([batch])
        if split == "validation" and message == r"shape \(2, 16\)":
            continue  # a short last batch
        with pytest.raises(UserError, match=message):
            if split == "train":
                own.batch(1, ALL)
            else:
                next(validation_of(own))


def test_own_batches_of_every_kind_of_number_are_taken_as_they_are():
    mask = ROWS > 20
    for kind in (np.uint8, np.int64, np.uint64, np.float32):
        for mask_kind in (bool, np.float16, np.int8):
            batch = {"tokens": ROWS.astype(kind), "targets": ROWS.astype(kind)}
            batch["mask"] = mask.astype(mask_kind)
            found = own_batches([batch]).batch(1, ALL)
            np.testing.assert_array_equal(found["tokens"], ROWS)
            np.testing.assert_array_equal(found["targets"], np.where(mask, ROWS, -1))
            assert {array.dtype for array in found.values()} == {np.dtype("int32")}
    batch = {"tokens": ROWS.tolist(), "targets": np.where(mask, ROWS, -100)}
    found = own_batches([batch]).batch(1, ALL)
    np.testing.assert_array_equal(found["targets"], np.where(mask, ROWS, -1))


def test_other_arrays_of_ones_own_pass_unchanged_and_are_in_every_batch():
    weights = np.linspace(-1, 1, 64, dtype=np.float64).reshape(4, 16)
    batch = {"tokens": ROWS, "targets": ROWS, "weights": weights, "source": ROWS - 9}
    own = own_batches([batch, batch, {"tokens": ROWS, "targets": ROWS}])
    for arrays in (own.batch(1, ALL), next(validation_of(own))):
        np.testing.assert_array_equal(arrays["weights"], weights.astype(np.float32))
        np.testing.assert_array_equal(arrays["source"], ROWS - 9)
        assert arrays["weights"].dtype == np.float32
        assert arrays["source"].dtype == np.int32
    own.batch(2, ALL)
    with pytest.raises(UserError, match="a batch without source, weights"):
        own.batch(3, ALL)


def test_a_batch_that_lacks_an_array_is_refused_by_the_name_of_the_array():
    for given, lacking in (("tokens", "targets"), ("targets", "tokens")):
        with pytest.raises(UserError, match=f"returns a batch without {lacking}"):
            own_batches([{given: ROWS}]).batch(1, ALL)


def test_short_last_batches_of_ones_own_are_filled_with_nothing_to_predict():
    whole = {"tokens": ROWS, "targets": ROWS}
    short = {"tokens": ROWS[:3], "targets": ROWS[:3]}
    own = own_batches([whole, short], accumulate_steps=2)
    filled = np.concatenate([ROWS[:3], np.full((1, 16), -1)])
    np.testing.assert_array_equal(own.batch(1, ALL)["targets"], ROWS)
    np.testing.assert_array_equal(own.batch(2, ALL)["targets"], filled)
    held_out = np.concatenate([batch["targets"] for batch in validation_of(own, HALF)])
    np.testing.assert_array_equal(held_out, np.concatenate([ROWS, filled]))


def test_a_function_that_gives_no_batches_is_refused():
    none = own_batches([])
    with pytest.raises(UserError, match="no batches for split=train"):
        none.batch(1, ALL)
    with pytest.raises(UserError, match="no batches for split=validation"):
        next(validation_of(none))


def test_options_that_batches_of_ones_own_would_ignore_are_refused():
    dataset = UserDataset(None, BatchFunction("python:a:b", lambda split: []))
    for options in ({"packing": "pad"}, {"document_mask": True}):
        config = Config.from_dict({"data": options})
        with pytest.raises(UserError, match=r"data\.document_mask and data\.packing"):
            dataset.open(config)


def test_batches_that_keep_no_place_begin_anew_and_say_so(capsys):
    batch = {"tokens": ROWS, "targets": ROWS}
    for first in (1, 7):
        own_batches([batch]).batch(first, ALL)
        is_reported = "step 7 reads its first" in capsys.readouterr().err
        assert is_reported == (first == 7)


def test_a_function_of_a_seed_is_given_that_of_the_run():
    def batches(split, seed):
        return [{"tokens": np.full((4, 16), seed), "targets": ROWS}]

    for seed in (3, 5):
        own = own_batches(batches, seed)
        assert own.batch(1, ALL)["tokens"][0, 0] == seed


GRAIN = """
import grain, numpy as np

def batches(split):
    draw = np.random.default_rng(split == "train")
    rows = [dict(tokens=t[:-1], targets=t[1:]) for t in draw.integers(0, 255, (40, 17))]
    data = grain.MapDataset.source(rows)
    data = data.shuffle(seed=3).repeat() if split == "train" else data
    return data.batch(4).to_iter_dataset()
"""


def test_a_run_on_a_grain_iterator_goes_on_where_it_was(tmp_path):
    (tmp_path / "own_grain.py").write_text(GRAIN)
    options = [*TINY, "--config.data.corpus=python:own_grain:batches"]
    options += ["--config.train.keep_checkpoints=9"]
    succeed(tmp_path / "whole", *options, cwd=tmp_path)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "samples.txt").unlink()
    for step in (6, 8):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / str(step))
    succeed(tmp_path / "cut", *options, cwd=tmp_path)
    chex.assert_trees_all_equal(
        *(params_of(tmp_path / name) for name in ("whole", "cut"))
    )
