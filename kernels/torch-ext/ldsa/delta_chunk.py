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
    def gate_sums(g_ptr, stride_t, stride_n, tile, rows, WIDE: tl.constexpr):
        """Inclusive sums [64] of a tile's gates over a chunk, as powers of two."""
        gate = load_rows(g_ptr + tile * stride_n, stride_t, rows, WIDE)
        return tl.cumsum(tl.maximum(gate, MIN_GATE) * LOG2E, 0)

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
        m_ptr,
        p_ptr,
        t_ptr,
        pair_ptr,
        single_ptr,
        n_seqs,
        n_heads,
        n_frames,
        low_slot,
        n_here,
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
        """What a chunk needs but for the state: M = (I + L)^-1, L = diag(beta) P, and its products.

        One program owns one chunk of one head. Reads q and k [64, K], g [64, tiles], beta [64];
        writes the gate sums G (as powers of two) [tiles, 64], A times scale and T = M diag(beta)
        [64, 64], and of -W = -T Kd, Qg times scale and Kg [64, K] two packed in words and one alone:
        (-W, Qg) and Kg for the forward scan; without a t_ptr, for the backward pass, (Kg, Qg) and
        -W, and M and P instead of T.
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
        q_ptr += b * stride_qb + t * stride_qt + h.to(tl.int64) * stride_qh
        k_ptr += b * stride_kb + t * stride_kt + h.to(tl.int64) * stride_kh
        g_ptr += b * stride_gb + t * stride_gt + h.to(tl.int64) * stride_gh
        beta_ptr += b * stride_bb + t * stride_bt + h.to(tl.int64) * stride_bh
        at = pid.to(tl.int64)
        gates_ptr += at * (TILES * 64)
        pair_ptr += at * (64 * K)
        single_ptr += at * (64 * K)
        i = tl.arange(0, 64)
        EVEN: tl.constexpr = WIDTH % BLOCK_W == 0
        BLOCKS: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W

        p = tl.zeros([64, 64], tl.float32)
        a = tl.zeros([64, 64], tl.float32)
        for tile in range(TILES):
            gate = gate_sums(g_ptr, stride_gt, stride_gn, tile, rows, WIDE)
            tl.store(gates_ptr + tile * 64 + i, gate)
            x = tl.zeros([64, 64], tl.float32)
            y = tl.zeros([64, 64], tl.float32)
            for block in tl.static_range(BLOCKS):
                c0 = tl.cast(tile * WIDTH + block * BLOCK_W, tl.int64)
                cols = None if EVEN else WIDTH - block * BLOCK_W
                keys = load_tile(
                    k_ptr + c0 * stride_kk, stride_kt, stride_kk, rows, cols, 64, BLOCK_W, DTYPE, WIDE
                )
                queries = load_tile(
                    q_ptr + c0 * stride_qk, stride_qt, stride_qk, rows, cols, 64, BLOCK_W, DTYPE, WIDE
                )
                x = tl.dot(keys, tl.trans(keys), x, input_precision=PRECISION)
                y = tl.dot(queries, tl.trans(keys), y, input_precision=PRECISION)
            decay = decay_between(gate, gate, True)
            p += decay * x
            a += decay * y
        store_tile(a_ptr + at * 4096, a * scale, 64, 1, None, None, 64, 64, False)
        p = tl.where(i[:, None] > i[None, :], p, 0.0)
        beta = load_rows(beta_ptr, stride_bt, rows, WIDE)
        lower = beta[:, None] * p
        if p_ptr is not None:
            store_tile(p_ptr + at * 4096, p, 64, 1, None, None, 64, 64, False)

        inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        inverse = _join_blocks(inverse, lower, 1, PRECISION)
        inverse = _join_blocks(inverse, lower, 2, PRECISION)
        inverse = _join_blocks(inverse, lower, 4, PRECISION)
        inverse = _join_blocks(inverse, lower, 8, PRECISION)
        inverse = _join_blocks(inverse, lower, 16, PRECISION)
        inverse = _join_blocks(inverse, lower, 32, PRECISION)
        if m_ptr is not None:
            store_tile(m_ptr + at * 4096, inverse, 64, 1, None, None, 64, 64, False)
        weights = (inverse * beta[None, :]).to(DTYPE)
        if t_ptr is not None:
            store_tile(t_ptr + at * 4096, weights, 64, 1, None, None, 64, 64, False)

        for tile in range(TILES):
            gate = gate_sums(g_ptr, stride_gt, stride_gn, tile, rows, WIDE)
            last = tl.sum(tl.where(i == 63, gate, 0.0), 0)
            forget = tl.exp2(gate)[:, None]
            remain = tl.exp2(last - gate)[:, None]
            for block in tl.static_range(BLOCKS):
                c = tl.cast(tile * WIDTH + block * BLOCK_W, tl.int64)
                cols = None if EVEN else WIDTH - block * BLOCK_W
                keys = load_tile(
                    k_ptr + c * stride_kk,
                    stride_kt, stride_kk, rows, cols, 64, BLOCK_W, tl.float32, WIDE,
                )  # fmt: skip
                queries = load_tile(
                    q_ptr + c * stride_qk,
                    stride_qt, stride_qk, rows, cols, 64, BLOCK_W, tl.float32, WIDE,
                )  # fmt: skip
                queries = (queries * (forget * scale)).to(DTYPE)
                w = tl.dot(weights, (keys * forget).to(DTYPE), input_precision=PRECISION)
                w = (-w).to(DTYPE)
                keys = (keys * remain).to(DTYPE)
                if t_ptr is not None:
                    pair = pack(w, queries)
                    single = keys
                else:
                    pair = pack(keys, queries)
                    single = w
                store_tile(pair_ptr + c, pair, K, 1, None, cols, 64, BLOCK_W, False)
                store_tile(single_ptr + c, single, K, 1, None, cols, 64, BLOCK_W, False)

    @triton.jit
    def pack(x, y):
        """The bits of x and y in one word.

        A loop carries 16-bit numbers in a register each; two in a word need half the registers.
        """
        if x.dtype.primitive_bitwidth == 16:
            low = x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            word = low | (y.to(tl.int16, bitcast=True).to(tl.int32) << 16)
        else:
            low = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
            word = low | (y.to(tl.int32, bitcast=True).to(tl.int64) << 32)
        return word

    @triton.jit
    def unpack(word, DTYPE: tl.constexpr):
        """The x and y that pack has packed."""
        if DTYPE.primitive_bitwidth == 16:
            x = word.to(tl.int16).to(DTYPE, bitcast=True)
            y = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        else:
            x = word.to(tl.int32).to(DTYPE, bitcast=True)
            y = (word >> 32).to(tl.int32).to(DTYPE, bitcast=True)
        return x, y

    @triton.jit
    def chunk_decay(gates_ptr, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
        """e^(G_C) [BLOCK_K, 1] of each key channel: what a whole chunk leaves of the state."""
        c = tl.arange(0, BLOCK_K)
        last = tl.load(gates_ptr + (c // WIDTH) * 64 + 63, mask=c < K, other=0.0)
        return tl.exp2(last)[:, None]

    @triton.jit
    def _delta_scan_fwd_kernel(
        v_ptr,
        out_ptr,
        initial_ptr,
        final_ptr,
        bounds_ptr,
        gates_ptr,
        a_ptr,
        t_ptr,
        wq_ptr,
        k_ptr,
        values_ptr,
        states_ptr,
        n_heads,
        n_frames,
        n_slots,
        stride_vb,
        stride_vt,
        stride_vh,
        stride_vv,
        stride_ob,
        stride_ot,
        stride_oh,
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
        """Vh = T V - W S; out = Qg S + A Vh; S <- e^(G_C) S + Kg^T Vh, chunk after chunk.

        One program owns BLOCK_V value channels of one head of one sequence and keeps their state
        [K, BLOCK_V] in registers. Reads -W, Qg and Kg [64, K], A and T [64, 64], v [64, BLOCK_V] of
        every chunk; writes out [64, BLOCK_V], the final state and, for the backward pass, Vh and
        the state before each chunk. What a chunk reads first is loaded during the chunk before.
        """
        BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
        pid = tl.program_id(0)
        v0 = (pid % BLOCKS_V) * BLOCK_V
        h = (pid // BLOCKS_V) % n_heads
        n = pid // BLOCKS_V // n_heads
        row, slot, first, end = sequence(bounds_ptr, n, n_frames, PACKED)
        b = row.to(tl.int64)
        t = first.to(tl.int64)
        head = h.to(tl.int64)
        v_ptr += b * stride_vb + t * stride_vt + head * stride_vh + v0.to(tl.int64) * stride_vv
        out_ptr += b * stride_ob + t * stride_ot + head * stride_oh + v0
        cols = None if V % BLOCK_V == 0 else V - v0
        keys = None if K == BLOCK_K else K
        which = (n.to(tl.int64) * n_heads + h) * (K * V) + v0
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if initial_ptr is not None:
            state = load_tile(
                initial_ptr + which, V, 1, keys, cols, BLOCK_K, BLOCK_V, tl.float32, False
            )
        at = (b * n_slots + slot) * n_heads + h
        rows = end - first
        here = tl.where(rows > 0, 64, 0)
        wq = load_tile(wq_ptr + at * (64 * K), K, 1, here, keys, 64, BLOCK_K, None, False)
        for _ in range((rows + 63) // 64):
            weights = load_tile(t_ptr + at * 4096, 64, 1, None, None, 64, 64, DTYPE, False)
            v = load_tile(v_ptr, stride_vt, stride_vv, rows, cols, 64, BLOCK_V, DTYPE, WIDE)
            a = load_tile(a_ptr + at * 4096, 64, 1, None, None, 64, 64, DTYPE, False)
            k = load_tile(k_ptr + at * (64 * K), K, 1, None, keys, 64, BLOCK_K, DTYPE, False)
            w, q = unpack(wq, DTYPE)
            s = state.to(DTYPE)
            values = tl.dot(w, s, input_precision=PRECISION)
            out = tl.dot(q, s, input_precision=PRECISION)
            # Factors negated in pairs: tiles that need no arithmetic are copied to shared memory
            # right after their loads, which waits for these before the products above.
            values = tl.dot(-weights, -v, values, input_precision=PRECISION)
            minus = (-values).to(DTYPE)
            out = tl.dot(-a, minus, out, input_precision=PRECISION)
            k = -k
            if SAVE:
                store_tile(
                    states_ptr + at * (K * V) + v0, s, V, 1, keys, cols, BLOCK_K, BLOCK_V, False
                )
                store_tile(
                    values_ptr + at * (64 * V) + v0, values, V, 1, None, cols, 64, BLOCK_V, False
                )
            store_tile(out_ptr, out, stride_ot, 1, rows, cols, 64, BLOCK_V, False)
            state *= chunk_decay(gates_ptr + at * (TILES * 64), K, WIDTH, BLOCK_K)
            at += n_heads
            rows -= 64
            v_ptr += 64 * stride_vt
            out_ptr += 64 * stride_ot
            here = tl.where(rows > 0, 64, 0)
            wq = load_tile(wq_ptr + at * (64 * K), K, 1, here, keys, 64, BLOCK_K, None, False)
            state = tl.dot(tl.trans(k), minus, state, input_precision=PRECISION)
        store_tile(final_ptr + which, state, V, 1, keys, cols, BLOCK_K, BLOCK_V, False)

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

    Vh [B·slots, H, 64, V] and the state before each chunk [B·slots, H, K, V], in the dtype of q
    and v.
    """
    batch, _, _, n_slots = sizes(q, v, g, bounds)
    heads, key_dim = q.shape[2:]
    return tuple(
        torch.empty(
            (batch * n_slots, heads, n, v.shape[3]), dtype=operand_dtype(q, v), device=q.device
        )
        for n in (CHUNK, key_dim)
    )


def launch_intra(q, k, v, g, beta, bounds, scale, low, high, forward):
    """Run the intra-chunk kernel for the slots [low, high) of every row.

    Returns gates [B·(high - low), H, tiles, 64] float32; A, then T if `forward`, else M and P
    [.., 64, 64]; -W and Qg packed, and Kg if `forward`, else Kg and Qg packed, and -W [.., 64, K].
    """
    batch, n_seqs, packed, _ = sizes(q, v, g, bounds)
    heads, key_dim = q.shape[2:]
    lead, dtype = (batch * (high - low), heads), operand_dtype(q, v)
    new = q.new_empty
    gates = new((*lead, g.shape[3], CHUNK), dtype=torch.float32)
    squares = [new((*lead, CHUNK, CHUNK), dtype=dtype) for _ in range(2 if forward else 3)]
    pair = new((*lead, CHUNK, key_dim), dtype=torch.int32 if dtype.itemsize == 2 else torch.int64)
    single = new((*lead, CHUNK, key_dim), dtype=dtype)
    a, *inverse = squares
    m, p, weights = (None, None, *inverse) if forward else (*inverse, None)
    if gates.numel() > 0:
        options = common(q, v, g, packed)
        _delta_intra_fwd_kernel[(lead[0] * heads,)](
            q, k, g, beta, bounds, gates, a, m, p, weights, pair, single,
            n_seqs, heads, q.shape[1], low, high - low,
            *q.stride(), *k.stride(), *g.stride(), *beta.stride(), scale,
            BLOCK_W=block_of(options["WIDTH"]), WIDE=wide(q, k, g, beta[..., None]),
            num_warps=4, num_stages=1, **options,
        )  # fmt: skip
    return (gates, *squares, pair, single)


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


def scan_tiles(q, v, n_programs):
    """Block sizes of a scan's program, and warps; n_programs: sequences times heads."""
    block_k = max(16, triton.next_power_of_2(q.shape[3]))
    block_v = 64 if operand_dtype(q, v).itemsize == 2 else 16
    while block_v > 16 and n_programs * triton.cdiv(v.shape[3], block_v) < 64:
        block_v //= 2
    block_v = min(block_v, max(16, triton.next_power_of_2(v.shape[3])))
    warps = 8 if block_k > 128 else 4
    return dict(BLOCK_K=block_k, BLOCK_V=block_v, num_warps=warps, num_stages=1)


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
    final = torch.empty(
        (n_seqs, heads, key_dim, value_dim), dtype=torch.float32, device=q.device
    )
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
        values, states = saved if save else (None, None)
        gates, a, weights, wq, k_decayed = launch_intra(
            q, k, v, g, beta, bounds, scale, 0, n_slots, True
        )
        tiles = scan_tiles(q, v, n_seqs * heads)
        _delta_scan_fwd_kernel[(n_seqs * heads * triton.cdiv(value_dim, tiles["BLOCK_V"]),)](
            v, out, initial_state, final, bounds, gates, a, weights, wq, k_decayed,
            values, states, heads, frames, n_slots, *v.stride(), *out.stride()[:3],
            V=value_dim, SAVE=save, WIDE=wide(v, out), **options, **tiles,
        )  # fmt: skip
    return out, final, saved
