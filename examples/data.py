"""Speech for the examples: three sources, length-bucketed batches, log-mel features.

A corpus is {split: [Utterance, ...]}: "train" and at least one held-out split with other speakers.
Sources: a manifest.jsonl (`read_manifest`), LibriSpeech (`read_librispeech`) and synthetic speech
(`read_synthetic`). Audio is decoded once and kept as 16-bit samples, 115 MB an hour.
"""

import functools
import io
import json
import os
import random
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import speak
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

try:
    import soundfile
    import torchaudio
    from tqdm import tqdm
except (ImportError, OSError) as error:  # OSError: soundfile's own C library is missing
    raise ImportError(f"{error}: run pip install 'ldsa_nn[examples]'") from error

SAMPLE_RATE = 16000
N_FFT = 512
HOP = 160
N_MELS = 80

LIBRISPEECH_TRAIN = ("train-clean-100", "train-clean-360", "train-other-500")
LIBRISPEECH_HELD_OUT = ("dev-clean", "dev-other", "test-clean", "test-other")


class Utterance(NamedTuple):
    """One recording: 16 kHz mono int16 samples [N] and what was said."""

    id: str
    speaker: str
    text: str
    audio: Tensor


Corpus = dict[str, list[Utterance]]


def read_manifest(directory: str | os.PathLike) -> Corpus:
    """Read a directory with a manifest.jsonl: one JSON object a line, audio in tar files or plain.

    Fields: `id`, `audio` (a path in the directory, or a member of `archive` if that tar file is
    named), `text`, `speaker`, `split`. Others are ignored. Any format and rate soundfile knows.
    """
    directory = Path(directory)
    manifest = directory / "manifest.jsonl"
    rows = read_rows(manifest)
    # An archive is read front to back, once: a compressed one has no other way.
    members: dict[tuple[str, str], bytes] = {}
    for archive in sorted({row["archive"] for row in rows if row.get("archive")}):
        wanted = {row["audio"] for row in rows if row.get("archive") == archive}
        for name, content in read_archive(manifest, archive, wanted):
            members[archive, name] = content

    def load(row: dict) -> Tensor:
        archive = row.get("archive")
        if archive and (archive, row["audio"]) not in members:
            raise FileNotFoundError(
                f"{directory / archive} has no file {row['audio']} ({row['id']})"
            )
        if not archive and not (directory / row["audio"]).is_file():
            raise FileNotFoundError(
                f"{row['id']} of {manifest}: {row['audio']} does not exist or is no file"
            )
        try:
            return decode(members[archive, row["audio"]] if archive else directory / row["audio"])
        except soundfile.LibsndfileError as error:
            raise ValueError(f"{row['id']} of {manifest}: {row['audio']}: {error}") from error

    corpus: Corpus = {}
    for row, audio in zip(rows, in_threads(load, rows, "decode"), strict=True):
        text = " ".join(row["text"].split())
        corpus.setdefault(row["split"], []).append(
            Utterance(str(row["id"]), str(row["speaker"]), text, audio)
        )
    return check_corpus(corpus, str(manifest))


def read_rows(manifest: Path) -> list[dict]:
    """The lines of a manifest.jsonl, checked."""
    if not manifest.is_file():
        raise FileNotFoundError(f"no {manifest}: --data takes a directory with a manifest.jsonl")
    rows = []
    for number, line in enumerate(manifest.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            missing = {"id", "audio", "text", "speaker", "split"} - row.keys()
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{manifest}, line {number}: not a JSON object ({error})") from None
        if missing:
            raise ValueError(f"{manifest}, line {number}: no {', '.join(sorted(missing))}")
        for field in ("audio", "text", "split", "archive"):
            value = row.get(field)
            if not isinstance(value, str) and (field, value) != ("archive", None):
                raise ValueError(
                    f"{manifest}, line {number}: {field} must be a string, got {json.dumps(value)}"
                )
        rows.append(row)
    return rows


def read_archive(manifest: Path, archive: str, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    """The wanted members of a tar file beside the manifest, with their names, in their order."""
    path = manifest.parent / archive
    if not path.is_file():
        raise FileNotFoundError(f"{manifest} names {archive}, which is not beside it")
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                # extractfile gives None for a directory.
                if member.name in wanted and (file := tar.extractfile(member)):
                    yield member.name, file.read()
    except Exception as error:  # every compression has errors of its own
        raise ValueError(f"{path}: {error}") from error


def read_librispeech(directory: str | os.PathLike) -> Corpus:
    """Read every part of LibriSpeech that lies in the directory; the train-* ones become "train".

    The directory is the one that holds LibriSpeech/, or that folder itself.
    """
    root = Path(directory)
    if not (root / "LibriSpeech").is_dir():
        root = Path(directory).absolute()
        root, folder = root.parent, root.name
    else:
        folder = "LibriSpeech"
    corpus: Corpus = {}
    for part in LIBRISPEECH_TRAIN + LIBRISPEECH_HELD_OUT:
        if not (root / folder / part).is_dir():
            continue
        # Only its metadata: torchaudio itself decodes through torchcodec alone.
        dataset = torchaudio.datasets.LIBRISPEECH(root, url=part, folder_in_archive=folder)
        rows = [dataset.get_metadata(i) for i in range(len(dataset))]
        paths = [root / folder / row[0] for row in rows]
        for path, row, audio in zip(
            paths, rows, in_threads(decode, paths, f"decode {part}"), strict=True
        ):
            split = "train" if part in LIBRISPEECH_TRAIN else part
            corpus.setdefault(split, []).append(Utterance(path.stem, str(row[3]), row[2], audio))
    if not corpus:
        parts = ", ".join(LIBRISPEECH_TRAIN + LIBRISPEECH_HELD_OUT)
        raise FileNotFoundError(f"{directory} holds no part of LibriSpeech ({parts})")
    return check_corpus(corpus, str(directory))


def read_synthetic(
    train: int = 1000, held_out: int = 120, *, seed: int = 0, letters: bool = False
) -> Corpus:
    """Digit strings spoken by eSpeak NG (see speak.py): "train" and, in other voices, "test"."""
    rng = random.Random(seed)
    test = speak.write_lines(held_out, speak.HELD_OUT_VARIANTS, rng, letters=letters)
    heard = {line.text for line in test}
    lines = test + speak.write_lines(
        train, speak.TRAIN_VARIANTS, rng, letters=letters, not_these=heard
    )
    utterances = []
    for i, (line, (samples, rate)) in enumerate(
        zip(tqdm(lines, "speak", unit="utt"), speak.speak(lines), strict=True)
    ):
        audio = to_16k(np.frombuffer(samples, np.int16).astype(np.float32) / 32768, rate)
        variant = line.voice.partition("+")[2]
        utterances.append(Utterance(f"{variant}-{i}", variant, line.text, audio))
    return check_corpus(
        {"train": utterances[held_out:], "test": utterances[:held_out]}, "the synthetic corpus"
    )


def check_corpus(corpus: Corpus, where: str) -> Corpus:
    """Drop utterances without words; refuse a corpus that cannot train and test on new speakers."""
    silent = {split: n for split, us in corpus.items() if (n := sum(not u.text for u in us))}
    if silent:
        counts = ", ".join(f"{n} of {split}" for split, n in sorted(silent.items()))
        print(f"Utterances without words in {where}, left out: {counts}")
    corpus = {split: [u for u in us if u.text] for split, us in corpus.items()}
    corpus = {split: us for split, us in corpus.items() if us}
    splits = ", ".join(sorted(corpus)) or "none"
    if "train" not in corpus:
        raise ValueError(f"no train split in {where} (splits there: {splits}): nothing to train on")
    if len(corpus) == 1:
        raise ValueError(f"only a train split in {where}: no held-out speakers to report on")
    heard = {u.speaker for u in corpus["train"]}
    for split, utterances in corpus.items():
        both = heard & {u.speaker for u in utterances}
        if split != "train" and both:
            names = ", ".join(sorted(both)[:5])
            raise ValueError(f"speakers both in train and in {split} of {where}: {names}")
    return corpus


def decode(source: bytes | os.PathLike) -> Tensor:
    """Decode one recording to 16 kHz mono int16 [N]."""
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    return to_16k(samples.mean(axis=1), rate)


def to_16k(samples: np.ndarray, rate: int) -> Tensor:
    """Resample float samples in [-1, 1] to 16 kHz int16."""
    audio = _resampler(rate)(torch.from_numpy(samples))
    return (audio * 32768).round().clamp(-32768, 32767).to(torch.int16)


@functools.cache  # its filter costs more than its use
def _resampler(rate: int) -> nn.Module:
    return torchaudio.transforms.Resample(rate, SAMPLE_RATE)


def in_threads(function: Callable, items: Sequence, label: str | None) -> Iterator:
    # soundfile decodes outside the interpreter's lock
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        bar = {"total": len(items), "unit": "utt", "disable": label is None}
        yield from tqdm(pool.map(function, items), label, **bar)


def epoch_batches(
    lengths: Sequence[int], batch_length: int, *, seed: int, epoch: int
) -> list[list[int]]:
    """One epoch's batches of indices: every index once, batch mates of near-equal length.

    A batch's padded size (longest times count) stays within batch_length, except that an utterance
    longer than that makes a batch alone. The same (seed, epoch) gives the same batches.
    """
    return length_batches(lengths, batch_length, np.random.default_rng((seed, epoch)))


def length_batches(
    lengths: Sequence[int], batch_length: int, rng: np.random.Generator
) -> list[list[int]]:
    """Indices in batches as `epoch_batches` says, in an order that rng draws."""
    # The jitter gives an utterance other mates in each epoch.
    order = np.argsort(np.asarray(lengths) * rng.uniform(0.9, 1.1, len(lengths)))
    batches: list[list[int]] = []
    longest = 0
    for i in order.tolist():
        longest = max(longest, lengths[i])
        if not batches or longest * (len(batches[-1]) + 1) > batch_length:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    rng.shuffle(batches)
    return batches


def endless_batches(lengths: Sequence[int], batch_length: int, *, seed: int) -> Iterator[list[int]]:
    """Epoch after epoch; a run resumes by skipping as many batches as it has done steps."""
    epoch = 0
    while True:
        yield from epoch_batches(lengths, batch_length, seed=seed, epoch=epoch)
        epoch += 1


class Share(NamedTuple):
    """Indices of a micro-batch, and how many of them count: all, or none."""

    indices: list[int]
    count: int


def share(batch: list[int], *, rank: int, ranks: int, accumulate: int) -> list[Share]:
    """A rank's micro-batches of a batch: as many on every rank, and together every index once.

    A rank for which nothing is left computes on the first utterance, which does not count: the
    others wait for its gradients.
    """
    parts = ranks * min(accumulate, -(-len(batch) // ranks))
    # Batch mates are sorted by length: strides give every rank as much work.
    mine = [batch[part::parts] for part in range(rank, parts, ranks)]
    return [Share(indices or batch[:1], len(indices)) for indices in mine]


class Batch(NamedTuple):
    """audio [B, N] int16, zero-padded, with lengths [B]; targets [sum of target_lengths].

    count: utterances that count, B or 0 (see `share`).
    """

    audio: Tensor
    lengths: Tensor
    targets: Tensor
    target_lengths: Tensor
    count: int


def collate(utterances: Iterable[Utterance], vocabulary: str) -> Batch:
    """Pad a batch. Target i + 1 is vocabulary[i]; 0 is CTC's blank."""
    utterances = list(utterances)
    targets = [[vocabulary.index(c) + 1 for c in u.text] for u in utterances]
    return Batch(
        pad_sequence([u.audio for u in utterances], batch_first=True),
        torch.tensor([len(u.audio) for u in utterances]),
        torch.tensor([t for target in targets for t in target]),
        torch.tensor([len(target) for target in targets]),
        len(utterances),
    )


class LogMel(nn.Module):
    """80 log-mel energies every 10 ms, each less its training mean, over its standard deviation.

    The normalisation is fixed, and frame t needs samples [160 t, 160 t + 512) alone, so a stream's
    features are an utterance's: nothing looks at the whole utterance or past its end.
    """

    def __init__(self, mean: Tensor | None = None, std: Tensor | None = None) -> None:
        """mean, std [80]: from `LogMel.fit`, or None for no normalisation."""
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(
            SAMPLE_RATE, N_FFT, hop_length=HOP, n_mels=N_MELS, center=False
        )
        self.register_buffer("mean", torch.zeros(N_MELS) if mean is None else mean)
        self.register_buffer("std", torch.ones(N_MELS) if std is None else std)

    @classmethod
    def fit(cls, utterances: Sequence[Utterance], at_most: int = 400) -> "LogMel":
        """Learn mean and std from evenly spaced utterances of a training set."""
        plain = cls()
        frames = []
        for utterance in utterances[:: -(-len(utterances) // at_most)]:
            features, count = plain(utterance.audio[None], torch.tensor([len(utterance.audio)]))
            frames.append(features[0, : int(count)])
        std, mean = torch.std_mean(torch.cat(frames), dim=0)
        return cls(mean, std)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Audio [B, N] (int16, or float of that range), lengths [B] -> features [B, T, 80], frames.

        `frames` [B] stays on the device of lengths. Features past it are 0, the training mean.
        """
        if audio.shape[1] < N_FFT:
            audio = nn.functional.pad(audio, (0, N_FFT - audio.shape[1]))
        energies = self.mel(audio.float() / 32768).mT
        # The floor is about the energy of 16-bit rounding noise: digital silence stays finite.
        features = ((energies + 1e-7).log() - self.mean) / self.std
        frames = (lengths - N_FFT).div(HOP, rounding_mode="floor").add(1).clamp(min=1)
        ends = frames.to(features.device, non_blocking=True)
        inside = torch.arange(features.shape[1], device=features.device) < ends[:, None]
        return features * inside[..., None], frames
