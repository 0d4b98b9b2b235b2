"""The training example: a small run end to end, resuming, checkpoints, and learning on AN4."""

import itertools
import json
import math
import random
import signal
import sys
from pathlib import Path

import pytest
import torch

for package in ("torchaudio", "soundfile", "jiwer", "matplotlib"):
    pytest.importorskip(package)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import data  # noqa: E402
import recogniser  # noqa: E402
import speak  # noqa: E402
import train_ctc  # noqa: E402
import training  # noqa: E402

MODELS = {
    "ldsa": ["--attention", "ldsa"],
    "mhsa": ["--attention", "mhsa"],
    "streaming": ["--encoder", "streaming"],
}
OFFLINE = ["mhsa", "hybrid", "bisla"]
TINY = "--dim 16 --layers 2 --heads 2 --ffn 16 --kernel 3 --left 3 --right 2 --batch-seconds 2"


def tones(split: str, count: int, seed: int) -> list[data.Utterance]:
    """Strings of A, B and C as tones of 0.2 s, each letter of its own pitch."""
    rng = random.Random(seed)
    utterances = []
    for i in range(count):
        text = "".join(rng.choices("ABC", k=rng.randint(2, 4)))
        times = torch.arange(3200) / data.SAMPLE_RATE
        parts = [torch.sin(2 * math.pi * 300 * (1 + "ABC".index(c)) * times) for c in text]
        audio = (8000 * torch.cat(parts)).to(torch.int16)
        utterances.append(data.Utterance(f"{split}{i}", split, text, audio))
    return utterances


@pytest.fixture(autouse=True)
def threads():
    """The example sets the number of threads of its process, which here is the tests'."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*arguments) trains a tiny model on tones, into tmp_path / "out" unless told otherwise."""
    corpus = {"train": tones("train", 12, 0), "test": tones("test", 5, 1)}
    monkeypatch.setattr(train_ctc, "read_corpus", lambda args: corpus)

    def run(*arguments: str) -> dict:
        out = ["--out", str(tmp_path / "out")]
        return train_ctc.main([*out, "--device", "cpu", *TINY.split(), *arguments])

    return run


def interrupt_after(monkeypatch, batches: int) -> None:
    """Make the process get Ctrl-C while it fetches that batch."""
    original, fetched = training.collate, itertools.count(1)

    def collate(*arguments):
        if next(fetched) == batches:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(training, "collate", collate)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_leaves_checkpoint_results_and_image(run, tmp_path, capsys, name):
    results = run("--steps", "3", *MODELS[name])
    out = tmp_path / "out"
    files = {"checkpoint.pt", "results.json", "card.md", "attention.png"}
    assert {p.name for p in out.iterdir()} - {".lock"} == files
    card = (out / "card.md").read_text()
    held_out = results["held_out"]["test"]
    row = f"| test (5 utterances, {held_out['speakers']} speakers) | greedy | {held_out['wer']} | "
    assert row in card
    assert ("examples/stream.py" in card) == (name == "streaming")
    assert json.loads((out / "results.json").read_text()) == results
    encoder, attention = ("torchaudio", name) if name != "streaming" else (name, "ldsa")
    assert (results["encoder"], results["attention"]) == (encoder, attention)
    assert results["steps"] == 3
    assert results["held_out"]["test"]["utterances"] == 5
    assert (out / "attention.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "Unheard speakers (test)" in printed
    assert "--resume" in printed
    assert ("examples/stream.py" in printed) == (name == "streaming")

    model, logmel, vocabulary = recogniser.load_recogniser(out / "checkpoint.pt")
    assert vocabulary == "ABC"
    assert sum(p.numel() for p in model.parameters()) == results["parameters"]
    test = tones("test", 5, 1)
    texts = recogniser.transcribe(model, logmel, vocabulary, test, "again")
    assert texts == recogniser.transcribe(model, logmel, vocabulary, test[::-1], "again")[::-1]


def test_only_the_attention_differs_between_the_two(run):
    options = vars(train_ctc.parse(TINY.split()))
    ldsa = recogniser.build({**options, "attention": "ldsa"}, "ABC").state_dict()
    mhsa = recogniser.build({**options, "attention": "mhsa"}, "ABC").state_dict()
    shared = {name for name in mhsa if ".self_attn." not in name}
    assert shared == {name for name in ldsa if ".self_attn." not in name}
    assert all(torch.equal(ldsa[name], mhsa[name]) for name in shared)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_blank_begins_as_likely_as_all_symbols(name, seed):
    options = {**vars(train_ctc.parse([*MODELS[name], "--left", "7"])), "seed": seed}
    model = recogniser.build(options, "ABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    features = torch.randn(4, 80, 80, generator=torch.Generator().manual_seed(seed))
    likely = model(features, torch.full((4,), 80)).softmax(-1)[..., 0].mean()
    assert 0.3 < likely < 0.7, likely  # with all alike 0.02 to 0.08


@pytest.mark.parametrize("name", ["ldsa", "streaming"])
def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(
    run, tmp_path, monkeypatch, name
):
    handler = signal.getsignal(signal.SIGINT)
    whole = run("--steps", "8", *MODELS[name], "--out", str(tmp_path / "whole"))
    with monkeypatch.context() as patched:
        interrupt_after(patched, batches=3)
        with pytest.raises(SystemExit, match=r"stopped after 3 steps.*--resume"):
            run("--steps", "8", *MODELS[name])
    assert signal.getsignal(signal.SIGINT) is handler
    resumed = run("--steps", "8", *MODELS[name], "--resume")
    assert resumed["steps"] == whole["steps"] == 8
    assert resumed["held_out"] == whole["held_out"]
    states = [
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("whole", "out")
    ]
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name]), name
    assert torch.equal(states[0]["rng"], states[1]["rng"])


def test_averaged_weights_are_the_mean_of_every_steps(run, tmp_path, monkeypatch):
    """BatchNorm's statistics too; the checkpoint's model and the one tested are the mean."""
    seen, tested = [], []
    update, evaluate = training.Average.update, train_ctc.evaluate

    def watch(average, step):
        update(average, step)
        seen.append({name: weight.clone() for name, weight in average.current().items()})

    def judge(ranks, model, *others):
        tested.append({name: weight.clone() for name, weight in model.state_dict().items()})
        return evaluate(ranks, model, *others)

    monkeypatch.setattr(training.Average, "update", watch)
    monkeypatch.setattr(train_ctc, "evaluate", judge)
    run("--steps", "9", "--ema", "0.4")
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    start = recogniser.build(vars(train_ctc.parse(TINY.split())), "ABC").state_dict()
    assert len(seen) == 9
    assert any("running_var" in name for name in seen[0])
    for name, mean in state["model"].items():
        if name in seen[0]:
            expected = start[name].double()
            for step, weights in enumerate(seen):
                decay = min(0.4, (step + 1) / (step + 10))
                expected = decay * expected + (1 - decay) * weights[name]
            torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(state["unaveraged"][name], seen[-1][name])
        assert torch.equal(tested[0][name], mean)
    moved = "head.weight"
    assert not torch.equal(state["model"][moved], seen[-1][moved])


def test_averaging_changes_no_step_and_resumes_to_the_bit(run, tmp_path, monkeypatch):
    plain = run("--steps", "6", "--out", str(tmp_path / "plain"))
    whole = run("--steps", "6", "--ema", "0.5", "--out", str(tmp_path / "whole"))
    with monkeypatch.context() as patched:
        interrupt_after(patched, batches=3)
        with pytest.raises(SystemExit, match="stopped after 3 steps"):
            run("--steps", "6", "--ema", "0.5")
    with pytest.raises(SystemExit, match=r"--ema is 0\.5 there and 0\.6 here"):
        run("--steps", "6", "--ema", "0.6", "--resume")
    resumed = run("--steps", "6", "--ema", "0.5", "--resume")
    assert resumed["held_out"] == whole["held_out"]
    states = {
        name: torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("plain", "whole", "out")
    }
    assert plain["options"]["ema"] == 0
    assert "unaveraged" not in states["plain"]
    for part in ("model", "unaveraged"):
        for name, value in states["whole"][part].items():
            assert torch.equal(value, states["out"][part][name]), name
    for name, value in states["whole"]["unaveraged"].items():
        assert torch.equal(value, states["plain"]["model"][name]), name


def test_resuming_a_finished_run_trains_on_only_with_a_larger_budget(run):
    assert run("--steps", "2")["steps"] == 2
    assert run("--steps", "2", "--resume")["steps"] == 2
    assert run("--steps", "5", "--resume")["steps"] == 5


@pytest.mark.parametrize("name", ["ldsa", "streaming"])
def test_minutes_are_a_budget_and_bf16_runs(run, tmp_path, name):
    results = run("--minutes", "0.02", "--bf16", *MODELS[name])
    assert results["steps"] > 0
    assert 0.02 <= results["minutes"] < 0.1
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert state["seconds"] >= 1.2
    with pytest.raises(SystemExit):
        train_ctc.parse(["--minutes", "1", "--steps", "1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "mhsa"], "--attention is 'ldsa' there and 'mhsa' here"),
        (["--encoder", "streaming"], "--encoder is 'torchaudio' there and 'streaming' here"),
        (["--dim", "32"], "--dim is 16 there and 32 here"),
        (["--left", "1", "--right", "1"], "--left is 3 there and 1 here; --right is 2 there"),
        (["--batch-seconds", "3"], "--batch-seconds is 2.0 there and 3.0 here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(run, arguments, message):
    run("--steps", "1")
    with pytest.raises(SystemExit, match=f"{message}.*give another --out"):
        run("--steps", "2", "--resume", *arguments)


def test_a_checkpoint_of_another_vocabulary_is_refused(run, monkeypatch):
    run("--steps", "1")
    other = {"train": [tones("train", 1, 0)[0]._replace(text="AB")], "test": tones("test", 5, 1)}
    monkeypatch.setattr(train_ctc, "read_corpus", lambda args: other)
    with pytest.raises(SystemExit, match="the vocabulary is 'ABC' there and 'AB' here"):
        run("--steps", "2", "--resume")


def test_resume_and_checkpoint_must_agree(run, tmp_path):
    with pytest.raises(SystemExit, match=r"there is no .*checkpoint\.pt: .*leave out --resume"):
        run("--steps", "1", "--resume")
    assert not (tmp_path / "out").exists()
    run("--steps", "1")
    with pytest.raises(SystemExit, match=r"checkpoint\.pt exists: continue it with --resume"):
        run("--steps", "1")


def test_missing_data_is_an_error_without_traceback(tmp_path):
    out = ["--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=r"no .*manifest\.jsonl: --data takes a directory"):
        train_ctc.main([*out, "--data", str(tmp_path)])
    with pytest.raises(SystemExit, match="no part of LibriSpeech"):
        train_ctc.main([*out, "--librispeech", str(tmp_path)])


def test_other_training_data_of_the_same_vocabulary_is_refused(run, monkeypatch):
    run("--steps", "1")
    other = {"train": tones("train", 12, 5), "test": tones("test", 5, 1)}
    monkeypatch.setattr(train_ctc, "read_corpus", lambda args: other)
    with pytest.raises(SystemExit, match=r"the training data is synthetic, \w+ there and syn"):
        run("--steps", "2", "--resume")


def test_a_file_that_is_no_checkpoint_is_refused(run, tmp_path):
    run("--steps", "1")
    path = tmp_path / "out" / "checkpoint.pt"
    whole = path.read_bytes()
    state = torch.load(path, weights_only=True)

    def refuses(message: str) -> None:
        with pytest.raises(SystemExit, match=rf"checkpoint\.pt is no .* train_ctc\.py: {message}"):
            run("--steps", "2", "--resume")

    for junk in (b"some text\n", b"", whole[: len(whole) // 2]):
        path.write_bytes(junk)
        refuses(".*Give another --out")
    torch.save([1], path)
    refuses("it lacks model")
    torch.save({"model": 1}, path)
    refuses("it lacks optimizer, ")
    torch.save({**state, "options": {}}, path)
    refuses("it lacks encoder, ")
    del state["data"]
    torch.save(state, path)
    refuses("it lacks data, or it is of an earlier version")


def test_an_unusable_out_is_found_before_the_corpus_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(train_ctc, "read_corpus", lambda args: pytest.fail("read"))
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SystemExit, match=f"cannot write to --out {out}: "):
            train_ctc.main(["--out", str(out)])
    # A directory that takes no file, whoever runs the test.
    monkeypatch.setattr(
        train_ctc.tempfile, "NamedTemporaryFile", lambda dir: (dir / "no" / "file").open("wb")
    )
    with pytest.raises(SystemExit, match="cannot write to --out"):
        train_ctc.main(["--out", str(tmp_path / "out")])


@pytest.mark.parametrize(
    "argument",
    "--minutes=0 --minutes=nan --steps=0 --steps=-3 --steps=x --kernel=4 --left=-1 --right=-1"
    " --dropout=1.0 --layers=0 --dim=0 --heads=0 --ffn=0 --batch-seconds=0 --lr=nan --lr=inf"
    " --threads=0 --seed=-1 --ema=1 --beam=-1".split(),
)
def test_numbers_out_of_range_are_refused(capsys, argument):
    with pytest.raises(SystemExit):
        train_ctc.parse([argument])
    name, _, value = argument.partition("=")
    error = capsys.readouterr().err
    assert f"argument {name}: expected " in error
    assert f", got {value}" in error


def test_heads_must_divide_dim(capsys):
    with pytest.raises(SystemExit):
        train_ctc.parse(["--heads", "5"])
    assert "--heads must divide --dim, got 5 and 96" in capsys.readouterr().err


def test_a_streaming_encoder_looks_back_unless_told_otherwise(capsys):
    windows = [
        (args.left, args.right)
        for args in (
            train_ctc.parse([]),
            train_ctc.parse(["--encoder", "streaming"]),
            train_ctc.parse(["--encoder", "streaming", "--left", "3", "--right", "2"]),
        )
    ]
    assert windows == [(7, 7), (14, 0), (3, 2)]
    model = recogniser.build(vars(train_ctc.parse([*MODELS["streaming"], *TINY.split()])), "AB")
    assert model.encoder.delay == 4 * 2 * 2  # two layers that look two frames of four ahead
    for attention in OFFLINE:
        args = train_ctc.parse(["--encoder", "streaming", "--attention", attention])
        assert (args.left, args.right) == (7, 7)
    for attention in ("mixed", "hybrid", "bisla"):
        with pytest.raises(SystemExit):
            train_ctc.parse(["--attention", attention])
        assert f"--attention {attention} is for --encoder streaming" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("attention", "kinds", "drawn"),
    [("sla", ("sla", "sla"), False), ("mixed", ("ldsa", "sla"), True)],
)
def test_with_global_attention(run, tmp_path, capsys, attention, kinds, drawn):
    """Of sla there are no weights to draw; of both, the local layer's are."""
    results = run(*MODELS["streaming"], "--attention", attention, "--steps", "2")
    assert results["attention"] == attention
    assert results["delay_ms"] == 40 * 2 * kinds.count("ldsa")
    assert (tmp_path / "out" / "attention.png").exists() == drawn
    assert ("attention.png" in capsys.readouterr().out) == drawn
    model, _, _ = recogniser.load_recogniser(tmp_path / "out" / "checkpoint.pt")
    assert model.encoder.attention == kinds
    assert model.encoder.delay == 4 * 2 * kinds.count("ldsa")


@pytest.mark.parametrize("attention", OFFLINE)
def test_with_attention_to_the_whole_utterance(run, tmp_path, capsys, attention):
    results = run(*MODELS["streaming"], "--attention", attention, "--steps", "2")
    assert results["delay_ms"] is None
    assert (tmp_path / "out" / "attention.png").exists() == (attention == "hybrid")
    assert "examples/stream.py" not in capsys.readouterr().out
    model, _, _ = recogniser.load_recogniser(tmp_path / "out" / "checkpoint.pt")
    features = torch.randn(1, 90, 80)
    with torch.no_grad():
        logits = model(features, torch.tensor([90]))
        features[:, 80:] += torch.randn(10, 80)
        assert not torch.equal(model(features, torch.tensor([90]))[0, 0], logits[0, 0])
    with pytest.raises(NotImplementedError):
        model.encoder.init_state(1)


@pytest.mark.parametrize("attention", ["ldsa", *OFFLINE])
def test_padding_changes_nothing_in_a_streaming_recogniser(attention):
    arguments = [*MODELS["streaming"], *TINY.split(), "--attention", attention]
    model = recogniser.build(vars(train_ctc.parse(arguments)), "AB")
    features = torch.randn(2, 50, 80)
    with torch.no_grad():
        alone = model.eval()(features[1:, :30], torch.tensor([30]))
        padded = model(features, torch.tensor([50, 30]))
    assert padded.shape == (2, 13, 3)
    assert int(recogniser.stacked(torch.tensor(30))) == alone.shape[1] == 8
    torch.testing.assert_close(padded[1:, :8], alone)


def test_a_model_that_cannot_be_built_is_refused(run, monkeypatch, capsys):
    with pytest.raises(SystemExit, match=r"cannot build the model on --device cpu: "):
        run(f"--left={10**30}")
    monkeypatch.setattr(train_ctc, "read_corpus", lambda args: pytest.fail("read"))
    for device in ("foo", "meta"):
        with pytest.raises(SystemExit, match=f"^--device {device}: "):
            run(f"--device={device}")
    with pytest.raises(SystemExit):
        run(f"--seed={2**63}")
    assert "--seed: expected a whole number of at least 0 and below 2^63" in capsys.readouterr().err


def test_one_process_trains_in_a_place(run, tmp_path):
    with (
        train_ctc.alone(tmp_path / "out"),
        pytest.raises(SystemExit, match=r"another process trains in --out .*out: wait for it"),
    ):
        run("--steps", "1")
    run("--steps", "1")


def test_a_directory_called_synthetic_is_not_the_synthetic_corpus(tmp_path):
    names = [
        train_ctc.source_name(train_ctc.parse(arguments))
        for arguments in ([], ["--data", str(tmp_path / "synthetic")])
    ]
    assert names == ["synthetic", "data-synthetic"]


def test_a_checkpoint_has_the_mode_of_any_new_file_or_keeps_its_own(tmp_path):
    path = tmp_path / "checkpoint.pt"
    training.save_atomically({}, path)
    (tmp_path / "new").touch()
    assert path.stat().st_mode == (tmp_path / "new").stat().st_mode
    path.chmod(0o640)
    training.save_atomically({}, path)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "new" / "checkpoint.pt"
    training.save_atomically({"step": 1}, path)

    def half(state, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        training.save_atomically({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert list(path.parent.iterdir()) == [path]


def test_learning_rate_warms_up_and_ends_at_zero():
    assert training.learning_rate(1.0, 0, 0.0) < 0.01
    assert training.learning_rate(1.0, 499, 0.0) == 0.5
    assert training.learning_rate(1.0, 1000, 0.0) == 1.0
    # A short budget's warm-up is shorter.
    assert training.learning_rate(1.0, 10, 0.05) == pytest.approx(0.5, rel=0.01)
    assert training.learning_rate(1.0, 10, 0.1) == pytest.approx(1.0, rel=0.03)
    assert training.learning_rate(1.0, 1000, 0.5) == pytest.approx(0.5)
    assert training.learning_rate(1.0, 1000, 1.2) == 0.0


def test_augmentation_changes_speed_level_and_masks():
    torch.manual_seed(0)
    augment = training.Augment(data.LogMel())
    audio = torch.randint(-9000, 9000, (2, 32_000), dtype=torch.int16)
    drawn = [augment(audio, torch.tensor([32_000, 30_000])) for _ in range(20)]
    lengths = {tuple(frames.tolist()) for _, frames in drawn}
    expected = [
        [1 + (math.ceil(n / s) - 512) // 160 for n in (32_000, 30_000)] for s in (0.9, 1, 1.1)
    ]
    assert lengths == {tuple(pair) for pair in expected}
    for features, frames in drawn:
        assert features.is_contiguous()
        assert not features[1, int(frames[1]) :].any()
    assert any((features[0] == 0).all(0).any() for features, _ in drawn)  # a band
    assert any((features[0] == 0).all(1).any() for features, _ in drawn)  # a time
    levels = torch.stack([f[0][f[0] != 0].mean() for f, _ in drawn])
    assert levels.std() > 0.5  # natural logarithms of energy; +-10 dB are +-2.3


def test_a_streaming_recogniser_learns_tones(run):
    arguments = "--encoder streaming --dim 32 --ffn 64 --dropout 0 --lr 3e-3 --steps 150"
    assert run(*arguments.split())["held_out"]["test"]["cer"] < 50


def test_greedy_text():
    assert recogniser.greedy_text([0, 2, 2, 0, 2, 3, 3, 0, 1, 1, 0], " AB") == "AAB"
    assert recogniser.greedy_text([1, 2, 1, 0, 1, 3, 1], " AB") == "A B"
    assert recogniser.greedy_text([0, 0], " AB") == ""


def likeliest(probabilities: torch.Tensor, vocabulary: str) -> str:
    """The text whose alignments' probabilities sum to most, of all alignments there are."""
    sums = {}
    for path in itertools.product(range(probabilities.shape[1]), repeat=len(probabilities)):
        text = recogniser.greedy_text(list(path), vocabulary)
        sums[text] = sums.get(text, 0) + math.prod(
            float(p[symbol]) for p, symbol in zip(probabilities, path, strict=True)
        )
    return max(sums, key=sums.__getitem__)


def test_beams_find_the_likeliest_text():
    pytest.importorskip("fast_ctc_decode")
    torch.manual_seed(0)
    differ = 0
    for _ in range(60):
        logits = 2 * torch.randn(5, 3, dtype=torch.float64)
        expected = likeliest(logits.softmax(-1), "AÉ")
        assert recogniser.beam_text(logits, "AÉ", 100) == expected
        differ += recogniser.greedy_text(logits.argmax(-1).tolist(), "AÉ") != expected
    assert differ > 3  # where the best alignment is not of the best text
    spaced = 9 * torch.eye(3, dtype=torch.float64)[[1, 2, 1, 0, 1, 2, 1]]
    assert recogniser.beam_text(spaced, " A", 10) == "A A"
    # As certain as a trained model, and a minute and a half long.
    certain = 30 * torch.eye(4)[torch.randint(4, (2500,))]
    assert recogniser.beam_text(certain.bfloat16(), "ABC", 10) == recogniser.greedy_text(
        certain.argmax(-1).tolist(), "ABC"
    )


def test_a_run_with_beams_tells_both_rates(run, capsys):
    pytest.importorskip("fast_ctc_decode")
    results = run("--steps", "2", "--beam", "4")
    score = results["held_out"]["test"]
    assert score["beam"].keys() == {"wer", "cer"}
    assert f"with 4 beams, test: WER {score['beam']['wer']:.1f} %" in capsys.readouterr().out
    again = run("--steps", "2", "--resume")  # a checkpoint is not bound to how it is tested
    assert again["held_out"]["test"] == {k: v for k, v in score.items() if k != "beam"}


def test_beams_without_their_library_are_refused(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fast_ctc_decode", None)
    monkeypatch.setattr(train_ctc.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        train_ctc.parse(["--beam", "4"])
    assert "--beam needs fast-ctc-decode: run pip install" in capsys.readouterr().err


@pytest.mark.parametrize("name", [*MODELS, "hybrid"])
def test_attention_weights(name):
    model = MODELS.get(name) or [*MODELS["streaming"], "--attention", name]
    options = vars(train_ctc.parse([*TINY.split(), *model, "--layers", "2"]))
    model = recogniser.build(options, "ABC").eval()
    features, lengths = torch.randn(1, 90, 80), torch.tensor([90])
    of_layers = recogniser.attention_weights(model, features, lengths, 3, 2)
    assert list(of_layers) == list(range(options["layers"]))
    wide_layers = recogniser.attention_weights(model, features, lengths, 22, 22)
    for layer, weights in of_layers.items():
        assert weights.shape == (2, 6, 23)
        assert (weights >= 0).all()
        total = weights.sum(1)
        if name != "mhsa":
            torch.testing.assert_close(total, torch.ones(2, 23))
            continue
        assert (total < 1).all()
        # A band as wide as the matrix holds all of it, each weight at its offset.
        wide = wide_layers[layer]
        torch.testing.assert_close(wide.sum(1), torch.ones(2, 23))
        torch.testing.assert_close(wide[:, 19:25], weights)
        assert not wide[:, :22, 0].any()
        assert not wide[:, 23:, -1].any()


@pytest.mark.parametrize("name", MODELS)
def test_one_compilation_serves_all_lengths(name):
    options = vars(train_ctc.parse([*TINY.split(), *MODELS[name]]))
    model = recogniser.build(options, "ABC")
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=backend)
    for batch, time in ((4, 84), (3, 101), (7, 62), (5, 203)):
        compiled(torch.randn(batch, time, 80), torch.full((batch,), time)).sum().backward()
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_in_bf16_compiled_and_resumed(run, name):
    options = [*MODELS[name], "--device", "cuda", "--bf16", "--compile", "--ema", "0.9"]
    first = run("--steps", "10", *options)
    assert first["steps"] == 10
    torch.compiler.reset()
    results = run("--steps", "20", "--resume", *options)
    assert results["steps"] == 20
    assert results["peak_memory_mib"] >= first["peak_memory_mib"] > 0
    assert results["held_out"]["test"]["cer"] >= 0


@pytest.mark.slow
def test_it_learns_to_read_an4(data_dir, tmp_path, monkeypatch):
    """600 steps on 64 short digit strings; the CER is that of speakers it never heard."""
    digits = {"OH", *speak.DIGITS}
    corpus = {
        split: [u for u in utterances if set(u.text.split()) <= digits and " " in u.text]
        for split, utterances in data.read_manifest(data_dir / "an4").items()
    }
    corpus["train"] = sorted(corpus["train"], key=lambda u: len(u.audio))[:64]
    monkeypatch.setattr(train_ctc, "read_corpus", lambda args: corpus)
    options = "--device cpu --steps 600 --seed 0 --dim 96 --layers 3 --ffn 256 --batch-seconds 12"
    results = train_ctc.main(["--out", str(tmp_path), *options.split()])
    assert results["steps"] == 600
    assert results["held_out"]["test"]["speakers"] == 10
    assert results["held_out"]["test"]["cer"] < 60
