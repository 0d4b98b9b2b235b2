"""Training by the processes that torchrun starts: DDP, FSDP2 and sharded checkpoints.

    torchrun --nproc-per-node N examples/train_ctc.py ...

A process of torchrun is a rank. Without torchrun there is one, to which nothing here adds anything.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import warnings
from datetime import timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

# A rank that dies ends the job by torchrun, in seconds; this ends one that waits for a rank which
# neither works nor dies.
TIMEOUT = timedelta(minutes=10)


class Ranks:
    """This process among the ranks of the job, as a context in which they can speak to each other.

    rank, size: this one's number, and how many there are.
    launched: whether torchrun started this process, perhaps as the only one.
    device: where this rank computes.
    """

    def __init__(self, device: str) -> None:
        """device: as on the command line; "cuda" is a GPU for each rank of a machine.

        Raises:
            ValueError: the machine has fewer GPUs than ranks, or they are all to use the same one.
        """
        self.launched = dist.is_torchelastic_launched()
        self.rank, self.size, self.device = 0, 1, device
        if self.launched:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            if device.startswith("cuda:") and self.size > 1:
                raise ValueError(f"--device: expected cuda or cpu under torchrun, got {device}")
            if device == "cuda":
                local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
                if local >= gpus:
                    raise ValueError(
                        f"--nproc-per-node: expected at most one process for each of {gpus} GPUs, "
                        f"got {os.environ['LOCAL_WORLD_SIZE']}"
                    )
                self.device = f"cuda:{local}"

    def __enter__(self) -> "Ranks":
        if self.launched:
            if self.device.startswith("cuda"):
                torch.cuda.set_device(self.device)
                dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT)
            else:
                dist.init_process_group("gloo", timeout=TIMEOUT)
        self._restore = (sys.stdout, tqdm.__init__)
        if self.rank:  # errors, on stderr, are every rank's to tell
            sys.stdout = open(os.devnull, "w")
            tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self.rank:
            sys.stdout.close()
        sys.stdout, tqdm.__init__ = self._restore
        # After an error the others may never come to an orderly end, so this one does not ask them.
        if self.launched and kind is None:
            dist.barrier()
            dist.destroy_process_group()

    def sum(self, *values: float) -> list[float]:
        """The sum over the ranks of each value, the same on all of them."""
        if not self.launched:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)  # on the CPU: the GPU's work goes on meanwhile
        return total.tolist()

    def wait(self) -> None:
        """Return once all ranks are here."""
        self.sum(0.0)

    def gather(self, mine: list) -> list:
        """A list of which each rank has every size-th item, from its own number on."""
        if not self.launched:
            return mine
        parts: list[list] = [[]] * self.size
        dist.all_gather_object(parts, mine)
        whole = [None] * sum(map(len, parts))
        for rank, part in enumerate(parts):
            whole[rank :: self.size] = part
        return whole

    def from_first(self, value: float) -> float:
        """The first rank's value, on all of them."""
        return self.sum(0.0 if self.rank else value)[0]

    def seed(self) -> None:
        """Give every rank random numbers of its own, and leave the first one those it has."""
        for i in range(self.rank):
            seed = int(torch.randint(2**62, ()))
            if i + 1 == self.rank:
                torch.manual_seed(seed)

    def wrap(self, model: nn.Module, *, fsdp: bool, bf16: bool) -> nn.Module:
        """The model whose backward pass leaves every rank the mean of the ranks' gradients.

        Args:
            model: with the same weights on every rank, on its device; its `blocks` are what is
                sharded, gathered and computed one after the other.
            fsdp: FSDP2, which keeps parameters, gradients and the optimizer's state sharded;
                otherwise DDP, which keeps all of them on every rank.
            bf16: FSDP2 computes in bfloat16, sums gradients and keeps weights in float32. With DDP
                autocast does, which is the caller's.
        """
        if not self.launched:
            return model
        # Of strides of dimensions of one element, and of outputs that are views: both are harmless
        # here.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        if not fsdp:
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        mesh = dist.init_device_mesh(torch.device(self.device).type, (self.size,))
        policy = MixedPrecisionPolicy()
        if bf16:
            policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            if bf16:
                # Its statistics are float32, with which its weights must agree.
                for part in block.modules():
                    if isinstance(part, nn.BatchNorm1d):
                        fully_shard(part, mesh=mesh)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    def save(
        self,
        folder: Path,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        own: dict[str, Tensor | None],
        mean: dict[str, Tensor],
        run: dict[str, Any],
    ) -> None:
        """Write folder/step-N, by all ranks: all of it or nothing, whenever any of them dies.

        Args:
            own: this rank's tensors beside the module's and the optimizer's.
            mean: weights beside the module's, sharded as these are; {} for none.
            run: what run.json holds, with the "step" that names the checkpoint. Older checkpoints
                are removed once this one is complete.
        """
        whole = folder / f"step-{run['step']:09}"
        part = folder / f".{whole.name}"
        if self.from_first(whole.exists()):  # a finished run that was resumed
            return
        if self.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        weights, moments = get_state_dict(module, optimizer)
        self.wait()  # nobody writes before the folder is there
        dcp.save(
            self._state(weights, moments, own, mean),
            storage_writer=dcp.FileSystemWriter(part),  # which waits for the disk
            planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        )
        if self.rank == 0:
            with (part / "run.json").open("w") as file:
                json.dump(run, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, whole)
            if os.name == "posix":
                descriptor = os.open(folder, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            for other in folder.iterdir():
                if other != whole and re.fullmatch(r"\.?step-\d{9,}", other.name):
                    shutil.rmtree(other, ignore_errors=True)
        self.wait()  # nobody goes on, or ends, before it is there

    def load(
        self,
        path: Path,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        own: dict[str, Tensor | None],
        mean: dict[str, Tensor],
    ) -> dict[str, Tensor | None]:
        """Read a checkpoint of `save` into module, optimizer and mean; return this rank's own."""
        weights, moments = get_state_dict(module, optimizer)
        state = self._state(weights, moments, own, mean)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            module,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return state[f"rank{self.rank}"]

    def _state(self, weights: dict, moments: dict, own: dict, mean: dict) -> dict[str, Any]:
        state = {"model": weights, "optimizer": moments, f"rank{self.rank}": own}
        return {**state, "mean": mean} if mean else state


def newest(folder: Path) -> Path | None:
    """The last complete checkpoint of `Ranks.save` in a folder."""
    return max((p for p in folder.glob("step-*") if (p / "run.json").is_file()), default=None)


def leave() -> None:
    """End a rank that is done, at once.

    Gloo's threads may still be about to let go of tensors, and whoever needs the interpreter while
    it shuts down is aborted, by which torchrun would take the job for failed.
    """
    if dist.is_torchelastic_launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def synchronised(module: nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """The context of a micro-batch's forward and backward pass: the last one's shares gradients."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    elif isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    return contextlib.nullcontext()


def full_weights(module: nn.Module) -> dict[str, Tensor]:
    """The whole model's state dict, on the CPU of the first rank; empty on the others.

    All ranks take part.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(module, options=options)
