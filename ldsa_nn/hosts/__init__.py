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
from torch import Tensor, compiler, nn
from torch import bool as bool_

__all__ = [
    "Adapter",
    "Attention",
    "Host",
    "class_name",
    "keep_from_padding",
    "loaded",
    "names",
]


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
        super().__init__()
        self.layer = layer
        self.left = left
        self.right = right

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
        if sys.modules.get(name)
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
