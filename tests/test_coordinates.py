"""muP: activations move alike at every width, and only under muP (tests/coordinates.py)."""

import pytest

from tests import coordinates


@pytest.mark.thorough
def test_activations_of_every_width_move_alike_under_mup_and_grow_without():
    powers = {
        is_mup: coordinates.growth(
            {width: coordinates.movement(width, is_mup) for width in (32, 64, 128)}
        )
        for is_mup in (False, True)
    }
    branches = [name for name in powers[True] if name != "logits"]
    assert len(branches) == 4
    assert all(abs(power) < 0.4 for power in powers[True].values()), powers[True]
    assert all(powers[False][name] > 1 for name in branches), powers[False]
