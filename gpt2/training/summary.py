"""The text of a run's first and last screen."""

from collections.abc import Mapping
from pathlib import Path

import jax

from gpt2.data.dataset import Dataset
from gpt2.launch import describe_settings
from gpt2.model import num_params
from gpt2.parallel.inspect import describe_spread
from gpt2.telemetry.compile_watch import CompiledStep
from gpt2.telemetry.throughput import StepClock, model_flops_per_token
from gpt2.training.feed import Feed
from gpt2.training.program import Program
from gpt2.utils.text import counted, format_bytes, format_count


def describe_run(
    program: Program, dataset: Dataset, train_step: CompiledStep, workdir: Path, start: int
) -> dict[str, dict[str, str]]:
    """Returns the text of the screen before the loop: sections of names and values.

    Args:
        program: of the run.
        dataset: the prepared corpus.
        train_step: the program's, compiled.
        workdir: where the run lives.
        start: the step from which it continues, 0 for a new run.
    """
    config, params = program.config, program.state_shapes.params
    model, train, device = config.model, config.train, jax.devices()[0]
    layers = "scanned" if config.memory.scan_layers else "unrolled"
    remat = f", remat {config.memory.remat}" if config.memory.remat != "none" else ""
    tokens, warmup = config.tokens_per_step, config.optim.warmup(train.num_steps)
    epochs = train.num_steps * tokens / dataset.splits["train"].num_tokens
    flops = tokens * model_flops_per_token(program.model.config)
    compiled = f"{format_count(train_step.flops)} a device" if train_step.flops else "unknown"
    memory = train_step.memory
    cached = ", from the cache" if train_step.from_cache else ""
    return {
        "model": {
            "parameters": format_count(num_params(params)),
            "shape": f"{counted(model.num_layers, 'layer')} {layers}{remat}, "
            f"{counted(model.num_heads, 'head')}, {model.embed_dim} wide, "
            f"context {model.context_length}",
            "precision": f"{config.precision.compute} compute, {config.precision.params} weights",
            "attention": program.attention,
        },
        "data": {
            "corpus": config.data.corpus,
            "tokenizer": f"{config.data.tokenizer}, {format_count(model.vocab_size)} tokens",
            "training": f"{format_count(dataset.splits['train'].num_tokens)} tokens, "
            f"seen {epochs:.2g} times",
            "validation": f"{format_count(dataset.splits['validation'].num_tokens)} tokens",
        },
        "devices": {
            "kind": f"{jax.device_count()} x {device.device_kind}",
            "layout": program.backend.layout,
            "processes": str(jax.process_count()),
        }
        | ({"settings": settings} if (settings := describe_settings()) else {}),
        "step": {
            "tokens": format_count(tokens)
            + (f" in {train.accumulate_steps} micro-batches" if train.accumulate_steps > 1 else ""),
            "memory": f"{format_bytes(memory.peak)} per device" if memory else "unknown",
            "FLOPs": f"{format_count(flops)} by the model's formula, {compiled} as compiled",
            "compiled": f"in {train_step.compile_seconds:.1f} s{cached}",
        },
        "run": {
            "steps": (f"{start} (continued) to " if start else "") + str(train.num_steps),
            "warm-up": counted(warmup, "step")
            + (", more than the run has" if warmup > train.num_steps else ""),
            "workdir": str(workdir),
        },
    } | describe_spread(params, train_step.text())


def describe_results(scores: Mapping[str, float], feed: Feed, clock: StepClock) -> str:
    """Returns the text at the end of a run: where the time went, and how good the model is.

    Args:
        scores: of the last validation.
        feed: which says how much of the validation split was scored.
        clock: of the run.
    """
    time = ", ".join(f"{name} {share:.0%}" for name, share in clock.shares().items())
    line = f"validation loss {scores['eval/loss']:.4f}, perplexity {scores['eval/perplexity']:.2f}"
    if "eval/bits_per_byte" in scores:
        zlib = f"zlib -9 needs {feed.dataset.zlib_bits_per_byte:.3f} for the same text"
        line += f", {scores['eval/bits_per_byte']:.3f} bits per byte ({zlib})"
    if not feed.eval_is_whole:
        line += f", on the first {feed.num_eval_batches} of the split's batches"
    return f"time: {time}\n{line}"
