"""Drop-in attention layers for speech encoders."""

from ldsa_nn import convert
from ldsa_nn.encoder import ConformerEncoder
from ldsa_nn.functional import eager_ldsa, ldsa_local_attention, ldsa_weights
from ldsa_nn.ldsa import HybridAttention, LocalDenseSynthesizerAttention
from ldsa_nn.replace import load_replaced, replace_attention

__all__ = [
    "ConformerEncoder",
    "HybridAttention",
    "LocalDenseSynthesizerAttention",
    "convert",
    "eager_ldsa",
    "ldsa_local_attention",
    "ldsa_weights",
    "load_replaced",
    "replace_attention",
]
