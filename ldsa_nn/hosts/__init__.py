"""What replace.py knows of toolkits: one file a toolkit, named like the toolkit's package.

A host file defines HOSTS, a tuple of `Host`, and NOT_HOSTS, which says for classes that look like
hosts why they are none: a dict from the qualified name of an attention class, or of the class that
owns it, to the reason. Classes are given by their qualified name, so that matching one
imports nothing and a class that another release lacks does no harm. A host file is imported only
where its toolkit is, so it may import that toolkit and no other.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

# Not `import torch`: in this package that name becomes the host file's.
from torch import Tensor, cat, compiler, nn
from torch import bool as bool_

__all__ = [
    "Adapter",
    "Attention",
    "Host",
    "class_name",
    "keep_from_padding",
    "kept_frames",
    "loaded",
    "names",
]


# The modules whose presence shows that a process may hold a toolkit's models, where that is not the
# package of the host file's name.
_SIGNS = {
    "espnet2": ("espnet2", "espnet"),
    # Recipes are folders of scripts, and their modules stand at the top.
    "icefall": ("icefall", "conformer", "zipformer"),
    # The package alone may have no speech models, and may lack what they need.
    "nemo": ("nemo.collections.asr.parts.submodules.multi_head_attention",),
}


class Attention(NamedTuple):
    """What a host's attention tells of the layer that is to take its place.

    value_weight and out_weight are [D,D], as nn.Linear's; a missing bias is None. `weight` is any
    parameter, for its dtype and device.
    """

    n_head: int
    n_feat: int
    dropout_rate: float
    weight: Tensor
    value_weight: Tensor
    value_bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor | None


class Adapter(nn.Module):
    """Stands where the host's attention stood: takes the host's call, calls `layer`.

    A subclass defines forward, with the host's names and return value. It calls
    ``self.layer(query, key, value, mask=keep, lengths=lengths)``, batch first, keep bool [B,T] with
    True = keep. In the model's state dict the layer's parameters stand under "layer.".

    Args:
        old: the host's attention.
        layer: what takes its place.
        left, right: the layer's window in frames.
    """

    def __init__(self, old: nn.Module, layer: nn.Module, left: int, right: int) -> None:
        nn.Module.__init__(self)  # not that of a host's class which an adapter must be one of
        self.layer = layer
        self.left = left
        self.right = right

    def attend(self, query: Tensor, value: Tensor, keep: Tensor | None = None) -> Tensor:
        """Run the layer on the last frames of `value`.

        The frames before query's are a stream's past. Only the last `left` of them are used, so
        that their number does not change the result once it is `left`.

        Args:
            query: [B,T,D].
            value: [B,P+T,D], P frames of the past, then query's.
            keep: bool [B,P+T], True = keep; frames of the past that are none are not kept.

        Returns:
            [B,T,D].

        Raises:
            ValueError: value is shorter than query, or as the layer does.
        """
        past = value.shape[1] - query.shape[1]
        if past < 0:
            raise ValueError(
                f"value must have query's {query.shape[1]} frames or more, got {value.shape[1]}"
            )
        drop = max(past - self.left, 0)
        value = value[:, drop:]
        keep = None if keep is None else keep[:, drop:]
        past -= drop
        if past:
            query = cat([value[:, :past], query], 1)
        out = self.layer(query, value, value, mask=keep, lengths=None)
        return out[:, past:]

    def check_ahead(self, attn_mask: Tensor | None) -> None:
        """Raise where a mask of pairs, [T,T] or [N,T,T], forbids a later frame of the window.

        It may be bool, True = forbidden, or additive. What it forbids of earlier frames stays in
        the window, as the report warns.
        """
        if attn_mask is None or self.right == 0:
            return
        advice = f"a causal or chunked host needs a window with right=0, got right={self.right}"
        if compiler.is_compiling():
            raise ValueError(f"attn_mask cannot be checked in a compiled model: {advice}")
        forbidden = attn_mask if attn_mask.dtype == bool_ else attn_mask < -1e3
        if forbidden.triu(1).tril(self.right).any():
            raise ValueError(f"attn_mask forbids later frames of the window: {advice}")

    def extra_repr(self) -> str:
        """Show the window, which a layer of `make` may not show."""
        return f"left={self.left}, right={self.right}"


def _nothing(model: nn.Module, parents: list[nn.Module]) -> list[tuple[nn.Module, str, object]]:
    return []


class Host(NamedTuple):
    """A class of a toolkit that calls a self-attention which a layer of ours can stand in for.

    Args:
        parent: qualified name of the class that owns the attention, matched exactly.
        attribute: its name there.
        attention: qualified names of the attention's classes, matched exactly.
        describe: reads an attention of these classes.
        adapter: makes the adapter, from (old, layer, left, right).
        warnings: what a user must know of a replaced model.
        settings: further attributes to set, as (module, name, value), when the attention of
            `parents` in `model` is replaced.
    """

    parent: str
    attribute: str
    attention: tuple[str, ...]
    describe: Callable[[Any], Attention]
    adapter: Callable[[Any, nn.Module, int, int], Adapter]
    warnings: tuple[str, ...] = ()
    settings: Callable[[nn.Module, list[nn.Module]], list[tuple[nn.Module, str, object]]] = _nothing


def class_name(of: type) -> str:
    """A class's qualified name."""
    return f"{of.__module__}.{of.__qualname__}"


def names() -> list[str]:
    """The toolkits that have a host file."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def loaded() -> dict[str, ModuleType]:
    """The host files of those toolkits that this process has imported: no model is of another."""
    return {
        name: importlib.import_module(f"{__name__}.{name}")
        for name in names()
        if any(sys.modules.get(sign) for sign in _SIGNS.get(name, (name,)))
    }


def keep_from_padding(mask: Tensor) -> Tensor:
    """A padding mask of torch's polarity as bool, True = keep, without synchronising.

    Args:
        mask: bool, True = padding; or additive floating point: 0 keeps, and -1e3 or less (-1e4, the
            dtype's minimum, -inf) drops.

    Raises:
        TypeError: another dtype.
        ValueError: an additive mask with other values, where that can be seen without synchronising
            (a CPU mask in eager mode).
    """
    if mask.dtype == bool_:
        return ~mask
    if not mask.is_floating_point():
        raise TypeError(
            "key_padding_mask must be bool (True = padding) or additive floating point, got "
            f"{mask.dtype}: of a 0/1 mask with 1 = frame give mask == 0"
        )
    keep = mask > -1e3
    if mask.device.type == "cpu" and not compiler.is_compiling():
        other = keep & (mask != 0) | mask.isnan()
        if other.any():
            raise ValueError(
                "an additive key_padding_mask must be 0 (keep) or at most -1e3 (drop), got "
                f"{mask[other][0].item()}: the layer's window takes no bias"
            )
    return keep


def kept_frames(keep: Tensor, batch: int, frames: int, past: int = 0) -> Tensor:
    """The frames that a host's mask of keys or of pairs keeps, without synchronising.

    Of a mask of pairs the diagonal counts, because under a causal or chunk mask no row keeps all
    frames; of the past, where there is no diagonal, a frame counts that any row keeps.

    Args:
        keep: bool, True = keep, [B,P+T], [B,1,P+T] or [B,T,P+T].
        batch, frames, past: B, T and P that it must have.

    Returns:
        bool [B,P+T].

    Raises:
        ValueError: keep has another shape.
    """
    whole = past + frames
    shape = tuple(keep.shape)
    if shape == (batch, whole):
        return keep
    if shape == (batch, 1, whole):
        return keep[:, 0]
    if shape == (batch, frames, whole):
        return cat([keep[..., :past].any(1), keep.diagonal(past, 1, 2)], 1)
    raise ValueError(
        f"mask must have shape [B,1,S] or [B,T,S] with B={batch}, T={frames} and S={whole}, got "
        f"{list(shape)}"
    )
