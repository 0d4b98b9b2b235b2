"""The examples' data: readers of three sources, batches, features."""

import gzip
import itertools
import json
import random
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torchaudio")
soundfile = pytest.importorskip("soundfile")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import data  # noqa: E402
import speak  # noqa: E402

RATE = data.SAMPLE_RATE


def tone(seconds: float, hertz: float = 440.0, rate: int = RATE) -> np.ndarray:
    """A sine at half of full scale."""
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)


def write_manifest(directory: Path, rows: list[dict]) -> None:
    """Rows as manifest.jsonl, with defaults for what a test does not care about."""
    filled = [{"id": f"u{i}", "text": "A B", "speaker": "s"} | row for i, row in enumerate(rows)]
    lines = "".join(json.dumps(row) + "\n" for row in filled)
    (directory / "manifest.jsonl").write_text(lines, encoding="utf-8")


def test_manifest_reads_tar_and_plain_files(tmp_path, capsys):
    (tmp_path / "wav").mkdir()
    soundfile.write(tmp_path / "wav" / "plain.wav", tone(0.3), RATE)
    soundfile.write(tmp_path / "in_tar.flac", tone(0.2), RATE)
    with tarfile.open(tmp_path / "test.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "in_tar.flac", "deep/in_tar.flac")
    (tmp_path / "in_tar.flac").unlink()
    write_manifest(
        tmp_path,
        [
            {"audio": "wav/plain.wav", "split": "train", "speaker": 1, "text": " TWO  WORDS "},
            {"audio": "deep/in_tar.flac", "archive": "test.tar.gz", "split": "test"},
            {"audio": "wav/plain.wav", "split": "train", "speaker": 1, "text": ""},
        ],
    )
    corpus = data.read_manifest(tmp_path)
    assert "manifest.jsonl, left out: 1 of train" in capsys.readouterr().out
    assert {split: len(utterances) for split, utterances in corpus.items()} == {
        "train": 1,  # that without words is dropped
        "test": 1,
    }
    first, second = corpus["train"][0], corpus["test"][0]
    assert (first.id, first.speaker, first.text) == ("u0", "1", "TWO WORDS")
    for utterance, seconds in ((first, 0.3), (second, 0.2)):
        expected = torch.from_numpy(tone(seconds) * 32768)
        assert utterance.audio.dtype == torch.int16
        torch.testing.assert_close(utterance.audio.double(), expected, rtol=0, atol=1)


def test_decode_mixes_channels_and_resamples(tmp_path):
    stereo = np.stack([tone(0.5, rate=44100), np.zeros(22050)], axis=1)
    soundfile.write(tmp_path / "stereo.wav", stereo, 44100)
    audio = data.decode(tmp_path / "stereo.wav").double() / 32768
    assert audio.shape == (8000,)
    inner = slice(200, -200)
    expected = torch.from_numpy(tone(0.5) / 2)
    torch.testing.assert_close(audio[inner], expected[inner], rtol=0, atol=1e-3)


def test_decode_keeps_16_bit_samples_exactly(tmp_path):
    samples = np.arange(-32768, 32768, 7).astype(np.int16)
    soundfile.write(tmp_path / "all.flac", samples, RATE)
    assert torch.equal(data.decode(tmp_path / "all.flac"), torch.from_numpy(samples))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"audio": "a.wav", "split": "dev"}], r"no train split .* \(splits there: dev\)"),
        ([{"audio": "a.wav", "split": "train"}], r"only a train split"),
        (
            [{"audio": "a.wav", "split": s} for s in ("train", "test")],
            r"speakers both in train and in test of .*: s",
        ),
        ([{"audio": "a.wav"}], r"line 1: no split"),
        ([{"audio": "b.wav", "split": "dev"}], r"u0 .*b\.wav does not exist"),
        ([{"audio": "a.wav", "split": "dev", "text": None}], "line 1: text .* string, got null"),
        ([{"audio": "a.wav", "split": "dev", "text": 5}], "line 1: text .* string, got 5"),
        ([{"audio": 5, "split": "dev"}], "line 1: audio must be a string, got 5"),
        ([{"audio": "a.wav", "split": ["a"]}], r'line 1: split must be a string, got \["a"\]'),
        ([{"audio": "a.wav", "split": "dev", "archive": 5}], "line 1: archive .* string, got 5"),
        ([{"audio": "a.wav", "split": "dev", "archive": "bad.wav"}], r"bad\.wav: .*not be opened"),
        ([{"audio": "a.wav", "split": "dev", "archive": "cut.tar.gz"}], r"cut\.tar\.gz: .*ended"),
        ([{"audio": "deep", "split": "dev", "archive": "a.tar"}], r"a\.tar has no file deep"),
        ([{"audio": "bad.wav", "split": "dev"}], r"u0 .*bad\.wav"),
        ([{"audio": "a.wav", "archive": "no.tar", "split": "dev"}], r"no\.tar"),
        ([{"audio": "no.wav", "archive": "a.tar", "split": "dev"}], r"a\.tar has no file no\.wav"),
    ],
)
def test_manifest_errors_name_what_is_wrong(tmp_path, rows, message):
    soundfile.write(tmp_path / "a.wav", tone(0.1), RATE)
    (tmp_path / "bad.wav").write_text("not audio")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "a.wav", "a.wav")
        (tmp_path / "folder").mkdir()
        tar.add(tmp_path / "folder", "deep")
    whole = gzip.compress((tmp_path / "a.tar").read_bytes())
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    write_manifest(tmp_path, rows)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data.read_manifest(tmp_path)


def test_manifest_missing_or_malformed(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--data takes a directory with a manifest\.jsonl"):
        data.read_manifest(tmp_path)
    (tmp_path / "manifest.jsonl").write_text("\n{]\n")
    with pytest.raises(ValueError, match="line 2: not a JSON object"):
        data.read_manifest(tmp_path)


def test_librispeech_reader(tmp_path):
    texts = {"train-clean-100": "HE SAID", "train-other-500": "YES", "dev-clean": "OH NO"}
    for speaker, (part, text) in enumerate(texts.items(), 19):
        folder = tmp_path / "LibriSpeech" / part / str(speaker) / "198"
        folder.mkdir(parents=True)
        name = f"{speaker}-198-0000"
        soundfile.write(folder / f"{name}.flac", tone(0.1 * (speaker - 18)), RATE)
        (folder / f"{speaker}-198.trans.txt").write_text(f"{name} {text}\n")
    for root in (tmp_path, tmp_path / "LibriSpeech"):
        corpus = data.read_librispeech(root)
        assert sorted(corpus) == ["dev-clean", "train"]
        assert [u.text for u in corpus["train"]] == ["HE SAID", "YES"]
        assert [len(u.audio) for u in corpus["train"]] == [1600, 3200]
        assert corpus["dev-clean"][0].speaker == "21"
    with pytest.raises(FileNotFoundError, match="no part of LibriSpeech"):
        data.read_librispeech(tmp_path / "LibriSpeech" / "dev-clean")


@pytest.mark.parametrize("batch_length", [1, 60_000, 10**9])
def test_an_epoch_has_every_utterance_once(batch_length):
    rng = random.Random(0)
    lengths = [rng.randint(1, 100_000) for _ in range(300)]
    batches = data.epoch_batches(lengths, batch_length, seed=1, epoch=0)
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(300))
    for batch in batches:
        padded = max(lengths[i] for i in batch) * len(batch)
        assert len(batch) == 1 or padded <= batch_length


def test_batches_follow_seed_and_epoch_and_pad_little():
    rng = random.Random(0)
    lengths = [rng.randint(10_000, 100_000) for _ in range(300)]

    def epoch(seed: int, number: int) -> list[list[int]]:
        return data.epoch_batches(lengths, 10**6, seed=seed, epoch=number)

    assert epoch(0, 3) == epoch(0, 3)
    assert epoch(0, 3) != epoch(0, 4)
    assert epoch(0, 3) != epoch(1, 3)
    padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in epoch(0, 0))
    assert padded < 1.25 * sum(lengths)
    stream = list(itertools.islice(data.endless_batches(lengths, 10**6, seed=0), 100))
    first = epoch(0, 0)
    assert stream[: len(first)] == first
    assert stream[len(first) : 2 * len(first)][:5] == epoch(0, 1)[:5]


def test_collate():
    utterances = [
        data.Utterance("a", "s", "BA", torch.tensor([1, 2, 3], dtype=torch.int16)),
        data.Utterance("b", "s", "A B", torch.tensor([4], dtype=torch.int16)),
    ]
    batch = data.collate(utterances, " AB")
    assert batch.audio.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch.lengths.tolist() == [3, 1]
    assert batch.targets.tolist() == [3, 2, 2, 1, 3]
    assert batch.target_lengths.tolist() == [2, 3]


def noise(samples: int) -> torch.Tensor:
    """White noise as 16-bit samples."""
    return torch.randint(-20_000, 20_000, (samples,), dtype=torch.int16)


def test_features_do_not_depend_on_batch_mates_nor_on_the_future():
    torch.manual_seed(0)
    logmel = data.LogMel(torch.full((80,), -3.0), torch.full((80,), 2.0))
    long, short = noise(20_000), noise(9_000)
    batch = torch.nn.utils.rnn.pad_sequence([long, short], batch_first=True)
    features, frames = logmel(batch, torch.tensor([20_000, 9_000]))
    alone, count = logmel(short[None], torch.tensor([9_000]))
    assert frames.tolist() == [1 + (n - 512) // 160 for n in (20_000, 9_000)]
    assert alone.shape == (1, int(count), 80)
    torch.testing.assert_close(features[1:, : alone.shape[1]], alone)
    assert not features[1, alone.shape[1] :].any()
    # A prefix has the same features, as a stream needs.
    prefix, _ = logmel(long[None, :5000], torch.tensor([5000]))
    torch.testing.assert_close(features[:1, : prefix.shape[1]], prefix)


def test_features_of_silence_and_of_less_than_a_window():
    logmel = data.LogMel()
    for samples in (1, 511, 512, 3000):
        features, frames = logmel(torch.zeros(1, samples).short(), torch.tensor([samples]))
        assert torch.isfinite(features).all()
        assert features.shape[1] == int(frames) >= 1


def test_fit_normalises_the_training_set():
    torch.manual_seed(0)
    utterances = [data.Utterance(str(i), "s", "A", noise(4000 + 100 * i)) for i in range(10)]
    logmel = data.LogMel.fit(utterances)
    frames = torch.cat(
        [logmel(u.audio[None], torch.tensor([len(u.audio)]))[0] for u in utterances], 1
    )
    torch.testing.assert_close(frames.mean((0, 1)), torch.zeros(80), atol=1e-3, rtol=0)
    torch.testing.assert_close(frames.std((0, 1)), torch.ones(80), atol=1e-2, rtol=0)


def test_training_and_held_out_voices_and_phrases_are_disjoint():
    train, test = set(speak.TRAIN_VARIANTS), set(speak.HELD_OUT_VARIANTS)
    assert len(train) == len(speak.TRAIN_VARIANTS) >= 30
    assert len(test) == len(speak.HELD_OUT_VARIANTS) >= 8
    assert not train & test
    pytest.importorskip("espeakng_loader")
    corpus = data.read_synthetic(60, 24, seed=3)
    assert {split: len(utterances) for split, utterances in corpus.items()} == {
        "train": 60,
        "test": 24,
    }
    assert {u.speaker for u in corpus["train"]} == train
    assert {u.speaker for u in corpus["test"]} == test
    assert not {u.text for u in corpus["train"]} & {u.text for u in corpus["test"]}
    for utterance in corpus["train"] + corpus["test"]:
        assert 0.4 < len(utterance.audio) / RATE < 8
        assert utterance.audio.abs().max() > 500
        assert set(utterance.text.split()) <= set(speak.DIGITS)


def test_the_same_line_sounds_the_same_whatever_came_before():
    pytest.importorskip("espeakng_loader")
    rng = random.Random(0)
    lines = speak.write_lines(12, ["f1", "whisper", "m3", "klatt4"], rng, letters=True)
    spoken = list(speak.speak(lines))
    assert spoken == list(speak.speak(lines[::-1]))[::-1]
    faster = lines[0]._replace(rate=2 * lines[0].rate)
    higher = lines[0]._replace(pitch=99)
    (fast, _), (high, _) = speak.speak([faster, higher])
    assert len(fast) < 0.7 * len(spoken[0][0])
    assert high != spoken[0][0]


@pytest.mark.parametrize("voice", ["en-us+nosuch", "nosuch+f1"])
def test_a_voice_that_espeak_lacks_is_an_error(voice):
    pytest.importorskip("espeakng_loader")
    with pytest.raises(RuntimeError, match=rf"no voice .*{voice[:5]}"):
        list(speak.speak([speak.Line(voice, 150, 50, "ONE")]))


def test_without_espeak_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(ImportError, match=r"ldsa_nn\[examples\].* --data"):
        data.read_synthetic(2, 2)


def test_an4(data_dir):
    corpus = data.read_manifest(data_dir / "an4")
    assert {s: len(us) for s, us in corpus.items()} == {"train": 792, "dev": 78, "test": 130}
    minutes = sum(len(u.audio) for u in corpus["train"]) / RATE / 60
    assert minutes == pytest.approx(35.84, abs=0.1)


def test_a_set_without_training_data_is_refused(data_dir):
    with pytest.raises(ValueError, match=r"no train split .* \(splits there: dev, test\)"):
        data.read_manifest(data_dir / "librispeech-mini")
