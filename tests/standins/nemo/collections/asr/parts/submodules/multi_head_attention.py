"""The call of NeMo's attentions as of nemo_toolkit 3.0.0, written from its protocol."""

import math

import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, n_head, n_feat, dropout_rate, max_cache_len=0):
        super().__init__()
        self.cache_drop_size = None
        self._max_cache_len = max_cache_len
        self.dropout_rate = dropout_rate
        self.h, self.d_k = n_head, n_feat // n_head
        self.linear_q = nn.Linear(n_feat, n_feat)
        self.linear_k = nn.Linear(n_feat, n_feat)
        self.linear_v = nn.Linear(n_feat, n_feat)
        self.linear_out = nn.Linear(n_feat, n_feat)
        self.dropout = nn.Dropout(dropout_rate)

    def forward(self, query, key, value, mask, pos_emb=None, cache=None):
        if cache is not None:
            key = value = torch.cat([cache, key], dim=1)
            kept = query.shape[1] - self.cache_drop_size
            cache = torch.cat([cache[:, kept:, :], query[:, :kept, :]], dim=1)
        q, k, v = self.linear_q(query), self.linear_k(key), self.linear_v(value)
        q, k, v = (x.unflatten(2, (self.h, self.d_k)).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1), -10000.0)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(mask.unsqueeze(1), 0.0)
        out = self.linear_out((self.dropout(weights) @ v).transpose(1, 2).flatten(2))
        return out if cache is None else (out, cache)


class RelPositionMultiHeadAttention(MultiHeadAttention):
    def forward(self, query, key, value, mask, pos_emb, cache=None):
        return super().forward(query, key, value, mask, None, cache)


class RelPositionMultiHeadAttentionLongformer(RelPositionMultiHeadAttention):
    def forward(self, query, key, value, pad_mask, pos_emb, cache=None):
        return super().forward(query, key, value, pad_mask[:, None], pos_emb, cache)
