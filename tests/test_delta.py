"""The delta rule: what it computes, in eager PyTorch and fused, on every kind of input."""

import functools

import pytest
import torch
import torch._inductor.config
from cases import DEVICE, Recorder, captured, close, error, no_waiting, random
from conftest import HAS_GPU
from delta_cases import (
    BUDGET,
    FULL,
    LARGE,
    NAMES,
    SMALL,
    DeltaCase,
    by_definition,
    make,
    relative,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.utils._pytree import tree_leaves, tree_map

import ldsa_nn
from ldsa_nn import tiled_delta_rule

delta = ldsa_nn._ldsa.delta
CASES = {case.name: case for case in SMALL + LARGE}
# Gates below it count as it in the kernels.
LEAST_GATE = {"eager": -torch.inf, "triton": -20.0}


@pytest.fixture(params=["eager", "triton"])
def implementation(request):
    return request.param


@pytest.fixture
def poisoned_memory():
    """Whatever torch allocates holds NaN until it is written."""
    # Without a refusal of what eager PyTorch cannot do in one order on a GPU.
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def near(results, expected, tolerance=2e-6):
    return all(relative(x, y) <= tolerance for x, y in zip(results, expected, strict=True))


def same_bits(results, expected):
    return all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


@functools.cache
def truth(case, least_gate):
    return by_definition(*make(case)[:2], case.bounds(), least_gate=least_gate)


def check(case, implementation, dtype=None, runs=1):
    dtype = dtype or case.dtype
    tensors, grads, options = make(case)
    if dtype != case.dtype:  # of the same numbers, so that they have the same truth
        tensors, grads = ([x.to(dtype) for x in part] for part in (tensors, grads))
    before = [x.clone() for x in (*tensors, *grads)]
    options["implementation"] = implementation
    results = run(tensors, grads, **options)
    # Averaged over few channels, the rounding of half precision shows more.
    narrow = 1.5 if implementation == "triton" and case.key_dim < 128 else 1
    budget = {name: narrow * bound for name, bound in BUDGET[dtype].items()}
    outside = case.outside()
    expected = truth(case, LEAST_GATE[implementation])
    likes = (tensors[2], None, *tensors)
    for name, x, y, like in zip(NAMES, results, expected, likes, strict=True):
        assert y.isfinite().all(), name
        assert relative(x, y) <= budget[name] * (1 if case.keys == "random" else 2), name
        if like is not None:
            assert (x.dtype, x.shape) == (like.dtype, like.shape), name
        if name not in ("state", "grad_initial"):
            assert not x[outside].any(), f"{name} outside the sequences"
    assert results[1].dtype == torch.promote_types(dtype, torch.float32)
    assert results[0].is_contiguous()
    for x, y in zip((*tensors, *grads), before, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num()), "an input was modified"
    for _ in range(runs - 1):
        assert same_bits(run(tensors, grads, **options), results)


# What is computed


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small_cases(implementation, case):
    if implementation == "eager" and case.dtype == torch.float32:
        check(case, "eager", torch.float64)
    check(case, implementation, runs=2 if case.name == "ragged" else 1)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", [case for case in LARGE if case.name != "long"], ids=str)
def test_eager_in_its_own_and_in_double_precision(case):
    if case.dtype == torch.float32:
        check(case, "eager", torch.float64)
    check(case, "eager")


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", LARGE + FULL, ids=str)
def test_large_cases(case):
    check(case, "triton", runs=3)


@pytest.mark.parametrize("frames", [7, 50, 64, 65, 200])
def test_without_decay_it_is_the_plain_delta_rule(frames):
    """Written down without any gate."""
    case = DeltaCase("plain", 1, frames, 1, 8, 2, 4, gate=0.0, keys="correlated")
    (q, k, v, g, beta, S), _, _ = make(case, torch.float64)
    out, state = tiled_delta_rule(
        q, k, v, g, beta, initial_state=S, scale=0.5, output_final_state=True
    )
    S = S[0, 0]
    for t in range(frames):
        key = k[0, t, 0]
        S = S + beta[0, t, 0] * torch.outer(key, v[0, t, 0] - key @ S)
        assert error(out[0, t, 0], 0.5 * q[0, t, 0] @ S) <= 1e-12
    assert error(state[0, 0], S) <= 1e-12


@pytest.mark.parametrize("gate", [0.0, -5.0, -20.0, -1000.0, -torch.inf])
def test_finite_for_every_gate(implementation, gate):
    case = DeltaCase("gate", 1, 70, 1, 8, 2, 8, gate=gate, keys="identical", beta=1.99)
    tensors, grads, _ = make(case)
    assert all(x.isfinite().all() for x in run(tensors, grads, implementation=implementation))


def test_scale_and_what_is_left_out(implementation):
    """Default scale K^-0.5, no initial state is one of zeros, no final state unless asked for."""
    (*tensors, initial), _, _ = make(DeltaCase("left_out", 1, 20, 1, 16, 4, 8))
    options = {"implementation": implementation}
    out, state = tiled_delta_rule(*tensors, **options)
    assert state is None
    explicit, state = tiled_delta_rule(
        *tensors, scale=0.25, initial_state=torch.zeros_like(initial),
        output_final_state=True, **options,
    )  # fmt: skip
    assert torch.equal(out, explicit) and state.shape == initial.shape
    assert close([tiled_delta_rule(*tensors, scale=1, **options)[0]], [4 * out.double()], 1e-6)


def test_gradients_where_only_some_results_are_used(implementation):
    tensors, (grad, grad_state), _ = make(DeltaCase("some", 1, 20, 1, 8, 2, 8))
    options = {"implementation": implementation}
    none, nothing = torch.zeros_like(grad), torch.zeros_like(grad_state)
    inputs = [x.clone().requires_grad_() for x in tensors]
    out, state = tiled_delta_rule(
        *inputs[:5], initial_state=inputs[5], output_final_state=True, **options
    )
    alone = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    assert close(alone, run(tensors, (grad, nothing), **options)[2:], 1e-6)
    alone = torch.autograd.grad(state, inputs[1:], grad_state)
    assert close(alone, run(tensors, (none, grad_state), **options)[3:], 1e-6)


def test_only_the_gradients_that_are_required(implementation):
    tensors, grads, _ = make(DeltaCase("required", 1, 20, 1, 8, 2, 8))
    expected = run(tensors, grads, implementation=implementation)[2:]
    for wanted in range(6):
        inputs = [x.clone().requires_grad_(i == wanted) for i, x in enumerate(tensors)]
        results = tiled_delta_rule(
            *inputs[:5], initial_state=inputs[5], output_final_state=True,
            implementation=implementation,
        )  # fmt: skip
        torch.autograd.backward(results, grads)
        assert [x.grad is not None for x in inputs] == [i == wanted for i in range(6)]
        assert torch.equal(inputs[wanted].grad, expected[wanted])


@pytest.mark.parametrize(
    "case",
    [
        DeltaCase("few", 2, 4, 1, 4, 2, 3, lengths=(4, 2)),
        DeltaCase("chunk", 1, 20, 1, 4, 2, 3),
        DeltaCase("chunks", 2, 66, 1, 2, 1, 2, lengths=(66, 30)),
        DeltaCase("packed", 1, 12, 1, 4, 4, 3, cu_seqlens=(0, 5, 5, 9)),
    ],
    ids=str,
)
def test_gradcheck(case):
    (*tensors, initial), _, options = make(case, torch.float64)
    outside = case.outside()
    tensors = [x.nan_to_num().requires_grad_() for x in tensors]
    assert outside.any() or not options
    # A gate of -1000 has no slope that a finite difference sees, and none here.
    tensors[3] = tensors[3].detach().clamp(min=-3.0).requires_grad_()

    def op(*tensors):
        return tiled_delta_rule(
            *tensors[:5], initial_state=tensors[5], output_final_state=True, **options
        )

    inputs = *tensors, initial.requires_grad_()
    assert torch.autograd.gradcheck(op, inputs, fast_mode=case.frames > 20)


def test_double_backward():
    """Of a few frames it is there; of chunks it is refused, not wrong."""
    for frames in (3, 20):
        tensors, _, _ = make(DeltaCase("twice", 1, frames, 1, 2, 1, 2, gate=-1.0), torch.float64)
        inputs = [x.requires_grad_() for x in tensors[:5]]

        def op(*tensors):
            return tiled_delta_rule(*tensors)[0]

        if frames == 3:
            assert torch.autograd.gradgradcheck(op, inputs)
            continue
        (grad,) = torch.autograd.grad(op(*inputs).sum(), inputs[0], create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            grad.sum().backward()


def test_inverse_of_correlated_keys():
    """Recursive doubling keeps its digits where a power series has none left."""
    for share in (0.0, 0.7, 1.0):
        k = random(64, 64, dtype=torch.float64)
        k = (1 - share) * k + share * k[:1]
        k = k / k.norm(dim=1, keepdim=True)
        lower = 1.99 * (k @ k.T).tril(-1)
        identity = torch.eye(64, dtype=torch.float64, device=DEVICE)
        exact = torch.linalg.inv(identity + lower)
        assert relative(delta._inverse(lower), exact) <= 1e-13
        assert relative(delta._inverse(lower.float()), exact) <= 2e-5


# Sequences


@pytest.mark.parametrize("lengths", [(70, 40, 5), (130, 64, 0)])
def test_padded_equals_alone(implementation, lengths):
    frames = max(lengths) + 3
    case = DeltaCase("padded", 3, frames, 1, 8, 2, 8, lengths=lengths)
    tensors, grads, options = make(case)
    options["implementation"] = implementation
    batch = run(tensors, grads, **options)
    for b, n in enumerate(lengths):
        alone = run(
            [x[b : b + 1, :n] for x in tensors[:5]] + [tensors[5][b : b + 1]],
            (grads[0][b : b + 1, :n], grads[1][b : b + 1]),
            implementation=implementation,
        )
        row = [x[b : b + 1] for x in batch]
        row = [
            x if name in ("state", "grad_initial") else x[:, :n]
            for name, x in zip(NAMES, row, strict=True)
        ]
        assert near(row, alone)
        if n == 0:  # nothing came: not a bit changes
            assert torch.equal(row[1], tensors[5][b : b + 1])
            assert torch.equal(row[7], grads[1][b : b + 1])


def test_packed_equals_alone(implementation):
    case = DeltaCase("packed", 1, 150, 1, 8, 2, 8, cu_seqlens=(2, 7, 7, 70, 71, 140))
    tensors, grads, options = make(case)
    options["implementation"] = implementation
    packed = run(tensors, grads, **options)
    for n, (_, first, end) in enumerate(case.bounds()):
        here = slice(first, end)
        alone = run(
            [x[:, here] for x in tensors[:5]] + [tensors[5][n : n + 1]],
            (grads[0][:, here], grads[1][n : n + 1]),
            implementation=implementation,
        )
        part = [
            x[n : n + 1] if name in ("state", "grad_initial") else x[:, here]
            for name, x in zip(NAMES, packed, strict=True)
        ]
        assert near(part, alone)


@settings(max_examples=30)
@given(
    pieces=st.lists(st.integers(0, 80), min_size=1, max_size=5),
    data=st.data(),
)
def test_any_split_equals_the_whole(pieces, data):
    """The state carries all that was, in pieces of any size, step by step ones among them."""
    total = sum(pieces)
    case = DeltaCase("split", 2, total, 1, 4, 2, 3)
    (*tensors, initial), _, _ = make(case, torch.float64)
    out, state = tiled_delta_rule(*tensors, initial_state=initial, output_final_state=True)
    parts, carried, at = [], initial, 0
    for n in pieces:
        part, carried = tiled_delta_rule(
            *(x[:, at : at + n] for x in tensors), initial_state=carried, output_final_state=True
        )
        parts.append(part)
        at += n
    assert near([torch.cat(parts, 1), carried], [out, state], 1e-11)


@settings(max_examples=25)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 80), st.integers(1, 2)),
    widths=st.sampled_from([(4, 1, 3), (6, 3, 2), (4, 4, 1), (1, 1, 5)]),
    packed=st.booleans(),
    data=st.data(),
)
def test_any_extents(shape, widths, packed, data):
    B, T, H = shape
    bounds = {}
    if packed:
        B = 1
        places = data.draw(st.lists(st.integers(0, T), min_size=1, max_size=5), "places")
        bounds["cu_seqlens"] = tuple(sorted(places))
    else:
        bounds["lengths"] = data.draw(
            st.lists(st.integers(-2, T + 2), min_size=B, max_size=B).map(tuple), "lengths"
        )
    case = DeltaCase("drawn", B, T, H, *widths, **bounds)
    tensors, grads, options = make(case, torch.float64)
    results = run(tensors, grads, **options)
    expected = by_definition(tensors, grads, case.bounds())
    assert near(results, expected, 1e-12)


@settings(max_examples=20 if HAS_GPU else 3)
@given(
    frames=st.integers(1, 70),
    widths=st.sampled_from([(8, 1, 3), (6, 3, 4), (16, 4, 8), (20, 2, 5)]),
    data=st.data(),
)
def test_any_extents_fused(frames, widths, data):
    bounds = st.lists(st.integers(-2, frames + 2), min_size=2, max_size=2).map(tuple)
    case = DeltaCase("drawn", 2, frames, 1, *widths, lengths=data.draw(bounds, "lengths"))
    check(case, "triton")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_of_any_kind_as_bounds(implementation, dtype):
    tensors, _, _ = make(DeltaCase("bounds", 2, 20, 1, 8, 2, 8))
    options = {"implementation": implementation, "output_final_state": True}
    expected = tiled_delta_rule(*tensors[:5], lengths=torch.tensor([20, 9]), **options)
    strided = torch.tensor([20, 0, 9, 0], dtype=dtype, device=DEVICE)[::2]
    assert same_bits(tiled_delta_rule(*tensors[:5], lengths=strided, **options), expected)
    one = [x[:1] for x in tensors[:5]]
    expected = tiled_delta_rule(*one, cu_seqlens=torch.tensor([0, 9, 20]), **options)
    places = torch.tensor([0, 9, 20], dtype=dtype, device=DEVICE)
    assert same_bits(tiled_delta_rule(*one, cu_seqlens=places, **options), expected)


def test_lengths_of_all_frames_are_no_lengths(implementation):
    tensors, grads, _ = make(DeltaCase("all", 2, 70, 1, 8, 2, 8))
    whole = run(tensors, grads, implementation=implementation)
    full = torch.tensor([70, 70], device=DEVICE)
    assert close(run(tensors, grads, implementation=implementation, lengths=full), whole, 1e-6)


@pytest.mark.parametrize("kind", ["sum", "frames"])
def test_any_strides_of_the_output_gradient(implementation, kind):
    tensors, (grad, grad_state), _ = make(DeltaCase("strides", 1, 20, 1, 8, 2, 8))
    one = torch.ones((), device=DEVICE).expand_as(grad)
    grad = one if kind == "sum" else grad[:, :1].expand_as(grad)
    expected = run(tensors, (grad.contiguous(), grad_state), implementation=implementation)
    results = run(tensors, (grad, grad_state), implementation=implementation)
    assert close(results, expected, 1e-6)


# What it costs


class Largest(Recorder):
    """The most elements of any tensor that an operator made."""

    def count(self):
        results = (x for *_, result in self.calls for x in tree_leaves(result))
        return max(x.untyped_storage().nbytes() for x in results if isinstance(x, torch.Tensor))


def test_memory_is_linear():
    """Beside what has T frames, no tensor grows with T, in either direction."""
    sizes = []
    for frames in (2048, 8192):
        tensors, (grad, grad_state), _ = make(DeltaCase("long", 1, frames, 1, 32, 4, 32, gate=-1.0))
        inputs = *tensors, None, 1.0
        with Largest() as forward:
            _, _, saved = delta.chunk_delta_forward(*inputs, True)
        with Largest() as backward:
            delta.chunk_delta_backward(grad, grad_state, *inputs, saved)
        assert sum(x.numel() for x in saved) <= sum(x.numel() for x in tensors[:5])
        sizes.append([max(r.count() - 4 * frames * 32, 0) for r in (forward, backward)])
    assert max(sizes[1]) <= max(4 * 17 * 32 * 64 * 32, *sizes[0])


# Which implementation runs


def operators(tensors, **options):
    with Recorder() as recorder:
        out, _ = tiled_delta_rule(*tensors[:5], **options)
        if out.requires_grad:
            out.sum().backward()
    return [name for name in recorder.names() if name.startswith("ldsa_nn::")]


def test_one_operator_each_way(implementation):
    tensors, _, _ = make(DeltaCase("operators", 1, 20, 1, 8, 2, 8))
    assert operators(tensors, implementation=implementation) == ["ldsa_nn::delta_rule"]
    tensors[0].requires_grad_()
    assert operators(tensors, implementation=implementation) == [
        "ldsa_nn::delta_rule", "ldsa_nn::delta_rule_backward",
    ]  # fmt: skip


def test_few_frames_step_by_step():
    tensors, _, _ = make(DeltaCase("few", 1, 4, 1, 8, 2, 8))
    assert operators(tensors, implementation="eager") == []


def test_auto_takes_eager_on_the_cpu_also_where_the_interpreter_is_on():
    tensors, _, _ = make(DeltaCase("auto", 1, 20, 1, 8, 2, 8))
    with Recorder() as recorder:
        tiled_delta_rule(*tensors[:5])
    (call,) = (args for func, args, *_ in recorder.calls if func.name() == "ldsa_nn::delta_rule")
    assert call[-1] == (DEVICE != "cpu")


@pytest.mark.parametrize(
    ("case", "dtype", "reason"),
    [
        (DeltaCase("", 1, 9, 1, 8, 2, 8), torch.float64, "q is float64"),
        (DeltaCase("", 1, 9, 1, 258, 2, 8), torch.float32, "q has key width 258"),
    ],
)
def test_where_the_kernels_cannot_run(case, dtype, reason):
    tensors, _, _ = make(case, dtype)
    with pytest.raises(RuntimeError, match=reason):
        tiled_delta_rule(*tensors[:5], implementation="triton")
    assert tiled_delta_rule(*tensors[:5])[0].isfinite().all()


def test_autocast_leaves_the_sums_alone():
    tensors, grads, _ = make(DeltaCase("autocast", 1, 20, 1, 8, 2, 8))
    for frames in (4, 20):
        some = [x[:, :frames].clone().requires_grad_() for x in tensors[:5]]
        expected, _ = tiled_delta_rule(*some)
        with torch.autocast(DEVICE, torch.bfloat16):
            out, _ = tiled_delta_rule(*some)
        assert torch.equal(out, expected)
        grad = grads[0][:, :frames]
        assert same_bits(*(torch.autograd.grad(x, some, grad) for x in (out, expected)))


def test_meta_tensors():
    tensors, _, _ = make(DeltaCase("meta", 2, 20, 1, 8, 2, 8))
    out, state = tiled_delta_rule(*(x.to("meta") for x in tensors[:5]), output_final_state=True)
    assert out.is_meta and out.shape == tensors[2].shape and state.shape == tensors[5].shape


# Arguments


def arguments(**changes):
    tensors, _, _ = make(DeltaCase("arguments", 2, 9, 1, 8, 2, 6))
    named = dict(zip(["q", "k", "v", "g", "beta", "initial_state"], tensors, strict=True))
    return {**named, **changes}


WRONG = {
    "no_tensor": ({"q": [1.0]}, TypeError, r"q must be a tensor \[B,T,H,K\], got list"),
    "integers": ({"v": torch.zeros(2, 9, 1, 6, dtype=torch.int64)}, TypeError, "v must have dtype"),
    "rank": ({"beta": torch.zeros(2, 9, 1, 1)}, ValueError, "beta must have 3 dimensions"),
    "rank_of_q": ({"q": torch.zeros(2, 9, 8)}, ValueError, "q must have 4 dimensions"),
    "k": ({"k": torch.zeros(2, 9, 1, 7)}, ValueError, r"k must have q's shape \(2, 9, 1, 8\), got"),
    "frames": ({"v": torch.zeros(2, 8, 1, 6)}, ValueError, "v must agree with q in B, T and H"),
    "heads": ({"g": torch.zeros(2, 9, 2, 2)}, ValueError, "g must agree with q in B, T and H"),
    "tiles": ({"g": torch.zeros(2, 9, 1, 3)}, ValueError, "divides K = 8, got 3"),
    "no_tiles": ({"g": torch.zeros(2, 9, 1, 0)}, ValueError, "divides K = 8, got 0"),
    "no_values": (
        {"v": torch.zeros(2, 9, 1, 0)},
        ValueError,
        r"v must have a last dimension >= 1, got \(2, 9, 1, 0\)",
    ),
    "state": ({"initial_state": torch.zeros(2, 1, 6, 8)}, ValueError, r"\[2, 1, 8, 6\], got"),
    "state_rank": (
        {"initial_state": torch.zeros(2, 8, 6)},
        ValueError,
        "initial_state must have 4",
    ),
    "device": ({"k": torch.zeros(2, 9, 1, 8, device="meta")}, ValueError, "k must be on"),
    "scale": ({"scale": "1"}, TypeError, "scale must be a number or None, got str"),
    "lengths": ({"lengths": torch.zeros(2)}, TypeError, "lengths must have an integer dtype"),
    "bool_lengths": ({"lengths": torch.ones(2) > 0}, TypeError, "lengths must have an integer"),
    "many_lengths": ({"lengths": torch.tensor([1, 2, 3])}, ValueError, r"\[B\] = \[2\], got \[3\]"),
    "both": (
        {"lengths": torch.tensor([9, 9]), "cu_seqlens": torch.tensor([0, 9])},
        ValueError,
        "give lengths or cu_seqlens, not both",
    ),
    "two_rows": ({"cu_seqlens": torch.tensor([0, 9])}, ValueError, "B = 1 row, got q with B = 2"),
    "implementation": ({"implementation": "cuda"}, ValueError, "implementation must be 'auto'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    changes, kind, message = WRONG[name]
    changes = {
        key: x.to(DEVICE) if isinstance(x, torch.Tensor) and not x.is_meta else x
        for key, x in changes.items()
    }
    with pytest.raises(kind, match=message):
        tiled_delta_rule(**arguments(**changes))


@pytest.mark.parametrize(
    ("places", "kind", "message"),
    [
        ([0, 5, 4], ValueError, r"must not decrease .* got \[0, 5, 4\]"),
        ([0, 10], ValueError, r"lie in \[0, T\] = \[0, 9\], got \[0, 10\]"),
        ([-1, 9], ValueError, "must not decrease"),
        ([[0, 9]], ValueError, r"shape \[N\+1\], got \[1, 2\]"),
        ([], TypeError, "integer dtype"),
        ([0.0, 9.0], TypeError, "integer dtype"),
    ],
)
def test_wrong_places(places, kind, message):
    tensors = {name: x[:1] for name, x in arguments().items()}
    with pytest.raises(kind, match=message):
        tiled_delta_rule(**tensors, cu_seqlens=torch.tensor(places))
    with pytest.raises(ValueError, match=r"initial_state must have shape .* \[2, 1, 8, 6\]"):
        tiled_delta_rule(**tensors, cu_seqlens=torch.tensor([0, 4, 9]))


# PyTorch's machinery


@functools.cache
def recorded(case, implementation):
    """The calls of the two operators that a run of the case makes."""
    tensors, grads, options = make(case)
    with Recorder() as recorder:
        run(tensors, grads, implementation=implementation, **options)
    calls = [call for call in recorder.calls if call[0].namespace == "ldsa_nn"]
    assert [call[0].name() for call in calls] == [
        "ldsa_nn::delta_rule", "ldsa_nn::delta_rule_backward",
    ]  # fmt: skip
    return calls


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("implementation", "case"),
    [
        *(("eager", case) for case in ("fifty", "ragged", "packed", "fp16")),
        ("triton", "one_chunk"),
        *(
            pytest.param("triton", case, marks=pytest.mark.gpu)
            for case in ("ragged", "packed", "strided", "bf16")
        ),
    ],
)
def test_opcheck(implementation, case, direction):
    """Schema, autograd, fake tensors, symbolic shapes."""
    func, args, kwargs, _ = recorded(CASES[case], implementation)[direction == "backward"]
    if implementation == "triton" and direction == "forward":
        # What a kernel does not need for its backward pass it leaves as it is: random numbers.
        args = (*args[:-2], False, True)

    def prepared(x):
        if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            return x
        # NaN is not equal to itself; double backward is refused, see above.
        return x.detach().nan_to_num().requires_grad_(direction == "forward")

    torch.library.opcheck(func, tree_map(prepared, args), kwargs)


@pytest.mark.parametrize("case", ["one_frame", "fifty", "ragged", "strided", "fp16"])
def test_fake_results_are_laid_out_as_real_ones(implementation, case):
    tensors, grads, options = make(CASES[case])
    options["implementation"] = implementation
    real = run(tensors, grads, **options)
    with FakeTensorMode() as mode:
        options = {
            name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for name, x in options.items()
        }
        fake = run(*([mode.from_tensor(x) for x in part] for part in (tensors, grads)), **options)
    for x, y in zip(fake, real, strict=True):
        assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("implementation", "case", "dynamic"),
    [
        ("eager", "one_frame", False),
        ("eager", "few_ragged", True),
        ("eager", "ragged", True),
        ("eager", "packed", True),
        ("eager", "bf16", False),
        ("triton", "one_frame", True),
        ("triton", "packed_few", True),
        ("triton", "fp16", False),
    ],
)
def test_compiled(implementation, case, dynamic):
    tensors, grads, options = make(CASES[case])
    options["implementation"] = implementation
    op = torch.compile(tiled_delta_rule, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected = run(tensors, grads, **options)
    assert near(run(tensors, grads, op, **options), expected, 1e-5)


@pytest.mark.usefixtures("fresh_dynamo")
@torch._dynamo.config.patch(error_on_recompile=True)
def test_compiled_once_for_any_number_of_frames(implementation):
    op = torch.compile(tiled_delta_rule, fullgraph=True, backend="aot_eager", dynamic=True)
    for frames in (20, 70, 1500) if implementation == "eager" else (7, 20, 70):
        tensors, _, _ = make(DeltaCase("any", 1, frames, 1, 8, 2, 8))
        inputs = [x.requires_grad_() for x in tensors[:5]]
        outs = [f(*inputs, implementation=implementation)[0] for f in (op, tiled_delta_rule)]
        assert torch.equal(*outs)
        assert same_bits(*(torch.autograd.grad(out.sum(), inputs) for out in outs))


# What an earlier form of the operator compiled to is found again under the same key.
@torch._inductor.config.patch(force_disable_caches=True)
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_by_inductor():
    tensors, grads, _ = make(DeltaCase("inductor", 2, 20, 1, 8, 2, 8))

    def function(*tensors):
        out, state = tiled_delta_rule(
            *tensors[:5], initial_state=tensors[5], output_final_state=True
        )
        return out.relu(), state

    def gradients(function):
        inputs = [x.clone().requires_grad_() for x in tensors]
        results = function(*inputs)
        return *results, *torch.autograd.grad(results, inputs, grads)

    compiled = torch.compile(function, fullgraph=True)
    assert close(gradients(compiled), [x.double() for x in gradients(function)], 1e-4)


class Op(torch.nn.Module):
    def forward(self, q, k, v, g, beta, lengths):
        return tiled_delta_rule(q, k, v, g, beta, lengths=lengths, output_final_state=True)


class Convolved(torch.nn.Module):
    """q, k and v as a convolution leaves them, frames innermost."""

    def forward(self, q, k, v, g, beta, lengths):
        q, k, v = (x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in (q, k, v))
        options = dict(output_final_state=True, implementation="triton")
        return tiled_delta_rule(q, k, v, g, beta, lengths=lengths, **options)


@pytest.mark.parametrize("op", [Op(), Convolved()], ids=lambda op: type(op).__name__)
def test_exported(op):
    """Any batch and any number of frames, as one operator."""
    batch, frames = Dim("batch"), Dim("frames")
    tensors, _, _ = make(DeltaCase("exported", 2, 20, 2, 8, 2, 8))
    shapes = ({0: batch, 1: frames},) * 5 + ({0: batch},)
    lengths = torch.tensor([20, 9], device=DEVICE)
    program = torch.export.export(op, (*tensors[:5], lengths), dynamic_shapes=shapes)
    assert "ldsa_nn.delta_rule.default" in {str(node.target) for node in program.graph.nodes}
    for B, T in ((1, 9), (3, 4), (2, 130)):
        tensors, _, _ = make(DeltaCase("", B, T, 2, 8, 2, 8))
        lengths = torch.arange(B, device=DEVICE) + T // 2
        results = program.module()(*tensors[:5], lengths)
        assert close(results, op(*tensors[:5], lengths), 1e-6)


# What only a GPU shows


STEP = DeltaCase("step", 2, 1, 2, 256, 4, 512, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [None, "lengths", "cu_seqlens"])
@pytest.mark.parametrize("frames", [1, 4, 5, 130])
def test_cuda_graph_of_a_step(frames, bounds):
    """Its state copied over itself, it runs streams to their end, to the last bit."""
    values = {
        None: [None] * 4,
        "lengths": [(frames, frames), (frames - 1, frames), (0, 2), (1, 0)],
        "cu_seqlens": [(0, 1, frames), (0, frames - 1, frames), (1, 1, 1), (0, 0, frames)],
    }[bounds]
    case = STEP._replace(frames=4 * frames)
    if bounds == "cu_seqlens":
        case = case._replace(batch=1, cu_seqlens=(0, 0, 4 * frames))
    (*tensors, initial), _, _ = make(case)
    chunk = [torch.zeros_like(x[:, :frames]) for x in tensors]
    options = {bounds: torch.tensor(values[0], device=DEVICE)} if bounds else {}
    state = initial.clone()

    def step(state):
        with torch.no_grad():
            return tiled_delta_rule(*chunk, initial_state=state, output_final_state=True, **options)

    def function():
        out, new = step(state)
        state.copy_(new)
        return out

    graph, out = captured(function)
    state.copy_(initial)
    twin = initial
    for i, value in enumerate(values):
        for x, whole in zip(chunk, tensors, strict=True):
            x.copy_(whole[:, i * frames : (i + 1) * frames])
        if bounds:
            options[bounds].copy_(torch.tensor(value))
        graph.replay()
        expected, twin = step(twin)
        assert torch.equal(out, expected) and torch.equal(state, twin)
    assert not torch.equal(state, initial)


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [None, "lengths", "cu_seqlens"])
def test_cuda_graph_of_both_directions(bounds):
    case, values = STEP._replace(frames=150), [None] * 2
    if bounds == "lengths":
        values = [(150, 70), (3, 150)]
    if bounds == "cu_seqlens":
        values = [(0, 70, 150), (5, 5, 149)]
        case = case._replace(batch=1, cu_seqlens=values[0])
    tensors, grads, _ = make(case)
    options = {bounds: torch.tensor(values[0], device=DEVICE)} if bounds else {}
    graph, results = captured(lambda: run(tensors, grads, **options))
    for i, value in enumerate(values):
        for j, x in enumerate((*tensors[:3], *grads)):
            x.copy_(random(*x.shape, seed=10 * i + j) / x.shape[-1] ** 0.5)
        if bounds:
            options[bounds].copy_(torch.tensor(value))
        graph.replay()
        assert same_bits(results, run(tensors, grads, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("on", ["cpu", DEVICE])
@pytest.mark.parametrize("bounds", [None, "lengths", "cu_seqlens"])
@pytest.mark.parametrize("frames", [1, 20, 150])
def test_the_host_never_waits(implementation, frames, bounds, on):
    case, options = STEP._replace(frames=frames), {"implementation": implementation}
    if bounds == "lengths":
        options["lengths"] = torch.tensor([frames, 1], device=on)
    if bounds == "cu_seqlens":
        case = case._replace(batch=1, cu_seqlens=(0, 1, frames))
        options["cu_seqlens"] = torch.tensor([0, 1, frames], device=on)
    tensors, grads, _ = make(case)

    def both():
        with torch.no_grad():
            tiled_delta_rule(*tensors[:5], initial_state=tensors[5], **options)
        run(tensors, grads, **options)

    both()
    with no_waiting():
        both()


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", ["one_frame", "ragged", "packed", "bf16"])
def test_compiled_on_a_gpu(case, dynamic):
    tensors, grads, options = make(CASES[case])
    op = torch.compile(tiled_delta_rule, fullgraph=True, dynamic=dynamic)
    assert near(run(tensors, grads, op, **options), run(tensors, grads, **options), 1e-5)


def launched(function):
    """Names of what ran on the GPU."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    cuda = torch.profiler.DeviceType.CUDA
    return [e.name for e in profile.events() if e.device_type == cuda]


@pytest.mark.gpu
@pytest.mark.parametrize(("frames", "count"), [(1, 1), (200, 2)])
def test_launches(frames, count):
    """A step is one launch; more frames are two, and three for each segment on the way back."""
    (*tensors, initial), _, _ = make(STEP._replace(frames=frames))
    names = launched(lambda: tiled_delta_rule(*tensors, initial_state=initial))
    assert len(names) == count and all("delta" in name for name in names), names
    inputs = [x.requires_grad_() for x in tensors]
    out, _ = tiled_delta_rule(*inputs, initial_state=initial)
    names = launched(lambda: torch.autograd.grad(out, inputs, out.detach(), retain_graph=True))
    assert len([name for name in names if "delta" in name]) == 3, names
    # The gradient of the state starts from zeros.
    assert len(names) <= 4, names


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("safe_gate", [False, True])
def test_equals_kimi_delta_attention(safe_gate, packed, monkeypatch):
    """Its decay is one number a channel: ours, repeated over a tile."""
    kda = pytest.importorskip("fla.ops.kda")
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    # Any of its configurations is right, and to time all takes minutes.
    monkeypatch.setattr(autotuner, "prune_configs", lambda self, _: self.configs[:1])
    case = DeltaCase("kda", 1, 200, 2, 128, 2, 256, torch.bfloat16)
    case = case._replace(cu_seqlens=(0, 70, 200)) if packed else case._replace(batch=2)
    tensors, grads, options = make(case)
    tensors[3] = tensors[3].clamp(min=-5.0)

    def op(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None):
        g = g.repeat_interleave(case.key_dim // case.tiles, 3)
        return kda.chunk_kda(
            q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens,
            output_final_state=output_final_state, safe_gate=safe_gate,
        )  # fmt: skip

    results, theirs = (run(tensors, grads, f, **options) for f in (tiled_delta_rule, op))
    exact = by_definition(tensors, grads, case.bounds())
    for name, x, y, truth in zip(NAMES, results, theirs, exact, strict=True):
        budget = BUDGET[case.dtype][name]
        assert relative(x, truth) <= budget, name
        assert relative(x, y) <= 3 * budget, name


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """The states before all chunks are more than 2^31 numbers; the last frames are right."""
    heads, key_dim, value_dim, tail = 8, 256, 512, 4 * 64
    frames = 64 * (2**31 // (heads * key_dim * value_dim) + 1) + tail

    def of(*shape):
        return torch.randn(1, frames, heads, *shape, dtype=torch.bfloat16, device=DEVICE)

    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(of(key_dim), dim=3) for _ in range(2))
    g, beta = -0.1 * of(4).float().abs(), of().float().sigmoid()
    g[:, -tail] = -1000.0
    tensors, grad = (q, k, of(value_dim), g, beta), of(value_dim)
    inputs = [x.requires_grad_() for x in tensors]
    out, _ = tiled_delta_rule(*inputs)
    grads = torch.autograd.grad(out, inputs, grad)
    alone = [x.detach()[:, -tail:].requires_grad_() for x in tensors]
    expected, _ = tiled_delta_rule(*alone)
    wanted = torch.autograd.grad(expected, alone, grad[:, -tail:])
    # exp(-20) of the past is left, which tips the rounding of a few numbers.
    assert near([x[:, -tail:] for x in (out, *grads)], (expected, *wanted), 1e-4)


# Odd mixes


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_one_tensor_in_float64(name):
    """All of the sums are in float64 then, with gradients in each tensor's dtype."""
    (*tensors, _), _, _ = make(DeltaCase("mixed", 1, 20, 1, 8, 2, 4))
    place = ["q", "k", "v", "g", "beta"].index(name)
    tensors[place] = tensors[place].double()
    inputs = [x.detach().requires_grad_() for x in tensors]
    grads = torch.autograd.grad(tiled_delta_rule(*inputs, implementation="eager")[0].sum(), inputs)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    wanted = torch.autograd.grad(tiled_delta_rule(*wide, implementation="eager")[0].sum(), wide)
    assert [x.dtype for x in grads] == [x.dtype for x in tensors]
    for x, y in zip(grads, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "triton"])
def test_forward_mode_is_refused(implementation):
    (*tensors, _), _, _ = make(DeltaCase("forward", 1, 20, 1, 16, 2, 16))

    def function(v):
        q, k, _, g, beta = tensors
        return tiled_delta_rule(q, k, v, g, beta, implementation=implementation)[0]

    with pytest.raises(RuntimeError, match=r"^tiled_delta_rule: forward-mode"):
        torch.func.jvp(function, (tensors[2],), (tensors[2],))


def test_padded_width_is_named():
    (*tensors, _), _, _ = make(DeltaCase("wide", 1, 20, 1, 250, 5, 4))
    with pytest.raises(RuntimeError, match=r"q has key width 250, 320 with its 5 tiles padded"):
        tiled_delta_rule(*tensors, implementation="triton")
