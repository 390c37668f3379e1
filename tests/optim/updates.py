"""Options of an optimizer, and the updates that it computes."""

import numpy as np

from gpt2.utils.scan import in_layout
from tests.helpers import by_name, configured


def optim_of(text=""):
    """Return the options of `optim` with those of a text."""
    return configured(f"learning_rate=1e-2 warmup_steps=2 {text}", "optim.").optim


def unrolled(tree):
    """Return the leaves of a tree in either layout by name, unrolled, as float64."""
    leaves = by_name(in_layout(tree, scanned=False))
    return {name: np.float64(leaf) for name, leaf in leaves.items()}


def difference(actual, expected):
    """Return the largest difference of an entry, divided by the largest entry of its array."""
    assert actual.keys() == expected.keys()
    differences = []
    for name, array in expected.items():
        largest = np.abs(array).max()
        differences.append(np.abs(actual[name] - array).max() / largest)
    return max(differences)
