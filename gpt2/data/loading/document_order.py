"""The documents of a training split, joined in a random order: `data.shuffle_documents`."""

import numpy as np

from gpt2.data.tokens import TokenStream


class ShuffledDocuments:
    """A stream of tokens whose documents are joined in a random order.

    Args:
        stream: the tokens.
        starts: the indices in `stream` at which documents start, int64 `[num_documents]`.
        draw: the random number generator that determines the order.
    """

    def __init__(
        self, stream: TokenStream, starts: np.ndarray, draw: np.random.Generator
    ):
        self._stream = stream
        order = draw.permutation(len(starts))
        sizes = np.diff(starts, append=len(stream))[order]
        # For each document in the new order, the index at which the document ends.
        self._ends = np.cumsum(sizes)
        # For each document, the number to add to an index in the new order to get the index of the
        # same token in `stream`.
        self._shifts = starts[order] - (self._ends - sizes)

    def read(self, start: int, length: int) -> np.ndarray:
        """Return `length` tokens from the index `start` of this stream on, int32 `[length]`.

        At the end of the stream, return fewer.
        """
        first = np.searchsorted(self._ends, start, side="right")
        last = np.searchsorted(self._ends, start + length)
        documents = slice(first, last + 1)
        pieces = [np.empty(0, np.int32)]
        for end, shift in zip(
            self._ends[documents].tolist(),
            self._shifts[documents].tolist(),
            strict=True,
        ):
            stop = min(end, start + length)
            pieces.append(self._stream.read(start + shift, stop - start))
            length -= stop - start
            start = stop
        return np.concatenate(pieces)
