"""ESPnet's Conformer layer as of release 202511, without its convolution."""

from espnet.nets.pytorch_backend.transformer import encoder_layer


class EncoderLayer(encoder_layer.EncoderLayer):
    pass
