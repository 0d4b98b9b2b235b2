"""torchaudio's Conformer."""

from ldsa_nn.hosts import Host
from ldsa_nn.hosts.torch import MultiheadAdapter, describe

__all__ = ["HOSTS", "NOT_HOSTS"]

HOSTS = (
    Host(
        parent="torchaudio.models.conformer.ConformerLayer",
        attribute="self_attn",
        attention=("torch.nn.modules.activation.MultiheadAttention",),
        describe=describe,
        adapter=MultiheadAdapter,
        warnings=(
            "torchaudio.models.Conformer: its convolution ignores the mask and lets padding leak "
            "into the frames beside it, and it is not causal, with right=0 neither",
        ),
    ),
)

NOT_HOSTS = {
    "torchaudio.models.emformer._EmformerAttention": (
        "Emformer is no drop-in host: its attention takes the segments, right contexts and memory "
        "of a stream, not a sequence"
    ),
}
