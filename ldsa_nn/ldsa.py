"""Local dense synthesizer attention layers, with the reference repository's parameters."""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldsa_nn.functional import (
    check_sequence,
    eager_ldsa_at,
    extent,
    frames_inside,
    integer,
    keep_mask,
    ldsa_local_attention,
    ldsa_weights,
)
from ldsa_nn.streaming import (
    LdsaState,
    check_batch_size,
    check_chunk,
    check_state,
    chunk_lengths,
    last_frames,
    zeros_like_parameter,
)

__all__ = ["HybridAttention", "LocalDenseSynthesizerAttention"]


class LocalDenseSynthesizerAttention(nn.Module):
    """Multi-head local dense synthesizer attention (LDSA).

        logits = w2(relu(w1(query)))     [B,T,H,W], W = left + 1 + right
        out = w_out(sum over the window of softmax(logits) * w3(value))

    Parameters have the reference classes' names and shapes, so their state dicts load strictly.

    Args:
        n_head: number of heads H, a divisor of n_feat.
        n_feat: model width D.
        dropout_rate: dropout of the attention weights in training, in [0, 1).
        context_size: odd window size W in frames, centred: left = right = (context_size - 1) / 2.
        use_bias: biases in w1, w2, w3 and w_out.
        left, right: frames before and after each frame; both or neither, instead of context_size.
        edge: "zero" (reference LocalDenseSynthesizerAttention) or "renormalize"
            (LocalDenseSynthesizerAttention2), what window slots outside the sequence do.
        grouped_w2: w2 per head (reference MHLocalDenseSynthesizerAttention): weight (H*W, D/H, 1),
            always with a bias.
        honor_mask: False ignores forward's mask, as the reference does.
        implementation: "auto", "triton" or "eager", passed to `ldsa_local_attention`.
        device, dtype: of the parameters.

    Raises:
        ValueError, TypeError: an argument has the wrong type or value.

    Source: Xu, Li, Zhang, ICASSP 2021, arXiv 2010.12155.
    """

    def __init__(
        self,
        n_head: int,
        n_feat: int,
        dropout_rate: float = 0.0,
        context_size: int = 15,
        use_bias: bool = False,
        *,
        left: int | None = None,
        right: int | None = None,
        edge: str = "zero",
        grouped_w2: bool = False,
        honor_mask: bool = True,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        n_head, n_feat = integer("n_head", n_head), integer("n_feat", n_feat)
        if n_head < 1 or n_feat < 1 or n_feat % n_head:
            raise ValueError(f"n_head must divide n_feat, got n_head={n_head}, n_feat={n_feat}")
        if not 0 <= dropout_rate < 1:
            raise ValueError(f"dropout_rate must be in [0, 1), got {dropout_rate}")
        if left is None and right is None:
            context_size = integer("context_size", context_size)
            if context_size < 1 or context_size % 2 == 0:
                raise ValueError(
                    f"context_size must be odd and positive, got {context_size}; an uneven window "
                    "is given by left and right"
                )
            left = right = (context_size - 1) // 2
        if left is None or right is None:
            raise ValueError(f"give left and right, or neither, got left={left}, right={right}")
        left, right = integer("left", left), integer("right", right)
        if left < 0 or right < 0:
            raise ValueError(f"left and right must be >= 0 frames, got {left} and {right}")
        if edge not in ("zero", "renormalize"):
            raise ValueError(f"edge must be 'zero' or 'renormalize', got {edge!r}")
        if implementation not in ("auto", "triton", "eager"):
            raise ValueError(
                f"implementation must be 'auto', 'triton' or 'eager', got {implementation!r}"
            )
        self.n_head = n_head
        self.n_feat = n_feat
        self.left = left
        self.right = right
        self.window = left + 1 + right
        self.dropout_rate = dropout_rate
        self.edge = edge
        self.honor_mask = honor_mask
        self.implementation = implementation
        self.grouped_w2 = grouped_w2
        self.w1 = nn.Linear(n_feat, n_feat, use_bias, device, dtype)
        self.w2: nn.Linear | nn.Conv1d
        if grouped_w2:
            # Holds the reference's parameters and their initialisation; _logits multiplies.
            self.w2 = nn.Conv1d(
                n_feat, n_head * self.window, 1, groups=n_head, device=device, dtype=dtype
            )
        else:
            self.w2 = nn.Linear(n_feat, n_head * self.window, use_bias, device, dtype)
        self.w3 = nn.Linear(n_feat, n_feat, use_bias, device, dtype)
        self.w_out = nn.Linear(n_feat, n_feat, use_bias, device, dtype)

    def _logits(self, query: Tensor) -> Tensor:
        """Attention logits [B,H,W,T] of query [B,T,D], as a view of what the product wrote."""
        batch, frames, _ = query.shape
        hidden = F.relu(self.w1(query))
        # Asked of the option, not of w2: what wraps a linear layer (LoRA) need not be one.
        if not self.grouped_w2:
            return self.w2(hidden).view(batch, frames, self.n_head, self.window).permute(0, 2, 3, 1)
        if not isinstance(self.w2, nn.Conv1d):  # its weight is then not all that it computes
            logits = self.w2(hidden.transpose(1, 2))
            return logits.reshape(batch, self.n_head, self.window, frames)
        # One batched product over the heads; a convolution of width 1 would transpose its input.
        head_dim = self.n_feat // self.n_head
        weight = self.w2.weight.view(self.n_head, self.window, head_dim)
        bias = self.w2.bias.view(self.n_head, 1, self.window)  # type: ignore[union-attr]
        hidden = hidden.reshape(batch * frames, self.n_head, head_dim).transpose(0, 1)
        logits = torch.baddbmm(bias, hidden, weight.transpose(1, 2))
        return logits.view(self.n_head, batch, frames, self.window).permute(1, 0, 3, 2)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        need_weights: bool = False,
    ) -> Any:
        """Attend.

        Args:
            query: [B,T,D], what the weights are synthesized from.
            key: accepted in the reference's place and unused.
            value: [B,T,D], what is summed; default query.
            mask: bool or integer 0/1, [B,T], [B,1,T] or [B,T,T] (its diagonal counts), nonzero =
                keep. Each sequence's kept frames must be one run; holes are undefined on a GPU.
            lengths: integer [B] instead of mask: sequence b is its first lengths[b] frames.
            need_weights: also return the weights.

        Returns:
            [B,T,D], exactly 0 at frames outside; or (that, weights [B,H,T,W] before dropout).

        Raises:
            ValueError, TypeError: an argument has the wrong shape, dtype or device; both mask and
                lengths are given; the mask has holes (CPU, eager mode).
        """
        check_sequence("query", query, self.n_feat)
        if value is None:
            value = query
        else:
            check_sequence("value", value, self.n_feat, like=query)
        starts, lengths = extent(query, mask, lengths, self.honor_mask)
        batch, frames, _ = query.shape
        head_dim = self.n_feat // self.n_head
        logits = self._logits(query)
        values = self.w3(value).view(batch, frames, self.n_head, head_dim).permute(0, 2, 3, 1)
        x = ldsa_local_attention(
            logits,
            values,
            self.left,
            self.right,
            lengths=lengths,
            starts=starts,
            edge=self.edge,
            dropout_p=self.dropout_rate if self.training else 0.0,
            implementation=self.implementation,
        )
        out = self.w_out(x.permute(0, 3, 1, 2).reshape(batch, frames, self.n_feat))
        if self.w_out.bias is not None and (lengths is not None or starts is not None):
            inside = frames_inside(lengths, starts, frames, out.device)
            out = torch.where(inside[:, :, None], out, 0.0)
        if not need_weights:
            return out
        weights = ldsa_weights(
            logits, self.left, self.right, lengths=lengths, starts=starts, edge=self.edge
        )
        return out, weights.transpose(2, 3)

    @property
    def delay(self) -> int:
        """How many frames a step's output lags behind its input: `right`."""
        return self.right

    @property
    def _kept(self) -> int:
        """Frames in a state; without a window one all the same, since no tensor may be empty."""
        return max(self.left + self.right, 1)

    def init_state(
        self,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LdsaState:
        """The state of streams of which no frame has come yet.

        Args:
            batch_size: number of streams B, dimension 0 of every state tensor.
            device, dtype: default those of the parameters. Under autocast its dtype may be given
                instead, for a smaller state and faster steps.

        Returns:
            An `LdsaState`. Shapes depend on the layer and B alone and are never empty.
        """
        check_batch_size(batch_size)
        shape = (batch_size, self._kept, self.n_head)
        to: Any = {"device": device, "dtype": dtype}
        logits = zeros_like_parameter(self.w3.weight, *shape, self.window, **to)
        value = zeros_like_parameter(self.w3.weight, *shape, self.n_feat // self.n_head, **to)
        start = torch.full((batch_size,), self._kept, device=logits.device, dtype=torch.int64)
        return LdsaState(logits, value, start)

    def step(
        self, x: Tensor, state: LdsaState, lengths: Tensor | None = None
    ) -> tuple[Tensor, LdsaState]:
        """Attend from the next frames of running streams.

            y[:, i] = forward of the whole stream, at frame n + i - right; n frames came before

        Each frame is projected once, for its own step, and the op runs on the frames kept and the
        chunk together. Inference: there is no dropout, in training mode neither. Nothing given is
        written to, and nothing returned shares memory with it.

        Args:
            x: the chunk, [B,T,D], any T >= 1.
            state: from `init_state` or the step before.
            lengths: integer [B], clamped to [0, T]: the first lengths[b] frames of the chunk are
                real for stream b, default all. What lies beyond, NaN too, is ignored; a stream
                with none keeps its state bit for bit.

        Returns:
            (y [B,T,D], the new state). y is exactly 0 before the stream's frame 0 and at
            i >= lengths[b].

        Raises:
            ValueError, TypeError: x, state or lengths has the wrong shape, dtype or device.
        """
        state = check_chunk("x", x, self.n_feat, self, state, self.w3.weight, lengths)
        if lengths is not None:
            lengths = chunk_lengths(lengths, x.shape[1], x.device)
        return self._step(x, state, lengths)

    def _step(
        self, x: Tensor, state: LdsaState, lengths: Tensor | None
    ) -> tuple[Tensor, LdsaState]:
        """`step` of what has been checked, with lengths as `chunk_lengths` gives them."""
        batch, frames, _ = x.shape
        kept, head_dim = self._kept, self.n_feat // self.n_head
        value = self.w3(x).view(batch, frames, self.n_head, head_dim).to(state.value.dtype)
        logits = self._logits(x).permute(0, 3, 1, 2).to(state.logits.dtype)
        value = torch.cat([state.value, value], 1)
        logits = torch.cat([state.logits, logits], 1)
        ends = None if lengths is None else kept + lengths
        first = kept - self.right  # the place of y[:, 0]
        y = self._attend(LdsaState(logits, value, state.start), ends, first, frames, cut=False)
        if self.w_out.bias is not None or (self.right > 0 and lengths is not None):
            inside = frames_inside(lengths, state.start - first, frames, x.device)
            y = torch.where(inside[:, :, None], y, 0.0)
        logits, value = last_frames(kept, lengths, logits, value)
        came = frames if lengths is None else lengths
        return y, LdsaState(logits, value, state.start - came)

    def flush(self, state: LdsaState) -> Tensor:
        """The last `right` frames of streams that have ended, [B,right,D].

        They are what steps still owed: zeros before the stream's frame 0, if it is shorter than
        `right`. The state stays valid. Errors are those of `step`.
        """
        state = check_state(self, state, self.w3.weight)
        first = self._kept - self.right
        y = self._attend(state, None, first, self.right, cut=True)
        if self.w_out.bias is not None:
            inside = frames_inside(None, state.start - first, self.right, y.device)
            y = torch.where(inside[:, :, None], y, 0.0)
        return y

    def _attend(
        self, joint: LdsaState, ends: Tensor | None, first: int, frames: int, *, cut: bool
    ) -> Tensor:
        """Output [B,frames,D] at `frames` frames of a buffer from `first` on, before masking.

        cut: whether the buffer's end cuts windows of these frames.
        """
        logits, value = (x.permute(0, 2, 3, 1) for x in joint[:2])
        window = self.left, self.right
        if value.device.type == "cpu" and self.implementation != "triton" and not cut:
            # A launch costs a GPU more than the frames around; a CPU has them to compute.
            logits = logits[..., first : first + frames]
            out = eager_ldsa_at(
                logits, value, *window, first, ends=ends, starts=joint.start, edge=self.edge
            )
        else:
            out = ldsa_local_attention(
                logits,
                value,
                *window,
                lengths=ends,
                starts=joint.start,
                edge=self.edge,
                implementation=self.implementation,
            )
            # The op also ran at the frames around, whose windows the buffer cuts: not taken.
            out = out[..., first : first + frames]
        return self.w_out(out.permute(0, 3, 1, 2).reshape(out.shape[0], frames, self.n_feat))

    def extra_repr(self) -> str:
        """Options shown in print(module)."""
        return (
            f"n_head={self.n_head}, n_feat={self.n_feat}, left={self.left}, right={self.right}, "
            f"window={self.window}, edge={self.edge!r}, dropout_rate={self.dropout_rate}, "
            f"grouped_w2={self.grouped_w2}, honor_mask={self.honor_mask}, "
            f"implementation={self.implementation!r}"
        )


class _KeyProjection(nn.Linear):
    """A linear layer whose bias takes no part.

    A bias on the keys moves all scores of a query alike, which the softmax does not see. Left out,
    its gradient is the exact 0 instead of the rounding noise of a sum that cancels.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, 0 * self.bias)


class _DotAttention(nn.Module):
    """Multi-head scaled dot-product attention with the reference's parameter names."""

    def __init__(
        self,
        n_head: int,
        n_feat: int,
        dropout_rate: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.n_head = n_head
        self.dropout_rate = dropout_rate
        self.linear_q = nn.Linear(n_feat, n_feat, device=device, dtype=dtype)
        self.linear_k = _KeyProjection(n_feat, n_feat, device=device, dtype=dtype)
        self.linear_v = nn.Linear(n_feat, n_feat, device=device, dtype=dtype)
        self.linear_out = nn.Linear(n_feat, n_feat, device=device, dtype=dtype)

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        """Attend from x [B,T,D] to itself; keep: bool [B,1 or T,T], a row of False gives 0."""
        batch, frames, width = x.shape
        q, k, v = (
            linear(x).view(batch, frames, self.n_head, width // self.n_head).transpose(1, 2)
            for linear in (self.linear_q, self.linear_k, self.linear_v)
        )
        dropout_p = self.dropout_rate if self.training else 0.0
        if keep is None:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
        else:
            keep = keep[:, None]
            # Backends differ in what a row without keys gives: let it see all, then zero it.
            dead = ~keep.any(3, keepdim=True)
            out = F.scaled_dot_product_attention(q, k, v, keep | dead, dropout_p)
            out = torch.where(dead, 0.0, out)
        return self.linear_out(out.transpose(1, 2).reshape(batch, frames, width))


class HybridAttention(nn.Module):
    """LDSA followed by scaled dot-product attention on its output (reference HybirdAttention).

        x = ldsa_att(query, key, value, mask);  out = dot_att(x, x, x, mask)

    Offline only: dot_att sees the whole sequence, so step and its kin raise.

    Args:
        n_head: number of heads of both parts, a divisor of n_feat.
        n_feat: model width D.
        dropout_rate: dropout of both parts' attention weights in training, in [0, 1).
        context_size, left, right, edge, implementation: of ldsa_att, as in
            LocalDenseSynthesizerAttention.
        honor_mask: False is the reference's behaviour: ldsa_att ignores the mask, dot_att uses it
            and nothing is zeroed.
        device, dtype: of the parameters.

    Raises:
        ValueError, TypeError: an argument has the wrong type or value.

    Source: Xu, Li, Zhang, ICASSP 2021, arXiv 2010.12155.
    """

    def __init__(
        self,
        n_head: int,
        n_feat: int,
        dropout_rate: float = 0.0,
        context_size: int = 15,
        *,
        left: int | None = None,
        right: int | None = None,
        edge: str = "zero",
        honor_mask: bool = True,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ldsa_att = LocalDenseSynthesizerAttention(
            n_head,
            n_feat,
            dropout_rate,
            context_size,
            left=left,
            right=right,
            edge=edge,
            honor_mask=honor_mask,
            implementation=implementation,
            device=device,
            dtype=dtype,
        )
        self.dot_att = _DotAttention(
            self.ldsa_att.n_head, self.ldsa_att.n_feat, dropout_rate, device, dtype
        )

    n_head = property(lambda self: self.ldsa_att.n_head)
    n_feat = property(lambda self: self.ldsa_att.n_feat)
    left = property(lambda self: self.ldsa_att.left)
    right = property(lambda self: self.ldsa_att.right)
    window = property(lambda self: self.ldsa_att.window)

    @property
    def honor_mask(self) -> bool:
        """Whether ldsa_att follows the mask and frames outside give 0."""
        return self.ldsa_att.honor_mask

    @honor_mask.setter
    def honor_mask(self, honor: bool) -> None:
        self.ldsa_att.honor_mask = honor

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query, key, value, lengths: as in LocalDenseSynthesizerAttention.
            mask: bool or integer 0/1, [B,T], [B,1,T] or [B,T,T], nonzero = keep. ldsa_att takes
                its diagonal, dot_att the whole of it.

        Returns:
            [B,T,D], exactly 0 at frames outside (unless honor_mask=False).

        Raises:
            ValueError, TypeError: as in LocalDenseSynthesizerAttention.
        """
        check_sequence("query", query, self.n_feat)
        frames = query.shape[1]
        x = self.ldsa_att(query, key, value, mask, lengths=lengths)
        starts, lengths = extent(query, mask, lengths, self.honor_mask)
        keep = inside = None
        if lengths is not None:
            inside = frames_inside(lengths, starts, frames, query.device)
            keep = inside[:, None]
        if mask is not None:
            keep = keep_mask(mask, query.shape[0], frames).to(query.device, non_blocking=True)
        out = self.dot_att(x, keep)
        return out if inside is None else torch.where(inside[:, :, None], out, 0.0)

    def _offline_only(self, *args: Any, **kwargs: Any) -> NoReturn:
        """There is none: dot_att attends to the whole sequence.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "HybridAttention is offline only: dot_att attends to the whole sequence, so there is "
            "no init_state, step or flush; LocalDenseSynthesizerAttention streams"
        )

    init_state = step = flush = _offline_only
