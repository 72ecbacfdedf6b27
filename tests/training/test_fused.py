"""Backward passes by hand against finite differences and against plain torch."""

import pytest
import torch
import torch.nn.functional as F

from training import fused
from training.fused import add_product, gated, operands, product, rms_norm, rotate


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=dice, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize(("width", "first"), [(4, 0), (8, 0), (8, 4), (9, 3)])
def test_a_product_reads_and_teaches_its_columns_only(width: int, first: int):
    x, weight = noise(5, 4), noise(3, width, seed=1)
    assert torch.equal(product(x, weight, first), x @ weight[:, first : first + 4].T)
    assert torch.autograd.gradcheck(lambda x, w: product(x, w, first), (x, weight))
    product(x, weight, first).sum().backward()
    assert weight.grad is not None
    taught = weight.grad.any(0).nonzero().flatten().tolist()
    assert taught == list(range(first, first + 4))


@pytest.mark.parametrize("lacks", [True, False])
def test_bfloat16_is_multiplied_as_this_cpu_does_it_best(
    lacks: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fused, "_lacks_bfloat16", lambda: lacks)
    x, weight = (noise(*shape, dtype=torch.bfloat16) for shape in ((6, 64), (8, 64)))
    (wide,) = operands(x)
    assert wide.dtype == (torch.float32 if lacks else torch.bfloat16)
    assert operands(x.double())[0].dtype == torch.float64
    found = product(x, weight)
    assert found.dtype == torch.bfloat16
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-6)
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_a_gate_is_that_of_llama():
    gate, up = noise(5, 6), noise(5, 6, seed=1)
    torch.testing.assert_close(gated(gate, up), F.silu(gate) * up)
    assert torch.autograd.gradcheck(gated, (gate, up))


@pytest.mark.parametrize("learns", [True, False])
def test_a_norm_is_that_of_llama(learns: bool):
    x, weight = noise(5, 6), noise(6, seed=1)
    x.requires_grad_(learns)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), F.rms_norm(x, (6,), weight, 1e-3))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))


def test_a_norm_in_bfloat16_squares_in_fp32():
    x, weight = noise(4, 512, dtype=torch.bfloat16), noise(512, seed=1, dtype=torch.bfloat16)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(rms_norm(x, weight, 1e-5), wide.bfloat16() * weight)


def test_a_rotation_turns_pairs_and_its_gradient_turns_back():
    x, angle = noise(5, 3, 8), noise(5, 1, 4, seed=1).detach()
    low, high = x.chunk(2, -1)
    pairs = torch.complex(low, high) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat([pairs.real, pairs.imag], -1)
    torch.testing.assert_close(rotate(x, angle.cos(), angle.sin()), expected)
    assert torch.autograd.gradcheck(lambda x: rotate(x, angle.cos(), angle.sin()), (x,))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added_to_a_total_that_may_be_wider(shape, dtype: torch.dtype):
    a, b = noise(*shape, dtype=dtype).detach(), noise(*shape, seed=1, dtype=dtype).detach()
    total = torch.ones(*shape[:-1], 3)
    add_product(total, a, b.mT)
    torch.testing.assert_close(total, 1 + (a @ b.mT).float())
