"""Systolic linear attention: a gated delta rule with wide keys and packed values."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ldsa_nn.functional import (
    check_sequence,
    delta_gates,
    extent,
    frames_inside,
    gated_norm,
    integer,
    short_convolution,
    tiled_delta_rule,
)
from ldsa_nn.streaming import (
    SlaState,
    check_batch_size,
    check_chunk,
    check_state,
    chunk_lengths,
    last_frames,
    zeros_like_parameter,
)

__all__ = ["SystolicLinearAttention"]


class SystolicLinearAttention(nn.Module):
    """Systolic linear attention (SLA): the whole past in a state of fixed size.

        q, k, v = silu(conv(w_qkv(x)));  q, k of unit norm
        g = max(-exp(A_log) softplus(w_decay(x) + dt_bias), -20);  beta = 2 sigmoid(w_beta(x))
        S_t = D_t S_{t-1} + beta_t k_t (v_t - (D_t S_{t-1})^T k_t)^T,   D_t = exp(g_t) by tile
        out = w_out(norm(K^-0.5 S_t^T q_t) sigmoid(w_gate_up(w_gate_down(x))))

    Time and memory are linear in T. Each key head has a state S [K,R*P], which its R value heads
    share the columns of, and a decay a tile of its key channels. The convolution is depthwise and
    causal, the norm is of each value head's root mean square.

    A stream keeps S and the convolution's last inputs: `state_bytes` in all, whatever its
    length: with the default sizes and in float32, 524,288 and 12,288 for each key head.

    Args:
        n_feat: model width D.
        n_key_head: key heads H.
        value_heads_per_key: value heads R of each key head. H*R*P may differ from D.
        key_dim: key width K.
        value_dim: value head width P.
        n_tiles: groups of key channels with a decay of their own, a divisor of key_dim.
        conv_kernel: frames of the convolution, the current one and those before it.
        bidirectional: attend to what follows too: a second scan, backward in time, of the same
            q, k, v convolved in reverse, with g and beta of its own; the two are added before the
            norm. Offline only.
        state_dtype: what S is kept in between steps, float32 (float64 in a float64 layer) or
            bfloat16. Within a call it is in float32 at least.
        device, dtype: of the parameters.

    Raises:
        ValueError, TypeError: an argument has the wrong type or value.

    Source: "Systolic Linear Attention: Co-Designing Tile-Grouped Gated Delta Attention for TPUs"
    (Google).
    """

    def __init__(
        self,
        n_feat: int,
        *,
        n_key_head: int = 1,
        value_heads_per_key: int = 4,
        key_dim: int = 256,
        value_dim: int = 128,
        n_tiles: int = 4,
        conv_kernel: int = 4,
        bidirectional: bool = False,
        state_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = dict(
            n_feat=n_feat,
            n_key_head=n_key_head,
            value_heads_per_key=value_heads_per_key,
            key_dim=key_dim,
            value_dim=value_dim,
            n_tiles=n_tiles,
            conv_kernel=conv_kernel,
        )
        for name, size in sizes.items():
            if integer(name, size) < 1:
                raise ValueError(f"{name} must be >= 1, got {size}")
        if key_dim % n_tiles:
            raise ValueError(f"n_tiles must divide key_dim, got {n_tiles} and {key_dim}")
        if not isinstance(bidirectional, bool):
            raise TypeError(f"bidirectional must be a bool, got {bidirectional!r}")
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype must be float32 or bfloat16, got {state_dtype}")
        self.n_feat = n_feat
        self.n_key_head = n_key_head
        self.value_heads_per_key = value_heads_per_key
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.n_tiles = n_tiles
        self.conv_kernel = conv_kernel
        self.bidirectional = bidirectional
        self.state_dtype = state_dtype
        to: Any = {"device": device, "dtype": dtype}
        directions = 2 if bidirectional else 1
        values = n_key_head * value_heads_per_key * value_dim
        channels = 2 * n_key_head * key_dim + values
        self.w_qkv = nn.Linear(n_feat, channels, bias=False, **to)
        self.conv = nn.Conv1d(channels, channels, conv_kernel, groups=channels, bias=False, **to)
        self.w_decay = nn.Linear(n_feat, directions * n_key_head * n_tiles, bias=False, **to)
        self.A_log = nn.Parameter(torch.empty(directions, n_key_head, n_tiles, **to))
        self.dt_bias = nn.Parameter(torch.empty(directions, n_key_head, n_tiles, **to))
        self.w_beta = nn.Linear(n_feat, directions * n_key_head, bias=False, **to)
        self.w_gate_down = nn.Linear(n_feat, value_dim, bias=False, **to)
        self.w_gate_up = nn.Linear(value_dim, values, **to)
        self.norm = nn.RMSNorm(value_dim, eps=1e-5, **to)
        self.w_out = nn.Linear(values, n_feat, bias=False, **to)
        with torch.no_grad():
            self.A_log.uniform_(1, 16).log_()
            # The softplus of dt_bias is log-uniform from 1e-3 to 0.1.
            step = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp_()
            step += (-torch.expm1(-step)).log()

    def forward(
        self,
        x: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Attend to all frames so far, or with bidirectional=True to all.

        Args:
            x: [B,T,D].
            key, value: [B,T,D], accepted in an attention's place and unused.
            mask: bool or integer 0/1, [B,T], [B,1,T] or [B,T,T] (its diagonal counts), nonzero =
                keep. Each sequence's kept frames must be one run; holes are undefined on a GPU.
            lengths: integer [B] instead of mask: sequence b is its first lengths[b] frames.

        Returns:
            [B,T,D], exactly 0 at frames outside. What x holds there, NaN too, changes nothing.

        Raises:
            ValueError, TypeError: an argument has the wrong shape, dtype or device; both mask and
                lengths are given; the mask has holes (CPU, eager mode).
        """
        check_sequence("x", x, self.n_feat)
        for name, other in (("key", key), ("value", value)):
            if other is not None:
                check_sequence(name, other, self.n_feat)
        starts, lengths = extent(x, mask, lengths, True)
        frames = x.shape[1]
        if frames == 0:  # a convolution takes none
            return x.clone()
        if lengths is not None:
            lengths = chunk_lengths(lengths, frames, x.device)
            # Zeros before a sequence leave a state of zeros as it is, as no frames would.
            inside = frames_inside(lengths, starts, frames, x.device)
            x = torch.where(inside[:, :, None], x, 0.0)
        qkv = self.w_qkv(x)
        (g, *g_back), (beta, *beta_back) = self._gates(x)
        if self.bidirectional:
            # As sequences of one batch. A flip puts the frames outside first, and zeros are there.
            qkv = torch.cat([qkv, qkv.flip(1)])
            g, beta = torch.cat([g, g_back[0].flip(1)]), torch.cat([beta, beta_back[0].flip(1)])
            if lengths is not None:
                ends = torch.full_like(lengths, frames)
                if starts is not None:
                    ends = ends - starts.to(x.device, non_blocking=True)
                lengths = torch.cat([lengths, ends])
        read, _ = self._scanned(qkv, 0, g, beta, None, lengths)
        if self.bidirectional:
            forward, backward = read.unflatten(0, (2, x.shape[0]))
            read = forward + backward.flip(1)
        return self._output(read, x)

    def _gates(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """g [B,T,H,tiles] and beta [B,T,H] of each direction, in float32 at least."""
        # Apart from here on: inductor cannot keep views of results for the backward pass of a graph
        # for any number of frames.
        decay = self.w_decay(x).unflatten(2, self.A_log.shape).unbind(2)
        write = self.w_beta(x).unflatten(2, self.A_log.shape[:2]).unbind(2)
        gates = map(delta_gates, decay, write, self.A_log, self.dt_bias)
        g, beta = zip(*gates, strict=True)
        return g, beta

    def _scanned(
        self,
        qkv: Tensor,
        before: int,
        g: Tensor,
        beta: Tensor,
        memory: Tensor | None,
        lengths: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """What queries read [B,T,H,R*P], and the last state where one is given.

        qkv: [B,before+T,C], with so many of the frames that the convolution looks back to.
        """
        sizes = self.n_key_head, self.key_dim, before
        return tiled_delta_rule(
            *short_convolution(qkv, self.conv.weight, *sizes),
            g,
            beta,
            initial_state=memory,
            output_final_state=memory is not None,
            lengths=lengths,
        )

    def _output(self, read: Tensor, x: Tensor) -> Tensor:
        """Norm, gate and projection: [B,T,H,R*P] -> [B,T,D]."""
        gate, eps = self.w_gate_up(self.w_gate_down(x)), self.norm.eps
        assert eps is not None  # as the constructor gave it
        return self.w_out(gated_norm(read, gate, self.norm.weight, eps))

    delay = 0  # a step's output lags behind its input by no frame

    @property
    def _kept(self) -> int:
        """Frames in a state; for a kernel of one, one all the same: no tensor may be empty."""
        return max(self.conv_kernel - 1, 1)

    def _must_stream(self) -> None:
        if self.bidirectional:
            raise NotImplementedError(
                "bidirectional=True is offline only, it attends to what follows: there is no "
                "init_state, step or flush; bidirectional=False streams"
            )

    def init_state(
        self,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> SlaState:
        """The state of streams of which no frame has come yet.

        Args:
            batch_size: number of streams B, dimension 0 of every state tensor.
            device, dtype: default those of the parameters. dtype is that of the convolution's
                inputs, under autocast its dtype may be given; S follows state_dtype.

        Returns:
            An `SlaState`. Shapes depend on the layer and B alone and are never empty.

        Raises:
            NotImplementedError: the layer is bidirectional.
        """
        self._must_stream()
        check_batch_size(batch_size)
        weight, values = self.w_qkv.weight, self.value_heads_per_key * self.value_dim
        kept = self.state_dtype
        if kept == torch.float32:
            kept = torch.promote_types(kept, weight.dtype)
        memory = zeros_like_parameter(
            weight, batch_size, self.n_key_head, self.key_dim, values, device=device, dtype=kept
        )
        conv = zeros_like_parameter(
            weight, batch_size, self._kept, len(weight), device=device, dtype=dtype
        )
        return SlaState(memory, conv)

    @property
    def state_bytes(self) -> int:
        """Bytes that the state of one stream takes."""
        return sum(x.nbytes for x in self.init_state(1, device="meta"))

    def step(
        self, x: Tensor, state: SlaState, lengths: Tensor | None = None
    ) -> tuple[Tensor, SlaState]:
        """Attend from the next frames of running streams.

            y[:, i] = forward of the whole stream, at frame n + i; n frames came before

        Nothing given is written to, and nothing returned shares memory with it.

        Args:
            x: the chunk, [B,T,D], any T >= 1.
            state: from `init_state` or the step before.
            lengths: integer [B], clamped to [0, T]: the first lengths[b] frames of the chunk are
                real for stream b, default all. What lies beyond, NaN too, is ignored; a stream
                with none keeps its state bit for bit.

        Returns:
            (y [B,T,D], the new state). y is exactly 0 at i >= lengths[b].

        Raises:
            NotImplementedError: the layer is bidirectional.
            ValueError, TypeError: x, state or lengths has the wrong shape, dtype or device.
        """
        self._must_stream()
        state = check_chunk("x", x, self.n_feat, self, state, self.w_qkv.weight, lengths)
        if lengths is not None:
            lengths = chunk_lengths(lengths, x.shape[1], x.device)
            inside = frames_inside(lengths, None, x.shape[1], x.device)
            x = torch.where(inside[:, :, None], x, 0.0)
        return self._step(x, state, lengths)

    def _step(self, x: Tensor, state: SlaState, lengths: Tensor | None) -> tuple[Tensor, SlaState]:
        """`step` of what has been checked, finite, with lengths as `chunk_lengths` gives them."""
        qkv, ((g,), (beta,)) = self.w_qkv(x), self._gates(x)
        joint = torch.cat([state.conv, qkv.to(state.conv.dtype)], 1)
        (conv,) = last_frames(self._kept, lengths, joint)
        joint = joint[:, self._kept - self.conv_kernel + 1 :].to(qkv.dtype)
        read, memory = self._scanned(joint, self.conv_kernel - 1, g, beta, state.memory, lengths)
        assert memory is not None
        return self._output(read, x), SlaState(memory.to(state.memory.dtype), conv)

    def flush(self, state: SlaState) -> Tensor:
        """The frames still owed to streams that have ended: none, [B,0,D].

        Errors are those of `step`.
        """
        self._must_stream()
        state = check_state(self, state, self.w_qkv.weight)
        # Through the projection: under autocast it has the dtype of a step's output.
        return self.w_out(state.conv.new_zeros(len(state.conv), 0, self.w_out.in_features))

    def extra_repr(self) -> str:
        """Options shown in print(module)."""
        return (
            f"n_feat={self.n_feat}, n_key_head={self.n_key_head}, "
            f"value_heads_per_key={self.value_heads_per_key}, key_dim={self.key_dim}, "
            f"value_dim={self.value_dim}, n_tiles={self.n_tiles}, "
            f"conv_kernel={self.conv_kernel}, bidirectional={self.bidirectional}, "
            f"state_dtype={self.state_dtype}"
        )
