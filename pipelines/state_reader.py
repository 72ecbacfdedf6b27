"""One sample's states from the servers of a pool, whoever wants them. Knows no Ray.

Every state comes with the answer to one request, whose rid says whose it is and how many rows it
must have. A request that failed is asked again under another rid, and what the first one may still
bring is removed: it is nobody's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors import capture_file
from actors.capture_file import CapturedStates, CaptureFault
from actors.errors import BadReply
from actors.pool import Failed, Pool
from actors.protocol import Completion, GenerateRequest
from training.config import DraftConfig

# Faults of a sample rather than of a server: after all attempts it is set aside, and counted.
SAMPLE_FAULTS = frozenset({"nan", "capture_not_finite"})

# The prefill is all that is wanted. Greedy, so that no seed has to be said.
_CAPTURE_ONLY: Mapping[str, Any] = {"max_new_tokens": 0, "temperature": 0.0}


@dataclass(frozen=True)
class Sample:
    """What a server reads once more."""

    sample_id: str
    input_ids: tuple[int, ...]

    def start(self, tokens: int) -> "Sample":
        """The same, cut to its first tokens."""
        return replace(self, input_ids=self.input_ids[:tokens])


@dataclass(frozen=True)
class Handover:
    """Where servers put the states of which requests, and what those must be."""

    folder: Path
    nonce: str  # begins the rid of every request
    late_seconds: float  # how long after its answer a file may come
    layer_ids: tuple[int, ...]
    width: int  # of the target's states

    @staticmethod
    def of(
        config: DraftConfig, folder: Path, nonce: str, *, late_seconds: float = 0.0
    ) -> "Handover":
        """What a draft of this config is trained on."""
        return Handover(
            folder, nonce, late_seconds, config.aux_layer_ids, config.target_hidden_size
        )


class StateReader:
    """Asks for states and takes them. Lives in one event loop; `rid` names the pool's requests.

    `keeps`: states stay for longer than the next requests take, so they are copied out of the
    folder, which has room for requests only.
    `asked_again` counts the samples that took more than one attempt.
    """

    def __init__(self, handover: Handover, *, keeps: bool = True) -> None:
        self._handover, self._keeps = handover, keeps
        self._asked: dict[str, str] = {}  # sample id to the rid of its last attempt
        self._given_up: set[str] = set()  # rids whose files nobody will read
        self.asked_again = 0

    def rid(self, digest: str, request: GenerateRequest) -> str:
        """The name of one attempt: whose it is, and how many rows it must bring."""
        rid = capture_file.rid_of(self._handover.nonce, digest, len(request.input_ids))
        if request.rid in self._asked:
            self._given_up.add(self._asked[request.rid])
        self._asked[request.rid] = rid
        return rid

    async def read(self, pool: Pool, sample: Sample) -> CapturedStates | Failed:
        """The states of one sample, proved, or the last fault after all attempts."""
        request = GenerateRequest(sample.sample_id, sample.input_ids, _CAPTURE_ONLY)
        outcome = await pool.generate(request, self._take)
        last = self._asked.pop(sample.sample_id, None)  # None: there was no server to ask
        if isinstance(outcome, Failed):
            if last is not None:
                self._given_up.add(last)
            return outcome
        self.asked_again += outcome.attempt > 1
        assert outcome.value is not None, "_take returns states or raises"
        return outcome.value

    def discard_late_files(self) -> None:
        """Remove what requests that were given up have brought by now; look again next time."""
        for rid in self._given_up:
            capture_file.discard(self._handover.folder, rid)

    def _take(self, _: Completion, request: GenerateRequest) -> CapturedStates:
        """The states of a request that was answered. What is wrong with them is asked again."""
        handover = self._handover
        try:
            states = capture_file.take(
                handover.folder,
                request.rid,
                expected_ids=request.input_ids,
                aux_width=len(handover.layer_ids) * handover.width,
                width=handover.width,
                aux_layer_ids=handover.layer_ids,
                late_seconds=handover.late_seconds,
            )
        except CaptureFault as fault:
            raise BadReply(f"capture_{fault.name}", fault.detail) from fault
        return states.copied() if self._keeps else states
