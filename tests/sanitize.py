"""A small battery of the fused op, forward and backward, for NVIDIA's compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py

Without the variable PyTorch cuts tensors out of large blocks, inside which an access beyond a
tensor's end goes unseen. Needs a GPU, torch and ldsa_nn. What is computed, the tests check; this
script says only whether it stayed finite.
"""

import sys
from itertools import cycle
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ldsa_nn import ldsa_local_attention

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


def main():
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
    torch.cuda.synchronize()
    print(f"{count} cases ran, forward and backward")


if __name__ == "__main__":
    main()
