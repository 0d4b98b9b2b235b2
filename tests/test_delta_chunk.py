"""The chunk kernels of the delta rule: their launchers against the float64 recurrence."""

import importlib

import pytest
import torch
from cases import DEVICE

import ldsa_nn  # noqa: F401  (imports the kernel package under its name)

forward = importlib.import_module("ldsa_nn._ldsa.delta_chunk")
backward = importlib.import_module("ldsa_nn._ldsa.delta_chunk_bwd")

NAMES = ("out", "final", "dq", "dk", "dv", "dg", "dbeta", "dinitial")
EXACT = dict.fromkeys(NAMES, 2e-5)


@pytest.fixture
def poisoned_memory():
    """Whatever torch allocates holds NaN until it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make(B, T, H, K, tiles, V, *, n=None, correlation=0.0, gate=1.0, beta=1.99, seed=0):
    """q, k, v, g, beta, initial state and the gradients of out and final state, in float32."""
    r = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=r)

    q, k = randn(B, T, H, K), randn(B, T, H, K)
    k = (1 - correlation) * k + correlation * randn(B, 1, H, K)
    q, k = (x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6) for x in (q, k))
    g = -gate * torch.rand(B, T, H, tiles, generator=r)
    write = beta * torch.sigmoid(2 * randn(B, T, H))
    n = B if n is None else n
    inputs = (q, k, randn(B, T, H, V), g, write, randn(n, H, K, V))
    grads = randn(B, T, H, V), randn(n, H, K, V)
    return [x.to(DEVICE) for x in inputs], [x.to(DEVICE) for x in grads]


def recurrence(q, k, v, g, beta, state, scale):
    """out [T, H, V] and the last state of one sequence, frame by frame."""
    out = []
    width = q.shape[-1] // g.shape[-1]
    for t in range(q.shape[0]):
        state = state * g[t].clamp(min=-20).exp().repeat_interleave(width, -1)[..., None]
        error = v[t] - (k[t, :, :, None] * state).sum(1)
        state = state + (beta[t, :, None] * k[t])[..., None] * error[:, None]
        out.append(scale * (q[t, :, :, None] * state).sum(1))
    return torch.stack(out) if out else v, state


def truth(inputs, grads, scale, bounds=None):
    """What `run` returns, in float64; 0 at frames of no sequence."""
    rows = inputs[0].shape[0]
    inputs = [x.detach().double().requires_grad_() for x in inputs]
    n = inputs[5].shape[0]
    bounds = [(0, inputs[0].shape[1])] * n if bounds is None else bounds
    out, final = torch.zeros_like(inputs[2]), []
    for i, (first, end) in enumerate(bounds):
        row = i if n == rows else 0
        o, state = recurrence(*(x[row, first:end] for x in inputs[:5]), inputs[5][i], scale)
        out = torch.cat([out[:row], _put(out[row], first, o)[None], out[row + 1 :]])
        final.append(state)
    final = torch.stack(final)
    loss = (out * grads[0].nan_to_num().double()).sum() + (final * grads[1].double()).sum()
    return [out.detach(), final.detach(), *torch.autograd.grad(loss, inputs)]


def _put(x, first, part):
    return torch.cat([x[:first], part, x[first + len(part) :]])


def run(inputs, grads, scale, bounds=None):
    bounds = None if bounds is None else torch.tensor(bounds, device=DEVICE)
    out, final, saved = forward.launch_delta_forward(*inputs, bounds, scale, True)
    return [
        out,
        final,
        *backward.launch_delta_backward(*grads, *inputs, bounds, scale, saved),
    ]


def assert_close(results, expected, tolerance):
    for name, x, y in zip(NAMES, results, expected, strict=True):
        assert x.isfinite().all(), name
        error = (x.double() - y).norm() / y.norm().clamp(min=1e-30)
        assert error <= tolerance[name], f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 1, 2, 32, 2, 24), {}),
        ((2, 7, 1, 16, 1, 16), {}),
        ((1, 63, 2, 32, 2, 24), {}),
        ((1, 64, 1, 64, 2, 40), {}),
        ((2, 65, 2, 32, 1, 33), {}),
        ((1, 200, 1, 48, 3, 16), {}),
        ((1, 70, 1, 96, 3, 20), {}),
        ((1, 70, 1, 80, 5, 17), {}),
        ((1, 66, 1, 12, 12, 16), {}),
        ((1, 66, 1, 160, 1, 16), {}),
        ((1, 130, 1, 256, 4, 32), {}),
        ((1, 66, 1, 128, 8, 16), {}),
        ((1, 130, 1, 64, 2, 32), dict(gate=0.0)),
        ((1, 130, 1, 64, 2, 32), dict(gate=0.0, correlation=0.7)),
        ((1, 130, 1, 64, 2, 32), dict(gate=0.1, correlation=0.95)),
        ((1, 130, 1, 64, 2, 32), dict(gate=0.0, correlation=1.0)),
    ],
)
def test_equals_recurrence(shape, options, poisoned_memory):
    inputs, grads = make(*shape, **options)
    assert_close(run(inputs, grads, 0.3), truth(inputs, grads, 0.3), EXACT)


def test_identical_keys_and_the_largest_beta():
    inputs, grads = make(1, 200, 1, 32, 1, 16, gate=0.0, correlation=1.0)
    inputs[4].fill_(1.99)
    # Sums of terms that alternate in sign and hardly decay: float32 keeps this many digits.
    tolerance = dict.fromkeys(NAMES, 5e-3)
    assert_close(run(inputs, grads, 1.0), truth(inputs, grads, 1.0), tolerance)


def test_strong_gates():
    inputs, grads = make(1, 200, 1, 64, 4, 16, gate=0.1)
    g = inputs[3]
    g[:, 40] = -1000.0
    g[:, 70, :, 1] = -20.0
    g[:, 100, :, 2] = float("-inf")
    g[:, 130] = -5.0
    results, expected = run(inputs, grads, 0.3), truth(inputs, grads, 0.3)
    assert_close(results, expected, EXACT)
    assert (results[5][g < -20] == 0).all()
    assert (results[5][:, 130] != 0).any()


@pytest.mark.parametrize("gate", [5.0, 20.0])
def test_every_gate_strong(gate):
    inputs, grads = make(1, 130, 1, 32, 2, 16, gate=gate)
    # dg is the small difference of large terms here.
    assert_close(run(inputs, grads, 0.3), truth(inputs, grads, 0.3), {**EXACT, "dg": 5e-4})


def outside(bounds, rows, frames):
    mask = torch.ones(rows, frames, dtype=torch.bool, device=DEVICE)
    for i, (first, end) in enumerate(bounds):
        mask[i if len(bounds) == rows else 0, first:end] = False
    return mask


@pytest.mark.parametrize(
    ("rows", "frames", "bounds"),
    [
        (4, 150, [(0, 150), (0, 0), (0, 65), (3, 131)]),
        (1, 300, [(0, 70), (70, 70), (75, 203), (203, 204), (210, 295)]),
        (1, 20, [(0, 3), (3, 7), (9, 20)]),
        (1, 70, [(2, 68)]),
    ],
)
def test_bounds(rows, frames, bounds, poisoned_memory):
    inputs, grads = make(rows, frames, 2 if frames == 70 else 1, 32, 2, 24, n=len(bounds))
    expected = truth(inputs, grads, 0.3, bounds)
    nothing = outside(bounds, rows, frames)
    for x in (*inputs[:5], grads[0]):
        x[nothing] = float("nan")
    results = run(inputs, grads, 0.3, bounds)
    assert_close(results, expected, EXACT)
    for name, x in zip(NAMES, results, strict=True):
        if name not in ("final", "dinitial"):
            assert (x[nothing] == 0).all(), name


@pytest.mark.parametrize("frames", [1, 3, 5])
def test_without_saving(frames, poisoned_memory):
    inputs, _ = make(3, frames, 2, 48, 3, 20)
    bounds = [(0, frames), (1, frames), (0, 0)]
    expected = truth(
        inputs, [torch.zeros_like(inputs[2]), torch.zeros_like(inputs[5])], 0.3, bounds
    )
    at = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    out, final, saved = forward.launch_delta_forward(*inputs, at, 0.3, False)
    assert saved == ()
    for x, y in zip((out, final), expected, strict=False):
        assert (x.double() - y).norm() <= 2e-6 * y.norm()


def test_saving_changes_no_bit():
    inputs, _ = make(1, 70, 1, 32, 2, 16)
    one = forward.launch_delta_forward(*inputs, None, 0.3, True)
    other = forward.launch_delta_forward(*inputs, None, 0.3, False)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_strides_change_no_bit():
    (q, k, v, g, beta, state), (grad, grad_state) = make(2, 20, 2, 32, 2, 24)
    expected = run([q, k, v, g, beta, state], [grad, grad_state], 0.3)

    def strided(x, *order):
        return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])

    inputs = [
        strided(q, 0, 2, 3, 1),
        torch.cat([k, k], 3)[..., :32],
        torch.stack([v, v], 4)[..., 0],
        strided(g, 3, 1, 0, 2),
        strided(beta, 2, 0, 1),
        strided(state, 0, 1, 3, 2),
    ]
    grads = [strided(grad, 2, 3, 0, 1), strided(grad_state, 3, 0, 1, 2)]
    results = run(inputs, grads, 0.3)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    assert all(x.is_contiguous() for x in results)


def test_no_states():
    inputs, grads = make(1, 70, 1, 32, 2, 16)
    zeros = torch.zeros_like(inputs[5])
    expected = run([*inputs[:5], zeros], [grads[0], zeros], 0.3)
    results = run([*inputs[:5], None], [grads[0], None], 0.3)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_segments_change_no_bit(monkeypatch):
    bounds = [(0, 70), (70, 135), (150, 390)]
    inputs, grads = make(1, 400, 1, 16, 1, 16, n=3)
    expected = run(inputs, grads, 0.3, bounds)
    monkeypatch.setattr(backward, "FULL_DEVICE", 1)
    results = run(inputs, grads, 0.3, bounds)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_repeats_bit_for_bit():
    inputs, grads = make(1, 70, 1, 32, 2, 16)
    one, other = run(inputs, grads, 0.3), run(inputs, grads, 0.3)
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_state_carries_on():
    inputs, _ = make(1, 150, 1, 32, 2, 16)
    whole = forward.launch_delta_forward(*inputs, None, 0.3, False)
    state, outs = inputs[5], []
    for first, end in ((0, 70), (70, 71), (71, 150)):
        part = [x[:, first:end] for x in inputs[:5]]
        out, state, _ = forward.launch_delta_forward(*part, state, None, 0.3, False)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), whole[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(state, whole[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_types(dtype):
    inputs, grads = make(1, 70, 1, 32, 2, 16)
    inputs = [x.to(dtype) if i in (0, 1, 2, 5) else x for i, x in enumerate(inputs)]
    grads = [grads[0].to(dtype), grads[1]]
    results = run(inputs, grads, 0.3)
    types = [dtype, torch.float32, dtype, dtype, dtype, torch.float32, torch.float32, dtype]
    assert [x.dtype for x in results] == types
    assert_close(results, truth(inputs, grads, 0.3), dict.fromkeys(NAMES, 1e-2))


@pytest.mark.parametrize("shape", [(0, 5, 1), (1, 0, 1), (1, 5, 0)])
def test_nothing_to_do(shape):
    inputs, grads = make(*shape, 16, 1, 16)
    out, final, *rest = run(inputs, grads, 0.3)
    assert out.shape == inputs[2].shape and all(
        x.shape == y.shape for x, y in zip(rest, inputs, strict=True)
    )
    assert torch.equal(final, inputs[5]) and torch.equal(rest[5], grads[1])


@pytest.mark.gpu
@pytest.mark.parametrize("frames", [1, 7, 50, 63, 64, 65, 200, 1000])
@pytest.mark.parametrize(
    "options",
    [
        dict(gate=0.05),
        dict(gate=5.0),
        dict(gate=0.0),
        dict(gate=0.0, correlation=0.7),
        dict(gate=0.05, correlation=0.95),
        dict(gate=0.0, correlation=1.0),
    ],
)
@pytest.mark.parametrize("widths", [(256, 4, 512), (64, 1, 128), (128, 16, 96)])
def test_error_budget_in_bfloat16(frames, options, widths):
    key_dim, tiles, value_dim = widths
    inputs, grads = make(2, frames, 2, key_dim, tiles, value_dim, **options)
    inputs = [x.bfloat16() if i < 3 else x for i, x in enumerate(inputs)]
    grads = [grads[0].bfloat16(), grads[1]]
    hard = 2 if options.get("correlation") else 1
    budget = dict.fromkeys(NAMES, 8e-3 * hard) | {"out": 5e-3 * hard, "dg": 2e-2, "dbeta": 2e-2}
    scale = key_dim**-0.5
    assert_close(run(inputs, grads, scale), truth(inputs, grads, scale), budget)
