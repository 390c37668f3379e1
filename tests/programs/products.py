r"""The rate of matrix products by JAX and by PyTorch on a CPU, in turn.

    python -m tests.programs.products /path/to/python/that/has/torch

Products are those of GPT-2 124M's MLP and head for 2,048 tokens, and one of the quickstart's MLP.
Each library runs in a process of its own; printed are medians over rounds, in GFLOP/s.
"""

import json
import subprocess
import sys
import time
from collections import defaultdict
from statistics import median

ROUNDS = 5
SECONDS = 1.0  # of a product, in a round
SHAPES = ((2048, 768, 3072), (2048, 3072, 768), (2048, 768, 50304), (2048, 128, 512))


def jax_product(rows, inner, columns, dtype):
    import jax
    import jax.numpy as jnp

    dot = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=dtype))
    a = jnp.ones((rows, inner), dtype)
    b = jnp.ones((inner, columns), dtype)
    return lambda: dot(a, b).block_until_ready()


def torch_product(rows, inner, columns, dtype):
    import torch

    a = torch.ones((rows, inner), dtype=getattr(torch, dtype))
    b = torch.ones((inner, columns), dtype=getattr(torch, dtype))
    return lambda: a @ b


LIBRARIES = {"jax": jax_product, "torch": torch_product}


def rates(library):
    """Prints the rate of each product, as JSON."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        for shape in SHAPES:
            product = LIBRARIES[library](*shape, dtype)
            product()
            times = []
            end = time.perf_counter() + SECONDS
            while time.perf_counter() < end:
                start = time.perf_counter()
                product()
                times.append(time.perf_counter() - start)
            rows, inner, columns = shape
            found[f"{dtype} {shape}"] = 2e-9 * rows * inner * columns / median(times)
    print(json.dumps(found))


def main(peer_python):
    found = defaultdict(list)
    for _ in range(ROUNDS):
        for library, python in (("jax", sys.executable), ("torch", peer_python)):
            command = [python, __file__, library]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            for product, rate in json.loads(answer.stdout).items():
                found[library, product].append(rate)
    for (library, product), each in found.items():
        spread = f"({min(each):.0f} to {max(each):.0f})"
        print(f"{library:<6} {product:<28} {median(each):6.0f} {spread}")


if __name__ == "__main__":
    if sys.argv[1] in LIBRARIES:
        rates(sys.argv[1])
    else:
        main(sys.argv[1])
