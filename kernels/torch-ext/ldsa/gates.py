"""A delta rule's decay and write strength from their projections."""

from typing import Tuple

import torch
from torch.nn import functional as F

from ._ops import add_op_namespace_prefix
from .delta_tiles import on_device, runs_fused, triton
from .op import refuse_forward_mode

__all__ = ["delta_gates"]

# What the kernels of the rule take for all that is below.
LEAST_GATE = -20.0
# Programs of a backward pass, which share the rows: so many shares of the parameters' gradients.
SHARES = 256

if triton is not None:
    import triton.language as tl

    @triton.jit
    def _softplus(z):
        """log(1 + exp(z)), to the last digits where that is small."""
        u = tl.exp(-tl.abs(z))
        more = 1.0 + u
        log = tl.where(more == 1.0, u, tl.log(more) * (u / tl.where(more == 1.0, 1.0, more - 1.0)))
        return tl.maximum(z, 0.0) + log

    @triton.jit
    def _block(
        block, stride, n_rows, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
    ):
        """Where a block of rows of an input and of a dense output is, its mask, its columns."""
        row = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        column = tl.arange(0, BLOCK_N)
        mask = (row < n_rows)[:, None] & (column < WIDTH)[None, :]
        at = row[:, None] * stride + column[None, :]
        return at, row[:, None] * WIDTH + column[None, :], mask, column

    @triton.jit
    def _decay(decay_ptr, rate_ptr, bias_ptr, at, mask, column, WIDTH: tl.constexpr):
        """The decay before it is clamped, and what its softplus is of."""
        rate = tl.load(rate_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        z = tl.load(decay_ptr + at, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
        return -tl.exp(rate)[None, :] * _softplus(z), z, rate

    @triton.jit(do_not_specialize=["n_rows"])
    def _gates_fwd_kernel(
        decay_ptr,
        write_ptr,
        rate_ptr,
        bias_ptr,
        g_ptr,
        beta_ptr,
        n_rows,
        stride_decay,
        stride_write,
        LEAST: tl.constexpr,
        G: tl.constexpr,
        H: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_G: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ):
        block = tl.program_id(0)
        at, dense, mask, column = _block(block, stride_decay, n_rows, G, BLOCK_M, BLOCK_G)
        g, _, _ = _decay(decay_ptr, rate_ptr, bias_ptr, at, mask, column, G)
        # Not a maximum, of which a NaN would be lost.
        tl.store(g_ptr + dense, tl.where(g < LEAST, LEAST, g), mask=mask)
        at, dense, mask, _ = _block(block, stride_write, n_rows, H, BLOCK_M, BLOCK_H)
        write = tl.load(write_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(beta_ptr + dense, 2 * tl.sigmoid(write), mask=mask)

    @triton.jit(do_not_specialize=["n_rows"])
    def _gates_bwd_kernel(
        dg_ptr,
        dbeta_ptr,
        decay_ptr,
        write_ptr,
        rate_ptr,
        bias_ptr,
        d_decay_ptr,
        d_write_ptr,
        d_rate_ptr,
        d_bias_ptr,
        n_rows,
        stride_decay,
        stride_write,
        LEAST: tl.constexpr,
        G: tl.constexpr,
        H: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_G: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ):
        d_rate = tl.zeros([BLOCK_M, BLOCK_G], tl.float32)
        d_bias = tl.zeros([BLOCK_M, BLOCK_G], tl.float32)
        for block in range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
            at, dense, mask, column = _block(block, stride_decay, n_rows, G, BLOCK_M, BLOCK_G)
            g, z, rate = _decay(decay_ptr, rate_ptr, bias_ptr, at, mask, column, G)
            dg = tl.load(dg_ptr + dense, mask=mask, other=0.0).to(tl.float32)
            # Not times 0: a decay that is clamped may have overflowed to -inf.
            clamped = g < LEAST
            dg = tl.where(clamped, 0.0, dg)
            d_decay = -tl.exp(rate)[None, :] * tl.sigmoid(z) * dg
            tl.store(d_decay_ptr + dense, d_decay, mask=mask)
            d_rate += tl.where(clamped | ~mask, 0.0, g * dg)
            d_bias += d_decay
            at, dense, mask, _ = _block(block, stride_write, n_rows, H, BLOCK_M, BLOCK_H)
            s = tl.sigmoid(tl.load(write_ptr + at, mask=mask, other=0.0).to(tl.float32))
            d_beta = tl.load(dbeta_ptr + dense, mask=mask, other=0.0).to(tl.float32)
            tl.store(d_write_ptr + dense, 2 * d_beta * s * (1 - s), mask=mask)
        column = tl.arange(0, BLOCK_G)
        at = tl.program_id(0) * G + column
        tl.store(d_rate_ptr + at, tl.sum(d_rate, 0), mask=column < G)
        tl.store(d_bias_ptr + at, tl.sum(d_bias, 0), mask=column < G)


def _rows(decay, write):
    """The projections as rows, and what both directions are launched with."""
    heads, tiles = decay.shape[2:]
    decay, write = decay.reshape(-1, heads * tiles), write.reshape(-1, heads)
    decay, write = (x if x.stride(1) == 1 else x.contiguous() for x in (decay, write))
    block_g = triton.next_power_of_2(heads * tiles)
    options = {"LEAST": LEAST_GATE, "G": heads * tiles, "H": heads, "num_warps": 4}
    options.update(BLOCK_M=max(1, min(256, 4096 // block_g)), BLOCK_G=block_g)
    return decay, write, {**options, "BLOCK_H": triton.next_power_of_2(heads)}


@torch.library.custom_op(add_op_namespace_prefix("delta_gates"), mutates_args=())
def _delta_gates(
    decay: torch.Tensor, write: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    g, beta = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (decay, write))
    if g.numel():
        decay, write, options = _rows(decay, write)
        with on_device(decay):
            _gates_fwd_kernel[(triton.cdiv(len(decay), options["BLOCK_M"]),)](
                decay, write, rate.contiguous(), bias.contiguous(), g, beta, len(decay),
                decay.stride(0), write.stride(0), **options,
            )  # fmt: skip
    return g, beta


@_delta_gates.register_fake
def _(decay, write, rate, bias):
    return tuple(x.new_empty(x.shape, dtype=torch.float32) for x in (decay, write))


@torch.library.custom_op(add_op_namespace_prefix("delta_gates_backward"), mutates_args=())
def _delta_gates_backward(
    dg: torch.Tensor,
    dbeta: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (decay, write))
    rows, writes, options = _rows(decay, write)
    programs = min(SHARES, triton.cdiv(len(rows), options["BLOCK_M"]))
    d_rate, d_bias = (
        torch.empty(programs, x.numel(), dtype=torch.float32, device=x.device) for x in (rate, bias)
    )
    if len(rows):
        with on_device(decay):
            _gates_bwd_kernel[(programs,)](
                dg.contiguous(), dbeta.contiguous(), rows, writes, rate.contiguous(),
                bias.contiguous(), *grads, d_rate, d_bias, len(rows), rows.stride(0),
                writes.stride(0), **options,
            )  # fmt: skip
    return *grads, *(
        shares.sum(0).to(x.dtype).view(x.shape) for shares, x in ((d_rate, rate), (d_bias, bias))
    )


@_delta_gates_backward.register_fake
def _(dg, dbeta, decay, write, rate, bias):
    return tuple(x.new_empty(x.shape) for x in (decay, write, rate, bias))


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dg, dbeta):
    grads = _delta_gates_backward(dg, dbeta, *ctx.saved_tensors)
    return tuple(x if need else None for x, need in zip(grads, ctx.needs_input_grad))


def _no_double_backward(ctx, *grads):
    raise RuntimeError("delta_gates: double backward is not supported")


_delta_gates.register_autograd(_backward, setup_context=_setup_context)
_delta_gates_backward.register_autograd(_no_double_backward)


def delta_gates(decay, write, rate, bias, *, implementation="auto"):
    """Log decay and write strength of each frame.

        g = max(-exp(rate) softplus(decay + bias), -20);  beta = 2 sigmoid(write)

    Args:
        decay: [B,T,H,tiles].
        write: [B,T,H].
        rate, bias: [H,tiles].
        implementation: "auto" (the kernels on a GPU, else eager), "triton", "eager".

    Returns:
        g [B,T,H,tiles] and beta [B,T,H], in float32 (float64 of float64).
    """
    if runs_fused(decay, implementation):
        refuse_forward_mode("delta_gates", decay, write, rate, bias)
        return _delta_gates(decay, write, rate, bias)
    wide = torch.promote_types(decay.dtype, torch.float32)
    g = -rate.to(wide).exp() * F.softplus(decay.to(wide) + bias.to(wide))
    return g.clamp(min=LEAST_GATE), 2 * write.to(wide).sigmoid()
