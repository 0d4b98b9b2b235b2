"""Hugging Face encoders with replaced attention: what test_hosts.py's battery does not ask."""

import copy
import math

import pytest
import torch
from host_cases import TOOLKITS, D, H, leaked
from torch import nn

from ldsa_nn import load_replaced, replace_attention
from ldsa_nn.hosts import Adapter, class_name
from ldsa_nn.replace import main

transformers = pytest.importorskip("transformers")
from ldsa_nn.hosts import transformers as host  # noqa: E402

CASES = {case.name: case for case in TOOLKITS["transformers"]()}
ENCODERS = [name for name in CASES if "," not in name]
WITH_DECODERS = ["Whisper", "Speech2Text", "Moonshine"]
T, N = 11, 7


def replaced(name, **options):
    model = CASES[name].build()
    options = dict(left=3, right=2, use_bias=True, **options)
    return model, replace_attention(model, **options)


def adapters(model):
    return [module for module in model.modules() if isinstance(module, Adapter)]


def resolve(name):
    """A class by its qualified name."""
    module, _, own = name.rpartition(".")
    return getattr(__import__(module, fromlist=[own]), own)


@pytest.mark.parametrize("name", [n for h in host.HOSTS for n in (h.parent, *h.attention)])
def test_classes_exist(name):
    assert class_name(resolve(name)) == name


@pytest.mark.parametrize("name", host.NOT_HOSTS)
def test_classes_that_are_no_hosts_exist(name):
    assert issubclass(resolve(name), nn.Module)


# The call


@pytest.fixture
def adapter():
    model, report = replaced("Wav2Vec2")
    return model.get_submodule(report.replaced[0])


def square(keep, batch=2):
    """[B,1,T,T] of [B,T]: each frame may see what is kept."""
    return keep[:, None, None, :].expand(batch, 1, T, T)


def masks(keep):
    """One padding in every form that a host or its caller may give."""
    chunks = torch.arange(T) // 3
    chunk = chunks[:, None] >= chunks[None]
    yield square(keep)
    yield square(keep) & chunk
    yield square(keep) & square(keep).mT
    yield square(keep).expand(2, H, T, T)
    yield keep[:, None, None, :]
    yield from (keep, keep.long(), keep.int(), square(keep).long())
    for low in (-math.inf, torch.finfo(torch.float32).min, -1e4):
        yield torch.zeros(2, 1, T, T).masked_fill(~square(keep), low)
        yield torch.zeros(2, 1, T, T).masked_fill(~(square(keep) & chunk), low)
    yield torch.zeros(2, T).half().masked_fill(~keep, torch.finfo(torch.float16).min)
    yield torch.zeros(2, T).bfloat16().masked_fill(~keep, torch.finfo(torch.bfloat16).min)


@pytest.mark.parametrize("left_padded", [False, True])
def test_masks_of_every_form(adapter, left_padded):
    x = torch.randn(2, T, D)
    keep = torch.arange(T) < torch.tensor([T, N])[:, None]
    span = slice(0, N)
    if left_padded:
        keep, span = keep.flip(1), slice(T - N, T)
    alone = adapter(x[1:, span])[0][0]
    for mask in masks(keep):
        out, none = adapter(x, attention_mask=mask)
        assert none is None
        torch.testing.assert_close(out[1, span], alone, atol=1e-6, rtol=1e-5)
        assert (out[~keep] == 0).all()
    assert torch.equal(adapter(x)[0], adapter(x, attention_mask=square(keep | True))[0])
    one = torch.ones(1, 1, T, T, dtype=torch.bool)  # what SeamlessM4T v2 sends without padding
    assert torch.equal(adapter(x, attention_mask=one)[0], adapter(x)[0])


HOLES = torch.tensor([[True, False, True, True]])


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (HOLES, ValueError, "holes in sequence 0"),
        (HOLES[:, None, None].expand(1, 1, 4, 4), ValueError, "holes in sequence 0"),
        (torch.zeros(1, 4).masked_fill(~HOLES, -1e4), ValueError, "holes in sequence 0"),
        (torch.ones(1, 4), ValueError, r"additive attention_mask.*at most -1e3.*got 1\.0"),
        (torch.full((1, 1, 4, 4), -1.5), ValueError, r"at most -1e3.*got -1\.5"),
        (torch.ones(1, 5).bool(), ValueError, r"\[B,T\] or \[B,1,T,T\].*T=4, got \[1, 5\]"),
        (torch.ones(1, 1, 4, 5).bool(), ValueError, r"got \[1, 1, 4, 5\]"),
        (torch.ones(2, 1, 4, 4).bool(), ValueError, r"B=1.*got \[2, 1, 4, 4\]"),
        (torch.ones(1, 4, 4).bool(), ValueError, r"got \[1, 4, 4\]"),
        ([[True] * 4], TypeError, "attention_mask must be a tensor, got list"),
    ],
)
def test_masks_that_cannot_be_followed(adapter, mask, error, message):
    with pytest.raises(error, match=message):
        adapter(torch.randn(1, 4, D), attention_mask=mask)


@pytest.mark.parametrize(
    "name",
    "key_value_states cache past_key_value past_key_values cu_seq_lens_q head_mask".split(),
)
def test_what_a_window_cannot_do_is_refused(adapter, name):
    x = torch.randn(1, 4, D)
    assert adapter(x, **{name: None})[0].shape == x.shape
    with pytest.raises(ValueError, match=f"{name} must be None: a window cannot follow"):
        adapter(hidden_states=x, **{name: x})


def test_a_causal_call_needs_a_causal_window():
    model, _ = replaced("Whisper")
    adapter = adapters(model)[0]
    x = torch.randn(1, 4, D)
    assert torch.equal(adapter(x, is_causal=False)[0], adapter(x)[0])
    with pytest.raises(ValueError, match="is_causal=True needs a window with right=0, got right=2"):
        adapter(x, is_causal=True)
    model = CASES["Whisper"].build()
    replace_attention(model, left=3, right=0)
    adapter = adapters(model)[0]
    assert torch.equal(adapter(x, is_causal=True)[0], adapter(x)[0])


class Closed(nn.Module):
    """An attention of another release: other names, an order of its own, one value more."""

    def forward(self, hidden_states, key_value_states=None, attention_mask=None, scale=1.0):
        """Return None."""
        return hidden_states, None, None


def test_arguments_are_the_replaced_class_s():
    layer = nn.Module()
    layer.forward = lambda query, key, value, mask=None, lengths=None: query
    adapter = host.EncoderAdapter(Closed(), layer, 1, 1)
    x, keep = torch.randn(1, 4, D), torch.ones(1, 4)
    assert len(adapter(x)) == 3
    assert adapter(x, scale=2.0)[0] is x
    with pytest.raises(ValueError, match="additive"):
        adapter(x, None, keep)  # the third is the mask
    with pytest.raises(ValueError, match="key_value_states"):
        adapter(x, x)
    with pytest.raises(TypeError, match="no argument position_bias, nor did the attention"):
        adapter(x, position_bias=None)
    with pytest.raises(TypeError, match="two values for hidden_states"):
        adapter(x, hidden_states=x)
    with pytest.raises(TypeError, match="takes 4 arguments, got 5"):
        adapter(x, None, None, 1.0, 2)
    with pytest.raises(TypeError, match="needs hidden_states"):
        adapter(scale=1.0)


# Models


@pytest.mark.parametrize("name", ["Wav2Vec2", "Wav2Vec2Bert", "SeamlessM4Tv2", "Parakeet"])
def test_every_kind_of_attention_sends_a_mask_that_is_followed(name):
    case = CASES[name]
    model, _ = replaced(name)
    x, lengths = case.batch()
    expected = case.call(model, x, lengths)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(case.call(model, x, lengths), expected)
    assert leaked(case, model) < 1e-5


def test_chunk_masks_are_not_followed_and_that_is_said():
    case = CASES["SeamlessM4Tv2"]
    model, report = replaced("SeamlessM4Tv2")
    assert any("chunk mask (speech_encoder_chunk_size)" in w for w in report.warnings)
    x, lengths = case.batch()
    out = case.call(model, x, lengths)
    model.encoder.config.speech_encoder_chunk_size = 4
    assert torch.equal(case.call(model, x, lengths), out)
    original = case.build()
    out = case.call(original, x, lengths)
    original.encoder.config.speech_encoder_chunk_size = 4
    assert not torch.equal(case.call(original, x, lengths), out)


@pytest.mark.parametrize("name", WITH_DECODERS)
def test_decoders_keep_their_attention(name):
    case = CASES[name]
    model, report = replaced(name)
    original = case.build()
    assert all(path.startswith("encoder.layers.") for path in report.replaced)
    assert len(report.replaced) == 2
    assert not adapters(model.decoder)
    left = [w for w in report.warnings if w.startswith("left as it is: decoder.layers.0.")]
    assert len(left) == 1 and "a decoder's attention is causal or looks at another" in left[0]
    assert list(model.decoder.state_dict()) == list(original.decoder.state_dict())
    x, _ = case.batch()
    x = x.mT if name == "Whisper" else x
    inputs = {"input_values" if name == "Moonshine" else "input_features": x}
    ids = torch.tensor([[2, 3, 4], [2, 5, 6]])
    model(**inputs, decoder_input_ids=ids).last_hidden_state.square().mean().backward()
    assert all(model.get_parameter(name).grad.any() for name in report.new_parameters)
    with pytest.raises(ValueError, match=r"no attention to replace.*a decoder's attention"):
        replace_attention(original.decoder)


@pytest.mark.parametrize("name", ["Wav2Vec2Bert", "SeamlessM4T", "SeamlessM4Tv2"])
def test_attention_after_the_encoder_stays(name):
    case = CASES[name]
    config = case.build().config
    config.add_adapter = True
    model = type(case.build())(config).eval()
    report = replace_attention(model, left=3, right=2)
    assert report.replaced == [f"encoder.layers.{i}.self_attn" for i in range(2)]
    assert any(w.startswith("left as it is: adapter.") for w in report.warnings)
    assert case.call(model, *case.batch()).isfinite().all()


def test_a_whole_translation_model():
    config = transformers.SeamlessM4Tv2Config(
        hidden_size=D, feature_projection_input_dim=20, speech_encoder_layers=2,
        speech_encoder_attention_heads=H, speech_encoder_intermediate_size=48,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=H, decoder_attention_heads=H,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=30, adaptor_kernel_size=4,
        adaptor_stride=4,
    )  # fmt: skip
    model = transformers.SeamlessM4Tv2ForSpeechToText(config)
    report = replace_attention(model, left=3, right=2)
    assert report.replaced == [f"speech_encoder.encoder.layers.{i}.self_attn" for i in range(2)]
    assert len(adapters(model)) == 2


def test_subclasses_are_not_matched():
    model = CASES["Wav2Vec2"].build()

    class Mine(type(model.encoder.layers[0].attention)):
        pass

    model.encoder.layers[1].attention = Mine(D, H, config=model.config)
    with pytest.raises(ValueError, match=r"layers.1.attention is of the unknown class.*Mine"):
        replace_attention(model)
    assert not adapters(model)


@pytest.mark.parametrize("name", ENCODERS)
def test_reports_name_the_traps(name):
    _, report = replaced(name)
    assert any("from_pretrained" in w and "load_replaced" in w for w in report.warnings)
    assert any("output_attentions" in w for w in report.warnings)
    assert len(set(report.warnings)) == len(report.warnings)


@pytest.mark.parametrize("name", ENCODERS)
def test_output_attentions(name):
    case = CASES[name]
    model = case.build()
    report = replace_attention(model, layers=[1], left=3, right=2)
    encoder = model.get_encoder() if name in WITH_DECODERS else model
    encoder.set_attn_implementation("eager")
    x, _ = case.batch()
    x = x.mT if name == "Whisper" else x
    (adapter,) = adapters(model)
    seen = []
    adapter.register_forward_hook(
        lambda _, args, kwargs, out: seen.append((args, kwargs, out)), with_kwargs=True
    )
    out = encoder(x, output_attentions=True)
    # What transformers records is of the attentions that are its own.
    assert len(out.attentions) == 1
    ((args, kwargs, (_, weights, *_)),) = seen
    hidden = args[0] if args else kwargs["hidden_states"]
    assert weights.shape == out.attentions[0].shape == (*x.shape[:1], H, *hidden.shape[1:2] * 2)
    _, expected = adapter.layer(hidden, need_weights=True)
    for t in range(hidden.shape[1]):
        for s in range(hidden.shape[1]):
            inside = -3 <= s - t <= 2
            cell = expected[:, :, t, s - t + 3] if inside else torch.zeros(2, H)
            assert torch.equal(weights[:, :, t, s], cell)
    assert report.replaced[0].split(".")[-2] == "1"
    encoder(x)
    assert seen[1][2][1] is None


def test_weights_of_a_layer_that_has_none():
    model = CASES["Wav2Vec2"].build()

    class Plain(nn.Module):
        def forward(self, query, key, value, mask=None, lengths=None):
            return value

    replace_attention(model, make=lambda *_: Plain())
    x = torch.randn(1, 4, D)
    out, weights = adapters(model)[0](x, output_attentions=True)
    assert weights is None and torch.equal(out, x)


# WavLM's position bias


@pytest.mark.parametrize("name", ["WavLM", "WavLM, stable layer norm"])
def test_the_first_layer_still_makes_the_bias_that_the_others_add(name):
    case = CASES[name]
    original, model = case.build(), case.build()
    embedding = "encoder.layers.0.attention.rel_attn_embed.weight"
    report = replace_attention(model, layers=[0], left=3, right=2)
    assert embedding in model.state_dict()
    assert embedding not in report.new_parameters
    seen = {}
    for key, each in (("original", original), ("replaced", model)):
        each.encoder.layers[1].register_forward_pre_hook(
            lambda _, args, kwargs, key=key: seen.update({key: kwargs["position_bias"]}),
            with_kwargs=True,
        )
    for each in (original, model):
        case.call(each, *case.batch())
    assert torch.equal(seen["original"], seen["replaced"])
    case.call(model.train(), *case.batch()).square().mean().backward()
    assert model.get_parameter(embedding).grad.any()

    # With no layer left that adds it, it would be a parameter without a gradient.
    last = replace_attention(model, layers=[1], left=3, right=2)
    assert embedding not in model.state_dict()
    assert seen["replaced"] is not None
    model.zero_grad()
    case.call(model, *case.batch()).square().mean().backward()
    assert seen["replaced"] is None
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not set(last.new_parameters) & set(report.new_parameters)


def test_a_failed_load_brings_the_bias_back():
    model = CASES["WavLM"].build()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="Missing key"):
        load_replaced(model, weights)
    assert list(model.state_dict()) == list(weights)
    case = CASES["WavLM"]
    assert torch.equal(case.call(model, *case.batch()), case.call(case.build(), *case.batch()))


# Training


@pytest.mark.parametrize("name", ["Wav2Vec2", "WavLM", "Wav2Vec2Bert", "Parakeet"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name, reentrant):
    case = CASES[name]
    model, report = replaced(name, dropout_rate=0.3)
    model.train()
    x, lengths = case.batch()

    def gradients():
        model.zero_grad()
        torch.manual_seed(3)
        case.call(model, x, lengths).square().mean().backward()
        return [model.get_parameter(name).grad.clone() for name in report.new_parameters]

    expected = gradients()
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    for one, other in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(one, other)


def ctc():
    config = CASES["Wav2Vec2"].build().config
    torch.manual_seed(0)
    return transformers.Wav2Vec2ForCTC(config).eval()


def test_ctc_loss_of_a_padded_batch_is_that_of_its_utterances():
    model = ctc()
    replace_attention(model, left=3, right=2)
    x, lengths = CASES["Wav2Vec2"].batch()
    mask = (torch.arange(x.shape[1]) < lengths[:, None]).long()
    labels = torch.tensor([[1, 2, 3], [4, 5, -100]])
    loss = model(x, attention_mask=mask, labels=labels).loss
    parts = [
        model(x[b : b + 1, :n], labels=labels[b : b + 1, :m]).loss
        for b, (n, m) in enumerate([(lengths[0], 3), (lengths[1], 2)])
    ]
    torch.testing.assert_close(loss, sum(parts))
    loss.backward()


@pytest.mark.parametrize("grouped", [False, True])
def test_lora(grouped):
    peft = pytest.importorskip("peft")
    model = ctc()
    replace_attention(model, left=3, right=2, grouped_w2=grouped)
    x, _ = CASES["Wav2Vec2"].batch()
    before = model(x).logits
    # peft cannot merge what it adds to a grouped convolution.
    names = ["w1", "w3", "w_out"] if grouped else ["w1", "w2", "w3", "w_out"]
    config = peft.LoraConfig(r=4, target_modules=names)
    tuned = peft.get_peft_model(copy.deepcopy(model), config)
    assert torch.equal(tuned(x).logits, before)
    trainable = [name for name, p in tuned.named_parameters() if p.requires_grad]
    assert len(trainable) == 2 * 2 * len(names)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=10)
    for _ in range(2):  # LoRA's B starts at zero, and A's gradient with it
        optimizer.zero_grad()
        tuned(x).logits.square().mean().backward()
        assert all(tuned.get_parameter(name).grad is not None for name in trainable)
        optimizer.step()
    assert all(tuned.get_parameter(name).grad.any() for name in trainable)
    out = tuned(x).logits
    assert (out - before).abs().max() > 1e-3
    merged = tuned.merge_and_unload()
    torch.testing.assert_close(merged(x).logits, out, atol=1e-5, rtol=1e-4)
    fresh = ctc()
    load_replaced(fresh, merged.state_dict(), left=3, right=2, grouped_w2=grouped)
    assert torch.equal(fresh(x).logits, merged(x).logits)


class Halved(nn.Module):
    """What wraps a projection: not its class, and more than its weight."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.weight = base.weight
        self.bias = base.bias

    def forward(self, x):
        return self.base(x) / 2


@pytest.mark.parametrize("grouped", [False, True])
def test_a_wrapped_w2_is_called(grouped):
    model = ctc()
    replace_attention(model, left=3, right=2, grouped_w2=grouped, use_bias=True)
    layer = adapters(model)[0].layer
    x = torch.randn(2, 9, D)
    halved = copy.deepcopy(layer)
    with torch.no_grad():
        halved.w2.weight /= 2
        halved.w2.bias /= 2
    expected = halved(x)
    layer.w2 = Halved(layer.w2)
    torch.testing.assert_close(layer(x), expected)


# Saving


@pytest.mark.parametrize("shards", [False, True])
def test_save_pretrained(tmp_path, shards):
    options = dict(left=3, right=2, layers=[1], grouped_w2=True)
    model = ctc()
    replace_attention(model, **options)
    model.save_pretrained(tmp_path, max_shard_size="10KB" if shards else "50GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    x, _ = CASES["Wav2Vec2"].batch()
    fresh = ctc()
    nn.init.normal_(fresh.lm_head.weight)
    load_replaced(fresh, tmp_path, **options)
    assert torch.equal(fresh(x).logits, model(x).logits)
    if not shards:
        load_replaced(ctc(), tmp_path / "model.safetensors", **options)
    # The trap that report.warnings tells of: no error, and another model.
    wrong = transformers.Wav2Vec2ForCTC.from_pretrained(tmp_path).eval()
    assert not adapters(wrong)
    assert not torch.equal(wrong(x).logits, model(x).logits)


def test_a_directory_without_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_replaced(ctc(), tmp_path)


@pytest.mark.parametrize("name", WITH_DECODERS)
def test_tied_weights_are_loaded(tmp_path, name):
    config = CASES[name].build().config
    of = getattr(transformers, f"{name}ForConditionalGeneration")
    model = of(config).eval()
    replace_attention(model, left=3, right=2)
    model.save_pretrained(tmp_path)
    fresh = of(config).eval()
    load_replaced(fresh, tmp_path, left=3, right=2)
    states = [each.state_dict() for each in (model, fresh)]
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert fresh.get_output_embeddings().weight is fresh.get_input_embeddings().weight
    # Untied weights that are missing are still an error.
    state = dict(states[0])
    del state["model.encoder.layer_norm.weight"]
    with pytest.raises(RuntimeError, match=r"encoder\.layer_norm\.weight"):
        load_replaced(of(config), state, left=3, right=2)


# Tracing


@pytest.mark.parametrize("name", ["Wav2Vec2", "WavLM"])
def test_layers_compile_whole(name):
    torch._dynamo.reset()
    model, _ = replaced(name, layers=[0])
    layer = model.encoder.layers[0]
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, dynamic=True, backend="eager")
    for frames in (9, 30):
        x = torch.randn(2, frames, D)
        keep = torch.arange(frames) < torch.tensor([frames, 5])[:, None]
        mask = keep if name == "WavLM" else keep[:, None, None].expand(2, 1, frames, frames)
        outs = [each(x, attention_mask=mask) for each in (layer, compiled)]
        torch.testing.assert_close(*outs)
    first = outs[0][0] if isinstance(outs[0], tuple) else outs[0]
    assert first.shape == x.shape


# The command


def test_list_of_a_directory(tmp_path, capsys):
    config = CASES["Whisper"].build().config
    config.architectures = ["WhisperForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    assert main(["--list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [line.split() for line in lines]
    assert cells[0] == "layer path class host heads width replaceable".split()
    for i in range(2):
        path = f"model.encoder.layers.{i}.self_attn"
        assert cells[1 + i] == [str(i), path, "WhisperAttention", "transformers", "4", "32", "yes"]
    assert cells[3][:6] == ["-", "model.decoder.layers.0.self_attn", "WhisperAttention", *"---"]
    assert lines[3].endswith("no: a decoder's attention is causal or looks at another sequence")
    assert cells[4][1] == "model.decoder.layers.0.encoder_attn"
    assert lines[5] == "2 of 4 can be replaced"


def test_list_of_a_directory_that_is_none(tmp_path, capsys):
    assert main(["--list", str(tmp_path)]) == 1
    assert f"error: {tmp_path}: transformers cannot read its config" in capsys.readouterr().err
