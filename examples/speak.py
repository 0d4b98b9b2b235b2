"""Speech with known text, spoken by eSpeak NG: plainly synthetic, for runs without a corpus.

Random digit strings, with letters too if asked, in voice variants at varied speed and pitch. The
held-out voices are other variants than the training ones and their phrases never occur in training.

As a script (`python speak.py`) this file is the worker that `speak` starts. eSpeak NG carries
state from one utterance to the next (random generator, phases, echo), so the worker forks before
each line: the same line gives the same samples, whatever was spoken before. It is a process of
its own, with nothing but the standard library, because forking is safe only without threads.
"""

import ctypes
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# Variants that retune one another (f3 and linda, iven and iven2) share a side of the split.
TRAIN_VARIANTS = tuple(
    "Alex Alicia Andy Annie Denis Diogo Gene Henrique Hugo Jacky Lee Nguyen Storm adam"
    " announcer benjamin boris david ed edward f1 f2 f5 grandma grandpa ian iven iven2 iven3 john"
    " klatt klatt2 klatt3 klatt4 m1 m2 m4 m5 m6 m7 m8 max paul quincy rob robert shelby"
    " steph steph2 victor".split()
)
HELD_OUT_VARIANTS = tuple(
    "Mario Michael Mike aunty belinda f3 f4 gustave linda m3 marcelo travis".split()
)
ACCENTS = ("en-us", "en-gb-x-rp", "en-gb-scotland")
DIGITS = "ZERO ONE TWO THREE FOUR FIVE SIX SEVEN EIGHT NINE".split()
LETTERS = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")

INSTALL = "pip install 'ldsa_nn[examples]', or train on recordings with --data or --librispeech"


class Line(NamedTuple):
    """What one utterance says and how: words per minute, pitch 0-99 (50 is the voice's own)."""

    voice: str
    rate: int
    pitch: int
    text: str


def write_lines(
    count: int,
    variants: Sequence[str],
    rng: random.Random,
    *,
    letters: bool = False,
    not_these: Collection[str] = (),
) -> list[Line]:
    """Lines of 3 to 6 random words, no phrase twice and none of `not_these`, voices in turn."""
    words = DIGITS + LETTERS if letters else DIGITS
    phrases: dict[str, None] = {}
    while len(phrases) < count:
        phrase = " ".join(rng.choices(words, k=rng.randint(3, 6)))
        if phrase not in not_these:
            phrases[phrase] = None
    return [
        Line(
            f"{rng.choice(ACCENTS)}+{variants[i % len(variants)]}",
            rng.randint(130, 210),
            rng.randint(30, 70),
            phrase,
        )
        for i, phrase in enumerate(phrases)
    ]


def speak(lines: Sequence[Line]) -> Iterator[tuple[bytes, int]]:
    """Speak each line: (16-bit mono samples as bytes, sample rate), in order.

    Raises:
        ImportError: espeakng_loader is missing.
        RuntimeError: eSpeak NG does not run here or lacks a voice; the message is its own.
    """
    try:
        import espeakng_loader  # noqa: F401  the worker needs it
    except ImportError as error:
        raise ImportError(f"no recordings given and no espeakng_loader: {INSTALL}") from error
    with subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as worker:
        try:
            worker.stdin.write(json.dumps(lines).encode())
            worker.stdin.close()
        except BrokenPipeError:  # it failed before reading; what it said follows
            pass
        for line in lines:
            header = worker.stdout.read(8)
            if len(header) < 8:
                said = worker.stderr.read().decode().strip()
                raise RuntimeError(f"eSpeak NG could not say {line.text!r}: {said}")
            rate, size = struct.unpack("<ii", header)
            yield worker.stdout.read(size), rate


class _Espeak:
    """The few calls of speak_lib.h that are needed; one instance a process."""

    def __init__(self) -> None:
        import espeakng_loader

        path, data = espeakng_loader.get_library_path(), espeakng_loader.get_data_path()
        try:
            self.library = ctypes.CDLL(path)
        except OSError as error:
            raise SystemExit(
                f"{path} does not load on this platform ({error}): {INSTALL}"
            ) from None
        self.variants = {p.name for p in Path(data, "voices", "!v").iterdir()}
        self.samples = bytearray()

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        def keep(wave: int | None, count: int, _events: int | None) -> int:
            if wave and count > 0:
                self.samples += ctypes.string_at(wave, 2 * count)
            return 0

        self.keep = keep  # ctypes holds no reference to a callback
        # 2: hand the samples to the callback before espeak_Synth returns; 0x8000: never exit.
        self.rate = self.library.espeak_Initialize(2, 0, data.encode(), 0x8000)
        if self.rate <= 0:
            raise SystemExit(f"espeak_Initialize failed with the data in {data} (path too long?)")
        self.library.espeak_SetSynthCallback(keep)
        self.library.espeak_ng_SetRandSeed(ctypes.c_long(0))  # it starts from the process id

    def say(self, line: Line) -> bytes:
        # An unknown variant would be replaced by the plain voice without a word.
        if line.voice.partition("+")[2] not in self.variants:
            raise SystemExit(f"this eSpeak NG has no voice variant for {line.voice!r}")
        if self.library.espeak_SetVoiceByName(line.voice.encode()) != 0:
            raise SystemExit(f"this eSpeak NG has no voice {line.voice!r}")
        self.library.espeak_SetParameter(1, line.rate, 0)
        self.library.espeak_SetParameter(3, line.pitch, 0)
        # A lone A is read as the article.
        words = ["eh" if word == "A" else word for word in line.text.split()]
        text = " ".join(words).encode()
        self.samples.clear()
        utf8 = 1
        self.library.espeak_Synth(text, len(text) + 1, 0, 1, 0, utf8, None, None)
        self.library.espeak_Synchronize()
        return bytes(self.samples)


def _say_in_a_fork(espeak: _Espeak, line: Line) -> bytes:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with os.fdopen(write, "wb") as pipe:
                pipe.write(espeak.say(line))
            status = 0
        except SystemExit as error:
            print(error, file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        samples = pipe.read()
    if os.waitpid(child, 0)[1] != 0 or not samples:
        raise SystemExit(f"no sound for {line}")
    return samples


def _work() -> None:
    if not hasattr(os, "fork"):
        raise SystemExit(f"synthesis needs fork (Linux, macOS); here: {INSTALL}")
    espeak = _Espeak()
    for line in json.load(sys.stdin):
        samples = _say_in_a_fork(espeak, Line(*line))
        sys.stdout.buffer.write(struct.pack("<ii", espeak.rate, len(samples)) + samples)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _work()
