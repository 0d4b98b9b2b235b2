"""Tile-grouped gated delta rule in chunks of 64 frames: the forward kernels and their launcher.

Two launches: everything inside a chunk that does not need the state (products of keys, the inverse
of the triangular system), for all chunks at once; then a scan that carries the state from chunk to
chunk and writes the output. A few frames take one launch of the recurrence instead. README.md has
the derivation; delta_chunk_bwd.py has the backward pass.
"""

import torch

from .delta_tiles import (
    CHANNELS,
    CHUNK,
    VARYING,
    common,
    in_vectors,
    on_device,
    operand_dtype,
    scan_tiles,
    sizes,
    triton,
)

__all__ = ["launch_delta_forward", "new_saved"]

# Up to so many frames the recurrence, one frame after the other, is faster than two launches.
STEP_FRAMES = 4


if triton is not None:
    import triton.language as tl

    from .delta_tiles import (
        LOG2E,
        MIN_GATE,
        block_gates,
        chunk_at,
        decay_between,
        halves,
        load_block,
        load_rows,
        load_state,
        load_tile,
        precise_dot,
        read_state,
        sequence,
        store_state,
        store_tile,
        write_state,
    )

    @triton.jit
    def _join_blocks(inverse, lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
        """Inverse of I + lower on diagonal blocks of 2 SIZE, given that on blocks of SIZE.

        Unlike a power series this stays exact to rounding for keys that resemble each other.
        """
        i = tl.arange(0, 64)
        below = (i[:, None] // (2 * SIZE) == i[None, :] // (2 * SIZE)) & (
            i[:, None] // SIZE > i[None, :] // SIZE
        )
        link = tl.where(below, lower, 0.0)
        if SIZE > 1:
            link = tl.dot(inverse, link, input_precision=PRECISION)
            link = tl.dot(link, inverse, input_precision=PRECISION)
        return inverse - link

    @triton.jit(do_not_specialize=VARYING)
    def _delta_intra_fwd_kernel(
        q_ptr,
        k_ptr,
        g_ptr,
        beta_ptr,
        bounds_ptr,
        gates_ptr,
        a_ptr,
        a_low_ptr,
        inverse_ptr,
        inverse_low_ptr,
        adjoint_ptr,
        adjoint_low_ptr,
        n_seqs,
        n_heads,
        n_frames,
        n_slots,
        stride_qb,
        stride_qt,
        stride_qh,
        stride_qk,
        stride_kb,
        stride_kt,
        stride_kh,
        stride_kk,
        stride_gb,
        stride_gt,
        stride_gh,
        stride_gn,
        stride_bb,
        stride_bt,
        stride_bh,
        scale,
        K: tl.constexpr,
        TILES: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK_W: tl.constexpr,
        PACKED: tl.constexpr,
        DTYPE: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """A = scale sum E Y and (I + P diag(beta))^-1, P = strict_lower(sum E X), sums over tiles.

        X = K K^T and Y = Q K^T per tile. One program owns one chunk of one head. Reads q and k
        [64, K], g [64, tiles], beta [64]; writes the gate sums G (as powers of two) [tiles, 64], A
        and the inverse [64, 64] and, where adjoint_ptr is given, M = (I + diag(beta) P)^-1 for the
        backward pass. The inverses are in two halves (see precise_dot) where these have 16 bits.
        """
        pid = tl.program_id(0)
        h = pid % n_heads
        slot = (pid // n_heads) % n_slots
        row = pid // n_heads // n_slots
        t0, end = chunk_at(bounds_ptr, row, slot, n_seqs, n_frames, PACKED)
        rows = end - t0
        if rows <= 0:
            return
        b = row.to(tl.int64)
        t = t0.to(tl.int64)
        head = h.to(tl.int64)
        q_ptr += b * stride_qb + t * stride_qt + head * stride_qh
        k_ptr += b * stride_kb + t * stride_kt + head * stride_kh
        g_ptr += b * stride_gb + t * stride_gt + head * stride_gh
        beta_ptr += b * stride_bb + t * stride_bt + head * stride_bh
        at = pid.to(tl.int64)
        gates_ptr += at * (TILES * 64)
        i = tl.arange(0, 64)
        EVEN: tl.constexpr = WIDTH % BLOCK_W == 0
        BLOCKS: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W

        p = tl.zeros([64, 64], tl.float32)
        a = tl.zeros([64, 64], tl.float32)
        for tile in range(TILES):
            gate = load_rows(g_ptr + tile * stride_gn, stride_gt, rows)
            gate = tl.cumsum(tl.maximum(gate, MIN_GATE) * LOG2E, 0)
            tl.store(gates_ptr + tile * 64 + i, gate)
            x = tl.zeros([64, 64], tl.float32)
            y = tl.zeros([64, 64], tl.float32)
            for block in tl.static_range(BLOCKS):
                c0 = tl.cast(tile * WIDTH + block * BLOCK_W, tl.int64)
                cols = None if EVEN else WIDTH - block * BLOCK_W
                keys = load_tile(
                    k_ptr + c0 * stride_kk,
                    stride_kt,
                    stride_kk,
                    rows,
                    cols,
                    64,
                    BLOCK_W,
                    DTYPE,
                )
                queries = load_tile(
                    q_ptr + c0 * stride_qk,
                    stride_qt,
                    stride_qk,
                    rows,
                    cols,
                    64,
                    BLOCK_W,
                    DTYPE,
                )
                x = tl.dot(keys, tl.trans(keys), x, input_precision=PRECISION)
                y = tl.dot(queries, tl.trans(keys), y, input_precision=PRECISION)
            decay = decay_between(gate, gate, True)
            p += decay * x
            a += decay * y
        high, low = halves(a * scale, DTYPE)
        store_tile(a_ptr + at * 4096, high, 64, 1, None, None, 64, 64)
        if DTYPE.primitive_bitwidth < 32:
            store_tile(a_low_ptr + at * 4096, low, 64, 1, None, None, 64, 64)
        p = tl.where(i[:, None] > i[None, :], p, 0.0)
        beta = load_rows(beta_ptr, stride_bt, rows)
        lower = p * beta[None, :]
        eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        inverse = _join_blocks(eye, lower, 1, PRECISION)
        inverse = _join_blocks(inverse, lower, 2, PRECISION)
        inverse = _join_blocks(inverse, lower, 4, PRECISION)
        inverse = _join_blocks(inverse, lower, 8, PRECISION)
        inverse = _join_blocks(inverse, lower, 16, PRECISION)
        inverse = _join_blocks(inverse, lower, 32, PRECISION)
        high, low = halves(inverse, DTYPE)
        store_tile(inverse_ptr + at * 4096, high, 64, 1, None, None, 64, 64)
        if DTYPE.primitive_bitwidth < 32:
            store_tile(inverse_low_ptr + at * 4096, low, 64, 1, None, None, 64, 64)
        if adjoint_ptr is not None:
            adjoint = eye - beta[:, None] * tl.dot(inverse, p, input_precision=PRECISION)
            high, low = halves(adjoint, DTYPE)
            store_tile(adjoint_ptr + at * 4096, high, 64, 1, None, None, 64, 64)
            if DTYPE.primitive_bitwidth < 32:
                store_tile(adjoint_low_ptr + at * 4096, low, 64, 1, None, None, 64, 64)

    @triton.jit(do_not_specialize=VARYING)
    def _delta_scan_fwd_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        beta_ptr,
        out_ptr,
        initial_ptr,
        final_ptr,
        bounds_ptr,
        gates_ptr,
        a_ptr,
        a_low_ptr,
        inverse_ptr,
        inverse_low_ptr,
        errors_ptr,
        states_ptr,
        n_heads,
        n_frames,
        n_slots,
        stride_qb,
        stride_qt,
        stride_qh,
        stride_qk,
        stride_kb,
        stride_kt,
        stride_kh,
        stride_kk,
        stride_vb,
        stride_vt,
        stride_vh,
        stride_vv,
        stride_bb,
        stride_bt,
        stride_bh,
        stride_ob,
        stride_ot,
        stride_oh,
        scale,
        K: tl.constexpr,
        V: tl.constexpr,
        TILES: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_V: tl.constexpr,
        SAVE: tl.constexpr,
        PACKED: tl.constexpr,
        DTYPE: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """E = (I + P diag(beta))^-1 (v - Kd S), Vh = beta E; out = Qg S + A Vh; then
        S <- e^(G_C) S + Kg^T Vh; chunk after chunk.

        One program owns BLOCK_V value channels of one head of one sequence and keeps their state
        [K, BLOCK_V] in registers, in up to four blocks of key channels. Reads q and k [64, K], A
        and the inverse [64, 64], v [64, BLOCK_V] of every chunk; writes out [64, BLOCK_V], the
        final state and, for the backward pass, the errors E and the state before each chunk.
        """
        BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
        NB: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        ONE: tl.constexpr = WIDTH % BLOCK_K == 0 or WIDTH == K
        pid = tl.program_id(0)
        v0 = (pid % BLOCKS_V) * BLOCK_V
        h = (pid // BLOCKS_V) % n_heads
        n = pid // BLOCKS_V // n_heads
        row, slot, first, end = sequence(bounds_ptr, n, n_frames, PACKED)
        b = row.to(tl.int64)
        t = first.to(tl.int64)
        head = h.to(tl.int64)
        q_ptr += b * stride_qb + t * stride_qt + head * stride_qh
        k_ptr += b * stride_kb + t * stride_kt + head * stride_kh
        v_ptr += b * stride_vb + t * stride_vt + head * stride_vh + v0.to(tl.int64) * stride_vv
        beta_ptr += b * stride_bb + t * stride_bt + head * stride_bh
        out_ptr += b * stride_ob + t * stride_ot + head * stride_oh + v0
        which = (n.to(tl.int64) * n_heads + h) * (K * V)
        cols = None if V % BLOCK_V == 0 else V - v0
        if initial_ptr is not None:
            initial_ptr += which
        final_ptr += which
        s0 = load_state(initial_ptr, v0, 0, K, V, BLOCK_K, BLOCK_V)
        if NB > 1:
            s1 = load_state(initial_ptr, v0, 1, K, V, BLOCK_K, BLOCK_V)
        if NB > 2:
            s2 = load_state(initial_ptr, v0, 2, K, V, BLOCK_K, BLOCK_V)
        if NB > 3:
            s3 = load_state(initial_ptr, v0, 3, K, V, BLOCK_K, BLOCK_V)
        at = (b * n_slots + slot) * n_heads + h
        for t0 in range(0, end - first, 64):
            rows = end - first - t0
            gates = gates_ptr + at * (TILES * 64)
            states = states_ptr
            if SAVE:
                states += at * (K * V)
            old = tl.zeros([64, BLOCK_V], tl.float32)
            out = tl.zeros([64, BLOCK_V], tl.float32)

            k0 = load_block(k_ptr, stride_kt, stride_kk, rows, 0, K, BLOCK_K, DTYPE)
            q0 = load_block(q_ptr, stride_qt, stride_qk, rows, 0, K, BLOCK_K, DTYPE)
            forget0, remain0, left0 = block_gates(gates, 0, K, WIDTH, BLOCK_K, ONE)
            s = s0.to(DTYPE)
            old = read_state(old, k0, s, forget0, ONE, DTYPE, PRECISION)
            out = read_state(out, q0, s, forget0, ONE, DTYPE, PRECISION)
            if SAVE:
                store_state(states, s, v0, 0, K, V, BLOCK_K, BLOCK_V)
            if NB > 1:
                k1 = load_block(k_ptr, stride_kt, stride_kk, rows, 1, K, BLOCK_K, DTYPE)
                q1 = load_block(q_ptr, stride_qt, stride_qk, rows, 1, K, BLOCK_K, DTYPE)
                forget1, remain1, left1 = block_gates(gates, 1, K, WIDTH, BLOCK_K, ONE)
                s = s1.to(DTYPE)
                old = read_state(old, k1, s, forget1, ONE, DTYPE, PRECISION)
                out = read_state(out, q1, s, forget1, ONE, DTYPE, PRECISION)
                if SAVE:
                    store_state(states, s, v0, 1, K, V, BLOCK_K, BLOCK_V)
            if NB > 2:
                k2 = load_block(k_ptr, stride_kt, stride_kk, rows, 2, K, BLOCK_K, DTYPE)
                q2 = load_block(q_ptr, stride_qt, stride_qk, rows, 2, K, BLOCK_K, DTYPE)
                forget2, remain2, left2 = block_gates(gates, 2, K, WIDTH, BLOCK_K, ONE)
                s = s2.to(DTYPE)
                old = read_state(old, k2, s, forget2, ONE, DTYPE, PRECISION)
                out = read_state(out, q2, s, forget2, ONE, DTYPE, PRECISION)
                if SAVE:
                    store_state(states, s, v0, 2, K, V, BLOCK_K, BLOCK_V)
            if NB > 3:
                k3 = load_block(k_ptr, stride_kt, stride_kk, rows, 3, K, BLOCK_K, DTYPE)
                q3 = load_block(q_ptr, stride_qt, stride_qk, rows, 3, K, BLOCK_K, DTYPE)
                forget3, remain3, left3 = block_gates(gates, 3, K, WIDTH, BLOCK_K, ONE)
                s = s3.to(DTYPE)
                old = read_state(old, k3, s, forget3, ONE, DTYPE, PRECISION)
                out = read_state(out, q3, s, forget3, ONE, DTYPE, PRECISION)
                if SAVE:
                    store_state(states, s, v0, 3, K, V, BLOCK_K, BLOCK_V)

            v = load_tile(v_ptr, stride_vt, stride_vv, rows, cols, 64, BLOCK_V, DTYPE)
            beta = load_rows(beta_ptr, stride_bt, rows)
            rest = v.to(tl.float32) - old
            errors = precise_dot(
                tl.zeros([64, BLOCK_V], tl.float32), inverse_ptr + at * 4096,
                inverse_low_ptr + at * 4096, rest, False, DTYPE, PRECISION,
            )  # fmt: skip
            if SAVE:
                store_tile(errors_ptr + at * (64 * V) + v0, errors, V, 1, None, cols, 64, BLOCK_V)
            values = errors * beta[:, None]
            s0 = write_state(s0 * left0, k0, values, remain0, ONE, True, DTYPE, PRECISION)
            if NB > 1:
                s1 = write_state(s1 * left1, k1, values, remain1, ONE, True, DTYPE, PRECISION)
            if NB > 2:
                s2 = write_state(s2 * left2, k2, values, remain2, ONE, True, DTYPE, PRECISION)
            if NB > 3:
                s3 = write_state(s3 * left3, k3, values, remain3, ONE, True, DTYPE, PRECISION)
            out = precise_dot(
                out * scale, a_ptr + at * 4096, a_low_ptr + at * 4096, values, False, DTYPE,
                PRECISION,
            )  # fmt: skip
            store_tile(out_ptr, out, stride_ot, 1, rows, cols, 64, BLOCK_V)
            q_ptr += 64 * stride_qt
            k_ptr += 64 * stride_kt
            v_ptr += 64 * stride_vt
            beta_ptr += 64 * stride_bt
            out_ptr += 64 * stride_ot
            at += n_heads
        store_state(final_ptr, s0, v0, 0, K, V, BLOCK_K, BLOCK_V)
        if NB > 1:
            store_state(final_ptr, s1, v0, 1, K, V, BLOCK_K, BLOCK_V)
        if NB > 2:
            store_state(final_ptr, s2, v0, 2, K, V, BLOCK_K, BLOCK_V)
        if NB > 3:
            store_state(final_ptr, s3, v0, 3, K, V, BLOCK_K, BLOCK_V)

    @triton.jit(do_not_specialize=VARYING)
    def _delta_step_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        g_ptr,
        beta_ptr,
        out_ptr,
        initial_ptr,
        final_ptr,
        bounds_ptr,
        n_heads,
        n_frames,
        stride_qb,
        stride_qt,
        stride_qh,
        stride_qk,
        stride_kb,
        stride_kt,
        stride_kh,
        stride_kk,
        stride_vb,
        stride_vt,
        stride_vh,
        stride_vv,
        stride_gb,
        stride_gt,
        stride_gh,
        stride_gn,
        stride_bb,
        stride_bt,
        stride_bh,
        stride_ob,
        stride_ot,
        stride_oh,
        scale,
        K: tl.constexpr,
        V: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_V: tl.constexpr,
        PACKED: tl.constexpr,
    ):
        """S <- e^g S; S <- S + beta k (v - S^T k)^T; out = scale S^T q, frame after frame.

        One program owns BLOCK_V value channels of one head of one sequence, with all K rows of
        their state. Everything is in float32.
        """
        BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
        pid = tl.program_id(0)
        v0 = (pid % BLOCKS_V) * BLOCK_V
        h = (pid // BLOCKS_V) % n_heads
        n = pid // BLOCKS_V // n_heads
        row, _, first, end = sequence(bounds_ptr, n, n_frames, PACKED)
        c = tl.arange(0, BLOCK_K)
        d = v0 + tl.arange(0, BLOCK_V)
        mask_k = c < K
        mask_v = d < V
        mask = mask_k[:, None] & mask_v[None, :]
        b = row.to(tl.int64)
        t = first.to(tl.int64)
        head = h.to(tl.int64)
        wide_c = c.to(tl.int64)
        q_ptr += b * stride_qb + t * stride_qt + head * stride_qh + wide_c * stride_qk
        k_ptr += b * stride_kb + t * stride_kt + head * stride_kh + wide_c * stride_kk
        v_ptr += b * stride_vb + t * stride_vt + head * stride_vh + d.to(tl.int64) * stride_vv
        g_ptr += b * stride_gb + t * stride_gt + head * stride_gh + (wide_c // WIDTH) * stride_gn
        beta_ptr += b * stride_bb + t * stride_bt + head * stride_bh
        out_ptr += b * stride_ob + t * stride_ot + head * stride_oh + d
        at = (n.to(tl.int64) * n_heads + h) * (K * V) + c[:, None] * V + d[None, :]
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if initial_ptr is not None:
            state = tl.load(initial_ptr + at, mask=mask, other=0.0).to(tl.float32)
        for _ in range(end - first):
            q = tl.load(q_ptr, mask=mask_k, other=0.0).to(tl.float32)
            k = tl.load(k_ptr, mask=mask_k, other=0.0).to(tl.float32)
            v = tl.load(v_ptr, mask=mask_v, other=0.0).to(tl.float32)
            gate = tl.load(g_ptr, mask=mask_k, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr).to(tl.float32)
            state *= tl.exp2(tl.maximum(gate, MIN_GATE) * LOG2E)[:, None]
            error = v - tl.sum(state * k[:, None], 0)
            state += (beta * k)[:, None] * error[None, :]
            out = scale * tl.sum(state * q[:, None], 0)
            tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=mask_v)
            q_ptr += stride_qt
            k_ptr += stride_kt
            v_ptr += stride_vt
            g_ptr += stride_gt
            beta_ptr += stride_bt
            out_ptr += stride_ot
        tl.store(final_ptr + at, state, mask=mask)


def new_saved(q, v, g, bounds):
    """Uninitialised tensors that the forward pass fills for the backward pass.

    Gate sums G [B·slots, H, tiles, 64] float32; A and both halves of M [.., 64, 64], the errors E
    [.., 64, V] and the state before each chunk [.., K, V] in the dtype of q and v. Each as one
    dimension: a graph for any number of frames must not ask whether there is one slot.
    """
    batch, _, _, n_slots = sizes(q, v, g, bounds)
    heads, key_dim = q.shape[2:]
    value_dim, lead, dtype = v.shape[3], batch * n_slots * heads, operand_dtype(q, v)
    shapes = [CHUNK * CHUNK] * 3 + [CHUNK * value_dim, key_dim * value_dim]
    gates = torch.empty(lead * g.shape[3] * CHUNK, dtype=torch.float32, device=q.device)
    return (gates, *(torch.empty(lead * s, dtype=dtype, device=q.device) for s in shapes))


def launch_delta_forward(q, k, v, g, beta, initial_state, bounds, scale, save):
    """Run the forward pass; arguments are checked by the caller.

    Args:
        q, k: [B,T,H,K]. v: [B,T,H,V], in q's dtype. K and V are multiples of 16. g: [B,T,H,tiles]
            and beta: [B,T,H], float32. Any strides.
        initial_state: [N,H,K,V] or None.
        bounds: integer [N,2], first and end frame of each sequence in its row (row n, or row 0 of
            B = 1 when N > 1, in order and apart), or None if every row is one full sequence.
        save: whether to keep what launch_delta_backward needs.

    Returns:
        out [B,T,H,V], dense, in v's dtype; final state [N,H,K,V] float32; the tensors of new_saved,
        or an empty tuple.
    """
    q, k, v = (in_vectors(x) for x in (q, k, v))
    batch, frames, heads, key_dim = q.shape
    value_dim = v.shape[3]
    _, n_seqs, packed, n_slots = sizes(q, v, g, bounds)
    # Frames of no sequence are written by no program.
    new = torch.empty if bounds is None else torch.zeros
    out = new(v.shape, dtype=v.dtype, device=v.device)
    final = torch.empty((n_seqs, heads, key_dim, value_dim), dtype=torch.float32, device=q.device)
    saved = new_saved(q, v, g, bounds) if save else ()
    if final.numel() == 0:
        return out, final, saved
    if bounds is not None:
        bounds = bounds.contiguous()
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    options = common(q, v, g, packed)
    with on_device(q):
        if frames <= STEP_FRAMES and not save:
            block_v = 16
            _delta_step_kernel[(n_seqs * heads * triton.cdiv(value_dim, block_v),)](
                q, k, v, g, beta, out, initial_state, final, bounds, heads, frames,
                *q.stride(), *k.stride(), *v.stride(), *g.stride(), *beta.stride(),
                *out.stride()[:3], scale, K=key_dim, V=value_dim, WIDTH=options["WIDTH"],
                BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=block_v, PACKED=packed,
                num_warps=4,
            )  # fmt: skip
            return out, final, saved
        gates, a, adjoint, adjoint_low, errors, states = (
            saved if save else (*new_saved(q[..., :0], v[..., :0], g, bounds)[:2], *[None] * 4)
        )
        a_low, inverse, inverse_low = (torch.empty_like(a) for _ in range(3))
        if n_slots > 0:
            _delta_intra_fwd_kernel[(batch * n_slots * heads,)](
                q, k, g, beta, bounds, gates, a, a_low, inverse, inverse_low,
                adjoint, adjoint_low, n_seqs, heads, frames, n_slots,
                *q.stride(), *k.stride(), *g.stride(), *beta.stride(), scale,
                BLOCK_W=CHANNELS,
                num_warps=4, num_stages=1, **options,
            )  # fmt: skip
        tiles = scan_tiles(q, v, n_seqs * heads)
        _delta_scan_fwd_kernel[(n_seqs * heads * triton.cdiv(value_dim, tiles["BLOCK_V"]),)](
            q, k, v, beta, out, initial_state, final, bounds, gates, a, a_low, inverse,
            inverse_low, errors, states, heads, frames, n_slots,
            *q.stride(), *k.stride(), *v.stride(), *beta.stride(), *out.stride()[:3], scale,
            V=value_dim, SAVE=save, **options, **tiles,
        )  # fmt: skip
    return out, final, saved
