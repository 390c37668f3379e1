"""The model with all of its switches, written from the papers in plain numpy and float64.

It shares no code with the project, and computes one position, head and layer at a time.
"""

import math

import numpy as np


class Existing:
    """A config whose options that do not exist are None, so that ingredients can be deleted."""

    def __init__(self, cfg):
        self.cfg = cfg

    def __getattr__(self, name):
        return getattr(self.cfg, name, None)


def logits(cfg, params, tokens, factors=(), drops=False, routed=None):
    """Return the logits `[T, V]` of one sequence.

    Args:
        cfg: a `GPTConfig`. Only its options are read.
        params: numpy arrays, with unrolled layers.
        tokens: `[T]` integers.
        factors: the factors of dropout, 0 or 1 / (1 - p), in the order in which GPT-2's code
            applies them: to the embedding `[T, D]`, and then in each layer to the attention weights
            `[N, T, T]`, and to the outputs of attention and of the MLP, `[T, D]` each.
        drops: whether experts have a capacity, so that tokens may be dropped.
        routed: a list to which the result of `route` for each layer is appended.
    """
    cfg = Existing(cfg)
    T = len(tokens)
    D = cfg.embed_dim
    factors = iter(factors)

    def drop(x):
        return x * next(factors, 1.0)

    def branch(y):
        """Return what a branch adds to the stream (Dey et al. 2025, table 1, with alpha = 1)."""
        y = drop(y)
        if cfg.mup_base_depth:
            y = y * cfg.mup_base_depth / cfg.num_layers
        return y

    def second_branch(params, x):
        if not cfg.num_experts:
            return mlp(cfg, params, x)
        routing = route(cfg, params, x, drops)
        if routed is not None:
            routed.append(routing)
        return mixture(cfg, params, x, routing)

    embeddings = params["wte"]["embedding"][tokens]
    x = embeddings.copy()
    if cfg.smear:
        for t in range(1, T):
            gate = sigmoid(embeddings[t, :24] @ params["smear"]["gate"])
            x[t] += params["smear"]["share"] * gate * embeddings[t - 1]
    if cfg.bigram_embeddings:
        for t in range(T):
            before = int(tokens[t - 1]) if t else cfg.vocab_size
            mixed = 36313 * int(tokens[t]) ^ 27191 * before
            row = mixed % 2**32 % cfg.bigram_embeddings
            x[t] += params["bigram"]["embedding"][row]
    if cfg.position == "learned":
        x = x + params["wpe"]["embedding"][:T]
    x = drop(x)
    if cfg.hyper_connections:
        x = np.array([x] * cfg.hyper_connections)
    embedded = x
    first_values = None
    middle = None
    for layer in range(cfg.num_layers):
        block = params[f"h_{layer}"]
        if layer == cfg.num_layers // 2:
            middle = x
        if cfg.embedding_skip:
            own, skip = block["embedding_skip"]["weights"]
            x = own * x + skip * embedded
        before, add = connect(cfg, block, "connect_1", x)
        if cfg.norm_position == "post":
            y, first_values = attention(
                cfg, block["attn"], before, tokens, layer, first_values, factors
            )
            x = norm(cfg, block["ln_1"], add(branch(y)))
            before, add = connect(cfg, block, "connect_2", x)
            y = second_branch(block["mlp"], before)
            x = norm(cfg, block["ln_2"], add(branch(y)))
            continue
        y = norm(cfg, block["ln_1"], before)
        y, first_values = attention(
            cfg, block["attn"], y, tokens, layer, first_values, factors
        )
        if cfg.norm_position == "sandwich":
            y = norm(cfg, block["ln_1_post"], y)
        x = add(branch(y))
        between, add = connect(cfg, block, "connect_2", x)
        read = before if cfg.parallel_block else between
        y = norm(cfg, block["ln_2"], read)
        y = second_branch(block["mlp"], y)
        if cfg.norm_position == "sandwich":
            y = norm(cfg, block["ln_2_post"], y)
        x = add(branch(y))
    if cfg.backout:
        x = x - params["backout"] * middle
    if cfg.hyper_connections:
        x = x.mean(0)
    if cfg.norm_position != "post":
        x = norm(cfg, params["ln_f"], x)
    head = params["wte"] if cfg.tie_embeddings else params["lm_head"]
    if cfg.mup_base_width:  # Yang et al. 2022, table 8
        x = x * cfg.mup_base_width / D
    logits = x @ head["embedding"].T
    return cap(logits, cfg.logit_softcap)


def connect(cfg, block, name, x):
    """Return the input of a branch, and a function that adds its output to the streams.

    Streams are `[n, T, D]`: Zhu et al. 2024, equations 10 to 13. Without hyper-connections there is
    one residual stream `[T, D]`.
    """
    n = cfg.hyper_connections
    if not n:
        return x, lambda y: x + y
    params = block[name]
    for_input, *for_mix, for_output = params["weights"]
    for_mix = np.transpose(for_mix)
    scale, output_scale = params["scales"]
    _, T, D = x.shape
    read = np.zeros((T, D))
    mixed = np.zeros((n, T, D))
    written = np.zeros((n, T, 1))
    for t in range(T):
        normalized = norm(cfg, params["norm"], x[:, t])
        dynamic = np.tanh(normalized @ params["by_stream"])  # [n, n + 2]
        reading = for_input + scale * dynamic[:, 0]
        mixing = for_mix + scale * dynamic[:, 1:-1]
        written[:, t, 0] = for_output + output_scale * dynamic[:, -1]
        read[t] = reading @ x[:, t]
        mixed[:, t] = mixing.T @ x[:, t]
    return read, lambda y: mixed + written * y


def norm(cfg, params, x, kind=None):
    """Apply LayerNorm or RMSNorm to the last axis."""
    kind = kind or cfg.norm
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    mean_square = (x * x).mean(-1, keepdims=True)
    x = x / np.sqrt(mean_square + cfg.norm_eps)
    return x * params["scale"] + params.get("bias", 0.0)


def linear(params, x, num_contract=1):
    y = np.tensordot(x, params["kernel"], num_contract)
    return y + params.get("bias", 0.0)


def attention(cfg, params, x, tokens, layer, first_values, factors):
    T = len(x)
    N = cfg.num_heads
    H = cfg.head_dim or cfg.embed_dim // cfg.num_heads
    factor = next(factors, np.ones((N, T, T)))
    if "c_attn" in params:
        q, k, v = np.moveaxis(linear(params["c_attn"], x), 1, 0)
    else:
        q = linear(params["c_q"], x)
        k, v = np.moveaxis(linear(params["c_kv"], x), 1, 0)
    if cfg.value_residual:
        if first_values is None:
            first_values = v
        own, first = params["value_residual"]["weights"]
        v = own * v + first * first_values
    if cfg.value_embeddings:
        own, other = params["value_mix"]["weights"]
        rows = params["value_embedding"]["embedding"][tokens]
        v = own * v + other * rows.reshape(v.shape)
    if cfg.qk_norm:
        q = norm(cfg, params["q_norm"], q, "rmsnorm")
        k = norm(cfg, params["k_norm"], k, "rmsnorm")
    if cfg.position == "rope":
        q = rotate(cfg, q)
        k = rotate(cfg, k)
    scale = 8 / H if cfg.mup_base_width else 1 / math.sqrt(H)
    letters = cfg.window_pattern * cfg.num_layers
    window = cfg.window if cfg.window and letters[layer] == "S" else T
    out = np.zeros((T, N, H))
    for n in range(N):
        kv = n * k.shape[1] // N  # the head of keys and values
        for t in range(T):
            seen = np.arange(max(0, t - window + 1), t + 1)
            scores = k[seen, kv] @ q[t, n] * scale
            scores = cap(scores, cfg.attention_softcap)
            if cfg.position == "alibi":
                scores = scores + ALIBI[N][n] * (seen - t)
            weights = np.exp(scores - scores.max())
            total = weights.sum()
            if cfg.attention_sink:
                total += np.exp(params["sinks"][n] - scores.max())
            weights = weights / total * factor[n, t, seen]
            y = weights @ v[seen, kv]
            if cfg.exclusive_attention:  # Zhai 2026, section 3
                own = v[t, kv] / np.linalg.norm(v[t, kv])
                y = y - (y @ own) * own
            out[t, n] = y
    if cfg.attention_gate:  # Qiu et al. 2025, equation 5
        gate = sigmoid(linear(params["c_gate"], x))
        out = out * gate[..., None]
    return linear(params["c_proj"], out, num_contract=2), first_values


# Press et al. 2022, section 3: for 8 heads 1/2^1, 1/2^2, ..., 1/2^8.
ALIBI = {
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    8: [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8],
    # As in the paper's code for a number that is not a power of two: the slopes of 4 heads, and
    # then every second slope of 8 heads.
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
}


def rotate(cfg, x):
    """Rotate the first R dimensions in pairs of i and i + R / 2 (Su et al. 2021, equation 34)."""
    T = len(x)
    R = int(cfg.rope_share * x.shape[-1])
    y = x.copy()
    for t in range(T):
        for i in range(R // 2):
            angle = t * frequency(cfg, i, R)
            cos = math.cos(angle)
            sin = math.sin(angle)
            j = i + R // 2
            y[t, :, i] = x[t, :, i] * cos - x[t, :, j] * sin
            y[t, :, j] = x[t, :, j] * cos + x[t, :, i] * sin
    if cfg.rope_scaling == "yarn":  # Peng et al. 2023, equation 22: 1 / sqrt(t)
        y[..., :R] *= 0.1 * math.log(cfg.rope_factor) + 1
    return y


def frequency(cfg, i, R):
    """Return the angle per token of pair i, scaled as in the code of Llama 3.1 or of YaRN."""
    f = cfg.rope_base ** (-2 * i / R)
    wavelength = 2 * math.pi / f
    factor = cfg.rope_factor
    context = cfg.rope_context
    if cfg.rope_scaling == "yarn":  # `find_correction_range` and `linear_ramp_mask`

        def dimension(turns):
            tokens = context / (2 * math.pi * turns)
            return R / 2 * math.log(tokens, cfg.rope_base)

        low = max(math.floor(dimension(32)), 0)
        high = min(math.ceil(dimension(1)), R - 1)
        ramp = min(max((i - low) / (high - low), 0), 1)
        return (1 - ramp) * f + ramp * f / factor
    if cfg.rope_scaling in (None, "none") or wavelength < context / 4:
        return f
    if wavelength > context:
        return f / factor
    smooth = (context / wavelength - 1) / (4 - 1)
    return (1 - smooth) * f / factor + smooth * f


def mlp(cfg, params, x):
    activation = ACTIVATIONS[cfg.activation]
    hidden = linear(params["c_fc"], x)
    if "c_gate" in params:  # Shazeer 2020, equation 6
        gate = linear(params["c_gate"], x)
        hidden = activation(gate) * hidden
    else:
        hidden = activation(hidden)
    return linear(params["c_proj"], hidden)


def route(cfg, params, x, drops):
    """Return the router's logits `[T, E]`, and for each token the weights of its experts.

    A token selects the K most likely experts (Fedus et al. 2021, equations 2 and 3). If K is above
    1, their weights are divided by the sum. The weight of an expert is 0 if it has no room. Each
    expert has room for an equal part of all choices, times the capacity.
    """
    T = len(x)
    E = cfg.num_experts
    K = cfg.experts_per_token or 1
    logits = x @ params["router"]["kernel"]
    room = np.full(E, T)
    if drops and cfg.expert_capacity:
        room[:] = min(T, math.ceil(cfg.expert_capacity * T * K / E))
    weights_by_token = []
    for t in range(T):
        probabilities = softmax(logits[t])
        chosen = np.argsort(-logits[t], kind="stable")[:K]
        total = probabilities[chosen].sum() if K > 1 else 1.0
        weights = {}
        for e in chosen.tolist():
            weights[e] = 0.0
            if room[e]:
                weights[e] = probabilities[e] / total
                room[e] -= 1
        weights_by_token.append(weights)
    return logits, weights_by_token


def mixture(cfg, params, x, routing):
    """Return the weighted sum of the outputs of each token's experts, `[T, D]`."""
    _, weights_by_token = routing
    out = np.zeros(x.shape)
    for t, weights in enumerate(weights_by_token):
        for e, weight in weights.items():
            expert = {}
            for name, stacked in params["experts"].items():
                expert[name] = {leaf: values[e] for leaf, values in stacked.items()}
            out[t] += weight * mlp(cfg, expert, x[t])
    return out


def router_losses(routing):
    """Return a row's balance loss (Fedus et al. 2021, equation 4) and its mean z-loss."""
    logits, weights_by_token = routing
    T, E = logits.shape
    probabilities = np.zeros(E)
    choices = np.zeros(E)
    z_loss = 0.0
    for t in range(T):
        probabilities += softmax(logits[t]) / T
        for e in weights_by_token[t]:
            choices[e] += 1
        z_loss += np.log(np.exp(logits[t]).sum()) ** 2 / T
    balance = E * (choices / choices.sum()) @ probabilities
    return balance, z_loss


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu_tanh(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + np.tanh(inner))


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def relu(x):
    return np.maximum(x, 0)


def silu(x):
    return x * sigmoid(x)


ACTIVATIONS = {
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "relu": relu,
    "relu_squared": lambda x: relu(x) ** 2,
    "silu": silu,
    "swiglu": silu,
    "geglu": gelu_tanh,
}


def cap(x, limit):
    return limit * np.tanh(x / limit) if limit else x


def ahead_weights(options, step):
    """Return the weights of the losses of the tokens 2, 3, ... ahead, which fade linearly."""
    options = Existing(options)
    if not options.ahead:
        return []
    remaining = 1.0
    if options.ahead_fade:
        remaining = max(0.0, 1 - step / options.ahead_fade)
    return [remaining * float(weight) for weight in options.ahead.split(",")]


def losses_ahead(logits, targets, options, segments=None):
    """Return the summed losses of one sequence, by the distance of the predicted token."""
    z_loss = Existing(options).z_loss or 0.0
    T = len(targets)
    if segments is None:
        segments = np.zeros(T)
    sums = np.zeros(1 + len(ahead_weights(options, step=0)))
    for distance in range(len(sums)):
        for t in range(T - distance):
            target = targets[t + distance]
            is_same = segments[t + distance] == segments[t]
            if targets[t] >= 0 and target >= 0 and is_same:
                sums[distance] += loss(logits[t], target, z_loss)
        z_loss = 0.0  # the z-loss counts once for each position
    return sums


def loss(logits, target, z_loss=0.0):
    """Return the loss of one position: cross-entropy and z-loss."""
    largest = logits.max()
    log_normaliser = math.log(np.exp(logits - largest).sum()) + largest
    return log_normaliser - logits[target] + z_loss * log_normaliser**2
