"""NeMo's encoder with replaced attention."""

import copy
import pickle
import sys

import pytest
import torch
from host_battery import LAYERS, D, H, ModuleBattery, T, batch
from nemo.collections.asr.modules.conformer_encoder import ConformerEncoder
from nemo.collections.asr.parts.submodules.multi_head_attention import MultiHeadAttention

from ldsa_nn import LocalDenseSynthesizerAttention, hosts, load_replaced, replace_attention


class TestRelative(ModuleBattery):
    paths = [f"layers.{i}.self_attn" for i in range(LAYERS)]
    warned = ["NeMo's Conformer", "att_context_size", "cache-aware", "change_attention_model"]
    options = dict(
        self_attention_model="rel_pos", att_context_size=[-1, -1], att_context_style="regular"
    )

    def build(self, dropout=0.0, **options):
        return ConformerEncoder(
            feat_in=D, n_layers=LAYERS, d_model=D, n_heads=H, ff_expansion_factor=2,
            conv_kernel_size=5, conv_norm_type="layer_norm", conv_context_size="causal",
            dropout=dropout, dropout_pre_encoder=dropout, dropout_emb=dropout, dropout_att=dropout,
            **{**self.options, **options},
        )  # fmt: skip

    def run(self, model, x, lengths):
        out, _ = model(audio_signal=x, length=lengths, bypass_pre_encode=True)
        return out.transpose(1, 2)


class TestAbsolute(TestRelative):
    options = {**TestRelative.options, "self_attention_model": "abs_pos"}


class TestLocal(TestRelative):
    options = dict(
        self_attention_model="rel_pos_local_attn", att_context_size=[6, 6],
        att_context_style="regular",
    )  # fmt: skip


class TestChunks(TestRelative):
    options = {
        **TestRelative.options, "att_context_size": [8, 3], "att_context_style": "chunked_limited",
    }  # fmt: skip


def streaming(kind=TestRelative, style="chunked_limited", context=(8, 3), right=0, **options):
    model = kind().original(att_context_style=style, att_context_size=list(context))
    torch.manual_seed(2)
    replace_attention(model, **{"left": 3, "right": right, "use_bias": True, **options})
    model.setup_streaming_params()
    return model


def stream(model, x, chunk, ahead=0):
    """Feed x [B,T,D] as NeMo's streams are fed: `ahead` frames of each call come again."""
    caches = model.get_initial_cache_state(batch_size=x.shape[0])
    outs = []
    with torch.no_grad():
        for start in range(0, x.shape[1], chunk):
            part = x[:, start : start + chunk + ahead]
            last = start + chunk + ahead >= x.shape[1]
            rets = model(
                audio_signal=part, length=torch.full((x.shape[0],), part.shape[1]),
                cache_last_channel=caches[0], cache_last_time=caches[1],
                cache_last_channel_len=caches[2], bypass_pre_encode=True,
            )  # fmt: skip
            out, _, *caches = rets
            caches[0] = caches[0][:, :, -model.streaming_cfg.last_channel_cache_size :]
            outs.append(out.transpose(1, 2)[:, : None if last else chunk])
            if last:
                break
    return torch.cat(outs, 1)


@torch.no_grad()
def streamed(kind=TestRelative, style="chunked_limited", context=(8, 3), chunk=4, edge="zero"):
    """Frames of a stream, and of the whole."""
    model = streaming(kind, style, context, edge=edge)
    x, _ = batch()
    whole = kind().run(model, x, torch.full((x.shape[0],), T))
    return stream(model, x, chunk), whole


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
@pytest.mark.parametrize(
    ("style", "context", "chunk"),
    [
        ("chunked_limited", (8, 3), 4),
        ("chunked_limited", (3, 0), 1),
        ("chunked_limited", (8, 7), 8),
        ("regular", (3, 0), 5),
        ("regular", (8, 0), 1),
        ("regular", (30, 0), 7),
    ],
)
def test_streamed_equals_offline(edge, style, context, chunk):
    both = streamed(TestRelative, style, context, chunk, edge)
    torch.testing.assert_close(*both, atol=1e-6, rtol=1e-5)


ROWS = {
    "Conformer, rel_pos": (TestRelative, streamed),
    "Conformer, abs_pos": (TestAbsolute, lambda: streamed(TestAbsolute)),
    "Conformer, rel_pos_local_attn": (TestLocal, None),
}


@pytest.mark.parametrize("edge", ["zero", "renormalize"])
def test_a_stream_may_look_ahead_where_nemo_feeds_frames_ahead(edge):
    model = streaming(TestRelative, "regular", (8, 2), right=2, edge=edge)
    assert model.streaming_cfg.cache_drop_size == 2 * LAYERS
    x, _ = batch()
    whole = TestRelative().run(model, x, torch.full((x.shape[0],), T))
    streamed = stream(model, x, 3, ahead=2 * LAYERS)
    torch.testing.assert_close(streamed, whole, atol=1e-6, rtol=1e-5)


def test_streams_that_cannot_be_exact_are_refused():
    x, _ = batch()
    with pytest.raises(ValueError, match=r"cache holds 8 frames, the window needs left=9"):
        stream(streaming(left=9), x, 4)
    stream(streaming(left=8), x, 4)
    with pytest.raises(ValueError, match=r"looks 0 frames ahead .*right=1"):
        stream(streaming(right=1), x, 4)
    with pytest.raises(ValueError, match="rel_pos_local_attn does not stream"):
        stream(streaming(TestLocal, "regular", (6, 6), left=3), x, 4)
    attention = streaming().layers[0].self_attn
    with pytest.raises(ValueError, match="mask that tells which"):
        attention(query=x, key=x, value=x, mask=None, cache=torch.zeros(3, 8, D))


def test_the_call_and_what_it_returns():
    model = streaming()
    attention, x = model.layers[0].self_attn, torch.randn(2, 5, D)
    out = attention(query=x, key=x, value=x, mask=None, pos_emb=None)
    masked = torch.zeros(2, 5, 8 + 5, dtype=torch.bool)
    masked[:, :, :8] = True
    cache = torch.full((2, 8, D), torch.nan)
    after, cache = attention(query=x, key=x, value=x, mask=masked, pos_emb=None, cache=cache)
    assert torch.equal(after, out)
    assert cache.shape == (2, 8, D) and torch.equal(cache[:, 3:], x)
    integers = torch.zeros(2, 5, 5, dtype=torch.int64)
    assert torch.equal(attention(query=x, key=x, value=x, mask=integers, cache=None), out)
    with pytest.raises(TypeError, match=r"nonzero = masked, got torch\.float32"):
        attention(query=x, key=x, value=x, mask=integers.float(), cache=None)
    with pytest.raises(TypeError, match="pad_mask"):
        attention(query=x, key=x, value=x, pad_mask=None)
    local = TestLocal().replaced(right=0).layers[0].self_attn
    padding = torch.tensor([[False] * 5, [False, False, True, True, True]])
    out = local(query=x, key=x, value=x, pad_mask=padding, pos_emb=None, cache=None)
    assert (out[1, 2:] == 0).all()


def test_the_adapter_is_one_of_nemos_attentions_without_their_parameters():
    model = streaming()
    for layer in model.layers:
        assert isinstance(layer.self_attn, MultiHeadAttention)
        assert [name for name, _ in layer.self_attn.named_children()] == ["layer"]
        assert layer.self_attn.cache_drop_size == 0


def test_changing_the_attention_model_is_refused():
    model = streaming()
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match="change the attention model first"):
            one.change_attention_model("abs_pos", [-1, -1])
        assert isinstance(one.layers[0].self_attn.layer, LocalDenseSynthesizerAttention)


def test_a_failed_load_leaves_the_model_as_it_was():
    model = TestRelative().original()
    old = [layer.self_attn for layer in model.layers]
    with pytest.raises(RuntimeError, match="Missing key"):
        load_replaced(model, {})
    assert [layer.self_attn for layer in model.layers] == old
    assert model.change_attention_model.__func__ is ConformerEncoder.change_attention_model
    assert "change_attention_model" not in vars(model)


def test_nemo_without_its_speech_models_is_left_alone(monkeypatch):
    assert "nemo" in sys.modules and "nemo" in hosts.loaded()
    monkeypatch.delitem(sys.modules, MultiHeadAttention.__module__)
    assert "nemo" not in hosts.loaded()
