"""Sampling: equal to uncached decoding, reproducible, and limited to what its options allow."""

import dataclasses
import functools
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
from tests.model.models import logits_of

CFG = GPTConfig(
    vocab_size=61, context_length=64, num_layers=2, num_heads=4, embed_dim=32
)
EOT = 60
PROMPTS = [[1, 2, 3], [5] * 17, [7, 8] * 15]
GREEDY = Sampling(temperature=0.0)


def make_params(cfg=CFG):
    """Return parameters so large that the next token depends strongly on those before."""
    return jax.tree.map(lambda x: x * 8, first_params(cfg))


def sample(prompts=PROMPTS, count=20, **options):
    return generate(GPT(CFG), make_params(), prompts, max_new_tokens=count, **options)


def greedy(model, prompts=PROMPTS, count=20, **options):
    params = make_params(model.config)
    options["max_new_tokens"] = count
    return generate(model, params, prompts, sampling=GREEDY, **options)


def most_likely(prompt):
    """Return the most likely token after a prompt, computed without a cache."""
    row = np.zeros((1, 64), np.int32)
    row[0, : len(prompt)] = prompt
    logits = logits_of(CFG, make_params(), row)
    return logits[0, len(prompt) - 1].argmax()


@pytest.mark.thorough
def test_cached_tokens_are_the_most_likely_and_a_full_context_keeps_three_quarters():
    prompts = [[1, 2, 3], [7, 8] * 25, [9] * 70]
    generated = greedy(GPT(CFG), prompts, 70, eot=EOT)
    for prompt, tokens in zip(prompts, generated, strict=True):
        text = list(prompt)
        expected = []
        for _ in range(70):
            if len(text) >= 64:
                text = text[-48:]
            token = most_likely(text)
            if token == EOT:
                break
            expected.append(token)
            text.append(token)
        assert tokens == expected
    # After the context has been filled, the keys are other ones than at the start.
    (drawn,) = sample([[1, 2, 3]], 100, seed=5)
    assert len(drawn) == 100
    assert drawn[:61] != drawn[-61:]


class Negated(GPT):
    """A user's model, whose most likely token is the least likely of GPT's."""

    def _logits(self, hidden, head, context):
        return -super()._logits(hidden, head, context)


@pytest.mark.parametrize("scanned", [thorough(False), True])
def test_logits_of_a_sequence_that_outgrows_its_cache_are_nan(scanned):
    config = dataclasses.replace(CFG, scan_layers=scanned)
    params = make_params(config)
    cache = KVCache.create(config, 2, max_length=9)
    append = jax.jit(functools.partial(extend, GPT(config), params))
    prompts = jnp.ones((2, 8), jnp.int32)
    logits, cache = append(prompts, jnp.array([8, 5]), cache)
    assert np.isfinite(logits).all()
    tokens = jnp.ones((2, 1), jnp.int32)
    one_each = jnp.ones(2, jnp.int32)
    for fits in [True, True], [False, True]:
        logits, cache = append(tokens, one_each, cache)
        assert np.isfinite(logits).all(axis=1).tolist() == fits
    with pytest.raises(ValueError, match="the 64 learned positions"):
        KVCache.create(config, 2, max_length=65)


@pytest.mark.thorough
def test_a_cache_without_room_stays_without_room():
    config = dataclasses.replace(CFG, position="rope")
    append = functools.partial(extend, GPT(config), make_params(config))
    cache = KVCache.create(config, 1, max_length=9)
    for padded, fits in ((8, True), (8, False), (1, False)):
        tokens = jnp.ones((1, padded), jnp.int32)
        logits, cache = append(tokens, jnp.array([3]), cache)
        assert np.isfinite(logits).all() == fits


def test_a_users_model_is_sampled_itself():
    cfg = dataclasses.replace(CFG, scan_layers=True)  # sampling unrolls a copy
    prompt = PROMPTS[0]
    (tokens,) = greedy(Negated(cfg), [prompt], 1)
    logits = logits_of(cfg, make_params(cfg), jnp.array([prompt]))
    assert tokens == [logits[0, -1].argmin()]


class Words:
    """A tokenizer whose decoder strips the space at the start of a text."""

    vocab_size = 61
    eot = EOT

    def encode(self, text):
        return np.array(text.split(), int)

    def decode(self, tokens):
        return " ".join(map(str, tokens))


# A digit that is not ASCII, as Python reads it from the command line in the locale C.
WIDE = "1 2 \N{FULLWIDTH DIGIT THREE}".encode().decode("ascii", "surrogateescape")


@pytest.mark.parametrize("prompt", ["1 2 3", WIDE], ids=["ascii", "surrogates"])
def test_a_prompt_and_its_continuation_are_decoded_together(
    monkeypatch, capsys, prompt
):
    model = (CFG, make_params(), Words())
    monkeypatch.setattr(command, "load_model", lambda *_: model)
    options = dict(workdir="", hf="", checkpoint="", prompt=prompt, seed=0)
    options |= dict(max_new_tokens=5, num_samples=1)
    options |= dict(temperature=0.0, top_k=0, top_p=1.0)
    monkeypatch.setattr(command.flags, "FLAGS", SimpleNamespace(**options))
    command.main()
    (tokens,) = greedy(GPT(CFG), [[1, 2, 3]], 5, eot=EOT)
    text = " ".join(map(str, tokens))
    assert capsys.readouterr().out == f"1 2 3 {text}\n"


@pytest.mark.parametrize("seed", [3, 2**31, 2**32 - 1])
def test_a_sequence_is_drawn_with_its_own_key_of_the_samples(seed):
    prompt = PROMPTS[0]
    logits = logits_of(CFG, make_params(), jnp.array([prompt]))[0, -1]
    expected = []
    for sequence in range(8):
        key = jax.random.fold_in(sample_key(seed), sequence)
        key = jax.random.fold_in(key, 0)
        expected.append([jax.random.categorical(key, logits)])
    assert sample([prompt] * 8, 1, seed=seed) == expected
    assert expected != [expected[0]] * 8


def test_a_sequence_does_not_depend_on_the_others():
    alone = sample(PROMPTS[:1], seed=1)
    assert sample(seed=1)[:1] == alone
    # Also when one of them has filled the context and the other has not.
    long = [7] * 60
    alone = sample([long], 100, seed=1)
    together = sample([long, [1, 2, 3]], 100, seed=1)
    assert together[:1] == alone


def test_generation_stops_at_end_of_text():
    (free,) = greedy(GPT(CFG), PROMPTS[:1])
    end = free[5]
    (ended,) = greedy(GPT(CFG), PROMPTS[:1], eot=end)
    assert ended == free[: free.index(end)]


def test_other_prompts_and_lengths_in_the_same_buckets_compile_nothing():
    num_compiled = sampling_module._generate._cache_size
    sample([[1] * 5] * 7, 10)  # 7 sequences, as in no other test
    before = num_compiled()
    sample([[2] * 20] * 7, 12, seed=9)
    assert num_compiled() == before
    sample([[2] * 40] * 7, 12)
    assert num_compiled() == before + 1


PROBABILITIES = np.array([0.5, 0.3, 0.15, 0.05])


def frequencies(sampling):
    """Return how often each of four tokens is drawn, as a fraction of 2000 draws."""
    keys = jax.random.split(jax.random.key(0), 2000)
    logits = jnp.tile(jnp.log(PROBABILITIES), (2000, 1))
    drawn = sampling(logits, keys)
    return np.bincount(drawn, minlength=4) / 2000


def test_sampling_follows_the_distribution():
    drawn = frequencies(Sampling())
    np.testing.assert_allclose(drawn, PROBABILITIES, atol=0.04)
    drawn = frequencies(Sampling(temperature=0.5))
    squares = PROBABILITIES**2
    np.testing.assert_allclose(drawn, squares / squares.sum(), atol=0.04)


@pytest.mark.parametrize(
    ("options", "num_allowed"),
    [
        (dict(top_k=1), 1),
        (dict(top_k=2), 2),
        (dict(top_k=9), 4),
        (dict(top_p=0.4), 1),
        (dict(top_p=0.6), 2),
        (dict(top_k=2, top_p=0.95), 2),
        (dict(temperature=0.0), 1),
    ],
    ids=str,
)
def test_truncated_sampling_draws_all_that_is_allowed_and_nothing_else(
    options, num_allowed
):
    (drawn,) = np.nonzero(frequencies(Sampling(**options)))
    assert drawn.tolist() == [*range(num_allowed)]


def with_head(head):
    """Return a model whose final hidden states are 1: its last norm has scale 0 and bias 1."""
    cfg = dataclasses.replace(CFG, tie_embeddings=False)
    params = dict(make_params(cfg))
    params["ln_f"] = {"scale": jnp.zeros(32), "bias": jnp.ones(32)}
    params["lm_head"] = {"embedding": head}
    return cfg, params


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 100.0])
def test_tokens_that_the_tokenizer_lacks_are_never_drawn(temperature):
    head = jnp.zeros((61, 32)).at[51:].set(20.0)  # the last ten are most likely
    cfg, params = with_head(head)

    def drawn(vocab_size):
        rows = generate(
            GPT(cfg),
            params,
            [[1]] * 16,
            max_new_tokens=60,
            sampling=Sampling(temperature=temperature),
            vocab_size=vocab_size,
        )
        return set(np.ravel(rows).tolist())

    assert max(drawn(0)) > 50
    allowed = 1 if temperature == 0.0 else 51
    assert drawn(51) == {*range(allowed)}


def test_no_padding_of_the_vocabulary_is_ever_a_logit():
    # A tensor layout pads the head with zeros, whose logits would exceed negative ones.
    cfg, params = with_head(-jnp.ones((61, 32)))
    parallel = ParallelConfig(data=4, tensor=2)
    mesh = make_mesh(parallel)
    rules = Rules.from_config(parallel)
    model = GPT(cfg, make_ops(cfg, mesh, {}, rules))
    tokens = jnp.zeros((4, 8), jnp.int32)
    with jax.set_mesh(mesh):
        logits = jax.jit(model.apply)({"params": params}, tokens)
    chex.assert_shape(logits, (4, 8, 61))
    assert logits.max() < -31


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 1e-40},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1e-46},
    ],
    ids=str,
)
def test_options_that_draw_no_token_are_refused(options):
    with pytest.raises(UserError, match=r"top_p=.* is not allowed"):
        Sampling(**options)
