"""ESPnet's encoders with replaced attention."""

import pytest
import torch
from espnet2.asr.encoder.branchformer_encoder import BranchformerEncoder
from espnet2.asr.encoder.conformer_encoder import ConformerEncoder
from espnet2.asr.encoder.e_branchformer_encoder import EBranchformerEncoder
from espnet2.asr.encoder.transformer_encoder import TransformerEncoder
from host_battery import LAYERS, D, H, ModuleBattery, T, batch
from torch import nn

from ldsa_nn import replace_attention


class _Espnet(ModuleBattery):
    kind: type
    name = "self_attn"
    options: dict = {}

    @property
    def paths(self):
        return [f"encoders.{i}.{self.name}" for i in range(LAYERS)]

    def build(self, dropout=0.0):
        return self.kind(
            D, output_size=D, attention_heads=H, num_blocks=LAYERS, input_layer="linear",
            dropout_rate=dropout, positional_dropout_rate=dropout, attention_dropout_rate=dropout,
            **self.options,
        )  # fmt: skip

    def run(self, model, x, lengths):
        return model(x, lengths)[0]


class TestConformer(_Espnet):
    """Without its convolution, which lets padding leak."""

    kind = ConformerEncoder
    warned = ["ESPnet's Conformer", "padding leak"]
    options = dict(
        linear_units=32, rel_pos_type="latest", pos_enc_layer_type="rel_pos",
        selfattention_layer_type="rel_selfattn", use_cnn_module=False,
    )  # fmt: skip


class TestConformerAbsolute(TestConformer):
    options = {
        **TestConformer.options, "pos_enc_layer_type": "abs_pos",
        "selfattention_layer_type": "selfattn",
    }  # fmt: skip


class TestTransformer(_Espnet):
    kind = TransformerEncoder
    warned = ["ESPnet's Transformer"]
    options = dict(linear_units=32)


class TestBranchformer(_Espnet):
    """With convolutions of one frame."""

    kind = BranchformerEncoder
    name = "attn"
    warned = ["ESPnet's Branchformer"]
    options = dict(cgmlp_linear_units=32, cgmlp_conv_kernel=1, use_flash_attn=False)


class TestEBranchformer(TestBranchformer):
    kind = EBranchformerEncoder
    warned = ["ESPnet's E-Branchformer"]
    options = {**TestBranchformer.options, "merge_conv_kernel": 1}


class _Legacy(TestConformer):
    """Of old checkpoints: their own attention depends on the length of the batch."""

    options = {**TestConformer.options, "rel_pos_type": "legacy"}


def test_legacy_positions():
    assert _Legacy().error(_Legacy().replaced(), garbage=50.0) < 1e-5


def cached_steps(kind, edge="zero", masked=True):
    """Frames of a layer's steps, and of the whole.

    One query frame with all keys and values, as the host's layers call where they are given a
    cache: in a batch, the shorter utterance's last steps are padding.
    """
    layer = kind().replaced(right=0, edge=edge).encoders[0]
    x, lengths = batch()
    lengths = lengths if masked else torch.full_like(lengths, T)
    mask = (torch.arange(T) < lengths[:, None])[:, None] if masked else None

    def step(frames, cache):
        part = x[:, :frames]
        if kind is TestConformer:
            part = part, torch.zeros(1, 2 * frames - 1, D)
        out, _ = layer(part, None if mask is None else mask[:, :, :frames], cache=cache)
        return out[0] if kind is TestConformer else out

    with torch.no_grad():
        whole = step(T, None)
        cache = torch.zeros(len(lengths), 0, D)
        for frames in range(1, T + 1):
            cache = step(frames, cache)
    inside = torch.arange(T) < lengths[:, None]
    return cache[inside], whole[inside]


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
@pytest.mark.parametrize("kind", [TestConformer, TestTransformer])
@pytest.mark.parametrize("masked", [True, False])
def test_cached_steps_equal_the_whole(kind, edge, masked):
    torch.testing.assert_close(*cached_steps(kind, edge, masked), atol=1e-6, rtol=1e-5)


ROWS = {
    "Conformer, no convolution": (TestConformer, lambda: cached_steps(TestConformer)),
    "Transformer": (TestTransformer, lambda: cached_steps(TestTransformer)),
    "Branchformer, kernel 1": (TestBranchformer, None),
    "E-Branchformer, kernels 1": (TestEBranchformer, None),
}


def test_the_call_and_what_it_returns():
    relative = TestConformer().replaced().encoders[0].self_attn
    absolute = TestTransformer().replaced().encoders[0].self_attn
    x, pos = torch.randn(2, 5, D), torch.zeros(1, 9, D)
    mask = torch.tensor([[[True] * 5], [[True, True, True, False, False]]])
    for call in (
        lambda mask: relative(x, x, x, pos, mask),
        lambda mask: absolute(x, x, x, mask),
        lambda mask: absolute(x, x, x, mask, expand_kv=False),
    ):
        out = call(mask)
        assert type(out) is torch.Tensor and out.shape == x.shape
        assert (out[1, 3:] == 0).all()
        # Polarity is the host's, whatever the dtype; chunk masks count by their diagonal.
        assert torch.equal(call(mask.long()), out)
        chunks = torch.arange(5)[:, None] // 2 >= torch.arange(5) // 2
        assert torch.equal(call(mask & chunks & mask.transpose(1, 2)), out)
        free = torch.ones(2, 1, 5, dtype=torch.bool)
        assert torch.equal(call(None), call(free))
        # An additive mask would be read as its opposite.
        with pytest.raises(TypeError, match=r"nonzero = keep, got torch\.float32"):
            call(torch.zeros(2, 1, 5).masked_fill(~mask, -torch.inf))
    with pytest.raises(TypeError, match="window"):
        absolute(x, x, x, mask, window=3)
    with pytest.raises(ValueError, match=r"cached step .*right=0, got right=2"):
        absolute(x[:, -1:], x, x, None)
    with pytest.raises(ValueError, match=r"mask must have shape .*S=5, got \[2, 1, 4\]"):
        absolute(x, x, x, mask[:, :, :4])
    with pytest.raises(ValueError, match="holes in sequence 0"):
        absolute(x, x, x, mask & (torch.arange(5) != 1))
    with pytest.raises(ValueError, match="value must have query's 5 frames or more, got 4"):
        absolute(x, x[:, :4], x[:, :4], None)


def test_layers_of_both_packages_are_known():
    # A later release moves them into espnet2.
    model = TestTransformer().original()
    for module in model.modules():
        if type(module).__module__.startswith("espnet.nets"):
            new = type(type(module).__name__, (type(module),), {})
            new.__module__ = type(module).__module__.replace("espnet.", "espnet2.legacy.")
            module.__class__ = new
    assert replace_attention(model).replaced == TestTransformer().paths


def test_decoders_stay():
    class DecoderLayer(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.self_attn = attention

    DecoderLayer.__module__ = "espnet.nets.pytorch_backend.transformer.decoder_layer"
    DecoderLayer.__qualname__ = "DecoderLayer"
    model = TestTransformer().original()
    model.decoder = DecoderLayer(type(model.encoders[0].self_attn)(H, D, 0.0))
    report = replace_attention(model)
    assert report.replaced == TestTransformer().paths
    assert any("left as it is: decoder.self_attn" in warning for warning in report.warnings)
