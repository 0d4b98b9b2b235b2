"""What test_distributed.py runs under torchrun: the training example on tones, and its gradients.

torchrun --nproc-per-node 2 tests/ranks.py '[{"arguments": [...], "die": [...]}, "gradients"]'
"""

import json
import os
import signal
import sys
from functools import partial
from itertools import count
from types import SimpleNamespace

import torch
from test_train_ctc import MODELS, TINY, tones

import data  # isort: skip
import distributed  # isort: skip
import recogniser  # isort: skip
import train_ctc  # isort: skip
import training  # isort: skip

ALONE = SimpleNamespace(sum=lambda *values: list(values), size=1, device="cpu")


def gradients_of(ranks, batch, accumulate, wrap):
    """Gradients of a batch of tones, in float64, as one of the ranks has them."""
    options = vars(train_ctc.parse([*MODELS["streaming"], *TINY.split(), "--dropout", "0"]))
    model = recogniser.build(options, "ABC").double()
    module = wrap(model)
    logmel = data.LogMel()

    def features(audio, lengths):
        values, frames = logmel(audio, lengths)
        return values.double(), frames

    rank, size = getattr(ranks, "rank", 0), ranks.size
    shares = data.share(list(range(len(batch))), rank=rank, ranks=size, accumulate=accumulate)
    step = training.Whole(batch, "ABC")[shares]
    part = training.gradients(module, ranks, step.batches, features, autocast=False)
    grads = {}
    for name, weight in module.named_parameters():
        grad = weight.grad
        grads[name.removeprefix("module.")] = getattr(grad, "full_tensor", lambda g=grad: g)()
    return ranks.sum(float(part))[0], grads


def check_gradients(ranks):
    """Ranks and micro-batches of unequal sizes, some of them empty, give the whole's gradient."""
    for utterances in (7, 1):
        batch = tones("train", utterances, 3)
        loss, expected = gradients_of(ALONE, batch, 1, lambda model: model)
        assert all(grad.abs().max() > 1e-6 for grad in expected.values())
        for fsdp in (False, True):
            for accumulate in (1, 2):
                wrap = partial(ranks.wrap, fsdp=fsdp, bf16=False)
                same, grads = gradients_of(ranks, batch, accumulate, wrap)
                assert abs(same - loss) < 1e-6, (same, loss)
                assert grads.keys() == expected.keys()
                for name, grad in grads.items():
                    torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)
    if ranks.rank == 0:
        print("gradients agree")


def die(ranks, rank, how, step):
    """Make that rank end while it fetches that step's batch, or while it writes its checkpoint."""
    if rank != ranks.rank:
        return
    calls = count(1)
    place, name = (distributed.os, "replace") if how == "save" else (training.Whole, "__getitem__")
    original = getattr(place, name)

    def replaced(*arguments):
        if how == "save" and "step-" not in str(arguments[0]):
            return original(*arguments)
        if next(calls) == step:
            if how == "raise":
                raise RuntimeError(f"rank {rank} is broken")
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    setattr(place, name, replaced)


def main():
    device = "cuda" if os.environ.get("ON_GPU") else "cpu"
    corpus = {"train": tones("train", 12, 0), "test": tones("test", 5, 1)}
    training.SAVE_EVERY_SECONDS = 0  # after every step
    ranks = distributed.Ranks(device)
    with ranks:
        for job in json.loads(sys.argv[1]):
            train_ctc.read_corpus = lambda args: corpus
            if job == "gradients":
                check_gradients(ranks)
                continue
            if "die" in job:
                die(ranks, *job["die"])
            arguments = ["--device", device, *TINY.split(), *job["arguments"]]
            train_ctc.run(train_ctc.parse(arguments), ranks)


if __name__ == "__main__":
    main()
    distributed.leave()
