"""Every option once, with its meaning and unit. Other configs start from this one and change it.

An option set here is a default, not advice: the values are GPT-2 124M's, with the training recipe
that nanoGPT and llm.c share. Each group is a class and each option a field of it, whose type says
what it may be: `Literal` the names to choose from, `Annotated` a range of numbers or a table of
names. A number without a range is at least 0.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from ml_collections import ConfigDict

# Ranges, of which round brackets leave the end itself out, and an example of factors.
Positive = Annotated[int, "[1, inf)"]
Seed = Annotated[int, "[0, 4294967295]"]  # keys hold 32 bits; larger ones would repeat
Devices = Annotated[int, "[-1, inf)"]
AboveZero = Annotated[float, "(0, inf)"]
AtLeastOne = Annotated[float, "[1, inf)"]
BelowOne = Annotated[float, "[0, 1)"]
UpToOne = Annotated[float, "(0, 1]"]
Share = Annotated[float, "[0, 1]"]
Percent = Annotated[float, "[0, 100]"]
Factors = Annotated[str, "0.5,0.25"]

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

# `model.` options -> the option that makes a model read them.
READ_WITH = {
    "rope_base": "position=rope",
    "rope_share": "position=rope",
    "rope_scaling": "position=rope",
    "rope_factor": "position=rope",
    "rope_context": "position=rope",
    "experts_per_token": "num_experts",
    "expert_capacity": "num_experts",
    "expert_balance_loss": "num_experts",
    "expert_z_loss": "num_experts",
}

# How attention is computed: blocked is for CPUs, cudnn for GPUs, splash for TPUs.
Attention = Literal["auto", "plain", "blocked", "cudnn", "splash"]

# What `optim.schedule` may be; behind a colon follows what the schedule itself reads.
SCHEDULES = ("cosine", "linear", "constant", "wsd", "piecewise:")


@dataclass(frozen=True)
class Model:
    """The shape of the model, what it is made of, and how attention is computed."""

    vocab_size: int = 0  # tokens; 0: as many as the tokenizer has
    context_length: Positive = 1024  # tokens
    num_layers: Positive = 12
    num_heads: Positive = 12
    # Of keys and values; 0: num_heads; 1: multi-query (Shazeer 2019); between: grouped queries
    # (Ainslie et al. 2023, arXiv 2305.13245).
    num_kv_heads: int = 0
    embed_dim: Positive = 768
    # Width of a head (Qwen 3, arXiv 2505.09388); 0: embed_dim / num_heads.
    head_dim: int = 0
    mlp_ratio: Positive = 4  # MLP width over embed_dim
    mlp_dim: int = 0  # MLP width; 0: mlp_ratio * embed_dim
    # Probability, on embeddings, attention weights and residual branches.
    dropout: BelowOne = 0.0
    bias: bool = True  # in linear layers and norms
    tie_embeddings: bool = True  # the output head is the token embedding
    # gelu is the exact form; swiglu and geglu gate with a third linear map (Shazeer 2020, arXiv
    # 2002.05202); relu_squared: So et al. 2021.
    activation: Literal[
        "gelu_tanh", "gelu", "relu", "relu_squared", "silu", "swiglu", "geglu"
    ] = "gelu_tanh"
    # rmsnorm: Zhang and Sennrich 2019, arXiv 1910.07467.
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: AboveZero = 1e-5  # added to the mean square
    # Of each branch; post: after the sum (Vaswani et al. 2017); sandwich: before and after the
    # branch (Gemma 2, arXiv 2408.00118).
    norm_position: Literal["pre", "post", "sandwich"] = "pre"
    # rope: Su et al. 2021, arXiv 2104.09864; alibi: Press et al. 2022, arXiv 2108.12409.
    position: Literal["learned", "rope", "alibi", "none"] = "learned"
    rope_base: AboveZero = 10000.0  # longest wavelength of rope over 2 pi, in tokens
    # Of a head's dimensions that rope turns, the first ones (GPT-NeoX, arXiv 2204.06745).
    rope_share: UpToOne = 1.0
    # Slows the turns that rope_context tokens hardly complete, for longer contexts; llama3:
    # Grattafiori et al. 2024, arXiv 2407.21783, and Meta's code; yarn: Peng et al. 2023, arXiv
    # 2309.00071.
    rope_scaling: Literal["none", "llama3", "yarn"] = "none"
    rope_factor: AtLeastOne = 1.0  # by how much rope_scaling slows them
    rope_context: int = 0  # tokens of the context before rope_scaling
    # RMSNorm of queries and keys per head (Dehghani et al. 2023, Qwen 3).
    qk_norm: bool = False
    window: int = 0  # tokens that a position sees, itself included; 0: all
    # Layers in turn: S sees the window, L all (Gemma 2, Mistral).
    window_pattern: str = "S"
    # c * tanh(scores / c) before softmax (Gemma 2); 0: off.
    attention_softcap: float = 0.0
    # c * tanh(logits / c) before the loss (Gemma 2); 0: off.
    logit_softcap: float = 0.0
    # A table per layer, mixed into values (modded-nanogpt).
    value_embeddings: bool = False
    # Mixes the first layer's values into others' (Zhou et al. 2024, arXiv 2410.17897).
    value_residual: bool = False
    # Learned mix of the first embedding into every block (modded-nanogpt).
    embedding_skip: bool = False
    # Adds a gated share of the token before to each (modded-nanogpt).
    smear: bool = False
    # Rows of a table in which a hash of each token and the one before finds a vector to add; 0:
    # none (modded-nanogpt; Engram, arXiv 2601.07372).
    bigram_embeddings: int = 0
    # Before the head, takes off a learned share of what the stream was after half of the layers
    # (modded-nanogpt).
    backout: bool = False
    # Residual streams, for example 4, that each branch reads and writes by learned weights; 0: one
    # without (Zhu et al. 2024, arXiv 2409.19606, dynamic).
    hyper_connections: int = 0
    # Each head's output times the sigmoid of a linear map of the block's input (Qiu et al. 2025,
    # arXiv 2505.06708).
    attention_gate: bool = False
    # A learned logit per head that takes weight and gives nothing (gpt-oss, arXiv 2508.10925).
    attention_sink: bool = False
    # Attention's output loses its part along the position's own value (Zhai 2026, arXiv
    # 2603.09078).
    exclusive_attention: bool = False
    # Attention and MLP read the same input (GPT-J, GPT-NeoX).
    parallel_block: bool = False
    # MLPs in each layer, of which a router chooses some for each token; 0: one without (Shazeer et
    # al. 2017, arXiv 1701.06538).
    num_experts: int = 0
    # 1: as Switch Transformer (arXiv 2101.03961); more: as Mixtral (arXiv 2401.04088).
    experts_per_token: Positive = 1
    # Tokens of a row that an expert takes in training, over what it would take if all took as many,
    # for example 1.25; the layer leaves further ones as they are. 0: no limit, and each step takes
    # the time of all experts.
    expert_capacity: float = 0.0
    # Weight of the loss that is 1 if all experts take as many tokens (Switch Transformer).
    expert_balance_loss: float = 0.01
    # Weight of the router's log(normaliser)^2 (ST-MoE, arXiv 2202.08906).
    expert_z_loss: float = 0.001
    # Of kernels; fan_in: LeCun et al. 1998.
    init: Literal["normal", "fan_in"] = "normal"
    init_std: float = 0.02  # of tables, and of kernels under init=normal
    # Of each branch's last kernel (Zhang et al. 2019, Fixup).
    zero_init_projections: bool = False
    # embed_dim at which rates were tuned; 0: off (Yang et al. 2022, Tensor Programs V, arXiv
    # 2203.03466).
    mup_base_width: int = 0
    attention: Attention = "auto"


@dataclass(frozen=True)
class Precision:
    """Types of numbers; parameters and optimizer state are float32, for small updates."""

    # float16 comes with dynamic loss scaling.
    compute: Literal["float32", "bfloat16", "float16"] = "float32"
    # In which the training loss stores logits; bfloat16: half the bytes.
    logits: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class Data:
    """The text, its tokens, and the rows of a batch."""

    corpus: str = "pystdlib"  # docs/data.md has every prefix; 0.7*ONE+0.3*OTHER mixes
    tokenizer: str = "gpt2"  # gpt2, byte, char, bpe:SIZE, or a path to a tokenizer.json
    # Token between documents, if a tokenizer.json names none or another.
    end_of_text: str = ""
    # Where prepared corpora lie; empty: $GPT2_DATA_DIR, else ~/.cache/gpt2-jax.
    data_dir: str = ""
    # Drop each document whose text came before in the corpus.
    unique: bool = False
    # Sequences per optimizer step, over all devices and micro-batches.
    batch_size: Positive = 480
    # Share held out for validation; docs/data.md says of what.
    val_fraction: UpToOne = 0.005
    # Of training rows. concat: windows of joined documents; bos: begin at a document, and crop
    # what does not fit (nanochat); pad: a document a row, padded to the context.
    packing: Literal["concat", "bos", "pad"] = "concat"
    # Attend only within a document; positions count from its start.
    document_mask: bool = False


@dataclass(frozen=True)
class Loss:
    """The loss of training, and of train/loss; validation is plain cross-entropy."""

    # Weight of log(normaliser)^2 (PaLM, arXiv 2204.02311, section 5).
    z_loss: float = 0.0
    # Weights of the losses of the tokens 2, 3, ... on, by the same logits, for example 0.5,0.25
    # (Gloeckle et al. 2024, arXiv 2404.19737, lightly, as modded-nanogpt); logged beside train/loss
    # as train/loss_ahead_2 and so on.
    ahead: Factors = ""
    # Steps over which these weights go to 0 on a line; 0: they stay.
    ahead_fade: int = 0


@dataclass(frozen=True)
class Optim:
    """The optimizer and its rate."""

    # docs/optimizers.md says which options each one reads.
    name: Annotated[str, OPTIMIZERS] = "adamw"
    learning_rate: float = 6e-4  # peak, after the warm-up
    # Of what muon, normuon and soap leave to Adam; 0: as above.
    adam_learning_rate: float = 0.0
    # REGEX=FACTOR,...: times the rate of parameters whose name matches. A factor is 0, or from 1e-6
    # to 1e6.
    layer_rates: str = ""
    # wsd: warm-up, stable, decay; piecewise:STEP=SHARE,...: shares of the peak from a step on.
    schedule: Annotated[str, SCHEDULES] = "cosine"
    warmup_steps: int = 2000
    warmup_percent: Percent = 0.0  # of train.num_steps, in place of warmup_steps
    decay_steps: int = 0  # of wsd
    # Of train.num_steps, in place of decay_steps; both 0: 20.
    decay_percent: Percent = 0.0
    end_learning_rate: float = 6e-5
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    beta3: BelowOne = 0.9999  # of ademamix's slow average
    alpha: float = 5.0  # weight of ademamix's slow average
    momentum: BelowOne = 0.95  # of sgd, muon, normuon
    nesterov: bool = True  # of sgd, muon, normuon
    # Steps over which muon's and normuon's momentum goes from 0.85 to `momentum` on a line, for
    # example 300 (modded-nanogpt); 0: off.
    momentum_warmup: int = 0
    # Of muon, normuon; polar_express: other polynomials, as many (Amsel et al. 2025, arXiv
    # 2505.16932).
    orthogonalize: Literal["newton_schulz", "polar_express"] = "newton_schulz"
    precondition_every: Positive = 10  # steps between soap's new bases
    eps: AboveZero = 1e-8
    weight_decay: float = 0.1  # on kernels and embeddings, not on biases and norms
    # weight_decay times the rate's share of its peak, beside the rate itself (Defazio 2025, arXiv
    # 2506.02285; modded-nanogpt).
    scheduled_weight_decay: bool = False
    # What is masked where update and gradient (updates), or update and weight (decay), disagree in
    # sign (Liang et al. 2024, arXiv 2411.16085).
    cautious: Literal["none", "updates", "decay", "both"] = "none"
    # Decay per step of the average that is validated and exported; 0: off.
    ema: BelowOne = 0.0
    # Share of the steps, the last ones, whose weights' mean is validated and exported (Jain et al.
    # 2018, arXiv 1610.03774); 0: off.
    tail_average: Share = 0.0
    clip_norm: float = 1.0  # global gradient norm; 0: off


@dataclass(frozen=True)
class Train:
    """The steps of a run, and what it does between them."""

    num_steps: Positive = 600_000  # optimizer steps
    # 2000=128,4000=256: so many sequences after so many steps; before, data.batch_size (Smith et
    # al. 2018, arXiv 1711.00489).
    batch_schedule: str = ""
    # 0=256,2000=1024: likewise, tokens that divide context_length (Li et al. 2022, arXiv
    # 2108.06084).
    context_schedule: str = ""
    window_schedule: str = ""  # likewise, tokens of model.window (modded-nanogpt)
    accumulate_steps: Positive = 1  # micro-batches per optimizer step
    log_every: Positive = 10  # steps
    eval_every: int = 1000  # steps; 0: only at the end
    # Of data.batch_size rows, a validation; 0: the whole split, as bits per byte need.
    eval_batches: int = 0
    # NAME:DIRECTORY,... of tasks to score (docs/evaluation.md); empty: none.
    eval_tasks: str = ""
    eval_tasks_every: int = 0  # steps; 0: only at the end
    checkpoint_every: int = 1000  # steps; 0: only at the end
    # Newest checkpoints to keep, beside the best; one may be damaged.
    keep_checkpoints: Positive = 2
    # Steps whose multiples stay as checkpoints for good; 0: none.
    keep_every: int = 0
    # Steps in a row whose loss or gradients are not finite that may be skipped; 0: the first one
    # ends the run.
    skip_bad_steps: int = 0
    # Without a step, and ten times as long as a step takes, after which a run counts as hanging and
    # ends; 0: never.
    hang_seconds: float = 60.0
    init_from: str = ""  # hf:DIR, run:DIR or run:DIR@STEP; empty: from scratch


Storage = Literal["none", "fsdp", "tensor", "tensor,fsdp"]


@dataclass(frozen=True)
class Rules:
    """Axis of a parameter: what stores it in parts, or none."""

    table: Storage = "tensor,fsdp"  # the width of an embedding
    embed: Storage = "fsdp"  # the model's width, in kernels
    norm: Storage = "fsdp"  # the width of a norm
    heads: Storage = "tensor"
    mlp: Storage = "tensor"
    # Of a mixture; tensor, together with mlp=none: each device has experts of its own.
    experts: Literal["none", "tensor"] = "none"
    vocab: Storage = "none"
    position: Storage = "none"
    # Of activations between attention and MLP, no parameter.
    sequence: Literal["none", "tensor"] = "none"


@dataclass(frozen=True)
class Parallel:
    """The sizes of the mesh's axes, and what they split."""

    # pjit: jax.jit with shardings; pmap: data parallel only.
    backend: Literal["pjit", "pmap"] = "pjit"
    # ddp: data alone; zero1: fsdp splits the optimizer's state alone; zero3: stored parameters too,
    # and gradients if fsdp_gather is layer (Rajbhandari et al. 2020, arXiv 1910.02054); megatron:
    # tensor splits the sequence too, between attention and MLP (Korthikanti et al. 2022, arXiv
    # 2205.05198). The last three take all devices for their axis while its size is 1. auto: as the
    # sizes say, fsdp as in zero3.
    strategy: Literal["auto", "ddp", "zero1", "zero3", "megatron"] = "auto"
    data: Devices = -1  # devices that split the batch; -1: the rest
    fsdp: Devices = 1  # devices that split the batch and the stored parameters
    tensor: Devices = 1  # devices that split heads, MLP and vocabulary
    # Into which a CPU without accelerators is split: with two, steps of small models on two cores
    # are a tenth to a fifth shorter (docs/performance.md).
    cpu_devices: Positive = 1
    # When parameters are gathered: layer holds least; step holds all of them and their gradients
    # whole, and sends least with many micro-batches; auto: docs/parallelism.md. Means nothing where
    # fsdp=-1 finds no more than one device.
    fsdp_gather: Literal["auto", "layer", "step"] = "auto"
    rules: Rules = Rules()


@dataclass(frozen=True)
class Memory:
    """What is kept in memory, and what is computed again."""

    # What a layer keeps for its backward pass, beside its input; the rest is computed again. none:
    # all, so that nothing is; full: nothing, so that all is; attention: results of attention's
    # products; mlp: of the MLP's; dots: of both, so that no product runs twice.
    remat: Literal["none", "full", "attention", "mlp", "dots"] = "none"
    scan_layers: bool = False  # one compiled block for all layers
    # Layers in one turn of the loop of scan_layers, a divisor of their number. As many as there
    # are: no loop, and stacked parameters: fewer kernels on GPUs, and slower on TPUs
    # (docs/performance.md).
    scan_unroll: Positive = 1


@dataclass(frozen=True)
class Logging:
    """What a run writes beside its metrics."""

    tensorboard: bool = True
    wandb: bool = False  # WANDB_RUN_GROUP and WANDB_TAGS have its group and tags
    wandb_project: str = "gpt2"
    # Metrics that the screen shows beside the usual ones, separated by commas; NAME is train/NAME
    # and eval/NAME.
    screen: str = ""
    # Published losses that loss.png shows, too: a name in configs/reference, or a CSV file as
    # docs/ablations.md says.
    reference: str = ""
    watch_every: int = 0  # steps between norms of every tensor; 0: off
    # The trace begins after this step; 0: with the first step.
    profile_start: int = 0
    # Steps in the trace, which `python -m gpt2.lab.profile` reads; 0: no trace.
    profile_steps: int = 0
    # A command of the shell that the first process runs when it ends, in whatever way it can tell
    # of, with GPT2_EXIT_CODE and GPT2_EXIT_REASON in its environment; empty: none.
    on_exit: str = ""


@dataclass(frozen=True)
class Options:
    """All options of a run."""

    seed: Seed = 0  # data order, initialisation, dropout and samples follow from it
    model: Model = Model()
    precision: Precision = Precision()
    data: Data = Data()
    loss: Loss = Loss()
    optim: Optim = Optim()
    train: Train = Train()
    parallel: Parallel = Parallel()
    memory: Memory = Memory()
    logging: Logging = Logging()


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


def get_config() -> ConfigDict:
    """Returns the full tree of options."""
    return ConfigDict(asdict(Options()))
