"""Attention layers' kernels: fused in Triton, each with an eager PyTorch path.

Local dense synthesizer attention, and the tiled delta rule of systolic linear attention.
"""

from . import gated_norm, gates, layers, short_conv  # noqa: F401 - ldsa_nn's, not public
from .delta_op import tiled_delta_rule
from .op import ldsa_local_attention
from .reference import eager_ldsa, ldsa_weights

__all__ = ["eager_ldsa", "layers", "ldsa_local_attention", "ldsa_weights", "tiled_delta_rule"]
