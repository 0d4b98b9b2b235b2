"""The live example: streamed features, logits and text are those of the whole utterance."""

import io
import signal
import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch

for package in ("torchaudio", "soundfile", "jiwer", "matplotlib"):
    pytest.importorskip(package)
hypothesis = pytest.importorskip("hypothesis")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import data  # noqa: E402
import recogniser  # noqa: E402
import soundfile  # noqa: E402
import stream  # noqa: E402
import train_ctc  # noqa: E402
import training  # noqa: E402

st = hypothesis.strategies

TINY = "--dim 16 --layers 2 --heads 2 --ffn 16 --kernel 3"
VOCABULARY = " ABC"


@pytest.fixture(autouse=True)
def threads():
    """One, as the example sets it, and then again the number that is the tests'."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def noise(samples: int, seed: int = 0) -> torch.Tensor:
    """Noise whose level and colour change every 50 ms, so that its frames differ."""
    generator = torch.Generator().manual_seed(seed)
    rate = torch.rand(samples // 800 + 1, generator=generator).repeat_interleave(800)[:samples]
    tone = torch.sin(torch.cumsum(3 * rate, 0))
    level = torch.rand(samples // 800 + 1, generator=generator).repeat_interleave(800)[:samples]
    hiss = torch.randn(samples, generator=generator)
    return (9000 * level * tone + 300 * hiss).to(torch.int16)


def checkpoint(path: Path, *arguments: str) -> Path:
    """A checkpoint of a model that is not trained, but whose best symbols differ between frames."""
    options = vars(train_ctc.parse([*TINY.split(), *arguments]))
    model = recogniser.build(options, VOCABULARY).eval()
    normalisation = {"mean": torch.full((80,), -4.0), "std": torch.full((80,), 2.0)}
    audio = noise(48_000)
    features, frames = data.LogMel(**normalisation)(audio[None], torch.tensor([48_000]))
    with torch.no_grad():
        logits = model(features, frames)[0]
        model.head.bias -= logits.mean(0)
    state = {
        "model": model.state_dict(),
        "normalisation": normalisation,
        "vocabulary": VOCABULARY,
        "options": {name: options[name] for name in training.BOUND},
    }
    torch.save(state, path)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints by their look-ahead in each layer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        right: checkpoint(folder / f"{right}.pt", *f"--encoder streaming --right {right}".split())
        for right in (0, 1)
    }


@pytest.fixture(scope="module")
def recognisers(saved):
    return {right: stream.load(path) for right, path in saved.items()}


@torch.inference_mode()
def whole(loaded, audio):
    """Logits and text of the utterance at once."""
    model, logmel, _ = loaded
    features, frames = logmel(audio[None], torch.tensor([len(audio)]))
    logits = model(features, frames)[0]
    merged = "".join(f" {VOCABULARY}"[s] for s, _ in groupby(logits.argmax(-1).tolist()) if s)
    return logits, " ".join(merged.split())


def pieces(audio, sizes):
    """Audio in pieces of these sizes, the rest in one."""
    sizes = [*sizes, len(audio)]
    start = 0
    for size in sizes:
        yield audio[start : start + size]
        start = min(start + size, len(audio))


def streamed(loaded, audio, sizes):
    """Logits and text of the utterance in pieces."""
    model, logmel, vocabulary = loaded
    streams = stream.StreamBatch(model, logmel, rows=1)
    row = streams.join()
    greedy = recogniser.GreedyText(vocabulary)
    logits = [streams.step({row: piece})[row] for piece in pieces(audio, sizes)]
    logits.append(streams.leave(row))
    for part in logits:
        greedy.push(part.argmax(-1).tolist())
    return torch.cat(logits), greedy.text


splits = st.lists(st.integers(0, 1500), max_size=12)
lengths = st.sampled_from([1, 159, 511, 512, 513, 671, 672, 1000, 4000, 9999])


@hypothesis.settings(max_examples=40)
@hypothesis.given(lengths, splits)
def test_streamed_features_are_the_utterances(samples, sizes):
    audio = noise(samples)
    logmel = data.LogMel(torch.linspace(-5, 0, 80), torch.linspace(1, 3, 80))
    features = stream.FeatureStream(logmel)
    parts = [features.push(piece) for piece in pieces(audio, sizes)]
    assert len(features.samples) < data.N_FFT
    parts.append(features.finish())
    expected = logmel(audio[None], torch.tensor([samples]))[0][0]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-5)


def test_frames_come_as_soon_as_their_samples():
    features = stream.FeatureStream(data.LogMel())
    came = [len(features.push(noise(n))) for n in (0, 511, 1, 159, 1, 320)]
    assert came == [0, 0, 1, 0, 1, 2]
    assert features.finish().shape == (0, 80)


@hypothesis.settings(max_examples=25)
@hypothesis.given(lengths, splits, st.sampled_from([0, 1]))
def test_streamed_logits_and_text_are_the_utterances(recognisers, samples, sizes, right):
    loaded = recognisers[right]
    expected, text = whole(loaded, noise(samples))
    logits, heard = streamed(loaded, noise(samples), sizes)
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)
    assert heard == text


def test_the_untrained_models_speak(recognisers):
    """What the other tests compare is no empty text."""
    for loaded in recognisers.values():
        assert len(set(whole(loaded, noise(48_000))[1])) >= 3


@hypothesis.given(st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=30), st.data())
def test_text_that_grows_equals_text_at_once(symbols, drawn):
    vocabulary = " AB"
    merged = "".join(f"-{vocabulary}"[s] for s, _ in groupby(symbols) if s)
    greedy = recogniser.GreedyText(vocabulary)
    cut = drawn.draw(st.integers(0, len(symbols)))
    before = greedy.push(symbols[:cut])
    after = greedy.push(symbols[cut:])
    assert after.startswith(before)
    assert after == recogniser.greedy_text(symbols, vocabulary) == " ".join(merged.split())


@pytest.mark.parametrize("right", [0, 1])
def test_streams_that_join_and_leave_equal_streams_alone(recognisers, right):
    """Five streams in two rows, with chunks of different sizes and pauses in between."""
    model, logmel, vocabulary = recognisers[right]
    audios = [noise(n, seed) for seed, n in enumerate((9_000, 300, 16_000, 5_000, 12_000))]
    streams = stream.StreamBatch(model, logmel, rows=2)
    waiting = list(enumerate(audios))
    running, logits, used = {}, {i: [] for i in range(5)}, {}
    tick = 0
    while waiting or running:
        if waiting and not streams.full and tick % 2 == 0:
            i, audio = waiting.pop(0)
            row = streams.join()
            used.setdefault(row, []).append(i)
            running[row] = (i, audio)
        chunks = {}
        for row, (i, audio) in list(running.items()):
            if not len(audio):
                logits[i].append(streams.leave(row))
                del running[row]
            elif (tick + i) % 3:  # else nothing comes in this step
                size = 700 + 400 * i
                chunks[row] = audio[:size]
                running[row] = (i, audio[size:])
        for row, out in streams.step(chunks).items():
            logits[running[row][0]].append(out)
        tick += 1
    assert sorted(map(len, used.values())) == [2, 3]  # both rows are reset
    for i, audio in enumerate(audios):
        alone, text = streamed(recognisers[right], audio, [700 + 400 * i] * (len(audio) // 700))
        together = torch.cat(logits[i])
        assert together.shape == alone.shape
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
        assert recogniser.greedy_text(together.argmax(-1).tolist(), vocabulary) == text
    with pytest.raises(ValueError, match="not in list"):
        [streams.join() for _ in range(3)]


@pytest.fixture
def wav(tmp_path):
    """wav(samples, rate) writes noise to a file of that many samples."""

    def write(samples: int, rate: int = 16_000, name: str = "a.flac", seed: int = 0) -> str:
        path = tmp_path / name
        soundfile.write(path, noise(samples, seed).numpy(), rate, subtype="PCM_16")
        return str(path)

    return write


def pipe_in(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize("right", [0, 1])
@pytest.mark.parametrize("chunk_ms", ["40", "320"])
def test_a_file(saved, recognisers, wav, capsys, right, chunk_ms):
    audio = noise(30_123)
    arguments = ["--checkpoint", str(saved[right]), "--chunk-ms", chunk_ms, wav(len(audio))]
    assert stream.main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == whole(recognisers[right], audio)[1] + "\n"
    assert f"look-ahead {80 * right} ms" in printed.err  # two layers of one frame
    for words in ("first text: ", "final text: ", "real-time factor: ", "time per chunk: "):
        assert words in printed.err
    assert "texts equal" in printed.err


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_raw_samples_from_standard_input_equal_the_file(saved, wav, capsys, monkeypatch, check):
    path = wav(20_001)
    options = ["--checkpoint", str(saved[0])]
    assert stream.main([*options, path]) == 0
    text = capsys.readouterr().out
    raw = noise(20_001).numpy().astype("<i2").tobytes()
    pipe_in(monkeypatch, raw + b"\0")  # cut off within a sample
    assert stream.main([*options, *check, "-"]) == 0
    printed = capsys.readouterr()
    assert printed.out == text
    assert ("texts equal" in printed.err) == bool(check)


def test_channels_are_averaged(saved, recognisers, tmp_path, capsys):
    both = torch.stack([noise(9_000), noise(9_000, seed=1)], 1)
    soundfile.write(tmp_path / "two.wav", both.numpy(), 16_000, subtype="PCM_16")
    stream.main(["--checkpoint", str(saved[0]), str(tmp_path / "two.wav")])
    mono = data.decode(tmp_path / "two.wav")
    assert capsys.readouterr().out == whole(recognisers[0], mono)[1] + "\n"


def test_a_repeated_file_is_one_stream(saved, recognisers, wav, capsys, tmp_path):
    arguments = ["--checkpoint", str(saved[0]), "--repeat", "3", wav(10_000)]
    plot = tmp_path / "chunks.png"
    assert stream.main([*arguments, "--check", "--plot", str(plot)]) == 0
    printed = capsys.readouterr()
    assert printed.out == whole(recognisers[0], noise(10_000).repeat(3))[1] + "\n"
    assert "texts equal" in printed.err
    assert "of the last tenth" in printed.err
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert stream.main(arguments) == 0
    assert "check:" not in capsys.readouterr().err


def test_files_in_a_batch(saved, recognisers, wav, capsys):
    sizes = (20_000, 9_000, 100, 14_000)
    files = [wav(n, name=f"{seed}.flac", seed=seed) for seed, n in enumerate(sizes)]
    assert stream.main(["--checkpoint", str(saved[1]), "--batch", "--rows", "2", *files]) == 0
    printed = capsys.readouterr()
    texts = [whole(recognisers[1], noise(n, seed))[1] for seed, n in enumerate(sizes)]
    assert printed.out.splitlines() == [f"{f}: {t}" for f, t in zip(files, texts, strict=True)]
    assert printed.err.count("texts equal") == 4
    assert printed.err.count("joins row 1") >= 1


def test_a_text_that_differs_fails_the_check(saved, wav, capsys, monkeypatch):
    forget = stream.FeatureStream.push

    def push(self, samples):
        self.samples = self.samples[:0]  # the overlap between chunks
        return forget(self, samples)

    monkeypatch.setattr(stream.FeatureStream, "push", push)
    assert stream.main(["--checkpoint", str(saved[0]), wav(30_000)]) == 1
    assert "frames streamed and" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(stream, "greedy_text", lambda symbols, vocabulary: "OTHER")
    assert stream.main(["--checkpoint", str(saved[0]), wav(30_000)]) == 1
    assert "texts DIFFER" in capsys.readouterr().err


def test_ctrl_c_prints_what_was_heard(saved, recognisers, wav, capsys, monkeypatch, request):
    original = stream.chunks_of_file

    def interrupted(path, size, repeat):
        for i, chunk in enumerate(original(path, size, repeat)):
            if i == after:
                signal.raise_signal(signal.SIGINT)
            yield chunk

    monkeypatch.setattr(stream, "chunks_of_file", interrupted)
    # A shell starts what runs in the background with the signal ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    options = ["--checkpoint", str(saved[1])]
    after = 5
    assert stream.main([*options, wav(48_000)]) == 130
    heard = noise(48_000)[: 5 * 2560]
    assert capsys.readouterr().out == whole(recognisers[1], heard)[1] + "\n"
    assert stream.main([*options, "--batch", wav(48_000)]) == 130
    assert "a.flac: " in capsys.readouterr().out
    after = 0
    assert stream.main([*options, wav(48_000)]) == 130


def test_a_terminal_sees_the_text_grow(saved, wav, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "8")
    stream.main(["--checkpoint", str(saved[0]), wav(48_000)])
    printed = capsys.readouterr()
    shown = [part.partition("\n")[0] for part in printed.err.split("\r\x1b[K")[1:]]
    assert len(shown) > 10
    assert max(map(len, shown[:-1])) == 7
    assert shown[-2] == printed.out.rstrip("\n")[-7:]


def refuses(message: str, *arguments: str) -> None:
    with pytest.raises(SystemExit, match=message):
        stream.main([*arguments])


def test_unusable_checkpoints(tmp_path, wav):
    how = r".*train one with: python examples/train_ctc\.py --encoder streaming"
    path = tmp_path / "checkpoint.pt"
    refuses(
        f"cannot read --checkpoint {path}: No such file{how}", "--checkpoint", str(path), wav(9)
    )
    for junk in (b"", b"some text\n"):
        path.write_bytes(junk)
        refuses(f"is no checkpoint of train_ctc.py{how}", "--checkpoint", str(path), wav(9))
    torch.save({"model": 1}, path)
    refuses(f"is no checkpoint of train_ctc.py{how}", "--checkpoint", str(path), wav(9))
    checkpoint(path)
    refuses(f"holds a torchaudio Conformer, which can{how}", "--checkpoint", str(path), wav(9))
    for attention in ("mhsa", "bisla"):
        checkpoint(path, "--encoder", "streaming", "--attention", attention)
        refuses(f"attention to the whole utterance, .*{how}", "--checkpoint", str(path), wav(9))


def test_unusable_audio(saved, tmp_path, wav, monkeypatch):
    options = ["--checkpoint", str(saved[0])]
    refuses("there is no file nowhere.flac", *options, "nowhere.flac")
    refuses("8000 samples a second, expected 16000: .*ffmpeg -i", *options, wav(900, rate=8000))
    refuses(r"a\.wav is empty: expected at least one sample", *options, wav(0, name="a.wav"))
    text = tmp_path / "text.wav"
    text.write_text("no audio")
    refuses(r"cannot read .*text\.wav: ", *options, str(text))
    for content in (b"", b"\0"):
        pipe_in(monkeypatch, content)
        refuses("standard input is empty: expected at least one sample", *options, "-")
    pipe_in(monkeypatch, Path(wav(900, name="a.wav")).read_bytes())
    refuses("standard input: expected raw .* got a WAV or FLAC file", *options, "-")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a b", "expected one file, or --batch before several, got 2"),
        ("--chunk-ms 39 a", "argument --chunk-ms: expected 40 to 320, got 39"),
        ("--chunk-ms 321 a", "argument --chunk-ms: expected 40 to 320, got 321"),
        ("--repeat 0 a", "argument --repeat: expected at least 1, got 0"),
        ("--rows 0 --batch a", "argument --rows: expected at least 1, got 0"),
        ("--repeat 2 -", "--repeat takes one file"),
        ("--batch --repeat 2 a", "--repeat takes one file"),
        ("--batch a -", "--batch takes files"),
        ("--plot p.txt a", "argument --plot: expected an image in a folder that exists"),
        ("--plot nowhere/p.png a", "argument --plot: expected an image in a folder that exists"),
    ],
)
def test_unusable_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit):
        stream.parse(["--checkpoint", "c.pt", *arguments.split()])
    assert message in capsys.readouterr().err


def test_a_plot_that_cannot_be_written_is_found_before_the_stream(capsys, monkeypatch, tmp_path):
    def full(dir):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stream.tempfile, "TemporaryFile", full)
    with pytest.raises(SystemExit):
        stream.parse(["--checkpoint", "c.pt", "--plot", str(tmp_path / "p.png"), "a"])
    assert "p.png: [Errno 28] No space left on device" in capsys.readouterr().err
