"""The public op: dispatch, the PyTorch custom ops around the fused kernels, and their autograd."""

from typing import Optional, Tuple

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ._ops import add_op_namespace_prefix
from .checks import check_inputs
from .ldsa import (
    INTERPRETED,
    MAX_HEAD_DIM,
    MAX_WINDOW,
    empty_like,
    launch_backward,
    launch_forward,
    triton,
)
from .reference import eager_ldsa

__all__ = ["ldsa_local_attention"]

IMPLEMENTATIONS = ("auto", "triton", "eager")
MAX_DROPOUT = 1 - 2**-15


@torch.library.custom_op(add_op_namespace_prefix("local_attention"), mutates_args=())
def _local_attention(
    a_logits: torch.Tensor,
    v: torch.Tensor,
    lengths: Optional[torch.Tensor],
    starts: Optional[torch.Tensor],
    seed: Optional[torch.Tensor],
    left: int,
    renormalize: bool,
    dropout_p: float,
) -> torch.Tensor:
    return launch_forward(a_logits, v, lengths, starts, seed, left, renormalize, dropout_p)


@_local_attention.register_fake
def _(a_logits, v, lengths, starts, seed, left, renormalize, dropout_p):
    return empty_like(v)


@torch.library.custom_op(add_op_namespace_prefix("local_attention_backward"), mutates_args=())
def _local_attention_backward(
    grad: torch.Tensor,
    a_logits: torch.Tensor,
    v: torch.Tensor,
    lengths: Optional[torch.Tensor],
    starts: Optional[torch.Tensor],
    seed: Optional[torch.Tensor],
    left: int,
    renormalize: bool,
    dropout_p: float,
    need_logits: bool,
    need_v: bool,
) -> Tuple[torch.Tensor, torch.Tensor]:
    grads = launch_backward(
        grad, a_logits, v, lengths, starts, seed, left, renormalize, dropout_p, need_logits, need_v
    )
    # A custom op's schema has no optional result: an empty tensor stands for one not needed.
    return tuple(v.new_empty(0) if g is None else g for g in grads)


@_local_attention_backward.register_fake
def _(grad, a_logits, v, lengths, starts, seed, left, renormalize, dropout_p, need_logits, need_v):
    return (
        empty_like(a_logits) if need_logits else v.new_empty(0),
        empty_like(v) if need_v else v.new_empty(0),
    )


def _setup_context(ctx, inputs, output=None):
    a_logits, v, lengths, starts, seed, *ctx.options = inputs
    ctx.number = None
    if isinstance(seed, int):
        ctx.number, seed = seed, None
    ctx.save_for_backward(a_logits, v, lengths, starts, seed)


def _backward(ctx, grad):
    need_logits, need_v = ctx.needs_input_grad[:2]
    a_logits, v, lengths, starts, seed = ctx.saved_tensors
    if ctx.number is not None:
        seed = torch.tensor([ctx.number], device=v.device)
    grads = _local_attention_backward(
        grad, a_logits, v, lengths, starts, seed, *ctx.options, need_logits, need_v
    )
    grad_logits, grad_v = (g if need else None for g, need in zip(grads, (need_logits, need_v)))
    return (grad_logits, grad_v) + (None,) * 6


def _no_double_backward(ctx, *grads):
    raise RuntimeError(
        "ldsa_local_attention: double backward is not supported by the fused kernel; use "
        "implementation='eager', which supports derivatives of every order"
    )


_local_attention.register_autograd(_backward, setup_context=_setup_context)
_local_attention_backward.register_autograd(_no_double_backward)


def refuse_forward_mode(name, *tensors):
    """Raise where forward-mode derivatives are wanted: a custom op silently leaves them out."""
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise RuntimeError(f"{name}: forward-mode derivatives are not supported")


def _plain(x):
    """Whether nothing but the device works on tensors like x: no tracer, transform or subclass."""
    return (
        type(x) is torch.Tensor
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._has_storage(x)  # a batched tensor has none
        and not x.is_meta
        and not x.is_neg()  # memory that a view of a complex tensor has yet to negate
        and not x._is_zerotensor()
    )


class _LocalAttention(torch.autograd.Function):
    """The custom ops' autograd past the dispatcher, which takes longer than a small kernel."""

    @staticmethod
    def forward(ctx, *inputs):
        _setup_context(ctx, inputs)
        return launch_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        # Gradients are enabled where they are to be differentiated, which only the op can refuse.
        if torch.is_grad_enabled() or not _plain(grad):
            return _backward(ctx, grad)
        *tensors, seed = ctx.saved_tensors
        seed = seed if ctx.number is None else ctx.number
        grads = launch_backward(grad, *tensors, seed, *ctx.options, *ctx.needs_input_grad[:2])
        return (*grads, None, None, None, None, None, None)


def _drawn(device, plain):
    """A call's seed, of the device's generator.

    A number, without a launch, or for a traced call or a CUDA graph, which is to draw a new one in
    every replay, a tensor [1].
    """
    if plain and device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        generator = torch.cuda.default_generators[device.index]
        offset = generator.get_offset()
        generator.set_offset(offset + 4)  # as much as the smallest draw of a kernel takes
        mixed = generator.initial_seed() * 0x9E3779B97F4A7C15 + offset * 0xBF58476D1CE4E5B9
        return mixed & (2**62 - 1) | 2**62  # always so large that Triton takes it for int64
    return torch.randint(2**63 - 1, (1,), device=device)


def _why_not_fused(a_logits, v):
    """Why the fused kernel cannot take these inputs, or None if it can."""
    if triton is None:
        return "Triton is not installed"
    device = v.device.type
    if device == "cpu" and not INTERPRETED:
        return (
            "the tensors are on the CPU and Triton's interpreter is off (it is on where "
            "TRITON_INTERPRET=1 was set before the first import)"
        )
    if device not in ("cpu", "cuda", "xpu", "meta"):
        return f"it does not run on device type {device!r}"
    for name, x in (("a_logits", a_logits), ("v", v)):
        if x.dtype == torch.float64:
            return f"{name} is float64; it takes float32, bfloat16 and float16"
    window, head_dim = a_logits.shape[2], v.shape[2]
    if window > MAX_WINDOW:
        return f"the window has {window} slots; it takes at most {MAX_WINDOW}"
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return f"v has head width {head_dim}; it takes 1 to {MAX_HEAD_DIM}"
    return None


def ldsa_local_attention(
    a_logits,
    v,
    left,
    right,
    *,
    lengths=None,
    starts=None,
    edge="zero",
    dropout_p=0.0,
    implementation="auto",
):
    """Local dense synthesizer attention: softmax over the window, then the weighted sum.

        a[b,h,k,t]   = softmax over k of a_logits[b,h,:,t]
        out[b,h,d,t] = sum_k a[b,h,k,t] * v[b,h,d, t - left + k]

    Any strides are taken as they are, time-last as well as the channel-last memory that a linear
    layer produces (`logits.view(B, T, H, W).permute(0, 2, 3, 1)`). Softmax and accumulation are in
    float32 at least. Deterministic. A NaN or inf at a frame inside the sequence may spread to all
    frames of the blocks of 16 to 64 that read it.

    Args:
        a_logits: [B,H,W,T], floating point; W = left + 1 + right. Slot 0 is the leftmost frame.
        v: [B,H,Dh,T], floating point (it may differ in dtype), on the device of `a_logits`.
        left, right: frames before and after each frame that its window covers.
        lengths, starts: integer [B] or None, on v's device or on the CPU: sequence b is frames
            [starts[b], lengths[b]), clamped to [0, T]. Frames outside are ignored, even NaN;
            their output and gradients are exactly 0.
        edge: what slots outside the sequence do: "zero", they keep their softmax weight and add
            nothing; "renormalize", they are removed before the softmax.
        dropout_p: probability of dropping a weight after the softmax, 0 <= dropout_p < 1; those
            kept are scaled by 1 / (1 - dropout_p). Follows the generator of v's device. In the
            fused kernel at most 1 - 2^-15, so that the scale fits in float16.
        implementation: "auto" (the fused kernel where it can run, else eager), "triton", "eager".
            The fused kernel takes float32, bfloat16 and float16, W <= 255 and Dh <= 256.

    Returns:
        [B,H,Dh,T], dense, with v's dtype and v's memory order.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or value.
        RuntimeError: implementation="triton" and the fused kernel cannot take these inputs; or
            double backward or forward-mode derivatives through the fused kernel.

    Source: Xu, Li, Zhang, ICASSP 2021, arXiv 2010.12155.
    """
    check_inputs(a_logits, v, left, right, lengths, starts, edge, dropout_p)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be 'auto', 'triton' or 'eager', got {implementation!r}"
        )
    reason = "not asked for" if implementation == "eager" else _why_not_fused(a_logits, v)
    if implementation == "triton" and reason is not None:
        raise RuntimeError(
            f"implementation='triton': the fused kernel cannot run because {reason}; use "
            "implementation='auto' or 'eager'"
        )
    if reason is not None or (implementation == "auto" and v.device.type in ("cpu", "meta")):
        return eager_ldsa(
            a_logits,
            v,
            left,
            right,
            lengths=lengths,
            starts=starts,
            edge=edge,
            dropout_p=dropout_p,
        )
    refuse_forward_mode("ldsa_local_attention", a_logits, v)
    if lengths is not None:
        lengths = lengths.to(v.device, non_blocking=True)
    if starts is not None:
        starts = starts.to(v.device, non_blocking=True)
    plain = _plain(v) and _plain(a_logits)
    seed = None
    if dropout_p > 0:
        seed = _drawn(v.device, plain)
        dropout_p = min(dropout_p, MAX_DROPOUT)
    op = _local_attention
    if plain:
        needs_grad = torch.is_grad_enabled() and (a_logits.requires_grad or v.requires_grad)
        op = _LocalAttention.apply if needs_grad else launch_forward
    return op(a_logits, v, lengths, starts, seed, left, edge == "renormalize", float(dropout_p))
