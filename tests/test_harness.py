"""lm-evaluation-harness gives the same figures through our adapter as through its own."""

import importlib.util
import json
import random

import jax
import jax.numpy as jnp
import pytest

from gpt2 import hf
from gpt2.data.tokenizer import train_bpe
from gpt2.model import GPT, GPTConfig

if not (importlib.util.find_spec("lm_eval") and importlib.util.find_spec("accelerate")):
    pytest.skip("needs lm_eval: pip install -e '.[peers]'", allow_module_level=True)
pytestmark = pytest.mark.peers

WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "tu", "sen") for b in ("ra", "no", "ti", "s", "l")]


def write_task(directory, name, examples, **options):
    """A task of the harness: a YAML file (which JSON is) and its examples."""
    file = directory / f"{name}.jsonl"
    file.write_text("".join(json.dumps(example) + "\n" for example in examples))
    task = dict(
        task=name,
        dataset_path="json",
        dataset_kwargs={"data_files": {"test": str(file)}},
        test_split="test",
        **options,
    )
    (directory / f"{name}.yaml").write_text(json.dumps(task))


def write_tasks(directory):
    rng = random.Random(0)

    def words(low, high):
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    def mean_of(metric):
        return dict(metric=metric, aggregation="mean", higher_is_better=True)

    choices = [[words(1, 80), [words(1, 5) for _ in range(3)]] for _ in range(24)]
    choices = [dict(q=q, choices=few, label=i % 3) for i, (q, few) in enumerate(choices)]
    how = dict(output_type="multiple_choice", doc_to_text="{{q}}", doc_to_target="label")
    how |= dict(doc_to_choice="choices", metric_list=[mean_of("acc")])
    write_task(directory, "choices", choices, **how)
    texts = [dict(text=words(1, 150)) for _ in range(8)]
    how = dict(output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="text")
    how |= dict(metric_list=[dict(metric="word_perplexity"), dict(metric="byte_perplexity")])
    write_task(directory, "perplexity", texts, **how)
    questions = [dict(q=words(1, 40), a=words(1, 2)) for _ in range(12)]
    how = dict(output_type="generate_until", doc_to_text="{{q}}", doc_to_target="a")
    how |= dict(generation_kwargs=dict(until=["lo", "\n"], max_gen_toks=20, do_sample=False))
    write_task(directory, "generation", questions, **how, metric_list=[mean_of("exact_match")])


def test_harness_gives_the_same_through_both_models(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import lm_eval
    from lm_eval.tasks import TaskManager

    import gpt2.evals.harness  # noqa: F401 (registers gpt2_jax)

    tokenizer = train_bpe(300, [" ".join(WORDS) * 3])
    cfg = GPTConfig(
        vocab_size=tokenizer.vocab_size, context_length=96, num_layers=2, num_heads=2, embed_dim=32
    )
    params = jax.jit(GPT(cfg).init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    hf.save(tmp_path / "model", cfg, jax.tree.map(lambda x: 3 * x, params), tokenizer)
    write_tasks(tmp_path)
    results = {
        model: lm_eval.simple_evaluate(
            model=model,
            model_args=args,
            tasks=["choices", "perplexity", "generation"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            bootstrap_iters=0,
            batch_size=4,
        )
        for model, args in (
            ("gpt2_jax", f"hf={tmp_path / 'model'}"),
            ("hf", f"pretrained={tmp_path / 'model'},dtype=float32,device=cpu"),
        )
    }
    ours, theirs = results["gpt2_jax"], results["hf"]
    assert 0 < theirs["results"]["choices"]["acc,none"] < 1
    tasks = dict(acc="choices", exact_match="generation")
    tasks |= dict.fromkeys(("word_perplexity", "byte_perplexity"), "perplexity")
    for metric, task in tasks.items():
        value, expected = (r["results"][task][f"{metric},none"] for r in (ours, theirs))
        assert value == pytest.approx(expected, rel=1e-3), (task, metric)
    texts, expected = (
        [sample["resps"] for sample in r["samples"]["generation"]] for r in (ours, theirs)
    )
    assert texts == expected
    assert any(text != texts[0] for text in texts)
