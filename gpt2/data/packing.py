"""Rows of a training split, by `data.packing`; any row of any epoch can be read directly.

A row is the tokens of one sequence, each but the first a target. Rows are counted over the whole
run, and each epoch visits all of them once, in another order.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from gpt2.data.dataset import Dataset
from gpt2.data.tokens import CHUNK, TokenStream
from gpt2.errors import UserError

AHEAD = 1000  # documents among which `bos` looks for one that fits, as in nanochat
SHORTEST = 128  # length of rows under `pad`; others are its doubles, and the context
LEAST_SHARE = 0.1  # of the rows that a length needs, since each length is compiled


@dataclasses.dataclass(frozen=True)
class Rows:
    """The training rows of a corpus, in the order of a run."""

    wait: Callable[
        [int], int
    ]  # waits until so many are prepared, or all; returns how many are
    read: Callable[
        [int], np.ndarray
    ]  # the tokens of a row, at most a batch's length + 1
    length: Callable[[int], int]  # of the batch that begins with a row, in targets
    lengths: Sequence[int]  # that batches may have
    mean_length: float
    note: str = ""  # the share of tokens that is cropped or padded

    @property
    def num_rows(self) -> int:
        """How many rows an epoch has, of what is prepared."""
        return self.wait(0)


def concat(dataset: Dataset, length: int, batch_size: int, seed: int) -> Rows:
    """Windows of the joined documents, wherever these end; neighbours share one token.

    Each epoch draws where its first window starts, so that later epochs cut the text elsewhere.
    Under `data.shuffle_block`, an epoch visits one block of windows after another.
    """
    # of rows, if not 0
    stream = dataset.open("train")
    block = -(-dataset.block // length)
    order = functools.lru_cache(2)(functools.partial(shuffled, seed=seed))

    @functools.lru_cache(8)
    def offset(epoch: int) -> int:
        return int(np.random.default_rng((seed, epoch)).integers(length))

    def wait(number: int) -> int:
        # One window less than would fit leaves room for the offset.
        return max(stream.wait((number + 2) * length) // length - 1, 0)

    def read(row: int) -> np.ndarray:
        num_rows = wait(row - row % block + block if block else 0)
        size = block or num_rows
        epoch, within = divmod(
            row, num_rows
        )  # the first one while there is more to come
        number, place = divmod(within, size)
        here = min(size, num_rows - number * size)
        drawn = epoch * -(-num_rows // size) + number  # blocks before this one
        place = number * size + order(here)(drawn * here + place)
        return stream.read(offset(epoch) + length * place, length + 1)

    return Rows(wait, read, lambda row: length, [length], length)


def bos(dataset: Dataset, length: int, batch_size: int, seed: int) -> Rows:
    """Rows begin at a document, and take the longest ones that fit, as in nanochat.

    Where none fits, the shortest is cropped to fill the row. Rows are the same in every epoch.
    """
    stream = dataset.open("train")
    starts = find_documents(stream, document_start(dataset, "data.packing=bos"))
    drawn = np.random.default_rng(seed).permutation(len(starts))
    sizes = np.diff(starts, append=len(stream))[drawn].tolist()
    documents, kept, ends = map(np.array, best_fit(sizes, length + 1))
    pieces = np.stack([starts[drawn][documents], kept], axis=1)
    num_rows = len(ends) - 1
    order = shuffled(num_rows, seed)
    room = num_rows * (length + 1)

    def read(row: int) -> np.ndarray:
        number = order(row)
        places = pieces[ends[number] : ends[number + 1]].tolist()
        return np.concatenate([stream.read(start, size) for start, size in places])

    used = int(kept.sum())
    note = f"{1 - used / len(stream):.1%} cropped, {1 - used / room:.1%} padded"
    return Rows(lambda _: num_rows, read, lambda row: length, [length], length, note)


def best_fit(sizes: Sequence[int], room: int) -> tuple[list[int], list[int], list[int]]:
    """Packs documents into rows of `room` tokens.

    Returns the documents in the order of rows, how many tokens of each are kept, and where rows
    begin and end among them. One that is as long as a row, or longer, has a row to itself.
    """
    documents = [document for document, size in enumerate(sizes) if size >= room]
    kept = [room] * len(documents)
    ends = list(range(len(documents) + 1))
    free = room
    upcoming = ((size, document) for document, size in enumerate(sizes) if size < room)
    waiting = sorted(itertools.islice(upcoming, AHEAD))
    while waiting:
        fitting = bisect.bisect_right(waiting, (free, len(sizes)))
        size, document = waiting.pop(max(fitting - 1, 0))
        documents.append(document)
        kept.append(min(size, free))
        free -= kept[-1]
        if not free:
            ends.append(len(kept))
            free = room
        if found := next(upcoming, None):
            bisect.insort(waiting, found)
    return documents, kept, ends if free == room else [*ends, len(kept)]


def pad(dataset: Dataset, length: int, batch_size: int, seed: int) -> Rows:
    """A document a row, a long one cut into several; the rows of a batch have one length.

    Every token of the stream but the first is a target once an epoch. Rows that fill no batch of
    their own length join the next one's; rows without tokens fill up the longest ones.
    """
    stream = dataset.open("train")
    starts = find_documents(stream, document_start(dataset, "data.packing=pad"))
    sizes = np.diff(starts, append=len(stream) - 1)  # in targets
    counts = -(-sizes // length)
    cut = length * (
        np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    )
    sizes = np.minimum(np.repeat(sizes, counts) - cut, length)
    begins = np.repeat(starts, counts) + cut
    lengths = choose_lengths(sizes, length)
    missing = 0, -len(sizes) % batch_size
    ranks = np.pad(np.searchsorted(lengths, sizes), missing, "maximum")
    begins = np.pad(begins, missing)
    tokens = np.pad(sizes + 1, missing)
    batch_lengths = np.array(lengths)[np.sort(ranks)[batch_size - 1 :: batch_size]]
    num_batches = len(batch_lengths)
    room = int(batch_lengths.sum()) * batch_size
    order = shuffled(num_batches, seed)

    @functools.lru_cache(2)
    def arrange(epoch: int) -> np.ndarray:
        draw = np.random.default_rng((seed, epoch)).random(len(ranks))
        return np.lexsort((draw, ranks)).reshape(num_batches, batch_size)

    @functools.lru_cache(8)
    def rows_of(step: int) -> list[int]:
        return arrange(step // num_batches)[order(step)].tolist()

    def read(row: int) -> np.ndarray:
        found = rows_of(row // batch_size)[row % batch_size]
        return stream.read(int(begins[found]), int(tokens[found]))

    note = f"{1 - sizes.sum() / room:.1%} padded"
    lengths = np.unique(batch_lengths).tolist()
    each = lambda row: int(batch_lengths[order(row // batch_size)])  # noqa: E731
    return Rows(lambda _: len(ranks), read, each, lengths, room / len(ranks), note)


def choose_lengths(sizes: np.ndarray, longest: int) -> list[int]:
    """Returns 128, 256, 512, ... and `longest`, but what few rows would have or none."""
    doubles = itertools.takewhile(
        lambda n: n < longest, (SHORTEST << k for k in itertools.count())
    )
    lengths = [*doubles, longest]
    shares = np.bincount(np.searchsorted(lengths, sizes), minlength=len(lengths)) / len(
        sizes
    )
    last = int(np.flatnonzero(shares)[-1])
    return [
        lengths[k] for k in range(last + 1) if shares[k] >= LEAST_SHARE or k == last
    ]


PACKINGS = {"concat": concat, "bos": bos, "pad": pad}


def document_start(dataset: Dataset, option: str) -> int:
    """Returns the token that opens each document; refuses an option that needs several."""
    eot = dataset.tokenizer.eot
    few = dataset.splits["train"].num_documents < 2 and dataset.whole().splits["train"]
    if eot is None or (few and few.num_documents < 2):
        raise UserError(
            f"{option} needs several documents, and the corpus is one", "Leave it out"
        )
    return eot


def find_documents(stream: TokenStream, eot: int) -> np.ndarray:
    """Returns where documents start, int64: at each end-of-text token, and at the very start."""
    chunks = range(0, len(stream), CHUNK)
    found = [
        start + np.flatnonzero(stream.read(start, CHUNK) == eot) for start in chunks
    ]
    return np.unique(np.concatenate([[0], *found]))


def shuffled(number: int, seed: int) -> Callable[[int], int]:
    """Returns a permutation for each epoch, computed by index as Grain's `shuffle` does."""
    from grain.experimental import index_shuffle  # takes most of a second

    # Epochs have neighbouring seeds: hashing keeps runs of nearby seeds apart.
    first = int(np.random.SeedSequence(seed).generate_state(1)[0])

    def order(index: int) -> int:
        epoch, within = divmod(index, number)
        return index_shuffle(within, number - 1, seed=(first + epoch) % 2**32, rounds=4)

    return order
