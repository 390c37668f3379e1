"""GPT-2 of the quickstart's size with what has been found since, each part measured here.

    python train.py --config=configs/modern.py

Data, batch and number of steps are the quickstart's, so that the two compare.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    """Returns the options."""
    config = quickstart.get_config()
    config.model.update(
        position="rope",
        qk_norm=True,
        activation="relu_squared",
        embedding_skip=True,
        value_residual=True,
    )
    config.optim.update(name="muon", adam_learning_rate=4e-2)
    return config
