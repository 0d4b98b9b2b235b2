"""ESPnet2's Branchformer as of release 202511, its other branch reduced to single frames."""

from espnet2.asr.encoder.conformer_encoder import Encoder, feed_forward
from torch import nn


class BranchformerEncoderLayer(nn.Module):
    def __init__(self, size, attn, cgmlp, dropout_rate):
        super().__init__()
        self.attn, self.cgmlp = attn, cgmlp
        self.norm_mha, self.norm_mlp = nn.LayerNorm(size), nn.LayerNorm(size)
        self.dropout = nn.Dropout(dropout_rate)

    def forward(self, x_input, mask, cache=None):
        if cache is not None:
            raise NotImplementedError
        x, pos_emb = x_input
        y = self.norm_mha(x)
        y = self.dropout(self.attn(y, y, y, pos_emb, mask))
        return (x + y + self.dropout(self.cgmlp(self.norm_mlp(x))), pos_emb), mask


class BranchformerEncoder(Encoder):
    layer = BranchformerEncoderLayer

    def __init__(
        self, input_size, output_size, attention_heads, cgmlp_linear_units, cgmlp_conv_kernel,
        num_blocks, dropout_rate, positional_dropout_rate, attention_dropout_rate, input_layer,
        use_flash_attn,
    ):  # fmt: skip
        super().__init__(
            lambda attention: self.layer(
                output_size, attention, feed_forward(output_size, cgmlp_linear_units, 0.0),
                dropout_rate,
            ),
            input_size, output_size, attention_heads, num_blocks, dropout_rate,
            attention_dropout_rate, "rel_selfattn",
        )  # fmt: skip
