"""The call of ESPnet's attentions as of release 202511, written from its protocol."""

import math

import torch
from torch import nn


class MultiHeadedAttention(nn.Module):
    def __init__(self, n_head, n_feat, dropout_rate):
        super().__init__()
        self.h, self.d_k = n_head, n_feat // n_head
        self.linear_q = nn.Linear(n_feat, n_feat)
        self.linear_k = nn.Linear(n_feat, n_feat)
        self.linear_v = nn.Linear(n_feat, n_feat)
        self.linear_out = nn.Linear(n_feat, n_feat)
        self.dropout = nn.Dropout(dropout_rate)
        self.dropout_rate = dropout_rate

    def forward(self, query, key, value, mask, expand_kv=False):
        q, k, v = self.linear_q(query), self.linear_k(key), self.linear_v(value)
        q, k, v = (x.unflatten(2, (self.h, self.d_k)).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(self.d_k)
        if mask is not None:
            mask = mask.unsqueeze(1).eq(0)
            scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(mask, 0.0)
        return self.linear_out((self.dropout(weights) @ v).transpose(1, 2).flatten(2))


class RelPositionMultiHeadedAttention(MultiHeadedAttention):
    def forward(self, query, key, value, pos_emb, mask):
        assert pos_emb.size(1) == 2 * key.size(1) - 1
        return super().forward(query, key, value, mask)


class LegacyRelPositionMultiHeadedAttention(MultiHeadedAttention):
    def forward(self, query, key, value, pos_emb, mask):
        assert pos_emb.size(1) == key.size(1)
        return super().forward(query, key, value, mask)
