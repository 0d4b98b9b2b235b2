"""Queries, keys and values from their projection: a short causal convolution, SiLU, unit norm."""

from typing import Tuple

import torch
from torch.nn import functional as F

from ._ops import add_op_namespace_prefix
from .delta_tiles import on_device, runs_fused, triton
from .op import refuse_forward_mode

__all__ = ["depthwise_convolved", "short_convolution"]

# Below it a norm is not one: frames of zeros stay zeros.
EPS = 1e-6

if triton is not None:
    import triton.language as tl

    @triton.jit
    def _place(
        n_frames,
        HEADS: tl.constexpr,
        K: tl.constexpr,
        V: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        """This program's sequence, frames and channels, those of a head's keys or some values."""
        blocks = tl.cdiv(n_frames, BLOCK_T)
        b = (tl.program_id(0) // blocks).to(tl.int64)
        t = (tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
        group = tl.program_id(1)
        of_keys = group < 2 * HEADS
        first = tl.where(of_keys, group * K, 2 * HEADS * K + (group - 2 * HEADS) * BLOCK_C)
        end = tl.where(of_keys, group * K + K, 2 * HEADS * K + V)
        return b, t, group, first + tl.arange(0, BLOCK_C), end

    @triton.jit
    def _activated(
        x_ptr,
        w_ptr,
        t,
        channels,
        end,
        n_frames,
        stride_xt,
        of_keys,
        EPS: tl.constexpr,
        BEFORE: tl.constexpr,
        TAPS: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        """silu(z), of keys over its norm, 1 over that, sigmoid(z) and z, in float32."""
        inside = channels < end
        z = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for j in tl.static_range(TAPS):
            frames = t + (BEFORE + j - (TAPS - 1))
            seen = (frames >= 0) & (t < n_frames)
            x = tl.load(
                x_ptr + frames[:, None].to(tl.int64) * stride_xt + channels[None, :],
                mask=seen[:, None] & inside[None, :],
                other=0.0,
            )
            w = tl.load(w_ptr + channels * TAPS + j, mask=inside, other=0.0)
            z += x.to(tl.float32) * w.to(tl.float32)[None, :]
        s = tl.sigmoid(z)
        y = z * s
        norm = tl.where(of_keys, tl.rsqrt(tl.sum(y * y, 1) + EPS), 1.0)[:, None]
        return y * norm, norm, s, z

    @triton.jit(do_not_specialize=["n_frames"])
    def _short_conv_fwd_kernel(
        x_ptr,
        w_ptr,
        q_ptr,
        k_ptr,
        v_ptr,
        n_frames,
        stride_xb,
        stride_xt,
        HEADS: tl.constexpr,
        K: tl.constexpr,
        V: tl.constexpr,
        BEFORE: tl.constexpr,
        TAPS: tl.constexpr,
        EPS: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        b, t, group, channels, end = _place(n_frames, HEADS, K, V, BLOCK_T, BLOCK_C)
        y, _, _, _ = _activated(
            x_ptr + b * stride_xb, w_ptr, t, channels, end, n_frames, stride_xt,
            group < 2 * HEADS, EPS, BEFORE, TAPS, BLOCK_T, BLOCK_C,
        )  # fmt: skip
        mask = (t < n_frames)[:, None] & (channels < end)[None, :]
        rows = (b * n_frames + t)[:, None]
        if group < HEADS:
            tl.store(q_ptr + rows * (HEADS * K) + channels[None, :], y, mask=mask)
        elif group < 2 * HEADS:
            keys = channels - HEADS * K
            tl.store(k_ptr + rows * (HEADS * K) + keys[None, :], y, mask=mask)
        else:
            values = channels - 2 * HEADS * K
            tl.store(v_ptr + rows * V + values[None, :], y, mask=mask)

    @triton.jit(do_not_specialize=["n_frames"])
    def _short_conv_bwd_kernel(
        x_ptr,
        w_ptr,
        dq_ptr,
        dk_ptr,
        dv_ptr,
        dz_ptr,
        n_frames,
        stride_xb,
        stride_xt,
        HEADS: tl.constexpr,
        K: tl.constexpr,
        V: tl.constexpr,
        BEFORE: tl.constexpr,
        TAPS: tl.constexpr,
        EPS: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        """The gradient of what the convolution returns, dz [B,T,C]."""
        b, t, group, channels, end = _place(n_frames, HEADS, K, V, BLOCK_T, BLOCK_C)
        y, norm, s, z = _activated(
            x_ptr + b * stride_xb, w_ptr, t, channels, end, n_frames, stride_xt,
            group < 2 * HEADS, EPS, BEFORE, TAPS, BLOCK_T, BLOCK_C,
        )  # fmt: skip
        mask = (t < n_frames)[:, None] & (channels < end)[None, :]
        rows = (b * n_frames + t)[:, None]
        if group < HEADS:
            dy = tl.load(dq_ptr + rows * (HEADS * K) + channels[None, :], mask=mask, other=0.0)
        elif group < 2 * HEADS:
            keys = channels - HEADS * K
            dy = tl.load(dk_ptr + rows * (HEADS * K) + keys[None, :], mask=mask, other=0.0)
        else:
            values = channels - 2 * HEADS * K
            dy = tl.load(dv_ptr + rows * V + values[None, :], mask=mask, other=0.0)
        dy = dy.to(tl.float32)
        # What changes the length alone is lost in the norm.
        dy -= y * tl.where(group < 2 * HEADS, tl.sum(y * dy, 1), 0.0)[:, None]
        dz = dy * norm * s * (1 + z * (1 - s))
        tl.store(dz_ptr + rows * (2 * HEADS * K + V) + channels[None, :], dz, mask=mask)

    @triton.jit(do_not_specialize=["n_frames"])
    def _short_conv_bwd_inputs_kernel(
        x_ptr,
        w_ptr,
        dz_ptr,
        dx_ptr,
        dw_ptr,
        n_frames,
        stride_xb,
        stride_xt,
        C: tl.constexpr,
        BEFORE: tl.constexpr,
        TAPS: tl.constexpr,
        STEPS: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):
        """dx [B,BEFORE+T,C], and each program's share of dw [programs,TAPS,C]."""
        n_inputs = n_frames + BEFORE
        blocks = tl.cdiv(n_inputs, STEPS * BLOCK_T)
        b = (tl.program_id(0) // blocks).to(tl.int64)
        t0 = (tl.program_id(0) % blocks) * STEPS * BLOCK_T
        channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = channels < C
        # Summed over frames at the end, across threads once.
        shares = ()
        weights = ()
        for j in tl.static_range(TAPS):
            shares = shares + (tl.zeros([BLOCK_T, BLOCK_C], tl.float32),)
            w = tl.load(w_ptr + channels * TAPS + j, mask=inside, other=0.0)
            weights = weights + (w.to(tl.float32)[None, :],)
        for step in tl.static_range(STEPS):
            i = t0 + step * BLOCK_T + tl.arange(0, BLOCK_T)
            mask = (i < n_inputs)[:, None] & inside[None, :]
            x = tl.load(
                x_ptr + b * stride_xb + i[:, None].to(tl.int64) * stride_xt + channels[None, :],
                mask=mask,
                other=0.0,
            ).to(tl.float32)
            dx = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
            more = ()
            for j in tl.static_range(TAPS):
                t = i + (TAPS - 1 - j - BEFORE)  # the frame that sees input i through tap j
                there = (t >= 0) & (t < n_frames)
                dz = tl.load(
                    dz_ptr + (b * n_frames + t)[:, None] * C + channels[None, :],
                    mask=there[:, None] & inside[None, :],
                    other=0.0,
                ).to(tl.float32)
                dx += dz * weights[j]
                more = more + (shares[j] + x * dz,)
            shares = more
            rows = (b * n_inputs + i)[:, None]
            tl.store(dx_ptr + rows * C + channels[None, :], dx, mask=mask)
        for j in tl.static_range(TAPS):
            at = (tl.program_id(0).to(tl.int64) * TAPS + j) * C + channels
            tl.store(dw_ptr + at, tl.sum(shares[j], 0), mask=inside)


def _grid(x, n_heads, key_dim, before):
    """What both directions of the activation are launched with."""
    keys, block_c = n_heads * key_dim, max(16, triton.next_power_of_2(key_dim))
    values = x.shape[2] - 2 * keys
    block_t = max(1, 2048 // block_c)
    frames = x.shape[1] - before
    grid = x.shape[0] * triton.cdiv(frames, block_t), 2 * n_heads + triton.cdiv(values, block_c)
    sizes = {"HEADS": n_heads, "K": key_dim, "V": values, "BEFORE": before, "EPS": EPS}
    return grid, frames, {**sizes, "BLOCK_T": block_t, "BLOCK_C": block_c, "num_warps": 4}


def _outputs(x, n_heads, key_dim, before):
    batch, frames, value_dim = x.shape[0], x.shape[1] - before, x.shape[2] // n_heads - 2 * key_dim
    return tuple(x.new_empty(batch, frames, n_heads, n) for n in (key_dim, key_dim, value_dim))


@torch.library.custom_op(add_op_namespace_prefix("short_convolution"), mutates_args=())
def _short_convolution(
    x: torch.Tensor, weight: torch.Tensor, n_heads: int, key_dim: int, before: int
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs = _outputs(x, n_heads, key_dim, before)
    if outputs[0].numel():
        x, weight = x if x.stride(2) == 1 else x.contiguous(), weight.contiguous()
        grid, frames, options = _grid(x, n_heads, key_dim, before)
        with on_device(x):
            _short_conv_fwd_kernel[grid](
                x, weight, *outputs, frames, x.stride(0), x.stride(1),
                TAPS=weight.shape[2], **options,
            )  # fmt: skip
    return outputs


@_short_convolution.register_fake
def _(x, weight, n_heads, key_dim, before):
    return _outputs(x, n_heads, key_dim, before)


@torch.library.custom_op(add_op_namespace_prefix("short_convolution_backward"), mutates_args=())
def _short_convolution_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    n_heads: int,
    key_dim: int,
    before: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    channels, _, taps = weight.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dq.numel() == 0:
        return dx.zero_(), torch.zeros(weight.shape, dtype=weight.dtype, device=x.device)
    x, dense = x if x.stride(2) == 1 else x.contiguous(), weight.contiguous()
    grid, frames, options = _grid(x, n_heads, key_dim, before)
    dz = x.new_empty(x.shape[0], frames, channels)
    steps, block_t, block_c = max(1, 32 // taps), 8, min(128, triton.next_power_of_2(channels))
    programs = x.shape[0] * triton.cdiv(frames + before, steps * block_t)
    dw = torch.empty(programs, taps, channels, dtype=torch.float32, device=x.device)
    with on_device(x):
        _short_conv_bwd_kernel[grid](
            x, dense, dq.contiguous(), dk.contiguous(), dv.contiguous(), dz, frames,
            x.stride(0), x.stride(1), TAPS=taps, **options,
        )  # fmt: skip
        _short_conv_bwd_inputs_kernel[programs, triton.cdiv(channels, block_c)](
            x, dense, dz, dx, dw, frames, x.stride(0), x.stride(1), C=channels, BEFORE=before,
            TAPS=taps, STEPS=steps, BLOCK_T=block_t, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
    return dx, dw.sum(0).t().to(weight.dtype).contiguous().view(weight.shape)


@_short_convolution_backward.register_fake
def _(dq, dk, dv, x, weight, n_heads, key_dim, before):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx, inputs, output):
    x, weight, *ctx.sizes = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, *grads):
    grads = _short_convolution_backward(*grads, *ctx.saved_tensors, *ctx.sizes)
    return (*(x if need else None for x, need in zip(grads, ctx.needs_input_grad)), *[None] * 3)


def _no_double_backward(ctx, *grads):
    raise RuntimeError("short_convolution: double backward is not supported")


_short_convolution.register_autograd(_backward, setup_context=_setup_context)
_short_convolution_backward.register_autograd(_no_double_backward)


def depthwise_convolved(x, weight, bias=None):
    """A depthwise convolution over the frames of x [B,T,C] with weight [C,1,J]: [B,T-J+1,C]."""
    if x.device.type != "cpu":
        return F.conv1d(x.mT, weight, bias, groups=len(weight)).mT
    # In two dimensions its strides are channels-last ones, which are much faster here.
    return F.conv2d(x.mT[:, :, None], weight[:, :, None], bias, groups=len(weight))[:, :, 0].mT


def _unit(x):
    """x over its norm along the last dimension; 0 stays 0."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


def short_convolution(x, weight, n_heads, key_dim, before, *, implementation="auto"):
    """Queries, keys and values of each head, of x through a causal convolution and SiLU.

        z_t = sum_j weight[:,0,j] x[before + t - (J-1) + j];  q, k, v = silu(z_t)
        q and k over their norms

    Args:
        x: [B,before+T,C], those of all heads side by side: H*K queries, H*K keys, the values.
        weight: [C,1,J].
        n_heads, key_dim: H and K.
        before: frames of x that come before the first of T, of J-1 at most; what comes before
            them is 0.
        implementation: "auto" (the kernels on a GPU, else eager), "triton", "eager".

    Returns:
        q and k [B,T,H,K], v [B,T,H,(C-2*H*K)/H], in x's dtype.
    """
    if runs_fused(x, implementation):
        refuse_forward_mode("short_convolution", x, weight)
        return _short_convolution(x, weight, n_heads, key_dim, before)
    if missing := weight.shape[2] - 1 - before:
        x = F.pad(x, (0, 0, missing, 0))
    x = F.silu(depthwise_convolved(x, weight))
    keys = n_heads * key_dim
    q, k, v = (
        y.unflatten(2, (n_heads, -1)) for y in x.split([keys, keys, x.shape[2] - 2 * keys], 2)
    )
    return _unit(q), _unit(k), v
