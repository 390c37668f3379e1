"""GPT-2 355M on OpenWebText.

    python train.py --config=configs/gpt2_355m.py

Devices: each of eight devices of 40 GB trains on 10 sequences at a time. According to
`gpt2.lab.plan --chips=a100-8`, each needs 16.4 GiB; this was not tried. For one such device, add
`--config.train.accumulate_steps=48`.
Data: as for configs/gpt2_124m.py.
Recipe: the learning rate is the same as for llm.c's 350M.
Expect: the loss was not measured here. OpenAI's weights of this size have a loss of 2.84 on
OpenWebText (nanoGPT's README).
"""

from ml_collections import ConfigDict

from configs import gpt2_124m


def get_config() -> ConfigDict:
    """Return the options of this recipe, nested by group."""
    config = gpt2_124m.get_config()
    config.logging.reference = "openai-openwebtext"
    config.model.update(num_layers=24, num_heads=16, embed_dim=1024)
    config.optim.learning_rate = 3e-4
    config.train.update(accumulate_steps=6)
    return config
