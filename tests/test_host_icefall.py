"""icefall's encoder layers with replaced attention."""

import pytest
import torch
from conformer import ConformerEncoderLayer
from host_battery import LAYERS, Battery, D, H, ModuleBattery, T, batch
from torch import nn
from zipformer import Zipformer2EncoderLayer

from ldsa_nn import HybridAttention, ldsa_weights, replace_attention

KERNEL, POS = 5, 8


class Stack(nn.Module):
    """As a recipe's encoder calls its layers: time first."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, lengths, pos_dim, **options):
        x = x.transpose(0, 1)
        pos_emb = torch.zeros(1, 2 * x.shape[0] - 1, pos_dim)
        padding = torch.arange(x.shape[0]) >= lengths[:, None]
        for layer in self.layers:
            x = layer(x, pos_emb, src_key_padding_mask=padding, **options)
        return x.transpose(0, 1)


class TestConformer(ModuleBattery):
    paths = [f"layers.{i}.self_attn" for i in range(LAYERS)]
    warned = ["icefall's Conformer", "dynamic_chunk_training", "left_context"]

    def build(self, dropout=0.0):
        model = Stack(
            ConformerEncoderLayer(
                D, H, dim_feedforward=32, dropout=dropout, layer_dropout=0.0,
                cnn_module_kernel=KERNEL, causal=True,
            )
            for _ in range(LAYERS)
        )  # fmt: skip
        for layer in model.layers:
            layer.self_attn.dropout = dropout
        return model

    def run(self, model, x, lengths, **options):
        return model(x, lengths, D, **options)


class TestZipformer2(Battery):
    paths = [f"layers.{i}.self_attn_weights" for i in range(LAYERS)]
    warned = ["icefall's Zipformer2", "left_context_frames", "w3 and w_out", "NonlinAttention"]

    def build(self, dropout=0.0):
        model = Stack(
            Zipformer2EncoderLayer(
                D, pos_dim=POS, num_heads=H, query_head_dim=4, pos_head_dim=2, value_head_dim=4,
                feedforward_dim=32, dropout=dropout, cnn_module_kernel=KERNEL, causal=True,
            )
            for _ in range(LAYERS)
        )  # fmt: skip
        for layer in model.layers:
            layer.self_attn_weights.dropout = dropout
        return model

    def run(self, model, x, lengths, **options):
        return model(x, lengths, POS, **options)


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
@pytest.mark.parametrize(("left", "right"), [(3, 2), (0, 4), (5, 0), (0, 0), (30, 30)])
@pytest.mark.parametrize("frames", [1, 2, T])
def test_weights_are_a_band(edge, left, right, frames):
    model = TestZipformer2().replaced(left=left, right=right, edge=edge)
    adapter = model.layers[0].self_attn_weights
    x, lengths = torch.randn(frames, 3, D), torch.tensor([frames, (frames + 1) // 2, 1])
    padding = torch.arange(frames) >= lengths[:, None]
    weights = adapter(x, key_padding_mask=padding)
    assert weights.shape == (H, 3, frames, frames)
    logits = adapter.layer._logits(x.transpose(0, 1))
    slots = ldsa_weights(logits, left, right, lengths=lengths, edge=edge)
    expected = torch.zeros_like(weights)
    for b, n in enumerate(lengths):
        for t in range(frames):
            if t >= n:
                expected[:, b, t, t] = 1
                continue
            for k in range(left + 1 + right):
                if 0 <= t - left + k < n:
                    expected[:, b, t, t - left + k] = slots[b, :, k, t]
    torch.testing.assert_close(weights, expected)
    if edge == "renormalize":
        torch.testing.assert_close(weights.sum(-1), torch.ones(H, 3, frames))


def test_nothing_in_the_batch():
    adapter = TestZipformer2().replaced().layers[0].self_attn_weights
    for frames, rows in ((0, 2), (3, 0)):
        padding = torch.zeros(rows, frames, dtype=torch.bool)
        weights = adapter(torch.randn(frames, rows, D), key_padding_mask=padding)
        assert weights.shape == (H, rows, frames, frames)


def test_constant_weights_of_padding_are_numbers():
    # The host divides by the sum of each row's weights, those of padding included.
    model = TestZipformer2().replaced().train()
    for layer in model.layers:
        del layer.const_attention_rate  # in the recipe a module, a schedule
        layer.const_attention_rate = 1.0
    x, lengths = batch()
    assert TestZipformer2().run(model, x, lengths).isfinite().all()


@pytest.mark.parametrize("kind", [TestConformer, TestZipformer2])
def test_chunk_masks_need_a_window_that_does_not_look_ahead(kind):
    x, lengths = batch()
    chunk = torch.arange(T) // 4
    name = "src_mask" if kind is TestConformer else "attn_mask"
    masks = {name: (chunk > chunk[:, None]) | (chunk < chunk[:, None] - 1)}
    inside = torch.arange(T) < lengths[:, None]
    model = kind().replaced(right=0, left=9)
    out = kind().run(model, x, lengths, **masks)
    assert torch.equal(out[inside], kind().run(model, x, lengths)[inside])
    with pytest.raises(ValueError, match=r"forbids later frames .*right=0, got right=2"):
        kind().run(kind().replaced(), x, lengths, **masks)


def stream_conformer(model, x, chunk, left_context, right_context=0):
    """x [B,T,D], as chunk_forward of the recipe's encoder does it."""
    x = x.transpose(0, 1)
    batch_size = x.shape[1]
    states = [
        [torch.zeros(left_context, batch_size, D), torch.zeros(KERNEL - 1, batch_size, D)]
        for _ in model.layers
    ]
    outs = []
    for start in range(0, T, chunk):
        part = x[start : start + chunk + right_context]
        size = part.shape[0]
        not_yet = torch.arange(left_context).flip(0) >= start
        padding = torch.cat([not_yet, torch.zeros(size, dtype=torch.bool)])
        for layer, state in zip(model.layers, states, strict=True):
            part, _ = layer.chunk_forward(
                part, torch.zeros(1, 2 * size - 1 + left_context, D), states=state,
                src_key_padding_mask=padding.expand(batch_size, -1), left_context=left_context,
                right_context=right_context,
            )  # fmt: skip
        last = start + chunk + right_context >= T
        outs.append(part if last else part[:chunk])
        if last:
            break
    return torch.cat(outs).transpose(0, 1)


@torch.no_grad()
def streamed_conformer(edge="zero", right=0, chunk=4, left_context=3, right_context=0):
    """Frames of a stream, and of the whole."""
    model = TestConformer().replaced(right=right, edge=edge)
    x, _ = batch()
    whole = TestConformer().run(model, x, torch.full((3,), T))
    return stream_conformer(model, x, chunk, left_context, right_context), whole


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
@pytest.mark.parametrize(
    ("right", "chunk", "left_context", "right_context"),
    [(0, 4, 3, 0), (0, 1, 8, 0), (0, 7, 30, 0), (1, 4, 3, 2), (2, 5, 9, 4)],
)
def test_streamed_conformer_equals_offline(edge, right, chunk, left_context, right_context):
    both = streamed_conformer(edge, right, chunk, left_context, right_context)
    torch.testing.assert_close(*both, atol=1e-6, rtol=1e-5)


def stream_zipformer(model, x, chunk, left_context):
    """x [B,T,D], as streaming_forward of the recipe's encoder does it."""
    x = x.transpose(0, 1)
    rows = x.shape[1]
    states = [
        (
            torch.full((left_context, rows, 4 * H), torch.nan),  # not read
            torch.zeros(1, rows, left_context, 3 * D // 4),
            *[torch.zeros(left_context, rows, 4 * H) for _ in range(2)],
            *[torch.zeros(rows, D, KERNEL // 2) for _ in range(2)],
        )
        for _ in model.layers
    ]
    outs = []
    for start in range(0, T, chunk):
        part = x[start : start + chunk]
        size = part.shape[0]
        not_yet = torch.arange(left_context).flip(0) >= start
        padding = torch.cat([not_yet, torch.zeros(size, dtype=torch.bool)])
        pos_emb = torch.zeros(1, 2 * size - 1 + left_context, POS)
        for i, layer in enumerate(model.layers):
            part, *states[i] = layer.streaming_forward(
                part, pos_emb, *states[i], left_context_len=left_context,
                src_key_padding_mask=padding.expand(rows, -1),
            )  # fmt: skip
        outs.append(part)
    return torch.cat(outs).transpose(0, 1)


@torch.no_grad()
def streamed_zipformer(edge="zero", chunk=4, left_context=3):
    """Frames of a stream, and of the whole."""
    model = TestZipformer2().replaced(right=0, edge=edge)
    x, _ = batch()
    whole = TestZipformer2().run(model, x, torch.full((3,), T), chunk_size=chunk)
    return stream_zipformer(model, x, chunk, left_context), whole


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
@pytest.mark.parametrize(("chunk", "left_context"), [(4, 3), (1, 8), (8, 30), (24, 3)])
def test_streamed_zipformer_equals_offline(edge, chunk, left_context):
    both = streamed_zipformer(edge, chunk, left_context)
    torch.testing.assert_close(*both, atol=1e-6, rtol=1e-5)


ROWS = {
    "Conformer": (TestConformer, streamed_conformer),
    "Zipformer2": (TestZipformer2, streamed_zipformer),
}


def test_streams_that_cannot_be_exact_are_refused():
    x, _ = batch()
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"left_context=2 .*left=3"):
            stream_conformer(TestConformer().replaced(right=0), x, 4, 2)
        with pytest.raises(ValueError, match=r"left_context_len=2 .*left=3"):
            stream_zipformer(TestZipformer2().replaced(right=0), x, 4, 2)
        with pytest.raises(ValueError, match=r"right=0, got right=2"):
            stream_zipformer(TestZipformer2().replaced(), x, 4, 8)


def test_the_call_and_what_it_returns():
    attention, x = TestConformer().replaced().layers[0].self_attn, torch.randn(5, 2, D)
    pos = torch.zeros(1, 9, D)
    out, weights = attention(x, x, x, pos_emb=pos, attn_mask=None, key_padding_mask=None)
    assert out.shape == x.shape and weights is None
    padding = torch.tensor([[False] * 5, [False, False, True, True, True]])
    out, _ = attention(x, x, x, pos, padding, need_weights=False, offset=0)
    assert (out[2:, 1] == 0).all()
    with pytest.raises(TypeError, match="window"):
        attention(x, x, x, window=3)


def test_only_icefalls_own_call_is_taken():
    model = TestConformer().original()
    old = model.layers[1].self_attn
    old.forward = lambda query, key, value, mask=None: query
    with pytest.raises(ValueError, match=r"is not icefall's: its forward takes no attn_mask"):
        replace_attention(model)
    assert model.layers[1].self_attn is old


def test_zipformer_takes_the_weights_of_ldsa_alone():
    model = TestZipformer2().original()
    with pytest.raises(TypeError, match=r"Zipformer2 needs a LocalDense.*HybridAttention"):
        replace_attention(model, make=lambda path, old, h, d, left, right: HybridAttention(h, d))
    report = replace_attention(model, grouped_w2=True, init_from_old=True)
    assert {name.rpartition("layer.")[2] for name in report.new_parameters} == {
        "w1.weight", "w2.weight", "w2.bias",
    }  # fmt: skip
    assert any("no w3 and w_out that fit" in warning for warning in report.warnings)
