"""One battery for every class of host, in the toolkit's real encoder with random weights."""

import copy
import importlib.util
import sys

import pytest
import torch
from conftest import CI, ROOT
from host_cases import TOOLKITS, D, H, calls, leaked
from torch import nn

sys.path.insert(0, str(ROOT / "examples"))

import bench_hosts

from ldsa_nn import LocalDenseSynthesizerAttention, load_replaced, replace_attention
from ldsa_nn.hosts import Adapter

# Those that `pip install ldsa_nn[test]` brings: in CI their absence is a failure, not a skip.
REQUIRED = {"speechbrain", "torch", "torchaudio", "transformers"}

CASES = [
    pytest.param(toolkit, case, id=f"{toolkit}-{case.name.replace(' ', '_')}")
    for toolkit, cases in TOOLKITS.items()
    if importlib.util.find_spec(toolkit) or (CI and toolkit in REQUIRED)
    for case in cases()
]
each_host = pytest.mark.parametrize(("toolkit", "case"), CASES)
OPTIONS = dict(left=3, right=2, use_bias=True)


def originals(model, report):
    """The attentions that the report names, in a model not replaced."""
    return [model.get_submodule(path) for path in report.replaced]


@each_host
def test_report(toolkit, case):
    model, original = case.build(), case.build()
    report = replace_attention(model, host=toolkit, **OPTIONS)
    assert len(report.replaced) == 2
    assert report.new_parameters == [
        f"{path}.layer.{w}.{kind}"
        for path in report.replaced
        for w in ("w1", "w2", "w3", "w_out")
        for kind in ("weight", "bias")
    ]
    for old, path in zip(originals(original, report), report.replaced, strict=True):
        assert not isinstance(old, Adapter)
        new = model.get_submodule(path)
        assert isinstance(new, Adapter) and type(new.layer) is LocalDenseSynthesizerAttention
        assert (new.layer.n_head, new.layer.n_feat) == (H, D)
        assert (new.layer.left, new.layer.right) == (3, 2)
        assert new.layer.dropout_rate == pytest.approx(0.1)
    before, after = original.state_dict(), model.state_dict()
    kept = [name for name in after if name not in report.new_parameters]
    assert all(torch.equal(after[name], before[name]) for name in kept)
    with pytest.raises(ValueError, match="replaced already"):
        replace_attention(model, host=toolkit)


@each_host
def test_a_padded_batch_is_each_utterance_alone(toolkit, case):
    model, deaf = case.build(), case.build()
    report = replace_attention(model, host=toolkit, **OPTIONS)
    replace_attention(deaf, host=toolkit, honor_mask=False, **OPTIONS)
    deaf.load_state_dict(model.state_dict())
    for path in report.replaced:
        adapter = model.get_submodule(path)
        ((x, *_), kwargs, out) = calls(case, model, adapter.layer)[0]
        mask = kwargs["mask"]
        if case.exact is None:
            assert mask is None
            continue
        assert mask.dtype == torch.bool and mask.shape == x.shape[:2]
        count = int(mask[-1].sum())
        assert mask[0].all() and 0 < count < x.shape[1] and mask[-1, :count].all()
        alone = adapter.layer(x[-1:, :count])[0]
        torch.testing.assert_close(out[-1, :count], alone, atol=1e-6, rtol=1e-5)
        # A control that ignores the mask is far off: the comparison can fail.
        ignoring = deaf.get_submodule(path).layer(x, mask=mask)
        assert (ignoring[-1, :count] - alone).abs().max() > 1e-3
        # The host takes what the layer gave, in its own layout.
        returned = calls(case, model, adapter)[0][2]
        returned = returned if isinstance(returned, torch.Tensor) else returned[0]
        again = out if returned.shape == out.shape else out.transpose(0, 1)
        assert torch.equal(returned, again)

    # The whole model leaks no more than the original, which report.warnings tells.
    if case.exact:
        assert leaked(case, case.build()) < 1e-5
        assert leaked(case, model) < 1e-5
        assert leaked(case, deaf) > 1e-3
    elif case.exact is False:
        assert leaked(case, case.build()) > 1e-3
        assert leaked(case, model) > 1e-3
        assert any("leak" in warning for warning in report.warnings)


@each_host
def test_the_call_and_what_it_returns(toolkit, case):
    model, original = case.build(), case.build()
    report = replace_attention(model, host=toolkit, **OPTIONS)
    for path in report.replaced:
        old = original.get_submodule(path)
        args, kwargs, expected = calls(case, original, old)[0]
        got = model.get_submodule(path)(*args, **kwargs)
        assert type(got) is type(expected)
        if isinstance(expected, tuple):
            assert len(got) == len(expected)
            got, expected = got[0], expected[0]
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        with pytest.raises(TypeError):
            model.get_submodule(path)()


@each_host
@pytest.mark.parametrize("chosen", [[0], [1]])
def test_any_layer_may_keep_its_own(toolkit, case, chosen):
    model, original = case.build(), case.build()
    report = replace_attention(model, host=toolkit, layers=chosen, **OPTIONS)
    assert len(report.replaced) == 1
    x, lengths = case.batch()
    out = case.call(model, x, lengths)
    assert out.isfinite().all()
    assert (out - case.call(original, x, lengths)).abs().max() > 1e-3
    if case.exact:
        assert leaked(case, model) < 1e-5
    rest = [index for index in (0, 1) if index not in chosen]
    replace_attention(model, host=toolkit, layers=rest, **OPTIONS)
    at_once = case.build()
    replace_attention(at_once, host=toolkit, **OPTIONS)
    assert list(at_once.state_dict()) == list(model.state_dict())
    at_once.load_state_dict(model.state_dict())
    assert torch.equal(case.call(at_once, x, lengths), case.call(model, x, lengths))


@each_host
def test_training(toolkit, case):
    model = case.build().train()
    report = replace_attention(model, host=toolkit, **OPTIONS)
    x, lengths = case.batch()
    case.call(model, x, lengths).square().mean().backward()
    for name in report.new_parameters:
        grad = model.get_parameter(name).grad
        assert grad is not None and grad.isfinite().all(), name
        # Each weight of the window is a softmax's, which a constant bias of w2 may not move.
        assert grad.any(), name
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    assert set(report.new_parameters) < set(trained)


@each_host
def test_save_and_load(toolkit, case, tmp_path):
    options = dict(OPTIONS, host=toolkit, left=[3, 1], grouped_w2=True)
    model = case.build()
    report = replace_attention(model, **options)
    for name in report.new_parameters:
        nn.init.normal_(model.get_parameter(name), std=0.3)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    x, lengths = case.batch()
    with torch.no_grad():
        expected = case.call(model, x, lengths)
        fresh = case.build()
        assert load_replaced(fresh, tmp_path / "model.pt", **options) == report
        assert torch.equal(case.call(fresh, x, lengths), expected)
        assert torch.equal(case.call(copy.deepcopy(model), x, lengths), expected)
    before = case.build()
    weights = {name: value.clone() for name, value in before.state_dict().items()}
    with pytest.raises(RuntimeError, match="Missing key"):
        load_replaced(before, weights, **options)
    assert all(torch.equal(before.state_dict()[name], value) for name, value in weights.items())


@each_host
def test_init_from_old_keeps_what_equal_frames_give(toolkit, case):
    # Of equal frames an attention returns out(value(x)), whatever its weights are.
    model, original = case.build(), case.build()
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.load_state_dict(original.state_dict())
    options = dict(host=toolkit, left=0, right=0, use_bias=True, init_from_old=True)
    report = replace_attention(model, **options)
    assert not any("init_from_old" in warning for warning in report.warnings)
    for path in report.replaced:
        old, new = original.get_submodule(path), model.get_submodule(path)
        args, kwargs, _ = calls(case, original, old)[0]
        hidden = args[0] if args else kwargs.get("hidden_states", kwargs.get("query"))
        equal = torch.randn(D).expand(hidden.shape)
        args = [equal if value is hidden else value for value in args]
        kwargs = {name: equal if value is hidden else value for name, value in kwargs.items()}
        out, expected = new(*args, **kwargs), old(*args, **kwargs)
        if isinstance(out, tuple):
            out, expected = out[0], expected[0]
        inside = (out != 0).any(-1)
        assert inside.any()
        torch.testing.assert_close(out[inside], expected[inside])


@each_host
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(toolkit, case, dtype):
    model = case.build().to(dtype)
    report = replace_attention(model, host=toolkit, **OPTIONS)
    assert {model.get_parameter(name).dtype for name in report.new_parameters} == {dtype}
    x, lengths = case.batch()
    out = case.call(model, x.to(dtype), lengths)
    assert out.dtype == dtype and out.isfinite().all()


@pytest.mark.gpu
@each_host
def test_on_a_gpu(toolkit, case):
    model = case.build()
    report = replace_attention(model, host=toolkit, **OPTIONS)
    x, lengths = case.batch()
    expected = case.call(model, x, lengths)
    length = case.call(model, x[-1:, : lengths[-1]], lengths[-1:]).shape[1]
    with torch.backends.cudnn.flags(allow_tf32=False):
        out = case.call(model.cuda(), x.cuda(), lengths.cuda())
        out[-1, :length].square().mean().backward()
    assert all(model.get_parameter(name).grad is not None for name in report.new_parameters)
    # Padding that leaks brings other rounding along, and no frame of it is compared.
    torch.testing.assert_close(out[0].cpu(), expected[0], atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(out[-1, :length].cpu(), expected[-1, :length], atol=1e-3, rtol=1e-2)


def test_the_readme_has_every_host():
    rows = [f"| {toolkit} | {case.name} |" for toolkit, case in bench_hosts.cases() if case.shown]
    _, _, table = (ROOT / "README.md").read_text(encoding="utf-8").partition(bench_hosts.MARKS[0])
    lines = table.partition(bench_hosts.MARKS[1])[0].splitlines()
    assert [row for row in rows if not any(line.startswith(row) for line in lines)] == []
    if not {"speechbrain", "torchaudio", "transformers"} - set(bench_hosts.present()):
        assert sum(line.startswith("| ") for line in lines) == len(rows) + 1
