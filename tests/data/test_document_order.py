"""`data.shuffle_documents`: each epoch joins or packs the documents in another order."""

import collections

import numpy as np
import pytest

from gpt2.data.loading import packing
from gpt2.data.loading.document_order import ShuffledDocuments
from gpt2.data.loading.packing import find_documents
from gpt2.errors import UserError
from tests.data.batches import EOT, open_batches, single, stored
from tests.helpers import documents_of, write_rows

T = 64
B = 8
AHEAD = 10  # documents from which `bos` chooses
SEED = 3
# Lengths of documents. Some are longer than a row, and some are an end-of-text token alone.
SIZES = np.append(
    np.random.default_rng(0).geometric(1 / 25, 400), [1, 1, T, T + 1, 300]
)


@pytest.fixture(scope="module")
def documents():
    """Documents in which every token except the first occurs once in the corpus."""
    tokens = np.arange(SIZES.sum())
    starts = np.cumsum(SIZES) - SIZES
    tokens[starts] = EOT
    return np.split(tokens, starts[1:])


@pytest.fixture(scope="module")
def corpus(documents, tmp_path_factory):
    """The documents in four files, whose ends are within documents."""
    folder = tmp_path_factory.mktemp("corpus") / "one"
    return stored(folder, np.concatenate(documents), num_files=4)


def rows_by_epoch(loader, num_epochs):
    """Return the rows of each epoch as tuples, read in batches that span two epochs."""
    num_rows = loader.rows[""].num_rows
    assert num_rows % B
    rows = []
    for step in range(1, num_epochs * num_rows // B + 2):
        batch = loader.batch(step)
        for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True):
            num_targets = np.sum(targets >= 0)
            rows.append((*tokens[:1], *targets[:num_targets]))
    return [rows[epoch * num_rows :][:num_rows] for epoch in range(num_epochs)]


def test_concat_cuts_the_documents_of_each_epoch_in_another_order(corpus, documents):
    options = dict(batch_size=B, context_length=T, seed=SEED)
    loader = open_batches(single(corpus), shuffle_documents=True, **options)
    (usual,) = rows_by_epoch(open_batches(single(corpus), **options), 1)
    epochs = rows_by_epoch(loader, 4)
    assert sorted(epochs[0]) != sorted(usual)
    for epoch, rows in enumerate(epochs):
        draw = np.random.default_rng((SEED, epoch))
        offset = draw.integers(T)
        order = draw.permutation(len(documents))
        text = np.concatenate([documents[number] for number in order])[offset:]
        windows = []
        for start in range(0, T * loader.rows[""].num_rows, T):
            windows.append(tuple(text[start : start + T + 1]))
        assert sorted(rows) == sorted(windows)
        assert rows != windows


def best_fit(documents, room):
    """Pack `(size, number, tokens)` into rows, by the rule of `bos`."""
    rows = [tokens[:room] for size, _, tokens in documents if size >= room]
    upcoming = [document for document in documents if document[0] < room]
    waiting = upcoming[:AHEAD]
    upcoming = upcoming[AHEAD:]
    row = []
    while waiting:
        free = room - len(row)
        fitting = [document for document in waiting if document[0] <= free]
        document = max(fitting) if fitting else min(waiting)
        waiting.remove(document)
        row.extend(document[2][:free])
        waiting += upcoming[:1]
        upcoming = upcoming[1:]
        if len(row) == room:
            rows.append(tuple(row))
            row = []
    return [*rows, tuple(row)] if row else rows


def test_bos_packs_the_documents_of_each_epoch_in_another_order(
    corpus, documents, monkeypatch
):
    monkeypatch.setattr(packing, "AHEAD", AHEAD)
    options = dict(batch_size=B, context_length=T, seed=SEED, packing="bos")
    (usual,) = rows_by_epoch(open_batches(single(corpus), **options), 1)
    loader = open_batches(single(corpus), shuffle_documents=True, **options)
    epochs = rows_by_epoch(loader, 6)
    assert epochs[0] == usual
    differences = set()
    for epoch, rows in enumerate(epochs):
        order = np.random.default_rng((SEED, epoch)).permutation(len(documents))
        shuffled = []
        for number, document in enumerate(order):
            tokens = tuple(documents[document])
            shuffled.append((len(tokens), number, tokens))
        packed = best_fit(shuffled, T + 1)
        differences.add(np.sign(len(packed) - len(rows)))
        repeated = [packed[row % len(packed)] for row in range(len(rows))]
        assert collections.Counter(rows) == collections.Counter(repeated)
    # The reference packs some epochs into more rows than the first epoch, and some into fewer.
    assert differences == {-1, 0, 1}


def test_documents_that_are_not_ascii_stay_whole(tmp_path, make):
    words = ["naïve", "測試", "Привет", "👩‍🚀", "line\nline"]
    texts = [" ".join(np.roll(words, n)) + f" {n}" for n in range(80)]
    write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    tokens = make(f"jsonl:{tmp_path}/texts.jsonl")
    usual = documents_of(tokens, "train")
    stream, starts = find_documents(tokens, "")
    orders = set()
    for epoch in range(3):
        draw = np.random.default_rng((SEED, epoch))
        joined = ShuffledDocuments(stream, starts, draw).read(0, len(stream) + 1)
        pieces = np.split(joined, np.flatnonzero(joined == tokens.tokenizer.eot))
        decoded = [tokens.tokenizer.decode(piece[1:]) for piece in pieces[1:]]
        assert sorted(decoded) == sorted(usual)
        orders.add(tuple(decoded))
    assert len(orders) == 3
    assert tuple(usual) not in orders


@pytest.mark.parametrize("eot", [EOT, None])
def test_a_text_without_documents_is_refused(tmp_path, eot):
    parts = single(stored(tmp_path, np.arange(999), eot=eot))
    with pytest.raises(UserError, match=r"shuffle_documents=True needs several doc"):
        open_batches(parts, batch_size=1, context_length=8, shuffle_documents=True)
