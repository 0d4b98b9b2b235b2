"""torch.nn.TransformerEncoder, and the adapter for any host that calls nn.MultiheadAttention."""

import torch
from torch import Tensor, nn

from ldsa_nn.hosts import Adapter, Attention, Host, keep_from_padding

__all__ = ["HOSTS", "NOT_HOSTS", "MultiheadAdapter", "describe"]


def describe(old: nn.MultiheadAttention) -> Attention:
    """Read an nn.MultiheadAttention."""
    d = old.embed_dim
    packed = old.in_proj_weight is not None
    return Attention(
        n_head=old.num_heads,
        n_feat=d,
        dropout_rate=old.dropout,
        weight=old.out_proj.weight,
        value_weight=old.in_proj_weight[2 * d :] if packed else old.v_proj_weight,
        value_bias=None if old.in_proj_bias is None else old.in_proj_bias[2 * d :],
        out_weight=old.out_proj.weight,
        out_bias=old.out_proj.bias,
    )


class MultiheadAdapter(Adapter):
    """Takes nn.MultiheadAttention's call for a layer of this package.

    The attributes that nn.TransformerEncoder(Layer) reads are here, with the values that keep both
    off their inference fast path, which would compute attention from the parameters and never call
    this module.
    """

    _qkv_same_embed_dim = False
    in_proj_weight = None
    in_proj_bias = None

    def __init__(self, old: nn.MultiheadAttention, layer: nn.Module, left: int, right: int) -> None:
        super().__init__(old, layer, left, right)
        self.batch_first = old.batch_first
        self.embed_dim = old.embed_dim
        self.num_heads = old.num_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend.

        Args:
            query, key, value: [T,B,D], or [B,T,D] with batch_first, or [T,D].
            key_padding_mask: [B,T] (or [T]), bool with True = padding or additive floating point.
            need_weights: must be False.
            attn_mask: [T,T] or [B*H,T,T], bool with True = forbidden or additive. It has no effect
                and may forbid no frame of the window.
            average_attn_weights: of no effect without need_weights.
            is_causal: the host asks for a causal layer: right must be 0, and attn_mask is unused.

        Returns:
            (out, None), out in query's shape.

        Raises:
            ValueError, TypeError: a mask that the window cannot follow, weights or a nested tensor
                are asked for, or the layer refuses its input.
        """
        if need_weights:
            raise ValueError(
                "need_weights must be False: the weights have no [T,T] form here; call the "
                "adapter's .layer with need_weights=True for its windows' [B,H,T,W]"
            )
        if query.is_nested:
            raise ValueError("query must be a padded tensor with a mask, got a nested tensor")
        if is_causal and self.right > 0:
            raise ValueError(
                f"is_causal=True needs a window with right=0, got right={self.right}: replace with "
                "right=0, or leave the causal mask out"
            )
        keep = None if key_padding_mask is None else keep_from_padding(key_padding_mask)
        single = query.dim() == 2
        if single:
            query, key, value = query[None], key[None], value[None]
            keep = None if keep is None else keep[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if keep is not None and torch.compiler.is_compiling():
            # A host may make its mask as wide as a length that it read back: say which that is.
            torch._check(keep.shape[1] == query.shape[1])
        elif keep is not None and keep.shape != query.shape[:2]:
            came = list(keep.shape[1:] if single else keep.shape)
            form = f"[T] with T={query.shape[1]}"
            if not single:
                form = f"[B,T] with B={query.shape[0]}, T={query.shape[1]}"
            raise ValueError(f"key_padding_mask must have shape {form}, got {came}")
        if attn_mask is not None and not is_causal:
            self._check_window(attn_mask, keep, query.shape[0], query.shape[1])
        out = self.layer(query, key, value, mask=keep, lengths=None)
        if single:
            return out[0], None
        return out if self.batch_first else out.transpose(0, 1), None

    def _check_window(
        self, attn_mask: Tensor, keep: Tensor | None, batch: int, frames: int
    ) -> None:
        """Raise unless attn_mask leaves free what the window reads, frames outside keep apart."""
        shapes = [[frames, frames], [batch * self.num_heads, frames, frames]]
        if list(attn_mask.shape) not in shapes:
            raise ValueError(
                f"attn_mask must have shape [T,T] or [B*H,T,T], {shapes[0]} or {shapes[1]}, got "
                f"{list(attn_mask.shape)}"
            )
        advice = (
            f"the window (left={self.left}, right={self.right}) decides what a frame sees. Leave "
            "the mask out; give padding as src_key_padding_mask, and causality as right=0 with "
            "is_causal=True"
        )
        if torch.compiler.is_compiling():
            raise ValueError(f"attn_mask cannot be checked in a compiled model: {advice}")
        free = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0
        needed = torch.ones(frames, frames, dtype=torch.bool, device=attn_mask.device)
        needed = needed.triu(-self.left).tril(self.right)
        if keep is not None:
            if attn_mask.dim() == 3:
                keep = keep.repeat_interleave(self.num_heads, 0)
            needed = needed & keep[:, :, None] & keep[:, None, :]
        if (needed & ~free).any():
            raise ValueError(f"attn_mask forbids or biases frames of the window: {advice}")


def _settings(model: nn.Module, parents: list[nn.Module]) -> list[tuple[nn.Module, str, object]]:
    """Keep encoders with a replaced layer from handing their layers nested tensors."""
    replaced = {id(parent) for parent in parents}
    return [
        (module, "use_nested_tensor", False)
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoder)
        and any(id(child) in replaced for child in module.modules())
    ]


HOSTS = (
    Host(
        parent="torch.nn.modules.transformer.TransformerEncoderLayer",
        attribute="self_attn",
        attention=("torch.nn.modules.activation.MultiheadAttention",),
        describe=describe,
        adapter=MultiheadAdapter,
        warnings=(
            "torch.nn.TransformerEncoder: the window does not follow a causal or chunk mask "
            "(mask=, is_causal=): is_causal=True raises unless right=0, any other mask raises if "
            "it forbids a frame of the window",
        ),
        settings=_settings,
    ),
)

NOT_HOSTS = {
    "torch.nn.modules.transformer.TransformerDecoderLayer": (
        "a decoder's attention is causal or looks at another sequence"
    ),
}
