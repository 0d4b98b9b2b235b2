"""The call of WeNet's attentions as of December 2025 (0154699), written from its protocol."""

import math

import torch
from torch import nn

NONE = torch.ones((0, 0, 0), dtype=torch.bool)
NO_POSITIONS = torch.empty(0)
NO_CACHE = torch.zeros(0, 0, 0, 0)


class MultiHeadedAttention(nn.Module):
    def __init__(self, n_head, n_feat, dropout_rate, use_sdpa=False):
        super().__init__()
        self.h, self.d_k = n_head, n_feat // n_head
        self.linear_q = nn.Linear(n_feat, n_feat)
        self.linear_k = nn.Linear(n_feat, n_feat)
        self.linear_v = nn.Linear(n_feat, n_feat)
        self.linear_out = nn.Linear(n_feat, n_feat)
        self.dropout = nn.Dropout(dropout_rate)
        self.use_sdpa = use_sdpa

    def heads(self, x):
        return x.unflatten(2, (self.h, self.d_k)).transpose(1, 2)

    def scores(self, q, k, pos_emb):
        return q @ k.transpose(2, 3)

    def forward(
        self, query, key, value, mask=NONE, pos_emb=NO_POSITIONS, cache=(NO_CACHE, NO_CACHE)
    ):
        q, k, v = self.linear_q(query), self.linear_k(key), self.linear_v(value)
        q, k, v = (self.heads(x) for x in (q, k, v))
        if not self.training:
            if cache[0].size(0) > 0:
                k, v = (torch.cat(pair, dim=2) for pair in zip(cache, (k, v), strict=True))
            cache = (k, v)
        scores = self.scores(q, k, pos_emb) / math.sqrt(self.d_k)
        if self.use_sdpa:
            assert mask.dtype != torch.bool
            scores = scores + mask.unsqueeze(1)
        elif mask.size(-1) > 0:
            forbidden = mask.unsqueeze(1).eq(0)[..., : scores.size(-1)]
            scores = scores.masked_fill(forbidden, -math.inf)
        weights = torch.nan_to_num(scores.softmax(-1))
        out = (self.dropout(weights) @ v).transpose(1, 2).flatten(2)
        return self.linear_out(out), cache


class RelPositionMultiHeadedAttention(MultiHeadedAttention):
    def __init__(self, n_head, n_feat, dropout_rate, use_sdpa=False):
        super().__init__(n_head, n_feat, dropout_rate, use_sdpa)
        self.linear_pos = nn.Linear(n_feat, n_feat, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(self.h, self.d_k))
        self.pos_bias_v = nn.Parameter(torch.zeros(self.h, self.d_k))

    def scores(self, q, k, pos_emb):
        p = self.heads(self.linear_pos(pos_emb))
        content = (q + self.pos_bias_u[:, None]) @ k.transpose(2, 3)
        return content + (q + self.pos_bias_v[:, None]) @ p.transpose(2, 3)
