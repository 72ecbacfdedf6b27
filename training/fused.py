"""The draft's products and row-wise functions with backward passes of their own: few passes over
memory, little kept between forward and backward."""

from functools import cache

import torch


def operands(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors in the dtype in which this machine multiplies them well.

    A CPU without bf16 arithmetic takes about seven times as long for a bf16 product as for an fp32
    one, which is exact for the same operands.
    """
    if tensors[0].dtype == torch.bfloat16 and tensors[0].device.type == "cpu" and _lacks_bfloat16():
        return tuple(one.float() for one in tensors)
    return tensors


@cache
def _lacks_bfloat16() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, for matrices or batches of them, in one pass where the dtypes allow it."""
    if total.dtype != a.dtype:
        total += a @ b
    elif total.dim() == 2:
        total.addmm_(a, b)
    else:
        total.baddbmm_(a, b)


def product(x: torch.Tensor, weight: torch.Tensor, first: int = 0) -> torch.Tensor:
    """`x` [N, I] times columns `first` to `first + I` of `weight` [O, W], transposed: [N, O]."""
    result: torch.Tensor = _Product.apply(x, weight, first)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        first: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)  # itself, no view: ZeRO-3 gathers it again for backward
        ctx.columns = slice(first, first + x.shape[1])  # type: ignore[attr-defined]
        wide, part = operands(x, weight[:, ctx.columns])  # type: ignore[attr-defined]
        return (wide @ part.T).to(x.dtype)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        columns = ctx.columns  # type: ignore[attr-defined]
        needs_x, needs_weight, _ = ctx.needs_input_grad  # type: ignore[attr-defined]
        grad, wide, part = operands(grad, x, weight[:, columns])
        grad_x = (grad @ part).to(x.dtype) if needs_x else None
        grad_weight = None
        if needs_weight:
            grad_weight = (grad.T @ wide).to(weight.dtype)
            if x.shape[1] != weight.shape[1]:
                whole = torch.zeros_like(weight)
                whole[:, columns] = grad_weight
                grad_weight = whole
        return grad_x, grad_weight, None


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of any one shape."""
    result: torch.Tensor = _Gated.apply(gate, up)
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, gate: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, torch.nn.functional.silu(gate).mul_(grad)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Llama's norm of rows [N, D]: the mean of squares in fp32, whatever the dtype of the rows."""
    result: torch.Tensor = _RMSNorm.apply(x, weight, eps)
    return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(torch.linalg.vecdot(wide, wide)[:, None] / x.shape[1] + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        needs_x, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        normed = x * scale  # [N, D], as wide as the scale
        grad_weight = (grad * normed).sum(0).to(weight.dtype)
        if not needs_x:
            return None, grad_weight, None
        wide = (grad * weight).to(scale.dtype)
        shared = torch.linalg.vecdot(wide, normed)[:, None] / x.shape[1]
        return wide.sub_(normed.mul_(shared)).mul_(scale).to(x.dtype), grad_weight, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of `x` [N, heads, d] in the half-split layout (Llama's, `is_neox_style` in SGLang).

    `cos` and `sin` [N, 1, d / 2].
    """
    result: torch.Tensor = _Rotate.apply(x, cos, sin)
    return result


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors  # type: ignore[attr-defined]
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    new_low, new_high = result.chunk(2, -1)
    torch.mul(low, cos, out=new_low).addcmul_(high, sin, value=-1)
    torch.mul(high, cos, out=new_high).addcmul_(low, sin)
    return result
