"""Local dense synthesizer attention, fused: the Triton kernels and their launchers.

Both directions are one launch without atomics. Logits are read in the form of the band matrix
P[t, s] = a[t, s - t + left], in square tiles, so that the weighted sum is a matrix product with
tiles of values. README.md has the derivation.
"""

import torch

from .reference import memory_order

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS and other platforms without Triton keep the eager path
    triton = None

__all__ = ["INTERPRETED", "MAX_HEAD_DIM", "MAX_WINDOW", "launch_backward", "launch_forward"]

MAX_WINDOW = 255
MAX_HEAD_DIM = 256


if triton is not None:

    @triton.jit
    def _bounds(starts_ptr, lengths_ptr, stride_starts, stride_lengths, b, n_frames):
        """First frame and end of sequence b, clamped to [0, T]."""
        start = b * 0
        end = start + n_frames
        if starts_ptr is not None:
            start = tl.load(starts_ptr + b * stride_starts).to(tl.int64)
            start = tl.minimum(tl.maximum(start, 0), n_frames)
        if lengths_ptr is not None:
            end = tl.load(lengths_ptr + b * stride_lengths).to(tl.int64)
            end = tl.minimum(tl.maximum(end, 0), n_frames)
        return start.to(tl.int32), end.to(tl.int32)

    @triton.jit
    def _pointers(ptr, stride_t, stride_c, t0, rel_t, offs_c, WIDE: tl.constexpr):
        """Pointers to frames t0 + rel_t and channels or slots offs_c of a [T, C] array."""
        base = ptr + t0.to(tl.int64) * stride_t
        if WIDE:
            rel_t = rel_t.to(tl.int64)
            offs_c = offs_c.to(tl.int64)
        return base + rel_t * stride_t + offs_c * stride_c

    @triton.jit
    def _band_logits(
        logits_ptr,
        stride_w,
        stride_t,
        t0,
        start,
        end,
        LEFT: tl.constexpr,
        PAD: tl.constexpr,
        W: tl.constexpr,
        RENORMALIZE: tl.constexpr,
        BLOCK: tl.constexpr,
        TILES: tl.constexpr,
        GATHER: tl.constexpr,
        BLOCK_W: tl.constexpr,
        DTYPE: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """Logits of frames t0.. in TILES band tiles [BLOCK, BLOCK], side by side.

        Row r is frame t0 + r, and column c over all tiles is frame t0 - PAD + c of the values: slot
        c - r + LEFT - PAD. Entries that are no slot, and rows outside, are -inf. `logits_ptr` is
        that of the sequence's and head's frame 0.
        """
        row = tl.arange(0, BLOCK)[:, None]
        t = t0 + row
        # One comparison a slot: as an unsigned number, a negative one is above every bound.
        bound = tl.where((t >= start) & (t < end), W, 0).to(tl.uint32)
        slot = tl.arange(0, BLOCK)[None, :] - row + (LEFT - PAD)
        if GATHER:
            # Frames lie side by side: read slot by slot, then shift in registers.
            slots = tl.arange(0, BLOCK_W)[None, :]
            compact = tl.load(
                _pointers(logits_ptr, stride_t, stride_w, t0, row, slots, WIDE),
                mask=slots.to(tl.uint32) < bound,
                other=float("-inf"),
            )
        else:
            ptrs = _pointers(logits_ptr, stride_t, stride_w, t0, row, slot, WIDE)
        tiles = ()
        for j in tl.static_range(TILES):
            mask = (slot + j * BLOCK).to(tl.uint32, bitcast=True) < bound
            if RENORMALIZE:
                source = t0 - PAD + j * BLOCK + tl.arange(0, BLOCK)[None, :]
                mask = mask & (source >= start) & (source < end)
            if GATHER:
                x = tl.gather(compact, tl.where(mask, slot + j * BLOCK, W), axis=1)
                x = x.to(tl.float32)
            else:
                x = tl.load(ptrs + j * BLOCK * stride_w, mask=mask, other=float("-inf"))
                x = x.to(tl.float32)
            # +inf becomes the largest number: such entries share the weight, inf - inf never is.
            x = tl.minimum(x, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
            if DTYPE != tl.float32:
                # A product of zeros moves the tile to the tensor cores' layout, in which four lanes
                # hold a row: its sums take two shuffles, and the products need no copy.
                zeros = tl.zeros([BLOCK, 16], DTYPE)
                x = tl.dot(zeros, tl.trans(zeros), x)
            tiles = tiles + (x,)
        return tiles

    @triton.jit
    def _softmax(xs, TILES: tl.constexpr):
        """Softmax over the columns of tiles side by side; a row of -inf gets zeros."""
        top = tl.max(xs[0], axis=1)
        for j in tl.static_range(1, TILES):
            top = tl.maximum(top, tl.max(xs[j], axis=1))
        top = tl.where(top == float("-inf"), 0.0, top)[:, None]
        es = ()
        total = top * 0.0
        for j in tl.static_range(TILES):
            e = tl.exp2((xs[j] - top) * 1.4426950408889634)
            es = es + (e,)
            total += tl.sum(e, axis=1)[:, None]
        scale = 1.0 / tl.where(total == 0.0, 1.0, total)
        weights = ()
        for j in tl.static_range(TILES):
            weights = weights + (es[j] * scale,)
        return weights

    @triton.jit
    def _kept(seed_ptr, row0, p, W: tl.constexpr, BLOCK: tl.constexpr):
        """Which weights of BLOCK rows dropout keeps: word w, int32 [BLOCK], has slots 32w to 32w+31.

        A function of seed, row and slot alone, so that every program that needs a row, in either
        direction, draws the same mask; row0 counts (b, h, t) rows. A Philox call serves eight slots
        with 16 bits each.
        """
        seed = tl.load(seed_ptr)
        WORDS: tl.constexpr = (W + 31) // 32
        rows = (row0 + tl.arange(0, BLOCK))[:, None]
        part = tl.arange(0, 4)[None, :]
        threshold = tl.full([1, 1], p * 65536.0 + 0.5, tl.float32).to(tl.uint32)
        words = ()
        for w in tl.static_range(WORDS):
            r0, r1, r2, r3 = tl.randint4x(seed, rows * (4 * WORDS) + (4 * w + part))
            bits = ((r0 & 0xFFFF) >= threshold).to(tl.uint32)
            bits |= ((r0 >> 16) >= threshold).to(tl.uint32) << 1
            bits |= ((r1 & 0xFFFF) >= threshold).to(tl.uint32) << 2
            bits |= ((r1 >> 16) >= threshold).to(tl.uint32) << 3
            bits |= ((r2 & 0xFFFF) >= threshold).to(tl.uint32) << 4
            bits |= ((r2 >> 16) >= threshold).to(tl.uint32) << 5
            bits |= ((r3 & 0xFFFF) >= threshold).to(tl.uint32) << 6
            bits |= ((r3 >> 16) >= threshold).to(tl.uint32) << 7
            words = words + (tl.sum(bits << (8 * part).to(tl.uint32), axis=1),)
        return words

    @triton.jit
    def _drop(x, words, first_slot: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
        """A band tile whose column c of row r is slot first_slot + c - r, 0 where not kept."""
        slot = first_slot + tl.arange(0, BLOCK)[None, :] - tl.arange(0, BLOCK)[:, None]
        shift = (slot & 31).to(tl.uint32)
        for w in tl.static_range((W + 31) // 32):
            dropped = ((words[w][:, None] >> shift) & 1) == 0
            x = tl.where(dropped & (slot >> 5 == w), 0.0, x)
        return x

    @triton.jit
    def _load_tile(
        ptr,
        stride_t,
        stride_d,
        t0,
        start,
        end,
        DH: tl.constexpr,
        BLOCK: tl.constexpr,
        BLOCK_D: tl.constexpr,
        DTYPE: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """[BLOCK, BLOCK_D] of a [T, Dh] array from frame t0 on; 0 outside [start, end)."""
        rel_t = tl.arange(0, BLOCK)[:, None]
        offs_d = tl.arange(0, BLOCK_D)[None, :]
        mask = (t0 + rel_t >= start) & (t0 + rel_t < end) & (offs_d < DH)
        ptrs = _pointers(ptr, stride_t, stride_d, t0, rel_t, offs_d, WIDE)
        return tl.load(ptrs, mask=mask, other=0.0).to(DTYPE)

    @triton.jit
    def _store_tile(
        ptr,
        x,
        stride_t,
        stride_d,
        t0,
        start,
        end,
        first,
        n_frames,
        DH: tl.constexpr,
        BLOCK: tl.constexpr,
        BLOCK_D: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """Store [BLOCK, BLOCK_D], of the frames from t0 on, to [first, T); 0 outside [start, end)."""
        rel_t = tl.arange(0, BLOCK)[:, None]
        offs_d = tl.arange(0, BLOCK_D)[None, :]
        t = t0 + rel_t
        x = tl.where((t >= start) & (t < end), x, 0.0).to(ptr.dtype.element_ty)
        ptrs = _pointers(ptr, stride_t, stride_d, t0, rel_t, offs_d, WIDE)
        tl.store(ptrs, x, mask=(t >= first) & (t < n_frames) & (offs_d < DH))

    @triton.jit
    def _store_band(
        ptr,
        tiles,
        stride_w,
        stride_t,
        t0,
        n_frames,
        FIRST_SLOT: tl.constexpr,
        W: tl.constexpr,
        BLOCK: tl.constexpr,
        TILES: tl.constexpr,
        GATHER: tl.constexpr,
        BLOCK_W: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """Store tiles in band form, side by side: column c of row r is slot FIRST_SLOT + c - r."""
        row = tl.arange(0, BLOCK)[:, None]
        t = t0 + row
        bound = tl.where((t >= 0) & (t < n_frames), W, 0).to(tl.uint32)
        if GATHER:
            slot = tl.arange(0, BLOCK_W)[None, :]
            x = tl.zeros([BLOCK, BLOCK_W], ptr.dtype.element_ty)
            for j in tl.static_range(TILES):
                column = slot + row - (FIRST_SLOT + j * BLOCK)
                valid = (column >= 0) & (column < BLOCK)
                part = tl.gather(
                    tiles[j].to(ptr.dtype.element_ty), tl.where(valid, column, 0), axis=1
                )
                x = tl.where(valid, part, x)
            ptrs = _pointers(ptr, stride_t, stride_w, t0, row, slot, WIDE)
            tl.store(ptrs, x, mask=slot.to(tl.uint32) < bound)
        else:
            slot = tl.arange(0, BLOCK)[None, :] - row + FIRST_SLOT
            ptrs = _pointers(ptr, stride_t, stride_w, t0, row, slot, WIDE)
            for j in tl.static_range(TILES):
                mask = (slot + j * BLOCK).to(tl.uint32, bitcast=True) < bound
                tl.store(ptrs + j * BLOCK * stride_w, tiles[j].to(ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def _ldsa_fwd_kernel(
        logits_ptr,
        v_ptr,
        out_ptr,
        starts_ptr,
        lengths_ptr,
        seed_ptr,
        dropout_p,
        n_heads,
        n_frames,
        n_blocks,
        stride_ab,
        stride_ah,
        stride_aw,
        stride_at,
        stride_vb,
        stride_vh,
        stride_vd,
        stride_vt,
        stride_ob,
        stride_oh,
        stride_od,
        stride_ot,
        stride_starts,
        stride_lengths,
        LEFT: tl.constexpr,
        W: tl.constexpr,
        DH: tl.constexpr,
        RENORMALIZE: tl.constexpr,
        BLOCK: tl.constexpr,
        STEPS: tl.constexpr,
        TILES: tl.constexpr,
        PAD: tl.constexpr,
        BLOCK_D: tl.constexpr,
        GATHER: tl.constexpr,
        BLOCK_W: tl.constexpr,
        DTYPE: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """out[t, d] = sum_s P[t, s] v[s, d] with P[t, s] = a[t, s - t + left].

        One program walks over STEPS blocks of BLOCK frames of one head of one sequence; a block's
        windows lie in TILES tiles of values, all but one of which the next block uses again. Reads
        logits [STEPS * BLOCK, W], v [(STEPS + TILES - 1) * BLOCK, Dh]; writes
        out [STEPS * BLOCK, Dh].
        """
        pid = tl.program_id(0).to(tl.int64)
        bh = pid // n_blocks
        b = bh // n_heads
        h = bh % n_heads
        t0 = ((pid % n_blocks) * (STEPS * BLOCK)).to(tl.int32)
        start, end = _bounds(starts_ptr, lengths_ptr, stride_starts, stride_lengths, b, n_frames)
        logits_ptr += b * stride_ab + h * stride_ah
        v_ptr += b * stride_vb + h * stride_vh
        out_ptr += b * stride_ob + h * stride_oh
        if (t0 < end) & (t0 + STEPS * BLOCK > start):
            values = ()
            for j in tl.static_range(TILES - 1):
                values = values + (
                    _load_tile(
                        v_ptr, stride_vt, stride_vd, t0 - PAD + j * BLOCK, start, end,
                        DH, BLOCK, BLOCK_D, DTYPE, WIDE,
                    ),
                )  # fmt: skip
            for i in range(STEPS):
                ti = t0 + i * BLOCK
                window = values + (
                    _load_tile(
                        v_ptr, stride_vt, stride_vd, ti - PAD + (TILES - 1) * BLOCK, start, end,
                        DH, BLOCK, BLOCK_D, DTYPE, WIDE,
                    ),
                )  # fmt: skip
                logits = _band_logits(
                    logits_ptr, stride_aw, stride_at, ti, start, end,
                    LEFT, PAD, W, RENORMALIZE, BLOCK, TILES, GATHER, BLOCK_W, DTYPE, WIDE,
                )  # fmt: skip
                weights = _softmax(logits, TILES)
                if seed_ptr is not None:
                    kept = _kept(seed_ptr, bh * n_frames + ti, dropout_p, W, BLOCK)
                acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
                for j in tl.static_range(TILES):
                    p = weights[j]
                    if seed_ptr is not None:
                        p = _drop(p, kept, LEFT - PAD + j * BLOCK, W, BLOCK)
                    acc = tl.dot(p.to(DTYPE), window[j], acc, input_precision="ieee")
                if seed_ptr is not None:
                    acc = acc / (1.0 - dropout_p)
                _store_tile(
                    out_ptr, acc, stride_ot, stride_od, ti, start, end, 0, n_frames,
                    DH, BLOCK, BLOCK_D, WIDE,
                )  # fmt: skip
                values = ()
                for j in tl.static_range(1, TILES):
                    values = values + (window[j],)
        else:
            zeros = tl.zeros([BLOCK, BLOCK_D], tl.float32)
            for i in range(STEPS):
                _store_tile(
                    out_ptr, zeros, stride_ot, stride_od, t0 + i * BLOCK, start, end, 0, n_frames,
                    DH, BLOCK, BLOCK_D, WIDE,
                )  # fmt: skip

    @triton.jit
    def _ldsa_bwd_kernel(
        grad_ptr,
        logits_ptr,
        v_ptr,
        grad_logits_ptr,
        grad_v_ptr,
        starts_ptr,
        lengths_ptr,
        seed_ptr,
        dropout_p,
        n_heads,
        n_frames,
        n_blocks,
        stride_gb,
        stride_gh,
        stride_gd,
        stride_gt,
        stride_ab,
        stride_ah,
        stride_aw,
        stride_at,
        stride_vb,
        stride_vh,
        stride_vd,
        stride_vt,
        stride_dab,
        stride_dah,
        stride_daw,
        stride_dat,
        stride_dvb,
        stride_dvh,
        stride_dvd,
        stride_dvt,
        stride_starts,
        stride_lengths,
        LEFT: tl.constexpr,
        W: tl.constexpr,
        DH: tl.constexpr,
        RENORMALIZE: tl.constexpr,
        BLOCK: tl.constexpr,
        STEPS: tl.constexpr,
        TILES: tl.constexpr,
        PAD: tl.constexpr,
        BLOCK_D: tl.constexpr,
        GATHER: tl.constexpr,
        BLOCK_W: tl.constexpr,
        DTYPE: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """grad_logits = a (da - sum_k a da), da[t, k] = g[t] . v[t - left + k]; grad_v = P^T g.

        One program walks along one head of one sequence, STEPS + TILES - 1 blocks of BLOCK frames.
        A block's weights give grad_logits, and add to the grad_v of the TILES tiles that its windows
        lie in: a sum is carried for each tile until the last block that reads it. The program owns
        the grad_logits of its first STEPS blocks and the STEPS tiles of grad_v that it sums in
        full, so that nothing is added up in memory: no atomics. The weights are made anew from
        their logits; nothing is saved by the forward pass.
        """
        pid = tl.program_id(0).to(tl.int64)
        bh = pid // n_blocks
        b = bh // n_heads
        h = bh % n_heads
        s0 = ((pid % n_blocks) * (STEPS * BLOCK)).to(tl.int32)  # first frame of grad_v
        t0 = s0 + PAD - (TILES - 1) * BLOCK
        start, end = _bounds(starts_ptr, lengths_ptr, stride_starts, stride_lengths, b, n_frames)
        grad_ptr += b * stride_gb + h * stride_gh
        logits_ptr += b * stride_ab + h * stride_ah
        v_ptr += b * stride_vb + h * stride_vh
        if grad_logits_ptr is not None:
            grad_logits_ptr += b * stride_dab + h * stride_dah
        if grad_v_ptr is not None:
            grad_v_ptr += b * stride_dvb + h * stride_dvh
        if (t0 < end) & (t0 + (STEPS + TILES - 1) * BLOCK > start):
            values = ()
            sums = ()
            for j in tl.static_range(TILES - 1):
                if grad_logits_ptr is not None:
                    values = values + (
                        _load_tile(
                            v_ptr, stride_vt, stride_vd, t0 - PAD + j * BLOCK, start, end,
                            DH, BLOCK, BLOCK_D, DTYPE, WIDE,
                        ),
                    )  # fmt: skip
                sums = sums + (tl.zeros([BLOCK, BLOCK_D], tl.float32),)
            for i in range(STEPS + TILES - 1):
                ti = t0 + i * BLOCK
                logits = _band_logits(
                    logits_ptr, stride_aw, stride_at, ti, start, end,
                    LEFT, PAD, W, RENORMALIZE, BLOCK, TILES, GATHER, BLOCK_W, DTYPE, WIDE,
                )  # fmt: skip
                weights = _softmax(logits, TILES)
                grad = _load_tile(
                    grad_ptr, stride_gt, stride_gd, ti, start, end,
                    DH, BLOCK, BLOCK_D, DTYPE, WIDE,
                )  # fmt: skip
                if seed_ptr is not None:
                    kept = _kept(seed_ptr, bh * n_frames + ti, dropout_p, W, BLOCK)
                if grad_v_ptr is not None:
                    added = ()
                    for j in tl.static_range(TILES):
                        p = weights[j]
                        if seed_ptr is not None:
                            p = _drop(p, kept, LEFT - PAD + j * BLOCK, W, BLOCK)
                        p = tl.trans(p.to(DTYPE))
                        if j < TILES - 1:
                            d_v = tl.dot(p, grad, sums[j], input_precision="ieee")
                        else:
                            d_v = tl.dot(p, grad, input_precision="ieee")
                        added = added + (d_v,)
                    d_v = added[0]
                    if seed_ptr is not None:
                        d_v = d_v / (1.0 - dropout_p)
                    # Of tiles before s0, and of the last, the sums are a neighbour's to store.
                    _store_tile(
                        grad_v_ptr, d_v, stride_dvt, stride_dvd, ti - PAD, start, end,
                        s0, n_frames, DH, BLOCK, BLOCK_D, WIDE,
                    )  # fmt: skip
                    sums = ()
                    for j in tl.static_range(1, TILES):
                        sums = sums + (added[j],)
                if grad_logits_ptr is not None:
                    window = values + (
                        _load_tile(
                            v_ptr, stride_vt, stride_vd, ti - PAD + (TILES - 1) * BLOCK, start, end,
                            DH, BLOCK, BLOCK_D, DTYPE, WIDE,
                        ),
                    )  # fmt: skip
                    if i < STEPS:
                        d_weights = ()
                        total = tl.zeros([BLOCK, 1], tl.float32)
                        for j in tl.static_range(TILES):
                            d_p = tl.dot(grad, tl.trans(window[j]), input_precision="ieee")
                            if seed_ptr is not None:
                                d_p = _drop(d_p, kept, LEFT - PAD + j * BLOCK, W, BLOCK)
                                d_p = d_p / (1.0 - dropout_p)
                            total += tl.sum(weights[j] * d_p, axis=1)[:, None]
                            d_weights = d_weights + (d_p,)
                        d_logits = ()
                        for j in tl.static_range(TILES):
                            d_logits = d_logits + (weights[j] * (d_weights[j] - total),)
                        _store_band(
                            grad_logits_ptr, d_logits, stride_daw, stride_dat, ti, n_frames,
                            LEFT - PAD, W, BLOCK, TILES, GATHER, BLOCK_W, WIDE,
                        )  # fmt: skip
                    values = ()
                    for j in tl.static_range(1, TILES):
                        values = values + (window[j],)
        else:
            no_logits = ()
            for _ in tl.static_range(TILES):
                no_logits = no_logits + (tl.zeros([BLOCK, BLOCK], tl.float32),)
            no_values = tl.zeros([BLOCK, BLOCK_D], tl.float32)
            for i in range(STEPS):
                if grad_logits_ptr is not None:
                    _store_band(
                        grad_logits_ptr, no_logits, stride_daw, stride_dat, t0 + i * BLOCK,
                        n_frames, LEFT - PAD, W, BLOCK, TILES, GATHER, BLOCK_W, WIDE,
                    )  # fmt: skip
                if grad_v_ptr is not None:
                    _store_tile(
                        grad_v_ptr, no_values, stride_dvt, stride_dvd, s0 + i * BLOCK, start, end,
                        0, n_frames, DH, BLOCK, BLOCK_D, WIDE,
                    )  # fmt: skip


# Whether Triton's interpreter was on when the kernels were defined: they then run on the CPU.
INTERPRETED = triton is not None and not isinstance(_ldsa_fwd_kernel, triton.runtime.JITFunction)


def _tiles(window, head_dim, itemsize, backward):
    """(BLOCK, STEPS, TILES, BLOCK_D, num_warps); the tests check every row on a GPU."""
    block = 16 if window <= 33 else 32 if window <= 65 else 64
    tiles = triton.cdiv(block - 1 + window, block)
    block_d = max(16, triton.next_power_of_2(head_dim))
    warps = block // 16
    if backward:
        # The sums that are carried should take 64 registers of a thread at most.
        warps = max(warps, (tiles - 1) * block * block_d // 2048)
    return block, max(2, 128 // block), tiles, block_d, min(warps, 16)


def _pad(left, window, block, tiles):
    """By how many frames a block's first tile of values begins before its first frame.

    At least left; where it fits a multiple of 8, so that tiles load as vectors where time is
    innermost.
    """
    return min(-(-left // 8) * 8, left + (tiles - 1) * block + 1 - window)


def empty_like(x):
    """Uninitialised dense tensor with the shape, dtype, device and memory order of `x`."""
    if x.is_contiguous() or x.permute(0, 3, 1, 2).is_contiguous():
        return torch.empty_like(x)
    return torch.empty_permuted(x.shape, memory_order(x), dtype=x.dtype, device=x.device)


# Compiled kernels, with their grid and numbers, by everything that these depend on: a launch that was
# made before skips Triton's dispatch, which takes longer than a small kernel runs.
_launches = {}


def _launch(kernel, tensors, dropout_p, key, arguments):
    """Run `kernel` on its tensors.

    Args:
        tensors: pointer arguments; the first is not None.
        key: what grid, numbers and constants depend on, with the tensors' dtypes and device.
        arguments: function that gives (grid, numbers, constants, num_warps).
    """
    device = tensors[0].device
    if device.type != "cpu" and device.index != torch.accelerator.current_device_index():
        with torch.accelerator.device_index(device.index):
            return _launch(kernel, tensors, dropout_p, key, arguments)
    # Triton specialises on pointers that are multiples of 16 bytes; others take its own way.
    aligned = not any([x is not None and x.data_ptr() % 16 for x in tensors])
    key = kernel, device, key, tuple([None if x is None else x.dtype for x in tensors])
    known = _launches.get(key) if aligned else None
    if known is not None:
        compiled, grid, rest = known
        compiled[grid](*tensors, dropout_p, *rest)
        return None
    grid, numbers, constants, num_warps = arguments()
    compiled = kernel[grid](*tensors, dropout_p, *numbers, *constants, num_warps=num_warps)
    if aligned and not INTERPRETED:
        if len(_launches) >= 4096:
            _launches.clear()
        _launches[key] = compiled, grid, (*numbers, *constants)
    return None


def _arguments(x_strides, bounds, a_logits, v, left, renormalize, backward):
    """(grid, numbers, constants, num_warps) of a launch; x_strides are the tensors' strides."""
    batch, heads, head_dim, frames = v.shape
    window = a_logits.shape[2]
    block, steps, tiles, block_d, num_warps = _tiles(window, head_dim, v.element_size(), backward)
    pad = _pad(left, window, block, tiles)
    # The backward kernel's blocks begin before frame 0: see there.
    blocks = triton.cdiv(frames + ((tiles - 1) * block - pad if backward else 0), block * steps)
    dtype = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(v.dtype, tl.float32)
    if INTERPRETED:  # its bf16 arithmetic is wrong; fp32 stands in for the tensor cores'
        dtype = tl.float32
    # Offsets inside a tile are 32-bit unless one can pass 2^31 elements.
    wide = any(s[3] * block + s[2] * max(block_d, window) >= 2**31 for s in x_strides)
    numbers = [heads, frames, blocks]
    for strides in x_strides:
        numbers += strides
    numbers += [0 if bound is None else bound.stride(0) for bound in bounds]
    # The frames of a slot side by side in memory are read side by side.
    gather = a_logits.stride(3) == 1 and a_logits.stride(2) != 1
    block_w = max(16, triton.next_power_of_2(window + 1))  # one slot of padding: see _band_logits
    constants = (
        left, window, head_dim, renormalize, block, steps, tiles, pad, block_d, gather, block_w,
        dtype, wide,
    )  # fmt: skip
    return (batch * heads * blocks, 1, 1), numbers, constants, num_warps


def launch_forward(a_logits, v, lengths, starts, seed, left, renormalize, dropout_p):
    """Allocate out [B,H,Dh,T] and run the forward kernel; arguments are checked by the caller."""
    out = empty_like(v)
    if out.numel() == 0:
        return out
    bounds = starts, lengths
    strides = a_logits.stride(), v.stride(), out.stride()
    key = (
        v.shape,
        strides,
        a_logits.shape[2],
        left,
        renormalize,
        tuple([None if x is None else x.stride(0) for x in bounds]),
    )
    _launch(
        _ldsa_fwd_kernel,
        (a_logits, v, out, starts, lengths, seed),
        dropout_p,
        key,
        lambda: _arguments(strides, bounds, a_logits, v, left, renormalize, backward=False),
    )
    return out


def launch_backward(
    grad, a_logits, v, lengths, starts, seed, left, renormalize, dropout_p, need_logits, need_v
):
    """Allocate the gradients of a_logits and v that are needed (else None) and run the kernel."""
    grad_logits = empty_like(a_logits) if need_logits else None
    grad_v = empty_like(v) if need_v else None
    if v.numel() == 0:
        return grad_logits, grad_v
    bounds = starts, lengths
    none = (0, 0, 0, 0)
    strides = (
        grad.stride(),
        a_logits.stride(),
        v.stride(),
        grad_logits.stride() if need_logits else none,
        grad_v.stride() if need_v else none,
    )
    key = (
        v.shape,
        strides,
        a_logits.shape[2],
        left,
        renormalize,
        tuple([None if x is None else x.stride(0) for x in bounds]),
    )
    _launch(
        _ldsa_bwd_kernel,
        (grad, a_logits, v, grad_logits, grad_v, starts, lengths, seed),
        dropout_p,
        key,
        lambda: _arguments(strides, bounds, a_logits, v, left, renormalize, backward=True),
    )
    return grad_logits, grad_v
