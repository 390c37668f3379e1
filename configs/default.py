"""Every option once, with its meaning and unit. Other configs start from this one and change it.

An option set here is a default, not advice: the values are GPT-2 124M's, with the training recipe
that nanoGPT and llm.c share.
"""

from ml_collections import ConfigDict

# `optim.name` -> the options that it reads, beside those that all of them read.
_MATRIX = ("beta1", "beta2", "eps", "adam_learning_rate")
_MUON = (*_MATRIX, "momentum", "nesterov", "momentum_warmup", "orthogonalize")
OPTIMIZERS = {
    "adamw": ("beta1", "beta2", "eps"),
    "adam": ("beta1", "beta2", "eps"),
    "sgd": ("momentum", "nesterov"),
    "lion": ("beta1", "beta2"),
    "ademamix": ("beta1", "beta2", "beta3", "alpha", "eps"),
    "schedule_free": ("beta1", "beta2", "eps"),
    "muon": _MUON,
    "normuon": _MUON,
    "soap": (*_MATRIX, "precondition_every"),
}

# The names to choose from, for options that have a fixed set of them.
CHOICES = {
    "model.activation": (
        "gelu_tanh",
        "gelu",
        "relu",
        "relu_squared",
        "silu",
        "swiglu",
        "geglu",
    ),
    "model.norm": ("layernorm", "rmsnorm"),
    "model.norm_position": ("pre", "post", "sandwich"),
    "model.position": ("learned", "rope", "sinusoidal", "alibi", "none"),
    "model.rope_scaling": ("none", "llama3", "yarn"),
    "model.init": ("normal", "xavier", "fan_in"),
    "model.attention": ("auto", "reference", "xla", "blocked", "cudnn", "splash"),
    "precision.params": ("float32",),  # 16 bits lose an optimizer's small updates
    "precision.compute": ("float32", "bfloat16", "float16"),
    "precision.logits": ("float32", "bfloat16"),
    "optim.name": tuple(OPTIMIZERS),
    "optim.schedule": (
        "cosine",
        "linear",
        "constant",
        "wsd",
        "inverse_sqrt",
        "piecewise",
    ),
    "optim.orthogonalize": ("newton_schulz", "polar_express"),
    "optim.cautious": ("none", "updates", "decay", "both"),
    "data.packing": ("concat", "bos", "pad"),
    "parallel.backend": ("pjit", "pmap"),
    "parallel.strategy": ("auto", "ddp", "zero1", "zero3", "megatron"),
    "parallel.fsdp_gather": ("auto", "layer", "step"),
    **{
        f"parallel.rules.{axis}": ("none", "fsdp", "tensor", "tensor,fsdp")
        for axis in ("table", "embed", "norm", "heads", "mlp", "vocab", "position")
    },
    "parallel.rules.sequence": ("none", "tensor"),
    "memory.remat": ("none", "full", "attention", "mlp", "dots", "offload"),
}

# The numbers that an option takes, where these are not all from 0 on. Round brackets leave the end
# itself out.
RANGES = {
    "seed": "[0, 4294967295]",  # keys hold 32 bits of a seed; larger ones would repeat
    **dict.fromkeys(
        (
            *(
                "model.context_length",
                "model.num_layers",
                "model.num_heads",
                "model.embed_dim",
            ),
            *("model.mlp_ratio", "data.batch_size", "optim.precondition_every"),
            *("train.num_steps", "train.accumulate_steps", "train.log_every"),
            *("train.keep_checkpoints", "memory.scan_unroll", "parallel.cpu_devices"),
        ),
        "[1, inf)",
    ),
    **dict.fromkeys(
        (
            *("model.dropout", "loss.label_smoothing", "optim.beta1", "optim.beta2"),
            *("optim.beta3", "optim.momentum", "optim.ema"),
        ),
        "[0, 1)",
    ),
    **dict.fromkeys(("model.norm_eps", "model.rope_base", "optim.eps"), "(0, inf)"),
    **dict.fromkeys(("optim.warmup_percent", "optim.decay_percent"), "[0, 100]"),
    "optim.tail_average": "[0, 1]",
    **dict.fromkeys(("parallel.data", "parallel.fsdp", "parallel.tensor"), "[-1, inf)"),
    **dict.fromkeys(("model.rope_share", "data.val_fraction"), "(0, 1]"),
    "model.rope_factor": "[1, inf)",
}

# What other codebases call our options.
ALIASES = {
    "lr": "optim.learning_rate",
    "max_lr": "optim.learning_rate",
    "min_lr": "optim.end_learning_rate",
    "wd": "optim.weight_decay",
    "grad_clip": "optim.clip_norm",
    "warmup_iters": "optim.warmup_steps",
    "decay_lr": "optim.schedule",
    "optimizer": "optim.name",
    "max_iters": "train.num_steps",
    "max_steps": "train.num_steps",
    "lr_decay_iters": "train.num_steps",
    "steps": "train.num_steps",
    "gradient_accumulation_steps": "train.accumulate_steps",
    "eval_interval": "train.eval_every",
    "eval_iters": "train.eval_batches",
    "log_interval": "train.log_every",
    "block_size": "model.context_length",
    "seq_len": "model.context_length",
    "n_layer": "model.num_layers",
    "n_head": "model.num_heads",
    "n_embd": "model.embed_dim",
    "d_model": "model.embed_dim",
    "dtype": "precision.compute",
    "dataset": "data.corpus",
    "wandb_log": "logging.wandb",
    "bs": "data.batch_size",
}


def _group(options: dict) -> ConfigDict:
    return ConfigDict(options, sort_keys=False)  # as below


def get_config() -> ConfigDict:
    """Returns the full tree of options."""
    config = _group({})
    config.seed = (
        0  # below 2**32; data order, initialisation, dropout and samples follow from it
    )

    config.model = _group(
        dict(
            vocab_size=0,  # tokens; 0: as many as the tokenizer has
            context_length=1024,  # tokens
            num_layers=12,
            num_heads=12,
            num_kv_heads=0,  # of keys and values; 0: num_heads; 1: multi-query (Shazeer 2019);
            # between: grouped queries (Ainslie et al. 2023, arXiv 2305.13245)
            embed_dim=768,
            head_dim=0,  # width of a head (Qwen 3, arXiv 2505.09388); 0: embed_dim / num_heads
            mlp_ratio=4,  # MLP width over embed_dim
            mlp_dim=0,  # MLP width; 0: mlp_ratio * embed_dim
            dropout=0.0,  # probability, on embeddings, attention weights and residual branches
            bias=True,  # in linear layers and norms
            tie_embeddings=True,  # the output head is the token embedding
            activation="gelu_tanh",  # gelu is the exact form; swiglu and geglu gate with a third
            # linear map (Shazeer 2020, arXiv 2002.05202); relu_squared: So et al. 2021
            norm="layernorm",  # rmsnorm: Zhang and Sennrich 2019, arXiv 1910.07467
            norm_eps=1e-5,  # added to the mean square
            norm_position="pre",  # of each branch; post: after the sum (Vaswani et al. 2017);
            # sandwich: before and after the branch (Gemma 2, arXiv 2408.00118)
            position="learned",  # rope: Su et al. 2021, arXiv 2104.09864; sinusoidal: Vaswani et
            # al. 2017, section 3.5; alibi: Press et al. 2022, arXiv 2108.12409
            rope_base=10000.0,  # longest wavelength of rope over 2 pi, in tokens
            rope_share=1.0,  # of a head's dimensions that rope turns, the first ones (GPT-NeoX,
            # arXiv 2204.06745)
            rope_scaling="none",  # slows the turns that rope_context tokens hardly complete, for
            # longer contexts; llama3: Grattafiori et al. 2024, arXiv 2407.21783, and Meta's code;
            # yarn: Peng et al. 2023, arXiv 2309.00071
            rope_factor=1.0,  # by how much rope_scaling slows them
            rope_context=0,  # tokens of the context before rope_scaling
            qk_norm=False,  # RMSNorm of queries and keys per head (Dehghani et al. 2023, Qwen 3)
            window=0,  # tokens that a position sees, itself included; 0: all
            window_pattern="S",  # layers in turn: S sees the window, L all (Gemma 2, Mistral)
            attention_softcap=0.0,  # c * tanh(scores / c) before softmax (Gemma 2); 0: off
            logit_softcap=0.0,  # c * tanh(logits / c) before the loss (Gemma 2); 0: off
            value_embeddings=False,  # a table per layer, mixed into values (modded-nanogpt)
            value_residual=False,  # mixes the first layer's values into others' (Zhou et al. 2024,
            # arXiv 2410.17897)
            embedding_skip=False,  # learned mix of the first embedding into every block
            # (modded-nanogpt)
            smear=False,  # adds a gated share of the token before to each (modded-nanogpt)
            bigram_embeddings=0,  # rows of a table in which a hash of each token and the one before
            # finds a vector to add; 0: none (modded-nanogpt; Engram, arXiv 2601.07372)
            backout=False,  # before the head, takes off a learned share of what the stream was
            # after half of the layers (modded-nanogpt)
            hyper_connections=0,  # residual streams, for example 4, that each branch reads and
            # writes by learned weights; 0: one without (Zhu et al. 2024, arXiv 2409.19606, dynamic)
            attention_gate=False,  # each head's output times the sigmoid of a linear map of the
            # block's input (Qiu et al. 2025, arXiv 2505.06708)
            attention_sink=False,  # a learned logit per head that takes weight and gives nothing
            # (gpt-oss, arXiv 2508.10925)
            exclusive_attention=False,  # attention's output loses its part along the position's own
            # value (Zhai 2026, arXiv 2603.09078)
            parallel_block=False,  # attention and MLP read the same input (GPT-J, GPT-NeoX)
            init="normal",  # of kernels; xavier: Glorot and Bengio 2010; fan_in: LeCun et al. 1998
            init_std=0.02,  # of tables, and of kernels under init=normal
            zero_init_projections=False,  # of each branch's last kernel (Zhang et al. 2019, Fixup)
            mup_base_width=0,  # embed_dim at which rates were tuned; 0: off (Yang et al. 2022,
            # Tensor Programs V, arXiv 2203.03466)
            attention="auto",  # blocked is for CPUs, cudnn for GPUs, splash for TPUs
        )
    )
    config.precision = _group(
        dict(
            params="float32",  # of stored parameters and optimizer state; no other type works
            compute="float32",  # float16 comes with dynamic loss scaling
            logits="float32",  # in which the training loss stores logits; bfloat16: half the bytes
        )
    )
    config.data = _group(
        dict(
            corpus="pystdlib",  # docs/data.md has every prefix; 0.7*ONE+0.3*OTHER mixes
            tokenizer="gpt2",  # gpt2, byte, char, bpe:SIZE, or a path to a tokenizer.json
            end_of_text="",  # token between documents, if a tokenizer.json names none or another
            data_dir="",  # prepared corpora; empty: $GPT2_DATA_DIR, else ~/.cache/gpt2-jax
            shuffle_block=0,  # tokens; an epoch visits one such block after another, and a run may
            # begin once the first is prepared. 0: one block
            unique=False,  # drop each document whose text came before in the corpus
            batch_size=480,  # sequences per optimizer step, over all devices and micro-batches
            val_fraction=0.005,  # share held out for validation; docs/data.md says of what
            packing="concat",  # of training rows. concat: windows of joined documents; bos: begin
            # at a document, and crop what does not fit (nanochat); pad: a document a row, padded
            # to one of a few lengths
            document_mask=False,  # attend only within a document; positions count from its start
        )
    )
    config.loss = _group(
        dict(  # of training, and in train/loss; validation is plain cross-entropy
            z_loss=0.0,  # weight of log(normaliser)^2 (PaLM, arXiv 2204.02311, section 5)
            label_smoothing=0.0,  # share given to all tokens alike (Szegedy et al. 2016)
            ahead="",  # weights of the losses of the tokens 2, 3, ... on, by the same logits, for
            # example 0.5,0.25 (Gloeckle et al. 2024, arXiv 2404.19737, lightly, as modded-nanogpt);
            # logged beside train/loss as train/loss_ahead_2 and so on
            ahead_fade=0,  # steps over which these weights go to 0 on a line; 0: they stay
        )
    )
    config.optim = _group(
        dict(
            name="adamw",  # docs/optimizers.md says which options each one reads
            learning_rate=6e-4,  # peak, after the warm-up
            adam_learning_rate=0.0,  # of what muon, normuon and soap leave to Adam; 0: as above
            layer_rates="",  # REGEX=FACTOR,...: times the rate of parameters whose name matches
            schedule="cosine",  # wsd: warm-up, stable, decay; piecewise:STEP=SHARE,...: shares of
            # the peak from a step on
            warmup_steps=2000,
            warmup_percent=0.0,  # of train.num_steps, in place of warmup_steps
            decay_steps=0,  # of wsd
            decay_percent=0.0,  # of train.num_steps, in place of decay_steps; both 0: 20
            end_learning_rate=6e-5,
            beta1=0.9,
            beta2=0.95,
            beta3=0.9999,  # of ademamix's slow average
            alpha=5.0,  # weight of ademamix's slow average
            momentum=0.95,  # of sgd, muon, normuon
            nesterov=True,  # of sgd, muon, normuon
            momentum_warmup=0,  # steps over which muon's and normuon's momentum goes from 0.85 to
            # `momentum` on a line, for example 300 (modded-nanogpt); 0: off
            orthogonalize="newton_schulz",  # of muon, normuon; polar_express: other polynomials,
            # as many (Amsel et al. 2025, arXiv 2505.16932)
            precondition_every=10,  # steps between soap's new bases
            eps=1e-8,
            weight_decay=0.1,  # on kernels and embeddings, not on biases and norms
            scheduled_weight_decay=False,  # weight_decay times the rate's share of its peak, beside
            # the rate itself (Defazio 2025, arXiv 2506.02285; modded-nanogpt)
            cautious="none",  # what is masked where update and gradient (updates), or update and
            # weight (decay), disagree in sign (Liang et al. 2024, arXiv 2411.16085)
            ema=0.0,  # decay per step of the average that is validated and exported; 0: off
            tail_average=0.0,  # share of the steps, the last ones, whose weights' mean is validated
            # and exported (Jain et al. 2018, arXiv 1610.03774); 0: off
            clip_norm=1.0,  # global gradient norm; 0: off
        )
    )
    config.train = _group(
        dict(
            num_steps=600_000,  # optimizer steps
            batch_schedule="",  # 2000=128,4000=256: so many sequences after so many steps; before,
            # data.batch_size (Smith et al. 2018, arXiv 1711.00489)
            context_schedule="",  # 0=256,2000=1024: likewise, tokens that divide context_length
            # (Li et al. 2022, arXiv 2108.06084)
            window_schedule="",  # likewise, tokens of model.window (modded-nanogpt)
            accumulate_steps=1,  # micro-batches per optimizer step
            log_every=10,  # steps
            eval_every=1000,  # steps; 0: only at the end
            eval_batches=0,  # micro-batches a validation; 0: the whole split, as bits per byte need
            eval_tasks="",  # NAME:DIRECTORY,... of tasks to score (docs/evaluation.md); empty: none
            eval_tasks_every=0,  # steps; 0: only at the end
            checkpoint_every=1000,  # steps; 0: only at the end
            keep_checkpoints=2,  # newest checkpoints to keep, beside the best; one may be damaged
            keep_every=0,  # steps whose multiples stay as checkpoints for good; 0: none
            skip_bad_steps=0,  # steps in a row whose loss or gradients are not finite that may be
            # skipped; 0: the first one ends the run
            hang_seconds=60.0,  # without a step, and ten times as long as a step takes, after which
            # a run counts as hanging and ends; 0: never
            init_from="",  # hf:DIR, run:DIR or run:DIR@STEP; empty: from scratch
        )
    )
    config.parallel = _group(
        dict(
            backend="pjit",  # pjit: jax.jit with shardings; pmap: data parallel only
            strategy="auto",  # ddp: data alone; zero1: fsdp splits the optimizer's state alone;
            # zero3: stored parameters too, and gradients if fsdp_gather is layer (Rajbhandari et
            # al. 2020, arXiv 1910.02054);
            # megatron: tensor splits the sequence too, between attention and MLP (Korthikanti et
            # al. 2022, arXiv 2205.05198). The last three take all devices for their axis while its
            # size is 1. auto: as the sizes say, fsdp as in zero3
            data=-1,  # devices that split the batch; -1: the rest
            fsdp=1,  # devices that split the batch and the stored parameters
            tensor=1,  # devices that split heads, MLP and vocabulary
            cpu_devices=1,  # into which a CPU without accelerators is split: with two, steps of
            # small models on two cores are a tenth to a fifth shorter (docs/performance.md)
            fsdp_gather="auto",  # when parameters are gathered: layer holds least; step holds all
            # of them and their gradients whole, and sends least with many micro-batches; auto:
            # docs/parallelism.md. Means nothing where fsdp=-1 finds no more than one device
            rules=_group(
                dict(  # axis of a parameter: what stores it in parts, or none
                    table="tensor,fsdp",  # the width of an embedding
                    embed="fsdp",  # the model's width, in kernels
                    norm="fsdp",  # the width of a norm
                    heads="tensor",
                    mlp="tensor",
                    vocab="none",
                    position="none",
                    sequence="none",  # of activations between attention and MLP, no parameter
                )
            ),
        )
    )
    config.memory = _group(
        dict(
            remat="none",  # what a layer keeps for its backward pass, beside its input; the rest is
            # computed again. none: all, so that nothing is; full: nothing, so that all is;
            # attention: results of attention's products; mlp: of the MLP's; dots: of both, so that
            # no product runs twice; offload: as dots, in the host's memory: docs/parallelism.md
            scan_layers=False,  # one compiled block for all layers
            scan_unroll=1,  # layers in one turn of the loop of scan_layers, a divisor of their
            # number. As many as there are: no loop, and stacked parameters: fewer kernels on
            # GPUs, and slower on TPUs (docs/performance.md)
        )
    )
    config.logging = _group(
        dict(
            tensorboard=True,
            wandb=False,
            screen="",  # metrics to show beside the usual ones, separated by commas: NAME or train
            reference="",  # published losses that loss.png shows, too: a name in configs/reference,
            # or a CSV file as docs/ablations.md says
            watch_every=0,  # steps between norms of every tensor; 0: off
            profile_start=0,  # steps before the trace: it counts from 0, lines of metrics from 1
            profile_steps=0,  # steps in the trace and on the page profile/profile.md; 0: none
        )
    )
    return config
