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
from gpt2.data.tokens import TokenStream
from gpt2.errors import UserError

AHEAD = 1000  # documents among which `bos` looks for one that fits, as in nanochat
SHORTEST = 128  # length of rows under `pad`; others are its doubles, and the context
LEAST_SHARE = 0.1  # of the rows that a length needs, since each length is compiled


@dataclasses.dataclass(frozen=True)
class Rows:
    """The training rows of a corpus, in the order of a run."""

    num_rows: int  # of an epoch
    # The tokens of a row, at most a batch's length + 1.
    read: Callable[[int], np.ndarray]
    # Of the batch that begins with a row, in targets.
    length: Callable[[int], int]
    lengths: Sequence[int]  # that batches may have
    mean_length: float
    note: str = ""  # the share of tokens that is cropped or padded


def concat(dataset: Dataset, length: int, batch_size: int, seed: int) -> Rows:
    """Windows of the joined documents, wherever these end; neighbours share one token.

    Each epoch draws where its first window starts, so that later epochs cut the text elsewhere.
    """
    stream = dataset.open("train")
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

    return Rows(num_rows, read, lambda row: length, [length], length)


def bos(dataset: Dataset, length: int, batch_size: int, seed: int) -> Rows:
    """Rows begin at a document, and take the longest ones that fit, as in nanochat.

    Where none fits, the shortest is cropped to fill the row. Rows are the same in every epoch.
    """
    stream = dataset.open("train")
    eot = document_start(dataset, "data.packing=bos")
    starts = find_documents(stream, eot)
    sizes = np.diff(starts, append=len(stream))
    drawn = np.random.default_rng(seed).permutation(len(starts))
    room = length + 1
    documents, kept, ends = best_fit(sizes[drawn].tolist(), room)
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

    used = kept.sum()
    cropped = 1 - used / len(stream)
    padded = 1 - used / (num_rows * room)
    note = f"{cropped:.1%} cropped, {padded:.1%} padded"
    return Rows(num_rows, read, lambda row: length, [length], length, note)


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


def pad(dataset: Dataset, length: int, batch_size: int, seed: int) -> Rows:
    """A document a row, a long one cut into several; the rows of a batch have one length.

    Every token of the stream but the first is a target once an epoch. Rows that fill no batch of
    their own length join the next one's; rows without tokens fill up the longest ones.
    """
    stream = dataset.open("train")
    eot = document_start(dataset, "data.packing=pad")
    starts = find_documents(stream, eot)
    begins, sizes = _cut_documents(starts, len(stream), length)
    lengths = choose_lengths(sizes, length)
    ranks = np.searchsorted(lengths, sizes)  # of each row, that of its length
    missing = (0, -len(sizes) % batch_size)
    ranks = np.pad(ranks, missing, "maximum")
    begins = np.pad(begins, missing)
    num_tokens = np.pad(sizes + 1, missing)
    # In the order of lengths, a batch has that of its last row.
    last_ranks = np.sort(ranks)[batch_size - 1 :: batch_size]
    batch_lengths = np.array(lengths)[last_ranks]
    num_batches = len(batch_lengths)
    order = shuffled(num_batches, seed)

    @functools.lru_cache(2)
    def arrange(epoch: int) -> np.ndarray:
        draw = np.random.default_rng((seed, epoch))
        rows = np.lexsort((draw.random(len(ranks)), ranks))
        return rows.reshape(num_batches, batch_size)

    def read(row: int) -> np.ndarray:
        batch, number = divmod(row, batch_size)
        rows = arrange(batch // num_batches)
        found = rows[order(batch), number]
        return stream.read(int(begins[found]), int(num_tokens[found]))

    def batch_length(row: int) -> int:
        batch = order(row // batch_size)
        return int(batch_lengths[batch])

    room = int(batch_lengths.sum()) * batch_size
    return Rows(
        num_rows=len(ranks),
        read=read,
        length=batch_length,
        lengths=np.unique(batch_lengths).tolist(),
        mean_length=room / len(ranks),
        note=f"{1 - sizes.sum() / room:.1%} padded",
    )


def _cut_documents(
    starts: np.ndarray, num_tokens: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns where rows of up to `length` targets begin, and how many they have, [rows] each."""
    sizes = np.diff(starts, append=num_tokens - 1)  # in targets
    counts = -(-sizes // length)  # rows
    first_rows = np.cumsum(counts) - counts
    rows = np.arange(counts.sum())
    numbers = rows - np.repeat(first_rows, counts)  # within the document
    before = length * numbers  # targets of the document in earlier rows
    rest = np.repeat(sizes, counts) - before
    begins = np.repeat(starts, counts) + before
    return begins, np.minimum(rest, length)


def choose_lengths(sizes: np.ndarray, longest: int) -> list[int]:
    """Returns 128, 256, 512, ... and `longest`, but what few rows would have or none."""
    lengths = [longest]
    doubled = SHORTEST
    while doubled < longest:
        lengths.insert(-1, doubled)
        doubled *= 2
    ranks = np.searchsorted(lengths, sizes)
    last = ranks.max()
    chosen = list[int]()
    for rank in range(last):
        share = np.mean(ranks == rank)
        if share >= LEAST_SHARE:
            chosen.append(lengths[rank])
    return [*chosen, lengths[last]]


PACKINGS = {"concat": concat, "bos": bos, "pad": pad}


def document_start(dataset: Dataset, option: str) -> int:
    """Returns the token that opens each document; refuses an option that needs several."""
    eot = dataset.tokenizer.eot
    num_documents = 0
    for _, part in dataset.parts.values():
        num_documents += part.splits["train"].num_documents
    if eot is None or num_documents < 2:
        raise UserError(
            f"{option} needs several documents, and the corpus is one", "Leave it out"
        )
    return eot


def find_documents(stream: TokenStream, eot: int) -> np.ndarray:
    """Returns where documents start, int64: at each end-of-text token, and at the very start."""
    places = [np.zeros(1, np.int64)]
    for start, tokens in stream.chunks():
        places.append(start + np.flatnonzero(tokens == eot))
    return np.unique(np.concatenate(places))


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
