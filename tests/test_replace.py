"""replace_attention and load_replaced, whatever the host."""

import copy
import os
import pickle
import subprocess
import sys
from functools import partial

import pytest
import safetensors.torch
import torch
from conftest import ROOT
from torch import nn

import ldsa_nn
from ldsa_nn import HybridAttention, LocalDenseSynthesizerAttention, load_replaced
from ldsa_nn.replace import Report, main, replace_attention

D, H = 16, 4


def encoder(layers=3, **options):
    options = dict(dim_feedforward=32, batch_first=True, **options)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, **options), layers)


def snapshot(model):
    """Everything that must survive a failure: modules, attributes, tensors and their bits."""
    modules = [(name, id(module)) for name, module in model.named_modules()]
    nested = [m.use_nested_tensor for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
    tensors = [
        (name, id(tensor), tensor.requires_grad, tensor.detach().clone().numpy().tobytes())
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    return modules, nested, tensors


class Wrapper(nn.Module):
    """A model with encoders deep inside, and things that are no attention."""

    def __init__(self):
        super().__init__()
        self.frontend = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D))
        self.parts = nn.ModuleDict({"a": encoder(2), "b": nn.ModuleList([encoder(1)])})
        self.head = nn.Linear(D, 5)


class Foreign(nn.Module):
    """An attention that nobody knows."""

    batch_first = True

    def forward(self, query, key, value, **_):
        return query, None


class Recorder(nn.Module):
    """A layer for `make` that remembers its calls."""

    def __init__(self, d=D):
        super().__init__()
        self.w3 = nn.Linear(d, d)
        self.seen = []

    def forward(self, query, key, value, mask=None, lengths=None):
        self.seen.append((query, key, value, mask, lengths))
        return self.w3(value)


def test_every_encoder_in_a_wrapper_is_replaced():
    model = Wrapper().eval()
    before = dict(model.named_parameters())
    report = replace_attention(model, left=3, right=2)
    paths = ["parts.a.layers.0", "parts.a.layers.1", "parts.b.0.layers.0"]
    assert report.replaced == [f"{path}.self_attn" for path in paths]
    assert report.new_parameters == [
        f"{path}.self_attn.layer.{w}.weight" for path in paths for w in ("w1", "w2", "w3", "w_out")
    ]
    # Exactly those are new in the state dict, and all else is the same object.
    after = dict(model.named_parameters())
    assert [name for name in after if name not in before] == report.new_parameters
    assert set(report.new_parameters) <= set(model.state_dict())
    gone = {name for name in before if name not in after}
    assert all(".self_attn." in name for name in gone) and len(gone) == 3 * 4
    assert all(after[name] is before[name] for name in after if name in before)
    for path in report.replaced:
        layer = model.get_submodule(path).layer
        assert type(layer) is LocalDenseSynthesizerAttention
        assert (layer.left, layer.right, layer.n_head, layer.n_feat) == (3, 2, H, D)
        assert not layer.training


def test_report():
    report = replace_attention(encoder(1))
    assert isinstance(report, Report)
    for field in (report.replaced, report.new_parameters, report.warnings):
        assert isinstance(field, list) and field
        assert all(isinstance(item, str) for item in field)


def test_defaults_are_seven_frames_on_either_side():
    model = encoder(1, dropout=0.25)
    replace_attention(model)
    layer = model.layers[0].self_attn.layer
    assert (layer.left, layer.right, layer.dropout_rate) == (7, 7, 0.25)
    assert (layer.edge, layer.grouped_w2, layer.w1.bias) == ("zero", False, None)


def test_layer_options_reach_the_layer():
    model = encoder(1)
    replace_attention(
        model, dropout_rate=0.5, use_bias=True, edge="renormalize", grouped_w2=True,
        honor_mask=False, implementation="eager",
    )  # fmt: skip
    layer = model.layers[0].self_attn.layer
    assert (layer.dropout_rate, layer.edge, layer.grouped_w2) == (0.5, "renormalize", True)
    assert (layer.honor_mask, layer.implementation) == (False, "eager")
    assert layer.w1.bias is not None


@pytest.mark.parametrize(
    ("layers", "chosen"), [([1], [1]), ([-1, 0], [2, 0]), (range(2), [0, 1]), ((2,), [2])]
)
def test_layers_are_chosen_by_index(layers, chosen):
    model = encoder()
    old = [layer.self_attn for layer in model.layers]
    report = replace_attention(model, layers=layers)
    assert report.replaced == [f"layers.{i}.self_attn" for i in chosen]
    for i, layer in enumerate(model.layers):
        assert (layer.self_attn is old[i]) == (i not in chosen)
    assert model(torch.randn(2, 5, D)).shape == (2, 5, D)


def test_indices_run_through_all_encoders():
    model = Wrapper()
    assert replace_attention(model, layers=[2]).replaced == ["parts.b.0.layers.0.self_attn"]
    assert model.parts["a"].use_nested_tensor
    assert not model.parts["b"][0].use_nested_tensor


def test_windows_of_each_layer():
    model = encoder()
    replace_attention(model, layers=[2, 0], left=[5, 1], right=(0, 4))
    windows = [(m.left, m.right) for m in model.modules() if hasattr(m, "window")]
    assert windows == [(1, 4), (5, 0)]


def test_layers_can_be_replaced_in_turn():
    model = encoder()
    replace_attention(model, layers=[0], left=1, right=0)
    replace_attention(model, layers=[1, 2], left=2, right=0)
    assert [layer.self_attn.layer.left for layer in model.layers] == [1, 2, 2]


def failing(path, *_):
    if path == "layers.2.self_attn":
        raise KeyError("the last one")
    return Recorder()


def with_foreign(index):
    model = encoder()
    model.layers[index].self_attn = Foreign()
    return model


class Mine(nn.TransformerEncoderLayer):
    """A subclass may call its attention in any way."""


class MyAttention(nn.MultiheadAttention):
    """As may its attention be called."""


def with_subclass(layer=nn.TransformerEncoderLayer, attention=nn.MultiheadAttention):
    model = encoder()
    model.layers[2] = layer(D, H, 32, batch_first=True)
    model.layers[2].self_attn = attention(D, H, batch_first=True)
    return model


def replaced(**options):
    model = encoder()
    replace_attention(model, **options)
    return model


ERRORS = {
    "unknown option": (encoder, dict(windows=3), TypeError, "'windows'.*use_bias"),
    "option that is ours": (encoder, dict(n_head=2), TypeError, "'n_head'"),
    "context_size": (encoder, dict(context_size=15), TypeError, "'context_size'.*left and right"),
    "option beside make": (
        encoder, dict(make=failing, use_bias=True), TypeError, "'use_bias'.*inside make"),
    "bad option": (encoder, dict(edge="mirror"), ValueError, "edge.*'mirror'"),
    "bad dropout": (encoder, dict(dropout_rate=1.0), ValueError, "dropout_rate.*1.0"),
    "unknown host": (encoder, dict(host="tensorflow"), ValueError, "torch, torchaudio.*'tensorfl"),
    "another host": (encoder, dict(host="torchaudio"), ValueError, "no attention"),
    "left": (encoder, dict(left=-1), ValueError, "left.*-1"),
    "right of the last": (encoder, dict(right=[1, 1, -2]), ValueError, "right.*-2"),
    "too few": (encoder, dict(left=[1, 2]), ValueError, r"left.*3 layers.*\[1, 2\]"),
    "too many": (encoder, dict(layers=[0], right=[1, 2]), ValueError, "right.*1 layers"),
    "float": (encoder, dict(left=7.0), TypeError, "left.*7.0"),
    "bool": (encoder, dict(right=True), TypeError, "right.*True"),
    "floats": (encoder, dict(left=[1, 2.0, 3]), TypeError, "left.*2.0"),
    "beyond the layers": (encoder, dict(layers=[0, 3]), ValueError, "3 is out of range.*has 3"),
    "before the layers": (encoder, dict(layers=[-4]), ValueError, "-4 is out of range"),
    "twice": (encoder, dict(layers=[2, -1]), ValueError, "once.*2, 2"),
    "no layer": (encoder, dict(layers=[]), ValueError, "at least one"),
    "an int for layers": (encoder, dict(layers=1), TypeError, "layers must be a list.*1"),
    "names for layers": (encoder, dict(layers=["0"]), TypeError, "layers must be a list.*'0'"),
    "make raises at the end": (encoder, dict(make=failing), KeyError, "the last one"),
    "make gives nothing": (encoder, dict(make=lambda *_: None), TypeError, "nn.Module.*NoneType"),
    "make is no function": (encoder, dict(make=Recorder(), host="x"), ValueError, "host"),
    "make is a string": (encoder, dict(make="ldsa"), TypeError, "make.*str"),
    "make in another width": (
        encoder,
        dict(make=lambda *_: LocalDenseSynthesizerAttention(2, 8)),
        ValueError,
        "n_feat=8.*layers.0.self_attn.*16",
    ),
    "nothing there": (partial(nn.Linear, 3, 3), {}, ValueError, "no attention.*EncoderLayer"),
    "attention alone": (partial(nn.MultiheadAttention, D, H), {}, ValueError, "MultiheadAttention"),
    "foreign attention": (partial(with_foreign, 2), {}, ValueError, "test_replace.Foreign"),
    "own layer class": (partial(with_subclass, Mine), {}, ValueError, "in test_replace.Mine"),
    "own attention class": (
        partial(with_subclass, attention=MyAttention), {}, ValueError, "test_replace.MyAttention"),
    "replaced": (replaced, {}, ValueError, "layers.0.self_attn is replaced already"),
    "one replaced": (partial(replaced, layers=[2]), {}, ValueError, "layers.2.*replaced already"),
    "attention beside": (
        lambda: nn.ModuleDict({"enc": encoder(), "pool": nn.MultiheadAttention(D, H)}),
        {}, ValueError, r"unknown class: pool \(.*MultiheadAttention.*host='torch'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_is_wrong_and_change_nothing(case):
    make_model, options, error, message = ERRORS[case]
    model = make_model()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        replace_attention(model, **options)
    assert snapshot(model) == before


def test_model_must_be_a_module():
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got str"):
        replace_attention("encoder")


def test_other_attentions_stay_where_asked():
    model = nn.ModuleDict({"encoder": encoder(1), "pool": nn.MultiheadAttention(D, H)})
    pool = model["pool"]
    report = replace_attention(model, host="torch")
    assert report.replaced == ["encoder.layers.0.self_attn"]
    assert model["pool"] is pool
    assert any("left as it is: pool" in warning for warning in report.warnings)


def test_a_foreign_attention_can_be_left_out():
    model = with_foreign(2)
    assert replace_attention(model, layers=[0, 1]).replaced[-1] == "layers.1.self_attn"
    assert type(model.layers[2].self_attn) is Foreign


def test_decoders_stay_and_are_named():
    model = nn.Transformer(D, H, 2, 2, 32, batch_first=True)
    decoder = snapshot(model.decoder)
    report = replace_attention(model)
    assert report.replaced == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    assert any("decoder.layers.0.self_attn" in warning for warning in report.warnings)
    assert snapshot(model.decoder) == decoder
    assert model(torch.randn(2, 5, D), torch.randn(2, 3, D)).shape == (2, 3, D)
    with pytest.raises(ValueError, match=r"TransformerDecoderLayer.*causal"):
        replace_attention(model.decoder)


def test_pooling_by_linear_layers_is_no_attention():
    model = nn.ModuleDict({"encoder": encoder(1), "attention": nn.Linear(D, 1)})
    assert replace_attention(model).replaced == ["encoder.layers.0.self_attn"]


def test_layers_of_this_package_are_known():
    model = nn.ModuleDict({"encoder": encoder(1), "own": HybridAttention(H, D)})
    report = replace_attention(model)
    assert report.replaced == ["encoder.layers.0.self_attn"]
    assert not any("own" in warning for warning in report.warnings)


def test_shared_attention_stays_shared():
    model = encoder(3)
    model.layers[2].self_attn = model.layers[0].self_attn
    report = replace_attention(model, left=2, right=1)
    assert model.layers[2].self_attn is model.layers[0].self_attn
    assert model.layers[1].self_attn is not model.layers[0].self_attn
    assert report.replaced == [f"layers.{i}.self_attn" for i in range(3)]
    assert len(report.new_parameters) == 12  # under each of their names
    assert set(report.new_parameters) <= set(model.state_dict())


def test_a_shared_layer_is_replaced_once():
    layer = encoder(1).layers[0]
    model = nn.Sequential(layer, layer)
    assert replace_attention(model).replaced == ["0.self_attn"]
    assert model(torch.randn(1, 4, D)).shape == (1, 4, D)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [None, lambda *_: Recorder()])
def test_new_layers_are_of_the_old_ones_kind(dtype, training, make):
    model = encoder(1).to(dtype).train(training).requires_grad_(False)
    replace_attention(model, make=make)
    adapter = model.layers[0].self_attn
    assert {module.training for module in adapter.modules()} == {training}
    parameters = list(adapter.parameters())
    assert parameters and all(p.dtype == dtype and p.requires_grad for p in parameters)
    assert model(torch.randn(2, 5, D, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_new_layers_are_where_the_old_ones_were(device):
    for make in (None, lambda *_: Recorder()):
        model = encoder(1).to(device)
        replace_attention(model, make=make, init_from_old=True)
        assert {p.device.type for p in model.parameters()} == {device}
        assert model(torch.randn(2, 5, D, device=device)).shape == (2, 5, D)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("use_bias", [True, False])
def test_init_from_old(bias, use_bias):
    model = encoder(2, bias=bias)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    old = [copy.deepcopy(layer.self_attn) for layer in model.layers]
    replace_attention(model, init_from_old=True, use_bias=use_bias)
    for was, layer in zip(old, model.layers, strict=True):
        new = layer.self_attn.layer
        assert torch.equal(new.w3.weight, was.in_proj_weight[2 * D :])
        assert torch.equal(new.w_out.weight, was.out_proj.weight)
        assert not torch.equal(new.w1.weight, was.in_proj_weight[:D])
        if use_bias:
            zero = torch.zeros(D)
            assert torch.equal(new.w3.bias, was.in_proj_bias[2 * D :] if bias else zero)
            assert torch.equal(new.w_out.bias, was.out_proj.bias if bias else zero)
        assert new.w3.weight.requires_grad
        new.w3.weight.data.fill_(7)  # a copy, not a view
        assert not was.in_proj_weight.eq(7).any()


def test_init_from_old_keeps_what_attention_computes_from_constant_weights():
    # One frame: attention returns out_proj(v_proj(x)), and so does a window of one frame.
    model = encoder(1).eval()
    x = torch.randn(3, 1, D)
    expected = model(x)
    replace_attention(model, left=0, right=0, init_from_old=True, use_bias=True)
    torch.testing.assert_close(model(x), expected)


def test_init_from_old_says_where_it_did_not():
    report = replace_attention(encoder(1), make=lambda *_: nn.Identity(), init_from_old=True)
    assert any("layers.0.self_attn" in w and "init_from_old" in w for w in report.warnings)
    without = replace_attention(encoder(1), make=lambda *_: nn.Identity())
    assert not any("init_from_old" in warning for warning in without.warnings)


@pytest.mark.parametrize("where", ["in_proj_bias", "out_proj.bias"])
def test_init_from_old_says_which_biases_it_dropped(where):
    def dropped(value, row=-1, **options):
        model = encoder(2)
        with torch.no_grad():
            for layer in model.layers:
                layer.self_attn.in_proj_bias.zero_()
                layer.self_attn.out_proj.bias.zero_()
            model.layers[1].self_attn.get_parameter(where)[row] = value
        report = replace_attention(model, **options)
        return [w.partition(":")[0] for w in report.warnings if "use_bias=True keeps" in w]

    assert dropped(1.0, init_from_old=True) == ["layers.1.self_attn"]
    assert dropped(0.0, init_from_old=True) == []
    assert dropped(1.0, init_from_old=True, use_bias=True) == []
    assert dropped(1.0) == []
    # The biases of query and key have no place in the new layer.
    queries = dropped(1.0, row=0, init_from_old=True)
    assert queries == ([] if where == "in_proj_bias" else ["layers.1.self_attn"])


def test_make():
    calls = []

    def make(*arguments):
        calls.append(arguments)
        return Recorder()

    model = encoder(2).eval()
    old = [layer.self_attn for layer in model.layers]
    report = replace_attention(model, left=[1, 2], right=0, make=make)
    assert calls == [
        ("layers.0.self_attn", old[0], H, D, 1, 0),
        ("layers.1.self_attn", old[1], H, D, 2, 0),
    ]
    assert report.new_parameters[0] == "layers.0.self_attn.layer.w3.weight"
    x = torch.randn(2, 5, D)
    padding = torch.tensor([[False] * 5, [True, True, False, False, False]])
    model(x, src_key_padding_mask=padding)
    (query, key, value, mask, lengths) = model.layers[0].self_attn.layer.seen[0]
    assert all(torch.equal(part, x) for part in (query, key, value))
    assert mask.dtype == torch.bool and torch.equal(mask, ~padding)
    assert lengths is None
    model(x)
    assert model.layers[0].self_attn.layer.seen[1][3:] == (None, None)


def test_the_window_of_a_layer_of_make_is_its_own():
    def make(path, old, n_head, n_feat, left, right):
        return LocalDenseSynthesizerAttention(n_head, n_feat, left=4, right=1)

    model = encoder(1).eval()
    replace_attention(model, left=2, right=0, make=make)
    adapter = model.layers[0].self_attn
    assert (adapter.left, adapter.right) == (4, 1)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    with pytest.raises(ValueError, match="right=1"):
        model(torch.randn(2, 5, D), mask=causal, is_causal=True)


@pytest.mark.parametrize("grouped", [True, False])
def test_make_with_layers_of_this_package(grouped):
    def make(path, old, n_head, n_feat, left, right):
        if path.startswith("layers.0"):
            return HybridAttention(n_head, n_feat, left=left, right=right)
        return LocalDenseSynthesizerAttention(
            n_head, n_feat, left=left, right=right, grouped_w2=grouped
        )

    model = encoder(2).eval()
    report = replace_attention(model, left=2, right=1, make=make)
    whole = [warning for warning in report.warnings if "the whole sequence" in warning]
    assert len(whole) == 1 and whole[0].startswith("layers.0.self_attn: HybridAttention")
    x = torch.randn(2, 8, D)
    padding = torch.zeros(2, 8, dtype=torch.bool)
    padding[1, :3] = True
    out = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(out[1, 3:], model(x[1:, 3:])[0])


def test_a_replaced_model_can_be_copied_pickled_and_saved(tmp_path):
    model = replaced(left=2, right=1).eval()
    x = torch.randn(2, 6, D)
    expected = model(x)
    torch.save(model, tmp_path / "model.pt")
    for again in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ):
        assert torch.equal(again(x), expected)
        with torch.no_grad():
            assert torch.equal(again(x), expected)
        assert repr(again) == repr(model)


def test_data_parallel_wrapping_comes_after(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        ready = encoder(1)
        ddp = nn.parallel.DistributedDataParallel(ready)
        with pytest.raises(ValueError, match=r"DistributedDataParallel.*before wrapping"):
            replace_attention(ddp)
        replace_attention(ready, left=2, right=1)
        ddp = nn.parallel.DistributedDataParallel(ready)
        ddp(torch.randn(2, 5, D)).sum().backward()
        assert all(p.grad is not None for p in ddp.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_toolkits_are_not_imported():
    code = """
import sys, torch, ldsa_nn
from ldsa_nn import hosts
before = set(sys.modules)
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), 1)
ldsa_nn.replace_attention(model)
try:
    ldsa_nn.replace_attention(model, host="torchaudio")
except ValueError as error:
    print(error)
assert "torchaudio" in hosts.names()
print({name.split(".")[0] for name in set(sys.modules)} & set(hosts.names()))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    error, imported = result.stdout.splitlines()
    assert "no attention to replace" in error
    assert imported == "{'torch'}"


# Loading


def trained(**options):
    """The state dict of a replaced model with weights of its own."""
    model = encoder()
    replace_attention(model, **options)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.eval()


@pytest.fixture
def options():
    return dict(left=[2, 3, 1], right=1, use_bias=True, grouped_w2=True)


@pytest.mark.parametrize("kind", ["mapping", "pt", "safetensors", "SAFETENSORS", "string"])
def test_load_replaced(tmp_path, options, kind):
    source = trained(**options)
    state = source.state_dict()
    path = tmp_path / (f"x.{kind}" if kind.lower() == "safetensors" else "x.pt")
    if kind.lower() == "safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path)
    checkpoint = {"mapping": state, "string": str(path)}.get(kind, path)
    model = encoder().eval()
    report = load_replaced(model, checkpoint, **options)
    assert report == replace_attention(encoder(), **options)
    x = torch.randn(2, 7, D)
    with torch.no_grad():
        assert torch.equal(model(x), source(x))
    # The model keeps parameters of its own.
    model.layers[0].linear1.weight.data.zero_()
    assert source.layers[0].linear1.weight.abs().sum() > 0


def changed(state, kind):
    state = dict(state)
    if kind == "missing":
        del state["layers.2.self_attn.layer.w2.weight"]
    elif kind == "unexpected":
        state["layers.9.weight"] = torch.zeros(3)
    elif kind == "shape":
        state["layers.2.linear2.weight"] = torch.zeros(3, 3)
    elif kind == "original":
        state = encoder().state_dict()
    elif kind == "wrapped":
        state = {"model": state, "step": 3}
    elif kind == "no tensor":
        state["layers.2.linear2.bias"] = 3.0
    return state


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("missing", RuntimeError, "layers.2.self_attn.layer.w2.weight"),
        ("unexpected", RuntimeError, "layers.9.weight"),
        ("shape", RuntimeError, "layers.2.linear2.weight"),
        ("original", RuntimeError, "self_attn.in_proj_weight"),
        ("wrapped", ValueError, "model are mappings; give one"),
        ("no tensor", RuntimeError, "layers.2.linear2.bias"),
    ],
)
@pytest.mark.parametrize("from_file", [True, False])
def test_a_failed_load_changes_nothing(tmp_path, options, kind, error, message, from_file):
    checkpoint = changed(trained(**options).state_dict(), kind)
    if from_file:
        torch.save(checkpoint, tmp_path / "x.pt")
        checkpoint = tmp_path / "x.pt"
    model = encoder()
    model.layers[0].norm1.weight.data[0] = torch.nan  # restored by its bits
    before = snapshot(model)
    with pytest.raises(error, match=message):
        load_replaced(model, checkpoint, **options)
    assert snapshot(model) == before
    assert model.use_nested_tensor


def test_a_failed_replacement_loads_nothing(options):
    state = trained(**options).state_dict()
    model = encoder()
    before = snapshot(model)
    with pytest.raises(TypeError, match="'windows'"):
        load_replaced(model, state, windows=3)
    assert snapshot(model) == before
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_replaced(model, state, **{**options, "right": 2})
    assert snapshot(model) == before
    load_replaced(model, state, **options)


def test_a_load_hook_that_fails_late_changes_nothing(options):
    state = trained(**options).state_dict()
    model = encoder()

    def complain(*_):
        raise OSError("late")

    model.register_load_state_dict_post_hook(complain)
    before = snapshot(model)
    with pytest.raises(OSError, match="late"):
        load_replaced(model, state, **options)
    assert snapshot(model) == before


class Marker:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_pickle_that_runs_code_is_refused(tmp_path, options):
    marker = tmp_path / "marker"
    torch.save({"x": Marker(str(marker))}, tmp_path / "x.pt")
    model = encoder()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"x\.pt holds more than weights.*open"):
        load_replaced(model, tmp_path / "x.pt", **options)
    assert not marker.exists()
    assert snapshot(model) == before


def test_what_is_no_checkpoint(tmp_path):
    model = encoder()
    with pytest.raises(FileNotFoundError, match=r"nothing\.pt"):
        load_replaced(model, tmp_path / "nothing.pt")
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
        load_replaced(model, tmp_path / "nothing.safetensors")
    with pytest.raises(TypeError, match=r"checkpoint must be a path.*list"):
        load_replaced(model, [1])
    for name in ("broken.pt", "broken.safetensors"):
        for content in (b"", b"some text", b"PK\x03\x04", b"\x80\x02"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ValueError, match=f"{name} is no safetensors file or file of"):
                load_replaced(model, tmp_path / name)
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    with pytest.raises(ValueError, match="no state dict but a Tensor"):
        load_replaced(model, tmp_path / "tensor.pt")
    with pytest.raises(ValueError, match="no state dict: 1 in it"):
        load_replaced(model, {1: torch.zeros(3)})
    with pytest.raises(ValueError, match="meta device"):
        load_replaced(encoder().to("meta"), {})
    lazy = nn.Sequential(nn.LazyLinear(D), encoder())
    with pytest.raises(ValueError, match="run a batch if they are lazy"):
        load_replaced(lazy, {})
    for untouched in (model, lazy):
        assert not [m for m in untouched.modules() if isinstance(m, LocalDenseSynthesizerAttention)]
    with pytest.raises(TypeError, match=r"model must be an nn\.Module"):
        load_replaced(None, {})


# The command


def factory():
    """A model as a user's own module makes it."""
    model = with_subclass(attention=MyAttention)
    replace_attention(model, layers=[0])
    return nn.ModuleDict({"encoder": model, "pool": nn.MultiheadAttention(D, H)})


class Factories:
    """Where a dotted factory is."""

    conformer = staticmethod(encoder)


def test_list(capsys):
    assert main(["--list", "test_replace:factory"]) == 0
    lines = capsys.readouterr().out.splitlines()
    known = "torch.nn.modules.transformer.TransformerEncoderLayer only torch.nn.modules.activation"
    where = ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    where += ["encoder.layers.2.self_attn", "pool"]
    assert [line.split()[:4] for line in lines[:5]] == [
        "layer path class host".split(),
        ["0", where[0], "MultiheadAdapter", "torch"],
        ["1", where[1], "MultiheadAttention", "torch"],
        ["2", where[2], "MyAttention", "torch"],
        ["-", where[3], "MultiheadAttention", "-"],
    ]
    assert [line.split(maxsplit=6)[4:] for line in lines[:5]] == [
        ["heads", "width", "replaceable"],
        ["-", "-", "no: replaced already"],
        ["4", "16", "yes"],
        ["-", "-", f"no: of the unknown class test_replace.MyAttention: in {known}."
         "MultiheadAttention is known"],
        ["-", "-", "no: unknown class torch.nn.modules.activation.MultiheadAttention in "
         "torch.nn.modules.container.ModuleDict"],
    ]  # fmt: skip
    assert lines[5:] == ["1 of 4 can be replaced"]
    # The numbers are those that `layers` takes.
    assert replace_attention(factory(), layers=[1], host="torch").replaced == [where[1]]


def test_list_of_a_dotted_factory_and_of_a_class(capsys):
    assert main(["--list", "test_replace:Factories.conformer"]) == 0
    assert capsys.readouterr().out.endswith("3 of 3 can be replaced\n")
    assert main(["--list", "test_replace:Wrapper"]) == 0
    assert capsys.readouterr().out.endswith("3 of 3 can be replaced\n")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere", "MODEL must be a directory with a config.json, or MODULE:FACTORY, got 'now"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("test_replace:nothing", "has no attribute 'nothing'"),
        ("test_replace:encoder.layers", "has no attribute 'layers'"),
        ("collections:OrderedDict", "must return an nn.Module, got OrderedDict"),
        ("torch.nn:TransformerEncoder", "missing 2 required positional arguments"),
    ],
)
def test_list_of_what_is_no_model(capsys, model, message):
    assert main(["--list", model]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("ldsa-replace: error: ") and message in output.err
    assert not output.out


def test_the_command_finds_modules_where_it_is_called(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def model():\n"
        "    return torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)\n"
    )
    code = "import sys; from ldsa_nn.replace import main; sys.path.remove(''); sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, "--list", "mine:model"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (
        result.stdout.split()
        == (
            "layer path class host heads width replaceable "
            "0 self_attn MultiheadAttention torch 2 8 yes 1 of 1 can be replaced"
        ).split()
    )


def test_public_names():
    assert ldsa_nn.replace_attention is replace_attention
    assert ldsa_nn.load_replaced is load_replaced
