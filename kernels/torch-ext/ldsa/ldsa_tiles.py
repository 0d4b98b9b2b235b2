"""What the fused kernels are made of: tiles of frames, rings of slots, the softmax, dropout.

README.md has the derivation. Shapes: a tile is [BLOCK, BLOCK_C] of a [T, C] array, a ring tile
[BLOCK, BLOCK] of weights; t0 is a block's first frame, [start, end) the sequence's frames.
"""

try:
    import triton
    import triton.language as tl
except ImportError:  # the kernels that use these are not there either
    triton = None

__all__ = [
    "align",
    "band_tile",
    "band_weights",
    "drop",
    "dropout_keys",
    "in_first_tile",
    "kept_tiles",
    "load_logits",
    "load_tile",
    "load_values",
    "pin",
    "sequence_bounds",
    "softmax",
    "store_logits",
    "store_tile",
]


if triton is not None:

    @triton.jit
    def sequence_bounds(starts_ptr, lengths_ptr, stride_starts, stride_lengths, b, n_frames):
        """First frame and end of sequence b: 0 <= start <= end <= T."""
        start = b * 0
        end = start + n_frames
        if lengths_ptr is not None:
            end = tl.load(lengths_ptr + b * stride_lengths).to(tl.int64)
            end = tl.minimum(tl.maximum(end, 0), n_frames)
        if starts_ptr is not None:
            start = tl.load(starts_ptr + b * stride_starts).to(tl.int64)
            start = tl.minimum(tl.maximum(start, 0), end)
        return start.to(tl.int32), end.to(tl.int32)

    @triton.jit
    def _inside(t, start, end):
        """Whether start <= t < end, as one comparison: a negative number is a large unsigned."""
        return (t - start).to(tl.uint32, bitcast=True) < (end - start).to(tl.uint32, bitcast=True)

    @triton.jit
    def align(stride, ALIGN: tl.constexpr):
        """`stride`, which is a multiple of ALIGN, in a form that shows it to the compiler."""
        return stride // ALIGN * ALIGN

    @triton.jit
    def _tile(ptr, stride_t, stride_c, t0, c0, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
        """Pointers to frames t0.. and channels c0.. of a [T, C] array, [BLOCK, BLOCK_C]."""
        offs_t = tl.arange(0, BLOCK)[:, None].to(tl.int64)
        offs_c = tl.arange(0, BLOCK_C)[None, :].to(tl.int64)
        first = tl.full([], 0, tl.int64) + c0  # c0 is a number or of 32 bits
        base = ptr + t0.to(tl.int64) * stride_t + first * stride_c
        return base + (offs_t * stride_t + offs_c * stride_c)

    @triton.jit
    def load_tile(
        ptr,
        stride_t,
        stride_c,
        t0,
        c0,
        start,
        end,
        OTHER: tl.constexpr,
        C: tl.constexpr,
        BLOCK: tl.constexpr,
        BLOCK_C: tl.constexpr,
        VECTOR: tl.constexpr,
    ):
        """[BLOCK, BLOCK_C] of a [T, C] array from (t0, c0) on; OTHER outside [start, end) and C."""
        t = t0 + tl.arange(0, BLOCK)[:, None]
        inside_c = c0 + tl.arange(0, BLOCK_C)[None, :] < C
        ptrs = _tile(ptr, stride_t, stride_c, t0, c0, BLOCK, BLOCK_C)
        if VECTOR > 1:
            # Frames lie side by side: a mask along them would load them one by one.
            if (t0 >= start) & (t0 + BLOCK <= end):
                x = tl.load(ptrs, mask=inside_c, other=OTHER)
            else:
                x = tl.load(ptrs, mask=_inside(t, start, end) & inside_c, other=OTHER)
        else:
            x = tl.load(ptrs, mask=_inside(t, start, end) & inside_c, other=OTHER)
        return x

    @triton.jit
    def pin(x, PIN: tl.constexpr):
        """x, defined where it is used.

        Triton copies the operand of a product to shared memory right after its definition; if that
        is a load, the program waits there, before its other loads have begun. PIN: on NVIDIA GPUs,
        whose assembly this is.
        """
        if PIN:
            if x.dtype.primitive_bitwidth == 16:
                x = tl.inline_asm_elementwise(
                    "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
                )
            else:
                x = tl.inline_asm_elementwise(
                    "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1
                )
        return x

    @triton.jit
    def load_values(
        ptr,
        stride_t,
        stride_c,
        t0,
        c0,
        start,
        end,
        FIRST: tl.constexpr,
        LAST: tl.constexpr,
        C: tl.constexpr,
        BLOCK: tl.constexpr,
        BLOCK_C: tl.constexpr,
        VECTOR: tl.constexpr,
        DTYPE: tl.constexpr,
    ):
        """Tiles FIRST to LAST, from frame t0 on, of a [T, C] array; 0 outside."""
        tiles = ()
        for j in tl.static_range(FIRST, LAST + 1):
            x = load_tile(
                ptr, stride_t, stride_c, t0 + j * BLOCK, c0, start, end, 0.0,
                C, BLOCK, BLOCK_C, VECTOR,
            )  # fmt: skip
            tiles = tiles + (x.to(DTYPE),)
        return tiles

    @triton.jit
    def store_tile(
        ptr,
        x,
        stride_t,
        stride_c,
        t0,
        c0,
        start,
        end,
        n_frames,
        C: tl.constexpr,
        BLOCK: tl.constexpr,
        BLOCK_C: tl.constexpr,
        VECTOR: tl.constexpr,
    ):
        """Store x [BLOCK, BLOCK_C] from (t0, c0) on; 0 to the frames outside [start, end)."""
        t = t0 + tl.arange(0, BLOCK)[:, None]
        inside_c = c0 + tl.arange(0, BLOCK_C)[None, :] < C
        inside = _inside(t, start, end)
        ptrs = _tile(ptr, stride_t, stride_c, t0, c0, BLOCK, BLOCK_C)
        x = x.to(ptr.dtype.element_ty)
        if VECTOR > 1:
            if (t0 >= start) & (t0 + BLOCK <= end):
                tl.store(ptrs, x, mask=inside_c)
            else:
                outside = (t >= 0) & (t < n_frames)
                tl.store(ptrs, tl.where(inside, x, 0.0), mask=outside & inside_c)
        else:
            tl.store(ptrs, x, mask=inside & inside_c)
            if (t0 < start) | (t0 + BLOCK > end):
                zeros = tl.zeros([BLOCK, BLOCK_C], ptr.dtype.element_ty)
                outside = (t >= 0) & (t < n_frames) & ~inside
                tl.store(ptrs, zeros, mask=outside & inside_c)

    @triton.jit
    def _slots(
        row, column, j: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr
    ):
        """Slots of rows and columns of ring tile j: in row t, a column is frame t - left + slot of
        the values. Numbers outside 0 .. W-1 are no slots.
        """
        slot = column - row + (j * BLOCK - SHIFT)
        if j == 0:
            slot = tl.where(slot < 0, slot + RING * BLOCK, slot)
        return slot

    @triton.jit
    def _tile_slots(j: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr):
        """_slots of all of ring tile j, [BLOCK, BLOCK]."""
        row = tl.arange(0, BLOCK)[:, None]
        return _slots(row, tl.arange(0, BLOCK)[None, :], j, SHIFT, BLOCK, RING)

    @triton.jit
    def load_logits(
        ptr,
        stride_t,
        stride_w,
        t0,
        start,
        end,
        LEFT: tl.constexpr,
        SHIFT: tl.constexpr,
        W: tl.constexpr,
        RENORMALIZE: tl.constexpr,
        BLOCK: tl.constexpr,
        RING: tl.constexpr,
        BLOCK_W: tl.constexpr,
        TIME_LAST: tl.constexpr,
        VECTOR: tl.constexpr,
    ):
        """Logits of frames t0.. as RING ring tiles; if TIME_LAST as they lie, [BLOCK, BLOCK_W]."""
        if TIME_LAST:
            tiles = (
                load_tile(
                    ptr, stride_t, stride_w, t0, 0, start, end, float("-inf"),
                    W, BLOCK, BLOCK_W, VECTOR,
                ),
            )  # fmt: skip
        else:
            # In one dimension, so that a warp reads whole rows.
            row = tl.arange(0, BLOCK * BLOCK) // BLOCK
            column = tl.arange(0, BLOCK * BLOCK) % BLOCK
            t = t0 + row
            # One comparison a slot: as an unsigned number, a negative one is above every bound.
            bound = tl.where(_inside(t, start, end), W, 0).to(tl.uint32)
            base = ptr + t0.to(tl.int64) * stride_t
            tiles = ()
            for j in tl.static_range(RING):
                slot = _slots(row, column, j, SHIFT, BLOCK, RING)
                mask = slot.to(tl.uint32, bitcast=True) < bound
                if RENORMALIZE:
                    mask = mask & _inside(t + slot - LEFT, start, end)
                ptrs = base + (row.to(tl.int64) * stride_t + slot.to(tl.int64) * stride_w)
                x = tl.load(ptrs, mask=mask, other=float("-inf"))
                tiles = tiles + (x.reshape(BLOCK, BLOCK),)
        return tiles

    @triton.jit
    def softmax(
        tiles,
        t0,
        start,
        end,
        LEFT: tl.constexpr,
        SHIFT: tl.constexpr,
        W: tl.constexpr,
        RENORMALIZE: tl.constexpr,
        BLOCK: tl.constexpr,
        RING: tl.constexpr,
        TIME_LAST: tl.constexpr,
        DTYPE: tl.constexpr,
    ):
        """Weights of frames t0.. as RING ring tiles; a row whose logits are all -inf gets zeros.

        And what makes them of logits: their greatest, and one over the sum.
        """
        xs = ()
        for j in tl.static_range(RING):
            if TIME_LAST:
                slot = _tile_slots(j, SHIFT, BLOCK, RING)
                mask = slot.to(tl.uint32, bitcast=True) < W
                if RENORMALIZE:
                    t = t0 + tl.arange(0, BLOCK)[:, None]
                    mask = mask & _inside(t + slot - LEFT, start, end)
                x = tl.gather(tiles[0], tl.where(mask, slot, W), axis=1).to(tl.float32)
            else:
                x = tiles[j].to(tl.float32)
            # +inf becomes the largest number: such entries share the weight, inf - inf never is.
            x = tl.minimum(x, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
            # A product of zeros moves the tile to the tensor cores' layout, in which four lanes
            # hold a row: its sums take two shuffles, and the products need no copy.
            zeros = tl.zeros([BLOCK, 16], DTYPE)
            xs = xs + (tl.dot(zeros, tl.trans(zeros), x),)
        top = tl.max(xs[0], axis=1)
        for j in tl.static_range(1, RING):
            top = tl.maximum(top, tl.max(xs[j], axis=1))
        top = tl.where(top == float("-inf"), 0.0, top)[:, None]
        es = ()
        total = top * 0.0
        for j in tl.static_range(RING):
            e = tl.exp2((xs[j] - top) * 1.4426950408889634)
            es = es + (e,)
            total += tl.sum(e, axis=1)[:, None]
        scale = 1.0 / tl.where(total == 0.0, 1.0, total)
        weights = ()
        for j in tl.static_range(RING):
            weights = weights + (es[j] * scale,)
        return weights, top, scale

    @triton.jit
    def in_first_tile(SHIFT: tl.constexpr, BLOCK: tl.constexpr):
        """Where ring tile 0 belongs to the first tile of values; elsewhere to the last."""
        return tl.arange(0, BLOCK)[None, :] - tl.arange(0, BLOCK)[:, None] >= SHIFT

    @triton.jit
    def band_tile(
        tiles, j: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr
    ):
        """Tile j of the band matrix, 0 <= j <= RING, from ring tiles."""
        if j == 0:
            x = tl.where(in_first_tile(SHIFT, BLOCK), tiles[0], 0.0)
        elif j == RING:
            x = tl.where(in_first_tile(SHIFT, BLOCK), 0.0, tiles[0])
        else:
            x = tiles[j]
        return x

    @triton.jit
    def _mixed(x):
        """uint32 to uint32, upper bits depend on all of x: MurmurHash3's finalizer without its last
        step, which mixes the lower ones.
        """
        x = (x ^ (x >> 16)) * tl.full([], 0x85EBCA6B, tl.uint32)
        return (x ^ (x >> 13)) * tl.full([], 0xC2B2AE35, tl.uint32)

    @triton.jit
    def dropout_keys(seed, bh):
        """Two random uint32 numbers for head and sequence `bh`; seed: int64, or where one is."""
        if seed.dtype.is_ptr():
            seed = tl.load(seed)
        golden = tl.full([], 0x9E3779B9, tl.uint32)
        first = _mixed(seed.to(tl.uint32) ^ _mixed(bh.to(tl.uint32)))
        # Mixed twice: else `_mixed(t ^ first)` cancels it in the same frame of all heads.
        return first, _mixed(_mixed((seed >> 32).to(tl.uint32) ^ first) + golden)

    @triton.jit
    def kept_slots(keys, t, slot, p):
        """Which weights of frames t and slots dropout keeps, bool of their shape.

        A function of the keys, frame and slot alone, so that every program that needs a weight, in
        either direction, draws the same mask. Each slot is hashed by itself, where its weight is:
        numbers that one call makes for several would have to be moved there.
        """
        first, second = keys
        row = _mixed(t.to(tl.uint32, bitcast=True) ^ first) ^ second
        threshold = tl.full([1, 1], p * 4294967296.0, tl.float32).to(tl.uint32)
        x = row + slot.to(tl.uint32, bitcast=True) * tl.full([], 0x9E3779B9, tl.uint32)
        return _mixed(x) >= threshold

    @triton.jit
    def kept_tiles(
        keys,
        t0,
        p,
        SHIFT: tl.constexpr,
        BLOCK: tl.constexpr,
        RING: tl.constexpr,
    ):
        """`kept_slots` of frames t0.. as ring tiles."""
        t = t0 + tl.arange(0, BLOCK)[:, None]
        tiles = ()
        for j in tl.static_range(RING):
            tiles = tiles + (kept_slots(keys, t, _tile_slots(j, SHIFT, BLOCK, RING), p),)
        return tiles

    @triton.jit
    def drop(tiles, kept, p, RING: tl.constexpr):
        """Ring tiles over 1 - p where kept, else 0."""
        scale = 1.0 / (1.0 - p)
        xs = ()
        for j in tl.static_range(RING):
            xs = xs + (tl.where(kept[j], tiles[j] * scale, 0.0),)
        return xs

    @triton.jit
    def band_weights(
        ptr,
        rows_ptr,
        keys,
        dropout_p,
        stride_t,
        stride_w,
        stride_row,
        t0,
        s0,
        start,
        end,
        LEFT: tl.constexpr,
        W: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """P[t, s] of frames t0.. and values s0.., [BLOCK_T, BLOCK], from logits and what `softmax`
        says of their rows. keys: None without dropout.
        """
        t = t0 + tl.arange(0, BLOCK_T)[:, None]
        s = s0 + tl.arange(0, BLOCK)[None, :]
        slot = s - t + LEFT
        inside = _inside(t, start, end)
        mask = (slot.to(tl.uint32, bitcast=True) < W) & inside & _inside(s, start, end)
        ptrs = ptr + (t.to(tl.int64) * stride_t + slot.to(tl.int64) * stride_w)
        x = tl.load(ptrs, mask=mask, other=float("-inf")).to(tl.float32)
        x = tl.minimum(x, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
        top = tl.load(rows_ptr + t, mask=inside, other=0.0)
        scale = tl.load(rows_ptr + stride_row + t, mask=inside, other=0.0)
        weights = tl.exp2((x - top) * 1.4426950408889634) * scale
        if keys is not None:
            kept = kept_slots(keys, t, slot, dropout_p)
            weights = tl.where(kept, weights * (1.0 / (1.0 - dropout_p)), 0.0)
        return weights

    @triton.jit
    def store_logits(
        ptr,
        tiles,
        stride_t,
        stride_w,
        t0,
        start,
        end,
        n_frames,
        SHIFT: tl.constexpr,
        W: tl.constexpr,
        BLOCK: tl.constexpr,
        RING: tl.constexpr,
        BLOCK_W: tl.constexpr,
        TIME_LAST: tl.constexpr,
        VECTOR: tl.constexpr,
    ):
        """Store ring tiles, whose rows outside [start, end) are 0, to the slots of frames t0.. ."""
        if TIME_LAST:
            row = tl.arange(0, BLOCK)[:, None]
            column = tl.arange(0, BLOCK_W)[None, :] + row + SHIFT  # of the ring
            x = tl.gather(tiles[0].to(ptr.dtype.element_ty), column & (BLOCK - 1), axis=1)
            for j in tl.static_range(1, RING):
                part = tl.gather(tiles[j].to(ptr.dtype.element_ty), column & (BLOCK - 1), axis=1)
                x = tl.where(column // BLOCK == j, part, x)
            store_tile(
                ptr, x, stride_t, stride_w, t0, 0, start, end, n_frames, W, BLOCK, BLOCK_W, VECTOR
            )
        else:
            row = tl.arange(0, BLOCK * BLOCK) // BLOCK
            column = tl.arange(0, BLOCK * BLOCK) % BLOCK
            t = t0 + row
            bound = tl.where(_inside(t, 0, n_frames), W, 0).to(tl.uint32)
            base = ptr + t0.to(tl.int64) * stride_t
            for j in tl.static_range(RING):
                slot = _slots(row, column, j, SHIFT, BLOCK, RING)
                ptrs = base + (row.to(tl.int64) * stride_t + slot.to(tl.int64) * stride_w)
                tl.store(
                    ptrs,
                    tiles[j].to(ptr.dtype.element_ty).reshape(BLOCK * BLOCK),
                    mask=slot.to(tl.uint32, bitcast=True) < bound,
                )
