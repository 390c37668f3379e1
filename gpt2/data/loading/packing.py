"""Rows of a training split, packed as `data.packing` says. Each row can be read by its number.

A row contains the tokens of one sequence. All of them except the first are targets. Rows are
numbered over the whole run, and each epoch reads every row once, in a different order. There is one
exception: with `bos` and shuffled documents, epochs have different numbers of rows, so that an
epoch may leave out or repeat a few. Each packing receives `data.shuffle_documents` as its argument
`shuffles_documents`.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from gpt2.data.loading.document_order import ShuffledDocuments
from gpt2.data.tokens import PreparedTokens, TokenStream
from gpt2.errors import UserError

AHEAD = 1000  # number of documents among which `bos` chooses, as in nanochat


@dataclasses.dataclass(frozen=True)
class Rows:
    """The training rows of a corpus, in the order of a run."""

    num_rows: int  # rows in an epoch
    # Returns the tokens of a row, at most the context length + 1.
    read: Callable[[int], np.ndarray]
    note: str = ""  # a message about tokens that are cropped, padded or left out


def concat(
    tokens: PreparedTokens, length: int, seed: int, shuffles_documents: bool
) -> Rows:
    """Cut the joined documents into windows of `length` + 1 tokens, which overlap by one token.

    Each epoch begins its first window at a random offset, so that epochs cut the text differently.
    With `shuffles_documents`, each epoch first joins the documents in another order. `seed`
    determines the offsets and all orders.
    """
    if shuffles_documents:
        stream, starts = find_documents(tokens, "data.shuffle_documents=True")
        _refuse_single(starts, "data.shuffle_documents=True")
    else:
        stream = tokens.stream("train")
    # One window is left out, so that there is room for the offset.
    num_rows = max(len(stream) // length - 1, 0)
    order = shuffled(num_rows, seed)
    unread = 1 - num_rows * length / max(len(stream), 1)
    note = ""
    if unread > 0.01:
        note = (
            f"each epoch has only whole windows, and leaves out {unread:.1%} of the text, a"
            " different part each time"
        )

    @functools.lru_cache(1)
    def epoch_text(epoch: int) -> tuple[int, TokenStream | ShuffledDocuments]:
        """Return the offset of an epoch's first window, and the text of the epoch's windows."""
        draw = np.random.default_rng((seed, epoch))
        offset = int(draw.integers(length))
        if shuffles_documents:
            return offset, ShuffledDocuments(stream, starts, draw)
        return offset, stream

    def read(row: int) -> np.ndarray:
        offset, text = epoch_text(row // num_rows)
        return text.read(offset + length * order(row), length + 1)

    return Rows(num_rows, read, note)


def bos(
    tokens: PreparedTokens, length: int, seed: int, shuffles_documents: bool
) -> Rows:
    """Begin each row of `length` + 1 tokens with a document, as in nanochat.

    Then add the longest document that fits, again and again. If no document fits, crop the shortest
    one to fill the row. The longest and the shortest are chosen from the next `AHEAD` documents in
    a random order, which `seed` determines. All epochs have the same rows in different orders. With
    `shuffles_documents`, each epoch instead packs the documents in another order.
    """
    stream, starts = find_documents(tokens, "data.packing=bos")
    _refuse_single(starts, "data.packing=bos")
    sizes = np.diff(starts, append=len(stream))

    @functools.lru_cache(1)
    def pack(epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `(starts, lengths, ends)`, arrays that describe the rows of an epoch.

        A row consists of pieces of documents. Piece i has `lengths[i]` tokens, beginning with the
        token `starts[i]` of the stream. Row r has the pieces from `ends[r]` to `ends[r + 1] - 1`.
        """
        draw = np.random.default_rng((seed, epoch))
        drawn = draw.permutation(len(starts))
        documents, lengths, ends = best_fit(sizes[drawn].tolist(), length + 1)
        return starts[drawn[documents]], lengths, ends

    _, lengths, ends = pack(0)
    cropped = 1 - lengths.sum() / len(stream)
    num_rows = len(ends) - 1
    order = shuffled(num_rows, seed)

    def read(row: int) -> np.ndarray:
        begins, lengths, ends = pack(row // num_rows if shuffles_documents else 0)
        # Every epoch has `num_rows` rows, so that a step's epoch follows from the step alone. If an
        # epoch packs into more rows, the last ones are left out. If it packs into fewer rows, the
        # first ones are read twice.
        number = order(row) % (len(ends) - 1)
        pieces = list[np.ndarray]()
        for piece in range(ends[number], ends[number + 1]):
            pieces.append(stream.read(int(begins[piece]), int(lengths[piece])))
        return np.concatenate(pieces)

    return Rows(num_rows, read, f"{cropped:.1%} of the tokens cropped")


def best_fit(
    sizes: Sequence[int], room: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack documents with `sizes` tokens into rows of `room` tokens, by the rules of `bos`.

    Return the integer arrays `(documents, lengths, ends)`. `documents` lists the indices of the
    documents, one row after another. `lengths` contains the number of tokens that are used from
    each of these documents. Row r has the entries from `ends[r]` to `ends[r + 1] - 1` of both
    arrays. A document of `room` or more tokens has its own row.
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


def pad(
    tokens: PreparedTokens, length: int, seed: int, shuffles_documents: bool = False
) -> Rows:
    """Put one document, or a part of a long document, in each row of up to `length` + 1 tokens.

    `token_batches.assemble` pads the rows. In each epoch, every token of the stream except the
    first is a target once, and the rows come in a new order, determined by `seed`.
    `shuffles_documents` is always False: the documents are shuffled anyway, so the config refuses
    the option with this packing.
    """
    stream, starts = find_documents(tokens, "data.packing=pad")
    begins = list[int]()
    sizes = list[int]()  # number of targets in each row
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
    return Rows(num_rows, read, f"{padded:.1%} of the positions padded")


PACKINGS = {"concat": concat, "bos": bos, "pad": pad}


def document_start(tokens: PreparedTokens, option: str) -> int:
    """Return the id of the end-of-text token, which begins each document.

    If the tokenizer has no such token, raise a UserError that names `option`.
    """
    eot = tokens.tokenizer.eot
    if eot is None:
        raise single_text(option)
    return eot


def single_text(option: str) -> UserError:
    """Return the UserError: `option` needs several documents, but no token separates documents."""
    return UserError(
        f"{option} needs several documents, but the corpus has no end-of-text token that would "
        "separate them",
        "Leave the option out",
    )


def find_documents(
    tokens: PreparedTokens, option: str
) -> tuple[TokenStream, np.ndarray]:
    """Return the training tokens, and the indices at which documents start, in ascending order.

    The indices are int64 `[num_documents]`: 0, and the index of each end-of-text token. If the
    tokenizer has no end-of-text token, raise a UserError that names `option`.
    """
    stream = tokens.stream("train")
    eot = document_start(tokens, option)
    indices = [np.zeros(1, np.int64)]
    for start, chunk in stream.chunks():
        indices.append(start + np.flatnonzero(chunk == eot))
    starts = np.concatenate(indices)
    # If the stream begins with an end-of-text token, index 0 occurs twice.
    return stream, starts[np.count_nonzero(starts == 0) - 1 :]


def _refuse_single(starts: np.ndarray, option: str) -> None:
    if len(starts) == 1:
        raise UserError(
            f"{option} needs several documents, but the training split has only one",
            "Leave the option out",
        )


def hashed(seed: int | tuple[int, int]) -> int:
    """Hash a seed to 32 bits, so that consecutive seeds become unrelated."""
    (state,) = np.random.SeedSequence(seed).generate_state(1)
    return int(state)


def shuffled(number: int, seed: int) -> Callable[[int], int]:
    """Return a function that maps a row's number in the run to an index below `number`.

    `number` is the number of rows in an epoch. Each epoch is another permutation of the indices,
    determined by `seed`. As in Grain's `shuffle`, an index is computed when it is needed, so that
    no list is stored.
    """
    # Epochs have consecutive seeds. Without the hash, runs with consecutive seeds would share
    # permutations.
    first = hashed(seed)

    def order(index: int) -> int:
        # The import takes most of a second.
        from grain.experimental import index_shuffle

        epoch, within = divmod(index, number)
        seed = (first + epoch) % 2**32
        return index_shuffle(within, number - 1, seed=seed, rounds=4)

    return order
