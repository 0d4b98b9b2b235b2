"""icefall's Conformer and Zipformer2 recipes.

A recipe is a folder of scripts, so its classes have names like conformer.ConformerEncoderLayer,
which other code may have too: an attention is taken for icefall's only where its call is.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldsa_nn.functional import ldsa_weights, mask_extent
from ldsa_nn.hosts import Adapter, Attention, Host, class_name, keep_from_padding
from ldsa_nn.ldsa import LocalDenseSynthesizerAttention

__all__ = ["HOSTS", "NOT_HOSTS", "ConformerAdapter", "Zipformer2Adapter"]


def _check_call(old: Any, *names: str) -> None:
    """Raise unless a class with the name of icefall's is called as icefall's is."""
    missing = set(names) - set(inspect.signature(old.forward).parameters)
    if missing:
        raise ValueError(
            f"{class_name(type(old))} is not icefall's: its forward takes no {sorted(missing)[0]}"
        )


def _describe_conformer(old: Any) -> Attention:
    """Read a Conformer's RelPositionMultiheadAttention."""
    _check_call(old, "query", "key", "value", "pos_emb", "key_padding_mask", "attn_mask")
    d = old.embed_dim

    def read(linear: Any) -> tuple[Tensor, Tensor]:
        # Some recipes scale what they store.
        if hasattr(linear, "get_weight"):
            return linear.get_weight(), linear.get_bias()
        return linear.weight, linear.bias

    (weight, bias), (out_weight, out_bias) = read(old.in_proj), read(old.out_proj)
    return Attention(
        n_head=old.num_heads,
        n_feat=d,
        dropout_rate=old.dropout,
        weight=old.out_proj.weight,
        value_weight=weight[2 * d :],
        value_bias=bias[2 * d :],
        out_weight=out_weight,
        out_bias=out_bias,
    )


class ConformerAdapter(Adapter):
    """Takes the call of a Conformer's RelPositionMultiheadAttention for a layer of this package."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pos_emb: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        left_context: int = 0,
        offset: int = 0,
    ) -> tuple[Tensor, None]:
        """Attend.

        Args:
            query: [T,B,D].
            key, value: [S,B,D], query's frames at the end, a stream's past before them.
            pos_emb, offset, need_weights: of no effect.
            key_padding_mask: [B,S], bool with True = padding or additive.
            attn_mask: [T,S] or [B*H,T,S], bool with True = forbidden or additive. It has no effect
                and, without a past, may forbid no later frame of the window.
            left_context: the frames of the past, where their number is fixed; at least left.

        Returns:
            (out [T,B,D], None).

        Raises:
            ValueError, TypeError: a mask that the window cannot follow, a past shorter than the
                window, or the layer refuses its input.
        """
        past = value.shape[0] - query.shape[0]
        if left_context and left_context < self.left:
            raise ValueError(
                f"left_context={left_context} frames are too few: the window needs left={self.left}"
            )
        if not past:
            self.check_ahead(attn_mask, query.shape[0])
        keep = None if key_padding_mask is None else keep_from_padding(key_padding_mask)
        out = self.attend(query.transpose(0, 1), value.transpose(0, 1), keep)
        return out.transpose(0, 1), None


def _describe_zipformer2(old: Any) -> Attention:
    """Read RelPositionMultiheadAttentionWeights, which has no value or output projection."""
    _check_call(old, "x", "pos_emb", "key_padding_mask", "attn_mask")
    none = old.in_proj.weight.new_empty(0, 0)
    return Attention(
        n_head=old.num_heads,
        n_feat=old.embed_dim,
        dropout_rate=old.dropout,
        weight=old.in_proj.weight,
        value_weight=none,
        value_bias=None,
        out_weight=none,
        out_bias=None,
    )


class Zipformer2Adapter(Adapter):
    """Makes the attention weights that three modules of a Zipformer2 layer share.

        weights[h,b,t,s] = a[b,h,s - t + left,t] inside the window, 0 outside

    Only w1 and w2 of the layer are used: w3 and w_out are taken off. Rows of padding have weight 1
    on themselves, because the host divides by a row's sum.
    """

    def __init__(self, old: nn.Module, layer: nn.Module, left: int, right: int) -> None:
        if not isinstance(layer, LocalDenseSynthesizerAttention):
            raise TypeError(
                "Zipformer2 needs a LocalDenseSynthesizerAttention, whose weights it takes; make "
                f"returned {type(layer).__name__}"
            )
        super().__init__(old, layer, left, right)
        layer.register_module("w3", None)
        layer.register_module("w_out", None)

    def forward(
        self,
        x: Tensor,
        pos_emb: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Weights of a whole sequence.

        Args:
            x: [T,B,D].
            pos_emb: of no effect.
            key_padding_mask: [B,T], bool with True = padding or additive.
            attn_mask: [T,T] or [B,T,T], bool with True = forbidden. It has no effect and may forbid
                no later frame of the window.

        Returns:
            [H,B,T,T].

        Raises:
            ValueError, TypeError: a mask that the window cannot follow.
        """
        self.check_ahead(attn_mask, x.shape[0])
        return self._weights(x, key_padding_mask, 0)

    def streaming_forward(
        self,
        x: Tensor,
        pos_emb: Tensor,
        cached_key: Tensor,
        left_context_len: int,
        key_padding_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Weights of a chunk over the cached frames and its own.

        Args:
            x: [T,B,D].
            pos_emb: of no effect.
            cached_key: unused and returned: the weights are made from x alone.
            left_context_len: number of cached frames C, at least left.
            key_padding_mask: [B,C+T], bool with True = padding or not yet a frame.

        Returns:
            (weights [H,B,T,C+T], cached_key).

        Raises:
            ValueError: right > 0, fewer cached frames than left, or a mask with holes.
        """
        if self.right:
            raise ValueError(
                f"a stream has no frames ahead of its chunk: it needs right=0, got "
                f"right={self.right}"
            )
        if left_context_len < self.left:
            raise ValueError(
                f"left_context_len={left_context_len} frames are too few: the window needs "
                f"left={self.left}"
            )
        return self._weights(x, key_padding_mask, left_context_len), cached_key

    def _weights(self, x: Tensor, key_padding_mask: Tensor | None, past: int) -> Tensor:
        layer: Any = self.layer
        frames, batch, _ = x.shape
        whole = past + frames
        logits = F.pad(layer._logits(x.transpose(0, 1)), (past, 0))
        keep = starts = lengths = None
        if key_padding_mask is not None and layer.honor_mask:
            keep = keep_from_padding(key_padding_mask)
            starts, lengths = mask_extent(keep, batch, whole)
        weights = ldsa_weights(
            logits, self.left, self.right, lengths=lengths, starts=starts, edge=layer.edge
        )[..., past:]
        weights = F.dropout(weights, layer.dropout_rate, self.training)
        # Row t goes t frames to the right: filled up with zeros to W + T, rows are read again as
        # lines of one less.
        line = layer.window + frames - 1
        band = F.pad(weights.permute(1, 0, 3, 2), (0, frames)).flatten(2)
        band = band[..., : frames * line].unflatten(2, (frames, line))
        # It begins with frame past - left of the whole, and ends `right` frames after it.
        band = F.pad(band, (past - self.left, -self.right))
        if keep is None:
            return band
        s = torch.arange(whole, device=x.device)
        own = (s == s[past:, None]).to(band.dtype)
        band = torch.where(keep[:, None], band, 0.0)  # slots outside keep a weight if edge="zero"
        return torch.where(keep[:, past:, None], band, own)


_CONSUMER = "it takes the weights that self_attn_weights makes, which are replaced"
_DECODER = "a decoder's attention is causal or looks at another sequence"

HOSTS = (
    Host(
        parent="conformer.ConformerEncoderLayer",
        attribute="self_attn",
        attention=("conformer.RelPositionMultiheadAttention",),
        describe=_describe_conformer,
        adapter=ConformerAdapter,
        warnings=(
            "icefall's Conformer: the window does not follow a causal or chunk mask "
            "(dynamic_chunk_training): one that forbids a later frame of the window raises, so "
            "replace with right=0. A stream equals the whole sequence only where left_context is "
            "at least left and right_context at least the sum of all layers' right; its "
            "convolution looks ahead unless causal=True",
        ),
    ),
    Host(
        parent="zipformer.Zipformer2EncoderLayer",
        attribute="self_attn_weights",
        attention=("zipformer.RelPositionMultiheadAttentionWeights",),
        describe=_describe_zipformer2,
        adapter=Zipformer2Adapter,
        warnings=(
            "icefall's Zipformer2: the window does not follow a chunk mask (causal=True with "
            "chunk_size): one that forbids a later frame of the window raises, so replace with "
            "right=0. A stream needs that and left_context_frames of at least left in each stack, "
            "whose own frames, longer where it is downsampled, the window counts. w3 and w_out are "
            "not used and taken off",
        ),
    ),
)

NOT_HOSTS = {
    "transformer.TransformerDecoderLayer": _DECODER,
    "zipformer.SelfAttention": _CONSUMER,
    "zipformer.NonlinAttention": _CONSUMER,
}
