"""Prepared tokens and their batches, for tests of rows and their order."""

import collections
from types import SimpleNamespace

import numpy as np

from gpt2.config.shapes import ShapeSchedule, StepShape
from gpt2.data.loading.token_batches import TokenDataset
from gpt2.data.tokens import PreparedTokens, Split, TokenWriter

EOT = 99_999


def stored(directory, train, validation=(1, 2, 3), eot=EOT, num_files=1):
    """Stores tokens as a prepared corpus, with `num_files` files of training tokens."""
    directory.mkdir(exist_ok=True)
    splits = {"train": Split(), "validation": Split()}
    writer = TokenWriter(directory, 100_000, splits)
    for part in np.array_split(train, num_files):
        writer.append("train", part)
        writer.flush()
    writer.append("validation", np.asarray(validation))
    writer.flush()
    tokenizer = SimpleNamespace(eot=eot)
    return PreparedTokens(directory, tokenizer, splits, writer.dtype.name)


def open_batches(
    parts,
    *,
    batch_size,
    context_length,
    seed=0,
    packing="concat",
    document_mask=False,
    shuffle_documents=False,
    shapes=None,
):
    """Returns the batches of a run on prepared tokens."""
    shapes = shapes or ShapeSchedule({0: StepShape(batch_size, context_length, 0)})
    config = SimpleNamespace(
        seed=seed,
        data=SimpleNamespace(
            packing=packing,
            document_mask=document_mask,
            shuffle_documents=shuffle_documents,
        ),
        model=SimpleNamespace(context_length=context_length),
        train=SimpleNamespace(eval_batches=0, accumulate_steps=1),
        micro_batch_size=batch_size,
        shapes=shapes,
    )
    return TokenDataset(None, parts).open(config)


def single(tokens):
    """Returns the parts of a dataset of one corpus."""
    return TokenDataset.single(tokens).parts


def join_processes(read, batch_size, size):
    """Returns a batch of which each process reads `size` rows by `read(rows)`."""
    joined = collections.defaultdict(list)
    for start in range(0, batch_size, size):
        for name, rows in read(slice(start, start + size)).items():
            joined[name].extend(rows)
    return {name: np.stack(rows) for name, rows in joined.items()}
