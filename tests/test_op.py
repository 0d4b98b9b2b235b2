"""The op: what it computes, in eager PyTorch and fused, on every kind of input."""

import importlib
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import (
    ATOL,
    BENCHMARK,
    DEVICE,
    LARGE,
    ORDERS,
    SMALL,
    Case,
    Recorder,
    close,
    error,
    lay_out,
    make,
    random,
    run,
    truth,
)
from conftest import HAS_GPU, ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from ldsa_nn import eager_ldsa, ldsa_local_attention, ldsa_weights


@pytest.fixture(params=["eager", "triton"])
def implementation(request):
    return request.param


@pytest.fixture
def poisoned_memory():
    """Whatever torch allocates holds NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty_permuted((2, 3), (1, 0), device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def same_bits(results, expected):
    return all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


# What is computed


def by_definition(a_logits, v, grad, left, edge, lengths, starts):
    """(out, grad_logits, grad_v, weights), one frame at a time."""
    (B, H, W, T), logits = a_logits.shape, a_logits.double().cpu().numpy()
    v, grad = v.double().cpu().numpy(), grad.double().cpu().numpy()
    out, grad_v = np.zeros(v.shape), np.zeros(v.shape)
    grad_logits, weights = np.zeros(logits.shape), np.zeros(logits.shape)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        first = 0 if starts is None else min(max(starts[b], 0), T)
        end = T if lengths is None else min(max(lengths[b], 0), T)
        if not first <= t < end:
            continue
        inside = [k for k in range(W) if first <= t - left + k < end]
        slots = range(W) if edge == "zero" else inside
        top = max(logits[b, h, k, t] for k in slots)
        if top == -math.inf:
            continue
        if top == math.inf:
            e = {k: float(logits[b, h, k, t] == math.inf) for k in slots}
        else:
            e = {k: math.exp(logits[b, h, k, t] - top) for k in slots}
        share = dict.fromkeys(slots, 0.0)
        for k in slots:
            weights[b, h, k, t] = e[k] / math.fsum(e.values())
        for k in inside:
            s = t - left + k
            out[b, h, :, t] += weights[b, h, k, t] * v[b, h, :, s]
            grad_v[b, h, :, s] += weights[b, h, k, t] * grad[b, h, :, t]
            share[k] = grad[b, h, :, t] @ v[b, h, :, s]
        mean = math.fsum(weights[b, h, k, t] * x for k, x in share.items())
        for k in slots:
            grad_logits[b, h, k, t] = weights[b, h, k, t] * (share[k] - mean)
    return tuple(torch.from_numpy(x).to(DEVICE) for x in (out, grad_logits, grad_v, weights))


BOUNDS = {
    "whole": {},
    "lengths": {"lengths": [9, 4, 0]},
    "starts": {"starts": [0, 5, 9]},
    "both": {"lengths": [9, 7, 3], "starts": [2, 0, 3]},
    "beyond": {"lengths": [99, -1, 5], "starts": [-2, 0, 99]},
}


@pytest.mark.parametrize(
    ("left", "right", "edge", "bounds"),
    [
        *itertools.product([2], [3], ["zero", "renormalize"], BOUNDS),
        (0, 0, "renormalize", "both"),
        (3, 0, "zero", "lengths"),
        (0, 2, "renormalize", "starts"),
        (11, 12, "zero", "both"),
        (11, 12, "renormalize", "whole"),
    ],
)
def test_by_definition(implementation, left, right, edge, bounds):
    """Outputs, gradients and weights; rows of -inf too, whole and in part, and rows of +inf."""
    dtype, tolerance = {"eager": (torch.float64, 1e-12), "triton": (torch.float32, 3e-6)}[
        implementation
    ]
    W, T = left + 1 + right, 9
    a_logits, v = random(3, 1, W, T, dtype=dtype), random(3, 1, 2, T, dtype=dtype, seed=1)
    grad = random(3, 1, 2, T, dtype=dtype, seed=2)
    a_logits[0, 0, :, 3] = -math.inf
    a_logits[0, 0, left:, 5] = -math.inf
    a_logits[1, 0, left + 1 :, 2] = -math.inf
    bounds = BOUNDS[bounds]
    options = {"edge": edge, **{name: torch.tensor(x) for name, x in bounds.items()}}
    bounds = [bounds.get("lengths"), bounds.get("starts")]

    *expected, weights = by_definition(a_logits, v, grad, left, edge, *bounds)
    results = run(a_logits, v, grad, left, right, implementation=implementation, **options)
    assert close(results, expected, tolerance)
    computed = ldsa_weights(a_logits, left, right, **options)
    assert computed.dtype == dtype
    assert error(computed, weights) <= tolerance

    a_logits[0, 0, :, 4] = math.inf
    a_logits[0, 0, left:, 6] = math.inf
    out, *_, weights = by_definition(a_logits, v, grad, left, edge, *bounds)
    results = ldsa_local_attention(
        a_logits, v, left, right, implementation=implementation, **options
    )
    assert error(results, out) <= tolerance
    assert error(ldsa_weights(a_logits, left, right, **options), weights) <= tolerance


def test_the_published_call():
    """Four positional arguments, [B,H,W,T] and [B,H,Dh,T]."""
    a_logits, v = random(2, 2, 4, 6), random(2, 2, 3, 6, seed=1)
    out = ldsa_local_attention(a_logits, v, 2, 1)
    padded = torch.nn.functional.pad(v, (2, 1)).unfold(3, 4, 1)
    assert error(out, torch.einsum("bhkt,bhdtk->bhdt", a_logits.softmax(2), padded).double()) < 1e-6
    assert same_bits([eager_ldsa(a_logits, v, 2, 1)], [
        ldsa_local_attention(a_logits, v, 2, 1, implementation="eager")
    ])  # fmt: skip


@pytest.mark.parametrize("bounds", [{}, {"lengths": [6, 4], "starts": [1, 0]}], ids=["", "ragged"])
@pytest.mark.parametrize("edge", ["zero", "renormalize"])
@pytest.mark.parametrize(("left", "right"), [(2, 1), (0, 0), (4, 7)])
def test_eager_derivatives_of_both_orders(left, right, edge, bounds):
    a_logits = random(2, 1, left + 1 + right, 6, dtype=torch.float64).requires_grad_()
    v = random(2, 1, 2, 6, dtype=torch.float64, seed=1).requires_grad_()
    options = {"edge": edge, **{name: torch.tensor(x) for name, x in bounds.items()}}

    def op(a_logits, v):
        return eager_ldsa(a_logits, v, left, right, **options)

    def weights(a_logits):
        return ldsa_weights(a_logits, left, right, **options)

    assert torch.autograd.gradcheck(op, (a_logits, v))
    assert torch.autograd.gradgradcheck(op, (a_logits, v))
    assert torch.autograd.gradcheck(weights, (a_logits,))
    assert torch.autograd.gradgradcheck(weights, (a_logits,))


# The battery: every case of cases.py


def dense(x):
    """Whether x fills its memory without gaps or overlaps."""
    extents = sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)
    return all(s == math.prod(n for _, n in extents[:i]) for i, (s, _) in enumerate(extents))


def order(x):
    """Dimensions from the outermost to the innermost; those of one element lie anywhere."""
    return sorted((d for d in range(4) if x.shape[d] > 1), key=lambda d: -x.stride(d))


def stored(x):
    """All bytes of the memory that x is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).clone()


def outside(case):
    """Bool [B,1,1,T]."""
    t = torch.arange(case.frames, device=DEVICE)
    end = torch.tensor(case.lengths or [case.frames] * case.batch, device=DEVICE)
    start = torch.tensor(case.starts or [0] * case.batch, device=DEVICE)
    return ((t < start[:, None]) | (t >= end[:, None]))[:, None, None]


def check(case, implementation, runs=1):
    a_logits, v, grad, options = make(case, DEVICE)
    before = [stored(x) for x in (a_logits, v, grad)]
    expected = truth(a_logits, v, grad, case.left, case.right, **options)
    eager = run(a_logits, v, grad, case.left, case.right, eager_ldsa, **options)
    options["implementation"] = implementation
    results = run(a_logits, v, grad, case.left, case.right, **options)

    names = ("out", "grad_logits", "grad_v")
    for name, x, e, y, like in zip(names, results, eager, expected, (v, a_logits, v), strict=True):
        assert x.dtype == like.dtype, name
        assert y.isfinite().all(), name
        if implementation == "eager":
            budget = torch.finfo(x.dtype).eps * y.abs().max().item()
        else:
            budget = 2 * error(e, y)
        assert error(x, y) <= budget + ATOL[x.dtype], name
        assert not x.masked_select(outside(case)).any(), f"{name} outside the sequences"
        if name == "out" or implementation == "triton":  # a gradient is promised no order
            assert dense(x), name
            if 0 not in like.stride():
                assert order(x) == order(like), name
    assert same_bits([stored(x) for x in (a_logits, v, grad)], before), "an input was modified"
    for _ in range(runs - 1):
        assert same_bits(run(a_logits, v, grad, case.left, case.right, **options), results)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small_cases(implementation, case):
    check(case, implementation)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", LARGE + BENCHMARK, ids=str)
def test_large_cases(case):
    check(case, "triton", runs=3)


@pytest.mark.usefixtures("poisoned_memory")
@settings(max_examples=10 if HAS_GPU else 25)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(0, 40)),
    edge=st.sampled_from(["zero", "renormalize"]),
    data=st.data(),
)
def test_any_extents(shape, edge, data):
    B, H, T = shape
    bounds = st.lists(st.integers(-2, T + 2), min_size=B, max_size=B).map(tuple)
    lengths, starts = data.draw(bounds, "lengths"), data.draw(bounds, "starts")
    case = Case("drawn", B, H, T, 5, 2, 3, edge=edge, lengths=lengths, starts=starts)
    a_logits, v, grad, options = make(case, DEVICE)
    expected = truth(a_logits, v, grad, 2, 3, **options)
    for implementation in ("eager", "triton"):
        results = run(a_logits, v, grad, 2, 3, implementation=implementation, **options)
        assert close(results, expected, 1e-5)
        assert not any(x.masked_select(outside(case)).any() for x in results)


# Memory layouts


@pytest.mark.parametrize("dims", [(0,), (3,), (0, 1, 2, 3)], ids=str)
def test_values_expanded(implementation, dims):
    """Stride 0: the result is dense, and right."""
    a_logits, grad = random(3, 2, 6, 21), random(3, 2, 8, 21, seed=2)
    v = random(*(1 if d in dims else n for d, n in enumerate((3, 2, 8, 21))), seed=1)
    v = v.expand(3, 2, 8, 21)
    results = run(a_logits, v, grad, 3, 2, implementation=implementation)
    assert close(results, truth(a_logits, v, grad, 3, 2), 1e-5)
    assert dense(results[0])


@pytest.mark.parametrize("kind", ["sum", "frames", "sliced", *ORDERS])
def test_any_strides_of_the_output_gradient(implementation, kind):
    a_logits, v, grad = random(2, 2, 6, 21), random(2, 2, 8, 21, seed=1), random(2, 2, 8, 21)
    if kind == "sum":
        grad = torch.ones((), device=DEVICE).expand_as(grad)
    elif kind == "frames":
        grad = grad[..., :1].expand_as(grad)
    elif kind == "sliced":
        grad = lay_out(random(2, 2, 24, 84), "time_last")[:, :, 1::3, 2::4]
    else:
        grad = lay_out(grad, kind)
    results = run(a_logits, v, grad, 3, 2, implementation=implementation)
    assert close(results, truth(a_logits, v, grad, 3, 2), 1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_of_any_kind_as_bounds(implementation, dtype):
    a_logits, v, grad = random(4, 1, 6, 21), random(4, 1, 8, 21, seed=1), random(4, 1, 8, 21)
    lengths, starts = [21, 20, 3, 9], [0, 2, 5, 8]
    expected = truth(
        a_logits, v, grad, 3, 2, lengths=torch.tensor(lengths), starts=torch.tensor(starts)
    )
    every_other = torch.tensor([lengths, starts], dtype=dtype).t().reshape(-1).to(DEVICE)
    results = run(
        a_logits, v, grad, 3, 2, implementation=implementation,
        lengths=every_other[::2], starts=every_other[1::2],
    )  # fmt: skip
    assert close(results, expected, 1e-5)
    one = torch.tensor(9, dtype=dtype).expand(4)  # on the CPU, also where v is not
    results = run(a_logits, v, grad, 3, 2, implementation=implementation, lengths=one)
    assert close(results, truth(a_logits, v, grad, 3, 2, lengths=one), 1e-5)


# Invariants


@pytest.mark.parametrize("layout", ["channel_last", "time_last"])
@pytest.mark.parametrize("edge", ["zero", "renormalize"])
def test_padded_equals_alone(implementation, edge, layout):
    case = Case("padded", 3, 1, 50, 8, 3, 2, layout=layout, edge=edge, lengths=(37, 50, 16))
    a_logits, v, grad, options = make(case, DEVICE)
    options["implementation"] = implementation
    batch = run(a_logits, v, grad, 3, 2, **options)
    for b, n in enumerate(case.lengths):
        alone = [lay_out(x[b : b + 1, ..., :n].clone(), layout) for x in (a_logits, v, grad)]
        del options["lengths"]
        results = run(*alone, 3, 2, **options)
        options["lengths"] = torch.tensor(case.lengths)
        row = [x[b : b + 1, ..., :n] for x in batch]
        if implementation == "triton" and layout == "channel_last":
            assert same_bits(row, results)
        else:
            assert close(row, results, 1e-6)
        # Padded in front instead.
        front = [
            lay_out(torch.nn.functional.pad(x, (50 - n, 0), value=math.nan), layout) for x in alone
        ]
        moved = run(
            *front, 3, 2, starts=torch.tensor([50 - n]), edge=edge, implementation=implementation
        )
        assert close([x[..., 50 - n :] for x in moved], results, 2e-6)
        assert not any(x[..., : 50 - n].any() for x in moved)


def test_batch_order_is_of_no_matter(implementation):
    case = Case("mates", 4, 2, 21, 8, 3, 2, torch.bfloat16, lengths=(21, 9, 17, 0))
    a_logits, v, grad, options = make(case, DEVICE)
    options["implementation"] = implementation
    results = run(a_logits, v, grad, 3, 2, **options)
    turned = [2, 0, 3, 1]
    options["lengths"] = options["lengths"][turned]
    moved = run(*(lay_out(x[turned], "channel_last") for x in (a_logits, v, grad)), 3, 2, **options)
    if implementation == "triton":
        assert same_bits(moved, [x[turned] for x in results])
    else:
        assert close(moved, [x[turned].double() for x in results], 1e-2)


def test_equal_runs_give_equal_bits(implementation):
    case = Case("again", 1, 2, 40, 8, 3, 2, torch.bfloat16, edge="renormalize", dropout_p=0.2)
    a_logits, v, grad, options = make(case, DEVICE)
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        results.append(run(a_logits, v, grad, 3, 2, implementation=implementation, **options))
    assert same_bits(*results)


def test_only_the_gradients_that_are_required(implementation):
    """Each alone is itself among both, to rounding, and nothing is computed for the other."""
    a_logits, v, grad = random(2, 2, 6, 21), random(2, 2, 8, 21, seed=1), random(2, 2, 8, 21)
    both = run(a_logits, v, grad, 3, 2, implementation=implementation)[1:]
    for wanted, expected in enumerate(both):
        inputs = [a_logits.clone(), v.clone()]
        inputs[wanted].requires_grad_()
        out = ldsa_local_attention(*inputs, 3, 2, implementation=implementation)
        with Recorder() as recorder:
            out.backward(grad)
        torch.testing.assert_close(inputs[wanted].grad, expected, atol=1e-6, rtol=1e-6)
        assert inputs[1 - wanted].grad is None
        if implementation == "triton":
            (results,) = (
                result
                for func, _, _, result in recorder.calls
                if func.name() == "ldsa_nn::local_attention_backward"
            )
            assert sum(x.numel() for x in results) == expected.numel()


# Dropout


def used_weights(a_logits, left, right, p, implementation, seed, **options):
    """The weights [B,H,W,T] after dropout, as forward and as backward used them.

    Seen through values of one channel for each frame modulo W, so that each slot of a window has a
    channel to itself; 0 at slots beyond the edge.
    """
    B, H, W, T = a_logits.shape
    t, k = torch.arange(T, device=DEVICE), torch.arange(W, device=DEVICE)[:, None]
    source = t + k - left
    within = (source >= 0) & (source < T)
    probe = (t % W == k).to(a_logits.dtype).expand(B, H, W, T).clone()
    torch.manual_seed(seed)
    out, _, grad_v = run(
        a_logits, probe, probe, left, right, dropout_p=p, implementation=implementation, **options
    )
    forward = out.gather(2, (source % W).expand(B, H, W, T))
    backward = grad_v[:, :, t % W, source.clamp(0, T - 1)]
    return torch.where(within, forward, 0.0), torch.where(within, backward, 0.0)


def test_dropout_mask(implementation):
    """Kept weights are scaled, the share kept is 1 - p, every weight is drawn for itself."""
    B, H, T, left, right, p = 4, 2, 64, 3, 3, 0.3
    a_logits = random(B, H, left + 1 + right, T)
    weights = used_weights(a_logits, left, right, 0.0, implementation, seed=0)[0]
    dropped, in_backward = used_weights(a_logits, left, right, p, implementation, seed=0)
    kept = dropped != 0
    assert torch.equal(kept, in_backward != 0)
    assert close([dropped, in_backward], [(weights * kept / (1 - p)).double()] * 2, 1e-6)

    inner = kept[..., left : T - right].double()

    def near(x, expected, deviations=5):
        """Whether the mean of a 0/1 tensor is as expected, within what chance makes of it."""
        bound = deviations * math.sqrt(expected * (1 - expected) / x.numel())
        return abs(x.mean().item() - expected) < bound

    assert near(inner, 1 - p)
    assert all(near(x, 1 - p) for dim in range(4) for x in inner.unbind(dim) if x.numel() > 200)
    both = (1 - p) ** 2 + p**2  # how often two weights drawn apart are treated alike
    for dim in range(4):
        for apart in range(1, min(7, inner.shape[dim])):
            n = inner.shape[dim] - apart
            alike = inner.narrow(dim, 0, n) == inner.narrow(dim, apart, n)
            assert near(alike.double(), both), (dim, apart)

    again, _ = used_weights(a_logits, left, right, p, implementation, seed=0)
    assert torch.equal(again, dropped)
    other, _ = used_weights(a_logits, left, right, p, implementation, seed=1)
    assert near((other != 0)[..., left : T - right].eq(inner).double(), both)


@pytest.mark.parametrize(("left", "right"), [(14, 0), (10, 9), (40, 3)], ids=str)
@pytest.mark.parametrize("layout", ["channel_last", "time_last"])
def test_dropout_mask_in_blocks_of_other_sizes(layout, left, right):
    """The kernels' blocks of frames differ with window, memory order and direction."""
    shape = (1, 80, 2, left + 1 + right) if layout == "channel_last" else (1, 2, 44, 80)
    a_logits = random(*shape[:2], shape[2], shape[3])
    if layout == "channel_last":
        a_logits = a_logits.permute(0, 2, 3, 1)
    else:
        a_logits = a_logits[:, :, : left + 1 + right]
    forward, backward = used_weights(a_logits, left, right, 0.4, "triton", seed=0)
    assert torch.equal(forward != 0, backward != 0)
    expected, _ = used_weights(a_logits.contiguous(), left, right, 0.4, "triton", seed=0)
    assert torch.equal(forward != 0, expected != 0)
    inside = forward[..., left : 80 - right] if left + right < 70 else forward
    share = (inside != 0).double().mean().item()
    assert abs(share - 0.6) < 5 * math.sqrt(0.24 / inside.numel())


# The last is the second that a GPU's generator of seed 0 gives.
SEEDS = [0, 7, 2**32 + 5, 20 << 32 | 99, 2**62 | 4 * 0xBF58476D1CE4E5B9 & 2**62 - 1]


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_dropout_mask_of_simple_seeds(seed):
    """No frame's mask is that of all heads, and with hardly any dropout nothing is dropped."""
    heads, frames = 64, 40
    values = torch.eye(frames, device=DEVICE).expand(1, heads, frames, frames).contiguous()
    a_logits = torch.zeros(1, heads, 4, frames, device=DEVICE)
    bounds = None, None, torch.tensor([seed], device=DEVICE)
    left = 3

    def drawn(p):
        return torch.ops.ldsa_nn.local_attention(a_logits, values, *bounds, left, False, p)[0]

    assert (drawn(1e-9)[:, :, 3:] > 0).sum() == heads * 4 * (frames - 3)
    kept = drawn(0.5)[:, :, 3:] > 0  # [H, source, t]
    assert not (kept == kept[:1]).all(0).all(0).any()


@pytest.mark.gpu
def test_dropout_draws_its_seed_without_a_launch():
    a_logits, v = random(2, 2, 4, 20), random(2, 2, 8, 20, seed=1)

    def draw():
        return ldsa_local_attention(a_logits, v, 3, 0, dropout_p=0.5)

    draw()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        draw()
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.profiler.DeviceType.CUDA]
    assert len(kernels) == 1, kernels
    torch.manual_seed(0)
    first, state, second = draw(), torch.cuda.get_rng_state(), draw()
    torch.cuda.set_rng_state(state)
    assert torch.equal(draw(), second)
    assert not torch.equal(first, second)


def test_dropout_of_nearly_all():
    """No weight overflows float16: one not dropped is finite, and times 0 it is 0."""
    a_logits = random(8, 8, 15, 640, dtype=torch.float16)
    v = torch.full((8, 8, 1, 640), 1e-3, dtype=torch.float16, device=DEVICE)
    out = ldsa_local_attention(
        a_logits, v, 14, 0, dropout_p=1 - 1e-9, implementation="triton"
    ).float()
    assert out.isfinite().all()
    kept = 8 * 8 * (15 * 640 - 105) / 2**15  # 105 slots lie before frame 0
    assert 0.2 * kept < (out != 0).sum() < 3 * kept


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
def test_dropout_gradients(implementation, edge):
    """Those of the same sum with the mask as a constant, sequences of uneven length included."""
    p, left, right = 0.4, 3, 2
    a_logits, v, grad = random(3, 2, 6, 21), random(3, 2, 6, 21, seed=1), random(3, 2, 6, 21)
    options = {"edge": edge, "lengths": torch.tensor([21, 8, 17])}
    used, _ = used_weights(a_logits, left, right, p, implementation, seed=3, **options)
    torch.manual_seed(3)
    results = run(
        a_logits, v, grad, left, right, dropout_p=p, implementation=implementation, **options
    )
    inputs = [x.double().requires_grad_() for x in (a_logits, v)]
    weights = ldsa_weights(inputs[0], left, right, **options) * (used != 0) / (1 - p)
    windows = torch.nn.functional.pad(inputs[1], (left, right)).unfold(3, 6, 1)
    expected = torch.einsum("bhkt,bhdtk->bhdt", weights, windows)
    grads = torch.autograd.grad(expected, inputs, grad.double())
    assert close(results, [expected, *grads], 1e-5)


def test_dropout_mean(implementation):
    a_logits, v = random(1, 1, 6, 21), random(1, 1, 8, 21, seed=1)
    expected = ldsa_local_attention(a_logits, v, 3, 2, implementation=implementation)
    draws = ldsa_local_attention(
        a_logits.expand(64, -1, -1, -1), v.expand(64, -1, -1, -1), 3, 2,
        dropout_p=0.3, implementation=implementation,
    )  # fmt: skip
    deviation = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - expected).abs() <= 6 * deviation + 1e-5).all()


def test_dropout_follows_the_generator(implementation):
    a_logits, v = random(1, 1, 6, 21), random(1, 1, 8, 21, seed=1)

    def draw(p=0.5):
        return ldsa_local_attention(a_logits, v, 3, 2, dropout_p=p, implementation=implementation)

    torch.manual_seed(0)
    first, second = draw(), draw()
    torch.manual_seed(0)
    assert torch.equal(draw(), first)
    assert not torch.equal(first, second)
    assert torch.equal(draw(0), draw(0.0))


# Which implementation runs


def operators(a_logits, v, left, right, **options):
    with Recorder() as recorder:
        out = ldsa_local_attention(a_logits, v, left, right, **options)
        if out.requires_grad:
            torch.autograd.grad(out.sum(), (a_logits, v))
    return recorder.names()


@pytest.mark.parametrize("layout", ORDERS)
def test_fused_is_one_operator_each_way(layout):
    """No copy, no unfolding, no softmax, no mask around it, in any memory order."""
    case = Case("fused", 2, 2, 21, 8, 3, 2, layout=layout, lengths=(21, 9), dropout_p=0.1)
    a_logits, v, _, options = make(case, DEVICE)
    names = operators(
        a_logits.requires_grad_(), v.requires_grad_(), 3, 2, implementation="triton", **options
    )
    ours = [name for name in names if name.startswith("ldsa_nn::")]
    assert ours == ["ldsa_nn::local_attention", "ldsa_nn::local_attention_backward"]
    others = {name for name in names if not name.startswith("ldsa_nn::")}
    # The seed of the dropout, sum() and its gradient; detach moves no data.
    assert others <= {
        "aten::randint", "aten::sum", "aten::ones_like", "aten::expand", "aten::detach",
    }  # fmt: skip


def fused(names):
    return "ldsa_nn::local_attention" in names


def test_eager_where_asked_for():
    names = operators(random(1, 1, 3, 5), random(1, 1, 2, 5), 1, 1, implementation="eager")
    assert not fused(names)


def test_auto_takes_eager_on_the_cpu_also_where_the_interpreter_is_on():
    a_logits, v = torch.zeros(1, 1, 3, 5), torch.ones(1, 1, 2, 5)
    assert not fused(operators(a_logits, v, 1, 1))


@pytest.mark.gpu
def test_auto_takes_the_fused_kernel_on_a_gpu():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert fused(operators(random(1, 1, 3, 5, dtype=dtype), random(1, 1, 2, 5), 1, 1))


BEYOND_THE_KERNEL = {
    "logits of float64": ((1, 1, 3, 5), (1, 1, 2, 5), torch.float64, torch.float32, "float64"),
    "values of float64": ((1, 1, 3, 5), (1, 1, 2, 5), torch.float32, torch.float64, "float64"),
    "window": ((1, 1, 257, 5), (1, 1, 2, 5), torch.float32, torch.float32, "257.*255"),
    "head": ((1, 1, 3, 5), (1, 1, 257, 5), torch.float32, torch.float32, "257.*256"),
    "empty head": ((1, 1, 3, 5), (1, 1, 0, 5), torch.float32, torch.float32, "0.*256"),
}


@pytest.mark.parametrize("name", BEYOND_THE_KERNEL)
def test_beyond_the_kernel(name):
    """Eager takes over, unless the kernel was asked for by name."""
    shape, v_shape, logits_dtype, dtype, reason = BEYOND_THE_KERNEL[name]
    a_logits, v = random(*shape, dtype=logits_dtype), random(*v_shape, dtype=dtype, seed=1)
    left = shape[2] // 2
    out = ldsa_local_attention(a_logits, v, left, left)
    assert out.dtype == dtype
    assert error(out, eager_ldsa(a_logits.double(), v.double(), left, left)) <= 1e-6
    with pytest.raises(RuntimeError, match=f"(?s)implementation='triton'.*{reason}"):
        ldsa_local_attention(a_logits, v, left, left, implementation="triton")


def test_triton_on_the_cpu_needs_the_interpreter():
    code = """
import os
os.environ.pop("TRITON_INTERPRET", None)
import torch
from ldsa_nn import ldsa_local_attention
a_logits, v = torch.zeros(1, 1, 3, 5), torch.ones(1, 1, 2, 5)
print(ldsa_local_attention(a_logits, v, 1, 1)[0, 0, 0, 2].item())
try:
    ldsa_local_attention(a_logits, v, 1, 1, implementation="triton")
except RuntimeError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    value, message = result.stdout.splitlines()
    assert value == "1.0"
    assert "implementation='triton'" in message and "CPU" in message and "interpreter" in message


# Errors: the argument, what was expected, what came


def zeros(*shape, **options):
    return torch.zeros(shape, **options)


WINDOW_ERRORS = [
    ({"a_logits": [1.0]}, TypeError, r"a_logits.*tensor.*list"),
    ({"a_logits": zeros(2, 4, 6)}, ValueError, r"a_logits.*\[B,H,W,T\].*3.*\(2, 4, 6\)"),
    ({"a_logits": zeros(2, 1, 4, 6, dtype=torch.int64)}, TypeError, r"a_logits.*float32.*int64"),
    ({"a_logits": zeros(2, 1, 4, 6, dtype=torch.bool)}, TypeError, r"a_logits.*float32.*bool"),
    ({"a_logits": zeros(2, 1, 4, 6, dtype=torch.cfloat)}, TypeError, r"a_logits.*complex64"),
    ({"a_logits": zeros(2, 1, 3, 6)}, ValueError, r"a_logits.*left \+ 1 \+ right.*4.*3"),
    ({"a_logits": zeros(2, 1, 5, 6)}, ValueError, r"a_logits.*left \+ 1 \+ right.*4.*5"),
    ({"left": 3}, ValueError, r"a_logits.*left \+ 1 \+ right.*5.*4"),
    ({"left": -1, "right": 4}, ValueError, r"left must.*>= 0.*-1"),
    ({"left": 4, "right": -1}, ValueError, r"right must.*>= 0.*-1"),
    ({"left": 2.0}, TypeError, r"left.*int.*float"),
    ({"right": True}, TypeError, r"right.*int.*bool"),
    ({"edge": "reflect"}, ValueError, r"edge.*'zero'.*'renormalize'.*'reflect'"),
    ({"edge": None}, ValueError, r"edge.*'zero'.*'renormalize'.*None"),
] + [
    ({name: value}, kind, name + message)
    for name in ("lengths", "starts")
    for value, kind, message in (
        ([6, 6], TypeError, r".*integer tensor.*list"),
        (6, TypeError, r".*integer tensor.*int"),
        (torch.tensor([True, False]), TypeError, r".*integer.*bool"),
        (torch.tensor([6.0, 6.0]), TypeError, r".*integer.*float32"),
        (torch.tensor(6), ValueError, r".*\[B\].*2.*\[\]"),
        (torch.tensor([6]), ValueError, r".*\[B\].*2.*1"),
        (torch.tensor([6, 6, 6]), ValueError, r".*\[B\].*2.*3"),
        (torch.tensor([[6], [6]]), ValueError, r".*\[B\].*2.*\[2, 1\]"),
        (torch.tensor([6, 6], device="meta"), ValueError, r".*(cpu|cuda).*meta"),
    )
]
OP_ERRORS = [
    ({"v": None}, TypeError, r"v must.*tensor.*NoneType"),
    ({"v": zeros(2, 1, 3, 6, 1)}, ValueError, r"v must.*\[B,H,Dh,T\].*5.*\(2, 1, 3, 6, 1\)"),
    ({"v": zeros(2, 1, 3, 6, dtype=torch.int32)}, TypeError, r"v must.*float32.*int32"),
    ({"v": zeros(1, 1, 3, 6)}, ValueError, r"a_logits.*v.*\bB\b.*2 and 1"),
    ({"v": zeros(2, 2, 3, 6)}, ValueError, r"a_logits.*v.*\bH\b.*1 and 2"),
    ({"v": zeros(2, 1, 3, 7)}, ValueError, r"a_logits.*v.*\bT\b.*6 and 7"),
    ({"v": zeros(2, 1, 3, 6, device="meta")}, ValueError, r"a_logits.*v.*(cpu|cuda).*meta"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p.*\[0, 1\).*1.0"),
    ({"dropout_p": -0.1}, ValueError, r"dropout_p.*\[0, 1\).*-0.1"),
    ({"dropout_p": math.nan}, ValueError, r"dropout_p.*\[0, 1\).*nan"),
    ({"dropout_p": "0.1"}, TypeError, r"dropout_p.*number.*str"),
]
CHOICE_ERRORS = [
    ({"implementation": "cuda"}, ValueError, r"implementation.*'auto'.*'triton'.*'eager'.*'cuda'"),
]


def raises(op, change, kind, message, **arguments):
    def move(x):
        return x.to(DEVICE) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x

    arguments = {name: move(x) for name, x in {**arguments, **change}.items()}
    with pytest.raises(kind, match=message):
        op(**arguments)


def name_error(value):
    return "-".join(value) if isinstance(value, dict) else ""


@pytest.mark.parametrize(
    ("change", "kind", "message"), WINDOW_ERRORS + OP_ERRORS + CHOICE_ERRORS, ids=name_error
)
def test_errors_of_the_op(change, kind, message):
    arguments = {"a_logits": zeros(2, 1, 4, 6), "v": zeros(2, 1, 3, 6), "left": 2, "right": 1}
    raises(ldsa_local_attention, change, kind, message, **arguments)


@pytest.mark.parametrize(("change", "kind", "message"), WINDOW_ERRORS + OP_ERRORS, ids=name_error)
def test_errors_of_the_other_implementations(change, kind, message):
    arguments = {"a_logits": zeros(2, 1, 4, 6), "v": zeros(2, 1, 3, 6), "left": 2, "right": 1}
    raises(eager_ldsa, change, kind, message, **arguments)
    for implementation in ("eager", "triton"):
        arguments["implementation"] = implementation
        raises(ldsa_local_attention, change, kind, message, **arguments)


@pytest.mark.parametrize(("change", "kind", "message"), WINDOW_ERRORS, ids=name_error)
def test_errors_of_the_weights(change, kind, message):
    raises(ldsa_weights, change, kind, message, a_logits=zeros(2, 1, 4, 6), left=2, right=1)


# What only a GPU shows


def kernels_launched(function):
    """(names of what ran on the GPU, the function's result)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = function()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.profiler.DeviceType.CUDA]
    return [e.name for e in events], result


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "ragged"])
@pytest.mark.parametrize("layout", ORDERS)
def test_one_launch_each_way(layout, ragged):
    case = Case(
        "launches", 3, 8, 200, 64, 14, 0, torch.bfloat16, layout,
        lengths=(200, 100, 7) if ragged else None,
    )  # fmt: skip
    a_logits, v, grad, options = make(case, DEVICE)
    a_logits.requires_grad_(), v.requires_grad_()
    run(a_logits, v, grad, 14, 0, **options)
    names, out = kernels_launched(lambda: ldsa_local_attention(a_logits, v, 14, 0, **options))
    assert len(names) == 1, names
    names, _ = kernels_launched(lambda: torch.autograd.grad(out, (a_logits, v), grad))
    assert len(names) == 1, names


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("layout", ["channel_last", "time_last"])
def test_memory_is_that_of_the_results(layout, p):
    case = Case("memory", 4, 8, 2000, 64, 31, 31, torch.bfloat16, layout)
    a_logits, v, grad, _ = make(case, DEVICE)
    a_logits.requires_grad_(), v.requires_grad_()
    slack = 4 * 8 * 2000 * 8 + 65536  # a number or two a row is allowed
    bytes_of_v, bytes_of_logits = v.numel() * 2, a_logits.numel() * 2
    # In this thread: autograd's own lets go of a pass's gradients when it gets to run again.
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(2):  # the first run loads the kernels
            torch.cuda.synchronize()
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = ldsa_local_attention(a_logits, v, 31, 31, dropout_p=p)
            forward = torch.cuda.max_memory_allocated() - base
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            grads = torch.autograd.grad(out, (a_logits, v), grad)
            backward = torch.cuda.max_memory_allocated() - base
            del out, grads
    assert bytes_of_v <= forward <= bytes_of_v + slack
    assert bytes_of_v + bytes_of_logits <= backward <= bytes_of_v + bytes_of_logits + slack


@pytest.mark.gpu
def test_more_heads_than_a_grid_axis_counts():
    a_logits, v = random(2, 40_000, 3, 5), random(2, 40_000, 2, 5, seed=1)
    grad = random(2, 40_000, 2, 5, seed=2)
    assert close(run(a_logits, v, grad, 1, 1), truth(a_logits, v, grad, 1, 1), 1e-5)


@pytest.mark.parametrize("left", [40, 80])  # one launch for both gradients, and two
def test_tiles_of_channels_that_begin_2_31_elements_in(left):
    pytest.importorskip("triton")
    head_dim, frames, step = 256, 4, 2**24
    # 8.6 GB, of which a CPU's system gives only what is written.
    buffer = torch.empty(head_dim * step, dtype=torch.float16, device=DEVICE)
    v = buffer.as_strided((1, 1, head_dim, frames), (head_dim * step, head_dim * step, step, 1))
    v.copy_(random(1, 1, head_dim, frames, dtype=torch.float16))
    a_logits = random(1, 1, left + 1, frames, dtype=torch.float16, seed=1)
    results = run(a_logits, v, v, left, 0, implementation="triton")
    dense = v.clone(memory_format=torch.contiguous_format)
    expected = truth(a_logits, dense, dense, left, 0)
    eager = run(a_logits, dense, dense, left, 0, eager_ldsa)
    for x, e, y in zip(results, eager, expected, strict=True):
        assert error(x, y) <= 2 * error(e, y) + ATOL[x.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("wide", ["v", "a_logits"])
def test_channels_more_than_2_31_elements_apart(wide):
    """Time-last: the offsets inside one block pass 32 bits."""
    frames, left, right, head_dim = 2**23 + 77, 1, 1, 256
    if wide == "a_logits":
        left, right, head_dim = 254, 0, 2
    a_logits = torch.zeros(1, 1, left + 1 + right, frames, dtype=torch.bfloat16, device=DEVICE)
    v = torch.zeros(1, 1, head_dim, frames, dtype=torch.bfloat16, device=DEVICE)
    tail, inner = 700, 400
    for seed, x in enumerate((a_logits, v)):
        x[..., -tail:] = random(*x.shape[:3], tail, dtype=torch.bfloat16, seed=seed)
    results = run(a_logits, v, v, left, right)  # v as the gradient too: memory is dear
    alone = [x[..., -tail:].clone() for x in (a_logits, v, v)]
    expected, eager = truth(*alone, left, right), run(*alone, left, right, eager_ldsa)
    for x, e, y in zip(results, eager, expected, strict=True):
        assert error(x[..., -inner:], y[..., -inner:]) <= 2 * error(e, y) + ATOL[x.dtype]
        # Far from the tail stand zeros: no value there, and no gradient.
        assert not x[..., : -tail - 300].any()


def test_every_tile_row_has_a_case():
    """What runs on a GPU in test_large_cases is every row that the launchers can choose."""
    pytest.importorskip("triton")
    kernels = importlib.import_module("ldsa_nn._ldsa.ldsa")
    tiles = kernels._tiles
    wide = [c for c in LARGE if c.window > kernels.NARROW]
    tested = {kernels._value_tiles(c.head_dim, c.dtype.itemsize) for c in wide}
    assert tested == {kernels._value_tiles(d, size) for d in range(1, 257) for size in (2, 4)}
    for backward in (False, True):
        tested = {
            tiles(
                c.window, c.head_dim, c.dtype.itemsize, c.layout in ("time_last", "mixed"), backward
            )
            for c in LARGE
        }
        for window, head_dim, size, time_last in itertools.product(
            range(1, 256), range(1, 257), (2, 4), (False, True)
        ):
            row = tiles(window, head_dim, size, time_last, backward)
            assert row in tested, (window, head_dim, size, time_last)


@pytest.mark.parametrize("window", [16, 17, 32, 64])
def test_windows_at_the_edge_of_a_block(window):
    a_logits = random(1, 1, window, 40)
    v, grad = random(1, 1, 8, 40, seed=1), random(1, 1, 8, 40, seed=2)
    left = window // 3
    right = window - 1 - left
    got = run(a_logits, v, grad, left, right, implementation="triton")
    assert close(got, truth(a_logits, v, grad, left, right), 1e-5)
