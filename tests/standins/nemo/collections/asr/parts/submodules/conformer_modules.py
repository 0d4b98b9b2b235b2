"""NeMo's Conformer layer as of nemo_toolkit 3.0.0, written from its protocol."""

import torch
from nemo.collections.asr.parts.submodules.multi_head_attention import (
    MultiHeadAttention,
    RelPositionMultiHeadAttention,
    RelPositionMultiHeadAttentionLongformer,
)
from torch import nn
from torch.nn import functional as F

ATTENTIONS = {
    "abs_pos": MultiHeadAttention,
    "rel_pos": RelPositionMultiHeadAttention,
    "rel_pos_local_attn": RelPositionMultiHeadAttentionLongformer,
}


class CausalConv(nn.Conv1d):
    def __init__(self, width, kernel):
        super().__init__(width, width, kernel, groups=width)
        self._max_cache_len = kernel - 1
        self.cache_drop_size = None

    def forward(self, x, cache=None):
        if cache is None:
            return super().forward(F.pad(x, (self._max_cache_len, 0)))
        x = torch.cat([cache, x], dim=-1)
        after = x[:, :, : x.shape[2] - self.cache_drop_size][:, :, -cache.size(-1) :]
        return super().forward(x), after


class ConformerLayer(nn.Module):
    def __init__(self, d_model, d_ff, self_attention_model, n_heads, kernel, dropout, dropout_att):
        super().__init__()
        self.self_attention_model = self_attention_model
        self.norm_self_att = nn.LayerNorm(d_model)
        self.self_attn = ATTENTIONS[self_attention_model](n_heads, d_model, dropout_att)
        self.conv = CausalConv(d_model, kernel)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(d_model), nn.Linear(d_model, d_ff), nn.SiLU(), nn.Dropout(dropout),
            nn.Linear(d_ff, d_model),
        )  # fmt: skip

    def forward(
        self, x, att_mask=None, pos_emb=None, pad_mask=None, cache_last_channel=None,
        cache_last_time=None,
    ):  # fmt: skip
        y = self.norm_self_att(x)
        call = dict(query=y, key=y, value=y, cache=cache_last_channel)
        if self.self_attention_model == "rel_pos":
            y = self.self_attn(mask=att_mask, pos_emb=pos_emb, **call)
        elif self.self_attention_model == "rel_pos_local_attn":
            y = self.self_attn(pad_mask=pad_mask, pos_emb=pos_emb, **call)
        else:
            y = self.self_attn(mask=att_mask, **call)
        if cache_last_channel is not None:
            y, cache_last_channel = y
        x = x + y
        y = x.transpose(1, 2)
        if pad_mask is not None:
            y = y.masked_fill(pad_mask.unsqueeze(1), 0.0)
        y = self.conv(y, cache_last_time)
        if cache_last_time is not None:
            y, cache_last_time = y
        x = x + F.silu(y).transpose(1, 2)
        x = x + self.feed_forward(x)
        return x if cache_last_channel is None else (x, cache_last_channel, cache_last_time)
