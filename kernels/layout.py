"""Lay the kernel package out as the `kernels` library loads it, without the Nix builder.

    python kernels/layout.py                 # kernels/build/torch-{cpu,cuda,rocm,xpu}
    python kernels/layout.py --output DIR    # DIR/build/...; then get_local_kernel(Path(DIR))

The package is pure Python, so a build is a copy of torch-ext/ldsa with two generated files:
_ops.py, which gives the build's operators a namespace of their own, and metadata.json. The
namespace is a hash of the sources: laying out the same sources again changes nothing.
"""

import argparse
import base64
import hashlib
import json
import tempfile
from pathlib import Path

from kernels._rust import Build, Digest, DigestAlgorithm, Metadata
from kernels.validate import default_metadata_validators
from kernels.variants import parse_variant

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent

_OPS = '''\
"""The operator namespace of this build (generated)."""

import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    """Put an operator's name into this build's namespace."""
    return f"{id}::{{op_name}}"
'''


def lay_out(output: Path, backends: list[str] | None = None) -> list[Path]:
    """Write one build for each backend under `output`/build.

    Every build is made and validated beside its final place and then renamed into it, so a build
    that is there is whole, whatever interrupted this function.

    Args:
        output: the directory to pass to `kernels.get_local_kernel`.
        backends: names out of build.toml; all of them when None.

    Returns:
        The build directories, in the order of the backends.

    Raises:
        ValueError: build.toml does not parse or does not list a backend.
        FileExistsError: a build's place is taken by something that is not a build of this kernel.
    """
    known = [str(backend) for backend in Build.open(ROOT).general.backends]
    unknown = sorted(set(backends or []) - set(known))
    if unknown:
        raise ValueError(f"build.toml lists the backends {known}, not {unknown}")
    with open(ROOT / "build.toml", "rb") as file:
        config = tomllib.load(file)
    (output / "build").mkdir(parents=True, exist_ok=True)
    return [_lay_out_one(output / "build", config, backend) for backend in backends or known]


def _lay_out_one(builds: Path, config: dict, backend: str) -> Path:
    general = config["general"]
    target = builds / f"torch-{backend}"
    parse_variant(target.name)
    _refuse_foreign(target, general["name"])

    sources = _sources(config)
    identifier = f"_{general['name']}_{backend}_{_fingerprint(sources)}"
    # The leading dot keeps the loader from taking an unfinished build for a variant.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=builds) as scratch:
        build = Path(scratch, "new")
        for name, content in sources.items():
            path = build / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        (build / "_ops.py").write_text(_OPS.format(id=identifier), encoding="utf-8")
        digest = Digest.hash_variant(DigestAlgorithm.SHA256, build)
        metadata = {
            "name": general["name"],
            "id": identifier,
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": dict(sorted(digest.files.items()))},
        }
        (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        validate(build)
        if target.exists():
            if _same(build, target):
                return target
            old = target.rename(Path(scratch, "old"))
            try:
                build.rename(target)
            except OSError:
                old.rename(target)
                raise
        else:
            build.rename(target)
    return target


def validate(build: Path) -> Metadata:
    """Check one build directory with the loader's own code.

    Raises:
        ValueError: metadata.json is missing, unreadable or without a digest.
        kernels._rust.DigestValidationError: a file is missing, unknown or changed.
    """
    metadata = Metadata.read_from_file(build / "metadata.json")
    if metadata.digest is None:
        raise ValueError(f"{build / 'metadata.json'} has no digest")
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, build))
    for validator in default_metadata_validators():
        validator.validate_metadata(metadata=metadata, variant=build.name)
    return metadata


def _sources(config: dict) -> dict[str, bytes]:
    """The files that kernel-builder takes from the package, by their path in it."""
    general, noarch = config["general"], config["torch-noarch"]
    package = ROOT / "torch-ext" / general["name"].replace("-", "_")
    suffixes = {f".{extension}" for extension in noarch.get("pyext", ["py", "pyi"])}
    return {
        path.relative_to(package).as_posix(): path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.suffix in suffixes and path.name != "_ops.py"
    }


def _fingerprint(sources: dict[str, bytes]) -> str:
    """A short identifier of the sources that is also part of a Python name."""
    total = hashlib.sha256()
    for name, content in sources.items():
        total.update(f"{name}\0{len(content)}\0".encode())
        total.update(content)
    return base64.b32encode(total.digest()[:5]).decode().lower()


def _refuse_foreign(target: Path, name: str) -> None:
    if not (target.exists() or target.is_symlink()):
        return
    try:
        ours = (
            not target.is_symlink()
            and str(Metadata.read_from_file(target / "metadata.json").name) == name
        )
    except (OSError, ValueError):
        ours = False
    if not ours:
        raise FileExistsError(f"{target} is not a build of the kernel {name!r}, left as it is")


def _same(build: Path, target: Path) -> bool:
    """Whether `target` holds, byte for byte, what `build` holds."""

    def content(directory: Path) -> dict[str, bytes]:
        return {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in directory.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    return content(build) == content(target)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Lay out loadable builds of the kernel package.")
    parser.add_argument("--output", type=Path, default=ROOT, help="default: this directory")
    parser.add_argument("--backends", nargs="+", help="default: all that build.toml lists")
    arguments = parser.parse_args()
    for build in lay_out(arguments.output, arguments.backends):
        print(build)


if __name__ == "__main__":
    main()
