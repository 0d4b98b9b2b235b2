"""torchaudio's Conformer, and its wav2vec 2.0, HuBERT and WavLM."""

from typing import Any

from torch import Tensor, nn

from ldsa_nn.hosts import (
    Attention,
    BiasedAdapter,
    Host,
    drop_unused_bias,
    keep_from_mask,
    keep_from_padding,
)
from ldsa_nn.hosts.torch import MultiheadAdapter, describe

__all__ = ["HOSTS", "NOT_HOSTS", "EncoderAdapter", "describe_encoder"]

_WAV2VEC2 = "torchaudio.models.wav2vec2"


def describe_encoder(old: Any) -> Attention:
    """Read an attention of wav2vec 2.0 or HuBERT, or of WavLM, which wraps torch's."""
    if hasattr(old, "attention"):
        return describe(old.attention)._replace(dropout_rate=old.dropout)
    return Attention(
        n_head=old.num_heads,
        n_feat=old.embed_dim,
        dropout_rate=old.dropout,
        weight=old.out_proj.weight,
        value_weight=old.v_proj.weight,
        value_bias=old.v_proj.bias,
        out_weight=old.out_proj.weight,
        out_bias=old.out_proj.bias,
    )


class EncoderAdapter(BiasedAdapter):
    """Takes the call of wav2vec 2.0, HuBERT and WavLM for a layer of this package."""

    def __init__(self, old: Any, layer: nn.Module, left: int, right: int) -> None:
        super().__init__(old, layer, left, right)
        self.embed_dim = old.embed_dim

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x: [B,T,D].
            attention_mask: [B,1,T,T] or [B,T], additive or bool with True = keep. WavLM's own
                attention takes none, so that its layers that are not replaced fail with lengths.
            position_bias: [B,H,T,T] of WavLM, handed on to layers that are not replaced.
            key_padding_mask: [B,T], bool with True = padding or additive. The hosts give none.

        Returns:
            (out, position_bias): out [B,T,D]; position_bias None but for WavLM.

        Raises:
            ValueError, TypeError: both masks are given, or one has a wrong shape or holes.
        """
        if attention_mask is not None and key_padding_mask is not None:
            raise ValueError("give attention_mask or key_padding_mask, not both")
        keep = None
        if attention_mask is not None:
            keep = keep_from_mask(attention_mask, x.shape[0], x.shape[1])
        elif key_padding_mask is not None:
            keep = keep_from_padding(key_padding_mask)
        if position_bias is None:
            position_bias = self.position_bias(x.shape[0], x.shape[1])
        return self.layer(x, x, x, mask=keep, lengths=None), position_bias


HOSTS = (
    Host(
        parent="torchaudio.models.conformer.ConformerLayer",
        attribute="self_attn",
        attention=("torch.nn.modules.activation.MultiheadAttention",),
        describe=describe,
        adapter=MultiheadAdapter,
        warnings=(
            "torchaudio.models.Conformer: its convolution ignores the mask and lets padding leak "
            "into the frames beside it, and it is not causal, with right=0 neither",
        ),
    ),
    Host(
        parent=f"{_WAV2VEC2}.components.EncoderLayer",
        attribute="attention",
        attention=(
            f"{_WAV2VEC2}.components.SelfAttention",
            f"{_WAV2VEC2}.wavlm_attention.WavLMSelfAttention",
        ),
        describe=describe_encoder,
        adapter=EncoderAdapter,
        warnings=(
            "torchaudio.models.Wav2Vec2Model: its positional convolution is not causal, with "
            "right=0 neither; where extractor_mode is 'group_norm', its feature extractor "
            "normalises over time and so lets padding leak, in the original too",
        ),
        settings=drop_unused_bias,
    ),
)

NOT_HOSTS = {
    "torchaudio.models.emformer._EmformerAttention": (
        "Emformer is no drop-in host: its attention takes the segments, right contexts and memory "
        "of a stream, not a sequence"
    ),
}
