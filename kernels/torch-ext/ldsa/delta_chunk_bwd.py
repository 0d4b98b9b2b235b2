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
    launch_intra,
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
        chunk_at,
        chunk_decay,
        decay_between,
        gate_sums,
        load_rows,
        load_tile,
        sequence,
        store_tile,
        unpack,
    )

    @triton.jit
    def _delta_scan_bwd_kernel(
        grad_ptr,
        grad_final_ptr,
        grad_initial_ptr,
        bounds_ptr,
        gates_ptr,
        a_ptr,
        kq_ptr,
        w_ptr,
        grad_values_ptr,
        grad_states_ptr,
        n_heads,
        n_frames,
        low_slot,
        n_here,
        stride_ob,
        stride_ot,
        stride_oh,
        stride_ov,
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
        the chunks in slots [low_slot, low_slot + n_here). Reads -W, Qg and Kg [64, K], A [64, 64]
        and grad [64, BLOCK_V] of every chunk; writes dVh and the gradient of the state after each
        chunk. What a chunk reads first is loaded during the chunk before.
        """
        BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
        pid = tl.program_id(0)
        v0 = (pid % BLOCKS_V) * BLOCK_V
        h = (pid // BLOCKS_V) % n_heads
        n = pid // BLOCKS_V // n_heads
        row, slot, first, end = sequence(bounds_ptr, n, n_frames, PACKED)
        # Chunks of this sequence, counted from its first, that the segment holds.
        low = tl.maximum(low_slot - slot, 0)
        high = tl.minimum(low_slot + n_here - slot, (end - first + 63) // 64)
        left = tl.maximum(high - low, 0)
        b = row.to(tl.int64)
        t0 = first + (high - 1) * 64
        head = h.to(tl.int64)
        grad_ptr += b * stride_ob + head * stride_oh + v0.to(tl.int64) * stride_ov
        grad_ptr += t0.to(tl.int64) * stride_ot
        cols = None if V % BLOCK_V == 0 else V - v0
        keys = None if K == BLOCK_K else K
        which = (n.to(tl.int64) * n_heads + h) * (K * V) + v0
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if grad_final_ptr is not None:
            state = load_tile(
                grad_final_ptr + which, V, 1, keys, cols, BLOCK_K, BLOCK_V, tl.float32, False
            )
        at = (b * n_here + slot + high - 1 - low_slot) * n_heads + h
        here = tl.where(left > 0, 64, 0)
        kq = load_tile(kq_ptr + at * (64 * K), K, 1, here, keys, 64, BLOCK_K, None, False)
        rows = end - t0
        for _ in range(left):
            a = load_tile(a_ptr + at * 4096, 64, 1, None, None, 64, 64, DTYPE, False)
            grad = load_tile(grad_ptr, stride_ot, stride_ov, rows, cols, 64, BLOCK_V, DTYPE, WIDE)
            w = load_tile(w_ptr + at * (64 * K), K, 1, None, keys, 64, BLOCK_K, DTYPE, False)
            k, q = unpack(kq, DTYPE)
            s = state.to(DTYPE)
            values = tl.dot(k, s, input_precision=PRECISION)
            values = tl.dot(tl.trans(a), grad, values, input_precision=PRECISION)
            minus = (-values).to(DTYPE)
            # Negated together with the values: see the forward scan.
            w = -w
            store_tile(
                grad_states_ptr + at * (K * V) + v0, s, V, 1, keys, cols, BLOCK_K, BLOCK_V, False
            )
            store_tile(
                grad_values_ptr + at * (64 * V) + v0, values, V, 1, None, cols, 64, BLOCK_V, False
            )
            state *= chunk_decay(gates_ptr + at * (TILES * 64), K, WIDTH, BLOCK_K)
            state = tl.dot(tl.trans(q), grad, state, input_precision=PRECISION)
            at -= n_heads
            left -= 1
            rows = 64
            grad_ptr -= 64 * stride_ot
            here = tl.where(left > 0, 64, 0)
            kq = load_tile(kq_ptr + at * (64 * K), K, 1, here, keys, 64, BLOCK_K, None, False)
            state = tl.dot(tl.trans(w), minus, state, input_precision=PRECISION)
        store_tile(grad_initial_ptr + which, state, V, 1, keys, cols, BLOCK_K, BLOCK_V, False)

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
        n_here,
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
        kept = (b * n_here + slot - low_slot) * n_heads + h
        gates_ptr += kept * (TILES * 64)
        values_ptr += at * (64 * V)
        states_ptr += at * (K * V)
        grad_values_ptr += kept * (64 * V)
        grad_w_ptr += kept * (64 * K)
        i = tl.arange(0, 64)
        EVEN_W: tl.constexpr = WIDTH % BLOCK_W == 0
        EVEN_V: tl.constexpr = V % BLOCK_V == 0
        BLOCKS: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
        beta = load_rows(beta_ptr, stride_bt, rows, WIDE)
        inverse = load_tile(m_ptr + kept * 4096, 64, 1, None, None, 64, 64, DTYPE, False)

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
        p = load_tile(p_ptr + kept * 4096, 64, 1, None, None, 64, 64, tl.float32, False)
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
        n_here,
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
        kept = (b * n_here + slot - low_slot) * n_heads + h
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
        gate = tl.load(gates_ptr + kept * (TILES * 64) + tile * 64 + i)
        last = tl.load(gates_ptr + kept * (TILES * 64) + tile * 64 + 63)
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
            inverse = load_tile(m_ptr + kept * 4096, 64, 1, None, None, 64, 64, DTYPE, False)
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
    values, states = saved
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
    span = max(1, -(-n_slots // SEGMENTS), -(-FULL_DEVICE // max(1, batch * heads)))
    options = common(q, v, g, packed)
    tiles = scan_tiles(q, v, n_seqs * heads)
    blocks = dict(BLOCK_W=block_of(options["WIDTH"]), BLOCK_V=block_of(value_dim))
    scan_grid = (n_seqs * heads * triton.cdiv(value_dim, tiles["BLOCK_V"]),)
    with on_device(q):
        for high in range(n_slots if grad_state.numel() > 0 else 0, 0, -span):
            low = max(0, high - span)
            here = batch * (high - low) * heads
            gates, a, m, p, kq, w = launch_intra(
                q, k, v, g, beta, bounds, scale, low, high, False
            )
            # After the scan dA takes the place of A and dW that of -W.
            grad_values = values.new_empty((here, CHUNK, value_dim))
            grad_states = values.new_empty((here, key_dim, value_dim))
            grad_l = torch.empty_like(p)
            _delta_scan_bwd_kernel[scan_grid](
                grad_out, grad_state, grad_state, bounds, gates, a, kq, w,
                grad_values, grad_states, heads, frames, low, high - low, *grad_out.stride(),
                V=value_dim, WIDE=wide(grad_out), **options, **tiles,
            )  # fmt: skip
            _delta_intra_bwd_kernel[(here,)](
                grad_out, k, v, beta, grad_v, grad_beta, bounds, gates, m, p, values, states,
                grad_values, a, grad_l, w, n_seqs, heads, frames, n_slots, low, high - low,
                *grad_out.stride(), *k.stride(), *v.stride(), *beta.stride(),
                *grad_v.stride()[:3], *grad_beta.stride(), scale,
                WIDE=wide(grad_out, k, v, beta[..., None]), V=value_dim,
                num_warps=4, num_stages=1, **options, **blocks,
            )  # fmt: skip
            _delta_tile_bwd_kernel[(here * options["TILES"],)](
                grad_out, q, k, g, beta, grad_q, grad_k, grad_g, bounds, gates, m, values, states,
                grad_states, a, grad_l, w, n_seqs, heads, frames, n_slots, low, high - low,
                *grad_out.stride(), *q.stride(), *k.stride(), *g.stride(), *beta.stride(),
                *grad_q.stride()[:3], *grad_g.stride()[:3], scale,
                WIDE=wide(grad_out, q, k, g, beta[..., None]), V=value_dim,
                num_warps=4, num_stages=1, **options, **blocks,
            )  # fmt: skip
    if initial_state is not None:
        grad_state = grad_state.to(initial_state.dtype)
    return grad_q, grad_k, grad_v, grad_g, grad_beta, grad_state
