"""GPT-2 124M on OpenWebText, nanoGPT's recipe.

    python train.py --config=configs/gpt2_124m.py

Devices: the batch is one micro-batch, so that any batch size works. Eight devices of 80 GB take
60 sequences each: 51.5 GiB by `--plan --plan_devices=8`, not tried there. For one such device add
`--config.train.accumulate_steps=8`. Devices of 40 GB take nanoGPT's 12 sequences at a time
(10.2 GiB): add `--config.train.accumulate_steps=5` for eight, `=40` for one.
Data: OpenWebText (9.0B tokens). Without a network, `--config.data.corpus=pystdlib` trains on the
source of Python's standard library.
Expect: validation loss about 2.85 after 600,000 steps, four days on eight A100s. nanoGPT published
this figure for its model, which lacks biases. OpenAI's weights of this size score 3.12 on the same
text.
llm.c's shorter recipe: learning rate 6e-4 to 0, 700 warm-up steps, 18,865 steps of 524,288 tokens.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    """Returns the options: the defaults are this model's."""
    config = default.get_config()
    config.data.corpus = "hf:Skylion007/openwebtext#text"
    config.precision.compute = "bfloat16"
    return config
