"""GPT-2 1558M on OpenWebText.

    python train.py --config=configs/gpt2_1558m.py

Devices: each of eight devices of 16 GB trains on 8 sequences at a time. According to
`gpt2.lab.plan --chips=a100-8`, each needs 5.9 GiB; this was not tried. On eight devices of 40 GB,
`--config.parallel.fsdp_gather=step` sends less data, and each device needs 23.0 GiB. For one device
of 80 GB, add `--config.train.accumulate_steps=128`. It then needs 32.4 GiB.
Data: as for configs/gpt2_124m.py.
Recipe: the learning rate, the batch of 1,048,576 tokens and the 32,000 steps are the same as for
llm.c's 1558M.
Expect: the loss was not measured here. OpenAI's weights of this size have a loss of 2.54 on
OpenWebText (nanoGPT's README).
"""

from ml_collections import ConfigDict

from configs import gpt2_124m


def get_config() -> ConfigDict:
    """Return the options of this recipe, nested by group."""
    config = gpt2_124m.get_config()
    config.logging.reference = "openai-openwebtext"
    config.model.update(num_layers=48, num_heads=25, embed_dim=1600)
    config.optim.update(learning_rate=6e-4, end_fraction=0.0, warmup_steps=700)
    config.data.batch_size = 1024
    config.train.update(num_steps=32_000, accumulate_steps=16)
    config.memory.update(remat="full", scan_layers=True)
    config.parallel.update(data=1, fsdp=-1, fsdp_gather="layer")
    return config
