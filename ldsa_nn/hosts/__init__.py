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
    "BiasedAdapter",
    "Host",
    "class_name",
    "drop_unused_bias",
    "keep_from_mask",
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
        if keep is not None and keep.dim() != 2:
            raise ValueError(f"a mask of keys must have shape [B,T], got {list(keep.shape)}")
        keep = None if keep is None else keep[:, drop:]
        past -= drop
        if past:
            query = cat([value[:, :past], query], 1)
        out = self.layer(query, value, value, mask=keep, lengths=None)
        return out[:, past:]

    def check_ahead(self, attn_mask: Tensor | None, frames: int) -> None:
        """Raise where a mask of pairs, [T,T] or [N,T,T], forbids a later frame of the window.

        It may be bool, True = forbidden, or additive; T is `frames`. What it forbids of earlier
        frames stays in the window, as the report warns.
        """
        if attn_mask is None:
            return
        if not isinstance(attn_mask, Tensor):
            raise TypeError(f"attn_mask must be a tensor, got {type(attn_mask).__name__}")
        if attn_mask.dtype != bool_ and not attn_mask.is_floating_point():
            raise TypeError(
                "attn_mask must be bool (True = forbidden) or additive floating point, got "
                f"{attn_mask.dtype}"
            )
        if attn_mask.dim() not in (2, 3) or attn_mask.shape[-2:] != (frames, frames):
            raise ValueError(
                f"attn_mask must have shape [T,T] or [N,T,T] with T={frames}, got "
                f"{list(attn_mask.shape)}"
            )
        if self.right == 0:
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
        if any(sys.modules.get(sign) for sign in _SIGNS.get(name, (name,)))
    }


def keep_from_padding(mask: Tensor) -> Tensor:
    """A padding mask of torch's polarity as bool, True = keep, without synchronising.

    Args:
        mask: bool, True = padding; or additive floating point: 0 keeps, and -1e3 or less (-1e4, the
            dtype's minimum, -inf) drops.

    Raises:
        TypeError: mask is not a tensor or has another dtype.
        ValueError: an additive mask with other values, where that can be seen without synchronising
            (a CPU mask in eager mode).
    """
    if not isinstance(mask, Tensor):
        raise TypeError(f"key_padding_mask must be a tensor, got {type(mask).__name__}")
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


def kept_frames(
    mask: Tensor, batch: int, frames: int, past: int = 0, *, masked: bool = False
) -> Tensor:
    """The frames that a host's mask of keys or of pairs keeps, without synchronising.

    Of a mask of pairs the diagonal counts, because under a causal or chunk mask no row keeps all
    frames; of the past, where there is no diagonal, a frame counts that any row keeps.

    Args:
        mask: bool or integer, [B,P+T], [B,1,P+T] or [B,T,P+T].
        batch, frames, past: B, T and P that it must have.
        masked: whether nonzero = masked, else nonzero = keep.

    Returns:
        bool [B,P+T], True = keep.

    Raises:
        TypeError: mask is not a tensor, or it is floating point: a host that has no additive masks
            may read such as the opposite.
        ValueError: mask has another shape.
    """
    if not isinstance(mask, Tensor) or mask.is_floating_point():
        came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        meaning = "masked" if masked else "keep"
        raise TypeError(f"mask must be a bool or integer tensor, nonzero = {meaning}, got {came}")
    keep = mask == 0 if masked else mask != 0
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
