"""Train a CTC Conformer with local dense synthesizer attention, and test it on unheard speakers.

    python examples/train_ctc.py                      # synthetic digits, minutes on two CPU cores
    python examples/train_ctc.py --data DIR           # a directory with a manifest.jsonl
    python examples/train_ctc.py --librispeech DIR    # the directory that holds LibriSpeech/
    python examples/train_ctc.py --attention mhsa     # the same model with its own attention
    python examples/train_ctc.py --encoder streaming  # a model for stream.py
    python examples/train_ctc.py --encoder streaming --attention mixed  # with global attention too

The model is torchaudio's Conformer on stacked log-mel frames, of which `ldsa_nn.replace_attention`
changes the attention and nothing else, or with --encoder streaming `ldsa_nn.ConformerEncoder`. The
output directory gets checkpoint.pt, results.json and attention.png (none for --attention sla);
--resume continues from the checkpoint.
"""

import argparse
import hashlib
import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from data import (
    SAMPLE_RATE,
    Corpus,
    LogMel,
    Utterance,
    collate,
    endless_batches,
    read_librispeech,
    read_manifest,
    read_synthetic,
)
from recogniser import STACK, AnyRecogniser, attention_weights, build, stacked, transcribe
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

try:
    import jiwer
    import torchaudio
    from matplotlib.figure import Figure
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(f"{error}: run pip install 'ldsa_nn[examples]'") from error

WARMUP_STEPS = 150
SAVE_EVERY_SECONDS = 60
# The options that a checkpoint is bound to: those of the model, and those that order its batches.
BOUND = (
    "encoder attention left right dim layers heads ffn kernel dropout lr batch_seconds seed letters"
).split()


class Augment(nn.Module):
    """Training's features: waveforms at other speeds and levels, with bands and times masked."""

    def __init__(self, logmel: LogMel) -> None:
        """logmel: the normalised features."""
        super().__init__()
        self.speed = torchaudio.transforms.SpeedPerturbation(SAMPLE_RATE, [0.9, 1.0, 1.1])
        self.logmel = logmel
        # Zero is the training mean of normalised features.
        self.mask = torchaudio.transforms.SpecAugment(
            n_time_masks=2,
            time_mask_param=40,
            n_freq_masks=2,
            freq_mask_param=20,
            iid_masks=True,
            p=0.15,
            zero_masking=True,
        )

    @torch.no_grad()
    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Audio [B, N] int16, lengths [B] -> features [B, T, 80], frames [B] as LogMel's."""
        # The normalisation is fixed, so training must hear the levels that speakers may have.
        decibels = torch.empty(len(audio), 1, device=audio.device).uniform_(-10, 10)
        waveform, lengths = self.speed(audio * 10 ** (decibels / 20), lengths)
        features, frames = self.logmel(waveform, lengths)
        return self.mask(features.mT).mT.contiguous(), frames


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Linear warm-up by steps, then half a cosine down to 0 where the budget (progress 1) ends."""
    return peak * min(1, (step + 1) / WARMUP_STEPS) * (1 + math.cos(math.pi * min(1, progress))) / 2


def train(
    args: argparse.Namespace,
    model: AnyRecogniser,
    logmel: LogMel,
    utterances: list[Utterance],
    vocabulary: str,
    state: dict[str, Any] | None,
) -> tuple[int, float, bool]:
    """Train until the budget is spent or a signal comes; write checkpoint.pt now and then.

    Args:
        state: a checkpoint of `read_checkpoint` to continue, or None.

    Returns:
        Steps done, seconds spent, and whether the budget is spent.
    """
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    augment = Augment(logmel).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    step, seconds = 0, 0.0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, seconds = state["step"], state["seconds"]
        torch.set_rng_state(state["rng"])
        if on_gpu and state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"], device)
    # Inductor's coalescing analysis fails on some symbolic shapes, which it is not made for.
    inductor = {"triton.coalesce_tiling_analysis": False}
    forward = torch.compile(model, dynamic=True, options=inductor) if args.compile else model

    lengths = [len(u.audio) for u in utterances]
    batches = endless_batches(lengths, int(args.batch_seconds * SAMPLE_RATE), seed=args.seed)
    loader = DataLoader(
        utterances,
        batch_sampler=islice(batches, step, None),
        collate_fn=lambda batch: collate(batch, vocabulary),
        num_workers=2 if on_gpu else 0,
        pin_memory=on_gpu,
        generator=torch.Generator(),  # the global one, which checkpoints hold, is left alone
    )

    def done() -> float:
        return step / args.steps if args.steps is not None else seconds / (60 * args.minutes)

    def save() -> None:
        checkpoint = {
            "model": model.state_dict(),
            "normalisation": {"mean": logmel.mean.cpu(), "std": logmel.std.cpu()},
            "vocabulary": vocabulary,
            "data": fingerprint(args, utterances),
            "options": {name: getattr(args, name) for name in BOUND},
            "optimizer": optimizer.state_dict(),
            # The schedule follows from these two, the next batch from the first.
            "step": step,
            "seconds": seconds,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(device) if on_gpu else None,
        }
        save_atomically(checkpoint, args.out / "checkpoint.pt")

    model.train()
    started = time.perf_counter() - seconds
    saved = seconds
    with (
        StopSignals() as stop,
        tqdm(total=100, bar_format="{desc} {percentage:3.0f}% |{bar}|") as bar,
    ):
        for batch in loader if done() < 1 else ():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args.lr, step, done())
            audio = batch.audio.to(device, non_blocking=True)
            features, frames = augment(audio, batch.lengths)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = forward(features, frames.to(device, non_blocking=True))
            # The lengths stay on the CPU, to which ctc_loss would fetch them. zero_infinity: speech
            # of more symbols than frames has no alignment.
            loss = functional.ctc_loss(
                logits.float().log_softmax(-1).transpose(0, 1),
                batch.targets.to(device, non_blocking=True),
                stacked(frames),
                batch.target_lengths,
                zero_infinity=True,
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            seconds = time.perf_counter() - started
            if step % 20 == 0 or done() >= 1:  # not always: reading the loss waits for the device
                rate = optimizer.param_groups[0]["lr"]
                left = seconds * max(0, 1 / done() - 1) / 60
                bar.set_description_str(
                    f"step {step}, loss {loss.item():.3f}, lr {rate:.1e}, {left:.1f} min to go"
                )
                bar.update(min(100, 100 * done()) - bar.n)
            if done() >= 1 or stop.asked:
                break
            if seconds - saved > SAVE_EVERY_SECONDS:
                save()
                saved = seconds
        save()
    return step, seconds, done() >= 1


class StopSignals:
    """Ctrl-C and SIGTERM ask for a stop between two steps; a second one stops at once."""

    def __enter__(self) -> "StopSignals":
        self.asked = False
        self.old = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, *_: object) -> None:
        self.asked = True
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        for number, handler in self.old.items():
            signal.signal(number, handler)


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write all of it or nothing: whenever the writer dies, path is a whole checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".checkpoint-") as folder:
        part = Path(folder) / path.name
        with part.open("wb") as file:  # of a new file's mode, as a temporary file would not be
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            part.chmod(path.stat().st_mode)
        os.replace(part, path)


def fingerprint(args: argparse.Namespace, utterances: list[Utterance]) -> str:
    """The source's name, and a hash of the utterances' names and lengths in their order."""
    rows = [(u.id, len(u.audio)) for u in utterances]
    return f"{source_name(args)}, {hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]}"


def read_checkpoint(
    path: Path, args: argparse.Namespace, utterances: list[Utterance], vocabulary: str
) -> dict[str, Any]:
    """Read a checkpoint to continue.

    Raises:
        ValueError: it is no checkpoint, or of another model, data, vocabulary or run; the message
            names every difference.
    """
    keys = "model normalisation vocabulary data options optimizer step seconds rng cuda_rng".split()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        lacks = [key for key in keys if key not in state]
        lacks += [name for name in BOUND if not lacks and name not in state["options"]]
    except OSError:
        raise
    except Exception as error:  # unpickling fails on other files in any way
        raise ValueError(
            f"{path} is no checkpoint of train_ctc.py: {type(error).__name__}: {error}. Give"
            " another --out"
        ) from error
    if lacks:
        raise ValueError(
            f"{path} is no checkpoint of train_ctc.py: it lacks {', '.join(lacks)}, or it is of an"
            " earlier version. Give another --out"
        )
    there, here = state["options"], vars(args)
    wrong = [
        f"--{name.replace('_', '-')} is {there[name]!r} there and {here[name]!r} here"
        for name in BOUND
        if there[name] != here[name]
    ]
    if state["vocabulary"] != vocabulary:
        wrong.append(f"the vocabulary is {state['vocabulary']!r} there and {vocabulary!r} here")
    data = fingerprint(args, utterances)
    if state["data"] != data:
        wrong.append(f"the training data is {state['data']} there and {data} here")
    if wrong:
        raise ValueError(
            f"{path} is of another run: {'; '.join(wrong)}. Repeat its options and data to continue"
            " it, or give another --out"
        )
    return state


def evaluate(
    model: AnyRecogniser, logmel: LogMel, vocabulary: str, corpus: Corpus
) -> tuple[dict[str, dict], dict[str, list[str]]]:
    """WER and CER of each held-out split, in per cent, and the transcripts."""
    scores, transcripts = {}, {}
    for split in sorted(corpus.keys() - {"train"}, reverse=True):  # test before dev
        utterances = corpus[split]
        said = [u.text for u in utterances]
        heard = transcribe(model, logmel, vocabulary, utterances, f"transcribe {split}")
        transcripts[split] = heard
        scores[split] = {
            "speakers": len({u.speaker for u in utterances}),
            "utterances": len(utterances),
            "wer": round(100 * jiwer.wer(said, heard), 2),
            "cer": round(100 * jiwer.cer(said, heard), 2),
        }
    return scores, transcripts


def draw_attention(
    path: Path,
    model: AnyRecogniser,
    logmel: LogMel,
    utterance: Utterance,
    left: int,
    right: int,
) -> None:
    """Save an image: an utterance's spectrogram, and below it each head's weights by offset."""
    device = next(model.parameters()).device
    lengths = torch.tensor([len(utterance.audio)], device=device)
    features, frames = logmel(utterance.audio[None].to(device), lengths)
    weights = attention_weights(model, features, frames, left, right).cpu().numpy()
    figure = Figure(figsize=(9, 2 + 1.3 * len(weights)), layout="constrained")
    axes = figure.subplots(
        len(weights) + 1, sharex=True, height_ratios=[2] + [1] * len(weights), squeeze=True
    )
    seconds = features.shape[1] / 100
    axes[0].imshow(
        features[0].mT.cpu().numpy(), aspect="auto", origin="lower", extent=(0, seconds, 0, 80)
    )
    axes[0].set(ylabel="mel channel", title=utterance.text)
    for head, (axis, of_head) in enumerate(zip(axes[1:], weights, strict=True)):
        frame = STACK / 100
        extent = (0, of_head.shape[1] * frame, (-left - 0.5) * frame, (right + 0.5) * frame)
        image = axis.imshow(
            of_head, aspect="auto", origin="lower", extent=extent, cmap="magma", vmin=0
        )
        shown = f"{of_head.sum(0).mean():.0%} of its weight lies in this window"
        axis.set(ylabel="offset (s)", title=f"head {head}: {shown}")
        figure.colorbar(image, ax=axis)
    axes[-1].set(xlabel="time (s)")
    figure.savefig(path, dpi=120)


def source_name(args: argparse.Namespace) -> str:
    """A word for the corpus that the command line names."""
    if args.data:
        return f"data-{Path(args.data).resolve().name}"  # may be called synthetic, too
    return "librispeech" if args.librispeech else "synthetic"


def read_corpus(args: argparse.Namespace) -> Corpus:
    """The corpus that the command line names."""
    if args.data:
        return read_manifest(args.data)
    if args.librispeech:
        return read_librispeech(args.librispeech)
    print("No --data and no --librispeech: SYNTHETIC speech, digits spoken by eSpeak NG.")
    return read_synthetic(seed=args.seed, letters=args.letters)


def number(kind: type, expected: str, fits: Callable[[Any], bool]) -> Callable[[str], Any]:
    """An argparse type: a number of that kind that fits, or an error that says what is expected."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    return read


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    count = number(int, "a whole number of at least 1", lambda n: n >= 1)
    from_0 = number(int, "a whole number of at least 0", lambda n: n >= 0)
    odd = number(int, "an odd whole number of at least 1", lambda n: n >= 1 and n % 2 == 1)
    positive = number(float, "a finite number above 0", lambda x: 0 < x < math.inf)
    below_1 = number(float, "a number of at least 0 and below 1", lambda x: 0 <= x < 1)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", metavar="DIR", help="directory with a manifest.jsonl")
    source.add_argument("--librispeech", metavar="DIR", help="directory that holds LibriSpeech/")
    source.add_argument("--letters", action="store_true", help="synthetic: letters beside digits")
    add("--out", type=Path, help="runs/SOURCE-ATTENTION or -streaming[-ATTENTION] if not given")
    add("--resume", action="store_true", help="continue from the checkpoint in --out")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--minutes", type=positive, default=2.5, help="training time, with compiling"
    )
    budget.add_argument("--steps", type=count, help="train so many steps, however long they take")
    add("--seed", type=from_0, default=0, help=" ")
    add("--encoder", choices=["torchaudio", "streaming"], default="torchaudio", help=" ")
    add(
        "--attention",
        choices=["ldsa", "mhsa", "sla", "mixed"],
        default="ldsa",
        help="mhsa: torchaudio's own; streaming: sla, or mixed, three ldsa to one sla",
    )
    window = {"type": from_0, "default": argparse.SUPPRESS}
    add("--left", **window, help="frames of 40 ms before the current one (ldsa; 7, streaming 14)")
    add(
        "--right",
        **window,
        help="frames after it in each layer, which add up to the look-ahead (ldsa; 7, streaming 0)",
    )
    add("--dim", type=count, default=96, help="model width")
    add("--layers", type=count, default=4, help=" ")
    add("--heads", type=count, default=4, help=" ")
    add("--ffn", type=count, default=256, help="feed-forward width")
    add("--kernel", type=odd, default=15, help="frames of the depthwise convolution")
    add("--dropout", type=below_1, default=0.1, help=" ")
    add("--lr", type=positive, default=2e-3, help="peak learning rate")
    add("--batch-seconds", type=positive, default=20, help="padded audio in a batch")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help=" ")
    # Threads that wait for one another gain a model this small nothing, and on cores that other
    # work wants they make its steps many times slower.
    add("--threads", type=count, default=1, help="CPU threads; more pays for wider models")
    add("--bf16", action="store_true", help="bfloat16 autocast")
    add("--compile", action="store_true", help="torch.compile, once for all lengths")
    args = parser.parse_args(argv)
    if args.dim % args.heads:
        parser.error(f"--heads must divide --dim, got {args.heads} and {args.dim}")
    streaming = args.encoder == "streaming"
    if streaming and args.attention == "mhsa":
        parser.error("--attention mhsa sees the whole utterance: --encoder streaming takes ldsa")
    if not streaming and args.attention in ("sla", "mixed"):
        parser.error(f"--attention {args.attention} is for --encoder streaming")
    vars(args).setdefault("left", 14 if streaming else 7)
    vars(args).setdefault("right", 0 if streaming else 7)
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, report, and return what results.json holds."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    source = source_name(args)
    name = args.attention
    if args.encoder == "streaming":
        name = "streaming" if name == "ldsa" else f"streaming-{name}"
    args.out = args.out or Path("runs") / f"{source}-{name}"
    checkpoint = args.out / "checkpoint.pt"
    try:
        there = checkpoint.exists()
        if args.resume and not there:
            raise SystemExit(f"there is no {checkpoint}: name its --out, or leave out --resume")
        if there and not args.resume:
            raise SystemExit(
                f"{checkpoint} exists: continue it with --resume, or give another --out"
            )
        # Not found out by the first save, which comes after minutes of reading and training.
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=args.out) as probe:
            probe.write(b"probe")
    except OSError as error:
        raise SystemExit(f"cannot write to --out {args.out}: {error}") from error
    try:
        corpus = read_corpus(args)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"{error}") from error

    vocabulary = "".join(sorted({c for u in corpus["train"] for c in u.text}))
    state = None
    if args.resume:
        try:
            state = read_checkpoint(checkpoint, args, corpus["train"], vocabulary)
        except (OSError, ValueError) as error:
            raise SystemExit(f"{error}") from error
    try:
        model = build(vars(args), vocabulary).to(args.device)
    # AssertionError: a torch without CUDA; TypeError: a number beyond 64 bits.
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise SystemExit(f"cannot build the model on --device {args.device}: {error}") from error
    logmel = LogMel(**state["normalisation"]) if state else LogMel.fit(corpus["train"])
    logmel.to(args.device)
    parameters = sum(p.numel() for p in model.parameters())
    minutes = sum(len(u.audio) for u in corpus["train"]) / SAMPLE_RATE / 60
    print(
        f"{source}: {len(corpus['train'])} training utterances, {minutes:.1f} min; "
        f"{args.encoder}, {args.attention}, {parameters:,} parameters, on {args.device}"
    )
    steps, seconds, finished = train(args, model, logmel, corpus["train"], vocabulary, state)
    if not finished:
        raise SystemExit(f"stopped after {steps} steps: the same command with --resume goes on")

    scores, transcripts = evaluate(model, logmel, vocabulary, corpus)
    split, heard = next(iter(transcripts.items()))
    utterances = corpus[split]
    print(f"\nUnheard speakers ({split}), text and transcript:")
    for i in range(0, len(utterances), -(-len(utterances) // 6)):
        print(f"  {utterances[i].text}\n  {heard[i]}\n")
    files = "checkpoint.pt, results.json"
    if args.attention != "sla":
        middling = sorted(utterances, key=lambda u: len(u.audio))[len(utterances) // 2]
        draw_attention(args.out / "attention.png", model, logmel, middling, args.left, args.right)
        files += ", attention.png"

    results = {
        "source": source,
        "encoder": args.encoder,
        "attention": args.attention,
        "parameters": parameters,
        "steps": steps,
        "minutes": round(seconds / 60, 2),
        "device": torch.cuda.get_device_name() if "cuda" in args.device else args.device,
        "options": {name: getattr(args, name) for name in [*BOUND, "bf16", "compile"]},
        "held_out": scores,
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print("attention  parameters   steps  minutes  unheard     speakers  utterances  WER %  CER %")
    for name, score in scores.items():
        print(
            f"{args.attention:9}  {parameters:10,}  {steps:6}  {seconds / 60:7.2f}  {name:10}  "
            f"{score['speakers']:8}  {score['utterances']:10}  {score['wer']:5.1f}  "
            f"{score['cer']:5.1f}"
        )
    if source == "synthetic":
        print("Synthetic speech: these rates say nothing about recordings.")
    print(f"In {args.out}: {files}")
    if args.encoder == "streaming":
        print(f"To transcribe live: python examples/stream.py --checkpoint {checkpoint} FILE")
    print("To train on: the same command with --resume and a larger --minutes or --steps")
    return results


if __name__ == "__main__":
    main()
