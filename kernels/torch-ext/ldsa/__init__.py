"""Local dense synthesizer attention as one fused Triton kernel with an eager PyTorch reference."""

from . import layers
from .op import ldsa_local_attention
from .reference import eager_ldsa, ldsa_weights

__all__ = ["eager_ldsa", "layers", "ldsa_local_attention", "ldsa_weights"]
