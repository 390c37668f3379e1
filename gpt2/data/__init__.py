"""Text -> documents -> tokens on disk -> batches.

datasets.py                 `prepare`: from the options of `data.` to a `Dataset`
interfaces.py               `Corpus`, `Dataset`, `Source`
readers/                    a corpus prefix each: where documents or tokens come from
preparing/                  documents -> tokens in a folder, split, encoded once
loading/packing.py          tokens -> rows
loading/token_batches.py    rows -> `batch(step)`, a function of the seed and the step
loading/user_batches.py     batches that a user's function returns
"""

from gpt2.data.datasets import prepare
from gpt2.data.interfaces import Dataset

__all__ = ["Dataset", "prepare"]
