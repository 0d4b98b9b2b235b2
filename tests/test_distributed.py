"""The training example under torchrun: DDP, FSDP2, killed, resumed, with a rank that dies."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

for package in ("torchaudio", "soundfile", "jiwer", "matplotlib"):
    pytest.importorskip(package)
sys.path.insert(0, str(ROOT / "examples"))

import data  # noqa: E402
import distributed  # noqa: E402
import train_ctc  # noqa: E402
import training  # noqa: E402
from ranks import ALONE, gradients_of  # noqa: E402
from test_train_ctc import TINY, tones  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402

STREAMING = ["--encoder", "streaming", "--accumulate", "2"]
# Far more than a job takes on a busy machine, less than the process group's own timeout: a job that
# hangs until then fails the test.
PATIENCE = 480


def torchrun(*jobs, gpu: bool = False) -> subprocess.CompletedProcess:
    """Run jobs of ranks.py in two processes."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ON_GPU": "1" if gpu else ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, str(ROOT / "tests" / "ranks.py"), json.dumps(jobs)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def weights(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / "checkpoint.pt", weights_only=True)["model"]


def leaves(tree, path=""):
    """Every tensor and number of nested dicts and lists, by its path."""
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from leaves(value, f"{path}/{key}")
    else:
        yield path, tree


def everything(out: Path) -> dict[str, object]:
    """What a sharded checkpoint holds: weights, optimizer, each rank's random numbers and place."""
    checkpoint = distributed.newest(out / "checkpoints")
    dcp_to_torch_save(checkpoint, out / "whole.pt")
    found = dict(leaves(torch.load(out / "whole.pt", weights_only=False)))
    run = json.loads((checkpoint / "run.json").read_text())
    del run["seconds"]
    return found | dict(leaves(run))


def check_ranks(tmp_path, gpu=False):
    ddp = [*STREAMING, "--steps", "4", "--out", str(tmp_path / "ddp")]
    fsdp = [*STREAMING, "--steps", "4", "--fsdp", "--out", str(tmp_path / "fsdp")]
    job = torchrun(
        {"arguments": ddp}, {"arguments": fsdp}, *([] if gpu else ["gradients"]), gpu=gpu
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("training utterances") == 2  # the first rank's alone
    ddp, fsdp = weights(tmp_path / "ddp"), weights(tmp_path / "fsdp")
    assert ddp.keys() == fsdp.keys()
    return job, ddp, fsdp


def test_two_ranks_equal_one_process_and_fsdp_equals_ddp(tmp_path):
    job, ddp, fsdp = check_ranks(tmp_path)
    assert "gradients agree" in job.stdout
    for name, weight in ddp.items():
        torch.testing.assert_close(fsdp[name], weight, rtol=1e-5, atol=1e-6)
    for name in ("ddp", "fsdp"):
        results = json.loads((tmp_path / name / "results.json").read_text())
        assert results["processes"] == 2
        assert results["options"]["fsdp"] == (name == "fsdp")

    # What it leaves cannot be taken for another kind of run.
    out = ["--device", "cpu", *TINY.split(), *STREAMING, "--out", str(tmp_path / "ddp")]
    with pytest.raises(SystemExit, match=r"step-000000004 exists: continue it with --resume"):
        train_ctc.main(out)
    with pytest.raises(SystemExit, match="was written with torchrun: resume it with torchrun"):
        train_ctc.main([*out, "--resume"])
    checkpoint = distributed.newest(tmp_path / "ddp" / "checkpoints")
    three = SimpleNamespace(launched=True, size=3, device="cuda:2")
    message = "2 processes there and 3 here; --device is cpu there and cuda here"
    with pytest.raises(ValueError, match=message):
        training.read_checkpoint(
            checkpoint, train_ctc.parse(out), three, tones("train", 12, 0), "ABC"
        )
    (checkpoint / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is no checkpoint of train_ctc\.py: it lacks ranks"):
        training.read_checkpoint(checkpoint, train_ctc.parse(out), three, [], "")


# A rank dies between two steps in mid-epoch, and another while it writes the checkpoint of a step.
DEATHS = {
    "ddp": ([*STREAMING, "--ema", "0.9"], [1, "kill", 7], 6),
    "fsdp": (["--fsdp", "--bf16", "--ema", "0.9"], [0, "save", 7], 6),
}


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    resumed = []
    for name, (options, death, left) in DEATHS.items():
        arguments = [*options, "--steps", "9", "--out"]
        whole, killed = tmp_path / f"{name}-whole", tmp_path / f"{name}-killed"
        job = torchrun(
            {"arguments": [*arguments, str(whole)]},
            {"arguments": [*arguments, str(killed)], "die": death},
        )
        assert job.returncode != 0
        assert "SIGKILL" in job.stderr
        assert distributed.newest(killed / "checkpoints").name == f"step-{left:09}"
        assert not (killed / "checkpoint.pt").exists()
        resumed.append({"arguments": [*arguments, str(killed), "--resume"]})

    job = torchrun(*resumed)
    assert job.returncode == 0, job.stderr
    for name in DEATHS:
        whole, killed = tmp_path / f"{name}-whole", tmp_path / f"{name}-killed"
        (only,) = (killed / "checkpoints").iterdir()
        assert only.name == "step-000000009"
        expected, found = everything(whole), everything(killed)
        assert expected.keys() == found.keys()
        assert {"/rank0/rng", "/rank1/rng", "/rank1/position"} <= found.keys()
        final = weights(whole)
        mean = {p[6:]: t for p, t in expected.items() if p.startswith("/mean/")}
        assert {"head.weight", "head.bias"} < mean.keys() <= final.keys()
        assert all(torch.equal(tensor, final[name]) for name, tensor in mean.items())
        assert not torch.equal(expected["/model/head.weight"], final["head.weight"])
        for path, value in expected.items():
            other = found[path]
            same = torch.equal(value, other) if torch.is_tensor(value) else value == other
            assert same, (name, path)
        for path, weight in final.items():
            assert torch.equal(weight, weights(killed)[path]), (name, path)


def test_an_error_in_one_rank_ends_the_job_with_it(tmp_path):
    arguments = [*STREAMING, "--steps", "9", "--out", str(tmp_path / "out")]
    job = torchrun({"arguments": arguments, "die": [1, "raise", 5]})
    assert job.returncode != 0
    assert "RuntimeError: rank 1 is broken" in job.stderr


@pytest.mark.parametrize(("utterances", "accumulate"), [(7, 3), (2, 5)])
def test_accumulated_micro_batches_equal_one_batch(utterances, accumulate):
    batch = tones("train", utterances, 3)
    loss, expected = gradients_of(ALONE, batch, 1, lambda model: model)
    same, grads = gradients_of(ALONE, batch, accumulate, lambda model: model)
    assert same == pytest.approx(loss, abs=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 5, 12, 13])
def test_shares_hold_every_utterance_once(ranks, accumulate, size):
    batch = list(range(100, 100 + size))
    shares = [
        data.share(batch, rank=rank, ranks=ranks, accumulate=accumulate) for rank in range(ranks)
    ]
    assert len({len(of_rank) for of_rank in shares}) == 1
    assert len(shares[0]) <= accumulate
    flat = [share for of_rank in shares for share in of_rank]
    assert sorted(i for share in flat if share.count for i in share.indices) == batch
    assert all(share.indices for share in flat)
    assert all(share.count in (0, len(share.indices)) for share in flat)
    counts = [sum(share.count for share in of_rank) for of_rank in shares]
    assert max(counts) - min(counts) <= accumulate


def test_fsdp_needs_torchrun(tmp_path):
    with pytest.raises(SystemExit, match="--fsdp: expected the processes of torchrun, got one"):
        train_ctc.main(["--fsdp", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"at most one process for each of 2 GPUs, got 4"):
        distributed.Ranks("cuda")
    with pytest.raises(
        ValueError, match="--device: expected cuda or cpu under torchrun, got cuda:1"
    ):
        distributed.Ranks("cuda:1")
    assert distributed.Ranks("cpu").rank == 2


COMPILE = ["--compile"] if hasattr(inductor_config, "strict_output_strides") else []
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


@pytest.mark.gpu
@two_gpus
def test_on_two_gpus_fsdp_equals_ddp(tmp_path):
    _, ddp, fsdp = check_ranks(tmp_path, gpu=True)
    for name, weight in ddp.items():  # CTC's backward pass differs from run to run
        torch.testing.assert_close(fsdp[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("options", [["--bf16", "--compile"], ["--fsdp", "--bf16", *COMPILE]])
def test_on_two_gpus_killed_and_resumed(tmp_path, options):
    arguments = [*STREAMING, *options, "--ema", "0.9", "--steps", "9", "--out", str(tmp_path)]
    assert torchrun({"arguments": arguments, "die": [0, "save", 7]}, gpu=True).returncode != 0
    job = torchrun({"arguments": [*arguments, "--resume"]}, gpu=True)
    assert job.returncode == 0, job.stderr
    found = everything(tmp_path)
    assert found["/step"] == 9
    assert "/rank1/cuda_rng" in found
    assert torch.equal(found["/mean/head.weight"].cpu(), weights(tmp_path)["head.weight"])
