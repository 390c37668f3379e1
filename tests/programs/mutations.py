"""Plant faults, one at a time in each of two copies of the project, and run the tests for them.

    python -m tests.programs.mutations [--fast] [PART OF A NAME ...]

The program prints a line for each fault, and fails if a fault is not caught. It takes about twenty
minutes. With `--fast`, no thorough tests run: what does the command of README.md catch?
"""

import contextlib
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.helpers import ROOT, copy_project

COPIES = 2  # of the project, in which tests run at the same time


class Fault(NamedTuple):
    """A fault: `wrong` replaces `right`, which `file` contains once, and `tests` should fail."""

    name: str
    file: str
    tests: str
    right: str
    wrong: str


# Three lines for each fault. The first has its name, a file in gpt2/ and tests in
# tests/*/test_*.py. The second has a part of a line in the file, and the third its replacement.
TABLE = """
published losses lie at other steps: telemetry/plots.py, recipes -k as_much
    - known_steps = [0, *tokens.index,
    + known_steps = [0, *tokens.index / 2,
a guard keeps NaN and Inf: training/guard.py, guard -k never_been
    - keep = finite & (
    + keep = (
a skipped step keeps its moments: training/steps.py, guard -k never_been
    - return state.params, state.opt_state, none
    + return state.params, take()[1], none
the noise of gradients ignores the size of the batch: training/noise_scale.py, statistics
    - (inverse - 1.0 / count)
    + inverse
weight decay ignores its timescale: config/run.py, optim -k timescale
    - return 1 / product if product else self.weight_decay
    + return self.weight_decay
a bad step that is skipped lowers the loss scale: training/steps.py, guard -k float16
    - loss_scale = _select(overflows | accepts, updated, loss_scale)
    + loss_scale = updated
the gradient that is named is the last that broke: training/diagnosis.py, diagnosis -k gradient
    - grads, key=order, reverse=True
    + grads, key=order
alibi favours far tokens: ops/plain.py, against_numpy -k alibi
    - self.slopes[:, None, None] * (key - query)
    + self.slopes[:, None, None] * (query - key)
a linear bias in more dimensions rounds positions: ops/linear_bias.py, ops -k linear_bias
    - right += [positions - low, low]
    + right += [positions, 0 * low]
nothing is dropped of the embedding: model/gpt.py, against_numpy -k dropout
    - dropout(x, deterministic=context.deterministic)
    + dropout(x, deterministic=True)
qk_norm takes its own epsilon: model/layers.py, hf -k qwen3
    - center=center, eps=cfg.norm_eps
    + center=center, eps=1e-5 if self.axis == 'head_size' else cfg.norm_eps
blocks of queries begin a key too late under a window: ops/blocked_attention.py, ops -k window
    - end - block - window + 1
    + end - block - window + 2
the heads of keys are repeated in the wrong order: ops/plain.py, against_numpy -k grouped
    - k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    + k = jnp.tile(k, (1, 1, q.shape[2] // k.shape[2], 1))
the soft cap of scores has the wrong derivative in blocks: ops/blocked_attention.py, ops -k window
    - 1.0 - (scores / options.softcap) ** 2
    + 1.0 - (scores / options.softcap)
post-norm leaves the sum as it is: model/block.py, against_numpy -k post
    - x = norm(x + dropout(sublayer(read)))
    + x = x + norm(dropout(sublayer(read)))
a parallel MLP reads what attention wrote: model/block.py, against_numpy -k parallel
    - read = context.block_input if cfg.parallel_block else x
    + read = x
no layer keeps its values: ingredients/value_residual.py, against_numpy -k value_residual
    - context.carried[self.option] = first
    + pass
validation has the z-loss too: losses/next_token.py, against_numpy -k validation
    - next_token_loss(model.clone(config=config))
    + next_token_loss(model.clone(config=config), LossConfig(z_loss=0.1))
weight decay on norms and biases: optim/optimizers.py, optim -k 'formulas and adamw'
    - lambda info: info.decays and not
    + lambda info: not
the average keeps the parameters before the step: optim/transforms.py, optim -k formulas
    - (1 - weight) * (param + update)
    + (1 - weight) * param
the mean over the tail begins a step early: optim/transforms.py, optim -k 'formulas and tail'
    - state.count + 1 - start, 0
    + state.count + 2 - start, 0
scheduled decay is a step ahead: optim/optimizers.py, optim -k 'formulas and scheduled'
    - schedule(count) / peak
    + schedule(count + 1) / peak
ademamix's slow average does not warm up: optim/optimizers.py, optim -k formulas
    - return optim.alpha * progress(count)
    + return optim.alpha + 0.0 * progress(count)
a cautious mask takes one share for all stacked layers: optim/transforms.py, optim -k formulas
    - first = int("layers" in info.axes)
    + first = 0
muP leaves the rates of kernels alone: optim/optimizers.py, optim -k wider
    - optax.scale(width_ratio**-power)
    + optax.identity()
layer_rates takes the last pattern that matches: optim/optimizers.py, optim -k layer_rates
    - (*optim.rates, ("", 1.0))
    + (*reversed(optim.rates), ("", 1.0))
an option that the optimizer does not read passes: config/options.py, config -k 'sgd and refused'
    - has_effect = choice in wanted.split("|")
    + has_effect = True
the mask hides the token itself: ops/plain.py, against_numpy -k gelu
    - visible = query >= key
    + visible = (query > key) | (query == 0)
a window sees one token more: ops/plain.py, against_numpy -k window
    - query - key < window
    + query - key <= window
dropped weights of attention are not made up for: ops/plain.py, against_numpy -k dropout
    - jnp.where(keep, weights / keep_rate, 0.0)
    + jnp.where(keep, weights, 0.0)
a scan gives the window to layers that see all: model/attention.py, switches -k 'cached and gemma'
    - different.index(value) for value in values
    + different.index(value) for value in values[::-1]
values mix with the layer before: ingredients/value_residual.py, against_numpy -k four_layers
    - jnp.where(context.layer == 0, heads.v
    + jnp.where(context.layer <= 1, heads.v
muP leaves the head's multiplier out: model/gpt.py, against_numpy -k mup
    - x = x / cfg.width_ratio
    + x = x / 1
the first cached token is alone: ingredients/previous_token.py, switches -k 'cached and modded'
    - if context.last_token is None:
    + if True:
epochs join documents in one order: data/loading/document_order.py, document_order -k concat
    - order = draw.permutation(len(starts))
    + order = np.random.default_rng(0).permutation(len(starts))
epochs pack documents alike: data/loading/packing.py, document_order -k bos
    - row // num_rows if shuffles_documents else 0
    + 0
padding has a target: data/loading/token_batches.py, packing -k mean_over
    - np.full_like(tokens, IGNORED)
    + np.zeros_like(tokens)
own batches go on from what was read ahead: data/loading/user_batches.py, user_batches -k go_on_from
    - self._states.get(step, "")
    + self._states[max(self._states)]
a document smears into the next: ingredients/previous_token.py, model -k segments
    - exists = context.positions > 0
    + exists = jnp.arange(x.shape[1])[None] > 0
positions run on into the next document: model/gpt.py, model -k segments
    - positions = positions_within(segments)
    + pass
a pair of tokens has no order: ingredients/bigram_embeddings.py, against_numpy -k bigram
    - previous.astype(jnp.uint32) * 27191
    + previous.astype(jnp.uint32) * 36313
another stream is backed out: ingredients/backout.py, against_numpy -k 'four_layers and backout'
    - context.layer == self.config.num_layers // 2
    + context.layer == 1
a stream is mixed by another's weights: ingredients/hyper_connections.py, against_numpy -k hyper
    - (by * x).sum(0)
    + (by * jnp.roll(x, 1, axis=0)).sum(0)
a value's length is not squared: ingredients/exclusive_attention.py, against_numpy -k exclusive
    - jnp.maximum(square, TINY)
    + jnp.sqrt(jnp.maximum(square, TINY))
a sink gives its weight to the last key: ops/plain.py, against_numpy -k attention_sink
    - return weights[..., :S]
    + return weights[..., -S:]
a gate is another head's: ingredients/attention_gate.py, against_numpy -k attention_gate
    - return y * gate[..., None]
    + return y * jax.numpy.roll(gate, 1, axis=-1)[..., None]
losses ahead cross into the next document: losses/ahead.py, against_numpy -k losses_ahead
    - if segments is not None:
    + if False:
losses ahead do not fade: losses/ahead.py, against_numpy -k losses_ahead
    - 1 - step / self.options.ahead_fade
    + 1 - 0 / self.options.ahead_fade
a shape holds a step too long: config/shapes.py, loader -k schedule
    - if start < step)]
    + if start < step - 1 or not start)]
a shorter row starts where the row before it did: data/loading/token_batches.py, loader -k schedule
    - row[offset : offset + length]
    + row[offset // 2 : offset // 2 + length]
a window stays as it was at first: training/program.py, train -k by_hand
    - return self if same else
    + return self if True else
SwiGLU's gate and value are swapped: model/layers.py, against_numpy -k swiglu
    - hidden = activation(gate) * hidden
    + hidden = activation(hidden) * gate
GELU's derivative takes its gate for a constant: ops/linear.py, ops -k gelu
    - sigmoid + y * (1.0 - sigmoid) * slope_of_2u
    + sigmoid
cautious updates are not scaled up: optim/transforms.py, optim -k formulas
    - update * (agrees / fraction)
    + update * agrees
a question of CORE is among its own few-shot examples: evals/core.py, evals -k by_hand
    - self.examples[index + 1 :]
    + self.examples[index:]
CORE's chances go by the table's order: evals/core.py, evals -k by_hand
    - num_shots, chances[label], examples
    + num_shots, [*chances.values()][len(tasks)], examples
bits by characters in enwik8 and text8: evals/perplexity.py, evals -k not_ascii
    - len(text.encode())
    + len(text)
bytes that are not UTF-8 are left out: evals/perplexity.py, evals -k not_utf_8
    - getincrementaldecoder("utf-8")()
    + getincrementaldecoder("utf-8")("ignore")
bits per byte with the logarithm to base 10: training/validation.py, evals -k bits_per_byte
    - / math.log(2.0)
    + / math.log10(2.0)
batches are placed by the thread that reads them: training/batches.py, first_runs -k only_the
    - with closing(prefetch(batches)) as read:
    + with closing(prefetch(map(self._put, batches))) as read:
a user's batches are computed on the accelerator: data/loading/prefetch.py, first_runs -k only_the
    - with jax.default_device(host):
    + with contextlib.nullcontext():
a first run is not alone: parallel/compiled.py, first_runs -k only_the
    - if self._has_run:
    + if True:
a late check of a kernel uses the devices: parallel/kernel_check.py, kernel_check -k hangs
    - if is_late.is_set():
    + if False:
a kernel may return NaN: parallel/kernel_check.py, kernel_check -k wrong
    - if not error <= LIMIT:
    + if error > LIMIT:
the check of a kernel does not compare gradients: parallel/kernel_check.py, kernel_check -k wrong
    - return output, *backward(gradient)
    + return (output,)
a pause counts as a hang: telemetry/reporter.py, telemetry -k watchdog
    - if self._clock.current in ("step", "data wait")
    + if True
polar express repeats its second polynomial: optim/muon.py, optim_matrices -k 'formula and polar'
    - (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    + (4.042929935166739, -2.808917465908714, 0.5000178451051316),
muon's momentum warms up a step early: optim/muon.py, optim_matrices -k 'formula and warmed'
    - momentum(state.count)
    + momentum(state.count + 1)
soap does not turn its second moment with the basis: optim/soap.py, optim_matrices -k formula
    - jnp.take_along_axis(turned, column_order[:, None, :], axis=2)
    + turned
soap_muon averages squares of gradients, as soap does: optim/soap.py, optim_matrices -k soap_muon
    - moved if is_muon else project(grads)
    + project(grads)
stochastic depth begins with the first layer: ingredients/stochastic_depth.py, against_numpy
    - number = context.layer + 1
    + number = self.config.num_layers - context.layer
hyperball takes one norm for queries, keys and values: optim/hyperball.py, optim -k hyperball
    - jnp.sum(square, axis=kernel.rows + kernel.columns, keepdims=True)
    + jnp.sum(square, keepdims=True)
rope turns a part by the whole's wavelengths: model/attention.py, against_numpy -k rope_share
    - rope_frequencies(cfg.rope_size, cfg.rope_base)
    + rope_frequencies(cfg.rope_size, cfg.rope_base**cfg.rope_share)
Llama 3.1 slows the fast turns: model/attention.py, against_numpy -k llama3
    - kept * frequencies + (1 - kept) * frequencies / cfg.rope_factor
    + (1 - kept) * frequencies + kept * frequencies / cfg.rope_factor
YaRN's scores spread over more tokens: model/attention.py, against_numpy -k yarn
    - 0.1 * math.log(cfg.rope_factor) + 1
    + 1.0
YaRN slows a dimension too many: model/attention.py, against_numpy -k yarn
    - min(math.ceil(one)
    + min(math.floor(one)
FLOPs count heads as wide as the model: model/flops.py, switches -k 'flops and head_dim'
    - heads = cfg.num_heads * cfg.head_size
    + heads = cfg.embed_dim
altered values are not noticed: training/checkpoint_files.py, checkpoint -k damage_to_any
    - files.find_damage(folder, digests)
    + files.find_damage(folder, digests, read=False)
a run that was killed begins anew: train.py, train -k killed
    - start = folder.find_start(workdir)
    + start = 0
small programs are compiled at every start: utils/launch.py, train -k second_start
    - "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0"
    + "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "9"
a run continues with another optimizer: training/workdir.py, workdir -k continues_unless
    - if not OPTIONS[name].may_change:
    + if not OPTIONS[name].may_change and name != "optim.name":
runs of different code are pooled: lab/experiments/results.py, ablate -k different_code
    - if old != code:
    + if old == "":
steps that a run no longer has count as its own: utils/code.py, ablate -k different_code
    - starts = [each for each in starts if each["step"] < start["step"]]
    + starts = [each for each in starts if each["step"] != -1]
a run that is cut short is scored: lab/experiments/run_folder.py, ablate -k damaged
    - if step != steps or not
    + if not
another run's folder is believed: lab/experiments/run_folder.py, ablate -k damaged
    - if value != expected:
    + if value is None:
equal tokens are those of the largest step: lab/experiments/step_time.py, ablate -k batches_grow
    - config.shapes.tokens(steps) / steps
    + config.tokens_per_step
analyses do not share the level: lab/ablate/judge.py, ablate_verdicts -k analyses_share
    - spent = (analysis**3 - before**3)
    + spent = analysis**3
an analysis sees what was trained after it: lab/ablate/judge.py, ablate_verdicts -k analyses_are
    - compared(results, arm)[:seeds]
    + compared(results, arm)
a tokenizer.json cuts and pads texts: data/tokenizer.py, tokenizer -k no_others
    - tree |= {"truncation": None, "padding": None}
    + pass
a run goes on with a newer revision of the hub: train.py, train -k revision_of
    - config.data, folder.read_data(workdir))
    + config.data)
eval.py reads a newer revision than its run: evals/tasks.py, train -k revision_of
    - prepare_dataset(data, recorded)
    + prepare_dataset(data)
revisions of the hub share a folder: data/preparing/prepared_folder.py, data_sources -k revision
    - name += f"-{source.revision}"
    + name += ""
documents without text are not counted: data/preparing/documents.py, data -k are_skipped
    - self.num_empty += not num_bytes
    + self.num_empty += 0
progress divides text by compressed bytes: data/preparing/text_corpus.py, data -k progress
    - done = self.source.bytes_read or progress
    + done = progress
a preparation goes on with another text: data/preparing/text_corpus.py, preparing -k another_one
    - == progress.text_crc32
    + or True
Kaggle's one host waits for others: parallel/distributed.py, processes -k tpu_pod
    - if hosts:
    + if hosts and hosts != "local":
a sweep's runs join what a launcher began: lab/experiments/processes.py, cluster -k launcher
    - ALONE: "1", **self.environment
    + **self.environment
marks are sent among what they mark: utils/stores.py, stores -k mark_comes
    - for group in (names - marks, marks)
    + for group in (names,)
what another run replaces is not set aside: utils/stores.py, stores -k not_sent_stays
    - if not record.holds(name, time_ns) or not (name in listed or is_superseded)
    + if False
what a store has lost is deleted here: utils/stores.py, stores -k has_lost
    - if step > newest
    + if False
the host's phases are not blamed for gaps: lab/profile/breakdown.py, profile -k gaps
    - if overlap > 0:
    + if False:
hidden collectives are charged too: lab/profile/breakdown.py, profile -k moment
    - within[kinds[0]]
    + within[kinds[-1]]
collectives cost no time in a plan: lab/plan/plan.py, plan -k adds
    - return compute + self.network_seconds(board)
    + return compute
half of a checkpoint is fetched: utils/stores.py, stores -k sent_whole
    - is_whole = _mark(name) in listed
    + is_whole = True
blocks repeat the heads of values in the wrong order: ops/blocked_attention.py, ops -k window
    - v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    + v = jnp.tile(v, (1, 1, q.shape[2] // v.shape[2], 1))
all branches begin on one stream: ingredients/hyper_connections.py, against_numpy -k hyper
    - one = same[branch % n]
    + one = same[0]
a head loses another's value: ingredients/exclusive_attention.py, against_numpy -k exclusive
    - jnp.repeat(v, group, axis=2)
    + jnp.tile(v, (1, 1, group, 1))
a derivative of the normaliser ignores what reads it: ops/head_loss.py, ops -k head_loss
    - scale = (1.0 / total) * dy
    + scale = 1.0 / total
z-loss is half of the paper's: losses/z_loss.py, against_numpy -k z_loss
    - self.options.z_loss * total
    + self.options.z_loss * total / 2
a loss' learned parameters get the last chunk's gradient: ops/head_loss.py, ops -k to_learn
    - jax.tree.map(jnp.add, (losses, dclosed), (new, dnew))
    + jax.tree.map(jnp.add, losses, new), dnew
an auxiliary loss moves no weight: losses/next_token.py, steps -k auxiliary
    - objective += auxiliary
    + pass
a term that blocks do not know is left out: ops/plain.py, ops -k term_that
    - if others or not isinstance(first, SoftCap):
    + if not isinstance(first, SoftCap):
scanned layers drop by one mask: utils/scan.py, model -k mask
    - "dropout": True
    + "dropout": False
validation reads the raw weights where an average is asked for: train.py, train -k eval_scores
    - validate(eval_step, state.eval_params, *split)
    + validate(eval_step, state.params, *split)
tasks read the raw weights where an average is asked for: evals/run_tasks.py, train -k eval_scores
    - self.score(state.eval_params)
    + self.score(state.params)
samples are drawn with the raw weights: train.py, train -k averaged
    - gather_whole(state.eval_params, program.backend.mesh)
    + gather_whole(state.params, program.backend.mesh)
dropout has one key for all devices: utils/prng.py, steps -k by_device
    - for index in (step, micro_batch, device):
    + for index in (step, micro_batch):
cached decoding leaves out ALiBi and soft caps: ops/plain.py, switches -k cached
    - return term(scores[None], query, key)[0]
    + return scores
a shorter prompt sees the cache of the longest: ops/plain.py, sampling
    - first = jnp.reshape(length, (-1, 1, 1, 1)) - T
    + first = jnp.reshape(length.max() + 0 * length, (-1, 1, 1, 1)) - T
MFU counts every step as the first: telemetry/throughput.py, telemetry -k flops_of
    - flops=partial(config.shapes.sum, cost),
    + flops=lambda steps: steps * cost(config.shapes.at(1)),
validation has the training's rounded logits: losses/next_token.py, steps -k validation
    - dataclasses.replace(model.config, logits_dtype="float32")
    + dataclasses.replace(model.config)
bits per byte are printed after a partial validation: data/loading/token_batches.py, train
    - targets_per_byte = None
    + pass
YaRN stretches a part of a head like the whole: model/attention.py, against_numpy -k yarn
    - half = len(frequencies)
    + half = cfg.head_size // 2
FLOPs count a table that is looked up: model/flops.py, switches -k 'flops and modded'
    - if "table" in box.info.axes:
    + if False:
a grain iterator starts from its first batch: data/loading/user_batches.py, user_batches -k grain
    - iterator.set_state(saved)
    + pass
the first lines hide a broken kernel: training/program.py, kernel_check
    - if why := self.kernel_fault or why:
    + if why:
"""


def faults() -> list[Fault]:
    """Return the faults of the table."""
    lines = TABLE.strip().split("\n")
    found = []
    for line, right, wrong in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        assert right.startswith("    - "), line
        assert wrong.startswith("    + "), line
        match = re.fullmatch(r"(.*): (.*), (\w+)( -k .*)?", line)
        name, file, tests, chosen = match.groups("")
        if file.startswith("ingredients/"):
            file = f"model/{file}"
        if file.startswith("losses/"):
            file = f"training/{file}"
        file = file if file == "train.py" else f"gpt2/{file}"
        (test_file,) = ROOT.glob(f"tests/**/test_{tests}.py")
        tests = f"{test_file.relative_to(ROOT)}{chosen}"
        found.append(Fault(name, file, tests, right[6:], wrong[6:]))
    return found


def misplaced(chosen: list[Fault]) -> list[str]:
    """Describe the faults whose `right` does not occur exactly once in their file."""
    lost = []
    for fault in chosen:
        path = ROOT / fault.file
        if not path.exists() or path.read_text().count(fault.right) != 1:
            lost.append(f"{fault.name}: {fault.file}: {fault.right}")
    return lost


def undefined(chosen: list[Fault]) -> list[str]:
    """Describe the faults whose `wrong` reads an undefined name, so that any test would fail."""
    lost = []
    for fault in chosen:
        text = (ROOT / fault.file).read_text().replace(fault.right, fault.wrong)
        command = [sys.executable, "-m", "ruff", "check", "--select=F821", "-q", "-"]
        if subprocess.run(
            command, input=text, text=True, stdout=subprocess.PIPE
        ).returncode:
            lost.append(f"{fault.name}: {fault.file}: {fault.wrong}")
    return lost


def is_caught(fault: Fault, directory: Path, skipped: str) -> bool:
    """Return whether a test fails with a fault in the copy at `directory`. Restore the copy."""
    path = directory / fault.file
    text = path.read_text()
    path.write_text(text.replace(fault.right, fault.wrong))
    try:
        code = run(fault.tests, directory, skipped)
        if "thorough" in skipped and code in (0, 5):
            # The tests that a row names may all be thorough, and another test of their file may
            # fail.
            code = run(fault.tests.partition(" -k ")[0], directory, skipped)
        return code == 1
    finally:
        path.write_text(text)


def run(tests: str, directory: Path, skipped: str) -> int:
    """Run tests of the copy, and return pytest's exit code, which is 5 if no test was found."""
    command = f"{sys.executable} -m pytest -q -x -n 0 -p no:cacheprovider -m '{skipped}' {tests}"
    # A fault may prepare wrong tokens, which no other copy may read.
    data = {"GPT2_DATA_DIR": str(directory / "data")}
    environment = os.environ | data | {"PYTHONPATH": str(directory)}
    return subprocess.run(
        command, shell=True, cwd=directory, env=environment, capture_output=True
    ).returncode


def main(*names: str) -> int:
    """Plant every fault whose name contains one of `names`. Without `names`, plant all faults."""
    is_fast = names[:1] == ("--fast",)
    skipped = "not slow and not thorough" if is_fast else "not slow"
    names = names[is_fast:]
    chosen = [f for f in faults() if not names or any(name in f.name for name in names)]
    if lost := misplaced(chosen):
        raise SystemExit(
            "The code does not contain exactly one of each of these:\n"
            + "\n".join(lost)
        )
    if lost := undefined(chosen):
        raise SystemExit("These faults read undefined names:\n" + "\n".join(lost))
    missed = 0
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(COPIES) as pool:
        copies = queue.SimpleQueue[Path]()
        for number in range(COPIES):
            copy_project(Path(scratch) / f"{number}")
            copies.put(Path(scratch) / f"{number}")

        @contextlib.contextmanager
        def free_copy() -> Iterator[Path]:
            copy = copies.get()
            try:
                yield copy
            finally:
                copies.put(copy)

        def without_fault(tests: str) -> int:
            with free_copy() as copy:
                return run(tests, copy, skipped)

        def plant(fault: Fault) -> tuple[bool, float]:
            with free_copy() as copy:
                began = time.monotonic()
                return is_caught(fault, copy, skipped), time.monotonic() - began

        selections = sorted({fault.tests for fault in chosen})
        codes = pool.map(without_fault, selections)
        for tests, code in zip(selections, codes, strict=True):
            if code and not (is_fast and code == 5):
                raise SystemExit(f"Without a fault, {tests} ends with exit code {code}")
        results = pool.map(plant, chosen)
        for fault, (caught, seconds) in zip(chosen, results, strict=True):
            missed += not caught
            verdict = "caught" if caught else "MISSED"
            print(f"{verdict} in {seconds:3.0f} s: {fault.name}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults are caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
