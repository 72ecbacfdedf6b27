"""All that `eyas glance` can find: a stable name, the likely cause, the cure.

The order is that of importance: of two findings of one severity the earlier one here is said first.
The runbook has the same table.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["fault", "warning", "note"]


@dataclass(frozen=True)
class Known:
    """What is known of a finding before any file is seen."""

    severity: Severity
    cause: str
    cure: str


@dataclass(frozen=True)
class Finding:
    """One thing that a person should know, with why it is so and what to do."""

    severity: Severity
    name: str
    seen: str
    cause: str
    cure: str


def found(name: str, seen: str, severity: Severity | None = None) -> Finding:
    """A known finding in this file; `severity` where the share of rows decides about it."""
    known = KNOWN[name]
    return Finding(severity or known.severity, name, seen, known.cause, known.cure)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Faults first, and among equals the most telling one."""
    severities, names = ("fault", "warning", "note"), list(KNOWN)
    return tuple(
        sorted(findings, key=lambda one: (severities.index(one.severity), names.index(one.name)))
    )


def _fault(cause: str, cure: str) -> Known:
    return Known("fault", cause, cure)


def _warning(cause: str, cure: str) -> Known:
    return Known("warning", cause, cure)


_ANSWERS = {
    "reasoning_and_usage_lost": _fault(
        "the server ran without a reasoning parser, or its chat API was read, and the token "
        "counts were taken from where the reply does not hold them; the thinking is lost or "
        "lies inside content",
        "stop the run now; check reasoning_parser in the server's /model_info; ask /generate "
        "for output_ids, split them by token id, and store len(output_ids)",
    ),
    "reasoning_inside_content": _fault(
        "the server had no reasoning parser, or one for another model (kimi for kimi_k2), and "
        "its chat API was read",
        "split by the think-close token id; text parsers of servers are not to be trusted",
    ),
    "usage_absent": _fault(
        "the server did not return usage, and the writer took a default for a count that the "
        "reply did not hold",
        "treat a reply without completion_tokens as failed and ask again; with /generate store "
        "len(output_ids)",
    ),
    "usage_not_a_count": _fault(
        "a default stood in for a missing count, or the answer was empty",
        "look at such rows with --show; take the counts from the reply only",
    ),
    "number_as_text": _fault(
        "the rows went through CSV, a form or a spreadsheet",
        "write the counts as JSON numbers, from the reply",
    ),
    "usage_differs_from_ids": _fault(
        "the ids were cut, joined or tokenised again after the server counted them",
        "store output_ids exactly as the server gave them; make these rows again",
    ),
    "ids_out_of_range": _fault(
        "padding or a mask (-100) was stored as ids, or an integer overflowed",
        "store the ids as the server gave them; make these rows again",
    ),
    "nan_in_server": _fault(
        "the target's logits were NaN; SGLang writes a stop over it and answers 200",
        "drop these rows, and check the server's quantisation and kernels before more",
    ),
    "reserved_tokens": _fault(
        "broken logits were sampled uniformly: word salad with HTTP 200",
        "drop these rows; check the server's weights and kernels before going on",
    ),
    "finish_reason": _warning(
        "aborted requests answer 200 with partial text; a missing reason means a cut reply",
        "drop these rows and ask again",
    ),
    "duplicate_id": _fault(
        "a resume that generated rows again, or files joined twice",
        "keep one row for each id, and find out which writer repeats",
    ),
    "think_markers_in_content": _warning(
        "the split missed a marker: implicit close, a second thinking, or quoted text",
        "split by token ids; quarantine these rows",
    ),
    "content_empty": _warning(
        "the target never closed its thinking, so all went to reasoning; or the answer is truly "
        "empty",
        "quarantine them by name, never guess where the thinking ended",
    ),
    "repetition": _warning(
        "greedy loops of a small target, or broken logits ('!!!!')",
        "reject loops by the share of one token; if many, check quantisation and sampling",
    ),
    "cut_at_one_length": _warning(
        "max_new_tokens is smaller than what the target wants to say; 128 is SGLang's own default, "
        "which applies when max_new_tokens is not inside sampling_params",
        "send max_new_tokens inside sampling_params, or raise it; drafts trained on cut answers "
        "never see how answers end",
    ),
    "many_cut": _warning(
        "max_new_tokens is small, or the target loops",
        "raise max_new_tokens; see whether answers repeat themselves",
    ),
    "cut_inside_reasoning": _warning(
        "max_new_tokens is smaller than the reasoning",
        "raise max_new_tokens",
    ),
    "special_tokens_in_content": _warning(
        "stop or tool markers were decoded as text (skip_special_tokens off), or the target wrote "
        "markup that was not parsed",
        "cut content at marker ids, and keep the raw ids beside it",
    ),
    "broken_characters": _warning(
        "an answer cut inside a character, or pieces decoded one by one",
        "decode the whole ids at once",
    ),
    "duplicate_text": _warning(
        "the same prompt asked twice, or a target that says one thing",
        "remove duplicate prompts; for many samples of one prompt vary the seed",
    ),
    "answer_in_another_script": _warning(
        "the target drifts into another language, or the prompts ask for translations",
        "read some with --show; for a drift check the weights, the template and the sampling",
    ),
    "reasoning_empty": _warning(
        "the target does not reason, or its template closes the thinking at once; otherwise the "
        "server had no reasoning parser",
        "if this target reasons, stop: see reasoning_parser in the server's /model_info",
    ),
}

_ROWS = {
    "malformed_lines": _fault(
        "two writers on one file, a disk that filled up, or a file of another kind",
        "the places are listed; make those rows again rather than mend them by hand",
    ),
    "null_bytes": _fault(
        "the machine lost power or the disk was full: space was reserved and never written",
        "make those rows again",
    ),
    "not_utf8": _fault(
        "the file was written as Latin-1 or Windows-1252, or cut inside a character",
        "find its encoding and write it again: iconv -f LATIN1 -t UTF-8",
    ),
    "not_objects": _fault(
        "each row is a list or a bare value: field names were lost",
        "write one JSON object a row",
    ),
    "not_one_a_line": _fault(
        "objects follow each other without a line end, or are spread over many lines: two "
        "writers, or a pretty printer",
        "write one object a line: jq -c . FILE",
    ),
    "line_too_long": _fault(
        "a line end was lost, or a whole data set was written as one row",
        "write one row a line",
    ),
    "too_deep": _fault(
        "rows were wrapped into themselves by a loop",
        "look at the writer; no reader here goes so deep",
    ),
    "nan_in_json": _fault(
        "json.dumps without allow_nan=False: NaN and Infinity are no JSON, and other readers "
        "refuse the whole file",
        "write null where there is no number, and find out why there was none",
    ),
    "duplicate_keys": _fault(
        "a writer joined texts by hand: each reader keeps another one of the values",
        "write rows with a JSON library",
    ),
    "number_too_large": _fault(
        "an integer beyond 64 bits: most readers turn it into a float and lose its last digits",
        "write such ids as text",
    ),
    "lone_surrogate": _warning(
        "an emoji was cut in two by whoever counts in UTF-16 units; it cannot be stored as UTF-8",
        "decode the whole answer at once",
    ),
    "schema_drift": _fault(
        "another writer, version or server took over in the middle of the file",
        "find out when it changed; do not mix the two halves",
    ),
    "mixed_types": _warning(
        "writers do not agree on a field; Parquet and Arrow will refuse it",
        "--field NAME says how many and where; write one type",
    ),
    "half_line_at_end": _warning(
        "the writer died in the middle of a row",
        "drop the half line and make that row again",
    ),
    "byte_order_mark": _warning(
        "a Windows program wrote the file; strict readers stop at its first line",
        "write it again without the mark: sed -i '1s/^\\xEF\\xBB\\xBF//' FILE",
    ),
    "carriage_returns": Known(
        "note",
        "a Windows program wrote the file, or it was copied in text mode",
        "nothing for JSON readers; byte offsets and checksums differ from the original's",
    ),
}

_FILES = {
    "not_permitted": _fault(
        "the file belongs to another user, or its mode is too strict",
        "ask its owner, or look as that user",
    ),
    "no_answer": _fault(
        "the disk or the store does not answer",
        "see the reason that it gives; try again when it is mended",
    ),
    "broken_link": _fault(
        "a link whose target was moved or removed, or links in a circle",
        "mend the link, or name the file itself",
    ),
    "not_a_file": _fault(
        "a pipe, a socket or a device: reading it would wait or take data from somebody",
        "name the file that is written",
    ),
    "no_files": _fault(
        "the writer has not begun, writes elsewhere, or names its files otherwise",
        "check the path, and the stage that should have written there",
    ),
    "empty_file": _fault(
        "the writer has not begun or died before its first row, or a copy failed",
        "look again in a moment; if it stays so, make the file again",
    ),
    "html_page": _fault(
        "a download met a login or an error page, with status 200 or without looking at it",
        "fetch it again with a key, and check the status",
    ),
    "cut_short": _fault(
        "cut while it was copied or written, or still being written without its footer",
        "copy or make the file again; a file that is being written can be read when it is closed",
    ),
    "broken_compression": _fault(
        "the compressed stream was cut or damaged; what came before was looked at",
        "copy or make the file again",
    ),
    "bad_header": _fault(
        "the header does not fit what follows: a damaged file, or a broken writer",
        "make the file again with the safetensors library",
    ),
    "utf16": _fault(
        "a Windows program wrote the file (PowerShell's > does)",
        "write it again as UTF-8: iconv -f UTF-16 -t UTF-8",
    ),
    "unknown_format": _fault(
        "another kind of file under this name, encryption, or damage at its beginning",
        "see what `file NAME` says of it",
    ),
    "not_json": _fault(
        "cut short, still being written, or no JSON at all",
        "make the file again; JSONL survives a cut, JSON does not",
    ),
    "json_too_large": _fault(
        "one JSON value holds everything, and is not a plain list",
        "write one object a line (JSONL)",
    ),
    "wrong_name": _warning(
        "it was renamed or saved under another format's ending; it is read for what it is",
        "rename it: other readers go by the name",
    ),
    "no_rows": _fault(
        "the writer has not begun, or everything was filtered out",
        "check the stage that should have written it",
    ),
    "not_finite": _fault(
        "training or capture met a NaN, or an overflow in a small dtype",
        "do not use it; go back to the last checkpoint or capture again",
    ),
    "writer_silent": _warning(
        "a process holds the file open for writing and has written nothing for long: it hangs, "
        "waits for its servers, or keeps rows in memory",
        "see what that process does; its last rows may not be on the disk",
    ),
}

KNOWN: Mapping[str, Known] = {**_FILES, **_ANSWERS, **_ROWS}
