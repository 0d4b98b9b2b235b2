"""The public ops, and what the layers share: checks, and masks read as extents."""

import operator
from typing import SupportsIndex

import torch
from torch import Tensor

from ldsa_nn._kernels import (
    check_bound,
    delta_gates,
    depthwise_convolved,
    eager_ldsa,
    eager_ldsa_at,
    gated_norm,
    ldsa_local_attention,
    ldsa_weights,
    short_convolution,
    tiled_delta_rule,
)

__all__ = [
    "check_bound",
    "check_sequence",
    "delta_gates",
    "depthwise_convolved",
    "eager_ldsa",
    "eager_ldsa_at",
    "extent",
    "frames_inside",
    "gated_norm",
    "integer",
    "keep_mask",
    "ldsa_local_attention",
    "ldsa_weights",
    "mask_extent",
    "short_convolution",
    "tiled_delta_rule",
]


def integer(name: str, value: SupportsIndex) -> int:
    """An int, of numpy too; True is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    return operator.index(value)


def check_sequence(name: str, x: Tensor, n_feat: int, like: Tensor | None = None) -> None:
    """Check a tensor [B,T,n_feat], of the query's shape `like` where that is given."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor [B,T,D], got {type(x).__name__}")
    if x.dim() != 3 or x.shape[2] != n_feat:
        raise ValueError(f"{name} must have shape [B,T,D] with D={n_feat}, got {list(x.shape)}")
    if like is not None and x.shape != like.shape:
        raise ValueError(f"{name} must have query's shape {list(like.shape)}, got {list(x.shape)}")


def keep_mask(mask: Tensor, batch: int, frames: int) -> Tensor:
    """A toolkit's mask as bool [B,1,T] or [B,T,T], True = keep.

    Args:
        mask: bool or integer 0/1, [B,T], [B,1,T] or [B,T,T]; nonzero = keep.
        batch, frames: B and T that the mask must have.

    Raises:
        TypeError: mask is not a tensor, or floating point (an additive mask).
        ValueError: mask has another shape.
    """
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a bool or integer tensor, got {type(mask).__name__}")
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"mask must be bool or integer with nonzero = keep, got {mask.dtype}: compare an "
            "additive float mask with 0 first"
        )
    shape = tuple(mask.shape)
    if shape == (batch, frames):
        mask = mask[:, None]
    elif shape not in ((batch, 1, frames), (batch, frames, frames)):
        raise ValueError(
            f"mask must have shape [B,T], [B,1,T] or [B,T,T] with B={batch} and T={frames}, "
            f"got {list(shape)}"
        )
    return mask != 0


def mask_extent(mask: Tensor, batch: int, frames: int) -> tuple[Tensor, Tensor]:
    """First frame and end of each sequence in a mask, without synchronising with the device.

    Args:
        mask: as in `keep_mask`; of [B,T,T] the diagonal counts.
        batch, frames: B and T that the mask must have.

    Returns:
        (starts, lengths), int64 [B] each: sequence b is frames [starts[b], lengths[b]); a sequence
        without a frame has lengths 0.

    Raises:
        TypeError: mask is not a tensor, or floating point (an additive mask).
        ValueError: mask has another shape, or, where that can be seen without synchronising (a
            CPU mask in eager mode), holes.
    """
    keep = keep_mask(mask, batch, frames)
    keep = keep[:, 0] if keep.shape[1] == 1 else keep.diagonal(dim1=1, dim2=2)
    if frames == 0:
        none = torch.zeros(batch, dtype=torch.int64, device=mask.device)
        return none, none
    count = torch.arange(1, frames + 1, device=mask.device)
    lengths = (keep * count).amax(1)
    starts = frames - (keep * count.flip(0)).amax(1)
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        holes = (lengths - starts).clamp(min=0) != keep.sum(1)
        if holes.any():
            raise ValueError(
                "mask must keep one run of frames in each sequence, got holes in sequence "
                f"{int(holes.nonzero()[0])}"
            )
    return starts, lengths


def frames_inside(
    lengths: Tensor | None, starts: Tensor | None, frames: int, device: torch.device
) -> Tensor:
    """Bool [B,T]: frame t of sequence b is in [starts[b], lengths[b]); one of the two is given."""
    t = torch.arange(frames, device=device)
    inside = torch.ones((), dtype=torch.bool, device=device)
    if lengths is not None:
        inside = inside & (t < lengths.to(device, non_blocking=True)[:, None])
    if starts is not None:
        inside = inside & (t >= starts.to(device, non_blocking=True)[:, None])
    return inside


def extent(
    query: Tensor, mask: Tensor | None, lengths: Tensor | None, honor_mask: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(starts, lengths) from whichever of mask and lengths is given, checked."""
    check_bound("lengths", lengths, query.shape[0], query.device)
    if mask is None or not honor_mask:
        return None, lengths
    if lengths is not None:
        raise ValueError("give lengths or mask, not both")
    return mask_extent(mask, query.shape[0], query.shape[1])
