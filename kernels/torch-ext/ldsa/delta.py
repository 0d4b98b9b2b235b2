"""The tiled delta rule in plain PyTorch: step by step, and in chunks with a backward pass by hand.

README.md has the derivation. Nothing is checked here: delta_op.py does that.
"""

import functools
from typing import NamedTuple

import torch
from torch.nn.functional import pad

__all__ = [
    "chunk_delta_backward",
    "chunk_delta_forward",
    "compute_dtype",
    "new_saved_states",
    "recurrent_delta_rule",
]

CHUNK = 64
# Chunks worked on at once: what lies between the products is this many chunks long, however long
# the sequence.
SEGMENT = 16
# exp of this is 0 in every dtype, and sums of 64 such gates are finite.
NO_MEMORY = -1000.0


def compute_dtype(*tensors):
    """float64 where any tensor is float64, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def _without_autocast(function):
    """The sums of a state are in the compute dtype, under autocast too."""

    @functools.wraps(function)
    def wrapped(q, *args):
        if not torch.is_autocast_enabled(q.device.type):
            return function(q, *args)
        with torch.autocast(q.device.type, enabled=False):
            return function(q, *args)

    return wrapped


def _inside(bounds, frames, device):
    """Bool [B,T,1,1]: frame t is in [first, end) of its row."""
    first, end = bounds.unbind(1)
    t = torch.arange(frames, device=device)
    return ((t >= first[:, None]) & (t < end[:, None]))[:, :, None, None]


@_without_autocast
def recurrent_delta_rule(q, k, v, g, beta, initial_state, bounds, scale):
    """The delta rule as it is defined, one frame after the other; derivatives of every order.

        S_t = D_t S_{t-1} + beta_t k_t (v_t - (D_t S_{t-1})^T k_t)^T
        o_t = scale * S_t^T q_t

    Args:
        q, k: [B,T,H,K].
        v: [B,T,H,V].
        g: [B,T,H,tiles]; D_t multiplies each tile of K / tiles channels by exp(g).
        beta: [B,T,H].
        initial_state: [B,H,K,V] or None for zeros.
        bounds: int64 [B,2], first frame and end of each sequence, or None for all of T.
        scale: of the output.

    Returns:
        (out [B,T,H,V] in v's dtype, 0 at frames of no sequence; the last state [B,H,K,V] in the
        compute dtype).
    """
    dtype, out_dtype = compute_dtype(q, k, v, g, beta), v.dtype
    (batch, frames, heads, key_dim), tiles = q.shape, g.shape[3]
    if bounds is not None:
        # Zeros everywhere make a frame that changes nothing.
        inside = _inside(bounds, frames, q.device)
        q, k, v, g = (torch.where(inside, x, 0.0) for x in (q, k, v, g))
        beta = torch.where(inside[..., 0], beta, 0.0)
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    q = scale * q
    if initial_state is None:
        state = v.new_zeros(batch, heads, key_dim, v.shape[3])
    else:
        state = initial_state.to(dtype)
    decay = g.exp()[..., None].expand(-1, -1, -1, -1, key_dim // tiles).flatten(3)
    write = beta[..., None] * k
    # k and q read the decayed state in one product: S_t^T q = S'^T q + (beta k . q) e.
    agreement = (write * q).sum(3, keepdim=True)
    readers = torch.stack([k, q], 3)
    out = []
    for t in range(frames):
        state = state * decay[:, t, :, :, None]
        expected, read = torch.matmul(readers[:, t], state).unbind(2)
        error = v[:, t] - expected
        state = torch.addcmul(state, write[:, t, :, :, None], error[:, :, None])
        out.append(torch.addcmul(read, agreement[:, t], error))
    if not frames:
        return v.to(out_dtype), state.clone()
    out = torch.stack(out, 1)
    if bounds is not None:  # a NaN in the gradient of what lies outside must not come back
        out = torch.where(inside, out, 0.0)
    return out.to(out_dtype), state


class _Chunks:
    """How the frames of [B,T,H,D] tensors stand in chunks: [M,B*H,C,D], M of C frames each.

    A padded batch is cut at multiples of C. Packed sequences start a chunk each, which takes no
    more than T // C + N chunks for N of them, a bound that needs no look at the bounds' values; the
    chunks left over are of a sequence N that has no frame.
    """

    def __init__(self, like, bounds):
        self.batch, self.frames, self.heads = like.shape[:3]
        self.sequences = self.batch if bounds is None else len(bounds)
        self.packed = self.sequences != self.batch
        size = CHUNK if self.packed else 16
        while size < min(self.frames, CHUNK):
            size *= 2
        self.size = size
        self.count = -(-self.frames // size)
        self.inside = self.starts = self.ends = None
        if bounds is None:
            return
        if not self.packed:
            self.inside = _inside(bounds, self.frames, like.device)
            return
        first, end = bounds.clamp(0, self.frames).unbind(1)
        self.count = self.frames // size + self.sequences
        length = (end - first).clamp(min=0)
        chunks = (length + size - 1) // size
        last = chunks.cumsum(0)
        m = torch.arange(self.count, device=like.device)
        self.row = torch.searchsorted(last, m, right=True)
        change = self.row[1:] != self.row[:-1]
        self.starts = pad(change, (1, 0), value=True)
        self.ends = pad(change, (0, 1), value=True)
        first, length, before = (pad(x, (0, 1)) for x in (first, length, last - chunks))
        place = (m - before[self.row])[:, None] * size + torch.arange(size, device=like.device)
        frame = first[self.row][:, None] + place
        # A slot without a frame reads zeros, and writes to one frame past the end.
        self.source = torch.where(place < length[self.row][:, None], frame, self.frames).flatten()

    def segments(self):
        """(first chunk, end) of each segment."""
        return [(m, min(m + SEGMENT, self.count)) for m in range(0, self.count, SEGMENT)]

    def take(self, x, first, end, dtype):
        """Chunks [first, end) of x [B,T,H,D], zeros where there is no frame."""
        frames = slice(first * self.size, end * self.size)
        if self.packed:
            source = self.source[frames]
            x = pad(x[0], (0, 0, 0, 0, 0, 1)) if self.frames == 0 else x[0]
            x = x.index_select(0, source.clamp(max=len(x) - 1))
            x = torch.where((source < self.frames)[:, None, None], x, 0.0)[None]
        else:
            x = x[:, frames]
            if self.inside is not None:
                x = torch.where(self.inside[:, frames], x, 0.0)
            missing = (end - first) * self.size - x.shape[1]
            if missing:
                x = pad(x, (0, 0, 0, 0, 0, missing))
        x = x.to(dtype).unflatten(1, (end - first, self.size)).permute(1, 0, 3, 2, 4)
        return x.reshape(end - first, self.batch * self.heads, self.size, x.shape[4])

    def empty(self, shape, like):
        """What `put` fills and `whole` returns, for a result of this shape [B,T,H,D]."""
        if self.packed:
            return like.new_zeros(1, self.frames + 1, *shape[2:])
        return like.new_empty(shape)

    def put(self, out, x, first, end):
        """Write chunks x [end-first,B*H,C,D] to their frames, 0 to frames of no sequence."""
        frames = slice(first * self.size, end * self.size)
        x = x.unflatten(1, (self.batch, self.heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)
        if self.packed:
            out[0].index_copy_(0, self.source[frames], x[0].to(out.dtype))
            return
        out = out[:, frames]
        x = x[:, : out.shape[1]]
        out.copy_(x if self.inside is None else torch.where(self.inside[:, frames], x, 0.0))

    def whole(self, out):
        """A filled result [B,T,H,D]."""
        return out[0, : self.frames][None] if self.packed else out

    def states(self, given, like, key_dim, value_dim):
        """States [N,H,K,V], or zeros for None, as [rows,H,K,V] in like's dtype, a copy."""
        rows = self.sequences + self.packed
        states = like.new_zeros(rows, self.heads, key_dim, value_dim)
        if given is not None:
            states[: self.sequences].copy_(given)
        return states

    def enter(self, state, table, at, m):
        """The state to go on with in chunk m: its sequence's of the table where at[m]."""
        if not self.packed:
            return state
        return torch.where(at[m], table.index_select(0, self.row[m : m + 1])[0], state)

    def leave(self, state, table, m):
        """Note in the table what chunk m ends with; the last note of a sequence stays."""
        if self.packed:
            table.index_copy_(0, self.row[m : m + 1], state[None])


class _Segment(NamedTuple):
    """What the frames of chunks [M,B*H] have to do with each other, and nothing with the state."""

    q: torch.Tensor  # [M,BH,C,K], scaled
    k: torch.Tensor  # [M,BH,C,K]
    v: torch.Tensor  # [M,BH,C,V]
    beta: torch.Tensor  # [M,BH,C,1]
    gates: torch.Tensor  # [M,BH,C,tiles], their sums from the chunk's first frame, float64
    to_start: torch.Tensor  # [M,BH,C,K], decay from the chunk's start to a frame
    to_end: torch.Tensor  # [M,BH,C,K], decay from a frame to the chunk's end
    whole: torch.Tensor  # [M,BH,K,1], decay over the chunk
    p: torch.Tensor  # [M,BH,C,C], decayed products of keys, strictly lower
    a: torch.Tensor  # [M,BH,C,C], decayed products of queries and keys, lower
    inverse: torch.Tensor  # [M,BH,C,C], (I + diag(beta) p)^-1
    t: torch.Tensor  # inverse diag(beta)
    q_start: torch.Tensor  # q to_start
    k_start: torch.Tensor  # k to_start
    k_end: torch.Tensor  # k to_end
    w: torch.Tensor  # t k_start


def _inverse(lower):
    """(I + lower)^-1 of strictly lower triangular [...,C,C], C a power of two, by doubling.

    The inverse of two neighbouring blocks of the diagonal follows from theirs by two products:
    exact after log2 C rounds, and as stable as substitution.
    """
    *lead, size, _ = lower.shape
    inverse = torch.eye(size, dtype=lower.dtype, device=lower.device).repeat(*lead, 1, 1)
    half = 1
    while half < size:
        shape = size // (2 * half), 2, half
        # The blocks of the diagonal, each of two by two: [..., blocks, 2, half, 2, half].
        given, found = (
            x.view(*lead, *shape, *shape).diagonal(dim1=-6, dim2=-3).movedim(-1, -5)
            for x in (lower, inverse)
        )
        upper, below = found[..., 0, :, 0, :], found[..., 1, :, 1, :]
        found[..., 1, :, 0, :] = -(below @ given[..., 1, :, 0, :] @ upper)
        half *= 2
    return inverse


def _tiles(gates, key_dim):
    """[(tile, its channels)] of a segment."""
    width = key_dim // gates.shape[-1]
    return [(n, slice(n * width, (n + 1) * width)) for n in range(gates.shape[-1])]


def _between(gates, tile, dtype):
    """Decay [M,BH,C,C] from frame j to frame i >= j in one tile, else 1."""
    sums = gates[..., tile]
    size = sums.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=gates.device).triu(1)
    # Masked before exp, so that no factor is above 1; 0 and not -inf, on which exp is slow.
    difference = (sums[..., :, None] - sums[..., None, :]).masked_fill_(later, 0.0)
    return difference.to(dtype).exp_()


def _spread(x, key_dim):
    """[...,tiles] -> [...,K]: every channel has its tile's value."""
    return x[..., None].expand(*x.shape, key_dim // x.shape[-1]).flatten(-2)


def _per_tile(x, tiles):
    """[...,K] -> [...,tiles]: sums over each tile's channels."""
    return x.unflatten(-1, (tiles, -1)).sum(-1)


def _segment(chunks, first, end, q, k, v, g, beta, scale, dtype):
    q, k, v, beta, g = (chunks.take(x, first, end, dtype) for x in (q, k, v, beta[..., None], g))
    q = scale * q
    key_dim = k.shape[3]
    # A sum of strong gates has no digits left for the weak ones after it in float32.
    wide = torch.float32 if g.device.type == "mps" else torch.float64
    gates = g.clamp(min=NO_MEMORY).cumsum(2, dtype=wide)
    p = a = 0.0
    for tile, channels in _tiles(gates, key_dim):
        decay, keys = _between(gates, tile, dtype), k[..., channels]
        p = p + decay * (keys @ keys.mT)
        a = a + decay * (q[..., channels] @ keys.mT)
    p, a = p.tril(-1), a.tril()
    inverse = _inverse(beta * p)
    t = inverse * beta.mT
    to_start = _spread(gates.to(dtype).exp(), key_dim)
    to_end = _spread((gates[:, :, -1:] - gates).to(dtype).exp(), key_dim)
    k_start = k * to_start
    return _Segment(
        q=q,
        k=k,
        v=v,
        beta=beta,
        gates=gates,
        to_start=to_start,
        to_end=to_end,
        whole=to_start[:, :, -1, :, None],
        p=p,
        a=a,
        inverse=inverse,
        t=t,
        q_start=q * to_start,
        k_start=k_start,
        k_end=k * to_end,
        w=t @ k_start,
    )


def _scan(s, chunks, first, state, table):
    """Read a segment, from chunk `first` on, and carry the state through it.

    Args:
        s: the segment.
        state: [B*H,K,V], the one before it.
        table: what packed sequences start with; it gets what they end with.

    Returns:
        (out [M,BH,C,V], the state after the last chunk).
    """
    size, writes, readers = s.k.shape[2], s.t @ s.v, torch.cat([s.w, s.q_start], 2)
    out = torch.empty_like(writes)
    for m in range(len(out)):
        state = chunks.enter(state, table, chunks.starts, first + m)
        seen = torch.bmm(readers[m], state)
        writes[m] -= seen[:, :size]
        torch.baddbmm(seen[:, size:], s.a[m], writes[m], out=out[m])
        state = (s.whole[m] * state).baddbmm_(s.k_end[m].mT, writes[m])
        chunks.leave(state, table, first + m)
    return out, state


def _scan_again(s, chunks, first, state, table):
    """What `_scan` wrote [M,BH,C,V], and the states before each chunk [M,BH,K,V]."""
    writes = s.t @ s.v
    states = writes.new_empty(len(writes), *state.shape)
    for m in range(len(writes)):
        states[m] = state = chunks.enter(state, table, chunks.starts, first + m)
        writes[m].baddbmm_(s.w[m], state, alpha=-1)
        state = (s.whole[m] * state).baddbmm_(s.k_end[m].mT, writes[m])
    return writes, states


def new_saved_states(q, k, v, g, beta, bounds):
    """Room for the states before each segment, [segments,B*H,K,V] as one dimension.

    One, because a graph for any number of frames must not ask whether there is one segment.
    """
    batch, frames, heads, key_dim = q.shape
    sequences = batch if bounds is None else bounds.shape[0]
    chunks = -(-frames // CHUNK) if sequences == batch else frames // CHUNK + sequences
    count = -(-chunks // SEGMENT) * batch * heads * key_dim * v.shape[3]
    return q.new_empty(count, dtype=compute_dtype(q, k, v, g, beta))


@_without_autocast
def chunk_delta_forward(q, k, v, g, beta, initial_state, bounds, scale, save):
    """The delta rule in chunks, where only the state goes from one to the next.

    Args:
        q, k, v, g, beta, scale: as in `recurrent_delta_rule`.
        initial_state: [N,H,K,V] or None for zeros.
        bounds: int64 [N,2], first frame and end of each sequence: of row n for N = B, else all in
            the one row, in order. None: N = B whole rows.
        save: whether a backward pass follows.

    Returns:
        (out [B,T,H,V] in v's dtype, 0 at frames of no sequence; the last states [N,H,K,V] in the
        compute dtype; a tuple of tensors for `chunk_delta_backward`).
    """
    dtype, chunks = compute_dtype(q, k, v, g, beta), _Chunks(q, bounds)
    table = chunks.states(initial_state, v.new_empty(0, dtype=dtype), q.shape[3], v.shape[3])
    out, state = chunks.empty(v.shape, v), table[: chunks.batch].flatten(0, 1)
    saved = (new_saved_states(q, k, v, g, beta, bounds),) if save else ()
    segments = chunks.segments()
    for i, (first, end) in enumerate(segments):
        s = _segment(chunks, first, end, q, k, v, g, beta, scale, dtype)
        if save:
            saved[0].view(len(segments), *state.shape)[i] = state
        part, state = _scan(s, chunks, first, state, table)
        chunks.put(out, part, first, end)
    if not chunks.packed:
        table = state.unflatten(0, (chunks.batch, chunks.heads))
    return chunks.whole(out), table[: chunks.sequences], saved


@_without_autocast
def chunk_delta_backward(
    grad_out, grad_final_state, q, k, v, g, beta, initial_state, bounds, scale, saved
):
    """Gradients of `chunk_delta_forward`, segment by segment from the last.

    Args:
        grad_out: [B,T,H,V], ignored at frames of no sequence.
        grad_final_state: [N,H,K,V] or None for zeros.
        q, k, v, g, beta, initial_state, bounds, scale: what that was given.
        saved: what it returned.

    Returns:
        Gradients of q, k, v, g, beta and initial_state, each in its tensor's dtype (that of the
        states in the compute dtype).
    """
    dtype, chunks = compute_dtype(q, k, v, g, beta), _Chunks(q, bounds)
    key_dim, like, tiles = q.shape[3], v.new_empty(0, dtype=dtype), g.shape[3]
    table = chunks.states(initial_state, like, key_dim, v.shape[3])
    grad_table = chunks.states(grad_final_state, like, key_dim, v.shape[3])
    grads = [chunks.empty(x.shape, x) for x in (q, k, v, g)]
    grads.append(chunks.empty((*beta.shape, 1), beta))
    grad_state = grad_table[: chunks.batch].flatten(0, 1)
    segments = chunks.segments()
    states_before = saved[0].view(len(segments), *grad_state.shape)
    for i, (first, end) in reversed(list(enumerate(segments))):
        s = _segment(chunks, first, end, q, k, v, g, beta, scale, dtype)
        writes, states = _scan_again(s, chunks, first, states_before[i], table)
        d_out = chunks.take(grad_out, first, end, dtype)

        d_writes, d_states = s.a.mT @ d_out, torch.empty_like(states)
        readers = torch.cat([s.q_start, -s.w], 2)
        for m in reversed(range(len(writes))):
            grad_state = chunks.enter(grad_state, grad_table, chunks.ends, first + m)
            d_states[m] = grad_state
            d_writes[m].baddbmm_(s.k_end[m], grad_state)
            readings = torch.cat([d_out[m], d_writes[m]], 1)
            grad_state = torch.baddbmm(s.whole[m] * grad_state, readers[m].mT, readings)
            chunks.leave(grad_state, grad_table, first + m)

        d_a = (d_out @ writes.mT).tril()
        d_q_start, d_k_end, d_w = d_out @ states.mT, writes @ d_states.mT, -d_writes @ states.mT
        d_t = d_writes @ s.v.mT + d_w @ s.k_start.mT
        d_v, d_k_start = s.t.mT @ d_writes, s.t.mT @ d_w
        d_lower = -(s.inverse.mT @ (d_t * s.beta.mT) @ s.inverse.mT).tril(-1)
        d_beta = (d_t * s.inverse).sum(-2) + (d_lower * s.p).sum(-1)
        d_p = d_lower * s.beta

        d_q, d_k = d_q_start * s.to_start, d_k_start * s.to_start + d_k_end * s.to_end
        # Of the summed gates. Each pair of frames adds to the later one's what it takes from the
        # earlier one's, which is what the rows and columns of the products give.
        d_gates = _per_tile(d_q_start * s.q_start + d_k_start * s.k_start, tiles)
        at_end = _per_tile(d_k_end * s.k_end, tiles)
        d_gates -= at_end
        over_chunk = (d_states * states).sum(-1) * s.whole[..., 0]
        d_gates[:, :, -1] += at_end.sum(2) + _per_tile(over_chunk, tiles)
        for tile, channels in _tiles(s.gates, key_dim):
            decay, queries, keys = (
                _between(s.gates, tile, dtype),
                s.q[..., channels],
                s.k[..., channels],
            )
            d_x, d_y = decay * d_p, decay * d_a
            q_row, k_row = d_y @ keys, d_x @ keys
            k_column = d_x.mT @ keys + d_y.mT @ queries
            d_q[..., channels] += q_row
            d_k[..., channels] += k_row + k_column
            d_gates[..., tile] += (queries * q_row + keys * (k_row - k_column)).sum(-1)
        d_g = d_gates.flip(2).cumsum(2).flip(2)
        d_g = torch.where(chunks.take(g, first, end, dtype) < NO_MEMORY, 0.0, d_g)
        for grad, x in zip(grads, (scale * d_q, d_k, d_v, d_g, d_beta[..., None])):
            chunks.put(grad, x, first, end)
    if not chunks.packed:
        grad_table = grad_state.unflatten(0, (chunks.batch, chunks.heads))
    grads = [chunks.whole(grad) for grad in grads]
    grads[4] = grads[4][..., 0]
    return (*grads, grad_table[: chunks.sequences])
