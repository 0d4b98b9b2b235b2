"""NeMo's encoder behind its front end, as of nemo_toolkit 3.0.0, written from its protocol."""

from types import SimpleNamespace

import torch
from nemo.collections.asr.parts.submodules.conformer_modules import (
    ATTENTIONS,
    CausalConv,
    ConformerLayer,
)
from nemo.collections.asr.parts.submodules.multi_head_attention import MultiHeadAttention
from torch import nn


class ConformerEncoder(nn.Module):
    def __init__(
        self, feat_in, n_layers, d_model, n_heads, ff_expansion_factor, self_attention_model,
        att_context_size, att_context_style, conv_kernel_size, conv_norm_type, conv_context_size,
        dropout, dropout_pre_encoder, dropout_emb, dropout_att,
    ):  # fmt: skip
        super().__init__()
        assert conv_context_size == "causal"
        self.d_model, self.kernel = d_model, conv_kernel_size
        self.self_attention_model = self_attention_model
        self.att_context_size, self.att_context_style = att_context_size, att_context_style
        self.layers = nn.ModuleList(
            ConformerLayer(
                d_model, d_model * ff_expansion_factor, self_attention_model, n_heads,
                conv_kernel_size, dropout, dropout_att,
            )
            for _ in range(n_layers)
        )  # fmt: skip
        self.setup_streaming_params()

    def setup_streaming_params(self):
        left, right = self.att_context_size
        ahead = right * len(self.layers) if self.att_context_style == "regular" else 0
        self.streaming_cfg = SimpleNamespace(
            cache_drop_size=ahead, last_channel_cache_size=left if left >= 0 else 10000
        )
        for m in self.layers.modules():
            if hasattr(m, "_max_cache_len") and isinstance(m, MultiHeadAttention | CausalConv):
                m.cache_drop_size = ahead

    def get_initial_cache_state(self, batch_size=1):
        n, size = len(self.layers), self.streaming_cfg.last_channel_cache_size
        return (
            torch.zeros(n, batch_size, size, self.d_model),
            torch.zeros(n, batch_size, self.d_model, self.kernel - 1),
            torch.zeros(batch_size, dtype=torch.int64),
        )

    def _create_masks(self, lengths, frames, offset):
        t = torch.arange(frames)
        keep = t < lengths[:, None]
        if offset is not None:
            keep = keep & (t >= offset[:, None])
        if self.self_attention_model == "rel_pos_local_attn":
            return ~keep, None
        left, right = self.att_context_size
        if self.att_context_style == "regular":
            pairs = torch.ones(frames, frames, dtype=torch.bool)
            pairs = pairs.triu(-left) if left >= 0 else pairs
            pairs = pairs.tril(right) if right >= 0 else pairs
        else:
            chunk = t // (right + 1)
            back = chunk[:, None] - chunk
            pairs = (back >= 0) & (back <= left // (right + 1))
        return ~keep, ~(keep[:, None, :] & keep[:, :, None] & pairs)

    def forward(
        self, audio_signal, length, cache_last_channel=None, cache_last_time=None,
        cache_last_channel_len=None, bypass_pre_encode=False,
    ):  # fmt: skip
        assert bypass_pre_encode
        x, frames, past, offset = audio_signal, audio_signal.size(1), 0, None
        if cache_last_channel is not None:
            past = self.streaming_cfg.last_channel_cache_size
            offset = past - cache_last_channel_len
        pad_mask, att_mask = self._create_masks(length + past, frames + past, offset)
        pad_mask = pad_mask[:, past:]
        att_mask = None if att_mask is None else att_mask[:, past:]
        channels, times = [], []
        for i, layer in enumerate(self.layers):
            if cache_last_channel is None:
                x = layer(x=x, att_mask=att_mask, pos_emb=None, pad_mask=pad_mask)
                continue
            x, channel, time = layer(
                x=x, att_mask=att_mask, pos_emb=None, pad_mask=pad_mask,
                cache_last_channel=cache_last_channel[i], cache_last_time=cache_last_time[i],
            )  # fmt: skip
            channels.append(channel)
            times.append(time)
        if cache_last_channel is None:
            return x.transpose(1, 2), length
        seen = cache_last_channel_len + frames - self.streaming_cfg.cache_drop_size
        return (
            x.transpose(1, 2), length, torch.stack(channels), torch.stack(times),
            torch.clamp(seen, max=past),
        )  # fmt: skip

    def change_attention_model(self, self_attention_model=None, att_context_size=None):
        for m in self.modules():
            if type(m) is ConformerLayer:
                new = ATTENTIONS[self_attention_model](m.self_attn.h, self.d_model, 0.0)
                new.load_state_dict(m.self_attn.state_dict(), strict=False)
                m.self_attn, m.self_attention_model = new, self_attention_model
