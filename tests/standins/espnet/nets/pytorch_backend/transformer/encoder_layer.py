"""ESPnet's layers as of release 202511, written from their protocol."""

import torch
from torch import nn


class EncoderLayer(nn.Module):
    """Also the base of the stand-in for the Conformer's, whose convolution is not here."""

    def __init__(self, size, self_attn, feed_forward, dropout_rate):
        super().__init__()
        self.size = size
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.dropout = nn.Dropout(dropout_rate)

    def forward(self, x, mask, cache=None):
        x, pos_emb = x if isinstance(x, tuple) else (x, None)
        residual, x = x, self.norm1(x)
        query = x
        if cache is not None:
            assert cache.shape == (x.shape[0], x.shape[1] - 1, self.size)
            query, residual = x[:, -1:, :], residual[:, -1:, :]
            mask = None if mask is None else mask[:, -1:, :]
        if pos_emb is None:
            attended = self.self_attn(query, x, x, mask)
        else:
            attended = self.self_attn(query, x, x, pos_emb, mask)
        x = residual + self.dropout(attended)
        x = x + self.dropout(self.feed_forward(self.norm2(x)))
        if cache is not None:
            x = torch.cat([cache, x], dim=1)
        return (x if pos_emb is None else (x, pos_emb)), mask
