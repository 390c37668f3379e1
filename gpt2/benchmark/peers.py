"""GPT-2 in PyTorch, which `gpt2.benchmark` compares with: same model, same step.

`torch` is the model in few lines, as nanoGPT has it. `hf` is Hugging Face's GPT-2. `torch_xla` is
the first on a device of PyTorch/XLA. `_compile` behind a name compiles model and loss. Peers differ
in nothing else.
"""

import atexit
import contextlib
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from gpt2.benchmark.case import make_config
from gpt2.benchmark.first_step import (
    STEPS,
    FirstStep,
    draw_batch,
    draw_weight,
    products_of,
    sample,
    single_targets,
)
from gpt2.benchmark.peer_devices import (
    choose_device,
    device_name,
    platform_of,
    set_matmul_precision,
    use_empty_cache,
)
from gpt2.benchmark.peer_models import make_model, named_weights
from gpt2.benchmark.turns import announce, serve
from gpt2.config import OptimConfig


class PeerModel:
    """A model and what its steps need, for `train` or `eval`.

    Args:
        peer: its name.
        case: see `gpt2.benchmark.case.make_cases`.
        device: as PyTorch names it.
    """

    def __init__(self, peer: str, case: dict[str, Any], device: str):
        self._case, self._device = case, device
        self._is_training = case["subject"] == "train"
        self._model = make_model(peer, case).to(device).train(self._is_training)
        self._weights = list(self._model.parameters())
        self._optim = make_config(case).optim
        self._optimizer = _make_optimizer(self._optim, self._weights, device)
        self._dtype: torch.dtype | None = None  # of logits
        self._loss: Callable = self._compute_loss
        if peer.endswith("_compile"):
            backend = "openxla" if device == "xla" else "inductor"
            self._loss = torch.compile(self._compute_loss, backend=backend)
        self._batch: Any = self._put(draw_batch(case))
        self._fetch: Callable = lambda: self._batch
        if case["with_data"]:
            self._fetch = batches_from_file(case, device)
            self._batch = self._fetch()

    def step(self) -> float:
        """Does one step, waits for the device, and returns the loss.

        The next batch is fetched where nanoGPT fetches it: a GPU then computes the forward pass.
        """
        loss = self._forward(self._batch)
        self._batch = self._fetch()
        self._backward(loss)
        self._clip()
        self._update()
        self._wait()
        return loss.item()

    def show(self, path: Path) -> float:
        """Does first steps from drawn weights, and writes what they computed to a file.

        Returns:
            Seconds of the first step.
        """
        weights = named_weights(self._model)
        with torch.no_grad():
            for name, (parameter, flipped) in weights.items():
                shape = parameter.shape[::-1] if flipped else parameter.shape
                drawn = torch.from_numpy(draw_weight(name, tuple(shape)))
                parameter.copy_(drawn.T if flipped else drawn)

        def samples(value: Callable) -> dict[str, np.ndarray]:
            return {name: _sample(name, value(p), flip) for name, (p, flip) in weights.items()}

        batch = self._put(draw_batch(self._case))
        self._wait()
        before = samples(lambda parameter: parameter) if self._is_training else {}
        began = time.perf_counter()
        loss = self._forward(batch)
        self._backward(loss)
        self._clip()
        self._wait()
        mean = loss.item()
        seconds = time.perf_counter() - began
        shown = FirstStep(self._products(), mean, before=before)
        if self._is_training:
            shown.gradients = samples(lambda parameter: parameter.grad)
            began = time.perf_counter()
            self._update()
            self._wait()
            self._weights[0].sum().item()  # the update is done
            seconds += time.perf_counter() - began
            for step in range(1, STEPS):
                self._backward(self._forward(self._put(draw_batch(self._case, step))))
                self._clip()
                self._update()
                self._wait()
            shown.after = samples(lambda parameter: parameter)
        else:
            shown.tokens = self._losses_of_tokens()
        shown.save(path)
        return seconds

    def _losses_of_tokens(self) -> np.ndarray:
        """Returns the loss of single tokens, by the program that is timed."""
        tokens, targets = draw_batch(self._case)
        losses = []
        for single in single_targets(targets, none=-100):  # what cross_entropy leaves out
            loss = self._forward(self._put(np.stack([tokens, single])))
            self._wait()
            losses.append(loss.item())
        return np.array(losses)

    def _put(self, batch: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(batch).long().to(self._device)

    def _products(self) -> str:
        """Returns the type in which the last step multiplied."""
        precision = "highest"
        if self._device == "xla":
            import torch_xla.backends

            precision = torch_xla.backends.get_mat_mul_precision()
        elif self._device == "cuda":
            precision = torch.get_float32_matmul_precision()
        compute = str(self._dtype).removeprefix("torch.")
        return products_of(compute, precision, platform_of(self._device))

    def _forward(self, batch: Any) -> torch.Tensor:
        with torch.set_grad_enabled(self._is_training):
            return self._loss(*batch)

    def _backward(self, loss: torch.Tensor) -> None:
        if self._is_training:
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()

    def _clip(self) -> None:
        if not self._is_training:
            return
        if self._device != "cpu":
            nn.utils.clip_grad_norm_(self._weights, self._optim.clip_norm)
            return
        # On a CPU that adds up the squares of a tensor one by one in float32, and the norm of 38
        # million numbers is 0.3 % too small. Row by row it is exact, and takes no longer.
        norm = torch.linalg.vector_norm
        norms = torch.stack([norm(norm(weight.grad, dim=-1)) for weight in self._weights])
        nn.utils.clip_grads_with_norm_(self._weights, self._optim.clip_norm, norm(norms))

    def _update(self) -> None:
        if self._is_training:
            self._optimizer.step()

    def _wait(self) -> None:
        """Runs what PyTorch/XLA has put off, as one program. Others wait for each value."""
        if self._device == "xla":
            import torch_xla

            torch_xla.sync()

    def _compute_loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of tokens and targets `[B, T]` int64."""
        with (
            _cast(self._case["compute"], self._device),
            _attention_kernel(self._case["attention"]),
        ):
            output = self._model(tokens)
            logits = output if isinstance(output, torch.Tensor) else output.logits
            self._dtype = logits.dtype
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def _sample(name: str, value: torch.Tensor, flipped: bool) -> np.ndarray:
    array = value.detach().cpu().numpy()
    return sample(name, array.T if flipped else array)


def _cast(compute: str, device: str) -> contextlib.AbstractContextManager:
    """Returns a context in which products are computed in a type."""
    if compute == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device, getattr(torch, compute))


def _attention_kernel(attention: str) -> contextlib.AbstractContextManager:
    """Returns a context in which fused attention is flash attention, where that was asked for."""
    if attention != "flash":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def _make_optimizer(
    optim: OptimConfig, weights: list[nn.Parameter], device: str
) -> torch.optim.Optimizer:
    groups = [
        dict(params=[w for w in weights if w.ndim >= 2], weight_decay=optim.weight_decay),
        dict(params=[w for w in weights if w.ndim < 2], weight_decay=0.0),
    ]
    fused = device != "xla"  # XLA fuses by itself
    rate = optim.learning_rate
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=optim.momentum, nesterov=True, fused=fused)
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=optim.eps, fused=fused)


class PeerGenerator:
    """Transformers' own loop with its cache: greedy, and not ended by end-of-text."""

    def __init__(self, peer: str, case: dict[str, Any], device: str):
        compute = getattr(torch, case["compute"])
        self._model: Any = make_model(peer, case).to(device, compute).eval()
        self._half = case["context_length"] // 2
        self._prompts = torch.from_numpy(draw_batch(case)[0, :, : self._half]).long().to(device)

    def step(self) -> None:
        """Continues the prompts."""
        with torch.no_grad():
            self._model.generate(
                self._prompts,
                attention_mask=torch.ones_like(self._prompts),
                max_new_tokens=self._half,
                min_new_tokens=self._half,
                do_sample=False,
                pad_token_id=0,
            )


class PeerReader:
    """Batches from a file, as nanoGPT reads them, in host memory as ours are."""

    def __init__(self, peer: str, case: dict[str, Any], device: str):
        self._fetch = batches_from_file(case, "cpu")

    def step(self) -> None:
        """Reads a batch."""
        self._fetch()


def batches_from_file(case: dict[str, Any], device: str) -> Callable[[], tuple]:
    """Returns a function to tokens and targets `[B, T]` int64 on the device.

    They are random windows of a memory-mapped file of uint16, as in nanoGPT's get_batch. To a CUDA
    device they are copied from pinned memory, and the host does not wait for the copy.
    """
    B, T = case["batch_size"], case["context_length"]
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory)
    path = Path(directory) / "train.bin"
    np.random.default_rng(0).integers(0, case["vocab_size"], 2**24, np.uint16).tofile(path)

    def fetch() -> tuple:
        data = np.memmap(path, np.uint16, "r")  # anew each time, as nanoGPT avoids a leak
        starts = torch.randint(len(data) - T, (B,)).tolist()
        windows = (
            [torch.from_numpy(data[i + shift : i + shift + T].astype(np.int64)) for i in starts]
            for shift in (0, 1)
        )
        batch = (torch.stack(rows) for rows in windows)
        if device == "cuda":
            return tuple(rows.pin_memory().to(device, non_blocking=True) for rows in batch)
        return tuple(rows.to(device) for rows in batch)

    return fetch


SUBJECTS: dict[str, Callable[[str, dict[str, Any], str], Any]] = {
    "train": PeerModel,
    "eval": PeerModel,
    "generate": PeerGenerator,
    "data": PeerReader,
}


def main() -> None:
    """Serves steps of the peer and the case that the command line gives."""
    peer, case = sys.argv[1], json.loads(sys.argv[2])
    torch.manual_seed(0)
    use_empty_cache()
    device = choose_device(peer)
    announce(platform_of(device), device_name(device))
    set_matmul_precision(case["matmul_precision"], device)
    work = SUBJECTS[case["subject"]](peer, case, device)

    def info() -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated()
        versions = {"torch": torch.__version__}
        for package in ("torch_xla", "transformers"):
            if package in sys.modules:
                versions[package] = sys.modules[package].__version__
        return {"peak_bytes": peak, "versions": versions}

    serve(work.step, info, getattr(work, "show", None))


if __name__ == "__main__":
    main()
