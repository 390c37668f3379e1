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

from gpt2.data.tokens import PreparedTokens, TokenStream
from gpt2.errors import UserError

AHEAD = 1000  # documents among which `bos` looks for one that fits, as in nanochat


@dataclasses.dataclass(frozen=True)
class Rows:
    """The training rows of a corpus, in the order of a run."""

    num_rows: int  # of an epoch
    read: Callable[[int], np.ndarray]  # the tokens of a row, at most a context + 1
    note: str = ""  # the share of tokens that is cropped


def concat(tokens: PreparedTokens, length: int, seed: int) -> Rows:
    """Windows of the joined documents, wherever these end; neighbours share one token.

    Each epoch draws where its first window starts, so that later epochs cut the text elsewhere.
    """
    stream = tokens.stream("train")
    # One window less than would fit leaves room for the offset.
    num_rows = max(len(stream) // length - 1, 0)
    order = shuffled(num_rows, seed)

    @functools.lru_cache(8)
    def offset(epoch: int) -> int:
        draw = np.random.default_rng((seed, epoch))
        return int(draw.integers(length))

    def read(row: int) -> np.ndarray:
        start = offset(row // num_rows) + length * order(row)
        return stream.read(start, length + 1)

    return Rows(num_rows, read)


def bos(tokens: PreparedTokens, length: int, seed: int) -> Rows:
    """Rows begin at a document, and take the longest ones that fit, as in nanochat.

    Where none fits, the shortest is cropped to fill the row. Rows are the same in every epoch.
    """
    stream, starts = find_documents(tokens, "data.packing=bos")
    sizes = np.diff(starts, append=len(stream))
    drawn = np.random.default_rng(seed).permutation(len(starts))
    documents, kept, ends = best_fit(sizes[drawn].tolist(), length + 1)
    begins = starts[drawn[documents]]
    num_rows = len(ends) - 1
    order = shuffled(num_rows, seed)

    def read(row: int) -> np.ndarray:
        number = order(row)
        pieces = list[np.ndarray]()
        for piece in range(ends[number], ends[number + 1]):
            tokens = stream.read(int(begins[piece]), int(kept[piece]))
            pieces.append(tokens)
        return np.concatenate(pieces)

    cropped = 1 - kept.sum() / len(stream)
    return Rows(num_rows, read, f"{cropped:.1%} cropped")


def best_fit(
    sizes: Sequence[int], room: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
        num_fitting = bisect.bisect_right(waiting, (free, len(sizes)))
        size, document = waiting.pop(max(num_fitting - 1, 0))
        documents.append(document)
        kept.append(min(size, free))
        free -= kept[-1]
        if not free:
            ends.append(len(kept))
            free = room
        if found := next(upcoming, None):
            bisect.insort(waiting, found)
    if free < room:
        ends.append(len(kept))
    return np.array(documents), np.array(kept), np.array(ends)


def pad(tokens: PreparedTokens, length: int, seed: int) -> Rows:
    """A document a row, a long one cut into several; batches fill rows up to the context.

    Every token of the stream but the first is a target once an epoch.
    """
    stream, starts = find_documents(tokens, "data.packing=pad")
    begins = list[int]()
    sizes = list[int]()  # in targets
    for start, end in itertools.pairwise([*starts.tolist(), len(stream) - 1]):
        for begin in range(start, end, length):
            begins.append(begin)
            sizes.append(min(end - begin, length))
    num_rows = len(sizes)
    order = shuffled(num_rows, seed)

    def read(row: int) -> np.ndarray:
        number = order(row)
        return stream.read(begins[number], sizes[number] + 1)

    padded = 1 - sum(sizes) / (num_rows * length)
    return Rows(num_rows, read, f"{padded:.1%} padded")


PACKINGS = {"concat": concat, "bos": bos, "pad": pad}


def document_start(tokens: PreparedTokens, option: str) -> int:
    """Returns the token that opens each document; refuses an option that needs it."""
    eot = tokens.tokenizer.eot
    if eot is None:
        raise UserError(f"{option} needs documents, and the corpus is one text")
    return eot


def find_documents(
    tokens: PreparedTokens, option: str
) -> tuple[TokenStream, np.ndarray]:
    """Returns the training tokens, and where documents start, int64, for an option that asks.

    They start at each end-of-text token, and at the very start.
    """
    stream = tokens.stream("train")
    eot = document_start(tokens, option)
    places = [np.zeros(1, np.int64)]
    for start, chunk in stream.chunks():
        places.append(start + np.flatnonzero(chunk == eot))
    return stream, np.unique(np.concatenate(places))


def hashed(seed: int | tuple[int, int]) -> int:
    """Returns another seed of 32 bits, far from that of a neighbour."""
    (state,) = np.random.SeedSequence(seed).generate_state(1)
    return int(state)


def shuffled(number: int, seed: int) -> Callable[[int], int]:
    """Returns a permutation for each epoch, computed by index as Grain's `shuffle` does."""
    # Epochs have neighbouring seeds: hashing keeps runs of nearby seeds apart.
    first = hashed(seed)

    def order(index: int) -> int:
        from grain.experimental import index_shuffle  # takes most of a second

        epoch, within = divmod(index, number)
        seed = (first + epoch) % 2**32
        return index_shuffle(within, number - 1, seed=seed, rounds=4)

    return order
