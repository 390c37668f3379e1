r"""Fine-tunes OpenAI's GPT-2 on Shakespeare, after nanoGPT's config of the same name.

    python train.py --config=configs/finetune_shakespeare.py \
        --config.train.init_from=hf:DIR --config.data.corpus=text:input.txt

Data: tiny_shakespeare's input.txt, which you provide. Its last tenth is held out for validation.
Weights: DIR is a directory of GPT-2 weights in Hugging Face's format, and the model has their
shape. nanoGPT takes the weights of 1558M parameters.

Recipe: nanoGPT's, 20 steps of 32 x 1024 tokens at a constant learning rate of 3e-5. Its result was
not measured here.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    """Return the options."""
    config = default.get_config()
    config.data.update(dict(corpus="text:input.txt", batch_size=32, val_fraction=0.1))
    config.optim.update(
        dict(
            learning_rate=3e-5,
            schedule="constant",
            warmup_steps=0,
            beta2=0.99,
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
