"""Stateless layers that `kernels.kernelize` can put in place of a model's own.

A layer here replaces the `forward` of a module whose class is marked with
`@use_kernel_forward_from_hub(NAME)`. The two forwards must take the same number and kinds of
arguments, hence one layer for each calling convention. Layers have no constructor, no parameters
and no methods of their own: the marked module keeps its state and passes tensors in.
"""

from typing import Optional, Tuple

from torch import Tensor, nn

from .delta_op import tiled_delta_rule
from .op import ldsa_local_attention

__all__ = ["LdsaLocalAttention", "LdsaPaddedLocalAttention", "TiledDeltaRule"]


class LdsaLocalAttention(nn.Module):
    """`ldsa_local_attention` of whole sequences: the four arguments of the published kernel."""

    has_backward = True
    can_torch_compile = True

    def forward(self, a_logits: Tensor, v: Tensor, left: int, right: int) -> Tensor:
        """Mix each frame's window of values by the softmax of its logits.

        Args:
            a_logits: [B, H, W, T] logits, W = left + 1 + right, slot 0 the leftmost frame.
            v: [B, H, Dh, T] values.
            left: frames before the current one.
            right: frames after it.

        Returns:
            [B, H, Dh, T] in v's dtype and memory order.
        """
        return ldsa_local_attention(a_logits, v, left, right)


class LdsaPaddedLocalAttention(nn.Module):
    """`ldsa_local_attention` of padded batches, with its edge rule and its dropout."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        a_logits: Tensor,
        v: Tensor,
        left: int,
        right: int,
        *,
        lengths: Optional[Tensor] = None,
        starts: Optional[Tensor] = None,
        edge: str = "zero",
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Mix each frame's window of values by the softmax of its logits, inside each sequence.

        Args:
            a_logits: [B, H, W, T] logits, W = left + 1 + right, slot 0 the leftmost frame.
            v: [B, H, Dh, T] values.
            left: frames before the current one.
            right: frames after it.
            lengths: [B] integers, the frame after each sequence's last; all of T when None.
            starts: [B] integers, each sequence's first frame; 0 when None.
            edge: "zero" (frames outside keep their weight) or "renormalize" (they are removed).
            dropout_p: probability that a weight is dropped. The module that calls passes 0.0
                outside training.

        Returns:
            [B, H, Dh, T] in v's dtype and memory order, exactly 0 at frames outside.
        """
        return ldsa_local_attention(
            a_logits,
            v,
            left,
            right,
            lengths=lengths,
            starts=starts,
            edge=edge,
            dropout_p=dropout_p,
        )


class TiledDeltaRule(nn.Module):
    """`tiled_delta_rule` with its states, of padded batches or packed sequences."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        scale: Optional[float] = None,
        initial_state: Optional[Tensor] = None,
        output_final_state: bool = False,
        lengths: Optional[Tensor] = None,
        cu_seqlens: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Read a state that each frame's key corrects and each tile's gate lets fade.

        Args:
            q, k: [B, T, H, K] queries and keys, normalised.
            v: [B, T, H, R*P] values, those of a key head's R value heads side by side.
            g: [B, T, H, tiles] log decay <= 0.
            beta: [B, T, H] write strength in (0, 2).
            scale: of the output; K^-0.5 when None.
            initial_state: [N, H, K, R*P]; zeros when None.
            output_final_state: return the last states too.
            lengths: [B] integers, the frame after each sequence's last; all of T when None.
            cu_seqlens: [N + 1] integers, where packed sequences of B = 1 begin and end.

        Returns:
            [B, T, H, R*P] in v's dtype, exactly 0 at frames outside, and the last states
            [N, H, K, R*P] or None.
        """
        return tiled_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            lengths=lengths,
            cu_seqlens=cu_seqlens,
        )
