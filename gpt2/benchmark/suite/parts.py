"""What the suite measures: a table of parts, the most important first.

The limits of `FIRST` add up to less than nine minutes, so that a short lease of a GPU yields them.
A case is a command that prints JSON. Its numbers are under `results`, by contestant.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import configs

# Parts that come first, and get nine minutes together.
FIRST = ("versions", "attention", "124m", "355m", "1558m")
SIZES = ("full", "tiny")

_NOT_MEASURED, _COMPILED = "not measured", "compiled for, not run"


@dataclasses.dataclass(frozen=True)
class Case:
    """A command to run, in a process of its own.

    Attributes:
        name: of its row in the table; cases of a part have different names.
        arguments: what Python gets.
        environment: variables that it gets beside those of the suite.
        needs: a package without which it is not run; empty: none.
    """

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    needs: str = ""


@dataclasses.dataclass(frozen=True)
class Part:
    """Cases that answer one question.

    Attributes:
        name: of its JSON file, and for `--parts`.
        title: for people.
        seconds: the time that its cases have together.
        cases: in the order in which they run.
        until_one_fits: whether the first case that is done is the last that runs.
        shares_cache: whether the cases share a cache of compiled programs, empty at first.
        unmeasured: what the table says in place of a result that is missing.
    """

    name: str
    title: str
    seconds: float
    cases: tuple[Case, ...]
    until_one_fits: bool = False
    shares_cache: bool = False
    unmeasured: str = _NOT_MEASURED


def make_parts(size: str, output: Path) -> tuple[Part, ...]:
    """Returns the parts of a size, in the order in which they run.

    Args:
        size: `full` for a GPU of 80 GB, or `tiny` for a CPU, in a minute or two.
        output: the suite's folder, where the first part writes the description of a GPU.
    """
    return _full(output) if size == "full" else _tiny(output)


def _benchmark(name: str, subject: str, *flags: str, **case: object) -> Case:
    command = ("-m", "gpt2.benchmark", subject, *flags, "--json")
    return Case(name, command, **case)  # type: ignore[arg-type]


def _train(name: str, model: str, rows: int, *flags: str, **case: object) -> Case:
    """A training step in bfloat16: five turns of a second."""
    timing = ("--compute=bfloat16", f"--batch_size={rows}", "--rounds=5", "--seconds=1")
    return _benchmark(name, "train", f"--model={model}", *timing, *flags, **case)


def _rows(rows: int) -> str:
    return f"{rows} x 1024 tokens"


def _full(output: Path) -> tuple[Part, ...]:
    small, xl = "gpt2-124m", "gpt2-1558m"
    remats = ("none", "dots", "attention", "mlp", "full")
    loop = (
        *(f"--config={_config('gpt2_124m')}", "--config.data.corpus=pystdlib"),
        *("--config.data.batch_size=32", "--config.train.num_steps=300"),
        *("--config.train.eval_batches=4", "--config.train.eval_every=0"),
    )
    return (
        Part("versions", "Versions", 40, (_versions(output),)),
        Part(
            "attention",
            "Attention against the reference",
            100,
            (_attention("cudnn", "full"),),
        ),
        Part(
            "124m",
            "124M, bfloat16",
            200,
            tuple(_train(_rows(rows), small, rows) for rows in (32, 64, 16)),
            unmeasured=_COMPILED,
        ),
        Part(
            "355m",
            "355M, bfloat16",
            80,
            (_train(_rows(16), "gpt2-355m", 16),),
        ),
        Part(
            "1558m",
            "1558M, bfloat16, layers scanned",
            105,
            tuple(
                _train(f"{_rows(8)}, remat {r}", xl, 8, "--scan_layers", f"--remat={r}")
                for r in remats
            ),
            until_one_fits=True,
            unmeasured=_COMPILED,
        ),
        Part("loop", "train.py, 124M, bfloat16", 180, (_loop(_rows(32), loop),)),
        Part(
            "torch",
            "124M beside PyTorch, in turn",
            240,
            (
                _train(
                    _rows(16),
                    small,
                    16,
                    "--peers=torch,torch_compile",
                    needs="torch",
                ),
            ),
        ),
        Part(
            "mask",
            "A document mask beside plain causal, 124M, in turn",
            200,
            (
                _train(
                    _rows(8),
                    small,
                    8,
                    "--vary=data.document_mask=True",
                    "--vary=data.document_mask=True,model.attention=xla",
                ),
            ),
        ),
        Part(
            "generation",
            "Greedy generation, 124M, bfloat16",
            150,
            tuple(
                _benchmark(
                    f"{rows} x 512 new tokens",
                    "generate",
                    *(f"--model={small}", "--compute=bfloat16", f"--batch_size={rows}"),
                    *("--rounds=3", "--seconds=1"),
                )
                for rows in (1, 8, 64)
            ),
        ),
        Part(
            "compile",
            "Compile times, 124M, bfloat16, 32 x 1024 tokens",
            240,
            (
                _train("unrolled, empty cache", small, 32),
                _train("unrolled, filled cache", small, 32),
                _train("scanned, empty cache", small, 32, "--scan_layers"),
            ),
            shares_cache=True,
        ),
        Part(
            "variants",
            "Options beside the default, 124M, in turn",
            230,
            (
                _train(
                    _rows(8),
                    small,
                    8,
                    *("--vary=precision.logits=bfloat16", "--vary=model.attention=xla"),
                    "--vary=memory.scan_layers=True,memory.scan_unroll=12",
                ),
                _train(
                    f"{_rows(8)}, products also through Triton",
                    small,
                    8,
                    environment={"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"},
                ),
            ),
        ),
        Part(
            "float32",
            "124M, float32 as TF32",
            80,
            (
                _benchmark(
                    _rows(16),
                    "train",
                    *(f"--model={small}", "--batch_size=16", "--rounds=5", "--seconds=1"),
                ),
            ),
        ),
        Part(
            "rows",
            "Batches up to what fits, bfloat16",
            450,
            (
                *(_train(f"124M, {_rows(rows)}", small, rows) for rows in (80, 96, 8)),
                _train(f"355M, {_rows(32)}", "gpt2-355m", 32),
                *(
                    _train(
                        f"1558M, {_rows(rows)}, remat {r}",
                        xl,
                        rows,
                        "--scan_layers",
                        f"--remat={r}",
                    )
                    for rows, r in ((16, "none"), (16, "dots"), (32, "full"))
                ),
            ),
        ),
        Part(
            "shares",
            "124M, time by part of the model",
            90,
            (_train(_rows(32), small, 32, "--shares"),),
        ),
        Part(
            "repeats",
            "124M, five processes",
            330,
            tuple(_train(f"{_rows(32)}, process {i}", small, 32) for i in range(1, 6)),
        ),
    )


def _tiny(output: Path) -> tuple[Part, ...]:
    """The same parts with a model of a second, for a machine without a GPU."""
    size = ("--model=quickstart", "--context_length=16", "--batch_size=8")
    brief = ("--rounds=1", "--seconds=0")

    def train(name: str, *flags: str, **case: object) -> Case:
        return _benchmark(name, "train", *size, *brief, *flags, **case)

    loop = (
        *(f"--config={_config('quickstart')}", "--config.data.corpus=synthetic"),
        *("--config.data.tokenizer=byte", "--config.model.context_length=16"),
        *("--config.data.batch_size=8", "--config.train.num_steps=30"),
        *("--config.train.log_every=10", "--config.train.eval_batches=1"),
        *("--config.train.eval_every=0", "--config.train.checkpoint_every=0"),
        "--config.optim.warmup_steps=5",
    )
    seconds = 120.0
    parts = (
        Part("versions", "Versions", seconds, (_versions(output),)),
        Part(
            "attention",
            "Attention against the reference",
            seconds,
            (_attention("cudnn", "tiny"), _attention("blocked", "tiny")),
        ),
        Part("124m", "Training", seconds, (train("8 x 16 tokens"),)),
        Part(
            "1558m",
            "Training, layers scanned",
            seconds,
            tuple(
                train(f"remat {r}", "--scan_layers", f"--remat={r}", "--compute=bfloat16")
                for r in ("none", "full")
            ),
            until_one_fits=True,
        ),
        Part("loop", "train.py", seconds, (_loop("8 x 16 tokens", loop),)),
        Part(
            "torch",
            "Beside PyTorch, in turn",
            seconds,
            (train("8 x 16 tokens", "--peers=torch", needs="torch"),),
        ),
        Part(
            "mask",
            "A document mask beside plain causal, in turn",
            seconds,
            (train("8 x 16 tokens", "--vary=data.document_mask=True"),),
        ),
        Part(
            "generation",
            "Greedy generation",
            seconds,
            (_benchmark("8 x 8 new tokens", "generate", *size, *brief),),
        ),
        Part("shares", "Time by part of the model", seconds, (train("8 x 16 tokens", "--shares"),)),
    )
    return tuple(
        dataclasses.replace(part, cases=tuple(map(_compiled_fast, part.cases))) for part in parts
    )


def _compiled_fast(case: Case) -> Case:
    """Without most of XLA's optimizations, since nobody looks at these times."""
    return dataclasses.replace(case, environment={"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"})


def _versions(output: Path) -> Case:
    return Case("versions", ("-m", "gpt2.benchmark.suite.versions", str(output)))


def _attention(name: str, size: str) -> Case:
    return Case(name, ("-m", "gpt2.benchmark.suite.attention", name, size))


def _loop(name: str, options: Iterable[str]) -> Case:
    return Case(name, ("-m", "gpt2.benchmark.suite.loop", *options))


def _config(name: str) -> Path:
    return Path(configs.__file__).with_name(f"{name}.py")
