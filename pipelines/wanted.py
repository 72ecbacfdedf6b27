"""Which responses a set wants, which of them are held, and what came of them in the end."""

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.calls import Places, calls_for, row_groups
from pipelines.errors import PreflightFailed, VerificationFailed
from pipelines.row_report import has_reply, is_settled
from pipelines.schema import response_id
from pipelines.segments import committed_files, is_open, is_reopened, report_table
from pipelines.storage import listed, readable
from pipelines.store import RunFolder

_AT_ONCE = 8192  # prompts whose responses are named at once


class Wanted:
    """The prompts of one set, as the driver found the set when it started. Bodies are not held.

    Prompts go by their places in the set: 0 is the first row of the first file.
    """

    def __init__(self, run: RunFolder, set_name: str, samples_per_prompt: int) -> None:
        self.name, self._samples = set_name, samples_per_prompt
        self.files = sorted((run.prompts / set_name).glob("*.parquet"))
        self._prompts, self._turns = self._read(run)
        self.segment_names = [one.name for one in listed(run.segments / set_name, "*.arrow")]
        self.reports = _kept_reports(run, set_name)  # of the responses that are held
        self.held = self.reports["sample_id"].combine_chunks()
        self.total = samples_per_prompt * int(self._turns.sum())

    def responses(self) -> pa.StringArray:
        """The sample ids of all wanted responses, prompt after prompt."""
        if self.total == len(self._prompts):
            return self._prompts
        return pa.concat_arrays(
            [
                pa.array(list(self._responses(at, at + _AT_ONCE)), pa.string())
                for at in range(0, len(self._prompts), _AT_ONCE)
            ]
        )

    def missing(self, first: int | None = None) -> Places:
        """The prompts, of all or of the first so many, of which some response is not held."""
        places = np.unique(self._owners()[~self._is_held()])
        return places if first is None else places[places < first]

    def earlier_turns(self, prompts: Places) -> Iterable[str]:
        """The held responses to unfinished conversations: their history."""
        owners = self._owners()
        is_history = np.isin(owners, prompts[self._turns[prompts] > 1])
        if not is_history.any():
            return ()
        earlier: list[str] = self.responses().filter(is_history & self._is_held()).to_pylist()
        return earlier

    def hold(self, responses: Sequence[str]) -> None:
        """These are durable now."""
        self.held = pa.concat_arrays([self.held, pa.array(responses, pa.string())])

    def calls(self, prompts: Places, rows: int) -> Iterator[pa.Table]:
        """Calls of workers for these prompts, of at most so many rows."""
        return calls_for(row_groups(self.files), prompts, rows)

    def _responses(self, start: int, stop: int) -> Iterator[str]:
        prompts = self._prompts[start:stop].to_pylist()
        for prompt, turns in zip(prompts, self._turns[start:stop], strict=True):
            for turn in range(1, int(turns) + 1):
                for sample in range(1, self._samples + 1):
                    yield response_id(prompt, turn, sample)

    def _owners(self) -> Places:
        """The prompt of each response."""
        return np.repeat(np.arange(len(self._prompts)), self._samples * self._turns)

    def _is_held(self) -> npt.NDArray[np.bool_]:
        held = pc.is_in(self.responses(), value_set=self.held)
        return np.asarray(held.to_numpy(zero_copy_only=False))

    def _read(self, run: RunFolder) -> tuple[pa.StringArray, npt.NDArray[np.int32]]:
        """The prompts, and how many answers each wants. Each may come once, and belongs here."""
        if not self.files:
            raise PreflightFailed(
                f"there are no prompts in {run.prompts / self.name}",
                expected="the prompt files that prepare makes",
                change="run `eyas prepare` with this recipe first",
            )
        ids, turns, datasets = [], [], set()
        for path in self.files:
            columns = ["sample_id", "dataset", "continuations"]
            table = pq.read_table(path, columns=columns, partitioning=None, use_threads=False)
            ids += table["sample_id"].chunks
            turns.append(pc.add(pc.list_value_length(table["continuations"]), 1).to_numpy())
            datasets |= set(pc.unique(table["dataset"]).to_pylist())
        prompts = pa.chunked_array(ids, pa.string()).combine_chunks()
        doubled = len(prompts) - pc.count_distinct(prompts).as_py()
        if doubled or not datasets <= {self.name}:
            raise VerificationFailed(
                f"{run.prompts / self.name}: {doubled} sample ids come twice, "
                f"datasets are {sorted(datasets)}",
                expected=f"every sample id once, and only the set {self.name}",
                change="make the prompts again with `eyas prepare`",
            )
        return prompts, np.concatenate(turns)


def _kept_reports(run: RunFolder, set_name: str) -> pa.Table:
    """The reports of what is not asked again: all that is committed, and every durable reply or
    refusal. A row that failed otherwise (a dead server, say) and is not committed yet gets another
    chance."""
    reports = report_table(run, set_name)
    if not is_open(run, set_name):
        return reports
    again = is_reopened(run, set_name)
    kept = [
        one
        for one in pc.unique(reports["status"]).to_pylist()
        if has_reply(one) or (is_settled(one) and not again)
    ]
    return reports.filter(pc.is_in(reports["status"], value_set=pa.array(kept, pa.string())))


def counts_of(run: RunFolder, wanted: Wanted) -> dict[str, Any]:
    """What was committed for a set, read from the committed files."""
    by_status: collections.Counter[str] = collections.Counter()
    tokens = {"prompt_tokens": 0, "completion_tokens": 0}
    for path in committed_files(run, wanted.name):
        table = pq.read_table(readable(path), columns=["status", "usage"], partitioning=None)
        for one in pc.value_counts(table["status"]).to_pylist():
            by_status[one["values"]] += one["counts"]
        usage = table.filter(pc.equal(table["status"], "ok"))["usage"]
        for name in tokens:
            tokens[name] += pc.sum(pc.struct_field(usage, name)).as_py() or 0  # None of no rows
    assert by_status.total() == wanted.total
    reasons = {
        kind: {
            status.partition(":")[2]: count
            for status, count in sorted(by_status.items())
            if status.startswith(f"{kind}:")
        }
        for kind in ("rejected", "failed")
    }
    return {
        "prompts": wanted.total,
        "ok": by_status["ok"],
        **reasons,
        "prompt_tokens": tokens["prompt_tokens"],  # of the ok rows, as is the next
        "output_tokens": tokens["completion_tokens"],
    }
