"""Local dense synthesizer attention, fused: the Triton kernels and their launchers.

Each direction is one launch, the backward pass of wide windows two; there are no atomics. The
weighted sum is a product with the band matrix P[t, s] = a[t, s - t + left]; a block's W slots are
held as a ring, tile by tile in the place that they have in P. README.md has the derivation.
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
# Up to here a backward program keeps all of its rows' weights, and one launch does everything.
NARROW = 64


if triton is not None:
    from .ldsa_tiles import (
        align,
        band_tile,
        band_weights,
        drop,
        dropout_keys,
        in_first_tile,
        kept_tiles,
        load_logits,
        load_tile,
        load_values,
        pin,
        sequence_bounds,
        softmax,
        store_logits,
        store_tile,
    )

    # What depends on the batch and the number of frames must not make another variant of a kernel:
    # Triton compiles one for a number that is 1, and one for a multiple of 16.
    _any_size = triton.jit(
        do_not_specialize=[
            "n_heads",
            "n_frames",
            "n_blocks",
            *(f"stride_{x}{dim}" for x in ("a", "v", "o", "g", "da", "dv", "r") for dim in "bh"),
            "stride_rc",
            "stride_starts",
            "stride_lengths",
            "seed",
        ],
        do_not_specialize_on_alignment=[
            "stride_aw", "stride_vd", "stride_od", "stride_gd", "stride_daw", "stride_dvd"
        ],
    )  # fmt: skip

    @_any_size
    def _ldsa_fwd_kernel(
        logits_ptr,
        v_ptr,
        out_ptr,
        starts_ptr,
        lengths_ptr,
        seed,
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
        RING: tl.constexpr,
        SHIFT: tl.constexpr,
        BLOCK_D: tl.constexpr,
        BLOCK_W: tl.constexpr,
        TIME_LAST: tl.constexpr,
        ALIGN_A: tl.constexpr,
        ALIGN_V: tl.constexpr,
        VECTOR_A: tl.constexpr,
        VECTOR_V: tl.constexpr,
        DTYPE: tl.constexpr,
        PRECISION: tl.constexpr,
        PIN: tl.constexpr,
    ):
        """out[t, d] = sum_s P[t, s] v[s, d] with P[t, s] = a[t, s - t + left].

        One program owns BLOCK frames of one head of one sequence, whose windows lie in RING + 1
        tiles of values. Reads logits [BLOCK, W], v [(RING + 1) * BLOCK, Dh]; writes out
        [BLOCK, Dh].
        """
        pid = tl.program_id(0).to(tl.int64)
        bh = pid // n_blocks
        b = bh // n_heads
        h = bh % n_heads
        t0 = ((pid % n_blocks) * BLOCK).to(tl.int32)
        start, end = sequence_bounds(
            starts_ptr, lengths_ptr, stride_starts, stride_lengths, b, n_frames
        )
        stride_aw = align(stride_aw, VECTOR_A)
        stride_vd = align(stride_vd, VECTOR_V)
        stride_od = align(stride_od, VECTOR_V)
        logits_ptr += align(b * stride_ab + h * stride_ah, ALIGN_A)
        v_ptr += align(b * stride_vb + h * stride_vh, ALIGN_V)
        out_ptr += align(b * stride_ob + h * stride_oh, ALIGN_V)
        CHUNKS: tl.constexpr = (DH + BLOCK_D - 1) // BLOCK_D
        if (t0 < end) & (t0 + BLOCK > start):
            if CHUNKS == 1:
                values = load_values(
                    v_ptr, stride_vt, stride_vd, t0 - (LEFT + SHIFT), 0, start, end,
                    0, RING, DH, BLOCK, BLOCK_D, VECTOR_V, DTYPE,
                )  # fmt: skip
            logits = load_logits(
                logits_ptr, stride_at, stride_aw, t0, start, end,
                LEFT, SHIFT, W, RENORMALIZE, BLOCK, RING, BLOCK_W, TIME_LAST, VECTOR_A,
            )  # fmt: skip
            weights, _, _ = softmax(
                logits, t0, start, end,
                LEFT, SHIFT, W, RENORMALIZE, BLOCK, RING, TIME_LAST, DTYPE,
            )  # fmt: skip
            if seed is not None:
                keys = dropout_keys(seed, bh)
                kept = kept_tiles(keys, t0, dropout_p, SHIFT, BLOCK, RING)
                weights = drop(weights, kept, dropout_p, RING)
            for c in range(CHUNKS):
                if CHUNKS == 1:
                    tiles = values
                else:
                    tiles = load_values(
                        v_ptr, stride_vt, stride_vd, t0 - (LEFT + SHIFT), c * BLOCK_D, start, end,
                        0, RING, DH, BLOCK, BLOCK_D, VECTOR_V, DTYPE,
                    )  # fmt: skip
                acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
                for j in tl.static_range(RING + 1):
                    p = band_tile(weights, j, SHIFT, BLOCK, RING).to(DTYPE)
                    acc = tl.dot(p, pin(tiles[j], PIN), acc, input_precision=PRECISION)
                store_tile(
                    out_ptr, acc, stride_ot, stride_od, t0, c * BLOCK_D, start, end, n_frames,
                    DH, BLOCK, BLOCK_D, VECTOR_V,
                )  # fmt: skip
        else:
            zeros = tl.zeros([BLOCK, BLOCK_D], tl.float32)
            for c in range(CHUNKS):
                store_tile(
                    out_ptr, zeros, stride_ot, stride_od, t0, c * BLOCK_D, start, end, n_frames,
                    DH, BLOCK, BLOCK_D, VECTOR_V,
                )  # fmt: skip

    @_any_size
    def _ldsa_bwd_kernel(
        grad_ptr,
        logits_ptr,
        v_ptr,
        grad_logits_ptr,
        grad_v_ptr,
        rows_ptr,
        starts_ptr,
        lengths_ptr,
        seed,
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
        stride_rb,
        stride_rh,
        stride_rc,
        stride_rt,
        stride_starts,
        stride_lengths,
        LEFT: tl.constexpr,
        W: tl.constexpr,
        DH: tl.constexpr,
        RENORMALIZE: tl.constexpr,
        BLOCK: tl.constexpr,
        STEPS: tl.constexpr,
        RING: tl.constexpr,
        SHIFT: tl.constexpr,
        BLOCK_D: tl.constexpr,
        BLOCK_W: tl.constexpr,
        TIME_LAST: tl.constexpr,
        ALIGN_A: tl.constexpr,
        ALIGN_V: tl.constexpr,
        VECTOR_A: tl.constexpr,
        VECTOR_V: tl.constexpr,
        DTYPE: tl.constexpr,
        PRECISION: tl.constexpr,
        PIN: tl.constexpr,
    ):
        """grad_logits = a (da - sum_k a da), da[t, k] = g[t] . v[t - left + k]; grad_v = P^T g.

        One program walks along one head of one sequence, STEPS + RING blocks of BLOCK frames. A
        block's weights give grad_logits, and transposed its share of the grad_v of the RING + 1
        tiles that its windows lie in: a tile is summed when the last block that reads it has come.
        The program owns the grad_logits of its first STEPS blocks and the STEPS tiles of grad_v
        whose blocks it has all seen, so that nothing is added up in memory: no atomics. The weights
        are made anew from their logits; nothing is saved by the forward pass. Reads logits, grad
        and v of (STEPS + RING) * BLOCK frames, without grad_v of STEPS * BLOCK. Where rows_ptr is
        given, it gets what `softmax` says of each row, for `_ldsa_bwd_values_kernel`.
        """
        pid = tl.program_id(0).to(tl.int64)
        bh = pid // n_blocks
        b = bh // n_heads
        h = bh % n_heads
        s0 = ((pid % n_blocks) * (STEPS * BLOCK)).to(tl.int32)  # first frame of grad_v
        t0 = s0 + (LEFT + SHIFT - RING * BLOCK)
        start, end = sequence_bounds(
            starts_ptr, lengths_ptr, stride_starts, stride_lengths, b, n_frames
        )
        stride_gd = align(stride_gd, VECTOR_V)
        stride_aw = align(stride_aw, VECTOR_A)
        stride_vd = align(stride_vd, VECTOR_V)
        stride_daw = align(stride_daw, VECTOR_A)
        stride_dvd = align(stride_dvd, VECTOR_V)
        grad_ptr += align(b * stride_gb + h * stride_gh, ALIGN_V)
        logits_ptr += align(b * stride_ab + h * stride_ah, ALIGN_A)
        v_ptr += align(b * stride_vb + h * stride_vh, ALIGN_V)
        if grad_logits_ptr is not None:
            grad_logits_ptr += align(b * stride_dab + h * stride_dah, ALIGN_A)
        if grad_v_ptr is not None:
            grad_v_ptr += align(b * stride_dvb + h * stride_dvh, ALIGN_V)
        CHUNKS: tl.constexpr = (DH + BLOCK_D - 1) // BLOCK_D
        BLOCKS: tl.constexpr = STEPS + (RING if grad_v_ptr is not None else 0)
        if (t0 < end) & (t0 + BLOCKS * BLOCK > start):
            if seed is not None:
                keys = dropout_keys(seed, bh)
            window = ()
            bands = ()
            grads = ()
            for i in tl.static_range(BLOCKS):
                ti = t0 + i * BLOCK
                logits = load_logits(
                    logits_ptr, stride_at, stride_aw, ti, start, end,
                    LEFT, SHIFT, W, RENORMALIZE, BLOCK, RING, BLOCK_W, TIME_LAST, VECTOR_A,
                )  # fmt: skip
                if CHUNKS == 1:
                    grad = load_tile(
                        grad_ptr, stride_gt, stride_gd, ti, 0, start, end, 0.0,
                        DH, BLOCK, BLOCK_D, VECTOR_V,
                    ).to(DTYPE)  # fmt: skip
                    if (grad_logits_ptr is not None) and (i < STEPS):
                        values = load_values(
                            v_ptr, stride_vt, stride_vd, ti - (LEFT + SHIFT), 0, start, end,
                            0 if i == 0 else RING, RING, DH, BLOCK, BLOCK_D, VECTOR_V, DTYPE,
                        )  # fmt: skip
                    grad = pin(grad, PIN)
                    grads = grads + (grad,)
                weights, top, scale = softmax(
                    logits, ti, start, end,
                    LEFT, SHIFT, W, RENORMALIZE, BLOCK, RING, TIME_LAST, DTYPE,
                )  # fmt: skip
                if rows_ptr is not None:
                    t = ti + tl.arange(0, BLOCK)[:, None]
                    rows = rows_ptr + b * stride_rb + h * stride_rh + t
                    owned = (t >= 0) & (t < n_frames)
                    tl.store(rows, top, mask=owned)
                    tl.store(rows + stride_rc, scale, mask=owned)
                dropped = weights
                if seed is not None:
                    kept = kept_tiles(keys, ti, dropout_p, SHIFT, BLOCK, RING)
                    dropped = drop(weights, kept, dropout_p, RING)
                if (grad_logits_ptr is not None) and (i < STEPS):
                    if CHUNKS == 1:
                        window = window[1:]
                        for j in tl.static_range(len(values)):
                            window = window + (pin(values[j], PIN),)
                    d_band = ()
                    for _ in tl.static_range(RING + 1):
                        d_band = d_band + (tl.zeros([BLOCK, BLOCK], tl.float32),)
                    for c in range(CHUNKS):
                        if CHUNKS == 1:
                            g = grad
                            tiles = window
                        else:
                            g = load_tile(
                                grad_ptr, stride_gt, stride_gd, ti, c * BLOCK_D, start, end, 0.0,
                                DH, BLOCK, BLOCK_D, VECTOR_V,
                            ).to(DTYPE)  # fmt: skip
                            tiles = load_values(
                                v_ptr, stride_vt, stride_vd, ti - (LEFT + SHIFT), c * BLOCK_D,
                                start, end, 0, RING, DH, BLOCK, BLOCK_D, VECTOR_V, DTYPE,
                            )  # fmt: skip
                        added = ()
                        for j in tl.static_range(RING + 1):
                            v_t = tl.trans(tiles[j])
                            added = added + (tl.dot(g, v_t, d_band[j], input_precision=PRECISION),)
                        d_band = added
                    d_weights = (tl.where(in_first_tile(SHIFT, BLOCK), d_band[0], d_band[RING]),)
                    for j in tl.static_range(1, RING):
                        d_weights = d_weights + (d_band[j],)
                    if seed is not None:
                        d_weights = drop(d_weights, kept, dropout_p, RING)
                    total = tl.zeros([BLOCK, 1], tl.float32)
                    for j in tl.static_range(RING):
                        total += tl.sum(weights[j] * d_weights[j], axis=1)[:, None]
                    d_logits = ()
                    for j in tl.static_range(RING):
                        d_logit = weights[j] * (d_weights[j] - total)
                        d_logits = d_logits + (d_logit,)
                    store_logits(
                        grad_logits_ptr, d_logits, stride_dat, stride_daw, ti, start, end, n_frames,
                        SHIFT, W, BLOCK, RING, BLOCK_W, TIME_LAST, VECTOR_A,
                    )  # fmt: skip
                if grad_v_ptr is not None:
                    band = ()
                    for j in tl.static_range(RING + 1):
                        band = band + (
                            tl.trans(band_tile(dropped, j, SHIFT, BLOCK, RING).to(DTYPE)),
                        )
                    bands = bands + (band,)
                    if i >= RING:
                        for c in range(CHUNKS):
                            d_v = tl.zeros([BLOCK, BLOCK_D], tl.float32)
                            for j in tl.static_range(RING + 1):
                                if CHUNKS == 1:
                                    g = grads[i - j]
                                else:
                                    g = load_tile(
                                        grad_ptr, stride_gt, stride_gd, ti - j * BLOCK, c * BLOCK_D,
                                        start, end, 0.0, DH, BLOCK, BLOCK_D, VECTOR_V,
                                    ).to(DTYPE)  # fmt: skip
                                d_v = tl.dot(bands[i - j][j], g, d_v, input_precision=PRECISION)
                            store_tile(
                                grad_v_ptr, d_v, stride_dvt, stride_dvd, ti - (LEFT + SHIFT),
                                c * BLOCK_D, start, end, n_frames, DH, BLOCK, BLOCK_D, VECTOR_V,
                            )  # fmt: skip
        else:
            no_logits = ()
            for _ in tl.static_range(RING):
                no_logits = no_logits + (tl.zeros([BLOCK, BLOCK], tl.float32),)
            no_values = tl.zeros([BLOCK, BLOCK_D], tl.float32)
            for i in tl.static_range(STEPS):
                if grad_logits_ptr is not None:
                    store_logits(
                        grad_logits_ptr, no_logits, stride_dat, stride_daw, t0 + i * BLOCK,
                        start, end, n_frames,
                        SHIFT, W, BLOCK, RING, BLOCK_W, TIME_LAST, VECTOR_A,
                    )  # fmt: skip
                if grad_v_ptr is not None:
                    for c in range(CHUNKS):
                        store_tile(
                            grad_v_ptr, no_values, stride_dvt, stride_dvd, s0 + i * BLOCK,
                            c * BLOCK_D, start, end, n_frames, DH, BLOCK, BLOCK_D, VECTOR_V,
                        )  # fmt: skip

    @_any_size
    def _ldsa_bwd_values_kernel(
        grad_ptr,
        logits_ptr,
        rows_ptr,
        grad_v_ptr,
        starts_ptr,
        lengths_ptr,
        seed,
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
        stride_rb,
        stride_rh,
        stride_rc,
        stride_rt,
        stride_dvb,
        stride_dvh,
        stride_dvd,
        stride_dvt,
        stride_starts,
        stride_lengths,
        LEFT: tl.constexpr,
        W: tl.constexpr,
        DH: tl.constexpr,
        BLOCK: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_D: tl.constexpr,
        ALIGN_A: tl.constexpr,
        ALIGN_V: tl.constexpr,
        VECTOR_V: tl.constexpr,
        DTYPE: tl.constexpr,
        PRECISION: tl.constexpr,
        PIN: tl.constexpr,
    ):
        """grad_v = P^T g of wide windows, whose weights do not fit in registers as a whole.

        One program owns BLOCK values' frames and BLOCK_D channels, and goes over the frames whose
        windows they lie in, BLOCK_T at a time, with weights from logits and each row's greatest
        logit and one over its sum.
        """
        CHUNKS: tl.constexpr = (DH + BLOCK_D - 1) // BLOCK_D
        pid = tl.program_id(0).to(tl.int64)
        c0 = (pid % CHUNKS).to(tl.int32) * BLOCK_D
        pid //= CHUNKS
        bh = pid // n_blocks
        b = bh // n_heads
        h = bh % n_heads
        s0 = ((pid % n_blocks) * BLOCK).to(tl.int32)
        start, end = sequence_bounds(
            starts_ptr, lengths_ptr, stride_starts, stride_lengths, b, n_frames
        )
        stride_gd = align(stride_gd, VECTOR_V)
        stride_aw = align(stride_aw, 1)
        stride_dvd = align(stride_dvd, VECTOR_V)
        grad_ptr += align(b * stride_gb + h * stride_gh, ALIGN_V)
        logits_ptr += align(b * stride_ab + h * stride_ah, ALIGN_A)
        grad_v_ptr += align(b * stride_dvb + h * stride_dvh, ALIGN_V)
        rows_ptr += b * stride_rb + h * stride_rh
        # Frames that load as vectors where they lie side by side.
        RIGHT: tl.constexpr = (W - 1 - LEFT + 7) // 8 * 8
        STEPS: tl.constexpr = (RIGHT + BLOCK + LEFT + BLOCK_T - 1) // BLOCK_T
        d_v = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        keys = None
        if seed is not None:
            keys = dropout_keys(seed, bh)
        if (s0 < end) & (s0 + BLOCK > start):
            for i in range(STEPS):
                t0 = s0 - RIGHT + i * BLOCK_T
                g = load_tile(
                    grad_ptr, stride_gt, stride_gd, t0, c0, start, end, 0.0,
                    DH, BLOCK_T, BLOCK_D, VECTOR_V,
                ).to(DTYPE)  # fmt: skip
                p = band_weights(
                    logits_ptr, rows_ptr, keys, dropout_p, stride_at, stride_aw, stride_rc,
                    t0, s0, start, end, LEFT, W, BLOCK_T, BLOCK,
                )  # fmt: skip
                p = tl.trans(p.to(DTYPE))
                d_v = tl.dot(p, pin(g, PIN), d_v, input_precision=PRECISION)
        store_tile(
            grad_v_ptr, d_v, stride_dvt, stride_dvd, s0, c0, start, end, n_frames,
            DH, BLOCK, BLOCK_D, VECTOR_V,
        )  # fmt: skip


# Whether Triton's interpreter was on when the kernels were defined: they then run on the CPU.
INTERPRETED = triton is not None and not isinstance(_ldsa_fwd_kernel, triton.runtime.JITFunction)


def _tiles(window, head_dim, itemsize, time_last, backward):
    """(BLOCK, STEPS, BLOCK_D, num_warps, maxnreg); the tests check every row on a GPU.

    A limit of registers keeps more programs on a multiprocessor, which pays up to a few spills.
    """
    half = itemsize == 2
    block_d = max(16, triton.next_power_of_2(head_dim))
    if window <= 16:
        block_d = min(block_d, 256 if half else 32 if backward else 128)
        warps = max(1, block_d * itemsize // 128)
        if backward:
            steps = 2 if time_last or not half else 4 if warps == 1 else 8
            roomy = not half or (warps == 1 and block_d > 32)
            return 16, steps, block_d, warps, 168 if roomy else 128
        if time_last:
            return 32, 1, block_d, warps, None
        return 16, 1, block_d, warps, 64 if half else None
    if window <= 32:
        block_d = min(block_d, 32 if not half else 64 if backward else 128)
        return 32, 2 if backward and half and head_dim <= 64 else 1, block_d, 1, None
    block_d = min(block_d, 128 // itemsize)
    if backward:
        if NARROW < window <= 128:
            block_d = min(block_d, 32)
        return 64, 1, block_d, 4 if window <= 128 else 8, None
    maxnreg = 96 if window <= 64 else 168 if window <= 128 else None
    return 64, 1, block_d, 4, maxnreg if half else None


def _value_tiles(head_dim, itemsize):
    """(BLOCK, BLOCK_T, BLOCK_D, num_warps) of the values' gradients in wide windows."""
    return 64, 64 if itemsize == 2 else 32, min(max(16, triton.next_power_of_2(head_dim)), 64), 4


def _shift(left, window, block, ring):
    """How many frames before its first window a block's first tile of values begins.

    Where it fits, tiles begin at a multiple of 8 frames, so that they load as vectors where time is
    innermost.
    """
    return min(-left % 8, ring * block + 1 - window)


def empty_like(x):
    """Uninitialised dense tensor with the shape, dtype, device and memory order of `x`."""
    if x.is_contiguous():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _, heads, channels, frames = x.shape
    if x.stride() == (frames * heads * channels, channels, 1, heads * channels):
        return x.new_empty_strided(x.shape, x.stride())  # by far the fastest
    channel_last = 0, 3, 1, 2
    order = channel_last if x.permute(channel_last).is_contiguous() else memory_order(x)
    return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device)


# Compiled kernels for a grid, and their numbers, by everything that these depend on: a launch that
# was made before skips Triton's dispatch, which takes longer than a small kernel runs.
_launches = {}


def _alignment(tensors):
    """(ALIGN, VECTOR) of [B,H,C,T] tensors, some of them None, that are laid out alike.

    ALIGN divides the place of every row, which is what lies side by side: channels or frames.
    VECTOR is ALIGN where these are frames, else 1.
    """
    vector = 8
    for x in tensors:
        if x is not None:
            b, h, c, t = x.stride()
            inner, outer = (t, c) if t == 1 and c != 1 else (c, t)
            if inner != 1 or x.data_ptr() % 16 or b % 8 or h % 8 or outer % 8:
                return 1, 1
            if c == 1:
                vector = 1
    return 8, vector


def _launch(kernel, tensors, like_logits, like_v, bounds, seed, left, renormalize, dropout_p):
    """Run `kernel` on `tensors`, of which like_logits are [B,H,W,T] and like_v [B,H,Dh,T]."""
    a_logits, v = like_logits[0], like_v[0]
    device = v.device
    if device.type != "cpu" and device.index != torch.accelerator.current_device_index():
        with torch.accelerator.device_index(device.index):
            return _launch(
                kernel, tensors, like_logits, like_v, bounds, seed, left, renormalize, dropout_p
            )
    pointers = *tensors, *bounds, seed if isinstance(seed, torch.Tensor) else None
    # Triton specialises on pointers that are multiples of 16 bytes; others take its own way.
    aligned = all(x is None or x.data_ptr() % 16 == 0 for x in pointers)
    key = (
        kernel,
        device,
        v.shape,
        a_logits.shape[2],
        left,
        renormalize,
        tuple([None if x is None else (x.dtype, x.stride()) for x in pointers]),
        type(seed),
    )
    known = _launches.get(key) if aligned else None
    if known is not None:
        run, rest = known
        run(*tensors, *bounds, seed, dropout_p, *rest)
        return None
    batch, heads, head_dim, frames = v.shape
    window = a_logits.shape[2]
    if kernel is _ldsa_bwd_values_kernel:
        block, block_t, block_d, num_warps = _value_tiles(head_dim, v.element_size())
        blocks, per_block = triton.cdiv(frames, block), triton.cdiv(head_dim, block_d)
        maxnreg = None
    else:
        backward, per_block = kernel is _ldsa_bwd_kernel, 1
        # Where the frames of a slot lie side by side, they are read side by side and then moved,
        # which costs too much in wide windows.
        time_last = a_logits.stride(3) == 1 and a_logits.stride(2) != 1 and window <= 32
        block, steps, block_d, num_warps, maxnreg = _tiles(
            window, head_dim, v.element_size(), time_last, backward
        )
        ring = triton.cdiv(window, block)
        shift = _shift(left, window, block, ring)
        # The backward kernel's blocks begin before frame 0: see there.
        before = ring * block - left - shift if backward else 0
        blocks = triton.cdiv(frames + before, block * steps)
    grid = batch * heads * blocks * per_block, 1, 1
    numbers = [heads, frames, blocks]
    for x in tensors:
        b, h, c, t = (0, 0, 0, 0) if x is None else x.stride()
        # A stride of frames that follows from the model alone is a constant of the kernel.
        numbers += [b, h, c, tl.constexpr(t) if t <= 4 * heads * max(window, head_dim) else t]
    numbers += [0 if bound is None else bound.stride(0) for bound in bounds]
    dtype = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(v.dtype, tl.float32)
    if INTERPRETED:  # its bf16 arithmetic is wrong; fp32 stands in for the tensor cores'
        dtype = tl.float32
    align_a, vector_a = _alignment(like_logits)
    align_v, vector_v = _alignment(like_v)
    nvidia = device.type == "cuda" and torch.version.hip is None
    # Three products of TF32 have the error of one of fp32; the tensor cores have no other.
    tf32 = nvidia and torch.cuda.get_device_capability(device) >= (8, 0)
    products = dtype, "tf32x3" if tf32 else "ieee", nvidia
    if kernel is _ldsa_bwd_values_kernel:
        constants = (
            left, window, head_dim, block, block_t, block_d, align_a, align_v, vector_v, *products,
        )  # fmt: skip
    else:
        constants = (
            left, window, head_dim, renormalize, block, *((steps,) if backward else ()), ring,
            shift, block_d,
            max(16, triton.next_power_of_2(window + 1)),  # one slot of padding: see softmax
            time_last, align_a, align_v, vector_a, vector_v, *products,
        )  # fmt: skip
    # Wide tiles leave no shared memory for loads ahead of a loop over channels.
    options = {"num_warps": num_warps, "num_stages": 3 if window <= 32 else 1}
    if nvidia and maxnreg is not None:
        options["maxnreg"] = maxnreg
    compiled = kernel[grid](*tensors, *bounds, seed, dropout_p, *numbers, *constants, **options)
    if aligned and not INTERPRETED:
        if len(_launches) >= 4096:
            _launches.clear()
        _launches[key] = compiled[grid], (*numbers, *constants)
    return None


def launch_forward(a_logits, v, lengths, starts, seed, left, renormalize, dropout_p):
    """Allocate out [B,H,Dh,T] and run the forward kernel; arguments are checked by the caller."""
    out = empty_like(v)
    if out.numel() == 0:
        return out
    _launch(
        _ldsa_fwd_kernel, (a_logits, v, out), (a_logits,), (v, out),
        (starts, lengths), seed, left, renormalize, dropout_p,
    )  # fmt: skip
    return out


def launch_backward(
    grad, a_logits, v, lengths, starts, seed, left, renormalize, dropout_p, need_logits, need_v
):
    """Allocate the gradients of a_logits and v that are needed, else None, and run the kernels."""
    grad_logits = empty_like(a_logits) if need_logits else None
    grad_v = empty_like(v) if need_v else None
    if v.numel() == 0:
        return grad_logits, grad_v
    bounds, options = (starts, lengths), (seed, left, renormalize, dropout_p)
    batch, heads, window, frames = a_logits.shape
    rows = None
    if need_v and window > NARROW:
        rows = torch.empty(batch, heads, 2, frames, dtype=torch.float32, device=v.device)
    _launch(
        _ldsa_bwd_kernel,
        (grad, a_logits, v, grad_logits, grad_v if rows is None else None, rows),
        (a_logits, grad_logits), (v, grad, grad_v), bounds, *options,
    )  # fmt: skip
    if rows is not None:
        _launch(
            _ldsa_bwd_values_kernel, (grad, a_logits, rows, grad_v), (a_logits,), (grad_v, grad),
            bounds, *options,
        )  # fmt: skip
    return grad_logits, grad_v
