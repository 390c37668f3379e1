"""Whether two contestants compute the same: loss, gradients and weights of first steps, compared.

Both sides draw the same weights by name, so that none have to be sent, and take `STEPS` steps on
the same batches. Each then writes what came out. Names are this project's, such as
`h_0/attn/c_attn/kernel`, and numbers stand in this project's order. Nothing here needs JAX or
PyTorch.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# Of a larger tensor, as many entries are compared.
SAMPLE = 2**16

# Training steps before weights are compared. AdamW's first step cancels a gradient's scale and both
# betas; later ones do not.
STEPS = 3

# Tokens whose loss is compared by itself, where there are no gradients. The mean over a batch of
# random targets is near log V for any model.
TOKENS = 8

# The most that may differ, by the type in which numbers are multiplied: the loss relative to
# itself, losses of single tokens by their spread, a gradient by its norm, the weights by the mean
# size of their change. docs/performance.md has what the peers differ by.
TOLERANCES = {
    "float32": {"loss": 1e-5, "tokens": 1e-4, "gradient": 1e-4, "weights": 1e-3},
    "tf32": {"loss": 1e-3, "tokens": 0.02, "gradient": 0.02, "weights": 0.05},
    "bfloat16": {"loss": 2e-3, "tokens": 0.05, "gradient": 0.05, "weights": 0.15},
    "float16": {"loss": 1e-3, "tokens": 0.02, "gradient": 0.02, "weights": 0.05},
}


@dataclass
class FirstStep:
    """What a contestant computed in its first steps.

    Attributes:
        products: the type in which it multiplied: one of `TOLERANCES`.
        loss: of the first step, in nats per token.
        tokens: losses of single tokens `[TOKENS]`, in nats; of `eval` alone.
        before, after: weights around `STEPS` steps, by name; `SAMPLE` entries or all, float32.
        gradients: of the first step, clipped, as weights.
    """

    products: str
    loss: float
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0))
    before: dict[str, np.ndarray] = field(default_factory=dict)
    after: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)

    _TREES = ("before", "after", "gradients")

    def save(self, path: Path) -> None:
        """Writes the steps to a file."""
        arrays = {f"{t}:{name}": a for t in self._TREES for name, a in getattr(self, t).items()}
        np.savez(path, products=self.products, loss=self.loss, tokens=self.tokens, **arrays)

    @classmethod
    def load(cls, path: Path) -> "FirstStep":
        """Reads the steps that `save` wrote."""
        with np.load(path) as stored:
            step = cls(str(stored["products"]), float(stored["loss"]), stored["tokens"])
            for key in stored.files:
                tree, _, name = key.partition(":")
                if name:
                    getattr(step, tree)[name] = stored[key]
        return step


@dataclass(frozen=True)
class Agreement:
    """How far a quantity of two contestants lies apart.

    Attributes:
        what: the quantity.
        found, allowed: the relative difference, and its tolerance.
    """

    what: str
    found: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance; not a number is not."""
        return self.found <= self.allowed

    def __str__(self) -> str:
        if not self.allowed:
            return self.what
        return f"{self.what} differs by {self.found:.1e}, and {self.allowed:g} is allowed"


def draw_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the float32 weights of a name: a function of the name and the shape.

    Kernels have about the size at which a branch keeps its input's, where forms of GELU differ
    most. Tables are GPT-2's, small enough to show a norm's epsilon. Biases are drawn too, since
    zeros would hide what multiplies them. The last norm's scale gives logits a deviation of about
    2, so that gradients are long enough to be clipped.
    """
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    std = noise.size**-0.25 if name.endswith("kernel") else 0.02
    drawn = np.float32(name.endswith("scale")) + np.float32(std) * noise
    return drawn * np.float32(100 / noise.size**0.5) if name == "ln_f/scale" else drawn


def draw_batch(case: dict[str, Any], step: int = 0) -> np.ndarray:
    """Returns tokens and targets `[2, B, T]` int32 of a step, the same for every contestant."""
    shape = (2, case["batch_size"], case["context_length"])
    return np.random.default_rng(step).integers(0, case["vocab_size"], shape, np.int32)


def single_targets(targets: np.ndarray, none: int) -> Iterable[np.ndarray]:
    """Yields targets `[B, T]` of which one is kept, for each of `TOKENS` positions.

    Args:
        targets: `[B, T]` int32.
        none: what stands for no target.
    """
    for place in np.random.default_rng(0).integers(0, targets.size, TOKENS):
        single = np.full_like(targets, none)
        single.flat[place] = targets.flat[place]
        yield single


def sample(name: str, values: np.ndarray) -> np.ndarray:
    """Returns a copy of the entries of a tensor that are compared, float32 and flat."""
    flat = np.asarray(values).reshape(-1)
    if flat.size > SAMPLE:
        flat = flat[np.random.default_rng(zlib.crc32(name.encode())).integers(0, flat.size, SAMPLE)]
    return flat.astype(np.float32)


def products_of(compute: str, matmul_precision: str, platform: str) -> str:
    """Returns the type in which a platform multiplies: one of `TOLERANCES`.

    Args:
        compute: type of the operands.
        matmul_precision: see `--matmul_precision`.
        platform: 'cpu', 'gpu' or 'tpu'.
    """
    if compute != "float32" or platform == "cpu" or matmul_precision == "highest":
        return compute
    return "bfloat16" if platform == "tpu" and matmul_precision == "default" else "tf32"


def compare(ours: FirstStep, theirs: FirstStep) -> Iterable[Agreement]:
    """Yields how products, loss, losses of tokens, each gradient and the weights compare.

    Args:
        ours: the steps of reference.
        theirs: may lack gradients and weights only if `ours` does.
    """
    allowed = TOLERANCES[ours.products]
    what = f"products are in {theirs.products}, in place of {ours.products}"
    yield Agreement(what, float(theirs.products != ours.products), 0.0)
    names = list(ours.before)
    same = set(names) == set(theirs.before) and all(
        np.array_equal(ours.before[name], theirs.before[name]) for name in names
    )
    yield Agreement("weights before the step differ", float(not same), 0.0)
    if not same:
        return
    yield Agreement("loss", abs(theirs.loss - ours.loss) / abs(ours.loss), allowed["loss"])
    if ours.tokens.size:
        a, b = ours.tokens, theirs.tokens
        found = np.linalg.norm(a - b) / np.linalg.norm(a - a.mean())
        yield Agreement("loss of single tokens", float(found), allowed["tokens"])
    for name in names:
        a, b = ours.gradients[name], theirs.gradients[name]
        found = np.linalg.norm(a - b) / np.linalg.norm(a)
        yield Agreement(f"gradient of {name}", float(found), allowed["gradient"])
    for name in names:
        kept = _has_gradient(name, ours.before[name])
        a, b, start = (step[name][kept] for step in (ours.after, theirs.after, ours.before))
        found = np.abs(a - b).mean() / np.abs(a - start).mean()
        yield Agreement(f"weights of {name}", float(found), allowed["weights"])


def _has_gradient(name: str, values: np.ndarray) -> np.ndarray:
    """Returns which entries have a gradient that is more than rounding.

    A bias of keys moves all scores of a query alike, which softmax does not see. Its gradient is 0
    but for rounding, which AdamW turns into full steps.
    """
    kept = np.ones(values.size, bool)
    if name.endswith("attn/c_attn/bias"):
        third = values.size // 3
        kept[third : 2 * third] = False
    return kept


def first_difference(agreements: Iterable[Agreement]) -> Agreement | None:
    """Returns the first that does not hold, None if all do."""
    return next((agreement for agreement in agreements if not agreement.holds), None)
