"""Local attention in place of a toolkit encoder's own; the command ldsa-replace."""

import argparse
import importlib
import inspect
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from ldsa_nn import hosts
from ldsa_nn.ldsa import HybridAttention, LocalDenseSynthesizerAttention

# What looks like an attention: by the last part of its class's name, or by its name in the model.
_ATTENTION_CLASS = re.compile(r"(Attention|MHA)(XL|\d*)$")
_ATTENTION_NAME = re.compile(r"(self_)?(att|attn|attention|mha)(_layer)?")

__all__ = ["Report", "load_replaced", "replace_attention"]

Make = Callable[[str, nn.Module, int, int, int, int], nn.Module]

_OPTIONS = [
    name
    for name in inspect.signature(LocalDenseSynthesizerAttention).parameters
    if name not in "n_head n_feat context_size left right device dtype".split()
]


class Report(NamedTuple):
    """What was done to a model.

    replaced: paths of the attentions that were replaced, in the order they were chosen.
    new_parameters: names of the parameters that came with the new layers, in the model's order.
    warnings: what the model's user must know.
    """

    replaced: list[str]
    new_parameters: list[str]
    warnings: list[str]


class _Slot(NamedTuple):
    """A place in a model where a known class calls its attention."""

    toolkit: str
    path: str
    parent: nn.Module
    host: hosts.Host
    old: nn.Module


class _Other(NamedTuple):
    """An attention outside the slots. why: what makes its class no host; None: it is unknown."""

    path: str
    what: str
    why: str | None

    def __str__(self) -> str:
        place = f"{self.path or 'the model'} ({self.what})"
        return f"{place}: {self.why}" if self.why else place


# A setting of an attribute of a module: (module, name, value).
_Change = tuple[nn.Module, str, Any]
_ABSENT = object()  # the value of an attribute that is not the module's own, but its class's


def replace_attention(
    model: nn.Module,
    *,
    left: int | Sequence[int] = 7,
    right: int | Sequence[int] = 7,
    layers: Iterable[int] | None = None,
    host: str = "auto",
    make: Make | None = None,
    init_from_old: bool = False,
    **layer_options: Any,
) -> Report:
    """Put local dense synthesizer attention where a model calls its self-attention, in place.

    All of it or nothing: where an error is raised, the model is unchanged. The new layers take the
    old attention's dtype, device and training flag; their parameters are newly initialised and
    require gradients: replace first, then make the optimizer, wrap the model in DDP, compile it.

    Args:
        model: a supported encoder, or anything that contains some.
        left, right: the window in frames before and after each frame, for all chosen layers or one
            for each, in the order of `layers`.
        layers: which of the model's supported attentions to replace, counted from 0 in the order
            of model.named_modules(), from the end if negative. Default all.
        host: "auto", or the toolkit ("torch", "torchaudio", "transformers", ...: a package's name)
            whose encoders alone are looked for. With "auto" and without `layers`, an attention of
            an unknown class is an error.
        make: make(path, old, n_head, n_feat, left, right) returns the layer to put in instead. It
            is called as layer(query, key, value, mask=None, lengths=None), [B,T,D] each, mask bool
            [B,T] with True = keep (padding may be on either side), and returns [B,T,D].
        init_from_old: start w3 and w_out from the old value and output projections where shapes
            fit; biases too where the new layer has some, else the report warns of those it drops.
        layer_options: dropout_rate (default the old attention's), use_bias, edge, grouped_w2,
            honor_mask, implementation of `LocalDenseSynthesizerAttention`.

    Returns:
        Report(replaced, new_parameters, warnings), lists of str. A layer's parameters are called
        PATH.layer.w1.weight and so on, PATH being the old attention's.

    Raises:
        ValueError: no attention is found, one is of an unknown class or replaced already; a value
            is out of range.
        TypeError: an argument has the wrong type, or an option is unknown.
    """
    options = dict(init_from_old=init_from_old, **layer_options)
    return _replace(model, left, right, layers, host, make, **options)[0]


def load_replaced(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | Mapping[str, Any],
    *,
    left: int | Sequence[int] = 7,
    right: int | Sequence[int] = 7,
    layers: Iterable[int] | None = None,
    host: str = "auto",
    make: Make | None = None,
    init_from_old: bool = False,
    **layer_options: Any,
) -> Report:
    """Replace as `replace_attention` does with these options, then load a replaced model's weights.

    The load is strict. Where it fails, the model is as it was: the same modules with the same bits.
    A state dict cannot tell left from right: weights of another split of the same window, W = left
    + 1 + right, load too, and each weight of a window then goes to a wrong frame, silently.

    Args:
        model: the original model, not yet replaced.
        checkpoint: the state dict of a model that was replaced with the same options: a mapping, a
            .safetensors file, a file of torch.save (read with weights_only=True), or a directory
            that a Hugging Face model's save_pretrained wrote. Of tied weights one name is enough.
        left, right, layers, host, make, init_from_old, layer_options: as in `replace_attention`.

    Returns:
        As `replace_attention`.

    Raises:
        RuntimeError: keys are missing or unexpected, or shapes differ; all are named.
        ValueError, TypeError, FileNotFoundError: the checkpoint is no state dict, or as in
            `replace_attention`.
    """
    state = _read(checkpoint)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    tensors = [*model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(tensor) or tensor.is_meta for tensor in tensors):
        raise ValueError(
            "model has parameters without values, where a load may do nothing: call "
            "model.to_empty(device=...) if they are on the meta device, run a batch if they are "
            "lazy"
        )
    # load_state_dict copies what fits before it complains of what does not.
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    options = dict(init_from_old=init_from_old, **layer_options)
    report, undo = _replace(model, left, right, layers, host, make, **options)
    try:
        model.load_state_dict(_with_tied(model, state), strict=True)
    except BaseException:
        _apply(undo)
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        raise
    return report


def _replace(
    model: nn.Module,
    left: int | Sequence[int],
    right: int | Sequence[int],
    layers: Iterable[int] | None,
    host: str,
    make: Make | None,
    *,
    init_from_old: bool,
    **layer_options: Any,
) -> tuple[Report, list[_Change]]:
    """Replace, and tell how to undo it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    for module in model.modules():
        wrapper = type(module).__name__
        if wrapper in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise ValueError(
                f"model is wrapped in {wrapper}, which knows its parameters already: "
                "replace before wrapping"
            )
    _check_options(make, layer_options)
    slots = _find(model, host)
    warnings = _check_others(_others(model, slots), slots, strict=host == "auto" and layers is None)
    chosen = _choose(slots, layers)
    lefts, rights = _windows("left", left, len(chosen)), _windows("right", right, len(chosen))

    adapters: dict[tuple[int, int, int], hosts.Adapter] = {}  # layers that share one keep sharing
    changes: list[_Change] = []
    for slot, before, after in zip(chosen, lefts, rights, strict=True):
        key = id(slot.old), before, after
        if key not in adapters:
            layer, notes = _build(slot, before, after, make, init_from_old, layer_options)
            # A layer of make may have a window of its own, and that is what the adapter checks.
            window = getattr(layer, "left", before), getattr(layer, "right", after)
            adapters[key] = slot.host.adapter(slot.old, layer, *window)
            adapters[key].train(slot.old.training)
            warnings += notes
        changes.append((slot.parent, slot.host.attribute, adapters[key]))
    known = {id(parameter) for parameter in model.parameters()}
    undo = _apply(changes)
    try:
        for used in dict.fromkeys(slot.host for slot in chosen):
            warnings += used.warnings
            parents = [slot.parent for slot in chosen if slot.host is used]
            undo = _apply(used.settings(model, parents)) + undo
    except BaseException:
        _apply(undo)
        raise
    # An adapter may keep a parameter of the old attention that other layers need.
    new = {id(p) for adapter in adapters.values() for p in adapter.parameters()} - known
    named = model.named_parameters(remove_duplicate=False)
    report = Report(
        replaced=[slot.path for slot in chosen],
        new_parameters=[name for name, parameter in named if id(parameter) in new],
        warnings=list(dict.fromkeys(warnings)),
    )
    return report, undo


def _check_options(make: Make | None, layer_options: dict[str, Any]) -> None:
    if make is not None and not callable(make):
        raise TypeError(f"make must be callable, got {type(make).__name__}")
    for name in layer_options:
        if name not in _OPTIONS:
            raise TypeError(
                f"unknown option {name!r}: the layer's are {', '.join(_OPTIONS)}; its window is "
                "left and right"
            )
        if make is not None:
            raise TypeError(f"option {name!r} is for the default layer: set it inside make")


def _find(model: nn.Module, toolkit: str) -> list[_Slot]:
    """The places of known classes in the model, in order of appearance."""
    names = hosts.names()
    if toolkit != "auto" and toolkit not in names:
        raise ValueError(f"host must be 'auto' or one of {', '.join(names)}; got {toolkit!r}")
    known = {
        host.parent: (name, host)
        for name, file in hosts.loaded().items()
        for host in file.HOSTS
        if toolkit in ("auto", name)
    }
    slots = []
    for path, parent in model.named_modules():
        name, host = known.get(hosts.class_name(type(parent)), ("", None))
        old = host and getattr(parent, host.attribute, None)
        if host and isinstance(old, nn.Module):
            slots.append(_Slot(name, f"{path}.{host.attribute}".lstrip("."), parent, host, old))
    return slots


def _others(model: nn.Module, slots: list[_Slot]) -> list[_Other]:
    """Attentions outside the slots, in order of appearance."""
    reasons = {
        name: why for file in hosts.loaded().values() for name, why in file.NOT_HOSTS.items()
    }
    done = {id(slot.old) for slot in slots}
    others: list[_Other] = []

    def visit(path: str, module: nn.Module, parent: str) -> None:
        own = hosts.class_name(type(module))
        if id(module) in done or own.startswith("ldsa_nn."):
            return
        done.add(id(module))
        named = _ATTENTION_CLASS.search(own) or (
            _ATTENTION_NAME.fullmatch(path.rpartition(".")[2]) and not own.startswith("torch.nn.")
        )
        holds = any(slot.path.startswith(f"{path}." if path else "") for slot in slots)
        if (named or isinstance(module, nn.MultiheadAttention)) and not holds:
            what = f"{own} in {parent}" if parent else own
            others.append(_Other(path, what, reasons.get(own) or reasons.get(parent)))
            return
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child, own)

    visit("", model, "")
    return others


def _check_others(others: list[_Other], slots: list[_Slot], *, strict: bool) -> list[str]:
    """Warnings of the attentions that stay; an error where nothing is found or one is unknown."""
    known = ", ".join(
        f"{name} ({', '.join(dict.fromkeys(h.parent.rpartition('.')[2] for h in file.HOSTS))})"
        for name, file in hosts.loaded().items()
    )
    known = f"Known hosts, matched by exact class: {known}"
    kinds = {other.what: other for other in reversed(others)}  # the first of each
    unknown = [str(other) for other in reversed(kinds.values()) if other.why is None]
    refused = [str(other) for other in reversed(kinds.values()) if other.why]
    if not slots:
        found = [f"unknown class {what}" for what in unknown] + refused
        raise ValueError(
            f"no attention to replace: {'; '.join(found) or 'the model has none'}. {known}; make= "
            "changes the layer, not the host"
        )
    if unknown and strict:
        raise ValueError(
            f"attention of unknown class: {'; '.join(unknown)}. {known}. To leave those as they "
            f"are and replace the others, name the host (host={slots[0].toolkit!r}) or the layers"
        )
    return [f"left as it is: {what}" for what in unknown + refused]


def _choose(slots: list[_Slot], layers: Iterable[int] | None) -> list[_Slot]:
    """The slots that `layers` names; all of them can be replaced."""
    chosen = slots
    if layers is not None:
        if isinstance(layers, str) or not isinstance(layers, Iterable):
            raise TypeError(f"layers must be a list of ints, got {layers!r}")
        n = len(slots)
        indices = []
        for index in layers:
            if isinstance(index, bool) or not isinstance(index, int):
                raise TypeError(f"layers must be a list of ints, got {index!r} in it")
            if not -n <= index < n:
                raise ValueError(f"layers: {index} is out of range, the model has {n} attentions")
            indices.append(index % n)
        if not indices or len(set(indices)) < len(indices):
            raise ValueError(f"layers must name each layer once and at least one, got {indices}")
        chosen = [slots[index] for index in indices]
    for slot in chosen:
        obstacle = _obstacle(slot)
        if obstacle is not None:
            raise ValueError(
                f"{slot.path} is {obstacle}; choose other layers (layers=), or start from the "
                "original model"
            )
    return chosen


def _obstacle(slot: _Slot) -> str | None:
    """What keeps a slot's attention from being replaced."""
    if isinstance(slot.old, hosts.Adapter):
        return "replaced already"
    own = hosts.class_name(type(slot.old))
    if own in slot.host.attention:
        return None
    known = " or ".join(slot.host.attention)
    return f"of the unknown class {own}: in {slot.host.parent} only {known} is known"


def _windows(name: str, value: int | Sequence[int], count: int) -> list[int]:
    """left or right of each chosen layer."""
    values = [value] * count if isinstance(value, int) else value
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{name} must be an int or a list of ints, got {value!r}")
    if len(values) != count:
        raise ValueError(f"{name} must be one int or one for each of {count} layers, got {value!r}")
    for one in values:
        if isinstance(one, bool) or not isinstance(one, int):
            raise TypeError(f"{name} must be an int or a list of ints, got {value!r}")
        if one < 0:
            raise ValueError(f"{name} must be >= 0 frames, got {value!r}")
    return list(values)


def _build(
    slot: _Slot,
    left: int,
    right: int,
    make: Make | None,
    init_from_old: bool,
    layer_options: dict[str, Any],
) -> tuple[nn.Module, list[str]]:
    """The layer for a slot, and warnings."""
    old = slot.host.describe(slot.old)
    device, dtype = old.weight.device, old.weight.dtype
    if make is None:
        options = {"dropout_rate": old.dropout_rate, **layer_options}
        layer: nn.Module = LocalDenseSynthesizerAttention(
            old.n_head, old.n_feat, left=left, right=right, device=device, dtype=dtype, **options
        )
    else:
        layer = make(slot.path, slot.old, old.n_head, old.n_feat, left, right)
        if not isinstance(layer, nn.Module):
            raise TypeError(
                f"make must return an nn.Module, got {type(layer).__name__} for {slot.path}"
            )
        width = getattr(layer, "n_feat", old.n_feat)
        if width != old.n_feat:
            raise ValueError(
                f"make returned a layer with n_feat={width} for {slot.path}, expected {old.n_feat}"
            )
        layer.to(device=device, dtype=dtype)
    notes = []
    if isinstance(layer, HybridAttention):
        notes.append(
            f"{slot.path}: HybridAttention attends to the whole sequence, with right=0 too: causal "
            "and chunk masks have no effect on it, and a stream does not equal the whole"
        )
    if init_from_old:
        pairs: list[tuple[Any, Tensor, Tensor | None]] = [
            (getattr(layer, "w3", None), old.value_weight, old.value_bias),
            (getattr(layer, "w_out", None), old.out_weight, old.out_bias),
        ]
        fits = [_copy(*pair) for pair in pairs]
        if not all(fits):
            notes.append(f"{slot.path}: the new layer has no w3 and w_out that fit init_from_old")
        if any(
            linear.bias is None and bias is not None and not bias.is_meta and bias.any()
            for (linear, _, bias), fit in zip(pairs, fits, strict=True)
            if fit
        ):
            notes.append(
                f"{slot.path}: init_from_old dropped biases that are not zero, for want of such in "
                "the new layer: use_bias=True keeps them"
            )
    return layer, notes


@torch.no_grad()
def _copy(linear: Any, weight: Tensor, bias: Tensor | None) -> bool:
    """Start a linear layer from an old one, where its shape fits."""
    if not isinstance(linear, nn.Linear) or linear.weight.shape != weight.shape:
        return False
    linear.weight.copy_(weight)
    if linear.bias is not None:
        linear.bias.copy_(torch.zeros_like(linear.bias) if bias is None else bias)
    return True


def _apply(changes: list[_Change]) -> list[_Change]:
    """Set the attributes, or take off those set to _ABSENT; returns what undoes it."""
    undo = []
    for module, name, value in changes:
        own = name in module.__dict__ or name in module._modules
        undo.append((module, name, getattr(module, name) if own else _ABSENT))
        if value is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, value)
    return undo[::-1]


def _with_tied(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state with all names of tied weights, of which safetensors files hold one alone."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            names.setdefault(id(tensor), []).append(name)
    tied = {
        name: state[present[0]]
        for same in names.values()
        if (present := [name for name in same if name in state])
        for name in same
        if name not in state
    }
    return {**state, **tied} if tied else state


def _read(checkpoint: str | os.PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dict, from where it is."""
    if isinstance(checkpoint, Mapping):
        state: Any = checkpoint
    elif isinstance(checkpoint, (str, os.PathLike)):
        path = Path(checkpoint)
        try:
            if path.is_dir():
                state = _read_directory(path)
            elif path.suffix.lower() == ".safetensors":
                state = safetensors.torch.load_file(path)
            else:
                state = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # of a file that is broken: anything, struct.error too
            wants = re.search(r"GLOBAL (\S+)", str(error))
            raise ValueError(
                f"{path} holds more than weights, a {wants[1]}: save model.state_dict() alone"
                if wants
                else f"{path} is no safetensors file or file of torch.save: {error}"
            ) from error
    else:
        raise TypeError(
            f"checkpoint must be a path or a state dict, got {type(checkpoint).__name__}"
        )
    if not isinstance(state, Mapping):
        raise ValueError(f"checkpoint holds no state dict but a {type(state).__name__}")
    for name in state:
        if not isinstance(name, str):
            raise ValueError(f"checkpoint is no state dict: {name!r} in it names no parameter")
    inner = [
        name
        for name, value in state.items()
        if isinstance(value, Mapping) and not name.endswith("_extra_state")
    ]
    if inner:
        raise ValueError(
            f"checkpoint is no state dict: its {', '.join(inner)} are mappings; give one of those"
        )
    return state


def _read_directory(path: Path) -> dict[str, Tensor]:
    """The weights in a directory of save_pretrained, in one file or in several with an index."""
    index = path / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    state: dict[str, Tensor] = {}
    for file in files:
        state |= safetensors.torch.load_file(path / file)
    return state


def _open(model: str) -> nn.Module:
    """The model that the command names."""
    if Path(model).is_dir():
        return importlib.import_module("ldsa_nn.hosts.transformers").from_directory(Path(model))
    module, colon, factory = model.partition(":")
    if not (module and colon and factory):
        raise ValueError(
            f"MODEL must be a directory with a config.json, or MODULE:FACTORY, got {model!r}"
        )
    sys.path.insert(0, "")  # a command's path lacks the directory that it is called in
    made = operator.attrgetter(factory)(importlib.import_module(module))()
    if not isinstance(made, nn.Module):
        raise TypeError(f"{model} must return an nn.Module, got {type(made).__name__}")
    return made


def _table(model: nn.Module) -> str:
    """Every attention of the model, and whether `replace_attention` can replace it."""
    slots = _find(model, "auto")
    rows = {}
    for i, slot in enumerate(slots):
        row = [str(i), slot.path, type(slot.old).__name__, slot.toolkit]
        obstacle = _obstacle(slot)
        if obstacle is None:
            old = slot.host.describe(slot.old)
            row += [str(old.n_head), str(old.n_feat), "yes"]
        else:
            row += ["-", "-", f"no: {obstacle}"]
        rows[slot.path] = row
    for other in _others(model, slots):
        why = other.why or f"unknown class {other.what}"
        kind = other.what.partition(" in ")[0].rpartition(".")[2]
        rows[other.path] = ["-", other.path, kind, "-", "-", "-", f"no: {why}"]
    order = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    header = "layer path class host heads width replaceable".split()
    table = [header, *(rows[path] for path in sorted(rows, key=order.__getitem__))]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    count = sum(row[-1] == "yes" for row in rows.values())
    return "\n".join([*lines, f"{count} of {len(rows)} can be replaced"])


def main(argv: Sequence[str] | None = None) -> int:
    """The command ldsa-replace; returns its exit status, 0 or (bad input) 1."""
    parser = argparse.ArgumentParser(
        prog="ldsa-replace",
        description="Show which attentions of a model ldsa_nn.replace_attention can replace.",
    )
    parser.add_argument(
        "--list",
        metavar="MODEL",
        required=True,
        help="print a table of MODEL's attentions. MODEL is a directory with a Hugging Face "
        "config.json, whose model is made without weights, or MODULE:FACTORY, a function or class "
        "that makes a model when called without arguments, as in torchaudio.models:wav2vec2_base",
    )
    args = parser.parse_args(argv)
    try:
        print(_table(_open(args.list)))
    except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
        print(f"ldsa-replace: error: {error}", file=sys.stderr)
        return 1
    return 0
