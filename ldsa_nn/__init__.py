"""Drop-in attention layers for speech encoders."""

from ldsa_nn.functional import eager_ldsa, ldsa_local_attention, ldsa_weights
from ldsa_nn.ldsa import HybridAttention, LocalDenseSynthesizerAttention

__all__ = [
    "HybridAttention",
    "LocalDenseSynthesizerAttention",
    "eager_ldsa",
    "ldsa_local_attention",
    "ldsa_weights",
]
