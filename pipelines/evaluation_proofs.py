"""Proofs about `evaluation.json`: its figures follow from its own counters."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pipelines.proof import Breaks, Broken, Evidence, load_json
from pipelines.recipe import fingerprint
from pipelines.store import sha256_of


def evaluation_consistent(evidence: Evidence) -> str:
    """Every figure follows from its own counters, groups add up, and no output was changed."""
    evidence.need("evaluate")
    page = _evaluation(evidence)
    breaks = Breaks()
    if page["lossless"] is not True:
        breaks.add("lossless", f"it is {page['lossless']}: a draft changed an output")
    for tie in page["numeric_ties"]:
        if tie.get("is_tie") is not True:
            breaks.add(tie["sample_id"], "its output changed, and it was no tie")
    if page["draft_sha256"] != sha256_of(evidence.run.draft / "model.safetensors"):
        breaks.add("draft_sha256", "another draft was measured than the one in draft/")
    if page["recipe"] != fingerprint(evidence.recipe, "evaluate"):
        breaks.add("recipe", "it was measured with another recipe")
    samples = evidence.run.evaluation_samples
    if "samples" in page and not samples.exists():
        breaks.add(samples.name, "it is not there, and evaluation.json has its checksum")
    elif "samples" in page and page["samples"]["sha256"] != sha256_of(samples):
        breaks.add(samples.name, "it is another file than the one that was written")
    steps = evidence.recipe.evaluate.draft_steps
    for kind, groups in page["acceptance"].items():
        for name, group in groups.items():
            for fault in _acceptance_faults(group, steps):
                breaks.add(f"{kind}, {name}", fault)
        for whole, fault in _sum_faults(groups, page["method"]["overall"]):
            breaks.add(f"{kind}, {whole}", fault)
    breaks.raise_if_any()
    return f"{len(page['acceptance'])} drafts, {page['tokens_compared']:,} tokens unchanged"


def _evaluation(evidence: Evidence) -> dict[str, Any]:
    page = load_json(evidence.run.evaluation)
    promised = {"lossless", "numeric_ties", "draft_sha256", "recipe", "acceptance", "method"}
    if missing := promised - page.keys():
        raise Broken(f"evaluation.json has no {min(missing)}")
    return page


def _acceptance_faults(group: Mapping[str, Any], steps: int) -> Iterator[str]:
    histogram, length = group["histogram"], group["acceptance_length"]
    if len(histogram) != steps + 1:
        yield f"the histogram has {len(histogram)} counts for {steps} drafted tokens"
        return
    verifications = sum(histogram)
    correct = sum(accepted * count for accepted, count in enumerate(histogram))
    if (group["verifications"], group["correct_drafts"]) != (verifications, correct):
        yield (
            f"{group['correct_drafts']} correct in {group['verifications']} verifications, the "
            f"histogram says {correct} in {verifications}"
        )
    expected = 1 + correct / verifications if verifications else None
    if not _is_close(length, expected):
        yield f"acceptance length {length}, its counters say {expected}"
    if group["interval"] is not None and length is not None:
        low, high = group["interval"]
        if not 1 <= low <= high <= steps + 1:
            yield f"the interval {low} to {high} is impossible"
    reached = [sum(histogram[step:]) for step in range(steps + 1)]
    for step, rate in enumerate(group["acceptance_rates"]):
        said = reached[step + 1] / reached[step] if reached[step] else None
        if not _is_close(rate, said):
            yield f"acceptance rate {rate} at step {step}, its counters say {said}"


def _sum_faults(groups: Mapping[str, Any], overall: list[str]) -> Iterator[tuple[str, str]]:
    domains = {name: one for name, one in groups.items() if name not in ("overall", "all_domains")}
    for whole, members in (("all_domains", set(domains)), ("overall", set(overall))):
        total: Counter[int] = Counter()
        for name in members & domains.keys():
            total.update(dict(enumerate(domains[name]["histogram"])))
        seen = dict(enumerate(groups[whole]["histogram"]))
        if any(total[at] != count for at, count in seen.items()):
            yield whole, "its counters are not the sum of its domains"


def _is_close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
