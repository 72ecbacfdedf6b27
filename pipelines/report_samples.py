"""The samples of a page: responses of every status, and answers with the draft's tokens marked.

All text is people's or a model's: it leaves here as plain text, and the template escapes it.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from markupsafe import escape

from pipelines.evaluate_samples import SAMPLES as EVALUATED
from pipelines.evaluate_samples import read_samples
from pipelines.report_look import Look, cut
from pipelines.segments import committed_files
from pipelines.storage import Location, contents, listed, readable

SAMPLES = 40  # of responses
TEXT_BYTES = 600_000  # of all samples together, escaped: what makes a page too large to send
_MOST = SAMPLES + EVALUATED
_ASIDE_SHARE = 0.4  # of the samples may be rejected and failed ones
_MOST_TEXT = 6000  # characters of one part of a sample
_MOST_PARTS = 24  # messages of a prompt that are shown, the last ones
_COLUMNS = ("sample_id", "dataset", "messages", "tools", "reasoning", "content", "tool_calls")
_COLUMNS += ("finish_reason", "usage", "status", "detail")  # type: ignore[assignment]


def samples(look: Look, rows: Mapping[str, pa.Table]) -> dict[str, Any] | None:
    """The samples, the same ones each time; None where there is none."""
    tried = [
        look.tried("samples", lambda row=row: _response(row))  # type: ignore[misc]
        for row in _responses(look, rows)
    ]
    made = [one for one in tried if one is not None]
    made += look.tried("samples", lambda: _evaluated(look)) or []
    shown, used = [], 0
    for one in made:
        size = sum(len(escape(text).encode(errors="replace")) for text in _texts(one))
        if used + size <= TEXT_BYTES:
            shown.append(one)
            used += size
    if not shown:
        return None
    return {
        "shown": shown,
        "total": f"{sum(table.num_rows for table in rows.values()):,}",
        "left_out": len(made) - len(shown),
        "most": _MOST,
        "most_bytes": f"{TEXT_BYTES / 1000:g}",
        "sets": list(dict.fromkeys(one["set"] for one in shown)),
        "statuses": list(dict.fromkeys(one["kind"] for one in shown)),
    }


def _texts(sample: Mapping[str, Any]) -> Iterable[str]:
    for part in sample["parts"]:
        yield from (text for _, text in part["runs"])
    yield sample["detail"]


def _responses(look: Look, rows: Mapping[str, pa.Table]) -> list[dict[str, Any]]:
    """Rows of each set, of which some were set aside, one of every status first."""
    found: list[dict[str, Any]] = []
    each = max(2, SAMPLES // max(1, len(rows)))
    for name, table in rows.items():
        wanted = _chosen(table, each)
        files = [*committed_files(look.run, name), *listed(look.run.segments / name, "*.arrow")]
        bodies: dict[str, dict[str, Any]] = {}
        for file in files:
            missing = [one for one in wanted if one not in bodies]
            for row in look.tried("samples", lambda f=file, m=missing: _bodies(f, m)) or []:  # type: ignore[misc]
                if wanted[row["sample_id"]] == row["status"]:  # of several versions the best
                    bodies[row["sample_id"]] = row
        found += [bodies[one] for one in wanted if one in bodies]
    return found[:SAMPLES]


def _chosen(table: pa.Table, count: int) -> dict[str, str]:
    """Sample ids with their status: some ok, then some of each other status."""
    ids = {
        status: sorted(table.filter(pc.equal(table["status"], status))["sample_id"].to_pylist())
        for status in sorted(set(table["status"].to_pylist()))
    }
    others = [status for status in ids if status != "ok"]
    aside = _spread({one: ids[one] for one in others}, max(1, round(count * _ASIDE_SHARE)))
    ok = _spread({"ok": ids.get("ok", [])}, count - len(aside))
    return {**ok, **aside}


def _spread(ids: Mapping[str, Sequence[str]], count: int) -> dict[str, str]:
    chooser = random.Random(0)
    turns = [
        (place, status, one)
        for status, some in ids.items()
        for place, one in enumerate(chooser.sample(some, min(count, len(some))))
    ]
    return {one: status for _, status, one in sorted(turns)[:count]}


def _bodies(file: Location, wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Whole rows by their ids. Of a committed file only the row groups that may hold them."""
    columns = list(_COLUMNS)
    if not wanted:
        return []
    if file.suffix == ".parquet":
        given: dict[str, Any] = {"columns": columns, "partitioning": None}
        ids = [("sample_id", "in", list(wanted))]
        found: pa.Table = pq.read_table(readable(file), filters=ids, **given)
    else:
        with pa.ipc.open_file(contents(file)) as opened:
            found = opened.read_all().select(columns)
        found = found.filter(pc.is_in(found["sample_id"], value_set=pa.array(wanted, pa.string())))
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def _response(row: Mapping[str, Any]) -> dict[str, Any]:
    usage, reason = row["usage"], row["finish_reason"]
    said = (
        f"{usage['prompt_tokens']:,} prompt tokens, {usage['completion_tokens']:,} out, "
        f"{usage['reasoning_tokens']:,} of them reasoning, ended by {reason}"
        if reason
        else "no reply"
    )
    parts = _prompt_parts(row["messages"])
    tools = _listed(row["tools"])
    if tools:
        names = ", ".join(_tool_name(one) for one in tools)
        parts.insert(0, _part("tools", f"tools declared: {len(tools)}", names))
    parts += [_part("reasoning", "reasoning", row["reasoning"])] if row["reasoning"] else []
    parts += [_part("content", "content", row["content"])] if row["content"] else []
    parts += _call_parts(_listed(row["tool_calls"]))
    return {
        "id": row["sample_id"],
        "set": row["dataset"],
        "kind": row["status"].partition(":")[0],
        "status": row["status"],
        "detail": cut(row["detail"], _MOST_TEXT),
        "said": said,
        "parts": parts,
    }


def _prompt_parts(messages: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for one in _listed(messages):
        if not isinstance(one, dict):
            parts.append(_part("prompt", "prompt", _text(one)))
            continue
        role = f"prompt: {one.get('role', 'no role')}"
        if one.get("content"):
            parts.append(_part("prompt", role, _text(one["content"])))
        calls = one.get("tool_calls")
        parts += _call_parts(calls if isinstance(calls, list) else [], of=role)
    if len(parts) <= _MOST_PARTS:
        return parts
    left_out = _part("prompt", "prompt", f"[... {len(parts) - _MOST_PARTS:,} earlier messages]")
    return [left_out, *parts[-_MOST_PARTS:]]


def _call_parts(calls: Sequence[Any], of: str = "") -> list[dict[str, Any]]:
    return [_part("call", f"{of} tool call: {_tool_name(one)}".strip(), _arguments(one))
            for one in calls[:_MOST_PARTS]]  # fmt: skip


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    name = function.get("name") if isinstance(function, dict) else None
    return cut(str(name), 80) if name else "no name"


def _arguments(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else call
    arguments = function.get("arguments", function) if isinstance(function, dict) else function
    return _text(arguments)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _listed(text: str) -> list[Any]:
    """A JSON list; what is none is one entry, as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return [text]
    return value if isinstance(value, list) else [value]


def _part(kind: str, name: str, text: str) -> dict[str, Any]:
    return {"kind": kind, "name": name, "runs": [("", cut(text, _MOST_TEXT))]}


# --- answers of the evaluation, with the drafted tokens that the target accepted


def _evaluated(look: Look) -> list[dict[str, Any]]:
    if "evaluate" not in look.stages:
        return []
    messages: dict[str, str] = {}
    stored = read_samples(look.run)[:EVALUATED]
    for name in {one.dataset for one in stored}:
        ids = [one.sample_id for one in stored if one.dataset == name]
        for path in sorted((look.run.prompts / name).glob("*.parquet")):
            table = pq.read_table(path, columns=["sample_id", "messages"], partitioning=None)
            table = table.filter(pc.is_in(table["sample_id"], value_set=pa.array(ids)))
            messages |= {one["sample_id"]: one["messages"] for one in table.to_pylist()}
    return [_evaluated_sample(one, messages) for one in stored]


def _evaluated_sample(one: Any, messages: Mapping[str, str]) -> dict[str, Any]:
    rounds, accepted = len(one.accepted), sum(one.accepted)
    length = f"{1 + accepted / rounds:.2f}" if rounds else "unknown"
    return {
        "id": one.sample_id,
        "set": one.dataset,
        "kind": "evaluated",
        "status": "evaluated",
        "detail": "",
        "said": f"{len(one.pieces):,} tokens in {rounds:,} verifications, {accepted:,} drafted "
        f"tokens accepted, acceptance length {length}",
        "parts": [
            *_prompt_parts(messages.get(one.sample_id, "[]")),
            {"kind": "content", "name": "answer", "runs": one.runs()},
        ],
    }
