"""Make a directory for train_ctc.py --data of AN4 as Carnegie Mellon University publishes it.

    python examples/prepare_an4.py an4_sphere.tar.gz OUT
    python examples/train_ctc.py --data OUT

AN4: spelled words, digits and commands, read by 84 speakers in about 1991. OUT gets manifest.jsonl
and train.tar, dev.tar and test.tar of 16-bit FLAC, without loss: 792 utterances of 62 speakers to
train on, 78 of six others of the official training set ("dev"), and the official test set, 130
utterances of ten. OUT appears once all of it is written.
"""

import argparse
import io
import json
import os
import re
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

try:
    import soundfile
    from tqdm import tqdm
except (ImportError, OSError) as error:  # OSError: soundfile's own C library is missing
    raise ImportError(f"{error}: run pip install 'ldsa_nn[examples]'") from error

DEV = frozenset("fbbh fjdn mblw mcrt mnfe mrmg".split())
# Six more of the official training set are left out unless asked for: figures compare only where
# the training data is the same.
TRAIN = frozenset(
    """
    fash fclc fejs fjmd fkai fkdo flmm2 flrp fmjc fmjd fnsv fplp fsaf2 fsrb ftal ftmj fwxs mblb mbmg
    mcel mcen mcfl mcsc mdcs mdcs2 mdmc mdxn mdxs meab meht mema mewl mfaa mgah mjda mjdr mjes mjgk
    mjhp mjjs2 mkdb mkem mmaf mmal mmap mmdg mmkw mmsh mmtm mnjl mrab mrcb mrjc2 mscg2 msct msjm
    msmn msrb mtje mtos mtxj mwhw
    """.split()
)
SPLITS = ("train", "dev", "test")
# "<s> YES </s> (an251-fash-b)"; the test set's lines have no <s>.
LINE = re.compile(r"(?:<s>)?(?P<text>.*?)(?:</s>)?\s*\((?P<id>[^()\s]+)\)")


class Recording(NamedTuple):
    """A line of the official lists: path is the recording's, below wav/ and without suffix."""

    id: str
    speaker: str
    text: str
    path: str
    official: str


def read(archive: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """The official lists by name, and the recordings by their path below wav/, without suffix."""
    lists = [f"an4_{s}.{kind}" for s in ("train", "test") for kind in ("fileids", "transcription")]
    etc: dict[str, str] = {}
    sounds: dict[str, bytes] = {}
    try:
        # A compressed archive is read front to back, once; the recordings are 64 MB.
        with tarfile.open(archive) as tar:
            for member in tqdm(tar, "read", unit="file"):
                path = PurePosixPath(member.name)
                if path.parent.name == "etc" and path.name in lists:
                    etc[path.name] = tar.extractfile(member).read().decode()
                elif path.suffix == ".sph" and "wav" in path.parts:
                    below = path.parts[path.parts.index("wav") + 1 :]
                    key = str(PurePosixPath(*below).with_suffix(""))
                    sounds[key] = tar.extractfile(member).read()
    except Exception as error:  # every compression has errors of its own
        raise ValueError(f"{archive}: {error}") from error
    if missing := [name for name in lists if name not in etc]:
        raise ValueError(
            f"{archive}: expected AN4's lists in etc/, it has no {', '.join(missing)}: is it CMU's "
            "an4_sphere.tar.gz?"
        )
    return etc, sounds


def read_lists(etc: dict[str, str]) -> list[Recording]:
    """The official lists, by name -> what each holds, as recordings.

    Raises:
        ValueError: a line is no transcript, or the two lists of a set differ; the message names it.
    """
    recordings = []
    for official in ("train", "test"):
        name = f"an4_{official}.transcription"
        paths = {PurePosixPath(line).name: line for line in etc[f"an4_{official}.fileids"].split()}
        texts = {}
        for number, line in enumerate(etc[name].splitlines(), 1):
            if line.strip():
                match = LINE.fullmatch(line.strip())
                if match is None:
                    raise ValueError(
                        f"{name}, line {number}: expected <s> WORDS </s> (ID), got {line!r}"
                    )
                texts[match["id"]] = " ".join(match["text"].upper().split())
        if differ := sorted(texts.keys() ^ paths.keys()):
            raise ValueError(
                f"{name} and an4_{official}.fileids: expected the same utterances, only one has "
                f"{', '.join(differ[:5])}"
            )
        for key, text in texts.items():
            speaker = PurePosixPath(paths[key]).parent.name
            recordings.append(Recording(key, speaker, text, paths[key], official))
    return recordings


def split_of(recording: Recording, *, whole: bool) -> str | None:
    """Where a recording belongs, or None: `whole` trains on all that are not held out."""
    if recording.official == "test":
        return "test"
    if recording.speaker in DEV:
        return "dev"
    return "train" if whole or recording.speaker in TRAIN else None


def prepare(archive: Path, out: Path, *, whole: bool) -> dict[str, int]:
    """Write out, all of it or nothing, and return how many utterances each split has.

    Raises:
        FileExistsError, FileNotFoundError, ValueError: out exists, archive does not; it is not
            AN4's distribution in NIST SPHERE, or damaged.
    """
    if out.exists():
        raise FileExistsError(f"OUT: expected a new directory, {out} exists")
    if not archive.is_file():
        raise FileNotFoundError(f"ARCHIVE: expected CMU's an4_sphere.tar.gz, there is no {archive}")
    etc, sounds = read(archive)
    chosen: dict[str, list[Recording]] = {split: [] for split in SPLITS}
    for recording in read_lists(etc):
        if split := split_of(recording, whole=whole):
            chosen[split].append(recording)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        part = Path(folder) / out.name  # of a new directory's mode, as a temporary one is not
        part.mkdir()
        rows = []
        total = sum(map(len, chosen.values()))
        with tqdm(total=total, desc="write", unit="utt") as bar:
            for split, recordings in chosen.items():
                with tarfile.open(part / f"{split}.tar", "w") as tar:
                    for recording in sorted(recordings, key=lambda r: (r.speaker, r.id)):
                        rows.append(put(tar, recording, split, sounds, archive))
                        bar.update()
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (part / "manifest.jsonl").write_text(lines, encoding="utf-8")
        os.replace(part, out)
    return {split: len(recordings) for split, recordings in chosen.items()}


def put(
    tar: tarfile.TarFile,
    recording: Recording,
    split: str,
    sounds: dict[str, bytes],
    archive: Path,
) -> dict[str, Any]:
    """Add a recording to its split's tar file as FLAC, and return its line of the manifest."""
    if recording.path not in sounds:
        raise ValueError(f"{archive}: it has no wav/{recording.path}.sph, which its lists name")
    try:
        # 16-bit samples as they are: no scale, no dither.
        audio, rate = soundfile.read(io.BytesIO(sounds[recording.path]), dtype="int16")
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{archive}: wav/{recording.path}.sph: {error}") from error
    file = io.BytesIO()
    soundfile.write(file, audio, rate, format="FLAC", subtype="PCM_16")
    member = tarfile.TarInfo(f"{recording.id}.flac")
    member.size = file.seek(0, io.SEEK_END)
    file.seek(0)
    tar.addfile(member, file)
    return {
        "id": recording.id,
        "archive": f"{split}.tar",
        "audio": member.name,
        "text": recording.text,
        "speaker": recording.speaker,
        "seconds": len(audio) / rate,
        "sample_rate": rate,
        "split": split,
        "gender": recording.speaker[0].upper(),
        "official_split": recording.official,
    }


def main(argv: list[str] | None = None) -> None:
    """Prepare what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("archive", type=Path, metavar="ARCHIVE", help="CMU's an4_sphere.tar.gz")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new directory")
    parser.add_argument(
        "--whole", action="store_true", help="train on the six speakers too that are left out"
    )
    args = parser.parse_args(argv)
    try:
        counts = prepare(args.archive, args.out, whole=args.whole)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from error
    said = ", ".join(f"{count} utterances of {split}" for split, count in counts.items())
    print(f"{said} in {args.out}: python examples/train_ctc.py --data {args.out}")


if __name__ == "__main__":
    main()
