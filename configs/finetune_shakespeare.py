r"""Fine-tune OpenAI's GPT-2 on Shakespeare, as in nanoGPT's config of the same name.

    python train.py --config=configs/finetune_shakespeare.py \
        --config.train.init_from=hf:DIR --config.data.corpus=text:input.txt

Data: tiny_shakespeare's input.txt, which you provide. The last tenth is the validation split.
Weights: DIR is a directory of GPT-2 weights in Hugging Face's format, which determine the size of
the model. nanoGPT uses the weights with 1558M parameters.

Recipe: the same as nanoGPT's, 20 steps of 32 x 1024 tokens at a constant learning rate of 3e-5. The
result was not measured here.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    """Return the options of this recipe, nested by group."""
    config = default.get_config()
    config.data.update(dict(corpus="text:input.txt", batch_size=32, val_fraction=0.1))
    config.optim.update(
        dict(
            learning_rate=3e-5,
            schedule="constant",
            warmup_steps=0,
        )
    )
    config.train.update(
        dict(
            init_from="hf:DIR",
            num_steps=20,
            accumulate_steps=32,
            log_every=1,
            eval_every=5,
            checkpoint_every=5,
        )
    )
    return config
