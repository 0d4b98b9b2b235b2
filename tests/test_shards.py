"""The examples' streamed corpora: packing, reading, every utterance once, resuming, damage."""

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

soundfile = pytest.importorskip("soundfile")
for package in ("torchaudio", "jiwer", "matplotlib"):
    pytest.importorskip(package)
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import data  # noqa: E402
import shards  # noqa: E402
import train_ctc  # noqa: E402
import training  # noqa: E402
from test_train_ctc import TINY, tones  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

DIGITS = "0123456789"


def write_corpus(directory: Path, corpus: dict[str, list[data.Utterance]]) -> None:
    """A manifest: the train split in a compressed archive, the others in plain files."""
    rows = []
    with tarfile.open(directory / "train.tar.gz", "w:gz") as tar:
        for split, utterances in corpus.items():
            for u in utterances:
                row = {"id": u.id, "speaker": u.speaker, "text": u.text, "split": split}
                file = io.BytesIO()
                soundfile.write(file, u.audio.numpy(), data.SAMPLE_RATE, format="WAV")
                if split == "train":
                    member = tarfile.TarInfo(f"wav/{u.id}.wav")
                    member.size = len(file.getvalue())
                    file.seek(0)
                    tar.addfile(member, file)
                    rows.append({**row, "audio": member.name, "archive": "train.tar.gz"})
                else:
                    (directory / f"{u.id}.wav").write_bytes(file.getvalue())
                    rows.append({**row, "audio": f"{u.id}.wav"})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "manifest.jsonl").write_text(lines)


def numbered(split: str, count: int) -> list[data.Utterance]:
    """Utterances of different lengths that each say their own number."""
    rng = np.random.default_rng(0)
    return [
        data.Utterance(
            f"{split}{i}",
            f"{split}{i % 3}",
            f"{i:03}",
            torch.from_numpy(rng.integers(-9000, 9000, 1600 + 97 * (i * 7 % 53)).astype(np.int16)),
        )
        for i in range(count)
    ]


@pytest.fixture
def packed(tmp_path):
    """95 training utterances in ten shards, and some test utterances."""
    corpus = {"train": numbered("train", 95), "test": numbered("test", 7)}
    write_corpus(tmp_path, corpus)
    paths = shards.pack(tmp_path, tmp_path / "shards", per_shard=10, seed=1)
    assert [path.name for path in paths] == [
        "test-00000.tar",
        *(f"train-{i:05}.tar" for i in range(10)),
    ]
    return str(tmp_path / "shards" / "*.tar"), corpus


def test_what_was_packed_is_read(packed):
    pattern, corpus = packed
    read = shards.read_shards(pattern)
    assert read.keys() == {"train", "test"}
    train = read["train"]
    assert len(train) == 95
    assert train.vocabulary == DIGITS
    assert train.speakers == {"train0", "train1", "train2"}

    def check(found, expected):
        assert len(found) == len(expected)
        for one, other in zip(sorted(found), sorted(expected), strict=True):
            assert one[:3] == other[:3]
            assert torch.equal(one.audio, other.audio)

    check(read["test"], corpus["test"])
    members = itertools.chain.from_iterable(map(shards.read_shard, train.paths))
    check([m.utterance(audio.read()) for m, audio in members], corpus["train"])
    # Neighbours of the corpus are dealt out to different shards.
    first = [int(member.text) for member, _ in shards.read_shard(train.paths[0])]
    assert len(first) == 10
    assert max(first) - min(first) > 30
    assert [len(train.sample(n)) for n in (400, 20, 5)] == [95, 20, 5]


def test_packing_again_gives_the_same_bytes_and_overwrites_nothing(packed, tmp_path):
    again = shards.pack(tmp_path, tmp_path / "again", per_shard=10, seed=1)
    for path in again:
        assert path.read_bytes() == (tmp_path / "shards" / path.name).read_bytes()
    with pytest.raises(SystemExit, match="OUT: expected a directory without shards, got one with"):
        shards.main([str(tmp_path), str(tmp_path / "again")])
    with pytest.raises(SystemExit, match=r"no .*manifest\.jsonl"):
        shards.main([str(tmp_path / "nowhere"), str(tmp_path / "new")])
    write_corpus(tmp_path, {"train": numbered("train", 600), "test": numbered("test", 1)})
    message = r"--per-shard: expected .* at most 500 shards, got 1, which makes 601"
    with pytest.raises(ValueError, match=message):
        shards.pack(tmp_path, tmp_path / "new", per_shard=1, seed=0)
    (tmp_path / "test0.wav").write_text("no audio")
    with pytest.raises(ValueError, match=r"test0 of .*manifest\.jsonl: test0\.wav: "):
        shards.pack(tmp_path, tmp_path / "new", per_shard=100, seed=0)
    assert list((tmp_path / "new").iterdir()) == []


def steps_of(train, rank, count, start=None, steps=0, accumulate=1):
    """Steps of a rank of two, through its DataLoader and two workers."""
    stream = shards.Stream(
        train,
        DIGITS,
        30_000,
        accumulate=accumulate,
        rank=rank,
        ranks=2,
        seed=3,
        start=start,
        steps=steps,
    )
    loader = DataLoader(stream, batch_size=None, num_workers=shards.WORKERS)
    return list(itertools.islice(loader, count))


def said(step):
    """The numbers that a step's batches say, where they count."""
    texts = []
    for batch in step.batches:
        if batch.count:
            texts += ["".join(DIGITS[i - 1] for i in t) for t in batch.targets.view(-1, 3).tolist()]
    return [int(text) for text in texts]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_ranks_of_two_workers_hear_every_utterance_once_an_epoch(
    packed, monkeypatch, accumulate
):
    monkeypatch.setattr(shards, "WINDOW", 8)
    train = shards.read_shards(packed[0])["train"]
    epochs = []
    for epoch in range(2):
        heard = []
        for rank in range(2):
            steps = [
                step
                for step in steps_of(train, rank, 50, accumulate=accumulate)
                if step.position[0] == epoch
            ]
            assert {step.worker for step in steps} == {0, 1}
            assert all(len(step.batches) == accumulate for step in steps)
            heard += [said(step) for step in steps]
            for batch in itertools.chain.from_iterable(step.batches for step in steps):
                assert batch.audio.numel() <= 30_000
        assert sorted(itertools.chain.from_iterable(heard)) == list(range(95))
        epochs.append(heard)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stream_goes_on_where_it_was(packed, monkeypatch, accumulate):
    monkeypatch.setattr(shards, "WINDOW", 8)
    train = shards.read_shards(packed[0])["train"]
    whole = steps_of(train, 1, 40, accumulate=accumulate)
    assert whole[-1].position[0] >= 2  # the steps reach into the third epoch
    for done in (0, 1, 7, 20, 33):
        start = [(0, 0), (0, 0)]
        for step in whole[:done]:
            start[step.worker] = step.position
        for one, other in zip(
            steps_of(train, 1, 40 - done, start, done, accumulate), whole[done:], strict=True
        ):
            assert one[1:] == other[1:]
            for batch, same in zip(one.batches, other.batches, strict=True):
                assert all(map(torch.equal, batch[:4], same[:4]))
                assert batch.count == same.count


def test_fewer_shards_than_workers_are_refused(packed, tmp_path):
    for path in tmp_path.glob("shards/train-0000[1-9].tar"):
        path.unlink()
    message = "--shards: expected at least 2 training shards, 2 for each process, got 1"
    with pytest.raises(SystemExit, match=message):
        train_ctc.main(["--shards", packed[0], "--out", str(tmp_path / "out")])
    assert {p.name for p in (tmp_path / "out").iterdir()} <= {".lock"}


def rewrite(path: Path, change) -> None:
    """Write a shard anew, its members' names and contents changed by a function."""
    with tarfile.open(path) as tar:
        members = [(m.name, tar.extractfile(m).read()) for m in tar]
    with tarfile.open(path, "w") as tar:
        for name, content in change(members):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def cut(at: int):
    return lambda path: path.write_bytes(path.read_bytes()[:at])


def overwrite(path: Path) -> None:
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        header = tar.getmembers()[4].offset
    content[header : header + 512] = b"x" * 512
    path.write_bytes(content)


DAMAGE = {
    "no tar": (
        lambda path: path.write_text("nothing"),
        "truncated header|file could not be opened",
    ),
    "empty": (lambda path: path.write_bytes(b""), "empty"),
    "cut in a member": (cut(3000), "unexpected end of data"),
    "cut between members": (cut(0x2000), "unexpected end of data|damaged or cut short"),
    "a bad header": (overwrite, r"damaged or cut short at byte \d+"),
    "no text": (
        lambda path: rewrite(path, lambda ms: [m for m in ms if m[0] != ms[1][0]]),
        r"\d+: expected \.flac or \.wav and beside it \.txt or \.json, got \.flac",
    ),
    "bad text": (
        lambda path: rewrite(path, lambda ms: [(n, c if "flac" in n else b"[1]") for n, c in ms]),
        'expected an object with a string "text"',
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_shard_is_named_before_anything_is_written(packed, tmp_path, kind):
    damage, message = DAMAGE[kind]
    damage(tmp_path / "shards" / "train-00004.tar")
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match=rf"train-00004\.tar: .*({message})"):
        train_ctc.main(["--shards", packed[0], "--out", str(out), "--steps", "1"])
    assert {p.name for p in out.iterdir()} <= {".lock"}


def test_damage_during_training_is_named(packed, tmp_path):
    train = shards.read_shards(packed[0])["train"]
    for path in tmp_path.glob("shards/train-*.tar"):
        overwrite(path)
    stream = shards.Stream(train, DIGITS, 30_000, accumulate=1, rank=0, ranks=1, seed=0)
    # Not through workers: PyTorch takes seconds to end those that raised.
    with pytest.raises(ValueError, match=r"train-0000\d\.tar: damaged or cut short at byte"):
        next(stream._epoch(0, 0, 0))


def test_audio_that_is_none_is_named(packed, tmp_path):
    rewrite(
        tmp_path / "shards" / "train-00002.tar",
        lambda ms: [(n, b"noise" if "flac" in n else c) for n, c in ms],
    )
    train = shards.read_shards(packed[0])["train"]
    with pytest.raises(ValueError, match=r"train-00002\.tar: the audio of train\d+: "):
        train.sample()


def test_which_files_are_shards(packed, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--shards: expected tar files, nothing matches"):
        shards.read_shards(str(tmp_path / "none-*.tar"))
    with pytest.raises(ValueError, match=r"no train split in .*test-\*"):
        shards.read_shards(str(tmp_path / "shards" / "test-*.tar"))
    with pytest.raises(ValueError, match=r"only a train split in"):
        shards.read_shards(str(tmp_path / "shards" / "train-*.tar"))
    (tmp_path / "shards" / "other.tar").touch()
    with pytest.raises(ValueError, match=r"files called SPLIT-NUMBER\.tar, got .*other\.tar"):
        shards.read_shards(packed[0])


def test_txt_and_wav_members_and_unknown_speakers(tmp_path):
    for split in ("train", "test"):
        with tarfile.open(tmp_path / f"{split}-0.tar", "w") as tar:
            for i, text in enumerate(("A  B", "", "C")):
                file = io.BytesIO()
                soundfile.write(file, np.zeros(800, np.int16), 8000, format="WAV")
                parts = {"wav": file.getvalue(), "txt": text.encode(), "cls": b"7"}
                for kind, content in parts.items():
                    member = tarfile.TarInfo(f"./a.b/{i}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    read = shards.read_shards(str(tmp_path / "*.tar"))
    assert [(u.text, len(u.audio)) for u in read["test"]] == [("A B", 1600), ("C", 1600)]
    assert len(read["train"]) == 2
    for member, audio in shards.read_shard(read["train"].paths[0]):
        assert shards.samples(member, audio) == 1600
    assert member.id == "./a.b/2"


def stop_in_step(monkeypatch, number: int) -> None:
    """Make the process get Ctrl-C in that step; batches are fetched by others, ahead of it."""
    original, steps = training.gradients, itertools.count(1)

    def gradients(*arguments, **options):
        if next(steps) == number:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments, **options)

    monkeypatch.setattr(training, "gradients", gradients)


def test_training_on_shards_resumes_where_it_was(tmp_path, monkeypatch):
    write_corpus(tmp_path, {"train": tones("train", 24, 0), "test": tones("test", 5, 1)})
    shards.pack(tmp_path, tmp_path / "shards", per_shard=6, seed=0)
    threads = torch.get_num_threads()

    def run(out, *arguments):
        options = ["--device", "cpu", *TINY.split(), "--steps", "14", "--encoder", "streaming"]
        where = ["--shards", str(tmp_path / "shards" / "*.tar"), "--out", str(tmp_path / out)]
        return train_ctc.main([*options, *where, *arguments])

    results = run("whole")
    assert results["source"] == "shards-shards"
    with monkeypatch.context() as patched:
        stop_in_step(patched, 9)
        with pytest.raises(SystemExit, match="stopped after 9 steps"):
            run("out")
    assert run("out", "--resume")["held_out"] == results["held_out"]
    whole, out = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("whole", "out")
    )
    assert torch.equal(whole["rng"], out["rng"])
    assert torch.equal(whole["position"], out["position"])
    assert all(torch.equal(value, out["model"][name]) for name, value in whole["model"].items())
    with (tmp_path / "shards" / "train-00000.tar").open("ab") as file:
        file.write(bytes(512))
    with pytest.raises(SystemExit, match=r"the training data is shards-shards, \w+ there and"):
        run("out", "--resume")
    torch.set_num_threads(threads)


TERMINATED = """
import os, subprocess, sys
import train_ctc
import training

gradients, calls = training.gradients, []

def counted(*args, **options):
    calls.append(0)
    if len(calls) == 3:
        # Of another process, as a scheduler is: workers end quietly where their parent sends it.
        subprocess.run(["kill", "-TERM", "--", f"-{os.getpgid(0)}"])
    return gradients(*args, **options)

training.gradients = counted
train_ctc.main(sys.argv[1:])
"""


def test_a_scheduler_that_ends_all_processes_finds_a_checkpoint(packed, tmp_path):
    """The workers that read shards get the signal too."""
    options = [*TINY.split(), "--steps", "1000", "--out", str(tmp_path / "out")]
    job = subprocess.run(
        [sys.executable, "-c", TERMINATED, "--shards", packed[0], *options],
        env=os.environ | {"PYTHONPATH": f"{EXAMPLES}{os.pathsep}{EXAMPLES.parent}"},
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "stopped after 3 steps" in job.stderr and job.returncode == 1, job.stderr
    assert torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["step"] == 3
