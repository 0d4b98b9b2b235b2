"""The root-mean-square norm of each head's output, times a sigmoid gate."""

from typing import Tuple

import torch
from torch.nn import functional as F

from ._ops import add_op_namespace_prefix
from .delta_tiles import on_device, runs_fused, triton
from .op import refuse_forward_mode

__all__ = ["gated_norm"]

# Programs of a backward pass, which share the rows: so many shares of the weight's gradient.
SHARES = 1024

if triton is not None:
    import triton.language as tl

    @triton.jit
    def _rows(
        x_ptr,
        gate_ptr,
        w_ptr,
        block,
        n_rows,
        eps,
        P: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_P: tl.constexpr,
    ):
        """Offsets and mask of a block of rows; its normed rows, their factors, gate and weight."""
        row = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        channel = tl.arange(0, BLOCK_P)
        at = row[:, None] * P + channel[None, :]
        mask = (row < n_rows)[:, None] & (channel < P)[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.sigmoid(tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32))
        w = tl.load(w_ptr + channel, mask=channel < P, other=0.0).to(tl.float32)[None, :]
        norm = tl.rsqrt(tl.sum(x * x, 1) / P + eps)[:, None]
        return at, mask, x * norm, norm, gate, w

    @triton.jit(do_not_specialize=["n_rows"])
    def _gated_norm_fwd_kernel(
        x_ptr,
        gate_ptr,
        w_ptr,
        out_ptr,
        n_rows,
        eps,
        P: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_P: tl.constexpr,
    ):
        at, mask, y, _, gate, w = _rows(
            x_ptr, gate_ptr, w_ptr, tl.program_id(0), n_rows, eps, P, BLOCK_M, BLOCK_P
        )
        tl.store(out_ptr + at, y * w * gate, mask=mask)

    @triton.jit(do_not_specialize=["n_rows"])
    def _gated_norm_bwd_kernel(
        grad_ptr,
        x_ptr,
        gate_ptr,
        w_ptr,
        dx_ptr,
        dgate_ptr,
        dw_ptr,
        n_rows,
        eps,
        P: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_P: tl.constexpr,
    ):
        dw = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
        for block in range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
            at, mask, y, norm, gate, w = _rows(
                x_ptr, gate_ptr, w_ptr, block, n_rows, eps, P, BLOCK_M, BLOCK_P
            )
            grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(dgate_ptr + at, grad * y * w * gate * (1 - gate), mask=mask)
            grad *= gate
            dw += grad * y
            grad *= w
            dx = norm * (grad - y * (tl.sum(grad * y, 1) / P)[:, None])
            tl.store(dx_ptr + at, dx, mask=mask)
        channel = tl.arange(0, BLOCK_P)
        tl.store(dw_ptr + tl.program_id(0) * P + channel, tl.sum(dw, 0), mask=channel < P)


def _blocks(weight):
    block_p = triton.next_power_of_2(weight.shape[0])
    block_m = max(1, 2048 // block_p)
    return {"P": weight.shape[0], "BLOCK_M": block_m, "BLOCK_P": block_p, "num_warps": 4}


@torch.library.custom_op(add_op_namespace_prefix("gated_norm"), mutates_args=())
def _gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    out = torch.empty(gate.shape, dtype=x.dtype, device=x.device)
    rows, options = x.numel() // weight.shape[0], _blocks(weight)
    if rows:
        with on_device(x):
            _gated_norm_fwd_kernel[(triton.cdiv(rows, options["BLOCK_M"]),)](
                x.contiguous(), gate.contiguous(), weight.contiguous(), out, rows, eps, **options
            )
    return out


@_gated_norm.register_fake
def _(x, gate, weight, eps):
    return x.new_empty(gate.shape)


@torch.library.custom_op(add_op_namespace_prefix("gated_norm_backward"), mutates_args=())
def _gated_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dgate = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (x, gate))
    rows, options = x.numel() // weight.shape[0], _blocks(weight)
    programs = min(SHARES, triton.cdiv(rows, options["BLOCK_M"]))
    dw = torch.empty(programs, weight.shape[0], dtype=torch.float32, device=x.device)
    if rows:
        with on_device(x):
            _gated_norm_bwd_kernel[(programs,)](
                grad.contiguous(), x.contiguous(), gate.contiguous(), weight.contiguous(),
                dx, dgate, dw, rows, eps, **options,
            )  # fmt: skip
    return dx, dgate, dw.sum(0).to(weight.dtype)


@_gated_norm_backward.register_fake
def _(grad, x, gate, weight, eps):
    return tuple(y.new_empty(y.shape) for y in (x, gate, weight))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    grads = _gated_norm_backward(grad, *ctx.saved_tensors, ctx.eps)
    return (*(x if need else None for x, need in zip(grads, ctx.needs_input_grad)), None)


def _no_double_backward(ctx, *grads):
    raise RuntimeError("gated_norm: double backward is not supported")


_gated_norm.register_autograd(_backward, setup_context=_setup_context)
_gated_norm_backward.register_autograd(_no_double_backward)


def gated_norm(x, gate, weight, eps, *, implementation="auto"):
    """Norm each head's values by their root mean square, then gate them.

        out = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate)

    Args:
        x: [B,T,H,R*P], values of R heads of width P.
        gate: [B,T,H*R*P].
        weight: [P].
        eps: below the root.
        implementation: "auto" (the kernels on a GPU, else eager), "triton", "eager".

    Returns:
        [B,T,H*R*P] in x's dtype.
    """
    if runs_fused(x, implementation):
        refuse_forward_mode("gated_norm", x, gate, weight)
        return _gated_norm(x, gate, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    heads = x.to(wide).unflatten(3, (-1, len(weight)))
    heads = F.rms_norm(heads, weight.shape, weight.to(wide), eps)
    return (heads.flatten(2) * gate.to(wide).sigmoid()).to(x.dtype)
