"""Train a CTC Conformer with local dense synthesizer attention, and test it on unheard speakers.

    python examples/train_ctc.py                      # synthetic digits, minutes on two CPU cores
    python examples/train_ctc.py --data DIR           # a directory with a manifest.jsonl
    python examples/train_ctc.py --librispeech DIR    # the directory that holds LibriSpeech/
    python examples/train_ctc.py --attention mhsa     # the same model with its own attention
    python examples/train_ctc.py --encoder streaming  # a model for stream.py
    python examples/train_ctc.py --encoder streaming --attention mixed  # with global attention too
    python examples/train_ctc.py --ema 0.999 --beam 10 # averaged weights, prefix search
    python examples/train_ctc.py --shards 'DIR/*.tar' # a corpus larger than memory: shards.py
    torchrun --nproc-per-node 8 examples/train_ctc.py # on several GPUs; --fsdp shards the model

The model is torchaudio's Conformer on stacked log-mel frames, of which `ldsa_nn.replace_attention`
changes the attention and nothing else, or with --encoder streaming `ldsa_nn.ConformerEncoder`. The
output directory gets checkpoint.pt, results.json, a model card in card.md and, of attention with
weights on frames, attention.png; --resume continues from the checkpoint. Under torchrun that is the
newest one of checkpoints/, written by all processes, and checkpoint.pt comes at the end.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from card import model_card
from data import (
    HOP,
    SAMPLE_RATE,
    Corpus,
    LogMel,
    Utterance,
    read_librispeech,
    read_manifest,
    read_synthetic,
)
from distributed import Ranks, leave, newest
from filelock import FileLock, Timeout
from recogniser import (
    STACK,
    STREAM,
    AnyRecogniser,
    attention_weights,
    build,
    load_recogniser,
    transcribe,
)
from shards import Shards, read_shards
from torch._inductor import config as inductor_config
from training import BOUND, read_checkpoint, source_name, train

try:
    import jiwer
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(f"{error}: run pip install 'ldsa_nn[examples]'") from error


def evaluate(
    ranks: Ranks,
    model: AnyRecogniser,
    logmel: LogMel,
    vocabulary: str,
    corpus: Corpus,
    beams: int,
) -> tuple[dict[str, dict], dict[str, list[str]]]:
    """WER and CER of each held-out split, in per cent, and the transcripts, of greedy decoding.

    beams: of a prefix search whose rates are told too, where it is not 0.
    """
    scores, transcripts = {}, {}
    for split in sorted(corpus.keys() - {"train"}, reverse=True):  # test before dev
        utterances = corpus[split]
        said = [u.text for u in utterances]
        mine = utterances[ranks.rank :: ranks.size]
        heard = ranks.gather(transcribe(model, logmel, vocabulary, mine, f"transcribe {split}"))
        transcripts[split] = heard
        scores[split] = {
            "speakers": len({u.speaker for u in utterances}),
            "utterances": len(utterances),
            **rates(said, heard),
        }
        if beams:
            found = transcribe(model, logmel, vocabulary, mine, f"search {split}", beams)
            scores[split]["beam"] = rates(said, ranks.gather(found))
    return scores, transcripts


def rates(said: list[str], heard: list[str]) -> dict[str, float]:
    """WER and CER in per cent."""
    wer, cer = jiwer.wer(said, heard), jiwer.cer(said, heard)
    return {"wer": round(100 * wer, 2), "cer": round(100 * cer, 2)}


def draw_attention(
    path: Path,
    model: AnyRecogniser,
    logmel: LogMel,
    utterance: Utterance,
    left: int,
    right: int,
) -> None:
    """Save an image: an utterance's spectrogram, and below it weights by offset, a row a layer."""
    device = next(model.parameters()).device
    lengths = torch.tensor([len(utterance.audio)], device=device)
    features, frames = logmel(utterance.audio[None].to(device), lengths)
    weights = attention_weights(model, features, frames, left, right)
    layers, heads = len(weights), len(next(iter(weights.values())))
    figure = Figure(figsize=(1 + 3 * heads, 2 + 1.3 * layers), layout="constrained")
    grid = figure.add_gridspec(layers + 1, heads, height_ratios=[1.5] + [1] * layers)
    top = figure.add_subplot(grid[0, :])
    seconds = features.shape[1] / 100
    top.imshow(
        features[0].mT.cpu().numpy(), aspect="auto", origin="lower", extent=(0, seconds, 0, 80)
    )
    top.set(ylabel="mel channel", title=utterance.text)
    frame = STACK / 100
    for row, (layer, of_layer) in enumerate(weights.items(), 1):
        for head, of_head in enumerate(of_layer.cpu().numpy()):
            axis = figure.add_subplot(grid[row, head])
            extent = (0, of_head.shape[1] * frame, (-left - 0.5) * frame, (right + 0.5) * frame)
            image = axis.imshow(
                of_head, aspect="auto", origin="lower", extent=extent, cmap="magma", vmin=0
            )
            share = of_head.sum(0).mean()  # less than 1 where weights reach beyond the window
            shown = "" if share > 0.999 else f": {share:.0%} of its weight"
            axis.set_title(f"layer {layer}, head {head}{shown}", fontsize="small")
            axis.label_outer()
            figure.colorbar(image, ax=axis)
            if head == 0:
                axis.set(ylabel="offset (s)")
            if row == layers:
                axis.set(xlabel="time (s)")
    figure.savefig(path, dpi=120)


def read_corpus(args: argparse.Namespace) -> Corpus | dict[str, Any]:
    """The corpus that the command line names; --shards has a train split of its own kind."""
    if args.shards:
        return read_shards(args.shards)
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
        prog="train_ctc.py",  # where compare.py reads its recipe, too
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    count = number(int, "a whole number of at least 1", lambda n: n >= 1)
    from_0 = number(int, "a whole number of at least 0", lambda n: n >= 0)
    seed = number(int, "a whole number of at least 0 and below 2^63", lambda n: 0 <= n < 1 << 63)
    odd = number(int, "an odd whole number of at least 1", lambda n: n >= 1 and n % 2 == 1)
    positive = number(float, "a finite number above 0", lambda x: 0 < x < math.inf)
    below_1 = number(float, "a number of at least 0 and below 1", lambda x: 0 <= x < 1)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", metavar="DIR", help="directory with a manifest.jsonl")
    source.add_argument("--librispeech", metavar="DIR", help="directory that holds LibriSpeech/")
    source.add_argument("--shards", metavar="'DIR/*.tar'", help="of shards.py, streamed")
    source.add_argument("--letters", action="store_true", help="synthetic: letters beside digits")
    add("--out", type=Path, help="runs/SOURCE-ATTENTION or -streaming[-ATTENTION] if not given")
    add("--resume", action="store_true", help="continue from the checkpoint in --out")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--minutes", type=positive, default=2.5, help="training time, with compiling"
    )
    budget.add_argument("--steps", type=count, help="train so many steps, however long they take")
    add("--seed", type=seed, default=0, help=" ")
    add("--encoder", choices=["torchaudio", "streaming"], default="torchaudio", help=" ")
    add(
        "--attention",
        choices=["ldsa", "mhsa", "sla", "mixed", "hybrid", "bisla"],
        default="ldsa",
        help="torchaudio: ldsa, or its own, mhsa; streaming: all, of which mhsa, hybrid (ldsa, then"
        " mhsa) and bisla (sla both ways) are offline only; mixed is three ldsa to one sla",
    )
    window = {"type": from_0, "default": argparse.SUPPRESS}
    add("--left", **window, help="frames of 40 ms before the current one (ldsa; 7, in a stream 14)")
    add(
        "--right",
        **window,
        help="frames after it in each layer, which add up to the look-ahead (ldsa; 7, in a stream"
        " 0)",
    )
    add("--dim", type=count, default=96, help="model width")
    add("--layers", type=count, default=4, help=" ")
    add("--heads", type=count, default=4, help=" ")
    add("--ffn", type=count, default=256, help="feed-forward width")
    add("--kernel", type=odd, default=15, help="frames of the depthwise convolution")
    add("--dropout", type=below_1, default=0.1, help=" ")
    add("--ema", type=below_1, default=0, help="average weights with this decay a step; 0: do not")
    add("--beam", type=from_0, default=0, help="test with so many beams too, beside greedily")
    add("--lr", type=positive, default=2e-3, help="peak learning rate")
    add(
        "--batch-seconds",
        type=positive,
        default=20,
        help="padded audio in a batch, of all processes and micro-batches together",
    )
    add("--accumulate", type=count, default=1, help="micro-batches of a batch, to save memory")
    add("--fsdp", action="store_true", help="under torchrun: FSDP2 shards the model (else DDP)")
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
    if not streaming and args.attention not in ("ldsa", "mhsa"):
        parser.error(f"--attention {args.attention} is for --encoder streaming")
    if args.beam and importlib.util.find_spec("fast_ctc_decode") is None:
        parser.error("--beam needs fast-ctc-decode: run pip install 'ldsa_nn[examples]'")
    streaming = streaming and args.attention in STREAM
    vars(args).setdefault("left", 14 if streaming else 7)
    vars(args).setdefault("right", 0 if streaming else 7)
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, report, and return what results.json holds, or {} but on the first rank."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    try:
        ranks = Ranks(args.device)
    except ValueError as error:
        raise SystemExit(f"{error}") from error
    if args.fsdp and not ranks.launched:
        raise SystemExit(
            "--fsdp: expected the processes of torchrun, got one without: torchrun --nproc-per-node"
            " N examples/train_ctc.py --fsdp"
        )
    if args.fsdp and args.compile and not hasattr(inductor_config, "strict_output_strides"):
        raise SystemExit(
            "--compile with --fsdp: expected a PyTorch whose Inductor has strict_output_strides, as"
            f" 2.14 has, got {torch.__version__}"
        )
    name = args.attention
    if args.encoder == "streaming":
        name = "streaming" if name == "ldsa" else f"streaming-{name}"
    args.out = args.out or Path("runs") / f"{source_name(args)}-{name}"
    with ranks:
        try:
            torch.empty(0, device=ranks.device).cpu()
        except (AssertionError, RuntimeError) as error:  # the first: a torch without CUDA
            raise SystemExit(f"--device {args.device}: {error}") from error
        return run(args, ranks)


def run(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Train and report as one of the ranks, in an output directory that no other job uses."""
    there = last_checkpoint(args, ranks)
    with alone(args.out) if ranks.rank == 0 else contextlib.nullcontext():
        return run_from(there, args, ranks)


def last_checkpoint(args: argparse.Namespace, ranks: Ranks) -> Path | None:
    """What --resume goes on from, or None without it; SystemExit where there is none, or one."""
    checkpoint = args.out / "checkpoint.pt"
    sharded = args.out / "checkpoints"
    try:
        there = newest(sharded) or (checkpoint if checkpoint.exists() else None)
    except OSError as error:
        raise SystemExit(f"cannot write to --out {args.out}: {error}") from error
    if args.resume and there is None:
        raise SystemExit(f"there is no {checkpoint}: name its --out, or leave out --resume")
    if there and not args.resume:
        raise SystemExit(f"{there} exists: continue it with --resume, or give another --out")
    if there and ranks.launched != there.is_relative_to(sharded):
        way = "without" if ranks.launched else "with"
        raise SystemExit(f"{there} was written {way} torchrun: resume it {way} torchrun")
    return there


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Make out, and keep other processes from training there for as long as this one lives."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        # Not found out by the first save, which comes after minutes of reading and training.
        with tempfile.NamedTemporaryFile(dir=out) as probe:
            probe.write(b"probe")
        lock = FileLock(out / ".lock", timeout=0).acquire()
    except Timeout:
        raise SystemExit(f"another process trains in --out {out}: wait for it, or end it") from None
    except OSError as error:
        raise SystemExit(f"cannot write to --out {out}: {error}") from error
    with lock:
        yield


def run_from(there: Path | None, args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """`run` from the checkpoint that is there, or from the start."""
    source = source_name(args)
    checkpoint = args.out / "checkpoint.pt"
    try:
        corpus = read_corpus(args)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"{error}") from error

    heard = corpus["train"]
    if isinstance(heard, Shards):
        vocabulary = heard.vocabulary
    else:
        vocabulary = "".join(sorted({c for u in heard for c in u.text}))
    state = None
    try:
        if isinstance(heard, Shards):
            heard.check_for(ranks.size)
        if there:
            state = read_checkpoint(there, args, ranks, heard, vocabulary)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from error
    try:
        model = build(vars(args), vocabulary).to(ranks.device)
    except (RuntimeError, TypeError, ValueError) as error:  # TypeError: a number beyond 64 bits
        raise SystemExit(f"cannot build the model on --device {args.device}: {error}") from error
    try:
        if state:
            logmel = LogMel(**state["normalisation"])
        else:
            logmel = LogMel.fit(heard.sample() if isinstance(heard, Shards) else heard)
    except ValueError as error:
        raise SystemExit(f"{error}") from error
    logmel.to(ranks.device)
    parameters = sum(p.numel() for p in model.parameters())
    if isinstance(heard, Shards):
        amount = f"{len(heard.paths)} shards"
    else:
        amount = f"{sum(len(u.audio) for u in heard) / SAMPLE_RATE / 60:.1f} min"
    print(
        f"{source}: {len(heard)} training utterances, {amount}; "
        f"{args.encoder}, {args.attention}, {parameters:,} parameters, on {args.device}"
        + (f", {ranks.size} processes" if ranks.launched else "")
    )
    steps, seconds, peak, finished = train(args, ranks, model, logmel, heard, vocabulary, state)
    if not finished:
        raise SystemExit(f"stopped after {steps} steps: the same command with --resume goes on")
    if ranks.launched:  # the trained model may be a part of one
        model = load_recogniser(checkpoint)[0].to(ranks.device)
    scores, transcripts = evaluate(ranks, model, logmel, vocabulary, corpus, args.beam)
    if ranks.rank:
        return {}

    split, heard = next(iter(transcripts.items()))
    utterances = corpus[split]
    print(f"\nUnheard speakers ({split}), text and transcript:")
    for i in range(0, len(utterances), -(-len(utterances) // 6)):
        print(f"  {utterances[i].text}\n  {heard[i]}\n")
    files = "checkpoint.pt, results.json, card.md"
    if model.attentions:
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
        "processes": ranks.size,
        "peak_memory_mib": None if peak is None else round(peak / 2**20, 1),
        "delay_ms": None if model.delay is None else model.delay * 1000 * HOP // SAMPLE_RATE,
        "options": {
            name: getattr(args, name)
            for name in [*BOUND, "accumulate", "fsdp", "bf16", "compile", "beam"]
        },
        "held_out": scores,
    }
    texts = {"results.json": json.dumps(results, indent=2) + "\n", "card.md": model_card(results)}
    for name, text in texts.items():
        part = args.out / f".{name}"
        part.write_text(text, encoding="utf-8")
        os.replace(part, args.out / name)  # whoever finds it finds all of it
    print("attention  parameters   steps  minutes  unheard     speakers  utterances  WER %  CER %")
    for name, score in scores.items():
        print(
            f"{args.attention:9}  {parameters:10,}  {steps:6}  {seconds / 60:7.2f}  {name:10}  "
            f"{score['speakers']:8}  {score['utterances']:10}  {score['wer']:5.1f}  "
            f"{score['cer']:5.1f}"
        )
    if args.beam:
        for name, score in scores.items():
            wer, cer = score["beam"]["wer"], score["beam"]["cer"]
            print(f"with {args.beam} beams, {name}: WER {wer:.1f} %, CER {cer:.1f} %")
    if source == "synthetic":
        print("Synthetic speech: these rates say nothing about recordings.")
    print(f"In {args.out}: {files}")
    if model.delay is not None:
        print(f"To transcribe live: python examples/stream.py --checkpoint {checkpoint} FILE")
    print("To train on: the same command with --resume and a larger --minutes or --steps")
    return results


if __name__ == "__main__":
    main()
    leave()
