"""The layers: parity with the reference, masks and padding, and life among PyTorch's tools."""

import copy
import io
import json
import math
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import DEVICE, Recorder, close, error, random
from safetensors import safe_open
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from ldsa_nn import HybridAttention, LocalDenseSynthesizerAttention, ldsa_weights

GOLDEN = Path(__file__).with_name("reference_golden.safetensors")
LDSA = LocalDenseSynthesizerAttention


@pytest.fixture(params=["eager", "triton"])
def implementation(request):
    return request.param


KINDS = {
    "linear": (LDSA, {}),
    "linear_bias": (LDSA, {"use_bias": True, "edge": "renormalize"}),
    "grouped": (LDSA, {"use_bias": True, "grouped_w2": True}),
    "hybrid": (HybridAttention, {}),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def build(kind="linear", n_head=2, n_feat=8, left=3, right=2, seed=0, **options):
    cls, defaults = KINDS[kind]
    torch.manual_seed(seed)
    layer = cls(n_head, n_feat, left=left, right=right, **{**defaults, **options})
    return layer.to(DEVICE)


def gradients(layer, x, grad, **options):
    """[out, gradient of x, gradients of the parameters]."""
    x = x.detach().requires_grad_()
    out = layer(x, **options)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], grad)]


LENGTHS = (20, 13, 0, 1)


def ragged(garbage=math.nan, n_feat=8):
    """x [4,20,D] with garbage beyond LENGTHS, the lengths, and bool [4,20], True inside."""
    x, lengths = random(4, 20, n_feat), torch.tensor(LENGTHS, device=DEVICE)
    keep = torch.arange(20, device=DEVICE) < lengths[:, None]
    return torch.where(keep[:, :, None], x, garbage), lengths, keep


# The reference


def golden():
    """{case: what made it} and the tensors of one case."""
    with safe_open(GOLDEN, "pt") as file:
        return {name: json.loads(text) for name, text in sorted(file.metadata().items())}


def tensors(name):
    with safe_open(GOLDEN, "pt") as file:
        return {
            key.removeprefix(f"{name}/"): file.get_tensor(key).to(DEVICE)
            for key in file.keys()  # noqa: SIM118
            if key.startswith(f"{name}/")
        }


def reference_layer(n_head, n_feat, context_size, use_bias, reference_class, implementation, **_):
    options = {"implementation": implementation}
    if reference_class == "HybirdAttention":
        return HybridAttention(n_head, n_feat, 0.0, context_size, honor_mask=False, **options)
    options["grouped_w2"] = reference_class == "MHLocalDenseSynthesizerAttention"
    if reference_class == "LocalDenseSynthesizerAttention2":
        options["edge"] = "renormalize"
    return LDSA(n_head, n_feat, 0.0, context_size, use_bias, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, "fused"], ids=str)
@pytest.mark.parametrize("name", golden())
def test_parity_with_the_reference(name, dtype):
    """Outputs and all gradients; the state dict loads strictly."""
    implementation = "triton" if dtype == "fused" else "eager"
    dtype = torch.float32 if dtype == "fused" else dtype
    case = tensors(name)
    layer = reference_layer(**golden()[name], implementation=implementation).to(DEVICE, dtype)
    layer.load_state_dict(
        {key[6:]: x for key, x in case.items() if key.startswith("param/")}, strict=True
    )
    x = case["x"].to(dtype).requires_grad_()
    value = case["value"].to(dtype).requires_grad_() if "value" in case else None
    y = layer(x, x, x if value is None else value, case.get("mask"))
    y.backward(case["grad_y"].to(dtype))

    computed = {"y": y, "grad_x": x.grad}
    if value is not None:
        computed["grad_value"] = value.grad
    computed |= {f"grad/{key}": p.grad for key, p in layer.named_parameters()}
    given = {"x", "value", "grad_y", "mask"}
    assert set(computed) == {k for k in case if k not in given and not k.startswith("param/")}
    # On a GPU, float32 products of scaled_dot_product_attention are sums of three tf32 ones.
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6 if DEVICE == "cpu" else 1e-5
    for key, result in computed.items():
        assert error(result, case[key]) <= tolerance * max(1, case[key].abs().max().item()), key


def test_a_state_dict_of_another_kind_is_refused():
    state = build("linear").state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        build("linear", left=2).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"w1.bias"):
        build("linear_bias").load_state_dict(state)


def test_the_arguments_in_the_reference_order():
    layer = LDSA(4, 16, 0.1, 7, True)
    assert (layer.n_head, layer.n_feat, layer.left, layer.right, layer.window) == (4, 16, 3, 3, 7)
    assert layer.w1.bias is not None
    layer = LDSA(4, 16)
    assert (layer.left, layer.right, layer.window) == (7, 7, 15)
    assert layer.w1.bias is None
    hybrid = HybridAttention(4, 16, 0.1, 7)
    assert (hybrid.ldsa_att.left, hybrid.ldsa_att.window) == (3, 7)


def test_uneven_windows():
    """Slot 0 of w2's rows h·W + k is the leftmost frame."""
    layer = build(n_head=2, n_feat=4, left=2, right=1)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.w1.weight[0, 0] = 1.0
        layer.w2.weight[0, 0] = 50.0  # head 0 takes slot 0, head 1 takes slot 3
        layer.w2.weight[4 + 3, 0] = 50.0
        layer.w3.weight.copy_(torch.eye(4))
        layer.w_out.weight.copy_(torch.eye(4))
    x = random(1, 6, 4)
    x[..., 0] = 1.0
    y = layer(x)
    padded = F.pad(x, (0, 0, 2, 1))
    assert error(y[..., :2], padded[:, :6, :2]) <= 1e-6
    assert error(y[..., 2:], padded[:, 3:, 2:]) <= 1e-6


def test_key_is_unused_and_value_defaults_to_query(kind):
    layer, x = build(kind), random(2, 9, 8)
    expected = layer(x)
    assert torch.equal(layer(x, torch.full_like(x, math.nan), x), expected)
    assert torch.equal(layer(x, None, x), expected)
    assert not torch.allclose(layer(x, x, 2 * x), expected)


def test_grouped_weights_are_those_of_a_grouped_convolution():
    layer = build("grouped", n_head=3, n_feat=12, use_bias=False)
    assert set(layer.state_dict()) == {
        "w1.weight", "w2.weight", "w2.bias", "w3.weight", "w_out.weight",
    }  # fmt: skip
    x = random(2, 9, 12)
    with Recorder() as recorder:
        out, weights = layer(x, need_weights=True)
    assert not [name for name in recorder.names() if "conv" in name]
    logits = layer.w2(F.relu(layer.w1(x)).transpose(1, 2)).view(2, 3, 6, 9)
    assert error(weights, logits.softmax(2).transpose(2, 3)) <= 1e-6
    assert out.shape == x.shape


# Masks and lengths


def test_every_form_of_mask(kind, implementation):
    layer = build(kind, implementation=implementation)
    x, lengths, keep = ragged()
    expected = layer(x, lengths=lengths)
    assert not expected[~keep].any()
    square = keep[:, None] & keep[:, :, None]
    padding = ~keep  # True = padding, as PyTorch's key_padding_mask
    masks = {
        "bool [B,T]": keep,
        "not of a padding mask": ~padding,
        "int64 [B,T]": keep.long(),
        "bool [B,1,T]": keep[:, None],
        "uint8 [B,1,T]": keep[:, None].byte(),
        "int32 [B,T,T]": square.int(),
        "bool [B,T,T]": square,
        "keys alone [B,T,T]": keep[:, None].expand(4, 20, 20),
        "comparison with an additive mask": torch.where(keep, 0.0, -math.inf) == 0,
    }
    for name, mask in masks.items():
        assert close([layer(x, mask=mask)], [expected], 5e-6), name
    assert close([layer(x, None, None, keep)], [expected], 5e-6)
    if DEVICE != "cpu":
        assert close(
            [layer(x, mask=keep.cpu()), layer(x, lengths=lengths.cpu())], [expected] * 2, 0
        )


def test_only_the_diagonal_of_a_square_mask_counts():
    layer, (x, lengths, keep) = build(), ragged()
    assert torch.equal(layer(x, mask=torch.diag_embed(keep)), layer(x, lengths=lengths))
    causal = torch.ones(4, 20, 20, dtype=torch.bool, device=DEVICE).tril()
    x = random(4, 20, 8)
    assert torch.equal(layer(x, mask=causal), layer(x))


def test_padded_equals_alone(kind, implementation):
    """Padding behind, in front and on both sides; NaN there; outputs exactly 0, with a bias too."""
    layer = build(kind, implementation=implementation)
    for n, pads in ((13, (0, 7)), (13, (7, 0)), (5, (6, 9)), (1, (0, 19)), (20, (0, 0))):
        x = random(1, n, 8, seed=n)
        padded = F.pad(x, (0, 0, *pads), value=math.nan)
        keep = F.pad(torch.ones(1, n, dtype=torch.bool, device=DEVICE), pads)
        mates = torch.cat([random(1, 20, 8, seed=99), padded])
        mask = torch.cat([torch.ones_like(keep), keep])
        y = layer(mates, mask=mask)
        assert error(y[1:, pads[0] : pads[0] + n], layer(x)) <= 5e-6
        assert not y[~mask].any()


def test_gradients_of_a_padded_batch_are_the_sum_of_those_alone(kind, implementation):
    layer = build(kind, implementation=implementation)
    x, lengths, keep = ragged(garbage=1e3)
    grad = random(4, 20, 8, seed=1)
    out, grad_x, *grads = gradients(layer, x, grad, lengths=lengths)
    assert not out[~keep].any() and not grad_x[~keep].any()
    expected = [torch.zeros_like(p) for p in layer.parameters()]
    for b, n in enumerate(LENGTHS):
        if n == 0:
            continue
        _, alone, *rest = gradients(layer, x[b : b + 1, :n], grad[b : b + 1, :n])
        assert error(grad_x[b : b + 1, :n], alone) <= 1e-5
        expected = [a + b for a, b in zip(expected, rest, strict=True)]
    assert close(grads, expected, 5e-5)


@pytest.mark.parametrize("shape", ["[B,T]", "[B,T,T]"])
def test_masks_with_holes(kind, shape):
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 4] = False
    if shape == "[B,T,T]":
        mask = mask[:, None] & mask[:, :, None]
    layer, x = build(kind), random(2, 9, 8)
    with pytest.raises(ValueError, match=r"mask.*one run.*sequence 1"):
        layer(x, mask=mask)


MASK_ERRORS = [
    (torch.zeros(2, 9), TypeError, "mask.*bool or integer.*float32"),
    (torch.ones(2, 9, dtype=torch.bfloat16), TypeError, "mask.*bool or integer.*bfloat16"),
    ([[1] * 9] * 2, TypeError, "mask.*tensor.*list"),
    (torch.ones(2, 8, dtype=torch.bool), ValueError, r"mask.*\[B,T\].*B=2.*T=9.*\[2, 8\]"),
    (torch.ones(9, dtype=torch.bool), ValueError, r"mask.*\[B,T\].*\[9\]"),
    (torch.ones(1, 9, dtype=torch.bool), ValueError, r"mask.*\[B,T\].*\[1, 9\]"),
    (torch.ones(2, 9, 1, dtype=torch.bool), ValueError, r"mask.*\[B,T,T\].*\[2, 9, 1\]"),
    (torch.ones(2, 1, 9, 9, dtype=torch.bool), ValueError, r"mask.*\[B,T,T\].*\[2, 1, 9, 9\]"),
]


@pytest.mark.parametrize(("mask", "error", "message"), MASK_ERRORS)
def test_masks_refused(kind, mask, error, message):
    layer, x = build(kind), random(2, 9, 8)
    mask = mask.to(DEVICE) if isinstance(mask, torch.Tensor) else mask
    with pytest.raises(error, match=message):
        layer(x, mask=mask)


def test_lengths_refused(kind):
    layer, x = build(kind), random(2, 9, 8)
    keep = torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match=r"lengths.*mask.*not both"):
        layer(x, mask=keep, lengths=torch.tensor([9, 9]))
    with pytest.raises(TypeError, match=r"lengths.*integer.*float32"):
        layer(x, lengths=torch.tensor([9.0, 9.0]))
    with pytest.raises(TypeError, match=r"lengths.*integer.*bool"):
        layer(x, lengths=keep[:, 0])
    with pytest.raises(TypeError, match=r"lengths.*tensor.*list"):
        layer(x, lengths=[9, 9])
    with pytest.raises(ValueError, match=r"lengths.*\[B\].*2.*\[3\]"):
        layer(x, lengths=torch.tensor([9, 9, 9]))


def test_without_honor_mask_a_mask_changes_nothing():
    layer = build("linear_bias", honor_mask=False)
    x = random(2, 9, 8)
    mask = torch.zeros(2, 9, dtype=torch.bool, device=DEVICE)
    mask[1, ::2] = True  # holes, and a sequence without a frame
    expected = layer(x)
    assert torch.equal(layer(x, mask=mask), expected)
    lengths = torch.tensor([9, 4], device=DEVICE)
    assert not layer(x, lengths=lengths)[1, 4:].any()


def test_inputs_refused(kind):
    layer, x = build(kind), random(2, 9, 8)
    for query, shape in ((x[0], "9, 8"), (x[..., :7], "2, 9, 7"), (x[None], "1, 2, 9, 8")):
        with pytest.raises(ValueError, match=rf"query.*\[B,T,D\].*D=8.*\[{shape}\]"):
            layer(query)
    for value, shape in ((x[:1], "1, 9, 8"), (x[:, :8], "2, 8, 8")):
        with pytest.raises(ValueError, match=rf"value.*query.*\[2, 9, 8\].*\[{shape}\]"):
            layer(x, value=value)
    with pytest.raises(ValueError, match=r"value.*D=8.*\[2, 9, 7\]"):
        layer(x, value=x[..., :7])


@pytest.mark.parametrize(("batch", "frames"), [(2, 0), (0, 9), (0, 0), (2, 1)])
def test_empty_inputs(kind, implementation, batch, frames):
    layer = build(kind, implementation=implementation)
    x = random(batch, frames, 8)
    keep = torch.ones(batch, frames, dtype=torch.bool, device=DEVICE)
    lengths = torch.full((batch,), frames, device=DEVICE)
    for options in ({}, {"mask": keep}, {"lengths": lengths}):
        results = gradients(layer, x, torch.ones_like(x), **options)
        assert results[0].shape == x.shape
        assert all(r.isfinite().all() for r in results)


# Weights


def test_need_weights(implementation):
    """[B,H,T,W], those of the softmax before dropout; the output is the same without them."""
    layer = build(implementation=implementation, dropout_rate=0.5).eval()
    x, lengths, keep = ragged()
    out, weights = layer(x, lengths=lengths, need_weights=True)
    assert torch.equal(out, layer(x, lengths=lengths))
    assert weights.shape == (4, 2, 20, 6)
    logits = layer.w2(F.relu(layer.w1(x))).view(4, 20, 2, 6).permute(0, 2, 3, 1)
    expected = ldsa_weights(logits, 3, 2, lengths=lengths).transpose(2, 3)
    assert error(weights, expected) <= 1e-6
    total = weights.sum(3).transpose(1, 2)
    assert error(total, keep[:, :, None].expand_as(total)) <= 1e-6
    _, in_training = layer.train()(x, lengths=lengths, need_weights=True)
    assert torch.equal(in_training, weights)
    _, masked = layer.eval()(x, mask=keep, need_weights=True)
    assert torch.equal(masked, weights)


# The hybrid


def test_hybrid_with_a_causal_mask():
    """dot_att takes the whole mask, ldsa_att its diagonal."""
    layer, x = build("hybrid"), random(2, 9, 8)
    causal = torch.ones(2, 9, 9, dtype=torch.bool, device=DEVICE).tril()
    y = layer(x, mask=causal)
    att = layer.dot_att
    hidden = layer.ldsa_att(x)
    q, k, v = (
        linear(hidden).view(2, 9, 2, 4).transpose(1, 2)
        for linear in (att.linear_q, att.linear_k, att.linear_v)
    )
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = att.linear_out(expected.transpose(1, 2).reshape(2, 9, 8))
    assert error(y, expected) <= 5e-6


def test_hybrid_rows_without_keys(implementation):
    """A frame inside that may see no key gets the output bias alone, never NaN."""
    layer = build("hybrid", implementation=implementation)
    x = random(1, 5, 8)
    mask = torch.eye(5, dtype=torch.bool, device=DEVICE)[None].clone()
    mask[0, 3] = False  # nor its own: frame 3 is outside
    mask[0, 4] = False
    results = gradients(layer, x, torch.ones_like(x), mask=mask)
    assert all(r.isfinite().all() for r in results)
    assert not results[0][0, 3:].any()
    reference = build("hybrid", implementation=implementation, honor_mask=False)
    results = gradients(reference, x, torch.ones_like(x), mask=mask)
    assert all(r.isfinite().all() for r in results)
    assert torch.equal(results[0][0, 3:], reference.dot_att.linear_out.bias.expand(2, 8))


def test_hybrid_without_honor_mask_zeroes_nothing():
    layer = build("hybrid", honor_mask=False)
    x, _, keep = ragged(garbage=0.5)
    y = layer(x, mask=keep)
    hidden = layer.ldsa_att(x)
    assert torch.equal(y, layer.dot_att(hidden, keep[:, None]))
    assert y[~keep].any()


# Dropout


def test_dropout_is_of_training_alone(kind, implementation):
    layer = build(kind, dropout_rate=0.5, implementation=implementation)
    x = random(2, 9, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    assert torch.equal(layer(x), build(kind, implementation=implementation)(x))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(kind, implementation, use_reentrant):
    layer = build(kind, dropout_rate=0.3, implementation=implementation)
    x, lengths, _ = ragged(garbage=0.0)

    def grads(function):
        torch.manual_seed(7)
        inputs = x.clone().requires_grad_()
        layer.zero_grad()
        y = function(inputs)
        y.square().sum().backward()
        return [y, inputs.grad, *(p.grad for p in layer.parameters())]

    def forward(x):
        return layer(x, lengths=lengths)

    expected = grads(forward)
    assert close(grads(lambda x: checkpoint(forward, x, use_reentrant=use_reentrant)), expected, 0)


# Life among PyTorch's tools


def without_kinks(kind, **options):
    """A layer whose ReLU passes everything of a positive input: rounding flips no sign there."""
    layer = build(kind, **options)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if "w1." in name:
                p.abs_()
    return layer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(kind, implementation, dtype):
    layer = without_kinks(kind, implementation=implementation).to(dtype)
    x, grad = random(2, 9, 8, dtype=dtype).abs(), random(2, 9, 8, dtype=dtype, seed=1)
    lengths = torch.tensor([9, 6], device=DEVICE)
    results = gradients(layer, x, grad, lengths=lengths)
    assert all(r.dtype == dtype for r in results)
    layer = without_kinks(kind, implementation="eager").to(dtype).double()
    expected = gradients(layer, x.double(), grad.double(), lengths=lengths)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    for r, e in zip(results, expected, strict=True):
        assert error(r, e) <= tolerance * max(1.0, e.abs().max().item())


def test_half_is_to_float16(kind):
    layer, x = build(kind).half(), random(2, 9, 8, dtype=torch.float16)
    assert torch.equal(layer(x), build(kind).to(torch.float16)(x))


def test_float64_is_not_for_the_fused_kernel(kind):
    with pytest.raises(RuntimeError, match="float64"):
        build(kind, implementation="triton").double()(random(1, 4, 8, dtype=torch.float64))


def test_autocast(kind, implementation):
    """float32 parameters under bf16 autocast, forward and backward."""
    layer = without_kinks(kind, implementation=implementation)
    x, grad = random(2, 9, 8).abs(), random(2, 9, 8, seed=1)
    lengths = torch.tensor([9, 6], device=DEVICE)
    expected = gradients(layer, x, grad, lengths=lengths)
    x.requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        y = layer(x, lengths=lengths)
    assert y.dtype == torch.bfloat16
    results = [y, *torch.autograd.grad(y, [x, *layer.parameters()], grad.to(y.dtype))]
    assert all(r.dtype == torch.float32 for r in results[1:])
    for r, e in zip(results, expected, strict=True):
        assert error(r, e) <= 1.5e-2 * max(1.0, e.abs().max().item())


def test_copies(kind):
    layer, x = build(kind), random(2, 9, 8)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other = build(kind, seed=1)
    assert not torch.equal(other(x), expected)
    other.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    assert torch.equal(other(x), expected)


def test_device_and_dtype_of_parameters(kind):
    cls, options = KINDS[kind]
    layer = cls(2, 8, **options, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in layer.parameters())
    layer = layer.to_empty(device=DEVICE)
    layer.load_state_dict(cls(2, 8, **options).state_dict())
    assert layer(random(1, 3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_repr_shows_the_options():
    text = repr(LDSA(2, 8, 0.25, left=3, right=2, edge="renormalize", implementation="eager"))
    for part in (
        "n_head=2", "n_feat=8", "left=3", "right=2", "window=6", "renormalize", "0.25", "eager",
        "grouped_w2=False", "honor_mask=True",
    ):  # fmt: skip
        assert part in text
    assert "left=7, right=7" in repr(HybridAttention(2, 8))


CONSTRUCTOR_ERRORS = [
    ((3, 8), {}, "n_head.*n_head=3.*n_feat=8"),
    ((0, 8), {}, "n_head.*n_head=0"),
    ((2, 8), {"context_size": 8}, "context_size.*odd.*8.*left and right"),
    ((2, 8), {"context_size": -1}, "context_size.*positive.*-1"),
    ((2, 8), {"left": 3}, "left.*right.*left=3.*right=None"),
    ((2, 8), {"right": 3}, "left.*right.*left=None.*right=3"),
    ((2, 8), {"left": -1, "right": 0}, "left.*right.*>= 0.*-1"),
    ((2, 8), {"left": 0, "right": -2}, "left.*right.*>= 0.*-2"),
    ((2, 8), {"dropout_rate": 1.0}, r"dropout_rate.*\[0, 1\).*1.0"),
    ((2, 8), {"dropout_rate": -0.1}, r"dropout_rate.*\[0, 1\).*-0.1"),
    ((2, 8), {"edge": "same"}, "edge.*'zero'.*'renormalize'.*'same'"),
    ((2, 8), {"implementation": "gpu"}, "implementation.*'auto'.*'triton'.*'eager'.*'gpu'"),
]


@pytest.mark.parametrize("cls", [LDSA, HybridAttention])
@pytest.mark.parametrize(("sizes", "options", "message"), CONSTRUCTOR_ERRORS)
def test_constructor_errors(cls, sizes, options, message):
    with pytest.raises(ValueError, match=message):
        cls(*sizes, **options)


COPIES = {"clone", "copy_", "_to_copy", "contiguous", "cat", "stack", "constant_pad_nd", "pad"}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["linear", "linear_bias", "grouped"])
def test_no_copy_between_the_projections_and_the_op(kind, masked):
    layer = build(kind, implementation="triton", left=7, right=7)
    x, lengths, _ = ragged(garbage=0.0)
    x.requires_grad_()

    def names(function):
        with Recorder() as recorder:
            result = function()
        return [name.split(".")[0].split("::")[1] for name in recorder.names()], result

    forward, y = names(lambda: layer(x, **({"lengths": lengths} if masked else {})))
    inputs = [x, *layer.parameters()]
    backward, _ = names(lambda: torch.autograd.grad(y, inputs, torch.ones_like(y)))
    assert [name for name in forward if name in COPIES or "local" in name] == ["local_attention"]
    # Grouped: a batched product writes the gradient of the hidden features with the heads apart
    # and that of w2 transposed. Neither copy is between the op and a projection.
    copies = ["clone", "clone"] if kind == "grouped" else []
    assert [name for name in backward if name in COPIES or "local" in name] == [
        "local_attention_backward", *copies,
    ]  # fmt: skip


class Masked(nn.Module):
    """What torch.export takes: positional tensors."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, mask):
        return self.layer(x, mask=mask)


def test_exported(kind, implementation):
    module = Masked(build(kind, implementation=implementation)).eval()
    x, _, keep = ragged(garbage=0.0)
    frames = torch.export.Dim("frames")
    program = torch.export.export(module, (x, keep), dynamic_shapes=({1: frames}, {1: frames}))
    for T in (2, 20, 31):
        x = random(4, T, 8)
        keep = torch.arange(T, device=DEVICE) < torch.tensor([[T], [1], [0], [T // 2]]).to(DEVICE)
        assert close([program.module()(x, keep)], [module(x, keep)], 1e-6)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("kind", "form", "implementation", "dynamic"),
    [
        ("linear", None, "eager", True),
        ("linear_bias", "lengths", "triton", True),
        ("grouped", "mask", "eager", None),
        ("hybrid", "mask", "eager", True),
    ],
)
def test_compiled_once_for_many_lengths(kind, form, implementation, dynamic):
    """The whole layer as one graph, forward and backward, at most 2 graphs over 40 lengths."""
    layer = build(kind, n_head=1, n_feat=4, left=1, right=1, implementation=implementation)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=counter)
    for i, T in enumerate(torch.linspace(50, 150, 40).int().tolist()):
        x, grad = random(1, T, 4, seed=i), random(1, T, 4, seed=i + 100)
        lengths = torch.tensor([T // 2], device=DEVICE)
        options = {}
        if form == "lengths":
            options["lengths"] = lengths
        elif form == "mask":
            options["mask"] = torch.arange(T, device=DEVICE) < lengths[:, None]
        results = gradients(compiled, x, grad, **options)
        if i % 10 == 0:
            for r, e in zip(results, gradients(layer, x, grad, **options), strict=True):
                assert error(r, e) <= 1e-5 * max(1.0, e.abs().max().item())
    assert 1 <= counter.frame_count <= 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_with_dropout(kind):
    layer = build(kind, dropout_rate=0.5, implementation="triton")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = random(2, 9, 8)
    torch.manual_seed(0)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(0)
    assert torch.equal(compiled(x), first)
    assert not torch.equal(second, first)


# Two processes


def train_apart(rank, world, folder):
    """One step of each kind of layer under DDP and FSDP2 on this process's half of the batch."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    try:
        mesh = init_device_mesh("cpu", (world,))
        x, lengths = batch_for_two()
        half = slice(rank * 2, rank * 2 + 2)
        results = {}
        for kind in KINDS:
            for wrapper in ("ddp", "fsdp"):
                layer = build(kind).cpu()
                if wrapper == "ddp":
                    wrapped = DistributedDataParallel(layer)
                else:
                    wrapped = fully_shard(layer, mesh=mesh)
                results[kind, wrapper] = step(wrapped, layer, x[half], lengths[half])
        torch.save(results, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def batch_for_two():
    return random(4, 20, 8, device="cpu"), torch.tensor([20, 13, 4, 17])


def step(wrapped, layer, x, lengths, scale=1.0):
    """(the output after one step, {name: gradient})."""
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    (scale * wrapped(x, lengths=lengths).square().sum()).backward()
    optimizer.step()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    grads = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
    with torch.no_grad():
        return wrapped(x, lengths=lengths), grads


def test_data_parallel_and_fully_sharded(tmp_path):
    """Two processes with half a batch each train as one process with the whole."""
    torch.multiprocessing.spawn(train_apart, (2, str(tmp_path)), nprocs=2)
    apart = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    x, lengths = batch_for_two()
    for kind in KINDS:
        layer = build(kind).cpu()
        out, grads = step(layer, layer, x, lengths, 0.5)  # the mean of two processes' losses
        for wrapper in ("ddp", "fsdp"):
            for rank in range(2):
                half, grads_apart = apart[rank][kind, wrapper]
                assert set(grads_apart) == set(grads)
                assert all(error(grads_apart[n], g) <= 1e-5 for n, g in grads.items())
                assert error(half, out[rank * 2 : rank * 2 + 2]) <= 1e-5


# What only a GPU shows


@pytest.mark.gpu
def test_the_host_never_waits(kind):
    layer = build(kind, dropout_rate=0.1, n_feat=16)
    x, lengths, keep = ragged(garbage=0.0, n_feat=16)
    options = [{"lengths": lengths}, {"mask": keep}, {"lengths": lengths.cpu()}]
    options += [{"mask": keep[:, None].long()}, {"mask": keep[:, None] & keep[:, :, None]}]
    grad = torch.ones_like(x)
    for each in options:
        gradients(layer, x, grad, **each)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            gradients(layer, x, grad, **each)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("grouped", [False, True])
def test_launches(grouped):
    """Matrix products, ReLU and the op: one launch of it each way, and no copies."""
    torch.manual_seed(0)
    layer = LDSA(8, 512, left=14, right=0, grouped_w2=grouped, device=DEVICE, dtype=torch.bfloat16)
    x = random(4, 500, 512, dtype=torch.bfloat16).requires_grad_()
    gradients(layer, x, torch.ones_like(x))

    def launched(function):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            result = function()
            torch.cuda.synchronize()
        cuda = torch.profiler.DeviceType.CUDA
        return [e.name for e in profile.events() if e.device_type == cuda], result

    products = ("gemm", "gemv", "cutlass", "nvjet", "cublas", "xmma", "splitk", "memset")

    def others(names):
        return [name for name in names if not any(p in name.lower() for p in products)]

    names, y = launched(lambda: layer(x))
    # ReLU, if no product includes it; and a batched product starts from its bias.
    assert len([name for name in names if "ldsa" in name]) == 1, names
    assert len(others(names)) <= 2 + grouped, names

    names, _ = launched(lambda: torch.autograd.grad(y, [x, *layer.parameters()], y.detach()))
    assert len([name for name in names if "ldsa" in name]) == 1, names
    # test_no_copy_between_the_projections_and_the_op says which two.
    assert len([name for name in names if "copy" in name.lower()]) <= 2 * grouped, names


@pytest.mark.gpu
def test_cuda_graph(kind):
    layer = build(kind, n_feat=16)
    x, lengths, _ = ragged(garbage=0.0, n_feat=16)
    grad = torch.ones_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(layer, x, grad, lengths=lengths)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = gradients(layer, x, grad, lengths=lengths)
    x.copy_(random(4, 20, 16, seed=5))
    lengths.copy_(torch.tensor([7, 20, 13, 2]))
    graph.replay()
    for r, e in zip(results, gradients(layer, x, grad, lengths=lengths), strict=True):
        assert error(r, e) <= 1e-5 * max(1.0, e.abs().max().item())


def test_sizes_are_ints():
    layer = LDSA(np.int64(2), 8, left=np.int32(2), right=np.int64(1))
    assert layer(torch.zeros(1, 3, 8)).shape == (1, 3, 8)
    for name, options in {
        "left": {"left": True, "right": 0},
        "right": {"left": 1, "right": 1.0},
        "context_size": {"context_size": "15"},
        "n_head": {"n_head": 2.0},
    }.items():
        with pytest.raises(TypeError, match=f"^{name} must be an int, got"):
            LDSA(**{"n_head": 2, "n_feat": 8, **options})


def test_a_hybrid_shows_its_local_part():
    layer = HybridAttention(2, 8, left=3, right=1)
    assert (layer.n_head, layer.n_feat, layer.left, layer.right, layer.window) == (2, 8, 3, 1, 5)
    layer.honor_mask = False
    assert layer.ldsa_att.honor_mask is False
    mask = torch.tensor([[True, True, False]])
    assert layer(torch.ones(1, 3, 8), mask=mask)[0, 2].abs().max() > 0
    layer.honor_mask = True
    assert layer(torch.ones(1, 3, 8), mask=mask)[0, 2].abs().max() == 0


def test_a_sequence_is_a_tensor():
    with pytest.raises(TypeError, match=r"^query must be a tensor \[B,T,D\], got list"):
        LDSA(2, 8)([[0.0]])


def peak_bytes(run):
    """Most memory that `run` holds at a time on the CPU beyond what it found."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    held = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_memory_on_a_cpu():
    """Beside its projections the layer holds less than one value tensor, in training three."""
    layer = LocalDenseSynthesizerAttention(4, 256)
    x = torch.randn(2, 200, 256, requires_grad=True)

    def projections():
        return layer.w2(torch.relu(layer.w1(x))), layer.w_out(layer.w3(x))

    def attend():
        return (layer(x),)

    def step(run):
        outs = run()
        torch.autograd.backward(outs, [torch.ones_like(y) for y in outs])
        x.grad = None
        layer.zero_grad()

    value = x.numel() * x.element_size()
    with torch.no_grad():
        assert peak_bytes(attend) - peak_bytes(projections) <= value
    assert peak_bytes(lambda: step(attend)) - peak_bytes(lambda: step(projections)) <= 3 * value
