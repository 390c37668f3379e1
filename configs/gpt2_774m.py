"""GPT-2 774M on OpenWebText.

    python train.py --config=configs/gpt2_774m.py

Devices: each of eight devices of 40 GB trains on 12 sequences at a time. According to
`gpt2.lab.plan --chips=a100-8`, each needs 26.6 GiB; this was not tried. For one such device, add
`--config.train.accumulate_steps=40`.
Data: as for configs/gpt2_124m.py.
Recipe: the learning rate is the same as for llm.c's 774M.
Expect: the loss was not measured here. OpenAI's weights of this size have a loss of 2.67 on
OpenWebText (nanoGPT's README).
"""

from ml_collections import ConfigDict

from configs import gpt2_124m


def get_config() -> ConfigDict:
    """Return the options of this recipe, nested by group."""
    config = gpt2_124m.get_config()
    config.logging.reference = "openai-openwebtext"
    config.model.update(num_layers=36, num_heads=20, embed_dim=1280)
    config.optim.learning_rate = 2.5e-4
    config.train.update(accumulate_steps=5)
    config.memory.update(remat="dots", scan_layers=True)
    return config
