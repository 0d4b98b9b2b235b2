"""torchaudio's Conformer, wav2vec 2.0 and WavLM with replaced attention."""

import copy
import math
import pickle

import pytest
import torch
from host_cases import TOOLKITS
from host_cases import D as D_HOST
from torch import nn

from ldsa_nn import LocalDenseSynthesizerAttention, load_replaced, replace_attention

models = pytest.importorskip("torchaudio.models")

D, H, T, KERNEL = 16, 4, 40, 5
LENGTHS = [T, 23, 2]


def conformer(layers=2, **options):
    torch.manual_seed(0)
    options = dict(num_heads=H, ffn_dim=32, depthwise_conv_kernel_size=KERNEL, **options)
    return models.Conformer(D, num_layers=layers, **options)


def replaced(layers=2, left=3, right=2, options=None, **model_options):
    model = conformer(layers, **model_options)
    replace_attention(model, left=left, right=right, use_bias=True, **options or {})
    return model.eval()


def batch():
    torch.manual_seed(1)
    return torch.randn(len(LENGTHS), T, D), torch.tensor(LENGTHS)


@pytest.mark.parametrize("convolution_first", [True, False])
@pytest.mark.parametrize("use_group_norm", [True, False])
def test_the_layer_is_what_runs(convolution_first, use_group_norm):
    model = replaced(convolution_first=convolution_first, use_group_norm=use_group_norm)
    x, lengths = batch()
    expected = x
    padding = torch.arange(T) >= lengths[:, None]
    for layer in model.conformer_layers:
        expected = expected + 0.5 * layer.ffn1(expected)
        if convolution_first:
            expected = expected + layer.conv_module(expected)
        normed = layer.self_attn_layer_norm(expected)
        assert type(layer.self_attn.layer) is LocalDenseSynthesizerAttention
        expected = expected + layer.self_attn.layer(normed, mask=~padding)
        if not convolution_first:
            expected = expected + layer.conv_module(expected)
        expected = layer.final_layer_norm(expected + 0.5 * layer.ffn2(expected))
    out, out_lengths = model(x, lengths)
    torch.testing.assert_close(out, expected)
    assert torch.equal(out_lengths, lengths)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(x, lengths)[0], out)


def test_report():
    report = replace_attention(conformer())
    assert report.replaced == [f"conformer_layers.{i}.self_attn" for i in range(2)]
    assert report.new_parameters == [
        f"conformer_layers.{i}.self_attn.layer.{w}.weight"
        for i in range(2)
        for w in ("w1", "w2", "w3", "w_out")
    ]
    (warning,) = report.warnings
    assert "torchaudio.models.Conformer" in warning
    assert "convolution" in warning and "padding leak" in warning and "not causal" in warning


@pytest.mark.parametrize("model", ["layer", "wrapper", "two"])
def test_wherever_the_conformer_is(model):
    model = {
        "layer": conformer(1).conformer_layers[0],
        "wrapper": nn.ModuleDict({"asr": nn.ModuleDict({"encoder": conformer(1)})}),
        "two": nn.ModuleList([conformer(1), nn.Linear(2, 2), conformer(2)]),
    }[model]
    report = replace_attention(model, left=1, right=1)
    found = [m for m in model.modules() if isinstance(m, LocalDenseSynthesizerAttention)]
    assert len(found) == len(report.replaced)
    assert not [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    assert all(hasattr(model.get_submodule(path), "layer") for path in report.replaced)


def test_conformer_beside_a_torch_encoder():
    layer = nn.TransformerEncoderLayer(D, H, 32, batch_first=True)
    model = nn.ModuleList([conformer(1), nn.TransformerEncoder(layer, 1)])
    one = copy.deepcopy(model)
    report = replace_attention(one, host="torchaudio")
    assert report.replaced == ["0.conformer_layers.0.self_attn"]
    assert any(w.startswith("left as it is: 1.layers.0.self_attn") for w in report.warnings)
    assert one[1].use_nested_tensor
    report = replace_attention(model)
    assert report.replaced == ["0.conformer_layers.0.self_attn", "1.layers.0.self_attn"]
    assert len(report.warnings) == 2


@pytest.mark.parametrize("left_padded", [False, True])
@pytest.mark.parametrize("length", [50, 200])
def test_batch_mates_change_nothing_in_the_attention(length, left_padded):
    # As the host calls it: [T,B,D], bool [B,T] with True = padding.
    attention = replaced(left=7, right=7).conformer_layers[0].self_attn
    x = torch.randn(37, 1, D)
    alone, none = attention(query=x, key=x, value=x, key_padding_mask=None, need_weights=False)
    assert none is None
    span = slice(length - 37, length) if left_padded else slice(0, 37)
    padding = torch.ones(3, length, dtype=torch.bool)
    padding[0] = False
    padding[1, span] = False
    for garbage in (1e3, math.nan, math.inf):
        padded = torch.full((length, 3, D), garbage)
        padded[:, 0] = 1.0
        padded[span, 1] = x[:, 0]
        for mask in (padding, torch.zeros(3, length).masked_fill(padding, -math.inf)):
            out, _ = attention(
                query=padded, key=padded, value=padded, key_padding_mask=mask, need_weights=False
            )
            torch.testing.assert_close(out[span, 1], alone[:, 0], atol=1e-5, rtol=0)
            assert (out[:, 2] == 0).all()
    deaf = replaced(left=7, right=7, options={"honor_mask": False})
    deaf.load_state_dict(replaced(left=7, right=7).state_dict())
    padded = torch.nan_to_num(padded, posinf=1e3)
    out, _ = deaf.conformer_layers[0].self_attn(padded, padded, padded, key_padding_mask=padding)
    assert (out[span, 1] - alone[:, 0]).abs().max() > 0.1


def leak(model, x, lengths):
    """How far the padded batch is from the second utterance alone, frame by frame."""
    with torch.no_grad():
        together, alone = (model(x, lengths)[0], model(x[1:2, : lengths[1]], lengths[1:2])[0])
    return (together[1, : lengths[1]] - alone[0]).abs().amax(1)


def test_padding_leaks_through_the_convolutions_alone():
    x, lengths = batch()
    reach = 2 * (KERNEL // 2 + 2)  # two convolutions, and the attention carries on what they leak
    leaked = leak(replaced(right=2), x, lengths)
    assert leaked[-1] > 1e-3  # what report.warnings tells
    assert leaked[:-reach].max() < 1e-5
    original = leak(conformer().eval(), x, lengths)
    assert original[-1] > 1e-3  # the host's own, and its attention carries it everywhere
    assert original[:-reach].max() > 1e-5

    for model in (replaced(), conformer().eval()):
        for layer in model.conformer_layers:
            layer.conv_module = nn.Identity()
        assert leak(model, x, lengths).max() < 1e-5
    deaf = replaced(options={"honor_mask": False})
    for layer in deaf.conformer_layers:
        layer.conv_module = nn.Identity()
    assert leak(deaf, x, lengths).max() > 1e-3


@pytest.mark.parametrize("right", [0, 1])
def test_only_the_convolution_looks_ahead_where_right_is_0(right):
    model = replaced(layers=1, left=4, right=right)
    x, lengths = batch()
    changed = x.clone()
    changed[0, 20:] = 9.0

    def first_difference():
        different = (model(changed, lengths)[0] - model(x, lengths)[0])[0].abs().amax(1) > 0
        return int(different.nonzero()[0])

    assert first_difference() == 20 - KERNEL // 2 - right
    model.conformer_layers[0].conv_module = nn.Identity()
    assert first_difference() == 20 - right


def test_training_moves_the_new_parameters():
    model = conformer(dropout=0.1)
    report = replace_attention(model, left=3, right=2)
    model.train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, lengths = batch()
    model(x, lengths)[0].square().mean().backward()
    optimizer.step()
    after = dict(model.named_parameters())
    assert all(not torch.equal(after[name], before[name]) for name in report.new_parameters)


def test_lengths_must_fit_the_batch():
    x, lengths = batch()
    with pytest.raises(ValueError, match=r"mask must have shape.*T=40.*\[3, 39\]"):
        replaced()(x, lengths.clamp(max=T - 1))


def test_emformer_is_no_host():
    model = models.Emformer(D, H, 32, 2, 4)
    with pytest.raises(ValueError, match="Emformer is no drop-in host") as error:
        replace_attention(model)
    assert "emformer_layers.0.attention" in str(error.value)
    report = replace_attention(nn.ModuleList([model, conformer(1)]))
    assert report.replaced == ["1.conformer_layers.0.self_attn"]
    assert any("Emformer" in warning for warning in report.warnings)


def test_unknown_classes_are_named():
    class Mine(type(conformer(1).conformer_layers[0])):
        pass

    model = conformer()
    model.conformer_layers[1] = Mine(D, 32, H, KERNEL)
    old = model.conformer_layers[0].self_attn
    with pytest.raises(ValueError, match=r"conformer_layers.1.self_attn.*Mine"):
        replace_attention(model)
    assert model.conformer_layers[0].self_attn is old
    wav2vec2 = nn.ModuleList([models.wav2vec2.components.SelfAttention(D, H)])
    with pytest.raises(ValueError, match=r"wav2vec2\.components\.SelfAttention"):
        replace_attention(wav2vec2)


def test_save_and_load(tmp_path):
    options = dict(left=[4, 2], right=1, grouped_w2=True, edge="renormalize")
    model = conformer().eval()
    replace_attention(model, **options)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    x, lengths = batch()
    expected = model(x, lengths)[0]
    torch.manual_seed(7)
    fresh = models.Conformer(D, H, 32, 2, KERNEL).eval()
    load_replaced(fresh, tmp_path / "model.pt", **options)
    assert torch.equal(fresh(x, lengths)[0], expected)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x, lengths)[0], expected)


def test_pretrained_weights_come_first():
    pretrained = conformer().state_dict()
    model = conformer()
    model.load_state_dict(pretrained)
    replace_attention(model, init_from_old=True)
    for name, value in pretrained.items():
        if ".self_attn." not in name:
            assert torch.equal(model.state_dict()[name], value)
    first = "conformer_layers.0.self_attn"
    assert torch.equal(
        model.get_parameter(f"{first}.layer.w3.weight"), pretrained[f"{first}.in_proj_weight"][-D:]
    )
    other = conformer()
    with pytest.raises(RuntimeError, match=r"Missing key.*self_attn\.layer\.w1\.weight"):
        load_replaced(other, pretrained)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in pretrained.items())


def test_layers_compile_whole():
    # The Conformer itself reads lengths.max() back and so breaks the graph before its layers.
    torch._dynamo.reset()
    model = replaced().train()
    layer = model.conformer_layers[0]
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, dynamic=True, backend="eager")
    for frames in (5, 30, 31):
        x = torch.randn(frames, 2, D)
        padding = torch.arange(frames) >= torch.tensor([frames, 3])[:, None]
        for each in (layer, compiled):
            each.zero_grad()
            each(x, padding).square().sum().backward()
        torch.testing.assert_close(compiled(x, padding), layer(x, padding))
        for one, other in zip(compiled.parameters(), layer.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4)


def test_the_model_compiles_where_scalars_may_be_captured():
    torch._dynamo.reset()
    model = replaced(layers=1)
    x, lengths = batch()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
        torch.testing.assert_close(compiled(x, lengths)[0], model(x, lengths)[0])


def test_autocast():
    model = replaced()
    x, lengths = batch()
    expected = model(x, lengths)[0]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = model(x, lengths)[0]
    assert (out.float() - expected).abs().max() < 0.15


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype):
    model = replaced()
    x, lengths = batch()
    expected = model(x, lengths)[0]
    model = model.to("cuda", dtype)
    with torch.backends.cudnn.flags(allow_tf32=False):  # the convolutions', not ours
        x, lengths = x.to("cuda", dtype), lengths.cuda()
        out = model(x, lengths)[0]
        out.float().square().mean().backward()
    bound = 1e-4 if dtype == torch.float32 else 0.15
    assert (out.float().cpu() - expected).abs().max() < bound
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.gpu
def test_masks_do_not_wait_for_the_gpu():
    attention = replaced().cuda().conformer_layers[0].self_attn
    x = torch.randn(T, 3, D, device="cuda")
    padding = torch.arange(T, device="cuda") >= torch.tensor(LENGTHS, device="cuda")[:, None]
    additive = torch.zeros(3, T, device="cuda").masked_fill(padding, -math.inf)
    attention(x, x, x, key_padding_mask=padding)  # loads the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        for mask in (padding, additive):
            attention(x, x, x, key_padding_mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# wav2vec 2.0, HuBERT and WavLM; tests/test_hosts.py asks the rest

CASES = {case.name: case for case in TOOLKITS["torchaudio"]()}


def wav2vec2(name="Wav2Vec2, HuBERT", **options):
    model = CASES[name].build()
    return model, replace_attention(model, left=3, right=2, use_bias=True, **options)


def test_wav2vec2_paths_and_warnings():
    model, report = wav2vec2()
    assert report.replaced == [f"encoder.transformer.layers.{i}.attention" for i in range(2)]
    (warning,) = report.warnings
    assert "positional convolution is not causal" in warning and "group_norm" in warning
    hubert = models.hubert_pretrain_base()
    report = replace_attention(hubert.wav2vec2, layers=[0], left=1, right=1)
    assert report.replaced == ["encoder.transformer.layers.0.attention"]
    assert type(model.encoder.transformer.layers[0].attention).__name__ == "EncoderAdapter"


def test_intermediate_layers():
    model, _ = wav2vec2()
    x, lengths = CASES["Wav2Vec2, HuBERT"].batch()
    features, frames = model.extract_features(x, lengths)
    assert len(features) == 2 and frames.tolist() == [39, 22]
    torch.testing.assert_close(
        features[1][1, :22], model.extract_features(x[1:, : lengths[1]])[0][1][0], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("left_padded", [False, True])
def test_masks_of_wav2vec2(left_padded):
    model, _ = wav2vec2()
    adapter = model.encoder.transformer.layers[0].attention
    x = torch.randn(2, 9, D_HOST)
    keep = torch.arange(9) < torch.tensor([9, 4])[:, None]
    keep = keep.flip(1) if left_padded else keep
    alone = adapter(x[1:, keep[1]])[0][0]
    square = keep[:, None, None].expand(2, 1, 9, 9)
    for low in (-1e4, -math.inf, torch.finfo(torch.float32).min):
        out, none = adapter(x, attention_mask=torch.zeros(2, 1, 9, 9).masked_fill(~square, low))
        assert none is None
        torch.testing.assert_close(out[1, keep[1]], alone, atol=1e-6, rtol=1e-5)
        assert (out[~keep] == 0).all()
    assert torch.equal(adapter(x, attention_mask=square)[0], out)
    assert torch.equal(adapter(x, key_padding_mask=~keep)[0], out)
    with pytest.raises(ValueError, match="attention_mask or key_padding_mask, not both"):
        adapter(x, attention_mask=square, key_padding_mask=~keep)
    with pytest.raises(ValueError, match=r"attention_mask must have shape.*got \[2, 1, 9, 8\]"):
        adapter(x, attention_mask=square[..., 1:])
    with pytest.raises(ValueError, match="holes in sequence 0"):
        adapter(x, attention_mask=torch.arange(9).ne(3).expand(2, 1, 9, 9))
    with pytest.raises(TypeError, match="index"):
        adapter(x, index=0)


def test_wavlm_takes_lengths_where_all_layers_are_replaced():
    case = CASES["WavLM"]
    x, lengths = case.batch()
    with pytest.raises(AssertionError):
        case.build()(x, lengths)  # torchaudio's own attention takes no mask
    half, _ = wav2vec2("WavLM", layers=[0])
    with pytest.raises(AssertionError):
        half(x, lengths)
    model, _ = wav2vec2("WavLM")
    out, frames = model(x, lengths)
    alone = model(x[1:, : lengths[1]], lengths[1:])[0][0]
    torch.testing.assert_close(out[1, : frames[1]], alone, atol=1e-5, rtol=0)


def test_wavlm_keeps_the_bias_that_its_other_layers_add():
    case = CASES["WavLM"]
    original, (model, report) = case.build(), wav2vec2("WavLM", layers=[0])
    embedding = "encoder.transformer.layers.0.attention.rel_attn_embed.weight"
    assert embedding in model.state_dict() and embedding not in report.new_parameters
    seen = []
    for each in (original, model):
        each.encoder.transformer.layers[1].register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["position_bias"]), with_kwargs=True
        )
        each(case.batch()[0])
    assert torch.equal(*seen)
    replace_attention(model, layers=[1], left=3, right=2)
    assert embedding not in model.state_dict()
    model(case.batch()[0])[0].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert seen[2] is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Wav2Vec2, HuBERT", "WavLM"])
def test_wav2vec2_on_a_gpu(name):
    model, _ = wav2vec2(name)
    x, lengths = CASES[name].batch()
    expected = model(x, lengths)[0]
    with torch.backends.cudnn.flags(allow_tf32=False):
        out = model.cuda()(x.cuda(), lengths.cuda())[0].cpu()
    torch.testing.assert_close(out[0], expected[0], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(out[1, :22], expected[1, :22], atol=1e-4, rtol=1e-3)
