"""Tile-grouped gated delta rule in chunks of 64 frames: the backward kernels and their launcher.

The chunks are taken in a few segments, last first, so that the gradients of the states need memory
for one segment only. Each segment has three launches: a reverse scan of the state's gradient, then
two kernels for all chunks at once, which write every other gradient. No atomics. README.md has the
derivation.
"""

import torch

from .delta_tiles import (
    CHANNELS,
    CHUNK,
    VARYING,
    common,
    in_vectors,
    on_device,
    scan_tiles,
    sizes,
    triton,
)

__all__ = ["launch_delta_backward"]

SEGMENTS = 4
# Chunks times heads in one segment that are enough to fill a device.
FULL_DEVICE = 256


if triton is not None:
    import triton.language as tl

    from .delta_tiles import (
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

    @triton.jit(do_not_specialize=VARYING)
    def _delta_scan_bwd_kernel(
        grad_ptr,
        q_ptr,
        k_ptr,
        beta_ptr,
        grad_state_ptr,
        bounds_ptr,
        gates_ptr,
        a_ptr,
        adjoint_ptr,
        adjoint_low_ptr,
        grad_rest_ptr,
        grad_states_ptr,
        n_heads,
        n_frames,
        n_slots,
        low_slot,
        n_here,
        stride_db,
        stride_dt,
        stride_dh,
        stride_dv,
        stride_qb,
        stride_qt,
        stride_qh,
        stride_qk,
        stride_kb,
        stride_kt,
        stride_kh,
        stride_kk,
        stride_bb,
        stride_bt,
        stride_bh,
        scale,
        K: tl.constexpr,
        V: tl.constexpr,
        TILES: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_V: tl.constexpr,
        PACKED: tl.constexpr,
        DTYPE: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """dVh = A^T dO + Kg dS, dE = M^T dVh; dS <- e^(G_C) dS + Qg^T dO - Kd^T beta dE; chunk
        after chunk, last first.

        One program owns BLOCK_V value channels of one head of one sequence and keeps the gradient
        of their state [K, BLOCK_V] in registers over the chunks in slots [low_slot, low_slot +
        n_here), from grad_state and back to it. Reads q and k [64, K], A and M [64, 64] and grad
        [64, BLOCK_V] of every chunk; writes dE and the gradient of the state after each chunk.
        """
        BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
        NB: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        ONE: tl.constexpr = WIDTH % BLOCK_K == 0 or WIDTH == K
        pid = tl.program_id(0)
        v0 = (pid % BLOCKS_V) * BLOCK_V
        h = (pid // BLOCKS_V) % n_heads
        n = pid // BLOCKS_V // n_heads
        row, slot, first, end = sequence(bounds_ptr, n, n_frames, PACKED)
        # Chunks of this sequence, counted from its first, that the segment holds.
        low = tl.maximum(low_slot - slot, 0)
        high = tl.minimum(low_slot + n_here - slot, (end - first + 63) // 64)
        b = row.to(tl.int64)
        t0 = first + (high - 1) * 64
        t = t0.to(tl.int64)
        head = h.to(tl.int64)
        q_ptr += b * stride_qb + t * stride_qt + head * stride_qh
        k_ptr += b * stride_kb + t * stride_kt + head * stride_kh
        beta_ptr += b * stride_bb + t * stride_bt + head * stride_bh
        grad_ptr += b * stride_db + t * stride_dt + head * stride_dh + v0.to(tl.int64) * stride_dv
        grad_state_ptr += (n.to(tl.int64) * n_heads + h) * (K * V)
        cols = None if V % BLOCK_V == 0 else V - v0
        s0 = load_state(grad_state_ptr, v0, 0, K, V, BLOCK_K, BLOCK_V)
        if NB > 1:
            s1 = load_state(grad_state_ptr, v0, 1, K, V, BLOCK_K, BLOCK_V)
        if NB > 2:
            s2 = load_state(grad_state_ptr, v0, 2, K, V, BLOCK_K, BLOCK_V)
        if NB > 3:
            s3 = load_state(grad_state_ptr, v0, 3, K, V, BLOCK_K, BLOCK_V)
        at = (b * n_slots + slot + high - 1) * n_heads + h
        kept = (b * n_here + slot + high - 1 - low_slot) * n_heads + h
        for _ in range(high - low):
            rows = end - t0
            gates = gates_ptr + at * (TILES * 64)
            states = grad_states_ptr + kept * (K * V)
            grad = load_tile(grad_ptr, stride_dt, stride_dv, rows, cols, 64, BLOCK_V, DTYPE)
            a = load_tile(a_ptr + at * 4096, 64, 1, None, None, 64, 64, DTYPE)
            values = tl.dot(tl.trans(a), grad, input_precision=PRECISION)

            k0 = load_block(k_ptr, stride_kt, stride_kk, rows, 0, K, BLOCK_K, DTYPE)
            forget0, remain0, left0 = block_gates(gates, 0, K, WIDTH, BLOCK_K, ONE)
            s = s0.to(DTYPE)
            values = read_state(values, k0, s, remain0, ONE, DTYPE, PRECISION)
            store_state(states, s, v0, 0, K, V, BLOCK_K, BLOCK_V)
            if NB > 1:
                k1 = load_block(k_ptr, stride_kt, stride_kk, rows, 1, K, BLOCK_K, DTYPE)
                forget1, remain1, left1 = block_gates(gates, 1, K, WIDTH, BLOCK_K, ONE)
                s = s1.to(DTYPE)
                values = read_state(values, k1, s, remain1, ONE, DTYPE, PRECISION)
                store_state(states, s, v0, 1, K, V, BLOCK_K, BLOCK_V)
            if NB > 2:
                k2 = load_block(k_ptr, stride_kt, stride_kk, rows, 2, K, BLOCK_K, DTYPE)
                forget2, remain2, left2 = block_gates(gates, 2, K, WIDTH, BLOCK_K, ONE)
                s = s2.to(DTYPE)
                values = read_state(values, k2, s, remain2, ONE, DTYPE, PRECISION)
                store_state(states, s, v0, 2, K, V, BLOCK_K, BLOCK_V)
            if NB > 3:
                k3 = load_block(k_ptr, stride_kt, stride_kk, rows, 3, K, BLOCK_K, DTYPE)
                forget3, remain3, left3 = block_gates(gates, 3, K, WIDTH, BLOCK_K, ONE)
                s = s3.to(DTYPE)
                values = read_state(values, k3, s, remain3, ONE, DTYPE, PRECISION)
                store_state(states, s, v0, 3, K, V, BLOCK_K, BLOCK_V)

            beta = load_rows(beta_ptr, stride_bt, rows)
            rest = precise_dot(
                tl.zeros([64, BLOCK_V], tl.float32), adjoint_ptr + at * 4096,
                adjoint_low_ptr + at * 4096, values, True, DTYPE, PRECISION,
            )  # fmt: skip
            store_tile(grad_rest_ptr + kept * (64 * V) + v0, rest, V, 1, None, cols, 64, BLOCK_V)
            rest *= -beta[:, None]
            scaled = grad.to(tl.float32) * scale
            q0 = load_block(q_ptr, stride_qt, stride_qk, rows, 0, K, BLOCK_K, DTYPE)
            s0 = write_state(s0 * left0, q0, scaled, forget0, ONE, False, DTYPE, PRECISION)
            s0 = write_state(s0, k0, rest, forget0, ONE, True, DTYPE, PRECISION)
            if NB > 1:
                q1 = load_block(q_ptr, stride_qt, stride_qk, rows, 1, K, BLOCK_K, DTYPE)
                s1 = write_state(s1 * left1, q1, scaled, forget1, ONE, False, DTYPE, PRECISION)
                s1 = write_state(s1, k1, rest, forget1, ONE, True, DTYPE, PRECISION)
            if NB > 2:
                q2 = load_block(q_ptr, stride_qt, stride_qk, rows, 2, K, BLOCK_K, DTYPE)
                s2 = write_state(s2 * left2, q2, scaled, forget2, ONE, False, DTYPE, PRECISION)
                s2 = write_state(s2, k2, rest, forget2, ONE, True, DTYPE, PRECISION)
            if NB > 3:
                q3 = load_block(q_ptr, stride_qt, stride_qk, rows, 3, K, BLOCK_K, DTYPE)
                s3 = write_state(s3 * left3, q3, scaled, forget3, ONE, False, DTYPE, PRECISION)
                s3 = write_state(s3, k3, rest, forget3, ONE, True, DTYPE, PRECISION)
            t0 -= 64
            q_ptr -= 64 * stride_qt
            k_ptr -= 64 * stride_kt
            beta_ptr -= 64 * stride_bt
            grad_ptr -= 64 * stride_dt
            at -= n_heads
            kept -= n_heads
        store_state(grad_state_ptr, s0, v0, 0, K, V, BLOCK_K, BLOCK_V)
        if NB > 1:
            store_state(grad_state_ptr, s1, v0, 1, K, V, BLOCK_K, BLOCK_V)
        if NB > 2:
            store_state(grad_state_ptr, s2, v0, 2, K, V, BLOCK_K, BLOCK_V)
        if NB > 3:
            store_state(grad_state_ptr, s3, v0, 3, K, V, BLOCK_K, BLOCK_V)

    @triton.jit(do_not_specialize=VARYING)
    def _delta_intra_bwd_kernel(
        grad_ptr,
        beta_ptr,
        grad_v_ptr,
        grad_beta_ptr,
        bounds_ptr,
        errors_ptr,
        grad_rest_ptr,
        grad_a_ptr,
        grad_p_ptr,
        n_seqs,
        n_heads,
        n_frames,
        n_slots,
        low_slot,
        n_here,
        stride_db,
        stride_dt,
        stride_dh,
        stride_dv,
        stride_bb,
        stride_bt,
        stride_bh,
        stride_vb,
        stride_vt,
        stride_vh,
        stride_eb,
        stride_et,
        stride_eh,
        scale,
        V: tl.constexpr,
        BLOCK_V: tl.constexpr,
        PACKED: tl.constexpr,
        DTYPE: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """dA = lower(dO Vh^T), dP = -strict_lower(beta dE Vh^T), dv = beta dE, dbeta = <dE, E>.

        One program owns one chunk of one head; Vh = beta E. Reads grad, E and dE [64, V]; writes dv
        [64, V], dbeta [64], and scale dA and dP [64, 64] for the next kernel.
        """
        pid = tl.program_id(0)
        h = pid % n_heads
        slot = low_slot + (pid // n_heads) % n_here
        row = pid // n_heads // n_here
        t0, end = chunk_at(bounds_ptr, row, slot, n_seqs, n_frames, PACKED)
        rows = end - t0
        if rows <= 0:
            return
        b = row.to(tl.int64)
        t = t0.to(tl.int64)
        head = h.to(tl.int64)
        grad_ptr += b * stride_db + t * stride_dt + head * stride_dh
        beta_ptr += b * stride_bb + t * stride_bt + head * stride_bh
        grad_v_ptr += b * stride_vb + t * stride_vt + head * stride_vh
        grad_beta_ptr += b * stride_eb + t * stride_et + head * stride_eh
        errors_ptr += ((b * n_slots + slot) * n_heads + h) * (64 * V)
        kept = pid.to(tl.int64)
        grad_rest_ptr += kept * (64 * V)
        i = tl.arange(0, 64)
        EVEN: tl.constexpr = V % BLOCK_V == 0
        beta = load_rows(beta_ptr, stride_bt, rows)
        grad_a = tl.zeros([64, 64], tl.float32)
        grad_p = tl.zeros([64, 64], tl.float32)
        grad_beta = tl.zeros([64], tl.float32)
        for v0 in range(0, V, BLOCK_V):
            cols = None if EVEN else V - v0
            grad = load_tile(
                grad_ptr + tl.cast(v0, tl.int64) * stride_dv,
                stride_dt, stride_dv, rows, cols, 64, BLOCK_V, DTYPE,
            )  # fmt: skip
            errors = load_tile(errors_ptr + v0, V, 1, None, cols, 64, BLOCK_V, DTYPE)
            rest = load_tile(grad_rest_ptr + v0, V, 1, None, cols, 64, BLOCK_V, DTYPE)
            grad_a = tl.dot(grad, tl.trans(errors), grad_a, input_precision=PRECISION)
            grad_p = tl.dot(rest, tl.trans(errors), grad_p, input_precision=PRECISION)
            rest = rest.to(tl.float32)
            grad_beta += tl.sum(rest * errors.to(tl.float32), 1)
            store_tile(grad_v_ptr + v0, rest * beta[:, None], stride_vt, 1, rows, cols, 64, BLOCK_V)
        grad_a = tl.where(i[:, None] >= i[None, :], grad_a * (scale * beta)[None, :], 0.0)
        grad_p = tl.where(i[:, None] > i[None, :], grad_p * -beta[:, None] * beta[None, :], 0.0)
        store_tile(grad_a_ptr + kept * 4096, grad_a, 64, 1, None, None, 64, 64)
        store_tile(grad_p_ptr + kept * 4096, grad_p, 64, 1, None, None, 64, 64)
        tl.store(
            grad_beta_ptr + i * stride_et,
            grad_beta.to(grad_beta_ptr.dtype.element_ty),
            mask=i < rows,
        )

    @triton.jit(do_not_specialize=VARYING)
    def _delta_tile_bwd_kernel(
        grad_ptr,
        q_ptr,
        k_ptr,
        g_ptr,
        beta_ptr,
        grad_q_ptr,
        grad_k_ptr,
        grad_g_ptr,
        bounds_ptr,
        gates_ptr,
        errors_ptr,
        states_ptr,
        grad_rest_ptr,
        grad_states_ptr,
        grad_a_ptr,
        grad_p_ptr,
        n_seqs,
        n_heads,
        n_frames,
        n_slots,
        low_slot,
        n_here,
        stride_db,
        stride_dt,
        stride_dh,
        stride_dv,
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
        stride_rb,
        stride_rt,
        stride_rh,
        stride_eb,
        stride_et,
        stride_eh,
        scale,
        K: tl.constexpr,
        V: tl.constexpr,
        TILES: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK_W: tl.constexpr,
        BLOCK_V: tl.constexpr,
        PACKED: tl.constexpr,
        DTYPE: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """dq = dQg e^G + dY K; dk = dX K + dX^T K + dY^T Q + dKd e^G + dKg e^(G_C - G); dg.

        dX = E dP, dY = E dA (E the decays between frames), dQg = scale dO S^T, dKd = -beta dE S^T,
        dKg = Vh dS^T; dG sums each term of dq and dk times q or k, and dg is the reverse cumulative
        sum of dG. One program owns one tile of one chunk of one head. Reads grad, E and dE [64, V],
        q and k [64, width], the state and its gradient [width, V], dA and dP [64, 64].
        """
        pid = tl.program_id(0)
        tile = pid % TILES
        h = (pid // TILES) % n_heads
        slot = low_slot + (pid // TILES // n_heads) % n_here
        row = pid // TILES // n_heads // n_here
        t0, end = chunk_at(bounds_ptr, row, slot, n_seqs, n_frames, PACKED)
        rows = end - t0
        if rows <= 0:
            return
        b = row.to(tl.int64)
        t = t0.to(tl.int64)
        head = h.to(tl.int64)
        first = (tile * WIDTH).to(tl.int64)
        grad_ptr += b * stride_db + t * stride_dt + head * stride_dh
        q_ptr += b * stride_qb + t * stride_qt + head * stride_qh + first * stride_qk
        k_ptr += b * stride_kb + t * stride_kt + head * stride_kh + first * stride_kk
        g_ptr += b * stride_gb + t * stride_gt + head * stride_gh + tile.to(tl.int64) * stride_gn
        beta_ptr += b * stride_bb + t * stride_bt + head * stride_bh
        grad_q_ptr += b * stride_rb + t * stride_rt + head * stride_rh + first
        grad_k_ptr += b * stride_rb + t * stride_rt + head * stride_rh + first
        grad_g_ptr += b * stride_eb + t * stride_et + head * stride_eh + tile
        at = (b * n_slots + slot) * n_heads + h
        kept = (pid // TILES).to(tl.int64)
        gates_ptr += at * (TILES * 64) + tile * 64
        errors_ptr += at * (64 * V)
        states_ptr += at * (K * V) + first * V
        grad_rest_ptr += kept * (64 * V)
        grad_states_ptr += kept * (K * V) + first * V
        grad_a_ptr += kept * 4096
        grad_p_ptr += kept * 4096
        i = tl.arange(0, 64)
        EVEN_W: tl.constexpr = WIDTH % BLOCK_W == 0
        EVEN_V: tl.constexpr = V % BLOCK_V == 0
        BLOCKS: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
        gate = tl.load(gates_ptr + i)
        last = tl.load(gates_ptr + 63)
        beta = load_rows(beta_ptr, stride_bt, rows)
        grad_gate = tl.zeros([64], tl.float32)
        grad_last = tl.zeros([BLOCK_W], tl.float32)

        for block in tl.range(BLOCKS, num_stages=1):
            c0 = block * BLOCK_W
            cols_k = None if EVEN_W else WIDTH - c0
            grad_q = tl.zeros([64, BLOCK_W], tl.float32)
            plus = tl.zeros([64, BLOCK_W], tl.float32)
            minus = tl.zeros([64, BLOCK_W], tl.float32)
            for v0 in range(0, V, BLOCK_V):
                cols = None if EVEN_V else V - v0
                grad = load_tile(
                    grad_ptr + tl.cast(v0, tl.int64) * stride_dv,
                    stride_dt, stride_dv, rows, cols, 64, BLOCK_V, DTYPE,
                )  # fmt: skip
                errors = load_tile(errors_ptr + v0, V, 1, None, cols, 64, BLOCK_V, DTYPE)
                rest = load_tile(grad_rest_ptr + v0, V, 1, None, cols, 64, BLOCK_V, DTYPE)
                state = load_tile(
                    states_ptr + c0 * V + v0, V, 1, cols_k, cols, BLOCK_W, BLOCK_V, DTYPE
                )
                grad_state = load_tile(
                    grad_states_ptr + c0 * V + v0, V, 1, cols_k, cols, BLOCK_W, BLOCK_V, DTYPE
                )
                grad_q = tl.dot(grad, tl.trans(state), grad_q, input_precision=PRECISION)
                plus = tl.dot(rest, tl.trans(state), plus, input_precision=PRECISION)
                minus = tl.dot(errors, tl.trans(grad_state), minus, input_precision=PRECISION)
                grad_last += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 1)
            q = load_tile(
                q_ptr + c0 * stride_qk, stride_qt, stride_qk, rows, cols_k, 64, BLOCK_W, DTYPE
            )
            k = load_tile(
                k_ptr + c0 * stride_kk, stride_kt, stride_kk, rows, cols_k, 64, BLOCK_W, DTYPE
            )
            # dk = plus + minus: a term's product with k enters dG with the sign of its name.
            grad_q *= (scale * tl.exp2(gate))[:, None]
            plus *= (-beta * tl.exp2(gate))[:, None]
            minus *= (beta * tl.exp2(last - gate))[:, None]
            carried = tl.sum(tl.sum(minus * k.to(tl.float32), 1), 0)
            decay = decay_between(gate, gate, True)
            x = load_tile(grad_p_ptr, 64, 1, None, None, 64, 64, tl.float32) * decay
            if DTYPE.primitive_bitwidth < 32:
                # For keys that resemble each other the terms of the products cancel.
                x, low = halves(x, DTYPE)
                plus = tl.dot(low, k, plus)
            plus = tl.dot(x.to(DTYPE), k, plus, input_precision=PRECISION)
            y = load_tile(grad_a_ptr, 64, 1, None, None, 64, 64, tl.float32)
            y *= decay
            if DTYPE.primitive_bitwidth < 32:
                y, low = halves(y, DTYPE)
                grad_q = tl.dot(low, k, grad_q)
            grad_q = tl.dot(y.to(DTYPE), k, grad_q, input_precision=PRECISION)
            # Transposed by loading again: a transposed product in registers is not to be trusted.
            decay = decay_between(gate, gate, False)
            x = load_tile(grad_p_ptr, 1, 64, None, None, 64, 64, tl.float32) * decay
            if DTYPE.primitive_bitwidth < 32:
                x, low = halves(x, DTYPE)
                minus = tl.dot(low, k, minus)
            minus = tl.dot(x.to(DTYPE), k, minus, input_precision=PRECISION)
            y = load_tile(grad_a_ptr, 1, 64, None, None, 64, 64, tl.float32)
            y *= decay
            if DTYPE.primitive_bitwidth < 32:
                y, low = halves(y, DTYPE)
                minus = tl.dot(low, q, minus)
            minus = tl.dot(y.to(DTYPE), q, minus, input_precision=PRECISION)
            store_tile(grad_q_ptr + c0, grad_q, stride_rt, 1, rows, cols_k, 64, BLOCK_W)
            store_tile(grad_k_ptr + c0, plus + minus, stride_rt, 1, rows, cols_k, 64, BLOCK_W)
            grad_gate += tl.sum(q.to(tl.float32) * grad_q + k.to(tl.float32) * (plus - minus), 1)
            grad_gate += tl.where(i == 63, carried, 0.0)

        grad_gate += tl.where(i == 63, tl.exp2(last) * tl.sum(grad_last, 0), 0.0)
        grad_gate = tl.cumsum(grad_gate, 0, reverse=True)
        kept_gate = load_rows(g_ptr, stride_gt, rows) >= MIN_GATE
        grad_gate = tl.where(kept_gate, grad_gate, 0.0)
        tl.store(
            grad_g_ptr + i * stride_et,
            grad_gate.to(grad_g_ptr.dtype.element_ty),
            mask=i < rows,
        )


def launch_delta_backward(
    grad_out, grad_final_state, q, k, v, g, beta, initial_state, bounds, scale, saved
):
    """Run the backward pass; arguments as for launch_delta_forward, whose `saved` it takes.

    Returns the gradients of q, k, v, g, beta and initial_state, dense, in the dtypes of these
    (float32 for a state that was None).
    """
    gates, a, adjoint, adjoint_low, errors, states = saved
    grad_out, q, k = (in_vectors(x) for x in (grad_out, q, k))
    batch, frames, heads, key_dim = q.shape
    value_dim = v.shape[3]
    _, n_seqs, packed, n_slots = sizes(q, v, g, bounds)
    # Frames of no sequence are written by no program.
    new = torch.empty if bounds is None else torch.zeros
    grad_q, grad_k, grad_v, grad_g, grad_beta = (
        new(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, g, beta)
    )
    grad_state = torch.zeros(
        (n_seqs, heads, key_dim, value_dim), dtype=torch.float32, device=q.device
    )
    if grad_final_state is not None:
        grad_state.copy_(grad_final_state)
    if bounds is not None:
        bounds = bounds.contiguous()
    span = max(-(-n_slots // SEGMENTS), -(-FULL_DEVICE // max(1, batch * heads)))
    span = min(span, n_slots)
    # One segment's intermediates, overwritten by the next.
    most = batch * span * heads
    grad_rest = errors.new_empty((most, CHUNK, value_dim))
    grad_states = errors.new_empty((most, key_dim, value_dim))
    grad_a = gates.new_empty((most, CHUNK, CHUNK))
    grad_p = torch.empty_like(grad_a)
    options = common(q, v, g, packed)
    tiles = scan_tiles(q, v, n_seqs * heads)
    scan_grid = (n_seqs * heads * triton.cdiv(value_dim, tiles["BLOCK_V"]),)
    lists = ("PACKED", "DTYPE", "PRECISION")
    with on_device(q):
        for high in range(n_slots if grad_state.numel() > 0 else 0, 0, -max(1, span)):
            low = max(0, high - span)
            here = batch * (high - low) * heads
            _delta_scan_bwd_kernel[scan_grid](
                grad_out, q, k, beta, grad_state, bounds, gates, a, adjoint, adjoint_low,
                grad_rest, grad_states, heads, frames, n_slots, low, high - low,
                *grad_out.stride(), *q.stride(), *k.stride(), *beta.stride(), scale,
                V=value_dim, **options, **tiles,
            )  # fmt: skip
            _delta_intra_bwd_kernel[(here,)](
                grad_out, beta, grad_v, grad_beta, bounds, errors, grad_rest, grad_a, grad_p,
                n_seqs, heads, frames, n_slots, low, high - low,
                *grad_out.stride(), *beta.stride(), *grad_v.stride()[:3], *grad_beta.stride(),
                scale, V=value_dim, BLOCK_V=CHANNELS,
                num_warps=4, num_stages=2,
                **{name: options[name] for name in lists},
            )  # fmt: skip
            _delta_tile_bwd_kernel[(here * options["TILES"],)](
                grad_out, q, k, g, beta, grad_q, grad_k, grad_g, bounds, gates, errors, states,
                grad_rest, grad_states, grad_a, grad_p,
                n_seqs, heads, frames, n_slots, low, high - low,
                *grad_out.stride(), *q.stride(), *k.stride(), *g.stride(), *beta.stride(),
                *grad_q.stride()[:3], *grad_g.stride()[:3], scale,
                V=value_dim, BLOCK_W=CHANNELS, BLOCK_V=CHANNELS,
                num_warps=4, num_stages=2, **options,
            )  # fmt: skip
    if initial_state is not None:
        grad_state = grad_state.to(initial_state.dtype)
    return grad_q, grad_k, grad_v, grad_g, grad_beta, grad_state
