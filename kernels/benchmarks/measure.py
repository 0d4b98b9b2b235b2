"""Time the fused op against the memory roof, eager PyTorch and compiled eager, on a GPU.

    python kernels/benchmarks/benchmark.py [--json FILE] [--plot FILE.png]

Microseconds, forward / backward: medians of triton.testing.do_bench, which empties the L2 cache
before every call. Forward is the public op without gradients, backward the registered backward
operator by itself, both replayed from a CUDA graph, since Python may take longer than a kernel;
"by autograd" are calls of the op and of the autograd engine, as its peers run. The roof is a
device-to-device copy of the same total bytes, half read and half written: called, since a graph
copies by other means, up to half again as slow.

Every result is compared with float64 before it is timed, outputs and gradients, on the first and
the last sequence of its batch; a wrong one has no time. The column "losing" names what misses its
target.
"""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache, partial
from pathlib import Path

import torch
import torch._functorch.config
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from tqdm import tqdm

START = time.monotonic()
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cases import (  # noqa: E402
    BENCHMARKS,
    DEVICE,
    OVER_FRAMES,
    OVER_WINDOWS,
    Recorder,
    make,
    run,
)

from ldsa_nn import eager_ldsa, ldsa_local_attention  # noqa: E402

# Named, for "auto" would fall back to eager in silence.
ours = partial(ldsa_local_attention, implementation="triton")
# Per cent of the roof at least, forward and backward.
TARGETS = {
    "channel-last": (90, 85),
    "time-last": (80, 75),
    "windows of 31 and 63": (85, 80),
    "windows of 127": (70, 60),
    "float32": (80, 70),
    "head widths and heads": (70, None),
}
CARD = "shapes of the published card"
# Relative error that rounding explains; tf32 products would have 2e-4.
BOUND = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


class WrongError(Exception):
    """A result is not what float64 gives."""


def median_us(call):
    from triton.testing import do_bench

    return do_bench(call, return_mode="median") * 1e3


def replay_us(call):
    """As median_us, of a CUDA graph's replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return median_us(graph.replay)


def graph_us(call):
    from triton.testing import do_bench_cudagraph

    wait()
    return do_bench_cudagraph(call, return_mode="median") * 1e3


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def copy_us(n_bytes, timer):
    source = torch.empty(n_bytes // 4, dtype=torch.int16, device=DEVICE)
    target = torch.empty_like(source)
    return timer(lambda: target.copy_(source))


def roof(case, timer):
    unit = case.batch * case.heads * case.frames * case.dtype.itemsize
    moved = case.window + 2 * case.head_dim, 2 * case.window + 3 * case.head_dim
    return tuple(copy_us(unit * channels, timer) for channels in moved)


def kept(case, op, logits, v):
    """Which weights dropout keeps under seed 0, [B,H,W,T].

    Channel d of the values is 1 at every W-th frame from d on, so that no frame's window sees two.
    """
    t, window = torch.arange(case.frames, device=v.device), case.window
    channel = torch.arange(case.head_dim, device=v.device)[:, None]
    marks = (t % window == channel).to(v.dtype).expand_as(v)
    torch.manual_seed(0)
    weights = op(logits, marks, case.left, case.right, dropout_p=case.dropout_p)
    slot = torch.arange(window, device=v.device)[:, None]
    return weights.gather(2, ((t - case.left + slot) % window).expand_as(logits)) > 0


def exact_dropout(keep, p, logits, v, left, right):
    inner = keep[..., left : keep.shape[-1] - right]
    share = inner.double().mean().item()
    if not abs(share - (1 - p)) < 5 * math.sqrt(p * (1 - p) / inner.numel()):
        raise WrongError(f"dropout of {p} keeps {share:.3f} of the weights")
    frames = F.pad(v, (left, right)).unfold(3, left + 1 + right, 1)
    return torch.einsum("bhkt,bhdtk->bhdt", logits.softmax(2) * keep / (1 - p), frames)


def checked(case, op):
    """(a_logits, v, grad, options) of the case, on which op is right."""
    logits, v, grad, options = make(case, DEVICE)
    torch.manual_seed(0)
    got = run(logits, v, grad, case.left, case.right, op, **options)
    some = [0, case.batch - 1]
    exact = partial(eager_ldsa, edge=case.edge)
    if case.dropout_p:
        exact = partial(exact_dropout, kept(case, op, logits, v)[some], case.dropout_p)
    elif case.lengths:
        exact = partial(exact, lengths=options["lengths"][some])
    wide = (x[some].double() for x in (logits, v, grad))
    wanted = run(*wide, case.left, case.right, exact)
    for name, x, y in zip(("out", "grad of a_logits", "grad of v"), got, wanted, strict=True):
        error = ((x[some].double() - y).norm() / y.norm()).item()
        if not error < BOUND[case.dtype]:
            raise WrongError(f"{name} has a relative error of {error:.1e}")
    return logits, v, grad, options


def operators(case, logits, v, grad, options):
    """The calls that ours makes of its registered operators, (forward, backward)."""
    with Recorder() as record:
        run(logits, v, grad, case.left, case.right, ours, **options)
    forward, backward = (
        partial(func, *args, **kwargs)
        for func, args, kwargs, _ in record.calls
        if func.namespace == "ldsa_nn"
    )
    return forward, backward


def through_autograd(case, op):
    logits, v, grad, options = checked(case, op)
    inputs = [x.detach().requires_grad_() for x in (logits, v)]
    with torch.no_grad():
        forward = median_us(lambda: op(*inputs, case.left, case.right, **options))
    out = op(*inputs, case.left, case.right, **options)
    return forward, median_us(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))


@cache
def figures(case):
    """A row of ours beside the roof."""
    logits, v, grad, options = checked(case, ours)
    _, backward = operators(case, logits, v, grad, options)
    roofs = roof(case, median_us)
    with torch.no_grad():
        forward = replay_us(lambda: ours(logits, v, case.left, case.right, **options))
        times = forward, replay_us(backward)
    shares = tuple(100 * least / spent for least, spent in zip(roofs, times, strict=True))
    return {"case": str(case), "roof": roofs, "ours": times, "% of roof": shares}


def judge(row, key, targets, better, names=("forward", "backward")):
    """The row, its targets, and the names of the values that are not better than those."""
    missed = [
        name
        for name, value, target in zip(names, row[key], targets, strict=True)
        if target is not None and better(value, target) != value
    ]
    return {**row, "target": targets, "losing": ", ".join(missed)}


def against_roof(case, targets):
    return judge(figures(case), "% of roof", targets, max)


def against_peers(case, compiled):
    mine = through_autograd(case, ours)
    row = {**figures(case), "by autograd": mine}
    peers = {"eager": eager_ldsa}
    if compiled:
        torch._dynamo.reset()
        peers["compiled"] = torch.compile(eager_ldsa, dynamic=False)
    for name, op in peers.items():
        row[name] = through_autograd(case, op)
        row[f"x {name}"] = tuple(a / b for a, b in zip(row[name], mine, strict=True))
    return judge(row, "x compiled", (2.5, 8), max) if compiled else row


def against_full(case, targets, **changes):
    """The same case with padding or dropout, relative to it without."""
    full, times = figures(case)["ours"], figures(case._replace(**changes))["ours"]
    ratios = tuple(a / b for a, b in zip(times, full, strict=True))
    row = {"case": f"{case}, {changes['name']}", "without": full, "ours": times, "ratio": ratios}
    return judge(row, "ratio", targets, min)


def ragged(case):
    """Lengths from short to full in a fixed order, of half the full length in the mean."""
    places = [7 * b % case.batch for b in range(case.batch)]
    return tuple((2 * place + 1) * case.frames // (2 * case.batch) for place in places)


def in_a_graph(case):
    calls = operators(case, *checked(case, ours))
    with torch.no_grad():
        row = {
            "case": f"us of {case} in a CUDA graph, forward / backward; floor: a copy",
            "value": tuple(graph_us(call) for call in calls),
            "floor": roof(case, graph_us),
        }
    return judge(row, "value", (5, 8), min)


def wall_us(call, calls):
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def overhead(case, calls=200):
    """Processor time of a forward call above a custom op that only allocates the result."""
    logits, v, grad, options = checked(case, ours)
    forward, _ = operators(case, logits, v, grad, options)
    result, schema = forward(), str(forward.func._schema)
    inputs = [x.detach().requires_grad_() for x in (logits, v)]
    rest = forward.args[2:]

    def setup(ctx, inputs, output):
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, torch.Tensor)))

    nothing = torch.library.custom_op(
        "ldsa_benchmark::nothing",
        lambda *args: tree_map(torch.empty_like, result),
        mutates_args=(),
        schema=schema[schema.index("(") :],
    )
    nothing.register_autograd(lambda ctx, *grads: (None,) * len(forward.args), setup_context=setup)
    floors, values = [], []
    for training in (False, True):
        with torch.set_grad_enabled(training):
            rounds = [
                (
                    wall_us(lambda: nothing(*inputs, *rest), calls),
                    wall_us(lambda: ours(*inputs, case.left, case.right), calls),
                )
                for _ in range(7)
            ]
        floor, mine = map(min, zip(*rounds, strict=True))
        floors.append(floor)
        values.append(mine - floor)
    row = {
        "case": "us of Python of a forward call above an empty operator, no_grad / training; "
        "floor: that operator",
        "value": tuple(values),
        "floor": tuple(floors),
    }
    return judge(row, "value", (15, 15), min, ("no_grad", "training"))


def first_seconds():
    """Of one forward and backward pass, the first of this process."""
    case = BENCHMARKS["channel-last"][0]
    logits, v, grad, options = make(case, DEVICE)
    wait()
    start = time.perf_counter()
    run(logits, v, grad, case.left, case.right, ours, **options)
    wait()
    return time.perf_counter() - start


def first_call(module="measure", most=10):
    """How long a module's first_seconds() are in a process with nothing compiled."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = subprocess.run(
            [sys.executable, "-c", f"import {module}; print({module}.first_seconds())"],
            cwd=HERE,
            env={**os.environ, "TRITON_CACHE_DIR": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
    row = {"case": "s of the first forward and backward of a process", "value": (float(seconds),)}
    return judge(row, "value", (most,), min, ("yes",))


def jobs(curves):
    """{title: calls that measure and return a row}."""
    groups = {
        title: [partial(against_roof, case, targets) for case in BENCHMARKS[title]]
        for title, targets in TARGETS.items()
    }
    groups[f"{CARD}, which gives 4-18 x eager forward"] = [
        partial(against_peers, case, compiled=case == BENCHMARKS[CARD][-1])
        for case in BENCHMARKS[CARD]
    ]
    groups["padding and dropout"] = [
        partial(against_full, case, targets, **changes)
        for case in BENCHMARKS["channel-last"][:2]
        for targets, changes in (
            ((0.80, 0.75), {"name": "half padding", "lengths": ragged(case)}),
            ((1.15, 1.15), {"name": "dropout of 0.1", "dropout_p": 0.1}),
        )
    ]
    small = BENCHMARKS[CARD][0]
    groups["small calls"] = [partial(in_a_graph, small), partial(overhead, small), first_call]
    if curves:
        groups["over frames"] = [partial(against_roof, case, (None, None)) for case in OVER_FRAMES]
        groups["over windows"] = [
            partial(against_roof, case, (None, None)) for case in OVER_WINDOWS
        ]
    return groups


def cell(value):
    if isinstance(value, tuple):
        return " / ".join(cell(x) for x in value)
    if isinstance(value, float | int):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return "-" if value is None else value


def table(rows):
    """Markdown lines, with what any row has as a column and what is losing as the last."""
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "losing"))
    columns.append("losing")
    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(row.get(key, "")) for key in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured(groups, progress):
    """Yield (title, rows) of each group as it is done."""
    for title, calls in groups.items():
        rows = []
        for call in calls:
            try:
                rows.append(call())
            except WrongError as error:
                rows.append({"case": str(call.args[0]), "losing": f"WRONG: {error}"})
            except Exception as error:  # the other cases' figures are not lost with it
                traceback.print_exc()
                rows.append({"case": repr(call), "losing": f"FAILED: {type(error).__name__}"})
            progress.update()
        yield title, rows


def machine():
    import triton

    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "large copy TB/s": 2**33 / copy_us(2**33, median_us) / 1e6,
    }


def plot(path, over_frames, over_windows):
    """Save time and per cent of the roof against T and against W."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    panels = (
        (axes[0], "frames T (W = 15)", [case.frames for case in OVER_FRAMES], over_frames),
        (axes[1], "window W (T = 1000)", [case.window for case in OVER_WINDOWS], over_windows),
    )
    for axis, label, sizes, rows in panels:
        right = axis.twinx()
        known = [(size, row) for size, row in zip(sizes, rows, strict=True) if "ours" in row]
        x = [size for size, _ in known]
        for k, (name, color) in enumerate((("forward", "C0"), ("backward", "C1"))):
            for key, style in (("ours", "o-"), ("roof", "--")):
                y = [row[key][k] for _, row in known]
                axis.plot(x, y, style, color=color, label=f"{name}, {key}")
            right.plot(x, [row["% of roof"][k] for _, row in known], "^:", color=color, alpha=0.6)
        axis.set(xlabel=label, ylabel="us", xscale="log", yscale="log")
        axis.set_xticks(sizes, labels=map(str, sizes), minor=False)
        axis.minorticks_off()
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.ScalarFormatter())
        axis.grid(alpha=0.3)
        right.set(ylabel="% of the roof (dotted)", ylim=(0, 105))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=120)


def file(*suffixes):
    """An argument that names a file to write, with one of the suffixes if any are given."""

    def parse(text):
        path = Path(text)
        if suffixes and path.suffix not in suffixes:
            raise argparse.ArgumentTypeError(
                f"expected a name in {', '.join(suffixes)}, got {text}"
            )
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise argparse.ArgumentTypeError(f"cannot write to {text}")
        return path

    return parse


def report(about, groups, path):
    """{title: rows}, each group printed as it is done; all of it in a JSON file if one is named."""
    tqdm.write(", ".join(f"{key} {cell(value)}" for key, value in about.items()))
    done = {}
    try:
        with tqdm(total=sum(map(len, groups.values())), desc="cases", disable=None) as progress:
            for title, rows in measured(groups, progress):
                done[title] = rows
                tqdm.write(f"\n{title}\n{table(rows)}")
    finally:
        if path:
            path.write_text(json.dumps({"machine": about, "groups": done}, indent=1))
    return done


def finish(groups):
    """Say how many rows lose, and fail if results were wrong or there were none."""
    rows = [row for group in groups.values() for row in group]
    losing = [row for row in rows if row.get("losing")]
    print(f"\n{len(losing)} of {len(rows)} rows losing, in {time.monotonic() - START:.0f} s")
    wrong = [row["case"] for row in losing if row["losing"].startswith(("WRONG", "FAILED"))]
    if wrong:
        raise SystemExit(f"wrong results, or none: {', '.join(wrong)}")


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="benchmark.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=file(), help="also write all numbers to this file")
    parser.add_argument(
        "--plot",
        type=file(".png", ".pdf", ".svg"),
        help="also measure over T and over W, and plot it to this file",
    )
    args = parser.parse_args(arguments)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --plot: matplotlib is not installed")
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        raise SystemExit("this benchmark needs a GPU and Triton")
    # Each backward pass is timed over one forward pass, whose buffers must stay.
    torch._functorch.config.donated_buffer = False
    groups = report(machine(), jobs(args.plot is not None), args.json)
    if args.plot:
        plot(args.plot, groups["over frames"], groups["over windows"])
    finish(groups)


if __name__ == "__main__":
    main()
