"""Batches of a user's function: checked, continued from their state, filled at the end."""

import shutil
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest

from gpt2.config import Config, DataConfig
from gpt2.data.loading.user_batches import BatchFunction, UserBatches, UserDataset
from gpt2.data.readers import open_corpus
from gpt2.errors import UserError
from gpt2.training import Batches
from tests.helpers import TINY, configured, params_of, succeed

ALL = slice(0, 4)
HALF = slice(0, 2)
ROWS = np.arange(64).reshape(4, 16)


class Stateful:
    """Ten batches, with the state of torchdata's StatefulDataLoader."""

    def __init__(self):
        self._count = 0

    def __iter__(self):
        while self._count < 10:
            self._count += 1
            tokens = np.full((4, 16), self._count)
            mask = np.arange(16) > 8 - tokens
            yield {"tokens": tokens, "targets": tokens, "mask": mask}

    def state_dict(self):
        return {"count": self._count}

    def load_state_dict(self, state):
        self._count = state["count"]


def user_batches(given, seed=0, accumulate_steps=1):
    """Returns a user's batches, of 4 rows of 16 tokens below 64, from a list or a function."""
    function = given if callable(given) else lambda split: given
    config = SimpleNamespace(
        seed=seed,
        model=SimpleNamespace(context_length=16, vocab_size=64),
        train=SimpleNamespace(eval_batches=0, accumulate_steps=accumulate_steps),
    )
    return UserBatches("python:a:b", function, config)


def batch_of(**arrays):
    """Returns a batch, with other arrays than its own if they are given."""
    return {"tokens": ROWS, "targets": ROWS} | arrays


def validation_of(source, rows=ALL, num_batches=0):
    """Returns the micro-batches of a validation."""
    validation, targets_per_byte = source.validation(rows, num_batches)
    assert targets_per_byte is None
    _, batches = validation[""]
    return batches


def test_batches_go_on_from_their_state_and_begin_anew_at_their_end():
    source = user_batches(lambda split: Stateful())
    batches = [source.batch(step, ALL) for step in range(1, 13)]
    assert [batch["tokens"][0, 0] for batch in batches] == [*range(1, 11), 1, 2]
    assert [batch["targets"][0, 5] for batch in batches[:5]] == [-1, -1, -1, 4, 5]
    again = user_batches(lambda split: Stateful())
    again.restore(source.position(6))
    chex.assert_trees_all_equal(again.batch(7, ALL), batches[6])


WRONG = {
    "targets lack rows": ({"targets": ROWS[:2]}, r"targets of shape \(2, 16\)"),
    "another length": ({"weights": ROWS[:, 1:]}, r"weights of shape \(4, 15\), not"),
    "beyond the model": ({"tokens": ROWS + 1}, "tokens .* whole numbers from 0 to 63"),
    "floats": ({"tokens": ROWS + 0.3}, "tokens .* whole numbers"),
    "a masked array": ({"targets": np.ma.array(ROWS, mask=ROWS < 20)}, "are masked"),
    "masked weights": ({"weights": np.ma.array(ROWS / 9, mask=ROWS < 2)}, "are masked"),
    "another target": ({"targets": ROWS - 2}, "targets .* numbers from -1 to 63"),
    "a mask of NaN": ({"mask": np.full((4, 16), np.nan)}, "mask .* from 0 to 1"),
    "all are masked": ({"mask": np.zeros((4, 16), bool)}, "nothing to predict"),
    "PyTorch's ignored": ({"targets": np.full((4, 16), -100)}, "nothing to predict"),
    "too large for int32": ({"ids": ROWS + 2**31}, "ids of int64 with values"),
    "strings": ({"ids": np.full((4, 16), "a")}, "ids is not an array of numbers"),
    "ragged rows": ({"ids": [[1], [1, 2]]}, "ids is not an array of numbers"),
    "beyond float32": ({"weights": ROWS * 1e300}, "weights of float32 .* not finite"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_batches_that_cannot_be_meant_are_refused(change, message):
    source = user_batches([batch_of(**change)])
    with pytest.raises(UserError, match=message):
        source.batch(1, ALL)
    with pytest.raises(UserError, match=message):
        next(validation_of(source))


@pytest.mark.parametrize("returned", [None, batch_of(), [[ROWS]]])
def test_a_function_that_returns_no_batches_is_refused(returned):
    source = user_batches(lambda split: returned)
    with pytest.raises(UserError, match="does not return an iterable of dicts"):
        source.batch(1, ALL)


def test_a_first_batch_that_lacks_rows_is_refused():
    short = user_batches([batch_of(tokens=ROWS[:2], targets=ROWS[:2])])
    with pytest.raises(UserError, match=r"tokens of shape \(2, 16\)"):
        short.batch(1, ALL)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.uint64, np.float32])
@pytest.mark.parametrize("mask_dtype", [bool, np.float16, np.int8])
def test_batches_of_every_kind_of_number_are_taken_as_they_are(dtype, mask_dtype):
    batch = {
        "tokens": ROWS.astype(dtype),
        "targets": ROWS.astype(dtype),
        "mask": (ROWS > 20).astype(mask_dtype),
    }
    check_taken(batch)


def check_taken(batch):
    """Check that a batch is one of `ROWS`, whose targets up to 20 predict nothing."""
    arrays = user_batches([batch]).batch(1, ALL)
    assert arrays.keys() == {"tokens", "targets"}
    chex.assert_type(list(arrays.values()), np.int32)
    np.testing.assert_array_equal(arrays["tokens"], ROWS)
    np.testing.assert_array_equal(arrays["targets"], np.where(ROWS > 20, ROWS, -1))


def test_lists_are_taken_and_pytorchs_ignored_targets_predict_nothing():
    targets = np.where(ROWS > 20, ROWS, -100)
    check_taken(batch_of(tokens=ROWS.tolist(), targets=targets))


def test_other_arrays_pass_unchanged_and_are_in_every_batch():
    weights = np.linspace(-1, 1, 64, dtype=np.float64).reshape(4, 16)
    batch = batch_of(weights=weights, source=ROWS - 9)
    source = user_batches([batch, batch, batch_of()])
    for arrays in (source.batch(1, ALL), next(validation_of(source))):
        np.testing.assert_array_equal(arrays["weights"], weights.astype(np.float32))
        np.testing.assert_array_equal(arrays["source"], ROWS - 9)
        assert arrays["weights"].dtype == np.float32
        assert arrays["source"].dtype == np.int32
    source.batch(2, ALL)
    with pytest.raises(UserError, match="a batch without source, weights"):
        source.batch(3, ALL)


def test_a_mask_is_in_every_batch_or_in_none():
    source = user_batches([batch_of(mask=ROWS > 20), batch_of()])
    source.batch(1, ALL)
    with pytest.raises(UserError, match="a batch without mask"):
        source.batch(2, ALL)


@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_a_batch_that_lacks_an_array_is_refused_by_the_name_of_the_array(name):
    batch = batch_of()
    del batch[name]
    with pytest.raises(UserError, match=f"returns a batch without {name}"):
        user_batches([batch]).batch(1, ALL)


def test_short_last_batches_are_filled_with_nothing_to_predict():
    short = batch_of(tokens=ROWS[:3], targets=ROWS[:3])
    source = user_batches([batch_of(), short], accumulate_steps=2)
    filled = np.concatenate([ROWS[:3], np.full((1, 16), -1)])
    np.testing.assert_array_equal(source.batch(1, ALL)["targets"], ROWS)
    np.testing.assert_array_equal(source.batch(2, ALL)["targets"], filled)
    targets = [batch["targets"] for batch in validation_of(source, HALF)]
    wanted = np.concatenate([ROWS, filled])
    np.testing.assert_array_equal(np.concatenate(targets), wanted)
    # The first batch as a whole, because a micro-batch may have no targets.
    first = [batch["targets"] for batch in validation_of(source, HALF, num_batches=1)]
    np.testing.assert_array_equal(np.concatenate(first), ROWS)


def test_a_function_that_gives_no_batches_is_refused():
    source = user_batches([])
    with pytest.raises(UserError, match="no batches for split=train"):
        source.batch(1, ALL)
    with pytest.raises(UserError, match="no batches for split=validation"):
        next(validation_of(source))


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("data", "packing", "pad"),
        ("data", "document_mask", True),
        ("data", "shuffle_documents", True),
        ("data", "unique", True),
        ("train", "context_schedule", "0=16"),
    ],
)
def test_options_that_finished_batches_would_ignore_are_refused(group, name, value):
    dataset = UserDataset(None, BatchFunction("python:a:b", lambda split: [], ""))
    config = Config.from_dict({group: {name: value}})
    with pytest.raises(UserError, match=rf"finished batches, which {group}\.{name}"):
        dataset.open(config)


def test_batches_without_a_state_begin_anew_with_a_warning(capsys):
    user_batches([batch_of()]).batch(1, ALL)
    assert capsys.readouterr().err == ""
    user_batches([batch_of()]).batch(7, ALL)
    assert (
        "step 7 starts again at the function's first batch" in capsys.readouterr().err
    )


def test_a_state_that_is_no_longer_loaded_is_reported(capsys):
    source = user_batches(lambda split: Stateful())
    source.batch(1, ALL)
    again = user_batches([batch_of()])
    again.restore(source.position(1))
    again.batch(2, ALL)
    assert "starts again at the function's first batch" in capsys.readouterr().err


def test_processes_with_the_same_rows_do_not_read_batches_of_their_own(monkeypatch):
    dataset = UserDataset(None, BatchFunction("python:a:b", lambda split: [], ""))
    config = configured("data.batch_size=8 parallel.tensor=2")
    backend = SimpleNamespace(put_batch=None, local_rows=lambda size: slice(0, size))
    Batches(config, dataset, backend)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"the same rows .* parallel\.tensor"):
        Batches(config, dataset, backend)


def test_the_code_of_a_function_is_part_of_what_a_run_records(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "def batches(split):\n    return []\n"
    codes = []
    for index, changed in enumerate(
        [text, f"# mine\n{text}", text.replace("[]", "()")]
    ):
        (tmp_path / f"mine{index}.py").write_text(changed)
        corpus = open_corpus(f"python:mine{index}:batches")
        codes.append(corpus.prepare(DataConfig(tokenizer="byte")).describe()["code"])
    assert codes[0] == codes[1] != codes[2]


@pytest.mark.parametrize("seed", [3, 5])
def test_a_function_of_a_seed_is_given_that_of_the_run(seed):
    def batches(split, seed):
        return [batch_of(tokens=np.full((4, 16), seed))]

    source = user_batches(batches, seed)
    assert source.batch(1, ALL)["tokens"][0, 0] == seed


GRAIN = """
import grain, numpy as np

def batches(split):
    draw = np.random.default_rng(split == "train")
    rows = [dict(tokens=t[:-1], targets=t[1:]) for t in draw.integers(0, 255, (40, 17))]
    data = grain.MapDataset.source(rows)
    data = data.shuffle(seed=3).repeat() if split == "train" else data
    return data.batch(4).to_iter_dataset()
"""


@pytest.mark.thorough
def test_a_run_on_a_grain_iterator_goes_on_where_it_was(tmp_path):
    (tmp_path / "own_grain.py").write_text(GRAIN)
    options = [*TINY, "--config.data.corpus=python:own_grain:batches"]
    options.append("--config.train.keep_checkpoints=9")
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    succeed(whole, *options, cwd=tmp_path)
    shutil.copytree(whole, cut)
    (cut / "samples.txt").unlink()
    for step in (6, 8):
        shutil.rmtree(cut / "checkpoints" / str(step))
    succeed(cut, *options, cwd=tmp_path)
    chex.assert_trees_all_equal(params_of(cut), params_of(whole))
