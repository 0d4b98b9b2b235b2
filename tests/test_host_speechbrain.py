"""SpeechBrain's encoders with replaced attention: the toolkit itself."""

import sys

import pytest
import torch
from host_battery import LAYERS, D, H, ModuleBattery, T, batch
from speechbrain.lobes.models.transformer.Branchformer import BranchformerEncoder
from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder
from speechbrain.lobes.models.transformer.Transformer import TransformerEncoder
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from speechbrain.nnet.attention import RelPosEncXL
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig
from torch import nn

from ldsa_nn import load_replaced, replace_attention

# SpeechBrain leaves proxies for modules that it moved. Asked for anything, as Hypothesis asks all
# modules for their file, they import what they stand for, and fail where that lacks a package.
for _name, _module in list(sys.modules.items()):
    if type(_module).__module__ == "speechbrain.utils.importutils":
        del sys.modules[_name]


class _SpeechBrain(ModuleBattery):
    attention = "RelPosMHAXL"
    name = "mha_layer"

    @property
    def paths(self):
        return [f"layers.{i}.{self.name}" for i in range(LAYERS)]

    def run(self, model, x, lengths, **masks):
        positions = RelPosEncXL(D)(x) if self.attention == "RelPosMHAXL" else None
        padding = torch.arange(x.shape[1]) >= lengths[:, None]
        return model(x, src_key_padding_mask=padding, pos_embs=positions, **masks)[0]


class TestConformer(_SpeechBrain):
    """With causal convolutions: others let padding leak."""

    warned = ["SpeechBrain's Conformer", "forward_streaming", "padding leak", "causal=True"]

    def build(self, dropout=0.0, causal=True):
        return ConformerEncoder(
            LAYERS, D, 32, H, kernel_size=5, dropout=dropout, attention_type=self.attention,
            causal=causal,
        )  # fmt: skip


class TestConformerRegular(TestConformer):
    attention = "regularMHA"


class TestConformerRoPE(TestConformer):
    attention = "RoPEMHA"


class TestTransformer(_SpeechBrain):
    attention = "regularMHA"
    name = "self_att"
    warned = ["SpeechBrain's Transformer"]

    def build(self, dropout=0.0):
        return TransformerEncoder(
            LAYERS, H, 32, d_model=D, dropout=dropout, attention_type=self.attention,
            normalize_before=True,
        )  # fmt: skip


class TestTransformerRelative(TestTransformer):
    attention = "RelPosMHAXL"


class Silent(nn.Module):
    def forward(self, x, *arguments, **options):
        return torch.zeros_like(x)


class TestBranchformer(_SpeechBrain):
    """Without its convolutions, which let padding leak and refuse short utterances."""

    warned = ["SpeechBrain's Branchformer", "padding leak"]

    def build(self, dropout=0.0):
        model = BranchformerEncoder(
            LAYERS, D, H, kernel_size=5, dropout=dropout, attention_type=self.attention,
            csgu_linear_units=32,
        )  # fmt: skip
        for layer in model.layers:
            layer.convolution_branch = Silent()
        return model


def test_padding_leaks_through_the_convolutions_alone():
    test, (x, lengths) = TestConformer(), batch()

    def leak(model):
        with torch.no_grad():
            together, alone = test.run(model, x, lengths), test.alone(model, x, lengths)
        return (together[1, : lengths[1]] - alone[1]).abs().amax(1)

    model, original = test.build(causal=False).eval(), test.build(causal=False).eval()
    replace_attention(model, left=3, right=2)
    for leaked in (leak(model), leak(original)):
        assert leaked[-1] > 1e-3  # what report.warnings tells, and the host's own
    reach = LAYERS * (5 // 2 + 2)  # the convolutions, and the attention carries on what they leak
    assert leak(model)[:-reach].max() < 1e-5


def speech_model(decoder=0, **options):
    torch.manual_seed(0)
    options = {"attention_type": "RelPosMHAXL", "positional_encoding": None, **options}
    return TransformerASR(
        5, 8, D, H, LAYERS, decoder, 32, 0.0, encoder_module="conformer", normalize_before=True,
        kernel_size=5, **{"causal": False, **options},
    ).eval()  # fmt: skip


def test_speech_recogniser():
    model = speech_model(causal=True)
    report = replace_attention(model, left=3, right=0)
    assert report.replaced == [f"encoder.layers.{i}.mha_layer" for i in range(LAYERS)]
    x, relative = torch.randn(2, T, 8), torch.tensor([1.0, 0.5])
    out = model.encode(x, relative)
    alone = model.encode(x[1:, : T // 2])[0]
    torch.testing.assert_close(out[1, : T // 2], alone, atol=1e-5, rtol=0)
    fresh = speech_model(causal=True)
    load_replaced(fresh, model.state_dict(), left=3, right=0)
    assert torch.equal(fresh.encode(x, relative), out)


def test_decoders_stay():
    model = speech_model(
        decoder=1, attention_type="regularMHA", positional_encoding="fixed_abs_sine"
    )
    report = replace_attention(model, left=3, right=2)
    assert report.replaced == [f"encoder.layers.{i}.mha_layer" for i in range(LAYERS)]
    stays = [warning for warning in report.warnings if warning.startswith("left as it is: decoder")]
    assert stays and all("another sequence" in warning for warning in stays)


def test_hypermixing_is_unknown():
    model = speech_model(attention_type="hypermixing")
    with pytest.raises(ValueError, match=r"unknown class speechbrain\.nnet\.hypermixing"):
        replace_attention(model)


@pytest.mark.parametrize("causal", [True, False])
def test_causal_models_need_a_causal_window(causal):
    x, relative = torch.randn(2, T, 8), torch.tensor([1.0, 0.5])
    later = x.clone()
    later[:, 10:] = 9.0
    model = speech_model(causal=causal)
    replace_attention(model, left=3, right=0)
    out = model.encode(x, relative)
    # Before the change, the causal model alone is what it was: its convolution is causal too.
    assert torch.equal(model.encode(later, relative)[:, :10], out[:, :10]) == causal
    model = speech_model(causal=causal)
    replace_attention(model, left=3, right=2)
    if causal:
        with pytest.raises(ValueError, match=r"forbids later frames .*right=0, got right=2"):
            model.encode(x, relative)
    else:
        model.encode(x, relative)


@torch.no_grad()
def streamed(edge="zero", chunk=4):
    """Frames of a stream, and of the whole.

    Offline, Dynamic Chunk Training hides other chunks from the attention, which needs no following,
    and from the convolution.
    """
    model = speech_model()
    replace_attention(model, left=4, right=0, edge=edge)
    config = DynChunkTrainConfig(chunk, 1)
    context = model.make_streaming_context(config)
    x = torch.randn(2, T, 8)
    whole = model.encode(x, dynchunktrain_config=config)
    return torch.cat(
        [model.encode_streaming(part, context) for part in x.split(chunk, 1)], 1
    ), whole


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
@pytest.mark.parametrize("chunk", [4, 6, 24])
def test_streamed_equals_offline(edge, chunk):
    torch.testing.assert_close(*streamed(edge, chunk), atol=2e-6, rtol=1e-5)


ROWS = {"Branchformer, no convolution": (TestBranchformer, None)}


def test_the_call_and_what_it_returns():
    model = TestConformer().replaced()
    attention, x = model.layers[0].mha_layer, torch.randn(2, T, D)
    out, weights = attention(x, x, x, attn_mask=None, key_padding_mask=None, pos_embs=None)
    assert weights is None
    assert torch.equal(attention(x, x, x, return_attn_weights=False), out)
    free = torch.zeros(T, T)
    assert torch.equal(attention(x, x, x, attn_mask=free)[0], out)
    assert torch.equal(attention(x, x, x, attn_mask=free != 0)[0], out)
    far = torch.ones(T, T, dtype=torch.bool).triu(3)  # right is 2
    assert torch.equal(attention(x, x, x, attn_mask=far)[0], out)
    with pytest.raises(ValueError, match="forbids later frames"):
        attention(x, x, x, attn_mask=far.triu(2) | torch.ones_like(far).triu(2))
    with pytest.raises(TypeError, match="window"):
        attention(x, x, x, window=3)
    for wrong in (free[0], free[:-1], free[None, None]):
        with pytest.raises(ValueError, match=rf"attn_mask must have shape .*T={T}, got \["):
            attention(x, x, x, attn_mask=wrong)
    for wrong in (far.long(), far.tolist()):
        with pytest.raises(TypeError, match=r"attn_mask must be .*, got (torch\.int64|list)"):
            attention(x, x, x, attn_mask=wrong)
    padding = torch.zeros(2, T, dtype=torch.bool)
    padding[0, 5] = True
    with pytest.raises(ValueError, match="holes in sequence 0"):
        attention(x, x, x, key_padding_mask=padding)
    with pytest.raises(TypeError, match=r"int64.*mask == 0"):
        attention(x, x, x, key_padding_mask=padding.long())
    left_padding = torch.arange(T) < torch.tensor([0, 9])[:, None]
    out, _ = attention(x, x, x, key_padding_mask=left_padding)
    torch.testing.assert_close(out[1, 9:], attention(x[1:, 9:], x[1:, 9:], x[1:, 9:])[0][0])
    additive = torch.zeros(2, T).masked_fill(left_padding, -torch.inf)
    assert torch.equal(attention(x, x, x, key_padding_mask=additive)[0], out)


def test_layers_compile_whole():
    torch._dynamo.reset()
    model, (x, lengths) = TestConformer().replaced(), batch()
    layer = model.layers[0]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    call = dict(
        src_key_padding_mask=torch.arange(T) >= lengths[:, None], pos_embs=RelPosEncXL(D)(x)
    )
    torch.testing.assert_close(compiled(x, **call)[0], layer(x, **call)[0])
