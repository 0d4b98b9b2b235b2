"""The kernel's benchmark, in two forms.

    python kernels/benchmarks/benchmark.py --help    # against the memory roof and its targets
    python kernels/layout.py && kernels benchmark ./kernels

The second is what the `kernels` library runs of a kernel repository, on a GPU (on a CPU where torch
is built for CPUs alone), with what `pip install 'kernels[benchmark]'` brings. It takes this file
without the rest of the checkout, so that the first form is a module of its own. Its times are wall
times of whole calls, its reference is eager PyTorch.
"""

import torch

try:
    from kernels.benchmark import Benchmark
except ModuleNotFoundError:  # the first form does not need it
    Benchmark = object


class LdsaBenchmark(Benchmark):
    """The op forward and backward, fp16, 8 heads of 64, causal windows of 15 frames."""

    seed = 0
    left, right = 14, 0
    # (batch, frames); a CPU takes a sixteenth of the batch.
    small, large = (16, 256), (32, 3000)

    def tensors(self, batch, frames):
        if self.device == "cpu":
            batch = max(1, batch // 16)
        logits, v, grad = (
            torch.randn(batch, frames, 8, channels, device=self.device, dtype=torch.float16)
            for channels in (self.left + 1 + self.right, 64, 64)
        )
        self.inputs = [x.permute(0, 2, 3, 1).requires_grad_() for x in (logits, v)]
        # The runner allows an absolute error of 0.01, which the rounding of large gradients passes.
        self.grad = grad.permute(0, 2, 3, 1) / 8

    def forward(self, op):
        with torch.no_grad():
            return op(*self.inputs, self.left, self.right)

    def setup_small_forward(self):
        self.tensors(*self.small)

    def benchmark_small_forward(self):
        self.out = self.forward(self.kernel.ldsa_local_attention)

    def verify_small_forward(self):
        return self.forward(self.kernel.eager_ldsa)

    def setup_forward(self):
        self.tensors(*self.large)

    benchmark_forward = benchmark_small_forward
    verify_forward = verify_small_forward

    def both(self, op):
        """Forward and backward; the gradients."""
        return torch.autograd.grad(op(*self.inputs, self.left, self.right), self.inputs, self.grad)

    def setup_forward_backward(self):
        self.tensors(*self.large)

    def benchmark_forward_backward(self):
        self.grads = self.both(self.kernel.ldsa_local_attention)

    def verify_forward_backward(self):
        # The runner compares one tensor.
        self.out = torch.cat(self.grads, 2)
        return torch.cat(self.both(self.kernel.eager_ldsa), 2)


if __name__ == "__main__":
    from measure import main

    main()
