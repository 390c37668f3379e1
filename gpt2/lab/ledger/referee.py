"""The referee: the validation loss of a run, without trust in the run's code.

The referee holds the validation split, and reveals it token by token to a process that runs the
code and the checkpoint of the run (answer.py). The referee receives the logits after each token
before it sends the next token, normalises the logits itself, and adds up the loss. The logits
therefore cannot depend on later tokens, and need not be normalised. The process could still read
the split from the disk; see docs/ledger.md.
"""

import itertools
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from gpt2.config import Config
from gpt2.data import Dataset, prepare_dataset
from gpt2.data.interfaces import Batch
from gpt2.lab.experiments.jobs import find_error
from gpt2.lab.experiments.processes import confined
from gpt2.lab.experiments.run_folder import Run
from gpt2.utils.launch import ALONE

ALL_ROWS = slice(None)
_SECONDS = 600.0  # time limit for all answers, in addition to ten times the run's time
_PIPE_BYTES = 1 << 20
# For each dtype, the largest difference between two measurements of one mean loss that rounding can
# explain, in nats per token. For dtypes that are not listed, it is 0.01.
TOLERANCES = {"float32": 1e-4}


class NoAnswerError(Exception):
    """The error for a run whose code does not compute valid logits. The message states why."""


class Score(NamedTuple):
    """The losses that the referee has measured for a run, in nats per token."""

    loss: float  # on the validation split
    own_loss: float  # on the text with which the run itself validates


class _Row(NamedTuple):
    """A row of validation tokens, and the losses that the referee has computed for it."""

    # A random number. The rows with the smallest numbers are predicted again.
    draw: float
    tokens: np.ndarray  # [T]
    targets: np.ndarray  # [T]
    nats: np.ndarray  # [T]


def score(run: Run, dataset: Dataset) -> Score:
    """Return the losses of a finished run on two validation splits.

    One is the validation split of `dataset`, which the run has not read. The other is the split on
    which the run validates itself.

    A second process of the run's code predicts a random half of the rows again (at most one batch),
    in a shuffled order. Raise a NoAnswerError if the losses of these rows have changed, which shows
    that the code predicts a row with the help of other rows, such as the row's continuation.
    """
    own = prepare_dataset(run.config.data)
    with _Answers(run) as answers:
        loss, rows = _measure(answers, dataset, run.config)
        own_loss, _ = _measure(answers, own, run.config)
        answers.end()
    # The batch has the same shape as the other batches, so that rounding is the same.
    tokens = np.zeros(
        (run.config.micro_batch_size, run.config.model.context_length), np.int32
    )
    targets = np.full_like(tokens, -1)
    expected = np.zeros(tokens.shape)
    for number, row in enumerate(rows):
        tokens[number] = row.tokens
        targets[number] = row.targets
        expected[number] = row.nats
    with _Answers(run) as answers:
        nats = answers.nats(tokens, targets)
        answers.end()
    errors = np.abs(nats - expected)[targets >= 0]
    tolerance = TOLERANCES.get(run.config.precision.compute, 0.01)
    if errors.mean() > tolerance or errors.max() > 10 * tolerance:
        raise NoAnswerError(
            "the logits of a row depend on the other rows of its batch. In another batch, the loss"
            f" of a token of the same row differs by up to {errors.max():.4f} nats"
        )
    return Score(loss, own_loss)


def _measure(
    answers: "_Answers", dataset: Dataset, config: Config
) -> tuple[float, list[_Row]]:
    """Return the loss on a validation split, and a random half of its rows (at most one batch).

    The caller predicts the returned rows again, to find code that predicts a row with the help of
    the next row, its continuation. Only half of the rows are returned, so that the next row is
    often missing, and the losses of such code change.
    """
    parts, _ = dataset.open(config).validation(ALL_ROWS)
    random = np.random.default_rng()
    rows = list[_Row]()
    num_rows = 0
    loss = 0.0
    for weight, batches in parts.values():
        total = 0.0
        count = 0
        for batch in batches:
            for tokens, targets in split_documents(batch):
                nats = answers.nats(tokens, targets)
                total += nats.sum()
                count += int(np.count_nonzero(targets >= 0))
                is_row = (targets >= 0).any(1)
                num_rows += int(is_row.sum())
                draws = random.random(len(tokens))
                every = map(_Row, draws, tokens, targets, nats)
                rows += itertools.compress(every, is_row)
                rows = sorted(rows, key=lambda row: row.draw)[: len(tokens)]
        loss += weight * total / count
    return loss, rows[: max(1, num_rows // 2)]


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

    def __init__(self, run: Run):
        self._log = run.folder / "answers.txt"
        self._vocab_size = run.config.model.vocab_size
        limit = _SECONDS + 10 * run.outcome().seconds
        self._deadline = time.monotonic() + limit
        workdir = str(run.workdir.absolute())
        module = "gpt2.lab.ledger.answer"
        command = [sys.executable, "-P", "-m", module, workdir]
        variables = {ALONE: "1", "PYTHONPATH": str(run.source.absolute())}
        # In a sandbox, this folder is the only folder to which the process can write. The next
        # process gets another folder, so it cannot read what this process has written.
        self._output = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                confined(command, run.folder, Path(self._output.name)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                pipesize=_PIPE_BYTES,
                env=os.environ | variables,
                start_new_session=True,  # Ctrl-C does not reach the child
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self._output.cleanup()

    def nats(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the cross-entropy of each target, `[B, T]`, in nats, and 0 for targets of -1."""
        nats = np.zeros(targets.shape)
        has_target = (targets >= 0).any(0)
        if not has_target.any():
            return nats
        rows = len(tokens)
        length = 1 + int(np.flatnonzero(has_target)[-1])
        self._send(np.array([rows, length]))
        self._send(tokens[:, 0])
        for position in range(length):
            answer = self._receive(4 * rows * self._vocab_size)
            if position + 1 < length:  # the child computes the next logits meanwhile
                self._send(tokens[:, position + 1])
            target = targets[:, position]
            logits = np.frombuffer(answer, np.float32).reshape(rows, -1)
            logits = logits[target >= 0].astype(np.float64)
            if not np.isfinite(logits).all():
                raise NoAnswerError("the logits are not finite")
            # The maximum is subtracted from the logits, instead of being added to the normaliser as
            # in logsumexp. In float64, 1e30 + log(V) is 1e30, so the sum would lose log(V), and the
            # probabilities would add up to more than 1.
            logits -= logits.max(axis=1, keepdims=True)
            chosen = np.take_along_axis(logits, target[target >= 0, None], axis=1)
            normaliser = np.log(np.exp(logits).sum(axis=1))
            nats[target >= 0, position] = normaliser - chosen[:, 0]
        return nats

    def end(self) -> None:
        """Close the process's standard input.

        Raise a NoAnswerError if the process has written too many logits.
        """
        self.process.stdin.close()  # type: ignore[union-attr]
        if self._read(1):
            raise NoAnswerError("the logits do not have the shape [rows, vocabulary]")

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
            return NoAnswerError(
                "the run's process took too long to compute the logits"
            )
        log = self._log.read_text(errors="replace")
        reason = find_error(log) or "the process ended without an error message"
        return NoAnswerError(
            f"the run's process did not send logits to the referee: {reason}"
        )
