"""What a training loss may have beside cross-entropy: a file each, and their table.

Each is asked for by options of `loss.`; it goes by deleting its file, its row here and its options.
"""

from gpt2.config import LossConfig
from gpt2.model.losses.ahead import Ahead
from gpt2.model.losses.base import LossIngredient, Weight
from gpt2.model.losses.z_loss import ZLoss

LOSSES: tuple[type[LossIngredient], ...] = (
    Ahead,
    ZLoss,
)


def loss_ingredients(options: LossConfig) -> tuple[LossIngredient, ...]:
    """Returns what the options ask for; plain cross-entropy has none."""
    return tuple(kind(options) for kind in LOSSES if kind.is_wanted(options))
