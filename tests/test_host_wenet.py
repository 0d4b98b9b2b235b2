"""WeNet's encoders with replaced attention."""

import pytest
import torch
from host_battery import LAYERS, D, H, ModuleBattery, T, batch
from torch import nn
from wenet.models.transformer.encoder import ConformerEncoder, TransformerEncoder

from ldsa_nn import replace_attention

OPTIONS = dict(
    output_size=D, attention_heads=H, linear_units=32, num_blocks=LAYERS, input_layer="linear",
    positional_dropout_rate=0.0, use_dynamic_chunk=True,
)  # fmt: skip


class _Wenet(ModuleBattery):
    paths = [f"encoders.{i}.self_attn" for i in range(LAYERS)]

    def run(self, model, x, lengths, **options):
        return model(x, lengths, **{"decoding_chunk_size": -1, **options})[0]


class TestConformer(_Wenet):
    warned = ["WeNet's Conformer", "chunk mask", "forward_chunk", "causal=True"]

    def build(self, dropout=0.0, **options):
        options = dict(cnn_module_kernel=5, causal=True, **OPTIONS, **options)
        options = {"selfattention_layer_type": "rel_selfattn", **options}
        return ConformerEncoder(
            D, dropout_rate=dropout, attention_dropout_rate=dropout,
            pos_enc_layer_type="rel_pos", cnn_module_norm="layer_norm", **options,
        )  # fmt: skip


class TestTransformer(_Wenet):
    warned = ["WeNet's Transformer", "chunk mask"]

    def build(self, dropout=0.0, **options):
        return TransformerEncoder(
            D, dropout_rate=dropout, attention_dropout_rate=dropout,
            pos_enc_layer_type="abs_pos", **OPTIONS, **options,
        )  # fmt: skip


class TestSdpa(TestTransformer):
    """With an additive mask."""

    def build(self, dropout=0.0):
        return super().build(dropout, use_sdpa=True)


class TestWithoutChunks(TestTransformer):
    """With a mask of keys, [B,1,T]."""

    def build(self, dropout=0.0):
        model = super().build(dropout)
        model.use_dynamic_chunk = False
        return model


class TestHostCheckpointing(TestConformer):
    def build(self, dropout=0.0):
        return super().build(dropout, gradient_checkpointing=True)


KINDS = [TestConformer, TestTransformer]


def replaced(kind, **options):
    return kind().replaced(**{"right": 0, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_chunk_masks_are_read_on_their_diagonal(kind):
    model, (x, lengths) = replaced(kind), batch()
    whole = kind().run(model, x, lengths)
    for options in (
        dict(decoding_chunk_size=4),
        dict(decoding_chunk_size=4, num_decoding_left_chunks=0),
    ):
        chunked = kind().run(model, x, lengths, **options)
        inside = torch.arange(T) < lengths[:, None]
        torch.testing.assert_close(chunked[inside], whole[inside])


@torch.no_grad()
def streamed(kind, edge="zero", chunk=4, left_chunks=1):
    """Frames of a stream, and of the whole."""
    model = replaced(kind, edge=edge)
    x, _ = batch()
    whole, _ = model(x[:1], torch.tensor([T]), decoding_chunk_size=-1)
    return model.forward_chunk_by_chunk(x[:1], chunk, left_chunks)[0], whole


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("chunk", "left_chunks"), [(4, -1), (4, 1), (3, 2), (1, 3), (7, 5)])
def test_streamed_equals_offline(kind, edge, chunk, left_chunks):
    both = streamed(kind, edge, chunk, left_chunks)
    torch.testing.assert_close(*both, atol=1e-6, rtol=1e-5)


ROWS = {
    "Conformer": (TestConformer, lambda: streamed(TestConformer)),
    "Transformer": (TestTransformer, lambda: streamed(TestTransformer)),
    "Transformer, use_sdpa": (TestSdpa, None),
}


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
def test_a_cache_of_fixed_size_is_masked(edge):
    # As an exported model is run: anything in the cache, and a mask of those that are frames.
    model = replaced(TestConformer, edge=edge)
    x, _ = batch()
    chunk, size = 4, 8
    att_cache, cnn_cache = torch.randn(LAYERS, H, size, 2 * D // H), torch.zeros(LAYERS, 1, D, 4)
    outs = []
    with torch.no_grad():
        whole, _ = model(x[:1], torch.tensor([T]), decoding_chunk_size=-1)
        for offset in range(0, T, chunk):
            mask = torch.arange(size + chunk)[None, None] >= size - offset
            y, att_cache, cnn_cache = model.forward_chunk(
                x[:1, offset : offset + chunk], offset + size, size, att_cache, cnn_cache, mask
            )
            assert att_cache.shape == (LAYERS, H, size, 2 * D // H)
            outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_that_cannot_be_exact_are_refused(kind):
    x = batch()[0][:1]
    with torch.no_grad():
        replaced(kind, left=3).forward_chunk_by_chunk(x, 3, 1)
        with pytest.raises(ValueError, match=r"cut to 3 frames, the window needs left=4"):
            replaced(kind, left=4).forward_chunk_by_chunk(x, 3, 1)
        with pytest.raises(ValueError, match=r"right=0, got right=2"):
            replaced(kind, right=2).forward_chunk_by_chunk(x, 4, -1)
        # A cache that is short because the stream is young is no fault.
        replaced(kind, left=20).forward_chunk_by_chunk(x, 3, -1)


def test_the_call_and_what_it_returns():
    model = replaced(TestConformer)
    attention = model.encoders[0].self_attn
    x = torch.randn(1, 5, D)
    pos = torch.zeros(1, 5, D)
    fake, empty = torch.ones((0, 0, 0), dtype=torch.bool), torch.zeros(0, 0, 0, 0)
    out, (marks, values) = attention(x, x, x, fake, pos, (empty, empty))
    assert marks.shape == values.shape == (1, H, 5, D // H)
    assert torch.equal(out, attention(x, x, x)[0])
    # Older releases: one tensor, given by keyword in the Transformer.
    old, cache = attention(x, x, x, fake, pos, cache=empty)
    assert torch.equal(old, out) and cache.shape == (1, H, 5, 2 * D // H)
    after, cache = attention(x, x, x, fake, pos, cache=cache)
    assert cache.shape == (1, H, 10, 2 * D // H)
    twice = torch.cat([x, x], 1)
    torch.testing.assert_close(after, attention(twice, twice, twice)[0][:, 5:])
    # In training the cache comes back as it was given.
    given = (empty, empty)
    assert attention.train()(x, x, x, fake, pos, given)[1] is given
    with pytest.raises(TypeError, match="window"):
        attention(x, x, x, window=3)


def test_masks_of_another_kind_are_refused():
    attention = replaced(TestConformer).encoders[0].self_attn
    x = torch.randn(2, 5, D)
    with pytest.raises(ValueError, match=r"mask must have shape.*B=2, T=5 and S=5, got \[2, 4, 5"):
        attention(x, x, x, torch.ones(2, 4, 5, dtype=torch.bool))
    mask = torch.ones(2, 1, 5, dtype=torch.bool)
    mask[1, 0, 2] = False
    with pytest.raises(ValueError, match="holes in sequence 1"):
        attention(x, x, x, mask)
    with pytest.raises(ValueError, match=r"got 1\.0"):
        attention(x, x, x, torch.ones(2, 1, 5))  # 0/1 of a floating point type: no bias
    out = attention(x, x, x, torch.ones(2, 1, 5, dtype=torch.int64))[0]
    assert torch.equal(out, attention(x, x, x)[0])


def test_layers_of_older_releases_are_known():
    # They have no folder models.
    model = TestConformer().original()
    for module in model.modules():
        if type(module).__module__.startswith("wenet.models"):
            new = type(type(module).__name__, (type(module),), {})
            new.__module__ = type(module).__module__.replace("wenet.models.", "wenet.")
            module.__class__ = new
    assert replace_attention(model).replaced == TestConformer.paths


def test_decoders_stay():
    class DecoderLayer(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.self_attn = attention

    DecoderLayer.__module__ = "wenet.models.transformer.decoder_layer"
    DecoderLayer.__qualname__ = "DecoderLayer"
    model = TestTransformer().original()
    model.decoder = DecoderLayer(type(model.encoders[0].self_attn)(H, D, 0.0))
    report = replace_attention(model)
    assert report.replaced == TestTransformer.paths
    assert any("left as it is: decoder.self_attn" in warning for warning in report.warnings)
