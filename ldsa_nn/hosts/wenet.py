"""WeNet's Conformer and Transformer encoders."""

from typing import Any

import torch
from torch import Tensor, nn

from ldsa_nn.hosts import Adapter, Host, keep_from_padding, kept_frames
from ldsa_nn.hosts.espnet2 import describe

__all__ = ["HOSTS", "NOT_HOSTS", "WenetAdapter"]

# Keys and values, [B,H,C,dk] each; one tensor [B,H,C,2*dk] in older releases.
Cache = tuple[Tensor, Tensor] | Tensor


class WenetAdapter(Adapter):
    """Takes the call of WeNet's attentions for a layer of this package.

    The half of the cache that WeNet fills with values holds the value frames, the other half marks
    the frame that a stream began with.
    """

    def __init__(self, old: Any, layer: nn.Module, left: int, right: int) -> None:
        super().__init__(old, layer, left, right)
        self.n_head: int = old.h

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        pos_emb: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Cache | None]:
        """Attend.

        Args:
            query, key, value: [B,T,D].
            mask: [B,1,C+T] or [B,T,C+T] with C frames in the cache: bool or integer with nonzero =
                keep, or additive floating point (use_sdpa). Of the frames, the first C+T count; one
                without frames, (0,0,0), stands for none.
            pos_emb: of no effect.
            cache: what the last chunk's call returned, cut to its last C frames; (0,0,0,0) tensors
                stand for none.

        Returns:
            (out [B,T,D], cache with C+T frames; in training mode the given cache).

        Raises:
            ValueError, TypeError: a cache is used while right > 0 or is shorter than the window
                (the latter where that can be seen without synchronising: a CPU cache in eager
                mode), the mask is of another kind, or the layer refuses its input.
        """
        batch, frames, width = query.shape
        halves = cache.chunk(2, -1) if isinstance(cache, Tensor) else cache
        past = 0
        if halves is not None and halves[1].shape[0]:
            past = halves[1].shape[2]
        whole = value
        if past:
            assert halves is not None
            self._check_past(halves[0])
            whole = torch.cat([halves[1].transpose(1, 2).flatten(2), value], 1)
        keep = None
        if isinstance(mask, Tensor) and mask.dim() == 3:
            mask = mask[..., : past + frames] if mask.shape[2] else None
        if mask is not None:
            additive = isinstance(mask, Tensor) and mask.is_floating_point()
            keep = keep_from_padding(mask) if additive else mask
            keep = kept_frames(keep, batch, frames, past)
        out = self.attend(query, whole, keep)
        if self.training:
            return out, cache
        shape = (batch, past + frames, self.n_head, width // self.n_head)
        values = whole.reshape(shape).transpose(1, 2)
        marks = torch.zeros_like(values)
        if past:
            assert halves is not None
            marks[:, :, :past] = halves[0]
        else:
            marks[:, :, :1] = 1
        if isinstance(cache, Tensor):
            return out, torch.cat([marks, values], -1)
        return out, (marks, values)

    def _check_past(self, marks: Tensor) -> None:
        if self.right:
            raise ValueError(
                f"a stream has no frames ahead of its chunk: it needs right=0, got "
                f"right={self.right}"
            )
        past = marks.shape[2]
        short = past < self.left and marks.device.type == "cpu"
        if short and not torch.compiler.is_compiling() and not marks[:, :, 0].all():
            raise ValueError(
                f"the cache was cut to {past} frames, the window needs left={self.left}: chunk "
                "size * left chunks must be at least that, or all chunks be kept (-1)"
            )


# Releases before 2025 have no folder models.
_LAYERS = ("wenet.models.transformer", "wenet.transformer")

HOSTS = tuple(
    Host(
        parent=f"{layers}.encoder_layer.{name}EncoderLayer",
        attribute="self_attn",
        attention=tuple(
            f"{layers}.attention.{kind}MultiHeadedAttention"
            for kind in ("", "RelPosition", "ShawRelPosition", "Rope")
        ),
        describe=describe,
        adapter=WenetAdapter,
        warnings=(
            f"WeNet's {name}: the window does not follow a chunk mask (static or dynamic chunks); "
            "of a mask of pairs the diagonal counts. A stream (forward_chunk) equals the whole "
            "sequence only with right=0 and chunk size * left chunks of at least left, or all "
            f"left chunks{more}",
        ),
    )
    for layers in _LAYERS
    for name, more in (
        ("Conformer", "; its convolution looks ahead unless causal=True"),
        ("Transformer", ""),
    )
)

NOT_HOSTS = {
    f"{layers}.decoder_layer.DecoderLayer": (
        "a decoder's attention is causal or looks at another sequence"
    )
    for layers in _LAYERS
}
