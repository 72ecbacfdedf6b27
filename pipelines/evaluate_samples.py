"""A few answers of an evaluation, with the tokens that the draft had right: a file of its own."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.errors import VerificationFailed
from pipelines.store import RunFolder, sha256_of, write_json

SAMPLES = 8


@dataclass(frozen=True)
class AnswerSample:
    """One answer: the text of each token, and how many drafts each verification accepted.

    The first token is the prefill's; a verification gives its accepted drafts and one more. The
    last may accept drafts that the end of the answer cuts off.
    """

    sample_id: str
    dataset: str
    domain: str
    pieces: tuple[str, ...]
    accepted: tuple[int, ...]

    def runs(self) -> list[tuple[str, str]]:
        """Text in order, as ("accepted", text) where the draft was right, else ("", text)."""
        drafted = [False]
        for count in self.accepted:
            drafted += [True] * count + [False]
        runs: list[tuple[str, str]] = []
        for is_drafted, piece in zip(drafted, self.pieces, strict=False):
            kind = "accepted" if is_drafted else ""
            if runs and runs[-1][0] == kind:
                runs[-1] = (kind, runs[-1][1] + piece)
            else:
                runs.append((kind, piece))
        return runs


def write_samples(
    run: RunFolder, samples: Sequence[AnswerSample], left_out: Mapping[str, int]
) -> dict[str, Any]:
    """Write the file beside `evaluation.json`; return what `evaluation.json` says of it."""
    path = run.evaluation_samples
    write_json(path, {"version": "1", "samples": [asdict(one) for one in samples]})
    return {"count": len(samples), "left_out": dict(left_out), "sha256": sha256_of(path)}


def read_samples(run: RunFolder) -> list[AnswerSample]:
    """The samples of the evaluation that is there; none where it says nothing of them.

    Raises `VerificationFailed` where the file is another one, `OSError` where it is not there.
    """
    evaluation = json.loads(run.evaluation.read_bytes())
    if "samples" not in evaluation:
        return []
    path = run.evaluation_samples
    if sha256_of(path) != evaluation["samples"]["sha256"]:
        raise VerificationFailed(
            f"{path.name} is not the file that the evaluation wrote",
            expected="the checksum in evaluation.json",
            change="evaluate again with --from evaluate",
        )
    stored = json.loads(path.read_bytes())["samples"]
    return [
        AnswerSample(**{**one, "pieces": tuple(one["pieces"]), "accepted": tuple(one["accepted"])})
        for one in stored
    ]
