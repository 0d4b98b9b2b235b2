"""What every test shares: where Triton runs, how many cores a worker takes, where the data is."""

import importlib.util
import os
from pathlib import Path

import pytest

CI = os.environ.get("CI", "").lower() == "true"
ROOT = Path(__file__).resolve().parent.parent
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
CORES = os.cpu_count() or 1

if WORKERS > 1:
    # Before torch starts its thread pools. Examples run by a test in a process of their own get
    # the same share.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, CORES // WORKERS)))
# Nothing here may wait for, or depend on, a network.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Before anything imports the kernels: triton.jit reads it where a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # A deadline measures the machine, and a CI run must not fail on a draw of its own.
    settings.register_profile("ldsa_nn", deadline=None, derandomize=CI)
    settings.load_profile("ldsa_nn")


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none, and start the longest tests first."""
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def true_float32():
    """No TF32 in products that tests compare: SpeechBrain switches it on when it is imported."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="session")
def data_dir():
    """The folder of real speech beside the checkout. Missing, it is a skip, and in CI a failure."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        (pytest.fail if CI else pytest.skip)(f"no speech data in {path}")
    return path
