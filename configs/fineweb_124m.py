"""Track 3 of modded-nanogpt: reach a loss of 3.28 on FineWeb with 12 layers of width 768.

    python train.py --config=configs/fineweb_124m.py:h100-8
    python train.py --config=configs/fineweb_124m.py:h100-8+modern

The word after the colon is a machine in configs/gpt2_124m.py. `+modern` adds Muon and value
residuals, as in configs/modern.py. A step has 524,288 tokens.
Data: 3.9B tokens of FineWeb, pre-tokenized on the hub: 39 files of 0.2 GB for training, and one for
validation.
Expect: nobody has run this config here. docs/recipes.md lists the planned memory and time on v5e-8,
h100-1 and h100-8. The original reaches a loss of 3.279 after 5,625 steps of AdamW, and 3.278 after
3,600 steps of Muon, each in one run (results 2 and 1 in records/track_3_optimization of
github.com/KellerJordan/modded-nanogpt).

Unlike the original, this model has no norm after the embedding and no bias in the head. Its soft
cap of logits is a tanh, and the norms of queries and keys have scales. The embedding and the head
also have weight decay. The original trains the embedding with a learning rate of 0.3, and the head
with 1/320. Here, the embedding has a lower learning rate, because no norm follows the embedding.
"""

from ml_collections import ConfigDict

from configs import gpt2_124m

SHARDS = "hf://datasets/kjj0/fineweb10B-gpt2/fineweb_*_0000[0-3]*.bin"


def get_config(word: str = "h100-8") -> ConfigDict:
    """Return the options of this recipe for `word`, which is `MACHINE` or `MACHINE+modern`.

    MACHINE is one of `gpt2_124m.MACHINES`; h100-8 if it is left out. Raise a ValueError for any
    other word.
    """
    machine, _, variant = word.partition("+")
    config = gpt2_124m.get_config(machine or "h100-8")
    config.data.corpus = f"tokens:{SHARDS}"
    config.model.update(
        num_heads=6,
        norm="rmsnorm",
        position="rope",
        rope_base=1024.0,
        rope_share=0.5,
        qk_norm=True,
        activation="relu_squared",
        logit_softcap=15.0,
        tie_embeddings=False,
        init="fan_in",
        zero_init_projections=True,
    )
    config.optim.update(
        learning_rate=1.5e-3,
        layer_rates="wte=10,lm_head=2,(scale|bias)$=6.7",
        eps=1e-10,
        schedule="wsd",
        warmup_steps=250,
        decay_fraction=0.7,
        clip_norm=0.0,
    )
    config.train.update(num_steps=5625, eval_every=125)
    if variant == "modern":
        config.model.value_residual = True
        config.optim.update(
            name="muon",
            # Muon's updates have a root mean square of 0.2 here, so this rate corresponds to the
            # original's rate of 0.02.
            learning_rate=3.6e-3,
            adam_learning_rate=1e-2,
            layer_rates="lm_head=0.3",
        )
        config.train.num_steps = 3600
    elif variant:
        raise ValueError(f"+{variant} is not a variant; the only variant is +modern")
    return config
