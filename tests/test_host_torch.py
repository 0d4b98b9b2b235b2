"""nn.TransformerEncoder with replaced attention: masks, layouts, inference fast path, tracing."""

import contextlib
import copy
import math
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ldsa_nn import replace_attention

D, H, T = 16, 4, 11
LENGTHS = [T, 7, 1]


def encoder(layers=2, **options):
    torch.manual_seed(0)
    options = {"batch_first": True, "dropout": 0.0, **options}
    layer = nn.TransformerEncoderLayer(D, H, 32, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nested tensors where a layer does not suit them
        return nn.TransformerEncoder(layer, layers)


def replaced(layers=2, left=3, right=2, options=None, **encoder_options):
    model = encoder(layers, **encoder_options)
    replace_attention(model, left=left, right=right, use_bias=True, **options or {})
    return model.eval()


def batch(left_padded=False):
    """Features with garbage where padding is, and the padding: bool [B,T], True = padding."""
    torch.manual_seed(1)
    x = torch.randn(len(LENGTHS), T, D)
    padding = torch.arange(T) >= torch.tensor(LENGTHS)[:, None]
    if left_padded:
        padding = padding.flip(1)
    return torch.where(padding[:, :, None], 50.0, x), padding


def run(model, x, **masks):
    """Call the model on batch-first x, whatever its own layout."""
    if model.layers[0].self_attn.batch_first:
        return model(x, **masks)
    return model(x.transpose(0, 1), **masks).transpose(0, 1)


MODES = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]


@pytest.fixture
def fast(monkeypatch):
    """Calls of the fused layer that inference takes where it can."""
    calls = []
    fused = torch._transformer_encoder_layer_fwd

    def spy(*arguments):
        calls.append(arguments)
        return fused(*arguments)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", spy)
    return calls


def by_hand(model, x, padding=None):
    """What the encoder computes, from its parts."""
    for layer in model.layers:
        mask = None if padding is None else ~padding
        attend = lambda x, layer=layer, mask=mask: layer.self_attn.layer(x, x, x, mask)  # noqa: E731
        feed = lambda x, layer=layer: layer.linear2(layer.activation(layer.linear1(x)))  # noqa: E731
        if layer.norm_first:
            x = x + attend(layer.norm1(x))
            x = x + feed(layer.norm2(x))
        else:
            x = layer.norm1(x + attend(x))
            x = layer.norm2(x + feed(x))
    return x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_layer_is_what_runs(mode, batch_first, norm_first, activation, fast):
    model = replaced(batch_first=batch_first, norm_first=norm_first, activation=activation)
    x, padding = batch()
    with mode():
        torch.testing.assert_close(run(model, x), by_hand(model, x))
        out = run(model, x, src_key_padding_mask=padding)
    expected = by_hand(model, x, padding)
    torch.testing.assert_close(out[~padding], expected[~padding])
    assert not fast


@pytest.mark.parametrize("mode", MODES[1:])
def test_the_original_takes_the_fast_path(mode, fast):
    # Or the test above would prove nothing.
    x, padding = batch()
    with mode():
        encoder().eval()(x, src_key_padding_mask=padding)
    assert len(fast) == 2 and fast[0][0].is_nested


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chosen", [0, 1])
def test_half_replaced(mode, chosen, fast):
    model = encoder().eval()
    replace_attention(model, layers=[chosen], left=3, right=2)
    x, padding = batch()
    with mode():
        out = model(x, src_key_padding_mask=padding)
    assert len(fast) == (mode is not contextlib.nullcontext)  # the other layer
    assert all(not call[0].is_nested for call in fast)
    for b, n in enumerate(LENGTHS):
        torch.testing.assert_close(out[b, :n], model(x[b : b + 1, :n])[0], atol=2e-6, rtol=1e-5)


def masks(padding):
    """One padding, in every form that the host takes."""
    zero = torch.zeros(padding.shape)
    for low in (-math.inf, torch.finfo(torch.float32).min, -1e4):
        yield zero.masked_fill(padding, low)
    yield padding
    yield zero.double().masked_fill(padding, -math.inf)
    yield zero.half().masked_fill(padding, torch.finfo(torch.float16).min)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("left_padded", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_padded_batch_is_each_utterance_alone(mode, left_padded, batch_first, norm_first):
    model = replaced(batch_first=batch_first, norm_first=norm_first)
    x, padding = batch(left_padded)
    spans = [slice(T - n, T) if left_padded else slice(0, n) for n in LENGTHS]
    with mode():
        alone = [run(model, x[b : b + 1, span])[0] for b, span in enumerate(spans)]
        for mask in masks(padding):
            out = run(model, x, src_key_padding_mask=mask)
            for b, span in enumerate(spans):
                torch.testing.assert_close(out[b, span], alone[b], atol=1e-6, rtol=1e-5)

    # A control that ignores the mask is far off: the comparison can fail.
    deaf = replaced(batch_first=batch_first, norm_first=norm_first, options={"honor_mask": False})
    out = run(deaf, x, src_key_padding_mask=padding)
    assert (out[1, spans[1]] - alone[1]).abs().max() > 0.01
    # And the original does as the replaced model does.
    original = encoder(batch_first=batch_first, norm_first=norm_first).train()
    out = run(original, x, src_key_padding_mask=padding)
    torch.testing.assert_close(
        out[1, spans[1]], run(original, x[1:2, spans[1]])[0], atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("length", [50, 200])
def test_batch_mates_change_nothing(length):
    model = replaced(left=7, right=7)
    x = torch.randn(1, 37, D)
    alone = model(x)
    padded = torch.full((3, length, D), 1e3)
    padded[1, :37] = x
    padding = torch.arange(length) >= torch.tensor([length, 37, 2])[:, None]
    for garbage in (padded, padded.masked_fill(padding[:, :, None], math.nan)):
        out = model(garbage, src_key_padding_mask=padding)
        torch.testing.assert_close(out[1, :37], alone[0], atol=1e-5, rtol=0)


def test_all_padding_gives_numbers():
    model = replaced()
    x = torch.randn(2, T, D)
    padding = torch.zeros(2, T, dtype=torch.bool)
    padding[1] = True
    assert model(x, src_key_padding_mask=padding).isfinite().all()


def test_one_utterance_without_a_batch():
    model = replaced()
    x, padding = batch()
    torch.testing.assert_close(model(x[1]), model(x)[1])
    out = model(x[1], src_key_padding_mask=padding[1])
    torch.testing.assert_close(out[:7], model(x[1, :7]))


@pytest.mark.parametrize("shape", [(0, T), (2, 0), (0, 0)])
@pytest.mark.parametrize("batch_first", [True, False])
def test_nothing_in_the_batch(shape, batch_first):
    model = replaced(batch_first=batch_first)
    padding = torch.zeros(shape, dtype=torch.bool)
    out = run(model, torch.randn(*shape, D), src_key_padding_mask=padding)
    assert out.shape == (*shape, D)


def test_gradients_stop_at_padding():
    model = replaced(norm_first=True).train()
    x, padding = batch()
    x.requires_grad_()
    out = model(x, src_key_padding_mask=padding)
    out[~padding].sum().backward()
    assert (x.grad[padding] == 0).all()
    assert (x.grad[~padding] != 0).any()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.tensor([[False, True, False, True]]), ValueError, "holes in sequence 0"),
        (torch.tensor([[0.0, -1.0, 0.0, -math.inf]]), ValueError, r"at most -1e3.*got -1\.0"),
        (torch.tensor([[1.0, 1.0, 1.0, 0.0]]), ValueError, r"at most -1e3.*got 1\.0"),
        (torch.tensor([[0.0, 0.0, math.nan, 0.0]]), ValueError, "at most -1e3.*got nan"),
        (torch.zeros(1, 3, dtype=torch.bool), ValueError, r"shape.*T=4.*\[1, 3\]"),
        (torch.zeros(2, 4, dtype=torch.bool), ValueError, r"shape.*B=1.*\[2, 4\]"),
    ],
)
def test_padding_that_cannot_be_followed(mask, error, message):
    model = replaced()
    with pytest.raises(error, match=message):
        model(torch.randn(1, 4, D), src_key_padding_mask=mask)


def test_integer_padding_is_refused():
    adapter = replaced().layers[0].self_attn
    x = torch.randn(1, 4, D)
    with pytest.raises(TypeError, match=r"bool \(True = padding\).*int64.*mask == 0"):
        adapter(x, x, x, key_padding_mask=torch.ones(1, 4, dtype=torch.int64))


def test_weights_and_nested_tensors_are_refused():
    model = replaced()
    x = torch.randn(1, 4, D)
    with pytest.raises(ValueError, match=r"need_weights.*\.layer"):
        model.layers[0].self_attn(x, x, x, need_weights=True)
    out, none = model.layers[0].self_attn(x, x, x, need_weights=False)
    assert out.shape == x.shape and none is None
    with pytest.raises(TypeError, match="pos_emb"):
        model.layers[0].self_attn(x, x, x, pos_emb=x)
    nested = torch.nested.nested_tensor([torch.randn(3, D), torch.randn(2, D)])
    with pytest.raises(ValueError, match="padded tensor with a mask, got a nested"):
        model.layers[0](nested)


def test_other_sequences_as_key_and_value_are_refused():
    adapter = replaced().layers[0].self_attn
    with pytest.raises(ValueError, match="value must have query's shape"):
        adapter(torch.randn(1, 4, D), torch.randn(1, 5, D), torch.randn(1, 5, D))


# Masks of pairs

CAUSAL = nn.Transformer.generate_square_subsequent_mask(T)


def band(before, after, low=-math.inf):
    """Additive mask that frees `before` frames before and `after` after each."""
    outside = ~torch.ones(T, T, dtype=torch.bool).triu(-before).tril(after)
    return torch.zeros(T, T).masked_fill(outside, low)


CHUNKS = torch.zeros(T, T).masked_fill(torch.arange(T)[:, None] // 4 != torch.arange(T) // 4, -1e4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "pairs",
    [
        dict(mask=CAUSAL),
        dict(mask=CAUSAL, is_causal=True),
        dict(mask=CAUSAL, is_causal=False),
        dict(mask=CAUSAL != 0),
        dict(mask=band(T, 0, torch.finfo(torch.float32).min)),
        dict(mask=band(3, 0)),
        dict(mask=band(4, 1)),
        dict(mask=band(3, 0).expand(3 * H, T, T)),
    ],
)
def test_causal_hosts_take_a_causal_window(pairs, mode):
    model = replaced(right=0)
    x, padding = batch()
    padded = dict(src_key_padding_mask=torch.zeros(x.shape[:2]).masked_fill(padding, -math.inf))
    if pairs["mask"].dtype == torch.bool:
        padded = dict(src_key_padding_mask=padding)
    with mode():
        assert torch.equal(model(x, **pairs), model(x))
        assert torch.equal(model(x, **pairs, **padded), model(x, **padded))
        # No frame sees a later one.
        later = x.clone()
        later[:, 6:] = 9.0
        assert torch.equal(model(later, **pairs)[:, :6], model(x, **pairs)[:, :6])


def test_causal_without_a_mask():
    model = replaced(right=0)
    x, _ = batch()
    assert torch.equal(model(x, is_causal=True), model(x))
    assert torch.equal(model.layers[0](x, is_causal=True), model.layers[0](x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "pairs", [dict(mask=CAUSAL), dict(mask=CAUSAL, is_causal=True), dict(is_causal=True)]
)
def test_causal_hosts_refuse_a_window_that_looks_ahead(pairs, mode):
    model = replaced(right=1)
    x, _ = batch()
    with mode(), pytest.raises(ValueError, match=r"is_causal=True needs .*right=0, got right=1"):
        model(x, **pairs)


def test_causality_is_of_each_layer():
    model = replaced(right=[0, 1])
    x, _ = batch()
    model.layers[0](x, src_mask=CAUSAL, is_causal=True)
    with pytest.raises(ValueError, match="right=1"):
        model(x, mask=CAUSAL)


@pytest.mark.parametrize(
    "pairs",
    [
        band(T, 1),
        band(2, T),
        band(3, 1),
        band(3, 1).expand(3 * H, T, T),
        CHUNKS,
        CHUNKS != 0,
        -0.1 * torch.rand(T, T),
        band(T, 1, torch.finfo(torch.float32).min),
    ],
)
def test_masks_that_forbid_frames_of_the_window_are_refused(pairs):
    model = replaced()  # 3 before, 2 after
    x, _ = batch()
    with pytest.raises(ValueError, match=r"forbids or biases.*left=3, right=2.*right=0"):
        model(x, mask=pairs)
    free = band(3, 2)
    assert torch.equal(model(x, mask=free), model(x))
    assert torch.equal(model(x, mask=free != 0), model(x))


@pytest.mark.parametrize("left_padded", [False, True])
def test_padding_may_be_in_both_masks(left_padded):
    model = replaced()
    x, padding = batch(left_padded)
    forbidden = padding[:, None, :].expand(-1, T, -1)
    both = torch.zeros(3, T, T).masked_fill(forbidden, -math.inf).repeat_interleave(H, 0)
    padding = torch.zeros(3, T).masked_fill(padding, -math.inf)
    out = model(x, mask=both, src_key_padding_mask=padding)
    assert torch.equal(out, model(x, src_key_padding_mask=padding))
    with pytest.raises(ValueError, match="give padding as src_key_padding_mask"):
        model(x, mask=both)


def test_pair_masks_of_one_utterance_without_a_batch():
    model = replaced()
    x, padding = batch()
    alone = dict(src_key_padding_mask=torch.zeros(T).masked_fill(padding[1], -math.inf))
    both = torch.zeros(T, T).masked_fill(padding[1], -math.inf)
    for pairs in (both, both.expand(H, T, T)):
        assert torch.equal(model(x[1], mask=pairs, **alone), model(x[1], **alone))
        with pytest.raises(ValueError, match="forbids"):
            model(x[1], mask=pairs)


@pytest.mark.parametrize("shape", [(T, T - 1), (T - 1, T - 1), (3, T, T), (1, 1, T, T), (T,)])
def test_pair_masks_of_another_shape_are_refused(shape):
    x, _ = batch()
    with pytest.raises(ValueError, match=r"\[11, 11\] or \[12, 11, 11\], got \[") as error:
        replaced().layers[0](x, src_mask=torch.zeros(shape))
    assert str(list(shape)) in str(error.value)


@pytest.mark.parametrize("pairs", [True, False])
def test_padding_of_another_shape_is_named(pairs):
    adapter = replaced().layers[0].self_attn
    x = torch.randn(2, T, D)
    options = dict(attn_mask=torch.zeros(T, T)) if pairs else {}
    for shape in ((2, T - 1), (3, T), (T,), (2, 1, T)):
        expected = f"key_padding_mask must have shape [B,T] with B=2, T={T}, got {list(shape)}"
        with pytest.raises(ValueError, match=re.escape(expected)):
            adapter(x, x, x, key_padding_mask=torch.zeros(shape, dtype=torch.bool), **options)
    for shape in ((T - 1,), (1, T)):
        expected = f"key_padding_mask must have shape [T] with T={T}, got {list(shape)}"
        with pytest.raises(ValueError, match=re.escape(expected)):
            adapter(*[x[0]] * 3, key_padding_mask=torch.zeros(shape, dtype=torch.bool), **options)


def test_the_report_tells_of_causal_masks():
    (warning,) = replace_attention(encoder()).warnings
    assert "torch.nn.TransformerEncoder" in warning and "causal or chunk mask" in warning


# Training and tracing


def test_dropout_is_the_old_ones_and_off_in_eval():
    model = encoder(dropout=0.5)
    replace_attention(model, left=3, right=2)
    for layer in model.layers:
        layer.dropout.p = layer.dropout1.p = layer.dropout2.p = 0.0
        assert layer.self_attn.layer.dropout_rate == 0.5
    x, _ = batch()
    torch.manual_seed(2)
    first = model(x)
    assert not torch.equal(model(x), first)
    torch.manual_seed(2)
    assert torch.equal(model(x), first)
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_repeats_the_dropout(use_reentrant):
    model = encoder(dropout=0.3)
    replace_attention(model, left=3, right=2)
    x, padding = batch()
    x.requires_grad_()

    def gradients(call):
        torch.manual_seed(3)
        model.zero_grad()
        x.grad = None
        out = x
        for layer in model.layers:
            out = call(lambda x, layer=layer: layer(x, src_key_padding_mask=padding), out)
        out[~padding].sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    plain = gradients(lambda function, x: function(x))
    again = gradients(lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant))
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


def test_autocast():
    model = replaced()
    x, padding = batch()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = model(x, src_key_padding_mask=padding)
    expected = model(x, src_key_padding_mask=padding)
    assert (out.float() - expected)[~padding].abs().max() < 0.1


@pytest.mark.parametrize(
    ("training", "norm_first", "backend"), [(True, False, "aot_eager"), (False, True, "eager")]
)
def test_compiles_whole_for_all_lengths(training, norm_first, backend):
    model = replaced(layers=1, norm_first=norm_first).train(training)
    torch._dynamo.reset()
    compiles = []

    def count(graph, inputs):
        compiles.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=True, backend=count)
    for frames in range(5, 25, 2):
        x = torch.randn(3, frames, D)
        padding = torch.arange(frames) >= torch.tensor([frames, 4, 1])[:, None]
        for each in (model, compiled):
            each.zero_grad()
            each(x, src_key_padding_mask=padding)[~padding].square().sum().backward()
        torch.testing.assert_close(
            compiled(x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding)
        )
        for one, other in zip(compiled.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4)
    assert len(compiles) <= 2


def test_a_compiled_model_can_be_replaced():
    torch._dynamo.reset()
    model = encoder().eval()
    compiled = torch.compile(model, backend="eager")
    x, _ = batch()
    before = compiled(x)
    report = replace_attention(compiled, left=3, right=2)
    assert report.replaced[0] == "_orig_mod.layers.0.self_attn"
    assert not torch.allclose(compiled(x), before)
    torch.testing.assert_close(compiled(x), model(x))


def test_compiled_models_check_their_masks_too():
    torch._dynamo.reset()
    model = replaced(right=0)
    x, _ = batch()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(x, mask=CAUSAL, is_causal=True), model(x))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"cannot be checked.*is_causal=True"):
        whole(x, mask=CAUSAL, is_causal=False)
    broken = torch.compile(model, backend="eager")  # where the graph breaks, the check runs
    torch.testing.assert_close(broken(x, mask=CAUSAL, is_causal=False), model(x))
    with pytest.raises(ValueError, match="forbids or biases"):
        broken(x, mask=CHUNKS)


def test_exports_with_free_lengths():
    model = replaced()
    x, padding = batch()
    frames = torch.export.Dim("frames", min=2, max=100)
    shapes = dict(src={1: frames}, src_key_padding_mask={1: frames})
    with torch.no_grad():
        program = torch.export.export(
            model, (x,), dict(src_key_padding_mask=padding), dynamic_shapes=shapes
        )
    for n in (3, 40):
        x = torch.randn(3, n, D)
        padding = torch.arange(n) >= torch.tensor([n, 2, 1])[:, None]
        torch.testing.assert_close(
            program.module()(x, src_key_padding_mask=padding),
            model(x, src_key_padding_mask=padding),
        )
