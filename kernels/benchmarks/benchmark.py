"""Time the fused op against eager PyTorch, compiled eager and the memory roof.

    python kernels/benchmarks/benchmark.py [--json FILE]

Median microseconds (triton.testing.do_bench, L2 flushed). The roof is a device-to-device copy of
the same total bytes, half read and half written, timed alike. Every result is compared with float64
before it is timed; a wrong one has no time.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch._functorch.config
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cases import BENCHMARK, make, run, truth  # noqa: E402

from ldsa_nn import eager_ldsa, ldsa_local_attention  # noqa: E402


def median_us(run):
    from triton.testing import do_bench

    return do_bench(run, return_mode="median") * 1e3


def roof_us(n_bytes):
    source = torch.empty(n_bytes // 4, dtype=torch.int16, device="cuda")
    target = torch.empty_like(source)
    return median_us(lambda: target.copy_(source))


def check(op, case):
    """Raise if op's output or gradients are further from float64 than bf16 rounding explains."""
    logits, v, grad, _ = make(case, "cuda")
    wanted = truth(logits, v, grad, case.left, case.right)
    got = run(logits, v, grad, case.left, case.right, op)
    for name, x, y in zip(("out", "grad a_logits", "grad v"), got, wanted, strict=True):
        error = ((x.double() - y).norm() / y.norm()).item()
        if not error < 5e-3:
            raise SystemExit(f"{case}: {name} is wrong, relative error {error:.1e}")


def measure(op, logits, v, grad, left, right):
    """Forward and backward microseconds."""
    with torch.no_grad():
        forward = median_us(lambda: op(logits, v, left, right))
    inputs = (logits.detach().requires_grad_(), v.detach().requires_grad_())
    out = op(*inputs, left, right)
    backward = median_us(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))
    return forward, backward


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        raise SystemExit("this benchmark needs a GPU and Triton")
    import triton

    copy = 2**33 / roof_us(2**33) / 1e6
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; "
        f"large copy {copy:.2f} TB/s; bfloat16, 8 heads of 64; us, forward / backward"
    )
    # Each backward pass is timed over one forward pass, whose buffers must stay.
    torch._functorch.config.donated_buffer = False
    rows = []
    for case in tqdm(BENCHMARK, desc="cases", disable=None):
        torch._dynamo.reset()  # or the later cases pass its limit of graphs and run uncompiled
        compiled = torch.compile(eager_ldsa, dynamic=False)
        frames = case.batch * case.heads * case.frames
        item = case.dtype.itemsize
        row = {
            "case": case.name,
            "roof": (
                roof_us(frames * item * (case.window + 2 * case.head_dim)),
                roof_us(frames * item * (2 * case.window + 3 * case.head_dim)),
            ),
        }
        logits, v, grad, _ = make(case, "cuda")
        for name, op in (
            ("fused", ldsa_local_attention),
            ("compiled", compiled),
            ("eager", eager_ldsa),
        ):
            check(op, case)
            row[name] = measure(op, logits, v, grad, case.left, case.right)
        rows.append(row)
    print("| B x T | left, right | memory | roof | fused | % of roof | compiled eager | eager |")
    print("|---|---|---|---|---|---|---|---|")
    for case, row in zip(BENCHMARK, rows, strict=True):
        share = " / ".join(
            f"{100 * r / f:.0f}" for r, f in zip(row["roof"], row["fused"], strict=True)
        )
        times = {
            name: " / ".join(f"{t:.0f}" if t >= 100 else f"{t:.1f}" for t in row[name])
            for name in ("roof", "fused", "compiled", "eager")
        }
        print(
            f"| {case.batch} x {case.frames} | {case.left}, {case.right} "
            f"| {case.layout.replace('_', '-')} | {times['roof']} | {times['fused']} | {share} "
            f"| {times['compiled']} | {times['eager']} |"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
