"""ESPnet's Conformer, Transformer, Branchformer and E-Branchformer encoders."""

from typing import Any

from torch import Tensor, nn

from ldsa_nn.hosts import Adapter, Attention, Host, class_name, kept_frames

__all__ = ["HOSTS", "NOT_HOSTS", "AbsoluteAdapter", "RelativeAdapter", "describe"]


def describe(old: Any) -> Attention:
    """Read an attention with ESPnet's names, which other toolkits took over."""
    return Attention(
        n_head=old.h,
        n_feat=old.linear_out.out_features,
        # Where flash attention does the dropping out, `dropout` is an identity.
        dropout_rate=getattr(old.dropout, "p", getattr(old, "dropout_rate", 0.0)),
        weight=old.linear_out.weight,
        value_weight=old.linear_v.weight,
        value_bias=old.linear_v.bias,
        out_weight=old.linear_out.weight,
        out_bias=old.linear_out.bias,
    )


class AbsoluteAdapter(Adapter):
    """Takes MultiHeadedAttention's call for a layer of this package."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        expand_kv: bool = False,
    ) -> Tensor:
        """Attend.

        Args:
            query: [B,T,D], or [B,1,D] where the layer is given a cache: the last frame alone.
            key, value: [B,S,D], query's frames at the end.
            mask: bool or integer, nonzero = keep, [B,1,S] or [B,T,S].
            expand_kv: of no effect.

        Returns:
            [B,T,D] of query's frames.

        Raises:
            ValueError, TypeError: a cache is used while right > 0, the mask is of another kind, or
                the layer refuses its input.
        """
        past = value.shape[1] - query.shape[1]
        if past > 0 and self.right:
            raise ValueError(
                f"a cached step has no frames ahead: it needs right=0, got right={self.right}"
            )
        keep = None
        if mask is not None:
            keep = kept_frames(mask, query.shape[0], query.shape[1], past)
        return self.attend(query, value, keep)


class RelativeAdapter(AbsoluteAdapter):
    """Takes RelPositionMultiHeadedAttention's call for a layer of this package."""

    def forward(  # type: ignore[override]  # the host's order
        self, query: Tensor, key: Tensor, value: Tensor, pos_emb: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attend.

        Args:
            query, key, value, mask: as in `AbsoluteAdapter`.
            pos_emb: of no effect.

        Returns:
            [B,T,D].

        Raises:
            ValueError, TypeError: as in `AbsoluteAdapter`.
        """
        return super().forward(query, key, value, mask)


def _adapter(old: nn.Module, layer: nn.Module, left: int, right: int) -> Adapter:
    relative = class_name(type(old)).endswith("RelPositionMultiHeadedAttention")
    return (RelativeAdapter if relative else AbsoluteAdapter)(old, layer, left, right)


# Releases before 2026 keep the layers in the package espnet.
_LAYERS = ("espnet.nets.pytorch_backend", "espnet2.legacy.nets.pytorch_backend")

HOSTS = tuple(
    Host(
        parent=parent,
        attribute=attribute,
        attention=tuple(
            f"{layers}.transformer.attention.{kind}MultiHeadedAttention"
            for layers in _LAYERS
            for kind in ("", "RelPosition", "LegacyRelPosition")
        ),
        describe=describe,
        adapter=_adapter,
        warnings=(
            f"ESPnet's {name}: the window does not follow a causal or chunk mask; of a mask of "
            f"pairs the diagonal counts{more}",
        ),
    )
    for name, attribute, more, parents in (
        (
            "Conformer",
            "self_attn",
            "; its convolution ignores the mask, lets padding leak into the frames beside it and "
            "looks ahead",
            [f"{layers}.conformer.encoder_layer.EncoderLayer" for layers in _LAYERS],
        ),
        (
            "Transformer",
            "self_attn",
            "",
            [f"{layers}.transformer.encoder_layer.EncoderLayer" for layers in _LAYERS],
        ),
        (
            "Branchformer",
            "attn",
            "; its convolution ignores the mask and looks ahead",
            ["espnet2.asr.encoder.branchformer_encoder.BranchformerEncoderLayer"],
        ),
        (
            "E-Branchformer",
            "attn",
            "; its convolution ignores the mask and looks ahead",
            ["espnet2.asr.encoder.e_branchformer_encoder.EBranchformerEncoderLayer"],
        ),
    )
    for parent in parents
)

NOT_HOSTS = {
    f"{layers}.transformer.decoder_layer.DecoderLayer": (
        "a decoder's attention is causal or looks at another sequence"
    )
    for layers in _LAYERS
}
