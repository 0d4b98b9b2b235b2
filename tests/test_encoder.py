"""ConformerEncoder: whole, padded and in chunks it computes the same frames."""

import copy
import math

import numpy as np
import pytest
import torch
from cases import ATOL, DEVICE, close, error, random
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves, tree_map

from ldsa_nn import ConformerEncoder

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

from streams import chunks_of, plans, streams_of  # noqa: E402

F = 5  # features of a frame


def build(seed=0, **options):
    torch.manual_seed(seed)
    defaults = dict(dim=8, num_layers=2, n_head=2, ffn_dim=16, conv_kernel=4, left=3)
    return ConformerEncoder(F, **{**defaults, **options}).to(DEVICE).eval()


def ceil_div(n, s):
    return -(-n // s)


def streamed(encoder, x, plan):
    """What each stream emits, steps and flush."""
    state = encoder.init_state(len(x))
    out = [[] for _ in x]
    came = [0] * len(x)
    behind = encoder.delay // encoder.subsampling

    def take(y, lengths, due):
        assert lengths.tolist() == due
        for b, n in enumerate(due):
            out[b].append(y[b, :n])
            assert (y[b, n:] == 0).all()

    for chunk, lengths in chunks_of(x, plan):
        counts, frames = lengths.tolist(), chunk.shape[1]
        y, y_lengths, new = encoder.step(chunk, state, None if min(counts) == frames else lengths)
        assert y.shape == (len(x), ceil_div(frames, encoder.subsampling), encoder.dim)
        # As soon as the look-ahead allows, and not before.
        total = [n + c for n, c in zip(came, counts, strict=True)]
        emitted = [
            [max(ceil_div(n, encoder.subsampling) - behind, 0) for n in frames]
            for frames in (came, total)
        ]
        take(y, y_lengths, [after - before for before, after in zip(*emitted, strict=True)])
        for old, kept in zip(tree_leaves(state), tree_leaves(new), strict=True):
            assert (kept.shape, kept.dtype) == (old.shape, old.dtype)
            for b, n in enumerate(counts):
                assert n > 0 or torch.equal(old[b], kept[b])
        state, came = new, total
    y, y_lengths = encoder.flush(state)
    assert y.shape == (len(x), behind, encoder.dim)
    take(y, y_lengths, [min(ceil_div(n, encoder.subsampling), behind) for n in came])
    return [torch.cat(parts) for parts in out]


def assert_streams(encoder, plan, tolerance, dtype):
    x = streams_of(plan, F, dtype)
    with torch.no_grad():
        for alone, y in zip(x, streamed(encoder, x, plan), strict=True):
            expected, lengths = encoder(alone[None])
            assert lengths.tolist() == [len(y)]
            assert error(y, expected[0]) <= tolerance


@hypothesis.given(
    plan=plans(frames=11),
    right=st.sampled_from([0, 2, (1, 0), (0, 3), (2, 1)]),
    subsampling=st.sampled_from([1, 2, 4, 8]),
    conv_kernel=st.sampled_from([0, 1, 4]),
    edge=st.sampled_from(["zero", "renormalize"]),
)
@hypothesis.settings(max_examples=100)
def test_any_split_equals_the_whole(plan, **options):
    assert_streams(build(**options).double(), plan, 1e-12, torch.float64)


@hypothesis.given(plan=plans(frames=11), right=st.sampled_from([0, 2]))
@hypothesis.settings(max_examples=10)
def test_any_split_in_float32(plan, right):
    assert_streams(build(right=right), plan, 1e-5, torch.float32)


def test_a_long_stream_frame_by_frame():
    encoder = build(num_layers=3, right=(2, 0, 1), left=(4, 0, 6))
    assert encoder.delay == 4 * 3
    assert_streams(encoder, [(1, [1, 1])] * 70, 1e-5, torch.float32)


LENGTHS = (23, 14, 0, 1)


def ragged(garbage=math.nan, dtype=torch.float64):
    x, lengths = random(4, 23, F, dtype=dtype), torch.tensor(LENGTHS, device=DEVICE)
    inside = torch.arange(23, device=DEVICE) < lengths[:, None]
    return torch.where(inside[:, :, None], x, garbage), lengths


ATTENTIONS = ["ldsa", "mhsa", "hybrid", ["mhsa", "ldsa"]]


@pytest.mark.parametrize("conv_kernel", [0, 4])
@pytest.mark.parametrize("attention", ATTENTIONS, ids=str)
def test_padding_changes_nothing(attention, conv_kernel):
    """Output and gradients of a padded batch, NaN in its padding, are those of each alone."""
    encoder = build(attention=attention, right=2, conv_kernel=conv_kernel).double()
    parameters = list(encoder.parameters())
    x, lengths = ragged()
    grad = random(4, 6, 8, dtype=torch.float64, seed=9)
    x.requires_grad_()
    y, y_lengths = encoder(x, lengths)
    assert y_lengths.tolist() == [6, 4, 0, 1] and y_lengths.dtype == torch.int64
    # A NaN in the gradient of a frame outside is ignored as well.
    outside = torch.arange(6, device=DEVICE) >= y_lengths[:, None]
    of_x, *of_parameters = torch.autograd.grad(
        y, [x, *parameters], torch.where(outside[:, :, None], math.nan, grad)
    )
    assert (y[outside] == 0).all()
    total = [torch.zeros_like(p) for p in parameters]
    for b, n in enumerate(LENGTHS):
        assert (of_x[b, n:] == 0).all()
        if n == 0:
            continue
        alone = x[b : b + 1, :n].detach().requires_grad_()
        expected, _ = encoder(alone)
        m = expected.shape[1]
        assert error(y[b, :m], expected[0]) <= 1e-12
        grads = torch.autograd.grad(expected, [alone, *parameters], grad[b : b + 1, :m])
        assert error(of_x[b, :n], grads[0][0]) <= 1e-12
        for t, g in zip(total, grads[1:], strict=True):
            t += g
    assert close(of_parameters, total, 1e-11)


def test_padding_in_training():
    encoder = build(dropout=0.5, attention=["ldsa", "mhsa"]).double().train()
    x, lengths = ragged()
    y, _ = encoder(x, lengths)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())


@pytest.mark.parametrize("conv_kernel", [0, 4])
@pytest.mark.parametrize("subsampling", [1, 2, 4])
def test_sees_as_far_as_its_delay(subsampling, conv_kernel):
    """Output frame t depends on input frames up to subsampling * t + delay, and on that one."""
    encoder = build(right=(2, 1), subsampling=subsampling, conv_kernel=conv_kernel).double()
    assert encoder.delay == 3 * subsampling
    x = random(1, 41, F, dtype=torch.float64).requires_grad_()
    y, _ = encoder(x)
    for t in (0, 3):
        (grad,) = torch.autograd.grad(y[0, t, 0], x, retain_graph=True)
        last = subsampling * t + encoder.delay
        assert (grad[0, last + 1 :] == 0).all() and (grad[0, last] != 0).any()


@pytest.mark.parametrize("subsampling", [1, 2, 4, 16])
@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 16, 17])
def test_output_frames(subsampling, frames):
    y, lengths = build(subsampling=subsampling)(random(2, frames, F))
    assert y.shape == (2, ceil_div(frames, subsampling), 8)
    assert lengths.tolist() == [y.shape[1]] * 2


@pytest.mark.parametrize("shape", [(2, 0, F), (0, 7, F), (0, 0, F)])
def test_nothing_to_encode(shape):
    encoder = build()
    x, lengths = random(*shape), torch.zeros(shape[0], dtype=torch.int64, device=DEVICE)
    for chosen in (None, lengths):
        y, y_lengths = encoder(x, chosen)
        assert y.shape == (shape[0], ceil_div(shape[1], 4), 8)
        assert y_lengths.shape == (shape[0],)
    if shape[0] == 0 and shape[1]:
        y, y_lengths, state = encoder.step(x, encoder.init_state(0))
        assert y.shape == (0, 2, 8) and encoder.flush(state)[0].shape == (0, 0, 8)


def test_lengths_are_clamped():
    encoder, x = build(right=1), random(3, 9, F)
    beyond, clamped = (torch.tensor(n, dtype=torch.int32) for n in ([-2, 100, 5], [0, 9, 5]))
    assert torch.equal(encoder(x, beyond)[0], encoder(x, clamped)[0])
    a = encoder.step(x, encoder.init_state(3), beyond)
    b = encoder.step(x, encoder.init_state(3), clamped)
    assert all(map(torch.equal, tree_leaves(a), tree_leaves(b)))


def test_states_are_never_empty_and_lead_with_the_batch():
    for right in (0, (2, 0)):
        for conv_kernel in (0, 1, 4):
            encoder = build(right=right, left=0, conv_kernel=conv_kernel)
            for state, dtype in (
                (encoder.init_state(3), torch.float32),
                (encoder.init_state(3, dtype=torch.bfloat16), torch.bfloat16),
            ):
                leaves = tree_leaves(state)
                assert all(t.shape[0] == 3 and t.numel() > 0 for t in leaves)
                assert {t.dtype for t in leaves} == {dtype, torch.int64}
                assert {t.device.type for t in leaves} == {DEVICE}
            assert all(t.is_meta for t in tree_leaves(encoder.init_state(3, device="meta")))


def test_pure():
    encoder, x = build(right=(2, 0)), random(2, 7, F)
    lengths = torch.tensor([7, 3], device=DEVICE)
    for chosen in (None, lengths):
        s0 = encoder.step(random(2, 9, F, seed=1), encoder.init_state(2))[2]
        before = tree_map(torch.clone, s0)
        first, second = (tree_leaves(encoder.step(x, s0, chosen)) for _ in range(2))
        assert all(map(torch.equal, first, second))
        given = {t.untyped_storage().data_ptr() for t in (x, lengths, *tree_leaves(s0))}
        returned = [t.untyped_storage().data_ptr() for t in first]
        assert len(set(returned)) == len(returned) and not given & set(returned)
        chunk = x.clone()
        result = encoder.step(chunk, s0, chosen)
        chunk.zero_()
        assert all(map(torch.equal, tree_leaves(result), first))
        encoder.flush(s0)
        assert all(map(torch.equal, tree_leaves(s0), tree_leaves(before)))


def test_rows_are_reset_reordered_and_flushed_early():
    encoder = build(right=(1, 1)).double()
    x = random(3, 30, F, dtype=torch.float64)
    state = encoder.step(x[:, :10], encoder.init_state(3))[2]
    fresh = encoder.init_state(3)
    early, n = encoder.flush(state)
    assert error(early[1, : n[1]], encoder(x[1:2, :10])[0][0, 1:]) <= 1e-12
    state = tree_map(lambda s, f: torch.cat([s[:1], f[1:2], s[2:]])[[2, 1, 0]], state, fresh)
    y, n, state = encoder.step(x[[2, 1, 0], 10:], state)
    rest, m = encoder.flush(state)
    for row, stream, start, skip in ((0, 2, 0, 1), (1, 1, 10, 0), (2, 0, 0, 1)):
        out = torch.cat([y[row, : n[row]], rest[row, : m[row]]])
        expected = encoder(x[stream : stream + 1, start:])[0][0, skip:]
        assert error(out, expected) <= 1e-12


@pytest.mark.parametrize("dim", [32, 256])
def test_a_new_model_hears_its_input(dim):
    """A block of a new model adds less to the frames of normalised features than there is."""
    torch.manual_seed(0)
    encoder = ConformerEncoder(F, dim, 1, 4, 4 * dim).to(DEVICE).eval()
    seen = {}
    (block,) = encoder.layers
    block.register_forward_pre_hook(lambda _, given: seen.update(before=given[0]))
    block.ffn2.register_forward_pre_hook(lambda _, given: seen.update(after=given[0]))
    encoder(random(2, 80, F))
    before, after = seen["before"], seen["after"]
    assert before.std() > (after - before).std()


def test_no_dropout_in_steps():
    encoder, x = build(dropout=0.5), random(2, 9, F)
    expected = encoder.step(x, encoder.init_state(2))
    encoder.train()
    assert all(
        map(torch.equal, tree_leaves(encoder.step(x, encoder.init_state(2))), tree_leaves(expected))
    )
    torch.manual_seed(0)
    first = encoder(x)[0]
    assert not torch.equal(first, encoder(x)[0])
    torch.manual_seed(0)
    assert torch.equal(encoder(x)[0], first)


@pytest.mark.parametrize("attention", ["mhsa", "hybrid", ["ldsa", "hybrid"]], ids=str)
def test_offline_only(attention):
    encoder = build(attention=attention)
    encoder.project.register_forward_pre_hook(lambda *_: pytest.fail("something ran"))
    name = attention if isinstance(attention, str) else attention[1]
    for call in (
        lambda: encoder.init_state(2),
        lambda: encoder.step(random(2, 4, F), None),
        lambda: encoder.flush(None),
        lambda: encoder.delay,
    ):
        with pytest.raises(NotImplementedError, match=f"{name!r} of layer .* offline only"):
            call()


def test_a_hybrid_and_self_attention_see_the_whole():
    for attention in ("mhsa", "hybrid"):
        encoder = build(attention=attention, right=0).double()
        x = random(1, 24, F, dtype=torch.float64).requires_grad_()
        (grad,) = torch.autograd.grad(encoder(x)[0][0, 0, 0], x)
        assert (grad[0, 20] != 0).any()


def test_self_attention_knows_the_order():
    """Without it a Transformer would not tell one order of its frames from another."""
    encoder = build(attention="mhsa", conv_kernel=0, subsampling=1).double()
    x = random(1, 9, F, dtype=torch.float64)
    assert error(encoder(x.flip(1))[0].flip(1), encoder(x)[0]) > 1e-3


def test_transformer_form():
    """No convolution, one whole feed-forward a block, one norm at the end."""
    encoder = build(conv_kernel=0, num_layers=1)
    names = {name.split(".")[2] for name, _ in encoder.named_parameters() if "layers" in name}
    assert names == {"attention", "attention_norm", "ffn2"}
    assert isinstance(encoder.norm, nn.LayerNorm)
    assert "norm.weight" not in build(num_layers=1).state_dict()


SIZES = [
    ("S", 144, 16, 4, 576, "7.7 M", "7.9 M"),
    ("M", 256, 16, 4, 1024, "23.9 M", "24.7 M"),
    ("L", 512, 17, 8, 2048, "100.8 M", "104.2 M"),
]


@pytest.mark.parametrize(("name", "dim", "layers", "heads", "ffn", "ldsa", "mhsa"), SIZES)
def test_sizes_in_the_docstring(name, dim, layers, heads, ffn, ldsa, mhsa):
    line = f"{name}: dim={dim}, num_layers={layers}, n_head={heads}, ffn_dim={ffn}, conv_kernel=32"
    shown = " ".join(ConformerEncoder.__doc__.split())
    assert f"{line} {ldsa} ({mhsa})" in shown
    for attention, count in (("ldsa", ldsa), ("mhsa", mhsa)):
        encoder = ConformerEncoder(
            80, dim, layers, heads, ffn, 32, attention, subsampling=4, device="meta"
        )
        assert f"{sum(p.numel() for p in encoder.parameters()) / 1e6:.1f} M" == count


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_gradient_checkpointing(lengths):
    encoder = build(dropout=0.3).double().train()
    x, given = ragged(0.0)
    grads = []
    for encoder.gradient_checkpointing in (False, True):
        torch.manual_seed(0)
        encoder.zero_grad()
        encoder(x, lengths and given)[0].square().sum().backward()
        grads.append([p.grad for p in encoder.parameters()])
    assert close(*grads, 1e-12)


def test_copies():
    encoder, x = build(), random(2, 9, F)
    other = build(seed=1)
    assert not torch.equal(other(x)[0], encoder(x)[0])
    other.load_state_dict(encoder.state_dict())
    assert torch.equal(other(x)[0], encoder(x)[0])
    assert torch.equal(copy.deepcopy(encoder)(x)[0], encoder(x)[0])
    half = copy.deepcopy(encoder).bfloat16()
    y, _, state = half.step(x.bfloat16(), half.init_state(2))
    assert y.dtype == torch.bfloat16
    assert {t.dtype for t in tree_leaves(state)} == {torch.bfloat16, torch.int64}


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
def test_autocast(state_dtype):
    encoder, x = build(right=(1, 0)), random(2, 20, F)
    exact = encoder(x)[0]
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        state, parts = encoder.init_state(2, dtype=state_dtype), []
        dtypes = [t.dtype for t in tree_leaves(state)]
        for chunk in x.split([8, 3, 9], 1):
            y, n, state = encoder.step(chunk, state)
            parts.append(y[:, : n[0]])
        y, n = encoder.flush(state)
        assert [t.dtype for t in tree_leaves(state)] == dtypes
    y = torch.cat([*parts, y[:, : n[0]]], 1)
    assert error(y, exact) <= 4e-2 * max(1.0, exact.abs().max().item())


class Step(nn.Module):
    """What torch.export takes: a step of tensors alone."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, features, state, lengths):
        return self.encoder.step(features, state, lengths)


def test_exported_step():
    """One program for any number of streams, on the first chunk and later."""
    encoder = build(right=(1, 0))
    batch = torch.export.Dim("batch")
    state = encoder.init_state(3)
    shapes = ({0: batch}, tree_map(lambda _: {0: batch}, state), {0: batch})
    lengths = torch.tensor([8, 3, 0], device=DEVICE)
    program = torch.export.export(
        Step(encoder), (random(3, 8, F), state, lengths), dynamic_shapes=shapes
    ).module()
    for streams in (2, 5):
        x, state = random(streams, 24, F), encoder.init_state(streams)
        for i, chunk in enumerate(x.split(8, 1)):
            lengths = 2 * torch.arange(streams, device=DEVICE) + i
            expected, result = encoder.step(chunk, state, lengths), program(chunk, state, lengths)
            assert type(result[2]) is type(state)
            assert close(tree_leaves(result), tree_leaves(expected), 1e-5)
            state = result[2]


def test_exported_forward():
    """Batch and frames both open: with a fixed batch torch cannot bound the strided frames.

    PyTorch 2.9 trips over a bound that it finds itself where it is told none.
    """
    encoder = build(attention=["ldsa", "mhsa"])
    batch, frames = torch.export.Dim("batch"), torch.export.Dim("frames", min=5, max=2**20)
    x, lengths = random(2, 16, F), torch.tensor([16, 9], device=DEVICE)
    program = torch.export.export(
        encoder, (x, lengths), dynamic_shapes=({0: batch, 1: frames}, {0: batch})
    )
    for T in (5, 30, 61):
        x, lengths = random(3, T, F), torch.tensor([T, T // 2, 0], device=DEVICE)
        assert close(program.module()(x, lengths), encoder(x, lengths), 1e-5)


def test_compiled_step():
    torch._dynamo.reset()
    encoder = build(right=(1, 0), subsampling=2)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(encoder.step, fullgraph=True, backend=counter)
    with torch.no_grad():
        state = encoder.init_state(2)
        for i in range(3):
            x = random(2, 6, F, seed=i)
            result, expected = step(x, state), encoder.step(x, state)
            assert close(tree_leaves(result), tree_leaves(expected), 1e-5)
            state = result[2]
    assert counter.frame_count == 1
    torch._dynamo.reset()


CONSTRUCTOR_ERRORS = [
    ({"dim": 0}, "dim must be >= 1, got 0"),
    ({"num_layers": 0}, "num_layers must be >= 1, got 0"),
    ({"n_head": 3}, "n_head must divide dim, got n_head=3, dim=8"),
    ({"conv_kernel": -1}, "conv_kernel must be >= 0 frames, got -1"),
    ({"subsampling": 3}, "subsampling must be a power of two, got 3"),
    ({"subsampling": 0}, "subsampling must be a power of two, got 0"),
    ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ({"attention": "lsda"}, "attention must be one of .*'ldsa'.* got 'lsda'"),
    ({"attention": ["ldsa"]}, "attention must be one value or one for each of 2 layers, got 1"),
    ({"left": [1, 2, 3]}, "left must be one value or one for each of 2 layers, got 3"),
    ({"right": [1]}, "right must be one value or one for each of 2 layers, got 1"),
    ({"right": -1}, "left and right must be >= 0 frames, got 3 and -1"),
    ({"edge": "same"}, "edge must be"),
]


@pytest.mark.parametrize(("options", "message"), CONSTRUCTOR_ERRORS)
def test_constructor_errors(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def in_block(state, i, **changes):
    block = state.blocks[i]
    changes = {name: change(getattr(block, name)) for name, change in changes.items()}
    blocks = (*state.blocks[:i], block._replace(**changes), *state.blocks[i + 1 :])
    return state._replace(blocks=blocks)


ERRORS = [
    ("features", lambda x: x[0], ValueError, r"features must have shape \[B,T,5\].*\[4, 5\]"),
    ("features", lambda x: x[:, :0], ValueError, r"features .*T >= 1, got \[2, 0, 5\]"),
    ("features", lambda x: x[..., 1:], ValueError, r"features .*\[2, 4, 4\]"),
    ("features", lambda x: x.double(), TypeError, r"features .*float32, got torch\.float64"),
    ("features", lambda x: x.to("meta"), ValueError, "features must be on .*got meta"),
    ("features", lambda x: x.tolist(), TypeError, "features must be a tensor"),
    ("state", lambda s: None, TypeError, "state must be a EncoderState, got NoneType"),
    ("state", lambda s: s[:2], ValueError, "state must have 3 parts, got 2"),
    ("state", lambda s: s._replace(blocks=s.blocks[:1]), ValueError,
     r"state\.blocks must have 2 parts, got 1"),
    ("state", lambda s: s._replace(subsampling=(s.subsampling[1],) * 2), ValueError,
     r"state\.subsampling\[0\] must have shape \[2, 2, 5\], got \[2, 2, 8\]"),
    ("state", lambda s: in_block(s, 1, conv=lambda c: (c[0][:1],)), ValueError,
     r"state\.blocks\[1\]\.conv\[0\] must have shape \[2, 3, 8\], got \[1, 3, 8\]"),
    ("state", lambda s: in_block(s, 0, delayed=lambda d: (d[0].half(), d[1])), TypeError,
     r"state\.blocks\[0\]\.delayed\[0\] must have dtype torch\.float32, got torch\.float16"),
    ("state", lambda s: in_block(s, 1, attention=lambda a: a._replace(start=a.start.float())),
     TypeError, r"state\.blocks\[1\]\.attention\.start must have dtype torch\.int64"),
    ("state", lambda s: in_block(s, 1, attention=lambda a: a._replace(value=a.value.to("meta"))),
     ValueError, r"state\.blocks\[1\]\.attention\.value must be on .*got meta"),
    ("lengths", lambda n: n[:1], ValueError, r"lengths must have shape \[B\] = \[2\], got \[1\]"),
    ("lengths", lambda n: n.float(), TypeError, "lengths.*integer.*float32"),
    ("lengths", lambda n: n > 1, TypeError, "lengths.*integer.*bool"),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "change", "kind", "message"), ERRORS)
def test_errors_before_anything_runs(argument, change, kind, message):
    encoder = build(right=(2, 0))
    good = {
        "features": random(2, 4, F),
        "state": encoder.init_state(2),
        "lengths": torch.tensor([4, 1], device=DEVICE),
    }
    for module in encoder.modules():
        module.register_forward_pre_hook(lambda *_: pytest.fail("something ran"))
    with pytest.raises(kind, match=message):
        encoder.step(**{**good, argument: change(good[argument])})
    if argument == "state":
        with pytest.raises(kind, match=message):
            encoder.flush(change(good["state"]))


@pytest.mark.parametrize(
    ("x", "lengths", "kind", "message"),
    [
        (torch.zeros(2, 4), None, ValueError, r"features must have shape \[B,T,5\]"),
        (torch.zeros(2, 4, 6), None, ValueError, r"features .*\[2, 4, 6\]"),
        (torch.zeros(2, 4, F).int(), None, TypeError, "features must be floating point"),
        (torch.zeros(2, 4, F), torch.ones(3).int(), ValueError, "lengths must have shape"),
        (torch.zeros(2, 4, F), torch.ones(2), TypeError, "lengths.*integer"),
    ],
)
def test_forward_errors(x, lengths, kind, message):
    with pytest.raises(kind, match=message):
        build()(x.to(DEVICE), lengths)


@pytest.mark.parametrize("right", [0, (2, 1)])
def test_bfloat16_streams_as_accurately_as_the_whole(right):
    options = dict(dim=64, n_head=4, ffn_dim=128, conv_kernel=15, left=14, right=right)
    encoder = build(**options).bfloat16()
    x = [random(n, F, dtype=torch.bfloat16, seed=n) for n in (130, 77)]
    plan = [(32, [32, 32]), (32, [32, 0]), (7, [7, 7]), (40, [19, 38]), (40, [40, 0])]
    with torch.no_grad():
        for alone, y in zip(x, streamed(encoder, x, plan), strict=True):
            exact = copy.deepcopy(encoder).double()(alone[None].double())[0][0]
            budget = 2 * error(encoder(alone[None])[0][0], exact) + ATOL[torch.bfloat16]
            assert error(y, exact) <= budget


# What only a GPU shows


@pytest.mark.gpu
@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("right", [0, (2, 1)])
def test_cuda_graph(right, is_ragged):
    """A captured step, its state copied over itself, runs streams to their end."""
    encoder = build(right=right)
    x, state = random(2, 48, F), encoder.init_state(2)
    chunk = torch.zeros_like(x[:, :8])
    lengths = torch.full((2,), 8, device=DEVICE) if is_ragged else None

    def fill(state, new):
        for old, n in zip(tree_leaves(state), tree_leaves(new), strict=True):
            old.copy_(n)

    def step():
        *out, new = encoder.step(chunk, state, lengths)
        fill(state, new)
        return out

    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        fill(state, encoder.init_state(2))
        twin = encoder.init_state(2)
        for i in range(6):
            chunk.copy_(x[:, 8 * i : 8 * i + 8])
            if is_ragged:
                lengths.copy_(torch.tensor([8 - i, 3 + i]))
            graph.replay()
            *expected, twin = encoder.step(chunk, twin, lengths)
            assert close([*out, *tree_leaves(state)], [*expected, *tree_leaves(twin)], 1e-4)


@pytest.mark.gpu
def test_the_host_never_waits():
    encoder, x = build(right=(2, 0)), random(2, 9, F)
    lengths = torch.tensor([9, 2], device=DEVICE)

    def run(chosen):
        encoder(x, chosen)
        state = encoder.init_state(2)
        for _ in range(2):
            *_, state = encoder.step(x, state, chosen)
        encoder.flush(state)

    for chosen in (None, lengths, lengths.cpu()):
        run(chosen)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(chosen)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["dim", "num_layers", "n_head", "subsampling", "conv_kernel"])
def test_sizes_are_ints(name):
    with pytest.raises(TypeError, match=rf"^{name} must be an int, got float 2\.0"):
        ConformerEncoder(**{"input_dim": 8, "dim": 8, "n_head": 2, name: 2.0})
    sizes = {"input_dim": 8, "dim": 8, "n_head": 2, "num_layers": 1, "conv_kernel": 3}
    ConformerEncoder(**{**sizes, name: np.int64({**sizes, "subsampling": 4}[name])})
