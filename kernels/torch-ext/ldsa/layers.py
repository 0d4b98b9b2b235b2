"""Stateless layers that `kernels.kernelize` can put in place of a model's own.

A layer here replaces the `forward` of a module whose class is marked with
`@use_kernel_forward_from_hub(NAME)`. The two forwards must take the same number and kinds of
arguments, hence one layer for each calling convention. Layers have no constructor, no parameters
and no methods of their own: the marked module keeps its state and passes tensors in.
"""

from typing import Optional

from torch import Tensor, nn

from .op import ldsa_local_attention

__all__ = ["LdsaLocalAttention", "LdsaPaddedLocalAttention"]


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
