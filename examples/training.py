"""How train_ctc.py trains: augmentation, averaged weights, the loop and its checkpoints."""

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
    Batch,
    LogMel,
    Share,
    Utterance,
    collate,
    endless_batches,
    share,
)
from distributed import Ranks, full_weights, synchronised
from recogniser import AnyRecogniser, stacked
from shards import WORKERS, Shards, Step, Stream
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

try:
    import torchaudio
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(f"{error}: run pip install 'ldsa_nn[examples]'") from error

# Warm-up's steps, and the most of the budget that it may take. After 150, some seeds hardly learnt.
WARMUP_STEPS = 1000
WARMUP_SHARE = 0.1
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
    """Linear warm-up, times half a cosine down to 0 where the budget (progress 1) ends."""
    warm = min(1, max((step + 1) / WARMUP_STEPS, progress / WARMUP_SHARE))
    return peak * warm * (1 + math.cos(math.pi * min(1, progress))) / 2


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


def source_name(args: argparse.Namespace) -> str:
    """A word for the corpus that the command line names."""
    if args.data:
        return f"data-{Path(args.data).resolve().name}"  # may be called synthetic, too
    if args.shards:
        return f"shards-{Path(args.shards).resolve().parent.name}"
    return "librispeech" if args.librispeech else "synthetic"


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
