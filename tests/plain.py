"""The model with all of its switches in plain numpy and float64, after the papers.

It shares no code with the project: one position, head and layer after another.
"""

import math

import numpy as np


class Existing:
    """A config in which options that there are not are None: an ingredient may be deleted."""

    def __init__(self, cfg):
        self.cfg = cfg

    def __getattr__(self, name):
        return getattr(self.cfg, name, None)


def logits(cfg, params, tokens, factors=(), drops=False, routed=None):
    """Returns the logits [T, V] of one sequence.

    Args:
        cfg: a `GPTConfig`, read for its options alone.
        params: layers unrolled, numpy arrays.
        tokens: [T] integers.
        factors: what dropout multiplies by, 0 or 1 / (1 - p), in the order of GPT-2's code: of the
            embedding [T, D], and in each layer of the weights [N, T, T] and of both branches.
        drops: whether experts have a capacity.
        routed: a list that gets each layer's `routing`.
    """
    cfg = Existing(cfg)
    T = len(tokens)
    D = cfg.embed_dim
    factors = iter(factors)

    def drop(x):
        return x * next(factors, 1.0)

    def second_branch(params, x):
        if not cfg.num_experts:
            return mlp(cfg, params, x)
        found = routing(cfg, params, x, drops)
        if routed is not None:
            routed.append(found)
        return mixture(cfg, params, x, found)

    embeddings = params["wte"]["embedding"][tokens]
    x = embeddings.copy()
    if cfg.smear:
        for t in range(1, T):
            gate = sigmoid(embeddings[t, :24] @ params["smear"]["gate"])
            x[t] += params["smear"]["share"] * gate * embeddings[t - 1]
    if cfg.bigram_embeddings:
        for t in range(T):
            before = int(tokens[t - 1]) if t else cfg.vocab_size
            row = (
                (36313 * int(tokens[t]) ^ 27191 * before)
                % 2**32
                % cfg.bigram_embeddings
            )
            x[t] += params["bigram"]["embedding"][row]
    if cfg.position == "learned":
        x = x + params["wpe"]["embedding"][:T]
    x = drop(x)
    x = np.array([x] * cfg.hyper_connections) if cfg.hyper_connections else x
    embedded = x
    first_values = None
    middle = None
    for layer in range(cfg.num_layers):
        block = params[f"h_{layer}"]
        middle = x if layer == cfg.num_layers // 2 else middle
        if cfg.embedding_skip:
            own, skip = block["embedding_skip"]["weights"]
            x = own * x + skip * embedded
        before, add = connect(cfg, block, "connect_1", x)
        if cfg.norm_position == "post":
            y, first_values = attention(
                cfg, block["attn"], before, tokens, layer, first_values, factors
            )
            x = norm(cfg, block["ln_1"], add(drop(y)))
            before, add = connect(cfg, block, "connect_2", x)
            x = norm(cfg, block["ln_2"], add(drop(second_branch(block["mlp"], before))))
            continue
        y = norm(cfg, block["ln_1"], before)
        y, first_values = attention(
            cfg, block["attn"], y, tokens, layer, first_values, factors
        )
        if cfg.norm_position == "sandwich":
            y = norm(cfg, block["ln_1_post"], y)
        x = add(drop(y))
        between, add = connect(cfg, block, "connect_2", x)
        read = before if cfg.parallel_block else between
        y = second_branch(block["mlp"], norm(cfg, block["ln_2"], read))
        if cfg.norm_position == "sandwich":
            y = norm(cfg, block["ln_2_post"], y)
        x = add(drop(y))
    if cfg.backout:
        x = x - params["backout"] * middle
    if cfg.hyper_connections:
        x = x.mean(0)
    if cfg.norm_position != "post":
        x = norm(cfg, params["ln_f"], x)
    head = params["wte" if cfg.tie_embeddings else "lm_head"]["embedding"]
    if cfg.mup_base_width:  # Yang et al. 2022, table 8
        x = x * cfg.mup_base_width / D
    return cap(x @ head.T, cfg.logit_softcap)


def connect(cfg, block, name, x):
    """Returns what a branch reads of streams [n, T, D], and what adds its output to them.

    Zhu et al. 2024, equations 10 to 13; without hyper-connections the residual stream [T, D].
    """
    n = cfg.hyper_connections
    if not n:
        return x, lambda y: x + y
    params = block[name]
    shape = x.shape
    read = np.zeros(shape[1:])
    mixed = np.zeros(shape)
    written = np.zeros((*shape[:2], 1))
    for t in range(shape[1]):
        moved = np.tanh(
            norm(cfg, params["norm"], x[:, t]) @ params["by_stream"]
        )  # [n, n + 2]
        reading = params["weights"][0] + params["scales"][0] * moved[:, 0]
        mixing = params["weights"][1:-1].T + params["scales"][0] * moved[:, 1:-1]
        written[:, t, 0] = params["weights"][-1] + params["scales"][1] * moved[:, -1]
        read[t] = reading @ x[:, t]
        mixed[:, t] = mixing.T @ x[:, t]
    return read, lambda y: mixed + written * y


def norm(cfg, params, x, kind=None):
    """LayerNorm or RMSNorm of the last axis."""
    kind = kind or cfg.norm
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.norm_eps) * params["scale"]
    return x + params["bias"] if "bias" in params else x


def linear(params, x, num_contract=1):
    y = np.tensordot(x, params["kernel"], num_contract)
    return y + params["bias"] if "bias" in params else y


def attention(cfg, params, x, tokens, layer, first_values, factors):
    T = len(x)
    N = cfg.num_heads
    H = cfg.head_dim or cfg.embed_dim // cfg.num_heads
    kept = next(factors, np.ones((N, T, T)))
    if "c_attn" in params:
        q, k, v = np.moveaxis(linear(params["c_attn"], x), 1, 0)
    else:
        q, (k, v) = (
            linear(params["c_q"], x),
            np.moveaxis(linear(params["c_kv"], x), 1, 0),
        )
    if cfg.value_residual:
        first_values = v if first_values is None else first_values
        own, first = params["value_residual"]["weights"]
        v = own * v + first * first_values
    if cfg.value_embeddings:
        own, other = params["value_mix"]["weights"]
        v = own * v + other * params["value_embedding"]["embedding"][tokens].reshape(
            v.shape
        )
    if cfg.qk_norm:
        q = norm(cfg, params["q_norm"], q, "rmsnorm")
        k = norm(cfg, params["k_norm"], k, "rmsnorm")
    if cfg.position == "rope":
        q, k = rotate(cfg, q), rotate(cfg, k)
    letters = cfg.window_pattern * cfg.num_layers
    window = cfg.window if cfg.window and letters[layer] == "S" else T
    out = np.zeros((T, N, H))
    for n in range(N):
        kv = n * k.shape[1] // N  # which head of keys and values
        for t in range(T):
            first = max(0, t - window + 1)
            scale = 8 / H if cfg.mup_base_width else 1 / math.sqrt(H)
            scores = cap(k[first : t + 1, kv] @ q[t, n] * scale, cfg.attention_softcap)
            if cfg.position == "alibi":
                scores = scores + ALIBI[N][n] * (np.arange(first, t + 1) - t)
            weights = np.exp(scores - scores.max())
            total = 0.0
            if cfg.attention_sink:
                total = np.exp(params["sinks"][n] - scores.max())
            weights = weights / (weights.sum() + total) * kept[n, t, first : t + 1]
            out[t, n] = weights @ v[first : t + 1, kv]
            if cfg.exclusive_attention:  # Zhai 2026, section 3
                own = v[t, kv] / np.linalg.norm(v[t, kv])
                out[t, n] -= (out[t, n] @ own) * own
    if cfg.attention_gate:  # Qiu et al. 2025, equation 5
        out = out * sigmoid(linear(params["c_gate"], x))[..., None]
    return linear(params["c_proj"], out, num_contract=2), first_values


# Press et al. 2022, section 3: for 8 heads 1/2^1, 1/2^2, ..., 1/2^8.
ALIBI = {
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    8: [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8],
    # The paper's code, for a number that is no power of two: those of 4, then every second of 8.
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
}


def rotate(cfg, x):
    """Su et al. 2021, equation 34, with the first R dimensions paired as halves (GPT-NeoX)."""
    T = len(x)
    R = int(cfg.rope_share * x.shape[-1])
    y = x.copy()
    for t in range(T):
        for i in range(R // 2):
            angle = t * frequency(cfg, i, R)
            a = x[t, :, i]
            b = x[t, :, i + R // 2]
            y[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
            y[t, :, i + R // 2] = b * math.cos(angle) + a * math.sin(angle)
    if cfg.rope_scaling == "yarn":  # Peng et al. 2023, equation 22: 1 / sqrt(t)
        y[..., :R] *= 0.1 * math.log(cfg.rope_factor) + 1
    return y


def frequency(cfg, i, R):
    """The angle per token of pair i, scaled as the code of Llama 3.1 and of YaRN have it."""
    f = cfg.rope_base ** (-2 * i / R)
    wavelength = 2 * math.pi / f
    factor = cfg.rope_factor
    context = cfg.rope_context
    if cfg.rope_scaling == "yarn":  # `find_correction_range` and `linear_ramp_mask`

        def dimension(turns):
            return (
                R
                * math.log(context / (turns * 2 * math.pi))
                / (2 * math.log(cfg.rope_base))
            )

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
    value = linear(params["c_fc"], x)
    if "c_gate" in params:  # Shazeer 2020, equation 6
        gate = linear(params["c_gate"], x)
        return linear(params["c_proj"], ACTIVATIONS[cfg.activation](gate) * value)
    return linear(params["c_proj"], ACTIVATIONS[cfg.activation](value))


def routing(cfg, params, x, drops):
    """Returns the router's logits [T, E], and for each token what it asks of which expert.

    A token asks the K likeliest experts, and those give nothing that have their share of tokens
    already: as many as there would be for each, times the capacity. Fedus et al. 2021, equations
    2 and 3; of several, weights are shares of what they have together.
    """
    T = len(x)
    E = cfg.num_experts
    K = cfg.experts_per_token or 1
    logits = x @ params["router"]["kernel"]
    room = np.full(E, T)
    if drops and cfg.expert_capacity:
        room[:] = min(T, math.ceil(cfg.expert_capacity * T * K / E))
    asked = []
    for t in range(T):
        probabilities = np.exp(logits[t]) / np.exp(logits[t]).sum()
        chosen = sorted(range(E), key=lambda e: -logits[t, e])[:K]
        whole = probabilities[chosen].sum() if K > 1 else 1.0
        each = {}
        for e in chosen:
            each[e] = probabilities[e] / whole if room[e] else 0.0
            room[e] -= room[e] > 0
        asked.append(each)
    return logits, asked


def mixture(cfg, params, x, routed):
    """Returns the weighted sum of what its experts make of each token."""
    out = np.zeros(x.shape)
    for t, each in enumerate(routed[1]):
        for e, weight in each.items():
            own = {
                name: {leaf: values[e] for leaf, values in linear.items()}
                for name, linear in params["experts"].items()
            }
            out[t] += weight * mlp(cfg, own, x[t])
    return out


def router_losses(routed):
    """Returns a row's balance loss (Fedus et al. 2021, equation 4) and mean z-loss."""
    logits, asked = routed
    E = logits.shape[1]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    choices = [e for each in asked for e in each]
    shares = np.array([choices.count(e) for e in range(E)]) / len(choices)
    balance = E * shares @ probabilities.mean(0)
    return balance, np.mean(np.log(np.exp(logits).sum(1)) ** 2)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "gelu_tanh": gelu_tanh,
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "relu": lambda x: np.where(x > 0, x, 0),
    "relu_squared": lambda x: np.where(x > 0, x, 0) ** 2,
    "silu": lambda x: x * sigmoid(x),
    "swiglu": lambda x: x * sigmoid(x),
    "geglu": gelu_tanh,
}


def cap(x, limit):
    return limit * np.tanh(x / limit) if limit else x


def ahead_weights(options, step):
    """Returns the weights of the tokens 2, 3, ... on, which fade on a line."""
    options = Existing(options)
    left = max(0.0, 1 - step / options.ahead_fade) if options.ahead_fade else 1.0
    return [
        left * float(weight) for weight in (options.ahead or "").split(",") if weight
    ]


def losses_ahead(logits, targets, options, segments=None):
    """Returns the summed losses of one sequence by how far on the token is that is predicted."""
    options = Existing(options)
    sums = np.zeros(1 + len(ahead_weights(options, step=0)))
    for t in range(len(targets)):
        for k in range(min(len(sums), len(targets) - t)):
            same = segments is None or segments[t + k] == segments[t]
            if targets[t] >= 0 and targets[t + k] >= 0 and same:
                z_loss = options.z_loss if k == 0 else 0.0  # of a position
                sums[k] += loss(logits[t], targets[t + k], z_loss or 0.0)
    return sums


def loss(logits, target, z_loss=0.0):
    """Returns the loss of one position: cross-entropy and z-loss."""
    log_normaliser = math.log(np.exp(logits - logits.max()).sum()) + logits.max()
    return log_normaliser - logits[target] + z_loss * log_normaliser**2
