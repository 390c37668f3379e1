"""What PyTorch runs on, for `gpt2.benchmark`: the device, its products, a cache of its programs."""

import atexit
import os
import shutil
import tempfile

import torch

# `--matmul_precision` in PyTorch's words. JAX's default on an NVIDIA GPU is TF32, which is `high`.
PRECISION = {"highest": "highest", "high": "high", "default": "high"}

_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # Triton's programs are in it too


def choose_device(peer: str) -> str:
    """Returns the device of a peer, as PyTorch names it, and loads what it needs."""
    if "xla" in peer:
        os.environ.setdefault("PJRT_DEVICE", "CUDA" if torch.cuda.is_available() else "CPU")
        os.environ.pop("XLA_FLAGS", None)  # JAX's, whose XLA is another version
        import torch_xla  # which adds the device

        return torch_xla.device().type
    return "cuda" if torch.cuda.is_available() else "cpu"


def platform_of(device: str) -> str:
    """Returns `cpu`, `gpu` or `tpu` for a device as PyTorch names it."""
    if device == "xla":
        import torch_xla

        device = torch_xla.runtime.device_type().lower()
    return {"cuda": "gpu"}.get(device, device)


def device_name(device: str) -> str:
    """Returns the device's name as JAX gives it, for NVIDIA's GPUs and CPUs."""
    is_cuda = platform_of(device) == "gpu" and torch.cuda.is_available()
    return torch.cuda.get_device_name() if is_cuda else platform_of(device)


def set_matmul_precision(precision: str, device: str) -> None:
    """Sets how float32 is multiplied, by a value of `--matmul_precision`."""
    if device == "xla" and precision != "default":  # it warns of a setting without effect
        import torch_xla.backends

        torch_xla.backends.set_mat_mul_precision(precision)
    elif device == "cuda":  # a CPU has float32 alone
        torch.set_float32_matmul_precision(PRECISION[precision])


def use_empty_cache() -> None:
    """Gives inductor an empty cache, which ends with the process, unless the user has set one.

    Compilation is timed, and would otherwise find what an earlier process compiled.
    """
    if _CACHE not in os.environ:
        directory = os.environ[_CACHE] = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, directory, ignore_errors=True)  # its workers may still write
