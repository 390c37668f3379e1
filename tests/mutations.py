"""Plants faults, one at a time, in a copy of the project, and runs the tests that should see them.

    python -m tests.mutations [PART OF A NAME ...]

It prints a line for each fault and fails if one is not caught. It takes about twenty minutes.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ("gpt2", "configs", "tests", "train.py", "eval.py", "pyproject.toml", "setup.py")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wrong line.

    Attributes:
        name: what is wrong.
        file: where.
        right: the text that stands there, once.
        wrong: what replaces it.
        tests: arguments of pytest: those that should fail.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: str


VALUES = "tests/test_switch_values.py -k "
OPTIM = "tests/test_optim.py -k "
MATRICES = "tests/test_optim_matrices.py -k "

FAULTS = [
    Fault(
        "a guard keeps what is not finite",
        "gpt2/training/guard.py",
        "goes_on = finite & (",
        "goes_on = (",
        "tests/test_guard.py -k never_been",
    ),
    Fault(
        "a step that is left out keeps its moments",
        "gpt2/training/steps.py",
        "return state.params, state.opt_state, jax.tree.map(",
        "return state.params, take()[1], jax.tree.map(",
        "tests/test_guard.py -k never_been",
    ),
    Fault(
        "a bad step that is left out lowers the loss scale",
        "gpt2/training/steps.py",
        "loss_scale = _choose(overflows | keep, loss_scale, state.loss_scale)",
        "pass",
        "tests/test_guard.py -k float16",
    ),
    Fault(
        "outliers are told by all values, known or not",
        "gpt2/training/guard.py",
        "std = jnp.std(self.recent, axis=1, ddof=1, where=known)",
        "std = jnp.std(self.recent, axis=1, ddof=1)",
        "tests/test_guard.py -k rule",
    ),
    Fault(
        "the gradient that is named is the last that broke",
        "gpt2/training/diagnosis.py",
        "name = max(bad, key=self._rank",
        "name = min(bad, key=self._rank",
        "tests/test_diagnosis.py -k gradient",
    ),
    Fault(
        "micro-batches are named in the wrong order",
        "gpt2/training/diagnosis.py",
        "here = jnp.arange(accumulate_steps) == index",
        "here = jnp.arange(accumulate_steps)[::-1] == index",
        "tests/test_diagnosis.py -k named",
    ),
    Fault(
        "a pause counts as a hang",
        "gpt2/telemetry/watchdog.py",
        "self._clock.current not in _WATCHED",
        "False",
        "tests/test_telemetry_watch.py -k watchdog",
    ),
    Fault(
        "rope turns with another base",
        "gpt2/model/gpt.py",
        "rotation(positions, cfg.head_size, cfg.rope_base)",
        "rotation(positions, cfg.head_size, 1.5 * cfg.rope_base)",
        VALUES + "rope",
    ),
    Fault(
        "rope ignores rope_base",
        "gpt2/model/gpt.py",
        "rotation(positions, cfg.head_size, cfg.rope_base)",
        "rotation(positions, cfg.head_size, 10000.0)",
        VALUES + "rope_base",
    ),
    Fault(
        "alibi favours far tokens",
        "gpt2/ops/attention.py",
        "slopes[:, None, None] * (key - query)",
        "slopes[:, None, None] * (query - key)",
        VALUES + "alibi",
    ),
    Fault(
        "alibi's slopes begin at 1",
        "gpt2/ops/scores.py",
        "(i + 1) / count",
        "i / count",
        VALUES + "slopes",
    ),
    Fault(
        "sinusoids are not scaled with the embedding",
        "gpt2/model/gpt.py",
        "x * scale + waves",
        "x + waves",
        VALUES + "sinusoidal",
    ),
    Fault(
        "SwiGLU's gate and value are swapped",
        "gpt2/model/layers.py",
        "GATES[cfg.activation](gate) * hidden",
        "GATES[cfg.activation](hidden) * gate",
        VALUES + "swiglu",
    ),
    Fault(
        "relu_squared without the square",
        "gpt2/ops/activation.py",
        "jnp.maximum(x, 0) if power == 1 else jnp.square(jnp.maximum(x, 0))",
        "jnp.maximum(x, 0)",
        VALUES + "relu_squared",
    ),
    Fault(
        "relu_squared's derivative without the factor 2",
        "gpt2/ops/activation.py",
        "else 2 * jnp.maximum(x, 0) * dy",
        "else jnp.maximum(x, 0) * dy",
        "tests/test_ops.py -k activations",
    ),
    Fault(
        "norms take another epsilon",
        "gpt2/model/layers.py",
        "center=center, eps=cfg.norm_eps",
        "center=center, eps=10 * cfg.norm_eps",
        VALUES + "norm_eps",
    ),
    Fault(
        "qk_norm takes its own epsilon",
        "gpt2/model/layers.py",
        "center=center, eps=cfg.norm_eps",
        "center=center, eps=1e-5 if self.axis == 'head_size' else cfg.norm_eps",
        "tests/test_hf_families.py -k qwen3",
    ),
    Fault(
        "a window sees one token more",
        "gpt2/ops/scores.py",
        "query - key < self.window",
        "query - key <= self.window",
        VALUES + "window",
    ),
    Fault(
        "the mask hides the token itself",
        "gpt2/ops/scores.py",
        "seen = query >= key",
        "seen = (query > key) | (query == 0)",
        VALUES + "gelu",
    ),
    Fault(
        "blocks of queries begin a key too late under a window",
        "gpt2/ops/blocked_attention.py",
        "end - block - scoring.window + 1",
        "end - block - scoring.window + 2",
        "tests/test_ops.py -k scoring",
    ),
    Fault(
        "a scan gives the window to the layers that see all",
        "gpt2/model/attention.py",
        "jnp.array(cfg.windows)[index] > 0",
        "jnp.array(cfg.windows)[index] == 0",
        "tests/test_switches.py -k 'cached and gemma'",
    ),
    Fault(
        "the heads of keys are repeated in the wrong order",
        "gpt2/ops/attention.py",
        "jnp.repeat(x, times, axis=2) for x in (k, v)",
        "jnp.tile(x, (1, 1, times, 1)) for x in (k, v)",
        VALUES + "grouped",
    ),
    Fault(
        "the soft cap of scores has the wrong derivative in blocks",
        "gpt2/ops/blocked_attention.py",
        "1.0 - (capped / scoring.softcap) ** 2",
        "1.0 - (capped / scoring.softcap)",
        "tests/test_ops.py -k scoring",
    ),
    Fault(
        "the soft cap of scores is ignored",
        "gpt2/model/attention.py",
        "softcap=cfg.attention_softcap",
        "softcap=0.0",
        VALUES + "attention_softcap",
    ),
    Fault(
        "post-norm norms the branch, not the sum",
        "gpt2/model/block.py",
        'Norm(cfg, name=name)(x + y) if cfg.norm_position == "post"',
        'x + Norm(cfg, name=name)(y) if cfg.norm_position == "post"',
        VALUES + "post",
    ),
    Fault(
        "a parallel block's MLP reads what attention wrote",
        "gpt2/model/block.py",
        "read = x if cfg.parallel_block else between",
        "read = between",
        VALUES + "parallel_block",
    ),
    Fault(
        "values are mixed with the layer before, not the first",
        "gpt2/model/attention.py",
        "(v, first), first",
        "(v, first), v",
        VALUES + "third_layer",
    ),
    Fault(
        "the scanned first layer mixes in nothing",
        "gpt2/model/attention.py",
        "jnp.where(index == 0, v, first_values)",
        "first_values",
        "tests/test_switches.py -k 'cached and modded'",
    ),
    Fault(
        "z-loss has half its gradient",
        "gpt2/ops/cross_entropy.py",
        "1.0 + 2.0 * self.z_loss",
        "1.0 + self.z_loss",
        "tests/test_ops.py -k cross_entropy",
    ),
    Fault(
        "label smoothing spreads over one token too few",
        "gpt2/ops/cross_entropy.py",
        "target_logits - mean / self.vocab_size",
        "target_logits - mean / (self.vocab_size - 1)",
        VALUES + "label_smoothing",
    ),
    Fault(
        "validation smooths labels too",
        "gpt2/training/steps.py",
        "loss: LossConfig = LossConfig(),\n    **options",
        "loss: LossConfig = LossConfig(label_smoothing=0.1),\n    **options",
        VALUES + "validation",
    ),
    Fault(
        "muP leaves the head's multiplier out",
        "gpt2/model/gpt.py",
        "x / cfg.width_ratio if cfg.mup_base_width else x",
        "x",
        VALUES + "mup",
    ),
    Fault(
        "muP draws kernels as wide ones",
        "gpt2/model/layers.py",
        "cfg.init_std / cfg.width_ratio**0.5",
        "cfg.init_std",
        VALUES + "kernels",
    ),
    Fault(
        "wsd decays over a tenth",
        "gpt2/config/optim.py",
        "_DECAY_PERCENT = 20.0",
        "_DECAY_PERCENT = 10.0",
        OPTIM + "schedules",
    ),
    Fault(
        "the warm-up ends a step late",
        "gpt2/optim/schedules.py",
        "[optax.linear_schedule(peak / (warmup + 1), peak, warmup), after], [warmup]",
        "[optax.linear_schedule(peak / (warmup + 1), peak, warmup), after], [warmup + 1]",
        OPTIM + "schedules",
    ),
    Fault(
        "weight decay on norms and biases",
        "gpt2/optim/parameters.py",
        "return map_parameters(lambda path, _: is_matrix(path), params)",
        "return map_parameters(lambda path, _: True, params)",
        OPTIM + "'weight_decay_spares'",
    ),
    Fault(
        "cautious updates are not scaled up",
        "gpt2/optim/transforms.py",
        "update * (agrees / jnp.maximum(share, _MIN_SHARE))",
        "update * agrees",
        OPTIM + "formulas",
    ),
    Fault(
        "the average keeps the parameters before the step",
        "gpt2/optim/transforms.py",
        "(1 - decay) * (param + update)",
        "(1 - decay) * param",
        OPTIM + "formulas",
    ),
    Fault(
        "ademamix's slow average does not warm up",
        "gpt2/optim/optimizers.py",
        "return optim.alpha * progress(count)",
        "return optim.alpha + 0.0 * progress(count)",
        OPTIM + "formulas",
    ),
    Fault(
        "adafactor takes one statistic for all stacked layers",
        "gpt2/optim/parameters.py",
        "tuple(range(int(is_stacked(path)), leaf.ndim))",
        "tuple(range(leaf.ndim))",
        OPTIM + "formulas",
    ),
    Fault(
        "muP leaves the rates of kernels alone",
        "gpt2/optim/optimizers.py",
        "factor if _is_hidden(name) else 1.0",
        "1.0",
        "tests/test_coordinates.py",
    ),
    Fault(
        "layer_rates takes the last pattern that matches",
        "gpt2/optim/optimizers.py",
        "next((i for i, (p, _) in enumerate(optim.rates) if",
        "next((i for i, (p, _) in reversed([*enumerate(optim.rates)]) if",
        OPTIM + "layer_rates",
    ),
    Fault(
        "an option that the optimizer does not read passes",
        "gpt2/config/optim.py",
        "if option not in READS[self.name]:",
        "if option not in READS[self.name] and option != 'momentum':",
        OPTIM + "mistakes",
    ),
    Fault(
        "a Newton-Schulz coefficient is missing",
        "gpt2/optim/muon.py",
        "product(b * gram + c * product(gram, gram), x)",
        "product(b * gram, x)",
        MATRICES + "formula",
    ),
    Fault(
        "four Newton-Schulz iterations",
        "gpt2/optim/muon.py",
        "range(NUM_ITERATIONS)",
        "range(NUM_ITERATIONS - 1)",
        MATRICES + "formula",
    ),
    Fault(
        "soap does not turn its second moment with the basis",
        "gpt2/optim/soap.py",
        "return row_basis, column_basis, jnp.take_along_axis(nu, columns[:, None, :], axis=2)",
        "return row_basis, column_basis, nu",
        MATRICES + "formula",
    ),
    Fault(
        "bits per byte with the logarithm to base 10",
        "gpt2/evals/validation.py",
        "math.log(2.0)",
        "math.log10(2.0)",
        VALUES + "bits_per_byte",
    ),
    Fault(
        "FLOPs count a gated MLP as a plain one",
        "gpt2/telemetry/flops.py",
        "into_mlp = 2 if cfg.is_gated else 1",
        "into_mlp = 1",
        "tests/test_switches.py -k 'flops and swiglu'",
    ),
]


def is_caught(fault: Fault, directory: Path) -> bool:
    """Plants a fault in the copy at `directory`, says whether a test fails, and takes it out."""
    path = directory / fault.file
    text = path.read_text()
    if text.count(fault.right) != 1:
        raise SystemExit(f"{fault.name}: {fault.file} has {fault.right!r} not once")
    path.write_text(text.replace(fault.right, fault.wrong))
    try:
        return run(fault.tests, directory) == 1  # 5: no test was found
    finally:
        path.write_text(text)


def run(tests: str, directory: Path) -> int:
    """Runs tests of the copy and returns pytest's exit code."""
    command = f"{sys.executable} -m pytest -q -x -n 0 -p no:cacheprovider -m 'not slow' {tests}"
    environment = os.environ | {"PYTHONPATH": str(directory)}
    done = subprocess.run(
        command, shell=True, cwd=directory, env=environment, capture_output=True, text=True
    )
    return done.returncode


def main() -> None:
    """Plants every fault whose name contains an argument; all of them without arguments."""
    chosen = [f for f in FAULTS if not sys.argv[1:] or any(a in f.name for a in sys.argv[1:])]
    missed = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "copy"
        directory.mkdir()
        for name in COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, directory / name)
        for tests in sorted({fault.tests for fault in chosen}):
            if code := run(tests, directory):
                raise SystemExit(f"without a fault, {tests} ends with {code}")
        for fault in chosen:
            began = time.monotonic()
            caught = is_caught(fault, directory)
            missed += [] if caught else [fault.name]
            verdict = "caught" if caught else "MISSED"
            print(f"{verdict} in {time.monotonic() - began:3.0f} s: {fault.name}", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults are caught")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
