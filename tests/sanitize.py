"""A small battery of the fused ops, forward and backward, for NVIDIA's compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py [BATTERY ...]

Without the variable PyTorch cuts tensors out of large blocks, inside which an access beyond a
tensor's end goes unseen. Needs a GPU, torch and ldsa_nn. What is computed, the tests check; this
script says only whether it stayed finite. Batteries are local, delta and around; all if none is
named.
"""

import sys
from itertools import cycle
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ldsa_nn import ldsa_local_attention, tiled_delta_rule
from ldsa_nn.functional import delta_gates, gated_norm, short_convolution

# (left, right), head width: every block width of the kernels, with and without a remainder.
SIZES = [
    ((0, 0), 1),
    ((14, 0), 64),
    ((7, 7), 36),
    ((0, 5), 16),
    ((15, 15), 64),
    ((17, 2), 25),
    ((31, 31), 128),
    ((62, 0), 72),
    ((63, 63), 40),
    ((127, 127), 64),
    ((2, 1), 256),
]
FRAMES = cycle([37, 1, 64, 130, 15])
LAYOUTS = cycle(["channel_last", "time_last", "sliced"])
EDGES = cycle(["zero", "renormalize"])
DROPOUT = cycle([0.0, 0.0, 0.2])

# Delta rule: frames, key width, tiles, value width, bounds. Values of one head and of four, with
# and without a remainder in every direction.
DELTA = [
    (70, 256, 4, 128, None),
    (130, 256, 4, 512, {"lengths": (130, 65)}),
    (200, 64, 1, 40, {"cu_seqlens": (1, 65, 65, 130, 199)}),
    (65, 80, 5, 33, {"lengths": (0, 64)}),
    (3, 256, 4, 512, {"lengths": (3, 1)}),
    (1, 48, 3, 20, None),
]
# Around the delta rule: frames, heads, key width, value width, tiles, taps, frames before.
AROUND = [
    (37, 1, 256, 512, 4, 4, 0),
    (150, 2, 64, 128, 64, 4, 3),
    (1, 1, 256, 512, 4, 4, 3),
    (21, 3, 5, 11, 5, 3, 1),
    (70, 2, 48, 40, 1, 9, 0),
    (3, 1, 16, 7, 2, 1, 0),
]


def tensor(channels, frames, layout, dtype):
    """[2,3,C,T] that ends where its memory ends."""
    if layout == "time_last":
        x = torch.randn(2, 3, channels, frames, dtype=dtype, device="cuda")
    elif layout == "channel_last":
        x = torch.randn(2, frames, 3, channels, dtype=dtype, device="cuda").permute(0, 2, 3, 1)
    else:
        x = torch.randn(2, frames, 3, channels + 5, dtype=dtype, device="cuda")
        x = x[..., 5:].permute(0, 2, 3, 1)
    return x.requires_grad_()


def local():
    """Number of cases of the local attention that ran."""
    count = 0
    for (left, right), head_dim in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            frames, layout, edge, p = next(FRAMES), next(LAYOUTS), next(EDGES), next(DROPOUT)
            a_logits = tensor(left + 1 + right, frames, layout, dtype)
            v = tensor(head_dim, frames, layout, dtype)
            bounds = {}
            if count % 2:
                bounds["lengths"] = torch.tensor([frames, frames // 2], device="cuda")
                bounds["starts"] = torch.tensor([frames // 3, 0], device="cuda")
            out = ldsa_local_attention(
                a_logits, v, left, right, edge=edge, dropout_p=p, implementation="triton", **bounds
            )
            grads = torch.autograd.grad(out, (a_logits, v), torch.ones_like(out))
            if not all(x.isfinite().all() for x in (out, *grads)):
                raise SystemExit(f"not finite: {left=} {right=} {head_dim=} {dtype} {layout}")
            count += 1
    return count


def delta():
    """Number of cases of the delta rule that ran."""
    count = 0
    for frames, key_dim, tiles, value_dim, bounds in DELTA:
        for dtype in (torch.float32, torch.bfloat16):
            bounds = bounds or {}
            batch = 1 if "cu_seqlens" in bounds else 2
            options = {name: torch.tensor(x, device="cuda") for name, x in bounds.items()}
            sequences = len(bounds["cu_seqlens"]) - 1 if batch == 1 else batch

            def of(*shape, kind=torch.float32):
                return torch.randn(shape, dtype=kind, device="cuda")

            q, k = (of(batch, frames, 2, key_dim) for _ in range(2))
            inputs = [
                *((x / x.norm(dim=3, keepdim=True)).to(dtype) for x in (q, k)),
                of(batch, frames, 2, value_dim, kind=dtype),
                -of(batch, frames, 2, tiles).abs(),
                of(batch, frames, 2).sigmoid(),
            ]
            state = of(sequences, 2, key_dim, value_dim)
            for initial in (None, state):
                tensors = [x.requires_grad_() for x in (*inputs, state)]
                options.update(initial_state=initial, implementation="triton")
                with torch.no_grad():
                    results = tiled_delta_rule(*inputs, output_final_state=True, **options)
                out, final = tiled_delta_rule(*inputs, output_final_state=True, **options)
                used = tensors if initial is not None else tensors[:5]
                ones = torch.ones_like(out), torch.ones_like(final)
                grads = torch.autograd.grad((out, final), used, ones)
                if not all(x.isfinite().all() for x in (*results, out, final, *grads)):
                    raise SystemExit(f"not finite: delta rule, {frames=} {key_dim=} {dtype}")
                count += 1
    return count


def around():
    """Number of cases of the operations around the delta rule that ran."""
    count = 0
    for frames, heads, key_dim, value_dim, tiles, taps, before in AROUND:
        for dtype in (torch.float32, torch.bfloat16):

            def of(*shape, dtype=dtype):
                return torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True)

            channels = heads * (2 * key_dim + value_dim)
            rows = 2, frames, heads
            for op, tensors, options in (
                (
                    short_convolution,
                    [of(2, before + frames, channels), of(channels, 1, taps)],
                    (heads, key_dim, before),
                ),
                (
                    delta_gates,
                    [of(*rows, tiles), of(*rows), of(heads, tiles), of(heads, tiles)],
                    (),
                ),
                (
                    gated_norm,
                    [of(*rows, value_dim), of(2, frames, heads * value_dim), of(value_dim)],
                    (1e-5,),
                ),
            ):
                results = op(*tensors, *options, implementation="triton")
                results = results if isinstance(results, tuple) else (results,)
                grads = torch.autograd.grad([y.sum() for y in results], tensors)
                if not all(x.isfinite().all() for x in (*results, *grads)):
                    raise SystemExit(f"not finite: {op.__name__}, {frames=} {key_dim=} {dtype}")
                count += 1
    return count


BATTERIES = {"local": local, "delta": delta, "around": around}


def main():
    torch.manual_seed(0)
    count = sum(BATTERIES[name]() for name in sys.argv[1:] or BATTERIES)
    torch.cuda.synchronize()
    print(f"{count} cases ran, forward and backward")


if __name__ == "__main__":
    main()
