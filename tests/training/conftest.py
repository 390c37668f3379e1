"""Fixtures of the tests of training."""

import pytest

from gpt2.parallel import kernels
from tests.training.programs import break_gradient


@pytest.fixture
def breaking_norms(monkeypatch):
    """Break the gradient, but no activation, where the residual stream is large."""
    norm = kernels.norm

    def breaking_norm(x, *rest, **options):
        return norm(break_gradient(x), *rest, **options)

    monkeypatch.setattr(kernels, "norm", breaking_norm)
