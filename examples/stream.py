"""Transcribe speech while it comes in, with a model of train_ctc.py --encoder streaming.

    python examples/stream.py --checkpoint CHECKPOINT FILE        # WAV or FLAC, 16 kHz
    arecord -f S16_LE -r 16000 -t raw | python examples/stream.py --checkpoint CHECKPOINT -
    python examples/stream.py --checkpoint CHECKPOINT --batch FILE FILE ...

The text grows on one line of the terminal. The transcript goes to standard output, all else to
standard error: latencies, time and memory, and a check that the stream gave what the whole
utterance gives. Latencies are those of samples that arrive as they are spoken.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import HOP, N_FFT, N_MELS, SAMPLE_RATE, LogMel, to_16k
from recogniser import GreedyText, StreamingRecogniser, greedy_text, load_recogniser
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

try:
    import soundfile
    from matplotlib.figure import Figure
except (ImportError, OSError) as error:  # OSError: soundfile's own C library is missing
    raise ImportError(f"{error}: run pip install 'ldsa_nn[examples]'") from error

TRAIN = "train one with: python examples/train_ctc.py --encoder streaming"


class FeatureStream:
    """LogMel's frames of a running stream: the utterance's, however its samples are split."""

    def __init__(self, logmel: LogMel) -> None:
        self.logmel = logmel
        self.samples = torch.empty(0, dtype=torch.int16)  # those that frames to come need
        self.started = False

    def push(self, samples: Tensor) -> Tensor:
        """The next samples [N] int16 -> the frames that they complete, [T, 80], T >= 0."""
        self.samples = torch.cat([self.samples, samples])
        frames = max(0, (len(self.samples) - N_FFT) // HOP + 1)
        if not frames:
            return self.logmel.mean.new_zeros(0, N_MELS)
        self.started = True
        features = self._features()
        self.samples = self.samples[frames * HOP :]
        return features

    def finish(self) -> Tensor:
        """What is still due: one frame, padded, of a stream that is shorter than a frame."""
        if self.started or not len(self.samples):
            return self.logmel.mean.new_zeros(0, N_MELS)
        return self._features()

    def _features(self) -> Tensor:
        return self.logmel(self.samples[None], torch.tensor([len(self.samples)]))[0][0]


class StreamBatch:
    """Streams side by side in one batch, each in a row of its own.

    A stream joins a free row when it starts and leaves it when it ends. A step takes samples of any
    of the rows, of each as many as have come.
    """

    def __init__(self, model: StreamingRecogniser, logmel: LogMel, rows: int) -> None:
        self.model, self.logmel = model, logmel
        self.state = model.encoder.init_state(rows)
        self.features: list[FeatureStream | None] = [None] * rows

    @property
    def full(self) -> bool:
        return None not in self.features

    @torch.inference_mode()
    def join(self) -> int:
        """Start a stream, and return its row, which forgets the stream that had it before."""
        row = self.features.index(None)
        put_row(self.state, row, self.model.encoder.init_state(1))
        self.features[row] = FeatureStream(self.logmel)
        return row

    @torch.inference_mode()
    def step(self, chunks: dict[int, Tensor]) -> dict[int, Tensor]:
        """The next samples [N] int16 of some rows -> the logits [T', symbols + 1] that are due."""
        return self._encode({row: self.features[row].push(x) for row, x in chunks.items()})

    @torch.inference_mode()
    def leave(self, row: int) -> Tensor:
        """End the row's stream -> its last logits."""
        last = self._encode({row: self.features[row].finish()})[row]
        out, lengths = self.model.encoder.flush(one_row(self.state, row))
        self.features[row] = None
        return torch.cat([last, self.model.head(out[0, : lengths[0]])])

    def _encode(self, features: dict[int, Tensor]) -> dict[int, Tensor]:
        none = self.logmel.mean.new_zeros(0, N_MELS)
        by_row = [features.get(row, none) for row in range(len(self.features))]
        lengths = torch.tensor([len(x) for x in by_row])
        if not lengths.any():  # a step takes one frame at least
            return {row: none.new_zeros(0, self.model.head.out_features) for row in features}
        padded = pad_sequence(by_row, batch_first=True)
        out, out_lengths, self.state = self.model.encoder.step(padded, self.state, lengths)
        logits = self.model.head(out)
        return {row: logits[row, : out_lengths[row]] for row in features}


def put_row(state: Any, row: int, one: Any) -> None:
    """Copy a state of one stream over a row of a state of several."""
    if isinstance(state, Tensor):
        state[row] = one[0]
    else:
        for part, of_one in zip(state, one, strict=True):
            put_row(part, row, of_one)


def one_row(state: Any, row: int) -> Any:
    """A row of a state, as a state of one stream."""
    if isinstance(state, Tensor):
        return state[row : row + 1]
    return tuple(one_row(part, row) for part in state)


class Transcript:
    """A stream's text so far, and for the check its samples and logits."""

    def __init__(self, name: str, chunks: Iterator[Tensor], vocabulary: str, keep: bool) -> None:
        self.name, self.chunks, self.keep = name, chunks, keep
        self.greedy = GreedyText(vocabulary)
        self.samples: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.heard = 0

    @property
    def text(self) -> str:
        return self.greedy.text

    @property
    def seconds(self) -> float:
        return self.heard / SAMPLE_RATE

    def next_chunk(self) -> Tensor | None:
        """The next samples [N], or None at the end."""
        try:
            chunk = next(self.chunks, None)
        except (OSError, ValueError, soundfile.LibsndfileError) as error:
            raise SystemExit(f"cannot read {self.name}: {error}") from error
        if chunk is not None:
            self.heard += len(chunk)
            if self.keep:
                self.samples.append(chunk)
        elif not self.heard:
            raise SystemExit(f"{self.name} is empty: expected at least one sample")
        return chunk

    def read(self, logits: Tensor) -> str:
        """Decode the next logits, and return all of the text so far."""
        if self.keep:
            self.logits.append(logits)
        return self.greedy.push(logits.argmax(-1).tolist())

    @torch.inference_mode()
    def check(self, model: StreamingRecogniser, logmel: LogMel) -> bool:
        """Say on standard error whether the whole utterance at once gives the same."""
        audio = torch.cat(self.samples)
        features, frames = logmel(audio[None], torch.tensor([len(audio)]))
        whole = model(features, frames)[0]
        text = greedy_text(whole.argmax(-1).tolist(), self.greedy.vocabulary)
        streamed = torch.cat(self.logits)
        if streamed.shape != whole.shape:
            difference = f"{len(streamed)} frames streamed and {len(whole)} at once"
        else:
            most = (streamed - whole).abs().max().item()
            difference = f"{len(whole)} frames, logits differ by at most {most:.1e}"
        texts = "equal" if text == self.text else "DIFFER"
        note(f"check: {self.name}, streamed against whole: {difference}, texts {texts}")
        if text != self.text:
            note(f"  streamed: {self.text}\n  whole:    {text}")
        return text == self.text and streamed.shape == whole.shape


def chunks_of_file(path: str, size: int, repeat: int) -> Iterator[Tensor]:
    """The file's samples, int16, `size` at a time, over and over; channels are averaged."""
    for _ in range(repeat):
        with soundfile.SoundFile(path) as file:
            while len(samples := file.read(size, dtype="float32", always_2d=True)):
                yield to_16k(samples.mean(axis=1), SAMPLE_RATE)


def chunks_of_stdin(size: int) -> Iterator[Tensor]:
    """Raw samples of standard input, 16-bit little-endian mono, `size` at a time."""
    start = b""
    while data := sys.stdin.buffer.read(2 * size):
        start = start or data[:4]
        if start in (b"RIFF", b"fLaC"):
            raise ValueError("expected raw 16-bit samples, got a WAV or FLAC file: give its name")
        samples = np.frombuffer(data[: len(data) // 2 * 2], "<i2")
        yield torch.from_numpy(samples.astype(np.int16))


def check_file(path: str) -> None:
    """Refuse a file that cannot be streamed, before anything is."""
    if not Path(path).is_file():
        raise SystemExit(f"there is no file {path}")
    try:
        info = soundfile.info(path)
    except (OSError, soundfile.LibsndfileError) as error:
        raise SystemExit(f"cannot read {path}: {error}") from error
    if not info.frames:
        raise SystemExit(f"{path} is empty: expected at least one sample")
    if info.samplerate != SAMPLE_RATE:
        raise SystemExit(
            f"{path} has {info.samplerate} samples a second, expected {SAMPLE_RATE}: convert it,"
            f" for example with: ffmpeg -i {path} -ar {SAMPLE_RATE} -ac 1 16k.wav"
        )


def load(path: Path) -> tuple[StreamingRecogniser, LogMel, str]:
    """The recogniser of a checkpoint, its features and its vocabulary."""
    try:
        model, logmel, vocabulary = load_recogniser(path)
    except OSError as error:
        raise SystemExit(f"cannot read --checkpoint {path}: {error.strerror}; {TRAIN}") from error
    except Exception as error:  # unpickling fails on other files in any way
        raise SystemExit(
            f"{path} is no checkpoint of train_ctc.py, or of an earlier version "
            f"({type(error).__name__}); {TRAIN}"
        ) from error
    if not isinstance(model, StreamingRecogniser):
        raise SystemExit(f"{path} holds a torchaudio Conformer, which cannot stream; {TRAIN}")
    if not model.streams:
        raise SystemExit(f"{path} holds an attention to the whole utterance, not a stream; {TRAIN}")
    return model, logmel, vocabulary


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Write the end of the text over the terminal's line."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{text[-width:]}", end="", file=sys.stderr, flush=True)


def resident_mb() -> float | None:
    """The process's resident memory, where /proc tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def draw(path: Path, ends: array, spent: array, chunk_ms: int) -> None:
    """Save an image: how long each chunk took, by its time in the stream."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(ends, [1000 * s for s in spent], ".", markersize=2)
    axes.set(xlabel="stream time (s)", ylabel="time per chunk (ms)", ylim=(0, None))
    axes.set(title=f"chunks of {chunk_ms} ms")
    figure.savefig(path, dpi=120)


def stream_one(
    transcript: Transcript, model: StreamingRecogniser, logmel: LogMel, args: argparse.Namespace
) -> int:
    """Transcribe one stream and report; the exit status."""
    streams = StreamBatch(model, logmel, rows=1)
    row = streams.join()
    ends, spent = array("d"), array("d")
    ready = 0.0  # when the text is there, on a clock that starts with the first sample
    first = memory = None
    stopped = False

    def timed(logits: Callable[[], Tensor]) -> None:
        nonlocal first, ready
        started = time.perf_counter()
        text = transcript.read(logits())
        spent.append(time.perf_counter() - started)
        ends.append(transcript.seconds)
        ready = max(ready, transcript.seconds) + spent[-1]
        if text and first is None:
            first = ready
        show(text)

    try:
        while (chunk := transcript.next_chunk()) is not None:
            timed(lambda chunk=chunk: streams.step({row: chunk})[row])
            memory = memory or resident_mb()
    except KeyboardInterrupt:
        stopped = True
        if not spent:
            return 130
    timed(lambda: streams.leave(row))
    show("")
    print(transcript.text, flush=True)

    length, work = transcript.seconds, sum(spent)
    ahead = model.encoder.delay * HOP // (SAMPLE_RATE // 1000)
    note(f"{length:.2f} s in {len(spent) - 1} chunks of {args.chunk_ms} ms, look-ahead {ahead} ms")
    if first is not None:
        note(f"first text: {first:.3f} s after the first sample")
    note(f"final text: {1000 * (ready - length):.1f} ms after the last sample")
    note(f"real-time factor: {work / length:.4f} ({work:.2f} s of work)")
    per_chunk = [1000 * s for s in spent[:-1]]
    median = statistics.median(per_chunk)
    note(f"time per chunk: median {median:.2f} ms, most {max(per_chunk):.2f} ms")
    if args.repeat > 1:
        tenth = max(1, len(per_chunk) // 10)
        early, late = (statistics.median(s) for s in (per_chunk[:tenth], per_chunk[-tenth:]))
        note(f"  median of the first tenth {early:.2f} ms, of the last tenth {late:.2f} ms")
    if memory is not None:
        note(f"resident memory: {memory:.1f} MB after the first chunk, {resident_mb():.1f} MB now")
    if args.plot:
        draw(args.plot, ends[:-1], spent[:-1], args.chunk_ms)
    if stopped:
        return 130
    return 0 if not transcript.keep or transcript.check(model, logmel) else 1


def stream_batch(
    transcripts: list[Transcript],
    model: StreamingRecogniser,
    logmel: LogMel,
    args: argparse.Namespace,
) -> int:
    """Transcribe several files that start one after another, `rows` at a time; the exit status."""
    waiting = list(transcripts)
    streams = StreamBatch(model, logmel, args.rows)
    running: dict[int, Transcript] = {}
    work, tick, stopped = 0.0, 0, False
    try:
        while waiting or running:
            now = f"{tick * args.chunk_ms / 1000:6.2f} s"
            # A file starts every third step, so that those in a batch are never at the same place.
            if waiting and tick % 3 == 0 and not streams.full:
                row = streams.join()
                running[row] = waiting.pop(0)
                note(f"{now}: {running[row].name} joins row {row}")
            chunks = {row: transcript.next_chunk() for row, transcript in running.items()}
            started = time.perf_counter()
            logits = streams.step({row: x for row, x in chunks.items() if x is not None})
            for row, chunk in chunks.items():
                if chunk is None:
                    running[row].read(streams.leave(row))
                    note(f"{now}: {running.pop(row).name} leaves row {row}")
                else:
                    running[row].read(logits[row])
            work += time.perf_counter() - started
            tick += 1
    except KeyboardInterrupt:
        stopped = True
    for transcript in transcripts:
        print(f"{transcript.name}: {transcript.text}", flush=True)
    length = sum(transcript.seconds for transcript in transcripts)
    note(f"{length:.2f} s of speech in {tick} steps of {args.rows} rows, {work:.2f} s of work")
    if stopped:
        return 130
    same = [t.check(model, logmel) for t in transcripts if t.keep]
    return 0 if all(same) else 1


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("audio", nargs="+", help="WAV or FLAC; -: raw 16-bit 16 kHz mono from standard input")
    add("--checkpoint", type=Path, required=True, help="of train_ctc.py --encoder streaming")
    add("--chunk-ms", type=int, default=160, help="audio in a step, 40 to 320 (default 160)")
    add(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="compare with the whole utterance at once, for which all of it is kept (default: for"
        " files that are not repeated)",
    )
    add("--repeat", type=int, default=1, help="stream the file so many times, as one stream")
    add("--plot", type=Path, metavar="IMAGE", help="save the time per chunk over the stream")
    add("--batch", action="store_true", help="transcribe several files at the same time")
    add("--rows", type=int, default=2, help="at most so many of them at once (default 2)")
    add("--threads", type=int, default=1, help="CPU threads (default 1)")
    args = parser.parse_args(argv)
    if not 40 <= args.chunk_ms <= 320:
        parser.error(f"argument --chunk-ms: expected 40 to 320, got {args.chunk_ms}")
    for name in ("repeat", "rows", "threads"):
        if vars(args)[name] < 1:
            parser.error(f"argument --{name}: expected at least 1, got {vars(args)[name]}")
    if len(args.audio) > 1 and not args.batch:
        parser.error(f"expected one file, or --batch before several, got {len(args.audio)}")
    if args.repeat > 1 and (args.batch or "-" in args.audio):
        parser.error("--repeat takes one file, neither --batch nor standard input")
    if args.batch and (args.plot or "-" in args.audio):
        parser.error("--batch takes files, neither --plot nor standard input")
    if args.plot:
        known = Figure().canvas.get_supported_filetypes()
        if args.plot.suffix[1:].lower() not in known or not args.plot.absolute().parent.is_dir():
            parser.error(
                f"argument --plot: expected an image in a folder that exists, named"
                f" .{', .'.join(sorted(known))}; got {args.plot}"
            )
        try:  # not found out when the stream has ended
            tempfile.TemporaryFile(dir=args.plot.absolute().parent).close()
        except OSError as error:
            parser.error(f"argument --plot: cannot write to {args.plot}: {error}")
    if args.check is None:
        args.check = args.repeat == 1 and "-" not in args.audio
    return args


def main(argv: list[str] | None = None) -> int:
    """Transcribe what the command line names; 1 where the check fails, 130 after Ctrl-C."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    size = args.chunk_ms * SAMPLE_RATE // 1000
    for path in args.audio:
        if path != "-":
            check_file(path)
    model, logmel, vocabulary = load(args.checkpoint)
    # The first pass through torch's operators is slow, which is no stream's fault.
    warm = StreamBatch(model, logmel, args.rows if args.batch else 1)
    warm.step({warm.join(): torch.zeros(SAMPLE_RATE, dtype=torch.int16)})

    def transcript(path: str) -> Transcript:
        if path == "-":
            return Transcript("standard input", chunks_of_stdin(size), vocabulary, args.check)
        chunks = chunks_of_file(path, size, args.repeat)
        return Transcript(path, chunks, vocabulary, args.check)

    transcripts = [transcript(path) for path in args.audio]
    if args.batch:
        return stream_batch(transcripts, model, logmel, args)
    return stream_one(transcripts[0], model, logmel, args)


if __name__ == "__main__":
    sys.exit(main())
