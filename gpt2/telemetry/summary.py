"""What will run, in the words of one screen."""

from pathlib import Path

import jax

from gpt2.config import Config
from gpt2.data.prepare import Dataset
from gpt2.errors import counted
from gpt2.telemetry.compile_watch import CompiledStep
from gpt2.telemetry.progress import format_bytes, format_count
from gpt2.telemetry.throughput import model_flops_per_token
from gpt2.utils.allocation import describe_settings


def describe_run(
    config: Config,
    dataset: Dataset,
    num_parameters: int,
    attention: str,
    mesh: jax.sharding.Mesh,
    train_step: CompiledStep,
    workdir: Path,
    start: int,
) -> dict[str, dict[str, str]]:
    """Returns what the screen before the loop says: sections of names and values.

    Args:
        config: with its vocabulary resolved.
        dataset: the prepared corpus.
        num_parameters: of the model.
        attention: the implementation in use.
        mesh: of devices.
        train_step: compiled.
        workdir: where the run lives.
        start: the step from which it continues, 0 for a new run.
    """
    model, train, device = config.model, config.train, jax.devices()[0]
    layers = "scanned" if config.memory.scan_layers else "unrolled"
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    tokens = config.data.batch_size * model.context_length
    epochs = train.num_steps * tokens / dataset.splits["train"].num_tokens
    flops = tokens * model_flops_per_token(config.gpt(), model.context_length)
    compiled = f"{format_count(train_step.flops)} a device" if train_step.flops else "unknown"
    memory = train_step.memory
    cached = ", from the cache" if train_step.from_cache else ""
    return {
        "model": {
            "parameters": format_count(num_parameters),
            "shape": f"{counted(model.num_layers, 'layer')} {layers}, "
            f"{counted(model.num_heads, 'head')}, {model.embed_dim} wide, "
            f"context {model.context_length}",
            "precision": f"{config.precision.compute} compute, {config.precision.params} weights",
            "attention": attention,
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
            "layout": f"{config.parallel.backend}, {axes}",
            "processes": str(jax.process_count()),
        }
        | ({"allocator": settings} if (settings := describe_settings()) else {}),
        "step": {
            "tokens": format_count(tokens)
            + (f" in {train.accumulate_steps} micro-batches" if train.accumulate_steps > 1 else ""),
            "memory": f"{format_bytes(memory.peak)} per device" if memory else "unknown",
            "FLOPs": f"{format_count(flops)} by the model's formula, {compiled} as compiled",
            "compiled": f"in {train_step.compile_seconds:.1f} s{cached}",
        },
        "run": {
            "steps": (f"{start} (continued) to " if start else "") + str(train.num_steps),
            "warm-up": counted(config.optim.warmup_steps, "step")
            + (", more than the run has" if config.optim.warmup_steps > train.num_steps else ""),
            "workdir": str(workdir),
        },
    }
