"""Tile-grouped gated delta rule in chunks of 64 frames: the forward kernels and their launcher.

Two launches: everything inside a chunk that does not need the state (products of keys, the inverse
of the triangular system), for all chunks at once; then a scan that carries the state from chunk to
chunk and writes the output. A few frames take one launch of the recurrence instead. README.md has
the derivation; delta_chunk_bwd.py has the backward pass.
"""

import contextlib

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS and other platforms without Triton keep the PyTorch path
    triton = None

__all__ = ["launch_delta_forward", "new_saved"]

CHUNK = 64
# Up to so many frames the recurrence, one frame after the other, is faster than two launches.
STEP_FRAMES = 4


if triton is not None:
    LOG2E = tl.constexpr(1.4426950408889634)
    # A frame's gate is at least exp(MIN_GATE): sums of 64 then keep their digits in float32.
    MIN_GATE = tl.constexpr(-20.0)

    @triton.jit
    def sequence(bounds_ptr, n, n_frames, PACKED: tl.constexpr):
        """Row, first chunk slot in that row, first frame and end frame of sequence n.

        A chunk's slot says where its intermediates are stored. A packed row has T // 64 + N slots:
        sequence n begins at first // 64 + n, which leaves room for every ragged last chunk.
        """
        first = n * 0
        end = first + n_frames
        if bounds_ptr is not None:
            first = tl.load(bounds_ptr + 2 * n).to(tl.int32)
            first = tl.minimum(tl.maximum(first, 0), n_frames)
            end = tl.load(bounds_ptr + 2 * n + 1).to(tl.int32)
            end = tl.minimum(tl.maximum(end, first), n_frames)
        row = n
        slot = n * 0
        if PACKED:
            row = n * 0
            slot = first // 64 + n
        return row, slot, first, end

    @triton.jit
    def chunk_at(bounds_ptr, row, slot, n_seqs, n_frames, PACKED: tl.constexpr):
        """First frame of the chunk at a slot and the end of its sequence (no chunk: not before)."""
        n = row
        if PACKED:
            n = row * 0
            above = n + n_seqs
            while above - n > 1:
                middle = (n + above) // 2
                _, base, _, _ = sequence(bounds_ptr, middle, n_frames, PACKED)
                if base <= slot:
                    n = middle
                else:
                    above = middle
        _, base, first, end = sequence(bounds_ptr, n, n_frames, PACKED)
        t0 = first + (slot - base) * 64
        return tl.where(slot < base, end, t0), end

    @triton.jit
    def load_tile(
        ptr,
        stride_r,
        stride_c,
        rows,
        cols,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
        DTYPE: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """[ROWS, COLS] from ptr on, 0 from row `rows` and column `cols` on (None: all are there).

        DTYPE None keeps the type.
        """
        r = tl.arange(0, ROWS)
        c = tl.arange(0, COLS)
        if WIDE:
            at = r.to(tl.int64)[:, None] * stride_r + c.to(tl.int64)[None, :] * stride_c
        else:
            at = r[:, None] * stride_r + c[None, :] * stride_c
        if rows is None:
            if cols is None:
                x = tl.load(ptr + at)
            else:
                x = tl.load(ptr + at, mask=(c < cols)[None, :], other=0)
        elif cols is None:
            x = tl.load(ptr + at, mask=(r < rows)[:, None], other=0)
        else:
            x = tl.load(ptr + at, mask=(r < rows)[:, None] & (c < cols)[None, :], other=0)
        if DTYPE is not None:
            x = x.to(DTYPE)
        return x

    @triton.jit
    def store_tile(
        ptr,
        x,
        stride_r,
        stride_c,
        rows,
        cols,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """Store [ROWS, COLS] but for what load_tile leaves out."""
        r = tl.arange(0, ROWS)
        c = tl.arange(0, COLS)
        if WIDE:
            at = r.to(tl.int64)[:, None] * stride_r + c.to(tl.int64)[None, :] * stride_c
        else:
            at = r[:, None] * stride_r + c[None, :] * stride_c
        x = x.to(ptr.dtype.element_ty)
        if rows is None:
            if cols is None:
                tl.store(ptr + at, x)
            else:
                tl.store(ptr + at, x, mask=(c < cols)[None, :])
        elif cols is None:
            tl.store(ptr + at, x, mask=(r < rows)[:, None])
        else:
            tl.store(ptr + at, x, mask=(r < rows)[:, None] & (c < cols)[None, :])

    @triton.jit
    def load_rows(ptr, stride, rows, WIDE: tl.constexpr):
        """float32 [64] of a vector along frames, 0 from row `rows` on."""
        r = tl.arange(0, 64)
        at = r.to(tl.int64) * stride if WIDE else r * stride
        return tl.load(ptr + at, mask=r < rows, other=0.0).to(tl.float32)

    @triton.jit
    def decay_between(gates_rows, gates_cols, LOWER: tl.constexpr):
        """E[i, j] = 2 ** (G_i - G_j) for i >= j, else 0, with i along rows if LOWER, else columns.

        The mask comes before the exponential: a kept exponent is <= 0, so nothing overflows.
        """
        i = tl.arange(0, 64)
        if LOWER:
            exponent = tl.where(
                i[:, None] >= i[None, :], gates_rows[:, None] - gates_cols[None, :], float("-inf")
            )
        else:
            exponent = tl.where(
                i[:, None] <= i[None, :], gates_cols[None, :] - gates_rows[:, None], float("-inf")
            )
        return tl.exp2(exponent)

    @triton.jit
    def halves(x, DTYPE: tl.constexpr):
        """float32 x as a sum of two numbers of a 16-bit DTYPE, which have twice its digits.

        The first is rounded by arithmetic on its bits, for a conversion would not be undone cheaply.
        """
        DROPPED: tl.constexpr = 0x1FFF if DTYPE == tl.float16 else 0xFFFF
        bits = x.to(tl.int32, bitcast=True) + (DROPPED + 1) // 2
        top = (bits & ~DROPPED).to(tl.float32, bitcast=True)
        return top.to(DTYPE), (x - top).to(DTYPE)

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

    @triton.jit
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
        WIDE: tl.constexpr,
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
            gate = load_rows(g_ptr + tile * stride_gn, stride_gt, rows, WIDE)
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
                    WIDE,
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
                    WIDE,
                )
                x = tl.dot(keys, tl.trans(keys), x, input_precision=PRECISION)
                y = tl.dot(queries, tl.trans(keys), y, input_precision=PRECISION)
            decay = decay_between(gate, gate, True)
            p += decay * x
            a += decay * y
        high, low = halves(a * scale, DTYPE)
        store_tile(a_ptr + at * 4096, high, 64, 1, None, None, 64, 64, False)
        if DTYPE != tl.float32:
            store_tile(a_low_ptr + at * 4096, low, 64, 1, None, None, 64, 64, False)
        p = tl.where(i[:, None] > i[None, :], p, 0.0)
        beta = load_rows(beta_ptr, stride_bt, rows, WIDE)
        lower = p * beta[None, :]
        eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        inverse = _join_blocks(eye, lower, 1, PRECISION)
        inverse = _join_blocks(inverse, lower, 2, PRECISION)
        inverse = _join_blocks(inverse, lower, 4, PRECISION)
        inverse = _join_blocks(inverse, lower, 8, PRECISION)
        inverse = _join_blocks(inverse, lower, 16, PRECISION)
        inverse = _join_blocks(inverse, lower, 32, PRECISION)
        high, low = halves(inverse, DTYPE)
        store_tile(inverse_ptr + at * 4096, high, 64, 1, None, None, 64, 64, False)
        if DTYPE != tl.float32:
            store_tile(inverse_low_ptr + at * 4096, low, 64, 1, None, None, 64, 64, False)
        if adjoint_ptr is not None:
            adjoint = eye - beta[:, None] * tl.dot(inverse, p, input_precision=PRECISION)
            high, low = halves(adjoint, DTYPE)
            store_tile(adjoint_ptr + at * 4096, high, 64, 1, None, None, 64, 64, False)
            if DTYPE != tl.float32:
                store_tile(adjoint_low_ptr + at * 4096, low, 64, 1, None, None, 64, 64, False)

    @triton.jit
    def block_gates(
        gates_ptr,
        BLOCK: tl.constexpr,
        K: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK_K: tl.constexpr,
        ONE_GATE: tl.constexpr,
    ):
        """Of one block of key channels: e^G, e^(G_C - G), both for [64, BLOCK_K], and e^(G_C).

        Where the block lies in one tile (ONE_GATE) these are [64, 1], [64, 1] and a scalar, else
        [64, BLOCK_K], [64, BLOCK_K] and [BLOCK_K, 1].
        """
        i = tl.arange(0, 64)[:, None]
        if ONE_GATE:
            gates_ptr += BLOCK * BLOCK_K // WIDTH * 64
            sums = tl.load(gates_ptr + i)
            last = tl.load(gates_ptr + 63)
            remain = tl.exp2(last - sums)
        else:
            c = BLOCK * BLOCK_K + tl.arange(0, BLOCK_K)
            row = c[None, :]
            sums = tl.load(gates_ptr + row // WIDTH * 64 + i, mask=row < K, other=0.0)
            last = tl.load(gates_ptr + row // WIDTH * 64 + 63, mask=row < K, other=0.0)
            remain = tl.exp2(last - sums)
            column = c[:, None]
            last = tl.load(gates_ptr + column // WIDTH * 64 + 63, mask=column < K, other=0.0)
        return tl.exp2(sums), remain, tl.exp2(last)

    @triton.jit
    def precise_dot(
        acc, high_ptr, low_ptr, x, TRANSPOSED: tl.constexpr, DTYPE: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """acc + m x or acc + m^T x, for a stored m [64, 64] and float32 x [64, BLOCK_V], in halves.

        Keys that resemble each other, with beta near 2, make the terms of each sum cancel: rounded
        once to 16 bits they would leave errors that grow from chunk to chunk.
        """
        high = load_tile(high_ptr, 64, 1, None, None, 64, 64, DTYPE, False)
        if TRANSPOSED:
            high = tl.trans(high)
        if DTYPE == tl.float32:
            acc = tl.dot(high, x, acc, input_precision=PRECISION)
        else:
            low = load_tile(low_ptr, 64, 1, None, None, 64, 64, DTYPE, False)
            if TRANSPOSED:
                low = tl.trans(low)
            x, x_low = halves(x, DTYPE)
            acc = tl.dot(low, x, acc)
            acc = tl.dot(high, x_low, acc)
            acc = tl.dot(high, x, acc)
        return acc

    @triton.jit
    def read_state(
        total, x, state, factor, ONE_GATE: tl.constexpr, DTYPE: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """total + (x factor) state; one gate scales the rows of a plain product instead of x."""
        if ONE_GATE:
            total += factor * tl.dot(x, state, input_precision=PRECISION)
        else:
            total = tl.dot((x * factor).to(DTYPE), state, total, input_precision=PRECISION)
        return total

    @triton.jit
    def write_state(
        state, x, values, factor, ONE_GATE: tl.constexpr, HALVES: tl.constexpr,
        DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """state + (x factor)^T values; one gate scales the rows of the values instead of x.

        HALVES: values may cancel in the sum (see precise_dot) and keep twice the digits of DTYPE.
        """
        if ONE_GATE:
            values = values * factor
        else:
            x = (x * factor).to(DTYPE)
        x = tl.trans(x)
        if HALVES and DTYPE != tl.float32:
            values, low = halves(values, DTYPE)
            state = tl.dot(x, low, state)
        return tl.dot(x, values.to(DTYPE), state, input_precision=PRECISION)

    @triton.jit
    def load_block(
        ptr, stride_t, stride_k, rows, BLOCK: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
        DTYPE: tl.constexpr, WIDE: tl.constexpr,
    ):  # fmt: skip
        """[64, BLOCK_K] of q or k: one block of key channels."""
        c0 = tl.cast(BLOCK * BLOCK_K, tl.int64)
        cols = None if (BLOCK + 1) * BLOCK_K <= K else K - BLOCK * BLOCK_K
        return load_tile(
            ptr + c0 * stride_k, stride_t, stride_k, rows, cols, 64, BLOCK_K, DTYPE, WIDE
        )

    @triton.jit
    def load_state(
        ptr, v0, BLOCK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
        BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    ):  # fmt: skip
        """float32 [BLOCK_K, BLOCK_V] of a dense state [K, V]; zeros if there is none."""
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if ptr is not None:
            c0: tl.constexpr = BLOCK * BLOCK_K
            state = load_tile(
                ptr + c0 * V + v0, V, 1, K - c0, V - v0, BLOCK_K, BLOCK_V, tl.float32, False
            )
        return state

    @triton.jit
    def store_state(
        ptr, state, v0, BLOCK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
        BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    ):  # fmt: skip
        """Store one block of a dense state [K, V]."""
        c0: tl.constexpr = BLOCK * BLOCK_K
        rows = None if c0 + BLOCK_K <= K else K - c0
        cols = None if V % BLOCK_V == 0 else V - v0
        store_tile(ptr + c0 * V + v0, state, V, 1, rows, cols, BLOCK_K, BLOCK_V, False)

    @triton.jit
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
        WIDE: tl.constexpr,
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

            k0 = load_block(k_ptr, stride_kt, stride_kk, rows, 0, K, BLOCK_K, DTYPE, WIDE)
            q0 = load_block(q_ptr, stride_qt, stride_qk, rows, 0, K, BLOCK_K, DTYPE, WIDE)
            forget0, remain0, left0 = block_gates(gates, 0, K, WIDTH, BLOCK_K, ONE)
            s = s0.to(DTYPE)
            old = read_state(old, k0, s, forget0, ONE, DTYPE, PRECISION)
            out = read_state(out, q0, s, forget0, ONE, DTYPE, PRECISION)
            if SAVE:
                store_state(states, s, v0, 0, K, V, BLOCK_K, BLOCK_V)
            if NB > 1:
                k1 = load_block(k_ptr, stride_kt, stride_kk, rows, 1, K, BLOCK_K, DTYPE, WIDE)
                q1 = load_block(q_ptr, stride_qt, stride_qk, rows, 1, K, BLOCK_K, DTYPE, WIDE)
                forget1, remain1, left1 = block_gates(gates, 1, K, WIDTH, BLOCK_K, ONE)
                s = s1.to(DTYPE)
                old = read_state(old, k1, s, forget1, ONE, DTYPE, PRECISION)
                out = read_state(out, q1, s, forget1, ONE, DTYPE, PRECISION)
                if SAVE:
                    store_state(states, s, v0, 1, K, V, BLOCK_K, BLOCK_V)
            if NB > 2:
                k2 = load_block(k_ptr, stride_kt, stride_kk, rows, 2, K, BLOCK_K, DTYPE, WIDE)
                q2 = load_block(q_ptr, stride_qt, stride_qk, rows, 2, K, BLOCK_K, DTYPE, WIDE)
                forget2, remain2, left2 = block_gates(gates, 2, K, WIDTH, BLOCK_K, ONE)
                s = s2.to(DTYPE)
                old = read_state(old, k2, s, forget2, ONE, DTYPE, PRECISION)
                out = read_state(out, q2, s, forget2, ONE, DTYPE, PRECISION)
                if SAVE:
                    store_state(states, s, v0, 2, K, V, BLOCK_K, BLOCK_V)
            if NB > 3:
                k3 = load_block(k_ptr, stride_kt, stride_kk, rows, 3, K, BLOCK_K, DTYPE, WIDE)
                q3 = load_block(q_ptr, stride_qt, stride_qk, rows, 3, K, BLOCK_K, DTYPE, WIDE)
                forget3, remain3, left3 = block_gates(gates, 3, K, WIDTH, BLOCK_K, ONE)
                s = s3.to(DTYPE)
                old = read_state(old, k3, s, forget3, ONE, DTYPE, PRECISION)
                out = read_state(out, q3, s, forget3, ONE, DTYPE, PRECISION)
                if SAVE:
                    store_state(states, s, v0, 3, K, V, BLOCK_K, BLOCK_V)

            v = load_tile(v_ptr, stride_vt, stride_vv, rows, cols, 64, BLOCK_V, DTYPE, WIDE)
            beta = load_rows(beta_ptr, stride_bt, rows, WIDE)
            rest = v.to(tl.float32) - old
            errors = precise_dot(
                tl.zeros([64, BLOCK_V], tl.float32), inverse_ptr + at * 4096,
                inverse_low_ptr + at * 4096, rest, False, DTYPE, PRECISION,
            )  # fmt: skip
            if SAVE:
                store_tile(
                    errors_ptr + at * (64 * V) + v0, errors, V, 1, None, cols, 64, BLOCK_V, False
                )
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
            store_tile(out_ptr, out, stride_ot, 1, rows, cols, 64, BLOCK_V, False)
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

    @triton.jit
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


# Whether Triton's interpreter was on when the kernels were defined: they then run on the CPU.
INTERPRETED = triton is not None and not isinstance(
    _delta_scan_fwd_kernel, triton.runtime.JITFunction
)


def on_device(x):
    """Launches go to the current device: make it that of `x` for their time."""
    if x.device.type == "cpu":
        return contextlib.nullcontext()
    return torch.accelerator.device_index(x.device.index)


def sizes(q, v, g, bounds):
    """Rows B, sequences N, whether they are packed in one row, and chunk slots in a row."""
    batch, frames = q.shape[:2]
    n_seqs = batch if bounds is None else bounds.shape[0]
    packed = n_seqs != batch
    n_slots = frames // CHUNK + n_seqs if packed else -(-frames // CHUNK)
    return batch, n_seqs, packed, n_slots


def operand_dtype(q, v):
    """dtype of the matrix products' operands and of what is kept between kernels."""
    if INTERPRETED:  # its bf16 arithmetic is wrong; float32 stands in for the tensor cores'
        return torch.float32
    return torch.promote_types(q.dtype, v.dtype)


def new_saved(q, v, g, bounds):
    """Uninitialised tensors that the forward pass fills for the backward pass.

    Gate sums G [B·slots, H, tiles, 64] float32; A and both halves of M [.., 64, 64], the errors E
    [.., 64, V] and the state before each chunk [.., K, V] in the dtype of q and v.
    """
    batch, _, _, n_slots = sizes(q, v, g, bounds)
    heads, key_dim = q.shape[2:]
    value_dim, lead, dtype = v.shape[3], (batch * n_slots, heads), operand_dtype(q, v)
    shapes = [(CHUNK, CHUNK)] * 3 + [(CHUNK, value_dim), (key_dim, value_dim)]
    gates = torch.empty((*lead, g.shape[3], CHUNK), dtype=torch.float32, device=q.device)
    return (gates, *(torch.empty((*lead, *s), dtype=dtype, device=q.device) for s in shapes))


def wide(*tensors):
    """Whether an offset inside a tile can pass 2^31 elements and needs 64-bit arithmetic."""
    return any(x.stride(1) * 64 + x.stride(-1) * 256 >= 2**31 for x in tensors)


def block_of(size):
    """Channels in a block of matrix products: a power of two from 16 to 64."""
    return min(64, max(16, triton.next_power_of_2(size)))


def common(q, v, g, packed):
    """Compile-time arguments that every chunk kernel takes."""
    dtype = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(
        operand_dtype(q, v), tl.float32
    )
    cuda = q.device.type == "cuda" and torch.version.hip is None
    return dict(
        K=q.shape[3],
        TILES=g.shape[3],
        WIDTH=q.shape[3] // g.shape[3],
        PACKED=packed,
        DTYPE=dtype,
        # Three TF32 products lose no more than float32 does, and run on tensor cores.
        PRECISION="tf32x3" if cuda else "ieee",
    )


def _shared_memory(device):
    """Bytes of shared memory that one program can have."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def scan_tiles(q, v, n_programs):
    """Block sizes of a scan's program, warps and stages; n_programs: sequences times heads."""
    value_dim = v.shape[3]
    half = operand_dtype(q, v).itemsize == 2
    block_v = 32 if half and n_programs * value_dim >= 32 * 64 else 16
    return dict(
        BLOCK_K=block_of(q.shape[3]),
        BLOCK_V=min(block_v, max(16, triton.next_power_of_2(value_dim))),
        # With more warps Triton lets two groups compute the same 64 rows of a product.
        num_warps=4,
        num_stages=2 if half and _shared_memory(q.device) > 210_000 else 1,
    )


def launch_delta_forward(q, k, v, g, beta, initial_state, bounds, scale, save):
    """Run the forward pass; arguments are checked by the caller.

    Args:
        q, k: [B,T,H,K]. v: [B,T,H,V]. g: [B,T,H,tiles]. beta: [B,T,H]. Any strides.
        initial_state: [N,H,K,V] or None.
        bounds: integer [N,2], first and end frame of each sequence in its row (row n, or row 0 of
            B = 1 when N > 1, in order and apart), or None if every row is one full sequence.
        save: whether to keep what launch_delta_backward needs.

    Returns:
        out [B,T,H,V], dense, in v's dtype; final state [N,H,K,V] float32; the tensors of new_saved,
        or an empty tuple.
    """
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
                BLOCK_W=block_of(options["WIDTH"]), WIDE=wide(q, k, g, beta[..., None]),
                num_warps=4, num_stages=1, **options,
            )  # fmt: skip
        tiles = scan_tiles(q, v, n_seqs * heads)
        _delta_scan_fwd_kernel[(n_seqs * heads * triton.cdiv(value_dim, tiles["BLOCK_V"]),)](
            q, k, v, beta, out, initial_state, final, bounds, gates, a, a_low, inverse,
            inverse_low, errors, states, heads, frames, n_slots,
            *q.stride(), *k.stride(), *v.stride(), *beta.stride(), *out.stride()[:3], scale,
            V=value_dim, SAVE=save, WIDE=wide(q, k, v, beta[..., None]), **options, **tiles,
        )  # fmt: skip
    return out, final, saved
