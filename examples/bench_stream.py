"""Time the streaming encoder's step, against recomputing the past and against Emformer.

    python examples/bench_stream.py [--device cpu|cuda] [--threads N] [--batch B ...] [--json FILE]

Each row is the time of one chunk of 160 ms (16 input frames, 4 after the subsampling) of B streams
at once, and its real-time factor, that time over 160 ms. Rounds take the rows in turn; their median
counts on a GPU, on a CPU the fastest call (and of a single thread its processor time), since other
load only ever adds. Width 256, 4 heads, 12 layers:

- layer: one LocalDenseSynthesizerAttention, left=14, right=0;
- encoder: ConformerEncoder; both also under torch.compile;
- recompute 10 s, 60 s: what "mhsa" needs instead, the whole encoder over all frames so far;
- transformer: the encoder with conv_kernel=0 on frames already subsampled, which is the size of
- emformer: torchaudio's Emformer.infer, segments of 4 frames, left context 14, right context 0.

On a CPU one thread, float32, and no recomputing of more than 60 s in all; on a GPU bfloat16, steps
in a CUDA graph. Compiling takes minutes for each batch (--no-compile leaves it out).
"""

import argparse
import json
import statistics
import time
from collections import defaultdict

import torch
from bench_layer import captured, positive, usable, writable
from torch import Tensor
from tqdm import tqdm

from ldsa_nn import ConformerEncoder, LocalDenseSynthesizerAttention

FRAMES, SUBSAMPLING, FEATURES, WIDTH, LAYERS = 16, 4, 80, 256, 12
CHUNK = 0.16  # seconds
LIMIT = 60  # seconds of audio that a CPU recomputes for a row, all streams together


def leaves(state) -> list[Tensor]:
    """The tensors of a state, in order."""
    if isinstance(state, Tensor):
        return [state]
    return [x for part in state for x in leaves(part)]


def check(encoder: ConformerEncoder, device: str, dtype: torch.dtype) -> None:
    """Chunks must give the frames of the whole before their speed means anything."""
    x = torch.randn(2, 5 * FRAMES, FEATURES, device=device, dtype=dtype)
    state, parts = encoder.init_state(2), []
    for chunk in x.split(FRAMES, 1):
        y, _, state = encoder.step(chunk, state)
        parts.append(y)
    torch.testing.assert_close(
        torch.cat(parts, 1),
        encoder(x)[0],
        rtol=0,
        atol=1e-4 if dtype == torch.float32 else 0.2,
    )


def stepping(step, x: Tensor, state, compiled: bool = False):
    """A call that advances streams by the chunk x; on a GPU a CUDA graph's replay."""
    if not x.is_cuda:
        held = [state]
        if compiled:
            step = torch.compile(step, fullgraph=True)

        def run():
            held[0] = step(x, held[0])[-1]

        return run

    def advance():
        for old, new in zip(leaves(state), leaves(step(x, state)[-1]), strict=True):
            old.copy_(new)

    if compiled:  # the copies too, which then are part of what computes the state
        advance = torch.compile(advance, fullgraph=True)
    return captured(advance)


def seconds(run, cuda: bool, budget: float = 0.3) -> float:
    """Time of a call, in seconds: of many on a GPU their mean, on a CPU that of the fastest."""
    clock = time.thread_time if torch.get_num_threads() == 1 and not cuda else time.perf_counter
    start, calls = time.perf_counter(), []
    repeat = 1
    if cuda:  # a queue that keeps the GPU busy
        run()
        torch.cuda.synchronize()
        repeat = max(1, min(50, int(budget / 10 / (time.perf_counter() - start))))
    while not calls or time.perf_counter() - start < budget:
        before = clock()
        for _ in range(repeat):
            run()
        if cuda:
            torch.cuda.synchronize()
        calls.append((clock() - before) / repeat)
    return statistics.mean(calls) if cuda else min(calls)


def parts(encoder: ConformerEncoder, x: Tensor) -> dict[str, float]:
    """Seconds of a whole step, and what it saves to leave out each kind of part."""
    kinds = {
        "subsampling": [(stage, "step") for stage in encoder.subsample],
        "feed-forward": [(f, "forward") for x in encoder.layers for f in (x.ffn1, x.ffn2)],
        "attention": [(layer.attention, "_step") for layer in encoder.layers],
        "convolution": [(layer.conv, "step") for layer in encoder.layers],
    }

    def timed():
        return seconds(stepping(encoder.step, x, encoder.init_state(len(x))), x.is_cuda)

    def only_once(run):
        results = []

        def call(*args):
            if not results:
                results.append(run(*args))
            return results[0]

        return call

    whole = timed()
    spent = {}
    for kind, places in kinds.items():
        try:
            for module, method in places:
                setattr(module, method, only_once(getattr(module, method)))
            spent[kind] = whole - timed()
        finally:
            for module, method in places:
                vars(module).pop(method, None)
    return {"whole": whole, **spent, "the rest": whole - sum(spent.values())}


def peers(batch: int, device: str, dtype: torch.dtype, compiled: bool) -> dict:
    """{name: a call that does one chunk} of a batch, and the modules' parameters in millions."""
    to = {"device": device, "dtype": dtype}
    layer = LocalDenseSynthesizerAttention(4, WIDTH, left=14, right=0, **to).eval()
    sizes = {"dim": WIDTH, "num_layers": LAYERS, "n_head": 4, "ffn_dim": 4 * WIDTH}
    encoder = ConformerEncoder(FEATURES, **sizes, **to).eval()
    form = {"conv_kernel": 0, "subsampling": 1}
    transformer = ConformerEncoder(WIDTH, **sizes, **form, **to).eval()
    check(encoder, device, dtype)
    features = torch.randn(batch, FRAMES, FEATURES, **to)
    frames = torch.randn(batch, FRAMES // SUBSAMPLING, WIDTH, **to)
    runs = {
        "layer": stepping(layer.step, frames, layer.init_state(batch)),
        "encoder": stepping(encoder.step, features, encoder.init_state(batch)),
    }
    if compiled:
        torch._dynamo.reset()
        runs["layer, compiled"] = stepping(layer.step, frames, layer.init_state(batch), True)
        state = encoder.init_state(batch)
        runs["encoder, compiled"] = stepping(encoder.step, features, state, True)
    offline = ConformerEncoder(FEATURES, **sizes, attention="mhsa", **to).eval()
    for past in (10, 60):
        if device == "cuda" or batch * past <= LIMIT:
            whole = torch.randn(batch, 100 * past, FEATURES, **to)
            runs[f"recompute {past} s"] = lambda whole=whole: offline(whole)
    runs["transformer"] = stepping(transformer.step, frames, transformer.init_state(batch))
    try:
        from torchaudio.models import Emformer
    except ImportError:
        print("torchaudio is not installed: no emformer")
        return runs, encoder
    emformer = Emformer(WIDTH, 4, 4 * WIDTH, LAYERS, FRAMES // SUBSAMPLING, left_context_length=14)
    emformer = emformer.to(device).eval()  # float32: its states are, whatever its parameters
    single = frames.float()
    lengths = torch.full((batch,), FRAMES // SUBSAMPLING, device=device)
    held = [None]

    def infer():
        held[0] = emformer.infer(single, lengths, held[0])[-1]

    runs["emformer"] = infer
    return runs, encoder


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, save what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=usable, choices=("cpu", "cuda"), default=device)
    parser.add_argument("--threads", type=positive, default=1, help="of a CPU (default 1)")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 16, 256], help="streams")
    parser.add_argument("--rounds", type=positive, default=7, help="of all rows")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--json", type=writable, help="also write all numbers to this file")
    args = parser.parse_args(arguments)
    cuda = args.device == "cuda"
    torch.set_num_threads(args.threads)
    times: dict[str, dict[int, float]] = {}
    spent = {}
    for batch in tqdm(args.batch, desc="batches", disable=None):
        torch.manual_seed(0)
        dtype = torch.bfloat16 if cuda else torch.float32
        runs, encoder = peers(batch, args.device, dtype, not args.no_compile)
        rounds = defaultdict(list)
        for run in runs.values():
            run()
        for _ in range(args.rounds):
            for name, run in runs.items():
                rounds[name].append(seconds(run, cuda))
        for name, values in rounds.items():
            best = statistics.median(values) if cuda else min(values)
            times.setdefault(name, {})[batch] = best
        x = torch.randn(batch, FRAMES, FEATURES, device=args.device, dtype=dtype)
        spent[batch] = parts(encoder, x)
    where = torch.cuda.get_device_name() if cuda else f"CPU, {args.threads} thread(s)"
    print(f"{where}, torch {torch.__version__}; ms for a chunk of 160 ms (real-time factor)")
    print("| | " + " | ".join(f"B = {batch}" for batch in args.batch) + " |")
    print("|---" * (1 + len(args.batch)) + "|")
    for name, row in times.items():
        cells = [
            f"{row[b] * 1e3:.3g} ({row[b] / CHUNK:.2g})" if b in row else "-" for b in args.batch
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    for batch, shares in spent.items():
        whole = shares.pop("whole")
        ranked = sorted(shares.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {100 * value / whole:.0f} %" for name, value in ranked)
        print(f"encoder at B = {batch}: {shown}")
    if args.json:
        args.json.write_text(json.dumps({"seconds": times, "parts": spent}, indent=1))


if __name__ == "__main__":
    main()
