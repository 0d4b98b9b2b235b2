"""The public delta rule: dispatch, PyTorch custom ops around both chunk forms, their autograd."""

from typing import List, Optional, Tuple

import torch
from torch.nn import functional as F

from ._ops import add_op_namespace_prefix
from .checks import check_delta
from .delta import (
    chunk_delta_backward,
    chunk_delta_forward,
    compute_dtype,
    new_saved_states,
    recurrent_delta_rule,
)
from .delta_chunk import launch_delta_forward, new_saved
from .delta_chunk_bwd import launch_delta_backward
from .delta_tiles import INTERPRETED, triton
from .op import IMPLEMENTATIONS, refuse_forward_mode

__all__ = ["tiled_delta_rule"]

MAX_KEY_DIM = 256
# Channels that load as one vector.
VECTOR = 16
# On a CPU, up to so many frames take less time one by one than as a chunk.
FEW_FRAMES = 8


def _saved(q, k, v, g, beta, bounds, fused):
    if fused:
        return list(new_saved(q, v, g, bounds))
    return [new_saved_states(q, k, v, g, beta, bounds)]


@torch.library.custom_op(add_op_namespace_prefix("delta_rule"), mutates_args=())
def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: Optional[torch.Tensor],
    bounds: Optional[torch.Tensor],
    scale: float,
    save: bool,
    fused: bool,
) -> Tuple[torch.Tensor, torch.Tensor, List[torch.Tensor]]:
    forward = launch_delta_forward if fused else chunk_delta_forward
    out, state, saved = forward(q, k, v, g, beta, initial_state, bounds, scale, save)
    return out, state, list(saved)


@_delta_rule.register_fake
def _(q, k, v, g, beta, initial_state, bounds, scale, save, fused):
    sequences = q.shape[0] if bounds is None else bounds.shape[0]
    dtype = torch.float32 if fused else compute_dtype(q, k, v, g, beta)
    state = v.new_empty(sequences, *q.shape[2:], v.shape[3], dtype=dtype)
    return v.new_empty(v.shape), state, _saved(q, k, v, g, beta, bounds, fused) if save else []


@torch.library.custom_op(add_op_namespace_prefix("delta_rule_backward"), mutates_args=())
def _delta_rule_backward(
    grad_out: torch.Tensor,
    grad_state: Optional[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: Optional[torch.Tensor],
    bounds: Optional[torch.Tensor],
    scale: float,
    saved: List[torch.Tensor],
    fused: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = q, k, v, g, beta, initial_state, bounds, scale
    if not saved:  # the forward pass did not know that this one would follow
        forward = launch_delta_forward if fused else chunk_delta_forward
        saved = forward(*inputs, True)[2]
    backward = launch_delta_backward if fused else chunk_delta_backward
    return backward(grad_out, grad_state, *inputs, tuple(saved))


@_delta_rule_backward.register_fake
def _(grad_out, grad_state, q, k, v, g, beta, initial_state, bounds, scale, saved, fused):
    sequences = q.shape[0] if bounds is None else bounds.shape[0]
    dtype = torch.float32 if fused else compute_dtype(q, k, v, g, beta)
    state = v.new_empty(sequences, *q.shape[2:], v.shape[3], dtype=dtype)
    return (*(x.new_empty(x.shape) for x in (q, k, v, g, beta)), state)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale, _, ctx.fused = inputs
    # Else each backward pass would fill zeros for all that was saved.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2])
    ctx.save_for_backward(*tensors, *output[2])


def _backward(ctx, grad_out, grad_state, _):
    everything = ctx.saved_tensors  # once: checkpointing allows no second look
    tensors, saved = everything[:7], list(everything[7:])
    if grad_out is None:
        grad_out = torch.zeros_like(tensors[2])
    grads = _delta_rule_backward(grad_out, grad_state, *tensors, ctx.scale, saved, ctx.fused)
    grads = [x if need else None for x, need in zip(grads, ctx.needs_input_grad)]
    return (*grads, None, None, None, None)


def _no_double_backward(ctx, *grads):
    raise RuntimeError("tiled_delta_rule: double backward is not supported")


_delta_rule.register_autograd(_backward, setup_context=_setup_context)
_delta_rule_backward.register_autograd(_no_double_backward)


def _missing(channels, tiles):
    """How many channels each of the tiles lacks for rows that load as whole vectors."""
    missing = 0
    while (channels + tiles * missing) % VECTOR:
        missing += 1
    return missing


def _widen(x, dim, tiles):
    """x with channels of zeros in `dim`, as many in each tile as it lacks."""
    missing = _missing(x.shape[dim], tiles)
    if missing == 0:
        return x
    x = x.unflatten(dim, (tiles, -1))
    x = F.pad(x, (0, 0) * (x.dim() - dim - 2) + (0, missing))
    # Padding can keep frames innermost, which is copied sooner or later, and of a graph for any
    # number of frames PyTorch would ask which stride of the flattened tensor is the smallest.
    return x.contiguous().flatten(dim, dim + 1)


def _why_not_fused(q, k, v, g, beta):
    """Why the kernels cannot take these inputs, or None if they can."""
    if triton is None:
        return "Triton is not installed"
    device = q.device.type
    if device == "cpu" and not INTERPRETED:
        return (
            "the tensors are on the CPU and Triton's interpreter is off (it is on where "
            "TRITON_INTERPRET=1 was set before the first import)"
        )
    if device not in ("cpu", "cuda", "xpu", "meta"):
        return f"they do not run on device type {device!r}"
    for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items():
        if x.dtype == torch.float64:
            return f"{name} is float64; they take float32, bfloat16 and float16"
    tiles = g.shape[3]
    wide = q.shape[3] + tiles * _missing(q.shape[3], tiles)
    if wide > MAX_KEY_DIM:
        return (
            f"q has key width {q.shape[3]}, {wide} with its {tiles} tiles padded to multiples of "
            f"{VECTOR} in all; they take at most {MAX_KEY_DIM}"
        )
    return None


def _few_frames(frames):
    """Whether there are few frames; of a graph for any number it is not known."""
    if not torch.compiler.is_compiling():
        return frames <= FEW_FRAMES
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return statically_known_true(frames <= FEW_FRAMES)


def tiled_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    *,
    scale=None,
    initial_state=None,
    output_final_state=False,
    lengths=None,
    cu_seqlens=None,
    implementation="auto",
):
    """Linear attention with a gated delta rule, whose decay is one number for each tile of keys.

        S'  = D_t S_{t-1}                    D_t multiplies tile n's channels by exp(g_t[n])
        S_t = S' + beta_t k_t (v_t - S'^T k_t)^T
        o_t = scale * S_t^T q_t

    Each head has a state S [K,R*P], which the R value heads of a key head share columns of. Linear
    in T in time and memory. Sums are in float32 at least (float64 where a tensor is).
    Deterministic.

    Args:
        q, k: [B,T,H,K], floating point, any strides; k of norm 1 at most, by the caller.
        v: [B,T,H,R*P], the values of R heads of width P packed.
        g: [B,T,H,tiles], log decay <= 0; tiles divides K. The kernels take what is below -20, or
            NaN, for -20, and give it no gradient.
        beta: [B,T,H], write strength in (0,2).
        scale: of the output; K^-0.5 when None.
        initial_state: [N,H,K,R*P], floating point, zeros when None. N is B, or the number of packed
            sequences.
        output_final_state: return the last states too.
        lengths: integer [B] or None, on q's device or on the CPU, clamped to [0, T]: sequence b is
            its first lengths[b] frames. Frames beyond are ignored, even NaN; their output and
            gradients are exactly 0.
        cu_seqlens: integer [N+1] or None, in order, where B = 1: sequence n is frames
            cu_seqlens[n] to cu_seqlens[n+1]. What order breaks is undefined on a GPU.
        implementation: "auto" (the kernels where they can run, else eager), "triton", "eager". The
            kernels take float32, bfloat16 and float16, and K <= 256 after each tile is padded
            alike until K is a multiple of 16; copies of what is not dense or has other widths.

    Returns:
        (out [B,T,H,R*P], dense, in v's dtype; the state after each sequence's last frame,
        [N,H,K,R*P] in float32 (float64 where a tensor is), or None).

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or value.
        RuntimeError: implementation="triton" and the kernels cannot take these inputs; or double
            backward, or forward-mode derivatives of what is not computed frame by frame.

    Source: "Systolic Linear Attention: Co-Designing Tile-Grouped Gated Delta Attention for TPUs"
    (Google), which defines the recurrence; the chunk form is derived in the package's README.md.
    """
    check_delta(q, k, v, g, beta, scale, initial_state, lengths, cu_seqlens)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be 'auto', 'triton' or 'eager', got {implementation!r}"
        )
    reason = "not asked for" if implementation == "eager" else _why_not_fused(q, k, v, g, beta)
    if implementation == "triton" and reason is not None:
        raise RuntimeError(
            f"implementation='triton': the kernels cannot run because {reason}; use "
            "implementation='auto' or 'eager'"
        )
    device = q.device.type
    asked = implementation == "triton" or device not in ("cpu", "meta")
    fused = asked and reason is None and q.shape[1] > 0
    key_dim, value_dim, tiles, dtype = q.shape[3], v.shape[3], g.shape[3], v.dtype
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if initial_state is not None:
        initial_state = initial_state.to(compute_dtype(q, k, v, g, beta))
    bounds = None
    if lengths is not None:
        end = lengths.to(q.device, torch.int64, non_blocking=True)
        bounds = torch.stack([torch.zeros_like(end), end], 1)
    elif cu_seqlens is not None:
        places = cu_seqlens.to(q.device, torch.int64, non_blocking=True)
        bounds = torch.stack([places[:-1], places[1:]], 1)
    if fused:
        same = torch.promote_types(torch.promote_types(q.dtype, k.dtype), dtype)
        q, k, v, g, beta = q.to(same), k.to(same), v.to(same), g.float(), beta.float()
        q, k, v = _widen(q, 3, tiles), _widen(k, 3, tiles), _widen(v, 3, 1)
        if initial_state is not None:
            initial_state = _widen(_widen(initial_state, 3, 1), 2, tiles)
    inputs = q, k, v, g, beta, initial_state, bounds, scale
    if not fused and device != "meta" and cu_seqlens is None and _few_frames(q.shape[1]):
        out, state = recurrent_delta_rule(*inputs)
    else:
        refuse_forward_mode("tiled_delta_rule", *inputs[:6])
        save = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in inputs[:6]
        )
        out, state, _ = _delta_rule(*inputs, save, fused)
        if fused:
            state = state.unflatten(2, (tiles, -1))[:, :, :, : key_dim // tiles].flatten(2, 3)
            out, state = (x[..., :value_dim].contiguous() for x in (out.to(dtype), state))
    return out, state if output_final_state else None
