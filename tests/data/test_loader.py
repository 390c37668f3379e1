"""Batches: functions of (seed, step), every window once an epoch, every token once a validation."""

import multiprocessing
import time

import chex
import jax
import numpy as np
import pytest

from gpt2.config.shapes import ShapeSchedule, StepShape
from gpt2.data.loading.prefetch import prefetch
from gpt2.data.loading.token_batches import ValidationLoader
from gpt2.errors import UserError
from tests.data.batches import EOT, join_processes, open_batches, single, stored
from tests.helpers import SECONDS


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """Token i of the stream is i, so that a token says where it is from. 5000 train, 101 val."""
    return stored(tmp_path_factory.mktemp("counting"), np.arange(5000), np.arange(101))


def test_an_epoch_visits_every_window_once_in_another_order_and_offset(counting):
    loader = open_batches(single(counting), batch_size=311, context_length=16)
    assert loader.rows[""].num_rows == 311
    offsets = set()
    orders = set()
    for epoch in range(1, 7):
        starts = loader.batch(epoch)["tokens"][:, 0]
        offsets.add(int(starts.min()))
        order = (starts - starts.min()) // 16
        assert sorted(order) == [*range(311)]
        orders.add(tuple(order))
    assert len(orders) == 6
    assert tuple(range(311)) not in orders
    assert len(offsets) > 1
    assert max(offsets) < 16


def test_a_schedule_cuts_the_rows_of_the_same_epochs_into_other_batches(counting):
    rows = open_batches(single(counting), batch_size=1, context_length=16)
    tokens = np.concatenate([rows.batch(step)["tokens"][0] for step in range(1, 701)])
    shapes = ShapeSchedule(
        {0: StepShape(6, 4, 0), 20: StepShape(4, 8, 0), 33: StepShape(8, 16, 0)}
    )
    options = dict(batch_size=8, context_length=16, shapes=shapes)
    loader = open_batches(single(counting), **options)
    position = 0
    for step in range(1, 101):  # beyond the first epoch, of 311 rows
        if step % 9 == 0:
            loader = open_batches(single(counting), **options)
        size, length, _ = shapes.at(step)
        batch = loader.batch(step)
        cut = tokens[position : position + size * length].reshape(size, length)
        np.testing.assert_array_equal(batch["tokens"], cut)
        np.testing.assert_array_equal(batch["targets"], cut + 1)
        part = loader.batch(step, slice(1, 3))
        np.testing.assert_array_equal(part["tokens"], cut[1:3])
        position += size * length
        assert loader.epochs(step)[""] == position // 16 / 311
    assert position > 311 * 16


def test_processes_together_validate_the_whole_batch(counting):
    loader = ValidationLoader(counting, batch_size=8, context_length=5)
    (_, whole, _) = loader.batches()

    def read(rows):
        (_, batch, _) = loader.batches(rows)
        return batch

    for size in (1, 2, 4):
        chex.assert_trees_all_equal(join_processes(read, 8, size), whole)


def test_a_part_of_a_mixture_that_is_one_document_has_segments_too(tmp_path):
    part = stored(tmp_path, np.arange(50), [7, 8, EOT, 9])
    loader = ValidationLoader(part, batch_size=1, context_length=4, document_mask=True)
    (batch,) = loader.batches()
    assert batch["segments"].tolist() == [[0, 0, 1, 1]]


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("context_length", [1, 7, 10, 200])
def test_validation_predicts_every_token_but_the_first_once(
    counting, batch_size, context_length
):
    loader = ValidationLoader(
        counting, batch_size=batch_size, context_length=context_length
    )
    targets = []
    for batch in loader.batches():
        chex.assert_shape(list(batch.values()), (batch_size, context_length))
        is_real = batch["targets"] >= 0
        targets.extend(batch["targets"][is_real])
        after = batch["tokens"][is_real] + 1
        np.testing.assert_array_equal(after, batch["targets"][is_real])
    np.testing.assert_array_equal(targets, np.arange(1, 101))


@pytest.mark.parametrize(("limit", "number"), [(0, 5), (3, 3), (99, 5)])
def test_validation_can_be_cut_short(counting, limit, number):
    whole = ValidationLoader(counting, batch_size=2, context_length=10)
    loader = ValidationLoader(
        counting, batch_size=2, context_length=10, num_batches=limit
    )
    batches = list(loader.batches())
    assert len(batches) == number
    assert loader.is_whole == (number == 5)
    chex.assert_trees_all_equal(batches, list(whole.batches())[:number])


def test_segments_count_documents_within_a_row(tmp_path):
    stream = np.arange(200)
    stream[[0, 13, 14, 50]] = EOT
    dataset = stored(tmp_path, stream, stream)
    loader = ValidationLoader(
        dataset, batch_size=3, context_length=20, document_mask=True
    )
    segments = next(loader.batches())["segments"].tolist()
    # The end-of-text token opens its document.
    assert segments[0] == [1] * 13 + [2] + [3] * 6
    assert segments[1] == [0] * 20
    assert segments[2] == [0] * 10 + [1] * 10
    train = open_batches(
        single(dataset), batch_size=4, context_length=20, document_mask=True
    )
    chex.assert_type(list(train.batch(1).values()), np.int32)


def test_document_mask_without_documents_is_refused(tmp_path):
    parts = single(stored(tmp_path, np.arange(200), eot=None))
    with pytest.raises(UserError, match=r"data\.document_mask"):
        open_batches(parts, batch_size=1, context_length=8, document_mask=True)


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


def test_a_process_without_a_cpu_for_jax_is_refused(monkeypatch):
    def find(backend):
        raise RuntimeError(f"Unknown backend: '{backend}' requested")

    monkeypatch.setattr(jax, "local_devices", find)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(UserError, match="Set JAX_PLATFORMS=cuda,cpu"):
        next(prefetch([1]))


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
