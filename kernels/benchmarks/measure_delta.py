"""Time the delta rule and its layer, against flash-linear-attention where that is installed.

    python kernels/benchmarks/measure_delta.py [--json FILE] [--plot FILE.png] [--groups WORD ...]
    python kernels/benchmarks/measure_delta.py --cpu

On a GPU, in bfloat16: milliseconds, forward / forward and backward through the autograd engine,
medians over replays of a CUDA graph; MiB that the call allocates at its peak beside its inputs. The
peer, KDA, is chunk_kda with safe_gate, its faster mode, under gates in [-5, 0], which that needs.
Both sides are timed in this one run, after its kernels have been compiled and its tuner has run.
Rv heads: R value heads share a key head of width 256 with 4 tiles.

Every result is compared with float64 before it is timed, outputs and gradients, on one head of the
first and the last sequence; a wrong one has no time. The column "losing" names what misses its
target.

With --cpu, in float32 on two threads: the chunk form against the step recurrence, and against
attention of the same width.

Not called benchmark_*.py: `kernels benchmark` runs whatever is.
"""

import argparse
import gc
import importlib.util
import itertools
import multiprocessing
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import NamedTuple

import measure
import torch
from delta_cases import BUDGET, NAMES, relative
from measure import DEVICE, WrongError, judge, wait

import ldsa_nn
from ldsa_nn import SystolicLinearAttention, tiled_delta_rule

steps = ldsa_nn._ldsa.delta.recurrent_delta_rule
MIB = 2**20
# Channels that share a gate, on both sides.
TILE = 64


class Shape(NamedTuple):
    """q, k [B,T,H,K] and v [B,T,H,V], of the delta rule or with peer=True of chunk_kda."""

    batch: int
    frames: int
    heads: int
    key_dim: int
    value_dim: int
    peer: bool = False

    def __str__(self):
        name = "KDA" if self.peer else f"R{self.value_dim // 128}"
        return (
            f"{name} B{self.batch} T{self.frames} H{self.heads} K{self.key_dim} V{self.value_dim}"
        )


def packed(batch, frames, width, values):
    """Value heads of 128 in all of the width, so many of them to a key head."""
    return Shape(batch, frames, width // (128 * values), 256, 128 * values)


def kda(batch, frames, width):
    return Shape(batch, frames, width // 128, 128, 128, True)


LONG = 8192  # frames
ISO = packed(1, LONG, 4096, 4)
ISO_KDA = ISO._replace(peer=True)
EQUAL_KDA = kda(1, LONG, 4096)
SPEECH = [(batch, frames) for batch in (16, 64) for frames in (400, 1500, 6000)]
HEADS = [1, 2, 4, 8]
LAYERS = [(16, 1500), (64, 1500)]


# Inputs, and what is right


def has_peer(module="fla.ops.kda"):
    """Whether the peer can be imported: its layer needs more than its op."""
    with suppress(Exception):  # an installation that is not whole fails in many ways
        importlib.import_module(module)
        return True
    return False


def chunk_kda(*tensors):
    from fla.ops.kda import chunk_kda

    return chunk_kda(*tensors, safe_gate=True)[0]


def ours(*tensors):
    return tiled_delta_rule(*tensors)[0]


def inputs(shape, dtype=torch.bfloat16):
    """([q, k, v, g, beta], gradient of out); for the peer g has a value for each channel."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    lead = shape.batch, shape.frames, shape.heads

    def normal(*sizes, kind=dtype):
        return torch.randn(*lead, *sizes, generator=generator, device=DEVICE, dtype=kind)

    q, k = (torch.nn.functional.normalize(normal(shape.key_dim), dim=3) for _ in range(2))
    v, grad = normal(shape.value_dim), normal(shape.value_dim)
    tiles = shape.key_dim // TILE
    g = -5 * torch.rand(*lead, tiles, generator=generator, device=DEVICE)
    beta = 2 * normal(kind=torch.float32).sigmoid()
    if shape.peer:
        g = g.repeat_interleave(TILE, 3)
    return [q, k, v, g, beta], grad


def both(op, tensors, grad):
    """(out, gradients of all tensors)."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = op(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def check(op, tensors, grad, slack=1):
    """Raise WrongError unless one head of the first and the last sequence is right."""
    got = both(op, tensors, grad)
    bounds = BUDGET[tensors[2].dtype]
    names = [name for name in NAMES if name not in ("state", "grad_initial")]
    for row in {0, len(grad) - 1}:
        some = [x[row : row + 1, :, :1] for x in (*tensors, grad)]
        *slices, of_out = (x.double() for x in some)
        each = slices[3].shape[3] == slices[0].shape[3]
        if each:
            slices[3] = slices[3][..., ::TILE]
        exact = partial(tiled_delta_rule, implementation="eager")
        wanted = both(lambda *x: exact(*x)[0], slices, of_out)  # noqa: B023
        for name, x, y in zip(names, got, wanted, strict=True):
            x = x[row : row + 1, :, :1].double()
            if name == "grad_g" and each:
                x = x.unflatten(3, (-1, TILE)).sum(4)
            error = relative(x, y, 1e-9)
            if not error <= slack * bounds[name]:
                raise WrongError(f"{name} has a relative error of {error:.1e}")


# Time and memory


def graph_ms(call):
    return measure.graph_us(call) / 1e3


def peak_mib(call):
    """Of the second call: the first loads kernels."""
    call()
    gc.collect()
    wait()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    wait()
    del result
    return (torch.cuda.max_memory_allocated() - base) / MIB


def cost(forward, train):
    """((ms forward, ms of both), (MiB forward, MiB of both))."""
    calls = torch.no_grad()(forward), train
    peaks = tuple(peak_mib(call) for call in calls)
    return tuple(graph_ms(call) for call in calls), peaks


@cache
def figures(shape):
    op = chunk_kda if shape.peer else ours
    tensors, grad = inputs(shape)
    # The peer has a budget of its own.
    check(op, tensors, grad, slack=3 if shape.peer else 1)
    return cost(partial(op, *tensors), partial(both, op, tensors, grad))


def beside(row, peer, **limits):
    """A row with the peer's figures, judged forward and backward: "x ..." at least, others at most.

    peer: ((ms, MiB) or None, a note why there is none).
    """
    theirs, note = peer
    if theirs is not None:
        (row["KDA ms"], row["KDA MiB"]) = theirs
        row["x KDA"] = tuple(a / b for a, b in zip(row["KDA ms"], row["ms"], strict=True))
        row["MiB / KDA"] = tuple(a / b for a, b in zip(row["MiB"], row["KDA MiB"], strict=True))
    if note:
        row["note"] = note
    texts, missed = [], []
    for key, limit in limits.items():
        at_least = key.startswith("x ")
        texts.append(f"{key} {'>=' if at_least else '<='} {limit}")
        value = row.get(key, (None, limit))[1]
        if value < limit if at_least else value > limit:
            missed.append(key)
    return {**row, "target of both": ", ".join(texts), "losing": ", ".join(missed)}


def of_peer(function, module="fla.ops.kda"):
    """(its figures or None, a note why there are none)."""
    if not has_peer(module):
        return None, f"no {module}"
    try:
        return function(), ""
    except Exception as error:  # what is wrong there must not end the run here
        return None, f"KDA: {type(error).__name__}: {str(error)[:80]}"


def versus(shape, peer, **limits):
    ms, mib = figures(shape)
    row = {"case": str(shape), "ms": ms, "MiB": mib}
    return beside(row, of_peer(partial(figures, peer)), **limits)


def against_one(shape, first):
    """Beside the shape with one value head a key head."""
    (ms, mib), (alone, mib_alone) = figures(shape), figures(first)
    return {
        "case": str(shape),
        "ms": ms,
        "MiB": mib,
        "x R1": tuple(a / b for a, b in zip(alone, ms, strict=True)),
        "MiB / R1": tuple(a / b for a, b in zip(mib, mib_alone, strict=True)),
    }


def per_frame(heads):
    """ns a frame at 16k and at 128k frames."""
    shapes = [Shape(1, frames, heads, 256, 512) for frames in (2**14, 2**17)]
    short, long = (tuple(1e6 * ms / shape.frames for ms in figures(shape)[0]) for shape in shapes)
    ratio = tuple(b / a for a, b in zip(short, long, strict=True))
    row = {"case": str(shapes[1]), "ns/frame, T16384": short, "ns/frame, T131072": long}
    return judge({**row, "ratio": ratio}, "ratio", (1.1, 1.1), min, ("forward", "both"))


def decoding(batch, most):
    """One step of the op from a state, which it returns anew."""
    tensors, _ = inputs(Shape(batch, 1, 1, 256, 512))
    state = torch.randn(batch, 1, 256, 512, device=DEVICE)

    def step(tensors, state, **options):
        with torch.no_grad():
            return tiled_delta_rule(
                *tensors, initial_state=state, output_final_state=True, **options
            )

    exact = step([x.double() for x in tensors], state.double(), implementation="eager")
    for name, x, y in zip(NAMES, step(tensors, state), exact, strict=False):
        if not relative(x, y) <= BUDGET[torch.bfloat16][name]:
            raise WrongError(f"{name} of a step")
    row = {"case": f"us of tiled_delta_rule, B{batch}, one frame, state kept"}
    row["value"] = (measure.graph_us(lambda: step(tensors, state)),)
    return judge(row, "value", (most,), min, ("yes",))


def layer_step(batch):
    layer = SystolicLinearAttention(512, device=DEVICE, dtype=torch.bfloat16)
    state = layer.init_state(batch)
    x = torch.randn(batch, 1, 512, device=DEVICE, dtype=torch.bfloat16)

    @torch.no_grad()
    def step():
        y, new = layer.step(x, state)
        for old, n in zip(state, new, strict=True):
            old.copy_(n)
        return y

    return {
        "case": f"us of SystolicLinearAttention(512).step, B{batch}, state copied over itself",
        "value": (measure.graph_us(step),),
    }


def layer_cost(layer, batch, frames, call=None):
    call = layer if call is None else call
    x = torch.randn(batch, frames, 512, device=DEVICE, dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    leaves = [x.requires_grad_(), *layer.parameters()]

    def train():
        return torch.autograd.grad(call(x), leaves, grad)

    return cost(partial(call, x), train)


def checked_layer(batch, frames):
    torch.manual_seed(0)
    layer = SystolicLinearAttention(512, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(2, min(frames, 300), 512, device=DEVICE, dtype=torch.bfloat16)
    exact = SystolicLinearAttention(512, device=DEVICE, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    with torch.no_grad():
        error = relative(layer(x), exact(x.double()), 1e-9)
    if not error <= 2e-2:
        raise WrongError(f"the layer has a relative error of {error:.1e}")
    return layer


def kda_layer():
    from fla.layers.kda import KimiDeltaAttention

    return KimiDeltaAttention(
        hidden_size=512, head_dim=128, num_heads=4, allow_neg_eigval=True, safe_gate=True,
        lower_bound=-5,
    ).to(DEVICE, torch.bfloat16)  # fmt: skip


@cache
def kda_layer_figures(batch, frames):
    layer = kda_layer()
    return layer_cost(layer, batch, frames, lambda x: layer(x)[0])


def layers(batch, frames, compiled):
    layer = checked_layer(batch, frames)
    call = layer
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(layer, dynamic=False)
    ms, mib = layer_cost(layer, batch, frames, call)
    peer = of_peer(partial(kda_layer_figures, batch, frames), "fla.layers.kda")
    name = f"layer of 512, R4{', compiled' if compiled else ''}, B{batch} T{frames}"
    return beside({"case": name, "ms": ms, "MiB": mib}, peer, **{"x KDA": 1.6})


def first_seconds():
    """Of one forward and backward pass, the first of this process."""
    tensors, grad = inputs(ISO._replace(frames=1024))
    wait()
    start = time.perf_counter()
    both(ours, tensors, grad)
    wait()
    return time.perf_counter() - start


GROUPS = {
    "equal": "equal value width",
    "iso": "iso-function: the same function",
    "speech": "speech: width 512",
    "heads": "value heads for each key head, width 4096",
    "long": "long sequences",
    "step": "decoding",
    "layer": "the whole layer against KDA's",
    "first": "the first call",
    "compiled": "the whole layer, compiled",
}


def jobs():
    """{word: calls that measure and return a row}."""
    equal = {"x KDA": 1.64, "ms": 2.5, "MiB / KDA": 0.5}
    return {
        "equal": [partial(versus, packed(1, LONG, 4096, r), EQUAL_KDA, **equal) for r in (4, 2)],
        "iso": [partial(versus, ISO, ISO_KDA, **{"x KDA": 1.5, "ms": 2.3})],
        "speech": [partial(versus, packed(*each, 512, 4), kda(*each, 512), **{"x KDA": 1.64})
                   for each in SPEECH],
        "heads": [partial(against_one, packed(1, LONG, 4096, r), packed(1, LONG, 4096, 1))
                  for r in HEADS],
        "long": [partial(per_frame, heads) for heads in (1, 8)],
        "step": [partial(decoding, 1, 15), partial(decoding, 16, None), partial(layer_step, 1),
                 partial(layer_step, 16)],
        "layer": [partial(layers, *each, False) for each in LAYERS],
        "first": [partial(measure.first_call, "measure_delta", 20)],
        "compiled": [partial(layers, *each, True) for each in LAYERS[:1]],
    }  # fmt: skip


# Kernels are compiled by all processors before any is timed.


def shapes_of(words):
    """What the groups run, without repeats."""
    shapes = {
        "equal": [packed(1, LONG, 4096, 4), packed(1, LONG, 4096, 2), EQUAL_KDA],
        "iso": [ISO, ISO_KDA],
        "speech": [*(packed(batch, 400, 512, 4) for batch in (16, 64)), kda(16, 400, 512)],
        "heads": [packed(1, LONG, 4096, r) for r in HEADS],
        "long": [Shape(1, 1024, heads, 256, 512) for heads in (1, 8)],
        "step": [Shape(1, 1, 1, 256, 512)],
        "layer": [packed(16, 1500, 512, 4), "layer"],
        "first": [],
        "compiled": [packed(16, 1500, 512, 4), "layer"],
    }  # fmt: skip
    return list(dict.fromkeys(shape for word in words for shape in shapes[word]))


def warm(job):
    """Compile, in a process of its own, what a shape needs: of the peer's tuning, one share."""
    shape, share, shares = job
    if shape == "layer" or shape.peer:
        from triton.runtime.autotuner import Autotuner

        time_one, count = Autotuner._bench, itertools.count()

        def some(self, *args, **options):
            if next(count) % shares != share:
                return [float("inf")] * 3
            return time_one(self, *args, **options)

        Autotuner._bench = some
    if shape == "layer":
        layer = kda_layer()
        x = torch.randn(16, 256, 512, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        layer(x)[0].sum().backward()
        return
    tensors, grad = inputs(shape._replace(frames=min(shape.frames, 400)))
    op = chunk_kda if shape.peer else ours
    with torch.no_grad():
        op(*tensors)
    both(op, tensors, grad)


def warm_all(words):
    # The choices made while processors share the GPU are not kept.
    os.environ["FLA_CACHE_RESULTS"] = "0"
    cores = os.cpu_count() or 1
    shapes = shapes_of(words)
    theirs = [x for x in shapes if (has_peer("fla.layers.kda") if x == "layer" else x.peer)]
    theirs = theirs if has_peer() else []
    mine = [x for x in shapes if x != "layer" and not x.peer]
    shares = max(1, cores // max(1, len(theirs)))
    work = [(shape, i, shares) for shape in theirs for i in range(shares)]
    work = [(shape, 0, 1) for shape in mine] + work
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(cores, len(work)) or 1, context) as pool:
        for job, future in [(job, pool.submit(warm, job)) for job in work]:
            error = future.exception()
            if error is not None:  # it will be met again, where it is told with its case
                print(f"not compiled beforehand: {job[0]}: {type(error).__name__}: {error}")


# On a CPU


def wall_ms(call):
    call()
    times = []
    while not times or (sum(times) < 1000 and len(times) < 20):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def cpu_ms(op, tensors, grad):
    with torch.no_grad():
        forward = wall_ms(lambda: op(*tensors))
    return forward, wall_ms(lambda: both(op, tensors, grad))


def on_cpu(frames, peer, least):
    """peer: a function of (tensors, grad) to (name, op, its tensors, its gradient)."""
    tensors, grad = inputs(Shape(1, frames, 1, 256, 512), torch.float32)
    check(ours, tensors, grad)
    name, *theirs = peer(tensors, grad)
    row = {"case": f"B1 T{frames} H1 K256 V512", "ms": cpu_ms(ours, tensors, grad)}
    row |= {"peer": name, "peer ms": cpu_ms(*theirs)}
    row["x"] = tuple(a / b for a, b in zip(row["peer ms"], row["ms"], strict=True))
    return judge(row, "x", (least, None), max, ("forward", "both"))


def recurrence(tensors, grad):
    scale = tensors[0].shape[3] ** -0.5
    return "steps", lambda *x: steps(*x, None, None, scale)[0], tensors, grad


def attention(tensors, grad):
    """Causal, with four heads of 128."""
    q, k, v = (torch.randn(1, 4, len(grad[0]), 128) for _ in range(3))
    op = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    return "attention", op, [q, k, v], torch.randn_like(v)


# {title: (frames, peer, least ratio of the forward passes)}
CPU = {
    "chunks against steps": [(200, recurrence, None), (1000, recurrence, 10)],
    "against attention": [(1000, attention, None), (4000, attention, 1), (8000, attention, 1)],
}


def plot(path, groups):
    """Save forward and backward over T for speech, and over R."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for i, batch in enumerate((16, 64)):
        rows = [
            (f, row) for (b, f), row in zip(SPEECH, groups["speech"], strict=True) if b == batch
        ]
        for key, style in (("ms", "o-"), ("KDA ms", "s--")):
            known = [(f, row[key][1]) for f, row in rows if key in row]
            if known:
                name = "KDA" if "KDA" in key else "SLA, R4"
                axes[0].plot(
                    *zip(*known, strict=True), style, color=f"C{i}", label=f"{name}, B{batch}"
                )
    axes[0].set(xlabel="frames T", ylabel="ms, forward and backward", xscale="log", yscale="log")
    for k, name in enumerate(("forward", "forward and backward")):
        known = [
            (r, row["ms"][k]) for r, row in zip(HEADS, groups["heads"], strict=True) if "ms" in row
        ]
        if known:
            axes[1].plot(*zip(*known, strict=True), "o-", label=name)
    axes[1].set(xlabel="value heads for each key head", ylabel="ms", ylim=(0, None))
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="measure_delta.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=measure.file(), help="also write all numbers to this file")
    parser.add_argument(
        "--plot",
        type=measure.file(".png", ".pdf", ".svg"),
        help="plot speech and heads to this file",
    )
    parser.add_argument(
        "--groups", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="WORD",
        help=f"measure these groups alone: {', '.join(GROUPS)}",
    )  # fmt: skip
    parser.add_argument("--cpu", action="store_true", help="measure on the CPU instead")
    args = parser.parse_args(arguments)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --plot: matplotlib is not installed")
    if args.plot and (args.cpu or not {"speech", "heads"} <= set(args.groups)):
        parser.error("argument --plot: needs the groups speech and heads")
    if args.cpu:
        if DEVICE != "cpu":
            parser.error("argument --cpu: hide the GPU first (CUDA_VISIBLE_DEVICES=)")
        torch.set_num_threads(2)
        about = {"cpu": platform.machine(), "cores": os.cpu_count(), "threads": 2}
        about["torch"] = torch.__version__
        calls = {title: [partial(on_cpu, *case) for case in cases] for title, cases in CPU.items()}
        measure.finish(measure.report(about, calls, args.json))
        return
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        raise SystemExit("this benchmark needs a GPU and Triton, or --cpu")
    about = measure.machine()
    if has_peer():
        import fla

        about["flash-linear-attention"] = fla.__version__
    start = time.monotonic()
    warm_all(args.groups)
    about["seconds to compile"] = time.monotonic() - start
    todo = jobs()
    groups = measure.report(about, {word: todo[word] for word in args.groups}, args.json)
    if args.plot:
        plot(args.plot, groups)
    measure.finish(groups)


if __name__ == "__main__":
    main()
