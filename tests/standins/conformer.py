"""A module of an icefall recipe, pruned_transducer_stateless5 as of June 2026 (commit 36e0420).

Written from the recipe's protocol: its classes' names and calls, time first.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F


class RelPositionMultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(
        self, query, key, value, pos_emb, key_padding_mask=None, need_weights=True, attn_mask=None,
        left_context=0,
    ):  # fmt: skip
        assert pos_emb.size(1) == 2 * query.size(0) - 1 + left_context
        w, b = self.in_proj.weight.chunk(3), self.in_proj.bias.chunk(3)
        q, k, v = (
            F.linear(x, *parts).unflatten(2, (self.num_heads, -1)).permute(1, 2, 0, 3)
            for x, *parts in zip((query, key, value), w, b, strict=True)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.size(3))
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask, -math.inf)
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -math.inf)
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        out = (weights @ v).permute(2, 0, 1, 3).flatten(2)
        return self.out_proj(out), weights.mean(1) if need_weights else None


class ConformerEncoderLayer(nn.Module):
    def __init__(
        self, d_model, nhead, dim_feedforward, dropout, layer_dropout, cnn_module_kernel, causal
    ):
        super().__init__()
        assert causal and not layer_dropout
        self.self_attn = RelPositionMultiheadAttention(d_model, nhead)
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, dim_feedforward), nn.SiLU(), nn.Dropout(dropout),
            nn.Linear(dim_feedforward, d_model),
        )  # fmt: skip
        self.conv = nn.Conv1d(d_model, d_model, cnn_module_kernel, groups=d_model)
        self.lorder = cnn_module_kernel - 1
        self.norm_final = nn.LayerNorm(d_model)

    def conv_module(self, x, cache=None, right_context=0, src_key_padding_mask=None):
        x = x.permute(1, 2, 0)
        if src_key_padding_mask is not None:
            x = x.masked_fill(src_key_padding_mask[:, None], 0.0)
        if cache is None:
            x = F.pad(x, (self.lorder, 0))
        else:
            x = torch.cat([cache.permute(1, 2, 0), x], dim=2)
            cache = x[:, :, : x.size(2) - right_context][:, :, -self.lorder :].permute(2, 0, 1)
        return F.silu(self.conv(x)).permute(2, 0, 1), cache

    def forward(self, src, pos_emb, src_mask=None, src_key_padding_mask=None, warmup=1.0):
        src_att = self.self_attn(
            src, src, src, pos_emb=pos_emb, attn_mask=src_mask,
            key_padding_mask=src_key_padding_mask,
        )[0]  # fmt: skip
        src = src + src_att
        src = src + self.conv_module(src, src_key_padding_mask=src_key_padding_mask)[0]
        return self.norm_final(src + self.feed_forward(src))

    def chunk_forward(
        self, src, pos_emb, states, src_mask=None, src_key_padding_mask=None, warmup=1.0,
        left_context=0, right_context=0,
    ):  # fmt: skip
        assert states[0].shape == (left_context, src.size(1), src.size(2))
        key = torch.cat([states[0], src], dim=0)
        states[0] = key[: key.size(0) - right_context][-left_context:]
        src_att = self.self_attn(
            src, key, key, pos_emb=pos_emb, attn_mask=src_mask,
            key_padding_mask=src_key_padding_mask, left_context=left_context,
        )[0]  # fmt: skip
        src = src + src_att
        conv, states[1] = self.conv_module(src, states[1], right_context)
        src = src + conv
        return self.norm_final(src + self.feed_forward(src)), states
