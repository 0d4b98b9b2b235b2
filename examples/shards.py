"""Corpora larger than memory: shards, tar files that training reads front to back as it goes.

    python examples/shards.py DATA OUT               # DATA holds a manifest.jsonl
    python examples/train_ctc.py --shards 'OUT/*.tar'

A shard is called SPLIT-NUMBER.tar. An utterance is two members, one after the other: KEY.flac or
KEY.wav, and KEY.txt (what was said) or KEY.json (an object with "text", perhaps "id" and
"speaker"); others are passed over. "train" is streamed, the other splits are read into memory. Such
files are also what the webdataset library writes and reads.
"""

import argparse
import contextlib
import glob
import io
import itertools
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import soundfile
import torch
from data import (
    SAMPLE_RATE,
    Batch,
    Corpus,
    Utterance,
    check_corpus,
    collate,
    decode,
    in_threads,
    length_batches,
    read_archive,
    read_rows,
)
from torch.utils.data import IterableDataset, get_worker_info
from tqdm import tqdm

WINDOW = 512  # utterances that a worker holds, still compressed, and shuffles
WORKERS = 2  # of each rank: the order of the batches depends on it
AUDIO = (".flac", ".wav")


class Member(NamedTuple):
    """An utterance in a shard: what was said, and where its audio lies."""

    id: str
    speaker: str
    text: str
    path: str
    offset: int
    size: int

    def read(self) -> bytes:
        """The compressed audio."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)

    def utterance(self, audio: bytes) -> Utterance:
        """The decoded utterance."""
        try:
            return Utterance(self.id, self.speaker, self.text, decode(audio))
        except soundfile.LibsndfileError as error:
            raise ValueError(f"{self.path}: the audio of {self.id}: {error}") from error


def read_shard(path: str) -> Iterator[tuple[Member, IO[bytes]]]:
    """The utterances with words of a shard, each with a file of its audio that holds for now.

    Raises:
        ValueError: the file is no whole tar file, or an utterance lacks one of its members; the
            message names the shard.
    """

    def key(member: tarfile.TarInfo) -> str:
        folder, name = os.path.split(member.name)
        return os.path.join(folder, name.partition(".")[0])

    try:
        # "r:": a compressed one could not be entered in its middle.
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for name, group in itertools.groupby((m for m in tar if m.isfile()), key):
                parts = {m.name[len(name) :]: m for m in group}
                audio = next((parts[kind] for kind in AUDIO if kind in parts), None)
                if audio is None or not parts.keys() & {".txt", ".json"}:
                    there = ", ".join(parts)
                    raise ValueError(
                        f"{name}: expected .flac or .wav and beside it .txt or .json, got {there}"
                    )
                if ".json" in parts:
                    said = json.loads(tar.extractfile(parts[".json"]).read())
                    if not isinstance(said, dict) or not isinstance(said.get("text"), str):
                        raise ValueError(f'{name}.json: expected an object with a string "text"')
                else:
                    said = {"text": tar.extractfile(parts[".txt"]).read().decode()}
                text = " ".join(said["text"].split())
                if text:
                    yield (
                        Member(
                            str(said.get("id", name)),
                            str(said.get("speaker", "")),
                            text,
                            path,
                            audio.offset_data,
                            audio.size,
                        ),
                        tar.extractfile(audio),
                    )
            # tarfile takes a header that it cannot read for the end.
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise ValueError(f"damaged or cut short at byte {tar.offset}")
    except (OSError, ValueError, tarfile.TarError) as error:
        raise ValueError(f"{path}: {error}") from error


class Shards:
    """The training shards: what one look at all of their texts tells.

    paths, vocabulary (all characters, sorted), speakers; len() counts the utterances.
    """

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self._count = 0
        characters: set[str] = set()
        self.speakers: set[str] = set()
        for path in tqdm(paths, "look through", unit="shard"):
            for member, _ in read_shard(path):
                self._count += 1
                characters |= set(member.text)
                self.speakers.add(member.speaker)
        self.vocabulary = "".join(sorted(characters))

    def __len__(self) -> int:
        return self._count

    def check_for(self, ranks: int) -> None:
        """Raise a ValueError if there are fewer shards than workers of so many ranks."""
        if len(self.paths) < ranks * WORKERS:
            raise ValueError(
                f"--shards: expected at least {ranks * WORKERS} training shards, {WORKERS} for each"
                f" process, got {len(self.paths)}: shards.py --per-shard N writes more of them"
            )

    def sample(self, at_most: int = 400) -> list[Utterance]:
        """The first utterances of every shard, or of evenly spaced ones."""
        paths = self.paths[:: -(-len(self.paths) // at_most)]
        each = max(1, at_most // len(paths))
        return [
            member.utterance(audio.read())
            for path in paths
            for member, audio in itertools.islice(read_shard(path), each)
        ]


def read_shards(pattern: str) -> Corpus | dict[str, Shards]:
    """The corpus of the shards that match: "train" as `Shards`, other splits as utterances.

    Raises:
        FileNotFoundError, ValueError: nothing matches; a file is no shard, or damaged; there is no
            train split or no other one, or they share speakers.
    """
    splits: dict[str, list[str]] = {}
    for path in sorted(glob.glob(os.path.expanduser(pattern))):
        name = re.fullmatch(r"(.+)-\d+\.tar", os.path.basename(path))
        if name is None:
            raise ValueError(f"--shards: expected files called SPLIT-NUMBER.tar, got {path}")
        splits.setdefault(name[1], []).append(path)
    if not splits:
        raise FileNotFoundError(f"--shards: expected tar files, nothing matches {pattern}")
    train = Shards(splits.pop("train", []))
    corpus: Corpus = {}
    for split, paths in splits.items():
        found = itertools.chain.from_iterable(read_shard(path) for path in paths)
        utterances = [member.utterance(audio.read()) for member, audio in found]
        # Two speakers that are unknown need not be one.
        corpus[split] = [u._replace(speaker=u.speaker or f"unknown of {split}") for u in utterances]
    # Who spoke is all that the check asks of the training data.
    silence = torch.empty(0, dtype=torch.int16)
    heard = [Utterance("", speaker, "-", silence) for speaker in train.speakers]
    checked = check_corpus({**corpus, "train": heard}, pattern)
    return {**checked, "train": train}


class Step(NamedTuple):
    """The micro-batches of a rank's next step, and where their stream then goes on.

    position: of `Stream`'s start, the row of that number.
    """

    batches: list[Batch]
    worker: int = 0
    position: tuple[int, int] = (0, 0)


class Stream(IterableDataset):
    """A rank's steps, epoch after epoch, read by its DataLoader's `WORKERS` workers.

    Each of a job's workers reads shards of its own: an epoch's random order of the shards is dealt
    out to them. It reads `WINDOW` utterances at a time, makes batches of near-equal lengths of
    them, and gives these in random order. In an epoch every utterance comes once; as workers of
    shorter shards come to their next epoch earlier, epochs of different workers may overlap. What
    comes depends on the arguments alone.
    """

    def __init__(
        self,
        shards: Shards,
        vocabulary: str,
        batch_length: int,
        *,
        accumulate: int,
        rank: int,
        ranks: int,
        seed: int,
        start: list[tuple[int, int]] | None = None,
        steps: int = 0,
    ) -> None:
        """Steps of accumulate batches, each up to batch_length samples long with its padding.

        start: epoch, and steps of it that are done, of each worker of this rank.
        steps: how many were taken of this rank's workers, in turn, to come there.
        """
        self.shards, self.vocabulary, self.batch_length = shards, vocabulary, batch_length
        self.accumulate, self.rank, self.ranks, self.seed = accumulate, rank, ranks, seed
        self.start = start or [(0, 0)] * WORKERS
        self.steps = steps

    def __iter__(self) -> Iterator[Step]:
        info = get_worker_info()
        # The loader asks its workers in turn, from its first one on.
        worker = (info.id + self.steps) % WORKERS
        epoch, done = self.start[worker]
        while True:
            for step, batches in enumerate(self._epoch(worker, epoch, done), done + 1):
                yield Step(batches, worker, (epoch, step))
            epoch, done = epoch + 1, 0

    def _epoch(self, worker: int, epoch: int, done: int) -> Iterator[list[Batch]]:
        """The steps of an epoch after the first `done`, whose audio is not even read."""
        stream = self.rank * WORKERS + worker
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.shards.paths))
        mine = order[stream :: self.ranks * WORKERS]
        members = itertools.chain.from_iterable(read_shard(self.shards.paths[i]) for i in mine)
        step, pending = 0, []
        for window in itertools.count():
            held, lengths = [], []
            for member, audio in itertools.islice(members, WINDOW):
                lengths.append(samples(member, audio))
                audio.seek(0)
                held.append((member, audio.read() if step >= done else None))
            if not held:
                break
            rng = np.random.default_rng((self.seed, epoch, stream, window))
            for indices in length_batches(lengths, self.batch_length, rng):
                pending.append([held[i] for i in indices])
                if len(pending) == self.accumulate:
                    step += 1
                    if step > done:
                        yield [self._collate(batch) for batch in pending]
                    pending = []
        if pending and step >= done:
            batches = [self._collate(batch) for batch in pending]
            # Every rank's steps are of as many batches: the last one again, not to count.
            yield batches + [batches[-1]._replace(count=0)] * (self.accumulate - len(batches))

    def _collate(self, batch: list[tuple[Member, bytes | None]]) -> Batch:
        utterances = [member.utterance(audio or member.read()) for member, audio in batch]
        return collate(utterances, self.vocabulary)


def samples(member: Member, audio: IO[bytes]) -> int:
    """How long an utterance is at 16 kHz, from the head of its file."""
    try:
        info = soundfile.info(audio)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{member.path}: the audio of {member.id}: {error}") from error
    return -(-info.frames * SAMPLE_RATE // info.samplerate)


def pack(data: Path, out: Path, *, per_shard: int, seed: int) -> list[Path]:
    """Write the shards of a directory with a manifest.jsonl; return their paths.

    Every utterance goes into a random shard of its split, as 16 kHz mono 16-bit FLAC, and the audio
    of the corpus is never all in memory. The shards appear once all are written.

    Raises:
        FileNotFoundError, FileExistsError, ValueError: as `data.read_manifest`; out has shards; or
            there would be too many shards to write at the same time.
    """
    manifest = data / "manifest.jsonl"
    rows = read_rows(manifest)
    silence = torch.empty(0, dtype=torch.int16)
    corpus: Corpus = {}
    for i, row in enumerate(rows):
        said = " ".join(row["text"].split())
        corpus.setdefault(row["split"], []).append(
            Utterance(str(i), str(row["speaker"]), said, silence)
        )
    rng = np.random.default_rng(seed)
    shard_of: dict[int, str] = {}
    for split, utterances in check_corpus(corpus, str(manifest)).items():
        if Path(split).name != split:
            raise ValueError(f"{manifest}: expected splits that can name files, got {split!r}")
        places = rng.permutation(len(utterances)) // per_shard
        for utterance, place in zip(utterances, places, strict=True):
            shard_of[int(utterance.id)] = f"{split}-{place:05}.tar"
    names = sorted(set(shard_of.values()))
    if len(names) > 500:  # systems allow about a thousand open files
        raise ValueError(
            f"--per-shard: expected so many that there are at most 500 shards, got {per_shard}, "
            f"which makes {len(names)}"
        )
    out.mkdir(parents=True, exist_ok=True)
    if there := next(out.glob("*.tar"), None):
        raise FileExistsError(f"OUT: expected a directory without shards, got one with {there}")
    with tempfile.TemporaryDirectory(dir=out, prefix=".shards-") as folder:
        with contextlib.ExitStack() as stack, tqdm(total=len(shard_of), desc="pack") as bar:
            tars = {
                name: stack.enter_context(tarfile.open(Path(folder) / name, "w")) for name in names
            }
            sources = _sources(manifest, rows, shard_of)
            while chunk := list(itertools.islice(sources, 256)):
                flacs = in_threads(lambda item: _flac(manifest, rows, *item), chunk, None)
                for (i, _), flac in zip(chunk, flacs, strict=True):
                    row = rows[i]
                    said = {name: str(row[name]) for name in ("id", "speaker", "text")}
                    text = json.dumps(said, ensure_ascii=False).encode()
                    for kind, content in ((".flac", flac), (".json", text)):
                        member = tarfile.TarInfo(f"{i:09}{kind}")
                        member.size = len(content)
                        tars[shard_of[i]].addfile(member, io.BytesIO(content))
                    bar.update()
        for name in names:
            os.replace(Path(folder) / name, out / name)
    return [out / name for name in names]


def _sources(
    manifest: Path, rows: list[dict], wanted: dict[int, str]
) -> Iterator[tuple[int, bytes | Path]]:
    """The number of each wanted row with its audio: plain files, then archives front to back."""
    archives: dict[str, dict[str, list[int]]] = {}
    for i in wanted:
        row = rows[i]
        if archive := row.get("archive"):
            archives.setdefault(archive, {}).setdefault(row["audio"], []).append(i)
        elif not (manifest.parent / row["audio"]).is_file():
            raise FileNotFoundError(f"{row['id']} of {manifest}: {row['audio']} does not exist")
        else:
            yield i, manifest.parent / row["audio"]
    for archive, members in sorted(archives.items()):
        for name, content in read_archive(manifest, archive, set(members)):
            yield from ((i, content) for i in members.pop(name, []))
        if members:
            raise FileNotFoundError(
                f"{manifest.parent / archive} has no file {', '.join(sorted(members)[:5])}"
            )


def _flac(manifest: Path, rows: list[dict], i: int, source: bytes | Path) -> bytes:
    try:
        audio = decode(source)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{rows[i]['id']} of {manifest}: {rows[i]['audio']}: {error}") from error
    file = io.BytesIO()
    soundfile.write(file, audio.numpy(), SAMPLE_RATE, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def main(argv: list[str] | None = None) -> None:
    """Pack the manifest that the command line names."""
    parser = argparse.ArgumentParser(
        description="Write shards for train_ctc.py --shards from a manifest.jsonl.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("data", type=Path, metavar="DATA", help="directory with a manifest.jsonl")
    add("out", type=Path, metavar="OUT", help="directory for the shards")
    add("--per-shard", type=int, default=1000, help="utterances in a shard, at most")
    add("--seed", type=int, default=0, help="of the order in which utterances are dealt out")
    args = parser.parse_args(argv)
    if args.per_shard < 1:
        parser.error(f"--per-shard: expected a whole number of at least 1, got {args.per_shard}")
    if args.seed < 0:
        parser.error(f"--seed: expected a whole number of at least 0, got {args.seed}")
    try:
        paths = pack(args.data, args.out, per_shard=args.per_shard, seed=args.seed)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from error
    print(f"{len(paths)} shards in {args.out}")


if __name__ == "__main__":
    main()
