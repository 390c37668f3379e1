"""muP: activations move alike at every width, and only under muP (tests/coordinates.py)."""

import pytest

from tests import coordinates


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", coordinates.OPTIMIZERS)
def test_activations_of_every_width_move_alike_under_mup_and_grow_without(optimizer):
    powers = {
        is_mup: coordinates.growth(
            {width: coordinates.movement(width, is_mup, optimizer) for width in (32, 64, 128)}
        )
        for is_mup in (False, True)
    }
    branches = [name for name in powers[True] if name != "logits"]
    assert len(branches) == 4
    assert all(abs(power) < 0.4 for power in powers[True].values()), powers[True]
    # Adam's updates line up with their inputs; Muon's grow by the root of the width, and the
    # products of two such kernels in a branch by the width.
    least = 1.0 if optimizer == "adamw" else 0.7
    assert all(powers[False][name] > least for name in branches), powers[False]
