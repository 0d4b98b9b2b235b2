"""The cases of the op that tests and benchmarks share, their tensors, and the float64 truth."""

from contextlib import contextmanager
from itertools import cycle
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ldsa_nn import eager_ldsa, ldsa_local_attention

# On the CPU the fused kernel runs in Triton's interpreter.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Memory orders, outermost dimension first, of [B,H,C,T] tensors.
ORDERS = {
    "channel_last": (0, 3, 1, 2),  # what a linear layer writes
    "time_last": (0, 1, 2, 3),
    "head_major": (0, 1, 3, 2),  # scaled dot-product attention's
    "batch_second": (3, 0, 1, 2),
}
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What a kernel may err beyond twice the error of eager PyTorch in the same dtype.
ATOL = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


class Case(NamedTuple):
    """One input of the op.

    layout: a key of ORDERS, or "mixed" (logits time-last, v channel-last), "strided" (every other
    frame of a wider channel-last buffer, off its alignment), "expanded" (one row of logits for the
    whole batch). lengths, starts: B ints or None. logits_dtype: where it is not dtype.
    """

    name: str
    batch: int
    heads: int
    frames: int
    head_dim: int
    left: int
    right: int
    dtype: torch.dtype = torch.float32
    layout: str = "channel_last"
    edge: str = "zero"
    lengths: tuple | None = None
    starts: tuple | None = None
    dropout_p: float = 0.0
    logits_dtype: torch.dtype | None = None

    def __str__(self):
        return self.name

    @property
    def window(self):
        return self.left + 1 + self.right


def lay_out(values, layout):
    """`values` [B,H,C,T] laid out in a buffer that holds NaN everywhere around them."""
    if layout == "expanded":
        return lay_out(values[:1], "channel_last").expand_as(values)
    order = ORDERS["channel_last" if layout == "strided" else layout]
    sizes = [values.shape[d] for d in order]
    skip = step = 0
    if layout == "strided":
        skip, step = 3, 2
        sizes[1], sizes[3] = step * sizes[1], sizes[3] + 8
    margin = 64  # elements: keeps what follows aligned to 128 bytes
    count = torch.Size(sizes).numel()
    buffer = torch.full((count + 2 * margin,), torch.nan, dtype=values.dtype, device=values.device)
    x = buffer[margin : margin + count].view(sizes)
    if layout == "strided":
        x = x[:, ::step, :, skip : skip + values.shape[2]]
    x = x.permute([order.index(d) for d in range(4)])
    return x.copy_(values)


def make(case, device, dtype=None):
    """Tensors of a case: (a_logits, v, grad of out, keyword arguments of the op).

    Frames outside the sequences hold NaN in all three, and so does the memory around them.
    """
    generator = torch.Generator(device).manual_seed(1)
    B, H, T = case.batch, case.heads, case.frames
    inside = torch.ones(B, 1, 1, T, dtype=torch.bool, device=device)
    options = {"edge": case.edge, "dropout_p": case.dropout_p}
    t = torch.arange(T, device=device)
    for name in ("lengths", "starts"):
        bound = getattr(case, name)
        if bound is not None:
            options[name] = torch.tensor(bound, dtype=torch.int64, device=device)
            beyond = (
                t < options[name][:, None] if name == "lengths" else t >= options[name][:, None]
            )
            inside = inside & beyond[:, None, None]

    def tensor(channels, scale, layout, dtype):
        x = scale * torch.randn(B, H, channels, T, generator=generator, device=device)
        return lay_out(torch.where(inside, x, torch.nan).to(dtype), layout)

    mixed = case.layout == "mixed"
    layout = "channel_last" if mixed or case.layout == "expanded" else case.layout
    a_logits = tensor(
        case.window,
        2.0,
        "time_last" if mixed else case.layout,
        dtype or case.logits_dtype or case.dtype,
    )
    v = tensor(case.head_dim, 1.0, layout, dtype or case.dtype)
    grad = tensor(case.head_dim, 1.0, layout, dtype or case.dtype)
    return a_logits, v, grad, options


def random(*shape, dtype=torch.float32, seed=0, device=DEVICE):
    """Normal numbers, the same ones in every dtype and on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def run(a_logits, v, grad, left, right, op=ldsa_local_attention, **options):
    """(out, grad_logits, grad_v) of the op."""
    a_logits, v = (x.detach().requires_grad_() for x in (a_logits, v))
    out = op(a_logits, v, left, right, **options)
    return out.detach(), *torch.autograd.grad(out, (a_logits, v), grad)


def truth(a_logits, v, grad, left, right, **options):
    """The same in float64."""
    return run(a_logits.double(), v.double(), grad.double(), left, right, eager_ldsa, **options)


def error(x, expected):
    """Largest absolute error; NaN, which no bound admits, where either is NaN."""
    assert x.shape == expected.shape
    return (x.double() - expected.double()).abs().max().item() if x.numel() else 0.0


def close(results, expected, tolerance):
    """Whether every result is within the tolerance of what is expected."""
    return all(error(x, y) <= tolerance for x, y in zip(results, expected, strict=True))


class Recorder(TorchDispatchMode):
    """Notes every operator that runs below autograd: (operator, args, kwargs, result)."""

    def __enter__(self):
        self.calls = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def names(self):
        return [call[0].name() for call in self.calls]


def captured(function):
    """A CUDA graph of function() after one warm-up call, and what the call returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


@contextmanager
def no_waiting():
    """An error where the host waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Small enough for Triton's interpreter on a CPU.
SMALL = [
    Case("one_frame", 2, 2, 1, 8, 7, 7),
    Case("one_frame_renormalize", 2, 1, 1, 8, 7, 7, torch.float16, edge="renormalize"),
    Case("window_but_one", 1, 2, 14, 8, 7, 7, layout="time_last", edge="renormalize"),
    Case("exactly_the_window", 2, 1, 15, 8, 7, 7, torch.float16, "time_last"),
    Case("causal", 1, 2, 63, 16, 14, 0, torch.bfloat16),
    Case("causal_time_last", 1, 2, 63, 16, 14, 0, torch.float16, "time_last"),
    Case("causal_renormalize", 2, 1, 33, 64, 14, 0, edge="renormalize"),
    Case("itself_alone", 1, 2, 17, 1, 0, 0),
    Case("itself_alone_time_last", 1, 1, 17, 5, 0, 0, torch.bfloat16, "time_last", "renormalize"),
    Case("ahead_alone", 1, 2, 37, 7, 0, 5, layout="mixed", edge="renormalize"),
    Case("uneven", 1, 1, 130, 3, 5, 3, torch.bfloat16, "mixed"),
    Case("ragged", 5, 1, 40, 5, 5, 3, lengths=(40, 17, 16, 1, 0)),
    Case("ragged_time_last", 3, 1, 33, 9, 2, 4, torch.float16, "time_last", lengths=(33, 20, 7)),
    Case(
        "ragged_both_ends", 4, 1, 40, 5, 5, 3, edge="renormalize",
        lengths=(40, 30, 20, 9), starts=(0, 16, 7, 9),
    ),
    Case(
        "left_padded", 3, 1, 35, 12, 4, 4, torch.bfloat16, "head_major", "renormalize",
        starts=(0, 13, 34),
    ),
    Case("beyond_the_bounds", 3, 1, 20, 4, 2, 1, lengths=(21, 1000, -3), starts=(-5, 3, -1)),
    Case("strided", 2, 2, 21, 10, 3, 2, layout="strided"),
    Case("strided_ragged", 2, 1, 35, 36, 6, 6, torch.float16, "strided", lengths=(35, 18)),
    Case("expanded", 3, 1, 20, 6, 2, 2, layout="expanded"),
    Case("head_major", 1, 2, 40, 40, 7, 7, torch.bfloat16, "head_major"),
    Case("batch_second", 3, 2, 18, 8, 3, 0, torch.float16, "batch_second"),
    Case("window_31", 1, 1, 130, 3, 15, 15),
    Case("window_63", 1, 1, 62, 36, 31, 31, torch.bfloat16, "time_last", "renormalize"),
    Case(
        "wide_ragged", 3, 1, 150, 8, 20, 50, torch.bfloat16, "strided", "renormalize",
        lengths=(150, 90, 64), starts=(0, 70, 3),
    ),
    Case("window_127", 2, 1, 63, 8, 126, 0, lengths=(63, 40), edge="renormalize"),
    Case("window_255", 1, 1, 40, 5, 127, 127, torch.float16),
    Case("head_of_256", 1, 1, 20, 256, 2, 1, layout="time_last"),
    Case("head_of_72", 1, 1, 33, 72, 3, 3, torch.float16),
    Case("long", 1, 1, 1000, 4, 1, 1, torch.bfloat16),
    Case("fp32_logits", 2, 1, 33, 8, 7, 7, torch.bfloat16, logits_dtype=torch.float32),
    Case("bf16_logits", 2, 1, 33, 8, 7, 7, torch.float32, logits_dtype=torch.bfloat16),
    Case("fp16_logits", 1, 1, 33, 8, 3, 7, torch.bfloat16, logits_dtype=torch.float16),
]  # fmt: skip


def _large():
    """One case for each pair of tile sizes (of window and head) and size of element.

    The rest of what a case has goes round in steps of its own.
    """
    time_last = ["time_last", "mixed"]  # the logits: what the choice of tiles looks at
    others = ["channel_last", "strided", "head_major", "channel_last", "batch_second"]
    every = ["channel_last", "time_last", "channel_last", "strided", "time_last", "mixed"]
    windows = [
        (cycle(pairs), cycle(layouts))
        for pairs, layouts in (
            ([(14, 0), (7, 7), (0, 0), (0, 5), (15, 0)], others),
            ([(14, 0), (7, 7), (9, 2), (0, 5), (0, 0)], time_last),
            ([(15, 15), (30, 0), (17, 2), (31, 0), (16, 0)], every),
            ([(31, 31), (62, 0), (3, 40), (32, 31), (32, 0)], every),
            ([(63, 63), (126, 0), (64, 63), (64, 0)], every),
            ([(127, 127), (254, 0), (128, 0)], every),
        )
    ]
    heads = [
        cycle(dims)
        for dims in ([8, 16, 1, 5], [32, 25], [64, 40, 36], [128, 96, 80, 72], [256, 129, 200])
    ]
    narrow = cycle([torch.bfloat16, torch.float16])
    edges = cycle(["zero", "renormalize"])
    frames = cycle([130, 1000, None, 63, 130, -1, 1000, 257, 1])  # None: W, -1: W - 1
    ragged = cycle([False, True, False])
    for window, layouts in windows:
        for head in heads:
            for dtype in (torch.float32, next(narrow)):
                left, right = next(window)
                W, T = left + 1 + right, next(frames)
                T = max(1, W + (T or 0)) if T in (None, -1) else T
                bounds = next(ragged) and {"lengths": (T, T // 2, T), "starts": (0, 0, T // 3)}
                head_dim, layout, edge = next(head), next(layouts), next(edges)
                name = f"W{left}+1+{right}-D{head_dim}-T{T}-{str(dtype)[6:]}-{layout}-{edge}"
                yield Case(
                    name + "-ragged" * bool(bounds),
                    3, 2, T, head_dim, left, right, dtype, layout, edge, **(bounds or {}),
                )  # fmt: skip


LARGE = list(_large())


def _sized(
    batch,
    frames,
    left=14,
    right=0,
    dtype=torch.bfloat16,
    layout="channel_last",
    *,
    heads=8,
    head_dim=64,
):
    kind = next(name for name, value in FLOATS.items() if value == dtype)
    name = f"{batch}x{frames}-H{heads}x{head_dim}-{left}+1+{right}-{kind}-{layout}"
    return Case(name, batch, heads, frames, head_dim, left, right, dtype, layout)


_HALVES = (torch.bfloat16, torch.float16)
# What speech encoders ask of the op, in groups that a benchmark judges alike.
BENCHMARKS = {
    "channel-last": [
        _sized(32, frames, left, right, dtype)
        for dtype in _HALVES
        for left, right in ((14, 0), (7, 7))
        for frames in (1024, 3000)
    ],
    "time-last": [
        _sized(32, frames, left, right, dtype, "time_last")
        for dtype in _HALVES
        for left, right in ((14, 0), (7, 7))
        for frames in (1024, 3000)
    ],
    "windows of 31 and 63": [
        _sized(32, 1000, side, side, dtype) for dtype in _HALVES for side in (15, 31)
    ],
    "windows of 127": [_sized(32, 1000, 63, 63, dtype) for dtype in _HALVES],
    "float32": [
        _sized(32, 1024, dtype=torch.float32),
        _sized(32, 3000, dtype=torch.float32),
        _sized(32, 3000, 7, 7, torch.float32, "time_last"),
    ],
    "head widths and heads": [
        *(_sized(32, 1024, head_dim=width) for width in (32, 40, 80, 96, 128)),
        *(_sized(32, 1024, heads=heads) for heads in (4, 16)),
    ],
    "shapes of the published card": [
        _sized(*size) for size in ((16, 256), (16, 512), (32, 1024), (16, 2048), (32, 3000))
    ],
}
BENCHMARK = list(dict.fromkeys(case for cases in BENCHMARKS.values() for case in cases))
# For curves over T and over W.
OVER_FRAMES = [_sized(32, frames) for frames in (128, 256, 512, 1024, 2048, 3000)]
OVER_WINDOWS = [_sized(32, 1000, side, side) for side in (1, 3, 7, 15, 31, 63)]
