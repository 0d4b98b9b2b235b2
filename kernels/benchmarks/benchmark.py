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
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ldsa_nn import eager_ldsa, ldsa_local_attention  # noqa: E402

# batch, frames, left, right, layout; 8 heads of width 64, bfloat16
CASES = [
    (batch, frames, left, right, layout)
    for batch, frames in ((16, 256), (32, 1024), (32, 3000))
    for left, right in ((14, 0),)
    for layout in ("channel-last", "time-last")
] + [(32, 1024, 31, 31, "channel-last"), (32, 1024, 63, 63, "channel-last")]
HEADS, HEAD_DIM, DTYPE = 8, 64, torch.bfloat16


def make(batch, frames, channels, layout):
    """Random [B,H,C,T] in the memory order named by layout."""
    if layout == "time-last":
        return torch.randn(batch, HEADS, channels, frames, device="cuda", dtype=DTYPE)
    x = torch.randn(batch, frames, HEADS, channels, device="cuda", dtype=DTYPE)
    return x.permute(0, 2, 3, 1)


def median_us(run):
    from triton.testing import do_bench

    return do_bench(run, return_mode="median") * 1e3


def roof_us(n_bytes):
    source = torch.empty(n_bytes // 4, dtype=torch.int16, device="cuda")
    target = torch.empty_like(source)
    return median_us(lambda: target.copy_(source))


def check(op, left, right, layout):
    """Raise if op's output or gradients are further from float64 than bf16 rounding explains."""
    logits = make(2, 300, left + 1 + right, layout).requires_grad_()
    v = make(2, 300, HEAD_DIM, layout).requires_grad_()
    grad = make(2, 300, HEAD_DIM, layout)
    exact = [x.detach().double().requires_grad_() for x in (logits, v)]
    wanted = eager_ldsa(*exact, left, right)
    wanted = (wanted, *torch.autograd.grad(wanted, exact, grad.double()))
    got = op(logits, v, left, right)
    got = (got, *torch.autograd.grad(got, (logits, v), grad))
    for name, x, y in zip(("out", "grad a_logits", "grad v"), got, wanted, strict=True):
        error = ((x.double() - y).norm() / y.norm()).item()
        if not error < 5e-3:
            raise SystemExit(f"{name} is wrong: relative error {error:.1e} (left={left})")


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
        f"large copy {copy:.2f} TB/s; H={HEADS}, Dh={HEAD_DIM}, bfloat16; us, forward / backward"
    )
    compiled = torch.compile(eager_ldsa, dynamic=False)
    rows = []
    for batch, frames, left, right, layout in tqdm(CASES, desc="cases", disable=None):
        window = left + 1 + right
        tokens = batch * frames * HEADS
        roof = (
            roof_us(tokens * (2 * window + 4 * HEAD_DIM)),
            roof_us(tokens * (4 * window + 6 * HEAD_DIM)),
        )
        row = dict(batch=batch, frames=frames, left=left, right=right, layout=layout, roof=roof)
        logits, v, grad = (make(batch, frames, c, layout) for c in (window, HEAD_DIM, HEAD_DIM))
        for name, op in (
            ("fused", ldsa_local_attention),
            ("compiled", compiled),
            ("eager", eager_ldsa),
        ):
            check(op, left, right, layout)
            row[name] = measure(op, logits, v, grad, left, right)
        rows.append(row)
    print("| B x T | left, right | memory | roof | fused | % of roof | compiled eager | eager |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        share = " / ".join(
            f"{100 * r / f:.0f}" for r, f in zip(row["roof"], row["fused"], strict=True)
        )
        times = {
            name: " / ".join(f"{t:.0f}" if t >= 100 else f"{t:.1f}" for t in row[name])
            for name in ("roof", "fused", "compiled", "eager")
        }
        print(
            f"| {row['batch']} x {row['frames']} | {row['left']}, {row['right']} | {row['layout']} "
            f"| {times['roof']} | {times['fused']} | {share} | {times['compiled']} "
            f"| {times['eager']} |"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
