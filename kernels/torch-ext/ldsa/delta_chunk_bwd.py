"""Tile-grouped gated delta rule in chunks of 64 frames: the backward kernels and their launcher.

The chunks are taken in a few segments, last first, so that the gradients of the states need memory
for one segment only. Each segment has three launches: a reverse scan of the state's gradient, then
two kernels for all chunks at once, which write every other gradient. No atomics. README.md has the
derivation.
"""

import torch

from .delta_chunk import (
    CHUNK,
    block_of,
    common,
    on_device,
    scan_tiles,
    sizes,
    triton,
    wide,
)

__all__ = ["launch_delta_backward"]

SEGMENTS = 4
# Chunks times heads in one segment that are enough to fill a device.
FULL_DEVICE = 256


if triton is not None:
    import triton.language as tl

    from .delta_chunk import (
        MIN_GATE,
        channel_gates,
        chunk_at,
        decay_between,
        gate_sums,
        load_rows,
        load_state,
        load_tile,
        sequence,
        store_state,
        store_tile,
    )

    @triton.jit
    def _read_grad_block(
        grad_values,
        grad_state,
        k_ptr,
        gates_ptr,
        stride_t,
        stride_k,
        rows,
        BLOCK: tl.constexpr,
        K: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK_K: tl.constexpr,
        DTYPE: tl.constexpr,
        PRECISION: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """grad_values + (k e^(G_C - G)) dS, for one block of key channels."""
        c0: tl.constexpr = BLOCK * BLOCK_K
        cols = None if c0 + BLOCK_K <= K else K - c0
        k = load_tile(
            k_ptr + c0 * stride_k, stride_t, stride_k, rows, cols, 64, BLOCK_K, DTYPE, WIDE
        )
        s = grad_state.to(DTYPE)
        if c0 // WIDTH == (c0 + BLOCK_K - 1) // WIDTH or WIDTH == K:
            gates_ptr += (c0 // WIDTH) * 64
            left = tl.exp2(tl.load(gates_ptr + 63) - tl.load(gates_ptr + tl.arange(0, 64)))
            grad_values += left[:, None] * tl.dot(k, s, input_precision=PRECISION)
        else:
            gate, last = channel_gates(gates_ptr, c0, K, WIDTH, BLOCK_K)
            k = (k * tl.exp2(last[None, :] - gate)).to(DTYPE)
            grad_values = tl.dot(k, s, grad_values, input_precision=PRECISION)
        return grad_values

    @triton.jit
    def _write_grad_block(
        grad_state,
        grad_values,
        grad,
        q_ptr,
        w_ptr,
        gates_ptr,
        stride_t,
        stride_k,
        rows,
        scale,
        BLOCK: tl.constexpr,
        K: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK_K: tl.constexpr,
        DTYPE: tl.constexpr,
        PRECISION: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """e^(G_C) dS + scale (q e^G)^T grad - W^T grad_values, for one block of key channels."""
        c0: tl.constexpr = BLOCK * BLOCK_K
        cols = None if c0 + BLOCK_K <= K else K - c0
        q = load_tile(
            q_ptr + c0 * stride_k, stride_t, stride_k, rows, cols, 64, BLOCK_K, DTYPE, WIDE
        )
        w = load_tile(w_ptr + c0, K, 1, None, cols, 64, BLOCK_K, DTYPE, False)
        if c0 // WIDTH == (c0 + BLOCK_K - 1) // WIDTH or WIDTH == K:
            gates_ptr += (c0 // WIDTH) * 64
            gate = tl.load(gates_ptr + tl.arange(0, 64))
            grad = (grad * (scale * tl.exp2(gate))[:, None]).to(DTYPE)
            grad_state *= tl.exp2(tl.load(gates_ptr + 63))
        else:
            gate, last = channel_gates(gates_ptr, c0, K, WIDTH, BLOCK_K)
            q = (q * (scale * tl.exp2(gate))).to(DTYPE)
            grad_state *= tl.exp2(last)[:, None]
        grad_state = tl.dot(tl.trans(q), grad, grad_state, input_precision=PRECISION)
        return tl.dot(tl.trans(w), grad_values, grad_state, input_precision=PRECISION)

    @triton.jit
    def _delta_scan_bwd_kernel(
        grad_ptr,
        grad_final_ptr,
        grad_initial_ptr,
        q_ptr,
        k_ptr,
        bounds_ptr,
        gates_ptr,
        a_ptr,
        w_ptr,
        grad_values_ptr,
        grad_states_ptr,
        n_heads,
        n_frames,
        n_slots,
        low_slot,
        high_slot,
        n_kept,
        stride_ob,
        stride_ot,
        stride_oh,
        stride_ov,
        stride_qb,
        stride_qt,
        stride_qh,
        stride_qk,
        stride_kb,
        stride_kt,
        stride_kh,
        stride_kk,
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
        WIDE: tl.constexpr,
    ):
        """dVh = A^T dO + Kg dS; dS <- e^(G_C) dS + Qg^T dO - W^T dVh, chunk after chunk, last first.

        One program owns BLOCK_V value channels of one head of one sequence and keeps the gradient
        of their state [K, BLOCK_V] in registers, from grad_final (None: zero) to grad_initial, over
        the chunks in slots [low_slot, high_slot). Reads q, k and -W [64, K], A [64, 64] and grad
        [64, BLOCK_V] of every chunk; writes dVh and the gradient of the state after each chunk.
        """
        BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
        NB: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        pid = tl.program_id(0)
        v0 = (pid % BLOCKS_V) * BLOCK_V
        h = (pid // BLOCKS_V) % n_heads
        n = pid // BLOCKS_V // n_heads
        row, slot, first, end = sequence(bounds_ptr, n, n_frames, PACKED)
        low = tl.maximum(low_slot - slot, 0)
        high = tl.minimum(high_slot - slot, (end - first + 63) // 64)
        n_chunks = tl.maximum(high - low, 0)
        t0 = first + (high - 1) * 64
        b = row.to(tl.int64)
        t = t0.to(tl.int64)
        head = h.to(tl.int64)
        q_ptr += b * stride_qb + t * stride_qt + head * stride_qh
        k_ptr += b * stride_kb + t * stride_kt + head * stride_kh
        grad_ptr += b * stride_ob + t * stride_ot + head * stride_oh + v0.to(tl.int64) * stride_ov
        which = (n.to(tl.int64) * n_heads + h) * (K * V)
        cols = None if V % BLOCK_V == 0 else V - v0
        if grad_final_ptr is not None:
            grad_final_ptr += which
        grad_initial_ptr += which
        s0 = load_state(grad_final_ptr, v0, K, V, 0, BLOCK_K, BLOCK_V)
        if NB > 1:
            s1 = load_state(grad_final_ptr, v0, K, V, 1, BLOCK_K, BLOCK_V)
        if NB > 2:
            s2 = load_state(grad_final_ptr, v0, K, V, 2, BLOCK_K, BLOCK_V)
        if NB > 3:
            s3 = load_state(grad_final_ptr, v0, K, V, 3, BLOCK_K, BLOCK_V)
        at = (b * n_slots + slot + high - 1) * n_heads + h
        kept = (b * n_kept + slot + high - 1 - low_slot) * n_heads + h
        for _ in range(n_chunks):
            rows = end - t0
            states = grad_states_ptr + kept * (K * V)
            store_state(states, s0, v0, K, V, 0, BLOCK_K, BLOCK_V)
            if NB > 1:
                store_state(states, s1, v0, K, V, 1, BLOCK_K, BLOCK_V)
            if NB > 2:
                store_state(states, s2, v0, K, V, 2, BLOCK_K, BLOCK_V)
            if NB > 3:
                store_state(states, s3, v0, K, V, 3, BLOCK_K, BLOCK_V)
            w = w_ptr + at * (64 * K)
            gates = gates_ptr + at * (TILES * 64)
            a = load_tile(a_ptr + at * 4096, 64, 1, None, None, 64, 64, DTYPE, False)
            grad = load_tile(grad_ptr, stride_ot, stride_ov, rows, cols, 64, BLOCK_V, DTYPE, WIDE)
            values = tl.dot(tl.trans(a), grad, input_precision=PRECISION) * scale
            values = _read_grad_block(
                values, s0, k_ptr, gates, stride_kt, stride_kk, rows,
                0, K, WIDTH, BLOCK_K, DTYPE, PRECISION, WIDE,
            )  # fmt: skip
            if NB > 1:
                values = _read_grad_block(
                    values, s1, k_ptr, gates, stride_kt, stride_kk, rows,
                    1, K, WIDTH, BLOCK_K, DTYPE, PRECISION, WIDE,
                )  # fmt: skip
            if NB > 2:
                values = _read_grad_block(
                    values, s2, k_ptr, gates, stride_kt, stride_kk, rows,
                    2, K, WIDTH, BLOCK_K, DTYPE, PRECISION, WIDE,
                )  # fmt: skip
            if NB > 3:
                values = _read_grad_block(
                    values, s3, k_ptr, gates, stride_kt, stride_kk, rows,
                    3, K, WIDTH, BLOCK_K, DTYPE, PRECISION, WIDE,
                )  # fmt: skip
            values = values.to(DTYPE)
            s0 = _write_grad_block(
                s0, values, grad, q_ptr, w, gates, stride_qt, stride_qk, rows, scale,
                0, K, WIDTH, BLOCK_K, DTYPE, PRECISION, WIDE,
            )  # fmt: skip
            if NB > 1:
                s1 = _write_grad_block(
                    s1, values, grad, q_ptr, w, gates, stride_qt, stride_qk, rows, scale,
                    1, K, WIDTH, BLOCK_K, DTYPE, PRECISION, WIDE,
                )  # fmt: skip
            if NB > 2:
                s2 = _write_grad_block(
                    s2, values, grad, q_ptr, w, gates, stride_qt, stride_qk, rows, scale,
                    2, K, WIDTH, BLOCK_K, DTYPE, PRECISION, WIDE,
                )  # fmt: skip
            if NB > 3:
                s3 = _write_grad_block(
                    s3, values, grad, q_ptr, w, gates, stride_qt, stride_qk, rows, scale,
                    3, K, WIDTH, BLOCK_K, DTYPE, PRECISION, WIDE,
                )  # fmt: skip
            store_tile(
                grad_values_ptr + kept * (64 * V) + v0, values, V, 1, None, cols, 64, BLOCK_V, False
            )
            t0 -= 64
            q_ptr -= 64 * stride_qt
            k_ptr -= 64 * stride_kt
            grad_ptr -= 64 * stride_ot
            at -= n_heads
            kept -= n_heads
        store_state(grad_initial_ptr, s0, v0, K, V, 0, BLOCK_K, BLOCK_V)
        if NB > 1:
            store_state(grad_initial_ptr, s1, v0, K, V, 1, BLOCK_K, BLOCK_V)
        if NB > 2:
            store_state(grad_initial_ptr, s2, v0, K, V, 2, BLOCK_K, BLOCK_V)
        if NB > 3:
            store_state(grad_initial_ptr, s3, v0, K, V, 3, BLOCK_K, BLOCK_V)

    @triton.jit
    def _delta_intra_bwd_kernel(
        grad_ptr,
        k_ptr,
        v_ptr,
        beta_ptr,
        grad_v_ptr,
        grad_beta_ptr,
        bounds_ptr,
        gates_ptr,
        m_ptr,
        p_ptr,
        values_ptr,
        states_ptr,
        grad_values_ptr,
        grad_a_ptr,
        grad_l_ptr,
        grad_w_ptr,
        n_seqs,
        n_heads,
        n_frames,
        n_slots,
        low_slot,
        high_slot,
        n_kept,
        stride_ob,
        stride_ot,
        stride_oh,
        stride_ov,
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
        stride_db,
        stride_dt,
        stride_dh,
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
        WIDE: tl.constexpr,
    ):
        """dA = lower(dO Vh^T), dT = dVh V^T + dW Kd^T with dW = -dVh S^T; dv = T^T dVh;
        dL = -strict_lower(M^T (dT diag(beta)) M^T); dbeta = colsum(dT M) + rowsum(dL P).

        One program owns one chunk of one head. Reads grad, v, Vh and dVh [64, V], k [64, K], the
        state [K, V], M and P [64, 64]; writes dv, dbeta, and dA, dL and dW for the next kernel.
        """
        pid = tl.program_id(0)
        n_here = high_slot - low_slot
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
        grad_ptr += b * stride_ob + t * stride_ot + head * stride_oh
        k_ptr += b * stride_kb + t * stride_kt + head * stride_kh
        v_ptr += b * stride_vb + t * stride_vt + head * stride_vh
        beta_ptr += b * stride_bb + t * stride_bt + head * stride_bh
        grad_v_ptr += b * stride_db + t * stride_dt + head * stride_dh
        grad_beta_ptr += b * stride_eb + t * stride_et + head * stride_eh
        at = (b * n_slots + slot) * n_heads + h
        kept = (b * n_kept + slot - low_slot) * n_heads + h
        gates_ptr += at * (TILES * 64)
        values_ptr += at * (64 * V)
        states_ptr += at * (K * V)
        grad_values_ptr += kept * (64 * V)
        grad_w_ptr += kept * (64 * K)
        i = tl.arange(0, 64)
        EVEN_W: tl.constexpr = WIDTH % BLOCK_W == 0
        EVEN_V: tl.constexpr = V % BLOCK_V == 0
        BLOCKS: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
        beta = load_rows(beta_ptr, stride_bt, rows, WIDE)
        inverse = load_tile(m_ptr + at * 4096, 64, 1, None, None, 64, 64, DTYPE, False)

        grad_a = tl.zeros([64, 64], tl.float32)
        grad_t = tl.zeros([64, 64], tl.float32)
        for v0 in range(0, V, BLOCK_V):
            cols = None if EVEN_V else V - v0
            wide_v0 = tl.cast(v0, tl.int64)
            grad = load_tile(
                grad_ptr + wide_v0 * stride_ov,
                stride_ot, stride_ov, rows, cols, 64, BLOCK_V, DTYPE, WIDE,
            )  # fmt: skip
            v = load_tile(
                v_ptr + wide_v0 * stride_vv,
                stride_vt, stride_vv, rows, cols, 64, BLOCK_V, DTYPE, WIDE,
            )  # fmt: skip
            values = load_tile(values_ptr + v0, V, 1, None, cols, 64, BLOCK_V, DTYPE, False)
            grad_values = load_tile(
                grad_values_ptr + v0, V, 1, None, cols, 64, BLOCK_V, DTYPE, False
            )
            grad_a = tl.dot(grad, tl.trans(values), grad_a, input_precision=PRECISION)
            grad_t = tl.dot(grad_values, tl.trans(v), grad_t, input_precision=PRECISION)
            grad_v = tl.dot(tl.trans(inverse), grad_values, input_precision=PRECISION)
            store_tile(
                grad_v_ptr + v0, grad_v * beta[:, None], stride_dt, 1, rows, cols,
                64, BLOCK_V, False,
            )  # fmt: skip
        grad_a = tl.where(i[:, None] >= i[None, :], grad_a * scale, 0.0)
        store_tile(grad_a_ptr + kept * 4096, grad_a, 64, 1, None, None, 64, 64, False)

        for tile in range(TILES):
            gate = tl.exp2(tl.load(gates_ptr + tile * 64 + i))
            for block in tl.static_range(BLOCKS):
                c0 = tile * WIDTH + block * BLOCK_W
                cols_k = None if EVEN_W else WIDTH - block * BLOCK_W
                grad_w = tl.zeros([64, BLOCK_W], tl.float32)
                for v0 in range(0, V, BLOCK_V):
                    cols = None if EVEN_V else V - v0
                    grad_values = load_tile(
                        grad_values_ptr + v0, V, 1, None, cols, 64, BLOCK_V, DTYPE, False
                    )
                    state = load_tile(
                        states_ptr + c0 * V + v0, V, 1, cols_k, cols, BLOCK_W, BLOCK_V, DTYPE, False
                    )
                    grad_w = tl.dot(grad_values, tl.trans(state), grad_w, input_precision=PRECISION)
                grad_w = (-grad_w).to(DTYPE)
                store_tile(grad_w_ptr + c0, grad_w, K, 1, None, cols_k, 64, BLOCK_W, False)
                keys = load_tile(
                    k_ptr + tl.cast(c0, tl.int64) * stride_kk,
                    stride_kt, stride_kk, rows, cols_k, 64, BLOCK_W, DTYPE, WIDE,
                )  # fmt: skip
                part = tl.dot(grad_w, tl.trans(keys), input_precision=PRECISION)
                grad_t += part * gate[None, :]

        m = inverse.to(tl.float32)
        grad_beta = tl.sum(grad_t * m, 0)
        link = (grad_t * beta[None, :]).to(DTYPE)
        link = tl.dot(link, tl.trans(inverse), input_precision=PRECISION).to(DTYPE)
        grad_l = tl.dot(tl.trans(inverse), link, input_precision=PRECISION)
        grad_l = tl.where(i[:, None] > i[None, :], -grad_l, 0.0)
        store_tile(grad_l_ptr + kept * 4096, grad_l, 64, 1, None, None, 64, 64, False)
        p = load_tile(p_ptr + at * 4096, 64, 1, None, None, 64, 64, tl.float32, False)
        grad_beta += tl.sum(grad_l * p, 1)
        tl.store(
            grad_beta_ptr + i * stride_et,
            grad_beta.to(grad_beta_ptr.dtype.element_ty),
            mask=i < rows,
        )

    @triton.jit
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
        m_ptr,
        values_ptr,
        states_ptr,
        grad_states_ptr,
        grad_a_ptr,
        grad_l_ptr,
        grad_w_ptr,
        n_seqs,
        n_heads,
        n_frames,
        n_slots,
        low_slot,
        high_slot,
        n_kept,
        stride_ob,
        stride_ot,
        stride_oh,
        stride_ov,
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
        stride_db,
        stride_dt,
        stride_dh,
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
        WIDE: tl.constexpr,
    ):
        """dq = dQg e^G + dY K; dk = dX K + dX^T K + dY^T Q + dKd e^G + dKg e^(G_C - G); dg.

        dX = E diag(beta) dL, dY = E dA, dQg = dO S^T, dKg = Vh dS^T, dKd = T^T dW; dG sums each
        term of dq and dk times q or k, and dg is the reverse cumulative sum of dG. One program
        owns one tile of one chunk of one head. Reads grad and Vh [64, V], q, k and dW [64, width],
        the state and its gradient [width, V], M, dA and dL [64, 64].
        """
        pid = tl.program_id(0)
        n_here = high_slot - low_slot
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
        grad_ptr += b * stride_ob + t * stride_ot + head * stride_oh
        q_ptr += b * stride_qb + t * stride_qt + head * stride_qh + first * stride_qk
        k_ptr += b * stride_kb + t * stride_kt + head * stride_kh + first * stride_kk
        g_ptr += b * stride_gb + t * stride_gt + head * stride_gh + tile.to(tl.int64) * stride_gn
        beta_ptr += b * stride_bb + t * stride_bt + head * stride_bh
        grad_q_ptr += b * stride_db + t * stride_dt + head * stride_dh + first
        grad_k_ptr += b * stride_db + t * stride_dt + head * stride_dh + first
        grad_g_ptr += b * stride_eb + t * stride_et + head * stride_eh + tile
        at = (b * n_slots + slot) * n_heads + h
        kept = (b * n_kept + slot - low_slot) * n_heads + h
        values_ptr += at * (64 * V)
        states_ptr += at * (K * V) + first * V
        grad_states_ptr += kept * (K * V) + first * V
        grad_w_ptr += kept * (64 * K) + first
        grad_a_ptr += kept * 4096
        grad_l_ptr += kept * 4096
        i = tl.arange(0, 64)
        EVEN_W: tl.constexpr = WIDTH % BLOCK_W == 0
        EVEN_V: tl.constexpr = V % BLOCK_V == 0
        BLOCKS: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
        gate = tl.load(gates_ptr + at * (TILES * 64) + tile * 64 + i)
        last = tl.load(gates_ptr + at * (TILES * 64) + tile * 64 + 63)
        beta = load_rows(beta_ptr, stride_bt, rows, WIDE)
        grad_gate = tl.zeros([64], tl.float32)
        grad_last = tl.zeros([BLOCK_W], tl.float32)

        for block in tl.static_range(BLOCKS):
            c0 = block * BLOCK_W
            cols_k = None if EVEN_W else WIDTH - c0
            grad_q = tl.zeros([64, BLOCK_W], tl.float32)
            grad_k = tl.zeros([64, BLOCK_W], tl.float32)
            for v0 in range(0, V, BLOCK_V):
                cols = None if EVEN_V else V - v0
                grad = load_tile(
                    grad_ptr + tl.cast(v0, tl.int64) * stride_ov,
                    stride_ot, stride_ov, rows, cols, 64, BLOCK_V, DTYPE, WIDE,
                )  # fmt: skip
                values = load_tile(values_ptr + v0, V, 1, None, cols, 64, BLOCK_V, DTYPE, False)
                state = load_tile(
                    states_ptr + c0 * V + v0, V, 1, cols_k, cols, BLOCK_W, BLOCK_V, DTYPE, False
                )
                grad_state = load_tile(
                    grad_states_ptr + c0 * V + v0, V, 1, cols_k, cols, BLOCK_W, BLOCK_V, DTYPE, False
                )
                grad_q = tl.dot(grad, tl.trans(state), grad_q, input_precision=PRECISION)
                grad_k = tl.dot(values, tl.trans(grad_state), grad_k, input_precision=PRECISION)
                grad_last += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 1)
            q = load_tile(
                q_ptr + c0 * stride_qk, stride_qt, stride_qk, rows, cols_k, 64, BLOCK_W, DTYPE, WIDE
            )
            k = load_tile(
                k_ptr + c0 * stride_kk, stride_kt, stride_kk, rows, cols_k, 64, BLOCK_W, DTYPE, WIDE
            )
            # Terms of dk that pull the gate's gradient one way, and those that pull it the other.
            grad_q *= (scale * tl.exp2(gate))[:, None]
            minus = grad_k * tl.exp2(last - gate)[:, None]
            carried = tl.sum(tl.sum(minus * k.to(tl.float32), 1), 0)
            inverse = load_tile(m_ptr + at * 4096, 64, 1, None, None, 64, 64, DTYPE, False)
            grad_w = load_tile(grad_w_ptr + c0, K, 1, None, cols_k, 64, BLOCK_W, DTYPE, False)
            plus = tl.dot(tl.trans(inverse), grad_w, input_precision=PRECISION)
            plus *= (beta * tl.exp2(gate))[:, None]
            decay = decay_between(gate, gate, True)
            x = load_tile(grad_l_ptr, 64, 1, None, None, 64, 64, tl.float32, False)
            x = (decay * beta[:, None] * x).to(DTYPE)
            plus = tl.dot(x, k, plus, input_precision=PRECISION)
            y = load_tile(grad_a_ptr, 64, 1, None, None, 64, 64, tl.float32, False)
            grad_q = tl.dot((decay * y).to(DTYPE), k, grad_q, input_precision=PRECISION)
            # Transposed by loading again: a transposed product in registers is not to be trusted.
            decay = decay_between(gate, gate, False)
            x = load_tile(grad_l_ptr, 1, 64, None, None, 64, 64, tl.float32, False)
            x = (decay * beta[None, :] * x).to(DTYPE)
            minus = tl.dot(x, k, minus, input_precision=PRECISION)
            y = load_tile(grad_a_ptr, 1, 64, None, None, 64, 64, tl.float32, False)
            minus = tl.dot((decay * y).to(DTYPE), q, minus, input_precision=PRECISION)
            store_tile(grad_q_ptr + c0, grad_q, stride_dt, 1, rows, cols_k, 64, BLOCK_W, False)
            store_tile(grad_k_ptr + c0, plus + minus, stride_dt, 1, rows, cols_k, 64, BLOCK_W, False)
            grad_gate += tl.sum(q.to(tl.float32) * grad_q + k.to(tl.float32) * (plus - minus), 1)
            grad_gate += tl.where(i == 63, carried, 0.0)

        grad_gate += tl.where(i == 63, tl.exp2(last) * tl.sum(grad_last, 0), 0.0)
        grad_gate = tl.cumsum(grad_gate, 0, reverse=True)
        kept_gate = load_rows(g_ptr, stride_gt, rows, WIDE) >= MIN_GATE
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
    gates, a, m, p, w, values, states = saved
    batch, frames, heads, key_dim = q.shape
    value_dim = v.shape[3]
    _, n_seqs, packed, n_slots = sizes(q, v, g, bounds)
    # Frames of no sequence are written by no program.
    new = torch.empty if bounds is None else torch.zeros
    grad_q, grad_k, grad_v, grad_g, grad_beta = (
        new(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, g, beta)
    )
    grad_initial = torch.empty(
        (n_seqs, heads, key_dim, value_dim), dtype=torch.float32, device=q.device
    )
    if bounds is not None:
        bounds = bounds.contiguous()
    if grad_final_state is not None:
        grad_final_state = grad_final_state.contiguous()
    carried = grad_final_state
    kept = max(1, -(-n_slots // SEGMENTS), -(-FULL_DEVICE // max(1, batch * heads)))
    kept = min(kept, n_slots)
    lead = (batch * kept, heads)
    grad_values = values.new_empty((*lead, CHUNK, value_dim))
    grad_states = values.new_empty((*lead, key_dim, value_dim))
    grad_w = values.new_empty((*lead, CHUNK, key_dim))
    grad_a = values.new_empty((*lead, CHUNK, CHUNK))
    grad_l = torch.empty_like(grad_a)
    options = common(q, v, g, packed)
    tiles = scan_tiles(q, v, n_seqs * heads)
    block_w, block_v = block_of(options["WIDTH"]), block_of(value_dim)
    scan_grid = (n_seqs * heads * triton.cdiv(value_dim, tiles["BLOCK_V"]),)
    numbers = (heads, frames, n_slots)
    with on_device(q):
        for high in range(n_slots, 0, -kept) or (0,):
            low = max(0, high - kept)
            here = batch * (high - low) * heads
            _delta_scan_bwd_kernel[scan_grid](
                grad_out, carried, grad_initial, q, k, bounds, gates, a, w,
                grad_values, grad_states, *numbers, low, high, kept,
                *grad_out.stride(), *q.stride(), *k.stride(), scale,
                V=value_dim, BLOCK_K=block_of(key_dim), WIDE=wide(grad_out, q, k),
                **options, **tiles,
            )  # fmt: skip
            carried = grad_initial
            if here == 0:
                break
            _delta_intra_bwd_kernel[(here,)](
                grad_out, k, v, beta, grad_v, grad_beta, bounds, gates, m, p, values, states,
                grad_values, grad_a, grad_l, grad_w, n_seqs, *numbers, low, high, kept,
                *grad_out.stride(), *k.stride(), *v.stride(), *beta.stride(),
                *grad_v.stride()[:3], *grad_beta.stride(), scale,
                V=value_dim, BLOCK_W=block_w, BLOCK_V=block_v,
                WIDE=wide(grad_out, k, v, beta[..., None]),
                num_warps=4, num_stages=1, **options,
            )  # fmt: skip
            _delta_tile_bwd_kernel[(here * options["TILES"],)](
                grad_out, q, k, g, beta, grad_q, grad_k, grad_g, bounds, gates, m, values, states,
                grad_states, grad_a, grad_l, grad_w, n_seqs, *numbers, low, high, kept,
                *grad_out.stride(), *q.stride(), *k.stride(), *g.stride(), *beta.stride(),
                *grad_q.stride()[:3], *grad_g.stride()[:3], scale,
                V=value_dim, BLOCK_W=block_w, BLOCK_V=block_v,
                WIDE=wide(grad_out, q, k, g, beta[..., None]),
                num_warps=4, num_stages=1, **options,
            )  # fmt: skip
    if initial_state is not None:
        grad_initial = grad_initial.to(initial_state.dtype)
    return grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial
