"""A module of an icefall recipe, librispeech/ASR/zipformer as of June 2026 (commit 36e0420).

Written from the recipe's protocol: its classes' names and calls, time first; without the modules
around the attention that keep activations in range.
"""

import random

import torch
from torch import nn
from torch.nn import functional as F


class RelPositionMultiheadAttentionWeights(nn.Module):
    def __init__(self, embed_dim, num_heads, query_head_dim, dropout=0.0):
        super().__init__()
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.query_head_dim = query_head_dim
        self.in_proj = nn.Linear(embed_dim, 2 * query_head_dim * num_heads)

    def weights(self, q, k, key_padding_mask, attn_mask=None):
        q, k = (x.unflatten(2, (self.num_heads, -1)).permute(2, 1, 0, 3) for x in (q, k))
        scores = q @ k.transpose(2, 3)
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask, -1000)
        if key_padding_mask is not None:
            assert key_padding_mask.shape == (k.size(1), k.size(2))
            scores = scores.masked_fill(key_padding_mask.unsqueeze(1), -1000)
        return F.dropout(scores.softmax(-1), self.dropout, self.training)

    def forward(self, x, pos_emb, key_padding_mask=None, attn_mask=None):
        return self.weights(*self.in_proj(x).chunk(2, 2), key_padding_mask, attn_mask)

    def streaming_forward(self, x, pos_emb, cached_key, left_context_len, key_padding_mask):
        q, k = self.in_proj(x).chunk(2, 2)
        k = torch.cat([cached_key, k])
        return self.weights(q, k, key_padding_mask), k[-left_context_len:]


class SelfAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, value_head_dim):
        super().__init__()
        self.in_proj = nn.Linear(embed_dim, num_heads * value_head_dim)
        self.out_proj = nn.Linear(num_heads * value_head_dim, embed_dim)

    def forward(self, x, attn_weights):
        return self.sum(self.in_proj(x), attn_weights)

    def sum(self, x, attn_weights):
        heads, batch, _, whole = attn_weights.shape
        assert x.shape[:2] == (whole, batch)
        x = attn_weights @ x.unflatten(2, (heads, -1)).permute(2, 1, 0, 3)
        return self.out_proj(x.permute(2, 1, 0, 3).flatten(2))

    def streaming_forward(self, x, attn_weights, cached_val, left_context_len):
        x = torch.cat([cached_val, self.in_proj(x)])
        return self.sum(x, attn_weights), x[-left_context_len:]


class NonlinAttention(nn.Module):
    def __init__(self, channels, hidden_channels):
        super().__init__()
        self.in_proj = nn.Linear(channels, hidden_channels * 3)
        self.out_proj = nn.Linear(hidden_channels, channels)

    def forward(self, x, attn_weights):
        return self.streaming_forward(x, attn_weights, x.new_zeros(1, x.size(1), 0, 1), 0)[0]

    def streaming_forward(self, x, attn_weights, cached_x, left_context_len):
        s, x, y = self.in_proj(x).chunk(3, dim=2)
        x = (x * s.tanh()).transpose(0, 1)[None]
        if left_context_len:
            x = torch.cat([cached_x, x], dim=2)
        z = (attn_weights @ x)[0].transpose(0, 1)
        return self.out_proj(z * y), x[:, :, -left_context_len:]


class Zipformer2EncoderLayer(nn.Module):
    def __init__(
        self, embed_dim, pos_dim, num_heads, query_head_dim, pos_head_dim, value_head_dim,
        feedforward_dim, dropout, cnn_module_kernel, causal,
    ):  # fmt: skip
        super().__init__()
        assert causal
        self.const_attention_rate = 0.0
        self.self_attn_weights = RelPositionMultiheadAttentionWeights(
            embed_dim, num_heads, query_head_dim
        )
        self.self_attn1 = SelfAttention(embed_dim, num_heads, value_head_dim)
        self.self_attn2 = SelfAttention(embed_dim, num_heads, value_head_dim)
        self.nonlin_attention = NonlinAttention(embed_dim, 3 * embed_dim // 4)
        self.feed_forward1 = nn.Sequential(
            nn.Linear(embed_dim, feedforward_dim), nn.SiLU(), nn.Dropout(dropout),
            nn.Linear(feedforward_dim, embed_dim),
        )  # fmt: skip
        self.left_pad = cnn_module_kernel // 2
        self.conv = nn.Conv1d(embed_dim, embed_dim, self.left_pad + 1, groups=embed_dim)
        self.norm = nn.LayerNorm(embed_dim)

    def conv_module1(self, x, cache, src_key_padding_mask):
        x = x.permute(1, 2, 0)
        if src_key_padding_mask is not None:
            x = x.masked_fill(src_key_padding_mask[:, None], 0.0)
        x = torch.cat([cache, x], dim=2)
        return F.silu(self.conv(x)).permute(2, 0, 1), x[:, :, -self.left_pad :]

    def forward(self, src, pos_emb, chunk_size=-1, attn_mask=None, src_key_padding_mask=None):
        weights = self.self_attn_weights(
            src, pos_emb=pos_emb, attn_mask=attn_mask, key_padding_mask=src_key_padding_mask
        )
        src = src + self.feed_forward1(src)
        selected = weights[0:1]
        if self.training and random.random() < self.const_attention_rate:
            selected = (selected > 0.0).to(selected.dtype)
            selected = selected * (1.0 / selected.sum(dim=-1, keepdim=True))
        src = src + self.nonlin_attention(src, selected)
        src = src + self.self_attn1(src, weights)
        none = src.new_zeros(src.size(1), src.size(2), self.left_pad)
        src = src + self.conv_module1(src, none, src_key_padding_mask)[0]
        src = src + self.self_attn2(src, weights)
        return self.norm(src)

    def streaming_forward(
        self, src, pos_emb, cached_key, cached_nonlin_attn, cached_val1, cached_val2, cached_conv1,
        cached_conv2, left_context_len, src_key_padding_mask,
    ):  # fmt: skip
        weights, cached_key = self.self_attn_weights.streaming_forward(
            src, pos_emb=pos_emb, cached_key=cached_key, left_context_len=left_context_len,
            key_padding_mask=src_key_padding_mask,
        )  # fmt: skip
        src = src + self.feed_forward1(src)
        part, cached_nonlin_attn = self.nonlin_attention.streaming_forward(
            src, weights[0:1], cached_nonlin_attn, left_context_len
        )
        src = src + part
        part, cached_val1 = self.self_attn1.streaming_forward(
            src, weights, cached_val1, left_context_len
        )
        src = src + part
        part, cached_conv1 = self.conv_module1(
            src, cached_conv1, src_key_padding_mask[:, left_context_len:]
        )
        src = src + part
        part, cached_val2 = self.self_attn2.streaming_forward(
            src, weights, cached_val2, left_context_len
        )
        return (
            self.norm(src + part), cached_key, cached_nonlin_attn, cached_val1, cached_val2,
            cached_conv1, cached_conv2,
        )  # fmt: skip
