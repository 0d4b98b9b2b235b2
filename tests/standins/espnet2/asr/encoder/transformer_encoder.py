"""ESPnet2's Transformer encoder behind its front end as of release 202511."""

from espnet.nets.pytorch_backend.transformer.encoder_layer import EncoderLayer
from espnet2.asr.encoder.conformer_encoder import Encoder, feed_forward


class TransformerEncoder(Encoder):
    def __init__(
        self, input_size, output_size, attention_heads, linear_units, num_blocks, dropout_rate,
        positional_dropout_rate, attention_dropout_rate, input_layer,
    ):  # fmt: skip
        super().__init__(
            lambda attention: EncoderLayer(
                output_size, attention, feed_forward(output_size, linear_units, dropout_rate),
                dropout_rate,
            ),
            input_size, output_size, attention_heads, num_blocks, dropout_rate,
            attention_dropout_rate,
        )  # fmt: skip
