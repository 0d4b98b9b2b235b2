"""State tuples of the streaming layers, and what the layers share to step.

A state is a tuple of tensors (of tuples, in the encoder) with the streams in dimension 0. Shapes
are fixed and no dimension but the batch is ever 0, so rows can be reordered, copied over or
exported. A step never writes to the state it is given.
"""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ldsa_nn._kernels import check_bound

__all__ = [
    "BlockState",
    "EncoderState",
    "LdsaState",
    "SlaState",
    "check_batch_size",
    "check_chunk",
    "check_frames",
    "check_state",
    "chunk_lengths",
    "frames_from",
    "joined",
    "last_frames",
    "zeros_like_parameter",
]

State = TypeVar("State")


class LdsaState(NamedTuple):
    """What LocalDenseSynthesizerAttention keeps of each stream: K = max(left + right, 1) frames.

    logits: [B,K,H,W] of the last K frames.
    value: [B,K,H,Dh], their projected values.
    start: int64 [B], the place of the stream's frame 0 among the K: K before the first frame has
        come, below 0 once it has left.
    """

    logits: Tensor
    value: Tensor
    start: Tensor


class SlaState(NamedTuple):
    """What SystolicLinearAttention keeps of each stream.

    memory: [B,H,K,R*P], the state of the delta rule.
    conv: the convolution's last inputs, [B,max(kernel-1,1),C].
    """

    memory: Tensor
    conv: Tensor


class BlockState(NamedTuple):
    """What a ConformerEncoder's block keeps of each stream.

    attention: the attention's own state.
    delayed: () where the attention's delay is 0. Else its last `delay` residual frames
        [B,delay,D], and how many frames came before, int64 [B].
    conv: () without a convolution, else its last inputs, ([B,max(kernel-1,1),D],).
    """

    attention: Any
    delayed: tuple[Tensor, ...]
    conv: tuple[Tensor, ...]


class EncoderState(NamedTuple):
    """What a ConformerEncoder keeps of each stream.

    frames: int64 [B], how many input frames came before.
    subsampling: the last two inputs [B,2,C] of each strided convolution.
    blocks: a BlockState each.
    """

    frames: Tensor
    subsampling: tuple[Tensor, ...]
    blocks: tuple[BlockState, ...]


def check_batch_size(batch_size: int) -> None:
    """A count of streams, which in an exported step is symbolic."""
    count = isinstance(batch_size, (int, torch.SymInt)) or hasattr(batch_size, "__index__")
    if not count or isinstance(batch_size, bool):
        raise TypeError(f"batch_size must be an int, got {type(batch_size).__name__}")
    if batch_size < 0:
        raise ValueError(f"batch_size must be >= 0, got {batch_size}")


def _matching(name: str, state: Any, expected: Any, device: torch.device) -> Any:
    """`state`, checked, in the tuple types of `expected`."""
    if isinstance(expected, tuple):
        kind = type(expected)
        if not isinstance(state, (tuple, list)):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(state).__name__}")
        if len(state) != len(expected):
            raise ValueError(f"{name} must have {len(expected)} parts, got {len(state)}")
        fields = getattr(expected, "_fields", None)
        names = [f".{f}" for f in fields] if fields else [f"[{i}]" for i in range(len(state))]
        parts = [
            _matching(name + n, s, e, device)
            for n, s, e in zip(names, state, expected, strict=True)
        ]
        return kind(*parts) if fields else tuple(parts)
    if not isinstance(state, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(state).__name__}")
    if state.shape != expected.shape:
        raise ValueError(f"{name} must have shape {list(expected.shape)}, got {list(state.shape)}")
    if state.dtype != expected.dtype and not (
        expected.is_floating_point()
        and torch.is_autocast_enabled(device.type)
        and state.dtype == torch.get_autocast_dtype(device.type)
    ):
        raise TypeError(f"{name} must have dtype {expected.dtype}, got {state.dtype}")
    if state.device != device:
        raise ValueError(f"{name} must be on {device} (the parameters), got {state.device}")
    return state


def check_state(layer: Any, state: State, parameter: Tensor, batch: int | None = None) -> State:
    """Check a state against the layer's init_state, and return it as that one's tuples.

    Under autocast a floating tensor may have autocast's dtype instead.

    Args:
        layer: what the state must be a state of.
        state: any tuples or lists of tensors.
        parameter: one of the layer's, on whose device the state must be.
        batch: number of streams; default what the first tensor says.

    Raises:
        ValueError, TypeError: something has another type, count, shape, dtype or device.
    """
    if batch is None:
        first: Any = state
        while isinstance(first, (tuple, list)) and first:
            first = first[0]
        batch = first.shape[0] if isinstance(first, Tensor) and first.dim() else 0
    return _matching("state", state, layer.init_state(batch, device="meta"), parameter.device)


def check_frames(name: str, x: Tensor, width: int, at_least: int = 0) -> None:
    """A floating tensor [B,T,width] with T >= at_least."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor [B,T,{width}], got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    if x.dim() != 3 or x.shape[2] != width or x.shape[1] < at_least:
        raise ValueError(
            f"{name} must have shape [B,T,{width}] with T >= {at_least}, got {list(x.shape)}"
        )


def check_chunk(
    name: str, x: Tensor, width: int, layer: Any, state: State, parameter: Tensor, lengths: Any
) -> State:
    """Check all that a step is given, before anything runs, and return the state as its tuples.

    Args:
        name: what messages call the chunk.
        x: the chunk, [B,T,width], T >= 1, with the dtype and device of `parameter`.
        layer, state, parameter: as in `check_state`.
        lengths: as given to the step.

    Raises:
        ValueError, TypeError: something has another type, shape, dtype or device.
    """
    check_frames(name, x, width, at_least=1)
    if x.dtype != parameter.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"{name} must have the parameters' dtype {parameter.dtype}, got {x.dtype}")
    if x.device != parameter.device:
        raise ValueError(f"{name} must be on {parameter.device} (the parameters), got {x.device}")
    check_bound("lengths", lengths, x.shape[0], x.device)
    return check_state(layer, state, parameter, x.shape[0])


def chunk_lengths(lengths: Tensor, frames: int, device: torch.device) -> Tensor:
    """int64 [B] on the device, clamped to [0, frames]."""
    # Wide first: a sum with uint8 lengths would wrap.
    return lengths.to(device, torch.int64, non_blocking=True).clamp(0, frames)


def frames_at(x: Tensor, place: Tensor) -> Tensor:
    """x[b, place[b, i]] of x [B,T,...] and place int64 [B,N]: [B,N,...]."""
    place = place.view(*place.shape, *[1] * (x.dim() - 2))
    return x.gather(1, place.expand(-1, -1, *x.shape[2:]))


def frames_from(x: Tensor, first: Tensor, frames: int) -> Tensor:
    """x[b, first[b] : first[b] + frames] of x [B,T,...]; past its end, the last frame again."""
    place = first[:, None] + torch.arange(frames, device=x.device)
    return frames_at(x, place.clamp(max=x.shape[1] - 1))


def last_frames(kept: int, lengths: Tensor | None, *joints: Tensor) -> tuple[Tensor, ...]:
    """What the next step needs of buffers [B,kept+T,...]: frames kept before, then a chunk.

    Returns:
        For each, the last `kept` frames of every stream, [B,kept,...], where lengths[b] (default
        all) of the chunk's T are real.
    """
    if lengths is not None:
        place = lengths[:, None] + torch.arange(kept, device=lengths.device)
        return tuple(frames_at(joint, place) for joint in joints)
    # A short chunk's view saves a launch; a long chunk must not stay in memory for as long as the
    # state. Tracing takes one way, so that a graph for any T puts no guard on it.
    short = not torch.compiler.is_compiling() and joints[0].shape[1] <= 2 * kept
    last = (joint[:, joint.shape[1] - kept :] for joint in joints)
    return tuple(x if short else x.clone() for x in last)


def joined(x: Tensor, n: Tensor, y: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """x[b, :n[b]] followed by y[b, :m[b]], for x [B,S,D] and y [B,T,D].

    Returns:
        ([B,S+T,D], n + m); frames beyond n + m mean nothing.
    """
    place = torch.arange(x.shape[1] + y.shape[1], device=x.device)
    gap = x.shape[1] - n[:, None]
    place = torch.where(place < n[:, None], place, (place + gap).clamp(max=place.shape[0] - 1))
    return frames_at(torch.cat([x, y], 1), place), n + m


def zeros_like_parameter(
    parameter: Tensor,
    *shape: int,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """Zeros with the parameter's device and dtype where none is given."""
    device = torch.device(parameter.device if device is None else device)
    # On the meta device, where each step checks its state, zeros take four times as long.
    make = torch.empty if device.type == "meta" else torch.zeros
    return make(shape, device=device, dtype=parameter.dtype if dtype is None else dtype)
