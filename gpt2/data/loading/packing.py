"""The rows of a training split, by `data.packing`. Any row of any epoch can be read directly.

A row is the tokens of one sequence, all but the first of which are targets. Rows are numbered over
the whole run, and each epoch visits all of them once, in an order of its own.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from gpt2.data.tokens import PreparedTokens, TokenStream
from gpt2.errors import UserError

AHEAD = 1000  # documents among which `bos` chooses one that fits, as in nanochat


@dataclasses.dataclass(frozen=True)
class Rows:
    """The training rows of a corpus, in the order of a run."""

    num_rows: int  # of an epoch
    read: Callable[[int], np.ndarray]  # the tokens of a row, at most a context + 1
    note: str = ""  # for people, on the tokens that are cropped or padded


def concat(tokens: PreparedTokens, length: int, seed: int) -> Rows:
    """Windows of the joined documents, which overlap by one token.

    Each epoch draws where its first window starts, so that later epochs cut the text elsewhere.
    """
    stream = tokens.stream("train")
    # One window fewer than fit, so that there is room for the offset.
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
    """Rows that begin at a document and take the longest documents that fit, as in nanochat.

    If none fits, the shortest is cropped to fill the row. Rows are the same in every epoch.
    """
    stream, starts = find_documents(tokens, "data.packing=bos")
    sizes = np.diff(starts, append=len(stream))
    drawn = np.random.default_rng(seed).permutation(len(starts))
    documents, lengths, ends = best_fit(sizes[drawn].tolist(), length + 1)
    begins = starts[drawn[documents]]
    num_rows = len(ends) - 1
    order = shuffled(num_rows, seed)

    def read(row: int) -> np.ndarray:
        number = order(row)
        pieces = list[np.ndarray]()
        for piece in range(ends[number], ends[number + 1]):
            pieces.append(stream.read(int(begins[piece]), int(lengths[piece])))
        return np.concatenate(pieces)

    cropped = 1 - lengths.sum() / len(stream)
    return Rows(num_rows, read, f"{cropped:.1%} cropped")


def best_fit(
    sizes: Sequence[int], room: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack documents into rows of `room` tokens.

    Returns the documents in the order of the rows, the number of tokens that are used of each, and
    the index at which each row begins among them, and the last one ends. A document that is as long
    as a row, or longer, has a row of its own.
    """
    documents = [document for document, size in enumerate(sizes) if size >= room]
    lengths = [room] * len(documents)
    ends = list(range(len(documents) + 1))
    free = room
    upcoming = ((size, document) for document, size in enumerate(sizes) if size < room)
    waiting = sorted(itertools.islice(upcoming, AHEAD))
    while waiting:
        num_fitting = bisect.bisect_right(waiting, (free, len(sizes)))
        size, document = waiting.pop(max(num_fitting - 1, 0))
        documents.append(document)
        lengths.append(min(size, free))
        free -= lengths[-1]
        if not free:
            ends.append(len(lengths))
            free = room
        if following := next(upcoming, None):
            bisect.insort(waiting, following)
    if free < room:
        ends.append(len(lengths))
    return np.array(documents), np.array(lengths), np.array(ends)


def pad(tokens: PreparedTokens, length: int, seed: int) -> Rows:
    """One document in each row, or a part of a long one. Batches pad rows to the context.

    Every token of the stream but the first is a target once in each epoch.
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
    """Return the token that opens each document. An option that needs it is refused without."""
    eot = tokens.tokenizer.eot
    if eot is None:
        raise UserError(
            f"{option} needs several documents, and the corpus is a single text",
            "Leave the option out",
        )
    return eot


def find_documents(
    tokens: PreparedTokens, option: str
) -> tuple[TokenStream, np.ndarray]:
    """Return the training tokens, and the indices at which documents start, int64.

    These are 0 and the index of each end-of-text token. `option` is named if there is none.
    """
    stream = tokens.stream("train")
    eot = document_start(tokens, option)
    indices = [np.zeros(1, np.int64)]
    for start, chunk in stream.chunks():
        indices.append(start + np.flatnonzero(chunk == eot))
    return stream, np.unique(np.concatenate(indices))


def hashed(seed: int | tuple[int, int]) -> int:
    """Return another seed of 32 bits, which differs widely for neighbouring seeds."""
    (state,) = np.random.SeedSequence(seed).generate_state(1)
    return int(state)


def shuffled(number: int, seed: int) -> Callable[[int], int]:
    """Return a permutation for each epoch, computed by index as Grain's `shuffle` does."""
    # Epochs have neighbouring seeds. Without a hash, runs of neighbouring seeds would share them.
    first = hashed(seed)

    def order(index: int) -> int:
        from grain.experimental import (
            index_shuffle,
        )  # the import takes most of a second

        epoch, within = divmod(index, number)
        seed = (first + epoch) % 2**32
        return index_shuffle(within, number - 1, seed=seed, rounds=4)

    return order
