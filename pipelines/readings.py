"""From what a stage counts to readings of declared metrics. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from actors.dispatch import Trust
from actors.pool import ServerSnapshot
from actors.supervision import ServerStatus, State
from pipelines.metrics import Reading
from pipelines.row_report import RowReport


def row_readings(reports: Sequence[RowReport]) -> Iterator[Reading]:
    """Of rows that became durable."""
    statuses: Counter[tuple[str, str]] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    for one in reports:
        statuses[one.dataset, one.status.partition(":")[0]] += 1
        if not one.is_ok:
            reasons[one.dataset, one.status] += 1
        if one.has_reply:  # a row without one has no counts: its zeros say nothing
            tokens[one.dataset, "prompt"] += one.prompt_tokens
            tokens[one.dataset, "output"] += one.output_tokens
            tokens[one.dataset, "reasoning"] += one.reasoning_tokens
            yield Reading("eyas_row_latency_seconds", one.latency_ms / 1000)
    for name, label, counts in (
        ("eyas_rows", "status", statuses),
        ("eyas_row_faults", "reason", reasons),
        ("eyas_tokens", "kind", tokens),
    ):
        for (dataset, value), count in counts.items():
            yield Reading(name, count, {"dataset": dataset, label: value})


def server_readings(servers: Sequence[ServerStatus]) -> Iterator[Reading]:
    """Of the servers of a stage. What a server does not say has no reading."""
    states = Counter(one.state for one in servers)
    for state in get_args(State):
        yield Reading("eyas_servers", states[state], {"state": state})
    for one in servers:
        label = {"server": one.name}
        yield Reading("eyas_server_ready", float(one.state == "ready"), label)
        yield Reading("eyas_server_restarts", one.restarts, label)
        if one.load is None:
            continue
        usage = kv_usage(one)
        yield Reading("eyas_server_running", one.load.running, label)
        yield Reading("eyas_server_queue", one.load.waiting, label)
        if usage is not None:
            yield Reading("eyas_server_kv_usage", usage, label)
        if one.load.gen_throughput is not None:
            yield Reading("eyas_server_tokens_per_second", one.load.gen_throughput, label)


def kv_usage(server: ServerStatus) -> float | None:
    """The used part of a server's KV memory, 0 to 1; None where it does not say."""
    load = server.load
    if load is None or load.token_usage is not None:
        return None if load is None else load.token_usage
    room = load.max_total_num_tokens or server.max_total_num_tokens
    return load.used_tokens / room if room else None


def pool_readings(
    before: Sequence[ServerSnapshot], after: Sequence[ServerSnapshot]
) -> Iterator[Reading]:
    """Of one worker's pool, between two looks at it."""
    faults_before = {one.url: one.faults for one in before}
    for one in after:
        label = {"server": one.url}
        yield Reading("eyas_pool_in_flight", one.in_flight, label)
        yield Reading("eyas_pool_limit", one.limit, label)
        yield Reading("eyas_pool_trusted", float(one.trust == Trust.TRUSTED.value), label)
        counted = Counter(one.faults)
        counted.subtract(faults_before.get(one.url, {}))
        for fault, count in counted.items():
            yield Reading("eyas_request_faults", count, {**label, "fault": fault})


def shard_readings(samples: int, set_aside: int, tokens: int) -> Iterator[Reading]:
    """Of one shard of hidden states that became durable."""
    yield Reading("eyas_capture_shards", 1)
    yield Reading("eyas_capture_samples", samples, {"status": "captured"})
    yield Reading("eyas_capture_samples", set_aside, {"status": "set_aside"})
    yield Reading("eyas_capture_tokens", tokens)


def step_readings(line: Mapping[str, Any], steps: int) -> Iterator[Reading]:
    """Of a training line of `metrics.jsonl`, which covers so many steps."""
    yield Reading("eyas_train_step", line["step"])
    for key in ("loss", "learning_rate", "grad_norm", "tokens_per_second"):
        yield Reading(f"eyas_train_{key}", line[key])
    each, waiting = line["seconds"] / steps, line["data_wait_share"]
    yield Reading("eyas_train_step_seconds", each * waiting, {"part": "data_wait"})
    yield Reading("eyas_train_step_seconds", each * (1 - waiting), {"part": "compute"})
    yield from tally_readings(line, "train")


def tally_readings(summary: Mapping[str, Any], split: str) -> Iterator[Reading]:
    """Of a tally's summary. A rate of nothing is null, and has no reading."""
    for key in ("accuracy", "acceptance_rate"):
        for step, share in enumerate(summary[key]):
            if share is not None:
                labels = {"split": split, "ttt_step": str(step)}
                yield Reading(f"eyas_train_{key}", share, labels)
    if summary["acceptance_length"] is not None:
        length = summary["acceptance_length"]
        yield Reading("eyas_train_acceptance_length", length, {"split": split})
