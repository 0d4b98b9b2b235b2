"""A Conformer encoder that computes the same frames whole and in chunks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ldsa_nn.functional import (
    check_bound,
    depthwise_convolved,
    frames_inside,
    integer,
)
from ldsa_nn.ldsa import HybridAttention, LocalDenseSynthesizerAttention
from ldsa_nn.sla import SystolicLinearAttention
from ldsa_nn.streaming import (
    BlockState,
    EncoderState,
    check_batch_size,
    check_chunk,
    check_frames,
    check_state,
    chunk_lengths,
    frames_from,
    joined,
    last_frames,
    zeros_like_parameter,
)

__all__ = ["ConformerEncoder"]

OFFLINE = ("mhsa", "hybrid")


class _SelfAttention(nn.Module):
    """Scaled dot-product attention to the whole sequence, with rotary positions."""

    def __init__(self, n_head: int, n_feat: int, dropout_rate: float, **to: Any) -> None:
        super().__init__()
        self.n_head = n_head
        self.dropout_rate = dropout_rate
        self.qkv = nn.Linear(n_feat, 3 * n_feat, **to)
        self.out = nn.Linear(n_feat, n_feat, **to)

    def forward(self, x: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        """Attend from x [B,T,D] to its first lengths[b] frames."""
        batch, frames, width = x.shape
        qkv = self.qkv(x).view(batch, frames, 3, self.n_head, width // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        keep = None
        if lengths is not None:
            # A sequence without frames sees one all the same: backends differ in what no key gives.
            keep = frames_inside(lengths.clamp(min=1), None, frames, x.device)[:, None, None]
        dropout_p = self.dropout_rate if self.training else 0.0
        y = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, keep, dropout_p)
        return self.out(y.transpose(1, 2).reshape(batch, frames, width))


def _rotated(x: Tensor) -> Tensor:
    """Queries or keys [B,H,T,Dh], each pair of channels turned by an angle that grows with t."""
    half = x.shape[3] // 2
    # bfloat16 cannot count frames.
    dtype = torch.promote_types(x.dtype, torch.float32)
    speed = 10000.0 ** (torch.arange(half, device=x.device, dtype=dtype) / -half)
    angle = torch.arange(x.shape[2], device=x.device)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], 3)


class _FeedForward(nn.Module):
    def __init__(self, dim: int, ffn_dim: int, **to: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, **to)
        self.up = nn.Linear(dim, ffn_dim, **to)
        self.down = nn.Linear(ffn_dim, dim, **to)

    def forward(self, x: Tensor, dropout_p: float) -> Tensor:
        x = F.dropout(F.silu(self.up(self.norm(x))), dropout_p)
        return F.dropout(self.down(x), dropout_p)


class _Convolution(nn.Module):
    """Gated linear unit, causal depthwise convolution, norm of each frame, SiLU."""

    def __init__(self, dim: int, kernel: int, **to: Any) -> None:
        super().__init__()
        self.kept = max(kernel - 1, 1)
        self.norm = nn.LayerNorm(dim, **to)
        self.gate = nn.Linear(dim, 2 * dim, **to)
        self.depthwise = nn.Conv1d(dim, dim, kernel, groups=dim, **to)
        self.inner_norm = nn.LayerNorm(dim, **to)
        self.out = nn.Linear(dim, dim, **to)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve [B,T,D] from its first frame on."""
        x = F.glu(self.gate(self.norm(x)))
        return self._convolved(F.pad(x, (0, 0, self.kept, 0)))

    def init_state(self, batch_size: int, **to: Any) -> Tensor:
        """[B,max(kernel-1,1),D]: zeros, as forward pads."""
        weight = self.out.weight
        return zeros_like_parameter(weight, batch_size, self.kept, len(weight), **to)

    def step(self, x: Tensor, state: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve a chunk [B,T,D] after the frames in the state."""
        x = F.glu(self.gate(self.norm(x)))
        joint = torch.cat([state, x.to(state.dtype)], 1)
        (state,) = last_frames(self.kept, lengths, joint)
        return self._convolved(joint.to(x.dtype)), state

    def _convolved(self, joint: Tensor) -> Tensor:
        (kernel,) = self.depthwise.kernel_size
        conv = self.depthwise
        x = depthwise_convolved(joint[:, self.kept - kernel + 1 :], conv.weight, conv.bias)
        return self.out(F.silu(self.inner_norm(x)))


class _Subsampling(nn.Module):
    """Half the frames: frame t of the output is of frames 2t - 2 ... 2t of the input."""

    kept = 2

    def __init__(self, input_dim: int, dim: int, **to: Any) -> None:
        super().__init__()
        self.conv = nn.Conv1d(input_dim, dim, self.kept + 1, stride=2, **to)

    def forward(self, x: Tensor) -> Tensor:
        """[B,T,C] -> [B,ceil(T/2),D]."""
        return self._convolved(F.pad(x, (0, 0, self.kept, 0)))

    def init_state(self, batch_size: int, **to: Any) -> Tensor:
        """[B,2,C]: zeros, as forward pads."""
        shape = (batch_size, self.kept, self.conv.in_channels)
        return zeros_like_parameter(self.conv.weight, *shape, **to)

    def step(
        self, x: Tensor, state: Tensor, before: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A chunk [B,T,C] that `before` [B] frames precede -> [B,ceil(T/2),D], real ones first."""
        joint = torch.cat([state, x.to(state.dtype)], 1)
        frames = (x.shape[1] + 1) // 2 * 2
        # Each stream has its own parity. What lies past the chunk's end only enters frames that
        # are not due yet.
        read = frames_from(joint, before % 2, frames + self.kept - 1).to(x.dtype)
        (state,) = last_frames(self.kept, lengths, joint)
        return self._convolved(read), state

    def _convolved(self, x: Tensor) -> Tensor:
        # As a product: the few frames of a step are fewer than what a convolution reorders first.
        x = x.unfold(1, self.kept + 1, 2).flatten(2)
        return F.silu(F.linear(x, self.conv.weight.flatten(1), self.conv.bias))


class _Block(nn.Module):
    """Conformer block; without a convolution, a pre-norm Transformer block."""

    def __init__(
        self, attention: nn.Module, dim: int, ffn_dim: int, kernel: int, dropout: float, **to: Any
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention: Any = attention
        self.attention_norm = nn.LayerNorm(dim, **to)
        self.ffn1 = _FeedForward(dim, ffn_dim, **to) if kernel else None
        self.conv = _Convolution(dim, kernel, **to) if kernel else None
        self.ffn2 = _FeedForward(dim, ffn_dim, **to)
        self.norm = nn.LayerNorm(dim, **to) if kernel else None

    @property
    def delay(self) -> int:
        """How many frames a step's output lags behind its input."""
        return getattr(self.attention, "delay", 0)

    def _first(self, x: Tensor, dropout_p: float) -> Tensor:
        return x if self.ffn1 is None else torch.add(x, self.ffn1(x, dropout_p), alpha=0.5)

    def _last(self, x: Tensor, dropout_p: float) -> Tensor:
        if self.norm is None:
            return x + self.ffn2(x, dropout_p)
        return self.norm(torch.add(x, self.ffn2(x, dropout_p), alpha=0.5))

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """x [B,T,D] -> [B,T,D]; frames beyond lengths are finite and mean nothing."""
        dropout_p = self.dropout if self.training else 0.0
        x = self._first(x, dropout_p)
        x = x + F.dropout(self.attention(self.attention_norm(x), lengths=lengths), dropout_p)
        if self.conv is not None:
            x = x + F.dropout(self.conv(x), dropout_p)
        return self._last(x, dropout_p)

    def init_state(self, batch_size: int, **to: Any) -> BlockState:
        """See `BlockState`."""
        delayed: tuple[Tensor, ...] = ()
        if self.delay:
            weight = self.attention_norm.weight
            residual = zeros_like_parameter(weight, batch_size, self.delay, len(weight), **to)
            before = torch.zeros(batch_size, device=residual.device, dtype=torch.int64)
            delayed = (residual, before)
        conv = () if self.conv is None else (self.conv.init_state(batch_size, **to),)
        return BlockState(self.attention.init_state(batch_size, **to), delayed, conv)

    def step(
        self, x: Tensor, state: BlockState, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor | None, BlockState]:
        """A chunk [B,T,D] -> ([B,T,D], how many of its frames are real, the new state)."""
        x = self._first(x, 0.0)
        y, attention = self.attention._step(self.attention_norm(x), state.attention, lengths)
        delayed: tuple[Tensor, ...] = ()
        if self.delay:
            residual, before = state.delayed
            frames = x.shape[1]
            joint = torch.cat([residual, x.to(residual.dtype)], 1)
            came = frames if lengths is None else lengths
            delayed = (*last_frames(self.delay, lengths, joint), before + came)
            # y and the delayed residual start with what lies before the stream's frame 0.
            skip = (self.delay - before).clamp(min=0)
            x = frames_from(joint[:, :frames].to(x.dtype) + y, skip, frames)
            lengths = (came - skip).clamp(min=0)
        else:
            x = x + y
        x, conv = self._after_attention(x, state.conv, lengths)
        return x, lengths, BlockState(attention, delayed, conv)

    def flush(self, state: BlockState) -> tuple[Tensor, Tensor]:
        """The frames still owed: ([B,delay,D], how many of them are real)."""
        residual, before = state.delayed
        y = residual + self.attention.flush(state.attention)
        due = before.clamp(max=self.delay)
        x, _ = self._after_attention(frames_from(y, self.delay - due, self.delay), state.conv, due)
        return x, due

    def _after_attention(
        self, x: Tensor, state: tuple[Tensor, ...], lengths: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.conv is not None:
            y, conv = self.conv.step(x, state[0], lengths)
            x, state = x + y, (conv,)
        return self._last(x, 0.0), state


class ConformerEncoder(nn.Module):
    """Conformer encoder for speech features, whole utterances or running streams.

        x   = sqrt(D) linear(causal strided convolutions(features))   T' = ceil(T / subsampling)
        x   = x + ffn(x)/2;  x = x + attention(norm(x));  x = x + convolution(x)
        out = norm(x + ffn(x)/2)                                  once a layer

    Convolutions are causal, norms are of each frame alone, and the only look-ahead is the
    attention's `right`: a stream fed in chunks gives the frames of the whole utterance, and a
    padded batch those of each utterance alone. Output frame t stands at input frame
    subsampling * t and sees nothing after input frame subsampling * t + delay.

    Sizes of the Conformer paper, with subsampling 4 and 80 features, and the number of parameters
    with attention="ldsa", left=14, right=0 (in brackets "mhsa"):

        S: dim=144, num_layers=16, n_head=4, ffn_dim=576, conv_kernel=32    7.7 M (7.9 M)
        M: dim=256, num_layers=16, n_head=4, ffn_dim=1024, conv_kernel=32   23.9 M (24.7 M)
        L: dim=512, num_layers=17, n_head=8, ffn_dim=2048, conv_kernel=32   100.8 M (104.2 M)

    Args:
        input_dim: number of features F of an input frame.
        dim: model width D.
        num_layers: number of blocks.
        n_head: heads of each attention but "sla", a divisor of dim.
        ffn_dim: inner width of the feed-forwards.
        conv_kernel: frames of the depthwise convolution (the current one and those before it). 0 is
            the Transformer form: attention and one whole feed-forward a block, norms before
            them, and one norm at the end.
        attention: "ldsa", "sla" (`SystolicLinearAttention`, causal, its heads and widths made to
            fit dim), "mhsa" (scaled dot-product, rotary positions) or "hybrid" (`HybridAttention`),
            or a sequence of num_layers of these. "mhsa" and "hybrid" attend to the whole utterance
            and are offline only.
        left, right: frames before and after each frame that the local attentions see, at the rate
            of the layers; ints or one for each layer.
        subsampling: input frames an output frame, a power of two.
        dropout: of attention weights ("sla" has none) and every branch, in training.
        edge, implementation: of the local attentions, see `LocalDenseSynthesizerAttention`.
        gradient_checkpointing: recompute each block in the backward pass of training instead of
            keeping what it computed. An attribute that may be changed.
        device, dtype: of the parameters.

    Raises:
        ValueError, TypeError: an argument has the wrong type or value.

    Source: Gulati et al., Interspeech 2020, arXiv 2005.08100; LDSA: see that layer.
    """

    subsample: Any  # of _Subsampling
    layers: Any  # of _Block

    def __init__(
        self,
        input_dim: int = 80,
        dim: int = 256,
        num_layers: int = 12,
        n_head: int = 4,
        ffn_dim: int = 1024,
        conv_kernel: int = 15,
        attention: str | Sequence[str] = "ldsa",
        left: int | Sequence[int] = 14,
        right: int | Sequence[int] = 0,
        subsampling: int = 4,
        dropout: float = 0.1,
        *,
        edge: str = "zero",
        implementation: str = "auto",
        gradient_checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = dict(input_dim=input_dim, dim=dim, num_layers=num_layers, ffn_dim=ffn_dim)
        input_dim, dim, num_layers, ffn_dim = (integer(*item) for item in sizes.items())
        others = dict(n_head=n_head, conv_kernel=conv_kernel, subsampling=subsampling)
        n_head, conv_kernel, subsampling = (integer(*item) for item in others.items())
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be >= 1, got {size}")
        if n_head < 1 or dim % n_head:
            raise ValueError(f"n_head must divide dim, got n_head={n_head}, dim={dim}")
        if conv_kernel < 0:
            raise ValueError(f"conv_kernel must be >= 0 frames, got {conv_kernel}")
        if subsampling < 1 or subsampling & (subsampling - 1):
            raise ValueError(f"subsampling must be a power of two, got {subsampling}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        to: Any = {"device": device, "dtype": dtype}
        local = {"edge": edge, "implementation": implementation, **to}
        kinds = {
            "ldsa": lambda **window: LocalDenseSynthesizerAttention(
                n_head, dim, dropout, **window, **local
            ),
            "mhsa": lambda **_: _SelfAttention(n_head, dim, dropout, **to),
            "hybrid": lambda **window: HybridAttention(n_head, dim, dropout, **window, **local),
            "sla": lambda **_: SystolicLinearAttention(dim, **_sla_sizes(dim), **to),
        }
        self.attention = _for_each("attention", attention, num_layers)
        for kind in self.attention:
            if kind not in kinds:
                raise ValueError(f"attention must be one of {list(kinds)}, got {kind!r}")
        lefts, rights = _for_each("left", left, num_layers), _for_each("right", right, num_layers)
        self.input_dim = input_dim
        self.dim = dim
        self.subsampling = subsampling
        self.dropout = dropout
        self.gradient_checkpointing = gradient_checkpointing
        widths = [input_dim] + (subsampling.bit_length() - 1) * [dim]
        self.subsample = nn.ModuleList(_Subsampling(width, dim, **to) for width in widths[:-1])
        self.project = nn.Linear(widths[-1], dim, **to)
        self.layers = nn.ModuleList(
            _Block(kinds[kind](left=le, right=ri), dim, ffn_dim, conv_kernel, dropout, **to)
            for kind, le, ri in zip(self.attention, lefts, rights, strict=True)
        )
        self.norm = nn.Identity() if conv_kernel else nn.LayerNorm(dim, **to)

    @property
    def delay(self) -> int:
        """Input frames that must follow an output frame's own before it comes out of step."""
        self._must_stream()
        return self.subsampling * sum(layer.delay for layer in self.layers)

    def _must_stream(self) -> None:
        for i, name in enumerate(self.attention):
            if name in OFFLINE:
                raise NotImplementedError(
                    f"attention={name!r} of layer {i} is offline only, it attends to the whole "
                    "utterance: there is no init_state, step or flush; 'ldsa' and 'sla' stream"
                )

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Encode whole utterances.

        Args:
            features: [B,T,F].
            lengths: integer [B], clamped to [0, T]: utterance b is its first lengths[b] frames.
                What lies beyond, NaN too, changes nothing, and gets exactly 0 gradient.

        Returns:
            (out [B,T',D], out_lengths int64 [B]), T' = ceil(T / subsampling) and likewise the
            lengths. out is exactly 0 beyond them.

        Raises:
            ValueError, TypeError: features or lengths has the wrong shape, dtype or device.
        """
        check_frames("features", features, self.input_dim)
        batch, frames, _ = features.shape
        check_bound("lengths", lengths, batch, features.device)
        if frames == 0:
            none = torch.zeros(batch, device=features.device, dtype=torch.int64)
            return features.new_zeros(batch, 0, self.dim), none
        if lengths is not None:
            features, lengths = _inside(features, lengths)
            lengths = (lengths + self.subsampling - 1) // self.subsampling
        x = features
        for stage in self.subsample:
            x = stage(x)
        x = F.dropout(self._projected(x), self.dropout, self.training)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(layer, x, lengths, use_reentrant=False)
            else:
                x = layer(x, lengths)
        return self._output(x, lengths)

    def _projected(self, x: Tensor) -> Tensor:
        # Without the factor the first frames of a new model are a tenth of what a block adds to
        # them, and it learns much more slowly.
        return self.project(x) * self.dim**0.5

    def _output(self, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.norm(x)
        batch, slots, _ = x.shape
        if lengths is None:
            return x, torch.full((batch,), slots, device=x.device, dtype=torch.int64)
        inside = frames_inside(lengths, None, slots, x.device)
        return torch.where(inside[:, :, None], x, 0.0), lengths

    def init_state(
        self,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> EncoderState:
        """The state of streams of which no frame has come yet.

        Args, shapes and dtypes as in `LocalDenseSynthesizerAttention.init_state`.

        Raises:
            NotImplementedError: an attention is offline only.
        """
        self._must_stream()
        check_batch_size(batch_size)
        to: Any = {"device": device, "dtype": dtype}
        weight = self.project.weight
        return EncoderState(
            zeros_like_parameter(weight, batch_size, device=device, dtype=torch.int64),
            tuple(stage.init_state(batch_size, **to) for stage in self.subsample),
            tuple(layer.init_state(batch_size, **to) for layer in self.layers),
        )

    def step(
        self, features: Tensor, state: EncoderState, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor, EncoderState]:
        """Encode the next frames of running streams.

        Row b emits out[b, :out_lengths[b]], in all, with `flush`, exactly the frames of forward.
        Inference: there is no dropout, in training mode neither. Nothing given is written to, and
        nothing returned shares memory with it.

        Args:
            features: the chunk, [B,T,F], any T >= 1.
            state: from `init_state` or the step before.
            lengths: integer [B], clamped to [0, T]: how many frames of the chunk are real for each
                stream, default all. A stream with none keeps its state bit for bit.

        Returns:
            (out [B,T',D], out_lengths int64 [B], the new state). T' = ceil(T / subsampling),
            however many of them are due; out is exactly 0 beyond out_lengths.

        Raises:
            NotImplementedError: an attention is offline only.
            ValueError, TypeError: features, state or lengths has the wrong shape, dtype or device.
        """
        self._must_stream()
        weight = self.project.weight
        state = check_chunk("features", features, self.input_dim, self, state, weight, lengths)
        if lengths is not None:
            features, lengths = _inside(features, lengths)
        came = features.shape[1] if lengths is None else lengths
        x, before, total = features, state.frames, state.frames + came
        stages, blocks = [], []
        for stage, held in zip(self.subsample, state.subsampling, strict=True):
            x, kept = stage.step(x, held, before, lengths)
            stages.append(kept)
            if lengths is None and _even(came):
                # Half of them are due, whatever the parity of the frames before.
                before, came = (before + 1) // 2, came // 2
            else:
                after, before = (before + came + 1) // 2, (before + 1) // 2
                came = lengths = after - before
        x = self._projected(x)
        for layer, block in zip(self.layers, state.blocks, strict=True):
            x, lengths, block = layer.step(x, block, lengths)
            blocks.append(block)
        return *self._output(x, lengths), EncoderState(total, tuple(stages), tuple(blocks))

    def flush(self, state: EncoderState) -> tuple[Tensor, Tensor]:
        """The frames still owed to streams that have ended; the state stays valid.

        Returns:
            (out [B,delay/subsampling,D], out_lengths int64 [B]), zero beyond the lengths.

        Raises:
            NotImplementedError: an attention is offline only.
            ValueError, TypeError: the state has the wrong shape, dtype or device.
        """
        state = check_state(self, state, self.project.weight)
        x = self.project.weight.new_zeros(state.frames.shape[0], 0, self.dim)
        lengths = torch.zeros_like(state.frames)
        for layer, kept in zip(self.layers, state.blocks, strict=True):
            if x.shape[1]:
                x, lengths, kept = layer.step(x, kept, lengths)
            if layer.delay:
                x, lengths = joined(x, lengths, *layer.flush(kept))
        return self._output(x, lengths)


def _inside(features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Features [B,T,F] with 0 beyond the lengths, and those clamped to [0, T].

    Finite at the door: then neither the gradient of a parameter nor a convolution that multiplies
    a neighbouring frame by 0, as some of the CPU's do, meets a NaN.
    """
    lengths = chunk_lengths(lengths, features.shape[1], features.device)
    inside = frames_inside(lengths, None, features.shape[1], features.device)
    return torch.where(inside[:, :, None], features, 0.0), lengths


def _even(frames: Any) -> bool:
    """Whether a count is even; of a graph for any count it is not known, and none is ruled out."""
    if not torch.compiler.is_compiling():
        return frames % 2 == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return statically_known_true(frames % 2 == 0)


def _sla_sizes(dim: int) -> dict[str, Any]:
    """Heads and widths of a `SystolicLinearAttention` of about dim values a frame.

    Value heads of 128 at most, four a key head at most, and keys twice as wide as a value head, in
    the powers of two from 64 to 256.
    """
    n_key_head = -(-dim // 512)
    value_heads = -(-dim // (128 * n_key_head))
    value_dim = -(-dim // (n_key_head * value_heads))
    key_dim = 64
    while key_dim < min(2 * value_dim, 256):
        key_dim *= 2
    return dict(
        n_key_head=n_key_head,
        value_heads_per_key=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def _for_each(name: str, value: Any, num_layers: int) -> tuple[Any, ...]:
    """One value for each layer, from one for all or a sequence."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return (value,) * num_layers
    if len(value) != num_layers:
        raise ValueError(
            f"{name} must be one value or one for each of {num_layers} layers, got {len(value)}"
        )
    return tuple(value)
