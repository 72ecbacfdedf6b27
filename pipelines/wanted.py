"""Which responses a set wants, which of them are held, and what came of them in the end."""

import collections
from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.errors import PreflightFailed, VerificationFailed
from pipelines.schema import response_id
from pipelines.segments import committed_files, committed_ids, durable_reports, is_reopened
from pipelines.storage import listed, readable
from pipelines.store import RunFolder


class Wanted:
    """The prompts of one set, as the driver found the set when it started. Bodies are not held."""

    def __init__(self, run: RunFolder, set_name: str, samples_per_prompt: int) -> None:
        self.name, self._samples = set_name, samples_per_prompt
        self.files = sorted((run.prompts / set_name).glob("*.parquet"))
        self._turns = self._read_turns(run)
        self.segment_names = [one.name for one in listed(run.segments / set_name, "*.arrow")]
        committed, again = committed_ids(run, set_name), is_reopened(run, set_name)
        # Not asked again: all that is committed, and every durable reply or refusal. A row that
        # failed otherwise (a dead server, say) and is not committed yet gets another chance.
        self.reports = [
            one
            for one in durable_reports(run, set_name)
            if one.has_reply or (one.is_settled and not again) or one.sample_id in committed
        ]
        self.held = {one.sample_id for one in self.reports}
        self.total = samples_per_prompt * sum(self._turns.values())

    def responses(self) -> Iterator[str]:
        """The sample ids of all wanted responses."""
        for prompt in self._turns:
            yield from self.responses_to(prompt)

    def responses_to(self, prompt: str) -> Iterator[str]:
        """The sample ids of the wanted responses to one prompt."""
        for turn in range(1, self._turns[prompt] + 1):
            for sample in range(1, self._samples + 1):
                yield response_id(prompt, turn, sample)

    def first(self, count: int) -> list[str]:
        """The first prompts, in file order."""
        return list(self._turns)[:count]

    def missing(self, prompts: Collection[str] | None = None) -> list[str]:
        """The prompts, of all or of those given, of which some response is not held."""
        return [
            one
            for one in (self._turns if prompts is None else prompts)
            if not self.held.issuperset(self.responses_to(one))
        ]

    def earlier_turns(self, prompts: Collection[str]) -> Iterator[str]:
        """The held responses to unfinished conversations: their history."""
        for one in prompts:
            if self._turns[one] > 1:
                yield from self.held.intersection(self.responses_to(one))

    def _read_turns(self, run: RunFolder) -> dict[str, int]:
        """How many answers each prompt wants. Each sample id may come once, and belongs here."""
        if not self.files:
            raise PreflightFailed(
                f"there are no prompts in {run.prompts / self.name}",
                expected="the prompt files that prepare makes",
                change="run `eyas prepare` with this recipe first",
            )
        columns = ["sample_id", "dataset", "continuations"]
        tables = [pq.read_table(path, columns=columns, partitioning=None) for path in self.files]
        table = pa.concat_tables(tables)
        turns = pc.add(pc.list_value_length(table["continuations"]), 1).to_pylist()
        found = dict(zip(table["sample_id"].to_pylist(), turns, strict=True))
        datasets = pc.unique(table["dataset"]).to_pylist()
        if len(found) != table.num_rows or not set(datasets) <= {self.name}:
            raise VerificationFailed(
                f"{run.prompts / self.name}: {table.num_rows - len(found)} sample ids come twice, "
                f"datasets are {sorted(datasets)}",
                expected=f"every sample id once, and only the set {self.name}",
                change="make the prompts again with `eyas prepare`",
            )
        return found


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
