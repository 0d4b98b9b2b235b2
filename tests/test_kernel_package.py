"""The kernel package as the `kernels` library sees it: its sources, its builds, its layers."""

import ast
import importlib.util
import inspect
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from torch import nn

kernels = pytest.importorskip("kernels")
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping  # noqa: E402
from kernels._rust import Build, DigestValidationError, Metadata  # noqa: E402

from ldsa_nn import _kernels  # noqa: E402

SOURCE = ROOT / "kernels" / "torch-ext" / "ldsa"
BACKENDS = ["cpu", "cuda", "rocm", "xpu"]
# Where an accelerator is, the kernel itself runs; elsewhere the op's CPU path.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load_layout():
    spec = importlib.util.spec_from_file_location("layout", ROOT / "kernels" / "layout.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


layout = load_layout()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A laid-out kernel repository. One for the module: a process loads a build once."""
    path = tmp_path_factory.mktemp("repository")
    layout.lay_out(path)
    return path


@pytest.fixture(scope="module")
def k(repository):
    return kernels.get_local_kernel(repository)


def inputs(dtype=torch.float32, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    a_logits = torch.randn(2, 3, 7, 21, generator=generator, dtype=torch.float64)
    v = torch.randn(2, 3, 5, 21, generator=generator, dtype=torch.float64)
    return tuple(x.to(DEVICE, dtype).requires_grad_(requires_grad) for x in (a_logits, v))


# The sources


def test_build_toml():
    assert [str(b) for b in Build.open(ROOT / "kernels").general.backends] == BACKENDS


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.name)
def test_sources_keep_the_rules_of_kernel_builder(path):
    """Python 3.9 syntax; the standard library, torch, Triton and relative imports, no others."""
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1, f"{path.name} imports from above the package"
        for name in names:
            root = name.split(".")[0]
            assert root in {"torch", "triton", *sys.stdlib_module_names}, f"{path.name}: {name}"


def test_the_package_has_no_part_of_its_own_name():
    # kernel-builder refuses it: the place is taken by what older loaders look for.
    assert not (SOURCE / "ldsa").exists()


# Laying out


def test_layout_makes_a_valid_build_for_each_backend(repository):
    for backend in BACKENDS:
        build = repository / "build" / f"torch-{backend}"
        metadata = layout.validate(build)
        assert (str(metadata.name), metadata.version, metadata.license) == ("ldsa", 1, "Apache-2.0")
        assert str(metadata.backend.backend_type) == backend
        files = {path.name for path in SOURCE.iterdir() if path.suffix == ".py"} | {"_ops.py"}
        assert set(metadata.digest.files) == files
        assert f"torch.ops.{metadata.id}\n" in (build / "_ops.py").read_text()
    assert len({p.name for p in (repository / "build").iterdir()}) == len(BACKENDS)


def test_layout_again_changes_nothing(tmp_path):
    (build,) = layout.lay_out(tmp_path, ["cpu"])
    before = {path: path.stat().st_mtime_ns for path in (build, *build.iterdir())}
    assert layout.lay_out(tmp_path, ["cpu"]) == [build]
    assert {path: path.stat().st_mtime_ns for path in (build, *build.iterdir())} == before


def test_layout_replaces_an_outdated_build_whole(tmp_path):
    (build,) = layout.lay_out(tmp_path, ["cpu"])
    (build / "_ops.py").write_text("")
    (build / "gone.py").write_text("")
    with pytest.raises(DigestValidationError):
        layout.validate(build)
    layout.lay_out(tmp_path, ["cpu"])
    layout.validate(build)
    assert not (build / "gone.py").exists()


def test_layout_refuses_a_directory_that_is_not_its_build(tmp_path):
    taken = tmp_path / "build" / "torch-cpu"
    taken.mkdir(parents=True)
    (taken / "thesis.txt").write_text("the only copy")
    with pytest.raises(FileExistsError, match="not a build of the kernel 'ldsa'"):
        layout.lay_out(tmp_path, ["cpu"])
    (taken / "metadata.json").write_text(
        json.dumps(
            {
                "name": "other",
                "id": "_other_cpu_1",
                "version": 1,
                "license": "mit",
                "python-depends": [],
                "backend": {"type": "cpu"},
            }
        )
    )
    assert str(Metadata.read_from_file(taken / "metadata.json").name) == "other"
    with pytest.raises(FileExistsError, match="not a build of the kernel 'ldsa'"):
        layout.lay_out(tmp_path, ["cpu"])
    assert (taken / "thesis.txt").read_text() == "the only copy"


@pytest.mark.parametrize("built_before", [True, False])
def test_an_interrupted_layout_leaves_what_was_there(tmp_path, monkeypatch, built_before):
    if built_before:
        (build,) = layout.lay_out(tmp_path, ["cpu"])
        (build / "_ops.py").write_text("# outdated")

    def interrupt(build):
        raise KeyboardInterrupt

    monkeypatch.setattr(layout, "validate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        layout.lay_out(tmp_path, ["cpu"])
    left = list((tmp_path / "build").iterdir())
    assert left == ([build] if built_before else [])
    assert not built_before or (build / "_ops.py").read_text() == "# outdated"


def test_layout_names_an_unknown_backend(tmp_path):
    with pytest.raises(ValueError, match="not \\['tpu'\\]"):
        layout.lay_out(tmp_path, ["tpu", "cpu"])
    assert not (tmp_path / "build").exists()


# Loading


def test_the_published_names_and_their_positional_form(k):
    assert {"ldsa_local_attention", "eager_ldsa", "ldsa_weights"} <= set(k.__all__)
    for function in (k.ldsa_local_attention, k.eager_ldsa):
        assert list(inspect.signature(function).parameters)[:4] == [
            "a_logits",
            "v",
            "left",
            "right",
        ]
    a_logits, v = inputs()
    expected = k.eager_ldsa(a_logits.double(), v.double(), 4, 2)
    for function in (k.ldsa_local_attention, k.eager_ldsa):
        out = function(a_logits, v, 4, 2)
        assert out.dtype == v.dtype
        assert out.is_contiguous()
        torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=0)


def test_the_cpu_build_loads_too(repository, k):
    cpu = kernels.get_local_kernel(repository, backend="cpu")
    (metadata,) = (m.metadata for m in kernels.get_loaded_kernels() if m.module is cpu)
    assert metadata.id.startswith("_ldsa_cpu_")
    a_logits, v = (x.cpu() for x in inputs())
    out = cpu.ldsa_local_attention(a_logits, v, 4, 2)
    torch.testing.assert_close(out, _kernels.ldsa_local_attention(a_logits, v, 4, 2))


def operators(namespace):
    names = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1] for name in names if name.startswith(f"{namespace}::")}


def test_two_copies_live_in_one_process_and_stay_apart(k):
    pytest.importorskip("triton")
    ours = sys.modules["ldsa_nn._ldsa"]
    assert k is not ours
    prefix = k._ops.add_op_namespace_prefix("")
    assert prefix != ours._ops.add_op_namespace_prefix("")
    assert k._ops.ops is not ours._ops.ops
    theirs = operators(prefix.removesuffix("::"))
    assert theirs
    assert theirs == operators("ldsa_nn")
    # Each copy calls its own operators.
    for module in (k, ours):
        for name in theirs:
            assert getattr(module._ops.ops, name).default.namespace == module._ops.ops.name
    a_logits, v = inputs(requires_grad=True)
    expected = torch.autograd.grad(ours.eager_ldsa(a_logits, v, 4, 2).sum(), (a_logits, v))
    for module in (k, ours, k):
        out = module.ldsa_local_attention(a_logits, v, 4, 2, implementation="triton")
        torch.testing.assert_close(torch.autograd.grad(out.sum(), (a_logits, v)), expected)


# The benchmark


@pytest.mark.parametrize("wrong", [None, "small_forward", "forward", "forward_backward"])
def test_the_benchmark_that_the_library_runs(repository, k, monkeypatch, wrong):
    from kernels.cli import benchmark

    (script,) = benchmark.discover_benchmark_scripts("ldsa", ROOT / "kernels")
    (form,) = benchmark.discover_benchmark_classes(script, repository)
    # The library asks what torch was built for, not whether a GPU is there.
    monkeypatch.setattr(benchmark, "_backend", lambda: SimpleNamespace(name=DEVICE))
    monkeypatch.setattr(form, "small", (2, 20))
    monkeypatch.setattr(form, "large", (32, 30))
    if wrong:
        monkeypatch.setattr(form, f"setup_{wrong}", spoiled(getattr(form, f"setup_{wrong}")))
        with pytest.raises(RuntimeError, match=f"^Verification failed for {wrong}$"):
            benchmark.run_benchmark_class(form, 1, 0, str(repository), True, "local")
        return
    results, sha = benchmark.run_benchmark_class(form, 2, 1, str(repository), True, "local")
    assert set(results) == {"small_forward", "forward", "forward_backward"}
    assert all(result.verified and result.iterations == 2 for result in results.values())
    assert sha


def spoiled(setup):
    """The same, of a kernel whose results are a tenth off."""

    def call(self):
        setup(self)
        op = self.kernel.ldsa_local_attention
        self.kernel = SimpleNamespace(
            ldsa_local_attention=lambda *args: op(*args) * 1.1, eager_ldsa=self.kernel.eager_ldsa
        )

    return call


# Layers


@kernels.use_kernel_forward_from_hub("LdsaLocalAttention")
class Core(nn.Module):
    def forward(self, a_logits, v, left, right):
        raise AssertionError("kernelize left the fallback in place")


@kernels.use_kernel_forward_from_hub("LdsaPaddedLocalAttention")
class PaddedCore(nn.Module):
    def forward(
        self,
        a_logits,
        v,
        left,
        right,
        *,
        lengths=None,
        starts=None,
        edge="zero",
        dropout_p=0.0,
    ):
        raise AssertionError("kernelize left the fallback in place")


class Model(nn.Module):
    def __init__(self, core):
        super().__init__()
        self.core = core
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, a_logits, v, **options):
        return self.core(a_logits, v * self.scale, 4, 2, **options)


MODES = [
    Mode.INFERENCE,
    Mode.TRAINING,
    Mode.INFERENCE | Mode.TORCH_COMPILE,
    Mode.TRAINING | Mode.TORCH_COMPILE,
]


def kernelized(core, mode, repository):
    name = core.kernel_layer_name
    mapping = {name: {DEVICE: LocalLayerRepository(repository, layer_name=name)}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        model = kernelize(Model(core()).to(DEVICE), mode=mode, device=DEVICE, use_fallback=False)
    return torch.compile(model, fullgraph=True) if Mode.TORCH_COMPILE in mode else model


def assert_like_eager(model, mode, dtype, **options):
    a_logits, v = inputs(dtype, requires_grad=Mode.TRAINING in mode)
    wide = [x.detach().double().requires_grad_() for x in (a_logits, v)]
    expected = _kernels.eager_ldsa(*wide, 4, 2, **options)
    atol = 1e-12 if dtype is torch.float64 else 1e-5
    with torch.set_grad_enabled(Mode.TRAINING in mode):
        out = model(a_logits, v, **options)
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=0)
    if Mode.TRAINING in mode:
        grad = torch.linspace(-1, 1, out.numel(), device=DEVICE, dtype=dtype).view_as(out)
        got = torch.autograd.grad(out, (a_logits, v), grad)
        want = torch.autograd.grad(expected, wide, grad.double())
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x.double(), y, atol=atol, rtol=0)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_kernelize(repository, mode, dtype):
    assert_like_eager(kernelized(Core, mode, repository), mode, dtype)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_kernelize_padded(repository, mode):
    options = {
        "lengths": torch.tensor([21, 9], device=DEVICE),
        "starts": torch.tensor([0, 3], device=DEVICE),
        "edge": "renormalize",
    }
    model = kernelized(PaddedCore, mode, repository)
    assert_like_eager(model, mode, torch.float32, **options)


@kernels.use_kernel_forward_from_hub("TiledDeltaRule")
class DeltaCore(nn.Module):
    def forward(
        self,
        q,
        k,
        v,
        g,
        beta,
        *,
        scale=None,
        initial_state=None,
        output_final_state=False,
        lengths=None,
        cu_seqlens=None,
    ):
        raise AssertionError("kernelize left the fallback in place")


@pytest.mark.parametrize("mode", [Mode.INFERENCE, Mode.TRAINING | Mode.TORCH_COMPILE], ids=str)
def test_kernelize_the_delta_rule(repository, mode):
    generator = torch.Generator().manual_seed(0)
    q, k, v, g, beta = (
        torch.randn(2, 20, 1, *n, generator=generator).to(DEVICE)
        for n in ((8,), (8,), (6,), (2,), ())
    )
    q, k = (nn.functional.normalize(x, dim=3) for x in (q, k))
    tensors = q, k, v, -g.square(), 2 * beta.sigmoid()
    options = {"lengths": torch.tensor([20, 9], device=DEVICE), "output_final_state": True}
    expected = _kernels.tiled_delta_rule(*(x.double() for x in tensors), **options)

    layer = LocalLayerRepository(repository, layer_name="TiledDeltaRule")
    with use_kernel_mapping({"TiledDeltaRule": {DEVICE: layer}}, inherit_mapping=False):
        model = nn.Sequential(DeltaCore()).to(DEVICE)
        core = kernelize(model, mode=mode, device=DEVICE, use_fallback=False)[0]
    if Mode.TORCH_COMPILE in mode:
        core = torch.compile(core, fullgraph=True, backend="aot_eager")
    tensors = [x.requires_grad_(Mode.TRAINING in mode) for x in tensors]
    results = core(*tensors, **options)
    for result, want in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), want, atol=1e-5, rtol=0)
    if Mode.TRAINING in mode:
        results[0].sum().backward()
        assert all(x.grad.isfinite().all() for x in tensors)
