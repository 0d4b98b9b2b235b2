"""A small, random encoder of every class of host, for the tests and examples/bench_hosts.py.

A toolkit's cases are a function of TOOLKITS, which alone imports the toolkit.
"""

import importlib
import logging
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

D, H = 32, 4


class HostCase(NamedTuple):
    """One class of host.

    name: what the README's table calls it.
    build: makes the model, the same in every call, in evaluation mode.
    shape: of one utterance, without its time: () is a waveform.
    lengths: times of a batch's utterances, the longest first.
    call: (model, x [B,N,*shape], lengths [B] or None) -> [B,T,D] of the encoder.
    exact: whether the original's padded batch equals each utterance alone; None if it has no masks.
    shown: whether the README's table has it, or is it much like another.
    streamed: frames of a replaced model that the toolkit streamed, and of the whole at once; None
        where the toolkit does not stream.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    lengths: list[int]
    call: Callable[[nn.Module, Tensor, Tensor | None], Tensor]
    exact: bool | None = True
    shown: bool = True
    streamed: Callable[[], tuple[Tensor, Tensor]] | None = None

    def batch(self) -> tuple[Tensor, Tensor]:
        """Random x with garbage where padding is, and lengths."""
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(len(self.lengths), self.lengths[0], *self.shape, generator=generator)
        lengths = torch.tensor(self.lengths)
        for row, length in zip(x, self.lengths, strict=True):
            row[length:] = 9.0
        return x, lengths


def _inside(x: Tensor, lengths: Tensor) -> Tensor:
    """Bool [B,N]: what is no padding."""
    return torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]


def leaked(case: HostCase, model: nn.Module) -> float:
    """How far the padded batch is from its last utterance alone."""
    x, lengths = case.batch()
    with torch.no_grad():
        alone = case.call(model, x[-1:, : lengths[-1]], lengths[-1:])[0]
        return (case.call(model, x, lengths)[-1, : len(alone)] - alone).abs().max().item()


def calls(case: HostCase, model: nn.Module, module: nn.Module) -> list[tuple[tuple, dict, object]]:
    """What a module of the model is called with in case.batch(), and what it returns."""
    seen: list = []
    handle = module.register_forward_hook(
        lambda _, args, kwargs, out: seen.append((args, kwargs, out)), with_kwargs=True
    )
    with torch.no_grad():
        case.call(model, *case.batch())
    handle.remove()
    return seen


def _torch_cases() -> list[HostCase]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(D, H, 48, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    def call(model: nn.Module, x: Tensor, lengths: Tensor | None) -> Tensor:
        padding = None if lengths is None else ~_inside(x, lengths)
        return model(x, src_key_padding_mask=padding)

    return [HostCase("nn.TransformerEncoder", build, (D,), [40, 23], call)]


def _torchaudio_cases() -> list[HostCase]:
    from torchaudio import models

    def built(make: Callable[..., nn.Module], **options: object) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            torch.manual_seed(0)
            return make(**options).eval()

        return build

    def call(model: nn.Module, x: Tensor, lengths: Tensor | None) -> Tensor:
        return model(x, lengths)[0]

    def without_lengths(model: nn.Module, x: Tensor, lengths: Tensor | None) -> Tensor:
        return model(x, None)[0]

    conformer = dict(input_dim=D, num_heads=H, ffn_dim=48, num_layers=2)
    conformer |= dict(depthwise_conv_kernel_size=5, dropout=0.1)
    encoder = dict(
        extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)],
        extractor_conv_bias=False,
        encoder_embed_dim=D,
        encoder_projection_dropout=0.0,
        encoder_pos_conv_kernel=8,
        encoder_pos_conv_groups=4,
        encoder_num_layers=2,
        encoder_num_heads=H,
        encoder_attention_dropout=0.1,
        encoder_ff_interm_features=48,
        encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.0,
        encoder_layer_norm_first=False,
        encoder_layer_drop=0.0,
        aux_num_out=None,
    )
    layer, group = dict(extractor_mode="layer_norm"), dict(extractor_mode="group_norm")
    wavlm = dict(encoder_num_buckets=16, encoder_max_distance=30)
    wav2vec2, of_wavlm = models.wav2vec2_model, models.wavlm_model
    wave = dict(shape=(), lengths=[400, 230])
    return [
        HostCase("Conformer", built(models.Conformer, **conformer), (D,), [40, 23], call, False),
        HostCase("Wav2Vec2, HuBERT", built(wav2vec2, **layer, **encoder), call=call, **wave),
        HostCase(
            "Wav2Vec2, HuBERT, group norm",
            built(wav2vec2, **group, **encoder),
            call=call,
            exact=False,
            **wave,
        ),
        HostCase(
            "WavLM",
            built(of_wavlm, **layer, **wavlm, **encoder),
            call=without_lengths,
            exact=None,
            **wave,
        ),
    ]


def _speechbrain_cases() -> list[HostCase]:
    from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder
    from speechbrain.lobes.models.transformer.Transformer import TransformerEncoder
    from speechbrain.nnet.attention import RelPosEncXL

    # Its proxies of modules that it moved fail whoever asks all modules for their file.
    for name, module in list(sys.modules.items()):
        if type(module).__module__ == "speechbrain.utils.importutils":
            del sys.modules[name]

    def conformer(causal: bool) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            torch.manual_seed(0)
            return ConformerEncoder(2, D, 48, H, kernel_size=5, dropout=0.1, causal=causal).eval()

        return build

    def transformer() -> nn.Module:
        torch.manual_seed(0)
        return TransformerEncoder(2, H, 48, d_model=D, dropout=0.1).eval()

    def padding(x: Tensor, lengths: Tensor | None) -> Tensor | None:
        return None if lengths is None else ~_inside(x, lengths)

    def with_positions(model: nn.Module, x: Tensor, lengths: Tensor | None) -> Tensor:
        positions = RelPosEncXL(D).to(x.device)(x)
        return model(x, src_key_padding_mask=padding(x, lengths), pos_embs=positions)[0]

    def call(model: nn.Module, x: Tensor, lengths: Tensor | None) -> Tensor:
        return model(x, src_key_padding_mask=padding(x, lengths))[0]

    frames = dict(shape=(D,), lengths=[40, 23])
    return [
        HostCase("Conformer, causal", conformer(True), call=with_positions, **frames),
        HostCase(
            "Conformer",
            conformer(False),
            call=with_positions,
            exact=False,
            streamed=lambda: importlib.import_module("test_host_speechbrain").streamed(),
            **frames,
        ),
        HostCase("Transformer", transformer, call=call, **frames),
    ]


def _transformers_cases() -> list[HostCase]:
    import transformers
    from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4TSpeechEncoder
    from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import (
        SeamlessM4Tv2SpeechEncoder,
    )

    logging.getLogger("transformers").setLevel(logging.ERROR)

    def mask(x: Tensor, lengths: Tensor | None) -> Tensor | None:
        return None if lengths is None else _inside(x, lengths).long()

    def build(model: type, config: type, options: dict) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            torch.manual_seed(0)
            return model(config(**options)).eval()

        return made

    def values(model: nn.Module, x: Tensor, lengths: Tensor | None) -> Tensor:
        return model(input_values=x, attention_mask=mask(x, lengths)).last_hidden_state

    def features(model: nn.Module, x: Tensor, lengths: Tensor | None) -> Tensor:
        return model(input_features=x, attention_mask=mask(x, lengths)).last_hidden_state

    def encoder_values(model: nn.Module, x: Tensor, lengths: Tensor | None) -> Tensor:
        return values(model.get_encoder(), x, lengths)

    def encoder_features(model: nn.Module, x: Tensor, lengths: Tensor | None) -> Tensor:
        return features(model.get_encoder(), x, lengths)

    def whisper(model: nn.Module, x: Tensor, lengths: Tensor | None) -> Tensor:
        x = nn.functional.pad(x, (0, 0, 0, 40 - x.shape[1]))
        return model.get_encoder()(input_features=x.mT).last_hidden_state

    layers = dict(hidden_size=D, num_hidden_layers=2, num_attention_heads=H, intermediate_size=48)
    layers |= dict(layerdrop=0.0, mask_time_prob=0.0, vocab_size=8)
    layers |= dict(hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.1)
    waves = dict(conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), **layers)
    waves |= dict(num_feat_extract_layers=2, feat_extract_norm="layer", feat_proj_dropout=0.0)
    grouped = dict(num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4)
    conformer = dict(conv_depthwise_kernel_size=5, conformer_conv_dropout=0.0)
    wave = dict(shape=(), lengths=[400, 230])
    cases = []
    for name in ("Wav2Vec2", "Hubert", "UniSpeech", "UniSpeechSat", "WavLM"):
        of = [getattr(transformers, name + part) for part in ("Model", "Config")]
        for stable in (False, True):
            options = dict(waves, **grouped, do_stable_layer_norm=stable)
            what = f"{name}, stable layer norm" if stable else name
            cases.append(HostCase(what, build(*of, options), call=values, shown=not stable, **wave))
        options = dict(waves, **grouped) | dict(feat_extract_norm="group")
        cases.append(
            HostCase(
                f"{name}, group norm",
                build(*of, options),
                call=values,
                exact=False,
                shown=name == "Wav2Vec2",
                **wave,
            )
        )
    of = [transformers.Data2VecAudioModel, transformers.Data2VecAudioConfig]
    options = dict(waves, conv_pos_kernel_size=5, num_conv_pos_embedding_groups=4)
    cases.append(HostCase("Data2VecAudio", build(*of, options), call=values, exact=False, **wave))
    of = [transformers.Wav2Vec2ConformerModel, transformers.Wav2Vec2ConformerConfig]
    for kind in ("relative", "rotary"):
        options = dict(waves, **grouped, **conformer, position_embeddings_type=kind)
        name = f"Wav2Vec2Conformer, {kind}"
        cases.append(HostCase(name, build(*of, options), call=values, exact=False, **wave))

    frames = dict(shape=(20,), lengths=[40, 23])
    of = [transformers.Wav2Vec2BertModel, transformers.Wav2Vec2BertConfig]
    options = dict(layers, **conformer, feature_projection_input_dim=20, feat_proj_dropout=0.0)
    cases.append(HostCase("Wav2Vec2Bert", build(*of, options), call=features, **frames))
    speech = dict(
        hidden_size=D,
        feature_projection_input_dim=20,
        speech_encoder_layers=2,
        speech_encoder_attention_heads=H,
        speech_encoder_intermediate_size=48,
        speech_encoder_layerdrop=0.0,
        speech_encoder_dropout=0.1,
        conv_depthwise_kernel_size=5,
        add_adapter=False,
    )
    of = [SeamlessM4TSpeechEncoder, transformers.SeamlessM4TConfig]
    cases.append(HostCase("SeamlessM4T", build(*of, speech), call=features, **frames))
    of = [SeamlessM4Tv2SpeechEncoder, transformers.SeamlessM4Tv2Config]
    options = dict(speech, speech_encoder_chunk_size=16, speech_encoder_left_chunk_num=1)
    cases.append(HostCase("SeamlessM4Tv2", build(*of, options), call=features, **frames))

    both = dict(
        d_model=D,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=H,
        decoder_attention_heads=H,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=20,
        dropout=0.0,
        attention_dropout=0.1,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    of = [transformers.WhisperModel, transformers.WhisperConfig]
    options = dict(both, num_mel_bins=20, max_source_positions=20, max_target_positions=20)
    cases.append(HostCase("Whisper", build(*of, options), call=whisper, exact=None, **frames))
    of = [transformers.Speech2TextModel, transformers.Speech2TextConfig]
    options = dict(both, input_feat_per_channel=20, conv_channels=16, max_source_positions=99)
    longer = dict(shape=(20,), lengths=[160, 92])
    cases.append(
        HostCase("Speech2Text", build(*of, options), call=encoder_features, exact=False, **longer)
    )
    of = [transformers.MoonshineModel, transformers.MoonshineConfig]
    options = dict(
        hidden_size=D,
        intermediate_size=48,
        vocab_size=20,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=1,
        encoder_num_attention_heads=H,
        decoder_num_attention_heads=H,
        attention_dropout=0.1,
    )
    cases.append(
        HostCase("Moonshine", build(*of, options), (), [9600, 5800], encoder_values, exact=False)
    )
    of = [transformers.ParakeetEncoder, transformers.ParakeetEncoderConfig]
    options = dict(
        hidden_size=D,
        num_hidden_layers=2,
        num_attention_heads=H,
        intermediate_size=48,
        conv_kernel_size=5,
        subsampling_conv_channels=8,
        num_mel_bins=16,
        dropout=0.0,
        dropout_positions=0.0,
        layerdrop=0.0,
        attention_dropout=0.1,
    )
    cases.append(HostCase("Parakeet", build(*of, options), (16,), [160, 92], features))
    return cases


TOOLKITS: dict[str, Callable[[], list[HostCase]]] = {
    "speechbrain": _speechbrain_cases,
    "torch": _torch_cases,
    "torchaudio": _torchaudio_cases,
    "transformers": _transformers_cases,
}
