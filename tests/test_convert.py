"""Reference checkpoints: parity with the classes, wrappers, inference, refusals, conversion."""

import argparse
import collections
import dataclasses
import io
import json
import os
import pathlib
import re
import stat
import time
import warnings

import numpy as np
import pytest
import torch
from conftest import ROOT
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ldsa_nn import HybridAttention, LocalDenseSynthesizerAttention, convert
from ldsa_nn.convert import LayerSpec, convert_checkpoint, find_layers, load_layer, main

GOLDEN = ROOT / "tests" / "reference_golden.safetensors"
with safe_open(GOLDEN, "pt") as _file:
    CASES = {name: json.loads(text) for name, text in sorted(_file.metadata().items())}

VARIANTS = {
    "LocalDenseSynthesizerAttention": "linear",
    "LocalDenseSynthesizerAttention2": "linear",
    "MHLocalDenseSynthesizerAttention": "grouped",
    "HybirdAttention": "hybrid",
}


def under(prefix, weights):
    return {f"{prefix}{name}": tensor for name, tensor in weights.items()}


def weights(layer=None, **options):
    """The state dict of one layer: by default linear, H=4, D=16, W=15."""
    torch.manual_seed(0)
    layer = layer or LocalDenseSynthesizerAttention(4, 16, **options)
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def linear(n_feat, rows, **kwargs):
    """A linear layer's state dict with a w2 of so many rows, whatever heads they are for."""
    square = {f"{name}.weight": torch.randn(n_feat, n_feat) for name in ("w1", "w3", "w_out")}
    return {**square, "w2.weight": torch.randn(rows, n_feat), **kwargs}


def grouped(n_feat, rows, width):
    return {
        **linear(n_feat, rows),
        "w2.weight": torch.randn(rows, width, 1),
        "w2.bias": torch.randn(rows),
    }


SPEC = LayerSpec("linear", 4, 16, 15, False, "zero", ((4, 15),))

# What training code wraps around the weights `w` of one layer, and the prefix that is left.
WRAPPED = {
    "bare": (lambda w: w, ""),
    "prefixed": (
        lambda w: under("encoder.encoders.0.self_attn.", w),
        "encoder.encoders.0.self_attn",
    ),
    "ddp": (lambda w: under("module.", w), ""),
    "compiled": (lambda w: under("_orig_mod.", w), ""),
    "model.": (lambda w: under("model.", w), ""),
    "ddp of compiled": (lambda w: under("module._orig_mod.", w), ""),
    "compiled ddp": (lambda w: under("_orig_mod.module.model.module.", w), ""),
    "lightning": (
        lambda w: {"state_dict": under("model.att.", w), "epoch": 3, "optimizer_states": [{}]},
        "att",
    ),
    "espnet snapshot": (
        lambda w: {
            "model": collections.OrderedDict(under("encoder.encoders.0.self_attn.", w)),
            "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1.0}]},
        },
        "encoder.encoders.0.self_attn",
    ),
    "opentransformer": (
        lambda w: {
            "params": {"model": {"n_head": 4}, "train": {"epochs": 3}},
            "frontend": {},
            "encoder": under("blocks.0.slf_attn.", w),
            "decoder": {"blocks.0.norm.weight": torch.ones(3)},
            "ctc": {"weight": torch.ones(2)},
        },
        "encoder.blocks.0.slf_attn",
    ),
    "nested": (
        lambda w: {"net": {"model_state_dict": {"params": under("module.", w)}, "step": 3}},
        "",
    ),
    "parts in a wrapper": (
        lambda w: {"model": {"encoder": {"state_dict": under("module.0.", w)}}},
        "encoder.0",
    ),
}
wrapped = pytest.mark.parametrize(("wrap", "prefix"), WRAPPED.values(), ids=WRAPPED)


def same(layer, expected):
    """Whether a layer holds exactly these weights, dtypes included."""
    got = layer.state_dict()
    return got.keys() == expected.keys() and all(
        got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)
        for name, tensor in expected.items()
    )


# Parity with the reference classes.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@wrapped
@pytest.mark.parametrize("case", CASES)
def test_a_loaded_layer_is_the_reference_class(case, wrap, prefix, dtype, tmp_path):
    tensors, about = load_file(GOLDEN), CASES[case]
    tensors = {
        k.removeprefix(f"{case}/"): v for k, v in tensors.items() if k.startswith(f"{case}/")
    }
    parameters = {
        name.removeprefix("param/"): value.to(dtype)
        for name, value in tensors.items()
        if name.startswith("param/")
    }
    torch.save(wrap(parameters), path := tmp_path / "reference.pt")
    options = {}
    if about["reference_class"] == "LocalDenseSynthesizerAttention2":
        options["edge"] = "renormalize"
    if about["context_size"] == 1:
        options["n_head"] = about["n_head"]
    layer = load_layer(path, prefix, **options)

    attention = layer.ldsa_att if isinstance(layer, HybridAttention) else layer
    assert (attention.n_head, attention.window) == (about["n_head"], about["context_size"])
    assert attention.left == attention.right
    attention.honor_mask = False  # as the reference
    x = tensors["x"].to(dtype).requires_grad_()
    value = tensors["value"].to(dtype).requires_grad_() if "value" in tensors else None
    y = layer(x, x, value, tensors.get("mask"))
    y.backward(tensors["grad_y"].to(dtype))

    results = {"y": y, "grad_x": x.grad}
    if value is not None:
        results["grad_value"] = value.grad
    results |= {f"grad/{name}": p.grad for name, p in layer.named_parameters()}
    assert set(results) == {n for n in tensors if n == "y" or n.startswith("grad")} - {"grad_y"}
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for name, result in results.items():
        reference = tensors[name]
        assert result.dtype == dtype
        error = (result.double() - reference).abs().max().item()
        assert error <= tolerance * max(1.0, reference.abs().max().item()), name


@pytest.mark.parametrize(
    "case", [name for name, about in CASES.items() if about["context_size"] > 1]
)
def test_the_specs_of_the_reference_classes(case):
    about = CASES[case]
    parameters = {
        name.removeprefix(f"{case}/param/"): value
        for name, value in load_file(GOLDEN).items()
        if name.startswith(f"{case}/param/")
    }
    pair = about["n_head"], about["context_size"]
    variant = VARIANTS[about["reference_class"]]
    assert find_layers(parameters) == {
        "": LayerSpec(
            variant, pair[0], about["n_feat"], pair[1], about["use_bias"], "zero", (pair,)
        )
    }


# Wrappers.


@wrapped
def test_wrappers_are_undone(wrap, prefix, tmp_path):
    w = weights()
    torch.save(wrap(w), path := tmp_path / "snapshot.ep.3")
    assert find_layers(path) == find_layers(wrap(w)) == {prefix: SPEC}
    assert same(load_layer(path, prefix), w)
    assert same(load_layer(wrap(w)), w)


@pytest.mark.parametrize(
    "name", ["a.pt", "a.pth", "a.th", "model.acc.best", "a.ckpt", "snapshot.ep.12", "noending"]
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old format"])
def test_file_names_and_formats(name, zipped, tmp_path):
    path = tmp_path / name
    torch.save({"model": weights()}, path, _use_new_zipfile_serialization=zipped)
    assert find_layers(path) == find_layers(str(path)) == {"": SPEC}
    assert same(load_layer(path), weights())


def test_safetensors_files_load(tmp_path):
    save_file(under("module.att.", weights()), path := tmp_path / "a.safetensors")
    assert find_layers(path) == {"att": SPEC}
    assert same(load_layer(path), weights())


def test_the_same_weights_in_any_wrapper_convert_to_the_same(tmp_path):
    w = {**under("encoder.att.", weights()), "ctc.weight": torch.randn(3, 2)}
    for i, start in enumerate(("", "module.", "model.", "_orig_mod.", "model._orig_mod.module.")):
        torch.save(under(start, w), tmp_path / "a.pt")
        specs = convert_checkpoint(tmp_path / "a.pt", dst := tmp_path / f"{i}.safetensors")
        assert specs == {"encoder.att": SPEC}
        converted = load_file(dst)
        assert converted.keys() == w.keys()
        assert all(torch.equal(converted[name], w[name]) for name in w)


@pytest.mark.parametrize(
    "keys",
    [
        "encoder.module.self_attn",
        "encoder.model.0._orig_mod.att",
        "module.att",  # beside other modules
    ],
)
def test_real_submodules_named_like_wrappers_survive(keys, tmp_path):
    w = {**under(f"{keys}.", weights()), "head.weight": torch.ones(2)}
    assert list(find_layers(w)) == [keys]
    assert list(find_layers(under("module.", w))) == [keys]
    convert_checkpoint(under("module.", w), dst := tmp_path / "a.safetensors")
    assert load_file(dst).keys() == w.keys()


def test_a_prefix_that_is_no_wrapper_is_kept():
    assert list(find_layers(under("encoder.", weights()))) == ["encoder"]
    assert list(find_layers(under("net.", weights()))) == ["net"]
    assert list(find_layers(under("modules.", weights()))) == ["modules"]


def test_wrappers_without_weights_do_not_count():
    """OpenTransformer's params are a configuration."""
    w = weights()
    assert list(find_layers({**w, "params": {"model": {"lr": 1}}, "model": {"n": 3}})) == [""]


def test_model_is_taken_before_other_sections():
    first, second = weights(), under("x.", linear(12, 6))
    assert list(find_layers({"ema": second, "model": first})) == [""]
    assert list(find_layers({"ema": second, "state_dict": first})) == [""]
    assert list(find_layers({"ema": second, "encoder": first})) == ["encoder"]
    assert list(find_layers({"params": second, "encoder": first})) == ["encoder"]
    assert list(find_layers({"ema": second, "epoch": 3})) == ["x"]


def test_section_names_another(tmp_path):
    averaged = {name: tensor + 1 for name, tensor in weights().items()}
    checkpoint = {
        "model": weights(),
        "ema": {"state_dict": under("module.", averaged), "decay": 0.99},
        "teacher": averaged,
        "optimizer": {"state": {}},
    }
    for section in ("ema", "teacher"):
        assert same(load_layer(checkpoint, section=section), averaged)
        assert same(load_layer({"state_dict": checkpoint}, section=section), averaged)
        assert find_layers(checkpoint, section=section) == {"": SPEC}
        convert_checkpoint(checkpoint, dst := tmp_path / "a.safetensors", section=section)
        assert same(load_layer(dst), averaged)
    assert same(load_layer(checkpoint, section="model"), weights())
    twice = {"model": weights(), "ema": {"ema": weights(), "model": averaged}}
    assert same(load_layer(twice, section="ema"), averaged), "inside, the choice is as ever"


def test_an_unknown_section_lists_those_there_are(tmp_path):
    checkpoint = {"model": weights(), "ema": weights(), "optimizer": {"state": {}}}
    for function in (find_layers, load_layer):
        with pytest.raises(ValueError, match=r"no section 'emma'.*it has 'model', 'ema'$"):
            function(checkpoint, section="emma")
    with pytest.raises(ValueError, match="no section 'optimizer'"):
        convert_checkpoint(checkpoint, tmp_path / "a.safetensors", section="optimizer")
    with pytest.raises(ValueError, match="no section 'ema' with weights, it has no sections"):
        find_layers(weights(), section="ema")
    assert not list(tmp_path.iterdir())


def test_a_dict_that_holds_itself():
    endless = {}
    endless["model"] = endless
    with pytest.raises(ValueError, match="nested without end"):
        find_layers(endless)


# What is a layer.


def test_every_layer_is_found_in_order(tmp_path):
    w = {}
    for i in (10, 9, 2):
        w |= under(f"encoder.{i}.att.", linear(16, 12 * i if i == 10 else 60))
    w["encoder.9.norm.weight"] = torch.ones(16)
    assert list(find_layers(w)) == [f"encoder.{i}.att" for i in (2, 9, 10)]
    assert find_layers(w)["encoder.10.att"].candidates == ((8, 15),)
    with pytest.raises(
        ValueError, match=r"3 layers, give prefix, one of: encoder\.2\.att, .*9\.att, .*10\.att"
    ):
        load_layer(w)
    with pytest.raises(ValueError, match=r"no layer at prefix 'encoder.3'.*encoder\.2\.att"):
        load_layer(w, "encoder.3")
    with pytest.raises(ValueError, match=r"no layer at prefix 'encoder\.2\.att\.'"):
        load_layer(w, "encoder.2.att.")
    assert load_layer(w, "encoder.10.att").n_head == 8


LLAMA = {
    "ffn.w1.weight": torch.ones(64, 16),
    "ffn.w2.weight": torch.ones(16, 64),
    "ffn.w3.weight": torch.ones(64, 16),
}


def test_feed_forwards_are_not_taken():
    assert list(find_layers({**LLAMA, **under("att.", weights())})) == ["att"]
    four = {**LLAMA, "ffn.w_out.weight": torch.ones(16, 16)}
    assert list(find_layers({**four, **under("att.", weights())})) == ["att"]
    square = {f"ffn.w{i}.weight": torch.ones(16, 16) for i in (1, 2, 3)}
    assert list(find_layers({**square, **under("att.", weights())})) == ["att"]
    with pytest.raises(ValueError, match="no LDSA layer in the checkpoint") as caught:
        find_layers(four)
    assert "ffn.w1.weight has shape [64, 16], expected [16, 16]" in str(caught.value)


def test_shapes_that_are_nothing():
    empty = {f"x.{name}": torch.ones(0, 0) for name in weights()}
    with pytest.raises(ValueError, match=r"no LDSA layer.*x\.w1\.weight has shape \[0, 0\]"):
        find_layers(empty)
    scalars = {f"x.{name}": torch.ones(()) for name in weights()}
    with pytest.raises(ValueError, match=r"no LDSA layer.*x\.w3\.weight has shape \[\]"):
        find_layers(scalars)


def test_no_layer_is_an_error(tmp_path):
    for function in (find_layers, load_layer):
        with pytest.raises(ValueError, match=r"no LDSA layer in the checkpoint.*got a.b, c$"):
            function({"a.b": torch.ones(2), "c": torch.ones(3)})
        with pytest.raises(ValueError, match=r"no LDSA layer .*got no tensors"):
            function({"model": {}, "epoch": 3})
        with pytest.raises(ValueError, match=r"got no tensors. Sections with weights: module, x$"):
            function({"module": weights(), "x": weights(), "epoch": 3})
        with pytest.raises(ValueError, match=r"got k0, k1, k2, k3, k4, \.\.\.$"):
            function({f"k{i}": torch.ones(2) for i in range(9)})
    torch.save({"model": {"x": torch.ones(2)}}, path := tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"no LDSA layer in .*a\.pt"):
        convert_checkpoint(path, tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize("lost", ["w1.weight", "w2.weight", "w3.weight", "w_out.weight"])
def test_three_of_the_four_keys_are_named(lost):
    w = under("enc.0.att.", weights())
    del w[f"enc.0.att.{lost}"]
    kept = ", ".join(sorted({"w1.weight", "w2.weight", "w3.weight", "w_out.weight"} - {lost}))
    for call in (find_layers, load_layer):
        with pytest.raises(ValueError, match="no LDSA layer") as caught:
            call(w)
        assert f"enc.0.att has {kept}: missing enc.0.att.{lost}" in str(caught.value)
    w |= under("enc.1.att.", weights())
    if lost != "w_out.weight":  # then it might be a feed-forward layer
        with pytest.raises(ValueError, match=f"broken layers.*missing enc.0.att.{lost}"):
            find_layers(w)
    with pytest.raises(ValueError, match=f"broken layer.*missing enc.0.att.{lost}"):
        load_layer(w, "enc.0.att")
    assert same(load_layer(w, "enc.1.att"), weights())


def test_a_sibling_dot_att_makes_a_hybrid():
    w = weights(HybridAttention(4, 16))
    for prefix in ("", "enc.0.self_attn"):
        start = f"{prefix}." if prefix else ""
        assert find_layers(under(start, w)) == {prefix: dataclasses.replace(SPEC, variant="hybrid")}
        layer = load_layer(under(start, w))
        assert isinstance(layer, HybridAttention)
        assert same(layer, w)
    alone = {name: tensor for name, tensor in w.items() if name.startswith("ldsa_att.")}
    assert find_layers(under("a.", alone)) == {"a.ldsa_att": SPEC}
    # A name that merely begins alike is no sibling, nor is one of another parent.
    others = {"dot_attention.weight": torch.ones(2), "a.dot_att.linear_q.weight": torch.ones(2)}
    assert list(find_layers({**alone, **others})) == ["ldsa_att"]
    dot_att = {name: tensor for name, tensor in w.items() if name.startswith("dot_att.")}
    assert list(find_layers({**under("self_attn.", weights()), **dot_att})) == ["self_attn"]


def test_all_faults_are_in_one_message(tmp_path):
    w = under("att.", weights(use_bias=True))
    del w["att.w1.bias"]
    w["att.w3.weight"] = torch.ones(16, 15)
    w["att.norm.weight"] = torch.ones(2)
    w["att.w_out.weight"] = w["att.w_out.weight"].int()
    faults = [
        "unexpected att.w2.bias",
        "unexpected att.w3.bias",
        "unexpected att.w_out.bias",
        "unexpected att.norm.weight",
        "att.w3.weight has shape [16, 15], expected [16, 16]",
        "att.w_out.weight is torch.int32, expected floating point",
    ]
    for call in (
        lambda: find_layers(w),
        lambda: load_layer(w),
        lambda: load_layer(w, "att"),
        lambda: convert_checkpoint(w, tmp_path / "a.safetensors"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  matched below, all of them
            call()
        for fault in faults:
            assert fault in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"w1.bias": torch.ones(16)}, "missing w2.bias; missing w3.bias; missing w_out.bias"),
        ({"w2.bias": torch.ones(60)}, "unexpected w2.bias"),
        ({"pos.weight": torch.ones(60)}, "unexpected pos.weight"),
        ({"w2.weight": torch.ones(60, 8)}, "w2.weight has shape [60, 8], expected [60, 16]"),
        ({"w3.weight": torch.ones(8, 8)}, "w3.weight has shape [8, 8], expected [16, 16]"),
        ({"w1.weight": torch.ones(8, 8)}, "w1.weight has shape [8, 8], expected [16, 16]"),
        (
            {"w2.weight": torch.ones(60)},
            "w2.weight has shape [60], expected [H*W, 16] or [H*W, 16/H, 1]",
        ),
        ({"w2.weight": torch.ones(0, 16)}, "w2.weight has shape [0, 16], expected [H*W, 16]"),
        ({"w2.weight": torch.ones(())}, "w2.weight has shape [], expected [H*W, 16]"),
        # A grouped w2 always has a bias.
        ({"w2.weight": torch.ones(60, 4, 1)}, "missing w2.bias"),
        (
            {"w2.weight": torch.ones(60, 4, 3)},
            "w2.weight has shape [60, 4, 3], expected [60, 4, 1]",
        ),
        ({"w2.weight": torch.ones(60, 5, 1)}, "w2.weight has shape [60, 5, 1], expected [H*W, 16]"),
        ({"w2.weight": torch.ones(61, 4, 1)}, "w2.weight has shape [61, 4, 1], expected [H*W, 16]"),
    ],
)
def test_a_fault_is_named(change, fault):
    for call in (find_layers, load_layer):
        with pytest.raises(ValueError, match=r"layer \(root\): ") as caught:
            call(weights() | change)
        assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("dot_att.linear_k.bias", None, "missing att.dot_att.linear_k.bias"),
        ("dot_att.scale", torch.ones(1), "unexpected att.dot_att.scale"),
        ("norm.weight", torch.ones(16), "unexpected att.norm.weight"),
        ("ldsa_att.w1.bias", torch.ones(16), "unexpected att.ldsa_att.w1.bias"),
        ("dot_att.linear_q.weight", torch.ones(8, 16), "dot_att.linear_q.weight has shape [8, 16]"),
        ("ldsa_att.w2.weight", torch.ones(60, 4, 1), "shape [60, 4, 1], expected [60, 16]"),
    ],
)
def test_a_fault_of_a_hybrid_is_named(name, value, fault):
    w = weights(HybridAttention(4, 16))
    w.pop(name, None)
    if value is not None:
        w[name] = value
    for call in (find_layers, load_layer):
        with pytest.raises(ValueError, match="layer att: ") as caught:
            call(under("att.", w))
        assert fault in str(caught.value)


def test_only_the_weight_of_a_wrong_w2_is_named():
    w = weights() | {"w2.weight": torch.ones(61, 4, 1), "w2.bias": torch.ones(61)}
    with pytest.raises(ValueError, match=r"layer \(root\): w2\.weight has [^;]*$"):
        find_layers(w)
    with pytest.raises(ValueError, match=r"; w2\.bias has shape \[1, 61\], expected \[H\*W\]$"):
        find_layers(w | {"w2.bias": torch.ones(1, 61)})


def test_faults_of_all_layers_are_in_one_message():
    w = {**under("a.", weights()), **under("b.", weights()), **under("c.", weights())}
    w["a.x"] = w["b.y"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"(?s)unexpected a\.x.*unexpected b\.y"):
        find_layers(w)
    assert same(load_layer(w, "c"), weights())


# Heads and windows.


@pytest.mark.parametrize(
    ("n_feat", "rows", "pairs"),
    [
        (16, 60, [(4, 15)]),
        (256, 60, [(4, 15)]),
        (256, 4 * 63, [(4, 63)]),
        (16, 8 * 31, [(8, 31)]),
        (16, 15, [(1, 15)]),
        (8, 24, [(8, 3)]),
        (12, 6, [(2, 3)]),
        (12, 14, [(2, 7)]),
        (12, 60, [(4, 15), (12, 5)]),
        (320, 60, [(4, 15), (20, 3)]),
        (144, 4 * 15, [(4, 15), (12, 5)]),
        (144, 4 * 45, [(4, 45), (12, 15), (36, 5)]),
        (80, 5 * 7, [(1, 35), (5, 7)]),
    ],
)
def test_candidates_of_a_linear_w2(n_feat, rows, pairs, tmp_path):
    w = linear(n_feat, rows)
    (spec,) = find_layers(w).values()
    assert spec.candidates == tuple(pairs)
    if len(pairs) == 1:
        assert (spec.n_head, spec.context_size) == pairs[0]
        layer = load_layer(w)
        assert (layer.n_head, layer.window) == pairs[0]
    else:
        assert spec.n_head is None
        assert spec.context_size is None
        for call in (load_layer, lambda w: convert_checkpoint(w, tmp_path / "a.safetensors")):
            with pytest.raises(ValueError, match="give n_head or context_size") as caught:
                call(w)
            assert all(str(pair) in str(caught.value) for pair in pairs)
        assert not list(tmp_path.iterdir())
    for n_head, window in pairs:
        for options in ({"n_head": n_head}, {"context_size": window}):
            layer = load_layer(w, **options)
            assert (layer.n_head, layer.window) == (n_head, window)
            (spec,) = convert_checkpoint(w, tmp_path / "a.safetensors", **options).values()
            assert spec.candidates == ((n_head, window),)
            assert (spec.n_head, spec.context_size) == (n_head, window)


@pytest.mark.parametrize(
    ("n_feat", "rows"),
    [
        (16, 4 * 8),  # context_size 8: all of it is the power of two
        (16, 16),
        (8, 1),
        (16, 64 * 3),  # 64 heads do not divide 16 features
        (12, 4),
        (12, 16),
        (12, 5 * 8),
    ],
)
def test_a_window_of_one_or_an_even_one_is_not_guessed(n_feat, rows, tmp_path):
    w = under("att.", linear(n_feat, rows))
    for call in (
        find_layers,
        load_layer,
        lambda w: convert_checkpoint(w, tmp_path / "a.safetensors"),
    ):
        with pytest.raises(ValueError, match=rf"layer att: .* = {rows} .*even or 1, give n_head"):
            call(w)
    assert not list(tmp_path.iterdir())


def test_a_window_of_one_is_taken_when_told():
    for options in ({"n_head": 4}, {"context_size": 1}, {"n_head": 4, "context_size": 1}):
        layer = load_layer(linear(16, 4), **options)
        assert (layer.n_head, layer.left, layer.window, layer.right) == (4, 0, 1, 0)


def test_even_windows_are_refused(tmp_path):
    """The reference's window is centred: an even one would shift every frame."""
    dst = tmp_path / "a.safetensors"
    for w in (weights(), linear(16, 32)):
        for function in (load_layer, lambda w, **o: convert_checkpoint(w, dst, **o)):
            with pytest.raises(ValueError, match="context_size must be odd, got 8"):
                function(w, context_size=8)
    for function in (load_layer, lambda w, **o: convert_checkpoint(w, dst, **o)):
        with pytest.raises(ValueError, match=r"= 32 .*context_size odd, got n_head 4"):
            function(linear(16, 32), n_head=4)
        with pytest.raises(
            ValueError, match=r"= 32 .*context_size odd, got n_head of a grouped w2 4"
        ):
            function(grouped(16, 32, 4))
    with pytest.raises(ValueError, match="n_head of a grouped w2 4"):
        find_layers(grouped(16, 32, 4))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {"n_head": 3},
        {"n_head": 5},  # 12 rows a head, but no divisor of n_feat
        {"n_head": 16},
        {"n_head": 64},
        {"n_head": 2},  # leaves an even window
        {"context_size": 7},
        {"context_size": 5},
        {"context_size": 61},
        {"n_head": 4, "context_size": 5},
    ],
)
def test_arguments_that_do_not_fit_the_weights(options, tmp_path):
    got = ", ".join(f"{name} {value}" for name, value in options.items())
    for w in (linear(16, 60), weights(HybridAttention(4, 16))):
        with pytest.raises(ValueError, match=f"= 60 .*got {got}$"):
            load_layer(w, **options)
        with pytest.raises(ValueError, match=f"= 60 .*got {got}$"):
            convert_checkpoint(w, tmp_path / "a.safetensors", **options)
    with pytest.raises(ValueError, match=f"= 60 .*got {got}, n_head of a grouped w2 4$"):
        load_layer(grouped(16, 60, 4), **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_head": 0}, ValueError, "n_head must be positive, got 0"),
        ({"context_size": -1}, ValueError, "context_size must be positive, got -1"),
        ({"n_head": 4.0}, TypeError, "n_head must be an int, got float"),
        ({"n_head": True}, TypeError, "n_head must be an int, got bool"),
        ({"edge": "zeros"}, ValueError, "edge must be 'zero' or 'renormalize', got 'zeros'"),
    ],
)
def test_wrong_arguments(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        load_layer(weights(), **options)
    with pytest.raises(error, match=message):
        convert_checkpoint(weights(), tmp_path / "a.safetensors", **options)
    assert not list(tmp_path.iterdir())


def test_a_grouped_w2_tells_heads_and_window():
    w = weights(LocalDenseSynthesizerAttention(3, 12, 0.0, 5, True, grouped_w2=True))
    spec = LayerSpec("grouped", 3, 12, 5, True, "zero", ((3, 5),))
    assert find_layers(w) == {"": spec}
    # 60 rows of a linear w2 would be ambiguous here.
    assert find_layers(grouped(12, 60, 1))[""].candidates == ((12, 5),)
    assert find_layers(grouped(12, 60, 3))[""].candidates == ((4, 15),)
    assert find_layers(grouped(16, 4, 4))[""].candidates == ((4, 1),)
    layer = load_layer(w, n_head=3, context_size=5)
    assert layer.grouped_w2
    assert same(layer, w)
    assert not find_layers(grouped(12, 60, 3))[""].use_bias


def test_each_layer_has_its_own_window(tmp_path):
    w = {
        **under("a.", linear(12, 60)),
        **under("b.", linear(12, 12)),
        **under("c.", linear(24, 28)),
    }
    specs = convert_checkpoint(w, tmp_path / "a.safetensors", n_head=4)
    pairs = {prefix: (spec.n_head, spec.context_size) for prefix, spec in specs.items()}
    assert pairs == {"a": (4, 15), "b": (4, 3), "c": (4, 7)}
    with pytest.raises(ValueError, match=r"(?s)layer b: .*got context_size 15.*layer c: "):
        convert_checkpoint(w, tmp_path / "b.safetensors", context_size=15)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_ambiguous_layers_are_all_listed(tmp_path):
    w = {
        **under("a.", linear(12, 60)),
        **under("b.", linear(16, 60)),
        **under("c.", linear(320, 60)),
    }
    with pytest.raises(
        ValueError, match=r"(?s)layer a: .*\(4, 15\), \(12, 5\)\nlayer c: "
    ) as caught:
        convert_checkpoint(w, tmp_path / "a.safetensors")
    assert "layer b" not in str(caught.value)
    assert load_layer(w, "b").n_head == 4


# The loaded layer.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_kept(dtype, tmp_path):
    w = weights(dtype=dtype)
    torch.save(w, path := tmp_path / "a.pt")
    convert_checkpoint(path, dst := tmp_path / "a.safetensors")
    for layer in (load_layer(path), load_layer(dst), load_layer(w)):
        assert same(layer, w)
        assert all(p.dtype == dtype and p.requires_grad for p in layer.parameters())
        assert layer(torch.ones(1, 3, 16, dtype=dtype)).dtype == dtype


def test_a_loaded_layer_is_a_new_one():
    """Nothing is shared with the mapping, and loading draws no random numbers."""
    w = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in weights().items()}
    w["w1.weight"] = w["w1.weight"].T.contiguous().T
    state = torch.get_rng_state()
    layer = load_layer(w)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(layer, weights())
    assert layer.training
    assert layer.w1.weight.is_contiguous()
    for parameter in layer.parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert all(torch.equal(w[name], tensor) for name, tensor in weights().items())


def test_edge_and_masks_of_a_loaded_layer():
    for w in (weights(), weights(HybridAttention(4, 16))):
        for edge in (None, "zero", "renormalize"):
            layer = load_layer(w, edge=edge)
            attention = getattr(layer, "ldsa_att", layer)
            assert attention.edge == (edge or "zero")
            assert attention.honor_mask
            assert attention.dropout_rate == 0


# Files that are more than weights, or less.


class Payload:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old format"])
@pytest.mark.parametrize("inside", [True, False], ids=["in the weights", "beside them"])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, "posix.system"),
        (open, "io.open"),
        (eval, "builtins.eval"),
        (os.mkdir, "posix.mkdir"),
    ],
    ids=["system", "open", "eval", "mkdir"],
)
def test_pickled_code_never_runs(function, name, inside, zipped, tmp_path):
    marker = tmp_path / "marker"
    argument = {"system": f"touch {marker}", "eval": f"open({str(marker)!r}, 'w')"}
    payload = Payload(function, argument.get(function.__name__, str(marker)))
    if function is open:
        payload = Payload(open, str(marker), "w")
    checkpoint = {"model": weights() | ({"x": payload} if inside else {}), "x": payload}
    torch.save(checkpoint, path := tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    dst = tmp_path / "a.safetensors"
    for allowed in ((), ("argparse.Namespace",), (argparse.Namespace,)):
        for call in (
            lambda o: find_layers(path, **o),
            lambda o: load_layer(path, **o),
            lambda o: convert_checkpoint(path, dst, **o),
        ):
            with pytest.raises(ValueError, match=name.replace(".", r"\.")) as caught:
                call({"allow_classes": allowed})
            assert "--allow-class" in str(caught.value)
            assert "weights_only" not in str(caught.value)
            assert caught.value.__cause__ is None
            assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert main([str(path), str(dst)]) == 1
    assert main([str(path), "--list"]) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_modules_that_torch_blocks_stay_blocked(tmp_path):
    torch.save({"x": Payload(os.mkdir, str(tmp_path / "marker"))}, path := tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"posix\.mkdir.*--allow-class cannot accept"):
        find_layers(path, allow_classes=["posix.mkdir"])
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


EXTRAS = {
    "pathlib.PosixPath": pathlib.PosixPath("/data/train"),
    "argparse.Namespace": argparse.Namespace(adim=16),
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old format"])
@pytest.mark.parametrize("name", EXTRAS)
def test_harmless_classes_are_accepted_by_name_only(name, zipped, tmp_path, capsys):
    checkpoint = {"model": weights(), "args": EXTRAS[name]}
    torch.save(checkpoint, path := tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    dst = tmp_path / "a.safetensors"
    pattern = rf"a\.pt wants {name} besides weights.*--allow-class {name}"
    before = set(torch.serialization.get_safe_globals())
    for allowed in ((), ["collections.UserDict"]):
        with pytest.raises(ValueError, match=pattern):
            load_layer(path, allow_classes=allowed)
    assert main([str(path), str(dst)]) == 1
    assert f"--allow-class {name}" in capsys.readouterr().err
    assert not dst.exists()

    for allowed in ([name], (type(EXTRAS[name]),), name, {name, "collections.UserDict"}):
        assert same(load_layer(path, allow_classes=allowed), weights())
        assert find_layers(path, allow_classes=allowed) == {"": SPEC}
    assert convert_checkpoint(path, dst, allow_classes=[name]) == {"": SPEC}
    dst.unlink()
    assert main([str(path), str(dst), "--allow-class", name]) == 0
    assert same(load_layer(dst), weights())
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(ValueError, match=pattern):
        load_layer(path)


def test_all_classes_are_named_at_once(tmp_path):
    torch.save({"model": weights(), **EXTRAS}, path := tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"--allow-class argparse.Namespace --allow-class pathlib"):
        find_layers(path)
    both = r"\['argparse\.Namespace', 'pathlib\.PosixPath'\]"
    with pytest.raises(ValueError, match=rf"wants pathlib.PosixPath besides.*{both}"):
        find_layers(path, allow_classes=["argparse.Namespace"])
    assert find_layers(path, allow_classes=list(EXTRAS)) == {"": SPEC}


def test_a_snapshot_with_numpy_inside_can_be_accepted(tmp_path):
    """ESPnet's trainer state holds arrays: their classes come out one error after the other."""
    torch.save(
        {"model": weights(), "trainer": {"t": np.ones(2)}}, path := tmp_path / "snapshot.ep.1"
    )
    allowed = []
    for _ in range(5):
        try:
            assert same(load_layer(path, allow_classes=allowed), weights())
            break
        except ValueError as error:
            wanted = str(error).partition("allow_classes=[")[2].partition("]")[0]
            assert wanted
            # The advice is whole: what was allowed before stays in it.
            advised = [name.strip("' ") for name in wanted.split(",")]
            assert set(allowed) < set(advised)
            allowed = advised
    else:
        pytest.fail(f"not accepted with {allowed}")
    assert all(name.startswith(("numpy.", "_codecs.")) for name in allowed)


@pytest.mark.parametrize("name", ["no.such.Class", "argparse.NoSuchClass", "not a name", ""])
def test_an_allowed_class_that_is_none(name, tmp_path):
    torch.save(weights(), path := tmp_path / "a.pt")
    with pytest.raises(ValueError, match=f"allowed class {name!r} cannot be imported"):
        load_layer(path, allow_classes=[name])


def test_damaged_files(tmp_path):
    torch.save({"model": weights()}, tmp_path / "zip.pt")
    torch.save({"model": weights()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(weights(), tmp_path / "whole.safetensors")
    whole = [(tmp_path / name).read_bytes() for name in ("zip.pt", "old.pt", "whole.safetensors")]
    damaged = {
        "empty.pt": b"",
        "text.pt": b"hello world\n",
        "pointer.pt": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "zip head.pt": whole[0][: len(whole[0]) // 2],
        "zip most.pt": whole[0][:-30],
        "old head.pt": whole[1][:400],
        "old most.pt": whole[1][:-30],
        "empty.safetensors": b"",
        "head.safetensors": whole[2][:100],
        "most.safetensors": whole[2][:-30],
        "zip.safetensors": whole[0],
        "safetensors.pt": whole[2],
    }
    for name, content in damaged.items():
        (path := tmp_path / name).write_bytes(content)
        for call in (
            find_layers,
            load_layer,
            lambda p: convert_checkpoint(p, tmp_path / "out.safetensors"),
        ):
            with pytest.raises(ValueError, match=r"cannot be read as|no readable") as caught:
                call(path)
            assert name in str(caught.value)
            assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "out.safetensors").exists()


def test_files_that_are_no_dict(tmp_path):
    for content in (torch.ones(3), [weights()], 3, None):
        torch.save(content, path := tmp_path / "a.pt")
        with pytest.raises(ValueError, match=r"a\.pt holds a \w+, expected a dict of weights"):
            find_layers(path)


def test_paths_that_are_no_file(tmp_path):
    for suffix in ("pt", "safetensors"):
        with pytest.raises(FileNotFoundError, match=f"missing.{suffix} does not exist"):
            load_layer(tmp_path / f"missing.{suffix}")
        (tmp_path / f"folder.{suffix}").mkdir()
        with pytest.raises(IsADirectoryError, match=f"folder.{suffix} is a directory"):
            find_layers(tmp_path / f"folder.{suffix}")
    with pytest.raises(TypeError, match=r"path or a mapping .*got LocalDense.*state_dict"):
        find_layers(LocalDenseSynthesizerAttention(4, 16))
    with pytest.raises(TypeError, match="got int"):
        load_layer(3)


# Conversion.


def metadata(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def test_all_keys_are_kept_untouched(tmp_path):
    tied = torch.randn(5, 4)
    big = torch.arange(12.0)
    w = {
        **under("encoder.0.att.", weights(dtype=torch.float16)),
        **under("encoder.1.att.", weights(HybridAttention(4, 16, context_size=31))),
        "decoder.embed.weight": tied,
        "decoder.output.weight": tied,
        "transposed": torch.randn(3, 4).T,
        "expanded": torch.ones(1, 3).expand(2, 3),
        "head of big": big[:7],
        "tail of big": big[5:],
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "negated": torch.randn(3)._neg_view(),
        "parameter": nn.Parameter(torch.randn(2)),
        "steps": torch.tensor(7),
        "empty": torch.ones(0, 3),
        "empty too": torch.ones(0, 3),
        "bf16": torch.randn(3).bfloat16(),
        "flags": torch.tensor([True, False]),
    }
    torch.save({"state_dict": under("model.", w), "epoch": 3}, src := tmp_path / "a.ckpt")
    for source in (src, {"state_dict": under("model.", w), "epoch": 3}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            specs = convert_checkpoint(source, dst := tmp_path / "a.safetensors")
        assert list(specs) == ["encoder.0.att", "encoder.1.att"]
        converted = load_file(dst)
        assert converted.keys() == w.keys()
        for name, tensor in w.items():
            assert converted[name].dtype == tensor.dtype, name
            assert torch.equal(converted[name], tensor), name
    assert find_layers(dst) == specs


def test_specs_are_in_the_metadata(tmp_path):
    w = {**under("a.b.", linear(12, 60)), **under("h.", weights(HybridAttention(4, 16)))}
    specs = convert_checkpoint(w, dst := tmp_path / "a.safetensors", n_head=4, edge="renormalize")
    assert specs == {
        "a.b": LayerSpec("linear", 4, 12, 15, False, "renormalize", ((4, 15),)),
        "h": LayerSpec("hybrid", 4, 16, 15, False, "renormalize", ((4, 15),)),
    }
    said = metadata(dst)
    assert said.pop("format") == "pt"
    assert {prefix: json.loads(text) for prefix, text in said.items()} == {
        prefix: json.loads(json.dumps(dataclasses.asdict(spec))) for prefix, spec in specs.items()
    }


def test_a_converted_file_needs_no_arguments(tmp_path):
    w = linear(12, 60)
    first = convert_checkpoint(w, a := tmp_path / "a.safetensors", n_head=4, edge="renormalize")
    assert find_layers(a) == first
    layer = load_layer(a)
    assert (layer.n_head, layer.window, layer.edge) == (4, 15, "renormalize")
    assert same(layer, w)
    # Converting it again changes nothing, nor do arguments that say the same.
    for options in ({}, {"n_head": 4}, {"context_size": 15, "edge": "renormalize"}):
        assert convert_checkpoint(a, b := tmp_path / "b.safetensors", **options) == first
        assert metadata(a) == metadata(b)
        assert same(load_layer(b, **options), w)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_head": 12}, "metadata says n_head 4, the argument 12"),
        ({"context_size": 5}, "metadata says context_size 15, the argument 5"),
        ({"edge": "zero"}, "metadata says edge 'renormalize', the argument 'zero'"),
        ({"n_head": 12, "context_size": 5, "edge": "zero"}, ".*n_head 4.*context_size 15.*edge"),
    ],
)
def test_arguments_that_contradict_the_metadata(options, words, tmp_path):
    src = tmp_path / "a.safetensors"
    convert_checkpoint(under("x.", linear(12, 60)), src, n_head=4, edge="renormalize")
    with pytest.raises(ValueError, match=f"layer x: {words}"):
        load_layer(src, **options)
    with pytest.raises(ValueError, match=f"layer x: {words}"):
        convert_checkpoint(src, tmp_path / "b.safetensors", **options)
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_feat": 24}, "metadata says n_feat 24, the weights 12"),
        ({"use_bias": True}, "metadata says use_bias True, the weights False"),
        ({"variant": "grouped"}, "metadata says variant 'grouped', the weights 'linear'"),
        ({"n_head": 12}, "= 60 .*got n_head 12, context_size 15"),
        ({"edge": "round"}, "not what a conversion writes"),
        ({"n_head": "4"}, "not what a conversion writes"),
    ],
)
def test_metadata_that_contradicts_the_weights(change, words, tmp_path):
    spec = dataclasses.asdict(LayerSpec("linear", 4, 12, 15, False, "zero", ((4, 15),)))
    path = tmp_path / "a.safetensors"
    save_file(under("x.", linear(12, 60)), path, metadata={"x": json.dumps(spec | change)})
    for function in (find_layers, load_layer):
        with pytest.raises(ValueError, match=f"layer x: .*{words}"):
            function(path)


@pytest.mark.parametrize("text", ["pt", "", "{", "[]", "3", "{}", '{"n_head": 2}', "[" * 10**5])
def test_metadata_of_another_origin_is_no_spec(text, tmp_path):
    save_file(under("x.", weights()), path := tmp_path / "a.safetensors", metadata={"x": text})
    assert find_layers(path) == {"x": SPEC}
    with pytest.raises(ValueError, match="prefixes name other entries of the metadata: x"):
        convert_checkpoint(path, tmp_path / "b.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_prefix_cannot_be_what_names_the_format(tmp_path):
    w = under("format.", weights())
    with pytest.raises(ValueError, match="prefixes name other entries of the metadata: format"):
        convert_checkpoint(w, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())
    save_file(w, path := tmp_path / "a.safetensors", metadata={"format": "pt"})
    assert same(load_layer(path), weights())


def test_other_metadata_is_kept(tmp_path):
    save_file(under("x.", weights()), src := tmp_path / "a.safetensors", metadata={"author": "me"})
    convert_checkpoint(src, dst := tmp_path / "b.safetensors")
    assert metadata(dst).keys() == {"author", "format", "x"}
    assert metadata(dst)["author"] == "me"


def test_what_is_no_tensor_is_left_out_with_a_warning(tmp_path):
    flat = {**weights(), "epoch": 3, "optimizer": {"state": {}}, 5: "five"}
    flat["optimizer"]["self"] = flat["optimizer"]
    with pytest.warns(UserWarning, match="left out, being no tensors: epoch, optimizer, 5$"):
        convert_checkpoint(flat, dst := tmp_path / "a.safetensors")
    assert load_file(dst).keys() == weights().keys()


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        ({"model": {**weights(), "sub": {"w": torch.ones(2)}}}, "sub.w"),
        ({"model": {**weights(), 7: torch.ones(2)}}, "7"),
        ({**weights(), "a": {"b": [3, (torch.ones(2),)]}, 7: {"c": torch.ones(2)}}, "a.b.1.0, 7.c"),
        ({"encoder": {**weights(), "sub": {"w": torch.ones(2)}}}, "encoder.sub.w"),
        ({"encoder": weights(), "decoder": {"sub": {"w": torch.ones(2)}}}, "decoder.sub.w"),
        ({"encoder": weights(), 7: torch.ones(2)}, "7"),
        (
            {**weights(), "a": [torch.ones(2)] * 12},
            ", ".join(f"a.{i}" for i in range(10)) + " and 2 more",
        ),
    ],
)
def test_tensors_that_would_be_lost_are_refused(entries, names, tmp_path):
    with pytest.raises(ValueError, match=rf"which would be lost: {re.escape(names)}\."):
        convert_checkpoint(entries, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())
    assert same(load_layer(entries), weights()), "they are of no layer"


def test_tensors_beside_parts_are_kept(tmp_path):
    beside = {"encoder": under("att.", weights()), "frontend": {}, "log_var": torch.ones(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_checkpoint(beside, dst := tmp_path / "a.safetensors")
    assert load_file(dst).keys() == {"log_var", *under("encoder.att.", weights())}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 2).to_sparse(),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.ones(2, dtype=torch.complex128),
        lambda: torch.zeros(2, dtype=torch.complex64).to(torch.complex32),
        lambda: torch.empty(2, dtype=torch.uint4),
    ],
    ids=["sparse", "meta", "complex128", "complex32", "uint4"],
)
def test_tensors_that_safetensors_cannot_hold(make, tmp_path):
    with pytest.raises(ValueError, match=r"safetensors cannot hold.*: bad \(torch\.\w+\)$"):
        convert_checkpoint({**under("x.", weights()), "bad": make()}, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_dst_is_checked_first(tmp_path):
    torch.save(weights(), src := tmp_path / "a.pt")
    (tmp_path / "folder.safetensors").mkdir()
    for dst, error, words in (
        ("folder.safetensors", IsADirectoryError, "is a directory"),
        ("nowhere/a.safetensors", FileNotFoundError, "there is no directory"),
        ("b.pt", ValueError, r"dst must be named \.safetensors"),
    ):
        with pytest.raises(error, match=words):
            convert_checkpoint(src, tmp_path / dst)
        with pytest.raises(error, match=words):
            convert_checkpoint(tmp_path / "missing.pt", tmp_path / dst)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "folder.safetensors"]


def test_the_source_is_not_overwritten(tmp_path):
    save_file(weights(), src := tmp_path / "a.safetensors")
    content = src.read_bytes()
    (tmp_path / "link.safetensors").symlink_to(src)
    os.link(src, tmp_path / "hard.safetensors")
    (tmp_path / "sub").mkdir()
    for name in ("a", "link", "hard", "sub/../a"):
        with pytest.raises(ValueError, match="is src, give it another name"):
            convert_checkpoint(src, tmp_path / f"{name}.safetensors")
    assert src.read_bytes() == content
    assert not metadata(src)


@pytest.mark.parametrize("error", [RuntimeError, OSError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["save_file", "os.fsync", "os.replace"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_failed_conversion_leaves_no_trace(step, error, exists, tmp_path, monkeypatch):
    def fail(tensors=None, path=None, *args, **kwargs):
        if step == "save_file":
            path.write_bytes(b"half")
        raise error("no space left")

    torch.save(weights(), src := tmp_path / "a.pt")
    (tmp_path / "out").mkdir()
    dst = tmp_path / "out" / "a.safetensors"
    if exists:
        dst.write_bytes(b"before")
    monkeypatch.setattr(f"ldsa_nn.convert.{step}", fail)
    expected = OSError if error is RuntimeError and step == "save_file" else error
    with pytest.raises(expected, match="no space left"):
        convert_checkpoint(src, dst)
    assert [p.name for p in dst.parent.iterdir()] == ["a.safetensors"] * exists
    assert not exists or dst.read_bytes() == b"before"


def test_the_file_is_on_disk_whole_before_it_has_its_name(tmp_path, monkeypatch):
    steps = []
    real = os.fsync, os.replace

    def fsync(descriptor):
        steps.append("fsync")
        real[0](descriptor)

    def replace(part, dst):
        assert os.stat(part).st_dev == os.stat(tmp_path).st_dev
        assert load_file(part).keys() == weights().keys()
        assert dst.read_bytes() == b"before"
        steps.append("replace")
        real[1](part, dst)

    monkeypatch.setattr("ldsa_nn.convert.os.fsync", fsync)
    monkeypatch.setattr("ldsa_nn.convert.os.replace", replace)
    (dst := tmp_path / "a.safetensors").write_bytes(b"before")
    convert_checkpoint(weights(), dst)
    assert steps == ["fsync", "replace"]
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions and links")
def test_permissions_and_links_are_those_of_any_file(tmp_path):
    old = os.umask(0o027)
    try:
        convert_checkpoint(weights(), dst := tmp_path / "a.safetensors")
    finally:
        os.umask(old)
    assert stat.S_IMODE(dst.stat().st_mode) == 0o640
    dst.chmod(0o604)
    (link := tmp_path / "link.safetensors").symlink_to(dst)
    convert_checkpoint(weights(), link)
    assert link.is_symlink()
    assert stat.S_IMODE(dst.stat().st_mode) == 0o604
    assert same(load_layer(dst), weights())


# The command.


def test_list_prints_a_table(tmp_path, capsys):
    w = {
        **under("enc.0.att.", linear(12, 60)),
        **under("enc.1.att.", weights(HybridAttention(4, 16, context_size=31))),
        **under("enc.2.att.", weights(use_bias=True, grouped_w2=True)),
    }
    torch.save({"model": w}, src := tmp_path / "a.pt")
    assert main([str(src), "--list"]) == 0
    out = capsys.readouterr().out
    assert out == (
        "prefix     variant  n_head   n_feat  context_size  use_bias  edge\n"
        "enc.0.att  linear   4 or 12  12      15 or 5       no        zero\n"
        "enc.1.att  hybrid   4        16      31            no        zero\n"
        "enc.2.att  grouped  4        16      15            yes       zero\n"
        "several n_head and context_size fit: give --n-head or --context-size\n"
    )
    assert main([str(src), str(tmp_path / "b.safetensors"), "--list", "--n-head", "4"]) == 0
    out = capsys.readouterr().out
    assert "enc.0.att  linear   4       12      15            no        zero\n" in out
    assert "several" not in out
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_the_command_converts(tmp_path, capsys):
    checkpoint = {"model": linear(16, 60), "ema": under("x.", linear(12, 60)), "epoch": 3}
    torch.save(checkpoint, src := tmp_path / "a.pt")
    dst = tmp_path / "b.safetensors"
    arguments = ["--section", "ema", "--context-size", "15", "--edge", "renormalize"]
    assert main([str(src), str(dst), *arguments]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split() == "x linear 4 12 15 no renormalize".split()
    assert out.splitlines()[-1] == f"wrote {dst}"
    assert err == ""
    assert find_layers(dst) == {
        "x": LayerSpec("linear", 4, 12, 15, False, "renormalize", ((4, 15),))
    }
    assert same(load_layer(dst), linear_of(checkpoint["ema"]))
    assert main([str(src), str(dst), "--n-head", "4"]) == 0
    assert "(root)" in capsys.readouterr().out


def linear_of(w):
    return {name.removeprefix("x."): tensor for name, tensor in w.items()}


def test_the_command_fails_with_a_line(tmp_path, capsys):
    torch.save(linear(12, 60), src := tmp_path / "a.pt")
    dst = str(tmp_path / "b.safetensors")
    for arguments, words in (
        ([str(src), dst], "several (n_head, context_size) fit: (4, 15), (12, 5)"),
        ([str(src), dst, "--context-size", "8"], "context_size must be odd, got 8"),
        ([str(src), dst, "--n-head", "4", "--section", "ema"], "no section 'ema'"),
        ([str(src), str(src), "--n-head", "4"], "dst must be named"),
        ([str(tmp_path / "c.pt"), dst], "does not exist"),
        ([str(tmp_path / "c.pt"), "--list"], "does not exist"),
        ([str(src), dst, "--n-head", "4", "--allow-class", "x.Y"], "allowed class 'x.Y'"),
    ):
        assert main(arguments) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("ldsa-convert: error: ")
        assert words in err
    for arguments in ([str(src)], [str(src), dst, "--edge", "round"], []):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_the_command_shows_warnings(tmp_path, capsys):
    torch.save({**weights(), "epoch": 3}, src := tmp_path / "a.pt")
    assert main([str(src), str(tmp_path / "b.safetensors")]) == 0
    assert capsys.readouterr().err == "ldsa-convert: warning: left out, being no tensors: epoch\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_large_file_has_a_progress_bar(tmp_path, monkeypatch, capsys):
    torch.save(weights(), src := tmp_path / "a.pt")
    arguments = [str(src), str(tmp_path / "b.safetensors")]
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert main(arguments) == 0
    assert terminal.getvalue() == "", "small files need none"
    monkeypatch.setattr(convert, "_LARGE", 0)
    assert main(arguments) == 0
    assert "writing" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
    assert same(load_layer(arguments[1]), weights())
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    convert_checkpoint(*arguments)
    assert terminal.getvalue() == "", "functions are quiet"
    monkeypatch.setattr("sys.stderr", log := io.StringIO())
    assert main(arguments) == 0
    assert log.getvalue() == "", "no bar in a log file"


def test_the_progress_bar_moves_while_the_file_grows(tmp_path, monkeypatch, capsys):
    def save_half_first(tensors, path, **kwargs):
        total = sum(tensor.nbytes for tensor in tensors.values())
        with path.open("wb") as file:
            file.truncate(total)  # its length tells nothing
            file.write(bytes(total // 2))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.5)
        save_file(tensors, path, **kwargs)

    torch.save(linear(256, 60), src := tmp_path / "a.pt")
    monkeypatch.setattr(convert, "_LARGE", 0)
    monkeypatch.setattr(convert, "save_file", save_half_first)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert main([str(src), str(tmp_path / "b.safetensors")]) == 0
    shown = {int(percent) for percent in re.findall(r"(\d+)%", terminal.getvalue())}
    assert {0, 100} < shown
    assert shown & {*range(45, 56)}


def test_the_progress_bar_keeps_errors(tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise RuntimeError("no space left")

    torch.save(weights(), src := tmp_path / "a.pt")
    monkeypatch.setattr(convert, "_LARGE", 0)
    monkeypatch.setattr(convert, "save_file", fail)
    assert main([str(src), str(tmp_path / "b.safetensors")]) == 1
    assert "cannot be written: no space left" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]
