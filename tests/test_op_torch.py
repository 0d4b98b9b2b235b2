"""The op inside PyTorch's machinery: custom operators, compilation, export, graphs, devices."""

import functools
import importlib

import pytest
import torch
from cases import (
    DEVICE,
    SMALL,
    Case,
    Recorder,
    captured,
    close,
    error,
    lay_out,
    make,
    random,
    run,
    truth,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from ldsa_nn import ldsa_local_attention

ldsa_op = importlib.import_module("ldsa_nn._ldsa.op")

CASES = {case.name: case for case in SMALL}
PLAIN = Case("plain", 2, 2, 21, 8, 3, 2)
RAGGED = Case(
    "ragged", 3, 1, 21, 8, 3, 2, torch.bfloat16, "time_last", "renormalize", (21, 9, 17), (0, 4, 16)
)
DROPPED = Case("dropped", 2, 1, 21, 8, 3, 2, lengths=(21, 13), dropout_p=0.3)


@pytest.fixture(params=["eager", "triton"])
def implementation(request):
    return request.param


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# The custom operators


@pytest.mark.parametrize("case", [PLAIN, RAGGED, DROPPED], ids=str)
def test_plain_calls_are_the_operators(case, monkeypatch):
    """Without a tracer or mode a call goes past the dispatcher, to the same results.

    Its seed may be a number, whose mask is that of a tensor of the same number.
    """
    a_logits, v, grad, options = make(case, DEVICE)
    seed, drawn = 2**62 | 99 << 32 | 7, []

    def draw(device, plain):
        drawn.append(plain)
        return seed if plain else torch.tensor([seed], device=device)

    monkeypatch.setattr(ldsa_op, "_drawn", draw)

    def results():
        window = case.left, case.right
        return run(a_logits, v, grad, *window, implementation="triton", **options)

    with torch.profiler.profile() as profile:
        plain = results()
    assert not [e for e in profile.events() if e.name.startswith("ldsa_nn::")]
    with Recorder() as recorder:
        expected = results()
    assert "ldsa_nn::local_attention_backward" in recorder.names()
    assert drawn == ([True, False] if case.dropout_p else [])
    assert all(map(torch.equal, plain, expected))


def test_jit_trace_records_the_operator():
    a_logits, v, _, _ = make(PLAIN, DEVICE)

    def function(a_logits, v):
        return ldsa_local_attention(a_logits, v, 3, 2, implementation="triton")

    traced = torch.jit.trace(function, (a_logits, v))
    assert "ldsa_nn::local_attention" in str(traced.graph)
    a_logits, v = a_logits.flip(3), v.flip(3)
    assert torch.equal(traced(a_logits, v), function(a_logits, v))


def test_transforms_keep_to_the_operator():
    """Of an op that takes no part in the transform."""
    a_logits, v, grad, _ = make(PLAIN, DEVICE)

    def function(a_logits=a_logits, v=v):
        return ldsa_local_attention(a_logits, v, 3, 2, implementation="triton")

    out, three = function(), torch.arange(3.0, device=DEVICE)
    scaled = torch.vmap(lambda s: function() * s)(three)
    assert torch.equal(scaled, torch.stack([out * s for s in three]))
    slope = torch.func.grad(lambda s: (function() * s).sum())(three[1])
    torch.testing.assert_close(slope, out.sum())
    assert torch.equal(torch.func.functionalize(function)(a_logits, v), out)
    x = v.clone().requires_grad_()
    grads = torch.stack([grad, 2 * grad])
    (batched,) = torch.autograd.grad(function(v=x), x, grads, is_grads_batched=True)
    (one,) = torch.autograd.grad(function(v=x), x, grad)
    torch.testing.assert_close(batched, torch.stack([one, 2 * one]))


def test_forward_mode_is_refused():
    a_logits, v, _, _ = make(PLAIN, DEVICE)
    options = {"left": 3, "right": 2, "implementation": "triton"}
    function = functools.partial(ldsa_local_attention, a_logits, **options)
    with pytest.raises(RuntimeError, match=r"^ldsa_local_attention: forward-mode"):
        torch.func.jvp(function, (v,), (v,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, v)
        with pytest.raises(RuntimeError, match=r"^ldsa_local_attention: forward-mode"):
            function(dual)


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


@functools.cache
def recorded(case):
    """The calls of the two operators that a run of the case makes."""
    a_logits, v, grad, options = make(case, DEVICE)
    with Recorder() as recorder:
        run(a_logits, v, grad, case.left, case.right, implementation="triton", **options)
    calls = [call for call in recorder.calls if call[0].namespace == "ldsa_nn"]
    assert [call[0].name() for call in calls] == [
        "ldsa_nn::local_attention", "ldsa_nn::local_attention_backward",
    ]  # fmt: skip
    return calls


@pytest.mark.parametrize("case", [PLAIN, RAGGED, DROPPED, CASES["fp32_logits"]], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_opcheck(case, direction):
    """Schema, autograd, fake tensors, symbolic shapes."""
    func, args, kwargs, _ = recorded(case)[direction == "backward"]
    args = [
        # The fused kernel has no double backward, and says so: test_reports.py.
        x.detach().requires_grad_(direction == "forward") if is_float(x) else x
        for x in args
    ]
    assert sum(map(is_float, args)) == 2 + (direction == "backward")
    torch.library.opcheck(func, args, kwargs)


def test_lazily_negated_tensors():
    """Views of complex tensors, whose memory is not what they show, of inputs and of a gradient."""
    a_logits, v = random(2, 2, 4, 20), random(2, 2, 8, 20, seed=1)
    weight = torch.complex(random(2, 2, 8, 20, seed=2), random(2, 2, 8, 20, seed=3))
    shown = torch.complex(random(2, 2, 8, 20, seed=4), v).conj()
    results = {}
    for implementation in ("triton", "eager"):
        a, x = a_logits.clone().requires_grad_(), shown.clone().requires_grad_()
        assert x.conj().imag.is_neg()
        out = ldsa_local_attention(a, x.conj().imag, 2, 1, implementation=implementation)
        (torch.complex(out.detach(), out).conj() * weight).sum().real.backward()
        with torch.no_grad():
            plain = ldsa_local_attention(a, x.conj().imag, 2, 1, implementation=implementation)
        results[implementation] = out, plain, a.grad, x.grad
    for x, y in zip(*results.values(), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_fake_results_are_laid_out_as_real_ones(case):
    a_logits, v, grad, options = make(case, DEVICE)
    options["implementation"] = "triton"
    real = run(a_logits, v, grad, case.left, case.right, **options)
    with FakeTensorMode() as mode:
        options = {
            name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for name, x in options.items()
        }
        tensors = [mode.from_tensor(x) for x in (a_logits, v, grad)]
        fake = run(*tensors, case.left, case.right, **options)
    for x, y in zip(fake, real, strict=True):
        assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)


def test_meta_tensors(implementation):
    v = torch.empty(2, 21, 2, 8, device="meta").permute(0, 2, 3, 1)
    logits = torch.empty(2, 2, 6, 21, device="meta")
    out = ldsa_local_attention(logits, v, 3, 2, implementation=implementation)
    assert out.is_meta and out.shape == v.shape and out.stride() == v.stride()


# torch.compile


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize(
    ("implementation", "case", "dynamic"),
    [
        ("triton", PLAIN, True),
        ("triton", PLAIN, False),
        ("triton", RAGGED, True),
        ("triton", CASES["strided"], True),
        ("triton", CASES["fp32_logits"], True),
        ("eager", RAGGED, True),
        ("eager", CASES["strided"], False),
    ],
    ids=str,
)
def test_compiled(implementation, case, dynamic):
    a_logits, v, grad, options = make(case, DEVICE)
    options["implementation"] = implementation
    expected = run(a_logits, v, grad, case.left, case.right, **options)
    op = compiled(ldsa_local_attention, dynamic=dynamic)
    results = run(a_logits, v, grad, case.left, case.right, op, **options)
    assert close(results, expected, 1e-6)
    places = [d for d in range(4) if results[0].shape[d] > 1]  # one element has any stride
    assert [results[0].stride(d) for d in places] == [expected[0].stride(d) for d in places]


def test_compiled_by_inductor():
    """A layer-like graph around the op: views of what a product wrote, forward and backward."""
    x, weight = random(2, 21, 16), random(16, 2 * (6 + 8), seed=1)
    lengths = torch.tensor([21, 13], device=DEVICE)

    def function(x, weight):
        projected = (x @ weight).view(2, x.shape[1], 2, 14).permute(0, 2, 3, 1)
        a_logits, v = projected.split([6, 8], dim=2)
        out = ldsa_local_attention(
            a_logits, v, 3, 2, lengths=lengths, edge="renormalize", implementation="triton"
        )
        return out.permute(0, 3, 1, 2).flatten(2).relu().square().sum()

    def gradients(function):
        inputs = [y.clone().requires_grad_() for y in (x, weight)]
        out = function(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs)

    expected = gradients(function)
    results = gradients(compiled(function, "inductor", dynamic=True))
    for y, z in zip(results, expected, strict=True):
        assert error(y, z) <= 1e-5 * max(1.0, z.abs().max().item())


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_one_tensor_as_both_inputs(implementation, backend):
    """Its gradient is the sum of both; also where the inputs are views of one buffer."""
    op = compiled(ldsa_local_attention, backend) if backend else ldsa_local_attention
    x, grad = random(2, 2, 6, 21), random(2, 2, 6, 21, seed=1)
    _, grad_logits, grad_v = truth(x, x, grad, 3, 2)

    one = x.clone().requires_grad_()
    op(one, one, 3, 2, implementation=implementation).backward(grad)
    assert error(one.grad, grad_logits + grad_v) <= 1e-5

    buffer = torch.cat([x, x], 2).requires_grad_()
    op(buffer[:, :, :6], buffer[:, :, 6:], 3, 2, implementation=implementation).backward(grad)
    assert error(buffer.grad, torch.cat([grad_logits, grad_v], 2)) <= 1e-5


def test_dropout_compiled(implementation):
    """Repeatable by the seed, fresh without, and the same mask forward and backward."""
    a_logits, v, grad = random(2, 2, 6, 21), random(2, 2, 8, 21, seed=1), random(2, 2, 8, 21)
    op = compiled(ldsa_local_attention)

    def draw():
        return run(a_logits, v, grad, 3, 2, op, dropout_p=0.4, implementation=implementation)

    torch.manual_seed(0)
    first, second = draw(), draw()
    torch.manual_seed(0)
    assert close(draw(), first, 0)
    assert not torch.equal(first[0], second[0])
    for out, _, grad_v in (first, second):
        assert abs((grad * out).sum() - (grad_v * v).sum()) <= 1e-4


# torch.export


class Op(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, a_logits, v, lengths):
        return ldsa_local_attention(a_logits, v, 3, 2, lengths=lengths, **self.options)


def test_exported(implementation):
    """Any batch and any number of frames; the fused kernel as one operator."""
    module = Op(edge="renormalize", implementation=implementation)
    example = random(2, 2, 6, 21), random(2, 2, 8, 21), torch.tensor([21, 9], device=DEVICE)
    batch, frames = Dim("batch"), Dim("frames")
    of_frames = {0: batch, 3: frames}
    program = torch.export.export(
        module, example, dynamic_shapes=(of_frames, of_frames, {0: batch})
    )
    targets = {str(node.target) for node in program.graph.nodes}
    assert ("ldsa_nn.local_attention.default" in targets) == (implementation == "triton")
    for B, T in ((1, 1), (3, 4), (2, 40)):
        inputs = random(B, 2, 6, T), random(B, 2, 8, T, seed=1)
        lengths = torch.arange(B, device=DEVICE)
        assert close([program.module()(*inputs, lengths)], [module(*inputs, lengths)], 1e-6)


# What only a GPU shows


def inputs(dtype=torch.bfloat16):
    a_logits, v, grad = (random(3, 2, n, 40, dtype=dtype, seed=n) for n in (6, 8, 9))
    return a_logits.requires_grad_(), v.requires_grad_(), grad[:, :, :8].contiguous()


@pytest.mark.gpu
def test_cuda_graph():
    a_logits, v, grad = inputs()
    lengths = torch.tensor([40, 40, 40], device="cuda")

    def function():
        out = ldsa_local_attention(a_logits, v, 3, 2, lengths=lengths)
        return out.detach(), *torch.autograd.grad(out, (a_logits, v), grad)

    graph, results = captured(function)
    for seed, n in ((3, 40), (4, 17)):
        with torch.no_grad():
            for i, x in enumerate((a_logits, v, grad)):
                x.copy_(random(*x.shape, seed=seed + 10 * i))
            lengths.copy_(torch.tensor([n, 40, n // 2]))
        graph.replay()
        assert close(results, function(), 0)


@pytest.mark.gpu
def test_cuda_graph_draws_a_new_mask_in_every_replay():
    a_logits, v, grad = inputs(torch.float32)

    def function():
        out = ldsa_local_attention(a_logits, v, 3, 2, dropout_p=0.5)
        return out.detach(), *torch.autograd.grad(out, (a_logits, v), grad)

    graph, (out, _, grad_v) = captured(function)
    outs = []
    for _ in range(3):
        graph.replay()
        outs.append(out.clone())
        assert abs((grad * out).sum() - (grad_v * v).sum()) <= 1e-3
    assert not torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[1], outs[2])


@pytest.mark.gpu
@pytest.mark.parametrize("bounds_on", ["cpu", "cuda"])
def test_the_host_never_waits(bounds_on):
    a_logits, v, grad = inputs()
    options = {
        "lengths": torch.tensor([40, 7, 30], device=bounds_on),
        "starts": torch.tensor([0, 1, 30], device=bounds_on),
        "edge": "renormalize",
        "dropout_p": 0.1,
    }
    for implementation in ("triton", "eager"):
        run(a_logits, v, grad, 3, 2, implementation=implementation, **options)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(a_logits, v, grad, 3, 2, implementation=implementation, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_side_streams():
    """The launch is on the current stream: it waits for what that stream does before."""
    a_logits, v, grad = inputs(torch.float32)
    expected = run(a_logits, v, grad, 3, 2)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = torch.zeros_like(v)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(v.detach())
        results = run(a_logits, late, grad, 3, 2)
    stream.synchronize()
    assert close(results, expected, 0)


def test_lay_out_fills_what_lies_around_with_nan():
    """The tests that rely on it would pass without."""
    x = lay_out(random(2, 3, 4, 5), "strided")
    buffer = torch.empty(0, device=DEVICE).set_(x.untyped_storage())
    assert buffer.isnan().sum() == buffer.numel() - x.numel()
