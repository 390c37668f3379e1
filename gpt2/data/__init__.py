"""Text -> documents -> tokens on disk -> batches.

datasets.py                 `prepare_dataset` turns the options of `data.` into a `Dataset`
interfaces.py               `Corpus`, `Dataset`, `Source`
readers/                    a reader for each prefix of `data.corpus`, which opens a `Corpus`
preparing/                  documents -> tokens of the training and validation split in a folder
loading/packing.py          tokens -> rows
loading/document_order.py   a different order of the documents in each epoch
loading/token_batches.py    rows -> `batch(step)`, a function of the seed and the step
loading/user_batches.py     batches that a user's function returns
"""

from gpt2.data.datasets import prepare_dataset
from gpt2.data.interfaces import Dataset

__all__ = ["Dataset", "prepare_dataset"]
