"""The systolic linear attention layer: by definition, padded, in chunks, in both directions."""

import copy
import math
import pickle

import pytest
import torch
from cases import ATOL, DEVICE, captured, close, error, no_waiting, random
from delta_cases import relative
from torch import nn
from torch.utils._pytree import tree_leaves

from ldsa_nn import ConformerEncoder, SystolicLinearAttention, replace_attention
from ldsa_nn.streaming import SlaState

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

from streams import assert_streams, chunks_of, plans  # noqa: E402

SLA = SystolicLinearAttention
SMALL = dict(n_key_head=2, value_heads_per_key=2, key_dim=8, value_dim=4, n_tiles=2)
DIRECTIONS = pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "both"])


def build(n_feat=6, seed=0, **options):
    torch.manual_seed(seed)
    return SLA(n_feat, **{**SMALL, **options}).to(DEVICE).eval()


def by_definition(layer, x):
    """Output [T,D] of one sequence x [T,D], frame by frame, from the parameters alone."""
    w = dict(layer.named_parameters())
    H, R, K, P = layer.n_key_head, layer.value_heads_per_key, layer.key_dim, layer.value_dim
    T, width, n = len(x), K // layer.n_tiles, layer.conv_kernel

    def scanned(x, direction):
        p = torch.cat([x.new_zeros(n - 1, x.shape[1]), x]) @ w["w_qkv.weight"].T
        S, out = x.new_zeros(H, K, R * P), []
        for t in range(T):
            mixed = sum(p[t + j] * w["conv.weight"][:, 0, j] for j in range(n))
            mixed = mixed * mixed.sigmoid()
            q, k, v = (y.view(H, -1) for y in mixed.split([H * K, H * K, H * R * P]))
            q, k = (y / (y.square().sum(1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
            first = direction * H * layer.n_tiles
            step = (w["w_decay.weight"] @ x[t])[first : first + H * layer.n_tiles]
            step = (step.view(H, -1) + w["dt_bias"][direction]).exp().log1p()
            decay = (-w["A_log"][direction].exp() * step).clamp(min=-20).exp()
            beta = 2 / (
                1 + (-(w["w_beta.weight"] @ x[t])[direction * H : (direction + 1) * H]).exp()
            )
            row = []
            for h in range(H):
                S_h = decay[h].repeat_interleave(width)[:, None] * S[h]
                S_h = S_h + beta[h] * torch.outer(k[h], v[h] - S_h.T @ k[h])
                row.append(S_h)
            S = torch.stack(row)
            out.append(torch.stack([S[h].T @ q[h] for h in range(H)]) / math.sqrt(K))
        return torch.stack(out)

    read = scanned(x, 0)
    if layer.bidirectional:
        read = read + scanned(x.flip(0), 1).flip(0)
    heads = read.view(T, H * R, P)
    heads = heads / (heads.square().mean(2, keepdim=True) + 1e-5).sqrt() * w["norm.weight"]
    hidden = x @ w["w_gate_down.weight"].T
    gate = (hidden @ w["w_gate_up.weight"].T + w["w_gate_up.bias"]).sigmoid()
    return (heads.flatten(1) * gate) @ w["w_out.weight"].T


@DIRECTIONS
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(n_key_head=1, value_heads_per_key=1, n_tiles=1),
        dict(n_key_head=3, value_heads_per_key=4, n_tiles=8, conv_kernel=1),
        dict(value_heads_per_key=8, key_dim=12, value_dim=3, n_tiles=4, conv_kernel=7),
    ],
    ids=str,
)
def test_by_definition(options, bidirectional):
    layer = build(bidirectional=bidirectional, **options).double()
    x = random(1, 70, 6, dtype=torch.float64)
    leaf, one = (x.clone().requires_grad_() for _ in range(2))
    y, expected = layer(leaf), by_definition(layer, one[0])
    assert y.shape == x.shape and error(y[0], expected) <= 1e-12
    grad = random(70, 6, dtype=torch.float64, seed=1)
    parameters = list(layer.parameters())
    grads = torch.autograd.grad(y, [leaf, *parameters], grad[None])
    wanted = torch.autograd.grad(expected, [one, *parameters], grad)
    assert all(relative(a, b, 1e-3) <= 1e-9 for a, b in zip(grads, wanted, strict=True))


def test_gates_are_clamped():
    layer = build().double()
    with torch.no_grad():
        layer.dt_bias.fill_(5.0)
        layer.A_log.fill_(3.0)
    (g,), (beta,) = layer._gates(random(1, 9, 6, dtype=torch.float64))
    assert (g == -20).all() and ((beta > 0) & (beta < 2)).all()
    x = random(1, 70, 6, dtype=torch.float64)
    assert error(layer(x)[0], by_definition(layer, x[0])) <= 1e-12


def test_gates_start_in_their_range():
    layer = SLA(8, n_key_head=8, n_tiles=64, key_dim=64, value_dim=4)
    step = torch.nn.functional.softplus(layer.dt_bias)
    assert step.min() >= 0.99e-3 and step.max() <= 0.101
    assert layer.A_log.exp().min() >= 1 and layer.A_log.exp().max() <= 16
    assert step.log().std() > 1 and layer.A_log.exp().std() > 3


# Padding


@DIRECTIONS
def test_padded_equals_alone(bidirectional):
    """Outputs and all gradients, with NaN in the padding and in its gradient."""
    layer = build(bidirectional=bidirectional).double()
    parameters = list(layer.parameters())
    ends, frames = (70, 33, 1, 0), 75
    x, grad = (random(4, frames, 6, dtype=torch.float64, seed=i) for i in range(2))
    lengths = torch.tensor(ends, device=DEVICE)
    outside = torch.arange(frames, device=DEVICE) >= lengths[:, None]
    x = torch.where(outside[:, :, None], math.nan, x).requires_grad_()
    y = layer(x, lengths=lengths)
    assert (y[outside] == 0).all()
    of_x, *of_parameters = torch.autograd.grad(
        y, [x, *parameters], torch.where(outside[:, :, None], 7.0, grad)
    )
    total = [torch.zeros_like(p) for p in parameters]
    for b, n in enumerate(ends):
        assert (of_x[b, n:] == 0).all()
        if n == 0:
            continue
        alone = x[b : b + 1, :n].detach().requires_grad_()
        expected = layer(alone)
        assert error(y[b, :n], expected[0]) <= 1e-12
        grads = torch.autograd.grad(expected, [alone, *parameters], grad[b : b + 1, :n])
        assert relative(of_x[b, :n], grads[0][0], 1e-3) <= 1e-10
        for t, g in zip(total, grads[1:], strict=True):
            t += g
    assert all(relative(a, b, 1e-3) <= 1e-10 for a, b in zip(of_parameters, total, strict=True))


@DIRECTIONS
@pytest.mark.parametrize("form", ["[B,T]", "[B,1,T]", "[B,T,T]", "integer"])
def test_masks(form, bidirectional):
    """Padding on either side or both; every form of mask."""
    layer = build(bidirectional=bidirectional).double()
    x, extents = random(3, 40, 6, dtype=torch.float64), [(0, 25), (12, 40), (5, 30)]
    keep = torch.zeros(3, 40, dtype=torch.bool, device=DEVICE)
    for b, (first, end) in enumerate(extents):
        keep[b, first:end] = True
    mask = {
        "[B,T]": keep,
        "[B,1,T]": keep[:, None],
        "[B,T,T]": keep[:, None] & keep[:, :, None],
        "integer": keep.int(),
    }[form]
    y = layer(torch.where(keep[:, :, None], x, math.nan), mask=mask)
    assert (y[~keep] == 0).all()
    for b, (first, end) in enumerate(extents):
        assert error(y[b, first:end], layer(x[b : b + 1, first:end])[0]) <= 1e-12


def test_key_and_value_are_unused():
    layer, x = build(), random(2, 9, 6)
    other = random(2, 9, 6, seed=1)
    assert torch.equal(layer(x, other, other), layer(x))
    assert torch.equal(layer(x, x, x, torch.ones(2, 9, dtype=torch.bool)), layer(x))


def test_what_it_sees():
    x = random(1, 30, 6, dtype=torch.float64).requires_grad_()
    for bidirectional in (False, True):
        layer = build(bidirectional=bidirectional).double()
        (grad,) = torch.autograd.grad(layer(x)[0, 12].sum(), x)
        seen = (grad[0] != 0).any(1)
        assert seen[:13].all() and (seen[13:] == bidirectional).all()


@DIRECTIONS
@pytest.mark.parametrize(("batch", "frames"), [(2, 0), (0, 9), (0, 0), (2, 1)])
def test_empty_inputs(batch, frames, bidirectional):
    layer, x = build(bidirectional=bidirectional), random(batch, frames, 6).requires_grad_()
    lengths = torch.full((batch,), frames, device=DEVICE)
    for options in ({}, dict(lengths=lengths)):
        y = layer(x, **options)
        assert y.shape == x.shape
        y.sum().backward()


ARGUMENTS = [
    ((lambda x: (x[0],)), {}, ValueError, r"x must have shape \[B,T,D\] with D=6, got \[9, 6\]"),
    ((lambda x: ([1.0],)), {}, TypeError, r"x must be a tensor \[B,T,D\], got list"),
    ((lambda x: (x,)), {"lengths": torch.ones(3).long()}, ValueError, r"lengths .* got \[3\]"),
    ((lambda x: (x,)), {"lengths": torch.ones(2)}, TypeError, "lengths must have an integer"),
    ((lambda x: (x, None, None, x[:, :, 0])), {}, TypeError, "mask must be bool or integer"),
    (
        (lambda x: (x, None, None, torch.ones(2, 9) > 0)),
        {"lengths": torch.ones(2).long()},
        ValueError,
        "lengths or mask, not both",
    ),
]


@pytest.mark.parametrize(("positional", "named", "kind", "message"), ARGUMENTS)
def test_wrong_arguments(positional, named, kind, message):
    layer = build()
    layer.w_qkv.register_forward_pre_hook(lambda *_: pytest.fail("something ran"))
    with pytest.raises(kind, match=message):
        layer(*positional(random(2, 9, 6)), **named)


def test_masks_with_holes():
    mask = torch.tensor([[True, False, True]])
    with pytest.raises(ValueError, match="holes in sequence 0"):
        build()(random(1, 3, 6), mask=mask)


CONSTRUCTOR = [
    (dict(n_tiles=3), ValueError, "n_tiles must divide key_dim, got 3 and 8"),
    (dict(n_key_head=0), ValueError, "n_key_head must be >= 1, got 0"),
    (dict(conv_kernel=0), ValueError, "conv_kernel must be >= 1, got 0"),
    (dict(value_dim=2.0), TypeError, "value_dim must be an int, got float 2.0"),
    (dict(key_dim=True), TypeError, "key_dim must be an int"),
    (dict(bidirectional="no"), TypeError, "bidirectional must be a bool, got 'no'"),
    (dict(state_dtype=torch.float16), ValueError, "state_dtype must be float32 or bfloat16"),
]


@pytest.mark.parametrize(("options", "kind", "message"), CONSTRUCTOR)
def test_constructor_errors(options, kind, message):
    with pytest.raises(kind, match=message):
        build(**options)


def test_lengths_by_position_are_no_key():
    with pytest.raises(ValueError, match=r"key must have shape \[B,T,D\] with D=6, got \[2\]"):
        build()(random(2, 3, 6), torch.tensor([3, 1]))


# Streaming


@hypothesis.given(plan=plans(frames=24), conv_kernel=st.sampled_from([1, 2, 4]))
@hypothesis.settings(max_examples=40)
def test_any_split_equals_the_whole(plan, conv_kernel):
    layer = build(conv_kernel=conv_kernel).double()
    with torch.no_grad():
        assert_streams(layer, plan, 1e-12, torch.float64)


@hypothesis.given(plan=plans(frames=24))
@hypothesis.settings(max_examples=10)
def test_any_split_in_float32(plan):
    with torch.no_grad():
        assert_streams(build(), plan, 2e-6, torch.float32)


def test_a_bfloat16_state():
    """What a step rounds the state by; streams without a frame still keep it bit for bit."""
    layer = build(state_dtype=torch.bfloat16)
    assert [t.dtype for t in layer.init_state(2)] == [torch.bfloat16, torch.float32]
    plan = [(T, [T, T // 2]) for T in (7, 1, 20, 1, 9)]
    with torch.no_grad():
        assert_streams(layer, plan, 3e-2, torch.float32)


def test_frame_by_frame_long():
    layer = build().double()
    with torch.no_grad():
        assert_streams(layer, [(1, [1, 1])] * 150, 1e-12, torch.float64)


def test_pure():
    layer, x = build(), random(2, 12, 6)
    lengths = torch.tensor([12, 5], device=DEVICE)
    for frames in (3, 12):
        for chosen in (None, lengths):
            chunk = x[:, :frames].clone()
            s0 = layer.step(random(2, 4, 6, seed=1), layer.init_state(2))[1]
            before = [t.clone() for t in s0]
            first, second = layer.step(chunk, s0, chosen), layer.step(chunk, s0, chosen)
            assert all(map(torch.equal, (first[0], *first[1]), (second[0], *second[1])))
            assert all(map(torch.equal, s0, before))
            places = {t.untyped_storage().data_ptr() for t in (chunk, *s0, lengths)}
            returned = [t.untyped_storage().data_ptr() for t in (first[0], *first[1])]
            assert len(set(returned)) == 3 and not places & set(returned)


def test_state():
    """Where and in what it is, its size, and rows that are reordered and reset."""
    layer = SLA(512)
    assert layer.state_bytes == 4 * 256 * 512 + 4 * 3 * (2 * 256 + 512)
    assert "524,288 and 12,288" in " ".join(SLA.__doc__.split())
    assert SLA(512, state_dtype=torch.bfloat16).state_bytes == 2 * 256 * 512 + 12288
    layer = build().double()
    state = layer.init_state(3)
    assert [t.dtype for t in state] == [torch.float64] * 2
    assert [t.shape for t in state] == [(3, 2, 8, 8), (3, 3, 2 * 2 * 8 + 16)]
    half = copy.deepcopy(layer).half().init_state(2)
    assert [t.dtype for t in half] == [torch.float32, torch.float16]
    assert all(t.is_meta for t in layer.init_state(2, device="meta"))
    assert all(t.numel() > 0 for t in build(conv_kernel=1).init_state(1))

    x = random(3, 20, 6, dtype=torch.float64)
    _, state = layer.step(x[:, :6], state)
    fresh = layer.init_state(3)
    state = SlaState(
        *(torch.cat([s[:1], f[1:2], s[2:]])[[2, 1, 0]] for s, f in zip(state, fresh, strict=True))
    )
    y, _ = layer.step(x[[2, 1, 0], 6:], state)
    expected = layer(x)[:, 6:]
    assert error(y[[2, 0]], expected[[0, 2]]) <= 1e-12
    assert error(y[1], layer(x[1:2, 6:])[0]) <= 1e-12


def test_gradients_are_those_of_the_whole():
    layer = build().double()
    x, grad = (random(2, 31, 6, dtype=torch.float64, seed=i) for i in range(2))

    def run(forward):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(forward(leaf), [leaf, *layer.parameters()], grad)

    def chunked(x):
        state, parts = layer.init_state(2), []
        for chunk in x.split([1, 4, 26], 1):
            y, state = layer.step(chunk, state)
            parts.append(y)
        return torch.cat(parts, 1)

    assert all(relative(a, b, 1e-3) <= 1e-10 for a, b in zip(run(chunked), run(layer), strict=True))


def test_a_bidirectional_layer_does_not_stream():
    layer = build(bidirectional=True)
    x = random(2, 4, 6)
    for call in (
        lambda: layer.init_state(2),
        lambda: layer.step(x, None),
        lambda: layer.flush(None),
    ):
        with pytest.raises(NotImplementedError, match="bidirectional=True is offline only"):
            call()


STATE_ERRORS = [
    (lambda s: None, TypeError, "state must be a SlaState, got NoneType"),
    (lambda s: s[:1], ValueError, "state must have 2 parts, got 1"),
    (lambda s: (s[0][:, :, :4], s[1]), ValueError, r"state\.memory must have shape \[2, 2, 8, 8\]"),
    (lambda s: (s[0].half(), s[1]), TypeError, r"state\.memory must have dtype torch\.float32"),
    (lambda s: (s[0], s[1][:1]), ValueError, r"state\.conv must have shape \[2, 3, 48\]"),
]


@pytest.mark.parametrize(("change", "kind", "message"), STATE_ERRORS)
def test_wrong_states(change, kind, message):
    layer = build()
    layer.w_qkv.register_forward_pre_hook(lambda *_: pytest.fail("something ran"))
    for call in (
        lambda s: layer.step(random(2, 4, 6), s),
        layer.flush,
    ):
        with pytest.raises(kind, match=message):
            call(change(layer.init_state(2)))


# PyTorch's machinery


@DIRECTIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, bidirectional):
    layer = build(bidirectional=bidirectional)
    half = copy.deepcopy(layer).to(dtype)
    exact = copy.deepcopy(half).double()
    x = random(2, 70, 6).to(dtype).requires_grad_()
    lengths = torch.tensor([70, 40], device=DEVICE)
    y = half(x, lengths=lengths)
    assert y.dtype == dtype and relative(y, exact(x.detach().double(), lengths=lengths)) <= 2e-2
    y.sum().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in half.parameters())


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
def test_autocast(state_dtype):
    layer, x = build(), random(2, 30, 6)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = layer(x)
        y.sum().backward()
        with torch.no_grad():
            state, parts = layer.init_state(2, dtype=state_dtype), []
            dtypes = [t.dtype for t in state]
            assert dtypes[0] == torch.float32
            for chunk in x.split([5, 1, 24], 1):
                part, state = layer.step(chunk, state)
                parts.append(part)
            assert [t.dtype for t in state] == dtypes
            streamed = torch.cat([*parts, layer.flush(state)], 1)
    exact = layer(x)
    for result in (y, streamed):
        assert result.dtype == torch.bfloat16 and relative(result, exact) <= 3e-2
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters()
    )


@DIRECTIONS
def test_copies(bidirectional):
    layer, x = build(bidirectional=bidirectional), random(2, 9, 6)
    other = build(bidirectional=bidirectional, seed=1)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(layer.state_dict())
    for same in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same(x), layer(x))


def test_device_and_dtype():
    layer = SLA(6, **SMALL, bidirectional=True, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    assert layer(torch.empty(2, 20, 6, device="meta", dtype=torch.bfloat16)).shape == (2, 20, 6)
    expected = {name: p.shape for name, p in build(bidirectional=True).named_parameters()}
    assert {name: p.shape for name, p in layer.named_parameters()} == expected


def test_repr_shows_the_options():
    shown = repr(build(bidirectional=True, state_dtype=torch.bfloat16))
    for part in (
        "n_feat=6, n_key_head=2, value_heads_per_key=2, key_dim=8, value_dim=4, n_tiles=2",
        "conv_kernel=4, bidirectional=True, state_dtype=torch.bfloat16",
    ):
        assert part in shown


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("form", "bidirectional"), [("lengths", False), ("mask", True)])
@torch._dynamo.config.patch(error_on_recompile=True)
def test_compiled_once_for_many_lengths(form, bidirectional):
    layer = build(bidirectional=bidirectional)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for frames in (30, 70, 12, 200):
        x = random(3, frames, 6)
        lengths = torch.tensor([frames, 3, frames // 2], device=DEVICE)
        mask = torch.arange(frames, device=DEVICE) < lengths[:, None]
        options = {"lengths": dict(lengths=lengths), "mask": dict(mask=mask)}[form]
        grads = []
        for module in (layer, compiled):
            leaf = x.clone().requires_grad_()
            y = module(leaf, **options)
            grads.append((y, *torch.autograd.grad(y.square().sum(), [leaf, layer.w_qkv.weight])))
        assert close(*grads, 1e-4)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_step():
    layer = build()
    step = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    state = layer.init_state(2)
    with torch.no_grad():
        for i in range(3):
            x = random(2, 1, 6, seed=i)
            y, new = step(x, state)
            expected = layer.step(x, state)
            assert close([y, *new], [expected[0], *expected[1]], 1e-6)
            state = new


class Step(nn.Module):
    """What torch.export takes: a step of tensors alone."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, state, lengths):
        return self.layer.step(x, state, lengths)


@pytest.mark.parametrize("frames", [2, 20])
def test_exported_step(frames):
    """One program for any number of streams; of few frames, PyTorch's operators alone on a CPU."""
    layer, batch = build(), torch.export.Dim("batch")
    state, lengths = layer.init_state(3), torch.tensor([2, 1, 0], device=DEVICE)
    shapes = ({0: batch}, type(state)(*({0: batch} for _ in state)), {0: batch})
    program = torch.export.export(
        Step(layer), (random(3, frames, 6), state, lengths), dynamic_shapes=shapes
    )
    chunked = "ldsa_nn.delta_rule.default" in {str(node.target) for node in program.graph.nodes}
    assert chunked == (frames > 2 or DEVICE != "cpu")
    for streams in (2, 5):
        x, state = random(streams, frames, 6), layer.init_state(streams)
        lengths = torch.arange(streams, device=DEVICE)
        expected = layer.step(x, state, lengths)
        y, new = program.module()(x, state, lengths)
        assert close([y, *new], [expected[0], *expected[1]], 1e-6)


def test_exported_forward():
    layer = build(bidirectional=True)
    # Torch 2.9 cannot write down how many frames a convolution takes unless there is a limit.
    batch, frames = torch.export.Dim("batch"), torch.export.Dim("frames", max=4096)
    program = torch.export.export(
        layer, (random(2, 20, 6),), dynamic_shapes={"x": {0: batch, 1: frames}}
    ).module()
    for shape in ((1, 9, 6), (3, 130, 6)):
        x = random(*shape)
        assert error(program(x), layer(x)) <= 1e-6


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    layer = build().double()
    x = random(2, 30, 6, dtype=torch.float64).requires_grad_()
    layer(x).sum().backward()
    expected, x.grad = x.grad, None
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(x.grad, expected)


# In the encoder and in a toolkit's


F = 5


def encoder(attention, **options):
    torch.manual_seed(0)
    sizes = dict(dim=8, num_layers=4, n_head=2, ffn_dim=16, conv_kernel=3, left=3)
    return ConformerEncoder(F, attention=attention, **{**sizes, **options}).to(DEVICE).eval()


MIXES = ["sla", ["ldsa", "ldsa", "ldsa", "sla"], ["sla", "ldsa", "sla", "ldsa"]]


@pytest.mark.parametrize("right", [0, 2])
@pytest.mark.parametrize("attention", MIXES, ids=str)
@hypothesis.given(plan=plans(streams=2, chunks=4, frames=15))
@hypothesis.settings(max_examples=8)
def test_encoder_streams(attention, right, plan):
    model = encoder(attention, right=right).double()
    totals = [sum(counts[b] for _, counts in plan) for b in range(2)]
    x = [random(total, F, dtype=torch.float64, seed=b) for b, total in enumerate(totals)]
    state, out = model.init_state(2), [[], []]
    with torch.no_grad():
        for chunk, lengths in chunks_of(x, plan):
            y, n, state = model.step(chunk, state, lengths)
            for b in range(2):
                out[b].append(y[b, : n[b]])
        y, n = model.flush(state)
        for b in range(2):
            whole = torch.cat([*out[b], y[b, : n[b]]])
            assert error(whole, model(x[b][None])[0][0]) <= 1e-12
    local = 4 if attention == "sla" else 4 - attention.count("sla")
    assert model.delay == 4 * right * (0 if attention == "sla" else local)


def test_encoder_padded_equals_alone():
    model = encoder(["ldsa", "sla", "mhsa", "sla"]).double().train()
    model.dropout = 0.0
    for layer in model.layers:
        layer.dropout = 0.0
        layer.attention.dropout_rate = 0.0
    x = random(3, 23, F, dtype=torch.float64)
    lengths = torch.tensor([23, 14, 1], device=DEVICE)
    inside = torch.arange(23, device=DEVICE) < lengths[:, None]
    y, n = model(torch.where(inside[:, :, None], x, math.nan), lengths)
    for b in range(3):
        assert error(y[b, : n[b]], model(x[b : b + 1, : lengths[b]])[0][0]) <= 1e-12
    y.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("dim", "heads", "values", "key_dim", "value_dim"),
    [(8, 1, 1, 64, 8), (144, 1, 2, 256, 72), (256, 1, 2, 256, 128), (512, 1, 4, 256, 128),
     (768, 2, 3, 256, 128), (1024, 2, 4, 256, 128)],
)  # fmt: skip
def test_sizes_follow_the_width(dim, heads, values, key_dim, value_dim):
    model = ConformerEncoder(F, dim, 1, 4 if dim > 8 else 2, 16, attention="sla", device="meta")
    layer = model.layers[0].attention
    sizes = layer.n_key_head, layer.value_heads_per_key, layer.key_dim, layer.value_dim
    assert sizes == (heads, values, key_dim, value_dim) and layer.n_feat == dim
    assert heads * values * value_dim == dim


@DIRECTIONS
def test_in_place_of_a_hosts_attention(bidirectional):
    """Padded on the right or, as some hosts do, masked; equal to each utterance alone."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    report = replace_attention(
        model, right=0, make=lambda path, old, n_head, n_feat, left, right: build(
            n_feat, bidirectional=bidirectional
        ),
    )  # fmt: skip
    assert report.replaced == ["layers.0.self_attn", "layers.1.self_attn"]
    assert "layers.0.self_attn.layer.A_log" in report.new_parameters
    model.to(DEVICE)
    x, lengths = random(2, 20, 6), torch.tensor([20, 9], device=DEVICE)
    padding = torch.arange(20, device=DEVICE) >= lengths[:, None]
    y = model(x, src_key_padding_mask=padding)
    assert error(y[1, :9], model(x[1:, :9])[0]) <= 1e-5
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state)


# What only a GPU shows


def gradients(layer, x, **options):
    """(output, gradients of its square's sum by x and all parameters)."""
    leaf = x.detach().requires_grad_()
    y = layer(leaf, **options)
    loss = y.square().sum()
    return y.detach(), *torch.autograd.grad(loss, [leaf, *layer.parameters()])


def assert_replayed(model, step, x, frames, ragged, atol):
    """A captured step, its state copied over itself, runs two streams x to their end.

    step: (chunk, state, lengths) -> (outputs, new state).
    """
    state = model.init_state(2)
    chunk = torch.zeros_like(x[:, :frames])
    lengths = torch.full((2,), frames, device=DEVICE) if ragged else None

    def fill(new):
        for old, n in zip(tree_leaves(state), tree_leaves(new), strict=True):
            old.copy_(n)

    def function():
        out, new = step(chunk, state, lengths)
        fill(new)
        return out

    with torch.no_grad():
        graph, out = captured(function)
        fill(model.init_state(2))
        twin = model.init_state(2)
        for i in range(6):
            chunk.copy_(x[:, frames * i : frames * (i + 1)])
            if ragged:
                lengths.copy_(torch.tensor([max(frames - i, 0), i]).clamp(max=frames))
            graph.replay()
            expected, twin = step(chunk, twin, lengths)
            assert close([*out, *tree_leaves(state)], [*expected, *tree_leaves(twin)], atol)


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("frames", [1, 8])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_cuda_graph(dtype, state_dtype, frames, ragged):
    torch.manual_seed(0)
    layer = SLA(64, key_dim=64, value_dim=32, state_dtype=state_dtype, device=DEVICE, dtype=dtype)

    def step(chunk, state, lengths):
        y, new = layer.step(chunk, state, lengths)
        return [y], new

    # A product inside a graph may be of another order of sums.
    x = random(2, 6 * frames, 64, dtype=dtype)
    assert_replayed(layer, step, x, frames, ragged, ATOL[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("attention", MIXES[:2], ids=str)
def test_cuda_graph_of_the_encoder(attention, ragged):
    model = encoder(attention, right=1)

    def step(chunk, state, lengths):
        *out, new = model.step(chunk, state, lengths)
        return out, new

    assert_replayed(model, step, random(2, 48, F), 8, ragged, 1e-4)


@pytest.mark.gpu
def test_the_host_never_waits():
    layers = [build(bidirectional=bidirectional) for bidirectional in (False, True)]
    x = random(2, 9, 6)
    lengths = torch.tensor([9, 2], device=DEVICE)
    on_cpu = lengths.cpu()
    keep = torch.arange(9, device=DEVICE) < lengths[:, None]
    options = [{}, {"lengths": lengths}, {"lengths": on_cpu}, {"mask": keep}]
    options += [{"mask": keep[:, None].long()}, {"mask": keep[:, None] & keep[:, :, None]}]

    def run():
        for each in options:
            for layer in layers:
                gradients(layer, x, **each)
        for chosen in (None, lengths, on_cpu):
            state = layers[0].init_state(2)
            for chunk in (x, x[:, :1], x):
                _, state = layers[0].step(chunk, state, chosen)
            layers[0].flush(state)

    run()
    with no_waiting():
        run()


@pytest.mark.gpu
@DIRECTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_default_sizes_in_every_precision(dtype, bidirectional):
    torch.manual_seed(0)
    layer = SLA(512, bidirectional=bidirectional, device=DEVICE, dtype=dtype)
    x, lengths = random(3, 300, 512, dtype=dtype), torch.tensor([300, 129, 5], device=DEVICE)
    results = gradients(layer, x, lengths=lengths)
    expected = gradients(copy.deepcopy(layer).double(), x.double(), lengths=lengths)
    bound = 1e-4 if dtype == torch.float32 else 4e-2
    names = ["out", "x", *dict(layer.named_parameters())]
    for name, y, exact in zip(names, results, expected, strict=True):
        assert relative(y, exact, 1e-9) <= bound, name


@pytest.mark.gpu
@DIRECTIONS
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_on_a_gpu(dtype, bidirectional):
    torch.manual_seed(0)
    sizes = dict(key_dim=64, value_dim=32, bidirectional=bidirectional)
    layer = SLA(64, **sizes, device=DEVICE, dtype=dtype)
    # The second number of frames makes a graph for any.
    compiled = torch.compile(layer, fullgraph=True)
    exact = copy.deepcopy(layer).double()
    for frames in (70, 200):
        x, lengths = random(3, frames, 64, dtype=dtype), torch.tensor([frames, 3, 40]).to(DEVICE)
        wanted = gradients(exact, x.double(), lengths=lengths)
        plain = gradients(layer, x, lengths=lengths)
        for y, z, e in zip(gradients(compiled, x, lengths=lengths), plain, wanted, strict=True):
            assert relative(y, e, 1e-9) <= 2 * relative(z, e, 1e-9) + ATOL[dtype]


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_step_on_a_gpu():
    torch.manual_seed(0)
    layer = SLA(64, key_dim=64, value_dim=32, device=DEVICE)
    step = torch.compile(layer.step, fullgraph=True)
    state = twin = layer.init_state(2)
    with torch.no_grad():
        for i, frames in enumerate((1, 1, 20)):
            x = random(2, frames, 64, seed=i)
            (y, state), (expected, twin) = step(x, state), layer.step(x, twin)
            assert close([y, *state], [expected, *twin], 1e-4)
