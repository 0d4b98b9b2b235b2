"""Faults that users of neighbouring projects reported, each as an input with its right value.

Kinds as in the list they were collected in: A size and launch limits, B devices, C strides, D
shapes and window edges, E numerics, F padding and masks, G dropout, H autograd and dtypes, I
compilation. Streaming and its export are in test_streaming.py, checkpoints in test_convert.py,
platforms without Triton in test_package.py.
"""

import itertools
import math
import subprocess
import sys

import pytest
import torch
from cases import ATOL, DEVICE, ORDERS, Case, close, error, lay_out, make, random, run, truth
from conftest import ROOT
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from ldsa_nn import (
    HybridAttention,
    LocalDenseSynthesizerAttention,
    eager_ldsa,
    ldsa_local_attention,
    ldsa_weights,
)


@pytest.fixture(params=["eager", "triton"])
def implementation(request):
    return request.param


def assert_as_accurate_as_eager(results, tensors, left, right, **options):
    """At most twice the error of eager in the same dtype, and a little."""
    expected = truth(*tensors, left, right, **options)
    eager = run(*tensors, left, right, eager_ldsa, **options)
    for x, e, y in zip(results, eager, expected, strict=True):
        assert error(x, y) <= 2 * error(e, y) + ATOL[x.dtype]


# A. Size and launch limits


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "frames", "head_dim", "left", "right", "layout"),
    [
        (3, 700_000, 64, 1, 1, "channel_last"),
        (3, 700_000, 64, 1, 1, "time_last"),
        (3, 354_000, 8, 126, 0, "channel_last"),
        (1, 2_100_000, 64, 1, 1, "channel_last"),
    ],
    ids=["v", "v time-last", "logits", "one sequence"],
)
def test_a1_more_than_2_31_elements(batch, frames, head_dim, left, right, layout):
    """The first and the last frames equal the op on a few frames there alone."""
    heads, W, kept = 16, left + 1 + right, 32
    near = kept + left + right
    assert batch * frames * heads * max(head_dim, W) > 2**31
    generator = torch.Generator(DEVICE).manual_seed(0)

    def tensor(channels):
        order = ORDERS[layout]
        shape = (batch, heads, channels, frames)
        x = torch.empty_permuted(shape, order, dtype=torch.bfloat16, device=DEVICE)
        return x.normal_(generator=generator)

    a_logits, v = tensor(W), tensor(head_dim)
    results = run(a_logits, v, v, left, right)  # v as the gradient too: memory is dear
    for b, part, inner in (
        (0, slice(None, near), slice(None, kept)),
        (batch - 1, slice(-near, None), slice(-kept, None)),
    ):
        alone = [x[b : b + 1, ..., part].clone() for x in (a_logits, v, v)]
        expected, eager = truth(*alone, left, right), run(*alone, left, right, eager_ldsa)
        for x, e, y in zip(results, eager, expected, strict=True):
            x, e, y = x[b : b + 1, ..., inner], e[..., inner], y[..., inner]
            assert error(x, y) <= 2 * error(e, y) + ATOL[x.dtype]


@pytest.mark.parametrize("head_dim", [128, 256, 512])
@pytest.mark.parametrize("window", [63, 127, 255])
def test_a2_wide_windows_and_heads(window, head_dim):
    """The float64 result everywhere; beyond 256 channels eager takes over, as documented."""
    left = right = window // 2
    tensors = [random(1, 1, n, 300, seed=n) for n in (window, head_dim)]
    tensors.append(random(1, 1, head_dim, 300, seed=1))
    assert_as_accurate_as_eager(run(*tensors, left, right), tensors, left, right)
    if head_dim > 256:
        with pytest.raises(RuntimeError, match=r"head width 512.*256"):
            run(*tensors, left, right, implementation="triton")


@pytest.mark.parametrize(("window", "head_dim"), [(63, 256), (127, 128), (255, 128)])
def test_a2_in_the_fused_kernel(window, head_dim):
    left = right = window // 2
    tensors = [random(1, 1, n, 36, seed=n) for n in (window, head_dim)]
    tensors.append(random(1, 1, head_dim, 36, seed=1))
    results = run(*tensors, left, right, implementation="triton")
    assert_as_accurate_as_eager(results, tensors, left, right)


# B. Device, stream, graphs


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("bounds_on", ["cpu", "cuda:1"])
def test_b3_tensors_on_another_than_the_current_device(bounds_on):
    assert torch.cuda.current_device() == 0
    tensors = [random(2, 2, n, 70, dtype=torch.bfloat16, seed=n) for n in (6, 8)]
    tensors.append(random(2, 2, 8, 70, dtype=torch.bfloat16, seed=1))
    lengths = torch.tensor([70, 30])
    for dropout_p in (0.0, 0.3):
        torch.manual_seed(0)
        here = run(*tensors, 3, 2, lengths=lengths.to("cuda:0"), dropout_p=dropout_p)
        torch.manual_seed(0)
        there = run(
            *(x.to("cuda:1") for x in tensors), 3, 2,
            lengths=lengths.to(bounds_on), dropout_p=dropout_p, implementation="triton",
        )  # fmt: skip
        assert all(x.device == torch.device("cuda:1") for x in there)
        assert close([x.to("cuda:0") for x in there], here, 0)
        assert torch.cuda.current_device() == 0
    layer = LocalDenseSynthesizerAttention(2, 8, use_bias=True, device="cuda:1")
    y = layer(random(2, 9, 8).to("cuda:1"), lengths=torch.tensor([9, 4]))
    y.sum().backward()
    assert y.device == torch.device("cuda:1") and torch.cuda.current_device() == 0


def test_b4_tensors_on_the_cpu_where_triton_is_installed():
    tensors = [random(2, 2, n, 21, seed=n, device="cpu") for n in (6, 8)]
    tensors.append(random(2, 2, 8, 21, seed=1, device="cpu"))
    assert close(run(*tensors, 3, 2), truth(*tensors, 3, 2), 1e-6)
    assert close(run(*tensors, 3, 2), run(*tensors, 3, 2, implementation="eager"), 0)


@pytest.mark.parametrize("implementation", ["auto", "eager", "triton"])
def test_b4_logits_and_values_on_two_devices(implementation):
    a_logits, v = random(2, 2, 6, 21), random(2, 2, 8, 21)
    other = "cpu" if DEVICE == "cuda" else "meta"
    with pytest.raises(ValueError, match=rf"a_logits and v.*{DEVICE}.*{other}"):
        ldsa_local_attention(a_logits, v.to(other), 3, 2, implementation=implementation)
    with pytest.raises(ValueError, match=rf"a_logits and v.*{other}.*{DEVICE}"):
        ldsa_local_attention(a_logits.to(other), v, 3, 2, implementation=implementation)


# C. Strides


def values(kind):
    B, H, T, D = 2, 2, 21, 8
    if kind == "transposed":
        return random(B, H, T, D, seed=1).transpose(1, 2).permute(0, 2, 3, 1)
    if kind == "sliced channels":
        return random(B, T, H, 24, seed=1)[..., 8 : 8 + D].permute(0, 2, 3, 1)
    if kind == "sliced frames":
        return random(B, 2 * T, H, D, seed=1)[:, ::2].permute(0, 2, 3, 1)
    return random(B, H, D, T, seed=1)


def logits(kind):
    B, H, W, T = 2, 2, 6, 21
    if kind == "expanded":
        return random(1, T, H, W, seed=2).expand(B, T, H, W).permute(0, 2, 3, 1)
    if kind == "channel last":
        return random(B, T, H, W, seed=2).permute(0, 2, 3, 1)
    return random(B, H, W, T, seed=2)


@pytest.mark.parametrize("of_logits", ["expanded", "channel last", "time last"])
@pytest.mark.parametrize("of_v", ["transposed", "sliced channels", "sliced frames", "contiguous"])
def test_c5_views(implementation, of_v, of_logits):
    """As their contiguous clones; the inputs are left alone."""
    a_logits, v, grad = logits(of_logits), values(of_v), random(2, 2, 8, 21, seed=3)
    before = [x.clone() for x in (a_logits, v)]
    results = run(a_logits, v, grad, 3, 2, implementation=implementation)
    clones = [x.clone(memory_format=torch.contiguous_format) for x in (a_logits, v)]
    expected = run(*clones, grad, 3, 2, implementation=implementation)
    assert close(results, expected, 1e-6)
    assert all(torch.equal(x, y) for x, y in zip((a_logits, v), before, strict=True))


# D. Shapes and window edges


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
@pytest.mark.parametrize(("batch", "frames"), list(itertools.product([0, 2], [0, 1, 2, 4])))
def test_d6_shorter_than_the_window(implementation, batch, frames, edge):
    tensors = random(batch, 2, 11, frames), random(batch, 2, 4, frames), random(batch, 2, 4, frames)
    results = run(*tensors, 5, 5, edge=edge, implementation=implementation)
    assert [x.shape for x in results] == [tensors[1].shape, tensors[0].shape, tensors[1].shape]
    assert close(results, truth(*tensors, 5, 5, edge=edge), 1e-5)
    layer = LocalDenseSynthesizerAttention(
        2, 8, left=5, right=5, edge=edge, implementation=implementation, device=DEVICE
    )
    x = random(batch, frames, 8).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert all(p.grad.isfinite().all() for p in (x, *layer.parameters()))


@pytest.mark.parametrize(("edge", "expected"), [("zero", 1.0), ("renormalize", 11.0)])
def test_d6_one_frame(implementation, edge, expected):
    a_logits = torch.zeros(1, 1, 11, 1, device=DEVICE)
    v = torch.full((1, 1, 1, 1), 11.0, device=DEVICE)
    y = ldsa_local_attention(a_logits, v, 5, 5, edge=edge, implementation=implementation)
    assert abs(y.item() - expected) <= 1e-5


def test_d7_even_windows(implementation):
    for cls in (LocalDenseSynthesizerAttention, HybridAttention):
        with pytest.raises(ValueError, match=r"context_size.*odd.*8"):
            cls(2, 8, context_size=8)
    for W in (5, 7, 0):
        with pytest.raises(ValueError, match=rf"W = left \+ 1 \+ right.*6.*got {W} "):
            ldsa_local_attention(
                random(1, 1, W, 9), random(1, 1, 2, 9), 3, 2, implementation=implementation
            )
    layer = LocalDenseSynthesizerAttention(2, 8, left=4, right=3)  # eight slots, said which way
    assert layer.window == 8


@pytest.mark.parametrize("window", [3, 5, 7, 31])
@pytest.mark.parametrize("head_dim", [36, 40, 72, 80, 96])
def test_d8_head_dims_between_powers_of_two(window, head_dim):
    """No NaN from the memory around, four runs of equal bits, and accurate."""
    frames = 513 if DEVICE == "cuda" else 33
    side = window // 2
    case = Case("nan around", 1, 1, frames, head_dim, side, side, torch.float16)
    *tensors, _ = make(case, DEVICE)
    runs = [run(*tensors, side, side, implementation="triton") for _ in range(4)]
    assert all(x.isfinite().all() for x in runs[0])
    assert all(close(other, runs[0], 0) for other in runs)
    assert_as_accurate_as_eager(runs[0], tensors, side, side)


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
def test_d9_off_by_one(implementation, edge):
    """v[t] = t, all weight on slot j of (2, 1): frame t reads frame t - 2 + j."""
    v = torch.arange(6.0, device=DEVICE).view(1, 1, 1, 6)
    # Where slot j is removed, the others are equal: means of frames 0-1, of 0-2 and of 3-5.
    at_edges = {"zero": ([0, 0], [0]), "renormalize": ([0.5, 1], [4])}[edge]
    for j, expected in ((0, [*at_edges[0], 0, 1, 2, 3]), (3, [1, 2, 3, 4, 5, *at_edges[1]])):
        a_logits = torch.zeros(1, 1, 4, 6, device=DEVICE)
        a_logits[:, :, j] = 1e4
        y = ldsa_local_attention(a_logits, v, 2, 1, edge=edge, implementation=implementation)
        assert error(y.flatten(), torch.tensor(expected, device=DEVICE)) <= 1e-5


# E. Numerics


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("edge", ["zero", "renormalize"])
def test_e10_garbage_in_the_padding(implementation, garbage, edge):
    """Nothing changes, in outputs or gradients, whatever stands there."""
    keep = torch.arange(40, device=DEVICE) < torch.tensor([40, 23, 16], device=DEVICE)[:, None]
    keep = keep[:, None, None]
    tensors = [random(3, 1, n, 40, seed=n) for n in (6, 8)] + [random(3, 1, 8, 40, seed=1)]
    options = {
        "edge": edge,
        "lengths": torch.tensor([40, 23, 16]),
        "implementation": implementation,
    }
    expected = run(*tensors, 3, 2, **options)
    results = run(*(torch.where(keep, x, garbage) for x in tensors), 3, 2, **options)
    assert all(x.isfinite().all() for x in results)
    assert close(results, expected, 0)
    assert not any(x.masked_select(~keep).any() for x in results)


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
@pytest.mark.parametrize(
    ("row", "weights"),
    [
        ([60000.0, 60000.0, -60000.0], [0.5, 0.5, 0.0]),
        ([-65504.0] * 3, [1 / 3] * 3),
        ([65504.0] * 3, [1 / 3] * 3),
        ([-math.inf] * 3, [0.0] * 3),
        ([-math.inf, 0.0, -math.inf], [0.0, 1.0, 0.0]),
        ([math.inf, 0.0, math.inf], [0.5, 0.0, 0.5]),
    ],
    ids=str,
)
def test_e11_extreme_logits_of_fp16(implementation, row, weights, edge):
    a_logits = torch.tensor(row, dtype=torch.float16, device=DEVICE)[:, None].expand(1, 1, 3, 5)
    v = random(1, 1, 2, 5, dtype=torch.float16)
    w = torch.tensor(weights, device=DEVICE, dtype=torch.float64)
    expected = torch.einsum("k,bhdtk->bhdt", w, v.double().unfold(3, 3, 1))
    grad = torch.ones_like(v)
    y, grad_logits, grad_v = run(a_logits, v, grad, 1, 1, edge=edge, implementation=implementation)
    assert error(y[..., 1:4], expected) <= 1e-3
    assert y.isfinite().all() and grad_v.isfinite().all()
    if math.inf not in row:  # of which the gradients are unspecified
        assert grad_logits.isfinite().all()
    inner = ldsa_weights(a_logits, 1, 1, edge=edge)[0, 0, :, 1:4]
    assert error(inner, w[:, None].expand(3, 3)) <= 1e-3


# F. Padding, masks, adapters


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
@pytest.mark.parametrize("padded", [50, 200])
def test_f12_batch_mates_and_padding(implementation, padded, edge):
    """37 frames alone, and padded with garbage beside longer sequences."""
    torch.manual_seed(0)
    layer = LocalDenseSynthesizerAttention(
        2, 8, left=7, right=7, use_bias=True, edge=edge, implementation=implementation
    )
    layer.to(DEVICE).eval()
    alone = random(1, 37, 8)
    x = 100 * random(2, padded, 8, seed=1)
    x[1, :37] = alone[0]
    x[1, 37:] = math.nan
    y = layer(x, lengths=torch.tensor([padded, 37]))
    assert error(y[1:, :37], layer(alone)) <= 1e-5
    assert not y[1, 37:].any()


@pytest.mark.parametrize("cls", [LocalDenseSynthesizerAttention, HybridAttention])
def test_f13_true_is_keep(implementation, cls):
    """One ragged batch in every toolkit's form gives one result."""
    torch.manual_seed(0)
    layer = cls(2, 8, context_size=3, implementation=implementation).to(DEVICE)
    x = random(2, 5, 8)
    key_padding = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]], device=DEVICE).bool()
    additive = torch.zeros(2, 5, device=DEVICE).masked_fill(key_padding, -math.inf)
    expected = layer(x, lengths=torch.tensor([5, 3]))
    assert error(expected[1:, :3], layer(x[1:, :3])) <= 1e-5
    forms = [~key_padding, ~key_padding[:, None], (~key_padding).long(), additive == 0]
    for mask in forms:
        assert close([layer(x, mask=mask)], [expected], 1e-6)
    with pytest.raises(TypeError, match=r"mask.*bool or integer.*float32.*compare"):
        layer(x, mask=additive)
    with pytest.raises(ValueError, match=r"mask.*\[B,T\].*\[2, 4\]"):
        layer(x, mask=~key_padding[:, 1:])


# G. Dropout


@pytest.mark.parametrize("cls", [LocalDenseSynthesizerAttention, HybridAttention])
def test_g14_no_dropout_in_eval(implementation, cls):
    def build(p):
        torch.manual_seed(0)
        return cls(2, 8, p, implementation=implementation).to(DEVICE)

    layer, x = build(0.5).eval(), random(2, 9, 8)
    assert torch.equal(layer(x), layer(x))
    assert torch.equal(layer(x), build(0.0)(x))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_g15_recomputation_draws_the_same_mask(implementation, use_reentrant):
    a_logits, v, grad = random(2, 2, 6, 21), random(2, 2, 8, 21, seed=1), random(2, 2, 8, 21)

    def op(a_logits, v):
        return ldsa_local_attention(a_logits, v, 3, 2, dropout_p=0.3, implementation=implementation)

    def results(function):
        torch.manual_seed(0)
        inputs = [x.clone().requires_grad_() for x in (a_logits, v)]
        out = function(*inputs)
        out.backward(grad)
        return [out.detach(), *(x.grad for x in inputs)]

    expected = results(op)
    recomputed = results(lambda *inputs: checkpoint(op, *inputs, use_reentrant=use_reentrant))
    assert close(recomputed, expected, 0)
    # The output is linear in v, if the mask is the same in both directions.
    out, _, grad_v = expected
    assert abs((grad * out).sum() - (grad_v * v).sum()) <= 1e-4


# H. Autograd and dtypes


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("required", list(itertools.product([False, True], repeat=2)), ids=str)
def test_h16_grad_modes(implementation, mode, required):
    a_logits, v = random(2, 2, 6, 21), random(2, 2, 8, 21, seed=1)
    expected = ldsa_local_attention(a_logits, v, 3, 2, implementation=implementation)
    for x, needed in zip((a_logits, v), required, strict=True):
        x.requires_grad_(needed)
    with mode():
        y = ldsa_local_attention(a_logits, v, 3, 2, implementation=implementation)
    assert torch.equal(y, expected)
    assert y.requires_grad == (mode is torch.enable_grad and any(required))
    if y.requires_grad:
        y.sum().backward()
        assert [x.grad is not None for x in (a_logits, v)] == list(required)


def test_h16_inside_inference_mode(implementation):
    with torch.inference_mode():
        a_logits, v = random(2, 2, 6, 21), random(2, 2, 8, 21, seed=1)
        y = ldsa_local_attention(a_logits, v, 3, 2, implementation=implementation)
    assert error(y, eager_ldsa(a_logits.double(), v.double(), 3, 2)) <= 1e-6


def test_h17_double_backward():
    a_logits = random(1, 1, 4, 6, dtype=torch.float64).requires_grad_()
    v = random(1, 1, 2, 6, dtype=torch.float64, seed=1).requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda a_logits, v: ldsa_local_attention(a_logits, v, 2, 1), (a_logits, v)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_h17_double_backward_of_the_fused_kernel(dtype):
    """A clear error, never a silent wrong number."""
    a_logits = random(1, 1, 4, 6, dtype=dtype).requires_grad_()
    v = random(1, 1, 2, 6, dtype=dtype, seed=1).requires_grad_()
    y = ldsa_local_attention(a_logits, v, 2, 1, implementation="triton")
    grads = torch.autograd.grad(y.square().sum(), (a_logits, v), create_graph=True)
    for grad in grads:
        with pytest.raises(RuntimeError, match=r"double backward.*implementation='eager'"):
            grad.square().sum().backward(retain_graph=True)


MIXED = list(itertools.permutations([torch.float32, torch.bfloat16, torch.float16], 2))


@pytest.mark.parametrize(("of_logits", "of_v"), MIXED, ids=str)
def test_h18_mixed_dtypes(implementation, of_logits, of_v):
    a_logits, v = random(2, 1, 6, 21, dtype=of_logits), random(2, 1, 8, 21, dtype=of_v, seed=1)
    tensors = a_logits, v, random(2, 1, 8, 21, dtype=of_v, seed=2)
    results = run(*tensors, 3, 2, implementation=implementation)
    assert [x.dtype for x in results] == [of_v, of_logits, of_v]
    assert_as_accurate_as_eager(results, tensors, 3, 2)


@pytest.mark.parametrize("cls", [LocalDenseSynthesizerAttention, HybridAttention])
def test_h18_fp32_parameters_under_autocast(implementation, cls):
    layer = cls(2, 8, implementation=implementation).to(DEVICE)
    x = random(2, 9, 8).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        y = layer(x, lengths=torch.tensor([9, 5]))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in (x, *layer.parameters()))
    assert all(p.grad.isfinite().all() for p in (x, *layer.parameters()))


def test_h18_the_op_under_autocast(implementation):
    a_logits, v = random(2, 1, 6, 21), random(2, 1, 8, 21, dtype=torch.bfloat16, seed=1)
    tensors = a_logits, v, random(2, 1, 8, 21, dtype=torch.bfloat16, seed=2)
    expected = run(*tensors, 3, 2, implementation=implementation)
    with torch.autocast(DEVICE, torch.bfloat16):
        results = run(*tensors, 3, 2, implementation=implementation)
    assert close(results, expected, 0)
    assert [x.dtype for x in results] == [torch.bfloat16, torch.float32, torch.bfloat16]


# I. Compile and export


def test_i19_one_graph_for_every_length(implementation):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    op = torch.compile(ldsa_local_attention, fullgraph=True, dynamic=True, backend=counter)
    for i, T in enumerate(torch.linspace(50, 150, 40).int().tolist()):
        tensors = [lay_out(random(1, 2, n, T, seed=n + i), "channel_last") for n in (3, 4)]
        tensors.append(random(1, 2, 4, T))
        options = {"lengths": torch.tensor([T // 2]), "implementation": implementation}
        results = run(*tensors, 1, 1, op, **options)
        if i % 10 == 0:
            assert close(results, truth(*tensors, 1, 1, lengths=options["lengths"]), 1e-5)
    assert 1 <= counter.frame_count <= 2
    torch._dynamo.reset()


@pytest.mark.gpu
def test_i19_no_tuning_for_a_new_length():
    """Few variants of a kernel serve all lengths: a call of a new one costs no compilation."""
    code = """
import time, torch
from ldsa_nn import ldsa_local_attention
slow = 0
for T in range(50, 151):
    a_logits = torch.randn(2, T, 2, 15, device="cuda").permute(0, 2, 3, 1).requires_grad_()
    v = torch.randn(2, T, 2, 64, device="cuda").permute(0, 2, 3, 1).requires_grad_()
    torch.cuda.synchronize()
    start = time.perf_counter()
    ldsa_local_attention(a_logits, v, 14, 0).sum().backward()
    torch.cuda.synchronize()
    slow += time.perf_counter() - start > 0.1
print(slow)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(result.stdout) <= 4
