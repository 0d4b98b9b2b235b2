"""LDSA in plain PyTorch: any dtype, any device, derivatives of every order."""

import torch
from torch.nn.functional import dropout, pad

from .checks import check_inputs, check_window

__all__ = ["eager_ldsa", "eager_ldsa_at", "eager_weights", "ldsa_weights", "memory_order"]


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
    top = x.amax(dim, keepdim=True)
    # The top itself is set, not subtracted: inf - inf is no number.
    weights = (x - top).masked_fill_(x == top, 0.0).exp_()
    total = weights.sum(dim, keepdim=True)
    weights /= torch.where(top == -torch.inf, torch.inf, total)
    return weights


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim):
        weights = _softmax(x, dim).detach()  # see below
        ctx.dim = dim
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, grad):
        (weights,) = ctx.saved_tensors
        product = weights * grad
        return product - weights * product.sum(ctx.dim, keepdim=True), None


# The weighted sum over the window and its two derivatives. Each of the three is linear in both of
# its inputs, and has the other two as derivatives, which gives derivatives of every order. They are
# functions of their own because they add up in place, where autograd would keep every term. Their
# results are detached because torch.compile of PyTorch 2.11 drops the gradient of a result that was
# last changed in place.


def _window_sum(weights, values, channel, time):
    """out[t] = sum_k weights[k, t] values[t + k]; values have W - 1 frames more than weights."""
    window, n_frames = weights.shape[channel], weights.shape[time]
    out = values.narrow(time, 0, n_frames) * weights.narrow(channel, 0, 1)
    for k in range(1, window):
        out.addcmul_(values.narrow(time, k, n_frames), weights.narrow(channel, k, 1))
    return out


class _WindowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, values, channel, time):
        ctx.dims = channel, time
        ctx.save_for_backward(weights, values)
        return _window_sum(weights, values, channel, time).detach()

    @staticmethod
    def backward(ctx, grad):
        weights, values = ctx.saved_tensors
        need_weights, need_values = ctx.needs_input_grad[:2]
        return (
            _WindowDot.apply(grad, values, *ctx.dims) if need_weights else None,
            _WindowSpread.apply(weights, grad, *ctx.dims) if need_values else None,
            None,
            None,
        )


class _WindowDot(torch.autograd.Function):
    """weights[k, t] = x[t] . values[t + k]."""

    @staticmethod
    def forward(ctx, x, values, channel, time):
        ctx.dims = channel, time
        ctx.save_for_backward(x, values)
        n_frames = x.shape[time]
        window = values.shape[time] - n_frames + 1
        product = x.new_empty(x.shape)  # one for all: a fresh one costs more than to fill it
        terms = []
        for k in range(window):
            torch.mul(x, values.narrow(time, k, n_frames), out=product)
            terms.append(product.sum(channel))
        return torch.stack(terms, channel)

    @staticmethod
    def backward(ctx, grad):
        x, values = ctx.saved_tensors
        need_x, need_values = ctx.needs_input_grad[:2]
        return (
            _WindowSum.apply(grad, values, *ctx.dims) if need_x else None,
            _WindowSpread.apply(grad, x, *ctx.dims) if need_values else None,
            None,
            None,
        )


class _WindowSpread(torch.autograd.Function):
    """values[s] = sum_k weights[k, s - k] x[s - k]."""

    @staticmethod
    def forward(ctx, weights, x, channel, time):
        ctx.dims = channel, time
        ctx.save_for_backward(weights, x)
        window, n_frames = weights.shape[channel], weights.shape[time]
        around = [0, 0] * (x.dim() - 1 - time) + [window - 1, window - 1]
        weights, x = pad(weights, around), pad(x, around)
        out = 0.0
        for k in range(window):
            at = time, window - 1 - k, n_frames + window - 1
            term = x.narrow(*at), weights.narrow(channel, k, 1).narrow(*at)
            out = term[0] * term[1] if k == 0 else out.addcmul_(*term)
        return out.detach()

    @staticmethod
    def backward(ctx, grad):
        weights, x = ctx.saved_tensors
        need_weights, need_x = ctx.needs_input_grad[:2]
        return (
            _WindowDot.apply(x, grad, *ctx.dims) if need_weights else None,
            _WindowSum.apply(weights, grad, *ctx.dims) if need_x else None,
            None,
            None,
        )


def _need_gradient(*tensors):
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _padded_window_sum(weights, values, left, channel, time):
    """out[t] = sum_k weights[k, t] values[t - left + k], values beyond either end being 0."""
    window, n_frames = weights.shape[channel], weights.shape[time]
    if _need_gradient(weights, values) or torch.compiler.is_compiling():
        around = [0, 0] * (values.dim() - 1 - time) + [left, window - 1 - left]
        return _functions(weights, values)[1](weights, pad(values, around), channel, time)
    # The same sums without a padded copy, which would be half of the memory that this takes.
    out = values.new_zeros(values.shape)
    for k in range(window):
        first, last = max(0, left - k), min(n_frames, n_frames + left - k)
        if first < last:
            at = time, first, last - first
            source = values.narrow(time, first - left + k, last - first)
            out.narrow(*at).addcmul_(source, weights.narrow(channel, k, 1).narrow(*at))
    return out


def _functions(*tensors):
    """Softmax and window sum: of autograd's functions where these tensors need a gradient.

    Else plain ones, which take fewer calls and which torch.export (not every release traces
    autograd's with open shapes) and TorchScript can keep.
    """
    # Under torch.compile, some releases say that they export.
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    if _need_gradient(*tensors) and not exporting:
        return _Softmax.apply, _WindowSum.apply
    return _softmax, _window_sum


def eager_weights(logits, left, inside, edge):
    """Softmax over the window of [B,H,W,T] logits already in the compute dtype."""
    window, n_frames = logits.shape[2:]
    if inside is not None:
        logits = torch.where(inside[:, None, None], logits, 0.0)
    if edge == "renormalize":
        slots = _slots_inside(inside, left, window, n_frames, logits.device)
        logits = torch.where(slots, logits, -torch.inf)
    weights = _functions(logits)[0](logits, 2)
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
    out = _padded_window_sum(weights, values, left, channel, time)
    if inside is not None:
        # Weights are 0 there already; this keeps a NaN in grad_output from coming back.
        out = torch.where(inside[:, None, None].permute(order), out, 0.0)
    return out.to(v.dtype).permute([order.index(d) for d in range(4)])


# Up to this many products all at once, in two operations, take less time than 2 W small ones.
_FEW_PRODUCTS = 1 << 16


def eager_ldsa_at(a_logits, v, left, right, first, *, ends=None, starts=None, edge="zero"):
    """`eager_ldsa` at some frames of a buffer, whose windows all lie in the buffer.

    Args:
        a_logits: [B,H,W,N], of the buffer's frames from `first` on; nothing is checked.
        v: [B,H,Dh,T], the buffer, channel-last; left <= first <= T - N - right.
        left, right, edge: as in `eager_ldsa`.
        ends, starts: int64 [B] or None, in the buffer; frames from ends[b] on are outside.

    Returns:
        [B,H,Dh,N] in v's dtype, exactly 0 at frames outside.
    """
    window, n_frames = a_logits.shape[2:]
    dtype = _compute_dtype(a_logits, v)
    inside = frames_inside(ends, starts, v.shape[3], v.device)
    values, logits, rows = v.permute(0, 3, 1, 2).to(dtype), a_logits.to(dtype), None
    if inside is not None:
        values = torch.where(inside[:, :, None, None], values, 0.0)
        rows = inside.narrow(1, first, n_frames)[:, None, None]
        logits = torch.where(rows, logits, 0.0)
        if edge == "renormalize":
            slots = _slots_inside(inside, left, window, v.shape[3], v.device)
            logits = torch.where(slots.narrow(3, first, n_frames), logits, -torch.inf)
    softmax, window_sum = _functions(a_logits, v)
    weights = softmax(logits, 2).permute(0, 3, 1, 2)
    values = values.narrow(1, first - left, n_frames + window - 1)
    if not torch.compiler.is_compiling() and weights.numel() * v.shape[2] <= _FEW_PRODUCTS:
        windows = values.unfold(1, window, 1).transpose(3, 4)  # [B,N,H,W,Dh]
        out = (windows * weights.unsqueeze(4)).sum(3)
    else:
        out = window_sum(weights, values, 3, 1)
    out = out.permute(0, 2, 3, 1)
    return (out if rows is None else torch.where(rows, out, 0.0)).to(v.dtype)
