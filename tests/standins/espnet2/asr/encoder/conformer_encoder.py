"""ESPnet2's encoders behind their front ends as of release 202511, written from their protocol."""

import torch
from espnet.nets.pytorch_backend.conformer.encoder_layer import EncoderLayer
from espnet.nets.pytorch_backend.transformer.attention import (
    LegacyRelPositionMultiHeadedAttention,
    MultiHeadedAttention,
    RelPositionMultiHeadedAttention,
)
from torch import nn

ATTENTIONS = {
    ("selfattn", "latest"): MultiHeadedAttention,
    ("rel_selfattn", "latest"): RelPositionMultiHeadedAttention,
    ("rel_selfattn", "legacy"): LegacyRelPositionMultiHeadedAttention,
}


class Encoder(nn.Module):
    """`layer` makes a layer from an attention."""

    def __init__(
        self, layer, input_size, output_size, attention_heads, num_blocks, dropout_rate,
        attention_dropout_rate, kind="selfattn", rel_pos_type="latest",
    ):  # fmt: skip
        super().__init__()
        attention = ATTENTIONS[kind, rel_pos_type]
        self.relative, self.legacy = kind == "rel_selfattn", rel_pos_type == "legacy"
        self.embed = nn.Sequential(nn.Linear(input_size, output_size), nn.Dropout(dropout_rate))
        self.encoders = nn.ModuleList(
            layer(attention(attention_heads, output_size, attention_dropout_rate))
            for _ in range(num_blocks)
        )
        self.after_norm = nn.LayerNorm(output_size)

    def forward(self, xs_pad, ilens):
        masks = (torch.arange(xs_pad.size(1)) < ilens[:, None])[:, None, :]
        xs = self.embed(xs_pad)
        if self.relative:
            frames = xs.size(1)
            xs = xs, xs.new_zeros(1, frames if self.legacy else 2 * frames - 1, xs.size(2))
        for layer in self.encoders:
            xs, masks = layer(xs, masks)
        xs = xs[0] if self.relative else xs
        return self.after_norm(xs), masks.squeeze(1).sum(1), None


def feed_forward(size, hidden, dropout_rate):
    return nn.Sequential(
        nn.Linear(size, hidden), nn.SiLU(), nn.Dropout(dropout_rate), nn.Linear(hidden, size)
    )


class ConformerEncoder(Encoder):
    def __init__(
        self, input_size, output_size, attention_heads, linear_units, num_blocks, dropout_rate,
        positional_dropout_rate, attention_dropout_rate, input_layer, rel_pos_type,
        pos_enc_layer_type, selfattention_layer_type, use_cnn_module,
    ):  # fmt: skip
        assert not use_cnn_module
        super().__init__(
            lambda attention: EncoderLayer(
                output_size, attention, feed_forward(output_size, linear_units, dropout_rate),
                dropout_rate,
            ),
            input_size, output_size, attention_heads, num_blocks, dropout_rate,
            attention_dropout_rate, selfattention_layer_type, rel_pos_type,
        )  # fmt: skip
