"""The small operations around the delta rule: convolution, gates, norm, in eager and fused."""

import pytest
import torch
from cases import DEVICE, random
from torch.nn import functional as F

import ldsa_nn
from ldsa_nn.functional import delta_gates, gated_norm, short_convolution

# Relative error of a result, and of a gradient that sums over all frames.
BUDGET = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
FUSED = [torch.float32, torch.float16, torch.bfloat16]


def conv_by_definition(x, weight, heads, key_dim, before):
    """As the docstring has it, frame by frame."""
    taps, keys = weight.shape[2], heads * key_dim
    z = []
    for t in range(x.shape[1] - before):
        seen = [(j, before + t - (taps - 1) + j) for j in range(taps)]
        z.append(sum(weight[:, 0, j] * x[:, i] for j, i in seen if i >= 0))
    y = torch.stack(z, 1)
    y = y / (1 + torch.exp(-y))
    q, k, v = (
        part.unflatten(2, (heads, -1)) for part in y.split([keys, keys, y.shape[2] - 2 * keys], 2)
    )
    return *(part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k)), v


def gates_by_definition(decay, write, rate, bias):
    g = -rate.exp() * torch.log1p(torch.exp(decay + bias))
    return torch.where(g < -20, -20.0, g), 2 / (1 + torch.exp(-write))


def norm_by_definition(x, gate, weight, eps):
    heads = x.unflatten(3, (-1, len(weight)))
    heads = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return heads.flatten(2) / (1 + torch.exp(-gate))


def conv_case(batch=2, frames=37, heads=2, key_dim=16, values=48, taps=4, before=0):
    channels = 2 * heads * key_dim + heads * values
    x = random(batch, before + frames, channels, dtype=torch.float64)
    weight = random(channels, 1, taps, dtype=torch.float64, seed=1) / 2
    return (x, weight), (heads, key_dim, before)


def gates_case(batch=2, frames=37, heads=2, tiles=4):
    decay = 6 * random(batch, frames, heads, tiles, dtype=torch.float64)
    write = 3 * random(batch, frames, heads, dtype=torch.float64, seed=1)
    # Some decay is clamped, some so weak that 1 + exp is 1 in float32.
    rate = random(heads, tiles, dtype=torch.float64, seed=2) + 1
    bias = random(heads, tiles, dtype=torch.float64, seed=3) - 5
    return (decay, write, rate, bias), ()


def norm_case(batch=2, frames=37, heads=2, value_heads=3, width=16):
    x = random(batch, frames, heads, value_heads * width, dtype=torch.float64)
    gate = random(batch, frames, heads * value_heads * width, dtype=torch.float64, seed=1)
    return (x, gate, random(width, dtype=torch.float64, seed=2)), (1e-5,)


CASES = {
    "conv": (short_convolution, conv_by_definition, conv_case()),
    "conv-step": (short_convolution, conv_by_definition, conv_case(frames=1, before=3)),
    "conv-steps": (short_convolution, conv_by_definition, conv_case(frames=9, before=3)),
    "conv-2-before": (short_convolution, conv_by_definition, conv_case(frames=9, before=2)),
    "conv-odd": (
        short_convolution,
        conv_by_definition,
        conv_case(3, 21, heads=1, key_dim=5, values=11, taps=3),
    ),
    "conv-1-tap": (short_convolution, conv_by_definition, conv_case(taps=1)),
    "conv-9-taps": (short_convolution, conv_by_definition, conv_case(frames=5, taps=9)),
    "conv-of-64": (
        short_convolution,
        conv_by_definition,
        conv_case(1, 70, heads=2, key_dim=64, values=128),
    ),
    "conv-wide": (
        short_convolution,
        conv_by_definition,
        conv_case(1, 150, heads=1, key_dim=256, values=300),
    ),
    "gates": (delta_gates, gates_by_definition, gates_case()),
    "gates-odd": (delta_gates, gates_by_definition, gates_case(3, 5, 3, 5)),
    "gates-long": (delta_gates, gates_by_definition, gates_case(2, 700, 1, 1)),
    "gates-by-channel": (delta_gates, gates_by_definition, gates_case(1, 20, 2, 256)),
    "norm": (gated_norm, norm_by_definition, norm_case()),
    "norm-odd": (gated_norm, norm_by_definition, norm_case(3, 5, 1, 1, 7)),
    "norm-wide": (gated_norm, norm_by_definition, norm_case(2, 150, 1, 4, 128)),
}


def run(op, tensors, options, **implementation):
    """Results, and the gradients of a weighted sum of them with respect to all tensors."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    results = op(*tensors, *options, **implementation)
    results = results if isinstance(results, tuple) else (results,)
    grads = [random(*y.shape, dtype=torch.float64, seed=9 + i) for i, y in enumerate(results)]
    grads = [g.to(y.dtype) for g, y in zip(grads, results, strict=True)]
    return [*(y.detach() for y in results), *torch.autograd.grad(results, tensors, grads)]


def relative(x, y):
    return ((x.double() - y).norm() / y.norm().clamp(min=1e-30)).item()


def check(name, dtype, implementation, change=lambda x: x):
    op, definition, (tensors, options) = CASES[name]
    tensors = [x.to(dtype) for x in tensors]
    expected = run(definition, [x.double() for x in tensors], options)
    results = run(op, [change(x) for x in tensors], options, implementation=implementation)
    assert [r.shape for r in results] == [e.shape for e in expected]
    errors = [relative(r, e) for r, e in zip(results, expected, strict=True)]
    assert max(errors) <= BUDGET[dtype], errors


@pytest.mark.parametrize("name", CASES)
def test_by_definition_in_float64(name):
    check(name, torch.float64, "auto")


@pytest.mark.parametrize("dtype", FUSED, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_fused_equals_the_definition(name, dtype):
    check(name, dtype, "triton")


@pytest.mark.parametrize("name", CASES)
def test_eager_equals_the_definition(name):
    check(name, torch.float32, "eager")


@pytest.mark.parametrize("name", ["conv", "conv-steps", "conv-odd", "gates", "norm"])
def test_strided_inputs_between_nan(name):
    """Slices of a wider buffer of NaN, off its alignment; what is allocated holds NaN too."""

    def slice_of(x):
        buffer = torch.full([n + 2 for n in x.shape], torch.nan, dtype=x.dtype, device=x.device)
        view = buffer[tuple(slice(1, n + 1) for n in x.shape)]
        return view.copy_(x)

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        check(name, torch.float32, "triton", slice_of)
    finally:
        torch.use_deterministic_algorithms(False)


def test_channels_apart():
    """Of the convolution's input: its frames lie closer than its channels."""
    check("conv", torch.float32, "triton", lambda x: x.mT.contiguous().mT if x.dim() == 3 else x)


@pytest.mark.parametrize("implementation", ["eager", "triton"])
@pytest.mark.parametrize("sizes", [(0, 5), (2, 0), (0, 0)])
def test_empty(sizes, implementation):
    if implementation == "triton" or sizes[1]:
        cases = [(short_convolution, conv_case(*sizes))]
    else:
        cases = []
    cases += [(delta_gates, gates_case(*sizes)), (gated_norm, norm_case(*sizes))]
    for op, (tensors, options) in cases:
        tensors = [x.float() for x in tensors]
        grads = run(op, tensors, options, implementation=implementation)[-len(tensors) :]
        assert [g.shape for g in grads] == [x.shape for x in tensors]
        assert all((g == 0).all() for g in grads)


def test_zeros_stay_zeros():
    """Frames of zeros, as beyond an utterance's end, have keys of norm 0 and finite gradients."""
    (x, weight), options = conv_case()
    for dtype in (torch.float16, torch.float32):
        zeros = torch.zeros_like(x, dtype=dtype)
        q, k, v, dx, dw = run(
            short_convolution, [zeros, weight.to(dtype)], options, implementation="triton"
        )
        assert not any(y.any() for y in (q, k, v, dw))
        assert dx.isfinite().all()


def test_weak_decay_keeps_its_digits():
    """Gates of 1e-9 a frame add up over the frames of an hour."""
    decay = torch.full((1, 4, 1, 1), -20.0, device=DEVICE)
    write, zero = torch.zeros(1, 4, 1, device=DEVICE), torch.zeros(1, 1, device=DEVICE)
    g, _ = delta_gates(decay, write, zero, zero, implementation="triton")
    torch.testing.assert_close(g, -F.softplus(decay.double()).float(), rtol=1e-6, atol=0)


def test_a_clamped_decay_that_overflows():
    """In float32 the product is -inf: the gate is -20, and no gradient is a NaN."""
    decay = torch.tensor([1e37, 5.0, -5.0], device=DEVICE).view(1, 3, 1, 1)
    write, rate = torch.zeros(1, 3, 1, device=DEVICE), torch.full((1, 1), 4.0, device=DEVICE)
    tensors = decay, write, rate, torch.zeros(1, 1, device=DEVICE)
    expected = run(delta_gates, [x.double() for x in tensors], ())
    results = run(delta_gates, tensors, (), implementation="triton")
    for result, y in zip(results, expected, strict=True):
        torch.testing.assert_close(result, y.float(), rtol=5e-6, atol=0)


def test_a_nan_stays_one():
    """Of a decay, where a clamp could hide it."""
    decay = torch.tensor([torch.nan, 1.0], device=DEVICE).view(1, 2, 1, 1)
    write, zero = torch.zeros(1, 2, 1, device=DEVICE), torch.zeros(1, 1, device=DEVICE)
    results = run(delta_gates, (decay, write, zero, zero), (), implementation="triton")
    g, _, d_decay, d_write, *shared = results
    assert g.isnan().flatten().tolist() == d_decay.isnan().flatten().tolist() == [True, False]
    assert d_write.isfinite().all() and all(x.isnan().all() for x in shared)


@pytest.mark.parametrize("name", ["gates-by-channel", "norm-wide"])
def test_programs_that_take_several_blocks(name, monkeypatch):
    """As the backward passes do of more rows than a test has."""
    for module in (ldsa_nn._ldsa.gates, ldsa_nn._ldsa.gated_norm):
        monkeypatch.setattr(module, "SHARES", 2)
    check(name, torch.float32, "triton")


def test_only_what_needs_gradients_gets_them():
    for name in ("conv", "gates", "norm"):
        op, _, (tensors, options) = CASES[name]
        tensors = [x.float() for x in tensors]
        tensors[-1].requires_grad_()
        results = op(*tensors, *options, implementation="triton")
        results = results if isinstance(results, tuple) else (results,)
        (grad,) = torch.autograd.grad([r.sum() for r in results if r.requires_grad], tensors[-1:])
        whole = run(op, tensors, options, implementation="triton")
        assert grad.shape == whole[-1].shape
        tensors[-1].requires_grad_(False)


def test_weights_of_another_dtype():
    """As under autocast: weights in float32, their gradients too."""
    for name in ("conv", "gates", "norm"):
        op, definition, (tensors, options) = CASES[name]
        n_inputs = {"conv": 1, "gates": 2, "norm": 2}[name]
        tensors = [x.bfloat16() if i < n_inputs else x.float() for i, x in enumerate(tensors)]
        expected = run(definition, [x.double() for x in tensors], options)
        results = run(op, tensors, options, implementation="triton")
        grads = results[-len(tensors) :]
        assert [g.dtype for g in grads] == [x.dtype for x in tensors]
        errors = [relative(r, e) for r, e in zip(results, expected, strict=True)]
        assert max(errors) <= BUDGET[torch.bfloat16], errors


def test_derivatives_that_there_are_not():
    for name in ("conv", "gates", "norm"):
        op, _, (tensors, options) = CASES[name]
        tensors = [x.float().requires_grad_() for x in tensors]

        def call(*tensors, op=op, options=options):
            results = op(*tensors, *options, implementation="triton")
            return results if isinstance(results, tuple) else (results,)

        results = call(*tensors)
        grads = torch.autograd.grad([y.square().sum() for y in results], tensors, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            torch.autograd.grad(sum(g.square().sum() for g in grads), tensors)
        with pytest.raises(RuntimeError, match="forward-mode derivatives are not supported"):
            torch.func.jvp(
                call, tuple(x.detach() for x in tensors), tuple(map(torch.ones_like, tensors))
            )


@pytest.mark.parametrize("name", ["conv", "conv-2-before", "gates", "norm"])
def test_opcheck(name):
    """Schema, autograd, fake tensors, symbolic shapes, of both directions."""
    op, _, (tensors, options) = CASES[name]
    tensors = [x.float().requires_grad_() for x in tensors]
    ops = getattr(torch.ops, ldsa_nn._kernels._NAMESPACE)
    operator = getattr(ops, op.__name__)
    torch.library.opcheck(operator, (*tensors, *options))
    results = op(*(x.detach() for x in tensors), *options, implementation="triton")
    results = results if isinstance(results, tuple) else (results,)
    args = *(x.detach() for x in (*results, *tensors)), *options
    torch.library.opcheck(
        getattr(ops, f"{op.__name__}_backward"), args, test_utils=("test_schema", "test_faketensor")
    )
