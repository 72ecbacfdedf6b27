"""Do captured states come from the layers that they claim? Compared with transformers, by number.

A capture that is off by one layer works without a message: training runs, serving runs, and only
the acceptance is lower. So the first sequence of every capture is looked at before all others.
"""

from collections.abc import Sequence

import torch

from pipelines.errors import PreflightFailed

# Relative L2 error of a token's state, the mean over tokens. Neighbouring layers of real targets
# differ by some tenths. States are stored with 8 bits of mantissa (2^-9 from rounding alone);
# a server that also computes in bf16 sums in another order than transformers does.
TOLERANCE = {"float32": 0.004, "bfloat16": 0.05}


def check_layers(
    aux: torch.Tensor,  # [T, A*H] as captured
    last: torch.Tensor,  # [T, H] as captured, or as many of its end as are kept
    *,
    states: Sequence[torch.Tensor],  # L+1 x [T, H]: entry j+1 is the output of layer j
    aux_layer_ids: Sequence[int],
    tolerance: float,
) -> float:
    """Compare captured states with the target's own; return the largest error.

    Raises `PreflightFailed`, and says which layer the states do come from, if any.
    """
    wanted = [*(layer + 1 for layer in aux_layer_ids), len(states) - 1]
    blocks = [*aux.chunk(len(aux_layer_ids), dim=-1), last]
    worst = 0.0
    for block, entry in zip(blocks, wanted, strict=True):
        if not len(block):
            continue
        errors = [relative_error(block, state[-len(block) :]) for state in states]
        if errors[entry] > tolerance:
            nearest = min(range(len(errors)), key=errors.__getitem__)
            verdict = _verdict(nearest, entry, errors, tolerance)
            raise PreflightFailed(
                f"the server's {_describe(entry, len(states))} is off by {errors[entry]:.3g} from "
                f"what transformers computes; {verdict}",
                expected=f"a mean relative error of at most {tolerance}",
                change="start the server with target.profile.aux_layer_ids, which mean 'output of "
                "layer j'; check that it serves the same weights",
            )
        worst = max(worst, errors[entry])
    return worst


def check_batch(
    alone: Sequence[torch.Tensor], in_batch: Sequence[torch.Tensor], *, tolerance: float
) -> float:
    """Compare one sequence captured alone with the same in a batch; return the largest error.

    Raises `PreflightFailed` where neighbours in a batch change a sequence's states.
    """
    worst = max(relative_error(a, b) for a, b in zip(alone, in_batch, strict=True))
    if worst > tolerance:
        raise PreflightFailed(
            f"a sequence captured beside others differs by {worst:.3g} from the same alone",
            expected=f"a mean relative error of at most {tolerance}",
            change="the server mixes up its requests; do not use its states, and report it",
        )
    return worst


def check_start(
    start: Sequence[torch.Tensor], whole: Sequence[torch.Tensor], *, tolerance: float
) -> float:
    """Compare the start of a sequence with the same rows of the whole one; return the largest
    error. A state depends on earlier tokens only, however the prefill is cut into parts.

    Raises `PreflightFailed` where rows of parts are joined wrongly, or lost.
    """
    worst = max(relative_error(b[: len(a)], a) for a, b in zip(start, whole, strict=True))
    if worst > tolerance:
        raise PreflightFailed(
            f"the first {len(start[0])} tokens of a sequence of {len(whole[0])} differ by "
            f"{worst:.3g} from the same alone",
            expected=f"a mean relative error of at most {tolerance}",
            change="the server loses or mixes up the parts of a prefill; do not use its states, "
            "raise chunked-prefill-size in capture.servers.arguments, and report it",
        )
    return worst


def relative_error(seen: torch.Tensor, expected: torch.Tensor) -> float:
    """The mean over tokens of |seen - expected| / |expected|, both [T, H]."""
    expected = expected.float()
    distance = (seen.float() - expected).norm(dim=-1)
    return float((distance / expected.norm(dim=-1).clamp(min=1e-9)).mean())


def _verdict(nearest: int, entry: int, errors: Sequence[float], tolerance: float) -> str:
    if errors[nearest] > tolerance:
        return "no layer's output matches"
    shift = nearest - entry
    return f"it is {_describe(nearest, len(errors))} (shifted by {shift:+d})"


def _describe(entry: int, entries: int) -> str:
    if entry == entries - 1:
        return "last hidden state"
    return "embedding" if entry == 0 else f"output of layer {entry - 1}"
