"""Streaming layers: chunks of any split give the frames of the whole, and states are pure."""

import copy
import math

import pytest
import torch
from cases import ATOL, DEVICE, close, error, random
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from ldsa_nn import HybridAttention, LocalDenseSynthesizerAttention
from ldsa_nn.streaming import LdsaState

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

from streams import assert_streams, plans, streamed  # noqa: E402

LDSA = LocalDenseSynthesizerAttention
WINDOWS = [(3, 2), (0, 0), (0, 4), (5, 0), (2, 7), (1, 1)]
KINDS = {"linear": {}, "bias": {"use_bias": True}, "grouped": {"grouped_w2": True}}


def build(left=3, right=2, seed=0, n_head=2, n_feat=8, **options):
    torch.manual_seed(seed)
    return LDSA(n_head, n_feat, left=left, right=right, **options).to(DEVICE).eval()


@hypothesis.given(
    plan=plans(),
    window=st.sampled_from(WINDOWS),
    edge=st.sampled_from(["zero", "renormalize"]),
    kind=st.sampled_from(list(KINDS)),
)
@hypothesis.settings(max_examples=150)
def test_any_split_equals_the_whole(plan, window, edge, kind):
    layer = build(*window, edge=edge, **KINDS[kind]).double()
    with torch.no_grad():
        assert_streams(layer, plan, 1e-12, torch.float64)


@pytest.mark.parametrize("implementation", ["eager", "triton"])
@hypothesis.given(
    plan=plans(streams=2, chunks=4),
    window=st.sampled_from(WINDOWS),
    edge=st.sampled_from(["zero", "renormalize"]),
)
@hypothesis.settings(max_examples=6)
def test_any_split_in_float32(implementation, plan, window, edge):
    layer = build(*window, edge=edge, use_bias=True, implementation=implementation)
    with torch.no_grad():
        assert_streams(layer, plan, 1e-6, torch.float32)


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
def test_j21_look_ahead(edge):
    """100 frames in chunks of 1, 3, 7, 16, ... and the last 2 from flush."""
    layer, x = build(15, 2, edge=edge), random(1, 100, 8)
    assert layer.delay == 2
    state, parts, place = layer.init_state(1), [], 0
    for frames in (1, 3, 7, 16, 1, 30, 2, 40):
        y, state = layer.step(x[:, place : place + frames], state)
        parts.append(y)
        place += frames
    assert place == 100
    parts.append(layer.flush(state))
    y = torch.cat(parts, 1)
    assert y.shape[1] == 102 and parts[-1].shape[1] == 2
    assert error(y[:, 2:], layer(x)) <= 1e-6
    assert (y[:, :2] == 0).all()


def test_j22_pure():
    layer, x = build(use_bias=True), random(2, 5, 8)
    lengths = torch.tensor([5, 2], device=DEVICE)
    for chosen in (None, lengths):
        s0 = layer.step(random(2, 4, 8, seed=1), layer.init_state(2))[1]
        before = [t.clone() for t in s0]
        first, second = layer.step(x, s0, chosen), layer.step(x, s0, chosen)
        assert torch.equal(first[0], second[0])
        assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(s0, before, strict=True))
        # Nothing returned shares memory with what was given or with each other.
        places = {t.untyped_storage().data_ptr() for t in (x, *s0, lengths)}
        returned = [t.untyped_storage().data_ptr() for t in (first[0], *first[1])]
        assert len(set(returned)) == 4 and not places & set(returned)
        chunk = x.clone()
        state = layer.step(chunk, s0, chosen)[1]
        chunk.zero_()
        assert all(torch.equal(a, b) for a, b in zip(state, first[1], strict=True))
    y = layer.flush(s0)
    assert y.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in s0}
    assert all(torch.equal(a, b) for a, b in zip(s0, before, strict=True))


def test_flush_leaves_the_stream_running():
    layer, x = build(2, 3, edge="renormalize").double(), random(2, 12, 8, dtype=torch.float64)
    state = layer.step(x[:, :5], layer.init_state(2))[1]
    early = layer.flush(state)
    assert error(early, layer(x[:, :5])[:, 2:]) <= 1e-12
    y, state = layer.step(x[:, 5:], state)
    assert error(torch.cat([y, layer.flush(state)], 1), layer(x)[:, 2:]) <= 1e-12


@pytest.mark.parametrize("frames", [0, 1, 3])
@pytest.mark.parametrize("edge", ["zero", "renormalize"])
def test_streams_shorter_than_the_look_ahead(frames, edge):
    layer = build(2, 5, edge=edge, use_bias=True).double()
    x = random(1, frames, 8, dtype=torch.float64)
    state = layer.init_state(1)
    for t in range(frames):
        y, state = layer.step(x[:, t : t + 1], state)
        assert (y == 0).all()
    y = layer.flush(state)
    assert y.shape == (1, 5, 8) and (y[:, : 5 - frames] == 0).all()
    assert error(y[:, 5 - frames :], layer(x)) <= 1e-12


@pytest.mark.parametrize("window", WINDOWS)
def test_states_have_fixed_shapes_and_are_never_empty(window):
    layer = build(*window)
    state = fresh = layer.init_state(3)
    assert isinstance(state, tuple) and hasattr(state, "_fields")
    for frames, lengths in ((1, None), (9, None), (40, None), (4, [4, 0, 2])):
        lengths = lengths and torch.tensor(lengths, device=DEVICE)
        _, state = layer.step(random(3, frames, 8), state, lengths)
        assert type(state) is type(fresh)
        for old, new in zip(fresh, state, strict=True):
            assert (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)
            assert new.shape[0] == 3 and new.numel() > 0
            # Neither a saved state nor one kept for long holds on to a long chunk.
            assert new.untyped_storage().nbytes() <= 2 * old.untyped_storage().nbytes()


def test_where_and_in_what_a_state_is():
    layer = build()
    for state, dtype in (
        (layer.init_state(2), torch.float32),
        (layer.init_state(2, dtype=torch.bfloat16), torch.bfloat16),
        (copy.deepcopy(layer).half().init_state(2), torch.float16),
    ):
        assert [t.dtype for t in state] == [dtype, dtype, torch.int64]
        assert all(t.device.type == DEVICE for t in state)
    assert all(t.is_meta for t in layer.init_state(2, device="meta"))
    assert all(t.shape[0] == 0 for t in layer.init_state(0))


def test_rows_are_reset_reordered_and_joined():
    layer = build(use_bias=True, edge="renormalize").double()
    x = random(3, 20, 8, dtype=torch.float64)
    state = layer.step(x[:, :6], layer.init_state(3))[1]
    fresh = layer.init_state(3)
    # Stream 1 starts anew, then streams 2, 1, 0 change places.
    state = type(state)(
        *(torch.cat([s[:1], f[1:2], s[2:]]) for s, f in zip(state, fresh, strict=True))
    )
    state = type(state)(*(s[[2, 1, 0]] for s in state))
    y, state = layer.step(x[[2, 1, 0], 6:], state)
    y = torch.cat([y, layer.flush(state)], 1)[[2, 1, 0]]
    assert error(y[::2], layer(x)[::2, 4:]) <= 1e-12
    assert (y[1, :2] == 0).all()
    assert error(y[1, 2:], layer(x[1:2, 6:])[0]) <= 1e-12
    # A new stream joins two running ones.
    two = layer.step(x[:2, :6], layer.init_state(2))[1]
    three = type(two)(*(torch.cat([s, f[:1]]) for s, f in zip(two, fresh, strict=True)))
    y, _ = layer.step(x[:, 6:], three)
    assert error(y[:2], layer(x)[:2, 4:18]) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_lengths_of_any_integer_type_are_clamped(dtype):
    layer = build(255, 0)  # what is kept and the lengths do not fit uint8 together
    x, state = random(3, 5, 8), layer.init_state(3)
    many, few = (0, 200) if dtype == torch.uint8 else (-3, 100)
    a = layer.step(x, state, torch.tensor([many, few, 2], dtype=dtype, device=DEVICE))
    b = layer.step(x, state, torch.tensor([0, 5, 2], device=DEVICE))
    assert torch.equal(a[0], b[0]) and all(map(torch.equal, a[1], b[1]))
    # On the CPU they may be anywhere the layer is.
    c = layer.step(x, state, torch.tensor([0, 5, 2]))
    assert torch.equal(c[0], b[0]) and all(map(torch.equal, c[1], b[1]))


def test_no_streams():
    layer = build()
    y, state = layer.step(random(0, 4, 8), layer.init_state(0))
    assert y.shape == (0, 4, 8) and layer.flush(state).shape == (0, 2, 8)


def test_no_lengths_are_all_the_frames():
    layer, x = build(use_bias=True), random(2, 5, 8)
    state = layer.step(x, layer.init_state(2))[1]
    a, b = layer.step(x, state), layer.step(x, state, torch.tensor([5, 5], device=DEVICE))
    assert error(a[0], b[0]) <= 1e-6 and all(map(torch.equal, a[1], b[1]))


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_garbage_beyond_the_lengths(garbage):
    layer, x = build(use_bias=True), random(3, 6, 8)
    lengths = torch.tensor([6, 2, 0], device=DEVICE)
    inside = (torch.arange(6, device=DEVICE) < lengths[:, None])[:, :, None]
    state = layer.step(x, layer.init_state(3))[1]
    a = layer.step(torch.where(inside, x, garbage), state, lengths)
    b = layer.step(torch.where(inside, x, 0.0), state, lengths)
    assert torch.equal(a[0], b[0]) and all(map(torch.equal, a[1], b[1]))


def test_no_dropout_in_training_mode():
    layer, x = build(dropout_rate=0.5), random(2, 9, 8)
    expected = layer.step(x, layer.init_state(2))
    layer.train()
    y, state = layer.step(x, layer.init_state(2))
    assert torch.equal(y, expected[0]) and all(map(torch.equal, state, expected[1]))
    layer.eval()
    assert torch.equal(layer.flush(state), layer.train().flush(state))


def test_gradients_are_those_of_the_whole():
    layer = build(use_bias=True).double()
    x, grad = (random(2, 11, 8, dtype=torch.float64, seed=i) for i in range(2))

    def run(forward):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(forward(leaf), [leaf, *layer.parameters()], grad)

    def chunked(x):
        state, parts = layer.init_state(2), []
        for chunk in x.split([1, 4, 6], 1):
            y, state = layer.step(chunk, state)
            parts.append(y)
        return torch.cat([*parts, layer.flush(state)], 1)[:, 2:]

    assert close(run(chunked), run(layer), 1e-12)


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
def test_autocast(state_dtype):
    layer, x = build(use_bias=True), random(2, 12, 8)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        state, parts = layer.init_state(2, dtype=state_dtype), []
        dtypes = [t.dtype for t in state]
        for chunk in x.split([5, 1, 6], 1):
            y, state = layer.step(chunk, state)
            parts.append(y)
        y = torch.cat([*parts, layer.flush(state)], 1)[:, 2:]
        assert [t.dtype for t in state] == dtypes
        assert y.dtype == torch.bfloat16
    exact = layer(x)
    assert error(y, exact) <= 1.5e-2 * max(1.0, exact.abs().max().item())
    if state_dtype is not None:
        with pytest.raises(TypeError, match=r"state\.logits.*float32.*bfloat16"):
            layer.step(x, state)


class Step(nn.Module):
    """What torch.export takes: a step of tensors alone."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, state, lengths):
        return self.layer.step(x, state, lengths)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("window", [(3, 2), (0, 0)])
def test_i20_exported(window, ragged):
    """One program for any number of streams and any chunk, on the first chunk and later."""
    layer = build(*window, use_bias=True)
    batch, frames = torch.export.Dim("batch"), torch.export.Dim("frames")
    state = layer.init_state(3)
    assert all(t.numel() > 0 for t in state)
    lengths = torch.tensor([4, 2, 0], device=DEVICE) if ragged else None
    shapes = ({0: batch, 1: frames}, type(state)(*({0: batch} for _ in state)))
    program = torch.export.export(
        Step(layer),
        (random(3, 4, 8), state, lengths),
        dynamic_shapes=(*shapes, {0: batch} if ragged else None),
    ).module()
    for streams, T in ((2, 7), (5, 31)):
        x, state = random(streams, T, 8), layer.init_state(streams)
        for i in range(3):
            lengths = torch.arange(streams, device=DEVICE) + i if ragged else None
            expected = layer.step(x, state, lengths)
            y, new = program(x, state, lengths)
            assert isinstance(new, LdsaState)
            assert close([y, *new], [expected[0], *expected[1]], 1e-6)
            state = new


@pytest.mark.parametrize("ragged", [False, True])
def test_compiled_once_for_many_chunks(ragged):
    torch._dynamo.reset()
    layer = build(2, 1, use_bias=True)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(layer.step, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        state = layer.init_state(3)
        for i, T in enumerate([5, 2, 9, 30, 4, 17]):
            x = random(3, T, 8, seed=i)
            lengths = torch.tensor([T, 1, T // 2], device=DEVICE) if ragged else None
            y, new = step(x, state, lengths)
            expected = layer.step(x, state, lengths)
            assert close([y, *new], [expected[0], *expected[1]], 1e-6)
            state = new
    assert 1 <= counter.frame_count <= 2
    torch._dynamo.reset()


def other_field(state, i, change):
    fields = list(state)
    fields[i] = change(fields[i])
    return type(state)(*fields)


ERRORS = [
    ("x", lambda x: x[0], ValueError, r"x must have shape \[B,T,8\].*\[4, 8\]"),
    ("x", lambda x: x[..., :7], ValueError, r"x must have shape \[B,T,8\].*\[2, 4, 7\]"),
    ("x", lambda x: x[:, :0], ValueError, r"x must have shape .*T >= 1, got \[2, 0, 8\]"),
    ("x", lambda x: x.double(), TypeError, r"x .*torch\.float32, got torch\.float64"),
    ("x", lambda x: x.long(), TypeError, r"x must be floating point, got torch\.int64"),
    ("x", lambda x: x.tolist(), TypeError, r"x must be a tensor .*got list"),
    ("x", lambda x: x.to("meta"), ValueError, r"x must be on .*got meta"),
    ("state", lambda s: None, TypeError, "state must be a LdsaState, got NoneType"),
    ("state", lambda s: s[:2], ValueError, "state must have 3 parts, got 2"),
    ("state", lambda s: other_field(s, 1, lambda t: t[:, 1:]), ValueError,
     r"state\.value must have shape \[2, 5, 2, 4\], got \[2, 4, 2, 4\]"),
    ("state", lambda s: other_field(s, 2, lambda t: t[:1]), ValueError,
     r"state\.start must have shape \[2\], got \[1\]"),
    ("state", lambda s: other_field(s, 0, lambda t: t.double()), TypeError,
     r"state\.logits must have dtype torch\.float32, got torch\.float64"),
    ("state", lambda s: other_field(s, 2, lambda t: t.int()), TypeError,
     r"state\.start must have dtype torch\.int64, got torch\.int32"),
    ("state", lambda s: other_field(s, 1, lambda t: t.to("meta")), ValueError,
     r"state\.value must be on .*got meta"),
    ("state", lambda s: other_field(s, 1, lambda t: None), TypeError,
     r"state\.value must be a tensor, got NoneType"),
    ("lengths", lambda n: n[:1], ValueError, r"lengths must have shape \[B\] = \[2\], got \[1\]"),
    ("lengths", lambda n: n.float(), TypeError, "lengths.*integer.*float32"),
    ("lengths", lambda n: n > 1, TypeError, "lengths.*integer.*bool"),
    ("lengths", lambda n: n.tolist(), TypeError, "lengths.*tensor.*list"),
    ("lengths", lambda n: n.to("meta"), ValueError, "lengths must be on .*got meta"),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "change", "kind", "message"), ERRORS)
def test_errors_before_anything_runs(argument, change, kind, message):
    layer = build()
    good = {
        "x": random(2, 4, 8),
        "state": layer.init_state(2),
        "lengths": torch.tensor([4, 1], device=DEVICE),
    }
    for part in (layer.w1, layer.w3):
        part.register_forward_pre_hook(lambda *_: pytest.fail("something ran"))
    with pytest.raises(kind, match=message):
        layer.step(**{**good, argument: change(good[argument])})
    if argument == "state":
        # Without a chunk to compare with, the first tensor says how many streams there are.
        with pytest.raises(kind, match=message):
            layer.flush(change(good["state"]))


def test_another_batch():
    layer = build()
    with pytest.raises(ValueError, match=r"state\.logits must have shape \[3, .*got \[2, "):
        layer.step(random(3, 4, 8), layer.init_state(2))


def test_batch_sizes():
    layer = build()
    for batch, kind in ((-1, ValueError), (2.0, TypeError), (True, TypeError), ("2", TypeError)):
        with pytest.raises(kind, match="batch_size must be"):
            layer.init_state(batch)


def test_a_state_may_come_as_a_plain_tuple():
    layer, x = build(), random(2, 4, 8)
    state = layer.step(x, layer.init_state(2))[1]
    assert torch.equal(layer.step(x, tuple(state))[0], layer.step(x, state)[0])


@pytest.mark.parametrize("call", ["init_state", "step", "flush"])
def test_hybrid_is_offline_only(call):
    with pytest.raises(NotImplementedError, match="HybridAttention is offline only"):
        getattr(HybridAttention(2, 8), call)(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("edge", ["zero", "renormalize"])
@pytest.mark.parametrize("window", [(14, 0), (15, 2), (0, 0)])
def test_as_accurate_as_the_whole(dtype, edge, window):
    """No further from the float64 truth than twice eager's error on the whole, and a little."""
    layer = build(*window, n_head=4, n_feat=64, edge=edge, use_bias=True, dtype=dtype)
    x = random(3, 70, 64, dtype=dtype)
    eager = copy.deepcopy(layer)
    eager.implementation = "eager"
    plan = [(16, [16, 16, 16]), (16, [0, 7, 16]), (1, [1, 1, 1]), (37, [37, 13, 0])]
    counts = [sum(c[b] for _, c in plan) for b in range(3)]
    with torch.no_grad():
        out = streamed(layer, [x[b, :n] for b, n in enumerate(counts)], plan)
        for b, n in enumerate(counts):
            alone = x[b : b + 1, :n]
            exact = copy.deepcopy(layer).double()(alone.double())
            budget = 2 * error(eager(alone), exact) + ATOL[dtype]
            assert error(out[b][None, layer.right :], exact) <= budget


# What only a GPU shows


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("window", [(14, 0), (5, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graph(dtype, window, ragged):
    """A captured step, its state copied over itself, runs a stream to its end."""
    layer = build(*window, n_head=4, n_feat=64, use_bias=True, dtype=dtype)
    x = random(2, 48, 64, dtype=dtype)
    chunk, state = torch.zeros_like(x[:, :8]), layer.init_state(2)
    lengths = torch.full((2,), 8, device=DEVICE) if ragged else None

    def step():
        y, new = layer.step(chunk, state, lengths)
        for old, n in zip(state, new, strict=True):
            old.copy_(n)
        return y

    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step()
        for old, n in zip(state, layer.init_state(2), strict=True):
            old.copy_(n)
        twin = layer.init_state(2)
        for i in range(6):
            chunk.copy_(x[:, 8 * i : 8 * i + 8])
            if ragged:
                lengths.copy_(torch.tensor([8 - i, 3 + i]))
            graph.replay()
            expected, twin = layer.step(chunk, twin, lengths)
            assert close([y, *state], [expected, *twin], ATOL[dtype])


@pytest.mark.gpu
def test_the_host_never_waits():
    layer, x = build(use_bias=True, n_feat=16), random(2, 5, 16)
    lengths = torch.tensor([5, 2], device=DEVICE)
    for chosen in (None, lengths, lengths.cpu()):
        layer.flush(layer.step(x, layer.init_state(2), chosen)[1])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            state = layer.init_state(2)
            for _ in range(2):
                _, state = layer.step(x, state, chosen)
            layer.flush(state)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_launches():
    """One launch of the op, and few others: a step is made of launches."""
    layer = build(14, 0, n_head=8, n_feat=512, dtype=torch.bfloat16)
    x, state = random(1, 8, 512, dtype=torch.bfloat16), layer.init_state(1, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.step(x, state)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            layer.step(x, state)
            torch.cuda.synchronize()
    cuda = torch.profiler.DeviceType.CUDA
    names = [e.name for e in profile.events() if e.device_type == cuda]
    products = ("gemm", "gemv", "cutlass", "nvjet", "cublas", "xmma", "splitk", "memset")
    others = [name for name in names if not any(p in name.lower() for p in products)]
    assert len([name for name in others if "ldsa" in name]) == 1, names
    # Besides the op: ReLU, two buffers joined, the start moved on.
    assert len(others) <= 5, names
