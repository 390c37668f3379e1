"""What a run reads: a prepared corpus, a mixture of several, or batches of a user's own."""

import dataclasses
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path

from gpt2.data.tokenizer import Tokenizer, fingerprint
from gpt2.data.tokens import Split, TokenStream
from gpt2.errors import UserError
from gpt2.utils import files


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A prepared corpus, or several as a mixture."""

    directory: Path  # that holds it
    tokenizer: Tokenizer
    splits: dict[str, Split]  # `train` and `validation`
    dtype: str  # of stored tokens
    # The corpora of a mixture, with their shares.
    mixed: dict[str, tuple[Fraction, "Dataset"]] = dataclasses.field(
        default_factory=dict
    )
    # A user's function that gives the batches of a split; there is no text then.
    own: Callable[[str], Iterable] | None = None

    @property
    def parts(self) -> dict[str, tuple[Fraction, "Dataset"]]:
        """The corpora of a mixture with their shares, or this one without a name."""
        return self.mixed or {"": (Fraction(1), self)}

    @property
    def targets_per_byte(self) -> float | None:
        """Tokens to predict for each byte of held-out text, where parts have their shares.

        The first token is not predicted. None: the tokens do not give back all bytes.
        """
        bytes_per_target = 0.0
        for share, part in self.parts.values():
            held_out = part.splits["validation"]
            if held_out.num_lost:
                return None
            num_targets = held_out.num_tokens - 1
            bytes_per_target += float(share) * held_out.num_bytes / num_targets
        return 1 / bytes_per_target

    def open(self, split: str) -> TokenStream:
        """Returns the token stream of `train` or `validation`."""
        return TokenStream(self.splits[split].shards, self.dtype, self.directory)

    def describe(self) -> dict[str, object]:
        """Returns what the corpus holds, not where it lies, for a run's data.json."""
        counts = dict[str, dict[str, int]]()
        crc32 = dict[str, int]()
        for name, split in self.splits.items():
            counts[name] = dataclasses.asdict(split)
            del counts[name]["shards"]
            crc32[name] = counts[name].pop("crc32")
        return {
            "tokenizer": self.tokenizer.name,
            "tokenizer_sha256": fingerprint(self.tokenizer),
            "splits": counts,
            "token_crc32": crc32,
            "parts": [part.describe() for _, part in self.mixed.values()],
        }


def refuse_other(path: Path, dataset: Dataset) -> bool:
    """Refuses a corpus that is not the one of a run's data.json; returns if that tells anything."""
    saved = files.read_sealed(path)
    if saved is None:
        return False
    if saved != dataset.describe():
        raise UserError(
            f"the text or tokenizer is no longer what {path.parent} was trained on",
            "Restore it, or give another --workdir",
        )
    return True
