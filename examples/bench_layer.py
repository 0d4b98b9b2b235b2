"""Time the attention layer against its own projections and against multi-head attention.

    python examples/bench_layer.py [--device cpu|cuda] [--json FILE] [--plot FILE]

For each length T: milliseconds of forward (no_grad) and of forward with backward, median of rounds
that take the peers in turn, and the peak of memory that a call adds. Peers:

- ldsa: LocalDenseSynthesizerAttention, window of 15 frames;
- gemms: its four projections and the ReLU alone, as separate calls;
- mhsa: torch.nn.MultiheadAttention without weights (scaled_dot_product_attention inside);
- compiled: the layer with implementation="eager" under torch.compile.

On a GPU bfloat16, 32 sequences, width 512, 8 heads, timed by triton.testing.do_bench with the L2
cache flushed, mhsa in its flash form or not at all: as calls, where Python may take longer than the
GPU, and as replays of a CUDA graph, which are the GPU's time alone. On a CPU float32, float64 and
bfloat16, 8 sequences, width 256, 4 heads. The second table holds what the layer takes relative to
its peers: time, memory of a training step, and the memory above that of gemms in units of the value
tensor.
"""

import argparse
import importlib.util
import json
import os
import statistics
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from ldsa_nn import LocalDenseSynthesizerAttention

ROUNDS = {"cpu": 7, "cuda": 3}  # do_bench takes the median of many calls itself
PEERS = ("ldsa", "gemms", "mhsa", "compiled")


class Gemms(nn.Module):
    """The layer's projections and ReLU, as separate products, without its core."""

    def __init__(self, layer: LocalDenseSynthesizerAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of x [B,T,D], and its values projected."""
        layer = self.layer
        return layer.w2(torch.relu(layer.w1(x))), layer.w_out(layer.w3(x))


class Mhsa(nn.MultiheadAttention):
    """Multi-head attention of a sequence to itself."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Attend in x [B,T,D]."""
        return super().forward(x, x, x, need_weights=False)[0]


def outputs(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """What a module computes of x, as a tuple."""
    out = module(x)
    return out if isinstance(out, tuple) else (out,)


def step(module: nn.Module, x: Tensor, grads: list[Tensor]) -> None:
    """Forward and backward, to the input and every parameter; nothing is accumulated."""
    torch.autograd.grad(outputs(module, x), (x, *module.parameters()), grads)


def milliseconds(run, device: str) -> float:
    """Time of one call, in milliseconds."""
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(run, return_mode="median")
    from torch.utils.benchmark import Timer

    # Timer sets the number of threads itself; keep the caller's.
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.timeit(3).mean * 1e3


def captured(run):
    """A call that replays `run` from a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(holds=run):  # and the tensors that it works on, which a graph does not hold
        graph.replay()

    return replay


def peak_mib(run, device: str) -> float:
    """Most memory that `run` holds at a time beyond what was held before, in MiB."""
    run()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    held = peak = 0
    for event in record.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak / 2**20


def measure(batch: int, frames: int, width: int, n_head: int, dtype: torch.dtype, device: str):
    """Rows of one size: {peer: {"forward", "step" (ms), "forward_mib", "step_mib"}, "graph"}."""
    kind = dict(device=device, dtype=dtype)
    ldsa = LocalDenseSynthesizerAttention(n_head, width, **kind)
    eager = LocalDenseSynthesizerAttention(n_head, width, implementation="eager", **kind)
    mhsa = Mhsa(width, n_head, bias=False, batch_first=True, **kind)
    modules = ldsa, Gemms(ldsa), mhsa, torch.compile(eager, dynamic=False)
    x = torch.randn(batch, frames, width, **kind)
    leaf = x.clone().requires_grad_()
    memory, calls = {}, {}
    for name, module in zip(PEERS, modules, strict=True):
        with torch.no_grad():
            grads = [torch.randn_like(y) for y in outputs(module, x)]
            calls[name] = partial(module, x), partial(step, module, leaf, grads)
            memory[name] = {"forward_mib": peak_mib(calls[name][0], device)}
        memory[name]["step_mib"] = peak_mib(calls[name][1], device)
    rows = []
    for graph in (False, True) if device == "cuda" else (False,):
        times = {name: ([], []) for name in PEERS}
        if graph:
            for name, (forward, both) in calls.items():
                with torch.no_grad():
                    forward = captured(forward)
                calls[name] = forward, captured(both)
        for _ in range(ROUNDS[device]):
            for name, (forward, both) in calls.items():
                with torch.no_grad():
                    times[name][0].append(milliseconds(forward, device))
                times[name][1].append(milliseconds(both, device))
        row: dict = {"graph": graph}
        for name, kinds in times.items():
            forward, both = map(statistics.median, kinds)
            row[name] = {"forward": forward, "step": both, **memory[name]}
        rows.append(row)
    return rows


def plot(path: Path, rows: list[dict]) -> None:
    """Save time and memory against T."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    first, graph = rows[0]["dtype"], rows[-1]["graph"]
    rows = [row for row in rows if row["dtype"] == first and row["graph"] == graph]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, key, label in zip(
        axes, ("step", "step_mib"), ("forward + backward, ms", "peak memory, MiB"), strict=True
    ):
        for peer in ("mhsa", "compiled", "ldsa", "gemms"):
            axis.plot([r["frames"] for r in rows], [r[peer][key] for r in rows], "o-", label=peer)
        axis.set(xlabel="frames", ylabel=label, xscale="log", yscale="log")
        axis.set_xticks([r["frames"] for r in rows], [str(r["frames"]) for r in rows])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows))


def pair(x: float, y: float) -> str:
    """Two numbers, forward and forward with backward."""
    return " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in (x, y))


def tables(rows: list[dict], value_mib: list[float]) -> str:
    """Times and memory, then ratios; value_mib: the size of each row's value tensor."""
    sizes = [[f"{row['frames']}{', graph' if row['graph'] else ''}", row["dtype"]] for row in rows]
    figures, ratios = [], []
    for size, row, unit in zip(sizes, rows, value_mib, strict=True):
        ldsa, *others = (row[name] for name in PEERS)
        figures.append(
            size
            + [pair(row[name]["forward"], row[name]["step"]) for name in PEERS]
            + [", ".join(f"{row[name]['step_mib']:.0f}" for name in PEERS)]
        )
        above = ((ldsa[key] - others[0][key]) / unit for key in ("forward_mib", "step_mib"))
        ratios.append(
            size
            + [pair(*(ldsa[key] / peer[key] for key in ("forward", "step"))) for peer in others]
            + [pair(*(ldsa["step_mib"] / peer["step_mib"] for peer in others[1:])), pair(*above)]
        )
    first = table(["T", "dtype", *PEERS, f"training MiB: {', '.join(PEERS)}"], figures)
    columns = [f"ldsa : {name}" for name in PEERS[1:]]
    memory = ["training memory : mhsa / : compiled", "memory above gemms, value tensors"]
    return first + "\n\n" + table(["T", "dtype", *columns, *memory], ratios)


def positive(text: str) -> int:
    """An argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return int(text)


def writable(text: str) -> Path:
    """An argument that names a file to write."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write to {text}")
    return path


def picture(text: str) -> Path:
    """An argument that names an image to write."""
    if Path(text).suffix not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"expected a name in .png, .pdf or .svg, got {text}")
    path = writable(text)
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is not installed")
    return path


def usable(text: str) -> str:
    """An argument that names a device; what it is not, argparse's choices say."""
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("PyTorch finds no GPU here")
    if text == "cuda" and importlib.util.find_spec("triton") is None:
        raise argparse.ArgumentTypeError("Triton is not installed")
    return text


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the tables, save what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=usable, choices=("cpu", "cuda"), default=device)
    parser.add_argument(
        "--frames",
        type=positive,
        nargs="+",
        help="lengths T (default: 250 and 1000 on a CPU, 128 to 3000 on a GPU)",
    )
    parser.add_argument("--json", type=writable, help="also write all numbers to this file")
    parser.add_argument("--plot", type=picture, help="also plot time and memory against T")
    args = parser.parse_args(arguments)
    # A compiled step is run several times over the same graph.
    torch._functorch.config.donated_buffer = False
    if args.device == "cuda":
        batch, width, n_head, dtypes = 32, 512, 8, (torch.bfloat16,)
        lengths = args.frames or [128, 256, 512, 1024, 2048, 3000]
        where = torch.cuda.get_device_name()
        attention = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)  # raises where it cannot run
    else:
        batch, width, n_head = 8, 256, 4
        dtypes = (torch.float32, torch.float64, torch.bfloat16)
        lengths = args.frames or [250, 1000]
        where = f"CPU, {torch.get_num_threads()} threads"
        attention = nullcontext
    sizes = [(frames, dtype) for dtype in dtypes for frames in lengths]
    rows, values = [], []
    for frames, dtype in tqdm(sizes, desc="sizes", disable=None):
        torch._dynamo.reset()
        with attention():
            measured = measure(batch, frames, width, n_head, dtype, args.device)
        for row in measured:
            rows.append({"frames": frames, "dtype": str(dtype).removeprefix("torch."), **row})
            values.append(batch * frames * width * dtype.itemsize / 2**20)
    print(
        f"{where}, torch {torch.__version__}; {batch} sequences, width {width}, {n_head} heads, "
        "window 15; ms, forward / forward + backward"
    )
    print(tables(rows, values))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.plot:
        plot(args.plot, rows)


if __name__ == "__main__":
    main()
