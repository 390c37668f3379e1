"""The text of a run's first and last screen."""

from collections.abc import Mapping
from pathlib import Path

import jax

from gpt2.config import Config
from gpt2.launch import describe_settings
from gpt2.model import num_params
from gpt2.telemetry.compile_watch import CompiledStep
from gpt2.telemetry.flops import model_flops_per_token
from gpt2.telemetry.throughput import StepClock, peak_source
from gpt2.training.feed import Feed
from gpt2.training.program import Program
from gpt2.utils.text import counted, format_bytes, format_count, format_duration

_ZLIB_WINDOW = 2**15  # bytes; in a shorter text zlib finds too little to repeat to be a yardstick


def describe_run(
    program: Program,
    feed: Feed,
    train_step: CompiledStep,
    clock: StepClock,
    workdir: Path,
    start: int,
) -> dict[str, dict[str, str]]:
    """Returns the text of the screen before the loop: sections of names and values.

    Args:
        program: of the run.
        feed: of the run.
        train_step: the program's, compiled.
        clock: of the run, which knows the peak of the devices.
        workdir: where the run lives.
        start: the step from which it continues, 0 for a new run.
    """
    config, dataset, params = program.config, feed.dataset, program.state_shapes.params
    model, train, device = config.model, config.train, jax.devices()[0]
    unroll = config.memory.scan_unroll
    by = f", {unroll} a turn" if unroll > 1 else ""
    layers = f"scanned{by}" if config.memory.scan_layers else "unrolled"
    remat = f", remat {config.memory.remat}" if config.memory.remat != "none" else ""
    tokens = config.tokens_per_step
    num_tokens = sum(split.num_tokens for split in dataset.splits.values())
    held_out = dataset.splits["validation"].num_tokens
    epochs = train.num_steps * tokens / dataset.splits["train"].num_tokens
    flops = tokens * model_flops_per_token(program.model.config)
    compiled = f"{format_count(train_step.flops)} a device" if train_step.flops else "unknown"
    text = train_step.text()
    once = " (XLA counts one turn of a loop)" if " while(" in text else ""
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
            "validation": f"{format_count(held_out)} tokens, {held_out / num_tokens:.2%} of all",
        },
        "devices": {
            "kind": f"{jax.device_count()} x {device.device_kind}",
            "layout": program.backend.layout,
            "processes": str(jax.process_count()),
            "peak": _describe_peak(clock.peak_flops, config.precision.compute, device),
        }
        | ({"settings": settings} if (settings := describe_settings()) else {}),
        "step": {
            "tokens": format_count(tokens)
            + (f" in {train.accumulate_steps} micro-batches" if train.accumulate_steps > 1 else ""),
            "memory": f"{format_bytes(memory.peak)} per device" if memory else "unknown",
            "FLOPs": f"{format_count(flops)} by the model's formula, {compiled} as compiled{once}",
            "compiled": f"in {train_step.compile_seconds:.1f} s{cached}",
        },
        "run": {
            "steps": (f"{start} (continued) to " if start else "") + str(train.num_steps),
            "warm-up": _describe_warmup(config),
            "validated": f"{_describe_times(train.eval_every, train.num_steps)}, on "
            + ("the whole split" if feed.eval_is_whole else _describe_part(feed)),
            "saved": _describe_times(train.checkpoint_every, train.num_steps)
            + ", and after each validation that is the best so far"
            + (f"; those of every {train.keep_every:,} steps stay" if train.keep_every else ""),
            "logged": _describe_times(train.log_every, train.num_steps),
        }
        | ({"trace": _describe_trace(config, start)} if config.logging.profile_steps else {})
        | {"workdir": str(workdir)},
    }


def _describe_peak(peak_flops: float | None, compute: str, device: jax.Device) -> str:
    """Says what MFU is a share of, and whether it compares between starts."""
    if peak_flops is None:
        return "unknown, so that there is no MFU"
    size, unit = (1e12, "T") if peak_flops >= 1e13 else (1e9, "G")
    rate, source = f"{peak_flops / size:,.0f} {unit}FLOP/s in {compute}", peak_source(device)
    if (number := jax.device_count()) > 1:
        rate += f", of {number} devices"
    if source == "measured":
        return f"{rate}, measured at this start: MFU does not compare with other starts"
    return f"{rate} ({source})"


def _describe_warmup(config: Config) -> str:
    num_steps, warmup = config.train.num_steps, config.optim.warmup(config.train.num_steps)
    if warmup < num_steps:
        return counted(warmup, "step")
    what = "all of the run" if warmup == num_steps else "more than the run has"
    return (
        f"{counted(warmup, 'step')}, {what}: optim.schedule and its rates are never reached; "
        f"give {config.optim.shorter_warmup(num_steps)}"
    )


def _describe_times(every: int, num_steps: int) -> str:
    """Says at which steps something is done that recurs, and is done at the end in any case."""
    if not every or every == num_steps:
        return "at the end"
    if every > num_steps:
        return f"at the end ({counted(every, 'step')} are more than the run has)"
    if every == 1:
        return "at every step"
    return f"every {counted(every, 'step')}" + (" and at the end" if num_steps % every else "")


def _describe_part(feed: Feed) -> str:
    number = "" if feed.num_eval_batches == 1 else f" {feed.num_eval_batches}"
    return f"the first{number} of the split's batches"


def _describe_trace(config: Config, start: int) -> str:
    """Says which steps the profiler traces, counted from 0, if it is asked for any."""
    begin, asked = config.logging.profile_start, config.logging.profile_steps
    traced = range(max(begin, start), min(begin + asked, config.train.num_steps))
    if not traced:
        return f"none: the run continues from step {start}, after those of logging.profile_start"
    missing = f", {len(traced)} of the {asked} asked for" if len(traced) < asked else ""
    return f"steps {traced[0]} to {traced[-1]}, counted from 0{missing}"


def describe_results(
    scores: Mapping[str, float], feed: Feed, clock: StepClock, start: int = 0
) -> str:
    """Returns the text at the end of a run: where the time went, and how good the model is.

    Args:
        scores: of the last validation.
        feed: which says how much of the validation split was scored.
        clock: of the run.
        start: the step from which it continued, 0 for a new run.
    """
    time = ", ".join(f"{name} {share:.0%}" for name, share in clock.shares().items())
    whose = " over all starts; of this one" if start else ";"
    line = f"validation loss {scores['eval/loss']:.4f}, perplexity {scores['eval/perplexity']:,.2f}"
    if "eval/bits_per_byte" in scores:
        line += f", {scores['eval/bits_per_byte']:.3f} bits per byte"
        if feed.dataset.splits["validation"].num_bytes >= _ZLIB_WINDOW:
            zlib = f"{feed.dataset.zlib_bits_per_byte:.3f}"
            line += f" (zlib -9 needs {zlib} for the same text)"
    if not feed.eval_is_whole:
        line += f", on {_describe_part(feed)}"
    return f"time: {format_duration(clock.total_seconds)}{whose} {time}\n{line}"
