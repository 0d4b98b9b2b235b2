"""SpeechBrain's Conformer, Branchformer and Transformer encoders."""

from typing import Any

from torch import Tensor, nn

from ldsa_nn.hosts import Adapter, Attention, Host, keep_from_padding
from ldsa_nn.hosts import torch as torch_host

__all__ = ["HOSTS", "NOT_HOSTS", "SpeechBrainAdapter"]

_REGULAR = "speechbrain.nnet.attention.MultiheadAttention"
_PER_HEAD = (
    "speechbrain.nnet.attention.RelPosMHAXL",
    "speechbrain.nnet.attention.RoPEMHA",
)


def _describe(old: Any) -> Attention:
    """Read an attention of SpeechBrain."""
    if isinstance(getattr(old, "att", None), nn.MultiheadAttention):
        return torch_host.describe(old.att)
    d, heads = old.embed_dim, old.num_heads
    # Self-attention splits what in_proj_weight gives into heads first, into q, k and v then.
    value_weight = old.in_proj_weight.view(heads, 3, d // heads, d)[:, 2].reshape(d, d)
    return Attention(
        n_head=heads,
        n_feat=d,
        dropout_rate=old.dropout,
        weight=old.out_proj.weight,
        value_weight=value_weight,
        value_bias=None if old.vbias is None else old.value_bias_weight,
        out_weight=old.out_proj.weight,
        out_bias=old.out_proj.bias,
    )


class SpeechBrainAdapter(Adapter):
    """Takes the call of SpeechBrain's attentions for a layer of this package."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        return_attn_weights: bool = True,
        pos_embs: Tensor | None = None,
    ) -> tuple[Tensor, None] | Tensor:
        """Attend.

        Args:
            query, key, value: [B,T,D].
            attn_mask: [T,T] or [B*H,T,T], bool with True = forbidden or additive. It has no effect
                and may forbid no later frame of the window.
            key_padding_mask: [B,T], bool with True = padding or additive.
            return_attn_weights: False returns the output alone.
            pos_embs: of no effect.

        Returns:
            (out [B,T,D], None), the weights having no [T,T] form here.

        Raises:
            ValueError, TypeError: a mask that the window cannot follow, or the layer refuses its
                input.
        """
        self.check_ahead(attn_mask, query.shape[1])
        keep = None if key_padding_mask is None else keep_from_padding(key_padding_mask)
        out = self.attend(query, value, keep)
        return (out, None) if return_attn_weights else out


_WARNING = (
    "the window does not follow a causal or chunk mask (causal=True, Dynamic Chunk Training): one "
    "that forbids a later frame of the window raises, so replace with right=0, and the chunk's "
    "left context does not shorten the window"
)
_STREAM = (
    "; forward_streaming equals the whole sequence only with right=0 and a left context of at "
    "least left frames"
)
_LEAK = "its convolution looks ahead and lets padding leak into the frames beside it"
_MODELS = "speechbrain.lobes.models.transformer"

HOSTS = tuple(
    Host(
        parent=f"{_MODELS}.{parent}",
        attribute=attribute,
        attention=(_REGULAR, *_PER_HEAD),
        describe=_describe,
        adapter=SpeechBrainAdapter,
        warnings=(f"SpeechBrain's {name}: {_WARNING}{more}",),
    )
    for name, parent, attribute, more in (
        (
            "Conformer",
            "Conformer.ConformerEncoderLayer",
            "mha_layer",
            f"{_STREAM}; unless causal=True, {_LEAK}",
        ),
        (
            "Branchformer",
            "Branchformer.BranchformerEncoderLayer",
            "mha_layer",
            f"; {_LEAK}",
        ),
        ("Transformer", "Transformer.TransformerEncoderLayer", "self_att", ""),
    )
)

_DECODER = "a decoder's attention is causal or looks at another sequence"

NOT_HOSTS = {
    f"{_MODELS}.Transformer.TransformerDecoderLayer": _DECODER,
    f"{_MODELS}.Conformer.ConformerDecoderLayer": _DECODER,
}
