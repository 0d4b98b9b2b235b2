"""The recogniser that train_ctc.py trains: its model, its file and its transcripts."""

import math
import os
from typing import Any

import torch
from data import N_MELS, LogMel, Utterance
from torch import Tensor, nn
from torch.nn import functional

import ldsa_nn

try:
    import torchaudio
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(f"{error}: run pip install 'ldsa_nn[examples]'") from error

STACK = 4  # log-mel frames a model frame: 40 ms
STREAM = ("ldsa", "mixed", "sla")  # attentions of StreamingRecogniser that see no utterance's end


class Recogniser(nn.Module):
    """Stacked log-mel frames -> torchaudio Conformer -> CTC logits over blank and vocabulary.

    The Conformer's convolutions do not mask padding, so an utterance's output depends a little on
    how far its batch pads it: keep batch mates of near-equal length, and evaluate one at a time.
    """

    def __init__(
        self,
        symbols: int,
        *,
        attention: str,
        left: int,
        right: int,
        dim: int,
        layers: int,
        heads: int,
        ffn: int,
        kernel: int,
        dropout: float,
    ) -> None:
        """Args as on train_ctc.py's command line.

        symbols: size of the vocabulary without the blank. attention: "ldsa", or "mhsa" for the
            Conformer's own. left, right: the window of "ldsa" in model frames.
        """
        super().__init__()
        self.embed = nn.Conv1d(N_MELS, dim, STACK, stride=STACK)
        self.conformer = torchaudio.models.Conformer(dim, heads, ffn, layers, kernel, dropout)
        self.head = ctc_head(dim, symbols)
        if attention == "ldsa":
            ldsa_nn.replace_attention(self.conformer, left=left, right=right)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.conformer.conformer_layers

    @property
    def attentions(self) -> dict[int, nn.Module]:
        """{layer: its attention}, of all layers."""
        return {i: block.self_attn for i, block in enumerate(self.blocks)}

    delay = None  # its convolutions and its norms see the whole utterance

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Features [B, T, 80] and their lengths [B], on one device -> logits [B, T', symbols + 1].

        T' = ceil(T / 4), see `stacked`. Logits past an utterance's end mean nothing.
        """
        # Padded by the same always: a graph compiled for some padding does not hold for none.
        features = functional.pad(features, (0, 0, 0, STACK - 1))
        x = self.embed(features.mT).permute(2, 0, 1)  # [T', B, dim]
        padding = torch.arange(x.shape[0], device=x.device) >= stacked(lengths)[:, None]
        # Not conformer(x, lengths): it reads the lengths back from the device in every step, which
        # also breaks a compiled graph in two.
        for layer in self.blocks:
            x = layer(x, padding)
        return self.head(x.transpose(0, 1))


class StreamingRecogniser(nn.Module):
    """Log-mel frames -> ldsa_nn.ConformerEncoder -> CTC logits over blank and vocabulary.

    Padding changes nothing, and the logits of a stream in chunks are those of the whole utterance.
    """

    def __init__(
        self,
        symbols: int,
        *,
        attention: str,
        left: int,
        right: int,
        dim: int,
        layers: int,
        heads: int,
        ffn: int,
        kernel: int,
        dropout: float,
    ) -> None:
        """Args as Recogniser's.

        attention: of ConformerEncoder; or "mixed", every fourth layer "sla" and the others "ldsa";
            or "bisla", bidirectional "sla". "mhsa", "hybrid" and "bisla" do not stream.
        """
        super().__init__()
        kinds = [attention] * layers
        if attention == "mixed":
            kinds = ["sla" if i % 4 == 1 else "ldsa" for i in range(layers)]
        elif attention == "bisla":
            kinds = ["sla"] * layers
        self.encoder = ldsa_nn.ConformerEncoder(
            N_MELS,
            dim,
            layers,
            heads,
            ffn,
            kernel,
            kinds,
            left,
            right,
            subsampling=STACK,
            dropout=dropout,
        )
        if attention == "bisla":
            sizes = "n_feat n_key_head value_heads_per_key key_dim value_dim".split()
            for block in self.encoder.layers:
                same = {name: getattr(block.attention, name) for name in sizes}
                block.attention = ldsa_nn.SystolicLinearAttention(**same, bidirectional=True)
        self.streams = attention in STREAM
        self.head = ctc_head(dim, symbols)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.encoder.layers

    @property
    def attentions(self) -> dict[int, nn.Module]:
        """{layer: its attention}, of the layers that give their weights on frames."""
        return {i: m for i, block in enumerate(self.blocks) if (m := _local(block)) is not None}

    @property
    def delay(self) -> int | None:
        """Log-mel frames after its own that a frame waits for; None: for all of the utterance."""
        return self.encoder.delay if self.streams else None

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Args and logits as Recogniser's."""
        frames = stacked(features.shape[1])
        # Two frames more than are wanted: Inductor must see for every length that there is more
        # than one.
        features = functional.pad(features, (0, 0, 0, STACK + 1))
        return self.head(self.encoder(features, lengths)[0][:, :frames])


AnyRecogniser = Recogniser | StreamingRecogniser


def ctc_head(dim: int, symbols: int) -> nn.Linear:
    """Frames -> logits of blank and symbols, of which blank begins as likely as all symbols are.

    Where all begin alike, some seeds fill the time between letters with spaces, not with blanks,
    and need thousands of steps to get away from that.
    """
    head = nn.Linear(dim, symbols + 1)
    with torch.no_grad():
        head.bias[0] += math.log(max(1, symbols))
    return head


def stacked(lengths: Tensor | int) -> Tensor | int:
    """Log-mel frames -> model frames."""
    return (lengths + STACK - 1) // STACK


def build(options: dict[str, Any], vocabulary: str) -> AnyRecogniser:
    """The model of a command line's options; the same seed gives the same initial weights."""
    torch.manual_seed(options["seed"])
    names = "attention left right dim layers heads ffn kernel dropout".split()
    kind = StreamingRecogniser if options["encoder"] == "streaming" else Recogniser
    return kind(len(vocabulary), **{name: options[name] for name in names})


def load_recogniser(path: str | os.PathLike) -> tuple[AnyRecogniser, LogMel, str]:
    """A trained recogniser and its features, in eval mode, and its vocabulary: checkpoint.pt."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model = build(state["options"], state["vocabulary"])
    model.load_state_dict(state["model"])
    return model.eval(), LogMel(**state["normalisation"]).eval(), state["vocabulary"]


class GreedyText:
    """Best symbol of each frame -> text, which grows as frames come.

    Repeats are merged, blanks (0) dropped, and words stand one space apart.
    """

    def __init__(self, vocabulary: str) -> None:
        self.vocabulary = vocabulary
        self.text = ""
        self._last = 0
        self._gap = ""

    def push(self, symbols: list[int]) -> str:
        """Read the next frames' symbols, and return all of the text so far."""
        for symbol in symbols:
            if symbol not in (0, self._last):
                letter = self.vocabulary[symbol - 1]
                if letter.isspace():
                    self._gap = " " if self.text else ""
                else:
                    self.text += self._gap + letter
                    self._gap = ""
            self._last = symbol
        return self.text


def greedy_text(symbols: list[int], vocabulary: str) -> str:
    """The text of a whole utterance's best symbols."""
    return GreedyText(vocabulary).push(symbols)


def beam_text(logits: Tensor, vocabulary: str, beams: int) -> str:
    """The text of highest probability that a prefix search finds with so many prefixes at a time.

    All alignments of a text add up, as in CTC's loss; there is no language model and no lexicon.
    logits: [T, symbols + 1] of a whole utterance.
    """
    import fast_ctc_decode  # of which there is none for Windows, where all else runs

    alphabet = ["", *vocabulary]  # as a list, for symbols of any kind
    probabilities = logits.double().softmax(-1).float().cpu().numpy()
    text, _ = fast_ctc_decode.beam_search(probabilities, alphabet, beam_size=beams)
    return " ".join(text.split())


@torch.inference_mode()
def transcribe(
    model: AnyRecogniser,
    logmel: LogMel,
    vocabulary: str,
    utterances: list[Utterance],
    label: str,
    beams: int = 0,
) -> list[str]:
    """Transcribe, one utterance at a time: in a batch, padding may leak into the shorter ones.

    beams: of `beam_text`; 0 is greedy.
    """
    model.eval()
    device = next(model.parameters()).device
    texts = []
    for utterance in tqdm(utterances, label, unit="utt"):
        lengths = torch.tensor([len(utterance.audio)], device=device)
        logits = model(*logmel(utterance.audio[None].to(device), lengths))
        if beams:
            texts.append(beam_text(logits[0], vocabulary, beams))
        else:
            texts.append(greedy_text(logits[0].argmax(-1).tolist(), vocabulary))
    return texts


def _local(module: nn.Module) -> nn.Module | None:
    """The LDSA in a module, if there is one."""
    ldsa = ldsa_nn.LocalDenseSynthesizerAttention
    return next((m for m in module.modules() if isinstance(m, ldsa)), None)


@torch.inference_mode()
def attention_weights(
    model: AnyRecogniser, features: Tensor, lengths: Tensor, left: int, right: int
) -> dict[int, Tensor]:
    """{layer: its weights on frames t - left ... t + right, [H, W, T]} of one utterance.

    Of "mhsa", whose weights reach further, this is the band around the diagonal.
    """
    layers = {i: _local(m) or m for i, m in model.attentions.items()}
    inputs: dict[int, Any] = {}

    def keep(i: int) -> Any:
        return lambda _, *given: inputs.update({i: given})

    hooks = [
        layer.register_forward_pre_hook(keep(i), with_kwargs=True) for i, layer in layers.items()
    ]
    try:
        model.eval()(features, lengths)
    finally:
        for hook in hooks:
            hook.remove()
    weights = {}
    for i, layer in layers.items():
        positional, named = inputs[i]
        named = {**named, "need_weights": True}
        if _local(layer):
            weights[i] = layer(*positional, **named)[1][0].mT[:, :, : stacked(features.shape[1])]
            continue
        whole = layer(*positional, **named, average_attn_weights=False)[1][0]  # [H, T, T]
        frames = torch.arange(whole.shape[1], device=whole.device)
        slots = frames[:, None] + torch.arange(left + 1 + right, device=whole.device)
        padded = functional.pad(whole, (left, right))
        weights[i] = padded.gather(2, slots.expand(len(whole), -1, -1)).mT
    return weights
