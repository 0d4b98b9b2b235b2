"""The layers of WeNet as of December 2025 (commit 0154699), written from their protocol."""

import torch
from torch import nn
from torch.nn import functional as F
from wenet.models.transformer.attention import NO_CACHE, NONE


def feed_forward(size, hidden, dropout_rate):
    return nn.Sequential(
        nn.LayerNorm(size), nn.Linear(size, hidden), nn.SiLU(), nn.Dropout(dropout_rate),
        nn.Linear(hidden, size),
    )  # fmt: skip


class TransformerEncoderLayer(nn.Module):
    def __init__(self, size, self_attn, hidden, dropout_rate):
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward(size, hidden, dropout_rate)
        self.norm1 = nn.LayerNorm(size)

    def forward(self, x, mask, pos_emb, mask_pad=NONE, att_cache=(NO_CACHE,) * 2, cnn_cache=None):
        y = self.norm1(x)
        attended, att_cache = self.self_attn(y, y, y, mask, pos_emb, cache=att_cache)
        x = x + attended
        return x + self.feed_forward(x), mask, att_cache, x.new_zeros(0, 0, 0)


class ConformerEncoderLayer(nn.Module):
    def __init__(self, size, self_attn, hidden, dropout_rate, kernel):
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward(size, hidden, dropout_rate)
        self.norm_mha = nn.LayerNorm(size)
        self.conv = nn.Conv1d(size, size, kernel, groups=size)
        self.lorder = kernel - 1

    def forward(
        self, x, mask, pos_emb, mask_pad=NONE, att_cache=(NO_CACHE,) * 2, cnn_cache=NO_CACHE
    ):
        y = self.norm_mha(x)
        attended, att_cache = self.self_attn(y, y, y, mask, pos_emb, att_cache)
        x = x + attended
        y = x.transpose(1, 2)
        if mask_pad.size(2) > 0:
            y = y.masked_fill(~mask_pad, 0.0)
        before = cnn_cache if cnn_cache.size(2) else y.new_zeros(*y.shape[:2], self.lorder)
        y = torch.cat([before, y], dim=2)
        cnn_cache = y[:, :, -self.lorder :]
        x = x + F.silu(self.conv(y)).transpose(1, 2)
        return x + self.feed_forward(x), mask, att_cache, cnn_cache
