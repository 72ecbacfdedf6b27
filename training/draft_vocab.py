"""Which target tokens the draft may speak: chosen by count, stored with those counts.

`d2t` holds offsets and `t2d` flags, as SGLang reads them: `target_id = draft_id + d2t[draft_id]`.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from training.features import TokenRows

VOCAB_RULE_VERSION = "1"  # counts of tokens that may teach; ties by lower id; lowest unused fill


class DraftVocabFault(ValueError):
    """A draft vocabulary that cannot be made, read, or used with these data."""


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """The draft vocabulary and the counts it was chosen by."""

    used: torch.Tensor  # [U] int64 target ids, ascending
    counts: torch.Tensor  # [V] int64, how often each token may teach in the training split
    fingerprint: str

    @property
    def d2t(self) -> torch.Tensor:
        """[U] int64 offsets: target id minus draft id."""
        return self.used - torch.arange(len(self.used))

    @property
    def t2d(self) -> torch.Tensor:
        """[V] bool: may the draft speak this target token."""
        flags = torch.zeros(len(self.counts), dtype=torch.bool)
        flags[self.used] = True
        return flags

    @property
    def draft_ids(self) -> torch.Tensor:
        """[V] int64: the draft id of each target id, -1 where it has none."""
        ids = torch.full((len(self.counts),), -1, dtype=torch.int64)
        ids[self.used] = torch.arange(len(self.used))
        return ids

    @property
    def coverage(self) -> float:
        """Share of the counted tokens that the draft can speak: a ceiling of acceptance."""
        return int(self.counts[self.used].sum()) / max(1, int(self.counts.sum()))


def count_tokens(
    store: TokenRows, rows: Iterable[int], *, max_tokens: int, vocab_size: int
) -> torch.Tensor:
    """[V] int64: how often each token may teach in the given rows, each cut to `max_tokens`.

    Raises `DraftVocabFault` on an id outside the vocabulary.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in rows:
        input_ids, loss_mask = store.tokens(row)
        teaching = input_ids[:max_tokens][loss_mask[:max_tokens]]
        if len(teaching) and not 0 <= int(teaching.min()) <= int(teaching.max()) < vocab_size:
            raise DraftVocabFault(
                f"{store.sample_ids[row]} holds token {int(teaching.max())}, the target's "
                f"vocabulary ends at {vocab_size}: the features belong to another target"
            )
        counts += torch.bincount(teaching, minlength=vocab_size)
    return counts


def choose(counts: torch.Tensor, size: int, *, fingerprint: str) -> DraftVocab:
    """The `size` most frequent ids, ties by lower id, filled with the lowest unused, ascending.

    The fill needs no rule of its own: unused ids tie at count 0, so the lowest come first.
    """
    if not 0 < size <= len(counts):
        raise DraftVocabFault(f"a draft vocabulary of {size} from a target's {len(counts)} tokens")
    by_count = torch.sort(-counts, stable=True).indices  # stable: equal counts keep id order
    return DraftVocab(by_count[:size].sort().values, counts, fingerprint)


def fingerprint_of(
    sample_ids: Sequence[str], *, size: int, vocab_size: int, max_tokens: int
) -> str:
    """What a draft vocabulary depends on, as a hash. Another one must not be used silently."""
    rule = [VOCAB_RULE_VERSION, size, vocab_size, max_tokens, sorted(sample_ids)]
    return hashlib.sha256(json.dumps(rule).encode()).hexdigest()[:16]


def save(vocab: DraftVocab, path: Path) -> None:
    """Write `d2t`, `t2d` and the counts, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    tensors = {"d2t": vocab.d2t, "t2d": vocab.t2d, "counts": vocab.counts}
    # One key: safetensors writes several in an order that differs from process to process.
    metadata = {"fingerprint": vocab.fingerprint}
    try:
        save_file(tensors, temporary, metadata=metadata)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> DraftVocab:
    """Read a draft vocabulary. Raises `DraftVocabFault` where `d2t` and `t2d` disagree."""
    try:
        with safe_open(path, framework="pt") as file:
            d2t, t2d, counts = (file.get_tensor(name) for name in ("d2t", "t2d", "counts"))
            fingerprint = file.metadata()["fingerprint"]
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise DraftVocabFault(f"{path} is not a draft vocabulary: {error!r}") from error
    vocab = DraftVocab(d2t + torch.arange(len(d2t)), counts, fingerprint)
    if len(t2d) != len(counts) or not torch.equal(t2d.nonzero().flatten(), vocab.used):
        raise DraftVocabFault(f"{path}: d2t and t2d name different tokens; delete it to rebuild it")
    return vocab
