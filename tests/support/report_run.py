"""Runs for the page: an eventful one with every kind of row, one that was killed, a damaged one.

Made from a good run; the figures are made up, and a page must take them as they are.
"""

import json
import math
import random
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from pipelines.evaluate_samples import AnswerSample, write_samples
from pipelines.schema import PROMPT_SCHEMA, REJECTED_PROMPT_SCHEMA, RESPONSE_SCHEMA
from pipelines.store import RunFolder, write_json, write_parquet

START = datetime(2026, 1, 1, 8, tzinfo=timezone.utc)
DOMAINS = ("chat", "math", "code", "tools")
ATTACK = "</pre></script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
_ASIDE = ("rejected:empty_content", "rejected:repetition", "failed:deadline", "failed:nan")
_TTT_STEPS = 7


def make_eventful_run(good: RunFolder, folder: Path, *, rows: int = 60) -> RunFolder:
    """Four sets with long tails, reasoning and tool calls, restarts, a quality stop, a dead server.

    `rows` are the prompts of each training set; some texts are attacks on the page.
    """
    run = RunFolder(shutil.copytree(good.root, folder))
    chooser = random.Random(3)
    recipe = yaml.safe_load(run.recipe.read_text())
    template = recipe["prompts"]["train"][0]
    recipe["name"] = "eventful"
    for use, prefix in (("train", ""), ("evaluation", "eval-")):
        recipe["prompts"][use] = [
            {**template, "name": prefix + domain, "domain": domain} for domain in DOMAINS
        ]
    run.recipe.write_text(yaml.safe_dump(recipe, sort_keys=False))
    manifest = json.loads(run.manifest.read_bytes())
    stages = manifest["stages"]
    prompt = pq.read_table(run.prompts / "chat", partitioning=None).slice(0, 1).to_pylist()[0]
    answer = pq.read_table(run.responses / "chat", partitioning=None).slice(0, 1).to_pylist()[0]
    shutil.rmtree(run.prompts)
    shutil.rmtree(run.responses)
    prepared, generated = {}, {}
    for number, domain in enumerate(DOMAINS):
        for name, count in ((domain, rows), (f"eval-{domain}", 10)):
            prompts = [_prompt(prompt, name, domain, at, chooser) for at in range(count)]
            table = pa.Table.from_pylist(prompts, schema=PROMPT_SCHEMA)
            write_parquet(run.prompts / name / "part-00000.parquet", table)
            prepared[name] = {"rows": count + 5, "prompts": count, "rejected": {"too_long": 5}}
            _write_rejected(run, name)
            if name != domain:
                continue
            answers = [_answer(answer, one, number, at, chooser) for at, one in enumerate(prompts)]
            generated[name] = _write_answers(run, name, answers)
    stages["prepare"]["counts"]["sets"] = prepared
    stages["generate"]["counts"]["sets"] = generated
    ok = sum(one["ok"] for one in generated.values())
    stages["capture"]["counts"] |= {"samples": ok - 2, "failed": {"capture_mismatch": 1}}
    write_json(run.manifest, manifest)
    summary = json.loads((run.training / "summary.json").read_bytes())
    write_json(run.training / "summary.json", {**summary, "samples": ok - 7, "heldout_samples": 5})
    _write_metrics(run)
    _write_events(run)
    _write_evaluation(run, chooser)
    return run


def make_killed_run(good: RunFolder, folder: Path) -> RunFolder:
    """Half answered, no commit, no end of its stage: what a killed driver leaves behind."""
    run = RunFolder(shutil.copytree(good.root, folder))
    rows = pq.read_table(run.responses / "chat", partitioning=None)
    for path in (run.responses, run.features, run.training, run.draft, run.checkpoints):
        shutil.rmtree(path)
    for path in (run.evaluation, run.draft_vocab):
        path.unlink()
    (run.segments / "chat").mkdir(parents=True)
    with pa.ipc.new_file(str(run.segments / "chat" / "one-0-abc.arrow"), RESPONSE_SCHEMA) as writer:
        writer.write_table(rows.slice(0, 20).cast(RESPONSE_SCHEMA))
    manifest = json.loads(run.manifest.read_bytes())
    write_json(run.manifest, {"stages": {"prepare": manifest["stages"]["prepare"]}})
    started = [_event(after, "stage_started", stage="generate") for after in (0, 9)]
    run.events.write_text(
        "\n".join([_event(-9, "stage_started", stage="prepare"), *started]) + "\n"
    )
    return run


def make_faulty_run(good: RunFolder, folder: Path) -> RunFolder:
    """Every artefact damaged in its own way."""
    run = RunFolder(shutil.copytree(good.root, folder))
    for path in [*run.responses.rglob("*.parquet")][:1] + [*run.prompts.rglob("*.parquet")][:1]:
        path.write_bytes(path.read_bytes()[:200])
    with run.events.open("a") as lines:
        lines.write('{"at": 1}\nno event\n[]\n')
    with (run.training / "metrics.jsonl").open("a") as lines:
        lines.write("{half\n")
    evaluation = json.loads(run.evaluation.read_bytes())
    del evaluation["acceptance"]["ngram"]
    write_json(run.evaluation, evaluation)
    (run.training / "summary.json").write_text("[]")
    return run


def _prompt(
    base: dict[str, Any], name: str, domain: str, at: int, chooser: random.Random
) -> dict[str, Any]:
    length = 12 + int(chooser.lognormvariate(4.2, 0.9))
    messages = [{"role": "user", "content": f"Question {at} about {domain}?" if at else ATTACK}]
    tools = "[]"
    if domain == "tools":
        function = {"name": "search", "description": "d", "parameters": {}}
        tools = json.dumps([{"type": "function", "function": function}])
    return {
        **base,
        "sample_id": f"{name}-{at:012x}",
        "dataset": name,
        "domain": domain,
        "messages": json.dumps(messages),
        "tools": tools,
        "prompt_ids": [5] * length,
    }


def _answer(
    base: dict[str, Any], prompt: dict[str, Any], number: int, at: int, chooser: random.Random
) -> dict[str, Any]:
    status = _ASIDE[at % 4] if at % 9 == 0 else "ok"
    reasoning = int(chooser.lognormvariate(5.5, 1.1)) if prompt["domain"] != "chat" else 0
    out = reasoning + 5 + int(chooser.lognormvariate(5, 0.8))
    has_reply = not status.startswith("failed")
    calls = [{"id": "c1", "type": "function", "function": {"name": "search", "arguments": ATTACK}}]
    waited = timedelta(seconds=at * 9 + number, hours=14 if at > 40 else 0)
    given = ("sample_id", "dataset", "domain", "messages", "tools", "prompt_ids")
    return {
        **base,
        **{key: prompt[key] for key in given},
        "status": status,
        "detail": "" if status == "ok" else f"seen: {ATTACK}",
        "reasoning": "First this, then that. " * min(40, reasoning // 4),
        "content": (ATTACK if at == 1 else f"The answer is {at}.\n\n" * 3) if has_reply else "",
        "tool_calls": json.dumps(calls if prompt["domain"] == "tools" else []),
        "finish_reason": "stop" if has_reply else "",
        "usage": {
            "prompt_tokens": len(prompt["prompt_ids"]) * has_reply,
            "completion_tokens": out * has_reply,
            "reasoning_tokens": reasoning * has_reply,
            "cached_tokens": 0,
            "total_tokens": (out + len(prompt["prompt_ids"])) * has_reply,
        },
        "finished_at": START + waited,
    }


def _write_rejected(run: RunFolder, name: str) -> None:
    row = {"file": "rows.jsonl", "dataset": name, "status": "rejected:too_long"}
    rows = [{**row, "line": line, "detail": f"9,000 tokens {ATTACK}"} for line in range(1, 6)]
    table = pa.Table.from_pylist(rows, schema=REJECTED_PROMPT_SCHEMA)
    write_parquet(run.prompts / "_rejected" / f"{name}.parquet", table)


def _write_answers(run: RunFolder, name: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    ok = [one for one in answers if one["status"] == "ok"]
    aside = [one for one in answers if one["status"] != "ok"]
    for folder, rows in ((run.responses, ok), (run.rejected_responses, aside)):
        table = pa.Table.from_pylist(rows, schema=RESPONSE_SCHEMA)
        write_parquet(folder / name / "part-00000.parquet", table)
    tokens = sum(one["usage"]["completion_tokens"] for one in ok)
    return {"prompts": len(answers), "ok": len(ok), "output_tokens": tokens}


def _write_metrics(run: RunFolder) -> None:
    lines = []
    for step in range(10, 2001, 10):
        right = 0.75 * (1 - math.exp(-step / 500)) + 0.02 * math.sin(step)
        rates: list[float | None] = [max(0.0, right - 0.06 * k) for k in range(_TTT_STEPS)]
        tally = {"acceptance_length": 1 + 2 * right, "acceptance_rate": rates}
        shared = {"step": step, "total_steps": 2000, "loss": 2 + 9 * math.exp(-step / 300)}
        shared |= {"tokens_per_second": 9000 + 700 * math.sin(step), "learning_rate": 2e-3 / step}
        shared |= {"seconds": 2.0}
        lines.append({"kind": "train", **shared, **tally})
        if step % 250 == 0:
            domains = dict.fromkeys(DOMAINS, tally)
            lines.append({"kind": "heldout", "step": step, "overall": tally, "domains": domains})
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (run.training / "metrics.jsonl").write_text(text)


def _write_events(run: RunFolder) -> None:
    died = {"server": "generate-3", "error": f"exit code -9 {ATTACK}"}
    away = 14 * 3600
    events = [
        _event(-90, "stage_started", stage="prepare"),
        _event(-60, "stage_finished", stage="prepare", seconds=30.0),
        _event(-40, "stage_started", stage="generate"),
        _event(0, "canary_passed"),
        _event(90, "server_died", **died),
        _event(93, "server_died", **{**died, "server": "generate-4"}),
        _event(200, "quality_stop", scope="set math", phase="run", reason="12% are empty"),
        _event(201, "stage_stopped", stage="generate", error="QualityStop"),
        _event(215, "stage_started", stage="generate"),
        _event(220, "canary_passed"),
        _event(away + 350, "stage_started", stage="generate"),
        _event(away + 360, "canary_passed"),
        _event(away + 600, "stage_finished", stage="generate", seconds=250.0),
        _event(away + 610, "stage_started", stage="capture"),
        *(_event(away + 620 + 7 * at, "shard_captured", tokens=3000 + 40 * at) for at in range(30)),
        _event(away + 900, "stage_finished", stage="capture", seconds=290.0),
        _event(away + 901, "stage_started", stage="train"),
        _event(away + 1500, "stage_finished", stage="train", seconds=590.0),
    ]
    run.events.write_text("\n".join(events) + "\n")


def _event(after: float, name: str, **facts: Any) -> str:
    return json.dumps({"at": START.timestamp() + after, "event": name, **facts})


def _write_evaluation(run: RunFolder, chooser: random.Random) -> None:
    page = json.loads(run.evaluation.read_bytes())
    for at, (kind, length) in enumerate((("trained", 2.4), ("untrained", 1.02), ("ngram", 1.3))):
        group = {**page["acceptance"][kind]["chat"], "prompts": 10}
        page["acceptance"][kind] = {
            name: {
                **group,
                "acceptance_length": length + 0.2 * place,
                "interval": [max(1.0, length + 0.2 * place - 0.1), length + 0.2 * place + 0.15],
            }
            for place, name in enumerate(("overall", "all_domains", *DOMAINS))
        }
        if at == 1:  # an untrained draft may have met no prompt of a domain
            unknown = {"acceptance_length": None, "interval": None, "acceptance_rates": [None] * 3}
            page["acceptance"][kind]["tools"] |= unknown
    samples = []
    for domain in DOMAINS:
        accepted = [chooser.randrange(4) for _ in range(30)]
        words = [f" word{at}" for at in range(1 + sum(accepted) + len(accepted))]
        words[3] = ATTACK
        name = f"eval-{domain}"
        samples.append(
            AnswerSample(f"{name}-{1:012x}", name, domain, tuple(words), tuple(accepted))
        )
    page["samples"] = write_samples(run, samples, {"too_long": 1})
    write_json(run.evaluation, page)
