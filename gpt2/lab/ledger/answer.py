"""Send the logits of a trained model to a referee, one token at a time.

    python -m gpt2.lab.ledger.answer WORKDIR

referee.py runs this file with the code that is judged. Standard input contains batches as int32
numbers: the number of rows, the length of the rows, and then, for each position, one token of each
row. Standard output receives the float32 logits `[rows, V]` after each position. The next tokens
arrive only after these logits, so the logits cannot depend on the next tokens.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import dataclasses
import os
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from gpt2.hf.weights import load_params
from gpt2.model import GPT
from gpt2.model.cache import KVCache, extend
from gpt2.model.one_device import with_kernels
from gpt2.utils.scan import in_layout


def main(workdir: str) -> None:
    """Compute logits with the newest checkpoint of a run, until standard input ends.

    Standard input contains batches of tokens, in the format that the module's docstring describes.
    After each position of a batch, write float32 logits `[rows, V]` to standard output.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what other code prints must not mix with the answers
    config, params = load_params(workdir, "latest")
    cfg = dataclasses.replace(config.gpt(), scan_layers=False, scan_unroll=1)
    params = jax.tree.map(jnp.asarray, in_layout(params, scanned=False))
    step = jax.jit(partial(extend, with_kernels(GPT(cfg))), donate_argnums=3)
    questions = sys.stdin.buffer
    while header := questions.read(8):
        rows, length = map(int, np.frombuffer(header, np.int32))
        one_each = np.ones(rows, np.int32)
        cache = KVCache.create(cfg, rows, cfg.context_length)
        for _ in range(length):
            tokens = np.frombuffer(questions.read(4 * rows), np.int32)
            logits, cache = step(params, tokens[:, None], one_each, cache)
            answers.write(np.asarray(logits, np.float32).tobytes())
            answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
