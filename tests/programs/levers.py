r"""Measure options that could make training on a CPU faster, in turn, in about ten minutes.

    python -m tests.programs.levers /path/to/python/that/has/torch

The options are XLA's compiler options in `FLAGS`, and Intel's MKL. The program first measures
one matrix product of the quickstart's MLP, and products of GPT-2 124M's MLP and head for 2,048
tokens, in the three `FORMS` of a training step. The rates are medians over rounds, in GFLOP/s. The
program then measures the quickstart's steps with each compiler option, and in compiled PyTorch, in
float32 and bfloat16. MKL is measured if `pip install mkl intel-openmp` was run with the Python that
has PyTorch.
"""

import ctypes
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np

ROUNDS = 5
SECONDS = 0.25  # the time for each product in each round
# The smallest product is first.
SHAPES = ((2048, 128, 512), (2048, 768, 3072), (2048, 3072, 768), (2048, 768, 50304))
LONGEST = 10.0  # a product that would take more seconds is left out
# Name of a form -> whether the left and the right operand are transposed.
FORMS = {"x w": (False, False), "dy w^T": (False, True), "x^T dy": (True, False)}

NO_YNN = "--xla_cpu_experimental_ynn_fusion_type="
FLAGS = {
    "jax": "",
    "jax, vectors of 512 bits": "--xla_cpu_prefer_vector_width=512",
    "jax, Eigen": NO_YNN,
    "jax, oneDNN": f"--xla_cpu_experimental_onednn_custom_call=true {NO_YNN}",
}


def jax_product(a, b, form, dtype):
    import jax
    import jax.numpy as jnp

    axes = [[0 if form[0] else 1], [1 if form[1] else 0]]

    def multiply(a, b):
        dimensions = (axes, [[], []])
        return jax.lax.dot_general(a, b, dimensions, preferred_element_type=dtype)

    product = jax.jit(multiply)
    a = jnp.asarray(a, dtype)
    b = jnp.asarray(b, dtype)
    return lambda: product(a, b).block_until_ready()


def torch_product(a, b, form, dtype):
    import torch

    a = torch.from_numpy(a).to(getattr(torch, dtype))
    b = torch.from_numpy(b).to(getattr(torch, dtype))
    a = a.T if form[0] else a
    b = b.T if form[1] else b
    return lambda: a @ b


def mkl_product(a, b, form, dtype):
    """Return a function that multiplies with MKL. The results are float32, also for bfloat16."""
    library = ctypes.CDLL(str(find_mkl()))
    rows = a.shape[1 if form[0] else 0]
    inner = a.shape[0 if form[0] else 1]
    columns = b.shape[0 if form[1] else 1]
    result = np.empty((rows, columns), np.float32)
    name = "cblas_sgemm"
    if dtype == "bfloat16":
        name = "cblas_gemm_bf16bf16f32"
        a = (a.view(np.uint32) >> 16).astype(np.uint16)
        b = (b.view(np.uint32) >> 16).astype(np.uint16)
    row_major = 101
    transpose = [112 if is_transposed else 111 for is_transposed in form]

    def pointer(x):
        return x.ctypes.data_as(ctypes.c_void_p)

    def product():
        getattr(library, name)(
            row_major,
            *transpose,
            rows,
            columns,
            inner,
            ctypes.c_float(1.0),
            pointer(a),
            a.shape[1],
            pointer(b),
            b.shape[1],
            ctypes.c_float(0.0),
            pointer(result),
            columns,
        )
        return result

    return product


def find_mkl():
    """Return the path of MKL's library in this Python's environment, or None."""
    return next(Path(sys.prefix, "lib").glob("libmkl_rt.so*"), None)


PRODUCTS = {"jax": jax_product, "torch": torch_product, "mkl": mkl_product}


def rates(library):
    """Print the rate of each product in GFLOP/s, as JSON."""
    if library == "mkl" and not find_mkl():
        print("{}")
        return
    rng = np.random.default_rng(0)
    found = {}
    for dtype in ("float32", "bfloat16"):
        rate = math.inf
        for rows, inner, columns in SHAPES:
            billions = 2e-9 * rows * inner * columns
            # Without instructions for bfloat16, PyTorch's products are a hundred times slower.
            if billions / rate > LONGEST:
                continue
            for name, form in FORMS.items():
                a = rng.random((rows, inner), np.float32)
                b = rng.random((inner, columns), np.float32)
                if form[0]:
                    a = np.ascontiguousarray(a.T)
                if form[1]:
                    b = np.ascontiguousarray(b.T)
                seconds = duration(PRODUCTS[library](a, b, form, dtype))
                product = f"{dtype} {rows} x {inner} x {columns}, {name}"
                rate = found[product] = billions / seconds
    print(json.dumps(found))


def duration(product):
    """Return the median duration of a product in seconds, after a first call."""
    product()
    times = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return median(times)


def measure_products(peer_python):
    """Measure the products with each option in turn, and print a table."""
    cases = [(name, sys.executable, "jax", flags) for name, flags in FLAGS.items()]
    cases.append(("torch", peer_python, "torch", ""))
    cases.append(("mkl", peer_python, "mkl", ""))
    found = defaultdict(list)
    for _ in range(ROUNDS):
        for name, python, library, flags in cases:
            environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
            command = [python, __file__, library]
            answer = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, env=environment
            )
            for product, rate in json.loads(answer.stdout).items():
                found[product, name].append(rate)
    for (product, name), each in sorted(found.items()):
        spread = f"({min(each):.0f} to {max(each):.0f})"
        print(f"{product:<36} {name:<26} {median(each):6.0f} {spread}", flush=True)


def measure_steps(peer_python):
    """Measure the quickstart's steps with each compiler option, and in PyTorch."""
    options = [f"--vary=XLA_FLAGS={flags}" for flags in FLAGS.values() if flags]
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-m", "gpt2.lab.benchmark", "train", *options]
        command.append("--peers=torch_compile")
        command.append(f"--peer_python={peer_python}")
        command.append(f"--config.precision.compute={dtype}")
        subprocess.run(command, check=True)


if __name__ == "__main__":
    if sys.argv[1] in PRODUCTS:
        rates(sys.argv[1])
    else:
        measure_products(sys.argv[1])
        measure_steps(sys.argv[1])
