"""Drop-in attention layers for speech encoders."""

from ldsa_nn import convert
from ldsa_nn.encoder import ConformerEncoder
from ldsa_nn.functional import (
    eager_ldsa,
    ldsa_local_attention,
    ldsa_weights,
    tiled_delta_rule,
)
from ldsa_nn.ldsa import HybridAttention, LocalDenseSynthesizerAttention
from ldsa_nn.replace import load_replaced, replace_attention
from ldsa_nn.sla import SystolicLinearAttention

__all__ = [
    "ConformerEncoder",
    "HybridAttention",
    "LocalDenseSynthesizerAttention",
    "SystolicLinearAttention",
    "convert",
    "eager_ldsa",
    "ldsa_local_attention",
    "ldsa_weights",
    "load_replaced",
    "replace_attention",
    "tiled_delta_rule",
]
