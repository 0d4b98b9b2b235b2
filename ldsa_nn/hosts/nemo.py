"""NeMo's Conformer and FastConformer encoders."""

from typing import Any, NoReturn

import torch
from nemo.collections.asr.parts.submodules.multi_head_attention import MultiHeadAttention
from torch import Tensor, nn

from ldsa_nn.hosts import Adapter, Host, class_name, kept_frames
from ldsa_nn.hosts.espnet2 import describe

__all__ = ["HOSTS", "NOT_HOSTS", "LocalAdapter", "NemoAdapter"]

_ATTENTION = "nemo.collections.asr.parts.submodules.multi_head_attention"
_LOCAL = f"{_ATTENTION}.RelPositionMultiHeadAttentionLongformer"


class NemoAdapter(Adapter, MultiHeadAttention):
    """Takes the call of NeMo's attentions, rel_pos and abs_pos, for a layer of this package.

    It is one of NeMo's attentions in name, because setup_streaming_params sets cache_drop_size on
    those alone; it has none of their parameters.
    """

    def __init__(self, old: Any, layer: nn.Module, left: int, right: int) -> None:
        super().__init__(old, layer, left, right)
        self.cache_drop_size: int = old.cache_drop_size
        self._max_cache_len = old._max_cache_len

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        pos_emb: Tensor | None = None,
        cache: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend.

        Args:
            query, key, value: [B,T,D].
            mask: bool or integer, nonzero = masked, [B,T,C+T] with C frames in the cache.
            pos_emb: of no effect.
            cache: [B,C,D], the layer inputs before query's; mask tells which are real.

        Returns:
            [B,T,D]; with a cache (that, the next cache [B,C,D]).

        Raises:
            ValueError, TypeError: the cache is shorter than the window, the window looks further
                ahead than the stream, the mask is of another kind, or the layer refuses its input.
        """
        batch, frames, _ = query.shape
        if cache is None:
            keep = None if mask is None else kept_frames(mask, batch, frames, masked=True)
            return self.attend(query, value, keep)
        past, drop = cache.shape[1], self.cache_drop_size
        if past < self.left:
            raise ValueError(
                f"the cache holds {past} frames, the window needs left={self.left}: choose "
                "att_context_size or left_chunks * chunk_size accordingly"
            )
        if self.right > drop:
            raise ValueError(
                f"a stream that looks {drop} frames ahead (cache_drop_size) needs a window with "
                f"right of at most that, got right={self.right}"
            )
        if mask is None:
            raise ValueError("a cache needs the mask that tells which of its frames are real")
        keep = kept_frames(mask, batch, frames, past, masked=True)
        out = self.attend(query, torch.cat([cache, value], 1), keep)
        stored = frames - drop
        return out, torch.cat([cache[:, stored:], query[:, :stored]], 1)


class LocalAdapter(NemoAdapter):
    """Takes the call of NeMo's rel_pos_local_attn for a layer of this package."""

    def forward(  # type: ignore[override]  # the host's names
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pad_mask: Tensor | None,
        pos_emb: Tensor | None = None,
        cache: None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend.

        Args:
            query, key, value: [B,T,D].
            pad_mask: bool or integer [B,T], nonzero = padding.
            pos_emb: of no effect.
            cache: must be None: NeMo's own local attention takes none either.

        Returns:
            [B,T,D].

        Raises:
            ValueError, TypeError: a cache is given, the mask is of another kind, or the layer
                refuses its input.
        """
        if cache is not None:
            raise ValueError("rel_pos_local_attn does not stream: use rel_pos or abs_pos")
        return super().forward(query, key, value, pad_mask, pos_emb)


def _adapter(old: nn.Module, layer: nn.Module, left: int, right: int) -> Adapter:
    local = class_name(type(old)) == _LOCAL
    return (LocalAdapter if local else NemoAdapter)(old, layer, left, right)


def _refuse_change(*arguments: Any, **options: Any) -> NoReturn:
    raise RuntimeError(
        "change_attention_model() would put new attention, with random weights, in place of the "
        "replaced: change the attention model first, replace then"
    )


def _settings(model: nn.Module, parents: list[nn.Module]) -> list[tuple[nn.Module, str, object]]:
    """Keep encoders with a replaced layer from undoing the replacement silently."""
    replaced = {id(parent) for parent in parents}
    return [
        (module, "change_attention_model", _refuse_change)
        for module in model.modules()
        if hasattr(module, "change_attention_model")
        and any(id(child) in replaced for child in module.modules())
    ]


HOSTS = (
    Host(
        parent="nemo.collections.asr.parts.submodules.conformer_modules.ConformerLayer",
        attribute="self_attn",
        attention=(
            f"{_ATTENTION}.MultiHeadAttention",
            f"{_ATTENTION}.RelPositionMultiHeadAttention",
            _LOCAL,
        ),
        describe=describe,
        adapter=_adapter,
        warnings=(
            "NeMo's Conformer: the window does not follow a limited context (att_context_size); "
            "of a mask of pairs the diagonal counts. A cache-aware stream equals the whole "
            "sequence where the left context is at least left and the sum of all layers' right is "
            "at most the frames that the stream looks ahead (cache_drop_size). "
            "change_attention_model() raises: call it before replacing",
        ),
        settings=_settings,
    ),
)

_TRANSFORMER = "nemo.collections.asr.modules.transformer.transformer_decoders"

NOT_HOSTS = {
    f"{_TRANSFORMER}.TransformerDecoderBlock": (
        "a decoder's attention is causal or looks at another sequence"
    ),
}
