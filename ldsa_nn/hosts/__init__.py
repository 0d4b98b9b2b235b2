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
    "BiasedAdapter",
    "Host",
    "class_name",
    "drop_unused_bias",
    "keep_from_mask",
    "keep_from_padding",
    "loaded",
    "names",
]


class Attention(NamedTuple):
    """What a host's attention tells of the layer that is to take its place.

    value_weight and out_weight are [D,D], as nn.Linear's, or of other shapes, which then start no
    new layer; a missing bias is None. `weight` is any parameter, for its dtype and device.
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


class BiasedAdapter(Adapter):
    """An adapter for WavLM, whose first attention owns a position bias that all layers add.

    The window takes no bias, but layers that keep their own attention still need it. So the first
    layer's adapter keeps the bias's parameters, under their old name.
    """

    rel_attn_embed: nn.Module | None

    def __init__(self, old: nn.Module, layer: nn.Module, left: int, right: int) -> None:
        super().__init__(old, layer, left, right)
        self.rel_attn_embed = getattr(old, "rel_attn_embed", None)
        self.num_buckets = getattr(old, "num_buckets", None)
        self.max_distance = getattr(old, "max_distance", None)
        self._of: Any = type(old)

    def _relative_positions_bucket(self, *args: Any, **kwargs: Any) -> Tensor:
        # The old class's compute_bias looks for it here.
        return self._of._relative_positions_bucket(self, *args, **kwargs)

    def position_bias(self, batch: int, frames: int) -> Tensor | None:
        """[B,H,T,T] for layers that add it, or None where there are none."""
        if self.rel_attn_embed is None:
            return None
        return self._of.compute_bias(self, frames, frames).repeat(batch, 1, 1, 1)


def drop_unused_bias(
    model: nn.Module, parents: list[nn.Module]
) -> list[tuple[nn.Module, str, object]]:
    """Drop the position bias of encoders where no layer adds it any more: it would get no gradient.

    Args:
        model: the model, with its adapters.
        parents: layers of its encoders with a `BiasedAdapter` as `attention`.
    """
    replaced = {id(parent) for parent in parents}
    settings: list[tuple[nn.Module, str, object]] = []
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList) and any(id(layer) in replaced for layer in layers):
            attentions: list[Any] = [getattr(layer, "attention", None) for layer in layers]
            if all(isinstance(attention, BiasedAdapter) for attention in attentions):
                settings += [(attention, "rel_attn_embed", None) for attention in attentions]
    return settings


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
        settings: further attributes to set, as (module, name, value), where the attention of
            `parents` in `model` was replaced: the adapters are in place when it is called.
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
    return _keep_from_additive("key_padding_mask", mask)


def keep_from_mask(mask: Tensor, batch: int, frames: int) -> Tensor:
    """An attention mask of the polarity "True = keep" as bool [B,T], without synchronising.

    Args:
        mask: bool or integer, nonzero = keep; or additive floating point as in `keep_from_padding`.
            [B,T]; or [B,1,T,T], whose diagonal counts; or with 1 instead of B or of the first T, or
            with H instead of 1.
        batch, frames: B and T.

    Raises:
        TypeError: mask is not a tensor.
        ValueError: another shape; or other additive values, where that can be seen without
            synchronising.
    """
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(mask).__name__}")
    shape = list(mask.shape)
    square = len(shape) == 4 and shape[0] in (1, batch) and shape[2:] in ([1, frames], [frames] * 2)
    if not square and shape != [batch, frames]:
        raise ValueError(
            f"attention_mask must have shape [B,T] or [B,1,T,T] with B={batch} and T={frames}, got "
            f"{shape}"
        )
    if square:
        mask = mask[:, 0]
        mask = mask[:, 0] if shape[2] == 1 else mask.diagonal(dim1=1, dim2=2)
        mask = mask.expand(batch, frames)
    if mask.is_floating_point():
        return _keep_from_additive("attention_mask", mask)
    return mask != 0


def _keep_from_additive(name: str, mask: Tensor) -> Tensor:
    keep = mask > -1e3
    if mask.device.type == "cpu" and not compiler.is_compiling():
        other = keep & (mask != 0) | mask.isnan()
        if other.any():
            raise ValueError(
                f"an additive {name} must be 0 (keep) or at most -1e3 (drop), got "
                f"{mask[other][0].item()}: the layer's window takes no bias"
            )
    return keep
