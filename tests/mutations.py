"""Plants faults, one at a time, in a copy of the project, and runs the tests that should see them.

    python -m tests.mutations [PART OF A NAME ...]

It prints a line for each fault and fails if one is not caught. It takes about twenty minutes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ("gpt2", "configs", "tests", "train.py", "eval.py", "pyproject.toml", "setup.py")


class Fault(NamedTuple):
    """`wrong` in place of `right`, which stands once in `file`; `tests` should fail."""

    name: str
    file: str
    tests: str
    right: str
    wrong: str


# A name; a file and the arguments of pytest; a part of a line, and what replaces it.
TABLE = """
published losses lie at other steps
    gpt2/telemetry/plots.py: tests/test_recipes.py -k as_much
    - steps = points[:, 0] / per_step
    + steps = points[:, 0] / last
a guard keeps NaN and Inf
    gpt2/training/guard.py: tests/test_guard.py -k never_been
    - goes_on = finite & (
    + goes_on = (
a skipped step keeps its moments
    gpt2/training/steps.py: tests/test_guard.py -k never_been
    - return state.params, state.opt_state, jax.tree.map(
    + return state.params, take()[1], jax.tree.map(
a bad step that is skipped lowers the loss scale
    gpt2/training/steps.py: tests/test_guard.py -k float16
    - loss_scale = _choose(overflows | keep, loss_scale, state.loss_scale)
    + pass
outliers are told by all values, known or not
    gpt2/training/guard.py: tests/test_guard.py -k rule
    - std = jnp.std(self.recent, axis=1, ddof=1, where=known)
    + std = jnp.std(self.recent, axis=1, ddof=1)
the gradient that is named is the last that broke
    gpt2/training/diagnosis.py: tests/test_diagnosis.py -k gradient
    - sorted(grads, key=place, reverse=True)
    + sorted(grads, key=place)
micro-batches are named in the wrong order
    gpt2/training/diagnosis.py: tests/test_diagnosis.py -k named
    - jnp.arange(number) == index
    + jnp.arange(number)[::-1] == index
rope ignores rope_base
    gpt2/model/gpt.py: tests/test_switch_values.py -k rope_base
    - rotation(positions, cfg.rope_size, cfg.rope_base
    + rotation(positions, cfg.rope_size, 10000.0
alibi favours far tokens
    gpt2/ops/attention.py: tests/test_switch_values.py -k alibi
    - slopes[:, None, None] * (key - query)
    + slopes[:, None, None] * (query - key)
nothing is dropped of the embedding
    gpt2/model/gpt.py: tests/test_switch_values.py -k dropout
    - x = self.dropout(x, deterministic=deterministic)
    + x = self.dropout(x, deterministic=True)
qk_norm takes its own epsilon
    gpt2/model/layers.py: tests/test_hf.py -k qwen3
    - center=center, eps=cfg.norm_eps
    + center=center, eps=1e-5 if self.axis == 'head_size' else cfg.norm_eps
blocks of queries begin a key too late under a window
    gpt2/ops/blocked_attention.py: tests/test_ops.py -k scoring
    - end - block - scoring.window + 1
    + end - block - scoring.window + 2
the heads of keys are repeated in the wrong order
    gpt2/ops/attention.py: tests/test_switch_values.py -k grouped
    - jnp.repeat(x, times, axis=2) for x in (k, v)
    + jnp.tile(x, (1, 1, times, 1)) for x in (k, v)
the soft cap of scores has the wrong derivative in blocks
    gpt2/ops/blocked_attention.py: tests/test_ops.py -k scoring
    - 1.0 - (capped / scoring.softcap) ** 2
    + 1.0 - (capped / scoring.softcap)
post-norm norms the branch, not the sum
    gpt2/model/block.py: tests/test_switch_values.py -k post
    - Norm(cfg, name=name)(x + y) if cfg.norm_position == "post"
    + x + Norm(cfg, name=name)(y) if cfg.norm_position == "post"
a parallel block's MLP reads what attention wrote
    gpt2/model/block.py: tests/test_switch_values.py -k parallel_block
    - read = x if cfg.parallel_block else between
    + read = between
no layer keeps its values for the others
    gpt2/model/attention.py: tests/test_switch_values.py -k value_residual
    - jnp.where(layer == 0, v, first_values)
    + first_values
label smoothing spreads over one token too few
    gpt2/ops/cross_entropy.py: tests/test_switch_values.py -k label_smoothing
    - target_logits - mean / self.vocab_size
    + target_logits - mean / (self.vocab_size - 1)
validation smooths labels too
    gpt2/training/steps.py: tests/test_switch_values.py -k validation
    - return next_token_loss(GPT(dataclasses.replace(model.config, logits_dtype="float32")))
    + return next_token_loss(GPT(model.config), LossConfig(label_smoothing=0.1))
weight decay on norms and biases
    gpt2/optim/parameters.py: tests/test_optim.py -k 'formulas and adamw'
    - return map_parameters(lambda path, _: path[-1] in _DECAYED, params)
    + return map_parameters(lambda path, _: True, params)
the average keeps the parameters before the step
    gpt2/optim/transforms.py: tests/test_optim.py -k formulas
    - (1 - kept) * (param + update)
    + (1 - kept) * param
the mean over the tail begins a step early
    gpt2/optim/optimizers.py: tests/test_optim.py -k 'formulas and tail'
    - jnp.maximum(count + 1 - start, 1)
    + jnp.maximum(count + 2 - start, 1)
scheduled decay is a step ahead of its schedule
    gpt2/optim/optimizers.py: tests/test_optim.py -k 'formulas and scheduled'
    - schedule(count) / peak
    + schedule(count + 1) / peak
ademamix's slow average does not warm up
    gpt2/optim/optimizers.py: tests/test_optim.py -k formulas
    - return optim.alpha * progress(count)
    + return optim.alpha + 0.0 * progress(count)
a cautious mask takes one share for all stacked layers
    gpt2/optim/parameters.py: tests/test_optim.py -k formulas
    - tuple(range(int(is_stacked(path)), leaf.ndim))
    + tuple(range(leaf.ndim))
muP leaves the rates of kernels alone
    gpt2/optim/optimizers.py: tests/test_coordinates.py
    - optax.scale(factor)
    + optax.identity()
layer_rates takes the last pattern that matches
    gpt2/optim/optimizers.py: tests/test_optim.py -k layer_rates
    - next((i for i, (p, _) in enumerate(optim.rates) if
    + next((i for i, (p, _) in reversed([*enumerate(optim.rates)]) if
an option that the optimizer does not read passes
    gpt2/config/run.py: tests/test_config.py -k 'sgd and refused'
    - {*OPTIMIZERS[self.name]}
    + {*OPTIMIZERS[self.name], 'beta1'}
the mask hides the token itself
    gpt2/ops/scores.py: tests/test_switch_values.py -k gelu
    - seen = query >= key
    + seen = (query > key) | (query == 0)
a window sees one token more
    gpt2/ops/scores.py: tests/test_switch_values.py -k window
    - query - key < self.window
    + query - key <= self.window
alibi's slopes begin at 1
    gpt2/ops/scores.py: tests/test_switch_values.py -k slopes
    - -8.0 * (i + 1) / smaller
    + -8.0 * i / smaller
dropped weights of attention are not made up for
    gpt2/ops/attention.py: tests/test_switch_values.py -k dropout
    - weights / (1.0 - dropout)
    + weights
nothing is dropped of the MLP's branch
    gpt2/model/block.py: tests/test_switch_values.py -k dropout
    - dropout(self._sandwich("ln_2_post", y))
    + self._sandwich("ln_2_post", y)
a scan gives the window to the layers that see all
    gpt2/utils/scan.py: tests/test_switches.py -k 'cached and gemma'
    - different.index(value) for value in values
    + different.index(value) for value in values[::-1]
the soft cap of scores is ignored
    gpt2/model/attention.py: tests/test_switch_values.py -k attention_softcap
    - softcap=cfg.attention_softcap, scale
    + softcap=0.0, scale
values are mixed with the layer before, not the first
    gpt2/model/attention.py: tests/test_switch_values.py -k third_layer
    - jnp.where(layer == 0, v, first_values)
    + jnp.where(layer <= 1, v, first_values)
sinusoids are not scaled with the embedding
    gpt2/model/gpt.py: tests/test_switch_values.py -k sinusoidal
    - x * scale + waves
    + x + waves
muP leaves the head's multiplier out
    gpt2/model/gpt.py: tests/test_switch_values.py -k mup
    - x / cfg.width_ratio if cfg.mup_base_width else x
    + x
muP draws kernels as wide ones
    gpt2/model/layers.py: tests/test_switch_values.py -k kernels
    - cfg.init_std / cfg.width_ratio**0.5
    + cfg.init_std
the first cached token has none before it
    gpt2/model/gpt.py: tests/test_switches.py -k 'cached and modded'
    - first = x[:, :1] if cache is None
    + first = x[:, :1] if True
padding has a target
    gpt2/data/loader.py: tests/test_packing.py -k mean_over
    - np.full_like(tokens, IGNORED)
    + np.zeros_like(tokens)
own batches go on from where they were read ahead
    gpt2/data/own.py: tests/test_packing.py -k go_on_from
    - self._states.get(step, "")
    + self._states[max(self._states)]
a document smears into the next
    gpt2/model/gpt.py: tests/test_model.py -k segments
    - cfg, exists = self.config, positions > 0
    + cfg, exists = self.config, jnp.arange(x.shape[1])[None] > 0
positions run on into the next document
    gpt2/model/gpt.py: tests/test_model.py -k segments
    - jnp.arange(T)[None] if segments is None else positions_within(segments)
    + jnp.arange(T)[None]
a pair of tokens is looked up without its order
    gpt2/model/layers.py: tests/test_switch_values.py -k bigram
    - (before.astype(jnp.uint32) * 27191)
    + (before.astype(jnp.uint32) * 36313)
the stream of another layer is backed out
    gpt2/model/block.py: tests/test_switch_values.py -k backout
    - layer == cfg.num_layers // 2, x
    + layer == 0, x
the part along the value is measured by its length, not its square
    gpt2/model/attention.py: tests/test_switch_values.py -k exclusive
    - jnp.maximum((own * own).sum(-1, keepdims=True), TINY)
    + jnp.sqrt(jnp.maximum((own * own).sum(-1, keepdims=True), TINY))
a sink has half its gradient in blocks
    gpt2/ops/blocked_attention.py: tests/test_ops.py -k scoring
    - dsinks = -(jnp.exp(
    + dsinks = -0.5 * (jnp.exp(
a sink gives its weight to the last key
    gpt2/ops/attention.py: tests/test_switch_values.py -k attention_sink
    - axis=-1))[..., :-1]
    + axis=-1))[..., 1:]
attention's gate reads what the next head should
    gpt2/model/attention.py: tests/test_switch_values.py -k attention_gate
    - constrain(gate, "batch", "length", "heads"))
    + jnp.roll(gate, 1, axis=-1))
losses ahead cross from one document to the next
    gpt2/model/gpt.py: tests/test_switch_values.py -k losses_ahead
    - seen = valid if segments is None else
    + seen = valid if True else
losses ahead do not fade
    gpt2/training/steps.py: tests/test_switch_values.py -k losses_ahead
    - jnp.maximum(1 - step / fade, 0.0)
    + jnp.maximum(1 - 0 / fade, 0.0)
SwiGLU's gate and value are swapped
    gpt2/model/layers.py: tests/test_switch_values.py -k swiglu
    - GATES[cfg.activation](gate) * hidden
    + GATES[cfg.activation](hidden) * gate
relu_squared's derivative without the factor 2
    gpt2/ops/activation.py: tests/test_ops.py -k activations
    - else 2 * jnp.maximum(x, 0) * dy
    + else jnp.maximum(x, 0) * dy
z-loss has half its gradient
    gpt2/ops/cross_entropy.py: tests/test_ops.py -k cross_entropy
    - 1.0 + 2.0 * self.z_loss
    + 1.0 + self.z_loss
the warm-up ends a step late
    gpt2/optim/schedules.py: tests/test_optim.py -k schedules
    - after], [warmup]
    + after], [warmup + 1]
cautious updates are not scaled up
    gpt2/optim/transforms.py: tests/test_optim.py -k formulas
    - update * (agrees / jnp.maximum(share, _MIN_SHARE))
    + update * agrees
four Newton-Schulz iterations
    gpt2/optim/muon.py: tests/test_optim_matrices.py -k formula
    - 5 * ((3.4445
    + 4 * ((3.4445
a question of CORE is among its own few-shot examples
    gpt2/evals/core.py: tests/test_evals.py -k by_hand
    - self.examples[other + (other >= index)]
    + self.examples[other]
bits per byte with the logarithm to base 10
    gpt2/evals/validation.py: tests/test_evals.py -k bits_per_byte
    - / math.log(2.0)
    + / math.log10(2.0)
norms take another epsilon
    gpt2/model/layers.py: tests/test_switch_values.py -k norm_eps
    - center=center, eps=cfg.norm_eps
    + center=center, eps=10 * cfg.norm_eps
relu_squared without the square
    gpt2/ops/activation.py: tests/test_switch_values.py -k relu_squared
    - else jnp.square(jnp.maximum(x, 0))
    + else jnp.maximum(x, 0)
wsd decays over a tenth
    gpt2/config/run.py: tests/test_optim.py -k schedules
    - self.decay_percent or 20
    + self.decay_percent or 10
a pause counts as a hang
    gpt2/telemetry/reporter.py: tests/test_telemetry.py -k watchdog
    - if self._clock.current in ("step", "data wait")
    + if True
a Newton-Schulz coefficient is missing
    gpt2/optim/muon.py: tests/test_optim_matrices.py -k formula
    - product(b * gram + c * product(gram, gram), x)
    + product(b * gram, x)
polar express repeats its second polynomial
    gpt2/optim/muon.py: tests/test_optim_matrices.py -k 'formula and polar'
    - (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    + (4.042929935166739, -2.808917465908714, 0.5000178451051316),
muon's momentum warms up a step early
    gpt2/optim/muon.py: tests/test_optim_matrices.py -k 'formula and warmed'
    - momentum(state.count)
    + momentum(state.count + 1)
soap does not turn its second moment with the basis
    gpt2/optim/soap.py: tests/test_optim_matrices.py -k formula
    - return row_basis, column_basis, jnp.take_along_axis(nu, columns[:, None, :], axis=2)
    + return row_basis, column_basis, nu
FLOPs count a gated MLP as a plain one
    gpt2/telemetry/flops.py: tests/test_switches.py -k 'flops and swiglu'
    - into_mlp = 2 if cfg.is_gated else 1
    + into_mlp = 1
rope turns a part of a head by the wavelengths of the whole
    gpt2/model/gpt.py: tests/test_switch_values.py -k rope_share
    - rotation(positions, cfg.rope_size, cfg.rope_base
    + rotation(positions, cfg.rope_size, cfg.rope_base**cfg.rope_share
Llama 3.1 slows the fast turns, not the slow ones
    gpt2/ops/scores.py: tests/test_switch_values.py -k llama3
    - kept * frequencies + (1 - kept) * frequencies / factor
    + (1 - kept) * frequencies + kept * frequencies / factor
YaRN's scores spread over more tokens
    gpt2/ops/scores.py: tests/test_switch_values.py -k yarn
    - 0.1 * math.log(factor) + 1 if scaling
    + 1 if scaling
YaRN slows a dimension too many
    gpt2/ops/scores.py: tests/test_switch_values.py -k yarn
    - min(math.ceil(last)
    + min(math.floor(last)
FLOPs count heads as wide as the model
    gpt2/telemetry/flops.py: tests/test_switches.py -k 'flops and head_dim'
    - heads = cfg.num_heads * H
    + heads = cfg.embed_dim
a checkpoint is believed by the name of its folder
    gpt2/training/checkpoint_files.py: tests/test_checkpoint.py -k renamed
    - if layout.get("step", step) != step:
    + if False:
a checkpoint of another run is believed
    gpt2/training/checkpoint_files.py: tests/test_checkpoint.py -k another_run
    - if changed := changes({name: theirs[name] for name in theirs if name in own}, own):
    + if changed := "":
altered values are not noticed
    gpt2/training/checkpoint_files.py: tests/test_checkpoint.py -k damage_to_any
    - files.find_damage(folder, found, read=read)
    + files.find_damage(folder, found, read=False)
a run that was killed begins anew
    train.py: tests/test_train.py -k killed
    - start = distributed.from_first(distributed.only_first(folder.find_start)(workdir) or 0)
    + start = 0
small programs are compiled at every start
    gpt2/utils/launch.py: tests/test_train.py -k second_start
    - cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    + cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "9"
a run continues with another optimizer
    gpt2/training/checkpoint_files.py: tests/test_workdir.py -k continues_unless
    - return not aside and name not in _MAY_CHANGE
    + return name.startswith("model.")
runs of different code are pooled
    gpt2/ablate/sweep.py: tests/test_ablate.py -k different_code
    - pools = len(seeds) > len(
    + pools = len(seeds) > 1 + len(
steps that a run no longer has count as its own
    gpt2/training/code.py: tests/test_ablate.py -k different_code
    - for each in starts if each["step"] < start["step"]] + [start]
    + for each in starts] + [start]
a run of other code is taken over
    gpt2/ablate/takeover.py: tests/test_ablate.py -k taken_over
    - or _facts(starts) != facts:
    + :
a run on another text is taken over
    gpt2/ablate/takeover.py: tests/test_ablate.py -k taken_over
    - if same_text and (lock := take(run)):
    + if lock := take(run):
what a kill undid counts as done
    gpt2/telemetry/metrics.py: tests/test_workdir.py -k add_up
    - r["step"] <= step and f"
    + f"
the hash of the code sees docstrings
    gpt2/training/code.py: tests/test_workdir.py -k hash_of_the_code
    - del node.body[0]
    + pass
a tokenizer.json cuts and pads texts
    gpt2/data/tokenizer.py: tests/test_tokenizer.py -k no_others
    - tree = _plain(tree)
    + pass
a part of a document is encoded as a document
    gpt2/data/tokenizer.py: tests/test_tokenizer.py -k of_its_parts
    - backend = self._backend if starts else self._rest
    + backend = self._backend
"""


def faults() -> list[Fault]:
    """Returns the faults of the table."""
    lines, found = TABLE.strip().split("\n"), []
    for name, place, right, wrong in zip(*(lines[i::4] for i in range(4)), strict=True):
        assert right.startswith("    - ") and wrong.startswith("    + "), name
        file, _, tests = place.strip().partition(": ")
        found.append(Fault(name, file, tests, right[6:], wrong[6:]))
    return found


def misplaced(chosen: list[Fault]) -> list[str]:
    """Returns the faults whose `right` does not stand once in its file, or whose test is gone."""
    return [
        f"{fault.name}: {fault.file}: {fault.right}"
        for fault in chosen
        if not (ROOT / fault.file).exists()
        or (ROOT / fault.file).read_text().count(fault.right) != 1
        or not (ROOT / fault.tests.split()[0]).exists()
    ]


def is_caught(fault: Fault, directory: Path) -> bool:
    """Plants a fault in the copy at `directory`, says whether a test fails, and takes it out."""
    path = directory / fault.file
    text = path.read_text()
    path.write_text(text.replace(fault.right, fault.wrong))
    try:
        return run(fault.tests, directory) == 1  # 5: no test was found
    finally:
        path.write_text(text)


def run(tests: str, directory: Path) -> int:
    """Runs tests of the copy and returns pytest's exit code."""
    command = f"{sys.executable} -m pytest -q -x -n 0 -p no:cacheprovider -m 'not slow' {tests}"
    environment = os.environ | {"PYTHONPATH": str(directory)}
    return subprocess.run(
        command, shell=True, cwd=directory, env=environment, capture_output=True
    ).returncode


def main(*names: str) -> int:
    """Plants every fault whose name contains one of `names`; all of them without any."""
    chosen = [f for f in faults() if not names or any(name in f.name for name in names)]
    if lost := misplaced(chosen):
        raise SystemExit("these do not stand in the code any more:\n" + "\n".join(lost))
    missed = 0
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "copy"
        directory.mkdir()
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, directory / name)
        for tests in sorted({fault.tests for fault in chosen}):
            if code := run(tests, directory):
                raise SystemExit(f"without a fault, {tests} ends with {code}")
        for fault in chosen:
            began, caught = time.monotonic(), is_caught(fault, directory)
            missed += not caught
            verdict = "caught" if caught else "MISSED"
            print(f"{verdict} in {time.monotonic() - began:3.0f} s: {fault.name}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults are caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
