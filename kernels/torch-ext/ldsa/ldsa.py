"""Local dense synthesizer attention, fused: the Triton kernels and their launchers.

Both directions are one launch without atomics. The softmax over the window is a [BLOCK_T, BLOCK_W]
tile in registers; a gather spreads it to the band matrix P[t, s] = a[t, s - t + left], so that the
weighted sum is a matrix product with a tile of values. README.md has the derivation.
"""

import contextlib

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
    def _window_softmax(
        logits_ptr,
        stride_w,
        stride_t,
        t0,
        start,
        end,
        LEFT: tl.constexpr,
        W: tl.constexpr,
        RENORMALIZE: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_W: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """Weights [BLOCK_T, BLOCK_W] of frames t0..t0+BLOCK_T; 0 in frames outside and slots >= W.

        `logits_ptr` is that of the sequence's and head's frame 0.
        """
        rel_t = tl.arange(0, BLOCK_T)
        slot = tl.arange(0, BLOCK_W)
        offs_t = t0 + rel_t
        inside = (offs_t >= start) & (offs_t < end)
        mask = inside[:, None] & (slot < W)[None, :]
        base = logits_ptr + t0.to(tl.int64) * stride_t
        if WIDE:
            rel_t = rel_t.to(tl.int64)
            slot = slot.to(tl.int64)
        x = tl.load(
            base + rel_t[:, None] * stride_t + slot[None, :] * stride_w,
            mask=mask,
            other=float("-inf"),
        ).to(tl.float32)
        if RENORMALIZE:
            source = offs_t[:, None] - LEFT + tl.arange(0, BLOCK_W)[None, :]
            x = tl.where((source >= start) & (source < end), x, float("-inf"))
        top = tl.max(x, axis=1)[:, None]
        # +inf entries share the weight, a row of -inf gets none: neither may become inf - inf.
        share = tl.where(x == float("inf"), 0.0, float("-inf"))
        x = tl.where(top == float("inf"), share, x)
        top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
        e = tl.exp2((x - top) * 1.4426950408889634)
        total = tl.sum(e, axis=1)[:, None]
        return e / tl.where(total == 0.0, 1.0, total)

    @triton.jit
    def _keep(seed, row0, p, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr):
        """Which weights dropout keeps, bool [BLOCK_T, BLOCK_W]; row0 counts (b, h, t) rows.

        A function of seed, row and slot alone, so that every block that needs a row, in either
        direction, draws the same mask. One Philox call serves four slots.
        """
        rows = (row0 + tl.arange(0, BLOCK_T))[:, None]
        calls = rows * (BLOCK_W // 4) + tl.arange(0, BLOCK_W // 4)[None, :]
        r0, r1, r2, r3 = tl.randint4x(seed, calls)
        bits = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
        return tl.uint_to_uniform_float(bits) >= p

    @triton.jit
    def _value_tile(
        ptr,
        stride_t,
        stride_d,
        t0,
        start,
        end,
        DH: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_D: tl.constexpr,
        DTYPE: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """[BLOCK_T, BLOCK_D] of a [T, Dh] array from frame t0 on; 0 outside [start, end)."""
        rel_t = tl.arange(0, BLOCK_T)
        offs_d = tl.arange(0, BLOCK_D)
        offs_t = t0 + rel_t
        mask = ((offs_t >= start) & (offs_t < end))[:, None] & (offs_d < DH)[None, :]
        base = ptr + t0.to(tl.int64) * stride_t
        if WIDE:
            rel_t = rel_t.to(tl.int64)
            offs_d = offs_d.to(tl.int64)
        x = tl.load(
            base + rel_t[:, None] * stride_t + offs_d[None, :] * stride_d, mask=mask, other=0.0
        )
        return x.to(DTYPE)

    @triton.jit
    def _store_tile(
        ptr,
        x,
        stride_t,
        stride_c,
        t0,
        n_frames,
        C: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_C: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """Store [BLOCK_T, BLOCK_C] to frames t0.. (below n_frames) and channels below C."""
        rel_t = tl.arange(0, BLOCK_T)
        offs_c = tl.arange(0, BLOCK_C)
        mask = (t0 + rel_t < n_frames)[:, None] & (offs_c < C)[None, :]
        base = ptr + t0.to(tl.int64) * stride_t
        if WIDE:
            rel_t = rel_t.to(tl.int64)
            offs_c = offs_c.to(tl.int64)
        tl.store(
            base + rel_t[:, None] * stride_t + offs_c[None, :] * stride_c,
            x.to(ptr.dtype.element_ty),
            mask=mask,
        )

    @triton.jit
    def _band(weights, first_slot, W: tl.constexpr):
        """Spread [ROWS, BLOCK_W] weights to the band given by the slot index of each column."""
        valid = (first_slot >= 0) & (first_slot < W)
        # Slot W is padding, whose weight is 0: no select after the gather.
        return tl.gather(weights, tl.where(valid, first_slot, W), axis=1)

    @triton.jit
    def _ldsa_fwd_kernel(
        logits_ptr,
        v_ptr,
        out_ptr,
        starts_ptr,
        lengths_ptr,
        seed_ptr,
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
        dropout_p,
        LEFT: tl.constexpr,
        W: tl.constexpr,
        DH: tl.constexpr,
        RENORMALIZE: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_S: tl.constexpr,
        BLOCK_W: tl.constexpr,
        BLOCK_D: tl.constexpr,
        DTYPE: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """out[t, d] = sum_s P[t, s] v[s, d] with P[t, s] = a[t, s - t + left].

        One program owns BLOCK_T frames of one head of one sequence. Reads logits [BLOCK_T, W] and
        v [BLOCK_T + W - 1, Dh], in tiles of BLOCK_S frames; writes out [BLOCK_T, Dh].
        """
        pid = tl.program_id(0).to(tl.int64)
        bh = pid // n_blocks
        b = bh // n_heads
        h = bh % n_heads
        t0 = ((pid % n_blocks) * BLOCK_T).to(tl.int32)
        start, end = _bounds(starts_ptr, lengths_ptr, stride_starts, stride_lengths, b, n_frames)
        out_ptr += b * stride_ob + h * stride_oh
        acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        if (t0 < end) & (t0 + BLOCK_T > start):
            logits_ptr += b * stride_ab + h * stride_ah
            v_ptr += b * stride_vb + h * stride_vh
            weights = _window_softmax(
                logits_ptr, stride_aw, stride_at, t0, start, end,
                LEFT, W, RENORMALIZE, BLOCK_T, BLOCK_W, WIDE,
            )  # fmt: skip
            if seed_ptr is not None:
                keep = _keep(tl.load(seed_ptr), bh * n_frames + t0, dropout_p, BLOCK_T, BLOCK_W)
                weights = tl.where(keep, weights, 0.0)
            for c in tl.range((BLOCK_T + W - 1 + BLOCK_S - 1) // BLOCK_S, num_stages=1):
                cols = c * BLOCK_S + tl.arange(0, BLOCK_S)
                slots = cols[None, :] - tl.arange(0, BLOCK_T)[:, None]
                band = _band(weights, slots, W).to(DTYPE)
                values = _value_tile(
                    v_ptr, stride_vt, stride_vd, t0 - LEFT + c * BLOCK_S, start, end,
                    DH, BLOCK_S, BLOCK_D, DTYPE, WIDE,
                )  # fmt: skip
                acc = tl.dot(band, values, acc, input_precision="ieee")
            if seed_ptr is not None:
                acc = acc / (1.0 - dropout_p)
        _store_tile(out_ptr, acc, stride_ot, stride_od, t0, n_frames, DH, BLOCK_T, BLOCK_D, WIDE)

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
        dropout_p,
        LEFT: tl.constexpr,
        W: tl.constexpr,
        DH: tl.constexpr,
        RENORMALIZE: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_S: tl.constexpr,
        BLOCK_W: tl.constexpr,
        BLOCK_D: tl.constexpr,
        DTYPE: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """grad_logits = a (da - sum_k a da), da[t, k] = g[t] . v[t - left + k]; grad_v = P^T g.

        One program owns BLOCK_T frames of one head of one sequence, as rows of grad_logits and as
        rows of grad_v. grad_v[s] sums over the frames t in [s - right, s + left] that read s, whose
        weights are made anew from their logits: no atomics, nothing saved by the forward pass.
        Reads logits and g [BLOCK_T + W - 1, .] and v [BLOCK_T + W - 1, Dh].
        """
        pid = tl.program_id(0).to(tl.int64)
        bh = pid // n_blocks
        b = bh // n_heads
        h = bh % n_heads
        t0 = ((pid % n_blocks) * BLOCK_T).to(tl.int32)
        start, end = _bounds(starts_ptr, lengths_ptr, stride_starts, stride_lengths, b, n_frames)
        touched = (t0 < end) & (t0 + BLOCK_T > start)
        grad_ptr += b * stride_gb + h * stride_gh
        logits_ptr += b * stride_ab + h * stride_ah
        v_ptr += b * stride_vb + h * stride_vh
        if grad_logits_ptr is not None:
            d_logits = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
            if touched:
                weights = _window_softmax(
                    logits_ptr, stride_aw, stride_at, t0, start, end,
                    LEFT, W, RENORMALIZE, BLOCK_T, BLOCK_W, WIDE,
                )  # fmt: skip
                grad = _value_tile(
                    grad_ptr, stride_gt, stride_gd, t0, start, end,
                    DH, BLOCK_T, BLOCK_D, DTYPE, WIDE,
                )  # fmt: skip
                d_weights = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
                for c in tl.range((BLOCK_T + W - 1 + BLOCK_S - 1) // BLOCK_S, num_stages=1):
                    values = _value_tile(
                        v_ptr, stride_vt, stride_vd, t0 - LEFT + c * BLOCK_S, start, end,
                        DH, BLOCK_S, BLOCK_D, DTYPE, WIDE,
                    )  # fmt: skip
                    d_band = tl.dot(grad, tl.trans(values), input_precision="ieee")
                    cols = tl.arange(0, BLOCK_T)[:, None] + tl.arange(0, BLOCK_W)[None, :]
                    cols -= c * BLOCK_S
                    valid = (cols >= 0) & (cols < BLOCK_S)
                    part = tl.gather(d_band, tl.where(valid, cols, 0), axis=1)
                    d_weights += tl.where(valid, part, 0.0)
                if seed_ptr is not None:
                    keep = _keep(tl.load(seed_ptr), bh * n_frames + t0, dropout_p, BLOCK_T, BLOCK_W)
                    d_weights = tl.where(keep, d_weights / (1.0 - dropout_p), 0.0)
                row = tl.sum(weights * d_weights, axis=1)[:, None]
                d_logits = weights * (d_weights - row)
            grad_logits_ptr += b * stride_dab + h * stride_dah
            _store_tile(
                grad_logits_ptr, d_logits, stride_dat, stride_daw, t0, n_frames,
                W, BLOCK_T, BLOCK_W, WIDE,
            )  # fmt: skip
        if grad_v_ptr is not None:
            d_v = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
            if touched:
                for c in tl.range((BLOCK_T + W - 1 + BLOCK_S - 1) // BLOCK_S, num_stages=1):
                    u0 = t0 - (W - 1 - LEFT) + c * BLOCK_S
                    weights = _window_softmax(
                        logits_ptr, stride_aw, stride_at, u0, start, end,
                        LEFT, W, RENORMALIZE, BLOCK_S, BLOCK_W, WIDE,
                    )  # fmt: skip
                    if seed_ptr is not None:
                        keep = _keep(
                            tl.load(seed_ptr), bh * n_frames + u0, dropout_p, BLOCK_S, BLOCK_W
                        )
                        weights = tl.where(keep, weights, 0.0)
                    rows = c * BLOCK_S + tl.arange(0, BLOCK_S)
                    slots = tl.arange(0, BLOCK_T)[None, :] - rows[:, None] + W - 1
                    band = _band(weights, slots, W).to(DTYPE)
                    grad = _value_tile(
                        grad_ptr, stride_gt, stride_gd, u0, start, end,
                        DH, BLOCK_S, BLOCK_D, DTYPE, WIDE,
                    )  # fmt: skip
                    d_v = tl.dot(tl.trans(band), grad, d_v, input_precision="ieee")
                if seed_ptr is not None:
                    d_v = d_v / (1.0 - dropout_p)
                offs_t = t0 + tl.arange(0, BLOCK_T)
                inside = (offs_t >= start) & (offs_t < end)
                d_v = tl.where(inside[:, None], d_v, 0.0)
            grad_v_ptr += b * stride_dvb + h * stride_dvh
            _store_tile(
                grad_v_ptr, d_v, stride_dvt, stride_dvd, t0, n_frames, DH, BLOCK_T, BLOCK_D, WIDE
            )


# Whether Triton's interpreter was on when the kernels were defined: they then run on the CPU.
INTERPRETED = triton is not None and not isinstance(_ldsa_fwd_kernel, triton.runtime.JITFunction)


def _tiles(window, head_dim, itemsize, backward):
    """Block sizes and warps; every row that can be chosen is checked on a GPU by the tests."""
    block_w = max(16, triton.next_power_of_2(window + 1))  # one slot of padding: see _band
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_t = 16
    block_s = 32 if block_w == 16 else 64
    rows = block_s if backward else block_t
    heavy = block_s * block_d * itemsize + rows * block_w * 4  # bytes of tiles to hold
    warps = 1 if heavy <= 8192 else 2 if heavy <= 16384 else 4 if heavy <= 65536 else 8
    return dict(BLOCK_T=block_t, BLOCK_S=block_s, BLOCK_W=block_w, BLOCK_D=block_d, num_warps=warps)


def _wide(tiles, *tensors):
    """Whether an offset inside a tile can pass 2^31 elements and needs 64-bit arithmetic."""
    frames = max(tiles["BLOCK_T"], tiles["BLOCK_S"])
    channels = max(tiles["BLOCK_W"], tiles["BLOCK_D"])
    return any(x.stride(3) * frames + x.stride(2) * channels >= 2**31 for x in tensors)


def _common(v, lengths, starts, window, left, renormalize, tiles):
    dtype = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(v.dtype, tl.float32)
    return dict(
        stride_starts=0 if starts is None else starts.stride(0),
        stride_lengths=0 if lengths is None else lengths.stride(0),
        LEFT=left,
        W=window,
        DH=v.shape[2],
        RENORMALIZE=renormalize,
        # The interpreter's bf16 arithmetic is wrong; its fp32 stands in for the tensor cores'.
        DTYPE=tl.float32 if INTERPRETED else dtype,
        **tiles,
    )


def _on_device(x):
    """Launches go to the current device: make it that of `x` for their time."""
    if x.device.type == "cpu":
        return contextlib.nullcontext()
    return torch.accelerator.device_index(x.device.index)


def empty_like(x):
    """Uninitialised dense tensor with the shape, dtype, device and memory order of `x`."""
    return torch.empty_permuted(x.shape, memory_order(x), dtype=x.dtype, device=x.device)


def launch_forward(a_logits, v, lengths, starts, seed, left, renormalize, dropout_p):
    """Allocate out [B,H,Dh,T] and run the forward kernel; arguments are checked by the caller."""
    batch, heads, head_dim, frames = v.shape
    out = empty_like(v)
    if out.numel() == 0:
        return out
    window = a_logits.shape[2]
    tiles = _tiles(window, head_dim, v.element_size(), backward=False)
    blocks = triton.cdiv(frames, tiles["BLOCK_T"])
    with _on_device(v):
        _ldsa_fwd_kernel[(batch * heads * blocks,)](
            a_logits, v, out, starts, lengths, seed, heads, frames, blocks,
            *a_logits.stride(), *v.stride(), *out.stride(), dropout_p=dropout_p,
            WIDE=_wide(tiles, a_logits, v, out),
            **_common(v, lengths, starts, window, left, renormalize, tiles),
        )  # fmt: skip
    return out


def launch_backward(
    grad, a_logits, v, lengths, starts, seed, left, renormalize, dropout_p, need_logits, need_v
):
    """Allocate the gradients of a_logits and v that are needed (else None) and run the kernel."""
    batch, heads, head_dim, frames = v.shape
    grad_logits = empty_like(a_logits) if need_logits else None
    grad_v = empty_like(v) if need_v else None
    if v.numel() == 0:
        return grad_logits, grad_v
    window = a_logits.shape[2]
    tiles = _tiles(window, head_dim, v.element_size(), backward=True)
    blocks = triton.cdiv(frames, tiles["BLOCK_T"])
    unused = (0, 0, 0, 0)
    written = [x for x in (grad_logits, grad_v) if x is not None]
    with _on_device(v):
        _ldsa_bwd_kernel[(batch * heads * blocks,)](
            grad, a_logits, v, grad_logits, grad_v, starts, lengths, seed, heads, frames, blocks,
            *grad.stride(), *a_logits.stride(), *v.stride(),
            *(grad_logits.stride() if need_logits else unused),
            *(grad_v.stride() if need_v else unused),
            dropout_p=dropout_p,
            WIDE=_wide(tiles, grad, a_logits, v, *written),
            **_common(v, lengths, starts, window, left, renormalize, tiles),
        )  # fmt: skip
    return grad_logits, grad_v
