"""The encoders of WeNet as of December 2025 (commit 0154699), written from their protocol."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from wenet.models.transformer.attention import (
    NO_CACHE,
    NONE,
    MultiHeadedAttention,
    RelPositionMultiHeadedAttention,
)
from wenet.models.transformer.encoder_layer import ConformerEncoderLayer, TransformerEncoderLayer

ATTENTIONS = {"selfattn": MultiHeadedAttention, "rel_selfattn": RelPositionMultiHeadedAttention}


def chunk_mask(size, chunk_size, num_left_chunks):
    t = torch.arange(size)
    ahead, back = t // chunk_size, t[:, None] // chunk_size
    mask = ahead <= back
    return mask if num_left_chunks < 0 else mask & (ahead >= back - num_left_chunks)


class _Encoder(nn.Module):
    def __init__(
        self, input_size, output_size, use_dynamic_chunk=False, gradient_checkpointing=False,
        use_sdpa=False, **_,
    ):  # fmt: skip
        super().__init__()
        self.embed = nn.Linear(input_size, output_size)
        self.after_norm = nn.LayerNorm(output_size)
        self.static_chunk_size = 0
        self.use_dynamic_chunk = use_dynamic_chunk
        self.gradient_checkpointing = gradient_checkpointing
        self.use_sdpa = use_sdpa

    def position_encoding(self, offset, size):
        t = torch.arange(offset, offset + size)[:, None]
        return torch.sin(t * torch.linspace(0.1, 2, self.after_norm.normalized_shape[0]))[None]

    def forward(self, xs, xs_lens, decoding_chunk_size=0, num_decoding_left_chunks=-1):
        masks = (torch.arange(xs.size(1)) < xs_lens[:, None])[:, None]
        xs, pos_emb, chunk_masks = self.embed(xs), self.position_encoding(0, xs.size(1)), masks
        if self.use_dynamic_chunk:
            size = decoding_chunk_size if decoding_chunk_size > 0 else xs.size(1)
            chunk_masks = masks & chunk_mask(xs.size(1), size, num_decoding_left_chunks)[None]
        if self.use_sdpa:
            chunk_masks = (1.0 - chunk_masks.to(xs.dtype)) * -1.0e10
        for layer in self.encoders:
            if self.gradient_checkpointing and self.training:
                xs, chunk_masks, _, _ = checkpoint(
                    layer.__call__, xs, chunk_masks, pos_emb, masks, use_reentrant=False
                )
            else:
                xs, chunk_masks, _, _ = layer(xs, chunk_masks, pos_emb, masks)
        return self.after_norm(xs), masks

    def forward_chunk(
        self, xs, offset, required_cache_size, att_cache=NO_CACHE, cnn_cache=NO_CACHE,
        att_mask=NONE,
    ):  # fmt: skip
        assert xs.size(0) == 1
        xs, cached = self.embed(xs), att_cache.size(2)
        size = cached + xs.size(1)
        pos_emb = self.position_encoding(offset - cached, size)
        start = 0 if required_cache_size < 0 else max(size - required_cache_size, 0)
        att_caches, cnn_caches = [], []
        for i, layer in enumerate(self.encoders):
            if att_cache.size(0) == 0:
                kv_cache = (att_cache, att_cache)
            else:
                kv_cache = att_cache[i : i + 1].chunk(2, dim=-1)
            xs, _, kv_cache, conv = layer(
                xs, att_mask, pos_emb, att_cache=kv_cache,
                cnn_cache=cnn_cache[i] if cnn_cache.size(0) > 0 else cnn_cache,
            )  # fmt: skip
            att_caches.append(torch.cat(kv_cache, dim=-1)[:, :, start:, :])
            cnn_caches.append(conv[None])
        return self.after_norm(xs), torch.cat(att_caches), torch.cat(cnn_caches)

    def forward_chunk_by_chunk(self, xs, decoding_chunk_size, num_decoding_left_chunks=-1):
        assert self.static_chunk_size > 0 or self.use_dynamic_chunk
        att_cache = cnn_cache = torch.zeros((0, 0, 0, 0))
        outs, offset = [], 0
        for chunk in xs.split(decoding_chunk_size, dim=1):
            y, att_cache, cnn_cache = self.forward_chunk(
                chunk, offset, decoding_chunk_size * num_decoding_left_chunks, att_cache, cnn_cache
            )
            outs.append(y)
            offset += y.size(1)
        ys = torch.cat(outs, 1)
        return ys, torch.ones((1, 1, ys.size(1)), dtype=torch.bool)


class TransformerEncoder(_Encoder):
    def __init__(
        self, input_size, output_size, attention_heads, linear_units, num_blocks, dropout_rate,
        attention_dropout_rate=0.0, selfattention_layer_type="selfattn", **options,
    ):  # fmt: skip
        super().__init__(input_size, output_size, **options)
        attention = ATTENTIONS[selfattention_layer_type]
        self.encoders = nn.ModuleList(
            TransformerEncoderLayer(
                output_size,
                attention(attention_heads, output_size, attention_dropout_rate, self.use_sdpa),
                linear_units,
                dropout_rate,
            )
            for _ in range(num_blocks)
        )


class ConformerEncoder(_Encoder):
    def __init__(
        self, input_size, output_size, attention_heads, linear_units, num_blocks, dropout_rate,
        attention_dropout_rate=0.0, selfattention_layer_type="rel_selfattn",
        cnn_module_kernel=15, **options,
    ):  # fmt: skip
        super().__init__(input_size, output_size, **options)
        attention = ATTENTIONS[selfattention_layer_type]
        self.encoders = nn.ModuleList(
            ConformerEncoderLayer(
                output_size,
                attention(attention_heads, output_size, attention_dropout_rate, self.use_sdpa),
                linear_units,
                dropout_rate,
                cnn_module_kernel,
            )
            for _ in range(num_blocks)
        )
