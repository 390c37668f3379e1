"""Batches: functions of (seed, step), every window once an epoch, every token once a validation."""

import collections
import multiprocessing
import time
from types import SimpleNamespace

import chex
import numpy as np
import pytest

from gpt2.config.shapes import Shape, Shapes
from gpt2.data.loading.prefetch import prefetch
from gpt2.data.loading.token_batches import (
    TokenDataset,
    ValidationLoader,
)
from gpt2.data.tokens import PreparedTokens, Split, TokenWriter
from gpt2.errors import UserError
from tests.helpers import SECONDS

EOT = 99_999


def stored(directory, train, validation=(1, 2, 3), eot=EOT):
    """Stores tokens as a prepared corpus."""
    directory.mkdir(exist_ok=True)
    splits = {"train": Split(), "validation": Split()}
    writer = TokenWriter(directory, 100_000, splits)
    writer.append("train", np.asarray(train))
    writer.append("validation", np.asarray(validation))
    writer.close()
    tokenizer = SimpleNamespace(eot=eot)
    return PreparedTokens(directory, tokenizer, splits, writer.dtype.name)


def open_batches(
    parts,
    *,
    batch_size,
    context_length,
    seed=0,
    packing="concat",
    document_mask=False,
    shapes=None,
):
    """Returns the batches of a run on prepared tokens."""
    shapes = shapes or Shapes({0: Shape(batch_size, context_length, 0)})
    config = SimpleNamespace(
        seed=seed,
        data=SimpleNamespace(packing=packing, document_mask=document_mask),
        model=SimpleNamespace(context_length=context_length),
        train=SimpleNamespace(eval_batches=0, accumulate_steps=1),
        micro_batch_size=batch_size,
        shapes=shapes,
    )
    return TokenDataset(None, parts).open(config)


def single(tokens):
    """Returns the parts of a dataset of one corpus."""
    return TokenDataset.single(tokens).parts


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """Token i of the stream is i, so that a token says where it is from. 5000 train, 101 val."""
    return stored(tmp_path_factory.mktemp("counting"), np.arange(5000), np.arange(101))


def test_an_epoch_visits_every_window_once_in_another_order_and_offset(counting):
    loader = open_batches(single(counting), batch_size=311, context_length=16, seed=0)
    assert loader.rows[""].num_rows == 311
    offsets = set()
    orders = set()
    for epoch in range(1, 7):
        starts = loader.batch(epoch)["tokens"][:, 0]
        offsets.add(int(starts.min()))
        order = (starts - starts.min()) // 16
        assert sorted(order) == [*range(311)] != [*order]
        orders.add(tuple(order))
    assert len(orders) == 6
    assert len(offsets) > 1 and max(offsets) < 16


def test_a_schedule_cuts_the_rows_of_the_same_epochs_into_other_batches(counting):
    rows = open_batches(single(counting), batch_size=1, context_length=16, seed=0)
    tokens = np.concatenate([rows.batch(step)["tokens"][0] for step in range(1, 701)])
    shapes = Shapes({0: Shape(6, 4, 0), 20: Shape(4, 8, 0), 33: Shape(8, 16, 0)})
    options = dict(batch_size=8, context_length=16, seed=0, shapes=shapes)
    loader = open_batches(single(counting), **options)
    place = 0
    for step in range(1, 101):  # beyond the first epoch, of 311 rows
        size, length = (6, 4) if step <= 20 else (4, 8) if step <= 33 else (8, 16)
        if step % 9 == 0:
            loader = open_batches(single(counting), **options)
        batch = loader.batch(step)
        cut = tokens[place : place + size * length].reshape(size, length)
        np.testing.assert_array_equal(batch["tokens"], cut)
        np.testing.assert_array_equal(batch["targets"], cut + 1)
        np.testing.assert_array_equal(
            loader.batch(step, slice(1, 3))["tokens"], cut[1:3]
        )
        place += size * length
        assert loader.epochs(step)[""] == place // 16 / 311
    assert place > 311 * 16


def read_by_processes(loader, number, batch_size, size):
    """Returns a batch of which each process reads `size` rows, joined."""
    joined = collections.defaultdict(list)
    for start in range(0, batch_size, size):
        part = loader.batch(number, slice(start, start + size))
        for name, rows in part.items():
            joined[name].extend(rows)
    return {name: np.stack(rows) for name, rows in joined.items()}


def test_processes_together_read_the_whole_batch(counting):
    loader = ValidationLoader(counting, batch_size=8, context_length=5)
    for size in (1, 2, 4):
        joined = read_by_processes(loader, 2, 8, size)
        chex.assert_trees_all_equal(joined, loader.batch(2))


def test_a_part_of_a_mixture_that_is_one_document_has_segments_too(tmp_path):
    part = stored(tmp_path, np.arange(50), [7, 8, EOT, 9])
    loader = ValidationLoader(part, batch_size=1, context_length=4, document_mask=True)
    assert loader.batch(1)["segments"].tolist() == [[0, 0, 1, 1]]


@pytest.mark.parametrize("batch_size", [1, 3, 4, 64])
@pytest.mark.parametrize("context_length", [1, 7, 10, 100, 200])
def test_validation_predicts_every_token_but_the_first_once(
    counting, batch_size, context_length
):
    loader = ValidationLoader(
        counting, batch_size=batch_size, context_length=context_length
    )
    batches = [loader.batch(i) for i in range(1, len(loader) + 1)]
    for batch in batches:
        chex.assert_shape(list(batch.values()), (batch_size, context_length))
    targets = np.concatenate([b["targets"].ravel() for b in batches])
    tokens = np.concatenate([b["tokens"].ravel() for b in batches])
    np.testing.assert_array_equal(targets[targets >= 0], np.arange(1, 101))
    np.testing.assert_array_equal(tokens[targets >= 0] + 1, targets[targets >= 0])


def test_validation_can_be_cut_short(counting):
    whole = ValidationLoader(counting, batch_size=2, context_length=10)
    short = ValidationLoader(counting, batch_size=2, context_length=10, num_batches=3)
    assert (len(whole), len(short)) == (5, 3)
    assert (whole.is_whole, short.is_whole) == (True, False)
    chex.assert_trees_all_equal(short.batch(2), whole.batch(2))
    ample = ValidationLoader(counting, batch_size=2, context_length=10, num_batches=99)
    assert (len(ample), ample.is_whole) == (5, True)


def test_segments_count_documents_within_a_row(tmp_path):
    stream = np.arange(200)
    stream[[0, 13, 14, 50]] = EOT
    dataset = stored(tmp_path, stream, stream)
    loader = ValidationLoader(
        dataset, batch_size=1, context_length=20, document_mask=True
    )
    segments = [loader.batch(i)["segments"][0].tolist() for i in (1, 2, 3)]
    # The end-of-text token opens its document.
    assert segments == [[1] * 13 + [2] + [3] * 6, [0] * 20, [0] * 10 + [1] * 10]
    train = open_batches(
        single(dataset), batch_size=4, context_length=20, seed=0, document_mask=True
    )
    chex.assert_type(list(train.batch(1).values()), np.int32)


def test_document_mask_without_documents_is_refused(tmp_path):
    dataset = stored(tmp_path, np.arange(200), eot=None)
    with pytest.raises(UserError, match=r"data\.document_mask"):
        open_batches(
            single(dataset), batch_size=1, context_length=8, seed=0, document_mask=True
        )


def test_prefetch_yields_every_step_in_order():
    batches = prefetch(10 * step for step in range(3, 20))
    assert list(batches) == [10 * step for step in range(3, 20)]
    assert list(batches) == []


def test_prefetch_works_ahead_and_no_further():
    made = []
    batches = prefetch(made.append(step) or step for step in range(100))
    assert next(batches) == 0
    deadline = time.perf_counter() + SECONDS
    while len(made) < 3 and time.perf_counter() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 3
    batches.close()
    assert list(batches) == []


def test_errors_while_prefetching_reach_the_consumer():
    def make(step):
        if step == 2:
            raise ValueError("broken record")
        return step

    batches = prefetch(map(make, range(5)))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="broken record"):
        next(batches)
    assert list(batches) == []


def test_workers_that_the_thread_forks_end_well():
    def make(step):  # as torch's DataLoader does
        worker = multiprocessing.get_context("fork").Process(target=int)
        worker.start()
        worker.join()
        return worker.exitcode

    assert list(prefetch(map(make, range(3)))) == [0, 0, 0]
