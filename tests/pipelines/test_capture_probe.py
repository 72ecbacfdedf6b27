"""The probe tells a right layer from its neighbours, and says which one it saw."""

import pytest
import torch

from pipelines.capture_probe import check_batch, check_layers, check_start, relative_error
from pipelines.errors import PreflightFailed

LAYERS, TOKENS, WIDTH, AUX = 6, 5, 8, (1, 2, 3)


@pytest.fixture
def states():
    """Embedding, then outputs of layers 0 to 5, the last one normed: a residual stream that grows
    by a fifth with each layer."""
    noise = torch.Generator().manual_seed(0)
    stream = [torch.randn(TOKENS, WIDTH, generator=noise)]
    for _ in range(LAYERS - 1):
        stream.append(stream[-1] + 0.2 * torch.randn(TOKENS, WIDTH, generator=noise))
    return [*stream, 3 * stream[-1]]


def look(states, entries, last, tolerance=0.05):
    aux = torch.cat([states[entry] for entry in entries], -1).bfloat16()
    return check_layers(aux, last.bfloat16(), states=states, aux_layer_ids=AUX, tolerance=tolerance)


def test_the_outputs_of_the_named_layers_pass_with_the_rounding_of_bf16(states):
    assert 0 < look(states, (2, 3, 4), states[-1]) < 2**-8


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ((3, 4, 5), r"output of layer 1 is off by .* it is output of layer 2 \(shifted by \+1\)"),
        ((1, 2, 3), r"output of layer 1 is off by .* it is output of layer 0 \(shifted by -1\)"),
        ((2, 3, 5), r"output of layer 3 is off by .* it is output of layer 4 \(shifted by \+1\)"),
        ((0, 3, 4), r"output of layer 1 is off by .* it is embedding"),
    ],
)
def test_a_shifted_layer_is_named_with_its_shift(states, entries, said):
    with pytest.raises(PreflightFailed, match=said):
        look(states, entries, states[-1])


def test_a_last_state_before_its_norm_is_found(states):
    with pytest.raises(PreflightFailed, match="last hidden state is off"):
        look(states, (2, 3, 4), states[-2])


def test_states_of_another_target_match_no_layer(states):
    with pytest.raises(PreflightFailed, match="no layer's output matches"):
        look([torch.roll(one, 1, 0) for one in states], (2, 3, 4), states[-1])


def test_neighbours_that_change_a_sequence_are_found(states):
    alone = [states[2], states[-1]]
    assert check_batch(alone, [one.clone() for one in alone], tolerance=0.004) == 0.0
    with pytest.raises(PreflightFailed, match="beside others"):
        check_batch(alone, [states[2].roll(1, 0), states[-1]], tolerance=0.004)


def test_parts_that_were_joined_wrongly_are_found(states):
    whole = [states[2], states[-1]]
    start = [one[:3].clone() for one in whole]
    assert check_start(start, whole, tolerance=0.004) == 0.0
    swapped = [states[2][[0, 2, 1, 3, 4]], states[-1]]
    with pytest.raises(PreflightFailed, match="first 3 tokens of a sequence of 5"):
        check_start(start, swapped, tolerance=0.004)


def test_the_error_is_relative_to_each_token_so_that_a_loud_one_hides_nothing():
    expected = torch.ones(2, 4)
    expected[0] *= 10_000  # the first token's state is often that large
    seen = expected.clone()
    seen[1] *= 2
    assert relative_error(seen, expected) == pytest.approx(0.5)
