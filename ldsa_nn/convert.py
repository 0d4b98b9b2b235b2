"""Checkpoints of the reference repository's layers: find, load and convert them.

The reference trains inside OpenTransformer and ESPnet v1; what these write is read here, and so is
what DataParallel, torch.compile and Lightning make of it. Nothing in a file runs: pickles are
loaded as weights only, and more than weights is refused unless allowed by name.
"""

import argparse
import json
import os
import pickle
import pkgutil
import re
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from ldsa_nn.functional import integer
from ldsa_nn.ldsa import HybridAttention, LocalDenseSynthesizerAttention

__all__ = ["LayerSpec", "convert_checkpoint", "find_layers", "load_layer", "main"]

# Entries of a checkpoint that hold the weights, first choice first. OpenTransformer saves the parts
# of a model side by side, with "params" for its configuration; averaged weights come last.
_PARTS = ("frontend", "encoder", "decoder", "ctc")
_WRAPPERS = ("model", "state_dict", "model_state_dict", "net", *_PARTS, "params", "ema")

# What DataParallel and DDP, torch.compile and Lightning put before every key.
_KEY_PREFIXES = ("module.", "_orig_mod.", "model.")

_SQUARE = ("w1.weight", "w3.weight", "w_out.weight")
_KEYS = ("w1.weight", "w2.weight", "w3.weight", "w_out.weight")

_LARGE = 256 * 2**20  # bytes; the command shows a progress bar from here on


@dataclass(frozen=True)
class LayerSpec:
    """What one layer of a checkpoint is.

    Attributes:
        variant: "linear" (reference LocalDenseSynthesizerAttention and
            LocalDenseSynthesizerAttention2), "grouped" (MHLocalDenseSynthesizerAttention) or
            "hybrid" (HybirdAttention).
        n_head: number of heads H; None where several fit.
        n_feat: model width D.
        context_size: window size W in frames; None where several fit.
        use_bias: whether w1, w3 and w_out (and a linear w2) have biases.
        edge: "zero" or "renormalize". Weights do not tell the two apart: it is what the caller or
            a converted file's metadata says, else "zero".
        candidates: the (n_head, context_size) pairs that fit; more than one is ambiguous.
    """

    variant: str
    n_head: int | None
    n_feat: int
    context_size: int | None
    use_bias: bool
    edge: str
    candidates: tuple[tuple[int, int], ...]


class _Checkpoint(NamedTuple):
    source: str  # what error messages call it
    weights: dict[str, Tensor]
    metadata: dict[str, str]
    left_out: dict[str, list[str]]  # entries among the weights, and the tensors in each
    sections: list[str]  # entries with weights, met on the way to those taken


class _Given(NamedTuple):
    """What the caller says of the layers; None leaves it to the checkpoint."""

    n_head: int | None = None
    context_size: int | None = None
    edge: str | None = None


def find_layers(
    checkpoint: str | os.PathLike[str] | Mapping[str, Any],
    *,
    section: str | None = None,
    allow_classes: Iterable[str | type] = (),
) -> dict[str, LayerSpec]:
    """Find the LDSA and hybrid layers of a checkpoint.

    Wrappers are undone, however nested: of a dict's entries "model", "state_dict",
    "model_state_dict", "net", OpenTransformer's parts ("frontend", "encoder", "decoder" and "ctc"
    together, which keep their names in the keys), "params" and "ema", the first that holds weights
    is taken; "module.", "_orig_mod." and "model." are cut off where every key starts with them.

    Args:
        checkpoint: path of a file that torch.save wrote or of a .safetensors file; or a mapping.
        section: the entry whose weights to take instead, "ema" for example.
        allow_classes: full names ("argparse.Namespace") of the classes, besides tensors, that the
            file may hold. Allowing one lets the file call it.

    Returns:
        {prefix: LayerSpec}, prefixes without a trailing dot, "" for a layer at the root. A layer
        whose (n_head, context_size) is ambiguous has n_head None.

    Raises:
        ValueError: no layer; a layer with missing, unexpected or mis-shaped keys or with an even
            window; an unknown section; an unreadable file, or one that holds other classes.
        FileNotFoundError, IsADirectoryError: the path is no file.
        TypeError: checkpoint is neither a path nor a mapping.
    """
    return _specs(_open(checkpoint, section, allow_classes), _Given())


def load_layer(
    checkpoint: str | os.PathLike[str] | Mapping[str, Any],
    prefix: str | None = None,
    *,
    n_head: int | None = None,
    context_size: int | None = None,
    edge: str | None = None,
    section: str | None = None,
    allow_classes: Iterable[str | type] = (),
) -> LocalDenseSynthesizerAttention | HybridAttention:
    """Load one layer of a checkpoint.

    The parameters are copies with the stored dtypes (of a mapping, on its device too). Checkpoints
    do not hold the dropout rate: it is 0 until `dropout_rate` is set. Masks are honoured as in any
    new layer; for the reference's results in padded batches set `honor_mask` (a hybrid's
    `ldsa_att.honor_mask`) to False.

    Args:
        checkpoint, section, allow_classes: as in `find_layers`.
        prefix: where the layer is, as `find_layers` names it; None takes the only layer.
        n_head, context_size: H and W, where the weights leave them open.
        edge: "zero" or "renormalize" (reference LocalDenseSynthesizerAttention2); None is what a
            converted file's metadata says, else "zero".

    Raises:
        ValueError: as in `find_layers`; no layer at prefix; several layers and no prefix; several
            (n_head, context_size) fit and neither is given; an argument contradicts the weights or
            the metadata.
        FileNotFoundError, IsADirectoryError, TypeError: as in `find_layers`.
    """
    given = _check_given(n_head, context_size, edge)
    opened = _open(checkpoint, section, allow_classes)
    prefix, hybrid = _pick(opened, prefix)
    own = _own(opened.weights, prefix)
    spec = _spec(opened, prefix, own, hybrid, given)
    _check_decided({prefix: spec})
    layer = _build(spec)
    copies = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in own.items()
    }
    # Assigned, not copied into: the parameters keep the dtypes of the file.
    layer.load_state_dict(copies, strict=True, assign=True)
    return layer


def convert_checkpoint(
    src: str | os.PathLike[str] | Mapping[str, Any],
    dst: str | os.PathLike[str],
    *,
    n_head: int | None = None,
    context_size: int | None = None,
    edge: str | None = None,
    section: str | None = None,
    allow_classes: Iterable[str | type] = (),
) -> dict[str, LayerSpec]:
    """Write a checkpoint's weights as safetensors, with what its layers are in the metadata.

    All tensors are kept, those of other layers too, under their keys without wrappers; values and
    dtypes are untouched, tied tensors are stored once for each key. What lies among them and holds
    no tensor is left out with a warning. The metadata holds each LayerSpec, as JSON, under the
    layer's prefix. dst appears whole or not at all.

    Args:
        src, section, allow_classes: as `checkpoint` and the others in `find_layers`.
        dst: the .safetensors file to write. One that exists is replaced.
        n_head, context_size, edge: as in `load_layer`, for all layers; with n_head alone each layer
            has its own context_size.

    Returns:
        {prefix: LayerSpec}.

    Raises:
        ValueError: as in `load_layer`; dst is src or is not named .safetensors; a tensor that
            safetensors cannot hold (sparse, quantized, complex32 or complex128, on the meta
            device) or has no name for (in a nested entry, or under a key that is no string); a
            layer at a prefix that names another entry of the metadata, as "format" does.
        OSError: dst cannot be written.
        TypeError: as in `find_layers`.
    """
    given = _check_given(n_head, context_size, edge)
    return _convert(src, dst, given, section, allow_classes, progress=False)


def _check_given(n_head: int | None, context_size: int | None, edge: str | None) -> _Given:
    for name, value in (("n_head", n_head), ("context_size", context_size)):
        if value is not None and integer(name, value) < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    if context_size is not None and context_size % 2 == 0:
        raise ValueError(
            f"context_size must be odd, got {context_size}: the reference's window is centred"
        )
    if edge not in (None, "zero", "renormalize"):
        raise ValueError(f"edge must be 'zero' or 'renormalize', got {edge!r}")
    return _Given(n_head, context_size, edge)


# Reading: files, and the wrappers around the weights.


def _open(
    checkpoint: str | os.PathLike[str] | Mapping[str, Any],
    section: str | None,
    allow_classes: Iterable[str | type],
) -> _Checkpoint:
    """Read a checkpoint and undo its wrappers."""
    metadata: dict[str, str] = {}
    if isinstance(checkpoint, Mapping):
        source, node = "the checkpoint", checkpoint
    elif isinstance(checkpoint, str | os.PathLike):
        path = Path(checkpoint)
        source = str(path)
        if path.is_dir():
            raise IsADirectoryError(f"{source} is a directory, expected a checkpoint file")
        if not path.exists():
            raise FileNotFoundError(f"{source} does not exist, expected a checkpoint file")
        if path.suffix.lower() == ".safetensors":
            node, metadata = _read_safetensors(path)
        else:
            node = _read_pickle(path, allow_classes)
        if not isinstance(node, Mapping):
            raise ValueError(f"{source} holds a {type(node).__name__}, expected a dict of weights")
    else:
        raise TypeError(
            "checkpoint must be a path or a mapping of names to tensors, got "
            f"{type(checkpoint).__name__} (of a module, give its state_dict())"
        )
    sections: list[str] = []
    try:
        weights, left_out = _unwrap(node, section, sections)
    except RecursionError:
        raise ValueError(f"{source} is nested without end") from None
    if section is not None and section not in sections:
        raise ValueError(
            f"{source} has no section {section!r} with weights, it has "
            + (", ".join(map(repr, sections)) or "no sections")
        )
    return _Checkpoint(source, _strip(weights), metadata, left_out, sections)


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from error


def _read_pickle(path: Path, allow_classes: Iterable[str | type]) -> Any:
    """What torch.save wrote, as weights and the allowed classes only."""
    names = [allow_classes] if isinstance(allow_classes, str) else allow_classes
    allowed: list[Any] = [_resolve(name) for name in names]
    with path.open("rb"):
        pass  # a file that may not be read is not taken for a damaged one below
    is_zip = zipfile.is_zipfile(path)
    with torch.serialization.safe_globals(allowed):
        try:
            # Of a mapped file only what is used gets read; the format before zip cannot be mapped.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        except pickle.UnpicklingError as error:
            reason = _reason(error)
            wanted = _wanted(path, is_zip, reason)
        except Exception as error:  # a damaged file can fail in any way
            reason, wanted = f"{type(error).__name__}: {_reason(error)}", []
    # Raised out here so as not to show torch's own message, which advises to load unsafely.
    if not wanted:
        raise ValueError(
            f"{path} cannot be read as a checkpoint: {reason}. Expected a file of weights that "
            "torch.save wrote (whole, default pickle protocol), or a .safetensors file"
        )
    if "is blocked" in reason:
        raise ValueError(
            f"{path} wants {', '.join(wanted)} and was not loaded ({reason}). --allow-class cannot "
            "accept that, and no checkpoint of weights needs it: do not trust this file"
        )
    needed = list(dict.fromkeys([*(name for _, name in allowed), *wanted]))
    raise ValueError(
        f"{path} wants {', '.join(wanted)} besides weights and was not loaded. A name that you "
        "allow can be called by the file: if you trust who made it, accept with "
        f"{' '.join(f'--allow-class {name}' for name in needed)} "
        f"(in Python: allow_classes={needed})"
    )


def _resolve(allowed: str | type) -> tuple[Any, str]:
    """An allowed class and its full name, as `torch.serialization.safe_globals` takes them."""
    if not isinstance(allowed, str):
        return allowed, f"{allowed.__module__}.{allowed.__qualname__}"
    try:
        return pkgutil.resolve_name(allowed), allowed
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"allowed class {allowed!r} cannot be imported ({error}), expected module.Class"
        ) from error


def _reason(error: Exception) -> str:
    """The cause in one of torch.load's messages, without its advice."""
    text = str(error).partition("\n\nCheck the documentation")[0]
    lines = [line for line in text.splitlines() if line.strip()] or ["it is cut short"]
    return lines[-1].rpartition("WeightsUnpickler error: ")[2].partition(". ")[0].strip(" .")


def _wanted(path: Path, is_zip: bool, reason: str) -> list[str]:
    """Full names of the classes and functions that a file was refused for."""
    if is_zip:
        try:
            # All of them at once, found without running the pickle.
            if names := torch.serialization.get_unsafe_globals_in_checkpoint(path):
                return sorted(names)
        except Exception:  # an opcode it does not know; then the one in the message must do
            pass
    match = re.search(r"GLOBAL (\S+)|<class '([^']+)'>", reason)
    if match is None:
        return []
    name = match[1] or match[2]
    return [name if "." in name else f"builtins.{name}"]


def _holds_weights(node: Any) -> bool:
    return isinstance(node, Mapping) and any(
        isinstance(value, Tensor) or (name in _WRAPPERS and _holds_weights(value))
        for name, value in node.items()
        if isinstance(name, str)
    )


def _tensors_in(name: str, value: Any) -> list[str]:
    """The names of all tensors in an entry, however deep."""
    names: list[str] = []
    seen: set[int] = set()
    todo = [(name, value)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, Tensor):
            names.append(name)
        elif isinstance(value, Mapping | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))  # it may hold itself
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            todo += reversed([(f"{name}.{key}", inner) for key, inner in items])
    return names


def _unwrap(
    node: Mapping[Any, Any], section: str | None, sections: list[str]
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """The weights in nested dicts, and what else lay among them, each with the tensors in it.

    Adds the sections met on the way to `sections`.
    """
    named = {name: value for name, value in node.items() if isinstance(name, str)}
    held = {name: value for name, value in named.items() if _holds_weights(value)}
    sections += held
    if section in held:
        return _unwrap(held[section], None, [])
    taken = next((name for name in _WRAPPERS if name in held), None)
    if taken is not None and taken not in _PARTS:
        return _unwrap(held[taken], section, sections)
    weights = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    left_out: dict[str, list[str]] = {}
    for key, value in node.items():
        if isinstance(key, str) and (key in weights or key in _PARTS):
            continue
        if weights or isinstance(value, Tensor):
            left_out[str(key)] = _tensors_in(str(key), value)
    for part in _PARTS:
        if part in held:
            inside, left_out_inside = _unwrap(held[part], section, sections)
            weights |= {f"{part}.{name}": value for name, value in _strip(inside).items()}
            left_out |= {
                f"{part}.{name}": [f"{part}.{tensor}" for tensor in tensors]
                for name, tensors in left_out_inside.items()
            }
        elif tensors := _tensors_in(part, named.get(part)):
            left_out[part] = tensors
    return weights, left_out


def _strip(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cut off what a wrapper put before every key; a submodule of that name is beside others."""
    while weights:
        prefix = next((p for p in _KEY_PREFIXES if all(k.startswith(p) for k in weights)), None)
        if prefix is None:
            break
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


# Finding layers, and reading from the shapes what they are.


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _show(prefix: str) -> str:
    return prefix or "(root)"


def _own(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, by their names there."""
    start = _join(prefix, "")
    return {k.removeprefix(start): v for k, v in weights.items() if k.startswith(start)}


def _is_square(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1] > 0


def _owners(weights: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Prefix -> which of w1.weight, w2.weight, w3.weight and w_out.weight lie under it."""
    owners: dict[str, list[str]] = {}
    for key in weights:
        name = ".".join(key.split(".")[-2:])
        prefix = key.removesuffix(name).removesuffix(".")
        if name in _KEYS and key == _join(prefix, name):
            owners.setdefault(prefix, []).append(name)
    return owners


def _layer_prefix(weights: Mapping[str, Tensor], prefix: str) -> tuple[str, bool]:
    """The prefix of the layer that owns an LDSA part, and whether it is a hybrid."""
    parent, _, name = prefix.rpartition(".")
    sibling = _join(parent, "dot_att.")
    if name == "ldsa_att" and any(key.startswith(sibling) for key in weights):
        return parent, True
    return prefix, False


class _Found(NamedTuple):
    """What a search met, by prefix."""

    layers: dict[str, bool]  # whether it is a hybrid
    near: dict[str, tuple[list[str], bool]]  # no layer, but these three or four of its keys


def _search(weights: Mapping[str, Tensor]) -> _Found:
    found = _Found({}, {})
    for owner, names in _owners(weights).items():
        prefix, hybrid = _layer_prefix(weights, owner)
        if len(names) == 4 and all(_is_square(weights[_join(owner, name)]) for name in _SQUARE):
            found.layers[prefix] = hybrid
        elif len(names) >= 3:
            found.near[prefix] = names, hybrid
    return found


def _why_not(weights: Mapping[str, Tensor], found: _Found, prefix: str) -> str:
    """Why what is at a prefix is no layer."""
    names, hybrid = found.near[prefix]
    faults = _faults(prefix, _own(weights, prefix), hybrid)
    return f"{_show(prefix)} has {', '.join(sorted(names))}: {'; '.join(faults)}"


def _layers(opened: _Checkpoint) -> dict[str, bool]:
    """Prefix -> whether it is a hybrid, in the layers' order.

    Raises:
        ValueError: no layer, or one that lost a key.
    """
    found = _search(opened.weights)
    if not found.layers:
        near = [_why_not(opened.weights, found, prefix) for prefix in found.near]
        keys = [*list(opened.weights)[:5], *["..."] * (len(opened.weights) > 5)]
        raise ValueError(
            f"no LDSA layer in {opened.source}: expected w1.weight, w2.weight, w3.weight and "
            "w_out.weight under one prefix, with square w1, w3 and w_out, got "
            + ("\n".join(near) or ", ".join(keys) or "no tensors")
            + (f". Sections with weights: {', '.join(opened.sections)}" if opened.sections else "")
        )
    # Feed-forward layers have w1, w2 and w3 too, but w_out is found in no other layer.
    broken = [p for p, (names, _) in found.near.items() if len(names) == 3 and _KEYS[3] in names]
    if broken:
        words = "\n".join(_why_not(opened.weights, found, prefix) for prefix in broken)
        raise ValueError(f"{opened.source} has broken layers: {words}")
    return dict(sorted(found.layers.items(), key=lambda item: _natural(item[0])))


def _natural(prefix: str) -> list[tuple[int, str]]:
    """A sort key that puts layer 10 behind layer 9."""
    return [(int(part) if part.isdecimal() else -1, part) for part in prefix.split(".")]


def _pick(opened: _Checkpoint, prefix: str | None) -> tuple[str, bool]:
    """The prefix of the layer meant, and whether it is a hybrid."""
    if prefix is None:
        layers = _layers(opened)
        if len(layers) > 1:
            raise ValueError(
                f"{opened.source} has {len(layers)} layers, give prefix, one of: "
                + ", ".join(map(_show, layers))
            )
        return next(iter(layers.items()))
    found = _search(opened.weights)  # faults of other layers do not matter
    if prefix in found.near:
        raise ValueError(f"broken layer: {_why_not(opened.weights, found, prefix)}")
    if prefix not in found.layers:
        raise ValueError(
            f"no layer at prefix {prefix!r}, expected one of: "
            + ", ".join(map(_show, _layers(opened)))
        )
    return prefix, found.layers[prefix]


def _build(
    spec: LayerSpec, left: int | None = None, right: int | None = None
) -> LocalDenseSynthesizerAttention | HybridAttention:
    """A layer without memory for its parameters; left and right stand in for context_size."""
    assert spec.n_head is not None
    options: dict[str, Any] = {"edge": spec.edge, "left": left, "right": right, "device": "meta"}
    if left is None:
        options["context_size"] = spec.context_size
    if spec.variant == "hybrid":
        return HybridAttention(spec.n_head, spec.n_feat, **options)
    return LocalDenseSynthesizerAttention(
        spec.n_head,
        spec.n_feat,
        use_bias=spec.use_bias,
        grouped_w2=spec.variant == "grouped",
        **options,
    )


def _shape_spec(own: Mapping[str, Tensor], hybrid: bool) -> tuple[LayerSpec, bool]:
    """What the shapes say for certain, and whether w2 fits at all.

    A linear w2 is taken as one head, one that does not fit as a window of one frame.
    """
    att = _own(own, "ldsa_att") if hybrid else own
    # A damaged layer is named by the tensor that differs from the others.
    sizes = Counter(size for name in _SQUARE if name in att for size in att[name].shape if size)
    n_feat = sizes.most_common(1)[0][0] if sizes else 1
    shape = att["w2.weight"].shape if "w2.weight" in att else torch.Size()
    variant, n_head = "hybrid" if hybrid else "linear", 1
    fits = len(shape) in (2, 3) and shape[0] > 0
    if len(shape) == 3 and not hybrid:
        variant = "grouped"
        fits = fits and shape[1] > 0 and n_feat % shape[1] == 0
        n_head = n_feat // shape[1] if fits else 1
        fits = fits and shape[0] % n_head == 0
    pair = (n_head, shape[0] // n_head) if fits else (1, 1)
    use_bias = "w1.bias" in att and not hybrid
    return LayerSpec(variant, pair[0], n_feat, pair[1], use_bias, "zero", (pair,)), fits


def _faults(prefix: str, own: Mapping[str, Tensor], hybrid: bool) -> list[str]:
    """The missing, unexpected and mis-shaped keys of a layer, in words."""
    spec, w2_fits = _shape_spec(own, hybrid)
    ((_, window),) = spec.candidates
    expected = {
        name: str(list(tensor.shape))
        for name, tensor in _build(spec, left=window - 1, right=0).state_dict().items()
    }
    if not w2_fits:
        for name in expected:
            if name.endswith("w2.weight"):
                expected[name] = f"[H*W, {spec.n_feat}] or [H*W, {spec.n_feat}/H, 1]"
            elif name.endswith("w2.bias"):
                expected[name] = "[H*W]"
    faults = [f"missing {_join(prefix, name)}" for name in expected if name not in own]
    for name, tensor in own.items():
        key, shape = _join(prefix, name), str(list(tensor.shape))
        if name not in expected:
            faults.append(f"unexpected {key}")
        elif shape != expected[name] and not (expected[name] == "[H*W]" and tensor.dim() == 1):
            faults.append(f"{key} has shape {shape}, expected {expected[name]}")
        elif not tensor.is_floating_point():
            faults.append(f"{key} is {tensor.dtype}, expected floating point")
    return faults


def _spec(
    opened: _Checkpoint, prefix: str, own: Mapping[str, Tensor], hybrid: bool, given: _Given
) -> LayerSpec:
    """What the layer at a prefix is; more than one candidate where neither H nor W is known."""
    if faults := _faults(prefix, own, hybrid):
        raise ValueError(f"layer {_show(prefix)}: {'; '.join(faults)}")
    shapes, _ = _shape_spec(own, hybrid)
    known = _merge(opened, prefix, shapes, given)
    ((shape_heads, shape_window),) = shapes.candidates
    rows = shape_heads * shape_window
    heads: Iterable[int]
    if shapes.variant == "grouped":
        heads = [shape_heads]
    elif known.n_head is not None:
        heads = [known.n_head]
    elif known.context_size is not None:
        heads = [rows // known.context_size]
    else:
        # A window of one frame is never guessed: it would take an even window for more heads.
        heads = [h for h in range(1, shapes.n_feat + 1) if rows // h >= 3 and rows // h % 2]
    pairs = tuple(
        (h, rows // h)
        for h in heads
        if h and rows % h == 0 and shapes.n_feat % h == 0
        if known.n_head in (None, h) and known.context_size in (None, rows // h)
    )
    if not pairs or pairs[0][1] % 2 == 0:
        came = {"n_head": known.n_head, "context_size": known.context_size}
        if shapes.variant == "grouped":
            came["n_head of a grouped w2"] = shape_heads
        got = ", ".join(f"{name} {value}" for name, value in came.items() if value is not None)
        raise ValueError(
            f"layer {_show(prefix)}: expected n_head * context_size = {rows} (rows of w2.weight) "
            f"with n_head a divisor of n_feat {shapes.n_feat} and context_size odd, got "
            + (got or "no n_head for which context_size is 3 or more: it is even or 1, give n_head")
        )
    one = pairs[0] if len(pairs) == 1 else (None, None)
    return replace(
        shapes, n_head=one[0], context_size=one[1], edge=known.edge or "zero", candidates=pairs
    )


def _saved(text: str) -> dict[str, Any] | None:
    """The fields of a LayerSpec that a conversion wrote, None for an entry of another origin."""
    try:
        saved = json.loads(text)
    except (ValueError, RecursionError):
        return None
    names = {field.name for field in fields(LayerSpec)}
    return saved if isinstance(saved, dict) and saved.keys() >= names else None


def _merge(opened: _Checkpoint, prefix: str, shapes: LayerSpec, given: _Given) -> _Given:
    """What the caller and a converted file's metadata say of a layer, which must agree."""
    saved = _saved(opened.metadata.get(prefix, ""))
    if saved is None:
        return given
    try:
        said = _check_given(saved["n_head"], saved["context_size"], saved["edge"])
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"layer {_show(prefix)}: the metadata of {opened.source} is not what a conversion "
            f"writes: {error!r}"
        ) from error
    contradictions = [
        f"metadata says {name} {saved[name]!r}, the weights {getattr(shapes, name)!r}"
        for name in ("variant", "n_feat", "use_bias")
        if saved[name] != getattr(shapes, name)
    ]
    contradictions += [
        f"metadata says {name} {old!r}, the argument {new!r}"
        for name, old, new in zip(_Given._fields, said, given, strict=True)
        if new is not None and new != old
    ]
    if contradictions:
        raise ValueError(f"layer {_show(prefix)}: {'; '.join(contradictions)}")
    return said


def _specs(opened: _Checkpoint, given: _Given) -> dict[str, LayerSpec]:
    """{prefix: LayerSpec} of all layers; what is wrong with any of them in one ValueError."""
    specs: dict[str, LayerSpec] = {}
    faults: list[str] = []
    for prefix, hybrid in _layers(opened).items():
        try:
            own = _own(opened.weights, prefix)
            specs[prefix] = _spec(opened, prefix, own, hybrid, given)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))
    return specs


def _check_decided(specs: Mapping[str, LayerSpec]) -> None:
    unclear = [
        f"layer {_show(prefix)}: several (n_head, context_size) fit: "
        + ", ".join(map(str, spec.candidates))
        for prefix, spec in specs.items()
        if spec.n_head is None
    ]
    if unclear:
        raise ValueError("\n".join([*unclear, "give n_head or context_size"]))


# Writing, and the command.


def _convert(
    src: str | os.PathLike[str] | Mapping[str, Any],
    dst: str | os.PathLike[str],
    given: _Given,
    section: str | None,
    allow_classes: Iterable[str | type],
    *,
    progress: bool,
) -> dict[str, LayerSpec]:
    # A link is followed: what it points to is replaced, as writing to it would.
    path = Path(os.path.realpath(dst))
    if path.is_dir():
        raise IsADirectoryError(f"dst {dst} is a directory, expected a file to write")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"dst {dst}: there is no directory {path.parent}, make it first")
    if path.suffix.lower() != ".safetensors":
        raise ValueError(f"dst must be named .safetensors, got {dst}")
    if not isinstance(src, Mapping) and path.exists() and os.path.samefile(src, path):
        raise ValueError(f"dst {dst} is src, give it another name: the source is kept")
    opened = _open(src, section, allow_classes)
    specs = _specs(opened, given)
    _check_decided(specs)
    if lost := [name for tensors in opened.left_out.values() for name in tensors]:
        more = f" and {len(lost) - 10} more" if len(lost) > 10 else ""
        raise ValueError(
            f"{opened.source} has tensors in nested entries or under keys that are no strings, "
            f"which would be lost: {', '.join(lost[:10])}{more}. Take them out, or give each "
            "a name of its own beside the other weights"
        )
    metadata = {"format": "pt", **opened.metadata}
    if taken := [p for p in specs if p in metadata and _saved(metadata[p]) is None]:
        raise ValueError(
            f"layers whose prefixes name other entries of the metadata: {', '.join(taken)}. Give "
            "a mapping of the weights with other prefixes"
        )
    metadata |= {prefix: json.dumps(asdict(spec)) for prefix, spec in specs.items()}
    if opened.left_out:
        warnings.warn(f"left out, being no tensors: {', '.join(opened.left_out)}", stacklevel=3)
    tensors = _storable(opened)
    large = sum(tensor.nbytes for tensor in tensors.values()) >= _LARGE
    _write(tensors, path, metadata, progress and large)
    return specs


def _has_format(dtype: torch.dtype) -> bool:
    """Whether safetensors can hold a dtype: its list of them is not public."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some dtypes experimental
        try:
            save({"": torch.empty(0, dtype=dtype)})
        except (SafetensorError, RuntimeError, KeyError, ValueError, TypeError):
            return False
    return True


def _storable(opened: _Checkpoint) -> dict[str, Tensor]:
    """The weights as safetensors takes them: dense, and no two in the same memory."""
    refused = [
        name
        for name, tensor in opened.weights.items()
        if tensor.layout != torch.strided
        or tensor.is_meta
        or tensor.is_quantized
        or not _has_format(tensor.dtype)
    ]
    if refused:
        raise ValueError(
            f"{opened.source} has tensors that safetensors cannot hold (sparse, quantized, "
            "on the meta device, or of a dtype that it lacks, as complex32 and complex128): "
            + ", ".join(f"{name} ({opened.weights[name].dtype})" for name in refused)
        )
    tensors: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in opened.weights.items():
        tensor = tensor.detach()
        start = tensor.untyped_storage().data_ptr()
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if not plain or start in memory:
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        memory.add(start)
        tensors[name] = tensor
    return tensors


def _write(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str], progress: bool
) -> None:
    """Write a safetensors file whole or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".ldsa-convert-") as folder:
        part = Path(folder) / path.name
        # safetensors may make files that only their owner can read: note what others would be.
        part.touch()
        mode = (path if path.exists() else part).stat().st_mode
        try:
            if progress:
                _save_with_progress(tensors, part, metadata)
            else:
                save_file(tensors, part, metadata=metadata)
        except (SafetensorError, RuntimeError, KeyError) as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        with part.open("r+b") as file:
            os.fsync(file.fileno())
        part.chmod(mode)
        os.replace(part, path)


def _save_with_progress(tensors: dict[str, Tensor], part: Path, metadata: dict[str, str]) -> None:
    """save_file with a bar on stderr, which follows the file's growth for want of a callback."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # here: the command alone needs it

    total = sum(tensor.nbytes for tensor in tensors.values())
    with (
        ThreadPoolExecutor(1) as pool,
        # disable=None: no bar in a log file.
        tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=None) as bar,
    ):
        saving = pool.submit(save_file, tensors, part, metadata=metadata)
        while wait([saving], timeout=0.1).not_done:
            bar.update(max(0, min(total, _written(part.parent)) - bar.n))
        saving.result()
        bar.update(total - bar.n)


def _written(folder: Path) -> int:
    """Bytes on disk of a folder's files, whose lengths may be set before anything is written."""
    written = 0
    with suppress(FileNotFoundError):  # a file that was just given its name
        for file in folder.iterdir():
            status = file.stat()
            blocks = getattr(
                status, "st_blocks", None
            )  # of 512 bytes, where the system counts them
            written += status.st_size if blocks is None else 512 * blocks
    return written


def _table(specs: Mapping[str, LayerSpec]) -> str:
    """The layers in columns; where several (n_head, context_size) fit, all of them."""
    rows = [("prefix", "variant", "n_head", "n_feat", "context_size", "use_bias", "edge")]
    for prefix, spec in specs.items():
        heads, windows = (
            " or ".join(map(str, column)) for column in zip(*spec.candidates, strict=True)
        )
        bias = "yes" if spec.use_bias else "no"
        rows.append(
            (_show(prefix), spec.variant, heads, str(spec.n_feat), windows, bias, spec.edge)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command ldsa-convert; returns its exit status, 0 or (bad input) 1."""
    parser = argparse.ArgumentParser(
        prog="ldsa-convert",
        description="Convert a checkpoint with LDSA layers to safetensors that ldsa_nn loads.",
    )
    parser.add_argument(
        "src", metavar="SRC", help="checkpoint: what torch.save wrote, or safetensors"
    )
    parser.add_argument("dst", metavar="DST", nargs="?", help="the .safetensors file to write")
    parser.add_argument(
        "--n-head", type=int, metavar="N", help="heads, where the weights do not tell"
    )
    parser.add_argument(
        "--context-size",
        type=int,
        metavar="C",
        help="window in frames, where the weights do not tell",
    )
    parser.add_argument(
        "--edge",
        choices=("zero", "renormalize"),
        help="window slots outside the sequence: zero, or removed before the softmax (reference "
        "class LocalDenseSynthesizerAttention2)",
    )
    parser.add_argument(
        "--section", metavar="NAME", help="entry to take the weights from, e.g. ema"
    )
    parser.add_argument(
        "--list", action="store_true", help="print a table of the layers and write nothing"
    )
    parser.add_argument(
        "--allow-class",
        action="append",
        default=[],
        metavar="NAME",
        help="a class that the file may use besides weights, as module.Class; repeatable",
    )
    args = parser.parse_args(argv)
    if args.dst is None and not args.list:
        parser.error("DST is needed, unless --list is given")
    try:
        given = _check_given(args.n_head, args.context_size, args.edge)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if args.list:
                specs = _specs(_open(args.src, args.section, args.allow_class), given)
            else:
                specs = _convert(
                    args.src, args.dst, given, args.section, args.allow_class, progress=True
                )
    except (ValueError, OSError) as error:
        print(f"ldsa-convert: error: {error}", file=sys.stderr)
        return 1
    for warning in caught:
        print(f"ldsa-convert: warning: {warning.message}", file=sys.stderr)
    print(_table(specs))
    if args.list:
        if any(spec.n_head is None for spec in specs.values()):
            print("several n_head and context_size fit: give --n-head or --context-size")
    else:
        print(f"wrote {args.dst}")
    return 0
