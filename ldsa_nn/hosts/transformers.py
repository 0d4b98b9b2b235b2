"""Hugging Face transformers: wav2vec 2.0 and kin, WavLM, Conformers, Whisper and more."""

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldsa_nn.hosts import (
    Adapter,
    Attention,
    BiasedAdapter,
    Host,
    drop_unused_bias,
    keep_from_mask,
)

__all__ = ["HOSTS", "NOT_HOSTS", "EncoderAdapter", "WavLMAdapter", "from_directory"]

# What an attention may be asked for that a window of the same sequence cannot give.
_REFUSED = {
    "key_value_states": "attention to another sequence",
    "cache": "a key-value cache",
    "past_key_value": "a key-value cache",
    "past_key_values": "a key-value cache",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
    "layer_head_mask": "a mask of heads",
    "head_mask": "a mask of heads",
}


def _projections(old: Any) -> tuple[Any, Any, Any]:
    """The query, value and output projections, by any of the names that hosts give them."""
    if hasattr(old, "linear_q"):
        return old.linear_q, old.linear_v, old.linear_out
    return old.q_proj, old.v_proj, old.out_proj if hasattr(old, "out_proj") else old.o_proj


def describe(old: Any) -> Attention:
    """Read an attention of any of the hosts."""
    query, value, out = _projections(old)
    head_dim = old.head_size if hasattr(old, "head_size") else old.head_dim
    dropout: Any = old.attention_dropout if hasattr(old, "attention_dropout") else old.dropout
    return Attention(
        n_head=query.out_features // head_dim,
        n_feat=query.in_features,
        dropout_rate=float(getattr(dropout, "p", dropout)),
        weight=out.weight,
        value_weight=value.weight,
        value_bias=value.bias,
        out_weight=out.weight,
        out_bias=out.bias,
    )


def _returned(old: nn.Module) -> int:
    """How many values an attention's forward returns, which its annotation may get wrong."""
    try:
        source = inspect.getsource(inspect.unwrap(type(old).forward))
    except (OSError, TypeError):
        return 2
    tree = ast.parse(textwrap.dedent(source))
    counts = {
        len(node.value.elts)
        for node in ast.walk(tree)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)
    }
    return counts.pop() if len(counts) == 1 else 2


class EncoderAdapter(Adapter):
    """Takes the call of an encoder's self-attention for a layer of this package.

    Arguments are taken by the names and in the order of the replaced class in the release that is
    installed; what only concerns the position or the kind of attention has no effect.
    """

    def __init__(self, old: nn.Module, layer: nn.Module, left: int, right: int) -> None:
        super().__init__(old, layer, left, right)
        parameters = list(inspect.signature(type(old).forward).parameters.values())[1:]
        self._order = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._returned = _returned(old)
        self._weighs = "need_weights" in inspect.signature(layer.forward).parameters

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        """Attend.

        Args:
            hidden_states: [B,T,D].
            attention_mask: None; [B,T] or [B,1,T,T] (its diagonal counts), bool or integer with
                nonzero = keep, or additive floating point.
            output_attentions: also return the weights, where the layer can give them.
            is_causal: True needs a window with right=0.
            args, kwargs: these and all others that the replaced class takes.

        Returns:
            (out, weights), or with further None to as many values as the replaced class returns:
            out [B,T,D]; weights [B,H,T,T], 0 outside the window, or None.

        Raises:
            TypeError: an argument that the replaced class does not take.
            ValueError: a cache, another sequence, packed sequences or a head mask is given; the
                mask has a wrong shape or holes; is_causal with right > 0.
        """
        given = self._given(args, kwargs)
        out, weights = self._attend(given)
        return (out, weights, *[None] * (self._returned - 2))

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, checked."""
        if len(args) > len(self._order):
            raise TypeError(f"forward takes {len(self._order)} arguments, got {len(args)}")
        given = dict(zip(self._order, args, strict=False))
        for name, value in kwargs.items():
            if name in given:
                raise TypeError(f"forward got two values for {name}")
            if name not in self._order and not self._open:
                raise TypeError(f"forward takes no argument {name}, nor did the attention replaced")
            given[name] = value
        if "hidden_states" not in given:
            raise TypeError("forward needs hidden_states")
        for name, what in _REFUSED.items():
            if given.get(name) is not None:
                raise ValueError(f"{name} must be None: a window cannot follow {what}")
        if given.get("is_causal") and self.right > 0:
            raise ValueError(
                f"is_causal=True needs a window with right=0, got right={self.right}: replace with "
                "right=0"
            )
        return given

    def _attend(self, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        x = given["hidden_states"]
        mask = given.get("attention_mask")
        keep = None if mask is None else keep_from_mask(mask, x.shape[0], x.shape[1])
        if not (given.get("output_attentions") and self._weighs):
            return self.layer(x, x, x, mask=keep, lengths=None), None
        out, weights = self.layer(x, x, x, mask=keep, lengths=None, need_weights=True)
        return out, _square(weights, self.left)


def _square(weights: Tensor, left: int) -> Tensor:
    """Weights of windows [B,H,T,W] as attention weights [B,H,T,T]."""
    frames, window = weights.shape[2:]
    # Row t of the padded band, one longer than the band's stride, begins t frames further right.
    band = F.pad(weights, (0, frames)).flatten(2)[..., : frames * (frames + window - 1)]
    return band.view(*weights.shape[:3], frames + window - 1)[..., left : left + frames]


class WavLMAdapter(EncoderAdapter, BiasedAdapter):
    """As `EncoderAdapter`, and hands on the position bias that layers not replaced still add."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        """Attend; the third value is position_bias [B*H,T,T], made here if this layer owns it."""
        given = self._given(args, kwargs)
        out, weights = self._attend(given)
        bias = given.get("position_bias")
        if bias is None:
            bias = self.position_bias(*out.shape[:2])
            bias = None if bias is None else bias.flatten(0, 1)
        return out, weights, bias


def from_directory(path: Path) -> nn.Module:
    """The model that a directory with a config.json is of, on the meta device, without weights."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: transformers cannot read its config.json: {error}") from error
    named = getattr(config, "architectures", None) or []
    of = getattr(transformers, named[0], None) if named else None
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config) if of is None else of(config)


_LOADING = (
    "transformers: from_pretrained of a replaced model's files makes the original model with "
    "random attention and only logs that: replace and load with load_replaced",
    "transformers: output_attentions=True records the layers that keep their own attention alone",
)
_CAUSAL = "is not causal, with right=0 neither"


def _hosts() -> tuple[Host, ...]:
    def host(
        where: str,
        parent: str,
        attribute: str,
        attention: str,
        *notes: str,
        adapter: type[Adapter] = EncoderAdapter,
        **more: Any,
    ) -> Host:
        module = f"transformers.models.{where.replace('/', '.modeling_')}"
        name = attention.removesuffix("Attention").removesuffix("Self")
        return Host(
            parent=f"{module}.{parent}",
            attribute=attribute,
            attention=(f"{module}.{attention}",),
            describe=describe,
            adapter=adapter,
            warnings=(*(f"transformers {name}: {note}" for note in notes), *_LOADING),
            **more,
        )

    position = f"its positional convolution {_CAUSAL}"
    group = (
        "where feat_extract_norm is 'group', its feature encoder normalises over time and so lets "
        "padding leak, in the original too"
    )
    hosts = []
    for where, name in (
        ("wav2vec2/wav2vec2", "Wav2Vec2"),
        ("hubert/hubert", "Hubert"),
        ("unispeech/unispeech", "UniSpeech"),
        ("unispeech_sat/unispeech_sat", "UniSpeechSat"),
        ("wavlm/wavlm", "WavLM"),
    ):
        more: dict[str, Any] = {}
        if name == "WavLM":
            more = dict(adapter=WavLMAdapter, settings=drop_unused_bias)
        hosts += [
            host(where, f"{name}{layer}", "attention", f"{name}Attention", position, group, **more)
            for layer in ("EncoderLayer", "EncoderLayerStableLayerNorm")
        ]
    conformer = f"its convolution {_CAUSAL}"
    hosts += [
        host(
            "data2vec/data2vec_audio",
            "Data2VecAudioEncoderLayer",
            "attention",
            "Data2VecAudioAttention",
            "its positional convolutions let padding leak, in the original too, and are not causal",
        ),
        host(
            "wav2vec2_conformer/wav2vec2_conformer",
            "Wav2Vec2ConformerEncoderLayer",
            "self_attn",
            "Wav2Vec2ConformerSelfAttention",
            "its convolution ignores the mask and lets padding leak into the frames beside it, in "
            f"the original too, and {_CAUSAL}",
            group,
        ),
        host(
            "wav2vec2_bert/wav2vec2_bert",
            "Wav2Vec2BertEncoderLayer",
            "self_attn",
            "Wav2Vec2BertSelfAttention",
        ),
        host(
            "seamless_m4t/seamless_m4t",
            "SeamlessM4TConformerEncoderLayer",
            "self_attn",
            "SeamlessM4TConformerSelfAttention",
            conformer,
        ),
        host(
            "seamless_m4t_v2/seamless_m4t_v2",
            "SeamlessM4Tv2ConformerEncoderLayer",
            "self_attn",
            "SeamlessM4Tv2ConformerSelfAttention",
            "the window does not follow its chunk mask (speech_encoder_chunk_size): a frame sees "
            "left and right frames across the chunk's edges",
        ),
        host(
            "whisper/whisper",
            "WhisperEncoderLayer",
            "self_attn",
            "WhisperAttention",
            "its encoder has no mask: the padding to 30 s counts as frames, in the original too, "
            f"and its convolution {_CAUSAL}",
        ),
        host(
            "moonshine/moonshine",
            "MoonshineEncoderLayer",
            "self_attn",
            "MoonshineAttention",
            "its front end normalises over time: padding leaks, in the original too, and it "
            f"{_CAUSAL}",
        ),
        host(
            "parakeet/parakeet",
            "ParakeetEncoderBlock",
            "self_attn",
            "ParakeetEncoderAttention",
            conformer,
        ),
        host(
            "speech_to_text/speech_to_text",
            "Speech2TextEncoderLayer",
            "self_attn",
            "Speech2TextAttention",
            "its convolutions ignore the mask and let padding leak into the last frames, in the "
            "original too, and are not causal, with right=0 neither",
        ),
    ]
    return tuple(hosts)


HOSTS = _hosts()


def _not_hosts() -> dict[str, str]:
    decoder = "a decoder's attention is causal or looks at another sequence"
    text = "it is of text, not of speech"
    adapter = "it comes after the encoder, at a frame rate of its own"
    reasons = {
        "whisper/whisper.WhisperDecoderLayer": decoder,
        "moonshine/moonshine.MoonshineDecoderLayer": decoder,
        "speech_to_text/speech_to_text.Speech2TextDecoderLayer": decoder,
        "wav2vec2_bert/wav2vec2_bert.Wav2Vec2BertAdapterLayer": adapter,
        "seamless_m4t_v2/seamless_m4t_v2.SeamlessM4Tv2TextToUnitDecoderLayer": decoder,
    }
    for where, name in (
        ("seamless_m4t/seamless_m4t", "SeamlessM4T"),
        ("seamless_m4t_v2/seamless_m4t_v2", "SeamlessM4Tv2"),
    ):
        reasons |= {
            f"{where}.{name}ConformerAdapterLayer": adapter,
            f"{where}.{name}EncoderLayer": text,
            f"{where}.{name}DecoderLayer": decoder,
        }
    return {
        f"transformers.models.{name.replace('/', '.modeling_')}": why
        for name, why in reasons.items()
    }


NOT_HOSTS = _not_hosts()
