"""LDSA in plain PyTorch: any dtype, any device, derivatives of every order."""

import torch
from torch.nn.functional import dropout, pad

from .checks import check_inputs, check_window

__all__ = ["eager_ldsa", "eager_weights", "ldsa_weights", "memory_order"]


def memory_order(x):
    """Dimensions of `x` from the outermost to the innermost in memory.

    Expanded dimensions (stride 0) have no place in memory; they count as outermost, so that a
    result laid out in this order keeps the real innermost dimension innermost.
    """
    strides = x.stride()
    order = []
    for d in range(x.dim()):  # by insertion: torch.compile cannot sort by symbolic strides
        at = len(order)
        while at > 0 and strides[order[at - 1]] != 0:
            if 0 < strides[d] <= strides[order[at - 1]]:
                break
            at -= 1
        order.insert(at, d)
    return tuple(order)


def frames_inside(lengths, starts, n_frames, device):
    """Bool [B, T]: frame t of sequence b is in [starts[b], lengths[b]); None if all are inside."""
    if lengths is None and starts is None:
        return None
    t = torch.arange(n_frames, device=device)
    inside = None
    if lengths is not None:
        inside = t < lengths.to(device, non_blocking=True)[:, None]
    if starts is not None:
        after = t >= starts.to(device, non_blocking=True)[:, None]
        inside = after if inside is None else inside & after
    return inside


def _slots_inside(inside, left, window, n_frames, device):
    """Bool [B or 1, 1, W, T]: the frame t - left + k that slot k of frame t reads is inside."""
    t = torch.arange(n_frames, device=device)
    s = t + torch.arange(window, device=device)[:, None] - left
    within = (s >= 0) & (s < n_frames)
    if inside is None:
        return within[None, None]
    # An index, not an unfold: an exported graph then puts no guard on T.
    read = inside[:, s.clamp(0, max(n_frames - 1, 0))] if n_frames else within[None]
    return (read & within)[:, None]


def _softmax(x, dim):
    """Softmax in which a row of -inf gives zeros and +inf entries share the weight equally."""
    top = x.detach().amax(dim, keepdim=True)
    share = torch.where(x == torch.inf, 0.0, -torch.inf).to(x.dtype)
    x = torch.where(top == torch.inf, share, x)
    weights = (x - torch.where(top.isinf(), 0.0, top)).exp()
    total = weights.sum(dim, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total)


def eager_weights(logits, left, inside, edge):
    """Softmax over the window of [B,H,W,T] logits already in the compute dtype."""
    window, n_frames = logits.shape[2:]
    if inside is not None:
        logits = torch.where(inside[:, None, None], logits, 0.0)
    if edge == "renormalize":
        slots = _slots_inside(inside, left, window, n_frames, logits.device)
        logits = torch.where(slots, logits, -torch.inf)
    weights = _softmax(logits, 2)
    if inside is not None:
        weights = torch.where(inside[:, None, None], weights, 0.0)
    return weights


def _compute_dtype(*tensors):
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def ldsa_weights(a_logits, left, right, *, lengths=None, starts=None, edge="zero"):
    """Attention weights of local dense synthesizer attention: the softmax over the window.

        a[b,h,k,t] = softmax over k of a_logits[b,h,:,t]

    Args:
        a_logits: [B,H,W,T], floating point, any strides; W = left + 1 + right.
        left, right: frames before and after each frame that its window covers.
        lengths, starts: integer [B] or None; sequence b is frames [starts[b], lengths[b]).
        edge: "zero" (slots outside the sequence keep their weight) or "renormalize" (they get 0
            and the others sum to 1).

    Returns:
        [B,H,W,T] in the dtype of `a_logits`; exactly 0 at frames outside the sequence.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or value.

    Source: Xu, Li, Zhang, ICASSP 2021, arXiv 2010.12155.
    """
    check_window(a_logits, left, right, lengths, starts, edge)
    inside = frames_inside(lengths, starts, a_logits.shape[3], a_logits.device)
    weights = eager_weights(a_logits.to(_compute_dtype(a_logits)), left, inside, edge)
    return weights.to(a_logits.dtype)


def eager_ldsa(a_logits, v, left, right, *, lengths=None, starts=None, edge="zero", dropout_p=0.0):
    """Local dense synthesizer attention in plain PyTorch operations.

        a[b,h,k,t]   = softmax over k of a_logits[b,h,:,t]
        out[b,h,d,t] = sum_k a[b,h,k,t] * v[b,h,d, t - left + k]

    Supports every floating dtype and double backward; runs W multiply-adds over the whole
    value tensor. Arguments, result and errors are those of `ldsa_local_attention`, which see.

    Args:
        a_logits: [B,H,W,T], floating point, any strides; W = left + 1 + right.
        v: [B,H,Dh,T], floating point, any strides, on the device of `a_logits`.
        left, right: frames before and after each frame that its window covers.
        lengths, starts: integer [B] or None; sequence b is frames [starts[b], lengths[b]).
        edge: "zero" or "renormalize", what slots outside the sequence do.
        dropout_p: probability of dropping a weight, 0 <= dropout_p < 1.

    Returns:
        [B,H,Dh,T] with v's dtype and v's memory order; exactly 0 at frames outside the sequence.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or value.

    Source: Xu, Li, Zhang, ICASSP 2021, arXiv 2010.12155.
    """
    check_inputs(a_logits, v, left, right, lengths, starts, edge, dropout_p)
    n_frames = v.shape[3]
    dtype = _compute_dtype(a_logits, v)
    inside = frames_inside(lengths, starts, n_frames, v.device)
    weights = eager_weights(a_logits.to(dtype), left, inside, edge)
    if dropout_p > 0:
        weights = dropout(weights, dropout_p)
    values = v.to(dtype)
    if inside is not None:
        values = torch.where(inside[:, None, None], values, 0.0)

    # Work in v's own memory order, so that no operation transposes and `out` needs no copy.
    order = memory_order(v)
    time, channel = order.index(3), order.index(2)
    weights, values = weights.permute(order), values.permute(order)
    values = pad(values, [0, 0] * (3 - time) + [left, right])
    out = values.narrow(time, 0, n_frames) * weights.narrow(channel, 0, 1)
    for k in range(1, left + 1 + right):
        out = torch.addcmul(out, values.narrow(time, k, n_frames), weights.narrow(channel, k, 1))
    if inside is not None:
        # Weights are 0 there already; this keeps a NaN in grad_output from coming back.
        out = torch.where(inside[:, None, None].permute(order), out, 0.0)
    return out.to(v.dtype).permute([order.index(d) for d in range(4)])
