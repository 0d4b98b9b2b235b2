"""AN4 from its publisher's archive: a synthetic one, and one made of the real recordings."""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("torchaudio")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import data  # noqa: E402
import prepare_an4  # noqa: E402

FOLDERS = {"train": "an4_clstk", "test": "an4test_clstk"}
# id -> (official set, text): two speakers to train on, one left out, one of dev, one of test.
LINES = {
    "an251-fash-b": ("train", "YES"),
    "cen1-mdcs2-b": ("train", "U M N Y  H SIX"),
    "cen5-zzzz-b": ("train", "P I T T S B U R G H"),
    "an86-fbbh-b": ("train", "C Z D Z W EIGHT"),
    "an406-fcaw-b": ("test", "RUBOUT G M E F THREE NINE"),
}


def noise(key: str) -> np.ndarray:
    """Samples of every 16-bit value's kind, other ones for each key."""
    rng = np.random.default_rng(list(key.encode()))
    return rng.integers(-32768, 32768, 400 + len(key), np.int16)


def sphere(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 16000, format="NIST", subtype="PCM_16", endian="LITTLE")
    return file.getvalue()


def files_of(lines: dict[str, tuple[str, str]], audio) -> dict[str, bytes]:
    """What lies in an archive of these utterances, by name."""
    files = {"an4/README": b"The files are in NIST's Sphere format"}
    for official, folder in FOLDERS.items():
        mine = {key: text for key, (of, text) in lines.items() if of == official}
        paths = {key: f"{folder}/{key.split('-')[1]}/{key}" for key in mine}
        form = "<s> {} </s> ({})\n" if official == "train" else "{} ({})\n"
        texts = "".join(form.format(text, key) for key, text in mine.items())
        files[f"an4/etc/an4_{official}.transcription"] = texts.encode()
        files[f"an4/etc/an4_{official}.fileids"] = "\n".join(paths.values()).encode()
        files |= {f"an4/wav/{path}.sph": sphere(audio(key)) for key, path in paths.items()}
    return files


def write(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("whole", [False, True])
def test_what_the_archive_holds_comes_out_as_it_is(tmp_path, whole):
    files = files_of(LINES, noise)
    archive = write(tmp_path / "an4_sphere.tar.gz", dict(sorted(files.items(), reverse=True)))
    out = tmp_path / "new" / "an4"
    prepare_an4.main([str(archive), str(out), *(["--whole"] if whole else [])])
    assert {p.name for p in out.iterdir()} == {"manifest.jsonl", "train.tar", "dev.tar", "test.tar"}
    assert list(out.parent.iterdir()) == [out]
    corpus = data.read_manifest(out)
    found = {u.id: (split, u.speaker, u.text) for split, us in corpus.items() for u in us}
    expected = {
        "an251-fash-b": ("train", "fash", "YES"),
        "cen1-mdcs2-b": ("train", "mdcs2", "U M N Y H SIX"),
        "an86-fbbh-b": ("dev", "fbbh", "C Z D Z W EIGHT"),
        "an406-fcaw-b": ("test", "fcaw", "RUBOUT G M E F THREE NINE"),
    }
    if whole:
        expected["cen5-zzzz-b"] = ("train", "zzzz", "P I T T S B U R G H")
    assert found == expected
    for utterance in (u for us in corpus.values() for u in us):
        assert np.array_equal(utterance.audio.numpy(), noise(utterance.id))


def test_it_writes_the_lines_that_the_real_corpus_has(tmp_path, data_dir):
    """Real recordings in the official form come out as the same lines and samples."""
    real = rows_of(data_dir / "an4")
    chosen = [row for row in real if row["id"].startswith(("an25", "an8", "an41"))]
    assert {row["split"] for row in chosen} == {"train", "dev", "test"}
    audio = {}
    for archive in {row["archive"] for row in chosen}:
        with tarfile.open(data_dir / "an4" / archive) as tar:
            for row in chosen:
                if row["archive"] == archive:
                    content = io.BytesIO(tar.extractfile(row["audio"]).read())
                    audio[row["id"]] = soundfile.read(content, dtype="int16")[0]
    lines = {row["id"]: (row["official_split"], row["text"]) for row in reversed(chosen)}
    archive = write(tmp_path / "a.tar.gz", files_of(lines, audio.__getitem__))
    prepare_an4.main([str(archive), str(tmp_path / "out")])
    assert rows_of(tmp_path / "out") == chosen
    for split in data.read_manifest(tmp_path / "out").values():
        for utterance in split:
            assert np.array_equal(utterance.audio.numpy(), audio[utterance.id])


def test_the_speakers_are_those_of_the_real_corpus(data_dir):
    speakers = {}
    for row in rows_of(data_dir / "an4"):
        speakers.setdefault(row["split"], set()).add(row["speaker"])
    assert speakers["train"] == prepare_an4.TRAIN
    assert speakers["dev"] == prepare_an4.DEV


TRANSCRIPTS = "an4/etc/an4_train.transcription"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({TRANSCRIPTS: None}, r"it has no an4_train\.transcription: is it CMU's"),
        ({TRANSCRIPTS: b"YES an251\n"}, r"transcription, line 1: expected .*, got 'YES an251'"),
        ({TRANSCRIPTS: b"<s> NO </s> (x-fash-b)\n"}, r"only one has an251-fash-b, an86-fbbh-b, "),
        ({"an4/wav/an4_clstk/fash/an251-fash-b.sph": None}, r"it has no wav/an4_clstk/fash/an251"),
        ({"an4/wav/an4_clstk/fash/an251-fash-b.sph": b"junk"}, r"fash/an251-fash-b\.sph: "),
    ],
)
def test_a_wrong_archive_is_named_and_leaves_nothing(tmp_path, changes, message):
    files = files_of(LINES, noise) | changes
    archive = write(tmp_path / "a.tar.gz", {k: v for k, v in files.items() if v is not None})
    with pytest.raises(SystemExit, match=message):
        prepare_an4.main([str(archive), str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == [archive]


def test_a_damaged_archive_a_missing_one_and_an_old_directory_are_refused(tmp_path):
    archive = write(tmp_path / "a.tar.gz", files_of(LINES, noise))
    archive.write_bytes(archive.read_bytes()[:2000])
    with pytest.raises(SystemExit, match=r"a\.tar\.gz: .*ended"):
        prepare_an4.main([str(archive), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"ARCHIVE: expected .*, there is no .*none"):
        prepare_an4.main([str(tmp_path / "none"), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match=r"OUT: expected a new directory, .* exists"):
        prepare_an4.main([str(archive), str(tmp_path)])
