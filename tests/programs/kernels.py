r"""Measure what each kernel saves: time a config's step in turn with steps that lack a kernel.

    python -m tests.programs.kernels --config=configs/quickstart.py \
        --config.precision.compute=bfloat16

The reference implementation replaces a kernel, and the default value replaces a variant. All steps
run in one process, on one device and one batch, in a random order in each round. The fastest of
three steps counts.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import dataclasses
import random
import time
from unittest import mock

import jax
import numpy as np

from gpt2 import cli
from gpt2.data.tokenizer import tokens_by_name
from gpt2.lab.benchmark.measure import ratio
from gpt2.lab.benchmark.ours import make_batch
from gpt2.ops import Ops
from gpt2.ops.variants import VARIANTS, Variants
from gpt2.parallel import kernels, pjit
from gpt2.training import Program
from gpt2.utils.platform import platform_of

ROUNDS = 12


class Side:
    """A training step without one kernel, or with all kernels."""

    def __init__(self, config, lacking):
        device = jax.devices()[0]
        variants = VARIANTS[platform_of(device)]
        if hasattr(variants, lacking):
            default = getattr(Variants(), lacking)
            variants = dataclasses.replace(variants, **{lacking: default})

        def make_ops(*args, **options):
            ops = kernels.make_ops(*args, **options)
            if hasattr(ops, lacking):
                ops = dataclasses.replace(ops, **{lacking: getattr(Ops(), lacking)})
            return ops

        with (
            mock.patch.dict(VARIANTS, {platform_of(device): variants}),
            mock.patch.object(pjit, "make_ops", make_ops),
        ):
            program = Program.from_config(config, [device])
            self.state = program.init_state()
            self.batch = program.backend.put_batch(make_batch(config))
            step = program.compile_train(self.state, self.batch)
            self.step = step.block_until_ready()
        self.turns = []

    def turn(self):
        times = []
        for _ in range(4):
            start = time.perf_counter()
            self.state, _ = jax.block_until_ready(self.step(self.state, self.batch))
            times.append(time.perf_counter() - start)
        self.turns.append(min(times[1:]))


def main():
    config = cli.parse_config()
    config = config.with_vocabulary(tokens_by_name(config.data.tokenizer))
    used = Program.from_config(config, jax.devices()[:1]).model.ops
    variants = VARIANTS[platform_of(jax.devices()[0])]
    names = ["nothing", "nothing again"]
    for table, plain in ((used, Ops()), (variants, Variants())):
        for name, value in vars(table).items():
            if value != getattr(plain, name):
                names.append(name)
    sides = {name: Side(config, name) for name in names}
    for _ in range(ROUNDS):
        for side in random.sample([*sides.values()], len(sides)):
            side.turn()
    whole = sides["nothing"].turns
    print(f"a step takes {1e3 * np.median(whole):.4g} ms; without")
    for name, side in sides.items():
        middle, low, high = ratio(side.turns, whole)
        print(f"  {name:<16} {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    cli.run(main, cli.define_config)
