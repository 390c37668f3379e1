"""All options with their defaults, meanings and units. Other config files change these values.

The defaults are those of GPT-2 124M, with the training recipe that nanoGPT and llm.c use. Each
group is a class, and each option is a field of it. The type of a field says which values it allows:
`Literal` lists names, `Annotated` holds a range. A number without a range must be at least 0.
"""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal, TypeVar

from ml_collections import ConfigDict

# Ranges. A round bracket excludes the bound.
Positive = Annotated[int, "[1, inf)"]
Steps = Annotated[int, "[1, 2147483647]"]  # the state counts them in int32
Seed = Annotated[int, "[0, 4294967295]"]  # random keys hold 32 bits of a seed
Devices = Annotated[int, "[-1, inf)"]
AboveZero = Annotated[float, "(0, inf)"]
AtLeastOne = Annotated[float, "[1, inf)"]
BelowOne = Annotated[float, "[0, 1)"]
Between = Annotated[float, "(0, 1)"]
UpToOne = Annotated[float, "(0, 1]"]
Fraction = Annotated[float, "[0, 1]"]

# Names that GPTConfig, the model's part of the options, uses too.
Attention = Literal["auto", "plain", "blocked", "cudnn", "splash"]
Compute = Literal["float32", "bfloat16", "float16"]
Logits = Literal["float32", "bfloat16"]
Remat = Literal["none", "full", "attention", "mlp", "dots"]

Default = TypeVar("Default")


def option(
    default: Default,
    help: str,
    *,
    needs: str = "",
    may_change: bool = False,
    is_recipe: bool = False,
    is_duration: bool = False,
    choices: tuple[str, ...] = (),
    factors: str = "",
    aliases: str = "",
    is_recorded: bool = True,
) -> Default:
    """Return a dataclass field for an option, with all that the program has to know about it.

    Args:
        default: its value in GPT-2 124M.
        help: its meaning, unit and source.
        needs: another option without which this one has no effect: `model.num_experts`, which must
            differ from its default, or `optim.name=muon|soap`, which must have one of these values.
        may_change: whether a run may continue with another value. In a group: all options in it.
        is_recipe: whether it decides the model or its training, and nothing about the text, the
            seed, the starting weights or the validation, so that an idea of a ledger may set it. In
            a group: all options in it.
        is_duration: whether it counts steps of training, which a shorter or longer run scales.
        choices: the names to choose from. Text may follow a name that ends with a colon.
        factors: an example of a list of numbers, for an option that holds one.
        aliases: names of this option in other codebases, separated by spaces.
        is_recorded: whether config.json holds it. Options that run commands are not recorded, so
            that a file of data runs nothing.
    """
    metadata = {
        "help": help,
        "needs": needs,
        "may_change": may_change,
        "is_recipe": is_recipe,
        "is_duration": is_duration,
        "choices": choices,
        "factors": factors,
        "aliases": tuple(aliases.split()),
        "is_recorded": is_recorded,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Model:
    """The architecture of the model, and how attention is computed."""

    vocab_size: int = option(0, "tokens; 0: the size of the tokenizer")
    context_length: Positive = option(1024, "tokens", aliases="block_size seq_len")
    num_layers: Positive = option(12, "transformer blocks", aliases="n_layer")
    num_heads: Positive = option(12, "attention heads of queries", aliases="n_head")
    num_kv_heads: int = option(
        0,
        "attention heads of keys and values; 0: num_heads; 1: multi-query attention (Shazeer "
        "2019); between: grouped queries (Ainslie et al. 2023, arXiv 2305.13245)",
    )
    embed_dim: Positive = option(
        768, "width of the residual stream", aliases="n_embd d_model"
    )
    head_dim: int = option(
        0,
        "width of an attention head (Qwen 3, arXiv 2505.09388); 0: embed_dim / num_heads",
    )
    mlp_dim: int = option(0, "width of the MLP's hidden layer; 0: 4 * embed_dim")
    dropout: BelowOne = option(
        0.0, "probability, on embeddings, attention weights and residual branches"
    )
    bias: bool = option(True, "biases in linear layers and norms")
    tie_embeddings: bool = option(
        True, "use the token embedding as the output head too"
    )
    activation: Literal[
        "gelu_tanh", "gelu", "relu", "relu_squared", "silu", "swiglu", "geglu"
    ] = option(
        "gelu_tanh",
        "gelu is the exact form; swiglu and geglu gate the hidden layer with a third linear map "
        "(Shazeer 2020, arXiv 2002.05202); relu_squared: So et al. 2021",
    )
    norm: Literal["layernorm", "rmsnorm"] = option(
        "layernorm", "rmsnorm: Zhang and Sennrich 2019, arXiv 1910.07467"
    )
    norm_eps: AboveZero = option(1e-5, "added to the variance or the mean square")
    norm_position: Literal["pre", "post", "sandwich"] = option(
        "pre",
        "pre: before each branch; post: after the sum (Vaswani et al. 2017); sandwich: before and "
        "after the branch (Gemma 2, arXiv 2408.00118)",
    )
    position: Literal["learned", "rope", "alibi", "none"] = option(
        "learned",
        "rope: Su et al. 2021, arXiv 2104.09864; alibi: Press et al. 2022, arXiv 2108.12409",
    )
    rope_base: AboveZero = option(
        10000.0,
        "longest wavelength of the rotations over 2 pi, in tokens",
        needs="model.position=rope",
    )
    rope_share: UpToOne = option(
        1.0,
        "fraction of a head's dimensions that are rotated, the first ones (GPT-NeoX, arXiv "
        "2204.06745)",
        needs="model.position=rope",
    )
    rope_scaling: Literal["none", "llama3", "yarn"] = option(
        "none",
        "slows the rotations of long wavelengths, for contexts longer than rope_context; llama3: "
        "Grattafiori et al. 2024, arXiv 2407.21783, and Meta's code; yarn: Peng et al. 2023, arXiv "
        "2309.00071",
        needs="model.position=rope",
    )
    rope_factor: AtLeastOne = option(
        1.0, "factor by which rope_scaling slows rotations", needs="model.rope_scaling"
    )
    rope_context: int = option(
        0,
        "context length, in tokens, for which the model was trained before rope_scaling",
        needs="model.rope_scaling",
    )
    qk_norm: bool = option(
        False,
        "RMSNorm of queries and keys in each head (Dehghani et al. 2023, Qwen 3)",
    )
    window: int = option(
        0, "tokens to which a position attends, itself included; 0: all before it"
    )
    window_pattern: str = option(
        "S",
        "repeated over the layers: S attends within the window, L to all tokens (Gemma 2, Mistral)",
    )
    attention_softcap: float = option(
        0.0, "c in c * tanh(scores / c) before softmax (Gemma 2); 0: off"
    )
    logit_softcap: float = option(
        0.0, "c in c * tanh(logits / c) before the loss (Gemma 2); 0: off"
    )
    # Ingredients (gpt2/model/ingredients) act in the order of their options in this class. Another
    # order would change the models that combine several of them.
    value_residual: bool = option(
        False,
        "mixes the first layer's values into those of the others (Zhou et al. 2024, arXiv "
        "2410.17897)",
    )
    value_embeddings: bool = option(
        False, "an embedding table per layer, mixed into the values (modded-nanogpt)"
    )
    backout: bool = option(
        False,
        "before the head, subtracts a learned fraction of the residual stream as it was after half "
        "of the layers (modded-nanogpt)",
    )
    embedding_skip: bool = option(
        False, "a learned mix of the embedding into every block (modded-nanogpt)"
    )
    smear: bool = option(
        False,
        "adds a gated fraction of the previous token's embedding (modded-nanogpt)",
    )
    bigram_embeddings: int = option(
        0,
        "rows of a table from which a hash of each token and the one before selects a vector to "
        "add; 0: off (modded-nanogpt; Engram, arXiv 2601.07372)",
    )
    hyper_connections: int = option(
        0,
        "residual streams, for example 4, which each branch reads and writes with learned weights; "
        "0: a single one, without weights (Zhu et al. 2024, arXiv 2409.19606, dynamic)",
    )
    exclusive_attention: bool = option(
        False,
        "removes from attention's output its component along the position's own value (Zhai 2026, "
        "arXiv 2603.09078)",
    )
    attention_gate: bool = option(
        False,
        "multiplies each head's output by the sigmoid of a linear map of the block's input (Qiu et "
        "al. 2025, arXiv 2505.06708)",
    )
    attention_sink: bool = option(
        False,
        "a learned logit per head that takes attention weight and adds no value (gpt-oss, arXiv "
        "2508.10925)",
    )
    parallel_block: bool = option(
        False, "attention and MLP read the same input (GPT-J, GPT-NeoX)"
    )
    num_experts: int = option(
        0,
        "MLPs in each layer, of which a router selects some for each token; 0: a single MLP, "
        "without a router (Shazeer et al. 2017, arXiv 1701.06538)",
    )
    experts_per_token: Positive = option(
        1,
        "1: as in Switch Transformer (arXiv 2101.03961); more: as in Mixtral (arXiv 2401.04088)",
        needs="model.num_experts",
    )
    expert_capacity: float = option(
        0.0,
        "tokens of a sequence that an expert accepts in training, relative to an even split, for "
        "example 1.25; further tokens skip the layer. 0: no limit, and each step takes the time of "
        "all experts",
        needs="model.num_experts",
    )
    expert_balance_loss: float = option(
        0.01,
        "weight of the loss that is 1 if all experts get the same number of tokens (Switch "
        "Transformer)",
        needs="model.num_experts",
    )
    expert_z_loss: float = option(
        0.001,
        "weight of the router's log(normaliser)^2 (ST-MoE, arXiv 2202.08906)",
        needs="model.num_experts",
    )
    init: Literal["normal", "fan_in"] = option(
        "normal",
        "distribution of initial kernels; fan_in: LeCun et al. 1998",
        needs="model.mup_base_width=0",
    )
    init_std: float = option(
        0.02, "of embedding tables, and of kernels with init=normal"
    )
    zero_init_projections: bool = option(
        False, "starts the last kernel of each branch at 0 (Zhang et al. 2019, Fixup)"
    )
    mup_base_width: int = option(
        0,
        "embed_dim at which the learning rates were tuned; 0: off (Yang et al. 2022, Tensor "
        "Programs V, arXiv 2203.03466)",
    )
    attention: Attention = option(
        "auto",
        "plain: the reference implementation; blocked is for CPUs, cudnn for GPUs, splash for TPUs",
        may_change=True,
    )


@dataclass(frozen=True)
class Precision:
    """Types of numbers. Parameters and optimizer state are float32, so small updates count."""

    compute: Compute = option(
        "float32", "float16 comes with dynamic loss scaling", aliases="dtype"
    )
    logits: Logits = option(
        "float32",
        "type in which the training loss stores logits; bfloat16 takes half the bytes",
        needs="precision.compute=bfloat16",
    )


@dataclass(frozen=True)
class Data:
    """The text, its tokens, and the sequences of a batch."""

    corpus: str = option(
        "pystdlib",
        "docs/data.md lists every prefix; 0.7*ONE+0.3*OTHER is a mixture",
        aliases="dataset",
    )
    tokenizer: str = option(
        "gpt2", "gpt2, byte, char, bpe:SIZE, or the path of a tokenizer.json"
    )
    end_of_text: str = option(
        "", "token between documents, if a tokenizer.json names none or another"
    )
    data_dir: str = option(
        "",
        "directory of prepared corpora; empty: $GPT2_DATA_DIR, or else ~/.cache/gpt2-jax",
        may_change=True,
    )
    unique: bool = option(
        False, "drop every document whose text occurred before in the corpus"
    )
    batch_size: Positive = option(
        480,
        "sequences per optimizer step, over all devices and micro-batches",
        is_recipe=True,
        aliases="bs",
    )
    val_fraction: Between = option(
        0.005,
        "fraction of the text in the validation split; docs/data.md says which part",
    )
    packing: Literal["concat", "bos", "pad"] = option(
        "concat",
        "training sequences. concat: windows of joined documents; bos: begin at a document, and "
        "crop what does not fit (nanochat); pad: a document each, padded to the context",
        is_recipe=True,
    )
    document_mask: bool = option(
        False,
        "attend only within a document, and count positions from its start",
        is_recipe=True,
    )


@dataclass(frozen=True)
class Loss:
    """The training loss, which is also train/loss. Validation is plain cross-entropy."""

    z_loss: float = option(
        0.0, "weight of log(normaliser)^2 (PaLM, arXiv 2204.02311, section 5)"
    )
    ahead: str = option(
        "",
        "weights of the losses of the tokens 2, 3, ... ahead, computed from the same logits, for "
        "example 0.5,0.25 (after Gloeckle et al. 2024, arXiv 2404.19737, in modded-nanogpt's light "
        "form); logged as train/loss_ahead_2 and so on",
        factors="0.5,0.25",
    )
    ahead_fade: int = option(
        0,
        "steps over which these weights fall linearly to 0; 0: they stay",
        needs="loss.ahead",
        is_duration=True,
    )


# Optimizers that read an option.
_ADAM = "optim.name=adamw|adam|ademamix|schedule_free|muon|normuon|soap"
_BETAS = f"{_ADAM}|lion"
_MATRIX = "optim.name=muon|normuon|soap"
_MUON = "optim.name=muon|normuon"


@dataclass(frozen=True)
class Optim:
    """The optimizer and its learning rate."""

    name: Literal[
        "adamw",
        "adam",
        "sgd",
        "lion",
        "ademamix",
        "schedule_free",
        "muon",
        "normuon",
        "soap",
    ] = option("adamw", "docs/optimizers.md describes them", aliases="optimizer")
    learning_rate: float = option(6e-4, "peak, after the warm-up", aliases="lr max_lr")
    adam_learning_rate: float = option(
        0.0,
        "peak for the parameters that muon, normuon and soap leave to Adam; 0: learning_rate",
        needs=_MATRIX,
    )
    layer_rates: str = option(
        "",
        "REGEX=FACTOR,...: multiplies the learning rate of parameters whose name matches. A factor "
        "is 0, or between 1e-6 and 1e6",
    )
    schedule: str = option(
        "cosine",
        "wsd: warm-up, stable, decay; piecewise:STEP=FRACTION,...: fractions of the peak, from "
        "these steps on",
        choices=("cosine", "linear", "constant", "wsd", "piecewise:"),
        aliases="decay_lr",
    )
    warmup_steps: int = option(
        2000, "steps of the linear warm-up", is_duration=True, aliases="warmup_iters"
    )
    decay_fraction: UpToOne = option(
        0.2,
        "fraction of train.num_steps over which wsd decays, at the end (Hu et al. 2024)",
        needs="optim.schedule=wsd",
    )
    end_fraction: Fraction = option(
        0.1,
        "learning rate at the end of cosine, linear and wsd, as a fraction of the peak",
        aliases="min_lr end_learning_rate",
    )
    beta1: BelowOne = option(
        0.9, "decay per step of the average of gradients", needs=_BETAS
    )
    beta2: BelowOne = option(
        0.95, "decay per step of the average of squared gradients", needs=_BETAS
    )
    beta3: BelowOne = option(
        0.9999,
        "decay per step of ademamix's slow average of gradients",
        needs="optim.name=ademamix",
    )
    alpha: float = option(
        5.0, "weight of ademamix's slow average", needs="optim.name=ademamix"
    )
    momentum: BelowOne = option(
        0.95, "decay per step of the momentum", needs=f"{_MUON}|sgd"
    )
    nesterov: bool = option(True, "Nesterov's momentum", needs=f"{_MUON}|sgd")
    momentum_warmup: int = option(
        0,
        "steps over which the momentum rises linearly from 0.85, for example 300 (modded-nanogpt); "
        "0: off",
        needs=_MUON,
        is_duration=True,
    )
    orthogonalize: Literal["newton_schulz", "polar_express"] = option(
        "newton_schulz",
        "polar_express: the same number of iterations with other polynomials (Amsel et al. 2025, "
        "arXiv 2505.16932)",
        needs=_MUON,
    )
    precondition_every: Positive = option(
        10, "steps between updates of soap's bases", needs="optim.name=soap"
    )
    eps: AboveZero = option(1e-8, "added to Adam's denominator", needs=_ADAM)
    weight_decay: float = option(
        0.1, "on kernels and embeddings, not on biases and norms", aliases="wd"
    )
    scheduled_weight_decay: bool = option(
        False,
        "multiplies weight_decay by the learning rate over its peak, in addition to the learning "
        "rate itself (Defazio 2025, arXiv 2506.02285; modded-nanogpt)",
    )
    cautious: Literal["none", "updates", "decay", "both"] = option(
        "none",
        "masks elements where update and gradient (updates), or update and weight (decay), differ "
        "in sign (Liang et al. 2024, arXiv 2411.16085)",
    )
    ema: BelowOne = option(
        0.0,
        "decay per step of an average of the weights, which is validated and exported; 0: off",
    )
    tail_average: Fraction = option(
        0.0,
        "fraction of the steps, at the end, over which weights are averaged; the average is "
        "validated and exported (Jain et al. 2018, arXiv 1610.03774); 0: off",
    )
    clip_norm: float = option(
        1.0, "largest global norm of the gradients; 0: off", aliases="grad_clip"
    )


@dataclass(frozen=True)
class Train:
    """The steps of a run, and what it does between them."""

    num_steps: Steps = option(
        600_000,
        "optimizer steps",
        may_change=True,  # moves the end of the schedule
        aliases="max_iters max_steps lr_decay_iters steps",
    )
    batch_schedule: str = option(
        "",
        "STEP=SIZE,...: sequences per step after a number of steps, for example 2000=128,4000=256; "
        "before, data.batch_size (Smith et al. 2018, arXiv 1711.00489)",
        is_recipe=True,
    )
    context_schedule: str = option(
        "",
        "STEP=LENGTH,...: tokens per sequence, divisors of context_length, for example "
        "0=256,2000=1024 (Li et al. 2022, arXiv 2108.06084)",
        needs="data.packing=concat",
        is_recipe=True,
    )
    window_schedule: str = option(
        "",
        "STEP=WINDOW,...: tokens of model.window (modded-nanogpt)",
        is_recipe=True,
    )
    accumulate_steps: Positive = option(
        1,
        "micro-batches per optimizer step",
        may_change=True,  # without dropout, whose masks depend on it
        is_recipe=True,
        aliases="gradient_accumulation_steps",
    )
    log_every: Positive = option(10, "steps", may_change=True, aliases="log_interval")
    eval_every: int = option(
        1000, "steps; 0: only at the end", may_change=True, aliases="eval_interval"
    )
    eval_batches: int = option(
        0,
        "batches of data.batch_size sequences in a validation; 0: the whole split, which bits per "
        "byte need",
        may_change=True,
        aliases="eval_iters",
    )
    eval_tasks: str = option(
        "",
        "NAME:DIRECTORY,... of tasks to score (docs/evaluation.md); empty: none",
        may_change=True,
    )
    eval_tasks_every: int = option(0, "steps; 0: only at the end", may_change=True)
    checkpoint_every: int = option(1000, "steps; 0: only at the end", may_change=True)
    keep_checkpoints: Positive = option(
        2,
        "newest checkpoints to keep, in addition to the best; one of them may be damaged",
        may_change=True,
    )
    keep_every: int = option(
        0,
        "checkpoints whose step is a multiple of this are kept forever; 0: none",
        may_change=True,
    )
    skip_bad_steps: int = option(
        0,
        "consecutive steps whose loss or gradients are not finite that may be skipped; 0: the "
        "first one ends the run",
        may_change=True,
        is_recipe=True,
    )
    hang_seconds: float = option(
        60.0,
        "a run ends as hanging after this time without a step, and ten times the time of a step; "
        "0: never",
        may_change=True,
    )
    init_from: str = option(
        "",
        "hf:DIR, run:DIR or run:DIR@STEP: weights to start from; empty: random ones. A run with a "
        "checkpoint in its workdir continues by itself",
        choices=("", "hf:", "run:"),
    )


Storage = Literal["none", "fsdp", "tensor", "tensor,fsdp"]


@dataclass(frozen=True)
class Rules:
    """For each axis of parameters, the mesh axes over which it is stored in shards."""

    table: Storage = option("tensor,fsdp", "width of an embedding table")
    embed: Storage = option("fsdp", "width of the residual stream, in kernels")
    norm: Storage = option("fsdp", "width of a norm")
    heads: Storage = option("tensor", "attention heads")
    mlp: Storage = option("tensor", "width of the MLP's hidden layer")
    experts: Literal["none", "tensor"] = option(
        "none",
        "experts of a mixture; tensor, together with mlp=none: each device has experts of its own",
    )
    vocab: Storage = option("none", "rows of the token embedding")
    position: Storage = option("none", "rows of the position embedding")
    sequence: Literal["none", "tensor"] = option(
        "none", "positions of activations between attention and MLP; no parameter"
    )


@dataclass(frozen=True)
class Parallel:
    """The sizes of the mesh's axes, and what they split."""

    backend: Literal["pjit", "pmap"] = option(
        "pjit", "pjit: jax.jit with shardings; pmap: data parallel only"
    )
    strategy: Literal["auto", "ddp", "zero1", "zero3", "megatron"] = option(
        "auto",
        "ddp: data parallel only; zero1: fsdp splits the optimizer's state only; zero3: the stored "
        "parameters too, and gradients if fsdp_gather is layer (Rajbhandari et al. 2020, arXiv "
        "1910.02054); megatron: tensor splits the sequence too, between attention and MLP "
        "(Korthikanti et al. 2022, arXiv 2205.05198). The last three use all devices for their "
        "axis while its size is 1. auto: as the sizes say, with fsdp as in zero3",
    )
    data: Devices = option(-1, "devices that split the batch; -1: the rest")
    fsdp: Devices = option(1, "devices that split the batch and the stored parameters")
    tensor: Devices = option(1, "devices that split heads, MLP and vocabulary")
    cpu_devices: Positive = option(
        1,
        "devices into which a CPU without accelerators is split; with two, steps of small models "
        "on two cores are a tenth to a fifth shorter (docs/performance.md)",
    )
    fsdp_gather: Literal["auto", "layer", "step"] = option(
        "auto",
        "when parameters are gathered. layer: uses the least memory; step: holds all of them and "
        "their gradients whole, and sends the least with many micro-batches; auto: "
        "docs/parallelism.md. It has no effect where fsdp=-1 finds a single device",
    )
    rules: Rules = option(Rules(), "how parameters are stored")


@dataclass(frozen=True)
class Memory:
    """What stays in memory, and what is recomputed."""

    remat: Remat = option(
        "none",
        "recomputes parts of a layer in the backward pass. none: nothing; full: all but the "
        "layer's input; attention: all but the matrix products of attention; mlp: all but those of "
        "the MLP; dots: all but the matrix products",
    )
    scan_layers: bool = option(False, "a loop over layers, whose body is compiled once")
    scan_unroll: Positive = option(
        1,
        "layers per iteration of that loop, a divisor of num_layers. num_layers itself means "
        "stacked parameters without a loop: fewer kernels on GPUs, and slower on TPUs "
        "(docs/performance.md)",
        needs="memory.scan_layers",
    )


@dataclass(frozen=True)
class Logging:
    """What a run writes in addition to its metrics."""

    tensorboard: bool = option(True, "write event files for TensorBoard")
    wandb: bool = option(
        False,
        "send metrics to Weights & Biases; WANDB_RUN_GROUP and WANDB_TAGS set group and tags",
        aliases="wandb_log",
    )
    wandb_project: str = option("gpt2", "project at Weights & Biases")
    screen: str = option(
        "",
        "metrics that the screen shows in addition to the usual ones, separated by commas; NAME is "
        "train/NAME and eval/NAME",
    )
    reference: str = option(
        "",
        "published losses to plot in loss.png: a name in configs/reference, or a CSV file as in "
        "docs/ablations.md",
    )
    watch_every: int = option(0, "steps between logs of every tensor's norm; 0: off")
    profile_start: int = option(
        0, "the trace begins after this step; 0: with the first step"
    )
    profile_steps: int = option(
        0, "steps in the trace, which `python -m gpt2.lab.profile` reads; 0: no trace"
    )
    on_exit: str = option(
        "",
        "shell command that the first process runs when it ends, however it ends (unless killed), "
        "with GPT2_EXIT_CODE and GPT2_EXIT_REASON in its environment; empty: none. It is set by a "
        "flag or a .py file: config.json does not hold it",
        is_recorded=False,
    )


@dataclass(frozen=True)
class Options:
    """All options of a run."""

    seed: Seed = option(0, "determines data order, initialisation, dropout and samples")
    model: Model = option(Model(), "the architecture", is_recipe=True)
    precision: Precision = option(Precision(), "types of numbers", is_recipe=True)
    data: Data = option(Data(), "text and batches")
    loss: Loss = option(Loss(), "the training loss", is_recipe=True)
    optim: Optim = option(Optim(), "the optimizer", is_recipe=True)
    train: Train = option(Train(), "the steps")
    # A layout changes training only by rounding.
    parallel: Parallel = option(Parallel(), "devices", may_change=True, is_recipe=True)
    memory: Memory = option(Memory(), "memory", may_change=True, is_recipe=True)
    logging: Logging = option(Logging(), "logs", may_change=True)


def get_config() -> ConfigDict:
    """Return the full tree of options."""
    return ConfigDict(asdict(Options()))
