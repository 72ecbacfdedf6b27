"""The answer of a scripted target: a pure function of the prompt, and of the sampling seed.

So rows of one run can be compared with those of another, and with what they should have been.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.fake_server import STOP_ID, good_reply

_WORDS = (
    *("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "knoll"),
    *("lagoon", "meadow", "naïve", "oasis", "prairie", "quarry", "ridge", "señor", "tundra"),
    *("upland", "valley", "willow", "zephyr", "山", "река"),
)


@dataclass(frozen=True)
class ScriptedTarget:
    """Answers for one tokenizer. Another `name` is another model: it says something else."""

    name: str
    pieces: tuple[bytes, ...]  # what each id stands for

    @staticmethod
    def of(folder: Path, name: str) -> "ScriptedTarget":
        """A target with the byte-level tokenizer of `folder`."""
        return ScriptedTarget(name, byte_pieces(folder))

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a request that keeps the contract in every point."""
        params = request["sampling_params"]
        ids = self.answer(
            request["input_ids"], params["max_new_tokens"], int(params.get("sampling_seed") or 0)
        )
        return good_reply(dict(request), ids, text=self.decode(ids), num_retractions=0)

    def refuses(self, prompt_ids: Sequence[int]) -> bool:
        """A prompt with "!" in it is refused (400), by every server and every time."""
        return self._id_of_byte[ord("!")] in prompt_ids

    def answer(self, prompt_ids: Sequence[int], most: int, seed: int) -> list[int]:
        """At most `most` ids; the last is the stop id unless the answer was cut by length.

        A prompt with "~" in it gets an empty answer.
        """
        if self._id_of_byte[ord("~")] in prompt_ids:
            return [STOP_ID]
        dice = random.Random(digest_of(self.name, *prompt_ids, seed))
        wanted = dice.randint(8, 60)
        text = ""
        while len(text.encode()) < wanted:
            text += dice.choice(_WORDS) + dice.choice((" ", " ", " ", ", ", ". "))
        ids = [self._id_of_byte[byte] for byte in text.encode()[:wanted]]
        return [*ids, STOP_ID] if len(ids) < most else ids[:most]

    def decode(self, ids: Sequence[int]) -> str:
        """What the tokenizer makes of the ids, special tokens shown."""
        return b"".join(map(self.pieces.__getitem__, ids)).decode(errors="replace")

    @property
    def _id_of_byte(self) -> dict[int, int]:
        return _ids_of_bytes(self.pieces)


def digest_of(*parts: object) -> int:
    """A number that depends on all parts, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def byte_pieces(folder: Path) -> tuple[bytes, ...]:
    """The bytes of each id of a byte-level tokenizer without merges."""
    described = json.loads((folder / "tokenizer.json").read_text())
    special = {one["id"]: one["content"] for one in described["added_tokens"]}
    byte_of = {character: byte for byte, character in _byte_alphabet().items()}
    pieces: dict[int, bytes] = {}
    for token, index in described["model"]["vocab"].items():
        whole = special[index].encode() if index in special else None
        pieces[index] = whole if whole is not None else bytes(byte_of[one] for one in token)
    return tuple(pieces[index] for index in range(len(pieces)))


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{byte: chr(byte) for byte in printable},
        **{byte: chr(256 + place) for place, byte in enumerate(others)},
    }


@cache
def _ids_of_bytes(pieces: tuple[bytes, ...]) -> dict[int, int]:
    return {piece[0]: index for index, piece in enumerate(pieces) if len(piece) == 1}
