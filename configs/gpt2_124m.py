"""GPT-2 124M: nanoGPT's recipe or, given the name of a machine, llm.c's shorter recipe.

    python train.py --config=configs/gpt2_124m.py
    python train.py --config=configs/gpt2_124m.py:v5e-8

Devices: each of eight devices of 80 GB trains on 60 sequences, without gradient accumulation
(accumulate_steps is 1). According to `gpt2.lab.plan --chips=a100-8`, each needs 27.6 GiB; this was
not tried. For one such device, add `--config.train.accumulate_steps=8`. Devices of 40 GB train on
12 sequences at a time, as in nanoGPT, and each needs 9.0 GiB. For eight of them, add
`--config.train.accumulate_steps=5`, and for one of them `--config.train.accumulate_steps=40`.
Data: OpenWebText (9.0B tokens). Its Parquet files need 24 GB in the cache. Without a network,
`--config.data.corpus=pystdlib` trains on the source of Python's standard library.
Expect: a validation loss of about 2.85 after 600,000 steps, four days on eight A100s. nanoGPT
published this loss for its model, which has no biases. OpenAI's weights of this size have a loss of
3.12 on the same text.
With the name of a machine, such as v5e-8, the config has 18,865 steps of 524,288 tokens of FineWeb,
in micro-batches that fit into the machine's memory. llm.c published a loss of 3.29 for this recipe.
docs/recipes.md explains how to get the text, and lists how long the training takes on each machine.
"""

from ml_collections import ConfigDict

from configs import default

# All files of the data set, at the commit that stores them as Parquet. The hub's automatic Parquet
# copy, which `hf:` reads, may contain only the first part of the data.
OPENWEBTEXT = (
    "hf://datasets/Skylion007/openwebtext@7577b918bd30b25df0b88bb718dc8a6c80cb619b"
    "/data/*.parquet"
)
_FEW_KERNELS = {
    "memory.scan_layers": True,
    "memory.scan_unroll": 12,
}  # docs/performance.md shows how many kernels these options save
_TURING = {"precision.compute": "float16"}  # Turing GPUs have no bfloat16
# Machine, named as in `gpt2.lab.plan --chips` -> the number of devices, the number of sequences in
# a device's part of a micro-batch, and additional options.
MACHINES = {
    "v3-8": (8, 4, {}),
    "v5e-8": (8, 16, {}),
    "v5e-1": (1, 16, {}),
    "v6e-1": (1, 32, {}),
    "t4-1": (1, 4, _FEW_KERNELS | _TURING),
    "l4-1": (1, 16, _FEW_KERNELS),
    "4090-1": (1, 16, _FEW_KERNELS),
    "h100-1": (1, 64, _FEW_KERNELS),
    "h100-8": (8, 64, _FEW_KERNELS),
}


def get_config(machine: str = "") -> ConfigDict:
    """Return the options of llm.c's recipe for a machine in `MACHINES`.

    If `machine` is empty, return the options of nanoGPT's recipe. Raise a ValueError if there is no
    recipe for the machine.
    """
    config = default.get_config()
    config.precision.compute = "bfloat16"
    if not machine:
        config.data.corpus = f"parquet:{OPENWEBTEXT}#text"
        config.logging.reference = "nanogpt-124m"
        return config
    if machine not in MACHINES:
        raise ValueError(
            f"there is no recipe for the machine {machine}; choose one of {', '.join(MACHINES)}"
        )
    devices, sequences, options = MACHINES[machine]
    parts = 512 // (devices * sequences)
    config.data.update(corpus="tokens:fineweb10B/*.bin", batch_size=512)
    config.optim.update(end_fraction=0.0, warmup_steps=700)
    # llm.c validates on the first 20 batches of the split.
    config.train.update(num_steps=18_865, accumulate_steps=parts, eval_batches=20)
    config.logging.reference = "llmc-124m"
    config.update_from_flattened_dict(options)
    return config
