"""Every option once, with its meaning and unit. Other configs start from this one and change it.

An option set here is a default, not advice: the values are GPT-2 124M's, with the training recipe
that nanoGPT and llm.c share.
"""

from ml_collections import ConfigDict

# The names to choose from, for options that have a fixed set of them.
CHOICES = {
    "model.activation": ("gelu_tanh", "gelu", "relu", "relu_squared", "silu", "swiglu"),
    "model.norm": ("layernorm", "rmsnorm"),
    "model.position": ("learned", "rope", "none"),
    "model.attention": ("auto", "reference", "xla", "blocked", "cudnn", "splash"),
    "precision.compute": ("float32", "bfloat16", "float16"),
    "optim.name": ("adamw",),
    "optim.schedule": ("cosine", "linear", "constant", "wsd"),
    "parallel.backend": ("pjit", "pmap"),
    "memory.remat": ("none", "full", "dots", "dots_no_batch"),
}


def get_config() -> ConfigDict:
    """Returns the full tree of options."""
    config = ConfigDict()
    config.seed = 0  # below 2**32; data order, initialisation, dropout and samples follow from it

    config.model = ConfigDict(
        dict(
            vocab_size=0,  # tokens; 0: as many as the tokenizer has
            context_length=1024,  # tokens
            num_layers=12,
            num_heads=12,
            embed_dim=768,
            mlp_ratio=4,  # MLP width over embed_dim
            dropout=0.0,  # probability, on embeddings, attention weights and residual branches
            bias=True,  # in linear layers and norms
            tie_embeddings=True,  # the output head is the token embedding
            activation="gelu_tanh",  # gelu is the exact form; swiglu gates with a third linear map
            norm="layernorm",
            position="learned",
            qk_norm=False,  # normalise queries and keys per head (RMS, no scale)
            logit_softcap=0.0,  # c * tanh(logits / c) before the loss; 0: off
            attention="auto",  # blocked is for CPUs, cudnn for GPUs, splash for TPUs
        )
    )
    config.precision = ConfigDict(
        dict(
            params="float32",  # of stored parameters and optimizer state; no other type works
            compute="float32",  # float16 comes with dynamic loss scaling
        )
    )
    config.data = ConfigDict(
        dict(
            corpus="pystdlib",  # see docs/data.md for every prefix
            tokenizer="gpt2",  # gpt2, byte, char, bpe:SIZE, or a path to a tokenizer.json
            data_dir="",  # prepared corpora; empty: $GPT2_DATA_DIR, else ~/.cache/gpt2-jax
            batch_size=480,  # sequences per optimizer step, over all devices and micro-batches
            val_fraction=0.005,  # share held out for validation; docs/data.md says of what
            document_mask=False,  # attend only within a document
        )
    )
    config.optim = ConfigDict(
        dict(
            name="adamw",
            learning_rate=6e-4,  # peak, after the warm-up
            schedule="cosine",  # wsd: warm-up, stable, decay over the last fifth
            warmup_steps=2000,
            end_learning_rate=6e-5,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,  # on kernels and embeddings, not on biases and norms
            clip_norm=1.0,  # global gradient norm; 0: off
        )
    )
    config.train = ConfigDict(
        dict(
            num_steps=600_000,  # optimizer steps
            accumulate_steps=1,  # micro-batches per optimizer step
            log_every=10,  # steps
            eval_every=1000,  # steps; 0: only at the end
            eval_batches=0,  # batches per validation; 0: the whole split, which bits per byte need
            checkpoint_every=1000,  # steps; 0: only at the end
            keep_checkpoints=1,  # number of newest checkpoints to keep, beside the best
            init_from="",  # hf:DIR, run:DIR or run:DIR@STEP; empty: from scratch
        )
    )
    config.parallel = ConfigDict(
        dict(
            backend="pjit",  # pjit: jax.jit with shardings; pmap: data parallel only
            data=-1,  # devices that split the batch; -1: the rest
            fsdp=1,  # devices that split the batch and the stored parameters
            tensor=1,  # devices that split heads, MLP and vocabulary
        )
    )
    config.memory = ConfigDict(
        dict(
            remat="none",  # what is recomputed in the backward pass: gpt2/utils/remat.py
            scan_layers=False,  # one compiled block for all layers
        )
    )
    config.logging = ConfigDict(
        dict(
            tensorboard=True,
            wandb=False,
            profile_start=0,  # first step of the trace, counted from 0
            profile_steps=0,  # steps in the trace; 0: none
        )
    )
    return config
