"""All options with their defaults, meanings and units. Other config files change these values.

The defaults are GPT-2 124M, with the training recipe of nanoGPT and llm.c. Each group is a class,
and each option is a field of its group. The type of a field determines the allowed values:
`Literal` lists names, and `Annotated` has a range. A number without a range must be at least 0. For
some options that are strings, the properties `choices` and `factors` restrict the values.
"""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from ml_collections import ConfigDict

# Ranges of numbers. A parenthesis excludes the bound.
Positive = Annotated[int, "[1, inf)"]
Layers = Annotated[int, "[1, 10000]"]
Steps = Annotated[int, "[1, 2147483647]"]  # the state counts steps in int32
Seed = Annotated[int, "[0, 4294967295]"]  # random keys use 32 bits of a seed
Devices = Annotated[int, "[-1, inf)"]
AboveZero = Annotated[float, "(0, inf)"]
AboveOne = Annotated[float, "(1, inf)"]
AtLeastOne = Annotated[float, "[1, inf)"]
BelowOne = Annotated[float, "[0, 1)"]
Between = Annotated[float, "(0, 1)"]
UpToOne = Annotated[float, "(0, 1]"]
Fraction = Annotated[float, "[0, 1]"]

# Types of options. They have names, because gpt2/config uses them for the fields of GPTConfig.
Attention = Literal["auto", "plain", "blocked", "cudnn", "splash", "tokamax"]
Compute = Literal["float32", "bfloat16", "float16"]
Logits = Literal["float32", "bfloat16"]
Remat = Literal["none", "full", "attention", "mlp", "dots"]

Default = TypeVar("Default")


@dataclass(frozen=True)
class Properties:
    """The properties of an option, or of a group of options."""

    help: str = ""  # the meaning of the option, its unit and its source
    # The condition under which the option has an effect: `model.num_experts` means that this other
    # option does not have its default, and `optim.name=muon|soap` means that optim.name has one of
    # these values.
    needs: str = ""
    # Whether a run may continue with another value. For a group: of each option in the group.
    may_change: bool = False
    # Whether the processes of one run may have different values.
    may_differ: bool = False
    # Whether the option belongs to the recipe, that is, to the model or to its training. The other
    # options determine the text and its validation split, the seed, `train.init_from`, the number
    # of steps, validations, checkpoints and logs. An idea (a change that gpt2.lab.ledger tests) may
    # set only options of the recipe and, in a config file, train.num_steps. For a group: each of
    # its options.
    is_recipe: bool = False
    # Whether the option counts training steps. Sweeps that change the length of a run scale it.
    is_duration: bool = False
    # Whether a file in gpt2/model/ingredients implements the option.
    is_ingredient: bool = False
    # Whether the option makes training random, as dropout does. Each micro-batch has its own masks.
    is_random: bool = False
    # The allowed names. Text may follow a name that ends with a colon.
    choices: tuple[str, ...] = ()
    # An example of a value, if the option is a comma-separated list of numbers, each of which must
    # be 0 or from 1e-6 to 1e6.
    factors: str = ""
    aliases: str = ""  # names of the option in other codebases, separated by spaces


def option(default: Default, help: str, **properties: Any) -> Default:
    """Return a dataclass field for an option, with its default value and its `Properties`."""
    return field(default=default, metadata=vars(Properties(help, **properties)))


@dataclass(frozen=True)
class Model:
    """The architecture of the model, and the implementation of attention."""

    vocab_size: int = option(
        0, "number of tokens in the vocabulary; 0: the number that the tokenizer has"
    )
    context_length: Positive = option(
        1024, "context length in tokens", aliases="block_size seq_len"
    )
    num_layers: Layers = option(12, "number of transformer blocks", aliases="n_layer")
    num_heads: Positive = option(12, "number of query heads", aliases="n_head")
    num_kv_heads: int = option(
        0,
        "number of key and value heads; 0: num_heads; 1: multi-query attention (Shazeer 2019); "
        "other numbers: grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245)",
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
        0.0,
        "dropout probability of embeddings, attention weights and residual branches",
        is_random=True,
    )
    stochastic_depth: BelowOne = option(
        0.0,
        "in training, layer l of L layers drops each residual branch of a sequence with this "
        "probability times l / L (Huang et al. 2016, arXiv 1603.09382)",
        is_ingredient=True,
        is_random=True,
    )
    bias: bool = option(True, "whether linear layers and norms have biases")
    tie_embeddings: bool = option(
        True, "whether the token embedding is also the output head"
    )
    activation: Literal[
        "gelu_tanh", "gelu", "relu", "relu_squared", "silu", "swiglu", "geglu"
    ] = option(
        "gelu_tanh",
        "activation of the MLP; gelu: the exact form; swiglu, geglu: a third linear map gates the "
        "hidden layer (Shazeer 2020, arXiv 2002.05202); relu_squared: So et al. 2021",
    )
    norm: Literal["layernorm", "rmsnorm"] = option(
        "layernorm", "kind of norm; rmsnorm: Zhang and Sennrich 2019, arXiv 1910.07467"
    )
    norm_eps: AboveZero = option(
        1e-5, "epsilon of norms, added to the variance or the mean square"
    )
    norm_position: Literal["pre", "post", "sandwich"] = option(
        "pre",
        "position of norms; pre: before each branch; post: after the residual sum (Vaswani et al. "
        "2017); sandwich: before and after each branch (Gemma 2, arXiv 2408.00118)",
    )
    position: Literal["learned", "rope", "alibi", "none"] = option(
        "learned",
        "representation of positions; learned: a table of embeddings; rope: Su et al. 2021, arXiv "
        "2104.09864; alibi: Press et al. 2022, arXiv 2108.12409",
    )
    rope_base: AboveOne = option(
        10000.0,
        "base of the rotations' frequencies: about the longest wavelength in tokens, divided by "
        "2 pi",
        needs="model.position=rope",
    )
    rope_share: UpToOne = option(
        1.0,
        "fraction of a head's dimensions that are rotated, starting from the first (GPT-NeoX, "
        "arXiv 2204.06745)",
        needs="model.position=rope",
    )
    rope_scaling: Literal["none", "llama3", "yarn"] = option(
        "none",
        "method of slowing down rotations of long wavelengths, for contexts longer than "
        "rope_context; llama3: Grattafiori et al. 2024, arXiv 2407.21783, and Meta's code; yarn: "
        "Peng et al. 2023, arXiv 2309.00071",
        needs="model.position=rope",
    )
    rope_factor: AtLeastOne = option(
        1.0,
        "factor by which rope_scaling slows down rotations",
        needs="model.rope_scaling",
    )
    rope_context: int = option(
        0,
        "context length in tokens with which the model was trained before rope_scaling",
        needs="model.rope_scaling",
    )
    qk_norm: bool = option(
        False,
        "apply RMSNorm to the queries and keys of each head (Dehghani et al. 2023, Qwen 3)",
    )
    window: int = option(
        0,
        "number of tokens to which a position attends, including itself; 0: all earlier tokens",
    )
    window_pattern: str = option(
        "S",
        "one letter per layer, repeated: an S layer attends within the window, an L layer to all "
        "earlier tokens (Gemma 2, Mistral)",
    )
    attention_softcap: float = option(
        0.0,
        "soft cap of attention scores, the c in c * tanh(scores / c) (Gemma 2); 0: off",
    )
    logit_softcap: float = option(
        0.0, "soft cap of logits, the c in c * tanh(logits / c) (Gemma 2); 0: off"
    )
    # Ingredients (gpt2/model/ingredients) act in the order of their options in this class. Another
    # order would change models that combine several ingredients.
    value_residual: bool = option(
        False,
        "mix the values (V) of the first layer's attention into the values of every layer's "
        "attention (Zhou et al. 2024, arXiv 2410.17897)",
        is_ingredient=True,
    )
    value_embeddings: bool = option(
        False,
        "mix token embeddings into the values (V) of each layer's attention; each layer has a "
        "separate embedding table (modded-nanogpt)",
        is_ingredient=True,
    )
    backout: bool = option(
        False,
        "subtract a learned fraction of the middle layer's input from the last layer's output "
        "(modded-nanogpt)",
        is_ingredient=True,
    )
    embedding_skip: bool = option(
        False,
        "mix the embedded tokens into the input of every block, with learned weights "
        "(modded-nanogpt)",
        is_ingredient=True,
    )
    smear: bool = option(
        False,
        "add a gated fraction of the previous token's embedding to each token (modded-nanogpt)",
        is_ingredient=True,
    )
    bigram_embeddings: int = option(
        0,
        "number of rows of an embedding table for pairs of adjacent tokens, looked up by a hash; "
        "0: off (modded-nanogpt; Engram, arXiv 2601.07372)",
        is_ingredient=True,
    )
    hyper_connections: int = option(
        0,
        "number of residual streams, for example 4, which each branch reads and writes with "
        "learned weights; 0: a single stream, without weights (Zhu et al. 2024, arXiv 2409.19606, "
        "dynamic version)",
        is_ingredient=True,
    )
    exclusive_attention: bool = option(
        False,
        "remove the component along a position's own value vector from attention's output at this "
        "position (Zhai 2026, arXiv 2603.09078)",
        is_ingredient=True,
    )
    attention_gate: bool = option(
        False,
        "multiply each head's output by the sigmoid of a linear map of attention's input (Qiu et "
        "al. 2025, arXiv 2505.06708)",
        is_ingredient=True,
    )
    attention_sink: bool = option(
        False,
        "add a learned logit to each head's softmax, for a key without a value (gpt-oss, arXiv "
        "2508.10925)",
        is_ingredient=True,
    )
    parallel_block: bool = option(
        False,
        "apply attention and the MLP to the same input, in parallel (GPT-J, GPT-NeoX)",
    )
    num_experts: int = option(
        0,
        "number of MLPs in each layer, of which a router selects some for each token; 0: a single "
        "MLP, without a router (Shazeer et al. 2017, arXiv 1701.06538)",
        is_ingredient=True,
    )
    experts_per_token: Positive = option(
        1,
        "number of experts that the router selects for a token; 1: as in Switch Transformer (arXiv "
        "2101.03961); more: as in Mixtral (arXiv 2401.04088)",
        needs="model.num_experts",
    )
    expert_capacity: float = option(
        0.0,
        "number of tokens of a sequence that an expert accepts in training, relative to an even "
        "split, for example 1.25; further tokens skip the expert. 0: no limit, and a step takes as "
        "long as if every expert processed every token",
        needs="model.num_experts",
    )
    expert_balance_loss: float = option(
        0.01,
        "weight of the balance loss, which is 1 if all experts get the same number of tokens "
        "(Switch Transformer)",
        needs="model.num_experts",
    )
    expert_z_loss: float = option(
        0.001,
        "weight of the router's z-loss, log(normaliser)^2 (ST-MoE, arXiv 2202.08906)",
        needs="model.num_experts",
    )
    init: Literal["normal", "fan_in"] = option(
        "normal",
        "standard deviation of initial kernels; normal: init_std; fan_in: 1 / sqrt(number of "
        "inputs) (LeCun et al. 1998)",
        needs="model.mup_base_width=0",
    )
    init_std: float = option(
        0.02,
        "standard deviation of initial embedding tables, and of kernels with init=normal",
    )
    zero_init_projections: bool = option(
        False,
        "initialise the last kernel of each residual branch to 0 (Zhang et al. 2019, Fixup)",
    )
    mup_base_width: int = option(
        0,
        "muP: the embed_dim for which the learning rates were tuned; 0: off (Yang et al. 2022, "
        "Tensor Programs V, arXiv 2203.03466)",
    )
    mup_base_depth: int = option(
        0,
        "CompleteP: the num_layers for which the learning rates were tuned; 0: off (Dey et al. "
        "2025, arXiv 2505.01618)",
    )
    attention: Attention = option(
        "auto",
        "implementation of attention; plain: the reference implementation; blocked: for CPUs; "
        "cudnn: for GPUs; splash: for TPUs; tokamax: for GPUs from Hopper on, with or "
        "without attention_softcap; auto: the fastest of plain, blocked, cudnn and splash that "
        "supports the device and the model",
        may_change=True,
    )


@dataclass(frozen=True)
class Precision:
    """Dtypes of activations, matrix products and logits.

    Parameters and optimizer state are always float32, because 16 bits would lose small updates.
    """

    compute: Compute = option(
        "float32",
        "dtype of activations and matrix products; float16 uses dynamic loss scaling",
        aliases="dtype",
    )
    logits: Logits = option(
        "float32",
        "dtype in which the training loss stores logits; bfloat16 needs half the memory",
        needs="precision.compute=bfloat16",
    )


@dataclass(frozen=True)
class Data:
    """The text, its tokens, and the sequences of a batch."""

    corpus: str = option(
        "pystdlib",
        "corpus to train on; docs/data.md lists all prefixes; 0.7*ONE+0.3*OTHER is a mixture",
        aliases="dataset",
    )
    tokenizer: str = option(
        "gpt2", "gpt2, byte, char, bpe:SIZE, or the path of a tokenizer.json"
    )
    end_of_text: str = option(
        "",
        "token between documents, for a tokenizer.json; empty: the token that is bos_token and "
        "eos_token of the tokenizer_config.json next to it, otherwise the first usual end-of-text "
        "token in its vocabulary, otherwise the eos_token",
    )
    data_dir: str = option(
        "",
        "directory of prepared corpora; empty: $GPT2_DATA_DIR, or ~/.cache/gpt2-jax if that is "
        "not set",
        may_change=True,
        may_differ=True,
    )
    unique: bool = option(
        False, "drop every document that has the same text as an earlier document"
    )
    batch_size: Positive = option(
        480,
        "number of sequences per optimizer step, over all devices and micro-batches",
        is_recipe=True,
        aliases="bs",
    )
    val_fraction: Between = option(
        0.005,
        "fraction of the text that becomes the validation split; docs/data.md explains how this "
        "part is chosen",
    )
    packing: Literal["concat", "bos", "pad"] = option(
        "concat",
        "layout of training sequences; concat: windows of joined documents; bos: each sequence "
        "starts with a document, and documents that do not fit are cropped (nanochat); pad: one "
        "document per sequence, padded to the context length",
        is_recipe=True,
    )
    shuffle_documents: bool = option(
        False,
        "join or pack the documents in another random order in each epoch, so that epochs combine "
        "and cut them differently; packing=pad always shuffles its documents",
        needs="data.packing=concat|bos",
        is_recipe=True,
    )
    document_mask: bool = option(
        False,
        "attend only within a document, and count positions from the document's start",
        is_recipe=True,
    )


@dataclass(frozen=True)
class Loss:
    """Terms that are added to the training loss. Validation uses only the cross-entropy."""

    z_loss: float = option(
        0.0,
        "weight of the z-loss, log(normaliser)^2 (PaLM, arXiv 2204.02311, section 5)",
    )
    ahead: str = option(
        "",
        "weights of the losses for the tokens 2, 3, ... positions ahead, computed from the same "
        "logits, for example 0.5,0.25 (a light form of Gloeckle et al. 2024, arXiv 2404.19737, as "
        "in modded-nanogpt); logged as train/loss_ahead_2, train/loss_ahead_3, ...",
        factors="0.5,0.25",
    )
    ahead_fade: int = option(
        0,
        "number of steps over which the weights of loss.ahead fall linearly to 0; 0: the weights "
        "are constant",
        needs="loss.ahead",
        is_duration=True,
    )


# Conditions for `needs`: the optimizers that use an option.
_ADAM = "optim.name=adamw|adam|ademamix|schedule_free|muon|normuon|soap|soap_muon"
_BETAS = f"{_ADAM}|lion"
_MATRIX = "optim.name=adamw|muon|normuon|soap|soap_muon"
_MUON = "optim.name=muon|normuon|soap_muon"
_DECOUPLED = "optim.name=adamw|lion|ademamix|schedule_free|muon|normuon|soap|soap_muon"


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
        "soap_muon",
    ] = option(
        "adamw",
        "the optimizer; docs/optimizers.md describes all optimizers",
        aliases="optimizer",
    )
    learning_rate: float = option(
        6e-4, "peak learning rate, after the warm-up", aliases="lr max_lr"
    )
    adam_learning_rate: float = option(
        0.0,
        "peak learning rate of all parameters other than the matrices in blocks; 0: learning_rate",
        needs=_MATRIX,
    )
    hyperball: bool = option(
        False,
        "keep the norm of each matrix in a block constant; learning_rate is then the ratio of an "
        "update's norm to the matrix's norm, and weight decay does not apply to these matrices "
        "(MuonH and AdamH, Wen et al. 2025, https://tinyurl.com/muonh)",
        needs=_MATRIX,
    )
    layer_rates: str = option(
        "",
        "REGEX=FACTOR,...: multiply the learning rate of each parameter by the FACTOR of the first "
        "REGEX that its name matches. A factor is 0, or between 1e-6 and 1e6",
    )
    schedule: str = option(
        "cosine",
        "shape of the learning rate after the warm-up; wsd: constant, then a decay; "
        "piecewise:STEP=FRACTION,...: after each STEP, this FRACTION of the peak",
        choices=("cosine", "linear", "constant", "wsd", "piecewise:"),
        aliases="decay_lr",
    )
    warmup_steps: int = option(
        2000,
        "number of steps of the linear warm-up",
        is_duration=True,
        aliases="warmup_iters",
    )
    decay_fraction: UpToOne = option(
        0.2,
        "wsd decays over this fraction of train.num_steps, at the end (Hu et al. 2024)",
        needs="optim.schedule=wsd",
    )
    end_fraction: Fraction = option(
        0.1,
        "final learning rate of cosine, linear and wsd, as a fraction of the peak",
        aliases="min_lr end_learning_rate",
    )
    beta1: BelowOne = option(
        0.9,
        "decay per step of the running mean of gradients; lion: the weight of this mean in the "
        "update; schedule_free: the weight of the averaged parameters in the point at which the "
        "gradients are computed",
        needs=_BETAS,
    )
    beta2: BelowOne = option(
        0.95,
        "decay per step of the running mean of squared gradients; lion: of the running mean of "
        "gradients",
        needs=_BETAS,
    )
    beta3: BelowOne = option(
        0.9999,
        "decay per step of ademamix's slow running mean of gradients",
        needs="optim.name=ademamix",
    )
    alpha: float = option(
        5.0, "weight of ademamix's slow running mean", needs="optim.name=ademamix"
    )
    momentum: BelowOne = option(
        0.95, "decay per step of the momentum", needs=f"{_MUON}|sgd"
    )
    nesterov: bool = option(True, "use Nesterov's momentum", needs=f"{_MUON}|sgd")
    momentum_warmup: int = option(
        0,
        "number of steps over which the momentum rises linearly from 0.85, for example 300 "
        "(modded-nanogpt); 0: off",
        needs=_MUON,
        is_duration=True,
    )
    orthogonalize: Literal["newton_schulz", "polar_express"] = option(
        "newton_schulz",
        "method of orthogonalising updates; polar_express: the same number of iterations as "
        "newton_schulz, with other polynomials (Amsel et al. 2025, arXiv 2505.16932)",
        needs=_MUON,
    )
    precondition_every: Positive = option(
        10,
        "number of steps between updates of the bases of soap and soap_muon",
        needs="optim.name=soap|soap_muon",
    )
    eps: AboveZero = option(
        1e-8, "epsilon, added to the denominator of Adam's update", needs=_ADAM
    )
    weight_decay: float = option(
        0.1,
        "weight decay of kernels and embeddings, not of biases and norms",
        aliases="wd",
    )
    decay_timescale: float = option(
        0.0,
        "AdamW's timescale, 1 / (learning_rate * weight decay), as a fraction of the run's steps; "
        "it determines the weight decay, and weight_decay then has no effect (Wang and Aitchison "
        "2024, arXiv 2405.13698); 0: off",
        needs=_DECOUPLED,
    )
    scheduled_weight_decay: bool = option(
        False,
        "multiply weight decay by the ratio of the learning rate to its peak, in addition to the "
        "usual multiplication by the learning rate (Defazio 2025, arXiv 2506.02285; "
        "modded-nanogpt)",
    )
    cautious: Literal["none", "updates", "decay", "both"] = option(
        "none",
        "updates: set elements of the update that oppose the gradient to 0, and scale the others "
        "up to compensate (Liang et al. 2024, arXiv 2411.16085); decay: skip weight decay for "
        "weights that the update moves away from 0 (Chen et al. 2025, arXiv 2510.12402); both: "
        "updates and decay",
    )
    ema: BelowOne = option(
        0.0,
        "decay per step of an exponential average of the weights, which is validated and exported; "
        "0: off",
    )
    tail_average: Fraction = option(
        0.0,
        "average the weights over this fraction of train.num_steps, at the end; the average is "
        "validated and exported (Jain et al. 2018, arXiv 1610.03774); 0: off",
    )
    clip_norm: float = option(
        1.0,
        "largest global norm of the gradients; larger gradients are scaled down to it; 0: off",
        aliases="grad_clip",
    )


@dataclass(frozen=True)
class Train:
    """The steps of a run, and its validations, checkpoints and other actions between steps."""

    num_steps: Steps = option(
        600_000,
        "number of optimizer steps",
        may_change=True,  # another number moves the end of the schedule
        aliases="max_iters max_steps lr_decay_iters steps",
    )
    batch_schedule: str = option(
        "",
        "STEP=SIZE,...: after each STEP, the number of sequences per optimizer step, for example "
        "2000=128,4000=256; before the first STEP, data.batch_size (Smith et al. 2018, arXiv "
        "1711.00489)",
        is_recipe=True,
    )
    context_schedule: str = option(
        "",
        "STEP=LENGTH,...: after each STEP, the number of tokens per sequence, a divisor of "
        "model.context_length, for example 0=256,2000=1024 (Li et al. 2022, arXiv 2108.06084)",
        needs="data.packing=concat",
        is_recipe=True,
    )
    window_schedule: str = option(
        "",
        "STEP=WINDOW,...: after each STEP, the value of model.window (modded-nanogpt)",
        is_recipe=True,
    )
    accumulate_steps: Positive = option(
        1,
        "number of micro-batches per optimizer step",
        may_change=True,  # but not if the model has random masks, because these depend on it
        is_recipe=True,
        aliases="gradient_accumulation_steps",
    )
    log_every: Positive = option(
        10,
        "number of steps between log lines",
        may_change=True,
        aliases="log_interval",
    )
    eval_every: int = option(
        1000,
        "number of steps between validations; 0: only at the end",
        may_change=True,
        aliases="eval_interval",
    )
    eval_batches: int = option(
        0,
        "number of batches of data.batch_size sequences in a validation; 0: the whole split. Bits "
        "per byte are computed only for the whole split",
        may_change=True,
        aliases="eval_iters",
    )
    eval_tasks: str = option(
        "",
        "tasks to score, NAME:DIRECTORY,... (docs/evaluation.md); empty: none",
        may_change=True,
    )
    eval_tasks_every: int = option(
        0,
        "number of steps between scorings of eval_tasks; 0: only at the end",
        may_change=True,
    )
    checkpoint_every: int = option(
        1000,
        "number of steps between checkpoints; 0: only at the end",
        may_change=True,
    )
    keep_checkpoints: Positive = option(
        2,
        "number of newest checkpoints to keep, in addition to the best; with 2 or more, a run can "
        "continue even if the newest is damaged",
        may_change=True,
    )
    keep_every: int = option(
        0,
        "also keep all checkpoints whose step is a multiple of this number; 0: off",
        may_change=True,
    )
    skip_bad_steps: int = option(
        0,
        "largest number of consecutive steps with NaN or Inf in the loss or the gradients that the "
        "run skips; one more such step ends the run. 0: the first such step ends it",
        may_change=True,
        is_recipe=True,
    )
    hang_seconds: float = option(
        60.0,
        "end the run if a step takes longer than this time in seconds and longer than ten usual "
        "steps; 0: never. The first step may take 30 minutes",
        may_change=True,
    )
    init_from: str = option(
        "",
        "weights to start from, hf:DIR, run:DIR or run:DIR@STEP; empty: random weights. Not needed "
        "to continue a run whose workdir has a checkpoint",
        choices=("", "hf:", "run:"),
    )


Storage = Literal["none", "fsdp", "tensor", "tensor,fsdp"]


@dataclass(frozen=True)
class Rules:
    """For each axis of parameters or activations, the mesh axes that shard it."""

    table: Storage = option(
        "tensor,fsdp", "mesh axes that shard the width of embedding tables"
    )
    embed: Storage = option(
        "fsdp", "mesh axes that shard the width of the residual stream in kernels"
    )
    norm: Storage = option("fsdp", "mesh axes that shard the parameters of norms")
    heads: Storage = option("tensor", "mesh axes that shard attention heads")
    mlp: Storage = option(
        "tensor", "mesh axes that shard the width of the MLP's hidden layer"
    )
    experts: Literal["none", "tensor"] = option(
        "none",
        "mesh axis that shards the experts of a mixture; tensor, together with mlp=none: each "
        "device along this axis stores different experts",
    )
    vocab: Storage = option(
        "none", "mesh axes that shard the rows of the token embedding"
    )
    position: Storage = option(
        "none", "mesh axes that shard the rows of the position embedding"
    )
    sequence: Literal["none", "tensor"] = option(
        "none",
        "mesh axis that shards the positions of activations between attention and MLP; not an axis "
        "of parameters",
    )


@dataclass(frozen=True)
class Parallel:
    """The sizes of the mesh's axes, and the arrays that each axis splits."""

    backend: Literal["pjit", "pmap"] = option(
        "pjit", "pjit: jax.jit with shardings; pmap: jax.pmap, data parallelism only"
    )
    strategy: Literal["auto", "ddp", "zero1", "zero3", "megatron"] = option(
        "auto",
        "auto: the sizes in parallel.data, fsdp and tensor determine the layout. ddp: only data "
        "parallelism. zero1: fsdp splits only the optimizer's state. zero3: fsdp also splits the "
        "stored parameters (Rajbhandari et al. 2020, arXiv 1910.02054). megatron: outside of "
        "attention and MLP, tensor also splits the sequence (Korthikanti et al. 2022, arXiv "
        "2205.05198). zero1, zero3 and megatron use all devices for their axis unless its size is "
        "set",
    )
    data: Devices = option(
        -1, "number of devices that split the batch; -1: all remaining devices"
    )
    fsdp: Devices = option(
        1, "number of devices that split the batch and the stored parameters"
    )
    tensor: Devices = option(
        1, "number of devices that split heads, MLP and vocabulary"
    )
    cpu_devices: Positive = option(
        1,
        "number of devices into which the CPU of a machine without accelerators is split; on two "
        "cores, a step of a small model takes less time with two devices than with one "
        "(docs/performance.md)",
    )
    fsdp_gather: Literal["auto", "layer", "step"] = option(
        "auto",
        "when devices gather the parameters that fsdp splits. layer: at each layer, which needs "
        "the least memory. step: once per step, which sends the least data if there are several "
        "micro-batches. auto: layer with one micro-batch and 16-bit compute, or if whole "
        "parameters and gradients would fill more than half of the memory; otherwise step",
    )
    rules: Rules = option(
        Rules(), "mesh axes over which each axis of the parameters is sharded"
    )


@dataclass(frozen=True)
class Memory:
    """Options that trade time for memory, at run time and while compiling."""

    remat: Remat = option(
        "none",
        "parts of a layer that are recomputed in the backward pass instead of being stored; none: "
        "nothing; full: everything but the layer's input; attention: everything but the results of "
        "attention's linear maps and attention's output; mlp: everything but the results of the "
        "MLP's linear maps; dots: everything but the results of all linear maps and attention's "
        "output",
    )
    scan_layers: bool = option(
        False, "run the layers as a loop, whose body is compiled once"
    )
    scan_unroll: Positive = option(
        1,
        "number of layers per iteration of the loop of scan_layers. If it equals num_layers, the "
        "parameters are stacked, but there is no loop: a step then starts fewer kernels on GPUs, "
        "but is slower on TPUs (docs/performance.md)",
        needs="memory.scan_layers",
    )


@dataclass(frozen=True)
class Logging:
    """The logs of a run: destinations of metrics, additional metrics, and traces."""

    tensorboard: bool = option(
        True, "write event files for TensorBoard", may_differ=True
    )
    wandb: bool = option(
        False,
        "send metrics to Weights & Biases; WANDB_RUN_GROUP and WANDB_TAGS set the group and the "
        "tags",
        may_differ=True,
        aliases="wandb_log",
    )
    wandb_project: str = option("gpt2", "project at Weights & Biases", may_differ=True)
    screen: str = option(
        "",
        "additional metrics to print, separated by commas; NAME means train/NAME and eval/NAME",
        may_differ=True,
    )
    noise_scale: bool = option(
        False,
        "log the gradient noise scale in tokens, estimated from the gradients of micro-batches and "
        "devices (McCandlish et al. 2018, arXiv 1812.06162)",
        may_change=True,
    )
    reference: str = option(
        "",
        "published losses to plot in loss.png: a name in configs/reference, or a CSV file as in "
        "docs/ablations.md",
        may_differ=True,
    )
    watch_every: int = option(
        0, "number of steps between logs of the norms of all tensors; 0: off"
    )
    profile_start: int = option(
        0, "step after which the trace begins; 0: before the first step"
    )
    profile_steps: int = option(
        0,
        "number of steps in the trace, which `python -m gpt2.lab.profile` reads; 0: no trace",
    )


@dataclass(frozen=True)
class Options:
    """All options of a run."""

    seed: Seed = option(
        0, "seed of the data order, initialisation, dropout and samples"
    )
    model: Model = option(Model(), "the architecture", is_recipe=True)
    precision: Precision = option(Precision(), "dtypes", is_recipe=True)
    data: Data = option(Data(), "the corpus and its batches")
    loss: Loss = option(Loss(), "the training loss", is_recipe=True)
    optim: Optim = option(Optim(), "the optimizer", is_recipe=True)
    train: Train = option(Train(), "steps, validations and checkpoints")
    # A run may continue with other values of `parallel.` and `memory.`: without dropout or
    # stochastic depth, these options change results only by rounding.
    parallel: Parallel = option(Parallel(), "devices", may_change=True, is_recipe=True)
    memory: Memory = option(Memory(), "memory", may_change=True, is_recipe=True)
    logging: Logging = option(Logging(), "logs", may_change=True)


def get_config() -> ConfigDict:
    """Return all options with their default values, nested by group."""
    return ConfigDict(asdict(Options()))
