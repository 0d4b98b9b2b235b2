"""Time the attention layer against its own projections and against multi-head attention.

    python examples/bench_layer.py [--device cpu|cuda] [--json FILE] [--plot FILE]

For each length T: milliseconds of forward (no_grad) and of forward with backward, median of rounds
that take the peers in turn, and the peak of memory that a training step adds. Peers:

- ldsa: LocalDenseSynthesizerAttention, window of 15 frames;
- gemms: its four projections and the ReLU alone, which the layer cannot be faster than;
- mhsa: torch.nn.MultiheadAttention without weights (scaled_dot_product_attention inside);
- compiled: the layer with implementation="eager" under torch.compile.

On a GPU bfloat16, 32 sequences, width 512, 8 heads, timed by triton.testing.do_bench with the L2
cache flushed; on a CPU float32, float64 and bfloat16, 8 sequences, width 256, 4 heads.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path

import torch
import torch._functorch.config
from torch import Tensor, nn
from tqdm import tqdm

from ldsa_nn import LocalDenseSynthesizerAttention

ROUNDS = 7


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


def step(module: nn.Module, x: Tensor) -> None:
    """Forward and backward; every output gets a gradient of ones."""
    out = module(x)
    outs = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(outs, [torch.ones_like(y) for y in outs])


def milliseconds(run, device: str) -> float:
    """Time of one call, in milliseconds."""
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(run, return_mode="median")
    from torch.utils.benchmark import Timer

    # Timer sets the number of threads itself; keep the caller's.
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.timeit(3).mean * 1e3


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
    """{peer: {"forward", "step" (ms), "forward_mib", "step_mib"}} of one size."""
    kind = dict(device=device, dtype=dtype)
    ldsa = LocalDenseSynthesizerAttention(n_head, width, **kind)
    eager = LocalDenseSynthesizerAttention(n_head, width, implementation="eager", **kind)
    peers = {
        "ldsa": ldsa,
        "gemms": Gemms(ldsa),
        "mhsa": Mhsa(width, n_head, batch_first=True, **kind),
        "compiled": torch.compile(eager, dynamic=False),
    }
    x = torch.randn(batch, frames, width, **kind)
    leaf = x.clone().requires_grad_()
    times = {name: {"forward": [], "step": []} for name in peers}
    result = {}
    for name, module in peers.items():
        with torch.no_grad():
            forward = peak_mib(partial(module, x), device)
        leaf.grad = None
        module.zero_grad()
        result[name] = {
            "forward_mib": forward,
            "step_mib": peak_mib(partial(step, module, leaf), device),
        }
    for _ in range(ROUNDS):
        for name, module in peers.items():
            with torch.no_grad():
                times[name]["forward"].append(milliseconds(partial(module, x), device))
            times[name]["step"].append(milliseconds(partial(step, module, leaf), device))
    for name, kinds in times.items():
        result[name].update({k: statistics.median(v) for k, v in kinds.items()})
    return result


def plot(path: Path, rows: list[dict]) -> None:
    """Save time and memory against T."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    first = rows[0]["dtype"]
    rows = [row for row in rows if row["dtype"] == first]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, key, label in zip(
        axes, ("step", "step_mib"), ("forward + backward, ms", "peak memory, MiB"), strict=True
    ):
        for peer in ("mhsa", "compiled", "ldsa", "gemms"):
            axis.plot([r["frames"] for r in rows], [r[peer][key] for r in rows], "o-", label=peer)
        axis.set(xlabel="frames", ylabel=label, xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, save what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--frames", type=int, nargs="+", help="lengths T (default: 250 to 3000)")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    parser.add_argument("--plot", type=Path, help="also plot time and memory against T (PNG, PDF)")
    args = parser.parse_args(arguments)
    # A compiled step is run several times over the same graph.
    torch._functorch.config.donated_buffer = False
    if args.device == "cuda":
        batch, width, n_head, dtypes = 32, 512, 8, (torch.bfloat16,)
        lengths = args.frames or [256, 512, 1024, 2048, 3000]
        where = torch.cuda.get_device_name()
    else:
        batch, width, n_head = 8, 256, 4
        dtypes = (torch.float32, torch.float64, torch.bfloat16)
        lengths = args.frames or [250, 1000]
        where = f"CPU, {torch.get_num_threads()} threads"
    sizes = [(frames, dtype) for dtype in dtypes for frames in lengths]
    rows = []
    for frames, dtype in tqdm(sizes, desc="sizes", disable=None):
        torch._dynamo.reset()
        row = measure(batch, frames, width, n_head, dtype, args.device)
        rows.append({"frames": frames, "dtype": str(dtype).removeprefix("torch."), **row})
    print(
        f"{where}, torch {torch.__version__}; {batch} sequences, width {width}, {n_head} heads, "
        "window 15; ms, forward / forward + backward"
    )
    print(
        "| T | dtype | ldsa | gemms | ldsa : gemms | mhsa | compiled "
        "| training MiB: ldsa, gemms, mhsa, compiled |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [f"{row[p]['forward']:.3g} / {row[p]['step']:.3g}" for p in ("ldsa", "gemms")]
        cells.append(
            " / ".join(f"{row['ldsa'][k] / row['gemms'][k]:.2f}" for k in ("forward", "step"))
        )
        cells += [f"{row[p]['forward']:.3g} / {row[p]['step']:.3g}" for p in ("mhsa", "compiled")]
        cells.append(
            ", ".join(f"{row[p]['step_mib']:.0f}" for p in ("ldsa", "gemms", "mhsa", "compiled"))
        )
        print(f"| {row['frames']} | {row['dtype']} | " + " | ".join(cells) + " |")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.plot:
        plot(args.plot, rows)


if __name__ == "__main__":
    main()
