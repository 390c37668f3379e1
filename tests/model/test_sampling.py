import dataclasses
import functools
import itertools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2 import generate as command
from gpt2.config import ParallelConfig
from gpt2.errors import UserError
from gpt2.model import GPT, GPTConfig, KVCache, extend
from gpt2.model import sampling as sampling_module
from gpt2.model.sampling import Sampling, generate
from gpt2.parallel.kernels import make_ops
from gpt2.parallel.mesh import make_mesh
from gpt2.parallel.rules import Rules
from gpt2.utils.prng import sample_key
from tests.helpers import first_params, thorough

CFG = GPTConfig(
    vocab_size=61, context_length=64, num_layers=2, num_heads=4, embed_dim=32
)
PROMPTS = [[1, 2, 3], [5] * 17, [7, 8] * 15]
GREEDY = Sampling(temperature=0.0)


def make_params(cfg=CFG):
    """Weights large enough that the model has strong and varied opinions."""
    return jax.tree.map(lambda x: x * 8, first_params(cfg))


@functools.partial(jax.jit, static_argnums=0)
def logits_of(cfg, params, row):
    return GPT(cfg).apply({"params": params}, row)


def sample(prompts=PROMPTS, count=20, **options):
    return generate(GPT(CFG), make_params(), prompts, max_new_tokens=count, **options)


def likeliest_without_cache(params, cfg, prompt, num_new):
    row = np.zeros((1, cfg.context_length), np.int32)
    row[0, : len(prompt)] = prompt
    for position in range(len(prompt), len(prompt) + num_new):
        row[0, position] = logits_of(cfg, params, row)[0, position - 1].argmax()
    return row[0, len(prompt) : len(prompt) + num_new].tolist()


@pytest.mark.parametrize(
    "options",
    [
        thorough({}),
        {"position": "rope", "qk_norm": True, "scan_layers": True},
        thorough({"position": "none", "tie_embeddings": False}),
    ],
    ids=str,
)
def test_cached_generation_equals_uncached_for_prompts_of_any_length(options):
    cfg = dataclasses.replace(CFG, **options)
    params = make_params(cfg)
    generated = generate(GPT(cfg), params, PROMPTS, max_new_tokens=24, sampling=GREEDY)
    for prompt, tokens in zip(PROMPTS, generated, strict=True):
        assert tokens == likeliest_without_cache(params, cfg, prompt, 24)


def test_a_text_that_fills_the_context_goes_on_from_its_last_three_quarters():
    params = make_params()
    prompts = [[1, 2, 3], [7, 8] * 25, [9] * 70]
    generated = generate(
        GPT(CFG), params, prompts, max_new_tokens=70, sampling=GREEDY, eot=60
    )
    for prompt, tokens in zip(prompts, generated, strict=True):
        text = list(prompt)
        expected = []
        while 60 not in expected and len(expected) < 70:
            text = text if len(text) < 64 else text[-48:]
            expected += likeliest_without_cache(params, CFG, text, 1)
            text = [*text, expected[-1]]
        assert tokens == [token for token in expected if token != 60]
    drawn = sample([[1, 2, 3]], 100, seed=5)[0]  # with other keys than before
    assert len(drawn) == 100 and drawn[:61] != drawn[-61:]


class Halved(GPT):
    """A model of one's own, which likes other tokens."""

    def _logits(self, hidden, head, context):
        return -super()._logits(hidden, head, context)


@pytest.mark.parametrize("scanned", [False, True])
def test_a_sequence_that_outgrows_its_cache_gets_no_number(scanned):
    config = dataclasses.replace(CFG, scan_layers=scanned)
    model = GPT(config)
    params = make_params(config)
    cache = KVCache.create(config, 2, max_length=9)
    append = jax.jit(functools.partial(extend, model, params))
    lengths = jnp.array([8, 5])
    for fits in (True, True), (True, True), (False, True):
        width = 8 if cache.length[0] == 0 else 1
        tokens = jnp.ones((2, width), jnp.int32)
        logits, cache = append(tokens, jnp.minimum(lengths, width), cache)
        assert tuple(np.isfinite(logits).all(axis=1)) == fits
    with pytest.raises(ValueError, match="positions for 64 tokens"):
        KVCache.create(config, 2, max_length=65)


def test_a_model_of_ones_own_is_what_is_sampled():
    cfg = dataclasses.replace(CFG, scan_layers=True)  # it samples an unrolled copy
    (tokens,) = generate(
        Halved(cfg), make_params(cfg), PROMPTS[:1], max_new_tokens=1, sampling=GREEDY
    )
    logits = GPT(cfg).apply({"params": make_params(cfg)}, jnp.array(PROMPTS[:1]))
    assert tokens == [int(logits[0, -1].argmin())]


class Words:
    """A tokenizer whose decoder strips the space that begins a text."""

    vocab_size = 61
    eot = 60

    def encode(self, text):
        return np.array([int(word) for word in text.split()])

    def decode(self, tokens):
        return "".join(f" {token}" for token in tokens)[1:]


def test_a_prompt_and_its_continuation_are_decoded_together(monkeypatch, capsys):
    model = CFG, make_params(), Words()
    monkeypatch.setattr(command, "load_model", lambda *_: model)
    options = dict(workdir="", hf="", checkpoint="", top_k=0, top_p=1.0, num_samples=1)
    options |= dict(prompt="1 2 3", temperature=0.0, seed=0, max_new_tokens=5)
    monkeypatch.setattr(command.flags, "FLAGS", SimpleNamespace(**options))
    command.main()
    (tokens,) = sample(PROMPTS[:1], 5, sampling=GREEDY, eot=60)
    assert capsys.readouterr().out == " ".join(map(str, [1, 2, 3, *tokens])) + "\n"


@pytest.mark.parametrize("seed", [3, 2**31, 2**32 - 1])
def test_a_sequence_is_drawn_with_its_own_key_of_the_samples(seed):
    logits = GPT(CFG).apply({"params": make_params()}, jnp.array([PROMPTS[0]]))[0, -1]
    keys = [jax.random.fold_in(sample_key(seed), sequence) for sequence in range(8)]
    expected = [
        int(jax.random.categorical(jax.random.fold_in(key, 0), logits)) for key in keys
    ]
    assert sample(PROMPTS[:1] * 8, 1, seed=seed) == [[token] for token in expected]
    assert len(set(expected)) > 1


def test_a_sequence_is_the_same_whatever_comes_with_it():
    assert sample(seed=1)[:1] == sample(PROMPTS[:1], seed=1)
    # Also where either has filled the context, and the other has not.
    together = sample([[7] * 60, [1, 2, 3]], 100, seed=1)
    assert together[:1] == sample([[7] * 60], 100, seed=1)


def test_generation_stops_at_end_of_text():
    (free,) = sample(PROMPTS[:1], sampling=GREEDY)
    (ended,) = sample(PROMPTS[:1], sampling=GREEDY, eot=free[5])
    assert ended == free[: free.index(free[5])]


def test_other_prompts_and_lengths_in_the_same_buckets_compile_nothing():
    size = sampling_module._generate._cache_size
    sample([[1] * 5] * 7, 10)  # as many as no other test has
    before = size()
    sample([[2] * 20] * 7, 12, seed=9)
    assert size() == before
    sample([[2] * 40] * 7, 12)
    assert size() == before + 1


def draw(sampling, logits, num=2000):
    keys = jax.random.split(jax.random.key(0), num)
    return np.asarray(
        sampling(jnp.broadcast_to(jnp.asarray(logits), (num, len(logits))), keys)
    )


def test_sampling_follows_the_distribution():
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    drawn = np.bincount(draw(Sampling(), np.log(probs)), minlength=4) / 2000
    np.testing.assert_allclose(drawn, probs, atol=0.04)
    sharper = probs**2 / (probs**2).sum()
    drawn = (
        np.bincount(draw(Sampling(temperature=0.5), np.log(probs)), minlength=4) / 2000
    )
    np.testing.assert_allclose(drawn, sharper, atol=0.04)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(top_k=1), {0}),
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_k=9), {0, 1, 2, 3}),
        (Sampling(top_p=0.4), {0}),
        (Sampling(top_p=0.6), {0, 1}),
        (Sampling(top_p=0.9), {0, 1, 2}),
        (Sampling(top_k=2, top_p=0.95), {0, 1}),
        (Sampling(temperature=0.0), {0}),
    ],
    ids=str,
)
def test_truncated_sampling_draws_all_that_is_allowed_and_nothing_else(
    sampling, allowed
):
    assert set(draw(sampling, np.log([0.5, 0.3, 0.15, 0.05])).tolist()) == allowed


def with_head(head):
    """A model whose logits are those of ones everywhere: its last norm has scale 0 and bias 1."""
    cfg = dataclasses.replace(CFG, tie_embeddings=False)
    ln_f = {"scale": jnp.zeros(32), "bias": jnp.ones(32)}
    return cfg, make_params(cfg) | {"ln_f": ln_f, "lm_head": {"embedding": head}}


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 100.0])
def test_tokens_that_the_tokenizer_lacks_are_never_drawn(temperature):
    """The model likes its last ten tokens best: left alone it draws them, limited it does not."""
    cfg, params = with_head(jnp.zeros((61, 32)).at[51:].set(20.0))
    kwargs = dict(max_new_tokens=60, sampling=Sampling(temperature=temperature))
    free = set(itertools.chain(*generate(GPT(cfg), params, [[1]] * 16, **kwargs)))
    assert free & set(range(51, 61))
    limited = set(
        itertools.chain(
            *generate(GPT(cfg), params, [[1]] * 16, vocab_size=51, **kwargs)
        )
    )
    assert limited == ({0} if temperature == 0.0 else set(range(51)))


def test_no_padding_of_the_vocabulary_is_ever_a_logit():
    """In a tensor layout the head is padded with zeros, which beat logits that are negative."""
    cfg, params = with_head(-jnp.ones((61, 32)))
    parallel = ParallelConfig(data=4, tensor=2)
    mesh = make_mesh(parallel)
    model = GPT(cfg, make_ops(cfg, mesh, {}, Rules.from_config(parallel)))
    with jax.set_mesh(mesh):
        logits = jax.jit(model.apply)({"params": params}, jnp.zeros((4, 8), jnp.int32))
    chex.assert_shape(logits, (4, 8, 61))
    assert logits.max() < -31


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=-1.0),
        dict(temperature=float("nan")),
        dict(temperature=1e-40),
        dict(top_k=-1),
        dict(top_p=0),
        dict(top_p=1e-46),
    ],
)
def test_what_draws_no_token_is_refused(options):
    with pytest.raises(UserError, match="draws no token"):
        Sampling(**options)
