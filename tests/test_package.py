"""The project as it is shipped: its tree, its wheel, its imports and who may import whom."""

import ast
import inspect
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from conftest import ROOT

from ldsa_nn import _kernels

PACKAGE = ROOT / "ldsa_nn"
KERNEL = ROOT / "kernels" / "torch-ext" / "ldsa"
CORE = {"torch", "safetensors", "tqdm"}

# Lower layers first; a module imports from lower layers only, never sideways.
LAYERS = [
    {"_kernels"},
    {"functional", "streaming"},
    {"ldsa", "sla"},
    {"convert", "encoder", "hosts"},
    {"replace"},
    {"__init__"},
]


def run(code, *, path, cwd, **variables):
    """Run Python code in a process that finds ldsa_nn in `path` alone; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(path), **variables}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def build(source, target, into):
    """Build a "wheel" or "sdist" of the project in `source` without touching the network."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = into.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked_sdist(tmp_path_factory):
    sdist = build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))
    into = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    (root,) = into.iterdir()
    return root


def sources(root):
    """The files that a wheel of the checkout in `root` holds, by their path in the wheel."""
    places = {"ldsa_nn": root / "ldsa_nn", "ldsa_nn/_ldsa": root / "kernels/torch-ext/ldsa"}
    return {
        f"{name}/{path.relative_to(place).as_posix()}": path.read_bytes()
        for name, place in places.items()
        for path in place.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "_ops.py"
    }


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name
        }


def test_tree():
    for name in (
        "pyproject.toml README.md LICENSE CHANGELOG.md .gitignore .pre-commit-config.yaml .ci/run"
        " ldsa_nn/__init__.py ldsa_nn/py.typed kernels/build.toml kernels/flake.nix"
        " kernels/CARD.md kernels/README.md kernels/torch-ext/ldsa/__init__.py"
    ).split():
        assert (ROOT / name).is_file(), name
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_kernels_folder_does_not_hide_the_package_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    pytest.importorskip("kernels")
    code = "import kernels; print(kernels.__file__)"
    found = Path(run(code, path=ROOT, cwd=ROOT))
    assert found.name == "__init__.py"
    assert ROOT / "kernels" not in found.parents


def test_wheel_holds_the_one_kernel_source(wheel):
    assert contents(wheel) == sources(ROOT)


def test_wheel_from_sdist_is_the_same(wheel, unpacked_sdist, tmp_path):
    kernel = unpacked_sdist / "kernels" / "torch-ext" / "ldsa"
    assert not list(unpacked_sdist.rglob("_ops.py"))
    # What a build and an import leave behind must not reach the wheel.
    (kernel / "_ops.py").write_text("raise RuntimeError\n")
    (kernel / "__pycache__").mkdir()
    (kernel / "__pycache__" / "ldsa.pyc").write_bytes(b"")
    assert contents(build(unpacked_sdist, "wheel", tmp_path)) == contents(wheel)


def test_sdist_can_be_tested_and_built(unpacked_sdist):
    for name in ("tests/conftest.py", "kernels/build.toml", "kernels/layout.py", "CHANGELOG.md"):
        assert (unpacked_sdist / name).is_file(), name


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        yield HeaderParser().parsestr(archive.read(name).decode())


def test_metadata(metadata, wheel):
    assert metadata["Name"] == "ldsa_nn"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) >= {"examples", "test", "dev"}
    required = metadata.get_all("Requires-Dist")
    core = {re.match(r"[\w.-]+", line)[0] for line in required if "extra ==" not in line}
    # No Triton: its wheels do not exist everywhere, and torch brings it where they do.
    assert core == CORE
    assert not [line for line in required if line.startswith(("triton", "pytorch-triton"))]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        scripts = archive.read(name).decode()
    assert "ldsa-convert = ldsa_nn.convert:main" in scripts
    assert "ldsa-replace = ldsa_nn.replace:main" in scripts


CHECK = """
import torch, ldsa_nn, sys
from ldsa_nn import _kernels
from ldsa_nn._kernels import eager_ldsa, ldsa_local_attention
import ldsa_nn._ldsa
assert ldsa_local_attention.__module__.startswith("ldsa_nn._ldsa"), ldsa_local_attention.__module__
assert sys.modules["ldsa_nn._ldsa"] is ldsa_nn._ldsa
assert ldsa_nn._ldsa._ops.add_op_namespace_prefix("x") == "ldsa_nn::x"
a, v = torch.randn(2, 2, 4, 9), torch.randn(2, 2, 3, 9)
torch.testing.assert_close(
    ldsa_local_attention(a, v, 2, 1), eager_ldsa(a.double(), v.double(), 2, 1).float()
)
print(ldsa_nn.__file__, ldsa_nn._ldsa.__file__, sep="\\n")
"""


def test_a_bare_checkout_imports_the_source_in_place(tmp_path):
    files = run(CHECK, path=ROOT, cwd=tmp_path).splitlines()
    assert files == [str(PACKAGE / "__init__.py"), str(KERNEL / "__init__.py")]


def test_an_editable_install_imports_the_source_in_place(tmp_path):
    backend = pytest.importorskip("hatchling.build")
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        name = backend.build_editable(str(tmp_path))
    finally:
        os.chdir(here)
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / name) as archive:
        archive.extractall(site)
    assert not (site / "ldsa_nn").exists(), "a copy would hide later edits"
    code = f"import site; site.addsitedir({str(site)!r})\n{CHECK}"
    files = run(code, path="", cwd=tmp_path).splitlines()
    assert files == [str(PACKAGE / "__init__.py"), str(KERNEL / "__init__.py")]


def test_the_wheel_imports_its_own_copy(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    files = run(CHECK, path=tmp_path / "site", cwd=tmp_path).splitlines()
    assert files == [
        str(tmp_path / "site/ldsa_nn/__init__.py"),
        str(tmp_path / "site/ldsa_nn/_ldsa/__init__.py"),
    ]


def test_a_broken_kernel_package_leaves_nothing_behind(tmp_path):
    site = tmp_path / "site"
    for name, content in sources(ROOT).items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
    with (site / "ldsa_nn/_ldsa/__init__.py").open("a") as file:
        file.write("\nraise OSError('broken')\n")
    code = """
import sys
for _ in range(2):
    try:
        import ldsa_nn
    except OSError as error:
        print(error, [name for name in sys.modules if name.startswith("ldsa_nn")])
"""
    assert run(code, path=site, cwd=tmp_path).splitlines() == ["broken []"] * 2


def test_functions_pickle_by_a_stable_name(tmp_path):
    code = "import pickle, sys; from ldsa_nn._kernels import *; "
    dumped = run(code + "print(pickle.dumps(ldsa_local_attention).hex())", path=ROOT, cwd=tmp_path)
    load = f"import pickle; print(pickle.loads(bytes.fromhex({dumped!r})).__qualname__)"
    assert run(load, path=ROOT, cwd=tmp_path) == "ldsa_local_attention"


def test_type_checkers_see_the_real_signatures():
    tree = ast.parse((PACKAGE / "_kernels.py").read_text(encoding="utf-8"))
    declared = {
        node.name: node.args
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.FunctionDef)
    }
    assert set(declared) == set(_kernels.__all__)
    for name, arguments in declared.items():
        for argument in [*arguments.args, *arguments.kwonlyargs]:
            argument.annotation = None
        real = inspect.signature(getattr(_kernels, name)).parameters.values()
        bare = inspect.Signature([p.replace(annotation=p.empty) for p in real])
        assert f"({ast.unparse(arguments)})" == str(bare), name


def test_works_without_triton(tmp_path):
    code = """
import sys
sys.modules["triton"] = None  # what `import triton` finds where it is not installed
import torch
from ldsa_nn._kernels import eager_ldsa, ldsa_local_attention
a, v = torch.randn(2, 2, 4, 9, requires_grad=True), torch.randn(2, 2, 3, 9, requires_grad=True)
out = ldsa_local_attention(a, v, 2, 1)
out.sum().backward()
torch.testing.assert_close(out, eager_ldsa(a.double(), v.double(), 2, 1).float())
try:
    ldsa_local_attention(a, v, 2, 1, implementation="triton")
except RuntimeError as error:
    print(error)
"""
    assert "triton" in run(code, path=ROOT, cwd=tmp_path).lower()


def test_import_is_quick(tmp_path):
    code = """
import time, torch
start = time.process_time()
import ldsa_nn
print(time.process_time() - start)
"""
    # The processor's time, not the clock's: other tests run beside this one.
    assert min(float(run(code, path=ROOT, cwd=tmp_path)) for _ in range(2)) < 0.7


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def imports(path):
    """Absolute names of the modules that a file imports, inside functions and type checks too."""
    package = ["ldsa_nn", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from ldsa_nn import convert` names a module, `from ldsa_nn.convert import main` not.
            if module in ("ldsa_nn", "ldsa_nn.hosts"):
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def layer_of(module):
    return next((i for i, names in enumerate(LAYERS) if module in names), None)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_modules_import_lower_layers_only(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert layer_of(own) is not None, f"give {own} a place in LAYERS"
    for imported in imports(path):
        if imported.split(".")[0] != "ldsa_nn":
            continue
        other = [*imported.split("."), "__init__"][1]
        if own == "hosts" and other == "hosts":
            continue  # the parts of one package
        assert layer_of(other) is not None, f"{imported}: not a module"
        assert layer_of(other) < layer_of(own), f"{own} must not import {imported}"
        if other == "_kernels":
            assert own in LAYERS[1], f"{own} must reach the kernels through functional"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_modules_import_what_the_metadata_requires(path):
    allowed = {"ldsa_nn", *CORE, *sys.stdlib_module_names}
    parts = path.relative_to(PACKAGE).parts
    if parts[0] == "hosts":
        allowed.add(path.stem)  # hosts/torchaudio.py may import torchaudio, and no other toolkit
    foreign = {name.split(".")[0] for name in imports(path)} - allowed
    assert not foreign, f"{name_of(path)} imports {sorted(foreign)}"
