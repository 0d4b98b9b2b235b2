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
output directory gets checkpoint.pt, results.json, a model card in README.md and, of attention with
weights on frames, attention.png; --resume continues from the checkpoint. Under torchrun that is the
newest one of checkpoints/, written by all processes, and checkpoint.pt comes at the end.
"""

import argparse
import hashlib
import importlib.util
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
from card import model_card
from data import (
    HOP,
    SAMPLE_RATE,
    Batch,
    Corpus,
    LogMel,
    Share,
    Utterance,
    collate,
    endless_batches,
    read_librispeech,
    read_manifest,
    read_synthetic,
    share,
)
from distributed import Ranks, full_weights, leave, newest, synchronised
from recogniser import (
    STACK,
    STREAM,
    AnyRecogniser,
    attention_weights,
    build,
    load_recogniser,
    stacked,
    transcribe,
)
from shards import WORKERS, Shards, Step, Stream, read_shards
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn import functional
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

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
    " ema"
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


class Whole(Dataset):
    """A corpus in memory: the index is a rank's shares of a batch, and what it gives is a step."""

    def __init__(self, utterances: list[Utterance], vocabulary: str) -> None:
        self.utterances, self.vocabulary = utterances, vocabulary

    def __getitem__(self, shares: list[Share]) -> Step:
        batches = []
        for indices, count in shares:
            batch = collate([self.utterances[i] for i in indices], self.vocabulary)
            batches.append(batch._replace(count=count))
        return Step(batches)


class Average:
    """A running mean of a model's parameters and statistics, that of the last steps weighing most.

        mean = d mean + (1 - d) weights,   d = min(decay, (step + 1) / (step + 10))

    mean: by the names of the state dict, sharded where the model is.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """model: as `Ranks.wrap` left it; decay: of the mean, in a step."""
        self.decay = decay
        # Apart, since a sharded model's statistics are not sharded.
        self.weights = (dict(model.named_parameters()), dict(model.named_buffers()))
        saved = model.state_dict().keys()
        for part in self.weights:
            for name in [n for n, t in part.items() if n not in saved or not t.is_floating_point()]:
                del part[name]
        self.mean = {n: t.detach().clone() for part in self.weights for n, t in part.items()}

    def update(self, step: int) -> None:
        """Take in the weights that a step, counted from 0, has left."""
        update = get_ema_multi_avg_fn(min(self.decay, (step + 1) / (step + 10)))
        for part in self.weights:
            if part:
                update([self.mean[name] for name in part], list(part.values()), None)

    def current(self) -> dict[str, Tensor]:
        """The weights themselves, by the same names."""
        return {name: tensor.detach() for part in self.weights for name, tensor in part.items()}

    @torch.no_grad()
    def put(self) -> None:
        """Give the model the mean."""
        for name, tensor in self.current().items():
            tensor.copy_(self.mean[name])


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Linear warm-up by steps, then half a cosine down to 0 where the budget (progress 1) ends."""
    return peak * min(1, (step + 1) / WARMUP_STEPS) * (1 + math.cos(math.pi * min(1, progress))) / 2


def gradients(
    module: nn.Module,
    ranks: Ranks,
    batches: list[Batch],
    augment: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    *,
    autocast: bool,
) -> Tensor:
    """Add to the gradients that of the mean loss over all ranks' batches.

    Args:
        module: of `Ranks.wrap`.
        batches: this rank's micro-batches of a step.
        augment: audio, lengths -> features, frames.
        autocast: to bfloat16.

    Returns:
        This rank's part of the loss.
    """
    device = torch.device(ranks.device)
    (total,) = ranks.sum(sum(batch.count for batch in batches))
    part = torch.zeros((), device=device)
    for batch in batches:
        audio = batch.audio.to(device, non_blocking=True)
        features, frames = augment(audio, batch.lengths)
        with synchronised(module, batch is batches[-1]):
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                logits = module(features, frames.to(device, non_blocking=True))
            # Not in bfloat16, which is too coarse. The lengths stay on the CPU, to which ctc_loss
            # would fetch them. zero_infinity: speech of more symbols than frames has no alignment.
            exact = torch.promote_types(logits.dtype, torch.float32)
            loss = functional.ctc_loss(
                logits.log_softmax(-1, dtype=exact).transpose(0, 1),
                batch.targets.to(device, non_blocking=True),
                stacked(frames),
                batch.target_lengths,
                zero_infinity=True,
            )
            # The ranks' gradients are averaged: each utterance is to weigh the same on any of them.
            (loss * (batch.count / total * ranks.size)).backward()
        part += loss.detach() * (batch.count / total)
    return part


def train(
    args: argparse.Namespace,
    ranks: Ranks,
    model: AnyRecogniser,
    logmel: LogMel,
    utterances: list[Utterance] | Shards,
    vocabulary: str,
    state: dict[str, Any] | None,
) -> tuple[int, float, int | None, bool]:
    """Train until the budget is spent or a signal comes; write a checkpoint now and then.

    The weights that model is left with, as a finished run's checkpoint.pt is, are those of --ema.

    Args:
        state: a checkpoint of `read_checkpoint` to continue, or None.

    Returns:
        Steps done, seconds spent, the most bytes of GPU memory in use at a time (None: of a CPU),
        and whether the budget is spent. All count what state had done.
    """
    device = torch.device(ranks.device)
    on_gpu = device.type == "cuda"
    augment = Augment(logmel).to(device)
    # Inductor's coalescing analysis fails on some symbolic shapes, which it is not made for.
    inductor = {"triton.coalesce_tiling_analysis": False}
    if args.compile and args.fsdp:
        # One by one: a block's parameters are gathered while another's are computed. Inductor
        # cannot order the strides of a block's symbolic lengths, only keep them.
        for block in model.blocks:
            block.compile(dynamic=True, options={**inductor, "strict_output_strides": True})
    elif args.compile and ranks.launched:
        model.compile(dynamic=True, options=inductor)
    module = ranks.wrap(model, fsdp=args.fsdp, bf16=args.bf16)
    forward = module
    if args.compile and not ranks.launched:  # of its own: the model is tested as it is
        forward = torch.compile(model, dynamic=True, options=inductor)
    optimizer = torch.optim.AdamW(
        module.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    average = Average(model, args.ema) if args.ema else None
    step, seconds, peak_before = 0, 0.0, 0
    position = torch.zeros(WORKERS, 2, dtype=torch.int64)  # of this rank's `Stream`

    def own() -> dict[str, Tensor | None]:
        """What a checkpoint holds of each rank alone."""
        cuda_rng = torch.cuda.get_rng_state(device) if on_gpu else None
        return {"rng": torch.get_rng_state(), "cuda_rng": cuda_rng, "position": position}

    if state is None:
        ranks.seed()
    else:
        step, seconds = state["step"], state["seconds"]
        peak_before = state.get("peak_memory") or 0  # a CPU's checkpoint has none
        if ranks.launched:
            mean = average.mean if average else {}
            mine = ranks.load(state["path"], module, optimizer, own(), mean)
        else:
            mine = state
            model.load_state_dict(state["model"])
            if average:  # which is what the checkpoint has as its model
                for name, tensor in average.current().items():
                    average.mean[name].copy_(tensor)
                model.load_state_dict(state["unaveraged"], strict=False)
            optimizer.load_state_dict(state["optimizer"])
        position = mine.get("position", position)  # checkpoints before there were shards lack it
        torch.set_rng_state(mine["rng"])
        if on_gpu and mine["cuda_rng"] is not None:
            torch.cuda.set_rng_state(mine["cuda_rng"], device)

    order = {"accumulate": args.accumulate, "rank": ranks.rank, "ranks": ranks.size}
    batch_length = int(args.batch_seconds * SAMPLE_RATE)
    options: dict[str, Any] = {
        "pin_memory": on_gpu,
        "generator": torch.Generator(),  # the global one, which checkpoints hold, is left alone
        "worker_init_fn": outlive_sigterm,
    }
    if isinstance(utterances, Shards):
        stream = Stream(
            utterances,
            vocabulary,
            batch_length // (ranks.size * args.accumulate),
            seed=args.seed,
            start=position.tolist(),
            steps=step,
            **order,
        )
        loader = DataLoader(stream, batch_size=None, num_workers=WORKERS, **options)
    else:
        batches = endless_batches([len(u.audio) for u in utterances], batch_length, seed=args.seed)
        loader = DataLoader(
            Whole(utterances, vocabulary),
            batch_size=None,
            sampler=(share(batch, **order) for batch in islice(batches, step, None)),
            num_workers=2 if on_gpu else 0,
            **options,
        )

    def done() -> float:
        return step / args.steps if args.steps is not None else seconds / (60 * args.minutes)

    def peak_memory() -> int | None:
        return max(peak_before, torch.cuda.max_memory_allocated(device)) if on_gpu else None

    def save() -> None:
        # The schedule follows from step and seconds, and so does the next batch but for shards.
        run = {
            "vocabulary": vocabulary,
            "data": fingerprint(args, utterances),
            "options": {name: getattr(args, name) for name in BOUND},
            "step": step,
            "seconds": seconds,
            "peak_memory": peak_memory(),
        }
        normalisation = {"mean": logmel.mean.cpu(), "std": logmel.std.cpu()}
        if ranks.launched:
            numbers = {name: values.tolist() for name, values in normalisation.items()}
            run |= {"normalisation": numbers, "ranks": ranks.size, "device": device.type}
            mean = average.mean if average else {}
            ranks.save(args.out / "checkpoints", module, optimizer, own(), mean, run)
            if done() >= 1:
                if average:
                    average.put()
                weights = full_weights(module)
                if ranks.rank == 0:
                    whole = {**run, "model": weights, "normalisation": normalisation}
                    save_atomically(whole, args.out / "checkpoint.pt")
                ranks.wait()
        else:
            tensors = {"model": model.state_dict(), "normalisation": normalisation}
            if average:
                tensors["model"] |= average.mean
                tensors["unaveraged"] = average.current()
            whole = {**run, **tensors, "optimizer": optimizer.state_dict(), **own()}
            save_atomically(whole, args.out / "checkpoint.pt")

    module.train()
    started = time.perf_counter() - seconds
    saved = seconds
    with (
        StopSignals() as stop,
        tqdm(total=100, bar_format="{desc} {percentage:3.0f}% |{bar}|") as bar,
    ):
        for batches, worker, goes_on in loader if done() < 1 else ():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args.lr, step, done())
            optimizer.zero_grad()
            autocast = args.bf16 and not args.fsdp
            loss = gradients(forward, ranks, batches, augment, autocast=autocast)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            if average:
                average.update(step)
            step += 1
            position[worker] = torch.tensor(goes_on)
            # The first rank's clock counts, and a signal to any rank stops all in the same step.
            clock = 0.0 if ranks.rank else time.perf_counter() - started
            seconds, asked = ranks.sum(clock, stop.asked)
            if step % 20 == 0 or done() >= 1:  # not always: reading the loss waits for the device
                (mean,) = ranks.sum(float(loss))
                rate = optimizer.param_groups[0]["lr"]
                left = seconds * max(0, 1 / done() - 1) / 60
                bar.set_description_str(
                    f"step {step}, loss {mean:.3f}, lr {rate:.1e}, {left:.1f} min to go"
                )
                bar.update(min(100, 100 * done()) - bar.n)
            if done() >= 1 or asked:
                break
            if seconds - saved > SAVE_EVERY_SECONDS:
                save()
                saved = seconds
        save()
    if average:
        average.put()
    return step, seconds, peak_memory(), done() >= 1


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


def outlive_sigterm(worker: int) -> None:
    """SIGTERM may go to all processes: a worker that died of it would end the run unsaved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


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


def fingerprint(args: argparse.Namespace, utterances: list[Utterance] | Shards) -> str:
    """The source's name, and a hash of the utterances' (shards') names and lengths in order."""
    if isinstance(utterances, Shards):
        rows = [(Path(path).name, Path(path).stat().st_size) for path in utterances.paths]
    else:
        rows = [(u.id, len(u.audio)) for u in utterances]
    return f"{source_name(args)}, {hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]}"


def read_checkpoint(
    path: Path,
    args: argparse.Namespace,
    ranks: Ranks,
    utterances: list[Utterance] | Shards,
    vocabulary: str,
) -> dict[str, Any]:
    """Read a checkpoint to continue: of one process, or what is not sharded of several ones'.

    Raises:
        ValueError: it is no checkpoint, or of another model, data, vocabulary or run; the message
            names every difference.
    """
    keys = "ranks device" if ranks.launched else "model optimizer rng cuda_rng"
    if args.ema and not ranks.launched:
        keys += " unaveraged"
    keys = f"{keys} normalisation vocabulary data options step seconds".split()
    try:
        if ranks.launched:
            state = json.loads((path / "run.json").read_text())
        else:
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
    if ranks.launched:
        # Random numbers and data are those of so many ranks.
        if state["ranks"] != ranks.size:
            wrong.append(f"torchrun has {state['ranks']} processes there and {ranks.size} here")
        kind = torch.device(ranks.device).type
        if state["device"] != kind:
            wrong.append(f"--device is {state['device']} there and {kind} here")
        state["normalisation"] = {n: torch.tensor(v) for n, v in state["normalisation"].items()}
        state["path"] = path
    if wrong:
        raise ValueError(
            f"{path} is of another run: {'; '.join(wrong)}. Repeat its options and data to continue"
            " it, or give another --out"
        )
    return state


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
            shown = f"{of_head.sum(0).mean():.0%} of its weight"
            axis.set_title(f"layer {layer}, head {head}: {shown}", fontsize="small")
            axis.label_outer()
            figure.colorbar(image, ax=axis)
            if head == 0:
                axis.set(ylabel="offset (s)")
            if row == layers:
                axis.set(xlabel="time (s)")
    figure.savefig(path, dpi=120)


def source_name(args: argparse.Namespace) -> str:
    """A word for the corpus that the command line names."""
    if args.data:
        return f"data-{Path(args.data).resolve().name}"  # may be called synthetic, too
    if args.shards:
        return f"shards-{Path(args.shards).resolve().parent.name}"
    return "librispeech" if args.librispeech else "synthetic"


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
    source.add_argument("--shards", metavar="'DIR/*.tar'", help="of shards.py, streamed")
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
    with ranks:
        return run(args, ranks)


def run(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Train and report as one of the ranks."""
    source = source_name(args)
    name = args.attention
    if args.encoder == "streaming":
        name = "streaming" if name == "ldsa" else f"streaming-{name}"
    args.out = args.out or Path("runs") / f"{source}-{name}"
    checkpoint = args.out / "checkpoint.pt"
    sharded = args.out / "checkpoints"
    try:
        there = newest(sharded) or (checkpoint if checkpoint.exists() else None)
        if args.resume and there is None:
            raise SystemExit(f"there is no {checkpoint}: name its --out, or leave out --resume")
        if there and not args.resume:
            raise SystemExit(f"{there} exists: continue it with --resume, or give another --out")
        if there and ranks.launched != there.is_relative_to(sharded):
            way = "without" if ranks.launched else "with"
            raise SystemExit(f"{there} was written {way} torchrun: resume it {way} torchrun")
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
    # AssertionError: a torch without CUDA; TypeError: a number beyond 64 bits.
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
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
    files = "checkpoint.pt, results.json, README.md"
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
    (args.out / "README.md").write_text(model_card(results))
    part = args.out / ".results.json"
    part.write_text(json.dumps(results, indent=2) + "\n")
    os.replace(part, args.out / "results.json")  # whoever finds it finds all of it
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
