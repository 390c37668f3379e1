"""A character-level GPT on the works of Shakespeare, as in nanoGPT's train_shakespeare_char.

    python train.py --config=configs/shakespeare_char.py --config.data.corpus=text:input.txt

Data: tiny_shakespeare's input.txt (1.1 MB), which you provide.
Expect: a best validation loss of 1.4697, in minutes on one A100 (published by nanoGPT).

The command below trains nanoGPT's smaller model on two CPU cores, with twice nanoGPT's learning
rate. Expect: a validation loss of 1.82 after 2000 steps (measured here). With nanoGPT's rate of
1e-3 the loss is 1.91, the mean of 20 seeds (docs/ablations.md). nanoGPT published 1.88.

    python train.py --config=configs/shakespeare_char.py --config.data.corpus=text:input.txt \
        --config.model.num_layers=4 --config.model.num_heads=4 --config.model.embed_dim=128 \
        --config.model.context_length=64 --config.model.dropout=0.0 --config.data.batch_size=12 \
        --config.train.num_steps=2000 --config.optim.learning_rate=2e-3 \
        --config.optim.end_fraction=0.05
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    """Return the options of this recipe, nested by group."""
    config = default.get_config()
    config.model.update(
        context_length=256,
        num_layers=6,
        num_heads=6,
        embed_dim=384,
        dropout=0.2,
        bias=False,
    )
    config.data.update(
        corpus="text:input.txt", tokenizer="char", batch_size=64, val_fraction=0.1
    )
    config.optim.update(learning_rate=1e-3, warmup_steps=100, beta2=0.99)
    config.train.update(num_steps=5000, eval_every=250, checkpoint_every=250)
    config.parallel.cpu_devices = 2
    return config
