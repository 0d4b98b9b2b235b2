"""The cases of the delta rule that tests and benchmarks share, their tensors, and the truth."""

from itertools import pairwise
from typing import NamedTuple

import torch
from cases import DEVICE, random

from ldsa_nn import tiled_delta_rule

NAMES = ("out", "state", "grad_q", "grad_k", "grad_v", "grad_g", "grad_beta", "grad_initial")
# Root mean square error relative to the truth: of results in the dtype, then what factor correlated
# keys may add.
BUDGET = {
    torch.float64: dict.fromkeys(NAMES, 1e-10),
    torch.float32: dict.fromkeys(NAMES, 1e-5),
    torch.bfloat16: dict.fromkeys(NAMES, 8e-3) | {"out": 5e-3, "grad_g": 2e-2, "grad_beta": 2e-2},
}
BUDGET[torch.float16] = BUDGET[torch.bfloat16]


class DeltaCase(NamedTuple):
    """One input of the delta rule.

    keys: "random", "correlated" (0.7 of every key is the same) or "identical". gate: log decay of
    every frame and tile, or "mixed" (from none to strong by tile, some frames forget all). beta:
    its largest value. lengths: B ints or None; cu_seqlens: N + 1 ints or None. layout: "dense",
    "strided" (every other frame of a wider buffer, heads outside frames) or "expanded".
    """

    name: str
    batch: int
    frames: int
    heads: int
    key_dim: int
    tiles: int
    value_dim: int
    dtype: torch.dtype = torch.float32
    keys: str = "random"
    gate: float | str = "mixed"
    beta: float = 1.99
    lengths: tuple | None = None
    cu_seqlens: tuple | None = None
    layout: str = "dense"

    def __str__(self):
        return self.name

    @property
    def sequences(self):
        return self.batch if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def bounds(self):
        """(row, first frame, end) of each sequence."""
        if self.cu_seqlens is not None:
            places = self.cu_seqlens
            return [(0, a, b) for a, b in pairwise(places)]
        ends = [self.frames] * self.batch if self.lengths is None else self.lengths
        return [(b, 0, min(max(end, 0), self.frames)) for b, end in enumerate(ends)]

    def outside(self):
        """Bool [B,T]: the frame is of no sequence."""
        outside = torch.ones(self.batch, self.frames, dtype=torch.bool)
        for row, first, end in self.bounds():
            outside[row, first:end] = False
        return outside.to(DEVICE)


def lay_out(x, layout):
    """x [B,T,...] in other memory."""
    if layout == "dense":
        return x
    if layout == "expanded":
        return x[:, :1].expand_as(x)
    B, T, H, *rest = x.shape
    buffer = torch.full((H, B, 2 * T + 1, *(n + 3 for n in rest)), torch.nan).to(x)
    view = buffer[:, :, 1::2].movedim(0, 2)
    view = view[..., 2:-1] if rest else view
    return view.copy_(x)


def make(case, dtype=None):
    """(tensors q, k, v, g, beta, initial_state; gradients of out and state; keyword arguments).

    Frames of no sequence hold NaN in all of them.
    """
    B, T, H, K, V = case.batch, case.frames, case.heads, case.key_dim, case.value_dim
    q, k, v = (random(B, T, H, n, dtype=torch.float64, seed=i) for i, n in enumerate((K, K, V)))
    share = {"random": 0.0, "correlated": 0.7, "identical": 1.0}[case.keys]
    k = (1 - share) * k + share * random(B, 1, H, K, dtype=torch.float64, seed=3)
    q, k = (x / x.norm(dim=3, keepdim=True) for x in (q, k))
    if case.gate == "mixed":
        pace = torch.tensor([0.001, 0.1, 2.0, 16.0], dtype=torch.float64, device=DEVICE)
        noise = random(B, T, H, case.tiles, dtype=torch.float64, seed=4)
        g = -torch.nn.functional.softplus(noise) * pace.repeat(case.tiles)[: case.tiles]
        g = torch.where(noise > 1.7, -1000.0, g)
    else:
        g = torch.full((B, T, H, case.tiles), case.gate, dtype=torch.float64, device=DEVICE)
    beta = case.beta * torch.sigmoid(2 * random(B, T, H, dtype=torch.float64, seed=5))
    grad = random(B, T, H, V, dtype=torch.float64, seed=6)
    outside = case.outside()

    def finish(x, kind):
        mask = outside.view(B, T, *[1] * (x.dim() - 2))
        return lay_out(torch.where(mask, torch.nan, x).to(kind), case.layout)

    dtype = dtype or case.dtype
    # What a layer gives in float32 whatever the dtype of its products.
    wide = torch.promote_types(dtype, torch.float32)
    kinds = (dtype, dtype, dtype, wide, wide)
    tensors = [finish(x, kind) for x, kind in zip((q, k, v, g, beta), kinds, strict=True)]
    state = (case.sequences, H, K, V)
    tensors.append(random(*state, dtype=wide, seed=7))
    grads = finish(grad, dtype), random(*state, dtype=wide, seed=8)
    options = {
        name: torch.tensor(getattr(case, name), dtype=torch.int64, device=DEVICE)
        for name in ("lengths", "cu_seqlens")
        if getattr(case, name) is not None
    }
    return tensors, grads, options


def run(tensors, grads, op=tiled_delta_rule, **options):
    """(out, state, then the gradients of all six tensors)."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    *tensors, initial_state = tensors
    out, state = op(*tensors, initial_state=initial_state, output_final_state=True, **options)
    results = torch.autograd.grad(
        (out, state), [*tensors, initial_state], grads, allow_unused=True, materialize_grads=True
    )
    return out.detach(), state.detach(), *results


def by_definition(tensors, grads, bounds, scale=None, least_gate=-torch.inf):
    """The same in float64, one sequence and one frame after the other.

    least_gate: what stronger gates count as.
    """
    inputs = [x.detach().double().requires_grad_() for x in tensors]
    q, k, v, g, beta, initial = inputs
    scale = q.shape[3] ** -0.5 if scale is None else scale
    width = q.shape[3] // g.shape[3]
    # Unbound once: the gradient of an index is as large as what it looks into.
    q_t, k_t, v_t, g_t, beta_t, grad_t = (
        x.unbind(1) for x in (scale * q, k, v, g.clamp(min=least_gate), beta, grads[0].double())
    )
    out, states, loss = torch.zeros_like(v).detach(), [], 0 * initial.sum()
    for n, (row, first, end) in enumerate(bounds):
        S = initial[n]  # [H,K,V]
        for t in range(first, end):
            S = g_t[t][row].exp().repeat_interleave(width, 1)[:, :, None] * S
            key = k_t[t][row][:, :, None]
            error = v_t[t][row] - (key * S).sum(1)
            S = S + beta_t[t][row][:, None, None] * key * error[:, None]
            o = (q_t[t][row][:, :, None] * S).sum(1)
            out[row, t] = o.detach()
            loss = loss + (o * grad_t[t][row]).sum()
        states.append(S)
        loss = loss + (S * grads[1][n].double()).sum()
    results = torch.autograd.grad(loss, inputs, allow_unused=True)
    results = [
        torch.zeros_like(x) if r is None else r for x, r in zip(inputs, results, strict=True)
    ]
    state = torch.stack(states) if states else initial
    return out, state.detach(), *results


def relative(x, expected, least=0.3):
    """Root mean square error relative to that of what is expected, if that is not very small."""
    if not x.numel():
        return 0.0
    size = expected.double().square().mean().sqrt().item()
    return (x.double() - expected.double()).square().mean().sqrt().item() / max(size, least)


# Small enough for the interpreter. Partial chunks, many chunks, odd widths, every kind of key,
# gate, bound and memory.
SMALL = [
    DeltaCase("one_frame", 2, 1, 2, 16, 4, 8),
    DeltaCase("seven", 1, 7, 1, 8, 2, 8, gate=0.0),
    DeltaCase("fifty", 1, 50, 1, 16, 1, 8, gate=0.0, keys="identical"),
    DeltaCase("sixty_three", 1, 63, 1, 16, 4, 8, keys="correlated", gate=-5.0),
    DeltaCase("one_chunk", 1, 64, 1, 16, 4, 8, gate=-20.0),
    DeltaCase("a_frame_more", 1, 65, 1, 8, 4, 16, keys="identical"),
    DeltaCase("four_chunks", 1, 200, 1, 8, 2, 8, keys="correlated", gate=0.0),
    DeltaCase("forget_all", 1, 70, 1, 8, 2, 8, gate=-1000.0),
    DeltaCase("a_tile_a_channel", 1, 65, 1, 8, 8, 8),
    DeltaCase("odd_widths", 1, 40, 2, 15, 3, 9),
    DeltaCase("ragged", 4, 70, 1, 8, 2, 8, lengths=(70, 64, 7, 0)),
    DeltaCase("beyond_the_bounds", 3, 20, 1, 8, 2, 8, lengths=(21, 1000, -3)),
    DeltaCase("few_ragged", 3, 5, 2, 8, 2, 8, lengths=(5, 3, 0)),
    DeltaCase("packed", 1, 150, 1, 8, 2, 8, cu_seqlens=(0, 5, 5, 70, 134, 150)),
    DeltaCase("packed_inside", 1, 90, 1, 8, 2, 8, cu_seqlens=(10, 80)),
    DeltaCase("packed_few", 1, 6, 2, 8, 2, 8, cu_seqlens=(1, 3, 4)),
    DeltaCase("strided", 2, 66, 2, 8, 2, 8, layout="strided", lengths=(66, 30)),
    DeltaCase("expanded", 2, 20, 1, 8, 2, 8, layout="expanded"),
    DeltaCase("bf16", 1, 100, 1, 64, 4, 64, torch.bfloat16),
    DeltaCase("bf16_correlated", 1, 100, 1, 64, 4, 64, torch.bfloat16, "correlated", 0.0),
    DeltaCase("fp16", 2, 40, 1, 16, 4, 16, torch.float16, lengths=(40, 17)),
]
# For a GPU and the eager path.
LARGE = [
    *(
        DeltaCase(f"T{T}-{keys}-{gate}", 1, T, 2, 64, 4, 32, keys=keys, gate=gate)
        for T in (1, 7, 50, 63, 64, 65, 200)
        for keys in ("random", "correlated", "identical")
        for gate in (0.0, -5.0, -20.0, -1000.0, "mixed")
    ),
    DeltaCase("long", 1, 4096, 1, 16, 4, 8, keys="correlated", gate="mixed"),
    DeltaCase("long_without_decay", 1, 4096, 1, 16, 4, 8, keys="identical", gate=0.0),
    DeltaCase("wide", 2, 80, 1, 256, 4, 512, lengths=(80, 70)),
    *(
        DeltaCase(f"wide-{str(dtype)[6:]}-{keys}", 1, 100, 1, 256, 4, 512, dtype, keys)
        for dtype in (torch.bfloat16, torch.float16)
        for keys in ("random", "correlated")
    ),
    *(
        DeltaCase(f"K{K}-tiles{tiles}-V{V}", 2, 100, 1, K, tiles, V, lengths=(100, 66))
        for K, tiles, V in [
            (64, 1, 128),
            (128, 2, 256),
            (96, 4, 64),
            (256, 256, 32),
            (192, 3, 1024),
        ]
    ),
]

HALVES = torch.bfloat16, torch.float16
# For a GPU: the layer's own widths in what it is trained in, every kind of bound and of memory.
FULL = [
    *(
        DeltaCase(f"full-T{T}-{keys}-{gate}", 1, T, 2, 256, 4, 512, torch.bfloat16, keys, gate)
        for T in (1, 7, 65, 200)
        for keys in ("random", "correlated", "identical")
        for gate in (0.0, -5.0, -20.0, -1000.0, "mixed")
    ),
    *(
        DeltaCase(f"full-{str(dtype)[6:]}-V{V}-{keys}", 1, 200, 2, 256, 4, V, dtype, keys, gate)
        for dtype in (*HALVES, torch.float32)
        for V in (128, 512)
        for keys, gate in (("random", "mixed"), ("correlated", 0.0))
    ),
    *(
        DeltaCase(f"full-{str(dtype)[6:]}-{name}", B, 300, 2, 256, 4, 512, dtype, **options)
        for dtype in HALVES
        for name, B, options in (
            ("ragged", 4, {"lengths": (300, 64, 7, 0)}),
            ("packed", 1, {"cu_seqlens": (3, 10, 10, 138, 139, 290)}),
            ("strided", 2, {"layout": "strided", "lengths": (300, 129)}),
            ("expanded", 2, {"layout": "expanded"}),
        )
    ),
]
