"""GPT-2 at the quickstart's size, with the four changes that the study supports.

    python train.py --config=configs/modern.py

Data, batch and number of steps are the quickstart's, so that the two compare.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    """Returns the options."""
    config = quickstart.get_config()
    config.model.update(position="rope", value_residual=True)
    config.optim.update(name="muon", adam_learning_rate=4e-2)
    return config
