"""What the chunk kernels of the delta rule share: tiles, gates, states and launch arguments."""

import contextlib

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS and other platforms without Triton keep the PyTorch path
    triton = None

CHUNK = 64
# Key channels in one product, fewer padded: with 16 or 32 the assembler of CUDA 12.8 (Triton 3.5
# and 3.6 bring it) gives some products on an H100 wrong addresses.
CHANNELS = 64
# What kernels are not specialised for, to what divides it: they would be compiled again and again
# in the middle of training.
VARYING = (
    *("g_ptr", "beta_ptr", "bounds_ptr", "initial_ptr"),
    *("n_seqs", "n_heads", "n_frames", "n_slots", "low_slot", "n_here"),
    *("stride_gb", "stride_gt", "stride_gh", "stride_gn", "stride_bb", "stride_bt", "stride_bh"),
    *("stride_eb", "stride_et", "stride_eh"),
)


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
    ):
        """[ROWS, COLS] from ptr on, 0 from row `rows` and column `cols` on (None: all are there).

        DTYPE None keeps the type.
        """
        r = tl.arange(0, ROWS)
        c = tl.arange(0, COLS)
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
    ):
        """Store [ROWS, COLS] but for what load_tile leaves out."""
        r = tl.arange(0, ROWS)
        c = tl.arange(0, COLS)
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
    def load_rows(ptr, stride, rows):
        """float32 [64] of a vector along frames, 0 from row `rows` on."""
        r = tl.arange(0, 64)
        return tl.load(ptr + r.to(tl.int64) * stride, mask=r < rows, other=0.0).to(tl.float32)

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

        The first is rounded by arithmetic on its bits: undoing a conversion costs more. A float32
        DTYPE leaves all to the first.
        """
        if DTYPE.primitive_bitwidth == 32:
            high = x
            low = x * 0.0
        else:
            DROPPED: tl.constexpr = (1 << (23 - DTYPE.fp_mantissa_width)) - 1
            bits = x.to(tl.int32, bitcast=True) + (DROPPED + 1) // 2
            top = (bits & ~DROPPED).to(tl.float32, bitcast=True)
            high = top.to(DTYPE)
            low = (x - top).to(DTYPE)
        return high, low

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
        high = load_tile(high_ptr, 64, 1, None, None, 64, 64, DTYPE)
        if TRANSPOSED:
            high = tl.trans(high)
        if DTYPE.primitive_bitwidth == 32:
            acc = tl.dot(high, x, acc, input_precision=PRECISION)
        else:
            low = load_tile(low_ptr, 64, 1, None, None, 64, 64, DTYPE)
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
        if HALVES and DTYPE.primitive_bitwidth < 32:
            values, low = halves(values, DTYPE)
            state = tl.dot(x, low, state)
        return tl.dot(x, values.to(DTYPE), state, input_precision=PRECISION)

    @triton.jit
    def load_block(
        ptr, stride_t, stride_k, rows, BLOCK: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
        DTYPE: tl.constexpr,
    ):  # fmt: skip
        """[64, BLOCK_K] of q or k: one block of key channels."""
        c0 = tl.cast(BLOCK * BLOCK_K, tl.int64)
        cols = None if (BLOCK + 1) * BLOCK_K <= K else K - BLOCK * BLOCK_K
        return load_tile(ptr + c0 * stride_k, stride_t, stride_k, rows, cols, 64, BLOCK_K, DTYPE)

    @triton.jit
    def load_state(
        ptr, v0, BLOCK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
        BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    ):  # fmt: skip
        """float32 [BLOCK_K, BLOCK_V] of a dense state [K, V]; zeros if there is none."""
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if ptr is not None:
            c0: tl.constexpr = BLOCK * BLOCK_K
            state = load_tile(ptr + c0 * V + v0, V, 1, K - c0, V - v0, BLOCK_K, BLOCK_V, tl.float32)
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
        store_tile(ptr + c0 * V + v0, state, V, 1, rows, cols, BLOCK_K, BLOCK_V)


# Whether Triton's interpreter was on when the kernels were defined: they then run on the CPU.
INTERPRETED = triton is not None and not isinstance(load_tile, triton.runtime.JITFunction)


def runs_fused(x, implementation):
    """Whether a layer's small operations on x are to run as kernels."""
    devices = ("cuda", "xpu") if implementation == "auto" else ("cuda", "xpu", "cpu")
    return (
        implementation != "eager"
        and triton is not None
        and x.device.type in devices
        and x.dtype != torch.float64
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


def in_vectors(x):
    """x [B,T,H,C] itself if its rows can be loaded as vectors and its blocks with 32-bit offsets,
    else a copy.

    For other strides the kernels would be compiled anew, for some of them wrongly: see CHANNELS.
    """
    *outer, inner = x.stride()
    whole = inner == 1 and x.data_ptr() % 16 == 0 and not any(s % 16 for s in outer)
    if whole and outer[1] * CHUNK < 2**31:
        return x
    return x.clone(memory_format=torch.contiguous_format)


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
        BLOCK_K=CHANNELS,
        BLOCK_V=min(block_v, max(16, triton.next_power_of_2(value_dim))),
        # With more warps Triton lets two groups compute the same 64 rows of a product.
        num_warps=4,
        num_stages=2 if half and _shared_memory(q.device) > 210_000 else 1,
    )
