"""The referee: the validation loss of a run, without trust in the run's code.

The referee holds the validation split, and reveals it token by token to a process that runs the
code and the checkpoint of the run (answer.py). The referee receives the logits after each token
before it sends the next token, normalises the logits itself, and adds up the loss. The logits
therefore cannot depend on later tokens, and need not be normalised. The process could still read
the split from the disk; see docs/ledger.md.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scipy  # its submodules are imported when they are used

from gpt2.data import prepare_dataset
from gpt2.data.interfaces import Batch
from gpt2.lab.experiments.jobs import find_error
from gpt2.lab.experiments.run_folder import Run
from gpt2.parallel.distributed import ALONE

ALL_ROWS = slice(None)
_SECONDS = 600.0  # time limit for all answers, in addition to ten times the run's time
_PIPE_BYTES = 1 << 20


class NoAnswerError(Exception):
    """The code of a run did not answer, or its answer is not finite or has the wrong shape."""


def score(run: Run) -> float:
    """Return the validation loss of a finished run, in nats per token."""
    config = run.config
    parts, _ = prepare_dataset(config.data).open(config).validation(ALL_ROWS)
    limit = _SECONDS + 10 * run.outcome().seconds
    answers = _Answers(run.source, run.folder, config.model.vocab_size, limit)
    loss = 0.0
    try:
        for weight, batches in parts.values():
            nats = 0.0
            count = 0
            for batch in batches:
                for tokens, targets in split_documents(batch):
                    nats += answers.loss(tokens, targets)
                    count += int(np.count_nonzero(targets >= 0))
            loss += weight * nats / count
        answers.end()
    finally:
        answers.process.kill()
        answers.process.wait()
    return loss


def split_documents(batch: Batch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of tokens and targets, both `[B, T]`, with one document per row.

    In the given batch, a row with segments packs several documents, which do not attend to each
    other. A batch without segments is yielded unchanged.
    """
    tokens = batch["tokens"]
    targets = batch["targets"]
    if "segments" not in batch:
        yield tokens, targets
        return
    documents = list[tuple[np.ndarray, np.ndarray]]()
    for row, segments in enumerate(batch["segments"]):
        cuts = np.flatnonzero(np.diff(segments)) + 1
        parts = np.split(tokens[row], cuts), np.split(targets[row], cuts)
        documents += zip(*parts, strict=True)
    for first in range(0, len(documents), len(tokens)):
        some = np.zeros_like(tokens)
        some_targets = np.full_like(targets, -1)
        for row, (text, following) in enumerate(documents[first:][: len(tokens)]):
            some[row, : len(text)] = text
            some_targets[row, : len(text)] = following
        yield some, some_targets


class _Answers:
    """A process that computes logits with the model of a run, on request."""

    def __init__(self, source: Path, folder: Path, vocab_size: int, limit: float):
        self._log = folder / "answers.txt"
        self._vocab_size = vocab_size
        self._deadline = time.monotonic() + limit
        command = ["-P", "-m", "gpt2.lab.ledger.answer", str(folder.absolute() / "run")]
        variables = {ALONE: "1", "PYTHONPATH": str(source.absolute())}
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                pipesize=_PIPE_BYTES,
                env=os.environ | variables,
                start_new_session=True,  # Ctrl-C reaches only this process
            )

    def loss(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """Return the sum of the cross-entropies of `[B, T]`, in nats. Ignore targets of -1."""
        has_target = (targets >= 0).any(0)
        if not has_target.any():
            return 0.0
        rows = len(tokens)
        length = 1 + int(np.flatnonzero(has_target)[-1])
        self._send(np.array([rows, length]))
        self._send(tokens[:, 0])
        nats = 0.0
        for position in range(length):
            answer = self._receive(4 * rows * self._vocab_size)
            if position + 1 < length:  # the child computes the next logits meanwhile
                self._send(tokens[:, position + 1])
            target = targets[:, position]
            logits = np.frombuffer(answer, np.float32).reshape(rows, -1)
            logits = logits[target >= 0].astype(np.float64)
            if not np.isfinite(logits).all():
                raise NoAnswerError("its logits are not finite")
            chosen = np.take_along_axis(logits, target[target >= 0, None], axis=1)
            nats += (scipy.special.logsumexp(logits, axis=1) - chosen[:, 0]).sum()
        return nats

    def end(self) -> None:
        """End the process's input. Raise an error if the process has written too much."""
        self.process.stdin.close()  # type: ignore[union-attr]
        if self._read(1):
            raise NoAnswerError("its logits do not have the shape [rows, vocabulary]")

    def _send(self, numbers: np.ndarray) -> None:
        try:
            self.process.stdin.write(numbers.astype(np.int32).tobytes())  # type: ignore[union-attr]
        except BrokenPipeError:
            raise self._error() from None

    def _receive(self, size: int) -> bytes:
        answer = bytearray()
        while len(answer) < size:
            part = self._read(size - len(answer))
            if not part:
                raise self._error()
            answer += part
        return bytes(answer)

    def _read(self, size: int) -> bytes:
        """Return 1 to `size` bytes, or no bytes if the process has ended or takes too long."""
        output = self.process.stdout.fileno()  # type: ignore[union-attr]
        seconds = max(0.0, self._deadline - time.monotonic())
        ready, _, _ = select.select([output], [], [], seconds)
        return os.read(output, size) if ready else b""

    def _error(self) -> NoAnswerError:
        if time.monotonic() > self._deadline:
            return NoAnswerError("it took too long to answer the referee")
        reason = find_error(self._log.read_text(errors="replace"))
        return NoAnswerError(f"it did not answer the referee: {reason}")
